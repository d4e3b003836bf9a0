/* SPDX-License-Identifier: MIT
 *
 * fsdp: the command. It uses the public headers alone. */
#include "cli/args.h"
#include "cli/cli.h"

#include <fsdp/fsdp.h>

#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *what;
} commands[] = {
    { "train", cmd_train, "train a model, fully sharded over ranks" },
    { "eval", cmd_eval, "the loss of a model on data" },
    { "generate", cmd_generate, "continue a text" },
    { "convert", cmd_convert, "a checkpoint into a model that Hugging Face's loader opens" },
    { "inspect", cmd_inspect, "what is in a file, checkpoint or run, and whether it is whole" },
    { "run", cmd_run, "start a program of your own on several ranks" },
    { "info", cmd_info, "what fsdp found on this machine" },
};
enum { COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void print_help(FILE *to)
{
    fprintf(to, "usage: fsdp COMMAND [OPTIONS]\n\n");
    for (int i = 0; i < COMMANDS; i++) fprintf(to, "  %-10s%s\n", commands[i].name, commands[i].what);
    fprintf(to, "\nfsdp COMMAND --help says more. Version %s.\n", fsdp_version());
}

static void print_log(fsdp_log_level level, const char *text, void *arg)
{
    (void)level;
    (void)arg;
    fprintf(stderr, "fsdp: %s\n", text);
}

/* Where a standard stream is closed, the next file that is opened would get its number, and our lines would go there. */
static void open_standard_streams(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", O_RDWR);
}

/* Kernel libraries allocate scratch in every call. By default glibc maps and unmaps blocks of that size each time, and the
 * kernel clears their pages again: 5 % of a training step. Kept, they are reused. */
static void keep_freed_memory(void)
{
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
    mallopt(M_TOP_PAD, 1 << 20);
}

int main(int argc, char **argv)
{
    open_standard_streams();
    keep_freed_memory();
    signal(SIGPIPE, SIG_IGN); /* a reader that goes away is noticed where we write */
    fsdp_log_set(FSDP_LOG_INFO, print_log, NULL);
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("fsdp %s\n", fsdp_version());
        return 0;
    }
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    const char *names[COMMANDS];
    for (int i = 0; i < COMMANDS; i++) names[i] = commands[i].name;
    const char *near = cli_nearest(names, COMMANDS, argv[1]);
    if (near != NULL) return cli_usage("there is no command \"%s\"; did you mean \"%s\"? (fsdp --help)", argv[1], near);
    return cli_usage("there is no command \"%s\" (fsdp --help)", argv[1]);
}
