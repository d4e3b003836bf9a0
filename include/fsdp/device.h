/* SPDX-License-Identifier: MIT
 *
 * Where memory lies and where kernels run. A device hands out addresses; the host may follow them only where
 * fsdp_device_host_accessible() says so. Work is launched on a stream: it runs in order, after the launch
 * returns or before, as the device likes, and reaches its memory through fsdp_kernel_ptr():
 *
 *     struct scale { float *x; float by; int64_t n; };
 *     static fsdp_status scale(const fsdp_kernel *k, const void *args)
 *     {
 *         const struct scale *a = args;
 *         float *x = fsdp_kernel_ptr(k, a->x);
 *         for (int64_t i = 0; i < a->n; i++) x[i] *= a->by;
 *         return FSDP_OK;
 *     }
 *     FSDP_TRY(fsdp_stream_launch(stream, scale, &(struct scale){ x, 2, n }, sizeof(struct scale)));
 *
 * Devices: "cpu" runs a kernel within its launch. "guard" is a test device that behaves like an accelerator: the
 * host may not touch its memory (it faults), and kernels run later, on a thread of its own, after random delays.
 * A program that works on "guard" makes no assumption that only a CPU keeps.
 *
 * Threads: a device may be used from any thread; a stream from one at a time. */
#ifndef FSDP_DEVICE_H
#define FSDP_DEVICE_H

#include <fsdp/status.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_device fsdp_device;
typedef struct fsdp_stream fsdp_stream;

/* What a kernel sees of the device it runs on. */
typedef struct fsdp_kernel fsdp_kernel;

/* Reads its arguments from a copy of those that were launched. A status other than FSDP_OK makes the stream fail:
 * later work on it does not run, and fsdp_stream_sync() returns the error. */
typedef fsdp_status (*fsdp_kernel_fn)(const fsdp_kernel *k, const void *args);

/* The CPU. Always there; never closed. */
FSDP_API fsdp_device *fsdp_device_cpu(void);

/* Opens a device by name: "cpu" or "guard". FSDP_ERR_INVALID lists the names there are. */
FSDP_API fsdp_status fsdp_device_open(fsdp_device **out, const char *name) FSDP_NODISCARD;
/* Units that use it keep it alive until their communicator ends. NULL and the CPU are accepted. */
FSDP_API void fsdp_device_close(fsdp_device *dev);
FSDP_API const char *fsdp_device_name(const fsdp_device *dev);
FSDP_API bool fsdp_device_host_accessible(const fsdp_device *dev);

/* Launches fn with a copy of `bytes` bytes of args (at most 4096). Not collective.
 * FSDP_ERR_DEVICE and others: an earlier kernel of this stream failed; fn did not and will not run. */
FSDP_API fsdp_status fsdp_stream_launch(fsdp_stream *s, fsdp_kernel_fn fn, const void *args, size_t bytes) FSDP_NODISCARD;

/* Copies between host and device, or within it, in stream order. A host buffer is borrowed until the next
 * fsdp_stream_sync(). */
FSDP_API fsdp_status fsdp_stream_copy(fsdp_stream *s, void *dst, const void *src, size_t bytes) FSDP_NODISCARD;

/* Waits until all that was launched has run; returns the first error of a kernel. */
FSDP_API fsdp_status fsdp_stream_sync(fsdp_stream *s) FSDP_NODISCARD;

/* In a kernel: the address under which it may use p. Host addresses and NULL are returned as they are. */
FSDP_API void *fsdp_kernel_ptr(const fsdp_kernel *k, const void *p);

FSDP_END_DECLS

#endif
