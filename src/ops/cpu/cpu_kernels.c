/* SPDX-License-Identifier: MIT */
#include "ops/cpu/cpu_kernels.h"

#include "base/philox.h"
#include "ops/cpu/rows.h"

#include <math.h>

const fsdpi_op_kernels fsdpi_op_kernels_cpu = {
    .linear = fsdpi_cpu_linear,
    .linear_backward = fsdpi_cpu_linear_backward,
    .activation = fsdpi_cpu_activation,
    .activation_backward = fsdpi_cpu_activation_backward,
    .layer_norm = fsdpi_cpu_layer_norm,
    .layer_norm_backward = fsdpi_cpu_layer_norm_backward,
    .attention = fsdpi_cpu_attention,
    .attention_backward = fsdpi_cpu_attention_backward,
    .attention_step = fsdpi_cpu_attention_step,
    .embedding = fsdpi_cpu_embedding,
    .embedding_backward = fsdpi_cpu_embedding_backward,
    .add = fsdpi_cpu_add,
    .axpby = fsdpi_cpu_axpby,
    .dropout = fsdpi_cpu_dropout,
    .cross_entropy = fsdpi_cpu_cross_entropy,
    .linear_cross_entropy = fsdpi_cpu_linear_cross_entropy,
};

/* ---- partial sums ---- */

typedef struct partial_args {
    const fsdpi_pointwise_rows *rows;
    int64_t blocks, n, ld;
    const float *partial;
    float beta, *out;
} partial_args;

static void partial_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const partial_args *p = arg;
    int64_t from = i * FSDPI_SUM_COLS, n = fsdpi_piece_end(from, FSDPI_SUM_COLS, p->n) - from;
    float sum[FSDPI_SUM_COLS];
    p->rows->sum_rows(p->blocks, n, p->blocks > 0 ? p->partial + from : NULL, p->ld, sum);
    p->rows->axpby(n, 1.0f, sum, p->beta, p->out + from);
}

void fsdpi_add_partial_sums(const fsdp_kernel *k, int64_t blocks, int64_t n, const float *partial, int64_t ld,
                            float beta, float *out)
{
    if (out == NULL) return;
    partial_args p = { fsdpi_pointwise_rows_get(k->isa), blocks, n, ld, partial, beta, out };
    fsdpi_kernel_parallel(k, fsdpi_piece_count(n, FSDPI_SUM_COLS), partial_piece, &p);
}

/* ---- dropout ---- */

fsdpi_drop fsdpi_drop_of(const fsdpi_dropout *d)
{
    double bound = ceil((double)d->p * 0x1p32);
    return (fsdpi_drop){
        .threshold = bound >= 0x1p32 ? UINT32_MAX : (uint32_t)bound,
        .factor = d->p < 1.0f ? 1.0f / (1.0f - d->p) : 0.0f,
    };
}

void fsdpi_drop_bits(const fsdp_kernel *k, const fsdpi_dropout *d, int64_t b, int64_t element, int64_t n,
                     uint32_t *bits)
{
    uint64_t sample = (uint32_t)(d->first_sample + (uint64_t)b);
    uint64_t ctr_hi = sample | (uint64_t)d->layer << 32;
    /* The counter's low half is start / 4: its upper word is the step. */
    uint64_t start = (uint64_t)element | (uint64_t)d->step << 34;
    fsdpi_philox_kernels_get(k->isa)->bits(d->seed ^ FSDPI_PHILOX_DROPOUT, ctr_hi, start, (size_t)n, bits);
}
