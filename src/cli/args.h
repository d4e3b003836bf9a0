/* SPDX-License-Identifier: MIT
 *
 * Options as a table: it parses, checks, prints help, and turns settings into JSON and back. */
#ifndef FSDP_CLI_ARGS_H
#define FSDP_CLI_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

typedef enum cli_kind {
    CLI_INT,    /* int64_t */
    CLI_FLOAT,  /* double */
    CLI_TEXT,   /* char *; NULL: not given */
    CLI_LIST,   /* cli_list: takes all arguments up to the next option */
    CLI_FLAG,   /* bool */
    CLI_CHOICE, /* int, an index into the choices */
} cli_kind;

enum { CLI_MAX_OPTIONS = 64, CLI_MAX_LIST = 64 };

typedef struct cli_list {
    const char *item[CLI_MAX_LIST];
    int count;
} cli_list;

typedef struct cli_option {
    const char *name; /* without dashes */
    cli_kind kind;
    size_t offset;        /* of the field in the settings */
    const char *fallback; /* the default as text; NULL: none (0, NULL, empty) */
    const char *value;    /* what it is called in help; for CHOICE "a|b|c" */
    const char *help;
    double min, max;      /* of numbers; both 0: any */
    bool required;
    bool of_the_call; /* of this call of the command, not of the run: not saved, not resumed */
} cli_option;

/* Which options were given: settings begin with one. */
typedef struct cli_given {
    bool set[CLI_MAX_OPTIONS];
} cli_given;

/* Parses argv[1..) into settings (which begin with a cli_given), after setting defaults. Prints help or one error and
 * returns false where the command is to end, with *exit_code 0 (help) or 2. Strings are borrowed from argv. */
bool cli_parse(const char *command, const char *synopsis, const cli_option *options, int count, void *settings, int argc, char **argv, int *exit_code);

/* The nearest of some names, for a typing error; NULL where none is near. */
const char *cli_nearest(const char *const *names, int count, const char *name);

/* The first option whose text is not UTF-8 (JSON could not hold it), or NULL. */
const char *cli_not_utf8(const cli_option *options, int count, const void *settings);

bool cli_is_set(const cli_option *options, int count, const void *settings, const char *name);

/* All settings as an object; names with _ for -. */
json_t *cli_to_json(const cli_option *options, int count, const void *settings);
/* Sets options that were not given from an object, and calls differs() for those that were given and differ. Strings are
 * borrowed from the object. */
void cli_from_json(const cli_option *options, int count, void *settings, const json_t *from, void (*differs)(const char *name, const char *was, const char *is, void *arg), void *arg);

/* Prints "fsdp: MESSAGE" to stderr; returns 2, or 1 for cli_fail. */
int cli_usage(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
int cli_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
