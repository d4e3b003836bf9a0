/* SPDX-License-Identifier: MIT
 *
 * Ranks and what passes between them. fsdp_launch() starts ranks and gives each a communicator:
 *
 *     static fsdp_status train(fsdp_comm *world, void *arg) { ... }
 *     fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = 4 }, train, NULL);
 *
 * Collective functions are called by every rank of the communicator, in the same order. Ranks that do different
 * things are told so, on every rank, with what each of them did (FSDP_ERR_COMM); fsdp_comm_reset() mends that. A rank
 * that is gone is final: everything returns FSDP_ERR_PEER within seconds.
 *
 * Threads: one thread at a time uses a communicator, with all that is made on it; which one may change between any two calls.
 * While a call is under way, each other call on that communicator that speaks to other ranks or changes anything is FSDP_ERR_STATE
 * and changes nothing: from another thread, and from within a function of the program that the call has called (one that sets
 * values, a policy, a hook). The message names both. Other communicators may be used there, but not in hooks on gradients and
 * in the log's function. A destructor that is refused so destroys nothing, and logs it. */
#ifndef FSDP_COMM_H
#define FSDP_COMM_H

#include <fsdp/status.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_comm fsdp_comm;

/* What a rank runs. Its status is the rank's; an error of one rank ends the others. */
typedef fsdp_status (*fsdp_rank_fn)(fsdp_comm *world, void *arg);

typedef struct fsdp_launch_opts {
    /* How many ranks. 0: those of `fsdp run`; one, in this process, where there is no launcher. */
    int ranks;
    /* Threads of this process instead of processes. A rank that crashes then takes the process along. */
    bool ranks_are_threads;
    /* "shm": whole parameters lie once in memory that all ranks map. "copy": every rank gathers into buffers of its
     * own, as over a network; for tests. NULL: "shm", or "self" for one rank. */
    const char *transport;
    /* Threads of each rank, for kernels. 0: the CPUs that this process may use, dealt out; at least 1. */
    int threads;
    /* Seconds after which a rank that waits for another gives up. 0: 1800; negative: never. Independent of it, a rank
     * that is gone is noticed at once, and one that is stopped (SIGSTOP) while others run after stopped_s. */
    double timeout_s;
    double stopped_s; /* 0: 5; negative: never */
} fsdp_launch_opts;

/* Runs fn on every rank and returns when all have ended: FSDP_OK if all did well, else the error that came first, its
 * message naming the rank. NULL opts: all defaults. Ranks that are processes are forked from here: call it before
 * the program starts threads.
 *
 * Ctrl-C and SIGTERM: a program that calls fsdp_comm_stop_agreed() is asked there; others, and at the second signal
 * all, are ended at once. */
FSDP_API fsdp_status fsdp_launch(const fsdp_launch_opts *opts, fsdp_rank_fn fn, void *arg) FSDP_NODISCARD;

/* Starts `ranks` copies of a program (argv[0] looked up in PATH), whose fsdp_launch() with ranks 0 then joins them.
 * Returns as fsdp_launch(). */
FSDP_API fsdp_status fsdp_launch_program(const fsdp_launch_opts *opts, char *const argv[]) FSDP_NODISCARD;

/* How many CPUs this process may use: affinity and the control group's quota. */
FSDP_API int fsdp_cpus_allowed(void);

/* A communicator of one rank, in this process, without a launcher. Destroy it with fsdp_comm_destroy(). */
FSDP_API fsdp_status fsdp_comm_create_self(fsdp_comm **out) FSDP_NODISCARD;

/* Collective. Ranks that give the same color (>= 0) share a new communicator, ordered by key, then by old rank. A
 * negative color takes part and gets NULL. */
FSDP_API fsdp_status fsdp_comm_split(fsdp_comm *comm, int color, int key, fsdp_comm **out) FSDP_NODISCARD;

/* For communicators made by create_self and split, after everything that uses them. Collective. NULL is accepted. */
FSDP_API void fsdp_comm_destroy(fsdp_comm *comm);

FSDP_API int fsdp_comm_rank(const fsdp_comm *comm);
FSDP_API int fsdp_comm_size(const fsdp_comm *comm);
FSDP_API int fsdp_comm_threads(const fsdp_comm *comm);            /* of this rank, for kernels */
FSDP_API const char *fsdp_comm_transport(const fsdp_comm *comm); /* "self", "shm", "copy" */

/* Collective. Returns when every rank has called it. */
FSDP_API fsdp_status fsdp_comm_barrier(fsdp_comm *comm) FSDP_NODISCARD;

/* Collective. x[0..n): this rank's terms in, the sums of all ranks' out. Each sum is the exact one, rounded once: it
 * does not depend on the order or number of ranks (base/xsum.h). */
FSDP_API fsdp_status fsdp_comm_sum_exact(fsdp_comm *comm, double *x, int n) FSDP_NODISCARD;

/* Collective. x[0..n): the largest over all ranks; NaN where one is NaN. */
FSDP_API fsdp_status fsdp_comm_max(fsdp_comm *comm, double *x, int n) FSDP_NODISCARD;

/* Collective. in: `bytes` bytes of host memory; out: size * bytes, rank after rank. */
FSDP_API fsdp_status fsdp_comm_all_gather(fsdp_comm *comm, const void *in, size_t bytes, void *out) FSDP_NODISCARD;

/* Collective. Host memory: root's bytes to all. */
FSDP_API fsdp_status fsdp_comm_broadcast(fsdp_comm *comm, void *data, size_t bytes, int root) FSDP_NODISCARD;

/* Collective. Whether all ranks should now save and stop, because one of them or the launcher was told to (SIGINT,
 * SIGTERM, fsdp_comm_request_stop). The same answer on every rank. */
FSDP_API fsdp_status fsdp_comm_stop_agreed(fsdp_comm *comm, bool *stop) FSDP_NODISCARD;
FSDP_API void fsdp_comm_request_stop(fsdp_comm *comm);

/* Collective. For uneven inputs: does this rank have another micro-batch? *first: the lowest rank that has one; -1: none has. Those
 * that have none join the others (fsdp_pass_join). */
FSDP_API fsdp_status fsdp_comm_ask_more(fsdp_comm *comm, bool mine, int *first) FSDP_NODISCARD;

/* Collective. Says whether every rank is well: `mine` is this rank's status with its error; where all are FSDP_OK,
 * FSDP_OK; else, on every rank, the error of the first rank that has one. For work that ranks do apart (files). */
FSDP_API fsdp_status fsdp_comm_agree(fsdp_comm *comm, fsdp_status mine) FSDP_NODISCARD;

/* For messages, and for the launcher's: which step this rank is in, and what it does (a string literal). */
FSDP_API void fsdp_comm_set_step(fsdp_comm *comm, int64_t step);
FSDP_API void fsdp_comm_set_phase(fsdp_comm *comm, const char *phase);

/* Collective: every rank calls it, after FSDP_ERR_COMM; a rank that calls it for a reason of its own ends the others'
 * operations with FSDP_ERR_COMM. Forgets passes that were open, gradients that they had not committed, summons and steps;
 * parameters and committed gradients stay (of passes without sync: where all ranks have ended the same
 * ones, and no device has failed). FSDP_ERR_PEER where a rank is gone: nothing mends that. */
FSDP_API fsdp_status fsdp_comm_reset(fsdp_comm *comm) FSDP_NODISCARD;

/* What went over this communicator, of this rank, since it was made. All 0 where there is one rank, but for copies of
 * transport "copy". */
typedef struct fsdp_comm_stats {
    uint64_t gathers, reduces, publishes; /* collectives on units */
    uint64_t near_gathers; /* of the gathers, those from a smaller group (fsdp_unit_opts.reshard_group) */
    uint64_t exchanges; /* rounds in which all ranks told each other something: barriers, sums, ends of passes and steps */
    uint64_t gather_bytes, reduce_bytes; /* copied to or read from other ranks' memory; a zero-copy gather moves 0 */
    uint64_t wait_ns, copy_ns, reduce_ns; /* time in waits for other ranks, in copies, in adding gradients */
} fsdp_comm_stats;
FSDP_API void fsdp_comm_get_stats(const fsdp_comm *comm, fsdp_comm_stats *out);

FSDP_END_DECLS

#endif
