/* SPDX-License-Identifier: MIT
 *
 * Tags: how ranks notice that they do different things, and say what each did. */
#include "comm/comm.h"

#include "base/error.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static const char *const op_names[] = {
#define NAME(e, name) [e] = name,
    FSDPI_OP_MAP(NAME)
#undef NAME
};

const char *fsdpi_op_name(unsigned op)
{
    return op < sizeof(op_names) / sizeof(op_names[0]) ? op_names[op] : "?";
}

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
}

static uint64_t mix_text(uint64_t h, const char *s)
{
    for (; *s != '\0'; s++) h = (h ^ (unsigned char)*s) * 0x100000001b3u;
    return mix(h, 0);
}

static uint64_t tags_of(const fsdp_comm *comm, int rank)
{
    return atomic_load_explicit(&comm->block->member[rank].tags, memory_order_acquire);
}

static const fsdpi_tag *tag_at(const fsdp_comm *comm, int rank, uint64_t position)
{
    return &comm->block->member[rank].ring[position % FSDPI_TAGS];
}

static int describe(char *to, size_t size, const fsdp_comm *comm, int rank, uint64_t position)
{
    if (tags_of(comm, rank) <= position)
        return snprintf(to, size, "rank %d: nothing yet", comm->world_ranks[rank]);
    const fsdpi_tag *t = tag_at(comm, rank, position);
    int n = snprintf(to, size, "rank %d: %s", comm->world_ranks[rank], fsdpi_op_name(t->op));
    if (t->name[0] != '\0') n += snprintf(to + n, size - (size_t)n, " of \"%.*s\"", (int)sizeof(t->name), t->name);
    n += snprintf(to + n, size - (size_t)n, " (%llu bytes, step %lld)", (unsigned long long)t->bytes, (long long)t->step);
    return n;
}

/* The first position at which two ranks differ, given that they do at `upto`. */
static uint64_t first_difference(const fsdp_comm *comm, int a, int b, uint64_t upto)
{
    uint64_t low = upto >= FSDPI_TAGS / 2 ? upto - FSDPI_TAGS / 2 : 0;
    while (upto > low && tag_at(comm, a, upto - 1)->hash != tag_at(comm, b, upto - 1)->hash) upto--;
    return upto;
}

static void report_mismatch(fsdp_comm *comm, int other, uint64_t upto)
{
    fsdpi_block *b = comm->block;
    int nobody = 0;
    if (!atomic_compare_exchange_strong(&b->mismatch_by, &nobody, comm->rank + 1)) return;
    uint64_t at = first_difference(comm, comm->rank, other, upto);
    char *to = b->mismatch_message;
    size_t size = sizeof(b->mismatch_message);
    int n = snprintf(to, size, "ranks did different things at operation %llu: ", (unsigned long long)at);
    int lower = comm->rank < other ? comm->rank : other, upper = comm->rank < other ? other : comm->rank;
    n += describe(to + n, size - (size_t)n, comm, lower, at);
    n += snprintf(to + n, size - (size_t)n, "; ");
    n += describe(to + n, size - (size_t)n, comm, upper, at);
    snprintf(to + n, size - (size_t)n, ". Every rank must make the same calls in the same order");
    atomic_store(&b->mismatch, 1);
}

fsdp_status fsdpi_comm_check(fsdp_comm *comm)
{
    fsdpi_control *c = comm->world->control;
    FSDP_FAIL_IF(atomic_load_explicit(&c->abort, memory_order_acquire) != 0, FSDP_ERR_PEER, "%s", c->abort_message);
    if (atomic_load_explicit(&comm->block->mismatch_by, memory_order_acquire) == 0) return FSDP_OK;
    for (int i = 0; atomic_load(&comm->block->mismatch) == 0 && i < 1000000; i++) { /* its writer is at it */
    }
    FSDP_FAIL(FSDP_ERR_COMM, "%s", comm->block->mismatch_message);
}

fsdp_status fsdpi_comm_compare(fsdp_comm *comm)
{
    uint64_t mine = tags_of(comm, comm->rank);
    for (int r = 0; r < comm->size; r++) {
        uint64_t theirs = tags_of(comm, r), upto = mine < theirs ? mine : theirs;
        if (r == comm->rank || upto == 0) continue;
        uint64_t ahead = mine > theirs ? mine - theirs : theirs - mine;
        if (ahead >= FSDPI_TAGS / 2 + 1) continue; /* it waits, or we do, in fsdpi_comm_tag */
        if (tag_at(comm, comm->rank, upto - 1)->hash != tag_at(comm, r, upto - 1)->hash)
            report_mismatch(comm, r, upto - 1);
    }
    return fsdpi_comm_check(comm);
}

/* Nobody may be more than 3/8 of a ring ahead of the slowest. The others are looked at every eighth of a ring. So what
 * a rank reads in another's ring, at most 3/8 behind its own position, is written over only when it has gone on: with
 * n = FSDPI_TAGS / 8, position x < n (k + 1) of rank b is read by a rank that is at n (k + 4) at most, and b writes
 * x + 8 n only after it has seen that rank at n (k + 6). */
static fsdp_status keep_pace(fsdp_comm *comm, uint64_t position)
{
    if (position % (FSDPI_TAGS / 8) != 0 || position < FSDPI_TAGS / 4) return FSDP_OK;
    uint64_t least = position - FSDPI_TAGS / 4;
    for (int r = 0; r < comm->size; r++) {
        if (r == comm->rank || tags_of(comm, r) >= least) continue;
        /* Not a counter: this wait is rare, and must not cost every tag a wake-up. */
        const struct timespec nap = { .tv_nsec = 500 * 1000 };
        for (int64_t waited = 0; tags_of(comm, r) < least; waited += nap.tv_nsec) {
            FSDP_TRY(fsdpi_comm_compare(comm));
            FSDP_TRY(fsdpi_comm_check_peer(comm, r, waited, "its turn, far ahead of the others"));
            nanosleep(&nap, NULL);
        }
    }
    return FSDP_OK;
}

fsdp_status fsdpi_comm_tag(fsdp_comm *comm, fsdpi_op op, const char *name, uint64_t bytes)
{
    FSDP_TRY(fsdpi_comm_check(comm));
    fsdpi_member *me = &comm->block->member[comm->rank];
    fsdpi_rank_slot *slot = &comm->world->control->rank[comm->world_rank];
    uint64_t position = atomic_load_explicit(&me->tags, memory_order_relaxed);
    FSDP_TRY(keep_pace(comm, position));
    fsdpi_tag *t = &me->ring[position % FSDPI_TAGS];
    t->op = op;
    t->bytes = bytes;
    t->step = atomic_load_explicit(&slot->step, memory_order_relaxed);
    snprintf(t->name, sizeof(t->name), "%s", name != NULL ? name : "");
    comm->hash = mix_text(mix(mix(comm->hash, op), bytes), name != NULL ? name : "");
    t->hash = comm->hash;
    atomic_store_explicit(&me->tags, position + 1, memory_order_release);
    atomic_fetch_add_explicit(&slot->beats, 1, memory_order_relaxed);
    return FSDP_OK;
}
