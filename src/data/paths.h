/* SPDX-License-Identifier: MIT
 *
 * From what the user named to a list of files. */
#ifndef FSDPI_DATA_PATHS_H
#define FSDPI_DATA_PATHS_H

#include <fsdp/status.h>

typedef struct fsdpi_paths {
    char **path; /* [count] */
    int64_t count, room;
} fsdpi_paths; /* zeroed = empty */

/* The files of `count` names or patterns, in that order; those of a pattern by the bytes of their names,
 * whatever the locale. A name that exists is taken as it is, also with [ or * in it. FSDP_ERR_IO: a pattern
 * that matches nothing. */
fsdp_status fsdpi_paths_expand(fsdpi_paths *out, const char *const *names, int count);
void fsdpi_paths_free(fsdpi_paths *p);

#endif
