/* SPDX-License-Identifier: MIT
 *
 * State dictionaries under other names, and as files. A parameter's name is also within those of its optimizer's state
 * ("optim.exp_avg.NAME"): they change together. */
#include "checkpoint/state.h"

#include "base/alloc.h"
#include "base/error.h"
#include "format/shown.h"

#include <fsdp/safetensors.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- names ---- */

/* Where the parameter's name begins in a name of its optimizer's state or average: after "optim.KIND.", "ema.". */
static size_t head_of(const char *name)
{
    if (strncmp(name, "ema.", 4) == 0) return 4;
    if (strncmp(name, "optim.", 6) != 0) return 0;
    const char *dot = strchr(name + 6, '.');
    return dot != NULL ? (size_t)(dot + 1 - name) : 0;
}

typedef struct renaming {
    const char *from, *to;
    size_t from_length; /* without a star */
    bool prefix;
} renaming;

static bool fits(const renaming *r, const char *text)
{
    return r->prefix ? strncmp(text, r->from, r->from_length) == 0 : strcmp(text, r->from) == 0;
}

/* The name that `name` gets, or NULL: it stays. *failed: no memory. */
static char *new_name(const renaming *r, const char *name, bool *failed)
{
    size_t head = fits(r, name) ? 0 : head_of(name);
    if (!fits(r, name + head)) return NULL;
    size_t tail = r->prefix ? strlen(name + head + r->from_length) : 0, to = strlen(r->to) - (r->prefix ? 1 : 0);
    char *s = fsdpi_calloc(head + to + tail + 1, 1);
    if (s == NULL) {
        *failed = true;
        return NULL;
    }
    memcpy(s, name, head);
    memcpy(s + head, r->to, to);
    memcpy(s + head + to, name + head + r->from_length, tail);
    return s;
}

static bool is_name(const fsdp_state *s, const char *name)
{
    for (int i = 0; i < s->count; i++)
        if (strcmp(s->tensor[i].name, name) == 0) return true;
    return json_object_get(s->values, name) != NULL || json_object_get(s->aliases, name) != NULL;
}

/* A new object with the names changed: keys, and where `texts`, values too. NULL: no memory. */
static json_t *renamed_object(const renaming *r, const json_t *of, bool texts, int *n)
{
    json_t *out = json_object(), *value;
    const char *key;
    bool failed = out == NULL;
    json_object_foreach((json_t *)(uintptr_t)of, key, value)
    {
        char *k = new_name(r, key, &failed), *v = texts ? new_name(r, json_string_value(value), &failed) : NULL;
        *n += k != NULL;
        if (!failed) failed = json_object_set_new(out, k != NULL ? k : key, v != NULL ? json_string(v) : json_incref(value)) != 0;
        fsdpi_free(k);
        fsdpi_free(v);
    }
    if (!failed) return out;
    json_decref(out);
    return NULL;
}

typedef struct renamed {
    char **name; /* [tensors]; NULL: stays */
    json_t *values, *aliases;
    int count;
} renamed;

static fsdp_status make_names(renamed *n, const renaming *r, const fsdp_state *s)
{
    bool failed = false;
    FSDPI_NEW(n->name, s->count);
    for (int i = 0; i < s->count && !failed; i++) {
        n->name[i] = new_name(r, s->tensor[i].name, &failed);
        n->count += n->name[i] != NULL && fsdp_state_find(s, s->tensor[i].name) == &s->tensor[i];
        if (n->name[i] == NULL) continue;
        json_t *text = json_string(n->name[i]); /* which it was made of: of names that are UTF-8, but `to` may not be */
        bool good = text != NULL && n->name[i][0] != '\0';
        json_decref(text);
        FSDP_FAIL_IF(!good, FSDP_ERR_INVALID, "fsdp_state_rename: \"%s\" would get no name, or one that is not UTF-8", fsdpi_show(s->tensor[i].name).s);
        FSDP_FAIL_IF(is_name(s, n->name[i]), FSDP_ERR_INVALID, "fsdp_state_rename: \"%s\" would become \"%s\", which is there already", fsdpi_show(s->tensor[i].name).s,
                     fsdpi_show(n->name[i]).s);
    }
    if (!failed) n->values = renamed_object(r, s->values, false, &n->count);
    if (!failed) n->aliases = renamed_object(r, s->aliases, true, &n->count);
    FSDP_FAIL_IF(failed || n->values == NULL || n->aliases == NULL, FSDP_ERR_NOMEM, "no memory to rename tensors");
    FSDP_FAIL_IF(json_object_size(n->values) != json_object_size(s->values) || json_object_size(n->aliases) != json_object_size(s->aliases), FSDP_ERR_INVALID,
                 "fsdp_state_rename: two numbers or second names would become one");
    return FSDP_OK;
}

fsdp_status fsdp_state_rename(fsdp_state *s, const char *from, const char *to, int *count)
{
    size_t f = from != NULL ? strlen(from) : 0, t = to != NULL ? strlen(to) : 0;
    bool prefix = f > 0 && from[f - 1] == '*';
    FSDP_FAIL_IF(f == 0 || t == 0 || prefix != (to[t - 1] == '*'), FSDP_ERR_INVALID, "fsdp_state_rename: \"%s\" to \"%s\": give two names, or two beginnings that end with *",
                 from != NULL ? from : "", to != NULL ? to : "");
    renaming r = { from, to, f - (prefix ? 1 : 0), prefix };
    renamed n = { 0 };
    fsdp_status st = strcmp(from, to) != 0 ? make_names(&n, &r, s) : FSDP_OK;
    if (st == FSDP_OK && n.name != NULL) {
        for (int i = 0; i < s->count; i++) {
            if (n.name[i] == NULL) continue;
            fsdpi_free((char *)(uintptr_t)s->tensor[i].name);
            s->tensor[i].name = n.name[i];
            n.name[i] = NULL;
        }
        json_decref(s->values);
        json_decref(s->aliases);
        s->values = n.values;
        s->aliases = n.aliases;
        n.values = n.aliases = NULL;
    }
    for (int i = 0; n.name != NULL && i < s->count; i++) fsdpi_free(n.name[i]);
    fsdpi_free(n.name);
    json_decref(n.values);
    json_decref(n.aliases);
    if (st == FSDP_OK && count != NULL) *count = n.count;
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

static int remove_from(json_t *object, const renaming *r)
{
    const char *key;
    json_t *value;
    void *next;
    int n = 0;
    json_object_foreach_safe(object, next, key, value)
    {
        if (!fits(r, key)) continue;
        n++;
        json_object_del(object, key);
    }
    return n;
}

int fsdp_state_remove(fsdp_state *s, const char *name)
{
    size_t length = strlen(name);
    bool prefix = length > 0 && name[length - 1] == '*';
    renaming r = { name, "", length - (prefix ? 1 : 0), prefix };
    int kept = 0, n = 0;
    for (int i = 0; i < s->count; i++) { /* how many names: a name may have several pieces */
        bool again = false;
        for (int k = 0; k < i && !again; k++) again = strcmp(s->tensor[k].name, s->tensor[i].name) == 0;
        n += !again && fits(&r, s->tensor[i].name);
    }
    for (int i = 0; i < s->count; i++) {
        if (fits(&r, s->tensor[i].name)) {
            fsdpi_free((char *)(uintptr_t)s->tensor[i].name);
            fsdpi_free(s->tensor[i].data);
        } else {
            s->tensor[kept++] = s->tensor[i];
        }
    }
    s->count = kept;
    n += remove_from(s->values, &r) + remove_from(s->aliases, &r);
    const char *key;
    json_t *of;
    void *next;
    json_object_foreach_safe(s->aliases, next, key, of) /* of what is no more */
        if (fsdp_state_find(s, json_string_value(of)) == NULL && json_object_get(s->values, json_string_value(of)) == NULL) json_object_del(s->aliases, key);
    return n;
}

/* ---- files ---- */

/* In a file's metadata, so that other programs are not disturbed. */
static const char numbers[] = "fsdp.numbers", second_names[] = "fsdp.aliases";

fsdp_status fsdp_state_write_file(const fsdp_state *s, const char *path)
{
    fsdp_safetensors_decl *decl;
    fsdp_safetensors_writer *w = NULL;
    for (int i = 0; i < s->count; i++) {
        const fsdp_state_tensor *t = &s->tensor[i];
        FSDP_FAIL_IF(t->count != t->numel, FSDP_ERR_INVALID, "fsdp_state_write_file: \"%s\" has %lld of its %lld elements here: read a full dictionary", fsdpi_show(t->name).s,
                     (long long)t->count, (long long)t->numel);
    }
    FSDPI_NEW(decl, s->count);
    for (int i = 0; i < s->count; i++) {
        const fsdp_state_tensor *t = &s->tensor[i];
        decl[i] = (fsdp_safetensors_decl){ .name = t->name, .dtype = t->dtype, .ndim = t->ndim, .shape = t->shape };
    }
    char *values = json_dumps(s->values, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17)), *aliases = json_dumps(s->aliases, JSON_COMPACT | JSON_SORT_KEYS);
    fsdp_safetensors_string strings[] = { { numbers, values }, { second_names, aliases } };
    fsdp_status st = values != NULL && aliases != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "%s: no memory for its header", path);
    if (st == FSDP_OK) st = fsdp_safetensors_writer_open(&w, path, decl, s->count, strings, 2);
    for (int i = 0; i < s->count && st == FSDP_OK; i++) st = fsdp_safetensors_writer_write_raw(w, i, 0, s->tensor[i].numel, s->tensor[i].data);
    if (st == FSDP_OK) st = fsdp_safetensors_writer_finish(w);
    fsdp_safetensors_writer_close(w);
    fsdpi_free(decl);
    free(values);
    free(aliases);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

static fsdp_status read_tensors(fsdp_state *s, const fsdp_safetensors *files)
{
    for (int64_t i = 0; i < fsdp_safetensors_count(files); i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(files, i);
        fsdp_state_tensor like = { .name = t->name, .dtype = t->dtype, .ndim = t->ndim, .count = t->numel }, *mine;
        FSDP_FAIL_IF(t->ndim > FSDP_MAX_DIMS, FSDP_ERR_UNSUPPORTED, "%s: tensor \"%s\" has %d dimensions, at most %d", t->file, fsdpi_show(t->name).s, t->ndim, FSDP_MAX_DIMS);
        for (int d = 0; d < t->ndim; d++) like.shape[d] = t->shape[d];
        FSDP_TRY(fsdpi_state_new_piece(s, &like, &mine));
        if (t->numel > 0) FSDP_TRY(fsdp_safetensors_read_raw(files, t, 0, t->numel, mine->data));
    }
    return FSDP_OK;
}

static void read_metadata(json_t *into, const fsdp_safetensors *files, const char *key)
{
    const char *text = fsdp_safetensors_metadata_find(files, key);
    json_t *object = text != NULL ? json_loads(text, 0, NULL) : NULL;
    if (json_is_object(object)) json_object_update(into, object);
    json_decref(object);
}

fsdp_status fsdp_state_read_file(fsdp_state **out, const char *path)
{
    fsdp_state *s = NULL;
    fsdp_safetensors *files = NULL;
    fsdp_status st = fsdp_state_create(&s);
    if (st == FSDP_OK) st = fsdp_safetensors_open(&files, path);
    if (st == FSDP_OK) st = read_tensors(s, files);
    if (st == FSDP_OK) {
        read_metadata(s->values, files, numbers);
        read_metadata(s->aliases, files, second_names);
        s->kind = FSDP_STATE_FULL;
        *out = s;
        s = NULL;
    }
    fsdp_safetensors_close(files);
    fsdp_state_destroy(s);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}
