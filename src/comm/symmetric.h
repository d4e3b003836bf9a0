/* SPDX-License-Identifier: MIT
 *
 * What transports over shared memory have in common: the counters of flats and windows, their kernels, and memory of
 * the heap as a device sees it. The protocol is in transport.h; the model of it in docs/protocol.pml. */
#ifndef FSDPI_COMM_SYMMETRIC_H
#define FSDPI_COMM_SYMMETRIC_H

#include "comm/transport.h"

/* A range of the heap: counters first, then the bytes, on pages of their own. The last of the ranks to destroy it
 * gives it back: nobody waits for the others, and what a rank that died has not left stays until the job ends. */
typedef struct fsdpi_region {
    fsdp_comm *comm;
    size_t offset, bytes;      /* all of it, in the heap */
    size_t counter_bytes;      /* the first of them */
    fsdpi_counter *counter;    /* mapped for the host */
    fsdpi_counter *left;       /* behind them: how many ranks have destroyed it */
} fsdpi_region;

/* Collective. mine: how this rank's preparations went (fsdpi_comm_heap_alloc). counters: how many; payload: bytes after
 * them. */
fsdp_status fsdpi_region_create(fsdpi_region *out, fsdp_comm *comm, fsdp_status mine, int counters, size_t payload);
/* By this rank alone, after its other mappings of it. */
void fsdpi_region_destroy(fsdpi_region *r);
/* Maps payload bytes [at, at + bytes) for a device; at is a multiple of the page size. */
fsdp_status fsdpi_region_map(const fsdpi_region *r, fsdp_device *dev, size_t at, size_t bytes, bool writable, void **out);
void fsdpi_region_unmap(const fsdpi_region *r, fsdp_device *dev, void *p, size_t bytes);

/* The counters of a flat: published[size]; done[size], which is v + 1 after done(v), for version 0 has readers too. Of
 * a window: posted[size], taken[size]. */
static inline fsdpi_counter *fsdpi_first_counter(const fsdpi_region *r, int rank)
{
    return &r->counter[rank];
}
static inline fsdpi_counter *fsdpi_second_counter(const fsdpi_region *r, int rank)
{
    return &r->counter[r->comm->size + rank];
}

/* In stream order: sets this rank's first or second counter. What was written before is fenced. */
fsdp_status fsdpi_launch_set(fsdp_stream *s, fsdpi_counter *c, uint32_t value);
/* In stream order: waits for the first, or the second, counters of all ranks of a group, or of member `only` (>= 0). */
fsdp_status fsdpi_launch_wait(fsdp_stream *s, const fsdpi_region *r, const fsdpi_group *group, bool second, int only, uint32_t value,
                              const char *doing, const char *name);

#endif
