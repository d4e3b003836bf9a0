/* SPDX-License-Identifier: MIT
 *
 * Sets of safetensors files: find the files that a path means, read and check every header, then serve ranges
 * of elements. Headers are parsed in safetensors_header.c; data is read at offsets and copied, so its
 * alignment does not matter. */
#include <fsdp/safetensors.h>

#include "base/alloc.h"
#include "format/fileio.h"
#include "format/guess.h"
#include "format/json.h"
#include "format/safetensors_header.h"
#include "format/shown.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Invariants of an open set: every tensor's `file` is the path of files[its file], and [offset, offset +
 * bytes) lies in it; by_name is a permutation of [0, count) by rising, distinct names. */
struct fsdp_safetensors {
    fsdpi_file *files;
    fsdpi_safetensors_table *tables; /* [file_count]: own the text that tensors and metadata point into */
    int64_t file_count;
    fsdp_safetensors_tensor *tensors; /* [count] */
    int32_t *file_of;                 /* [count] */
    int64_t *by_name;                 /* [count] */
    int64_t count;
    const fsdp_safetensors_string *metadata; /* one of the tables' */
    int64_t metadata_count;
};

/* ---- one file ------------------------------------------------------------------------------------------ */

static fsdp_status not_safetensors(const fsdpi_file *f, const unsigned char *head, size_t n, uint64_t header)
{
    /* a length that may be one also looks like the first bytes of many things */
    bool plausible = n >= 8 && header >= 2 && header <= FSDPI_SAFETENSORS_MAX_HEADER;
    fsdpi_kind kind = fsdpi_guess_kind(head, n);
    if (kind == FSDPI_KIND_SAFETENSORS || (plausible && !fsdpi_kind_is_certain(kind)))
        kind = FSDPI_KIND_UNKNOWN;
    FSDP_FAIL_IF(kind != FSDPI_KIND_UNKNOWN, FSDP_ERR_FORMAT, "%s: not a safetensors file: it looks like %s",
                 f->path, fsdpi_kind_text(kind));
    FSDP_FAIL_IF(n < 8, FSDP_ERR_FORMAT, "%s: not a safetensors file: it is only %zu bytes long", f->path, n);
    FSDP_FAIL_IF(header > FSDPI_SAFETENSORS_MAX_HEADER, FSDP_ERR_FORMAT,
                 "%s: not a safetensors file: its first 8 bytes, the length of its header, say %llu bytes, "
                 "and the format allows %d",
                 f->path, (unsigned long long)header, FSDPI_SAFETENSORS_MAX_HEADER);
    FSDP_FAIL_IF(header < 2, FSDP_ERR_FORMAT,
                 "%s: not a safetensors file: it says that its header is %llu bytes long", f->path,
                 (unsigned long long)header);
    FSDP_FAIL(FSDP_ERR_FORMAT, "%s: not a safetensors file: its header should begin with '{'", f->path);
}

/* I1: where the header is. Only a file that breaks it is guessed at: a good one may begin with the bytes of a
 * pickle. */
static fsdp_status find_header(const fsdpi_file *f, size_t *header)
{
    unsigned char head[FSDPI_GUESS_BYTES];
    uint64_t n = 0;
    size_t got = (size_t)(f->bytes < (int64_t)sizeof(head) ? f->bytes : (int64_t)sizeof(head));
    FSDP_FAIL_IF(f->bytes == 0, FSDP_ERR_FORMAT,
                 "%s: the file is empty (a download or a save that never finished?)", f->path);
    FSDP_TRY(fsdpi_file_read(f, 0, head, got));
    if (got >= 8) memcpy(&n, head, 8);
    if (got < 8 || n < 2 || n > FSDPI_SAFETENSORS_MAX_HEADER || (got > 8 && head[8] != '{'))
        return not_safetensors(f, head, got, n);
    FSDP_FAIL_IF(n > (uint64_t)(f->bytes - 8), FSDP_ERR_FORMAT,
                 "%s: the file is at least %llu bytes short of what its header says (%llu bytes of header "
                 "alone): it is an incomplete download or copy; fetch it again",
                 f->path, (unsigned long long)(n - (uint64_t)(f->bytes - 8)), (unsigned long long)n);
    *header = (size_t)n;
    return FSDP_OK;
}

static fsdp_status read_header(const fsdpi_file *f, fsdpi_safetensors_table *out)
{
    fsdp_status st;
    size_t n = 0;
    char *json;
    FSDP_TRY(find_header(f, &n));
    FSDPI_NEW(json, n);
    FSDP_TRY_GOTO(fsdpi_file_read(f, 8, json, n), free_json);
    FSDP_TRY_GOTO(fsdpi_safetensors_parse(out, f->path, json, n, f->bytes - 8 - (int64_t)n), free_json);
free_json:
    fsdpi_free(json);
    return st;
}

/* ---- which files: a list of names in a folder ---------------------------------------------------------- */

/* Whether an index that maps names to files lets file `base` show tensor `name`. */
static bool is_visible(const json_t *map, const char *base, const char *name)
{
    const char *owner = map != NULL ? json_string_value(json_object_get(map, name)) : NULL;
    return owner == NULL || strcmp(owner, base) == 0;
}

static int by_string(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct files of a map, sorted: [*count], borrowed from the map in an array that the caller frees. */
static fsdp_status list_shards(const char *index, const json_t *map, const char ***out, int64_t *count)
{
    const char *tensor, **names;
    json_t *value;
    size_t n = 0, distinct = 0;
    FSDP_FAIL_IF(json_object_size(map) == 0, FSDP_ERR_FORMAT, "%s: its \"weight_map\" is empty", index);
    FSDPI_NEW(names, json_object_size(map));
    json_object_foreach((json_t *)map, tensor, value) {
        const char *name = json_string_value(value);
        /* an index comes from the net: it may not point out of its folder */
        if (name == NULL || name[0] == '\0' || strchr(name, '/') != NULL || strcmp(name, ".") == 0 ||
            strcmp(name, "..") == 0) {
            fsdpi_free(names);
            FSDP_FAIL(
                FSDP_ERR_FORMAT,
                "%s: tensor \"%s\" should be mapped to the name of a file in the same folder, not to %s%s",
                index, fsdpi_show(tensor).s, name != NULL ? "" : "something else than a string",
                name != NULL ? fsdpi_show(name).s : "");
        }
        names[n++] = name;
    }
    qsort(names, n, sizeof(*names), by_string);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || strcmp(names[i], names[distinct - 1]) != 0) names[distinct++] = names[i];
    *out = names;
    *count = (int64_t)distinct;
    return FSDP_OK;
}

static char *join(const char *dir, const char *name)
{
    size_t n = strlen(dir), room = n + 1 + strlen(name) + 1;
    char *path = fsdpi_calloc(room, 1);
    if (path != NULL) snprintf(path, room, "%s%s%s", dir, n > 0 && dir[n - 1] != '/' ? "/" : "", name);
    return path;
}

/* ---- a set --------------------------------------------------------------------------------------------- */

/* Opens files `names` of folder dir ("": the names are paths). */
static fsdp_status open_files(fsdp_safetensors *set, const char *dir, const char *const *names, int64_t count)
{
    FSDP_FAIL_IF(count > INT32_MAX, FSDP_ERR_FORMAT, "%s: %lld shards", dir, (long long)count);
    FSDPI_NEW(set->files, count);
    FSDPI_NEW(set->tables, count);
    for (; set->file_count < count; set->file_count++) {
        fsdpi_file *f = &set->files[set->file_count];
        char *path = join(dir, names[set->file_count]);
        FSDP_FAIL_IF(path == NULL, FSDP_ERR_NOMEM, "%s: no memory for a file's name", dir);
        fsdp_status st = fsdpi_file_open(f, path, count <= FSDPI_FILES_KEPT_OPEN);
        fsdpi_free(path);
        FSDP_TRY(st);
        st = read_header(f, &set->tables[set->file_count]);
        if (st != FSDP_OK) fsdpi_file_close(f);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

static int by_tensor_name(const void *a, const void *b)
{
    const fsdp_safetensors_tensor *x = *(const fsdp_safetensors_tensor *const *)a;
    const fsdp_safetensors_tensor *y = *(const fsdp_safetensors_tensor *const *)b;
    return strcmp(x->name, y->name);
}

static fsdp_status sort_names(fsdp_safetensors *set)
{
    const fsdp_safetensors_tensor **sorted;
    FSDPI_NEW(sorted, set->count);
    for (int64_t i = 0; i < set->count; i++) sorted[i] = &set->tensors[i];
    if (set->count > 0) qsort(sorted, (size_t)set->count, sizeof(*sorted), by_tensor_name);
    for (int64_t i = 0; i < set->count; i++) {
        set->by_name[i] = sorted[i] - set->tensors;
        if (i == 0 || strcmp(sorted[i - 1]->name, sorted[i]->name) != 0) continue;
        const fsdp_safetensors_tensor *a = sorted[i - 1], *b = sorted[i];
        fsdpi_free(sorted);
        FSDP_FAIL(FSDP_ERR_FORMAT,
                  "%s and %s both hold tensor \"%s\", and the index does not say whose counts", a->file,
                  b->file, fsdpi_show(a->name).s);
    }
    fsdpi_free(sorted);
    return FSDP_OK;
}

static fsdp_status gather_tensors(fsdp_safetensors *set, const json_t *map, const char *const *names)
{
    int64_t total = 0;
    for (int64_t f = 0; f < set->file_count; f++) total += set->tables[f].count;
    FSDPI_NEW(set->tensors, total);
    FSDPI_NEW(set->file_of, total);
    FSDPI_NEW(set->by_name, total);
    for (int64_t f = 0; f < set->file_count; f++) {
        for (int64_t i = 0; i < set->tables[f].count; i++) {
            if (!is_visible(map, names[f], set->tables[f].tensors[i].name)) continue;
            set->file_of[set->count] = (int32_t)f;
            set->tensors[set->count++] = set->tables[f].tensors[i];
        }
    }
    FSDP_TRY(sort_names(set));
    return FSDP_OK;
}

/* Every shard has the same strings, if any: those of the first that has some are the set's. */
static void choose_metadata(fsdp_safetensors *set)
{
    for (int64_t f = set->file_count - 1; f >= 0; f--) {
        if (set->tables[f].metadata_count == 0) continue;
        set->metadata = set->tables[f].metadata;
        set->metadata_count = set->tables[f].metadata_count;
    }
}

/* Every name that the index lists is where it says. */
static fsdp_status check_map(const fsdp_safetensors *set, const char *index, const json_t *map)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)map, name, value) {
        FSDP_FAIL_IF(fsdp_safetensors_find(set, name) == NULL, FSDP_ERR_FORMAT,
                     "%s: tensor \"%s\" should be in %s, and is not", index, fsdpi_show(name).s,
                     fsdpi_show(json_string_value(value)).s);
    }
    return FSDP_OK;
}

static fsdp_status open_set(fsdp_safetensors **out, const char *dir, const char *const *names, int64_t count,
                            const char *index, const json_t *map)
{
    fsdp_status st;
    fsdp_safetensors *set;
    FSDPI_NEW(set, 1);
    FSDP_TRY_GOTO(open_files(set, dir, names, count), close_set);
    FSDP_TRY_GOTO(gather_tensors(set, map, names), close_set);
    choose_metadata(set);
    if (map != NULL) FSDP_TRY_GOTO(check_map(set, index, map), close_set);
    *out = set;
    return FSDP_OK;
close_set:
    fsdp_safetensors_close(set);
    return st;
}

void fsdp_safetensors_close(fsdp_safetensors *st)
{
    if (st == NULL) return;
    for (int64_t f = 0; f < st->file_count; f++) {
        fsdpi_file_close(&st->files[f]);
        fsdpi_safetensors_table_free(&st->tables[f]);
    }
    fsdpi_free(st->files);
    fsdpi_free(st->tables);
    fsdpi_free(st->tensors);
    fsdpi_free(st->file_of);
    fsdpi_free(st->by_name);
    fsdpi_free(st);
}

/* ---- what a path means --------------------------------------------------------------------------------- */

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

static fsdp_status missing_shards(const char *index, const char *dir, const char *const *names, int64_t count)
{
    int64_t missing = 0, first = 0;
    for (int64_t i = count - 1; i >= 0; i--) {
        struct stat s;
        char *path = join(dir, names[i]);
        FSDP_FAIL_IF(path == NULL, FSDP_ERR_NOMEM, "%s: no memory for a file's name", index);
        if (stat(path, &s) != 0 && errno == ENOENT) {
            missing++;
            first = i;
        }
        fsdpi_free(path);
    }
    FSDP_FAIL_IF(
        missing > 0, FSDP_ERR_FORMAT,
        "%s: %lld of the %lld files that it lists are not there, %s among them: fetch the model again", index,
        (long long)missing, (long long)count, fsdpi_show(names[first]).s);
    return FSDP_OK;
}

static fsdp_status open_index(fsdp_safetensors **out, const char *index)
{
    fsdp_status st;
    json_t *root;
    const json_t *map;
    const char **names = NULL;
    int64_t count = 0;
    const char *slash = strrchr(index, '/');
    char *dir = fsdpi_strdup(index);
    FSDP_FAIL_IF(dir == NULL, FSDP_ERR_NOMEM, "%s: no memory for its name", index);
    dir[slash != NULL ? slash + 1 - index : 0] = '\0';
    FSDP_TRY_GOTO(fsdpi_json_load(&root, index, FSDPI_SAFETENSORS_MAX_HEADER), free_dir);
    FSDP_TRY_GOTO(fsdpi_json_child((fsdpi_json_object){ root, index, "" }, "weight_map", &map), free_root);
    FSDP_TRY_GOTO(list_shards(index, map, &names, &count), free_root);
    FSDP_TRY_GOTO(missing_shards(index, dir, names, count), free_names);
    FSDP_TRY_GOTO(open_set(out, dir, names, count, index, map), free_names);
free_names:
    fsdpi_free(names);
free_root:
    json_decref(root);
free_dir:
    fsdpi_free(dir);
    return st;
}

static fsdp_status open_single(fsdp_safetensors **out, const char *path)
{
    FSDP_TRY(open_set(out, "", &path, 1, NULL, NULL));
    return FSDP_OK;
}

/* What a folder holds. The names belong to the struct. */
struct folder {
    char *index, *single; /* the last that were seen */
    int indexes, singles;
    bool pickle;
};

static fsdp_status note(char **slot, int *count, const char *dir, const char *name)
{
    fsdpi_free(*slot);
    *slot = join(dir, name);
    (*count)++;
    FSDP_FAIL_IF(*slot == NULL, FSDP_ERR_NOMEM, "%s: no memory for a file's name", dir);
    return FSDP_OK;
}

static fsdp_status look_into(const char *dir, struct folder *out)
{
    fsdp_status st = FSDP_OK;
    DIR *d = opendir(dir);
    FSDP_FAIL_IF(d == NULL, FSDP_ERR_IO, "%s: cannot read this folder: %s", dir, strerror(errno));
    for (struct dirent *e; st == FSDP_OK && (e = readdir(d)) != NULL;) {
        if (ends_with(e->d_name, ".safetensors.index.json"))
            st = note(&out->index, &out->indexes, dir, e->d_name);
        else if (ends_with(e->d_name, ".safetensors"))
            st = note(&out->single, &out->singles, dir, e->d_name);
        else if (ends_with(e->d_name, ".bin") || ends_with(e->d_name, ".pt") || ends_with(e->d_name, ".pth"))
            out->pickle = true;
    }
    closedir(d);
    FSDP_TRY(st);
    return FSDP_OK;
}

static fsdp_status open_only(fsdp_safetensors **out, const char *dir, const struct folder *in)
{
    if (in->indexes == 1) return open_index(out, in->index);
    if (in->indexes == 0 && in->singles == 1) return open_single(out, in->single);
    FSDP_FAIL_IF(in->indexes > 1, FSDP_ERR_FORMAT,
                 "%s: this folder has %d indexes of safetensors; name the one to open", dir, in->indexes);
    FSDP_FAIL_IF(in->singles > 1, FSDP_ERR_FORMAT,
                 "%s: this folder has %d .safetensors files and no model.safetensors.index.json that joins "
                 "them; fetch the index, or name the one file to open",
                 dir, in->singles);
    FSDP_FAIL(FSDP_ERR_FORMAT, "%s: there is no .safetensors file in this folder%s", dir,
              in->pickle ? ", only pickles of PyTorch (.bin, .pt): convert them to safetensors" : "");
}

static fsdp_status open_folder(fsdp_safetensors **out, const char *dir)
{
    static const char *const usual[] = { "model.safetensors", "model.safetensors.index.json" };
    for (int i = 0; i < 2; i++) {
        struct stat s;
        char *path = join(dir, usual[i]);
        FSDP_FAIL_IF(path == NULL, FSDP_ERR_NOMEM, "%s: no memory for a file's name", dir);
        bool there = stat(path, &s) == 0;
        fsdp_status st = !there ? FSDP_OK : i == 0 ? open_single(out, path) : open_index(out, path);
        fsdpi_free(path);
        FSDP_TRY(st);
        if (there) return FSDP_OK;
    }
    struct folder in = { 0 };
    fsdp_status st = look_into(dir, &in);
    if (st == FSDP_OK) st = open_only(out, dir, &in);
    fsdpi_free(in.index);
    fsdpi_free(in.single);
    FSDP_TRY(st);
    return FSDP_OK;
}

fsdp_status fsdp_safetensors_open(fsdp_safetensors **out, const char *path)
{
    struct stat s;
    FSDP_FAIL_IF(out == NULL || path == NULL || path[0] == '\0', FSDP_ERR_INVALID,
                 "fsdp_safetensors_open: it needs a place for its result and a path");
    if (stat(path, &s) == 0 && S_ISDIR(s.st_mode))
        FSDP_TRY(open_folder(out, path));
    else if (ends_with(path, ".json"))
        FSDP_TRY(open_index(out, path));
    else
        FSDP_TRY(open_single(out, path));
    return FSDP_OK;
}

/* ---- what is in a set ---------------------------------------------------------------------------------- */

int64_t fsdp_safetensors_count(const fsdp_safetensors *st)
{
    return st->count;
}

const fsdp_safetensors_tensor *fsdp_safetensors_at(const fsdp_safetensors *st, int64_t i)
{
    return i >= 0 && i < st->count ? &st->tensors[i] : NULL;
}

const fsdp_safetensors_tensor *fsdp_safetensors_find(const fsdp_safetensors *st, const char *name)
{
    for (int64_t low = 0, high = st->count; low < high;) {
        int64_t mid = low + (high - low) / 2;
        const fsdp_safetensors_tensor *t = &st->tensors[st->by_name[mid]];
        int order = strcmp(name, t->name);
        if (order == 0) return t;
        if (order < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

int64_t fsdp_safetensors_metadata_count(const fsdp_safetensors *st)
{
    return st->metadata_count;
}

const fsdp_safetensors_string *fsdp_safetensors_metadata_at(const fsdp_safetensors *st, int64_t i)
{
    return i >= 0 && i < st->metadata_count ? &st->metadata[i] : NULL;
}

const char *fsdp_safetensors_metadata_find(const fsdp_safetensors *st, const char *key)
{
    for (int64_t i = 0; i < st->metadata_count; i++)
        if (strcmp(st->metadata[i].key, key) == 0) return st->metadata[i].value;
    return NULL;
}

/* ---- data ---------------------------------------------------------------------------------------------- */

static fsdp_status check_range(const fsdp_safetensors *st, const fsdp_safetensors_tensor *t, int64_t first,
                               int64_t numel)
{
    uintptr_t begin = (uintptr_t)st->tensors, at = (uintptr_t)t;
    FSDP_FAIL_IF(at < begin || at >= begin + (size_t)st->count * sizeof(*t) || (at - begin) % sizeof(*t) != 0,
                 FSDP_ERR_INVALID, "this tensor is not one of the set that it is to be read from");
    FSDP_FAIL_IF(first < 0 || numel < 0 || first > t->numel || numel > t->numel - first, FSDP_ERR_INVALID,
                 "%s: tensor \"%s\" has %lld elements; %lld from number %lld are asked for", t->file,
                 fsdpi_show(t->name).s, (long long)t->numel, (long long)numel, (long long)first);
    return FSDP_OK;
}

fsdp_status fsdp_safetensors_read_raw(const fsdp_safetensors *st, const fsdp_safetensors_tensor *t,
                                      int64_t first, int64_t numel, void *out)
{
    FSDP_TRY(check_range(st, t, first, numel));
    int64_t size = (int64_t)fsdp_dtype_bytes(t->dtype);
    FSDP_TRY(fsdpi_file_read(&st->files[st->file_of[t - st->tensors]], t->offset + first * size, out,
                             (size_t)(numel * size)));
    return FSDP_OK;
}

/* in: numel elements as they lie in a file, at any address. */
static void widen(fsdp_dtype dtype, const char *in, size_t numel, float *out)
{
    for (size_t i = 0; i < numel; i++) {
        if (dtype == FSDP_F64) {
            double x;
            memcpy(&x, in + 8 * i, 8);
            out[i] = (float)x;
        } else {
            uint16_t x;
            memcpy(&x, in + 2 * i, 2);
            out[i] = dtype == FSDP_BF16 ? fsdp_bf16_to_f32(x) : fsdp_f16_to_f32(x);
        }
    }
}

fsdp_status fsdp_safetensors_read_f32(const fsdp_safetensors *st, const fsdp_safetensors_tensor *t,
                                      int64_t first, int64_t numel, float *out)
{
    enum { PIECE = 4096 };
    char piece[PIECE * 8];
    FSDP_TRY(check_range(st, t, first, numel));
    if (t->dtype == FSDP_F32) {
        FSDP_TRY(fsdp_safetensors_read_raw(st, t, first, numel, out));
        return FSDP_OK;
    }
    FSDP_FAIL_IF(t->dtype != FSDP_BF16 && t->dtype != FSDP_F16 && t->dtype != FSDP_F64, FSDP_ERR_INVALID,
                 "%s: tensor \"%s\" is of type %s, which is not read as floats", t->file,
                 fsdpi_show(t->name).s, fsdp_dtype_name(t->dtype));
    for (int64_t done = 0; done < numel; done += PIECE) {
        int64_t n = numel - done < PIECE ? numel - done : PIECE;
        FSDP_TRY(fsdp_safetensors_read_raw(st, t, first + done, n, piece));
        widen(t->dtype, piece, (size_t)n, out + done);
    }
    return FSDP_OK;
}
