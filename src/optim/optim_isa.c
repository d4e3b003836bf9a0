/* SPDX-License-Identifier: MIT */
#include "optim/kernels.h"

#include <math.h>

/* Cache lines of each array that are asked for ahead: they are read and written once, far apart. */
enum { BLOCK = 64, AHEAD = 512 };

static inline void ask_for(const float *p, const float *g, const float *m, const float *v)
{
    for (int k = 0; k < BLOCK; k += 16) {
        __builtin_prefetch(p + AHEAD + k, 1);
        __builtin_prefetch(m + AHEAD + k, 1);
        __builtin_prefetch(v + AHEAD + k, 1);
        __builtin_prefetch(g + AHEAD + k, 0);
    }
}

static inline void adamw_block(const fsdpi_adamw_scalars *s, float *restrict p, const float *restrict g, float *restrict m, float *restrict v, size_t n)
{
    const float c1 = 1.0f - s->beta1, c2 = 1.0f - s->beta2;
    for (size_t i = 0; i < n; i++) {
        float gi = g[i] * s->scale;
        float mi = s->beta1 * m[i] + c1 * gi;
        float vi = s->beta2 * v[i] + c2 * (gi * gi);
        m[i] = mi;
        v[i] = vi;
        p[i] = p[i] * s->decay - s->step_size * (mi / (sqrtf(vi) * s->inv_sqrt_bias2 + s->eps));
    }
}

static void adamw(const fsdpi_adamw_scalars *scalars, float *restrict p, const float *restrict g, float *restrict m, float *restrict v, size_t numel)
{
    const fsdpi_adamw_scalars s = *scalars;
    size_t i = 0;
    for (; i + BLOCK <= numel; i += BLOCK) {
        ask_for(p + i, g + i, m + i, v + i);
        adamw_block(&s, p + i, g + i, m + i, v + i, BLOCK);
    }
    adamw_block(&s, p + i, g + i, m + i, v + i, numel - i);
}

static void sgd(float lr, float momentum, float weight_decay, float scale, float *restrict p, const float *restrict g,
                float *restrict m, size_t numel)
{
    if (m == NULL) {
        for (size_t i = 0; i < numel; i++) p[i] -= lr * (g[i] * scale + weight_decay * p[i]);
        return;
    }
    for (size_t i = 0; i < numel; i++) {
        float mi = momentum * m[i] + (g[i] * scale + weight_decay * p[i]);
        m[i] = mi;
        p[i] -= lr * mi;
    }
}

static void mix(float w, float decay, float *restrict a, const float *restrict p, size_t numel)
{
    if (w < 0.5f)
        for (size_t i = 0; i < numel; i++) a[i] += w * (p[i] - a[i]);
    else
        for (size_t i = 0; i < numel; i++) a[i] = p[i] - decay * (p[i] - a[i]);
}

const fsdpi_optim_kernels FSDPI_ISA_NAME(fsdpi_optim_kernels_get) = { .adamw = adamw, .sgd = sgd, .mix = mix };
