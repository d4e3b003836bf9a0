/* SPDX-License-Identifier: MIT
 *
 * A unit, from the inside. Its states and invariants: life.h. Its geometry: layout.h.
 *
 *   master      fp32 slice, on the storage device: what optimizers write
 *   published   slice in param_dtype where others read it; where that is fp32 it is the master itself
 *               (transport shm: in the memory that all ranks share)
 *   whole       the flat parameter as compute reads it: a view of shared memory, or a private buffer
 *   window      where this rank's backward writes, whole (with a reduce_dtype, or where storage is apart from compute, it
 *               writes to `block`, which is then copied into the window); owners add their slices of all ranks' windows into
 *   acc         the accumulator of committed gradients, a slice (accumulate.h)
 *
 * version counts publications: every rank counts them in its own program order, so a rank knows which version it
 * needs without asking. */
#ifndef FSDPI_SHARD_UNIT_H
#define FSDPI_SHARD_UNIT_H

#include <fsdp/unit.h>

#include "comm/transport.h"
#include "shard/layout.h"
#include "shard/life.h"
#include "shard/runtime.h"

/* Sums of leaves, with a way back: a pass adds into `next` and only its end makes that `now`. */
typedef struct fsdpi_accumulator {
    void *now, *next;   /* arena blocks of a slice's size, of grad_dtype; NULL until needed */
    bool has;           /* `now` holds committed gradients */
    bool pending;       /* `next` holds them plus those of the open pass */
} fsdpi_accumulator;

/* Flat elements [from, to). */
typedef struct fsdpi_range {
    int64_t from, to;
} fsdpi_range;

struct fsdp_unit {
    fsdpi_runtime *rt;
    fsdpi_devctx *ctx;   /* of the compute device: whole parameters, leaves, what was summoned */
    fsdpi_devctx *store; /* of the storage device: masters, what is published; often the same */
    fsdpi_devctx *sums;  /* of the gradient device: windows, accumulators; often the storage device's */
    fsdp_unit *prev, *following; /* in the runtime's list */
    char *name;
    uint32_t number;     /* from 1, in the order of creation: the same on every rank */
    fsdp_mode mode;
    int prefetch;
    fsdpi_layout layout;
    fsdpi_group shards;   /* the ranks that share one copy; in mode none each has one */
    fsdpi_group replicas; /* the ranks that keep the same slice as this one */
    int64_t lo, hi;       /* what this rank reduces, flat elements: a part of what it keeps */
    int64_t keep_lo, keep_hi; /* its slice: masters and optimizer state */

    fsdpi_flat *flat;     /* published parameters, among shards; NULL in mode none */
    fsdpi_flat *replica_flat;   /* among replicas: values that one gives to the others; NULL where there are no others */
    uint32_t replica_version;
    float *master;
    bool owns_master, owns_published;
    void *published;      /* param_dtype below fp32: this rank's slice of it */
    uint32_t version;
    bool said_done;       /* with this version */
    fsdp_dtype param_dtype, reduce_dtype, grad_dtype;
    bool exact_eval, raw; /* raw: compute reads param_dtype */
    fsdpi_flat *exact;    /* param_dtype below fp32: the masters, among shards, for summons and exact evaluations */
    uint32_t exact_version, exact_of; /* of the latter; the version of parameters that it has */

    fsdpi_group near_group; /* the neighbours among whom parameters stay from forward to backward */
    fsdpi_flat *near;       /* NULL: they stay nowhere, or gathering from all costs nothing either */
    uint32_t near_version;
    bool near_is_current;   /* it has this version of the parameters */

    fsdpi_residency residency;
    int holders;
    void *whole;         /* device address of flat element 0, of whole_dtype */
    bool whole_private;  /* an arena block */
    uint32_t whole_version;
    bool whole_exact;    /* as the masters are, not rounded */
    fsdp_dtype whole_dtype;
    fsdpi_flat *viewed;  /* whose view `whole` is */
    size_t whole_bytes;  /* of that block */
    bool pinned;         /* fsdp_unit_unshard(): it stays whole */
    struct fsdpi_ahead { /* fsdp_unit_set_prefetch(): forward, backward */
        fsdp_unit **unit;
        int count;
        bool given;
    } ahead[2];

    int summons;
    bool writeback;
    fsdp_unit_summon_opts summon; /* what the outermost asked for */
    bool summon_absent;  /* summoned, but not for this rank */
    float *summoned;     /* the whole, of this rank alone: an arena block to write, or host memory */
    float *summoned_grad; /* the same, of gradients */
    uint64_t summon_hash; /* debug builds: of what may not be written */

    bool *set;           /* per parameter: has it ever been given values */
    bool all_set;
    bool said_differ;    /* that replicas were given different values: logged once */

    fsdpi_gradient gradient;
    fsdp_pass *pass;     /* whose gradient is in flight */
    fsdpi_pooled *window;
    float *block;        /* an arena block, whole, while the gradient is OPEN: in a pass without sync, instead of a window; or where
                            backward cannot write to the window itself (another type, another device) */
    bool post_tagged;    /* posting it has had its tag */
    bool *touched;       /* per parameter: has its gradient been asked for in this window */
    bool *frozen;        /* per parameter: it has no gradient */
    int frozen_count;
    fsdpi_range *live;   /* the parts of this rank's slice that have gradients (frozen.c) */
    int live_count;
    fsdpi_accumulator *acc; /* one a round (reduce.c); the first is always there */
    int rounds;
    fsdpi_accumulator *unsent; /* one a round: this rank's own sums of passes without sync, whole (unsent.c) */
    int unsent_rounds;
    struct fsdpi_hooks *hooks; /* NULL: none (hooks.c) */
    uint64_t unsent_passes; /* a hash of which passes these were; 0: none */

    uint64_t listed; /* a mark of the list that was looked at last */
    bool in_step;
    bool averaged; /* its average is in its masters' place (optim/average.c) */
    const float *step_grad; /* of the first element that this rank keeps; NULL: no gradients */
    float *step_sum;        /* sums below fp32, or kept on another device: what this rank has reduced, on the storage device: arena block */
    float *step_gathered;   /* replicas, transports that copy: arena block */
    fsdpi_weight **weight;  /* of the passes whose gradients are accumulated */
    int weights, weights_room;
    int weights_sent;       /* so many of them are not of passes without sync alone */

    fsdp_slice *slices;  /* for fsdp_unit_slices */
    fsdpi_segment *segments;
    int slice_count;
    fsdpi_segment *own;  /* of what it reduces: over all ranks, each element once */
    int own_count;
    char state_text[160];
    fsdpi_residency checked_residency; /* at the last fsdpi_unit_check() */
    fsdpi_gradient checked_gradient;
};

/* ---- unit.c ---- */
/* Whether there is a parameter i: FSDP_ERR_INVALID names the call. */
fsdp_status fsdpi_unit_check_index(const fsdp_unit *u, int i, const char *call);

/* ---- gather.c ---- */
/* Makes the unit whole (issues what is needed; the compute stream waits for it) and adds a holder: with the values that this pass
 * sees; with the masters', where those that are published are rounded. Who holds it already decides which. */
fsdp_status fsdpi_unit_hold_in(fsdp_unit *u, const fsdp_pass *pass);
fsdp_status fsdpi_unit_hold_exact(fsdp_unit *u);
/* Takes a holder away; the last one reshards unless `keep`. */
fsdp_status fsdpi_unit_release(fsdp_unit *u, bool keep);
fsdp_status fsdpi_unit_reshard(fsdp_unit *u);
/* Gathers it where it is not whole at the current version; the compute stream waits. */
fsdp_status fsdpi_unit_make_whole(fsdp_unit *u);
/* Gathers it before its turn, where that fits. */
fsdp_status fsdpi_unit_gather_ahead(fsdp_unit *u);
/* Notes that unit u was used, and gathers those that came next in the pass before. A hint: what fails is left out. */
void fsdpi_prefetch(fsdp_pass *pass, fsdp_unit *u, bool backward);

/* ---- frozen.c ---- */
/* Whether it has gradients at all: not all of its parameters are frozen. */
bool fsdpi_unit_trains(const fsdp_unit *u);
fsdp_status fsdpi_unit_init_frozen(fsdp_unit *u);

/* Whether a gather now leaves a private buffer here, which counts towards the cap. */
bool fsdpi_gather_takes(const fsdp_unit *u, bool exact);
/* Whether a gather of this kind ever takes memory and time of this rank: it copies, or it makes fp32 of what it reads. */
bool fsdpi_gather_copies(const fsdp_unit *u, bool exact);
/* Bytes that come below fp32 in a gather of this kind, and take room until they are widened. */
size_t fsdpi_gather_passing(const fsdp_unit *u, bool exact);

/* ---- room.c: the cap on whole parameters. exact: the masters' values, where others are published ---- */
/* FSDP_ERR_NOMEM where u cannot be made whole below the cap, whatever is given up. */
fsdp_status fsdpi_room_check(const fsdp_unit *u, bool exact);
/* FSDP_ERR_INVALID, in the name of a call, where u alone is larger than the cap. */
fsdp_status fsdpi_room_allows(const fsdp_unit *u, size_t cap, const char *call);
/* Gives up what is whole and not in use until u fits, whose gather comes next. */
fsdp_status fsdpi_room_make(fsdp_unit *u, bool exact);
/* Whether it fits as things are. */
bool fsdpi_room_has(const fsdp_unit *u, bool exact);
/* A private block for it was taken; the one that it had was given up. */
void fsdpi_room_take(fsdp_unit *u, bool exact);
void fsdpi_room_give(fsdp_unit *u);

/* ---- explicit.c ---- */
/* No list names it any more; it has none. */
void fsdpi_unit_forget_ahead(fsdp_unit *u);

/* ---- publish.c ---- */
/* The order in which parameters change: done on all units, then open, write, unify, publish a unit. */
fsdp_status fsdpi_unit_done(fsdp_unit *u);
fsdp_status fsdpi_unit_open(fsdp_unit *u);
/* Of what each rank wrote by itself, elements [lo, hi) count: they go to the masters of all replicas. Not needed where
 * replicas have written the same. */
fsdp_status fsdpi_unit_unify(fsdp_unit *u);
fsdp_status fsdpi_unit_publish(fsdp_unit *u);
/* Where nothing was written after all, by any rank: who has said that it is done must get a new version, or the owners of the
 * next one would take that for an answer, and not wait for those who read in between. So the old values are published again. */
void fsdpi_unit_settle(fsdp_unit *u);
/* In fsdp_comm_reset: what this rank keeps becomes version 0; then, when all ranks have done so, replicas are made the same. */
fsdp_status fsdpi_unit_start_over(fsdp_unit *u);
fsdp_status fsdpi_unit_catch_up(fsdp_unit *u);

/* ---- place.c ---- */
/* Whether a stream reaches both devices: FSDP_ERR_UNSUPPORTED says what each is for. */
fsdp_status fsdpi_places_check(const char *unit, const char *a_is, const fsdp_device *a, const char *b_is, const fsdp_device *b);
/* Where the unit's places (compute, storage, gradients) are two devices: a stream that reaches both runs what goes between them. begin: after
 * all that is on the unit's streams of this kind (compute, or communication); end: what comes on these waits for it. */
fsdp_stream *fsdpi_between(const fsdp_unit *u, bool comm);
fsdp_status fsdpi_between_begin(const fsdp_unit *u, bool comm);
fsdp_status fsdpi_between_end(const fsdp_unit *u, bool comm);
/* A copy from one to the other, or from and to the host, in order with the compute streams. */
fsdp_status fsdpi_between_copy(fsdp_unit *u, void *to, const void *from, size_t bytes);

/* ---- near.c ---- */
fsdp_status fsdpi_near_create(fsdp_unit *u, size_t *edges);
/* Before the unit is resharded at the end of a forward: this rank's part of it stays with the neighbours. */
fsdp_status fsdpi_near_keep(fsdp_unit *u);

/* ---- precision.c ---- */
fsdp_status fsdpi_launch_narrow(fsdp_stream *s, void *to, fsdp_dtype dtype, const float *from, int64_t numel);
fsdp_status fsdpi_launch_widen(fsdp_stream *s, float *to, const void *from, fsdp_dtype dtype, int64_t numel);
bool fsdpi_unit_is_narrow(const fsdp_unit *u);
/* Transports that copy send masters only when somebody asks for them: all ranks offer theirs. */
fsdp_status fsdpi_unit_offer_exact(fsdp_unit *u);
bool fsdpi_unit_offers_exact(const fsdp_unit *u);
/* Whether this pass sees masters. */
bool fsdpi_pass_is_exact(const fsdp_pass *pass, const fsdp_unit *u);
/* What to gather: the flat with the current values, as published or exact, its version and type. */
fsdp_status fsdpi_unit_source(fsdp_unit *u, bool exact, fsdpi_flat **flat, uint32_t *version, fsdp_dtype *dtype);

/* ---- reduce.c ---- */
fsdp_status fsdpi_grad_open(fsdp_unit *u, fsdp_pass *pass);
fsdp_status fsdpi_grad_post(fsdp_unit *u);
/* Reduces what is owed: all of it, waiting; or what can be done without waiting. */
fsdp_status fsdpi_reduce_owed(fsdpi_runtime *rt, bool wait);
/* After a kernel has failed, what was launched behind it did not run: says again how far this rank is. */
fsdp_status fsdpi_windows_repeat(fsdpi_runtime *rt);
void fsdpi_grad_commit(fsdp_unit *u);
/* Where a gradient is written now, whole. */
float *fsdpi_grad_place(const fsdp_unit *u);
/* A window, held; and its post, as the unit's gradient of a round. */
fsdp_status fsdpi_window_take(fsdp_unit *u, fsdpi_pooled **out);
/* What backward wrote elsewhere, into the window that is to be sent. */
fsdp_status fsdpi_window_fill(fsdp_unit *u, fsdpi_pooled *w, const float *from);
fsdp_status fsdpi_window_send(fsdp_unit *u, fsdpi_pooled *w, int round);
void fsdpi_grad_discard(fsdp_unit *u);
/* Whether there are sums over all ranks that no step has used. */
bool fsdpi_grad_any(const fsdp_unit *u);
/* Adds the rounds up: leaves the sum, if any, in acc[0].now, rounded where that is below fp32. */
fsdp_status fsdpi_grad_final(fsdp_unit *u);

/* The accumulated gradients of this rank's slice, rounds added up in fp32, into `out`, on a stream that reaches both; accumulators
 * stay as they are. Only where there are any. */
fsdp_status fsdpi_grad_sum_into(fsdp_unit *u, fsdp_stream *s, float *out);

/* ---- values.c ---- */
/* As fsdp_unit_fill(), of some parameters (NULL: all): the others keep what they have. */
fsdp_status fsdpi_unit_fill(fsdp_unit *u, fsdp_fill_fn fill, void *arg, const bool *which);
/* which (NULL: all): the parameters that have values by it. */
fsdp_status fsdpi_unit_fill_from(fsdp_unit *u, int rank, fsdp_fill_fn fill, void *arg, const bool *which);
/* Makes what was made beside the old values (device, what this rank keeps) the unit's, when all ranks have theirs; after
 * fsdpi_unit_done() and open(). */
fsdp_status fsdpi_unit_take(fsdp_unit *u, const float *from);
void fsdpi_unit_mark_set(fsdp_unit *u, const bool *which);
/* Logs once which parameters a training pass uses that never had values. */
void fsdpi_unit_warn_unset(fsdp_unit *u);

/* ---- summon.c ---- */
/* Gives back what a summon took. */
void fsdpi_summon_drop(fsdp_unit *u);

/* ---- unsent.c: passes without sync ---- */
fsdp_status fsdpi_unsent_open(fsdp_unit *u);
/* The block of this pass's backward, with what was there before, is what will be there when the pass ends. */
fsdp_status fsdpi_unsent_keep(fsdp_unit *u, int round);
/* Adds what is unsent of a round to a window before it is posted. */
fsdp_status fsdpi_unsent_join(fsdp_unit *u, int round);
/* The pass counts, or does not. Cannot fail. */
void fsdpi_unsent_commit(fsdp_unit *u, uint64_t pass);
void fsdpi_unsent_discard(fsdp_unit *u);
/* Drops it all; frees it. */
void fsdpi_unsent_drop(fsdp_unit *u);
bool fsdpi_unsent_any(const fsdp_unit *u);
/* At a step: posts what is unsent of these units, and reduces it. All of it, or nothing has changed. */
fsdp_status fsdpi_unsent_post(fsdp_unit_list units);
/* In fsdp_comm_reset: what not all ranks have of the same passes is dropped. */
fsdp_status fsdpi_unsent_agree(fsdpi_runtime *rt);

/* ---- step.c ---- */
/* What a step has taken of a unit. */
void fsdpi_step_drop(fsdp_unit *u);
/* Ends a step in which nothing was written: the gradients stay, and it can be begun again. Not collective. */
void fsdpi_step_leave(fsdp_unit_list units);

/* Whether compute cannot read and write where slices are kept. */
static inline bool fsdpi_unit_is_apart(const fsdp_unit *u)
{
    return u->store != u->ctx;
}
/* Whether it is gathered at all. In mode none every rank has the masters: they are whole already, unless compute is to see them rounded, or
 * elsewhere. */
static inline bool fsdpi_unit_is_gathered(const fsdp_unit *u)
{
    return u->mode != FSDP_MODE_NONE || u->param_dtype != FSDP_F32 || fsdpi_unit_is_apart(u);
}
/* Whether it stays whole, from its first use on until its parameters change. */
static inline bool fsdpi_unit_stays_whole(const fsdp_unit *u)
{
    return u->mode == FSDP_MODE_OPTIMIZER || u->mode == FSDP_MODE_NONE;
}
/* Whether a step must bring gradients to the slices, as fp32. */
static inline bool fsdpi_unit_stages_grads(const fsdp_unit *u)
{
    return u->grad_dtype != FSDP_F32 || u->sums != u->store;
}
/* Elements that this rank reduces, and that it keeps. */
static inline int64_t fsdpi_unit_slice(const fsdp_unit *u)
{
    return u->hi - u->lo;
}
static inline int64_t fsdpi_unit_kept(const fsdp_unit *u)
{
    return u->keep_hi - u->keep_lo;
}

/* Whether other ranks keep the same elements. */
static inline bool fsdpi_unit_has_replicas(const fsdp_unit *u)
{
    return u->replicas.size > 1;
}

/* Which part of the flat a rank reduces: of S shards with R parts each, one a replica. */
static inline int fsdpi_unit_piece(const fsdp_unit *u, int rank)
{
    return fsdpi_group_member(&u->shards, rank) * u->replicas.size + fsdpi_group_member(&u->replicas, rank);
}
/* Bytes of an accumulator. */
static inline size_t fsdpi_unit_sum_bytes(const fsdp_unit *u)
{
    return (size_t)fsdpi_unit_slice(u) * fsdp_dtype_bytes(u->grad_dtype);
}
/* Bytes of a gradient window. */
static inline size_t fsdpi_unit_window_bytes(const fsdp_unit *u)
{
    return (size_t)u->layout.total * fsdp_dtype_bytes(u->reduce_dtype);
}

#endif
