/* SPDX-License-Identifier: MIT
 *
 * Units: making them, asking them, taking them apart. */
#include "shard/unit.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/log.h"
#include "base/philox.h"
#include "shard/pass.h"
#include "shard/unit_drop.h"

#include <stdio.h>
#include <string.h>

const char *fsdp_mode_name(fsdp_mode mode)
{
    static const char *const names[] = { "full", "grad-op", "optimizer", "none" };
    return (unsigned)mode < sizeof(names) / sizeof(names[0]) ? names[mode] : "?";
}

/* ---- create, destroy ---- */

static fsdp_status check_opts(const fsdp_unit_opts *o)
{
    FSDP_FAIL_IF((unsigned)o->mode > FSDP_MODE_NONE, FSDP_ERR_INVALID, "fsdp_unit_opts.mode is %d: no such mode", (int)o->mode);
    FSDP_FAIL_IF(o->prefetch > 64, FSDP_ERR_INVALID, "fsdp_unit_opts.prefetch is %d: at most 64", o->prefetch);
    FSDP_FAIL_IF(o->storage_device != NULL && o->storage_device != o->compute_device, FSDP_ERR_UNSUPPORTED,
                 "unit \"%s\": storage device %s and compute device %s differ: this version keeps slices where they are used",
                 o->name, fsdp_device_name(o->storage_device), fsdp_device_name(o->compute_device));
    return FSDP_OK;
}

static fsdp_status create_shared(fsdp_unit *u)
{
    fsdpi_flat **f = u->mode == FSDP_MODE_NONE ? &u->grad_flat : &u->flat;
    return u->rt->comm->transport->flat_create(f, u->rt->comm, u->ctx->dev, u->edges, u->name);
}

static fsdp_status create_master(fsdp_unit *u)
{
    int64_t n = fsdpi_unit_kept_to(u) - fsdpi_unit_kept_from(u);
    void *p = NULL;
    if (u->flat != NULL && u->rt->comm->transport->zero_copy) {
        u->master = u->rt->comm->transport->flat_slice(u->flat);
        u->master_is_published = true;
        return FSDP_OK;
    }
    u->owns_master = true;
    FSDP_TRY(fsdpi_arena_alloc(u->ctx->arena, (size_t)n * sizeof(float), &p));
    u->master = p;
    FSDP_TRY(fsdpi_stream_fill(u->ctx->compute, p, 0, (size_t)n * sizeof(float)));
    if (u->mode != FSDP_MODE_NONE) return FSDP_OK;
    u->whole = u->master;
    u->residency = FSDPI_KEPT;
    return FSDP_OK;
}

static fsdp_status create_local(fsdp_unit *u, const fsdp_param *params, int count, const fsdp_unit_opts *o)
{
    u->mode = o->mode;
    u->prefetch = o->prefetch == 0 ? 1 : o->prefetch < 0 ? 0 : o->prefetch;
    u->name = fsdpi_strdup(o->name);
    FSDP_FAIL_IF(u->name == NULL, FSDP_ERR_NOMEM, "no memory for unit \"%s\"", o->name);
    FSDP_TRY(fsdpi_layout_init(&u->layout, params, count, u->rt->comm->size, u->name));
    u->lo = u->layout.edge[u->rt->comm->rank];
    u->hi = u->layout.edge[u->rt->comm->rank + 1];
    u->touched = fsdpi_calloc((size_t)count, sizeof(*u->touched));
    u->set = fsdpi_calloc((size_t)count, sizeof(*u->set));
    u->all_set = count == 0;
    u->acc = fsdpi_calloc(1, sizeof(*u->acc));
    u->slices = fsdpi_calloc((size_t)count, sizeof(*u->slices));
    u->segments = fsdpi_calloc((size_t)count, sizeof(*u->segments));
    u->own = fsdpi_calloc((size_t)count, sizeof(*u->own));
    u->edges = fsdpi_calloc((size_t)u->layout.size + 1, sizeof(*u->edges));
    FSDP_FAIL_IF(u->touched == NULL || u->set == NULL || u->acc == NULL || u->slices == NULL || u->segments == NULL || u->own == NULL || u->edges == NULL, FSDP_ERR_NOMEM,
                 "no memory for unit \"%s\"", u->name);
    for (int r = 0; r <= u->layout.size; r++) u->edges[r] = (size_t)u->layout.edge[r] * sizeof(float);
    u->rounds = 1;
    u->slice_count = fsdpi_layout_cut(&u->layout, fsdpi_unit_kept_from(u), fsdpi_unit_kept_to(u), u->segments);
    u->own_count = fsdpi_layout_cut(&u->layout, u->lo, u->hi, u->own);
    return fsdpi_unit_init_frozen(u);
}

static fsdp_status create(fsdp_unit **out, fsdp_comm *comm, const fsdp_param *params, int count, const fsdp_unit_opts *o)
{
    fsdpi_runtime *rt;
    fsdp_unit *u;
    FSDP_TRY(check_opts(o));
    FSDP_TRY(fsdpi_runtime_of(&rt, comm));
    FSDP_FAIL_IF(rt->passes != NULL, FSDP_ERR_STATE, "fsdp_unit_create: unit \"%s\": a pass is open: end it first", o->name);
    FSDPI_NEW(u, 1);
    u->rt = rt;
    /* First in the list, so that from here on dropping it undoes everything. */
    u->following = rt->units;
    if (rt->units != NULL) rt->units->prev = u;
    rt->units = u;
    *out = u;
    FSDP_TRY(fsdpi_runtime_device(&u->ctx, rt, o->compute_device));
    return create_local(u, params, count, o);
}

/* ---- do all ranks make the same unit? ---- */

/* What must be the same on all ranks. */
typedef struct passport {
    uint64_t params; /* a hash of their names and shapes */
    int count;
    fsdp_mode mode;
} passport;

static const char *param_text(const fsdp_param *p, char *text, size_t bytes)
{
    int n = snprintf(text, bytes, "%.80s [", p->name);
    for (int d = 0; d < p->ndim; d++) n += snprintf(text + n, bytes - (size_t)n, d > 0 ? ",%lld" : "%lld", (long long)p->shape[d]);
    snprintf(text + n, bytes - (size_t)n, "]");
    return text;
}

enum { PARAM_TEXT = 80 + FSDP_MAX_DIMS * 21 + 8 };

static passport passport_of(const fsdp_unit *u)
{
    passport mine = { .count = u->layout.count, .mode = u->mode };
    for (int i = 0; i < u->layout.count; i++) {
        const fsdp_param *p = &u->layout.param[i];
        mine.params = mine.params * 31 + fsdpi_name_hash(p->name) + (uint64_t)p->ndim;
        for (int d = 0; d < p->ndim; d++) mine.params = (mine.params ^ (uint64_t)p->shape[d]) * 0x100000001b3u;
    }
    return mine;
}

/* All ranks know that parameters differ: they go through them together and say which. */
static fsdp_status name_different_params(const fsdp_unit *u)
{
    fsdp_comm *comm = u->rt->comm;
    for (int i = 0; i < u->layout.count; i++) {
        char mine[PARAM_TEXT] = "", first[PARAM_TEXT];
        param_text(&u->layout.param[i], mine, sizeof(mine));
        FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_UNIT_CREATE, u->name, mine, sizeof(mine)));
        memcpy(first, fsdpi_comm_told(comm, 0), sizeof(first));
        for (int r = 1; r < comm->size; r++) {
            const char *theirs = fsdpi_comm_told(comm, r);
            FSDP_FAIL_IF(strcmp(first, theirs) != 0, FSDP_ERR_INVALID, "unit \"%s\": parameter %d is %s on rank %d and %s on rank %d", u->name, i, first,
                         comm->world_ranks[0], theirs, comm->world_ranks[r]);
        }
    }
    FSDP_FAIL(FSDP_ERR_INVALID, "unit \"%s\": parameters differ between ranks", u->name);
}

static fsdp_status compare_units(const fsdp_unit *u)
{
    fsdp_comm *comm = u->rt->comm;
    passport mine = passport_of(u), first, other;
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_UNIT_CREATE, u->name, &mine, sizeof(mine)));
    memcpy(&first, fsdpi_comm_told(comm, 0), sizeof(first));
    bool differ = false;
    for (int r = 1; r < comm->size; r++) {
        memcpy(&other, fsdpi_comm_told(comm, r), sizeof(other));
        int a = comm->world_ranks[0], b = comm->world_ranks[r];
        FSDP_FAIL_IF(other.count != first.count, FSDP_ERR_INVALID, "unit \"%s\" has %d parameters on rank %d and %d on rank %d", u->name, first.count, a, other.count, b);
        FSDP_FAIL_IF(other.mode != first.mode, FSDP_ERR_INVALID, "unit \"%s\": mode is %s on rank %d and %s on rank %d", u->name, fsdp_mode_name(first.mode), a,
                     fsdp_mode_name(other.mode), b);
        differ |= other.params != first.params;
    }
    return differ ? name_different_params(u) : FSDP_OK;
}

fsdp_status fsdp_unit_create(fsdp_unit **out, fsdp_comm *comm, const fsdp_param *params, int count, const fsdp_unit_opts *opts)
{
    fsdp_unit_opts o = opts != NULL ? *opts : (fsdp_unit_opts){ 0 };
    if (o.name == NULL) o.name = "unit";
    if (o.compute_device == NULL) o.compute_device = fsdp_device_cpu();
    FSDP_FAIL_IF(comm == NULL || out == NULL, FSDP_ERR_INVALID, "fsdp_unit_create: unit \"%s\": no communicator, or nowhere to put it",
                 o.name);
    fsdp_unit *u = NULL;
    fsdp_status st = create(&u, comm, params, count, &o);
    /* A wrong call is wrong on every rank and ends here. What can fail on one rank alone is agreed on. */
    if (st == FSDP_OK || st == FSDP_ERR_NOMEM) st = fsdp_comm_agree(comm, st);
    if (st == FSDP_OK) st = compare_units(u);
    if (st == FSDP_OK) {
        st = create_shared(u);
        if (st == FSDP_OK) st = create_master(u);
        st = fsdp_comm_agree(comm, st);
    }
    if (st != FSDP_OK) {
        fsdpi_unit_drop(u);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    u->number = ++u->rt->unit_count;
    u->checked_residency = u->residency; /* mode none begins whole */
    fsdpi_unit_check(u);
    *out = u;
    return FSDP_OK;
}

static void purge_orders(fsdpi_runtime *rt)
{
    for (int k = 0; k < FSDPI_PASS_KINDS; k++) rt->last[k].count = 0;
}

static void drop_weights(fsdp_unit *u)
{
    for (int i = 0; i < u->weights; i++)
        if (--u->weight[i]->refs == 0) fsdpi_free(u->weight[i]);
    u->weights = 0;
}

void fsdpi_unit_rest(fsdp_unit *u)
{
    u->summons = 0;
    u->holders = 0;
    u->in_step = false;
    u->step_grad = NULL;
    u->window = NULL;
    u->pass = NULL;
    u->gradient = FSDPI_GRAD_NONE;
    for (int k = 0; k < u->rounds; k++) u->acc[k].pending = false;
    fsdpi_unsent_discard(u);
    fsdpi_summon_drop(u);
    fsdpi_arena_free(u->ctx->arena, u->step_whole);
    u->step_whole = NULL;
    if (u->mode == FSDP_MODE_NONE) u->residency = FSDPI_KEPT;
    else (void)!fsdpi_unit_reshard(u);
}

void fsdpi_unit_drop(fsdp_unit *u)
{
    if (u == NULL) return;
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    if (u->ctx != NULL) {
        (void)!fsdp_stream_sync(u->ctx->compute);
        (void)!fsdp_stream_sync(u->ctx->comm);
        fsdpi_unit_rest(u);
        fsdpi_unsent_drop(u);
        if (u->owns_master) fsdpi_arena_free(u->ctx->arena, u->master);
        for (int k = 0; k < u->rounds; k++) {
            fsdpi_arena_free(u->ctx->arena, u->acc[k].now);
            fsdpi_arena_free(u->ctx->arena, u->acc[k].next);
        }
    }
    t->flat_destroy(u->flat);
    t->flat_destroy(u->grad_flat);
    purge_orders(u->rt);
    drop_weights(u);
    if (u->prev != NULL) u->prev->following = u->following;
    else u->rt->units = u->following;
    if (u->following != NULL) u->following->prev = u->prev;
    fsdpi_layout_fini(&u->layout);
    fsdpi_free(u->weight);
    fsdpi_free(u->touched);
    fsdpi_free(u->set);
    fsdpi_free(u->frozen);
    fsdpi_free(u->live);
    fsdpi_free(u->acc);
    fsdpi_free(u->unsent);
    fsdpi_free(u->slices);
    fsdpi_free(u->segments);
    fsdpi_free(u->own);
    fsdpi_free(u->edges);
    fsdpi_free(u->name);
    fsdpi_free(u);
    fsdpi_error_restore(&kept);
}

void fsdp_unit_destroy(fsdp_unit *unit)
{
    if (unit == NULL) return;
    if (unit->rt->passes != NULL) {
        fsdpi_log(FSDP_LOG_WARN, "fsdp_unit_destroy: unit \"%s\" was not destroyed: a pass is open", unit->name);
        return;
    }
    (void)!fsdpi_comm_tag(unit->rt->comm, FSDPI_OP_UNIT_DESTROY, unit->name, 0);
    fsdpi_unit_drop(unit);
}

/* ---- what it is ---- */

const char *fsdp_unit_name(const fsdp_unit *unit)
{
    return unit->name;
}

fsdp_comm *fsdp_unit_comm(const fsdp_unit *unit)
{
    return unit->rt->comm;
}

fsdp_mode fsdp_unit_mode(const fsdp_unit *unit)
{
    return unit->mode;
}

int fsdp_unit_param_count(const fsdp_unit *unit)
{
    return unit->layout.count;
}

const fsdp_param *fsdp_unit_param_info(const fsdp_unit *unit, int i)
{
    return i >= 0 && i < unit->layout.count ? &unit->layout.param[i] : NULL;
}

int64_t fsdp_unit_param_numel(const fsdp_unit *unit, int i)
{
    return i >= 0 && i < unit->layout.count ? unit->layout.numel[i] : 0;
}

fsdp_stream *fsdp_unit_stream(const fsdp_unit *unit)
{
    return unit->ctx->compute;
}

static fsdp_status check_index(const fsdp_unit *u, int i, const char *call)
{
    FSDP_FAIL_IF(i < 0 || i >= u->layout.count, FSDP_ERR_INVALID, "%s: unit \"%s\" has %d parameters, not one with number %d",
                 call, u->name, u->layout.count, i);
    return FSDP_OK;
}

const float *fsdp_unit_param(fsdp_unit *unit, int i)
{
    if (check_index(unit, i, "fsdp_unit_param") != FSDP_OK) return NULL;
    if (fsdpi_life_allows(unit, FSDPI_EV_PARAM, NULL) != FSDP_OK) return NULL;
    return unit->whole + unit->layout.at[i];
}

/* ---- slices ---- */

int64_t fsdp_unit_slice_numel(const fsdp_unit *unit)
{
    return fsdpi_unit_kept_to(unit) - fsdpi_unit_kept_from(unit);
}

void fsdp_unit_slices(fsdp_unit *u, const fsdp_slice **out, int *count)
{
    for (int i = 0; i < u->slice_count; i++) {
        const fsdpi_segment *g = &u->segments[i];
        int64_t at = g->at - fsdpi_unit_kept_from(u);
        u->slices[i] = (fsdp_slice){ .name = u->layout.param[g->param].name,
                                     .param = g->param,
                                     .offset = g->offset,
                                     .numel = g->numel,
                                     .master = u->master + at,
                                     .grad = u->step_grad != NULL && !u->frozen[g->param] ? u->step_grad + at : NULL,
                                     .frozen = u->frozen[g->param],
                                     .state_offset = at };
    }
    *out = u->slices;
    *count = u->slice_count;
}
