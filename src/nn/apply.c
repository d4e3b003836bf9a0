/* SPDX-License-Identifier: MIT
 *
 * fsdp_module_apply(): the program's function goes over all parameters in the tree's order, each whole, as if nothing were
 * sharded. That order may leave a unit and come back to it, where a unit lies around others: so that one alone is whole at a
 * time it is gathered again. What one rank cannot do it goes past, with all that is collective, and says so at the end. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/within.h"
#include "shard/staged.h"

#include <stdio.h>
#include <string.h>

/* New values of a parameter that is in no unit. */
typedef struct loose {
    struct loose *next;
    fsdpi_parameter *p;
    float *host;
} loose;

enum { MOST_COMMS = 8 };

typedef struct application {
    fsdp_apply_fn fn;
    void *arg;
    fsdp_comm *comm[MOST_COMMS]; /* that there are units on */
    int comms, calls, params; /* calls: on so many of them one is under way */
    fsdpi_staged *staged; /* of each unit that has parameters of the module */
    int count, room;
    fsdp_unit *whole; /* summoned now */
    bool read;        /* and its values can be read here */
    loose *loose;
    fsdp_status st;   /* of this rank: its first error */
    fsdpi_error error;
} application;

/* Keeps the first error; the walk goes on. */
static void note(application *a, fsdp_status st)
{
    if (st == FSDP_OK || a->st != FSDP_OK) return;
    a->st = st;
    fsdpi_error_save(&a->error);
}

/* ---- one parameter ---- */

static fsdpi_staged *staged_of(application *a, const fsdp_unit *u)
{
    for (int i = 0; i < a->count; i++)
        if (a->staged[i].unit == u) return &a->staged[i];
    return NULL;
}

static fsdp_status leave_unit(application *a)
{
    fsdp_unit *u = a->whole;
    a->whole = NULL;
    if (u == NULL) return FSDP_OK;
    return a->read ? fsdp_unit_summon_end(u) : fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SUMMON_END, fsdp_unit_name(u), 0); /* as the others */
}

static void enter_unit(application *a, fsdp_unit *u)
{
    if (a->whole == u) return;
    note(a, leave_unit(a));
    if (u == NULL) return;
    fsdp_status st = fsdp_unit_summon_begin(u, NULL);
    a->whole = u;
    a->read = st == FSDP_OK;
    note(a, st);
}

static fsdp_status call(application *a, const fsdpi_parameter *p, const char *name, float *host)
{
    fsdp_param info = p->info;
    info.name = name;
    fsdpi_within w;
    fsdpi_within_begin(&w, NULL);
    fsdp_status st = a->fn(name, &info, host, a->arg);
    fsdpi_within_end(&w);
    return st;
}

static fsdp_status apply_in_unit(application *a, fsdpi_parameter *p, const char *name)
{
    fsdp_stream *s = fsdp_unit_stream(p->unit);
    size_t bytes = (size_t)p->tensor.numel * sizeof(float);
    float *host;
    FSDPI_NEW(host, p->tensor.numel);
    fsdp_status st = FSDP_OK;
    if (bytes > 0) st = fsdp_stream_copy(s, host, fsdp_unit_param(p->unit, p->index), bytes);
    fsdp_status sync = fsdp_stream_sync(s);
    if (st == FSDP_OK) st = sync;
    if (st == FSDP_OK) st = call(a, p, name, host);
    if (st == FSDP_OK) st = fsdpi_staged_put(staged_of(a, p->unit), p->index, host);
    fsdpi_free(host);
    return st;
}

static fsdp_status apply_loose(application *a, fsdpi_parameter *p, const char *name)
{
    loose *l;
    FSDP_FAIL_IF(p->lost, FSDP_ERR_STATE, "fsdp_module_apply: parameter \"%s\" went with a unit of another tree", name);
    FSDPI_NEW(l, 1);
    *l = (loose){ .next = a->loose, .p = p };
    a->loose = l;
    FSDPI_NEW(l->host, p->tensor.numel);
    if (p->host != NULL) memcpy(l->host, p->host, (size_t)p->tensor.numel * sizeof(float));
    return call(a, p, name, l->host);
}

/* One after another, each looked for: the program's function may walk the tree itself. */
static fsdp_status apply_all(application *a, fsdp_module *m)
{
    for (int i = 0; i < a->params; i++) {
        fsdpi_search s = { .wanted = i };
        FSDP_TRY(fsdpi_module_find_param(m, &s, "fsdp_module_apply"));
        enter_unit(a, s.found->unit);
        if (a->st == FSDP_OK) note(a, s.found->unit != NULL ? apply_in_unit(a, s.found, s.name) : apply_loose(a, s.found, s.name));
    }
    return FSDP_OK;
}

/* ---- all ---- */

/* What every rank is told alike, before anything is done. */
static fsdp_status check_param(fsdpi_parameter *p, const char *name, void *arg)
{
    application *a = arg;
    (void)name;
    a->params++;
    if (p->unit == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_life_allows(p->unit, FSDPI_EV_FILL, NULL));
    a->room++;
    for (int i = 0; i < a->comms; i++)
        if (a->comm[i] == p->unit->rt->comm) return FSDP_OK;
    FSDP_FAIL_IF(a->comms == MOST_COMMS, FSDP_ERR_UNSUPPORTED, "fsdp_module_apply: units on more than %d communicators: apply it to parts of the module", MOST_COMMS);
    a->comm[a->comms++] = p->unit->rt->comm;
    return FSDP_OK;
}

/* From here on the program's function may not use them. */
static fsdp_status begin_calls(application *a)
{
    fsdp_comm *begun;
    for (; a->calls < a->comms; a->calls++) FSDP_TRY(fsdpi_call_begin(&begun, a->comm[a->calls], "fsdp_module_apply"));
    return FSDP_OK;
}

static fsdp_status stage_unit(fsdpi_parameter *p, const char *name, void *arg)
{
    application *a = arg;
    (void)name;
    if (p->unit == NULL || a->st != FSDP_OK || staged_of(a, p->unit) != NULL) return FSDP_OK;
    fsdp_status st = fsdpi_staged_begin(&a->staged[a->count], p->unit);
    a->count += st == FSDP_OK;
    note(a, st);
    return FSDP_OK;
}

static fsdp_status agree(application *a)
{
    fsdp_status st = a->st;
    if (st != FSDP_OK) fsdpi_error_restore(&a->error);
    for (int i = 0; i < a->comms; i++) st = fsdp_comm_agree(a->comm[i], st);
    return st;
}

static fsdp_status commit(application *a)
{
    for (int i = 0; i < a->count; i++) FSDP_TRY(fsdpi_staged_commit(&a->staged[i]));
    for (loose *l = a->loose; l != NULL; l = l->next) {
        fsdpi_free(l->p->host);
        l->p->host = l->host;
        l->host = NULL;
    }
    return FSDP_OK;
}

static void finish(application *a)
{
    while (a->calls > 0) fsdpi_call_end(&a->comm[--a->calls]);
    for (int i = 0; i < a->count; i++) fsdpi_staged_drop(&a->staged[i]);
    for (loose *l = a->loose, *next; l != NULL; l = next) {
        next = l->next;
        fsdpi_free(l->host);
        fsdpi_free(l);
    }
    fsdpi_free(a->staged);
}

fsdp_status fsdp_module_apply(fsdp_module *m, fsdp_apply_fn fn, void *arg)
{
    application a = { .fn = fn, .arg = arg };
    FSDP_FAIL_IF(fn == NULL, FSDP_ERR_INVALID, "fsdp_module_apply: no function");
    FSDP_TRY(fsdpi_module_each_param(m, check_param, &a));
    fsdp_status st = begin_calls(&a);
    if (st != FSDP_OK) {
        finish(&a);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    a.staged = fsdpi_calloc((size_t)a.room, sizeof(*a.staged));
    if (a.staged == NULL) note(&a, fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for %d parameters", a.room));
    st = fsdpi_module_each_param(m, stage_unit, &a);
    if (st == FSDP_OK) st = apply_all(&a, m);
    enter_unit(&a, NULL);
    note(&a, st);
    st = agree(&a);
    if (st == FSDP_OK) st = commit(&a);
    finish(&a);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

/* ---- what has values ---- */

typedef struct unset {
    int count;
    char names[200];
} unset;

static fsdp_status list_unset(fsdpi_parameter *p, const char *name, void *arg)
{
    unset *u = arg;
    bool set = p->unit != NULL ? p->unit->set[p->index] : p->host != NULL;
    size_t n = strlen(u->names);
    if (set) return FSDP_OK;
    if (u->count++ < 3) snprintf(u->names + n, sizeof(u->names) - n, "%s\"%.60s\"", n > 0 ? ", " : "", name);
    return FSDP_OK;
}

fsdp_status fsdp_module_check_set(fsdp_module *m)
{
    unset u = { 0 };
    FSDP_TRY(fsdpi_module_each_param(m, list_unset, &u));
    FSDP_FAIL_IF(u.count > 0, FSDP_ERR_STATE, "%d parameter%s never had values: %s%s: initialise them (fsdp_module_init_keyed()), or load them, first", u.count,
                 u.count > 1 ? "s" : "", u.names, u.count > 3 ? ", ..." : "");
    return FSDP_OK;
}

fsdp_status fsdp_module_check_replicas(fsdp_module *m)
{
    fsdp_unit_list units;
    FSDP_TRY(fsdpi_module_units(m, &units));
    for (int i = 0; i < units.count; i++) FSDP_TRY(fsdp_unit_check_replicas(units.units[i]));
    return FSDP_OK;
}
