/* SPDX-License-Identifier: MIT
 *
 * 16-bit floats: every value goes to fp32 and back to itself; rounding is to the nearest, ties to even (against integer
 * arithmetic); arrays have the bits of the scalar functions on every instruction set. */
#include "support/testing.h"

#include "base/convert.h"

#include <math.h>

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

static void test_every_value_comes_back(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i;
        float b = fsdp_bf16_to_f32(h), f = fsdp_f16_to_f32(h);
        if (isnan(b)) assert_true(isnan(fsdp_bf16_to_f32(fsdp_bf16_from_f32(b))));
        else assert_int_equal(fsdp_bf16_from_f32(b), h);
        if (isnan(f)) assert_true(isnan(fsdp_f16_to_f32(fsdp_f16_from_f32(f))));
        else assert_int_equal(fsdp_f16_from_f32(f), h);
    }
}

/* Between each pair of neighbours: below, at and above the middle. */
static void test_rounding(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7bff; h++) {
        double lo = (double)fsdp_f16_to_f32((uint16_t)h), hi = (double)fsdp_f16_to_f32((uint16_t)(h + 1)), mid = (lo + hi) / 2;
        assert_int_equal(fsdp_f16_from_f32((float)mid), h % 2 == 0 ? h : h + 1);
        assert_int_equal(fsdp_f16_from_f32(nextafterf((float)mid, 0)), h);
        assert_int_equal(fsdp_f16_from_f32(nextafterf((float)mid, 1e9f)), h + 1);
    }
    for (uint32_t h = 0; h < 0x7f7f; h++) {
        uint32_t mid = h << 16 | 0x8000;
        assert_int_equal(fsdp_bf16_from_f32(float_of(mid)), h % 2 == 0 ? h : h + 1);
        assert_int_equal(fsdp_bf16_from_f32(float_of(mid - 1)), h);
        assert_int_equal(fsdp_bf16_from_f32(float_of(mid + 1)), h + 1);
    }
    assert_int_equal(fsdp_f16_from_f32(65519.996f), 0x7bff);
    assert_int_equal(fsdp_f16_from_f32(65520), 0x7c00);
    assert_int_equal(fsdp_f16_from_f32(-INFINITY), 0xfc00);
    assert_int_equal(fsdp_bf16_from_f32(3.4e38f), 0x7f80);
}

static void test_arrays(void **state)
{
    (void)state;
    enum { N = 1 << 17 };
    float *x = malloc(N * sizeof(*x)), *back = malloc(N * sizeof(*back));
    uint16_t *h = malloc(N * sizeof(*h));
    assert_true(x != NULL && back != NULL && h != NULL);
    for (uint32_t i = 0; i < N; i++) x[i] = float_of(i * 32771u ^ i << 19); /* all over the place, NaNs and denormals too */
    for (int isa = 0; isa < FSDPI_ISA_COUNT; isa++) {
        if (!fsdpi_isa_supported((fsdpi_isa)isa)) continue;
        fsdpi_convert_from_f32((fsdpi_isa)isa, FSDP_BF16, h, x, N);
        fsdpi_convert_to_f32((fsdpi_isa)isa, FSDP_BF16, back, h, N);
        for (int i = 0; i < N; i++) {
            float want = fsdp_bf16_to_f32(h[i]);
            assert_int_equal(h[i], fsdp_bf16_from_f32(x[i]));
            assert_memory_equal(&back[i], &want, sizeof(want));
        }
        fsdpi_convert_from_f32((fsdpi_isa)isa, FSDP_F16, h, x, N);
        fsdpi_convert_to_f32((fsdpi_isa)isa, FSDP_F16, back, h, N);
        for (int i = 0; i < N; i++) {
            float want = fsdp_f16_to_f32(h[i]);
            assert_int_equal(h[i], fsdp_f16_from_f32(x[i]));
            assert_memory_equal(&back[i], &want, sizeof(want));
        }
    }
    free(x);
    free(back);
    free(h);
}

static void test_names(void **state)
{
    (void)state;
    for (int t = 0; t < FSDP_DTYPE_COUNT; t++) {
        fsdp_dtype back;
        assert_ok(fsdp_dtype_parse(&back, fsdp_dtype_name((fsdp_dtype)t)));
        assert_int_equal(back, t);
        assert_true(fsdp_dtype_bytes((fsdp_dtype)t) > 0);
    }
    fsdp_dtype none;
    assert_fails(fsdp_dtype_parse(&none, "F8_E4M3"), FSDP_ERR_FORMAT, "F8_E4M3");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_value_comes_back),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
