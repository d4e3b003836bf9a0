/* SPDX-License-Identifier: MIT
 *
 * Hooks on gradients: they see each element once, where it is said to be; the sum as a hook is the sum without; one's own reduction
 * and one's own change of a leaf give what the same does on whole vectors; one that fails costs its pass, and nothing else. */
#include "support/madeup.h"
#include "support/ranks.h"

#include "shard/unit.h"

#include <math.h>

enum { LEAVES = 30, WHICH = 6, STEPS = 2 };
static const int which[] = { WHICH };

typedef struct site {
    fsdp_comm *comm;
    fsdp_device *dev;
    fsdp_unit *u;
    fsdp_optim *o;
} site;

static fsdp_status open_site(site *x, fsdp_comm *comm, const corner *c)
{
    *x = (site){ .comm = comm };
    FSDP_TRY(fsdp_device_open(&x->dev, c->device));
    FSDP_TRY(madeup_unit(&x->u, comm, x->dev, c->mode, "u", WHICH));
    return fsdp_optim_create_sgd(&x->o, (fsdp_unit_list){ &x->u, 1 }, &(fsdp_sgd_opts){ .lr = 0.25f });
}

static void close_site(site *x)
{
    fsdp_optim_destroy(x->o);
    fsdp_unit_destroy(x->u);
    fsdp_device_close(x->dev);
}

static fsdp_status step(site *x, int number)
{
    for (int leaf = fsdp_comm_rank(x->comm); leaf < LEAVES; leaf += fsdp_comm_size(x->comm))
        FSDP_TRY(madeup_pass(&x->u, which, 1, number * LEAVES + leaf, madeup_noise, 0));
    return fsdp_optim_step(x->o, NULL);
}

/* What a step makes of parameters and the sums of gradients. */
static void plain_update(float *p, const float *sum)
{
    for (int i = 0; i < MADEUP; i++) p[i] -= 0.25f * (sum[i] * 1.0f + 0.0f * p[i]);
}

static fsdp_status same(site *x, const float *want, const char *what)
{
    float got[MADEUP];
    FSDP_TRY(madeup_read(x->u, got));
    for (int i = 0; i < MADEUP; i++)
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "%s: element %d: %.9g, not %.9g", what, i, (double)got[i], (double)want[i]);
    return FSDP_OK;
}

static void begin_values(float *p)
{
    for (int i = 0; i < MADEUP; i++) p[i] = madeup_value(WHICH, i);
}

/* ---- hooks ---- */

/* Sums of what 16 bits leave of each leaf, in rank order. */
static fsdp_status reduce_rounded(const fsdp_kernel *k, const fsdp_reduction *r, void *arg)
{
    (void)k;
    (void)arg;
    for (int p = 0; p < r->count; p++)
        for (int64_t j = 0, i = r->part[p].state_offset; j < r->part[p].numel; j++, i++) {
            float s = r->base != NULL ? r->base[i] : 0;
            for (int rank = 0; rank < r->ranks; rank++) s += fsdp_bf16_to_f32(fsdp_bf16_from_f32(r->piece[rank][i]));
            r->out[i] = s;
        }
    return FSDP_OK;
}

/* A vote: +1 or -1 a reduction; so the bits depend on the number of ranks. */
static fsdp_status reduce_votes(const fsdp_kernel *k, const fsdp_reduction *r, void *arg)
{
    (void)k;
    (void)arg;
    for (int64_t i = 0; i < r->numel; i++) {
        int votes = 0;
        for (int rank = 0; rank < r->ranks; rank++) votes += (r->piece[rank][i] > 0) - (r->piece[rank][i] < 0);
        r->out[i] = (r->base != NULL ? r->base[i] : 0) + (votes >= 0 ? 1.0f : -1.0f);
    }
    return FSDP_OK;
}

/* The number of the element, from what it is said to be. */
static fsdp_status reduce_numbers(const fsdp_kernel *k, const fsdp_reduction *r, void *arg)
{
    (void)k;
    (void)arg;
    for (int p = 0; p < r->count; p++)
        for (int64_t j = 0; j < r->part[p].numel; j++) r->out[r->part[p].state_offset + j] = (float)(madeup_begin[r->part[p].param] + r->part[p].offset + j);
    return FSDP_OK;
}

static double norm_of(const float *x, int64_t n, double squares)
{
    for (int64_t i = 0; i < n; i++) squares += (double)x[i] * (double)x[i];
    return squares;
}

/* Each leaf's gradient at most 3 long; b is left out. */
static fsdp_status clip_leaf(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg)
{
    (void)k;
    (void)arg;
    double squares = 0;
    for (int p = 0; p < count; p++)
        if (strcmp(part[p].name, "b") != 0) squares = norm_of(grad + part[p].state_offset, part[p].numel, squares);
    float factor = sqrt(squares) > 3 ? (float)(3 / sqrt(squares)) : 1;
    for (int p = 0; p < count; p++)
        for (int64_t j = 0; j < part[p].numel && strcmp(part[p].name, "b") != 0; j++) grad[part[p].state_offset + j] *= factor;
    return FSDP_OK;
}

/* ---- against whole vectors ---- */

static void plain_leaf(float g[MADEUP], int leaf, bool clip)
{
    for (int i = 0; i < MADEUP; i++) g[i] = madeup_noise(WHICH, leaf, i);
    double norm = sqrt(norm_of(g + 156, 1, norm_of(g, 133, 0))); /* w and s */
    for (int i = 0; i < MADEUP && clip && norm > 3; i++)
        if (i < 133 || i >= 156) g[i] *= (float)(3 / norm);
}

typedef struct kind {
    const char *name;
    fsdp_grad_hooks hooks;
} kind;

static const kind kinds[] = {
    { "no hooks", { 0 } },
    { "the sum as a hook", { .reduce = fsdp_reduce_sum } },
    { "rounded", { .reduce = reduce_rounded } },
    { "votes", { .reduce = reduce_votes } },
    { "numbers", { .reduce = reduce_numbers } },
    { "clipped leaves", { .post = clip_leaf } },
    { "clipped leaves, the sum as a hook", { .post = clip_leaf, .reduce = fsdp_reduce_sum } },
};
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };

/* Of a step's leaves. */
static void plain_sums(float sum[MADEUP], const fsdp_grad_hooks *h, int number, int ranks)
{
    int votes[MADEUP] = { 0 };
    for (int i = 0; i < MADEUP; i++) sum[i] = h->reduce == reduce_numbers ? (float)i : 0;
    for (int l = 0; l < LEAVES && h->reduce != reduce_numbers; l++) {
        float g[MADEUP];
        plain_leaf(g, number * LEAVES + l, h->post != NULL);
        for (int i = 0; i < MADEUP; i++) {
            votes[i] = (l % ranks == 0 ? 0 : votes[i]) + (g[i] > 0) - (g[i] < 0);
            if (h->reduce == reduce_rounded) sum[i] += fsdp_bf16_to_f32(fsdp_bf16_from_f32(g[i]));
            else if (h->reduce != reduce_votes) sum[i] = l > 0 ? sum[i] + g[i] : g[i];
            else if (l % ranks == ranks - 1) sum[i] += votes[i] >= 0 ? 1.0f : -1.0f;
        }
    }
}

static fsdp_status against_plain(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    float want[MADEUP], sum[MADEUP];
    FSDP_TRY(open_site(&x, comm, c));
    begin_values(want);
    for (int k = 0; k < KINDS; k++) { /* one after another on one unit: the last ones' are gone */
        FSDP_TRY(fsdp_unit_set_grad_hooks(x.u, k > 0 ? &kinds[k].hooks : NULL));
        for (int s = 0; s < STEPS; s++) {
            plain_sums(sum, &kinds[k].hooks, s, c->ranks);
            plain_update(want, sum);
            FSDP_TRY(step(&x, s));
            FSDP_TRY(same(&x, want, kinds[k].name));
        }
    }
    close_site(&x);
    return FSDP_OK;
}

static void test_against_whole_vectors(void **state)
{
    (void)state;
    in_corners(against_plain, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 3, 0 } : (const int[]){ 1, 3, 10, 0 }, .threads_only = true });
    in_corners(against_plain, &(corners){ .all_modes = true, .ranks = (const int[]){ 2, 0 }, .processes_only = true });
}

/* Two gradients of a unit in one pass. */
static fsdp_status two_rounds(fsdp_comm *comm, void *arg)
{
    site x;
    float want[MADEUP], sum[MADEUP];
    FSDP_TRY(open_site(&x, comm, arg));
    begin_values(want);
    for (int k = 0; k < 2; k++) {
        FSDP_TRY(fsdp_unit_set_grad_hooks(x.u, &(fsdp_grad_hooks){ .reduce = k == 0 ? fsdp_reduce_sum : reduce_rounded }));
        const fsdp_grad_hooks h = { .reduce = k == 0 ? NULL : reduce_rounded };
        float first[MADEUP];
        plain_sums(first, &h, 0, 1);
        plain_sums(sum, &h, 1, 1);
        for (int i = 0; i < MADEUP; i++) sum[i] = first[i] + sum[i];
        plain_update(want, sum);
        for (int leaf = fsdp_comm_rank(comm); leaf < LEAVES; leaf += fsdp_comm_size(comm)) {
            fsdp_pass *pass;
            FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
            FSDP_TRY(madeup_run(pass, &x.u, which, 1, leaf, madeup_noise));
            FSDP_TRY(madeup_run(pass, &x.u, which, 1, LEAVES + leaf, madeup_noise));
            FSDP_TRY(fsdp_pass_end(pass));
        }
        FSDP_TRY(fsdp_optim_step(x.o, NULL));
        FSDP_TRY(same(&x, want, "two rounds"));
    }
    close_site(&x);
    return FSDP_OK;
}

static void test_two_rounds(void **state)
{
    (void)state;
    in_corners(two_rounds, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .threads_only = SANITIZED });
}

/* ---- the sum as a hook, wherever sums are different ones: fewer bits, frozen parameters, another device, passes without sync ---- */

static fsdp_status as_without(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    static const fsdp_dtype types[] = { FSDP_F32, FSDP_BF16, FSDP_F16 };
    fsdp_device *dev;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    for (int k = 0; k < 12; k++) {
        fsdp_unit *u[2];
        fsdp_optim *o;
        float got[2][MADEUP];
        fsdp_unit_opts uo = { .name = "u", .mode = c->mode, .compute_device = dev, .storage_device = k / 6 ? fsdp_device_cpu() : NULL, .reduce_dtype = types[k % 3] };
        for (int i = 0; i < 2; i++) FSDP_TRY(madeup_unit_with(&u[i], comm, &uo, WHICH));
        FSDP_TRY(fsdp_optim_create_sgd(&o, (fsdp_unit_list){ u, 2 }, &(fsdp_sgd_opts){ .lr = 0.25f }));
        FSDP_TRY(fsdp_unit_set_grad_hooks(u[1], &(fsdp_grad_hooks){ .post = clip_leaf, .reduce = fsdp_reduce_sum }));
        FSDP_TRY(fsdp_unit_set_grad_hooks(u[0], &(fsdp_grad_hooks){ .post = clip_leaf }));
        for (int i = 0; i < 2 && k / 3 % 2; i++) FSDP_TRY(fsdp_unit_set_frozen(u[i], 1, true));
        for (int s = 0; s < STEPS; s++) {
            for (int leaf = fsdp_comm_rank(comm), turn = 0; leaf < LEAVES; leaf += fsdp_comm_size(comm), turn++) {
                fsdp_pass *pass;
                FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
                FSDP_TRY(fsdp_pass_set_sync(pass, turn % 3 != 1));
                FSDP_TRY(madeup_run(pass, u, (int[]){ WHICH, WHICH }, 2, s * LEAVES + leaf, madeup_noise));
                FSDP_TRY(fsdp_pass_end(pass));
            }
            FSDP_TRY(fsdp_optim_step(o, NULL));
            for (int i = 0; i < 2; i++) FSDP_TRY(madeup_read(u[i], got[i]));
            if (memcmp(got[0], got[1], sizeof(got[0])) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "case %d, step %d: the sum as a hook has other bits", k, s);
            rank_check(got[0][0] != madeup_value(WHICH, 0) && (got[0][140] == madeup_value(WHICH, 140)) == (k / 3 % 2 != 0));
        }
        fsdp_optim_destroy(o);
        for (int i = 1; i >= 0; i--) fsdp_unit_destroy(u[i]);
    }
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_the_sum_as_a_hook(void **state)
{
    (void)state;
    in_corners(as_without, &(corners){ .all_modes = true, .ranks = (const int[]){ 3, 0 }, .threads_only = true });
    in_corners(as_without, &(corners){ .ranks = (const int[]){ 2, 0 }, .processes_only = true });
}

/* ---- sums that are kept below fp32: the hook sees them widened, and rounds for itself as there is rounded without it ---- */

static fsdp_status round_each(const fsdp_kernel *k, const fsdp_reduction *r, void *arg)
{
    (void)k;
    fsdp_dtype t = *(const fsdp_dtype *)arg;
    for (int64_t i = 0; i < r->numel; i++) {
        float sum = r->base != NULL ? r->base[i] : 0;
        for (int p = 0; p < r->ranks; p++) sum = rounded_to(t, p == 0 && r->base == NULL ? r->piece[0][i] : sum + r->piece[p][i]);
        r->out[i] = sum;
    }
    return FSDP_OK;
}

static fsdp_status rounds_itself(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    for (int k = 0; k < 4; k++) {
        fsdp_unit *u[2];
        fsdp_optim *o;
        float got[2][MADEUP];
        fsdp_dtype t = k % 2 ? FSDP_BF16 : FSDP_F16;
        fsdp_unit_opts uo = { .name = "u", .mode = c->mode, .compute_device = dev, .storage_device = k / 2 ? fsdp_device_cpu() : NULL, .reduce_dtype = k / 2 ? FSDP_BF16 : FSDP_F32, .grad_dtype = t };
        for (int i = 0; i < 2; i++) FSDP_TRY(madeup_unit_with(&u[i], comm, &uo, WHICH));
        FSDP_TRY(fsdp_optim_create_sgd(&o, (fsdp_unit_list){ u, 2 }, &(fsdp_sgd_opts){ .lr = 0.25f }));
        FSDP_TRY(fsdp_unit_set_grad_hooks(u[1], &(fsdp_grad_hooks){ .reduce = round_each, .arg = &t }));
        for (int s = 0; s < STEPS; s++) {
            for (int leaf = fsdp_comm_rank(comm); leaf < LEAVES; leaf += fsdp_comm_size(comm)) FSDP_TRY(madeup_pass(u, (int[]){ WHICH, WHICH }, 2, s * LEAVES + leaf, madeup_noise, 0));
            FSDP_TRY(fsdp_optim_step(o, NULL));
            for (int i = 0; i < 2; i++) FSDP_TRY(madeup_read(u[i], got[i]));
            if (memcmp(got[0], got[1], sizeof(got[0])) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "case %d, step %d: a hook that rounds has other bits", k, s);
            rank_check(got[0][0] != madeup_value(WHICH, 0));
        }
        fsdp_optim_destroy(o);
        for (int i = 1; i >= 0; i--) fsdp_unit_destroy(u[i]);
    }
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_sums_below_fp32(void **state)
{
    (void)state;
    in_corners(rounds_itself, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 3, 0 } : (const int[]){ 1, 3, 0 }, .threads_only = true });
}

/* ---- one that fails ---- */

typedef struct moody {
    bool fails;
} moody;

static fsdp_status fail_now(const void *arg)
{
    if (((const moody *)arg)->fails) FSDP_FAIL(FSDP_ERR_NONFINITE, "the hook is in a bad mood");
    return FSDP_OK;
}

static fsdp_status moody_post(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg)
{
    (void)k;
    (void)grad;
    (void)part;
    (void)count;
    return fail_now(arg);
}

static fsdp_status moody_reduce(const fsdp_kernel *k, const fsdp_reduction *r, void *arg)
{
    FSDP_TRY(fail_now(arg));
    return fsdp_reduce_sum(k, r, NULL);
}

static fsdp_status fails(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    moody m = { false };
    float want[MADEUP], sum[MADEUP];
    FSDP_TRY(open_site(&x, comm, c));
    begin_values(want);
    for (int k = 0; k < 4; k++) {
        fsdp_grad_hooks h = { .post = k % 2 == 0 ? moody_post : NULL, .reduce = k % 2 == 1 ? moody_reduce : NULL, .arg = &m };
        FSDP_TRY(fsdp_unit_set_grad_hooks(x.u, &h));
        for (int leaf = fsdp_comm_rank(comm), turn = 0; leaf < LEAVES; leaf += fsdp_comm_size(comm), turn++) {
            if (turn % 3 == 1) { /* on all ranks: the pass is cancelled, and its leaf done again */
                fsdp_pass *pass;
                FSDP_TRY(fsdpi_runtime_sync(x.u->rt)); /* the hooks of the last pass have run */
                m.fails = true;
                FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
                fsdp_status st = madeup_run(pass, &x.u, which, 1, leaf, madeup_noise);
                if (c->ranks == 1 && strcmp(c->device, "cpu") == 0) {
                    rank_check(st == FSDP_ERR_NONFINITE && strcmp(fsdp_last_error_message(), "the hook is in a bad mood") == 0);
                    if (k == 3) rank_check(fsdp_pass_end(pass) != FSDP_OK); /* it does not count */
                }
                FSDP_TRY(fsdp_pass_cancel(pass));
                m.fails = false;
            }
            FSDP_TRY(madeup_pass(&x.u, which, 1, leaf, madeup_noise, 0));
        }
        FSDP_TRY(fsdp_optim_step(x.o, NULL));
        plain_sums(sum, &(fsdp_grad_hooks){ 0 }, 0, 1);
        plain_update(want, sum);
        FSDP_TRY(same(&x, want, k % 2 == 0 ? "after a post hook failed" : "after a reduce hook failed"));
    }
    /* The unit goes before its hooks' argument does. */
    close_site(&x);
    return FSDP_OK;
}

static void test_a_hook_that_fails(void **state)
{
    (void)state;
    in_corners(fails, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 0 }, .threads_only = SANITIZED });
}

/* ---- what is refused ---- */

static fsdp_status refused(fsdp_comm *comm, void *arg)
{
    site x;
    fsdp_pass *pass;
    float before[MADEUP];
    FSDP_TRY(open_site(&x, comm, arg));
    const fsdp_grad_hooks sum = { .reduce = fsdp_reduce_sum }, both = { .post = clip_leaf, .reduce = reduce_votes };
    FSDP_TRY(fsdp_unit_set_grad_hooks(x.u, NULL)); /* there are none */
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    rank_check(fsdp_unit_set_grad_hooks(x.u, &both) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "a pass is open") != NULL);
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(step(&x, 0));
    begin_values(before);
    float want[MADEUP];
    plain_sums(want, &(fsdp_grad_hooks){ 0 }, 0, 1);
    plain_update(before, want);
    FSDP_TRY(same(&x, before, "a hook that was refused"));
    /* Ranks that set different kinds are told; the hooks are as they were. */
    FSDP_TRY(fsdp_unit_set_grad_hooks(x.u, &sum));
    fsdp_status st = fsdp_unit_set_grad_hooks(x.u, fsdp_comm_rank(comm) == 1 ? NULL : &both);
    rank_check(st == FSDP_ERR_COMM && strstr(fsdp_last_error_message(), "setting of gradient hooks") != NULL);
    FSDP_TRY(fsdp_comm_reset(comm));
    FSDP_TRY(step(&x, 0));
    plain_update(before, want);
    FSDP_TRY(same(&x, before, "hooks that were refused"));
    close_site(&x);
    return FSDP_OK;
}

static void test_what_is_refused(void **state)
{
    (void)state;
    in_corners(refused, &(corners){ .all_modes = true, .ranks = (const int[]){ 2, 3, 0 }, .threads_only = SANITIZED });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_whole_vectors), cmocka_unit_test(test_two_rounds), cmocka_unit_test(test_the_sum_as_a_hook), cmocka_unit_test(test_sums_below_fp32), cmocka_unit_test(test_a_hook_that_fails), cmocka_unit_test(test_what_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
