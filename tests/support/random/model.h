/* SPDX-License-Identifier: MIT
 *
 * The life of units as a plain program of one process has it: whole vectors, all ranks' leaves in turn, no communication.
 * It says of each call whether it is allowed and what comes of it, from the words of fsdp/unit.h, not from the tables
 * and code of src/shard. tests/shard/random_calls_test.c makes the same calls on both. */
#ifndef FSDP_TESTS_MODEL_H
#define FSDP_TESTS_MODEL_H

#include "support/random/arithmetic.h"

#include <fsdp/fsdp.h>

typedef enum model_optim { MODEL_NO_OPTIM, MODEL_SGD, MODEL_ADAMW } model_optim;

typedef struct model_unit {
    bool exists;
    fsdp_mode mode;
    int shards; /* ranks that share a copy */
    fsdp_dtype param_dtype, reduce_dtype, grad_dtype;
    bool exact_eval, raw;
    int params;
    fsdp_param param[MODEL_PARAMS];
    char name[MODEL_PARAMS][16];
    int numel[MODEL_PARAMS], at[MODEL_PARAMS], total; /* in the flat parameter */
    uint32_t salt;                                    /* that it was made from */
    float p[MODEL_TOTAL];
    model_optim optim;
    float v[2][MODEL_TOTAL]; /* its state */
    int steps[MODEL_PARAMS];
    bool in_ema, averaged; /* its average is in its place */
    float average[MODEL_TOTAL];

    bool frozen[MODEL_PARAMS];

    float acc[MODEL_ROUNDS][MODEL_TOTAL]; /* committed gradients */
    bool has[MODEL_ROUNDS];
    float unsent[MODEL_ROUNDS][MODEL_RANKS][MODEL_TOTAL]; /* of passes without sync: each rank's own */
    bool has_unsent[MODEL_ROUNDS];
    struct {
        uint64_t pass;
        double weight;
    } weight[MODEL_WEIGHTS];
    int weights, weights_sent; /* of them that are not of passes without sync alone */

    bool sees_exact; /* those that hold it now see masters: the first one decided */

    int owner; /* the pass whose gradient is in flight; -1: none */
    bool open, touched[MODEL_PARAMS];
    float window[MODEL_RANKS][MODEL_TOTAL];

    int summons;
    fsdp_unit_summon_opts summon; /* the outermost */
    float summoned[MODEL_RANKS][MODEL_TOTAL], summoned_grad[MODEL_RANKS][MODEL_TOTAL];
    bool had_grads; /* when it was summoned */
    bool in_step, step_written;
    bool unsharded; /* by hand, once: it may be whole still, and need not be */
    bool pinned;    /* it is, for sure */
    bool near;      /* it is resharded to neighbours */
} model_unit;

typedef struct model_use {
    int forward_open, forwards, backwards, recompute_open, rounds;
    bool backward_open;
    float posted[MODEL_ROUNDS][MODEL_RANKS][MODEL_TOTAL];
} model_use;

typedef struct model_pass {
    bool open, train, lost, unsynced;
    uint64_t serial;
    float number[MODEL_RANKS];
    double weight; /* of all ranks */
    model_use use[MODEL_UNITS];
} model_pass;

typedef struct model {
    int ranks;
    bool copies;   /* transport copy: a gather takes memory */
    int64_t cap;   /* 0: none */
    bool offloads; /* some units are kept on another device */
    uint64_t passes_begun;
    unsigned leaders; /* the ranks that have the passes that are open, while others have joined them; 0: all have */
    model_unit unit[MODEL_UNITS];
    model_pass pass[MODEL_PASSES];
    /* What was saved. */
    int saves;
    model_unit saved[MODEL_UNITS];
} model;

/* What a plain program would have for the step's norm, and for the optimizer's step. */
typedef struct model_norm {
    double norm, weight;
} model_norm;

model *model_create(int ranks);
void model_destroy(model *m);

/* Makes up a unit from salt; a name is of unit and parameter. Its values are 0. */
void model_unit_make(model_unit *u, int number, uint32_t salt, int ranks);

/* Whether fsdp/unit.h allows the call now. FSDP_OK, or what it must return on every rank; it then changes nothing. */
fsdp_status model_expects(const model *m, const call *c);
/* What the call does, where it returned FSDP_OK (or FSDP_ERR_NONFINITE). */
void model_apply(model *m, const call *c);
/* All that a collective reset forgets. */
void model_reset(model *m);
/* What it may drop besides: gradients of passes without sync. */
void model_drop_unsent(model *m, int unit);
bool model_has_unsent(const model *m, int unit);
/* What is pending of a unit: a rank's own sums, and the sums of all. false: nothing. */
bool model_own(const model *m, int unit, int rank, float out[MODEL_TOTAL]);
bool model_reduced(const model *m, int unit, float out[MODEL_TOTAL]);

/* Whether a rank takes part in the open passes by having joined them. */
bool model_has_joined(const model *m, int rank);
int model_open_passes(const model *m);
int model_open_uses(const model *m, int pass);
/* Whether on this rank somebody holds the unit for sure; whether it is sharded for sure. */
bool model_is_whole(const model *m, int unit, int rank);
bool model_is_sharded(const model *m, int unit);
/* What those see that hold it, or would without exact: masters, rounded; and the type that it has in compute's memory. */
float model_seen(const model_unit *u, bool exact, int at);
fsdp_dtype model_seen_dtype(const model_unit *u, bool exact);
model_norm model_norm_of(const model *m, unsigned units);
bool model_grads_finite(const model *m, unsigned units);
unsigned model_in_step(const model *m);
/* Whether a fill by this rank asks for any element. */
bool model_rank_keeps_any(const model *m, int unit, int rank);
bool model_has_elements(const model_unit *u);
bool model_has_replicas(const model *m, int unit);
/* Whether a unit can be the other's teacher, whatever either is about just now. */
bool model_may_teach(const model *m, int teacher, int student);
/* Whether there is room below the cap for the unit, as passes see it or exact. Unsure: what is kept, or gathered ahead, may matter. */
typedef enum model_room { MODEL_FITS, MODEL_NO_ROOM, MODEL_UNSURE } model_room;
model_room model_room_for(const model *m, int unit, bool exact);
/* The room that a call needs. */
model_room model_room_of(const model *m, const call *c);
/* The cap that a call sets; what the largest unit takes; whether a unit made from salt would fit. */
int64_t model_cap_of(const model *m, const call *c);
int64_t model_largest(const model *m);
bool model_fits_cap(const model *m, int number, uint32_t salt);
/* Of a call that failed, after it had gone some way. */
void model_apply_failed(model *m, const call *c);

/* What a call that summons asks for. */
fsdp_unit_summon_opts model_summon_opts(const call *c);
/* Whether this rank has nothing of what is summoned; whether it has a copy of its own. */
bool model_is_absent(const model_unit *u, int rank);
bool model_has_copy(const model_unit *u, int rank);
bool model_has_reduced(const model_unit *u);
/* Which optimizer a call is about. */
model_optim model_optim_of(const call *c);
unsigned model_optim_mask(const model *m, model_optim which);
unsigned model_ema_mask(const model *m);
/* Which units a new optimizer of AdamW is to have. */
unsigned model_adamw_mask(const call *c);
bool model_stored_apart(const model *m, const model_unit *u);
/* Whether its gradients are added up on another device than its slices are kept on. */
bool model_summed_apart(const model *m, const model_unit *u);

#endif
