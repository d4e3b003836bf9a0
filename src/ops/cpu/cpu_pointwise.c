/* SPDX-License-Identifier: MIT
 *
 * Elementwise kernels: pieces of a fixed number of elements. */
#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/rows.h"

enum { PIECE = 16384 }; /* 64 KiB an array: a few of them stay in L2, and calls cost nothing */

/* One struct serves the four; what a kernel does not use is zero. */
typedef struct pointwise {
    const fsdpi_pointwise_rows *rows;
    fsdpi_activation act;
    const float *x, *y;
    float *out, alpha, beta;
    int64_t numel;
} pointwise;

static void act_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const pointwise *p = arg;
    int64_t at = i * PIECE, n = fsdpi_piece_end(at, PIECE, p->numel) - at;
    p->rows->act(p->act, n, p->x + at, p->out + at);
}

static void act_backward_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const pointwise *p = arg;
    int64_t at = i * PIECE, n = fsdpi_piece_end(at, PIECE, p->numel) - at;
    p->rows->act_backward(p->act, n, p->x + at, p->y + at, p->beta, p->out + at);
}

static void add_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const pointwise *p = arg;
    int64_t at = i * PIECE, n = fsdpi_piece_end(at, PIECE, p->numel) - at;
    p->rows->add(n, p->x + at, p->y + at, p->out + at);
}

static void axpby_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const pointwise *p = arg;
    int64_t at = i * PIECE, n = fsdpi_piece_end(at, PIECE, p->numel) - at;
    p->rows->axpby(n, p->alpha, p->x + at, p->beta, p->out + at);
}

static void run(const fsdp_kernel *k, pointwise p, void (*piece)(void *, int64_t, int))
{
    p.rows = fsdpi_pointwise_rows_get(k->isa);
    HOST(k, p.x);
    HOST(k, p.y);
    HOST(k, p.out);
    fsdpi_kernel_parallel(k, fsdpi_piece_count(p.numel, PIECE), piece, &p);
}

fsdp_status fsdpi_cpu_activation(const fsdp_kernel *k, const void *args)
{
    const fsdpi_activation_args *a = args;
    run(k, (pointwise){ .act = a->act, .x = a->x, .out = a->out, .numel = a->numel }, act_piece);
    return FSDP_OK;
}

fsdp_status fsdpi_cpu_activation_backward(const fsdp_kernel *k, const void *args)
{
    const fsdpi_activation_args *a = args;
    pointwise p = { .act = a->act, .x = a->x, .y = a->dy, .out = a->out, .beta = a->beta, .numel = a->numel };
    run(k, p, act_backward_piece);
    return FSDP_OK;
}

fsdp_status fsdpi_cpu_add(const fsdp_kernel *k, const void *args)
{
    const fsdpi_add_args *a = args;
    run(k, (pointwise){ .x = a->x, .y = a->y, .out = a->out, .numel = a->numel }, add_piece);
    return FSDP_OK;
}

fsdp_status fsdpi_cpu_axpby(const fsdp_kernel *k, const void *args)
{
    const fsdpi_axpby_args *a = args;
    pointwise p = { .x = a->x, .out = a->out, .alpha = a->alpha, .beta = a->beta, .numel = a->numel };
    run(k, p, axpby_piece);
    return FSDP_OK;
}

/* ---- dropout ---- */

typedef struct dropout_run {
    const fsdp_kernel *k;
    const fsdpi_pointwise_rows *rows;
    fsdpi_dropout_args a;
    fsdpi_drop drop;
    int64_t pieces; /* of a sample */
} dropout_run;

static void dropout_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    enum { GROUP = 1024 };
    const dropout_run *r = arg;
    int64_t b = i / r->pieces, from = i % r->pieces * PIECE;
    int64_t to = fsdpi_piece_end(from, PIECE, r->a.per_sample);
    for (int64_t e = from; e < to; e += GROUP) {
        uint32_t bits[GROUP];
        int64_t n = fsdpi_piece_end(e, GROUP, to) - e, at = b * r->a.per_sample + e;
        fsdpi_drop_bits(r->k, &r->a.dropout, b, e, n, bits);
        r->rows->mask(n, bits, r->drop.threshold, r->drop.factor, r->a.x + at, r->a.beta, r->a.out + at);
    }
}

fsdp_status fsdpi_cpu_dropout(const fsdp_kernel *k, const void *args)
{
    dropout_run r = { .k = k, .a = *(const fsdpi_dropout_args *)args };
    r.rows = fsdpi_pointwise_rows_get(k->isa);
    HOST(k, r.a.x);
    HOST(k, r.a.out);
    if (r.a.dropout.p == 0.0f) {
        int64_t numel = r.a.B * r.a.per_sample;
        pointwise p = { .x = r.a.x, .out = r.a.out, .alpha = 1.0f, .beta = r.a.beta, .numel = numel };
        run(k, p, axpby_piece);
        return FSDP_OK;
    }
    r.drop = fsdpi_drop_of(&r.a.dropout);
    r.pieces = fsdpi_piece_count(r.a.per_sample, PIECE);
    fsdpi_kernel_parallel(k, r.a.B * r.pieces, dropout_piece, &r);
    return FSDP_OK;
}
