/* SPDX-License-Identifier: MIT
 *
 * Types below fp32, and slices that are kept elsewhere. The same linear regression as y = W x, with a forward and backward of its
 * own, on units that publish bf16, reduce in bf16, keep sums in bf16, or are kept in the host's memory and used on another device.
 *
 *   ./precision 2
 *
 * Masters are fp32 in each; so a summon and a checkpoint never see a rounded value. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 33, LEAVES = 8, STEPS = 300 };

typedef struct compute {
    const float *w;
    float *g;
    float beta;
    int leaf;
} compute;

/* One sample x: loss (w x - t x)^2 / 2, where t[i] = i / 10. */
static fsdp_status k_backward(const fsdp_kernel *k, const void *args)
{
    const compute *a = args;
    const float *w = fsdp_kernel_ptr(k, a->w);
    float *g = fsdp_kernel_ptr(k, a->g), x[N], error = 0;
    fsdp_philox_normal_fill(1, "x", (int64_t)a->leaf * N, N, x);
    for (int i = 0; i < N; i++) error += (w[i] - (float)i / 10) * x[i];
    for (int i = 0; i < N; i++) g[i] = error * x[i] + (a->beta != 0 ? g[i] : 0);
    return FSDP_OK;
}

static fsdp_status leaf(fsdp_unit *u, int number)
{
    fsdp_pass *pass;
    compute a = { .leaf = number };
    FSDP_TRY(fsdp_pass_begin(&pass, fsdp_unit_comm(u), FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_unit_begin_forward(u, pass));
    FSDP_TRY(fsdp_unit_end_forward(u, pass)); /* here forward and backward are one kernel */
    FSDP_TRY(fsdp_unit_begin_backward(u, pass));
    a.w = fsdp_unit_param(u, 0); /* fp32, of rounded values where the unit publishes bf16 */
    a.g = fsdp_unit_grad(u, 0, &a.beta);
    FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_backward, &a, sizeof(a)));
    FSDP_TRY(fsdp_unit_end_backward(u, pass));
    return fsdp_pass_end(pass);
}

static fsdp_status train(fsdp_comm *world, const char *what, fsdp_unit_opts opts)
{
    fsdp_unit *u;
    fsdp_optim *optim;
    float w[N], worst = 0;
    FSDP_TRY(fsdp_unit_create(&u, world, &(fsdp_param){ "w", 1, { N } }, 1, &opts));
    FSDP_TRY(fsdp_optim_create_sgd(&optim, (fsdp_unit_list){ &u, 1 }, &(fsdp_sgd_opts){ .lr = 0.02f }));
    for (int step = 0; step < STEPS; step++) {
        for (int i = fsdp_comm_rank(world); i < LEAVES; i += fsdp_comm_size(world)) FSDP_TRY(leaf(u, step * LEAVES + i));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .grad_scale = 1.0f / LEAVES }));
    }
    FSDP_TRY(fsdp_unit_read_param(u, 0, w)); /* a summon: masters, as they are */
    int exact = 0;
    for (int i = 0; i < N; i++) {
        float off = w[i] - (float)i / 10;
        if (off < 0) off = -off;
        if (off > worst) worst = off;
        exact += fsdp_bf16_to_f32(fsdp_bf16_from_f32(w[i])) != w[i]; /* a value that bf16 has not */
    }
    if (fsdp_comm_rank(world) == 0) printf("%-28s worst error %.2e, %d of %d weights have more bits than bf16\n", what, (double)worst, exact, N);
    FSDP_FAIL_IF(worst > 0.02f || exact < N / 2, FSDP_ERR_INTERNAL, "%s: it did not learn", what);
    fsdp_optim_destroy(optim);
    fsdp_unit_destroy(u);
    return FSDP_OK;
}

static fsdp_status run(fsdp_comm *world, void *arg)
{
    (void)arg;
    fsdp_device *guard; /* stands for a device whose memory the host may not touch */
    FSDP_TRY(fsdp_device_open(&guard, "guard"));
    FSDP_TRY(train(world, "fp32", (fsdp_unit_opts){ .name = "w" }));
    FSDP_TRY(train(world, "parameters bf16", (fsdp_unit_opts){ .name = "w", .param_dtype = FSDP_BF16 }));
    FSDP_TRY(train(world, "gradients bf16", (fsdp_unit_opts){ .name = "w", .reduce_dtype = FSDP_BF16 }));
    FSDP_TRY(train(world, "both, evaluated exactly", (fsdp_unit_opts){ .name = "w", .param_dtype = FSDP_BF16, .reduce_dtype = FSDP_BF16, .exact_eval = true }));
    FSDP_TRY(train(world, "sums of gradients bf16", (fsdp_unit_opts){ .name = "w", .grad_dtype = FSDP_BF16 }));
    FSDP_TRY(train(world, "fp32, offloaded to the host", (fsdp_unit_opts){ .name = "w", .compute_device = guard, .storage_device = fsdp_device_cpu() }));
    fsdp_device_close(guard);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, run, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
