/* SPDX-License-Identifier: MIT
 *
 * Matrix products: one interface over a kernel library that is found at run time. Products are cut by the shape of
 * the result, and each piece is computed by one thread, so that threads change no bits. */
#ifndef FSDPI_OPS_GEMM_H
#define FSDPI_OPS_GEMM_H

#include "device/device.h"

typedef enum fsdpi_gemm_kind { FSDPI_GEMM_ONEDNN, FSDPI_GEMM_CBLAS, FSDPI_GEMM_REFERENCE, FSDPI_GEMM_KINDS } fsdpi_gemm_kind;

typedef struct fsdpi_gemm_info {
    fsdpi_gemm_kind kind;
    const char *name;    /* "onednn", "cblas", "reference" */
    char version[64];    /* "3.2.0"; of OpenBLAS also its core: "0.3.34 SkylakeX" */
    char path[512];      /* the file that was loaded */
} fsdpi_gemm_info;

/* The library in use. It is looked for once a process, at the first call: the one that FSDP_GEMM names, or oneDNN,
 * then CBLAS, then the reference (correct, slow). Never fails: the reference is always there. */
const fsdpi_gemm_info *fsdpi_gemm_get_info(void);
/* Whether this kind can be had here; for tests. */
bool fsdpi_gemm_available(fsdpi_gemm_kind kind);

/* C = beta C + alpha op(A) op(B), row-major; op(A) is [M,K], op(B) is [K,N], C is [M,N]; ld = elements between rows as
 * stored. beta = 0 does not read C. Host (translated) addresses; runs on k's threads, or on the caller alone where k
 * is NULL. K = 0 gives beta C. */
typedef struct fsdpi_gemm {
    bool trans_a, trans_b;
    int64_t M, N, K;
    float alpha, beta;
    const float *a, *b;
    float *c;
    int64_t lda, ldb, ldc;
} fsdpi_gemm;
fsdp_status fsdpi_gemm_run(const fsdp_kernel *k, const fsdpi_gemm *g);

/* Copies operands, on k's threads, where oneDNN is much faster with the copy, and points g at it. It walks down the columns of a B that
 * is not transposed: rows that lie a multiple of 2 KiB apart fall into a few sets of the first cache (a product takes up to twice as
 * long), so they are put elsewhere. And where it has an A that is transposed, small pieces are a sixth slower than with one that is
 * not: so it is transposed here. *copy: to be freed by the caller after the product (fsdpi_free); NULL where g is as it was. By shape
 * alone. fsdpi_gemm_run does it by itself; for kernels that cut by themselves. */
fsdp_status fsdpi_gemm_spread(const fsdp_kernel *k, fsdpi_gemm *g, float **copy);

/* How a result of M x N is cut into pieces for threads: a function of the shape alone. */
typedef struct fsdpi_gemm_cut {
    int64_t rows, cols;             /* of a piece; the last ones are smaller */
    int64_t row_pieces, col_pieces; /* piece i is row piece i / col_pieces, column piece i % col_pieces */
} fsdpi_gemm_cut;
fsdpi_gemm_cut fsdpi_gemm_cut_of(int64_t M, int64_t N);
/* Piece i of g. */
fsdpi_gemm fsdpi_gemm_piece(const fsdpi_gemm *g, const fsdpi_gemm_cut *cut, int64_t i);

/* One thread, one call of the library; for kernels that are parallel themselves. `kind` as found, or for tests. */
fsdp_status fsdpi_gemm_call(fsdpi_gemm_kind kind, const fsdpi_gemm *g);

#endif
