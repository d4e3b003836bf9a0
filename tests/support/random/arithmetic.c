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

float model_own_update(float p, const float *g)
{
    return g != NULL ? p - 0.01f * *g : p * 0.5f;
}

float model_grad_scale(const call *c)
{
    return c->salt % 2 ? 1.0f / 32 : 0;
}
