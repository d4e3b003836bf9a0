/* SPDX-License-Identifier: MIT
 *
 * Activations, sums, dropout and embeddings. */
#include "kernel_case.h"

#define CPU fsdpi_op_kernels_cpu
#define REF fsdpi_op_kernels_reference

static const int64_t lengths[] = { 0, 1, 6, 13, 16, 31, 100, 16384, 16399, 40000 };
enum { LENGTHS = sizeof(lengths) / sizeof(lengths[0]) };

/* in place: the output is the input `of`. */
static void in_place(kernel_case *c, bool on, int of)
{
    if (on) c->alias = c->fields - 1, c->alias_of = of;
}

static void test_activations(void **state)
{
    (void)state;
    for (int l = 0; l < LENGTHS; l++)
        for (int act = 0; act < 4; act++)
            for (int i = 0; i < 3; i++) {
                int64_t n = lengths[l];
                char title[128];
                snprintf(title, sizeof(title), "activation %d of %d, %d", act, (int)n, i);
                fsdpi_activation_args a = { .numel = n, .act = (fsdpi_activation)act };
                kernel_case c = case_of(title, CPU.activation, REF.activation, &a, sizeof(a));
                case_in_scaled(&c, offsetof(fsdpi_activation_args, x), n, 3.0f);
                case_out(&c, offsetof(fsdpi_activation_args, out), n, 0.0f, TOL_ACT);
                in_place(&c, i == 0, 0);
                case_check(&c);
                a.beta = (float)(i == 2);
                c = case_of(title, CPU.activation_backward, REF.activation_backward, &a, sizeof(a));
                case_in_scaled(&c, offsetof(fsdpi_activation_args, x), n, 3.0f);
                case_in(&c, offsetof(fsdpi_activation_args, dy), n);
                case_out(&c, offsetof(fsdpi_activation_args, out), n, a.beta, TOL_ACT);
                in_place(&c, i == 0, 1);
                case_check(&c);
            }
}

/* Far out, activations are 0 or x and their slopes 0 or 1; NaN stays. */
static void test_extreme_activations(void **state)
{
    (void)state;
    const float x[] = { -3e38f, -1e10f, -50.0f, -12.0f, 12.0f, 50.0f, 1e10f, 3e38f, NAN };
    enum { N = sizeof(x) / sizeof(x[0]), FINITE = N - 1 };
    float y[N], dx[N], dy[N];
    for (int i = 0; i < N; i++) dy[i] = 1.0f;
    for (int act = 1; act < 4; act++)
        for (int isa = 0; isa < FSDPI_ISA_COUNT; isa++) {
            if (!fsdpi_isa_supported((fsdpi_isa)isa)) continue;
            struct fsdp_kernel k = { .isa = (fsdpi_isa)isa };
            fsdpi_activation_args a = {
                .x = x, .dy = dy, .out = y, .numel = N, .act = (fsdpi_activation)act
            };
            assert_ok(CPU.activation(&k, &a));
            a.out = dx;
            assert_ok(CPU.activation_backward(&k, &a));
            for (int i = 0; i < FINITE; i++) {
                assert_true(x[i] < 0.0f ? fabsf(y[i]) < 1e-30f : y[i] == x[i]);
                assert_true(x[i] < 0.0f ? fabsf(dx[i]) < 1e-30f : dx[i] == 1.0f);
            }
            assert_true(isnan(y[FINITE]));
        }
}

static void test_sums(void **state)
{
    (void)state;
    for (int l = 0; l < LENGTHS; l++)
        for (int i = 0; i < 3; i++) {
            int64_t n = lengths[l];
            fsdpi_add_args add = { .numel = n };
            kernel_case c = case_of("add", CPU.add, REF.add, &add, sizeof(add));
            case_in(&c, offsetof(fsdpi_add_args, x), n);
            case_in(&c, offsetof(fsdpi_add_args, y), n);
            case_out(&c, offsetof(fsdpi_add_args, out), n, 0.0f, TOL_EXACT);
            in_place(&c, i < 2, i);
            case_check(&c);
            fsdpi_axpby_args ax = { .numel = n, .alpha = -0.7f, .beta = 0.75f * (float)i };
            c = case_of("axpby", CPU.axpby, REF.axpby, &ax, sizeof(ax));
            case_in(&c, offsetof(fsdpi_axpby_args, x), n);
            case_out(&c, offsetof(fsdpi_axpby_args, out), n, ax.beta, TOL_ROUNDED);
            in_place(&c, i == 0, 0);
            case_check(&c);
        }
}

static void test_dropout(void **state)
{
    (void)state;
    const float p[] = { 0.0f, 0.1f, 0.5f, 0.999f, 1e-9f };
    for (int l = 0; l < LENGTHS; l++)
        for (int i = 0; i < 5; i++) {
            int64_t n = lengths[l];
            fsdpi_dropout_args a = { .B = 3, .per_sample = n, .beta = (float)(i % 2), .dropout = { .p = p[i],
                                     .seed = 99, .step = 1u << 20, .layer = 0xffffffffu,
                                     .first_sample = 0xfffffffeu } };
            kernel_case c = case_of("dropout", CPU.dropout, REF.dropout, &a, sizeof(a));
            case_in(&c, offsetof(fsdpi_dropout_args, x), 3 * n);
            case_out(&c, offsetof(fsdpi_dropout_args, out), 3 * n, a.beta, TOL_ROUNDED);
            in_place(&c, i == 2, 0);
            case_check(&c);
        }
}

/* A sample is dropped alike wherever it lies in a batch, and p is kept to. */
static void test_dropout_is_of_the_sample(void **state)
{
    (void)state;
    enum { N = 50000 };
    static float x[3 * N], all[3 * N], one[N];
    for (int i = 0; i < 3 * N; i++) x[i] = 1.0f;
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    fsdpi_dropout_args a = {
        .x = x, .out = all, .B = 3, .per_sample = N, .dropout = { .p = 0.2f, .seed = 4, .first_sample = 7 }
    };
    assert_ok(CPU.dropout(&k, &a));
    a.B = 1, a.out = one, a.dropout.first_sample = 9;
    assert_ok(CPU.dropout(&k, &a));
    assert_memory_equal(one, all + 2 * N, sizeof(one));
    int kept = 0;
    for (int i = 0; i < 3 * N; i++) kept += all[i] != 0.0f;
    assert_true(fabs(kept / (3.0 * N) - 0.8) < 5 * sqrt(0.16 / (3.0 * N))); /* five standard errors */
}

static void embedding(int64_t samples, int64_t T, int64_t V, int64_t C, bool position, float beta)
{
    int64_t M = samples * T, positions = T + 5;
    int32_t *ids = calloc((size_t)M + 1, sizeof(*ids));
    assert_non_null(ids);
    for (int64_t m = 0; m < M; m++) ids[m] = (int32_t)(m % 3 == 0 ? V - 1 : m * 7919 % V); /* some often */
    fsdpi_embedding_args f = { .M = M, .T = T, .V = V, .C = C, .first_position = 2 };
    kernel_case c = case_of("embedding", CPU.embedding, REF.embedding, &f, sizeof(f));
    case_data(&c, offsetof(fsdpi_embedding_args, ids), ids, (size_t)M * sizeof(*ids));
    case_in(&c, offsetof(fsdpi_embedding_args, token), V * C);
    if (position) case_in(&c, offsetof(fsdpi_embedding_args, position), positions * C);
    case_out(&c, offsetof(fsdpi_embedding_args, out), M * C, 0.0f, TOL_EXACT);
    case_check(&c);
    for (int want = 0; want < 4; want++) {
        fsdpi_embedding_backward_args b = { .M = M, .T = T, .V = V, .C = C, .positions = positions,
                                            .first_position = 2, .dtoken_beta = beta,
                                            .dposition_beta = beta };
        c = case_of("embedding_backward", CPU.embedding_backward, REF.embedding_backward, &b, sizeof(b));
        case_data(&c, offsetof(fsdpi_embedding_backward_args, ids), ids, (size_t)M * sizeof(*ids));
        case_in(&c, offsetof(fsdpi_embedding_backward_args, dout), M * C);
        if (want & 1) case_out(&c, offsetof(fsdpi_embedding_backward_args, dtoken), V * C, beta, TOL_EXACT);
        if (want & 2)
            case_out(&c, offsetof(fsdpi_embedding_backward_args, dposition), positions * C, beta, TOL_EXACT);
        case_check(&c);
    }
    free(ids);
}

static void test_embeddings(void **state)
{
    (void)state;
    embedding(0, 4, 13, 6, true, 0.0f);
    embedding(1, 1, 1, 1, true, 1.0f);
    embedding(3, 7, 13, 6, true, 0.0f);
    embedding(3, 7, 13, 6, false, 1.0f);
    embedding(2, 70, 50257, 3, true, 0.0f);
    embedding(2, 33, 200, 131, true, 1.0f);
}

/* Refused before anything is written, with the row and the id. */
static void test_bad_ids(void **state)
{
    (void)state;
    const int32_t ids[] = { 0, 12, 13, 1 }, negative[] = { 0, -100 };
    float token[13 * 2] = { 0 }, out[8], untouched[8];
    memset(out, 0x5a, sizeof(out));
    memcpy(untouched, out, sizeof(out));
    fsdpi_embedding_args a = { .ids = ids, .token = token, .out = out, .M = 4, .T = 4, .V = 13, .C = 2 };
    struct fsdp_kernel k = { .isa = fsdpi_isa_get() };
    assert_fails(CPU.embedding(&k, &a), FSDP_ERR_INVALID, "row 2: token 13 is not in [0, 13)");
    assert_fails(REF.embedding(&k, &a), FSDP_ERR_INVALID, "row 2: token 13 is not in [0, 13)");
    assert_memory_equal(out, untouched, sizeof(out));
    a.ids = negative, a.M = 2;
    assert_fails(CPU.embedding(&k, &a), FSDP_ERR_INVALID, "row 1: token -100 is not in [0, 13)");
    fsdpi_embedding_backward_args b = {
        .ids = ids, .dout = token, .dtoken = token, .M = 4, .T = 4, .V = 13, .C = 2
    };
    assert_fails(CPU.embedding_backward(&k, &b), FSDP_ERR_INVALID, "row 2: token 13");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_activations),
        cmocka_unit_test(test_extreme_activations),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_dropout_is_of_the_sample),
        cmocka_unit_test(test_embeddings),
        cmocka_unit_test(test_bad_ids),
    };
    return cmocka_run_group_tests(tests, NULL, case_teardown);
}
