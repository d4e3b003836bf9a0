/* SPDX-License-Identifier: MIT
 *
 * The errors that vecmath.h and ln.h state, against the C library in double. */
#include "support/testing.h"

#include "ops/cpu/ln.h"
#include "ops/cpu/vecmath.h"

#include <math.h>

static float from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

/* Every 251st float of either sign up to `limit`. */
#define EACH_FLOAT(x, limit)                                                                                \
    for (uint32_t u_ = 0; u_ < 0x7f800000u; u_ += 251)                                                      \
        for (int sign_ = 0; sign_ < 2; sign_++)                                                             \
            for (float x = from_bits(u_ | (uint32_t)sign_ << 31), *once_ = &x; once_ != NULL; once_ = NULL) \
                if (fabsf(x) <= (limit))

static void test_exp(void **state)
{
    (void)state;
    double worst = 0.0;
    EACH_FLOAT(x, 80.0f)
    {
        double want = exp((double)x), got = (double)exp_f32(x);
        double error = x < -87.3f ? 0.0 : fabs(got - want) / want;
        worst = error > worst ? error : worst;
    }
    print_message("exp: %.3g relative\n", worst);
    assert_true(worst <= 8e-8);
    assert_true(exp_f32(0.0f) == 1.0f && exp_f32(-88.1f) == 0.0f && exp_f32(-3e38f) == 0.0f &&
                exp_f32(-INFINITY) == 0.0f);
    assert_true(isfinite(exp_f32(3e38f)) && isnan(exp_f32(NAN)) && isnan(exp_f32(-NAN)));
}

static void test_normal_cdf(void **state)
{
    (void)state;
    double worst = 0.0;
    EACH_FLOAT(x, 30.0f)
    {
        vec density;
        double want = 0.5 * erfc(-(double)x * M_SQRT1_2),
               got = (double)vec_normal_cdf(vec_set(x), &density)[0];
        double error = fabs(got - want);
        worst = error > worst ? error : worst;
    }
    print_message("Phi: %.3g absolute\n", worst);
    assert_true(worst <= 2.7e-7);
}

static void test_gelu(void **state)
{
    (void)state;
    double worst[4] = { 0.0 };
    EACH_FLOAT(x, 30.0f)
    {
        double d = (double)x, u = 0.79788456080286535588 * (d + 0.044715 * d * d * d), t = tanh(u);
        double du = 0.79788456080286535588 * (1.0 + 3.0 * 0.044715 * d * d);
        double cdf = 0.5 * erfc(-d * M_SQRT1_2), density = 0.39894228040143267794 * exp(-0.5 * d * d);
        double want[4] = { 0.5 * d * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * d * (1.0 - t * t) * du, d * cdf,
                           cdf + d * density };
        vec v = vec_set(x);
        float got[4] = { vec_gelu_tanh(v)[0], vec_gelu_tanh_slope(v)[0], vec_gelu_erf(v)[0],
                         vec_gelu_erf_slope(v)[0] };
        for (int i = 0; i < 4; i++) {
            double error = fabs((double)got[i] - want[i]) / (1.0 + fabs(d));
            worst[i] = error > worst[i] ? error : worst[i];
        }
    }
    print_message("GELU tanh, slope, erf, slope: %.3g %.3g %.3g %.3g of 1 + |x|\n", worst[0], worst[1],
                  worst[2], worst[3]);
    for (int i = 0; i < 4; i++) assert_true(worst[i] <= 3e-7);
}

static void test_ln(void **state)
{
    (void)state;
    for (double x = 1e-300; x < 1e300; x *= 1.00371) {
        double want = log(x);
        assert_true(fabs(fsdpi_ln(x) - want) <= 1e-15 * (1.0 + fabs(want)));
    }
    assert_true(fsdpi_ln(1.0) == 0.0 && isnan(fsdpi_ln((double)NAN)) && isinf(fsdpi_ln((double)INFINITY)));
}

/* Rows of every length up to 100: the tail adds nothing and misses nothing. */
static void test_row_reductions(void **state)
{
    (void)state;
    float x[100], y[100];
    for (int i = 0; i < 100; i++) x[i] = (float)(i * 37 % 101) - 50.0f, y[i] = (float)(i % 7);
    for (int n = 0; n <= 100; n++) {
        double sum = 0.0, dot = 0.0;
        float max = -INFINITY;
        for (int i = 0; i < n; i++) {
            sum += (double)x[i];
            dot += (double)x[i] * (double)y[i];
            max = fmaxf(max, x[i]);
        }
        assert_true((double)row_sum(x, n) == sum && (double)row_dot(x, y, n) == dot && row_max(x, n) == max);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp), cmocka_unit_test(test_normal_cdf),     cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_ln),  cmocka_unit_test(test_row_reductions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
