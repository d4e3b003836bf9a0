/* SPDX-License-Identifier: MIT */
#include "base/philox.h"

static const fsdpi_philox_kernels *kernels(void)
{
    return fsdpi_philox_kernels_get(fsdpi_isa_get());
}

void fsdp_philox_normal_fill(uint64_t seed, const char *name, int64_t start, int64_t numel, float *out)
{
    if (numel > 0) kernels()->normal(seed, fsdpi_name_hash(name), (uint64_t)start, (size_t)numel, out);
}

void fsdp_philox_uniform_fill(uint64_t seed, const char *name, int64_t start, int64_t numel, float *out)
{
    if (numel > 0) kernels()->uniform(seed, fsdpi_name_hash(name), (uint64_t)start, (size_t)numel, out);
}

float fsdp_philox_normal(uint64_t seed, const char *name, int64_t index)
{
    float x;
    fsdp_philox_normal_fill(seed, name, index, 1, &x);
    return x;
}

float fsdp_philox_uniform(uint64_t seed, const char *name, int64_t index)
{
    float x;
    fsdp_philox_uniform_fill(seed, name, index, 1, &x);
    return x;
}

void fsdp_rng_init(fsdp_rng *rng, uint64_t seed)
{
    *rng = (fsdp_rng){ .seed = seed };
}

uint32_t fsdp_rng_u32(fsdp_rng *rng)
{
    uint32_t x;
    kernels()->bits(rng->seed ^ FSDPI_PHILOX_STREAM, 0, rng->draws++, 1, &x);
    return x;
}

float fsdp_rng_uniform(fsdp_rng *rng)
{
    float x;
    kernels()->uniform(rng->seed ^ FSDPI_PHILOX_STREAM, 0, rng->draws++, 1, &x);
    return x;
}

float fsdp_rng_normal(fsdp_rng *rng)
{
    float x;
    kernels()->normal(rng->seed ^ FSDPI_PHILOX_STREAM, 0, rng->draws++, 1, &x);
    return x;
}
