/* SPDX-License-Identifier: MIT
 *
 * What a save writes, taken at one moment: which ranges of which tensors are this rank's, and all numbers and texts. The tensors
 * themselves are read where they lie, or, once they are staged, from a copy in host memory that nothing changes any more. */
#ifndef FSDPI_CHECKPOINT_SNAPSHOT_H
#define FSDPI_CHECKPOINT_SNAPSHOT_H

#include "checkpoint/registry.h"

#include <jansson.h>
#include <stdatomic.h>

typedef struct fsdpi_saved {
    const char *name; /* the registry's */
    const char *what;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    int64_t first, numel; /* this rank's range */
    const char *at;       /* of its first element; NULL: they lie nowhere, and all are 0 */
    fsdp_stream *stream;  /* to read it with; NULL: it is host memory */
} fsdpi_saved;

typedef struct fsdpi_snapshot {
    fsdpi_saved *saved; /* every tensor entry, in the order of the registry, also where this rank has nothing of it */
    int count;
    json_t *values, *aliases; /* objects; borrowed strings of the registry are copied */
    uint64_t registry;
    size_t bytes;   /* of this rank's ranges */
    void *staging;
    _Atomic size_t staged; /* = bytes while there is a copy */
} fsdpi_snapshot;

/* Not collective. */
fsdp_status fsdpi_snapshot_make(fsdpi_snapshot **out, const fsdp_checkpoint *c);
void fsdpi_snapshot_free(fsdpi_snapshot *s); /* NULL is accepted */

/* Copies all of this rank's ranges; FSDP_ERR_NOMEM leaves it as it was. */
fsdp_status fsdpi_snapshot_stage(fsdpi_snapshot *s);
/* Gives the copy back: nothing can be read after that. Does nothing where there is none. */
void fsdpi_snapshot_unstage(fsdpi_snapshot *s);

/* Elements [done, done + numel) of a range into host memory. */
fsdp_status fsdpi_saved_read(const fsdpi_saved *t, int64_t done, int64_t numel, void *host);

#endif
