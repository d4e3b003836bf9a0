/* SPDX-License-Identifier: MIT */
#include "support/random/arithmetic.h"

#include <math.h>
#include <stddef.h>

float model_rounded(fsdp_dtype t, float x)
{
    return t == FSDP_BF16 ? fsdp_bf16_to_f32(fsdp_bf16_from_f32(x)) : t == FSDP_F16 ? fsdp_f16_to_f32(fsdp_f16_from_f32(x)) : x;
}

float model_noise(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t h = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h = (h ^ h >> 12) * 0x297a2d39u;
    return (float)(int32_t)(h ^ h >> 15) * 0x1p-31f;
}

float model_value(uint32_t salt, int unit, int param, int64_t i)
{
    return 0.5f * model_noise(salt, (uint32_t)(unit * MODEL_PARAMS + param), (uint32_t)i);
}

float model_mix(float number, const float *p, int64_t numel, uint64_t leaf, int param)
{
    for (int64_t j = 0; j < numel; j++) number = 0.9f * number + p[j] * model_noise((uint32_t)leaf, (uint32_t)param, (uint32_t)j);
    return number;
}

void model_gradient(float *g, bool add, float number, const float *p, int64_t numel, uint64_t leaf, int param, bool poison)
{
    for (int64_t j = 0; j < numel; j++) g[j] = (add ? g[j] : 0) + number * model_noise((uint32_t)leaf, (uint32_t)(16 + param), (uint32_t)j) + 0.125f * p[j];
    if (poison && numel > 0) g[0] = INFINITY;
}

void model_sgd(float *p, float *v, float g)
{
    *v = MODEL_MOMENTUM * *v + (g + MODEL_DECAY * *p);
    *p -= MODEL_LR * *v;
}

void model_adamw(float *p, float *m, float *v, float g, int t)
{
    const float beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f;
    float step = (float)((double)MODEL_LR / (1.0 - pow((double)beta1, t))), scale = (float)(1.0 / sqrt(1.0 - pow((double)beta2, t)));
    *m = beta1 * *m + (1.0f - beta1) * g;
    *v = beta2 * *v + (1.0f - beta2) * (g * g);
    *p = *p * (float)(1.0 - (double)MODEL_LR * (double)MODEL_DECAY) - step * (*m / (sqrtf(*v) * scale + eps));
}

float model_mixed(float a, float p, float decay)
{
    float w = (float)(1.0 - (double)decay);
    return w < 0.5f ? a + w * (p - a) : p - decay * (p - a);
}

float model_decay(const call *c)
{
    static const float decays[] = { 0.0f, 0.25f, 0.9f, 0.996f };
    return decays[c->salt % 4];
}

float model_own_update(float p, const float *g)
{
    return g != NULL ? p - 0.01f * *g : p * 0.5f;
}

float model_grad_scale(const call *c)
{
    return c->salt % 2 ? 1.0f / 32 : 0;
}
