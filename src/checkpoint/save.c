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
#include "checkpoint/save.h"

#include "base/alloc.h"
#include "base/error.h"
#include "checkpoint/background.h"
#include "checkpoint/folder.h"
#include "comm/comm.h"
#include "format/fileio.h"
#include "shard/unit.h"

#include <fsdp/safetensors.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum { CHUNK = 1 << 20 }; /* elements */

/* ---- a rank's file ---- */

static fsdp_status write_tensor(fsdp_safetensors_writer *w, int64_t number, const fsdpi_saved *t, void *host)
{
    for (int64_t done = 0; done < t->numel; done += CHUNK) {
        int64_t n = t->numel - done < CHUNK ? t->numel - done : CHUNK;
        FSDP_TRY(fsdpi_saved_read(t, done, n, host));
        FSDP_TRY(fsdp_safetensors_writer_write_raw(w, number, done, n, host));
    }
    return FSDP_OK;
}

/* Tensors of which this rank has something, as one-dimensional ones. */
static int64_t declare(const fsdpi_snapshot *s, fsdp_safetensors_decl *decl, const fsdpi_saved **of)
{
    int64_t n = 0;
    for (int i = 0; i < s->count; i++) {
        const fsdpi_saved *t = &s->saved[i];
        if (t->numel == 0) continue;
        of[n] = t;
        decl[n++] = (fsdp_safetensors_decl){ .name = t->name, .dtype = t->dtype, .ndim = 1, .shape = &t->numel };
    }
    return n;
}

static fsdp_status write_file(const fsdpi_snapshot *s, const char *path)
{
    fsdp_safetensors_decl *decl = fsdpi_calloc((size_t)s->count, sizeof(*decl));
    const fsdpi_saved **of = fsdpi_calloc((size_t)s->count, sizeof(*of));
    double *host = fsdpi_calloc(CHUNK, sizeof(*host)); /* of the widest type */
    fsdp_safetensors_writer *w = NULL;
    fsdp_status st = decl != NULL && of != NULL && host != NULL
                         ? FSDP_OK
                         : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to save %d tensors", s->count);
    int64_t n = st == FSDP_OK ? declare(s, decl, of) : 0;
    if (st == FSDP_OK) st = fsdp_safetensors_writer_open(&w, path, decl, n, NULL, 0);
    for (int64_t i = 0; i < n && st == FSDP_OK; i++) st = write_tensor(w, i, of[i], host);
    if (st == FSDP_OK) st = fsdp_safetensors_writer_finish(w);
    fsdp_safetensors_writer_close(w);
    fsdpi_free(host);
    fsdpi_free(of);
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

/* Everything that a save needs memory for, taken before ranks agree to begin. */
struct fsdpi_save {
    char folder[4096], temp[4160], final[4160];
    int64_t step;
    int keep, ranks;
    fsdpi_snapshot *snapshot;
    file_info *files; /* [ranks] */
    range *ranges;    /* [tensors]: this rank's */
    range *all;       /* [ranks, tensors] */
};

static json_t *entries_json(const fsdpi_save *s)
{
    json_t *entries = json_object();
    const fsdpi_snapshot *snap = s->snapshot;
    for (int i = 0; i < snap->count; i++) {
        const fsdpi_saved *t = &snap->saved[i];
        json_t *shape = json_array(), *pieces = json_array();
        for (int d = 0; d < t->ndim; d++) json_array_append_new(shape, json_integer(t->shape[d]));
        for (int r = 0; r < s->ranks; r++) {
            const range *g = &s->all[r * snap->count + i];
            if (g->numel > 0) json_array_append_new(pieces, json_pack("[iII]", r, (json_int_t)g->first, (json_int_t)g->numel));
        }
        json_object_set_new(entries, t->name, json_pack("{ss ss so so}", "dtype", fsdp_dtype_name(t->dtype), "what", t->what, "shape", shape, "pieces", pieces));
    }
    return entries;
}

/* The text ends with a checksum of all before it: fsdpi_manifest_checked() takes it off again. */
static fsdp_status manifest_text(const fsdpi_save *s, char **out)
{
    json_t *list = json_array();
    char name[64], sum[32];
    for (int r = 0; r < s->ranks; r++) {
        fsdpi_shard_name(name, sizeof(name), r, s->ranks);
        snprintf(sum, sizeof(sum), "%016llx", (unsigned long long)s->files[r].checksum);
        json_array_append_new(list, json_pack("{ss sI ss}", "name", name, "bytes", (json_int_t)s->files[r].bytes, "xxh3", sum));
    }
    json_t *root = json_pack("{ss si sI si so so sO}", "format", "fsdp-checkpoint", "version", 1, "step", (json_int_t)s->step, "ranks", s->ranks, "files", list,
                             "entries", entries_json(s), "values", s->snapshot->values);
    if (json_object_size(s->snapshot->aliases) > 0) json_object_set(root, "aliases", s->snapshot->aliases);
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

static fsdp_status write_manifest(const fsdpi_save *s)
{
    char path[4300], *text = NULL;
    snprintf(path, sizeof(path), "%s/" FSDPI_MANIFEST, s->temp);
    FSDP_TRY(manifest_text(s, &text));
    fsdp_status st = fsdpi_write_file_atomic(path, text, strlen(text));
    fsdpi_free(text);
    return st;
}

/* ---- all together ---- */

void fsdpi_save_free(fsdpi_save *s)
{
    if (s == NULL) return;
    fsdpi_snapshot_free(s->snapshot);
    fsdpi_free(s->files);
    fsdpi_free(s->ranges);
    fsdpi_free(s->all);
    fsdpi_free(s);
}

fsdpi_snapshot *fsdpi_save_snapshot(fsdpi_save *s)
{
    return s->snapshot;
}

int64_t fsdpi_save_step(const fsdpi_save *s)
{
    return s->step;
}

fsdp_status fsdpi_save_make(fsdpi_save **out, const fsdp_checkpoint *c, const char *folder, int64_t step, int keep)
{
    fsdpi_save *s;
    size_t size = (size_t)fsdp_comm_size(c->comm);
    FSDPI_NEW(s, 1);
    fsdp_status st = fsdpi_snapshot_make(&s->snapshot, c);
    if (st != FSDP_OK) {
        fsdpi_free(s);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    snprintf(s->folder, sizeof(s->folder), "%s", folder);
    snprintf(s->final, sizeof(s->final), "%s/step-%08lld", s->folder, (long long)step);
    snprintf(s->temp, sizeof(s->temp), "%s/.step-%08lld.tmp", s->folder, (long long)step);
    s->step = step;
    s->keep = keep;
    s->ranks = (int)size;
    size_t tensors = (size_t)s->snapshot->count;
    s->files = fsdpi_calloc(size, sizeof(*s->files));
    s->ranges = fsdpi_calloc(tensors, sizeof(*s->ranges));
    s->all = fsdpi_calloc(size * tensors, sizeof(*s->all));
    if (s->files == NULL || s->ranges == NULL || s->all == NULL) {
        fsdpi_save_free(s);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to save %d entries", c->count);
    }
    for (size_t i = 0; i < tensors; i++) s->ranges[i] = (range){ s->snapshot->saved[i].first, s->snapshot->saved[i].numel };
    *out = s;
    return FSDP_OK;
}

static fsdp_status gather_ranges(fsdpi_save *s, fsdp_comm *comm, const file_info *mine)
{
    FSDP_TRY(fsdpi_comm_exchange(comm, FSDPI_OP_SAVE, NULL, mine, sizeof(*mine), s->files));
    for (int r = 0; r < s->ranks; r++)
        FSDP_FAIL_IF(s->files[r].registry != s->files[0].registry, FSDP_ERR_INVALID,
                     "fsdp_checkpoint_save: rank %d has registered other entries than rank 0, or in another order", r);
    return fsdpi_comm_exchange(comm, FSDPI_OP_SAVE, NULL, s->ranges, (size_t)s->snapshot->count * sizeof(*s->ranges), s->all);
}

static fsdp_status save_files(fsdpi_save *s, fsdp_comm *comm)
{
    int rank = fsdp_comm_rank(comm);
    char path[4400], name[64];
    file_info mine = { .registry = s->snapshot->registry };
    fsdpi_shard_name(name, sizeof(name), rank, s->ranks);
    snprintf(path, sizeof(path), "%s/%s", s->temp, name);
    fsdp_status st = rank == 0 ? fsdpi_folder_prepare(s->folder, s->temp) : FSDP_OK;
    FSDP_TRY(fsdp_comm_agree(comm, st));
    st = write_file(s->snapshot, path);
    fsdpi_snapshot_unstage(s->snapshot);
    if (st == FSDP_OK) st = fsdpi_file_xxh3(path, &mine.checksum, &mine.bytes);
    FSDP_TRY(fsdp_comm_agree(comm, st));
    FSDP_TRY(gather_ranges(s, comm, &mine));
    if (rank == 0) {
        st = write_manifest(s);
        if (st == FSDP_OK) st = fsdpi_folder_publish(s->folder, s->temp, s->final);
    }
    return fsdp_comm_agree(comm, st);
}

fsdp_status fsdpi_save_run(fsdpi_save *s, fsdp_comm *comm)
{
    fsdp_status st = save_files(s, comm);
    if (st != FSDP_OK && fsdp_comm_rank(comm) == 0) {
        fsdpi_error kept;
        fsdpi_error_save(&kept);
        fsdpi_folder_remove(s->temp);
        fsdpi_error_restore(&kept);
    }
    if (st == FSDP_OK && s->keep > 0 && fsdp_comm_rank(comm) == 0) fsdpi_folder_prune(s->folder, s->keep, s->step);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

fsdp_status fsdp_checkpoint_save_with(fsdp_checkpoint *c, const char *folder, int64_t step, const fsdp_save_opts *opts)
{
    fsdp_save_opts o = opts != NULL ? *opts : (fsdp_save_opts){ 0 };
    FSDP_FAIL_IF(folder == NULL || folder[0] == '\0' || strlen(folder) >= sizeof(((fsdpi_save *)0)->folder) || step < 0 || o.keep < 0, FSDP_ERR_INVALID,
                 "fsdp_checkpoint_save: no folder, a path that is too long, or step %lld or keep %d below 0", (long long)step, o.keep);
    FSDP_FAIL_IF(o.most_bytes > 0 && !o.background, FSDP_ERR_INVALID, "fsdp_checkpoint_save: most_bytes is of a save in the background, and this one is not");
    FSDP_TRY(fsdpi_registry_allows(c, FSDPI_EV_SAVE));
    FSDP_TRY(fsdp_checkpoint_wait(c));
    fsdpi_save *s = NULL;
    bool taken = false;
    fsdp_status st = fsdp_comm_agree(c->comm, fsdpi_save_make(&s, c, folder, step, o.keep));
    if (st == FSDP_OK && o.background) st = fsdpi_background_begin(c, s, o.most_bytes, &taken);
    if (st == FSDP_OK && !taken) st = fsdpi_save_run(s, c->comm);
    if (st == FSDP_OK && o.in_background != NULL) *o.in_background = taken;
    if (!taken) fsdpi_save_free(s);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

fsdp_status fsdp_checkpoint_save(fsdp_checkpoint *c, const char *folder, int64_t step, int keep)
{
    return fsdp_checkpoint_save_with(c, folder, step, &(fsdp_save_opts){ .keep = keep });
}
