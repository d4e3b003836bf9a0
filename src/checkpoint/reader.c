/* SPDX-License-Identifier: MIT
 *
 * Reading: the manifest as a table, and ranges of entries put together from the pieces that ranks wrote. */
#include <fsdp/checkpoint.h>

#include "base/alloc.h"
#include "base/error.h"
#include "checkpoint/folder.h"
#include "checkpoint/registry.h"
#include "format/fileio.h"
#include "format/json.h"
#include "format/shown.h"

#include <fsdp/safetensors.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct piece {
    int file;
    int64_t first, numel;
} piece;

typedef struct entry {
    fsdp_checkpoint_entry info;
    piece *piece; /* in the order of elements; together they are the whole */
} entry;

typedef struct data_file {
    fsdp_checkpoint_file info;
    uint64_t checksum;
    fsdp_safetensors *open;
} data_file;

struct fsdp_checkpoint_reader {
    char *path;
    json_t *root; /* names and texts are its */
    const json_t *values;
    fsdp_checkpoint_alias *alias; /* in the order of their names */
    int aliases;
    int64_t step;
    int ranks;
    data_file *file;
    int files;
    entry *entry;
    int count;
};

/* ---- the manifest ---- */

static int by_first(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

static fsdp_status read_shape(fsdpi_json_object o, entry *e)
{
    const json_t *shape;
    FSDP_TRY(fsdpi_json_array(o, "shape", &shape));
    FSDP_FAIL_IF(json_array_size(shape) > FSDP_MAX_DIMS, FSDP_ERR_FORMAT, "%s: %s has %zu dimensions, at most %d", o.file, o.where, json_array_size(shape), FSDP_MAX_DIMS);
    e->info.ndim = (int)json_array_size(shape);
    e->info.numel = 1;
    for (int d = 0; d < e->info.ndim; d++) {
        const json_t *v = json_array_get(shape, (size_t)d);
        int64_t n = json_is_integer(v) ? json_integer_value(v) : -1;
        FSDP_FAIL_IF(n < 0 || __builtin_mul_overflow(e->info.numel, n, &e->info.numel), FSDP_ERR_FORMAT, "%s: %sshape is wrong", o.file, o.where);
        e->info.shape[d] = n;
    }
    return FSDP_OK;
}

static fsdp_status read_pieces(fsdpi_json_object o, entry *e, int files)
{
    const json_t *pieces;
    FSDP_TRY(fsdpi_json_array(o, "pieces", &pieces));
    size_t n = json_array_size(pieces);
    FSDP_FAIL_IF(n > 1 << 20, FSDP_ERR_FORMAT, "%s: %spieces are too many", o.file, o.where);
    e->info.pieces = (int)n;
    FSDPI_NEW(e->piece, n);
    for (size_t i = 0; i < n; i++) {
        const json_t *p = json_array_get(pieces, i), *f = json_array_get(p, 0), *a = json_array_get(p, 1), *b = json_array_get(p, 2);
        bool good = json_array_size(p) == 3 && json_is_integer(f) && json_is_integer(a) && json_is_integer(b) && json_integer_value(f) >= 0 &&
                    json_integer_value(f) < files && json_integer_value(a) >= 0 && json_integer_value(b) > 0;
        FSDP_FAIL_IF(!good, FSDP_ERR_FORMAT, "%s: %spieces[%zu] is wrong", o.file, o.where, i);
        e->piece[i] = (piece){ (int)json_integer_value(f), json_integer_value(a), json_integer_value(b) };
    }
    qsort(e->piece, n, sizeof(*e->piece), by_first);
    int64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        FSDP_FAIL_IF(e->piece[i].first != at || e->piece[i].numel > e->info.numel - at, FSDP_ERR_FORMAT,
                     "%s: %spieces do not cover the tensor once: element %lld", o.file, o.where, (long long)at);
        at += e->piece[i].numel;
    }
    FSDP_FAIL_IF(at != e->info.numel, FSDP_ERR_FORMAT, "%s: %spieces end at element %lld of %lld", o.file, o.where, (long long)at, (long long)e->info.numel);
    return FSDP_OK;
}

/* Older checkpoints do not say what an entry is, but are named so. */
static fsdp_status read_what(fsdpi_json_object o, entry *e)
{
    const char *what, *fallback = strncmp(e->info.name, "optim.", 6) == 0 ? "optim" : "param";
    FSDP_TRY(fsdpi_json_string_or(o, "what", fallback, &what));
    e->info.what = strcmp(what, "param") == 0 ? FSDP_STATE_PARAMS : strcmp(what, "buffer") == 0 ? FSDP_STATE_BUFFERS : FSDP_STATE_OPTIM;
    return FSDP_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->info.name, ((const entry *)b)->info.name);
}

static fsdp_status read_entries(fsdp_checkpoint_reader *r, fsdpi_json_object root)
{
    const json_t *all;
    const char *name;
    json_t *value;
    FSDP_TRY(fsdpi_json_child(root, "entries", &all));
    FSDPI_NEW(r->entry, json_object_size(all));
    json_object_foreach((json_t *)(uintptr_t)all, name, value)
    {
        char where[700];
        const char *dtype;
        entry *e = &r->entry[r->count++];
        snprintf(where, sizeof(where), "entries.%.600s.", name);
        fsdpi_json_object o = { value, root.file, where };
        e->info.name = name;
        FSDP_FAIL_IF(!json_is_object(value), FSDP_ERR_FORMAT, "%s: %s is no object", root.file, where);
        FSDP_TRY(fsdpi_json_string(o, "dtype", &dtype));
        FSDP_TRY(fsdp_dtype_parse(&e->info.dtype, dtype));
        FSDP_TRY(read_what(o, e));
        FSDP_TRY(read_shape(o, e));
        FSDP_TRY(read_pieces(o, e, r->files));
    }
    qsort(r->entry, (size_t)r->count, sizeof(*r->entry), by_name);
    return FSDP_OK;
}

static fsdp_status read_files(fsdp_checkpoint_reader *r, fsdpi_json_object root)
{
    const json_t *list;
    FSDP_TRY(fsdpi_json_array(root, "files", &list));
    FSDPI_NEW(r->file, json_array_size(list));
    for (size_t i = 0; i < json_array_size(list); i++) {
        char where[32];
        const char *sum;
        unsigned long long x;
        snprintf(where, sizeof(where), "files[%zu].", i);
        fsdpi_json_object o = { json_array_get(list, i), root.file, where };
        data_file *f = &r->file[r->files++];
        FSDP_FAIL_IF(!json_is_object(o.json), FSDP_ERR_FORMAT, "%s: %s is no object", root.file, where);
        FSDP_TRY(fsdpi_json_string(o, "name", &f->info.name));
        FSDP_FAIL_IF(strchr(f->info.name, '/') != NULL || f->info.name[0] == '.', FSDP_ERR_FORMAT, "%s: %sname leads out of the folder", root.file, where);
        FSDP_TRY(fsdpi_json_int(o, "bytes", 0, INT64_MAX, &f->info.bytes));
        FSDP_TRY(fsdpi_json_string(o, "xxh3", &sum));
        FSDP_FAIL_IF(sscanf(sum, "%16llx", &x) != 1, FSDP_ERR_FORMAT, "%s: %sxxh3 is no checksum", root.file, where);
        f->checksum = x;
    }
    return FSDP_OK;
}

static int by_second_name(const void *a, const void *b)
{
    return strcmp(((const fsdp_checkpoint_alias *)a)->name, ((const fsdp_checkpoint_alias *)b)->name);
}

static fsdp_status read_aliases(fsdp_checkpoint_reader *r, fsdpi_json_object root)
{
    const json_t *all, *of;
    const char *name;
    if (!fsdpi_json_has(root, "aliases")) return FSDP_OK; /* there are none, or it is older than they are */
    FSDP_TRY(fsdpi_json_child(root, "aliases", &all));
    FSDPI_NEW(r->alias, json_object_size(all));
    json_object_foreach((json_t *)(uintptr_t)all, name, of)
    {
        entry key = { .info.name = json_string_value(of) };
        bool known = key.info.name != NULL && (json_object_get(r->values, key.info.name) != NULL ||
                                               (r->count > 0 && bsearch(&key, r->entry, (size_t)r->count, sizeof(key), by_name) != NULL));
        FSDP_FAIL_IF(!known, FSDP_ERR_FORMAT, "%s: aliases: \"%s\" is another name of nothing", root.file, fsdpi_show(name).s);
        r->alias[r->aliases++] = (fsdp_checkpoint_alias){ name, key.info.name };
    }
    qsort(r->alias, (size_t)r->aliases, sizeof(*r->alias), by_second_name);
    return FSDP_OK;
}

static fsdp_status read_manifest(fsdp_checkpoint_reader *r, const char *file)
{
    fsdpi_json_object o = { r->root, file, "" };
    const char *format;
    int64_t version, ranks;
    FSDP_TRY(fsdpi_json_string(o, "format", &format));
    FSDP_FAIL_IF(strcmp(format, "fsdp-checkpoint") != 0, FSDP_ERR_FORMAT, "%s is no checkpoint's manifest", file);
    FSDP_TRY(fsdpi_json_int(o, "version", 1, INT64_MAX, &version));
    FSDP_FAIL_IF(version != 1, FSDP_ERR_UNSUPPORTED, "%s is of version %lld; this fsdp reads version 1: it was written by a newer one", file, (long long)version);
    FSDP_TRY(fsdpi_json_int(o, "step", 0, INT64_MAX, &r->step));
    FSDP_TRY(fsdpi_json_int(o, "ranks", 1, INT32_MAX, &ranks));
    r->ranks = (int)ranks;
    FSDP_TRY(fsdpi_json_child(o, "values", &r->values));
    FSDP_TRY(read_files(r, o));
    FSDP_TRY(read_entries(r, o));
    return read_aliases(r, o);
}

fsdp_status fsdp_checkpoint_reader_open(fsdp_checkpoint_reader **out, const char *path)
{
    fsdp_status st;
    char file[4300], *text = NULL;
    size_t size;
    fsdp_checkpoint_reader *r;
    FSDP_FAIL_IF(strlen(path) > 4096, FSDP_ERR_INVALID, "the path \"%.60s...\" is too long", path);
    FSDPI_NEW(r, 1);
    snprintf(file, sizeof(file), "%s/" FSDPI_MANIFEST, path);
    r->path = fsdpi_strdup(path);
    if (r->path == NULL) FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, fail, "no memory to read %s", path);
    FSDP_TRY_GOTO(fsdpi_read_file(file, (size_t)1 << 30, &text, &size), fail);
    FSDP_TRY_GOTO(fsdpi_manifest_checked(text, size, file), fail);
    FSDP_TRY_GOTO(fsdpi_json_parse(&r->root, file, text, strlen(text)), fail);
    FSDP_TRY_GOTO(read_manifest(r, file), fail);
    fsdpi_free(text);
    *out = r;
    return FSDP_OK;
fail:
    fsdpi_free(text);
    fsdp_checkpoint_reader_close(r);
    return st;
}

void fsdp_checkpoint_reader_close(fsdp_checkpoint_reader *r)
{
    if (r == NULL) return;
    for (int i = 0; i < r->files; i++) fsdp_safetensors_close(r->file[i].open);
    for (int i = 0; i < r->count; i++) fsdpi_free(r->entry[i].piece);
    fsdpi_free(r->file);
    fsdpi_free(r->entry);
    fsdpi_free(r->alias);
    json_decref(r->root);
    fsdpi_free(r->path);
    fsdpi_free(r);
}

/* ---- what it says ---- */

int64_t fsdp_checkpoint_reader_step(const fsdp_checkpoint_reader *r)
{
    return r->step;
}

int fsdp_checkpoint_reader_ranks(const fsdp_checkpoint_reader *r)
{
    return r->ranks;
}

int fsdp_checkpoint_reader_count(const fsdp_checkpoint_reader *r)
{
    return r->count;
}

const fsdp_checkpoint_entry *fsdp_checkpoint_reader_at(const fsdp_checkpoint_reader *r, int i)
{
    return i >= 0 && i < r->count ? &r->entry[i].info : NULL;
}

int fsdp_checkpoint_reader_aliases(const fsdp_checkpoint_reader *r)
{
    return r->aliases;
}

const fsdp_checkpoint_alias *fsdp_checkpoint_reader_alias(const fsdp_checkpoint_reader *r, int i)
{
    return i >= 0 && i < r->aliases ? &r->alias[i] : NULL;
}

/* What a name is another one of; NULL: of nothing. */
static const char *named_by(const fsdp_checkpoint_reader *r, const char *name)
{
    fsdp_checkpoint_alias key = { .name = name };
    const fsdp_checkpoint_alias *a = r->aliases > 0 ? bsearch(&key, r->alias, (size_t)r->aliases, sizeof(key), by_second_name) : NULL;
    return a != NULL ? a->of : NULL;
}

static const entry *find(const fsdp_checkpoint_reader *r, const char *name)
{
    entry key = { .info.name = name };
    const entry *e = r->count > 0 ? bsearch(&key, r->entry, (size_t)r->count, sizeof(key), by_name) : NULL;
    if (e != NULL) return e;
    key.info.name = named_by(r, name);
    return key.info.name != NULL && r->count > 0 ? bsearch(&key, r->entry, (size_t)r->count, sizeof(key), by_name) : NULL;
}

static const json_t *value(const fsdp_checkpoint_reader *r, const char *name)
{
    const json_t *v = json_object_get(r->values, name);
    const char *of = v == NULL ? named_by(r, name) : NULL;
    return of != NULL ? json_object_get(r->values, of) : v;
}

const fsdp_checkpoint_entry *fsdp_checkpoint_reader_find(const fsdp_checkpoint_reader *r, const char *name)
{
    const entry *e = find(r, name);
    return e != NULL ? &e->info : NULL;
}

int fsdp_checkpoint_reader_files(const fsdp_checkpoint_reader *r)
{
    return r->files;
}

const fsdp_checkpoint_file *fsdp_checkpoint_reader_file(const fsdp_checkpoint_reader *r, int i)
{
    return i >= 0 && i < r->files ? &r->file[i].info : NULL;
}

fsdp_status fsdp_checkpoint_reader_i64(const fsdp_checkpoint_reader *r, const char *name, int64_t *out)
{
    const json_t *v = value(r, name);
    FSDP_FAIL_IF(!json_is_integer(v), FSDP_ERR_FORMAT, "checkpoint %s has no integer \"%s\"", r->path, name);
    *out = json_integer_value(v);
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_reader_f64(const fsdp_checkpoint_reader *r, const char *name, double *out)
{
    static const struct {
        const char *text;
        double value;
    } words[] = { { "inf", INFINITY }, { "-inf", -INFINITY }, { "nan", NAN } };
    const json_t *v = value(r, name);
    for (int i = 0; i < 3 && json_is_string(v); i++) {
        if (strcmp(json_string_value(v), words[i].text) != 0) continue;
        *out = words[i].value;
        return FSDP_OK;
    }
    FSDP_FAIL_IF(!json_is_number(v), FSDP_ERR_FORMAT, "checkpoint %s has no number \"%s\"", r->path, name);
    *out = json_number_value(v);
    return FSDP_OK;
}

const char *fsdp_checkpoint_reader_text(const fsdp_checkpoint_reader *r, const char *name)
{
    return json_string_value(value(r, name));
}

/* ---- data ---- */

static void file_path(const fsdp_checkpoint_reader *r, int i, char *to, size_t size)
{
    snprintf(to, size, "%s/%s", r->path, r->file[i].info.name);
}

fsdp_status fsdp_checkpoint_reader_verify(fsdp_checkpoint_reader *r, int i)
{
    char path[4800];
    uint64_t checksum;
    int64_t bytes;
    FSDP_FAIL_IF(i < 0 || i >= r->files, FSDP_ERR_INVALID, "checkpoint %s has %d files, not one with number %d", r->path, r->files, i);
    file_path(r, i, path, sizeof(path));
    FSDP_TRY(fsdpi_file_xxh3(path, &checksum, &bytes));
    FSDP_FAIL_IF(bytes != r->file[i].info.bytes, FSDP_ERR_FORMAT, "%s is damaged: it has %lld bytes, and had %lld when it was saved", path, (long long)bytes,
                 (long long)r->file[i].info.bytes);
    FSDP_FAIL_IF(checksum != r->file[i].checksum, FSDP_ERR_FORMAT, "%s is damaged: its checksum is %016llx, and was %016llx when it was saved", path,
                 (unsigned long long)checksum, (unsigned long long)r->file[i].checksum);
    return FSDP_OK;
}

/* Where it is all read from: as floats, or as it lies. */
typedef struct wanted {
    const entry *e;
    int64_t first, numel;
    bool raw;
    char *out;
} wanted;

static fsdp_status read_piece(fsdp_checkpoint_reader *r, const wanted *w, const piece *p, int64_t lo, int64_t numel)
{
    data_file *f = &r->file[p->file];
    const fsdp_checkpoint_entry *info = &w->e->info;
    char path[4800];
    file_path(r, p->file, path, sizeof(path));
    if (f->open == NULL) FSDP_TRY(fsdp_safetensors_open(&f->open, path));
    const fsdp_safetensors_tensor *t = fsdp_safetensors_find(f->open, info->name);
    FSDP_FAIL_IF(t == NULL || t->numel != p->numel || t->dtype != info->dtype, FSDP_ERR_FORMAT, "%s does not have \"%s\" as the manifest says", path, info->name);
    char *out = w->out + (size_t)(lo - w->first) * (w->raw ? fsdp_dtype_bytes(info->dtype) : sizeof(float));
    if (w->raw) return fsdp_safetensors_read_raw(f->open, t, lo - p->first, numel, out);
    return fsdp_safetensors_read_f32(f->open, t, lo - p->first, numel, (float *)(void *)out);
}

static fsdp_status read_range(fsdp_checkpoint_reader *r, const char *name, wanted w)
{
    w.e = find(r, name);
    FSDP_FAIL_IF(w.e == NULL, FSDP_ERR_INVALID, "checkpoint %s has no \"%s\"", r->path, name);
    const fsdp_checkpoint_entry *info = &w.e->info;
    FSDP_FAIL_IF(w.first < 0 || w.numel < 0 || w.first > info->numel || w.numel > info->numel - w.first, FSDP_ERR_INVALID,
                 "checkpoint %s: elements %lld to %lld of \"%s\", which has %lld", r->path, (long long)w.first, (long long)(w.first + w.numel), name,
                 (long long)info->numel);
    for (int i = 0; i < info->pieces; i++) {
        const piece *p = &w.e->piece[i];
        int64_t lo = p->first > w.first ? p->first : w.first, hi = p->first + p->numel < w.first + w.numel ? p->first + p->numel : w.first + w.numel;
        if (lo < hi) FSDP_TRY(read_piece(r, &w, p, lo, hi - lo));
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_reader_read(fsdp_checkpoint_reader *r, const char *name, int64_t first, int64_t numel, float *out)
{
    return read_range(r, name, (wanted){ .first = first, .numel = numel, .out = (char *)out });
}

fsdp_status fsdp_checkpoint_reader_read_raw(fsdp_checkpoint_reader *r, const char *name, int64_t first, int64_t numel, void *out)
{
    return read_range(r, name, (wanted){ .first = first, .numel = numel, .raw = true, .out = out });
}
