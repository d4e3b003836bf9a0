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
 * Threads: one at a time for an object. */
#ifndef FSDP_CHECKPOINT_H
#define FSDP_CHECKPOINT_H

#include <fsdp/average.h>
#include <fsdp/optim.h>

FSDP_BEGIN_DECLS

/* ---- what is saved ---- */

typedef struct fsdp_checkpoint fsdp_checkpoint;

/* Not collective. The communicator is borrowed. */
FSDP_API fsdp_status fsdp_checkpoint_create(fsdp_checkpoint **out, fsdp_comm *comm) FSDP_NODISCARD;
FSDP_API void fsdp_checkpoint_destroy(fsdp_checkpoint *c); /* NULL is accepted */

/* Not collective, but the same on every rank. Names are copied, and must differ; the rest is borrowed. */
/* Parameter `index` of a unit, saved as `name`. */
FSDP_API fsdp_status fsdp_checkpoint_add_param(fsdp_checkpoint *c, const char *name, fsdp_unit *unit, int index) FSDP_NODISCARD;
/* An array that goes along with a unit's slices (fsdp_slice.state_offset): the part of it that belongs to a parameter. */
FSDP_API fsdp_status fsdp_checkpoint_add_state(fsdp_checkpoint *c, const char *name, fsdp_unit *unit, int index, float *state) FSDP_NODISCARD;
/* All state of an optimizer for the parameters added so far: "optim.exp_avg.NAME" and so on, and the counts of steps. */
FSDP_API fsdp_status fsdp_checkpoint_add_optim(fsdp_checkpoint *c, fsdp_optim *optim) FSDP_NODISCARD;
/* A moving average, of the parameters added so far: "ema.NAME". */
FSDP_API fsdp_status fsdp_checkpoint_add_ema(fsdp_checkpoint *c, fsdp_ema *ema) FSDP_NODISCARD;
/* The state of a loss scaler: "scaler.scale", "scaler.good_steps", "scaler.skipped". */
FSDP_API fsdp_status fsdp_checkpoint_add_scaler(fsdp_checkpoint *c, fsdp_scaler *scaler) FSDP_NODISCARD;
/* Numbers and texts of the whole run: rank 0's are saved, all ranks' are set by a load. A text is copied now; a load
 * checks nothing of it (see fsdp_checkpoint_reader_text). */
FSDP_API fsdp_status fsdp_checkpoint_add_i64(fsdp_checkpoint *c, const char *name, int64_t *value) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_checkpoint_add_f64(fsdp_checkpoint *c, const char *name, double *value) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_checkpoint_add_text(fsdp_checkpoint *c, const char *name, const char *text) FSDP_NODISCARD;

/* Collective. Writes folder/step-%08d and removes all but the `keep` newest complete ones there (0: removes none). An
 * existing folder of that step is replaced. After FSDP_OK it is on the disk. On failure, the same on every rank, nothing of
 * it is left and older checkpoints are as they were. */
FSDP_API fsdp_status fsdp_checkpoint_save(fsdp_checkpoint *c, const char *folder, int64_t step, int keep) FSDP_NODISCARD;

/* Collective, outside of passes. Reads and verifies a checkpoint (its own path, not the folder around it) and sets all that is
 * registered. What is registered but not there, or of another shape, is listed in one error, and nothing is changed; a file
 * that is missing or damaged is named. What is there and not registered is left. */
FSDP_API fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *c, const char *path) FSDP_NODISCARD;

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

/* Entries in the order of their names. Borrowed. NULL: out of range, or not there. */
FSDP_API int fsdp_checkpoint_reader_count(const fsdp_checkpoint_reader *r);
FSDP_API const fsdp_checkpoint_entry *fsdp_checkpoint_reader_at(const fsdp_checkpoint_reader *r, int i);
FSDP_API const fsdp_checkpoint_entry *fsdp_checkpoint_reader_find(const fsdp_checkpoint_reader *r, const char *name);
FSDP_API fsdp_status fsdp_checkpoint_reader_read(fsdp_checkpoint_reader *r, const char *name, int64_t first, int64_t numel, float *out) FSDP_NODISCARD;

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
