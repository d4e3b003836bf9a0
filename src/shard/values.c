/* SPDX-License-Identifier: MIT
 *
 * Initial values of a unit. Each rank makes those of the elements that it keeps, beside the old ones, or one rank makes
 * all; when all ranks have theirs, they are published. Where ranks keep the same elements, they are compared. */
#include "shard/compare.h"
#include "shard/spread.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/log.h"
#include "base/within.h"

#include <stdio.h>
#include <string.h>

/* ---- which parameters have values ---- */

void fsdpi_unit_mark_set(fsdp_unit *u, const bool *which)
{
    u->all_set = true;
    for (int i = 0; i < u->layout.count; i++) {
        u->set[i] |= which == NULL || which[i];
        u->all_set &= u->set[i];
    }
}

int fsdp_unit_never_set(const fsdp_unit *unit, const char **first)
{
    int n = 0;
    for (int i = 0; i < unit->layout.count; i++)
        if (!unit->set[i] && n++ == 0 && first != NULL) *first = unit->layout.param[i].name;
    return n;
}

void fsdpi_unit_warn_unset(fsdp_unit *u)
{
    const char *first = "";
    int n = fsdp_unit_never_set(u, &first);
    u->all_set = true; /* said once */
    if (u->rt->comm->rank != 0) return;
    fsdpi_log(FSDP_LOG_WARN, "unit \"%s\" is trained, but %d of its %d parameters never had values, \"%s\" first: they are 0 (initialise them, or load them)", u->name, n,
              u->layout.count, first);
}

/* ---- each rank its own ---- */

typedef struct element_fill {
    fsdp_init_fn init;
    void *arg;
} element_fill;

static fsdp_status fill_elements(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)param;
    element_fill *e = arg;
    for (int64_t i = 0; i < numel; i++) e->init(name, first + i, &out[i], e->arg);
    return FSDP_OK;
}

static fsdp_status call_fill(fsdp_fill_fn fill, const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    fsdpi_within w;
    fsdpi_within_begin(&w, NULL);
    fsdp_status st = fill(name, param, first, numel, out, arg);
    fsdpi_within_end(&w);
    return st;
}

/* Into device memory at `to`; in pieces through host memory where the host may not write there. */
static fsdp_status fill_segment(fsdp_unit *u, const fsdpi_segment *g, float *to, fsdp_fill_fn fill, void *arg)
{
    const char *name = u->layout.param[g->param].name;
    if (fsdp_device_host_accessible(u->store->dev)) return call_fill(fill, name, g->param, g->offset, g->numel, to, arg);
    enum { PIECE = 1 << 16 };
    int64_t piece = g->numel < PIECE ? g->numel : PIECE;
    float *host;
    FSDPI_NEW(host, piece);
    fsdp_status st = FSDP_OK;
    for (int64_t at = 0; at < g->numel && st == FSDP_OK; at += piece) {
        int64_t n = g->numel - at < piece ? g->numel - at : piece;
        st = call_fill(fill, name, g->param, g->offset + at, n, host, arg);
        if (st == FSDP_OK) st = fsdp_stream_copy(u->store->compute, to + at, host, (size_t)n * sizeof(float));
        if (st == FSDP_OK) st = fsdp_stream_sync(u->store->compute);
    }
    fsdpi_free(host);
    return st;
}

/* New values are made beside the old ones: where a rank has none for its part, all keep the old ones. */
static fsdp_status make_values(fsdp_unit *u, float *to, fsdp_fill_fn fill, void *arg, const bool *which)
{
    for (int i = 0; i < u->slice_count; i++) {
        const fsdpi_segment *g = &u->segments[i];
        int64_t at = g->at - u->keep_lo;
        if (which == NULL || which[g->param]) FSDP_TRY(fill_segment(u, g, to + at, fill, arg));
        else FSDP_TRY(fsdp_stream_copy(u->store->compute, to + at, u->master + at, (size_t)g->numel * sizeof(float)));
    }
    return FSDP_OK;
}

/* Replicas that were given different values: said, not refused, since each slice has one owner whose values count. */
static fsdp_status compare_replicas(fsdp_unit *u, const float *kept, fsdpi_difference *d)
{
    fsdpi_values v = { .unit = u, .from = u->keep_lo, .to = u->keep_hi, .flat = kept };
    return fsdpi_compare(&v, FSDPI_OP_COMPARE, d);
}

fsdp_status fsdpi_unit_take(fsdp_unit *u, const float *from)
{
    if (fsdpi_unit_has_replicas(u)) {
        fsdpi_difference d;
        FSDP_TRY(compare_replicas(u, from, &d));
        fsdpi_difference_log(u, &d);
    }
    for (int i = 0; i < u->slice_count; i++) {
        int64_t at = u->segments[i].at - u->keep_lo;
        FSDP_TRY(fsdp_stream_copy(u->store->compute, u->master + at, from + at, (size_t)u->segments[i].numel * sizeof(float)));
    }
    FSDP_TRY(fsdpi_unit_unify(u));
    return fsdpi_unit_publish(u);
}

fsdp_status fsdpi_unit_fill(fsdp_unit *u, fsdp_fill_fn fill, void *arg, const bool *which)
{
    FSDPI_CALL_AS(u->rt->comm, "fsdp_unit_fill");
    FSDP_FAIL_IF(fill == NULL, FSDP_ERR_INVALID, "fsdp_unit_fill: unit \"%s\": no function", u->name);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_FILL, NULL));
    FSDP_TRY(fsdpi_unit_done(u));
    FSDP_TRY(fsdpi_unit_open(u));
    void *p = NULL;
    fsdp_status st = fsdpi_arena_alloc(u->store->arena, (size_t)fsdpi_unit_kept(u) * sizeof(float), &p);
    if (st == FSDP_OK) st = make_values(u, p, fill, arg, which);
    st = fsdpi_comm_agree_in(u->rt->comm, FSDPI_OP_FILL, u->name, st);
    if (st == FSDP_OK) st = fsdpi_unit_take(u, p);
    fsdpi_arena_free(u->store->arena, p);
    if (st != FSDP_OK) fsdpi_unit_settle(u);
    if (st != FSDP_OK) return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    fsdpi_unit_mark_set(u, which);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_fill(fsdp_unit *u, fsdp_fill_fn fill, void *arg)
{
    return fsdpi_unit_fill(u, fill, arg, NULL);
}

fsdp_status fsdp_unit_init(fsdp_unit *unit, fsdp_init_fn init, void *arg)
{
    FSDPI_CALL(unit->rt->comm);
    FSDP_FAIL_IF(init == NULL, FSDP_ERR_INVALID, "fsdp_unit_init: unit \"%s\": no function", unit->name);
    return fsdp_unit_fill(unit, fill_elements, &(element_fill){ init, arg });
}

/* ---- from one rank ---- */

/* All elements, into this rank's window. */
static fsdp_status make_all(fsdp_unit *u, float *whole, fsdp_fill_fn fill, void *arg)
{
    FSDP_FAIL_IF(fill == NULL, FSDP_ERR_INVALID, "fsdp_unit_fill_from: unit \"%s\": no function on the rank that fills", u->name);
    for (int i = 0; i < u->layout.count; i++) {
        fsdpi_segment g = { .param = i, .offset = 0, .numel = u->layout.numel[i], .at = u->layout.at[i] };
        if (g.numel > 0) FSDP_TRY(fill_segment(u, &g, whole + g.at, fill, arg));
    }
    return FSDP_OK;
}

/* What rank `rank` has put into its window becomes the masters. mine: how that went here. */
static fsdp_status take_from(fsdpi_spread *s, int rank, fsdp_status mine)
{
    fsdp_unit *u = s->unit;
    fsdp_status st = fsdpi_comm_agree_in(u->rt->comm, FSDPI_OP_FILL_FROM, u->name, mine);
    fsdpi_error e;
    if (st != FSDP_OK) fsdpi_error_save(&e);
    FSDP_TRY(fsdpi_spread_post(s, st == FSDP_OK));
    if (st == FSDP_OK) FSDP_TRY(fsdpi_spread_read(s, rank, u->keep_lo, u->keep_hi, u->master));
    FSDP_TRY(fsdpi_spread_close(s));
    if (st == FSDP_OK) return fsdpi_unit_publish(u);
    fsdpi_unit_settle(u);
    fsdpi_error_restore(&e);
    return st;
}

static fsdp_status check_rank(const fsdp_unit *u, int rank, const char *call)
{
    FSDP_FAIL_IF(rank < 0 || rank >= u->rt->comm->size, FSDP_ERR_INVALID, "%s: unit \"%s\": rank %d of %d", call, u->name, rank, u->rt->comm->size);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_FILL, NULL));
    return fsdpi_comm_tag(u->rt->comm, FSDPI_OP_FILL_FROM, u->name, (uint64_t)rank);
}

fsdp_status fsdpi_unit_fill_from(fsdp_unit *u, int rank, fsdp_fill_fn fill, void *arg, const bool *which)
{
    FSDPI_CALL_AS(u->rt->comm, "fsdp_unit_fill_from");
    fsdpi_spread s;
    FSDP_TRY(check_rank(u, rank, "fsdp_unit_fill_from"));
    FSDP_TRY(fsdpi_unit_done(u));
    FSDP_TRY(fsdpi_unit_open(u));
    FSDP_TRY(fsdpi_spread_open(&s, u, u->store));
    FSDP_TRY(take_from(&s, rank, u->rt->comm->rank == rank ? make_all(u, s.buffer, fill, arg) : FSDP_OK));
    fsdpi_unit_mark_set(u, which);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_fill_from(fsdp_unit *u, int rank, fsdp_fill_fn fill, void *arg)
{
    return fsdpi_unit_fill_from(u, rank, fill, arg, NULL);
}

/* ---- replicas ---- */

fsdp_status fsdp_unit_check_replicas(fsdp_unit *u)
{
    FSDPI_CALL(u->rt->comm);
    fsdpi_difference d;
    char text[400];
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_CHECK_REPLICAS, NULL));
    if (!fsdpi_unit_has_replicas(u)) return FSDP_OK;
    FSDP_TRY(compare_replicas(u, u->master, &d));
    FSDP_FAIL_IF(d.found, FSDP_ERR_INVALID, "unit \"%s\": replicas have diverged: %s: fsdp_unit_broadcast_from() makes them one rank's", u->name,
                 fsdpi_difference_text(u, &d, text, sizeof(text)));
    return FSDP_OK;
}

fsdp_status fsdp_unit_broadcast_from(fsdp_unit *u, int rank)
{
    FSDPI_CALL(u->rt->comm);
    fsdpi_spread s;
    FSDP_TRY(check_rank(u, rank, "fsdp_unit_broadcast_from"));
    if (!fsdpi_unit_has_replicas(u)) return FSDP_OK;
    FSDP_TRY(fsdpi_unit_done(u));
    FSDP_TRY(fsdpi_unit_open(u));
    FSDP_TRY(fsdpi_spread_open(&s, u, u->store));
    /* Its replica's: from each of those that keep a slice, the one that is in the same replica as that rank. */
    int from = fsdpi_group_rank(&u->replicas, u->rt->comm->rank, fsdpi_group_member(&u->replicas, rank));
    FSDP_TRY(take_from(&s, from, fsdp_stream_copy(u->store->compute, s.buffer + u->keep_lo, u->master, (size_t)fsdpi_unit_kept(u) * sizeof(float))));
    fsdpi_unit_check(u);
    return FSDP_OK;
}
