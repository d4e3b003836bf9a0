/* SPDX-License-Identifier: MIT
 *
 * Initial values: drawn from a stream into whole parameters, or each element from its own place in Philox. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/unit.h"

#include <stdio.h>
#include <string.h>

/* How a parameter is to be drawn, by kind. */
typedef struct recipe {
    fsdp_param_init init;
    float scale;
} recipe;

static recipe recipe_of(const fsdpi_parameter *p, fsdp_init_kind kind)
{
    if (kind == FSDP_INIT_KAIMING) return (recipe){ p->init, p->scale };
    if (p->init == FSDP_PARAM_ONES) return (recipe){ FSDP_PARAM_ONES, 0 };
    if (p->is_bias_or_norm) return (recipe){ FSDP_PARAM_ZEROS, 0 };
    return (recipe){ FSDP_PARAM_NORMAL, p->normal_std > 0 ? p->normal_std : 0.02f };
}

static fsdp_status check_kind(fsdp_init_kind kind)
{
    FSDP_FAIL_IF((unsigned)kind > FSDP_INIT_NORMAL, FSDP_ERR_INVALID, "fsdp_module_init: kind %d", (int)kind);
    return FSDP_OK;
}

/* ---- from a stream ---- */

typedef struct stream_init {
    fsdp_init_kind kind;
    fsdp_rng *rng;
} stream_init;

static void draw(recipe r, fsdp_rng *rng, int64_t numel, float *out)
{
    for (int64_t i = 0; i < numel; i++) {
        switch (r.init) {
        case FSDP_PARAM_ZEROS: out[i] = 0; break;
        case FSDP_PARAM_ONES: out[i] = 1; break;
        case FSDP_PARAM_UNIFORM: out[i] = r.scale * (2 * fsdp_rng_uniform(rng) - 1); break;
        case FSDP_PARAM_NORMAL: out[i] = r.scale * fsdp_rng_normal(rng); break;
        }
    }
}

static fsdp_status init_param(fsdpi_parameter *p, const char *name, void *arg)
{
    stream_init *s = arg;
    int64_t n = p->tensor.numel;
    float *to, *host = NULL;
    if (p->unit == NULL) {
        FSDP_TRY(fsdpi_parameter_host(p, &to));
        draw(recipe_of(p, s->kind), s->rng, n, to);
        return FSDP_OK;
    }
    to = fsdp_unit_summoned(p->unit, p->index);
    FSDP_FAIL_IF(to == NULL, FSDP_ERR_STATE, "fsdp_module_init: parameter \"%s\" is in unit \"%s\", which is not summoned with writeback: fsdp_summon_begin() it, "
                 "or use fsdp_module_init_keyed()", name, fsdp_unit_name(p->unit));
    FSDPI_NEW(host, n);
    draw(recipe_of(p, s->kind), s->rng, n, host);
    fsdp_status st = fsdp_stream_copy(fsdp_unit_stream(p->unit), to, host, (size_t)n * sizeof(float));
    if (st == FSDP_OK) st = fsdp_stream_sync(fsdp_unit_stream(p->unit));
    fsdpi_free(host);
    return st;
}

fsdp_status fsdp_module_init(fsdp_module *m, fsdp_init_kind kind, fsdp_rng *rng)
{
    FSDP_TRY(check_kind(kind));
    return fsdpi_module_each_param(m, init_param, &(stream_init){ kind, rng });
}

/* ---- by key ---- */

typedef struct keyed_init {
    fsdp_init_kind kind;
    uint64_t seed;
    fsdp_unit *unit;           /* being filled */
    const fsdpi_parameter **by_index; /* its parameters */
    char **names;              /* and their full names */
} keyed_init;

static void draw_keyed(recipe r, uint64_t seed, const char *name, int64_t first, int64_t numel, float *out)
{
    switch (r.init) {
    case FSDP_PARAM_ZEROS: memset(out, 0, (size_t)numel * sizeof(float)); return;
    case FSDP_PARAM_ONES:
        for (int64_t i = 0; i < numel; i++) out[i] = 1;
        return;
    case FSDP_PARAM_UNIFORM:
        fsdp_philox_uniform_fill(seed, name, first, numel, out);
        for (int64_t i = 0; i < numel; i++) out[i] = r.scale * (2 * out[i] - 1);
        return;
    case FSDP_PARAM_NORMAL:
        fsdp_philox_normal_fill(seed, name, first, numel, out);
        for (int64_t i = 0; i < numel; i++) out[i] *= r.scale;
        return;
    }
}

static fsdp_status fill_keyed(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    keyed_init *k = arg;
    FSDP_FAIL_IF(k->by_index[param] == NULL, FSDP_ERR_INVALID,
                 "fsdp_module_init_keyed: unit \"%s\" also holds parameter \"%s\", which is outside of the module: initialise a module around both",
                 fsdp_unit_name(k->unit), name);
    draw_keyed(recipe_of(k->by_index[param], k->kind), k->seed, k->names[param], first, numel, out);
    return FSDP_OK;
}

static fsdp_status note_param(fsdpi_parameter *p, const char *name, void *arg)
{
    keyed_init *k = arg;
    if (p->unit != k->unit) return FSDP_OK;
    if (k->unit == NULL) {
        float *host;
        FSDP_TRY(fsdpi_parameter_host(p, &host));
        draw_keyed(recipe_of(p, k->kind), k->seed, name, 0, p->tensor.numel, host);
        return FSDP_OK;
    }
    k->by_index[p->index] = p;
    fsdpi_free(k->names[p->index]);
    k->names[p->index] = fsdpi_strdup(name);
    FSDP_FAIL_IF(k->names[p->index] == NULL, FSDP_ERR_NOMEM, "no memory for the name of a parameter");
    return FSDP_OK;
}

/* A parameter that lies in a unit around m: nobody below m would fill it. */
typedef struct outside {
    fsdp_unit_list inside;
} outside;

static fsdp_status check_inside(fsdpi_parameter *p, const char *name, void *arg)
{
    const fsdp_unit_list *l = &((outside *)arg)->inside;
    if (p->unit == NULL) return FSDP_OK;
    for (int i = 0; i < l->count; i++)
        if (l->units[i] == p->unit) return FSDP_OK;
    FSDP_FAIL(FSDP_ERR_INVALID, "fsdp_module_init_keyed: parameter \"%s\" is in unit \"%s\", which is not within the module: initialise a module that has both",
              name, fsdp_unit_name(p->unit));
}

static fsdp_status init_unit(fsdp_module *m, keyed_init *k)
{
    int n = fsdp_unit_param_count(k->unit);
    k->by_index = fsdpi_calloc((size_t)n, sizeof(*k->by_index));
    k->names = fsdpi_calloc((size_t)n, sizeof(*k->names));
    fsdp_status st = k->by_index != NULL && k->names != NULL
                         ? fsdpi_module_each_param(m, note_param, k)
                         : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to initialise %d parameters", n);
    if (st == FSDP_OK) st = fsdp_unit_fill(k->unit, fill_keyed, k);
    for (int i = 0; k->names != NULL && i < n; i++) fsdpi_free(k->names[i]);
    fsdpi_free(k->names);
    fsdpi_free(k->by_index);
    return st;
}

fsdp_status fsdp_module_init_keyed(fsdp_module *m, fsdp_init_kind kind, uint64_t seed)
{
    FSDP_TRY(check_kind(kind));
    fsdp_unit_list units;
    FSDP_TRY(fsdpi_module_units(m, &units));
    FSDP_TRY(fsdpi_module_each_param(m, check_inside, &(outside){ units }));
    FSDP_TRY(fsdpi_module_each_param(m, note_param, &(keyed_init){ .kind = kind, .seed = seed })); /* those in no unit */
    for (int i = 0; i < units.count; i++) FSDP_TRY(init_unit(m, &(keyed_init){ .kind = kind, .seed = seed, .unit = units.units[i] }));
    return FSDP_OK;
}

/* By walking: a list that the program goes through must not be replaced under it. */
typedef struct search {
    int wanted, at;
    const fsdpi_parameter *found;
    char name[512];
} search;

static fsdp_status find_param(fsdpi_parameter *p, const char *name, void *arg)
{
    search *s = arg;
    if (s->at++ != s->wanted) return FSDP_OK;
    s->found = p;
    snprintf(s->name, sizeof(s->name), "%s", name);
    return FSDP_OK;
}

fsdp_status fsdp_module_read_param(fsdp_module *m, int i, float *out)
{
    search s = { .wanted = i };
    FSDP_TRY(fsdpi_module_each_param(m, find_param, &s));
    FSDP_FAIL_IF(s.found == NULL, FSDP_ERR_INVALID, "fsdp_module_read_param: there are %d parameters, not one with number %d", s.at, i);
    FSDP_FAIL_IF(s.found->unit == NULL, FSDP_ERR_STATE, "fsdp_module_read_param: parameter \"%s\" is in no unit", s.name);
    return fsdp_unit_read_param(s.found->unit, s.found->index, out);
}
