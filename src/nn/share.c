/* SPDX-License-Identifier: MIT
 *
 * Parameters in several places: sharing one, listing them with all their names, and what becomes of them when units go. */
#include "nn/module.h"

#include <fsdp/wrap.h>

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>

/* ---- sharing ---- */

static fsdpi_parameter *place(fsdp_module *m, int i, const char *which)
{
    if (m != NULL && i >= 0 && i < m->params) return m->param[i];
    (void)fsdp_error_raise(FSDP_ERR_INVALID, __func__, __FILE__, __LINE__, "fsdp_module_share_param: the module %s has %d parameters of its own, not one with number %d", which,
                           m != NULL ? m->params : 0, i);
    return NULL;
}

fsdp_status fsdp_module_share_param(fsdp_module *m, int i, fsdp_module *from, int j)
{
    fsdpi_parameter *old = place(m, i, "that takes"), *p = place(from, j, "that gives");
    if (old == NULL || p == NULL) return FSDP_ERR_INVALID;
    if (old == p) return FSDP_OK;
    char a[128], b[128];
    bool same = old->tensor.ndim == p->tensor.ndim;
    for (int d = 0; same && d < p->tensor.ndim; d++) same = old->tensor.shape[d] == p->tensor.shape[d];
    FSDP_FAIL_IF(!same, FSDP_ERR_INVALID, "fsdp_module_share_param: \"%s\" of module %s is %s, and \"%s\" of module %s is %s", m->param_name[i], m->type,
                 fsdpi_shape_text(&old->tensor, a), from->param_name[j], from->type, fsdpi_shape_text(&p->tensor, b));
    FSDP_FAIL_IF(old->unit != NULL, FSDP_ERR_STATE,
                 "fsdp_module_share_param: \"%s\" of module %s is in unit \"%s\" already: share before it is wrapped, or let the other module take this one's",
                 m->param_name[i], m->type, fsdp_unit_name(old->unit));
    p->places++;
    p->refs++;
    m->param[i] = p;
    old->places--;
    fsdpi_parameter_release(old);
    return FSDP_OK;
}

/* ---- lists ---- */

typedef struct listing {
    fsdp_module_param_info *info;
    char *names;
    const char **aliases;
    size_t used;
    int count, places;
} listing;

static fsdp_status measure_param(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)name;
    listing *l = arg;
    p->listed = l->count++;
    return FSDP_OK;
}

static fsdp_status measure_place(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)p;
    listing *l = arg;
    l->used += strlen(name) + 1;
    l->places++;
    return FSDP_OK;
}

static const char *copy_name(listing *l, const char *name)
{
    char *copy = l->names + l->used;
    size_t n = strlen(name) + 1;
    memcpy(copy, name, n);
    l->used += n;
    return copy;
}

static fsdp_status list_param(fsdpi_parameter *p, const char *name, void *arg)
{
    listing *l = arg;
    l->info[p->listed] = (fsdp_module_param_info){ .name = copy_name(l, name), .param = p->info, .unit = p->unit, .index = p->index,
                                                   .frozen = p->source.frozen(p), .ignored = p->ignored, .aliases = l->aliases + l->places };
    l->places += p->places - 1; /* at most so many below m */
    return FSDP_OK;
}

static fsdp_status list_alias(fsdpi_parameter *p, const char *name, void *arg)
{
    listing *l = arg;
    fsdp_module_param_info *info = &l->info[p->listed];
    if (p->places > 1 && strcmp(info->name, name) != 0) ((const char **)(uintptr_t)info->aliases)[info->alias_count++] = copy_name(l, name);
    return FSDP_OK;
}

static fsdp_status count_aliases(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)name;
    *(int *)arg += p->places - 1;
    return FSDP_OK;
}

fsdp_status fsdp_module_params(fsdp_module *m, const fsdp_module_param_info **out, int *count)
{
    listing l = { 0 };
    int aliases = 0;
    FSDP_TRY(fsdpi_module_each_param(m, measure_param, &l));
    FSDP_TRY(fsdpi_module_each_place(m, measure_place, &l));
    FSDP_TRY(fsdpi_module_each_param(m, count_aliases, &aliases));
    l.info = fsdpi_calloc((size_t)l.count, sizeof(*l.info));
    l.names = fsdpi_calloc(l.used, 1);
    l.aliases = fsdpi_calloc((size_t)aliases, sizeof(*l.aliases));
    if (l.info == NULL || l.names == NULL || l.aliases == NULL) {
        fsdpi_free(l.info);
        fsdpi_free(l.names);
        fsdpi_free(l.aliases);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to list %d parameters", l.count);
    }
    l.used = 0;
    l.places = 0;
    FSDP_TRY(fsdpi_module_each_param(m, list_param, &l)); /* as before: it does not fail any more */
    FSDP_TRY(fsdpi_module_each_place(m, list_alias, &l));
    fsdpi_free(m->param_list);
    fsdpi_free(m->param_names);
    fsdpi_free(m->param_aliases);
    m->param_list = l.info;
    m->param_names = l.names;
    m->param_aliases = l.aliases;
    *out = l.info;
    *count = l.count;
    return FSDP_OK;
}

/* ---- when units go ---- */

fsdp_status fsdpi_holding_add(fsdpi_holding *h, fsdpi_parameter *const *param, int count)
{
    if (count == 0) return FSDP_OK;
    fsdpi_parameter **held = fsdpi_realloc(h->param, (size_t)(h->count + count), sizeof(*held));
    FSDP_FAIL_IF(held == NULL, FSDP_ERR_NOMEM, "no memory to wrap %d parameters", count);
    h->param = held;
    for (int i = 0; i < count; i++) {
        param[i]->refs++;
        held[h->count++] = param[i];
    }
    return FSDP_OK;
}

void fsdpi_holding_cut(fsdpi_holding *h, int count)
{
    while (h->count > count) fsdpi_parameter_release(h->param[--h->count]);
}

/* The units are gone. What still has a place is in another tree. */
static void let_go(fsdpi_holding *h)
{
    for (int i = 0; i < h->count; i++) {
        h->param[i]->unit = NULL;
        h->param[i]->lost = true;
        fsdpi_parameter_release(h->param[i]);
    }
    fsdpi_free(h->param);
}

static void leave_joint(fsdp_module *m)
{
    fsdpi_joint *j = m->joint;
    if (j == NULL) return;
    if (j->last == m) j->last = NULL; /* what it leaves open ends with what is around */
    if (--j->members > 0) return;
    if (!j->borrowed) fsdp_unit_destroy(j->unit);
    let_go(&j->held);
    fsdpi_free(j);
}

void fsdpi_module_drop_units(fsdp_module *m)
{
    leave_joint(m);
    fsdp_unit_destroy(m->unit);
    fsdp_unit_destroy(m->small);
    fsdp_unit_destroy(m->ignored);
    fsdp_comm_destroy(m->alone);
    let_go(&m->held);
}
