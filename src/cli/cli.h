/* SPDX-License-Identifier: MIT
 *
 * The commands. Each gets its own arguments (argv[0] is its name) and returns the exit status: 0 well, 1 failed, 2 wrong use. */
#ifndef FSDP_CLI_CLI_H
#define FSDP_CLI_CLI_H

int cmd_train(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_convert(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_info(int argc, char **argv);

#endif
