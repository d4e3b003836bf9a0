/* SPDX-License-Identifier: MIT
 *
 * The tape: operations are computed as they are called, and noted, so that fsdp_backward() can go back over them.
 *
 *     fsdp_tape_begin(&tape, comm);
 *     fsdp_tensor_from_f32(&x, tape, values, 2, (int64_t[]){ rows, width });
 *     fsdp_forward(model, tape, x, &scores);
 *     fsdp_op_cross_entropy(tape, scores, labels, &loss);
 *     fsdp_backward(tape, loss);
 *     fsdp_tape_end(tape);                    the gradients count from here on
 *
 * A tape is one pass (unit.h): one micro-batch. Where it meets units of other communicators (experts, wrapped on what
 * fsdp_comm_split() gave), which the tape's must enclose, it is a pass of each of these too, from the first of their
 * units on: all count when it ends, or none, and its weight counts once. A step over them names the one that encloses
 * all (fsdp_step_opts.over). Of communicators that have to be reset, those that were split off come first. What an
 * operation needs again in its backward is kept by its storage, and given up when its backward is done. Parameters
 * are asked for anew at each use: a unit may have been resharded and gathered elsewhere in between.
 *
 * Begin, end and backward are collective, since units gather and reduce in them. */
#ifndef FSDP_AUTOGRAD_H
#define FSDP_AUTOGRAD_H

#include <fsdp/tensor.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_tape_opts {
    fsdp_device *device; /* where tensors lie; NULL: the CPU */
    bool eval;           /* no backward: nothing is kept, dropout is off */
    bool no_sync;        /* fsdp_pass_set_sync(): gradients stay with each rank until the next tape with sync, or the step */
    /* What dropout draws from, beside the place in the model and the element: the same on any number of ranks if
     * first_sample is the number, in the step's global batch, of the first sample on this tape. */
    uint64_t seed;
    uint32_t step, first_sample;
    float loss_scale; /* what the backward begins with, instead of 1: all gradients are multiplied by it (scaler.h). 0: 1. The
                         loss that is read is not */
} fsdp_tape_opts;

/* For training, with all defaults. */
FSDP_API fsdp_status fsdp_tape_begin(fsdp_tape **out, fsdp_comm *comm) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_tape_begin_with(fsdp_tape **out, fsdp_comm *comm, const fsdp_tape_opts *opts) FSDP_NODISCARD;

/* Goes back from loss, once a tape: gradients of parameters go to their units, others can be read. The loss is a sum;
 * how many rows it counts becomes the weight of the pass (fsdp_pass_add_weight). */
FSDP_API fsdp_status fsdp_backward(fsdp_tape *tape, fsdp_tensor *loss) FSDP_NODISCARD;

/* Not collective. Whether an operation or a forward that is called now is run again, in the backward: what it counted the first time must
 * not be counted twice. */
FSDP_API bool fsdp_tape_is_recomputing(const fsdp_tape *tape);

/* Ends the pass: gradients that a finished backward brought are committed; else the pass is cancelled. Frees the tape
 * and its tensors, also when it fails; only where it is refused, since another thread is in a call or a callback of the library's makes it,
 * is the tape as it was. NULL is accepted. */
FSDP_API fsdp_status fsdp_tape_end(fsdp_tape *tape) FSDP_NODISCARD;
/* The same, but nothing is committed; for paths of error. After an operation has failed because of the values that it was
 * given (an id that is not in the vocabulary), nothing else runs on the device before the tape is ended or cancelled. */
FSDP_API fsdp_status fsdp_tape_cancel(fsdp_tape *tape) FSDP_NODISCARD;

/* Collective. The mean of a loss over the rows of all ranks (0 where no row counts); the sum is exact. */
FSDP_API fsdp_status fsdp_loss_mean(fsdp_comm *comm, fsdp_tensor *loss, double *mean) FSDP_NODISCARD;
/* Not collective. This rank's sum, and how many rows count. */
FSDP_API fsdp_status fsdp_loss_read(fsdp_tensor *loss, double *sum, double *count) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
