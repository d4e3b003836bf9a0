/* SPDX-License-Identifier: MIT
 *
 * What kernels on the host do first: copy their arguments, translate the addresses in the copy, check what
 * only they can see. */
#ifndef FSDPI_OPS_KERNEL_ARGS_H
#define FSDPI_OPS_KERNEL_ARGS_H

#include "ops/kernels.h"

/* Replaces the device address in an lvalue by the host's. */
#define HOST(k, pointer) ((pointer) = fsdp_kernel_ptr((k), (pointer)))

/* The label of a row that does not count. */
enum { FSDPI_IGNORED_LABEL = -100 };

/* Each id is in [0, V); of labels also FSDPI_IGNORED_LABEL. Before anything is written. */
static inline fsdp_status fsdpi_check_ids(const char *what, const int32_t *ids, int64_t M, int64_t V,
                                          bool labels)
{
    for (int64_t m = 0; m < M; m++) {
        if (labels && ids[m] == FSDPI_IGNORED_LABEL) continue;
        FSDP_FAIL_IF(ids[m] < 0 || ids[m] >= V, FSDP_ERR_INVALID, "row %lld: %s %d is not in [0, %lld)",
                     (long long)m, what, (int)ids[m], (long long)V);
    }
    return FSDP_OK;
}

#endif
