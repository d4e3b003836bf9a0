/* SPDX-License-Identifier: MIT
 *
 * Starting ranks, watching over them, and ending them.
 *
 * The process that launches does nothing else until all ranks have ended: it reaps those that die, notices those that
 * are stopped, passes on a request to stop, and if one rank fails it ends the rest. Ranks die with it (PDEATHSIG). */
#include "comm/launch.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_RANKS = 4096, TICK_MS = 50 };

/* What is left to ranks to end by themselves once one has failed. The whole takes less than 10 s. */
static const double grace_s = 3.0;

int fsdp_cpus_allowed(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re"); /* "QUOTA PERIOD" or "max PERIOD" */
    if (f != NULL) {
        long quota, period;
        if (fscanf(f, "%ld %ld", &quota, &period) == 2 && period > 0 && quota > 0) {
            int limit = (int)((quota + period - 1) / period);
            if (limit < n) n = limit;
        }
        fclose(f);
    }
    return n > 0 ? n : 1;
}

/* ---- one rank ---- */

static const fsdpi_transport_ops *transport_of(const fsdpi_world *w)
{
    const fsdpi_transport_ops *t = NULL;
    return fsdpi_transport_find(&t, w->control->transport, w->control->size) == FSDP_OK ? t : NULL;
}

fsdp_status fsdpi_rank_run(fsdpi_world *w, int rank, fsdp_rank_fn fn, void *arg, fsdpi_rank_state then)
{
    fsdpi_rank_slot *slot = &w->control->rank[rank];
    int size = w->control->size, *ranks = fsdpi_calloc((size_t)size, sizeof(*ranks));
    fsdp_status st = FSDP_OK;
    fsdp_comm *comm = NULL;
    if (ranks == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for %d ranks", size);
    for (int i = 0; st == FSDP_OK && i < size; i++) ranks[i] = i;
    /* The world's block is the first allocation of the heap: at offset 0 on every rank. */
    if (st == FSDP_OK) st = fsdpi_comm_create(&comm, w, transport_of(w), ranks, size, rank, 0);
    fsdpi_free(ranks);
    if (st == FSDP_OK) {
        atomic_store(&slot->state, FSDPI_RANK_RUNNING);
        st = fn(comm, arg);
    }
    if (st == FSDP_OK) {
        fsdp_comm_destroy(comm);
        atomic_store(&slot->state, then);
        return FSDP_OK;
    }
    bool raised = fsdpi_error_status() == st;
    slot->error = st;
    slot->error_is_shared = raised && fsdpi_error_is_shared();
    snprintf(slot->message, sizeof(slot->message), "%s", raised ? fsdp_last_error_message() : fsdp_status_name(st));
    /* First the reason, then the state: who sees the state must not take it for the reason. And both before the
     * communicator is taken apart: streams of this rank may wait for others, who may take their time. */
    fsdpi_world_abort(w, rank, "rank %d: %.480s", rank, slot->message);
    atomic_store(&slot->state, FSDPI_RANK_FAILED);
    fsdp_comm_destroy(comm);
    return fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

/* Makes a world ready for ranks: its first block, its settings. */
static fsdp_status prepare(fsdpi_world *w, fsdpi_world_kind kind, int ranks, const fsdp_launch_opts *o)
{
    const fsdpi_transport_ops *t;
    FSDP_TRY(fsdpi_transport_find(&t, o->transport, ranks));
    FSDP_TRY(fsdpi_world_create(w, kind, ranks));
    size_t block;
    fsdp_status st = fsdpi_heap_alloc(w, fsdpi_comm_block_bytes(ranks), &block);
    if (st != FSDP_OK) {
        fsdpi_world_destroy(w);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    FSDPI_ASSERT(block == 0);
    int cpus = fsdp_cpus_allowed();
    w->control->threads = o->threads > 0 ? o->threads : cpus / ranks > 0 ? cpus / ranks : 1;
    w->control->stuck_ns = o->timeout_s < 0 ? -1 : (int64_t)((o->timeout_s > 0 ? o->timeout_s : 1800.0) * 1e9);
    snprintf(w->control->transport, sizeof(w->control->transport), "%s", t->name);
    return FSDP_OK;
}

fsdp_status fsdp_comm_create_self(fsdp_comm **out)
{
    fsdp_status st;
    fsdpi_world *w;
    FSDPI_NEW(w, 1);
    FSDP_TRY_GOTO(prepare(w, FSDPI_WORLD_PRIVATE, 1, &(fsdp_launch_opts){ 0 }), free_world);
    atomic_store(&w->control->rank[0].state, FSDPI_RANK_RUNNING);
    FSDP_TRY_GOTO(fsdpi_comm_create(out, w, transport_of(w), (int[]){ 0 }, 1, 0, 0), destroy_world);
    (*out)->owns_world = true;
    return FSDP_OK;
destroy_world:
    fsdpi_world_destroy(w);
free_world:
    fsdpi_free(w);
    return st;
}

/* ---- ranks in this process ---- */

typedef struct rank_thread {
    fsdpi_world *world;
    int rank;
    fsdp_rank_fn fn;
    void *arg;
    pthread_t thread;
} rank_thread;

static void *rank_thread_main(void *arg)
{
    rank_thread *t = arg;
    fsdp_status st = fsdpi_rank_run(t->world, t->rank, t->fn, t->arg, FSDPI_RANK_DONE);
    (void)st; /* it is in the slot */
    return NULL;
}

/* The error of the rank that failed first, or of the launcher, as this thread's. */
static fsdp_status first_error(fsdpi_world *w)
{
    fsdpi_control *c = w->control;
    int by = atomic_load(&c->abort_by);
    if (by == 0) return FSDP_OK;
    fsdp_status st = by <= c->size && c->rank[by - 1].error != FSDP_OK ? c->rank[by - 1].error : FSDP_ERR_PEER;
    bool named = c->size == 1 || (by <= c->size && c->rank[by - 1].error_is_shared); /* or there is only one */
    if (by <= c->size && c->rank[by - 1].error != FSDP_OK && named)
        return fsdp_error_raise(st, "fsdp_launch", __FILE__, __LINE__, "%s", c->rank[by - 1].message);
    if (by <= c->size && c->rank[by - 1].error != FSDP_OK)
        return fsdp_error_raise(st, "fsdp_launch", __FILE__, __LINE__, "rank %d: %s", by - 1, c->rank[by - 1].message);
    return fsdp_error_raise(st, "fsdp_launch", __FILE__, __LINE__, "%s", c->abort_message);
}

static fsdp_status launch_threads(fsdpi_world *w, fsdp_rank_fn fn, void *arg)
{
    int n = w->control->size, started = 0;
    rank_thread *t;
    FSDPI_NEW(t, n);
    for (; started < n; started++) {
        t[started] = (rank_thread){ .world = w, .rank = started, .fn = fn, .arg = arg };
        if (pthread_create(&t[started].thread, NULL, rank_thread_main, &t[started]) != 0) {
            fsdpi_world_abort(w, -1, "cannot start the thread of rank %d of %d: %s", started, n, strerror(errno));
            break;
        }
    }
    for (int i = 0; i < started; i++) pthread_join(t[i].thread, NULL);
    fsdpi_free(t);
    return first_error(w);
}

/* ---- ranks as processes ---- */

/* A signal handler sees only globals; a process is a rank of at most one launched world. */
static fsdpi_control *volatile signalled_control;

static void on_rank_signal(int sig)
{
    (void)sig;
    fsdpi_control *c = signalled_control;
    if (c != NULL) atomic_store(&c->stop, 1);
}

typedef struct launcher {
    fsdpi_world *world;
    int size;
    pid_t *pid;          /* 0: ended */
    int64_t *stopped_ms; /* how long it has been stopped while others ran; -1: runs */
    int running;         /* not ended */
    double stopped_s;
    int64_t ending_ms;   /* since when the rest is being ended; -1: not */
    int requests;        /* signals that ask to stop */
    bool killed;
} launcher;

static const char *signal_name(int sig)
{
    const char *s = sigabbrev_np(sig);
    return s != NULL ? s : "?";
}

static const char *hint_of(int sig)
{
    switch (sig) {
    case SIGKILL: return ": was it out of memory? see dmesg";
    case SIGBUS: return ": no memory behind a shared page, or a file was truncated under it";
    case SIGILL: return ": an instruction that this processor lacks; try FSDP_ISA=portable";
    default: return "";
    }
}

static void report_end(launcher *l, int rank, int status)
{
    fsdpi_control *c = l->world->control;
    fsdpi_rank_slot *slot = &c->rank[rank];
    int state = atomic_load(&slot->state);
    long long step = (long long)atomic_load(&slot->step);
    char doing[160];
    fsdpi_world_doing(l->world, rank, doing, sizeof(doing));
    if (WIFSIGNALED(status)) {
        if (!l->killed)
            fsdpi_world_abort(l->world, -1, "rank %d (process %d) was killed by signal %d (SIG%s) at step %lld, in: %s%s",
                              rank, (int)l->pid[rank], WTERMSIG(status), signal_name(WTERMSIG(status)), step, doing,
                              hint_of(WTERMSIG(status)));
    } else if (state == FSDPI_RANK_RUNNING || (WEXITSTATUS(status) != 0 && state != FSDPI_RANK_FAILED)) {
        fsdpi_world_abort(l->world, -1, "rank %d (process %d) exited with status %d at step %lld before it was finished, in: %s",
                          rank, (int)l->pid[rank], WEXITSTATUS(status), step, doing);
    }
    if (state != FSDPI_RANK_FAILED && state != FSDPI_RANK_DONE) {
        bool well = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        atomic_store(&slot->state, well ? FSDPI_RANK_DONE : FSDPI_RANK_DEAD);
    }
    l->pid[rank] = 0;
    l->running--;
}

static void reap(launcher *l)
{
    for (int r = 0; r < l->size; r++) {
        int status;
        while (l->pid[r] > 0) {
            pid_t p = waitpid(l->pid[r], &status, WNOHANG | WUNTRACED | WCONTINUED);
            if (p <= 0) break;
            if (WIFSTOPPED(status)) l->stopped_ms[r] = 0;
            else if (WIFCONTINUED(status)) l->stopped_ms[r] = -1;
            else report_end(l, r, status);
        }
    }
}

static void kill_all(launcher *l)
{
    l->killed = true;
    for (int r = 0; r < l->size; r++)
        if (l->pid[r] > 0) kill(l->pid[r], SIGKILL); /* ends stopped ones too */
}

/* Those that are stopped cannot end by themselves: no use in waiting for them. */
static void kill_stopped(launcher *l)
{
    for (int r = 0; r < l->size; r++)
        if (l->pid[r] > 0 && l->stopped_ms[r] >= 0) kill(l->pid[r], SIGKILL);
}

/* The short clock. It ticks only while this process runs and some rank does: a job that is suspended as a whole, here
 * or from outside, is not hurt by it. */
static void watch_stopped(launcher *l)
{
    int stopped = 0;
    for (int r = 0; r < l->size; r++) stopped += l->pid[r] > 0 && l->stopped_ms[r] >= 0;
    if (stopped == 0 || stopped == l->running || l->stopped_s < 0) return;
    for (int r = 0; r < l->size; r++) {
        if (l->pid[r] <= 0 || l->stopped_ms[r] < 0) continue;
        l->stopped_ms[r] += TICK_MS;
        if ((double)l->stopped_ms[r] < l->stopped_s * 1e3) continue;
        fsdpi_control *c = l->world->control;
        char doing[160];
        fsdpi_world_abort(l->world, -1, "rank %d (process %d) has been stopped (SIGSTOP) for %.0f s at step %lld, in: %s", r,
                          (int)l->pid[r], l->stopped_s, (long long)atomic_load(&c->rank[r].step),
                          fsdpi_world_doing(l->world, r, doing, sizeof(doing)));
    }
}

static bool anybody_polls(const launcher *l)
{
    for (int r = 0; r < l->size; r++)
        if (atomic_load(&l->world->control->rank[r].polls_stop)) return true;
    return false;
}

/* A request to stop: from the terminal, from a batch system to us, or to a rank (its handler sets `stop`). */
static void on_request(launcher *l, int sig)
{
    l->requests++;
    if (l->requests == 1 && anybody_polls(l)) {
        atomic_store(&l->world->control->stop, 1);
        return;
    }
    fsdpi_world_abort(l->world, -1, "stopped by signal %d (SIG%s)", sig, signal_name(sig));
    kill_all(l);
}

/* Waits up to a tick for a signal of the set. */
static int next_signal(const sigset_t *set)
{
    return sigtimedwait(set, NULL, &(struct timespec){ .tv_nsec = TICK_MS * 1000000L });
}

static void watch(launcher *l, const sigset_t *set)
{
    l->ending_ms = -1;
    int64_t last = fsdpi_now_ns();
    while (l->running > 0) {
        int sig = next_signal(set);
        if (sig == SIGINT || sig == SIGTERM || sig == SIGHUP || sig == SIGQUIT) on_request(l, sig);
        reap(l);
        /* Time by ticks, so that being suspended does not count. */
        int64_t now = fsdpi_now_ns();
        if (now - last >= TICK_MS * 1000000L) {
            last = now;
            watch_stopped(l);
            if (atomic_load(&l->world->control->stop) && l->requests == 0 && !anybody_polls(l)) on_request(l, SIGTERM);
            if (l->ending_ms >= 0) l->ending_ms += TICK_MS;
        }
        if (atomic_load(&l->world->control->abort_by) != 0 && l->ending_ms < 0) {
            l->ending_ms = 0;
            kill_stopped(l);
        }
        if ((double)l->ending_ms >= grace_s * 1e3 && !l->killed) kill_all(l);
    }
}

typedef struct child_arg {
    fsdp_rank_fn fn;
    void *arg;
    char *const *argv; /* a program instead of fn */
    pid_t parent;
    sigset_t mask;     /* as it was before the launch */
} child_arg;

/* Leak checks of a sanitizer, where there is one: a forked rank leaves by _exit. */
extern void __lsan_do_leak_check(void) __attribute__((weak));

static void exec_program(const child_arg *a, const fsdpi_world *w, int rank)
{
    char text[96];
    snprintf(text, sizeof(text), "%d", rank);
    setenv("FSDP_RANK", text, 1);
    snprintf(text, sizeof(text), "%d", w->control->size);
    setenv("FSDP_WORLD_SIZE", text, 1);
    snprintf(text, sizeof(text), "%d:%d", w->control_fd, w->heap.fd);
    setenv("FSDP_WORLD", text, 1);
    execvp(a->argv[0], a->argv);
    fsdpi_world_abort((fsdpi_world *)(uintptr_t)w, rank, "cannot run \"%s\": %s", a->argv[0], strerror(errno));
    _exit(127);
}

static _Noreturn void child_main(const child_arg *a, fsdpi_world *w, int rank)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != a->parent) _exit(1); /* it died before that call */
    atomic_store(&w->control->rank[rank].pid, (int)getpid());
    if (a->argv == NULL) {
        /* The terminal sends Ctrl-C to all; the launcher decides what it means. SIGTERM to a rank is a request. */
        signalled_control = w->control;
        signal(SIGINT, SIG_IGN);
        sigaction(SIGTERM, &(struct sigaction){ .sa_handler = on_rank_signal, .sa_flags = SA_RESTART }, NULL);
    } else {
        signal(SIGINT, SIG_IGN);
    }
    sigprocmask(SIG_SETMASK, &a->mask, NULL);
    if (a->argv != NULL) exec_program(a, w, rank);
    fsdp_status st = fsdpi_rank_run(w, rank, a->fn, a->arg, FSDPI_RANK_DONE);
    fsdpi_world_destroy(w);
    fflush(NULL);
    if (st == FSDP_OK && __lsan_do_leak_check != NULL) __lsan_do_leak_check();
    _exit(st == FSDP_OK ? 0 : 1);
}

static void start_all(launcher *l, child_arg *a)
{
    fflush(NULL); /* or each rank prints what is still in the buffers */
    a->parent = getpid();
    for (int r = 0; r < l->size; r++) {
        l->stopped_ms[r] = -1;
        pid_t p = fork();
        if (p == 0) child_main(a, l->world, r);
        if (p < 0) {
            fsdpi_world_abort(l->world, -1, "cannot start rank %d of %d: %s (see ulimit -u)", r, l->size, strerror(errno));
            return;
        }
        l->pid[r] = p;
        l->running++;
    }
}

static fsdp_status launch_processes(fsdpi_world *w, const fsdp_launch_opts *o, child_arg *a)
{
    launcher l = { .world = w, .size = w->control->size, .stopped_s = o->stopped_s != 0 ? o->stopped_s : 5.0 };
    l.pid = fsdpi_calloc((size_t)l.size, sizeof(*l.pid));
    l.stopped_ms = fsdpi_calloc((size_t)l.size, sizeof(*l.stopped_ms));
    if (l.pid == NULL || l.stopped_ms == NULL) {
        fsdpi_free(l.pid);
        fsdpi_free(l.stopped_ms);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to launch %d ranks", l.size);
    }
    sigset_t set;
    sigemptyset(&set);
    for (int i = 0; i < 5; i++) sigaddset(&set, (int[]){ SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT }[i]);
    sigprocmask(SIG_BLOCK, &set, &a->mask);
    /* SIGCHLD ignored would mean that children cannot be waited for. */
    struct sigaction old_chld;
    sigaction(SIGCHLD, &(struct sigaction){ .sa_handler = SIG_DFL }, &old_chld);
    start_all(&l, a);
    watch(&l, &set);
    sigaction(SIGCHLD, &old_chld, NULL);
    /* Requests that came while the last rank ended are done with. */
    while (sigtimedwait(&set, NULL, &(struct timespec){ 0 }) > 0) {
    }
    sigprocmask(SIG_SETMASK, &a->mask, NULL);
    fsdpi_free(l.pid);
    fsdpi_free(l.stopped_ms);
    return first_error(w);
}

/* ---- the public calls ---- */

static fsdp_status check_opts(const fsdp_launch_opts *o)
{
    FSDP_FAIL_IF(o->ranks < 0 || o->ranks > MAX_RANKS, FSDP_ERR_INVALID, "%d ranks: must be 1 to %d", o->ranks, MAX_RANKS);
    FSDP_FAIL_IF(o->threads < 0 || o->threads > 1024, FSDP_ERR_INVALID, "%d threads: must be 1 to 1024", o->threads);
    return FSDP_OK;
}

/* Another launcher started this process as one of many, and its ranks cannot be joined by this build: N worlds of one
 * rank that overwrite each other's files are what nobody wants. */
static fsdp_status refuse_foreign_launcher(void)
{
    static const char *const vars[][2] = { { "OMPI_COMM_WORLD_SIZE", "mpirun (Open MPI)" },
                                           { "PMI_SIZE", "mpiexec (MPICH) or srun" },
                                           { "PMIX_SIZE", "a PMIx launcher" },
                                           { "SLURM_STEP_NUM_TASKS", "srun" },
                                           { "WORLD_SIZE", "torchrun" } };
    for (size_t i = 0; i < sizeof(vars) / sizeof(vars[0]); i++) {
        const char *v = getenv(vars[i][0]);
        FSDP_FAIL_IF(v != NULL && atoi(v) > 1, FSDP_ERR_UNSUPPORTED,
                     "%s started this process as one of %s (%s), but this build joins ranks of `fsdp run` only: start it with "
                     "fsdp run -n %s PROGRAM, or give a number of ranks",
                     vars[i][1], v, vars[i][0], v);
    }
    return FSDP_OK;
}

/* A rank of `fsdp run`: joins, runs, and stays in this process. */
static fsdp_status join_world(const fsdp_launch_opts *o, const char *where, fsdp_rank_fn fn, void *arg)
{
    int control_fd, heap_fd;
    const char *r = getenv("FSDP_RANK");
    FSDP_FAIL_IF(sscanf(where, "%d:%d", &control_fd, &heap_fd) != 2 || r == NULL, FSDP_ERR_COMM,
                 "FSDP_WORLD is \"%s\" and FSDP_RANK \"%s\": not what fsdp run sets", where, r != NULL ? r : "");
    fsdpi_world w;
    FSDP_TRY(fsdpi_world_attach(&w, control_fd, heap_fd));
    int rank = atoi(r), size = w.control->size;
    if (rank < 0 || rank >= size || (o->ranks > 0 && o->ranks != size)) {
        w.heap.fd = w.control_fd = -1;
        fsdpi_world_destroy(&w);
        FSDP_FAIL_IF(rank < 0 || rank >= size, FSDP_ERR_COMM, "FSDP_RANK is %d of %d ranks", rank, size);
        FSDP_FAIL(FSDP_ERR_INVALID, "%d ranks were asked for, but fsdp run started %d: give 0, or the same number", o->ranks,
                  size);
    }
    signalled_control = w.control;
    struct sigaction old;
    sigaction(SIGTERM, &(struct sigaction){ .sa_handler = on_rank_signal, .sa_flags = SA_RESTART }, &old);
    fsdp_status st = fsdpi_rank_run(&w, rank, fn, arg, FSDPI_RANK_BETWEEN);
    sigaction(SIGTERM, &old, NULL);
    signalled_control = NULL;
    fsdpi_error e;
    fsdpi_error_save(&e);
    w.heap.fd = w.control_fd = -1; /* a second fsdp_launch joins again */
    fsdpi_world_destroy(&w);
    if (st != FSDP_OK) fsdpi_error_restore(&e);
    return st;
}

fsdp_status fsdp_launch(const fsdp_launch_opts *opts, fsdp_rank_fn fn, void *arg)
{
    fsdp_launch_opts o = opts != NULL ? *opts : (fsdp_launch_opts){ 0 };
    FSDP_TRY(check_opts(&o));
    const char *where = getenv("FSDP_WORLD");
    if (where != NULL && !o.ranks_are_threads) return join_world(&o, where, fn, arg);
    if (o.ranks == 0) FSDP_TRY(refuse_foreign_launcher());
    bool here = o.ranks_are_threads || o.ranks == 0;
    fsdpi_world w;
    FSDP_TRY(prepare(&w, here ? FSDPI_WORLD_PRIVATE : FSDPI_WORLD_FORKED, o.ranks > 0 ? o.ranks : 1, &o));
    fsdp_status st;
    if (o.ranks_are_threads) st = launch_threads(&w, fn, arg);
    else if (here) st = fsdpi_rank_run(&w, 0, fn, arg, FSDPI_RANK_DONE);
    else st = launch_processes(&w, &o, &(child_arg){ .fn = fn, .arg = arg });
    fsdpi_error e;
    fsdpi_error_save(&e);
    fsdpi_world_destroy(&w);
    if (st != FSDP_OK) fsdpi_error_restore(&e);
    return st;
}

fsdp_status fsdp_launch_program(const fsdp_launch_opts *opts, char *const argv[])
{
    fsdp_launch_opts o = opts != NULL ? *opts : (fsdp_launch_opts){ 0 };
    FSDP_TRY(check_opts(&o));
    FSDP_FAIL_IF(argv == NULL || argv[0] == NULL, FSDP_ERR_INVALID, "fsdp_launch_program: no program");
    FSDP_FAIL_IF(getenv("FSDP_WORLD") != NULL, FSDP_ERR_INVALID, "fsdp run inside a rank of fsdp run: unset FSDP_WORLD");
    fsdpi_world w;
    FSDP_TRY(prepare(&w, FSDPI_WORLD_PROGRAMS, o.ranks > 0 ? o.ranks : fsdp_cpus_allowed(), &o));
    fsdp_status st = launch_processes(&w, &o, &(child_arg){ .argv = argv });
    fsdpi_error e;
    fsdpi_error_save(&e);
    fsdpi_world_destroy(&w);
    if (st != FSDP_OK) fsdpi_error_restore(&e);
    return st;
}
