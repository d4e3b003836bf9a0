/* SPDX-License-Identifier: MIT
 *
 * Gathering by hand, without the network library: a cap on whole parameters, lists of what to gather ahead, and a table that stays whole
 * over several passes. On a transport that copies, as over a network.
 *
 *     explicit_prefetch [RANKS] */
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 4, NUMEL = 1000, BYTES = 4 * NUMEL + 96 }; /* with padding: fsdp_unit_info.bytes_whole is at most that */

static void init(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = fsdp_philox_uniform(1, name, i) - 0.5f;
}

/* A pass over the layers; the sum of the first parameters stands for a network's work. */
static fsdp_status pass_over(fsdp_unit **layer, fsdp_unit *table, fsdp_comm *comm, float *sum)
{
    fsdp_pass *pass;
    *sum = fsdp_unit_param(table, 0)[7]; /* whole, though no forward of it is open */
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_unit_begin_forward(layer[i], pass)); /* the next one is gathered meanwhile */
        *sum += fsdp_unit_param(layer[i], 0)[0];
        FSDP_TRY(fsdp_unit_end_forward(layer[i], pass));
    }
    for (int i = LAYERS - 1; i >= 0; i--) {
        FSDP_TRY(fsdp_unit_begin_backward(layer[i], pass));
        float beta, *g = fsdp_unit_grad(layer[i], 0, &beta);
        for (int k = 0; k < NUMEL; k++) g[k] = 0.01f * fsdp_unit_param(layer[i], 0)[k];
        FSDP_TRY(fsdp_unit_end_backward(layer[i], pass));
    }
    fsdp_pass_add_weight(pass, 1);
    return fsdp_pass_end(pass);
}

static fsdp_status run(fsdp_comm *world, void *arg)
{
    (void)arg;
    fsdp_unit *unit[LAYERS + 1], *table;
    const fsdp_param w = { .name = "w", .ndim = 1, .shape = { NUMEL } };
    float sum = 0;
    int64_t now, most;
    for (int i = 0; i <= LAYERS; i++) {
        FSDP_TRY(fsdp_unit_create(&unit[i], world, &w, 1, &(fsdp_unit_opts){ .name = i < LAYERS ? "layer" : "table" }));
        FSDP_TRY(fsdp_unit_init(unit[i], init, NULL));
    }
    table = unit[LAYERS];
    FSDP_TRY(fsdp_comm_set_max_unsharded(world, 3 * BYTES)); /* the table, the layer in use, and one ahead */
    for (int i = 0; i < LAYERS; i++) {
        fsdp_unit_list next = { &unit[i + 1], i + 1 < LAYERS }, previous = { i > 0 ? &unit[i - 1] : NULL, i > 0 };
        FSDP_TRY(fsdp_unit_set_prefetch(unit[i], &next, &previous));
    }
    for (int step = 0; step < 3; step++) {
        FSDP_TRY(fsdp_unit_unshard(table));
        FSDP_TRY(fsdp_unit_prefetch(unit[0])); /* early, as one would while data is read */
        for (int micro_batch = 0; micro_batch < 2; micro_batch++) FSDP_TRY(pass_over(unit, table, world, &sum));
        FSDP_TRY(fsdp_unit_reshard(table));
        fsdp_optim *sgd;
        FSDP_TRY(fsdp_optim_create_sgd(&sgd, (fsdp_unit_list){ unit, LAYERS }, &(fsdp_sgd_opts){ .lr = 0.1f }));
        FSDP_TRY(fsdp_optim_step(sgd, NULL));
        fsdp_optim_destroy(sgd);
        FSDP_TRY(fsdp_comm_get_unsharded(world, &now, &most));
        if (fsdp_comm_rank(world) == 0) printf("step %d: %.6f; whole at a time: at most %lld bytes, now %lld\n", step, (double)sum, (long long)most, (long long)now);
        FSDP_FAIL_IF(most > 3 * BYTES || now != 0, FSDP_ERR_INTERNAL, "%lld bytes were whole, %lld are", (long long)most, (long long)now);
    }
    for (int i = 0; i <= LAYERS; i++) fsdp_unit_destroy(unit[i]);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_launch_opts opts = { .ranks = argc > 1 ? atoi(argv[1]) : 3, .transport = "copy", .threads = 1 };
    if (fsdp_launch(&opts, run, NULL) == FSDP_OK) return 0;
    fprintf(stderr, "%s\n", fsdp_last_error());
    return 1;
}
