/* SPDX-License-Identifier: MIT
 *
 * The first program: two layers, each a unit, trained on as many ranks as asked for. (README.md shows it.) */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    (void)arg;
    fsdp_module *layer[2], *model;
    fsdp_optim *optim;
    FSDP_TRY(fsdp_linear(&layer[0], 8, 32, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_RELU }));
    FSDP_TRY(fsdp_linear(&layer[1], 32, 4, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_wrap(&layer[0], layer[0], &(fsdp_wrap_opts){ .comm = comm })); /* a unit: sharded between uses */
    FSDP_TRY(fsdp_sequential(&model, layer, 2));
    FSDP_TRY(fsdp_wrap(&model, model, &(fsdp_wrap_opts){ .comm = comm }));       /* and one around the rest */
    FSDP_TRY(fsdp_module_init_keyed(model, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 1e-2f }));
    for (int step = 0, rows = 16; step < 200; step++) {
        float x[16 * 8];
        int32_t y[16];
        for (int i = 0; i < rows; i++) {
            y[i] = i % 4;
            for (int k = 0; k < 8; k++) /* noise, and a hint of the class; other rows on each rank */
                x[i * 8 + k] = fsdp_philox_normal(2, "x", ((int64_t)step * 4096 + fsdp_comm_rank(comm) * rows + i) * 8 + k) + 2 * (float)(k == y[i]);
        }
        fsdp_tape *tape;
        fsdp_tensor *in, *labels, *scores, *loss;
        double mean;
        FSDP_TRY(fsdp_tape_begin(&tape, comm));
        FSDP_TRY(fsdp_tensor_from_f32(&in, tape, x, 2, (int64_t[]){ rows, 8 }));
        FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 1, (int64_t[]){ rows }));
        FSDP_TRY(fsdp_forward(model, tape, in, &scores));
        FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
        FSDP_TRY(fsdp_backward(tape, loss));
        FSDP_TRY(fsdp_loss_mean(comm, loss, &mean));
        FSDP_TRY(fsdp_tape_end(tape));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1.0f }));
        if (fsdp_comm_rank(comm) == 0 && step % 50 == 0) printf("step %d loss %.4f\n", step, mean);
    }
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
