/* SPDX-License-Identifier: MIT
 *
 * What a file that is not what it should be really is. Most "malformed" files are downloads that went wrong
 * or checkpoints of another kind, and a message that says so saves an hour. */
#ifndef FSDPI_FORMAT_GUESS_H
#define FSDPI_FORMAT_GUESS_H

#include <stdbool.h>
#include <stddef.h>

typedef enum fsdpi_kind {
    FSDPI_KIND_UNKNOWN,
    FSDPI_KIND_LFS_POINTER,
    FSDPI_KIND_HTML,
    FSDPI_KIND_ZIP,
    FSDPI_KIND_PICKLE,
    FSDPI_KIND_GGUF,
    FSDPI_KIND_HDF5,
    FSDPI_KIND_NPY,
    FSDPI_KIND_GZIP,
    FSDPI_KIND_ZSTD,
    FSDPI_KIND_SAFETENSORS,
    FSDPI_KIND_JSON,
    FSDPI_KIND_ZEROS,
    FSDPI_KIND_COUNT
} fsdpi_kind;

enum { FSDPI_GUESS_BYTES = 64 }; /* how much of the file's head is looked at */

/* From the first n bytes of a file. A guess: ask only once the file was found wrong (the first bytes of a
 * good safetensors file may be those of a pickle), or for the kinds that fsdpi_kind_is_certain(). */
fsdpi_kind fsdpi_guess_kind(const void *head, size_t n);

/* "a git-lfs pointer, not the data itself (run git lfs pull)"; NULL for FSDPI_KIND_UNKNOWN. */
const char *fsdpi_kind_text(fsdpi_kind kind);

/* Whether the magic is so long that neither a text nor a list of token ids begins so by chance. */
bool fsdpi_kind_is_certain(fsdpi_kind kind);

#endif
