/* SPDX-License-Identifier: MIT
 *
 * The list of devices, and what is the same for all of them. */
#include "device/device.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

static const fsdpi_device_ops *const devices[] = { &fsdpi_device_cpu_ops, &fsdpi_device_guard_ops };
enum { DEVICES = sizeof(devices) / sizeof(devices[0]), MAX_ARGS = 4096 };

const char *fsdpi_device_names(void)
{
    return "cpu, guard";
}

size_t fsdpi_page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

fsdp_device *fsdp_device_cpu(void)
{
    static fsdp_device cpu = { .ops = &fsdpi_device_cpu_ops }; /* has no state */
    return &cpu;
}

fsdp_status fsdp_device_open(fsdp_device **out, const char *name)
{
    FSDP_FAIL_IF(name == NULL, FSDP_ERR_INVALID, "fsdp_device_open: no name; devices are: %s", fsdpi_device_names());
    for (int i = 0; i < DEVICES; i++) {
        const fsdpi_device_ops *ops = devices[i];
        if (strcmp(ops->name, name) != 0) continue;
        if (ops == &fsdpi_device_cpu_ops) {
            *out = fsdp_device_cpu();
            return FSDP_OK;
        }
        fsdp_device *dev = fsdpi_calloc(1, ops->device_size);
        FSDP_FAIL_IF(dev == NULL, FSDP_ERR_NOMEM, "no memory for device %s", name);
        dev->ops = ops;
        atomic_init(&dev->refs, 1);
        fsdp_status st = ops->init != NULL ? ops->init(dev) : FSDP_OK;
        if (st != FSDP_OK) {
            fsdpi_free(dev);
            return fsdp_error_through(st, __func__, __FILE__, __LINE__);
        }
        *out = dev;
        return FSDP_OK;
    }
    FSDP_FAIL(FSDP_ERR_INVALID, "no device is called \"%s\"; there are: %s", name, fsdpi_device_names());
}

void fsdpi_device_retain(fsdp_device *dev)
{
    atomic_fetch_add(&dev->refs, 1);
}

void fsdpi_device_release(fsdp_device *dev)
{
    if (dev == fsdp_device_cpu() || atomic_fetch_sub(&dev->refs, 1) > 1) return;
    if (dev->ops->fini != NULL) dev->ops->fini(dev);
    fsdpi_free(dev);
}

void fsdp_device_close(fsdp_device *dev)
{
    if (dev != NULL) fsdpi_device_release(dev);
}

const char *fsdp_device_name(const fsdp_device *dev)
{
    return dev->ops->name;
}

bool fsdp_device_host_accessible(const fsdp_device *dev)
{
    return dev->ops->host_accessible;
}

fsdp_status fsdpi_stream_create(fsdp_stream **out, fsdp_device *dev, fsdpi_pool *pool)
{
    fsdp_stream *s = fsdpi_calloc(1, dev->ops->stream_size);
    FSDP_FAIL_IF(s == NULL, FSDP_ERR_NOMEM, "no memory for a stream of %s", dev->ops->name);
    s->dev = dev;
    s->kernel.pool = pool;
    s->kernel.isa = fsdpi_isa_get();
    fsdp_status st = dev->ops->stream_init != NULL ? dev->ops->stream_init(s) : FSDP_OK;
    if (st != FSDP_OK) {
        fsdpi_free(s);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *out = s;
    return FSDP_OK;
}

void fsdpi_stream_destroy(fsdp_stream *s)
{
    if (s == NULL) return;
    if (s->dev->ops->stream_fini != NULL) s->dev->ops->stream_fini(s);
    fsdpi_free(s);
}

fsdp_status fsdp_stream_launch(fsdp_stream *s, fsdp_kernel_fn fn, const void *args, size_t bytes)
{
    FSDP_FAIL_IF(bytes > MAX_ARGS, FSDP_ERR_INVALID, "fsdp_stream_launch: %zu bytes of arguments, at most %d", bytes,
                 MAX_ARGS);
    return s->dev->ops->launch(s, fn, args, bytes);
}

fsdp_status fsdp_stream_sync(fsdp_stream *s)
{
    return s->dev->ops->sync(s);
}

fsdp_status fsdpi_stream_wait_stream(fsdp_stream *s, fsdp_stream *other)
{
    if (s == other) return FSDP_OK;
    /* Between devices the host waits: no kind of device knows another's events. */
    if (s->dev != other->dev) return other->dev->ops->async ? other->dev->ops->sync(other) : FSDP_OK;
    if (s->dev->ops->wait_stream == NULL) return FSDP_OK;
    return s->dev->ops->wait_stream(s, other);
}

void *fsdp_kernel_ptr(const fsdp_kernel *k, const void *p)
{
    uintptr_t a = (uintptr_t)p;
    return (void *)(a >= k->lo && a < k->hi ? a + (uintptr_t)k->delta : a);
}

typedef struct copy_args {
    void *dst;
    const void *src;
    size_t bytes;
} copy_args;

static fsdp_status k_copy(const fsdp_kernel *k, const void *args)
{
    const copy_args *a = args;
    if (a->bytes > 0) memcpy(fsdp_kernel_ptr(k, a->dst), fsdp_kernel_ptr(k, a->src), a->bytes);
    return FSDP_OK;
}

fsdp_status fsdp_stream_copy(fsdp_stream *s, void *dst, const void *src, size_t bytes)
{
    return fsdp_stream_launch(s, k_copy, &(copy_args){ dst, src, bytes }, sizeof(copy_args));
}

typedef struct fill_args {
    void *dst;
    int byte;
    size_t bytes;
} fill_args;

static fsdp_status k_fill(const fsdp_kernel *k, const void *args)
{
    const fill_args *a = args;
    if (a->bytes > 0) memset(fsdp_kernel_ptr(k, a->dst), a->byte, a->bytes);
    return FSDP_OK;
}

fsdp_status fsdpi_stream_fill(fsdp_stream *s, void *dst, int byte, size_t bytes)
{
    return fsdp_stream_launch(s, k_fill, &(fill_args){ dst, byte, bytes }, sizeof(fill_args));
}
