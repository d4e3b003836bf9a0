/* SPDX-License-Identifier: MIT
 *
 * Two averages of a model in training: a moving average beside it, swapped in to be evaluated, and a teacher, a second model that
 * follows the first and can be used at the same time. Each rank averages the slices that it keeps.
 *
 *   ./averages 3
 *
 * Labels are wrong one time in three, so steps are noisy, and averages are better. Prints the same digits on any number of ranks that
 * divides 12. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 7, OUT = 5, LEAVES = 12, STEPS = 150, TESTS = 240 };

static fsdp_status make_model(fsdp_module **model, fsdp_comm *world, uint64_t seed)
{
    fsdp_module *layer[2];
    FSDP_TRY(fsdp_linear(&layer[0], IN, 11, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&layer[1], 11, OUT, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_wrap(&layer[0], layer[0], &(fsdp_wrap_opts){ .comm = world, .name = "hidden" }));
    FSDP_TRY(fsdp_sequential(model, layer, 2));
    FSDP_TRY(fsdp_wrap(model, *model, &(fsdp_wrap_opts){ .comm = world, .name = "outer" }));
    return fsdp_module_init_keyed(*model, FSDP_INIT_KAIMING, seed);
}

static fsdp_status leaf(fsdp_comm *world, fsdp_module *model, int number, bool test, double *sum)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *label, *loss;
    float row[IN];
    double count;
    int32_t class = number % OUT;
    fsdp_philox_normal_fill(test ? 4 : 3, "row", (int64_t)number * IN, IN, row);
    row[class] += 2;
    if (!test && number % 3 == 0) class = (class + number / 3) % OUT;
    FSDP_TRY(fsdp_tape_begin_with(&tape, world, &(fsdp_tape_opts){ .eval = test }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, row, 2, (int64_t[]){ 1, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&label, tape, &class, 1, (int64_t[]){ 1 }));
    FSDP_TRY(fsdp_forward(model, tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, label, &loss));
    if (!test) FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, &count));
    return fsdp_tape_end(tape);
}

static fsdp_status evaluate(fsdp_comm *world, fsdp_module *model, const char *what)
{
    double loss[TESTS] = { 0 }, mean = 0;
    for (int i = fsdp_comm_rank(world); i < TESTS; i += fsdp_comm_size(world)) FSDP_TRY(leaf(world, model, i, true, &loss[i]));
    FSDP_TRY(fsdp_comm_sum_exact(world, loss, TESTS));
    for (int i = 0; i < TESTS; i++) mean += loss[i] / TESTS;
    if (fsdp_comm_rank(world) == 0) printf("%-16s test loss %.17g\n", what, mean);
    return FSDP_OK;
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    (void)arg;
    fsdp_module *student, *teacher;
    fsdp_optim *optim;
    fsdp_ema *ema; /* fsdp_checkpoint_add_ema() saves it */
    FSDP_TRY(make_model(&student, world, 1));
    FSDP_TRY(make_model(&teacher, world, 2));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(student), &(fsdp_adamw_opts){ .lr = 3e-2f }));
    FSDP_TRY(fsdp_ema_create(&ema, fsdp_module_units(student)));
    FSDP_TRY(fsdp_teacher_update(fsdp_module_units(teacher), fsdp_module_units(student), 0)); /* momentum 0: a copy */
    for (int step = 0; step < STEPS; step++) {
        double loss;
        for (int i = fsdp_comm_rank(world); i < LEAVES; i += fsdp_comm_size(world)) FSDP_TRY(leaf(world, student, step * LEAVES + i, false, &loss));
        FSDP_TRY(fsdp_optim_step(optim, NULL));
        FSDP_TRY(fsdp_ema_update(ema, 0.95f));
        FSDP_TRY(fsdp_teacher_update(fsdp_module_units(teacher), fsdp_module_units(student), 0.95f));
    }
    FSDP_TRY(evaluate(world, student, "the model"));
    FSDP_TRY(fsdp_ema_swap_in(ema));
    FSDP_TRY(evaluate(world, student, "its average"));
    FSDP_TRY(fsdp_ema_swap_out(ema));
    FSDP_TRY(evaluate(world, teacher, "its teacher"));
    FSDP_TRY(evaluate(world, student, "the model again"));
    fsdp_ema_destroy(ema);
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(teacher);
    fsdp_module_destroy(student);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
