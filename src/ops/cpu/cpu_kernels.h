/* SPDX-License-Identifier: MIT
 *
 * The CPU's kernels, and what they share. */
#ifndef FSDPI_OPS_CPU_KERNELS_H
#define FSDPI_OPS_CPU_KERNELS_H

#include "ops/kernel_args.h"
#include "ops/pieces.h"

/* Rows whose column sums are made at a time: a partial sum a block, added in block order. 32: a partial sum
 * is 1/32 of what is summed, and 512 rows still give 16 pieces. */
enum { FSDPI_SUM_ROWS = 32 };

/* Columns per piece where partial sums are added. */
enum { FSDPI_SUM_COLS = 512 };

fsdp_status fsdpi_cpu_linear(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_linear_backward(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_activation(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_activation_backward(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_layer_norm(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_layer_norm_backward(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_attention(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_attention_backward(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_attention_step(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_embedding(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_embedding_backward(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_add(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_axpby(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_dropout(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_cross_entropy(const fsdp_kernel *k, const void *args);
fsdp_status fsdpi_cpu_linear_cross_entropy(const fsdp_kernel *k, const void *args);

/* out[j] = beta out[j] + the partial sums partial[0][j], partial[1][j], ... in this order; rows of partial
 * are ld apart. out NULL: nothing. */
void fsdpi_add_partial_sums(const fsdp_kernel *k, int64_t blocks, int64_t n, const float *partial, int64_t ld,
                            float beta, float *out);

/* What a dropout does to 32 random bits. */
typedef struct fsdpi_drop {
    uint32_t threshold; /* kept where bits >= threshold */
    float factor;       /* of what is kept: 1 / (1 - p) */
} fsdpi_drop;
fsdpi_drop fsdpi_drop_of(const fsdpi_dropout *d);
/* The bits of elements [element, element + n) of sample b of the tensor. */
void fsdpi_drop_bits(const fsdp_kernel *k, const fsdpi_dropout *d, int64_t b, int64_t element, int64_t n,
                     uint32_t *bits);

#endif
