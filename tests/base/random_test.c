/* SPDX-License-Identifier: MIT
 *
 * Philox gives the published values; normals are the same bits for every instruction set, start and length, and are
 * normal. */
#include "support/testing.h"

#include "base/philox.h"

#include <math.h>

/* Known answers of Philox4x32-10, from the kat_vectors file of the Random123 distribution. */
static void test_known_answers(void **state)
{
    (void)state;
    uint32_t r[4];
    fsdpi_philox(0, 0, 0, r);
    assert_true(r[0] == 0x6627e8d5 && r[1] == 0xe169c58d && r[2] == 0xbc57ac4c && r[3] == 0x9b00dbd8);
    fsdpi_philox(~0ull, ~0ull, ~0ull, r);
    assert_true(r[0] == 0x408f276d && r[1] == 0x41c83b0e && r[2] == 0xa20bc7c6 && r[3] == 0x6d5451fd);
    fsdpi_philox(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull, 0x0370734413198a2eull, r);
    assert_true(r[0] == 0xd16cfe09 && r[1] == 0x94fdcceb && r[2] == 0x5001e420 && r[3] == 0x24126ea1);
    uint32_t bits[4];
    for (int isa = 0; isa < FSDPI_ISA_COUNT; isa++) {
        if (!fsdpi_isa_supported((fsdpi_isa)isa)) continue;
        fsdpi_philox(7, 3, 9, r);
        fsdpi_philox_kernels_get((fsdpi_isa)isa)->bits(7, 9, 12, 4, bits);
        assert_memory_equal(r, bits, sizeof(r));
    }
}

static void test_same_bits_on_every_instruction_set_and_cut(void **state)
{
    (void)state;
    enum { N = 4099 };
    static float want[N], got[N + 1];
    fsdpi_philox_kernels_get(FSDPI_ISA_PORTABLE)->normal(42, fsdpi_name_hash("w"), 5, N, want);
    for (int isa = 0; isa < FSDPI_ISA_COUNT; isa++) {
        if (!fsdpi_isa_supported((fsdpi_isa)isa)) continue;
        const fsdpi_philox_kernels *k = fsdpi_philox_kernels_get((fsdpi_isa)isa);
        for (size_t at = 0, n = 1; at < N; at += n, n = n * 3 % 101 + 1)
            k->normal(42, fsdpi_name_hash("w"), 5 + at, at + n < N ? n : N - at, got + 1 + at);
        assert_memory_equal(want, got + 1, sizeof(want));
    }
    for (int i = 0; i < N; i += 97) assert_true(fsdp_philox_normal(42, "w", 5 + i) == want[i]);
}

static void test_normal_is_normal(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    float *x = malloc(N * sizeof(*x));
    assert_non_null(x);
    fsdp_philox_normal_fill(3, "x", 0, N, x);
    double m1 = 0, m2 = 0, m3 = 0, m4 = 0;
    int beyond2 = 0;
    for (int i = 0; i < N; i++) {
        double v = x[i];
        m1 += v;
        m2 += v * v;
        m3 += v * v * v;
        m4 += v * v * v * v;
        beyond2 += fabs(v) > 1.959963985;
    }
    /* five standard errors of each moment */
    assert_true(fabs(m1 / N) < 5 * sqrt(1.0 / N));
    assert_true(fabs(m2 / N - 1) < 5 * sqrt(2.0 / N));
    assert_true(fabs(m3 / N) < 5 * sqrt(15.0 / N));
    assert_true(fabs(m4 / N - 3) < 5 * sqrt(96.0 / N));
    assert_true(fabs((double)beyond2 / N - 0.05) < 5 * sqrt(0.05 * 0.95 / N));
    free(x);
}

/* The formula itself, by the C library's functions: within float's rounding. */
static void test_normal_is_box_muller(void **state)
{
    (void)state;
    for (int64_t i = 0; i < 20000; i++) {
        uint32_t r[4];
        fsdpi_philox(11, (uint64_t)i / 4, fsdpi_name_hash("z"), r);
        double u = (r[i % 4 / 2 * 2] + 1.0) * 0x1p-32, v = r[i % 4 / 2 * 2 + 1] * 0x1p-32;
        double radius = sqrt(-2 * log(u)), want = i % 2 == 0 ? radius * cos(2 * M_PI * v) : radius * sin(2 * M_PI * v);
        assert_true(fabs(fsdp_philox_normal(11, "z", i) - want) <= 1e-7 * (1 + fabs(want)));
    }
}

static void test_streams_can_be_saved(void **state)
{
    (void)state;
    fsdp_rng a, b;
    fsdp_rng_init(&a, 9);
    for (int i = 0; i < 10; i++) (void)fsdp_rng_uniform(&a);
    b = a;
    for (int i = 0; i < 10; i++) {
        float u = fsdp_rng_uniform(&a);
        assert_true(u == fsdp_rng_uniform(&b) && u >= 0 && u < 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answers),
        cmocka_unit_test(test_same_bits_on_every_instruction_set_and_cut),
        cmocka_unit_test(test_normal_is_normal),
        cmocka_unit_test(test_normal_is_box_muller),
        cmocka_unit_test(test_streams_can_be_saved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
