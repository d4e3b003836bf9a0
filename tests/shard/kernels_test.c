/* SPDX-License-Identifier: MIT
 *
 * The core's kernels give the same bits in every instruction set, at every length, offset and address: sums are those
 * of a plain loop, in order; sums of squares and of magnitudes are exact, whatever the range of the values. */
#include "support/testing.h"

#include "shard/kernels.h"

#include <math.h>

enum { ROOM = 6000 };

/* Xorshift: many numbers are wanted. */
static uint32_t draw(uint32_t *rng)
{
    *rng ^= *rng << 13;
    *rng ^= *rng >> 17;
    *rng ^= *rng << 5;
    return *rng;
}

static float odd_float(uint32_t *rng, unsigned kinds)
{
    uint32_t u = draw(rng), kind = draw(rng) % kinds;
    float x;
    if (kind == 0) u = (u & 0x81ffffff) | 0x3e000000;      /* round 1 */
    else if (kind == 1) u &= 0x807fffff;                    /* denormal, or 0 */
    else if (kind == 2) u = (u & 0x807fffff) | 0x7f000000;  /* the largest */
    else if (kind == 3) u &= 0xff7fffff;                    /* anything finite */
    memcpy(&x, &u, sizeof(x));
    return isfinite(x) ? x : 1;
}

static void check_sum(const fsdpi_shard_kernels *k, uint32_t *rng, const char *isa, int n, int terms, int offset, int with_base, bool stream)
{
    static float x[FSDPI_SUM_MOST][ROOM + 32], base[ROOM + 32], out[ROOM + 32], want[ROOM + 32];
    const float *at[FSDPI_SUM_MOST];
    for (int t = 0; t < terms; t++) {
        at[t] = x[t] + (offset * (t + 1)) % 17; /* each at an alignment of its own */
        for (int i = 0; i < n + 32; i++) x[t][i] = odd_float(rng, 2);
    }
    for (int i = 0; i < n + 32; i++) base[i] = out[i] = want[i] = odd_float(rng, 2);
    float *o = out + offset, *b = with_base == 2 ? o : with_base == 1 ? base + offset : NULL;
    for (int i = 0; i < n; i++) {
        volatile float sum = b != NULL ? b[i] : at[0][i];
        for (int t = b != NULL ? 0 : 1; t < terms; t++) sum = sum + at[t][i];
        want[offset + i] = sum;
    }
    k->sum(o, b, at, terms, (size_t)n, stream);
    if (memcmp(out, want, sizeof(float) * (size_t)(n + 32)) != 0)
        fail_msg("sum, %s: %d elements at %d, %d terms, base %d, stream %d", isa, n, offset, terms, with_base, stream);
}

static void test_sums(void **state)
{
    (void)state;
    static const int larger[] = { 127, 255, 511, 512, 513, 1023, 1024, 1025, 2048, 5000 };
    uint32_t rng = 5;
    for (int isa = 0; isa < FSDPI_ISA_COUNT; isa++) {
        if (!fsdpi_isa_supported((fsdpi_isa)isa)) continue;
        const fsdpi_shard_kernels *k = fsdpi_shard_kernels_get((fsdpi_isa)isa);
        const char *name = fsdpi_isa_name((fsdpi_isa)isa);
        for (int n = 0; n <= 100; n++)
            for (int offset = 0; offset < 17; offset++) check_sum(k, &rng, name, n, 1 + (n + offset) % FSDPI_SUM_MOST, offset, (n + offset) % 3, n % 2);
        for (size_t i = 0; i < sizeof(larger) / sizeof(larger[0]); i++)
            for (int terms = 1; terms <= FSDPI_SUM_MOST; terms++)
                for (int v = 0; v < 6; v++) check_sum(k, &rng, name, larger[i], terms, v % 2 ? 0 : 3, v % 3, v > 2); /* 0: the way past the cache, where aligned */
    }
}

/* The kernel's sum minus all magnitudes is exactly nothing; and the largest. */
static void check_magnitudes(const fsdpi_shard_kernels *k, const char *isa, const float *x, int n)
{
    fsdpi_xsum s = { 0 }, plain = { 0 };
    float largest = 0, most;
    k->sumabs(&s, x, (size_t)n);
    uint32_t bits = k->largest(x, (size_t)n);
    memcpy(&most, &bits, sizeof(most));
    for (int i = 0; i < n; i++) {
        fsdpi_xsum_add(&plain, fabs((double)x[i]));
        if (isnan(x[i]) || fabsf(x[i]) > largest) largest = fabsf(x[i]);
    }
    double got = fsdpi_xsum_round(&s), want = fsdpi_xsum_round(&plain);
    if (memcmp(&got, &want, sizeof(got)) != 0 && !(isnan(got) && isnan(want))) fail_msg("sumabs, %s: %d elements: %.17g, not %.17g", isa, n, got, want);
    if (most != largest && !(isnan(most) && isnan(largest))) fail_msg("largest, %s: of %d elements: %.9g, not %.9g", isa, n, (double)most, (double)largest);
    if (!isfinite(want)) return;
    for (int i = 0; i < n; i++) fsdpi_xsum_add(&s, -fabs((double)x[i]));
    if (fsdpi_xsum_round(&s) != 0) fail_msg("sumabs, %s: %d elements: off by %g", isa, n, fsdpi_xsum_round(&s));
}

/* The kernel's sum minus all squares, one by one, is exactly nothing. */
static void check_sumsq(const fsdpi_shard_kernels *k, const char *isa, const float *x, int n)
{
    fsdpi_xsum s = { 0 }, plain = { 0 };
    k->sumsq(&s, x, (size_t)n);
    for (int i = 0; i < n; i++) fsdpi_xsum_add(&plain, (double)x[i] * (double)x[i]);
    double got = fsdpi_xsum_round(&s), want = fsdpi_xsum_round(&plain);
    if (memcmp(&got, &want, sizeof(got)) != 0 && !(isnan(got) && isnan(want))) fail_msg("sumsq, %s: %d elements: %.17g, not %.17g", isa, n, got, want);
    check_magnitudes(k, isa, x, n);
    if (!isfinite(want)) return;
    for (int i = 0; i < n; i++) fsdpi_xsum_add(&s, -((double)x[i] * (double)x[i]));
    if (fsdpi_xsum_round(&s) != 0) fail_msg("sumsq, %s: %d elements: off by %g", isa, n, fsdpi_xsum_round(&s));
}

static void test_sums_of_squares(void **state)
{
    (void)state;
    static const int larger[] = { 4095, 4096, 4097, 5000, 8191, 8192, 12345 };
    static float x[12345 + 32];
    uint32_t rng = 6;
    for (int isa = 0; isa < FSDPI_ISA_COUNT; isa++) {
        if (!fsdpi_isa_supported((fsdpi_isa)isa)) continue;
        const fsdpi_shard_kernels *k = fsdpi_shard_kernels_get((fsdpi_isa)isa);
        const char *name = fsdpi_isa_name((fsdpi_isa)isa);
        for (int n = 0; n <= 100; n++)
            for (int offset = 0; offset < 17; offset++) {
                for (int i = 0; i < n + 32; i++) x[i] = odd_float(&rng, 1 + (unsigned)(n + offset) % 4); /* one kind, or all mixed */
                check_sumsq(k, name, x + offset, n);
            }
        for (size_t i = 0; i < sizeof(larger) / sizeof(larger[0]); i++)
            for (unsigned kinds = 1; kinds <= 4; kinds++) {
                for (int j = 0; j < larger[i] + 3; j++) x[j] = odd_float(&rng, kinds);
                check_sumsq(k, name, x + 3, larger[i]);
                for (int j = 0; j < larger[i] + 3; j++) x[j] = j % 2 ? 1.0000001f : 0x1p-60f; /* two scales far apart */
                check_sumsq(k, name, x, larger[i]);
                for (int j = 0; j < larger[i]; j++) x[j] = -3.4028235e38f; /* as large as they get */
                check_sumsq(k, name, x, larger[i]);
                for (int j = 0; j < larger[i]; j++) x[j] = 0;
                x[larger[i] - 1] = 0x1p-149f;
                check_sumsq(k, name, x, larger[i]);
            }
        static const float bad[] = { INFINITY, -INFINITY, NAN };
        for (int b = 0; b < 3; b++)
            for (int at = 0; at < 40; at += 13) {
                for (int j = 0; j < 40; j++) x[j] = 1;
                x[at] = bad[b];
                check_sumsq(k, name, x, 40);
                fsdpi_xsum s = { 0 };
                k->sumsq(&s, x, 40);
                assert_true(b == 2 ? isnan(fsdpi_xsum_round(&s)) : isinf(fsdpi_xsum_round(&s)) && fsdpi_xsum_round(&s) > 0);
            }
    }
}

/* However a vector is cut, and in whichever order the parts are added. */
static void test_cuts(void **state)
{
    (void)state;
    static float x[20000];
    uint32_t rng = 7;
    for (int i = 0; i < 20000; i++) x[i] = odd_float(&rng, 4);
    const fsdpi_shard_kernels *k = fsdpi_shard_kernels_get(fsdpi_isa_get());
    fsdpi_xsum whole = { 0 };
    k->sumsq(&whole, x, 20000);
    double want = fsdpi_xsum_round(&whole);
    for (int round = 0; round < 50; round++) {
        fsdpi_xsum part[3] = { 0 };
        for (size_t at = 0, n; at < 20000; at += n) {
            n = 1 + draw(&rng) % (round % 2 ? 9000 : 300);
            if (at + n > 20000) n = 20000 - at;
            k->sumsq(&part[draw(&rng) % 3], x + at, n);
        }
        fsdpi_xsum_merge(&part[1], &part[round % 2 ? 2 : 0]);
        fsdpi_xsum_merge(&part[round % 2 ? 0 : 2], &part[1]);
        assert_true(fsdpi_xsum_round(&part[round % 2 ? 0 : 2]) == want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_sums_of_squares),
        cmocka_unit_test(test_cuts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
