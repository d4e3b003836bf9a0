/* SPDX-License-Identifier: MIT
 *
 * Long random sequences of calls, right ones and wrong ones, with failures put in, on units of random shapes and modes:
 * what comes out has the bits of a plain program of one process (support/model.h), which also says what each call must
 * return. Each rank makes up the same calls from a seed, and has the model beside it.
 *
 *     random_calls_test                          what `make check` runs
 *     random_calls_test --seed 17 --calls 400    one run again; --trace prints its calls
 *     random_calls_test --soak 1000000           runs of 1000 calls until so many are made; --seed: the first one
 *
 * In it: units made, destroyed, made differently; passes of both kinds, up to three at a time, forwards, backwards,
 * recomputes in any order, with sync and without, gradients written in part, once more or not finite, or of frozen
 * parameters not at all; cancelled passes; what is pending read; summons nested, read and
 * written, with other values on each rank; fills, also failing on one rank; steps of the optimizer and of one's own, on
 * any units, cancelled; dropped gradients; meshes, resharding to neighbours, slices on another device; what is gathered ahead, unsharded and resharded by hand;
 * save (also in the background) and load; kernels that fail; allocations that fail, on one rank or all;
 * a rank that leaves the others; collective resets; calls that are not allowed; ranks that are late.
 *
 * Not in it: types below fp32, ranks that join a pass, caps, values from one rank, summons on one rank or
 * with gradients, AdamW, averages, several communicators; ranks killed (tests/shard/fault_test.c). */
#define _XOPEN_SOURCE 700 /* nftw */
#include "support/model.h"
#include "support/ranks.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/unit.h"

#include <ftw.h>
#include <time.h>
#include <unistd.h>

/* ---- numbers ---- */

typedef struct rng {
    uint64_t state;
} rng;

static uint32_t draw(rng *r)
{
    uint64_t x = r->state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(x ^ x >> 31);
}

static int below(rng *r, int n)
{
    return (int)(draw(r) % (unsigned)n);
}

static bool one_in(rng *r, int n)
{
    return below(r, n) == 0;
}

/* ---- which call comes next ---- */

static const struct {
    call_kind kind;
    int within, without; /* how often, while a pass is open and while none is */
} habits[] = {
    { CALL_PASS_BEGIN, 4, 120 },    { CALL_PASS_END, 10, 0 },        { CALL_PASS_CANCEL, 1, 0 },    { CALL_WEIGHT, 6, 0 },         { CALL_FORWARD_BEGIN, 20, 0 },
    { CALL_FORWARD_END, 40, 0 },   { CALL_RECOMPUTE_BEGIN, 6, 0 },  { CALL_RECOMPUTE_END, 12, 0 }, { CALL_BACKWARD_BEGIN, 80, 0 }, { CALL_BACKWARD_END, 40, 0 },
    { CALL_GRAD, 6, 0 },           { CALL_PEEK, 8, 6 },             { CALL_PREFETCH, 8, 4 },        { CALL_UNSHARD, 3, 6 },        { CALL_RESHARD, 3, 4 },
    { CALL_READ, 0, 12 },          { CALL_READ_ALL, 0, 3 },       { CALL_SUMMON_READ, 0, 10 },
    { CALL_SUMMON_WRITE, 0, 8 },   { CALL_WRITE, 0, 16 },           { CALL_SUMMON_END, 0, 30 },    { CALL_FILL, 0, 14 },          { CALL_FILL_FAILS, 0, 4 },
    { CALL_OPTIM_STEP, 0, 16 },    { CALL_STEP_BEGIN, 0, 10 },      { CALL_STEP_WRITE, 0, 14 },    { CALL_STEP_NORM, 0, 6 },      { CALL_STEP_END, 0, 24 },
    { CALL_STEP_CANCEL, 0, 3 },    { CALL_ZERO_GRAD, 0, 4 },        { CALL_RENEW, 0, 5 },          { CALL_CREATE_DIFFERS, 0, 1 }, { CALL_OPTIM_RENEW, 0, 3 },
    { CALL_SYNC, 8, 0 },           { CALL_FREEZE, 0, 16 },         { CALL_PENDING, 3, 6 },
    { CALL_SAVE, 0, 1 },           { CALL_LOAD, 0, 1 },             { CALL_KERNEL_FAILS, 1, 0 },   { CALL_RESET, 1, 1 },          { CALL_STRAY, 1, 1 },
    { CALL_BARRIER, 1, 1 },
};
enum { HABITS = sizeof(habits) / sizeof(habits[0]) };

static call_kind choose(rng *g, bool within)
{
    int all = 0, i = 0;
    for (int k = 0; k < HABITS; k++) all += within ? habits[k].within : habits[k].without;
    for (int at = below(g, all); at >= (within ? habits[i].within : habits[i].without); i++) at -= within ? habits[i].within : habits[i].without;
    return habits[i].kind;
}

static bool is_one_of(call_kind k, const call_kind *list, int n)
{
    for (int i = 0; i < n; i++)
        if (list[i] == k) return true;
    return false;
}
#define ONE_OF(k, ...) is_one_of(k, (const call_kind[]){ __VA_ARGS__ }, (int)(sizeof((const call_kind[]){ __VA_ARGS__ }) / sizeof(call_kind)))

/* A call of this kind with arguments at random. */
static call make_up(rng *g, const model *m, call_kind kind)
{
    call c = { .kind = kind, .unit = below(g, MODEL_UNITS), .pass = below(g, MODEL_PASSES), .rank = below(g, m->ranks), .salt = draw(g), .flag = one_in(g, 2) };
    const model_unit *u = &m->unit[c.unit];
    c.param = u->params > 0 ? below(g, u->params) : 0;
    c.mask = 1u + (unsigned)below(g, (1 << MODEL_UNITS) - 1);
    if (ONE_OF(kind, CALL_BACKWARD_BEGIN, CALL_GRAD)) {
        c.mask = one_in(g, 4) ? c.mask % (1u << MODEL_PARAMS) : (1u << MODEL_PARAMS) - 1;
        c.flag = one_in(g, 100); /* not finite */
    }
    if (ONE_OF(kind, CALL_PASS_BEGIN)) c.flag = !one_in(g, 5);
    if (kind == CALL_SYNC) c.flag = !one_in(g, 4); /* off */
    if (ONE_OF(kind, CALL_STEP_END, CALL_STEP_CANCEL, CALL_STEP_NORM, CALL_STEP_WRITE) && one_in(g, 2)) c.mask = model_in_step(m);
    for (int k = 0; k < MODEL_UNITS; k++)
        if (!m->unit[k].exists && !ONE_OF(kind, CALL_RENEW, CALL_OPTIM_RENEW)) c.mask &= ONE_OF(kind, CALL_BACKWARD_BEGIN, CALL_GRAD) ? ~0u : ~(1u << k);
    return c;
}

/* What the plain program has no answer to, or no room for. */
static bool makes_sense(const model *m, const call *c)
{
    const model_unit *u = &m->unit[c->unit];
    const model_pass *p = &m->pass[c->pass];
    bool steps = ONE_OF(c->kind, CALL_STEP_BEGIN, CALL_STEP_WRITE, CALL_STEP_NORM, CALL_STEP_END, CALL_STEP_CANCEL);
    if (steps && c->mask == 0) return false;
    if (!u->exists && !ONE_OF(c->kind, CALL_RENEW, CALL_RESET, CALL_BARRIER, CALL_READ_ALL, CALL_OPTIM_STEP, CALL_OPTIM_RENEW) && !steps) return false;
    switch (c->kind) {
    case CALL_PASS_BEGIN: return !p->open;
    case CALL_FORWARD_BEGIN: return p->open && model_open_uses(m, c->pass) < 6 && p->use[c->unit].forwards < 6;
    case CALL_BACKWARD_BEGIN: return p->use[c->unit].rounds < MODEL_ROUNDS && u->weights < MODEL_WEIGHTS;
    case CALL_PASS_END: return p->open;
    case CALL_WEIGHT:
    case CALL_SYNC:
    case CALL_PASS_CANCEL:
    case CALL_KERNEL_FAILS: return p->open;
    case CALL_FREEZE:
    case CALL_READ: return u->params > 0;
    case CALL_RENEW:
    case CALL_CREATE_DIFFERS: return !u->exists || (u->summons == 0 && !u->in_step); /* a unit is destroyed at rest */
    case CALL_STEP_WRITE: return model_in_step(m) == 0 || model_grads_finite(m, c->mask);
    case CALL_STEP_CANCEL:
        for (int k = 0; k < MODEL_UNITS; k++)
            if ((c->mask >> k & 1) && m->unit[k].step_written) return false;
        return true;
    case CALL_SAVE: return model_in_step(m) == 0;
    case CALL_LOAD: return m->saves > 0;
    case CALL_STRAY: return m->ranks > 1;
    default: return true;
    }
}

/* For some time new things are begun, then what is open is ended, so that passes come to an end and steps have gradients. */
static bool is_for_later(long n, call_kind k)
{
    enum { PHASE = 40 };
    return n / PHASE % 2 == 1 && ONE_OF(k, CALL_PASS_BEGIN, CALL_FORWARD_BEGIN, CALL_RECOMPUTE_BEGIN, CALL_PASS_CANCEL, CALL_KERNEL_FAILS, CALL_STRAY, CALL_RESET);
}

/* Chance alone seldom trains. A plan is what a program would do: a pass through some units, now and then a step; other calls
 * come in between, and what is not possible any more is left out. */
typedef struct plan {
    int count, at, pass;
    struct {
        call_kind kind;
        int unit;
    } turn[64];
} plan;

static void note(plan *p, call_kind kind, int unit)
{
    p->turn[p->count].kind = kind;
    p->turn[p->count++].unit = unit;
}

static void plan_backward(rng *g, plan *p, int unit)
{
    if (one_in(g, 4)) {
        note(p, CALL_RECOMPUTE_BEGIN, unit);
        note(p, CALL_RECOMPUTE_END, unit);
    }
    note(p, CALL_BACKWARD_BEGIN, unit);
    if (one_in(g, 4)) note(p, CALL_GRAD, unit);
    note(p, CALL_BACKWARD_END, unit);
}

static void make_plan(rng *g, plan *p)
{
    int order[MODEL_UNITS], n = 1 + below(g, MODEL_UNITS);
    for (int i = 0; i < n; i++) order[i] = below(g, MODEL_UNITS); /* some twice */
    bool nested = one_in(g, 2), in_turns = !nested && one_in(g, 2), saves = one_in(g, 12);
    *p = (plan){ .pass = below(g, MODEL_PASSES) };
    note(p, CALL_PASS_BEGIN, 0);
    if (one_in(g, 2)) note(p, CALL_WEIGHT, 0);
    if (one_in(g, 3)) note(p, CALL_SYNC, 0);
    for (int i = 0; i < n; i++) {
        note(p, CALL_FORWARD_BEGIN, order[i]);
        if (!nested || i > 0) note(p, CALL_FORWARD_END, order[i]);
        if (in_turns) plan_backward(g, p, order[i]);
    }
    if (nested) note(p, CALL_FORWARD_END, order[0]);
    for (int i = n - 1; i >= 0 && !in_turns; i--) plan_backward(g, p, order[i]);
    note(p, CALL_PASS_END, 0);
    if (saves) note(p, CALL_SAVE, 0);
    if (one_in(g, 3)) note(p, CALL_OPTIM_STEP, 0);
    else if (one_in(g, 3)) {
        note(p, CALL_STEP_BEGIN, 0);
        note(p, CALL_STEP_NORM, 0);
        if (one_in(g, 2)) note(p, CALL_STEP_WRITE, 0);
        note(p, CALL_STEP_END, 0);
    }
    if (saves) note(p, CALL_LOAD, 0);
}

static bool next_of_plan(rng *g, const model *m, plan *p, call *c)
{
    if (p->at == p->count) return false;
    *c = make_up(g, m, p->turn[p->at].kind);
    c->unit = p->turn[p->at++].unit;
    c->pass = p->pass;
    if (c->kind == CALL_PASS_BEGIN) c->flag = true;
    return makes_sense(m, c) && model_expects(m, c) == FSDP_OK;
}

static call next_call(rng *g, const model *m, plan *p, bool injects, long n)
{
    for (;;) {
        bool within = model_open_passes(m) > 0, lost = false, probe = one_in(g, 12);
        call c;
        for (int k = 0; k < MODEL_PASSES; k++) lost |= m->pass[k].open && m->pass[k].lost;
        if (p->at == p->count && !within && one_in(g, 8)) make_plan(g, p);
        bool planned = !lost && !one_in(g, 5) && next_of_plan(g, m, p, &c);
        if (!planned) c = make_up(g, m, choose(g, probe ? one_in(g, 2) : within));
        if (lost) { /* nothing else is said to work */
            c.kind = one_in(g, 4) ? CALL_PASS_END : CALL_PASS_CANCEL;
            if (!m->pass[c.pass].lost) continue;
        }
        /* What is always allowed would come too often, and leave nothing to look at. */
        if (!lost && !planned && ONE_OF(c.kind, CALL_RESET, CALL_STRAY, CALL_KERNEL_FAILS, CALL_PASS_CANCEL, CALL_ZERO_GRAD, CALL_RENEW) && !one_in(g, 4)) continue;
        if (!lost && !planned && is_for_later(n, c.kind)) continue;
        if (!makes_sense(m, &c)) continue;
        fsdp_status want = model_expects(m, &c);
        if (want == FSDP_ERR_STATE && (!probe || ONE_OF(c.kind, CALL_WRITE, CALL_STEP_WRITE, CALL_RENEW, CALL_CREATE_DIFFERS, CALL_READ_ALL)) && c.kind != CALL_PEEK && !lost) continue;
        if (injects && want == FSDP_OK && one_in(g, planned ? 60 : 16)) c.nomem = 1 + below(g, 12);
        return c;
    }
}

/* ---- the calls themselves ---- */

typedef struct work {
    uint64_t seed;
    long calls;
    bool trace;
    const char *folder;
} work;

typedef struct run {
    const corner *c;
    const work *w;
    fsdp_comm *comm;
    int rank, size;
    fsdp_device *device, *storage; /* storage: another one, or NULL */
    fsdp_unit *unit[MODEL_UNITS];
    fsdp_pass *pass[MODEL_PASSES];
    float *number; /* of each pass: host memory for kernels */
    fsdp_optim *optim;
    model *m;
    rng late;
    call now;
} run;

static void be_late(run *r)
{
    if (r->size > 1 && one_in(&r->late, 24)) nanosleep(&(struct timespec){ .tv_nsec = below(&r->late, 300) * 1000 }, NULL);
}

static fsdp_stream *stream_of(const run *r)
{
    for (int u = 0; u < MODEL_UNITS; u++)
        if (r->unit[u] != NULL) return fsdp_unit_stream(r->unit[u]);
    return NULL;
}

static fsdp_unit_list list_of(run *r, unsigned mask, fsdp_unit **room)
{
    int n = 0;
    for (int u = 0; u < MODEL_UNITS; u++)
        if ((mask >> u & 1) && r->unit[u] != NULL) room[n++] = r->unit[u];
    return (fsdp_unit_list){ room, n };
}

typedef struct args {
    float *number;
    uint64_t leaf;
    int count;
    bool poison;
    int64_t numel[MODEL_PARAMS];
    const float *p[MODEL_PARAMS];
    float *g[MODEL_PARAMS], beta[MODEL_PARAMS];
} args;

static fsdp_status k_forward(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    for (int i = 0; i < a->count; i++) *a->number = model_mix(*a->number, fsdp_kernel_ptr(k, a->p[i]), a->numel[i], a->leaf, i);
    *a->number += 0.25f;
    return FSDP_OK;
}

static fsdp_status k_backward(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    for (int i = 0; i < a->count; i++)
        if (a->g[i] != NULL) model_gradient(fsdp_kernel_ptr(k, a->g[i]), a->beta[i] != 0, *a->number, fsdp_kernel_ptr(k, a->p[i]), a->numel[i], a->leaf, i, a->poison);
    *a->number *= 0.75f;
    return FSDP_OK;
}

static fsdp_status k_fail(const fsdp_kernel *k, const void *v)
{
    (void)k;
    (void)v;
    FSDP_FAIL(FSDP_ERR_NONFINITE, "a kernel of the caller's fails");
}

/* Compute in a pass. grads: of which parameters; -1: a forward. */
static fsdp_status compute(run *r, const call *c, int pass, int64_t grads)
{
    fsdp_unit *u = r->unit[c->unit];
    args a = { .number = &r->number[pass], .leaf = r->m->pass[pass].serial * (uint64_t)r->size + (uint64_t)r->rank, .count = fsdp_unit_param_count(u), .poison = c->flag };
    for (int i = 0; i < a.count; i++) {
        a.numel[i] = fsdp_unit_param_numel(u, i);
        a.p[i] = fsdp_unit_param(u, i);
        if (a.p[i] == NULL) return fsdpi_error_status();
        if (grads < 0 || !(grads >> i & 1) || fsdp_unit_frozen(u, i)) continue;
        a.g[i] = fsdp_unit_grad(u, i, &a.beta[i]);
        if (a.g[i] == NULL) return fsdpi_error_status();
    }
    return fsdp_stream_launch(fsdp_unit_stream(u), grads < 0 ? k_forward : k_backward, &a, sizeof(a));
}

static fsdp_status expect_equal(run *r, const float *got, const float *want, int64_t numel, const char *what, int unit, int param)
{
    for (int64_t i = 0; i < numel; i++)
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "rank %d: %s: unit %d, parameter %d, element %lld is %.9g, not %.9g (mode %s, it is %s)", r->rank, what, unit, param, (long long)i, (double)got[i],
                      (double)want[i], unit >= 0 ? fsdp_mode_name(r->m->unit[unit].mode) : "-", unit >= 0 ? fsdp_unit_state(r->unit[unit]) : "-");
    return FSDP_OK;
}

/* What is read through an address: in use, or summoned. Nothing, where it cannot be. */
static fsdp_status peek(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    fsdp_stream *s = fsdp_unit_stream(r->unit[c->unit]);
    for (int i = 0; i < u->params; i++) {
        float got[MODEL_TOTAL];
        const float *p = fsdp_unit_param(r->unit[c->unit], i);
        if (p == NULL && model_is_whole(r->m, c->unit)) return fsdpi_error_status();
        if (p == NULL) continue;
        if (model_is_sharded(r->m, c->unit)) FSDP_FAIL(FSDP_ERR_INTERNAL, "unit %d is sharded, but has an address", c->unit);
        if (u->numel[i] == 0) continue;
        FSDP_TRY(fsdp_stream_copy(s, got, p, (size_t)u->numel[i] * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(s));
        FSDP_TRY(expect_equal(r, got, u->p + u->at[i], u->numel[i], "looked at", c->unit, i));
    }
    float *w = fsdp_unit_summoned(r->unit[c->unit], 0);
    if (u->params > 0 && (w != NULL) != (u->summons > 0 && u->writeback)) FSDP_FAIL(FSDP_ERR_INTERNAL, "unit %d has%s a place to write to", c->unit, w != NULL ? "" : " not");
    return FSDP_OK;
}

static fsdp_status read_one(run *r, int unit, int param, bool wanted)
{
    const model_unit *u = &r->m->unit[unit];
    float got[MODEL_TOTAL];
    FSDP_TRY(fsdp_unit_read_param(r->unit[unit], param, wanted ? got : NULL));
    return wanted ? expect_equal(r, got, u->p + u->at[param], u->numel[param], "read", unit, param) : FSDP_OK;
}

static fsdp_status read_all(run *r)
{
    for (int u = 0; u < MODEL_UNITS; u++)
        for (int i = 0; r->unit[u] != NULL && i < r->m->unit[u].params; i++) FSDP_TRY(read_one(r, u, i, true));
    return FSDP_OK;
}

/* Without asking anybody: what this rank has of all parameters of a unit. */
static fsdp_status read_pending(run *r, const call *c)
{
    static const fsdp_pending kinds[] = { FSDP_PENDING_OWN, FSDP_PENDING_REDUCED };
    const model_unit *u = &r->m->unit[c->unit];
    float want[MODEL_TOTAL], got[MODEL_TOTAL];
    for (int k = 0; k < 2; k++) {
        bool has = kinds[k] == FSDP_PENDING_OWN ? model_own(r->m, c->unit, r->rank, want) : model_reduced(r->m, c->unit, want);
        for (int i = 0; i < u->params; i++) {
            int64_t first, numel;
            bool pending = (fsdp_unit_pending(r->unit[c->unit], i) & kinds[k]) != 0;
            FSDP_FAIL_IF(pending != (has && !u->frozen[i]), FSDP_ERR_INTERNAL, "rank %d: parameter %d has%s pending gradients of kind %d", r->rank, i, pending ? "" : " no", k);
            if (!pending) continue;
            FSDP_TRY(fsdp_unit_read_pending(r->unit[c->unit], i, kinds[k], &first, &numel, got));
            FSDP_TRY(expect_equal(r, got, want + u->at[i] + first, numel, k == 0 ? "own pending" : "reduced pending", c->unit, i));
        }
    }
    return FSDP_OK;
}

static fsdp_status write_summoned(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    fsdp_stream *s = fsdp_unit_stream(r->unit[c->unit]);
    for (int i = 0; i < u->params; i++) {
        float x[MODEL_TOTAL], *to = fsdp_unit_summoned(r->unit[c->unit], i);
        if (to == NULL) return fsdpi_error_status();
        for (int j = 0; j < u->numel[i]; j++) x[j] = model_value(c->salt + (c->flag ? (uint32_t)r->rank : 0), c->unit, i, j);
        if (u->numel[i] > 0) FSDP_TRY(fsdp_stream_copy(s, to, x, (size_t)u->numel[i] * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(s));
    }
    return FSDP_OK;
}

/* Called for the elements that this rank keeps. */
static fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    const run *r = arg;
    const call *c = &r->now;
    (void)name;
    if (c->kind == CALL_FILL_FAILS && c->rank == r->rank) FSDP_FAIL(FSDP_ERR_IO, "no values on this rank");
    for (int64_t i = 0; i < numel; i++) out[i] = model_value(c->salt + (c->flag ? (uint32_t)r->rank : 0), c->unit, param, first + i);
    return FSDP_OK;
}

typedef struct update_args {
    float *p;
    const float *g;
    int64_t numel;
} update_args;

static fsdp_status k_update(const fsdp_kernel *k, const void *v)
{
    const update_args *a = v;
    float *p = fsdp_kernel_ptr(k, a->p);
    const float *g = fsdp_kernel_ptr(k, a->g);
    for (int64_t i = 0; i < a->numel; i++) p[i] = model_own_update(p[i], g != NULL ? &g[i] : NULL);
    return FSDP_OK;
}

static fsdp_status write_masters(run *r, const call *c)
{
    for (int u = 0; u < MODEL_UNITS; u++) {
        const fsdp_slice *s;
        int n;
        if (!(c->mask >> u & 1) || r->unit[u] == NULL) continue;
        fsdp_unit_slices(r->unit[u], &s, &n);
        for (int i = 0; i < n; i++) FSDP_TRY(fsdp_stream_launch(fsdp_unit_storage_stream(r->unit[u]), k_update, &(update_args){ s[i].master, s[i].grad, s[i].numel }, sizeof(update_args)));
    }
    return FSDP_OK;
}

static fsdp_status check_norm(run *r, const call *c, fsdp_unit_list list)
{
    double norm, weight;
    FSDP_TRY(fsdp_step_grad_norm(list, &norm, &weight));
    model_norm want = model_norm_of(r->m, c->mask);
    FSDP_FAIL_IF(memcmp(&norm, &want.norm, sizeof(norm)) != 0 || weight != want.weight, FSDP_ERR_INTERNAL, "rank %d: norm %.17g and weight %g, not %.17g and %g", r->rank, norm, weight,
                 want.norm, want.weight);
    return FSDP_OK;
}

static fsdp_status make_optim(run *r, unsigned mask)
{
    fsdp_unit *room[MODEL_UNITS];
    fsdp_optim_destroy(r->optim);
    r->optim = NULL;
    return fsdp_optim_create_sgd(&r->optim, list_of(r, mask, room), &(fsdp_sgd_opts){ .lr = MODEL_LR, .momentum = MODEL_MOMENTUM, .weight_decay = MODEL_DECAY });
}

static fsdp_status make_unit(run *r, int unit, uint32_t salt, bool differs, fsdp_unit **out)
{
    static _Thread_local model_unit made;
    char name[16];
    model_unit_make(&made, unit, salt, r->size);
    snprintf(name, sizeof(name), "u%d", unit);
    fsdp_unit_opts o = { .name = name, .mode = made.mode, .compute_device = r->device, .prefetch = (int)(salt / 4 % 5) - 1 };
    if (salt % 3 == 0) o.storage_device = r->storage;
    if (made.mode != FSDP_MODE_NONE) o.shards = made.shards;
    if (made.mode == FSDP_MODE_FULL && made.shards % 2 == 0 && salt / 8 % 2 == 0) o.reshard_group = made.shards / 2;
    if (differs) {
        o.mode = (o.mode + 1) % 4;
        o.reshard_group = 0;
    }
    if (r->w->trace && r->rank == 0)
        fprintf(stderr, "     u%d: mode %s, %d shards, %d parameters, %d elements%s\n", unit, fsdp_mode_name(o.mode), made.shards, made.params, made.total,
                o.storage_device != NULL ? ", stored elsewhere" : "");
    return fsdp_unit_create(out, r->comm, made.param, made.params, &o);
}

static fsdp_status renew(run *r, const call *c)
{
    fsdp_optim_destroy(r->optim);
    r->optim = NULL;
    fsdp_unit_destroy(r->unit[c->unit]);
    r->unit[c->unit] = NULL;
    FSDP_TRY(make_unit(r, c->unit, c->salt, false, &r->unit[c->unit]));
    return make_optim(r, c->mask);
}

/* On one rank it has another mode, and none gets it. */
static fsdp_status create_differing(run *r, const call *c)
{
    fsdp_unit *u = NULL;
    fsdp_status st = make_unit(r, c->unit, c->salt, r->rank == c->rank, &u);
    if (st == FSDP_OK) fsdp_unit_destroy(u); /* one rank */
    return st;
}

static fsdp_status make_checkpoint(run *r, fsdp_checkpoint **out)
{
    FSDP_TRY(fsdp_checkpoint_create(out, r->comm));
    for (int u = 0; u < MODEL_UNITS; u++)
        for (int i = 0; r->unit[u] != NULL && i < fsdp_unit_param_count(r->unit[u]); i++)
            FSDP_TRY(fsdp_checkpoint_add_param(*out, fsdp_unit_param_info(r->unit[u], i)->name, r->unit[u], i));
    return r->optim != NULL ? fsdp_checkpoint_add_optim(*out, r->optim) : FSDP_OK;
}

static fsdp_status save(run *r, fsdp_checkpoint *ck, bool background)
{
    fsdp_status st = fsdp_checkpoint_save_with(ck, r->w->folder, r->m->saves + 1, &(fsdp_save_opts){ .keep = 1, .background = background });
    return st == FSDP_OK ? fsdp_checkpoint_wait(ck) : st;
}

static fsdp_status save_or_load(run *r, const call *c)
{
    fsdp_checkpoint *ck = NULL;
    char path[256];
    snprintf(path, sizeof(path), "%s/step-%08d", r->w->folder, r->m->saves);
    fsdp_status st = make_checkpoint(r, &ck);
    if (st == FSDP_OK) st = c->kind == CALL_SAVE ? save(r, ck, c->salt % 2) : fsdp_checkpoint_load(ck, path);
    fsdp_checkpoint_destroy(ck);
    return st;
}

static fsdp_status begin_pass(run *r, const call *c)
{
    FSDP_TRY(fsdp_pass_begin(&r->pass[c->pass], r->comm, c->flag ? FSDP_PASS_TRAIN : FSDP_PASS_EVAL));
    if (stream_of(r) != NULL) FSDP_TRY(fsdp_stream_sync(stream_of(r))); /* the number is used again */
    r->number[c->pass] = 0;
    return FSDP_OK;
}

static fsdp_status end_pass(run *r, const call *c)
{
    float want = r->m->pass[c->pass].number[r->rank];
    FSDP_TRY(fsdp_pass_end(r->pass[c->pass]));
    r->pass[c->pass] = NULL;
    if (stream_of(r) == NULL) return FSDP_OK;
    FSDP_TRY(fsdp_stream_sync(stream_of(r)));
    return expect_equal(r, &r->number[c->pass], &want, 1, "what forwards and backwards made", -1, -1);
}

static fsdp_status cancel_pass(run *r, int pass)
{
    fsdp_pass *p = r->pass[pass];
    r->pass[pass] = NULL;
    return fsdp_pass_cancel(p);
}

/* Where ranks went apart, or a device has failed in waits that the reset ended, gradients of passes without sync may go: on all
 * ranks alike. */
static fsdp_status reset(run *r)
{
    memset(r->pass, 0, sizeof(r->pass));
    FSDP_TRY(fsdp_comm_reset(r->comm));
    double gone[MODEL_UNITS], all[MODEL_UNITS];
    bool may_go = r->now.kind == CALL_STRAY || r->now.nomem > 0 || strcmp(r->c->device, "guard") == 0 || r->storage != NULL;
    for (int u = 0; u < MODEL_UNITS; u++) {
        bool has = r->unit[u] != NULL && fsdpi_unsent_any(r->unit[u]), had = r->unit[u] != NULL && model_has_unsent(r->m, u);
        FSDP_FAIL_IF(has && !had, FSDP_ERR_INTERNAL, "rank %d: unit %d has gradients of passes without sync that do not count", r->rank, u);
        FSDP_FAIL_IF(had && !has && !may_go, FSDP_ERR_INTERNAL, "rank %d: unit %d has lost gradients of passes without sync in a reset", r->rank, u);
        all[u] = gone[u] = had && !has;
        if (had && !has) model_drop_unsent(r->m, u);
    }
    FSDP_TRY(fsdp_comm_max(r->comm, all, MODEL_UNITS));
    FSDP_FAIL_IF(memcmp(all, gone, sizeof(all)) != 0, FSDP_ERR_INTERNAL, "rank %d: a reset drops gradients on other ranks alone", r->rank);
    return FSDP_OK;
}

/* One rank does something else; all are told, and a reset mends it. */
static fsdp_status stray(run *r, const call *c)
{
    fsdp_status st = FSDP_OK;
    if (r->rank != c->rank || c->salt % 3 == 1) {
        fsdp_unit *u = r->unit[c->unit];
        bool passes = model_open_passes(r->m) > 0;
        switch (c->salt / 3 % 4) {
        case 0: break;
        case 1:
            if (r->rank != c->rank && !passes && r->m->unit[c->unit].summons == 0 && !r->m->unit[c->unit].in_step) st = fsdp_unit_fill(u, fill, r);
            break;
        case 2:
            if (!passes && r->m->unit[c->unit].in_step) break;
            for (int p = 0; p < MODEL_PASSES && st == FSDP_OK; p++)
                if (r->pass[p] != NULL && (r->rank != c->rank)) st = fsdp_unit_begin_forward(u, r->pass[p]);
            break;
        default:
            for (int p = 0; p < MODEL_PASSES && st == FSDP_OK; p++)
                if (r->pass[p] != NULL && model_open_uses(r->m, p) == 0 && r->rank != c->rank) st = fsdp_pass_end(r->pass[p]);
            break;
        }
        /* The one that is different says so by another call, or by a reset. */
        if (st == FSDP_OK) st = r->rank == c->rank ? fsdp_comm_stop_agreed(r->comm, &(bool){ false }) : fsdp_comm_barrier(r->comm);
        FSDP_FAIL_IF(st != FSDP_ERR_COMM, FSDP_ERR_INTERNAL, "rank %d: %s, where rank %d left the others: %s", r->rank, fsdp_status_name(st), c->rank, fsdp_last_error_message());
    }
    return reset(r);
}

static fsdp_status make(run *r, const call *c)
{
    fsdp_unit *u = r->unit[c->unit], *room[MODEL_UNITS];
    fsdp_pass *p = r->pass[c->pass];
    switch (c->kind) {
    case CALL_PASS_BEGIN: return begin_pass(r, c);
    case CALL_PASS_END: return end_pass(r, c);
    case CALL_PASS_CANCEL: return cancel_pass(r, c->pass);
    case CALL_WEIGHT: fsdp_pass_add_weight(p, (c->salt + (uint32_t)r->rank) % 7); return FSDP_OK;
    case CALL_SYNC: return fsdp_pass_set_sync(p, !c->flag);
    case CALL_FREEZE: return fsdp_unit_set_frozen(u, c->param, c->flag);
    case CALL_PENDING: return read_pending(r, c);
    case CALL_FORWARD_BEGIN: FSDP_TRY(fsdp_unit_begin_forward(u, p)); return compute(r, c, c->pass, -1);
    case CALL_FORWARD_END: return fsdp_unit_end_forward(u, p);
    case CALL_RECOMPUTE_BEGIN: FSDP_TRY(fsdp_unit_begin_recompute(u, p)); return compute(r, c, c->pass, -1);
    case CALL_RECOMPUTE_END: return fsdp_unit_end_recompute(u, p);
    case CALL_BACKWARD_BEGIN: FSDP_TRY(fsdp_unit_begin_backward(u, p)); return compute(r, c, c->pass, c->mask);
    case CALL_BACKWARD_END: return fsdp_unit_end_backward(u, p);
    case CALL_GRAD:
        if (r->m->unit[c->unit].owner < 0) return fsdp_unit_param_count(u) > 0 && fsdp_unit_grad(u, 0, &(float){ 0 }) != NULL ? FSDP_OK : FSDP_ERR_STATE;
        if (model_expects(r->m, c) != FSDP_OK) return fsdp_unit_param_count(u) > 0 && fsdp_unit_grad(u, 0, &(float){ 0 }) != NULL ? FSDP_OK : FSDP_ERR_STATE;
        return compute(r, c, r->m->unit[c->unit].owner, c->mask);
    case CALL_PEEK: return peek(r, c);
    case CALL_PREFETCH: return fsdp_unit_prefetch(r->unit[c->unit]);
    case CALL_UNSHARD: return fsdp_unit_unshard(r->unit[c->unit]);
    case CALL_RESHARD: return fsdp_unit_reshard(r->unit[c->unit]);
    case CALL_READ: return read_one(r, c->unit, c->param, c->salt % 3 > 0 || r->rank == c->rank);
    case CALL_READ_ALL: return read_all(r);
    case CALL_SUMMON_READ: return fsdp_unit_summon_begin(u, c->flag ? NULL : &(fsdp_unit_summon_opts){ .writeback = false });
    case CALL_SUMMON_WRITE: return fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true });
    case CALL_WRITE: return write_summoned(r, c);
    case CALL_SUMMON_END: return fsdp_unit_summon_end(u);
    case CALL_FILL:
    case CALL_FILL_FAILS: return fsdp_unit_fill(u, fill, r);
    case CALL_OPTIM_STEP:
        return r->optim != NULL ? fsdp_optim_step(r->optim, &(fsdp_step_opts){ .grad_scale = model_grad_scale(c), .clip = c->flag ? MODEL_CLIP : 0 }) : FSDP_OK;
    case CALL_STEP_BEGIN: return fsdp_step_begin(list_of(r, c->mask, room));
    case CALL_STEP_WRITE: return write_masters(r, c);
    case CALL_STEP_NORM: return check_norm(r, c, list_of(r, c->mask, room));
    case CALL_STEP_END: return fsdp_step_end(list_of(r, c->mask, room));
    case CALL_STEP_CANCEL: return fsdp_step_cancel(list_of(r, c->mask, room));
    case CALL_ZERO_GRAD: return fsdp_unit_zero_grad(u);
    case CALL_RENEW: return renew(r, c);
    case CALL_CREATE_DIFFERS: return create_differing(r, c);
    case CALL_OPTIM_RENEW: return make_optim(r, c->mask);
    case CALL_SAVE:
    case CALL_LOAD: return save_or_load(r, c);
    case CALL_KERNEL_FAILS: (void)!fsdp_stream_launch(stream_of(r), k_fail, NULL, 0); return cancel_pass(r, c->pass);
    case CALL_RESET: return reset(r);
    case CALL_STRAY: return stray(r, c);
    case CALL_BARRIER: return fsdp_comm_barrier(r->comm);
    case CALL_KINDS: break;
    }
    return FSDP_ERR_INTERNAL;
}

/* ---- an allocation fails ---- */

static bool in_a_pass(call_kind k)
{
    return ONE_OF(k, CALL_PASS_END, CALL_FORWARD_BEGIN, CALL_FORWARD_END, CALL_RECOMPUTE_BEGIN, CALL_RECOMPUTE_END, CALL_BACKWARD_BEGIN, CALL_BACKWARD_END, CALL_GRAD);
}

/* In which calls it can be put right. Outside of passes: not where a launch itself allocates. */
static bool can_fail(const run *r, call_kind k)
{
    if (in_a_pass(k)) return true;
    bool queue = strcmp(r->c->device, "guard") == 0 || r->storage != NULL;
    return ONE_OF(k, CALL_PASS_BEGIN) || (!queue && ONE_OF(k, CALL_SUMMON_READ, CALL_SUMMON_WRITE, CALL_FILL, CALL_READ, CALL_STEP_BEGIN) && r->size == 1) ||
           (!queue && ONE_OF(k, CALL_FILL, CALL_SUMMON_READ, CALL_SUMMON_WRITE));
}

/* Alone: what failed in a pass costs the pass, everything else is done again. Among others: a reset mends it. */
static fsdp_status make_without_memory(run *r, const call *c, bool *applies)
{
    *applies = true;
    if (r->rank == c->rank) fsdpi_alloc_fail_at(c->nomem);
    fsdp_status st = make(r, c);
    if (r->rank == c->rank) fsdpi_alloc_fail_at(0);
    if (r->size > 1) {
        fsdp_status all = fsdp_comm_agree(r->comm, st == FSDP_ERR_NOMEM || st == FSDP_ERR_COMM || st == FSDP_OK ? st : FSDP_ERR_INTERNAL);
        if (all == FSDP_OK) return st;
        FSDP_FAIL_IF(all != FSDP_ERR_NOMEM && all != FSDP_ERR_COMM, FSDP_ERR_INTERNAL, "rank %d: without memory: %s: %s", r->rank, fsdp_status_name(st), fsdp_last_error_message());
        *applies = false;
        model_reset(r->m);
        return reset(r);
    }
    if (st != FSDP_ERR_NOMEM) return st;
    if (!in_a_pass(c->kind)) {
        if (c->kind == CALL_PASS_BEGIN && r->pass[c->pass] != NULL) FSDP_TRY(cancel_pass(r, c->pass)); /* it was begun, and then what failed was the test's */
        return make(r, c);
    }
    *applies = false;
    int pass = c->kind == CALL_GRAD ? r->m->unit[c->unit].owner : c->pass;
    model_apply(r->m, &(call){ .kind = CALL_PASS_CANCEL, .pass = pass });
    return cancel_pass(r, pass);
}

/* ---- a run ---- */

/* That it does what it is for: rank 0 counts. */
typedef struct tally {
    long passes, rounds, norms, loads, refused, shortages;
} tally;

static void count(run *r, const call *c, fsdp_status want)
{
    tally *t = r->c->shared;
    if (t == NULL || r->rank != 0) return;
    t->refused += want == FSDP_ERR_STATE;
    if (want != FSDP_OK) return;
    t->norms += ONE_OF(c->kind, CALL_OPTIM_STEP, CALL_STEP_NORM) && model_norm_of(r->m, c->kind == CALL_STEP_NORM ? c->mask : (1u << MODEL_UNITS) - 1).norm > 0;
    t->loads += c->kind == CALL_LOAD;
    for (int u = 0; c->kind == CALL_PASS_END && u < MODEL_UNITS; u++) {
        t->passes += r->m->unit[u].owner == c->pass;
        t->rounds += r->m->unit[u].owner == c->pass && r->m->pass[c->pass].use[u].rounds > 1;
    }
}

static fsdp_status one_call(run *r)
{
    const call *c = &r->now;
    fsdp_status want = model_expects(r->m, c), got;
    bool applies = true;
    if (c->kind == CALL_PEEK) want = FSDP_OK;
    count(r, c, want);
    be_late(r);
    bool injects = c->nomem > 0 && can_fail(r, c->kind);
    /* Whoever is still in an earlier call would be told there. */
    if (injects || ONE_OF(c->kind, CALL_RESET, CALL_STRAY)) FSDP_TRY(fsdp_comm_barrier(r->comm));
    if (injects) got = make_without_memory(r, c, &applies);
    else got = make(r, c);
    FSDP_FAIL_IF(got != want, FSDP_ERR_INTERNAL, "it returns %s, not %s: %s", fsdp_status_name(got), fsdp_status_name(want), got != FSDP_OK ? fsdp_last_error_message() : "");
    if (!applies && r->rank == 0 && r->c->shared != NULL) ((tally *)r->c->shared)->shortages++;
    if (applies && (got == FSDP_OK || got == FSDP_ERR_NONFINITE)) model_apply(r->m, c);
    if (c->kind == CALL_LOAD || c->kind == CALL_FILL_FAILS) FSDP_TRY(model_open_passes(r->m) == 0 && model_in_step(r->m) == 0 ? read_all(r) : FSDP_OK);
    return FSDP_OK;
}

static fsdp_status begin(run *r)
{
    rng g = { r->w->seed * 7 + 3 };
    FSDP_TRY(fsdp_device_open(&r->device, r->c->device));
    if (one_in(&g, 3)) FSDP_TRY(fsdp_device_open(&r->storage, strcmp(r->c->device, "cpu") == 0 ? "guard" : "cpu"));
    for (int u = 0; u < MODEL_UNITS; u++) {
        uint32_t salt = draw(&g);
        FSDP_TRY(make_unit(r, u, salt, false, &r->unit[u]));
        model_apply(r->m, &(call){ .kind = CALL_RENEW, .unit = u, .salt = salt });
        r->now = (call){ .kind = CALL_FILL, .unit = u, .salt = draw(&g) };
        FSDP_TRY(one_call(r));
    }
    FSDP_TRY(make_optim(r, (1u << MODEL_UNITS) - 1));
    model_apply(r->m, &(call){ .kind = CALL_OPTIM_RENEW, .mask = (1u << MODEL_UNITS) - 1 });
    return FSDP_OK;
}

/* Everything is given back. */
static fsdp_status end(run *r)
{
    FSDP_TRY(fsdp_comm_barrier(r->comm));
    FSDP_TRY(reset(r));
    model_reset(r->m);
    FSDP_TRY(read_all(r));
    fsdp_optim_destroy(r->optim);
    r->optim = NULL;
    for (int u = 0; u < MODEL_UNITS; u++) {
        fsdp_unit_destroy(r->unit[u]);
        r->unit[u] = NULL;
    }
    fsdpi_runtime *rt;
    FSDP_TRY(fsdpi_runtime_of(&rt, r->comm));
    for (const fsdpi_devctx *d = rt->devices; d != NULL; d = d->next)
        FSDP_FAIL_IF(fsdpi_arena_get_stats(d->arena).bytes_live != 0 || fsdpi_arena_get_stats(d->gathered).bytes_live != 0, FSDP_ERR_INTERNAL, "%zu and %zu bytes are left",
                     fsdpi_arena_get_stats(d->arena).bytes_live, fsdpi_arena_get_stats(d->gathered).bytes_live);
    return FSDP_OK;
}

static fsdp_status live(run *r)
{
    rng g = { r->w->seed };
    plan p = { 0 };
    bool injects = r->size == 1 || !r->c->threads; /* the count of allocations is the process's */
    FSDP_TRY(begin(r));
    for (long n = 0; n < r->w->calls; n++) {
        char text[160];
        r->now = next_call(&g, r->m, &p, injects, n);
        if (r->w->trace && r->rank == 0) fprintf(stderr, "%4ld %s\n", n, call_text(&r->now, text, sizeof(text)));
        fsdp_status st = one_call(r);
        if (st == FSDP_ERR_PEER) return st;
        FSDP_FAIL_IF(st != FSDP_OK, FSDP_ERR_INTERNAL, "call %ld: %s: %s", n, call_text(&r->now, text, sizeof(text)), fsdp_last_error_message());
    }
    return end(r);
}

static fsdp_status run_rank(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    run r = { .c = c, .w = c->arg, .comm = comm, .rank = fsdp_comm_rank(comm), .size = fsdp_comm_size(comm) };
    r.late.state = r.w->seed * 31 + (uint64_t)r.rank;
    r.m = model_create(r.size);
    r.number = calloc(MODEL_PASSES, sizeof(*r.number));
    fsdp_status st = r.m != NULL && r.number != NULL ? live(&r) : FSDP_ERR_NOMEM;
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    fsdp_optim_destroy(r.optim);
    if (st == FSDP_OK) fsdp_device_close(r.device);
    if (st == FSDP_OK) fsdp_device_close(r.storage);
    if (st == FSDP_OK) free(r.number); /* else kernels may still use it */
    model_destroy(r.m);
    fsdpi_error_restore(&kept);
    return st;
}

static int remove_entry(const char *path, const struct stat *s, int flag, struct FTW *at)
{
    (void)s;
    (void)flag;
    (void)at;
    return remove(path);
}

/* Which corner a seed is in. */
static corner corner_of(uint64_t seed, const work *w)
{
    rng g = { seed * 13 + 1 };
    corner c = { .ranks = 1 + below(&g, MODEL_RANKS), .arg = (void *)(uintptr_t)w };
    c.transport = one_in(&g, 2) ? "copy" : "shm";
    c.device = one_in(&g, 3) ? "guard" : "cpu";
    c.threads = one_in(&g, 3) || !CAN_FORK;
    return c;
}

static bool run_seed(const work *options, uint64_t seed, tally *seen)
{
    work w = *options;
    char folder[] = "/tmp/fsdp-random-XXXXXX";
    w.seed = seed;
    w.folder = mkdtemp(folder);
    corner c = corner_of(seed, &w);
    c.shared = seen;
    if (w.trace) fprintf(stderr, "%s\n", corner_name(&c));
    fsdp_status st = w.folder != NULL ? in_corner(run_rank, &c) : FSDP_ERR_IO;
    if (st != FSDP_OK) fprintf(stderr, "seed %llu (%s): %s\nagain: random_calls_test --seed %llu --calls %ld --trace\n", (unsigned long long)seed, corner_name(&c), fsdp_last_error_message(),
                               (unsigned long long)seed, w.calls);
    if (w.folder != NULL) nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    return st == FSDP_OK;
}

enum { RUNS = !CAN_FORK ? 20 : SANITIZED ? 60 : 120, CALLS = 500, FIRST_SEED = 1, SOAK_CALLS = 1000 };

static void test_random_sequences(void **state)
{
    (void)state;
    int bad = 0;
    tally *t = shared_alloc(sizeof(*t));
    for (int i = 0; i < RUNS; i++) bad += !run_seed(&(work){ .calls = CALLS }, FIRST_SEED + (uint64_t)i, t);
    print_message("%ld gradients of units counted, %ld of several rounds; %ld steps and norms that were not 0; %ld loads, %ld calls refused, %ld without memory\n", t->passes, t->rounds, t->norms,
                  t->loads, t->refused, t->shortages);
    assert_int_equal(bad, 0);
    assert_true(t->passes > RUNS && t->rounds > 0 && t->norms > RUNS / 2 && t->loads > 0 && t->refused > RUNS);
    assert_true(!CAN_FORK || t->shortages > RUNS / 8); /* of ranks that are threads only those that are alone have any */
    shared_free(t, sizeof(*t));
}

/* Seeds go on from where one likes; a soak begins at a time of day, so that no two are alike. */
static int soak(long calls, uint64_t seed)
{
    printf("%ld calls, the first seed is %llu\n", calls, (unsigned long long)seed);
    for (long made = 0; made < calls; made += SOAK_CALLS, seed++) {
        if (!run_seed(&(work){ .calls = SOAK_CALLS }, seed, NULL)) return 1;
        if (made / SOAK_CALLS % 100 == 99) printf("%ld calls\n", made + SOAK_CALLS);
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv)
{
    work w = { .calls = CALLS };
    long soaking = 0;
    bool seeded = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (strcmp(argv[i], "--trace") == 0) w.trace = true;
        else if (strcmp(argv[i], "--seed") == 0) w.seed = strtoull(value, NULL, 0), seeded = true, i++;
        else if (strcmp(argv[i], "--calls") == 0) w.calls = atol(value), i++;
        else if (strcmp(argv[i], "--soak") == 0) soaking = atol(value), i++;
        else {
            fprintf(stderr, "usage: random_calls_test [--seed N] [--calls N] [--trace] [--soak CALLS]\n");
            return 2;
        }
    }
    if (soaking > 0) return soak(soaking, seeded ? w.seed : (uint64_t)time(NULL));
    if (seeded) return run_seed(&w, w.seed, NULL) ? 0 : 1;
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_random_sequences) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
