/* SPDX-License-Identifier: MIT
 *
 * The elements of a tensor, from the ranks that have them to those that want them, a few KiB at a time: nobody needs room for more
 * than what he wants. */
#ifndef FSDPI_CHECKPOINT_MOVE_H
#define FSDPI_CHECKPOINT_MOVE_H

#include "checkpoint/registry.h"
#include "comm/comm.h"

/* Elements [first, first + numel) come from this rank. */
typedef struct fsdpi_cover {
    int rank;
    int64_t first, numel;
} fsdpi_cover;

/* Elements that this rank has, into host memory. */
typedef fsdp_status (*fsdpi_have_fn)(void *arg, int64_t first, int64_t numel, void *out);

typedef struct fsdpi_move {
    fsdp_comm *comm;
    fsdpi_op op;
    const char *name;
    size_t size; /* bytes of an element */
    const fsdpi_cover *cover; /* the same on every rank */
    int covers;
    fsdpi_have_fn have;
    void *arg;
    /* What this rank wants; numel 0: nothing. */
    int64_t first, numel;
    void *out;
} fsdpi_move;

/* Collective. Goes through to the end also where this rank cannot read what it has: the caller agrees on the status. */
fsdp_status fsdpi_move_run(const fsdpi_move *m);

#endif
