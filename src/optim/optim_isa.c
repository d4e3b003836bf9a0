/* SPDX-License-Identifier: MIT */
#include "optim/kernels.h"

#include <math.h>

static void adamw(const fsdpi_adamw_scalars *s, float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                  size_t numel)
{
    const float scale = s->scale, decay = s->decay, b1 = s->beta1, b2 = s->beta2, c1 = 1.0f - b1, c2 = 1.0f - b2;
    const float step_size = s->step_size, inv = s->inv_sqrt_bias2, eps = s->eps;
    for (size_t i = 0; i < numel; i++) {
        /* p, m and v are read and written once, far apart: ask for them early */
        if (i % 16 == 0) {
            __builtin_prefetch(p + i + 256, 1);
            __builtin_prefetch(m + i + 256, 1);
            __builtin_prefetch(v + i + 256, 1);
            __builtin_prefetch(g + i + 256, 0);
        }
        float gi = g[i] * scale;
        float mi = b1 * m[i] + c1 * gi;
        float vi = b2 * v[i] + c2 * (gi * gi);
        m[i] = mi;
        v[i] = vi;
        p[i] = p[i] * decay - step_size * (mi / (sqrtf(vi) * inv + eps));
    }
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

const fsdpi_optim_kernels FSDPI_ISA_NAME(fsdpi_optim_kernels_get) = { .adamw = adamw, .sgd = sgd };
