/* SPDX-License-Identifier: MIT
 *
 * Policies: which modules below one become units. The tree is gone through from the inside out, so that an outer module is asked
 * about what the inner ones have left. */
#include "nn/wrapping.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/fits.h"
#include "base/within.h"
#include "comm/call.h"

#include <stdio.h>
#include <string.h>

enum { MOST_NAME = 512 };

static bool fits_any(const char *const *pattern, int count, const char *name)
{
    for (int i = 0; i < count; i++)
        if (fsdpi_fits(pattern[i], name)) return true;
    return false;
}

static fsdp_status path_of(char *to, const char *prefix, const fsdp_module *child)
{
    int n = snprintf(to, MOST_NAME, "%s%s%s", prefix, prefix[0] != '\0' && child->name[0] != '\0' ? "." : "", child->name);
    FSDP_FAIL_IF(n >= MOST_NAME, FSDP_ERR_INVALID, "the name of module \"%s\" is longer than %d characters", to, MOST_NAME - 1);
    return FSDP_OK;
}

/* ---- is there anything that it could mean? ---- */

typedef struct sighting {
    const fsdp_wrap_policy *policy;
    bool type, name, wrapped;
    char types[256]; /* that there are */
} sighting;

static void note_type(sighting *s, const char *type)
{
    for (const char *at = s->types; (at = strstr(at, type)) != NULL; at++)
        if ((at == s->types || at[-1] == ' ') && strchr(",", at[strlen(type)]) != NULL) return;
    size_t n = strlen(s->types);
    snprintf(s->types + n, sizeof(s->types) - n, "%s%s", n > 0 ? ", " : "", type);
}

static fsdp_status look(sighting *s, fsdp_module *m, const char *path)
{
    char below[MOST_NAME];
    for (int i = 0; i < m->children; i++) {
        fsdp_module *c = m->child[i];
        FSDP_TRY(path_of(below, path, c));
        s->type |= fits_any(s->policy->types, s->policy->type_count, c->type);
        s->name |= fits_any(s->policy->names, s->policy->name_count, below);
        s->wrapped |= c->unit != NULL || c->joint != NULL;
        note_type(s, c->type);
        FSDP_TRY(look(s, c, below));
    }
    return FSDP_OK;
}

fsdp_status fsdp_wrap_policy_check(fsdp_module *root, const fsdp_wrap_policy *p)
{
    sighting s = { .policy = p };
    FSDP_FAIL_IF(root == NULL || p == NULL, FSDP_ERR_INVALID, "fsdp_wrap_policy: no module, or no policy");
    FSDP_FAIL_IF(p->type_count < 0 || p->name_count < 0 || (p->type_count > 0 && p->types == NULL) || (p->name_count > 0 && p->names == NULL), FSDP_ERR_INVALID,
                 "fsdp_wrap_policy: %d types and %d names, but no list of them", p->type_count, p->name_count);
    FSDP_FAIL_IF(p->min_numel < 0 || p->min_bytes < 0 || p->per_unit < 0, FSDP_ERR_INVALID, "fsdp_wrap_policy: min_numel %lld, min_bytes %lld, per_unit %d: none may be below 0",
                 (long long)p->min_numel, (long long)p->min_bytes, p->per_unit);
    FSDP_FAIL_IF(p->type_count == 0 && p->name_count == 0 && p->min_numel == 0 && p->min_bytes == 0 && p->decide == NULL, FSDP_ERR_INVALID,
                 "fsdp_wrap_policy: it has no rule: give types, names, a size or a function");
    FSDP_TRY(look(&s, root, ""));
    FSDP_FAIL_IF(p->type_count > 0 && !s.type && !s.wrapped, FSDP_ERR_INVALID, "fsdp_wrap_policy: there is no module of type \"%s\"%s: there are %s", p->types[0],
                 p->type_count > 1 ? ", or another of the list" : "", s.types[0] != '\0' ? s.types : "none");
    FSDP_FAIL_IF(p->name_count > 0 && !s.name && !s.wrapped, FSDP_ERR_INVALID, "fsdp_wrap_policy: no module is called \"%s\"%s (as \"h.3.mlp\"; * is any text)", p->names[0],
                 p->name_count > 1 ? ", or as another of the list" : "");
    return FSDP_OK;
}

/* ---- choosing ---- */

/* A child that gets a unit, alone or with its neighbours. */
typedef struct choice {
    fsdp_module *module;
    fsdp_wrap_opts opts;
    char name[MOST_NAME], prefix[MOST_NAME + 2];
} choice;

static bool choose(const fsdpi_wrapping *w, fsdp_module *m, const char *path, int depth, fsdp_wrap_opts *o)
{
    const fsdp_wrap_policy *p = w->opts.policy;
    fsdp_wrap_candidate c = { .module = m, .name = path, .type = m->type, .depth = depth };
    fsdpi_wrap_measure(m, &w->opts, &c.params, &c.numel);
    if (c.params == 0) return false;
    int64_t bytes = c.numel * (int64_t)sizeof(float);
    bool large = (p->min_numel > 0 && c.numel >= p->min_numel) || (p->min_bytes > 0 && bytes >= p->min_bytes);
    c.chosen = (large && m->forward != NULL) || fits_any(p->types, p->type_count, m->type) || fits_any(p->names, p->name_count, path);
    if (p->decide == NULL) return c.chosen;
    fsdpi_within here;
    fsdpi_within_begin(&here, NULL);
    bool chosen = p->decide(&c, o, p->arg);
    fsdpi_within_end(&here);
    return chosen;
}

static bool same_unit(const fsdp_wrap_opts *a, const fsdp_wrap_opts *b)
{
    return a->mode == b->mode && a->shards == b->shards && a->reshard_group == b->reshard_group && a->param_dtype == b->param_dtype && a->reduce_dtype == b->reduce_dtype &&
           a->grad_dtype == b->grad_dtype && a->exact_eval == b->exact_eval && a->storage_device == b->storage_device && a->grad_device == b->grad_device && a->compute_device == b->compute_device && a->prefetch == b->prefetch;
}

/* Neighbours [0, n) of a list of choices. */
static fsdp_status wrap_choices(fsdpi_wrapping *w, choice *c, int n)
{
    fsdp_module *member[64];
    const char *prefix[64];
    fsdp_wrap_opts o = c[0].opts;
    for (int i = 0; i < n; i++) {
        member[i] = c[i].module;
        snprintf(c[i].prefix, sizeof(c[i].prefix), "%s.", c[i].name);
        prefix[i] = c[i].prefix;
    }
    if (o.name == NULL || o.name == w->opts.name) o.name = c[0].name;
    o.policy = NULL;
    return fsdpi_wrap_members(w, member, prefix, n, &o);
}

static fsdp_status visit(fsdpi_wrapping *w, fsdp_module *m, const char *path, int depth);

static fsdp_status visit_children(fsdpi_wrapping *w, fsdp_module *m, const char *path, int depth, choice *c)
{
    int per_unit = w->opts.policy->per_unit > 0 ? w->opts.policy->per_unit : 1, n = 0;
    if (per_unit > 64) per_unit = 64;
    for (int i = 0; i < m->children; i++) {
        fsdp_module *child = m->child[i];
        bool left_alone = child->unit != NULL || child->joint != NULL;
        FSDP_TRY(path_of(c[n].name, path, child));
        if (!left_alone) FSDP_TRY(visit(w, child, c[n].name, depth + 1));
        c[n].module = child;
        c[n].opts = w->opts;
        left_alone |= child->joint != NULL; /* within a unit that was made of what is inside */
        bool chosen = !left_alone && choose(w, child, c[n].name, depth, &c[n].opts);
        /* A module that is never run cannot share: its unit is opened by its children. */
        bool goes_along = chosen && n > 0 && child->forward != NULL && c[0].module->forward != NULL && same_unit(&c[0].opts, &c[n].opts);
        if (n > 0 && !goes_along) {
            FSDP_TRY(wrap_choices(w, c, n));
            if (chosen) c[0] = c[n];
            n = 0;
        }
        if (chosen && ++n == per_unit) {
            FSDP_TRY(wrap_choices(w, c, n));
            n = 0;
        }
    }
    return n > 0 ? wrap_choices(w, c, n) : FSDP_OK;
}

static fsdp_status visit(fsdpi_wrapping *w, fsdp_module *m, const char *path, int depth)
{
    if (m->children == 0) return FSDP_OK;
    int room = w->opts.policy->per_unit > 0 ? w->opts.policy->per_unit : 1;
    choice *c;
    FSDPI_NEW(c, (room > 64 ? 64 : room) + 1);
    fsdp_status st = visit_children(w, m, path, depth, c);
    fsdpi_free(c);
    return st;
}

fsdp_status fsdpi_wrap_policy(fsdpi_wrapping *w)
{
    FSDP_TRY(fsdp_wrap_policy_check(w->root, w->opts.policy));
    FSDPI_CALL_AS(w->opts.comm, "fsdp_wrap");
    return visit(w, w->root, "", 1);
}
