/* SPDX-License-Identifier: MIT
 *
 * A job is numbered; workers wait for a number that they have not seen and take pieces from a shared counter. They
 * spin briefly, since the next job usually comes within microseconds, and then sleep. */
#include "base/pool.h"

#include "base/alloc.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

struct fsdpi_pool {
    int threads; /* as asked; others than the caller of run may read it at any time */
    int running; /* that there are, the caller included; 0: not started */
    pthread_t *thread;
    pthread_mutex_t use;   /* held by the caller whom the threads work for */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic uint64_t job;  /* how many jobs were started; UINT64_MAX ends the threads */
    _Atomic int64_t next;  /* next piece */
    _Atomic int busy;      /* workers that have not finished the job */
    int64_t n;
    void (*fn)(void *, int64_t, int);
    void *arg;
};

typedef struct worker_arg {
    fsdpi_pool *pool;
    int worker;
} worker_arg;

static void work(fsdpi_pool *p, int worker)
{
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (i >= p->n) return;
        p->fn(p->arg, i, worker);
    }
}

static void *worker_main(void *arg)
{
    worker_arg w = *(worker_arg *)arg;
    fsdpi_free(arg);
    fsdpi_pool *p = w.pool;
    for (uint64_t seen = 0;;) {
        uint64_t job = atomic_load_explicit(&p->job, memory_order_acquire);
        for (int spin = 0; job == seen && spin < 2000; spin++) {
            if (spin > 200) sched_yield();
            job = atomic_load_explicit(&p->job, memory_order_acquire);
        }
        if (job == seen) {
            pthread_mutex_lock(&p->lock);
            while ((job = atomic_load_explicit(&p->job, memory_order_acquire)) == seen)
                pthread_cond_wait(&p->wake, &p->lock);
            pthread_mutex_unlock(&p->lock);
        }
        if (job == UINT64_MAX) return NULL;
        seen = job;
        work(p, w.worker);
        atomic_fetch_sub_explicit(&p->busy, 1, memory_order_release);
    }
}

fsdp_status fsdpi_pool_create(fsdpi_pool **out, int threads)
{
    FSDP_FAIL_IF(threads < 1 || threads > 1024, FSDP_ERR_INVALID, "%d threads: must be 1 to 1024", threads);
    fsdpi_pool *p;
    FSDPI_NEW(p, 1);
    p->threads = threads;
    pthread_mutex_init(&p->lock, NULL);
    pthread_mutex_init(&p->use, NULL);
    pthread_cond_init(&p->wake, NULL);
    *out = p;
    return FSDP_OK;
}

int fsdpi_pool_threads(const fsdpi_pool *pool)
{
    return pool != NULL ? pool->threads : 1;
}

/* Where a thread cannot be started the pool goes on with those there are: the results are the same. */
static void start(fsdpi_pool *p)
{
    p->thread = fsdpi_calloc((size_t)p->threads, sizeof(*p->thread));
    int n = 0;
    for (; p->thread != NULL && n < p->threads - 1; n++) {
        worker_arg *w = fsdpi_calloc(1, sizeof(*w));
        if (w == NULL) break;
        *w = (worker_arg){ .pool = p, .worker = n + 1 };
        if (pthread_create(&p->thread[n], NULL, worker_main, w) != 0) {
            fsdpi_free(w);
            break;
        }
    }
    p->running = n + 1;
}

static void announce(fsdpi_pool *p, uint64_t job)
{
    pthread_mutex_lock(&p->lock);
    atomic_store_explicit(&p->job, job, memory_order_release);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

void fsdpi_pool_run(fsdpi_pool *p, int64_t n, void (*fn)(void *, int64_t, int), void *arg)
{
    /* Streams of two devices may come here at once: whoever is second does its work alone, with the same result. */
    bool mine = p != NULL && p->threads > 1 && n > 1 && pthread_mutex_trylock(&p->use) == 0;
    if (mine && p->running == 0) start(p);
    if (!mine || p->running <= 1) {
        if (mine) pthread_mutex_unlock(&p->use);
        for (int64_t i = 0; i < n; i++) fn(arg, i, 0);
        return;
    }
    p->n = n;
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    atomic_store_explicit(&p->busy, p->running - 1, memory_order_relaxed);
    announce(p, atomic_load_explicit(&p->job, memory_order_relaxed) + 1);
    work(p, 0);
    for (int spin = 0; atomic_load_explicit(&p->busy, memory_order_acquire) > 0; spin++)
        if (spin > 200) sched_yield();
    pthread_mutex_unlock(&p->use);
}

void fsdpi_pool_destroy(fsdpi_pool *p)
{
    if (p == NULL) return;
    if (p->running > 0) {
        announce(p, UINT64_MAX);
        for (int i = 0; i < p->running - 1; i++) pthread_join(p->thread[i], NULL);
    }
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    pthread_mutex_destroy(&p->use);
    fsdpi_free(p->thread);
    fsdpi_free(p);
}
