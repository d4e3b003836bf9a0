/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_OPTIM_KERNELS_H
#define FSDPI_OPTIM_KERNELS_H

#include "base/isa.h"

#include <stddef.h>

/* The same bits for an element wherever it lies. Formulas: include/fsdp/optim.h. */
typedef struct fsdpi_adamw_scalars {
    float scale;             /* of gradients */
    float decay;             /* 1 - lr weight_decay */
    float beta1, beta2;
    float step_size;         /* lr / (1 - beta1^t) */
    float inv_sqrt_bias2;    /* 1 / sqrt(1 - beta2^t) */
    float eps;
} fsdpi_adamw_scalars;

typedef struct fsdpi_optim_kernels {
    void (*adamw)(const fsdpi_adamw_scalars *s, float *p, const float *g, float *m, float *v, size_t numel);
    /* m NULL: no momentum */
    void (*sgd)(float lr, float momentum, float weight_decay, float scale, float *p, const float *g, float *m, size_t numel);
    /* a += w (p - a) for w < 1/2; else a = p - decay (p - a) */
    void (*mix)(float w, float decay, float *a, const float *p, size_t numel);
} fsdpi_optim_kernels;

FSDPI_ISA_TABLE(fsdpi_optim_kernels, fsdpi_optim_kernels_get)

#endif
