/* SPDX-License-Identifier: MIT
 *
 * Work in pieces that can fail: the error of the first piece that fails on any thread is brought to the
 * caller's. */
#ifndef FSDPI_OPS_PIECES_H
#define FSDPI_OPS_PIECES_H

#include "base/error.h"
#include "device/device.h"

#include <stdatomic.h>

typedef struct fsdpi_pieces {
    _Atomic bool failed;
    fsdpi_error error; /* written by the piece that set `failed` */
} fsdpi_pieces;

/* In a piece: keeps the error that is on its way in this thread. */
static inline void fsdpi_pieces_fail(fsdpi_pieces *p)
{
    if (!atomic_exchange(&p->failed, true)) fsdpi_error_save(&p->error);
}

/* After the pieces have run. */
static inline fsdp_status fsdpi_pieces_status(const fsdpi_pieces *p)
{
    if (!atomic_load(&p->failed)) return FSDP_OK;
    fsdpi_error_restore(&p->error);
    return p->error.st;
}

/* How many pieces of `each` cover n. */
static inline int64_t fsdpi_piece_count(int64_t n, int64_t each)
{
    return (n + each - 1) / each;
}

static inline int64_t fsdpi_piece_end(int64_t start, int64_t each, int64_t n)
{
    return start + each < n ? start + each : n;
}

#endif
