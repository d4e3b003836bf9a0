/* SPDX-License-Identifier: MIT
 *
 * Sums that do not depend on the order of their terms, or on which rank had which: the exact sum, rounded once.
 *
 *     fsdp_exact_sum loss = { 0 };
 *     for (...) fsdp_exact_sum_add(&loss, loss_of_leaf);
 *     fsdp_comm_sum_exact_sums(comm, &loss, 1);          now over all ranks
 *     double total = fsdp_exact_sum_value(&loss);
 */
#ifndef FSDP_SUM_H
#define FSDP_SUM_H

#include <fsdp/comm.h>

FSDP_BEGIN_DECLS

/* All zero is the empty sum. What is in it is the library's (base/xsum.h). */
typedef struct fsdp_exact_sum {
    uint64_t opaque[70];
} fsdp_exact_sum;

FSDP_API void fsdp_exact_sum_add(fsdp_exact_sum *s, double x);
/* Rounded to nearest even; infinite or NaN as the terms say. */
FSDP_API double fsdp_exact_sum_value(const fsdp_exact_sum *s);
/* Collective. Each of s[0..n) becomes the sum over all ranks. */
FSDP_API fsdp_status fsdp_comm_sum_exact_sums(fsdp_comm *comm, fsdp_exact_sum *s, int n) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
