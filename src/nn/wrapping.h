/* SPDX-License-Identifier: MIT
 *
 * A wrap that goes on: the units that it has made so far. Parameters keep their host memory until it has ended well, so that all
 * can be taken back. */
#ifndef FSDPI_NN_WRAPPING_H
#define FSDPI_NN_WRAPPING_H

#include "nn/module.h"

#include <fsdp/wrap.h>

/* A unit that was made, and who has it: a module, or several. */
typedef struct fsdpi_made_unit {
    fsdp_unit *unit;
    fsdp_module *module;
    fsdpi_joint *joint; /* NULL: module's alone */
} fsdpi_made_unit;

typedef struct fsdpi_wrapping {
    fsdp_module *root;
    fsdp_wrap_opts opts;
    fsdpi_made_unit *made;
    int count, room;
} fsdpi_wrapping;

/* What goes into units: parameters that are in none. */
typedef enum fsdpi_which { FSDPI_LARGE, FSDPI_SMALL, FSDPI_IGNORED } fsdpi_which;

/* How many parameters and elements below m would go into a unit. */
void fsdpi_wrap_measure(fsdp_module *m, const fsdp_wrap_opts *o, int *params, int64_t *numel);

/* A unit of the large parameters below the members. prefix: before their names in the unit. One member, or neighbours. */
fsdp_status fsdpi_wrap_members(fsdpi_wrapping *w, fsdp_module *const *member, const char *const *prefix, int members, const fsdp_wrap_opts *o);

/* Collective. FSDP_ERR_INVALID, on every rank, where parameters below the members are ignored on some ranks only. */
fsdp_status fsdpi_wrap_same_ignored(fsdp_comm *comm, fsdp_module *const *member, int members);

/* The modules below w->root that w->opts.policy names. */
fsdp_status fsdpi_wrap_policy(fsdpi_wrapping *w);

#endif
