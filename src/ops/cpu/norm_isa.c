/* SPDX-License-Identifier: MIT
 *
 * Layer normalisation (Ba, Kiros and Hinton, 2016) of rows. With m the mean of a row, r = 1 / sqrt(variance + eps):
 *   y = (x - m) r w + b.
 * Backward, with h = (x - m) r and g = dy w:
 *   dx = r (g - mean(g) - h mean(g h)),   dw = sum over rows of dy h,   db = sum over rows of dy. */
#include "ops/cpu/rows.h"

#include "ops/cpu/lanes.h"
#include "ops/cpu/vecmath.h"

#include <math.h>

/* The sum of (x - mean)^2: a second pass over a row that is in the first cache, and no cancellation. */
static inline float row_square_deviation(const float *x, int64_t n, float mean)
{
    lanes m = lanes_set(mean), a = lanes_set(0.0f), b = a;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        lanes d = lanes_sub(lanes_load(x + i), m), e = lanes_sub(lanes_load(x + i + LANES), m);
        a = lanes_add(a, lanes_mul(d, d));
        b = lanes_add(b, lanes_mul(e, e));
    }
    for (; i < n; i += LANES) {
        lanes d = lanes_sub(n - i < LANES ? lanes_load_part(x + i, n - i, mean) : lanes_load(x + i), m);
        a = lanes_add(a, lanes_mul(d, d));
    }
    return lanes_sum(lanes_add(a, b));
}

static void forward(const fsdpi_layer_norm_args *a, int64_t from, int64_t to)
{
    const int64_t n = a->C;
    const float *w = a->weight, *b = a->bias;
    for (int64_t m = from; m < to; m++) {
        const float *x = a->x + m * n;
        float *y = a->y + m * n;
        if (a->residual != NULL) {
            const float *residual = a->residual + m * n;
            float *sum = a->sum + m * n;
            EACH(sum[i] = x[i] + residual[i]);
            x = sum;
        }
        float mean = row_sum(x, n) / (float)n;
        float var = row_square_deviation(x, n, mean) / (float)n;
        float rstd = 1.0f / sqrtf(var + a->eps);
        if (b != NULL)
            EACH(y[i] = (x[i] - mean) * rstd * w[i] + b[i]);
        else
            EACH(y[i] = (x[i] - mean) * rstd * w[i]);
        a->mean[m] = mean;
        a->rstd[m] = rstd;
    }
}

/* Of a row: mean(g) and mean(g h). */
typedef struct moments {
    float g, gh;
} moments;

static inline moments row_moments(const float *dy, const float *x, const float *w, int64_t n, float mean,
                                  float rstd)
{
    lanes m = lanes_set(mean), r = lanes_set(rstd), sg = lanes_set(0.0f), sgh = sg;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        lanes g = lanes_mul(lanes_load(dy + i), lanes_load(w + i));
        sg = lanes_add(sg, g);
        sgh = lanes_add(sgh, lanes_mul(g, lanes_mul(lanes_sub(lanes_load(x + i), m), r)));
    }
    if (i < n) {
        lanes g = lanes_mul(lanes_load_part(dy + i, n - i, 0.0f), lanes_load_part(w + i, n - i, 0.0f));
        sg = lanes_add(sg, g);
        sgh = lanes_add(sgh, lanes_mul(g, lanes_mul(lanes_sub(lanes_load_part(x + i, n - i, mean), m), r)));
    }
    return (moments){ lanes_sum(sg) / (float)n, lanes_sum(sgh) / (float)n };
}

static inline void row_dx(const fsdpi_layer_norm_backward_args *a, int64_t row, moments s)
{
    const int64_t n = a->C;
    const float *dy = a->dy + row * n, *x = a->x + row * n, *w = a->weight, *dsum = a->dsum;
    float *dx = a->dx + row * n, mean = a->mean[row], rstd = a->rstd[row], beta = a->dx_beta;
    if (dsum != NULL) dsum += row * n;
#define DX (rstd * ((dy[i] * w[i] - s.g) - ((x[i] - mean) * rstd) * s.gh))
    if (beta == 0.0f && dsum != NULL)
        EACH(dx[i] = dsum[i] + DX);
    else if (beta == 0.0f)
        EACH(dx[i] = DX);
    else if (dsum != NULL)
        EACH(dx[i] = beta * dx[i] + (dsum[i] + DX));
    else
        EACH(dx[i] = beta * dx[i] + DX);
#undef DX
}

/* Adds rows r .. r + 3, in order, to both sums: one load and store of the sums for four rows. */
static inline void sums_of_4(const fsdpi_layer_norm_backward_args *a, int64_t r, float *dweight, float *dbias)
{
    const int64_t n = a->C;
    const float *y0 = a->dy + r * n, *y1 = y0 + n, *y2 = y1 + n, *y3 = y2 + n;
    const float *x0 = a->x + r * n, *x1 = x0 + n, *x2 = x1 + n, *x3 = x2 + n;
    const float *m = a->mean + r, *s = a->rstd + r;
    float m0 = m[0], m1 = m[1], m2 = m[2], m3 = m[3], s0 = s[0], s1 = s[1], s2 = s[2], s3 = s[3];
    EACH(dbias[i] = (((dbias[i] + y0[i]) + y1[i]) + y2[i]) + y3[i];
         dweight[i] = (((dweight[i] + y0[i] * ((x0[i] - m0) * s0)) + y1[i] * ((x1[i] - m1) * s1)) +
                       y2[i] * ((x2[i] - m2) * s2)) +
                      y3[i] * ((x3[i] - m3) * s3));
}

static inline void sums_of_1(const fsdpi_layer_norm_backward_args *a, int64_t r, float *dweight, float *dbias)
{
    const int64_t n = a->C;
    const float *dy = a->dy + r * n, *x = a->x + r * n;
    float mean = a->mean[r], rstd = a->rstd[r];
    EACH(dbias[i] = dbias[i] + dy[i]; dweight[i] = dweight[i] + dy[i] * ((x[i] - mean) * rstd));
}

static void backward(const fsdpi_layer_norm_backward_args *a, int64_t from, int64_t to, float *dweight,
                     float *dbias)
{
    const int64_t n = a->C;
    if (dweight != NULL) EACH(dweight[i] = 0.0f; dbias[i] = 0.0f);
    for (int64_t r = from; r < to; r += 4) {
        int64_t end = r + 4 < to ? r + 4 : to;
        /* The sums first: dx may not be dy, but may lie where dsum does. */
        for (int64_t i = r; dweight != NULL && end - r < 4 && i < end; i++) sums_of_1(a, i, dweight, dbias);
        if (dweight != NULL && end - r == 4) sums_of_4(a, r, dweight, dbias);
        for (int64_t i = r; i < end; i++)
            row_dx(a, i, row_moments(a->dy + i * n, a->x + i * n, a->weight, n, a->mean[i], a->rstd[i]));
    }
}

const fsdpi_norm_rows FSDPI_ISA_NAME(fsdpi_norm_rows_get) = { .forward = forward, .backward = backward };
