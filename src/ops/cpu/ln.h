/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_OPS_CPU_LN_H
#define FSDPI_OPS_CPU_LN_H

#include <stdint.h>
#include <string.h>

/* ln x in fp64 for normal positive x, within 1e-15 (1 + |ln x|); NaN and infinity come back. The C library's
 * differs in the last bit from one version and processor to the next. x = 2^e m with m in [sqrt 1/2, sqrt 2),
 * and ln m = 2 artanh((m - 1) / (m + 1)). One a row, so it may have a branch. */
static inline double fsdpi_ln(double x)
{
    if (!(x < __builtin_inf())) return x;
    uint64_t u;
    memcpy(&u, &x, sizeof(u));
    int64_t e = (int64_t)((u + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu)) >> 52) - 1023;
    u -= (uint64_t)e << 52;
    double m;
    memcpy(&m, &u, sizeof(m));
    double s = (m - 1.0) / (m + 1.0), q = s * s, p = 1.0 / 19;
    p = p * q + 1.0 / 17;
    p = p * q + 1.0 / 15;
    p = p * q + 1.0 / 13;
    p = p * q + 1.0 / 11;
    p = p * q + 1.0 / 9;
    p = p * q + 1.0 / 7;
    p = p * q + 1.0 / 5;
    p = p * q + 1.0 / 3;
    return (double)e * 0.69314718055994530942 + (2.0 * s + 2.0 * s * q * p);
}

#endif
