/* SPDX-License-Identifier: MIT
 *
 * Attention in blocks of rows, causal or not, with dropout; its backward; one position against a cache. */
#include "kernel_case.h"

#define F(field) offsetof(fsdpi_attention_args, field)
#define B(field) offsetof(fsdpi_attention_backward_args, field)
#define S(field) offsetof(fsdpi_attention_step_args, field)

static const struct {
    int64_t B, T, H, D;
} shapes[] = {
    { 0, 5, 2, 4 },  { 2, 0, 2, 4 },  { 1, 1, 1, 1 },    { 2, 5, 3, 3 },    { 1, 17, 2, 6 },
    { 1, 63, 1, 8 }, { 1, 65, 2, 5 }, { 2, 130, 1, 16 }, { 1, 256, 2, 64 }, /* two of gpt2's heads */
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

static size_t forward_scratch(const void *args, int threads)
{
    return fsdpi_attention_scratch(args, threads);
}

static size_t backward_scratch(const void *args, int threads)
{
    return fsdpi_attention_backward_scratch(args, threads);
}

static fsdpi_attention_args args_of(int shape, bool causal, float p)
{
    return (fsdpi_attention_args){
        .B = shapes[shape].B,
        .T = shapes[shape].T,
        .H = shapes[shape].H,
        .D = shapes[shape].D,
        .scale = 1.0f / sqrtf((float)shapes[shape].D),
        .causal = causal,
        .dropout = { .p = p, .seed = 0x123456789abcdefu, .step = 70000, .layer = 3, .first_sample = 5 }
    };
}

static void forward(int shape, bool causal, float p)
{
    fsdpi_attention_args a = args_of(shape, causal, p);
    int64_t rows = a.B * a.T, C = a.H * a.D;
    char title[128];
    snprintf(title, sizeof(title), "attention %d: causal %d dropout %g", shape, causal, (double)p);
    kernel_case c =
        case_of(title, fsdpi_op_kernels_cpu.attention, fsdpi_op_kernels_reference.attention, &a, sizeof(a));
    case_in(&c, F(qkv), rows * 3 * C);
    case_out(&c, F(out), rows * C, 0.0f, TOL_ATTENTION);
    case_out(&c, F(lse), a.H * rows, 0.0f, TOL_ATTENTION);
    c.scratch = forward_scratch;
    c.scratch_offset = F(scratch);
    case_check(&c);
}

static void test_forward(void **state)
{
    (void)state;
    for (int s = 0; s < SHAPES; s++)
        for (int i = 0; i < 4; i++) forward(s, i & 1, i & 2 ? 0.3f : 0.0f);
}

static void backward(int shape, bool causal, float p, float beta)
{
    fsdpi_attention_backward_args a = { .f = args_of(shape, causal, p), .beta = beta };
    int64_t rows = a.f.B * a.f.T, C = a.f.H * a.f.D;
    char title[128];
    snprintf(title, sizeof(title), "attention_backward %d: causal %d dropout %g beta %g", shape, causal,
             (double)p, (double)beta);
    kernel_case c = case_of(title, fsdpi_op_kernels_cpu.attention_backward,
                            fsdpi_op_kernels_reference.attention_backward, &a, sizeof(a));
    case_in(&c, B(f.qkv), rows * 3 * C);
    case_in(&c, B(dout), rows * C);
    case_out(&c, B(dqkv), rows * 3 * C, beta, TOL_ATTENTION);
    /* out and lse: as the forward left them */
    float *out = calloc((size_t)(rows * C + 1), sizeof(float)),
          *lse = calloc((size_t)(a.f.H * rows + 1), sizeof(float));
    assert_true(out != NULL && lse != NULL);
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    fsdpi_attention_args f = a.f;
    f.qkv = c.field[0].init, f.out = out, f.lse = lse;
    assert_ok(fsdpi_op_kernels_reference.attention(&k, &f));
    case_data(&c, B(f.out), out, (size_t)(rows * C) * sizeof(float));
    case_data(&c, B(f.lse), lse, (size_t)(a.f.H * rows) * sizeof(float));
    free(out);
    free(lse);
    c.scratch = backward_scratch;
    c.scratch_offset = B(scratch);
    case_check(&c);
}

static void test_backward(void **state)
{
    (void)state;
    for (int s = 0; s < SHAPES; s++)
        for (int i = 0; i < 4; i++) backward(s, i & 1, i & 2 ? 0.3f : 0.0f, (float)(i / 2));
}

static void step(int64_t samples, int64_t T, int64_t H, int64_t D, int64_t pos)
{
    char title[128];
    snprintf(title, sizeof(title), "attention_step %d heads of %d at %d", (int)H, (int)D, (int)pos);
    fsdpi_attention_step_args a = { .B = samples, .T = T, .H = H, .D = D, .pos = pos, .scale = 0.4f };
    kernel_case c = case_of(title, fsdpi_op_kernels_cpu.attention_step,
                            fsdpi_op_kernels_reference.attention_step, &a, sizeof(a));
    case_in(&c, S(qkv), samples * 3 * H * D);
    case_out(&c, S(cache_k), samples * T * H * D, 1.0f, TOL_EXACT);
    case_out(&c, S(cache_v), samples * T * H * D, 1.0f, TOL_EXACT);
    case_out(&c, S(out), samples * H * D, 0.0f, TOL_ATTENTION);
    case_check(&c);
}

static void test_step(void **state)
{
    (void)state;
    step(0, 4, 2, 3, 1);
    step(1, 1, 1, 1, 0);
    step(2, 9, 3, 3, 0);
    step(3, 200, 2, 17, 63);
    step(2, 200, 2, 17, 64);
    step(1, 200, 1, 64, 199);
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    fsdpi_attention_step_args a = { .B = 1, .T = 4, .H = 1, .D = 1, .pos = 4 };
    assert_fails(fsdpi_op_kernels_cpu.attention_step(&k, &a), FSDP_ERR_INVALID,
                 "position 4 is not in the cache of 4");
}

/* Scores of a thousand do not overflow: the softmax picks the greatest. A NaN stays a NaN, and where causal,
 * rows before it do not see it. */
static void test_extreme_scores(void **state)
{
    (void)state;
    enum { T = 70, D = 4 };
    static float qkv[T * 3 * D], out[T * D], lse[T];
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    fsdpi_attention_args a = {
        .qkv = qkv, .out = out, .lse = lse, .B = 1, .T = T, .H = 1, .D = D, .scale = 1, .causal = true
    };
    a.scratch = calloc(1, fsdpi_attention_scratch(&a, 1));
    assert_non_null(a.scratch);
    for (int t = 0; t < T; t++)
        for (int d = 0; d < D; d++) {
            qkv[t * 3 * D + d] = 10.0f;
            qkv[t * 3 * D + D + d] = 100.0f * (float)t;
            qkv[t * 3 * D + 2 * D + d] = (float)t;
        }
    assert_ok(fsdpi_op_kernels_cpu.attention(&k, &a));
    for (int t = 0; t < T; t++)
        for (int d = 0; d < D; d++) assert_true(out[t * D + d] == (float)t);
    qkv[66 * 3 * D + D] = NAN; /* a key */
    assert_ok(fsdpi_op_kernels_cpu.attention(&k, &a));
    for (int t = 0; t < T; t++) assert_true(isnan(out[t * D]) == (t >= 66) && isnan(lse[t]) == (t >= 66));
    free(a.scratch);
}

int main(int argc, char **argv)
{
    (void)argc;
    int rc;
    if (!each_gemm_kind(argv, &rc)) return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_step),
        cmocka_unit_test(test_extreme_scores),
    };
    return cmocka_run_group_tests(tests, NULL, case_teardown);
}
