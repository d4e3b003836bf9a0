/* SPDX-License-Identifier: MIT
 *
 * State dictionaries between wrappings: a model that was trained as one unit on all ranks goes on as a unit for each layer, in another
 * mode, with the values and the optimizer's state of the first; and its weights go into one file, from rank 0 alone.
 *
 *   ./state_dict FILE [RANKS]
 *
 * Nothing is known of units in a dictionary: names, shapes and elements are the model's. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 3, WIDTH = 8, ROWS = 4 };

typedef struct net {
    fsdp_module *model;
    fsdp_optim *optim;
    fsdp_checkpoint *c; /* what belongs to its state */
} net;

static fsdp_status make(net *n, fsdp_comm *world, bool a_unit_each, fsdp_mode mode)
{
    fsdp_module *layer[LAYERS];
    fsdp_wrap_opts wrap = { .comm = world, .mode = mode };
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_linear(&layer[i], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_RELU }));
        if (a_unit_each) FSDP_TRY(fsdp_wrap(&layer[i], layer[i], &wrap));
    }
    FSDP_TRY(fsdp_sequential(&n->model, layer, LAYERS));
    FSDP_TRY(fsdp_wrap(&n->model, n->model, &wrap)); /* a unit of all that is in none yet */
    FSDP_TRY(fsdp_module_init_keyed(n->model, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(fsdp_optim_create_adamw(&n->optim, fsdp_module_units(n->model), &(fsdp_adamw_opts){ .lr = 0.01f }));
    FSDP_TRY(fsdp_checkpoint_create(&n->c, world));
    FSDP_TRY(fsdp_checkpoint_add_module(n->c, NULL, n->model)); /* "0.weight", "0.bias", "1.weight", ... */
    return fsdp_checkpoint_add_optim(n->c, n->optim);           /* "optim.exp_avg.0.weight", ... */
}

static void unmake(net *n)
{
    fsdp_checkpoint_destroy(n->c);
    fsdp_optim_destroy(n->optim);
    fsdp_module_destroy(n->model);
}

static fsdp_status train(net *n, fsdp_comm *world, int step, double *sum)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *labels, *y, *loss;
    float values[ROWS * WIDTH];
    double count;
    static const int32_t right[ROWS] = { 1, 0, 7, 3 };
    fsdp_philox_normal_fill(2, "x", (step * fsdp_comm_size(world) + fsdp_comm_rank(world)) * ROWS * WIDTH, ROWS * WIDTH, values);
    FSDP_TRY(fsdp_tape_begin(&tape, world));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, values, 2, (const int64_t[]){ ROWS, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, right, 1, (const int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(n->model, tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, &count));
    FSDP_TRY(fsdp_tape_end(tape));
    FSDP_TRY(fsdp_comm_sum_exact(world, sum, 1));
    return fsdp_optim_step(n->optim, NULL);
}

static fsdp_status run(fsdp_comm *world, void *arg)
{
    net flat, layers;
    fsdp_state *s;
    double a, b;
    bool first = fsdp_comm_rank(world) == 0;
    FSDP_TRY(make(&flat, world, false, FSDP_MODE_FULL));
    FSDP_TRY(make(&layers, world, true, FSDP_MODE_GRAD_OP));
    for (int step = 0; step < 5; step++) FSDP_TRY(train(&flat, world, step, &a));

    /* Each rank's pieces: nothing is gathered. The load takes them wherever they are. */
    FSDP_TRY(fsdp_state_read(&s, flat.c, &(fsdp_state_opts){ .kind = FSDP_STATE_SHARDED }));
    FSDP_TRY(fsdp_state_load(layers.c, s, NULL));
    fsdp_state_destroy(s);
    FSDP_TRY(train(&flat, world, 5, &a));
    FSDP_TRY(train(&layers, world, 5, &b));
    if (first) printf("one unit: loss %.17g, a unit for each layer: loss %.17g\n", a, b);
    FSDP_FAIL_IF(a != b, FSDP_ERR_INTERNAL, "the two differ");

    /* The whole, on rank 0 alone, into a file; and from there, where rank 0 alone reads it, into what has no optimizer's state. */
    FSDP_TRY(fsdp_state_read(&s, layers.c, &(fsdp_state_opts){ .which = FSDP_STATE_PARAMS, .rank0_only = true }));
    FSDP_TRY(fsdp_comm_agree(world, first ? fsdp_state_write_file(s, arg) : FSDP_OK));
    fsdp_state_destroy(s);
    s = NULL;
    FSDP_TRY(fsdp_comm_agree(world, first ? fsdp_state_read_file(&s, arg) : FSDP_OK));
    fsdp_status st = fsdp_state_load(flat.c, s, NULL); /* all that is registered is wanted: it says what is missing, and changes nothing */
    if (first) printf("%s\n", fsdp_last_error_message());
    FSDP_FAIL_IF(st != FSDP_ERR_FORMAT, FSDP_ERR_INTERNAL, "it should have been refused");
    FSDP_TRY(fsdp_state_load(flat.c, s, &(fsdp_load_opts){ .which = FSDP_STATE_PARAMS }));
    fsdp_state_destroy(s);
    unmake(&flat);
    unmake(&layers);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    char *file = argc > 1 ? argv[1] : "weights.safetensors";
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 2 ? atoi(argv[2]) : 2 }, run, file);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
