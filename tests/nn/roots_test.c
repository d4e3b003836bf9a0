/* SPDX-License-Identifier: MIT
 *
 * Roots: units in units to depth 4, wrapped from the inside out or from the outside in, each of them run, summoned and trained by itself
 * first; roots without parameters; two roots in one program, and two models at a time; a root that is wrapped again after training.
 * None of it changes a bit, and each unit does what its mode says from the first pass to the last. */
#include "support/ranks.h"
#include "support/testing.h"

#include "shard/unit.h"

#include <math.h>

enum { WIDTH = 6, ROWS = 2, DEPTH = 4, STEPS = 3, NUMEL = (DEPTH + 1) * (WIDTH * WIDTH + WIDTH) };

typedef struct net {
    fsdp_comm *comm;
    fsdp_device *device;
    fsdp_mode mode;
    fsdp_module *level[DEPTH + 1]; /* level[k] holds level[k - 1] and a linear; level[0] is a linear */
    bool wrapped[DEPTH + 1];
} net;

static fsdp_status make_linear(fsdp_module **out)
{
    return fsdp_linear(out, WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH });
}

static fsdp_status wrap(net *n, int k)
{
    char name[16];
    snprintf(name, sizeof(name), "level %d", k);
    FSDP_TRY(fsdp_wrap(&n->level[k], n->level[k], &(fsdp_wrap_opts){ .comm = n->comm, .name = name, .mode = n->mode, .compute_device = n->device }));
    n->wrapped[k] = true;
    return FSDP_OK;
}

static fsdp_status run(net *n, fsdp_module *m, bool eval, int64_t leaf, float *out)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *labels, *loss;
    float v[ROWS * WIDTH];
    fsdp_philox_normal_fill(3, "x", leaf * ROWS * WIDTH, ROWS * WIDTH, v);
    FSDP_TRY(fsdp_tape_begin_with(&tape, n->comm, &(fsdp_tape_opts){ .device = n->device, .eval = eval }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, v, 2, (int64_t[]){ ROWS, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ 1, 4 }, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(m, tape, x, &y));
    if (out != NULL) FSDP_TRY(fsdp_tensor_to_f32(y, out));
    if (!eval) {
        FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
        FSDP_TRY(fsdp_backward(tape, loss));
    }
    return fsdp_tape_end(tape);
}

/* A unit that is used first, in each way, by itself: what it leaves behind must be nothing. */
static fsdp_status use_first(net *n, int k, int how)
{
    fsdp_module *m = n->level[k];
    if (how == 1) FSDP_TRY(run(n, m, true, 50 + k, NULL));
    if (how == 2) {
        FSDP_TRY(fsdp_summon_begin(m, &(fsdp_summon_opts){ .recurse = true, .writeback = true }));
        FSDP_TRY(fsdp_summon_end(m));
    }
    if (how == 3) {
        FSDP_TRY(run(n, m, false, 60 + k, NULL));
        const fsdp_module_param_info *p; /* a unit around it may have its parameters, and its own none: each counts passes */
        fsdp_unit_list units = fsdp_module_units(m);
        for (int i = 0; i < units.count; i++) FSDP_TRY(fsdp_unit_zero_grad(units.units[i]));
        int count;
        FSDP_TRY(fsdp_module_params(m, &p, &count));
        for (int i = 0; i < count; i++) FSDP_TRY(fsdp_unit_zero_grad(p[i].unit));
    }
    return FSDP_OK;
}

/* order 0: each level is wrapped before the next exists; 1: all at the end, from the outside in; 2: every second one, the rest later
 * from the outside in. Later ones find nothing left where an outer one was there first. */
static fsdp_status build(net *n, int order, int how)
{
    for (int k = 0; k <= DEPTH; k++) {
        fsdp_module *linear;
        FSDP_TRY(make_linear(&linear));
        if (k == 0) n->level[0] = linear;
        else FSDP_TRY(fsdp_sequential(&n->level[k], (fsdp_module *[]){ n->level[k - 1], linear }, 2));
        if (order == 0 || (order == 2 && k % 2 == 0)) {
            FSDP_TRY(wrap(n, k));
            FSDP_TRY(fsdp_module_init_keyed(n->level[k], FSDP_INIT_KAIMING, 1));
            FSDP_TRY(use_first(n, k, how));
        }
    }
    for (int k = DEPTH; k >= 0; k--)
        if (!n->wrapped[k]) FSDP_TRY(wrap(n, k));
    FSDP_TRY(fsdp_module_init_keyed(n->level[DEPTH], FSDP_INIT_KAIMING, 1));
    for (int k = DEPTH; k >= 0; k--) FSDP_TRY(use_first(n, k, how));
    return FSDP_OK;
}

static fsdp_status read_all(fsdp_module *m, float *out)
{
    const fsdp_module_param_info *p;
    int count;
    FSDP_TRY(fsdp_module_params(m, &p, &count));
    for (int i = 0; i < count; i++) {
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, out));
        out += fsdp_unit_param_numel(p[i].unit, p[i].index);
    }
    return FSDP_OK;
}

/* Modes hold: after a pass what is sharded is sharded. */
static fsdp_status check_rest(const net *n, fsdp_module *m)
{
    fsdp_unit_list units = fsdp_module_units(m);
    for (int i = 0; i < units.count; i++) {
        fsdpi_residency r = units.units[i]->residency;
        bool keeps = n->mode == FSDP_MODE_OPTIMIZER || n->mode == FSDP_MODE_NONE;
        rank_check(keeps ? r == FSDPI_KEPT || r == FSDPI_SHARDED : r == FSDPI_SHARDED);
    }
    return FSDP_OK;
}

enum { ORDERS = 3, USES = 4 };

typedef struct outcome {
    float param[ORDERS * USES][NUMEL];
} outcome;

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    outcome *all = c->shared;
    for (int k = 0; k < ORDERS * USES; k++) {
        net n = { .comm = world, .mode = c->mode };
        fsdp_optim *optim;
        float out[NUMEL];
        FSDP_TRY(fsdp_device_open(&n.device, c->device));
        FSDP_TRY(build(&n, k / USES, k % USES));
        FSDP_TRY(fsdp_optim_create_sgd(&optim, fsdp_module_units(n.level[DEPTH]), &(fsdp_sgd_opts){ .lr = 0.1f, .momentum = 0.9f }));
        for (int s = 0; s < STEPS; s++) {
            for (int leaf = fsdp_comm_rank(world); leaf < 6; leaf += fsdp_comm_size(world)) FSDP_TRY(run(&n, n.level[DEPTH], false, s * 6 + leaf, NULL));
            FSDP_TRY(check_rest(&n, n.level[DEPTH]));
            FSDP_TRY(fsdp_optim_step(optim, NULL));
            FSDP_TRY(use_first(&n, s, k % USES)); /* and in between */
        }
        FSDP_TRY(read_all(n.level[DEPTH], out));
        if (fsdp_comm_rank(world) == 0) memcpy(all->param[k], out, sizeof(out));
        fsdp_optim_destroy(optim);
        fsdp_module_destroy(n.level[DEPTH]);
        fsdp_device_close(n.device);
    }
    return FSDP_OK;
}

static float first[NUMEL];

static void compare(const corner *c)
{
    const outcome *all = c->shared;
    if (first[0] == 0) memcpy(first, all->param[0], sizeof(first));
    for (int k = 0; k < ORDERS * USES; k++)
        if (memcmp(all->param[k], first, sizeof(first)) != 0) fail_msg("%s: order %d, use %d: other bits", corner_name(c), k / USES, k % USES);
}

static void test_every_order_to_depth_4(void **state)
{
    (void)state;
    static const int few[] = { 3, 0 }, many[] = { 1, 3, 0 };
    in_corners(train, &(corners){ .ranks = SANITIZED ? few : many, .shared = sizeof(outcome), .after = compare, .processes_only = CAN_FORK });
    in_corners(train, &(corners){ .ranks = (const int[]){ 2, 0 }, .device = "cpu", .all_modes = true, .threads_only = true, .shared = sizeof(outcome), .after = compare });
}

/* ---- several roots ---- */

/* Two models, each a root; their passes in turn, and at the same time. Each is as if it were alone. */
static fsdp_status two_models(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    float alone[2][NUMEL], both[2][NUMEL];
    for (int together = 0; together < 2; together++)
        for (int first_one = 0; first_one < (together ? 1 : 2); first_one++) {
            net n[2];
            fsdp_optim *optim[2];
            for (int i = 0; i < 2; i++) {
                if (!together && i != first_one) continue;
                n[i] = (net){ .comm = world, .mode = i == 0 ? c->mode : FSDP_MODE_GRAD_OP };
                FSDP_TRY(fsdp_device_open(&n[i].device, c->device));
                FSDP_TRY(build(&n[i], 2 * i, i));
                FSDP_TRY(fsdp_optim_create_adamw(&optim[i], fsdp_module_units(n[i].level[DEPTH]), &(fsdp_adamw_opts){ .lr = 0.01f }));
            }
            for (int s = 0; s < STEPS; s++)
                for (int leaf = fsdp_comm_rank(world); leaf < 6; leaf += fsdp_comm_size(world))
                    for (int i = 0; i < 2; i++) {
                        if (!together && i != first_one) continue;
                        FSDP_TRY(run(&n[i], n[i].level[DEPTH], false, s * 6 + leaf, NULL));
                        if (leaf + fsdp_comm_size(world) >= 6) FSDP_TRY(fsdp_optim_step(optim[i], NULL));
                    }
            for (int i = 0; i < 2; i++) {
                if (!together && i != first_one) continue;
                FSDP_TRY(read_all(n[i].level[DEPTH], together ? both[i] : alone[i]));
                fsdp_optim_destroy(optim[i]);
                fsdp_module_destroy(n[i].level[DEPTH]);
                fsdp_device_close(n[i].device);
            }
        }
    rank_check(memcmp(alone, both, sizeof(alone)) == 0);
    return FSDP_OK;
}

static void test_two_models(void **state)
{
    (void)state;
    in_corners(two_models, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .threads_only = true });
}

/* Two roots in one tree: nothing is wrapped around them, then something without parameters, again, and more with some. After each,
 * training goes on with the optimizer of before. */
static fsdp_status again(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    float out[2][2 * (WIDTH * WIDTH + WIDTH)];
    for (int rewraps = 0; rewraps < 2; rewraps++) {
        net n = { .comm = world, .mode = c->mode };
        fsdp_module *part[2], *m;
        fsdp_optim *optim;
        FSDP_TRY(fsdp_device_open(&n.device, c->device));
        for (int i = 0; i < 2; i++) {
            FSDP_TRY(make_linear(&part[i]));
            FSDP_TRY(fsdp_wrap(&part[i], part[i], &(fsdp_wrap_opts){ .comm = world, .mode = c->mode, .compute_device = n.device }));
        }
        FSDP_TRY(fsdp_sequential(&m, part, 2));
        FSDP_TRY(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
        fsdp_unit_list units = fsdp_module_units(m);
        FSDP_TRY(fsdp_optim_create_adamw(&optim, units, &(fsdp_adamw_opts){ .lr = 0.01f }));
        for (int s = 0; s < 4; s++) {
            if (rewraps && s > 0) FSDP_TRY(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = world, .mode = c->mode, .compute_device = n.device, .name = "around" }));
            FSDP_TRY(run(&n, m, false, s, NULL));
            FSDP_TRY(check_rest(&n, m));
            rank_check(fsdp_module_units(m).count == 2 + (rewraps ? s : 0));
            FSDP_TRY(fsdp_optim_step(optim, NULL));
        }
        FSDP_TRY(read_all(m, out[rewraps]));
        fsdp_optim_destroy(optim);
        fsdp_module_destroy(m);
        fsdp_device_close(n.device);
    }
    rank_check(memcmp(out[0], out[1], sizeof(out[0])) == 0);
    return FSDP_OK;
}

static void test_wrapped_again_after_training(void **state)
{
    (void)state;
    in_corners(again, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_order_to_depth_4),
        cmocka_unit_test(test_two_models),
        cmocka_unit_test(test_wrapped_again_after_training),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
