/* SPDX-License-Identifier: MIT */
#include "optim/state.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/log.h"

/* ---- where it lies ---- */

/* Streams of any device reach the host's memory. */
static fsdpi_devctx *via_of(const fsdpi_part *p)
{
    return fsdp_device_host_accessible(p->unit->store->dev) ? p->home : p->unit->store;
}

fsdp_stream *fsdpi_state_stream(const fsdpi_part *p)
{
    return via_of(p)->compute;
}

fsdp_status fsdpi_state_place(fsdpi_part *p, fsdp_device *device)
{
    fsdp_unit *u = p->unit;
    p->home = u->store;
    if (p->kinds == 0 || device == NULL || device == u->store->dev) return FSDP_OK;
    FSDP_TRY(fsdpi_places_check(u->name, "storage", u->store->dev, "the optimizer's state", device));
    return fsdpi_runtime_device(&p->home, u->rt, device);
}

static void give_back(fsdpi_part *p)
{
    for (int k = 0; k < p->kinds; k++) {
        fsdpi_arena_free(p->home->arena, p->state[k]);
        p->state[k] = NULL;
    }
}

/* What is queued may still use memory that the host hands out again at once. */
static fsdp_status settle(const fsdpi_devctx *via)
{
    fsdp_status comm = fsdp_stream_sync(via->comm);
    FSDP_TRY(fsdp_stream_sync(via->compute));
    return comm;
}

fsdp_status fsdpi_state_make(fsdpi_part *p)
{
    size_t bytes = (size_t)fsdp_unit_slice_numel(p->unit) * sizeof(float);
    fsdp_status st = FSDP_OK;
    for (int k = 0; k < p->kinds && st == FSDP_OK; k++) {
        void *s;
        st = fsdpi_arena_alloc(p->home->arena, bytes, &s);
        if (st != FSDP_OK) break;
        p->state[k] = s;
        st = fsdpi_stream_fill(fsdpi_state_stream(p), s, 0, bytes);
    }
    if (st == FSDP_OK) return FSDP_OK;
    fsdp_status queued = fsdpi_state_is_apart(p) ? settle(via_of(p)) : FSDP_OK;
    if (queued != FSDP_OK) st = queued;
    give_back(p);
    FSDP_FAIL_IF(st == FSDP_ERR_NOMEM, st, "no memory for the optimizer's state of unit \"%s\": %d x %zu bytes", fsdp_unit_name(p->unit), p->kinds, bytes);
    return fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

void fsdpi_state_drop(fsdpi_part *p)
{
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    if (p->state[0] != NULL && fsdpi_state_is_apart(p) && settle(via_of(p)) != FSDP_OK)
        fsdpi_log(FSDP_LOG_WARN, "fsdp_optim_destroy: device %s had failed: %s", fsdp_device_name(via_of(p)->dev), fsdp_last_error_message());
    fsdpi_error_restore(&kept);
    give_back(p);
}

/* ---- staging ---- */

static fsdp_status staging_of(fsdpi_staging **out, fsdpi_staging **staging, const fsdpi_part *p)
{
    fsdpi_staging *g = *staging;
    while (g != NULL && g->store != p->unit->store) g = g->next;
    if (g == NULL) {
        FSDPI_NEW(g, 1);
        *g = (fsdpi_staging){ .next = *staging, .store = p->unit->store, .via = via_of(p) };
        *staging = g;
    }
    *out = g;
    return FSDP_OK;
}

static void clear(fsdpi_staging *g)
{
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < FSDPI_STATE_KINDS; k++) {
            fsdpi_arena_free(g->store->arena, g->buffer[i][k]);
            g->buffer[i][k] = NULL;
        }
    g->numel = 0;
}

/* What it had is given back first, also where there is no more: the next step tries again. */
static fsdp_status grow(fsdpi_staging *g, int kinds, int64_t numel)
{
    if (g->numel > 0) FSDP_TRY(settle(g->via));
    clear(g);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < kinds; k++) {
            void *block;
            FSDP_TRY(fsdpi_arena_alloc(g->store->arena, (size_t)numel * sizeof(float), &block));
            g->buffer[i][k] = block;
        }
    g->numel = numel;
    return FSDP_OK;
}

fsdp_status fsdpi_staging_fit(fsdpi_staging **staging, const fsdpi_part *part, int count)
{
    for (int i = 0; i < count; i++) {
        const fsdpi_part *p = &part[i];
        fsdpi_staging *g;
        if (!fsdpi_state_is_apart(p) || fsdpi_state_is_missing(p)) continue;
        FSDP_TRY(staging_of(&g, staging, p));
        int64_t most = fsdp_unit_slice_numel(p->unit);
        if (most <= g->numel) continue;
        for (int j = i + 1; j < count; j++) /* at once as large as it has to be */
            if (part[j].unit->store == g->store && !fsdpi_state_is_missing(&part[j]) && fsdp_unit_slice_numel(part[j].unit) > most)
                most = fsdp_unit_slice_numel(part[j].unit);
        fsdp_status st = grow(g, p->kinds, most);
        if (st == FSDP_OK) continue;
        FSDP_FAIL_IF(st == FSDP_ERR_NOMEM, st, "no memory to update the optimizer's state of unit \"%s\" where its slices are: %d x %zu bytes",
                     fsdp_unit_name(p->unit), 2 * p->kinds, (size_t)most * sizeof(float));
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    return FSDP_OK;
}

void fsdpi_staging_drop(fsdpi_staging *staging)
{
    for (fsdpi_staging *g = staging, *next; g != NULL; g = next) {
        next = g->next;
        clear(g);
        fsdpi_free(g);
    }
}

/* ---- the step ---- */

static fsdp_status bring(const fsdpi_staging *g, const fsdpi_part *p, int which)
{
    size_t bytes = (size_t)fsdp_unit_slice_numel(p->unit) * sizeof(float);
    for (int k = 0; k < p->kinds && bytes > 0; k++) FSDP_TRY(fsdp_stream_copy(g->via->comm, g->buffer[which][k], p->state[k], bytes));
    return FSDP_OK;
}

/* What compute has written to this buffer. */
static fsdp_status take_back(const fsdpi_staging *g, const fsdpi_part *p, int which)
{
    size_t bytes = (size_t)fsdp_unit_slice_numel(p->unit) * sizeof(float);
    FSDP_TRY(fsdpi_stream_wait_stream(g->via->comm, g->store->compute));
    for (int k = 0; k < p->kinds && bytes > 0; k++) FSDP_TRY(fsdp_stream_copy(g->via->comm, p->state[k], g->buffer[which][k], bytes));
    return FSDP_OK;
}

/* The first part from number i on that passes over it; NULL: there are no more. */
static fsdpi_part *find(const fsdpi_staging *g, fsdpi_part *part, int count, int i)
{
    for (; i < count; i++)
        if (part[i].unit->store == g->store && fsdpi_state_is_apart(&part[i]) && part[i].unit->step_grad != NULL) return &part[i];
    return NULL;
}

static fsdp_status update_over(const fsdpi_staging *g, fsdpi_part *part, int count, fsdpi_update_fn update, void *arg)
{
    fsdpi_part *before = NULL, *p = find(g, part, count, 0), *next;
    if (p == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_stream_wait_stream(g->via->comm, g->via->compute));
    FSDP_TRY(bring(g, p, 0));
    for (int which = 0; p != NULL; which = !which) {
        next = find(g, part, count, (int)(p - part) + 1);
        FSDP_TRY(fsdpi_stream_wait_stream(g->store->compute, g->via->comm)); /* before more is copied: for p, not for the next one */
        if (before != NULL) FSDP_TRY(take_back(g, before, !which));
        if (next != NULL) FSDP_TRY(bring(g, next, !which));
        FSDP_TRY(update(p, g->buffer[which], arg));
        if (next == NULL) FSDP_TRY(take_back(g, p, which));
        before = p;
        p = next;
    }
    return fsdpi_stream_wait_stream(g->via->compute, g->via->comm);
}

fsdp_status fsdpi_staging_update(const fsdpi_staging *staging, fsdpi_part *part, int count, fsdpi_update_fn update, void *arg)
{
    for (const fsdpi_staging *g = staging; g != NULL; g = g->next) FSDP_TRY(update_over(g, part, count, update, arg));
    return FSDP_OK;
}
