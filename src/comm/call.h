/* SPDX-License-Identifier: MIT
 *
 * The call that is under way. A communicator, with all that is made on it, is used by one thread at a time, and not from within
 * a function of the program that one of its calls has called. Each call that speaks to other ranks or changes anything begins by
 * saying so:
 *
 *     fsdp_status fsdp_unit_reshard(fsdp_unit *u)
 *     {
 *         FSDPI_CALL(u->rt->comm);
 *
 * From there to its return, however it returns, the communicator is its thread's. What it calls itself goes on inside it. Another
 * thread's call, or one from within a callback, is FSDP_ERR_STATE before it has done anything. Where no call is under way any
 * thread may begin one: so a communicator can be handed on.
 *
 * A call costs one compare-and-swap and two stores, never a lock: it refuses, and does not wait.
 *
 * Around a function of the program the library says fsdpi_within_begin(&w, NULL): then what is under way bars it. One that is called
 * where no call is under way, or on a thread that makes none (a kernel's), bars all communicators by a text of its own. */
#ifndef FSDPI_COMM_CALL_H
#define FSDPI_COMM_CALL_H

#include "comm/comm.h"

/* Ends the calling function where the call is refused. After checks of its arguments, before anything else. */
#define FSDPI_CALL(comm) FSDPI_CALL_AS(comm, __func__)
/* In the name of another function: of static storage. */
#define FSDPI_CALL_AS(comm, name)                                                                           \
    __attribute__((cleanup(fsdpi_call_end))) fsdp_comm *call_ = NULL;                                       \
    FSDP_TRY(fsdpi_call_begin(&call_, (comm), (name)))

/* *out: comm, to be ended; on failure it is not written. Calls nest. */
fsdp_status fsdpi_call_begin(fsdp_comm **out, fsdp_comm *comm, const char *call);
void fsdpi_call_end(fsdp_comm *const *comm); /* of NULL: nothing */

/* Whether a call could begin now. */
fsdp_status fsdpi_call_may_begin(const fsdp_comm *comm, const char *call);
/* For destructors, which return nothing: where it is refused that is logged, and the thread's last error stays. */
bool fsdpi_call_begin_or_log(fsdp_comm **out, fsdp_comm *comm, const char *call);
/* For what only reads: whether no other thread is in a call. Callbacks may read. */
fsdp_status fsdpi_call_may_read(const fsdp_comm *comm, const char *call);

/* The name of the call that this thread is in, the outermost; "?": in none. */
const char *fsdpi_call_name(const fsdp_comm *comm);

#endif
