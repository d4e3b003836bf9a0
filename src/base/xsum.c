/* SPDX-License-Identifier: MIT */
#include "base/xsum.h"

#include <math.h>
#include <string.h>

/* Propagates carries: afterwards limbs 0 .. n-2 lie in [0, 2^32) and the last one has the sign. */
static void carry(fsdpi_xsum *s)
{
    int64_t c = 0;
    for (int i = 0; i < FSDPI_XSUM_LIMBS - 1; i++) {
        int64_t v = s->limb[i] + c;
        c = v >> 32; /* arithmetic: rounds towards minus infinity */
        s->limb[i] = v & 0xffffffff;
    }
    s->limb[FSDPI_XSUM_LIMBS - 1] += c;
    s->adds = 0;
}

void fsdpi_xsum_add(fsdpi_xsum *s, double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof(u));
    int e = (int)(u >> 52 & 0x7ff);
    uint64_t m = u & 0xfffffffffffffu;
    bool neg = u >> 63;
    if (e == 0x7ff) {
        if (m != 0) s->nan = 1;
        else if (neg) s->neg_inf = 1;
        else s->pos_inf = 1;
        return;
    }
    if (e > 0) m |= 0x10000000000000u;
    else e = 1;
    /* x = m 2^(e - 1075); the lowest limb's unit is 2^-1074 */
    int bit = e - 1, i = bit >> 5, shift = bit & 31;
    uint64_t low = m << shift, high = shift > 0 ? m >> (64 - shift) : 0;
    int64_t a = (int64_t)(low & 0xffffffff), b = (int64_t)(low >> 32), c = (int64_t)high;
    s->limb[i] += neg ? -a : a;
    s->limb[i + 1] += neg ? -b : b;
    s->limb[i + 2] += neg ? -c : c;
    if (++s->adds >= 1u << 30) carry(s);
}

void fsdpi_xsum_merge(fsdpi_xsum *s, fsdpi_xsum *t)
{
    carry(s);
    carry(t);
    for (int i = 0; i < FSDPI_XSUM_LIMBS; i++) s->limb[i] += t->limb[i];
    s->nan |= t->nan;
    s->pos_inf |= t->pos_inf;
    s->neg_inf |= t->neg_inf;
    carry(s);
}

double fsdpi_xsum_round(fsdpi_xsum *s)
{
    if (s->nan || (s->pos_inf && s->neg_inf)) return NAN;
    if (s->pos_inf) return INFINITY;
    if (s->neg_inf) return -INFINITY;
    carry(s);
    fsdpi_xsum v = *s;
    bool neg = v.limb[FSDPI_XSUM_LIMBS - 1] < 0;
    if (neg) {
        for (int i = 0; i < FSDPI_XSUM_LIMBS; i++) v.limb[i] = -v.limb[i];
        carry(&v);
    }
    int top = FSDPI_XSUM_LIMBS - 1;
    while (top >= 0 && v.limb[top] == 0) top--;
    if (top < 0) return 0.0;
    /* The top 64 bits as an integer w (value = w 2^unit), and whether anything lies below. */
    int lead = 63 - __builtin_clzll((uint64_t)v.limb[top]);
    if (top == FSDPI_XSUM_LIMBS - 1 && lead >= 32) return neg ? -INFINITY : INFINITY;
    int64_t highest = 32 * (int64_t)top + lead; /* the leading bit, in units of 2^-1074 */
    int64_t lowest = highest > 63 ? highest - 63 : 0;
    uint64_t w = 0;
    bool sticky = false;
    for (int i = 0; i <= top; i++) {
        int64_t at = 32 * (int64_t)i - lowest; /* where this limb's bit 0 goes in w */
        uint64_t limb = (uint64_t)v.limb[i];
        if (at >= 0) w |= limb << at;
        else if (at > -32) {
            w |= limb >> -at;
            sticky |= (limb & ((1u << -at) - 1)) != 0;
        } else sticky |= limb != 0;
    }
    /* Round w to 53 bits, or to fewer where the result is subnormal: then lowest is 0 and w is exact already. */
    if (highest > 52) {
        int drop = (int)(highest - lowest) - 52;
        uint64_t half = (uint64_t)1 << (drop - 1), rest = w & ((half << 1) - 1);
        w >>= drop;
        if (rest > half || (rest == half && (sticky || (w & 1)))) w++;
        lowest += drop;
    }
    double r = ldexp((double)w, (int)(lowest - 1074));
    return neg ? -r : r;
}
