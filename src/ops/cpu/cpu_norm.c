/* SPDX-License-Identifier: MIT
 *
 * Layer normalisation in blocks of rows; each block of the backward leaves the sums of its rows. */
#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/rows.h"

typedef struct forward_run {
    fsdpi_layer_norm_args a;
    const fsdpi_norm_rows *rows;
} forward_run;

static void forward_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const forward_run *r = arg;
    int64_t m = i * FSDPI_SUM_ROWS;
    r->rows->forward(&r->a, m, fsdpi_piece_end(m, FSDPI_SUM_ROWS, r->a.M));
}

fsdp_status fsdpi_cpu_layer_norm(const fsdp_kernel *k, const void *args)
{
    forward_run r = { .a = *(const fsdpi_layer_norm_args *)args, .rows = fsdpi_norm_rows_get(k->isa) };
    fsdpi_layer_norm_args *a = &r.a;
    HOST(k, a->x);
    HOST(k, a->residual);
    HOST(k, a->weight);
    HOST(k, a->bias);
    HOST(k, a->sum);
    HOST(k, a->y);
    HOST(k, a->mean);
    HOST(k, a->rstd);
    fsdpi_kernel_parallel(k, fsdpi_piece_count(a->M, FSDPI_SUM_ROWS), forward_piece, &r);
    return FSDP_OK;
}

/* Scratch: [blocks, 2, C], a block's sums of dweight and of dbias. */
size_t fsdpi_layer_norm_backward_scratch(const fsdpi_layer_norm_backward_args *a, int threads)
{
    (void)threads;
    if (a->dweight == NULL && a->dbias == NULL) return 0;
    return (size_t)(fsdpi_piece_count(a->M, FSDPI_SUM_ROWS) * 2 * a->C) * sizeof(float);
}

typedef struct backward_run {
    fsdpi_layer_norm_backward_args a;
    const fsdpi_norm_rows *rows;
    float *partial;
} backward_run;

static void backward_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const backward_run *r = arg;
    int64_t m = i * FSDPI_SUM_ROWS, C = r->a.C;
    float *sums = r->partial != NULL ? r->partial + i * 2 * C : NULL;
    r->rows->backward(&r->a, m, fsdpi_piece_end(m, FSDPI_SUM_ROWS, r->a.M), sums,
                      sums != NULL ? sums + C : NULL);
}

fsdp_status fsdpi_cpu_layer_norm_backward(const fsdp_kernel *k, const void *args)
{
    backward_run r = { .a = *(const fsdpi_layer_norm_backward_args *)args,
                       .rows = fsdpi_norm_rows_get(k->isa) };
    fsdpi_layer_norm_backward_args *a = &r.a;
    HOST(k, a->dy);
    HOST(k, a->x);
    HOST(k, a->weight);
    HOST(k, a->mean);
    HOST(k, a->rstd);
    HOST(k, a->dsum);
    HOST(k, a->dx);
    HOST(k, a->dweight);
    HOST(k, a->dbias);
    HOST(k, a->scratch);
    if (a->dweight != NULL || a->dbias != NULL) r.partial = a->scratch;
    int64_t blocks = fsdpi_piece_count(a->M, FSDPI_SUM_ROWS);
    fsdpi_kernel_parallel(k, blocks, backward_piece, &r);
    const float *dweight = r.partial, *dbias = blocks > 0 && r.partial != NULL ? r.partial + a->C : NULL;
    fsdpi_add_partial_sums(k, blocks, a->C, dweight, 2 * a->C, a->dweight_beta, a->dweight);
    fsdpi_add_partial_sums(k, blocks, a->C, dbias, 2 * a->C, a->dbias_beta, a->dbias);
    return FSDP_OK;
}
