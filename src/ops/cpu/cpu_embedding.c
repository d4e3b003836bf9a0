/* SPDX-License-Identifier: MIT
 *
 * Embedding tables. The backward is cut by columns, so that each piece adds its part of the rows in row
 * order, whichever tokens repeat. */
#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/rows.h"

#include <string.h>

enum { ROWS = 32, COLS = 64, CLEAR = 65536 };

typedef struct forward_run {
    fsdpi_embedding_args a;
    const fsdpi_pointwise_rows *rows;
} forward_run;

static void forward_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const forward_run *r = arg;
    const fsdpi_embedding_args *a = &r->a;
    for (int64_t m = i * ROWS, end = fsdpi_piece_end(m, ROWS, a->M); m < end; m++) {
        const float *token = a->token + a->ids[m] * a->C;
        float *out = a->out + m * a->C;
        if (a->position != NULL)
            r->rows->add(a->C, token, a->position + (a->first_position + m % a->T) * a->C, out);
        else
            memcpy(out, token, (size_t)a->C * sizeof(*out));
    }
}

fsdp_status fsdpi_cpu_embedding(const fsdp_kernel *k, const void *args)
{
    forward_run r = { .a = *(const fsdpi_embedding_args *)args, .rows = fsdpi_pointwise_rows_get(k->isa) };
    fsdpi_embedding_args *a = &r.a;
    HOST(k, a->ids);
    HOST(k, a->token);
    HOST(k, a->position);
    HOST(k, a->out);
    FSDP_TRY(fsdpi_check_ids("token", a->ids, a->M, a->V, false));
    fsdpi_kernel_parallel(k, fsdpi_piece_count(a->M, ROWS), forward_piece, &r);
    return FSDP_OK;
}

/* ---- backward ---- */

typedef struct scale_run {
    const fsdpi_pointwise_rows *rows;
    float *x, beta;
    int64_t numel;
} scale_run;

static void scale_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const scale_run *r = arg;
    int64_t at = i * CLEAR, n = fsdpi_piece_end(at, CLEAR, r->numel) - at;
    if (r->beta == 0.0f)
        memset(r->x + at, 0, (size_t)n * sizeof(float));
    else
        r->rows->axpby(n, r->beta, r->x + at, 0.0f, r->x + at);
}

/* x *= beta, where 0 clears. */
static void scale(const fsdp_kernel *k, float *x, int64_t numel, float beta)
{
    if (beta == 1.0f) return;
    scale_run r = { fsdpi_pointwise_rows_get(k->isa), x, beta, numel };
    fsdpi_kernel_parallel(k, fsdpi_piece_count(numel, CLEAR), scale_piece, &r);
}

typedef struct backward_run {
    fsdpi_embedding_backward_args a;
    const fsdpi_pointwise_rows *rows;
} backward_run;

static void backward_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const backward_run *r = arg;
    const fsdpi_embedding_backward_args *a = &r->a;
    int64_t c = i * COLS, n = fsdpi_piece_end(c, COLS, a->C) - c;
    for (int64_t m = 0; m < a->M; m++) {
        const float *dout = a->dout + m * a->C + c;
        if (a->dtoken != NULL) {
            float *row = a->dtoken + a->ids[m] * a->C + c;
            r->rows->add(n, row, dout, row);
        }
        if (a->dposition != NULL) {
            float *row = a->dposition + (a->first_position + m % a->T) * a->C + c;
            r->rows->add(n, row, dout, row);
        }
    }
}

fsdp_status fsdpi_cpu_embedding_backward(const fsdp_kernel *k, const void *args)
{
    backward_run r = { .a = *(const fsdpi_embedding_backward_args *)args,
                       .rows = fsdpi_pointwise_rows_get(k->isa) };
    fsdpi_embedding_backward_args *a = &r.a;
    HOST(k, a->ids);
    HOST(k, a->dout);
    HOST(k, a->dtoken);
    HOST(k, a->dposition);
    if (a->dtoken != NULL) FSDP_TRY(fsdpi_check_ids("token", a->ids, a->M, a->V, false));
    if (a->dtoken != NULL) scale(k, a->dtoken, a->V * a->C, a->dtoken_beta);
    if (a->dposition != NULL) scale(k, a->dposition, a->positions * a->C, a->dposition_beta);
    if (a->dtoken == NULL && a->dposition == NULL) return FSDP_OK;
    fsdpi_kernel_parallel(k, fsdpi_piece_count(a->C, COLS), backward_piece, &r);
    return FSDP_OK;
}
