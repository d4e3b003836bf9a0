/* SPDX-License-Identifier: MIT
 *
 * The mini network (support/mini.h) with all that it has registered, for tests of state dictionaries and checkpoints. */
#ifndef FSDP_TESTS_SAVED_MINI_H
#define FSDP_TESTS_SAVED_MINI_H

#include "support/mini.h"
#include "support/ranks.h"

typedef struct saved_mini {
    mini m;
    fsdp_checkpoint *c;
    int64_t tokens;
    double best;
    int32_t seen[5]; /* a buffer, of a type that is no float */
} saved_mini;

static inline fsdp_status saved_mini_open(saved_mini *s, fsdp_comm *comm, const mini_opts *o)
{
    *s = (saved_mini){ .tokens = 5, .best = 0.1, .seen = { 1, -2, 3, -4, 5 } };
    FSDP_TRY(mini_create(&s->m, comm, o));
    FSDP_TRY(fsdp_checkpoint_create(&s->c, comm));
    for (int u = 0; u < MINI_UNITS; u++)
        for (int i = 0; i < fsdp_unit_param_count(s->m.unit[u]); i++)
            FSDP_TRY(fsdp_checkpoint_add_param(s->c, fsdp_unit_param_info(s->m.unit[u], i)->name, s->m.unit[u], i));
    FSDP_TRY(fsdp_checkpoint_add_optim(s->c, s->m.optim));
    FSDP_TRY(fsdp_checkpoint_add_buffer(s->c, "seen", FSDP_I32, 1, (int64_t[]){ 5 }, s->seen));
    FSDP_TRY(fsdp_checkpoint_add_i64(s->c, "tokens", &s->tokens));
    return fsdp_checkpoint_add_f64(s->c, "best", &s->best);
}

static inline void saved_mini_close(saved_mini *s)
{
    fsdp_checkpoint_destroy(s->c);
    mini_destroy(&s->m);
}

/* Training that nothing else would do. */
static inline fsdp_status saved_mini_disturb(saved_mini *s, int64_t step)
{
    FSDP_TRY(mini_step(&s->m, MINI_NESTED, step, 2 * fsdp_comm_size(s->m.comm)));
    s->tokens += 100;
    s->best = -1e300;
    for (int i = 0; i < 5; i++) s->seen[i] += 1000;
    return FSDP_OK;
}

/* The same names, and the same elements where both have them. */
static inline bool same_state(const fsdp_state *a, const fsdp_state *b)
{
    if (fsdp_state_count(a) != fsdp_state_count(b)) return false;
    for (int i = 0; i < fsdp_state_count(a); i++) {
        const fsdp_state_tensor *x = fsdp_state_at(a, i), *y = fsdp_state_find(b, x->name);
        if (y == NULL || x->first != y->first || x->count != y->count || x->dtype != y->dtype || x->numel != y->numel || x->what != y->what) return false;
        if (x->count > 0 && memcmp(x->data, y->data, (size_t)x->count * fsdp_dtype_bytes(x->dtype)) != 0) return false;
    }
    int64_t i, k;
    double d, e;
    return fsdp_state_i64(a, "tokens", &i) == fsdp_state_i64(b, "tokens", &k) && i == k && fsdp_state_f64(a, "best", &d) == fsdp_state_f64(b, "best", &e) && d == e &&
           fsdp_state_i64(a, "optim.steps.big.w", &i) == FSDP_OK && fsdp_state_i64(b, "optim.steps.big.w", &k) == FSDP_OK && i == k;
}

#endif
