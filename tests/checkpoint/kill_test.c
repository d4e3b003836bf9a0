/* SPDX-License-Identifier: MIT
 *
 * Whoever is killed when, the last checkpoint that was announced survives, with the right contents. Fifty times: three ranks save
 * in a loop, each step twice (the second replaces the first); at a random moment a rank or the launcher is killed; then the
 * newest checkpoint must be at least the announced one, be whole, and load. The next round goes on in the same folder, with
 * all that was left there. Every other round saves in the background, while the values that were saved are replaced by others. */
#include "format/scratch.h"
#include "support/testing.h"
#include "support/tiny_gpt.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <time.h>

enum { ROUNDS = 50, RANKS = 3, KEEP = 2, ELEMENTS = 3000 };

/* In memory that outlives everybody. A save is numbered 2 step + (0, or 1 for the one that replaces). */
typedef struct board {
    _Atomic int64_t announced, next_step;
    _Atomic int rank_pid[RANKS];
} board;

typedef struct job {
    board *b;
    const char *folder;
    bool background;
} job;

static const fsdp_param params[] = { { "big", 1, { ELEMENTS } }, { "small", 1, { 2 } } };

static void value(const char *name, int64_t i, float *out, void *arg)
{
    (void)name;
    *out = (float)(*(int64_t *)arg * 7 + i % 5);
}

/* ---- the job that is killed ---- */

static fsdp_status save_on(fsdp_comm *world, void *arg)
{
    const job *j = arg;
    fsdp_unit *u;
    fsdp_checkpoint *c;
    int64_t number;
    atomic_store(&j->b->rank_pid[fsdp_comm_rank(world)], (int)getpid());
    FSDP_TRY(fsdp_unit_create(&u, world, params, 2, NULL));
    FSDP_TRY(fsdp_checkpoint_create(&c, world));
    FSDP_TRY(fsdp_checkpoint_add_param(c, "big", u, 0));
    FSDP_TRY(fsdp_checkpoint_add_param(c, "small", u, 1));
    FSDP_TRY(fsdp_checkpoint_add_i64(c, "number", &number));
    for (int64_t step = atomic_load(&j->b->next_step);; step++)
        for (int again = 0; again < 2; again++) {
            number = 2 * step + again;
            FSDP_TRY(fsdp_unit_init(u, value, &number));
            FSDP_TRY(fsdp_checkpoint_save_with(c, j->folder, step, &(fsdp_save_opts){ .keep = KEEP, .background = j->background }));
            for (int64_t later = 0; j->background && later < 3; later++) { /* the same on every rank: a fill is collective */
                int64_t other = -later - 1;
                FSDP_TRY(fsdp_unit_init(u, value, &other));
            }
            FSDP_TRY(fsdp_checkpoint_wait(c));
            if (fsdp_comm_rank(world) == 0) atomic_store(&j->b->announced, number); /* from here on it must never be lost */
        }
}

static pid_t start_job(job *j)
{
    for (int r = 0; r < RANKS; r++) atomic_store(&j->b->rank_pid[r], 0);
    fflush(NULL);
    pid_t p = fork();
    if (p != 0) return p;
    signal(SIGSEGV, SIG_DFL); /* cmocka's handler would go on with the tests, in the rank */
    fsdp_launch_opts o = { .ranks = RANKS, .threads = 1, .timeout_s = 20 };
    _exit(fsdp_launch(&o, save_on, j) == FSDP_OK ? 0 : 1);
}

/* ---- what is there afterwards ---- */

typedef struct findings {
    const char *path;
    int64_t number;
} findings;

static fsdp_status load_and_check(fsdp_comm *world, void *arg)
{
    findings *f = arg;
    fsdp_unit *u;
    fsdp_checkpoint *c;
    int64_t number = -1;
    static _Thread_local float got[ELEMENTS];
    FSDP_TRY(fsdp_unit_create(&u, world, params, 2, NULL));
    FSDP_TRY(fsdp_checkpoint_create(&c, world));
    FSDP_TRY(fsdp_checkpoint_add_param(c, "big", u, 0));
    FSDP_TRY(fsdp_checkpoint_add_param(c, "small", u, 1));
    FSDP_TRY(fsdp_checkpoint_add_i64(c, "number", &number));
    FSDP_TRY(fsdp_checkpoint_load(c, f->path));
    for (int i = 0; i < 2; i++) {
        FSDP_TRY(fsdp_unit_read_param(u, i, got));
        for (int64_t e = 0; e < fsdp_unit_param_numel(u, i); e++) {
            float want;
            value("", e, &want, &number);
            rank_check(got[e] == want);
        }
    }
    fsdp_checkpoint_destroy(c);
    fsdp_unit_destroy(u);
    if (fsdp_comm_rank(world) == 0) f->number = number;
    return FSDP_OK;
}

static void nap(double s)
{
    nanosleep(&(struct timespec){ .tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9) }, NULL);
}

/* Ranks die with their launcher; it may take them a moment. They are this process's children then (see main). */
static void wait_for_ranks(board *b)
{
    for (int r = 0; r < RANKS; r++) {
        int pid = atomic_load(&b->rank_pid[r]);
        for (int i = 0; pid > 0 && waitpid(pid, NULL, WNOHANG) != pid && kill(pid, 0) == 0; i++) {
            if (i > 2500) fail_msg("rank %d (process %d) outlived its launcher by 5 s", r, pid);
            nap(0.002);
        }
    }
}

static int leftovers(const char *folder)
{
    char command[700];
    snprintf(command, sizeof(command), "ls -A %s | grep -c -e tmp -e replaced", folder);
    FILE *f = popen(command, "r");
    int n = 0;
    if (f == NULL || fscanf(f, "%d", &n) != 1) n = 0;
    if (f != NULL) pclose(f);
    return n;
}

static void test_kill(void **state)
{
    (void)state;
    board *b = shared_memory(sizeof(*b));
    char folder[200], path[600];
    fsdp_rng rng;
    int64_t step;
    int caught = 0;
    snprintf(folder, sizeof(folder), "%s", scratch("killed"));
    job j = { .b = b, .folder = folder };
    fsdp_rng_init(&rng, 4);
    atomic_store(&b->next_step, 1);
    atomic_store(&b->announced, -1);
    for (int round = 0; round < ROUNDS; round++) {
        int status;
        int64_t before = atomic_load(&b->announced);
        j.background = round % 2 == 1;
        pid_t launcher = start_job(&j);
        assert_true(launcher > 0);
        /* it has begun to save */
        for (int i = 0; i < 1000 && atomic_load(&b->announced) == before; i++) nap(0.002);
        assert_true(atomic_load(&b->announced) > before);
        nap(0.02 * (double)fsdp_rng_uniform(&rng));
        int rank = (int)(fsdp_rng_uniform(&rng) * RANKS), victim = round % 3 == 2 ? launcher : atomic_load(&b->rank_pid[rank]);
        int64_t announced = atomic_load(&b->announced);
        assert_int_equal(kill(victim, round % 6 == 1 ? SIGSEGV : SIGKILL), 0);
        assert_int_equal(waitpid(launcher, &status, 0), launcher);
        wait_for_ranks(b);
        announced = atomic_load(&b->announced) > announced ? atomic_load(&b->announced) : announced;
        caught += leftovers(folder) > 0;
        assert_ok(fsdp_checkpoint_latest(folder, path, sizeof(path), &step, NULL));
        findings f = { .path = path };
        fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = 1 + round % 4, .ranks_are_threads = true, .threads = 1 }, load_and_check, &f);
        if (st != FSDP_OK) fail_msg("round %d, %s killed: %s", round, victim == launcher ? "launcher" : "rank", fsdp_last_error());
        if (f.number < announced || f.number / 2 != step)
            fail_msg("round %d: %s has save %lld, but %lld had been announced", round, path, (long long)f.number, (long long)announced);
        atomic_store(&b->next_step, step + 1);
        atomic_store(&b->announced, f.number);
    }
    print_message("in %d of %d rounds the kill came within a save\n", caught, ROUNDS);
    assert_true(caught > 5);
    /* the next save that ends well takes away all that was left */
    pid_t launcher = start_job(&j);
    int64_t at = atomic_load(&b->announced);
    for (int i = 0; i < 1000 && atomic_load(&b->announced) < at + 2; i++) nap(0.002);
    kill(launcher, SIGSTOP); /* so that what is counted does not change: ranks wait for each other soon */
    for (int r = 0; r < RANKS; r++) kill(atomic_load(&b->rank_pid[r]), SIGSTOP);
    nap(0.05);
    char command[700];
    snprintf(command, sizeof(command), "ls -A %s | wc -l", folder);
    FILE *f = popen(command, "r");
    int n = 100;
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%d", &n), 1);
    pclose(f);
    assert_true(n <= KEEP + 3); /* what is kept, the one before it is pruned, what is being written, what it replaces */
    kill(launcher, SIGKILL);
    waitpid(launcher, NULL, 0);
    wait_for_ranks(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill),
    };
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
