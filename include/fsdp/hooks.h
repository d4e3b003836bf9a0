/* SPDX-License-Identifier: MIT
 *
 * Gradients on their way, in your own hands: a hook that changes what a rank posts, and one that puts the ranks' gradients together
 * instead of adding them. For compression, sums in other types, clipping each leaf, votes.
 *
 *     static fsdp_status halve(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg)
 *     {
 *         for (int i = 0; i < count; i++)
 *             for (int64_t j = 0; j < part[i].numel; j++) grad[part[i].state_offset + j] *= 0.5f;
 *         return FSDP_OK;
 *     }
 *     fsdp_unit_set_grad_hooks(unit, &(fsdp_grad_hooks){ .post = halve });
 *
 * A hook is the body of a kernel: it runs on the unit's device, perhaps later and on another thread, in stream order; all addresses
 * that it is given are usable there. It reads and writes what it is given, calls nothing of the library but conversions of
 * fsdp/dtype.h (what uses a communicator is FSDP_ERR_STATE there), and is a function of its arguments alone, so that a run can be repeated. A status other than FSDP_OK is that
 * of any kernel that fails: a call of the same pass returns it, or, where the device is behind, one as late as the step;
 * fsdp_pass_cancel() drops the pass and goes on.
 *
 * Gradients are sums, and divided once, in the step (fsdp_step_opts.grad_scale). To divide before as well, so that what is sent or summed
 * in F16 does not become infinite, set fsdp_post_divide() and multiply grad_scale by the same factor; with a power of two no bit is lost
 * but of numbers that become too small.
 *
 * Without hooks, and with fsdp_reduce_sum(), the bits do not depend on the number of ranks. With others they are what the hooks
 * make of it: a reduce hook keeps that if it folds the pieces into the sum one after another, in rank order. */
#ifndef FSDP_HOOKS_H
#define FSDP_HOOKS_H

#include <fsdp/unit.h>

FSDP_BEGIN_DECLS

/* Where parameters lie in an array: part[i] is elements [offset, offset + numel) of parameter `param`, and begins at element
 * state_offset of the array; master and grad are NULL. What lies between parts is padding, or frozen: not to be read. */

/* When a leaf's gradient is complete, before it is posted, or kept by a pass without sync. grad: this rank's gradient of the unit, of
 * that leaf, whole, fp32, to be changed in place; parts are whole parameters (of one without elements there is none). Runs on the
 * compute stream. Not called for the zeros of ranks that join in a pass. */
typedef fsdp_status (*fsdp_post_fn)(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg);

/* One reduction, on the owner of a slice: what the ranks posted together: a leaf each, or their sums of passes without sync. Pieces
 * are fp32, also where they were sent in fewer bits. */
typedef struct fsdp_reduction {
    float *out;                /* [numel], to be written: base, with the pieces put into it */
    const float *base;         /* [numel] the sum of the leaves before these, since the last step; NULL: there are none */
    const float *const *piece; /* [ranks], each [numel]: this slice of what each rank posted */
    int ranks;
    int64_t numel;             /* of the slice, with padding; more than 0 */
    const fsdp_slice *part;
    int count;
} fsdp_reduction;

/* Runs on the gradient device's stream of reductions. A unit that posts several times in a pass has a sum for each of these rounds; they are added
 * up in the step. */
typedef fsdp_status (*fsdp_reduce_fn)(const fsdp_kernel *k, const fsdp_reduction *r, void *arg);

typedef struct fsdp_grad_hooks {
    fsdp_post_fn post;     /* NULL: gradients are posted as they are */
    fsdp_reduce_fn reduce; /* NULL: they are added in rank order */
    void *arg;             /* borrowed, as long as the hooks are set; host memory is usable in hooks */
} fsdp_grad_hooks;

/* Collective; outside of passes and steps. All ranks set the same hooks (that each sets the same kinds is checked). NULL: none.
 * Accumulated gradients stay. A reduce hook wants all pieces at once: where they cannot be read in place (transport copy, a
 * reduce_dtype below fp32) that takes room for them, as much as the whole unit. With a grad_dtype below fp32 a reduction sees sums
 * widened, and what it gives is rounded once: that takes room for two fp32 slices. At most FSDP_REDUCE_RANKS ranks (FSDP_ERR_UNSUPPORTED). */
enum { FSDP_REDUCE_RANKS = 384 };
FSDP_API fsdp_status fsdp_unit_set_grad_hooks(fsdp_unit *unit, const fsdp_grad_hooks *hooks) FSDP_NODISCARD;

/* The reduction that there is without a hook, to the bit (but with a grad_dtype below fp32 sums are then not rounded after each leaf,
 * but after all of a pass): for hooks that do something before or after it. */
FSDP_API fsdp_status fsdp_reduce_sum(const fsdp_kernel *k, const fsdp_reduction *r, void *arg) FSDP_NODISCARD;

/* A post hook: divides each leaf's gradient by *(const float *)arg before it is rounded and sent. */
FSDP_API fsdp_status fsdp_post_divide(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
