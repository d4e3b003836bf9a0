/* SPDX-License-Identifier: MIT
 *
 * A unit, from the inside. Its states and invariants: life.h. Its geometry: layout.h.
 *
 *   master      fp32 slice, on the storage device: what optimizers write
 *   published   slice in compute's type where others read it; where type and device agree it is the master itself
 *               (transport shm: in the memory that all ranks share)
 *   whole       the flat parameter as compute reads it: a view of shared memory, or a private buffer
 *   window      where this rank's backward writes, whole; owners add their slices of all ranks' windows into
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
    float *now, *next;  /* arena blocks of a slice's size; NULL until needed */
    bool has;           /* `now` holds committed gradients */
    bool pending;       /* `next` holds them plus those of the open pass */
} fsdpi_accumulator;

/* Flat elements [from, to). */
typedef struct fsdpi_range {
    int64_t from, to;
} fsdpi_range;

struct fsdp_unit {
    fsdpi_runtime *rt;
    fsdpi_devctx *ctx;   /* of the compute device */
    fsdp_unit *prev, *following; /* in the runtime's list */
    char *name;
    uint32_t number;     /* from 1, in the order of creation: the same on every rank */
    fsdp_mode mode;
    int prefetch;
    fsdpi_layout layout;
    int64_t lo, hi;      /* this rank's slice, flat elements */
    size_t *edges;       /* of all slices, bytes */

    fsdpi_flat *flat;    /* published parameters; NULL in mode none */
    float *master;
    bool master_is_published, owns_master;
    uint32_t version;

    fsdpi_residency residency;
    int holders;
    float *whole;        /* device address of flat element 0 */
    bool whole_private;  /* an arena block */
    uint32_t whole_version;

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
    float *block;        /* in a pass without sync, instead of a window: an arena block, whole */
    bool *touched;       /* per parameter: has its gradient been asked for in this window */
    bool *frozen;        /* per parameter: it has no gradient */
    int frozen_count;
    fsdpi_range *live;   /* the parts of this rank's slice that have gradients (frozen.c) */
    int live_count;
    fsdpi_accumulator *acc; /* one a round (reduce.c); the first is always there */
    int rounds;
    fsdpi_accumulator *unsent; /* one a round: this rank's own sums of passes without sync, whole (unsent.c) */
    int unsent_rounds;
    uint64_t unsent_passes; /* a hash of which passes these were; 0: none */
    fsdpi_flat *grad_flat; /* mode none: reduced slices, gathered in a step */
    uint32_t grad_version;

    uint64_t listed; /* a mark of the list that was looked at last */
    bool in_step;
    const float *step_grad; /* of the first element that this rank keeps; NULL: no gradients */
    float *step_whole;      /* mode none, transports that copy: arena block */
    fsdpi_weight **weight;  /* of the passes whose gradients are accumulated */
    int weights, weights_room;
    int weights_sent;       /* so many of them are not of passes without sync alone */

    fsdp_slice *slices;  /* for fsdp_unit_slices */
    fsdpi_segment *segments;
    int slice_count;
    fsdpi_segment *own;  /* of this rank's slice, also in mode none */
    int own_count;
    char state_text[160];
    fsdpi_residency checked_residency; /* at the last fsdpi_unit_check() */
    fsdpi_gradient checked_gradient;
};

/* ---- gather.c ---- */
/* Makes the unit whole (issues what is needed; the compute stream waits for it) and adds a holder. */
fsdp_status fsdpi_unit_hold(fsdp_unit *u);
/* Takes a holder away; the last one reshards unless `keep`. */
fsdp_status fsdpi_unit_release(fsdp_unit *u, bool keep);
fsdp_status fsdpi_unit_reshard(fsdp_unit *u);
/* Notes that unit u was used, and gathers those that came next in the pass before. A hint: what fails is left out. */
void fsdpi_prefetch(fsdp_pass *pass, fsdp_unit *u, bool backward);

/* ---- frozen.c ---- */
/* Whether it has gradients at all: not all of its parameters are frozen. */
bool fsdpi_unit_trains(const fsdp_unit *u);
fsdp_status fsdpi_unit_init_frozen(fsdp_unit *u);

/* ---- publish.c ---- */
/* The order in which parameters change: done on all units, then open, write, publish a unit. */
fsdp_status fsdpi_unit_done(fsdp_unit *u);
fsdp_status fsdpi_unit_open(fsdp_unit *u);
fsdp_status fsdpi_unit_publish(fsdp_unit *u);
/* In fsdp_comm_reset: what this rank keeps becomes version 0; then, when all ranks have done so, in mode none, what the
 * others keep. */
fsdp_status fsdpi_unit_start_over(fsdp_unit *u);
fsdp_status fsdpi_unit_catch_up(fsdp_unit *u);

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
fsdp_status fsdpi_window_send(fsdp_unit *u, fsdpi_pooled *w, int round);
/* out[i] = (base[i] +) x[i]. base may be NULL, and out any of the others. */
fsdp_status fsdpi_sum_launch(fsdp_unit *u, fsdp_stream *s, float *out, const float *base, const float *x, int64_t numel);
void fsdpi_grad_discard(fsdp_unit *u);
/* Adds the rounds up: leaves the sum, if any, in acc[0].now. */
fsdp_status fsdpi_grad_final(fsdp_unit *u);

/* The accumulated gradients of this rank's slice, rounds added up, into `out` on the communication stream; accumulators stay
 * as they are. Only where there are any. */
fsdp_status fsdpi_grad_sum_into(fsdp_unit *u, float *out);

/* ---- values.c ---- */
/* As fsdp_unit_fill(); which (NULL: all): the parameters that have values by it. */
fsdp_status fsdpi_unit_fill(fsdp_unit *u, fsdp_fill_fn fill, void *arg, const bool *which);
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
/* Ends a step in which nothing was written: the gradients stay, and it can be begun again. Not collective. */
void fsdpi_step_leave(fsdp_unit_list units);

static inline int64_t fsdpi_unit_slice(const fsdp_unit *u)
{
    return u->hi - u->lo;
}

/* The flat elements whose masters this rank keeps: in mode none all, else its slice. */
static inline int64_t fsdpi_unit_kept_from(const fsdp_unit *u)
{
    return u->mode == FSDP_MODE_NONE ? 0 : u->lo;
}

/* Whether other ranks keep the same elements. */
static inline bool fsdpi_unit_has_replicas(const fsdp_unit *u)
{
    return u->mode == FSDP_MODE_NONE && u->rt->comm->size > 1;
}

static inline int64_t fsdpi_unit_kept_to(const fsdp_unit *u)
{
    return u->mode == FSDP_MODE_NONE ? u->layout.total : u->hi;
}

#endif
