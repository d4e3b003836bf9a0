/* SPDX-License-Identifier: MIT
 *
 * Policies: the units that each rule makes, to the last parameter; what is wrapped is left alone; and however a model is wrapped, with
 * whatever kept whole, its training has the same bits. A wrap that fails has changed nothing. */
#include "support/one_rank.h"
#include "support/ranks.h"
#include "support/tiny_gpt.h"

#include "base/alloc.h"
#include "nn/module.h"
#include "shard/unit.h"

/* ---- which units ---- */

static fsdp_model *model(void)
{
    fsdp_model *m;
    fsdp_gpt2_config c = tiny_gpt_config();
    assert_ok(fsdp_model_create_gpt2(&m, &c));
    return m;
}

/* "root:4 h.0:12 h.1:12": units in the list's order, with how many parameters each has. */
static const char *units_of(fsdp_module *m)
{
    static char text[2048];
    size_t n = 0;
    fsdp_unit_list l = fsdp_module_units(m);
    for (int i = 0; i < l.count; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%s:%d", i > 0 ? " " : "", fsdp_unit_name(l.units[i]), fsdp_unit_param_count(l.units[i]));
    return text;
}

static void expect(fsdp_wrap_opts o, const fsdp_wrap_policy *policy, const char *want)
{
    fsdp_model *m = model();
    o.comm = comm;
    o.policy = policy;
    assert_ok(fsdp_model_wrap(m, &o));
    assert_string_equal(units_of(fsdp_model_module(m)), want);
    fsdp_model_destroy(m);
}

#define TYPES(...) .types = (const char *const[]){ __VA_ARGS__ }, .type_count = sizeof((const char *const[]){ __VA_ARGS__ }) / sizeof(char *)
#define NAMES(...) .names = (const char *const[]){ __VA_ARGS__ }, .name_count = sizeof((const char *const[]){ __VA_ARGS__ }) / sizeof(char *)

/* Norms and biases are exact beside weights that are not. */
static void test_small_ones_are_exact(void **state)
{
    (void)state;
    fsdp_model *m = model();
    assert_ok(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm, .keep_whole_below = 100, .param_dtype = FSDP_BF16, .reduce_dtype = FSDP_F16, .grad_dtype = FSDP_BF16 }));
    fsdp_unit_list l = fsdp_module_units(fsdp_model_module(m));
    int small = 0;
    for (int i = 0; i < l.count; i++) {
        bool is = strstr(fsdp_unit_name(l.units[i]), ".small") != NULL;
        small += is;
        assert_int_equal(l.units[i]->param_dtype, is ? FSDP_F32 : FSDP_BF16);
        assert_int_equal(l.units[i]->reduce_dtype, is ? FSDP_F32 : FSDP_F16);
        assert_int_equal(l.units[i]->grad_dtype, is ? FSDP_F32 : FSDP_BF16);
    }
    assert_int_equal(small, 1);
    fsdp_model_destroy(m);
}

/* Blocks of 510 elements: ln_1 12, attn 126 + 42, ln_2 12, mlp 168 + 150; wte 78, wpe 48, ln_f 12. */
static void test_rules(void **state)
{
    (void)state;
    expect((fsdp_wrap_opts){ 0 }, NULL, "root:4 h.0:12 h.1:12");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ TYPES("block") }, "root:4 h.0:12 h.1:12");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ TYPES("block", "embedding") }, "root:2 wte:1 wpe:1 h.0:12 h.1:12");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ TYPES("lin*") },
           "root:12 h.0.attn.c_attn:2 h.0.attn.c_proj:2 h.0.mlp.c_fc:2 h.0.mlp.c_proj:2 h.1.attn.c_attn:2 h.1.attn.c_proj:2 h.1.mlp.c_fc:2 h.1.mlp.c_proj:2");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ NAMES("h.1") }, "root:16 h.1:12");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ NAMES("h.*.mlp") }, "root:20 h.0.mlp:4 h.1.mlp:4"); /* a module that is never run */
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ NAMES("*.attn"), TYPES("block") }, "root:4 h.0:8 h.0.attn:4 h.1:8 h.1.attn:4"); /* one in another */
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ .min_numel = 510 }, "root:4 h.0:12 h.1:12");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ .min_numel = 511 }, "root:28");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ .min_bytes = 4 * 510 }, "root:4 h.0:12 h.1:12");
    /* the inner are asked first, and the outer about what they leave: 510 - 126 - 168 - 150 is just enough */
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ .min_numel = 60 },
           "root:3 wte:1 h.0:6 h.0.attn.c_attn:2 h.0.mlp.c_fc:2 h.0.mlp.c_proj:2 h.1:6 h.1.attn.c_attn:2 h.1.mlp.c_fc:2 h.1.mlp.c_proj:2");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ .min_numel = INT64_MAX }, "root:28");
    /* neighbours together; the unit is listed where the first of them is */
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ TYPES("block"), .per_unit = 2 }, "root:4 h.0:24");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ TYPES("block"), .per_unit = 9 }, "root:4 h.0:24");
    expect((fsdp_wrap_opts){ 0 }, &(fsdp_wrap_policy){ NAMES("wte", "wpe", "ln_f"), .per_unit = 2 }, "root:24 wte:2 ln_f:2"); /* not neighbours */
    /* small ones apart: biases and norms of 6 to 24 elements, of all blocks in one unit */
    expect((fsdp_wrap_opts){ .keep_whole_below = 100 }, NULL, "root:2 root.small:18 h.0:4 h.1:4");
    expect((fsdp_wrap_opts){ .keep_whole_below = 25 }, &(fsdp_wrap_policy){ TYPES("layer_norm", "block") }, "root:2 root.small:14 h.0:6 h.1:6");
    expect((fsdp_wrap_opts){ .keep_whole_below = 1 << 20 }, NULL, "root:0 root.small:28");
    expect((fsdp_wrap_opts){ .keep_whole_below = 100, .mode = FSDP_MODE_OPTIMIZER }, NULL, "root:4 h.0:12 h.1:12"); /* all is kept whole */
}

/* ---- by callback ---- */

typedef struct asked {
    char text[2048];
    int calls;
} asked;

static bool decide(const fsdp_wrap_candidate *c, fsdp_wrap_opts *o, void *arg)
{
    asked *a = arg;
    size_t n = strlen(a->text);
    snprintf(a->text + n, sizeof(a->text) - n, "%s%s%s/%d/%d/%lld", n > 0 ? " " : "", c->name, c->chosen ? "!" : "", c->depth, c->params, (long long)c->numel);
    a->calls++;
    if (strcmp(c->name, "h.0") == 0) {
        o->mode = FSDP_MODE_OPTIMIZER;
        o->name = "first";
        return true;
    }
    return c->chosen && strcmp(c->name, "h.1") == 0;
}

static void test_callback(void **state)
{
    (void)state;
    asked a = { .calls = 0 };
    fsdp_model *m = model();
    fsdp_wrap_policy p = { TYPES("block", "embedding"), .decide = decide, .arg = &a };
    assert_ok(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm, .policy = &p }));
    assert_string_equal(units_of(fsdp_model_module(m)), "root:4 first:12 h.1:12");
    assert_int_equal(fsdp_unit_mode(fsdp_module_units(fsdp_model_module(m)).units[1]), FSDP_MODE_OPTIMIZER);
    assert_int_equal(fsdp_unit_mode(fsdp_module_units(fsdp_model_module(m)).units[2]), FSDP_MODE_FULL);
    assert_non_null(strstr(a.text, "wte!/1/1/78 wpe!/1/1/48 h.0.ln_1/3/2/12 h.0.attn.c_attn/4/2/126 "));
    assert_non_null(strstr(a.text, " h.0!/2/12/510 ")); /* after what is inside */
    assert_non_null(strstr(a.text, " ln_f/1/2/12"));
    fsdp_model_destroy(m);
}

/* ---- what is there is left alone; and again, later ---- */

static fsdp_module *square(void)
{
    return linear(6, 6, FSDP_ACT_NONE);
}

static void test_left_alone(void **state)
{
    (void)state;
    const fsdp_wrap_policy linears = { TYPES("linear") };
    fsdp_module *inner = sequential(square(), square(), NULL), *m;
    assert_ok(fsdp_wrap(&inner, inner, &(fsdp_wrap_opts){ .comm = comm, .name = "inner" }));
    m = sequential(square(), inner, square());
    fsdp_unit *before = fsdp_module_units(inner).units[0];
    assert_ok(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = comm, .name = "m", .policy = &linears }));
    assert_string_equal(units_of(m), "m:0 0:2 inner:4 2:2");
    assert_ptr_equal(fsdp_module_units(inner).units[0], before);
    /* later, with more around: the policy finds what is new */
    m = sequential(m, square(), NULL);
    assert_ok(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = comm, .name = "more", .policy = &linears }));
    assert_string_equal(units_of(m), "more:0 m:0 0:2 inner:4 2:2 1:2");
    /* and nothing is left: only the unit around */
    assert_ok(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = comm, .name = "again", .policy = &linears, .keep_whole_below = 100 }));
    assert_string_equal(units_of(m), "again:0 more:0 m:0 0:2 inner:4 2:2 1:2");
    fsdp_module_destroy(m);
}

static void test_together(void **state)
{
    (void)state;
    fsdp_module *l[4] = { square(), square(), square(), square() }, *in = sequential(l[0], l[1], l[2]), *m = sequential(in, l[3], NULL);
    fsdp_wrap_opts o = { .comm = comm, .name = "both" };
    assert_fails(fsdp_wrap_together(l, 0, &o), FSDP_ERR_INVALID, "0 modules");
    assert_fails(fsdp_wrap_together((fsdp_module *[]){ in, l[1] }, 2, &o), FSDP_ERR_INVALID, "module 1 (linear) is within module 0 (sequential)");
    assert_fails(fsdp_wrap_together((fsdp_module *[]){ l[1], l[1] }, 2, &o), FSDP_ERR_INVALID, "within");
    assert_fails(fsdp_wrap_together(l, 2, &(fsdp_wrap_opts){ .comm = comm, .keep_whole_below = 9 }), FSDP_ERR_INVALID, "for fsdp_wrap()");
    assert_ok(fsdp_wrap_together((fsdp_module *[]){ l[0], l[3] }, 2, &o)); /* not neighbours */
    assert_fails(fsdp_wrap_together((fsdp_module *[]){ l[1], l[3] }, 2, &o), FSDP_ERR_INVALID, "module 1 (linear) is wrapped already (unit \"both\")");
    assert_ok(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = comm, .name = "m" }));
    assert_string_equal(units_of(m), "m:4 both:4");
    assert_string_equal(fsdp_unit_param_info(fsdp_module_units(m).units[1], 0)->name, "0.weight");
    assert_string_equal(fsdp_unit_param_info(fsdp_module_units(m).units[1], 2)->name, "1.weight");
    fsdp_module_destroy(m);
}

/* A unit with several members is gathered once for all of them, and given up with the last: not with what is around. */
static void note_move(void *arg, const fsdp_unit *u, int from, int to)
{
    static const char signs[] = { [FSDPI_SHARDED] = '-', [FSDPI_AHEAD] = '+', [FSDPI_WHOLE] = '=', [FSDPI_KEPT] = '~' };
    char *text = arg;
    size_t n = strlen(text);
    (void)from;
    snprintf(text + n, 256 - n, "%c%c", signs[to], fsdp_unit_name(u)[0]);
}

static void test_gathered_once_for_all(void **state)
{
    (void)state;
    char story[256] = "";
    fsdp_module *l[3] = { square(), square(), square() }, *m = sequential(l[0], l[1], l[2]);
    fsdp_wrap_opts o = { .comm = comm, .prefetch = -1 };
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *labels, *loss;
    float v[12] = { 1, 2, 3 };
    o.name = "both";
    assert_ok(fsdp_wrap_together(l, 2, &o));
    o.name = "third";
    assert_ok(fsdp_wrap(&l[2], l[2], &o));
    assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
    fsdpi_runtime *rt = fsdp_module_units(m).units[0]->rt;
    rt->moved = note_move;
    rt->moved_arg = story;
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_tensor_from_f32(&x, tape, v, 2, (int64_t[]){ 2, 6 }));
    assert_ok(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ 1, 4 }, 1, (int64_t[]){ 2 }));
    assert_ok(fsdp_forward(m, tape, x, &y));
    assert_string_equal(story, "+b=b~b+t=t~t"); /* each is a root: kept for its backward */
    story[0] = '\0';
    assert_ok(fsdp_op_cross_entropy(tape, y, labels, &loss));
    assert_ok(fsdp_backward(tape, loss));
    assert_string_equal(story, "=t~t-t=b~b-b");
    assert_ok(fsdp_tape_end(tape));
    /* the last one is not run: what is open ends with the tape */
    story[0] = '\0';
    assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
    assert_ok(fsdp_tensor_from_f32(&x, tape, v, 2, (int64_t[]){ 2, 6 }));
    assert_ok(fsdp_forward(l[0], tape, x, &y));
    assert_string_equal(story, "+b=b");
    assert_ok(fsdp_tape_end(tape));
    assert_string_equal(story, "+b=b~b-b");
    rt->moved = NULL;
    fsdp_module_destroy(m);
}

/* ---- wrong policies ---- */

static void test_wrong_policies(void **state)
{
    (void)state;
    const struct {
        fsdp_wrap_policy p;
        const char *message;
    } wrong[] = {
        { { .type_count = 0 }, "no rule" },
        { { .type_count = 2 }, "2 types" },
        { { .name_count = -1 }, "-1 names" },
        { { .min_numel = -5 }, "min_numel -5" },
        { { TYPES("blok") }, "no module of type \"blok\": there are embedding, blocks, block, layer_norm, attention, linear, mlp" },
        { { TYPES("x", "y") }, "\"x\", or another of the list: there are" },
        { { NAMES("h.2") }, "no module is called \"h.2\" (as \"h.3.mlp\"" },
    };
    fsdp_model *m = model();
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_fails(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm, .policy = &wrong[i].p }), FSDP_ERR_INVALID, wrong[i].message);
        assert_int_equal(fsdp_module_units(fsdp_model_module(m)).count, 0);
    }
    assert_fails(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm, .keep_whole_below = -1 }), FSDP_ERR_INVALID, "keep_whole_below is -1 bytes");
    assert_ok(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm }));
    fsdp_model_destroy(m);
}

/* ---- a wrap that fails ---- */

static void read_host(fsdp_module *m, float *out)
{
    for (int i = 0; i < m->params; i++) {
        assert_null(m->param[i]->unit);
        memcpy(out, m->param[i]->host, (size_t)m->param[i]->tensor.numel * sizeof(float));
        out += m->param[i]->tensor.numel;
    }
}

static void test_failed_wrap_changes_nothing(void **state)
{
    (void)state;
    fsdp_wrap_policy p = { TYPES("linear"), .per_unit = 2 };
    fsdp_module *l[5], *m, *same;
    float want[5][42], got[42], w[36];
    for (int i = 0; i < 5; i++) l[i] = square();
    fsdp_module *in = sequential(l[0], l[1], l[2]);
    m = sequential(in, l[3], l[4]);
    assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
    for (int i = 0; i < 5; i++) read_host(l[i], want[i]);
    fsdp_wrap_opts o = { .comm = comm, .policy = &p, .keep_whole_below = 30 };
    for (long n = 1; n < 1000; n++) {
        fsdpi_alloc_fail_at(n);
        fsdp_status st = fsdp_wrap(&same, m, &o);
        fsdpi_alloc_fail_at(0);
        if (st == FSDP_OK) break;
        assert_int_equal(st, FSDP_ERR_NOMEM);
        assert_int_equal(fsdp_module_units(m).count, 0);
        for (int i = 0; i < 5; i++) {
            assert_null(l[i]->joint);
            read_host(l[i], got);
            assert_memory_equal(got, want[i], sizeof(got));
        }
        assert_true(n < 999);
    }
    assert_string_equal(units_of(m), "sequential:0 sequential.small:5 0.0:2 0.2:1 1:2");
    for (int i = 0; i < 5; i++) {
        assert_ok(fsdp_module_read_param(m, 2 * i, w));
        assert_memory_equal(w, want[i], sizeof(w));
    }
    fsdp_module_destroy(m);
}

/* ---- the same bits ---- */

enum { STEPS = 3, LEAVES = 6 };

static const fsdp_wrap_policy policies[] = {
    { TYPES("block") },
    { TYPES("lin*", "block") },
    { NAMES("h.*.mlp", "h.0.attn") },
    { .min_numel = 60 },
    { .min_numel = INT64_MAX },
    { TYPES("block"), .per_unit = 2 },
    { TYPES("linear", "layer_norm"), .per_unit = 3 },
    { NAMES("h", "wte") }, /* all blocks, in the unit of the list that holds them */
};
enum { POLICIES = sizeof(policies) / sizeof(policies[0]) };

typedef struct outcome {
    float param[TINY_NUMEL];
    double loss[STEPS], norm[STEPS], eval;
} outcome;

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    outcome *all = c->shared;
    for (int k = 0; k < POLICIES; k++) {
        tiny_gpt t;
        outcome now;
        bool small = (k + c->ranks) % 2;
        tiny_gpt_opts o = { .mode = c->mode, .device = c->device, .dropout = 0.1f, .policy = &policies[k], .keep_whole_below = small ? 100 : 0, .recompute = k % 3 == 1 };
        FSDP_TRY(tiny_gpt_create(&t, world, &o));
        for (int s = 0; s < STEPS; s++) FSDP_TRY(tiny_gpt_step(&t, s, LEAVES, &now.loss[s], &now.norm[s]));
        FSDP_TRY(tiny_gpt_eval(&t, 100, 2, &now.eval));
        FSDP_TRY(tiny_gpt_read(&t, now.param));
        tiny_gpt_destroy(&t);
        if (fsdp_comm_rank(world) == 0) all[k] = now;
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
    for (int k = 0; k < POLICIES; k++)
        if (memcmp(&all[k], &first, sizeof(first)) != 0) fail_msg("%s, policy %d: other bits (loss %.17g, not %.17g)", corner_name(c), k, all[k].loss[STEPS - 1], first.loss[STEPS - 1]);
}

static void test_same_bits(void **state)
{
    (void)state;
    static const int few[] = { 2, 0 }, many[] = { 1, 2, 3, 0 };
    have_first = false;
    in_corners(train, &(corners){ .ranks = SANITIZED ? few : many, .shared = POLICIES * sizeof(outcome), .after = compare });
    in_corners(train, &(corners){ .ranks = (const int[]){ 2, 0 }, .device = "cpu", .threads_only = true, .all_modes = true, .shared = POLICIES * sizeof(outcome), .after = compare });
}

/* ---- the table ---- */

static void test_table(void **state)
{
    (void)state;
    fsdp_model *m = model();
    char *text;
    assert_ok(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm, .keep_whole_below = 100 }));
    assert_ok(fsdp_wrap_table(fsdp_model_module(m), &text));
    assert_string_equal(text,
                        "unit                         mode      parameters      elements  bytes whole  kept a rank\n"
                        "root                         full               2           126        512 B        512 B\n"
                        "root.small                   optimizer         18           168       1408 B       1408 B\n"
                        "2 x h.0 ... h.1              full               4           432       1792 B       1792 B\n"
                        "4 units                                        28          1158       5504 B       5504 B\n");
    fsdp_free_text(text);
    fsdp_model_destroy(m);
    assert_fails(fsdp_units_table(NULL, 3, &text), FSDP_ERR_INVALID, "3 units");
    assert_ok(fsdp_units_table(NULL, 0, &text));
    assert_non_null(strstr(text, "0 units"));
    fsdp_free_text(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_rules, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_small_ones_are_exact, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_callback, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_left_alone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_together, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_gathered_once_for_all, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrong_policies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_failed_wrap_changes_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_table, set_up, tear_down),
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
