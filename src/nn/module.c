/* SPDX-License-Identifier: MIT
 *
 * The tree: making, naming, walking, running, destroying modules. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
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
    const fsdpi_use *use = fsdpi_pass_find(tape->pass, p->unit);
    return use != NULL && use->was_root;
}

static bool param_frozen(void *ctx)
{
    const fsdpi_parameter *p = ctx;
    return p->unit != NULL ? fsdp_unit_frozen(p->unit, p->index) : p->frozen;
}

static void free_param(fsdpi_parameter *p)
{
    if (p == NULL) return;
    fsdpi_free((char *)(uintptr_t)p->info.name);
    fsdpi_free(p->host);
    fsdpi_free(p);
}

static fsdp_status check_param(const fsdp_module *m, const fsdp_param *param, fsdp_param_init init)
{
    FSDP_FAIL_IF(param == NULL || param->name == NULL || param->name[0] == '\0', FSDP_ERR_INVALID, "module %s: a parameter without a name", m->type);
    FSDP_FAIL_IF((unsigned)init > FSDP_PARAM_NORMAL, FSDP_ERR_INVALID, "module %s, parameter \"%s\": init %d: there is no such one", m->type, param->name, (int)init);
    for (int i = 0; i < m->params; i++)
        FSDP_FAIL_IF(strcmp(m->param[i]->info.name, param->name) == 0, FSDP_ERR_INVALID, "module %s has a parameter \"%s\" already", m->type, param->name);
    return FSDP_OK;
}

fsdp_status fsdp_module_add_param(fsdp_module *m, const fsdp_param *param, fsdp_param_init init, float scale)
{
    FSDP_TRY(check_param(m, param, init));
    fsdpi_parameter *p;
    FSDPI_NEW(p, 1);
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
    fsdpi_parameter **list = st == FSDP_OK ? fsdpi_realloc(m->param, (size_t)m->params + 1, sizeof(*list)) : NULL;
    if (list == NULL) {
        free_param(p);
        if (st == FSDP_OK) FSDP_FAIL(FSDP_ERR_NOMEM, "no memory for parameter \"%s\"", param->name);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    m->param = list;
    m->param[m->params++] = p;
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
    FSDP_FAIL_IF(o == NULL || o->forward == NULL, FSDP_ERR_INVALID, "fsdp_module_create: no forward");
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

void fsdp_module_destroy(fsdp_module *m)
{
    if (m == NULL) return;
    for (int i = 0; i < m->children; i++) fsdp_module_destroy(m->child[i]);
    fsdp_unit_destroy(m->unit);
    for (int i = 0; i < m->params; i++) free_param(m->param[i]);
    if (m->destroy != NULL) m->destroy(m->ctx);
    fsdpi_free(m->param);
    fsdpi_free(m->child);
    fsdpi_free(m->hook);
    fsdpi_free(m->unit_list);
    fsdpi_free(m->param_list);
    fsdpi_free(m->param_names);
    fsdpi_free(m->summoned);
    fsdpi_free(m->name);
    fsdpi_free(m);
}

fsdp_status fsdpi_module_walk(fsdp_module *m, fsdpi_visit_fn fn, void *arg)
{
    FSDP_TRY(fn(m, arg));
    for (int i = 0; i < m->children; i++) FSDP_TRY(fsdpi_module_walk(m->child[i], fn, arg));
    return FSDP_OK;
}

static fsdp_status each_param(fsdp_module *m, const char *prefix, fsdpi_param_fn fn, void *arg)
{
    char path[512];
    for (int i = 0; i < m->params; i++) {
        int n = snprintf(path, sizeof(path), "%s%s", prefix, m->param[i]->info.name);
        FSDP_FAIL_IF(n >= (int)sizeof(path), FSDP_ERR_INVALID, "the name of parameter \"%s\" is longer than %zu characters", path, sizeof(path) - 1);
        FSDP_TRY(fn(m->param[i], path, arg));
    }
    for (int i = 0; i < m->children; i++) {
        const char *name = m->child[i]->name;
        int n = snprintf(path, sizeof(path), name[0] != '\0' ? "%s%s." : "%s%s", prefix, name);
        FSDP_FAIL_IF(n >= (int)sizeof(path), FSDP_ERR_INVALID, "the name of module \"%s\" is longer than %zu characters", path, sizeof(path) - 1);
        FSDP_TRY(each_param(m->child[i], path, fn, arg));
    }
    return FSDP_OK;
}

fsdp_status fsdpi_module_each_param(fsdp_module *m, fsdpi_param_fn fn, void *arg)
{
    return each_param(m, "", fn, arg);
}

/* ---- lists ---- */

typedef struct listing {
    fsdp_module_param_info *info;
    char *names;
    size_t used;
    int count;
} listing;

static fsdp_status measure(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)p;
    listing *l = arg;
    l->used += strlen(name) + 1;
    l->count++;
    return FSDP_OK;
}

static fsdp_status list_param(fsdpi_parameter *p, const char *name, void *arg)
{
    listing *l = arg;
    char *copy = l->names + l->used;
    size_t n = strlen(name) + 1;
    memcpy(copy, name, n);
    l->used += n;
    l->info[l->count++] = (fsdp_module_param_info){ .name = copy, .param = p->info, .unit = p->unit, .index = p->index,
                                                     .frozen = param_frozen(p) };
    return FSDP_OK;
}

fsdp_status fsdp_module_params(fsdp_module *m, const fsdp_module_param_info **out, int *count)
{
    listing l = { 0 };
    FSDP_TRY(fsdpi_module_each_param(m, measure, &l));
    fsdp_module_param_info *info = fsdpi_calloc((size_t)l.count, sizeof(*info));
    char *names = fsdpi_calloc(l.used, 1);
    if (info == NULL || names == NULL) {
        fsdpi_free(info);
        fsdpi_free(names);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to list %d parameters", l.count);
    }
    l = (listing){ .info = info, .names = names };
    FSDP_TRY(fsdpi_module_each_param(m, list_param, &l));
    fsdpi_free(m->param_list);
    fsdpi_free(m->param_names);
    m->param_list = info;
    m->param_names = names;
    *out = info;
    *count = l.count;
    return FSDP_OK;
}

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

/* ---- running ---- */

fsdp_status fsdp_module_add_hooks(fsdp_module *m, const fsdp_hooks *hooks)
{
    fsdpi_hook_entry *p = fsdpi_realloc(m->hook, (size_t)m->hooks + 1, sizeof(*p));
    FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for hooks");
    m->hook = p;
    m->hook[m->hooks++].hooks = *hooks;
    return FSDP_OK;
}

#define RUN_HOOKS(m, tape, which)                                                                           \
    for (int i_ = 0; i_ < (m)->hooks; i_++)                                                                 \
        if ((m)->hook[i_].hooks.which != NULL) FSDP_TRY((m)->hook[i_].hooks.which((m), (tape), (m)->hook[i_].hooks.arg))

static fsdp_status before_forward(void *ctx, fsdp_tape *tape)
{
    fsdp_module *m = ctx;
    if (m->unit != NULL) FSDP_TRY((tape->recomputing ? fsdp_unit_begin_recompute : fsdp_unit_begin_forward)(m->unit, tape->pass));
    RUN_HOOKS(m, tape, before_forward);
    return FSDP_OK;
}

static fsdp_status after_forward(void *ctx, fsdp_tape *tape)
{
    fsdp_module *m = ctx;
    RUN_HOOKS(m, tape, after_forward);
    if (m->unit == NULL) return FSDP_OK;
    return (tape->recomputing ? fsdp_unit_end_recompute : fsdp_unit_end_forward)(m->unit, tape->pass);
}

static fsdp_status before_backward(void *ctx, fsdp_tape *tape)
{
    fsdp_module *m = ctx;
    if (m->unit != NULL) FSDP_TRY(fsdp_unit_begin_backward(m->unit, tape->pass));
    RUN_HOOKS(m, tape, before_backward);
    return FSDP_OK;
}

static fsdp_status after_backward(void *ctx, fsdp_tape *tape)
{
    fsdp_module *m = ctx;
    RUN_HOOKS(m, tape, after_backward);
    return m->unit != NULL ? fsdp_unit_end_backward(m->unit, tape->pass) : FSDP_OK;
}

static const fsdpi_scope_hooks scope_hooks = { before_forward, after_forward, before_backward, after_backward };

static bool has_scope(const fsdp_module *m)
{
    return m->unit != NULL || m->hooks > 0;
}

fsdp_status fsdpi_module_enter(fsdp_module *m, fsdp_tape *tape)
{
    if (!has_scope(m)) return FSDP_OK;
    FSDP_TRY(fsdpi_tape_check_pass(tape));
    FSDP_FAIL_IF(m->unit != NULL && m->unit->rt->comm != tape->comm, FSDP_ERR_INVALID, "fsdp_forward: unit \"%s\" is on another communicator than the tape",
                 fsdp_unit_name(m->unit));
    FSDP_FAIL_IF(m->unit != NULL && m->unit->ctx->compute != tape->stream, FSDP_ERR_INVALID,
                 "fsdp_forward: unit \"%s\" computes on device %s, the tape's tensors are elsewhere: fsdp_tape_opts.device must be the unit's compute device",
                 fsdp_unit_name(m->unit), fsdp_device_name(m->unit->ctx->dev));
    return fsdpi_tape_enter(tape, &scope_hooks, m);
}

fsdp_status fsdpi_module_leave(fsdp_module *m, fsdp_tape *tape)
{
    return has_scope(m) ? fsdpi_tape_leave(tape, &scope_hooks, m) : FSDP_OK;
}

void fsdp_module_set_recompute(fsdp_module *m, bool on)
{
    m->recompute = on;
}

static fsdp_status region(void *ctx, fsdp_tape *tape, fsdp_tensor *const *in, fsdp_tensor **out)
{
    fsdp_module *m = ctx;
    return m->forward(m, m->ctx, tape, in[0], out);
}

/* The unit is outside of what is computed again: it is gathered once for the recompute and the backward. */
fsdp_status fsdp_forward(fsdp_module *m, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    FSDP_TRY(fsdpi_module_enter(m, tape));
    if (m->recompute) FSDP_TRY(fsdpi_tape_region(tape, region, m, &in, 1, out, 1));
    else FSDP_TRY(m->forward(m, m->ctx, tape, in, out));
    return fsdpi_module_leave(m, tape);
}
