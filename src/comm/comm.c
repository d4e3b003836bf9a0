/* SPDX-License-Identifier: MIT
 *
 * The communicator: waits, the exchange, and the small collectives that are made of it. */
#include "comm/comm.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/xsum.h"
#include "comm/call.h"
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
    /* Ranks that launch a second time go on where they were: all counters are as the last launch left them. */
    const fsdpi_member *me = &c->block->member[rank];
    uint64_t tags = atomic_load(&me->tags);
    c->exchanges = atomic_load(&me->arrived.value);
    c->resets = atomic_load(&me->reset.value);
    c->hash = tags > 0 ? atomic_load(&me->ring[(tags - 1) % FSDPI_TAGS].hash) : 0;
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
    fsdp_comm *unused; /* the call ends with the communicator */
    if (comm == NULL || !fsdpi_call_begin_or_log(&unused, comm, __func__)) return;
    if (comm->attached != NULL) comm->attached_ops->destroy(comm->attached);
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
    /* Streams add to them meanwhile: number by number. */
    const uint64_t *from = (const uint64_t *)(const void *)&comm->stats;
    uint64_t *to = (uint64_t *)(void *)out;
    _Static_assert(sizeof(*out) % sizeof(uint64_t) == 0, "all are uint64_t");
    for (size_t i = 0; i < sizeof(*out) / sizeof(uint64_t); i++) to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

void fsdp_comm_set_step(fsdp_comm *comm, int64_t step)
{
    atomic_store_explicit(&comm->world->control->rank[comm->world_rank].step, step, memory_order_relaxed);
}

void fsdp_comm_set_phase(fsdp_comm *comm, const char *phase)
{
    fsdpi_rank_slot *slot = &comm->world->control->rank[comm->world_rank];
    snprintf(slot->phase, sizeof(slot->phase), "%s", phase != NULL ? phase : "");
}

/* ---- waiting ---- */

fsdp_status fsdpi_comm_check_peer(fsdp_comm *comm, int for_rank, int64_t waited_ns, const char *what)
{
    fsdpi_control *c = comm->world->control;
    FSDP_FAIL_IF(atomic_load_explicit(&c->abort, memory_order_acquire) != 0, FSDP_ERR_PEER, "%s", c->abort_message);
    int r = comm->world_ranks[for_rank];
    int state = atomic_load_explicit(&c->rank[r].state, memory_order_acquire);
    FSDP_FAIL_IF(state == FSDPI_RANK_DONE && waited_ns > 0, FSDP_ERR_COMM,
                 "rank %d waits for rank %d in %s, but rank %d has finished: it made fewer calls", comm->world_rank, r, what,
                 r);
    FSDP_FAIL_IF(state == FSDPI_RANK_FAILED || state == FSDPI_RANK_DEAD, FSDP_ERR_PEER, "rank %d is gone", r);
    if (c->stuck_ns < 0 || waited_ns < c->stuck_ns) return FSDP_OK;
    char doing[160];
    fsdpi_world_abort(comm->world, comm->world_rank,
                      "rank %d waited %.0f s for rank %d in %s (step %lld); rank %d was last in: %s (step %lld). "
                      "If that is slow and not stuck, raise the time-out",
                      comm->world_rank, (double)waited_ns * 1e-9, r, what,
                      (long long)atomic_load(&c->rank[comm->world_rank].step), r, fsdpi_world_doing(comm->world, r, doing, sizeof(doing)),
                      (long long)atomic_load(&c->rank[r].step));
    FSDP_FAIL(FSDP_ERR_PEER, "%s", c->abort_message);
}

typedef struct wait_arg {
    fsdp_comm *comm;
    int for_rank;
    uint64_t made;
    const char *what;
    bool meets;
} wait_arg;

/* In a reset a rank lets end what it has launched. What others had to say for it they have said once they are quiet: one
 * that failed in between, and whom all have met since, has not, and will not. */
static fsdp_status check_quiet(const fsdp_comm *comm, int for_rank, const char *what)
{
    uint32_t mine = atomic_load_explicit(&comm->block->member[comm->rank].reset.value, memory_order_relaxed);
    uint32_t theirs = atomic_load_explicit(&comm->block->member[for_rank].reset.value, memory_order_acquire);
    FSDP_FAIL_IF(mine % FSDPI_RESET_STEPS != 0 && (int32_t)(theirs - mine) > 0, FSDP_ERR_COMM, "fsdp_comm_reset() was called; rank %d had not come to %s", comm->world_ranks[for_rank], what);
    return FSDP_OK;
}

static fsdp_status check_wait(void *arg, int64_t waited_ns)
{
    wait_arg *w = arg;
    if (w->meets && w->comm->attached != NULL) w->comm->attached_ops->idle(w->comm->attached);
    fsdpi_comm_compare(w->comm);
    FSDP_TRY(fsdpi_comm_check(w->comm, w->made));
    FSDP_TRY(check_quiet(w->comm, w->for_rank, w->what));
    return fsdpi_comm_check_peer(w->comm, w->for_rank, waited_ns, w->what);
}

static fsdp_status wait_for(fsdpi_counter *c, uint32_t at_least, wait_arg w)
{
    fsdp_comm *comm = w.comm;
    if (fsdpi_counter_reached(c, at_least)) return FSDP_OK;
    int64_t start = fsdpi_now_ns();
    fsdp_status st = fsdpi_counter_wait(c, at_least, check_wait, &w);
    __atomic_fetch_add(&comm->stats.wait_ns, (uint64_t)(fsdpi_now_ns() - start), __ATOMIC_RELAXED);
    if (st != FSDP_OK) return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    return FSDP_OK;
}

fsdp_status fsdpi_comm_wait(fsdp_comm *comm, fsdpi_counter *c, uint32_t at_least, int for_rank, uint64_t made, const char *what)
{
    return wait_for(c, at_least, (wait_arg){ .comm = comm, .for_rank = for_rank, .made = made, .what = what });
}

/* ---- the exchange ---- */

/* A slot is written again two exchanges later: by then every rank has arrived at the exchange between, so it has done
 * with this one. No call here allocates: a collective does not fail on one rank alone. */
fsdp_status fsdpi_comm_tell(fsdp_comm *comm, fsdpi_op op, const char *name, const void *in, size_t bytes)
{
    FSDPI_ASSERT(bytes <= FSDPI_SLOT);
    FSDPI_CALL_AS(comm, fsdpi_op_name(op));
    FSDP_TRY(fsdpi_comm_tag(comm, op, name, bytes));
    if (comm->size > 1) comm->stats.exchanges++;
    uint32_t n = ++comm->exchanges;
    fsdpi_member *me = &comm->block->member[comm->rank];
    me->slot[n % 2].hash = comm->hash;
    if (bytes > 0) memcpy(me->slot[n % 2].data, in, bytes);
    fsdpi_counter_set(&me->arrived, n);
    uint64_t made = fsdpi_comm_made(comm);
    for (int r = 0; r < comm->size; r++) {
        fsdpi_member *m = &comm->block->member[r];
        FSDP_TRY(wait_for(&m->arrived, n, (wait_arg){ .comm = comm, .for_rank = r, .made = made, .what = fsdpi_op_name(op), .meets = true }));
        if (m->slot[n % 2].hash == comm->hash) continue;
        fsdpi_comm_compare(comm);
        FSDP_TRY(fsdpi_comm_check(comm, made));
        FSDP_FAIL(FSDP_ERR_COMM, "ranks %d and %d disagree in %s", comm->world_rank, comm->world_ranks[r], fsdpi_op_name(op));
    }
    atomic_store_explicit(&me->met, made, memory_order_release);
    return FSDP_OK;
}

const void *fsdpi_comm_told(const fsdp_comm *comm, int rank)
{
    return comm->block->member[rank].slot[comm->exchanges % 2].data;
}

static size_t chunk_at(size_t at, size_t bytes)
{
    return bytes - at < FSDPI_SLOT ? bytes - at : FSDPI_SLOT;
}

fsdp_status fsdp_comm_barrier(fsdp_comm *comm)
{
    FSDPI_CALL(comm);
    return fsdpi_comm_tell(comm, FSDPI_OP_BARRIER, NULL, NULL, 0);
}

fsdp_status fsdpi_comm_exchange(fsdp_comm *comm, fsdpi_op op, const char *name, const void *in, size_t bytes, void *out)
{
    FSDPI_CALL_AS(comm, fsdpi_op_name(op));
    for (size_t at = 0; at == 0 || at < bytes; at += FSDPI_SLOT) {
        size_t n = chunk_at(at, bytes);
        FSDP_TRY(fsdpi_comm_tell(comm, op, name, n > 0 ? (const char *)in + at : NULL, n));
        for (int r = 0; r < comm->size && n > 0; r++) memcpy((char *)out + (size_t)r * bytes + at, fsdpi_comm_told(comm, r), n);
    }
    return FSDP_OK;
}

fsdp_status fsdp_comm_all_gather(fsdp_comm *comm, const void *in, size_t bytes, void *out)
{
    FSDPI_CALL(comm);
    return fsdpi_comm_exchange(comm, FSDPI_OP_ALL_GATHER, NULL, in, bytes, out);
}

fsdp_status fsdp_comm_broadcast(fsdp_comm *comm, void *data, size_t bytes, int root)
{
    FSDP_FAIL_IF(root < 0 || root >= comm->size, FSDP_ERR_INVALID, "fsdp_comm_broadcast: root %d of %d ranks", root,
                 comm->size);
    FSDPI_CALL(comm);
    for (size_t at = 0; at == 0 || at < bytes; at += FSDPI_SLOT) {
        size_t n = chunk_at(at, bytes);
        FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_BROADCAST, NULL, n > 0 ? (char *)data + at : NULL, n));
        if (n > 0 && root != comm->rank) memcpy((char *)data + at, fsdpi_comm_told(comm, root), n);
    }
    return FSDP_OK;
}

/* x[i] becomes combine(x[i] of all ranks). */
static fsdp_status reduce_doubles(fsdp_comm *comm, fsdpi_op op, double *x, int n, double (*combine)(const fsdp_comm *comm, int i))
{
    FSDP_FAIL_IF(n < 0 || (n > 0 && x == NULL), FSDP_ERR_INVALID, "%s of %d values", fsdpi_op_name(op), n);
    enum { ROOM = FSDPI_SLOT / sizeof(double) };
    for (int at = 0; at == 0 || at < n; at += ROOM) {
        int count = n - at < ROOM ? n - at : ROOM;
        FSDP_TRY(fsdpi_comm_tell(comm, op, NULL, count > 0 ? x + at : NULL, (size_t)count * sizeof(double)));
        for (int i = 0; i < count; i++) x[at + i] = combine(comm, i);
    }
    return FSDP_OK;
}

static double told_double(const fsdp_comm *comm, int rank, int i)
{
    double x;
    memcpy(&x, (const double *)fsdpi_comm_told(comm, rank) + i, sizeof(x));
    return x;
}

static double sum_of_all(const fsdp_comm *comm, int i)
{
    fsdpi_xsum s = { 0 };
    for (int r = 0; r < comm->size; r++) fsdpi_xsum_add(&s, told_double(comm, r, i));
    return fsdpi_xsum_round(&s);
}

static double most_of_all(const fsdp_comm *comm, int i)
{
    double most = told_double(comm, 0, i);
    for (int r = 1; r < comm->size; r++) {
        double x = told_double(comm, r, i);
        if (!(x <= most) && !isnan(most)) most = x;
    }
    return most;
}

fsdp_status fsdp_comm_sum_exact(fsdp_comm *comm, double *x, int n)
{
    FSDPI_CALL(comm);
    return reduce_doubles(comm, FSDPI_OP_SUM, x, n, sum_of_all);
}

fsdp_status fsdp_comm_max(fsdp_comm *comm, double *x, int n)
{
    FSDPI_CALL(comm);
    return reduce_doubles(comm, FSDPI_OP_MAX, x, n, most_of_all);
}

void fsdp_comm_request_stop(fsdp_comm *comm)
{
    atomic_store(&comm->world->control->stop, 1);
}

fsdp_status fsdp_comm_stop_agreed(fsdp_comm *comm, bool *stop)
{
    FSDPI_CALL(comm);
    fsdpi_control *c = comm->world->control;
    atomic_store_explicit(&c->rank[comm->world_rank].polls_stop, 1, memory_order_relaxed);
    unsigned char mine = atomic_load(&c->stop) != 0, any = 0;
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_STOP, NULL, &mine, 1));
    for (int r = 0; r < comm->size; r++) any |= *(const unsigned char *)fsdpi_comm_told(comm, r);
    *stop = any;
    return FSDP_OK;
}

fsdp_status fsdp_comm_ask_more(fsdp_comm *comm, bool mine, int *first)
{
    FSDPI_CALL(comm);
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_ASK_MORE, NULL, &mine, sizeof(mine)));
    *first = -1;
    for (int r = comm->size - 1; r >= 0; r--)
        if (*(const bool *)fsdpi_comm_told(comm, r)) *first = r;
    return FSDP_OK;
}

/* What a rank says of itself in fsdp_comm_agree. */
typedef struct opinion {
    fsdp_status st;
    bool shared; /* it comes from an earlier agreement */
    char message[1024];
} opinion;

fsdp_status fsdp_comm_agree(fsdp_comm *comm, fsdp_status mine)
{
    FSDPI_CALL(comm);
    return fsdpi_comm_agree_in(comm, FSDPI_OP_AGREE, NULL, mine);
}

fsdp_status fsdpi_comm_agree_in(fsdp_comm *comm, fsdpi_op op, const char *name, fsdp_status mine)
{
    if (mine == FSDP_ERR_PEER || mine == FSDP_ERR_COMM) return mine; /* the others know */
    bool raised = fsdpi_error_status() == mine; /* or it is a bare status, and the last message is of something else */
    opinion me = { .st = mine, .shared = raised && fsdpi_error_is_shared() };
    if (mine != FSDP_OK) snprintf(me.message, sizeof(me.message), "%s", raised ? fsdp_last_error_message() : fsdp_status_name(mine));
    FSDP_TRY(fsdpi_comm_tell(comm, op, name, &me, sizeof(me)));
    bool alike = true; /* then it is no rank's in particular */
    for (int r = 1; r < comm->size && alike; r++) {
        const opinion *a = fsdpi_comm_told(comm, 0), *b = fsdpi_comm_told(comm, r);
        alike = a->st == b->st && strcmp(a->message, b->message) == 0;
    }
    for (int r = 0; r < comm->size; r++) {
        const opinion *o = fsdpi_comm_told(comm, r);
        if (o->st == FSDP_OK) continue;
        fsdp_status st = o->st;
        if (alike || o->shared) (void)fsdp_error_raise(st, __func__, __FILE__, __LINE__, "%s", o->message);
        else (void)fsdp_error_raise(st, __func__, __FILE__, __LINE__, "rank %d: %s", comm->world_ranks[r], o->message);
        fsdpi_error_set_shared();
        return st;
    }
    return FSDP_OK;
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

fsdp_status fsdpi_comm_heap_alloc(fsdp_comm *comm, fsdp_status mine, size_t bytes, size_t *offset)
{
    size_t at = 0;
    if (mine == FSDP_OK && comm->rank == 0) mine = fsdpi_heap_alloc(comm->world, bytes, &at);
    fsdp_status st = fsdp_comm_agree(comm, mine);
    if (st != FSDP_OK) {
        if (comm->rank == 0 && mine == FSDP_OK) fsdpi_heap_free(comm->world, at, bytes);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_ALLOC, NULL, &at, sizeof(at)));
    memcpy(offset, fsdpi_comm_told(comm, 0), sizeof(*offset));
    return FSDP_OK;
}

/* ---- split and reset ---- */

typedef struct wish {
    int color, key;
} wish;

static wish wish_of(const fsdp_comm *comm, int rank)
{
    return *(const wish *)fsdpi_comm_told(comm, rank);
}

/* Those who told this color, by (key, old rank): an insertion sort, for groups are small. Returns how many. */
static int find_group(const fsdp_comm *comm, int color, int *ranks)
{
    int n = 0;
    for (int r = 0; color >= 0 && r < comm->size; r++) {
        if (wish_of(comm, r).color != color) continue;
        int at = n++;
        for (; at > 0 && wish_of(comm, ranks[at - 1]).key > wish_of(comm, r).key; at--) ranks[at] = ranks[at - 1];
        ranks[at] = r;
    }
    return n;
}

/* A group's block: its lowest member takes it, all are told where it is. */
typedef struct group_block {
    fsdp_status st;
    size_t offset;
} group_block;

static fsdp_status share_block(fsdp_comm *comm, fsdp_status mine, const int *ranks, int n, size_t *offset)
{
    group_block b = { mine, 0 };
    int lowest = comm->size;
    for (int i = 0; i < n; i++) lowest = ranks[i] < lowest ? ranks[i] : lowest;
    if (b.st == FSDP_OK && lowest == comm->rank) b.st = fsdpi_heap_alloc(comm->world, fsdpi_comm_block_bytes(n), &b.offset);
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_SPLIT, NULL, &b, sizeof(b)));
    if (b.st != FSDP_OK || n == 0) return b.st;
    const group_block *theirs = fsdpi_comm_told(comm, lowest);
    FSDP_FAIL_IF(theirs->st != FSDP_OK, theirs->st, "rank %d has no shared memory for a split communicator", comm->world_ranks[lowest]);
    *offset = theirs->offset;
    return FSDP_OK;
}

fsdp_status fsdp_comm_split(fsdp_comm *comm, int color, int key, fsdp_comm **out)
{
    FSDPI_CALL(comm);
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_SPLIT, NULL, &(wish){ color, key }, sizeof(wish)));
    fsdp_status st = FSDP_OK;
    int *ranks = fsdpi_calloc((size_t)comm->size, sizeof(*ranks)), rank = -1;
    if (ranks == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to split %d ranks", comm->size);
    int n = ranks != NULL ? find_group(comm, color, ranks) : 0;
    size_t offset = 0;
    st = share_block(comm, st, ranks, n, &offset);
    fsdp_comm *sub = NULL;
    if (st == FSDP_OK && n > 0) {
        for (int i = 0; i < n; i++) {
            if (ranks[i] == comm->rank) rank = i;
            ranks[i] = comm->world_ranks[ranks[i]];
        }
        st = fsdpi_comm_create(&sub, comm->world, comm->transport, ranks, n, rank, offset);
    }
    fsdpi_free(ranks);
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
        FSDP_TRY(fsdpi_counter_wait(&comm->block->member[r].reset, n, check_reset, &(wait_arg){ .comm = comm, .for_rank = r, .what = "reset" }));
    return FSDP_OK;
}

fsdp_status fsdp_comm_reset(fsdp_comm *comm)
{
    FSDPI_CALL(comm);
    fsdpi_member *me = &comm->block->member[comm->rank];
    const fsdpi_attached_ops *attached = comm->attached != NULL ? comm->attached_ops : NULL;
    /* From here on this rank waits for nothing else, and whoever waits for it is told. */
    fsdpi_counter_set(&me->reset, ++comm->resets);
    if (attached != NULL) attached->quiesce(comm->attached);
    FSDP_TRY(meet(comm)); /* nobody is in an operation any more */
    atomic_store(&me->tags, 0);
    atomic_store(&me->met, 0);
    comm->hash = 0;
    comm->exchanges = 0;
    fsdpi_counter_set(&me->arrived, 0);
    if (comm->rank == 0) {
        atomic_store(&comm->block->mismatch, 0);
        atomic_store(&comm->block->mismatch_by, 0);
    }
    fsdp_status st = attached != NULL ? attached->reset(comm->attached) : FSDP_OK;
    FSDP_TRY(meet(comm)); /* nobody still reads the old counters as new ones */
    st = fsdp_comm_agree(comm, st);
    if (st == FSDP_OK && attached != NULL) st = attached->resume(comm->attached);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}
