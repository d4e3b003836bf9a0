/* SPDX-License-Identifier: MIT
 *
 * A matrix product without a library. The usual blocking (Goto and van de Geijn, "Anatomy of high-performance
 * matrix multiplication", 2008) at its simplest: a block of A and panels of B are copied into the order in
 * which the inner loop, a tile of 6 x 2 registers of results, reads them. An element is summed over k in
 * order, in blocks of DEPTH, so its bits depend on neither the tile nor the cut that it lies in. */
#include "ops/gemm_plain.h"

#include "ops/cpu/lanes.h"

enum { TILE_M = 6, TILE_N = 2 * VEC, DEPTH = 256, BLOCK_M = 10 * TILE_M };

/* [BLOCK_M / TILE_M][DEPTH][TILE_M] */
static void pack_a(const fsdpi_gemm *g, int64_t m0, int64_t m, int64_t k0, int64_t k, float *to)
{
    int64_t row = g->trans_a ? 1 : g->lda, col = g->trans_a ? g->lda : 1;
    const float *a = g->a + m0 * row + k0 * col;
    for (int64_t t = 0; t < m; t += TILE_M)
        for (int64_t p = 0; p < k; p++)
            for (int64_t i = t; i < t + TILE_M; i++) *to++ = i < m ? a[i * row + p * col] : 0.0f;
}

/* [DEPTH][TILE_N] */
static void pack_b(const fsdpi_gemm *g, int64_t n0, int64_t n, int64_t k0, int64_t k, float *to)
{
    int64_t row = g->trans_b ? 1 : g->ldb, col = g->trans_b ? g->ldb : 1;
    const float *b = g->b + k0 * row + n0 * col;
    for (int64_t p = 0; p < k; p++)
        for (int64_t j = 0; j < TILE_N; j++) to[p * TILE_N + j] = j < n ? b[p * row + j * col] : 0.0f;
}

static inline void tile(int64_t k, const float *a, const float *b, float out[TILE_M][TILE_N])
{
    vec left[TILE_M], right[TILE_M];
    for (int i = 0; i < TILE_M; i++) left[i] = right[i] = vec_set(0.0f);
    for (int64_t p = 0; p < k; p++, a += TILE_M, b += TILE_N) {
        vec b0 = vec_load(b), b1 = vec_load(b + VEC);
#pragma GCC unroll 6
        for (int i = 0; i < TILE_M; i++) {
            vec ai = vec_set(a[i]);
            left[i] += ai * b0;
            right[i] += ai * b1;
        }
    }
    for (int i = 0; i < TILE_M; i++) {
        vec_store(out[i], left[i]);
        vec_store(out[i] + VEC, right[i]);
    }
}

/* C's m x n corner at c = beta C + alpha (the tile); beta 0 does not read. */
static void put(float out[TILE_M][TILE_N], int64_t m, int64_t n, float alpha, float beta, float *c,
                int64_t ldc)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            c[i * ldc + j] = beta == 0.0f ? alpha * out[i][j] : beta * c[i * ldc + j] + alpha * out[i][j];
}

static void run(const fsdpi_gemm *g)
{
    float a[BLOCK_M * DEPTH], b[DEPTH * TILE_N], out[TILE_M][TILE_N];
    for (int64_t k0 = 0; k0 < g->K; k0 += DEPTH) {
        int64_t k = g->K - k0 < DEPTH ? g->K - k0 : DEPTH;
        for (int64_t m0 = 0; m0 < g->M; m0 += BLOCK_M) {
            int64_t m = g->M - m0 < BLOCK_M ? g->M - m0 : BLOCK_M;
            pack_a(g, m0, m, k0, k, a);
            for (int64_t n0 = 0; n0 < g->N; n0 += TILE_N) {
                int64_t n = g->N - n0 < TILE_N ? g->N - n0 : TILE_N;
                pack_b(g, n0, n, k0, k, b);
                for (int64_t t = 0; t < m; t += TILE_M) {
                    tile(k, a + t * k, b, out);
                    put(out, m - t < TILE_M ? m - t : TILE_M, n, g->alpha, k0 == 0 ? g->beta : 1.0f,
                        g->c + (m0 + t) * g->ldc + n0, g->ldc);
                }
            }
        }
    }
}

const fsdpi_gemm_plain FSDPI_ISA_NAME(fsdpi_gemm_plain_get) = { .run = run };
