/* SPDX-License-Identifier: MIT
 *
 * A communicator, from the inside: the block of shared memory that its ranks have, the tags by which they notice that
 * they do different things, and the exchange on which all small collectives stand.
 *
 * Tags. Every operation, whether it waits for others or not, appends one to this rank's ring, with a hash of all
 * before it. Where ranks meet (an exchange, the end of a pass), and in every wait that takes long, hashes at the same
 * position are compared; the first position that differs is what the message names. A rank may be at most
 * 3/8 of FSDPI_TAGS operations ahead of the slowest: so a position is still there when the others reach it.
 *
 * Meetings. What is to count on all ranks or on none (the gradients of a pass, a step, new values) is decided by an
 * exchange: a rank that gets through it knows that all have come to it, by the same way; and that they get through,
 * too. */
#ifndef FSDPI_COMM_H
#define FSDPI_COMM_H

#include <fsdp/comm.h>

#include "comm/counter.h"
#include "comm/world.h"

/* X(enum, what it is called in messages) */
#define FSDPI_OP_MAP(X)                                                                                     \
    X(FSDPI_OP_BARRIER, "barrier")                                                                          \
    X(FSDPI_OP_SUM, "exact sum")                                                                            \
    X(FSDPI_OP_MAX, "maximum")                                                                              \
    X(FSDPI_OP_ALL_GATHER, "all-gather")                                                                    \
    X(FSDPI_OP_BROADCAST, "broadcast")                                                                      \
    X(FSDPI_OP_STOP, "question whether to stop")                                                            \
    X(FSDPI_OP_ASK_MORE, "question who has more")                                                           \
    X(FSDPI_OP_AGREE, "agreement on errors")                                                                \
    X(FSDPI_OP_SPLIT, "split")                                                                              \
    X(FSDPI_OP_ALLOC, "allocation of shared memory")                                                        \
    X(FSDPI_OP_UNIT_CREATE, "creation of a unit")                                                           \
    X(FSDPI_OP_UNIT_DESTROY, "destruction of a unit")                                                       \
    X(FSDPI_OP_PASS_BEGIN, "beginning of a pass")                                                           \
    X(FSDPI_OP_PASS_CANCEL, "cancellation of a pass")                                                       \
    X(FSDPI_OP_PASS_END, "end of a pass")                                                                   \
    X(FSDPI_OP_FORWARD, "forward gather")                                                                   \
    X(FSDPI_OP_RECOMPUTE, "gather for a recompute")                                                         \
    X(FSDPI_OP_BACKWARD, "backward gather")                                                                 \
    X(FSDPI_OP_REDUCE, "gradient reduction")                                                                \
    X(FSDPI_OP_KEEP, "gradient without sync")                                                               \
    X(FSDPI_OP_SEND, "sending of gradients without sync")                                                   \
    X(FSDPI_OP_PASS_SYNC, "choice of sync for a pass")                                                      \
    X(FSDPI_OP_NEAR, "keeping of parameters near")                                                          \
    X(FSDPI_OP_OFFER, "offer of masters")                                                                   \
    X(FSDPI_OP_UNSHARD, "unshard")                                                                          \
    X(FSDPI_OP_RESHARD, "reshard")                                                                          \
    X(FSDPI_OP_PREFETCH, "prefetch")                                                                        \
    X(FSDPI_OP_SET_PREFETCH, "list of what to prefetch")                                                    \
    X(FSDPI_OP_CAP, "cap on whole parameters")                                                              \
    X(FSDPI_OP_SUMMON, "summon")                                                                            \
    X(FSDPI_OP_SUMMON_END, "end of a summon")                                                               \
    X(FSDPI_OP_SUMMON_CANCEL, "cancellation of a summon")                                                   \
    X(FSDPI_OP_PUBLISH, "publication of parameters")                                                        \
    X(FSDPI_OP_FILL, "setting of values")                                                                   \
    X(FSDPI_OP_FILL_FROM, "values from one rank")                                                           \
    X(FSDPI_OP_COMPARE, "comparison of values")                                                             \
    X(FSDPI_OP_REWRITE, "rewriting of parameters")                                                          \
    X(FSDPI_OP_NORM, "gradient norm")                                                                       \
    X(FSDPI_OP_STEP_BEGIN, "beginning of a step")                                                           \
    X(FSDPI_OP_STEP_END, "end of a step")                                                                   \
    X(FSDPI_OP_STEP_CANCEL, "cancellation of a step")                                                       \
    X(FSDPI_OP_HOOKS, "setting of gradient hooks")                                                          \
    X(FSDPI_OP_ZERO_GRAD, "drop of gradients")                                                              \
    X(FSDPI_OP_READ_GRAD, "reading of a gradient")                                                          \
    X(FSDPI_OP_FREEZE, "freezing")                                                                          \
    X(FSDPI_OP_UNFREEZE, "unfreezing")                                                                      \
    X(FSDPI_OP_SAVE, "save")                                                                                \
    X(FSDPI_OP_LOAD, "load")

typedef enum fsdpi_op {
#define FSDPI_OP_ENUM(e, name) e,
    FSDPI_OP_MAP(FSDPI_OP_ENUM)
#undef FSDPI_OP_ENUM
} fsdpi_op;

enum { FSDPI_RESET_STEPS = 3 };
enum { FSDPI_TAGS = 256, FSDPI_SLOT = 4096, FSDPI_NAME = 40 };

typedef struct fsdpi_tag {
    _Atomic uint64_t hash; /* of this tag and all before it */
    uint64_t bytes;
    int64_t step;
    uint32_t op;
    uint32_t who; /* the unit's number; 0: no unit's */
    char name[FSDPI_NAME - 4]; /* the unit's, cut */
} fsdpi_tag;

/* One rank's part of a communicator's shared block. */
typedef struct fsdpi_member {
    fsdpi_counter arrived; /* exchanges that it has written */
    fsdpi_counter reset;   /* steps of fsdp_comm_reset(), FSDPI_RESET_STEPS each time; between them it is in one */
    _Alignas(64) _Atomic uint64_t tags; /* how many it has appended */
    _Atomic uint64_t met;               /* as many as there were when it last met all others */
    fsdpi_tag ring[FSDPI_TAGS];
    _Alignas(64) struct {
        uint64_t hash; /* of the exchange's tag */
        unsigned char data[FSDPI_SLOT];
    } slot[2];
} fsdpi_member;

typedef struct fsdpi_block {
    _Atomic int mismatch;    /* 1: mismatch_message is complete */
    _Atomic int mismatch_by; /* rank + 1 of who writes it */
    char mismatch_message[1024];
    _Atomic int left; /* ranks that have destroyed the communicator: the last one gives the block back */
    _Alignas(64) fsdpi_member member[];
} fsdpi_block;

struct fsdpi_transport_ops;

struct fsdp_comm {
    fsdpi_world *world;
    bool owns_world; /* made by fsdp_comm_create_self */
    bool aside;      /* of a thread that works beside the rank's own: what it does is not what the rank is said to do */
    const struct fsdpi_transport_ops *transport;
    int rank, size;
    int world_rank;
    int *world_ranks;      /* of each member */
    fsdpi_block *block;
    size_t block_offset, block_bytes; /* in the heap */
    uint32_t exchanges;    /* how many this rank has begun */
    uint64_t hash;         /* of all its tags */
    uint32_t resets;       /* = member[rank].reset */
    fsdp_comm_stats stats; /* of the host thread and of stream threads: relaxed atomics would be no better for a figure */
    /* The call that is under way (call.h): its name, NULL: none; its thread; how many are inside each other, and where that
     * thread was within the program's functions when the outermost began: both of that thread alone. */
    _Atomic(const char *) call;
    _Atomic uintptr_t caller;
    int calls;
    const struct fsdpi_within *called_within;
    /* Hangs off the communicator for a layer above (shard/runtime.c). */
    void *attached;
    const struct fsdpi_attached_ops *attached_ops;
};

/* idle: again and again while this rank waits for others to come to a meeting: does what they may wait for, and does not wait itself.
 * In fsdp_comm_reset(): quiesce ends what runs by itself, for which waits now fail at once; then, when all ranks are
 * quiet, reset drops what was in flight; then, when all have, resume may speak to the others again. */
typedef struct fsdpi_attached_ops {
    void (*destroy)(void *attached);
    void (*idle)(void *attached);
    void (*quiesce)(void *attached);
    fsdp_status (*reset)(void *attached);
    fsdp_status (*resume)(void *attached);
} fsdpi_attached_ops;

/* A communicator over ranks of a world; collective over them where size > 1. offset: of its block. */
fsdp_status fsdpi_comm_create(fsdp_comm **out, fsdpi_world *world, const struct fsdpi_transport_ops *transport,
                              const int *world_ranks, int size, int rank, size_t block_offset);
size_t fsdpi_comm_block_bytes(int size);

/* Appends a tag. May wait for a rank that is far behind. FSDP_ERR_COMM where ranks are known to differ. */
fsdp_status fsdpi_comm_tag(fsdp_comm *comm, fsdpi_op op, const char *name, uint64_t bytes);
/* The same, of a thing that has a number, the same on every rank: names may be alike. */
fsdp_status fsdpi_comm_tag_of(fsdp_comm *comm, fsdpi_op op, const char *name, uint64_t bytes, uint32_t who);
/* What another rank's operation number `position`, at most a few ahead of this rank's own, is; false where it has not come to it. */
bool fsdpi_comm_did(const fsdp_comm *comm, int rank, uint64_t position, fsdpi_tag *out);
/* Compares with what others have appended so far; does not wait. fsdpi_comm_check() says what came of it. */
void fsdpi_comm_compare(fsdp_comm *comm);
const char *fsdpi_op_name(unsigned op);

/* Tells all ranks `bytes` <= FSDPI_SLOT bytes and waits until all have told theirs: the ground of all small collectives.
 * told: what a rank said (8-byte aligned), until this rank's next call. Allocates nothing. */
fsdp_status fsdpi_comm_tell(fsdp_comm *comm, fsdpi_op op, const char *name, const void *in, size_t bytes);
const void *fsdpi_comm_told(const fsdp_comm *comm, int rank);
/* All-gathers any number of bytes of host memory. */
fsdp_status fsdpi_comm_exchange(fsdp_comm *comm, fsdpi_op op, const char *name, const void *in, size_t bytes, void *out);

/* fsdp_comm_agree() as a part of an operation, by whose name messages call it. */
fsdp_status fsdpi_comm_agree_in(fsdp_comm *comm, fsdpi_op op, const char *name, fsdp_status mine);

/* How many operations this rank has made. */
uint64_t fsdpi_comm_made(const fsdp_comm *comm);

/* Waits for a counter of another rank, with all that a wait looks out for: abort, mismatch, a rank that has ended,
 * the long clock. made: fsdpi_comm_made() when the wait was launched. what: "gradient reduction of \"h.3\"". For any
 * thread. A wait of operations after which the ranks have met is not ended by what they do differently later: so what
 * they have committed at a meeting is there, also on streams that are behind the host. */
fsdp_status fsdpi_comm_wait(fsdp_comm *comm, fsdpi_counter *c, uint32_t at_least, int for_rank, uint64_t made, const char *what);

/* Whether something is known to be wrong with this rank's first `made` operations: abort, or a mismatch, unless ranks
 * have met after them. */
fsdp_status fsdpi_comm_check(fsdp_comm *comm, uint64_t made);
/* Whether waiting for this rank still makes sense: abort, whether it has ended, whether the long clock has run out. */
fsdp_status fsdpi_comm_check_peer(fsdp_comm *comm, int for_rank, int64_t waited_ns, const char *what);

/* Collective: zeroed shared memory of the heap, the same offset on every rank. mine: how this rank's preparations went:
 * where one rank's went badly all fail, with its error. */
fsdp_status fsdpi_comm_heap_alloc(fsdp_comm *comm, fsdp_status mine, size_t bytes, size_t *offset);
/* The range as host memory, read and write. */
fsdp_status fsdpi_comm_heap_map(fsdp_comm *comm, size_t offset, size_t bytes, void **out);
void fsdpi_comm_heap_unmap(fsdp_comm *comm, void *p, size_t bytes);

#endif
