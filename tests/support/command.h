/* SPDX-License-Identifier: MIT
 *
 * The command as a user runs it: through a shell, in a folder of the test's own, with a deadline.
 *
 *     command_run(&r, "train --model config.json --data text.txt --out a");
 *     assert_int_equal(r.code, 0); */
#ifndef FSDP_TESTS_COMMAND_H
#define FSDP_TESTS_COMMAND_H

#include <fsdp/defs.h>

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct command_result {
    int code; /* exit status; 128 + a signal; -1: it was ended after the deadline */
    char out[1 << 16], err[1 << 14]; /* their beginnings */
    double seconds;
} command_result;

enum { COMMAND_DEADLINE_S = 60 };

/* Runs `fsdp ARGUMENTS` and waits. `$FSDP` in the text stands for the command, so that "| head -1" and the like can be said. */
void command_run(command_result *r, const char *fmt, ...) FSDP_PRINTF(2, 3);
/* The same for any text of a shell. */
void shell_run(command_result *r, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* Runs it and wants this exit status; otherwise the test ends with what it printed. Result in a static buffer. */
command_result *command_ok(const char *fmt, ...) FSDP_PRINTF(1, 2);
/* The exit status, nothing on stdout but what was said before, and exactly one message on stderr, with this text in it. */
command_result *command_fails(int code, const char *text, const char *fmt, ...) FSDP_PRINTF(3, 4);

/* In the background: its process id is that of fsdp itself. */
typedef struct command {
    pid_t pid;
    char out[64], err[64]; /* files */
    double began;
} command;
void command_start(command *c, const char *fmt, ...) FSDP_PRINTF(2, 3);
void command_wait(command *c, command_result *r);
/* The process of a rank; 0: there is none (yet). */
pid_t command_rank(const command *c, int rank);

/* ---- the folder, and what is in it ---- */

/* cmocka's group fixtures: a folder in /tmp, with config.json (vocabulary 256), g13.json (13), text.txt, val.txt and tokens.bin
 * (13 ids), and the process in it. */
int command_setup(void **state);
int command_teardown(void **state);

bool path_there(const char *fmt, ...) FSDP_PRINTF(1, 2);
/* The whole file, NUL-terminated; the caller frees. The test ends where there is none. */
char *file_text(size_t *size, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* ---- logs ---- */

/* The line of a step in a run's log.jsonl; NULL: there is none. The caller json_decref()s. */
json_t *log_line(const char *run, int64_t step);
int log_lines(const char *run);
double log_number(const char *run, int64_t step, const char *field);
/* Two runs have the same steps 1 to `steps`, each once and in order: loss, gradient norm, rate and tokens to the last digit. */
void assert_same_log(const char *a, const char *b, int64_t steps);
void assert_same_file(const char *a, const char *b);

#endif
