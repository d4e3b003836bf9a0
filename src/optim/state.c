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
    FSDP_FAIL_IF(!fsdp_device_host_accessible(device) && !fsdp_device_host_accessible(u->store->dev), FSDP_ERR_UNSUPPORTED,
                 "unit \"%s\": storage device %s and the optimizer's state device %s differ: one of them must be the host's memory", u->name,
                 fsdp_device_name(u->store->dev), fsdp_device_name(device));
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

/* ---- desks ---- */

static fsdp_status desk_of(fsdpi_desk **out, fsdpi_desk **desks, const fsdpi_part *p)
{
    fsdpi_desk *d = *desks;
    while (d != NULL && d->store != p->unit->store) d = d->next;
    if (d == NULL) {
        FSDPI_NEW(d, 1);
        *d = (fsdpi_desk){ .next = *desks, .store = p->unit->store, .via = via_of(p) };
        *desks = d;
    }
    *out = d;
    return FSDP_OK;
}

static void clear(fsdpi_desk *d)
{
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < FSDPI_STATE_KINDS; k++) {
            fsdpi_arena_free(d->store->arena, d->side[i][k]);
            d->side[i][k] = NULL;
        }
    d->numel = 0;
}

/* What it had is given back first, also where there is no more: the next step tries again. */
static fsdp_status grow(fsdpi_desk *d, int kinds, int64_t numel)
{
    if (d->numel > 0) FSDP_TRY(settle(d->via));
    clear(d);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < kinds; k++) {
            void *block;
            FSDP_TRY(fsdpi_arena_alloc(d->store->arena, (size_t)numel * sizeof(float), &block));
            d->side[i][k] = block;
        }
    d->numel = numel;
    return FSDP_OK;
}

fsdp_status fsdpi_desks_fit(fsdpi_desk **desks, const fsdpi_part *part, int count)
{
    for (int i = 0; i < count; i++) {
        const fsdpi_part *p = &part[i];
        fsdpi_desk *d;
        if (!fsdpi_state_is_apart(p) || fsdpi_state_is_missing(p)) continue;
        FSDP_TRY(desk_of(&d, desks, p));
        int64_t most = fsdp_unit_slice_numel(p->unit);
        if (most <= d->numel) continue;
        for (int j = i + 1; j < count; j++) /* at once as large as it has to be */
            if (part[j].unit->store == d->store && !fsdpi_state_is_missing(&part[j]) && fsdp_unit_slice_numel(part[j].unit) > most)
                most = fsdp_unit_slice_numel(part[j].unit);
        fsdp_status st = grow(d, p->kinds, most);
        if (st == FSDP_OK) continue;
        FSDP_FAIL_IF(st == FSDP_ERR_NOMEM, st, "no memory to update the optimizer's state of unit \"%s\" where its slices are: %d x %zu bytes",
                     fsdp_unit_name(p->unit), 2 * p->kinds, (size_t)most * sizeof(float));
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    return FSDP_OK;
}

void fsdpi_desks_drop(fsdpi_desk *desks)
{
    for (fsdpi_desk *d = desks, *next; d != NULL; d = next) {
        next = d->next;
        clear(d);
        fsdpi_free(d);
    }
}

/* ---- the step ---- */

static fsdp_status bring(const fsdpi_desk *d, const fsdpi_part *p, int side)
{
    size_t bytes = (size_t)fsdp_unit_slice_numel(p->unit) * sizeof(float);
    for (int k = 0; k < p->kinds && bytes > 0; k++) FSDP_TRY(fsdp_stream_copy(d->via->comm, d->side[side][k], p->state[k], bytes));
    return FSDP_OK;
}

/* What compute has written to this side. */
static fsdp_status take_back(const fsdpi_desk *d, const fsdpi_part *p, int side)
{
    size_t bytes = (size_t)fsdp_unit_slice_numel(p->unit) * sizeof(float);
    FSDP_TRY(fsdpi_stream_wait_stream(d->via->comm, d->store->compute));
    for (int k = 0; k < p->kinds && bytes > 0; k++) FSDP_TRY(fsdp_stream_copy(d->via->comm, p->state[k], d->side[side][k], bytes));
    return FSDP_OK;
}

/* The first part from number i on that passes over this desk; NULL: there are no more. */
static fsdpi_part *find(const fsdpi_desk *d, fsdpi_part *part, int count, int i)
{
    for (; i < count; i++)
        if (part[i].unit->store == d->store && fsdpi_state_is_apart(&part[i]) && part[i].unit->step_grad != NULL) return &part[i];
    return NULL;
}

static fsdp_status update_over(const fsdpi_desk *d, fsdpi_part *part, int count, fsdpi_update_fn update, void *arg)
{
    fsdpi_part *before = NULL, *p = find(d, part, count, 0), *next;
    if (p == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_stream_wait_stream(d->via->comm, d->via->compute));
    FSDP_TRY(bring(d, p, 0));
    for (int side = 0; p != NULL; side = !side) {
        next = find(d, part, count, (int)(p - part) + 1);
        FSDP_TRY(fsdpi_stream_wait_stream(d->store->compute, d->via->comm)); /* before more is copied: for p, not for the next one */
        if (before != NULL) FSDP_TRY(take_back(d, before, !side));
        if (next != NULL) FSDP_TRY(bring(d, next, !side));
        FSDP_TRY(update(p, d->side[side], arg));
        if (next == NULL) FSDP_TRY(take_back(d, p, side));
        before = p;
        p = next;
    }
    return fsdpi_stream_wait_stream(d->via->compute, d->via->comm);
}

fsdp_status fsdpi_desks_update(const fsdpi_desk *desks, fsdpi_part *part, int count, fsdpi_update_fn update, void *arg)
{
    for (const fsdpi_desk *d = desks; d != NULL; d = d->next) FSDP_TRY(update_over(d, part, count, update, arg));
    return FSDP_OK;
}
