/* SPDX-License-Identifier: MIT
 *
 * Where an optimizer's state lies: beside the slices, or on a device of its own (the host's memory, say, where slices are on another
 * device, or the other way round). From there a unit's is copied into a staging buffer beside the slices, updated, and copied back. There are
 * two buffers, taken in turns: while one unit is updated, the one before goes back and the next one comes. */
#ifndef FSDPI_OPTIM_STATE_H
#define FSDPI_OPTIM_STATE_H

#include <fsdp/optim.h>

#include "shard/unit.h"

enum { FSDPI_STATE_KINDS = 2 };

/* A unit's part of an optimizer. */
typedef struct fsdpi_part {
    fsdp_unit *unit;
    fsdpi_devctx *home;      /* of the device that state lies on: often the unit's `store` */
    int kinds;
    float *state[FSDPI_STATE_KINDS]; /* arena blocks there; NULL: there is none yet, all of it is 0 */
    int64_t *steps;          /* per parameter: one that is frozen has none */
    float *decay, *lr_scale; /* per parameter, from the groups */
} fsdpi_part;

/* The staging buffers of one device. */
typedef struct fsdpi_staging {
    struct fsdpi_staging *next;
    fsdpi_devctx *store; /* of the units that it is for */
    fsdpi_devctx *via;   /* whose streams reach it and their state */
    float *buffer[2][FSDPI_STATE_KINDS]; /* arena blocks of store's */
    int64_t numel;       /* that a block has room for */
} fsdpi_staging;

/* Not collective. device NULL: where the unit's slices are. The part has its unit and kinds. FSDP_ERR_UNSUPPORTED: no stream reaches both
 * devices. */
fsdp_status fsdpi_state_place(fsdpi_part *p, fsdp_device *device);
/* All kinds of it, of zeros, or none. */
fsdp_status fsdpi_state_make(fsdpi_part *p);
/* Waits for what passes between it and a staging buffer. */
void fsdpi_state_drop(fsdpi_part *p);
/* What it is read and written with, in order with steps. */
fsdp_stream *fsdpi_state_stream(const fsdpi_part *p);

static inline bool fsdpi_state_is_missing(const fsdpi_part *p)
{
    return p->kinds > 0 && p->state[0] == NULL;
}

static inline bool fsdpi_state_is_apart(const fsdpi_part *p)
{
    return p->home != p->unit->store;
}

/* Buffers for all that has state apart; those that there are already grow. */
fsdp_status fsdpi_staging_fit(fsdpi_staging **staging, const fsdpi_part *part, int count);
/* After the state of all parts. */
void fsdpi_staging_drop(fsdpi_staging *staging);

/* Updates a part, on the unit's storage stream, with its state at these addresses. */
typedef fsdp_status (*fsdpi_update_fn)(fsdpi_part *p, float *const *state, void *arg);

/* In a step: every part whose unit has gradients and whose state is apart. */
fsdp_status fsdpi_staging_update(const fsdpi_staging *staging, fsdpi_part *part, int count, fsdpi_update_fn update, void *arg);

#endif
