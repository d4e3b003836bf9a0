/* SPDX-License-Identifier: MIT
 *
 * Transposition in tiles of 4 x 4, which are four registers of any instruction set. */
#include "ops/cpu/rows.h"

#include <string.h>

enum { TILE = 4, BAND = 16 };
typedef float quad __attribute__((vector_size(TILE * sizeof(float))));

static inline quad load(const float *p)
{
    quad v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void store(float *p, quad v, float beta)
{
    if (beta != 0.0f) v = beta * load(p) + v;
    memcpy(p, &v, sizeof(v));
}

static inline void tile(const float *x, int64_t ldx, float beta, float *out, int64_t ldo)
{
    quad a = load(x), b = load(x + ldx), c = load(x + 2 * ldx), d = load(x + 3 * ldx);
    quad ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    quad cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    store(out, __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5), beta);
    store(out + ldo, __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7), beta);
    store(out + 2 * ldo, __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5), beta);
    store(out + 3 * ldo, __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7), beta);
}

static inline void corner(int64_t rows, int64_t cols, const float *x, int64_t ldx, float beta, float *out,
                          int64_t ldo)
{
    for (int64_t c = 0; c < cols; c++)
        for (int64_t r = 0; r < rows; r++) {
            float v = x[r * ldx + c], *o = &out[c * ldo + r];
            *o = beta == 0.0f ? v : beta * *o + v;
        }
}

/* Bands of 16 rows, so that a cache line of out is filled before the next one is begun. */
static inline void whole(int64_t rows, int64_t cols, const float *x, int64_t ldx, float beta, float *out,
                         int64_t ldo)
{
    int64_t r = 0, c = 0;
    for (; r + BAND <= rows; r += BAND)
        for (c = 0; c + TILE <= cols; c += TILE)
            for (int64_t i = r; i < r + BAND; i += TILE)
                tile(x + i * ldx + c, ldx, beta, out + c * ldo + i, ldo);
    if (r > 0) corner(r, cols - c, x + c, ldx, beta, out + c * ldo, ldo);
    corner(rows - r, cols, x + r * ldx, ldx, beta, out + r, ldo);
}

static void transpose(int64_t rows, int64_t cols, const float *x, int64_t ldx, float beta, float *out,
                      int64_t ldo)
{
    if (beta == 0.0f)
        whole(rows, cols, x, ldx, 0.0f, out, ldo);
    else
        whole(rows, cols, x, ldx, beta, out, ldo);
}

const fsdpi_transpose_rows FSDPI_ISA_NAME(fsdpi_transpose_rows_get) = { .transpose = transpose };
