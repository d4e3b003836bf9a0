/* SPDX-License-Identifier: MIT
 *
 * Whole vectors between ranks outside of passes, by way of gradient windows: each rank may write its own, and read any
 * part of another's. Four calls, by every rank, in this order: open, (write), post, (read), close. */
#ifndef FSDPI_SHARD_SPREAD_H
#define FSDPI_SHARD_SPREAD_H

#include "shard/unit.h"

typedef struct fsdpi_spread {
    fsdp_unit *unit;
    fsdpi_devctx *place; /* of the window */
    fsdpi_pooled *window;
    float *buffer; /* device address of flat element 0: this rank's, to be written on the compute stream until post */
} fsdpi_spread;

/* place: where slices are kept, or sums of gradients. Collective where a window has to be made. */
fsdp_status fsdpi_spread_open(fsdpi_spread *s, fsdp_unit *u, fsdpi_devctx *place);
/* full: there is something in it. */
fsdp_status fsdpi_spread_post(fsdpi_spread *s, bool full);
/* Flat elements [from, to) of rank r's, to a device or host address. In order with the compute stream. */
fsdp_status fsdpi_spread_read(fsdpi_spread *s, int r, int64_t from, int64_t to, float *out);
fsdp_status fsdpi_spread_close(fsdpi_spread *s);

#endif
