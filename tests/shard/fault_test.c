/* SPDX-License-Identifier: MIT
 *
 * A rank dies, stops, leaves or fails anywhere in a training step: the launch ends within 10 s, on every transport and
 * device, and says which rank, how, at which step, and what it did last. */
#include "support/mini.h"
#include "support/ranks.h"

#include "base/clock.h"

#include <signal.h>
#include <unistd.h>

typedef struct fate {
    const char *how;   /* "kill", "segv", "stop", "error", "exit" */
    const char *where; /* see below */
    int rank;
    unsigned others_busy_s; /* the others are in code of their own, in the backward before it */
} fate;

static fsdp_status suffer(const fate *f)
{
    if (strcmp(f->how, "kill") == 0) raise(SIGKILL);
    if (strcmp(f->how, "segv") == 0) {
        signal(SIGSEGV, SIG_DFL); /* cmocka's handler is inherited */
        raise(SIGSEGV);
    }
    if (strcmp(f->how, "stop") == 0) raise(SIGSTOP);
    if (strcmp(f->how, "exit") == 0) _exit(0);
    FSDP_FAIL(FSDP_ERR_IO, "the disk is full at the %s", f->where);
}

static fsdp_status at(const fate *f, fsdp_comm *comm, const char *where)
{
    if (fsdp_comm_rank(comm) != f->rank && f->others_busy_s > 0 && strcmp(where, "backward") == 0) sleep(f->others_busy_s);
    if (strcmp(f->where, where) != 0) return FSDP_OK;
    return fsdp_comm_rank(comm) == f->rank ? suffer(f) : FSDP_OK;
}

static fsdp_status unlucky_leaf(mini *m, const fate *f, int64_t leaf)
{
    fsdp_comm *c = m->comm;
    FSDP_TRY(fsdp_pass_begin(&m->pass, c, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, m->pass, "[0 F1 [2", leaf));
    FSDP_TRY(at(f, c, "forward"));
    FSDP_TRY(mini_run(m, m->pass, "]2 F5 ]0 {0 B5 {2", leaf));
    FSDP_TRY(at(f, c, "backward"));
    FSDP_TRY(mini_run(m, m->pass, "}2", leaf));
    FSDP_TRY(at(f, c, "reduction"));
    FSDP_TRY(mini_run(m, m->pass, "B1 }0", leaf));
    FSDP_TRY(at(f, c, "end of a pass"));
    FSDP_TRY(fsdp_pass_end(m->pass));
    m->pass = NULL;
    return FSDP_OK;
}

static void value(const char *name, int64_t i, float *v, void *arg)
{
    fate *f = arg;
    *v = mini_value(name, i);
    if (f != NULL) (void)!suffer(f);
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const fate *f = c->arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    mini m;
    FSDP_TRY(at(f, comm, "start"));
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    bool in_init = strcmp(f->where, "initialisation") == 0 && rank == f->rank;
    FSDP_TRY(fsdp_unit_init(m.unit[MINI_BIG], value, in_init ? (void *)(uintptr_t)f : NULL));
    fsdp_comm_set_step(comm, 6);
    FSDP_TRY(mini_step(&m, MINI_NESTED, 0, size));
    fsdp_comm_set_step(comm, 7);
    for (int turn = 0; turn < 3; turn++) FSDP_TRY(unlucky_leaf(&m, f, turn * size + rank));
    FSDP_TRY(fsdp_step_begin(mini_list(&m)));
    FSDP_TRY(at(f, comm, "step"));
    FSDP_TRY(fsdp_step_end(mini_list(&m)));
    FSDP_TRY(fsdp_unit_summon_begin(m.unit[MINI_BIG], &(fsdp_unit_summon_opts){ .writeback = true }));
    FSDP_TRY(at(f, comm, "summon"));
    FSDP_TRY(fsdp_unit_summon_end(m.unit[MINI_BIG]));
    FSDP_TRY(fsdp_comm_barrier(comm));
    mini_destroy(&m);
    return FSDP_OK;
}

static void expect(const corner *like, const fate *f, fsdp_status st, const char *text)
{
    corner c = *like;
    c.arg = (void *)(uintptr_t)f;
    fsdp_launch_opts o = { .ranks = c.ranks, .transport = c.transport, .ranks_are_threads = c.threads, .stopped_s = 1, .threads = 1 };
    int64_t start = fsdpi_now_ns();
    fsdp_status got = fsdp_launch(&o, train, &c);
    double seconds = (double)(fsdpi_now_ns() - start) * 1e-9;
    char who[32];
    snprintf(who, sizeof(who), "rank %d", f->rank);
    const char *said = fsdp_last_error_message();
    if (got != st || strstr(said, text) == NULL || strncmp(said, who, strlen(who)) != 0)
        fail_msg("%s: rank %d, %s at %s: not \"%s\" but %s:\n%s", corner_name(&c), f->rank, f->how, f->where, text, fsdp_status_name(got), fsdp_last_error());
    if (seconds > (f->others_busy_s > 0 ? 6 : strcmp(f->how, "stop") == 0 ? 6 : 5)) fail_msg("%s: %s at %s: it took %.1f s", corner_name(&c), f->how, f->where, seconds);
}

static void test_a_rank_dies(void **state)
{
    (void)state;
    if (!CAN_FORK) return;
    static const char *const places[] = { "start", "initialisation", "forward", "backward", "reduction", "end of a pass", "step", "summon" };
    static const char *const last[] = { "start", "publication of parameters of \"big\"", "forward gather of \"b\"", "backward gather of \"b\"", "gradient reduction of \"b\"",
                                        "gradient reduction of \"root\"", "publication of parameters of \"big\"", "summon of \"big\"" };
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 4; k++) {
            char text[128];
            bool segv = (i + k) % 2;
            corner c = { .transport = k % 2 ? "copy" : "shm", .device = k / 2 ? "guard" : "cpu", .mode = (fsdp_mode)((i + k) % 4), .ranks = 2 + (i + k) % 2 };
            fate f = { segv ? "segv" : "kill", places[i], (i + k) % 3 % c.ranks, 0 };
            snprintf(text, sizeof(text), "was killed by signal %d (SIG%s) at step %d, in: %s", segv ? 11 : 9, segv ? "SEGV" : "KILL", i < 2 ? 0 : 7, last[i]);
            expect(&c, &f, FSDP_ERR_PEER, text);
        }
}

static void test_a_rank_stops(void **state)
{
    (void)state;
    if (!CAN_FORK) return;
    static const char *const places[] = { "forward", "reduction", "step" };
    for (int i = 0; i < 3; i++) {
        corner c = { .transport = i % 2 ? "copy" : "shm", .device = i == 1 ? "guard" : "cpu", .ranks = 3 };
        expect(&c, &(fate){ "stop", places[i], i % 3, 0 }, FSDP_ERR_PEER, "has been stopped (SIGSTOP) for 1 s at step 7, in: ");
    }
}

static void test_a_rank_leaves(void **state)
{
    (void)state;
    if (!CAN_FORK) return;
    corner c = { .transport = "copy", .device = "guard", .ranks = 3 };
    expect(&c, &(fate){ "exit", "backward", 1, 0 }, FSDP_ERR_PEER, "exited with status 0 at step 7 before it was finished, in: backward gather of \"b\"");
}

/* Nothing is taken apart by the rank itself: its units, pass, summons and optimizer go with the communicator. */
static void test_a_rank_returns_an_error(void **state)
{
    (void)state;
    static const char *const places[] = { "start", "forward", "backward", "reduction", "end of a pass", "step", "summon" };
    for (int i = 0; i < 7; i++)
        for (int k = 0; k < 8; k++) {
            char text[64];
            corner c = { .transport = k % 2 ? "copy" : "shm", .device = k / 2 % 2 ? "guard" : "cpu", .mode = (fsdp_mode)((i + k) % 4), .ranks = 1 + (i + k) % 3, .threads = k / 4 || !CAN_FORK };
            fate f = { "error", places[i], (i + k) % c.ranks, 0 };
            if (c.ranks == 1) continue; /* its message names no rank */
#if defined(__SANITIZE_ADDRESS__)
            if (c.threads) continue; /* what a rank leaves behind is this process's leak */
#endif
            snprintf(text, sizeof(text), "the disk is full at the %s", places[i]);
            expect(&c, &f, FSDP_ERR_IO, text);
        }
}

/* The others are busy for long: they cannot be waited for, also not by the streams of the rank that fails. */
static void test_an_error_waits_for_nobody(void **state)
{
    (void)state;
    if (!CAN_FORK) return;
    corner c = { .transport = "copy", .device = "guard", .ranks = 2 };
    expect(&c, &(fate){ "error", "reduction", 1, 20 }, FSDP_ERR_IO, "the disk is full at the reduction");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_rank_dies),
        cmocka_unit_test(test_a_rank_stops),
        cmocka_unit_test(test_a_rank_leaves),
        cmocka_unit_test(test_a_rank_returns_an_error),
        cmocka_unit_test(test_an_error_waits_for_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
