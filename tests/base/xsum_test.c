/* SPDX-License-Identifier: MIT
 *
 * Exact sums equal the correctly rounded sum (computed with 128-bit integers where it fits), in any order and any split. */
#include "support/testing.h"

#include "base/xsum.h"

#include <fsdp/random.h>
#include <math.h>

__extension__ typedef __int128 int128;

static double sum_of(const double *x, int n)
{
    fsdpi_xsum s = { 0 };
    for (int i = 0; i < n; i++) fsdpi_xsum_add(&s, x[i]);
    return fsdpi_xsum_round(&s);
}

static void test_single_values_come_back(void **state)
{
    (void)state;
    const double x[] = { 0.0, 1.0, -1.0, 0x1p-1074, -0x1p-1074, 0x1.fffffffffffffp1023, 0x1p-1022, 0x0.fffffffffffffp-1022, M_PI };
    for (size_t i = 0; i < sizeof(x) / sizeof(x[0]); i++) {
        double r = sum_of(&x[i], 1);
        assert_true(memcmp(&r, &x[i], sizeof(r)) == 0);
    }
}

static void test_rounding(void **state)
{
    (void)state;
    const struct {
        double x[4], sum;
    } c[] = {
        { { 1, 0x1p-53 }, 1 },                            /* half: to even */
        { { 1, 0x1p-53, 0x1p-1074 }, 1 + 0x1p-52 },       /* a hair above half */
        { { 1 + 0x1p-52, 0x1p-53 }, 1 + 0x1p-51 },        /* half: to even, upwards */
        { { 0x1p1023, 0x1p1023, -0x1p1023 }, 0x1p1023 },  /* no overflow on the way */
        { { 1e300, 1, -1e300 }, 1 },
        { { -1e300, -1, 1e300, 0x1p-1074 }, -1 },
        { { 0x1p1023, 0x1p1023 }, INFINITY },
        { { INFINITY, 1 }, INFINITY },
        { { 0x1p-1074, 0x1p-1074 }, 0x1p-1073 },
        { { -5, 5 }, 0 },
    };
    for (size_t i = 0; i < sizeof(c) / sizeof(c[0]); i++) assert_true(sum_of(c[i].x, 4) == c[i].sum);
    assert_true(isnan(sum_of((double[]){ INFINITY, -INFINITY }, 2)));
    assert_true(isnan(sum_of((double[]){ NAN, 1 }, 2)));
}

/* Random terms of all sizes, held as multiples of 2^-60 below 2^60 so that __int128 has the exact sum. */
static void test_against_integers_in_any_split(void **state)
{
    (void)state;
    fsdp_rng rng;
    fsdp_rng_init(&rng, 1);
    for (int round = 0; round < 200; round++) {
        enum { N = 300 };
        double x[N];
        int128 exact = 0;
        for (int i = 0; i < N; i++) {
            int64_t m = (int64_t)(fsdp_rng_u32(&rng)) - 0x80000000ll;
            int e = (int)(fsdp_rng_u32(&rng) % 80);
            x[i] = ldexp((double)m, e - 60);
            exact += (int128)m * ((int128)1 << e);
        }
        fsdpi_xsum part[3] = { 0 };
        for (int i = N - 1; i >= 0; i--) fsdpi_xsum_add(&part[(i * 7 + round) % 3], x[i]);
        fsdpi_xsum_merge(&part[0], &part[2]);
        fsdpi_xsum_merge(&part[1], &part[0]);
        double forwards = sum_of(x, N), split = fsdpi_xsum_round(&part[1]);
        /* (double) of an __int128 rounds to nearest even */
        double want = ldexp((double)exact, -60);
        assert_true(forwards == want);
        assert_true(split == want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_single_values_come_back),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_against_integers_in_any_split),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
