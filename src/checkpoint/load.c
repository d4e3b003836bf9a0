/* SPDX-License-Identifier: MIT
 *
 * Loading from a folder: first everything is checked, on all ranks, then it is set. Each rank reads what it keeps, whoever wrote
 * it. */
#include "base/alloc.h"
#include "base/error.h"
#include "checkpoint/background.h"
#include "checkpoint/misfits.h"
#include "checkpoint/put.h"
#include "comm/comm.h"
#include "format/shown.h"

#include <stdio.h>
#include <string.h>

typedef struct loading {
    const fsdp_checkpoint *c;
    fsdp_load_opts o;
    fsdp_checkpoint_reader *reader;
    const char *path;
    const char **name; /* [entries] that the checkpoint has it under; NULL: it is not loaded */
    bool *chosen;      /* [entries] */
    fsdpi_misfits misfits;
    fsdpi_put *put;
    int loaded;
} loading;

/* ---- what fits ---- */

/* Entry i's name in the checkpoint: its own, or another that it has here. */
static const fsdp_checkpoint_entry *find_there(const loading *l, int i)
{
    const fsdp_checkpoint_entry *there = fsdp_checkpoint_reader_find(l->reader, l->c->entry[i].name);
    for (int k = 0; k < l->c->count && there == NULL; k++)
        if (l->c->entry[k].kind == FSDPI_ENTRY_ALIAS && l->c->entry[k].of == i) there = fsdp_checkpoint_reader_find(l->reader, l->c->entry[k].name);
    return there;
}

static bool has_value(const fsdp_checkpoint_reader *r, fsdpi_entry_kind kind, const char *name)
{
    int64_t i;
    double x;
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    bool has = kind == FSDPI_ENTRY_F64 ? fsdp_checkpoint_reader_f64(r, name, &x) == FSDP_OK : fsdp_checkpoint_reader_i64(r, name, &i) == FSDP_OK;
    fsdpi_error_restore(&kept);
    return has;
}

/* The same of a number; NULL: it is not there. */
static const char *find_value_there(const loading *l, int i)
{
    const fsdpi_entry *e = &l->c->entry[i];
    if (has_value(l->reader, e->kind, e->name)) return e->name;
    for (const fsdpi_entry *a = l->c->entry; a < l->c->entry + l->c->count; a++)
        if (a->kind == FSDPI_ENTRY_ALIAS && a->of == i && has_value(l->reader, e->kind, a->name)) return a->name;
    return NULL;
}

static void choose(loading *l, int i)
{
    const fsdpi_entry *e = &l->c->entry[i];
    if (e->kind == FSDPI_ENTRY_TEXT || e->kind == FSDPI_ENTRY_ALIAS || (fsdpi_entry_what(l->c, e) & l->o.which) == 0) return;
    if (fsdpi_entry_is_tensor(e)) {
        const fsdp_checkpoint_entry *there = find_there(l, i);
        if (there == NULL) fsdpi_misfits_add(&l->misfits, FSDPI_MISSING, "\"%s\"", fsdpi_show(e->name).s);
        else l->chosen[i] = fsdpi_tensor_fits(&l->misfits, e, there->dtype, there->ndim, there->shape, l->o.cast);
        if (l->chosen[i]) l->name[i] = there->name;
    } else {
        l->name[i] = find_value_there(l, i);
        l->chosen[i] = l->name[i] != NULL;
        if (!l->chosen[i]) fsdpi_misfits_add(&l->misfits, FSDPI_MISSING, "\"%s\"", fsdpi_show(e->name).s);
    }
    l->loaded += l->chosen[i];
}

/* Tensors that nobody wants, of kinds of which something is wanted. */
static void find_unexpected(loading *l)
{
    unsigned kinds = fsdpi_registered(l->c) & l->o.which;
    for (int i = 0; i < fsdp_checkpoint_reader_count(l->reader); i++) {
        const fsdp_checkpoint_entry *there = fsdp_checkpoint_reader_at(l->reader, i);
        if ((there->what & kinds) == 0) continue;
        bool known = fsdpi_entry_find(l->c, there->name) != NULL;
        for (int k = 0; k < l->c->count && !known; k++) known = l->name[k] != NULL && strcmp(l->name[k], there->name) == 0;
        if (!known) fsdpi_misfits_add(&l->misfits, FSDPI_UNEXPECTED, "\"%s\"", fsdpi_show(there->name).s);
    }
}

/* A second name that has a tensor of its own there: whoever wrote it did not tie the two. Fine where they are the same. */
static fsdp_status check_ties(loading *l)
{
    enum { PIECE = 4096 };
    float a[PIECE], b[PIECE];
    for (int k = 0; k < l->c->count; k++) {
        const fsdpi_entry *e = &l->c->entry[k], *of = &l->c->entry[e->kind == FSDPI_ENTRY_ALIAS ? e->of : k];
        const fsdp_checkpoint_entry *x = fsdp_checkpoint_reader_find(l->reader, of->name), *y = fsdp_checkpoint_reader_find(l->reader, e->name);
        if (e->kind != FSDPI_ENTRY_ALIAS || x == NULL || y == NULL || x == y || !l->chosen[e->of] || of->kind == FSDPI_ENTRY_BUFFER) continue;
        bool same = x->numel == y->numel;
        for (int64_t at = 0; at < x->numel && same; at += PIECE) {
            int64_t n = x->numel - at < PIECE ? x->numel - at : PIECE;
            FSDP_TRY(fsdp_checkpoint_reader_read(l->reader, x->name, at, n, a));
            FSDP_TRY(fsdp_checkpoint_reader_read(l->reader, y->name, at, n, b));
            same = memcmp(a, b, (size_t)n * sizeof(float)) == 0;
        }
        FSDP_FAIL_IF(!same, FSDP_ERR_FORMAT, "checkpoint %s has \"%s\" and \"%s\" with different values, but here they are one tensor: untie them, or remove one", l->path,
                     x->name, y->name);
    }
    return FSDP_OK;
}

/* Ranks share the work of reading all files once. */
static fsdp_status check_all(loading *l)
{
    char text[1024];
    const fsdp_checkpoint *c = l->c;
    if (!l->o.partial) FSDP_TRY(fsdpi_units_complete(c, "fsdp_checkpoint_load"));
    for (int i = 0; i < c->count; i++) choose(l, i);
    find_unexpected(l);
    FSDP_FAIL_IF(fsdpi_misfits_total(&l->misfits) > 0 && !l->o.partial, FSDP_ERR_FORMAT, "checkpoint %s does not fit: %s", l->path,
                 fsdpi_misfits_text(&l->misfits, text, sizeof(text)));
    for (int i = fsdp_comm_rank(c->comm); i < fsdp_checkpoint_reader_files(l->reader); i += fsdp_comm_size(c->comm)) FSDP_TRY(fsdp_checkpoint_reader_verify(l->reader, i));
    return check_ties(l);
}

static fsdp_status source(const fsdpi_entry *e, int64_t first, int64_t numel, void *out, void *arg)
{
    const loading *l = arg;
    const char *name = l->name[e - l->c->entry];
    return e->kind == FSDPI_ENTRY_BUFFER ? fsdp_checkpoint_reader_read_raw(l->reader, name, first, numel, out)
                                         : fsdp_checkpoint_reader_read(l->reader, name, first, numel, out);
}

/* Before anything is set. */
static fsdp_status prepare(loading *l)
{
    FSDPI_NEW(l->name, l->c->count);
    FSDPI_NEW(l->chosen, l->c->count);
    FSDP_TRY(fsdp_checkpoint_reader_open(&l->reader, l->path));
    FSDP_TRY(check_all(l));
    FSDP_TRY(fsdpi_put_make(&l->put, l->c, l->chosen));
    return fsdpi_put_make_states(l->put, source, l);
}

/* ---- setting ---- */

/* Nothing here may fail on one rank alone: a fill is collective. */
static fsdp_status load_params(loading *l)
{
    for (int i = 0; i < l->c->count; i++)
        if (fsdpi_put_begins_unit(l->put, i)) FSDP_TRY(fsdpi_put_unit(l->put, i, source, l));
    return FSDP_OK;
}

static fsdp_status load_rest(loading *l)
{
    for (int i = 0; i < l->c->count; i++) {
        const fsdpi_entry *e = &l->c->entry[i];
        int64_t steps;
        if (!l->chosen[i]) continue;
        switch (e->kind) {
        case FSDPI_ENTRY_STATE:
        case FSDPI_ENTRY_BUFFER: FSDP_TRY(fsdpi_put_tensor(l->put, e, source, l)); break;
        case FSDPI_ENTRY_I64: FSDP_TRY(fsdp_checkpoint_reader_i64(l->reader, e->name, e->value)); break;
        case FSDPI_ENTRY_F64: FSDP_TRY(fsdp_checkpoint_reader_f64(l->reader, e->name, e->value)); break;
        case FSDPI_ENTRY_STEPS:
            FSDP_TRY(fsdp_checkpoint_reader_i64(l->reader, l->name[i], &steps));
            fsdp_optim_set_param_steps(e->optim, e->unit, e->index, steps);
            break;
        default: break;
        }
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_load_with(fsdp_checkpoint *c, const char *path, const fsdp_load_opts *opts)
{
    loading l = { .c = c, .path = path };
    FSDP_FAIL_IF(path == NULL, FSDP_ERR_INVALID, "fsdp_checkpoint_load: no path");
    FSDP_TRY(fsdpi_load_opts_check(&l.o, opts, "fsdp_checkpoint_load"));
    FSDP_TRY(fsdpi_registry_allows(c, FSDPI_EV_LOAD));
    FSDP_TRY(fsdpi_comm_tag(c->comm, FSDPI_OP_LOAD, NULL, 0));
    fsdpi_background_settle(c->background); /* it may be about to remove what is loaded here */
    fsdp_status st = fsdp_comm_agree(c->comm, prepare(&l));
    if (st == FSDP_OK) st = load_params(&l);
    if (st == FSDP_OK) st = fsdp_comm_agree(c->comm, load_rest(&l));
    if (st == FSDP_OK) fsdpi_misfits_report(&l.misfits, l.loaded, l.o.report);
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    fsdp_checkpoint_reader_close(l.reader);
    fsdpi_put_free(l.put);
    fsdpi_free(l.name);
    fsdpi_free(l.chosen);
    fsdpi_error_restore(&kept);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *c, const char *path)
{
    return fsdp_checkpoint_load_with(c, path, NULL);
}
