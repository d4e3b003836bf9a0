/* SPDX-License-Identifier: MIT */
#include "ops/ops.h"

fsdp_status fsdpi_check_tensor(const fsdp_tape *tape, const char *op, const char *what, const fsdp_tensor *t, fsdp_dtype dtype)
{
    FSDP_FAIL_IF(t == NULL, FSDP_ERR_INVALID, "%s: %s is NULL", op, what);
    FSDP_FAIL_IF(t->dtype != dtype, FSDP_ERR_INVALID, "%s: %s is of type %s, not %s", op, what, fsdp_dtype_name(t->dtype), fsdp_dtype_name(dtype));
    FSDP_FAIL_IF(t->tape != NULL && t->tape != tape, FSDP_ERR_INVALID, "%s: %s is of another tape", op, what);
    return FSDP_OK;
}

fsdp_status fsdpi_check_vector(const fsdp_tape *tape, const char *op, const char *what, const fsdp_tensor *t, int64_t n)
{
    FSDP_TRY(fsdpi_check_tensor(tape, op, what, t, FSDP_F32));
    char text[128];
    FSDP_FAIL_IF(t->ndim != 1 || t->numel != n, FSDP_ERR_INVALID, "%s: %s is %s, not [%lld]", op, what, fsdpi_shape_text(t, text), (long long)n);
    return FSDP_OK;
}

fsdp_status fsdpi_check_activation(const char *op, fsdp_activation activation)
{
    FSDP_FAIL_IF((unsigned)activation > FSDP_ACT_RELU, FSDP_ERR_INVALID, "%s: activation %d: there is no such one", op, (int)activation);
    return FSDP_OK;
}

fsdp_status fsdpi_scratch(fsdp_tape *tape, size_t bytes, void **out)
{
    *out = NULL;
    return bytes > 0 ? fsdpi_arena_alloc(tape->arena, bytes, out) : FSDP_OK;
}

void fsdpi_scratch_free(fsdp_tape *tape, void *p)
{
    fsdpi_arena_free(tape->arena, p);
}
