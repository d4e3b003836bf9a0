/* SPDX-License-Identifier: MIT
 *
 * Where a thread is within functions of the program that the library calls and waits for: callbacks, hooks, the log. What called
 * them is in the midst of something, so they may not call all of it (comm/call.h). */
#ifndef FSDPI_BASE_WITHIN_H
#define FSDPI_BASE_WITHIN_H

#include <fsdp/defs.h>

typedef struct fsdpi_within {
    const struct fsdpi_within *outer;
    const char *barred; /* what it is, where it may use no communicator at all; NULL: not those whose calls are under way */
} fsdpi_within;

/* The innermost; NULL: none. Its address says which thread it is. */
extern _Thread_local const fsdpi_within *fsdpi_within_now;

static inline void fsdpi_within_begin(fsdpi_within *w, const char *barred)
{
    *w = (fsdpi_within){ .outer = fsdpi_within_now, .barred = barred };
    fsdpi_within_now = w;
}

static inline void fsdpi_within_end(const fsdpi_within *w)
{
    fsdpi_within_now = w->outer;
}

#endif
