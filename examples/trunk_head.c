/* SPDX-License-Identifier: MIT
 *
 * The program that the project comes from: a trunk is wrapped and, summoned under a seed of the rank's own, initialised;
 * only then are trunk and head wrapped together, and trained. Neither order nor seed may matter to FSDP.
 *
 *   ./trunk_head 3 [keyed]       3 ranks; keyed: the same initial values on every rank and number of ranks
 */
#include <fsdp/fsdp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 6, CLASSES = 3, BATCH = 4, STEPS = 20 };

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const bool keyed = arg != NULL;
    const int rank = fsdp_comm_rank(world);
    const fsdp_wrap_opts opts = { .comm = world, .storage_device = fsdp_device_cpu(), .compute_device = fsdp_device_cpu() };
    fsdp_module *layers[2], *trunk, *head, *both[2], *body, *model;

    /* the trunk first: wrapped, summoned alone, initialised */
    FSDP_TRY(fsdp_linear(&layers[0], WIDTH, 2 * WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_linear(&layers[1], 2 * WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_sequential(&trunk, layers, 2));
    FSDP_TRY(fsdp_wrap(&trunk, trunk, &opts));          /* takes the module; gives a module */
    fsdp_rng rng;
    fsdp_rng_init(&rng, keyed ? 1 : 100 + (uint64_t)rank);
    FSDP_TRY(fsdp_summon_begin(trunk, &(fsdp_summon_opts){ .recurse = true, .writeback = true }));
    FSDP_TRY(fsdp_module_init(trunk, FSDP_INIT_KAIMING, &rng));
    FSDP_TRY(fsdp_summon_end(trunk));

    /* then the head, and the root around both */
    FSDP_TRY(fsdp_linear(&head, WIDTH, CLASSES, &(fsdp_linear_opts){ .bias = true }));
    fsdp_rng_init(&rng, 2);
    FSDP_TRY(fsdp_module_init(head, FSDP_INIT_KAIMING, &rng));   /* before wrapping: the values are kept */
    both[0] = trunk;
    both[1] = head;
    FSDP_TRY(fsdp_sequential(&body, both, 2));
    FSDP_TRY(fsdp_wrap(&model, body, &opts));

    fsdp_optim *optim;
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 1e-2f }));
    for (int step = 0; step < STEPS; step++) {
        float x[BATCH * WIDTH];
        int32_t labels[BATCH];
        for (int i = 0; i < BATCH; i++) {
            labels[i] = (rank * BATCH + i) % CLASSES;
            for (int k = 0; k < WIDTH; k++)
                x[i * WIDTH + k] = fsdp_philox_normal(3, "x", ((int64_t)rank * BATCH + i) * WIDTH + k) + (float)(k % CLASSES == labels[i]);
        }
        fsdp_tape *tape;
        fsdp_tensor *input, *target, *scores, *loss;
        FSDP_TRY(fsdp_tape_begin(&tape, world));
        FSDP_TRY(fsdp_tensor_from_f32(&input, tape, x, 2, (int64_t[]){ BATCH, WIDTH }));
        FSDP_TRY(fsdp_tensor_from_i32(&target, tape, labels, 1, (int64_t[]){ BATCH }));
        FSDP_TRY(fsdp_forward(model, tape, input, &scores));
        FSDP_TRY(fsdp_op_cross_entropy(tape, scores, target, &loss));   /* the sum over rows, and how many they are */
        FSDP_TRY(fsdp_backward(tape, loss));
        double mean;
        FSDP_TRY(fsdp_loss_mean(world, loss, &mean));                   /* over all ranks' rows */
        FSDP_TRY(fsdp_tape_end(tape));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1.0f }));
        if (rank == 0 && (step == 0 || step == STEPS - 1)) printf("step %d loss %.9g\n", step, mean);
    }
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(model);                          /* and all that it took */
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train,
                                 argc > 2 && strcmp(argv[2], "keyed") == 0 ? "keyed" : NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
