/* SPDX-License-Identifier: MIT
 *
 * The project's origin: a trunk that is wrapped, summoned, initialised, run, trained or saved before, or after, the unit around it
 * exists. In no order is a unit made the root by what happened first. Each order trains three steps and must give what a plain
 * network, in double precision and with all ranks' rows, gives from the same weights; orders that begin with the same weights
 * give the same bits, on every transport and device.
 *
 * The orders are those of a comparison with PyTorch's FSDP1 and FSDP2 and FairScale, of which none passes all. */
#include "support/testing.h"
#include "support/tiny_gpt.h"

#include <math.h>
#include <unistd.h>

enum { IN = 8, OUT = 4, ROWS = 4, STEPS = 3, MAX_RANKS = 5, TRUNK = 2 * (IN * IN + IN), NUMEL = TRUNK + OUT * IN + OUT };

static const float lr = 0.1f;

/* ---- the plain network ---- */

typedef struct plain {
    double p[NUMEL], g[NUMEL];
} plain;

static void row_of(int rank, int row, float *x, int32_t *label)
{
    fsdp_philox_normal_fill(11, "x", ((int64_t)rank * ROWS + row) * IN, IN, x);
    *label = (rank * ROWS + row) % OUT;
}

/* Adds a row's gradient; returns its loss. Parameters: w1 [IN, IN], b1, w2 [IN, IN], b2, w3 [OUT, IN], b3. */
static double plain_row(plain *n, const float *x, int32_t label)
{
    const double *w1 = n->p, *b1 = w1 + IN * IN, *w2 = b1 + IN, *b2 = w2 + IN * IN, *w3 = b2 + IN, *b3 = w3 + OUT * IN;
    double *g1 = n->g, *gb1 = g1 + IN * IN, *g2 = gb1 + IN, *gb2 = g2 + IN * IN, *g3 = gb2 + IN, *gb3 = g3 + OUT * IN;
    double a[IN], h[IN], z[IN], y[OUT], total = 0, dz[IN] = { 0 }, dh[IN] = { 0 };
    for (int o = 0; o < IN; o++) {
        a[o] = b1[o];
        for (int i = 0; i < IN; i++) a[o] += w1[o * IN + i] * (double)x[i];
        h[o] = a[o] > 0 ? a[o] : 0;
    }
    for (int o = 0; o < IN; o++) {
        z[o] = b2[o];
        for (int i = 0; i < IN; i++) z[o] += w2[o * IN + i] * h[i];
    }
    for (int o = 0; o < OUT; o++) {
        y[o] = b3[o];
        for (int i = 0; i < IN; i++) y[o] += w3[o * IN + i] * z[i];
        total += exp(y[o]);
    }
    for (int o = 0; o < OUT; o++) {
        double d = exp(y[o]) / total - (o == label);
        gb3[o] += d;
        for (int i = 0; i < IN; i++) {
            g3[o * IN + i] += d * z[i];
            dz[i] += d * w3[o * IN + i];
        }
    }
    for (int o = 0; o < IN; o++) {
        gb2[o] += dz[o];
        for (int i = 0; i < IN; i++) {
            g2[o * IN + i] += dz[o] * h[i];
            dh[i] += dz[o] * w2[o * IN + i];
        }
    }
    for (int o = 0; o < IN; o++) {
        if (a[o] <= 0) continue;
        gb1[o] += dh[o];
        for (int i = 0; i < IN; i++) g1[o * IN + i] += dh[o] * (double)x[i];
    }
    return log(total) - y[label];
}

static double plain_step(plain *n, int ranks)
{
    double loss = 0;
    memset(n->g, 0, sizeof(n->g));
    for (int r = 0; r < ranks; r++)
        for (int k = 0; k < ROWS; k++) {
            float x[IN];
            int32_t label;
            row_of(r, k, x, &label);
            loss += plain_row(n, x, label);
        }
    for (int i = 0; i < NUMEL; i++) n->p[i] -= (double)lr * n->g[i] / (ranks * ROWS);
    return loss / (ranks * ROWS);
}

/* ---- orders ---- */

typedef struct net {
    fsdp_comm *comm;
    fsdp_device *device;
    fsdp_mode mode;
    fsdp_module *trunk, *head, *model;
    const char *scratch;
} net;

static fsdp_status build(net *n)
{
    fsdp_module *layer[3];
    FSDP_TRY(fsdp_linear(&layer[0], IN, IN, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_activation_module(&layer[1], FSDP_ACT_RELU));
    FSDP_TRY(fsdp_linear(&layer[2], IN, IN, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_sequential(&n->trunk, layer, 3));
    FSDP_TRY(fsdp_linear(&n->head, IN, OUT, &(fsdp_linear_opts){ .bias = true }));
    return fsdp_module_init_keyed(n->head, FSDP_INIT_KAIMING, 7); /* before it is wrapped: kept */
}

static fsdp_status wrap(net *n, fsdp_module **m, const char *name)
{
    return fsdp_wrap(m, *m, &(fsdp_wrap_opts){ .comm = n->comm, .name = name, .mode = n->mode, .compute_device = n->device });
}

static fsdp_status wrap_outer(net *n)
{
    FSDP_TRY(fsdp_sequential(&n->model, (fsdp_module *[]){ n->trunk, n->head }, 2));
    return wrap(n, &n->model, "model");
}

static fsdp_status keyed_trunk(net *n)
{
    return fsdp_module_init_keyed(n->trunk, FSDP_INIT_KAIMING, 1);
}

/* Every rank fills the trunk with values of its own, under a seed of its own. */
static fsdp_status init_by_rank(net *n)
{
    fsdp_rng rng;
    fsdp_rng_init(&rng, 100 + (uint64_t)fsdp_comm_rank(n->comm));
    FSDP_TRY(fsdp_summon_begin(n->trunk, &(fsdp_summon_opts){ .writeback = true }));
    FSDP_TRY(fsdp_module_init(n->trunk, FSDP_INIT_KAIMING, &rng));
    return fsdp_summon_end(n->trunk);
}

/* What ranks drew is kept by slices: each element is that of the rank that keeps it. */
static fsdp_status check_patchwork(net *n)
{
    const fsdp_module_param_info *p;
    int count, owners[MAX_RANKS] = { 0 };
    float got[IN * IN];
    FSDP_TRY(fsdp_module_params(n->trunk, &p, &count));
    int ranks = fsdp_comm_size(n->comm);
    fsdp_rng rng[MAX_RANKS];
    for (int r = 0; r < ranks; r++) fsdp_rng_init(&rng[r], 100 + (uint64_t)r);
    for (int i = 0; i < count; i++) {
        int64_t numel = fsdp_unit_param_numel(p[i].unit, p[i].index);
        float bound = (float)(1.0 / sqrt(IN));
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, got));
        for (int64_t e = 0; e < numel; e++) {
            int owner = -1;
            for (int r = 0; r < ranks; r++)
                if (bound * (2 * fsdp_rng_uniform(&rng[r]) - 1) == got[e]) owner = r;
            rank_check(owner >= 0);
            owners[owner]++;
        }
    }
    /* 144 elements in slices of whole cache lines: on up to 3 ranks everyone has some */
    for (int r = 0; r < ranks && ranks <= 3; r++) rank_check(owners[r] > 0);
    return FSDP_OK;
}

static fsdp_status run_trunk(net *n, bool eval, bool backward)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *labels, *loss;
    float v[ROWS * IN], out[ROWS * IN];
    int32_t l[ROWS];
    FSDP_TRY(fsdp_tape_begin_with(&tape, n->comm, &(fsdp_tape_opts){ .device = n->device, .eval = eval }));
    for (int k = 0; k < ROWS; k++) row_of(fsdp_comm_rank(n->comm), k, v + k * IN, &l[k]);
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, v, 2, (int64_t[]){ ROWS, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, l, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(n->trunk, tape, x, &y));
    FSDP_TRY(fsdp_tensor_to_f32(y, out));
    for (int i = 0; i < ROWS * IN; i++) rank_check(isfinite(out[i]) && fabsf(out[i]) < 100); /* whole weights, not slices */
    if (backward) {
        FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
        FSDP_TRY(fsdp_backward(tape, loss));
    }
    FSDP_TRY(fsdp_tape_end(tape));
    if (backward)
        for (int i = 0; i < fsdp_module_units(n->trunk).count; i++) FSDP_TRY(fsdp_unit_zero_grad(fsdp_module_units(n->trunk).units[i]));
    return FSDP_OK;
}

static fsdp_status o_literal(net *n)
{
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(init_by_rank(n));
    FSDP_TRY(wrap_outer(n));
    return check_patchwork(n);
}

static fsdp_status o_swapped(net *n)
{
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(wrap_outer(n));
    FSDP_TRY(init_by_rank(n));
    return check_patchwork(n);
}

static fsdp_status o_inner_fwd_first(net *n)
{
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(keyed_trunk(n));
    FSDP_TRY(run_trunk(n, true, false));
    return wrap_outer(n);
}

static fsdp_status o_inner_fwd_after(net *n)
{
    FSDP_TRY(keyed_trunk(n)); /* before wrapping */
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(wrap_outer(n));
    return run_trunk(n, false, false); /* a training forward that nobody goes back over */
}

static fsdp_status o_inner_train_first(net *n)
{
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(keyed_trunk(n));
    FSDP_TRY(run_trunk(n, false, true));
    return wrap_outer(n);
}

static fsdp_status o_outer_then_inner(net *n)
{
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(keyed_trunk(n));
    return wrap_outer(n); /* the trunk alone runs after the first step: see train() */
}

static fsdp_status o_outer_first(net *n) /* the trunk gets its unit when the unit around it is there, and has all parameters */
{
    FSDP_TRY(keyed_trunk(n));
    return wrap_outer(n);
}

static fsdp_status o_nested_summon(net *n)
{
    static const fsdp_summon_opts all = { .recurse = true, .writeback = true }, own = { .writeback = true };
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(keyed_trunk(n));
    FSDP_TRY(wrap_outer(n));
    FSDP_TRY(fsdp_summon_begin(n->model, &all));
    FSDP_TRY(fsdp_summon_begin(n->trunk, &own));
    FSDP_TRY(fsdp_summon_end(n->trunk));
    FSDP_TRY(fsdp_summon_end(n->model));
    FSDP_TRY(fsdp_summon_begin(n->trunk, &own));
    FSDP_TRY(fsdp_summon_begin(n->model, &all));
    FSDP_TRY(fsdp_summon_end(n->model));
    return fsdp_summon_end(n->trunk);
}

static fsdp_checkpoint *early[MAX_RANKS]; /* of each rank: registered before the outer unit exists */

static fsdp_status o_state_dict_early(net *n)
{
    const fsdp_module_param_info *p;
    int count;
    float w[IN * IN];
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(keyed_trunk(n));
    FSDP_TRY(fsdp_module_params(n->trunk, &p, &count));
    fsdp_checkpoint **c = &early[fsdp_comm_rank(n->comm)];
    FSDP_TRY(fsdp_checkpoint_create(c, n->comm));
    for (int i = 0; i < count; i++) {
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, w));
        FSDP_TRY(fsdp_checkpoint_add_param(*c, p[i].name, p[i].unit, p[i].index));
    }
    FSDP_TRY(fsdp_checkpoint_save(*c, n->scratch, 0, 0));
    return wrap_outer(n);
}

static fsdp_status o_no_device_arg(net *n)
{
    FSDP_TRY(keyed_trunk(n));
    FSDP_TRY(fsdp_wrap(&n->trunk, n->trunk, &(fsdp_wrap_opts){ .comm = n->comm })); /* no name, no device, no mode */
    FSDP_TRY(fsdp_sequential(&n->model, (fsdp_module *[]){ n->trunk, n->head }, 2));
    return fsdp_wrap(&n->model, n->model, &(fsdp_wrap_opts){ .comm = n->comm });
}

static fsdp_status o_wrapped_twice(net *n) /* the trunk, then what is around it, then both again */
{
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    FSDP_TRY(keyed_trunk(n));
    FSDP_TRY(wrap_outer(n));
    FSDP_TRY(wrap(n, &n->model, "again"));
    return run_trunk(n, true, false);
}

static const struct {
    const char *name;
    fsdp_status (*make)(net *n);
    bool by_rank, cpu_only;
} orders[] = {
    { "literal", o_literal, true, false },
    { "swapped", o_swapped, true, false },
    { "inner_fwd_first", o_inner_fwd_first, false, false },
    { "inner_fwd_after", o_inner_fwd_after, false, false },
    { "inner_train_first", o_inner_train_first, false, false },
    { "outer_then_inner", o_outer_then_inner, false, false },
    { "outer_first", o_outer_first, false, false },
    { "nested_summon", o_nested_summon, false, false },
    { "state_dict_early", o_state_dict_early, false, false },
    { "no_device_arg", o_no_device_arg, false, true },
    { "wrapped_twice", o_wrapped_twice, false, false },
};
enum { ORDERS = sizeof(orders) / sizeof(orders[0]) };

/* ---- training ---- */

typedef struct job {
    int order;
    const char *device;
    fsdp_mode mode;
    const char *scratch;
    float (*out)[NUMEL];
} job;

static fsdp_status read_all(fsdp_module *m, float *out)
{
    const fsdp_module_param_info *p;
    int n;
    FSDP_TRY(fsdp_module_params(m, &p, &n));
    rank_check(n == 6);
    for (int i = 0; i < n; i++) {
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, out));
        out += fsdp_unit_param_numel(p[i].unit, p[i].index);
    }
    return FSDP_OK;
}

static fsdp_status step(net *n, fsdp_optim *optim, double *mean)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *labels, *loss;
    float v[ROWS * IN];
    int32_t l[ROWS];
    for (int k = 0; k < ROWS; k++) row_of(fsdp_comm_rank(n->comm), k, v + k * IN, &l[k]);
    FSDP_TRY(fsdp_tape_begin_with(&tape, n->comm, &(fsdp_tape_opts){ .device = n->device }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, v, 2, (int64_t[]){ ROWS, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, l, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(n->model, tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_mean(n->comm, loss, mean));
    FSDP_TRY(fsdp_tape_end(tape));
    return fsdp_optim_step(optim, NULL);
}

/* The checkpoint that was registered early has what the parameters are now. */
static fsdp_status check_early(net *n, const float *now)
{
    fsdp_checkpoint *c = early[fsdp_comm_rank(n->comm)];
    fsdp_checkpoint_reader *r;
    char path[600];
    float w[IN * IN];
    FSDP_TRY(fsdp_checkpoint_save(c, n->scratch, STEPS, 0));
    snprintf(path, sizeof(path), "%s/step-%08d", n->scratch, STEPS);
    FSDP_TRY(fsdp_checkpoint_reader_open(&r, path));
    FSDP_TRY(fsdp_checkpoint_reader_read(r, "0.weight", 0, IN * IN, w));
    rank_check(memcmp(w, now, sizeof(w)) == 0);
    fsdp_checkpoint_reader_close(r);
    fsdp_checkpoint_destroy(c);
    early[fsdp_comm_rank(n->comm)] = NULL;
    return FSDP_OK;
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const job *j = arg;
    net n = { .comm = world, .mode = j->mode, .scratch = j->scratch };
    float now[NUMEL];
    plain *ref = calloc(1, sizeof(*ref));
    fsdp_optim *optim;
    FSDP_TRY(fsdp_device_open(&n.device, j->device));
    FSDP_TRY(build(&n));
    FSDP_TRY(orders[j->order].make(&n));
    FSDP_TRY(fsdp_optim_create_sgd(&optim, fsdp_module_units(n.model), &(fsdp_sgd_opts){ .lr = lr }));
    FSDP_TRY(read_all(n.model, now));
    for (int i = 0; i < NUMEL; i++) ref->p[i] = (double)now[i];
    for (int s = 0; s < STEPS; s++) {
        double got, want = plain_step(ref, fsdp_comm_size(world));
        FSDP_TRY(step(&n, optim, &got));
        if (!(fabs(got - want) <= 1e-6)) FSDP_FAIL(FSDP_ERR_INTERNAL, "%s: step %d: loss %.9g, plain %.9g", orders[j->order].name, s, got, want);
        if (orders[j->order].make == o_outer_then_inner && s == 0) FSDP_TRY(run_trunk(&n, true, false));
    }
    FSDP_TRY(read_all(n.model, now));
    for (int i = 0; i < NUMEL; i++)
        if (!(fabs((double)now[i] - ref->p[i]) <= 1e-6))
            FSDP_FAIL(FSDP_ERR_INTERNAL, "%s: parameter %d: %.9g, plain %.9g", orders[j->order].name, i, (double)now[i], ref->p[i]);
    if (orders[j->order].make == o_state_dict_early) FSDP_TRY(check_early(&n, now));
    if (fsdp_comm_rank(world) == 0) memcpy(*j->out, now, sizeof(now));
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(n.model);
    fsdp_device_close(n.device);
    free(ref);
    return FSDP_OK;
}

static char scratch[] = "/tmp/fsdp-seed-XXXXXX";

static void run(int ranks, const char *transport, bool threads, job *j)
{
    fsdp_launch_opts o = { .ranks = ranks, .transport = transport, .ranks_are_threads = threads, .threads = 1, .timeout_s = 60 };
    j->scratch = scratch;
    if (fsdp_launch(&o, train, j) != FSDP_OK)
        fail_msg("%s on %d ranks%s, %s, %s, %s: %s", orders[j->order].name, ranks, threads ? " (threads)" : "", transport, j->device, fsdp_mode_name(j->mode), fsdp_last_error());
}

static void test_orders(void **state)
{
    (void)state;
    static const char *const transports[] = { "shm", "copy" }, *const devices[] = { "cpu", "guard" };
    float (*want)[NUMEL] = shared_memory(sizeof(*want)), (*got)[NUMEL] = shared_memory(sizeof(*got));
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        bool have = false, have_patchwork = false;
        float patchwork[NUMEL] = { 0 };
        for (int k = 0; k < ORDERS; k++)
            for (int corner = 0; corner < 4; corner++) {
                int t = corner & 1, d = corner >> 1;
                if (orders[k].cpu_only && d == 1) continue;
                if ((ranks == 3 || ranks == 4) && corner != (k + ranks) % 4) continue; /* one corner of these */
                job j = { .order = k, .device = devices[d], .mode = (fsdp_mode)((k + ranks + corner) % 4), .out = got };
                if (orders[k].by_rank && ranks > 1) j.mode = FSDP_MODE_FULL;
                run(ranks, ranks == 1 && t == 0 ? "self" : transports[t], (k + ranks + corner) % 5 == 0, &j);
                if (orders[k].by_rank) { /* the same seeds: the same patchwork */
                    if (have_patchwork) assert_memory_equal(patchwork, *got, sizeof(patchwork));
                    memcpy(patchwork, *got, sizeof(patchwork));
                    have_patchwork = true;
                    continue;
                }
                if (!have) memcpy(*want, *got, sizeof(*want));
                have = true;
                if (memcmp(*want, *got, sizeof(*want)) != 0)
                    fail_msg("%s on %d ranks, %s, %s: other bits than %s", orders[k].name, ranks, transports[t], devices[d], orders[2].name);
            }
    }
}

/* Whatever ranks draw, in mode none they end up with the same: the patchwork of the other modes. */
static void test_patchwork_in_every_mode(void **state)
{
    (void)state;
    float (*want)[NUMEL] = shared_memory(sizeof(*want)), (*got)[NUMEL] = shared_memory(sizeof(*got));
    for (int m = FSDP_MODE_FULL; m <= FSDP_MODE_NONE; m++)
        for (int order = 0; order < 2; order++) {
            job j = { .order = order, .device = m % 2 ? "guard" : "cpu", .mode = (fsdp_mode)m, .out = m == 0 && order == 0 ? want : got };
            run(3, m < 2 ? "copy" : "shm", false, &j);
            if (j.out == got) assert_memory_equal(*want, *got, sizeof(*want));
        }
}

/* ---- tied weights ---- */

/* In one unit: the embedding is used at the bottom and at the top, and is one parameter. */
static fsdp_status tied(fsdp_comm *world, void *arg)
{
    tiny_gpt t;
    double loss;
    float (*out)[TINY_NUMEL] = arg, all[TINY_NUMEL];
    FSDP_TRY(tiny_gpt_create(&t, world, &(tiny_gpt_opts){ 0 }));
    rank_check(fsdp_module_numel(fsdp_model_module(t.model)) == TINY_NUMEL);
    for (int s = 0; s < 2; s++) FSDP_TRY(tiny_gpt_step(&t, s, 6, &loss, NULL));
    FSDP_TRY(tiny_gpt_read(&t, all));
    if (fsdp_comm_rank(world) == 0) memcpy(*out, all, sizeof(all));
    tiny_gpt_destroy(&t);
    return FSDP_OK;
}

static void test_tied_in_one_unit(void **state)
{
    (void)state;
    float (*one)[TINY_NUMEL] = shared_memory(sizeof(*one)), (*more)[TINY_NUMEL] = shared_memory(sizeof(*more));
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 1 }, tied, one));
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 3, .transport = "copy" }, tied, more));
    assert_memory_equal(*one, *more, sizeof(*one));
}

/* Across two units a parameter is shared, not a module, which has one parent (share_test.c has every way of wrapping). */
static void test_tied_in_two_units(void **state)
{
    (void)state;
    fsdp_module *table, *bottom, *top;
    assert_ok(fsdp_embedding(&table, 13, 6));
    assert_ok(fsdp_sequential(&bottom, &table, 1));
    assert_fails(fsdp_sequential(&top, &table, 1), FSDP_ERR_INVALID, "(embedding) is in another module already");
    assert_ok(fsdp_linear(&top, 6, 13, NULL));
    assert_ok(fsdp_module_share_param(top, 0, table, 0));
    assert_ptr_equal(fsdp_module_param(top, 0), fsdp_module_param(table, 0));
    fsdp_module_destroy(bottom);
    fsdp_module_destroy(top);
}

/* ---- an error of one rank ---- */

#define assert_fails_here(expr, text) rank_check((expr) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), (text)) != NULL)

static fsdp_status micro_batch(net *n, const int32_t *l, fsdp_tape **tape, fsdp_tensor **loss)
{
    fsdp_tensor *x, *y, *labels;
    float v[ROWS * IN] = { 1 };
    double sum, count;
    FSDP_TRY(fsdp_tape_begin_with(tape, n->comm, &(fsdp_tape_opts){ .device = n->device }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, *tape, v, 2, (int64_t[]){ ROWS, IN }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, *tape, l, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(n->model, *tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(*tape, y, labels, loss));
    FSDP_TRY(fsdp_backward(*tape, *loss));
    return fsdp_loss_read(*loss, &sum, &count);
}

/* Rank 1 has a label that does not exist. It is told so; the others that ranks differ, wherever they are by then. A reset mends
 * it, before or after the tape is cancelled, and training goes on as if the micro-batch had not been. */
static fsdp_status one_bad_label(fsdp_comm *world, void *arg)
{
    int rank = fsdp_comm_rank(world);
    for (int cancel_first = 0; cancel_first < 2; cancel_first++) {
        net n = { .comm = world };
        fsdp_tape *tape = NULL;
        fsdp_tensor *loss = NULL;
        float before[NUMEL], after[NUMEL];
        int32_t l[ROWS] = { 0, 1, rank == 1 ? 77 : 2, 3 };
        double mean;
        fsdp_optim *optim;
        FSDP_TRY(fsdp_device_open(&n.device, arg));
        FSDP_TRY(build(&n));
        FSDP_TRY(o_inner_fwd_first(&n));
        FSDP_TRY(fsdp_optim_create_sgd(&optim, fsdp_module_units(n.model), &(fsdp_sgd_opts){ .lr = lr }));
        FSDP_TRY(read_all(n.model, before));
        FSDP_TRY(fsdp_comm_barrier(world));
        fsdp_status st = micro_batch(&n, l, &tape, &loss);
        if (rank == 1) {
            rank_check(st == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "77") != NULL);
        } else {
            if (st == FSDP_OK) {
                st = fsdp_tape_end(tape);
                tape = NULL;
            }
            rank_check(st == FSDP_ERR_COMM);
        }
        if (cancel_first) {
            (void)!fsdp_tape_cancel(tape);
            tape = NULL;
        }
        FSDP_TRY(fsdp_comm_reset(world));
        if (tape != NULL && loss != NULL) assert_fails_here(fsdp_backward(tape, loss), "fsdp_comm_reset");
        FSDP_TRY(fsdp_tape_end(tape));
        FSDP_TRY(read_all(n.model, after));
        rank_check(memcmp(before, after, sizeof(before)) == 0);
        FSDP_TRY(step(&n, optim, &mean));
        rank_check(isfinite(mean));
        fsdp_optim_destroy(optim);
        fsdp_module_destroy(n.model);
        fsdp_device_close(n.device);
    }
    return FSDP_OK;
}

static void test_error_of_one_rank(void **state)
{
    (void)state;
    for (int t = 0; t < 4; t++) {
        fsdp_launch_opts o = { .ranks = 3, .transport = t & 1 ? "copy" : "shm", .ranks_are_threads = t & 2, .threads = 1, .timeout_s = 20 };
        assert_ok(fsdp_launch(&o, one_bad_label, (void *)(uintptr_t) "cpu"));
    }
}

static int make_scratch(void **state)
{
    (void)state;
    return mkdtemp(scratch) != NULL ? 0 : -1;
}

static int remove_scratch(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", scratch);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_orders),
        cmocka_unit_test(test_patchwork_in_every_mode),
        cmocka_unit_test(test_tied_in_one_unit),
        cmocka_unit_test(test_tied_in_two_units),
        cmocka_unit_test(test_error_of_one_rank),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
