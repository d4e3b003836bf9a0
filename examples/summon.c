/* SPDX-License-Identifier: MIT
 *
 * Whole parameters outside of training: to look at them, to change them, on every rank or on one, on the host, with gradients;
 * and what happens where ranks do not write the same.
 *
 *   ./summon 3 */
#include <fsdp/fsdp.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 6, CLASSES = 3, NUMEL = WIDTH * WIDTH };

static fsdp_status build(fsdp_module **model, fsdp_module **trunk, fsdp_comm *world)
{
    fsdp_module *head;
    FSDP_TRY(fsdp_linear(trunk, WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_RELU }));
    FSDP_TRY(fsdp_linear(&head, WIDTH, CLASSES, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_wrap(trunk, *trunk, &(fsdp_wrap_opts){ .comm = world, .name = "trunk" }));
    FSDP_TRY(fsdp_sequential(model, (fsdp_module *[]){ *trunk, head }, 2));
    FSDP_TRY(fsdp_wrap(model, *model, &(fsdp_wrap_opts){ .comm = world, .name = "model" }));
    return fsdp_module_init_keyed(*model, FSDP_INIT_KAIMING, 1);
}

static fsdp_status one_backward(fsdp_module *model, fsdp_comm *world)
{
    float x[2 * WIDTH];
    fsdp_tape *tape;
    fsdp_tensor *in, *labels, *scores, *loss;
    fsdp_philox_normal_fill(2, "x", (int64_t)fsdp_comm_rank(world) * 2 * WIDTH, 2 * WIDTH, x);
    FSDP_TRY(fsdp_tape_begin(&tape, world));
    FSDP_TRY(fsdp_tensor_from_f32(&in, tape, x, 2, (int64_t[]){ 2, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ 0, 2 }, 1, (int64_t[]){ 2 }));
    FSDP_TRY(fsdp_forward(model, tape, in, &scores));
    FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    return fsdp_tape_end(tape);
}

/* Rank 0 alone, in host memory: the others take part and get nothing. A norm of each parameter and of its gradient. */
static fsdp_status look(fsdp_module *model, bool on_rank0)
{
    const fsdp_module_param_info *info;
    int count;
    FSDP_TRY(fsdp_summon_begin(model, &(fsdp_summon_opts){ .recurse = true, .rank0_only = true, .host = true, .grads = true }));
    FSDP_TRY(fsdp_module_params(model, &info, &count));
    for (int i = 0; i < count && on_rank0; i++) {
        fsdp_summoned_param p;
        double value = 0, grad = 0;
        FSDP_TRY(fsdp_module_summoned(model, i, &p));
        for (int64_t k = 0; k < fsdp_unit_param_numel(info[i].unit, info[i].index); k++) {
            value += (double)p.value[k] * (double)p.value[k];
            if (p.grad != NULL) grad += (double)p.grad[k] * (double)p.grad[k];
        }
        if (p.grad != NULL) printf("%-10s norm %.6f, of its gradient %.6f\n", info[i].name, sqrt(value), sqrt(grad));
        else printf("%-10s norm %.6f, no gradient\n", info[i].name, sqrt(value));
    }
    return fsdp_summon_end(model);
}

/* Every rank writes the trunk's weight; `own`: something of its own. The CPU's device addresses are the host's. */
static fsdp_status write(fsdp_module *trunk, int rank, bool own)
{
    fsdp_summoned_param p;
    FSDP_TRY(fsdp_summon_begin(trunk, &(fsdp_summon_opts){ .writeback = true, .same = true }));
    FSDP_TRY(fsdp_module_summoned(trunk, 0, &p));
    for (int i = 0; i < NUMEL; i++) p.write[i] = 0.5f * p.value[i] + (own ? (float)rank : 0);
    fsdp_status st = fsdp_summon_end(trunk);
    if (st != FSDP_ERR_INVALID) return st;
    if (rank == 0) printf("refused: %s\n", fsdp_last_error_message());
    return fsdp_summon_cancel(trunk); /* what was written is dropped */
}

static fsdp_status run(fsdp_comm *world, void *arg)
{
    const int rank = fsdp_comm_rank(world);
    fsdp_module *model, *trunk;
    float before[NUMEL], after[NUMEL];
    (void)arg;
    FSDP_TRY(build(&model, &trunk, world));
    FSDP_TRY(look(model, rank == 0));
    FSDP_TRY(one_backward(model, world));
    FSDP_TRY(look(model, rank == 0));
    FSDP_TRY(fsdp_module_read_param(model, 0, before));
    FSDP_TRY(write(trunk, rank, true));
    FSDP_TRY(write(trunk, rank, false));
    FSDP_TRY(fsdp_module_read_param(model, 0, after));
    FSDP_FAIL_IF(fsdp_comm_size(world) > 1 && after[7] != 0.5f * before[7], FSDP_ERR_INTERNAL, "the second write did not count, or the first did");
    fsdp_module_destroy(model);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, run, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
