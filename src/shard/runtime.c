/* SPDX-License-Identifier: MIT */
#include "shard/runtime.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/pass.h"
#include "shard/unit.h"
#include "shard/unit_drop.h"

static void destroy_devctx(fsdpi_devctx *d)
{
    /* Each may still wait for the other. */
    if (d->compute != NULL) (void)!fsdp_stream_sync(d->compute);
    if (d->comm != NULL) (void)!fsdp_stream_sync(d->comm);
    if (d->comm != d->compute) fsdpi_stream_destroy(d->comm);
    fsdpi_stream_destroy(d->compute);
    fsdpi_arena_destroy(d->gathered);
    fsdpi_arena_destroy(d->arena);
    fsdpi_device_release(d->dev);
    fsdpi_free(d);
}

static void drop_windows(fsdpi_runtime *rt)
{
    for (fsdpi_pooled *w = rt->windows, *next; w != NULL; w = next) {
        next = w->next;
        rt->comm->transport->window_destroy(w->window);
        fsdpi_free(w);
    }
    rt->windows = NULL;
    rt->owed = NULL;
    rt->owed_last = &rt->owed;
}

static void drop_passes(fsdpi_runtime *rt)
{
    for (fsdp_pass *p = rt->passes, *next; p != NULL; p = next) {
        next = p->older;
        fsdpi_pass_free(p);
    }
    rt->passes = NULL;
}

fsdp_status fsdpi_runtime_sync(fsdpi_runtime *rt)
{
    fsdp_status first = FSDP_OK;
    fsdpi_error e;
    for (fsdpi_devctx *d = rt->devices; d != NULL; d = d->next) {
        fsdp_stream *both[2] = { d->compute, d->comm };
        for (int i = 0; i < (d->comm != d->compute ? 2 : 1); i++) {
            fsdp_status st = fsdp_stream_sync(both[i]);
            if (st == FSDP_OK || first != FSDP_OK) continue;
            first = st;
            fsdpi_error_save(&e);
        }
    }
    if (first != FSDP_OK) {
        fsdpi_error_restore(&e);
        return fsdp_error_through(first, __func__, __FILE__, __LINE__);
    }
    return FSDP_OK;
}

/* With the communicator. What a program has not destroyed, after an error most often, goes too, without asking the
 * other ranks: they may be gone. */
static void destroy_runtime(void *attached)
{
    fsdpi_runtime *rt = attached;
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    (void)!fsdpi_runtime_sync(rt);
    drop_passes(rt);
    while (rt->units != NULL) fsdpi_unit_drop(rt->units);
    drop_windows(rt);
    for (fsdpi_devctx *d = rt->devices, *next; d != NULL; d = next) {
        next = d->next;
        destroy_devctx(d);
    }
    for (int k = 0; k < FSDPI_PASS_KINDS; k++) fsdpi_free(rt->last[k].turn);
    fsdpi_pool_destroy(rt->threads);
    fsdpi_free(rt);
    fsdpi_error_restore(&kept);
}

/* A call may have failed here before this rank had done what it owes; others may be waiting for that, and cannot come to the meeting
 * in which it tells them. What fails is tried again, and told, where it is due. */
static void idle_runtime(void *attached)
{
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    (void)!fsdpi_reduce_owed(attached, false);
    fsdpi_error_restore(&kept);
}

/* ---- fsdp_comm_reset ---- */

static void quiesce_runtime(void *attached)
{
    fsdpi_runtime *rt = attached;
    if (fsdpi_runtime_sync(rt) != FSDP_OK) rt->failed = true;
}

/* All that was in flight is dropped. Windows go too: ranks that did different things may not have the same ones.
 * What each rank keeps is published anew. */
static fsdp_status reset_runtime(void *attached)
{
    fsdpi_runtime *rt = attached;
    fsdp_status st = FSDP_OK;
    rt->about = 0;
    for (fsdp_unit *u = rt->units; u != NULL; u = u->following) {
        fsdpi_unit_rest(u);
        fsdp_status again = fsdpi_unit_start_over(u);
        if (st == FSDP_OK) st = again;
    }
    drop_passes(rt);
    drop_windows(rt);
    for (int k = 0; k < FSDPI_PASS_KINDS; k++) rt->last[k].count = 0;
    fsdp_status sync = fsdpi_runtime_sync(rt);
    return st == FSDP_OK ? sync : st;
}

static fsdp_status resume_runtime(void *attached)
{
    fsdpi_runtime *rt = attached;
    for (fsdp_unit *u = rt->units; u != NULL; u = u->following) FSDP_TRY(fsdpi_unit_catch_up(u));
    return fsdpi_unsent_agree(rt);
}

static const fsdpi_attached_ops attached_ops = {
    .destroy = destroy_runtime,
    .idle = idle_runtime,
    .quiesce = quiesce_runtime,
    .reset = reset_runtime,
    .resume = resume_runtime,
};

fsdp_status fsdpi_runtime_of(fsdpi_runtime **out, fsdp_comm *comm)
{
    if (comm->attached == NULL) {
        fsdpi_runtime *rt;
        FSDPI_NEW(rt, 1);
        rt->comm = comm;
        rt->owed_last = &rt->owed;
        fsdp_status st = fsdpi_pool_create(&rt->threads, fsdp_comm_threads(comm));
        if (st != FSDP_OK) {
            fsdpi_free(rt);
            return fsdp_error_through(st, __func__, __FILE__, __LINE__);
        }
        comm->attached = rt;
        comm->attached_ops = &attached_ops;
    }
    *out = comm->attached;
    return FSDP_OK;
}

fsdp_status fsdpi_runtime_device(fsdpi_devctx **out, fsdpi_runtime *rt, fsdp_device *dev)
{
    fsdp_status st;
    for (fsdpi_devctx *d = rt->devices; d != NULL; d = d->next) {
        if (d->dev != dev) continue;
        *out = d;
        return FSDP_OK;
    }
    fsdpi_devctx *d;
    FSDPI_NEW(d, 1);
    d->dev = dev;
    fsdpi_device_retain(dev);
    FSDP_TRY_GOTO(fsdpi_arena_create(&d->arena, dev), fail);
    FSDP_TRY_GOTO(fsdpi_arena_create(&d->gathered, dev), fail);
    FSDP_TRY_GOTO(fsdpi_stream_create(&d->compute, dev, rt->threads), fail);
    d->comm = d->compute;
    /* The threads belong to compute: two streams must not use them at once. */
    if (dev->ops->async) FSDP_TRY_GOTO(fsdpi_stream_create(&d->comm, dev, NULL), fail);
    fsdpi_arena_rotate(d->gathered, rt->comm->transport->scribble);
    d->next = rt->devices;
    rt->devices = d;
    *out = d;
    return FSDP_OK;
fail:
    destroy_devctx(d);
    return st;
}

/* ---- windows ---- */

/* Sizes in steps of an eighth, so that blocks that differ by a few elements share windows. */
static size_t window_bytes(size_t bytes)
{
    size_t step = fsdpi_page_size();
    while (step * 16 < bytes) step *= 2;
    return fsdpi_round_up(bytes, step);
}

/* How many windows a size gets: one for a lone unit; three for many, so that a rank need not wait for the others'
 * reductions of the last two units. */
static int windows_wanted(const fsdpi_runtime *rt, const fsdpi_devctx *ctx, size_t bytes)
{
    int n = 0;
    for (const fsdp_unit *u = rt->units; u != NULL; u = u->following)
        n += u->sums == ctx && window_bytes(fsdpi_unit_window_bytes(u)) == bytes;
    return n < 3 ? n : 3;
}

/* All ranks get one, or none does: they must go on dealing out the same ones. */
static fsdp_status add_window(fsdpi_pooled **out, fsdpi_runtime *rt, fsdpi_devctx *ctx, size_t bytes)
{
    fsdp_status st = FSDP_OK;
    fsdpi_window *window = NULL;
    fsdpi_pooled *w = fsdpi_calloc(1, sizeof(*w));
    if (w == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for a gradient window");
    st = fsdp_comm_agree(rt->comm, st);
    if (st == FSDP_OK) {
        st = rt->comm->transport->window_create(&window, rt->comm, ctx->dev, bytes);
        st = fsdp_comm_agree(rt->comm, st);
    }
    if (st != FSDP_OK) {
        rt->comm->transport->window_destroy(window);
        fsdpi_free(w);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *w = (fsdpi_pooled){ .next = rt->windows, .ctx = ctx, .window = window, .bytes = bytes };
    rt->windows = w;
    *out = w;
    return FSDP_OK;
}

/* Which window: decided by what was held and posted so far in program order, the same on every rank; never by what
 * has been reduced, which is a matter of time. */
fsdp_status fsdpi_window_find(fsdpi_pooled **out, fsdpi_runtime *rt, fsdpi_devctx *ctx, size_t bytes)
{
    bytes = window_bytes(bytes);
    int have = 0;
    fsdpi_pooled *oldest = NULL;
    for (fsdpi_pooled *w = rt->windows; w != NULL; w = w->next) {
        if (w->ctx != ctx || w->bytes != bytes) continue;
        have++;
        if (!w->held && (oldest == NULL || w->posted < oldest->posted)) oldest = w;
    }
    if (oldest == NULL || (oldest->posted > 0 && have < windows_wanted(rt, ctx, bytes))) FSDP_TRY(add_window(&oldest, rt, ctx, bytes));
    *out = oldest;
    return FSDP_OK;
}
