/* SPDX-License-Identifier: MIT
 *
 * Elementary functions in fp32 for kernel files (*_isa.c), on vectors: branch-free and without library calls,
 * so that an element has the same bits wherever it lies and whatever the instruction set. Polynomials are
 * minimax fits (Remez exchange); the errors stated are measured (tests/ops/vecmath_test.c). NaN gives NaN. */
#ifndef FSDPI_OPS_CPU_VECMATH_H
#define FSDPI_OPS_CPU_VECMATH_H

#include "ops/cpu/lanes.h"

/* A loop over the elements i of a row of n, for the compiler to make vectors of. Its iterations are
 * independent even where an output is an input, which is what the pragma says. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
#define EACH(...)                                                             \
    do {                                                                      \
        INDEPENDENT for (int64_t i = 0; i < n; i++) { __VA_ARGS__; }          \
    } while (0)

/* The same for loops that are written in vectors: the vector at i, which has `left` elements. The body is
 * compiled twice, once for whole vectors. */
#define EACH_VEC(...)                    \
    do {                                 \
        int64_t i = 0;                   \
        for (; i + VEC <= n; i += VEC) { \
            const int64_t left = VEC;    \
            __VA_ARGS__;                 \
        }                                \
        if (i < n) {                     \
            const int64_t left = n - i;  \
            __VA_ARGS__;                 \
        }                                \
    } while (0)

/* e^x within 8e-8 relative; 0 below -87.68, where e^x is no normal number; at most 5.5e34, the value at 80.
 * x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, n times the first of which is exact. */
static inline vec vec_exp(vec x)
{
    x = vec_max(vec_set(-88.02f), vec_min(vec_set(80.0f), x)); /* in this order a NaN x is kept */
    vec t = x * vec_set(1.44269504f) + vec_set(0x1.8p23f); /* the nearest integer n is in the low bits of t */
    vec n = t - vec_set(0x1.8p23f);
    vec r = (x - n * vec_set(0.693359375f)) + n * vec_set(2.12194440e-4f);
    vec q = vec_set(0.00138145388f);
    q = q * r + vec_set(0.00836874514f);
    q = q * r + vec_set(0.0416683908f);
    q = q * r + vec_set(0.166665204f);
    q = q * r + vec_set(0.499999934f);
    vec e = vec_set(1.0f) + (r + r * r * q);
    ivec power = ((ivec)t << 23) + 0x3f800000; /* the bits of 2^n; of 0 for n = -127 */
    return e * (vec)power;
}

static inline float exp_f32(float x)
{
    return vec_exp(vec_set(x))[0];
}

/* GELU by tanh (Hendrycks and Gimpel, "Gaussian error linear units", 2016):
 *   y = x / 2 (1 + tanh u) = x s(2u),  u = sqrt(2 / pi) (x + 0.044715 x^3),  s(z) = 1 / (1 + e^-z).
 * The sigmoid has no cancellation for negative x. */
#define GELU_2U1 1.59576912f   /* 2 sqrt(2 / pi) */
#define GELU_2U3 0.0713548163f /* 2 sqrt(2 / pi) 0.044715 */

static inline vec vec_gelu_tanh(vec x)
{
    x = vec_max(vec_set(-20.0f), x); /* y is -4e-34 there: 0 for any use, but not -infinity further out */
    vec e = vec_exp(x * (vec_set(-GELU_2U1) - vec_set(GELU_2U3) * (x * x)));
    return x / (vec_set(1.0f) + e);
}

/* dy/dx = s + x s (1 - s) 2u', with 1 - s = e^-2u s */
static inline vec vec_gelu_tanh_slope(vec x)
{
    x = vec_max(vec_set(-20.0f), vec_min(vec_set(20.0f), x)); /* where it is 0 and 1 */
    vec xx = x * x;
    vec e = vec_exp(x * (vec_set(-GELU_2U1) - vec_set(GELU_2U3) * xx));
    vec s = vec_set(1.0f) / (vec_set(1.0f) + e);
    return s + (x * (vec_set(GELU_2U1) + vec_set(3.0f * GELU_2U3) * xx)) * (e * s * s);
}

/* The normal distribution's Phi(x), within 2.7e-7: for a >= 0, Phi(-a) = e^(-a^2/2) t P(t), t = 1 / (1 + 0.3 a).
 * (The form is that of Hastings, "Approximations for digital computers", 1955.) *density = e^(-x^2/2). */
static inline vec vec_normal_cdf(vec x, vec *density)
{
    vec a = (vec)((ivec)x & 0x7fffffff), t = vec_set(1.0f) / (vec_set(1.0f) + vec_set(0.3f) * a);
    vec e = vec_exp(vec_set(-0.5f) * (x * x));
    vec p = vec_set(0.0361948141f);
    p = p * t + vec_set(-0.159378149f);
    p = p * t + vec_set(0.210118136f);
    p = p * t + vec_set(-0.0571671501f);
    p = p * t + vec_set(0.130416352f);
    p = p * t + vec_set(0.0993471515f);
    p = p * t + vec_set(0.120845526f);
    p = p * t + vec_set(0.119623263f);
    vec tail = e * (t * p);
    *density = e;
    return vec_select(x < vec_set(0.0f), tail, vec_set(1.0f) - tail);
}

/* GELU itself: y = x Phi(x); dy/dx = Phi(x) + x phi(x). */
static inline vec vec_gelu_erf(vec x)
{
    vec density;
    return x * vec_normal_cdf(x, &density);
}

static inline vec vec_gelu_erf_slope(vec x)
{
    vec density, cdf = vec_normal_cdf(x, &density);
    return cdf + x * (vec_set(0.398942280f) * density);
}

static inline vec vec_relu(vec x)
{
    return vec_max(vec_set(0.0f), x);
}

static inline vec vec_relu_slope(vec x)
{
    return vec_select(x <= vec_set(0.0f), vec_set(0.0f), vec_set(1.0f));
}

#endif
