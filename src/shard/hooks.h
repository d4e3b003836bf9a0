/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_SHARD_HOOKS_H
#define FSDPI_SHARD_HOOKS_H

#include <fsdp/hooks.h>

#include "shard/unit.h"

/* Of a unit that has some; host memory, which kernels read. */
typedef struct fsdpi_hooks {
    fsdp_grad_hooks fn;
    fsdp_slice *whole, *own; /* parts of the window, and of the slice */
    int whole_count, own_count;
    fsdpi_segment *segment; /* to find them */
    float *pieces; /* where they cannot be read where they are: arena block of the gradient device, all ranks' side by side */
    float *sums;   /* a grad_dtype below fp32: the sum before and the sum after, as hooks see them: arena block of the gradient device */
} fsdpi_hooks;

/* On this rank's gradient of a leaf, where backward wrote it. */
fsdp_status fsdpi_hooks_post(fsdp_unit *u, float *grad);
/* Puts all ranks' pieces of a use of a window into out. out, base: accumulators. */
fsdp_status fsdpi_hooks_reduce(fsdp_unit *u, fsdpi_window *window, uint32_t use, void *out, const void *base);
/* Frozen parameters are in no part: anew when others are frozen. */
fsdp_status fsdpi_hooks_find_parts(fsdp_unit *u);
/* All work on the unit has run. */
void fsdpi_hooks_drop(fsdp_unit *u);

static inline bool fsdpi_hooks_have_reduce(const fsdp_unit *u)
{
    return u->hooks != NULL && u->hooks->fn.reduce != NULL;
}

#endif
