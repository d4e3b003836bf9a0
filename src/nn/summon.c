/* SPDX-License-Identifier: MIT
 *
 * Summoning a module: the units that hold its parameters, together. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/unit.h"

/* Units, each once. */
typedef struct unit_listing {
    fsdp_unit **unit;
    int count;
} unit_listing;

static fsdp_status add_owner(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)name;
    unit_listing *l = arg;
    if (p->unit == NULL) return FSDP_OK;
    for (int i = 0; i < l->count; i++)
        if (l->unit[i] == p->unit) return FSDP_OK;
    l->unit[l->count++] = p->unit;
    return FSDP_OK;
}

static fsdp_status count_param(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)p;
    (void)name;
    ++*(int *)arg;
    return FSDP_OK;
}

/* The units to summon for m: its own, those inside, and one around it that holds parameters of it. */
static fsdp_status owners(fsdp_module *m, bool recurse, unit_listing *l)
{
    fsdp_unit_list inside;
    int params = 0;
    FSDP_TRY(fsdpi_module_units(m, &inside));
    FSDP_TRY(fsdpi_module_each_param(m, count_param, &params));
    FSDPI_NEW(l->unit, inside.count + params);
    if (!recurse && m->unit != NULL) {
        l->unit[l->count++] = m->unit;
        return FSDP_OK;
    }
    for (int i = 0; i < inside.count; i++) l->unit[l->count++] = inside.units[i];
    return fsdpi_module_each_param(m, add_owner, l);
}

fsdp_status fsdp_summon_begin(fsdp_module *m, const fsdp_summon_opts *opts)
{
    fsdp_summon_opts o = opts != NULL ? *opts : (fsdp_summon_opts){ 0 };
    FSDP_FAIL_IF(m->summoned != NULL, FSDP_ERR_STATE, "fsdp_summon_begin: module %s is summoned already: end that summon first", m->type);
    unit_listing l = { 0 };
    fsdp_status st = owners(m, o.recurse, &l);
    int done = 0;
    for (; done < l.count && st == FSDP_OK; done++) st = fsdp_unit_summon_begin(l.unit[done], &(fsdp_unit_summon_opts){ .writeback = o.writeback });
    if (st != FSDP_OK) {
        fsdpi_error kept;
        fsdpi_error_save(&kept);
        for (int i = done - 2; i >= 0; i--) (void)!fsdp_unit_summon_end(l.unit[i]); /* the last one did not begin */
        fsdpi_free(l.unit);
        fsdpi_error_restore(&kept);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    m->summoned = l.unit;
    m->summoned_count = l.count;
    return FSDP_OK;
}

fsdp_status fsdp_summon_end(fsdp_module *m)
{
    FSDP_FAIL_IF(m->summoned == NULL, FSDP_ERR_STATE, "fsdp_summon_end: module %s is not summoned", m->type);
    fsdp_status st = FSDP_OK;
    for (int i = m->summoned_count - 1; i >= 0 && st == FSDP_OK; i--) st = fsdp_unit_summon_end(m->summoned[i]);
    if (st == FSDP_ERR_STATE) return st;
    fsdpi_free(m->summoned);
    m->summoned = NULL;
    m->summoned_count = 0;
    return st;
}
