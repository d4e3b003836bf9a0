/* SPDX-License-Identifier: MIT
 *
 * Uneven inputs: ranks have different numbers of samples, the last one none at all. Who has run out joins the passes of one that
 * has not; a step's mean is over the samples that there were. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 8, CLASSES = 4, EPOCHS = 40 };

/* One sample of this rank, with its class. */
static void sample(int rank, int i, float x[IN], int32_t *y)
{
    *y = i % CLASSES;
    for (int k = 0; k < IN; k++) x[k] = fsdp_philox_normal(2, "x", ((int64_t)rank * 1000 + i) * IN + k) + 2 * (float)(k == *y);
}

static fsdp_status pass(fsdp_module *model, fsdp_comm *comm, const float *x, const int32_t *y, double sums[2])
{
    fsdp_tape *tape;
    fsdp_tensor *in, *labels, *scores, *loss;
    double sum, count;
    FSDP_TRY(fsdp_tape_begin(&tape, comm));
    FSDP_TRY(fsdp_tensor_from_f32(&in, tape, x, 2, (int64_t[]){ 1, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 1, (int64_t[]){ 1 }));
    FSDP_TRY(fsdp_forward(model, tape, in, &scores));
    FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, &sum, &count)); /* this rank's own: a pass that others join has no collective calls */
    sums[0] += sum;
    sums[1] += count;
    return fsdp_tape_end(tape);
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    (void)arg;
    fsdp_module *layer[2], *model;
    fsdp_optim *optim;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm), samples = size == 1 ? 9 : rank == size - 1 ? 0 : 5 + 4 * rank, passes = 0;
    FSDP_TRY(fsdp_linear(&layer[0], IN, 16, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_RELU }));
    FSDP_TRY(fsdp_linear(&layer[1], 16, CLASSES, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_wrap(&layer[0], layer[0], &(fsdp_wrap_opts){ .comm = comm }));
    FSDP_TRY(fsdp_sequential(&model, layer, 2));
    FSDP_TRY(fsdp_wrap(&model, model, &(fsdp_wrap_opts){ .comm = comm }));
    FSDP_TRY(fsdp_module_init_keyed(model, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 1e-2f }));
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        double sums[2] = { 0 };
        for (int i = 0;; i++) {
            int first;
            FSDP_TRY(fsdp_comm_ask_more(comm, i < samples, &first));
            if (first < 0) break; /* nobody has any */
            if (i < samples) {
                float x[IN];
                int32_t y;
                sample(rank, i, x, &y);
                FSDP_TRY(pass(model, comm, x, &y, sums));
            } else {
                FSDP_TRY(fsdp_pass_join(comm, first));
            }
            FSDP_TRY(fsdp_optim_step(optim, NULL)); /* the mean over as many samples as there were */
            passes++;
        }
        FSDP_TRY(fsdp_comm_sum_exact(comm, sums, 2));
        if (rank == 0 && epoch % 13 == 0) printf("epoch %d: loss %.3f over %.0f samples\n", epoch, sums[0] / sums[1], sums[1]);
    }
    if (rank == size - 1) printf("rank %d had %d samples of its own, and took part in %d passes\n", rank, samples, passes);
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(model);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
