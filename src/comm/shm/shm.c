/* SPDX-License-Identifier: MIT
 *
 * Transport "shm": whole parameters lie once in memory that all ranks of the node map. An owner writes its slice in
 * place, through a mapping of its own; everybody reads a read-only one. To gather is to wait. Gradient windows lie
 * there too: owners read their slices of them where they are.
 *
 * "self" is the same for one rank. */
#include "comm/symmetric.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdio.h>

struct fsdpi_flat {
    fsdpi_region region;
    fsdpi_group group;
    fsdp_device *dev;
    size_t bytes;        /* the whole */
    size_t lo, hi;       /* of this rank */
    void *view;          /* the whole, read-only */
    void *mine;          /* writable, from the page on which the slice begins */
    size_t mine_at, mine_bytes;
    char name[FSDPI_NAME];
};

static void destroy_flat(fsdpi_flat *f)
{
    if (f == NULL) return;
    fsdpi_region_unmap(&f->region, f->dev, f->view, f->bytes);
    fsdpi_region_unmap(&f->region, f->dev, f->mine, f->mine_bytes);
    fsdpi_region_destroy(&f->region);
    fsdpi_free(f);
}

static fsdp_status create_flat(fsdpi_flat **out, fsdp_comm *comm, fsdpi_group group, fsdp_device *dev, const size_t *edges, size_t room,
                               const char *name)
{
    int member = fsdpi_group_member(&group, comm->rank);
    size_t page = fsdpi_page_size(), bytes = edges[group.size], stride = fsdpi_round_up(room, page);
    fsdpi_region region;
    fsdpi_flat *f = fsdpi_calloc(1, sizeof(*f));
    fsdp_status st = FSDP_OK;
    if (f == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for the parameters of \"%s\"", name);
    st = fsdpi_region_create(&region, comm, st, 2 * comm->size, stride * (size_t)(comm->size / group.size));
    if (st != FSDP_OK) {
        fsdpi_free(f);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    size_t lo = edges[member], hi = edges[member + 1], at = lo / page * page, base = stride * (size_t)fsdpi_group_index(&group, comm->rank);
    *f = (fsdpi_flat){ .region = region,
                       .group = group,
                       .dev = dev,
                       .bytes = bytes,
                       .lo = lo,
                       .hi = hi,
                       .mine_at = at,
                       .mine_bytes = hi > lo ? hi - at : 0 };
    snprintf(f->name, sizeof(f->name), "%s", name);
    FSDP_TRY_GOTO(fsdpi_region_map(&f->region, dev, base, f->bytes, false, &f->view), fail);
    FSDP_TRY_GOTO(fsdpi_region_map(&f->region, dev, base + f->mine_at, f->mine_bytes, true, &f->mine), fail);
    *out = f;
    return FSDP_OK;
fail:
    destroy_flat(f);
    return st;
}

static void *flat_slice(fsdpi_flat *f)
{
    return f->mine != NULL ? (char *)f->mine + (f->lo - f->mine_at) : NULL;
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
    void *place = flat_slice(f);
    if (f->hi > f->lo && slice != NULL && slice != place) FSDP_TRY(fsdp_stream_copy(s, place, slice, f->hi - f->lo));
    return fsdpi_launch_set(s, fsdpi_first_counter(&f->region, f->region.comm->rank), v);
}

static fsdp_status flat_restart(fsdpi_flat *f, const void *slice, fsdp_stream *s)
{
    FSDP_TRY(flat_publish(f, 0, slice, s));
    return fsdpi_launch_set(s, fsdpi_second_counter(&f->region, f->region.comm->rank), 0);
}

static fsdp_status flat_gather(fsdpi_flat *f, uint32_t v, void *whole, fsdp_stream *s)
{
    (void)whole;
    return fsdpi_launch_wait(s, &f->region, &f->group, false, -1, v, "gather", f->name);
}

static const void *flat_whole(fsdpi_flat *f)
{
    return f->view;
}

static void flat_protect(fsdpi_flat *f, bool readable)
{
    if (f->region.comm->world->heap.alias && f->dev->ops->protect != NULL && f->bytes > 0)
        f->dev->ops->protect(f->dev, f->view, f->bytes, readable);
}

/* ---- windows: size buffers side by side, each on pages of its own ---- */

struct fsdpi_window {
    fsdpi_region region;
    fsdpi_group group;
    fsdp_device *dev;
    size_t bytes, stride;
    void *all; /* every rank's, as this device sees them */
};

static void destroy_window(fsdpi_window *w)
{
    if (w == NULL) return;
    fsdpi_region_unmap(&w->region, w->dev, w->all, w->stride * (size_t)w->region.comm->size);
    fsdpi_region_destroy(&w->region);
    fsdpi_free(w);
}

static fsdp_status create_window(fsdpi_window **out, fsdp_comm *comm, fsdp_device *dev, size_t bytes)
{
    size_t stride = fsdpi_round_up(bytes > 0 ? bytes : 1, fsdpi_page_size()), all = stride * (size_t)comm->size;
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
    FSDP_TRY_GOTO(fsdpi_region_map(&w->region, dev, 0, all, true, &w->all), fail);
    *out = w;
    return FSDP_OK;
fail:
    destroy_window(w);
    return st;
}

static void *buffer_of(fsdpi_window *w, int rank)
{
    return (char *)w->all + w->stride * (size_t)rank;
}

static void *window_buffer(fsdpi_window *w)
{
    return buffer_of(w, w->region.comm->rank);
}

static fsdp_status window_acquire(fsdpi_window *w, uint32_t use, const char *name, fsdp_stream *s)
{
    return fsdpi_launch_wait(s, &w->region, &w->group, true, -1, use - 1, "wait for the gradient window", name);
}

static fsdp_status window_post(fsdpi_window *w, uint32_t use, size_t bytes, fsdp_stream *s)
{
    (void)bytes;
    return fsdpi_launch_set(s, fsdpi_first_counter(&w->region, w->region.comm->rank), use);
}

static bool window_ready(fsdpi_window *w, uint32_t use)
{
    for (int r = 0; r < w->region.comm->size; r++)
        if (!fsdpi_counter_reached(fsdpi_first_counter(&w->region, r), use)) return false;
    return true;
}

static fsdp_status window_peer(fsdpi_window *w, uint32_t use, int r, size_t lo, size_t hi, const char *name, fsdp_stream *s,
                               const void **out)
{
    (void)hi;
    FSDP_TRY(fsdpi_launch_wait(s, &w->region, &w->group, false, r, use, "gradient reduction", name));
    *out = (const char *)buffer_of(w, r) + lo;
    return FSDP_OK;
}

static fsdp_status window_take(fsdpi_window *w, uint32_t use, fsdp_stream *s)
{
    return fsdpi_launch_set(s, fsdpi_second_counter(&w->region, w->region.comm->rank), use);
}

#define SHM_OPS                                                                                             \
    .zero_copy = true, .flat_create = create_flat, .flat_destroy = destroy_flat, .flat_slice = flat_slice, \
    .flat_done = flat_done, .flat_open = flat_open, .flat_publish = flat_publish, .flat_restart = flat_restart, .flat_gather = flat_gather, \
    .flat_whole = flat_whole, .flat_protect = flat_protect, .window_create = create_window,                 \
    .window_destroy = destroy_window, .window_buffer = window_buffer, .window_acquire = window_acquire,     \
    .window_post = window_post, .window_ready = window_ready, .window_peer = window_peer,                   \
    .window_take = window_take

const fsdpi_transport_ops fsdpi_transport_shm = { .name = "shm", SHM_OPS };
const fsdpi_transport_ops fsdpi_transport_self = { .name = "self", SHM_OPS };
