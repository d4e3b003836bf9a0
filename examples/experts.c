/* SPDX-License-Identifier: MIT
 *
 * Experts on sub-communicators: a trunk is sharded over all ranks, each of two experts over the ranks that use it, and gradients
 * are clipped by one norm over both, which the whole world takes together.
 *
 *   ./experts 4 [P]         ranks 0 and 2 share expert 0, ranks 1 and 3 expert 1; clips by the P-norm (2; inf for the largest)
 *
 * Row i belongs to expert i % 2, and goes to rank i % R: so a rank's rows are its expert's. Prints the same digits on 1 rank (which
 * has both experts) and on any even number of ranks that divides 24. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 7, OUT = 5, ROWS = 24, STEPS = 40, EXPERTS = 2 };

typedef struct net {
    fsdp_comm *world, *sub; /* sub: of the ranks that share an expert */
    fsdp_unit *trunk, *expert[EXPERTS];
    fsdp_unit *mine[1 + EXPERTS]; /* those that this rank has */
    int count;
} net;

static void init(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = 0.2f * fsdp_philox_normal(1, name, i);
}

static fsdp_status make_unit(net *n, fsdp_unit **out, fsdp_comm *comm, const char *name)
{
    const fsdp_param w = { .name = name, .ndim = 2, .shape = { OUT, IN } };
    FSDP_TRY(fsdp_unit_create(out, comm, &w, 1, &(fsdp_unit_opts){ .name = name }));
    n->mine[n->count++] = *out;
    return fsdp_unit_init(*out, init, NULL);
}

static fsdp_status make_net(net *n, fsdp_comm *world)
{
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    FSDP_FAIL_IF(size > 1 && (size % 2 != 0 || ROWS % size != 0), FSDP_ERR_INVALID, "%d ranks: 1, or an even number that divides %d", size, ROWS);
    *n = (net){ .world = world };
    FSDP_TRY(fsdp_comm_split(world, size > 1 ? rank % EXPERTS : 0, 0, &n->sub));
    FSDP_TRY(make_unit(n, &n->trunk, world, "trunk"));
    for (int e = 0; e < EXPERTS; e++)
        if (size == 1 || rank % EXPERTS == e) FSDP_TRY(make_unit(n, &n->expert[e], n->sub, e == 0 ? "expert 0" : "expert 1"));
    return FSDP_OK;
}

/* y += W x */
static fsdp_status forward(fsdp_unit *u, fsdp_pass *pass, const float *x, float *y)
{
    FSDP_TRY(fsdp_unit_begin_forward(u, pass));
    const float *w = fsdp_unit_param(u, 0);
    for (int o = 0; o < OUT; o++)
        for (int i = 0; i < IN; i++) y[o] += w[o * IN + i] * x[i];
    return fsdp_unit_end_forward(u, pass);
}

static fsdp_status backward(fsdp_unit *u, fsdp_pass *pass, const float *x, const float *dy)
{
    float beta;
    FSDP_TRY(fsdp_unit_begin_backward(u, pass));
    float *dw = fsdp_unit_grad(u, 0, &beta);
    for (int k = 0; k < OUT * IN; k++) dw[k] = (beta != 0 ? dw[k] : 0) + dy[k / IN] * x[k % IN];
    return fsdp_unit_end_backward(u, pass);
}

/* A unit is used in a pass of its own communicator: each row has two. */
static fsdp_status leaf(net *n, int row, double *loss)
{
    fsdp_pass *all, *group;
    fsdp_unit *expert = n->expert[row % EXPERTS];
    float x[IN], y[OUT] = { 0 };
    fsdp_philox_normal_fill(2, "x", (int64_t)row * IN, IN, x);
    FSDP_TRY(fsdp_pass_begin(&all, n->world, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_pass_begin(&group, n->sub, FSDP_PASS_TRAIN));
    FSDP_TRY(forward(n->trunk, all, x, y));
    FSDP_TRY(forward(expert, group, x, y));
    for (int o = 0; o < OUT; o++) {
        y[o] -= (row % EXPERTS == 0 ? 1.0f : -1.0f) * x[o]; /* what the experts do differently */
        *loss += 0.5 * (double)y[o] * (double)y[o];
    }
    FSDP_TRY(backward(expert, group, x, y));
    FSDP_TRY(backward(n->trunk, all, x, y));
    fsdp_pass_add_weight(all, 1); /* of one of its passes: a row counts once */
    FSDP_TRY(fsdp_pass_end(group));
    return fsdp_pass_end(all);
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    net n;
    fsdp_optim *optim;
    FSDP_TRY(make_net(&n, world));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, (fsdp_unit_list){ n.mine, n.count }, &(fsdp_adamw_opts){ .lr = 2e-2f }));
    for (int step = 0; step < STEPS; step++) {
        double loss[ROWS] = { 0 }, mean = 0, norm;
        for (int row = fsdp_comm_rank(world); row < ROWS; row += fsdp_comm_size(world)) FSDP_TRY(leaf(&n, row, &loss[row]));
        FSDP_TRY(fsdp_comm_sum_exact(world, loss, ROWS));
        for (int row = 0; row < ROWS; row++) mean += loss[row] / ROWS;
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 0.5f, .clip_p = *(const double *)arg, .over = world, .norm = &norm }));
        if (fsdp_comm_rank(world) == 0 && (step == 0 || step == STEPS - 1)) printf("step %d loss %.17g norm %.17g\n", step, mean, norm);
    }
    fsdp_optim_destroy(optim);
    for (int i = n.count - 1; i >= 0; i--) fsdp_unit_destroy(n.mine[i]);
    fsdp_comm_destroy(n.sub);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    double p = argc > 2 ? strtod(argv[2], NULL) : 2;
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, train, &p);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
