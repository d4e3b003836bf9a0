/* SPDX-License-Identifier: MIT
 *
 * Buffers: a value in host memory, and where the module is used on a device that has memory of its own, another there, which counts.
 * That one has a stream: it waits for the tape's where the module ends, and the tape's for it where the module begins, so
 * that a value can be read and written when the tape is gone. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdio.h>
#include <string.h>

typedef struct fsdpi_buffer_home {
    fsdp_device *dev;
    fsdp_stream *stream;
    fsdpi_arena *arena;
} fsdpi_buffer_home;

/* ---- the tensor ---- */

static const float *buffer_data(void *ctx, int index)
{
    const fsdpi_buffer *b = ctx;
    (void)index;
    return b->placed != NULL ? b->placed : b->host;
}

static bool buffer_stays(void *ctx, const fsdp_tape *tape)
{
    (void)ctx;
    (void)tape;
    return true;
}

static void free_buffer(fsdpi_buffer *b)
{
    if (b == NULL) return;
    fsdpi_free((char *)(uintptr_t)b->info.name);
    fsdpi_free(b->host);
    fsdpi_free(b);
}

static fsdp_status check_name(const fsdp_module *m, const fsdp_buffer *buffer)
{
    FSDP_FAIL_IF(buffer == NULL || buffer->name == NULL || buffer->name[0] == '\0', FSDP_ERR_INVALID, "module %s: a buffer without a name", m->type);
    for (int i = 0; i < m->params; i++)
        FSDP_FAIL_IF(strcmp(m->param_name[i], buffer->name) == 0, FSDP_ERR_INVALID, "module %s, buffer \"%s\": a parameter has that name", m->type, buffer->name);
    for (int i = 0; i < m->buffers; i++)
        FSDP_FAIL_IF(strcmp(m->buffer[i]->info.name, buffer->name) == 0, FSDP_ERR_INVALID, "module %s has a buffer \"%s\" already", m->type, buffer->name);
    for (int i = 0; i < m->children; i++)
        FSDP_FAIL_IF(strcmp(m->child[i]->name, buffer->name) == 0, FSDP_ERR_INVALID, "module %s, buffer \"%s\": a child has that name", m->type, buffer->name);
    return FSDP_OK;
}

static fsdp_status fill_in(fsdpi_buffer *b, const void *values)
{
    FSDP_TRY(fsdpi_tensor_set_shape(&b->tensor, b->info.dtype, b->info.ndim, b->info.shape));
    b->bytes = (size_t)b->tensor.numel * fsdp_dtype_bytes(b->info.dtype);
    b->host = fsdpi_calloc(b->bytes, 1);
    char *name = fsdpi_strdup(b->info.name);
    b->info.name = name;
    FSDP_FAIL_IF(b->host == NULL || name == NULL, FSDP_ERR_NOMEM, "no memory for a buffer of %zu bytes", b->bytes);
    if (values != NULL && b->bytes > 0) memcpy(b->host, values, b->bytes);
    b->source = (fsdpi_source){ .data = buffer_data, .stays = buffer_stays, .ctx = b };
    b->tensor.source = &b->source;
    return FSDP_OK;
}

fsdp_status fsdp_module_add_buffer(fsdp_module *m, const fsdp_buffer *buffer, const void *values)
{
    fsdpi_buffer *b;
    FSDP_FAIL_IF(m == NULL, FSDP_ERR_INVALID, "fsdp_module_add_buffer: no module");
    FSDP_TRY(check_name(m, buffer));
    FSDP_FAIL_IF(fsdp_dtype_bytes(buffer->dtype) == 0, FSDP_ERR_INVALID, "module %s, buffer \"%s\": %d is no type", m->type, buffer->name, (int)buffer->dtype);
    fsdpi_buffer **list = fsdpi_realloc((void *)m->buffer, (size_t)m->buffers + 1, sizeof(*list));
    FSDP_FAIL_IF(list == NULL, FSDP_ERR_NOMEM, "no memory for buffer \"%s\"", buffer->name);
    m->buffer = list;
    FSDPI_NEW(b, 1);
    b->info = *buffer;
    b->module = m;
    fsdp_status st = fill_in(b, values);
    if (st != FSDP_OK) {
        if (b->info.name == buffer->name) b->info.name = NULL; /* not copied yet */
        free_buffer(b);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    m->buffer[m->buffers++] = b;
    return FSDP_OK;
}

fsdp_tensor *fsdp_module_buffer(fsdp_module *m, int i)
{
    return i >= 0 && i < m->buffers ? &m->buffer[i]->tensor : NULL;
}

/* ---- where they lie ---- */

/* What is placed there goes with the arena. */
static void leave_home(fsdp_module *m)
{
    fsdpi_buffer_home *h = m->home;
    if (h == NULL) return;
    for (int i = 0; i < m->buffers; i++) m->buffer[i]->placed = NULL;
    if (h->stream != NULL) (void)!fsdp_stream_sync(h->stream);
    fsdpi_stream_destroy(h->stream);
    fsdpi_arena_destroy(h->arena);
    if (h->dev != NULL) fsdpi_device_release(h->dev);
    fsdpi_free(h);
    m->home = NULL;
}

void fsdpi_buffers_destroy(fsdp_module *m)
{
    leave_home(m);
    for (int i = 0; i < m->buffers; i++) free_buffer(m->buffer[i]);
    fsdpi_free((void *)m->buffer);
    fsdpi_free(m->buffer_list);
    fsdpi_free(m->buffer_names);
}

/* The value on the device, into host memory. */
static fsdp_status pull(fsdpi_buffer *b)
{
    if (b->placed == NULL) return FSDP_OK;
    FSDP_TRY(fsdp_stream_copy(b->module->home->stream, b->host, b->placed, b->bytes));
    return fsdp_stream_sync(b->module->home->stream);
}

static fsdp_status push(fsdpi_buffer *b)
{
    if (b->placed == NULL) return FSDP_OK;
    FSDP_TRY(fsdp_stream_copy(b->module->home->stream, b->placed, b->host, b->bytes));
    return fsdp_stream_sync(b->module->home->stream); /* host memory may change after this */
}

static fsdp_status find_home(fsdp_module *m, fsdp_device *dev)
{
    fsdpi_buffer_home *h;
    if (m->home != NULL && m->home->dev == dev) return FSDP_OK;
    for (int i = 0; i < m->buffers; i++) FSDP_TRY(pull(m->buffer[i]));
    leave_home(m);
    if (fsdp_device_host_accessible(dev)) return FSDP_OK;
    FSDPI_NEW(h, 1);
    m->home = h;
    h->dev = dev;
    fsdpi_device_retain(dev);
    fsdp_status st = fsdpi_arena_create(&h->arena, dev);
    if (st == FSDP_OK) st = fsdpi_stream_create(&h->stream, dev, NULL);
    if (st != FSDP_OK) leave_home(m);
    return st;
}

/* Where an operation of the forward or of the backward may be reading, or writing, a value that the program reads or writes next. */
static fsdp_status wait_for_tape(void *ctx, fsdp_tape *tape)
{
    const fsdp_module *m = ctx;
    return m->home != NULL ? fsdpi_stream_wait_stream(m->home->stream, tape->stream) : FSDP_OK;
}

static const fsdpi_scope_hooks buffer_scope = { .after_forward = wait_for_tape, .after_backward = wait_for_tape };

fsdp_status fsdpi_buffers_enter(fsdp_module *m, fsdp_tape *tape)
{
    if (m->buffers == 0) return FSDP_OK;
    FSDP_TRY(find_home(m, tape->opts.device));
    if (m->home == NULL) return FSDP_OK;
    for (int i = 0; i < m->buffers; i++) {
        fsdpi_buffer *b = m->buffer[i];
        if (b->placed != NULL || b->bytes == 0) continue;
        FSDP_TRY(fsdpi_arena_alloc(m->home->arena, b->bytes, &b->placed));
        fsdp_status st = push(b);
        if (st == FSDP_OK) continue;
        fsdpi_arena_free(m->home->arena, b->placed);
        b->placed = NULL; /* it has no value */
        return st;
    }
    FSDP_TRY(fsdpi_stream_wait_stream(tape->stream, m->home->stream));
    return fsdpi_tape_enter(tape, &buffer_scope, m);
}

/* ---- reading and writing ---- */

static fsdp_status find(fsdpi_buffer **out, fsdp_module *m, int i, const char *call)
{
    FSDP_FAIL_IF(m == NULL || i < 0 || i >= m->buffers, FSDP_ERR_INVALID, "%s: module %s has %d buffers of its own, not one with number %d", call, m != NULL ? m->type : "NULL",
                 m != NULL ? m->buffers : 0, i);
    *out = m->buffer[i];
    return FSDP_OK;
}

fsdp_status fsdp_module_read_buffer(fsdp_module *m, int i, void *out)
{
    fsdpi_buffer *b;
    FSDP_TRY(find(&b, m, i, __func__));
    FSDP_TRY(pull(b));
    if (b->bytes > 0) memcpy(out, b->host, b->bytes);
    return FSDP_OK;
}

fsdp_status fsdp_module_write_buffer(fsdp_module *m, int i, const void *values)
{
    fsdpi_buffer *b;
    FSDP_TRY(find(&b, m, i, __func__));
    if (b->bytes > 0) memcpy(b->host, values, b->bytes);
    return push(b);
}

/* ---- lists ---- */

typedef struct listing {
    fsdp_module_buffer_info *info; /* NULL: count */
    char *names;
    size_t used;
    int count;
} listing;

static fsdp_status list_own(fsdp_module *m, const char *prefix, void *arg)
{
    listing *l = arg;
    for (int i = 0; i < m->buffers; i++) {
        const fsdp_buffer *b = &m->buffer[i]->info;
        size_t n = strlen(prefix) + strlen(b->name) + 1;
        if (l->info != NULL) {
            snprintf(l->names + l->used, n, "%s%s", prefix, b->name);
            l->info[l->count] = (fsdp_module_buffer_info){ .name = l->names + l->used, .buffer = b, .module = m, .index = i };
        }
        l->used += n;
        l->count++;
    }
    return FSDP_OK;
}

fsdp_status fsdp_module_buffers(fsdp_module *m, const fsdp_module_buffer_info **out, int *count)
{
    listing l = { 0 };
    FSDP_TRY(fsdpi_module_walk_named(m, "", list_own, &l));
    fsdp_module_buffer_info *info = fsdpi_calloc((size_t)l.count, sizeof(*info));
    char *names = fsdpi_calloc(l.used, 1);
    if (info == NULL || names == NULL) {
        fsdpi_free(info);
        fsdpi_free(names);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to list %d buffers", l.count);
    }
    l = (listing){ .info = info, .names = names };
    (void)!fsdpi_module_walk_named(m, "", list_own, &l); /* the same walk, so it cannot fail */
    fsdpi_free(m->buffer_list);
    fsdpi_free(m->buffer_names);
    *out = m->buffer_list = info;
    m->buffer_names = names;
    *count = l.count;
    return FSDP_OK;
}

/* ---- rank 0's ---- */

typedef struct spread {
    fsdp_comm *comm;
    fsdp_status st; /* this rank's first error: it goes on with the others */
} spread;

static fsdp_status from_rank0(fsdp_module *m, void *arg)
{
    spread *s = arg;
    for (int i = 0; i < m->buffers; i++) {
        fsdpi_buffer *b = m->buffer[i];
        if (s->st == FSDP_OK) s->st = pull(b);
        FSDP_TRY(fsdp_comm_broadcast(s->comm, b->host, b->bytes, 0));
        if (s->st == FSDP_OK) s->st = push(b);
    }
    return FSDP_OK;
}

fsdp_status fsdpi_buffers_from_rank0(fsdp_module *m, fsdp_comm *comm)
{
    spread s = { .comm = comm };
    FSDP_TRY(fsdpi_module_walk(m, from_rank0, &s));
    return fsdp_comm_agree(comm, s.st);
}
