/* SPDX-License-Identifier: MIT
 *
 * One save, as a thing that can be made here and run there: by the caller, or by a thread beside it. */
#ifndef FSDPI_CHECKPOINT_SAVE_H
#define FSDPI_CHECKPOINT_SAVE_H

#include "checkpoint/snapshot.h"

typedef struct fsdpi_save fsdpi_save;

/* Not collective. Everything that a save needs memory for, and the values of this moment. */
fsdp_status fsdpi_save_make(fsdpi_save **out, const fsdp_checkpoint *c, const char *folder, int64_t step, int keep);
void fsdpi_save_free(fsdpi_save *s); /* NULL is accepted */
fsdpi_snapshot *fsdpi_save_snapshot(fsdpi_save *s);
int64_t fsdpi_save_step(const fsdpi_save *s);

/* Collective over comm, which is nobody else's for the time. Gives a staged copy back as soon as it is written. */
fsdp_status fsdpi_save_run(fsdpi_save *s, fsdp_comm *comm);

#endif
