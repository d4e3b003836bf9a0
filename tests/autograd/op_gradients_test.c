/* SPDX-License-Identifier: MIT
 *
 * Every operation, through the tape: what fsdp_backward() says is what differences of the loss say, for each input and each
 * combination of inputs that want a gradient; and the same bits on a device that runs late and hides its memory. Operations
 * that meet the same tensor several times (sums, residuals, views) add its gradients. */
#include "support/testing.h"

#include <fsdp/fsdp.h>

#include <math.h>

enum { MAX_IN = 5, MAX_NUMEL = 256 };
static const float h = 0x1p-6f;
/* Central differences of an fp64 sum of fp32 rows: rounding 6e-8 * 30 / h, truncation h^2 / 6 f'''. */
static const double bound = 4e-3;

typedef struct input {
    const char *name;
    int ndim;
    int64_t shape[3];
    int ids; /* > 0: i32 below this */
} input;

/* Builds y from inputs; the loss is the cross-entropy of its rows. NULL result: *y is a loss already. */
typedef fsdp_status (*build_fn)(fsdp_tape *tape, fsdp_tensor **in, int variant, fsdp_tensor **y);

typedef struct op_case {
    const char *name;
    build_fn build;
    input in[MAX_IN];
    int variants;
} op_case;

static fsdp_status build_linear(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    fsdp_op_linear_opts o = { .activation = (fsdp_activation)(v / 2) };
    return fsdp_op_linear(t, in[0], in[1], v % 2 ? in[2] : NULL, &o, y);
}

static fsdp_status build_linear_in_out(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    return fsdp_op_linear(t, in[0], in[1], in[2], &(fsdp_op_linear_opts){ .in_out = true, .activation = (fsdp_activation)v }, y);
}

static fsdp_status build_activation(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    return fsdp_op_activation(t, in[0], (fsdp_activation)v, y);
}

static fsdp_status build_add(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    return fsdp_op_add(t, in[0], in[v == 0], y); /* variant 1: x + x */
}

static fsdp_status build_dropout(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    return fsdp_op_dropout(t, in[0], v == 0 ? 0.0f : 0.4f, y);
}

static fsdp_status build_reshape(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    (void)v;
    return fsdp_op_reshape(t, in[0], 3, (int64_t[]){ 1, 5, 4 }, y);
}

static fsdp_status build_layer_norm(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    return fsdp_op_layer_norm(t, in[0], in[1], v == 0 ? in[2] : NULL, 0.1f, y);
}

/* Variants: the norm and the sum used, the sum alone, the norm alone; x as its own residual. */
static fsdp_status build_add_layer_norm(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    fsdp_tensor *sum, *norm;
    FSDP_TRY(fsdp_op_add_layer_norm(t, in[0], v == 3 ? in[0] : in[1], in[2], in[3], 0.1f, &sum, &norm));
    if (v == 1) *y = sum;
    else if (v == 2) *y = norm;
    else return fsdp_op_add(t, sum, norm, y);
    return FSDP_OK;
}

static fsdp_status build_embedding(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    return fsdp_op_embedding(t, in[0], in[1], v == 0 ? in[2] : NULL, v == 0 ? 1 : 0, y);
}

/* The table of tokens serves as that of positions too. */
static fsdp_status build_embedding_twice(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    (void)v;
    return fsdp_op_embedding(t, in[0], in[1], in[1], 1, y);
}

static fsdp_status build_attention(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    return fsdp_op_attention(t, in[0], &(fsdp_op_attention_opts){ .heads = 2, .causal = v & 1, .dropout = v & 2 ? 0.4f : 0.0f, .scale = v & 4 ? 0.3f : 0.0f }, y);
}

static fsdp_status build_linear_loss(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    (void)v;
    return fsdp_op_linear_cross_entropy(t, in[0], in[1], in[2], y);
}

/* x is used three times, once through a view, once as a residual: its gradient is the sum. */
static fsdp_status build_shared(fsdp_tape *t, fsdp_tensor **in, int v, fsdp_tensor **y)
{
    fsdp_tensor *x = in[0], *view, *a, *b, *c, *back;
    FSDP_TRY(fsdp_op_reshape(t, x, 2, (int64_t[]){ 4, 5 }, &view));
    FSDP_TRY(fsdp_op_activation(t, view, FSDP_ACT_GELU_TANH, &a));
    FSDP_TRY(fsdp_op_reshape(t, a, 2, (int64_t[]){ 5, 4 }, &back));
    FSDP_TRY(fsdp_op_linear(t, x, in[1], NULL, NULL, &b));
    FSDP_TRY(fsdp_op_linear(t, b, in[1], NULL, NULL, &b)); /* the same weight again */
    if (v == 1) {
        fsdp_tensor_release(view);
        fsdp_tensor_release(a);
    }
    FSDP_TRY(fsdp_op_add(t, back, b, &c));
    FSDP_TRY(fsdp_op_add(t, c, x, &c));
    return fsdp_op_add(t, c, c, y);
}

static const op_case cases[] = {
    { "linear", build_linear, { { "x", 2, { 5, 3 }, 0 }, { "w", 2, { 4, 3 }, 0 }, { "b", 1, { 4 }, 0 } }, 8 },
    { "linear [in, out]", build_linear_in_out, { { "x", 3, { 2, 3, 3 }, 0 }, { "w", 2, { 3, 4 }, 0 }, { "b", 1, { 4 }, 0 } }, 4 },
    { "activation", build_activation, { { "x", 2, { 4, 5 }, 0 } }, 4 },
    { "add", build_add, { { "x", 2, { 4, 5 }, 0 }, { "y", 2, { 4, 5 }, 0 } }, 2 },
    { "dropout", build_dropout, { { "x", 2, { 6, 5 }, 0 } }, 2 },
    { "reshape", build_reshape, { { "x", 2, { 4, 5 }, 0 } }, 1 },
    { "layer_norm", build_layer_norm, { { "x", 2, { 4, 6 }, 0 }, { "w", 1, { 6 }, 0 }, { "b", 1, { 6 }, 0 } }, 2 },
    { "add_layer_norm", build_add_layer_norm, { { "x", 2, { 4, 6 }, 0 }, { "r", 2, { 4, 6 }, 0 }, { "w", 1, { 6 }, 0 }, { "b", 1, { 6 }, 0 } }, 4 },
    { "embedding", build_embedding, { { "ids", 2, { 2, 3 }, 5 }, { "t", 2, { 5, 4 }, 0 }, { "p", 2, { 7, 4 }, 0 } }, 2 },
    { "embedding of itself", build_embedding_twice, { { "ids", 2, { 2, 3 }, 5 }, { "t", 2, { 5, 4 }, 0 } }, 1 },
    { "attention", build_attention, { { "qkv", 3, { 2, 4, 18 }, 0 } }, 8 },
    { "linear_cross_entropy", build_linear_loss, { { "x", 2, { 5, 3 }, 0 }, { "w", 2, { 7, 3 }, 0 }, { "labels", 1, { 5 }, 7 } }, 1 },
    { "a shared tensor", build_shared, { { "x", 2, { 5, 4 }, 0 }, { "w", 2, { 4, 4 }, 0 } }, 2 },
};

static int inputs_of(const op_case *c)
{
    int n = 0;
    while (n < MAX_IN && c->in[n].name != NULL) n++;
    return n;
}

static int64_t numel_of(const input *in)
{
    int64_t n = 1;
    for (int d = 0; d < in->ndim; d++) n *= in->shape[d];
    return n;
}

typedef struct values {
    float f[MAX_IN][MAX_NUMEL];
    int32_t i[MAX_IN][MAX_NUMEL];
    float grad[MAX_IN][MAX_NUMEL];
} values;

static fsdp_status make_loss(fsdp_tape *tape, fsdp_tensor *y, fsdp_tensor **loss)
{
    fsdp_tensor *rows, *labels;
    int64_t C = fsdp_tensor_shape(y, -1), n = fsdp_tensor_numel(y) / C;
    int32_t label[MAX_NUMEL];
    for (int64_t i = 0; i < n; i++) label[i] = i == 1 ? -100 : (int32_t)((3 * i + 1) % C);
    FSDP_TRY(fsdp_op_reshape(tape, y, 2, (int64_t[]){ n, C }, &rows));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, label, 1, &n));
    return fsdp_op_cross_entropy(tape, rows, labels, loss);
}

/* wanted: a bit for each input whose gradient is asked for; 0: the loss alone. */
static double run(fsdp_comm *comm, fsdp_device *dev, const op_case *c, int variant, values *v, unsigned wanted)
{
    fsdp_tape *tape;
    fsdp_tensor *in[MAX_IN], *y, *loss;
    double sum, count;
    int n = inputs_of(c);
    assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .device = dev, .seed = 3, .step = 2, .first_sample = 5 }));
    for (int i = 0; i < n; i++) {
        if (c->in[i].ids > 0) assert_ok(fsdp_tensor_from_i32(&in[i], tape, v->i[i], c->in[i].ndim, c->in[i].shape));
        else assert_ok(fsdp_tensor_from_f32(&in[i], tape, v->f[i], c->in[i].ndim, c->in[i].shape));
        if (wanted & 1u << i) assert_ok(fsdp_tensor_require_grad(in[i]));
    }
    assert_ok(c->build(tape, in, variant, &y));
    if (fsdp_tensor_dtype(y) == FSDP_F32) assert_ok(make_loss(tape, y, &loss));
    else loss = y;
    if (wanted != 0) assert_ok(fsdp_backward(tape, loss));
    assert_ok(fsdp_loss_read(loss, &sum, &count));
    for (int i = 0; i < n; i++)
        if (wanted & 1u << i) assert_ok(fsdp_tensor_grad_to_f32(in[i], v->grad[i]));
    assert_ok(fsdp_tape_cancel(tape));
    return sum;
}

static void fill(const op_case *c, values *v)
{
    memset(v, 0, sizeof(*v));
    for (int i = 0; i < inputs_of(c); i++)
        for (int64_t k = 0; k < numel_of(&c->in[i]); k++) {
            if (c->in[i].ids > 0) v->i[i][k] = (int32_t)(fsdp_philox_uniform(9, c->in[i].name, k) * (float)c->in[i].ids);
            else v->f[i][k] = fsdp_philox_normal(9, c->in[i].name, k);
            if (fabsf(v->f[i][k]) < 0.05f) v->f[i][k] = 0.05f; /* relu has no derivative at 0 */
        }
}

static void check_differences(fsdp_comm *comm, const op_case *c, int variant, values *v, int i)
{
    int64_t n = numel_of(&c->in[i]);
    double square = 0;
    for (int64_t k = 0; k < n; k++) square += (double)v->grad[i][k] * (double)v->grad[i][k] / (double)n;
    for (int64_t k = 0; k < n; k++) {
        float at = v->f[i][k];
        v->f[i][k] = at + h;
        double up = run(comm, NULL, c, variant, v, 0);
        v->f[i][k] = at - h;
        double down = run(comm, NULL, c, variant, v, 0), want = (up - down) / (2 * (double)h);
        v->f[i][k] = at;
        if (!(fabs((double)v->grad[i][k] - want) <= bound * (fabs(want) + sqrt(square) + 0.01)))
            fail_msg("%s, variant %d: d%s[%d]: the backward says %.6g, differences %.6g", c->name, variant, c->in[i].name, (int)k, (double)v->grad[i][k], want);
    }
}

static unsigned float_inputs(const op_case *c)
{
    unsigned all = 0;
    for (int i = 0; i < inputs_of(c); i++)
        if (c->in[i].ids == 0) all |= 1u << i;
    return all;
}

static void test_differences(void **state)
{
    (void)state;
    fsdp_comm *comm;
    assert_ok(fsdp_comm_create_self(&comm));
    static values v;
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++)
        for (int variant = 0; variant < cases[k].variants; variant++) {
            const op_case *c = &cases[k];
            fill(c, &v);
            run(comm, NULL, c, variant, &v, float_inputs(c));
            values all = v;
            for (int i = 0; i < inputs_of(c); i++)
                if (c->in[i].ids == 0) check_differences(comm, c, variant, &all, i);
        }
    fsdp_comm_destroy(comm);
}

/* An input that wants no gradient changes none of the others', whichever they are. */
static void test_any_subset(void **state)
{
    (void)state;
    fsdp_comm *comm;
    assert_ok(fsdp_comm_create_self(&comm));
    static values all, some;
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++)
        for (int variant = 0; variant < cases[k].variants; variant++) {
            const op_case *c = &cases[k];
            fill(c, &all);
            run(comm, NULL, c, variant, &all, float_inputs(c));
            for (unsigned wanted = 1; wanted < float_inputs(c); wanted++) {
                if ((wanted & ~float_inputs(c)) != 0) continue;
                /* one that this variant does not use, and nothing else, is an error of its own */
                fill(c, &some);
                bool used = false;
                for (int i = 0; i < inputs_of(c); i++)
                    for (int64_t e = 0; e < numel_of(&c->in[i]); e++) used |= (wanted & 1u << i) && all.grad[i][e] != 0;
                if (!used) continue;
                run(comm, NULL, c, variant, &some, wanted);
                for (int i = 0; i < inputs_of(c); i++)
                    if ((wanted & 1u << i) && memcmp(all.grad[i], some.grad[i], sizeof(all.grad[i])) != 0)
                        fail_msg("%s, variant %d: the gradient of %s is another where only %#x are wanted", c->name, variant, c->in[i].name, wanted);
            }
        }
    fsdp_comm_destroy(comm);
}

static void test_guard_device(void **state)
{
    (void)state;
    fsdp_comm *comm;
    fsdp_device *guard;
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(fsdp_device_open(&guard, "guard"));
    static values here, there;
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++)
        for (int variant = 0; variant < cases[k].variants; variant++) {
            fill(&cases[k], &here);
            fill(&cases[k], &there);
            double a = run(comm, NULL, &cases[k], variant, &here, float_inputs(&cases[k]));
            double b = run(comm, guard, &cases[k], variant, &there, float_inputs(&cases[k]));
            if (memcmp(&a, &b, sizeof(a)) != 0 || memcmp(here.grad, there.grad, sizeof(here.grad)) != 0)
                fail_msg("%s, variant %d: other bits on device guard", cases[k].name, variant);
        }
    fsdp_device_close(guard);
    fsdp_comm_destroy(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_differences),
        cmocka_unit_test(test_any_subset),
        cmocka_unit_test(test_guard_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
