/* SPDX-License-Identifier: MIT
 *
 * Sums in order, as kernels: out[i] = ((base[i] + x[0][i]) + x[1][i]) + ... Terms may be below fp32; so may the sum, which is then
 * rounded after each term: so its bits do not depend on how many terms are given at once. */
#ifndef FSDPI_SHARD_SUM_H
#define FSDPI_SHARD_SUM_H

#include <fsdp/dtype.h>

#include "comm/comm.h"
#include "device/device.h"
#include "shard/kernels.h"

typedef struct fsdpi_sum {
    fsdp_comm *comm; /* whose statistics it counts in */
    void *out;
    const void *base; /* NULL: it begins with x[0]. May be out */
    fsdp_dtype dtype; /* of out and base */
    const void *x[FSDPI_SUM_MOST];
    fsdp_dtype x_dtype;
    int n; /* terms, 1 or more */
    int64_t numel;
} fsdpi_sum;

/* Device addresses, of the stream's device. The struct is copied. */
fsdp_status fsdpi_sum_launch(fsdp_stream *s, const fsdpi_sum *sum);

#endif
