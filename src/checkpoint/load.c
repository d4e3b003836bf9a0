/* SPDX-License-Identifier: MIT
 *
 * Loading: first everything is checked, on all ranks, then it is set. Each rank reads what it keeps, whoever wrote it. */
#include "checkpoint/registry.h"

#include "base/alloc.h"
#include "base/error.h"
#include "comm/comm.h"
#include "shard/life.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct complaint {
    char text[1024];
    size_t used;
    int count;
} complaint;

static void complain(complaint *c, const char *fmt, ...) FSDP_PRINTF(2, 3);
static void complain(complaint *c, const char *fmt, ...)
{
    if (c->count++ >= 10 || c->used + 1 >= sizeof(c->text)) return;
    va_list ap;
    va_start(ap, fmt);
    if (c->used > 0) c->used += (size_t)snprintf(c->text + c->used, sizeof(c->text) - c->used, "; ");
    if (c->used < sizeof(c->text)) c->used += (size_t)vsnprintf(c->text + c->used, sizeof(c->text) - c->used, fmt, ap);
    va_end(ap);
    if (c->used >= sizeof(c->text)) c->used = sizeof(c->text) - 1;
}

static bool same_shape(const fsdp_param *p, const fsdp_checkpoint_entry *e)
{
    if (p->ndim != e->ndim) return false;
    for (int d = 0; d < p->ndim; d++)
        if (p->shape[d] != e->shape[d]) return false;
    return true;
}

static void shape_text(char *to, size_t size, int ndim, const int64_t *shape)
{
    size_t n = (size_t)snprintf(to, size, "[");
    for (int d = 0; d < ndim && n < size; d++) n += (size_t)snprintf(to + n, size - n, "%s%lld", d > 0 ? ", " : "", (long long)shape[d]);
    if (n < size) snprintf(to + n, size - n, "]");
}

static void complain_shape(complaint *c, const fsdpi_entry *e, const fsdp_checkpoint_entry *there)
{
    const fsdp_param *here = fsdp_unit_param_info(e->unit, e->index);
    char a[128], b[128];
    shape_text(a, sizeof(a), there->ndim, there->shape);
    shape_text(b, sizeof(b), here->ndim, here->shape);
    complain(c, "\"%s\" is %s there, and %s here", e->name, a, b);
}

static void check_entry(const fsdpi_entry *e, const fsdp_checkpoint_reader *r, complaint *c)
{
    int64_t i;
    double x;
    const fsdp_checkpoint_entry *there;
    switch (e->kind) {
    case FSDPI_ENTRY_PARAM:
    case FSDPI_ENTRY_STATE:
        there = fsdp_checkpoint_reader_find(r, e->name);
        if (there == NULL) complain(c, "\"%s\" is not in it", e->name);
        else if (!same_shape(fsdp_unit_param_info(e->unit, e->index), there)) complain_shape(c, e, there);
        break;
    case FSDPI_ENTRY_I64:
    case FSDPI_ENTRY_STEPS:
        if (fsdp_checkpoint_reader_i64(r, e->name, &i) != FSDP_OK) complain(c, "the number \"%s\" is not in it", e->name);
        break;
    case FSDPI_ENTRY_F64:
        if (fsdp_checkpoint_reader_f64(r, e->name, &x) != FSDP_OK) complain(c, "the number \"%s\" is not in it", e->name);
        break;
    case FSDPI_ENTRY_TEXT: break;
    }
}

/* A unit is filled as a whole, and if one may not be filled now, none is. */
static fsdp_status check_units(const fsdp_checkpoint *c)
{
    for (int i = 0; i < c->count; i++) {
        if (c->entry[i].kind != FSDPI_ENTRY_PARAM) continue;
        fsdp_unit *u = c->entry[i].unit;
        FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_FILL, NULL));
        for (int k = 0; k < fsdp_unit_param_count(u); k++) {
            bool found = false;
            for (int j = 0; j < c->count && !found; j++) found = c->entry[j].kind == FSDPI_ENTRY_PARAM && c->entry[j].unit == u && c->entry[j].index == k;
            FSDP_FAIL_IF(!found, FSDP_ERR_INVALID, "fsdp_checkpoint_load: parameter \"%s\" of unit \"%s\" is not registered, but others of the unit are: register all",
                         fsdp_unit_param_info(u, k)->name, fsdp_unit_name(u));
        }
    }
    return FSDP_OK;
}

/* Ranks share the work of reading all files once. */
static fsdp_status check_all(const fsdp_checkpoint *c, fsdp_checkpoint_reader *r, const char *path)
{
    complaint bad = { .used = 0 };
    FSDP_TRY(check_units(c));
    for (int i = 0; i < c->count; i++) check_entry(&c->entry[i], r, &bad);
    FSDP_FAIL_IF(bad.count > 0, FSDP_ERR_FORMAT, "checkpoint %s does not fit: %s%s", path, bad.text, bad.count > 10 ? "; and more" : "");
    for (int i = fsdp_comm_rank(c->comm); i < fsdp_checkpoint_reader_files(r); i += fsdp_comm_size(c->comm)) FSDP_TRY(fsdp_checkpoint_reader_verify(r, i));
    return FSDP_OK;
}

/* ---- parameters, unit by unit ---- */

typedef struct loading {
    fsdp_checkpoint_reader *reader;
    const fsdp_checkpoint *c;
    const char **name; /* that each parameter of the unit is registered as */
    fsdp_unit *unit;
} loading;

static fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    const loading *l = arg;
    (void)name;
    return fsdp_checkpoint_reader_read(l->reader, l->name[param], first, numel, out);
}

static fsdp_status load_unit(loading *l)
{
    for (int i = 0; i < l->c->count; i++) {
        const fsdpi_entry *e = &l->c->entry[i];
        if (e->kind == FSDPI_ENTRY_PARAM && e->unit == l->unit) l->name[e->index] = e->name;
    }
    return fsdp_unit_fill(l->unit, fill, l);
}

/* names: room for those of any unit. Nothing here may fail on one rank alone: a fill is collective. */
static fsdp_status load_params(const fsdp_checkpoint *c, fsdp_checkpoint_reader *r, const char **names)
{
    for (int i = 0; i < c->count; i++) {
        bool first = c->entry[i].kind == FSDPI_ENTRY_PARAM;
        for (int j = 0; j < i && first; j++) first = c->entry[j].kind != FSDPI_ENTRY_PARAM || c->entry[j].unit != c->entry[i].unit;
        if (first) FSDP_TRY(load_unit(&(loading){ .reader = r, .c = c, .unit = c->entry[i].unit, .name = names }));
    }
    return FSDP_OK;
}

static fsdp_status make_names(const fsdp_checkpoint *c, const char ***out)
{
    int most = 0;
    for (int i = 0; i < c->count; i++)
        if (c->entry[i].kind == FSDPI_ENTRY_PARAM && fsdp_unit_param_count(c->entry[i].unit) > most) most = fsdp_unit_param_count(c->entry[i].unit);
    FSDPI_NEW(*out, most);
    return FSDP_OK;
}

/* ---- state and numbers ---- */

static fsdp_status load_state(const fsdpi_entry *e, fsdp_checkpoint_reader *r)
{
    enum { CHUNK = 1 << 20 };
    int64_t first, numel;
    float *at, *host;
    fsdpi_entry_kept(e, &first, &numel, &at);
    if (numel == 0) return FSDP_OK;
    FSDPI_NEW(host, numel < CHUNK ? numel : CHUNK);
    fsdp_stream *s = fsdp_unit_storage_stream(e->unit);
    fsdp_status st = FSDP_OK;
    for (int64_t done = 0; done < numel && st == FSDP_OK; done += CHUNK) {
        int64_t n = numel - done < CHUNK ? numel - done : CHUNK;
        st = fsdp_checkpoint_reader_read(r, e->name, first + done, n, host);
        if (st == FSDP_OK) st = fsdp_stream_copy(s, at + done, host, (size_t)n * sizeof(float));
        if (st == FSDP_OK) st = fsdp_stream_sync(s);
    }
    fsdpi_free(host);
    return st;
}

static fsdp_status load_rest(const fsdp_checkpoint *c, fsdp_checkpoint_reader *r)
{
    for (int i = 0; i < c->count; i++) {
        const fsdpi_entry *e = &c->entry[i];
        int64_t steps;
        switch (e->kind) {
        case FSDPI_ENTRY_STATE: FSDP_TRY(load_state(e, r)); break;
        case FSDPI_ENTRY_I64: FSDP_TRY(fsdp_checkpoint_reader_i64(r, e->name, e->value)); break;
        case FSDPI_ENTRY_F64: FSDP_TRY(fsdp_checkpoint_reader_f64(r, e->name, e->value)); break;
        case FSDPI_ENTRY_STEPS:
            FSDP_TRY(fsdp_checkpoint_reader_i64(r, e->name, &steps));
            fsdp_optim_set_param_steps(e->optim, e->unit, e->index, steps);
            break;
        default: break;
        }
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *c, const char *path)
{
    fsdp_checkpoint_reader *r = NULL;
    const char **names = NULL;
    FSDP_TRY(fsdpi_comm_tag(c->comm, FSDPI_OP_LOAD, NULL, 0));
    fsdp_status st = fsdp_checkpoint_reader_open(&r, path);
    if (st == FSDP_OK) st = check_all(c, r, path);
    if (st == FSDP_OK) st = make_names(c, &names);
    st = fsdp_comm_agree(c->comm, st);
    if (st == FSDP_OK) st = load_params(c, r, names);
    if (st == FSDP_OK) st = fsdp_comm_agree(c->comm, load_rest(c, r));
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    fsdp_checkpoint_reader_close(r);
    fsdpi_free(names);
    fsdpi_error_restore(&kept);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}
