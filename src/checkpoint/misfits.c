/* SPDX-License-Identifier: MIT */
#include "checkpoint/misfits.h"

#include "base/error.h"
#include "format/shown.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void fsdpi_misfits_add(fsdpi_misfits *m, fsdpi_misfit kind, const char *fmt, ...)
{
    char one[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(one, sizeof(one), fmt, ap);
    va_end(ap);
    size_t n = strlen(one), used = m->list[kind].used;
    if (m->list[kind].count++ > m->list[kind].shown) return; /* one was left out: so are those after it */
    if (used > 0 && used + n + 2 >= sizeof(m->list[kind].text)) return;
    m->list[kind].used += (size_t)snprintf(m->list[kind].text + used, sizeof(m->list[kind].text) - used, "%s%s", used > 0 ? ", " : "", one);
    if (m->list[kind].used >= sizeof(m->list[kind].text)) m->list[kind].used = sizeof(m->list[kind].text) - 1;
    m->list[kind].shown++;
}

int fsdpi_misfits_total(const fsdpi_misfits *m)
{
    int n = 0;
    for (int k = 0; k < FSDPI_MISFIT_COUNT; k++) n += m->list[k].count;
    return n;
}

const char *fsdpi_misfits_text(const fsdpi_misfits *m, char *to, size_t size)
{
    static const char *const classes[] = { "missing", "unexpected", "of another shape", "of another type" };
    size_t n = 0;
    to[0] = '\0';
    for (int k = 0; k < FSDPI_MISFIT_COUNT; k++) {
        if (m->list[k].count == 0) continue;
        n += (size_t)snprintf(to + n, n < size ? size - n : 0, "%s%s: %s", n > 0 ? "; " : "", classes[k], m->list[k].text);
        int more = m->list[k].count - m->list[k].shown;
        if (more > 0 && n < size) n += (size_t)snprintf(to + n, size - n, ", and %d more", more);
        if (n >= size) n = size - 1;
    }
    return to;
}

void fsdpi_misfits_report(const fsdpi_misfits *m, int loaded, fsdp_load_report *report)
{
    if (report == NULL) return;
    *report = (fsdp_load_report){ .loaded = loaded,
                                  .missing = m->list[FSDPI_MISSING].count,
                                  .unexpected = m->list[FSDPI_UNEXPECTED].count,
                                  .shape = m->list[FSDPI_SHAPE].count,
                                  .dtype = m->list[FSDPI_DTYPE].count };
    fsdpi_misfits_text(m, report->text, sizeof(report->text));
}

static void shape_text(char *to, size_t size, int ndim, const int64_t *shape)
{
    size_t n = (size_t)snprintf(to, size, "[");
    for (int d = 0; d < ndim && n < size; d++) n += (size_t)snprintf(to + n, size - n, "%s%lld", d > 0 ? ", " : "", (long long)shape[d]);
    if (n < size) snprintf(to + n, size - n, "]");
}

static bool is_float(fsdp_dtype t)
{
    return t == FSDP_F32 || t == FSDP_BF16 || t == FSDP_F16 || t == FSDP_F64;
}

bool fsdpi_tensor_fits(fsdpi_misfits *m, const fsdpi_entry *e, fsdp_dtype dtype, int ndim, const int64_t *shape, bool cast)
{
    char here[100], there[100];
    if (ndim != e->ndim || (ndim > 0 && memcmp(shape, e->shape, (size_t)ndim * sizeof(*shape)) != 0)) {
        shape_text(there, sizeof(there), ndim, shape);
        shape_text(here, sizeof(here), e->ndim, e->shape);
        fsdpi_misfits_add(m, FSDPI_SHAPE, "\"%s\" is %s there and %s here", fsdpi_show(e->name).s, there, here);
        return false;
    }
    if (dtype == e->dtype || (cast && e->kind != FSDPI_ENTRY_BUFFER && is_float(dtype))) return true;
    fsdpi_misfits_add(m, FSDPI_DTYPE, "\"%s\" is %s there and %s here", fsdpi_show(e->name).s, fsdp_dtype_name(dtype), fsdp_dtype_name(e->dtype));
    return false;
}

fsdp_status fsdpi_load_opts_check(fsdp_load_opts *to, const fsdp_load_opts *opts, const char *call)
{
    *to = opts != NULL ? *opts : (fsdp_load_opts){ 0 };
    FSDP_FAIL_IF((to->which & ~(unsigned)FSDP_STATE_ALL) != 0, FSDP_ERR_INVALID, "%s: which is %#x: no such kinds (FSDP_STATE_PARAMS and so on)", call, to->which);
    if (to->which == 0) to->which = FSDP_STATE_ALL;
    return FSDP_OK;
}

fsdp_status fsdpi_units_complete(const fsdp_checkpoint *c, const char *call)
{
    for (int i = 0; i < c->count; i++) {
        if (c->entry[i].kind != FSDPI_ENTRY_PARAM) continue;
        fsdp_unit *u = c->entry[i].unit;
        for (int k = 0; k < fsdp_unit_param_count(u); k++) {
            bool found = false;
            for (int j = 0; j < c->count && !found; j++) found = c->entry[j].kind == FSDPI_ENTRY_PARAM && c->entry[j].unit == u && c->entry[j].index == k;
            FSDP_FAIL_IF(!found, FSDP_ERR_INVALID,
                         "%s: parameter \"%s\" of unit \"%s\" is not registered, but others of the unit are: register all, or load with partial set", call,
                         fsdp_unit_param_info(u, k)->name, fsdp_unit_name(u));
        }
    }
    return FSDP_OK;
}
