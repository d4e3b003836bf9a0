/* SPDX-License-Identifier: MIT
 *
 * Saving from a thread. What is saved is copied first (snapshot.h), so that nothing the rank does afterwards can reach it. The
 * threads of all ranks then do what ranks do in the foreground, over a communicator of their own: the same files, the same order,
 * the same agreements. So the outcome is the same on every rank, and whoever waits for his own thread knows it. */
#ifndef FSDPI_CHECKPOINT_BACKGROUND_H
#define FSDPI_CHECKPOINT_BACKGROUND_H

#include "checkpoint/save.h"

typedef struct fsdpi_background fsdpi_background;

/* Collective over c's communicator. *taken: the save is the thread's now; false, the same on every rank: one of them has no
 * room for it, and nothing was begun. */
fsdp_status fsdpi_background_begin(fsdp_checkpoint *c, fsdpi_save *save, size_t most_bytes, bool *taken);

/* Waits for the thread; the outcome stays, for fsdp_checkpoint_wait(). NULL is accepted. */
void fsdpi_background_settle(fsdpi_background *b);
void fsdpi_background_destroy(fsdpi_background *b);

#endif
