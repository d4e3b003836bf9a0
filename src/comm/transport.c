/* SPDX-License-Identifier: MIT
 *
 * The list of transports. */
#include "comm/transport.h"

#include <string.h>

static const fsdpi_transport_ops *const transports[] = { &fsdpi_transport_self, &fsdpi_transport_shm, &fsdpi_transport_copy };

fsdp_status fsdpi_transport_find(const fsdpi_transport_ops **out, const char *name, int ranks)
{
    if (name == NULL || name[0] == '\0') {
        *out = ranks > 1 ? &fsdpi_transport_shm : &fsdpi_transport_self;
        return FSDP_OK;
    }
    for (size_t i = 0; i < sizeof(transports) / sizeof(transports[0]); i++) {
        if (strcmp(transports[i]->name, name) != 0) continue;
        FSDP_FAIL_IF(transports[i] == &fsdpi_transport_self && ranks > 1, FSDP_ERR_INVALID,
                     "transport \"self\" is for one rank, not %d: use \"shm\"", ranks);
        *out = transports[i];
        return FSDP_OK;
    }
    FSDP_FAIL(FSDP_ERR_INVALID, "no transport is called \"%s\"; there are: self, shm, copy", name);
}
