/* SPDX-License-Identifier: MIT
 *
 * Tensors: dense row-major arrays on a device, made on a tape and gone with it.
 *
 * A tensor is borrowed from its tape: it lives until fsdp_tape_end(). Its memory may be given up earlier, when no
 * operation needs it any more; reading it then is FSDP_ERR_STATE. Not collective; one thread per tape. */
#ifndef FSDP_TENSOR_H
#define FSDP_TENSOR_H

#include <fsdp/dtype.h>
#include <fsdp/unit.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_tensor fsdp_tensor;
typedef struct fsdp_tape fsdp_tape;

FSDP_API fsdp_dtype fsdp_tensor_dtype(const fsdp_tensor *t);
FSDP_API int fsdp_tensor_ndim(const fsdp_tensor *t);
/* Dimension d; negative counts from the last. 1 for a dimension that is not there. */
FSDP_API int64_t fsdp_tensor_shape(const fsdp_tensor *t, int d);
FSDP_API int64_t fsdp_tensor_numel(const fsdp_tensor *t);

/* Copies `values` (numel of shape) to the tape's device. The tensor needs no gradient. */
FSDP_API fsdp_status fsdp_tensor_from_f32(fsdp_tensor **out, fsdp_tape *tape, const float *values, int ndim, const int64_t *shape) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_tensor_from_i32(fsdp_tensor **out, fsdp_tape *tape, const int32_t *values, int ndim, const int64_t *shape) FSDP_NODISCARD;

/* The same of values of another type, cast to that in which operations compute: F64, BF16 and F16 to F32, I64 to I32. FSDP_ERR_INVALID where
 * an integer does not fit, or the type is none of these. */
FSDP_API fsdp_status fsdp_tensor_from(fsdp_tensor **out, fsdp_tape *tape, fsdp_dtype dtype, const void *values, int ndim, const int64_t *shape) FSDP_NODISCARD;

/* Asks for a gradient of a tensor that was made from values, before it is used. */
FSDP_API fsdp_status fsdp_tensor_require_grad(fsdp_tensor *t) FSDP_NODISCARD;

/* Says that the program will not use it again: its memory goes when no backward needs it. NULL is accepted. */
FSDP_API void fsdp_tensor_release(fsdp_tensor *t);

/* Waits, and copies the values to host memory: numel floats (F32), or numel elements of any type. */
FSDP_API fsdp_status fsdp_tensor_to_f32(fsdp_tensor *t, float *out) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_tensor_read(fsdp_tensor *t, void *out) FSDP_NODISCARD;
/* ... cast to another type, rounded to nearest: F32 to F64, BF16 or F16, I32 to I64. Values beyond its range become infinities. */
FSDP_API fsdp_status fsdp_tensor_to(fsdp_tensor *t, fsdp_dtype dtype, void *out) FSDP_NODISCARD;
/* Its gradient, after fsdp_backward(). Zeros where the loss does not depend on it. */
FSDP_API fsdp_status fsdp_tensor_grad_to_f32(fsdp_tensor *t, float *out) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
