/* SPDX-License-Identifier: MIT */
#include "comm/world.h"

#include "base/alloc.h"
#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x3150445346ull /* "FSDP1" */

/* Address space for shared memory: as much as the system lets us reserve, from 256 GiB down. 64-bit address spaces
 * have 128 TiB; sanitizers leave less. */
static const size_t heap_most = (size_t)1 << 38, heap_least = (size_t)1 << 26;

static size_t control_bytes_of(int size)
{
    return fsdpi_round_up(sizeof(fsdpi_control) + (size_t)size * sizeof(fsdpi_rank_slot), fsdpi_page_size());
}

/* A memfd of this size; -1 where its size is limited (ulimit -f: a try would raise SIGXFSZ) or there are none. */
static int open_memfd(const char *name, size_t bytes, bool inherit)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < bytes) return -1;
    int fd = memfd_create(name, inherit ? 0 : MFD_CLOEXEC);
    if (fd < 0) return -1;
    if (ftruncate(fd, (off_t)bytes) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void *map_shared(int fd, size_t bytes)
{
    int flags = fd >= 0 ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    return p != MAP_FAILED ? p : NULL;
}

static fsdp_status create_heap(fsdpi_world *w, fsdpi_world_kind kind, size_t *capacity)
{
    w->heap = (fsdpi_shared){ .fd = -1, .alias = kind != FSDPI_WORLD_PRIVATE };
    size_t bytes = heap_most;
    if (kind != FSDPI_WORLD_PRIVATE) w->heap.fd = open_memfd("fsdp-heap", bytes, kind == FSDPI_WORLD_PROGRAMS);
    FSDP_FAIL_IF(kind == FSDPI_WORLD_PROGRAMS && w->heap.fd < 0, FSDP_ERR_NOMEM,
                 "cannot create shared memory for programs: memfd_create failed or file sizes are limited; "
                 "see ulimit -f, which must be unlimited");
    for (; w->heap.fd < 0 && w->heap.base == NULL && bytes >= heap_least; bytes /= 2) {
        w->heap.base = fsdpi_alloc_should_fail() ? NULL : map_shared(-1, bytes);
        if (w->heap.base != NULL) break;
    }
    FSDP_FAIL_IF(w->heap.fd < 0 && w->heap.base == NULL, FSDP_ERR_NOMEM,
                 "cannot reserve %zu MiB of address space for shared memory: %s (see ulimit -v)", heap_least >> 20,
                 strerror(errno));
    *capacity = bytes;
    return FSDP_OK;
}

fsdp_status fsdpi_world_create(fsdpi_world *out, fsdpi_world_kind kind, int size)
{
    fsdpi_world w = { .control_fd = -1 };
    size_t capacity = 0;
    FSDP_TRY(create_heap(&w, kind, &capacity));
    w.control_bytes = control_bytes_of(size);
    if (kind == FSDPI_WORLD_PROGRAMS) w.control_fd = open_memfd("fsdp-control", w.control_bytes, true);
    if (kind != FSDPI_WORLD_PROGRAMS || w.control_fd >= 0)
        w.control = fsdpi_alloc_should_fail() ? NULL : map_shared(w.control_fd, w.control_bytes);
    if (w.control == NULL) {
        int e = errno;
        w.control_bytes = 0;
        if (w.heap.base != NULL) munmap(w.heap.base, capacity);
        if (w.heap.fd >= 0) close(w.heap.fd);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory for the control segment of %d ranks: %s", size, strerror(e));
    }
    w.control->magic = MAGIC;
    w.control->version = 1;
    w.control->size = size;
    w.control->capacity = capacity;
    *out = w;
    return FSDP_OK;
}

fsdp_status fsdpi_world_attach(fsdpi_world *out, int control_fd, int heap_fd)
{
    struct stat sb;
    FSDP_FAIL_IF(fstat(control_fd, &sb) != 0, FSDP_ERR_COMM,
                 "FSDP_WORLD names descriptor %d, which is not open: this program's start closed it", control_fd);
    void *p = map_shared(control_fd, (size_t)sb.st_size);
    FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "cannot map the control segment: %s", strerror(errno));
    fsdpi_control *c = p;
    if ((size_t)sb.st_size < sizeof(*c) || c->magic != MAGIC || c->version != 1) {
        munmap(p, (size_t)sb.st_size);
        FSDP_FAIL(FSDP_ERR_COMM, "FSDP_WORLD names no control segment of this version: were fsdp and this program "
                                 "built from the same libfsdp?");
    }
    *out = (fsdpi_world){ .control = c,
                          .control_bytes = (size_t)sb.st_size,
                          .control_fd = control_fd,
                          .heap = { .fd = heap_fd, .alias = true } };
    return FSDP_OK;
}

void fsdpi_world_destroy(fsdpi_world *w)
{
    if (w->control == NULL) return;
    if (w->heap.base != NULL) munmap(w->heap.base, w->control->capacity);
    if (w->heap.fd >= 0) close(w->heap.fd);
    if (w->control_fd >= 0) close(w->control_fd);
    munmap(w->control, w->control_bytes);
    *w = (fsdpi_world){ .control_fd = -1, .heap.fd = -1 };
}

/* ---- the heap: first fit among freed ranges, else from the top. A few dozen ranges, taken at set-up. ---- */

static void lock_heap(fsdpi_control *c)
{
    int free = 0;
    /* A rank that dies in here leaves it locked: the launcher then sets abort, and nobody allocates any more. */
    while (!atomic_compare_exchange_weak(&c->lock, &free, 1) && atomic_load(&c->abort) == 0) {
        free = 0;
        sched_yield();
    }
}

static void unlock_heap(fsdpi_control *c)
{
    atomic_store(&c->lock, 0);
}

fsdp_status fsdpi_heap_alloc(fsdpi_world *w, size_t bytes, size_t *offset)
{
    fsdpi_control *c = w->control;
    size_t capacity = c->capacity;
    FSDP_FAIL_IF(bytes > capacity, FSDP_ERR_NOMEM, "%zu bytes of shared memory: at most %zu", bytes, capacity);
    bytes = fsdpi_round_up(bytes > 0 ? bytes : 1, fsdpi_page_size());
    FSDP_FAIL_IF(fsdpi_alloc_should_fail(), FSDP_ERR_NOMEM, "no shared memory for %zu bytes", bytes);
    lock_heap(c);
    size_t at = SIZE_MAX;
    for (int i = 0; i < c->free_count; i++) {
        if (c->free[i].bytes < bytes) continue;
        at = c->free[i].offset;
        c->free[i].offset += bytes;
        c->free[i].bytes -= bytes;
        if (c->free[i].bytes == 0) c->free[i] = c->free[--c->free_count];
        break;
    }
    if (at == SIZE_MAX && bytes <= c->capacity - c->top) {
        at = c->top;
        c->top += bytes;
    }
    size_t used = c->top;
    unlock_heap(c);
    FSDP_FAIL_IF(at == SIZE_MAX, FSDP_ERR_NOMEM, "no shared memory for %zu bytes: %zu of %zu are taken", bytes, used,
                 capacity);
    *offset = at;
    return FSDP_OK;
}

void fsdpi_heap_free(fsdpi_world *w, size_t offset, size_t bytes)
{
    fsdpi_control *c = w->control;
    bytes = fsdpi_round_up(bytes > 0 ? bytes : 1, fsdpi_page_size());
    /* Punching a hole frees the pages and makes them zero again. */
    if (w->heap.fd >= 0) {
        if (fallocate(w->heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes) != 0) return;
    } else if (madvise((char *)w->heap.base + offset, bytes, MADV_REMOVE) != 0) {
        return; /* the range is lost, not the job */
    }
    lock_heap(c);
    for (int i = c->free_count - 1; i >= 0; i--) { /* neighbours, at most two, become one range with it */
        size_t at = c->free[i].offset, n = c->free[i].bytes;
        if (at + n != offset && offset + bytes != at) continue;
        offset = at < offset ? at : offset;
        bytes += n;
        c->free[i] = c->free[--c->free_count];
    }
    if (c->free_count < (int)(sizeof(c->free) / sizeof(c->free[0]))) {
        c->free[c->free_count].offset = offset;
        c->free[c->free_count++].bytes = bytes;
    }
    unlock_heap(c);
}

void fsdpi_world_abort(fsdpi_world *w, int by, const char *fmt, ...)
{
    fsdpi_control *c = w->control;
    int nobody = 0;
    if (!atomic_compare_exchange_strong(&c->abort_by, &nobody, by < 0 ? c->size + 1 : by + 1)) return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->abort_message, sizeof(c->abort_message), fmt, ap);
    va_end(ap);
    atomic_store(&c->abort, 1);
}
