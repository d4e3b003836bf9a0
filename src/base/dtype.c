/* SPDX-License-Identifier: MIT */
#include <fsdp/dtype.h>
#include <fsdp/version.h>

#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} table[FSDP_DTYPE_COUNT] = {
#define ROW(e, name, bytes) [e] = { name, bytes },
    FSDP_DTYPE_MAP(ROW)
#undef ROW
};

const char *fsdp_version(void)
{
    return FSDP_VERSION;
}

size_t fsdp_dtype_bytes(fsdp_dtype t)
{
    return (unsigned)t < FSDP_DTYPE_COUNT ? table[t].bytes : 0;
}

const char *fsdp_dtype_name(fsdp_dtype t)
{
    return (unsigned)t < FSDP_DTYPE_COUNT ? table[t].name : "?";
}

fsdp_status fsdp_dtype_parse(fsdp_dtype *out, const char *name)
{
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++) {
        if (strcmp(table[i].name, name) == 0) {
            *out = (fsdp_dtype)i;
            return FSDP_OK;
        }
    }
    FSDP_FAIL(FSDP_ERR_FORMAT, "\"%.40s\" is not an element type that fsdp reads", name);
}

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

uint16_t fsdp_bf16_from_f32(float x)
{
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40); /* NaN: quiet, payload's top kept */
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float fsdp_bf16_to_f32(uint16_t x)
{
    return float_of((uint32_t)x << 16);
}

uint16_t fsdp_f16_from_f32(float x)
{
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;
    if (mag > 0x7f800000) return (uint16_t)(sign | 0x7e00);  /* NaN */
    if (mag >= 0x47800000) return (uint16_t)(sign | 0x7c00); /* 65536 and more: infinity */
    if (mag < 0x38800000) {
        /* Below 2^-14 a half is a multiple of 2^-24: adding 0.5 leaves that multiple, rounded, in the low bits. */
        float r = float_of(mag) + 0.5f;
        return (uint16_t)(sign | (bits_of(r) - 0x3f000000));
    }
    mag += 0xfff + (mag >> 13 & 1); /* round to even; a carry into the exponent is right, also into infinity */
    return (uint16_t)(sign | (mag - 0x38000000) >> 13);
}

float fsdp_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, e = x >> 10 & 31, m = x & 0x3ff;
    if (e == 31) return float_of(sign | 0x7f800000 | m << 13);
    if (e == 0) return copysignf((float)m * 0x1p-24f, float_of(sign));
    return float_of(sign | (e + 112) << 23 | m << 13);
}
