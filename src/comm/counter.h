/* SPDX-License-Identifier: MIT
 *
 * Counters in shared memory that only go up, and waiting for them. Everything that one rank tells another is told
 * by such a counter: what was written before a set is seen after the wait that it ends (release, acquire).
 *
 * Waiting spins for a moment (the other rank runs on another CPU), yields (it may want this one), then sleeps on a
 * futex in short naps. Between naps it looks whether waiting still makes sense; see fsdpi_wait_check_fn. */
#ifndef FSDPI_COMM_COUNTER_H
#define FSDPI_COMM_COUNTER_H

#include <fsdp/status.h>

#include <stdatomic.h>

/* One a cache line: neighbours are written by different ranks. */
typedef struct fsdpi_counter {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} fsdpi_counter;

/* Comparisons wrap: a counter may pass 2^32 as long as nobody is 2^31 behind. */
static inline bool fsdpi_counter_reached(const fsdpi_counter *c, uint32_t at_least)
{
    return (int32_t)(atomic_load_explicit(&((fsdpi_counter *)(uintptr_t)c)->value, memory_order_acquire) - at_least) >= 0;
}

void fsdpi_counter_set(fsdpi_counter *c, uint32_t value);

/* Called now and then by a waiter; anything but FSDP_OK ends the wait with that status. waited_ns: so far. */
typedef fsdp_status (*fsdpi_wait_check_fn)(void *arg, int64_t waited_ns);

/* Waits until *c has reached at_least. */
fsdp_status fsdpi_counter_wait(fsdpi_counter *c, uint32_t at_least, fsdpi_wait_check_fn check, void *arg);

#endif
