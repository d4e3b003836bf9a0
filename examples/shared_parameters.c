/* SPDX-License-Identifier: MIT
 *
 * A parameter in two modules that are wrapped apart: an embedding, and the head above it, which uses the embedding's table as its weight.
 * There is one table, whose gradient is the sum of both uses, whichever unit has it.
 *
 *     shared_parameters [RANKS] */
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>

enum { WORDS = 11, WIDTH = 6, ROWS = 4 };

static fsdp_status build(fsdp_module **out, fsdp_comm *comm, bool head_first)
{
    fsdp_module *part[3];
    static const char *const names[] = { "table", "body", "head" };
    FSDP_TRY(fsdp_embedding(&part[0], WORDS, WIDTH));
    FSDP_TRY(fsdp_linear(&part[1], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&part[2], WIDTH, WORDS, &(fsdp_linear_opts){ .bias = true })); /* weight [WORDS, WIDTH] */
    FSDP_TRY(fsdp_module_share_param(part[2], 0, part[0], 0));
    for (int i = 0; i < 3; i++) {
        int k = head_first ? 2 - i : i; /* the first of the two that is wrapped has the table in its unit */
        FSDP_TRY(fsdp_wrap(&part[k], part[k], &(fsdp_wrap_opts){ .comm = comm, .name = names[k] }));
    }
    FSDP_TRY(fsdp_sequential(out, part, 3));
    return fsdp_module_init_keyed(*out, FSDP_INIT_KAIMING, 1);
}

static fsdp_status micro_batch(fsdp_module *model, fsdp_comm *comm, double *mean)
{
    fsdp_tape *tape;
    fsdp_tensor *in, *labels, *scores, *loss;
    int32_t x[ROWS], y[ROWS];
    for (int i = 0; i < ROWS; i++) {
        x[i] = (fsdp_comm_rank(comm) * ROWS + i) % WORDS;
        y[i] = 3 * x[i] % WORDS;
    }
    FSDP_TRY(fsdp_tape_begin(&tape, comm));
    FSDP_TRY(fsdp_tensor_from_i32(&in, tape, x, 2, (int64_t[]){ 1, ROWS }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 2, (int64_t[]){ 1, ROWS }));
    FSDP_TRY(fsdp_forward(model, tape, in, &scores));
    FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_mean(comm, loss, mean));
    return fsdp_tape_end(tape);
}

static fsdp_status run(fsdp_comm *world, void *arg)
{
    (void)arg;
    double mean = 0, first = 0;
    for (int order = 0; order < 2; order++) {
        fsdp_module *model;
        fsdp_optim *optim;
        const fsdp_module_param_info *p;
        int n;
        FSDP_TRY(build(&model, world, order == 1));
        FSDP_TRY(fsdp_module_params(model, &p, &n));
        for (int i = 0; i < n && fsdp_comm_rank(world) == 0; i++)
            printf("%-10s in unit %-6s%s%s\n", p[i].name, fsdp_unit_name(p[i].unit), p[i].alias_count > 0 ? "  also called " : "", p[i].alias_count > 0 ? p[i].aliases[0] : "");
        FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 0.05f }));
        for (int step = 0; step < 40; step++) {
            FSDP_TRY(micro_batch(model, world, &mean));
            FSDP_TRY(fsdp_optim_step(optim, NULL)); /* the table once */
        }
        if (fsdp_comm_rank(world) == 0) printf("loss %.9f\n\n", mean);
        fsdp_optim_destroy(optim);
        fsdp_module_destroy(model);
        if (order == 0) first = mean;
        FSDP_FAIL_IF(mean != first || !(mean < 0.5), FSDP_ERR_INTERNAL, "loss %.17g, before %.17g", mean, first);
    }
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_launch_opts opts = { .ranks = argc > 1 ? atoi(argv[1]) : 2, .threads = 1 };
    if (fsdp_launch(&opts, run, NULL) == FSDP_OK) return 0;
    fprintf(stderr, "%s\n", fsdp_last_error());
    return 1;
}
