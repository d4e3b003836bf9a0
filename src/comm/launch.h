/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_COMM_LAUNCH_H
#define FSDPI_COMM_LAUNCH_H

#include "comm/comm.h"
#include "comm/transport.h"

/* What a rank does, whoever started it: makes its communicator, calls fn, and leaves in its slot how it went. then: its
 * state where it went well. */
fsdp_status fsdpi_rank_run(fsdpi_world *w, int rank, fsdp_rank_fn fn, void *arg, fsdpi_rank_state then);

#endif
