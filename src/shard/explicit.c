/* SPDX-License-Identifier: MIT
 *
 * Gathering by hand: what the program says about residency, beside what passes do. */
#include "shard/pass.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/philox.h"

#include <fsdp/gather.h>

#include <string.h>

fsdp_status fsdp_unit_unshard(fsdp_unit *u)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_UNSHARD, NULL));
    /* While masters are in its place, be it on rank 0 alone, there is nothing that would stay. */
    bool summoned = u->summons > 0 && !u->summon.host, masters = fsdpi_unit_is_narrow(u) && (summoned || (u->holders > 0 && u->whole_exact));
    if (masters) return fsdpi_unit_tag_unshard(u, 0);
    FSDP_TRY(fsdpi_room_check(u, !fsdpi_unit_is_narrow(u)));
    FSDP_TRY(fsdpi_unit_tag_unshard(u, (uint64_t)u->layout.total * sizeof(float)));
    FSDP_TRY(fsdpi_unit_make_whole(u));
    u->pinned = true;
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdpi_unit_tag_unshard(fsdp_unit *u, uint64_t bytes)
{
    return fsdpi_comm_tag_of(u->rt->comm, FSDPI_OP_UNSHARD, u->name, bytes, u->number);
}

fsdp_status fsdp_unit_reshard(fsdp_unit *u)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_RESHARD, NULL));
    FSDP_TRY(fsdpi_unit_tag(u, FSDPI_OP_RESHARD));
    FSDP_TRY(fsdpi_unit_reshard(u));
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_prefetch(fsdp_unit *u)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_PREFETCH, NULL));
    FSDP_TRY(fsdpi_unit_tag(u, FSDPI_OP_PREFETCH));
    fsdpi_unit_check(u); /* the end of a pass may have sharded it: from kept to ahead it goes in two moves */
    bool wanted = u->residency == FSDPI_SHARDED && fsdpi_gather_copies(u, false) && fsdpi_room_has(u, !fsdpi_unit_is_narrow(u));
    if (wanted) FSDP_TRY(fsdpi_unit_gather_ahead(u));
    fsdpi_unit_check(u);
    return FSDP_OK;
}

/* ---- which ones ahead ---- */

static fsdp_status copy_list(struct fsdpi_ahead *out, const fsdp_unit *u, const fsdp_unit_list *l)
{
    *out = (struct fsdpi_ahead){ .given = l != NULL };
    if (l == NULL) return FSDP_OK;
    FSDP_FAIL_IF(l->count < 0 || (l->count > 0 && l->units == NULL), FSDP_ERR_INVALID, "fsdp_unit_set_prefetch: unit \"%s\": %d units, but no list of them", u->name, l->count);
    for (int i = 0; i < l->count; i++) {
        const fsdp_unit *o = l->units[i];
        FSDP_FAIL_IF(o == NULL || o == u, FSDP_ERR_INVALID, "fsdp_unit_set_prefetch: unit \"%s\": number %d of its list is %s", u->name, i, o == NULL ? "NULL" : "the unit itself");
        FSDP_FAIL_IF(o->rt != u->rt, FSDP_ERR_INVALID, "fsdp_unit_set_prefetch: units \"%s\" and \"%s\" are of different communicators", u->name, o->name);
    }
    FSDPI_NEW(out->unit, l->count);
    for (int i = 0; i < l->count; i++) out->unit[out->count++] = l->units[i];
    return FSDP_OK;
}

static uint64_t hash_of(const struct fsdpi_ahead *a)
{
    uint64_t h = a->given;
    for (int i = 0; i < a->count; i++) h = h * 31 + fsdpi_name_hash(a->unit[i]->name);
    return h;
}

fsdp_status fsdp_unit_set_prefetch(fsdp_unit *u, const fsdp_unit_list *forward, const fsdp_unit_list *backward)
{
    FSDPI_CALL(u->rt->comm);
    struct fsdpi_ahead f = { 0 }, b = { 0 };
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_SET_PREFETCH, NULL));
    fsdp_status st = copy_list(&f, u, forward);
    if (st == FSDP_OK) st = copy_list(&b, u, backward);
    if (st == FSDP_OK || st == FSDP_ERR_NOMEM) st = fsdp_comm_agree(u->rt->comm, st);
    if (st == FSDP_OK) st = fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SET_PREFETCH, u->name, hash_of(&f) * 31 + hash_of(&b));
    if (st != FSDP_OK) {
        fsdpi_free(f.unit);
        fsdpi_free(b.unit);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    fsdpi_free(u->ahead[0].unit);
    fsdpi_free(u->ahead[1].unit);
    u->ahead[0] = f;
    u->ahead[1] = b;
    return FSDP_OK;
}

static void take_out(struct fsdpi_ahead *a, const fsdp_unit *u)
{
    int kept = 0;
    for (int i = 0; i < a->count; i++)
        if (a->unit[i] != u) a->unit[kept++] = a->unit[i];
    a->count = kept;
}

void fsdpi_unit_forget_ahead(fsdp_unit *u)
{
    for (fsdp_unit *o = u->rt->units; o != NULL; o = o->following)
        for (int k = 0; k < 2; k++) take_out(&o->ahead[k], u);
    for (int k = 0; k < 2; k++) {
        fsdpi_free(u->ahead[k].unit);
        u->ahead[k] = (struct fsdpi_ahead){ 0 };
    }
}
