/* SPDX-License-Identifier: MIT */
#include "base/convert.h"

#include <string.h>

void fsdpi_convert_from_f32(fsdpi_isa isa, fsdp_dtype dtype, void *out, const float *x, size_t numel)
{
    const fsdpi_convert_kernels *k = fsdpi_convert_kernels_get(isa);
    if (numel == 0) return;
    if (dtype == FSDP_BF16) k->bf16_from_f32(out, x, numel);
    else if (dtype == FSDP_F16) k->f16_from_f32(out, x, numel);
    else memcpy(out, x, numel * sizeof(float));
}

void fsdpi_convert_to_f32(fsdpi_isa isa, fsdp_dtype dtype, float *out, const void *x, size_t numel)
{
    const fsdpi_convert_kernels *k = fsdpi_convert_kernels_get(isa);
    if (numel == 0) return;
    if (dtype == FSDP_BF16) k->bf16_to_f32(out, x, numel);
    else if (dtype == FSDP_F16) k->f16_to_f32(out, x, numel);
    else memcpy(out, x, numel * sizeof(float));
}
