/* SPDX-License-Identifier: MIT
 *
 * Initial values: drawn from a stream into whole parameters, or each element from its own place in Philox. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/log.h"
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
    if (p->unit->summon_absent) return FSDP_OK;
    to = fsdp_unit_summoned(p->unit, p->index);
    FSDP_FAIL_IF(to == NULL || !p->unit->writeback, FSDP_ERR_STATE, "fsdp_module_init: parameter \"%s\" is in unit \"%s\", which is not summoned with writeback: fsdp_summon_begin() it, "
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
    (void)name;
    keyed_init *k = arg;
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

static fsdp_status init_unit(fsdp_module *m, keyed_init *k)
{
    int n = fsdp_unit_param_count(k->unit);
    k->by_index = fsdpi_calloc((size_t)n, sizeof(*k->by_index));
    k->names = fsdpi_calloc((size_t)n, sizeof(*k->names));
    bool *which = fsdpi_calloc((size_t)n, sizeof(*which)); /* a unit may have parameters that are not of m: they stay */
    fsdp_status st = k->by_index != NULL && k->names != NULL && which != NULL
                         ? fsdpi_module_each_param(m, note_param, k)
                         : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to initialise %d parameters", n);
    for (int i = 0; st == FSDP_OK && i < n; i++) which[i] = k->by_index[i] != NULL;
    if (st == FSDP_OK) st = fsdpi_unit_fill(k->unit, fill_keyed, k, which);
    for (int i = 0; k->names != NULL && i < n; i++) fsdpi_free(k->names[i]);
    fsdpi_free(k->names);
    fsdpi_free(k->by_index);
    fsdpi_free(which);
    return st;
}

/* Where ranks have seeds of their own they are told so, once. */
static fsdp_status compare_seeds(fsdp_comm *comm, fsdpi_runtime *rt, uint64_t seed)
{
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_COMPARE, NULL, &seed, sizeof(seed)));
    uint64_t first = *(const uint64_t *)fsdpi_comm_told(comm, 0);
    for (int r = 1; r < comm->size; r++) {
        uint64_t other = *(const uint64_t *)fsdpi_comm_told(comm, r);
        if (other == first || rt->said_differ) continue;
        rt->said_differ = true;
        if (comm->rank == 0)
            fsdpi_log(FSDP_LOG_INFO, "initial values: the seed is %llu on rank %d and %llu on rank %d: each rank's slice has its own, so they depend on the number of ranks (said once)",
                      (unsigned long long)first, comm->world_ranks[0], (unsigned long long)other, comm->world_ranks[r]);
    }
    return FSDP_OK;
}

fsdp_status fsdp_module_init_keyed(fsdp_module *m, fsdp_init_kind kind, uint64_t seed)
{
    FSDP_TRY(check_kind(kind));
    fsdpi_owners o = { 0 };
    fsdp_status st = fsdpi_module_owners(m, true, &o);
    for (int i = 0; i < o.count && st == FSDP_OK; i++) st = fsdpi_life_allows(o.unit[i], FSDPI_EV_FILL, NULL); /* all, or none */
    if (st == FSDP_OK && o.count > 0) st = compare_seeds(o.unit[0]->rt->comm, o.unit[0]->rt, seed);
    if (st == FSDP_OK) st = fsdpi_module_each_param(m, note_param, &(keyed_init){ .kind = kind, .seed = seed }); /* those in no unit */
    for (int i = 0; i < o.count && st == FSDP_OK; i++) st = init_unit(m, &(keyed_init){ .kind = kind, .seed = seed, .unit = o.unit[i] });
    fsdpi_free(o.unit);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

/* ---- one parameter ---- */

static fsdp_status find_param(fsdpi_parameter *p, const char *name, void *arg)
{
    fsdpi_search *s = arg;
    if (s->at++ != s->wanted) return FSDP_OK;
    s->found = p;
    snprintf(s->name, sizeof(s->name), "%s", name);
    return FSDP_OK;
}

fsdp_status fsdpi_module_find_param(fsdp_module *m, fsdpi_search *s, const char *call)
{
    FSDP_TRY(fsdpi_module_each_param(m, find_param, s));
    FSDP_FAIL_IF(s->found == NULL, FSDP_ERR_INVALID, "%s: there are %d parameters, not one with number %d", call, s->at, s->wanted);
    return FSDP_OK;
}

fsdp_status fsdp_module_read_param(fsdp_module *m, int i, float *out)
{
    fsdpi_search s = { .wanted = i };
    FSDP_TRY(fsdpi_module_find_param(m, &s, "fsdp_module_read_param"));
    FSDP_FAIL_IF(s.found->unit == NULL, FSDP_ERR_STATE, "fsdp_module_read_param: parameter \"%s\" is in no unit", s.name);
    return fsdp_unit_read_param(s.found->unit, s.found->index, out);
}
