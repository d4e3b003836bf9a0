/* SPDX-License-Identifier: MIT */
#include "shard/sum.h"

#include "base/clock.h"
#include "base/convert.h"

#include <string.h>

enum { SUM_PIECE = 1 << 16, WIDEN_PIECE = 1024 };

typedef struct sum_job {
    fsdpi_isa isa;
    const fsdpi_shard_kernels *kernels;
    fsdpi_sum a; /* addresses usable here */
} sum_job;

/* Elements from `at` on of something in dtype; NULL stays NULL. */
static const void *from_element(const void *p, fsdp_dtype dtype, int64_t at)
{
    return p != NULL ? (const char *)p + (size_t)at * fsdp_dtype_bytes(dtype) : NULL;
}

/* n elements of a term as fp32: where they are, or widened. */
static const float *term(const sum_job *j, int k, int64_t at, int64_t n, float *wide)
{
    const void *x = from_element(j->a.x[k], j->a.x_dtype, at);
    if (j->a.x_dtype == FSDP_F32) return x;
    fsdpi_convert_to_f32(j->isa, j->a.x_dtype, wide, x, (size_t)n);
    return wide;
}

/* Terms that are widened, a little at a time, on the way. */
static void sum_narrow_terms(const sum_job *j, int64_t from, int64_t numel)
{
    float wide[FSDPI_SUM_MOST][WIDEN_PIECE];
    const float *x[FSDPI_SUM_MOST];
    for (int64_t at = from; at < from + numel; at += WIDEN_PIECE) {
        int64_t n = from + numel - at < WIDEN_PIECE ? from + numel - at : WIDEN_PIECE;
        for (int k = 0; k < j->a.n; k++) x[k] = term(j, k, at, n, wide[k]);
        j->kernels->sum((float *)j->a.out + at, from_element(j->a.base, FSDP_F32, at), x, j->a.n, (size_t)n, false);
    }
}

/* A sum that is rounded after each term. */
static void sum_rounded(const sum_job *j, int64_t from, int64_t numel)
{
    float sum[WIDEN_PIECE], wide[WIDEN_PIECE];
    for (int64_t at = from; at < from + numel; at += WIDEN_PIECE) {
        size_t n = (size_t)(from + numel - at < WIDEN_PIECE ? from + numel - at : WIDEN_PIECE);
        char *out = (char *)j->a.out + (size_t)at * fsdp_dtype_bytes(j->a.dtype);
        if (j->a.base != NULL) fsdpi_convert_to_f32(j->isa, j->a.dtype, sum, from_element(j->a.base, j->a.dtype, at), n);
        for (int k = 0; k < j->a.n; k++) {
            const float *x = term(j, k, at, (int64_t)n, wide);
            bool first = k == 0 && j->a.base == NULL;
            if (k > 0) fsdpi_convert_to_f32(j->isa, j->a.dtype, sum, out, n);
            j->kernels->sum(sum, first ? NULL : sum, &x, 1, n, false);
            fsdpi_convert_from_f32(j->isa, j->a.dtype, out, sum, n);
        }
    }
}

static void sum_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const sum_job *j = arg;
    int64_t at = i * SUM_PIECE, n = j->a.numel - at < SUM_PIECE ? j->a.numel - at : SUM_PIECE;
    if (j->a.dtype != FSDP_F32) {
        sum_rounded(j, at, n);
        return;
    }
    if (j->a.x_dtype != FSDP_F32) {
        sum_narrow_terms(j, at, n);
        return;
    }
    const float *x[FSDPI_SUM_MOST];
    for (int k = 0; k < j->a.n; k++) x[k] = (const float *)j->a.x[k] + at;
    /* Sums are not read again before the step: large slices need not push out what is in the cache. */
    j->kernels->sum((float *)j->a.out + at, from_element(j->a.base, FSDP_F32, at), x, j->a.n, (size_t)n, j->a.numel >= SUM_PIECE);
}

static fsdp_status k_sum(const fsdp_kernel *k, const void *args)
{
    sum_job j = { .isa = k->isa, .kernels = fsdpi_shard_kernels_get(k->isa), .a = *(const fsdpi_sum *)args };
    int64_t start = fsdpi_now_ns();
    j.a.out = fsdp_kernel_ptr(k, j.a.out);
    j.a.base = fsdp_kernel_ptr(k, j.a.base);
    for (int i = 0; i < j.a.n; i++) j.a.x[i] = fsdp_kernel_ptr(k, j.a.x[i]);
    fsdpi_kernel_parallel(k, (j.a.numel + SUM_PIECE - 1) / SUM_PIECE, sum_piece, &j);
    __atomic_fetch_add(&j.a.comm->stats.reduce_ns, (uint64_t)(fsdpi_now_ns() - start), __ATOMIC_RELAXED);
    return FSDP_OK;
}

fsdp_status fsdpi_sum_launch(fsdp_stream *s, const fsdpi_sum *sum)
{
    return fsdp_stream_launch(s, k_sum, sum, sizeof(*sum));
}
