/* SPDX-License-Identifier: MIT
 *
 * Frozen parameters: they are gathered and used like others, and have no gradient. A unit whose parameters are all
 * frozen posts no window. Which parts of this rank's slice have gradients is kept as a few ranges, so that sums leave
 * the others out: what lies there in a window is whatever was there before. */
#include "shard/hooks.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdio.h>

bool fsdp_unit_frozen(const fsdp_unit *unit, int i)
{
    return i >= 0 && i < unit->layout.count && unit->frozen[i];
}

bool fsdpi_unit_trains(const fsdp_unit *u)
{
    /* A unit without parameters goes on as ever: it has gradients, of no elements. */
    return u->layout.count == 0 || u->frozen_count < u->layout.count;
}

/* Neighbours that train become one range, with the padding between them. */
static void find_live(fsdp_unit *u)
{
    if (u->frozen_count == 0) {
        u->live[0] = (fsdpi_range){ u->lo, u->hi };
        u->live_count = u->hi > u->lo;
        return;
    }
    u->live_count = 0;
    for (int i = 0, last = -2; i < u->own_count; i++) {
        const fsdpi_segment *g = &u->own[i];
        if (u->frozen[g->param]) continue;
        if (last == i - 1) u->live[u->live_count - 1].to = g->at + g->numel;
        else u->live[u->live_count++] = (fsdpi_range){ g->at, g->at + g->numel };
        last = i;
    }
}

fsdp_status fsdpi_unit_init_frozen(fsdp_unit *u)
{
    FSDPI_NEW(u->frozen, u->layout.count);
    FSDPI_NEW(u->live, u->layout.count + 1);
    find_live(u);
    return FSDP_OK;
}

static fsdp_status check(const fsdp_unit *u, int i)
{
    FSDP_TRY(fsdpi_unit_check_index(u, i, "fsdp_unit_set_frozen"));
    return fsdpi_life_allows(u, FSDPI_EV_FREEZE, NULL);
}

fsdp_status fsdp_unit_set_frozen(fsdp_unit *u, int i, bool frozen)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(check(u, i));
    char what[600];
    snprintf(what, sizeof(what), "%s in %s", u->layout.param[i].name, u->name);
    FSDP_TRY(fsdpi_comm_tag(u->rt->comm, frozen ? FSDPI_OP_FREEZE : FSDPI_OP_UNFREEZE, what, (uint64_t)u->layout.numel[i] * sizeof(float)));
    if (u->frozen[i] == frozen) return FSDP_OK;
    u->frozen[i] = frozen;
    u->frozen_count += frozen ? 1 : -1;
    find_live(u);
    FSDP_TRY(fsdpi_hooks_find_parts(u));
    fsdpi_unit_check(u);
    return FSDP_OK;
}
