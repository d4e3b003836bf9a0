/* SPDX-License-Identifier: MIT
 *
 * Reductions for kernel files (*_isa.c). A row is summed in 16 lanes (lane l takes elements l, l + 16, ...),
 * which are added in one fixed order at the end; how many of them a register holds is the instruction set's
 * affair. The lanes past the end of a row take a value that changes nothing. */
#ifndef FSDPI_OPS_CPU_LANES_H
#define FSDPI_OPS_CPU_LANES_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { VEC = 16 }; /* floats in a register */
#elif defined(__AVX__)
enum { VEC = 8 };
#else
enum { VEC = 4 };
#endif
enum { LANES = 16, LANE_VECS = LANES / VEC };

typedef float vec __attribute__((vector_size(VEC * sizeof(float))));
typedef int32_t ivec __attribute__((vector_size(VEC * sizeof(int32_t))));
typedef struct lanes {
    vec v[LANE_VECS];
} lanes;

static inline vec vec_load(const float *p)
{
    vec v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void vec_store(float *p, vec v)
{
    memcpy(p, &v, sizeof(v));
}

static inline vec vec_set(float x)
{
#if defined(__AVX512F__)
    return (vec)_mm512_set1_ps(x);
#elif defined(__AVX__)
    return (vec)_mm256_set1_ps(x);
#elif defined(__SSE2__)
    return (vec)_mm_set1_ps(x);
#else
    vec v;
    for (int l = 0; l < VEC; l++) v[l] = x;
    return v;
#endif
}

/* a > b ? a : b, so that a NaN in a is dropped */
static inline vec vec_max(vec a, vec b)
{
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vec)_mm_max_ps((__m128)a, (__m128)b);
#else
    for (int l = 0; l < VEC; l++) b[l] = a[l] > b[l] ? a[l] : b[l];
    return b;
#endif
}

/* a < b ? a : b, likewise */
static inline vec vec_min(vec a, vec b)
{
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vec)_mm_min_ps((__m128)a, (__m128)b);
#else
    for (int l = 0; l < VEC; l++) b[l] = a[l] < b[l] ? a[l] : b[l];
    return b;
#endif
}

/* The comparisons of vectors give all ones or all zeros a lane. */
static inline vec vec_select(ivec mask, vec yes, vec no)
{
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* The next VEC elements of a row that has `left` more, and `pad` for the others; and back. */
static inline vec vec_get(const float *p, int64_t left, float pad)
{
    if (left >= VEC) return vec_load(p);
    float t[VEC];
    for (int l = 0; l < VEC; l++) t[l] = l < left ? p[l] : pad;
    return vec_load(t);
}

static inline void vec_put(float *p, int64_t left, vec v)
{
    if (left >= VEC) {
        vec_store(p, v);
        return;
    }
    for (int l = 0; l < left; l++) p[l] = v[l];
}

static inline lanes lanes_set(float x)
{
    lanes r;
    for (int v = 0; v < LANE_VECS; v++) r.v[v] = vec_set(x);
    return r;
}

static inline lanes lanes_load(const float *p)
{
    lanes r;
    for (int v = 0; v < LANE_VECS; v++) r.v[v] = vec_load(p + v * VEC);
    return r;
}

/* The last n < 16 elements, and `pad` beyond them. */
static inline lanes lanes_load_part(const float *p, int64_t n, float pad)
{
    float t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = l < n ? p[l] : pad;
    return lanes_load(t);
}

static inline lanes lanes_add(lanes a, lanes b)
{
    for (int v = 0; v < LANE_VECS; v++) a.v[v] += b.v[v];
    return a;
}

static inline lanes lanes_sub(lanes a, lanes b)
{
    for (int v = 0; v < LANE_VECS; v++) a.v[v] -= b.v[v];
    return a;
}

static inline lanes lanes_mul(lanes a, lanes b)
{
    for (int v = 0; v < LANE_VECS; v++) a.v[v] *= b.v[v];
    return a;
}

static inline lanes lanes_max(lanes a, lanes b)
{
    for (int v = 0; v < LANE_VECS; v++) a.v[v] = vec_max(a.v[v], b.v[v]);
    return a;
}

static inline float lanes_sum(lanes a)
{
    float t[LANES];
    memcpy(t, &a, sizeof(t));
    for (int l = 0; l < 8; l++) t[l] += t[l + 8];
    for (int l = 0; l < 4; l++) t[l] += t[l + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

static inline float lanes_greatest(lanes a)
{
    float t[LANES];
    memcpy(t, &a, sizeof(t));
    for (int l = 0; l < 8; l++) t[l] = t[l] > t[l + 8] ? t[l] : t[l + 8];
    for (int l = 0; l < 4; l++) t[l] = t[l] > t[l + 4] ? t[l] : t[l + 4];
    for (int l = 0; l < 2; l++) t[l] = t[l] > t[l + 2] ? t[l] : t[l + 2];
    return t[0] > t[1] ? t[0] : t[1];
}

/* Two sets of lanes take turns, so that an addition need not wait for the one before it. */
static inline float row_sum(const float *x, int64_t n)
{
    lanes a = lanes_set(0.0f), b = a;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        a = lanes_add(a, lanes_load(x + i));
        b = lanes_add(b, lanes_load(x + i + LANES));
    }
    if (i + LANES <= n) {
        a = lanes_add(a, lanes_load(x + i));
        i += LANES;
    }
    if (i < n) b = lanes_add(b, lanes_load_part(x + i, n - i, 0.0f));
    return lanes_sum(lanes_add(a, b));
}

static inline float row_dot(const float *x, const float *y, int64_t n)
{
    lanes a = lanes_set(0.0f), b = a;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        a = lanes_add(a, lanes_mul(lanes_load(x + i), lanes_load(y + i)));
        b = lanes_add(b, lanes_mul(lanes_load(x + i + LANES), lanes_load(y + i + LANES)));
    }
    if (i + LANES <= n) {
        a = lanes_add(a, lanes_mul(lanes_load(x + i), lanes_load(y + i)));
        i += LANES;
    }
    if (i < n)
        b = lanes_add(b, lanes_mul(lanes_load_part(x + i, n - i, 0.0f), lanes_load_part(y + i, n - i, 0.0f)));
    return lanes_sum(lanes_add(a, b));
}

/* The greatest element; NaNs do not count; -infinity where there is none. */
static inline float row_max(const float *x, int64_t n)
{
    const float lowest = -__builtin_inff();
    lanes a = lanes_set(lowest), b = a;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        a = lanes_max(lanes_load(x + i), a);
        b = lanes_max(lanes_load(x + i + LANES), b);
    }
    if (i + LANES <= n) {
        a = lanes_max(lanes_load(x + i), a);
        i += LANES;
    }
    if (i < n) b = lanes_max(lanes_load_part(x + i, n - i, lowest), b);
    return lanes_greatest(lanes_max(a, b));
}

#endif
