/* SPDX-License-Identifier: MIT */
#include "cli/train_wrap.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what it says ---- */

static int parse_size(wrap_rule *r, const char *text)
{
    char *end;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || n < 1) return cli_usage("train: --wrap size:%s: how many parameters at least? size:N, N a number of 1 or more", text);
    r->policy.min_numel = n;
    return 0;
}

static int parse_names(wrap_rule *r, const char *text)
{
    int n = 0;
    snprintf(r->text, sizeof(r->text), "%s", text);
    if (strlen(text) >= sizeof(r->text)) return cli_usage("train: --wrap name: more than %zu characters", sizeof(r->text) - 1);
    for (char *at = r->text; at != NULL;) {
        char *comma = strchr(at, ',');
        if (comma != NULL) *comma++ = '\0';
        if (at[0] == '\0') return cli_usage("train: --wrap name:%s: an empty pattern", text);
        if (n == CLI_WRAP_PATTERNS) return cli_usage("train: --wrap name: more than %d patterns", CLI_WRAP_PATTERNS);
        r->names[n++] = at;
        at = comma;
    }
    r->policy.names = r->names;
    r->policy.name_count = n;
    return 0;
}

int wrap_rule_parse(wrap_rule *r, const char *text)
{
    *r = (wrap_rule){ .by_block = strcmp(text, "block") == 0 };
    if (r->by_block) return 0;
    if (strcmp(text, "none") == 0) {
        r->policy.min_numel = INT64_MAX; /* nothing is so large */
        return 0;
    }
    if (strncmp(text, "size:", 5) == 0) return parse_size(r, text + 5);
    if (strncmp(text, "name:", 5) == 0) return parse_names(r, text + 5);
    return cli_usage("train: --wrap %s: there is block, size:N, name:PATTERN and none", text);
}

/* ---- what became of it ---- */

json_t *wrap_units_json(fsdp_module *m)
{
    fsdp_unit_list units = fsdp_module_units(m);
    json_t *all = json_array();
    for (int i = 0; i < units.count && all != NULL; i++) {
        fsdp_unit_info u;
        fsdp_unit_get_info(units.units[i], &u);
        json_array_append_new(all, json_pack("{ss ss si sI sI sI}", "unit", u.name, "mode", fsdp_mode_name(u.mode), "parameters", u.params, "elements", (json_int_t)u.numel,
                                             "bytes_whole", (json_int_t)u.bytes_whole, "bytes_kept", (json_int_t)u.bytes_kept));
    }
    return all;
}

static int64_t number(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static fsdp_mode mode_called(const char *name)
{
    int m = 0;
    while (fsdp_mode_name((fsdp_mode)m)[0] != '?' && (name == NULL || strcmp(fsdp_mode_name((fsdp_mode)m), name) != 0)) m++;
    return (fsdp_mode)m; /* one that this version does not know prints as "?" */
}

void wrap_units_print(const json_t *units, const char *indent)
{
    size_t n = json_array_size(units);
    fsdp_unit_info *info = calloc(n, sizeof(*info));
    char *text;
    for (size_t i = 0; info != NULL && i < n; i++) {
        const json_t *u = json_array_get(units, i);
        const char *name = json_string_value(json_object_get(u, "unit"));
        info[i] = (fsdp_unit_info){ .name = name != NULL ? name : "?", .mode = mode_called(json_string_value(json_object_get(u, "mode"))), .params = (int)number(u, "parameters"),
                                    .numel = number(u, "elements"), .bytes_whole = number(u, "bytes_whole"), .bytes_kept = number(u, "bytes_kept") };
    }
    if (n > 0 && info != NULL && fsdp_units_table(info, (int)n, &text) == FSDP_OK) {
        for (char *at = text, *end; (end = strchr(at, '\n')) != NULL; at = end + 1) printf("%s%.*s\n", indent, (int)(end - at), at);
        fsdp_free_text(text);
    }
    free(info);
}
