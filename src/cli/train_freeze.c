/* SPDX-License-Identifier: MIT
 *
 * --freeze: which parameters stay as they are. Before ranks start, so that a pattern that fits nothing is said once. */
#include "cli/cli.h"
#include "cli/train_settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NAMED = 3 };

static size_t same_beginning(const char *a, const char *b)
{
    size_t n = 0;
    while (a[n] != '\0' && a[n] == b[n]) n++;
    return n;
}

/* No parameter fits: which names there are, the near ones first. */
static int refuse_pattern(fsdp_module *m, const char *pattern)
{
    const fsdp_module_param_info *p;
    int n, named = 0;
    if (fsdp_module_params(m, &p, &n) != FSDP_OK) return cli_fail("%s", fsdp_last_error_message());
    const char **names = calloc((size_t)n + 1, sizeof(*names));
    if (names == NULL) return cli_fail("no memory for the names of %d parameters", n);
    char core[200], list[800] = "";
    size_t k = 0;
    for (const char *c = pattern; *c != '\0' && k < sizeof(core) - 1; c++)
        if (*c != '*') core[k++] = *c;
    core[k] = '\0';
    for (int i = 0; i < n; i++) names[i] = p[i].name;
    /* They have its text in them, or begin like it, or are a slip away. */
    const char *near = cli_nearest(names, n, pattern);
    bool within = false;
    size_t most = 2;
    for (int i = 0; i < n; i++) {
        within |= k > 0 && strstr(names[i], core) != NULL;
        most = same_beginning(names[i], core) > most ? same_beginning(names[i], core) : most;
    }
    for (int i = 0, at = 0; i < n && named < MOST_NAMED; i++) {
        bool alike = within ? strstr(names[i], core) != NULL : most > 2 ? same_beginning(names[i], core) == most : near != NULL && strcmp(names[i], near) == 0;
        if (alike) at += snprintf(list + at, sizeof(list) - (size_t)at, "%s%.200s", named++ > 0 ? ", " : "", names[i]);
    }
    bool alike = named > 0;
    for (int i = 0, at = 0; i < n && !alike && named < MOST_NAMED; i++)
        at += snprintf(list + at, sizeof(list) - (size_t)at, "%s%.200s", named++ > 0 ? ", " : "", names[i]);
    free(names);
    return cli_usage("train: --freeze %s fits none of the model's %d parameters; %s %s (a pattern is a whole name, in which * is any text)", pattern, n,
                     alike ? "near:" : "they are called", list);
}

static int64_t count(fsdp_module *m, bool frozen_alone)
{
    const fsdp_module_param_info *p;
    int n;
    int64_t sum = 0;
    if (fsdp_module_params(m, &p, &n) != FSDP_OK) return -1;
    for (int i = 0; i < n; i++) {
        int64_t numel = 1;
        for (int d = 0; d < p[i].param.ndim; d++) numel *= p[i].param.shape[d];
        if (p[i].frozen || !frozen_alone) sum += numel;
    }
    return sum;
}

int64_t train_frozen_numel(fsdp_model *model)
{
    return count(fsdp_model_module(model), true);
}

int train_freeze(train_run *run)
{
    const cli_list *l = &run->s.freeze;
    fsdp_module *m = fsdp_model_module(run->model);
    if (l->count == 1 && strcmp(l->item[0], "none") == 0) return 0;
    for (int i = 0; i < l->count; i++) {
        if (strcmp(l->item[i], "none") == 0) return cli_usage("train: --freeze none freezes nothing: leave it or the other patterns out");
        if (fsdp_module_set_frozen(m, l->item[i], true) != FSDP_OK) return refuse_pattern(m, l->item[i]);
    }
    if (l->count > 0 && count(m, true) == count(m, false)) return cli_usage("train: --freeze: all parameters are frozen, and nothing is left to train: freeze fewer");
    return 0;
}
