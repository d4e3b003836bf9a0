/* SPDX-License-Identifier: MIT
 *
 * Linear layers: the product of a piece and then, while the piece is in cache, its bias and activation. */
#include "base/alloc.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/rows.h"
#include "ops/gemm.h"

typedef struct forward_run {
    fsdpi_linear_args a;
    fsdpi_gemm g;
    fsdpi_gemm_cut cut;
    fsdpi_gemm_kind kind;
    const fsdpi_pointwise_rows *rows;
    fsdpi_pieces pieces;
} forward_run;

static void forward_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    forward_run *r = arg;
    const fsdpi_linear_args *a = &r->a;
    fsdpi_gemm p = fsdpi_gemm_piece(&r->g, &r->cut, i);
    if (fsdpi_gemm_call(r->kind, &p) != FSDP_OK) {
        fsdpi_pieces_fail(&r->pieces);
        return;
    }
    if (a->act == FSDPI_ACT_NONE && a->bias == NULL) return;
    int64_t first = p.c - r->g.c, col = first % a->N;
    for (int64_t m = 0; m < p.M; m++) {
        int64_t at = first + m * a->N;
        r->rows->bias_act(a->act, p.N, p.c + m * p.ldc, a->bias != NULL ? a->bias + col : NULL,
                          a->pre != NULL ? a->pre + at : NULL, a->y + at);
    }
}

fsdp_status fsdpi_cpu_linear(const fsdp_kernel *k, const void *args)
{
    forward_run r = { .a = *(const fsdpi_linear_args *)args, .rows = fsdpi_pointwise_rows_get(k->isa) };
    fsdpi_linear_args *a = &r.a;
    HOST(k, a->x);
    HOST(k, a->weight);
    HOST(k, a->bias);
    HOST(k, a->y);
    HOST(k, a->pre);
    if (a->act == FSDPI_ACT_NONE) a->pre = NULL;
    r.g = (fsdpi_gemm){ .trans_b = !a->in_out, .M = a->M, .N = a->N, .K = a->K, .alpha = 1.0f, .a = a->x,
                        .b = a->weight, .c = a->pre != NULL ? a->pre : a->y, .lda = a->K,
                        .ldb = a->in_out ? a->N : a->K, .ldc = a->N };
    r.cut = fsdpi_gemm_cut_of(a->M, a->N);
    r.kind = fsdpi_gemm_get_info()->kind;
    float *copy;
    FSDP_TRY(fsdpi_gemm_spread(k, &r.g, &copy));
    fsdpi_kernel_parallel(k, r.cut.row_pieces * r.cut.col_pieces, forward_piece, &r);
    fsdpi_free(copy);
    FSDP_TRY(fsdpi_pieces_status(&r.pieces));
    return FSDP_OK;
}

/* ---- backward ---- */

/* Scratch: the partial sums of dbias, then d pre where act is not NONE. */
static size_t partial_numel(const fsdpi_linear_backward_args *a)
{
    return a->dbias != NULL ? (size_t)(fsdpi_piece_count(a->M, FSDPI_SUM_ROWS) * a->N) : 0;
}

size_t fsdpi_linear_backward_scratch(const fsdpi_linear_backward_args *a, int threads)
{
    (void)threads;
    size_t dpre = a->act != FSDPI_ACT_NONE ? (size_t)(a->M * a->N) : 0;
    return (fsdpi_round_up(partial_numel(a), 16) + dpre) * sizeof(float);
}

typedef struct backward_run {
    fsdpi_linear_backward_args a;
    const fsdpi_pointwise_rows *rows;
    float *partial, *dpre; /* NULL: not wanted */
} backward_run;

static void dpre_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const backward_run *r = arg;
    const fsdpi_linear_backward_args *a = &r->a;
    int64_t m = i * FSDPI_SUM_ROWS, rows = fsdpi_piece_end(m, FSDPI_SUM_ROWS, a->M) - m, at = m * a->N;
    float *sum = r->partial != NULL ? r->partial + i * a->N : NULL;
    if (r->dpre != NULL)
        r->rows->act_backward_sum(a->act, rows, a->N, a->pre + at, a->dy + at, r->dpre + at, sum);
    else
        r->rows->sum_rows(rows, a->N, a->dy + at, a->N, sum);
}

fsdp_status fsdpi_cpu_linear_backward(const fsdp_kernel *k, const void *args)
{
    backward_run r = { .a = *(const fsdpi_linear_backward_args *)args,
                       .rows = fsdpi_pointwise_rows_get(k->isa) };
    fsdpi_linear_backward_args *a = &r.a;
    HOST(k, a->dy);
    HOST(k, a->x);
    HOST(k, a->weight);
    HOST(k, a->pre);
    HOST(k, a->dx);
    HOST(k, a->dweight);
    HOST(k, a->dbias);
    HOST(k, a->scratch);
    if (a->dbias != NULL) r.partial = a->scratch;
    if (a->act != FSDPI_ACT_NONE) r.dpre = (float *)a->scratch + fsdpi_round_up(partial_numel(a), 16);
    int64_t blocks = fsdpi_piece_count(a->M, FSDPI_SUM_ROWS);
    if (r.partial != NULL || r.dpre != NULL) fsdpi_kernel_parallel(k, blocks, dpre_piece, &r);
    fsdpi_add_partial_sums(k, blocks, a->N, r.partial, a->N, a->dbias_beta, a->dbias);

    const float *dpre = r.dpre != NULL ? r.dpre : a->dy;
    fsdpi_gemm dx = { .trans_b = a->in_out, .M = a->M, .N = a->K, .K = a->N, .alpha = 1.0f,
                      .beta = a->dx_beta, .a = dpre, .b = a->weight, .c = a->dx, .lda = a->N,
                      .ldb = a->in_out ? a->N : a->K, .ldc = a->K };
    if (a->dx != NULL) FSDP_TRY(fsdpi_gemm_run(k, &dx));
    /* [N,K] = d pre' x, or [K,N] = x' d pre */
    fsdpi_gemm dw = { .trans_a = true, .M = a->N, .N = a->K, .K = a->M, .alpha = 1.0f,
                      .beta = a->dweight_beta, .a = dpre, .b = a->x, .c = a->dweight, .lda = a->N,
                      .ldb = a->K, .ldc = a->K };
    if (a->in_out) {
        dw.M = a->K, dw.N = a->N, dw.ldc = a->N;
        dw.a = a->x, dw.lda = a->K, dw.b = dpre, dw.ldb = a->N;
    }
    if (a->dweight != NULL) FSDP_TRY(fsdpi_gemm_run(k, &dw));
    return FSDP_OK;
}
