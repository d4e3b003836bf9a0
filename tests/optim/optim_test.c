/* SPDX-License-Identifier: MIT
 *
 * Optimizers on slices do what the same formula does on whole vectors, to the bit, wherever slices are cut; and what
 * the formula says, against doubles. Groups, weights, clipping, norms that are no numbers, units without gradients. */
#include "support/ranks.h"

#include "base/error.h"
#include "optim/kernels.h"
#include "shard/unit.h"

#include <math.h>

/* ---- one unit, whose gradients are made up ---- */

enum { STEPS = 4, LEAVES = 10, W = 7 * 19, B = 23, S = 1, NUMEL = W + B + S };

static const fsdp_param params[] = { { "h.0.weight", 2, { 7, 19 } }, { "h.0.bias", 1, { 23 } }, { "scale", 0, { 0 } } };
static const int64_t begin_of[] = { 0, W, W + B, NUMEL };

static float value(int i)
{
    return 0.3f * fsdp_philox_normal(3, "value", i);
}

static float gradient(int step, int leaf, int i)
{
    uint32_t h = (uint32_t)(((step * LEAVES + leaf) * NUMEL + i) * 2654435761u);
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h = (h ^ h >> 12) * 0x297a2d39u;
    return 0.1f * ((float)(int32_t)(h ^ h >> 15) * 0x1p-31f) + 0.05f;
}

static void init(const char *name, int64_t i, float *x, void *arg)
{
    (void)arg;
    int p = 0;
    while (strcmp(params[p].name, name) != 0) p++;
    *x = value((int)(begin_of[p] + i));
}

typedef struct grad_args {
    float *g;
    int64_t numel, room; /* room: up to the next parameter; what lies between is padding */
    int step, leaf, from;
    float fixed;         /* NaN: gradient() */
    float poison;        /* goes into the padding */
} grad_args;

static fsdp_status k_grad(const fsdp_kernel *k, const void *args)
{
    const grad_args *a = args;
    float *g = fsdp_kernel_ptr(k, a->g);
    for (int64_t i = 0; i < a->room; i++)
        g[i] = i >= a->numel ? a->poison : isnan(a->fixed) ? gradient(a->step, a->leaf, a->from + (int)i) : a->fixed;
    return FSDP_OK;
}

typedef struct site {
    fsdp_comm *comm;
    fsdp_device *dev;
    fsdp_unit *unit;
    int rank, size;
} site;

static fsdp_status open_site(site *x, fsdp_comm *comm, const corner *c)
{
    *x = (site){ .comm = comm, .rank = fsdp_comm_rank(comm), .size = fsdp_comm_size(comm) };
    FSDP_TRY(fsdp_device_open(&x->dev, c->device));
    FSDP_TRY(fsdp_unit_create(&x->unit, comm, params, 3, &(fsdp_unit_opts){ .name = "u", .mode = c->mode, .compute_device = x->dev }));
    return fsdp_unit_init(x->unit, init, NULL);
}

static void close_site(site *x)
{
    fsdp_unit_destroy(x->unit);
    fsdp_device_close(x->dev);
}

/* A pass that brings these gradients. */
static fsdp_status bring(site *x, int step, int leaf, float fixed, double weight)
{
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, x->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_unit_begin_forward(x->unit, pass));
    FSDP_TRY(fsdp_unit_end_forward(x->unit, pass));
    FSDP_TRY(fsdp_unit_begin_backward(x->unit, pass));
    for (int p = 0; p < 3; p++) {
        float beta;
        int64_t room = p < 2 ? x->unit->layout.at[p + 1] - x->unit->layout.at[p] : x->unit->layout.total - x->unit->layout.at[p];
        grad_args a = { fsdp_unit_grad(x->unit, p, &beta), x->unit->layout.numel[p], room, step, leaf, (int)begin_of[p], fixed, NAN };
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(x->unit), k_grad, &a, sizeof(a)));
    }
    FSDP_TRY(fsdp_unit_end_backward(x->unit, pass));
    if (weight != 0) fsdp_pass_add_weight(pass, weight);
    return fsdp_pass_end(pass);
}

static fsdp_status read_all(site *x, float *out)
{
    for (int p = 0; p < 3; p++) FSDP_TRY(fsdp_unit_read_param(x->unit, p, out + begin_of[p]));
    return FSDP_OK;
}

/* ---- against plain loops ---- */

typedef struct groups_of {
    fsdp_optim_group group[3];
    int count;
} groups_of;

static const groups_of no_groups = { .count = 0 };
static const groups_of some_groups = { { { "*.bias", 0, 0 }, { "h.*.weight", 0.3f, 0.5f }, { "*", 0.01f, 2 } }, 3 };

static void setting(const groups_of *g, int i, float lr, float decay, float *my_lr, float *my_decay)
{
    int p = i < W ? 0 : i < W + B ? 1 : 2; /* the groups above, in words */
    *my_lr = g->count == 0 ? lr : p == 1 ? lr : p == 0 ? lr * 0.5f : lr * 2;
    *my_decay = g->count == 0 ? decay : p == 1 ? 0 : p == 0 ? 0.3f : 0.01f;
}

typedef struct plain {
    float p[NUMEL], m[NUMEL], v[NUMEL];
    double dp[NUMEL], dm[NUMEL], dv[NUMEL]; /* the same in doubles */
} plain;

static float sum_of(int step, int i)
{
    float g = gradient(step, 0, i);
    for (int leaf = 1; leaf < LEAVES; leaf++) g += gradient(step, leaf, i);
    return g;
}

static double norm_of(int step, double scale)
{
    double squares = 0;
    for (int i = 0; i < NUMEL; i++) squares += (double)sum_of(step, i) * (double)sum_of(step, i);
    return sqrt(squares) * scale;
}

static void plain_adamw(plain *x, const groups_of *groups, int t, float scale)
{
    const float b1 = 0.9f, b2 = 0.95f, eps = 1e-8f, lr = 0.02f, decay = 0.1f;
    double bias1 = 1 - pow(b1, t), bias2 = 1 - pow(b2, t);
    for (int i = 0; i < NUMEL; i++) {
        float my_lr, my_decay, g = sum_of(t - 1, i) * scale;
        setting(groups, i, lr, decay, &my_lr, &my_decay);
        x->m[i] = b1 * x->m[i] + (1.0f - b1) * g;
        x->v[i] = b2 * x->v[i] + (1.0f - b2) * (g * g);
        float keep = (float)(1.0 - (double)my_lr * (double)my_decay), step = (float)((double)my_lr / bias1), inv = (float)(1.0 / sqrt(bias2));
        x->p[i] = x->p[i] * keep - step * (x->m[i] / (sqrtf(x->v[i]) * inv + eps));
        double dg = (double)sum_of(t - 1, i) * (double)scale;
        x->dm[i] = (double)b1 * x->dm[i] + (1 - (double)b1) * dg;
        x->dv[i] = (double)b2 * x->dv[i] + (1 - (double)b2) * dg * dg;
        x->dp[i] = x->dp[i] * (1 - (double)my_lr * (double)my_decay) -
                   (double)my_lr * (x->dm[i] / bias1) / (sqrt(x->dv[i]) / sqrt(bias2) + (double)eps);
    }
}

static void plain_sgd(plain *x, const groups_of *groups, int t, float momentum, float scale)
{
    for (int i = 0; i < NUMEL; i++) {
        float lr, decay, g = sum_of(t - 1, i);
        setting(groups, i, 0.05f, 0.1f, &lr, &decay);
        x->m[i] = momentum != 0 ? momentum * x->m[i] + (g * scale + decay * x->p[i]) : g * scale + decay * x->p[i];
        x->p[i] -= lr * x->m[i];
        x->dm[i] = (double)momentum * x->dm[i] + (double)g * (double)scale + (double)decay * x->dp[i];
        x->dp[i] -= (double)lr * x->dm[i];
    }
}

typedef struct trial {
    enum { ADAMW, SGD, SGD_PLAIN } kind;
    const groups_of *groups;
    float clip;
} trial;

static fsdp_status create(fsdp_optim **o, site *x, const trial *t)
{
    fsdp_unit_list list = { &x->unit, 1 };
    if (t->kind == ADAMW)
        return fsdp_optim_create_adamw(o, list, &(fsdp_adamw_opts){ .lr = 0.02f, .beta2 = 0.95f, .weight_decay = 0.1f, .groups = t->groups->group, .group_count = t->groups->count });
    return fsdp_optim_create_sgd(o, list, &(fsdp_sgd_opts){ .lr = 0.05f, .momentum = t->kind == SGD ? 0.9f : 0, .weight_decay = 0.1f, .groups = t->groups->group, .group_count = t->groups->count });
}

static fsdp_status same_bits(const float *got, const float *want, const char *what, int step)
{
    for (int i = 0; i < NUMEL; i++)
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "%s %d after step %d: %.9g, not %.9g", what, i, step, (double)got[i], (double)want[i]);
    return FSDP_OK;
}

/* State of this rank's elements, at its place on the whole vector. */
static fsdp_status check_state(site *x, fsdp_optim *o, int kind, const float *want, int step)
{
    const fsdp_slice *s;
    float *state, got[NUMEL];
    int n;
    fsdp_unit_slices(x->unit, &s, &n);
    FSDP_TRY(fsdp_optim_state(o, x->unit, kind, &state));
    for (int i = 0; i < n; i++) {
        FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(x->unit), got, state + s[i].state_offset, (size_t)s[i].numel * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(x->unit)));
        for (int64_t k = 0; k < s[i].numel; k++)
            if (memcmp(&got[k], &want[begin_of[s[i].param] + s[i].offset + k], sizeof(float)) != 0)
                FSDP_FAIL(FSDP_ERR_INTERNAL, "state %s of %s[%lld] after step %d", fsdp_optim_state_name(o, kind), s[i].name, (long long)(s[i].offset + k), step);
    }
    return FSDP_OK;
}

static fsdp_status against_plain(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    static const trial trials[] = { { ADAMW, &no_groups, 0 },   { ADAMW, &some_groups, 0.7f }, { SGD, &some_groups, 0 },
                                    { SGD, &no_groups, 0.01f }, { SGD_PLAIN, &some_groups, 1e9f } };
    for (size_t k = 0; k < sizeof(trials) / sizeof(trials[0]); k++) {
        const trial *t = &trials[k];
        site x;
        fsdp_optim *o;
        plain *want = calloc(1, sizeof(*want));
        FSDP_TRY(open_site(&x, comm, c));
        FSDP_TRY(create(&o, &x, t));
        for (int i = 0; i < NUMEL; i++) want->dp[i] = (double)(want->p[i] = value(i));
        for (int step = 0; step < STEPS; step++) {
            for (int leaf = x.rank; leaf < LEAVES; leaf += x.size) FSDP_TRY(bring(&x, step, leaf, NAN, 0));
            double norm = -1, full = norm_of(step, (double)(1.0f / LEAVES));
            FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .grad_scale = 1.0f / LEAVES, .clip = t->clip, .norm = &norm }));
            rank_check(fabs(norm - full) < 1e-12 * full);
            float factor = (float)((double)(1.0f / LEAVES) * (t->clip > 0 && (double)t->clip < norm + 1e-6 ? (double)t->clip / (norm + 1e-6) : 1.0));
            if (t->kind == ADAMW) plain_adamw(want, t->groups, step + 1, factor);
            else plain_sgd(want, t->groups, step + 1, t->kind == SGD ? 0.9f : 0, factor);
            float got[NUMEL];
            FSDP_TRY(read_all(&x, got));
            FSDP_TRY(same_bits(got, want->p, "parameter", step));
            if (t->kind != SGD_PLAIN) FSDP_TRY(check_state(&x, o, 0, want->m, step));
            if (t->kind == ADAMW) FSDP_TRY(check_state(&x, o, 1, want->v, step));
            for (int i = 0; i < NUMEL; i++) rank_check(fabs((double)got[i] - want->dp[i]) <= 2e-5 * (fabs(want->dp[i]) + 0.1));
            rank_check(fsdp_optim_unit_steps(o, x.unit) == step + 1);
        }
        fsdp_optim_destroy(o);
        close_site(&x);
        free(want);
    }
    return FSDP_OK;
}

static void test_slices_do_what_whole_vectors_do(void **state)
{
    (void)state;
    in_corners(against_plain, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 2, 0 } : (const int[]){ 1, 2, 5, 0 } });
}

/* ---- norms ---- */

/* All gradients 1: the norm is sqrt(elements x leaves^2): every element once, no padding (which is poisoned with NaNs),
 * the same on every rank. */
static fsdp_status ones(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    fsdp_unit *extra[3];
    const fsdp_param tiny = { "tiny", 1, { 1 } }, odd = { "odd", 1, { 50 } };
    FSDP_TRY(open_site(&x, comm, c));
    fsdp_unit_opts uo = { .mode = c->mode, .compute_device = x.dev };
    FSDP_TRY(fsdp_unit_create(&extra[0], comm, &tiny, 1, &uo));
    FSDP_TRY(fsdp_unit_create(&extra[1], comm, &odd, 1, &uo)); /* never has gradients */
    FSDP_TRY(fsdp_unit_create(&extra[2], comm, NULL, 0, &uo));
    fsdp_unit *all[] = { x.unit, extra[0], extra[1], extra[2] };
    for (int leaves = 1; leaves <= 3; leaves++) {
        for (int leaf = 0; leaf < leaves; leaf++) FSDP_TRY(bring(&x, 0, leaf, 1.0f, 0));
        double norm = -1, weight = -1, part = -1, want = sqrt((double)leaves * leaves * x.size * x.size * NUMEL);
        FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ all, 4 }));
        FSDP_TRY(fsdp_step_grad_norm((fsdp_unit_list){ all, 4 }, &norm, &weight));
        FSDP_TRY(fsdp_step_grad_norm((fsdp_unit_list){ all + 1, 3 }, &part, NULL));
        FSDP_TRY(fsdp_step_grad_norm((fsdp_unit_list){ all, 1 }, NULL, NULL));
        if (norm != want || part != 0 || weight != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "the norm is %.17g, not %.17g; others %g, weight %g", norm, want, part, weight);
        FSDP_TRY(fsdp_step_end((fsdp_unit_list){ all, 4 }));
    }
    double norm = -1;
    fsdp_optim *o;
    FSDP_TRY(fsdp_optim_create_sgd(&o, (fsdp_unit_list){ all, 4 }, &(fsdp_sgd_opts){ .lr = 1 }));
    FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .norm = &norm, .clip = 1 })); /* nobody has gradients */
    rank_check(norm == 0);
    fsdp_optim_destroy(o);
    for (int i = 2; i >= 0; i--) fsdp_unit_destroy(extra[i]);
    close_site(&x);
    return FSDP_OK;
}

static void test_the_norm_of_ones(void **state)
{
    (void)state;
    in_corners(ones, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 3, 0 } : (const int[]){ 1, 3, 8, 0 } });
}

/* Infinity or NaN in one rank's gradients, in one parameter: all ranks refuse, name the unit, change nothing, go on. */
static fsdp_status nonfinite(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    fsdp_optim *o;
    fsdp_unit *before;
    const fsdp_param tiny = { "tiny", 1, { 1 } };
    FSDP_TRY(open_site(&x, comm, c));
    FSDP_TRY(fsdp_unit_create(&before, comm, &tiny, 1, &(fsdp_unit_opts){ .name = "before", .mode = c->mode, .compute_device = x.dev }));
    fsdp_unit *both[] = { before, x.unit };
    FSDP_TRY(fsdp_optim_create_adamw(&o, (fsdp_unit_list){ both, 2 }, &(fsdp_adamw_opts){ .lr = 0.02f, .beta2 = 0.95f, .weight_decay = 0.1f }));
    plain *want = calloc(1, sizeof(*want));
    for (int i = 0; i < NUMEL; i++) want->p[i] = value(i);
    for (int step = 0; step < 4; step++) {
        float bad = step % 2 ? NAN : INFINITY, got[NUMEL];
        int who = step % 3 % x.size;
        fsdp_pass *pass;
        for (int leaf = x.rank; leaf < LEAVES; leaf += x.size) FSDP_TRY(bring(&x, 9, leaf, NAN, 0)); /* lost with it */
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(fsdp_unit_begin_forward(x.unit, pass));
        FSDP_TRY(fsdp_unit_end_forward(x.unit, pass));
        FSDP_TRY(fsdp_unit_begin_backward(x.unit, pass));
        if (x.rank == who) { /* in the scalar at the end, or at the beginning */
            float beta;
            int p = step < 2 ? 2 : 0;
            grad_args a = { fsdp_unit_grad(x.unit, p, &beta), x.unit->layout.numel[p], 1, step, 0, 0, 0, 0 };
            a.numel = 0;
            a.poison = bad;
            FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(x.unit), k_grad, &a, sizeof(a)));
            if (p == 0) { /* the rest of it */
                a.g++;
                a.room = W - 1;
                a.poison = 0;
                FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(x.unit), k_grad, &a, sizeof(a)));
            }
        }
        FSDP_TRY(fsdp_unit_end_backward(x.unit, pass));
        FSDP_TRY(fsdp_pass_end(pass));
        double norm = 3;
        fsdp_status st = fsdp_optim_step(o, &(fsdp_step_opts){ .clip = 1, .norm = &norm });
        const char *said = fsdp_last_error_message();
        if (st != FSDP_ERR_NONFINITE || strstr(said, step % 2 ? "nan" : "inf") == NULL || strstr(said, "unit \"u\"") == NULL || norm != 3)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "%s: %s", fsdp_status_name(st), said);
        rank_check(fsdp_optim_unit_steps(o, x.unit) == step);
        FSDP_TRY(read_all(&x, got));
        FSDP_TRY(same_bits(got, want->p, "parameter", step));
        FSDP_TRY(check_state(&x, o, 0, want->m, step));
        FSDP_TRY(check_state(&x, o, 1, want->v, step));
        for (int leaf = x.rank; leaf < LEAVES; leaf += x.size) FSDP_TRY(bring(&x, step, leaf, NAN, 0));
        FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .grad_scale = 1.0f / LEAVES }));
        plain_adamw(want, &no_groups, step + 1, 1.0f / LEAVES);
        FSDP_TRY(read_all(&x, got));
        FSDP_TRY(same_bits(got, want->p, "parameter", step));
    }
    fsdp_optim_destroy(o);
    fsdp_unit_destroy(before);
    close_site(&x);
    free(want);
    return FSDP_OK;
}

static void test_a_norm_that_is_no_number(void **state)
{
    (void)state;
    in_corners(nonfinite, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 5, 0 }, .threads_only = SANITIZED });
}

/* ---- weights ---- */

/* Ranks' passes weigh what they say: the division is by the sum over all, however it is dealt. */
static fsdp_status weights(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    fsdp_optim *o;
    FSDP_TRY(open_site(&x, comm, c));
    FSDP_TRY(fsdp_optim_create_sgd(&o, (fsdp_unit_list){ &x.unit, 1 }, &(fsdp_sgd_opts){ .lr = 0.25f }));
    float was[NUMEL], is[NUMEL];
    FSDP_TRY(read_all(&x, was));
    for (int pass = 0; pass < 2; pass++) FSDP_TRY(bring(&x, 0, 0, 1, x.rank == 0 ? 1 : 7)); /* tokens */
    double total = 2 * (1 + 7.0 * (x.size - 1)), norm;
    FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .norm = &norm }));
    rank_check(fabs(norm - 2 * x.size * sqrt(NUMEL) / total) < 1e-12);
    FSDP_TRY(read_all(&x, is));
    for (int i = 0; i < NUMEL; i++) rank_check(is[i] == was[i] - 0.25f * ((float)(2 * x.size) * (float)(1 / total)));
    /* A cancelled pass weighs nothing, nor do dropped gradients, nor a pass without gradients. */
    fsdp_pass *pass;
    FSDP_TRY(bring(&x, 0, 0, 1, 1000));
    FSDP_TRY(fsdp_unit_zero_grad(x.unit));
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    fsdp_pass_add_weight(pass, 100);
    FSDP_TRY(fsdp_pass_cancel(pass));
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_EVAL));
    fsdp_pass_add_weight(pass, 100);
    FSDP_TRY(fsdp_unit_begin_forward(x.unit, pass));
    FSDP_TRY(fsdp_unit_end_forward(x.unit, pass));
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(bring(&x, 0, 0, 1, 4));
    FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .norm = &norm }));
    rank_check(fabs(norm - sqrt(NUMEL) / 4) < 1e-12);
    /* Without weights, and with a scale of one's own, nothing is divided. */
    FSDP_TRY(bring(&x, 0, 0, 1, 0));
    FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .norm = &norm }));
    rank_check(norm == x.size * sqrt(NUMEL));
    FSDP_TRY(bring(&x, 0, 0, 1, 5));
    FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .norm = &norm, .grad_scale = -0.5f }));
    rank_check(norm == 0.5 * x.size * sqrt(NUMEL));
    /* A weight that is no number is refused, and the gradients stay. */
    FSDP_TRY(bring(&x, 0, 0, 1, x.rank == 0 ? NAN : 1));
    rank_check(fsdp_optim_step(o, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "weight of the passes is nan") != NULL);
    FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .norm = &norm, .grad_scale = 1 }));
    rank_check(norm == x.size * sqrt(NUMEL));
    fsdp_optim_destroy(o);
    close_site(&x);
    return FSDP_OK;
}

static void test_weights(void **state)
{
    (void)state;
    in_corners(weights, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 }, .threads_only = SANITIZED });
}

/* ---- units without gradients, and a second optimizer ---- */

static fsdp_status left_alone(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    fsdp_optim *o, *second;
    fsdp_unit *idle;
    FSDP_TRY(open_site(&x, comm, c));
    FSDP_TRY(fsdp_unit_create(&idle, comm, params, 3, &(fsdp_unit_opts){ .name = "idle", .mode = c->mode, .compute_device = x.dev }));
    FSDP_TRY(fsdp_unit_init(idle, init, NULL));
    fsdp_unit *both[] = { idle, x.unit };
    FSDP_TRY(fsdp_optim_create_adamw(&o, (fsdp_unit_list){ both, 2 }, &(fsdp_adamw_opts){ .lr = 0.1f, .weight_decay = 0.5f }));
    FSDP_TRY(fsdp_optim_create_sgd(&second, (fsdp_unit_list){ both, 2 }, &(fsdp_sgd_opts){ .lr = 0.1f, .weight_decay = 0.5f, .momentum = 0.5f }));
    for (int step = 0; step < 3; step++) {
        FSDP_TRY(bring(&x, step, 0, NAN, 0));
        FSDP_TRY(fsdp_optim_step(o, NULL));
        FSDP_TRY(fsdp_optim_step(second, NULL)); /* the gradients are gone */
    }
    float w[W];
    FSDP_TRY(fsdp_unit_read_param(idle, 0, w)); /* no decay, no step */
    for (int i = 0; i < W; i++) rank_check(w[i] == value(i));
    rank_check(fsdp_optim_unit_steps(o, idle) == 0 && fsdp_optim_unit_steps(o, x.unit) == 3 && fsdp_optim_unit_steps(second, x.unit) == 0);
    rank_check(fsdp_optim_state_kinds(o) == 2 && strcmp(fsdp_optim_state_name(o, 0), "exp_avg") == 0 && strcmp(fsdp_optim_state_name(o, 1), "exp_avg_sq") == 0);
    rank_check(fsdp_optim_state_kinds(second) == 1 && strcmp(fsdp_optim_state_name(second, 0), "momentum") == 0 && strcmp(fsdp_optim_state_name(second, 1), "?") == 0);
    float *s;
    rank_check(fsdp_optim_state(second, x.unit, 1, &s) == FSDP_ERR_INVALID);
    fsdp_optim_set_unit_steps(o, idle, 41);
    rank_check(fsdp_optim_unit_steps(o, idle) == 41 && fsdp_optim_units(o).count == 2);
    fsdp_optim_set_lr(o, 0.5f);
    rank_check(fsdp_optim_lr(o) == 0.5f);
    fsdp_optim_destroy(second);
    fsdp_optim_destroy(o);
    fsdp_optim_destroy(NULL);
    fsdp_unit_destroy(idle);
    close_site(&x);
    return FSDP_OK;
}

static void test_units_without_gradients(void **state)
{
    (void)state;
    in_corners(left_alone, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 }, .threads_only = true });
}

/* ---- what is refused, what patterns fit ---- */

static fsdp_status one_param(fsdp_comm *comm, const char *name, const char *pattern, float *after)
{
    fsdp_unit *u;
    fsdp_optim *o;
    fsdp_pass *pass;
    const fsdp_param p = { name, 0, { 0 } };
    FSDP_TRY(fsdp_unit_create(&u, comm, &p, 1, NULL));
    fsdp_optim_group g = { .pattern = pattern, .lr_scale = 4 };
    FSDP_TRY(fsdp_optim_create_sgd(&o, (fsdp_unit_list){ &u, 1 }, &(fsdp_sgd_opts){ .lr = 1, .groups = &g, .group_count = 1 }));
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_unit_begin_forward(u, pass));
    FSDP_TRY(fsdp_unit_end_forward(u, pass));
    FSDP_TRY(fsdp_unit_begin_backward(u, pass));
    float beta;
    *fsdp_unit_grad(u, 0, &beta) = 1;
    FSDP_TRY(fsdp_unit_end_backward(u, pass));
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(fsdp_optim_step(o, NULL));
    FSDP_TRY(fsdp_unit_read_param(u, 0, after));
    fsdp_optim_destroy(o);
    fsdp_unit_destroy(u);
    return FSDP_OK;
}

static void test_patterns(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *name;
        bool fits;
    } t[] = {
        { "*", "a", true },           { "*.bias", "h.3.bias", true },  { "*.bias", "h.3.biases", false }, { "*.bias", ".bias", true },  { "*.bias", "bias", false },
        { "h.*.w", "h.10.attn.w", true }, { "h.*.w", "h.w", false },   { "a*b*c", "aXbYc", true },        { "a*b*c", "abc", true },     { "a*b*c", "acb", false },
        { "a*b*c", "abcbc", true },   { "**", "x", true },             { "", "x", false },                { "x", "x", true },           { "x", "xx", false },
        { "x*", "x", true },          { "*x", "yx", true },            { "*ab", "aab", true },            { "?", "a", false },          { "ln*", "h.ln", false },
    };
    fsdp_comm *self;
    assert_ok(fsdp_comm_create_self(&self));
    for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
        float after;
        assert_ok(one_param(self, t[i].name, t[i].pattern, &after));
        if ((after == -4) != t[i].fits || (after != -4 && after != -1)) fail_msg("\"%s\" %s \"%s\": %g", t[i].pattern, t[i].fits ? "fits" : "does not fit", t[i].name, (double)after);
    }
    fsdp_comm_destroy(self);
}

static void test_refusals(void **state)
{
    (void)state;
    fsdp_comm *self;
    fsdp_unit *u;
    fsdp_optim *o = NULL;
    assert_ok(fsdp_comm_create_self(&self));
    assert_ok(fsdp_unit_create(&u, self, params, 3, &(fsdp_unit_opts){ .name = "u" }));
    fsdp_unit *twice[] = { u, u };
    fsdp_unit_list list = { &u, 1 };
    fsdp_optim_group no_pattern = { 0 }, bad_decay = { "*", -1, 0 }, nan_decay = { "*", NAN, 0 }, bad_scale = { "*", 0, -2 };
    assert_fails(fsdp_optim_create_sgd(&o, list, NULL), FSDP_ERR_INVALID, "fsdp_optim_create_sgd");
    assert_fails(fsdp_optim_create_sgd(&o, list, &(fsdp_sgd_opts){ .lr = -1 }), FSDP_ERR_INVALID, "lr");
    assert_fails(fsdp_optim_create_sgd(&o, list, &(fsdp_sgd_opts){ .lr = NAN }), FSDP_ERR_INVALID, "lr");
    assert_fails(fsdp_optim_create_adamw(&o, list, &(fsdp_adamw_opts){ .lr = 1, .beta1 = 1 }), FSDP_ERR_INVALID, "beta1 1");
    assert_fails(fsdp_optim_create_adamw(&o, list, &(fsdp_adamw_opts){ .lr = 1, .eps = -1 }), FSDP_ERR_INVALID, "eps -1");
    assert_fails(fsdp_optim_create_adamw(&o, (fsdp_unit_list){ twice, 2 }, NULL), FSDP_ERR_INVALID, "unit \"u\" is in the optimizer's list twice");
    assert_fails(fsdp_optim_create_adamw(&o, (fsdp_unit_list){ NULL, 2 }, NULL), FSDP_ERR_INVALID, "2 units");
    assert_fails(fsdp_optim_create_adamw(&o, list, &(fsdp_adamw_opts){ .lr = 1, .groups = &no_pattern, .group_count = 1 }), FSDP_ERR_INVALID, "group 0 has no pattern");
    assert_fails(fsdp_optim_create_adamw(&o, list, &(fsdp_adamw_opts){ .lr = 1, .groups = &bad_decay, .group_count = 1 }), FSDP_ERR_INVALID, "group \"*\": weight_decay -1");
    assert_fails(fsdp_optim_create_adamw(&o, list, &(fsdp_adamw_opts){ .lr = 1, .groups = &nan_decay, .group_count = 1 }), FSDP_ERR_INVALID, "group \"*\": weight_decay nan");
    assert_fails(fsdp_optim_create_sgd(&o, list, &(fsdp_sgd_opts){ .lr = 1, .groups = &bad_scale, .group_count = 1 }), FSDP_ERR_INVALID, "group \"*\"");
    assert_fails(fsdp_optim_create_sgd(&o, list, &(fsdp_sgd_opts){ .lr = 1, .groups = NULL, .group_count = 2 }), FSDP_ERR_INVALID, "2 groups");
    assert_null(o);
    assert_ok(fsdp_optim_create_adamw(&o, (fsdp_unit_list){ NULL, 0 }, NULL));
    assert_ok(fsdp_optim_step(o, NULL));
    fsdp_optim_destroy(o);
    assert_ok(fsdp_optim_create_adamw(&o, list, NULL));
    assert_fails(fsdp_optim_step(o, &(fsdp_step_opts){ .clip = -1 }), FSDP_ERR_INVALID, "clip -1");
    assert_fails(fsdp_optim_step(o, &(fsdp_step_opts){ .clip = NAN }), FSDP_ERR_INVALID, "clip nan");
    assert_fails(fsdp_optim_step(o, &(fsdp_step_opts){ .grad_scale = INFINITY }), FSDP_ERR_INVALID, "grad_scale inf");
    assert_ok(fsdp_optim_step(o, NULL)); /* no unit was left in a step */
    fsdp_optim_destroy(o);
    fsdp_unit_destroy(u);
    fsdp_comm_destroy(self);
}

/* ---- schedules ---- */

static void test_schedules(void **state)
{
    (void)state;
    static const struct {
        fsdp_schedule s;
        int64_t step;
        double lr;
    } t[] = {
        /* warmup: step s < warmup has (s + 1) / warmup */
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 4, 11 }, 0, 0.25 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 4, 11 }, 3, 1 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 4, 11 }, 4, 1 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 4, 11 }, 7, 0.55 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 4, 11 }, 5, 0.1 + 0.9 * 0.5 * (1 + 0.86602540378443865) },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 4, 11 }, 10, 0.1 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 4, 11 }, 11, 0.1 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 4, 11 }, 1000000, 0.1 },
        { { FSDP_SCHEDULE_LINEAR, 2, 0, 0, 5 }, 0, 2 },
        { { FSDP_SCHEDULE_LINEAR, 2, 0, 0, 5 }, 1, 1.5 },
        { { FSDP_SCHEDULE_LINEAR, 2, 0, 0, 5 }, 4, 0 },
        { { FSDP_SCHEDULE_LINEAR, 2, 0, 0, 5 }, 9, 0 },
        { { FSDP_SCHEDULE_CONSTANT, 3, 0, 2, 0 }, 0, 1.5 },
        { { FSDP_SCHEDULE_CONSTANT, 3, 0, 2, 0 }, 1, 3 },
        { { FSDP_SCHEDULE_CONSTANT, 3, 0, 2, 0 }, 99, 3 },
        { { FSDP_SCHEDULE_CONSTANT, 3, 0.5f, 0, 10 }, 99, 3 },
        { { FSDP_SCHEDULE_CONSTANT, 3, 0, 8, 4 }, 9, 1.5 },
        /* the peak is the last step of the warm-up, the end the last step */
        { { FSDP_SCHEDULE_COSINE, 1, 0, 3, 4 }, 2, 1 },
        { { FSDP_SCHEDULE_COSINE, 1, 0, 3, 4 }, 3, 0 },
        /* more warm-up than steps: it stays as it was in the last one */
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 10, 5 }, 4, 0.5 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 10, 5 }, 5, 0.5 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 10, 5 }, 9, 0.5 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 10, 5 }, 10, 0.5 },
        { { FSDP_SCHEDULE_LINEAR, 1, 0.1f, 5, 5 }, 4, 1 },
        { { FSDP_SCHEDULE_LINEAR, 1, 0.1f, 5, 5 }, 5, 1 },
        /* one step: it has the highest rate, or nothing would be learnt; none: the rate where it all ends */
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 0, 1 }, 0, 1 },
        { { FSDP_SCHEDULE_LINEAR, 1, 0.1f, 1, 1 }, 0, 1 },
        { { FSDP_SCHEDULE_LINEAR, 1, 0.1f, 0, 1 }, 5, 1 },
        { { FSDP_SCHEDULE_COSINE, 1, 0.1f, 0, 0 }, 0, 0.1 },
        { { FSDP_SCHEDULE_LINEAR, 1, 0.1f, 0, 0 }, 7, 0.1 },
    };
    for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
        double lr = (double)fsdp_schedule_lr(&t[i].s, t[i].step);
        if (fabs(lr - t[i].lr) > 1e-7) fail_msg("case %zu, step %lld: %.9g, not %.9g", i, (long long)t[i].step, lr, t[i].lr);
    }
    fsdp_schedule s = { FSDP_SCHEDULE_COSINE, 3e-4f, 3e-5f, 100, 1000 };
    for (int64_t i = 0; i < 1200; i++) { /* never out of bounds, up and then down */
        float lr = fsdp_schedule_lr(&s, i), next = fsdp_schedule_lr(&s, i + 1);
        assert_true(lr > 0 && lr <= s.lr && (i < 100 || lr >= s.min_lr));
        assert_true(i < 99 ? next > lr : next <= lr);
    }
}

/* ---- kernels of all instruction sets ---- */

static uint32_t draw(uint32_t *rng) /* xorshift */
{
    *rng ^= *rng << 13;
    *rng ^= *rng >> 17;
    *rng ^= *rng << 5;
    return *rng;
}

static float odd_float(uint32_t *rng)
{
    uint32_t u = draw(rng), kind = draw(rng) % 8;
    float x;
    if (kind == 0) u &= 0x807fffff;                         /* denormal, or 0 */
    else if (kind == 1) u = (u & 0x807fffff) | 0x7e000000;  /* huge */
    else u = (u & 0x83ffffff) | 0x3c000000;                 /* round 1 */
    memcpy(&x, &u, sizeof(x));
    return x;
}

static void test_instruction_sets_give_the_same_bits(void **state)
{
    (void)state;
    enum { MOST = 100, ROOM = 160 };
    uint32_t rng = 8;
    fsdpi_adamw_scalars s = { .scale = 0.3f, .decay = 0.999f, .beta1 = 0.9f, .beta2 = 0.95f, .step_size = 0.011f, .inv_sqrt_bias2 = 1.7f, .eps = 1e-8f };
    for (int isa = FSDPI_ISA_PORTABLE; isa < FSDPI_ISA_COUNT; isa++) {
        if (!fsdpi_isa_supported((fsdpi_isa)isa)) continue;
        const fsdpi_optim_kernels *k = fsdpi_optim_kernels_get((fsdpi_isa)isa);
        for (int n = 0; n <= MOST; n++)
            for (int offset = 0; offset < 17; offset += 1 + n % 3) {
                float a[5][ROOM], b[5][ROOM]; /* p, g, m, v, and what the plain loop makes of them */
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < ROOM; j++) a[i][j] = i == 3 ? fabsf(odd_float(&rng)) : odd_float(&rng);
                memcpy(b, a, sizeof(b));
                k->adamw(&s, a[0] + offset, a[1] + offset, a[2] + offset, a[3] + offset, (size_t)n);
                for (int i = offset; i < offset + n; i++) {
                    volatile float g = b[1][i] * s.scale, gg = g * g, m0 = s.beta1 * b[2][i], m1 = (1.0f - s.beta1) * g, v0 = s.beta2 * b[3][i], v1 = (1.0f - s.beta2) * gg;
                    b[2][i] = m0 + m1;
                    b[3][i] = v0 + v1;
                    volatile float root = sqrtf(b[3][i]), down = root * s.inv_sqrt_bias2, q = b[2][i] / (down + s.eps), kept = b[0][i] * s.decay, step = s.step_size * q;
                    b[0][i] = kept - step;
                }
                if (memcmp(a, b, 4 * sizeof(a[0])) != 0) fail_msg("adamw, %s: %d elements at %d", fsdpi_isa_name((fsdpi_isa)isa), n, offset);
                for (int momentum = 0; momentum < 2; momentum++) {
                    memcpy(b, a, sizeof(b));
                    k->sgd(0.05f, 0.9f, 0.01f, 0.3f, a[0] + offset, a[1] + offset, momentum ? a[2] + offset : NULL, (size_t)n);
                    for (int i = offset; i < offset + n; i++) {
                        volatile float g = b[1][i] * 0.3f, d = 0.01f * b[0][i], gd = g + d, m = 0.9f * b[2][i], v = momentum ? m + gd : gd, step = 0.05f * v;
                        if (momentum) b[2][i] = v;
                        b[0][i] -= step;
                    }
                    if (memcmp(a, b, 4 * sizeof(a[0])) != 0) fail_msg("sgd, %s: %d elements at %d", fsdpi_isa_name((fsdpi_isa)isa), n, offset);
                }
            }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slices_do_what_whole_vectors_do),
        cmocka_unit_test(test_the_norm_of_ones),
        cmocka_unit_test(test_a_norm_that_is_no_number),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_units_without_gradients),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_instruction_sets_give_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
