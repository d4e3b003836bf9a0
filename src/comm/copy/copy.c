/* SPDX-License-Identifier: MIT
 *
 * Transport "copy": what a network does, between processes of one machine. Nothing that a rank computes with is
 * shared: owners send their slices into mailboxes (shared memory that only this file knows), ranks gather into buffers
 * of their own, and an owner receives each rank's gradients into a staging buffer, one rank at a time. Buffers that
 * are given up are filled with garbage, so that code which holds on to one fails here as it would on a GPU. */
#include "comm/symmetric.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"

#include <stdio.h>
#include <string.h>

/* Copies that count as communication. The mailbox side is a host address, which kernels may use as it is. */
typedef struct move_args {
    fsdp_comm *comm;
    void *dst;
    const void *src;
    size_t bytes;
    bool is_gather;
} move_args;

static fsdp_status k_move(const fsdp_kernel *k, const void *args)
{
    const move_args *a = args;
    int64_t start = fsdpi_now_ns();
    memcpy(fsdp_kernel_ptr(k, a->dst), fsdp_kernel_ptr(k, a->src), a->bytes);
    fsdp_comm_stats *st = &a->comm->stats;
    __atomic_fetch_add(&st->copy_ns, (uint64_t)(fsdpi_now_ns() - start), __ATOMIC_RELAXED);
    __atomic_fetch_add(a->is_gather ? &st->gather_bytes : &st->reduce_bytes, a->bytes, __ATOMIC_RELAXED);
    return FSDP_OK;
}

static fsdp_status move(fsdp_stream *s, fsdp_comm *comm, void *dst, const void *src, size_t bytes, bool is_gather)
{
    if (bytes == 0) return FSDP_OK;
    return fsdp_stream_launch(s, k_move, &(move_args){ comm, dst, src, bytes, is_gather }, sizeof(move_args));
}

struct fsdpi_flat {
    fsdpi_region region;
    fsdpi_group group;
    int member;
    size_t *edges;
    unsigned char *mailbox; /* the group's whole, mapped for the host */
    char name[FSDPI_NAME];
};

static void destroy_flat(fsdpi_flat *f)
{
    if (f == NULL) return;
    fsdpi_region_unmap(&f->region, fsdp_device_cpu(), f->mailbox, f->edges[f->group.size]);
    fsdpi_region_destroy(&f->region);
    fsdpi_free(f->edges);
    fsdpi_free(f);
}

static fsdp_status create_flat(fsdpi_flat **out, fsdp_comm *comm, fsdpi_group group, fsdp_device *dev, const size_t *edges, size_t room,
                               const char *name)
{
    (void)dev;
    size_t n = (size_t)group.size + 1, bytes = edges[group.size], stride = fsdpi_round_up(room, fsdpi_page_size());
    void *p;
    fsdpi_region region;
    fsdpi_flat *f = fsdpi_calloc(1, sizeof(*f));
    size_t *copy = fsdpi_calloc(n, sizeof(*copy));
    fsdp_status st = FSDP_OK;
    if (f == NULL || copy == NULL)
        st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for the parameters of \"%s\"", name);
    st = fsdpi_region_create(&region, comm, st, 2 * comm->size, stride * (size_t)(comm->size / group.size));
    if (st != FSDP_OK) {
        fsdpi_free(f);
        fsdpi_free(copy);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *f = (fsdpi_flat){ .region = region, .group = group, .member = fsdpi_group_member(&group, comm->rank), .edges = copy };
    memcpy(copy, edges, n * sizeof(*copy));
    snprintf(f->name, sizeof(f->name), "%s", name);
    FSDP_TRY_GOTO(fsdpi_region_map(&f->region, fsdp_device_cpu(), stride * (size_t)fsdpi_group_index(&group, comm->rank), bytes, true, &p), fail);
    f->mailbox = p;
    *out = f;
    return FSDP_OK;
fail:
    destroy_flat(f);
    return st;
}

static void *flat_slice(fsdpi_flat *f)
{
    (void)f;
    return NULL;
}

static fsdp_status flat_done(fsdpi_flat *f, uint32_t v, fsdp_stream *s)
{
    return fsdpi_launch_set(s, fsdpi_second_counter(&f->region, f->region.comm->rank), v + 1);
}

static fsdp_status flat_open(fsdpi_flat *f, uint32_t v, fsdp_stream *s)
{
    return fsdpi_launch_wait(s, &f->region, &f->group, true, -1, v, "write", f->name);
}

static fsdp_status flat_publish(fsdpi_flat *f, uint32_t v, const void *slice, fsdp_stream *s)
{
    int m = f->member;
    if (slice != NULL) FSDP_TRY(move(s, f->region.comm, f->mailbox + f->edges[m], slice, f->edges[m + 1] - f->edges[m], true));
    return fsdpi_launch_set(s, fsdpi_first_counter(&f->region, f->region.comm->rank), v);
}

static fsdp_status flat_restart(fsdpi_flat *f, const void *slice, fsdp_stream *s)
{
    FSDP_TRY(flat_publish(f, 0, slice, s));
    return fsdpi_launch_set(s, fsdpi_second_counter(&f->region, f->region.comm->rank), 0);
}

static fsdp_status flat_gather(fsdpi_flat *f, uint32_t v, void *whole, fsdp_stream *s)
{
    for (int m = 0; m < f->group.size; m++) {
        FSDP_TRY(fsdpi_launch_wait(s, &f->region, &f->group, false, m, v, "gather", f->name));
        FSDP_TRY(move(s, f->region.comm, (char *)whole + f->edges[m], f->mailbox + f->edges[m], f->edges[m + 1] - f->edges[m],
                      true));
    }
    return FSDP_OK;
}

static const void *flat_whole(fsdpi_flat *f)
{
    (void)f;
    return NULL;
}

struct fsdpi_window {
    fsdpi_region region;
    fsdpi_group group;
    fsdp_device *dev;
    size_t bytes, stride;
    unsigned char *mailbox; /* all ranks', mapped for the host */
    void *buffer;           /* this rank's, private */
    void *staging;          /* what came from one rank */
    size_t staged;          /* bytes of garbage owed to it */
};

static void destroy_window(fsdpi_window *w)
{
    if (w == NULL) return;
    fsdpi_region_unmap(&w->region, fsdp_device_cpu(), w->mailbox, w->stride * (size_t)w->region.comm->size);
    if (w->buffer != NULL) w->dev->ops->free(w->dev, w->buffer, w->stride);
    if (w->staging != NULL) w->dev->ops->free(w->dev, w->staging, w->stride);
    fsdpi_region_destroy(&w->region);
    fsdpi_free(w);
}

static fsdp_status create_window(fsdpi_window **out, fsdp_comm *comm, fsdp_device *dev, size_t bytes)
{
    size_t stride = fsdpi_round_up(bytes > 0 ? bytes : 1, fsdpi_page_size()), all = stride * (size_t)comm->size;
    void *p;
    fsdpi_region region;
    fsdpi_window *w = fsdpi_calloc(1, sizeof(*w));
    fsdp_status st = FSDP_OK;
    if (w == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for a gradient window");
    st = fsdpi_region_create(&region, comm, st, 2 * comm->size, all);
    if (st != FSDP_OK) {
        fsdpi_free(w);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *w = (fsdpi_window){ .region = region, .group = fsdpi_group_all(comm), .dev = dev, .bytes = bytes, .stride = stride };
    FSDP_TRY_GOTO(fsdpi_region_map(&w->region, fsdp_device_cpu(), 0, all, true, &p), fail);
    w->mailbox = p;
    FSDP_TRY_GOTO(dev->ops->alloc(dev, w->stride, &w->buffer), fail);
    FSDP_TRY_GOTO(dev->ops->alloc(dev, w->stride, &w->staging), fail);
    *out = w;
    return FSDP_OK;
fail:
    destroy_window(w);
    return st;
}

static void *window_buffer(fsdpi_window *w)
{
    return w->buffer;
}

static unsigned char *mailbox_of(fsdpi_window *w, int rank)
{
    return w->mailbox + w->stride * (size_t)rank;
}

static fsdp_status window_acquire(fsdpi_window *w, uint32_t use, const char *name, fsdp_stream *s)
{
    return fsdpi_launch_wait(s, &w->region, &w->group, true, -1, use - 1, "wait for the gradient window", name);
}

static fsdp_status window_post(fsdpi_window *w, uint32_t use, size_t bytes, fsdp_stream *s)
{
    fsdp_comm *comm = w->region.comm;
    FSDP_TRY(move(s, comm, mailbox_of(w, comm->rank), w->buffer, bytes, false));
    FSDP_TRY(fsdpi_launch_set(s, fsdpi_first_counter(&w->region, comm->rank), use));
    return fsdpi_stream_fill(s, w->buffer, 0xff, bytes); /* it is sent: whoever reads it again reads NaNs */
}

static bool window_ready(fsdpi_window *w, uint32_t use)
{
    for (int r = 0; r < w->region.comm->size; r++)
        if (!fsdpi_counter_reached(fsdpi_first_counter(&w->region, r), use)) return false;
    return true;
}

static fsdp_status scribble_staging(fsdpi_window *w, fsdp_stream *s)
{
    size_t n = w->staged;
    w->staged = 0;
    return n > 0 ? fsdpi_stream_fill(s, w->staging, 0xff, n) : FSDP_OK;
}

static fsdp_status window_peer(fsdpi_window *w, uint32_t use, int r, size_t lo, size_t hi, const char *name, fsdp_stream *s,
                               const void **out)
{
    FSDP_TRY(scribble_staging(w, s));
    FSDP_TRY(fsdpi_launch_wait(s, &w->region, &w->group, false, r, use, "gradient reduction", name));
    FSDP_TRY(move(s, w->region.comm, w->staging, mailbox_of(w, r) + lo, hi - lo, false));
    w->staged = hi - lo;
    *out = w->staging;
    return FSDP_OK;
}

static fsdp_status window_take(fsdpi_window *w, uint32_t use, fsdp_stream *s)
{
    FSDP_TRY(scribble_staging(w, s));
    return fsdpi_launch_set(s, fsdpi_second_counter(&w->region, w->region.comm->rank), use);
}

const fsdpi_transport_ops fsdpi_transport_copy = {
    .name = "copy",
    .scribble = true,
    .flat_create = create_flat,
    .flat_destroy = destroy_flat,
    .flat_slice = flat_slice,
    .flat_done = flat_done,
    .flat_open = flat_open,
    .flat_publish = flat_publish,
    .flat_restart = flat_restart,
    .flat_gather = flat_gather,
    .flat_whole = flat_whole,
    .window_create = create_window,
    .window_destroy = destroy_window,
    .window_buffer = window_buffer,
    .window_acquire = window_acquire,
    .window_post = window_post,
    .window_ready = window_ready,
    .window_peer = window_peer,
    .window_take = window_take,
};
