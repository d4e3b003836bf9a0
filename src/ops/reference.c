/* SPDX-License-Identifier: MIT
 *
 * Every operation as its formula says it: plain loops, sums in double, nothing clever. Read this to learn
 * what a kernel computes; the fast ones are tested against it. Letters as in kernels.h. Gradients g of
 * outputs come in as dy, dout; "out (+)= v" is put(): beta 0 overwrites, 1 adds.
 *
 * Where the formulas come from: GELU, Hendrycks and Gimpel 2016; layer normalisation, Ba, Kiros and Hinton
 * 2016; attention, Vaswani et al. 2017, section 3.2; dropout, Srivastava et al. 2014 (scaled while training,
 * "inverted"). The backwards are the chain rule; tests/ops/gradient_test.c compares each with finite
 * differences. */
#include "ops/kernel_args.h"

#include "base/alloc.h"
#include "base/philox.h"

#include <math.h>

static void put(float *out, double value, float beta)
{
    *out = (float)(beta == 0.0f ? value : (double)beta * (double)*out + value);
}

/* ---- activations ---- */

#define SQRT_2_OVER_PI  0.79788456080286535588
#define SQRT_1_OVER_2PI 0.39894228040143267794

static double act(fsdpi_activation kind, double x)
{
    switch (kind) {
    case FSDPI_ACT_GELU_TANH: return 0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)));
    case FSDPI_ACT_GELU_ERF:
        return 0.5 * x * (1.0 + erf(x * M_SQRT1_2)); /* x times the normal distribution's Phi(x) */
    case FSDPI_ACT_RELU: return x < 0.0 ? 0.0 : x;
    default: return x;
    }
}

/* The derivative of act. */
static double slope(fsdpi_activation kind, double x)
{
    switch (kind) {
    case FSDPI_ACT_GELU_TANH: {
        double t = tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x));
        double du = SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x * x);
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du;
    }
    case FSDPI_ACT_GELU_ERF:
        return 0.5 * (1.0 + erf(x * M_SQRT1_2)) + x * SQRT_1_OVER_2PI * exp(-0.5 * x * x);
    case FSDPI_ACT_RELU: return x <= 0.0 ? 0.0 : 1.0;
    default: return 1.0;
    }
}

static fsdp_status activation(const fsdp_kernel *k, const void *args)
{
    fsdpi_activation_args a = *(const fsdpi_activation_args *)args;
    HOST(k, a.x), HOST(k, a.out);
    for (int64_t i = 0; i < a.numel; i++) a.out[i] = (float)act(a.act, a.x[i]);
    return FSDP_OK;
}

static fsdp_status activation_backward(const fsdp_kernel *k, const void *args)
{
    fsdpi_activation_args a = *(const fsdpi_activation_args *)args;
    HOST(k, a.x), HOST(k, a.dy), HOST(k, a.out);
    for (int64_t i = 0; i < a.numel; i++) put(&a.out[i], a.dy[i] * slope(a.act, a.x[i]), a.beta);
    return FSDP_OK;
}

/* ---- linear: y [M,N] = act(x [M,K] W' + bias [N]) ---- */

/* W[n,k], however it is stored. */
static double weight_at(const float *weight, bool in_out, int64_t N, int64_t K, int64_t n, int64_t k)
{
    return in_out ? weight[k * N + n] : weight[n * K + k];
}

static fsdp_status linear(const fsdp_kernel *k, const void *args)
{
    fsdpi_linear_args a = *(const fsdpi_linear_args *)args;
    HOST(k, a.x), HOST(k, a.weight), HOST(k, a.bias), HOST(k, a.y), HOST(k, a.pre);
    for (int64_t m = 0; m < a.M; m++)
        for (int64_t n = 0; n < a.N; n++) {
            double pre = a.bias != NULL ? a.bias[n] : 0.0;
            for (int64_t i = 0; i < a.K; i++)
                pre += a.x[m * a.K + i] * weight_at(a.weight, a.in_out, a.N, a.K, n, i);
            if (a.pre != NULL && a.act != FSDPI_ACT_NONE) a.pre[m * a.N + n] = (float)pre;
            a.y[m * a.N + n] = (float)act(a.act, pre);
        }
    return FSDP_OK;
}

/* d pre = dy act'(pre);  dx = d pre W;  dW = d pre' x;  dbias = sum over rows of d pre */
static fsdp_status linear_backward(const fsdp_kernel *k, const void *args)
{
    fsdpi_linear_backward_args a = *(const fsdpi_linear_backward_args *)args;
    HOST(k, a.dy), HOST(k, a.x), HOST(k, a.weight), HOST(k, a.pre), HOST(k, a.dx), HOST(k, a.dweight),
        HOST(k, a.dbias);
    const int64_t M = a.M, N = a.N, K = a.K;
    double *dpre;
    FSDPI_NEW(dpre, M * N + 1);
    for (int64_t i = 0; i < M * N; i++)
        dpre[i] = a.dy[i] * (a.act != FSDPI_ACT_NONE ? slope(a.act, a.pre[i]) : 1.0);
    for (int64_t m = 0; a.dx != NULL && m < M; m++)
        for (int64_t i = 0; i < K; i++) {
            double sum = 0.0;
            for (int64_t n = 0; n < N; n++)
                sum += dpre[m * N + n] * weight_at(a.weight, a.in_out, N, K, n, i);
            put(&a.dx[m * K + i], sum, a.dx_beta);
        }
    for (int64_t n = 0; n < N; n++) {
        double bias = 0.0;
        for (int64_t m = 0; m < M; m++) bias += dpre[m * N + n];
        if (a.dbias != NULL) put(&a.dbias[n], bias, a.dbias_beta);
        for (int64_t i = 0; a.dweight != NULL && i < K; i++) {
            double sum = 0.0;
            for (int64_t m = 0; m < M; m++) sum += dpre[m * N + n] * a.x[m * K + i];
            put(&a.dweight[a.in_out ? i * N + n : n * K + i], sum, a.dweight_beta);
        }
    }
    fsdpi_free(dpre);
    return FSDP_OK;
}

/* ---- layer normalisation of rows: y = (x - mean) rstd w + b, rstd = 1 / sqrt(variance + eps) ---- */

static fsdp_status layer_norm(const fsdp_kernel *k, const void *args)
{
    fsdpi_layer_norm_args a = *(const fsdpi_layer_norm_args *)args;
    HOST(k, a.x), HOST(k, a.residual), HOST(k, a.weight), HOST(k, a.bias);
    HOST(k, a.sum), HOST(k, a.y), HOST(k, a.mean), HOST(k, a.rstd);
    for (int64_t m = 0; m < a.M; m++) {
        const float *x = a.x + m * a.C;
        if (a.residual != NULL) {
            for (int64_t c = 0; c < a.C; c++) a.sum[m * a.C + c] = x[c] + a.residual[m * a.C + c];
            x = a.sum + m * a.C;
        }
        double mean = 0.0, var = 0.0;
        for (int64_t c = 0; c < a.C; c++) mean += x[c] / (double)a.C;
        for (int64_t c = 0; c < a.C; c++) var += (x[c] - mean) * (x[c] - mean) / (double)a.C;
        double rstd = 1.0 / sqrt(var + (double)a.eps);
        for (int64_t c = 0; c < a.C; c++)
            a.y[m * a.C + c] =
                (float)((x[c] - mean) * rstd * a.weight[c] + (a.bias != NULL ? a.bias[c] : 0.0f));
        a.mean[m] = (float)mean;
        a.rstd[m] = (float)rstd;
    }
    return FSDP_OK;
}

/* h = (x - mean) rstd, g = dy w: dx = rstd (g - mean(g) - h mean(g h)) + dsum; dw = sum dy h; db = sum dy */
static fsdp_status layer_norm_backward(const fsdp_kernel *k, const void *args)
{
    fsdpi_layer_norm_backward_args a = *(const fsdpi_layer_norm_backward_args *)args;
    HOST(k, a.dy), HOST(k, a.x), HOST(k, a.weight), HOST(k, a.mean), HOST(k, a.rstd);
    HOST(k, a.dsum), HOST(k, a.dx), HOST(k, a.dweight), HOST(k, a.dbias);
    const int64_t C = a.C;
    for (int64_t c = 0; c < C; c++) {
        double dw = 0.0, db = 0.0;
        for (int64_t m = 0; m < a.M; m++) {
            double h = ((double)a.x[m * C + c] - (double)a.mean[m]) * (double)a.rstd[m];
            dw += a.dy[m * C + c] * h;
            db += a.dy[m * C + c];
        }
        if (a.dweight != NULL) put(&a.dweight[c], dw, a.dweight_beta);
        if (a.dbias != NULL) put(&a.dbias[c], db, a.dbias_beta);
    }
    for (int64_t m = 0; m < a.M; m++) {
        const float *dy = a.dy + m * C, *x = a.x + m * C;
        double mean = a.mean[m], rstd = a.rstd[m], mean_g = 0.0, mean_gh = 0.0;
        for (int64_t c = 0; c < C; c++) {
            double g = (double)dy[c] * (double)a.weight[c];
            mean_g += g / (double)C;
            mean_gh += g * (x[c] - mean) * rstd / (double)C;
        }
        for (int64_t c = 0; c < C; c++) {
            double g = (double)dy[c] * (double)a.weight[c], h = (x[c] - mean) * rstd;
            double dsum = a.dsum != NULL ? a.dsum[m * C + c] : 0.0;
            put(&a.dx[m * C + c], dsum + rstd * (g - mean_g - h * mean_gh), a.dx_beta);
        }
    }
    return FSDP_OK;
}

/* ---- dropout ---- */

/* What an element is multiplied by: 0, or 1 / (1 - p). */
static double drop(const fsdpi_dropout *d, int64_t b, int64_t element)
{
    if (d->p == 0.0f) return 1.0;
    uint32_t r[4];
    uint64_t ctr_lo = (uint64_t)element / 4 | (uint64_t)d->step << 32;
    uint64_t ctr_hi = (uint32_t)(d->first_sample + (uint64_t)b) | (uint64_t)d->layer << 32;
    fsdpi_philox(d->seed ^ FSDPI_PHILOX_DROPOUT, ctr_lo, ctr_hi, r);
    return r[element % 4] >= (double)d->p * 0x1p32 ? 1.0 / (1.0 - (double)d->p) : 0.0;
}

static fsdp_status dropout(const fsdp_kernel *k, const void *args)
{
    fsdpi_dropout_args a = *(const fsdpi_dropout_args *)args;
    HOST(k, a.x), HOST(k, a.out);
    for (int64_t b = 0; b < a.B; b++)
        for (int64_t e = 0; e < a.per_sample; e++) {
            int64_t i = b * a.per_sample + e;
            put(&a.out[i], a.x[i] * drop(&a.dropout, b, e), a.beta);
        }
    return FSDP_OK;
}

/* ---- attention: out = dropout(softmax(scale q k')) v, for each sample b and head h ---- */

/* Element (t, d) of q (part 0), k (1) or v (2) of head h in qkv [B,T,3C]. */
static int64_t qkv_at(const fsdpi_attention_args *a, int part, int64_t b, int64_t h, int64_t t, int64_t d)
{
    int64_t C = a->H * a->D;
    return (b * a->T + t) * 3 * C + part * C + h * a->D + d;
}

/* p[j], j < the number of columns that row t sees, which is returned; *lse = ln sum e^score. */
static int64_t probabilities(const fsdpi_attention_args *a, int64_t b, int64_t h, int64_t t, double *p,
                             double *lse)
{
    int64_t seen = a->causal ? t + 1 : a->T;
    double max = -INFINITY, sum = 0.0;
    for (int64_t j = 0; j < seen; j++) {
        p[j] = 0.0;
        for (int64_t d = 0; d < a->D; d++)
            p[j] += (double)a->scale * a->qkv[qkv_at(a, 0, b, h, t, d)] * a->qkv[qkv_at(a, 1, b, h, j, d)];
        max = fmax(max, p[j]);
    }
    for (int64_t j = 0; j < seen; j++) sum += p[j] = exp(p[j] - max);
    for (int64_t j = 0; j < seen; j++) p[j] /= sum;
    *lse = max + log(sum);
    return seen;
}

static fsdp_status attention(const fsdp_kernel *k, const void *args)
{
    fsdpi_attention_args a = *(const fsdpi_attention_args *)args;
    HOST(k, a.qkv), HOST(k, a.out), HOST(k, a.lse);
    double *p, lse;
    FSDPI_NEW(p, a.T + 1);
    for (int64_t i = 0; i < a.B * a.H * a.T; i++) {
        int64_t t = i % a.T, h = i / a.T % a.H, b = i / a.T / a.H, seen = probabilities(&a, b, h, t, p, &lse);
        for (int64_t d = 0; d < a.D; d++) {
            double sum = 0.0;
            for (int64_t j = 0; j < seen; j++)
                sum += p[j] * drop(&a.dropout, b, (h * a.T + t) * a.T + j) * a.qkv[qkv_at(&a, 2, b, h, j, d)];
            a.out[(b * a.T + t) * a.H * a.D + h * a.D + d] = (float)sum;
        }
        a.lse[i] = (float)lse;
    }
    fsdpi_free(p);
    return FSDP_OK;
}

/* Row t: dp = z dout v', dscore = p (dp - sum p dp); adds to the sums [T,3D] of dq, dk, dv of a head (z: the
 * dropout). */
static void attention_row(const fsdpi_attention_args *a, const float *dout, int64_t b, int64_t h, int64_t t,
                          double *p, double *dp, double *sums)
{
    const int64_t D = a->D;
    double lse, mean = 0.0;
    int64_t seen = probabilities(a, b, h, t, p, &lse);
    for (int64_t j = 0; j < seen; j++) {
        double z = drop(&a->dropout, b, (h * a->T + t) * a->T + j);
        dp[j] = 0.0;
        for (int64_t d = 0; d < D; d++) {
            dp[j] += z * dout[d] * a->qkv[qkv_at(a, 2, b, h, j, d)];
            sums[(j * 3 + 2) * D + d] += z * p[j] * dout[d];
        }
        mean += p[j] * dp[j];
    }
    for (int64_t j = 0; j < seen; j++) {
        double dscore = (double)a->scale * p[j] * (dp[j] - mean);
        for (int64_t d = 0; d < D; d++) {
            sums[t * 3 * D + d] += dscore * a->qkv[qkv_at(a, 1, b, h, j, d)];
            sums[(j * 3 + 1) * D + d] += dscore * a->qkv[qkv_at(a, 0, b, h, t, d)];
        }
    }
}

static fsdp_status attention_backward(const fsdp_kernel *k, const void *args)
{
    fsdpi_attention_backward_args a = *(const fsdpi_attention_backward_args *)args;
    HOST(k, a.f.qkv), HOST(k, a.dout), HOST(k, a.dqkv);
    const int64_t T = a.f.T, D = a.f.D, H = a.f.H;
    double *p; /* [T] p, [T] dp, [T,3D] sums of dq, dk, dv */
    FSDPI_NEW(p, T * (2 + 3 * D) + 1);
    double *dp = p + T, *sums = dp + T;
    for (int64_t i = 0; i < a.f.B * H; i++) {
        int64_t b = i / H, h = i % H;
        for (int64_t j = 0; j < T * 3 * D; j++) sums[j] = 0.0;
        for (int64_t t = 0; t < T; t++)
            attention_row(&a.f, a.dout + (b * T + t) * H * D + h * D, b, h, t, p, dp, sums);
        for (int64_t j = 0; j < T * 3 * D; j++)
            put(&a.dqkv[qkv_at(&a.f, (int)(j / D % 3), b, h, j / D / 3, j % D)], sums[j], a.beta);
    }
    fsdpi_free(p);
    return FSDP_OK;
}

static fsdp_status attention_step(const fsdp_kernel *k, const void *args)
{
    fsdpi_attention_step_args a = *(const fsdpi_attention_step_args *)args;
    HOST(k, a.qkv), HOST(k, a.cache_k), HOST(k, a.cache_v), HOST(k, a.out);
    FSDP_FAIL_IF(a.pos < 0 || a.pos >= a.T, FSDP_ERR_INVALID, "position %lld is not in the cache of %lld",
                 (long long)a.pos, (long long)a.T);
    const int64_t C = a.H * a.D;
    double *p;
    FSDPI_NEW(p, a.pos + 1);
    for (int64_t i = 0; i < a.B * a.H; i++) {
        int64_t b = i / a.H, h = i % a.H;
        const float *qkv = a.qkv + b * 3 * C + h * a.D;
        float *keys = a.cache_k + b * a.T * C + h * a.D, *values = a.cache_v + b * a.T * C + h * a.D;
        for (int64_t d = 0; d < a.D; d++) {
            keys[a.pos * C + d] = qkv[C + d];
            values[a.pos * C + d] = qkv[2 * C + d];
        }
        double max = -INFINITY, sum = 0.0;
        for (int64_t j = 0; j <= a.pos; j++) {
            p[j] = 0.0;
            for (int64_t d = 0; d < a.D; d++) p[j] += (double)a.scale * qkv[d] * keys[j * C + d];
            max = fmax(max, p[j]);
        }
        for (int64_t j = 0; j <= a.pos; j++) sum += p[j] = exp(p[j] - max);
        for (int64_t d = 0; d < a.D; d++) {
            double out = 0.0;
            for (int64_t j = 0; j <= a.pos; j++) out += p[j] / sum * values[j * C + d];
            a.out[b * C + h * a.D + d] = (float)out;
        }
    }
    fsdpi_free(p);
    return FSDP_OK;
}

/* ---- embedding: row m is token[ids[m]] + position[first_position + m mod T] ---- */

static fsdp_status embedding(const fsdp_kernel *k, const void *args)
{
    fsdpi_embedding_args a = *(const fsdpi_embedding_args *)args;
    HOST(k, a.ids), HOST(k, a.token), HOST(k, a.position), HOST(k, a.out);
    FSDP_TRY(fsdpi_check_ids("token", a.ids, a.M, a.V, false));
    for (int64_t m = 0; m < a.M; m++)
        for (int64_t c = 0; c < a.C; c++) {
            float position = a.position != NULL ? a.position[(a.first_position + m % a.T) * a.C + c] : 0.0f;
            a.out[m * a.C + c] = a.token[a.ids[m] * a.C + c] + position;
        }
    return FSDP_OK;
}

/* Sums in float here: one row after another is what the fast kernel promises too. */
static fsdp_status embedding_backward(const fsdp_kernel *k, const void *args)
{
    fsdpi_embedding_backward_args a = *(const fsdpi_embedding_backward_args *)args;
    HOST(k, a.ids), HOST(k, a.dout), HOST(k, a.dtoken), HOST(k, a.dposition);
    if (a.dtoken != NULL) FSDP_TRY(fsdpi_check_ids("token", a.ids, a.M, a.V, false));
    for (int64_t i = 0; a.dtoken != NULL && i < a.V * a.C; i++) put(&a.dtoken[i], 0.0, a.dtoken_beta);
    for (int64_t i = 0; a.dposition != NULL && i < a.positions * a.C; i++)
        put(&a.dposition[i], 0.0, a.dposition_beta);
    for (int64_t m = 0; m < a.M; m++)
        for (int64_t c = 0; c < a.C; c++) {
            float g = a.dout[m * a.C + c];
            if (a.dtoken != NULL) a.dtoken[a.ids[m] * a.C + c] += g;
            if (a.dposition != NULL) a.dposition[(a.first_position + m % a.T) * a.C + c] += g;
        }
    return FSDP_OK;
}

/* ---- sums ---- */

static fsdp_status add(const fsdp_kernel *k, const void *args)
{
    fsdpi_add_args a = *(const fsdpi_add_args *)args;
    HOST(k, a.x), HOST(k, a.y), HOST(k, a.out);
    for (int64_t i = 0; i < a.numel; i++) a.out[i] = a.x[i] + a.y[i];
    return FSDP_OK;
}

static fsdp_status axpby(const fsdp_kernel *k, const void *args)
{
    fsdpi_axpby_args a = *(const fsdpi_axpby_args *)args;
    HOST(k, a.x), HOST(k, a.out);
    for (int64_t i = 0; i < a.numel; i++) put(&a.out[i], (double)a.alpha * a.x[i], a.beta);
    return FSDP_OK;
}

/* ---- losses: of a row, ln sum e^x - x[label]; its gradient is softmax(x) - onehot(label) ---- */

/* p = softmax(x), or all 0 for a row that does not count; adds to the loss. */
static void loss_of_row(const double *x, int64_t V, int32_t label, fsdpi_loss *loss, double *p)
{
    double max = -INFINITY, sum = 0.0;
    for (int64_t v = 0; v < V; v++) p[v] = 0.0;
    if (label == FSDPI_IGNORED_LABEL) return;
    for (int64_t v = 0; v < V; v++) max = fmax(max, x[v]);
    for (int64_t v = 0; v < V; v++) sum += p[v] = exp(x[v] - max);
    for (int64_t v = 0; v < V; v++) p[v] /= sum;
    loss->sum += max + log(sum) - x[label];
    loss->count += 1.0;
}

static fsdp_status cross_entropy(const fsdp_kernel *k, const void *args)
{
    fsdpi_cross_entropy_args a = *(const fsdpi_cross_entropy_args *)args;
    HOST(k, a.logits), HOST(k, a.labels), HOST(k, a.loss), HOST(k, a.seed), HOST(k, a.dlogits);
    FSDP_TRY(fsdpi_check_ids("label", a.labels, a.M, a.V, true));
    fsdpi_loss loss = { 0 };
    double *x;
    FSDPI_NEW(x, 2 * a.V + 1);
    double *p = x + a.V;
    for (int64_t m = 0; m < a.M; m++) {
        int32_t label = a.labels[m];
        for (int64_t v = 0; v < a.V; v++) x[v] = a.logits[m * a.V + v];
        loss_of_row(x, a.V, label, &loss, p);
        for (int64_t v = 0; a.dlogits != NULL && v < a.V; v++)
            put(&a.dlogits[m * a.V + v], (p[v] - (v == label ? 1.0 : 0.0)) * (double)*a.seed, a.beta);
    }
    if (a.loss != NULL) *a.loss = loss;
    fsdpi_free(x);
    return FSDP_OK;
}

/* logits = x W', so dx = dlogits W and dW = dlogits' x. */
static fsdp_status linear_cross_entropy(const fsdp_kernel *k, const void *args)
{
    fsdpi_linear_cross_entropy_args a = *(const fsdpi_linear_cross_entropy_args *)args;
    HOST(k, a.x), HOST(k, a.weight), HOST(k, a.labels), HOST(k, a.loss), HOST(k, a.seed), HOST(k, a.dx),
        HOST(k, a.dweight);
    FSDP_TRY(fsdpi_check_ids("label", a.labels, a.M, a.V, true));
    const int64_t V = a.V, K = a.K;
    fsdpi_loss loss = { 0 };
    double *logits; /* [V] logits, [V] dlogits, [V,K] the sum of dW */
    FSDPI_NEW(logits, V * (2 + K) + 1);
    double *g = logits + V, *dw = g + V;
    for (int64_t m = 0; m < a.M; m++) {
        const float *x = a.x + m * K;
        for (int64_t v = 0; v < V; v++) {
            logits[v] = 0.0;
            for (int64_t i = 0; i < K; i++) logits[v] += (double)x[i] * (double)a.weight[v * K + i];
        }
        loss_of_row(logits, V, a.labels[m], &loss, g);
        if (a.dx == NULL && a.dweight == NULL) continue;
        if (a.labels[m] >= 0) g[a.labels[m]] -= 1.0;
        for (int64_t v = 0; v < V; v++)
            for (int64_t i = 0; i < K; i++) dw[v * K + i] += g[v] * (double)*a.seed * x[i];
        for (int64_t i = 0; a.dx != NULL && i < K; i++) {
            double sum = 0.0;
            for (int64_t v = 0; v < V; v++) sum += g[v] * (double)*a.seed * a.weight[v * K + i];
            put(&a.dx[m * K + i], sum, a.dx_beta);
        }
    }
    for (int64_t i = 0; a.dweight != NULL && i < V * K; i++) put(&a.dweight[i], dw[i], a.dweight_beta);
    if (a.loss != NULL) *a.loss = loss;
    fsdpi_free(logits);
    return FSDP_OK;
}

const fsdpi_op_kernels fsdpi_op_kernels_reference = {
    .linear = linear,
    .linear_backward = linear_backward,
    .activation = activation,
    .activation_backward = activation_backward,
    .layer_norm = layer_norm,
    .layer_norm_backward = layer_norm_backward,
    .attention = attention,
    .attention_backward = attention_backward,
    .attention_step = attention_step,
    .embedding = embedding,
    .embedding_backward = embedding_backward,
    .add = add,
    .axpby = axpby,
    .dropout = dropout,
    .cross_entropy = cross_entropy,
    .linear_cross_entropy = linear_cross_entropy,
};
