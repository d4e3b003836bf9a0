/* SPDX-License-Identifier: MIT
 *
 * Tensors from values of other types than operations compute in, and to them. The cast is the host's: what goes in and comes out lies there. */
#include "autograd/tape.h"

#include "base/alloc.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/isa.h"

static bool is_narrow(fsdp_dtype dtype)
{
    return dtype == FSDP_BF16 || dtype == FSDP_F16;
}

/* How many elements; FSDP_ERR_INVALID where the shape is none. */
static fsdp_status count(int64_t *numel, int ndim, const int64_t *shape)
{
    fsdp_tensor like = { 0 };
    FSDP_TRY(fsdpi_tensor_set_shape(&like, FSDP_F32, ndim, shape));
    *numel = like.numel;
    return FSDP_OK;
}

static void to_f32(float *out, fsdp_dtype dtype, const void *values, int64_t numel)
{
    if (is_narrow(dtype)) {
        fsdpi_convert_to_f32(fsdpi_isa_get(), dtype, out, values, (size_t)numel);
        return;
    }
    for (int64_t i = 0; i < numel; i++) out[i] = (float)((const double *)values)[i];
}

static fsdp_status to_i32(int32_t *out, const int64_t *values, int64_t numel)
{
    for (int64_t i = 0; i < numel; i++) {
        FSDP_FAIL_IF(values[i] < INT32_MIN || values[i] > INT32_MAX, FSDP_ERR_INVALID, "fsdp_tensor_from: value %lld at place %lld does not fit into an I32, which operations take",
                     (long long)values[i], (long long)i);
        out[i] = (int32_t)values[i];
    }
    return FSDP_OK;
}

fsdp_status fsdp_tensor_from(fsdp_tensor **out, fsdp_tape *tape, fsdp_dtype dtype, const void *values, int ndim, const int64_t *shape)
{
    if (dtype == FSDP_F32) return fsdp_tensor_from_f32(out, tape, values, ndim, shape);
    if (dtype == FSDP_I32) return fsdp_tensor_from_i32(out, tape, values, ndim, shape);
    FSDP_FAIL_IF(!is_narrow(dtype) && dtype != FSDP_F64 && dtype != FSDP_I64, FSDP_ERR_INVALID,
                 "fsdp_tensor_from: values of type %s: operations take what can be cast from F64, F32, BF16 and F16, or from I64 and I32", fsdp_dtype_name(dtype));
    int64_t numel;
    void *cast;
    FSDP_TRY(count(&numel, ndim, shape));
    cast = fsdpi_calloc((size_t)numel, sizeof(float));
    FSDP_FAIL_IF(cast == NULL, FSDP_ERR_NOMEM, "no memory to cast %lld values", (long long)numel);
    fsdp_status st;
    if (dtype == FSDP_I64) {
        st = to_i32(cast, values, numel);
        if (st == FSDP_OK) st = fsdp_tensor_from_i32(out, tape, cast, ndim, shape);
    } else {
        to_f32(cast, dtype, values, numel);
        st = fsdp_tensor_from_f32(out, tape, cast, ndim, shape);
    }
    fsdpi_free(cast);
    return st;
}

static void widen(fsdp_dtype dtype, void *out, const void *values, int64_t numel)
{
    for (int64_t i = 0; i < numel; i++) {
        if (dtype == FSDP_F64) ((double *)out)[i] = (double)((const float *)values)[i];
        else ((int64_t *)out)[i] = ((const int32_t *)values)[i];
    }
}

fsdp_status fsdp_tensor_to(fsdp_tensor *t, fsdp_dtype dtype, void *out)
{
    if (dtype == t->dtype) return fsdp_tensor_read(t, out);
    bool from_f32 = t->dtype == FSDP_F32 && (is_narrow(dtype) || dtype == FSDP_F64), from_i32 = t->dtype == FSDP_I32 && dtype == FSDP_I64;
    FSDP_FAIL_IF(!from_f32 && !from_i32, FSDP_ERR_INVALID, "fsdp_tensor_to: a tensor of type %s is not cast to %s: F32 goes to F64, BF16 and F16, I32 to I64", fsdp_dtype_name(t->dtype),
                 fsdp_dtype_name(dtype));
    void *values = fsdpi_calloc((size_t)t->numel, sizeof(float));
    FSDP_FAIL_IF(values == NULL, FSDP_ERR_NOMEM, "no memory to cast %lld values", (long long)t->numel);
    fsdp_status st = fsdp_tensor_read(t, values);
    if (st == FSDP_OK && is_narrow(dtype)) fsdpi_convert_from_f32(fsdpi_isa_get(), dtype, out, values, (size_t)t->numel);
    else if (st == FSDP_OK) widen(dtype, out, values, t->numel);
    fsdpi_free(values);
    return st;
}
