/* SPDX-License-Identifier: MIT
 *
 * safetensors files: named tensors with a JSON header, as Hugging Face publishes models. Reading takes one
 * file, or a folder of shards with an index, as one set; writing streams into one file, which appears under
 * its name only when it is whole.
 *
 *     fsdp_safetensors *model;
 *     FSDP_TRY(fsdp_safetensors_open(&model, "gpt2/"));
 *     const fsdp_safetensors_tensor *t = fsdp_safetensors_find(model, "wte.weight");
 *     if (t != NULL) FSDP_TRY(fsdp_safetensors_read_f32(model, t, 0, t->numel, values));
 *     fsdp_safetensors_close(model);
 *
 *     const int64_t shape[] = { 3, 4 };
 *     const fsdp_safetensors_decl decls[] = { { "w", FSDP_BF16, 2, shape } };
 *     fsdp_safetensors_writer *w;
 *     FSDP_TRY(fsdp_safetensors_writer_open(&w, "out.safetensors", decls, 1, NULL, 0));
 *     fsdp_status st = fsdp_safetensors_writer_write_f32(w, 0, 0, 12, values);
 *     if (st == FSDP_OK) st = fsdp_safetensors_writer_finish(w);
 *     fsdp_safetensors_writer_close(w);
 *
 * Not collective: nothing here talks to other ranks. Threads: a set that is open may be read from any number
 * of threads; a writer is used from one at a time.
 *
 * Elements are counted in row-major order. Files are untrusted: whatever is in them, a call returns a status
 * whose message names the file, the tensor and the numbers. Errors of all functions, unless more is said:
 * FSDP_ERR_INVALID, an argument; FSDP_ERR_IO, the operating system; FSDP_ERR_FORMAT, what the file says;
 * FSDP_ERR_NOMEM. */
#ifndef FSDP_SAFETENSORS_H
#define FSDP_SAFETENSORS_H

#include <fsdp/dtype.h>

FSDP_BEGIN_DECLS

/* A string of the header's "__metadata__". */
typedef struct fsdp_safetensors_string {
    const char *key, *value;
} fsdp_safetensors_string;

/* ---- reading ------------------------------------------------------------------------------------------- */

/* A file or a set of shards, open for reading. */
typedef struct fsdp_safetensors fsdp_safetensors;

/* A tensor of a set. All that it points to belongs to the set. */
typedef struct fsdp_safetensors_tensor {
    const char *name;
    fsdp_dtype dtype;
    int ndim;             /* 0: a scalar, which has one element */
    const int64_t *shape; /* [ndim]; may have zeros */
    int64_t numel;
    size_t bytes;
    const char *file; /* the path of the file that it is in */
    int64_t offset;   /* of its first byte in that file; need not be aligned */
} fsdp_safetensors_tensor;

/* Opens a file; or a Hugging Face index (a name that ends in .json) with its shards; or a folder: its
 * model.safetensors, else its model.safetensors.index.json, else the only index or the only .safetensors file
 * in it. Every header is read and checked, no data. Where the index and the shards disagree about a name, the
 * index decides; tensors that the index does not list are also seen. *out: to be closed by the caller.
 * FSDP_ERR_FORMAT: not a safetensors file (the message says what it seems to be), a wrong header, a file that
 * is shorter or longer than its header says, an element type that fsdp does not know, an index that names
 * what is not there. */
FSDP_API fsdp_status fsdp_safetensors_open(fsdp_safetensors **out, const char *path) FSDP_NODISCARD;
/* NULL is accepted. Ends the life of every tensor and string of the set. */
FSDP_API void fsdp_safetensors_close(fsdp_safetensors *st);

/* How many tensors there are, and the i-th: file by file in the order of their names, and by offset in a
 * file. NULL where i is out of range. */
FSDP_API int64_t fsdp_safetensors_count(const fsdp_safetensors *st);
FSDP_API const fsdp_safetensors_tensor *fsdp_safetensors_at(const fsdp_safetensors *st, int64_t i);
/* By name; NULL where there is none. */
FSDP_API const fsdp_safetensors_tensor *fsdp_safetensors_find(const fsdp_safetensors *st, const char *name);

/* The strings of "__metadata__", in the order of the file; in a set, those of the first file that has any.
 * metadata_at: NULL out of range. metadata_find: NULL where there is none. */
FSDP_API int64_t fsdp_safetensors_metadata_count(const fsdp_safetensors *st);
FSDP_API const fsdp_safetensors_string *fsdp_safetensors_metadata_at(const fsdp_safetensors *st, int64_t i);
FSDP_API const char *fsdp_safetensors_metadata_find(const fsdp_safetensors *st, const char *key);

/* Reads elements [first, first + numel) of a tensor of this set, as floats: F32 and the wider and narrower
 * floating types (F64 is rounded; beyond float's range it becomes infinite). out: [numel], undefined after an
 * error. FSDP_ERR_INVALID: the range; a tensor of another set; integers (read those raw). FSDP_ERR_IO: also
 * where the file was truncated after it was opened. */
FSDP_API fsdp_status fsdp_safetensors_read_f32(const fsdp_safetensors *st, const fsdp_safetensors_tensor *t,
                                               int64_t first, int64_t numel, float *out) FSDP_NODISCARD;
/* The same as they lie in the file: out has numel * fsdp_dtype_bytes(t->dtype) bytes. */
FSDP_API fsdp_status fsdp_safetensors_read_raw(const fsdp_safetensors *st, const fsdp_safetensors_tensor *t,
                                               int64_t first, int64_t numel, void *out) FSDP_NODISCARD;

/* ---- writing ------------------------------------------------------------------------------------------- */

/* A file that is being written. */
typedef struct fsdp_safetensors_writer fsdp_safetensors_writer;

/* A tensor that is to be written. */
typedef struct fsdp_safetensors_decl {
    const char *name; /* not empty, not "__metadata__", UTF-8 */
    fsdp_dtype dtype; /* of the file */
    int ndim;
    const int64_t *shape; /* [ndim] */
} fsdp_safetensors_decl;

/* Starts the file `path`: creates a temporary beside it (PATH.tmp-PID-N), reserves the space where the file
 * system can, and writes the header: "__metadata__" with {"format":"pt"} and the given strings (sorted), then
 * the tensors by falling alignment and by name. The same declarations give the same bytes, in whatever order
 * they come. Copies all that it is given. *out: to be closed by the caller. FSDP_ERR_INVALID: two tensors or
 * keys of one name, "format" other than "pt", a negative or too large shape, a name that is not UTF-8.
 * FSDP_ERR_IO: no room; the message has the bytes needed and free. */
FSDP_API fsdp_status fsdp_safetensors_writer_open(fsdp_safetensors_writer **out, const char *path,
                                                  const fsdp_safetensors_decl *tensors, int64_t count,
                                                  const fsdp_safetensors_string *metadata,
                                                  int64_t metadata_count) FSDP_NODISCARD;

/* Writes elements [first, first + numel) of the tensor that was declared as number `tensor`: from floats,
 * which are rounded to its type (F32, F64, BF16, F16), or as bytes that are of its type already. Ranges come
 * in any order, each element once. A range whose write failed may be written again. FSDP_ERR_INVALID: outside
 * the tensor, or elements that were written before. FSDP_ERR_STATE: after the finish. */
FSDP_API fsdp_status fsdp_safetensors_writer_write_f32(fsdp_safetensors_writer *w, int64_t tensor,
                                                       int64_t first, int64_t numel,
                                                       const float *data) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_safetensors_writer_write_raw(fsdp_safetensors_writer *w, int64_t tensor,
                                                       int64_t first, int64_t numel,
                                                       const void *data) FSDP_NODISCARD;

/* Checks that every element was written, flushes the file to the disk and gives it its name, replacing a file
 * that had it. FSDP_ERR_STATE: something was not written (the message says what); go on and finish again.
 * FSDP_ERR_IO: the old file, if any, is as it was. */
FSDP_API fsdp_status fsdp_safetensors_writer_finish(fsdp_safetensors_writer *w) FSDP_NODISCARD;

/* Frees the writer. Without a successful finish nothing appears, and the temporary is removed. NULL is
 * accepted. */
FSDP_API void fsdp_safetensors_writer_close(fsdp_safetensors_writer *w);

FSDP_END_DECLS

#endif
