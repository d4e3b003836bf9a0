/* SPDX-License-Identifier: MIT */
#include "shard/kernels.h"

#include <math.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Non-temporal stores want aligned vectors; the rest goes the plain way. The fence is in comm/symmetric.c, before the
 * sums are published. */
#if defined(__AVX512F__)
enum { VEC = 16 };
static inline void store_stream(float *p, const float *v)
{
    _mm512_stream_ps(p, _mm512_loadu_ps(v));
}
#elif defined(__AVX2__)
enum { VEC = 8 };
static inline void store_stream(float *p, const float *v)
{
    _mm256_stream_ps(p, _mm256_loadu_ps(v));
}
#elif defined(__SSE2__)
enum { VEC = 4 };
static inline void store_stream(float *p, const float *v)
{
    _mm_stream_ps(p, _mm_loadu_ps(v));
}
#else
enum { VEC = 4 };
static inline void store_stream(float *p, const float *v)
{
    memcpy(p, v, VEC * sizeof(float));
}
#endif

static inline void sum_block(float *restrict t, const float *base, const float *const *x, int n, size_t at, size_t len)
{
    const float *first = base != NULL ? base : x[0];
    int k = base != NULL ? 0 : 1;
    memcpy(t, first + at, len * sizeof(float));
    for (; k < n; k++) {
        const float *xk = x[k] + at;
        for (size_t i = 0; i < len; i++) t[i] += xk[i];
    }
}

static void sum(float *out, const float *base, const float *const *x, int n, size_t numel, bool stream)
{
    enum { BLOCK = 512 };
    float t[BLOCK];
    bool aligned = (uintptr_t)out % 64 == 0;
    for (size_t at = 0; at < numel; at += BLOCK) {
        size_t len = numel - at < BLOCK ? numel - at : BLOCK;
        sum_block(t, base, x, n, at, len);
        if (stream && aligned && len == BLOCK)
            for (size_t i = 0; i < BLOCK; i += VEC) store_stream(out + at + i, t + i);
        else memcpy(out + at, t, len * sizeof(float));
    }
}

/* Exact sums of squares. The square of a float is exact in a double. A chunk's squares are split at two fixed places
 * below its largest into three parts of 44 bits: (d + M) - M with M = 1.5 * 2^(52 + g) rounds d to a multiple of 2^g
 * exactly. 16 lanes add each part as integers times 2^g, at most 2^44 * CHUNK / 16 < 2^53: exact. What is left below
 * 132 bits, when anything is, sends the chunk through the accumulator term by term. */
enum { LANES = 16, CHUNK = 4096, BITS = 44 };

static inline double power(int e)
{
    return ldexp(1.0, e);
}

static void sumsq_chunk(fsdpi_xsum *s, const float *x, size_t n)
{
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof(u));
        u &= 0x7fffffff;
        most = u > most ? u : most;
    }
    if (most == 0) return;
    if (most >= 0x7f800000) { /* infinity or NaN */
        for (size_t i = 0; i < n; i++) fsdpi_xsum_add(s, (double)x[i] * (double)x[i]);
        return;
    }
    float biggest;
    memcpy(&biggest, &most, sizeof(biggest));
    int e;
    (void)frexp((double)biggest * (double)biggest, &e); /* all squares < 2^e */
    int g0 = e - BITS, g1 = g0 - BITS, g2 = g1 - BITS;
    double m0 = 1.5 * power(52 + g0), m1 = 1.5 * power(52 + g1), m2 = 1.5 * power(52 + g2);
    double a0[LANES] = { 0 }, a1[LANES] = { 0 }, a2[LANES] = { 0 }, rest[LANES] = { 0 };
    float last[LANES] = { 0 };
    size_t whole = n / LANES * LANES;
    memcpy(last, x + whole, (n - whole) * sizeof(float));
    for (size_t i = 0; i < n; i += LANES) {
        const float *p = i < whole ? x + i : last;
        for (int l = 0; l < LANES; l++) {
            double d = (double)p[l] * (double)p[l];
            double h0 = (d + m0) - m0;
            d -= h0;
            double h1 = (d + m1) - m1;
            d -= h1;
            double h2 = (d + m2) - m2;
            d -= h2;
            a0[l] += h0;
            a1[l] += h1;
            a2[l] += h2;
            rest[l] += d < 0 ? -d : d;
        }
    }
    double left = 0;
    for (int l = 0; l < LANES; l++) left += rest[l];
    if (left != 0) {
        for (size_t i = 0; i < n; i++) fsdpi_xsum_add(s, (double)x[i] * (double)x[i]);
        return;
    }
    for (int l = 0; l < LANES; l++) {
        fsdpi_xsum_add(s, a0[l]);
        fsdpi_xsum_add(s, a1[l]);
        fsdpi_xsum_add(s, a2[l]);
    }
}

static void sumsq(fsdpi_xsum *s, const float *x, size_t numel)
{
    for (size_t at = 0; at < numel; at += CHUNK) sumsq_chunk(s, x + at, numel - at < CHUNK ? numel - at : CHUNK);
}

const fsdpi_shard_kernels FSDPI_ISA_NAME(fsdpi_shard_kernels_get) = { .sum = sum, .sumsq = sumsq };
