/* SPDX-License-Identifier: MIT
 *
 * The loss scaler: powers of two change no bit of training; a gradient that is not finite, anywhere, makes all ranks skip the same
 * step and back off alike, on any number of ranks and over groups; its state goes through a checkpoint. */
#include "support/madeup.h"
#include "support/ranks.h"

#include <math.h>
#include <unistd.h>

/* ---- alone ---- */

static void test_life_of_a_scale(void **state)
{
    (void)state;
    fsdp_scaler s;
    bool skip;
    assert_ok(fsdp_scaler_init(&s, NULL));
    assert_true(s.scale == 65536 && s.growth == 2 && s.backoff == 0.5 && s.min == 1 && s.max == 0x1p24 && s.interval == 2000 && s.skipped == 0);
    assert_ok(fsdp_scaler_init(&s, &(fsdp_scaler_opts){ .scale = 8, .interval = 3, .max = 32 }));
    static const double norm[] = { 1, 0, 2, NAN, 1, 1, INFINITY, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, INFINITY };
    static const double then[] = { 8, 8, 16, 8, 8, 8, 4, 4, 4, 8, 8, 8, 16, 16, 16, 32, 32, 16 };
    for (int i = 0; i < 18; i++) {
        assert_ok(fsdp_scaler_update(&s, norm[i], &skip));
        assert_int_equal(skip, !isfinite(norm[i]));
        if (s.scale != then[i]) fail_msg("after update %d the scale is %g, not %g", i, s.scale, then[i]);
    }
    assert_int_equal(s.skipped, 3);
    for (int i = 0; i < 6; i++) assert_ok(fsdp_scaler_update(&s, 1, &skip));
    assert_true(s.scale == 32); /* its bound */
    while (s.scale > 1) assert_ok(fsdp_scaler_update(&s, -INFINITY, &skip));
    fsdp_scaler was = s;
    skip = false;
    assert_fails(fsdp_scaler_update(&s, NAN, &skip), FSDP_ERR_NONFINITE, "at its minimum, 1");
    assert_true(!skip && memcmp(&was, &s, sizeof(s)) == 0);
    /* Fixed; and less than 1. */
    assert_ok(fsdp_scaler_init(&s, &(fsdp_scaler_opts){ .scale = 1024, .min = 1024, .max = 1024, .interval = 1 }));
    assert_ok(fsdp_scaler_update(&s, 1, &skip));
    assert_true(s.scale == 1024);
    assert_fails(fsdp_scaler_update(&s, INFINITY, &skip), FSDP_ERR_NONFINITE, "1024");
    assert_ok(fsdp_scaler_init(&s, &(fsdp_scaler_opts){ .scale = 0.125 }));
    assert_true(s.min == 0.125);
    /* A backoff that goes below the minimum stops there. */
    assert_ok(fsdp_scaler_init(&s, &(fsdp_scaler_opts){ .scale = 3, .backoff = 0.1, .min = 2 }));
    assert_ok(fsdp_scaler_update(&s, INFINITY, &skip));
    assert_true(s.scale == 2);
}

static void test_what_is_no_scaler(void **state)
{
    (void)state;
    static const fsdp_scaler_opts wrong[] = { { .scale = -1 },       { .scale = INFINITY },          { .scale = NAN },     { .scale = 4, .min = 8 }, { .scale = 4, .max = 2 },
                                              { .growth = 0.5 },     { .growth = NAN },              { .backoff = 1 },     { .backoff = -0.5 },      { .interval = -3 },
                                              { .growth = INFINITY }, { .scale = 1, .min = 1e-300 }, { .max = 1e300 } };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        fsdp_scaler s = { .scale = 77 };
        if (fsdp_scaler_init(&s, &wrong[i]) != FSDP_ERR_INVALID || s.scale != 77) fail_msg("wrong opts %d were taken", (int)i);
    }
}

/* ---- in steps ---- */

enum { STEPS = 8, LEAVES = 6, TINY = 3 };

/* What each step's gradients are scaled with; every rank writes the same values, before it uses them. */
static float scale_of_step[STEPS];
/* Which rank's last leaf of which step is bad: the value, and in the tiny unit or the first one. */
static const struct {
    int step, unit;
    float value;
} bad[] = { { 1, 7, INFINITY }, { 2, 8, NAN }, { 5, 8, -INFINITY } };

static float scaled(int which, int leaf, int i)
{
    int step = leaf / LEAVES;
    for (int k = 0; k < 3; k++)
        if (step == bad[k].step && which == bad[k].unit && leaf % LEAVES == LEAVES - 1 && i == MADEUP - 1) return bad[k].value;
    return madeup_noise(which, leaf, i) * scale_of_step[step];
}

static float unscaled(int which, int leaf, int i)
{
    return madeup_noise(which, leaf, i);
}

typedef struct site {
    fsdp_device *dev;
    fsdp_unit *u[2];
    fsdp_optim *o;
} site;

static const int which[] = { 7, 8 };

static fsdp_status open_site(site *x, fsdp_comm *comm, const corner *c)
{
    FSDP_TRY(fsdp_device_open(&x->dev, c->device));
    for (int k = 0; k < 2; k++) FSDP_TRY(madeup_unit(&x->u[k], comm, x->dev, c->mode, k == 0 ? "first" : "second", which[k]));
    return fsdp_optim_create_adamw(&x->o, (fsdp_unit_list){ x->u, 2 }, &(fsdp_adamw_opts){ .lr = 0.03f, .weight_decay = 0.1f });
}

static void close_site(site *x)
{
    fsdp_optim_destroy(x->o);
    for (int k = 0; k < 2; k++) fsdp_unit_destroy(x->u[k]);
    fsdp_device_close(x->dev);
}

static fsdp_status same_parameters(site *a, site *b, const char *when, int step)
{
    float x[MADEUP], y[MADEUP];
    for (int k = 0; k < 2; k++) {
        FSDP_TRY(madeup_read(a->u[k], x));
        FSDP_TRY(madeup_read(b->u[k], y));
        if (memcmp(x, y, sizeof(x)) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "%s step %d unit %d has other bits", when, step, k);
    }
    return FSDP_OK;
}

/* Two trainings: with a scaler, and without but also without the steps that it skips. Each step both have the same bits. */
static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site with, without;
    fsdp_scaler s;
    FSDP_TRY(open_site(&with, comm, c));
    FSDP_TRY(open_site(&without, comm, c));
    FSDP_TRY(fsdp_scaler_init(&s, &(fsdp_scaler_opts){ .scale = 4096, .interval = 2 }));
    static const double scales[] = { 4096, 4096, 2048, 1024, 1024, 2048, 1024, 1024 };
    int taken = 0;
    for (int step = 0; step < STEPS; step++) {
        bool is_bad = step == 1 || step == 2 || step == 5, skipped = !is_bad;
        double norm = -1, plain = -1;
        if (s.scale != scales[step]) FSDP_FAIL(FSDP_ERR_INTERNAL, "step %d begins with scale %g, not %g", step, s.scale, scales[step]);
        scale_of_step[step] = (float)s.scale;
        for (int l = fsdp_comm_rank(comm); l < LEAVES; l += fsdp_comm_size(comm)) {
            FSDP_TRY(madeup_pass(with.u, which, 2, step * LEAVES + l, scaled, 3));
            if (!is_bad) FSDP_TRY(madeup_pass(without.u, which, 2, step * LEAVES + l, unscaled, 3));
        }
        FSDP_TRY(fsdp_optim_step(with.o, &(fsdp_step_opts){ .clip = 0.5f, .scaler = &s, .norm = &norm, .skipped = &skipped }));
        rank_check(skipped == is_bad && isfinite(norm) == !is_bad);
        if (!is_bad) {
            FSDP_TRY(fsdp_optim_step(without.o, &(fsdp_step_opts){ .clip = 0.5f, .norm = &plain }));
            rank_check(norm == plain && norm > 0.5);
            taken++;
        }
        rank_check(fsdp_optim_unit_steps(with.o, with.u[0]) == taken);
        FSDP_TRY(same_parameters(&with, &without, "after", step));
    }
    rank_check(s.skipped == 3);
    close_site(&without);
    close_site(&with);
    return FSDP_OK;
}

static void test_steps(void **state)
{
    (void)state;
    in_corners(train, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 3, 0 } : (const int[]){ 1, 2, 3, 6, 0 } });
}

/* ---- at the end of its means ---- */

static float always_bad(int k, int leaf, int i)
{
    (void)leaf;
    return k == 8 && i == 134 ? INFINITY : 1; /* in b */
}

static fsdp_status exhausted(fsdp_comm *comm, void *arg)
{
    site x;
    fsdp_scaler s;
    double norm = 3;
    bool skipped = false;
    FSDP_TRY(open_site(&x, comm, arg));
    FSDP_TRY(fsdp_scaler_init(&s, &(fsdp_scaler_opts){ .scale = 4 }));
    fsdp_step_opts o = { .scaler = &s, .skipped = &skipped };
    for (int i = 0; i < 2; i++) {
        FSDP_TRY(madeup_pass(x.u, which, 2, 0, always_bad, 0));
        FSDP_TRY(fsdp_optim_step(x.o, &o));
        rank_check(skipped);
    }
    o.norm = &norm;
    FSDP_TRY(madeup_pass(x.u, which, 2, 0, always_bad, 0));
    rank_check(fsdp_optim_step(x.o, &o) == FSDP_ERR_NONFINITE && norm == 3 && s.scale == 1 && s.skipped == 2);
    const char *said = fsdp_last_error_message();
    rank_check(strstr(said, "the loss scale 1, which is at its minimum") != NULL && strstr(said, "unit \"second\", parameter \"b\" has it first") != NULL);
    /* What makes no sense is refused. */
    fsdp_scaler none = { 0 };
    rank_check(fsdp_optim_step(x.o, &(fsdp_step_opts){ .scaler = &none }) == FSDP_ERR_INVALID);
    rank_check(fsdp_optim_step(x.o, &(fsdp_step_opts){ .skipped = &skipped }) == FSDP_ERR_INVALID);
    close_site(&x);
    return FSDP_OK;
}

static void test_smallest_scale(void **state)
{
    (void)state;
    in_corners(exhausted, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 }, .threads_only = SANITIZED });
}

/* ---- groups: one rank's own unit is bad, all skip ---- */

static float bad_on_own(int k, int leaf, int i)
{
    return k == 20 + 1 && leaf == 0 && i == 3 ? NAN : madeup_noise(k, leaf, i);
}

static fsdp_status over_groups(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(world), all = 1, own = 20 + rank;
    fsdp_comm *mine;
    fsdp_device *dev;
    fsdp_unit *u[2];
    fsdp_optim *o;
    fsdp_scaler s;
    float x[MADEUP];
    FSDP_TRY(fsdp_comm_split(world, rank, 0, &mine));
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(madeup_unit(&u[0], world, dev, c->mode, "shared", all));
    FSDP_TRY(madeup_unit(&u[1], mine, dev, c->mode, "own", own));
    FSDP_TRY(fsdp_optim_create_adamw(&o, (fsdp_unit_list){ u, 2 }, &(fsdp_adamw_opts){ .lr = 0.1f }));
    FSDP_TRY(fsdp_scaler_init(&s, NULL));
    for (int step = 0; step < 2; step++) {
        bool skipped = step == 1;
        FSDP_TRY(madeup_pass(&u[0], &all, 1, rank, bad_on_own, 1));
        FSDP_TRY(madeup_pass(&u[1], &own, 1, step, bad_on_own, 0));
        FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .over = world, .scaler = &s, .skipped = &skipped }));
        rank_check(skipped == (step == 0) && s.scale == 32768);
        for (int k = 0; k < 2; k++) {
            FSDP_TRY(madeup_read(u[k], x));
            for (int i = 0; i < MADEUP; i++) rank_check((x[i] == madeup_value(k == 0 ? all : own, i)) == skipped);
        }
    }
    fsdp_optim_destroy(o);
    fsdp_unit_destroy(u[1]);
    fsdp_unit_destroy(u[0]);
    fsdp_comm_destroy(mine);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_groups(void **state)
{
    (void)state;
    in_corners(over_groups, &(corners){ .all_modes = true, .ranks = (const int[]){ 2, 5, 0 }, .threads_only = SANITIZED });
}

/* ---- the tape, and a checkpoint ---- */

static fsdp_status one_step(fsdp_comm *comm, fsdp_module *m, fsdp_optim *o, int step, fsdp_scaler *s, double *loss)
{
    for (int leaf = fsdp_comm_rank(comm); leaf < LEAVES; leaf += fsdp_comm_size(comm)) {
        fsdp_tape *tape;
        fsdp_tensor *x, *y, *label, *l;
        float row[5];
        double count;
        fsdp_philox_normal_fill(3, "row", (step * LEAVES + leaf) * 5, 5, row);
        FSDP_TRY(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .loss_scale = s != NULL ? (float)s->scale : 0 }));
        FSDP_TRY(fsdp_tensor_from_f32(&x, tape, row, 2, (int64_t[]){ 1, 5 }));
        FSDP_TRY(fsdp_tensor_from_i32(&label, tape, &(int32_t){ leaf % 3 }, 1, (int64_t[]){ 1 }));
        FSDP_TRY(fsdp_forward(m, tape, x, &y));
        FSDP_TRY(fsdp_op_cross_entropy(tape, y, label, &l));
        FSDP_TRY(fsdp_backward(tape, l));
        FSDP_TRY(fsdp_loss_read(l, loss, &count));
        FSDP_TRY(fsdp_tape_end(tape));
    }
    return fsdp_optim_step(o, &(fsdp_step_opts){ .clip = 0.1f, .scaler = s });
}

static fsdp_status make(fsdp_comm *comm, fsdp_module **m, fsdp_optim **o)
{
    fsdp_module *layer[2];
    FSDP_TRY(fsdp_linear(&layer[0], 5, 7, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&layer[1], 7, 3, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_wrap(&layer[0], layer[0], &(fsdp_wrap_opts){ .comm = comm }));
    FSDP_TRY(fsdp_sequential(m, layer, 2));
    FSDP_TRY(fsdp_wrap(m, *m, &(fsdp_wrap_opts){ .comm = comm }));
    FSDP_TRY(fsdp_module_init_keyed(*m, FSDP_INIT_KAIMING, 1));
    return fsdp_optim_create_adamw(o, fsdp_module_units(*m), &(fsdp_adamw_opts){ .lr = 0.01f });
}

static fsdp_status on_a_tape(fsdp_comm *comm, void *arg)
{
    (void)arg;
    fsdp_module *m[2];
    fsdp_optim *o[2];
    fsdp_scaler s;
    fsdp_tape *tape;
    FSDP_TRY(fsdp_scaler_init(&s, &(fsdp_scaler_opts){ .scale = 1024, .interval = 2 }));
    for (int k = 0; k < 2; k++) FSDP_TRY(make(comm, &m[k], &o[k]));
    for (int step = 0; step < 5; step++) {
        double loss[2] = { 0 };
        for (int k = 0; k < 2; k++) FSDP_TRY(one_step(comm, m[k], o[k], step, k == 0 ? NULL : &s, &loss[k]));
        rank_check(loss[0] == loss[1]);
    }
    rank_check(s.scale == 4096 && s.good_steps == 1);
    for (int i = 0; i < 4; i++) {
        float a[64], b[64];
        const fsdp_module_param_info *p;
        int n;
        FSDP_TRY(fsdp_module_params(m[0], &p, &n));
        int64_t numel = fsdp_unit_param_numel(p[i].unit, p[i].index);
        FSDP_TRY(fsdp_module_read_param(m[0], i, a));
        FSDP_TRY(fsdp_module_read_param(m[1], i, b));
        rank_check(memcmp(a, b, (size_t)numel * sizeof(float)) == 0);
    }
    rank_check(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .loss_scale = -1 }) == FSDP_ERR_INVALID);
    rank_check(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .loss_scale = INFINITY }) == FSDP_ERR_INVALID);
    for (int k = 0; k < 2; k++) {
        fsdp_optim_destroy(o[k]);
        fsdp_module_destroy(m[k]);
    }
    return FSDP_OK;
}

static void test_on_a_tape(void **state)
{
    (void)state;
    in_corners(on_a_tape, &(corners){ .device = "cpu", .ranks = (const int[]){ 1, 3, 0 }, .threads_only = SANITIZED });
}

static fsdp_status save_it(fsdp_comm *comm, void *arg)
{
    fsdp_checkpoint *c;
    fsdp_scaler s;
    bool skip;
    FSDP_TRY(fsdp_scaler_init(&s, NULL));
    FSDP_TRY(fsdp_scaler_update(&s, INFINITY, &skip));
    for (int i = 0; i < 7; i++) FSDP_TRY(fsdp_scaler_update(&s, 1, &skip));
    FSDP_TRY(fsdp_checkpoint_create(&c, comm));
    FSDP_TRY(fsdp_checkpoint_add_scaler(c, &s));
    FSDP_TRY(fsdp_checkpoint_save(c, arg, 5, 0));
    fsdp_checkpoint_destroy(c);
    return FSDP_OK;
}

static fsdp_status load_it(fsdp_comm *comm, void *arg)
{
    fsdp_checkpoint *c;
    fsdp_scaler s;
    char path[300];
    FSDP_TRY(fsdp_scaler_init(&s, &(fsdp_scaler_opts){ .scale = 2, .interval = 8 }));
    FSDP_TRY(fsdp_checkpoint_create(&c, comm));
    FSDP_TRY(fsdp_checkpoint_add_scaler(c, &s));
    snprintf(path, sizeof(path), "%s/step-00000005", (const char *)arg);
    FSDP_TRY(fsdp_checkpoint_load(c, path));
    rank_check(s.scale == 32768 && s.good_steps == 7 && s.skipped == 1 && s.interval == 8);
    fsdp_checkpoint_destroy(c);
    return FSDP_OK;
}

static void test_checkpoint(void **state)
{
    (void)state;
    char folder[] = "/tmp/fsdp-scaler-XXXXXX", command[64];
    assert_non_null(mkdtemp(folder));
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .ranks_are_threads = !CAN_FORK }, save_it, folder));
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 3, .ranks_are_threads = !CAN_FORK }, load_it, folder));
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_life_of_a_scale), cmocka_unit_test(test_what_is_no_scaler), cmocka_unit_test(test_steps),      cmocka_unit_test(test_smallest_scale),
        cmocka_unit_test(test_groups),          cmocka_unit_test(test_on_a_tape),         cmocka_unit_test(test_checkpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
