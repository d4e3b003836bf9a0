/* SPDX-License-Identifier: MIT
 *
 * Softmax cross-entropy of rows, and of rows of logits that are made a chunk at a time. A row's loss is
 * ln sum e^x - x[label]; its gradient (softmax(x) - onehot(label)) times the seed. */
#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/ln.h"
#include "ops/cpu/rows.h"
#include "ops/gemm.h"

enum { PIECE = 16384 };

/* Rows of one piece: by the shape alone. */
static int64_t rows_per_piece(int64_t V)
{
    return V >= PIECE ? 1 : PIECE / (V > 0 ? V : 1);
}

/* M rows of logits. dlogits (may be NULL) may be logits where beta is 0. */
typedef struct loss_run {
    const fsdpi_softmax_rows *rows;
    const fsdpi_pointwise_rows *pointwise;
    const float *logits;
    const int32_t *labels;
    float *dlogits, seed, beta;
    double *losses;   /* [M] */
    int64_t M, V, ld; /* ld: between rows */
} loss_run;

static void ignored_row(const loss_run *r, float *d)
{
    if (d == NULL) return;
    for (int64_t j = 0; j < r->V; j++) d[j] = r->beta == 0.0f ? 0.0f : r->beta * d[j];
}

static void one_row(const loss_run *r, int64_t m)
{
    const int64_t V = r->V, label = r->labels[m];
    const float *x = r->logits + m * r->ld;
    float *d = r->dlogits != NULL ? r->dlogits + m * r->ld : NULL;
    r->losses[m] = 0.0;
    if (label == FSDPI_IGNORED_LABEL) {
        ignored_row(r, d);
        return;
    }
    double target = (double)x[label]; /* before d overwrites it */
    float max = r->rows->max(V, x);
    float *e = r->beta == 0.0f ? d : NULL; /* kept where that may be overwritten; the bits are the same */
    double sum = r->rows->exp_sum(V, x, max, e);
    r->losses[m] = (double)max + fsdpi_ln(sum) - target;
    if (d == NULL) return;
    float factor = (float)((double)r->seed / sum);
    if (e != NULL)
        r->pointwise->axpby(V, factor, e, 0.0f, d);
    else
        r->rows->exp_scale(V, x, max, factor, r->beta, d);
    d[label] -= r->seed;
}

static void loss_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const loss_run *r = arg;
    int64_t each = rows_per_piece(r->V);
    for (int64_t m = i * each, end = fsdpi_piece_end(m, each, r->M); m < end; m++) one_row(r, m);
}

static void run_rows(const fsdp_kernel *k, loss_run *r)
{
    r->rows = fsdpi_softmax_rows_get(k->isa);
    r->pointwise = fsdpi_pointwise_rows_get(k->isa);
    fsdpi_kernel_parallel(k, fsdpi_piece_count(r->M, rows_per_piece(r->V)), loss_piece, r);
}

static void add_up(const double *losses, const int32_t *labels, int64_t M, fsdpi_loss *loss)
{
    if (loss == NULL) return;
    fsdpi_loss total = { 0 };
    for (int64_t m = 0; m < M; m++) {
        if (labels[m] == FSDPI_IGNORED_LABEL) continue;
        total.sum += losses[m];
        total.count += 1.0;
    }
    *loss = total;
}

size_t fsdpi_cross_entropy_scratch(const fsdpi_cross_entropy_args *a, int threads)
{
    (void)threads;
    return (size_t)a->M * sizeof(double);
}

fsdp_status fsdpi_cpu_cross_entropy(const fsdp_kernel *k, const void *args)
{
    const fsdpi_cross_entropy_args *a = args;
    loss_run r = { .logits = fsdp_kernel_ptr(k, a->logits), .labels = fsdp_kernel_ptr(k, a->labels),
                   .dlogits = fsdp_kernel_ptr(k, a->dlogits), .beta = a->beta, .M = a->M, .V = a->V,
                   .ld = a->V, .losses = fsdp_kernel_ptr(k, a->scratch) };
    const float *seed = fsdp_kernel_ptr(k, a->seed);
    if (r.dlogits != NULL) r.seed = *seed;
    FSDP_TRY(fsdpi_check_ids("label", r.labels, r.M, r.V, true));
    run_rows(k, &r);
    add_up(r.losses, r.labels, r.M, fsdp_kernel_ptr(k, a->loss));
    return FSDP_OK;
}

/* ---- logits in chunks ---- */

/* 256 rows: fewer cost the library speed (64 rows 20 %), more are memory without gain; small vocabularies may
 * have more, up to 16 MiB of logits. */
static int64_t chunk_rows(int64_t M, int64_t V)
{
    const int64_t least = 256, budget = ((int64_t)16 << 20) / (int64_t)sizeof(float);
    int64_t rows = budget / (V > 0 ? V : 1) / least * least;
    if (rows < least) rows = least;
    return rows < M ? rows : M;
}

/* Rows of logits begin on cache lines, whatever V is. */
static int64_t padded(int64_t V)
{
    return (int64_t)fsdpi_round_up((size_t)V, 16);
}

static size_t losses_bytes(int64_t M)
{
    return fsdpi_round_up((size_t)M * sizeof(double), 64);
}

size_t fsdpi_linear_cross_entropy_scratch(const fsdpi_linear_cross_entropy_args *a, int threads)
{
    (void)threads;
    return losses_bytes(a->M) + (size_t)(chunk_rows(a->M, a->V) * padded(a->V)) * sizeof(float);
}

/* Rows [m, m + rows): logits, losses, and what they give to dx and dweight. */
static fsdp_status one_chunk(const fsdp_kernel *k, const fsdpi_linear_cross_entropy_args *a, loss_run *r,
                             float *logits, int64_t m, int64_t rows)
{
    const int64_t V = a->V, K = a->K, ld = r->ld;
    const float *x = a->x + m * K;
    FSDP_TRY(fsdpi_gemm_run(k, &(fsdpi_gemm){ .trans_b = true, .M = rows, .N = V, .K = K, .alpha = 1.0f,
                                              .a = x, .lda = K, .b = a->weight, .ldb = K, .c = logits,
                                              .ldc = ld }));
    loss_run chunk = *r;
    chunk.labels += m;
    chunk.losses += m;
    chunk.M = rows;
    run_rows(k, &chunk);
    if (a->dx != NULL)
        FSDP_TRY(fsdpi_gemm_run(k, &(fsdpi_gemm){ .M = rows, .N = K, .K = V, .alpha = 1.0f,
                                                  .beta = a->dx_beta, .a = logits, .lda = ld, .b = a->weight,
                                                  .ldb = K, .c = a->dx + m * K, .ldc = K }));
    if (a->dweight != NULL)
        FSDP_TRY(fsdpi_gemm_run(k, &(fsdpi_gemm){ .trans_a = true, .M = V, .N = K, .K = rows, .alpha = 1.0f,
                                                  .beta = m == 0 ? a->dweight_beta : 1.0f, .a = logits,
                                                  .lda = ld, .b = x, .ldb = K, .c = a->dweight, .ldc = K }));
    return FSDP_OK;
}

fsdp_status fsdpi_cpu_linear_cross_entropy(const fsdp_kernel *k, const void *args)
{
    fsdpi_linear_cross_entropy_args a = *(const fsdpi_linear_cross_entropy_args *)args;
    HOST(k, a.x);
    HOST(k, a.weight);
    HOST(k, a.labels);
    HOST(k, a.loss);
    HOST(k, a.seed);
    HOST(k, a.dx);
    HOST(k, a.dweight);
    HOST(k, a.scratch);
    FSDP_TRY(fsdpi_check_ids("label", a.labels, a.M, a.V, true));
    float *logits = (float *)(void *)((char *)a.scratch + losses_bytes(a.M));
    loss_run r = { .logits = logits, .labels = a.labels, .losses = a.scratch, .V = a.V, .ld = padded(a.V) };
    if (a.dx != NULL || a.dweight != NULL) {
        r.dlogits = logits;
        r.seed = *a.seed;
    }
    int64_t each = chunk_rows(a.M, a.V);
    for (int64_t m = 0; m < a.M; m += each)
        FSDP_TRY(one_chunk(k, &a, &r, logits, m, fsdpi_piece_end(m, each, a.M) - m));
    if (a.M == 0 && a.dweight != NULL) /* no rows: beta alone */
        FSDP_TRY(fsdpi_gemm_run(k, &(fsdpi_gemm){ .M = a.V, .N = a.K, .K = 0, .beta = a.dweight_beta,
                                                  .c = a.dweight, .ldc = a.K }));
    add_up(r.losses, a.labels, a.M, a.loss);
    return FSDP_OK;
}
