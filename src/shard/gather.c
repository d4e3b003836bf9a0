/* SPDX-License-Identifier: MIT
 *
 * Residency: making a unit whole, giving it up, and gathering ahead.
 *
 * On a transport that copies, a gather goes on the communication stream into a private buffer: it must not begin
 * before compute has stopped using that memory (an arena block is handed out when its last user is launched, not when
 * it has run), and compute must not begin before it has ended. On shared memory it is a wait. Parameters that are published
 * below fp32 are widened into a private buffer on any transport, unless compute reads them as they are. */
#include "shard/unit.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/pass.h"

static const fsdpi_transport_ops *transport_of(const fsdp_unit *u)
{
    return u->rt->comm->transport;
}

static void set_readable(fsdp_unit *u, bool readable)
{
#ifndef NDEBUG
    /* Reading a resharded unit faults here as it would elsewhere. Not where kernels may still run. */
    if (transport_of(u)->flat_protect != NULL && !u->ctx->dev->ops->async) transport_of(u)->flat_protect(u->viewed, readable);
#else
    (void)u;
    (void)readable;
#endif
}

/* Whether compute can read what is published where it lies. */
static bool in_place(const fsdp_unit *u)
{
    return transport_of(u)->zero_copy && !fsdpi_unit_is_apart(u);
}

size_t fsdpi_gather_passing(const fsdp_unit *u, bool exact)
{
    bool arrives = fsdpi_unit_is_narrow(u) && !exact && !u->raw && !in_place(u);
    return arrives ? (size_t)u->layout.total * fsdp_dtype_bytes(u->param_dtype) : 0;
}

bool fsdpi_gather_takes(const fsdp_unit *u, bool exact)
{
    bool from_near = u->near_is_current && !(exact && fsdpi_unit_is_narrow(u)); /* seen where neighbours keep it */
    return !(from_near && transport_of(u)->zero_copy) && fsdpi_gather_copies(u, exact);
}

bool fsdpi_gather_copies(const fsdp_unit *u, bool exact)
{
    return !in_place(u) || (fsdpi_unit_is_narrow(u) && !u->raw && !exact);
}

static fsdp_status view(fsdp_unit *u, fsdpi_flat *flat, uint32_t version)
{
    u->viewed = flat;
    set_readable(u, true);
    return transport_of(u)->flat_gather(flat, version, NULL, u->ctx->comm);
}

static fsdp_status fetch(fsdp_unit *u, fsdpi_flat *flat, uint32_t version, size_t bytes, void *block)
{
    const fsdpi_transport_ops *t = transport_of(u);
    if (!t->zero_copy) return t->flat_gather(flat, version, block, u->ctx->comm);
    fsdp_stream *s = fsdpi_between(u, true);
    FSDP_TRY(fsdpi_between_begin(u, true));
    FSDP_TRY(t->flat_gather(flat, version, NULL, s));
    FSDP_TRY(fsdp_stream_copy(s, block, t->flat_whole(flat), bytes));
    return fsdpi_between_end(u, true);
}

/* Into a private block. What is there already, of mode optimizer, is overwritten. */
static fsdp_status copy(fsdp_unit *u, fsdpi_flat *flat, uint32_t version, size_t bytes, void **p)
{
    void *block = *p;
    if (block == NULL) FSDP_TRY(fsdpi_arena_alloc(u->ctx->gathered, bytes, &block));
    fsdp_status st = fsdpi_stream_wait_stream(u->ctx->comm, u->ctx->compute);
    if (st == FSDP_OK) st = fetch(u, flat, version, bytes, block);
    if (st != FSDP_OK) {
        if (*p == NULL) fsdpi_arena_free(u->ctx->gathered, block);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *p = block;
    return FSDP_OK;
}

/* fp32 of what is published below it. The narrow block is used on the communication stream alone, so it is free for the next
 * gather at once. */
static fsdp_status gather_and_widen(fsdp_unit *u, fsdpi_flat *flat, uint32_t version, fsdp_dtype dtype, void **p)
{
    const fsdpi_transport_ops *t = transport_of(u);
    void *narrow = NULL, *block = *p;
    if (in_place(u)) FSDP_TRY(t->flat_gather(flat, version, NULL, u->ctx->comm));
    else FSDP_TRY(copy(u, flat, version, (size_t)u->layout.total * fsdp_dtype_bytes(dtype), &narrow));
    fsdp_status st = block != NULL ? FSDP_OK : fsdpi_arena_alloc(u->ctx->gathered, (size_t)u->layout.total * sizeof(float), &block);
    if (st == FSDP_OK) st = fsdpi_stream_wait_stream(u->ctx->comm, u->ctx->compute);
    if (st == FSDP_OK) st = fsdpi_launch_widen(u->ctx->comm, block, in_place(u) ? t->flat_whole(flat) : narrow, dtype, u->layout.total);
    fsdpi_arena_free(u->ctx->gathered, narrow);
    if (st != FSDP_OK) {
        if (*p == NULL) fsdpi_arena_free(u->ctx->gathered, block);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *p = block;
    return FSDP_OK;
}

/* Issues the gather of the current version. */
static fsdp_status gather(fsdp_unit *u, bool exact)
{
    const fsdpi_transport_ops *t = transport_of(u);
    fsdpi_flat *flat;
    uint32_t version;
    fsdp_dtype dtype;
    FSDP_TRY(fsdpi_unit_source(u, exact, &flat, &version, &dtype));
    bool widens = dtype != FSDP_F32 && !u->raw, views = !widens && t->zero_copy && (flat == u->near || in_place(u));
    void *p = u->whole_private ? u->whole : NULL; /* a block of the same size: mode optimizer gathers a new version into it */
    if (!views) FSDP_TRY(fsdpi_room_make(u, exact));
    if (widens) FSDP_TRY(gather_and_widen(u, flat, version, dtype, &p));
    else if (views) FSDP_TRY(view(u, flat, version));
    else FSDP_TRY(copy(u, flat, version, (size_t)u->layout.total * fsdp_dtype_bytes(dtype), &p));
    if (!views && p != NULL && !u->whole_private) fsdpi_room_take(u, exact);
    u->whole_private = !views;
    u->whole = u->whole_private ? p : (void *)(uintptr_t)t->flat_whole(flat);
    u->whole_version = u->version;
    u->whole_exact = exact;
    u->whole_dtype = widens ? FSDP_F32 : dtype;
    if (u->rt->comm->size > 1) u->rt->comm->stats.gathers++;
    if (u->rt->comm->size > 1 && flat == u->near) u->rt->comm->stats.near_gathers++;
    return FSDP_OK;
}

static fsdp_status gather_ahead(fsdp_unit *u, bool exact)
{
    FSDP_TRY(gather(u, exact));
    fsdpi_unit_move(u, FSDPI_AHEAD);
    return FSDP_OK;
}

/* The current values, of this kind unless somebody holds the other, are there for what compute does next. */
static fsdp_status make_current(fsdp_unit *u, bool exact)
{
    if (u->flat == NULL) return FSDP_OK;
    /* The other kind of values may have another size, and lie elsewhere. */
    if (u->holders == 0 && u->residency != FSDPI_SHARDED && u->whole_exact != exact) FSDP_TRY(fsdpi_unit_reshard(u));
    if (u->residency == FSDPI_SHARDED || u->whole_version != u->version) FSDP_TRY(gather_ahead(u, exact));
    return u->residency == FSDPI_AHEAD ? fsdpi_stream_wait_stream(u->ctx->compute, u->ctx->comm) : FSDP_OK;
}

static fsdp_status hold(fsdp_unit *u, bool exact)
{
    FSDP_TRY(make_current(u, exact || !fsdpi_unit_is_narrow(u)));
    fsdpi_unit_move(u, FSDPI_WHOLE);
    u->holders++;
    return FSDP_OK;
}

fsdp_status fsdpi_unit_make_whole(fsdp_unit *u)
{
    if (u->holders > 0 || u->flat == NULL) return FSDP_OK;
    FSDP_TRY(make_current(u, !fsdpi_unit_is_narrow(u)));
    fsdpi_unit_move(u, FSDPI_KEPT);
    return FSDP_OK;
}

fsdp_status fsdpi_unit_gather_ahead(fsdp_unit *u)
{
    return gather_ahead(u, !fsdpi_unit_is_narrow(u));
}

fsdp_status fsdpi_unit_hold_exact(fsdp_unit *u)
{
    return hold(u, true);
}

fsdp_status fsdpi_unit_reshard(fsdp_unit *u)
{
    u->pinned = false;
    if (u->flat == NULL || u->residency == FSDPI_SHARDED) return FSDP_OK;
    void *p = u->whole;
    u->whole = NULL;
    fsdpi_unit_move(u, FSDPI_SHARDED);
    if (!u->whole_private) {
        set_readable(u, false);
        return FSDP_OK;
    }
    u->whole_private = false;
    fsdp_status st = FSDP_OK;
    /* A gather ahead that nobody waited for may still write to it: whoever uses the memory next must come after. */
    st = fsdpi_stream_wait_stream(u->ctx->compute, u->ctx->comm);
    if (st == FSDP_OK && transport_of(u)->scribble)
        st = fsdpi_stream_fill(u->ctx->compute, p, 0xff, (size_t)u->layout.total * fsdp_dtype_bytes(u->whole_dtype));
    fsdpi_arena_free(u->ctx->gathered, p);
    fsdpi_room_give(u);
    return st;
}

fsdp_status fsdpi_unit_release(fsdp_unit *u, bool keep)
{
    if (--u->holders > 0) return FSDP_OK;
    fsdpi_unit_move(u, FSDPI_KEPT);
    /* What is pinned is what passes read; a summon has gathered the masters in its place. */
    u->pinned = u->pinned && u->whole_exact == !fsdpi_unit_is_narrow(u);
    if (keep || u->pinned || fsdpi_unit_stays_whole(u)) return FSDP_OK;
    return fsdpi_unit_reshard(u);
}

/* ---- order and prefetch ---- */

static fsdp_status record(fsdpi_order *o, fsdp_unit *u, bool backward)
{
    if (o->count == o->room) {
        int room = o->room > 0 ? 2 * o->room : 32;
        void *p = fsdpi_realloc(o->turn, (size_t)room, sizeof(*o->turn));
        FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for the order of a pass");
        o->turn = p;
        o->room = room;
    }
    o->turn[o->count].unit = u;
    o->turn[o->count++].backward = backward;
    return FSDP_OK;
}

bool fsdpi_pass_is_exact(const fsdp_pass *pass, const fsdp_unit *u)
{
    return (pass->kind == FSDP_PASS_EVAL && u->exact_eval) || !fsdpi_unit_is_narrow(u);
}

fsdp_status fsdpi_unit_hold_in(fsdp_unit *u, const fsdp_pass *pass)
{
    return hold(u, fsdpi_pass_is_exact(pass, u));
}

/* Whether u is gathered now, is whole, or is better gathered in its turn. */
static bool ahead_of_turn(fsdp_unit *u, const fsdp_pass *pass)
{
    if (u->residency != FSDPI_SHARDED || u->summons > 0 || !fsdpi_gather_copies(u, false)) return true;
    bool exact = fsdpi_pass_is_exact(pass, u);
    /* To offer is to meet the others, who may not gather ahead. */
    if (exact && !fsdpi_unit_offers_exact(u)) return true;
    return fsdpi_room_has(u, exact) && gather_ahead(u, exact) == FSDP_OK; /* in its own turn it is tried again, and then it matters */
}

void fsdpi_prefetch(fsdp_pass *pass, fsdp_unit *u, bool backward)
{
    const fsdpi_order *last = &u->rt->last[pass->kind];
    const struct fsdpi_ahead *given = &u->ahead[backward];
    int at = pass->order.count;
    pass->off_course |= record(&pass->order, u, backward) != FSDP_OK;
    pass->off_course |= at >= last->count || last->turn[at].unit != u || last->turn[at].backward != backward;
    if (given->given) {
        bool again = !backward && fsdpi_pass_find(pass, u)->recompute_open > 0; /* then the backward comes next, not more forwards */
        for (int i = 0; i < given->count && !again; i++)
            if (!ahead_of_turn(given->unit[i], pass)) return;
        return;
    }
    if (pass->off_course) return;
    for (int i = at + 1, ahead = 0; i < last->count && ahead < u->prefetch; i++) {
        if (last->turn[i].unit == u) continue;
        ahead++;
        if (!ahead_of_turn(last->turn[i].unit, pass)) return;
    }
}
