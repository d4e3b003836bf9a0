/* SPDX-License-Identifier: MIT */
#include "format/safetensors_header.h"

#include "base/alloc.h"
#include "format/json.h"
#include "format/shown.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

bool fsdpi_safetensors_size(fsdp_dtype dtype, int64_t ndim, const int64_t *shape, int64_t *numel,
                            int64_t *bytes)
{
    int64_t n = 1, b;
    for (int64_t i = 0; i < ndim; i++)
        if (shape[i] < 0 || __builtin_mul_overflow(n, shape[i], &n)) return false;
    if (__builtin_mul_overflow(n, (int64_t)fsdp_dtype_bytes(dtype), &b)) return false;
    *numel = n;
    *bytes = b;
    return true;
}

void fsdpi_safetensors_table_free(fsdpi_safetensors_table *t)
{
    fsdpi_free(t->tensors);
    fsdpi_free(t->metadata);
    fsdpi_free(t->text);
    fsdpi_free(t->dims);
    *t = (fsdpi_safetensors_table){ 0 };
}

/* How much room the table needs; also checks the types that this depends on. */
struct room {
    size_t tensors, strings, text, dims;
};

static fsdp_status measure_metadata(struct room *room, const char *file, const json_t *metadata)
{
    FSDP_FAIL_IF(!json_is_object(metadata), FSDP_ERR_FORMAT,
                 "%s: \"__metadata__\" in its header should be an object of strings", file);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)metadata, key, value) {
        FSDP_FAIL_IF(!json_is_string(value), FSDP_ERR_FORMAT,
                     "%s: \"__metadata__\" in its header: the value of \"%s\" should be a string (the name "
                     "is reserved: a tensor cannot have it)",
                     file, fsdpi_show(key).s);
        room->strings++;
        room->text += strlen(key) + 1 + json_string_length(value) + 1;
    }
    return FSDP_OK;
}

static fsdp_status measure(struct room *room, const char *file, const json_t *root)
{
    const char *name;
    json_t *entry;
    json_object_foreach((json_t *)root, name, entry) {
        if (strcmp(name, FSDPI_SAFETENSORS_METADATA) == 0) {
            if (!json_is_null(entry)) FSDP_TRY(measure_metadata(room, file, entry));
            continue;
        }
        FSDP_FAIL_IF(
            !json_is_object(entry), FSDP_ERR_FORMAT,
            "%s: the header's entry of tensor \"%s\" should be an object with dtype, shape and data_offsets",
            file, fsdpi_show(name).s);
        const json_t *shape = json_object_get(entry, "shape");
        FSDP_FAIL_IF(!json_is_array(shape), FSDP_ERR_FORMAT,
                     "%s: tensor \"%s\" has no \"shape\", or one that is not an array", file,
                     fsdpi_show(name).s);
        room->tensors++;
        room->text += strlen(name) + 1;
        room->dims += json_array_size(shape);
    }
    return FSDP_OK;
}

static fsdp_status parse_dtype(fsdp_safetensors_tensor *t, const json_t *entry)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    FSDP_FAIL_IF(dtype == NULL, FSDP_ERR_FORMAT,
                 "%s: tensor \"%s\" has no \"dtype\", or one that is not a string", t->file,
                 fsdpi_show(t->name).s);
    FSDP_FAIL_IF(fsdp_dtype_parse(&t->dtype, dtype) != FSDP_OK, FSDP_ERR_FORMAT,
                 "%s: tensor \"%s\" has the element type \"%s\", which fsdp does not read: convert it to "
                 "F32, BF16 or F16",
                 t->file, fsdpi_show(t->name).s, fsdpi_show(dtype).s);
    return FSDP_OK;
}

static fsdp_status parse_shape(fsdp_safetensors_tensor *t, const json_t *shape, int64_t *dims)
{
    size_t ndim = json_array_size(shape);
    FSDP_FAIL_IF(ndim > INT_MAX, FSDP_ERR_FORMAT, "%s: tensor \"%s\" has %zu dimensions", t->file,
                 fsdpi_show(t->name).s, ndim);
    for (size_t i = 0; i < ndim; i++) {
        const json_t *size = json_array_get(shape, i);
        FSDP_FAIL_IF(!json_is_integer(size) || json_integer_value(size) < 0, FSDP_ERR_FORMAT,
                     "%s: tensor \"%s\": size %zu of its shape is not an integer of at least 0", t->file,
                     fsdpi_show(t->name).s, i);
        dims[i] = json_integer_value(size);
    }
    t->shape = dims;
    t->ndim = (int)ndim;
    return FSDP_OK;
}

/* Leaves the offset from the start of the data in t->offset. */
static fsdp_status parse_offsets(fsdp_safetensors_tensor *t, const json_t *offsets)
{
    const json_t *b = json_array_get(offsets, 0), *e = json_array_get(offsets, 1);
    FSDP_FAIL_IF(json_array_size(offsets) != 2 || !json_is_integer(b) || !json_is_integer(e), FSDP_ERR_FORMAT,
                 "%s: tensor \"%s\" has no \"data_offsets\" of two integers [begin, end]", t->file,
                 fsdpi_show(t->name).s);
    int64_t begin = json_integer_value(b), end = json_integer_value(e), bytes;
    FSDP_FAIL_IF(begin < 0 || end < begin, FSDP_ERR_FORMAT,
                 "%s: tensor \"%s\": its data_offsets [%lld, %lld] are no range", t->file,
                 fsdpi_show(t->name).s, (long long)begin, (long long)end);
    FSDP_FAIL_IF(!fsdpi_safetensors_size(t->dtype, t->ndim, t->shape, &t->numel, &bytes), FSDP_ERR_FORMAT,
                 "%s: tensor \"%s\": the product of its shape does not fit into 63 bits", t->file,
                 fsdpi_show(t->name).s);
    FSDP_FAIL_IF(
        bytes != end - begin, FSDP_ERR_FORMAT,
        "%s: tensor \"%s\": its shape and type (%s) make %lld bytes, its data_offsets [%lld, %lld] %lld",
        t->file, fsdpi_show(t->name).s, fsdp_dtype_name(t->dtype), (long long)bytes, (long long)begin,
        (long long)end, (long long)(end - begin));
    t->offset = begin;
    t->bytes = (size_t)bytes;
    return FSDP_OK;
}

static char *put(char **text, const char *s, size_t n)
{
    char *at = memcpy(*text, s, n + 1);
    *text += n + 1;
    return at;
}

static void fill_metadata(fsdpi_safetensors_table *t, const json_t *metadata, char **text)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)metadata, key, value) {
        fsdp_safetensors_string *s = &t->metadata[t->metadata_count++];
        s->key = put(text, key, strlen(key));
        s->value = put(text, json_string_value(value), json_string_length(value));
    }
}

static fsdp_status fill(fsdpi_safetensors_table *t, const char *file, const json_t *root)
{
    char *text = t->text;
    int64_t *dims = t->dims;
    const char *name;
    json_t *entry;
    json_object_foreach((json_t *)root, name, entry) {
        if (strcmp(name, FSDPI_SAFETENSORS_METADATA) == 0) {
            if (!json_is_null(entry)) fill_metadata(t, entry, &text);
            continue;
        }
        fsdp_safetensors_tensor *x = &t->tensors[t->count++];
        x->name = put(&text, name, strlen(name));
        x->file = file;
        FSDP_TRY(parse_dtype(x, entry));
        FSDP_TRY(parse_shape(x, json_object_get(entry, "shape"), dims));
        FSDP_TRY(parse_offsets(x, json_object_get(entry, "data_offsets")));
        dims += x->ndim;
    }
    return FSDP_OK;
}

/* Tensors of no bytes begin where others do: they come first, by name, so that the order is one. */
static int by_offset(const void *a, const void *b)
{
    const fsdp_safetensors_tensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* I5 and I6; then offsets count from the start of the file. */
static fsdp_status place(fsdpi_safetensors_table *t, const char *file, int64_t data_start, int64_t data_bytes)
{
    int64_t end = 0;
    if (t->count > 0) qsort(t->tensors, (size_t)t->count, sizeof(*t->tensors), by_offset);
    for (int64_t i = 0; i < t->count; i++) {
        fsdp_safetensors_tensor *x = &t->tensors[i];
        FSDP_FAIL_IF(x->offset > end, FSDP_ERR_FORMAT,
                     "%s: there is a hole of %lld bytes before the data of tensor \"%s\"", file,
                     (long long)(x->offset - end), fsdpi_show(x->name).s);
        FSDP_FAIL_IF(x->offset < end, FSDP_ERR_FORMAT,
                     "%s: the data of tensors \"%s\" and \"%s\" overlap at byte %lld", file,
                     fsdpi_show(t->tensors[i - 1].name).s, fsdpi_show(x->name).s, (long long)x->offset);
        end = x->offset + (int64_t)x->bytes;
    }
    FSDP_FAIL_IF(end > data_bytes, FSDP_ERR_FORMAT,
                 "%s: the file is %lld bytes short of what its header says: it is an incomplete download or "
                 "copy; fetch it again",
                 file, (long long)(end - data_bytes));
    FSDP_FAIL_IF(end < data_bytes, FSDP_ERR_FORMAT, "%s: the file has %lld bytes more than its header says",
                 file, (long long)(data_bytes - end));
    for (int64_t i = 0; i < t->count; i++) t->tensors[i].offset += data_start;
    return FSDP_OK;
}

static fsdp_status build(fsdpi_safetensors_table *t, const char *file, const json_t *root)
{
    struct room room = { 0 };
    FSDP_TRY(measure(&room, file, root));
    FSDPI_NEW(t->tensors, room.tensors);
    FSDPI_NEW(t->metadata, room.strings);
    FSDPI_NEW(t->text, room.text);
    FSDPI_NEW(t->dims, room.dims);
    FSDP_TRY(fill(t, file, root));
    return FSDP_OK;
}

fsdp_status fsdpi_safetensors_parse(fsdpi_safetensors_table *out, const char *file, const char *json,
                                    size_t n, int64_t data_bytes)
{
    fsdp_status st;
    json_t *root;
    fsdpi_safetensors_table t = { 0 };
    FSDP_TRY(fsdpi_json_parse(&root, file, json, n));
    FSDP_TRY_GOTO(build(&t, file, root), free_all);
    FSDP_TRY_GOTO(place(&t, file, 8 + (int64_t)n, data_bytes), free_all);
    *out = t;
    t = (fsdpi_safetensors_table){ 0 };
free_all:
    fsdpi_safetensors_table_free(&t);
    json_decref(root);
    return st;
}
