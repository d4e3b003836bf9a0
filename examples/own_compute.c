/* SPDX-License-Identifier: MIT
 *
 * The core alone: one linear layer with its own forward and backward, trained on N ranks.
 *
 *   cc own_compute.c $(pkg-config --cflags --libs fsdp) -lm -o own_compute
 *   ./own_compute 4            forks 4 ranks          fsdp run -n 4 ./own_compute        ranks from outside
 *
 * Prints the loss of the first and the last step: the same digits on any number of ranks that divides 24.
 */
#include <fsdp/fsdp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 13, OUT = 6, ROWS = 24, STEPS = 50 };   /* ROWS are the leaves of a step: one row each */

/* Initial value of element i of a parameter, on its original shape; called for at most one unit at a time. */
static void init(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = name[0] == 'w' ? 0.1f * fsdp_philox_normal(1, name, i) : 0.0f;
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    (void)arg;
    const int rank = fsdp_comm_rank(world), world_size = fsdp_comm_size(world);
    const fsdp_param params[] = {
        { .name = "w", .ndim = 2, .shape = { OUT, IN } },
        { .name = "b", .ndim = 1, .shape = { OUT } },
    };
    fsdp_unit *layer = NULL;
    fsdp_optim *optim = NULL;
    FSDP_TRY(fsdp_unit_create(&layer, world, params, 2, &(fsdp_unit_opts){ .name = "layer" }));
    FSDP_TRY(fsdp_unit_init(layer, init, NULL));
    FSDP_TRY(fsdp_optim_create_sgd(&optim, (fsdp_unit_list){ &layer, 1 }, &(fsdp_sgd_opts){ .lr = 0.05f, .momentum = 0.9f }));

    for (int step = 0; step < STEPS; step++) {
        double loss[ROWS] = { 0 };                      /* each leaf's: their sum is then taken in leaf order */
        for (int leaf = rank; leaf < ROWS; leaf += world_size) {
            fsdp_pass *pass;
            FSDP_TRY(fsdp_pass_begin(&pass, world, FSDP_PASS_TRAIN));

            FSDP_TRY(fsdp_unit_begin_forward(layer, pass));
            const float *w = fsdp_unit_param(layer, 0), *b = fsdp_unit_param(layer, 1);
            float x[IN], dy[OUT];
            for (int i = 0; i < IN; i++) x[i] = fsdp_philox_normal(2, "x", (int64_t)leaf * IN + i);
            for (int o = 0; o < OUT; o++) {
                float y = b[o];
                for (int i = 0; i < IN; i++) y += w[o * IN + i] * x[i];
                dy[o] = y - x[o];                       /* the layer learns to copy its first OUT inputs */
                loss[leaf] += 0.5 * dy[o] * dy[o];
            }
            FSDP_TRY(fsdp_unit_end_forward(layer, pass));

            FSDP_TRY(fsdp_unit_begin_backward(layer, pass));
            float beta_w, beta_b;                       /* 0: write the gradient; 1: add to what is there */
            float *dw = fsdp_unit_grad(layer, 0, &beta_w), *db = fsdp_unit_grad(layer, 1, &beta_b);
            for (int o = 0; o < OUT; o++) {
                for (int i = 0; i < IN; i++) dw[o * IN + i] = (beta_w ? dw[o * IN + i] : 0) + dy[o] * x[i];
                db[o] = (beta_b ? db[o] : 0) + dy[o];
            }
            FSDP_TRY(fsdp_unit_end_backward(layer, pass));
            FSDP_TRY(fsdp_pass_end(pass));
        }
        FSDP_TRY(fsdp_comm_sum_exact(world, loss, ROWS));
        double mean = 0;
        for (int leaf = 0; leaf < ROWS; leaf++) mean += loss[leaf] / ROWS;
        if (rank == 0 && (step == 0 || step == STEPS - 1)) printf("step %d loss %.17g\n", step, mean);
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .grad_scale = 1.0f / ROWS, .clip = 1.0f }));
    }
    fsdp_optim_destroy(optim);
    fsdp_unit_destroy(layer);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    /* 0 ranks: those of fsdp run, mpirun, srun or torchrun; one, where there is no launcher */
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
