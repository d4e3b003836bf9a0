/* SPDX-License-Identifier: MIT
 *
 * --wrap: which modules of the model become units, and the table of what became of it. */
#ifndef FSDP_CLI_TRAIN_WRAP_H
#define FSDP_CLI_TRAIN_WRAP_H

#include "cli/train_settings.h"

enum { CLI_WRAP_PATTERNS = 16 };

/* What --wrap says, for fsdp_wrap_opts.policy. Patterns are borrowed from it. */
typedef struct wrap_rule {
    fsdp_wrap_policy policy;
    bool by_block; /* the model's own: no policy */
    char text[1024];
    const char *names[CLI_WRAP_PATTERNS];
} wrap_rule;

/* block, none, size:N or name:PATTERN[,PATTERN ...]. Prints what is wrong and returns the exit status; 0: well. */
int wrap_rule_parse(wrap_rule *rule, const char *text);

/* The units of a model as an array for run.json and checkpoints; a new reference. NULL: no memory. */
json_t *wrap_units_json(fsdp_module *m);
/* Prints such an array as a table, each line after `indent`. Nothing where it is none. */
void wrap_units_print(const json_t *units, const char *indent);

#endif
