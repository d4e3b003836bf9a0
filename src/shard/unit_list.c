/* SPDX-License-Identifier: MIT */
#include "shard/unit_list.h"

#include "base/error.h"

#include <stdatomic.h>
#include <stdio.h>

/* Of those before `upto`. */
static void end_calls(fsdp_unit_list units, const fsdpi_runtime *upto)
{
    for (fsdpi_runtime *rt = fsdpi_list_next(units, NULL); rt != upto; rt = fsdpi_list_next(units, rt)) fsdpi_call_end(&rt->comm);
}

fsdp_status fsdpi_list_call_begin(fsdp_unit_list *out, fsdp_unit_list units, const char *call)
{
    FSDP_FAIL_IF(units.count < 0 || (units.count > 0 && units.units == NULL), FSDP_ERR_INVALID, "%s: no list of units", call);
    for (fsdpi_runtime *rt = fsdpi_list_next(units, NULL); rt != NULL; rt = fsdpi_list_next(units, rt)) {
        fsdp_comm *begun;
        fsdp_status st = fsdpi_call_begin(&begun, rt->comm, call);
        if (st == FSDP_OK) continue;
        end_calls(units, rt);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *out = units;
    return FSDP_OK;
}

void fsdpi_list_call_end(const fsdp_unit_list *units)
{
    end_calls(*units, NULL);
}

/* Weights of passes are shared across communicators, so a mark is one that no other list in the process has. */
static _Atomic uint64_t marks;

fsdp_status fsdpi_list_check(fsdp_unit_list units, fsdpi_event ev)
{
    uint64_t mark = atomic_fetch_add_explicit(&marks, 1, memory_order_relaxed) + 1;
    for (int i = 0; i < units.count; i++) units.units[i]->rt->mark = mark;
    for (int i = 0; i < units.count; i++) {
        fsdp_unit *u = units.units[i];
        FSDP_FAIL_IF(u->listed == u->rt->mark, FSDP_ERR_INVALID, "%s: unit \"%s\" is in the list twice", fsdpi_event_call(ev), u->name);
        u->listed = u->rt->mark;
        FSDP_TRY(fsdpi_life_allows(u, ev, NULL));
    }
    return FSDP_OK;
}

/* Where a communicator's block lies in the heap is the same on all its ranks, and no two communicators' lie at one place. (One of
 * its own world, of one rank, may: nobody waits there.) */
bool fsdpi_runtime_comes_before(const fsdpi_runtime *a, const fsdpi_runtime *b)
{
    if (a->comm->block_offset != b->comm->block_offset) return a->comm->block_offset < b->comm->block_offset;
    return (uintptr_t)a < (uintptr_t)b;
}

fsdpi_runtime *fsdpi_list_next(fsdp_unit_list units, const fsdpi_runtime *after)
{
    fsdpi_runtime *next = NULL;
    for (int i = 0; i < units.count; i++) {
        fsdpi_runtime *rt = units.units[i]->rt;
        if (after != NULL && !fsdpi_runtime_comes_before(after, rt)) continue;
        if (next == NULL || fsdpi_runtime_comes_before(rt, next)) next = rt;
    }
    return next;
}

static fsdp_status tag_one(fsdp_unit_list units, const fsdpi_runtime *rt, fsdpi_op op, bool meet)
{
    const fsdp_unit *first = NULL;
    int n = 0;
    for (int i = 0; i < units.count; i++) {
        if (units.units[i]->rt != rt) continue;
        if (n++ == 0) first = units.units[i];
    }
    char what[64];
    snprintf(what, sizeof(what), "%.20s and %d more", first->name, n - 1);
    const char *name = n > 1 ? what : first->name;
    return meet ? fsdpi_comm_tell(rt->comm, op, name, NULL, 0) : fsdpi_comm_tag(rt->comm, op, name, 0);
}

fsdp_status fsdpi_list_tag(fsdp_unit_list units, fsdpi_op op, bool meet)
{
    for (fsdpi_runtime *rt = fsdpi_list_next(units, NULL); rt != NULL; rt = fsdpi_list_next(units, rt)) FSDP_TRY(tag_one(units, rt, op, meet));
    return FSDP_OK;
}

static bool is_member(const fsdp_comm *comm, int world_rank)
{
    for (int r = 0; r < comm->size; r++)
        if (comm->world_ranks[r] == world_rank) return true;
    return false;
}

bool fsdpi_comm_encloses(const fsdp_comm *over, const fsdp_comm *comm)
{
    if (over == comm) return true;
    if (over->world != comm->world) return comm->size == 1; /* a rank of its own: it is in this one */
    for (int r = 0; r < comm->size; r++)
        if (!is_member(over, comm->world_ranks[r])) return false;
    return true;
}
