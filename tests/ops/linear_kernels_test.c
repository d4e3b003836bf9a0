/* SPDX-License-Identifier: MIT
 *
 * Linear layers: products in pieces with bias and activation, both weight layouts, and their backward. */
#include "kernel_case.h"

#define L(field) offsetof(fsdpi_linear_args, field)
#define B(field) offsetof(fsdpi_linear_backward_args, field)

static const struct {
    int64_t M, N, K;
} shapes[] = {
    { 0, 5, 3 },    { 1, 1, 1 },    { 7, 13, 6 },   { 3, 2, 0 },     { 5, 50257, 3 },
    { 33, 65, 31 }, { 1, 769, 40 }, { 530, 7, 19 }, { 35, 3100, 7 }, { 256, 1152, 384 }, /* gpt2-10m's qkv */
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

static size_t scratch(const void *args, int threads)
{
    return fsdpi_linear_backward_scratch(args, threads);
}

static void forward(int shape, fsdpi_activation act, bool in_out, bool bias, bool pre)
{
    int64_t M = shapes[shape].M, N = shapes[shape].N, K = shapes[shape].K;
    char title[128];
    snprintf(title, sizeof(title), "linear %d: act %d in_out %d bias %d pre %d", shape, act, in_out, bias,
             pre);
    fsdpi_linear_args a = { .M = M, .N = N, .K = K, .in_out = in_out, .act = act };
    kernel_case c =
        case_of(title, fsdpi_op_kernels_cpu.linear, fsdpi_op_kernels_reference.linear, &a, sizeof(a));
    case_in(&c, L(x), M * K);
    case_in_scaled(&c, L(weight), N * K, 1.0f / sqrtf((float)K + 1.0f));
    if (bias) case_in(&c, L(bias), N);
    case_out(&c, L(y), M * N, 0.0f, TOL_GEMM);
    if (pre) case_out(&c, L(pre), act != FSDPI_ACT_NONE ? M * N : 0, 0.0f, TOL_GEMM);
    case_check(&c);
}

static void test_forward(void **state)
{
    (void)state;
    for (int s = 0; s < SHAPES; s++) {
        forward(s, (fsdpi_activation)(s % 4), s % 2 == 0, s % 3 != 0, true);
        if (shapes[s].M * shapes[s].N > 100000) continue;
        for (int act = 0; act < 4; act++)
            for (int i = 0; i < 8; i++) forward(s, (fsdpi_activation)act, i & 1, i & 2, i & 4);
    }
}

/* `want`: bits for dx, dweight, dbias */
static void backward(int shape, fsdpi_activation act, bool in_out, int want, float beta)
{
    int64_t M = shapes[shape].M, N = shapes[shape].N, K = shapes[shape].K;
    char title[128];
    snprintf(title, sizeof(title), "linear_backward %d: act %d in_out %d want %d beta %g", shape, act, in_out,
             want, (double)beta);
    fsdpi_linear_backward_args a = { .M = M, .N = N, .K = K, .in_out = in_out, .act = act, .dx_beta = beta,
                                     .dweight_beta = beta, .dbias_beta = beta };
    kernel_case c = case_of(title, fsdpi_op_kernels_cpu.linear_backward,
                            fsdpi_op_kernels_reference.linear_backward, &a, sizeof(a));
    case_in(&c, B(dy), M * N);
    case_in(&c, B(x), M * K);
    case_in_scaled(&c, B(weight), N * K, 1.0f / sqrtf((float)K + 1.0f));
    if (act != FSDPI_ACT_NONE) case_in(&c, B(pre), M * N);
    if (want & 1) case_out(&c, B(dx), M * K, beta, TOL_GEMM);
    if (want & 2) case_out(&c, B(dweight), N * K, beta, TOL_GEMM);
    if (want & 4) case_out(&c, B(dbias), N, beta, TOL_ROW_SUM);
    c.scratch = scratch;
    c.scratch_offset = B(scratch);
    case_check(&c);
}

static void test_backward(void **state)
{
    (void)state;
    for (int s = 0; s < SHAPES; s++) {
        backward(s, (fsdpi_activation)(s % 4), s % 2 == 0, 7, (float)(s % 2));
        if (shapes[s].M * shapes[s].N > 100000) continue;
        for (int act = 0; act < 4; act++)
            for (int want = 0; want < 8; want++)
                backward(s, (fsdpi_activation)act, want & 1, want, (float)(act % 2));
    }
}

/* NaN in the input is NaN in its row of the output, whatever the activation, and in no other row. */
static void test_nan_stays(void **state)
{
    (void)state;
    enum { M = 3, N = 20, K = 5 };
    float x[M * K], w[N * K], bias[N] = { 0 }, y[M * N], pre[M * N];
    for (int i = 0; i < M * K; i++) x[i] = 0.25f * (float)i;
    for (int i = 0; i < N * K; i++) w[i] = 0.5f;
    x[K + 2] = NAN;
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    for (int act = 0; act < 4; act++) {
        fsdpi_linear_args a = { .x = x, .weight = w, .bias = bias, .y = y, .pre = pre, .M = M, .N = N, .K = K,
                                .act = (fsdpi_activation)act };
        assert_ok(fsdpi_op_kernels_cpu.linear(&k, &a));
        for (int i = 0; i < M * N; i++) assert_true(isnan(y[i]) == (i / N == 1));
    }
}

int main(int argc, char **argv)
{
    (void)argc;
    int rc;
    if (!each_gemm_kind(argv, &rc)) return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_nan_stays),
    };
    return cmocka_run_group_tests(tests, NULL, case_teardown);
}
