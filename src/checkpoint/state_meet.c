/* SPDX-License-Identifier: MIT */
#include "checkpoint/state_meet.h"

#include "base/alloc.h"
#include "base/error.h"
#include "format/shown.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- one outline ---- */

typedef struct card {
    bool has;
    uint64_t hash, bytes;
} card;

static fsdp_status tell_outline(const fsdp_checkpoint *c, int from, char *outline, uint64_t bytes, fsdp_state **out)
{
    char *text = fsdpi_calloc(bytes, 1);
    fsdp_status st = text != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for rank %d's state dictionary", from);
    if (st == FSDP_OK && outline != NULL) memcpy(text, outline, bytes);
    st = fsdp_comm_agree(c->comm, st);
    if (st == FSDP_OK) st = fsdp_comm_broadcast(c->comm, text, bytes, from);
    if (st == FSDP_OK && outline == NULL) st = fsdpi_state_from_outline(out, text);
    fsdpi_free(text);
    return st;
}

fsdp_status fsdpi_state_meet(const fsdp_checkpoint *c, const fsdp_state *given, fsdp_state **out)
{
    fsdp_comm *comm = c->comm;
    char *outline = given != NULL ? fsdpi_state_outline(given) : NULL;
    bool starved = given != NULL && outline == NULL, all = true;
    fsdp_status st = fsdp_comm_agree(
        comm, starved ? fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for the outline of a state dictionary") : FSDP_OK);
    card mine = { .has = given != NULL, .bytes = outline != NULL ? strlen(outline) + 1 : 0 };
    if (outline != NULL) mine.hash = XXH3_64bits(outline, mine.bytes);
    if (st == FSDP_OK) st = fsdpi_comm_tell(comm, FSDPI_OP_LOAD, NULL, &mine, sizeof(mine));
    int from = -1;
    card first = { 0 };
    for (int r = 0; r < comm->size && st == FSDP_OK; r++) {
        card theirs;
        memcpy(&theirs, fsdpi_comm_told(comm, r), sizeof(theirs));
        all &= theirs.has;
        if (theirs.has && from >= 0 && theirs.hash != first.hash)
            st = fsdp_error_raise(FSDP_ERR_INVALID, __func__, __FILE__, __LINE__,
                                  "fsdp_state_load: rank %d's dictionary has other names, shapes, types or numbers than rank %d's: a rank that has none gives NULL",
                                  comm->world_ranks[r], comm->world_ranks[from]);
        if (theirs.has && from < 0) {
            from = r;
            first = theirs;
        }
    }
    if (st == FSDP_OK && from < 0) st = fsdp_error_raise(FSDP_ERR_INVALID, __func__, __FILE__, __LINE__, "fsdp_state_load: no rank has a dictionary");
    if (st == FSDP_OK && !all) st = fsdp_comm_agree(comm, tell_outline(c, from, outline, first.bytes, out));
    free(outline);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

/* ---- where elements are ---- */

/* A piece, as ranks tell of it. */
typedef struct told_piece {
    int entry, rank; /* entry -1: none */
    int64_t first, numel;
    uint64_t hash; /* of a whole tensor's elements; 0: it is not whole */
    bool zero;     /* all of them are; only looked for in an optimizer's state */
} told_piece;

static int by_place(const void *a, const void *b)
{
    const told_piece *x = a, *y = b;
    if (x->entry != y->entry) return x->entry < y->entry ? -1 : 1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    if (x->numel != y->numel) return x->numel > y->numel ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static uint64_t hash_of(const fsdp_state_tensor *t)
{
    if (t->count != t->numel) return 0;
    uint64_t h = XXH3_64bits(t->data, (size_t)t->count * fsdp_dtype_bytes(t->dtype));
    return h != 0 ? h : 1;
}

/* This rank's pieces of what is wanted; list NULL: only how many. */
static int list_pieces(const fsdp_checkpoint *c, const fsdp_state *s, const char *const *name, told_piece *list)
{
    int n = 0;
    for (int i = 0; i < c->count; i++) {
        for (int k = 0; name[i] != NULL && k < s->count; k++) {
            const fsdp_state_tensor *t = &s->tensor[k];
            if (t->count == 0 || strcmp(t->name, name[i]) != 0) continue;
            bool zero = list != NULL && c->entry[i].optim != NULL && fsdpi_is_zero(t->data, (size_t)t->count * fsdp_dtype_bytes(t->dtype));
            if (list != NULL) list[n] = (told_piece){ i, c->comm->rank, t->first, t->count, hash_of(t), zero };
            n++;
        }
    }
    return n;
}

/* all: sorted. Walks over them once; each element is taken from the piece that begins first, of the lowest rank. */
static fsdp_status cover_all(fsdpi_sources *out, const fsdp_checkpoint *c, const char *const *name, const told_piece *all, int count, bool local)
{
    int n = 0, k = 0;
    for (int i = 0; i < c->count; i++) {
        int64_t at = 0, numel = name[i] != NULL ? c->entry[i].numel : 0;
        const told_piece *whole = NULL;
        out->at[i] = n;
        out->zero[i] = true;
        for (; k < count && all[k].entry == i; k++) {
            const told_piece *p = &all[k];
            out->zero[i] &= p->zero;
            /* What each rank keeps for itself may differ in a local dictionary, from which each takes its own. */
            if (p->hash != 0 && whole != NULL && !(local && fsdpi_entry_is_each_ranks(c, &c->entry[i])))
                FSDP_FAIL_IF(p->hash != whole->hash, FSDP_ERR_INVALID, "fsdp_state_load: ranks %d and %d have different values of \"%s\": which of them counts?",
                             c->comm->world_ranks[whole->rank], c->comm->world_ranks[p->rank], fsdpi_show(name[i]).s);
            if (p->hash != 0 && whole == NULL) whole = p;
            if (p->first > at || p->first + p->numel <= at) continue;
            out->cover[n++] = (fsdpi_cover){ p->rank, at, p->first + p->numel - at };
            at = p->first + p->numel;
        }
        FSDP_FAIL_IF(at < numel, FSDP_ERR_INVALID, "fsdp_state_load: element %lld of \"%s\", which has %lld, is in no rank's dictionary", (long long)at,
                     fsdpi_show(name[i]).s, (long long)numel);
    }
    out->at[c->count] = n;
    return FSDP_OK;
}

fsdp_status fsdpi_sources_find(fsdpi_sources *out, const fsdp_checkpoint *c, const fsdp_state *s, const char *const *name)
{
    fsdp_comm *comm = c->comm;
    int64_t mine = list_pieces(c, s, name, NULL), most = 0;
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_LOAD, NULL, &mine, sizeof(mine)));
    for (int r = 0; r < comm->size; r++) {
        int64_t theirs = *(const int64_t *)fsdpi_comm_told(comm, r);
        most = theirs > most ? theirs : most;
    }
    size_t count = (size_t)most * (size_t)comm->size;
    told_piece *list = fsdpi_calloc((size_t)most, sizeof(*list)), *all = fsdpi_calloc(count, sizeof(*all));
    out->cover = fsdpi_calloc(count, sizeof(*out->cover));
    out->at = fsdpi_calloc((size_t)c->count + 1, sizeof(*out->at));
    out->zero = fsdpi_calloc((size_t)c->count, sizeof(*out->zero));
    fsdp_status st = list != NULL && all != NULL && out->cover != NULL && out->at != NULL && out->zero != NULL
                         ? FSDP_OK
                         : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to load %lld pieces of %d ranks", (long long)most, comm->size);
    st = fsdp_comm_agree(comm, st);
    if (st == FSDP_OK) {
        for (int64_t i = 0; i < most; i++) list[i].entry = -1;
        list_pieces(c, s, name, list);
        st = fsdpi_comm_exchange(comm, FSDPI_OP_LOAD, NULL, list, (size_t)most * sizeof(*list), all);
    }
    if (st == FSDP_OK) {
        size_t first = 0;
        if (count > 0) qsort(all, count, sizeof(*all), by_place);
        while (first < count && all[first].entry < 0) first++;
        st = cover_all(out, c, name, all + first, (int)(count - first), s->kind == FSDP_STATE_LOCAL);
    }
    fsdpi_free(list);
    fsdpi_free(all);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

void fsdpi_sources_free(fsdpi_sources *s)
{
    fsdpi_free(s->cover);
    fsdpi_free(s->at);
    fsdpi_free(s->zero);
}
