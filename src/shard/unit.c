/* SPDX-License-Identifier: MIT
 *
 * Units: making them, asking them, taking them apart. */
#include "shard/unit.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/log.h"
#include "base/philox.h"
#include "shard/hooks.h"
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

static fsdp_status check_mesh(const fsdp_unit_opts *o, int size)
{
    FSDP_FAIL_IF(o->mode == FSDP_MODE_NONE && o->shards > 1, FSDP_ERR_INVALID, "unit \"%s\": mode none shards nothing, but fsdp_unit_opts.shards is %d", o->name, o->shards);
    FSDP_FAIL_IF(o->shards < 0 || (o->shards > 0 && size % o->shards != 0), FSDP_ERR_INVALID,
                 "unit \"%s\": %d ranks are no mesh of replicas x %d shards: %d x %d = %d; shards must divide %d", o->name, size, o->shards,
                 o->shards > 0 ? size / o->shards : 0, o->shards, o->shards > 0 ? size / o->shards * o->shards : 0, size);
    int shards = o->shards > 0 ? o->shards : size, g = o->reshard_group;
    FSDP_FAIL_IF(g < 0 || (g > 0 && shards % g != 0), FSDP_ERR_INVALID, "unit \"%s\": fsdp_unit_opts.reshard_group is %d: it must divide the %d shards", o->name, g,
                 shards);
    FSDP_FAIL_IF(g > 0 && o->mode != FSDP_MODE_FULL, FSDP_ERR_INVALID, "unit \"%s\": reshard_group is for mode full: mode %s does not reshard after forward",
                 o->name, fsdp_mode_name(o->mode));
    return FSDP_OK;
}

static bool is_float(fsdp_dtype t)
{
    return t == FSDP_F32 || t == FSDP_BF16 || t == FSDP_F16;
}

static fsdp_status check_dtypes(const fsdp_unit_opts *o)
{
    FSDP_FAIL_IF(!is_float(o->param_dtype) || !is_float(o->reduce_dtype) || !is_float(o->grad_dtype), FSDP_ERR_INVALID,
                 "unit \"%s\": param_dtype %s, reduce_dtype %s, grad_dtype %s: each must be F32, BF16 or F16", o->name, fsdp_dtype_name(o->param_dtype),
                 fsdp_dtype_name(o->reduce_dtype), fsdp_dtype_name(o->grad_dtype));
    FSDP_FAIL_IF(o->param_dtype == FSDP_F32 && (o->exact_eval || o->raw_params), FSDP_ERR_INVALID,
                 "unit \"%s\": %s is about a param_dtype below F32: leave it out", o->name, o->exact_eval ? "exact_eval" : "raw_params");
    return FSDP_OK;
}

static fsdp_status check_opts(const fsdp_unit_opts *o)
{
    FSDP_TRY(fsdpi_places_check(o->name, "storage", o->storage_device, "compute", o->compute_device));
    FSDP_TRY(fsdpi_places_check(o->name, "gradient", o->grad_device, "compute", o->compute_device));
    FSDP_TRY(fsdpi_places_check(o->name, "gradient", o->grad_device, "storage", o->storage_device));
    FSDP_TRY(check_dtypes(o));
    FSDP_FAIL_IF((unsigned)o->mode > FSDP_MODE_NONE, FSDP_ERR_INVALID, "fsdp_unit_opts.mode is %d: no such mode", (int)o->mode);
    FSDP_FAIL_IF(o->prefetch > 64, FSDP_ERR_INVALID, "fsdp_unit_opts.prefetch is %d: at most 64", o->prefetch);
    return FSDP_OK;
}

/* Bytes from flat element `from` to the edges of a group's members. Of layout.size pieces, each of S shards has R, one a
 * replica; member m of a group begins with piece first + m * step. */
static void edges_of(const fsdp_unit *u, const fsdpi_group *g, int first, int step, int64_t from, size_t element, size_t *edges)
{
    for (int m = 0; m <= g->size; m++) edges[m] = (size_t)(u->layout.edge[first + m * step] - from) * element;
}

/* A flat of all parameters among shards, in some type. */
static fsdp_status create_flat(fsdp_unit *u, fsdpi_flat **out, fsdp_dtype dtype, size_t *edges)
{
    edges_of(u, &u->shards, 0, u->replicas.size, 0, fsdp_dtype_bytes(dtype), edges);
    fsdp_status st = u->rt->comm->transport->flat_create(out, u->rt->comm, u->shards, u->store->dev, edges, edges[u->shards.size], u->name);
    return fsdp_comm_agree(u->rt->comm, st);
}

static fsdp_status create_flats(fsdp_unit *u, size_t *edges)
{
    fsdp_comm *comm = u->rt->comm;
    if (fsdpi_unit_is_gathered(u)) FSDP_TRY(create_flat(u, &u->flat, u->param_dtype, edges));
    if (fsdpi_unit_is_narrow(u)) FSDP_TRY(create_flat(u, &u->exact, FSDP_F32, edges));
    if (u->near_group.size > 0) FSDP_TRY(fsdpi_near_create(u, edges));
    if (u->replicas.size == 1) return FSDP_OK;
    edges_of(u, &u->replicas, fsdpi_group_member(&u->shards, comm->rank) * u->replicas.size, 1, u->keep_lo, sizeof(float), edges);
    /* The first shard is never shorter than another. */
    return comm->transport->flat_create(&u->replica_flat, comm, u->replicas, u->store->dev, edges, (size_t)u->layout.edge[u->replicas.size] * sizeof(float), u->name);
}

static fsdp_status create_shared(fsdp_unit *u)
{
    size_t *edges = fsdpi_calloc((size_t)u->layout.size + 1, sizeof(*edges));
    fsdp_status st = edges != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for unit \"%s\"", u->name);
    st = fsdp_comm_agree(u->rt->comm, st);
    if (st == FSDP_OK) st = create_flats(u, edges);
    fsdpi_free(edges);
    return st;
}

static fsdp_status create_published(fsdp_unit *u)
{
    size_t bytes = (size_t)fsdpi_unit_kept(u) * fsdp_dtype_bytes(u->param_dtype);
    u->published = u->rt->comm->transport->flat_slice(u->flat);
    if (u->published != NULL || bytes == 0) return FSDP_OK;
    u->owns_published = true;
    FSDP_TRY(fsdpi_arena_alloc(u->store->arena, bytes, &u->published));
    return fsdpi_stream_fill(u->store->compute, u->published, 0, bytes);
}

static fsdp_status create_master(fsdp_unit *u)
{
    int64_t n = fsdpi_unit_kept(u);
    void *p = NULL;
    if (fsdpi_unit_is_narrow(u)) FSDP_TRY(create_published(u));
    if (u->flat != NULL && u->rt->comm->transport->zero_copy) {
        u->master = u->rt->comm->transport->flat_slice(fsdpi_unit_is_narrow(u) ? u->exact : u->flat);
        return FSDP_OK;
    }
    u->owns_master = true;
    FSDP_TRY(fsdpi_arena_alloc(u->store->arena, (size_t)n * sizeof(float), &p));
    u->master = p;
    FSDP_TRY(fsdpi_stream_fill(u->store->compute, p, 0, (size_t)n * sizeof(float)));
    if (u->flat != NULL) return FSDP_OK;
    u->whole = u->master;
    u->residency = FSDPI_KEPT;
    return FSDP_OK;
}

/* Ranks are numbered replica by replica: those that share a copy are neighbours. */
static void set_mesh(fsdp_unit *u, int shards)
{
    int rank = u->rt->comm->rank, size = u->rt->comm->size;
    int s = u->mode == FSDP_MODE_NONE ? 1 : shards == 0 ? size : shards, r = size / s;
    u->shards = (fsdpi_group){ s, 1 };
    u->replicas = (fsdpi_group){ r, s };
    int shard = fsdpi_group_member(&u->shards, rank), piece = fsdpi_unit_piece(u, rank);
    u->lo = u->layout.edge[piece];
    u->hi = u->layout.edge[piece + 1];
    u->keep_lo = u->layout.edge[shard * r];
    u->keep_hi = u->layout.edge[(shard + 1) * r];
}

static fsdp_status create_local(fsdp_unit *u, const fsdp_param *params, int count, const fsdp_unit_opts *o)
{
    u->mode = o->mode;
    u->param_dtype = o->param_dtype;
    u->reduce_dtype = o->reduce_dtype;
    u->grad_dtype = o->grad_dtype;
    u->exact_eval = o->exact_eval;
    u->raw = o->raw_params;
    u->whole_exact = o->param_dtype == FSDP_F32;
    /* Where gathering is reading what lies there already, nothing is closer. */
    bool free_gather = u->rt->comm->transport->zero_copy && !fsdpi_unit_is_apart(u) && (o->param_dtype == FSDP_F32 || o->raw_params);
    if (o->reshard_group > 0 && !free_gather) u->near_group = (fsdpi_group){ o->reshard_group, 1 };
    u->prefetch = o->prefetch == 0 ? 1 : o->prefetch < 0 ? 0 : o->prefetch;
    u->name = fsdpi_strdup(o->name);
    FSDP_FAIL_IF(u->name == NULL, FSDP_ERR_NOMEM, "no memory for unit \"%s\"", o->name);
    FSDP_TRY(fsdpi_layout_init(&u->layout, params, count, u->rt->comm->size, u->name));
    set_mesh(u, o->shards);
    FSDP_TRY(fsdpi_room_allows(u, u->rt->unsharded_cap, "fsdp_unit_create"));
    u->touched = fsdpi_calloc((size_t)count, sizeof(*u->touched));
    u->set = fsdpi_calloc((size_t)count, sizeof(*u->set));
    u->all_set = count == 0;
    u->acc = fsdpi_calloc(1, sizeof(*u->acc));
    u->slices = fsdpi_calloc((size_t)count, sizeof(*u->slices));
    u->segments = fsdpi_calloc((size_t)count, sizeof(*u->segments));
    u->own = fsdpi_calloc((size_t)count, sizeof(*u->own));
    FSDP_FAIL_IF(u->touched == NULL || u->set == NULL || u->acc == NULL || u->slices == NULL || u->segments == NULL || u->own == NULL, FSDP_ERR_NOMEM,
                 "no memory for unit \"%s\"", u->name);
    u->rounds = 1;
    u->slice_count = fsdpi_layout_cut(&u->layout, u->keep_lo, u->keep_hi, u->segments);
    u->own_count = fsdpi_layout_cut(&u->layout, u->lo, u->hi, u->own);
    return fsdpi_unit_init_frozen(u);
}

static fsdp_status create(fsdp_unit **out, fsdp_comm *comm, const fsdp_param *params, int count, const fsdp_unit_opts *o)
{
    fsdpi_runtime *rt;
    fsdp_unit *u;
    FSDP_TRY(check_opts(o));
    FSDP_TRY(check_mesh(o, comm->size));
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
    FSDP_TRY(fsdpi_runtime_device(&u->store, rt, o->storage_device));
    FSDP_TRY(fsdpi_runtime_device(&u->sums, rt, o->grad_device));
    return create_local(u, params, count, o);
}

/* ---- do all ranks make the same unit? ---- */

/* What must be the same on all ranks. */
typedef struct passport {
    uint64_t params; /* a hash of their names and shapes */
    int count, shards, reshard_group;
    fsdp_mode mode;
    fsdp_dtype param_dtype, reduce_dtype, grad_dtype;
    bool exact_eval, raw;
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
    passport mine = { .count = u->layout.count, .mode = u->mode, .shards = u->shards.size, .reshard_group = u->near_group.size, .param_dtype = u->param_dtype, .reduce_dtype = u->reduce_dtype, .grad_dtype = u->grad_dtype,
                      .exact_eval = u->exact_eval, .raw = u->raw };
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
        FSDP_FAIL_IF(other.shards != first.shards, FSDP_ERR_INVALID, "unit \"%s\": %d shards on rank %d and %d on rank %d", u->name, first.shards, a, other.shards, b);
        FSDP_FAIL_IF(other.param_dtype != first.param_dtype || other.reduce_dtype != first.reduce_dtype, FSDP_ERR_INVALID,
                     "unit \"%s\": parameters %s and reductions %s on rank %d, %s and %s on rank %d", u->name, fsdp_dtype_name(first.param_dtype),
                     fsdp_dtype_name(first.reduce_dtype), a, fsdp_dtype_name(other.param_dtype), fsdp_dtype_name(other.reduce_dtype), b);
        FSDP_FAIL_IF(other.grad_dtype != first.grad_dtype, FSDP_ERR_INVALID, "unit \"%s\": sums of gradients are %s on rank %d and %s on rank %d", u->name,
                     fsdp_dtype_name(first.grad_dtype), a, fsdp_dtype_name(other.grad_dtype), b);
        FSDP_FAIL_IF(other.reshard_group != first.reshard_group, FSDP_ERR_INVALID, "unit \"%s\": reshard_group is %d on rank %d and %d on rank %d", u->name,
                     first.reshard_group, a, other.reshard_group, b);
        FSDP_FAIL_IF(other.exact_eval != first.exact_eval || other.raw != first.raw, FSDP_ERR_INVALID,
                     "unit \"%s\": exact_eval or raw_params differ between ranks %d and %d", u->name, a, b);
        differ |= other.params != first.params;
    }
    return differ ? name_different_params(u) : FSDP_OK;
}

fsdp_status fsdp_unit_create(fsdp_unit **out, fsdp_comm *comm, const fsdp_param *params, int count, const fsdp_unit_opts *opts)
{
    fsdp_unit_opts o = opts != NULL ? *opts : (fsdp_unit_opts){ 0 };
    if (o.name == NULL) o.name = "unit";
    if (o.compute_device == NULL) o.compute_device = fsdp_device_cpu();
    if (o.storage_device == NULL) o.storage_device = o.compute_device;
    if (o.grad_device == NULL) o.grad_device = o.storage_device;
    FSDP_FAIL_IF(comm == NULL || out == NULL, FSDP_ERR_INVALID, "fsdp_unit_create: unit \"%s\": no communicator, or nowhere to put it",
                 o.name);
    FSDPI_CALL(comm);
    fsdp_unit *u = NULL;
    fsdp_status st = create(&u, comm, params, count, &o);
    /* Memory can fail on one rank alone, and one alone can ask for what there is not: all are told which, and why. A call at the wrong time
     * is one rank's. */
    if (st != FSDP_ERR_STATE) st = fsdp_comm_agree(comm, st);
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
    fsdpi_unit_opened(u, "summons", 0, -u->summons);
    fsdpi_unit_opened(u, "steps", 0, -u->in_step);
    u->summons = 0;
    u->holders = 0;
    u->in_step = false;
    u->window = NULL;
    u->pass = NULL;
    fsdpi_unit_move_gradient(u, FSDPI_GRAD_NONE);
    for (int k = 0; k < u->rounds; k++) u->acc[k].pending = false;
    fsdpi_unsent_discard(u);
    fsdpi_summon_drop(u);
    u->pinned = false;
    fsdpi_step_drop(u);
    if (u->flat != NULL) (void)!fsdpi_unit_reshard(u);
    else if (u->residency == FSDPI_WHOLE) fsdpi_unit_move(u, FSDPI_KEPT);
}

void fsdpi_unit_drop(fsdp_unit *u)
{
    if (u == NULL) return;
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    if (u->ctx != NULL && u->store != NULL && u->sums != NULL) {
        (void)!fsdp_stream_sync(u->ctx->compute);
        (void)!fsdp_stream_sync(u->ctx->comm);
        (void)!fsdp_stream_sync(u->store->compute);
        (void)!fsdp_stream_sync(u->store->comm);
        (void)!fsdp_stream_sync(u->sums->compute);
        (void)!fsdp_stream_sync(u->sums->comm);
        fsdpi_unit_rest(u);
        fsdpi_unsent_drop(u);
        fsdpi_hooks_drop(u);
        if (u->owns_master) fsdpi_arena_free(u->store->arena, u->master);
        if (u->owns_published) fsdpi_arena_free(u->store->arena, u->published);
        for (int k = 0; k < u->rounds; k++) {
            fsdpi_arena_free(u->sums->arena, u->acc[k].now);
            fsdpi_arena_free(u->sums->arena, u->acc[k].next);
        }
    }
    t->flat_destroy(u->flat);
    t->flat_destroy(u->exact);
    t->flat_destroy(u->near);
    t->flat_destroy(u->replica_flat);
    purge_orders(u->rt);
    fsdpi_unit_forget_ahead(u);
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
    fsdpi_free(u->name);
    fsdpi_free(u);
    fsdpi_error_restore(&kept);
}

void fsdp_unit_destroy(fsdp_unit *unit)
{
    __attribute__((cleanup(fsdpi_call_end))) fsdp_comm *call = NULL;
    if (unit == NULL || !fsdpi_call_begin_or_log(&call, unit->rt->comm, __func__)) return;
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

int fsdp_unit_shards(const fsdp_unit *unit)
{
    return unit->shards.size;
}

int fsdp_unit_replica(const fsdp_unit *unit)
{
    return fsdpi_group_member(&unit->replicas, unit->rt->comm->rank);
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

fsdp_stream *fsdp_unit_storage_stream(const fsdp_unit *unit)
{
    return unit->store->compute;
}

fsdp_status fsdpi_unit_check_index(const fsdp_unit *u, int i, const char *call)
{
    FSDP_FAIL_IF(i < 0 || i >= u->layout.count, FSDP_ERR_INVALID, "%s: unit \"%s\" has %d parameters, not one with number %d",
                 call, u->name, u->layout.count, i);
    return FSDP_OK;
}

const float *fsdp_unit_param(fsdp_unit *unit, int i)
{
    if (fsdpi_unit_check_index(unit, i, "fsdp_unit_param") != FSDP_OK) return NULL;
    if (fsdpi_life_allows(unit, FSDPI_EV_PARAM, NULL) != FSDP_OK) return NULL;
    if (unit->whole_dtype != FSDP_F32) {
        (void)fsdp_error_raise(FSDP_ERR_STATE, __func__, __FILE__, __LINE__, "fsdp_unit_param: unit \"%s\" is whole as %s: read it with fsdp_unit_param_data()",
                               unit->name, fsdp_dtype_name(unit->whole_dtype));
        return NULL;
    }
    return (const float *)unit->whole + unit->layout.at[i];
}

const void *fsdp_unit_param_data(fsdp_unit *unit, int i, fsdp_dtype *dtype)
{
    if (fsdpi_unit_check_index(unit, i, "fsdp_unit_param_data") != FSDP_OK) return NULL;
    if (fsdpi_life_allows(unit, FSDPI_EV_PARAM, NULL) != FSDP_OK) return NULL;
    if (dtype != NULL) *dtype = unit->whole_dtype;
    return (const char *)unit->whole + (size_t)unit->layout.at[i] * fsdp_dtype_bytes(unit->whole_dtype);
}

/* ---- slices ---- */

int64_t fsdp_unit_slice_numel(const fsdp_unit *unit)
{
    return fsdpi_unit_kept(unit);
}

void fsdp_unit_slices(fsdp_unit *u, const fsdp_slice **out, int *count)
{
    for (int i = 0; i < u->slice_count; i++) {
        const fsdpi_segment *g = &u->segments[i];
        int64_t at = g->at - u->keep_lo;
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
