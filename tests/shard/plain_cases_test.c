/* SPDX-License-Identifier: MIT
 *
 * Cases that can be checked by hand: a 3 x 3 matrix whose gradients are whole numbers, on 1 to 8 ranks and on 128; and a
 * training in which one rank after another comes late, at one place after another, and which gives the same bits. */
#include "support/mini.h"
#include "support/ranks.h"

#include <time.h>

/* ---- by hand ---- */

static void number(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)arg;
    *value = (float)i;
}

typedef struct ramp_args {
    float *g, by;
} ramp_args;

static fsdp_status k_constant(const fsdp_kernel *k, const void *args)
{
    const ramp_args *a = args;
    float *g = fsdp_kernel_ptr(k, a->g);
    for (int i = 0; i < 9; i++) g[i] = a->by;
    return FSDP_OK;
}

/* Rank r's gradient is r + 1 everywhere: their mean is (R + 1) / 2, and p = i - lr (R + 1) / 2 after a step. */
static fsdp_status three_by_three(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *device;
    fsdp_unit *u;
    fsdp_pass *p;
    fsdp_optim *optim;
    float beta, *g, got[9];
    double norm;
    FSDP_TRY(fsdp_device_open(&device, c->device));
    FSDP_TRY(fsdp_unit_create(&u, comm, &(fsdp_param){ "w", 2, { 3, 3 } }, 1, &(fsdp_unit_opts){ .name = "u", .mode = c->mode, .compute_device = device }));
    FSDP_TRY(fsdp_unit_init(u, number, NULL));
    FSDP_TRY(fsdp_optim_create_sgd(&optim, (fsdp_unit_list){ &u, 1 }, &(fsdp_sgd_opts){ .lr = 0.5f }));
    for (int step = 1; step <= 2; step++) {
        FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
        fsdp_pass_add_weight(p, 1);
        FSDP_TRY(fsdp_unit_begin_forward(u, p));
        FSDP_TRY(fsdp_unit_end_forward(u, p));
        FSDP_TRY(fsdp_unit_begin_backward(u, p));
        g = fsdp_unit_grad(u, 0, &beta);
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_constant, &(ramp_args){ g, (float)fsdp_comm_rank(comm) + 1 }, sizeof(ramp_args)));
        FSDP_TRY(fsdp_unit_end_backward(u, p));
        FSDP_TRY(fsdp_pass_end(p));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .norm = &norm }));
        double mean = (c->ranks + 1) / 2.0;
        FSDP_FAIL_IF(norm != 3 * mean, FSDP_ERR_INTERNAL, "the norm is %.17g, not %g", norm, 3 * mean);
        FSDP_TRY(fsdp_unit_read_param(u, 0, got));
        for (int i = 0; i < 9; i++)
            FSDP_FAIL_IF((double)got[i] != i - 0.5 * mean * step, FSDP_ERR_INTERNAL, "element %d is %.9g, not %g", i, (double)got[i], i - 0.5 * mean * step);
    }
    fsdp_optim_destroy(optim);
    fsdp_unit_destroy(u);
    fsdp_device_close(device);
    return FSDP_OK;
}

static void test_three_by_three(void **state)
{
    (void)state;
    in_corners(three_by_three, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 1, 2, 3, 8, 0 } : (const int[]){ 1, 2, 3, 4, 5, 6, 7, 8, 0 } });
}

static void test_128_ranks(void **state)
{
    (void)state;
    for (int m = FSDP_MODE_FULL; m <= FSDP_MODE_NONE; m += 3)
        for (int t = 0; t < 2; t++) {
            corner c = { .transport = t ? "copy" : "shm", .device = "cpu", .mode = (fsdp_mode)m, .ranks = 128, .threads = true };
            if (in_corner(three_by_three, &c) != FSDP_OK) fail_msg("%s: %s", corner_name(&c), fsdp_last_error());
        }
}

/* ---- late ---- */

static const char *const tokens[] = { "[0", "[1", "]1", "[5", "]5", "]0", "{0", "{5", "}5", "{1", "}1", "}0" };
enum { TOKENS = sizeof(tokens) / sizeof(tokens[0]), PLACES = TOKENS + 3, RANKS = 3, LATE_MS = 2 };

static fsdp_status k_sleep(const fsdp_kernel *k, const void *args)
{
    (void)k;
    (void)args;
    nanosleep(&(struct timespec){ .tv_nsec = LATE_MS * 1000 * 1000 }, NULL);
    return FSDP_OK;
}

/* Before gathers, between a forward's beginning and its end (the host, or its kernels), before and after a reduction, before
 * the end of a pass, before the step and after it. */
static fsdp_status be_late(mini *m, int place, int at, int who, bool kernel)
{
    if (place != at || who != fsdp_comm_rank(m->comm)) return FSDP_OK;
    if (kernel) return fsdp_stream_launch(fsdp_unit_stream(m->unit[0]), k_sleep, NULL, 0);
    return k_sleep(NULL, NULL);
}

static fsdp_status late_step(mini *m, int64_t leaf, int place, int who, bool kernel)
{
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m->unit[0])));
    m->number[leaf % MINI_LEAVES] = 0;
    FSDP_TRY(fsdp_pass_begin(&m->pass, m->comm, FSDP_PASS_TRAIN));
    for (int i = 0; i < TOKENS; i++) {
        FSDP_TRY(be_late(m, place, i, who, kernel));
        FSDP_TRY(mini_run(m, m->pass, tokens[i], leaf));
    }
    FSDP_TRY(be_late(m, place, TOKENS, who, kernel));
    FSDP_TRY(fsdp_pass_end(m->pass));
    m->pass = NULL;
    FSDP_TRY(be_late(m, place, TOKENS + 1, who, kernel));
    FSDP_TRY(fsdp_optim_step(m->optim, &(fsdp_step_opts){ .grad_scale = 1.0f / 32 }));
    return be_late(m, place, TOKENS + 2, who, kernel);
}

static fsdp_status late(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    float (*out)[1024] = c->shared;
    mini m;
    int step = 0;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .sgd = true }));
    for (int place = 0; place < PLACES; place++)
        for (int who = 0; who < RANKS; who++, step++) FSDP_TRY(late_step(&m, step * RANKS + fsdp_comm_rank(comm), place, who, step % 2));
    FSDP_TRY(mini_read(&m, out[fsdp_comm_rank(comm)]));
    mini_destroy(&m);
    return FSDP_OK;
}

static float wanted[1024];

static void compare(const corner *c)
{
    float (*out)[1024] = c->shared;
    for (int r = 0; r < RANKS; r++)
        if (memcmp(out[r], wanted, (size_t)mini_numel() * sizeof(float)) != 0) fail_msg("%s: rank %d has other bits", corner_name(c), r);
}

static void test_late_ranks(void **state)
{
    (void)state;
    plain *p = plain_create();
    for (int step = 0; step < PLACES * RANKS; step++) {
        for (int r = 0; r < RANKS; r++) plain_leaf(p, "[0 F1 F5 ]0 {0 B5 B1 }0", step * RANKS + r);
        plain_step(p, 1.0f / 32);
    }
    plain_read(p, wanted);
    plain_destroy(p);
    in_corners(late, &(corners){ .ranks = (const int[]){ RANKS, 0 }, .all_modes = !SANITIZED, .processes_only = CAN_FORK, .shared = RANKS * 1024 * sizeof(float), .after = compare });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_three_by_three),
        cmocka_unit_test(test_128_ranks),
        cmocka_unit_test(test_late_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
