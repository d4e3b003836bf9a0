/* SPDX-License-Identifier: MIT
 *
 * Uneven inputs through modules: ranks with different numbers of micro-batches, of different lengths, one with none, give what
 * one rank gives that has them all, in the same order; means are over the rows that there are; with activation checkpointing and
 * frozen parameters, and evaluations that are as uneven. */
#include "support/ranks.h"

enum { WIDTH = 6, STEPS = 3, MOST = 1024, MOST_ROWS = 5 };

typedef struct result {
    float param[8][MOST];
    double loss[8];
} result;

/* Rank 0 has none; the others 1, 3, 5, ... */
static int passes_of(int rank, int step)
{
    return rank == 0 ? 0 : 2 * rank - 1 + step % 2;
}

static int rows_of(int rank, int step, int j)
{
    return 1 + (rank * 3 + step + j) % MOST_ROWS;
}

static fsdp_status make_model(fsdp_module **out, fsdp_comm *comm, fsdp_device *dev, fsdp_mode mode)
{
    fsdp_wrap_opts w = { .comm = comm, .compute_device = dev, .mode = mode };
    fsdp_module *c[3];
    FSDP_TRY(fsdp_linear(&c[0], WIDTH, 11, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&c[1], 11, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_linear(&c[2], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    for (int i = 0; i < 2; i++) FSDP_TRY(fsdp_wrap(&c[i], c[i], &w));
    fsdp_module_set_recompute(c[0], true);
    FSDP_TRY(fsdp_sequential(out, c, 3));
    FSDP_TRY(fsdp_wrap(out, *out, &w));
    FSDP_TRY(fsdp_module_set_frozen(*out, "1.weight", true));
    return fsdp_module_init_keyed(*out, FSDP_INIT_KAIMING, 3);
}

static fsdp_status pass(fsdp_module *model, fsdp_comm *comm, fsdp_device *dev, bool eval, int rank, int step, int j, double sums[2])
{
    float x[MOST_ROWS * WIDTH];
    int32_t y[MOST_ROWS];
    int rows = rows_of(rank, step, j), leaf = (rank * 100 + step) * 100 + j;
    for (int i = 0; i < rows; i++) y[i] = (leaf + i) % WIDTH;
    fsdp_philox_normal_fill(5, "x", (int64_t)leaf * MOST_ROWS * WIDTH, rows * WIDTH, x);
    fsdp_tape *tape;
    fsdp_tensor *in, *labels, *scores, *loss;
    double sum, count;
    FSDP_TRY(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .device = dev, .eval = eval }));
    FSDP_TRY(fsdp_tensor_from_f32(&in, tape, x, 2, (int64_t[]){ rows, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 1, (int64_t[]){ rows }));
    FSDP_TRY(fsdp_forward(model, tape, in, &scores));
    FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
    if (!eval) FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, &sum, &count));
    sums[0] += sum;
    sums[1] += count;
    return fsdp_tape_end(tape);
}

/* as: as how many ranks the leaves are dealt out; one rank of its own goes through all. */
static fsdp_status epoch(fsdp_module *model, fsdp_comm *comm, fsdp_device *dev, bool eval, int as, int step, double sums[2])
{
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    for (int j = 0; j < 2 * as && size < as; j++)
        for (int r = 0; r < as; r++)
            if (j < passes_of(r, step)) FSDP_TRY(pass(model, comm, dev, eval, r, step, j, sums));
    for (int j = 0; size == as; j++) {
        int first;
        FSDP_TRY(fsdp_comm_ask_more(comm, j < passes_of(rank, step), &first));
        if (first < 0) break;
        if (j < passes_of(rank, step)) FSDP_TRY(pass(model, comm, dev, eval, rank, step, j, sums));
        else FSDP_TRY(fsdp_pass_join(comm, first));
    }
    return fsdp_comm_sum_exact(comm, sums, 2);
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    result *out = c->shared;
    int rank = fsdp_comm_rank(comm), as = c->ranks > 1 ? c->ranks : *(const int *)c->arg, n;
    fsdp_device *dev;
    fsdp_module *model;
    fsdp_optim *optim;
    const fsdp_module_param_info *p;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(make_model(&model, comm, dev, c->mode));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 0.02f }));
    for (int step = 0; step < STEPS; step++) {
        double sums[2] = { 0 };
        FSDP_TRY(epoch(model, comm, dev, false, as, step, sums));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1 }));
    }
    double sums[2] = { 0 };
    FSDP_TRY(epoch(model, comm, dev, true, as, 7, sums));
    out->loss[rank] = sums[0] / sums[1];
    FSDP_TRY(fsdp_module_params(model, &p, &n));
    for (int i = 0, at = 0; i < n; i++) {
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, out->param[rank] + at));
        at += (int)fsdp_unit_param_numel(p[i].unit, p[i].index);
    }
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(model);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static result want;

static void compare(const corner *c)
{
    const result *got = c->shared;
    for (int r = 0; r < c->ranks; r++) {
        for (int i = 0; i < MOST; i++)
            if (want.param[0][i] != got->param[r][i])
                fail_msg("%s: rank %d: element %d is %.9g, not %.9g", corner_name(c), r, i, (double)got->param[r][i], (double)want.param[0][i]);
        double off = got->loss[r] - want.loss[0];
        if (off > 1e-12 || off < -1e-12) fail_msg("%s: rank %d: the loss is %.17g, not %.17g", corner_name(c), r, got->loss[r], want.loss[0]);
    }
}

static void test_uneven_is_what_one_rank_gives(void **state)
{
    (void)state;
    for (int as = 2; as <= 4; as++) {
        corner one = { .transport = "self", .device = "cpu", .ranks = 1, .threads = true, .arg = &as };
        one.shared = shared_alloc(sizeof(result));
        assert_ok(in_corner(train, &one));
        want = *(result *)one.shared;
        assert_true(want.param[0][0] != 0 && want.loss[0] > 0);
        shared_free(one.shared, sizeof(result));
        in_corners(train, &(corners){ .ranks = (const int[]){ as, 0 }, .all_modes = as == 3, .threads_only = as != 3, .shared = sizeof(result), .arg = &as, .after = compare });
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_uneven_is_what_one_rank_gives) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
