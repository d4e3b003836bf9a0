/* SPDX-License-Identifier: MIT
 *
 * Checkpoints: everything that a run needs to go on, in a folder, such that it is there whole or not at all.
 *
 * What is saved is registered by name: parameters, optimizer state, numbers, texts. Each rank writes the slices that it
 * keeps; any number of ranks, in any mode and wrapping, can load them, since they are found by name and element.
 *
 *     fsdp_checkpoint_create(&c, comm);
 *     fsdp_checkpoint_add_param(c, "h.0.ln_1.weight", unit, 0);    ...
 *     fsdp_checkpoint_add_optim(c, optim);
 *     fsdp_checkpoint_add_i64(c, "tokens", &tokens);
 *     fsdp_checkpoint_save(c, "out/checkpoints", step, 3);         out/checkpoints/step-00000100
 *     fsdp_checkpoint_load(c, "out/checkpoints/step-00000100");
 *
 * A folder holds a safetensors file for each rank that saved, and manifest.json with a checksum of each and of itself. It is
 * written under another name, flushed to the disk, and then renamed: so a folder called step-N with a manifest is
 * complete, whoever was killed when, and the one before it stays until the new one is.
 *
 * In memory instead of in a folder: state.h.
 *
 * Threads: one at a time for an object. A save in the background has a thread of its own, which is the object's matter. */
#ifndef FSDP_CHECKPOINT_H
#define FSDP_CHECKPOINT_H

#include <fsdp/average.h>
#include <fsdp/optim.h>

FSDP_BEGIN_DECLS

/* ---- what is saved ---- */

typedef struct fsdp_checkpoint fsdp_checkpoint;
typedef struct fsdp_module fsdp_module; /* nn.h */

/* Not collective. The communicator is borrowed. */
FSDP_API fsdp_status fsdp_checkpoint_create(fsdp_checkpoint **out, fsdp_comm *comm) FSDP_NODISCARD;
/* Waits for a save in the background; that it failed is then only logged. NULL is accepted. */
FSDP_API void fsdp_checkpoint_destroy(fsdp_checkpoint *c);

/* Not collective, but the same on every rank. Names are copied, and must differ; the rest is borrowed. */
/* Parameter `index` of a unit, saved as `name`. */
FSDP_API fsdp_status fsdp_checkpoint_add_param(fsdp_checkpoint *c, const char *name, fsdp_unit *unit, int index) FSDP_NODISCARD;
/* All parameters of a tree of modules, which must be in units, and all buffers but those that are not to be saved: each is saved as
 * `prefix` (NULL: "") and its full name. The other names of a shared one are its second names: see fsdp_checkpoint_add_alias(). Of what each
 * rank has for itself (buffers, ignored parameters) rank 0's is saved, and all ranks' are set by a load. */
FSDP_API fsdp_status fsdp_checkpoint_add_module(fsdp_checkpoint *c, const char *prefix, fsdp_module *m) FSDP_NODISCARD;
/* An array that goes along with a unit's slices (fsdp_slice.state_offset), on its storage device: the part of it that belongs to a parameter. */
FSDP_API fsdp_status fsdp_checkpoint_add_state(fsdp_checkpoint *c, const char *name, fsdp_unit *unit, int index, float *state) FSDP_NODISCARD;
/* All state of an optimizer for the parameters added so far: "optim.exp_avg.NAME" and so on, and the counts of steps. */
FSDP_API fsdp_status fsdp_checkpoint_add_optim(fsdp_checkpoint *c, fsdp_optim *optim) FSDP_NODISCARD;
/* A moving average, of the parameters added so far: "ema.NAME". */
FSDP_API fsdp_status fsdp_checkpoint_add_ema(fsdp_checkpoint *c, fsdp_ema *ema) FSDP_NODISCARD;
/* The state of a loss scaler: "scaler.scale", "scaler.good_steps", "scaler.skipped". */
FSDP_API fsdp_status fsdp_checkpoint_add_scaler(fsdp_checkpoint *c, fsdp_scaler *scaler) FSDP_NODISCARD;
/* A tensor in host memory, whole on every rank, that is no parameter (running means): rank 0's is saved, all ranks' are set by
 * a load. data: borrowed. */
FSDP_API fsdp_status fsdp_checkpoint_add_buffer(fsdp_checkpoint *c, const char *name, fsdp_dtype dtype, int ndim, const int64_t *shape, void *data) FSDP_NODISCARD;
/* A second name of a tensor added before (tied weights): it is saved once, under `of`, and loaded under either. Optimizer state and
 * averages that are added after it have second names alike: "optim.exp_avg.NAME". */
FSDP_API fsdp_status fsdp_checkpoint_add_alias(fsdp_checkpoint *c, const char *name, const char *of) FSDP_NODISCARD;
/* Numbers and texts of the whole run: rank 0's are saved, all ranks' are set by a load. A text is copied now; a load
 * checks nothing of it (see fsdp_checkpoint_reader_text). */
FSDP_API fsdp_status fsdp_checkpoint_add_i64(fsdp_checkpoint *c, const char *name, int64_t *value) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_checkpoint_add_f64(fsdp_checkpoint *c, const char *name, double *value) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_checkpoint_add_text(fsdp_checkpoint *c, const char *name, const char *text) FSDP_NODISCARD;

/* ---- saving ---- */

/* Collective, outside of passes and steps. Writes folder/step-%08d and removes all but the `keep` newest complete ones there (0:
 * removes none). An existing folder of that step is replaced. After FSDP_OK it is on the disk. On failure, the same on every
 * rank, nothing of it is left and older checkpoints are as they were. */
FSDP_API fsdp_status fsdp_checkpoint_save(fsdp_checkpoint *c, const char *folder, int64_t step, int keep) FSDP_NODISCARD;

typedef struct fsdp_save_opts {
    int keep;         /* as above */
    bool background;  /* copy what this rank saves into host memory, return, and write from a thread: training goes on */
    size_t most_bytes; /* of such a copy, of each rank; 0: any number. Where a rank's would be larger, or it has no memory for it, all
                          ranks save in the foreground */
    bool *in_background; /* (may be NULL) whether it is: the same on every rank */
} fsdp_save_opts;

/* The same. A save in the background writes the same bytes as one in the foreground at this place, whatever changes meanwhile.
 * One that is not done yet is waited for first; if that one failed, its error is returned, and nothing new is begun. */
FSDP_API fsdp_status fsdp_checkpoint_save_with(fsdp_checkpoint *c, const char *folder, int64_t step, const fsdp_save_opts *opts) FSDP_NODISCARD;

/* Not collective, and the same on every rank. Waits for the save in the background, if there is one: after FSDP_OK it is on
 * the disk. Its error is returned once, here or by the next save. A program that ends without it loses that save, no other. */
FSDP_API fsdp_status fsdp_checkpoint_wait(fsdp_checkpoint *c) FSDP_NODISCARD;
/* Not collective. Whether fsdp_checkpoint_wait() would wait; ranks see it end at different times. */
FSDP_API bool fsdp_checkpoint_is_saving(const fsdp_checkpoint *c);
/* Not collective. Bytes of host memory that the copy takes now, on this rank: 0 when it has been written. */
FSDP_API size_t fsdp_checkpoint_staged_bytes(const fsdp_checkpoint *c);

/* ---- loading ---- */

/* Kinds of what is registered. */
enum {
    FSDP_STATE_PARAMS = 1,
    FSDP_STATE_BUFFERS = 2,
    FSDP_STATE_OPTIM = 4,  /* arrays along slices, and counts of steps */
    FSDP_STATE_VALUES = 8, /* numbers and texts */
    FSDP_STATE_ALL = 15,
};

/* What did not fit. */
typedef struct fsdp_load_report {
    int loaded;     /* entries that were */
    int missing;    /* registered, and not there */
    int unexpected; /* tensors that are there, and not registered, though others of their kind are */
    int shape;      /* of another shape */
    int dtype;      /* of another type */
    char text[1024]; /* their names, as far as there is room */
} fsdp_load_report;

typedef struct fsdp_load_opts {
    unsigned which; /* FSDP_STATE_PARAMS | ...: what is loaded; 0: all that is registered */
    bool partial;   /* load what fits and leave the rest as it is (PyTorch: strict = False); false: what does not fit is an error */
    bool cast;      /* parameters and state of other floating types are converted; false: they do not fit */
    fsdp_load_report *report; /* (may be NULL) written on success */
} fsdp_load_opts;

/* Collective, outside of passes, steps and summons. Reads and verifies a checkpoint (its own path, not the folder around it) and
 * sets all that is registered. What is missing, unexpected, of another shape or type is listed in one error, and nothing is
 * changed; a file that is missing or damaged is named. Accumulated gradients stay: see fsdp_unit_zero_grad(). */
FSDP_API fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *c, const char *path) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_checkpoint_load_with(fsdp_checkpoint *c, const char *path, const fsdp_load_opts *opts) FSDP_NODISCARD;

/* Not collective. The path of the newest complete checkpoint in folder, into `path` (size bytes), and its step. *skipped (may
 * be NULL): how many newer folders there were that are not complete. FSDP_ERR_IO: there is none. */
FSDP_API fsdp_status fsdp_checkpoint_latest(const char *folder, char *path, size_t size, int64_t *step, int *skipped) FSDP_NODISCARD;

/* ---- what is in one; not collective ---- */

typedef struct fsdp_checkpoint_reader fsdp_checkpoint_reader;

typedef struct fsdp_checkpoint_entry {
    const char *name;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    int64_t numel;
    int pieces; /* in how many parts it is saved */
    unsigned what; /* FSDP_STATE_PARAMS, _BUFFERS or _OPTIM */
} fsdp_checkpoint_entry;

typedef struct fsdp_checkpoint_file {
    const char *name;
    int64_t bytes;
} fsdp_checkpoint_file;

/* Reads the manifest and checks it; opens the files when they are first read. */
FSDP_API fsdp_status fsdp_checkpoint_reader_open(fsdp_checkpoint_reader **out, const char *path) FSDP_NODISCARD;
FSDP_API void fsdp_checkpoint_reader_close(fsdp_checkpoint_reader *r); /* NULL is accepted */
FSDP_API int64_t fsdp_checkpoint_reader_step(const fsdp_checkpoint_reader *r);
FSDP_API int fsdp_checkpoint_reader_ranks(const fsdp_checkpoint_reader *r); /* how many ranks saved it */

/* Entries in the order of their names; an alias is found, and has no entry of its own. Borrowed. NULL: out of range, or not there. */
FSDP_API int fsdp_checkpoint_reader_count(const fsdp_checkpoint_reader *r);
FSDP_API const fsdp_checkpoint_entry *fsdp_checkpoint_reader_at(const fsdp_checkpoint_reader *r, int i);
FSDP_API const fsdp_checkpoint_entry *fsdp_checkpoint_reader_find(const fsdp_checkpoint_reader *r, const char *name);
/* Elements [first, first + numel), as floats; or as they lie in the file: numel * fsdp_dtype_bytes(dtype) bytes. */
FSDP_API fsdp_status fsdp_checkpoint_reader_read(fsdp_checkpoint_reader *r, const char *name, int64_t first, int64_t numel, float *out) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_checkpoint_reader_read_raw(fsdp_checkpoint_reader *r, const char *name, int64_t first, int64_t numel, void *out) FSDP_NODISCARD;

/* Second names, in their order; of: what is found under them, an entry or a number. Borrowed. NULL: out of range. */
typedef struct fsdp_checkpoint_alias {
    const char *name, *of;
} fsdp_checkpoint_alias;

FSDP_API int fsdp_checkpoint_reader_aliases(const fsdp_checkpoint_reader *r);
FSDP_API const fsdp_checkpoint_alias *fsdp_checkpoint_reader_alias(const fsdp_checkpoint_reader *r, int i);

/* FSDP_ERR_FORMAT where there is no such number. */
FSDP_API fsdp_status fsdp_checkpoint_reader_i64(const fsdp_checkpoint_reader *r, const char *name, int64_t *out) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_checkpoint_reader_f64(const fsdp_checkpoint_reader *r, const char *name, double *out) FSDP_NODISCARD;
FSDP_API const char *fsdp_checkpoint_reader_text(const fsdp_checkpoint_reader *r, const char *name); /* NULL: there is none */

FSDP_API int fsdp_checkpoint_reader_files(const fsdp_checkpoint_reader *r);
FSDP_API const fsdp_checkpoint_file *fsdp_checkpoint_reader_file(const fsdp_checkpoint_reader *r, int i);
/* Reads the whole file and compares its length and checksum. FSDP_ERR_IO, FSDP_ERR_FORMAT name it. */
FSDP_API fsdp_status fsdp_checkpoint_reader_verify(fsdp_checkpoint_reader *r, int i) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
