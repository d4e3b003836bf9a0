/* SPDX-License-Identifier: MIT
 *
 * What a checkpoint holds, by name. A tensor entry is read and written in ranges of elements, of which each rank owns one
 * (perhaps empty) range; everything else is a number or a text of the whole run. */
#ifndef FSDPI_CHECKPOINT_REGISTRY_H
#define FSDPI_CHECKPOINT_REGISTRY_H

#include <fsdp/checkpoint.h>

#define FSDPI_MANIFEST "manifest.json"

typedef enum fsdpi_entry_kind { FSDPI_ENTRY_PARAM, FSDPI_ENTRY_STATE, FSDPI_ENTRY_I64, FSDPI_ENTRY_F64, FSDPI_ENTRY_TEXT, FSDPI_ENTRY_STEPS } fsdpi_entry_kind;

typedef struct fsdpi_entry {
    fsdpi_entry_kind kind;
    char *name;
    fsdp_unit *unit; /* PARAM, STATE, STEPS */
    int index;
    float *state;       /* STATE: the unit's array */
    fsdp_optim *optim;  /* STEPS */
    void *value;        /* I64, F64 */
    char *text;
} fsdpi_entry;

struct fsdp_checkpoint {
    fsdp_comm *comm;
    fsdpi_entry *entry;
    int count, room;
};

static inline bool fsdpi_entry_is_tensor(const fsdpi_entry *e)
{
    return e->kind == FSDPI_ENTRY_PARAM || e->kind == FSDPI_ENTRY_STATE;
}

/* The range of a tensor entry that this rank saves: [*first, *first + *numel), and the device address of its first
 * element. In mode none rank 0 has all and saves it. */
void fsdpi_entry_range(const fsdpi_entry *e, int64_t *first, int64_t *numel, float **at);
/* What this rank has to load of it: in mode none, all. */
void fsdpi_entry_kept(const fsdpi_entry *e, int64_t *first, int64_t *numel, float **at);

#endif
