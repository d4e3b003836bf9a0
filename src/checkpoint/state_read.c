/* SPDX-License-Identifier: MIT
 *
 * Reading a state dictionary off the model. Masters and optimizer state are read where they lie, so that no unit has to be whole for
 * it, and what was last published is what comes out, also within a summon. */
#include "checkpoint/state.h"

#include "base/alloc.h"
#include "base/error.h"
#include "checkpoint/move.h"
#include "checkpoint/snapshot.h"

#include <stdlib.h>
#include <string.h>

typedef struct reading {
    const fsdp_checkpoint *c;
    fsdp_state_opts o;
    bool wants;    /* this rank gets elements */
    fsdp_state *s;
    int *piece;    /* [entries]: its piece in s; -1: none */
    void *scratch; /* this rank's part of one tensor */
    fsdpi_cover *cover; /* [ranks] */
    int64_t *mine, *all; /* [tensors][2], [ranks][tensors][2]: first and numel of what each rank has of it */
    int tensors;
} reading;

static bool is_wanted(const reading *r, int i)
{
    const fsdpi_entry *e = &r->c->entry[i];
    return fsdpi_entry_is_tensor(e) && (fsdpi_entry_what(r->c, e) & r->o.which) != 0;
}

/* Every rank has all of it, and the same: nothing has to be told. */
static bool is_everywhere(const reading *r, const fsdpi_entry *e)
{
    return !fsdpi_entry_is_each_ranks(r->c, e) && fsdp_unit_shards(e->unit) == 1;
}

static fsdpi_range_of part_of(const reading *r, const fsdpi_entry *e)
{
    return r->o.kind == FSDP_STATE_LOCAL ? fsdpi_entry_kept(e) : fsdpi_entry_range(r->c, e);
}

/* ---- what it takes, before ranks agree to begin ---- */

static fsdp_status add_piece(reading *r, int i)
{
    const fsdpi_entry *e = &r->c->entry[i];
    fsdpi_range_of part = part_of(r, e);
    fsdp_state_tensor like = { .name = e->name, .dtype = e->dtype, .ndim = e->ndim, .first = part.first, .count = part.numel, .what = fsdpi_entry_what(r->c, e) };
    memcpy(like.shape, e->shape, sizeof(like.shape));
    if (r->o.kind == FSDP_STATE_FULL) {
        like.first = 0;
        like.count = r->wants ? e->numel : 0;
    }
    r->piece[i] = r->s->count;
    return fsdpi_state_new_piece(r->s, &like, NULL);
}

static fsdp_status prepare(reading *r)
{
    const fsdp_checkpoint *c = r->c;
    size_t size = (size_t)fsdp_comm_size(c->comm), most = 0;
    FSDP_TRY(fsdp_state_create(&r->s));
    r->s->kind = r->o.kind;
    FSDPI_NEW(r->piece, c->count);
    for (int i = 0; i < c->count; i++) {
        r->piece[i] = -1;
        if (!is_wanted(r, i)) continue;
        size_t bytes = (size_t)fsdpi_entry_range(c, &c->entry[i]).numel * fsdp_dtype_bytes(c->entry[i].dtype);
        most = bytes > most ? bytes : most;
        r->tensors++;
        FSDP_TRY(add_piece(r, i));
    }
    if (r->o.kind != FSDP_STATE_FULL) return FSDP_OK;
    r->scratch = fsdpi_calloc(most, 1);
    FSDPI_NEW(r->cover, size);
    FSDPI_NEW(r->mine, 2 * r->tensors);
    FSDPI_NEW(r->all, 2 * size * (size_t)r->tensors);
    FSDP_FAIL_IF(r->scratch == NULL, FSDP_ERR_NOMEM, "no memory to read %zu bytes", most);
    return FSDP_OK;
}

static void release(reading *r)
{
    fsdpi_free(r->piece);
    fsdpi_free(r->scratch);
    fsdpi_free(r->cover);
    fsdpi_free(r->mine);
    fsdpi_free(r->all);
    fsdp_state_destroy(r->s);
}

/* ---- elements ---- */

static fsdp_status to_host(const fsdpi_entry *e, const fsdpi_range_of *part, void *out)
{
    size_t bytes = (size_t)part->numel * fsdp_dtype_bytes(e->dtype);
    if (bytes == 0) return FSDP_OK;
    if (part->at == NULL) {
        memset(out, 0, bytes);
        return FSDP_OK;
    }
    if (e->kind == FSDPI_ENTRY_BUFFER) {
        memcpy(out, part->at, bytes);
        return FSDP_OK;
    }
    FSDP_TRY(fsdp_stream_copy(fsdpi_entry_stream(e), out, part->at, bytes));
    return fsdp_stream_sync(fsdpi_entry_stream(e));
}

typedef struct held {
    const char *host;
    int64_t first;
    size_t size;
} held;

static fsdp_status have(void *arg, int64_t first, int64_t numel, void *out)
{
    const held *h = arg;
    memcpy(out, h->host + (size_t)(first - h->first) * h->size, (size_t)numel * h->size);
    return FSDP_OK;
}

/* Tensor number t of those that are wanted. A rank that cannot read its part goes on with what it has: all are told at the end. */
static fsdp_status gather(reading *r, int i, int t)
{
    const fsdpi_entry *e = &r->c->entry[i];
    fsdp_state_tensor *to = &r->s->tensor[r->piece[i]];
    fsdpi_range_of part = fsdpi_entry_range(r->c, e);
    if (is_everywhere(r, e)) {
        part = fsdpi_entry_kept(e);
        return r->wants ? to_host(e, &part, to->data) : FSDP_OK;
    }
    fsdp_status read = to_host(e, &part, r->scratch);
    held h = { r->scratch, part.first, fsdp_dtype_bytes(e->dtype) };
    fsdpi_move m = { .comm = r->c->comm, .op = FSDPI_OP_SAVE, .name = e->name, .size = h.size, .cover = r->cover, .have = have, .arg = &h, .numel = to->count, .out = to->data };
    for (int k = 0; k < r->c->comm->size; k++) {
        const int64_t *range = &r->all[2 * (k * r->tensors + t)];
        if (range[1] > 0) r->cover[m.covers++] = (fsdpi_cover){ k, range[0], range[1] };
    }
    FSDP_TRY(fsdpi_move_run(&m));
    return read;
}

/* read: how it went so far; a rank that is in trouble still takes part. */
static fsdp_status gather_all(reading *r)
{
    fsdp_status st = FSDP_OK;
    for (int i = 0, t = 0; i < r->c->count; i++) {
        if (r->piece[i] < 0) continue;
        fsdpi_range_of part = fsdpi_entry_range(r->c, &r->c->entry[i]);
        r->mine[2 * t] = part.first;
        r->mine[2 * t++ + 1] = part.numel;
    }
    FSDP_TRY(fsdpi_comm_exchange(r->c->comm, FSDPI_OP_SAVE, NULL, r->mine, 2 * (size_t)r->tensors * sizeof(*r->mine), r->all));
    for (int i = 0, t = 0; i < r->c->count; i++) {
        if (r->piece[i] < 0) continue;
        fsdp_status one = gather(r, i, t++);
        if (one == FSDP_ERR_COMM || one == FSDP_ERR_PEER) return one;
        if (st == FSDP_OK) st = one;
    }
    return st;
}

static fsdp_status copy_parts(reading *r)
{
    for (int i = 0; i < r->c->count; i++) {
        if (r->piece[i] < 0) continue;
        fsdpi_range_of part = part_of(r, &r->c->entry[i]);
        FSDP_TRY(to_host(&r->c->entry[i], &part, r->s->tensor[r->piece[i]].data));
    }
    return FSDP_OK;
}

/* ---- numbers: rank 0's, for all ---- */

static fsdp_status values_of(reading *r, char **text)
{
    fsdpi_snapshot *snap;
    FSDP_TRY(fsdpi_snapshot_make(&snap, r->c));
    json_t *values = json_object();
    bool good = values != NULL;
    for (int i = 0; i < r->c->count && good; i++) {
        const fsdpi_entry *e = &r->c->entry[i];
        json_t *v = json_object_get(snap->values, e->name);
        if (v != NULL && (fsdpi_entry_what(r->c, e) & r->o.which) != 0) good = json_object_set(values, e->name, v) == 0;
    }
    *text = good ? json_dumps(values, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(values);
    fsdpi_snapshot_free(snap);
    FSDP_FAIL_IF(*text == NULL, FSDP_ERR_NOMEM, "no memory for the numbers of a state dictionary");
    return FSDP_OK;
}

static fsdp_status share_values(reading *r)
{
    fsdp_comm *comm = r->c->comm;
    char *text = NULL, *told;
    FSDP_TRY(fsdp_comm_agree(comm, comm->rank == 0 ? values_of(r, &text) : FSDP_OK));
    uint64_t bytes = text != NULL ? strlen(text) + 1 : 0;
    fsdp_status st = fsdp_comm_broadcast(comm, &bytes, sizeof(bytes), 0);
    told = st == FSDP_OK ? fsdpi_calloc(bytes, 1) : NULL;
    if (st == FSDP_OK && told == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for the numbers of a state dictionary");
    if (told != NULL && text != NULL) memcpy(told, text, bytes);
    free(text);
    st = fsdp_comm_agree(comm, st);
    if (st == FSDP_OK) st = fsdp_comm_broadcast(comm, told, bytes, 0);
    json_t *values = st == FSDP_OK ? json_loads(told, 0, NULL) : NULL;
    fsdpi_free(told);
    FSDP_TRY(st);
    bool good = json_is_object(values) && json_object_update(r->s->values, values) == 0;
    json_decref(values);
    for (int i = 0; i < r->c->count && good; i++) {
        const fsdpi_entry *e = &r->c->entry[i], *of = e->kind == FSDPI_ENTRY_ALIAS ? &r->c->entry[e->of] : NULL;
        if (of == NULL || (r->piece[e->of] < 0 && json_object_get(r->s->values, of->name) == NULL)) continue;
        good = json_object_set_new(r->s->aliases, e->name, json_string(of->name)) == 0;
    }
    FSDP_FAIL_IF(!good, FSDP_ERR_NOMEM, "no memory for the numbers of a state dictionary");
    return FSDP_OK;
}

fsdp_status fsdp_state_read(fsdp_state **out, fsdp_checkpoint *c, const fsdp_state_opts *opts)
{
    reading r = { .c = c, .o = opts != NULL ? *opts : (fsdp_state_opts){ 0 } };
    FSDP_FAIL_IF((unsigned)r.o.kind > FSDP_STATE_LOCAL || (r.o.which & ~(unsigned)FSDP_STATE_ALL) != 0, FSDP_ERR_INVALID, "fsdp_state_read: kind %d or which %#x: no such",
                 (int)r.o.kind, r.o.which);
    FSDP_FAIL_IF(r.o.rank0_only && r.o.kind != FSDP_STATE_FULL, FSDP_ERR_INVALID, "fsdp_state_read: rank0_only is of FSDP_STATE_FULL: every rank has pieces of its own");
    FSDP_TRY(fsdpi_registry_allows(c, FSDPI_EV_STATE_READ));
    if (r.o.which == 0) r.o.which = FSDP_STATE_ALL;
    r.wants = !r.o.rank0_only || fsdp_comm_rank(c->comm) == 0;
    fsdp_status st = fsdp_comm_agree(c->comm, prepare(&r));
    if (st == FSDP_OK) st = fsdpi_registry_same(c, "fsdp_state_read");
    if (st == FSDP_OK) st = share_values(&r);
    if (st == FSDP_OK || (st != FSDP_ERR_COMM && st != FSDP_ERR_PEER)) st = fsdp_comm_agree(c->comm, st);
    if (st == FSDP_OK) st = fsdp_comm_agree(c->comm, r.o.kind == FSDP_STATE_FULL ? gather_all(&r) : copy_parts(&r));
    if (st == FSDP_OK) {
        *out = r.s;
        r.s = NULL;
    }
    release(&r);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}
