/* SPDX-License-Identifier: MIT
 *
 * A dynamic loss scale, where gradients pass through 16 bits: a hook rounds what each rank posts to fp16, whose smallest number
 * is 6e-8 and whose largest is 65504. The scale begins too high: steps are skipped, on all ranks, until gradients fit.
 *
 *   ./loss_scale 3
 *
 * Prints the same digits on any number of ranks that divides 12, since each leaf is rounded by itself. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 7, OUT = 5, LEAVES = 12, STEPS = 60 };

static fsdp_status round_to_f16(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg)
{
    (void)k;
    (void)arg;
    for (int p = 0; p < count; p++)
        for (int64_t j = 0; j < part[p].numel; j++) {
            float *g = &grad[part[p].state_offset + j];
            *g = fsdp_f16_to_f32(fsdp_f16_from_f32(*g)); /* infinite, where it is too large */
        }
    return FSDP_OK;
}

static fsdp_status leaf(fsdp_comm *world, fsdp_module *model, int number, float scale, double *sum)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *label, *loss;
    float row[IN];
    double count;
    fsdp_philox_normal_fill(3, "row", (int64_t)number * IN, IN, row);
    row[number % OUT] += 2;
    FSDP_TRY(fsdp_tape_begin_with(&tape, world, &(fsdp_tape_opts){ .loss_scale = scale })); /* the backward begins with it */
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, row, 2, (int64_t[]){ 1, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&label, tape, &(int32_t){ number % OUT }, 1, (int64_t[]){ 1 }));
    FSDP_TRY(fsdp_forward(model, tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, label, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, &count)); /* the loss itself is not scaled */
    return fsdp_tape_end(tape);
}

static fsdp_status make_model(fsdp_module **model, fsdp_comm *world)
{
    fsdp_module *layer[2];
    FSDP_TRY(fsdp_linear(&layer[0], IN, 11, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&layer[1], 11, OUT, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_wrap(&layer[0], layer[0], &(fsdp_wrap_opts){ .comm = world, .name = "hidden" }));
    FSDP_TRY(fsdp_sequential(model, layer, 2));
    FSDP_TRY(fsdp_wrap(model, *model, &(fsdp_wrap_opts){ .comm = world, .name = "outer" }));
    fsdp_unit_list units = fsdp_module_units(*model);
    for (int u = 0; u < units.count; u++) FSDP_TRY(fsdp_unit_set_grad_hooks(units.units[u], &(fsdp_grad_hooks){ .post = round_to_f16 }));
    return fsdp_module_init_keyed(*model, FSDP_INIT_KAIMING, 1);
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    (void)arg;
    fsdp_module *model;
    fsdp_optim *optim;
    fsdp_scaler scaler; /* what it is goes into a checkpoint by fsdp_checkpoint_add_scaler() */
    FSDP_TRY(make_model(&model, world));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 1e-2f }));
    FSDP_TRY(fsdp_scaler_init(&scaler, &(fsdp_scaler_opts){ .scale = 0x1p20, .interval = 30 }));
    for (int step = 0; step < STEPS; step++) {
        double loss[LEAVES] = { 0 }, mean = 0, norm, scale = scaler.scale;
        bool skipped;
        for (int i = fsdp_comm_rank(world); i < LEAVES; i += fsdp_comm_size(world))
            FSDP_TRY(leaf(world, model, step * LEAVES + i, (float)scale, &loss[i]));
        FSDP_TRY(fsdp_comm_sum_exact(world, loss, LEAVES));
        for (int i = 0; i < LEAVES; i++) mean += loss[i] / LEAVES;
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1, .scaler = &scaler, .norm = &norm, .skipped = &skipped }));
        if (fsdp_comm_rank(world) != 0) continue;
        if (skipped) printf("step %d skipped: too large for fp16 at scale %g, now %g\n", step, scale, scaler.scale);
        else if (step % 20 == 0 || step == STEPS - 1) printf("step %d loss %.17g norm %.17g scale %g\n", step, mean, norm, scale);
    }
    if (fsdp_comm_rank(world) == 0) printf("%lld of %d steps skipped\n", (long long)scaler.skipped, STEPS);
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
