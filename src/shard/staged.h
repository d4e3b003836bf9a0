/* SPDX-License-Identifier: MIT
 *
 * New values of a unit, parameter by parameter, beside the old ones: begin, read and put in any number, then commit on all
 * ranks or drop. Between read and put a parameter is whole in host memory; of the rest this rank keeps its slice. */
#ifndef FSDPI_SHARD_STAGED_H
#define FSDPI_SHARD_STAGED_H

#include "shard/unit.h"

typedef struct fsdpi_staged {
    fsdp_unit *unit;
    float *kept;    /* arena block: what this rank keeps */
    uint64_t *hash; /* of what was put, per parameter: to compare ranks */
    bool *put;
} fsdpi_staged;

/* By this rank alone. FSDP_ERR_STATE where values cannot be set now. */
fsdp_status fsdpi_staged_begin(fsdpi_staged *s, fsdp_unit *u);
/* By this rank alone. whole: host memory. */
fsdp_status fsdpi_staged_put(fsdpi_staged *s, int param, const float *whole);
/* Collective. Publishes, and says where ranks put different values. Then, or instead, drop it. */
fsdp_status fsdpi_staged_commit(fsdpi_staged *s);
void fsdpi_staged_drop(fsdpi_staged *s);

#endif
