/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_SHARD_NORM_H
#define FSDPI_SHARD_NORM_H

#include <fsdp/norm.h>

/* fsdp_step_norm(), and ranks agree on what each has met in the step so far (mine), in the same exchange: where that is an error of any
 * rank, all get it, as from fsdp_comm_agree(). */
fsdp_status fsdpi_step_norm(fsdp_unit_list units, const fsdp_norm_opts *opts, fsdp_status mine, double *norm, double *weight);

/* Within a step, after a norm that is not finite; collective as fsdp_step_norm(). The first parameter, in the order of the
 * units, that has a gradient which is infinite or no number, as text: unit "h.0", parameter "w". "" where there is none: the
 * sum alone has overflown. */
fsdp_status fsdpi_step_find_bad(fsdp_unit_list units, fsdp_comm *over, char *text, size_t bytes);

#endif
