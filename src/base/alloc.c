/* SPDX-License-Identifier: MIT */
#include "base/alloc.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Test state: what is injected into a process cannot hang off an object that is still to be allocated. */
static _Atomic long made, fail_at, live;

bool fsdpi_alloc_should_fail(void)
{
    return atomic_fetch_add_explicit(&made, 1, memory_order_relaxed) + 1 ==
           atomic_load_explicit(&fail_at, memory_order_relaxed);
}

long fsdpi_alloc_fail_at(long n)
{
    atomic_store(&fail_at, n);
    return atomic_exchange(&made, 0);
}

long fsdpi_alloc_live(void)
{
    return atomic_load(&live);
}

void *fsdpi_calloc(size_t n, size_t size)
{
    if (fsdpi_alloc_should_fail()) return NULL;
    void *p = calloc(n > 0 ? n : 1, size > 0 ? size : 1);
    if (p != NULL) atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return p;
}

void *fsdpi_realloc(void *p, size_t n, size_t size)
{
    if (fsdpi_alloc_should_fail() || (size > 0 && n > SIZE_MAX / size)) return NULL;
    void *q = realloc(p, n * size > 0 ? n * size : 1);
    if (q != NULL && p == NULL) atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return q;
}

char *fsdpi_strdup(const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = fsdpi_calloc(n, 1);
    if (p != NULL) memcpy(p, s, n);
    return p;
}

void fsdpi_free(void *p)
{
    if (p != NULL) atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    free(p);
}
