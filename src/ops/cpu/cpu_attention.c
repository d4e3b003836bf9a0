/* SPDX-License-Identifier: MIT
 *
 * Self-attention, a head of a sample at a time, on the matrix library. Rows (queries) are taken in blocks of
 * ROWS, and a block's scores [ROWS, T] are the only T-sized thing that is held; where causal, the columns
 * past the block are not computed. (Dao et al., "FlashAttention", 2022, has the recomputation from the
 * log-sum-exp; columns are not blocked here, since a row fits in cache.)
 *
 * With k' [D,T] transposed once a head, every product has its operands as the library likes them best, and is
 * as fast with 64 rows as with 256; so blocks can be small, which wastes little at the diagonal.
 *
 * Backward, for a head (P the probabilities, Z the dropout mask, dO = dout; * elementwise):
 *   dV = (P * Z)' dO,   dP = (dO V') * Z,   delta = rowsum(dO * O),   dS = P * (dP - delta),
 *   dQ = scale dS K,    dK = scale dS' Q;   dK and dV are gathered transposed, [D,T]. */
#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/ln.h"
#include "ops/cpu/rows.h"
#include "ops/gemm.h"

enum { ROWS = 64 };

typedef struct attention_run {
    const fsdp_kernel *k;
    const fsdpi_softmax_rows *rows;
    const fsdpi_pointwise_rows *pointwise;
    const fsdpi_transpose_rows *transpose;
    fsdpi_gemm_kind kind;
    fsdpi_attention_args f;
    const float *dout; /* backward only, as is what follows */
    float *dqkv, beta;
    float *scratch;
    size_t scratch_numel; /* a worker's */
    fsdpi_drop drop;
    fsdpi_pieces pieces;
} attention_run;

/* Elements between the rows of what is [., T] in scratch: with a multiple of 256 bytes, columns of such an
 * array would share a few sets of the first cache. */
static int64_t stride(int64_t T)
{
    int64_t ld = (int64_t)fsdpi_round_up((size_t)T, 16);
    return ld % 64 == 0 ? ld + 16 : ld;
}

/* What a worker computes a head in. */
typedef struct head {
    int64_t b, h, C;         /* C = H D */
    int64_t ld, ldt;         /* between rows of qkv: 3 C; of what is [., T] below */
    const float *q, *k, *v;  /* [T,D] in qkv */
    const float *out;        /* [T,D], C apart */
    float *lse;              /* [T] */
    float *kt, *vt, *packed; /* [D,T], [D,T], [T,D] */
    float *dkt, *dvt;        /* [D,T] */
    float *s, *dp;           /* [ROWS,T] */
    uint32_t *bits;          /* [FSDPI_SCORE_ROWS,T] */
} head;

static size_t padded(int64_t n)
{
    return fsdpi_round_up((size_t)n, 16);
}

static size_t forward_numel(const fsdpi_attention_args *a)
{
    return (size_t)((a->D + ROWS + FSDPI_SCORE_ROWS) * stride(a->T)) + padded(a->D * a->T);
}

static size_t backward_numel(const fsdpi_attention_args *a)
{
    return (size_t)((4 * a->D + 2 * ROWS + FSDPI_SCORE_ROWS) * stride(a->T)) + padded(a->D * a->T);
}

size_t fsdpi_attention_scratch(const fsdpi_attention_args *a, int threads)
{
    return (size_t)threads * forward_numel(a) * sizeof(float);
}

size_t fsdpi_attention_backward_scratch(const fsdpi_attention_backward_args *a, int threads)
{
    return (size_t)threads * backward_numel(&a->f) * sizeof(float);
}

static float *take(float **at, int64_t numel)
{
    float *p = *at;
    *at += padded(numel);
    return p;
}

static head head_of(const attention_run *r, int64_t i, int worker)
{
    const fsdpi_attention_args *f = &r->f;
    const int64_t T = f->T, D = f->D;
    head e = { .b = i / f->H, .h = i % f->H, .C = f->H * D, .ld = 3 * f->H * D, .ldt = stride(T) };
    e.q = f->qkv + e.b * T * e.ld + e.h * D;
    e.k = e.q + e.C;
    e.v = e.k + e.C;
    e.out = f->out + e.b * T * e.C + e.h * D;
    e.lse = f->lse + i * T;
    float *at = r->scratch + (size_t)worker * r->scratch_numel;
    e.kt = take(&at, D * e.ldt);
    e.packed = take(&at, T * D);
    e.s = take(&at, ROWS * e.ldt);
    e.bits = (uint32_t *)(void *)take(&at, FSDPI_SCORE_ROWS * e.ldt);
    if (r->dout == NULL) return e;
    e.vt = take(&at, D * e.ldt);
    e.dkt = take(&at, D * e.ldt);
    e.dvt = take(&at, D * e.ldt);
    e.dp = take(&at, ROWS * e.ldt);
    return e;
}

static void pack(const attention_run *r, const float *x, int64_t ld, float *to)
{
    for (int64_t t = 0; t < r->f.T; t++) memcpy(to + t * r->f.D, x + t * ld, (size_t)r->f.D * sizeof(*x));
}

/* How many columns the rows before `to` see. */
static int64_t columns(const fsdpi_attention_args *f, int64_t to)
{
    return f->causal ? to : f->T;
}

/* Scores s (and dp) of rows t .. t + rows of a block that begins at `from`, with the dropout's bits drawn. */
static fsdpi_score_rows score_rows(const attention_run *r, const head *e, int64_t from, int64_t t,
                                   int64_t rows, int64_t cols)
{
    const fsdpi_attention_args *f = &r->f;
    fsdpi_score_rows g = { .rows = rows, .cols = cols, .seen = columns(f, t + 1), .step = f->causal,
                           .ld = e->ldt, .s = e->s + (t - from) * e->ldt, .threshold = r->drop.threshold,
                           .factor = r->drop.factor };
    if (r->dout != NULL) g.dp = e->dp + (t - from) * e->ldt;
    if (f->dropout.p == 0.0f) return g;
    g.bits = e->bits;
    for (int64_t i = 0; i < rows; i++)
        fsdpi_drop_bits(r->k, &f->dropout, e->b, (e->h * f->T + t + i) * f->T, columns(f, t + i + 1),
                        e->bits + i * e->ldt);
    return g;
}

static fsdp_status forward_rows(const attention_run *r, const head *e, int64_t from, int64_t to)
{
    const fsdpi_attention_args *f = &r->f;
    const int64_t D = f->D, n = to - from, cols = columns(f, to);
    float *out = f->out + (e->b * f->T + from) * e->C + e->h * D, max[ROWS], sum[ROWS];
    FSDP_TRY(fsdpi_gemm_call(r->kind, &(fsdpi_gemm){ .M = n, .N = cols, .K = D, .alpha = f->scale,
                                                     .a = e->q + from * e->ld, .lda = e->ld, .b = e->kt,
                                                     .ldb = e->ldt, .c = e->s, .ldc = e->ldt }));
    for (int64_t t = from; t < to; t += FSDPI_SCORE_ROWS) {
        fsdpi_score_rows g = score_rows(r, e, from, t, fsdpi_piece_end(t, FSDPI_SCORE_ROWS, to) - t, cols);
        r->rows->attention(&g, max + (t - from), sum + (t - from));
    }
    FSDP_TRY(fsdpi_gemm_call(r->kind, &(fsdpi_gemm){ .M = n, .N = D, .K = cols, .alpha = 1.0f, .a = e->s,
                                                     .lda = e->ldt, .b = e->packed, .ldb = D, .c = out,
                                                     .ldc = e->C }));
    for (int64_t t = 0; t < n; t++) { /* the division here rather than of the scores: D columns, not T */
        r->pointwise->axpby(D, 1.0f / sum[t], out + t * e->C, 0.0f, out + t * e->C);
        e->lse[from + t] = (float)((double)max[t] + fsdpi_ln((double)sum[t]));
    }
    return FSDP_OK;
}

static fsdp_status forward_head(const attention_run *r, const head *e)
{
    const int64_t T = r->f.T, D = r->f.D;
    r->transpose->transpose(T, D, e->k, e->ld, 0.0f, e->kt, e->ldt);
    pack(r, e->v, e->ld, e->packed);
    for (int64_t t = 0; t < T; t += ROWS) FSDP_TRY(forward_rows(r, e, t, fsdpi_piece_end(t, ROWS, T)));
    return FSDP_OK;
}

static void forward_piece(void *arg, int64_t i, int worker)
{
    attention_run *r = arg;
    head e = head_of(r, i, worker);
    if (forward_head(r, &e) != FSDP_OK) fsdpi_pieces_fail(&r->pieces);
}

static void prepare(attention_run *r, const fsdp_kernel *k, const fsdpi_attention_args *f)
{
    r->k = k;
    r->rows = fsdpi_softmax_rows_get(k->isa);
    r->pointwise = fsdpi_pointwise_rows_get(k->isa);
    r->transpose = fsdpi_transpose_rows_get(k->isa);
    r->kind = fsdpi_gemm_get_info()->kind;
    r->f = *f;
    r->drop = fsdpi_drop_of(&f->dropout);
    HOST(k, r->f.qkv);
    HOST(k, r->f.out);
    HOST(k, r->f.lse);
}

fsdp_status fsdpi_cpu_attention(const fsdp_kernel *k, const void *args)
{
    const fsdpi_attention_args *f = args;
    attention_run r = { .scratch_numel = forward_numel(f) };
    prepare(&r, k, f);
    r.scratch = fsdp_kernel_ptr(k, f->scratch);
    fsdpi_kernel_parallel(k, f->T > 0 ? f->B * f->H : 0, forward_piece, &r);
    FSDP_TRY(fsdpi_pieces_status(&r.pieces));
    return FSDP_OK;
}

/* ---- backward ---- */

static fsdp_status backward_rows(const attention_run *r, const head *e, int64_t from, int64_t to)
{
    const fsdpi_attention_args *f = &r->f;
    const int64_t D = f->D, n = to - from, cols = columns(f, to), C = e->C, ld = e->ld;
    const int64_t first = e->b * f->T + from;
    const float *q = e->q + from * ld, *dout = r->dout + first * C + e->h * D;
    const float gather = to == f->T ? 0.0f : 1.0f; /* the last block comes first: it covers all columns */
    FSDP_TRY(fsdpi_gemm_call(r->kind, &(fsdpi_gemm){ .M = n, .N = cols, .K = D, .alpha = f->scale, .a = q,
                                                     .lda = ld, .b = e->kt, .ldb = e->ldt, .c = e->s,
                                                     .ldc = e->ldt }));
    FSDP_TRY(fsdpi_gemm_call(r->kind, &(fsdpi_gemm){ .M = n, .N = cols, .K = D, .alpha = 1.0f, .a = dout,
                                                     .lda = C, .b = e->vt, .ldb = e->ldt, .c = e->dp,
                                                     .ldc = e->ldt }));
    float delta[ROWS];
    for (int64_t t = 0; t < n; t++) delta[t] = r->rows->dot(D, dout + t * C, e->out + (from + t) * C);
    for (int64_t t = from; t < to; t += FSDPI_SCORE_ROWS) {
        fsdpi_score_rows g = score_rows(r, e, from, t, fsdpi_piece_end(t, FSDPI_SCORE_ROWS, to) - t, cols);
        r->rows->attention_backward(&g, e->lse + t, delta + (t - from));
    }
    float *dq = r->dqkv + first * ld + e->h * D;
    FSDP_TRY(fsdpi_gemm_call(r->kind, &(fsdpi_gemm){ .M = n, .N = D, .K = cols, .alpha = f->scale,
                                                     .beta = r->beta, .a = e->dp, .lda = e->ldt,
                                                     .b = e->packed, .ldb = D, .c = dq, .ldc = ld }));
    FSDP_TRY(fsdpi_gemm_call(r->kind, &(fsdpi_gemm){ .trans_a = true, .M = D, .N = cols, .K = n,
                                                     .alpha = f->scale, .beta = gather, .a = q, .lda = ld,
                                                     .b = e->dp, .ldb = e->ldt, .c = e->dkt,
                                                     .ldc = e->ldt }));
    FSDP_TRY(fsdpi_gemm_call(r->kind, &(fsdpi_gemm){ .trans_a = true, .M = D, .N = cols, .K = n,
                                                     .alpha = 1.0f, .beta = gather, .a = dout, .lda = C,
                                                     .b = e->s, .ldb = e->ldt, .c = e->dvt, .ldc = e->ldt }));
    return FSDP_OK;
}

static fsdp_status backward_head(const attention_run *r, const head *e)
{
    const int64_t T = r->f.T, D = r->f.D;
    r->transpose->transpose(T, D, e->k, e->ld, 0.0f, e->kt, e->ldt);
    r->transpose->transpose(T, D, e->v, e->ld, 0.0f, e->vt, e->ldt);
    pack(r, e->k, e->ld, e->packed);
    for (int64_t t = (T - 1) / ROWS * ROWS; t >= 0; t -= ROWS)
        FSDP_TRY(backward_rows(r, e, t, fsdpi_piece_end(t, ROWS, T)));
    float *dk = r->dqkv + e->b * T * e->ld + e->C + e->h * D;
    r->transpose->transpose(D, T, e->dkt, e->ldt, r->beta, dk, e->ld);
    r->transpose->transpose(D, T, e->dvt, e->ldt, r->beta, dk + e->C, e->ld);
    return FSDP_OK;
}

static void backward_piece(void *arg, int64_t i, int worker)
{
    attention_run *r = arg;
    head e = head_of(r, i, worker);
    if (backward_head(r, &e) != FSDP_OK) fsdpi_pieces_fail(&r->pieces);
}

fsdp_status fsdpi_cpu_attention_backward(const fsdp_kernel *k, const void *args)
{
    const fsdpi_attention_backward_args *a = args;
    attention_run r = { .scratch_numel = backward_numel(&a->f), .beta = a->beta };
    prepare(&r, k, &a->f);
    r.dout = fsdp_kernel_ptr(k, a->dout);
    r.dqkv = fsdp_kernel_ptr(k, a->dqkv);
    r.scratch = fsdp_kernel_ptr(k, a->scratch);
    fsdpi_kernel_parallel(k, a->f.T > 0 ? a->f.B * a->f.H : 0, backward_piece, &r);
    FSDP_TRY(fsdpi_pieces_status(&r.pieces));
    return FSDP_OK;
}

/* ---- one position ---- */

typedef struct step_run {
    fsdpi_attention_step_args a;
    const fsdpi_softmax_rows *rows;
} step_run;

static void step_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const step_run *r = arg;
    const fsdpi_attention_step_args *a = &r->a;
    const int64_t b = i / a->H, h = i % a->H, C = a->H * a->D;
    const float *q = a->qkv + b * 3 * C + h * a->D;
    float *k = a->cache_k + b * a->T * C + h * a->D, *v = a->cache_v + b * a->T * C + h * a->D;
    memcpy(k + a->pos * C, q + C, (size_t)a->D * sizeof(*k));
    memcpy(v + a->pos * C, q + 2 * C, (size_t)a->D * sizeof(*v));
    r->rows->attend(a->pos + 1, a->D, a->scale, q, k, v, C, a->out + b * C + h * a->D);
}

fsdp_status fsdpi_cpu_attention_step(const fsdp_kernel *k, const void *args)
{
    step_run r = { .a = *(const fsdpi_attention_step_args *)args, .rows = fsdpi_softmax_rows_get(k->isa) };
    HOST(k, r.a.qkv);
    HOST(k, r.a.cache_k);
    HOST(k, r.a.cache_v);
    HOST(k, r.a.out);
    FSDP_FAIL_IF(r.a.pos < 0 || r.a.pos >= r.a.T, FSDP_ERR_INVALID,
                 "position %lld is not in the cache of %lld", (long long)r.a.pos, (long long)r.a.T);
    fsdpi_kernel_parallel(k, r.a.B * r.a.H, step_piece, &r);
    return FSDP_OK;
}
