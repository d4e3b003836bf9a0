/* SPDX-License-Identifier: MIT
 *
 * Which elements of a tensor have been written: a sorted list of ranges that neither overlap nor touch. Who
 * writes a tensor from front to back has one range; the list grows only with the gaps. */
#ifndef FSDPI_FORMAT_RANGES_H
#define FSDPI_FORMAT_RANGES_H

#include <fsdp/status.h>

typedef struct fsdpi_range {
    int64_t first, end;
} fsdpi_range;

typedef struct fsdpi_ranges {
    fsdpi_range *r;
    int64_t count, room;
} fsdpi_ranges; /* zeroed = empty */

/* The first element of [first, end) that is in the list; end where none is. */
int64_t fsdpi_ranges_overlap(const fsdpi_ranges *s, int64_t first, int64_t end);
/* Makes sure that the next add needs no memory. */
fsdp_status fsdpi_ranges_reserve(fsdpi_ranges *s);
/* Adds [first, end), which overlaps nothing; after a reserve. */
void fsdpi_ranges_add(fsdpi_ranges *s, int64_t first, int64_t end);
/* The first gap in [0, numel); false where there is none. */
bool fsdpi_ranges_gap(const fsdpi_ranges *s, int64_t numel, fsdpi_range *gap);
void fsdpi_ranges_free(fsdpi_ranges *s);

#endif
