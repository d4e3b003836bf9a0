/* SPDX-License-Identifier: MIT
 *
 * Offload: what a rank keeps between uses lies in the host's memory, and what computes is another device: slices of parameters,
 * sums of gradients, optimizer state, each for itself or all. The same linear regression as y = W x each time, and the same bits.
 *
 *   ./offload 2
 *
 * Parameters are copied over when they are gathered (ahead of their turn, as fsdp_unit_opts.prefetch says), gradients when they are
 * reduced, optimizer state in the step, a unit's while another's is updated. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 33, LEAVES = 6, STEPS = 40 };
enum { PARAMS = 1, GRADS = 2, OPTIM = 4 };

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
    FSDP_TRY(fsdp_unit_end_forward(u, pass));
    FSDP_TRY(fsdp_unit_begin_backward(u, pass));
    a.w = fsdp_unit_param(u, 0); /* on the device, wherever the slices are */
    a.g = fsdp_unit_grad(u, 0, &a.beta);
    FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_backward, &a, sizeof(a)));
    FSDP_TRY(fsdp_unit_end_backward(u, pass));
    return fsdp_pass_end(pass);
}

static fsdp_status train(fsdp_comm *world, fsdp_device *device, unsigned offload, float *w)
{
    fsdp_unit *u;
    fsdp_optim *optim;
    fsdp_device *host = fsdp_device_cpu();
    fsdp_unit_opts opts = { .name = "w", .compute_device = device };
    opts.storage_device = offload & PARAMS ? host : device;
    opts.grad_device = offload & GRADS ? host : device;
    FSDP_TRY(fsdp_unit_create(&u, world, &(fsdp_param){ "w", 1, { N } }, 1, &opts));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, (fsdp_unit_list){ &u, 1 }, &(fsdp_adamw_opts){ .lr = 0.1f, .state_device = offload & OPTIM ? host : device }));
    for (int step = 0; step < STEPS; step++) {
        for (int i = fsdp_comm_rank(world); i < LEAVES; i += fsdp_comm_size(world)) FSDP_TRY(leaf(u, step * LEAVES + i));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .grad_scale = 1.0f / LEAVES }));
    }
    FSDP_TRY(fsdp_unit_read_param(u, 0, w));
    fsdp_optim_destroy(optim);
    fsdp_unit_destroy(u);
    return FSDP_OK;
}

static fsdp_status run(fsdp_comm *world, void *arg)
{
    static const struct {
        const char *what;
        unsigned offload;
    } choice[] = { { "parameters", PARAMS }, { "gradients", GRADS }, { "optimizer state", OPTIM }, { "gradients, optimizer state", GRADS | OPTIM },
                   { "all of it", PARAMS | GRADS | OPTIM } };
    fsdp_device *device; /* stands for one whose memory the host may not touch */
    float want[N], w[N];
    (void)arg;
    FSDP_TRY(fsdp_device_open(&device, "guard"));
    FSDP_TRY(train(world, device, 0, want));
    if (fsdp_comm_rank(world) == 0) printf("%-30s w[7] = %.9g\n", "all on the device", (double)want[7]);
    for (size_t i = 0; i < sizeof(choice) / sizeof(choice[0]); i++) {
        FSDP_TRY(train(world, device, choice[i].offload, w));
        if (fsdp_comm_rank(world) == 0) printf("%-30s w[7] = %.9g\n", choice[i].what, (double)w[7]);
        FSDP_FAIL_IF(memcmp(w, want, sizeof(w)) != 0, FSDP_ERR_INTERNAL, "%s in the host's memory: other bits", choice[i].what);
    }
    fsdp_device_close(device);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, run, NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
