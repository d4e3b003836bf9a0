/* SPDX-License-Identifier: MIT
 *
 * One model, trained in every mode and on every mesh that the ranks make: what is sharded where is a matter of memory and traffic,
 * not of the result. Prints a line for each, with the same loss to the last digit, and fails where one differs.
 *
 *   ./meshes 6
 *
 * A mesh of R x S ranks: R replicas of what the mode shards, each on S ranks (hybrid). none is R = all, S = 1. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 7, OUT = 5, LEAVES = 12, STEPS = 20 };

static fsdp_status leaf(fsdp_comm *world, fsdp_module *model, int number, double *sum)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *label, *loss;
    float row[IN];
    double count;
    fsdp_philox_normal_fill(3, "row", (int64_t)number * IN, IN, row);
    row[number % OUT] += 2;
    FSDP_TRY(fsdp_tape_begin(&tape, world));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, row, 2, (int64_t[]){ 1, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&label, tape, &(int32_t){ number % OUT }, 1, (int64_t[]){ 1 }));
    FSDP_TRY(fsdp_forward(model, tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, label, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, &count));
    return fsdp_tape_end(tape);
}

/* The mean loss of the last step, and how many elements this rank keeps. */
static fsdp_status train(fsdp_comm *world, fsdp_wrap_opts opts, double *mean, int64_t *kept)
{
    fsdp_module *layer[2], *model;
    fsdp_optim *optim;
    opts.comm = world;
    FSDP_TRY(fsdp_linear(&layer[0], IN, 64, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_RELU }));
    FSDP_TRY(fsdp_linear(&layer[1], 64, OUT, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_wrap(&layer[0], layer[0], &opts));
    FSDP_TRY(fsdp_sequential(&model, layer, 2));
    FSDP_TRY(fsdp_wrap(&model, model, &opts));
    FSDP_TRY(fsdp_module_init_keyed(model, FSDP_INIT_KAIMING, 1));
    fsdp_unit_list units = fsdp_module_units(model);
    FSDP_TRY(fsdp_optim_create_adamw(&optim, units, &(fsdp_adamw_opts){ .lr = 1e-2f }));
    for (int step = 0; step < STEPS; step++) {
        double loss[LEAVES] = { 0 };
        for (int i = fsdp_comm_rank(world); i < LEAVES; i += fsdp_comm_size(world)) FSDP_TRY(leaf(world, model, step * LEAVES + i, &loss[i]));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1.0f }));
        FSDP_TRY(fsdp_comm_sum_exact(world, loss, LEAVES));
        *mean = 0;
        for (int i = 0; i < LEAVES; i++) *mean += loss[i] / LEAVES;
    }
    *kept = 0;
    for (int u = 0; u < units.count; u++) *kept += fsdp_unit_slice_numel(units.units[u]);
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(model);
    return FSDP_OK;
}

static fsdp_status compare(fsdp_comm *world, void *arg)
{
    (void)arg;
    int size = fsdp_comm_size(world);
    double first = 0;
    for (int mode = FSDP_MODE_FULL; mode <= FSDP_MODE_NONE; mode++)
        for (int shards = size; shards >= 1; shards--) {
            if (size % shards != 0 || (mode == FSDP_MODE_NONE) != (shards == 1)) continue;
            double loss;
            int64_t kept;
            FSDP_TRY(train(world, (fsdp_wrap_opts){ .mode = (fsdp_mode)mode, .shards = shards }, &loss, &kept));
            if (mode == FSDP_MODE_FULL && shards == size) first = loss;
            if (fsdp_comm_rank(world) == 0)
                printf("%-10s %d x %d  loss %.17g, rank 0 keeps %lld elements\n", fsdp_mode_name((fsdp_mode)mode), size / shards, shards, loss, (long long)kept);
            FSDP_FAIL_IF(loss != first && size > 1, FSDP_ERR_INTERNAL, "mode %s on %d shards has another loss", fsdp_mode_name((fsdp_mode)mode), shards);
        }
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, compare, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
