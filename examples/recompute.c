/* SPDX-License-Identifier: MIT
 *
 * Activation checkpointing: of each block's forward only its input is kept, and the backward runs the block again. The same
 * losses to the last digit, dropout included, for a forward more; the tape's memory no longer grows with what is in a block.
 *
 *   ./recompute 2
 */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 24, CLASSES = 5, BLOCKS = 4, LEAVES = 6, STEPS = 15 };

static fsdp_status block(fsdp_module **out, int wide)
{
    fsdp_module *part[4];
    FSDP_TRY(fsdp_layer_norm(&part[0], WIDTH, 1e-5f));
    FSDP_TRY(fsdp_linear(&part[1], WIDTH, wide, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&part[2], wide, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_dropout(&part[3], 0.1f));
    return fsdp_sequential(out, part, 4);
}

static fsdp_status leaf(fsdp_comm *world, fsdp_module *model, int64_t number, double *sum)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *label, *loss;
    float row[WIDTH];
    double count;
    fsdp_philox_normal_fill(3, "row", number * WIDTH, WIDTH, row);
    row[number % CLASSES] += 2;
    /* What dropout draws depends on the seed, the sample's number and the place in the model: not on the rank. */
    FSDP_TRY(fsdp_tape_begin_with(&tape, world, &(fsdp_tape_opts){ .seed = 9, .step = number / LEAVES, .first_sample = number % LEAVES }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, row, 2, (int64_t[]){ 1, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&label, tape, &(int32_t){ (int32_t)(number % CLASSES) }, 1, (int64_t[]){ 1 }));
    FSDP_TRY(fsdp_forward(model, tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, label, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, &count));
    return fsdp_tape_end(tape);
}

static fsdp_status train(fsdp_comm *world, bool recompute, double *mean)
{
    fsdp_module *part[BLOCKS + 1], *model;
    fsdp_optim *optim;
    for (int b = 0; b < BLOCKS; b++) {
        FSDP_TRY(block(&part[b], 4 * WIDTH));
        FSDP_TRY(fsdp_wrap(&part[b], part[b], &(fsdp_wrap_opts){ .comm = world, .name = "block" }));
        fsdp_module_set_recompute(part[b], recompute); /* the unit is gathered for it once more, where gathering is a copy */
    }
    FSDP_TRY(fsdp_linear(&part[BLOCKS], WIDTH, CLASSES, NULL));
    FSDP_TRY(fsdp_sequential(&model, part, BLOCKS + 1));
    FSDP_TRY(fsdp_wrap(&model, model, &(fsdp_wrap_opts){ .comm = world, .name = "outer" }));
    FSDP_TRY(fsdp_module_init_keyed(model, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 3e-3f }));
    for (int step = 0; step < STEPS; step++) {
        double loss[LEAVES] = { 0 };
        for (int i = fsdp_comm_rank(world); i < LEAVES; i += fsdp_comm_size(world)) FSDP_TRY(leaf(world, model, step * LEAVES + i, &loss[i]));
        FSDP_TRY(fsdp_optim_step(optim, NULL));
        FSDP_TRY(fsdp_comm_sum_exact(world, loss, LEAVES));
        *mean = 0;
        for (int i = 0; i < LEAVES; i++) *mean += loss[i] / LEAVES;
    }
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(model);
    return FSDP_OK;
}

static fsdp_status compare(fsdp_comm *world, void *arg)
{
    (void)arg;
    double kept, again;
    FSDP_TRY(train(world, false, &kept));
    FSDP_TRY(train(world, true, &again));
    if (fsdp_comm_rank(world) == 0) printf("loss %.17g with activations kept, %.17g with blocks run again\n", kept, again);
    FSDP_FAIL_IF(kept != again, FSDP_ERR_INTERNAL, "the losses differ");
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, compare, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
