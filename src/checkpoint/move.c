/* SPDX-License-Identifier: MIT */
#include "checkpoint/move.h"

#include "base/error.h"

#include <string.h>

static int64_t per_chunk(const fsdpi_move *m)
{
    return FSDPI_SLOT / (int64_t)m->size;
}

static int64_t chunks_of(const fsdpi_move *m, int rank)
{
    int64_t n = 0, per = per_chunk(m);
    for (int i = 0; i < m->covers; i++)
        if (m->cover[i].rank == rank) n += (m->cover[i].numel + per - 1) / per;
    return n;
}

/* The k-th chunk that a rank tells; numel 0: it has told all. */
static fsdpi_cover chunk_at(const fsdpi_move *m, int rank, int64_t k)
{
    int64_t per = per_chunk(m);
    for (int i = 0; i < m->covers; i++) {
        const fsdpi_cover *c = &m->cover[i];
        if (c->rank != rank) continue;
        int64_t chunks = (c->numel + per - 1) / per;
        if (k >= chunks) {
            k -= chunks;
            continue;
        }
        int64_t left = c->numel - k * per;
        return (fsdpi_cover){ rank, c->first + k * per, left < per ? left : per };
    }
    return (fsdpi_cover){ .rank = rank };
}

static void take(const fsdpi_move *m, const fsdpi_cover *c)
{
    int64_t lo = c->first > m->first ? c->first : m->first;
    int64_t hi = c->first + c->numel < m->first + m->numel ? c->first + c->numel : m->first + m->numel;
    if (lo >= hi) return;
    const char *told = fsdpi_comm_told(m->comm, c->rank);
    memcpy((char *)m->out + (size_t)(lo - m->first) * m->size, told + (size_t)(lo - c->first) * m->size, (size_t)(hi - lo) * m->size);
}

fsdp_status fsdpi_move_run(const fsdpi_move *m)
{
    _Alignas(16) char mine[FSDPI_SLOT];
    fsdp_status st = FSDP_OK;
    int64_t rounds = 0;
    for (int r = 0; r < m->comm->size; r++) {
        int64_t n = chunks_of(m, r);
        rounds = n > rounds ? n : rounds;
    }
    for (int64_t k = 0; k < rounds; k++) {
        int64_t most = 0; /* what is told has one length on all ranks */
        for (int r = 0; r < m->comm->size; r++) {
            fsdpi_cover c = chunk_at(m, r, k);
            most = c.numel > most ? c.numel : most;
        }
        fsdpi_cover c = chunk_at(m, m->comm->rank, k);
        if ((size_t)c.numel < (size_t)most) memset(mine, 0, (size_t)most * m->size);
        if (c.numel > 0 && st == FSDP_OK) st = m->have(m->arg, c.first, c.numel, mine);
        fsdp_status told = fsdpi_comm_tell(m->comm, m->op, m->name, mine, (size_t)most * m->size);
        if (told != FSDP_OK) return fsdp_error_through(told, __func__, __FILE__, __LINE__);
        for (int r = 0; r < m->comm->size && m->numel > 0; r++) {
            c = chunk_at(m, r, k);
            if (c.numel > 0) take(m, &c);
        }
    }
    return st;
}
