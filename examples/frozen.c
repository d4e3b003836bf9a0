/* SPDX-License-Identifier: MIT
 *
 * Fine-tuning: a trunk is frozen, a head is trained on it, then the trunk's last layer is unfrozen and trains along. What is
 * frozen keeps every bit, takes no optimizer state, needs no reduction, and (here, where nothing before it trains) no gather in the
 * backward. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 8, WIDTH = 16, CLASSES = 4, ROWS = 16 };

static fsdp_status train_step(fsdp_module *model, fsdp_comm *comm, fsdp_optim *optim, int step, double *mean)
{
    float x[ROWS * IN];
    int32_t y[ROWS];
    for (int i = 0; i < ROWS; i++) {
        y[i] = i % CLASSES;
        for (int k = 0; k < IN; k++)
            x[i * IN + k] = fsdp_philox_normal(2, "x", ((int64_t)step * 4096 + fsdp_comm_rank(comm) * ROWS + i) * IN + k) + 2 * (float)(k == y[i]);
    }
    fsdp_tape *tape;
    fsdp_tensor *in, *labels, *scores, *loss;
    FSDP_TRY(fsdp_tape_begin(&tape, comm));
    FSDP_TRY(fsdp_tensor_from_f32(&in, tape, x, 2, (int64_t[]){ ROWS, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(model, tape, in, &scores));
    FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_mean(comm, loss, mean));
    FSDP_TRY(fsdp_tape_end(tape));
    return fsdp_optim_step(optim, NULL);
}

static fsdp_status train_steps(fsdp_module *model, fsdp_comm *comm, fsdp_optim *optim, int from, int to)
{
    fsdp_comm_stats before, after;
    double mean = 0;
    fsdp_comm_get_stats(comm, &before);
    for (int step = from; step < to; step++) FSDP_TRY(train_step(model, comm, optim, step, &mean));
    fsdp_comm_get_stats(comm, &after);
    if (fsdp_comm_rank(comm) == 0)
        printf("steps %d to %d: loss %.3f, %llu reductions\n", from, to - 1, mean, (unsigned long long)(after.reduces - before.reduces));
    return FSDP_OK;
}

/* Parameter i of the model, as it is now. */
static fsdp_status read_first(fsdp_module *model, float out[WIDTH * IN])
{
    return fsdp_module_read_param(model, 0, out);
}

static fsdp_status fine_tune(fsdp_comm *comm, void *arg)
{
    (void)arg;
    fsdp_wrap_opts w = { .comm = comm };
    fsdp_module *layer[2], *part[2], *model;
    fsdp_optim *optim;
    float before[WIDTH * IN], after[WIDTH * IN];
    FSDP_TRY(fsdp_linear(&layer[0], IN, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_RELU }));
    FSDP_TRY(fsdp_linear(&layer[1], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_RELU }));
    FSDP_TRY(fsdp_sequential(&part[0], layer, 2));
    FSDP_TRY(fsdp_linear(&part[1], WIDTH, CLASSES, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_module_init_keyed(part[0], FSDP_INIT_KAIMING, 1)); /* or the weights of a model that was trained before */
    FSDP_TRY(fsdp_module_init_keyed(part[1], FSDP_INIT_KAIMING, 2));
    FSDP_TRY(fsdp_module_set_frozen(part[0], "*", true));            /* before it is wrapped, or after */
    FSDP_TRY(fsdp_wrap(&part[0], part[0], &w));
    FSDP_TRY(fsdp_sequential(&model, part, 2));
    FSDP_TRY(fsdp_wrap(&model, model, &w));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 1e-2f, .weight_decay = 0.1f }));

    FSDP_TRY(read_first(model, before));
    FSDP_TRY(train_steps(model, comm, optim, 0, 60));   /* the head alone */
    FSDP_TRY(fsdp_module_set_frozen(model, "0.1.*", false));
    FSDP_TRY(train_steps(model, comm, optim, 60, 120)); /* and the layer below it */
    FSDP_TRY(read_first(model, after));
    FSDP_FAIL_IF(memcmp(before, after, sizeof(before)) != 0, FSDP_ERR_INTERNAL, "a frozen parameter has changed");

    fsdp_optim_destroy(optim);
    fsdp_module_destroy(model);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, fine_tune, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
