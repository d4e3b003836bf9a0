/* SPDX-License-Identifier: MIT
 *
 * What operations share. To add one: kernels into kernels.h and ops/cpu/, a file here with check, forward, backward,
 * its prototype into include/fsdp/ops.h, its tests into tests/ops/. */
#ifndef FSDPI_OPS_OPS_H
#define FSDPI_OPS_OPS_H

#include <fsdp/ops.h>

#include "autograd/tape.h"
#include "ops/kernels.h"

/* The kernels for a tape's device. */
static inline const fsdpi_op_kernels *fsdpi_kernels_of(const fsdp_tape *tape)
{
    (void)tape; /* "cpu" and "guard" both run on the CPU */
    return &fsdpi_op_kernels_cpu;
}

/* Threads that a kernel on this tape has, for sizes of scratch. */
static inline int fsdpi_threads_of(const fsdp_tape *tape)
{
    return fsdpi_pool_threads(tape->stream->kernel.pool);
}

static inline int64_t fsdpi_rows(const fsdp_tensor *t)
{
    int64_t c = fsdp_tensor_shape(t, -1);
    return c > 0 ? t->numel / c : 0;
}

/* Checks that t is there, of this type, and of this tape or a parameter. */
fsdp_status fsdpi_check_tensor(const fsdp_tape *tape, const char *op, const char *what, const fsdp_tensor *t, fsdp_dtype dtype);
/* ... and that it is a vector of n elements. */
fsdp_status fsdpi_check_vector(const fsdp_tape *tape, const char *op, const char *what, const fsdp_tensor *t, int64_t n);

/* For a backward: where an input's values are. The node saved its storage; a parameter has none and is asked again. */
static inline fsdp_status fsdpi_saved(fsdp_tape *tape, const fsdpi_node *n, int slot, const fsdp_tensor *t, const float **out)
{
    const void *p;
    if (n->saved[slot] != NULL) {
        FSDP_TRY(fsdpi_storage_restore(n->saved[slot], tape));
        p = n->saved[slot]->data;
    } else {
        FSDP_TRY(fsdpi_tensor_data(t, &p));
    }
    *out = p;
    return FSDP_OK;
}

/* FSDP_ERR_INVALID where there is no such activation. */
fsdp_status fsdpi_check_activation(const char *op, fsdp_activation activation);

/* Scratch for one launch: given back at once, since what comes after it on the stream runs after it. */
fsdp_status fsdpi_scratch(fsdp_tape *tape, size_t bytes, void **out);
void fsdpi_scratch_free(fsdp_tape *tape, void *p);

/* The gradient that backward begins with, where t is the loss. */
static inline const float *fsdpi_seed_of(const fsdp_tape *tape)
{
    return tape->seed != NULL ? tape->seed->data : NULL;
}

/* ---- for generation, on evaluation tapes ---- */

/* Attention of new positions [B, T, 3 C] to those in the caches ([B, room, C] each, `length` filled) and themselves; adds
 * their keys and values to the caches. T > 1 only where length is 0. */
fsdp_status fsdpi_op_attention_cached(fsdp_tape *tape, fsdp_tensor *qkv, const fsdp_op_attention_opts *opts, fsdpi_storage *cache_k,
                                      fsdpi_storage *cache_v, int64_t room, int64_t length, fsdp_tensor **out);
/* The last position of each sample: [B, T, C] -> [B, C]. */
fsdp_status fsdpi_op_last_row(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor **out);

#define FSDPI_DATA(t, field)                                                                                \
    do {                                                                                                    \
        const void *fsdpi_p_;                                                                               \
        FSDP_TRY(fsdpi_tensor_data((t), &fsdpi_p_));                                                        \
        (field) = (void *)(uintptr_t)fsdpi_p_;                                                              \
    } while (0)

#define FSDPI_LAUNCH(tape, kernel, args) fsdp_stream_launch((tape)->stream, fsdpi_kernels_of(tape)->kernel, (args), sizeof(*(args)))

#endif
