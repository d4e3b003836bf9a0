/* SPDX-License-Identifier: MIT */
#include "cli/args.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int complain(int code, const char *fmt, va_list ap)
{
    fflush(stdout);
    fputs("fsdp: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    return code;
}

int cli_usage(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int code = complain(2, fmt, ap);
    va_end(ap);
    return code;
}

int cli_fail(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int code = complain(1, fmt, ap);
    va_end(ap);
    return code;
}

static void *field(const cli_option *o, void *settings)
{
    return (char *)settings + o->offset;
}

static const void *field_const(const cli_option *o, const void *settings)
{
    return (const char *)settings + o->offset;
}

static int choice_index(const char *choices, const char *text)
{
    int i = 0;
    for (const char *c = choices; c != NULL; i++) {
        size_t n = strcspn(c, "|");
        if (strlen(text) == n && memcmp(c, text, n) == 0) return i;
        c = c[n] == '|' ? c + n + 1 : NULL;
    }
    return -1;
}

static void choice_name(const char *choices, int index, char *to, size_t size)
{
    const char *c = choices;
    for (; index > 0 && c != NULL; index--) c = strchr(c, '|') != NULL ? strchr(c, '|') + 1 : NULL;
    snprintf(to, size, "%.*s", c != NULL ? (int)strcspn(c, "|") : 0, c != NULL ? c : "");
}

/* "must be 1 or more": the upper bounds of counts are there to catch slips, and are nobody's business. */
static const char *range_text(const cli_option *o, char *to, size_t size)
{
    if (o->kind == CLI_INT && o->max >= 1e9) snprintf(to, size, "must be %.0f or more", o->min);
    else if (o->kind == CLI_INT) snprintf(to, size, "must be %.0f to %.0f", o->min, o->max);
    else if (o->max >= 1e9) snprintf(to, size, "must be %g or more", o->min);
    else snprintf(to, size, "must be %g to %g", o->min, o->max);
    return to;
}

/* Sets a field from text; NULL if it is good, else what is wrong. */
static const char *assign(const cli_option *o, void *settings, const char *text)
{
    static char why[256];
    char *end;
    bool any = o->min == 0 && o->max == 0;
    errno = 0;
    switch (o->kind) {
    case CLI_INT: {
        long long v = strtoll(text, &end, 10);
        if (*text == '\0' || *end != '\0' || errno != 0) return "must be a whole number";
        if (!any && ((double)v < o->min || (double)v > o->max)) return range_text(o, why, sizeof(why));
        *(int64_t *)field(o, settings) = v;
        return NULL;
    }
    case CLI_FLOAT: {
        double v = strtod(text, &end);
        if (*text == '\0' || *end != '\0' || !isfinite(v)) return "must be a number";
        if (!any && (v < o->min || v > o->max)) return range_text(o, why, sizeof(why));
        *(double *)field(o, settings) = v;
        return NULL;
    }
    case CLI_TEXT: *(const char **)field(o, settings) = text; return NULL;
    case CLI_LIST: {
        cli_list *l = field(o, settings);
        if (l->count == CLI_MAX_LIST) return "has too many values (a quoted pattern, as 'data-*.bin', stands for many files)";
        l->item[l->count++] = text;
        return NULL;
    }
    case CLI_FLAG: *(bool *)field(o, settings) = true; return NULL;
    case CLI_CHOICE: {
        int i = choice_index(o->value, text);
        if (i < 0) {
            snprintf(why, sizeof(why), "must be one of %s", o->value);
            return why;
        }
        *(int *)field(o, settings) = i;
        return NULL;
    }
    }
    return "has no type";
}

/* ---- help ---- */

static void print_help(const char *command, const char *synopsis, const cli_option *options, int count)
{
    printf("usage: fsdp %s %s\n\n", command, synopsis);
    for (int i = 0; i < count; i++) {
        const cli_option *o = &options[i];
        char head[96];
        snprintf(head, sizeof(head), "  --%s%s%s%s", o->name, o->kind != CLI_FLAG ? " " : "", o->kind != CLI_FLAG ? o->value : "", o->kind == CLI_LIST ? " ..." : "");
        printf("%-34s%s%s", head, strlen(head) > 33 ? "\n                                  " : "", o->help);
        if (o->required) printf(" (required)");
        else if (o->fallback != NULL && o->fallback[0] != '\0') printf(" [%s]", o->fallback);
        printf("\n");
    }
    printf("  --help\n");
}

/* How many letters must be left out, put in, changed or swapped with their neighbour to get from one word to the other. */
static size_t distance(const char *a, const char *b)
{
    enum { LONGEST = 24 };
    size_t n = strlen(a), m = strlen(b), d[LONGEST + 1][LONGEST + 1];
    if (n > LONGEST || m > LONGEST) return LONGEST;
    for (size_t i = 0; i <= n; i++)
        for (size_t j = 0; j <= m; j++) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            size_t best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best) best = d[i - 1][j] + 1;
            if (d[i][j - 1] + 1 < best) best = d[i][j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && d[i - 2][j - 2] + 1 < best) best = d[i - 2][j - 2] + 1;
            d[i][j] = best;
        }
    return d[n][m];
}

const char *cli_nearest(const char *const *names, int count, const char *name)
{
    const char *best = NULL;
    size_t least = strlen(name) < 6 ? 2 : 3; /* two slips in a long word, one in a short one */
    for (int i = 0; i < count; i++) {
        size_t far = distance(name, names[i]);
        if (far >= least) continue;
        least = far;
        best = names[i];
    }
    /* Or it begins alike: --microbatches, --learning */
    for (int i = 0, shared = 4; best == NULL && i < count; i++) {
        int same = 0;
        while (names[i][same] != '\0' && names[i][same] == name[same]) same++;
        if (same >= shared || (names[i][same] == '\0' && same > 2)) best = names[i];
    }
    return best;
}

static int report_unknown(const char *command, const cli_option *options, int count, const char *arg)
{
    const char *names[CLI_MAX_OPTIONS];
    char name[64];
    for (int i = 0; i < count; i++) names[i] = options[i].name;
    const char *word = arg + strspn(arg, "-");
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(word, "="), word);
    for (int i = 0; i < count; i++) /* it is there, so it was its "=VALUE" that getopt did not like */
        if (options[i].kind == CLI_FLAG && strcmp(options[i].name, name) == 0) return cli_usage("%s: --%s takes no value (fsdp %s --help)", command, name, command);
    const char *near = cli_nearest(names, count, name);
    if (near != NULL) return cli_usage("%s: there is no option %s; did you mean --%s? (fsdp %s --help)", command, arg, near, command);
    return cli_usage("%s: there is no option %s (fsdp %s --help)", command, arg, command);
}

/* ---- parse ---- */

bool cli_parse(const char *command, const char *synopsis, const cli_option *options, int count, void *settings, int argc, char **argv, int *exit_code)
{
    struct option longs[CLI_MAX_OPTIONS + 2] = { 0 };
    for (int i = 0; i < count; i++) {
        longs[i] = (struct option){ options[i].name, options[i].kind == CLI_FLAG ? no_argument : required_argument, NULL, 256 + i };
        if (options[i].fallback != NULL && options[i].kind != CLI_FLAG) (void)assign(&options[i], settings, options[i].fallback);
    }
    longs[count] = (struct option){ "help", no_argument, NULL, 'h' };
    cli_given *given = settings;
    int last = -1;
    opterr = 0;
    optind = 0; /* glibc: begin anew */
    for (int c; (c = getopt_long(argc, argv, "-:h", longs, NULL)) != -1;) {
        if (c == 'h') {
            print_help(command, synopsis, options, count);
            *exit_code = 0;
            return false;
        }
        if (c == '?') {
            *exit_code = report_unknown(command, options, count, argv[optind - 1]);
            return false;
        }
        if (c == ':') {
            *exit_code = cli_usage("%s: %s needs a value", command, argv[optind - 1]);
            return false;
        }
        if (c == 1 && (last < 0 || options[last].kind != CLI_LIST)) {
            *exit_code = cli_usage("%s: unexpected argument \"%s\" (fsdp %s --help)", command, optarg, command);
            return false;
        }
        int i = c == 1 ? last : c - 256;
        const char *why = assign(&options[i], settings, optarg != NULL ? optarg : "");
        if (why != NULL) {
            *exit_code = cli_usage("%s: --%s %s: %s", command, options[i].name, optarg != NULL ? optarg : "", why);
            return false;
        }
        given->set[i] = true;
        last = i;
    }
    if (optind < argc) {
        *exit_code = cli_usage("%s: unexpected argument \"%s\" (fsdp %s --help)", command, argv[optind], command);
        return false;
    }
    for (int i = 0; i < count; i++) {
        if (!options[i].required || given->set[i]) continue;
        *exit_code = cli_usage("%s: --%s %s is required (fsdp %s --help)", command, options[i].name, options[i].value, command);
        return false;
    }
    return true;
}

static bool is_utf8(const char *text)
{
    json_t *s = text != NULL ? json_string(text) : json_null();
    bool good = s != NULL;
    json_decref(s);
    return good;
}

const char *cli_not_utf8(const cli_option *options, int count, const void *settings)
{
    for (int i = 0; i < count; i++) {
        const void *f = field_const(&options[i], settings);
        if (options[i].kind == CLI_TEXT && !is_utf8(*(const char *const *)f)) return options[i].name;
        for (int k = 0; options[i].kind == CLI_LIST && k < ((const cli_list *)f)->count; k++)
            if (!is_utf8(((const cli_list *)f)->item[k])) return options[i].name;
    }
    return NULL;
}

bool cli_is_set(const cli_option *options, int count, const void *settings, const char *name)
{
    const cli_given *given = settings;
    for (int i = 0; i < count; i++)
        if (strcmp(options[i].name, name) == 0) return given->set[i];
    return false;
}

/* ---- JSON ---- */

static void key_of(const cli_option *o, char *to, size_t size)
{
    snprintf(to, size, "%s", o->name);
    for (char *p = to; *p != '\0'; p++) *p = *p == '-' ? '_' : *p;
}

static json_t *value_json(const cli_option *o, const void *settings)
{
    const void *f = field_const(o, settings);
    char name[64];
    switch (o->kind) {
    case CLI_INT: return json_integer(*(const int64_t *)f);
    case CLI_FLOAT: return json_real(*(const double *)f);
    case CLI_TEXT: return *(const char *const *)f != NULL ? json_string(*(const char *const *)f) : json_null();
    case CLI_FLAG: return json_boolean(*(const bool *)f);
    case CLI_CHOICE: choice_name(o->value, *(const int *)f, name, sizeof(name)); return json_string(name);
    case CLI_LIST: {
        const cli_list *l = f;
        json_t *a = json_array();
        for (int i = 0; i < l->count; i++) json_array_append_new(a, json_string(l->item[i]));
        return a;
    }
    }
    return json_null();
}

json_t *cli_to_json(const cli_option *options, int count, const void *settings)
{
    json_t *o = json_object();
    for (int i = 0; i < count; i++) {
        char key[64];
        if (options[i].of_the_call) continue;
        key_of(&options[i], key, sizeof(key));
        json_object_set_new(o, key, value_json(&options[i], settings));
    }
    return o;
}

static void set_from_json(const cli_option *o, void *settings, const json_t *v)
{
    void *f = field(o, settings);
    if (o->kind == CLI_INT && json_is_integer(v)) *(int64_t *)f = json_integer_value(v);
    if (o->kind == CLI_FLOAT && json_is_number(v)) *(double *)f = json_number_value(v);
    if (o->kind == CLI_TEXT) *(const char **)f = json_string_value(v);
    if (o->kind == CLI_FLAG) *(bool *)f = json_is_true(v);
    if (o->kind == CLI_CHOICE && json_is_string(v) && choice_index(o->value, json_string_value(v)) >= 0)
        *(int *)f = choice_index(o->value, json_string_value(v));
    if (o->kind == CLI_LIST && json_is_array(v)) {
        cli_list *l = f;
        l->count = 0;
        for (size_t i = 0; i < json_array_size(v) && l->count < CLI_MAX_LIST; i++)
            if (json_is_string(json_array_get(v, i))) l->item[l->count++] = json_string_value(json_array_get(v, i));
    }
}

void cli_from_json(const cli_option *options, int count, void *settings, const json_t *from,
                   void (*differs)(const char *name, const char *was, const char *is, void *arg), void *arg)
{
    const cli_given *given = settings;
    for (int i = 0; i < count; i++) {
        char key[64];
        key_of(&options[i], key, sizeof(key));
        const json_t *was = json_object_get(from, key);
        if (was == NULL || options[i].of_the_call) continue;
        if (!given->set[i]) {
            set_from_json(&options[i], settings, was);
            continue;
        }
        json_t *is = value_json(&options[i], settings);
        if (!json_equal(was, is)) {
            char *a = json_dumps(was, JSON_ENCODE_ANY), *b = json_dumps(is, JSON_ENCODE_ANY);
            differs(options[i].name, a != NULL ? a : "?", b != NULL ? b : "?", arg);
            free(a);
            free(b);
        }
        json_decref(is);
    }
}
