/* SPDX-License-Identifier: MIT */
#include "support/ranks.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

void *shared_alloc(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    return p;
}

void shared_free(void *p, size_t bytes)
{
    munmap(p, bytes);
}

fsdp_comm_stats comm_stats(const fsdp_comm *comm)
{
    fsdp_comm_stats s;
    fsdp_comm_get_stats(comm, &s);
    return s;
}

const char *corner_name(const corner *c)
{
    static _Thread_local char text[128];
    snprintf(text, sizeof(text), "%s %s %s, %d ranks%s", c->transport, c->device, fsdp_mode_name(c->mode), c->ranks,
             c->threads ? " (threads)" : "");
    return text;
}

fsdp_status in_corner(fsdp_rank_fn fn, const corner *c)
{
    fsdp_launch_opts o = { .ranks = c->ranks, .transport = c->transport, .ranks_are_threads = c->threads, .timeout_s = 20, .threads = 1 };
    return fsdp_launch(&o, fn, (void *)(uintptr_t)c);
}

static void run(fsdp_rank_fn fn, const corners *which, corner *c)
{
    if (which->shared > 0) c->shared = shared_alloc(which->shared);
    if (in_corner(fn, c) != FSDP_OK) fail_msg("%s: %s", corner_name(c), fsdp_last_error());
    if (which->after != NULL) which->after(c);
    if (which->shared > 0) shared_free(c->shared, which->shared);
}

void in_corners(fsdp_rank_fn fn, const corners *which)
{
    static const char *const transports[] = { "shm", "copy" }, *const devices[] = { "cpu", "guard" };
    static const int usual[] = { 1, 2, 3, 5, 8, 0 };
    const int *ranks = which->ranks != NULL ? which->ranks : usual;
    bool in_turns = SANITIZED && CAN_FORK && !which->processes_only && !which->threads_only; /* one kind in each corner, and both in the end */
    for (int threads = 0; threads < 2; threads++) {
        if (threads ? which->processes_only : which->threads_only || !CAN_FORK) continue;
        for (int t = 0; t < 2; t++)
            for (int d = 0; d < 2; d++)
                for (int m = FSDP_MODE_FULL; m <= (which->all_modes ? FSDP_MODE_NONE : FSDP_MODE_FULL); m++)
                    for (int r = 0; ranks[r] > 0; r++) {
                        corner c = { .transport = transports[t], .device = devices[d], .mode = (fsdp_mode)m, .ranks = ranks[r], .threads = threads, .arg = which->arg };
                        if (which->transport != NULL && strcmp(which->transport, c.transport) != 0) continue;
                        if (which->device != NULL && strcmp(which->device, c.device) != 0) continue;
                        if (ranks[r] < which->at_least || (in_turns && (t + d + m + r) % 2 != threads)) continue;
                        run(fn, which, &c);
                    }
    }
}

int in_child(void (*fn)(void *arg), void *arg)
{
    fflush(NULL);
    pid_t p = fork();
    assert_true(p >= 0);
    if (p == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
        signal(SIGSEGV, SIG_DFL);
        signal(SIGBUS, SIG_DFL);
        fn(arg);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(p, &status, 0), p);
    return status;
}

void assert_faults(void (*fn)(void *arg), void *arg)
{
    if (!CAN_FORK) return;
    int status = in_child(fn, arg);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGSEGV)
        fail_msg("it should have died of SIGSEGV, but the wait status is %#x", (unsigned)status);
}
