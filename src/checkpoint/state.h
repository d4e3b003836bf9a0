/* SPDX-License-Identifier: MIT
 *
 * A state dictionary, from the inside: a list of pieces, a list of numbers and texts, and second names. Pieces of one name need not
 * lie side by side. */
#ifndef FSDPI_CHECKPOINT_STATE_H
#define FSDPI_CHECKPOINT_STATE_H

#include "checkpoint/registry.h"

#include <jansson.h>

struct fsdp_state {
    fsdp_state_kind kind;
    fsdp_state_tensor *tensor;
    int count, room;
    json_t *values, *aliases; /* objects: name -> number or text; name -> name */
};

/* A piece with room for its elements, whose values are the caller's to write: (*out)->data. Copies the name. */
fsdp_status fsdpi_state_new_piece(fsdp_state *s, const fsdp_state_tensor *like, fsdp_state_tensor **out);

/* Everything but elements and values of numbers: what must be the same on all ranks. Text, to be freed with free(); NULL: no memory. */
char *fsdpi_state_outline(const fsdp_state *s);
/* A dictionary of that outline, with no elements. */
fsdp_status fsdpi_state_from_outline(fsdp_state **out, const char *text);

json_t *fsdpi_state_real(double x);

#endif
