/* SPDX-License-Identifier: MIT
 *
 * Summons of modules: of one alone or with all that is inside, nested, from an inner one, before the unit around it exists; to the
 * host, for rank 0, with gradients; and the program that this library comes from, in the ways it may be written: each gives the
 * same trunk, and training goes on from it, whichever unit was first. */
#include "support/logged.h"
#include "support/ranks.h"

#include "base/error.h"
#include "nn/module.h"
#include "shard/unit.h"

#include <math.h>

enum { WIDTH = 6, OUT = 3, ROWS = 2, TRUNK = 2 * (WIDTH * WIDTH + WIDTH), NUMEL = TRUNK + OUT * WIDTH + OUT, PARAMS = 6 };

typedef struct net {
    fsdp_comm *comm;
    fsdp_device *dev;
    int rank, size;
    fsdp_mode mode;
    fsdp_module *layer[2], *trunk, *head, *model;
} net;

static fsdp_status wrap(net *n, fsdp_module **m, const char *name)
{
    return fsdp_wrap(m, *m, &(fsdp_wrap_opts){ .comm = n->comm, .name = name, .mode = n->mode, .compute_device = n->dev });
}

static fsdp_status build(net *n, fsdp_comm *comm, const corner *c)
{
    *n = (net){ .comm = comm, .rank = fsdp_comm_rank(comm), .size = fsdp_comm_size(comm), .mode = c->mode };
    FSDP_TRY(fsdp_device_open(&n->dev, c->device));
    for (int i = 0; i < 2; i++) FSDP_TRY(fsdp_linear(&n->layer[i], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_sequential(&n->trunk, n->layer, 2));
    FSDP_TRY(fsdp_linear(&n->head, WIDTH, OUT, &(fsdp_linear_opts){ .bias = true }));
    return fsdp_module_init_keyed(n->head, FSDP_INIT_KAIMING, 7);
}

static fsdp_status join(net *n)
{
    FSDP_TRY(fsdp_sequential(&n->model, (fsdp_module *[]){ n->trunk, n->head }, 2));
    return wrap(n, &n->model, "model");
}

static void take_down(net *n)
{
    fsdp_module_destroy(n->model);
    fsdp_device_close(n->dev);
}

static fsdp_status backward(net *n, uint64_t seed)
{
    float v[ROWS * WIDTH];
    int32_t l[ROWS] = { n->rank % OUT, 1 };
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *labels, *loss;
    fsdp_philox_normal_fill(seed, "x", (int64_t)n->rank * ROWS * WIDTH, ROWS * WIDTH, v);
    FSDP_TRY(fsdp_tape_begin_with(&tape, n->comm, &(fsdp_tape_opts){ .device = n->dev }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, v, 2, (int64_t[]){ ROWS, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, l, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(n->model, tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    return fsdp_tape_end(tape);
}

static fsdp_status read_all(net *n, fsdp_module *m, float *out)
{
    const fsdp_module_param_info *info;
    int count;
    (void)n;
    FSDP_TRY(fsdp_module_params(m, &info, &count));
    for (int i = 0; i < count; i++) {
        FSDP_TRY(fsdp_module_read_param(m, i, out));
        out += fsdp_unit_param_numel(info[i].unit, info[i].index);
    }
    return FSDP_OK;
}

/* ---- what there is in a summon ---- */

/* Which of the model's parameters can be read, and which written: a bit each. */
static fsdp_status seen(net *n, unsigned *read, unsigned *write)
{
    *read = *write = 0;
    for (int i = 0; i < PARAMS; i++) {
        fsdp_summoned_param p;
        fsdp_status st = fsdp_module_summoned(n->model, i, &p);
        if (st == FSDP_ERR_STATE) {
            rank_check(strstr(fsdp_last_error_message(), "fsdp_summon_begin() first") != NULL);
            continue;
        }
        FSDP_TRY(st);
        *read |= (unsigned)(p.value != NULL) << i;
        *write |= (unsigned)(p.write != NULL) << i;
        rank_check(p.grad == NULL);
    }
    return FSDP_OK;
}

static fsdp_status expect_seen(net *n, unsigned read, unsigned write)
{
    unsigned r, w;
    FSDP_TRY(seen(n, &r, &w));
    if (r != read || w != write) FSDP_FAIL(FSDP_ERR_INTERNAL, "read %#x, write %#x; wanted %#x, %#x", r, w, read, write);
    return FSDP_OK;
}

static fsdp_status nesting(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    net n;
    FSDP_TRY(build(&n, comm, c));
    FSDP_TRY(wrap(&n, &n.layer[1], "layer")); /* parameters 2, 3 */
    FSDP_TRY(join(&n));                       /* the rest */
    FSDP_TRY(fsdp_module_init_keyed(n.model, FSDP_INIT_KAIMING, 1));
    fsdp_unit *layer = n.layer[1]->unit, *rest = n.model->unit;
    static const fsdp_summon_opts all = { .recurse = true }, writes = { .recurse = true, .writeback = true }, own = { .writeback = true };
    FSDP_TRY(expect_seen(&n, 0, 0));
    FSDP_TRY(fsdp_summon_begin(n.model, NULL));
    FSDP_TRY(expect_seen(&n, 0x33, 0));
    FSDP_TRY(fsdp_summon_begin(n.model, &all)); /* one module twice */
    FSDP_TRY(expect_seen(&n, 0x3f, 0));
    FSDP_TRY(fsdp_summon_end(n.model));
    FSDP_TRY(expect_seen(&n, 0x33, 0));
    FSDP_TRY(fsdp_summon_begin(n.layer[1], &own)); /* the inner one first summoned here */
    FSDP_TRY(expect_seen(&n, 0x3f, 0x0c));
    rank_check(fsdp_summon_begin(n.model, &writes) == FSDP_ERR_STATE); /* the outer is read-only: and the inner is as it was */
    rank_check(layer->summons == 1 && rest->summons == 1);
    FSDP_TRY(fsdp_summon_end(n.model)); /* in any order */
    FSDP_TRY(expect_seen(&n, 0x0c, 0x0c));
    FSDP_TRY(fsdp_summon_end(n.layer[1]));
    rank_check(fsdp_summon_end(n.model) == FSDP_ERR_STATE && fsdp_summon_cancel(n.layer[1]) == FSDP_ERR_STATE);
    /* an inner module whose parameters lie in a unit around it: that unit */
    FSDP_TRY(fsdp_summon_begin(n.layer[0], &own));
    FSDP_TRY(expect_seen(&n, 0x33, 0x33));
    FSDP_TRY(fsdp_summon_end(n.layer[0]));
    /* rank 0 alone, on the host */
    FSDP_TRY(fsdp_summon_begin(n.model, &(fsdp_summon_opts){ .recurse = true, .rank0_only = true, .host = true }));
    FSDP_TRY(expect_seen(&n, n.rank == 0 ? 0x3f : 0, 0));
    fsdp_summoned_param p;
    float w[WIDTH * WIDTH];
    FSDP_TRY(fsdp_module_read_param(n.model, 2, w));
    FSDP_TRY(fsdp_module_summoned(n.model, 2, &p));
    rank_check(n.rank != 0 || memcmp(p.value, w, sizeof(w)) == 0);
    rank_check(fsdp_module_summoned(n.model, 99, &p) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_summon_end(n.model));
    /* a reset ends summons; what comes after begins anew */
    FSDP_TRY(fsdp_summon_begin(n.model, &all));
    FSDP_TRY(fsdp_summon_begin(n.model, &all));
    FSDP_TRY(fsdp_comm_reset(comm));
    rank_check(fsdp_summon_end(n.model) == FSDP_ERR_STATE);
    FSDP_TRY(fsdp_summon_begin(n.model, &writes));
    FSDP_TRY(fsdp_summon_cancel(n.model));
    rank_check(layer->summons == 0 && rest->summons == 0);
    FSDP_TRY(fsdp_summon_begin(n.model, &all)); /* and one that nobody ends goes with the module */
    take_down(&n);
    return FSDP_OK;
}

static void test_nesting(void **state)
{
    (void)state;
    in_corners(nesting, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

/* Ranks must write the same: one that did not is named, nothing is written, and the summon can be mended or given up. */
static fsdp_status the_same(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    net n;
    float was[NUMEL], is[NUMEL];
    FSDP_TRY(build(&n, comm, c));
    FSDP_TRY(wrap(&n, &n.trunk, "trunk"));
    FSDP_TRY(join(&n));
    FSDP_TRY(fsdp_module_init_keyed(n.model, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(read_all(&n, n.model, was));
    for (int mend = 0; mend < 2; mend++) {
        fsdp_rng rng;
        FSDP_TRY(fsdp_summon_begin(n.model, &(fsdp_summon_opts){ .recurse = true, .writeback = true, .same = true, .host = mend }));
        fsdp_rng_init(&rng, 5 + (uint64_t)n.rank);
        FSDP_TRY(fsdp_module_init(n.trunk, FSDP_INIT_KAIMING, &rng));
        fsdp_status st = fsdp_summon_end(n.model);
        rank_check(n.size == 1 ? st == FSDP_OK : st == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "unit \"trunk\": ranks wrote different values: parameter \"0.weight\"") != NULL);
        if (n.size == 1) continue;
        FSDP_TRY(read_all(&n, n.model, is));
        rank_check(memcmp(was, is, sizeof(was)) == 0);
        fsdp_rng_init(&rng, 5);
        FSDP_TRY(fsdp_module_init(n.trunk, FSDP_INIT_KAIMING, &rng));
        FSDP_TRY(mend ? fsdp_summon_end(n.model) : fsdp_summon_cancel(n.model));
        FSDP_TRY(read_all(&n, n.model, is));
        rank_check((memcmp(was, is, sizeof(was)) == 0) == (mend == 0));
    }
    take_down(&n);
    return FSDP_OK;
}

static void test_the_same(void **state)
{
    (void)state;
    in_corners(the_same, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 0 } });
}

/* Gradients of the whole model on the host of rank 0: what a single rank has that does all leaves. */
static fsdp_status gradients(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    net n;
    FSDP_TRY(build(&n, comm, c));
    FSDP_TRY(wrap(&n, &n.trunk, "trunk"));
    FSDP_TRY(join(&n));
    FSDP_TRY(fsdp_module_init_keyed(n.model, FSDP_INIT_KAIMING, 1));
    for (int pass = 0; pass < 6 / n.size; pass++) {
        net leaf = n;
        leaf.rank = pass * n.size + n.rank;
        FSDP_TRY(backward(&leaf, 3));
    }
    FSDP_TRY(fsdp_summon_begin(n.model, &(fsdp_summon_opts){ .recurse = true, .rank0_only = true, .host = true, .grads = true }));
    float *out = c->shared;
    for (int i = 0; i < PARAMS && n.rank == 0; i++) {
        const fsdp_module_param_info *info;
        fsdp_summoned_param p;
        int count;
        FSDP_TRY(fsdp_module_params(n.model, &info, &count));
        int64_t numel = fsdp_unit_param_numel(info[i].unit, info[i].index);
        FSDP_TRY(fsdp_module_summoned(n.model, i, &p));
        rank_check(p.grad != NULL && p.write == NULL);
        memcpy(out, p.grad, (size_t)numel * sizeof(float));
        out += numel;
    }
    FSDP_TRY(fsdp_summon_end(n.model));
    take_down(&n);
    return FSDP_OK;
}

static float gradients_want[NUMEL];

static void same_gradients(const corner *c)
{
    const float *got = c->shared;
    for (int i = 0; i < NUMEL; i++)
        if (!isfinite(got[i])) fail_msg("%s: gradient %d is %g", corner_name(c), i, (double)got[i]);
    if (c->ranks == 1 && gradients_want[0] == 0) memcpy(gradients_want, got, sizeof(gradients_want));
    if (memcmp(gradients_want, got, sizeof(gradients_want)) != 0) fail_msg("%s: other gradients", corner_name(c));
}

static void test_gradients(void **state)
{
    (void)state;
    /* A process that runs a network loads the kernel library: threads do that once. */
    in_corners(gradients, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 3, 0 }, .shared = NUMEL * sizeof(float), .after = same_gradients, .threads_only = true });
    assert_true(gradients_want[0] != 0);
}

/* ---- the program that this library comes from ---- */

/* set_seed(rank); trunk.init_weight(); model = FSDP(trunk + head) */
static fsdp_status draw(const char *name, const fsdp_param *param, float *value, void *arg)
{
    (void)name;
    int64_t numel = 1;
    for (int d = 0; d < param->ndim; d++) numel *= param->shape[d];
    for (int64_t i = 0; i < numel; i++) value[i] = 0.4f * (2 * fsdp_rng_uniform(arg) - 1);
    return FSDP_OK;
}

/* As a user writes it who has the parameters in hand. */
static fsdp_status write_summoned(net *n, fsdp_rng *rng)
{
    for (int i = 0; i < 4; i++) {
        const fsdp_module_param_info *info;
        fsdp_summoned_param p;
        float x[WIDTH * WIDTH];
        int count;
        FSDP_TRY(fsdp_module_params(n->trunk, &info, &count));
        FSDP_TRY(draw(NULL, &info[i].param, x, rng));
        FSDP_TRY(fsdp_module_summoned(n->trunk, i, &p));
        size_t bytes = (size_t)fsdp_unit_param_numel(info[i].unit, info[i].index) * sizeof(float);
        if (p.write == NULL) continue; /* not for this rank */
        FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(info[i].unit), p.write, x, bytes));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(info[i].unit)));
    }
    return FSDP_OK;
}

enum { ORDERS = 7 };

static fsdp_status origin(net *n, int order, uint64_t seed)
{
    fsdp_rng rng;
    bool inside = order == 1 || order == 4; /* the root is there first */
    fsdp_summon_opts o = { .recurse = order % 2, .writeback = true, .host = order == 3 || order == 4 };
    fsdp_rng_init(&rng, seed);
    if (order == 6) FSDP_TRY(fsdp_module_apply(n->trunk, draw, &rng)); /* before it is wrapped */
    FSDP_TRY(wrap(n, &n->trunk, "trunk"));
    if (inside) FSDP_TRY(join(n));
    if (order == 5) FSDP_TRY(fsdp_module_apply(n->trunk, draw, &rng));
    if (order < 5) {
        if (order == 2 || order == 4) FSDP_TRY(fsdp_summon_begin(n->layer[0], &o)); /* and an inner one around the outer one's */
        FSDP_TRY(fsdp_summon_begin(n->trunk, &o));
        FSDP_TRY(write_summoned(n, &rng));
        FSDP_TRY(fsdp_summon_end(n->trunk));
        if (order == 2 || order == 4) FSDP_TRY(fsdp_summon_end(n->layer[0]));
    }
    return inside ? FSDP_OK : join(n);
}

typedef struct results {
    logged log;
    bool by_rank;
    float begun[TRUNK], trained[NUMEL];
} results;

static fsdp_status programs(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    results *out = c->arg;
    for (int order = 0; order < ORDERS; order++) {
        net n;
        fsdp_optim *optim;
        float begun[TRUNK], trained[NUMEL];
        FSDP_TRY(build(&n, comm, c));
        FSDP_TRY(origin(&n, order, 100 + (out->by_rank ? (uint64_t)n.rank : 0)));
        FSDP_TRY(read_all(&n, n.trunk, begun));
        FSDP_TRY(fsdp_module_check_set(n.model));
        FSDP_TRY(fsdp_module_check_replicas(n.model));
        FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(n.model), &(fsdp_adamw_opts){ .lr = 1e-2f }));
        for (int step = 0; step < 2; step++) {
            FSDP_TRY(backward(&n, 20 + (uint64_t)step));
            FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1.0f }));
        }
        FSDP_TRY(read_all(&n, n.model, trained));
        FSDP_TRY(fsdp_module_check_replicas(n.model));
        fsdp_optim_destroy(optim);
        if (order == 0 && n.rank == 0 && out->trained[0] == 0) {
            memcpy(out->begun, begun, sizeof(begun));
            memcpy(out->trained, trained, sizeof(trained));
        }
        FSDP_TRY(fsdp_comm_barrier(comm));
        if (memcmp(out->begun, begun, sizeof(begun)) != 0 || memcmp(out->trained, trained, sizeof(trained)) != 0)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "order %d: other values than order 0", order);
        take_down(&n);
    }
    return FSDP_OK;
}

static void forget_log(const corner *c)
{
    results *r = c->arg;
    bool none = c->mode == FSDP_MODE_NONE;
    int want = !r->by_rank || c->ranks == 1 ? 0 : none ? ORDERS : 1; /* a warning a unit that has replicas; else once for all */
    if (r->log.lines != want || r->log.warnings != (none ? want : 0)) fail_msg("%s: %d lines: %s", corner_name(c), r->log.lines, r->log.text[0]);
    if (want > 0 && !was_logged(&r->log, "unit \"trunk\"")) fail_msg("%s: %s", corner_name(c), r->log.text[0]);
    r->log = (logged){ 0 };
}

static void test_the_origins_programs(void **state)
{
    (void)state;
    results *r = shared_alloc(sizeof(*r));
    fsdp_log_set(FSDP_LOG_INFO, keep_log, &r->log);
    for (int ranks = 1; ranks <= 3; ranks++) {
        *r = (results){ .by_rank = ranks != 2 };
        in_corners(programs, &(corners){ .all_modes = true, .ranks = (const int[]){ ranks, 0 }, .arg = r, .after = forget_log, .threads_only = true });
    }
    fsdp_log_set(FSDP_LOG_INFO, NULL, NULL);
    shared_free(r, sizeof(*r));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nesting),
        cmocka_unit_test(test_the_same),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_the_origins_programs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
