/* SPDX-License-Identifier: MIT
 *
 * Room: how many bytes of whole parameters there may be at a time. What to give up for another unit is decided by which units are
 * whole, pinned and in use: by program order alone, the same on every rank. */
#include "shard/unit.h"

#include "base/error.h"

#include <fsdp/gather.h>

/* Of the block that compute reads. */
static size_t block_bytes(const fsdp_unit *u, bool exact)
{
    bool narrow = u->raw && !exact && fsdpi_unit_is_narrow(u);
    return (size_t)u->layout.total * (narrow ? fsdp_dtype_bytes(u->param_dtype) : sizeof(float));
}

/* That a gather leaves in a private buffer. */
static size_t taken(const fsdp_unit *u, bool exact)
{
    return u->flat != NULL && fsdpi_gather_takes(u, exact) ? block_bytes(u, exact) : 0;
}

/* The same, of a unit that may not be made yet, and whatever its neighbours keep. */
static size_t may_take(const fsdp_unit *u, bool exact)
{
    return fsdpi_unit_is_gathered(u) && fsdpi_gather_copies(u, exact) ? block_bytes(u, exact) : 0;
}

/* What comes below fp32, until it has been widened. What was resharded to neighbours comes as it is used. */
static size_t passing(const fsdp_unit *u, bool exact)
{
    return u->near_is_current ? 0 : fsdpi_gather_passing(u, exact);
}

/* Those that begin join those that hold it, whichever kind of values these see. */
static bool is_there(const fsdp_unit *u, bool exact)
{
    return u->holders > 0 || (u->whole_private && u->residency != FSDPI_SHARDED && u->whole_version == u->version && u->whole_exact == exact);
}

/* That a gather takes now; what is gathered into the block that there is takes none. */
static size_t wanted(const fsdp_unit *u, bool exact)
{
    size_t bytes = taken(u, exact);
    return bytes == 0 || is_there(u, exact) ? 0 : passing(u, exact) + (u->whole_private ? 0 : bytes);
}

/* Whole, and not in use: it can be gathered again. */
static bool can_go(const fsdp_unit *u)
{
    return u->whole_private && (u->residency == FSDPI_AHEAD || (u->residency == FSDPI_KEPT && !u->pinned));
}

static bool is_held_on_0(const fsdp_unit *u)
{
    return u->summons > 0 && u->summon_absent && !u->summon.host && u->holders == 0;
}

/* What a summon for rank 0 alone holds there counts on every rank: all must decide the same. But of a unit that is gathered here. */
static size_t held_on_0(const fsdpi_runtime *rt, const fsdp_unit *but)
{
    size_t bytes = 0;
    for (const fsdp_unit *u = rt->units; u != NULL; u = u->following) {
        if (u == but || !is_held_on_0(u)) continue;
        size_t all = taken(u, true), here = can_go(u) ? 0 : u->whole_bytes; /* by hand */
        bytes += all > here ? all - here : 0;
    }
    return bytes;
}

bool fsdpi_room_has(const fsdp_unit *u, bool exact)
{
    return u->rt->unsharded_cap == 0 || wanted(u, exact) == 0 || u->rt->unsharded + held_on_0(u->rt, u) + wanted(u, exact) <= u->rt->unsharded_cap;
}

static void note_most(fsdpi_runtime *rt, size_t bytes)
{
    if (bytes > rt->unsharded_most) rt->unsharded_most = bytes;
}

void fsdpi_room_take(fsdp_unit *u, bool exact)
{
    u->whole_bytes = block_bytes(u, exact);
    u->rt->unsharded += u->whole_bytes;
    note_most(u->rt, u->rt->unsharded);
}

void fsdpi_room_give(fsdp_unit *u)
{
    u->rt->unsharded -= u->whole_bytes;
    u->whole_bytes = 0;
}

fsdp_status fsdpi_room_check(const fsdp_unit *u, bool exact)
{
    const fsdpi_runtime *rt = u->rt;
    size_t bytes = taken(u, exact);
    if (rt->unsharded_cap == 0 || bytes == 0 || is_there(u, exact)) return FSDP_OK;
    size_t in_use = rt->unsharded + held_on_0(rt, u), pinned = 0;
    bytes += passing(u, exact);
    for (const fsdp_unit *o = rt->units; o != NULL; o = o->following) {
        if (o == u || can_go(o)) in_use -= o->whole_bytes; /* what it has goes first, or is gathered into */
        else if (o->pinned) pinned += o->whole_bytes;
    }
    if (in_use + bytes <= rt->unsharded_cap) return FSDP_OK;
    FSDP_FAIL(FSDP_ERR_NOMEM,
              "unit \"%s\" is %zu bytes whole, and units in use hold %zu%s: together more than the %zu that fsdp_comm_set_max_unsharded() allows: allow at least %zu, "
              "or wrap smaller units",
              u->name, bytes, in_use, pinned > 0 ? " (fsdp_unit_reshard() gives up those that were unsharded)" : "", rt->unsharded_cap, in_use + bytes);
}

fsdp_status fsdpi_room_make(fsdp_unit *u, bool exact)
{
    fsdpi_runtime *rt = u->rt;
    FSDP_TRY(fsdpi_room_check(u, exact));
    /* First what was gathered ahead, then what is kept. The oldest units first: those that a backward comes to last. */
    for (int ahead = 1; ahead >= 0; ahead--) {
        fsdp_unit *o = rt->units;
        while (o != NULL && o->following != NULL) o = o->following;
        for (; o != NULL && !fsdpi_room_has(u, exact); o = o->prev)
            if (o != u && can_go(o) && (o->residency == FSDPI_AHEAD) == ahead) FSDP_TRY(fsdpi_unit_reshard(o));
    }
    note_most(rt, rt->unsharded + wanted(u, exact)); /* the gather comes next */
    return FSDP_OK;
}

/* ---- the cap ---- */

fsdp_status fsdpi_room_allows(const fsdp_unit *u, size_t cap, const char *call)
{
    size_t rounded = may_take(u, false), exact = may_take(u, true);
    if (rounded > 0) rounded += fsdpi_gather_passing(u, false);
    size_t most = rounded > exact ? rounded : exact;
    FSDP_FAIL_IF(cap > 0 && most > cap, FSDP_ERR_INVALID, "%s: unit \"%s\" is %zu bytes whole, more than the cap of %zu on whole parameters: wrap smaller units, or allow more",
                 call, u->name, most, cap);
    return FSDP_OK;
}

fsdp_status fsdp_comm_set_max_unsharded(fsdp_comm *comm, int64_t bytes)
{
    fsdpi_runtime *rt;
    FSDP_FAIL_IF(comm == NULL || bytes < 0, FSDP_ERR_INVALID, "fsdp_comm_set_max_unsharded: no communicator, or %lld bytes", (long long)bytes);
    FSDPI_CALL(comm);
    FSDP_TRY(fsdpi_runtime_of(&rt, comm));
    FSDP_FAIL_IF(rt->passes != NULL, FSDP_ERR_STATE, "fsdp_comm_set_max_unsharded: a pass is open: end it first");
    for (const fsdp_unit *u = rt->units; u != NULL; u = u->following) FSDP_TRY(fsdpi_room_allows(u, (size_t)bytes, "fsdp_comm_set_max_unsharded"));
    size_t held = 0;
    for (const fsdp_unit *u = rt->units; u != NULL; u = u->following) held += is_held_on_0(u) ? taken(u, true) : u->holders > 0 ? u->whole_bytes : 0;
    FSDP_FAIL_IF(bytes > 0 && held > (size_t)bytes, FSDP_ERR_NOMEM, "fsdp_comm_set_max_unsharded: %lld bytes, but units that are summoned hold %zu: end the summons first, or allow more",
                 (long long)bytes, held);
    FSDP_TRY(fsdpi_comm_tag(comm, FSDPI_OP_CAP, NULL, (uint64_t)bytes));
    /* What is whole now and not in use goes where it does not fit. */
    rt->unsharded_cap = (size_t)bytes;
    for (fsdp_unit *u = rt->units; u != NULL && bytes > 0 && rt->unsharded + held_on_0(rt, NULL) > (size_t)bytes; u = u->following)
        if (u->holders == 0) FSDP_TRY(fsdpi_unit_reshard(u));
    rt->unsharded_most = rt->unsharded;
    return FSDP_OK;
}

fsdp_status fsdp_comm_get_unsharded(fsdp_comm *comm, int64_t *now, int64_t *most)
{
    fsdpi_runtime *rt;
    FSDP_TRY(fsdpi_call_may_read(comm, "fsdp_comm_get_unsharded"));
    FSDP_TRY(fsdpi_runtime_of(&rt, comm));
    if (now != NULL) *now = (int64_t)rt->unsharded;
    if (most != NULL) *most = (int64_t)rt->unsharded_most;
    return FSDP_OK;
}
