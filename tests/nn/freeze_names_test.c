/* SPDX-License-Identifier: MIT
 *
 * Freezing by name: before, after and around wrapping it is the same; what is frozen keeps every bit and what is not gets the
 * gradients that it gets otherwise; a frozen trunk is not gathered in the backward; with activation checkpointing too. */
#include "support/ranks.h"

enum { WIDTH = 6, ROWS = 4, MOST = 2048 };

/* The tree: root { 0: stack { 0: linear, 1: linear }, 1: linear, 2: stack { 0: linear, 1: linear } }; both stacks are units. */
static const char *const cases[] = { "0.*", "*.bias", "2.*", "1.*", "0.0.weight", "*.0.*" };
enum { CASES = sizeof(cases) / sizeof(cases[0]) };

typedef enum moment { NEVER, BEFORE_WRAP, BETWEEN, AFTER_WRAP, AFTER_A_STEP, MOMENTS } moment;

typedef struct run {
    const char *pattern;
    moment moment;
    bool recompute;
    int steps;
} run;

typedef struct result {
    float first[MOST], last[MOST]; /* all parameters */
    bool frozen[MOST];             /* of each element */
    uint64_t gathers, reduces;     /* of the last step, by rank 0 */
    int n;
} result;

static fsdp_status make_stack(fsdp_module **out)
{
    fsdp_module *c[2];
    FSDP_TRY(fsdp_linear(&c[0], WIDTH, 11, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&c[1], 11, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    return fsdp_sequential(out, c, 2);
}

static fsdp_status make_model(fsdp_module **out, fsdp_comm *comm, fsdp_device *dev, const corner *c, const run *r)
{
    fsdp_wrap_opts w = { .comm = comm, .compute_device = dev, .mode = c->mode, .prefetch = -1 };
    fsdp_module *m[3];
    FSDP_TRY(make_stack(&m[0]));
    FSDP_TRY(fsdp_linear(&m[1], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(make_stack(&m[2]));
    FSDP_TRY(fsdp_sequential(out, m, 3));
    if (r->moment == BEFORE_WRAP) FSDP_TRY(fsdp_module_set_frozen(*out, r->pattern, true));
    FSDP_TRY(fsdp_wrap(&m[0], m[0], &w));
    if (r->moment == BETWEEN) FSDP_TRY(fsdp_module_set_frozen(*out, r->pattern, true));
    FSDP_TRY(fsdp_wrap(&m[2], m[2], &w));
    FSDP_TRY(fsdp_wrap(out, *out, &w));
    if (r->moment == AFTER_WRAP) FSDP_TRY(fsdp_module_set_frozen(*out, r->pattern, true));
    fsdp_module_set_recompute(m[0], r->recompute);
    fsdp_module_set_recompute(m[2], r->recompute);
    return fsdp_module_init_keyed(*out, FSDP_INIT_KAIMING, 3);
}

static fsdp_status pass(fsdp_module *model, fsdp_comm *comm, fsdp_device *dev, int leaf)
{
    float x[ROWS * WIDTH];
    int32_t y[ROWS];
    for (int i = 0; i < ROWS; i++) y[i] = (leaf + i) % WIDTH;
    fsdp_philox_normal_fill(5, "x", (int64_t)leaf * ROWS * WIDTH, ROWS * WIDTH, x);
    fsdp_tape *tape;
    fsdp_tensor *in, *labels, *scores, *loss;
    FSDP_TRY(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .device = dev }));
    FSDP_TRY(fsdp_tensor_from_f32(&in, tape, x, 2, (int64_t[]){ ROWS, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(model, tape, in, &scores));
    FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
    fsdp_status st = fsdp_backward(tape, loss);
    if (st != FSDP_OK) {
        (void)!fsdp_tape_cancel(tape);
        return st;
    }
    return fsdp_tape_end(tape);
}

static fsdp_status read_all(fsdp_module *m, float *out, bool *frozen, int *total)
{
    const fsdp_module_param_info *p;
    int n, at = 0;
    FSDP_TRY(fsdp_module_params(m, &p, &n));
    for (int i = 0; i < n; i++) {
        int64_t numel = fsdp_unit_param_numel(p[i].unit, p[i].index);
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, out + at));
        for (int64_t k = 0; k < numel; k++) frozen[at + k] = p[i].frozen;
        at += (int)numel;
    }
    *total = at;
    return FSDP_OK;
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const run *r = c->arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    result mine, *out = rank == 0 ? c->shared : &mine;
    fsdp_device *dev;
    fsdp_module *model;
    fsdp_optim *optim;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(make_model(&model, comm, dev, c, r));
    FSDP_TRY(fsdp_optim_create_sgd(&optim, fsdp_module_units(model), &(fsdp_sgd_opts){ .lr = 0.1f, .weight_decay = 0.01f }));
    for (int step = 0; step < r->steps; step++) {
        if (r->moment == AFTER_A_STEP && step == 1) FSDP_TRY(fsdp_module_set_frozen(model, r->pattern, true));
        FSDP_TRY(read_all(model, out->first, out->frozen, &out->n));
        fsdp_comm_stats before, after;
        fsdp_comm_get_stats(comm, &before);
        for (int leaf = rank; leaf < 6; leaf += size) FSDP_TRY(pass(model, comm, dev, step * 6 + leaf));
        FSDP_TRY(fsdp_optim_step(optim, NULL));
        fsdp_comm_get_stats(comm, &after);
        out->gathers = after.gathers - before.gathers;
        out->reduces = after.reduces - before.reduces;
    }
    FSDP_TRY(read_all(model, out->last, out->frozen, &out->n));
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(model);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static result *go(const run *r, int ranks, const char *transport, const char *device, fsdp_mode mode)
{
    corner c = { .transport = transport, .device = device, .ranks = ranks, .mode = mode, .threads = true, .arg = (void *)(uintptr_t)r };
    c.shared = shared_alloc(sizeof(result));
    if (in_corner(train, &c) != FSDP_OK) fail_msg("%s, \"%s\" at moment %d: %s", corner_name(&c), r->pattern, (int)r->moment, fsdp_last_error());
    return c.shared;
}

/* One step with something frozen, beside the same step with nothing frozen. */
static void test_the_rest_trains_as_ever(void **state)
{
    (void)state;
    for (int k = 0; k < CASES; k++)
        for (int m = BEFORE_WRAP; m < MOMENTS; m++) {
            int steps = m == AFTER_A_STEP ? 2 : 1;
            run none = { cases[k], NEVER, false, steps }, some = { cases[k], (moment)m, (k + m) % 2 == 0, steps };
            result *want = go(&none, 1, "self", "cpu", FSDP_MODE_FULL);
            result *got = go(&some, 1 + (k + m) % 3, (k + m) % 2 ? "copy" : "shm", k % 2 ? "guard" : "cpu", (fsdp_mode)(k % 4));
            int still = 0;
            assert_true(want->n > 100 && want->n < MOST && got->n == want->n);
            for (int i = 0; i < got->n; i++) {
                float x = got->frozen[i] ? want->first[i] : want->last[i];
                still += got->frozen[i];
                if (memcmp(&x, &got->last[i], sizeof(x)) != 0)
                    fail_msg("\"%s\" at moment %d: element %d (frozen: %d) is %.9g, not %.9g", cases[k], m, i, got->frozen[i], (double)got->last[i], (double)x);
            }
            assert_true(still > 0 && still < got->n);
            shared_free(want, sizeof(result));
            shared_free(got, sizeof(result));
        }
}

/* Three units, six leaves on two ranks: three passes a rank, each a gather a unit (the root's is kept) and one for each backward. */
static void test_collectives_are_counted(void **state)
{
    (void)state;
    static const struct {
        const char *pattern;
        uint64_t gathers, reduces;
    } rows[] = {
        { "0.0.weight", 3 * 5, 3 * 3 }, /* a part of a unit: as ever */
        { "2.*", 3 * 5, 3 * 2 },        /* its input needs a gradient: gathered, not reduced */
        { "0.*", 3 * 4, 3 * 2 },        /* nothing before it trains: its backward is not made */
        { "1.*", 3 * 5, 3 * 2 },        /* the root alone */
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        for (int again = 0; again < 2; again++) {
            run r = { rows[i].pattern, AFTER_WRAP, again != 0, 2 };
            result *got = go(&r, 2, "copy", "cpu", FSDP_MODE_FULL);
            if (got->gathers != rows[i].gathers || got->reduces != rows[i].reduces)
                fail_msg("\"%s\", recompute %d: %llu gathers and %llu reductions, not %llu and %llu", rows[i].pattern, again, (unsigned long long)got->gathers,
                         (unsigned long long)got->reduces, (unsigned long long)rows[i].gathers, (unsigned long long)rows[i].reduces);
            shared_free(got, sizeof(result));
        }
}

static fsdp_status refusals(fsdp_comm *comm, void *arg)
{
    (void)arg;
    fsdp_module *m, *c[2];
    FSDP_TRY(fsdp_linear(&c[0], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_linear(&c[1], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_sequential(&m, c, 2));
    rank_check(fsdp_module_set_frozen(m, "0.wieght", true) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "none of the 4 parameters") != NULL);
    rank_check(fsdp_module_set_frozen(m, NULL, true) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = comm }));
    /* Everything frozen: the backward has nothing to do, and says so. */
    FSDP_TRY(fsdp_module_set_frozen(m, "*", true));
    rank_check(pass(m, comm, fsdp_device_cpu(), 0) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "frozen") != NULL);
    FSDP_TRY(fsdp_module_set_frozen(m, "1.bias", false));
    FSDP_TRY(pass(m, comm, fsdp_device_cpu(), 0));
    /* There are gradients: nothing changes, also where only some of the parameters are in the way. */
    rank_check(fsdp_module_set_frozen(m, "*", true) == FSDP_ERR_STATE && !fsdp_unit_frozen(fsdp_module_units(m).units[0], 3));
    fsdp_module_destroy(m);
    return FSDP_OK;
}

/* One parameter in two places goes by either name; by both it is looked at once. */
static fsdp_status second_names(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_module *m, *l[2];
    for (int k = 0; k < 4; k++) {
        for (int i = 0; i < 2; i++) FSDP_TRY(fsdp_linear(&l[i], WIDTH, WIDTH, NULL));
        FSDP_TRY(fsdp_module_share_param(l[1], 0, l[0], 0));
        FSDP_TRY(fsdp_sequential(&m, l, 2));
        const char *pattern = k % 2 == 0 ? "1.weight" : "*";
        if (k < 2) FSDP_TRY(fsdp_module_set_frozen(m, pattern, true));
        FSDP_TRY(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = comm, .mode = c->mode }));
        if (k >= 2) FSDP_TRY(fsdp_module_set_frozen(m, pattern, true));
        rank_check(fsdp_module_units(m).count == 1 && fsdp_unit_frozen(fsdp_module_units(m).units[0], 0));
        FSDP_TRY(fsdp_module_set_frozen(m, "0.weight", false));
        rank_check(!fsdp_unit_frozen(fsdp_module_units(m).units[0], 0));
        rank_check(fsdp_module_set_frozen(m, "2.weight", true) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "none of the 1 parameters") != NULL);
        fsdp_module_destroy(m);
    }
    return FSDP_OK;
}

static void test_second_names(void **state)
{
    (void)state;
    in_corners(second_names, &(corners){ .device = "cpu", .all_modes = true, .ranks = (const int[]){ 1, 2, 0 }, .threads_only = true });
}

static void test_refusals(void **state)
{
    (void)state;
    in_corners(refusals, &(corners){ .ranks = (const int[]){ 1, 2, 0 }, .device = "cpu", .threads_only = true });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_rest_trains_as_ever),
        cmocka_unit_test(test_collectives_are_counted),
        cmocka_unit_test(test_second_names),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
