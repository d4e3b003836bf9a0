/* SPDX-License-Identifier: MIT
 *
 * What happens to a run: ranks and launcher are killed, stopped or crash at any time; it is asked to stop, or nobody reads what it
 * prints; the disk is full; the loss is not a number. It ends within seconds, on every rank, with one message that names rank,
 * signal, step or file, and --resume latest goes on to the log of a run to which nothing happened. */
#include "support/command.h"
#include "support/testing.h"

#include <fsdp/random.h>

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Under a sanitizer: shorter runs, and each accident once or twice instead of again and again. It looks at what is done about an
 * accident, and at how a run goes on from it; how many steps there are around it, and at which of them it comes, is the other build's. */
#if SANITIZED
#define STEPS 150
#define STEPS_TEXT "150"
#else
#define STEPS 300
#define STEPS_TEXT "300"
#endif
#define SETTINGS "--model config.json --data text.txt --val-fraction 0 --batch 6 --micro-batch 1 --steps " STEPS_TEXT " --lr 0.003 --save-every 30 "

static void nap(double s)
{
    nanosleep(&(struct timespec){ .tv_nsec = (long)(s * 1e9) }, NULL);
}

static int straight_run(void **state)
{
    if (command_setup(state) != 0) return -1;
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* ranks whose launcher was killed are reaped here */
    command_ok("train --out straight --ranks 2 --threads 1 --quiet " SETTINGS);
    return 0;
}

static int lines_now(const char *run)
{
    char path[100];
    int n = 0;
    snprintf(path, sizeof(path), "%s/log.jsonl", run);
    FILE *f = fopen(path, "r");
    for (int c; f != NULL && (c = getc(f)) != EOF;) n += c == '\n';
    if (f != NULL) fclose(f);
    return n;
}

/* Starts it and waits until it has had so many steps. false: it has ended before. */
static bool begin(command *c, const char *run, int ranks, int steps, const char *more)
{
    if (path_there("%s", run)) command_start(c, "train --out %s --ranks %d --threads 1 --resume latest %s", run, ranks, more);
    else command_start(c, "train --out %s --ranks %d --threads 1 " SETTINGS "%s", run, ranks, more);
    while (lines_now(run) < steps) {
        siginfo_t info = { .si_pid = 0 };
        if (waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == c->pid) return false;
        nap(0.001);
    }
    return true;
}

static bool ended(pid_t pid)
{
    return waitpid(pid, NULL, WNOHANG) == pid || (kill(pid, 0) != 0 && errno == ESRCH);
}

static void one_message(const command_result *r, const char *text)
{
    const char *newline = strchr(r->err, '\n');
    if (newline == NULL || newline[1] != '\0' || strncmp(r->err, "fsdp: ", 6) != 0) fail_msg("not one message:\n%s", r->err);
    if (strstr(r->err, text) == NULL) fail_msg("the message is not about \"%s\":\n%s", text, r->err);
}

static void finish(const char *run)
{
    command_ok("train --out %s --ranks 3 --threads 1 --resume latest --quiet", run);
    assert_same_log("straight", run, STEPS);
    char a[100];
    snprintf(a, sizeof(a), "%s/model.safetensors", run);
    assert_same_file("straight/model.safetensors", a);
}

/* ---- killed ---- */

static void test_ranks_are_killed(void **state)
{
    (void)state;
    fsdp_rng rng;
    fsdp_rng_init(&rng, 2);
    for (int round = 0; round < (SANITIZED ? 3 : 6); round++) { /* the same run again and again, each time on as many ranks as come up */
        command c;
        command_result r;
        int ranks = (int[]){ 2, 3, 6 }[round % 3], sig = round % 3 == 1 ? SIGSEGV : round == 5 ? SIGBUS : SIGKILL;
        int done = path_there("killed") ? lines_now("killed") : 0;
        if (!begin(&c, "killed", ranks, 1 + (done / 30) * 30 + (int)(fsdp_rng_uniform(&rng) * 45), "--quiet")) {
            command_wait(&c, &r);
            assert_int_equal(r.code, 0);
            break;
        }
        pid_t all[6], victim;
        for (int i = 0; i < ranks; i++) all[i] = command_rank(&c, i);
        victim = all[(int)(fsdp_rng_uniform(&rng) * (float)ranks)];
        assert_true(victim > 0);
        assert_int_equal(kill(victim, sig), 0);
        double before = c.began;
        command_wait(&c, &r);
        (void)before;
        assert_int_equal(r.code, 1);
        char text[64];
        snprintf(text, sizeof(text), "(process %d) was killed by signal %d (SIG%s) at step ", (int)victim, sig, sigabbrev_np(sig));
        one_message(&r, text);
        for (int i = 0; i < ranks; i++) assert_true(ended(all[i]));
    }
    finish("killed");
}

static void test_launcher_is_killed(void **state)
{
    (void)state;
    for (int round = 0; round < (SANITIZED ? 1 : 3); round++) {
        command c;
        command_result r;
        assert_true(begin(&c, "orphans", 3, 40 + 70 * round, "--quiet"));
        pid_t all[3];
        for (int i = 0; i < 3; i++) all[i] = command_rank(&c, i);
        assert_int_equal(kill(c.pid, SIGKILL), 0);
        command_wait(&c, &r);
        assert_int_equal(r.code, 128 + SIGKILL);
        for (int i = 0; i < 3; i++)
            for (int k = 0; !ended(all[i]); k++) {
                if (k > 2000) fail_msg("rank %d outlived its launcher", i);
                nap(0.002);
            }
    }
    finish("orphans");
}

/* A rank that is stopped is noticed, and ended with the rest; a job that is stopped as a whole is not hurt. */
static void test_stopped(void **state)
{
    (void)state;
    command c;
    command_result r;
    assert_true(begin(&c, "stopped", 3, 50, "--quiet"));
    pid_t victim = command_rank(&c, 1);
    assert_int_equal(kill(victim, SIGSTOP), 0);
    command_wait(&c, &r);
    assert_int_equal(r.code, 1);
    one_message(&r, "has been stopped (SIGSTOP) for 5 s");
    assert_true(r.seconds < 15 && ended(victim));
    assert_true(begin(&c, "stopped", 3, 100, "--quiet"));
    assert_int_equal(kill(-c.pid, SIGSTOP), 0); /* all of it, as Ctrl-Z does */
    nap(0.5);
    assert_int_equal(kill(-c.pid, SIGCONT), 0);
    command_wait(&c, &r);
    if (r.code != 0) fail_msg("suspended and continued: %s", r.err);
    assert_same_log("straight", "stopped", STEPS);
}

/* ---- asked to stop ---- */

static void test_asked_to_stop(void **state)
{
    (void)state;
    static const struct {
        int sig, to; /* -1: the launcher; else a rank */
    } ways[] = { { SIGINT, -1 }, { SIGTERM, -1 }, { SIGTERM, 2 }, { SIGHUP, -1 } };
    for (int i = 0; i < 4; i++) {
        command c;
        command_result r;
        char said[100], path[100];
        assert_true(begin(&c, "asked", 3, 30 + STEPS / 5 * i, ""));
        kill(ways[i].to < 0 ? c.pid : command_rank(&c, ways[i].to), ways[i].sig);
        command_wait(&c, &r);
        if (r.code != 0) fail_msg("signal %d: exit status %d: %s", ways[i].sig, r.code, r.err);
        assert_int_equal(r.err[0], '\0');
        int steps = lines_now("asked");
        snprintf(said, sizeof(said), "stopped, as asked, after step %d of " STEPS_TEXT "; go on with: fsdp train --out asked --resume latest", steps);
        if (strstr(r.out, said) == NULL) fail_msg("\"%s\" is not in: %s", said, r.out);
        snprintf(path, sizeof(path), "asked/checkpoints/step-%08d", steps); /* of exactly that step */
        assert_true(path_there("%s/manifest.json", path));
    }
    finish("asked");
    /* Ctrl-C of a terminal goes to all processes: the same */
    command c;
    command_result r;
    assert_true(begin(&c, "terminal", 2, 30, "--quiet"));
    kill(-c.pid, SIGINT);
    command_wait(&c, &r);
    assert_int_equal(r.code, 0);
    finish("terminal");
    /* twice: at once, and not well */
    assert_true(begin(&c, "twice", 2, 30, "--quiet"));
    kill(c.pid, SIGSTOP); /* so that both are there when it looks */
    kill(c.pid, SIGINT);
    kill(c.pid, SIGTERM);
    kill(c.pid, SIGCONT);
    command_wait(&c, &r);
    assert_int_equal(r.code, 1);
    one_message(&r, "stopped by signal");
    finish("twice");
}

static void test_nobody_reads(void **state)
{
    (void)state;
    static command_result r;
    shell_run(&r, "$FSDP train --out head --ranks 2 --threads 1 --log-every 1 " SETTINGS "--steps 1000000 | head -1");
    assert_int_equal(r.code, 0);
    assert_non_null(strstr(r.out, "7056 parameters"));
    assert_true(r.seconds < 20);
    assert_int_equal(r.err[0], '\0');
    int steps = lines_now("head");
    assert_true(steps >= 1 && steps < 100000);
    assert_true(path_there("head/checkpoints/step-%08d/manifest.json", steps));
    /* stdout closed from the beginning, and /dev/full */
    shell_run(&r, "$FSDP train --out closed --ranks 2 --threads 1 " SETTINGS ">&- 2>&- <&-");
    assert_int_equal(r.code, 0); /* as with --quiet; and no file gets what was meant for stdout */
    assert_same_log("straight", "closed", STEPS);
    shell_run(&r, "$FSDP train --out devfull --ranks 2 --threads 1 " SETTINGS ">/dev/full");
    assert_true(r.seconds < 20 && path_there("devfull/checkpoints"));
}

/* ---- what goes wrong by itself ---- */

static void test_not_a_number(void **state)
{
    (void)state;
    command_ok("train --out nan --ranks 2 --model config.json --data text.txt --steps 9 --stop-after 3 --quiet");
    command_result *r = command_fails(1, "step 5: the loss is nan", "train --out nan --ranks 2 --resume latest --lr 1e30 --clip 0");
    assert_non_null(strstr(r->err, "unit \"root\""));
    assert_non_null(strstr(r->err, "The last good checkpoint: that of step 3"));
    assert_non_null(strstr(r->err, "A smaller --lr"));
    assert_null(strstr(r->err, "rank ")); /* it is no rank's */
    assert_int_equal(lines_now("nan"), 4);
    assert_true(path_there("nan/checkpoints/step-00000003/manifest.json"));
    assert_false(path_there("nan/checkpoints/step-00000004") || path_there("nan/model.safetensors"));
    command_ok("train --out nan --resume latest --ranks 3 --batch 9 --micro-batch 1 --quiet"); /* goes on from it */
    command_fails(1, "there is none yet", "train --out nan2 --ranks 1 --model config.json --data text.txt --lr 1e30 --clip 0 --warmup 0 --steps 9 --quiet");
    /* weights that are not numbers from the start */
    command_fails(1, "step 1: the loss is nan", "train --out nan3 --ranks 3 --batch 3 --model config.json --data text.txt --init nan-model --quiet%s",
                  system("mkdir -p nan-model && cp config.json nan-model && cp straight/model.safetensors nan-model && "
                         "printf '\\377\\377\\377\\377' | dd of=nan-model/model.safetensors bs=1 seek=$(($(stat -c %s nan-model/model.safetensors) - 400)) conv=notrunc 2>/dev/null") == 0
                      ? ""
                      : "!");
}

/* A disk that fills up while the run goes on: of checkpoints, or of the log. */
static void test_full_disk(void **state)
{
    (void)state;
    static command_result r;
    shell_run(&r, "mkdir -p small; exec unshare -m sh -c 'mount -t tmpfs -o size=330k none small && $FSDP train --out small/run --ranks 3 --threads 1 " SETTINGS
                  " --keep 100 >out.txt; echo status $?; ls -A small/run/checkpoints; cp -r small/run/checkpoints/step-00000030 saved; rm -rf small/run/checkpoints/step-00000060; "
                  "$FSDP train --out small/run --ranks 2 --resume small/run/checkpoints/step-00000030 --stop-after 31 --keep 1 --quiet; echo status $?'");
    if (strstr(r.err, "unshare") != NULL || strstr(r.err, "mount") != NULL) return; /* not allowed here */
    if (strstr(r.out, "status 1") == NULL) fail_msg("out: %s\nerr: %s", r.out, r.err);
    const char *message = strstr(r.err, "fsdp: ");
    assert_non_null(message);
    assert_null(strstr(message + 1, "fsdp: rank 0: fsdp: "));
    assert_non_null(strstr(message, "small/run/checkpoints/.step-"));
    assert_non_null(strstr(message, "bytes are free"));
    assert_null(strstr(r.out, ".tmp")); /* nothing of the one that failed is left */
    assert_non_null(strstr(r.out, "step-00000030"));
    command_ok("inspect saved");
    /* the log */
    shell_run(&r, "mkdir -p tiny; exec unshare -m sh -c 'mount -t tmpfs -o size=40k none tiny && exec $FSDP train --out tiny/run --ranks 2 --threads 1 " SETTINGS "--quiet'");
    assert_int_equal(r.code, 1);
    one_message(&r, "tiny/run");
    assert_non_null(strstr(r.err, "No space left on device"));
}

/* ---- on a terminal ---- */

static void test_terminal(void **state)
{
    (void)state;
    static command_result r;
    shell_run(&r, "command -v script >/dev/null || exit 77; script -qec '$FSDP train --out moving --ranks 2 --threads 1 " SETTINGS "--stop-after 60' typescript >/dev/null");
    if (r.code == 77) return;
    assert_int_equal(r.code, 0);
    char *text = file_text(NULL, "typescript");
    assert_non_null(strstr(text, "\rstep 60/60  loss"));
    assert_non_null(strstr(text, "saved moving/checkpoints/step-00000060"));
    int lines = 0;
    for (const char *p = text; *p != '\0'; p++) lines += *p == '\n';
    assert_true(lines < 20); /* one line that moves */
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_are_killed),
        cmocka_unit_test(test_launcher_is_killed),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_asked_to_stop),
        cmocka_unit_test(test_nobody_reads),
        cmocka_unit_test(test_not_a_number),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_terminal),
    };
    return cmocka_run_group_tests(tests, straight_run, command_teardown);
}
