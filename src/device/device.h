/* SPDX-License-Identifier: MIT
 *
 * The device seam. Five nouns: a device has memory and makes streams; a stream runs kernels in order; an event marks
 * a place in one stream for another to wait for; shared memory is memory of the host that several ranks map.
 *
 * To add a device: fill a table, add it to the list in device.c, and run tests/device/device_test.c with its name. */
#ifndef FSDPI_DEVICE_H
#define FSDPI_DEVICE_H

#include <fsdp/device.h>

#include <stdatomic.h>

#include "base/isa.h"
#include "base/pool.h"

/* Memory that all ranks of a node map: a descriptor, or an inherited mapping where there is none (comm/heap.c). */
typedef struct fsdpi_shared {
    int fd;     /* -1: none */
    void *base; /* where fd < 0: a shared mapping of the whole */
    bool alias; /* false: every user shares `base` itself (ranks as threads) */
} fsdpi_shared;

struct fsdp_kernel {
    /* A device address in [lo, hi) becomes usable by adding delta; others are the host's. */
    uintptr_t lo, hi;
    ptrdiff_t delta;
    fsdpi_pool *pool; /* NULL: no threads beside this one */
    fsdpi_isa isa;
};

typedef struct fsdpi_device_ops {
    const char *name;
    /* Whether the host may follow addresses; whether a launch may return before its kernel has run. */
    bool host_accessible, async;

    /* Required. Bytes of state behind the fsdp_device. */
    size_t device_size;
    /* Optional. After a failure fini is not called. */
    fsdp_status (*init)(fsdp_device *dev);
    void (*fini)(fsdp_device *dev);

    /* Required. `bytes` > 0; page aligned; contents undefined (the guard fills it with NaNs). */
    fsdp_status (*alloc)(fsdp_device *dev, size_t bytes, void **out);
    /* Required. `bytes` as for alloc. All work that uses it has run. */
    void (*free)(fsdp_device *dev, void *p, size_t bytes);

    /* Required. Maps bytes [offset, offset + bytes) of shared memory; offsets are multiples of the page size. The
     * address is the device's, as from alloc. Where the memory is not aliased, `writable` may be ignored. */
    fsdp_status (*map)(fsdp_device *dev, const fsdpi_shared *mem, size_t offset, size_t bytes, bool writable, void **out);
    void (*unmap)(fsdp_device *dev, const fsdpi_shared *mem, void *p, size_t bytes);
    /* Optional. Forbids or allows kernels (and the host) to read pages of a mapping: makes a use after reshard fault. */
    void (*protect)(fsdp_device *dev, void *p, size_t bytes, bool readable);

    /* Required. A stream's own state follows the fsdp_stream. */
    size_t stream_size;
    fsdp_status (*stream_init)(fsdp_stream *s);
    /* Waits for its work first. */
    void (*stream_fini)(fsdp_stream *s);
    /* Required. Copies the arguments; returns the stream's error instead of running anything after it. */
    fsdp_status (*launch)(fsdp_stream *s, fsdp_kernel_fn fn, const void *args, size_t bytes);
    fsdp_status (*sync)(fsdp_stream *s);
    /* Optional, where async: makes later work of `s` wait for all work now on `other`. */
    fsdp_status (*wait_stream)(fsdp_stream *s, fsdp_stream *other);
} fsdpi_device_ops;

struct fsdp_device {
    const fsdpi_device_ops *ops;
    _Atomic int refs; /* the opener's, and one for each communicator that has streams on it */
};

void fsdpi_device_retain(fsdp_device *dev);
void fsdpi_device_release(fsdp_device *dev);

struct fsdp_stream {
    fsdp_device *dev;
    fsdp_kernel kernel; /* what its kernels are given */
};

extern const fsdpi_device_ops fsdpi_device_cpu_ops, fsdpi_device_guard_ops;

/* The names of all devices, comma separated. */
const char *fsdpi_device_names(void);

/* pool (may be NULL) is borrowed for the stream's life. */
fsdp_status fsdpi_stream_create(fsdp_stream **out, fsdp_device *dev, fsdpi_pool *pool);
void fsdpi_stream_destroy(fsdp_stream *s);
/* Work that comes to s from now on runs after all that is on `other` now. They may be of different devices: then the host waits. */
fsdp_status fsdpi_stream_wait_stream(fsdp_stream *s, fsdp_stream *other);

/* In a kernel: fn(arg, i, worker) for i in [0, n) on the rank's threads. */
static inline void fsdpi_kernel_parallel(const fsdp_kernel *k, int64_t n, void (*fn)(void *, int64_t, int), void *arg)
{
    fsdpi_pool_run(k->pool, n, fn, arg);
}

/* Sets bytes of device memory, in stream order. */
fsdp_status fsdpi_stream_fill(fsdp_stream *s, void *dst, int byte, size_t bytes);

size_t fsdpi_page_size(void);
static inline size_t fsdpi_round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

#endif
