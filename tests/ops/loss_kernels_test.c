/* SPDX-License-Identifier: MIT
 *
 * Softmax cross-entropy of logits, and of logits that are made in chunks. */
#include "kernel_case.h"

#define CPU      fsdpi_op_kernels_cpu
#define REF      fsdpi_op_kernels_reference
#define C(field) offsetof(fsdpi_cross_entropy_args, field)
#define L(field) offsetof(fsdpi_linear_cross_entropy_args, field)

static size_t scratch(const void *args, int threads)
{
    return fsdpi_cross_entropy_scratch(args, threads);
}

static size_t linear_scratch(const void *args, int threads)
{
    return fsdpi_linear_cross_entropy_scratch(args, threads);
}

static void add_labels(kernel_case *c, size_t offset, int64_t M, int64_t V)
{
    int32_t *labels = calloc((size_t)M + 1, sizeof(*labels));
    assert_non_null(labels);
    for (int64_t m = 0; m < M; m++) labels[m] = m % 5 == 3 ? -100 : (int32_t)(m * 7919 % V);
    case_data(c, offset, labels, (size_t)M * sizeof(*labels));
    free(labels);
}

/* gradient 0: none; 1: given, beta 0; 2: in place of the logits; 3: beta 1 */
static void cross_entropy(int64_t M, int64_t V, int gradient, bool loss)
{
    char title[128];
    snprintf(title, sizeof(title), "cross_entropy %d x %d: gradient %d", (int)M, (int)V, gradient);
    const float seed = 0.37f;
    fsdpi_cross_entropy_args a = { .M = M, .V = V, .beta = (float)(gradient == 3) };
    kernel_case c = case_of(title, CPU.cross_entropy, REF.cross_entropy, &a, sizeof(a));
    case_in_scaled(&c, C(logits), M * V, 2.0f);
    add_labels(&c, C(labels), M, V);
    if (loss) case_out_doubles(&c, C(loss), 2, TOL_LOSS);
    if (gradient > 0) {
        case_data(&c, C(seed), &seed, sizeof(seed));
        case_out(&c, C(dlogits), M * V, a.beta, TOL_ROW_SUM);
        if (gradient == 2) c.alias = c.fields - 1, c.alias_of = 0;
    }
    c.scratch = scratch;
    c.scratch_offset = C(scratch);
    case_check(&c);
}

static void test_cross_entropy(void **state)
{
    (void)state;
    const int64_t shapes[][2] = { { 0, 13 }, { 1, 1 }, { 7, 13 }, { 5, 64 }, { 70, 1031 }, { 3, 50257 } };
    for (int s = 0; s < 6; s++)
        for (int i = 0; i < 8; i++) cross_entropy(shapes[s][0], shapes[s][1], i % 4, i < 4);
}

/* want: bits for loss, dx, dweight */
static void linear_cross_entropy(int64_t M, int64_t V, int64_t K, int want, float beta)
{
    char title[128];
    snprintf(title, sizeof(title), "linear_cross_entropy %d x %d x %d: want %d", (int)M, (int)V, (int)K,
             want);
    const float seed = 0.37f;
    fsdpi_linear_cross_entropy_args a = { .M = M, .V = V, .K = K, .dx_beta = beta, .dweight_beta = beta };
    kernel_case c = case_of(title, CPU.linear_cross_entropy, REF.linear_cross_entropy, &a, sizeof(a));
    case_in(&c, L(x), M * K);
    case_in_scaled(&c, L(weight), V * K, 2.0f / sqrtf((float)K));
    add_labels(&c, L(labels), M, V);
    case_data(&c, L(seed), &seed, sizeof(seed));
    if (want & 1) case_out_doubles(&c, L(loss), 2, TOL_ROW_SUM);
    if (want & 2) case_out(&c, L(dx), M * K, beta, TOL_GEMM);
    if (want & 4) case_out(&c, L(dweight), V * K, beta, TOL_GEMM);
    c.scratch = linear_scratch;
    c.scratch_offset = L(scratch);
    case_check(&c);
}

static void test_linear_cross_entropy(void **state)
{
    (void)state;
    for (int want = 0; want < 8; want++) {
        linear_cross_entropy(0, 13, 6, want, (float)(want & 1));
        linear_cross_entropy(1, 1, 1, want, (float)(want & 1));
        linear_cross_entropy(9, 13, 6, want, (float)(want & 1));
    }
    linear_cross_entropy(300, 521, 33, 7, 0.0f);
    linear_cross_entropy(4, 50257, 5, 7, 1.0f);
    linear_cross_entropy(259, 17000, 2, 7, 0.0f); /* two chunks */
}

/* Logits of 1e5 do not overflow. A NaN makes its row's loss, and so the sum, NaN; a row that does not count
 * may hold anything. */
static void test_extreme_logits(void **state)
{
    (void)state;
    enum { M = 3, V = 40 };
    float x[M * V], d[M * V], seed = 1.0f;
    double losses[M];
    const int32_t labels[M] = { 7, -100, 2 };
    for (int i = 0; i < M * V; i++) x[i] = (i % V == 7) ? 1e5f : -1e5f;
    x[V + 3] = NAN;
    fsdpi_loss loss;
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    fsdpi_cross_entropy_args a = { .logits = x, .labels = labels, .loss = &loss, .seed = &seed, .dlogits = d,
                                   .scratch = losses, .M = M, .V = V };
    assert_ok(CPU.cross_entropy(&k, &a));
    assert_true(loss.count == 2.0 && loss.sum == 2e5);
    for (int v = 0; v < V; v++) {
        assert_true(d[v] == 0.0f && d[V + v] == 0.0f);
        assert_true(d[2 * V + v] == (v == 2 ? -1.0f : v == 7 ? 1.0f : 0.0f));
    }
    x[39] = NAN;
    assert_ok(CPU.cross_entropy(&k, &a));
    assert_true(isnan(loss.sum) && loss.count == 2.0 && isnan(d[0]) && d[V] == 0.0f);
}

static void test_bad_labels(void **state)
{
    (void)state;
    const int32_t labels[] = { 3, -100, -1 }, large[] = { 13 };
    float x[39] = { 0 }, seed = 1.0f;
    double losses[3];
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    fsdpi_cross_entropy_args a = {
        .logits = x, .labels = labels, .seed = &seed, .scratch = losses, .M = 3, .V = 13
    };
    assert_fails(CPU.cross_entropy(&k, &a), FSDP_ERR_INVALID, "row 2: label -1 is not in [0, 13)");
    assert_fails(REF.cross_entropy(&k, &a), FSDP_ERR_INVALID, "row 2: label -1 is not in [0, 13)");
    fsdpi_linear_cross_entropy_args l = { .x = x, .weight = x, .labels = large, .M = 1, .V = 13, .K = 3 };
    assert_fails(CPU.linear_cross_entropy(&k, &l), FSDP_ERR_INVALID, "row 0: label 13 is not in [0, 13)");
    assert_fails(REF.linear_cross_entropy(&k, &l), FSDP_ERR_INVALID, "row 0: label 13 is not in [0, 13)");
}

int main(int argc, char **argv)
{
    (void)argc;
    int rc;
    if (!each_gemm_kind(argv, &rc)) return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_linear_cross_entropy),
        cmocka_unit_test(test_extreme_logits),
        cmocka_unit_test(test_bad_labels),
    };
    return cmocka_run_group_tests(tests, NULL, case_teardown);
}
