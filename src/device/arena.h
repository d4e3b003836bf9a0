/* SPDX-License-Identifier: MIT
 *
 * Memory of one rank on one device, for buffers that come and go: a block that is freed is kept and handed out
 * again. A training step asks for the same sizes in the same order, so that nothing is taken from the system after
 * the first one. A block may be handed out again as soon as it is freed, since work on a stream is in order: all
 * users of an arena launch on one stream, or order their streams themselves.
 *
 * bytes_live is what is in use; bytes_held what the system has given. */
#ifndef FSDPI_DEVICE_ARENA_H
#define FSDPI_DEVICE_ARENA_H

#include "device/device.h"

typedef struct fsdpi_arena fsdpi_arena;

typedef struct fsdpi_arena_stats {
    size_t bytes_live, bytes_live_peak, bytes_held;
    uint64_t system_allocs; /* how often the system was asked */
} fsdpi_arena_stats;

fsdp_status fsdpi_arena_create(fsdpi_arena **out, fsdp_device *dev);
/* All work must be done. Blocks that were not freed, as after an error, go too. NULL is accepted. */
void fsdpi_arena_destroy(fsdpi_arena *a);

/* 64-byte aligned; contents undefined. bytes = 0 gives a block of its own, of no use but to be freed. */
fsdp_status fsdpi_arena_alloc(fsdpi_arena *a, size_t bytes, void **out) FSDP_NODISCARD;
void fsdpi_arena_free(fsdpi_arena *a, void *p); /* NULL is accepted */

/* Gives what is not in use back to the system; all work must be done. */
void fsdpi_arena_trim(fsdpi_arena *a);
fsdpi_arena_stats fsdpi_arena_get_stats(const fsdpi_arena *a);
void fsdpi_arena_reset_peak(fsdpi_arena *a);
fsdp_device *fsdpi_arena_device(const fsdpi_arena *a);

/* For tests that want use-after-free to show: freed blocks are handed out in the order in which they were freed, so
 * that a buffer comes back at another address. */
void fsdpi_arena_rotate(fsdpi_arena *a, bool on);

#endif
