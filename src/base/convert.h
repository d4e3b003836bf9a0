/* SPDX-License-Identifier: MIT
 *
 * Arrays of 16-bit floats, to the bits of fsdp_bf16_from_f32() and its kin. */
#ifndef FSDPI_BASE_CONVERT_H
#define FSDPI_BASE_CONVERT_H

#include <fsdp/dtype.h>

#include "base/isa.h"

typedef struct fsdpi_convert_kernels {
    void (*bf16_from_f32)(uint16_t *out, const float *x, size_t numel);
    void (*bf16_to_f32)(float *out, const uint16_t *x, size_t numel);
    void (*f16_from_f32)(uint16_t *out, const float *x, size_t numel);
    void (*f16_to_f32)(float *out, const uint16_t *x, size_t numel);
} fsdpi_convert_kernels;

FSDPI_ISA_TABLE(fsdpi_convert_kernels, fsdpi_convert_kernels_get)

/* dtype: F32 (a copy), BF16 or F16. */
void fsdpi_convert_from_f32(fsdpi_isa isa, fsdp_dtype dtype, void *out, const float *x, size_t numel);
void fsdpi_convert_to_f32(fsdpi_isa isa, fsdp_dtype dtype, float *out, const void *x, size_t numel);

#endif
