/* SPDX-License-Identifier: MIT
 *
 * Ends of units that only the core itself may bring about. */
#ifndef FSDPI_SHARD_UNIT_DROP_H
#define FSDPI_SHARD_UNIT_DROP_H

#include <fsdp/unit.h>

/* Frees a unit, without asking the other ranks: they may be gone. NULL is accepted. */
void fsdpi_unit_drop(fsdp_unit *u);
/* Puts a unit to rest: no holders, no summons, no step, no gradient in flight. Committed gradients stay. */
void fsdpi_unit_rest(fsdp_unit *u);

#endif
