/* SPDX-License-Identifier: MIT */
#include "device/arena.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdint.h>

typedef struct block {
    struct block *next; /* in its hash chain when live, in its list when free */
    void *p;
    size_t bytes; /* its size */
    size_t want;  /* what the present user asked for */
} block;

enum { CHAINS = 512 };

struct fsdpi_arena {
    fsdp_device *dev;
    block *live[CHAINS]; /* by address */
    block *free;         /* latest first; oldest first where rotate */
    bool rotate;
    fsdpi_arena_stats stats;
};

static unsigned chain_of(const void *p)
{
    return (unsigned)(((uintptr_t)p >> 12) * 2654435761u >> 16) % CHAINS;
}

fsdp_status fsdpi_arena_create(fsdpi_arena **out, fsdp_device *dev)
{
    fsdpi_arena *a;
    FSDPI_NEW(a, 1);
    a->dev = dev;
    *out = a;
    return FSDP_OK;
}

void fsdpi_arena_trim(fsdpi_arena *a)
{
    for (block *b = a->free, *next; b != NULL; b = next) {
        next = b->next;
        a->dev->ops->free(a->dev, b->p, b->bytes);
        a->stats.bytes_held -= b->bytes;
        fsdpi_free(b);
    }
    a->free = NULL;
}

void fsdpi_arena_destroy(fsdpi_arena *a)
{
    if (a == NULL) return;
    for (int i = 0; i < CHAINS; i++) { /* after an error some blocks are still out: they go with the arena */
        while (a->live[i] != NULL) {
            block *b = a->live[i];
            a->live[i] = b->next;
            b->next = a->free;
            a->free = b;
        }
    }
    fsdpi_arena_trim(a);
    fsdpi_free(a);
}

/* A block is at least a page and a multiple of 1/8 of its size's power of two, so that near sizes share blocks. */
static size_t class_of(size_t bytes)
{
    size_t page = fsdpi_page_size(), step = page;
    while (step * 16 < bytes) step *= 2;
    return bytes == 0 ? page : fsdpi_round_up(bytes, step);
}

fsdp_status fsdpi_arena_alloc(fsdpi_arena *a, size_t bytes, void **out)
{
    size_t want = class_of(bytes);
    block **best = NULL;
    for (block **b = &a->free; *b != NULL; b = &(*b)->next) {
        if ((*b)->bytes < want || (*b)->bytes > want + want / 4) continue;
        if (best == NULL || (*b)->bytes < (*best)->bytes) best = b;
        if ((*best)->bytes == want) break;
    }
    block *b;
    if (best != NULL) {
        b = *best;
        *best = b->next;
    } else {
        FSDPI_NEW(b, 1);
        fsdp_status st = a->dev->ops->alloc(a->dev, want, &b->p);
        if (st == FSDP_ERR_NOMEM && !a->dev->ops->async) { /* queued work may still use a free block */
            fsdpi_arena_trim(a);
            st = a->dev->ops->alloc(a->dev, want, &b->p);
        }
        if (st != FSDP_OK) {
            fsdpi_free(b);
            return fsdp_error_through(st, __func__, __FILE__, __LINE__);
        }
        b->bytes = want;
        a->stats.bytes_held += want;
        a->stats.system_allocs++;
    }
    b->want = bytes;
    unsigned c = chain_of(b->p);
    b->next = a->live[c];
    a->live[c] = b;
    a->stats.bytes_live += bytes;
    if (a->stats.bytes_live > a->stats.bytes_live_peak) a->stats.bytes_live_peak = a->stats.bytes_live;
    *out = b->p;
    return FSDP_OK;
}

void fsdpi_arena_free(fsdpi_arena *a, void *p)
{
    if (p == NULL) return;
    for (block **b = &a->live[chain_of(p)]; *b != NULL; b = &(*b)->next) {
        if ((*b)->p != p) continue;
        block *f = *b;
        *b = f->next;
        a->stats.bytes_live -= f->want;
        block **at = &a->free;
        if (a->rotate)
            while (*at != NULL) at = &(*at)->next;
        f->next = *at;
        *at = f;
        return;
    }
    FSDPI_ASSERT(!"a block of this arena");
}

fsdpi_arena_stats fsdpi_arena_get_stats(const fsdpi_arena *a)
{
    return a->stats;
}

void fsdpi_arena_reset_peak(fsdpi_arena *a)
{
    a->stats.bytes_live_peak = a->stats.bytes_live;
}

fsdp_device *fsdpi_arena_device(const fsdpi_arena *a)
{
    return a->dev;
}

void fsdpi_arena_rotate(fsdpi_arena *a, bool on)
{
    a->rotate = on;
}
