/* SPDX-License-Identifier: MIT
 *
 * A parameter in several modules: whichever units they are in, in whatever order they were wrapped, it is one parameter, its gradient is
 * the sum of what each use brings, and training has the same bits. It is counted, drawn, stepped and saved once, under all its
 * names.
 *
 * The network is the seed scenario's tied one: table (embedding) -> body (linear) -> head (linear, whose weight is the table's). */
#include "support/one_rank.h"
#include "support/ranks.h"

#include <math.h>

enum { VOCAB = 13, WIDTH = 6, ROWS = 4, STEPS = 3, LEAVES = 6, NUMEL = VOCAB * WIDTH + WIDTH * WIDTH + WIDTH + VOCAB };

typedef struct net {
    fsdp_comm *comm;
    fsdp_device *device;
    fsdp_mode mode;
    fsdp_module *part[3], *model; /* table, body, head */
} net;

static fsdp_status make_parts(net *n)
{
    FSDP_TRY(fsdp_embedding(&n->part[0], VOCAB, WIDTH));
    FSDP_TRY(fsdp_linear(&n->part[1], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    return fsdp_linear(&n->part[2], WIDTH, VOCAB, &(fsdp_linear_opts){ .bias = true });
}

static fsdp_status tie(net *n)
{
    return fsdp_module_share_param(n->part[2], 0, n->part[0], 0);
}

static fsdp_status wrap(net *n, fsdp_module **m, const char *name)
{
    return fsdp_wrap(m, *m, &(fsdp_wrap_opts){ .comm = n->comm, .name = name, .mode = n->mode, .compute_device = n->device });
}

static fsdp_status around(net *n)
{
    FSDP_TRY(fsdp_sequential(&n->model, n->part, 3));
    return wrap(n, &n->model, "model");
}

/* ---- the ways of wrapping ---- */

static fsdp_status one_unit(net *n)
{
    FSDP_TRY(tie(n));
    return around(n);
}

static fsdp_status table_first(net *n) /* the table's unit has it; the head has its own for the bias */
{
    FSDP_TRY(tie(n));
    FSDP_TRY(wrap(n, &n->part[0], "table"));
    FSDP_TRY(wrap(n, &n->part[2], "head"));
    return around(n);
}

static fsdp_status head_first(net *n)
{
    FSDP_TRY(tie(n));
    FSDP_TRY(wrap(n, &n->part[2], "head"));
    FSDP_TRY(wrap(n, &n->part[0], "table")); /* nothing is left for it */
    return around(n);
}

static fsdp_status head_alone(net *n)
{
    FSDP_TRY(tie(n));
    FSDP_TRY(wrap(n, &n->part[2], "head"));
    return around(n); /* the table is in no unit of its own, and none is open when it is used but the model's */
}

static fsdp_status tied_late(net *n) /* the table is wrapped already, and the head not yet */
{
    FSDP_TRY(wrap(n, &n->part[0], "table"));
    FSDP_TRY(tie(n));
    FSDP_TRY(wrap(n, &n->part[2], "head"));
    return around(n);
}

static fsdp_status no_root(net *n) /* nothing around: each unit is a root when its turn comes */
{
    FSDP_TRY(tie(n));
    for (int i = 0; i < 3; i++) FSDP_TRY(wrap(n, &n->part[i], (const char *const[]){ "table", "body", "head" }[i]));
    return fsdp_sequential(&n->model, n->part, 3);
}

static fsdp_status by_policy(net *n)
{
    fsdp_wrap_policy p = { .types = (const char *const[]){ "linear", "embedding" }, .type_count = 2 };
    FSDP_TRY(tie(n));
    FSDP_TRY(fsdp_sequential(&n->model, n->part, 3));
    return fsdp_wrap(&n->model, n->model, &(fsdp_wrap_opts){ .comm = n->comm, .mode = n->mode, .compute_device = n->device, .policy = &p, .keep_whole_below = 60 });
}

static fsdp_status together(net *n) /* table and head in one unit, the body in another */
{
    FSDP_TRY(tie(n));
    FSDP_TRY(fsdp_wrap_together((fsdp_module *[]){ n->part[0], n->part[2] }, 2, &(fsdp_wrap_opts){ .comm = n->comm, .mode = n->mode, .compute_device = n->device, .name = "both" }));
    FSDP_TRY(wrap(n, &n->part[1], "body"));
    return fsdp_sequential(&n->model, n->part, 3);
}

static fsdp_status again(net *n)
{
    FSDP_TRY(head_first(n));
    return wrap(n, &n->model, "again");
}

static const struct {
    const char *name;
    fsdp_status (*make)(net *n);
} ways[] = { { "one_unit", one_unit }, { "table_first", table_first }, { "head_first", head_first }, { "head_alone", head_alone }, { "tied_late", tied_late },
             { "no_root", no_root },   { "by_policy", by_policy },     { "together", together },     { "again", again } };
enum { WAYS = sizeof(ways) / sizeof(ways[0]) };

/* ---- training ---- */

static fsdp_status forward(net *n, fsdp_tape *tape, int64_t leaf, fsdp_tensor **loss)
{
    fsdp_tensor *ids, *labels, *scores;
    int32_t x[ROWS], y[ROWS];
    for (int i = 0; i < ROWS; i++) {
        x[i] = (int32_t)((leaf * ROWS + i) * 7 % VOCAB);
        y[i] = (int32_t)((leaf * ROWS + i) * 5 % VOCAB);
    }
    FSDP_TRY(fsdp_tensor_from_i32(&ids, tape, x, 2, (int64_t[]){ 1, ROWS }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 2, (int64_t[]){ 1, ROWS }));
    FSDP_TRY(fsdp_forward(n->model, tape, ids, &scores));
    return fsdp_op_cross_entropy(tape, scores, labels, loss);
}

static fsdp_status micro_batch(net *n, int64_t leaf)
{
    fsdp_tape *tape;
    fsdp_tensor *loss;
    FSDP_TRY(fsdp_tape_begin_with(&tape, n->comm, &(fsdp_tape_opts){ .device = n->device }));
    FSDP_TRY(forward(n, tape, leaf, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    return fsdp_tape_end(tape);
}

static fsdp_status evaluate(net *n, double *sum)
{
    fsdp_tape *tape;
    fsdp_tensor *loss;
    double count;
    FSDP_TRY(fsdp_tape_begin_with(&tape, n->comm, &(fsdp_tape_opts){ .device = n->device, .eval = true }));
    FSDP_TRY(forward(n, tape, 99, &loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, &count));
    return fsdp_tape_end(tape);
}

static fsdp_status read_all(net *n, float *out)
{
    const fsdp_module_param_info *p;
    int count;
    FSDP_TRY(fsdp_module_params(n->model, &p, &count));
    rank_check(count == 4);
    for (int i = 0; i < count; i++) {
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, out));
        out += fsdp_unit_param_numel(p[i].unit, p[i].index);
    }
    return FSDP_OK;
}

typedef struct outcome {
    float param[NUMEL];
    double norm[STEPS], eval;
} outcome;

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    outcome *all = c->shared;
    for (int k = 0; k < WAYS; k++) {
        net n = { .comm = world, .mode = c->mode };
        outcome now;
        fsdp_optim *optim;
        FSDP_TRY(fsdp_device_open(&n.device, c->device));
        FSDP_TRY(make_parts(&n));
        FSDP_TRY(ways[k].make(&n));
        rank_check(fsdp_module_numel(n.model) == NUMEL);
        FSDP_TRY(fsdp_module_init_keyed(n.model, FSDP_INIT_KAIMING, 5));
        FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(n.model), &(fsdp_adamw_opts){ .lr = 0.02f, .weight_decay = 0.1f }));
        for (int s = 0; s < STEPS; s++) {
            for (int leaf = fsdp_comm_rank(world); leaf < LEAVES; leaf += fsdp_comm_size(world)) FSDP_TRY(micro_batch(&n, s * LEAVES + leaf));
            FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 0.7f, .norm = &now.norm[s] }));
        }
        FSDP_TRY(evaluate(&n, &now.eval));
        FSDP_TRY(read_all(&n, now.param));
        if (fsdp_comm_rank(world) == 0) all[k] = now;
        fsdp_optim_destroy(optim);
        fsdp_module_destroy(n.model);
        fsdp_device_close(n.device);
    }
    return FSDP_OK;
}

static outcome first;
static bool have_first;

static void compare(const corner *c)
{
    const outcome *all = c->shared;
    if (!have_first) first = all[0];
    have_first = true;
    for (int k = 0; k < WAYS; k++) /* not the struct as a whole: it has padding */
        if (memcmp(all[k].param, first.param, sizeof(first.param)) != 0 || memcmp(all[k].norm, first.norm, sizeof(first.norm)) != 0 || all[k].eval != first.eval)
            fail_msg("%s, %s: other bits (evaluation %.17g, not %.17g)", corner_name(c), ways[k].name, all[k].eval, first.eval);
}

static void test_same_bits_in_every_unit(void **state)
{
    (void)state;
    static const int few[] = { 3, 0 }, many[] = { 1, 2, 3, 0 };
    have_first = false;
    in_corners(train, &(corners){ .ranks = SANITIZED ? few : many, .all_modes = true, .processes_only = CAN_FORK, .shared = WAYS * sizeof(outcome), .after = compare });
    in_corners(train, &(corners){ .ranks = (const int[]){ 3, 0 }, .threads_only = true, .shared = WAYS * sizeof(outcome), .after = compare });
}

/* ---- the sum of both uses ---- */

enum { TABLE = VOCAB * WIDTH, BODY = WIDTH * WIDTH + WIDTH };

/* The same network with two tables of the same values: their gradients are the parts of the tied one's. */
static void test_sum_of_both_uses(void **state)
{
    (void)state;
    float tied[NUMEL], apart[NUMEL + TABLE];
    for (int way = 0; way < WAYS; way++) {
        net a = { .comm = comm, .device = fsdp_device_cpu() }, b = a;
        assert_ok(make_parts(&a));
        assert_ok(ways[way].make(&a));
        assert_ok(fsdp_module_init_keyed(a.model, FSDP_INIT_KAIMING, 5));
        assert_ok(make_parts(&b));
        assert_ok(around(&b));
        assert_ok(fsdp_module_init_keyed(b.model, FSDP_INIT_KAIMING, 5));
        fsdp_unit *u = fsdp_module_units(b.model).units[0];
        assert_ok(fsdp_summon_begin(b.model, &(fsdp_summon_opts){ .writeback = true }));
        memcpy(fsdp_unit_summoned(u, 3), fsdp_unit_param(u, 0), TABLE * sizeof(float));
        assert_ok(fsdp_summon_end(b.model));
        for (int leaf = 3; leaf < 5; leaf++) {
            assert_ok(micro_batch(&a, leaf));
            assert_ok(micro_batch(&b, leaf));
        }
        gradients(a.model, tied);
        gradients(b.model, apart);
        for (int i = 0; i < TABLE; i++) {
            float sum = apart[i] + apart[TABLE + BODY + i];
            if (!(fabsf(tied[i] - sum) <= 1e-6f)) fail_msg("%s: [%d]: %.9g, not %.9g + %.9g", ways[way].name, i, (double)tied[i], (double)apart[i], (double)apart[TABLE + BODY + i]);
        }
        assert_memory_equal(tied + TABLE, apart + TABLE, BODY * sizeof(float));
        assert_memory_equal(tied + TABLE + BODY, apart + 2 * TABLE + BODY, VOCAB * sizeof(float));
        fsdp_module_destroy(a.model);
        fsdp_module_destroy(b.model);
    }
}

/* ---- once, under all names ---- */

static void test_listed_once(void **state)
{
    (void)state;
    net n = { .comm = comm, .device = fsdp_device_cpu() };
    const fsdp_module_param_info *p;
    int count;
    float w[TABLE], v[TABLE];
    assert_ok(make_parts(&n));
    assert_ok(tie(&n));
    assert_ok(fsdp_module_share_param(n.part[2], 0, n.part[0], 0)); /* they are the same: fine */
    assert_ptr_equal(fsdp_module_param(n.part[2], 0), fsdp_module_param(n.part[0], 0));
    for (int wrapped = 0; wrapped < 2; wrapped++) {
        if (wrapped) assert_ok(around(&n));
        if (!wrapped) assert_ok(fsdp_sequential(&n.model, n.part, 3));
        assert_ok(fsdp_module_params(n.model, &p, &count));
        assert_int_equal(count, 4);
        assert_string_equal(p[0].name, "0.weight");
        assert_int_equal(p[0].alias_count, 1);
        assert_string_equal(p[0].aliases[0], "2.weight");
        assert_string_equal(p[3].name, "2.bias");
        assert_int_equal(p[3].alias_count, 0);
        assert_int_equal(fsdp_module_numel(n.model), NUMEL);
        assert_ok(fsdp_module_params(n.part[2], &p, &count)); /* from the head on it has one name */
        assert_int_equal(count, 2);
        assert_string_equal(p[0].name, "weight");
        assert_int_equal(p[0].alias_count, 0);
        if (wrapped) break;
        fsdp_module_destroy(n.model);
        assert_ok(make_parts(&n));
        assert_ok(tie(&n));
    }
    /* drawn once: from a stream the second use takes nothing; by key its name is the first */
    fsdp_rng rng, same;
    fsdp_rng_init(&rng, 3);
    same = rng;
    assert_ok(fsdp_summon_begin(n.model, &(fsdp_summon_opts){ .recurse = true, .writeback = true }));
    assert_ok(fsdp_module_init(n.model, FSDP_INIT_NORMAL, &rng));
    assert_ok(fsdp_summon_end(n.model));
    for (int i = 0; i < TABLE; i++) w[i] = 0.02f * fsdp_rng_normal(&same);
    assert_ok(fsdp_module_read_param(n.model, 0, v));
    assert_memory_equal(w, v, sizeof(w));
    assert_ok(fsdp_module_init_keyed(n.model, FSDP_INIT_NORMAL, 3));
    fsdp_philox_normal_fill(3, "0.weight", 0, TABLE, w);
    for (int i = 0; i < TABLE; i++) w[i] *= 0.02f;
    assert_ok(fsdp_module_read_param(n.model, 0, v));
    assert_memory_equal(w, v, sizeof(w));
    fsdp_module_destroy(n.model);
}

/* ---- what is wrong ---- */

static void test_wrong_shares(void **state)
{
    (void)state;
    net n = { .comm = comm, .device = fsdp_device_cpu() };
    fsdp_tape *tape;
    fsdp_tensor *x, *y;
    assert_ok(make_parts(&n));
    assert_fails(fsdp_module_share_param(n.part[2], 2, n.part[0], 0), FSDP_ERR_INVALID, "the module that takes has 2 parameters of its own, not one with number 2");
    assert_fails(fsdp_module_share_param(n.part[2], 0, NULL, 0), FSDP_ERR_INVALID, "the module that gives");
    assert_fails(fsdp_module_share_param(n.part[1], 0, n.part[0], 0), FSDP_ERR_INVALID, "\"weight\" of module linear is [6, 6], and \"weight\" of module embedding is [13, 6]");
    assert_ok(wrap(&n, &n.part[2], "head"));
    assert_fails(tie(&n), FSDP_ERR_STATE, "is in unit \"head\" already");
    assert_ok(fsdp_module_share_param(n.part[0], 0, n.part[2], 0)); /* the way out that it says */
    assert_ok(wrap(&n, &n.part[0], "table"));
    /* the tree that has the unit goes first: what is left is told */
    fsdp_module_destroy(n.part[2]);
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_tensor_from_i32(&x, tape, (int32_t[]){ 1 }, 2, (int64_t[]){ 1, 1 }));
    assert_fails(fsdp_forward(n.part[0], tape, x, &y), FSDP_ERR_STATE, "was in a unit of another tree");
    assert_ok(fsdp_tape_cancel(tape));
    fsdp_module_destroy(n.part[0]);
    fsdp_module_destroy(n.part[1]);
}

/* A module whose unit lies around it, run without what is around: the unit is whole for it all the same, and reads no garbage. */
static fsdp_status part_alone(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n = { .comm = world, .mode = c->mode };
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *labels, *loss;
    float in[2 * WIDTH], out[2][2 * WIDTH];
    FSDP_TRY(fsdp_device_open(&n.device, c->device));
    FSDP_TRY(make_parts(&n));
    fsdp_module *body = n.part[1];
    FSDP_TRY(around(&n));
    FSDP_TRY(fsdp_module_init_keyed(n.model, FSDP_INIT_KAIMING, 5));
    fsdp_philox_normal_fill(9, "x", 0, 2 * WIDTH, in);
    for (int eval = 0; eval < 2; eval++) {
        FSDP_TRY(fsdp_tape_begin_with(&tape, world, &(fsdp_tape_opts){ .device = n.device, .eval = eval }));
        FSDP_TRY(fsdp_tensor_from_f32(&x, tape, in, 2, (int64_t[]){ 2, WIDTH }));
        FSDP_TRY(fsdp_forward(body, tape, x, &y));
        FSDP_TRY(fsdp_tensor_to_f32(y, out[eval]));
        if (!eval) {
            FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ 1, 2 }, 1, (int64_t[]){ 2 }));
            FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
            FSDP_TRY(fsdp_backward(tape, loss));
        }
        FSDP_TRY(fsdp_tape_end(tape));
    }
    rank_check(memcmp(out[0], out[1], sizeof(out[0])) == 0);
    for (int i = 0; i < 2 * WIDTH; i++) rank_check(isfinite(out[0][i]) && out[0][i] != 0);
    FSDP_TRY(fsdp_step_begin(fsdp_module_units(n.model)));
    double norm;
    FSDP_TRY(fsdp_step_grad_norm(fsdp_module_units(n.model), &norm, NULL));
    rank_check(norm > 0);
    FSDP_TRY(fsdp_step_cancel(fsdp_module_units(n.model)));
    fsdp_module_destroy(n.model);
    fsdp_device_close(n.device);
    return FSDP_OK;
}

static void test_part_of_a_unit_alone(void **state)
{
    (void)state;
    in_corners(part_alone, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits_in_every_unit),
        cmocka_unit_test_setup_teardown(test_sum_of_both_uses, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_listed_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrong_shares, set_up, tear_down),
        cmocka_unit_test(test_part_of_a_unit_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
