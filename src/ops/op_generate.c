/* SPDX-License-Identifier: MIT
 *
 * What only generation needs: attention that keeps keys and values, and the last position. No backward. */
#include "ops/ops.h"

#include <math.h>
#include <string.h>

/* Rows of `bytes` bytes from one array to another, `from_stride` and `to_stride` bytes apart. */
typedef struct rows_args {
    char *to;
    const char *from;
    size_t to_stride, from_stride, bytes;
    int64_t rows;
} rows_args;

static fsdp_status k_copy_rows(const fsdp_kernel *k, const void *args)
{
    const rows_args *a = args;
    char *to = fsdp_kernel_ptr(k, a->to);
    const char *from = fsdp_kernel_ptr(k, a->from);
    for (int64_t i = 0; i < a->rows; i++) memcpy(to + (size_t)i * a->to_stride, from + (size_t)i * a->from_stride, a->bytes);
    return FSDP_OK;
}

static fsdp_status copy_rows(fsdp_tape *tape, rows_args a)
{
    return fsdp_stream_launch(tape->stream, k_copy_rows, &a, sizeof(a));
}

/* Keys and values of a whole prompt into empty caches. */
static fsdp_status fill_caches(fsdp_tape *tape, const fsdp_tensor *qkv, fsdpi_storage *cache_k, fsdpi_storage *cache_v, int64_t room)
{
    int64_t B = qkv->shape[0], T = qkv->shape[1];
    size_t row = (size_t)qkv->shape[2] / 3 * sizeof(float);
    fsdpi_storage *caches[2] = { cache_k, cache_v };
    for (int64_t b = 0; b < B; b++)
        for (size_t c = 0; c < 2; c++)
            FSDP_TRY(copy_rows(tape, (rows_args){ .to = (char *)caches[c]->data + (size_t)(b * room) * row,
                                                  .from = (const char *)qkv->storage->data + (size_t)(b * T) * 3 * row + (c + 1) * row,
                                                  .to_stride = row,
                                                  .from_stride = 3 * row,
                                                  .bytes = row,
                                                  .rows = T }));
    return FSDP_OK;
}

fsdp_status fsdpi_op_attention_cached(fsdp_tape *tape, fsdp_tensor *qkv, const fsdp_op_attention_opts *opts, fsdpi_storage *cache_k,
                                      fsdpi_storage *cache_v, int64_t room, int64_t length, fsdp_tensor **out)
{
    int64_t B = qkv->shape[0], T = qkv->shape[1], C = qkv->shape[2] / 3;
    FSDP_FAIL_IF(length + T > room || (T > 1 && length > 0), FSDP_ERR_INTERNAL, "attention: %lld new positions after %lld in a cache of %lld", (long long)T,
                 (long long)length, (long long)room);
    if (T > 1) {
        FSDP_TRY(fill_caches(tape, qkv, cache_k, cache_v, room));
        return fsdp_op_attention(tape, qkv, opts, out);
    }
    fsdp_tensor *o;
    FSDP_TRY(fsdpi_tape_tensor(&o, tape, FSDP_F32, 3, (int64_t[]){ B, T, C }));
    fsdpi_attention_step_args a = { .qkv = qkv->storage->data, .cache_k = cache_k->data, .cache_v = cache_v->data, .out = o->storage->data, .B = B, .T = room,
                                    .H = opts->heads, .D = C / opts->heads, .pos = length, .scale = opts->scale };
    FSDP_TRY(FSDPI_LAUNCH(tape, attention_step, &a));
    *out = o;
    return FSDP_OK;
}

fsdp_status fsdpi_op_last_row(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor **out)
{
    int64_t B = x->shape[0], T = x->shape[1], C = x->shape[2];
    size_t row = (size_t)C * sizeof(float);
    fsdp_tensor *o;
    FSDP_TRY(fsdpi_tape_tensor(&o, tape, FSDP_F32, 2, (int64_t[]){ B, C }));
    FSDP_TRY(copy_rows(tape, (rows_args){ .to = o->storage->data, .from = (const char *)x->storage->data + (size_t)(T - 1) * row, .to_stride = row,
                                          .from_stride = (size_t)T * row, .bytes = row, .rows = B }));
    *out = o;
    return FSDP_OK;
}
