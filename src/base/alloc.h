/* SPDX-License-Identifier: MIT
 *
 * Host memory for the library's own structures (not for tensors: see device/device.h). Tests make the n-th
 * allocation fail, so every caller checks, and every path back is walked. */
#ifndef FSDPI_BASE_ALLOC_H
#define FSDPI_BASE_ALLOC_H

#include <fsdp/status.h>

/* Zeroed. NULL when there is no memory (or the test says so); n * size is checked for overflow. */
void *fsdpi_calloc(size_t n, size_t size) FSDP_NODISCARD;
/* Grows or shrinks; what is added is not zeroed. On NULL the old block is as it was. */
void *fsdpi_realloc(void *p, size_t n, size_t size) FSDP_NODISCARD;
char *fsdpi_strdup(const char *s) FSDP_NODISCARD;
void fsdpi_free(void *p);

/* Allocates into an lvalue pointer, or fails the calling function. */
#define FSDPI_NEW(p, n)                                                                                     \
    do {                                                                                                    \
        (p) = fsdpi_calloc((size_t)(n), sizeof(*(p)));                                                      \
        FSDP_FAIL_IF((p) == NULL, FSDP_ERR_NOMEM, "no memory for %zu x %zu bytes", (size_t)(n), sizeof(*(p))); \
    } while (0)

/* Makes the n-th allocation from now in this process (1 = the next) fail, once; 0 = none. Returns how many
 * allocations were made since the last call. */
long fsdpi_alloc_fail_at(long n);

/* One decision of the same kind, for allocations that do not go through fsdpi_calloc (device memory). */
bool fsdpi_alloc_should_fail(void);

/* Blocks now held. */
long fsdpi_alloc_live(void);

#endif
