/* SPDX-License-Identifier: MIT
 *
 * Philox4x32-10: one block of four 32-bit numbers from a 64-bit key and a 128-bit counter. Who draws what:
 *   named values  key = seed                   counter = [index / 4, hash of the name]
 *   streams       key = seed ^ STREAM          counter = [draw / 4, 0]
 *   dropout       key = seed ^ DROPOUT         counter = [element / 4 + (step << 32), sample + (layer << 32)]
 *   data order    key = seed ^ DATA            counter = [round << 32 + half, epoch] (round 255: the epoch's offset)
 * so that no two uses ever share a block. */
#ifndef FSDPI_BASE_PHILOX_H
#define FSDPI_BASE_PHILOX_H

#include <fsdp/random.h>

#include "base/isa.h"

#define FSDPI_PHILOX_STREAM  0x9d3f1b6e5a2c4871u
#define FSDPI_PHILOX_DROPOUT 0x5851f42d4c957f2du
#define FSDPI_PHILOX_DATA    0x2545f4914f6cdd1du

static inline void fsdpi_philox(uint64_t key, uint64_t ctr_lo, uint64_t ctr_hi, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)ctr_lo, c1 = (uint32_t)(ctr_lo >> 32), c2 = (uint32_t)ctr_hi, c3 = (uint32_t)(ctr_hi >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* FNV-1a, 64 bits: names to counters. */
static inline uint64_t fsdpi_name_hash(const char *name)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name != '\0'; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3u;
    return h;
}

typedef struct fsdpi_philox_kernels {
    /* out[i]: value start + i of the counters [., ctr_hi]; normal or uniform. */
    void (*normal)(uint64_t key, uint64_t ctr_hi, uint64_t start, size_t numel, float *out);
    void (*uniform)(uint64_t key, uint64_t ctr_hi, uint64_t start, size_t numel, float *out);
    /* The raw 32-bit numbers. */
    void (*bits)(uint64_t key, uint64_t ctr_hi, uint64_t start, size_t numel, uint32_t *out);
} fsdpi_philox_kernels;

FSDPI_ISA_TABLE(fsdpi_philox_kernels, fsdpi_philox_kernels_get)

#endif
