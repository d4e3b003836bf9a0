/* SPDX-License-Identifier: MIT
 *
 * Moving averages and teachers on slices: what the same formula gives on whole vectors, to the bit, in every mode; parameters are
 * themselves again after a swap; gradients that are accumulated stay; nothing is communicated but publications. */
#include "support/madeup.h"
#include "support/ranks.h"

#include <math.h>
#include <unistd.h>

enum { STEPS = 4, LEAVES = 20, UNITS = 2 };
static const int which[] = { 3, 12 };
static const float decays[STEPS] = { 0.9f, 0.25f, 0.999f, 0.5f };

typedef struct site {
    fsdp_comm *comm;
    fsdp_device *dev;
    fsdp_unit *u[UNITS];
    fsdp_optim *o;
    fsdp_ema *e;
} site;

static fsdp_unit_list list_of(site *x)
{
    return (fsdp_unit_list){ x->u, UNITS };
}

static fsdp_status open_site(site *x, fsdp_comm *comm, const corner *c)
{
    *x = (site){ .comm = comm };
    FSDP_TRY(fsdp_device_open(&x->dev, c->device));
    for (int k = 0; k < UNITS; k++) FSDP_TRY(madeup_unit(&x->u[k], comm, x->dev, c->mode, k == 0 ? "first" : "second", which[k]));
    FSDP_TRY(fsdp_optim_create_adamw(&x->o, list_of(x), &(fsdp_adamw_opts){ .lr = 0.05f }));
    return fsdp_ema_create(&x->e, list_of(x));
}

static void close_site(site *x)
{
    fsdp_ema_destroy(x->e);
    fsdp_optim_destroy(x->o);
    for (int k = 0; k < UNITS; k++) fsdp_unit_destroy(x->u[k]);
    fsdp_device_close(x->dev);
}

static fsdp_status bring(site *x, int step, int from, int to)
{
    for (int leaf = from; leaf < to; leaf++)
        if (leaf % fsdp_comm_size(x->comm) == fsdp_comm_rank(x->comm)) FSDP_TRY(madeup_pass(x->u, which, UNITS, step * LEAVES + leaf, madeup_noise, 1));
    return FSDP_OK;
}

static fsdp_status read_all(site *x, float *out)
{
    for (int k = 0; k < UNITS; k++) FSDP_TRY(madeup_read(x->u[k], out + k * MADEUP));
    return FSDP_OK;
}

static void plain_mix(float *a, const float *p, float decay)
{
    float w = (float)(1.0 - (double)decay);
    for (int i = 0; i < UNITS * MADEUP; i++) a[i] = w < 0.5f ? a[i] + w * (p[i] - a[i]) : p[i] - decay * (p[i] - a[i]);
}

static fsdp_status same(const float *got, const float *want, const char *what, int step)
{
    for (int i = 0; i < UNITS * MADEUP; i++)
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "%s of step %d, element %d: %.9g, not %.9g", what, step, i, (double)got[i], (double)want[i]);
    return FSDP_OK;
}

/* ---- the moving average ---- */

static fsdp_status evaluate(site *x)
{
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, x->comm, FSDP_PASS_EVAL));
    for (int k = 0; k < UNITS; k++) {
        FSDP_TRY(fsdp_unit_begin_forward(x->u[k], pass));
        FSDP_TRY(fsdp_unit_end_forward(x->u[k], pass));
    }
    return fsdp_pass_end(pass);
}

static fsdp_status average(fsdp_comm *comm, void *arg)
{
    site x, plain;
    float got[UNITS * MADEUP], want[UNITS * MADEUP], params[UNITS * MADEUP], before[UNITS * MADEUP];
    fsdp_comm_stats then, now;
    FSDP_TRY(open_site(&x, comm, arg));
    FSDP_TRY(open_site(&plain, comm, arg)); /* never swapped */
    FSDP_TRY(read_all(&x, want));
    for (int step = 0; step < STEPS; step++) {
        FSDP_TRY(bring(&x, step, 0, 10));
        /* In the middle of a step: the gradients stay. */
        FSDP_TRY(read_all(&x, before));
        FSDP_TRY(fsdp_ema_swap_in(x.e));
        FSDP_TRY(read_all(&x, got));
        FSDP_TRY(same(got, want, "average before", step));
        FSDP_TRY(evaluate(&x));
        FSDP_TRY(fsdp_ema_swap_out(x.e));
        FSDP_TRY(read_all(&x, got));
        FSDP_TRY(same(got, before, "parameters after swaps", step));
        FSDP_TRY(bring(&x, step, 10, LEAVES));
        FSDP_TRY(bring(&plain, step, 0, LEAVES));
        FSDP_TRY(fsdp_optim_step(x.o, NULL));
        FSDP_TRY(fsdp_optim_step(plain.o, NULL));
        FSDP_TRY(read_all(&x, params));
        FSDP_TRY(read_all(&plain, got));
        FSDP_TRY(same(got, params, "parameters without swaps", step));
        fsdp_comm_get_stats(comm, &then);
        FSDP_TRY(fsdp_ema_update(x.e, decays[step]));
        fsdp_comm_get_stats(comm, &now);
        rank_check(now.exchanges == then.exchanges && now.gathers == then.gathers && now.publishes == then.publishes && now.reduces == then.reduces);
        plain_mix(want, params, decays[step]);
        FSDP_TRY(fsdp_ema_swap_in(x.e));
        FSDP_TRY(read_all(&x, got));
        FSDP_TRY(same(got, want, "average", step));
        FSDP_TRY(fsdp_ema_swap_out(x.e));
        FSDP_TRY(read_all(&x, got));
        FSDP_TRY(same(got, params, "parameters", step));
    }
    FSDP_TRY(fsdp_ema_update(x.e, 0)); /* the parameters themselves */
    FSDP_TRY(fsdp_ema_swap_in(x.e));
    FSDP_TRY(read_all(&x, got));
    FSDP_TRY(same(got, params, "average with decay 0", 0));
    close_site(&plain);
    close_site(&x); /* as it is */
    return FSDP_OK;
}

static void test_moving_average(void **state)
{
    (void)state;
    in_corners(average, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 5, 0 } : (const int[]){ 1, 2, 5, 0 } });
}

/* ---- what is refused ---- */

static void nothing(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)i;
    (void)arg;
    *value = 7;
}

static bool said(const char *text)
{
    return strstr(fsdp_last_error_message(), text) != NULL;
}

static fsdp_status refused(fsdp_comm *comm, void *arg)
{
    site x;
    fsdp_ema *other = NULL;
    fsdp_checkpoint *c;
    float before[UNITS * MADEUP], got[UNITS * MADEUP];
    static const float wrong[] = { 1, -0.1f, NAN, INFINITY };
    FSDP_TRY(open_site(&x, comm, arg));
    FSDP_TRY(bring(&x, 0, 0, LEAVES));
    FSDP_TRY(fsdp_optim_step(x.o, NULL));
    FSDP_TRY(read_all(&x, before));
    for (int k = 0; k < 4; k++) rank_check(fsdp_ema_update(x.e, wrong[k]) == FSDP_ERR_INVALID);
    rank_check(fsdp_ema_swap_out(x.e) == FSDP_ERR_STATE && said("fsdp_ema_swap_in() first"));
    fsdp_unit *twice[] = { x.u[0], x.u[0] };
    rank_check(fsdp_ema_create(&other, (fsdp_unit_list){ twice, 2 }) == FSDP_ERR_INVALID && other == NULL);
    FSDP_TRY(fsdp_ema_create(&other, (fsdp_unit_list){ x.u + 1, 1 }));
    FSDP_TRY(fsdp_checkpoint_create(&c, comm));
    FSDP_TRY(fsdp_checkpoint_add_param(c, "w", x.u[0], 0));
    FSDP_TRY(fsdp_ema_swap_in(x.e));
    rank_check(fsdp_ema_swap_in(x.e) == FSDP_ERR_STATE && said("unit \"first\"") && said("fsdp_ema_swap_out() first"));
    rank_check(fsdp_ema_swap_in(other) == FSDP_ERR_STATE && said("unit \"second\""));
    rank_check(fsdp_ema_swap_out(other) == FSDP_ERR_STATE && said("another average"));
    rank_check(fsdp_ema_update(x.e, 0.5f) == FSDP_ERR_STATE);
    rank_check(fsdp_optim_step(x.o, NULL) == FSDP_ERR_STATE && said("its average is in its place"));
    rank_check(fsdp_unit_init(x.u[0], nothing, NULL) == FSDP_ERR_STATE);
    rank_check(fsdp_unit_summon_begin(x.u[0], &(fsdp_unit_summon_opts){ .writeback = true }) == FSDP_ERR_STATE && said("or summon it read-only"));
    FSDP_TRY(fsdp_unit_summon_begin(x.u[0], NULL));
    FSDP_TRY(fsdp_unit_summon_end(x.u[0]));
    rank_check(fsdp_checkpoint_save(c, "/tmp", 1, 0) == FSDP_ERR_STATE && said("its average is in its place"));
    rank_check(strstr(fsdp_unit_state(x.u[0]), "averaged") != NULL);
    FSDP_TRY(fsdp_ema_swap_out(x.e));
    FSDP_TRY(fsdp_step_begin(list_of(&x)));
    rank_check(fsdp_ema_update(x.e, 0.5f) == FSDP_ERR_STATE && said("is in a step"));
    FSDP_TRY(fsdp_step_cancel(list_of(&x)));
    float *state;
    rank_check(fsdp_ema_state(other, x.u[0], &state) == FSDP_ERR_INVALID && said("unit \"first\" is not in this average"));
    FSDP_TRY(read_all(&x, got));
    FSDP_TRY(same(got, before, "parameters", 0));
    fsdp_checkpoint_destroy(c);
    fsdp_ema_destroy(other);
    fsdp_ema_destroy(NULL);
    close_site(&x);
    return FSDP_OK;
}

static void test_what_is_refused(void **state)
{
    (void)state;
    in_corners(refused, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 0 }, .threads_only = SANITIZED });
}

/* ---- the teacher ---- */

static fsdp_status teacher(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    fsdp_unit *t[UNITS], *odd;
    float got[UNITS * MADEUP], want[UNITS * MADEUP], params[UNITS * MADEUP];
    static const float momenta[STEPS] = { 0.75f, 1, 0.25f, 0 };
    FSDP_TRY(open_site(&x, comm, c));
    /* A teacher of another mode, whose slices are others where one of them is none. */
    for (int k = 0; k < UNITS; k++) FSDP_TRY(madeup_unit(&t[k], comm, x.dev, (fsdp_mode)(FSDP_MODE_NONE - c->mode), "teacher", which[k] + 20));
    fsdp_unit_list teachers = { t, UNITS };
    for (int i = 0; i < UNITS * MADEUP; i++) want[i] = madeup_value(which[i / MADEUP] + 20, i % MADEUP);
    for (int step = 0; step < STEPS; step++) {
        FSDP_TRY(bring(&x, step, 0, LEAVES));
        FSDP_TRY(fsdp_optim_step(x.o, NULL));
        FSDP_TRY(read_all(&x, params));
        FSDP_TRY(fsdp_teacher_update(teachers, list_of(&x), momenta[step]));
        plain_mix(want, params, momenta[step]);
        for (int k = 0; k < UNITS; k++) FSDP_TRY(madeup_read(t[k], got + k * MADEUP));
        FSDP_TRY(same(got, want, "teacher", step));
        FSDP_TRY(read_all(&x, got));
        FSDP_TRY(same(got, params, "student", step));
    }
    FSDP_TRY(same(want, params, "teacher of momentum 0", STEPS));
    /* What does not go together. */
    FSDP_TRY(fsdp_unit_create(&odd, comm, &(fsdp_param){ "w", 1, { 9 } }, 1, &(fsdp_unit_opts){ .name = "odd", .compute_device = x.dev }));
    fsdp_unit_list one = { t, 1 }, self = { x.u, 1 };
    rank_check(fsdp_teacher_update(one, list_of(&x), 0.5f) == FSDP_ERR_INVALID && said("1 units of a teacher and 2 of a student"));
    rank_check(fsdp_teacher_update(one, (fsdp_unit_list){ &odd, 1 }, 0.5f) == FSDP_ERR_INVALID && said("has 4 parameters and unit \"odd\" 1"));
    rank_check(fsdp_teacher_update(self, self, 0.5f) == FSDP_ERR_INVALID && said("teacher and student"));
    rank_check(fsdp_teacher_update(teachers, list_of(&x), 1.5f) == FSDP_ERR_INVALID);
    rank_check(fsdp_teacher_update(teachers, list_of(&x), NAN) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_step_begin(list_of(&x)));
    rank_check(fsdp_teacher_update(teachers, list_of(&x), 0.5f) == FSDP_ERR_STATE && said("unit \"first\" is in a step"));
    FSDP_TRY(fsdp_step_cancel(list_of(&x)));
    for (int k = 0; k < UNITS; k++) FSDP_TRY(madeup_read(t[k], got + k * MADEUP));
    FSDP_TRY(same(got, want, "teacher", STEPS));
    fsdp_unit_destroy(odd);
    for (int k = 0; k < UNITS; k++) fsdp_unit_destroy(t[k]);
    close_site(&x);
    return FSDP_OK;
}

static void test_teacher(void **state)
{
    (void)state;
    in_corners(teacher, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 5, 0 } : (const int[]){ 1, 2, 5, 0 } });
}

/* ---- meshes, published in fewer bits, kept on another device ---- */

static fsdp_status places(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    const fsdp_unit_opts opts[] = { { .name = "mesh", .compute_device = dev, .shards = 2 },
                                    { .name = "narrow", .mode = FSDP_MODE_OPTIMIZER, .compute_device = dev, .param_dtype = FSDP_BF16 },
                                    { .name = "apart", .mode = FSDP_MODE_GRAD_OP, .compute_device = dev, .storage_device = fsdp_device_cpu() },
                                    { .name = "all", .compute_device = dev, .storage_device = fsdp_device_cpu(), .param_dtype = FSDP_F16, .shards = 2 } };
    for (int k = 0; k < 4; k++) {
        site x = { .comm = comm, .dev = dev };
        fsdp_unit *t[UNITS], *other;
        float got[UNITS * MADEUP], want[UNITS * MADEUP], params[UNITS * MADEUP], taught[UNITS * MADEUP];
        for (int i = 0; i < UNITS; i++) FSDP_TRY(madeup_unit_with(&x.u[i], comm, &opts[k], which[i]));
        for (int i = 0; i < UNITS; i++) FSDP_TRY(madeup_unit_with(&t[i], comm, &opts[k], which[i] + 20));
        for (int i = 0; i < UNITS * MADEUP; i++) taught[i] = madeup_value(which[i / MADEUP] + 20, i % MADEUP);
        FSDP_TRY(fsdp_optim_create_adamw(&x.o, list_of(&x), &(fsdp_adamw_opts){ .lr = 0.05f }));
        FSDP_TRY(fsdp_ema_create(&x.e, list_of(&x)));
        FSDP_TRY(read_all(&x, want));
        for (int step = 0; step < 2; step++) {
            FSDP_TRY(bring(&x, step, 0, LEAVES));
            FSDP_TRY(fsdp_optim_step(x.o, NULL));
            FSDP_TRY(fsdp_ema_update(x.e, decays[step]));
            FSDP_TRY(fsdp_teacher_update((fsdp_unit_list){ t, UNITS }, list_of(&x), decays[step]));
            FSDP_TRY(read_all(&x, params));
            plain_mix(want, params, decays[step]);
            plain_mix(taught, params, decays[step]);
            FSDP_TRY(fsdp_ema_swap_in(x.e));
            FSDP_TRY(evaluate(&x));
            FSDP_TRY(read_all(&x, got));
            FSDP_TRY(same(got, want, opts[k].name, step));
            FSDP_TRY(fsdp_ema_swap_out(x.e));
            FSDP_TRY(read_all(&x, got));
            FSDP_TRY(same(got, params, opts[k].name, step));
            for (int i = 0; i < UNITS; i++) FSDP_TRY(madeup_read(t[i], got + i * MADEUP));
            FSDP_TRY(same(got, taught, "teacher", step));
        }
        if (opts[k].shards > 0) { /* what it owns, a student of all ranks does not keep */
            fsdp_unit_opts full = opts[k];
            full.shards = 0;
            FSDP_TRY(madeup_unit_with(&other, comm, &full, 1));
            rank_check(fsdp_teacher_update((fsdp_unit_list){ t, 1 }, (fsdp_unit_list){ &other, 1 }, 0.5f) == FSDP_ERR_INVALID && said("one mode and mesh"));
            fsdp_unit_destroy(other);
        }
        fsdp_ema_destroy(x.e);
        fsdp_optim_destroy(x.o);
        for (int i = 0; i < UNITS; i++) {
            fsdp_unit_destroy(t[i]);
            fsdp_unit_destroy(x.u[i]);
        }
    }
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_places(void **state)
{
    (void)state;
    in_corners(places, &(corners){ .ranks = (const int[]){ 4, 0 }, .threads_only = SANITIZED });
}

/* ---- a rewrite of one's own ---- */

typedef struct negate_args {
    float *x;
    int64_t numel;
} negate_args;

static fsdp_status k_negate(const fsdp_kernel *k, const void *args)
{
    const negate_args *a = args;
    float *x = fsdp_kernel_ptr(k, a->x);
    for (int64_t i = 0; i < a->numel; i++) x[i] = -x[i];
    return FSDP_OK;
}

static fsdp_status negate(fsdp_unit *unit, const fsdp_slice *slices, int count, void *arg)
{
    ++*(int *)arg;
    for (int i = 0; i < count; i++)
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(unit), k_negate, &(negate_args){ slices[i].master, slices[i].numel }, sizeof(negate_args)));
    return FSDP_OK;
}

static fsdp_status rewrite(fsdp_comm *comm, void *arg)
{
    site x;
    int calls = 0;
    float got[UNITS * MADEUP];
    FSDP_TRY(open_site(&x, comm, arg));
    FSDP_TRY(fsdp_units_rewrite(list_of(&x), negate, &calls));
    FSDP_TRY(read_all(&x, got));
    for (int i = 0; i < UNITS * MADEUP; i++) rank_check(got[i] == -madeup_value(which[i / MADEUP], i % MADEUP));
    rank_check(calls == UNITS);
    rank_check(fsdp_units_rewrite(list_of(&x), NULL, NULL) == FSDP_ERR_INVALID);
    close_site(&x);
    return FSDP_OK;
}

static void test_rewrite(void **state)
{
    (void)state;
    in_corners(rewrite, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 }, .threads_only = SANITIZED });
}

/* ---- a checkpoint, on other ranks ---- */

typedef struct trip {
    char folder[64];
    float *average; /* what was saved; of all ranks' memory */
    fsdp_mode mode;
} trip;

static fsdp_status make_checkpoint(fsdp_checkpoint **c, site *x)
{
    FSDP_TRY(fsdp_checkpoint_create(c, x->comm));
    for (int k = 0; k < UNITS; k++)
        for (int p = 0; p < MADEUP_PARAMS; p++) {
            char name[16];
            snprintf(name, sizeof(name), "%d.%d", k, p);
            FSDP_TRY(fsdp_checkpoint_add_param(*c, name, x->u[k], p));
        }
    return fsdp_checkpoint_add_ema(*c, x->e);
}

static fsdp_status save_it(fsdp_comm *comm, void *arg)
{
    trip *t = arg;
    site x;
    fsdp_checkpoint *c;
    float got[UNITS * MADEUP];
    FSDP_TRY(open_site(&x, comm, &(corner){ .device = "cpu", .mode = t->mode }));
    FSDP_TRY(bring(&x, 0, 0, LEAVES));
    FSDP_TRY(fsdp_optim_step(x.o, NULL));
    FSDP_TRY(fsdp_ema_update(x.e, 0.7f));
    FSDP_TRY(make_checkpoint(&c, &x));
    FSDP_TRY(fsdp_checkpoint_save(c, t->folder, 1, 0));
    FSDP_TRY(fsdp_ema_swap_in(x.e));
    FSDP_TRY(read_all(&x, got));
    if (fsdp_comm_rank(comm) == 0) memcpy(t->average, got, sizeof(got));
    fsdp_checkpoint_destroy(c);
    close_site(&x);
    return FSDP_OK;
}

static fsdp_status load_it(fsdp_comm *comm, void *arg)
{
    trip *t = arg;
    site x;
    fsdp_checkpoint *c;
    char path[96];
    float got[UNITS * MADEUP];
    FSDP_TRY(open_site(&x, comm, &(corner){ .device = "guard", .mode = (fsdp_mode)(FSDP_MODE_NONE - t->mode) }));
    FSDP_TRY(make_checkpoint(&c, &x));
    snprintf(path, sizeof(path), "%s/step-00000001", t->folder);
    FSDP_TRY(fsdp_checkpoint_load(c, path));
    FSDP_TRY(fsdp_ema_swap_in(x.e));
    FSDP_TRY(read_all(&x, got));
    FSDP_TRY(same(got, t->average, "loaded average", 1));
    rank_check(fsdp_checkpoint_load(c, path) == FSDP_ERR_STATE);
    fsdp_checkpoint_destroy(c);
    close_site(&x);
    return FSDP_OK;
}

static void test_checkpoint(void **state)
{
    (void)state;
    for (int m = FSDP_MODE_FULL; m <= FSDP_MODE_NONE; m++) {
        trip t = { .folder = "/tmp/fsdp-ema-XXXXXX", .mode = (fsdp_mode)m, .average = shared_alloc(UNITS * MADEUP * sizeof(float)) };
        char command[96];
        assert_non_null(mkdtemp(t.folder));
        assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 5, .threads = 1, .ranks_are_threads = !CAN_FORK }, save_it, &t));
        assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .threads = 1, .ranks_are_threads = !CAN_FORK }, load_it, &t));
        snprintf(command, sizeof(command), "rm -rf %s", t.folder);
        assert_int_equal(system(command), 0);
        shared_free(t.average, UNITS * MADEUP * sizeof(float));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_moving_average), cmocka_unit_test(test_what_is_refused), cmocka_unit_test(test_teacher), cmocka_unit_test(test_places),
        cmocka_unit_test(test_rewrite),        cmocka_unit_test(test_checkpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
