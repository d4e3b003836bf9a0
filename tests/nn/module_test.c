/* SPDX-License-Identifier: MIT
 *
 * Modules on one rank: hooks in their order, units that are used often or not at all, names, and calls that are wrong. */
#include "support/one_rank.h"

#include "base/alloc.h"

#include <math.h>

enum { WIDTH = 6, ROWS = 4 };

static fsdp_module *layer(int64_t in, int64_t out)
{
    return linear(in, out, FSDP_ACT_GELU_TANH);
}

static fsdp_tensor *input(fsdp_tape *tape, const char *name)
{
    return matrix(tape, name, ROWS, WIDTH);
}

static fsdp_module *wrap(fsdp_module *m, const char *name)
{
    fsdp_module *out;
    assert_ok(fsdp_wrap(&out, m, &(fsdp_wrap_opts){ .comm = comm, .name = name }));
    return out;
}

/* ---- hooks ---- */

static char story[1024];

static void tell(const char *what, const char *who)
{
    size_t n = strlen(story);
    snprintf(story + n, sizeof(story) - n, "%s%s ", what, who);
}

static bool is_whole(fsdp_module *m)
{
    const fsdp_module_param_info *p;
    int n;
    assert_ok(fsdp_module_params(m, &p, &n));
    const fsdp_module_param_info *own = &p[n - 1]; /* the last one is in its own unit */
    return fsdp_unit_param(own->unit, own->index) != NULL;
}

static fsdp_status h_bf(fsdp_module *m, fsdp_tape *t, void *arg)
{
    (void)t;
    tell(is_whole(m) ? "+f" : "!+f", arg);
    return FSDP_OK;
}

static fsdp_status h_af(fsdp_module *m, fsdp_tape *t, void *arg)
{
    (void)t;
    tell(is_whole(m) ? "-f" : "!-f", arg);
    return FSDP_OK;
}

static fsdp_status h_bb(fsdp_module *m, fsdp_tape *t, void *arg)
{
    (void)t;
    tell(is_whole(m) ? "+b" : "!+b", arg);
    return FSDP_OK;
}

static float in_hook[256]; /* what the gradient of "B"'s weight was when its hook ran */

static fsdp_status h_ab(fsdp_module *m, fsdp_tape *t, void *arg)
{
    (void)t;
    const fsdp_module_param_info *p;
    int n;
    float beta = -1;
    assert_ok(fsdp_module_params(m, &p, &n));
    const float *g = fsdp_unit_grad(p[n - 1].unit, p[n - 1].index, &beta);
    tell(g != NULL && beta == 1 ? "-b" : "!-b", arg);
    if (strcmp(arg, "B") == 0 && g != NULL) memcpy(in_hook, fsdp_unit_grad(p[0].unit, p[0].index, &beta), WIDTH * WIDTH * sizeof(float));
    return FSDP_OK;
}

static void listen(fsdp_module *m, const char *name)
{
    assert_ok(fsdp_module_add_hooks(m, &(fsdp_hooks){ h_bf, h_af, h_bb, h_ab, (void *)(uintptr_t)name }));
}

/* B is within A; B, A and C each have a unit. Hooks see their unit whole, and the last one its gradients complete. */
static void test_hooks(void **state)
{
    (void)state;
    fsdp_module *b = layer(WIDTH, WIDTH), *c = layer(WIDTH, WIDTH), *a;
    float g[512];
    b = wrap(b, "B");
    listen(b, "B");
    a = sequential(b, layer(WIDTH, WIDTH), NULL);
    listen(a, "A");
    listen(a, "A2");
    fsdp_module *root = wrap(sequential(wrap(a, "A"), wrap(c, "C"), NULL), "root");
    listen(c, "C");
    assert_ok(fsdp_module_init_keyed(root, FSDP_INIT_KAIMING, 1));
    fsdp_tape *tape;
    fsdp_tensor *y;
    story[0] = '\0';
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_forward(root, tape, input(tape, "x"), &y));
    assert_string_equal(story, "+fA +fA2 +fB -fB -fA -fA2 +fC -fC ");
    story[0] = '\0';
    assert_ok(fsdp_backward(tape, loss_of(tape, y)));
    assert_string_equal(story, "+bC -bC +bA +bA2 +bB -bB -bA -bA2 ");
    assert_ok(fsdp_tape_end(tape));
    gradients(b, g);
    assert_memory_equal(g, in_hook, WIDTH * WIDTH * sizeof(float));
    /* an evaluation has the two of the forward */
    story[0] = '\0';
    assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
    assert_ok(fsdp_forward(root, tape, input(tape, "x"), &y));
    assert_ok(fsdp_tape_end(tape));
    assert_string_equal(story, "+fA +fA2 +fB -fB -fA -fA2 +fC -fC ");
    fsdp_module_destroy(root);
}

static int failing = -1;

static fsdp_status fail_at(int which)
{
    FSDP_FAIL_IF(failing == which, FSDP_ERR_INVALID, "hook %d does not like it", which);
    return FSDP_OK;
}
static fsdp_status f_0(fsdp_module *m, fsdp_tape *t, void *arg) { (void)m, (void)t, (void)arg; return fail_at(0); }
static fsdp_status f_1(fsdp_module *m, fsdp_tape *t, void *arg) { (void)m, (void)t, (void)arg; return fail_at(1); }
static fsdp_status f_2(fsdp_module *m, fsdp_tape *t, void *arg) { (void)m, (void)t, (void)arg; return fail_at(2); }
static fsdp_status f_3(fsdp_module *m, fsdp_tape *t, void *arg) { (void)m, (void)t, (void)arg; return fail_at(3); }

/* A hook's error is the call's; the micro-batch is lost, those before it are not, and the next one is well. */
static void test_hook_that_fails(void **state)
{
    (void)state;
    fsdp_module *inner = wrap(layer(WIDTH, WIDTH), "inner"), *m = wrap(sequential(inner, layer(WIDTH, WIDTH), NULL), "outer");
    float want[256], got[256];
    assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
    assert_ok(fsdp_module_add_hooks(inner, &(fsdp_hooks){ f_0, f_1, f_2, f_3, NULL }));
    for (failing = -1; failing < 4; failing++) {
        for (int batch = 0; batch < 3; batch++) {
            fsdp_tape *tape;
            fsdp_tensor *y;
            int hook = failing;
            if (batch != 1) failing = -1;
            else if (hook < 0) continue;
            assert_ok(fsdp_tape_begin(&tape, comm));
            fsdp_status st = fsdp_forward(m, tape, input(tape, batch == 0 ? "x" : "z"), &y);
            if (st == FSDP_OK) st = fsdp_backward(tape, loss_of(tape, y));
            if (batch == 1) assert_fails(st, FSDP_ERR_INVALID, "does not like it");
            else assert_ok(st);
            if (batch == 1 && hook < 2) assert_fails(fsdp_backward(tape, loss_of(tape, input(tape, "x"))), FSDP_ERR_STATE, "still open");
            assert_ok(fsdp_tape_end(tape));
            failing = hook;
        }
        gradients(m, failing < 0 ? want : got);
        if (failing >= 0) assert_memory_equal(want, got, 84 * sizeof(float));
    }
    failing = -1;
    fsdp_module_destroy(m);
}

/* ---- units that are used often, or not ---- */

static fsdp_status thrice(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    (void)ctx;
    fsdp_tensor *unused;
    FSDP_TRY(fsdp_forward(fsdp_module_child(m, 0), tape, in, out));
    FSDP_TRY(fsdp_forward(fsdp_module_child(m, 0), tape, *out, out));
    FSDP_TRY(fsdp_forward(fsdp_module_child(m, 1), tape, in, &unused)); /* nobody uses this */
    return fsdp_forward(fsdp_module_child(m, 0), tape, *out, out);
}

static fsdp_module *two_children(fsdp_module_forward_fn forward, fsdp_module *a, fsdp_module *b)
{
    fsdp_module *m;
    fsdp_module_opts o = { .type = "own", .forward = forward, .children = (fsdp_module *[]){ a, b }, .names = (const char *[]){ "a", "b" }, .child_count = 2 };
    assert_ok(fsdp_module_create(&m, &o));
    return m;
}

static void one_batch(fsdp_module *m, const char *name)
{
    fsdp_tape *tape;
    fsdp_tensor *y;
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_forward(m, tape, input(tape, name), &y));
    assert_ok(fsdp_backward(tape, loss_of(tape, y)));
    assert_ok(fsdp_tape_end(tape));
}

static void assert_near(const float *a, const float *b, int n, float bound)
{
    for (int i = 0; i < n; i++)
        if (!(fabsf(a[i] - b[i]) <= bound * (1 + fabsf(a[i])))) fail_msg("[%d]: %.9g and %.9g", i, (double)a[i], (double)b[i]);
}

static void test_unit_used_thrice(void **state)
{
    (void)state;
    float one[256], many[256];
    /* Whether the layer has a unit of its own, or lies in one around, is the same; so is whether the unused one has. */
    for (int units = 0; units < 4; units++) {
        fsdp_module *a = layer(WIDTH, WIDTH), *b = layer(WIDTH, WIDTH);
        if (units & 1) a = wrap(a, "a");
        if (units & 2) b = wrap(b, "b");
        fsdp_module *m = wrap(two_children(thrice, a, b), "root");
        assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
        one_batch(m, "x");
        int n = gradients(m, units == 0 ? one : many);
        assert_int_equal(n, 2 * (WIDTH * WIDTH + WIDTH));
        if (units > 0) assert_memory_equal(one, many, (size_t)n * sizeof(float));
        for (int i = n / 2; i < n; i++) assert_true(one[i] == 0); /* of b */
        fsdp_module_destroy(m);
    }
    /* The gradient of three uses is the sum of what each would bring alone: by differences of the loss. */
    fsdp_module *m = wrap(two_children(thrice, layer(WIDTH, WIDTH), layer(WIDTH, WIDTH)), "root");
    assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
    fsdp_unit_list units = fsdp_module_units(m);
    for (int k = 0; k < WIDTH; k++) {
        double side[2];
        for (int s = 0; s < 2; s++) {
            const fsdp_slice *slice;
            int n;
            double count;
            float h = s == 0 ? 0x1p-7f : -0x1p-6f;
            assert_ok(fsdp_step_begin(units));
            fsdp_unit_slices(units.units[0], &slice, &n);
            slice[0].master[7 * k] += h;
            assert_ok(fsdp_step_end(units));
            fsdp_tape *tape;
            fsdp_tensor *y;
            assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
            assert_ok(fsdp_forward(m, tape, input(tape, "x"), &y));
            assert_ok(fsdp_loss_read(loss_of(tape, y), &side[s], &count));
            assert_ok(fsdp_tape_end(tape));
        }
        float want = (float)((side[0] - side[1]) / 0x1p-6);
        assert_near(&want, &one[7 * k], 1, 4e-3f);
        const fsdp_slice *slice;
        int n;
        assert_ok(fsdp_step_begin(units));
        fsdp_unit_slices(units.units[0], &slice, &n);
        slice[0].master[7 * k] += 0x1p-7f;
        assert_ok(fsdp_step_end(units));
    }
    fsdp_module_destroy(m);
}

/* A unit that no gradient reaches has none: the optimizer leaves it alone, decay and all. */
static void test_unused_unit_is_left_alone(void **state)
{
    (void)state;
    fsdp_module *b = wrap(layer(WIDTH, WIDTH), "b"), *a = wrap(layer(WIDTH, WIDTH), "a"), *m = wrap(two_children(thrice, a, b), "root");
    float before[84], after[84];
    fsdp_optim *optim;
    assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
    assert_ok(fsdp_optim_create_adamw(&optim, fsdp_module_units(m), &(fsdp_adamw_opts){ .lr = 0.1f, .weight_decay = 0.5f }));
    for (int i = 0; i < 4; i++) assert_ok(fsdp_module_read_param(m, i, before + (i / 2) * 42 + (i % 2) * 36));
    one_batch(m, "x");
    assert_ok(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1 }));
    for (int i = 0; i < 4; i++) assert_ok(fsdp_module_read_param(m, i, after + (i / 2) * 42 + (i % 2) * 36));
    assert_true(memcmp(before, after, 42 * sizeof(float)) != 0);
    assert_memory_equal(before + 42, after + 42, 42 * sizeof(float));
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(m);
}

/* Two forwards on one tape, one backward over both. */
static void test_two_forwards_one_backward(void **state)
{
    (void)state;
    fsdp_module *inner = wrap(layer(WIDTH, WIDTH), "inner"), *m = wrap(sequential(inner, layer(WIDTH, WIDTH), NULL), "outer");
    float want[256], got[256];
    assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
    fsdp_tape *tape;
    fsdp_tensor *y, *z, *both;
    for (int alone = 0; alone < 2; alone++) { /* loss(y1 + y2), both ways round: through one model, or two tapes' sums */
        assert_ok(fsdp_tape_begin(&tape, comm));
        assert_ok(fsdp_forward(m, tape, input(tape, alone ? "z" : "x"), &y));
        assert_ok(fsdp_forward(m, tape, input(tape, alone ? "x" : "z"), &z));
        assert_ok(fsdp_op_add(tape, y, z, &both));
        assert_ok(fsdp_backward(tape, loss_of(tape, both)));
        assert_ok(fsdp_tape_end(tape));
        gradients(m, alone ? got : want);
    }
    assert_near(want, got, 84, 1e-5f);
    assert_true(want[3] != 0);
    fsdp_module_destroy(m);
}

/* Two tapes: forward, forward, backward, end, backward, end; an evaluation in between. The same as one after the other. */
static void test_two_tapes(void **state)
{
    (void)state;
    fsdp_module *inner = wrap(layer(WIDTH, WIDTH), "inner"), *m = wrap(sequential(inner, layer(WIDTH, WIDTH), NULL), "outer");
    float want[256], got[256];
    fsdp_tape *tape[2], *eval;
    fsdp_tensor *y[2], *z, *loss;
    double sum, count;
    assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
    one_batch(m, "x");
    one_batch(m, "z");
    gradients(m, want);
    for (int i = 0; i < 2; i++) {
        assert_ok(fsdp_tape_begin(&tape[i], comm));
        assert_ok(fsdp_forward(m, tape[i], input(tape[i], i ? "z" : "x"), &y[i]));
    }
    assert_ok(fsdp_backward(tape[0], loss_of(tape[0], y[0])));
    assert_ok(fsdp_tape_begin_with(&eval, comm, &(fsdp_tape_opts){ .eval = true }));
    assert_ok(fsdp_forward(m, eval, input(eval, "x"), &z));
    assert_ok(fsdp_loss_read(loss_of(eval, z), &sum, &count));
    assert_ok(fsdp_tape_end(eval));
    loss = loss_of(tape[1], y[1]);
    assert_fails(fsdp_backward(tape[1], loss), FSDP_ERR_STATE, "end that pass first");
    assert_ok(fsdp_tape_end(tape[0]));
    assert_ok(fsdp_tape_cancel(tape[1])); /* its backward has begun, and failed */
    assert_ok(fsdp_tape_begin(&tape[1], comm));
    assert_ok(fsdp_forward(m, tape[1], input(tape[1], "z"), &y[1]));
    assert_ok(fsdp_backward(tape[1], loss_of(tape[1], y[1])));
    assert_ok(fsdp_tape_end(tape[1]));
    gradients(m, got);
    assert_memory_equal(want, got, 84 * sizeof(float));
    fsdp_module_destroy(m);
}

/* A loss that is read before the backward is the same one, and costs only time; also where its weight is in a unit that has
 * been resharded. */
static fsdp_status tied_head(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    return fsdp_op_linear_cross_entropy(tape, in, fsdp_module_param(m, 0), *(fsdp_tensor **)ctx, out);
}

static void test_loss_before_backward(void **state)
{
    (void)state;
    for (int read_first = 0; read_first < 2; read_first++) {
        static float grads[2][128];
        static double sums[2];
        fsdp_module *body = wrap(layer(WIDTH, WIDTH), "body"), *head, *m;
        fsdp_tensor *labels, *loss;
        fsdp_tape *tape;
        double count, mean;
        int32_t v[ROWS] = { 1, 12, 0, 3 };
        assert_ok(fsdp_module_create(&head, &(fsdp_module_opts){ .type = "head", .forward = tied_head, .ctx = &labels }));
        assert_ok(fsdp_module_add_param(head, &(fsdp_param){ "weight", 2, { 13, WIDTH } }, FSDP_PARAM_NORMAL, 0.5f));
        head = wrap(head, "head");
        m = wrap(sequential(body, head, NULL), "root");
        assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
        assert_ok(fsdp_tape_begin(&tape, comm));
        assert_ok(fsdp_tensor_from_i32(&labels, tape, v, 1, (int64_t[]){ ROWS }));
        assert_ok(fsdp_forward(m, tape, input(tape, "x"), &loss));
        if (read_first) assert_ok(fsdp_loss_mean(comm, loss, &mean));
        assert_ok(fsdp_backward(tape, loss));
        assert_ok(fsdp_loss_read(loss, &sums[read_first], &count));
        assert_ok(fsdp_tape_end(tape));
        gradients(m, grads[read_first]);
        fsdp_module_destroy(m);
        if (read_first) {
            assert_true(sums[0] == sums[1] && mean == sums[1] / count);
            assert_memory_equal(grads[0], grads[1], sizeof(grads[0]));
        }
    }
}

/* Another tape ends between forward and backward: what it sharded is gathered again. */
static void test_evaluation_between(void **state)
{
    (void)state;
    float grads[2][128];
    double sums[2], count;
    for (int between = 0; between < 2; between++) {
        fsdp_module *head;
        fsdp_tensor *labels, *loss, *y;
        fsdp_tape *tape, *eval;
        int32_t v[ROWS] = { 1, 12, 0, 3 };
        assert_ok(fsdp_module_create(&head, &(fsdp_module_opts){ .type = "head", .forward = tied_head, .ctx = &labels }));
        assert_ok(fsdp_module_add_param(head, &(fsdp_param){ "weight", 2, { 13, WIDTH } }, FSDP_PARAM_NORMAL, 0.5f));
        fsdp_module *m = wrap(sequential(wrap(layer(WIDTH, WIDTH), "body"), head, NULL), "root");
        assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
        assert_ok(fsdp_tape_begin(&tape, comm));
        assert_ok(fsdp_tensor_from_i32(&labels, tape, v, 1, (int64_t[]){ ROWS }));
        assert_ok(fsdp_forward(m, tape, input(tape, "x"), &loss));
        if (between) {
            assert_ok(fsdp_tape_begin_with(&eval, comm, &(fsdp_tape_opts){ .eval = true }));
            assert_ok(fsdp_forward(fsdp_module_child(m, 0), eval, input(eval, "x"), &y));
            assert_ok(fsdp_tape_end(eval));
            assert_fails(fsdp_loss_read(loss, &sums[1], &count), FSDP_ERR_STATE, "after fsdp_backward()");
        }
        assert_ok(fsdp_backward(tape, loss));
        assert_ok(fsdp_loss_read(loss, &sums[between], &count));
        assert_ok(fsdp_tape_end(tape));
        gradients(m, grads[between]);
        fsdp_module_destroy(m);
    }
    assert_true(sums[0] == sums[1]);
    assert_memory_equal(grads[0], grads[1], 120 * sizeof(float));
}

/* ---- names and lists ---- */

static void test_names(void **state)
{
    (void)state;
    const fsdp_module_param_info *p;
    int n;
    float w[36];
    fsdp_module *m = sequential(sequential(layer(WIDTH, WIDTH), NULL, NULL), layer(WIDTH, WIDTH), NULL);
    static const char *const want[] = { "0.0.weight", "0.0.bias", "1.weight", "1.bias" };
    for (int wraps = 0; wraps < 3; wraps++) { /* wrapping, even twice, changes no name */
        if (wraps > 0) m = wrap(m, "m");
        assert_ok(fsdp_module_params(m, &p, &n));
        assert_int_equal(n, 4);
        for (int i = 0; i < n; i++) assert_string_equal(p[i].name, want[i]);
        assert_int_equal(fsdp_module_numel(m), 84);
        assert_int_equal(fsdp_module_units(m).count, wraps);
    }
    /* a list of units stays good while the tree is as it is, whatever else is asked of it */
    fsdp_unit_list units = fsdp_module_units(m);
    assert_ok(fsdp_summon_begin(m, &(fsdp_summon_opts){ .recurse = true }));
    assert_ok(fsdp_summon_end(m));
    assert_ptr_equal(units.units, fsdp_module_units(m).units);
    /* reading while going through the list: the list is good until the next one */
    assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
    for (int i = 0; i < n; i++) {
        assert_ok(fsdp_module_read_param(m, i, w));
        assert_string_equal(p[i].name, want[i]);
        assert_non_null(p[i].unit);
    }
    assert_fails(fsdp_module_read_param(m, 4, w), FSDP_ERR_INVALID, "4");
    assert_fails(fsdp_module_read_param(m, -1, w), FSDP_ERR_INVALID, "-1");
    fsdp_module_destroy(m);
    fsdp_module_destroy(NULL);
}

static void test_parents(void **state)
{
    (void)state;
    fsdp_module *a = layer(WIDTH, WIDTH), *b = layer(WIDTH, WIDTH), *m, *other, *out;
    m = sequential(a, b, NULL);
    assert_fails(fsdp_sequential(&other, (fsdp_module *[]){ a }, 1), FSDP_ERR_INVALID, "in another module already");
    fsdp_module *c = layer(WIDTH, WIDTH);
    assert_fails(fsdp_sequential(&other, (fsdp_module *[]){ c, c }, 2), FSDP_ERR_INVALID, "in another module already");
    assert_fails(fsdp_sequential(&other, (fsdp_module *[]){ c, NULL }, 2), FSDP_ERR_INVALID, "NULL");
    assert_fails(fsdp_sequential(&other, NULL, 2), FSDP_ERR_INVALID, "2 children");
    assert_fails(fsdp_sequential(&other, (fsdp_module *[]){ c }, -1), FSDP_ERR_INVALID, "-1 children");
    assert_fails(fsdp_module_create(&other, &(fsdp_module_opts){ .type = "x" }), FSDP_ERR_INVALID, "no forward");
    assert_fails(fsdp_module_create(&other, &(fsdp_module_opts){ .forward = thrice, .child_count = 2 }), FSDP_ERR_INVALID, "2 children");
    /* c was not taken by any of these */
    assert_ok(fsdp_sequential(&other, (fsdp_module *[]){ c }, 1));
    /* two of one name within one module cannot be told apart in a file */
    fsdp_module_opts twins = { .forward = thrice, .children = (fsdp_module *[]){ m, other }, .names = (const char *[]){ "x", "x" }, .child_count = 2 };
    assert_fails(fsdp_module_create(&out, &twins), FSDP_ERR_INVALID, "\"x\"");
    assert_ok(fsdp_module_add_param(m, &(fsdp_param){ "own", 1, { 3 } }, FSDP_PARAM_ZEROS, 0));
    assert_fails(fsdp_module_add_param(m, &(fsdp_param){ "own", 1, { 3 } }, FSDP_PARAM_ZEROS, 0), FSDP_ERR_INVALID, "own");
    assert_fails(fsdp_module_add_param(m, &(fsdp_param){ NULL, 1, { 3 } }, FSDP_PARAM_ZEROS, 0), FSDP_ERR_INVALID, "name");
    assert_fails(fsdp_module_add_param(m, &(fsdp_param){ "neg", 1, { -3 } }, FSDP_PARAM_ZEROS, 0), FSDP_ERR_INVALID, "-3");
    fsdp_module_destroy(m);
    fsdp_module_destroy(other);
    assert_fails(fsdp_linear(&out, 0, 3, NULL), FSDP_ERR_INVALID, "0 inputs");
    assert_fails(fsdp_linear(&out, 3, 3, &(fsdp_linear_opts){ .activation = (fsdp_activation)7 }), FSDP_ERR_INVALID, "activation");
    assert_fails(fsdp_activation_module(&out, (fsdp_activation)7), FSDP_ERR_INVALID, "activation");
    assert_fails(fsdp_embedding(&out, 3, 0), FSDP_ERR_INVALID, "3 rows of 0");
    assert_fails(fsdp_layer_norm(&out, 3, -1.0f), FSDP_ERR_INVALID, "eps -1");
    assert_fails(fsdp_dropout(&out, 1.0f), FSDP_ERR_INVALID, "1");
}

/* ---- wrong calls ---- */

static void test_parameter_in_no_unit(void **state)
{
    (void)state;
    fsdp_module *m = sequential(wrap(layer(WIDTH, WIDTH), "in"), layer(WIDTH, WIDTH), NULL);
    fsdp_tape *tape;
    fsdp_tensor *y;
    fsdp_rng rng;
    float w[WIDTH * WIDTH];
    fsdp_rng_init(&rng, 1);
    assert_ok(fsdp_module_init(fsdp_module_child(m, 1), FSDP_INIT_KAIMING, &rng));
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_forward(m, tape, input(tape, "x"), &y)); /* forward is fine */
    assert_fails(fsdp_backward(tape, loss_of(tape, y)), FSDP_ERR_STATE, "in no unit");
    assert_fails(fsdp_backward(tape, loss_of(tape, y)), FSDP_ERR_STATE, "");
    assert_ok(fsdp_tape_cancel(tape));
    assert_fails(fsdp_module_read_param(m, 2, w), FSDP_ERR_STATE, "1.weight");
    m = wrap(m, "m");
    one_batch(m, "x"); /* now it is */
    fsdp_module_destroy(m);
}

static void test_wrong_device_and_communicator(void **state)
{
    (void)state;
    fsdp_device *guard, *second;
    fsdp_module *m = layer(WIDTH, WIDTH), *out;
    fsdp_tape *tape;
    fsdp_tensor *y;
    assert_ok(fsdp_device_open(&guard, "guard"));
    assert_ok(fsdp_device_open(&second, "guard"));
    assert_fails(fsdp_wrap(&out, m, &(fsdp_wrap_opts){ .comm = comm, .storage_device = second, .compute_device = guard }), FSDP_ERR_UNSUPPORTED, "one of them must be the host's memory");
    fsdp_device_close(second);
    assert_fails(fsdp_wrap(&out, m, &(fsdp_wrap_opts){ .comm = NULL }), FSDP_ERR_INVALID, "no communicator");
    assert_fails(fsdp_wrap(&out, NULL, &(fsdp_wrap_opts){ .comm = comm }), FSDP_ERR_INVALID, "no module");
    assert_fails(fsdp_wrap(&out, m, &(fsdp_wrap_opts){ .comm = comm, .mode = (fsdp_mode)9 }), FSDP_ERR_INVALID, "mode");
    assert_ok(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = comm, .compute_device = guard, .name = "there" }));
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_fails(fsdp_forward(m, tape, input(tape, "x"), &y), FSDP_ERR_INVALID, "device guard");
    assert_ok(fsdp_tape_end(tape));
    assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .device = guard }));
    assert_ok(fsdp_forward(m, tape, input(tape, "x"), &y));
    assert_ok(fsdp_backward(tape, loss_of(tape, y)));
    assert_ok(fsdp_tape_end(tape));
    fsdp_module_destroy(m);
    fsdp_device_close(guard);
}

/* A tape that is asked to begin, to go back or to end while a call of its communicator runs a function of the program's is refused, and
 * goes on when that is over. */
static fsdp_tape *in_use;
static int refused;

static fsdp_status meddle(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg)
{
    fsdp_tape *other;
    (void)k, (void)grad, (void)part, (void)count, (void)arg;
    fsdp_status st[] = { fsdp_tape_end(in_use), fsdp_tape_cancel(in_use), fsdp_tape_begin(&other, comm), fsdp_backward(in_use, NULL) };
    for (int i = 0; i < 4; i++) refused += st[i] == FSDP_ERR_STATE;
    return FSDP_OK;
}

static void test_tape_from_a_callback(void **state)
{
    (void)state;
    float want[WIDTH * WIDTH + WIDTH], got[WIDTH * WIDTH + WIDTH];
    fsdp_tensor *y;
    int n = 0;
    for (int k = 0; k < 2; k++) {
        fsdp_module *m = linear(WIDTH, WIDTH, FSDP_ACT_NONE);
        assert_ok(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1));
        assert_ok(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = comm }));
        if (k == 1) assert_ok(fsdp_unit_set_grad_hooks(fsdp_module_units(m).units[0], &(fsdp_grad_hooks){ .post = meddle }));
        assert_ok(fsdp_tape_begin(&in_use, comm));
        assert_ok(fsdp_forward(m, in_use, input(in_use, "x"), &y));
        assert_ok(fsdp_backward(in_use, loss_of(in_use, y)));
        assert_ok(fsdp_tape_end(in_use));
        n = gradients(m, k == 0 ? want : got);
        fsdp_module_destroy(m);
    }
    assert_int_equal(refused, 4);
    assert_memory_equal(want, got, (size_t)n * sizeof(float));
}

static void test_wrap_twice(void **state)
{
    (void)state;
    fsdp_module *in = wrap(layer(WIDTH, WIDTH), "in"), *m = sequential(in, layer(WIDTH, WIDTH), NULL), *out = NULL;
    assert_fails(fsdp_wrap(&out, in, &(fsdp_wrap_opts){ .comm = comm }), FSDP_ERR_INVALID, "wrapped already (unit \"in\")");
    assert_null(out);
    m = wrap(m, "once");
    fsdp_module *again = wrap(m, "twice"); /* a unit of no parameters, around: allowed, and of no harm */
    assert_ptr_not_equal(again, m);
    assert_int_equal(fsdp_module_units(again).count, 3);
    assert_ok(fsdp_module_init_keyed(again, FSDP_INIT_KAIMING, 1));
    one_batch(again, "x");
    /* a parameter that comes later is in no unit, until its module is wrapped around again */
    assert_ok(fsdp_module_add_param(m, &(fsdp_param){ "late", 1, { 3 } }, FSDP_PARAM_ONES, 0));
    assert_ok(fsdp_module_init_keyed(again, FSDP_INIT_KAIMING, 1));
    again = wrap(again, "thrice");
    float late[3];
    const fsdp_module_param_info *p;
    int n, seen = 0;
    assert_ok(fsdp_module_params(again, &p, &n));
    for (int i = 0; i < n; i++) {
        if (strcmp(p[i].name, "late") != 0) continue;
        assert_string_equal(fsdp_unit_name(p[i].unit), "thrice");
        assert_ok(fsdp_unit_read_param(p[i].unit, p[i].index, late));
        seen = late[0] == 1 && late[2] == 1;
    }
    assert_int_equal(seen, 1);
    fsdp_module_destroy(again);
}

static void test_summon(void **state)
{
    (void)state;
    fsdp_module *in = wrap(layer(WIDTH, WIDTH), "in"), *m = wrap(sequential(in, layer(WIDTH, WIDTH), NULL), "out");
    fsdp_rng rng;
    fsdp_tape *tape;
    fsdp_rng_init(&rng, 1);
    fsdp_summon_opts all = { .recurse = true, .writeback = true }, own = { .writeback = true }, look = { .recurse = true };
    assert_fails(fsdp_summon_end(m), FSDP_ERR_STATE, "not summoned");
    assert_fails(fsdp_module_init(m, FSDP_INIT_KAIMING, &rng), FSDP_ERR_STATE, "fsdp_summon_begin");
    assert_ok(fsdp_summon_begin(m, &look));
    assert_fails(fsdp_module_init(m, FSDP_INIT_KAIMING, &rng), FSDP_ERR_STATE, "writeback");
    assert_fails(fsdp_summon_begin(m, &all), FSDP_ERR_STATE, "writeback in the outermost");
    assert_fails(fsdp_summon_begin(in, &own), FSDP_ERR_STATE, "writeback in the outermost");
    assert_fails(fsdp_tape_begin(&tape, comm), FSDP_ERR_STATE, "summoned");
    assert_fails(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1), FSDP_ERR_STATE, "summoned");
    assert_ok(fsdp_summon_begin(in, NULL)); /* reading within is fine */
    assert_ok(fsdp_summon_end(in));
    assert_ok(fsdp_summon_end(m));
    assert_ok(fsdp_summon_begin(m, &own)); /* without the inner one */
    assert_fails(fsdp_module_init(m, FSDP_INIT_KAIMING, &rng), FSDP_ERR_STATE, "\"in\"");
    assert_ok(fsdp_module_init(fsdp_module_child(m, 1), FSDP_INIT_KAIMING, &rng));
    assert_ok(fsdp_summon_end(m));
    assert_ok(fsdp_summon_begin(m, &all));
    assert_ok(fsdp_module_init(m, FSDP_INIT_KAIMING, &rng));
    assert_ok(fsdp_summon_end(m));
    one_batch(m, "x");
    /* a tape is open: not now */
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_fails(fsdp_summon_begin(m, &look), FSDP_ERR_STATE, "a pass is open");
    assert_fails(fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1), FSDP_ERR_STATE, "a pass is open");
    fsdp_module *more = layer(WIDTH, WIDTH), *out;
    assert_fails(fsdp_wrap(&out, more, &(fsdp_wrap_opts){ .comm = comm, .name = "more" }), FSDP_ERR_STATE, "a pass is open");
    assert_ok(fsdp_tape_end(tape));
    fsdp_module_destroy(more);
    fsdp_module_destroy(m);
}

/* What is asked of a part of a unit is either done, or refused by name: never quietly left undone. */
static void test_part_of_a_unit(void **state)
{
    (void)state;
    fsdp_module *a = layer(WIDTH, WIDTH), *m = wrap(sequential(a, layer(WIDTH, WIDTH), NULL), "both");
    assert_fails(fsdp_module_init_keyed(m, (fsdp_init_kind)5, 1), FSDP_ERR_INVALID, "kind 5");
    fsdp_rng rng;
    fsdp_rng_init(&rng, 1);
    assert_ok(fsdp_summon_begin(a, &(fsdp_summon_opts){ .writeback = true })); /* its unit lies around */
    assert_ok(fsdp_module_init(a, FSDP_INIT_KAIMING, &rng));
    assert_ok(fsdp_summon_end(a));
    float w[WIDTH * WIDTH], zero[WIDTH * WIDTH] = { 0 };
    assert_ok(fsdp_module_read_param(m, 0, w));
    assert_true(memcmp(w, zero, sizeof(w)) != 0);
    assert_ok(fsdp_module_read_param(m, 2, w));
    assert_memory_equal(w, zero, sizeof(w));
    /* by key: what that module alone would have */
    float by_key[WIDTH * WIDTH];
    fsdp_module *alone = wrap(layer(WIDTH, WIDTH), "alone");
    assert_ok(fsdp_module_init_keyed(alone, FSDP_INIT_KAIMING, 1));
    assert_ok(fsdp_module_read_param(alone, 0, by_key));
    assert_ok(fsdp_module_init_keyed(a, FSDP_INIT_KAIMING, 1));
    assert_ok(fsdp_module_read_param(m, 0, w));
    assert_memory_equal(w, by_key, sizeof(w));
    assert_ok(fsdp_module_read_param(m, 2, w));
    assert_memory_equal(w, zero, sizeof(w));
    fsdp_module_destroy(alone);
    fsdp_module_destroy(m);
}

/* ---- memory ---- */

static fsdp_status make_and_train(bool *built)
{
    fsdp_module *a = NULL, *b = NULL, *m = NULL;
    fsdp_tape *tape = NULL;
    fsdp_tensor *y, *labels, *loss, *x;
    float v[ROWS * WIDTH] = { 1 };
    int32_t l[ROWS] = { 0 };
    fsdp_wrap_opts o = { .comm = comm };
    fsdp_status st = fsdp_linear(&a, WIDTH, WIDTH, NULL);
    if (st == FSDP_OK) st = fsdp_layer_norm(&b, WIDTH, 0);
    if (st == FSDP_OK) st = fsdp_wrap(&a, a, &o);
    if (st == FSDP_OK) st = fsdp_sequential(&m, (fsdp_module *[]){ a, b }, 2);
    if (m == NULL) {
        fsdp_module_destroy(a);
        fsdp_module_destroy(b);
        return st;
    }
    if (st == FSDP_OK) st = fsdp_module_init_keyed(m, FSDP_INIT_KAIMING, 1); /* b has values before it is wrapped */
    if (st == FSDP_OK) st = fsdp_wrap(&m, m, &o);
    if (st == FSDP_OK) st = fsdp_tape_begin(&tape, comm);
    if (st == FSDP_OK) st = fsdp_tensor_from_f32(&x, tape, v, 2, (int64_t[]){ ROWS, WIDTH });
    if (st == FSDP_OK) st = fsdp_tensor_from_i32(&labels, tape, l, 1, (int64_t[]){ ROWS });
    if (st == FSDP_OK) st = fsdp_forward(m, tape, x, &y);
    if (st == FSDP_OK) st = fsdp_op_cross_entropy(tape, y, labels, &loss);
    if (st == FSDP_OK) st = fsdp_backward(tape, loss);
    *built = st == FSDP_OK;
    fsdp_status end = fsdp_tape_end(tape);
    fsdp_module_destroy(m);
    return st != FSDP_OK ? st : end;
}

static void test_allocations_that_fail(void **state)
{
    (void)state;
    bool built = false;
    assert_ok(make_and_train(&built));
    size_t live = arena_now().bytes_live;
    for (long n = 1, made = 1; n <= made; n++) {
        built = false;
        fsdpi_alloc_fail_at(n);
        fsdp_status st = make_and_train(&built);
        made = fsdpi_alloc_fail_at(0);
        assert_int_equal(arena_now().bytes_live, live);
        if (st != FSDP_OK && st != FSDP_ERR_NOMEM) fail_msg("allocation %ld: %s", n, fsdp_last_error());
        assert_true(n < 2000);
        assert_ok(make_and_train(&built)); /* the communicator is well */
    }
}

static void test_destroy_frees_all(void **state)
{
    (void)state;
    bool built;
    assert_ok(make_and_train(&built));
    long blocks = fsdpi_alloc_live();
    size_t live = arena_now().bytes_live;
    for (int i = 0; i < 3; i++) assert_ok(make_and_train(&built));
    assert_int_equal(fsdpi_alloc_live(), blocks);
    assert_int_equal(arena_now().bytes_live, live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hooks, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_hook_that_fails, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_unit_used_thrice, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_unused_unit_is_left_alone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_two_forwards_one_backward, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_two_tapes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_loss_before_backward, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_evaluation_between, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_parents, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_parameter_in_no_unit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrong_device_and_communicator, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_tape_from_a_callback, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrap_twice, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_summon, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_part_of_a_unit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_allocations_that_fail, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_destroy_frees_all, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
