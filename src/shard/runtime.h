/* SPDX-License-Identifier: MIT
 *
 * What the units of one communicator share: streams and memory of each device, gradient windows, the reductions that
 * this rank owes, the order of the last passes. It hangs off the communicator, not off a root: there is none. */
#ifndef FSDPI_SHARD_RUNTIME_H
#define FSDPI_SHARD_RUNTIME_H

#include "comm/call.h"
#include "comm/transport.h"
#include "device/arena.h"

/* One device's part. The compute stream is the caller's; gathers and reductions go on a stream of their own where the
 * device is asynchronous. */
typedef struct fsdpi_devctx {
    struct fsdpi_devctx *next;
    fsdp_device *dev;
    fsdp_stream *compute, *comm; /* the same one where the device is synchronous */
    fsdpi_arena *arena;          /* whatever computes */
    fsdpi_arena *gathered;       /* private buffers of whole parameters */
} fsdpi_devctx;

/* A gradient window with its history. Windows of a size are shared by the units of that size: they are dealt out in
 * program order, which is the same on every rank.
 *
 * When it has been posted, this rank owes the reduction of its slice. A window is not acquired again before that is
 * done: so it owes at most one. */
typedef struct fsdpi_pooled {
    struct fsdpi_pooled *next;
    fsdpi_devctx *ctx;
    fsdpi_window *window;
    size_t bytes;
    uint32_t uses;   /* acquisitions so far */
    uint64_t posted; /* when it was last posted, in posts of this runtime; 0: never */
    bool held;       /* acquired, not posted */
    bool owes;
    struct fsdpi_pooled *next_owed; /* in the order of posts */
    struct fsdp_unit *unit;         /* whose gradient it is, and which round of its pass */
    int round;
    bool discard;                   /* the pass was cancelled: take it, add nothing */
} fsdpi_pooled;

/* How much a pass weighs: shared by the units whose gradients it brought. */
typedef struct fsdpi_weight {
    double weight;
    int refs;
    uint64_t seen; /* a mark, to count it once */
} fsdpi_weight;

/* The order of units in the last pass of a kind. */
typedef struct fsdpi_order {
    struct fsdpi_turn {
        struct fsdp_unit *unit;
        bool backward;
    } *turn;
    int count, room;
} fsdpi_order;

enum { FSDPI_PASS_KINDS = 2 };

typedef void (*fsdpi_moved_fn)(void *arg, const struct fsdp_unit *u, int from, int to);

typedef struct fsdpi_runtime {
    fsdp_comm *comm;
    fsdpi_pool *threads;
    fsdpi_devctx *devices;
    struct fsdp_unit *units;
    fsdpi_pooled *windows;
    fsdpi_pooled *owed, **owed_last; /* windows posted, not reduced here */
    uint64_t posts;
    struct fsdp_pass *passes; /* open ones, latest first */
    uint64_t pass_count;
    uint32_t unit_count; /* units that were ever made */
    fsdpi_order last[FSDPI_PASS_KINDS];
    /* Bytes of whole parameters in private buffers: now, the most, and at most (0: any). */
    size_t unsharded, unsharded_most, unsharded_cap;
    fsdpi_moved_fn moved; /* for tests: told of each move of a unit's residency */
    void *moved_arg;
    uint64_t about; /* 1 + the number of the pass that the call under way is about; 0: none. For the log */
    uint64_t mark; /* of the list of units that was looked at last (unit_list.c): no other list has it */
    bool said_differ; /* that ranks gave sharded units different values: logged once */
    bool failed; /* in a reset: a stream had */
} fsdpi_runtime;

/* The runtime of a communicator, made when first asked for; it goes with the communicator. Not collective. */
fsdp_status fsdpi_runtime_of(fsdpi_runtime **out, fsdp_comm *comm);
fsdp_status fsdpi_runtime_device(fsdpi_devctx **out, fsdpi_runtime *rt, fsdp_device *dev);

/* The window of at least `bytes` whose turn it is. Collective where one has to be made. */
fsdp_status fsdpi_window_find(fsdpi_pooled **out, fsdpi_runtime *rt, fsdpi_devctx *ctx, size_t bytes);

/* Waits for all work of all devices. */
fsdp_status fsdpi_runtime_sync(fsdpi_runtime *rt);

#endif
