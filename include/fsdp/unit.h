/* SPDX-License-Identifier: MIT
 *
 * The core: fully sharded parameters for any program that has a forward and a backward of its own.
 *
 * A unit is a group of parameters that are made whole together. Between uses each rank keeps one slice of the unit's
 * parameters, gradients and optimizer state. A training step, for one unit (examples/own_compute.c is the program):
 *
 *     fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN);        one micro-batch
 *     fsdp_unit_begin_forward(unit, pass);                  the unit is whole
 *     ... fsdp_unit_param(unit, i) ...
 *     fsdp_unit_end_forward(unit, pass);                    and sharded again
 *     fsdp_unit_begin_backward(unit, pass);                 whole, with a place for its gradients
 *     ... fsdp_unit_param(unit, i), fsdp_unit_grad(unit, i, &beta) ...
 *     fsdp_unit_end_backward(unit, pass);                   gradients are reduced to the slices' owners
 *     fsdp_pass_end(pass);                                  and count from now on
 *     ... more micro-batches ...
 *     fsdp_optim_step(optim, ...) or fsdp_step_begin(units), your own optimizer on fsdp_unit_slices(), fsdp_step_end
 *
 * Gradients are sums, over the micro-batches of all ranks since the last step: divide once, in the step. They are
 * added in leaf order (the micro-batch j of rank r of R is leaf j R + r), so they have the same bits for every number
 * of ranks that divides the number of leaves.
 *
 * Which unit is the root of a pass is a question, not a property: the one that begins while no other is active in the
 * pass. A unit may be initialised, summoned, evaluated or trained before or after others around it exist.
 *
 * Everything here is collective over the unit's communicator, unless it says otherwise: every rank makes the same
 * calls on the same units in the same order. A call at the wrong moment returns FSDP_ERR_STATE, names the unit, its
 * state and the way out, and changes nothing.
 *
 * Stream: work on parameters and gradients is ordered on the unit's compute stream, fsdp_unit_stream(); calls return
 * before it is done where the device is asynchronous. On the CPU everything is done when a call returns.
 * Threads: all units of a communicator are used by one thread at a time, and not from within functions that calls on it have called
 * (comm.h): fsdp_unit_param() and others that only read may be, on that thread. */
#ifndef FSDP_UNIT_H
#define FSDP_UNIT_H

#include <fsdp/comm.h>
#include <fsdp/device.h>
#include <fsdp/dtype.h>

FSDP_BEGIN_DECLS

enum { FSDP_MAX_DIMS = 8 };

typedef struct fsdp_unit fsdp_unit;
typedef struct fsdp_pass fsdp_pass;

/* Borrowed array of units, as functions take and give them. */
typedef struct fsdp_unit_list {
    fsdp_unit *const *units;
    int count;
} fsdp_unit_list;

/* A parameter: fp32, dense, row-major. ndim 0 is a scalar; a dimension may be 0. */
typedef struct fsdp_param {
    const char *name; /* unique within the unit */
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
} fsdp_param;

/* What is sharded between uses. The results have the same bits in all modes. */
typedef enum fsdp_mode {
    FSDP_MODE_FULL,      /* parameters, gradients, optimizer state (ZeRO-3) */
    FSDP_MODE_GRAD_OP,   /* the same, but parameters stay whole from forward to backward (ZeRO-2) */
    FSDP_MODE_OPTIMIZER, /* parameters stay whole until they change; gradients and optimizer state (ZeRO-1) */
    FSDP_MODE_NONE,      /* every rank keeps all (data parallel) */
} fsdp_mode;

FSDP_API const char *fsdp_mode_name(fsdp_mode mode); /* "full", "grad-op", "optimizer", "none" */

typedef struct fsdp_unit_opts {
    const char *name;            /* for messages and files; NULL: "unit" */
    fsdp_mode mode;
    int shards; /* Hybrid: how many ranks share one copy of what the mode shards, while others hold replicas of it: a mesh
                   of R x S ranks, with S = shards, R = size / S and rank = replica * S + shard. 0: all ranks. Must divide the
                   communicator's size; in mode none it is 1. */
    int reshard_group; /* Mode full: from forward to backward parameters stay spread over groups of so many neighbouring ranks, and the
                          backward gathers from these: more memory than all shards, less than grad-op, and no traffic beyond the
                          group. Must divide the shards. 0: the backward gathers from all. Of no effect where a gather copies nothing. */
    /* Types: F32, BF16 or F16. Masters and optimizer state are F32 always, and so are gradients in a step.
     * param_dtype: what parameters are rounded to before they are gathered; fsdp_unit_param() gives these values as F32.
     * reduce_dtype: what the gradient of each leaf is rounded to before it goes to the owners, who add in F32.
     * grad_dtype: what sums of gradients are kept in from leaf to leaf: less memory in passes; each sum is rounded after each leaf, so
     * small leaves are lost beside a large sum. In a step they are F32 again, which takes room then (docs/memory.md). */
    fsdp_dtype param_dtype, reduce_dtype, grad_dtype;
    bool exact_eval; /* evaluation passes see masters, not rounded parameters; summons always do */
    bool raw_params; /* compute reads param_dtype as it is (fsdp_unit_param_data): no F32 copy is made */
    /* Two devices at most, of which one is the host's memory (offload).
     * compute_device: where the unit is used. NULL: the CPU.
     * storage_device: where slices live: masters, and optimizer state unless the optimizer is told otherwise. NULL: compute_device. Another:
     * parameters are copied over when they are gathered.
     * grad_device: where gradients are added up and kept until the step. NULL: storage_device. Other than compute_device: they are copied over
     * when they are reduced; other than storage_device: again in the step, which has them there, and takes room for it. */
    fsdp_device *storage_device, *grad_device, *compute_device;
    int prefetch; /* how many units ahead are gathered when this one begins, in the order of the last pass. 0: 1;
                     negative: none. Of no effect where a gather copies nothing (transport shm). */
} fsdp_unit_opts;

/* Makes a unit; its parameters are 0 until they are initialised. Names and shapes are copied. Names, shapes and mode must
 * be the same on all ranks: FSDP_ERR_INVALID says where they differ. */
FSDP_API fsdp_status fsdp_unit_create(fsdp_unit **out, fsdp_comm *comm, const fsdp_param *params, int count,
                                      const fsdp_unit_opts *opts) FSDP_NODISCARD;
/* NULL is accepted. Outside of passes. */
FSDP_API void fsdp_unit_destroy(fsdp_unit *unit);

/* Not collective. Borrowed until destroy. */
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit);
FSDP_API fsdp_comm *fsdp_unit_comm(const fsdp_unit *unit);
FSDP_API fsdp_mode fsdp_unit_mode(const fsdp_unit *unit);
FSDP_API int fsdp_unit_shards(const fsdp_unit *unit); /* ranks that share one copy: 1 in mode none */
/* Which of the ranks that keep the same slices this one is: 0 for the first, who writes files. */
FSDP_API int fsdp_unit_replica(const fsdp_unit *unit);
FSDP_API int fsdp_unit_param_count(const fsdp_unit *unit);
FSDP_API const fsdp_param *fsdp_unit_param_info(const fsdp_unit *unit, int i);
FSDP_API int64_t fsdp_unit_param_numel(const fsdp_unit *unit, int i);
/* Of the compute device: whole parameters, gradients of a pass. */
FSDP_API fsdp_stream *fsdp_unit_stream(const fsdp_unit *unit);
/* Of the storage device: slices, and gradients in a step; the same one where the devices are. */
FSDP_API fsdp_stream *fsdp_unit_storage_stream(const fsdp_unit *unit);
/* The unit's state in words, for messages and debuggers: "sharded, gradients accumulated". */
FSDP_API const char *fsdp_unit_state(const fsdp_unit *unit);

/* ---- initial values ---- */

/* Sets *value of element i of a parameter, on its original shape (row-major index). Called on every rank for the
 * elements that it keeps, so it must not depend on the rank, unless patchwork values are wanted. */
typedef void (*fsdp_init_fn)(const char *name, int64_t i, float *value, void *arg);
/* The same for elements [first, first + numel), in host memory. May fail: then no rank has new values, and all return the
 * error. */
typedef fsdp_status (*fsdp_fill_fn)(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg);

/* Sets all parameters. Outside of passes; no unit is ever whole for it. Where ranks hold replicas (mode none) and their
 * callbacks gave different values, each rank's slice of its own counts everywhere, as in the sharded modes; a warning
 * (fsdp/log.h) names parameter, element, ranks and values, once a unit. */
FSDP_API fsdp_status fsdp_unit_init(fsdp_unit *unit, fsdp_init_fn init, void *arg) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_unit_fill(fsdp_unit *unit, fsdp_fill_fn fill, void *arg) FSDP_NODISCARD;
/* The same, from one rank: `fill` is called on rank `rank` alone, for all elements, and what it gives counts on all ranks.
 * The others' is not called and may be NULL; they need no values. The whole unit is in that rank's gradient window for it. */
FSDP_API fsdp_status fsdp_unit_fill_from(fsdp_unit *unit, int rank, fsdp_fill_fn fill, void *arg) FSDP_NODISCARD;

/* Not collective. How many parameters never got values: neither by a fill nor by a summon with writeback. They are 0.
 * *first (NULL: not wanted): the name of the first one. A training pass that uses one logs a warning, once a unit. */
FSDP_API int fsdp_unit_never_set(const fsdp_unit *unit, const char **first);

/* Where ranks hold replicas (mode none): FSDP_ERR_INVALID, on every rank, where they are not the same to the bit, with the
 * parameter, its first element that differs, two ranks and their values, and how many parameters differ. It reads every
 * master once and exchanges a hash. Sharded units have no replicas: FSDP_OK. Outside of passes and steps. */
FSDP_API fsdp_status fsdp_unit_check_replicas(fsdp_unit *unit) FSDP_NODISCARD;
/* Mends that: what rank `rank` holds becomes all ranks'. Sharded units are left as they are. */
FSDP_API fsdp_status fsdp_unit_broadcast_from(fsdp_unit *unit, int rank) FSDP_NODISCARD;

/* ---- frozen parameters ---- */

/* From now on parameter i has no gradient, or has one again. A frozen parameter is gathered, used, summoned, saved like
 * others; fsdp_unit_grad() refuses it; it is in no norm; optimizers leave it and its state alone. A unit whose parameters
 * are all frozen reduces nothing. Outside of passes and steps, and when the unit has no gradients that no step has used. */
FSDP_API fsdp_status fsdp_unit_set_frozen(fsdp_unit *unit, int i, bool frozen) FSDP_NODISCARD;
/* Not collective. */
FSDP_API bool fsdp_unit_frozen(const fsdp_unit *unit, int i);

/* ---- passes ---- */

typedef enum fsdp_pass_kind {
    FSDP_PASS_TRAIN, /* forward, then backward */
    FSDP_PASS_EVAL,  /* forward only: units are sharded again at the end of their forward */
} fsdp_pass_kind;

FSDP_API fsdp_status fsdp_pass_begin(fsdp_pass **out, fsdp_comm *comm, fsdp_pass_kind kind) FSDP_NODISCARD;
/* Commits the pass's gradients, on all ranks or on none, and frees the pass. Units that it left whole are sharded. After
 * an error nothing counts and the pass is still open: cancel it, or after FSDP_ERR_STATE (a unit is still active) go on. */
FSDP_API fsdp_status fsdp_pass_end(fsdp_pass *pass) FSDP_NODISCARD;
/* Drops the pass with all that it did: its gradients do not count, those of earlier passes do. Also after a kernel has
 * failed: streams can be used again, and other passes that were open then can only be cancelled. NULL is accepted. */
FSDP_API fsdp_status fsdp_pass_cancel(fsdp_pass *pass) FSDP_NODISCARD;
/* Not collective. Says how much a rank's pass weighs (its samples, or tokens): fsdp_optim_step() then divides the sums
 * of gradients by the sum of weights. Adds up over calls. */
FSDP_API void fsdp_pass_add_weight(fsdp_pass *pass, double weight);

/* Without sync the gradients of a pass stay with each rank, whole, and nothing is reduced: the next pass with sync that has
 * gradients of the unit takes them along, or else the next step does. A rank's gradients are then sums of its own leaves in
 * order, and these are added in rank order: the bits of leaves dealt out in contiguous blocks, which depend on the number of
 * ranks. It costs memory for all gradients, twice within such a pass. Such a pass is ended by each rank for itself. Before
 * the pass's first backward; may be said again. */
FSDP_API fsdp_status fsdp_pass_set_sync(fsdp_pass *pass, bool sync) FSDP_NODISCARD;

/* Uneven inputs: called by ranks that have no micro-batch while others make a pass. It takes part in a pass of rank `leader`
 * (training or evaluation) from its beginning to its end, with gradients of 0 and weight 0, gathers nothing, and needs
 * to know nothing of the model. Returns FSDP_OK also where the pass was cancelled. After an error: fsdp_comm_reset().
 *     for (;;) {
 *         fsdp_comm_ask_more(comm, have, &first);
 *         if (first < 0) break;                          nobody has any
 *         if (have) { ... a pass, nothing else ... } else fsdp_pass_join(comm, first);
 *     }
 * In the leader's pass there may be no other collective calls, and no second training pass. */
FSDP_API fsdp_status fsdp_pass_join(fsdp_comm *comm, int leader) FSDP_NODISCARD;

FSDP_API fsdp_status fsdp_unit_begin_forward(fsdp_unit *unit, fsdp_pass *pass) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_unit_end_forward(fsdp_unit *unit, fsdp_pass *pass) FSDP_NODISCARD;
/* Around a forward that is computed again in the backward (activation checkpointing): before begin_backward, or within it. It
 * is a forward that was: no backward of its own follows. */
FSDP_API fsdp_status fsdp_unit_begin_recompute(fsdp_unit *unit, fsdp_pass *pass) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_unit_end_recompute(fsdp_unit *unit, fsdp_pass *pass) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_unit_begin_backward(fsdp_unit *unit, fsdp_pass *pass) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_unit_end_backward(fsdp_unit *unit, fsdp_pass *pass) FSDP_NODISCARD;

/* Not collective. Parameter i, whole: a device address, read-only, good until the matching end. NULL (and an error
 * for fsdp_last_error) while the unit is not whole. */
FSDP_API const float *fsdp_unit_param(fsdp_unit *unit, int i);

/* Not collective. The same, in the type that it is whole in (*dtype, NULL: not wanted): param_dtype with raw_params, else F32;
 * F32 in exact evaluations and summons. */
FSDP_API const void *fsdp_unit_param_data(fsdp_unit *unit, int i, fsdp_dtype *dtype);

/* Not collective. Where this rank writes the gradient of parameter i, whole; within begin_backward and end_backward.
 * *beta: 0 the first time: overwrite what is there (garbage); 1 after that: add to it. Parameters not asked for
 * get a gradient of 0. NULL (and an error) outside, and of a frozen parameter. */
FSDP_API float *fsdp_unit_grad(fsdp_unit *unit, int i, float *beta);

/* ---- gradients that no step has used yet ---- */

typedef enum fsdp_pending {
    FSDP_PENDING_REDUCED = 1, /* sums over all ranks, of passes with sync: this rank's slice */
    FSDP_PENDING_OWN = 2,     /* this rank's sums of its own passes without sync: whole */
} fsdp_pending;

/* Not collective, and asks nobody. Which of them parameter i has: bits; 0: none. */
FSDP_API unsigned fsdp_unit_pending(const fsdp_unit *unit, int i);
/* Not collective, and asks nobody; waits for the stream. *offset, *numel (may be NULL): the part of the parameter that this rank
 * has; out (may be NULL): its elements, into host memory. FSDP_ERR_STATE where there is none. */
FSDP_API fsdp_status fsdp_unit_read_pending(fsdp_unit *unit, int i, fsdp_pending which, int64_t *offset, int64_t *numel, float *out) FSDP_NODISCARD;

/* ---- summon: the whole parameters, outside of passes ---- */

typedef struct fsdp_unit_summon_opts {
    /* What is written is kept and published at the end: each rank's own slice of what it wrote. false: read-only; debug
     * builds notice at the end that a rank has written all the same (FSDP_ERR_INVALID there). */
    bool writeback;
    /* With writeback: ranks must write the same. Where they did not, fsdp_unit_summon_end() is FSDP_ERR_INVALID on all of
     * them, names parameter, element, ranks and values, and the unit stays summoned. Without it each rank's slice counts, and
     * that they differ is logged: as a warning once a unit that has replicas, else once a communicator. */
    bool same;
    /* Rank 0 alone gets the parameters; the others take part, get nothing and need no memory. With writeback all that
     * rank 0 wrote counts. */
    bool rank0_only;
    /* In host memory: the unit is gathered, copied and sharded again, unit by unit. */
    bool host;
    /* Also the accumulated gradients, whole. With writeback what is written there is kept, too. Refused while some are of passes
     * without sync, and not sent. */
    bool grads;
} fsdp_unit_summon_opts;

/* Summons nest: an inner one may ask for no more than the outermost has, and what was written is published at the end of
 * the outermost, on all ranks or on none; until then fsdp_unit_param() reads the old values. All memory that a summon takes
 * is given back at its end. NULL: read-only. */
FSDP_API fsdp_status fsdp_unit_summon_begin(fsdp_unit *unit, const fsdp_unit_summon_opts *opts) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_unit_summon_end(fsdp_unit *unit) FSDP_NODISCARD;
/* As end, but what was written is dropped. Of an inner summon: the same as end. */
FSDP_API fsdp_status fsdp_unit_summon_cancel(fsdp_unit *unit) FSDP_NODISCARD;

/* Not collective. Parameter i while summoned with writeback or to the host: an address, of the host or of the device, that
 * this rank may read, and with writeback write. NULL (and an error) otherwise: fsdp_unit_param() reads what is summoned
 * read-only on the device. */
FSDP_API float *fsdp_unit_summoned(fsdp_unit *unit, int i);
/* Not collective. *grad: the accumulated gradient of parameter i while summoned with grads, in the same kind of memory as
 * fsdp_unit_summoned(). NULL where the unit has no gradients, or the parameter is frozen. */
FSDP_API fsdp_status fsdp_unit_summoned_grad(fsdp_unit *unit, int i, float **grad) FSDP_NODISCARD;

/* Parameter i, whole, into host memory: numel floats. Any rank may pass NULL: it takes part, and gets nothing. */
FSDP_API fsdp_status fsdp_unit_read_param(fsdp_unit *unit, int i, float *out) FSDP_NODISCARD;

/* ---- slices: for optimizers, files, averages ---- */

/* A part of a parameter that this rank keeps. Edges of slices need not be edges of parameters. */
typedef struct fsdp_slice {
    const char *name; /* of the parameter */
    int param;
    int64_t offset;   /* of its first element, in the parameter */
    int64_t numel;
    float *master;    /* device address, on the storage device */
    const float *grad; /* within a step: device address; NULL where the unit has no gradients, or the parameter is frozen */
    int64_t state_offset; /* of its first element, in an array of fsdp_unit_slice_numel() that goes along with masters */
    bool frozen;      /* it is to be left as it is */
} fsdp_slice;

/* Not collective. The slices of this rank, in order; an empty rank has none. Borrowed until the next call for this
 * unit. In mode none: all of every parameter; in hybrid, what the other replicas keep too. */
FSDP_API void fsdp_unit_slices(fsdp_unit *unit, const fsdp_slice **out, int *count);
/* Not collective. How long an array of optimizer state is that has a value for every element this rank keeps. */
FSDP_API int64_t fsdp_unit_slice_numel(const fsdp_unit *unit);

/* Between begin and end masters may be written, on each unit's storage stream, and gradients are final. Outside of passes.
 * end publishes the masters and drops the gradients, when all ranks have come to it; cancel drops the gradients, and
 * nothing may have been written. A unit may be in a list once. Units may be of several communicators, and ranks may then
 * have different lists; of each communicator all its ranks list the same units in the same order. */
FSDP_API fsdp_status fsdp_step_begin(fsdp_unit_list units) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_step_end(fsdp_unit_list units) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_step_cancel(fsdp_unit_list units) FSDP_NODISCARD;

/* Within a step. The gradient of parameter i, whole, as summed (not scaled), into host memory: numel floats. Any rank may pass
 * NULL. FSDP_ERR_STATE where the unit has no gradients, or the parameter is frozen. */
FSDP_API fsdp_status fsdp_unit_read_grad(fsdp_unit *unit, int i, float *out) FSDP_NODISCARD;

/* Writes masters in place outside of a step, and publishes them; accumulated gradients stay. `write` is called once a unit, when all
 * ranks have come to this call; it launches on the unit's storage stream what writes its slices' masters. Where several ranks keep an
 * element, the one that adds up its gradients decides. Outside of passes, summons and steps. After an error of `write` nothing more is written or published: fsdp_comm_reset() makes what is there count. */
typedef fsdp_status (*fsdp_write_fn)(fsdp_unit *unit, const fsdp_slice *slices, int count, void *arg);
FSDP_API fsdp_status fsdp_units_rewrite(fsdp_unit_list units, fsdp_write_fn write, void *arg) FSDP_NODISCARD;

/* Drops accumulated gradients. Outside of passes and steps. */
FSDP_API fsdp_status fsdp_unit_zero_grad(fsdp_unit *unit) FSDP_NODISCARD;

/* Within a step. The 2-norm of all gradients of these units, which have one communicator: each element counted once, the same
 * bits on every rank and number of ranks. *weight (NULL: not wanted): the sum of the weights of all passes since the last
 * step, over all ranks. Other norms, and units of several communicators: fsdp_step_norm() (norm.h). */
FSDP_API fsdp_status fsdp_step_grad_norm(fsdp_unit_list units, double *norm, double *weight) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
