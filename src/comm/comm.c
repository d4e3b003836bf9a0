/* SPDX-License-Identifier: MIT
 *
 * The communicator: waits, the exchange, and the small collectives that are made of it. */
#include "comm/comm.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/xsum.h"
#include "comm/transport.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

size_t fsdpi_comm_block_bytes(int size)
{
    return fsdpi_round_up(sizeof(fsdpi_block) + (size_t)size * sizeof(fsdpi_member), fsdpi_page_size());
}

fsdp_status fsdpi_comm_create(fsdp_comm **out, fsdpi_world *world, const fsdpi_transport_ops *transport,
                              const int *world_ranks, int size, int rank, size_t block_offset)
{
    fsdp_status st;
    fsdp_comm *c;
    FSDPI_NEW(c, 1);
    *c = (fsdp_comm){ .world = world,
                      .transport = transport,
                      .size = size,
                      .rank = rank,
                      .world_rank = world_ranks[rank],
                      .block_offset = block_offset,
                      .block_bytes = fsdpi_comm_block_bytes(size) };
    c->world_ranks = fsdpi_calloc((size_t)size, sizeof(*c->world_ranks));
    if (c->world_ranks == NULL) FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, free_comm, "no memory for a communicator of %d ranks", size);
    memcpy(c->world_ranks, world_ranks, (size_t)size * sizeof(*world_ranks));
    void *block;
    FSDP_TRY_GOTO(fsdpi_comm_heap_map(c, c->block_offset, c->block_bytes, &block), free_ranks);
    c->block = block;
    *out = c;
    return FSDP_OK;
free_ranks:
    fsdpi_free(c->world_ranks);
free_comm:
    fsdpi_free(c);
    return st;
}

void fsdp_comm_destroy(fsdp_comm *comm)
{
    if (comm == NULL) return;
    if (comm->attached != NULL) comm->attached_destroy(comm->attached);
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    fsdpi_world *world = comm->world;
    /* The world's own block, the first of the heap, stays: its ranks may join again. */
    bool last = comm->block_offset > 0 && atomic_fetch_add(&comm->block->left, 1) + 1 == comm->size;
    fsdpi_comm_heap_unmap(comm, comm->block, comm->block_bytes);
    if (last) fsdpi_heap_free(world, comm->block_offset, comm->block_bytes);
    bool owns = comm->owns_world;
    fsdpi_free(comm->world_ranks);
    fsdpi_free(comm);
    if (owns) {
        fsdpi_world_destroy(world);
        fsdpi_free(world);
    }
    fsdpi_error_restore(&kept);
}

int fsdp_comm_rank(const fsdp_comm *comm)
{
    return comm->rank;
}

int fsdp_comm_size(const fsdp_comm *comm)
{
    return comm->size;
}

int fsdp_comm_threads(const fsdp_comm *comm)
{
    int n = comm->world->control->threads;
    return n > 0 ? n : 1;
}

const char *fsdp_comm_transport(const fsdp_comm *comm)
{
    return comm->transport->name;
}

void fsdp_comm_get_stats(const fsdp_comm *comm, fsdp_comm_stats *out)
{
    *out = comm->stats;
}

void fsdp_comm_set_step(fsdp_comm *comm, int64_t step)
{
    atomic_store_explicit(&comm->world->control->rank[comm->world_rank].step, step, memory_order_relaxed);
}

void fsdp_comm_set_phase(fsdp_comm *comm, const char *phase)
{
    fsdpi_rank_slot *slot = &comm->world->control->rank[comm->world_rank];
    snprintf(slot->doing, sizeof(slot->doing), "%s", phase);
}

/* ---- waiting ---- */

fsdp_status fsdpi_comm_check_peer(fsdp_comm *comm, int for_rank, int64_t waited_ns, const char *what)
{
    FSDP_TRY(fsdpi_comm_check(comm));
    fsdpi_control *c = comm->world->control;
    int r = comm->world_ranks[for_rank];
    int state = atomic_load_explicit(&c->rank[r].state, memory_order_acquire);
    FSDP_FAIL_IF(state == FSDPI_RANK_DONE && waited_ns > 0, FSDP_ERR_COMM,
                 "rank %d waits for rank %d in %s, but rank %d has finished: it made fewer calls", comm->world_rank, r, what,
                 r);
    FSDP_FAIL_IF(state == FSDPI_RANK_FAILED || state == FSDPI_RANK_DEAD, FSDP_ERR_PEER, "rank %d is gone", r);
    if (c->stuck_ns < 0 || waited_ns < c->stuck_ns) return FSDP_OK;
    fsdpi_world_abort(comm->world, comm->world_rank,
                      "rank %d waited %.0f s for rank %d in %s (step %lld); rank %d was last in: %.90s (step %lld). "
                      "If that is slow and not stuck, raise the time-out",
                      comm->world_rank, (double)waited_ns * 1e-9, r, what,
                      (long long)atomic_load(&c->rank[comm->world_rank].step), r, c->rank[r].doing,
                      (long long)atomic_load(&c->rank[r].step));
    return fsdpi_comm_check(comm);
}

typedef struct wait_arg {
    fsdp_comm *comm;
    int for_rank;
    const char *what;
} wait_arg;

static fsdp_status check_wait(void *arg, int64_t waited_ns)
{
    wait_arg *w = arg;
    FSDP_TRY(fsdpi_comm_compare(w->comm));
    return fsdpi_comm_check_peer(w->comm, w->for_rank, waited_ns, w->what);
}

fsdp_status fsdpi_comm_wait(fsdp_comm *comm, fsdpi_counter *c, uint32_t at_least, int for_rank, const char *what)
{
    if (fsdpi_counter_reached(c, at_least)) return FSDP_OK;
    int64_t start = fsdpi_now_ns();
    fsdp_status st = fsdpi_counter_wait(c, at_least, check_wait, &(wait_arg){ comm, for_rank, what });
    __atomic_fetch_add(&comm->stats.wait_ns, (uint64_t)(fsdpi_now_ns() - start), __ATOMIC_RELAXED);
    if (st != FSDP_OK) return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    return FSDP_OK;
}

/* ---- the exchange ---- */

/* One chunk: at most FSDPI_SLOT bytes. A slot is written again two exchanges later: by then every rank has arrived at
 * the exchange between, so it has read this one. */
static fsdp_status exchange_chunk(fsdp_comm *comm, fsdpi_op op, const char *name, const void *in, size_t bytes,
                                  unsigned char *out, size_t stride)
{
    FSDP_TRY(fsdpi_comm_tag(comm, op, name, bytes));
    uint32_t n = ++comm->exchanges;
    fsdpi_member *me = &comm->block->member[comm->rank];
    me->slot[n % 2].hash = comm->hash;
    if (bytes > 0) memcpy(me->slot[n % 2].data, in, bytes);
    fsdpi_counter_set(&me->arrived, n);
    for (int r = 0; r < comm->size; r++) {
        fsdpi_member *m = &comm->block->member[r];
        FSDP_TRY(fsdpi_comm_wait(comm, &m->arrived, n, r, fsdpi_op_name(op)));
        if (m->slot[n % 2].hash != comm->hash) {
            FSDP_TRY(fsdpi_comm_compare(comm));
            FSDP_FAIL(FSDP_ERR_COMM, "ranks %d and %d disagree in %s", comm->world_rank, comm->world_ranks[r],
                      fsdpi_op_name(op));
        }
        if (bytes > 0) memcpy(out + (size_t)r * stride, m->slot[n % 2].data, bytes);
    }
    return FSDP_OK;
}

fsdp_status fsdpi_comm_exchange(fsdp_comm *comm, fsdpi_op op, const char *name, const void *in, size_t bytes, void *out)
{
    comm->stats.exchanges++;
    for (size_t at = 0; at == 0 || at < bytes; at += FSDPI_SLOT) {
        size_t n = bytes - at < FSDPI_SLOT ? bytes - at : FSDPI_SLOT;
        FSDP_TRY(exchange_chunk(comm, op, name, (const unsigned char *)in + at, n, (unsigned char *)out + at, bytes));
    }
    return FSDP_OK;
}

fsdp_status fsdp_comm_barrier(fsdp_comm *comm)
{
    return fsdpi_comm_exchange(comm, FSDPI_OP_BARRIER, NULL, "", 0, NULL);
}

fsdp_status fsdp_comm_all_gather(fsdp_comm *comm, const void *in, size_t bytes, void *out)
{
    return fsdpi_comm_exchange(comm, FSDPI_OP_ALL_GATHER, NULL, in, bytes, out);
}

fsdp_status fsdp_comm_broadcast(fsdp_comm *comm, void *data, size_t bytes, int root)
{
    FSDP_FAIL_IF(root < 0 || root >= comm->size, FSDP_ERR_INVALID, "fsdp_comm_broadcast: root %d of %d ranks", root,
                 comm->size);
    unsigned char *all;
    FSDPI_NEW(all, (size_t)comm->size * FSDPI_SLOT);
    fsdp_status st = FSDP_OK;
    comm->stats.exchanges++;
    for (size_t at = 0; st == FSDP_OK && (at == 0 || at < bytes); at += FSDPI_SLOT) {
        size_t n = bytes - at < FSDPI_SLOT ? bytes - at : FSDPI_SLOT;
        st = exchange_chunk(comm, FSDPI_OP_BROADCAST, NULL, (char *)data + at, n, all, FSDPI_SLOT);
        if (st == FSDP_OK) memcpy((char *)data + at, all + (size_t)root * FSDPI_SLOT, n);
    }
    fsdpi_free(all);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

fsdp_status fsdp_comm_sum_exact(fsdp_comm *comm, double *x, int n)
{
    double *all;
    FSDPI_NEW(all, (size_t)comm->size * (size_t)(n > 0 ? n : 0));
    fsdp_status st = fsdpi_comm_exchange(comm, FSDPI_OP_SUM, NULL, x, (size_t)n * sizeof(*x), all);
    for (int i = 0; i < n && st == FSDP_OK; i++) {
        fsdpi_xsum s = { 0 };
        for (int r = 0; r < comm->size; r++) fsdpi_xsum_add(&s, all[r * n + i]);
        x[i] = fsdpi_xsum_round(&s);
    }
    fsdpi_free(all);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

fsdp_status fsdp_comm_max(fsdp_comm *comm, double *x, int n)
{
    double *all;
    FSDPI_NEW(all, (size_t)comm->size * (size_t)(n > 0 ? n : 0));
    fsdp_status st = fsdpi_comm_exchange(comm, FSDPI_OP_MAX, NULL, x, (size_t)n * sizeof(*x), all);
    for (int i = 0; i < n && st == FSDP_OK; i++) {
        double most = all[i];
        for (int r = 1; r < comm->size; r++)
            if (!(all[r * n + i] <= most) && !isnan(most)) most = all[r * n + i];
        x[i] = most;
    }
    fsdpi_free(all);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

void fsdp_comm_request_stop(fsdp_comm *comm)
{
    atomic_store(&comm->world->control->stop, 1);
}

fsdp_status fsdp_comm_stop_agreed(fsdp_comm *comm, bool *stop)
{
    fsdpi_control *c = comm->world->control;
    atomic_store_explicit(&c->rank[comm->world_rank].polls_stop, 1, memory_order_relaxed);
    unsigned char mine = atomic_load(&c->stop) != 0, any = 0, *all;
    FSDPI_NEW(all, comm->size);
    fsdp_status st = fsdpi_comm_exchange(comm, FSDPI_OP_STOP, NULL, &mine, 1, all);
    for (int r = 0; r < comm->size; r++) any |= all[r];
    fsdpi_free(all);
    FSDP_TRY(st);
    *stop = any;
    return FSDP_OK;
}

/* What a rank says of itself in fsdp_comm_agree. */
typedef struct opinion {
    fsdp_status st;
    char message[1024];
} opinion;

fsdp_status fsdp_comm_agree(fsdp_comm *comm, fsdp_status mine)
{
    if (mine == FSDP_ERR_PEER || mine == FSDP_ERR_COMM) return mine; /* the others know */
    opinion me = { .st = mine }, *all;
    if (mine != FSDP_OK) snprintf(me.message, sizeof(me.message), "%s", fsdp_last_error_message());
    all = fsdpi_calloc((size_t)comm->size, sizeof(*all));
    FSDP_FAIL_IF(all == NULL, FSDP_ERR_NOMEM, "no memory to agree on errors");
    fsdp_status st = fsdpi_comm_exchange(comm, FSDPI_OP_AGREE, NULL, &me, sizeof(me), all);
    int bad = 0;
    while (st == FSDP_OK && bad < comm->size && all[bad].st == FSDP_OK) bad++;
    if (st == FSDP_OK && bad < comm->size) {
        if (comm->size == 1) st = fsdp_error_raise(all[bad].st, __func__, __FILE__, __LINE__, "%s", all[bad].message);
        else
            st = fsdp_error_raise(all[bad].st, __func__, __FILE__, __LINE__, "rank %d: %s", comm->world_ranks[bad],
                                  all[bad].message);
    }
    fsdpi_free(all);
    return st;
}

/* ---- shared memory ---- */

fsdp_status fsdpi_comm_heap_map(fsdp_comm *comm, size_t offset, size_t bytes, void **out)
{
    fsdp_device *cpu = fsdp_device_cpu();
    return cpu->ops->map(cpu, &comm->world->heap, offset, bytes, true, out);
}

void fsdpi_comm_heap_unmap(fsdp_comm *comm, void *p, size_t bytes)
{
    fsdp_device *cpu = fsdp_device_cpu();
    if (p != NULL) cpu->ops->unmap(cpu, &comm->world->heap, p, bytes);
}

typedef struct allocation {
    fsdp_status st;
    size_t offset;
} allocation;

fsdp_status fsdpi_comm_heap_alloc(fsdp_comm *comm, size_t bytes, size_t *offset)
{
    allocation mine = { FSDP_OK, 0 }, *all;
    FSDPI_NEW(all, comm->size);
    if (comm->rank == 0) mine.st = fsdpi_heap_alloc(comm->world, bytes, &mine.offset);
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    fsdp_status st = fsdpi_comm_exchange(comm, FSDPI_OP_ALLOC, NULL, &mine, sizeof(mine), all);
    allocation got = all[0];
    fsdpi_free(all);
    FSDP_TRY(st);
    if (got.st != FSDP_OK && comm->rank == 0) {
        fsdpi_error_restore(&kept);
        return fsdp_error_through(got.st, __func__, __FILE__, __LINE__);
    }
    FSDP_FAIL_IF(got.st != FSDP_OK, got.st, "rank %d has no shared memory for %zu bytes", comm->world_ranks[0], bytes);
    *offset = got.offset;
    return FSDP_OK;
}

/* ---- split and reset ---- */

typedef struct wish {
    int color, key;
} wish;

fsdp_status fsdp_comm_split(fsdp_comm *comm, int color, int key, fsdp_comm **out)
{
    wish mine = { color, key }, *all;
    int *ranks = NULL, n = 0, rank = -1;
    FSDPI_NEW(all, comm->size);
    fsdp_status st = fsdpi_comm_exchange(comm, FSDPI_OP_SPLIT, NULL, &mine, sizeof(mine), all);
    if (st == FSDP_OK) {
        ranks = fsdpi_calloc((size_t)comm->size, sizeof(*ranks));
        if (ranks == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to split");
    }
    /* Insertion sort by (key, old rank): groups are small. */
    for (int r = 0; st == FSDP_OK && color >= 0 && r < comm->size; r++) {
        if (all[r].color != color) continue;
        int at = n++;
        for (; at > 0 && all[ranks[at - 1]].key > all[r].key; at--) ranks[at] = ranks[at - 1];
        ranks[at] = r;
    }
    /* The lowest member of each group takes the block; all learn where it is. */
    allocation block = { FSDP_OK, 0 }, *blocks = NULL;
    if (st == FSDP_OK) {
        int lowest = comm->size;
        for (int i = 0; i < n; i++) lowest = ranks[i] < lowest ? ranks[i] : lowest;
        if (lowest == comm->rank) block.st = fsdpi_heap_alloc(comm->world, fsdpi_comm_block_bytes(n), &block.offset);
        blocks = fsdpi_calloc((size_t)comm->size, sizeof(*blocks));
        if (blocks == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to split");
        if (st == FSDP_OK) st = fsdpi_comm_exchange(comm, FSDPI_OP_SPLIT, NULL, &block, sizeof(block), blocks);
        if (st == FSDP_OK && n > 0) block = blocks[lowest];
        if (st == FSDP_OK && block.st != FSDP_OK)
            st = fsdp_error_raise(block.st, __func__, __FILE__, __LINE__, "no shared memory for a split communicator");
    }
    fsdp_comm *sub = NULL;
    if (st == FSDP_OK && n > 0) {
        for (int i = 0; i < n; i++) {
            if (ranks[i] == comm->rank) rank = i;
            ranks[i] = comm->world_ranks[ranks[i]];
        }
        st = fsdpi_comm_create(&sub, comm->world, comm->transport, ranks, n, rank, block.offset);
    }
    fsdpi_free(blocks);
    fsdpi_free(ranks);
    fsdpi_free(all);
    st = fsdp_comm_agree(comm, st);
    if (st != FSDP_OK) {
        fsdp_comm_destroy(sub);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *out = sub;
    return FSDP_OK;
}

/* Waits for a counter when tags no longer mean anything: only for those that are gone, and the long clock. */
static fsdp_status check_reset(void *arg, int64_t waited_ns)
{
    wait_arg *w = arg;
    fsdpi_control *c = w->comm->world->control;
    FSDP_FAIL_IF(atomic_load(&c->abort) != 0, FSDP_ERR_PEER, "%s", c->abort_message);
    int r = w->comm->world_ranks[w->for_rank], state = atomic_load(&c->rank[r].state);
    FSDP_FAIL_IF(state == FSDPI_RANK_DONE || state == FSDPI_RANK_FAILED || state == FSDPI_RANK_DEAD, FSDP_ERR_PEER,
                 "fsdp_comm_reset: rank %d has ended", r);
    FSDP_FAIL_IF(c->stuck_ns >= 0 && waited_ns >= c->stuck_ns, FSDP_ERR_PEER,
                 "fsdp_comm_reset: rank %d did not call it in %.0f s", r, (double)waited_ns * 1e-9);
    return FSDP_OK;
}

static fsdp_status meet(fsdp_comm *comm)
{
    uint32_t n = ++comm->resets;
    fsdpi_counter_set(&comm->block->member[comm->rank].reset, n);
    for (int r = 0; r < comm->size; r++)
        FSDP_TRY(fsdpi_counter_wait(&comm->block->member[r].reset, n, check_reset, &(wait_arg){ comm, r, "reset" }));
    return FSDP_OK;
}

fsdp_status fsdp_comm_reset(fsdp_comm *comm)
{
    fsdpi_member *me = &comm->block->member[comm->rank];
    FSDP_TRY(meet(comm)); /* nobody is in an operation any more */
    atomic_store(&me->tags, 0);
    comm->hash = 0;
    comm->exchanges = 0;
    fsdpi_counter_set(&me->arrived, 0);
    if (comm->rank == 0) {
        atomic_store(&comm->block->mismatch, 0);
        atomic_store(&comm->block->mismatch_by, 0);
    }
    if (comm->attached != NULL && comm->attached_reset != NULL) comm->attached_reset(comm->attached);
    FSDP_TRY(meet(comm)); /* nobody still reads the old counters as new ones */
    return FSDP_OK;
}
