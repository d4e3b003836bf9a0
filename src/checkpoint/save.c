/* SPDX-License-Identifier: MIT
 *
 * Saving. The order in which things become durable is the whole point:
 *
 *   1  a folder of another name (.step-N.tmp) is made, empty
 *   2  each rank writes its file there: data, fsync
 *   3  rank 0 writes the manifest, which names each file with length and checksum: data, fsync, fsync of the folder
 *   4  rank 0 renames the folder to step-N: fsync of the folder around it
 *
 * Whoever is killed before 4 leaves a folder that nobody takes for a checkpoint; after it, a complete one. Every step is
 * agreed upon: a rank that fails tells the others, and what was begun is removed. */
#include "checkpoint/registry.h"

#include "base/alloc.h"
#include "base/error.h"
#include "checkpoint/folder.h"
#include "comm/comm.h"
#include "format/fileio.h"
#include "shard/unit.h"

#include <fsdp/safetensors.h>

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum { CHUNK = 1 << 20 }; /* floats */

/* ---- a rank's file ---- */

static fsdp_status write_entry(fsdp_safetensors_writer *w, int64_t number, const fsdpi_entry *e, float *host)
{
    int64_t first, numel;
    float *at;
    fsdpi_entry_range(e, &first, &numel, &at);
    fsdp_stream *s = fsdp_unit_storage_stream(e->unit);
    for (int64_t done = 0; done < numel; done += CHUNK) {
        int64_t n = numel - done < CHUNK ? numel - done : CHUNK;
        FSDP_TRY(fsdp_stream_copy(s, host, at + done, (size_t)n * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(s));
        FSDP_TRY(fsdp_safetensors_writer_write_f32(w, number, done, n, host));
    }
    return FSDP_OK;
}

/* Entries of which this rank has something, as one-dimensional tensors. */
static int64_t declare(const fsdp_checkpoint *c, fsdp_safetensors_decl *decl, int64_t *shape, const fsdpi_entry **of)
{
    int64_t n = 0;
    for (int i = 0; i < c->count; i++) {
        int64_t first, numel;
        float *at;
        if (!fsdpi_entry_is_tensor(&c->entry[i])) continue;
        fsdpi_entry_range(&c->entry[i], &first, &numel, &at);
        if (numel == 0) continue;
        shape[n] = numel;
        of[n] = &c->entry[i];
        decl[n] = (fsdp_safetensors_decl){ .name = c->entry[i].name, .dtype = FSDP_F32, .ndim = 1, .shape = &shape[n] };
        n++;
    }
    return n;
}

static fsdp_status write_file(const fsdp_checkpoint *c, const char *path)
{
    fsdp_safetensors_decl *decl = fsdpi_calloc((size_t)c->count, sizeof(*decl));
    int64_t *shape = fsdpi_calloc((size_t)c->count, sizeof(*shape));
    const fsdpi_entry **of = fsdpi_calloc((size_t)c->count, sizeof(*of));
    float *host = fsdpi_calloc(CHUNK, sizeof(*host));
    fsdp_safetensors_writer *w = NULL;
    fsdp_status st = decl != NULL && shape != NULL && of != NULL && host != NULL
                         ? FSDP_OK
                         : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to save %d entries", c->count);
    int64_t n = st == FSDP_OK ? declare(c, decl, shape, of) : 0;
    if (st == FSDP_OK) st = fsdp_safetensors_writer_open(&w, path, decl, n, NULL, 0);
    for (int64_t i = 0; i < n && st == FSDP_OK; i++) st = write_entry(w, i, of[i], host);
    if (st == FSDP_OK) st = fsdp_safetensors_writer_finish(w);
    fsdp_safetensors_writer_close(w);
    fsdpi_free(host);
    fsdpi_free(of);
    fsdpi_free(shape);
    fsdpi_free(decl);
    return st;
}

/* ---- the manifest ---- */

/* What a rank tells rank 0 about its file, and about the ranges of entries in it. */
typedef struct file_info {
    uint64_t checksum;
    int64_t bytes;
    uint64_t registry; /* what it has registered: the same on all ranks */
} file_info;

typedef struct range {
    int64_t first, numel;
} range;

static int tensors_in(const fsdp_checkpoint *c)
{
    int n = 0;
    for (int i = 0; i < c->count; i++) n += fsdpi_entry_is_tensor(&c->entry[i]);
    return n;
}

static json_t *entries_json(const fsdp_checkpoint *c, const range *all, int tensors)
{
    json_t *entries = json_object();
    for (int i = 0, t = 0; i < c->count; i++) {
        const fsdpi_entry *e = &c->entry[i];
        if (!fsdpi_entry_is_tensor(e)) continue;
        const fsdp_param *p = fsdp_unit_param_info(e->unit, e->index);
        json_t *shape = json_array(), *pieces = json_array();
        for (int d = 0; d < p->ndim; d++) json_array_append_new(shape, json_integer(p->shape[d]));
        for (int r = 0; r < fsdp_comm_size(c->comm); r++) {
            const range *g = &all[r * tensors + t];
            if (g->numel > 0) json_array_append_new(pieces, json_pack("[iII]", r, (json_int_t)g->first, (json_int_t)g->numel));
        }
        json_object_set_new(entries, e->name, json_pack("{ss so so}", "dtype", "F32", "shape", shape, "pieces", pieces));
        t++;
    }
    return entries;
}

/* JSON has no word for numbers that are infinite or none: a best loss begins as one. */
static json_t *real_json(double x)
{
    return isfinite(x) ? json_real(x) : json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

static json_t *values_json(const fsdp_checkpoint *c)
{
    json_t *values = json_object();
    for (int i = 0; i < c->count; i++) {
        const fsdpi_entry *e = &c->entry[i];
        json_t *v = NULL;
        switch (e->kind) {
        case FSDPI_ENTRY_I64: v = json_integer(*(int64_t *)e->value); break;
        case FSDPI_ENTRY_F64: v = real_json(*(double *)e->value); break;
        case FSDPI_ENTRY_TEXT: v = json_string(e->text); break;
        case FSDPI_ENTRY_STEPS: v = json_integer(fsdp_optim_param_steps(e->optim, e->unit, e->index)); break;
        default: continue;
        }
        json_object_set_new(values, e->name, v);
    }
    return values;
}

/* The text ends with a checksum of all before it: fsdpi_manifest_checked() takes it off again. */
static fsdp_status manifest_text(const fsdp_checkpoint *c, int64_t step, const file_info *files, const range *all, int tensors, char **out)
{
    json_t *list = json_array();
    char name[64], sum[32];
    for (int r = 0; r < fsdp_comm_size(c->comm); r++) {
        fsdpi_shard_name(name, sizeof(name), r, fsdp_comm_size(c->comm));
        snprintf(sum, sizeof(sum), "%016llx", (unsigned long long)files[r].checksum);
        json_array_append_new(list, json_pack("{ss sI ss}", "name", name, "bytes", (json_int_t)files[r].bytes, "xxh3", sum));
    }
    json_t *root = json_pack("{ss si sI si so so so}", "format", "fsdp-checkpoint", "version", 1, "step", (json_int_t)step, "ranks",
                             fsdp_comm_size(c->comm), "files", list, "entries", entries_json(c, all, tensors), "values", values_json(c));
    char *text = root != NULL ? json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(root);
    FSDP_FAIL_IF(text == NULL, FSDP_ERR_NOMEM, "no memory for the manifest");
    size_t n = strlen(text);
    while (n > 0 && text[n - 1] != '}') n--;
    n--; /* over the closing brace, and the line before it */
    while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == ' ')) n--;
    char *whole = fsdpi_calloc(n + 64, 1);
    if (whole != NULL) {
        memcpy(whole, text, n);
        snprintf(whole + n, 64, ",\n \"checksum\": \"%016llx\"\n}\n", (unsigned long long)XXH3_64bits(whole, n));
    }
    free(text);
    FSDP_FAIL_IF(whole == NULL, FSDP_ERR_NOMEM, "no memory for the manifest");
    *out = whole;
    return FSDP_OK;
}

static fsdp_status write_manifest(const fsdp_checkpoint *c, const char *temp, int64_t step, const file_info *files, const range *all, int tensors)
{
    char path[4300], *text = NULL;
    snprintf(path, sizeof(path), "%s/" FSDPI_MANIFEST, temp);
    FSDP_TRY(manifest_text(c, step, files, all, tensors, &text));
    fsdp_status st = fsdpi_write_file_atomic(path, text, strlen(text));
    fsdpi_free(text);
    return st;
}

/* ---- all together ---- */

/* Everything that a save needs memory for, taken before ranks agree to begin. */
typedef struct saving {
    char folder[4096], temp[4160], final[4160];
    int64_t step;
    int tensors;
    file_info *files; /* [ranks] */
    range *ranges;    /* [tensors]: this rank's */
    range *all;       /* [ranks, tensors] */
} saving;

static void free_saving(saving *s)
{
    if (s == NULL) return;
    fsdpi_free(s->files);
    fsdpi_free(s->ranges);
    fsdpi_free(s->all);
    fsdpi_free(s);
}

static fsdp_status make_saving(saving **out, const fsdp_checkpoint *c, const char *folder, int64_t step)
{
    saving *s;
    size_t size = (size_t)fsdp_comm_size(c->comm);
    FSDPI_NEW(s, 1);
    snprintf(s->folder, sizeof(s->folder), "%s", folder);
    snprintf(s->final, sizeof(s->final), "%s/step-%08lld", s->folder, (long long)step);
    snprintf(s->temp, sizeof(s->temp), "%s/.step-%08lld.tmp", s->folder, (long long)step);
    s->step = step;
    s->tensors = tensors_in(c);
    s->files = fsdpi_calloc(size, sizeof(*s->files));
    s->ranges = fsdpi_calloc((size_t)s->tensors, sizeof(*s->ranges));
    s->all = fsdpi_calloc(size * (size_t)s->tensors, sizeof(*s->all));
    if (s->files == NULL || s->ranges == NULL || s->all == NULL) {
        free_saving(s);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to save %d entries", c->count);
    }
    *out = s;
    return FSDP_OK;
}

/* Of what is registered, in order: ranks that registered other things would write a checkpoint of mixed-up parts. */
static uint64_t registry_hash(const fsdp_checkpoint *c)
{
    uint64_t h = 0;
    for (int i = 0; i < c->count; i++) h = XXH3_64bits_withSeed(c->entry[i].name, strlen(c->entry[i].name), h + (uint64_t)c->entry[i].kind);
    return h;
}

static fsdp_status gather_ranges(const fsdp_checkpoint *c, saving *s, const file_info *mine)
{
    for (int i = 0, t = 0; i < c->count; i++) {
        float *at;
        if (!fsdpi_entry_is_tensor(&c->entry[i])) continue;
        fsdpi_entry_range(&c->entry[i], &s->ranges[t].first, &s->ranges[t].numel, &at);
        t++;
    }
    FSDP_TRY(fsdpi_comm_exchange(c->comm, FSDPI_OP_SAVE, NULL, mine, sizeof(*mine), s->files));
    for (int r = 0; r < fsdp_comm_size(c->comm); r++)
        FSDP_FAIL_IF(s->files[r].registry != s->files[0].registry, FSDP_ERR_INVALID,
                     "fsdp_checkpoint_save: rank %d has registered other entries than rank 0, or in another order", r);
    return fsdpi_comm_exchange(c->comm, FSDPI_OP_SAVE, NULL, s->ranges, (size_t)s->tensors * sizeof(*s->ranges), s->all);
}

static fsdp_status save_files(const fsdp_checkpoint *c, saving *s)
{
    int rank = fsdp_comm_rank(c->comm);
    char path[4400], name[64];
    file_info mine = { .registry = registry_hash(c) };
    fsdpi_shard_name(name, sizeof(name), rank, fsdp_comm_size(c->comm));
    snprintf(path, sizeof(path), "%s/%s", s->temp, name);
    fsdp_status st = rank == 0 ? fsdpi_folder_prepare(s->folder, s->temp) : FSDP_OK;
    FSDP_TRY(fsdp_comm_agree(c->comm, st));
    st = write_file(c, path);
    if (st == FSDP_OK) st = fsdpi_file_xxh3(path, &mine.checksum, &mine.bytes);
    FSDP_TRY(fsdp_comm_agree(c->comm, st));
    FSDP_TRY(gather_ranges(c, s, &mine));
    if (rank == 0) {
        st = write_manifest(c, s->temp, s->step, s->files, s->all, s->tensors);
        if (st == FSDP_OK) st = fsdpi_folder_publish(s->folder, s->temp, s->final);
    }
    return fsdp_comm_agree(c->comm, st);
}

fsdp_status fsdp_checkpoint_save(fsdp_checkpoint *c, const char *folder, int64_t step, int keep)
{
    FSDP_FAIL_IF(folder == NULL || folder[0] == '\0' || strlen(folder) >= sizeof(((saving *)0)->folder) || step < 0 || keep < 0, FSDP_ERR_INVALID,
                 "fsdp_checkpoint_save: no folder, a path that is too long, or step %lld or keep %d below 0", (long long)step, keep);
    for (int i = 0; i < c->count; i++)
        FSDP_FAIL_IF(fsdpi_entry_is_tensor(&c->entry[i]) && c->entry[i].unit->averaged, FSDP_ERR_STATE,
                     "fsdp_checkpoint_save: unit \"%s\": its average is in its place, and would be saved as its parameters: fsdp_ema_swap_out() first", c->entry[i].unit->name);
    saving *s = NULL;
    fsdp_status st = fsdp_comm_agree(c->comm, make_saving(&s, c, folder, step));
    if (st == FSDP_OK) {
        st = save_files(c, s);
        if (st != FSDP_OK && fsdp_comm_rank(c->comm) == 0) {
            fsdpi_error kept;
            fsdpi_error_save(&kept);
            fsdpi_folder_remove(s->temp);
            fsdpi_error_restore(&kept);
        }
        if (st == FSDP_OK && keep > 0 && fsdp_comm_rank(c->comm) == 0) fsdpi_folder_prune(s->folder, keep, step);
    }
    free_saving(s);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}
