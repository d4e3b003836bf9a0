/* SPDX-License-Identifier: MIT
 *
 * Norms of gradients, over the slices of all ranks: each element counted once (also where every rank keeps all, mode none;
 * padding never), the same number on every rank, and the same bits on any number of ranks.
 *
 *     fsdp_step_begin(units);
 *     fsdp_step_norm(units, &(fsdp_norm_opts){ .p = 1 }, &norm, NULL);
 *
 * What is rounded, once each, to double:
 *   p = 1         the sum of |x|, which is exact
 *   p = 2         the sum of x^2, which is exact; its square root
 *   p = INFINITY  nothing: the largest |x|
 *   other p > 0   each (|x| / 2^e)^p, by the C library's pow(), where 2^e is the power of two above the largest |x|; the
 *                 sum of these, which is exact; its p-th root; that times 2^e. So large p neither overflow nor vanish.
 * A NaN among the gradients gives NaN, else an infinity gives infinity. No gradients at all: 0. */
#ifndef FSDP_NORM_H
#define FSDP_NORM_H

#include <fsdp/unit.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_norm_opts {
    double p; /* more than 0, or INFINITY. 0: 2 */
    /* Where units are of different communicators (experts, made on what fsdp_comm_split() gave, beside units of the whole
     * world): one that has all ranks of these. Each of its ranks makes the call, with the units that it has, maybe none.
     * NULL: the units have one communicator, and that is meant. */
    fsdp_comm *over;
} fsdp_norm_opts;

/* Within a step. Collective over opts->over, or over the units' communicator; every rank says the same p. NULL opts: all
 * defaults. *norm: of the sums of gradients, as they are: not yet divided by anything. *weight: the sum of the weights of
 * all passes since the last step, over all these ranks, and over all communicators of the units: a micro-batch that has a
 * pass on each of several gives its weight to one of them (fsdp_pass_add_weight). Either may be NULL: not wanted.
 * One exchange; two for p other than 1, 2 and INFINITY. Waits for the gradients on the host.
 * FSDP_ERR_INVALID: p; units of several communicators without `over`, or one that does not enclose them. */
FSDP_API fsdp_status fsdp_step_norm(fsdp_unit_list units, const fsdp_norm_opts *opts, double *norm, double *weight) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
