/* SPDX-License-Identifier: MIT
 *
 * The kinds of calls that tests/shard/random_calls_test.c makes, a call with all that it needs, and numbers at random. */
#ifndef FSDP_TESTS_RANDOM_CALLS_H
#define FSDP_TESTS_RANDOM_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(enum, what it is called in a trace) */
#define CALL_MAP(X)                                                                                         \
    X(CALL_PASS_BEGIN, "begin a pass")                                                                      \
    X(CALL_JOINED_BEGIN, "begin a pass that others join")                                                   \
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
    X(CALL_CAP, "cap what is whole")                                                                        \
    X(CALL_READ, "read a parameter")                                                                        \
    X(CALL_READ_ALL, "read all")                                                                            \
    X(CALL_SUMMON_READ, "summon")                                                                           \
    X(CALL_SUMMON_WRITE, "summon to write")                                                                 \
    X(CALL_SUMMON, "summon, as it is asked for")                                                            \
    X(CALL_SUMMON_GRADS, "read or write gradients that are summoned")                                       \
    X(CALL_SUMMON_CANCEL, "cancel the summon")                                                              \
    X(CALL_WRITE, "write what is summoned")                                                                 \
    X(CALL_SUMMON_END, "end the summon")                                                                    \
    X(CALL_FILL, "fill")                                                                                    \
    X(CALL_FILL_FROM, "fill from one rank")                                                                 \
    X(CALL_FILL_FROM_FAILS, "fill from one rank, which fails")                                              \
    X(CALL_CHECK_REPLICAS, "compare replicas")                                                              \
    X(CALL_BROADCAST, "broadcast from one rank")                                                            \
    X(CALL_DIVERGE, "write other masters on each rank, and mend it")                                        \
    X(CALL_FILL_FAILS, "fill, failing on one rank")                                                         \
    X(CALL_OPTIM_STEP, "optimizer step")                                                                    \
    X(CALL_STEP_BEGIN, "begin a step")                                                                      \
    X(CALL_STEP_WRITE, "write masters")                                                                     \
    X(CALL_STEP_NORM, "norm")                                                                               \
    X(CALL_READ_GRAD, "read a gradient")                                                                    \
    X(CALL_STEP_END, "end the step")                                                                        \
    X(CALL_STEP_CANCEL, "cancel the step")                                                                  \
    X(CALL_ZERO_GRAD, "drop gradients")                                                                     \
    X(CALL_RENEW, "destroy a unit and make another")                                                        \
    X(CALL_CREATE_DIFFERS, "make a unit that differs on one rank")                                          \
    X(CALL_OPTIM_RENEW, "make another optimizer")                                                           \
    X(CALL_EMA_RENEW, "make another average")                                                               \
    X(CALL_EMA_UPDATE, "update the average")                                                                \
    X(CALL_EMA_READ, "read the average")                                                                    \
    X(CALL_SWAP_IN, "swap the average in")                                                                  \
    X(CALL_SWAP_OUT, "swap the average out")                                                                \
    X(CALL_TEACH, "update a teacher")                                                                       \
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
    int other;      /* the student; which optimizer */
    int rank;       /* the one that is different */
    unsigned mask;  /* of parameters, of units, or of the ranks that have a micro-batch */
    uint32_t salt;  /* of values */
    bool flag;      /* training pass; patchwork values; poisoned gradients; clipping; ... */
    int nomem;      /* > 0: on `rank` the n-th allocation fails */
} call;

const char *call_name(call_kind kind);
const char *call_text(const call *c, char *text, size_t bytes);

bool call_is_one_of(call_kind k, const call_kind *list, int n);
#define ONE_OF(k, ...) call_is_one_of(k, (const call_kind[]){ __VA_ARGS__ }, (int)(sizeof((const call_kind[]){ __VA_ARGS__ }) / sizeof(call_kind)))

/* ---- numbers ---- */

typedef struct rng {
    uint64_t state;
} rng;

uint32_t draw(rng *r);
int below(rng *r, int n);
bool one_in(rng *r, int n);

#endif
