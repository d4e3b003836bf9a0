/* SPDX-License-Identifier: MIT
 *
 * Every element of every parameter of a whole GPT: what fsdp_backward() says is what differences of the loss say, in each of the
 * architecture's variants. The same loss whether it is read before the backward or after, or computed from the logits. */
#include "support/testing.h"
#include "support/tiny_gpt.h"

#include <math.h>

enum { ROWS = 2, MAX_NUMEL = 2048 };
static const float h = 0x1p-7f;
/* Differences of a sum of 14 fp32 row losses of about 3: rounding 2e-7 * 40 / h = 1e-3 of an element; truncation as much. */
static const double bound = 6e-3;

static int32_t ids[ROWS][TINY_CONTEXT], labels[ROWS][TINY_CONTEXT];

static double loss_of(tiny_gpt *t, bool backward)
{
    static const int64_t shape[] = { ROWS, TINY_CONTEXT };
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *loss;
    double sum, count;
    assert_ok(fsdp_tape_begin_with(&tape, t->comm, &(fsdp_tape_opts){ .device = t->device, .seed = 3, .step = 1, .first_sample = 4 }));
    assert_ok(fsdp_tensor_from_i32(&x, tape, &ids[0][0], 2, shape));
    assert_ok(fsdp_tensor_from_i32(&y, tape, &labels[0][0], 2, shape));
    assert_ok(fsdp_model_loss(t->model, tape, x, y, &loss));
    if (backward) assert_ok(fsdp_backward(tape, loss));
    assert_ok(fsdp_loss_read(loss, &sum, &count));
    assert_true(count == 14); /* one of each row does not count */
    assert_ok(fsdp_tape_end(tape));
    return sum;
}

static fsdp_unit_list units_of(tiny_gpt *t)
{
    return fsdp_module_units(fsdp_model_module(t->model));
}

/* Adds h to one element of a unit's master slice: on one rank that is all of the unit. */
static void nudge(tiny_gpt *t, int unit, int slice, int64_t element, float by)
{
    const fsdp_slice *s;
    int n;
    fsdp_unit_list all = units_of(t), one = { &all.units[unit], 1 };
    assert_ok(fsdp_step_begin(one));
    fsdp_unit_slices(one.units[0], &s, &n);
    s[slice].master[element] += by;
    assert_ok(fsdp_step_end(one));
}

static void check_slice(tiny_gpt *t, const char *variant, int unit, int slice, const char *name, const float *grad, int64_t numel)
{
    double square = 0;
    for (int64_t e = 0; e < numel; e++) square += (double)grad[e] * (double)grad[e] / (double)numel;
    for (int64_t e = 0; e < numel; e++) {
        nudge(t, unit, slice, e, h);
        double up = loss_of(t, false);
        nudge(t, unit, slice, e, -2 * h);
        double want = (up - loss_of(t, false)) / (2 * (double)h);
        nudge(t, unit, slice, e, h);
        if (!(fabs((double)grad[e] - want) <= bound * (1 + fabs(want) + sqrt(square))))
            fail_msg("%s: %s[%d]: the backward says %.6g, differences %.6g", variant, name, (int)e, (double)grad[e], want);
    }
}

typedef struct variant {
    const char *name;
    float dropout;
    fsdp_activation activation;
    bool untied, by_layer, unscaled;
    int64_t inner, layers;
} variant;

static void check_variant(const variant *v)
{
    fsdp_comm *comm;
    tiny_gpt t;
    fsdp_gpt2_config c = tiny_gpt_config();
    static float grads[8][64][256];
    c.activation = v->activation;
    c.tie_word_embeddings = !v->untied;
    c.scale_attn_by_inverse_layer_idx = v->by_layer;
    c.scale_attn_weights = !v->unscaled;
    c.n_inner = v->inner;
    c.n_layer = v->layers;
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(tiny_gpt_create(&t, comm, &(tiny_gpt_opts){ .dropout = v->dropout, .config = c }));
    double with = loss_of(&t, true);
    fsdp_unit_list units = units_of(&t);
    int64_t numel = 0;
    assert_ok(fsdp_step_begin(units));
    for (int u = 0; u < units.count; u++) {
        const fsdp_slice *s;
        int n;
        fsdp_unit_slices(units.units[u], &s, &n);
        for (int k = 0; k < n; k++) {
            assert_true(s[k].numel <= 256 && k < 64 && u < 8);
            memcpy(grads[u][k], s[k].grad, (size_t)s[k].numel * sizeof(float));
            numel += s[k].numel;
        }
    }
    assert_ok(fsdp_step_cancel(units));
    assert_int_equal(numel, fsdp_module_numel(fsdp_model_module(t.model)));
    assert_true(loss_of(&t, false) == with); /* the loss alone: the same bits */
    for (int u = 0; u < units.count; u++) {
        const fsdp_slice *s;
        int n;
        fsdp_unit_slices(units.units[u], &s, &n);
        for (int k = 0; k < n; k++) check_slice(&t, v->name, u, k, s[k].name, grads[u][k], s[k].numel);
    }
    tiny_gpt_destroy(&t);
    fsdp_comm_destroy(comm);
}

static void test_differences(void **state)
{
    (void)state;
    static const variant variants[] = {
        { "plain", 0, FSDP_ACT_GELU_TANH, false, false, false, 0, 2 },
        { "dropout 0.2", 0.2f, FSDP_ACT_GELU_ERF, false, false, false, 5, 2 },
        { "a head of its own, scaled by layer", 0, FSDP_ACT_GELU_TANH, true, true, false, 0, 2 },
        { "unscaled, dropout", 0.1f, FSDP_ACT_GELU_ERF, true, false, true, 7, 1 },
        { "no layers", 0.1f, FSDP_ACT_GELU_TANH, false, false, false, 0, 0 },
    };
    for (size_t i = 0; i < sizeof(variants) / sizeof(variants[0]); i++) check_variant(&variants[i]);
}

/* The fused loss is that of the logits. */
static void test_logits(void **state)
{
    (void)state;
    fsdp_comm *comm;
    tiny_gpt t;
    static float logits[ROWS][TINY_CONTEXT][TINY_VOCAB];
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(tiny_gpt_create(&t, comm, &(tiny_gpt_opts){ 0 }));
    fsdp_tape *tape;
    fsdp_tensor *x, *y;
    assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
    assert_ok(fsdp_tensor_from_i32(&x, tape, &ids[0][0], 2, (int64_t[]){ ROWS, TINY_CONTEXT }));
    assert_ok(fsdp_model_logits(t.model, tape, x, &y));
    assert_int_equal(fsdp_tensor_ndim(y), 3);
    assert_ok(fsdp_tensor_to_f32(y, &logits[0][0][0]));
    assert_ok(fsdp_tape_end(tape));
    double want = 0;
    for (int b = 0; b < ROWS; b++)
        for (int i = 0; i < TINY_CONTEXT; i++) {
            double sum = 0;
            if (labels[b][i] < 0) continue;
            for (int n = 0; n < TINY_VOCAB; n++) sum += exp((double)logits[b][i][n]);
            want += log(sum) - (double)logits[b][i][labels[b][i]];
        }
    double got = loss_of(&t, false);
    if (!(fabs(got - want) <= 2e-6 * want)) fail_msg("%.9g, from the logits %.9g", got, want);
    tiny_gpt_destroy(&t);
    fsdp_comm_destroy(comm);
}

/* ---- wrong calls, and parts used alone ---- */

static void test_wrong_calls(void **state)
{
    (void)state;
    fsdp_comm *comm;
    tiny_gpt t;
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *f, *loss;
    int32_t long_ids[9] = { 0 }, bad[8] = { 0, 1, 13 };
    float values[8] = { 0 };
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(tiny_gpt_create(&t, comm, &(tiny_gpt_opts){ 0 }));
    assert_fails(fsdp_model_wrap(t.model, &(fsdp_wrap_opts){ .comm = comm }), FSDP_ERR_STATE, "wrapped already");
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_tensor_from_i32(&x, tape, long_ids, 2, (int64_t[]){ 1, 9 }));
    assert_fails(fsdp_model_loss(t.model, tape, x, x, &loss), FSDP_ERR_INVALID, "8 positions");
    assert_ok(fsdp_tensor_from_i32(&x, tape, long_ids, 1, (int64_t[]){ 8 }));
    assert_fails(fsdp_model_loss(t.model, tape, x, x, &loss), FSDP_ERR_INVALID, "[B, T]");
    assert_ok(fsdp_tensor_from_f32(&f, tape, values, 2, (int64_t[]){ 1, 8 }));
    assert_fails(fsdp_model_loss(t.model, tape, f, x, &loss), FSDP_ERR_INVALID, "i32");
    assert_fails(fsdp_model_loss(t.model, tape, x, NULL, &loss), FSDP_ERR_INVALID, "labels");
    assert_fails(fsdp_model_logits(t.model, tape, NULL, &loss), FSDP_ERR_INVALID, "ids");
    assert_ok(fsdp_tensor_from_i32(&x, tape, long_ids, 2, (int64_t[]){ 1, 8 }));
    assert_ok(fsdp_tensor_from_i32(&y, tape, long_ids, 2, (int64_t[]){ 1, 7 }));
    assert_fails(fsdp_model_loss(t.model, tape, x, y, &loss), FSDP_ERR_INVALID, "one for each id");
    assert_ok(fsdp_tensor_from_i32(&y, tape, bad, 2, (int64_t[]){ 1, 8 }));
    assert_fails(fsdp_model_loss(t.model, tape, y, x, &loss), FSDP_ERR_INVALID, "token 13");
    assert_ok(fsdp_tape_end(tape));
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_tensor_from_i32(&x, tape, long_ids, 2, (int64_t[]){ 1, 8 }));
    assert_ok(fsdp_tensor_from_i32(&y, tape, bad, 2, (int64_t[]){ 1, 8 }));
    assert_ok(fsdp_model_loss(t.model, tape, x, y, &loss));
    assert_fails(fsdp_backward(tape, loss), FSDP_ERR_INVALID, "label 13");
    assert_ok(fsdp_tape_cancel(tape));
    loss_of(&t, true); /* all is well after it */
    tiny_gpt_destroy(&t);
    fsdp_comm_destroy(comm);

    fsdp_gpt2_config c = tiny_gpt_config();
    fsdp_model *m;
    c.n_head = 4;
    assert_fails(fsdp_model_create_gpt2(&m, &c), FSDP_ERR_INVALID, "n_embd 6 is no multiple of n_head 4");
    c = tiny_gpt_config();
    c.vocab_size = 0;
    assert_fails(fsdp_model_create_gpt2(&m, &c), FSDP_ERR_INVALID, "vocab_size 0");
    c = tiny_gpt_config();
    c.attn_pdrop = 1.0f;
    assert_fails(fsdp_model_create_gpt2(&m, &c), FSDP_ERR_INVALID, "dropout 1");
    c = tiny_gpt_config();
    assert_ok(fsdp_model_create_gpt2(&m, &c));
    assert_fails(fsdp_model_set_dropout(m, NAN), FSDP_ERR_INVALID, "dropout");
    assert_fails(fsdp_model_load(m, "x"), FSDP_ERR_STATE, "wrap the model first");
    assert_fails(fsdp_model_save(m, "x"), FSDP_ERR_STATE, "not wrapped");
    assert_fails(fsdp_model_generate(m, long_ids, 1, NULL, NULL, NULL), FSDP_ERR_STATE, "not wrapped");
    fsdp_model_destroy(m);
    fsdp_model_destroy(NULL);
}

/* A block is a module: run by itself, after the model or before it, it gives (x + attention) + mlp. */
static void test_block_alone(void **state)
{
    (void)state;
    fsdp_comm *comm;
    tiny_gpt t;
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *tokens;
    float in[TINY_CONTEXT * TINY_WIDTH], before[TINY_CONTEXT * TINY_WIDTH], after[TINY_CONTEXT * TINY_WIDTH];
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(tiny_gpt_create(&t, comm, &(tiny_gpt_opts){ 0 }));
    fsdp_philox_normal_fill(1, "x", 0, TINY_CONTEXT * TINY_WIDTH, in);
    fsdp_module *root = fsdp_model_module(t.model), *block = fsdp_module_child(fsdp_module_child(root, 2), 0);
    for (int round = 0; round < 2; round++) {
        assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
        assert_ok(fsdp_tensor_from_f32(&x, tape, in, 3, (int64_t[]){ 1, TINY_CONTEXT, TINY_WIDTH }));
        assert_ok(fsdp_forward(block, tape, x, &y));
        assert_ok(fsdp_tensor_to_f32(y, round ? after : before));
        assert_ok(fsdp_tape_end(tape));
        /* the model through its module, which is a way to its logits too */
        assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
        assert_ok(fsdp_tensor_from_i32(&tokens, tape, &ids[0][0], 2, (int64_t[]){ 1, TINY_CONTEXT }));
        assert_ok(fsdp_forward(root, tape, tokens, &y));
        assert_int_equal(fsdp_tensor_shape(y, -1), TINY_VOCAB);
        assert_ok(fsdp_tape_end(tape));
    }
    assert_memory_equal(before, after, sizeof(before));
    /* The mlp is in it: a change of its last bias goes straight to the output. */
    const fsdp_module_param_info *p;
    int n, unit = -1;
    assert_ok(fsdp_module_params(block, &p, &n));
    assert_string_equal(p[n - 1].name, "mlp.c_proj.bias");
    fsdp_unit_list units = units_of(&t);
    for (int u = 0; u < units.count; u++)
        if (units.units[u] == p[n - 1].unit) unit = u;
    nudge(&t, unit, n - 1, 2, 1.0f);
    assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
    assert_ok(fsdp_tensor_from_f32(&x, tape, in, 3, (int64_t[]){ 1, TINY_CONTEXT, TINY_WIDTH }));
    assert_ok(fsdp_forward(block, tape, x, &y));
    assert_ok(fsdp_tensor_to_f32(y, after));
    assert_ok(fsdp_tape_end(tape));
    for (int i = 0; i < TINY_CONTEXT * TINY_WIDTH; i++) assert_true(fabsf(after[i] - before[i] - (i % TINY_WIDTH == 2 ? 1.0f : 0.0f)) < 1e-5f);
    tiny_gpt_destroy(&t);
    fsdp_comm_destroy(comm);
}

static int make_data(void **state)
{
    (void)state;
    for (int i = 0; i < ROWS; i++) tiny_gpt_data(i, ids[i], labels[i]);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_differences),
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_wrong_calls),
        cmocka_unit_test(test_block_alone),
    };
    return cmocka_run_group_tests(tests, make_data, NULL);
}
