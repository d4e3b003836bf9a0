/* SPDX-License-Identifier: MIT
 *
 * Ends of units that only the core itself may bring about. */
#ifndef FSDPI_SHARD_UNIT_DROP_H
#define FSDPI_SHARD_UNIT_DROP_H

#include <fsdp/unit.h>

/* Frees a unit; `together`: as a collective call, so that shared memory goes back to the heap. */
void fsdpi_unit_drop(fsdp_unit *u, bool together);
/* Puts a unit to rest: no holders, no summons, no step, no gradient in flight. Committed gradients stay. */
void fsdpi_unit_rest(fsdp_unit *u);

#endif
