/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_SHARD_REWRITE_H
#define FSDPI_SHARD_REWRITE_H

#include "shard/unit.h"

/* Launches on the unit's storage stream what writes its masters; number: of the unit in the list. */
typedef fsdp_status (*fsdpi_rewrite_fn)(fsdp_unit *u, int number, void *arg);

/* Collective. Checks the event for each unit; then, when all ranks have come, writes and publishes. alike: replicas write the same;
 * otherwise what each owns counts. */
fsdp_status fsdpi_units_rewrite(fsdp_unit_list units, fsdpi_event ev, fsdpi_rewrite_fn write, void *arg, bool alike);

#endif
