/* SPDX-License-Identifier: MIT */
#include "checkpoint/background.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/log.h"
#include "comm/comm.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { GATE_CLOSED, GATE_RUN, GATE_DROP };

struct fsdpi_background {
    fsdp_comm *comm; /* of the threads; made with the first save */
    pthread_t thread;
    bool has_thread;      /* to be joined */
    pthread_mutex_t lock; /* guards gate */
    pthread_cond_t turned;
    int gate;
    fsdpi_save *save;
    _Atomic bool done;
    fsdp_status st; /* of the save that the thread has ended, until somebody has been told */
    fsdpi_error error;
    bool said; /* that a save was in the foreground after all */
};

/* ---- the thread ---- */

static int wait_for_gate(fsdpi_background *b)
{
    pthread_mutex_lock(&b->lock);
    while (b->gate == GATE_CLOSED) pthread_cond_wait(&b->turned, &b->lock);
    int gate = b->gate;
    pthread_mutex_unlock(&b->lock);
    return gate;
}

static void open_gate(fsdpi_background *b, int gate)
{
    pthread_mutex_lock(&b->lock);
    b->gate = gate;
    pthread_cond_signal(&b->turned);
    pthread_mutex_unlock(&b->lock);
}

static void *work(void *arg)
{
    fsdpi_background *b = arg;
    if (wait_for_gate(b) != GATE_RUN) return NULL;
    b->st = fsdpi_save_run(b->save, b->comm);
    if (b->st != FSDP_OK) fsdpi_error_save(&b->error);
    fsdpi_snapshot_unstage(fsdpi_save_snapshot(b->save));
    atomic_store(&b->done, true);
    return NULL;
}

/* Signals are the rank's own thread's: it knows what to do with them. */
static fsdp_status start_thread(fsdpi_background *b)
{
    sigset_t all, before;
    sigfillset(&all);
    b->gate = GATE_CLOSED;
    atomic_store(&b->done, false);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = fsdpi_alloc_should_fail() ? -1 : pthread_create(&b->thread, NULL, work, b);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    FSDP_FAIL_IF(rc != 0, FSDP_ERR_NOMEM, "no thread to save from");
    b->has_thread = true;
    return FSDP_OK;
}

static void join(fsdpi_background *b)
{
    if (b == NULL || !b->has_thread) return;
    pthread_join(b->thread, NULL);
    b->has_thread = false;
}

/* ---- beginning ---- */

static fsdp_status make(fsdp_checkpoint *c)
{
    fsdpi_background *b;
    FSDPI_NEW(b, 1);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->turned, NULL);
    c->background = b;
    return FSDP_OK;
}

/* What a rank says of its preparations. */
typedef struct readiness {
    bool ready;
    size_t bytes;
    char why[160];
} readiness;

static readiness prepare(fsdpi_background *b, fsdpi_save *save, size_t most_bytes)
{
    fsdpi_snapshot *snap = fsdpi_save_snapshot(save);
    readiness mine = { .bytes = snap->bytes };
    if (most_bytes > 0 && snap->bytes > most_bytes) {
        snprintf(mine.why, sizeof(mine.why), "its copy would take %zu bytes, and at most %zu are allowed", snap->bytes, most_bytes);
        return mine;
    }
    fsdp_status st = fsdpi_snapshot_stage(snap);
    if (st == FSDP_OK) st = start_thread(b);
    mine.ready = st == FSDP_OK;
    if (!mine.ready) snprintf(mine.why, sizeof(mine.why), "%.150s", fsdp_last_error_message());
    return mine;
}

static void drop_thread(fsdpi_background *b)
{
    if (b->has_thread) open_gate(b, GATE_DROP);
    join(b);
    b->save = NULL;
}

/* The first rank that is not ready; -1: all are. */
static int find_unready(fsdp_comm *comm)
{
    for (int r = 0; r < comm->size; r++)
        if (!((const readiness *)fsdpi_comm_told(comm, r))->ready) return r;
    return -1;
}

fsdp_status fsdpi_background_begin(fsdp_checkpoint *c, fsdpi_save *save, size_t most_bytes, bool *taken)
{
    *taken = false;
    FSDP_TRY(fsdp_comm_agree(c->comm, c->background != NULL ? FSDP_OK : make(c)));
    fsdpi_background *b = c->background;
    if (b->comm == NULL) {
        FSDP_TRY(fsdp_comm_split(c->comm, 0, fsdp_comm_rank(c->comm), &b->comm));
        b->comm->aside = true;
    }
    b->save = save;
    readiness mine = prepare(b, save, most_bytes);
    fsdp_status st = fsdpi_comm_tell(c->comm, FSDPI_OP_SAVE, NULL, &mine, sizeof(mine));
    int unready = st == FSDP_OK ? find_unready(c->comm) : -1;
    if (st != FSDP_OK || unready >= 0) drop_thread(b);
    if (st != FSDP_OK) return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    if (unready >= 0) { /* a copy that was made all the same is as good to write from */
        const readiness *r = fsdpi_comm_told(c->comm, unready);
        if (!b->said && fsdp_comm_rank(c->comm) == 0)
            fsdpi_log(FSDP_LOG_WARN, "step %lld is saved in the foreground: rank %d: %s", (long long)fsdpi_save_step(save), c->comm->world_ranks[unready], r->why);
        b->said = true;
        return FSDP_OK;
    }
    *taken = true;
    open_gate(b, GATE_RUN);
    return FSDP_OK;
}

/* ---- the end of one ---- */

void fsdpi_background_settle(fsdpi_background *b)
{
    join(b);
    if (b == NULL || b->save == NULL) return;
    if (b->st != FSDP_OK) {
        fsdpi_error kept;
        fsdpi_error_save(&kept);
        fsdpi_error_restore(&b->error);
        bool shared = fsdpi_error_is_shared();
        (void)fsdp_error_raise(b->st, __func__, __FILE__, __LINE__, "the save of step %lld in the background: %s", (long long)fsdpi_save_step(b->save), b->error.message);
        if (shared) fsdpi_error_set_shared();
        fsdpi_error_save(&b->error);
        fsdpi_error_restore(&kept);
    }
    fsdpi_save_free(b->save);
    b->save = NULL;
}

fsdp_status fsdp_checkpoint_wait(fsdp_checkpoint *c)
{
    fsdpi_background *b = c->background;
    fsdpi_background_settle(b);
    if (b == NULL || b->st == FSDP_OK) return FSDP_OK;
    fsdp_status st = b->st;
    b->st = FSDP_OK;
    fsdpi_error_restore(&b->error);
    return fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

bool fsdp_checkpoint_is_saving(const fsdp_checkpoint *c)
{
    fsdpi_background *b = c->background;
    return b != NULL && b->save != NULL && !atomic_load(&b->done);
}

size_t fsdp_checkpoint_staged_bytes(const fsdp_checkpoint *c)
{
    fsdpi_background *b = c->background;
    return b != NULL && b->save != NULL ? atomic_load(&fsdpi_save_snapshot(b->save)->staged) : 0;
}

void fsdpi_background_destroy(fsdpi_background *b)
{
    if (b == NULL) return;
    fsdpi_background_settle(b);
    if (b->st != FSDP_OK && b->st != FSDP_ERR_PEER) fsdpi_log(FSDP_LOG_WARN, "%s", b->error.message);
    fsdp_comm_destroy(b->comm);
    pthread_mutex_destroy(&b->lock);
    pthread_cond_destroy(&b->turned);
    fsdpi_free(b);
}
