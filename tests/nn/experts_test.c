/* SPDX-License-Identifier: MIT
 *
 * Modules wrapped on several communicators in one tape: a trunk over all ranks, each of two experts over the ranks that use it. Training
 * has the same bits on 1 rank, which has both experts, and on more, where each rank has one; passes that fail or are cancelled
 * count on no communicator.
 *
 * Leaf i goes to rank i % R and, since R is 1 or even, to expert i % 2: an expert's ranks are those of its parity. */
#include "support/ranks.h"
#include "support/testing.h"

#include <fsdp/fsdp.h>

enum { IN = 7, WIDTH = 5, CLASSES = 3, ROWS = 4, LEAVES = 12, STEPS = 3, EXPERTS = 2, TRUNK = IN * WIDTH + WIDTH, EXPERT = WIDTH * CLASSES + CLASSES };

typedef struct net {
    fsdp_comm *world, *sub;
    fsdp_device *device;
    fsdp_module *trunk, *expert[EXPERTS], *model;
    int first; /* this rank has experts from here on, one or all */
    int turn;  /* whose leaf it is */
} net;

static fsdp_status run(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    net *n = ctx;
    fsdp_tensor *x;
    (void)m;
    FSDP_TRY(fsdp_forward(n->trunk, tape, in, &x));
    return fsdp_forward(n->expert[n->turn], tape, x, out);
}

static fsdp_status make(net *n, const corner *c, fsdp_comm *world)
{
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world), children = 1;
    fsdp_module *child[1 + EXPERTS];
    *n = (net){ .world = world };
    FSDP_TRY(fsdp_device_open(&n->device, c->device));
    FSDP_TRY(fsdp_comm_split(world, size > 1 ? rank % EXPERTS : 0, 0, &n->sub));
    FSDP_TRY(fsdp_linear(&n->trunk, IN, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_module_init_keyed(n->trunk, FSDP_INIT_KAIMING, 1));
    for (int e = 0; e < EXPERTS; e++) {
        if (size > 1 && rank % EXPERTS != e) continue;
        FSDP_TRY(fsdp_linear(&n->expert[e], WIDTH, CLASSES, &(fsdp_linear_opts){ .bias = true }));
        FSDP_TRY(fsdp_module_init_keyed(n->expert[e], FSDP_INIT_KAIMING, 2 + (uint64_t)e));
        FSDP_TRY(fsdp_wrap(&n->expert[e], n->expert[e], &(fsdp_wrap_opts){ .comm = n->sub, .mode = c->mode, .compute_device = n->device, .name = "expert" }));
        child[children++] = n->expert[e];
    }
    child[0] = n->trunk;
    const char *const names[] = { "trunk", "a", "b" };
    FSDP_TRY(fsdp_module_create(&n->model, &(fsdp_module_opts){ .type = "net", .forward = run, .ctx = n, .children = child, .names = names, .child_count = children }));
    FSDP_TRY(fsdp_wrap(&n->model, n->model, &(fsdp_wrap_opts){ .comm = world, .mode = c->mode, .compute_device = n->device, .name = "net" }));
    rank_check(fsdp_module_units(n->model).count == children);
    return FSDP_OK;
}

static void destroy(net *n)
{
    fsdp_module_destroy(n->model);
    fsdp_comm_destroy(n->sub);
    fsdp_device_close(n->device);
}

static fsdp_status forward(net *n, fsdp_tape **tape, int leaf, bool eval, bool no_sync, fsdp_tensor **loss)
{
    fsdp_tensor *x, *labels, *scores;
    float in[ROWS * IN];
    int32_t y[ROWS];
    fsdp_philox_normal_fill(4, "x", (int64_t)leaf * ROWS * IN, ROWS * IN, in);
    for (int i = 0; i < ROWS; i++) y[i] = i > leaf % 3 ? -100 : (leaf + i) % CLASSES; /* 1 to 3 rows count */
    n->turn = leaf % EXPERTS;
    FSDP_TRY(fsdp_tape_begin_with(tape, n->world, &(fsdp_tape_opts){ .device = n->device, .eval = eval, .no_sync = no_sync }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, *tape, in, 2, (int64_t[]){ ROWS, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, *tape, y, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(n->model, *tape, x, &scores));
    return fsdp_op_cross_entropy(*tape, scores, labels, loss);
}

static fsdp_status micro_batch(net *n, int leaf, bool no_sync)
{
    fsdp_tape *tape;
    fsdp_tensor *loss;
    FSDP_TRY(forward(n, &tape, leaf, false, no_sync, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    return fsdp_tape_end(tape);
}

static fsdp_status read_unit(fsdp_unit *u, float *out)
{
    for (int i = 0; i < fsdp_unit_param_count(u); i++) {
        FSDP_TRY(fsdp_unit_read_param(u, i, out));
        out += fsdp_unit_param_numel(u, i);
    }
    return FSDP_OK;
}

typedef struct outcome {
    float trunk[TRUNK], expert[EXPERTS][EXPERT];
    double norm[STEPS], eval[EXPERTS];
} outcome;

static fsdp_status eval_leaf(net *n, int leaf, double *sum)
{
    fsdp_tape *tape;
    fsdp_tensor *loss;
    double count;
    FSDP_TRY(forward(n, &tape, leaf, true, false, &loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, &count));
    return fsdp_tape_end(tape);
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    outcome *all = c->shared;
    net n;
    fsdp_optim *optim;
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    FSDP_TRY(make(&n, c, world));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(n.model), &(fsdp_adamw_opts){ .lr = 0.05f, .weight_decay = 0.1f }));
    for (int s = 0; s < STEPS; s++) {
        double norm;
        for (int leaf = rank; leaf < LEAVES; leaf += size) FSDP_TRY(micro_batch(&n, s * LEAVES + leaf, c->arg != NULL));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 0.3f, .over = world, .norm = &norm }));
        if (rank == 0) all->norm[s] = norm;
    }
    float trunk[TRUNK];
    fsdp_unit_list units = fsdp_module_units(n.model);
    FSDP_TRY(read_unit(units.units[0], trunk));
    if (rank == 0) memcpy(all->trunk, trunk, sizeof(trunk));
    for (int e = 0; e < EXPERTS; e++) {
        float expert[EXPERT];
        double sum;
        /* Every rank evaluates with the expert that it has: both on one rank, one after the other. */
        int turn = size > 1 ? rank % EXPERTS : e;
        FSDP_TRY(eval_leaf(&n, 100 + turn, &sum));
        if (n.expert[e] == NULL) continue;
        FSDP_TRY(read_unit(fsdp_module_units(n.expert[e]).units[0], expert));
        if (rank != (size > 1 ? e : 0)) continue;
        memcpy(all->expert[e], expert, sizeof(expert));
        all->eval[e] = sum;
    }
    fsdp_optim_destroy(optim);
    destroy(&n);
    return FSDP_OK;
}

static outcome first;
static bool have_first;

static void compare(const corner *c)
{
    const outcome *o = c->shared;
    if (!have_first) first = *o;
    have_first = true;
    for (int s = 0; s < STEPS; s++)
        if (!(o->norm[s] > 0) || o->norm[s] != first.norm[s]) fail_msg("%s: the norm of step %d is %.17g, not %.17g", corner_name(c), s, o->norm[s], first.norm[s]);
    for (int e = 0; e < EXPERTS; e++)
        if (memcmp(o->expert[e], first.expert[e], sizeof(o->expert[e])) != 0 || o->eval[e] != first.eval[e]) fail_msg("%s: expert %d has other bits", corner_name(c), e);
    if (memcmp(o->trunk, first.trunk, sizeof(o->trunk)) != 0) fail_msg("%s: the trunk has other bits", corner_name(c));
}

static void test_same_bits_on_any_ranks(void **state)
{
    (void)state;
    static const int ranks[] = { 1, 2, 4, 6, 0 };
    have_first = false;
    in_corners(train, &(corners){ .ranks = ranks, .all_modes = !SANITIZED, .processes_only = CAN_FORK, .shared = sizeof(outcome), .after = compare });
    in_corners(train, &(corners){ .ranks = (const int[]){ 4, 0 }, .threads_only = true, .shared = sizeof(outcome), .after = compare });
    assert_memory_not_equal(first.expert[0], first.expert[1], sizeof(first.expert[0]));
}

/* Gradients that stay with each rank until the step: sums in another order, so only the run itself is compared. */
static void test_without_sync(void **state)
{
    (void)state;
    have_first = false;
    in_corners(train, &(corners){ .ranks = (const int[]){ 4, 0 }, .threads_only = true, .shared = sizeof(outcome), .after = compare, .arg = &first });
}

/* ---- what does not count ---- */

/* Micro-batches that are given up change nothing, whatever they had done on either communicator. */
static fsdp_status cancelled(fsdp_comm *world, void *arg)
{
    net n[2];
    float param[2][TRUNK], expert[2][EXPERT];
    int rank = fsdp_comm_rank(world), mine = fsdp_comm_size(world) > 1 ? rank % EXPERTS : 0;
    for (int k = 0; k < 2; k++) {
        fsdp_optim *optim;
        FSDP_TRY(make(&n[k], arg, world));
        FSDP_TRY(fsdp_optim_create_sgd(&optim, fsdp_module_units(n[k].model), &(fsdp_sgd_opts){ .lr = 0.5f }));
        FSDP_TRY(micro_batch(&n[k], rank, false));
        if (k == 1) {
            fsdp_tape *tape;
            fsdp_tensor *loss, *other;
            FSDP_TRY(forward(&n[k], &tape, rank + 12, false, false, &loss));
            FSDP_TRY(fsdp_tape_cancel(tape));
            FSDP_TRY(forward(&n[k], &tape, rank + 24, false, false, &loss));
            FSDP_TRY(fsdp_backward(tape, loss));
            FSDP_TRY(fsdp_tape_cancel(tape));
            FSDP_TRY(forward(&n[k], &tape, rank + 36, false, false, &loss)); /* no backward: the end cancels */
            FSDP_TRY(fsdp_tape_end(tape));
            /* A reset of the group drops its pass: the tape is told. */
            FSDP_TRY(forward(&n[k], &tape, rank + 12, false, false, &loss));
            FSDP_TRY(fsdp_comm_reset(n[k].sub));
            fsdp_status st = fsdp_backward(tape, loss);
            rank_check(st == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "fsdp_comm_reset") != NULL);
            FSDP_TRY(fsdp_tape_cancel(tape));
            FSDP_TRY(forward(&n[k], &tape, rank + 12, true, false, &other));
            FSDP_TRY(fsdp_tape_end(tape));
        }
        FSDP_TRY(micro_batch(&n[k], rank + 6, false));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .over = world }));
        FSDP_TRY(read_unit(fsdp_module_units(n[k].model).units[0], param[k]));
        FSDP_TRY(read_unit(fsdp_module_units(n[k].expert[mine]).units[0], expert[k]));
        fsdp_optim_destroy(optim);
    }
    rank_check(memcmp(param[0], param[1], sizeof(param[0])) == 0);
    /* The group's reset dropped what its units had gathered before: nothing of the step. */
    rank_check(memcmp(expert[0], expert[1], sizeof(expert[0])) == 0);
    for (int k = 0; k < 2; k++) destroy(&n[k]);
    return FSDP_OK;
}

static void test_cancelled(void **state)
{
    (void)state;
    in_corners(cancelled, &(corners){ .ranks = (const int[]){ 1, 2, 4, 0 }, .threads_only = !CAN_FORK });
}

/* ---- wrong ---- */

static fsdp_status wrong(fsdp_comm *world, void *arg)
{
    net n;
    fsdp_tape *tape;
    fsdp_tensor *x, *y;
    float in[IN] = { 1 };
    FSDP_TRY(make(&n, arg, world));
    FSDP_TRY(fsdp_tape_begin_with(&tape, n.sub, &(fsdp_tape_opts){ .device = n.device }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, in, 2, (int64_t[]){ 1, IN }));
    fsdp_status st = fsdp_forward(n.model, tape, x, &y);
    rank_check(st == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "unit \"net\" is on another communicator") != NULL);
    FSDP_TRY(fsdp_tape_cancel(tape));
    fsdp_checkpoint *c;
    FSDP_TRY(fsdp_checkpoint_create(&c, world));
    st = fsdp_checkpoint_add_module(c, NULL, n.model);
    rank_check(st == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "on another communicator than the checkpoint") != NULL);
    fsdp_checkpoint_destroy(c);
    destroy(&n);
    return FSDP_OK;
}

static void test_wrong(void **state)
{
    (void)state;
    in_corners(wrong, &(corners){ .ranks = (const int[]){ 2, 0 }, .transport = "shm" });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits_on_any_ranks),
        cmocka_unit_test(test_without_sync),
        cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
