/* SPDX-License-Identifier: MIT
 *
 * Summoning a module: the units that hold its parameters, together. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/unit.h"

static fsdp_status add_owner(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)name;
    fsdpi_owners *l = arg;
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

fsdp_status fsdpi_module_owners(fsdp_module *m, bool recurse, fsdpi_owners *l)
{
    fsdp_unit_list inside;
    int params = 0;
    FSDP_TRY(fsdpi_module_units(m, &inside));
    FSDP_TRY(fsdpi_module_each_param(m, count_param, &params));
    FSDPI_NEW(l->unit, inside.count + params);
    if (!recurse && m->unit != NULL) {
        l->unit[l->count++] = m->unit;
        if (m->small != NULL) l->unit[l->count++] = m->small;
        if (m->ignored != NULL) l->unit[l->count++] = m->ignored;
        return FSDP_OK;
    }
    for (int i = 0; i < inside.count; i++) l->unit[l->count++] = inside.units[i];
    return fsdpi_module_each_param(m, add_owner, l);
}

/* ---- begin, end ---- */

static void pop(fsdp_module *m)
{
    fsdpi_summon *s = m->summon;
    m->summon = s->outer;
    fsdpi_free(s->unit);
    fsdpi_free(s);
}

void fsdpi_summon_free_all(fsdp_module *m)
{
    while (m->summon != NULL) pop(m);
}

/* A reset of the communicator has ended summons that this module still lists. */
static void forget_ended(fsdp_module *m)
{
    for (bool ended = true; m->summon != NULL && ended;) {
        for (int i = 0; i < m->summon->count; i++) ended &= m->summon->unit[i]->summons == 0;
        ended &= m->summon->count > 0;
        if (ended) pop(m);
    }
}

static fsdp_status begin_units(const fsdpi_owners *l, const fsdp_summon_opts *o)
{
    fsdp_unit_summon_opts uo = { .writeback = o->writeback, .same = o->same, .rank0_only = o->rank0_only, .host = o->host, .grads = o->grads };
    for (int i = 0; i < l->count; i++) {
        fsdp_status st = fsdp_unit_summon_begin(l->unit[i], &uo);
        if (st == FSDP_OK) continue;
        fsdpi_error kept;
        fsdpi_error_save(&kept);
        for (i--; i >= 0; i--) (void)!fsdp_unit_summon_cancel(l->unit[i]);
        fsdpi_error_restore(&kept);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    return FSDP_OK;
}

fsdp_status fsdp_summon_begin(fsdp_module *m, const fsdp_summon_opts *opts)
{
    fsdp_summon_opts o = opts != NULL ? *opts : (fsdp_summon_opts){ 0 };
    fsdpi_owners l = { 0 };
    fsdpi_summon *s;
    forget_ended(m);
    FSDPI_NEW(s, 1);
    fsdp_status st = fsdpi_module_owners(m, o.recurse, &l);
    if (st == FSDP_OK) st = begin_units(&l, &o);
    if (st != FSDP_OK) {
        fsdpi_free(l.unit);
        fsdpi_free(s);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *s = (fsdpi_summon){ .outer = m->summon, .unit = l.unit, .count = l.count };
    m->summon = s;
    return FSDP_OK;
}

/* The inner units first. One that cannot be ended stays, with those before it. */
static fsdp_status end_units(fsdp_module *m, const char *call, fsdp_status (*end)(fsdp_unit *))
{
    forget_ended(m);
    FSDP_FAIL_IF(m->summon == NULL, FSDP_ERR_STATE, "%s: module %s is not summoned", call, m->type);
    for (fsdpi_summon *s = m->summon; s->count > 0; s->count--) FSDP_TRY(end(s->unit[s->count - 1]));
    pop(m);
    return FSDP_OK;
}

fsdp_status fsdp_summon_end(fsdp_module *m)
{
    return end_units(m, "fsdp_summon_end", fsdp_unit_summon_end);
}

fsdp_status fsdp_summon_cancel(fsdp_module *m)
{
    return end_units(m, "fsdp_summon_cancel", fsdp_unit_summon_cancel);
}

/* ---- what is there ---- */

static fsdp_status parameter_summoned(fsdpi_parameter *p, const char *name, fsdp_summoned_param *out)
{
    fsdp_unit *u = p->unit;
    fsdp_summoned_param found = { 0 };
    FSDP_FAIL_IF(u == NULL && p->lost, FSDP_ERR_STATE, "parameter \"%s\" went with a unit of another tree", name);
    if (u == NULL) {
        FSDP_TRY(fsdpi_parameter_host(p, &found.write));
        found.value = found.write;
    } else {
        FSDP_FAIL_IF(u->summons == 0, FSDP_ERR_STATE, "parameter \"%s\" is in unit \"%s\", which is not summoned: fsdp_summon_begin() first", name, fsdp_unit_name(u));
        bool here = !u->summon_absent, copied = u->writeback || u->summon.host;
        if (here) found.value = copied ? fsdp_unit_summoned(u, p->index) : fsdp_unit_param(u, p->index);
        if (here && u->writeback) found.write = fsdp_unit_summoned(u, p->index);
        if (here && u->summon.grads) FSDP_TRY(fsdp_unit_summoned_grad(u, p->index, &found.grad));
    }
    *out = found;
    return FSDP_OK;
}

fsdp_status fsdp_module_summoned(fsdp_module *m, int i, fsdp_summoned_param *out)
{
    fsdpi_search s = { .wanted = i };
    FSDP_TRY(fsdpi_module_find_param(m, &s, "fsdp_module_summoned"));
    return parameter_summoned(s.found, s.name, out);
}
