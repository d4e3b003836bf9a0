/* SPDX-License-Identifier: MIT
 *
 * The tree: making, naming, walking, running, destroying modules. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/fits.h"
#include "shard/pass.h"
#include "shard/runtime.h"
#include "shard/unit.h"

#include <stdio.h>
#include <string.h>

/* ---- parameters ---- */

fsdp_status fsdpi_parameter_host(fsdpi_parameter *p, float **out)
{
    if (p->host == NULL) FSDPI_NEW(p->host, p->tensor.numel);
    *out = p->host;
    return FSDP_OK;
}

static const float *param_data(void *ctx, int index)
{
    fsdpi_parameter *p = ctx;
    float *host;
    if (p->unit != NULL) return fsdp_unit_param(p->unit, index >= 0 ? p->index : 0);
    if (p->lost) {
        (void)fsdp_error_raise(FSDP_ERR_STATE, __func__, __FILE__, __LINE__,
                               "parameter \"%s\" was in a unit of another tree, and went with it: destroy trees that share parameters together", p->info.name);
        return NULL;
    }
    return fsdpi_parameter_host(p, &host) == FSDP_OK ? host : NULL;
}

static float *param_grad(void *ctx, int index, float *beta)
{
    fsdpi_parameter *p = ctx;
    (void)index;
    if (p->unit != NULL) return fsdp_unit_grad(p->unit, p->index, beta);
    (void)fsdp_error_raise(FSDP_ERR_STATE, __func__, __FILE__, __LINE__,
                           "parameter \"%s\" is in no unit, so nobody would reduce its gradient: fsdp_wrap() the module that it is in", p->info.name);
    return NULL;
}

/* A unit that is sharded at the end of its forward is whole again only when its backward begins. */
static bool param_stays(void *ctx, const fsdp_tape *tape)
{
    const fsdpi_parameter *p = ctx;
    if (p->unit == NULL || fsdp_unit_mode(p->unit) != FSDP_MODE_FULL) return true;
    const fsdp_pass *pass = fsdpi_tape_pass_on(tape, p->unit->rt->comm);
    const fsdpi_use *use = pass != NULL ? fsdpi_pass_find(pass, p->unit) : NULL;
    return use != NULL && use->was_root;
}

static bool param_frozen(void *ctx)
{
    const fsdpi_parameter *p = ctx;
    return p->unit != NULL ? fsdp_unit_frozen(p->unit, p->index) : p->frozen;
}

void fsdpi_parameter_release(fsdpi_parameter *p)
{
    if (p == NULL || --p->refs > 0) return;
    fsdpi_free((char *)(uintptr_t)p->info.name);
    fsdpi_free(p->host);
    fsdpi_free(p);
}

static fsdp_status check_param(const fsdp_module *m, const fsdp_param *param, fsdp_param_init init)
{
    FSDP_FAIL_IF(param == NULL || param->name == NULL || param->name[0] == '\0', FSDP_ERR_INVALID, "module %s: a parameter without a name", m->type);
    FSDP_FAIL_IF((unsigned)init > FSDP_PARAM_NORMAL, FSDP_ERR_INVALID, "module %s, parameter \"%s\": init %d: there is no such one", m->type, param->name, (int)init);
    for (int i = 0; i < m->params; i++)
        FSDP_FAIL_IF(strcmp(m->param_name[i], param->name) == 0, FSDP_ERR_INVALID, "module %s has a parameter \"%s\" already", m->type, param->name);
    for (int i = 0; i < m->buffers; i++)
        FSDP_FAIL_IF(strcmp(m->buffer[i]->info.name, param->name) == 0, FSDP_ERR_INVALID, "module %s, parameter \"%s\": a buffer has that name", m->type, param->name);
    return FSDP_OK;
}

static fsdp_status append_param(fsdp_module *m, fsdpi_parameter *p)
{
    char *name = fsdpi_strdup(p->info.name);
    fsdpi_parameter **list = fsdpi_realloc(m->param, (size_t)m->params + 1, sizeof(*list));
    if (list != NULL) m->param = list;
    char **names = fsdpi_realloc(m->param_name, (size_t)m->params + 1, sizeof(*names));
    if (names != NULL) m->param_name = names;
    if (name == NULL || list == NULL || names == NULL) {
        fsdpi_free(name);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory for parameter \"%s\"", p->info.name);
    }
    m->param[m->params] = p;
    m->param_name[m->params++] = name;
    return FSDP_OK;
}

fsdp_status fsdp_module_add_param(fsdp_module *m, const fsdp_param *param, fsdp_param_init init, float scale)
{
    FSDP_TRY(check_param(m, param, init));
    fsdpi_parameter *p;
    FSDPI_NEW(p, 1);
    p->places = p->refs = 1;
    p->info = *param;
    p->info.name = fsdpi_strdup(param->name);
    p->init = init;
    p->scale = scale;
    p->is_bias_or_norm = init == FSDP_PARAM_ONES || init == FSDP_PARAM_ZEROS || param->ndim < 2;
    p->source = (fsdpi_source){ .data = param_data, .grad = param_grad, .stays = param_stays, .frozen = param_frozen, .ctx = p };
    p->tensor.source = &p->source;
    p->tensor.needs_grad = true;
    fsdp_status st = p->info.name != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for a parameter");
    if (st == FSDP_OK) st = fsdpi_tensor_set_shape(&p->tensor, FSDP_F32, param->ndim, param->shape);
    if (st == FSDP_OK) st = append_param(m, p);
    if (st != FSDP_OK) {
        fsdpi_parameter_release(p);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    return FSDP_OK;
}

fsdpi_parameter *fsdpi_module_own_param(fsdp_module *m, int i)
{
    return i >= 0 && i < m->params ? m->param[i] : NULL;
}

fsdp_tensor *fsdp_module_param(fsdp_module *m, int i)
{
    return i >= 0 && i < m->params ? &m->param[i]->tensor : NULL;
}

/* ---- the tree ---- */

static fsdp_status adopt(fsdp_module *m, fsdp_module *child, const char *name)
{
    FSDP_FAIL_IF(child == NULL, FSDP_ERR_INVALID, "module %s: child \"%s\" is NULL", m->type, name);
    FSDP_FAIL_IF(child->parent != NULL, FSDP_ERR_INVALID, "module %s: child \"%s\" (%s) is in another module already", m->type, name, child->type);
    for (int i = 0; i < m->children; i++)
        FSDP_FAIL_IF(strcmp(m->child[i]->name, name) == 0, FSDP_ERR_INVALID, "module %s: two children are called \"%s\": their parameters could not be told apart", m->type, name);
    char *copy = fsdpi_strdup(name);
    FSDP_FAIL_IF(copy == NULL, FSDP_ERR_NOMEM, "no memory for a module");
    fsdpi_free(child->name);
    child->name = copy;
    child->parent = m;
    m->child[m->children++] = child;
    return FSDP_OK;
}

fsdp_status fsdp_module_create(fsdp_module **out, const fsdp_module_opts *o)
{
    fsdp_status st;
    FSDP_FAIL_IF(o == NULL || (o->forward == NULL && o->children == NULL), FSDP_ERR_INVALID, "fsdp_module_create: no forward, and no children to hold");
    FSDP_FAIL_IF(o->child_count < 0 || (o->child_count > 0 && (o->children == NULL || o->names == NULL)), FSDP_ERR_INVALID,
                 "fsdp_module_create: %d children, but no list of them, or of their names", o->child_count);
    for (int i = 0; i < o->child_count; i++) FSDP_FAIL_IF(o->names[i] == NULL, FSDP_ERR_INVALID, "fsdp_module_create: child %d has no name", i);
    fsdp_module *m;
    FSDPI_NEW(m, 1);
    m->type = o->type != NULL ? o->type : "module";
    m->forward = o->forward;
    m->name = fsdpi_strdup("");
    m->child = fsdpi_calloc((size_t)o->child_count, sizeof(*m->child));
    if (m->name == NULL || m->child == NULL) FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, fail, "no memory for a module");
    for (int i = 0; i < o->child_count; i++) FSDP_TRY_GOTO(adopt(m, o->children[i], o->names[i]), fail);
    m->ctx = o->ctx;
    m->destroy = o->destroy;
    *out = m;
    return FSDP_OK;
fail: /* nothing is taken */
    for (int i = 0; i < m->children; i++) m->child[i]->parent = NULL;
    fsdpi_free(m->child);
    fsdpi_free(m->name);
    fsdpi_free(m);
    return st;
}

fsdp_module *fsdp_module_child(fsdp_module *m, int i)
{
    return i >= 0 && i < m->children ? m->child[i] : NULL;
}

static void release_params(fsdp_module *m)
{
    for (int i = 0; i < m->params; i++) {
        m->param[i]->places--;
        fsdpi_parameter_release(m->param[i]);
        fsdpi_free(m->param_name[i]);
    }
    fsdpi_free(m->param);
    fsdpi_free(m->param_name);
}

void fsdp_module_destroy(fsdp_module *m)
{
    if (m == NULL) return;
    for (int i = 0; i < m->children; i++) fsdp_module_destroy(m->child[i]);
    fsdpi_module_drop_units(m);
    release_params(m);
    fsdpi_buffers_destroy(m);
    if (m->destroy != NULL) m->destroy(m->ctx);
    fsdpi_free(m->child);
    fsdpi_free(m->hook);
    fsdpi_free(m->unit_list);
    fsdpi_free(m->param_list);
    fsdpi_free(m->param_names);
    fsdpi_free(m->param_aliases);
    fsdpi_summon_free_all(m);
    fsdpi_free(m->name);
    fsdpi_free(m);
}

fsdp_status fsdpi_module_walk(fsdp_module *m, fsdpi_visit_fn fn, void *arg)
{
    FSDP_TRY(fn(m, arg));
    for (int i = 0; i < m->children; i++) FSDP_TRY(fsdpi_module_walk(m->child[i], fn, arg));
    return FSDP_OK;
}

fsdp_status fsdpi_module_walk_named(fsdp_module *m, const char *prefix, fsdpi_named_fn fn, void *arg)
{
    char path[512];
    FSDP_TRY(fn(m, prefix, arg));
    for (int i = 0; i < m->children; i++) {
        const char *name = m->child[i]->name;
        int n = snprintf(path, sizeof(path), name[0] != '\0' ? "%s%s." : "%s%s", prefix, name);
        FSDP_FAIL_IF(n >= (int)sizeof(path), FSDP_ERR_INVALID, "the name of module \"%s\" is longer than %zu characters", path, sizeof(path) - 1);
        FSDP_TRY(fsdpi_module_walk_named(m->child[i], path, fn, arg));
    }
    return FSDP_OK;
}

typedef struct param_visit {
    fsdpi_param_fn fn;
    void *arg;
} param_visit;

static fsdp_status visit_params(fsdp_module *m, const char *prefix, void *arg)
{
    const param_visit *v = arg;
    char path[512];
    for (int i = 0; i < m->params; i++) {
        int n = snprintf(path, sizeof(path), "%s%s", prefix, m->param_name[i]);
        FSDP_FAIL_IF(n >= (int)sizeof(path), FSDP_ERR_INVALID, "the name of parameter \"%s\" is longer than %zu characters", path, sizeof(path) - 1);
        FSDP_TRY(v->fn(m->param[i], path, v->arg));
    }
    return FSDP_OK;
}

static fsdp_status each_param(fsdp_module *m, const char *prefix, fsdpi_param_fn fn, void *arg)
{
    return fsdpi_module_walk_named(m, prefix, visit_params, &(param_visit){ fn, arg });
}

fsdp_status fsdpi_module_each_place(fsdp_module *m, fsdpi_param_fn fn, void *arg)
{
    return each_param(m, "", fn, arg);
}

/* Of a parameter in several places only the first counts. */
typedef struct first_places {
    fsdpi_parameter *seen; /* those in several places */
    fsdpi_param_fn fn;
    void *arg;
} first_places;

static fsdp_status first_place(fsdpi_parameter *p, const char *name, void *arg)
{
    first_places *f = arg;
    if (p->seen) return FSDP_OK;
    if (p->places > 1) {
        p->seen = true;
        p->seen_before = f->seen;
        f->seen = p;
    }
    return f->fn(p, name, f->arg);
}

static void forget_places(first_places *f)
{
    for (fsdpi_parameter *p = f->seen; p != NULL; p = p->seen_before) p->seen = false;
}

fsdp_status fsdpi_module_each_param_from(fsdp_module *m, const char *prefix, fsdpi_param_fn fn, void *arg)
{
    first_places f = { .fn = fn, .arg = arg };
    fsdp_status st = each_param(m, prefix, first_place, &f);
    forget_places(&f);
    return st;
}

fsdp_status fsdpi_module_each_param(fsdp_module *m, fsdpi_param_fn fn, void *arg)
{
    return fsdpi_module_each_param_from(m, "", fn, arg);
}

/* ---- by pattern ---- */

typedef struct selection {
    const char *pattern;
    first_places first; /* that fit */
    int fitting;
} selection;

static fsdp_status select_param(fsdpi_parameter *p, const char *name, void *arg)
{
    selection *s = arg;
    if (!fsdpi_fits(s->pattern, name)) return FSDP_OK;
    s->fitting++;
    return first_place(p, name, &s->first);
}

static fsdp_status count_param(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)p, (void)name;
    ++*(int *)arg;
    return FSDP_OK;
}

fsdp_status fsdpi_module_each_fitting(fsdp_module *m, const char *pattern, const char *call, fsdpi_param_fn fn, void *arg)
{
    FSDP_FAIL_IF(m == NULL || pattern == NULL, FSDP_ERR_INVALID, "%s: no module, or no pattern (\"*\" stands for all parameters)", call);
    selection s = { .pattern = pattern, .first = { .fn = fn, .arg = arg } };
    fsdp_status st = fsdpi_module_each_place(m, select_param, &s);
    int params = 0;
    forget_places(&s.first);
    FSDP_TRY(st);
    if (s.fitting == 0) FSDP_TRY(fsdpi_module_each_param(m, count_param, &params));
    FSDP_FAIL_IF(s.fitting == 0, FSDP_ERR_INVALID, "%s: \"%s\" fits none of the %d parameters of module %s: names are whole, as fsdp_module_params() lists them, and * stands for any text",
                 call, pattern, params, m->type);
    return FSDP_OK;
}

/* ---- sizes ---- */

static fsdp_status add_numel(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)name;
    *(int64_t *)arg += p->tensor.numel;
    return FSDP_OK;
}

int64_t fsdp_module_numel(fsdp_module *m)
{
    int64_t n = 0;
    return fsdpi_module_each_param(m, add_numel, &n) == FSDP_OK ? n : 0;
}
