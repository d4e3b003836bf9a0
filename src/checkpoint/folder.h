/* SPDX-License-Identifier: MIT
 *
 * Folders of checkpoints: what is complete, what is not, and how one appears and goes. */
#ifndef FSDPI_CHECKPOINT_FOLDER_H
#define FSDPI_CHECKPOINT_FOLDER_H

#include <fsdp/status.h>

#include <stdint.h>
#include <stdio.h>

/* "rank-00002-of-00003.safetensors" */
static inline void fsdpi_shard_name(char *to, size_t size, int rank, int ranks)
{
    snprintf(to, size, "rank-%05d-of-%05d.safetensors", rank, ranks);
}

/* Makes `folder` (and those above), and `temp` in it, empty: what killed saves left in `folder` is removed. */
fsdp_status fsdpi_folder_prepare(const char *folder, const char *temp);
/* Gives temp its final name, in place of one that has it. */
fsdp_status fsdpi_folder_publish(const char *folder, const char *temp, const char *final);
/* Removes a checkpoint's folder and the files in it: the manifest first, so that half a folder is never taken for a whole. */
void fsdpi_folder_remove(const char *path);
/* Keeps the newest `keep` complete checkpoints, and that of step `saved` where it is older (a run that went back); removes
 * the others, and those that are not whole. */
void fsdpi_folder_prune(const char *folder, int keep, int64_t saved);

/* The manifest's text without its checksum, verified; in place. */
fsdp_status fsdpi_manifest_checked(char *text, size_t size, const char *path);

#endif
