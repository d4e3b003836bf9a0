/* SPDX-License-Identifier: MIT
 *
 * Tags: how ranks notice that they do different things, and say what each did. */
#include "comm/comm.h"

#include "base/clock.h"
#include "base/error.h"
#include "comm/call.h"

#include <sched.h>
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

_Static_assert(sizeof(((fsdpi_tag *)0)->name) == sizeof(((fsdpi_rank_slot *)0)->last_name), "one is copied to the other");

const char *fsdpi_world_doing(const fsdpi_world *w, int rank, char *text, size_t bytes)
{
    const fsdpi_rank_slot *s = &w->control->rank[rank];
    uint32_t op = atomic_load_explicit(&s->last_op, memory_order_relaxed);
    bool named = op > 0 && s->last_name[0] != '\0';
    snprintf(text, bytes, "%.60s%s%s%s%.36s%s", s->phase, s->phase[0] != '\0' ? "; last operation: " : "",
             op > 0 ? fsdpi_op_name(op - 1) : "start", named ? " of \"" : "", named ? s->last_name : "", named ? "\"" : "");
    return text;
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

static uint64_t hash_at(const fsdp_comm *comm, int rank, uint64_t position)
{
    return atomic_load_explicit(&tag_at(comm, rank, position)->hash, memory_order_acquire);
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
    while (upto > low && hash_at(comm, a, upto - 1) != hash_at(comm, b, upto - 1)) upto--;
    return upto;
}

/* Whether this rank is the one to write the message. */
static bool claim_mismatch(fsdp_comm *comm)
{
    int nobody = 0;
    return atomic_compare_exchange_strong(&comm->block->mismatch_by, &nobody, comm->rank + 1);
}

static void report_mismatch(fsdp_comm *comm, int other, uint64_t upto)
{
    fsdpi_block *b = comm->block;
    if (!claim_mismatch(comm)) return;
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

static uint32_t reset_of(const fsdp_comm *comm, int rank)
{
    return atomic_load_explicit(&comm->block->member[rank].reset.value, memory_order_acquire);
}

static void report_reset(fsdp_comm *comm, int other)
{
    fsdpi_block *b = comm->block;
    if (!claim_mismatch(comm)) return;
    int n = snprintf(b->mismatch_message, sizeof(b->mismatch_message), "ranks did different things: rank %d: reset (fsdp_comm_reset); ",
                     comm->world_ranks[other]);
    uint64_t mine = fsdpi_comm_made(comm);
    describe(b->mismatch_message + n, sizeof(b->mismatch_message) - (size_t)n, comm, comm->rank, mine > 0 ? mine - 1 : 0);
    atomic_store(&b->mismatch, 1);
}

/* Whether what was read at this position was still there after it was read: a stream's thread may have slept while the
 * ranks went on. */
static bool still_there(const fsdp_comm *comm, int rank, uint64_t position)
{
    return tags_of(comm, rank) < position + FSDPI_TAGS;
}

/* Whether two ranks differ in what both have made. */
static bool differ(const fsdp_comm *comm, int a, int b, uint64_t *both)
{
    uint64_t of_a = tags_of(comm, a), of_b = tags_of(comm, b);
    *both = of_a < of_b ? of_a : of_b;
    return *both > 0 && hash_at(comm, a, *both - 1) != hash_at(comm, b, *both - 1) && still_there(comm, a, *both - 1) &&
           still_there(comm, b, *both - 1);
}

void fsdpi_comm_compare(fsdp_comm *comm)
{
    uint32_t resets = reset_of(comm, comm->rank);
    for (int r = 0; r < comm->size; r++) {
        uint64_t both;
        if (r == comm->rank) continue;
        if ((int32_t)(reset_of(comm, r) - resets) > 0) report_reset(comm, r);
        if (differ(comm, comm->rank, r, &both)) report_mismatch(comm, r, both - 1);
    }
}

uint64_t fsdpi_comm_made(const fsdp_comm *comm)
{
    return tags_of(comm, comm->rank);
}

static bool is_resetting(const fsdp_comm *comm, int rank)
{
    return reset_of(comm, rank) % FSDPI_RESET_STEPS != 0;
}

/* Up to the last meeting that one rank has got through, all ranks have done the same, and well. */
static uint64_t met(const fsdp_comm *comm)
{
    uint64_t most = 0;
    for (int r = 0; r < comm->size; r++) {
        uint64_t m = atomic_load_explicit(&comm->block->member[r].met, memory_order_acquire);
        most = m > most ? m : most;
    }
    return most;
}

fsdp_status fsdpi_comm_check(fsdp_comm *comm, uint64_t made)
{
    fsdpi_control *c = comm->world->control;
    fsdpi_block *b = comm->block;
    FSDP_FAIL_IF(atomic_load_explicit(&c->abort, memory_order_acquire) != 0, FSDP_ERR_PEER, "%s", c->abort_message);
    bool resets = is_resetting(comm, comm->rank);
    if (!resets && atomic_load_explicit(&b->mismatch_by, memory_order_acquire) == 0) return FSDP_OK;
    /* Its writer is at it; for long only where it has died, and then something else is wrong as well. */
    for (int64_t start = fsdpi_now_ns(); !resets && atomic_load(&b->mismatch) == 0 && fsdpi_now_ns() - start < 1000000000;) sched_yield();
    if (made <= met(comm)) return FSDP_OK;
    FSDP_FAIL_IF(atomic_load(&b->mismatch) == 0, FSDP_ERR_COMM, "fsdp_comm_reset() was called");
    FSDP_FAIL(FSDP_ERR_COMM, "%s", b->mismatch_message);
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
            fsdpi_comm_compare(comm);
            FSDP_TRY(fsdpi_comm_check(comm, position + 1));
            FSDP_TRY(fsdpi_comm_check_peer(comm, r, waited, "its turn, far ahead of the others"));
            nanosleep(&nap, NULL);
        }
    }
    return FSDP_OK;
}

bool fsdpi_comm_did(const fsdp_comm *comm, int rank, uint64_t position, fsdpi_tag *out)
{
    if (tags_of(comm, rank) <= position) return false;
    const fsdpi_tag *t = tag_at(comm, rank, position);
    *out = (fsdpi_tag){ .bytes = t->bytes, .step = t->step, .op = t->op, .who = t->who };
    memcpy(out->name, t->name, sizeof(out->name));
    return true;
}

fsdp_status fsdpi_comm_tag(fsdp_comm *comm, fsdpi_op op, const char *name, uint64_t bytes)
{
    return fsdpi_comm_tag_of(comm, op, name, bytes, 0);
}

fsdp_status fsdpi_comm_tag_of(fsdp_comm *comm, fsdpi_op op, const char *name, uint64_t bytes, uint32_t who)
{
    FSDPI_CALL_AS(comm, fsdpi_op_name(op));
    fsdpi_member *me = &comm->block->member[comm->rank];
    fsdpi_rank_slot *slot = &comm->world->control->rank[comm->world_rank];
    uint64_t position = atomic_load_explicit(&me->tags, memory_order_relaxed);
    FSDP_TRY(fsdpi_comm_check(comm, position + 1));
    FSDP_TRY(keep_pace(comm, position));
    fsdpi_tag *t = &me->ring[position % FSDPI_TAGS];
    t->op = op;
    t->who = who;
    t->bytes = bytes;
    t->step = atomic_load_explicit(&slot->step, memory_order_relaxed);
    snprintf(t->name, sizeof(t->name), "%s", name != NULL ? name : "");
    comm->hash = mix_text(mix(mix(comm->hash, op | (uint64_t)who << 32), bytes), name != NULL ? name : "");
    atomic_store_explicit(&t->hash, comm->hash, memory_order_release);
    atomic_store_explicit(&me->tags, position + 1, memory_order_release);
    if (!comm->aside) {
        atomic_store_explicit(&slot->last_op, op + 1, memory_order_relaxed);
        memcpy(slot->last_name, t->name, sizeof(slot->last_name));
    }
    atomic_fetch_add_explicit(&slot->beats, 1, memory_order_relaxed);
    return FSDP_OK;
}
