/* SPDX-License-Identifier: MIT
 *
 * Whether ranks have the same values, and where not. Ranks tell each other a hash; only where hashes differ do they go on,
 * together, to the first parameter and element: so it costs one exchange where all is well. */
#ifndef FSDPI_SHARD_COMPARE_H
#define FSDPI_SHARD_COMPARE_H

#include "shard/unit.h"

/* This rank's values of flat elements [from, to). Ranks that have the same range are compared. */
typedef struct fsdpi_values {
    fsdp_unit *unit;
    int64_t from, to;
    const float *flat;         /* of element `from`: an address of the device, or of the host; or NULL: */
    const float *const *param; /* host memory of each whole parameter; NULL: all 0; or NULL: */
    const uint64_t *hash;      /* of each whole parameter: what differs is then known by parameter alone */
    const char *what;          /* for messages; NULL: "parameter" */
} fsdpi_values;

/* Where two ranks differ. The same on all ranks. */
typedef struct fsdpi_difference {
    bool found;
    int params;      /* how many parameters differ between these two */
    int param;       /* the first of them */
    int64_t element; /* and its first element that does; -1: not known */
    int rank[2];
    float value[2];
    const char *what;
} fsdpi_difference;

/* Collective; a meeting. */
fsdp_status fsdpi_compare(const fsdpi_values *v, fsdpi_op op, fsdpi_difference *out);
/* "parameter "w": element 3 is 0.5 on rank 0 and 0.25 on rank 1 (and 2 more parameters differ)" */
const char *fsdpi_difference_text(const fsdp_unit *u, const fsdpi_difference *d, char *text, size_t bytes);
/* Logs it: where the unit has replicas a warning, once a unit; else that each slice keeps its own, once a communicator. */
void fsdpi_difference_log(fsdp_unit *u, const fsdpi_difference *d);

/* Of host memory; NULL is zeros, as a parameter has that never had values. */
uint64_t fsdpi_hash_host(const float *x, int64_t numel);
/* Of elements [from, to), parameters alone. Waits for the compute stream. */
fsdp_status fsdpi_values_hash(const fsdpi_values *v, uint64_t *out);

#endif
