/* SPDX-License-Identifier: MIT */
#include "support/command.h"

#include "support/testing.h"

#include <fsdp/random.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char folder[] = "/tmp/fsdp-cli-XXXXXX";

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void format(char *to, size_t size, const char *fmt, va_list ap)
{
    int n = vsnprintf(to, size, fmt, ap);
    assert_true(n >= 0 && (size_t)n < size);
}

#define FORMAT(text, fmt)                                                                                   \
    do {                                                                                                    \
        va_list ap_;                                                                                        \
        va_start(ap_, fmt);                                                                                 \
        format(text, sizeof(text), fmt, ap_);                                                               \
        va_end(ap_);                                                                                        \
    } while (0)

/* ---- starting and waiting ---- */

static void start(command *c, const char *shell_text)
{
    static int number;
    number = (number + 1) % 8;
    snprintf(c->out, sizeof(c->out), "stdout.%d", number);
    snprintf(c->err, sizeof(c->err), "stderr.%d", number);
    c->began = now();
    fflush(NULL);
    c->pid = fork();
    assert_true(c->pid >= 0);
    if (c->pid > 0) return;
    int out = open(c->out, O_WRONLY | O_CREAT | O_TRUNC, 0666), err = open(c->err, O_WRONLY | O_CREAT | O_TRUNC, 0666), in = open("/dev/null", O_RDONLY);
    dup2(in, 0);
    dup2(out, 1);
    dup2(err, 2);
    setpgid(0, 0); /* so that the deadline ends all of a pipeline */
    for (int s = 1; s < 32; s++) signal(s, SIG_DFL);
    setenv("FSDP", FSDP_TEST_COMMAND, 1);
    /* A sanitizer would catch the signal that a test sends, and exit. */
    char options[1024];
    const char *given = getenv("ASAN_OPTIONS");
    snprintf(options, sizeof(options), "%s:handle_segv=0:handle_sigbus=0", given != NULL ? given : "");
    setenv("ASAN_OPTIONS", options, 1);
    execl("/bin/sh", "sh", "-c", shell_text, (char *)NULL);
    _exit(127);
}

static void read_beginning(const char *path, char *to, size_t size)
{
    FILE *f = fopen(path, "rb");
    size_t n = f != NULL ? fread(to, 1, size - 1, f) : 0;
    if (f != NULL) fclose(f);
    to[n] = '\0';
}

void command_wait(command *c, command_result *r)
{
    int status;
    r->code = -1;
    for (;;) {
        pid_t p = waitpid(c->pid, &status, WNOHANG);
        if (p == c->pid) {
            r->code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            break;
        }
        if (now() - c->began > COMMAND_DEADLINE_S) {
            kill(-c->pid, SIGKILL);
            waitpid(c->pid, &status, 0);
            break;
        }
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    }
    r->seconds = now() - c->began;
    read_beginning(c->out, r->out, sizeof(r->out));
    read_beginning(c->err, r->err, sizeof(r->err));
}

void shell_run(command_result *r, const char *fmt, ...)
{
    char text[4096];
    command c;
    FORMAT(text, fmt);
    start(&c, text);
    command_wait(&c, r);
}

void command_run(command_result *r, const char *fmt, ...)
{
    char text[4096];
    FORMAT(text, fmt);
    shell_run(r, "exec $FSDP %s", text);
}

void command_start(command *c, const char *fmt, ...)
{
    char text[4096], whole[4200];
    FORMAT(text, fmt);
    snprintf(whole, sizeof(whole), "exec $FSDP %s", text);
    start(c, whole);
}

pid_t command_rank(const command *c, int rank)
{
    char path[80];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)c->pid, (int)c->pid);
    FILE *f = fopen(path, "r");
    for (int i = 0; f != NULL && i <= rank; i++)
        if (fscanf(f, "%d", &pid) != 1) pid = 0;
    if (f != NULL) fclose(f);
    return pid;
}

static command_result shown;

command_result *command_ok(const char *fmt, ...)
{
    char text[4096];
    FORMAT(text, fmt);
    command_run(&shown, "%s", text);
    if (shown.code != 0) fail_msg("fsdp %s: exit status %d\n%s%s", text, shown.code, shown.out, shown.err);
    return &shown;
}

static int lines_of(const char *text)
{
    int n = 0;
    for (; *text != '\0'; text++) n += *text == '\n';
    return n;
}

command_result *command_fails(int code, const char *expected, const char *fmt, ...)
{
    char text[4096];
    FORMAT(text, fmt);
    command_run(&shown, "%s", text);
    if (shown.code != code) fail_msg("fsdp %s: exit status %d, not %d\n%s%s", text, shown.code, code, shown.out, shown.err);
    if (strstr(shown.err, expected) == NULL) fail_msg("fsdp %s: the message is not about \"%s\":\n%s", text, expected, shown.err);
    if (lines_of(shown.err) != 1 || strncmp(shown.err, "fsdp: ", 6) != 0) fail_msg("fsdp %s: not one message:\n%s", text, shown.err);
    return &shown;
}

/* ---- the folder ---- */

static void write_file(const char *path, const void *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    fclose(f);
}

static void write_text(const char *path, int words, uint64_t seed)
{
    static const char *const word[] = { "in", "the", "beginning", "was", "light", "and", "it", "divided", "waters", "from", "earth" };
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < words; i++) fprintf(f, "%s%s", word[(int)(fsdp_philox_uniform(seed, "word", i) * 11)], i % 9 == 8 ? ".\n" : " ");
    fclose(f);
}

int command_setup(void **state)
{
    (void)state;
    static const char config[] = "{\"model_type\": \"gpt2\", \"vocab_size\": 256, \"n_positions\": 16, \"n_embd\": 12, \"n_layer\": 2, \"n_head\": 2,"
                                 " \"resid_pdrop\": 0.1, \"embd_pdrop\": 0.1, \"attn_pdrop\": 0.1, \"n_inner\": null}";
    static const char g13[] = "{\"vocab_size\": 13, \"n_positions\": 8, \"n_embd\": 6, \"n_layer\": 2, \"n_head\": 2, \"resid_pdrop\": 0.1,"
                              " \"embd_pdrop\": 0.1, \"attn_pdrop\": 0.1, \"activation_function\": \"gelu\"}";
    static uint16_t tokens[3000];
    if (mkdtemp(folder) == NULL || chdir(folder) != 0) return -1;
    write_file("config.json", config, sizeof(config) - 1);
    write_file("g13.json", g13, sizeof(g13) - 1);
    write_text("text.txt", 1200, 1);
    write_text("val.txt", 150, 2);
    for (int i = 0; i < 3000; i++) tokens[i] = (uint16_t)(i % 3 == 0 ? fsdp_philox_uniform(3, "t", i) * 13 : (5 * tokens[i - 1] + 3) % 13);
    write_file("tokens.bin", tokens, sizeof(tokens));
    return 0;
}

int command_teardown(void **state)
{
    (void)state;
    char text[100];
    snprintf(text, sizeof(text), "rm -rf %s", folder);
    return chdir("/") == 0 && system(text) == 0 ? 0 : -1;
}

bool path_there(const char *fmt, ...)
{
    char path[600];
    struct stat sb;
    FORMAT(path, fmt);
    return lstat(path, &sb) == 0;
}

char *file_text(size_t *size, const char *fmt, ...)
{
    char path[600];
    FORMAT(path, fmt);
    FILE *f = fopen(path, "rb");
    if (f == NULL) fail_msg("there is no %s", path);
    fseek(f, 0, SEEK_END);
    size_t n = (size_t)ftell(f);
    rewind(f);
    char *text = calloc(1, n + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, n, f), n);
    fclose(f);
    if (size != NULL) *size = n;
    return text;
}

/* ---- logs ---- */

int log_lines(const char *run)
{
    char *text = file_text(NULL, "%s/log.jsonl", run);
    int n = lines_of(text);
    free(text);
    return n;
}

json_t *log_line(const char *run, int64_t step)
{
    char *text = file_text(NULL, "%s/log.jsonl", run), *line = text;
    json_t *found = NULL;
    for (char *end; found == NULL && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        json_error_t error;
        json_t *o = json_loadb(line, (size_t)(end - line), 0, &error);
        if (o == NULL) fail_msg("%s/log.jsonl: %s: %.*s", run, error.text, (int)(end - line), line);
        if (json_integer_value(json_object_get(o, "step")) == step) found = o;
        else json_decref(o);
    }
    free(text);
    return found;
}

double log_number(const char *run, int64_t step, const char *field)
{
    json_t *o = log_line(run, step);
    if (o == NULL) fail_msg("%s/log.jsonl has no step %lld", run, (long long)step);
    double x = json_number_value(json_object_get(o, field));
    json_decref(o);
    return x;
}

/* The line up to its timings: step, loss, gradient norm, rate and tokens, with all digits. */
static int64_t exact_part(const char *line)
{
    const char *end = strstr(line, "\"step_ms\"");
    const char *newline = strchr(line, '\n');
    return end != NULL && newline != NULL && end < newline ? end - line : -1;
}

void assert_same_log(const char *a, const char *b, int64_t steps)
{
    char *x = file_text(NULL, "%s/log.jsonl", a), *y = file_text(NULL, "%s/log.jsonl", b), *p = x, *q = y;
    for (int64_t s = 1; s <= steps; s++) {
        char want[40];
        snprintf(want, sizeof(want), "{\"step\":%lld,", (long long)s);
        int64_t n = exact_part(p), m = exact_part(q);
        if (n < 0 || strncmp(p, want, strlen(want)) != 0) fail_msg("%s/log.jsonl, line %lld: %.60s", a, (long long)s, p);
        if (m < 0 || strncmp(q, want, strlen(want)) != 0) fail_msg("%s/log.jsonl, line %lld: %.60s", b, (long long)s, q);
        if (n != m || memcmp(p, q, (size_t)n) != 0) fail_msg("step %lld differs:\n%s: %.*s\n%s: %.*s", (long long)s, a, (int)n, p, b, (int)m, q);
        p = strchr(p, '\n') + 1;
        q = strchr(q, '\n') + 1;
    }
    if (*q != '\0') fail_msg("%s/log.jsonl goes on after step %lld: %.60s", b, (long long)steps, q);
    free(x);
    free(y);
}

void assert_same_file(const char *a, const char *b)
{
    size_t n, m;
    char *x = file_text(&n, "%s", a), *y = file_text(&m, "%s", b);
    if (n != m || memcmp(x, y, n) != 0) fail_msg("%s (%zu bytes) and %s (%zu bytes) differ", a, n, b, m);
    free(x);
    free(y);
}
