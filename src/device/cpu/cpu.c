/* SPDX-License-Identifier: MIT
 *
 * The CPU: memory is the host's, a kernel runs within its launch. */
#include "device/device.h"

#include "base/alloc.h"
#include "base/error.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

typedef struct cpu_stream {
    fsdp_stream base;
    fsdpi_error failed; /* the first error; FSDP_OK: none */
} cpu_stream;

static fsdp_status cpu_alloc(fsdp_device *dev, size_t bytes, void **out)
{
    (void)dev;
    void *p = MAP_FAILED;
    if (!fsdpi_alloc_should_fail())
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FSDP_FAIL_IF(p == MAP_FAILED, FSDP_ERR_NOMEM, "no memory for a buffer of %zu bytes", bytes);
    /* Fewer page faults and page walks. Blocks lie side by side, so that smaller ones share a huge page. A refusal does no harm. */
    if (bytes >= (size_t)64 << 10) madvise(p, bytes, MADV_HUGEPAGE);
    *out = p;
    return FSDP_OK;
}

static void cpu_free(fsdp_device *dev, void *p, size_t bytes)
{
    (void)dev;
    munmap(p, bytes);
}

static fsdp_status cpu_map(fsdp_device *dev, const fsdpi_shared *mem, size_t offset, size_t bytes, bool writable, void **out)
{
    (void)dev;
    if (!mem->alias) {
        *out = (char *)mem->base + offset;
        return FSDP_OK;
    }
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *p;
    if (mem->fd >= 0) {
        p = mmap(NULL, bytes, prot, MAP_SHARED, mem->fd, (off_t)offset);
    } else { /* old size 0: a second mapping of the same shared pages (mremap(2)) */
        p = mremap((char *)mem->base + offset, 0, bytes, MREMAP_MAYMOVE);
        if (p != MAP_FAILED && !writable) mprotect(p, bytes, prot);
    }
    FSDP_FAIL_IF(p == MAP_FAILED, FSDP_ERR_NOMEM, "cannot map %zu bytes of shared memory: %s", bytes, strerror(errno));
    *out = p;
    return FSDP_OK;
}

static void cpu_unmap(fsdp_device *dev, const fsdpi_shared *mem, void *p, size_t bytes)
{
    (void)dev;
    if (mem->alias) munmap(p, bytes);
}

static void cpu_protect(fsdp_device *dev, void *p, size_t bytes, bool readable)
{
    (void)dev;
    mprotect(p, bytes, readable ? PROT_READ : PROT_NONE);
}

static fsdp_status cpu_launch(fsdp_stream *s, fsdp_kernel_fn fn, const void *args, size_t bytes)
{
    (void)bytes;
    cpu_stream *c = (cpu_stream *)s;
    fsdp_status st = c->failed.st;
    if (st != FSDP_OK) {
        fsdpi_error_restore(&c->failed);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    st = fn(&s->kernel, args);
    if (st == FSDP_OK) return FSDP_OK;
    st = fsdp_error_through(st, __func__, __FILE__, __LINE__);
    fsdpi_error_save(&c->failed);
    return st;
}

static fsdp_status cpu_sync(fsdp_stream *s)
{
    cpu_stream *c = (cpu_stream *)s;
    fsdp_status st = c->failed.st;
    if (st == FSDP_OK) return FSDP_OK;
    fsdpi_error_restore(&c->failed);
    c->failed.st = FSDP_OK; /* told: the stream can be used again */
    return fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

const fsdpi_device_ops fsdpi_device_cpu_ops = {
    .name = "cpu",
    .host_accessible = true,
    .device_size = sizeof(fsdp_device),
    .alloc = cpu_alloc,
    .free = cpu_free,
    .map = cpu_map,
    .unmap = cpu_unmap,
    .protect = cpu_protect,
    .stream_size = sizeof(cpu_stream),
    .launch = cpu_launch,
    .sync = cpu_sync,
};
