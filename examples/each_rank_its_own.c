/* SPDX-License-Identifier: MIT
 *
 * What each rank has for itself beside what is sharded: ranks train one classifier on data of their own, in which classes are not
 * equally frequent. The weight is one for all; the bias, which learns the frequencies, is ignored by the wrap, so each rank has its own;
 * and a buffer has the mean of the rank's inputs, which is taken from them before they are classified.
 *
 *   ./each_rank_its_own 3        prints what each rank ended with
 */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 4, CLASSES = 3, ROWS = 12, STEPS = 150 };

/* The buffer: the mean of each input, and of how many rows. Minus the mean is added to every row. */
static fsdp_status centre(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    fsdp_tensor *minus;
    float x[ROWS * IN], mean[IN + 1], shift[ROWS * IN];
    (void)ctx;
    FSDP_TRY(fsdp_module_read_buffer(m, 0, mean));
    if (!fsdp_tape_is_recomputing(tape)) { /* in a forward that is run again these rows were counted */
        FSDP_TRY(fsdp_tensor_to_f32(in, x));
        for (int i = 0; i < ROWS; i++) {
            mean[IN] += 1;
            for (int k = 0; k < IN; k++) mean[k] += (x[i * IN + k] - mean[k]) / mean[IN];
        }
        FSDP_TRY(fsdp_module_write_buffer(m, 0, mean));
    }
    for (int i = 0; i < ROWS * IN; i++) shift[i] = -mean[i % IN];
    FSDP_TRY(fsdp_tensor_from_f32(&minus, tape, shift, 2, (int64_t[]){ ROWS, IN }));
    return fsdp_op_add(tape, in, minus, out);
}

static fsdp_status make(fsdp_module **model, fsdp_unit **own, fsdp_comm *comm)
{
    fsdp_module *part[2];
    const fsdp_module_param_info *p;
    int count;
    FSDP_TRY(fsdp_module_create(&part[0], &(fsdp_module_opts){ .type = "centre", .forward = centre }));
    FSDP_TRY(fsdp_module_add_buffer(part[0], &(fsdp_buffer){ .name = "mean", .dtype = FSDP_F32, .ndim = 1, .shape = { IN + 1 } }, NULL));
    FSDP_TRY(fsdp_linear(&part[1], IN, CLASSES, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_sequential(model, part, 2));
    FSDP_TRY(fsdp_module_set_ignored(*model, "1.bias", true)); /* before the wrap, and on every rank */
    FSDP_TRY(fsdp_wrap(model, *model, &(fsdp_wrap_opts){ .comm = comm, .name = "classifier" }));
    FSDP_TRY(fsdp_module_params(*model, &p, &count));
    for (int i = 0; i < count; i++)
        if (p[i].ignored) *own = p[i].unit;
    return fsdp_module_init_keyed(*model, FSDP_INIT_KAIMING, 1);
}

/* Class c lies around c in each direction; rank r has class r % CLASSES in half of its rows; its inputs are off by r. */
static void draw(int rank, int64_t step, float x[ROWS * IN], int32_t y[ROWS])
{
    fsdp_philox_normal_fill(2, "x", (step * 1024 + rank) * ROWS * IN, ROWS * IN, x);
    for (int i = 0; i < ROWS; i++) {
        y[i] = i % 2 == 0 ? rank % CLASSES : i / 2 % CLASSES;
        for (int k = 0; k < IN; k++) x[i * IN + k] += (float)(k == y[i]) + (float)rank;
    }
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    (void)arg;
    fsdp_module *model;
    fsdp_unit *own = NULL;
    fsdp_optim *shared, *alone;
    int rank = fsdp_comm_rank(comm);
    double mean = 0;
    FSDP_TRY(make(&model, &own, comm));
    FSDP_TRY(fsdp_optim_create_adamw(&shared, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 0.02f }));
    FSDP_TRY(fsdp_optim_create_adamw(&alone, (fsdp_unit_list){ &own, 1 }, &(fsdp_adamw_opts){ .lr = 0.02f }));
    for (int step = 0; step < STEPS; step++) {
        fsdp_tape *tape;
        fsdp_tensor *in, *labels, *scores, *loss;
        float x[ROWS * IN];
        int32_t y[ROWS];
        draw(rank, step, x, y);
        FSDP_TRY(fsdp_tape_begin(&tape, comm));
        FSDP_TRY(fsdp_tensor_from_f32(&in, tape, x, 2, (int64_t[]){ ROWS, IN }));
        FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 1, (int64_t[]){ ROWS }));
        FSDP_TRY(fsdp_forward(model, tape, in, &scores));
        FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
        FSDP_TRY(fsdp_backward(tape, loss));
        FSDP_TRY(fsdp_loss_mean(comm, loss, &mean));
        FSDP_TRY(fsdp_tape_end(tape));
        FSDP_TRY(fsdp_optim_step(shared, NULL)); /* of all ranks' gradients */
        FSDP_TRY(fsdp_optim_step(alone, NULL));  /* of this rank's */
    }
    float bias[CLASSES], seen[IN + 1];
    FSDP_TRY(fsdp_unit_read_param(own, 0, bias));
    FSDP_TRY(fsdp_module_read_buffer(fsdp_module_child(model, 0), 0, seen));
    for (int r = 0; r < fsdp_comm_size(comm); r++) {
        FSDP_TRY(fsdp_comm_barrier(comm));
        if (r == rank) printf("rank %d: bias %+.2f %+.2f %+.2f, inputs around %.2f\n", rank, (double)bias[0], (double)bias[1], (double)bias[2], (double)seen[IN - 1]);
        fflush(stdout);
    }
    if (rank == 0) printf("loss %.3f\n", mean);
    int best = 0;
    for (int c = 1; c < CLASSES; c++) best = bias[c] > bias[best] ? c : best;
    FSDP_FAIL_IF(best != rank % CLASSES, FSDP_ERR_INTERNAL, "rank %d has learned that class %d is the most frequent", rank, best);
    fsdp_optim_destroy(alone);
    fsdp_optim_destroy(shared);
    fsdp_module_destroy(model);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
