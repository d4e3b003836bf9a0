/* SPDX-License-Identifier: MIT
 *
 * One file of tokens: where they begin, how many there are and how wide. */
#ifndef FSDPI_DATA_TOKENFILE_H
#define FSDPI_DATA_TOKENFILE_H

#include <fsdp/data.h>

#include "format/fileio.h"

/* start + tokens * width == file.bytes, and tokens >= 1. */
typedef struct fsdpi_tokenfile {
    fsdpi_file file;
    int64_t start; /* byte of the first token */
    int64_t tokens;
    int width; /* bytes of a token: 1 (text), 2 or 4 */
} fsdpi_tokenfile;

/* Opens and checks the length. format: not AUTO's result but what the user asked for. */
fsdp_status fsdpi_tokenfile_open(fsdpi_tokenfile *out, const char *path, fsdp_dataset_format format,
                                 bool keep_open);
/* A zeroed struct is accepted. */
void fsdpi_tokenfile_close(fsdpi_tokenfile *f);

/* Tokens [first, first + n) as ids. Those that are not below `limit` (at most 2^31) are FSDP_ERR_FORMAT. */
fsdp_status fsdpi_tokenfile_read(const fsdpi_tokenfile *f, int64_t first, int64_t n, int64_t limit,
                                 int32_t *out);

/* Checks every id of the file, where one could be wrong at all. */
fsdp_status fsdpi_tokenfile_check(const fsdpi_tokenfile *f, int64_t limit);

#endif
