/* SPDX-License-Identifier: MIT
 *
 * Layer normalisation, with and without a residual, and its backward. */
#include "kernel_case.h"

#define F(field) offsetof(fsdpi_layer_norm_args, field)
#define B(field) offsetof(fsdpi_layer_norm_backward_args, field)

static const struct {
    int64_t M, C;
} shapes[] = { { 0, 6 },  { 1, 1 },  { 3, 6 },   { 67, 13 },   { 2, 15 },
               { 2, 16 }, { 5, 33 }, { 33, 48 }, { 130, 384 }, { 6, 1600 } };
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

static size_t scratch(const void *args, int threads)
{
    return fsdpi_layer_norm_backward_scratch(args, threads);
}

/* residual 0: none; 1: given; 2: given, and sum is x */
static void forward(int shape, int residual, bool bias)
{
    int64_t M = shapes[shape].M, C = shapes[shape].C;
    char title[128];
    snprintf(title, sizeof(title), "layer_norm %d: residual %d bias %d", shape, residual, bias);
    fsdpi_layer_norm_args a = { .M = M, .C = C, .eps = 1e-5f };
    kernel_case c =
        case_of(title, fsdpi_op_kernels_cpu.layer_norm, fsdpi_op_kernels_reference.layer_norm, &a, sizeof(a));
    case_in(&c, F(x), M * C);
    case_in(&c, F(weight), C);
    if (bias) case_in(&c, F(bias), C);
    case_out(&c, F(y), M * C, 0.0f, TOL_ROW_SUM);
    case_out(&c, F(mean), M, 0.0f, TOL_ROW_SUM);
    case_out(&c, F(rstd), M, 0.0f, TOL_ROW_SUM);
    if (residual > 0) {
        case_in(&c, F(residual), M * C);
        case_out(&c, F(sum), M * C, 0.0f, TOL_EXACT);
        if (residual == 2) c.alias = c.fields - 1, c.alias_of = 0;
    }
    case_check(&c);
}

static void test_forward(void **state)
{
    (void)state;
    for (int s = 0; s < SHAPES; s++)
        for (int i = 0; i < 6; i++) forward(s, i % 3, i < 3);
}

/* dsum 0: none; 1: given; 2: it is dx. want: bits for dweight, dbias */
static void backward(int shape, int dsum, int want, float beta)
{
    int64_t M = shapes[shape].M, C = shapes[shape].C;
    char title[128];
    snprintf(title, sizeof(title), "layer_norm_backward %d: dsum %d want %d beta %g", shape, dsum, want,
             (double)beta);
    fsdpi_layer_norm_backward_args a = {
        .M = M, .C = C, .dx_beta = dsum == 2 ? 0.0f : beta, .dweight_beta = beta, .dbias_beta = beta
    };
    kernel_case c = case_of(title, fsdpi_op_kernels_cpu.layer_norm_backward,
                            fsdpi_op_kernels_reference.layer_norm_backward, &a, sizeof(a));
    case_in(&c, B(dy), M * C);
    case_in(&c, B(x), M * C);
    case_in(&c, B(weight), C);
    case_in_scaled(&c, B(mean), M, 0.1f);
    case_in(&c, B(rstd), M);
    case_out(&c, B(dx), M * C, dsum == 2 ? 1.0f : beta, TOL_ROW_SUM);
    if (dsum == 1) case_in(&c, B(dsum), M * C);
    if (dsum == 2) case_add(&c, B(dsum), (size_t)(M * C) * sizeof(float)), c.alias = 6, c.alias_of = 5;
    if (want & 1) case_out(&c, B(dweight), C, beta, TOL_ROW_SUM);
    if (want & 2) case_out(&c, B(dbias), C, beta, TOL_ROW_SUM);
    c.scratch = scratch;
    c.scratch_offset = B(scratch);
    case_check(&c);
}

static void test_backward(void **state)
{
    (void)state;
    for (int s = 0; s < SHAPES; s++)
        for (int i = 0; i < 24; i++) backward(s, i % 3, i / 3 % 4, (float)(i / 12));
}

/* A row that is constant has no variance: eps keeps it finite. A NaN stays in its row. */
static void test_edge_rows(void **state)
{
    (void)state;
    enum { C = 37 };
    float x[3 * C], w[C], y[3 * C], mean[3], rstd[3];
    for (int i = 0; i < 3 * C; i++) x[i] = i < C ? 1e6f : (float)(i % 5);
    for (int i = 0; i < C; i++) w[i] = 1.0f;
    x[2 * C + 35] = NAN;
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    fsdpi_layer_norm_args a = {
        .x = x, .weight = w, .y = y, .mean = mean, .rstd = rstd, .M = 3, .C = C, .eps = 1e-5f
    };
    assert_ok(fsdpi_op_kernels_cpu.layer_norm(&k, &a));
    for (int i = 0; i < 2 * C; i++) assert_true(isfinite(y[i]));
    for (int i = 2 * C; i < 3 * C; i++) assert_true(isnan(y[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_edge_rows),
    };
    return cmocka_run_group_tests(tests, NULL, case_teardown);
}
