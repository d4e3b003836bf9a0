/* SPDX-License-Identifier: MIT
 *
 * Setting what is registered, when all has been checked: unit by unit, from wherever the new values come. */
#ifndef FSDPI_CHECKPOINT_PUT_H
#define FSDPI_CHECKPOINT_PUT_H

#include "checkpoint/registry.h"

/* Where new values come from: elements [first, first + numel) of a tensor entry, in its type, into host memory. */
typedef fsdp_status (*fsdpi_source_fn)(const fsdpi_entry *e, int64_t first, int64_t numel, void *out, void *arg);

typedef struct fsdpi_put fsdpi_put;

/* Not collective. All memory that is needed beside the units' own. chosen[i]: whether entry i is to be set; the same on every rank. Both are borrowed. */
fsdp_status fsdpi_put_make(fsdpi_put **out, const fsdp_checkpoint *c, const bool *chosen);
void fsdpi_put_free(fsdpi_put *p); /* NULL is accepted */

/* Collective. The parameters of the unit that chosen entry `first` (the first of its unit) is of; those that are not chosen keep
 * their values. */
fsdp_status fsdpi_put_unit(fsdpi_put *p, int first, fsdpi_source_fn source, void *arg);
/* Whether entry i is the first chosen parameter of its unit. */
bool fsdpi_put_begins_unit(const fsdpi_put *p, int i);

/* Not collective, before anything is set: chosen state that its optimizer has not made, and that is to be other than 0, is made. */
fsdp_status fsdpi_put_make_states(fsdpi_put *p, fsdpi_source_fn source, void *arg);
/* Not collective. This rank's part of a STATE or BUFFER entry. State that is still not made stays so: what comes is 0. */
fsdp_status fsdpi_put_tensor(fsdpi_put *p, const fsdpi_entry *e, fsdpi_source_fn source, void *arg);

#endif
