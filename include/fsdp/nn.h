/* SPDX-License-Identifier: MIT
 *
 * Modules: a tree of layers with named parameters, and how units are made of them.
 *
 *     fsdp_linear(&layers[0], 6, 12, &(fsdp_linear_opts){ .bias = true });
 *     fsdp_linear(&layers[1], 12, 6, &(fsdp_linear_opts){ .bias = true });
 *     fsdp_sequential(&trunk, layers, 2);           takes the layers
 *     fsdp_wrap(&trunk, trunk, &opts);              takes the module, gives a module
 *
 * fsdp_wrap() makes a unit of all parameters below a module that are in no unit yet. It nests in any order: what is
 * inside can be wrapped before or after what is around it exists, and can have been initialised, summoned, evaluated
 * or trained before. Values that a parameter had before it was wrapped are kept.
 *
 * A module owns its children: destroying the outermost destroys all. A module that has been taken must not be
 * destroyed, or put elsewhere, by the caller. Threads: one at a time for a tree. */
#ifndef FSDP_NN_H
#define FSDP_NN_H

#include <fsdp/autograd.h>
#include <fsdp/ops.h>
#include <fsdp/random.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_module fsdp_module;

/* ---- layers; not collective. Their parameters are 0 until they are initialised ---- */

typedef struct fsdp_linear_opts {
    bool bias;
    bool in_out; /* the weight is [in, out], as GPT-2's Conv1D */
    fsdp_activation activation;
} fsdp_linear_opts;

/* Parameters: weight [out, in], bias [out]. */
FSDP_API fsdp_status fsdp_linear(fsdp_module **out, int64_t in, int64_t outputs, const fsdp_linear_opts *opts) FSDP_NODISCARD;
/* Parameter: weight [rows, width]. Input: i32 ids. */
FSDP_API fsdp_status fsdp_embedding(fsdp_module **out, int64_t rows, int64_t width) FSDP_NODISCARD;
/* Parameters: weight [width], bias [width]. eps 0: 1e-5. */
FSDP_API fsdp_status fsdp_layer_norm(fsdp_module **out, int64_t width, float eps) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_activation_module(fsdp_module **out, fsdp_activation activation) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_dropout(fsdp_module **out, float p) FSDP_NODISCARD;

/* Runs its children one after another. Takes them; they are called "0", "1", ... */
FSDP_API fsdp_status fsdp_sequential(fsdp_module **out, fsdp_module *const *children, int count) FSDP_NODISCARD;

/* A module of your own: `forward` calls operations and fsdp_forward() of children. Takes the children; copies names.
 * ctx is yours; destroy (may be NULL) is called with it. A module that only holds its children needs no forward: it cannot be run,
 * they can. */
typedef fsdp_status (*fsdp_module_forward_fn)(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out);
typedef struct fsdp_module_opts {
    const char *type; /* a literal, for messages */
    fsdp_module_forward_fn forward;
    void *ctx;
    void (*destroy)(void *ctx);
    fsdp_module *const *children;
    const char *const *names;
    int child_count;
} fsdp_module_opts;
FSDP_API fsdp_status fsdp_module_create(fsdp_module **out, const fsdp_module_opts *opts) FSDP_NODISCARD;

/* How a parameter begins, unless told otherwise. */
typedef enum fsdp_param_init { FSDP_PARAM_ZEROS, FSDP_PARAM_ONES, FSDP_PARAM_UNIFORM, FSDP_PARAM_NORMAL } fsdp_param_init;

/* Adds a parameter of your own; `scale` is the bound of UNIFORM, the standard deviation of NORMAL. */
FSDP_API fsdp_status fsdp_module_add_param(fsdp_module *m, const fsdp_param *param, fsdp_param_init init, float scale) FSDP_NODISCARD;
/* The tensor of parameter i of this module itself, for operations. Borrowed. */
FSDP_API fsdp_tensor *fsdp_module_param(fsdp_module *m, int i);
FSDP_API fsdp_module *fsdp_module_child(fsdp_module *m, int i); /* NULL: there is none */

/* A tensor that belongs to a module and is no parameter: running means, tables, masks. Each rank has its own, whole: no unit takes
 * it, nothing reduces it, and no param_dtype changes its type. */
typedef struct fsdp_buffer {
    const char *name;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    bool not_saved; /* can be computed again: checkpoints leave it out */
} fsdp_buffer;

/* Not collective. Adds a buffer with these values (numel of shape, copied; NULL: 0s). Its name, which is copied, is that of no parameter
 * or child of m's. */
FSDP_API fsdp_status fsdp_module_add_buffer(fsdp_module *m, const fsdp_buffer *buffer, const void *values) FSDP_NODISCARD;
/* Not collective. Buffer i of this module itself, for operations within its forward; it has no gradient. Lies on the tape's device from
 * the module's first use there on. Borrowed; NULL: there is none. */
FSDP_API fsdp_tensor *fsdp_module_buffer(fsdp_module *m, int i);
/* Not collective. Waits, and copies buffer i of this module itself from, or to, host memory: what is written counts for operations
 * that are called from then on. In a forward that is run again (fsdp_module_set_recompute) a buffer that counts has been updated
 * already: see fsdp_tape_is_recomputing(). */
FSDP_API fsdp_status fsdp_module_read_buffer(fsdp_module *m, int i, void *out) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_module_write_buffer(fsdp_module *m, int i, const void *values) FSDP_NODISCARD;

typedef struct fsdp_module_buffer_info {
    const char *name; /* full; borrowed until the next listing of this tree */
    const fsdp_buffer *buffer;
    fsdp_module *module; /* that has it, as number `index` of its own */
    int index;
} fsdp_module_buffer_info;
/* Not collective. All buffers below and including m, children in order. Borrowed until the next call for m. */
FSDP_API fsdp_status fsdp_module_buffers(fsdp_module *m, const fsdp_module_buffer_info **out, int *count) FSDP_NODISCARD;

/* The whole tree below and including m. NULL is accepted. Collective if there are units in it. */
FSDP_API void fsdp_module_destroy(fsdp_module *m);

/* Runs a module on a tape. Collective if there are units in it. */
FSDP_API fsdp_status fsdp_forward(fsdp_module *m, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out) FSDP_NODISCARD;

/* Not collective. Activation checkpointing: of the module's forward only its input is kept, and the backward runs it again. It
 * costs a forward, and gives the same bits: dropout draws what it drew. Where m has a unit, the unit is around it. */
FSDP_API void fsdp_module_set_recompute(fsdp_module *m, bool on);

/* ---- hooks ---- */

/* Called in this order: before_forward, after_forward, before_backward (before the first operation of the module goes
 * back), after_backward (after the last gradient of its parameters). Of nested modules the outer's before_* comes first
 * and its after_* last. A forward that is computed again (fsdp_module_set_recompute) calls before_forward and after_forward of
 * modules within it again. A unit's own gathers come before before_* hooks, its reshards after after_* hooks. */
typedef struct fsdp_hooks {
    fsdp_status (*before_forward)(fsdp_module *m, fsdp_tape *tape, void *arg);
    fsdp_status (*after_forward)(fsdp_module *m, fsdp_tape *tape, void *arg);
    fsdp_status (*before_backward)(fsdp_module *m, fsdp_tape *tape, void *arg);
    fsdp_status (*after_backward)(fsdp_module *m, fsdp_tape *tape, void *arg);
    void *arg;
} fsdp_hooks;

FSDP_API fsdp_status fsdp_module_add_hooks(fsdp_module *m, const fsdp_hooks *hooks) FSDP_NODISCARD;

/* ---- units ---- */

typedef struct fsdp_wrap_policy fsdp_wrap_policy; /* wrap.h */

typedef struct fsdp_wrap_opts {
    fsdp_comm *comm; /* of the ranks that share the module: all, or those that have this expert. A tape takes both (autograd.h) */
    const char *name; /* of the unit; NULL: the module's type */
    fsdp_mode mode;
    int shards;       /* this and the rest as in fsdp_unit_opts */
    int reshard_group;
    fsdp_dtype param_dtype, reduce_dtype, grad_dtype; /* compute is F32 in any case */
    bool exact_eval;
    fsdp_device *storage_device, *grad_device, *compute_device;
    int prefetch;
    const fsdp_wrap_policy *policy; /* which modules inside get units of their own; NULL: none */
    /* Bytes. Parameters that are smaller (norms, biases) go into a second unit, "NAME.small", which stays whole until they change
     * (mode optimizer), in F32 whatever these types are: fewer gathers, and exact norms, for little memory. 0: none. In
     * modes optimizer and none all is whole anyway. */
    int64_t keep_whole_below;
    /* The values that rank 0's module has count on all ranks, also those of buffers; the others' need have none. false: each rank's slice of its own
     * counts, and if they differ that is logged, as by a summon (fsdp_unit_summon_opts). */
    bool from_rank0;
} fsdp_wrap_opts;

/* Collective. *out: the module to use from now on (m itself, or one around it where m has a unit already). On failure
 * m is as it was and still the caller's. */
FSDP_API fsdp_status fsdp_wrap(fsdp_module **out, fsdp_module *m, const fsdp_wrap_opts *opts) FSDP_NODISCARD;

/* The units in the tree, the outer before the inner. Borrowed until the tree is wrapped again or destroyed. None, with an
 * error for fsdp_last_error(), where there is no memory for the list. */
FSDP_API fsdp_unit_list fsdp_module_units(fsdp_module *m);

/* A parameter of a tree, with its full name ("0.1.weight"). */
typedef struct fsdp_module_param_info {
    const char *name;   /* borrowed until the next listing of this tree */
    fsdp_param param;   /* its name is the last part */
    fsdp_unit *unit;    /* NULL: not wrapped */
    int index;          /* in the unit */
    bool frozen, ignored;
    const char *const *aliases; /* its other names below m, where modules share it */
    int alias_count;
} fsdp_module_param_info;

/* All parameters below and including m, children in order; each once. Borrowed until the next call for m. */
FSDP_API fsdp_status fsdp_module_params(fsdp_module *m, const fsdp_module_param_info **out, int *count) FSDP_NODISCARD;
FSDP_API int64_t fsdp_module_numel(fsdp_module *m);

/* Freezes the parameters below m whose full name from m on fits the pattern (`*` is any text), or unfreezes them: before or
 * after they are wrapped. One that modules share has several names, any of which may fit. A frozen parameter has no gradient
 * (fsdp_unit_set_frozen); where nothing needs one, the backward does not go there at all. Collective where there are units; not
 * within passes and steps, or while there are gradients that no step has used. FSDP_ERR_INVALID where no parameter fits. */
FSDP_API fsdp_status fsdp_module_set_frozen(fsdp_module *m, const char *pattern, bool frozen) FSDP_NODISCARD;

/* Not collective, and the same on every rank (fsdp_wrap() checks it). Parameters below m whose full name from m on fits the pattern
 * are left alone by units, or not after all; to be said before they are wrapped, else FSDP_ERR_STATE. Of an ignored parameter each
 * rank has its own: whole, never gathered, reduced or compared, with the values that this rank gave it, and as gradient what this
 * rank's micro-batches brought. fsdp_wrap() puts those below it into a unit "NAME.ignored" on a communicator of this rank
 * alone (mode none), which fsdp_module_params() tells. It is not among fsdp_module_units(), so no optimizer, norm or average has
 * it unless you put it there: an optimizer of it alone divides by the weight of this rank's passes; one of all units, with
 * fsdp_step_opts.over, by that of all. A summon, an initialisation and a checkpoint of the module have it: rank 0's is saved, and all
 * ranks' are set by a load. fsdp_wrap_together() leaves it to the wrap around. FSDP_ERR_INVALID where no parameter fits. */
FSDP_API fsdp_status fsdp_module_set_ignored(fsdp_module *m, const char *pattern, bool ignored) FSDP_NODISCARD;

/* ---- summon and initialise ---- */

typedef struct fsdp_summon_opts {
    bool recurse;   /* also the units inside; else the unit of this module alone */
    bool writeback; /* what each rank writes to its own slices is kept */
    bool same, rank0_only, host, grads; /* as fsdp_unit_summon_opts */
} fsdp_summon_opts;

/* Collective. Until the end the parameters are whole, for fsdp_module_summoned() and fsdp_module_init(). Summons nest, of one
 * module or of several; the rules are those of fsdp_unit_summon_begin(). Parameters that are in no unit yet are what they
 * are: they need no summon. */
FSDP_API fsdp_status fsdp_summon_begin(fsdp_module *m, const fsdp_summon_opts *opts) FSDP_NODISCARD;
/* Of the summon of m that began last. Where units fail (fsdp_summon_opts.same), those that do stay summoned: end, or cancel, again. */
FSDP_API fsdp_status fsdp_summon_end(fsdp_module *m) FSDP_NODISCARD;
/* The same, but what was written to units is dropped. */
FSDP_API fsdp_status fsdp_summon_cancel(fsdp_module *m) FSDP_NODISCARD;

/* A parameter while summoned, or in no unit. In host memory where fsdp_summon_opts.host asked for it or it is in no unit, else on
 * the unit's compute device. All NULL on ranks for which the summon is not (rank0_only). */
typedef struct fsdp_summoned_param {
    const float *value;
    float *write; /* the same, where it may be written; NULL: read-only */
    float *grad;  /* its accumulated gradient; NULL: not asked for, or none */
} fsdp_summoned_param;

/* Not collective. Of parameter i of fsdp_module_params(). FSDP_ERR_STATE where its unit is not summoned. */
FSDP_API fsdp_status fsdp_module_summoned(fsdp_module *m, int i, fsdp_summoned_param *out) FSDP_NODISCARD;

typedef enum fsdp_init_kind {
    FSDP_INIT_KAIMING, /* PyTorch's defaults: linear U(-1/sqrt(in), 1/sqrt(in)), embedding N(0, 1), norms 1 and 0 */
    FSDP_INIT_NORMAL,  /* GPT-2's: weights N(0, 0.02) or their own deviation, biases 0, norms 1 and 0 */
} fsdp_init_kind;

/* Not collective. Draws all parameters below m from a stream, in order. They must be unwrapped, or summoned with
 * writeback. Ranks whose streams differ each keep their slices of what they drew; the end of the summon, or the wrap, logs that.
 * A rank for which the summon is not (rank0_only) draws nothing. */
FSDP_API fsdp_status fsdp_module_init(fsdp_module *m, fsdp_init_kind kind, fsdp_rng *rng) FSDP_NODISCARD;

/* Collective where there are units. The same, each value a function of (seed, full name from m on, element) alone: the
 * same bits on any number of ranks, in any wrapping, and no unit is ever whole for it. Parameters of a unit that are not below m stay
 * as they are. Seeds that differ from rank to rank are
 * allowed: each slice has its owner's; that is logged once. */
FSDP_API fsdp_status fsdp_module_init_keyed(fsdp_module *m, fsdp_init_kind kind, uint64_t seed) FSDP_NODISCARD;

/* For fsdp_module_apply(): value[0 .. numel) is parameter `name` (its full name) of a module, whole, row-major, in host memory,
 * as it is now; what is left there is its new value. */
typedef fsdp_status (*fsdp_apply_fn)(const char *name, const fsdp_param *param, float *value, void *arg);

/* Collective where there are units. Calls fn on every rank for all parameters below m, in the order of fsdp_module_params(),
 * wrapped or not: with a stream of its own, the same on every rank, it gives what the unwrapped module gets. At most one unit is
 * whole at a time; new values are kept beside the old ones, a slice of each unit, until all are there. Where fn fails on a
 * rank, nothing is changed on any, and all return its error. Ranks that leave different values each keep their slices of them:
 * that is logged, as by a summon. Not while units are summoned, or in a pass or step. */
FSDP_API fsdp_status fsdp_module_apply(fsdp_module *m, fsdp_apply_fn fn, void *arg) FSDP_NODISCARD;

/* Not collective. FSDP_ERR_STATE where parameters below m never had values (they are 0), with the first ones' names and how many
 * they are. A module is built without values and takes no memory for them until it is initialised, wrapped or not. */
FSDP_API fsdp_status fsdp_module_check_set(fsdp_module *m) FSDP_NODISCARD;

/* fsdp_unit_check_replicas() of all units of m; collective. */
FSDP_API fsdp_status fsdp_module_check_replicas(fsdp_module *m) FSDP_NODISCARD;

/* Reads parameter i of fsdp_module_params() into host memory. Collective if it is in a unit. */
FSDP_API fsdp_status fsdp_module_read_param(fsdp_module *m, int i, float *out) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
