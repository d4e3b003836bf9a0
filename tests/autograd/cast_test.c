/* SPDX-License-Identifier: MIT
 *
 * What goes in and comes out in other types than operations compute in: the bits of a cast of each value; a gradient goes through. */
#include "support/one_rank.h"

#include "base/alloc.h"

#include <math.h>

enum { N = 37 }; /* no multiple of a register */

static float value(int i)
{
    return i == 5 ? 1e30f : i == 6 ? -0.0f : ldexpf((float)(i * 37 % 29 - 14) + 0.3f, i % 9 - 4);
}

static void test_in(void **state)
{
    (void)state;
    fsdp_device *devices[2] = { fsdp_device_cpu() };
    float want[N], got[N];
    double f64[N];
    uint16_t bf16[N], f16[N];
    assert_ok(fsdp_device_open(&devices[1], "guard"));
    for (int i = 0; i < N; i++) {
        f64[i] = (double)value(i) * (1 + 1e-12);
        bf16[i] = fsdp_bf16_from_f32(value(i));
        f16[i] = fsdp_f16_from_f32(value(i));
    }
    const struct {
        fsdp_dtype dtype;
        const void *values;
    } kinds[] = { { FSDP_F64, f64 }, { FSDP_BF16, bf16 }, { FSDP_F16, f16 } };
    for (int k = 0; k < 6; k++) {
        fsdp_tape *tape;
        fsdp_tensor *t;
        fsdp_dtype d = kinds[k / 2].dtype;
        for (int i = 0; i < N; i++) want[i] = d == FSDP_F64 ? (float)f64[i] : d == FSDP_BF16 ? fsdp_bf16_to_f32(bf16[i]) : fsdp_f16_to_f32(f16[i]);
        assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .device = devices[k % 2] }));
        assert_ok(fsdp_tensor_from(&t, tape, d, kinds[k / 2].values, 2, (int64_t[]){ 1, N }));
        assert_int_equal(fsdp_tensor_dtype(t), FSDP_F32);
        assert_ok(fsdp_tensor_require_grad(t)); /* it is a leaf as others are */
        assert_ok(fsdp_tensor_to_f32(t, got));
        assert_memory_equal(got, want, sizeof(got));
        assert_ok(fsdp_tape_cancel(tape));
    }
    fsdp_device_close(devices[1]);
}

static void test_out(void **state)
{
    (void)state;
    fsdp_tape *tape;
    fsdp_tensor *t, *ids;
    float f32[N];
    double f64[N];
    uint16_t narrow[N];
    int64_t wide[3];
    for (int i = 0; i < N; i++) f32[i] = value(i);
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_ok(fsdp_tensor_from(&t, tape, FSDP_F32, f32, 1, (int64_t[]){ N }));
    assert_ok(fsdp_tensor_to(t, FSDP_F64, f64));
    for (int i = 0; i < N; i++) assert_true(f64[i] == (double)f32[i]);
    assert_ok(fsdp_tensor_to(t, FSDP_BF16, narrow));
    for (int i = 0; i < N; i++) assert_int_equal(narrow[i], fsdp_bf16_from_f32(f32[i]));
    assert_ok(fsdp_tensor_to(t, FSDP_F16, narrow));
    for (int i = 0; i < N; i++) assert_int_equal(narrow[i], fsdp_f16_from_f32(f32[i]));
    assert_true(isinf(fsdp_f16_to_f32(narrow[5])));
    assert_ok(fsdp_tensor_from(&ids, tape, FSDP_I64, (int64_t[]){ -1, INT32_MAX, INT32_MIN }, 1, (int64_t[]){ 3 }));
    assert_int_equal(fsdp_tensor_dtype(ids), FSDP_I32);
    assert_ok(fsdp_tensor_to(ids, FSDP_I64, wide));
    assert_true(wide[0] == -1 && wide[1] == INT32_MAX && wide[2] == INT32_MIN);
    assert_ok(fsdp_tape_cancel(tape));
}

static void test_wrong(void **state)
{
    (void)state;
    fsdp_tape *tape;
    fsdp_tensor *t, *good;
    int64_t big[2] = { 7, (int64_t)INT32_MAX + 1 };
    uint16_t half[2] = { 0 };
    assert_ok(fsdp_tape_begin(&tape, comm));
    assert_fails(fsdp_tensor_from(&t, tape, FSDP_I64, big, 1, (int64_t[]){ 2 }), FSDP_ERR_INVALID, "2147483648 at place 1");
    assert_fails(fsdp_tensor_from(&t, tape, FSDP_U8, big, 1, (int64_t[]){ 2 }), FSDP_ERR_INVALID, "values of type U8");
    assert_fails(fsdp_tensor_from(&t, tape, (fsdp_dtype)99, big, 1, (int64_t[]){ 2 }), FSDP_ERR_INVALID, "values of type");
    assert_fails(fsdp_tensor_from(&t, tape, FSDP_BF16, half, 1, (int64_t[]){ -2 }), FSDP_ERR_INVALID, "-2");
    for (long n = 1; n <= 2; n++) {
        fsdpi_alloc_fail_at(n);
        assert_fails(fsdp_tensor_from(&t, tape, FSDP_BF16, half, 1, (int64_t[]){ 2 }), FSDP_ERR_NOMEM, "no memory");
        (void)fsdpi_alloc_fail_at(0);
    }
    assert_ok(fsdp_tensor_from(&good, tape, FSDP_BF16, half, 1, (int64_t[]){ 2 }));
    assert_fails(fsdp_tensor_to(good, FSDP_I64, big), FSDP_ERR_INVALID, "type F32 is not cast to I64");
    fsdpi_alloc_fail_at(1);
    assert_fails(fsdp_tensor_to(good, FSDP_F64, big), FSDP_ERR_NOMEM, "to cast 2 values");
    (void)fsdpi_alloc_fail_at(0);
    assert_ok(fsdp_tensor_to(good, FSDP_F64, big));
    assert_ok(fsdp_tape_cancel(tape));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_in, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_out, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrong, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
