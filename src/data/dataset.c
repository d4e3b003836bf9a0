/* SPDX-License-Identifier: MIT
 *
 * Files one after another as one row of tokens, and a part of that row. */
#include <fsdp/data.h>

#include "base/alloc.h"
#include "data/paths.h"
#include "data/tokenfile.h"

#include <string.h>

/* Invariants: starts[0] == 0, starts[i + 1] == starts[i] + files[i].tokens, starts[count] is the total;
 * 0 <= part_first, part_first + part_tokens <= total. */
struct fsdp_dataset {
    fsdpi_tokenfile *files;
    int64_t count;
    int64_t *starts; /* [count + 1] */
    int64_t limit;   /* every id is below */
    int64_t part_first, part_tokens;
};

static fsdp_status check_opts(const fsdp_dataset_opts *o)
{
    const int64_t most = (int64_t)1 << 31;
    FSDP_FAIL_IF(o == NULL || o->paths == NULL || o->path_count < 1, FSDP_ERR_INVALID,
                 "fsdp_dataset_opts.paths: %d files are named; at least 1 is needed",
                 o != NULL ? o->path_count : 0);
    FSDP_FAIL_IF((unsigned)o->format > FSDP_DATASET_TOKENS, FSDP_ERR_INVALID,
                 "fsdp_dataset_opts.format is %d, which is none", (int)o->format);
    FSDP_FAIL_IF((unsigned)o->part > FSDP_DATASET_VAL, FSDP_ERR_INVALID,
                 "fsdp_dataset_opts.part is %d, which is none", (int)o->part);
    FSDP_FAIL_IF(o->vocab_size < 0 || o->vocab_size > most, FSDP_ERR_INVALID,
                 "fsdp_dataset_opts.vocab_size is %lld; it should be 0 to %lld", (long long)o->vocab_size,
                 (long long)most);
    FSDP_FAIL_IF(o->seq < 0 || o->seq == INT64_MAX, FSDP_ERR_INVALID,
                 "fsdp_dataset_opts.seq is %lld; it should be 0 or more", (long long)o->seq);
    FSDP_FAIL_IF(!(o->val_fraction >= 0 && o->val_fraction < 1), FSDP_ERR_INVALID,
                 "fsdp_dataset_opts.val_fraction is %g; it should be at least 0 and below 1",
                 o->val_fraction);
    FSDP_FAIL_IF(o->part == FSDP_DATASET_VAL && o->val_fraction == 0, FSDP_ERR_INVALID,
                 "fsdp_dataset_opts.part is VAL and val_fraction is 0: there is nothing to evaluate on");
    return FSDP_OK;
}

static fsdp_status open_files(fsdp_dataset *ds, const fsdpi_paths *paths, const fsdp_dataset_opts *o)
{
    FSDPI_NEW(ds->files, paths->count);
    FSDPI_NEW(ds->starts, paths->count + 1);
    for (; ds->count < paths->count; ds->count++) {
        fsdpi_tokenfile *f = &ds->files[ds->count];
        FSDP_TRY(fsdpi_tokenfile_open(f, paths->path[ds->count], o->format,
                                      paths->count <= FSDPI_FILES_KEPT_OPEN));
        int64_t *start = &ds->starts[ds->count];
        if (__builtin_add_overflow(start[0], f->tokens, &start[1])) {
            fsdpi_tokenfile_close(f);
            FSDP_FAIL(FSDP_ERR_INVALID, "%s: the files up to this one have more than 2^63 tokens",
                      paths->path[ds->count]);
        }
    }
    for (int64_t i = 1; i < ds->count; i++)
        FSDP_FAIL_IF((ds->files[i].width == 1) != (ds->files[0].width == 1), FSDP_ERR_INVALID,
                     "%s is %s, but %s is %s: name files of one kind, or say which format they have",
                     ds->files[0].file.path, ds->files[0].width == 1 ? "text" : "tokens",
                     ds->files[i].file.path, ds->files[i].width == 1 ? "text" : "tokens");
    return FSDP_OK;
}

static fsdp_status choose_part(fsdp_dataset *ds, const fsdp_dataset_opts *o)
{
    static const char *const names[] = { "the data", "the training part", "the evaluation part" };
    int64_t total = ds->starts[ds->count];
    /* as int(n * 0.9) in the programs that people compare with */
    double cut = (double)total * (1 - o->val_fraction);
    int64_t train = o->val_fraction == 0 || cut >= (double)total ? total : (int64_t)cut;
    ds->part_first = o->part == FSDP_DATASET_VAL ? train : 0;
    ds->part_tokens = o->part == FSDP_DATASET_ALL     ? total
                      : o->part == FSDP_DATASET_TRAIN ? train
                                                      : total - train;
    long long needed = (long long)o->seq + 1;
    const char *others = ds->count == 1 ? "" : " and others";
    FSDP_FAIL_IF(ds->part_tokens < needed, FSDP_ERR_INVALID,
                 "%s%s: %s needs at least %lld tokens (seq %lld and one to predict), has %lld (of %lld; "
                 "val_fraction %g)",
                 ds->files[0].file.path, others, names[o->part], needed, (long long)o->seq,
                 (long long)ds->part_tokens, (long long)total, o->val_fraction);
    return FSDP_OK;
}

static fsdp_status check_ids(const fsdp_dataset *ds)
{
    for (int64_t i = 0; i < ds->count; i++) FSDP_TRY(fsdpi_tokenfile_check(&ds->files[i], ds->limit));
    return FSDP_OK;
}

fsdp_status fsdp_dataset_open(fsdp_dataset **out, const fsdp_dataset_opts *opts)
{
    fsdp_status st;
    fsdp_dataset *ds = NULL;
    fsdpi_paths paths = { 0 };
    FSDP_FAIL_IF(out == NULL, FSDP_ERR_INVALID, "fsdp_dataset_open: it needs a place for its result");
    FSDP_TRY(check_opts(opts));
    FSDP_TRY(fsdpi_paths_expand(&paths, opts->paths, opts->path_count));
    ds = fsdpi_calloc(1, sizeof(*ds));
    if (ds == NULL) FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, close_dataset, "no memory for a dataset");
    ds->limit = opts->vocab_size > 0 ? opts->vocab_size : (int64_t)1 << 31;
    FSDP_TRY_GOTO(open_files(ds, &paths, opts), close_dataset);
    FSDP_TRY_GOTO(choose_part(ds, opts), close_dataset);
    FSDP_TRY_GOTO(check_ids(ds), close_dataset);
    fsdpi_paths_free(&paths);
    *out = ds;
    return FSDP_OK;
close_dataset:
    fsdpi_paths_free(&paths);
    fsdp_dataset_close(ds);
    return st;
}

void fsdp_dataset_close(fsdp_dataset *ds)
{
    if (ds == NULL) return;
    for (int64_t i = 0; i < ds->count; i++) fsdpi_tokenfile_close(&ds->files[i]);
    fsdpi_free(ds->files);
    fsdpi_free(ds->starts);
    fsdpi_free(ds);
}

int64_t fsdp_dataset_tokens(const fsdp_dataset *ds)
{
    return ds->part_tokens;
}

int64_t fsdp_dataset_total(const fsdp_dataset *ds)
{
    return ds->starts[ds->count];
}

bool fsdp_dataset_is_text(const fsdp_dataset *ds)
{
    return ds->files[0].width == 1;
}

/* The file that has token `at` of the row. */
static int64_t file_of(const fsdp_dataset *ds, int64_t at)
{
    int64_t low = 0, high = ds->count - 1;
    while (low < high) {
        int64_t mid = low + (high - low + 1) / 2;
        if (ds->starts[mid] <= at)
            low = mid;
        else
            high = mid - 1;
    }
    return low;
}

fsdp_status fsdp_dataset_read(const fsdp_dataset *ds, int64_t first, int64_t n, int32_t *out)
{
    FSDP_FAIL_IF(first < 0 || n < 0 || first > ds->part_tokens || n > ds->part_tokens - first,
                 FSDP_ERR_INVALID, "%lld tokens from number %lld are asked for; the data has %lld",
                 (long long)n, (long long)first, (long long)ds->part_tokens);
    int64_t at = ds->part_first + first;
    for (int64_t i = n > 0 ? file_of(ds, at) : 0; n > 0; i++) {
        int64_t left = ds->starts[i + 1] - at, k = n < left ? n : left;
        FSDP_TRY(fsdpi_tokenfile_read(&ds->files[i], at - ds->starts[i], k, ds->limit, out));
        out += k;
        at += k;
        n -= k;
    }
    return FSDP_OK;
}

static fsdp_status check_batch(int64_t count, int64_t seq)
{
    int64_t n;
    FSDP_FAIL_IF(count < 0 || seq < 1 || __builtin_mul_overflow(count, seq, &n) || n > (INT64_MAX >> 3),
                 FSDP_ERR_INVALID, "a batch of %lld windows of %lld tokens", (long long)count,
                 (long long)seq);
    return FSDP_OK;
}

/* Tokens [first, first + n + 1) as n inputs and the n labels after them. */
static fsdp_status read_window(const fsdp_dataset *ds, int64_t first, int64_t n, int32_t *inputs,
                               int32_t *labels)
{
    FSDP_TRY(fsdp_dataset_read(ds, first, n, inputs));
    memcpy(labels, inputs + 1, (size_t)(n - 1) * sizeof(*labels));
    FSDP_TRY(fsdp_dataset_read(ds, first + n, 1, labels + n - 1));
    return FSDP_OK;
}

fsdp_status fsdp_dataset_batch(const fsdp_dataset *ds, const fsdp_sampler *s, int64_t first_sample,
                               int64_t count, int32_t *inputs, int32_t *labels)
{
    FSDP_TRY(check_batch(count, s->seq));
    FSDP_FAIL_IF(s->tokens != ds->part_tokens, FSDP_ERR_INVALID,
                 "the sampler was made for %lld tokens; the data has %lld", (long long)s->tokens,
                 (long long)ds->part_tokens);
    FSDP_FAIL_IF(first_sample < 0 || first_sample > INT64_MAX - count, FSDP_ERR_INVALID,
                 "samples %lld and %lld after it", (long long)first_sample, (long long)count);
    for (int64_t i = 0; i < count; i++) {
        int64_t first;
        FSDP_TRY(fsdp_sampler_locate(s, first_sample + i, NULL, NULL, &first));
        FSDP_TRY(read_window(ds, first, s->seq, inputs + i * s->seq, labels + i * s->seq));
    }
    return FSDP_OK;
}

fsdp_status fsdp_dataset_eval_batch(const fsdp_dataset *ds, int64_t seq, int64_t first_window, int64_t count,
                                    int32_t *inputs, int32_t *labels)
{
    int64_t windows;
    FSDP_TRY(fsdp_eval_windows(ds->part_tokens, seq, &windows));
    FSDP_TRY(check_batch(count, seq));
    FSDP_FAIL_IF(first_window < 0 || first_window > INT64_MAX - count, FSDP_ERR_INVALID,
                 "windows %lld and %lld after it", (long long)first_window, (long long)count);
    for (int64_t i = 0; i < count; i++, inputs += seq, labels += seq) {
        int64_t first = 0, n = 0;
        if (first_window + i < windows) {
            FSDP_TRY(fsdp_eval_window(ds->part_tokens, seq, first_window + i, &first, &n));
            FSDP_TRY(read_window(ds, first, n, inputs, labels));
        }
        for (int64_t k = n; k < seq; k++) {
            inputs[k] = 0;
            labels[k] = FSDP_DATA_NO_LABEL;
        }
    }
    return FSDP_OK;
}
