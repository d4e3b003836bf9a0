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

/* Exact sums of squares, and of magnitudes. The square of a float is exact in a double. A chunk's terms are split at two fixed places
 * below its largest into three parts of 44 bits: (d + M) - M with M = 1.5 * 2^(52 + g) rounds d to a multiple of 2^g
 * exactly. 16 lanes add each part as integers times 2^g, at most 2^44 * CHUNK / 16 < 2^53: exact. What is left below
 * 88 bits, when anything is, takes a third place, and below 132 the accumulator, term by term. */
enum { LANES = 16, CHUNK = 4096, BITS = 44 };

static inline double power(int e)
{
    return ldexp(1.0, e);
}

/* Eight doubles: one register of AVX-512, two of AVX2, four of SSE2. The same lanes everywhere. */
typedef double v8d __attribute__((vector_size(64)));
typedef float v8f __attribute__((vector_size(32)));
typedef uint64_t v8u __attribute__((vector_size(64)));
enum { VECS = LANES / 8 };

typedef struct parts {
    v8d a[3][VECS];
    v8u rest[VECS]; /* bits of what was left, ored */
} parts;

/* 16 lanes of n elements, n a multiple of LANES, at two places or three. */
static inline void split(parts *t, const double magic[3], int levels, bool square, const float *x, size_t n)
{
    parts s = *t;
    const v8d m0 = (v8d){ 0 } + magic[0], m1 = (v8d){ 0 } + magic[1], m2 = (v8d){ 0 } + magic[2];
    for (size_t i = 0; i < n; i += LANES) {
        for (size_t k = 0; k < VECS; k++) {
            v8f f;
            memcpy(&f, x + i + 8 * k, sizeof(f));
            v8d d = __builtin_convertvector(f, v8d);
            d = square ? d * d : (v8d)((v8u)d & ~((v8u){ 0 } + 0x8000000000000000u));
            v8d h0 = (d + m0) - m0;
            d -= h0;
            v8d h1 = (d + m1) - m1;
            d -= h1;
            s.a[0][k] += h0;
            s.a[1][k] += h1;
            if (levels == 3) {
                v8d h2 = (d + m2) - m2;
                d -= h2;
                s.a[2][k] += h2;
            }
            s.rest[k] |= (v8u)d << 1; /* without the sign: -0 is nothing */
        }
    }
    *t = s;
}

static uint32_t largest_magnitude(const float *x, size_t n)
{
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof(u));
        u &= 0x7fffffff;
        most = u > most ? u : most;
    }
    return most;
}

static void one_by_one(fsdpi_xsum *s, bool square, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) fsdpi_xsum_add(s, square ? (double)x[i] * (double)x[i] : fabs((double)x[i]));
}

/* A whole chunk; false where something is left below the last place. Two places do for nearly all chunks. */
static inline bool split_all(parts *t, const double magic[3], int levels, bool square, const float *x, size_t whole, const float *last)
{
    memset(t, 0, sizeof(*t));
    split(t, magic, levels, square, x, whole);
    split(t, magic, levels, square, last, LANES);
    uint64_t left = 0;
    for (int l = 0; l < LANES; l++) left |= t->rest[l / 8][l % 8];
    return left == 0;
}

static inline void sum_chunk(fsdpi_xsum *s, bool square, const float *x, size_t n)
{
    uint32_t most = largest_magnitude(x, n);
    if (most == 0) return;
    if (most >= 0x7f800000) { /* infinity or NaN */
        one_by_one(s, square, x, n);
        return;
    }
    float biggest, last[LANES] = { 0 };
    memcpy(&biggest, &most, sizeof(biggest));
    int e;
    (void)frexp(square ? (double)biggest * (double)biggest : (double)biggest, &e); /* all terms < 2^e */
    const double magic[3] = { 1.5 * power(52 + e - BITS), 1.5 * power(52 + e - 2 * BITS), 1.5 * power(52 + e - 3 * BITS) };
    size_t whole = n / LANES * LANES;
    memcpy(last, x + whole, (n - whole) * sizeof(float));
    parts t;
    if (!split_all(&t, magic, 2, square, x, whole, last) && !split_all(&t, magic, 3, square, x, whole, last)) {
        one_by_one(s, square, x, n);
        return;
    }
    for (int k = 0; k < 3; k++)
        for (int l = 0; l < LANES; l++) fsdpi_xsum_add(s, t.a[k][l / 8][l % 8]);
}

static void sumsq(fsdpi_xsum *s, const float *x, size_t numel)
{
    for (size_t at = 0; at < numel; at += CHUNK) sum_chunk(s, true, x + at, numel - at < CHUNK ? numel - at : CHUNK);
}

static void sumabs(fsdpi_xsum *s, const float *x, size_t numel)
{
    for (size_t at = 0; at < numel; at += CHUNK) sum_chunk(s, false, x + at, numel - at < CHUNK ? numel - at : CHUNK);
}

const fsdpi_shard_kernels FSDPI_ISA_NAME(fsdpi_shard_kernels_get) = { .sum = sum, .sumsq = sumsq, .sumabs = sumabs, .largest = largest_magnitude };
