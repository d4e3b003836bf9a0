/* SPDX-License-Identifier: MIT
 *
 * What a checkpoint holds, by name. A tensor entry is read and written in ranges of elements, of which each rank owns one
 * (perhaps empty) range; everything else is a number or a text of the whole run. */
#ifndef FSDPI_CHECKPOINT_REGISTRY_H
#define FSDPI_CHECKPOINT_REGISTRY_H

#include <fsdp/state.h>

#include "shard/life.h"

#define FSDPI_MANIFEST "manifest.json"

typedef enum fsdpi_entry_kind {
    FSDPI_ENTRY_PARAM,
    FSDPI_ENTRY_STATE,
    FSDPI_ENTRY_BUFFER,
    FSDPI_ENTRY_I64,
    FSDPI_ENTRY_F64,
    FSDPI_ENTRY_TEXT,
    FSDPI_ENTRY_STEPS,
    FSDPI_ENTRY_ALIAS,
} fsdpi_entry_kind;

typedef struct fsdpi_entry {
    fsdpi_entry_kind kind;
    char *name;
    fsdp_unit *unit; /* PARAM, STATE, STEPS */
    int index;
    float *state;       /* STATE: the unit's array; NULL: an optimizer's, which may not have made it yet */
    fsdp_optim *optim;  /* STEPS, and STATE of one: number state_kind */
    int state_kind;
    void *value;        /* I64, F64, BUFFER */
    fsdp_module *module; /* BUFFER: whose number `index` it is; then value is a copy, the entry's own. NULL: the program's */
    char *text;         /* TEXT */
    int of;             /* ALIAS: the entry that it is another name of */
    fsdp_dtype dtype;   /* of a tensor, and its shape */
    int ndim;
    int64_t shape[FSDP_MAX_DIMS], numel;
} fsdpi_entry;

struct fsdpi_background;

struct fsdp_checkpoint {
    fsdp_comm *comm;
    fsdpi_entry *entry;
    int count, room;
    struct fsdpi_background *background; /* NULL: there was no save in the background yet */
};

static inline bool fsdpi_entry_is_tensor(const fsdpi_entry *e)
{
    return e->kind == FSDPI_ENTRY_PARAM || e->kind == FSDPI_ENTRY_STATE || e->kind == FSDPI_ENTRY_BUFFER;
}

/* FSDP_STATE_PARAMS and so on. STEPS belong to the optimizer's state; an alias to what it is an alias of. */
unsigned fsdpi_entry_what(const fsdp_checkpoint *c, const fsdpi_entry *e);
/* All kinds that are registered. */
unsigned fsdpi_registered(const fsdp_checkpoint *c);
/* NULL: there is none of this name. */
const fsdpi_entry *fsdpi_entry_find(const fsdp_checkpoint *c, const char *name);
/* Every unit that has a tensor registered allows this event; and copies of modules' buffers are new. */
fsdp_status fsdpi_registry_allows(const fsdp_checkpoint *c, fsdpi_event ev);
/* A buffer has got its value: its module has it too. */
fsdp_status fsdpi_entry_settle(const fsdpi_entry *e);
/* Of what is registered, in order: ranks that registered other things would write a checkpoint of mixed-up parts. */
uint64_t fsdpi_registry_hash(const fsdp_checkpoint *c);
/* Collective. FSDP_ERR_INVALID, the same on every rank, where they differ. */
fsdp_status fsdpi_registry_same(const fsdp_checkpoint *c, const char *call);

/* A range of a tensor entry: elements [first, first + numel), and where the first of them lies: in memory that fsdpi_entry_stream()
 * reaches, or (a buffer) the host does. NULL where numel is 0, and where they lie nowhere: all are 0. */
typedef struct fsdpi_range_of {
    int64_t first, numel;
    void *at;
} fsdpi_range_of;

/* Each rank has one for itself (buffers, ignored parameters): values may differ, and rank 0's is saved. */
bool fsdpi_entry_is_each_ranks(const fsdp_checkpoint *c, const fsdpi_entry *e);
/* What this rank saves of it: each element is saved by one rank: of replicas the first; of a buffer rank 0. */
fsdpi_range_of fsdpi_entry_range(const fsdp_checkpoint *c, const fsdpi_entry *e);
/* What this rank has to load of it: in mode none, and of a buffer, all. */
fsdpi_range_of fsdpi_entry_kept(const fsdpi_entry *e);

/* To read and write it with; NULL of a buffer. */
fsdp_stream *fsdpi_entry_stream(const fsdpi_entry *e);

/* Whether it is state that an optimizer has not made. */
bool fsdpi_entry_is_unmade(const fsdpi_entry *e);
/* Not collective. It is now, of zeros. */
fsdp_status fsdpi_entry_make(const fsdpi_entry *e);
/* Whether all bytes are. */
bool fsdpi_is_zero(const void *p, size_t bytes);

#endif
