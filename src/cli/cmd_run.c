/* SPDX-License-Identifier: MIT
 *
 * fsdp run: several copies of a program of one's own, whose fsdp_launch() with 0 ranks makes them ranks. */
#include "cli/args.h"
#include "cli/cli.h"

#include <fsdp/fsdp.h>

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_help(void)
{
    printf("usage: fsdp run -n RANKS [--threads N] [--transport shm|copy] [--timeout SECONDS] PROGRAM [ARGUMENT ...]\n\n"
           "  Starts RANKS copies of PROGRAM. Its fsdp_launch() with 0 ranks makes each a rank. If one fails, the others are\n"
           "  ended, and it is named.\n\n"
           "  -n RANKS             how many [the CPUs that may be used]\n"
           "  --threads N          threads of each rank [CPUs / ranks]\n"
           "  --transport T        shm or copy [shm]\n"
           "  --timeout SECONDS    how long a rank waits for another that is alive [1800]\n");
}

static bool number(const char *text, double least, double most, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return *text != '\0' && *end == '\0' && *out >= least && *out <= most;
}

int cmd_run(int argc, char **argv)
{
    static const struct option longs[] = { { "threads", required_argument, NULL, 't' }, { "transport", required_argument, NULL, 'T' },
                                           { "timeout", required_argument, NULL, 's' }, { "help", no_argument, NULL, 'h' },
                                           { NULL, 0, NULL, 0 } };
    fsdp_launch_opts o = { 0 };
    opterr = 0;
    optind = 0;
    for (int c; (c = getopt_long(argc, argv, "+n:h", longs, NULL)) != -1;) {
        double x;
        switch (c) {
        case 'h': print_help(); return 0;
        case 'n':
            if (!number(optarg, 1, 4096, &x) || x != (int)x) return cli_usage("run: -n %s: must be 1 to 4096", optarg);
            o.ranks = (int)x;
            break;
        case 't':
            if (!number(optarg, 1, 1024, &x) || x != (int)x) return cli_usage("run: --threads %s: must be 1 to 1024", optarg);
            o.threads = (int)x;
            break;
        case 's':
            if (!number(optarg, 0.1, 1e9, &x)) return cli_usage("run: --timeout %s: must be a number of seconds", optarg);
            o.timeout_s = x;
            break;
        case 'T':
            if (strcmp(optarg, "shm") != 0 && strcmp(optarg, "copy") != 0) return cli_usage("run: --transport %s: must be shm or copy", optarg);
            o.transport = optarg;
            break;
        default: return cli_usage("run: there is no option %s, or it needs a value (fsdp run --help)", argv[optind - 1]);
        }
    }
    if (optind >= argc) return cli_usage("run: no program (fsdp run --help)");
    if (fsdp_launch_program(&o, argv + optind) != FSDP_OK) return cli_fail("%s", fsdp_last_error_message());
    return 0;
}
