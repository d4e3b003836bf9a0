/* SPDX-License-Identifier: MIT
 *
 * Optimizers on slices: SGD with momentum and AdamW, on the fp32 masters that each rank keeps.
 *
 *     fsdp_optim_create_adamw(&optim, units, &(fsdp_adamw_opts){ .lr = 3e-4f, .weight_decay = 0.1f });
 *     ... passes ...
 *     fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1.0f });
 *
 * All collective over the units' communicator; where units have several, over fsdp_step_opts.over. An optimizer of your own does the same with fsdp_step_begin() and
 * fsdp_unit_slices() (unit.h): nothing here knows more than that. */
#ifndef FSDP_OPTIM_H
#define FSDP_OPTIM_H

#include <fsdp/norm.h>
#include <fsdp/scaler.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_optim fsdp_optim;

/* Settings for some parameters, by name. The first group whose pattern fits decides; `*` stands for any text. */
typedef struct fsdp_optim_group {
    const char *pattern;  /* of the parameter's name, as "*.bias" */
    float weight_decay;   /* instead of the optimizer's */
    float lr_scale;       /* the learning rate is multiplied by this; 0: 1 */
} fsdp_optim_group;

/* v = momentum v + (g + weight_decay p);  p -= lr v  (PyTorch's SGD). momentum 0 keeps no state. */
typedef struct fsdp_sgd_opts {
    float lr, momentum, weight_decay;
    const fsdp_optim_group *groups;
    int group_count;
    /* Where state (momentum) is kept. NULL: where each unit's slices are, its storage device. Another: in a step a unit's is copied to its
     * slices, updated there and copied back, while others are updated; so slices may be on a device whose memory is dear, and state in
     * the host's (fsdp_device_cpu()). One of the two must be the host's memory: FSDP_ERR_UNSUPPORTED. The bits are the same. Beside the
     * slices that takes twice the state of the largest unit. The units' communicators keep the device alive. */
    fsdp_device *state_device;
} fsdp_sgd_opts;

/* Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), as PyTorch's AdamW:
 *   p -= lr weight_decay p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
 * t counts the steps in which the parameter had a gradient: its unit did, and it was not frozen. */
typedef struct fsdp_adamw_opts {
    float lr;
    float beta1, beta2; /* 0: 0.9 and 0.999 */
    float eps;          /* 0: 1e-8 */
    float weight_decay;
    const fsdp_optim_group *groups;
    int group_count;
    fsdp_device *state_device; /* of m and v, as in fsdp_sgd_opts */
} fsdp_adamw_opts;

/* State starts at 0, and its memory is taken here; for units whose parameters are all frozen in the first step that updates them, so
 * that what never trains takes none. Units and their list are borrowed for the optimizer's life: destroy it first. What one rank alone has no memory
 * for, or gets wrong, is told to all ranks of the units' communicators: none of them gets an optimizer. */
FSDP_API fsdp_status fsdp_optim_create_sgd(fsdp_optim **out, fsdp_unit_list units, const fsdp_sgd_opts *opts) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_optim_create_adamw(fsdp_optim **out, fsdp_unit_list units, const fsdp_adamw_opts *opts) FSDP_NODISCARD;
/* NULL is accepted. */
FSDP_API void fsdp_optim_destroy(fsdp_optim *optim);

typedef struct fsdp_step_opts {
    float grad_scale; /* what the sums of gradients are multiplied by. 0: 1 / the weight of the passes (fsdp_pass_add_weight),
                         or 1 where no pass had a weight */
    float clip;       /* largest norm of the (scaled) gradients; 0: no clipping */
    double clip_p;    /* which norm: p of the p-norm, as fsdp_norm_opts.p. 0: 2 */
    fsdp_comm *over;  /* where units are of several communicators: one that encloses them, as fsdp_norm_opts.over. All its
                         ranks step together, each with an optimizer of the units that it has, maybe none */
    fsdp_scaler *scaler; /* the gradients are scaled by its scale: they are divided by it, and it is updated. One scaler goes with
                            one optimizer. NULL: they are not */
    double *norm;     /* (may be NULL) the norm before clipping, of the gradients as they are used */
    bool *skipped;    /* (may be NULL) the scaler has backed off: the norm was not finite, nothing was updated */
} fsdp_step_opts;

/* Updates all units' parameters from the gradients since the last step, and drops these. Units without gradients, and frozen
 * parameters, are left alone. FSDP_ERR_NONFINITE where the norm is infinite or NaN: names unit and parameter; parameters and
 * state are as before, the gradients are dropped. With a scaler that can back off such a step is skipped instead, and that is FSDP_OK.
 * Other errors before the update: all is as before, gradients too; that one rank has no memory for state is told to all. A device
 * that fails in the update leaves its units in the step: fsdp_comm_reset() ends it. */
FSDP_API fsdp_status fsdp_optim_step(fsdp_optim *optim, const fsdp_step_opts *opts) FSDP_NODISCARD;

/* Not collective, but the same on every rank. */
FSDP_API void fsdp_optim_set_lr(fsdp_optim *optim, float lr);
FSDP_API float fsdp_optim_lr(const fsdp_optim *optim);

/* Not collective. The state, for files: kinds "momentum" (SGD), "exp_avg" and "exp_avg_sq" (AdamW). *state: address of
 * fsdp_unit_slice_numel(unit) floats, where state is kept, indexed as fsdp_slice.state_offset says; borrowed. Read and write it with
 * fsdp_optim_state_stream(). Where the unit has none yet it is made, of zeros: FSDP_ERR_NOMEM. */
FSDP_API int fsdp_optim_state_kinds(const fsdp_optim *optim);
FSDP_API const char *fsdp_optim_state_name(const fsdp_optim *optim, int kind);
FSDP_API fsdp_status fsdp_optim_state(fsdp_optim *optim, const fsdp_unit *unit, int kind, float **state) FSDP_NODISCARD;
/* A stream that reaches it, in order with steps: the unit's storage stream, but where that one's device is the host and state is elsewhere.
 * NULL: the unit is not in this optimizer. */
FSDP_API fsdp_stream *fsdp_optim_state_stream(const fsdp_optim *optim, const fsdp_unit *unit);
/* Whether it has any yet: all of what it has not is 0. */
FSDP_API bool fsdp_optim_has_state(const fsdp_optim *optim, const fsdp_unit *unit);
/* Steps that a parameter has had: t of AdamW; of a unit: those of the one that has had most; sets all. */
FSDP_API int64_t fsdp_optim_param_steps(const fsdp_optim *optim, const fsdp_unit *unit, int param);
FSDP_API void fsdp_optim_set_param_steps(fsdp_optim *optim, const fsdp_unit *unit, int param, int64_t steps);
FSDP_API int64_t fsdp_optim_unit_steps(const fsdp_optim *optim, const fsdp_unit *unit);
FSDP_API void fsdp_optim_set_unit_steps(fsdp_optim *optim, const fsdp_unit *unit, int64_t steps);
FSDP_API fsdp_unit_list fsdp_optim_units(const fsdp_optim *optim);

/* ---- schedules: the learning rate of a step ---- */

typedef enum fsdp_schedule_kind { FSDP_SCHEDULE_COSINE, FSDP_SCHEDULE_LINEAR, FSDP_SCHEDULE_CONSTANT } fsdp_schedule_kind;

typedef struct fsdp_schedule {
    fsdp_schedule_kind kind;
    float lr, min_lr;  /* the highest; where cosine and linear end */
    int64_t warmup;    /* steps of linear rise: step s < warmup has lr (s + 1) / warmup */
    int64_t steps;     /* the last step is steps - 1; after it the rate stays. A run of one step has the highest rate */
} fsdp_schedule;

/* A function of the step alone (0 is the first). */
FSDP_API float fsdp_schedule_lr(const fsdp_schedule *s, int64_t step);

FSDP_END_DECLS

#endif
