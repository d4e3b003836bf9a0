/* SPDX-License-Identifier: MIT */
#include "checkpoint/snapshot.h"

#include "base/alloc.h"
#include "base/error.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>

/* JSON has no word for numbers that are infinite or none: a best loss begins as one. */
static json_t *real_json(double x)
{
    return isfinite(x) ? json_real(x) : json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

static json_t *value_json(const fsdpi_entry *e)
{
    switch (e->kind) {
    case FSDPI_ENTRY_I64: return json_integer(*(int64_t *)e->value);
    case FSDPI_ENTRY_F64: return real_json(*(double *)e->value);
    case FSDPI_ENTRY_TEXT: return json_string(e->text);
    case FSDPI_ENTRY_STEPS: return json_integer(fsdp_optim_param_steps(e->optim, e->unit, e->index));
    default: return NULL;
    }
}

static const char *what_name(const fsdpi_entry *e)
{
    return e->kind == FSDPI_ENTRY_PARAM ? "param" : e->kind == FSDPI_ENTRY_BUFFER ? "buffer" : "optim";
}

static void add_tensor(fsdpi_snapshot *s, const fsdp_checkpoint *c, const fsdpi_entry *e)
{
    fsdpi_range_of r = fsdpi_entry_range(c, e);
    fsdpi_saved *t = &s->saved[s->count++];
    *t = (fsdpi_saved){ .name = e->name, .what = what_name(e), .dtype = e->dtype, .ndim = e->ndim, .first = r.first, .numel = r.numel, .at = r.at };
    memcpy(t->shape, e->shape, sizeof(t->shape));
    t->stream = fsdpi_entry_stream(e);
    s->bytes += (size_t)r.numel * fsdp_dtype_bytes(e->dtype);
}

static bool add_all(fsdpi_snapshot *s, const fsdp_checkpoint *c)
{
    bool good = true;
    for (int i = 0; i < c->count && good; i++) {
        const fsdpi_entry *e = &c->entry[i];
        if (fsdpi_entry_is_tensor(e)) add_tensor(s, c, e);
        else if (e->kind == FSDPI_ENTRY_ALIAS) good = json_object_set_new(s->aliases, e->name, json_string(c->entry[e->of].name)) == 0;
        else good = json_object_set_new(s->values, e->name, value_json(e)) == 0;
    }
    return good;
}

fsdp_status fsdpi_snapshot_make(fsdpi_snapshot **out, const fsdp_checkpoint *c)
{
    fsdpi_snapshot *s;
    FSDPI_NEW(s, 1);
    s->saved = fsdpi_calloc((size_t)c->count, sizeof(*s->saved));
    s->values = json_object();
    s->aliases = json_object();
    s->registry = fsdpi_registry_hash(c);
    if (s->saved == NULL || s->values == NULL || s->aliases == NULL || !add_all(s, c)) {
        fsdpi_snapshot_free(s);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to save %d entries", c->count);
    }
    *out = s;
    return FSDP_OK;
}

void fsdpi_snapshot_free(fsdpi_snapshot *s)
{
    if (s == NULL) return;
    fsdpi_snapshot_unstage(s);
    json_decref(s->values);
    json_decref(s->aliases);
    fsdpi_free(s->saved);
    fsdpi_free(s);
}

/* Streams are waited for once each, when all copies are launched. */
static fsdp_status sync_streams(const fsdpi_snapshot *s)
{
    const fsdp_stream *last = NULL;
    for (int i = 0; i < s->count; i++) {
        fsdp_stream *stream = s->saved[i].stream;
        if (stream == NULL || stream == last || s->saved[i].numel == 0) continue;
        last = stream;
        FSDP_TRY(fsdp_stream_sync(stream));
    }
    return FSDP_OK;
}

static fsdp_status copy_all(const fsdpi_snapshot *s, char *to)
{
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < s->count && st == FSDP_OK; i++) {
        const fsdpi_saved *t = &s->saved[i];
        size_t bytes = (size_t)t->numel * fsdp_dtype_bytes(t->dtype);
        if (bytes == 0) continue;
        if (t->at == NULL) memset(to, 0, bytes);
        else if (t->stream != NULL) st = fsdp_stream_copy(t->stream, to, t->at, bytes);
        else memcpy(to, t->at, bytes);
        to += bytes;
    }
    fsdp_status sync = sync_streams(s); /* also after an error: what was launched writes into the copy */
    return st != FSDP_OK ? st : sync;
}

/* Pages of its own: they go back to the system when it has been written, however the program's heap is set up. */
static void *map_pages(size_t bytes)
{
    void *p = fsdpi_alloc_should_fail() ? MAP_FAILED : mmap(NULL, bytes > 0 ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    (void)!madvise(p, bytes > 0 ? bytes : 1, MADV_HUGEPAGE); /* a hint: the copy is made while training waits */
    return p;
}

static void unmap_pages(void *p, size_t bytes)
{
    if (p != NULL) munmap(p, bytes > 0 ? bytes : 1);
}

fsdp_status fsdpi_snapshot_stage(fsdpi_snapshot *s)
{
    char *to = map_pages(s->bytes);
    FSDP_FAIL_IF(to == NULL, FSDP_ERR_NOMEM, "no memory for a copy of %zu bytes", s->bytes);
    fsdp_status st = copy_all(s, to);
    if (st != FSDP_OK) {
        unmap_pages(to, s->bytes);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    s->staging = to;
    atomic_store(&s->staged, s->bytes);
    for (int i = 0; i < s->count; i++) {
        fsdpi_saved *t = &s->saved[i];
        t->stream = NULL;
        t->at = to;
        to += (size_t)t->numel * fsdp_dtype_bytes(t->dtype);
    }
    return FSDP_OK;
}

void fsdpi_snapshot_unstage(fsdpi_snapshot *s)
{
    unmap_pages(s->staging, s->bytes);
    s->staging = NULL;
    atomic_store(&s->staged, 0);
}

fsdp_status fsdpi_saved_read(const fsdpi_saved *t, int64_t done, int64_t numel, void *host)
{
    size_t size = fsdp_dtype_bytes(t->dtype);
    if (t->at == NULL) {
        memset(host, 0, (size_t)numel * size);
        return FSDP_OK;
    }
    const char *from = t->at + (size_t)done * size;
    if (t->stream == NULL) {
        memcpy(host, from, (size_t)numel * size);
        return FSDP_OK;
    }
    FSDP_TRY(fsdp_stream_copy(t->stream, host, from, (size_t)numel * size));
    return fsdp_stream_sync(t->stream);
}
