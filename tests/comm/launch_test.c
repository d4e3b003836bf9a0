/* SPDX-License-Identifier: MIT
 *
 * Whatever happens to one rank, all ranks end within 10 s and the launch says which rank, what and where. Being
 * suspended is not being dead. */
#include "support/testing.h"

#include "base/clock.h"
#include "comm/comm.h"

#include <fsdp/fsdp.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct fate {
    const char *what;
    int rank;
} fate;

static fsdp_status suffer(fsdp_comm *world, void *arg)
{
    const fate *f = arg;
    fsdp_comm_set_step(world, 17);
    FSDP_TRY(fsdp_comm_barrier(world));
    fsdp_comm_set_phase(world, "forward of unit \"h.3\"");
    if (fsdp_comm_rank(world) == f->rank) {
        if (strcmp(f->what, "kill") == 0) raise(SIGKILL);
        if (strcmp(f->what, "segv") == 0) {
            signal(SIGSEGV, SIG_DFL);
            raise(SIGSEGV);
        }
        if (strcmp(f->what, "stop") == 0) raise(SIGSTOP);
        if (strcmp(f->what, "exit") == 0) _exit(0);
        if (strcmp(f->what, "exit3") == 0) _exit(3);
        if (strcmp(f->what, "error") == 0) FSDP_FAIL(FSDP_ERR_IO, "the disk of rank %d is full", f->rank);
        if (strcmp(f->what, "return") == 0) return FSDP_OK;
        if (strcmp(f->what, "sleep") == 0) sleep(60);
    }
    for (int i = 0; i < 1000000; i++) FSDP_TRY(fsdp_comm_barrier(world));
    return FSDP_OK;
}

static void expect(const char *what, int ranks, int rank, double timeout_s, fsdp_status st, const char *text)
{
    int64_t start = fsdpi_now_ns();
    fsdp_launch_opts o = { .ranks = ranks, .timeout_s = timeout_s, .stopped_s = 1 };
    assert_fails(fsdp_launch(&o, suffer, &(fate){ what, rank }), st, text);
    double seconds = (double)(fsdpi_now_ns() - start) * 1e-9;
    if (seconds > 10) fail_msg("%s: it took %.1f s", what, seconds);
}

static void test_a_rank_that_dies_is_named(void **state)
{
    (void)state;
    expect("kill", 3, 1, 0, FSDP_ERR_PEER, "rank 1 (process");
    expect("kill", 3, 2, 0, FSDP_ERR_PEER, "killed by signal 9 (SIGKILL) at step 17, in: forward of unit \"h.3\"");
    expect("segv", 5, 0, 0, FSDP_ERR_PEER, "killed by signal 11 (SIGSEGV)");
    expect("kill", 1, 0, 0, FSDP_ERR_PEER, "rank 0 (process");
    expect("exit", 2, 1, 0, FSDP_ERR_PEER, "exited with status 0 at step 17 before it was finished");
    expect("exit3", 2, 0, 0, FSDP_ERR_PEER, "exited with status 3");
    expect("stop", 3, 1, 0, FSDP_ERR_PEER, "rank 1 (process");
    expect("stop", 2, 0, 0, FSDP_ERR_PEER, "has been stopped (SIGSTOP) for 1 s at step 17");
}

static void test_an_error_of_one_rank_is_the_launch_s(void **state)
{
    (void)state;
    expect("error", 4, 2, 0, FSDP_ERR_IO, "rank 2: the disk of rank 2 is full");
    expect("error", 1, 0, 0, FSDP_ERR_IO, "the disk of rank 0 is full");
    expect("return", 3, 1, 0, FSDP_ERR_COMM, "rank 1 has finished: it made fewer calls");
    expect("sleep", 2, 1, 2, FSDP_ERR_PEER, "waited 2 s for rank 1 in barrier (step 17); rank 1 was last in: forward of unit");
    /* threads: errors only */
    fsdp_launch_opts o = { .ranks = 3, .ranks_are_threads = true };
    assert_fails(fsdp_launch(&o, suffer, &(fate){ "error", 0 }), FSDP_ERR_IO, "rank 0: the disk of rank 0 is full");
}

static fsdp_status napping(fsdp_comm *world, void *arg)
{
    int64_t until = fsdpi_now_ns() + *(int *)arg * 1000000ll, n = 0;
    double end = 0;
    while (end == 0) {
        if (fsdpi_now_ns() > until) end = 1;
        FSDP_TRY(fsdp_comm_max(world, &end, 1)); /* all leave after the same round */
        n++;
    }
    double rounds[2] = { (double)n, (double)-n };
    FSDP_TRY(fsdp_comm_max(world, rounds, 2));
    rank_check(rounds[0] == -rounds[1]);
    return FSDP_OK;
}

/* Ranks are stopped and continued at random, and once the whole job with its launcher is. */
static void test_suspending_does_no_harm(void **state)
{
    (void)state;
    int ms = 3000;
    pid_t job = fork();
    if (job == 0) {
        setpgid(0, 0);
        fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = 3, .stopped_s = 1, .timeout_s = 2 }, napping, &ms);
        if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
        _exit(st != FSDP_OK);
    }
    setpgid(job, job);
    usleep(300000);
    kill(-job, SIGSTOP); /* what Ctrl-Z does to the whole group */
    usleep(2500000);     /* longer than both clocks */
    kill(-job, SIGCONT);
    int status;
    assert_int_equal(waitpid(job, &status, 0), job);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static fsdp_status stoppable(fsdp_comm *world, void *arg)
{
    if (fsdp_comm_rank(world) == 0 && write(*(int *)arg, "r", 1) != 1) FSDP_FAIL(FSDP_ERR_IO, "pipe");
    bool stop = false;
    int step = 0;
    for (; !stop; step++) {
        usleep(10000);
        FSDP_TRY(fsdp_comm_stop_agreed(world, &stop));
    }
    double steps[2] = { step, -step };
    FSDP_TRY(fsdp_comm_max(world, steps, 2));
    rank_check(steps[0] == -steps[1]); /* all ranks stop after the same step */
    if (fsdp_comm_rank(world) == 0 && write(*(int *)arg, "s", 1) != 1) FSDP_FAIL(FSDP_ERR_IO, "pipe");
    return FSDP_OK;
}

static fsdp_status deaf(fsdp_comm *world, void *arg)
{
    if (fsdp_comm_rank(world) == 0 && write(*(int *)arg, "r", 1) != 1) FSDP_FAIL(FSDP_ERR_IO, "pipe");
    for (;;) FSDP_TRY(fsdp_comm_barrier(world));
}

/* Forks a job, waits until rank 0 runs, sends signals to the launcher; returns the wait status. */
static int signalled(fsdp_rank_fn fn, int sig, int times, char *last)
{
    int p[2], status;
    assert_int_equal(pipe(p), 0);
    pid_t job = fork();
    if (job == 0) {
        close(p[0]);
        fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = 3 }, fn, &p[1]);
        _exit(st == FSDP_OK ? 0 : strstr(fsdp_last_error_message(), "stopped by signal") != NULL ? 5 : 6);
    }
    close(p[1]);
    assert_int_equal(read(p[0], last, 1), 1);
    usleep(100000);
    for (int i = 0; i < times; i++) {
        kill(job, sig);
        usleep(200000);
    }
    assert_int_equal(waitpid(job, &status, 0), job);
    while (read(p[0], last, 1) == 1) {
    }
    close(p[0]);
    return status;
}

static void test_stopping_after_the_same_step(void **state)
{
    (void)state;
    char last;
    int s = signalled(stoppable, SIGINT, 1, &last);
    assert_true(WIFEXITED(s) && WEXITSTATUS(s) == 0 && last == 's');
    s = signalled(stoppable, SIGTERM, 1, &last);
    assert_true(WIFEXITED(s) && WEXITSTATUS(s) == 0 && last == 's');
    s = signalled(deaf, SIGINT, 1, &last); /* it never asks: at once */
    assert_true(WIFEXITED(s) && WEXITSTATUS(s) == 5 && last == 'r');
}

/* The launcher is killed: its ranks do not outlive it. */
static void test_ranks_die_with_the_launcher(void **state)
{
    (void)state;
    int p[2];
    char byte;
    assert_int_equal(pipe(p), 0);
    pid_t job = fork();
    if (job == 0) {
        close(p[0]);
        fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = 4 }, deaf, &p[1]);
        _exit(st != FSDP_OK);
    }
    close(p[1]);
    assert_int_equal(read(p[0], &byte, 1), 1);
    kill(job, SIGKILL);
    assert_int_equal(waitpid(job, NULL, 0), job);
    assert_int_equal(read(p[0], &byte, 1), 0); /* end of file: no rank holds the other end */
    close(p[0]);
}

static void test_no_silent_worlds_of_one(void **state)
{
    (void)state;
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    assert_fails(fsdp_launch(NULL, suffer, NULL), FSDP_ERR_UNSUPPORTED, "mpirun (Open MPI) started this process as one of 4");
    unsetenv("OMPI_COMM_WORLD_SIZE");
}

static void test_programs(void **state)
{
    (void)state;
    char *ok[] = { "true", NULL }, *bad[] = { "false", NULL }, *none[] = { "no-such-program-here", NULL };
    assert_ok(fsdp_launch_program(&(fsdp_launch_opts){ .ranks = 3 }, ok));
    assert_fails(fsdp_launch_program(&(fsdp_launch_opts){ .ranks = 2 }, bad), FSDP_ERR_PEER, "exited with status 1");
    assert_fails(fsdp_launch_program(&(fsdp_launch_opts){ .ranks = 2 }, none), FSDP_ERR_PEER,
                 "cannot run \"no-such-program-here\": No such file");
}

static void seven(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)i;
    (void)arg;
    *value = 7;
}

/* Each launch of a program joins the ranks anew; between them ranks may be busy with other things. */
static fsdp_status one_of_three_launches(fsdp_comm *world, void *arg)
{
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world), round = *(int *)arg;
    rank_check(size == 3);
    for (int i = 0; i < 50 + rank % 2; i++) { /* an odd number of operations, once */
        double x = rank;
        if (i < 50) FSDP_TRY(fsdp_comm_sum_exact(world, &x, 1));
        rank_check(i == 50 || x == 3);
    }
    fsdp_unit *u;
    const fsdp_param p = { "w", 1, { 1000 } };
    FSDP_TRY(fsdp_unit_create(&u, world, &p, 1, NULL));
    float w[1000];
    FSDP_TRY(fsdp_unit_read_param(u, 0, w));
    for (int i = 0; i < 1000; i++) rank_check(w[i] == 0); /* not what the last launch left there */
    FSDP_TRY(fsdp_unit_init(u, seven, NULL));
    FSDP_TRY(fsdp_unit_read_param(u, 0, w));
    for (int i = 0; i < 1000; i++) rank_check(w[i] == 7);
    if (round != 1) fsdp_unit_destroy(u); /* or it goes with the communicator */
    return FSDP_OK;
}

static int launch_three_times(void)
{
    for (int round = 0; round < 3; round++) {
        fsdp_status st = fsdp_launch(NULL, one_of_three_launches, &round);
        if (st != FSDP_OK) {
            fprintf(stderr, "launch %d: %s\n", round, fsdp_last_error());
            return 1;
        }
        if (getpid() % 3 == 0) usleep(100000); /* one of them is late for the next */
    }
    return 0;
}

static void test_a_program_may_launch_again(void **state)
{
    (void)state;
    char self[256], *again[] = { self, "three-launches", NULL }, *leaves[] = { self, "one-leaves", NULL };
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    assert_true(n > 0);
    self[n] = '\0';
    for (int i = 0; i < 5; i++) assert_ok(fsdp_launch_program(&(fsdp_launch_opts){ .ranks = 3, .timeout_s = 20 }, again));
    /* Who does not come to the second launch has finished: the others are told. */
    assert_fails(fsdp_launch_program(&(fsdp_launch_opts){ .ranks = 3, .timeout_s = 20 }, leaves), FSDP_ERR_COMM, "rank 1 has finished: it made fewer calls");
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "three-launches") == 0) return launch_three_times();
    if (argc > 1 && strcmp(argv[1], "one-leaves") == 0) {
        int round = 0;
        fsdp_status st = fsdp_launch(NULL, one_of_three_launches, &round);
        if (st == FSDP_OK && atoi(getenv("FSDP_RANK")) == 1) return 0;
        if (st == FSDP_OK) st = fsdp_launch(NULL, one_of_three_launches, &round);
        return st != FSDP_OK;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_rank_that_dies_is_named),
        cmocka_unit_test(test_an_error_of_one_rank_is_the_launch_s),
        cmocka_unit_test(test_suspending_does_no_harm),
        cmocka_unit_test(test_stopping_after_the_same_step),
        cmocka_unit_test(test_ranks_die_with_the_launcher),
        cmocka_unit_test(test_no_silent_worlds_of_one),
        cmocka_unit_test(test_programs),
        cmocka_unit_test(test_a_program_may_launch_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
