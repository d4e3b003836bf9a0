/* SPDX-License-Identifier: MIT
 *
 * Loss scaling: where gradients pass through 16-bit numbers on their way, small ones vanish and large ones become infinite. The
 * backward begins with `scale` instead of 1, the step divides by it, once, on the fp32 sums. Dynamic: a step whose gradients are
 * not finite is skipped, on all ranks, and the scale backs off; after `interval` good steps it grows.
 *
 *     fsdp_scaler scaler;
 *     fsdp_scaler_init(&scaler, NULL);
 *     ... fsdp_tape_opts.loss_scale = (float)scaler.scale, or the gradients of your own backward times scaler.scale ...
 *     fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1, .scaler = &scaler, .skipped = &skipped });
 *
 * All ranks decide by the norm of all gradients, which has the same bits on each: so their scales never part. A scale that is a
 * power of two changes no bit of training, but where numbers leave the range of their type.
 *
 * A scale below 1 is a pre-divide: gradients are sums over ranks and leaves, which a reduction in 16 bits may not hold; with
 * 1/8 each rank's part is divided by 8 before, and the step multiplies the fp32 result by 8 after. Use powers of two.
 *
 * Not collective, but the same calls on every rank. Caller's memory; the settings and the state are there to be read. */
#ifndef FSDP_SCALER_H
#define FSDP_SCALER_H

#include <fsdp/status.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_scaler_opts {
    double scale;    /* to begin with. 0: 65536 */
    double growth;   /* factor, 1 or more; 0: 2 */
    double backoff;  /* factor, between 0 and 1; 0: 0.5 */
    double min, max; /* bounds of the scale; 0: 1 and 2^24, or `scale` where that lies outside. Both `scale`: it is fixed */
    int64_t interval; /* good steps after which it grows; 0: 2000 */
} fsdp_scaler_opts;

typedef struct fsdp_scaler {
    double growth, backoff, min, max;
    int64_t interval;
    /* The state; fsdp_checkpoint_add_scaler() saves it. */
    double scale;
    int64_t good_steps; /* since it last changed */
    int64_t skipped;    /* steps, in all */
} fsdp_scaler;

/* NULL opts: all defaults. FSDP_ERR_INVALID names what is out of bounds. */
FSDP_API fsdp_status fsdp_scaler_init(fsdp_scaler *s, const fsdp_scaler_opts *opts) FSDP_NODISCARD;

/* For an optimizer of one's own: after fsdp_step_norm(), with its result; fsdp_optim_step() does it itself. *skip: the norm is
 * not finite: fsdp_step_cancel(), for the scale has backed off. Otherwise the gradients are to be divided by the scale that they
 * were made with: take it before this call.
 * FSDP_ERR_NONFINITE: the norm is not finite, and the scale is at its minimum: backing off does not help. Nothing is changed. */
FSDP_API fsdp_status fsdp_scaler_update(fsdp_scaler *s, double norm, bool *skip) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
