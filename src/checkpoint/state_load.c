/* SPDX-License-Identifier: MIT
 *
 * Loading a state dictionary: all ranks learn what there is and where, decide alike whether it fits, take all memory, and only then
 * does anything change. A rank takes its own copy of an element first; where every rank has all that it keeps, nothing is told. */
#include "base/alloc.h"
#include "base/convert.h"
#include "base/error.h"
#include "checkpoint/misfits.h"
#include "checkpoint/put.h"
#include "checkpoint/state_meet.h"
#include "format/shown.h"

#include <string.h>

typedef struct loading {
    const fsdp_checkpoint *c;
    fsdp_load_opts o;
    const fsdp_state *s;
    fsdp_state *made;  /* of another rank's outline */
    const char **name; /* [entries] in the dictionary; NULL: not loaded. Only of tensors */
    bool *chosen;
    fsdpi_misfits misfits;
    int loaded;
    fsdpi_sources sources;
    bool apart; /* every rank has what it keeps */
    fsdpi_put *put;
    char *staging; /* this rank's part of a unit, or of one tensor */
} loading;

/* ---- what fits: the same on every rank ---- */

static const fsdp_state_tensor *find_there(const loading *l, int i)
{
    const fsdp_state_tensor *t = fsdp_state_find(l->s, l->c->entry[i].name);
    for (int k = 0; k < l->c->count && t == NULL; k++)
        if (l->c->entry[k].kind == FSDPI_ENTRY_ALIAS && l->c->entry[k].of == i) t = fsdp_state_find(l->s, l->c->entry[k].name);
    return t;
}

static bool has_value(const loading *l, fsdpi_entry_kind kind, const char *name)
{
    int64_t i;
    double x;
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    bool has = kind == FSDPI_ENTRY_F64 ? fsdp_state_f64(l->s, name, &x) == FSDP_OK : fsdp_state_i64(l->s, name, &i) == FSDP_OK;
    fsdpi_error_restore(&kept);
    return has;
}

/* A number's name in the dictionary; NULL: it is not there. */
static const char *find_value_there(const loading *l, int i)
{
    const fsdpi_entry *e = &l->c->entry[i];
    if (has_value(l, e->kind, e->name)) return e->name;
    for (const fsdpi_entry *a = l->c->entry; a < l->c->entry + l->c->count; a++)
        if (a->kind == FSDPI_ENTRY_ALIAS && a->of == i && has_value(l, e->kind, a->name)) return a->name;
    return NULL;
}

static void choose(loading *l, int i)
{
    const fsdpi_entry *e = &l->c->entry[i];
    if (e->kind == FSDPI_ENTRY_TEXT || e->kind == FSDPI_ENTRY_ALIAS || (fsdpi_entry_what(l->c, e) & l->o.which) == 0) return;
    if (fsdpi_entry_is_tensor(e)) {
        const fsdp_state_tensor *t = find_there(l, i);
        if (t == NULL) fsdpi_misfits_add(&l->misfits, FSDPI_MISSING, "\"%s\"", fsdpi_show(e->name).s);
        else l->chosen[i] = fsdpi_tensor_fits(&l->misfits, e, t->dtype, t->ndim, t->shape, l->o.cast);
        if (l->chosen[i]) l->name[i] = t->name;
    } else {
        l->chosen[i] = find_value_there(l, i) != NULL;
        if (!l->chosen[i]) fsdpi_misfits_add(&l->misfits, FSDPI_MISSING, "\"%s\"", fsdpi_show(e->name).s);
    }
    l->loaded += l->chosen[i];
}

static void find_unexpected(loading *l)
{
    unsigned kinds = fsdpi_registered(l->c) & l->o.which;
    for (int i = 0; i < l->s->count; i++) {
        const fsdp_state_tensor *t = &l->s->tensor[i];
        if ((t->what & kinds) == 0 || fsdp_state_find(l->s, t->name) != t) continue; /* a piece of one that was seen */
        bool known = fsdpi_entry_find(l->c, t->name) != NULL;
        for (int k = 0; k < l->c->count && !known; k++) known = l->name[k] != NULL && strcmp(l->name[k], t->name) == 0;
        if (!known) fsdpi_misfits_add(&l->misfits, FSDPI_UNEXPECTED, "\"%s\"", fsdpi_show(t->name).s);
    }
}

static fsdp_status decide(loading *l)
{
    char text[1024];
    if (!l->o.partial) FSDP_TRY(fsdpi_units_complete(l->c, "fsdp_state_load"));
    FSDPI_NEW(l->name, l->c->count);
    FSDPI_NEW(l->chosen, l->c->count);
    for (int i = 0; i < l->c->count; i++) choose(l, i);
    find_unexpected(l);
    FSDP_FAIL_IF(fsdpi_misfits_total(&l->misfits) > 0 && !l->o.partial, FSDP_ERR_FORMAT, "the state dictionary does not fit: %s",
                 fsdpi_misfits_text(&l->misfits, text, sizeof(text)));
    return FSDP_OK;
}

/* ---- this rank's own pieces ---- */

/* Both names of what is one tensor here have elements of their own: fine where they are the same. */
static fsdp_status check_ties(const loading *l)
{
    for (int i = 0; i < l->c->count; i++) {
        const fsdpi_entry *e = &l->c->entry[i];
        const char *of = e->kind == FSDPI_ENTRY_ALIAS ? l->name[e->of] : NULL;
        for (int k = 0; of != NULL && k < l->s->count; k++) {
            const fsdp_state_tensor *a = &l->s->tensor[k];
            for (int j = 0; j < l->s->count && strcmp(a->name, e->name) == 0 && strcmp(a->name, of) != 0; j++) {
                const fsdp_state_tensor *b = &l->s->tensor[j];
                if (strcmp(b->name, of) != 0 || a->first != b->first || a->count != b->count || a->dtype != b->dtype || a->count == 0) continue;
                FSDP_FAIL_IF(memcmp(a->data, b->data, (size_t)a->count * fsdp_dtype_bytes(a->dtype)) != 0, FSDP_ERR_FORMAT,
                             "the state dictionary has \"%s\" and \"%s\" with different values, but here they are one tensor: remove one", fsdpi_show(of).s,
                             fsdpi_show(e->name).s);
            }
        }
    }
    return FSDP_OK;
}

/* The piece of a name that has element `first`; NULL: it is not here. */
static const fsdp_state_tensor *piece_at(const fsdp_state *s, const char *name, int64_t first)
{
    for (int k = 0; k < s->count; k++)
        if (first >= s->tensor[k].first && first < s->tensor[k].first + s->tensor[k].count && strcmp(s->tensor[k].name, name) == 0) return &s->tensor[k];
    return NULL;
}

static bool has_what_it_keeps(const loading *l, int i)
{
    fsdpi_range_of kept = fsdpi_entry_kept(&l->c->entry[i]);
    for (int64_t at = kept.first; at < kept.first + kept.numel;) {
        const fsdp_state_tensor *t = piece_at(l->s, l->name[i], at);
        if (t == NULL) return false;
        at = t->first + t->count;
    }
    return true;
}

/* A LOCAL dictionary holds what was kept where it was read: it is of no use where other slices are kept. */
static fsdp_status check_local(const loading *l)
{
    for (int i = 0; i < l->c->count && l->s->kind == FSDP_STATE_LOCAL; i++) {
        if (l->name[i] == NULL) continue;
        fsdpi_range_of kept = fsdpi_entry_kept(&l->c->entry[i]);
        const fsdp_state_tensor *t = kept.numel > 0 ? piece_at(l->s, l->name[i], kept.first) : NULL, *any = fsdp_state_find(l->s, l->name[i]);
        bool same = kept.numel > 0 ? t != NULL && t->first == kept.first && t->count == kept.numel : any->count == 0;
        FSDP_FAIL_IF(!same, FSDP_ERR_INVALID,
                     "fsdp_state_load: a local dictionary is of the ranks, units and modes that it was read from: of \"%s\" this rank keeps %lld elements from number %lld, and has "
                     "%lld from %lld. Read a sharded or full one to change any of them",
                     fsdpi_show(l->name[i]).s, (long long)kept.numel, (long long)kept.first, (long long)any->count, (long long)any->first);
    }
    return FSDP_OK;
}

static void to_f32(fsdp_dtype from, const char *in, size_t numel, float *out)
{
    if (from != FSDP_F64) {
        fsdpi_convert_to_f32(fsdpi_isa_get(), from, out, in, numel);
        return;
    }
    for (size_t i = 0; i < numel; i++) {
        double x;
        memcpy(&x, in + 8 * i, 8);
        out[i] = (float)x;
    }
}

/* Elements that are in this rank's pieces, in the entry's type. */
static fsdp_status copy_own(const loading *l, int i, int64_t first, int64_t numel, char *out)
{
    const fsdpi_entry *e = &l->c->entry[i];
    size_t size = fsdp_dtype_bytes(e->dtype);
    for (int64_t at = first; at < first + numel;) {
        const fsdp_state_tensor *t = piece_at(l->s, l->name[i], at);
        FSDP_FAIL_IF(t == NULL, FSDP_ERR_INTERNAL, "element %lld of \"%s\" is not here", (long long)at, l->name[i]);
        int64_t n = t->first + t->count < first + numel ? t->first + t->count - at : first + numel - at;
        const char *from = (const char *)t->data + (size_t)(at - t->first) * fsdp_dtype_bytes(t->dtype);
        char *to = out + (size_t)(at - first) * size;
        if (t->dtype == e->dtype) memcpy(to, from, (size_t)n * size);
        else to_f32(t->dtype, from, (size_t)n, (float *)(void *)to);
        at += n;
    }
    return FSDP_OK;
}

/* ---- moving and setting ---- */

typedef struct giving {
    const loading *l;
    int entry;
} giving;

static fsdp_status have(void *arg, int64_t first, int64_t numel, void *out)
{
    const giving *g = arg;
    return copy_own(g->l, g->entry, first, numel, out);
}

/* Collective: what this rank keeps of entry i, into staging at this byte. */
static fsdp_status stage(loading *l, int i, size_t at)
{
    const fsdpi_entry *e = &l->c->entry[i];
    fsdpi_range_of kept = fsdpi_entry_kept(e);
    if (l->apart) return copy_own(l, i, kept.first, kept.numel, l->staging + at);
    giving g = { l, i };
    return fsdpi_move_run(&(fsdpi_move){ .comm = l->c->comm, .op = FSDPI_OP_LOAD, .name = e->name, .size = fsdp_dtype_bytes(e->dtype),
                                         .cover = l->sources.cover + l->sources.at[i], .covers = l->sources.at[i + 1] - l->sources.at[i], .have = have, .arg = &g,
                                         .first = kept.first, .numel = kept.numel, .out = l->staging + at });
}

/* Where a parameter's part begins in the staging of its unit: as in an array that goes along with the slices. */
static size_t place_in_unit(const fsdpi_entry *e)
{
    const fsdp_slice *slice;
    int n;
    fsdp_unit_slices(e->unit, &slice, &n);
    for (int i = 0; i < n; i++)
        if (slice[i].param == e->index) return (size_t)slice[i].state_offset * sizeof(float);
    return 0;
}

static fsdp_status from_staging(const fsdpi_entry *e, int64_t first, int64_t numel, void *out, void *arg)
{
    const loading *l = arg;
    size_t size = fsdp_dtype_bytes(e->dtype), base = e->kind == FSDPI_ENTRY_PARAM ? place_in_unit(e) : 0;
    memcpy(out, l->staging + base + (size_t)(first - fsdpi_entry_kept(e).first) * size, (size_t)numel * size);
    return FSDP_OK;
}

static fsdp_status load_unit(loading *l, int first)
{
    const fsdp_unit *u = l->c->entry[first].unit;
    for (int i = first; i < l->c->count; i++) {
        const fsdpi_entry *e = &l->c->entry[i];
        if (l->chosen[i] && e->kind == FSDPI_ENTRY_PARAM && e->unit == u) FSDP_TRY(stage(l, i, place_in_unit(e)));
    }
    return fsdpi_put_unit(l->put, first, from_staging, l);
}

/* What has no unit to be filled; a device that fails on one rank is noted, and the others are gone on with. */
static fsdp_status load_rest(loading *l)
{
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < l->c->count; i++) {
        const fsdpi_entry *e = &l->c->entry[i];
        int64_t steps;
        if (!l->chosen[i]) continue;
        switch (e->kind) {
        case FSDPI_ENTRY_STATE:
        case FSDPI_ENTRY_BUFFER:
            FSDP_TRY(stage(l, i, 0));
            if (st == FSDP_OK) st = fsdpi_put_tensor(l->put, e, from_staging, l);
            break;
        case FSDPI_ENTRY_I64: FSDP_TRY(fsdp_state_i64(l->s, e->name, e->value)); break;
        case FSDPI_ENTRY_F64: FSDP_TRY(fsdp_state_f64(l->s, e->name, e->value)); break;
        case FSDPI_ENTRY_STEPS:
            FSDP_TRY(fsdp_state_i64(l->s, find_value_there(l, i), &steps));
            fsdp_optim_set_param_steps(e->optim, e->unit, e->index, steps);
            break;
        default: break;
        }
    }
    return st;
}

static fsdp_status take_memory(loading *l)
{
    size_t most = 0;
    for (int i = 0; i < l->c->count; i++) {
        const fsdpi_entry *e = &l->c->entry[i];
        if (!l->chosen[i] || !fsdpi_entry_is_tensor(e)) continue;
        size_t bytes = e->kind == FSDPI_ENTRY_BUFFER ? (size_t)e->numel * fsdp_dtype_bytes(e->dtype) : (size_t)fsdp_unit_slice_numel(e->unit) * sizeof(float);
        most = bytes > most ? bytes : most;
        if (fsdpi_entry_is_unmade(e) && !l->sources.zero[i]) FSDP_TRY(fsdpi_entry_make(e));
    }
    l->staging = fsdpi_calloc(most, 1);
    FSDP_FAIL_IF(l->staging == NULL, FSDP_ERR_NOMEM, "no memory to load %zu bytes", most);
    return fsdpi_put_make(&l->put, l->c, l->chosen);
}

/* Collective. Whether ranks can load without telling each other anything. */
static fsdp_status find_apart(loading *l)
{
    bool mine = true;
    for (int i = 0; i < l->c->count && mine; i++) mine = l->name[i] == NULL || has_what_it_keeps(l, i);
    FSDP_TRY(fsdpi_comm_tell(l->c->comm, FSDPI_OP_LOAD, NULL, &mine, sizeof(mine)));
    l->apart = true;
    for (int r = 0; r < l->c->comm->size; r++) l->apart &= *(const bool *)fsdpi_comm_told(l->c->comm, r);
    return FSDP_OK;
}

static fsdp_status check(loading *l, const fsdp_state *given)
{
    fsdp_comm *comm = l->c->comm;
    FSDP_TRY(fsdpi_registry_same(l->c, "fsdp_state_load"));
    FSDP_TRY(fsdpi_state_meet(l->c, given, &l->made));
    l->s = given != NULL ? given : l->made;
    FSDP_TRY(fsdp_comm_agree(comm, decide(l)));
    fsdp_status st = check_ties(l);
    FSDP_TRY(fsdp_comm_agree(comm, st == FSDP_OK ? check_local(l) : st));
    FSDP_TRY(fsdpi_sources_find(&l->sources, l->c, l->s, l->name));
    FSDP_TRY(find_apart(l));
    return fsdp_comm_agree(comm, take_memory(l));
}

fsdp_status fsdp_state_load(fsdp_checkpoint *c, const fsdp_state *s, const fsdp_load_opts *opts)
{
    loading l = { .c = c };
    FSDP_TRY(fsdpi_load_opts_check(&l.o, opts, "fsdp_state_load"));
    FSDP_TRY(fsdpi_registry_allows(c, FSDPI_EV_STATE_LOAD));
    fsdp_status st = check(&l, s);
    for (int i = 0; st == FSDP_OK && i < c->count; i++)
        if (fsdpi_put_begins_unit(l.put, i)) st = load_unit(&l, i);
    if (st == FSDP_OK) st = fsdp_comm_agree(c->comm, load_rest(&l));
    if (st == FSDP_OK) fsdpi_misfits_report(&l.misfits, l.loaded, l.o.report);
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    fsdpi_sources_free(&l.sources);
    fsdpi_put_free(l.put);
    fsdpi_free(l.staging);
    fsdpi_free(l.name);
    fsdpi_free(l.chosen);
    fsdp_state_destroy(l.made);
    fsdpi_error_restore(&kept);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}
