/* SPDX-License-Identifier: MIT
 *
 * The life of units as a plain program of one process has it: whole vectors, all ranks' leaves in turn, no communication.
 * It says of each call whether it is allowed and what comes of it, from the words of fsdp/unit.h, not from the tables
 * and code of src/shard. tests/shard/random_calls_test.c makes the same calls on both. */
#ifndef FSDP_TESTS_MODEL_H
#define FSDP_TESTS_MODEL_H

#include <fsdp/fsdp.h>

enum { MODEL_UNITS = 5, MODEL_PARAMS = 3, MODEL_TOTAL = 512, MODEL_RANKS = 5, MODEL_PASSES = 3, MODEL_ROUNDS = 4, MODEL_WEIGHTS = 64 };

/* X(enum, what it is called in a trace) */
#define CALL_MAP(X)                                                                                         \
    X(CALL_PASS_BEGIN, "begin a pass")                                                                      \
    X(CALL_PASS_END, "end the pass")                                                                        \
    X(CALL_PASS_CANCEL, "cancel the pass")                                                                  \
    X(CALL_WEIGHT, "add to the pass's weight")                                                              \
    X(CALL_SYNC, "choose sync")                                                                             \
    X(CALL_FREEZE, "freeze or unfreeze")                                                                    \
    X(CALL_PENDING, "read what is pending")                                                                 \
    X(CALL_FORWARD_BEGIN, "begin forward")                                                                  \
    X(CALL_FORWARD_END, "end forward")                                                                      \
    X(CALL_RECOMPUTE_BEGIN, "begin recompute")                                                              \
    X(CALL_RECOMPUTE_END, "end recompute")                                                                  \
    X(CALL_BACKWARD_BEGIN, "begin backward")                                                                \
    X(CALL_BACKWARD_END, "end backward")                                                                    \
    X(CALL_GRAD, "write gradients")                                                                         \
    X(CALL_PEEK, "look at the parameters")                                                                  \
    X(CALL_PREFETCH, "gather ahead")                                                                        \
    X(CALL_UNSHARD, "unshard")                                                                              \
    X(CALL_RESHARD, "reshard")                                                                              \
    X(CALL_READ, "read a parameter")                                                                        \
    X(CALL_READ_ALL, "read all")                                                                            \
    X(CALL_SUMMON_READ, "summon")                                                                           \
    X(CALL_SUMMON_WRITE, "summon to write")                                                                 \
    X(CALL_WRITE, "write what is summoned")                                                                 \
    X(CALL_SUMMON_END, "end the summon")                                                                    \
    X(CALL_FILL, "fill")                                                                                    \
    X(CALL_FILL_FAILS, "fill, failing on one rank")                                                         \
    X(CALL_OPTIM_STEP, "optimizer step")                                                                    \
    X(CALL_STEP_BEGIN, "begin a step")                                                                      \
    X(CALL_STEP_WRITE, "write masters")                                                                     \
    X(CALL_STEP_NORM, "norm")                                                                               \
    X(CALL_STEP_END, "end the step")                                                                        \
    X(CALL_STEP_CANCEL, "cancel the step")                                                                  \
    X(CALL_ZERO_GRAD, "drop gradients")                                                                     \
    X(CALL_RENEW, "destroy a unit and make another")                                                        \
    X(CALL_CREATE_DIFFERS, "make a unit that differs on one rank")                                          \
    X(CALL_OPTIM_RENEW, "make another optimizer")                                                           \
    X(CALL_SAVE, "save")                                                                                    \
    X(CALL_LOAD, "load")                                                                                    \
    X(CALL_KERNEL_FAILS, "a kernel fails, cancel the pass")                                                 \
    X(CALL_RESET, "reset")                                                                                  \
    X(CALL_STRAY, "one rank leaves the others")                                                             \
    X(CALL_BARRIER, "barrier")

typedef enum call_kind {
#define CALL_ENUM(e, name) e,
    CALL_MAP(CALL_ENUM)
#undef CALL_ENUM
    CALL_KINDS
} call_kind;

/* A call, with all that it needs. What a kind does not use is 0. */
typedef struct call {
    call_kind kind;
    int unit, pass, param;
    int rank;       /* the one that is different */
    unsigned mask;  /* of parameters, or of units */
    uint32_t salt;  /* of values */
    bool flag;      /* training pass; patchwork values; poisoned gradients; clipping; ... */
    int nomem;      /* > 0: on `rank` the n-th allocation fails */
} call;

const char *call_text(const call *c, char *text, size_t bytes);

typedef struct model_unit {
    bool exists;
    fsdp_mode mode;
    int shards; /* ranks that share a copy */
    int params;
    fsdp_param param[MODEL_PARAMS];
    char name[MODEL_PARAMS][16];
    int numel[MODEL_PARAMS], at[MODEL_PARAMS], total; /* in the flat parameter */
    float p[MODEL_TOTAL], v[MODEL_TOTAL];             /* parameters, momentum */
    bool in_optim;

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

    int owner; /* the pass whose gradient is in flight; -1: none */
    bool open, touched[MODEL_PARAMS];
    float window[MODEL_RANKS][MODEL_TOTAL];

    int summons;
    bool writeback;
    float summoned[MODEL_RANKS][MODEL_TOTAL];
    bool in_step, step_written;
    bool unsharded; /* by hand, once: it may be whole still, and need not be */
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
    uint64_t passes_begun;
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

int model_open_passes(const model *m);
int model_open_uses(const model *m, int pass);
/* Whether somebody holds the unit for sure; whether it is sharded for sure. */
bool model_is_whole(const model *m, int unit);
bool model_is_sharded(const model *m, int unit);
model_norm model_norm_of(const model *m, unsigned units);
bool model_grads_finite(const model *m, unsigned units);
unsigned model_in_step(const model *m);
/* Whether a fill by this rank asks for any element. */
bool model_rank_keeps_any(const model *m, int unit, int rank);

/* The arithmetic that kernels and model share. */
float model_noise(uint32_t a, uint32_t b, uint32_t c);
float model_value(uint32_t salt, int unit, int param, int64_t i);
float model_mix(float number, const float *p, int64_t numel, uint64_t leaf, int param);
void model_gradient(float *g, bool add, float number, const float *p, int64_t numel, uint64_t leaf, int param, bool poison);
/* The optimizer of the test: SGD with momentum as fsdp_optim_create_sgd() has it; and one of its own. */
#define MODEL_LR 0.05f
#define MODEL_MOMENTUM 0.9f
#define MODEL_DECAY 0.01f
#define MODEL_CLIP 0.5f
float model_own_update(float p, const float *g);
/* grad_scale of the call: 0, or a number. */
float model_grad_scale(const call *c);

#endif
