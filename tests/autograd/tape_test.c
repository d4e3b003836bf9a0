/* SPDX-License-Identifier: MIT
 *
 * The tape: what it keeps and gives up, the order in which scopes are told, and calls that are wrong. A wrong call is an error
 * with a message and changes nothing: what was right before it still works after it. */
#include "support/one_rank.h"

#include "autograd/tape.h"
#include "base/alloc.h"
#include "nn/module.h"

#include <math.h>

/* One whose gradient is asked for. */
static fsdp_tensor *wanted(fsdp_tape *tape, const char *name, int64_t rows, int64_t cols)
{
    fsdp_tensor *t = matrix(tape, name, rows, cols);
    assert_ok(fsdp_tensor_require_grad(t));
    return t;
}

static void gradient(fsdp_tensor *t, float *out)
{
    assert_ok(fsdp_tensor_grad_to_f32(t, out));
}

/* ---- memory ---- */

enum { DEEP = 12, ROWS = 16, WIDE = 64 };

/* A chain of layers, each a matrix of its own. Intermediate tensors are released as they are used. */
static fsdp_status chain(fsdp_tape *tape, fsdp_tensor **loss)
{
    fsdp_tensor *x = wanted(tape, "x", ROWS, WIDE);
    for (int i = 0; i < DEEP; i++) {
        fsdp_tensor *w = matrix(tape, "w", WIDE, WIDE), *y;
        FSDP_TRY(fsdp_op_linear(tape, x, w, NULL, &(fsdp_op_linear_opts){ .activation = FSDP_ACT_GELU_TANH }, &y));
        fsdp_tensor_release(x);
        fsdp_tensor_release(w);
        x = y;
    }
    FSDP_TRY(fsdp_op_cross_entropy(tape, x, labels_of(tape, ROWS, WIDE), loss));
    fsdp_tensor_release(x);
    return FSDP_OK;
}

static size_t seen[DEEP + 2];
static int seen_count;

static fsdp_status note_memory(void *ctx, fsdp_tape *tape)
{
    (void)ctx, (void)tape;
    seen[seen_count++] = arena_now().bytes_live;
    return FSDP_OK;
}

static void test_memory_falls_in_backward(void **state)
{
    (void)state;
    static const fsdpi_scope_hooks hooks = { .after_backward = note_memory };
    fsdp_tape *tape;
    size_t before = arena_now().bytes_live;
    assert_ok(fsdp_tape_begin(&tape, comm));
    fsdp_tensor *x = wanted(tape, "x", ROWS, WIDE), *loss;
    for (int i = 0; i < DEEP; i++) {
        fsdp_tensor *w = matrix(tape, "w", WIDE, WIDE), *y;
        assert_ok(fsdpi_tape_enter(tape, &hooks, NULL));
        assert_ok(fsdp_op_linear(tape, x, w, NULL, &(fsdp_op_linear_opts){ .activation = FSDP_ACT_GELU_TANH }, &y));
        assert_ok(fsdpi_tape_leave(tape, &hooks, NULL));
        fsdp_tensor_release(w);
        if (i > 0) fsdp_tensor_release(x);
        x = y;
    }
    assert_ok(fsdp_op_cross_entropy(tape, x, labels_of(tape, ROWS, WIDE), &loss));
    fsdp_tensor_release(x);
    seen_count = 0;
    assert_ok(fsdp_backward(tape, loss));
    assert_int_equal(seen_count, DEEP);
    for (int i = 1; i < DEEP; i++)
        if (!(seen[i] < seen[i - 1])) fail_msg("%zu bytes in use after layer %d went back, %zu before it", seen[i], DEEP - i, seen[i - 1]);
    /* what a layer needed for its backward: its weight and what came before its activation, at least */
    assert_true(seen[0] - seen[DEEP - 1] >= (size_t)(DEEP - 1) * (WIDE * WIDE + ROWS * WIDE) * sizeof(float));
    assert_ok(fsdp_tape_cancel(tape));
    assert_int_equal(arena_now().bytes_live, before);
}

static void test_nothing_is_left(void **state)
{
    (void)state;
    size_t live = 0;
    uint64_t allocs = 0;
    long blocks = 0;
    for (int step = 0; step < 6; step++) {
        fsdp_tape *tape;
        fsdp_tensor *loss;
        assert_ok(fsdp_tape_begin(&tape, comm));
        assert_ok(chain(tape, &loss));
        if (step != 3) assert_ok(fsdp_backward(tape, loss)); /* once without */
        assert_ok(step % 2 ? fsdp_tape_end(tape) : fsdp_tape_cancel(tape));
        fsdpi_arena_stats s = arena_now();
        if (step > 0) assert_int_equal(s.bytes_live, live);
        if (step > 1) assert_int_equal(s.system_allocs, allocs); /* everything comes from what the first steps took */
        if (step > 1) assert_int_equal(fsdpi_alloc_live(), blocks + (long)(s.system_allocs - allocs));
        live = s.bytes_live;
        allocs = s.system_allocs;
        blocks = fsdpi_alloc_live();
    }
}

/* Everything may be released as soon as the last call with it is made: what a backward needs it keeps. */
static void test_release_all_before_backward(void **state)
{
    (void)state;
    float want[ROWS * 6], got[ROWS * 6];
    for (int release = 0; release < 2; release++) {
        fsdp_tape *tape;
        fsdp_tensor *x, *w, *b, *g, *c, *table, *y, *z, *norm, *sum, *qkv, *mixed, *ids, *rows, *loss, *labels;
        static const int32_t id[8] = { 0, 3, 1, 2, 3, 0, 1, 1 };
        assert_ok(fsdp_tape_begin(&tape, comm));
        table = wanted(tape, "table", 4, 6);
        x = wanted(tape, "x", 8, 6);
        w = matrix(tape, "w", 18, 6);
        b = matrix(tape, "b", 1, 18);
        g = matrix(tape, "g", 1, 6);
        c = matrix(tape, "c", 9, 6);
        assert_ok(fsdp_op_reshape(tape, b, 1, (int64_t[]){ 18 }, &b));
        assert_ok(fsdp_op_reshape(tape, g, 1, (int64_t[]){ 6 }, &g));
        assert_ok(fsdp_tensor_from_i32(&ids, tape, id, 1, (int64_t[]){ 8 }));
        assert_ok(fsdp_op_embedding(tape, ids, table, NULL, 0, &y));
        assert_ok(fsdp_op_add_layer_norm(tape, y, x, g, NULL, 0.1f, &sum, &norm));
        assert_ok(fsdp_op_linear(tape, norm, w, b, NULL, &z));
        assert_ok(fsdp_op_reshape(tape, z, 3, (int64_t[]){ 2, 4, 18 }, &qkv));
        assert_ok(fsdp_op_attention(tape, qkv, &(fsdp_op_attention_opts){ .heads = 2 }, &mixed));
        assert_ok(fsdp_op_activation(tape, mixed, FSDP_ACT_GELU_ERF, &mixed));
        assert_ok(fsdp_op_reshape(tape, mixed, 2, (int64_t[]){ 8, 6 }, &rows));
        labels = labels_of(tape, 8, 9);
        assert_ok(fsdp_op_linear_cross_entropy(tape, rows, c, labels, &loss));
        if (release) {
            fsdp_tensor *all[] = { table, w, b, g, c, ids, y, sum, norm, z, qkv, mixed, rows, labels };
            for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) fsdp_tensor_release(all[i]);
        }
        assert_ok(fsdp_backward(tape, loss));
        gradient(x, release ? got : want);
        assert_ok(fsdp_tape_end(tape));
    }
    assert_memory_equal(want, got, 8 * 6 * sizeof(float));
    assert_true(want[0] != 0);
}

static void test_released_tensor(void **state)
{
    (void)state;
    fsdp_tape *tape;
    fsdp_tensor *x, *w, *y, *labels, *loss;
    float out[16];
    double sum, count;
    assert_ok(fsdp_tape_begin(&tape, comm));
    x = wanted(tape, "x", 4, 4);
    w = wanted(tape, "w", 4, 4);
    labels = labels_of(tape, 4, 4);
    fsdp_tensor_release(NULL);
    assert_ok(fsdp_op_linear(tape, x, w, NULL, NULL, &y));
    fsdp_tensor_release(w);
    fsdp_tensor_release(w);
    assert_fails(fsdp_tensor_to_f32(w, out), FSDP_ERR_STATE, "given up");
    assert_fails(fsdp_op_linear(tape, x, w, NULL, NULL, &y), FSDP_ERR_STATE, "given up");
    assert_fails(fsdp_op_reshape(tape, w, 1, (int64_t[]){ 16 }, &y), FSDP_ERR_STATE, "given up");
    fsdp_tensor_release(labels);
    assert_fails(fsdp_op_cross_entropy(tape, y, labels, &loss), FSDP_ERR_STATE, "given up");
    labels = labels_of(tape, 4, 4);
    assert_ok(fsdp_op_cross_entropy(tape, y, labels, &loss));
    fsdp_tensor_release(labels);
    fsdp_tensor_release(y);
    /* a loss is not to be had back, but it can still be gone back from */
    fsdp_tensor_release(loss);
    fsdp_status st = fsdp_loss_read(loss, &sum, &count);
    if (st != FSDP_OK) assert_int_equal(st, FSDP_ERR_STATE);
    st = fsdp_backward(tape, loss);
    if (st != FSDP_OK) assert_int_equal(st, FSDP_ERR_STATE);
    assert_ok(fsdp_tape_cancel(tape));
}

/* ---- wrong calls ---- */

static void test_backward(void **state)
{
    (void)state;
    fsdp_tape *tape, *other, *eval;
    fsdp_tensor *x, *y, *loss, *another;
    float g[16], again[16];
    double sum, count;
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_tape_begin(&other, comm));
    x = wanted(tape, "x", 4, 4);
    assert_fails(fsdp_tensor_grad_to_f32(x, g), FSDP_ERR_STATE, "no backward");
    assert_fails(fsdp_backward(tape, NULL), FSDP_ERR_INVALID, "loss");
    assert_fails(fsdp_backward(tape, x), FSDP_ERR_INVALID, "loss");
    assert_ok(fsdp_op_add(tape, x, x, &y));
    assert_fails(fsdp_backward(tape, y), FSDP_ERR_INVALID, "loss"); /* of many values */
    assert_fails(fsdp_loss_read(y, &sum, &count), FSDP_ERR_INVALID, "not a loss");
    assert_fails(fsdp_loss_read(NULL, &sum, &count), FSDP_ERR_INVALID, "not a loss");
    assert_ok(fsdp_op_cross_entropy(tape, y, labels_of(tape, 4, 4), &loss));
    assert_fails(fsdp_backward(other, loss), FSDP_ERR_INVALID, "not of this tape");
    assert_fails(fsdp_op_add(tape, loss, loss, &another), FSDP_ERR_INVALID, "F64");
    assert_ok(fsdp_op_cross_entropy(tape, matrix(tape, "data", 4, 4), labels_of(tape, 4, 4), &another));
    assert_fails(fsdp_backward(tape, another), FSDP_ERR_INVALID, "does not depend");
    assert_ok(fsdp_backward(tape, loss));
    gradient(x, g);
    assert_fails(fsdp_backward(tape, loss), FSDP_ERR_STATE, "gone back");
    assert_fails(fsdp_op_add(tape, x, x, &y), FSDP_ERR_STATE, "gone back");
    gradient(x, again);
    assert_memory_equal(g, again, sizeof(g));
    assert_fails(fsdp_tensor_grad_to_f32(y, g), FSDP_ERR_INVALID, "asked for");
    assert_ok(fsdp_tape_end(other));
    assert_ok(fsdp_tape_end(tape));
    assert_ok(fsdp_tape_end(NULL));
    assert_ok(fsdp_tape_cancel(NULL));

    assert_ok(fsdp_tape_begin_with(&eval, comm, &(fsdp_tape_opts){ .eval = true }));
    x = wanted(eval, "x", 4, 4);
    assert_ok(fsdp_op_cross_entropy(eval, x, labels_of(eval, 4, 4), &loss));
    assert_fails(fsdp_backward(eval, loss), FSDP_ERR_STATE, "evaluation");
    assert_ok(fsdp_loss_read(loss, &sum, &count));
    assert_true(count == 4);
    assert_ok(fsdp_tape_end(eval));
}

static void test_other_tapes_tensors(void **state)
{
    (void)state;
    fsdp_tape *tape, *other;
    fsdp_tensor *mine, *theirs, *ids, *out, *two, *vector;
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_tape_begin(&other, comm));
    mine = wanted(tape, "x", 4, 4);
    theirs = wanted(other, "x", 4, 4);
    ids = labels_of(other, 4, 4);
    assert_ok(fsdp_op_reshape(other, matrix(other, "v", 1, 4), 1, (int64_t[]){ 4 }, &vector));
    assert_fails(fsdp_op_linear(tape, theirs, mine, NULL, NULL, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_linear(tape, mine, theirs, NULL, NULL, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_linear(tape, mine, mine, vector, NULL, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_activation(tape, theirs, FSDP_ACT_RELU, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_add(tape, mine, theirs, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_dropout(tape, theirs, 0.5f, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_reshape(tape, theirs, 1, (int64_t[]){ 16 }, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_layer_norm(tape, mine, vector, NULL, 0.1f, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_add_layer_norm(tape, mine, theirs, vector, NULL, 0.1f, &two, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_embedding(tape, ids, mine, NULL, 0, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_attention(tape, theirs, &(fsdp_op_attention_opts){ .heads = 1 }, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_cross_entropy(tape, theirs, ids, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_cross_entropy(tape, mine, ids, &out), FSDP_ERR_INVALID, "another tape");
    assert_fails(fsdp_op_linear_cross_entropy(tape, mine, theirs, labels_of(tape, 4, 4), &out), FSDP_ERR_INVALID, "another tape");
    /* nothing of this is on the tapes */
    assert_ok(fsdp_op_cross_entropy(tape, mine, labels_of(tape, 4, 4), &out));
    assert_ok(fsdp_backward(tape, out));
    assert_ok(fsdp_tape_end(tape));
    assert_ok(fsdp_tape_end(other));
}

static void test_shapes(void **state)
{
    (void)state;
    fsdp_tape *tape;
    fsdp_tensor *a, *b, *i, *v, *out, *out2;
    int64_t huge[2] = { INT64_MAX / 2, 4 };
    float x[4] = { 0 };
    assert_ok(fsdp_tape_begin(&tape, comm));
    a = matrix(tape, "a", 4, 6);
    b = matrix(tape, "b", 5, 7);
    i = labels_of(tape, 4, 4);
    assert_ok(fsdp_op_reshape(tape, matrix(tape, "v", 1, 5), 1, (int64_t[]){ 5 }, &v));
    assert_fails(fsdp_op_linear(tape, a, b, NULL, NULL, &out), FSDP_ERR_INVALID, "[4, 6]");
    assert_fails(fsdp_op_linear(tape, a, b, NULL, NULL, &out), FSDP_ERR_INVALID, "[5, 7]");
    assert_fails(fsdp_op_linear(tape, a, v, NULL, NULL, &out), FSDP_ERR_INVALID, "[5]");
    assert_fails(fsdp_op_linear(tape, NULL, b, NULL, NULL, &out), FSDP_ERR_INVALID, "the input is NULL");
    assert_fails(fsdp_op_linear(tape, i, b, NULL, NULL, &out), FSDP_ERR_INVALID, "I32");
    assert_fails(fsdp_op_linear(tape, a, a, NULL, &(fsdp_op_linear_opts){ .activation = (fsdp_activation)9 }, &out), FSDP_ERR_INVALID, "activation");
    assert_fails(fsdp_op_activation(tape, a, (fsdp_activation)9, &out), FSDP_ERR_INVALID, "activation");
    assert_fails(fsdp_op_activation(tape, a, (fsdp_activation)-1, &out), FSDP_ERR_INVALID, "activation");
    assert_fails(fsdp_op_add(tape, a, b, &out), FSDP_ERR_INVALID, "different shapes");
    assert_fails(fsdp_op_dropout(tape, a, 1.0f, &out), FSDP_ERR_INVALID, "less than 1");
    assert_fails(fsdp_op_dropout(tape, a, -0.1f, &out), FSDP_ERR_INVALID, "less than 1");
    assert_fails(fsdp_op_dropout(tape, a, NAN, &out), FSDP_ERR_INVALID, "less than 1");
    assert_fails(fsdp_op_layer_norm(tape, a, v, NULL, 0.1f, &out), FSDP_ERR_INVALID, "[5], not [6]");
    assert_fails(fsdp_op_add_layer_norm(tape, b, a, v, NULL, 0.1f, &out2, &out), FSDP_ERR_INVALID, "");
    assert_fails(fsdp_op_embedding(tape, a, b, NULL, 0, &out), FSDP_ERR_INVALID, "F32");
    assert_fails(fsdp_op_embedding(tape, i, v, NULL, 0, &out), FSDP_ERR_INVALID, "");
    assert_fails(fsdp_op_embedding(tape, i, b, b, 2, &out), FSDP_ERR_INVALID, "has 5");
    assert_fails(fsdp_op_embedding(tape, i, b, b, -1, &out), FSDP_ERR_INVALID, "has 5");
    assert_fails(fsdp_op_attention(tape, a, &(fsdp_op_attention_opts){ .heads = 2 }, &out), FSDP_ERR_INVALID, "[B, T, 3 C]");
    assert_fails(fsdp_op_attention(tape, a, NULL, &out), FSDP_ERR_INVALID, "no options");
    assert_fails(fsdp_op_cross_entropy(tape, b, i, &out), FSDP_ERR_INVALID, "[5, 7]");
    assert_fails(fsdp_op_linear_cross_entropy(tape, a, b, i, &out), FSDP_ERR_INVALID, "[5, 7]");
    assert_fails(fsdp_op_linear_cross_entropy(tape, a, NULL, i, &out), FSDP_ERR_INVALID, "no weight");
    assert_fails(fsdp_op_reshape(tape, a, 2, (int64_t[]){ 5, 5 }, &out), FSDP_ERR_INVALID, "25");
    assert_fails(fsdp_op_reshape(tape, a, 9, (int64_t[]){ 1, 1, 1, 1, 1, 1, 1, 4, 6 }, &out), FSDP_ERR_INVALID, "at most 8");
    assert_fails(fsdp_op_reshape(tape, a, 2, (int64_t[]){ -4, -6 }, &out), FSDP_ERR_INVALID, "-4");
    assert_fails(fsdp_tensor_from_f32(&out, tape, x, 2, huge), FSDP_ERR_INVALID, "more elements");
    assert_fails(fsdp_tensor_require_grad(i), FSDP_ERR_INVALID, "fp32");
    assert_fails(fsdp_tensor_to_f32(i, x), FSDP_ERR_INVALID, "I32");
    assert_ok(fsdp_tape_end(tape));
}

/* Ids and labels that are not in the vocabulary are named, also where the kernel runs later; the tape after it is well. */
static void use_ids(fsdp_device *dev, const int32_t *id, bool as_labels, const char *number)
{
    fsdp_tape *tape;
    fsdp_tensor *table, *ids, *y, *loss;
    double sum, count;
    float out[24];
    assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .device = dev }));
    table = wanted(tape, "t", 13, 6);
    assert_ok(fsdp_tensor_from_i32(&ids, tape, id, 1, (int64_t[]){ 4 }));
    fsdp_status st;
    if (as_labels) {
        assert_ok(fsdp_op_linear(tape, wanted(tape, "x", 4, 6), table, NULL, NULL, &y));
        assert_ok(fsdp_op_cross_entropy(tape, y, ids, &loss));
        st = fsdp_loss_read(loss, &sum, &count);
        if (st == FSDP_OK) assert_true(number == NULL && count == (id[0] == -100 ? 3 : 4));
    } else {
        st = fsdp_op_embedding(tape, ids, table, NULL, 0, &y);
        if (st == FSDP_OK) st = fsdp_tensor_to_f32(y, out);
    }
    if (number == NULL) assert_ok(st);
    else assert_fails(st, FSDP_ERR_INVALID, number);
    assert_ok(fsdp_tape_cancel(tape));
}

static void test_ids(void **state)
{
    (void)state;
    fsdp_device *dev[2] = { NULL };
    assert_ok(fsdp_device_open(&dev[1], "guard"));
    static const int32_t good[4] = { 0, 12, 1, 2 }, ignored[4] = { -100, 1, 2, 3 };
    static const int32_t bad[][4] = { { 0, 13, 1, 2 }, { 1, 2, 3, -1 }, { INT32_MAX, 0, 0, 0 }, { INT32_MIN, 0, 0, 0 }, { 65535, 1, 2, 3 } };
    for (int d = 0; d < 2; d++)
        for (size_t k = 0; k < sizeof(bad) / sizeof(bad[0]); k++)
            for (int as_labels = 0; as_labels < 2; as_labels++) {
                char number[16];
                for (int n = 0; n < 4; n++)
                    if (bad[k][n] < 0 || bad[k][n] > 12) snprintf(number, sizeof(number), "%d", bad[k][n]);
                use_ids(dev[d], bad[k], as_labels, number);
                use_ids(dev[d], good, as_labels, NULL);
                use_ids(dev[d], ignored, as_labels, as_labels ? NULL : "-100");
            }
    fsdp_device_close(dev[1]);
}

/* A loss of no rows that count: 0, and gradients of 0. */
static void test_nothing_counts(void **state)
{
    (void)state;
    fsdp_tape *tape;
    fsdp_tensor *x, *labels, *loss;
    double sum = 1, count = 1, mean = 1;
    float g[12];
    assert_ok(fsdp_tape_begin(&tape, comm));
    x = wanted(tape, "x", 3, 4);
    assert_ok(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ -100, -100, -100 }, 1, (int64_t[]){ 3 }));
    assert_ok(fsdp_op_cross_entropy(tape, x, labels, &loss));
    assert_ok(fsdp_backward(tape, loss));
    assert_ok(fsdp_loss_read(loss, &sum, &count));
    assert_ok(fsdp_loss_mean(comm, loss, &mean));
    assert_true(sum == 0 && count == 0 && mean == 0);
    gradient(x, g);
    for (int i = 0; i < 12; i++) assert_true(g[i] == 0);
    assert_ok(fsdp_tape_end(tape));
    /* and none at all */
    assert_ok(fsdp_tape_begin(&tape, comm));
    x = wanted(tape, "x", 0, 4);
    assert_ok(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ 0 }, 1, (int64_t[]){ 0 }));
    assert_ok(fsdp_op_cross_entropy(tape, x, labels, &loss));
    assert_ok(fsdp_backward(tape, loss));
    assert_ok(fsdp_loss_read(loss, &sum, &count));
    assert_true(sum == 0 && count == 0);
    assert_ok(fsdp_tape_end(tape));
}

/* ---- scopes ---- */

static char story[512];

static fsdp_status tell(void *ctx, const char *what)
{
    size_t n = strlen(story);
    snprintf(story + n, sizeof(story) - n, "%s%s ", what, (const char *)ctx);
    return FSDP_OK;
}
static fsdp_status t_bf(void *ctx, fsdp_tape *t) { (void)t; return tell(ctx, "+f"); }
static fsdp_status t_af(void *ctx, fsdp_tape *t) { (void)t; return tell(ctx, "-f"); }
static fsdp_status t_bb(void *ctx, fsdp_tape *t) { (void)t; return tell(ctx, "+b"); }
static fsdp_status t_ab(void *ctx, fsdp_tape *t) { (void)t; return tell(ctx, "-b"); }
static const fsdpi_scope_hooks telling = { t_bf, t_af, t_bb, t_ab };

static void enter(fsdp_tape *t, const char *name)
{
    assert_ok(fsdpi_tape_enter(t, &telling, (void *)(uintptr_t)name));
}

static void leave(fsdp_tape *t, const char *name)
{
    assert_ok(fsdpi_tape_leave(t, &telling, (void *)(uintptr_t)name));
}

static void test_scopes(void **state)
{
    (void)state;
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *unused, *loss;
    assert_ok(fsdp_tape_begin(&tape, comm));
    story[0] = '\0';
    x = wanted(tape, "x", 4, 4);
    enter(tape, "A");
    enter(tape, "B");
    assert_ok(fsdp_op_add(tape, x, x, &y));
    leave(tape, "B");
    enter(tape, "C"); /* its output is not used */
    assert_ok(fsdp_op_add(tape, x, x, &unused));
    leave(tape, "C");
    enter(tape, "D"); /* empty */
    leave(tape, "D");
    assert_ok(fsdp_op_add(tape, y, x, &y));
    enter(tape, "E");
    enter(tape, "F");
    assert_ok(fsdp_op_add(tape, y, x, &y));
    leave(tape, "F");
    leave(tape, "E");
    leave(tape, "A");
    enter(tape, "B"); /* again */
    assert_ok(fsdp_op_add(tape, y, y, &y));
    leave(tape, "B");
    assert_ok(fsdp_op_cross_entropy(tape, y, labels_of(tape, 4, 4), &loss));
    assert_string_equal(story, "+fA +fB -fB +fC -fC +fD -fD +fE +fF -fF -fE -fA +fB -fB ");
    story[0] = '\0';
    assert_ok(fsdp_backward(tape, loss));
    assert_string_equal(story, "+bB -bB +bA +bE +bF -bF -bE +bB -bB -bA ");
    assert_ok(fsdp_tape_end(tape));
}

/* A scope that was entered and not left, because something in it failed, or because backward is called within it. */
static void test_open_scope(void **state)
{
    (void)state;
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *loss;
    assert_ok(fsdp_tape_begin(&tape, comm));
    x = wanted(tape, "x", 4, 4);
    enter(tape, "A");
    assert_ok(fsdp_op_add(tape, x, x, &y));
    assert_ok(fsdp_op_cross_entropy(tape, y, labels_of(tape, 4, 4), &loss));
    assert_fails(fsdp_backward(tape, loss), FSDP_ERR_STATE, "forward");
    leave(tape, "A");
    assert_ok(fsdp_backward(tape, loss));
    /* and none begins on a tape that has gone back */
    story[0] = '\0';
    assert_fails(fsdpi_tape_enter(tape, &telling, (void *)(uintptr_t)"A"), FSDP_ERR_STATE, "gone back");
    assert_string_equal(story, "");
    assert_ok(fsdp_tape_end(tape));
}

/* ---- no memory ---- */

static void test_allocations_that_fail(void **state)
{
    (void)state;
    long made = 1;
    for (long n = 0; n <= made; n++) { /* 0: none, so that what is made once is there */
        fsdp_tape *tape;
        fsdp_tensor *loss = NULL, *x, *y, *w;
        size_t live = arena_now().bytes_live;
        long blocks = fsdpi_alloc_live();
        uint64_t allocs = arena_now().system_allocs;
        assert_ok(fsdp_tape_begin(&tape, comm));
        x = wanted(tape, "x", 8, 6);
        w = wanted(tape, "w", 18, 6);
        fsdp_tensor *labels = labels_of(tape, 8, 6);
        fsdpi_alloc_fail_at(n);
        fsdp_status st = fsdp_op_linear(tape, x, w, NULL, &(fsdp_op_linear_opts){ .activation = FSDP_ACT_GELU_TANH }, &y);
        if (st == FSDP_OK) st = fsdp_op_reshape(tape, y, 3, (int64_t[]){ 2, 4, 18 }, &y);
        if (st == FSDP_OK) st = fsdp_op_attention(tape, y, &(fsdp_op_attention_opts){ .heads = 2, .causal = true }, &y);
        if (st == FSDP_OK) st = fsdp_op_reshape(tape, y, 2, (int64_t[]){ 8, 6 }, &y);
        if (st == FSDP_OK) st = fsdp_op_add(tape, y, x, &y);
        if (st == FSDP_OK) st = fsdp_op_cross_entropy(tape, y, labels, &loss);
        if (st == FSDP_OK) st = fsdp_backward(tape, loss);
        made = fsdpi_alloc_fail_at(0);
        bool well = st == FSDP_OK;
        if (!well && st != FSDP_ERR_NOMEM) fail_msg("allocation %ld: %s", n, fsdp_last_error());
        assert_ok(well ? fsdp_tape_end(tape) : fsdp_tape_cancel(tape));
        assert_int_equal(arena_now().bytes_live, live);
        long headers = (long)(arena_now().system_allocs - allocs); /* of the arena's blocks */
        if (n > 0 && fsdpi_alloc_live() != blocks + headers) fail_msg("allocation %ld: %ld blocks after, %ld and %ld before", n, fsdpi_alloc_live(), blocks, headers);
        assert_true(n < 2000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_memory_falls_in_backward, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_nothing_is_left, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_release_all_before_backward, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_released_tensor, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_backward, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_other_tapes_tensors, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_shapes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_ids, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_nothing_counts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_scopes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_open_scope, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_allocations_that_fail, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
