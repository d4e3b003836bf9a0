/* SPDX-License-Identifier: MIT
 *
 * Where modules meet units: wrapping, summoning, listing. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/unit.h"

#include <string.h>

/* ---- wrap ---- */

/* Parameters that go into a new unit. */
typedef struct collection {
    fsdpi_parameter **param;
    fsdp_param *info;
    char *names;
    size_t name_bytes;
    int count, with_values;
} collection;

static fsdp_status count_free(fsdpi_parameter *p, const char *name, void *arg)
{
    collection *c = arg;
    if (p->unit != NULL) return FSDP_OK;
    c->count++;
    c->name_bytes += strlen(name) + 1;
    return FSDP_OK;
}

static fsdp_status collect_free(fsdpi_parameter *p, const char *name, void *arg)
{
    collection *c = arg;
    if (p->unit != NULL) return FSDP_OK;
    char *copy = c->names + c->name_bytes;
    memcpy(copy, name, strlen(name) + 1);
    c->name_bytes += strlen(name) + 1;
    c->param[c->count] = p;
    c->info[c->count] = p->info;
    c->info[c->count++].name = copy;
    c->with_values += p->host != NULL;
    return FSDP_OK;
}

static void free_collection(collection *c)
{
    fsdpi_free(c->param);
    fsdpi_free(c->info);
    fsdpi_free(c->names);
}

static fsdp_status collect(collection *c, fsdp_module *m)
{
    FSDP_TRY(fsdpi_module_each_param(m, count_free, c));
    c->param = fsdpi_calloc((size_t)c->count, sizeof(*c->param));
    c->info = fsdpi_calloc((size_t)c->count, sizeof(*c->info));
    c->names = fsdpi_calloc(c->name_bytes, 1);
    FSDP_FAIL_IF(c->param == NULL || c->info == NULL || c->names == NULL, FSDP_ERR_NOMEM, "no memory to wrap %d parameters", c->count);
    c->count = 0;
    c->name_bytes = 0;
    return fsdpi_module_each_param(m, collect_free, c);
}

/* The values that parameters had before. */
static fsdp_status fill_from_host(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)name;
    const float *host = ((collection *)arg)->param[param]->host;
    if (host != NULL) memcpy(out, host + first, (size_t)numel * sizeof(float));
    else memset(out, 0, (size_t)numel * sizeof(float));
    return FSDP_OK;
}

static fsdp_status make_unit(fsdp_unit **out, collection *c, fsdp_module *m, const fsdp_wrap_opts *o)
{
    fsdp_unit_opts uo = { .name = o->name != NULL ? o->name : m->type,
                          .mode = o->mode,
                          .shards = o->shards,
                          .reshard_group = o->reshard_group,
                          .param_dtype = o->param_dtype,
                          .reduce_dtype = o->reduce_dtype,
                          .exact_eval = o->exact_eval,
                          .storage_device = o->storage_device,
                          .compute_device = o->compute_device,
                          .prefetch = o->prefetch };
    fsdp_unit *u;
    FSDP_TRY(fsdp_unit_create(&u, o->comm, c->info, c->count, &uo));
    /* Ranks must agree whether there are values: a fill is collective. */
    double any = c->with_values;
    fsdp_status st = fsdp_comm_max(o->comm, &any, 1);
    if (st == FSDP_OK && any > 0) st = fsdp_unit_fill(u, fill_from_host, c);
    for (int i = 0; i < c->count && st == FSDP_OK; i++)
        if (c->param[i]->frozen) st = fsdp_unit_set_frozen(u, i, true);
    if (st != FSDP_OK) {
        fsdp_unit_destroy(u);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *out = u;
    return FSDP_OK;
}

static fsdp_status pass_through(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    (void)ctx;
    return fsdp_forward(m->child[0], tape, in, out);
}

fsdp_status fsdp_wrap(fsdp_module **out, fsdp_module *m, const fsdp_wrap_opts *opts)
{
    FSDP_FAIL_IF(m == NULL || opts == NULL || opts->comm == NULL, FSDP_ERR_INVALID, "fsdp_wrap: no module, or no communicator in fsdp_wrap_opts.comm");
    FSDP_FAIL_IF(m->unit != NULL && m->parent != NULL, FSDP_ERR_INVALID, "fsdp_wrap: module %s is wrapped already (unit \"%s\") and in another module: wrap that one",
                 m->type, fsdp_unit_name(m->unit));
    collection c = { 0 };
    fsdp_unit *u = NULL;
    fsdp_status st = collect(&c, m);
    if (st == FSDP_OK) st = make_unit(&u, &c, m, opts);
    fsdp_module *holder = m;
    if (st == FSDP_OK && m->unit != NULL) { /* wrapped twice: a transparent module around it has the second unit */
        fsdp_module_opts mo = { .type = m->type, .forward = pass_through, .children = &m, .names = (const char *const[]){ "" }, .child_count = 1 };
        st = fsdp_module_create(&holder, &mo);
        if (st != FSDP_OK) fsdp_unit_destroy(u);
    }
    if (st != FSDP_OK) {
        free_collection(&c);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    holder->unit = u;
    for (int i = 0; i < c.count; i++) {
        c.param[i]->unit = u;
        c.param[i]->index = i;
        fsdpi_free(c.param[i]->host);
        c.param[i]->host = NULL;
    }
    free_collection(&c);
    *out = holder;
    return FSDP_OK;
}

/* ---- lists of units ---- */

typedef struct unit_listing {
    fsdp_unit **unit;
    int count;
} unit_listing;

static fsdp_status count_unit(fsdp_module *m, void *arg)
{
    ((unit_listing *)arg)->count += m->unit != NULL;
    return FSDP_OK;
}

static fsdp_status list_unit(fsdp_module *m, void *arg)
{
    unit_listing *l = arg;
    if (m->unit != NULL) l->unit[l->count++] = m->unit;
    return FSDP_OK;
}

fsdp_status fsdpi_module_units(fsdp_module *m, fsdp_unit_list *out)
{
    unit_listing l = { 0 };
    FSDP_TRY(fsdpi_module_walk(m, count_unit, &l));
    FSDPI_NEW(l.unit, l.count);
    l.count = 0;
    fsdp_status st = fsdpi_module_walk(m, list_unit, &l);
    if (st != FSDP_OK) {
        fsdpi_free(l.unit);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    /* Somebody may still hold the list of before: it is replaced only where the tree was wrapped again. */
    bool same = m->unit_list != NULL && m->unit_count == l.count && memcmp(m->unit_list, l.unit, (size_t)l.count * sizeof(*l.unit)) == 0;
    fsdpi_free(same ? l.unit : m->unit_list);
    if (!same) m->unit_list = l.unit;
    m->unit_count = l.count;
    *out = (fsdp_unit_list){ m->unit_list, m->unit_count };
    return FSDP_OK;
}

fsdp_unit_list fsdp_module_units(fsdp_module *m)
{
    fsdp_unit_list l;
    return fsdpi_module_units(m, &l) == FSDP_OK ? l : (fsdp_unit_list){ NULL, 0 };
}

/* ---- summon ---- */

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
