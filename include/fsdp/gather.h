/* SPDX-License-Identifier: MIT
 *
 * Gathering by hand: for programs that know better than the last pass what comes next, and for those with little memory.
 *
 *     fsdp_comm_set_max_unsharded(comm, 64 << 20);           never more than 64 MiB of whole parameters
 *     fsdp_unit_set_prefetch(block[i], &next, &previous);    when block i begins, its neighbours are gathered
 *     fsdp_unit_prefetch(block[0]);                          early, while the data is read
 *     fsdp_unit_unshard(table);                              stays whole over several passes
 *     fsdp_unit_reshard(table);
 *
 * All collective: every rank makes the same calls in the same order. None changes a result. Where a gather copies nothing
 * (transports shm and self) and in mode none, where parameters are always whole, a prefetch and the cap have no effect.
 *
 * Stream: a gather goes on a stream of its own where the device is asynchronous; the unit's compute stream waits for it where the
 * unit is unsharded or begins. */
#ifndef FSDP_GATHER_H
#define FSDP_GATHER_H

#include <fsdp/unit.h>

FSDP_BEGIN_DECLS

/* The unit is whole from here on, in passes and outside of them, until fsdp_unit_reshard() or until its parameters change (a step,
 * new values, a summon with writeback); fsdp_unit_param() reads it. Below F32 (param_dtype) also until its masters are gathered in its
 * place: by a summon, or an exact evaluation. Once is as good as twice. Not within a step. */
FSDP_API fsdp_status fsdp_unit_unshard(fsdp_unit *unit) FSDP_NODISCARD;
/* The unit is sharded now: also where a pass keeps it from forward to backward, which gathers it again then. FSDP_ERR_STATE while a
 * forward, backward or summon of it is open. */
FSDP_API fsdp_status fsdp_unit_reshard(fsdp_unit *unit) FSDP_NODISCARD;
/* Begins the gather and does not wait. A hint: where the unit is whole, or there is no room below the cap, nothing is done. A pass
 * that ends without having used it gives it up. Not within a step. */
FSDP_API fsdp_status fsdp_unit_prefetch(fsdp_unit *unit) FSDP_NODISCARD;

/* Which units are gathered ahead, in this order, when this one begins its forward, and its backward: instead of those that came
 * next in the last pass (fsdp_unit_opts.prefetch). NULL: those again. An empty list: none. Units of the same communicator; the
 * lists are copied; a unit that is destroyed is taken out. Outside of passes. */
FSDP_API fsdp_status fsdp_unit_set_prefetch(fsdp_unit *unit, const fsdp_unit_list *forward, const fsdp_unit_list *backward) FSDP_NODISCARD;

/* At most so many bytes of whole parameters at a time, of all units of the communicator, in private buffers (fsdp_unit_info has
 * the bytes of a unit; on transport copy one with a param_dtype below F32 takes also the bytes that arrive, until they are
 * widened); 0: no cap. What is gathered ahead keeps below it. A unit that begins takes the room of others that are whole and
 * not in use: they are gathered again in their turn. Where those in use leave too little: FSDP_ERR_NOMEM, with the numbers, on
 * every rank, and nothing is changed; here, where units that are summoned hold more. A unit that alone is larger is refused here, and
 * where it is made (FSDP_ERR_INVALID). What a summon for rank 0 alone holds there counts on all ranks. The copy that a summon with
 * writeback takes is not counted. Outside of passes. */
FSDP_API fsdp_status fsdp_comm_set_max_unsharded(fsdp_comm *comm, int64_t bytes) FSDP_NODISCARD;
/* Not collective. Bytes of whole parameters that this rank holds in private buffers; the most since the cap was set, or since the
 * first unit was made. */
FSDP_API fsdp_status fsdp_comm_get_unsharded(fsdp_comm *comm, int64_t *now, int64_t *most) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
