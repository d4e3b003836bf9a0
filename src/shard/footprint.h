/* SPDX-License-Identifier: MIT
 *
 * How much memory units take: a function of their layout, mode, number of ranks and transport, that nothing allocates by.
 * docs/memory.md says it in words; tests/shard/memory_test.c compares it with what is really taken, to the byte. */
#ifndef FSDPI_SHARD_FOOTPRINT_H
#define FSDPI_SHARD_FOOTPRINT_H

#include "shard/unit.h"

/* Bytes of this rank, unless it says otherwise; where it is used and kept on two devices, on the one or the other. */
typedef struct fsdpi_footprint {
    size_t master;    /* storage, always: its own copy of what it keeps, where that is not in shared memory */
    size_t published; /* storage, always: the same in a type below fp32 */
    size_t sum;       /* gradient device: an accumulator: one from the first pass on, a second one where a step has several passes */
    size_t step;      /* storage, while it is in a step, where it has gradients: those of all replicas; those that are stored below fp32, or elsewhere */
    size_t gathered;  /* compute, while the unit is whole */
    size_t block;     /* compute, while a backward writes gradients that are sent in another type, or from elsewhere */
    size_t summoned;  /* compute, while it is summoned with writeback */
    size_t shared;    /* of all ranks together, always: published parameters and counters */
} fsdpi_footprint;

fsdpi_footprint fsdpi_unit_footprint(const fsdp_unit *u);

/* Windows of the units' sizes, from the first pass on. At most `open` backwards of units of one size are within each other. */
typedef struct fsdpi_windows_footprint {
    int count;
    size_t own;    /* bytes of this rank */
    size_t shared; /* of all ranks together */
} fsdpi_windows_footprint;

fsdpi_windows_footprint fsdpi_windows_footprint_of(const fsdpi_runtime *rt, int open);

#endif
