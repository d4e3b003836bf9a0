/* SPDX-License-Identifier: MIT
 *
 * Random numbers that are functions, not streams: Philox4x32-10 (Salmon et al., "Parallel random numbers: as
 * easy as 1, 2, 3", 2011) of a seed, a name and an index. The same on every rank, number of ranks, instruction
 * set and order of calls. */
#ifndef FSDP_RANDOM_H
#define FSDP_RANDOM_H

#include <fsdp/defs.h>

FSDP_BEGIN_DECLS

/* Uniform in [0, 1), a multiple of 2^-24. index >= 0. */
FSDP_API float fsdp_philox_uniform(uint64_t seed, const char *name, int64_t index);

/* Standard normal (Box-Muller), at most 6.7 in magnitude. index >= 0. */
FSDP_API float fsdp_philox_normal(uint64_t seed, const char *name, int64_t index);

/* out[i] = fsdp_philox_normal(seed, name, start + i) and the uniform likewise, to the bit, and faster. */
FSDP_API void fsdp_philox_normal_fill(uint64_t seed, const char *name, int64_t start, int64_t numel, float *out);
FSDP_API void fsdp_philox_uniform_fill(uint64_t seed, const char *name, int64_t start, int64_t numel, float *out);

/* For code that wants a stream: draws are numbered. Copy the struct to save and restore it. */
typedef struct fsdp_rng {
    uint64_t seed;
    uint64_t draws; /* how many numbers were taken */
} fsdp_rng;

FSDP_API void fsdp_rng_init(fsdp_rng *rng, uint64_t seed);
FSDP_API uint32_t fsdp_rng_u32(fsdp_rng *rng);
FSDP_API float fsdp_rng_uniform(fsdp_rng *rng);
FSDP_API float fsdp_rng_normal(fsdp_rng *rng);

FSDP_END_DECLS

#endif
