/* SPDX-License-Identifier: MIT
 *
 * Without branches, so that the loops become vectors; dtype.c has the same with words. */
#include "base/convert.h"

#include <string.h>

static inline uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

static inline float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

static void bf16_from_f32(uint16_t *out, const float *x, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        uint32_t u = bits_of(x[i]), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40;
        out[i] = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
    }
}

static void bf16_to_f32(float *out, const uint16_t *x, size_t numel)
{
    for (size_t i = 0; i < numel; i++) out[i] = float_of((uint32_t)x[i] << 16);
}

static void f16_from_f32(uint16_t *out, const float *x, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        uint32_t u = bits_of(x[i]), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;
        uint32_t small = bits_of(float_of(mag < 0x38800000 ? mag : 0) + 0.5f) - 0x3f000000; /* below 2^-14 */
        uint32_t normal = (mag + 0xfff + (mag >> 13 & 1) - 0x38000000) >> 13;
        uint32_t r = mag < 0x38800000 ? small : normal;
        r = mag >= 0x47800000 ? 0x7c00 : r;
        r = mag > 0x7f800000 ? 0x7e00 : r;
        out[i] = (uint16_t)(sign | r);
    }
}

static void f16_to_f32(float *out, const uint16_t *x, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        uint32_t h = x[i], sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
        uint32_t normal = (e + 112) << 23 | m << 13, special = 0x7f800000 | m << 13;
        uint32_t small = bits_of((float)(int32_t)m * 0x1p-24f);
        uint32_t r = e == 0 ? small : e == 31 ? special : normal;
        out[i] = float_of(sign | r);
    }
}

const fsdpi_convert_kernels FSDPI_ISA_NAME(fsdpi_convert_kernels_get) = {
    .bf16_from_f32 = bf16_from_f32,
    .bf16_to_f32 = bf16_to_f32,
    .f16_from_f32 = f16_from_f32,
    .f16_to_f32 = f16_to_f32,
};
