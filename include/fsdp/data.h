/* SPDX-License-Identifier: MIT
 *
 * Token data for language models: files as one row of token ids, which windows of it make the samples of a
 * run, and batches of them.
 *
 *     const char *paths[] = { "corpus-*.bin" };
 *     fsdp_dataset *ds;
 *     fsdp_sampler sampler;
 *     FSDP_TRY(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = paths, .path_count = 1, .seq = 128,
 *                                                           .vocab_size = 50257, .val_fraction = 0.1,
 *                                                           .part = FSDP_DATASET_TRAIN }));
 *     FSDP_TRY(fsdp_sampler_init(&sampler, fsdp_dataset_tokens(ds), 128, seed));
 *     for (int64_t step = first_step; step < steps; step++)
 *         FSDP_TRY(fsdp_dataset_batch(ds, &sampler, step * 8, 8, inputs, labels));
 *     fsdp_dataset_close(ds);
 *
 * Which samples a step sees is a function of the data's length, seq, the seed and the sample's number alone.
 * A sampler holds no state: a run that resumes, on any number of ranks, goes on with the next number.
 *
 * Not collective: nothing here talks to other ranks. Threads: a dataset that is open may be read from any
 * number of threads; samplers and eval windows are plain numbers.
 *
 * Files are untrusted: whatever is in them, a call returns a status whose message names the file, the
 * position and the numbers. Errors of all functions, unless more is said: FSDP_ERR_INVALID, an argument
 * (also: too few tokens for it); FSDP_ERR_IO, the operating system; FSDP_ERR_FORMAT, what a file says;
 * FSDP_ERR_NOMEM. */
#ifndef FSDP_DATA_H
#define FSDP_DATA_H

#include <fsdp/status.h>

FSDP_BEGIN_DECLS

/* The label of a position that is only padding: the cross entropy does not count it. */
#define FSDP_DATA_NO_LABEL (-100)

/* ---- datasets ------------------------------------------------------------------------------------------ */

/* Files of tokens, open for reading. */
typedef struct fsdp_dataset fsdp_dataset;

typedef enum fsdp_dataset_format {
    /* A file with the magic of a token file is one, and so is one whose name ends in .bin; all others are
     * text. What is plainly neither (an archive, a checkpoint, a git-lfs pointer) is refused. */
    FSDP_DATASET_AUTO,
    FSDP_DATASET_TEXT,   /* each byte is an id, 0 to 255 */
    FSDP_DATASET_TOKENS, /* llm.c's (.bin with a header of 256 int32: magic 20240520, uint16; 20240801,
                          * uint32), or nanoGPT's (.bin without a header: uint16, little-endian) */
} fsdp_dataset_format;

typedef enum fsdp_dataset_part {
    FSDP_DATASET_ALL,
    FSDP_DATASET_TRAIN, /* the first tokens: their number times (1 - val_fraction), rounded down */
    FSDP_DATASET_VAL,   /* the rest */
} fsdp_dataset_part;

typedef struct fsdp_dataset_opts {
    const char *const *paths; /* [path_count] files, or patterns as of a shell, each in the order of the
                               * names' bytes. The files' tokens follow one another in this order. Copied */
    int path_count;           /* at least 1 */
    fsdp_dataset_format format;
    int64_t vocab_size;  /* every id must be below; 0: any id that an int32_t holds */
    int64_t seq;         /* the part must have at least seq + 1 tokens; 0: one token */
    double val_fraction; /* in [0, 1); one cut over all files together */
    fsdp_dataset_part part;
} fsdp_dataset_opts;

/* Opens the files, checks their headers and lengths, and reads them all once to check their ids (not where no
 * id can be too large: 16-bit ids and a vocabulary of 65536). *out: to be closed by the caller. FSDP_ERR_IO:
 * a file that is not there, a folder, a pattern that nothing matches. FSDP_ERR_FORMAT: an empty file, a wrong
 * or byte-swapped header, a length that is not what the header says, an odd number of bytes, an id of
 * vocab_size or more. FSDP_ERR_INVALID: fewer tokens than seq + 1; the options. */
FSDP_API fsdp_status fsdp_dataset_open(fsdp_dataset **out, const fsdp_dataset_opts *opts) FSDP_NODISCARD;
/* NULL is accepted. */
FSDP_API void fsdp_dataset_close(fsdp_dataset *ds);

/* Tokens of the part that was opened; and of the files together. */
FSDP_API int64_t fsdp_dataset_tokens(const fsdp_dataset *ds);
FSDP_API int64_t fsdp_dataset_total(const fsdp_dataset *ds);
/* Whether ids are bytes of text. */
FSDP_API bool fsdp_dataset_is_text(const fsdp_dataset *ds);

/* Tokens [first, first + n) of the part. out: [n], undefined after an error. Ids are checked again, for the
 * file may have been rewritten since: FSDP_ERR_FORMAT; FSDP_ERR_IO where it was truncated. */
FSDP_API fsdp_status fsdp_dataset_read(const fsdp_dataset *ds, int64_t first, int64_t n,
                                       int32_t *out) FSDP_NODISCARD;

/* ---- samples ------------------------------------------------------------------------------------------- */

/* An epoch cuts the tokens, from an offset that it draws in [0, seq), into `windows` pieces of seq tokens,
 * each read with the one token after it: seq predictions. It visits all of them once, in an order of its own.
 * Every epoch has the same number of windows; up to 2 seq - 1 tokens at the two ends are left out, others
 * each epoch. (Data of less than two windows has one, at an offset as large as fits.) Read the fields, do not
 * set them. */
typedef struct fsdp_sampler {
    uint64_t seed;
    int64_t tokens, seq;
    int64_t windows; /* of an epoch */
    int64_t offsets; /* an epoch's offset is drawn from [0, offsets) */
} fsdp_sampler;

/* For `tokens` tokens (as of fsdp_dataset_tokens) and windows of seq + 1 of them. FSDP_ERR_INVALID: seq below
 * 1, or fewer than seq + 1 tokens. */
FSDP_API fsdp_status fsdp_sampler_init(fsdp_sampler *out, int64_t tokens, int64_t seq,
                                       uint64_t seed) FSDP_NODISCARD;
FSDP_API int64_t fsdp_sampler_windows_per_epoch(const fsdp_sampler *s);

/* Where sample number `sample` (>= 0) of the whole run is: in which epoch, at which place in its order, and
 * the first of its seq + 1 tokens. Each output may be NULL. */
FSDP_API fsdp_status fsdp_sampler_locate(const fsdp_sampler *s, int64_t sample, int64_t *epoch,
                                         int64_t *index, int64_t *first_token) FSDP_NODISCARD;

/* Samples [first_sample, first_sample + count) of the run. inputs, labels: [count, seq]; labels[i, t] is the
 * token after inputs[i, t]. Both undefined after an error. FSDP_ERR_INVALID: also a sampler that was made for
 * another length. */
FSDP_API fsdp_status fsdp_dataset_batch(const fsdp_dataset *ds, const fsdp_sampler *s, int64_t first_sample,
                                        int64_t count, int32_t *inputs, int32_t *labels) FSDP_NODISCARD;

/* ---- evaluation ---------------------------------------------------------------------------------------- */

/* Evaluation goes from the first token to the last in windows that do not overlap, so that each of the tokens
 * - 1 predictions is made exactly once, on any number of ranks: the number of windows, of which the last may
 * be short. */
FSDP_API fsdp_status fsdp_eval_windows(int64_t tokens, int64_t seq, int64_t *windows) FSDP_NODISCARD;
/* Window i: reads tokens [first, first + predictions + 1). */
FSDP_API fsdp_status fsdp_eval_window(int64_t tokens, int64_t seq, int64_t i, int64_t *first,
                                      int64_t *predictions) FSDP_NODISCARD;

/* Windows [first_window, first_window + count) of the dataset. inputs, labels: [count, seq], undefined after
 * an error. What a window lacks, and all of a window beyond the last (so that every rank can make the same
 * number of batches), is input 0 and label FSDP_DATA_NO_LABEL. */
FSDP_API fsdp_status fsdp_dataset_eval_batch(const fsdp_dataset *ds, int64_t seq, int64_t first_window,
                                             int64_t count, int32_t *inputs, int32_t *labels) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
