/* SPDX-License-Identifier: MIT
 *
 * Philox in blocks of 16 counters, and Box-Muller on them. Everything is straight-line arithmetic in loops of a
 * fixed length that the compiler turns into vectors; there are no library calls, whose bits depend on the machine.
 *
 * Normal deviates: of a block's numbers (a, b, c, d), with u = (x + 1) / 2^32 in (0, 1] and v = x / 2^32,
 *   z0 = r(a) cos 2 pi b,  z1 = r(a) sin 2 pi b,  z2 = r(c) cos 2 pi d,  z3 = r(c) sin 2 pi d,  r(x) = sqrt(-2 ln u(x)). */
#include "base/philox.h"

#include <math.h>
#include <string.h>

enum { LANES = 16 }; /* blocks at a time: 64 numbers */

static void blocks(uint64_t key, uint64_t ctr_hi, uint64_t first, uint32_t out[4][LANES])
{
    uint64_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    for (int l = 0; l < LANES; l++) {
        uint64_t lo = first + (uint64_t)l;
        c0[l] = lo & 0xffffffffu;
        c1[l] = lo >> 32;
        c2[l] = ctr_hi & 0xffffffffu;
        c3[l] = ctr_hi >> 32;
    }
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        for (int l = 0; l < LANES; l++) {
            uint64_t p0 = 0xD2511F53u * c0[l], p1 = 0xCD9E8D57u * c2[l];
            c0[l] = (p1 >> 32) ^ c1[l] ^ k0;
            c2[l] = (p0 >> 32) ^ c3[l] ^ k1;
            c1[l] = p1 & 0xffffffffu;
            c3[l] = p0 & 0xffffffffu;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int l = 0; l < LANES; l++) {
        out[0][l] = (uint32_t)c0[l];
        out[1][l] = (uint32_t)c1[l];
        out[2][l] = (uint32_t)c2[l];
        out[3][l] = (uint32_t)c3[l];
    }
}

/* ln x for x in (0, 1], within 1e-15: x = 2^e m with m in [sqrt 1/2, sqrt 2), ln m = 2 artanh((m - 1) / (m + 1)). */
static inline double ln_unit(double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof(u));
    uint64_t shifted = u + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu); /* exponent of x / sqrt(1/2), carried */
    int64_t e = (int64_t)(shifted >> 52) - 1023;
    uint64_t mu = u - ((uint64_t)e << 52);
    double m;
    memcpy(&m, &mu, sizeof(m));
    double s = (m - 1.0) / (m + 1.0), q = s * s;
    double p = 1.0 / 19;
    p = p * q + 1.0 / 17;
    p = p * q + 1.0 / 15;
    p = p * q + 1.0 / 13;
    p = p * q + 1.0 / 11;
    p = p * q + 1.0 / 9;
    p = p * q + 1.0 / 7;
    p = p * q + 1.0 / 5;
    p = p * q + 1.0 / 3;
    /* e as a double without an int64 conversion, which only the newest sets have as a vector */
    uint64_t eu = (uint64_t)(e + 2048) | 0x4330000000000000u; /* 2^52 + (e + 2048) */
    double ed;
    memcpy(&ed, &eu, sizeof(ed));
    ed -= 0x1p52 + 2048.0;
    return ed * 0.69314718055994530942 + (2.0 * s + 2.0 * s * q * p);
}

/* cos and sin of 2 pi v, v in [0, 1): reduced to an eighth of a turn, then Taylor series (error below 1e-15). */
static inline void cos_sin_turn(double v, double *c, double *s)
{
    double t = v * 4.0 + 0.5;                 /* quarter turns, the nearest one is floor(t) */
    double fl = (t + 0x1p52) - 0x1p52;        /* nearest integer; made a floor below */
    fl = fl > t ? fl - 1.0 : fl;
    double x = (t - 0.5 - fl) * 1.57079632679489661923, q = x * x; /* |x| <= pi / 4 */
    double cp = -1.0 / 87178291200.0;
    cp = cp * q + 1.0 / 479001600.0;
    cp = cp * q - 1.0 / 3628800.0;
    cp = cp * q + 1.0 / 40320.0;
    cp = cp * q - 1.0 / 720.0;
    cp = cp * q + 1.0 / 24.0;
    cp = cp * q - 0.5;
    cp = cp * q + 1.0;
    double sp = -1.0 / 1307674368000.0;
    sp = sp * q + 1.0 / 6227020800.0;
    sp = sp * q - 1.0 / 39916800.0;
    sp = sp * q + 1.0 / 362880.0;
    sp = sp * q - 1.0 / 5040.0;
    sp = sp * q + 1.0 / 120.0;
    sp = sp * q - 1.0 / 6.0;
    sp = sp * q + 1.0;
    sp = sp * x;
    bool odd = fl == 1.0 || fl == 3.0;
    double a = odd ? sp : cp, b = odd ? cp : sp;
    *c = fl == 1.0 || fl == 2.0 ? -a : a; /* quarter 1: cos = -sin x; 2: -cos x; 3: sin x */
    *s = fl == 2.0 || fl == 3.0 ? -b : b; /* quarter 1: sin = cos x; 2: -sin x; 3: -cos x */
}

static void box_muller(const uint32_t *a, const uint32_t *b, float *z0, float *z1)
{
    for (int l = 0; l < LANES; l++) {
        double u = ((double)a[l] + 1.0) * 0x1p-32, v = (double)b[l] * 0x1p-32, c, s;
        double r = sqrt(-2.0 * ln_unit(u));
        cos_sin_turn(v, &c, &s);
        z0[l] = (float)(r * c);
        z1[l] = (float)(r * s);
    }
}

static void to_normal(uint32_t raw[4][LANES], float out[4 * LANES])
{
    float z[4][LANES];
    box_muller(raw[0], raw[1], z[0], z[1]);
    box_muller(raw[2], raw[3], z[2], z[3]);
    for (int l = 0; l < LANES; l++)
        for (int k = 0; k < 4; k++) out[4 * l + k] = z[k][l];
}

static void to_uniform(uint32_t raw[4][LANES], float out[4 * LANES])
{
    for (int l = 0; l < LANES; l++)
        for (int k = 0; k < 4; k++) out[4 * l + k] = (float)(raw[k][l] >> 8) * 0x1p-24f;
}

static void to_bits(uint32_t raw[4][LANES], float out[4 * LANES])
{
    uint32_t t[4 * LANES];
    for (int l = 0; l < LANES; l++)
        for (int k = 0; k < 4; k++) t[4 * l + k] = raw[k][l];
    memcpy(out, t, sizeof(t));
}

/* Cuts [start, start + numel) into groups of 64 at multiples of 64 and hands each, or the part of it that is
 * wanted, on: an element's value never depends on where the caller's range begins. */
static inline void fill(uint64_t key, uint64_t ctr_hi, uint64_t start, size_t numel, float *out,
                        void (*convert)(uint32_t raw[4][LANES], float out[4 * LANES]))
{
    const uint64_t group = 4 * LANES, end = start + numel;
    for (uint64_t g = start / group * group; g < end; g += group) {
        uint32_t raw[4][LANES];
        float value[4 * LANES];
        blocks(key, ctr_hi, g / 4, raw);
        convert(raw, value);
        uint64_t lo = g < start ? start : g, hi = g + group < end ? g + group : end;
        memcpy(out + (lo - start), value + (lo - g), (hi - lo) * sizeof(float));
    }
}

static void normal(uint64_t key, uint64_t ctr_hi, uint64_t start, size_t numel, float *out)
{
    fill(key, ctr_hi, start, numel, out, to_normal);
}

static void uniform(uint64_t key, uint64_t ctr_hi, uint64_t start, size_t numel, float *out)
{
    fill(key, ctr_hi, start, numel, out, to_uniform);
}

static void bits(uint64_t key, uint64_t ctr_hi, uint64_t start, size_t numel, uint32_t *out)
{
    fill(key, ctr_hi, start, numel, (float *)(void *)out, to_bits);
}

const fsdpi_philox_kernels FSDPI_ISA_NAME(fsdpi_philox_kernels_get) = { .normal = normal, .uniform = uniform, .bits = bits };
