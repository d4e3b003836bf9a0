/* SPDX-License-Identifier: MIT
 *
 * What does not fit: counted, listed by class, all in one message, each list cut where it gets long. */
#ifndef FSDPI_CHECKPOINT_MISFITS_H
#define FSDPI_CHECKPOINT_MISFITS_H

#include "checkpoint/registry.h"

typedef enum fsdpi_misfit { FSDPI_MISSING, FSDPI_UNEXPECTED, FSDPI_SHAPE, FSDPI_DTYPE, FSDPI_MISFIT_COUNT } fsdpi_misfit;

typedef struct fsdpi_misfits {
    struct {
        int count, shown;
        size_t used;
        char text[184];
    } list[FSDPI_MISFIT_COUNT];
} fsdpi_misfits;

void fsdpi_misfits_add(fsdpi_misfits *m, fsdpi_misfit kind, const char *fmt, ...) FSDP_PRINTF(3, 4);
int fsdpi_misfits_total(const fsdpi_misfits *m);
/* "missing: "a", "b", and 3 more; unexpected: "c"". Returns `to`. */
const char *fsdpi_misfits_text(const fsdpi_misfits *m, char *to, size_t size);
/* report may be NULL. */
void fsdpi_misfits_report(const fsdpi_misfits *m, int loaded, fsdp_load_report *report);

/* Whether a tensor of this type and shape can be loaded into e; notes why not. */
bool fsdpi_tensor_fits(fsdpi_misfits *m, const fsdpi_entry *e, fsdp_dtype dtype, int ndim, const int64_t *shape, bool cast);

/* Unknown bits are refused. */
fsdp_status fsdpi_load_opts_check(fsdp_load_opts *to, const fsdp_load_opts *opts, const char *call);
/* In a unit that is filled, all parameters have to be known; those that are not loaded keep what they have only where that is asked
 * for. */
fsdp_status fsdpi_units_complete(const fsdp_checkpoint *c, const char *call);

#endif
