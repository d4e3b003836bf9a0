/* SPDX-License-Identifier: MIT
 *
 * The threads of one rank. Work is cut by the shape of the result into numbered pieces, never by the number of
 * threads: which thread does a piece changes nothing that it computes. */
#ifndef FSDPI_BASE_POOL_H
#define FSDPI_BASE_POOL_H

#include <fsdp/status.h>

typedef struct fsdpi_pool fsdpi_pool;

/* `threads` counts the caller: 1 starts none. The threads start with the first piece of work (after any fork). */
fsdp_status fsdpi_pool_create(fsdpi_pool **out, int threads);
void fsdpi_pool_destroy(fsdpi_pool *pool);
int fsdpi_pool_threads(const fsdpi_pool *pool);

/* Calls fn(arg, i, worker) for each i in [0, n), in any order, on the caller (worker 0) and the pool's threads;
 * returns when all are done. pool may be NULL: then in order, on the caller. So does a caller
 * who comes while another is served. */
void fsdpi_pool_run(fsdpi_pool *pool, int64_t n, void (*fn)(void *arg, int64_t i, int worker), void *arg);

#endif
