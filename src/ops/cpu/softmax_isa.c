/* SPDX-License-Identifier: MIT
 *
 * Rows of softmax, for attention and for the losses. A row's maximum is subtracted before the exponential, so
 * that large logits do not overflow; a NaN anywhere makes the row's sum NaN. */
#include "ops/cpu/rows.h"

#include "ops/cpu/lanes.h"
#include "ops/cpu/vecmath.h"

static float max_of(int64_t n, const float *x)
{
    return row_max(x, n);
}

static float dot(int64_t n, const float *x, const float *y)
{
    return row_dot(x, y, n);
}

/* e = e^(x - max), and the sum of it. */
static inline float exp_and_sum(int64_t n, const float *x, float max, float *e)
{
    lanes sum = lanes_set(0.0f);
    const vec m = vec_set(max);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int v = 0; v < LANE_VECS; v++) {
            vec y = vec_exp(vec_load(x + i + v * VEC) - m);
            vec_store(e + i + v * VEC, y);
            sum.v[v] += y;
        }
    for (int v = 0; i < n; i += VEC, v++) { /* lanes past the end hold e^-infinity */
        vec y = vec_exp(vec_get(x + i, n - i, -__builtin_inff()) - m);
        vec_put(e + i, n - i, y);
        sum.v[v] += y;
    }
    return lanes_sum(sum);
}

/* Blocks of 1024 are summed in fp32, the blocks' sums in fp64: of 50,000 terms fp32 alone loses a digit. */
static double exp_sum(int64_t n, const float *x, float max, float *e)
{
    enum { BLOCK = 1024 };
    float local[BLOCK];
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += BLOCK)
        sum += (double)exp_and_sum(n - i < BLOCK ? n - i : BLOCK, x + i, max, e != NULL ? e + i : local);
    return sum;
}

static void exp_scale(int64_t n, const float *x, float max, float factor, float beta, float *out)
{
    vec m = vec_set(max), f = vec_set(factor), b = vec_set(beta);
    if (beta == 0.0f)
        EACH_VEC(vec_put(out + i, left, vec_exp(vec_get(x + i, left, 0.0f) - m) * f));
    else
        EACH_VEC(vec v = vec_exp(vec_get(x + i, left, 0.0f) - m) * f;
                 vec_put(out + i, left, b * vec_get(out + i, left, 0.0f) + v));
}

/* ---- attention ----
 *
 * A few rows go through each step together: steps that end in one number (a maximum, a sum) then wait for one
 * another once a group, not once a row. A row is filled up to whole vectors with scores of -infinity, which
 * add nothing. */

static inline int64_t seen_by(const fsdpi_score_rows *r, int64_t i)
{
    return r->seen + i * r->step;
}

static inline int64_t whole_lanes(int64_t n)
{
    return (n + LANES - 1) / LANES * LANES;
}

static void fill_up(const fsdpi_score_rows *r)
{
    for (int64_t i = 0; i < r->rows; i++) {
        int64_t n = seen_by(r, i);
        for (int64_t j = n; j < whole_lanes(n); j++) r->s[i * r->ld + j] = -__builtin_inff();
    }
}

static void clear_rest(const fsdpi_score_rows *r, float *x)
{
    for (int64_t i = 0; i < r->rows; i++) {
        int64_t n = seen_by(r, i);
        if (r->cols > n) memset(x + i * r->ld + n, 0, (size_t)(r->cols - n) * sizeof(*x));
    }
}

static void apply_mask(const fsdpi_score_rows *r, float *x)
{
    const uint32_t threshold = r->threshold;
    const float factor = r->factor;
    for (int64_t row = 0; row < r->rows && r->bits != NULL; row++) {
        const int64_t n = seen_by(r, row);
        const uint32_t *bits = r->bits + row * r->ld;
        float *to = x + row * r->ld;
        EACH(to[i] = to[i] * (bits[i] >= threshold ? factor : 0.0f));
    }
}

static void attention(const fsdpi_score_rows *r, float *max, float *sum)
{
    fill_up(r);
    for (int64_t i = 0; i < r->rows; i++) max[i] = row_max(r->s + i * r->ld, whole_lanes(seen_by(r, i)));
    for (int64_t i = 0; i < r->rows; i++) {
        float *s = r->s + i * r->ld;
        sum[i] = exp_and_sum(whole_lanes(seen_by(r, i)), s, max[i], s);
    }
    apply_mask(r, r->s);
    clear_rest(r, r->s);
}

static void attention_backward(const fsdpi_score_rows *r, const float *lse, const float *delta)
{
    fill_up(r);
    apply_mask(r, r->dp);
    for (int64_t row = 0; row < r->rows; row++) {
        const int64_t n = whole_lanes(seen_by(r, row));
        float *s = r->s + row * r->ld, *dp = r->dp + row * r->ld;
        vec l = vec_set(lse[row]), d = vec_set(delta[row]);
        for (int64_t i = 0; i < n; i += VEC) {
            vec p = vec_exp(vec_load(s + i) - l);
            vec_store(s + i, p);
            vec_store(dp + i, p * (vec_load(dp + i) - d));
        }
    }
    apply_mask(r, r->s);
    clear_rest(r, r->s);
    clear_rest(r, r->dp);
}

/* Keys in blocks; what was summed so far is rescaled where a block has a greater score (Milakov and
 * Gimelshein, "Online normalizer calculation for softmax", 2018). */
static void attend(int64_t keys, int64_t D, float scale, const float *q, const float *k, const float *v,
                   int64_t ld, float *out)
{
    enum { BLOCK = 64 };
    float s[BLOCK], max = -__builtin_inff(), sum = 0.0f;
    const int64_t n = D;
    EACH(out[i] = 0.0f);
    for (int64_t j0 = 0; j0 < keys; j0 += BLOCK) {
        int64_t m = keys - j0 < BLOCK ? keys - j0 : BLOCK;
        for (int64_t j = 0; j < m; j++) s[j] = scale * row_dot(q, k + (j0 + j) * ld, D);
        float block_max = row_max(s, m), new_max = block_max > max ? block_max : max;
        float old = j0 == 0 ? 0.0f : exp_f32(max - new_max);
        sum = sum * old + exp_and_sum(m, s, new_max, s);
        EACH(out[i] = out[i] * old);
        for (int64_t j = 0; j < m; j++) {
            const float *row = v + (j0 + j) * ld;
            float p = s[j];
            EACH(out[i] = out[i] + p * row[i]);
        }
        max = new_max;
    }
    float inverse = 1.0f / sum;
    EACH(out[i] = out[i] * inverse);
}

const fsdpi_softmax_rows FSDPI_ISA_NAME(fsdpi_softmax_rows_get) = {
    .max = max_of,
    .exp_sum = exp_sum,
    .exp_scale = exp_scale,
    .attention = attention,
    .attention_backward = attention_backward,
    .dot = dot,
    .attend = attend,
};
