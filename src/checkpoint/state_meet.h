/* SPDX-License-Identifier: MIT
 *
 * What all ranks know of the dictionaries that are given to a load: one outline, and which elements are where. */
#ifndef FSDPI_CHECKPOINT_STATE_MEET_H
#define FSDPI_CHECKPOINT_STATE_MEET_H

#include "checkpoint/move.h"
#include "checkpoint/state.h"

/* Collective. given: NULL where this rank has none. *s: it, or one made of another rank's outline, to be destroyed. */
fsdp_status fsdpi_state_meet(const fsdp_checkpoint *c, const fsdp_state *given, fsdp_state **s);

/* Where the elements of each entry come from. */
typedef struct fsdpi_sources {
    fsdpi_cover *cover; /* those of entry i: [at[i], at[i + 1]) */
    int *at;
    bool *zero; /* of state that an optimizer may not have made: all of it is 0. Not looked for in others */
} fsdpi_sources;

/* Collective. name[i]: of entry i in the dictionary; NULL: it is not wanted. FSDP_ERR_INVALID, on every rank: elements that are on
 * no rank; ranks that have whole tensors with different values. */
fsdp_status fsdpi_sources_find(fsdpi_sources *out, const fsdp_checkpoint *c, const fsdp_state *s, const char *const *name);
void fsdpi_sources_free(fsdpi_sources *s);

#endif
