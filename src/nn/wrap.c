/* SPDX-License-Identifier: MIT
 *
 * Where modules meet units: wrapping, listing. */
#include "nn/wrapping.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/compare.h"
#include "shard/unit.h"

#include <stdio.h>
#include <string.h>

/* ---- what goes into a unit ---- */

static bool keeps_small_apart(const fsdp_wrap_opts *o)
{
    return o->keep_whole_below > 0 && (o->mode == FSDP_MODE_FULL || o->mode == FSDP_MODE_GRAD_OP);
}

static bool is_free(const fsdpi_parameter *p, const fsdp_wrap_opts *o, fsdpi_which which)
{
    if (p->unit != NULL) return false;
    if (p->ignored) return which == FSDPI_IGNORED;
    bool small = keeps_small_apart(o) && p->tensor.numel * (int64_t)sizeof(float) < o->keep_whole_below;
    return small == (which == FSDPI_SMALL);
}

/* Parameters that go into a new unit. */
typedef struct collection {
    const fsdp_wrap_opts *o;
    fsdpi_which which;
    fsdpi_parameter **param;
    fsdp_param *info;
    char *names;
    size_t name_bytes;
    int count, with_values;
    int64_t numel;
} collection;

static fsdp_status count_free(fsdpi_parameter *p, const char *name, void *arg)
{
    collection *c = arg;
    if (!is_free(p, c->o, c->which)) return FSDP_OK;
    c->count++;
    c->numel += p->tensor.numel;
    c->name_bytes += strlen(name) + 1;
    return FSDP_OK;
}

static bool is_in(const collection *c, const fsdpi_parameter *p)
{
    for (int i = 0; p->places > 1 && i < c->count; i++)
        if (c->param[i] == p) return true;
    return false;
}

static fsdp_status collect_free(fsdpi_parameter *p, const char *name, void *arg)
{
    collection *c = arg;
    if (!is_free(p, c->o, c->which) || is_in(c, p)) return FSDP_OK; /* members of a unit may share one */
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

static fsdp_status collect(collection *c, fsdp_module *const *member, const char *const *prefix, int members)
{
    for (int i = 0; i < members; i++) FSDP_TRY(fsdpi_module_each_param_from(member[i], prefix[i], count_free, c));
    c->param = fsdpi_calloc((size_t)c->count, sizeof(*c->param));
    c->info = fsdpi_calloc((size_t)c->count, sizeof(*c->info));
    c->names = fsdpi_calloc(c->name_bytes, 1);
    FSDP_FAIL_IF(c->param == NULL || c->info == NULL || c->names == NULL, FSDP_ERR_NOMEM, "no memory to wrap %d parameters", c->count);
    c->count = 0;
    c->name_bytes = 0;
    for (int i = 0; i < members; i++) FSDP_TRY(fsdpi_module_each_param_from(member[i], prefix[i], collect_free, c));
    return FSDP_OK;
}

void fsdpi_wrap_measure(fsdp_module *m, const fsdp_wrap_opts *o, int *params, int64_t *numel)
{
    collection c = { .o = o, .which = FSDPI_LARGE };
    bool good = fsdpi_module_each_param(m, count_free, &c) == FSDP_OK;
    *params = good ? c.count : 0;
    *numel = good ? c.numel : 0;
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

/* Ranks that begin with different values are told, where only their owners' slices are looked at by the fill. */
static fsdp_status compare_hosts(fsdp_unit *u, const collection *c, const float **host)
{
    fsdpi_difference d;
    if (fsdpi_unit_has_replicas(u)) return FSDP_OK; /* the fill does it */
    for (int i = 0; i < c->count; i++) host[i] = c->param[i]->host;
    FSDP_TRY(fsdpi_compare(&(fsdpi_values){ .unit = u, .to = u->layout.total, .param = host }, FSDPI_OP_COMPARE, &d));
    fsdpi_difference_log(u, &d);
    return FSDP_OK;
}

static fsdp_status give_values(fsdp_unit *u, collection *c, const fsdp_wrap_opts *o)
{
    /* Ranks must agree whether there are values: a fill is collective. */
    double any[2] = { fsdp_comm_rank(o->comm) == 0 ? c->with_values : 0, c->with_values };
    FSDP_TRY(fsdp_comm_max(o->comm, any, 2));
    if (any[1] == 0) return FSDP_OK;
    FSDP_FAIL_IF(o->from_rank0 && any[0] == 0, FSDP_ERR_INVALID, "fsdp_wrap: unit \"%s\": from_rank0, but only other ranks' parameters have values: initialise rank 0's",
                 fsdp_unit_name(u));
    const float **host = fsdpi_calloc((size_t)c->count, sizeof(*host));
    bool *with = fsdpi_calloc((size_t)c->count, sizeof(*with));
    fsdp_status st = host != NULL && with != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to wrap %d parameters", c->count);
    st = fsdp_comm_agree(o->comm, st);
    for (int i = 0; st == FSDP_OK && i < c->count; i++) with[i] = c->param[i]->host != NULL;
    if (st == FSDP_OK && o->from_rank0) st = fsdp_comm_broadcast(o->comm, with, (size_t)c->count * sizeof(*with), 0);
    if (st == FSDP_OK && !o->from_rank0) st = compare_hosts(u, c, host);
    if (st == FSDP_OK) st = o->from_rank0 ? fsdpi_unit_fill_from(u, 0, fill_from_host, c, with) : fsdpi_unit_fill(u, fill_from_host, c, with);
    fsdpi_free(host);
    fsdpi_free(with);
    return st;
}

static fsdp_status make_unit(fsdp_unit **out, collection *c, fsdp_module *m, const fsdp_wrap_opts *o)
{
    fsdp_unit_opts uo = { .name = o->name != NULL ? o->name : m->type,
                          .mode = o->mode,
                          .shards = o->shards,
                          .reshard_group = o->reshard_group,
                          .param_dtype = o->param_dtype,
                          .reduce_dtype = o->reduce_dtype,
                          .grad_dtype = o->grad_dtype,
                          .exact_eval = o->exact_eval,
                          .storage_device = o->storage_device,
                          .grad_device = o->grad_device,
                          .compute_device = o->compute_device,
                          .prefetch = o->prefetch };
    fsdp_unit *u;
    FSDP_TRY(fsdp_unit_create(&u, o->comm, c->info, c->count, &uo));
    fsdp_status st = give_values(u, c, o);
    for (int i = 0; i < c->count && st == FSDP_OK; i++)
        if (c->param[i]->frozen) st = fsdp_unit_set_frozen(u, i, true);
    if (st != FSDP_OK) {
        fsdp_unit_destroy(u);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *out = u;
    return FSDP_OK;
}

/* ---- making units, and taking them back ---- */

static fsdp_status reserve(fsdpi_wrapping *w)
{
    if (w->count < w->room) return FSDP_OK;
    int room = w->room > 0 ? 2 * w->room : 8;
    void *p = fsdpi_realloc(w->made, (size_t)room, sizeof(*w->made));
    FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory to wrap a module");
    w->made = p;
    w->room = room;
    return FSDP_OK;
}

/* The members of a unit that none of them has alone. A module that is never run stands for its children. */
static fsdp_status make_joint(fsdpi_joint **out, fsdp_module *const *member, int members)
{
    bool holder = members == 1 && member[0]->forward == NULL;
    *out = NULL;
    if (members == 1 && !holder) return FSDP_OK;
    FSDPI_NEW(*out, 1);
    (*out)->borrowed = holder;
    return FSDP_OK;
}

static void join(fsdpi_joint *j, fsdp_unit *u, fsdp_module *const *member, int members)
{
    if (j == NULL) return;
    j->unit = u;
    for (int i = 0; i < members; i++) {
        if (member[i]->joint != NULL) continue; /* it has one already: the unit is gathered around its uses */
        member[i]->joint = j;
        j->last = member[i];
        j->members++;
    }
}

/* st: whether this rank could get so far. */
static fsdp_status make(fsdpi_wrapping *w, fsdp_status st, collection *c, fsdp_module *const *member, int members, const fsdp_wrap_opts *o)
{
    fsdp_module *m = member[0];
    fsdpi_joint *j = NULL;
    fsdp_unit *u = NULL;
    if (st == FSDP_OK) st = reserve(w);
    if (st == FSDP_OK && c->which == FSDPI_LARGE) st = make_joint(&j, member, members);
    fsdpi_holding *held = j != NULL && !j->borrowed ? &j->held : &m->held;
    int before = held->count;
    if (st == FSDP_OK) st = fsdpi_holding_add(held, c->param, c->count);
    st = fsdp_comm_agree(o->comm, st); /* what fails here is memory, and on one rank perhaps */
    if (st == FSDP_OK) st = make_unit(&u, c, m, o);
    if (st != FSDP_OK) {
        fsdpi_holding_cut(held, before);
        if (j != NULL) fsdpi_free(j->held.param);
        fsdpi_free(j);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    for (int i = 0; i < c->count; i++) {
        c->param[i]->unit = u;
        c->param[i]->index = i;
    }
    if (c->which == FSDPI_SMALL) m->small = u;
    else if (c->which == FSDPI_IGNORED) m->ignored = u;
    else if (j == NULL || j->borrowed) m->unit = u;
    if (j != NULL && j->borrowed) join(j, u, m->child, m->children);
    else join(j, u, member, members);
    if (j != NULL && j->members == 0) {
        fsdpi_free(j);
        j = NULL;
    }
    w->made[w->count++] = (fsdpi_made_unit){ u, m, j };
    return FSDP_OK;
}

fsdp_status fsdpi_wrap_members(fsdpi_wrapping *w, fsdp_module *const *member, const char *const *prefix, int members, const fsdp_wrap_opts *o)
{
    collection c = { .o = o, .which = FSDPI_LARGE };
    fsdp_status st = make(w, collect(&c, member, prefix, members), &c, member, members, o);
    free_collection(&c);
    return st;
}

/* The unit of those that are kept whole: one for all that this wrap takes. */
static fsdp_status wrap_small(fsdpi_wrapping *w)
{
    char name[256];
    fsdp_wrap_opts o = w->opts;
    collection c = { .o = &w->opts, .which = FSDPI_SMALL };
    if (!keeps_small_apart(&o)) return FSDP_OK;
    fsdp_status st = collect(&c, &w->root, (const char *const[]){ "" }, 1);
    snprintf(name, sizeof(name), "%.200s.small", o.name != NULL ? o.name : w->root->type);
    o.name = name;
    o.mode = FSDP_MODE_OPTIMIZER;
    o.reshard_group = 0;
    o.param_dtype = o.reduce_dtype = o.grad_dtype = FSDP_F32; /* norms and biases: nothing is saved by rounding them */
    if (st != FSDP_OK || c.count > 0) st = make(w, st, &c, &w->root, 1, &o);
    free_collection(&c);
    return st;
}

/* A rank's own communicator lives as long as its unit. */
static fsdp_status make_ignored(fsdpi_wrapping *w, collection *c)
{
    fsdp_comm *alone;
    char name[256];
    FSDP_TRY(collect(c, &w->root, (const char *const[]){ "" }, 1));
    if (c->count == 0) return FSDP_OK;
    FSDP_TRY(fsdp_comm_create_self(&alone));
    snprintf(name, sizeof(name), "%.200s.ignored", w->opts.name != NULL ? w->opts.name : w->root->type);
    fsdp_wrap_opts o = { .comm = alone, .name = name, .mode = FSDP_MODE_NONE, .storage_device = w->opts.storage_device, .grad_device = w->opts.grad_device, .compute_device = w->opts.compute_device };
    fsdp_status st = make(w, FSDP_OK, c, &w->root, 1, &o);
    if (st == FSDP_OK) w->root->alone = alone;
    else fsdp_comm_destroy(alone);
    return st;
}

/* Other ranks are told how it went. */
static fsdp_status wrap_ignored(fsdpi_wrapping *w)
{
    collection c = { .o = &w->opts, .which = FSDPI_IGNORED };
    fsdp_status st = make_ignored(w, &c);
    free_collection(&c);
    return fsdp_comm_agree(w->opts.comm, st);
}

static void forget_joint(const fsdpi_joint *j, fsdp_module *m)
{
    if (m->joint == j) m->joint = NULL;
    for (int i = 0; i < m->children; i++) forget_joint(j, m->child[i]);
}

static void undo(fsdpi_wrapping *w)
{
    for (int i = w->count - 1; i >= 0; i--) {
        fsdpi_made_unit *g = &w->made[i];
        fsdpi_holding *held = g->joint != NULL && !g->joint->borrowed ? &g->joint->held : &g->module->held;
        int first = held->count - fsdp_unit_param_count(g->unit);
        for (int k = first; k < held->count; k++) held->param[k]->unit = NULL;
        fsdpi_holding_cut(held, first);
        if (g->module->unit == g->unit) g->module->unit = NULL;
        if (g->module->small == g->unit) g->module->small = NULL;
        if (g->joint != NULL) {
            if (w->root != NULL) forget_joint(g->joint, w->root); /* fsdp_wrap_together() makes its only unit last */
            fsdpi_free(g->joint->held.param);
            fsdpi_free(g->joint);
        }
        fsdp_unit_destroy(g->unit);
        if (g->module->ignored == g->unit) {
            g->module->ignored = NULL;
            fsdp_comm_destroy(g->module->alone);
            g->module->alone = NULL;
        }
    }
    fsdpi_free(w->made);
}

static fsdp_status pass_through(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    (void)ctx;
    return fsdp_forward(m->child[0], tape, in, out);
}

/* A transparent module around one that has a unit already. */
static fsdp_status put_around(fsdp_module **out, fsdp_module *m)
{
    fsdp_module_opts o = { .type = m->type, .forward = pass_through, .children = &m, .names = (const char *const[]){ "" }, .child_count = 1 };
    return fsdp_module_create(out, &o);
}

static void take_off(fsdp_module *around, fsdp_module *m)
{
    if (around == m) return;
    m->parent = NULL;
    around->children = 0;
    fsdp_module_destroy(around);
}

static fsdp_status check_opts(const fsdp_wrap_opts *o, const char *call)
{
    FSDP_FAIL_IF(o == NULL || o->comm == NULL, FSDP_ERR_INVALID, "%s: no communicator in fsdp_wrap_opts.comm", call);
    FSDP_FAIL_IF(o->keep_whole_below < 0, FSDP_ERR_INVALID, "%s: keep_whole_below is %lld bytes", call, (long long)o->keep_whole_below);
    return FSDP_OK;
}

/* All units are made, or none. */
static fsdp_status finish(fsdpi_wrapping *w, fsdp_status st)
{
    if (st != FSDP_OK) {
        fsdpi_error kept;
        fsdpi_error_save(&kept);
        undo(w);
        fsdpi_error_restore(&kept);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    for (int i = 0; i < w->count; i++) {
        const fsdpi_joint *j = w->made[i].joint;
        const fsdpi_holding *h = j != NULL && !j->borrowed ? &j->held : &w->made[i].module->held;
        for (int k = 0; k < h->count; k++) {
            fsdpi_free(h->param[k]->host);
            h->param[k]->host = NULL;
        }
    }
    fsdpi_free(w->made);
    return FSDP_OK;
}

fsdp_status fsdp_wrap(fsdp_module **out, fsdp_module *m, const fsdp_wrap_opts *opts)
{
    FSDP_FAIL_IF(m == NULL, FSDP_ERR_INVALID, "fsdp_wrap: no module");
    FSDP_TRY(check_opts(opts, "fsdp_wrap"));
    FSDP_FAIL_IF(m->unit != NULL && m->parent != NULL, FSDP_ERR_INVALID, "fsdp_wrap: module %s is wrapped already (unit \"%s\") and in another module: wrap that one",
                 m->type, fsdp_unit_name(m->unit));
    fsdpi_wrapping w = { .root = m, .opts = *opts };
    fsdp_status st = fsdpi_wrap_same_ignored(opts->comm, &m, 1);
    if (st != FSDP_OK) return st;
    if (m->unit != NULL) st = fsdp_comm_agree(opts->comm, put_around(&w.root, m));
    if (st == FSDP_OK && opts->policy != NULL) st = fsdpi_wrap_policy(&w);
    if (st == FSDP_OK) st = fsdpi_wrap_members(&w, &w.root, (const char *const[]){ "" }, 1, &w.opts);
    if (st == FSDP_OK) st = wrap_small(&w);
    if (st == FSDP_OK) st = wrap_ignored(&w);
    if (st == FSDP_OK && opts->from_rank0) st = fsdpi_buffers_from_rank0(w.root, opts->comm);
    st = finish(&w, st);
    if (st != FSDP_OK) {
        take_off(w.root, m);
        return st;
    }
    *out = w.root;
    return FSDP_OK;
}

static bool is_within(const fsdp_module *m, const fsdp_module *outer)
{
    while (m != NULL && m != outer) m = m->parent;
    return m != NULL;
}

fsdp_status fsdp_wrap_together(fsdp_module *const *modules, int count, const fsdp_wrap_opts *opts)
{
    FSDP_TRY(check_opts(opts, "fsdp_wrap_together"));
    FSDP_FAIL_IF(modules == NULL || count < 1, FSDP_ERR_INVALID, "fsdp_wrap_together: %d modules", count);
    FSDP_FAIL_IF(opts->policy != NULL || opts->keep_whole_below > 0, FSDP_ERR_INVALID, "fsdp_wrap_together: a policy, or what is kept whole, is for fsdp_wrap()");
    for (int i = 0; i < count; i++) {
        FSDP_FAIL_IF(modules[i] == NULL, FSDP_ERR_INVALID, "fsdp_wrap_together: module %d is NULL", i);
        FSDP_FAIL_IF(modules[i]->unit != NULL || modules[i]->joint != NULL, FSDP_ERR_INVALID, "fsdp_wrap_together: module %d (%s) is wrapped already (unit \"%s\")", i,
                     modules[i]->type, fsdp_unit_name(modules[i]->unit != NULL ? modules[i]->unit : modules[i]->joint->unit));
        for (int k = 0; k < count; k++)
            FSDP_FAIL_IF(k != i && modules[k] != NULL && is_within(modules[i], modules[k]), FSDP_ERR_INVALID, "fsdp_wrap_together: module %d (%s) is within module %d (%s)", i,
                         modules[i]->type, k, modules[k]->type);
        FSDP_FAIL_IF(modules[i]->forward == NULL, FSDP_ERR_INVALID, "fsdp_wrap_together: module %d (%s) is never run: give its children", i, modules[i]->type);
    }
    FSDP_TRY(fsdpi_wrap_same_ignored(opts->comm, modules, count));
    fsdpi_wrapping w = { .opts = *opts };
    char (*text)[16] = fsdpi_calloc((size_t)count, sizeof(*text));
    const char **prefix = fsdpi_calloc((size_t)count, sizeof(*prefix));
    fsdp_status st = text != NULL && prefix != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to wrap %d modules", count);
    for (int i = 0; i < count && st == FSDP_OK; i++) {
        snprintf(text[i], sizeof(text[i]), "%d.", i); /* their own names may be the same */
        prefix[i] = count > 1 ? text[i] : "";
    }
    st = fsdp_comm_agree(opts->comm, st);
    if (st == FSDP_OK) st = fsdpi_wrap_members(&w, modules, prefix, count, &w.opts);
    st = finish(&w, st);
    fsdpi_free(prefix);
    fsdpi_free(text);
    return st;
}

/* ---- lists of units ---- */

typedef struct unit_listing {
    fsdp_unit **unit;
    int count;
} unit_listing;

static fsdp_status count_unit(fsdp_module *m, void *arg)
{
    ((unit_listing *)arg)->count += (m->unit != NULL) + (m->small != NULL) + (m->joint != NULL);
    return FSDP_OK;
}

static void list_once(unit_listing *l, fsdp_unit *u)
{
    for (int i = 0; i < l->count; i++)
        if (l->unit[i] == u) return;
    l->unit[l->count++] = u;
}

static fsdp_status list_unit(fsdp_module *m, void *arg)
{
    unit_listing *l = arg;
    if (m->joint != NULL) list_once(l, m->joint->unit);
    if (m->unit != NULL) l->unit[l->count++] = m->unit;
    if (m->small != NULL) l->unit[l->count++] = m->small;
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
