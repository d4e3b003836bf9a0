/* SPDX-License-Identifier: MIT
 *
 * A test device that behaves as an accelerator does, so that code which only a CPU forgives fails here:
 *
 *  - Its addresses are not the host's. Every address that it hands out lies in a reserved region without access; the
 *    memory itself is mapped `delta` bytes away, which only fsdp_kernel_ptr() knows. The host that follows an
 *    address, or a kernel that forgets the translation, faults at once.
 *  - Kernels run later: each stream has a queue and a thread, and now and then the thread dawdles.
 *  - Fresh memory is full of NaNs; freed memory is unmapped and its addresses are not used again soon. */
#include "device/device.h"

#include "base/alloc.h"
#include "base/error.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* Bytes of address space, twice: ample for tests, and 128 ranks as threads still fit in 47 bits. */
#define REGION ((size_t)1 << 34)

typedef struct block {
    struct block *next;
    size_t offset, bytes;
} block;

typedef struct guard_device {
    fsdp_device base;
    char *shown; /* what is handed out: no access */
    char *real;  /* where the memory is */
    pthread_mutex_t lock;
    size_t cursor; /* where the next search begins: addresses come round late */
    block *live;
} guard_device;

typedef struct work {
    struct work *next;
    fsdp_kernel_fn fn; /* NULL: wait for `other` to have finished `upto` items */
    struct guard_stream *other;
    uint64_t upto;
    size_t bytes;
    _Alignas(16) char args[];
} work;

typedef struct guard_stream {
    fsdp_stream base;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    work *first, **last;
    uint64_t launched, done;
    bool quit;
    fsdpi_error failed;
    uint64_t failed_at; /* which item it was */
    uint32_t random;
} guard_stream;

static fsdp_status guard_init(fsdp_device *dev)
{
    guard_device *g = (guard_device *)dev;
    char *p = fsdpi_alloc_should_fail()
                  ? MAP_FAILED
                  : mmap(NULL, 2 * REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    FSDP_FAIL_IF(p == MAP_FAILED, FSDP_ERR_NOMEM, "guard device: cannot reserve %zu bytes of address space", 2 * REGION);
    g->shown = p;
    g->real = p + REGION;
    pthread_mutex_init(&g->lock, NULL);
    return FSDP_OK;
}

static void guard_fini(fsdp_device *dev)
{
    guard_device *g = (guard_device *)dev;
    for (block *b = g->live, *next; b != NULL; b = next) {
        next = b->next;
        fsdpi_free(b);
    }
    munmap(g->shown, 2 * REGION);
    pthread_mutex_destroy(&g->lock);
}

/* Claims addresses; *out is an offset into both regions. */
static fsdp_status claim(guard_device *g, size_t bytes, size_t *out)
{
    bytes = fsdpi_round_up(bytes, fsdpi_page_size());
    FSDP_FAIL_IF(bytes > REGION / 2, FSDP_ERR_NOMEM, "guard device: %zu bytes are more than half of its %zu", bytes, REGION);
    block *b;
    FSDPI_NEW(b, 1);
    pthread_mutex_lock(&g->lock);
    size_t at = g->cursor;
    bool wrapped = false;
    for (block *l = g->live; l != NULL;) {
        bool clash = at + bytes > REGION || (at < l->offset + l->bytes && l->offset < at + bytes);
        if (!clash) {
            l = l->next;
            continue;
        }
        if (at + bytes > REGION) {
            if (wrapped) {
                pthread_mutex_unlock(&g->lock);
                fsdpi_free(b);
                FSDP_FAIL(FSDP_ERR_NOMEM, "guard device: no %zu bytes of addresses left", bytes);
            }
            wrapped = true;
            at = 0;
        } else {
            at = l->offset + l->bytes;
        }
        l = g->live;
    }
    if (at + bytes > REGION) at = 0; /* nothing is live */
    *b = (block){ .next = g->live, .offset = at, .bytes = bytes };
    g->live = b;
    g->cursor = at + bytes;
    pthread_mutex_unlock(&g->lock);
    *out = at;
    return FSDP_OK;
}

static void unclaim(guard_device *g, void *p)
{
    size_t offset = (size_t)((char *)p - g->shown);
    pthread_mutex_lock(&g->lock);
    for (block **b = &g->live; *b != NULL; b = &(*b)->next) {
        if ((*b)->offset != offset) continue;
        block *dead = *b;
        *b = dead->next;
        mmap(g->real + offset, dead->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        fsdpi_free(dead);
        break;
    }
    pthread_mutex_unlock(&g->lock);
}

static fsdp_status guard_alloc(fsdp_device *dev, size_t bytes, void **out)
{
    guard_device *g = (guard_device *)dev;
    size_t offset;
    FSDP_TRY(claim(g, bytes, &offset));
    void *p = mmap(g->real + offset, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (p == MAP_FAILED) {
        unclaim(g, g->shown + offset);
        FSDP_FAIL(FSDP_ERR_NOMEM, "guard device: no memory for a buffer of %zu bytes", bytes);
    }
    memset(p, 0xff, bytes);
    *out = g->shown + offset;
    return FSDP_OK;
}

static void guard_free(fsdp_device *dev, void *p, size_t bytes)
{
    (void)bytes;
    unclaim((guard_device *)dev, p);
}

static fsdp_status guard_map(fsdp_device *dev, const fsdpi_shared *mem, size_t offset, size_t bytes, bool writable, void **out)
{
    guard_device *g = (guard_device *)dev;
    size_t at;
    FSDP_TRY(claim(g, bytes, &at));
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *p;
    if (mem->fd >= 0) {
        p = mmap(g->real + at, bytes, prot, MAP_SHARED | MAP_FIXED, mem->fd, (off_t)offset);
    } else {
        p = mremap((char *)mem->base + offset, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, g->real + at);
        if (p != MAP_FAILED && !writable) mprotect(p, bytes, prot);
    }
    if (p == MAP_FAILED) {
        int e = errno;
        unclaim(g, g->shown + at);
        FSDP_FAIL(FSDP_ERR_NOMEM, "guard device: cannot map %zu bytes of shared memory: %s", bytes, strerror(e));
    }
    *out = g->shown + at;
    return FSDP_OK;
}

static void guard_unmap(fsdp_device *dev, const fsdpi_shared *mem, void *p, size_t bytes)
{
    (void)mem;
    (void)bytes;
    unclaim((guard_device *)dev, p);
}

static void guard_protect(fsdp_device *dev, void *p, size_t bytes, bool readable)
{
    guard_device *g = (guard_device *)dev;
    mprotect((char *)p + (g->real - g->shown), bytes, readable ? PROT_READ : PROT_NONE);
}

/* ---- streams ---- */

static void dawdle(guard_stream *s)
{
    s->random = s->random * 1664525u + 1013904223u;
    if (s->random >> 28 != 0) return; /* one kernel in 16 */
    nanosleep(&(struct timespec){ .tv_nsec = (long)(s->random >> 8 & 0x1ffff) }, NULL);
}

static void fail(guard_stream *s, fsdp_status st)
{
    (void)st;
    fsdpi_error e;
    fsdpi_error_save(&e);
    pthread_mutex_lock(&s->lock);
    if (s->failed.st == FSDP_OK) {
        s->failed = e;
        s->failed_at = s->done + 1;
    }
    pthread_mutex_unlock(&s->lock);
}

static void run(guard_stream *s, work *w)
{
    if (w->fn != NULL) {
        fsdp_status st = w->fn(&s->base.kernel, w->args);
        if (st != FSDP_OK) fail(s, fsdp_error_through(st, __func__, __FILE__, __LINE__));
        return;
    }
    pthread_mutex_lock(&w->other->lock);
    while (w->other->done < w->upto) pthread_cond_wait(&w->other->changed, &w->other->lock);
    fsdpi_error e = w->other->failed;
    bool before = w->other->failed_at <= w->upto; /* what failed after the place that is waited for is no concern here */
    pthread_mutex_unlock(&w->other->lock);
    if (e.st != FSDP_OK && before) {
        fsdpi_error_restore(&e);
        fail(s, e.st);
    }
}

static void *stream_main(void *arg)
{
    guard_stream *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->first == NULL && !s->quit) pthread_cond_wait(&s->changed, &s->lock);
        if (s->first == NULL) break;
        work *w = s->first;
        s->first = w->next;
        if (s->first == NULL) s->last = &s->first;
        bool skip = s->failed.st != FSDP_OK && w->fn != NULL;
        pthread_mutex_unlock(&s->lock);
        if (!skip) {
            dawdle(s);
            run(s, w);
        }
        fsdpi_free(w);
        pthread_mutex_lock(&s->lock);
        s->done++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static fsdp_status guard_stream_init(fsdp_stream *base)
{
    guard_stream *s = (guard_stream *)base;
    guard_device *g = (guard_device *)base->dev;
    base->kernel.lo = (uintptr_t)g->shown;
    base->kernel.hi = (uintptr_t)g->shown + REGION;
    base->kernel.delta = g->real - g->shown;
    s->last = &s->first;
    s->random = (uint32_t)(uintptr_t)s * 2654435761u;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->thread, NULL, stream_main, s) != 0) {
        pthread_cond_destroy(&s->changed);
        pthread_mutex_destroy(&s->lock);
        FSDP_FAIL(FSDP_ERR_DEVICE, "guard device: cannot start the thread of a stream");
    }
    return FSDP_OK;
}

static void guard_stream_fini(fsdp_stream *base)
{
    guard_stream *s = (guard_stream *)base;
    pthread_mutex_lock(&s->lock);
    s->quit = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
}

static fsdp_status told(guard_stream *s)
{
    fsdpi_error e = s->failed;
    pthread_mutex_unlock(&s->lock);
    fsdpi_error_restore(&e);
    return e.st;
}

static fsdp_status enqueue(guard_stream *s, fsdp_kernel_fn fn, const void *args, size_t bytes, guard_stream *other)
{
    work *w = fsdpi_calloc(1, sizeof(*w) + bytes);
    FSDP_FAIL_IF(w == NULL, FSDP_ERR_NOMEM, "guard device: no memory for a launch");
    w->fn = fn;
    w->bytes = bytes;
    if (bytes > 0) memcpy(w->args, args, bytes);
    if (other != NULL) {
        w->other = other;
        pthread_mutex_lock(&other->lock);
        w->upto = other->launched;
        pthread_mutex_unlock(&other->lock);
    }
    pthread_mutex_lock(&s->lock);
    if (s->failed.st != FSDP_OK) {
        fsdpi_free(w);
        return fsdp_error_through(told(s), __func__, __FILE__, __LINE__);
    }
    *s->last = w;
    s->last = &w->next;
    s->launched++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return FSDP_OK;
}

static fsdp_status guard_launch(fsdp_stream *s, fsdp_kernel_fn fn, const void *args, size_t bytes)
{
    return enqueue((guard_stream *)s, fn, args, bytes, NULL);
}

static fsdp_status guard_wait_stream(fsdp_stream *s, fsdp_stream *other)
{
    return enqueue((guard_stream *)s, NULL, NULL, 0, (guard_stream *)other);
}

static fsdp_status guard_sync(fsdp_stream *base)
{
    guard_stream *s = (guard_stream *)base;
    pthread_mutex_lock(&s->lock);
    while (s->done < s->launched) pthread_cond_wait(&s->changed, &s->lock);
    if (s->failed.st != FSDP_OK) {
        fsdpi_error e = s->failed;
        s->failed.st = FSDP_OK;
        pthread_mutex_unlock(&s->lock);
        fsdpi_error_restore(&e);
        return fsdp_error_through(e.st, __func__, __FILE__, __LINE__);
    }
    pthread_mutex_unlock(&s->lock);
    return FSDP_OK;
}

const fsdpi_device_ops fsdpi_device_guard_ops = {
    .name = "guard",
    .host_accessible = false,
    .async = true,
    .device_size = sizeof(guard_device),
    .init = guard_init,
    .fini = guard_fini,
    .alloc = guard_alloc,
    .free = guard_free,
    .map = guard_map,
    .unmap = guard_unmap,
    .protect = guard_protect,
    .stream_size = sizeof(guard_stream),
    .stream_init = guard_stream_init,
    .stream_fini = guard_stream_fini,
    .launch = guard_launch,
    .sync = guard_sync,
    .wait_stream = guard_wait_stream,
};
