/* SPDX-License-Identifier: MIT */
#include "shard/unit_list.h"

#include "base/error.h"

#include <stdio.h>

fsdp_status fsdpi_list_check(fsdp_unit_list units, fsdpi_event ev)
{
    FSDP_FAIL_IF(units.count < 0 || (units.count > 0 && units.units == NULL), FSDP_ERR_INVALID, "%s: no list of units",
                 fsdpi_event_call(ev));
    for (int i = 0; i < units.count; i++) units.units[i]->rt->mark++; /* a mark that no unit of any communicator has */
    for (int i = 0; i < units.count; i++) {
        fsdp_unit *u = units.units[i];
        FSDP_FAIL_IF(u->listed == u->rt->mark, FSDP_ERR_INVALID, "%s: unit \"%s\" is in the list twice", fsdpi_event_call(ev), u->name);
        u->listed = u->rt->mark;
        FSDP_TRY(fsdpi_life_allows(u, ev, NULL));
    }
    return FSDP_OK;
}

fsdp_status fsdpi_list_tag(fsdp_unit_list units, fsdpi_op op, bool meet)
{
    if (units.count == 0) return FSDP_OK;
    fsdp_unit *first = units.units[0];
    char what[64];
    snprintf(what, sizeof(what), "%.20s and %d more", first->name, units.count - 1);
    const char *name = units.count > 1 ? what : first->name;
    return meet ? fsdpi_comm_tell(first->rt->comm, op, name, NULL, 0) : fsdpi_comm_tag(first->rt->comm, op, name, 0);
}
