/* SPDX-License-Identifier: MIT
 *
 * The core's kernels, once an instruction set. Each gives an element the same bits at any offset, length, address. */
#ifndef FSDPI_SHARD_KERNELS_H
#define FSDPI_SHARD_KERNELS_H

#include "base/isa.h"
#include "base/xsum.h"

#include <stddef.h>

enum { FSDPI_SUM_MOST = 8 };

typedef struct fsdpi_shard_kernels {
    /* out[i] = (((base[i] + x[0][i]) + x[1][i]) + ...), n terms, 1 <= n <= FSDPI_SUM_MOST, in this order; base may be
     * NULL (begins with x[0]) and may be out. `stream`: out is not read again soon. */
    void (*sum)(float *out, const float *base, const float *const *x, int n, size_t numel, bool stream);
    /* *sum += the exact sum of x[i]^2. */
    void (*sumsq)(fsdpi_xsum *sum, const float *x, size_t numel);
    /* ... of |x[i]|. */
    void (*sumabs)(fsdpi_xsum *sum, const float *x, size_t numel);
    /* The bits of the largest |x[i]|, as an integer: NaN is more than infinity, and that more than all numbers. 0 of nothing. */
    uint32_t (*largest)(const float *x, size_t numel);
} fsdpi_shard_kernels;

FSDPI_ISA_TABLE(fsdpi_shard_kernels, fsdpi_shard_kernels_get)

#endif
