/* SPDX-License-Identifier: MIT
 *
 * Elementwise work: a call is a row, or a piece of one. */
#include "ops/cpu/rows.h"

#include "ops/cpu/vecmath.h"

static void axpby(int64_t n, float alpha, const float *x, float beta, float *out)
{
    if (beta == 0.0f)
        EACH(out[i] = alpha * x[i]);
    else
        EACH(out[i] = beta * out[i] + alpha * x[i]);
}

static void act(fsdpi_activation kind, int64_t n, const float *x, float *y)
{
#define ACT(f) EACH_VEC(vec_put(y + i, left, f(vec_get(x + i, left, 0.0f))))
    switch (kind) {
    case FSDPI_ACT_GELU_TANH: ACT(vec_gelu_tanh); break;
    case FSDPI_ACT_GELU_ERF: ACT(vec_gelu_erf); break;
    case FSDPI_ACT_RELU: ACT(vec_relu); break;
    default: memmove(y, x, (size_t)n * sizeof(*y));
    }
#undef ACT
}

static void bias_act(fsdpi_activation kind, int64_t n, const float *x, const float *bias, float *pre,
                     float *y)
{
#define ACT(f)                                                                                         \
    EACH_VEC(vec v = vec_get(x + i, left, 0.0f); if (bias != NULL) v += vec_get(bias + i, left, 0.0f); \
             if (pre != NULL) vec_put(pre + i, left, v); vec_put(y + i, left, f(v)))
    switch (kind) {
    case FSDPI_ACT_GELU_TANH: ACT(vec_gelu_tanh); break;
    case FSDPI_ACT_GELU_ERF: ACT(vec_gelu_erf); break;
    case FSDPI_ACT_RELU: ACT(vec_relu); break;
    default: ACT();
    }
#undef ACT
}

static void act_backward(fsdpi_activation kind, int64_t n, const float *x, const float *dy, float beta,
                         float *dx)
{
#define BACK(slope)                                                                                       \
    if (beta == 0.0f)                                                                                     \
        EACH_VEC(vec_put(dx + i, left, vec_get(dy + i, left, 0.0f) * slope(vec_get(x + i, left, 0.0f)))); \
    else                                                                                                  \
        EACH_VEC(vec v = vec_get(dy + i, left, 0.0f) * slope(vec_get(x + i, left, 0.0f));                 \
                 vec_put(dx + i, left, vec_set(beta) * vec_get(dx + i, left, 0.0f) + v))
    switch (kind) {
    case FSDPI_ACT_GELU_TANH: BACK(vec_gelu_tanh_slope); break;
    case FSDPI_ACT_GELU_ERF: BACK(vec_gelu_erf_slope); break;
    case FSDPI_ACT_RELU: BACK(vec_relu_slope); break;
    default: axpby(n, 1.0f, dy, beta, dx);
    }
#undef BACK
}

/* sum += four rows, in order: the sum is loaded and stored once for them all. */
static void sum_rows(int64_t rows, int64_t n, const float *x, int64_t ld, float *sum)
{
    EACH(sum[i] = 0.0f);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const float *a = x + r * ld, *b = a + ld, *c = b + ld, *d = c + ld;
        EACH(sum[i] = (((sum[i] + a[i]) + b[i]) + c[i]) + d[i]);
    }
    for (; r < rows; r++) {
        const float *a = x + r * ld;
        EACH(sum[i] = sum[i] + a[i]);
    }
}

static void act_backward_sum(fsdpi_activation kind, int64_t rows, int64_t n, const float *x, const float *dy,
                             float *dx, float *sum)
{
    for (int64_t r = 0; r < rows; r++) act_backward(kind, n, x + r * n, dy + r * n, 0.0f, dx + r * n);
    if (sum != NULL) sum_rows(rows, n, dx, n, sum);
}

static void add(int64_t n, const float *x, const float *y, float *out)
{
    EACH(out[i] = x[i] + y[i]);
}

static void mask(int64_t n, const uint32_t *bits, uint32_t threshold, float factor, const float *x,
                 float beta, float *out)
{
    if (beta == 0.0f)
        EACH(out[i] = x[i] * (bits[i] >= threshold ? factor : 0.0f));
    else
        EACH(out[i] = beta * out[i] + x[i] * (bits[i] >= threshold ? factor : 0.0f));
}

const fsdpi_pointwise_rows FSDPI_ISA_NAME(fsdpi_pointwise_rows_get) = {
    .act = act,
    .bias_act = bias_act,
    .act_backward = act_backward,
    .act_backward_sum = act_backward_sum,
    .sum_rows = sum_rows,
    .add = add,
    .axpby = axpby,
    .mask = mask,
};
