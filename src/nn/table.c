/* SPDX-License-Identifier: MIT
 *
 * What was wrapped, in figures and as a table. */
#include <fsdp/wrap.h>

#include "base/alloc.h"
#include "base/error.h"
#include "nn/module.h"
#include "shard/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void fsdp_unit_get_info(const fsdp_unit *u, fsdp_unit_info *out)
{
    int64_t most = 0;
    *out = (fsdp_unit_info){ .name = u->name, .mode = u->mode, .params = u->layout.count, .bytes_whole = u->layout.total * (int64_t)sizeof(float) };
    for (int i = 0; i < u->layout.count; i++) out->numel += u->layout.numel[i];
    for (int s = 0, pieces = u->layout.size / u->shards.size; s < u->shards.size; s++) {
        int64_t slice = u->layout.edge[(s + 1) * pieces] - u->layout.edge[s * pieces];
        most = slice > most ? slice : most;
    }
    bool whole = u->mode == FSDP_MODE_OPTIMIZER || u->mode == FSDP_MODE_NONE;
    out->bytes_kept = whole ? out->bytes_whole : most * (int64_t)sizeof(float);
}

/* ---- text ---- */

static const char *bytes_text(int64_t bytes, char to[32])
{
    if (bytes < 10000) snprintf(to, 32, "%lld B", (long long)bytes);
    else if (bytes < 10000 * 1024LL) snprintf(to, 32, "%.1f KiB", (double)bytes / 1024);
    else if (bytes < 10000 * 1024LL * 1024) snprintf(to, 32, "%.1f MiB", (double)bytes / (1 << 20));
    else snprintf(to, 32, "%.1f GiB", (double)bytes / (1 << 30));
    return to;
}

static bool alike(const fsdp_unit_info *a, const fsdp_unit_info *b)
{
    return a->mode == b->mode && a->params == b->params && a->numel == b->numel && a->bytes_whole == b->bytes_whole;
}

static int line(char *to, size_t room, const char *name, const char *mode, long long params, long long numel, int64_t whole, int64_t kept)
{
    char a[32], b[32];
    return snprintf(to, room, "%-28.60s %-9s %10lld %13lld %12s %12s\n", name, mode, params, numel, bytes_text(whole, a), bytes_text(kept, b));
}

enum { LINE = 160 };

static size_t unit_lines(char *text, const fsdp_unit_info *u, int count, fsdp_unit_info *sum)
{
    size_t used = (size_t)snprintf(text, LINE, "%-28s %-9s %10s %13s %12s %12s\n", "unit", "mode", "parameters", "elements", "bytes whole", "kept a rank");
    for (int i = 0, n; i < count; i += n) {
        char name[128];
        for (n = 1; i + n < count && alike(&u[i], &u[i + n]); n++) continue;
        if (n == 1) snprintf(name, sizeof(name), "%.60s", u[i].name);
        else snprintf(name, sizeof(name), "%d x %.22s ... %.22s", n, u[i].name, u[i + n - 1].name);
        used += (size_t)line(text + used, LINE, name, fsdp_mode_name(u[i].mode), u[i].params, (long long)u[i].numel, u[i].bytes_whole, u[i].bytes_kept);
        sum->params += n * u[i].params;
        sum->numel += n * u[i].numel;
        sum->bytes_whole += n * u[i].bytes_whole;
        sum->bytes_kept += n * u[i].bytes_kept;
    }
    return used;
}

fsdp_status fsdp_units_table(const fsdp_unit_info *units, int count, char **out)
{
    char name[64];
    fsdp_unit_info sum = { 0 };
    FSDP_FAIL_IF(count < 0 || (count > 0 && units == NULL), FSDP_ERR_INVALID, "fsdp_units_table: %d units, but no list of them", count);
    char *text = fsdpi_calloc((size_t)count + 2, LINE);
    FSDP_FAIL_IF(text == NULL, FSDP_ERR_NOMEM, "no memory for a table of %d units", count);
    size_t used = unit_lines(text, units, count, &sum);
    snprintf(name, sizeof(name), "%d unit%s", count, count != 1 ? "s" : "");
    line(text + used, LINE, name, "", sum.params, (long long)sum.numel, sum.bytes_whole, sum.bytes_kept);
    *out = text;
    return FSDP_OK;
}

typedef struct listing {
    fsdp_unit_info *info;
    int count;
} listing;

static fsdp_status count_ignored(fsdp_module *m, void *arg)
{
    *(int *)arg += m->ignored != NULL;
    return FSDP_OK;
}

static fsdp_status list_ignored(fsdp_module *m, void *arg)
{
    listing *l = arg;
    if (m->ignored != NULL) fsdp_unit_get_info(m->ignored, &l->info[l->count++]);
    return FSDP_OK;
}

fsdp_status fsdp_wrap_table(fsdp_module *m, char **out)
{
    fsdp_unit_list units;
    listing l = { 0 };
    FSDP_TRY(fsdpi_module_units(m, &units));
    FSDP_TRY(fsdpi_module_walk(m, count_ignored, &l.count));
    FSDPI_NEW(l.info, units.count + l.count);
    for (l.count = 0; l.count < units.count; l.count++) fsdp_unit_get_info(units.units[l.count], &l.info[l.count]);
    fsdp_status st = fsdpi_module_walk(m, list_ignored, &l);
    if (st == FSDP_OK) st = fsdp_units_table(l.info, l.count, out);
    fsdpi_free(l.info);
    return st;
}
