/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_OPS_GEMM_PLAIN_H
#define FSDPI_OPS_GEMM_PLAIN_H

#include "ops/gemm.h"

/* The product of our own, for machines without a library: the same bits on every instruction set. */
typedef struct fsdpi_gemm_plain {
    void (*run)(const fsdpi_gemm *g);
} fsdpi_gemm_plain;

FSDPI_ISA_TABLE(fsdpi_gemm_plain, fsdpi_gemm_plain_get)

#endif
