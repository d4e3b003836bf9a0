/* SPDX-License-Identifier: MIT
 *
 * Exact sums of doubles: the result is the correctly rounded sum, so it does not depend on the order of the terms
 * or on how they were dealt to ranks, slices and threads.
 *
 * The sum is held as a fixed-point number of 68 limbs of 32 bits, each in an int64_t (Neal, "Fast exact summation
 * using small and large superaccumulators", 2015, describes the idea):
 *     value = sum over i of limb[i] * 2^(32 i - 1074).
 * A term touches three limbs. Limbs have 31 bits of headroom, so carries are only propagated every 2^30 terms. */
#ifndef FSDPI_BASE_XSUM_H
#define FSDPI_BASE_XSUM_H

#include <fsdp/defs.h>

enum { FSDPI_XSUM_LIMBS = 68 };

typedef struct fsdpi_xsum {
    int64_t limb[FSDPI_XSUM_LIMBS];
    uint32_t adds;                      /* terms since the last carry */
    uint32_t nan, pos_inf, neg_inf;     /* whether such a term was seen (they take no limbs) */
} fsdpi_xsum;                           /* all zero = the empty sum */

void fsdpi_xsum_add(fsdpi_xsum *s, double x);
/* s += t. Carries in both. */
void fsdpi_xsum_merge(fsdpi_xsum *s, fsdpi_xsum *t);
/* The sum rounded to nearest even; +-infinity on overflow or infinite terms, NaN for NaN or opposite infinities. */
double fsdpi_xsum_round(fsdpi_xsum *s);

#endif
