/* SPDX-License-Identifier: MIT
 *
 * A reduction of one's own: signSGD with majority vote (Bernstein et al., 2018). Ranks vote on each element with the sign of their
 * gradient, and its owner keeps the outcome, where the library would keep the sum. A second hook drops, before the vote, what
 * is small beside the largest of its parameter: it abstains.
 *
 *   ./sign_votes 4
 *
 * The outcome is that of as many voters as there are ranks: so, unlike sums, it depends on them. */
#include <fsdp/fsdp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 13, OUT = 6, ROWS = 24, STEPS = 60 };

/* On every rank, its own whole gradient. */
static fsdp_status abstain(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg)
{
    (void)k;
    const float share = *(const float *)arg;
    for (int p = 0; p < count; p++) {
        float *g = grad + part[p].state_offset, most = 0;
        for (int64_t j = 0; j < part[p].numel; j++) most = fmaxf(most, fabsf(g[j]));
        for (int64_t j = 0; j < part[p].numel; j++)
            if (fabsf(g[j]) < share * most) g[j] = 0;
    }
    return FSDP_OK;
}

/* On the owner of a slice, all ranks' gradients of it. */
static fsdp_status vote(const fsdp_kernel *k, const fsdp_reduction *r, void *arg)
{
    (void)k;
    (void)arg;
    for (int p = 0; p < r->count; p++)
        for (int64_t j = 0; j < r->part[p].numel; j++) {
            int64_t i = r->part[p].state_offset + j;
            int votes = 0;
            for (int rank = 0; rank < r->ranks; rank++) votes += (r->piece[rank][i] > 0) - (r->piece[rank][i] < 0);
            r->out[i] = (r->base != NULL ? r->base[i] : 0) + (float)((votes > 0) - (votes < 0));
        }
    return FSDP_OK;
}

static void init(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = 0.1f * fsdp_philox_normal(1, name, i);
}

/* One layer that learns to copy its first inputs. */
static fsdp_status leaf(fsdp_unit *layer, int row, double *loss)
{
    fsdp_pass *pass;
    float x[IN], dy[OUT], beta;
    FSDP_TRY(fsdp_pass_begin(&pass, fsdp_unit_comm(layer), FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_unit_begin_forward(layer, pass));
    const float *w = fsdp_unit_param(layer, 0);
    fsdp_philox_normal_fill(2, "x", (int64_t)row * IN, IN, x);
    for (int o = 0; o < OUT; o++) {
        dy[o] = -x[o];
        for (int i = 0; i < IN; i++) dy[o] += w[o * IN + i] * x[i];
        *loss += 0.5 * (double)dy[o] * (double)dy[o];
    }
    FSDP_TRY(fsdp_unit_end_forward(layer, pass));
    FSDP_TRY(fsdp_unit_begin_backward(layer, pass));
    float *dw = fsdp_unit_grad(layer, 0, &beta);
    for (int k = 0; k < OUT * IN; k++) dw[k] = dy[k / IN] * x[k % IN];
    FSDP_TRY(fsdp_unit_end_backward(layer, pass));
    return fsdp_pass_end(pass);
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    (void)arg;
    const fsdp_param w = { .name = "w", .ndim = 2, .shape = { OUT, IN } };
    float share = 0.05f;
    fsdp_unit *layer;
    fsdp_optim *optim;
    FSDP_TRY(fsdp_unit_create(&layer, world, &w, 1, &(fsdp_unit_opts){ .name = "layer" }));
    FSDP_TRY(fsdp_unit_init(layer, init, NULL));
    FSDP_TRY(fsdp_unit_set_grad_hooks(layer, &(fsdp_grad_hooks){ .post = abstain, .reduce = vote, .arg = &share }));
    FSDP_TRY(fsdp_optim_create_sgd(&optim, (fsdp_unit_list){ &layer, 1 }, &(fsdp_sgd_opts){ .lr = 0.002f }));
    for (int step = 0; step < STEPS; step++) {
        double loss = 0;
        for (int row = fsdp_comm_rank(world); row < ROWS; row += fsdp_comm_size(world)) FSDP_TRY(leaf(layer, row, &loss));
        FSDP_TRY(fsdp_comm_sum_exact(world, &loss, 1));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .grad_scale = 1 }));
        if (fsdp_comm_rank(world) == 0 && (step == 0 || step == STEPS - 1)) printf("step %d loss %.17g\n", step, loss / ROWS);
    }
    fsdp_optim_destroy(optim);
    fsdp_unit_destroy(layer);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
