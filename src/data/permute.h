/* SPDX-License-Identifier: MIT
 *
 * A permutation of [0, n) that is computed, not stored: the place of one element costs the same for ten
 * elements and for 2^62, and needs neither memory nor what came before. */
#ifndef FSDPI_DATA_PERMUTE_H
#define FSDPI_DATA_PERMUTE_H

#include <stdint.h>

/* Where element i of [0, n) goes, in the permutation of this seed and epoch. 0 <= i < n, n >= 1. */
int64_t fsdpi_permute(uint64_t seed, uint64_t epoch, int64_t n, int64_t i);

/* A number of [0, n) for this seed and epoch, independent of the permutation. n >= 1. */
int64_t fsdpi_draw_offset(uint64_t seed, uint64_t epoch, int64_t n);

#endif
