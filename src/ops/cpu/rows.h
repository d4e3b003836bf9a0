/* SPDX-License-Identifier: MIT
 *
 * What the CPU's kernels do to a row of numbers: the functions that are compiled for each instruction set. A
 * kernel (cpu_*.c) translates addresses, cuts the work into pieces, and calls these. `out` may be an input
 * itself where nothing else is said. `beta`: out = beta * out + ..., and 0 does not read out. */
#ifndef FSDPI_OPS_CPU_ROWS_H
#define FSDPI_OPS_CPU_ROWS_H

#include "ops/kernels.h"

/* pointwise_isa.c */
typedef struct fsdpi_pointwise_rows {
    void (*act)(fsdpi_activation act, int64_t n, const float *x, float *y);
    /* v = x + bias, pre = v, y = act(v); bias and pre may be NULL. */
    void (*bias_act)(fsdpi_activation act, int64_t n, const float *x, const float *bias, float *pre,
                     float *y);
    /* dx = beta dx + dy act'(x) */
    void (*act_backward)(fsdpi_activation act, int64_t n, const float *x, const float *dy, float beta,
                         float *dx);
    /* The same over rows that are n apart, beta 0; sum (may be NULL) becomes the sum of the rows of dx. */
    void (*act_backward_sum)(fsdpi_activation act, int64_t rows, int64_t n, const float *x, const float *dy,
                             float *dx, float *sum);
    /* sum = the sum of rows of x, in order. */
    void (*sum_rows)(int64_t rows, int64_t n, const float *x, int64_t ld, float *sum);
    void (*add)(int64_t n, const float *x, const float *y, float *out);
    void (*axpby)(int64_t n, float alpha, const float *x, float beta, float *out);
    /* out = beta out + x (bits[i] >= threshold ? factor : 0) */
    void (*mask)(int64_t n, const uint32_t *bits, uint32_t threshold, float factor, const float *x,
                 float beta, float *out);
} fsdpi_pointwise_rows;
FSDPI_ISA_TABLE(fsdpi_pointwise_rows, fsdpi_pointwise_rows_get)

/* norm_isa.c; argument structs as launched, addresses translated. */
typedef struct fsdpi_norm_rows {
    void (*forward)(const fsdpi_layer_norm_args *a, int64_t from, int64_t to);
    /* dweight and dbias [C]: the sums of these rows (both or none). */
    void (*backward)(const fsdpi_layer_norm_backward_args *a, int64_t from, int64_t to, float *dweight,
                     float *dbias);
} fsdpi_norm_rows;
FSDPI_ISA_TABLE(fsdpi_norm_rows, fsdpi_norm_rows_get)

/* Up to FSDPI_SCORE_ROWS rows of attention scores, ld apart, of which row i sees its first seen + i * step
 * columns of `cols`. ld is a multiple of 16 and at least cols; what lies past a row's columns may be
 * overwritten. */
enum { FSDPI_SCORE_ROWS = 8 };
typedef struct fsdpi_score_rows {
    int64_t rows, cols, seen, step, ld;
    float *s, *dp;        /* dp: backward only */
    const uint32_t *bits; /* random bits for dropout, ld apart; NULL: none */
    uint32_t threshold;   /* a probability is multiplied by z = bits >= threshold ? factor : 0 */
    float factor;
} fsdpi_score_rows;

/* softmax_isa.c */
typedef struct fsdpi_softmax_rows {
    float (*max)(int64_t n, const float *x);
    /* Returns the sum of e^(x - max); e (may be NULL) becomes the terms. */
    double (*exp_sum)(int64_t n, const float *x, float max, float *e);
    /* out = beta out + factor e^(x - max) */
    void (*exp_scale)(int64_t n, const float *x, float max, float factor, float beta, float *out);

    /* s = z e^(s - max), 0 in columns that are not seen; sum[i] is that of the row without z. */
    void (*attention)(const fsdpi_score_rows *r, float *max, float *sum);
    /* p = e^(s - lse): s = z p and dp = p (z dp - delta), 0 in columns that are not seen. */
    void (*attention_backward)(const fsdpi_score_rows *r, const float *lse, const float *delta);
    float (*dot)(int64_t n, const float *x, const float *y);
    /* One query against n keys and values, ld apart: out = softmax(scale q k') v, all of width D. */
    void (*attend)(int64_t n, int64_t D, float scale, const float *q, const float *k, const float *v,
                   int64_t ld, float *out);
} fsdpi_softmax_rows;
FSDPI_ISA_TABLE(fsdpi_softmax_rows, fsdpi_softmax_rows_get)

/* transpose_isa.c: out [cols, rows] = beta out + x', x [rows, cols]. */
typedef struct fsdpi_transpose_rows {
    void (*transpose)(int64_t rows, int64_t cols, const float *x, int64_t ldx, float beta, float *out,
                      int64_t ldo);
} fsdpi_transpose_rows;
FSDPI_ISA_TABLE(fsdpi_transpose_rows, fsdpi_transpose_rows_get)

#endif
