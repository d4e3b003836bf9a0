/* SPDX-License-Identifier: MIT
 *
 * What every transport owes, whatever its name: readers see whole versions, never one that is being overwritten, and
 * each version that was published; owners see every rank's window of each use, once, and no window is written before
 * all owners have taken it. With slow ranks, empty slices and edges at any byte. To test another transport, add its
 * name to support/ranks.c. */
#include "support/ranks.h"

#include "base/alloc.h"
#include "comm/transport.h"

#include <signal.h>
#include <unistd.h>

/* The byte that belongs at position i of version (or use) v of owner r. */
static unsigned char pattern(uint32_t v, int r, size_t i)
{
    return v == 0 ? 0 : (unsigned char)((v * 2654435761u ^ (uint32_t)i * 40503u ^ (uint32_t)r * 97u) >> 13);
}

typedef struct block_args {
    unsigned char *p;
    size_t from, bytes; /* what p[0] is, in the whole; how many */
    uint32_t v;
    int r;
    unsigned sleep_us;
} block_args;

static fsdp_status k_write(const fsdp_kernel *k, const void *args)
{
    const block_args *a = args;
    unsigned char *p = fsdp_kernel_ptr(k, a->p);
    for (size_t i = 0; i < a->bytes; i++) {
        p[i] = pattern(a->v, a->r, a->from + i);
        if (i == a->bytes / 2 && a->sleep_us > 0) usleep(a->sleep_us);
    }
    return FSDP_OK;
}

/* Reads twice, with a rest between: so that what is overwritten too early shows. */
static fsdp_status k_check(const fsdp_kernel *k, const void *args)
{
    const block_args *a = args;
    const volatile unsigned char *p = fsdp_kernel_ptr(k, a->p);
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < a->bytes; i++)
            if (p[i] != pattern(a->v, a->r, a->from + i))
                FSDP_FAIL(FSDP_ERR_INTERNAL, "version %u of rank %d: byte %zu is %d, not %d (reading %d)", a->v, a->r, a->from + i, p[i],
                          pattern(a->v, a->r, a->from + i), pass);
        if (a->sleep_us > 0) usleep(a->sleep_us);
    }
    return FSDP_OK;
}

static fsdp_status k_all_bytes(const fsdp_kernel *k, const void *args)
{
    const block_args *a = args;
    const unsigned char *p = fsdp_kernel_ptr(k, a->p);
    for (size_t i = 0; i < a->bytes; i++) rank_check(p[i] == a->v);
    return FSDP_OK;
}

/* A rank of the test. */
typedef struct site {
    fsdp_comm *comm;
    const fsdpi_transport_ops *t;
    fsdpi_group group; /* of flats */
    fsdp_device *dev;
    fsdp_stream *s;
    fsdp_rng rng;    /* differs from rank to rank: how slow */
    fsdp_rng common; /* the same on all: what is done */
} site;

static fsdp_status open_site(site *x, fsdp_comm *comm, const corner *c)
{
    *x = (site){ .comm = comm, .t = comm->transport, .group = fsdpi_group_all(comm) };
    fsdp_rng_init(&x->rng, (uint64_t)fsdp_comm_rank(comm) + 1);
    fsdp_rng_init(&x->common, 0);
    FSDP_TRY(fsdp_device_open(&x->dev, c->device));
    return fsdpi_stream_create(&x->s, x->dev, NULL);
}

static void close_site(site *x)
{
    fsdpi_stream_destroy(x->s);
    fsdp_device_close(x->dev);
}

static unsigned sometimes(site *x)
{
    uint32_t n = fsdp_rng_u32(&x->rng);
    return n % 8 == 0 ? n >> 8 & 0xff : 0;
}

/* ---- flats ---- */

enum { VERSIONS = 12 };

typedef struct flat_at {
    fsdpi_flat *f;
    size_t edges[9], bytes, lo, slice_bytes;
    unsigned char *slice, *whole, *private_slice, *private_whole;
} flat_at;

/* Cuts at any byte; every third cut is where the one before was: an empty slice. */
static fsdp_status open_flat(site *x, flat_at *a, size_t bytes, bool in_place)
{
    int size = x->group.size, member = fsdpi_group_member(&x->group, fsdp_comm_rank(x->comm));
    memset(a, 0, sizeof(*a));
    a->bytes = bytes;
    for (int r = 1; r < size; r++) {
        size_t room = bytes - a->edges[r - 1];
        a->edges[r] = a->edges[r - 1] + (r % 3 == 2 || room == 0 ? 0 : fsdp_rng_u32(&x->common) % room);
    }
    a->edges[size] = bytes;
    FSDP_TRY(x->t->flat_create(&a->f, x->comm, x->group, x->dev, a->edges, bytes, "f"));
    a->lo = a->edges[member];
    a->slice_bytes = a->edges[member + 1] - a->lo;
    void *p;
    FSDP_TRY(x->dev->ops->alloc(x->dev, bytes, &p));
    a->private_whole = p;
    a->whole = x->t->zero_copy ? (void *)(uintptr_t)x->t->flat_whole(a->f) : p;
    rank_check((x->t->flat_whole(a->f) != NULL) == x->t->zero_copy);
    FSDP_TRY(x->dev->ops->alloc(x->dev, bytes, &p));
    a->private_slice = p;
    a->slice = in_place && a->slice_bytes > 0 ? x->t->flat_slice(a->f) : NULL;
    if (a->slice == NULL) a->slice = a->private_slice;
    return FSDP_OK;
}

static void close_flat(site *x, flat_at *a)
{
    x->t->flat_destroy(a->f);
    x->dev->ops->free(x->dev, a->private_whole, a->bytes);
    x->dev->ops->free(x->dev, a->private_slice, a->bytes);
}

/* Groups write different bytes: reading another's shows. */
static int group_of(const site *x)
{
    return fsdpi_group_index(&x->group, fsdp_comm_rank(x->comm));
}

static fsdp_status read_flat(site *x, flat_at *a, uint32_t v)
{
    if (!x->t->zero_copy) FSDP_TRY(fsdpi_stream_fill(x->s, a->private_whole, 0xff, a->bytes));
    FSDP_TRY(x->t->flat_gather(a->f, v, x->t->zero_copy ? NULL : a->private_whole, x->s));
    return fsdp_stream_launch(x->s, k_check, &(block_args){ a->whole, 0, a->bytes, v, group_of(x), sometimes(x) }, sizeof(block_args));
}

static fsdp_status write_flat(site *x, flat_at *a, uint32_t v)
{
    FSDP_TRY(x->t->flat_done(a->f, v - 1, x->s));
    FSDP_TRY(x->t->flat_open(a->f, v, x->s));
    FSDP_TRY(fsdp_stream_launch(x->s, k_write, &(block_args){ a->slice, a->lo, a->slice_bytes, v, group_of(x), sometimes(x) }, sizeof(block_args)));
    return x->t->flat_publish(a->f, v, a->slice, x->s);
}

static fsdp_status flats(fsdp_comm *comm, void *arg)
{
    static const size_t sizes[] = { 1, 4096, 3 * 4096 + 17 };
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        flat_at a[2];
        FSDP_TRY(open_flat(&x, &a[0], sizes[i], true));
        FSDP_TRY(open_flat(&x, &a[1], sizes[i] / 2 + 1, false));
        for (uint32_t v = 0; v < VERSIONS; v++)
            for (int k = 0; k < 2; k++) {
                if (v > 0) FSDP_TRY(write_flat(&x, &a[k], v));
                if (fsdp_rng_u32(&x.rng) % 4 > 0) FSDP_TRY(read_flat(&x, &a[k], v)); /* a rank need not read every version */
                if (fsdp_rng_u32(&x.rng) % 4 == 0) FSDP_TRY(read_flat(&x, &a[k], v));
                usleep(sometimes(&x));
            }
        FSDP_TRY(fsdp_stream_sync(x.s));
        close_flat(&x, &a[0]);
        close_flat(&x, &a[1]);
    }
    close_site(&x);
    return FSDP_OK;
}

/* Every mesh of R x S ranks: groups that shard, and groups that hold replicas. */
static fsdp_status groups(fsdp_comm *comm, void *arg)
{
    int size = fsdp_comm_size(comm);
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    for (int s = 1; s <= size; s++)
        for (int replicas = 0; replicas < 2; replicas++) {
            if (size % s != 0) continue;
            x.group = replicas ? (fsdpi_group){ size / s, s } : (fsdpi_group){ s, 1 };
            bool seen[64] = { false };
            for (int m = 0; m < x.group.size; m++) {
                int r = fsdpi_group_rank(&x.group, fsdp_comm_rank(comm), m);
                rank_check(r >= 0 && r < size && !seen[r] && fsdpi_group_member(&x.group, r) == m && fsdpi_group_index(&x.group, r) == group_of(&x));
                seen[r] = true;
            }
            rank_check(seen[fsdp_comm_rank(comm)] && group_of(&x) < size / x.group.size);
            flat_at a;
            FSDP_TRY(open_flat(&x, &a, 5003, s % 2 == 0));
            for (uint32_t v = 0; v < VERSIONS / 2; v++) {
                if (v > 0) FSDP_TRY(write_flat(&x, &a, v));
                FSDP_TRY(read_flat(&x, &a, v));
            }
            FSDP_TRY(fsdp_stream_sync(x.s));
            close_flat(&x, &a);
        }
    close_site(&x);
    return FSDP_OK;
}

static void test_groups_keep_apart(void **state)
{
    (void)state;
    in_corners(groups, &(corners){ .ranks = (const int[]){ 2, 6, 0 } });
}

static void test_versions_are_whole(void **state)
{
    (void)state;
    in_corners(flats, &(corners){ .shared = 0 });
}

/* Version 0, all zeros, is one like any other: whoever reads it is not overtaken by the first write. */
static fsdp_status first_version(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    for (int round = 0; round < 4; round++) {
        flat_at a;
        FSDP_TRY(open_flat(&x, &a, 20000, round % 2 == 0));
        FSDP_TRY(x.t->flat_gather(a.f, 0, x.t->zero_copy ? NULL : a.private_whole, x.s));
        unsigned slow = fsdp_comm_rank(comm) == round % fsdp_comm_size(comm) ? 2000 : 0;
        FSDP_TRY(fsdp_stream_launch(x.s, k_check, &(block_args){ a.whole, 0, a.bytes, 0, 0, slow }, sizeof(block_args)));
        FSDP_TRY(write_flat(&x, &a, 1));
        FSDP_TRY(read_flat(&x, &a, 1));
        FSDP_TRY(fsdp_stream_sync(x.s));
        close_flat(&x, &a);
    }
    close_site(&x);
    return FSDP_OK;
}

static void test_nobody_writes_over_version_0(void **state)
{
    (void)state;
    in_corners(first_version, &(corners){ .at_least = 2 });
}

/* A rank that stays with a version holds back the owners, and they hold back nobody else. */
static fsdp_status slow_reader(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    flat_at a;
    FSDP_TRY(open_flat(&x, &a, 9000, true));
    for (uint32_t v = 1; v <= 8; v++) {
        FSDP_TRY(write_flat(&x, &a, v));
        FSDP_TRY(x.t->flat_gather(a.f, v, x.t->zero_copy ? NULL : a.private_whole, x.s));
        unsigned slow = fsdp_comm_rank(comm) == (int)v % fsdp_comm_size(comm) ? 2000 : 0;
        FSDP_TRY(fsdp_stream_launch(x.s, k_check, &(block_args){ a.whole, 0, a.bytes, v, 0, slow }, sizeof(block_args)));
    }
    FSDP_TRY(fsdp_stream_sync(x.s));
    close_flat(&x, &a);
    close_site(&x);
    return FSDP_OK;
}

static void test_slow_readers(void **state)
{
    (void)state;
    in_corners(slow_reader, &(corners){ .at_least = 2 });
}

/* ---- windows ---- */

enum { WINDOWS = 3, USES = 40 };

typedef struct window_at {
    fsdpi_window *w;
    size_t bytes;
    uint32_t use, posted, taken;
} window_at;

static fsdp_status post_window(site *x, window_at *a)
{
    int rank = fsdp_comm_rank(x->comm);
    a->use++;
    FSDP_TRY(x->t->window_acquire(a->w, a->use, "w", x->s));
    FSDP_TRY(fsdp_stream_launch(x->s, k_write, &(block_args){ x->t->window_buffer(a->w), 0, a->bytes, a->use, rank, sometimes(x) }, sizeof(block_args)));
    FSDP_TRY(x->t->window_post(a->w, a->use, a->bytes, x->s));
    a->posted = a->use;
    return FSDP_OK;
}

/* The owner's part: its bytes of every rank's window. */
static fsdp_status take_window(site *x, window_at *a)
{
    if (a->taken == a->posted) return FSDP_OK;
    int size = fsdp_comm_size(x->comm), rank = fsdp_comm_rank(x->comm);
    size_t lo = a->bytes * (size_t)rank / (size_t)size, hi = a->bytes * (size_t)(rank + 1) / (size_t)size;
    for (int r = 0; r < size; r++) {
        const void *p = NULL;
        FSDP_TRY(x->t->window_peer(a->w, a->posted, r, lo, hi, "w", x->s, &p));
        FSDP_TRY(fsdp_stream_launch(x->s, k_check, &(block_args){ (void *)(uintptr_t)p, lo, hi - lo, a->posted, r, sometimes(x) }, sizeof(block_args)));
    }
    FSDP_TRY(x->t->window_take(a->w, a->posted, x->s));
    a->taken = a->posted;
    return FSDP_OK;
}

/* Windows are posted in an order that all ranks share; each rank takes when it likes, but before it posts again. */
static fsdp_status windows(fsdp_comm *comm, void *arg)
{
    static const size_t sizes[] = { 64, 4096, 33000 };
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    window_at a[WINDOWS] = { 0 };
    for (int i = 0; i < WINDOWS; i++) {
        a[i].bytes = sizes[i];
        FSDP_TRY(x.t->window_create(&a[i].w, comm, x.dev, sizes[i]));
    }
    for (int n = 0; n < USES; n++) {
        window_at *w = &a[fsdp_rng_u32(&x.common) % WINDOWS];
        /* What this rank owes of this window comes before it: and what it owes of others, as it likes. */
        FSDP_TRY(take_window(&x, w));
        w->bytes = w->use % 3 == 2 ? sizes[w - a] / 3 : sizes[w - a]; /* a smaller unit may use it */
        FSDP_TRY(post_window(&x, w));
        for (int i = 0; i < WINDOWS; i++) {
            bool now = fsdp_rng_u32(&x.rng) % 3 == 0;
            if (now) FSDP_TRY(take_window(&x, &a[i]));
        }
        usleep(sometimes(&x));
    }
    for (int i = 0; i < WINDOWS; i++) FSDP_TRY(take_window(&x, &a[i]));
    FSDP_TRY(fsdp_stream_sync(x.s));
    FSDP_TRY(fsdp_comm_barrier(comm));
    for (int i = 0; i < WINDOWS; i++) x.t->window_destroy(a[i].w);
    close_site(&x);
    return FSDP_OK;
}

static void test_windows_are_whole(void **state)
{
    (void)state;
    in_corners(windows, &(corners){ .shared = 0 });
}

/* ready() is true exactly when all have posted, and asking changes nothing. */
static fsdp_status ready(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    window_at a = { .bytes = 100 };
    FSDP_TRY(x.t->window_create(&a.w, comm, x.dev, 100));
    for (int round = 0; round < 10; round++) {
        int late = round % fsdp_comm_size(comm);
        FSDP_TRY(fsdp_comm_barrier(comm));
        if (fsdp_comm_rank(comm) != late) FSDP_TRY(post_window(&x, &a));
        FSDP_TRY(fsdp_stream_sync(x.s));
        FSDP_TRY(fsdp_comm_barrier(comm));
        rank_check(!x.t->window_ready(a.w, (uint32_t)round + 1));
        rank_check(round == 0 || x.t->window_ready(a.w, (uint32_t)round));
        FSDP_TRY(fsdp_comm_barrier(comm));
        if (fsdp_comm_rank(comm) == late) FSDP_TRY(post_window(&x, &a));
        FSDP_TRY(fsdp_stream_sync(x.s));
        FSDP_TRY(fsdp_comm_barrier(comm));
        rank_check(x.t->window_ready(a.w, (uint32_t)round + 1));
        FSDP_TRY(take_window(&x, &a));
        FSDP_TRY(fsdp_stream_sync(x.s));
    }
    FSDP_TRY(fsdp_comm_barrier(comm));
    x.t->window_destroy(a.w);
    close_site(&x);
    return FSDP_OK;
}

static void test_ready(void **state)
{
    (void)state;
    in_corners(ready, &(corners){ .shared = 0 });
}

/* "copy" keeps nothing that was given away: it reads as garbage. */
static fsdp_status scribbles(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    rank_check(x.t->scribble && !x.t->zero_copy);
    window_at a = { .bytes = 5000 };
    FSDP_TRY(x.t->window_create(&a.w, comm, x.dev, a.bytes));
    FSDP_TRY(post_window(&x, &a));
    FSDP_TRY(fsdp_stream_launch(x.s, k_all_bytes, &(block_args){ x.t->window_buffer(a.w), 0, a.bytes, 0xff, 0, 0 }, sizeof(block_args)));
    const void *p, *q;
    FSDP_TRY(x.t->window_peer(a.w, 1, 0, 0, a.bytes, "w", x.s, &p));
    FSDP_TRY(fsdp_stream_launch(x.s, k_check, &(block_args){ (void *)(uintptr_t)p, 0, a.bytes, 1, 0, 0 }, sizeof(block_args)));
    FSDP_TRY(x.t->window_peer(a.w, 1, fsdp_comm_size(comm) - 1, 0, 10, "w", x.s, &q));
    FSDP_TRY(fsdp_stream_launch(x.s, k_all_bytes, &(block_args){ (unsigned char *)(uintptr_t)p + 10, 0, a.bytes - 10, 0xff, 0, 0 }, sizeof(block_args)));
    FSDP_TRY(x.t->window_take(a.w, 1, x.s));
    FSDP_TRY(fsdp_stream_launch(x.s, k_all_bytes, &(block_args){ (unsigned char *)(uintptr_t)q, 0, 10, 0xff, 0, 0 }, sizeof(block_args)));
    FSDP_TRY(fsdp_stream_sync(x.s));
    FSDP_TRY(fsdp_comm_barrier(comm));
    x.t->window_destroy(a.w);
    close_site(&x);
    return FSDP_OK;
}

static void test_copy_scribbles(void **state)
{
    (void)state;
    in_corners(scribbles, &(corners){ .transport = "copy" });
}

/* The view that all share cannot be written by a rank's mistake; where ranks are threads it is everybody's memory. */
static fsdp_status overwrite_view(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    flat_at a;
    FSDP_TRY(open_flat(&x, &a, 5000, true));
    signal(SIGSEGV, SIG_DFL); /* cmocka's handler is inherited */
    if (fsdp_comm_rank(comm) == 1) FSDP_TRY(fsdpi_stream_fill(x.s, a.whole, 1, 1));
    FSDP_TRY(fsdp_stream_sync(x.s));
    return fsdp_comm_barrier(comm);
}

static void test_the_shared_view_is_read_only(void **state)
{
    (void)state;
    if (!CAN_FORK || SANITIZED) return; /* sanitizers turn the signal into a report */
    for (int d = 0; d < 2; d++) {
        corner c = { .transport = "shm", .device = d ? "guard" : "cpu", .ranks = 2 };
        assert_fails(in_corner(overwrite_view, &c), FSDP_ERR_PEER, "killed by signal 11 (SIGSEGV)");
    }
}

/* ---- what is made goes away ---- */

static size_t heap_in_use(const fsdp_comm *comm)
{
    const fsdpi_control *c = comm->world->control;
    size_t n = c->top;
    for (int i = 0; i < c->free_count; i++) n -= c->free[i].bytes;
    return n;
}

static fsdp_status come_and_go(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    size_t used = 0, top = 0;
    for (int round = 0; round < 12; round++) {
        FSDP_TRY(fsdp_comm_barrier(comm));
        if (round == 1) used = heap_in_use(comm);
        if (round == 6) top = comm->world->control->top;
        if (round > 1) rank_check(heap_in_use(comm) == used);
        if (round > 6) rank_check(comm->world->control->top == top);
        FSDP_TRY(fsdp_comm_barrier(comm));
        flat_at a, b;
        fsdpi_window *w;
        fsdp_comm *sub;
        FSDP_TRY(open_flat(&x, &a, 5000, true));
        FSDP_TRY(fsdp_comm_split(comm, fsdp_comm_rank(comm) % 2, 0, &sub));
        FSDP_TRY(open_flat(&x, &b, 40000, true));
        FSDP_TRY(x.t->window_create(&w, comm, x.dev, 9000));
        for (uint32_t v = 1; v < 4; v++) FSDP_TRY(write_flat(&x, &a, v));
        FSDP_TRY(read_flat(&x, &a, 3));
        FSDP_TRY(read_flat(&x, &b, 0)); /* fresh memory is zero, whoever had it before */
        FSDP_TRY(fsdp_stream_sync(x.s));
        fsdp_comm_destroy(sub);
        close_flat(&x, &a);
        x.t->window_destroy(w);
        close_flat(&x, &b);
    }
    close_site(&x);
    return FSDP_OK;
}

static void test_shared_memory_comes_back(void **state)
{
    (void)state;
    in_corners(come_and_go, &(corners){ .shared = 0 });
}

/* ---- counters ---- */

static void test_counters_wrap(void **state)
{
    (void)state;
    fsdpi_counter c = { .value = 0 };
    assert_true(fsdpi_counter_reached(&c, 0));
    assert_false(fsdpi_counter_reached(&c, 1));
    fsdpi_counter_set(&c, UINT32_MAX);
    assert_true(fsdpi_counter_reached(&c, UINT32_MAX));
    assert_true(fsdpi_counter_reached(&c, UINT32_MAX - 5));
    assert_false(fsdpi_counter_reached(&c, 0)); /* the next one */
    fsdpi_counter_set(&c, 3);
    assert_true(fsdpi_counter_reached(&c, UINT32_MAX));
    assert_true(fsdpi_counter_reached(&c, 3));
    assert_false(fsdpi_counter_reached(&c, 4));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counters_wrap),
        cmocka_unit_test(test_versions_are_whole),
        cmocka_unit_test(test_groups_keep_apart),
        cmocka_unit_test(test_nobody_writes_over_version_0),
        cmocka_unit_test(test_slow_readers),
        cmocka_unit_test(test_windows_are_whole),
        cmocka_unit_test(test_ready),
        cmocka_unit_test(test_copy_scribbles),
        cmocka_unit_test(test_the_shared_view_is_read_only),
        cmocka_unit_test(test_shared_memory_comes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
