/* SPDX-License-Identifier: MIT
 *
 * A Feistel network on numbers of 2 h bits: (L, R) -> (R, L xor F(R)), which is a bijection whatever F is. F
 * is a block of Philox, so the network's order is a function of (seed, epoch). 2 h bits are at most 4 times
 * more numbers than n needs; a result of n or more is put through the network again ("cycle walking") until
 * it falls below n, which is still a bijection, for it follows i's own cycle. On average that takes fewer
 * than 4 walks.
 *
 * Blocks of Philox: key = seed ^ DATA, counter = [round << 32 | R, epoch], rounds 0 to ROUNDS - 1; the offset
 * of an epoch has round OFFSET. */
#include "data/permute.h"

#include "base/philox.h"

/* 4 rounds are enough for pairs of large halves to look random; halves of one or two bits need more to mix.
 */
enum { ROUNDS = 10, OFFSET = 255 };

static uint64_t network(uint64_t key, uint64_t epoch, int half, uint64_t x)
{
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t left = x >> half, right = x & mask;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint32_t f[4];
        fsdpi_philox(key, round << 32 | right, epoch, f);
        uint64_t next = left ^ (f[0] & mask);
        left = right;
        right = next;
    }
    return left << half | right;
}

int64_t fsdpi_permute(uint64_t seed, uint64_t epoch, int64_t n, int64_t i)
{
    int half = 1;
    while (half < 32 && (uint64_t)(n - 1) >> (2 * half) != 0) half++;
    uint64_t x = (uint64_t)i;
    do {
        x = network(seed ^ FSDPI_PHILOX_DATA, epoch, half, x);
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

int64_t fsdpi_draw_offset(uint64_t seed, uint64_t epoch, int64_t n)
{
    uint32_t f[4];
    fsdpi_philox(seed ^ FSDPI_PHILOX_DATA, (uint64_t)OFFSET << 32, epoch, f);
    return (int64_t)(((uint64_t)f[1] << 32 | f[0]) % (uint64_t)n); /* the bias is below n / 2^64 */
}
