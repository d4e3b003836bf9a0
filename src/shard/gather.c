/* SPDX-License-Identifier: MIT
 *
 * Residency: making a unit whole, giving it up, and gathering ahead.
 *
 * On a transport that copies, a gather goes on the communication stream into a private buffer: it must not begin
 * before compute has stopped using that memory (an arena block is handed out when its last user is launched, not when
 * it has run), and compute must not begin before it has ended. On shared memory it is a wait. */
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
    if (transport_of(u)->flat_protect != NULL && !u->ctx->dev->ops->async) transport_of(u)->flat_protect(u->flat, readable);
#else
    (void)u;
    (void)readable;
#endif
}

/* Issues the gather of the current version. */
static fsdp_status gather(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = transport_of(u);
    if (t->zero_copy) {
        set_readable(u, true);
        FSDP_TRY(t->flat_gather(u->flat, u->version, NULL, u->ctx->comm));
        u->whole = (float *)(uintptr_t)t->flat_whole(u->flat);
    } else {
        void *p = u->whole;
        if (p == NULL) FSDP_TRY(fsdpi_arena_alloc(u->ctx->gathered, (size_t)u->layout.total * sizeof(float), &p));
        fsdp_status st = fsdpi_stream_wait_stream(u->ctx->comm, u->ctx->compute);
        if (st == FSDP_OK) st = t->flat_gather(u->flat, u->version, p, u->ctx->comm);
        if (st != FSDP_OK) {
            if (u->whole == NULL) fsdpi_arena_free(u->ctx->gathered, p);
            return fsdp_error_through(st, __func__, __FILE__, __LINE__);
        }
        u->whole = p;
        u->whole_private = true;
    }
    u->whole_version = u->version;
    if (u->rt->comm->size > 1) u->rt->comm->stats.gathers++;
    return FSDP_OK;
}

fsdp_status fsdpi_unit_hold(fsdp_unit *u)
{
    if (u->mode != FSDP_MODE_NONE) {
        if (u->residency == FSDPI_SHARDED || u->whole_version != u->version) {
            FSDP_TRY(gather(u));
            u->residency = FSDPI_AHEAD;
        }
        if (u->residency == FSDPI_AHEAD) FSDP_TRY(fsdpi_stream_wait_stream(u->ctx->compute, u->ctx->comm));
    }
    u->residency = FSDPI_WHOLE;
    u->holders++;
    return FSDP_OK;
}

fsdp_status fsdpi_unit_reshard(fsdp_unit *u)
{
    if (u->mode == FSDP_MODE_NONE || u->residency == FSDPI_SHARDED) return FSDP_OK;
    float *p = u->whole;
    u->whole = NULL;
    u->residency = FSDPI_SHARDED;
    if (!u->whole_private) {
        set_readable(u, false);
        return FSDP_OK;
    }
    u->whole_private = false;
    fsdp_status st = FSDP_OK;
    /* A gather ahead that nobody waited for may still write to it: whoever uses the memory next must come after. */
    st = fsdpi_stream_wait_stream(u->ctx->compute, u->ctx->comm);
    if (st == FSDP_OK && transport_of(u)->scribble)
        st = fsdpi_stream_fill(u->ctx->compute, p, 0xff, (size_t)u->layout.total * sizeof(float));
    fsdpi_arena_free(u->ctx->gathered, p);
    return st;
}

fsdp_status fsdpi_unit_release(fsdp_unit *u, bool keep)
{
    if (--u->holders > 0) return FSDP_OK;
    u->residency = FSDPI_KEPT;
    if (keep || u->mode == FSDP_MODE_OPTIMIZER || u->mode == FSDP_MODE_NONE) return FSDP_OK;
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

void fsdpi_prefetch(fsdp_pass *pass, fsdp_unit *u, bool backward)
{
    const fsdpi_order *last = &u->rt->last[pass->kind];
    int at = pass->order.count;
    pass->off_course |= record(&pass->order, u, backward) != FSDP_OK;
    pass->off_course |= at >= last->count || last->turn[at].unit != u || last->turn[at].backward != backward;
    if (pass->off_course || transport_of(u)->zero_copy) return;
    for (int i = at + 1, ahead = 0; i < last->count && ahead < u->prefetch; i++) {
        fsdp_unit *next = last->turn[i].unit;
        if (next == u) continue;
        ahead++;
        if (next->residency != FSDPI_SHARDED || next->summons > 0) continue;
        if (gather(next) != FSDP_OK) return; /* in its own turn it is tried again, and then it matters */
        next->residency = FSDPI_AHEAD;
    }
}
