/* SPDX-License-Identifier: MIT
 *
 * Running a rank function in many corners of the matrix: transports, devices, numbers of ranks, processes and
 * threads. The rank function gets its corner as `arg`; what it finds out it leaves in memory that all ranks share. */
#ifndef FSDP_TESTS_RANKS_H
#define FSDP_TESTS_RANKS_H

#include "support/testing.h"

#include <fsdp/fsdp.h>

typedef struct corner {
    const char *transport, *device;
    fsdp_mode mode;
    int ranks, shards; /* shards: as fsdp_unit_opts; in_corners() sets it to 0 */
    bool threads;
    void *arg, *shared;
} corner;

/* Which corners. A field left at zero: all of that kind ("shm" and "copy"; "cpu" and "guard"; 1, 2, 3, 5, 8 ranks;
 * processes and threads; mode full). */
typedef struct corners {
    const char *transport, *device;
    const int *ranks; /* ends with 0 */
    int at_least;     /* ranks */
    bool processes_only, threads_only;
    bool all_modes;
    void *arg;
    size_t shared;    /* bytes of shared memory, zeroed for each corner */
    void (*after)(const corner *c); /* called by the parent when the ranks have ended */
} corners;

/* Fails the test, naming the corner, where a launch fails. */
void in_corners(fsdp_rank_fn fn, const corners *which);

/* One launch; the status is the caller's to judge. */
fsdp_status in_corner(fsdp_rank_fn fn, const corner *c);

/* fsdp_comm_get_stats() as a value. */
fsdp_comm_stats comm_stats(const fsdp_comm *comm);

/* Zeroed memory that forked ranks share with their parent. */
void *shared_alloc(size_t bytes);
void shared_free(void *p, size_t bytes);

/* "copy guard full, 3 ranks (threads)"; lives until the thread's next call. */
const char *corner_name(const corner *c);

/* Runs fn in a forked child and returns its wait status. SIGSEGV is not caught there, whoever would like to. */
int in_child(void (*fn)(void *arg), void *arg);

/* Asserts that fn dies of SIGSEGV; does nothing where there is no fork. */
void assert_faults(void (*fn)(void *arg), void *arg);

#endif
