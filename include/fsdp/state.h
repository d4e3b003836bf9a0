/* SPDX-License-Identifier: MIT
 *
 * State dictionaries: what a program has registered (checkpoint.h), as named tensors in host memory.
 *
 *     fsdp_state_read(&s, c, &(fsdp_state_opts){ .kind = FSDP_STATE_FULL, .rank0_only = true });
 *     fsdp_state_find(s, "h.0.ln_1.weight")->data ...      on rank 0
 *     fsdp_state_load(c, s, NULL);                          on any number of ranks, in any mode and wrapping
 *     fsdp_state_destroy(s);
 *
 * Three kinds. FULL: every tensor whole, on every rank or on rank 0. SHARDED: each element on one rank: this rank's pieces, with
 * name, whole shape and offset. LOCAL: the pieces that this rank keeps, for the same ranks, units and modes alone. A load asks
 * which elements there are on which rank, so it takes full, sharded and mixed ones alike. Of what each rank has for itself (buffers, ignored
 * parameters) the first two have rank 0's, for all ranks; the third has each rank's own.
 *
 * A dictionary is this rank's own copy: later training does not change it, nor does it the model. While one is made or loaded no
 * unit is whole; beside it a rank needs room for its slice of one unit.
 *
 * Threads: one at a time for an object. */
#ifndef FSDP_STATE_H
#define FSDP_STATE_H

#include <fsdp/checkpoint.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_state fsdp_state;

typedef enum fsdp_state_kind { FSDP_STATE_FULL, FSDP_STATE_SHARDED, FSDP_STATE_LOCAL } fsdp_state_kind;

typedef struct fsdp_state_opts {
    fsdp_state_kind kind;
    unsigned which;  /* FSDP_STATE_PARAMS | ... (checkpoint.h); 0: all that is registered */
    bool rank0_only; /* FULL: the other ranks get names and shapes, and no elements */
} fsdp_state_opts;

/* Elements [first, first + count) of a tensor. */
typedef struct fsdp_state_tensor {
    const char *name;
    fsdp_dtype dtype;
    int ndim; /* of the whole, as shape and numel */
    int64_t shape[FSDP_MAX_DIMS], numel;
    int64_t first, count; /* what is here; FULL: 0 and numel */
    void *data;           /* [count]; may be written. NULL where count is 0 */
    unsigned what;        /* FSDP_STATE_PARAMS, _BUFFERS or _OPTIM */
} fsdp_state_tensor;

/* Collective, outside of passes and steps; within a summon it reads what was last published, as fsdp_unit_param() does. Copies all
 * that is registered. Accumulated gradients are not in it, and stay. *out: destroyed by the caller, also after the model. */
FSDP_API fsdp_status fsdp_state_read(fsdp_state **out, fsdp_checkpoint *c, const fsdp_state_opts *opts) FSDP_NODISCARD;
FSDP_API void fsdp_state_destroy(fsdp_state *s); /* NULL is accepted */

/* Collective, outside of passes, steps and summons. Sets all that is registered. Every rank gives its dictionary, all with the same
 * names; a rank that has nothing may give NULL. Each element has to be on some rank. What is missing, unexpected, of another shape
 * or type is listed in one error on every rank, and nothing is changed (fsdp_load_opts: partial, cast, which, report). Texts are not
 * set. Accumulated gradients stay. FSDP_ERR_INVALID: ranks give different names; elements that are nowhere; whole dictionaries that
 * differ in values; a LOCAL one that was read from other slices. */
FSDP_API fsdp_status fsdp_state_load(fsdp_checkpoint *c, const fsdp_state *s, const fsdp_load_opts *opts) FSDP_NODISCARD;

/* ---- what is in one; not collective ---- */

FSDP_API fsdp_state_kind fsdp_state_get_kind(const fsdp_state *s);
FSDP_API int fsdp_state_count(const fsdp_state *s);
FSDP_API const fsdp_state_tensor *fsdp_state_at(const fsdp_state *s, int i); /* NULL: out of range */
/* The first piece of that name, or of what it is another name of; NULL: none. */
FSDP_API const fsdp_state_tensor *fsdp_state_find(const fsdp_state *s, const char *name);
FSDP_API size_t fsdp_state_bytes(const fsdp_state *s); /* of all elements that are here */

/* FSDP_ERR_INVALID: there is no such number. Counts of steps: "optim.steps.NAME". */
FSDP_API fsdp_status fsdp_state_i64(const fsdp_state *s, const char *name, int64_t *out) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_state_f64(const fsdp_state *s, const char *name, double *out) FSDP_NODISCARD;
FSDP_API const char *fsdp_state_text(const fsdp_state *s, const char *name); /* NULL: there is none */

/* ---- making and changing one; not collective ---- */

/* An empty one, of kind SHARDED: it is what its pieces are. */
FSDP_API fsdp_status fsdp_state_create(fsdp_state **out) FSDP_NODISCARD;
/* Copies a piece: name and elements. Pieces of a name have one type and shape and share no element. what 0: by its name. */
FSDP_API fsdp_status fsdp_state_add(fsdp_state *s, const fsdp_state_tensor *t) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_state_add_i64(fsdp_state *s, const char *name, int64_t value) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_state_add_f64(fsdp_state *s, const char *name, double value) FSDP_NODISCARD;
/* Copies all of another's pieces, and of its numbers those that are not there yet. On failure s may have some of them. */
FSDP_API fsdp_status fsdp_state_merge(fsdp_state *s, const fsdp_state *other) FSDP_NODISCARD;
/* Renames a parameter with its optimizer's state and steps, and its average; where both end with `*`, all that begin so: ("module.*", "*"). *renamed
 * (may be NULL): how many names. FSDP_ERR_INVALID, and nothing is renamed: a new name is taken. */
FSDP_API fsdp_status fsdp_state_rename(fsdp_state *s, const char *from, const char *to, int *renamed) FSDP_NODISCARD;
/* Removes a tensor or number; all that begin so, where it ends with `*`. Returns how many names. */
FSDP_API int fsdp_state_remove(fsdp_state *s, const char *name);

/* ---- as a file; not collective ---- */

/* One safetensors file; numbers go into its metadata. FSDP_ERR_INVALID: a tensor is not whole here. */
FSDP_API fsdp_status fsdp_state_write_file(const fsdp_state *s, const char *path) FSDP_NODISCARD;
/* Whatever fsdp_safetensors_open() takes, also of other programs: every tensor whole. */
FSDP_API fsdp_status fsdp_state_read_file(fsdp_state **out, const char *path) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
