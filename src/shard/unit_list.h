/* SPDX-License-Identifier: MIT
 *
 * What calls that take a list of units have in common. Units may be of several communicators, and ranks may have other lists:
 * on one communicator all its ranks have the same units. */
#ifndef FSDPI_SHARD_UNIT_LIST_H
#define FSDPI_SHARD_UNIT_LIST_H

#include "shard/unit.h"

/* FSDPI_CALL() on each communicator of the units; after it the list is one. */
#define FSDPI_LIST_CALL(units, name)                                                                        \
    __attribute__((cleanup(fsdpi_list_call_end))) fsdp_unit_list calls_ = { 0 };                            \
    FSDP_TRY(fsdpi_list_call_begin(&calls_, (units), (name)))
fsdp_status fsdpi_list_call_begin(fsdp_unit_list *out, fsdp_unit_list units, const char *call);
void fsdpi_list_call_end(const fsdp_unit_list *units);

/* Whether the event is allowed for each unit, and each is in the list once. Gives their runtimes one new mark. */
fsdp_status fsdpi_list_check(fsdp_unit_list units, fsdpi_event ev);
/* One tag for the list, on each of its communicators; or a meeting there. */
fsdp_status fsdpi_list_tag(fsdp_unit_list units, fsdpi_op op, bool meet);
/* The communicators of the units, each once, in an order that all ranks share; NULL: begin; returns NULL after the last. Ranks
 * that meet on several, one after another, must do so in one order. */
fsdpi_runtime *fsdpi_list_next(fsdp_unit_list units, const fsdpi_runtime *after);
/* That order, of two. */
bool fsdpi_runtime_comes_before(const fsdpi_runtime *a, const fsdpi_runtime *b);
/* Whether all ranks of comm are in `over`. */
bool fsdpi_comm_encloses(const fsdp_comm *over, const fsdp_comm *comm);

#endif
