/* SPDX-License-Identifier: MIT
 *
 * What calls that take a list of units have in common. */
#ifndef FSDPI_SHARD_UNIT_LIST_H
#define FSDPI_SHARD_UNIT_LIST_H

#include "shard/unit.h"

/* Whether the event is allowed for each unit, and each is in the list once. */
fsdp_status fsdpi_list_check(fsdp_unit_list units, fsdpi_event ev);
/* One tag for the list; or a meeting. */
fsdp_status fsdpi_list_tag(fsdp_unit_list units, fsdpi_op op, bool meet);

#endif
