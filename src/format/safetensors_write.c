/* SPDX-License-Identifier: MIT
 *
 * The streaming writer. The header is written first, for the declarations fix every offset; then data goes
 * straight to its place, so a model larger than memory can be written from slices that arrive in any order.
 *
 * The layout is that of the format's reference, to the byte: tensors by falling alignment, then by name, so
 * that each is aligned to its element. */
#include <fsdp/safetensors.h>

#include "base/alloc.h"
#include "format/fileio.h"
#include "format/ranges.h"
#include "format/safetensors_header.h"
#include "format/shown.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct part {
    char *name;
    fsdp_dtype dtype;
    int64_t numel;
    int64_t bytes;
    int64_t offset; /* from the start of the file */
    fsdpi_ranges written;
};

/* Invariants: the parts' data ranges follow one another after the header to the end of the file; an element
 * is in `written` only if its write succeeded. */
struct fsdp_safetensors_writer {
    fsdpi_temp temp;
    struct part *parts; /* [count] as they were declared */
    int64_t count;
    bool finished;
};

enum { PIECE = 4096 }; /* elements that are rounded at a time */

/* ---- checks -------------------------------------------------------------------------------------------- */

/* The bytes of the character at p; 0 where there is none: a lone or missing continuation, an overlong form, a
 * surrogate, beyond U+10FFFF. */
static size_t utf8_char(const unsigned char *p)
{
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    if (p[0] < 0x80) return 1;
    if (p[0] < 0xc0 || p[0] > 0xf7) return 0;
    size_t n = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    uint32_t c = p[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        c = c << 6 | (p[i] & 0x3f);
    }
    return c >= least[n] && c <= 0x10ffff && (c < 0xd800 || c > 0xdfff) ? n : 0;
}

static bool is_utf8(const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    while (*p != 0) {
        size_t n = utf8_char(p);
        if (n == 0) return false;
        p += n;
    }
    return true;
}

static fsdp_status check_decl(const char *path, const fsdp_safetensors_decl *d, int64_t i, struct part *out)
{
    FSDP_FAIL_IF(d->name == NULL || d->name[0] == '\0', FSDP_ERR_INVALID,
                 "%s: tensor number %lld has no name", path, (long long)i);
    FSDP_FAIL_IF(strcmp(d->name, FSDPI_SAFETENSORS_METADATA) == 0, FSDP_ERR_INVALID,
                 "%s: a tensor cannot have the name \"%s\": safetensors reserves it", path, d->name);
    FSDP_FAIL_IF(!is_utf8(d->name), FSDP_ERR_INVALID,
                 "%s: the name of tensor number %lld (\"%s\") is not UTF-8", path, (long long)i,
                 fsdpi_show(d->name).s);
    FSDP_FAIL_IF(fsdp_dtype_bytes(d->dtype) == 0, FSDP_ERR_INVALID,
                 "%s: tensor \"%s\": %d is no element type", path, fsdpi_show(d->name).s, (int)d->dtype);
    FSDP_FAIL_IF(d->ndim < 0 || (d->ndim > 0 && d->shape == NULL), FSDP_ERR_INVALID,
                 "%s: tensor \"%s\" has %d dimensions, or no shape", path, fsdpi_show(d->name).s, d->ndim);
    FSDP_FAIL_IF(!fsdpi_safetensors_size(d->dtype, d->ndim, d->shape, &out->numel, &out->bytes),
                 FSDP_ERR_INVALID,
                 "%s: tensor \"%s\": a size is negative, or their product does not fit into 63 bits", path,
                 fsdpi_show(d->name).s);
    out->dtype = d->dtype;
    out->name = fsdpi_strdup(d->name);
    FSDP_FAIL_IF(out->name == NULL, FSDP_ERR_NOMEM, "%s: no memory for the name of a tensor", path);
    return FSDP_OK;
}

/* ---- the header ---------------------------------------------------------------------------------------- */

/* Where the reference puts a type: by rising alignment; the header has them the other way round. */
static int rank_of(fsdp_dtype dtype)
{
    static const fsdp_dtype order[] = { FSDP_BOOL, FSDP_U8,   FSDP_I8,  FSDP_I16, FSDP_U16,
                                        FSDP_F16,  FSDP_BF16, FSDP_I32, FSDP_U32, FSDP_F32,
                                        FSDP_F64,  FSDP_I64,  FSDP_U64 };
    _Static_assert(sizeof(order) / sizeof(order[0]) == FSDP_DTYPE_COUNT, "a new type needs its place here");
    int i = 0;
    while (order[i] != dtype) i++;
    return i;
}

static int by_layout(const void *a, const void *b)
{
    const fsdp_safetensors_decl *x = *(const fsdp_safetensors_decl *const *)a;
    const fsdp_safetensors_decl *y = *(const fsdp_safetensors_decl *const *)b;
    int order = rank_of(y->dtype) - rank_of(x->dtype);
    return order != 0 ? order : strcmp(x->name, y->name);
}

static int by_key(const void *a, const void *b)
{
    const fsdp_safetensors_string *x = a, *y = b;
    return strcmp(x->key, y->key);
}

static fsdp_status no_json_memory(const char *path)
{
    FSDP_FAIL(FSDP_ERR_NOMEM, "%s: no memory for its header", path);
}

/* Takes value. jansson keeps keys in the order in which they were added. */
static fsdp_status add(const char *path, json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) != 0) return no_json_memory(path);
    return FSDP_OK;
}

static fsdp_status fill_metadata(const char *path, json_t *object, const fsdp_safetensors_string *sorted,
                                 int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        FSDP_FAIL_IF(i > 0 && strcmp(sorted[i - 1].key, sorted[i].key) == 0, FSDP_ERR_INVALID,
                     "%s: two strings of its metadata have the key \"%s\"%s", path,
                     fsdpi_show(sorted[i].key).s,
                     strcmp(sorted[i].key, "format") == 0 ? ", which is always there" : "");
        FSDP_TRY(add(path, object, sorted[i].key, json_string(sorted[i].value)));
    }
    return FSDP_OK;
}

static fsdp_status add_metadata(const char *path, json_t *root, const fsdp_safetensors_string *metadata,
                                int64_t count)
{
    fsdp_safetensors_string *sorted;
    json_t *object = json_object();
    FSDP_TRY(add(path, root, FSDPI_SAFETENSORS_METADATA, object)); /* the root owns it */
    FSDPI_NEW(sorted, count + 1);
    sorted[0] = (fsdp_safetensors_string){ "format", "pt" }; /* transformers refuses a file without */
    int64_t n = 1;
    fsdp_status st = FSDP_OK;
    for (int64_t i = 0; i < count && st == FSDP_OK; i++) {
        const fsdp_safetensors_string *s = &metadata[i];
        if (s->key == NULL || s->value == NULL || !is_utf8(s->key) || !is_utf8(s->value))
            st = fsdp_error_raise(
                FSDP_ERR_INVALID, __func__, __FILE__, __LINE__,
                "%s: string number %lld of its metadata has no key or no value, or is not UTF-8", path,
                (long long)i);
        else if (strcmp(s->key, "format") != 0 || strcmp(s->value, "pt") != 0)
            sorted[n++] = *s;
    }
    if (st == FSDP_OK) {
        qsort(sorted, (size_t)n, sizeof(*sorted), by_key);
        st = fill_metadata(path, object, sorted, n);
    }
    fsdpi_free(sorted);
    FSDP_TRY(st);
    return FSDP_OK;
}

static fsdp_status add_tensor(const char *path, json_t *root, const fsdp_safetensors_decl *d, struct part *p,
                              int64_t *end)
{
    FSDP_FAIL_IF(json_object_get(root, d->name) != NULL, FSDP_ERR_INVALID,
                 "%s: two tensors have the name \"%s\"", path, fsdpi_show(d->name).s);
    p->offset = *end;
    FSDP_FAIL_IF(__builtin_add_overflow(*end, p->bytes, end) ||
                     *end > INT64_MAX - 2 * FSDPI_SAFETENSORS_MAX_HEADER,
                 FSDP_ERR_INVALID, "%s: its tensors together have more than 2^63 bytes", path);
    json_t *entry = json_object();
    FSDP_TRY(add(path, root, d->name, entry)); /* the root owns it */
    json_t *shape = json_array(), *offsets = json_array();
    fsdp_status st = add(path, entry, "dtype", json_string(fsdp_dtype_name(d->dtype)));
    if (st == FSDP_OK) st = add(path, entry, "shape", json_incref(shape));
    if (st == FSDP_OK) st = add(path, entry, "data_offsets", json_incref(offsets));
    for (int i = 0; st == FSDP_OK && i < d->ndim; i++)
        if (json_array_append_new(shape, json_integer(d->shape[i])) != 0) st = no_json_memory(path);
    if (st == FSDP_OK && (json_array_append_new(offsets, json_integer(p->offset)) != 0 ||
                          json_array_append_new(offsets, json_integer(*end)) != 0))
        st = no_json_memory(path);
    json_decref(shape);
    json_decref(offsets);
    FSDP_TRY(st);
    return FSDP_OK;
}

/* Fills root; the parts' offsets count from the start of the data. */
static fsdp_status fill_header(const char *path, json_t *root, const fsdp_safetensors_decl *tensors,
                               struct part *parts, int64_t count, int64_t *data_bytes)
{
    const fsdp_safetensors_decl **sorted;
    fsdp_status st = FSDP_OK;
    int64_t end = 0;
    FSDPI_NEW(sorted, count);
    for (int64_t i = 0; i < count; i++) sorted[i] = &tensors[i];
    if (count > 0) qsort(sorted, (size_t)count, sizeof(*sorted), by_layout);
    for (int64_t i = 0; i < count && st == FSDP_OK; i++)
        st = add_tensor(path, root, sorted[i], &parts[sorted[i] - tensors], &end);
    fsdpi_free(sorted);
    FSDP_TRY(st);
    *data_bytes = end;
    return FSDP_OK;
}

/* The 8 bytes of length, the JSON, and the spaces that align the data: *bytes of them, in *out, which the
 * caller frees. */
static fsdp_status render(const char *path, const json_t *root, char **out, size_t *bytes)
{
    size_t n = json_dumpb(root, NULL, 0, JSON_COMPACT), padded = (n + 7) / 8 * 8;
    if (n == 0) return no_json_memory(path);
    FSDP_FAIL_IF(
        padded > FSDPI_SAFETENSORS_MAX_HEADER, FSDP_ERR_INVALID,
        "%s: its header would have %zu bytes, and the format allows %d: write fewer tensors to a file", path,
        padded, FSDPI_SAFETENSORS_MAX_HEADER);
    char *text;
    FSDPI_NEW(text, 8 + padded);
    uint64_t length = padded;
    memcpy(text, &length, 8);
    memset(text + 8, ' ', padded);
    if (json_dumpb(root, text + 8, n, JSON_COMPACT) != n) {
        fsdpi_free(text);
        return no_json_memory(path);
    }
    *out = text;
    *bytes = 8 + padded;
    return FSDP_OK;
}

static fsdp_status make_header(const char *path, const fsdp_safetensors_decl *tensors, struct part *parts,
                               int64_t count, const fsdp_safetensors_string *metadata, int64_t metadata_count,
                               char **out, size_t *bytes, int64_t *data_bytes)
{
    fsdp_status st;
    json_t *root = json_object();
    if (root == NULL) return no_json_memory(path);
    FSDP_TRY_GOTO(add_metadata(path, root, metadata, metadata_count), free_root);
    FSDP_TRY_GOTO(fill_header(path, root, tensors, parts, count, data_bytes), free_root);
    FSDP_TRY_GOTO(render(path, root, out, bytes), free_root);
free_root:
    json_decref(root);
    return st;
}

/* ---- the life of a writer ------------------------------------------------------------------------------ */

fsdp_status fsdp_safetensors_writer_open(fsdp_safetensors_writer **out, const char *path,
                                         const fsdp_safetensors_decl *tensors, int64_t count,
                                         const fsdp_safetensors_string *metadata, int64_t metadata_count)
{
    fsdp_status st;
    fsdp_safetensors_writer *w;
    char *header = NULL;
    size_t header_bytes = 0;
    int64_t data_bytes = 0;
    FSDP_FAIL_IF(out == NULL || path == NULL || count < 0 || (count > 0 && tensors == NULL) ||
                     metadata_count < 0 || (metadata_count > 0 && metadata == NULL),
                 FSDP_ERR_INVALID,
                 "fsdp_safetensors_writer_open: %lld tensors and %lld strings, or no path or no arrays",
                 (long long)count, (long long)metadata_count);
    FSDPI_NEW(w, 1);
    w->temp.fd = -1;
    w->parts = fsdpi_calloc((size_t)count, sizeof(*w->parts));
    if (w->parts == NULL)
        FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, close_writer, "%s: no memory for %lld tensors", path,
                       (long long)count);
    for (; w->count < count; w->count++)
        FSDP_TRY_GOTO(check_decl(path, &tensors[w->count], w->count, &w->parts[w->count]), close_writer);
    FSDP_TRY_GOTO(make_header(path, tensors, w->parts, count, metadata, metadata_count, &header,
                              &header_bytes, &data_bytes),
                  close_writer);
    for (int64_t i = 0; i < count; i++) w->parts[i].offset += (int64_t)header_bytes;
    FSDP_TRY_GOTO(fsdpi_temp_open(&w->temp, path, (int64_t)header_bytes + data_bytes), free_header);
    FSDP_TRY_GOTO(fsdpi_temp_write(&w->temp, 0, header, header_bytes), free_header);
    fsdpi_free(header);
    *out = w;
    return FSDP_OK;
free_header:
    fsdpi_free(header);
close_writer:
    fsdp_safetensors_writer_close(w);
    return st;
}

void fsdp_safetensors_writer_close(fsdp_safetensors_writer *w)
{
    if (w == NULL) return;
    fsdpi_temp_close(&w->temp);
    for (int64_t i = 0; i < w->count; i++) {
        fsdpi_free(w->parts[i].name);
        fsdpi_ranges_free(&w->parts[i].written);
    }
    fsdpi_free(w->parts);
    fsdpi_free(w);
}

/* ---- data ---------------------------------------------------------------------------------------------- */

static fsdp_status begin_write(fsdp_safetensors_writer *w, int64_t tensor, int64_t first, int64_t numel,
                               struct part **out)
{
    const char *file = w->temp.target;
    FSDP_FAIL_IF(w->finished, FSDP_ERR_STATE, "%s: written to after it was finished", file);
    FSDP_FAIL_IF(tensor < 0 || tensor >= w->count, FSDP_ERR_INVALID,
                 "%s: there is no tensor number %lld, of %lld", file, (long long)tensor, (long long)w->count);
    struct part *p = &w->parts[tensor];
    FSDP_FAIL_IF(first < 0 || numel < 0 || first > p->numel || numel > p->numel - first, FSDP_ERR_INVALID,
                 "%s: tensor \"%s\" has %lld elements; %lld from number %lld were given", file,
                 fsdpi_show(p->name).s, (long long)p->numel, (long long)numel, (long long)first);
    int64_t again = fsdpi_ranges_overlap(&p->written, first, first + numel);
    FSDP_FAIL_IF(again < first + numel, FSDP_ERR_INVALID,
                 "%s: element %lld of tensor \"%s\" was written before: two slices overlap", file,
                 (long long)again, fsdpi_show(p->name).s);
    FSDP_TRY(fsdpi_ranges_reserve(&p->written));
    *out = p;
    return FSDP_OK;
}

fsdp_status fsdp_safetensors_writer_write_raw(fsdp_safetensors_writer *w, int64_t tensor, int64_t first,
                                              int64_t numel, const void *data)
{
    struct part *p;
    FSDP_TRY(begin_write(w, tensor, first, numel, &p));
    int64_t size = (int64_t)fsdp_dtype_bytes(p->dtype);
    FSDP_TRY(fsdpi_temp_write(&w->temp, p->offset + first * size, data, (size_t)(numel * size)));
    fsdpi_ranges_add(&p->written, first, first + numel);
    return FSDP_OK;
}

/* out: numel elements as they lie in a file. */
static void narrow(fsdp_dtype dtype, const float *in, size_t numel, char *out)
{
    for (size_t i = 0; i < numel; i++) {
        if (dtype == FSDP_F64) {
            double x = in[i];
            memcpy(out + 8 * i, &x, 8);
        } else {
            uint16_t x = dtype == FSDP_BF16 ? fsdp_bf16_from_f32(in[i]) : fsdp_f16_from_f32(in[i]);
            memcpy(out + 2 * i, &x, 2);
        }
    }
}

fsdp_status fsdp_safetensors_writer_write_f32(fsdp_safetensors_writer *w, int64_t tensor, int64_t first,
                                              int64_t numel, const float *data)
{
    char piece[PIECE * 8];
    struct part *p;
    FSDP_TRY(begin_write(w, tensor, first, numel, &p));
    int64_t size = (int64_t)fsdp_dtype_bytes(p->dtype);
    if (p->dtype == FSDP_F32) {
        FSDP_TRY(fsdpi_temp_write(&w->temp, p->offset + first * size, data, (size_t)(numel * size)));
    } else {
        FSDP_FAIL_IF(p->dtype != FSDP_BF16 && p->dtype != FSDP_F16 && p->dtype != FSDP_F64, FSDP_ERR_INVALID,
                     "%s: tensor \"%s\" is of type %s, which is not written from floats", w->temp.target,
                     fsdpi_show(p->name).s, fsdp_dtype_name(p->dtype));
        for (int64_t done = 0; done < numel; done += PIECE) {
            int64_t n = numel - done < PIECE ? numel - done : PIECE;
            narrow(p->dtype, data + done, (size_t)n, piece);
            FSDP_TRY(
                fsdpi_temp_write(&w->temp, p->offset + (first + done) * size, piece, (size_t)(n * size)));
        }
    }
    fsdpi_ranges_add(&p->written, first, first + numel);
    return FSDP_OK;
}

fsdp_status fsdp_safetensors_writer_finish(fsdp_safetensors_writer *w)
{
    int64_t incomplete = 0, which = 0;
    fsdpi_range gap = { 0, 0 };
    FSDP_FAIL_IF(w->finished, FSDP_ERR_STATE, "%s: finished twice", w->temp.target);
    for (int64_t i = w->count - 1; i >= 0; i--) {
        if (!fsdpi_ranges_gap(&w->parts[i].written, w->parts[i].numel, &gap)) continue;
        incomplete++;
        which = i;
    }
    FSDP_FAIL_IF(incomplete > 0, FSDP_ERR_STATE,
                 "%s: elements %lld to %lld of tensor \"%s\" were never written (%lld of %lld tensors are "
                 "not complete)",
                 w->temp.target, (long long)gap.first, (long long)gap.end - 1,
                 fsdpi_show(w->parts[which].name).s, (long long)incomplete, (long long)w->count);
    FSDP_TRY(fsdpi_temp_commit(&w->temp));
    w->finished = true;
    return FSDP_OK;
}
