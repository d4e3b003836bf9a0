/* SPDX-License-Identifier: MIT
 *
 * Whole accumulation: of a step's micro-batches only the last is reduced; until then gradients stay with each rank, whole.
 * Fewer reductions, for the memory of all gradients. The core alone; a tape does it by fsdp_tape_opts.no_sync. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 100, MICRO_BATCHES = 4, STEPS = 30 };

static void init(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = fsdp_philox_normal(1, name, i);
}

/* The loss of a sample x is |w - x|^2 / 2: w becomes the mean of all samples. */
static fsdp_status micro_batch(fsdp_unit *unit, int step, int j, bool sync)
{
    fsdp_comm *comm = fsdp_unit_comm(unit);
    int64_t sample = ((int64_t)step * fsdp_comm_size(comm) + fsdp_comm_rank(comm)) * MICRO_BATCHES + j;
    fsdp_pass *pass;
    float beta;
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_pass_set_sync(pass, sync)); /* any time before the first backward: a pipeline knows its last one only then */
    fsdp_pass_add_weight(pass, 1);
    FSDP_TRY(fsdp_unit_begin_forward(unit, pass));
    FSDP_TRY(fsdp_unit_end_forward(unit, pass));
    FSDP_TRY(fsdp_unit_begin_backward(unit, pass));
    const float *w = fsdp_unit_param(unit, 0);
    float *dw = fsdp_unit_grad(unit, 0, &beta);
    for (int i = 0; i < N; i++) dw[i] = (beta != 0 ? dw[i] : 0) + w[i] - (3 + 0.1f * fsdp_philox_normal(2, "x", sample * N + i));
    FSDP_TRY(fsdp_unit_end_backward(unit, pass));
    return fsdp_pass_end(pass);
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    (void)arg;
    fsdp_unit *unit;
    fsdp_optim *optim;
    FSDP_TRY(fsdp_unit_create(&unit, comm, &(fsdp_param){ "w", 1, { N } }, 1, &(fsdp_unit_opts){ .name = "unit" }));
    FSDP_TRY(fsdp_unit_init(unit, init, NULL));
    FSDP_TRY(fsdp_optim_create_sgd(&optim, (fsdp_unit_list){ &unit, 1 }, &(fsdp_sgd_opts){ .lr = 0.3f }));
    fsdp_comm_stats before, after;
    fsdp_comm_get_stats(comm, &before);
    for (int step = 0; step < STEPS; step++) {
        for (int j = 0; j < MICRO_BATCHES; j++) {
            FSDP_TRY(micro_batch(unit, step, j, j == MICRO_BATCHES - 1));
            if (step > 0 || j != 1 || fsdp_comm_rank(comm) != 0) continue;
            float own[N]; /* what is pending can be looked at, without asking anybody */
            FSDP_TRY(fsdp_unit_read_pending(unit, 0, FSDP_PENDING_OWN, NULL, NULL, own));
            printf("after two micro-batches rank 0 has %.3f for the first element, to be sent\n", (double)own[0]);
        }
        FSDP_TRY(fsdp_optim_step(optim, NULL)); /* what no pass with sync had taken along would go now */
    }
    fsdp_comm_get_stats(comm, &after);
    float w[N], mean = 0;
    FSDP_TRY(fsdp_unit_read_param(unit, 0, w));
    for (int i = 0; i < N; i++) mean += w[i] / N;
    if (fsdp_comm_rank(comm) == 0)
        printf("%d steps of %d micro-batches, %llu reductions: the mean is %.3f\n", STEPS, MICRO_BATCHES, (unsigned long long)(after.reduces - before.reduces), (double)mean);
    FSDP_FAIL_IF(mean < 2.9f || mean > 3.1f, FSDP_ERR_INTERNAL, "the mean is %g", (double)mean);
    fsdp_optim_destroy(optim);
    fsdp_unit_destroy(unit);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
