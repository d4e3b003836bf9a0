/* SPDX-License-Identifier: MIT
 *
 * Every backward of the reference is the derivative of its forward, by central differences: for a loss L =
 * sum of the outputs times random numbers, (L(x + h) - L(x - h)) / 2h for each element of each input against
 * what the backward says. */
#include "support/testing.h"

#include "ops/kernels.h"
#include "tolerances.h"

#include <fsdp/random.h>
#include <math.h>

#define REF fsdpi_op_kernels_reference
static const float h = 0x1p-7f;
static struct fsdp_kernel kernel;

static float *floats(int64_t n, const char *name)
{
    float *x = calloc((size_t)n + 1, sizeof(*x));
    assert_non_null(x);
    if (name != NULL) fsdp_philox_normal_fill(23, name, 0, n, x);
    return x;
}

/* A forward, its output, and what the output is multiplied by to make the loss. */
typedef struct function {
    fsdp_kernel_fn forward;
    const void *args;
    const float *out, *weight;
    int64_t numel;
} function;

static double loss_of(const function *f)
{
    assert_ok(f->forward(&kernel, f->args));
    double sum = 0.0;
    for (int64_t i = 0; i < f->numel; i++) sum += (double)f->out[i] * (double)f->weight[i];
    return sum;
}

static void check(const function *f, const char *what, float *x, int64_t n, const float *gradient)
{
    double square = 0.0;
    for (int64_t i = 0; i < n; i++) square += (double)gradient[i] * (double)gradient[i] / (double)n;
    for (int64_t i = 0; i < n; i++) {
        float at = x[i];
        x[i] = at + h;
        double up = loss_of(f);
        x[i] = at - h;
        double down = loss_of(f);
        x[i] = at;
        double want = (up - down) / (2.0 * (double)h), got = (double)gradient[i];
        if (!(fabs(got - want) <= tolerance(TOL_DIFFERENCE) * (fabs(want) + sqrt(square))))
            fail_msg("%s [%d]: the backward says %.6g, differences %.6g", what, (int)i, got, want);
    }
}

static void test_linear(void **state)
{
    (void)state;
    enum { M = 5, N = 4, K = 3 };
    for (int i = 0; i < 8; i++) {
        fsdpi_activation act = (fsdpi_activation)(i / 2);
        float *x = floats(M * K, "x"), *w = floats(N * K, "w"), *b = floats(N, "b"), *y = floats(M * N, NULL);
        float *pre = floats(M * N, NULL), *dy = floats(M * N, "dy"), *dx = floats(M * K, NULL),
              *dw = floats(N * K, NULL);
        float *db = floats(N, NULL);
        fsdpi_linear_args f = { .x = x, .weight = w, .bias = b, .y = y, .pre = pre, .M = M, .N = N, .K = K,
                                .in_out = i & 1, .act = act };
        fsdpi_linear_backward_args g = { .dy = dy, .x = x, .weight = w, .pre = pre, .dx = dx, .dweight = dw,
                                         .dbias = db, .M = M, .N = N, .K = K, .in_out = i & 1, .act = act };
        function fn = { REF.linear, &f, y, dy, M * N };
        loss_of(&fn);
        for (int j = 0; j < M * N; j++) /* at a kink of the activation there is no derivative */
            if (act == FSDPI_ACT_RELU && fabsf(pre[j]) < 0.1f) dy[j] = 0.0f;
        assert_ok(REF.linear_backward(&kernel, &g));
        check(&fn, "linear dx", x, M * K, dx);
        check(&fn, "linear dweight", w, N * K, dw);
        check(&fn, "linear dbias", b, N, db);
        float *all[] = { x, w, b, y, pre, dy, dx, dw, db };
        for (int j = 0; j < 9; j++) free(all[j]);
    }
}

static void test_activation(void **state)
{
    (void)state;
    enum { N = 40 };
    for (int act = 0; act < 4; act++) {
        float x[N], y[N], dy[N], dx[N];
        for (int i = 0; i < N; i++) x[i] = 0.31f * ((float)i - 19.5f), dy[i] = 1.0f;
        fsdpi_activation_args f = { .x = x, .out = y, .numel = N, .act = (fsdpi_activation)act }, g = f;
        g.dy = dy, g.out = dx;
        function fn = { REF.activation, &f, y, dy, N };
        assert_ok(REF.activation_backward(&kernel, &g));
        check(&fn, "activation", x, N, dx);
    }
}

static void test_layer_norm(void **state)
{
    (void)state;
    enum { M = 4, C = 6 };
    float *x = floats(M * C, "x"), *r = floats(M * C, "r"), *w = floats(C, "w"), *b = floats(C, "b"),
          *sum = floats(M * C, NULL);
    /* y and sum are one array of outputs, so that the loss sees both */
    float *out = floats(2 * M * C, NULL), *dout = floats(2 * M * C, "dy"), mean[M], rstd[M];
    float *dx = floats(M * C, NULL), *dw = floats(C, NULL), *db = floats(C, NULL);
    fsdpi_layer_norm_args f = { .x = x, .residual = r, .weight = w, .bias = b, .sum = out + M * C, .y = out,
                                .mean = mean, .rstd = rstd, .M = M, .C = C, .eps = 1e-2f };
    function fn = { REF.layer_norm, &f, out, dout, 2 * M * C };
    loss_of(&fn);
    memcpy(sum, out + M * C, M * C * sizeof(float));
    fsdpi_layer_norm_backward_args g = { .dy = dout, .x = sum, .weight = w, .mean = mean, .rstd = rstd,
                                         .dsum = dout + M * C, .dx = dx, .dweight = dw, .dbias = db, .M = M,
                                         .C = C };
    assert_ok(REF.layer_norm_backward(&kernel, &g));
    check(&fn, "layer_norm dx", x, M * C, dx);
    check(&fn, "layer_norm dresidual", r, M * C, dx);
    check(&fn, "layer_norm dweight", w, C, dw);
    check(&fn, "layer_norm dbias", b, C, db);
    float *all[] = { x, r, w, b, sum, out, dout, dx, dw, db };
    for (int j = 0; j < 10; j++) free(all[j]);
}

static void test_attention(void **state)
{
    (void)state;
    enum { B = 2, T = 5, H = 2, D = 3, C = H * D, N = B * T * 3 * C };
    for (int i = 0; i < 4; i++) {
        float *qkv = floats(N, "qkv"), *out = floats(B * T * C, NULL), *lse = floats(B * H * T, NULL);
        float *dout = floats(B * T * C, "dout"), *dqkv = floats(N, NULL);
        fsdpi_attention_args f = { .qkv = qkv, .out = out, .lse = lse, .B = B, .T = T, .H = H, .D = D,
                                   .scale = 0.6f, .causal = i & 1,
                                   .dropout = { .p = i & 2 ? 0.4f : 0.0f, .seed = 8, .step = 3 } };
        fsdpi_attention_backward_args g = { .f = f, .dout = dout, .dqkv = dqkv };
        function fn = { REF.attention, &f, out, dout, B * T * C };
        assert_ok(REF.attention_backward(&kernel, &g));
        check(&fn, "attention", qkv, N, dqkv);
        float *all[] = { qkv, out, lse, dout, dqkv };
        for (int j = 0; j < 5; j++) free(all[j]);
    }
}

static void test_embedding(void **state)
{
    (void)state;
    enum { M = 6, T = 3, V = 4, C = 2, P = 5 };
    const int32_t ids[M] = { 0, 3, 3, 1, 0, 3 };
    float *token = floats(V * C, "t"), *position = floats(P * C, "p"), *out = floats(M * C, NULL),
          *dout = floats(M * C, "d");
    float *dtoken = floats(V * C, NULL), *dposition = floats(P * C, NULL);
    fsdpi_embedding_args f = { .ids = ids, .token = token, .position = position, .out = out, .M = M, .T = T,
                               .V = V, .C = C, .first_position = 1 };
    fsdpi_embedding_backward_args g = { .ids = ids, .dout = dout, .dtoken = dtoken, .dposition = dposition,
                                        .M = M, .T = T, .V = V, .C = C, .positions = P, .first_position = 1 };
    function fn = { REF.embedding, &f, out, dout, M * C };
    assert_ok(REF.embedding_backward(&kernel, &g));
    check(&fn, "embedding dtoken", token, V * C, dtoken);
    check(&fn, "embedding dposition", position, P * C, dposition);
    float *all[] = { token, position, out, dout, dtoken, dposition };
    for (int j = 0; j < 6; j++) free(all[j]);
}

static void test_dropout(void **state)
{
    (void)state;
    enum { N = 30 };
    float x[N], out[N], dout[N], dx[N];
    for (int i = 0; i < N; i++) x[i] = (float)i, dout[i] = (float)(i % 4);
    fsdpi_dropout_args f = { .x = x, .out = out, .B = 3, .per_sample = N / 3,
                             .dropout = { .p = 0.5f, .seed = 1 } },
                       g = f;
    g.x = dout, g.out = dx;
    function fn = { REF.dropout, &f, out, dout, N };
    assert_ok(REF.dropout(&kernel, &g));
    check(&fn, "dropout", x, N, dx);
}

/* Losses are their own sum; the seed scales them. */
typedef struct scaled_loss {
    fsdp_kernel_fn forward;
    const void *args;
    const fsdpi_loss *loss;
    float *out;
    float seed;
} scaled_loss;

static fsdp_status run_scaled(const fsdp_kernel *k, const void *args)
{
    const scaled_loss *s = args;
    FSDP_TRY(s->forward(k, s->args));
    *s->out = (float)(s->loss->sum * (double)s->seed);
    return FSDP_OK;
}

static void test_losses(void **state)
{
    (void)state;
    enum { M = 4, V = 7, K = 3 };
    const int32_t labels[M] = { 6, -100, 0, 3 };
    const float seed = 0.5f, one = 1.0f;
    float out;
    fsdpi_loss loss;
    float *logits = floats(M * V, "l"), *dlogits = floats(M * V, NULL), *x = floats(M * K, "x"),
          *w = floats(V * K, "w");
    float *dx = floats(M * K, NULL), *dw = floats(V * K, NULL);
    fsdpi_cross_entropy_args f = { .logits = logits, .labels = labels, .loss = &loss, .M = M, .V = V }, g = f;
    g.seed = &seed, g.dlogits = dlogits;
    scaled_loss s = { REF.cross_entropy, &f, &loss, &out, seed };
    function fn = { run_scaled, &s, &out, &one, 1 };
    assert_ok(REF.cross_entropy(&kernel, &g));
    check(&fn, "cross_entropy", logits, M * V, dlogits);
    fsdpi_linear_cross_entropy_args lf = {
        .x = x, .weight = w, .labels = labels, .loss = &loss, .M = M, .V = V, .K = K
    };
    fsdpi_linear_cross_entropy_args lg = lf;
    lg.seed = &seed, lg.dx = dx, lg.dweight = dw;
    s = (scaled_loss){ REF.linear_cross_entropy, &lf, &loss, &out, seed };
    assert_ok(REF.linear_cross_entropy(&kernel, &lg));
    assert_true(loss.count == 3.0);
    check(&fn, "linear_cross_entropy dx", x, M * K, dx);
    check(&fn, "linear_cross_entropy dweight", w, V * K, dw);
    float *all[] = { logits, dlogits, x, w, dx, dw };
    for (int j = 0; j < 6; j++) free(all[j]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),     cmocka_unit_test(test_activation),
        cmocka_unit_test(test_layer_norm), cmocka_unit_test(test_attention),
        cmocka_unit_test(test_embedding),  cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_losses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
