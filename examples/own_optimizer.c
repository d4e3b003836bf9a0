/* SPDX-License-Identifier: MIT
 *
 * An optimizer of one's own, on the slices that each rank keeps: Lion (Chen et al., 2023), p -= lr (sign(b1 m + (1 - b1) g) + wd p),
 * m = b2 m + (1 - b2) g. The library's AdamW and SGD know nothing that is not used here.
 *
 *   ./own_optimizer 3
 *
 * Prints the same digits on any number of ranks that divides 12: a slice's edges need not be those of parameters, and no value
 * depends on where they are. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 7, OUT = 5, LEAVES = 12, STEPS = 60, UNITS = 2 };

typedef struct lion {
    fsdp_unit_list units;
    float lr, beta1, beta2, weight_decay;
    float *m[UNITS]; /* of each unit, a value for every element that this rank keeps */
} lion;

static fsdp_status lion_create(lion *o, fsdp_unit_list units)
{
    *o = (lion){ .units = units, .lr = 2e-3f, .beta1 = 0.9f, .beta2 = 0.99f, .weight_decay = 0.1f };
    for (int u = 0; u < units.count; u++) {
        o->m[u] = calloc((size_t)fsdp_unit_slice_numel(units.units[u]) + 1, sizeof(float));
        FSDP_FAIL_IF(o->m[u] == NULL, FSDP_ERR_NOMEM, "no memory for the optimizer's state");
    }
    return FSDP_OK;
}

static void update(const lion *o, const fsdp_slice *s, float *m, float scale)
{
    float decay = s->name[0] == 'w' ? o->weight_decay : 0; /* no decay of biases: slices have their parameter's name */
    for (int64_t i = 0; i < s->numel; i++) {
        float g = scale * s->grad[i], c = o->beta1 * m[i] + (1 - o->beta1) * g;
        s->master[i] -= o->lr * ((float)((c > 0) - (c < 0)) + decay * s->master[i]);
        m[i] = o->beta2 * m[i] + (1 - o->beta2) * g;
    }
}

/* Between begin and end gradients are final, and masters may be written. On a device that the host may not touch this loop would
 * be a kernel on fsdp_unit_stream(). */
static fsdp_status lion_step(lion *o, double *norm)
{
    double weight; /* of all passes since the last step: the number of rows */
    FSDP_TRY(fsdp_step_begin(o->units));
    FSDP_TRY(fsdp_step_grad_norm(o->units, norm, &weight));
    for (int u = 0; u < o->units.count; u++) {
        const fsdp_slice *s;
        int n;
        fsdp_unit_slices(o->units.units[u], &s, &n);
        for (int i = 0; i < n; i++)
            if (s[i].grad != NULL) update(o, &s[i], o->m[u] + s[i].state_offset, (float)(1 / weight));
    }
    *norm /= weight;
    return fsdp_step_end(o->units);
}

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

static fsdp_status train(fsdp_comm *world, void *arg)
{
    (void)arg;
    fsdp_module *layer[2], *model;
    lion optim;
    FSDP_TRY(fsdp_linear(&layer[0], IN, 11, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&layer[1], 11, OUT, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_wrap(&layer[0], layer[0], &(fsdp_wrap_opts){ .comm = world, .name = "hidden" }));
    FSDP_TRY(fsdp_sequential(&model, layer, 2));
    FSDP_TRY(fsdp_wrap(&model, model, &(fsdp_wrap_opts){ .comm = world, .name = "outer" }));
    FSDP_TRY(fsdp_module_init_keyed(model, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(lion_create(&optim, fsdp_module_units(model)));
    for (int step = 0; step < STEPS; step++) {
        double loss[LEAVES] = { 0 }, mean = 0, norm;
        for (int i = fsdp_comm_rank(world); i < LEAVES; i += fsdp_comm_size(world)) FSDP_TRY(leaf(world, model, step * LEAVES + i, &loss[i]));
        FSDP_TRY(fsdp_comm_sum_exact(world, loss, LEAVES));
        for (int i = 0; i < LEAVES; i++) mean += loss[i] / LEAVES;
        FSDP_TRY(lion_step(&optim, &norm));
        if (fsdp_comm_rank(world) == 0 && (step == 0 || step == STEPS - 1)) printf("step %d loss %.17g norm %.17g\n", step, mean, norm);
    }
    for (int u = 0; u < UNITS; u++) free(optim.m[u]);
    fsdp_module_destroy(model);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
