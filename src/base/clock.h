/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_BASE_CLOCK_H
#define FSDPI_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds on a clock that only goes forward and stands still while the machine sleeps. */
static inline int64_t fsdpi_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
