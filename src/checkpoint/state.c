/* SPDX-License-Identifier: MIT */
#include "checkpoint/state.h"

#include "base/alloc.h"
#include "base/error.h"
#include "format/json.h"
#include "format/shown.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

fsdp_status fsdp_state_create(fsdp_state **out)
{
    fsdp_state *s;
    FSDPI_NEW(s, 1);
    s->kind = FSDP_STATE_SHARDED;
    s->values = json_object();
    s->aliases = json_object();
    if (s->values == NULL || s->aliases == NULL) {
        fsdp_state_destroy(s);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory for a state dictionary");
    }
    *out = s;
    return FSDP_OK;
}

static void free_piece(fsdp_state_tensor *t)
{
    fsdpi_free((char *)(uintptr_t)t->name);
    fsdpi_free(t->data);
}

void fsdp_state_destroy(fsdp_state *s)
{
    if (s == NULL) return;
    for (int i = 0; i < s->count; i++) free_piece(&s->tensor[i]);
    fsdpi_free(s->tensor);
    json_decref(s->values);
    json_decref(s->aliases);
    fsdpi_free(s);
}

/* ---- looking ---- */

fsdp_state_kind fsdp_state_get_kind(const fsdp_state *s)
{
    return s->kind;
}

int fsdp_state_count(const fsdp_state *s)
{
    return s->count;
}

const fsdp_state_tensor *fsdp_state_at(const fsdp_state *s, int i)
{
    return i >= 0 && i < s->count ? &s->tensor[i] : NULL;
}

const fsdp_state_tensor *fsdp_state_find(const fsdp_state *s, const char *name)
{
    for (int i = 0; i < s->count; i++)
        if (strcmp(s->tensor[i].name, name) == 0) return &s->tensor[i];
    const char *of = json_string_value(json_object_get(s->aliases, name));
    for (int i = 0; i < s->count && of != NULL; i++)
        if (strcmp(s->tensor[i].name, of) == 0) return &s->tensor[i];
    return NULL;
}

size_t fsdp_state_bytes(const fsdp_state *s)
{
    size_t n = 0;
    for (int i = 0; i < s->count; i++) n += (size_t)s->tensor[i].count * fsdp_dtype_bytes(s->tensor[i].dtype);
    return n;
}

/* ---- numbers: JSON has no word for those that are infinite or none ---- */

json_t *fsdpi_state_real(double x)
{
    return isfinite(x) ? json_real(x) : json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

static const json_t *value_of(const fsdp_state *s, const char *name)
{
    const json_t *v = json_object_get(s->values, name);
    const char *of = v == NULL ? json_string_value(json_object_get(s->aliases, name)) : NULL;
    return of != NULL ? json_object_get(s->values, of) : v;
}

fsdp_status fsdp_state_i64(const fsdp_state *s, const char *name, int64_t *out)
{
    const json_t *v = value_of(s, name);
    FSDP_FAIL_IF(!json_is_integer(v), FSDP_ERR_INVALID, "the state dictionary has no integer \"%s\"", fsdpi_show(name).s);
    *out = json_integer_value(v);
    return FSDP_OK;
}

fsdp_status fsdp_state_f64(const fsdp_state *s, const char *name, double *out)
{
    const json_t *v = value_of(s, name);
    const char *word = json_string_value(v);
    bool inf = word != NULL && (strcmp(word, "inf") == 0 || strcmp(word, "-inf") == 0), nan = word != NULL && strcmp(word, "nan") == 0;
    FSDP_FAIL_IF(!json_is_number(v) && !inf && !nan, FSDP_ERR_INVALID, "the state dictionary has no number \"%s\"", fsdpi_show(name).s);
    *out = nan ? (double)NAN : inf ? (word[0] == '-' ? -(double)INFINITY : (double)INFINITY) : json_number_value(v);
    return FSDP_OK;
}

const char *fsdp_state_text(const fsdp_state *s, const char *name)
{
    return json_string_value(json_object_get(s->values, name));
}

static fsdp_status add_value(fsdp_state *s, const char *name, json_t *value)
{
    bool taken = name == NULL || name[0] == '\0' || fsdp_state_find(s, name) != NULL || value_of(s, name) != NULL;
    int rc = taken ? -1 : json_object_set(s->values, name, value);
    json_decref(value);
    FSDP_FAIL_IF(taken, FSDP_ERR_INVALID, "the state dictionary has \"%s\" already, or it is no name", name != NULL ? fsdpi_show(name).s : "");
    FSDP_FAIL_IF(rc != 0, FSDP_ERR_INVALID, "\"%s\" cannot be kept: its name is not UTF-8, or there is no memory", fsdpi_show(name).s);
    return FSDP_OK;
}

fsdp_status fsdp_state_add_i64(fsdp_state *s, const char *name, int64_t value)
{
    return add_value(s, name, json_integer(value));
}

fsdp_status fsdp_state_add_f64(fsdp_state *s, const char *name, double value)
{
    return add_value(s, name, fsdpi_state_real(value));
}

/* ---- pieces ---- */

static bool same_tensor(const fsdp_state_tensor *a, const fsdp_state_tensor *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim && (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof(*a->shape)) == 0);
}

static fsdp_status check_piece(const fsdp_state *s, const fsdp_state_tensor *t)
{
    const char *name = t->name != NULL ? t->name : "";
    int64_t numel = 1;
    FSDP_FAIL_IF(name[0] == '\0' || t->ndim < 0 || t->ndim > FSDP_MAX_DIMS || fsdp_dtype_bytes(t->dtype) == 0, FSDP_ERR_INVALID,
                 "tensor \"%s\" has no name, no type, or %d dimensions", fsdpi_show(name).s, t->ndim);
    json_t *text = json_string(name); /* outlines and files are JSON */
    bool utf8 = text != NULL;
    json_decref(text);
    FSDP_FAIL_IF(!utf8, FSDP_ERR_INVALID, "the name \"%s\" is not UTF-8", fsdpi_show(name).s);
    for (int d = 0; d < t->ndim; d++)
        FSDP_FAIL_IF(t->shape[d] < 0 || __builtin_mul_overflow(numel, t->shape[d], &numel), FSDP_ERR_INVALID, "tensor \"%s\" has no such shape", fsdpi_show(name).s);
    FSDP_FAIL_IF(t->first < 0 || t->count < 0 || t->first > numel || t->count > numel - t->first, FSDP_ERR_INVALID,
                 "tensor \"%s\" has %lld elements, not %lld from number %lld", fsdpi_show(name).s, (long long)numel, (long long)t->count, (long long)t->first);
    FSDP_FAIL_IF(json_object_get(s->values, name) != NULL || json_object_get(s->aliases, name) != NULL, FSDP_ERR_INVALID,
                 "the state dictionary has \"%s\" already, and it is no tensor", fsdpi_show(name).s);
    for (int i = 0; i < s->count; i++) {
        const fsdp_state_tensor *o = &s->tensor[i];
        if (strcmp(o->name, name) != 0) continue;
        FSDP_FAIL_IF(!same_tensor(o, t), FSDP_ERR_INVALID, "two pieces of tensor \"%s\" have different types or shapes", fsdpi_show(name).s);
        FSDP_FAIL_IF(o->count > 0 && t->count > 0 && o->first < t->first + t->count && t->first < o->first + o->count, FSDP_ERR_INVALID,
                     "two pieces of tensor \"%s\" share element %lld", fsdpi_show(name).s, (long long)(o->first > t->first ? o->first : t->first));
    }
    return FSDP_OK;
}

fsdp_status fsdpi_state_new_piece(fsdp_state *s, const fsdp_state_tensor *like, fsdp_state_tensor **out)
{
    FSDP_TRY(check_piece(s, like));
    if (s->count == s->room) {
        int room = s->room > 0 ? 2 * s->room : 64;
        void *p = fsdpi_realloc(s->tensor, (size_t)room, sizeof(*s->tensor));
        FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for a state dictionary of %d tensors", room);
        s->tensor = p;
        s->room = room;
    }
    fsdp_state_tensor t = *like;
    size_t bytes = (size_t)t.count * fsdp_dtype_bytes(t.dtype);
    t.numel = 1;
    for (int d = 0; d < t.ndim; d++) t.numel *= t.shape[d];
    if (t.what == 0) t.what = strncmp(t.name, "optim.", 6) == 0 ? FSDP_STATE_OPTIM : FSDP_STATE_PARAMS;
    t.name = fsdpi_strdup(like->name);
    t.data = t.count > 0 ? fsdpi_calloc(bytes, 1) : NULL;
    if (t.name == NULL || (t.count > 0 && t.data == NULL)) {
        free_piece(&t);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory for %zu bytes of tensor \"%s\"", bytes, fsdpi_show(like->name).s);
    }
    s->tensor[s->count++] = t;
    if (out != NULL) *out = &s->tensor[s->count - 1];
    return FSDP_OK;
}

fsdp_status fsdp_state_add(fsdp_state *s, const fsdp_state_tensor *t)
{
    fsdp_state_tensor *mine;
    FSDP_FAIL_IF(t->count > 0 && t->data == NULL, FSDP_ERR_INVALID, "tensor \"%s\" has %lld elements, and no data", t->name != NULL ? fsdpi_show(t->name).s : "", (long long)t->count);
    FSDP_TRY(fsdpi_state_new_piece(s, t, &mine));
    if (t->count > 0) memcpy(mine->data, t->data, (size_t)t->count * fsdp_dtype_bytes(t->dtype));
    return FSDP_OK;
}

fsdp_status fsdp_state_merge(fsdp_state *s, const fsdp_state *other)
{
    const char *name;
    json_t *value;
    for (int i = 0; i < other->count; i++) {
        const fsdp_state_tensor *t = &other->tensor[i];
        if (t->count > 0 || fsdp_state_find(s, t->name) == NULL) FSDP_TRY(fsdp_state_add(s, t));
    }
    json_object_foreach(other->values, name, value)
        if (value_of(s, name) == NULL) FSDP_TRY(add_value(s, name, json_incref(value)));
    FSDP_FAIL_IF(json_object_update_missing(s->aliases, other->aliases) != 0, FSDP_ERR_NOMEM, "no memory for a state dictionary");
    if (other->kind != s->kind) s->kind = FSDP_STATE_SHARDED;
    return FSDP_OK;
}

/* ---- the outline ---- */

char *fsdpi_state_outline(const fsdp_state *s)
{
    json_t *root = json_object(), *tensors = json_object(), *values = json_object();
    const char *name;
    json_t *value;
    for (int i = 0; i < s->count; i++) {
        const fsdp_state_tensor *t = &s->tensor[i];
        json_t *shape = json_array();
        for (int d = 0; d < t->ndim; d++) json_array_append_new(shape, json_integer(t->shape[d]));
        json_object_set_new(tensors, t->name, json_pack("[iiso]", (int)t->dtype, (int)t->what, fsdp_dtype_name(t->dtype), shape));
    }
    json_object_foreach(s->values, name, value) json_object_set(values, name, value);
    json_object_set_new(root, "tensors", tensors);
    json_object_set_new(root, "values", values);
    json_object_set(root, "aliases", s->aliases);
    char *text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    json_decref(root);
    return text;
}

static fsdp_status add_outlined(fsdp_state *s, const char *name, const json_t *of)
{
    fsdp_state_tensor t = { .name = name, .dtype = (fsdp_dtype)json_integer_value(json_array_get(of, 0)), .what = (unsigned)json_integer_value(json_array_get(of, 1)) };
    const json_t *shape = json_array_get(of, 3);
    t.ndim = (int)json_array_size(shape);
    for (int d = 0; d < t.ndim && d < FSDP_MAX_DIMS; d++) t.shape[d] = json_integer_value(json_array_get(shape, (size_t)d));
    return fsdpi_state_new_piece(s, &t, NULL);
}

fsdp_status fsdpi_state_from_outline(fsdp_state **out, const char *text)
{
    fsdp_state *s;
    const char *name;
    json_t *value;
    FSDP_TRY(fsdp_state_create(&s));
    json_t *root = json_loads(text, 0, NULL);
    fsdp_status st = root != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for another rank's state dictionary");
    json_object_foreach(json_object_get(root, "tensors"), name, value)
        if (st == FSDP_OK) st = add_outlined(s, name, value);
    if (st == FSDP_OK && (json_object_update(s->values, json_object_get(root, "values")) != 0 || json_object_update(s->aliases, json_object_get(root, "aliases")) != 0))
        st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for another rank's state dictionary");
    json_decref(root);
    if (st != FSDP_OK) {
        fsdp_state_destroy(s);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *out = s;
    return FSDP_OK;
}
