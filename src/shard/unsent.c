/* SPDX-License-Identifier: MIT
 *
 * Passes without sync: their gradients stay with the rank, whole, until the next pass with sync, or the step, takes them along.
 *
 * A backward without sync writes a private block. When the gradient is complete, what was unsent before is added to it, in
 * place: block = unsent + block. The end of the pass makes the block what is unsent; a cancellation frees it. A pass with
 * sync adds window = unsent + window before it posts. So a rank's sum is ((leaf + leaf) + leaf) of its own leaves in order,
 * and owners add the ranks' sums in rank order (docs/decisions/0001: groups of G leaves). With a grad_dtype below fp32 what is
 * kept is a block of that type, rounded after each leaf.
 *
 * Nothing here waits for others: ranks do not meet at the end of such a pass. What each has is compared where they do: the
 * posts of a step follow from the calls that were made, and count when all have made them; after a reset, ranks that ended
 * different passes drop what differs.
 *
 * All of it is on the compute stream. */
#include "shard/unit_list.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/log.h"
#include "shard/pass.h"
#include "shard/sum.h"

#include <string.h>

fsdp_status fsdpi_unsent_open(fsdp_unit *u)
{
    void *p;
    FSDP_TRY(fsdpi_arena_alloc(u->ctx->arena, (size_t)u->layout.total * sizeof(float), &p));
    u->block = p;
    return FSDP_OK;
}

static void free_kept(fsdp_unit *u, void **kept)
{
    fsdpi_arena_free(u->ctx->arena, *kept);
    *kept = NULL;
}

static void free_block(fsdp_unit *u)
{
    fsdpi_arena_free(u->ctx->arena, u->block);
    u->block = NULL;
}

static fsdp_status make_rounds(fsdp_unit *u, int rounds)
{
    if (rounds <= u->unsent_rounds) return FSDP_OK;
    fsdpi_accumulator *more = fsdpi_realloc(u->unsent, (size_t)rounds, sizeof(*more));
    FSDP_FAIL_IF(more == NULL, FSDP_ERR_NOMEM, "unit \"%s\": no memory for its gradients", u->name);
    memset(more + u->unsent_rounds, 0, (size_t)(rounds - u->unsent_rounds) * sizeof(*more));
    u->unsent = more;
    u->unsent_rounds = rounds;
    return FSDP_OK;
}

/* A sum of whole units, of elements [at, at + numel). */
static fsdp_status add_part(fsdp_unit *u, const fsdpi_sum *whole, int64_t at, int64_t numel)
{
    fsdpi_sum s = *whole;
    size_t skip = (size_t)at * fsdp_dtype_bytes(s.dtype), skip_x = (size_t)at * fsdp_dtype_bytes(s.x_dtype);
    s.comm = u->rt->comm;
    s.out = (char *)s.out + skip;
    if (s.base != NULL) s.base = (const char *)s.base + skip;
    s.x[0] = (const char *)s.x[0] + skip_x;
    s.n = 1;
    s.numel = numel;
    return fsdpi_sum_launch(u->ctx->compute, &s);
}

/* ... of all that trains. */
static fsdp_status add_whole(fsdp_unit *u, const fsdpi_sum *whole)
{
    if (u->frozen_count == 0) return add_part(u, whole, 0, u->layout.total);
    for (int i = 0; i < u->layout.count; i++)
        if (!u->frozen[i] && u->layout.numel[i] > 0) FSDP_TRY(add_part(u, whole, u->layout.at[i], u->layout.numel[i]));
    return FSDP_OK;
}

/* to += what was kept. */
static fsdp_status add_kept(fsdp_unit *u, float *to, const void *kept)
{
    return add_whole(u, &(fsdpi_sum){ .out = to, .base = to, .x = { kept }, .x_dtype = u->grad_dtype });
}

/* next = now + block, rounded. */
static fsdp_status keep_rounded(fsdp_unit *u, fsdpi_accumulator *a)
{
    if (a->next == NULL) FSDP_TRY(fsdpi_arena_alloc(u->ctx->arena, (size_t)u->layout.total * fsdp_dtype_bytes(u->grad_dtype), &a->next));
    FSDP_TRY(add_whole(u, &(fsdpi_sum){ .out = a->next, .base = a->has ? a->now : NULL, .dtype = u->grad_dtype, .x = { u->block } }));
    free_block(u);
    return FSDP_OK;
}

fsdp_status fsdpi_unsent_keep(fsdp_unit *u, int round)
{
    FSDP_TRY(make_rounds(u, round + 1));
    fsdpi_accumulator *a = &u->unsent[round];
    if (u->grad_dtype != FSDP_F32) FSDP_TRY(keep_rounded(u, a));
    else {
        if (a->has) FSDP_TRY(add_kept(u, u->block, a->now));
        a->next = u->block;
        u->block = NULL;
    }
    a->pending = true;
    return FSDP_OK;
}

fsdp_status fsdpi_unsent_join(fsdp_unit *u, int round)
{
    if (round >= u->unsent_rounds || !u->unsent[round].has) return FSDP_OK;
    FSDP_TRY(add_kept(u, fsdpi_grad_place(u), u->unsent[round].now));
    u->unsent[round].pending = true; /* with no next: it is gone when the pass ends */
    return FSDP_OK;
}

void fsdpi_unsent_commit(fsdp_unit *u, uint64_t pass)
{
    for (int k = 0; k < u->unsent_rounds; k++) {
        fsdpi_accumulator *a = &u->unsent[k];
        if (!a->pending) continue;
        free_kept(u, &a->now);
        a->now = a->next;
        a->next = NULL;
        a->has = a->now != NULL;
        a->pending = false;
    }
    u->unsent_passes = fsdpi_unsent_any(u) ? (u->unsent_passes ^ (pass + 1)) * 0x9e3779b97f4a7c15u : 0;
    if (u->unsent_passes == 0) u->weights_sent = u->weights;
}

void fsdpi_unsent_discard(fsdp_unit *u)
{
    free_block(u);
    for (int k = 0; k < u->unsent_rounds; k++) {
        free_kept(u, &u->unsent[k].next);
        u->unsent[k].pending = false;
    }
}

void fsdpi_unsent_drop(fsdp_unit *u)
{
    fsdpi_unsent_discard(u);
    for (int k = 0; k < u->unsent_rounds; k++) {
        free_kept(u, &u->unsent[k].now);
        u->unsent[k].has = false;
    }
    u->unsent_passes = 0;
}

bool fsdpi_unsent_any(const fsdp_unit *u)
{
    for (int k = 0; k < u->unsent_rounds; k++)
        if (u->unsent[k].has) return true;
    return false;
}

/* ---- at a step ---- */

/* What was kept, into a window; below fp32 by way of a block. */
static fsdp_status fill_window(fsdp_unit *u, fsdpi_pooled *w, const void *kept)
{
    if (u->grad_dtype == FSDP_F32) return fsdpi_window_fill(u, w, kept);
    FSDP_TRY(fsdpi_unsent_open(u));
    FSDP_TRY(fsdpi_launch_widen(u->ctx->compute, u->block, kept, u->grad_dtype, u->layout.total));
    FSDP_TRY(fsdpi_window_fill(u, w, u->block));
    free_block(u);
    return FSDP_OK;
}

static fsdp_status post(fsdp_unit *u, int round)
{
    fsdpi_pooled *w;
    FSDP_TRY(fsdpi_unit_tag(u, FSDPI_OP_REDUCE));
    FSDP_TRY(fsdpi_window_take(u, &w));
    FSDP_TRY(fill_window(u, w, u->unsent[round].now));
    FSDP_TRY(fsdpi_window_send(u, w, round));
    u->unsent[round].pending = true;
    return FSDP_OK;
}

/* Units of a list may be of several communicators: each is dealt with by itself, in an order that all ranks share. */
static fsdp_status post_all(fsdp_unit_list l, fsdpi_runtime *rt)
{
    for (int i = 0; i < l.count; i++)
        for (int k = 0; l.units[i]->rt == rt && k < l.units[i]->unsent_rounds; k++)
            if (l.units[i]->unsent[k].has) FSDP_TRY(post(l.units[i], k));
    return fsdpi_reduce_owed(rt, true);
}

static fsdp_unit *first_unsent(fsdp_unit_list l, const fsdpi_runtime *rt)
{
    for (int i = 0; i < l.count; i++)
        if (l.units[i]->rt == rt && fsdpi_unsent_any(l.units[i])) return l.units[i];
    return NULL;
}

static bool is_in(fsdp_unit_list l, const fsdp_unit *u)
{
    for (int i = 0; i < l.count; i++)
        if (l.units[i] == u) return true;
    return false;
}

static void take_back(fsdp_unit_list l, fsdpi_runtime *rt)
{
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    for (fsdpi_pooled *o = rt->owed; o != NULL; o = o->next_owed) o->discard |= is_in(l, o->unit);
    (void)!fsdpi_reduce_owed(rt, true);
    for (int i = 0; i < l.count; i++)
        if (l.units[i]->rt == rt) fsdpi_grad_discard(l.units[i]);
    fsdpi_error_restore(&kept);
}

static fsdp_status send_all(fsdp_unit_list units, fsdpi_runtime *rt)
{
    const fsdp_unit *first = first_unsent(units, rt);
    if (first == NULL) return FSDP_OK;
    fsdp_status st = post_all(units, rt);
    /* All ranks have come this way: what was posted counts on all of them. */
    if (st == FSDP_OK) st = fsdpi_comm_tell(rt->comm, FSDPI_OP_SEND, first->name, NULL, 0);
    if (st != FSDP_OK) {
        take_back(units, rt);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    for (int i = 0; i < units.count; i++)
        if (units.units[i]->rt == rt && fsdpi_unsent_any(units.units[i])) {
            fsdpi_grad_commit(units.units[i]);
            fsdpi_unsent_commit(units.units[i], 0);
        }
    return FSDP_OK;
}

fsdp_status fsdpi_unsent_post(fsdp_unit_list units)
{
    for (fsdpi_runtime *rt = fsdpi_list_next(units, NULL); rt != NULL; rt = fsdpi_list_next(units, rt)) FSDP_TRY(send_all(units, rt));
    return FSDP_OK;
}

/* ---- after a reset ---- */

typedef struct told {
    uint64_t units, passes, any;
    uint64_t failed; /* a stream has: what it was to add may not be there */
} told;

static void drop_different(fsdp_unit *u)
{
    fsdpi_log(FSDP_LOG_WARN, "unit \"%s\": ranks had not all ended the same passes without sync: what was not sent of its gradients is dropped", u->name);
    fsdpi_unsent_drop(u);
    while (u->weights > u->weights_sent)
        if (--u->weight[--u->weights]->refs == 0) fsdpi_free(u->weight[u->weights]);
}

static fsdp_status compare_units(fsdpi_runtime *rt, uint64_t units, bool failed, uint64_t *mine, uint64_t *all)
{
    fsdp_comm *comm = rt->comm;
    uint64_t n = 0;
    for (const fsdp_unit *u = rt->units; u != NULL; u = u->following) mine[n++] = u->unsent_passes;
    FSDP_TRY(fsdpi_comm_exchange(comm, FSDPI_OP_AGREE, NULL, mine, (size_t)units * sizeof(*mine), all));
    n = 0;
    for (fsdp_unit *u = rt->units; u != NULL; u = u->following, n++) {
        bool same = !failed || u->unsent_passes == 0;
        for (int r = 0; r < comm->size; r++) same &= all[(uint64_t)r * units + n] == mine[n];
        if (!same) drop_different(u);
    }
    return FSDP_OK;
}

fsdp_status fsdpi_unsent_agree(fsdpi_runtime *rt)
{
    fsdp_comm *comm = rt->comm;
    told mine = { .passes = rt->pass_count, .failed = rt->failed }, most;
    rt->failed = false;
    for (const fsdp_unit *u = rt->units; u != NULL; u = u->following) {
        mine.units++;
        mine.any |= u->unsent_passes != 0;
    }
    most = mine;
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_AGREE, NULL, &mine, sizeof(mine)));
    for (int r = 0; r < comm->size; r++) {
        told t;
        memcpy(&t, fsdpi_comm_told(comm, r), sizeof(t));
        if (t.passes > most.passes) most.passes = t.passes;
        most.any |= t.any;
        most.failed |= t.failed;
        if (t.units != mine.units) most.units = 0; /* they do not have the same units: nothing can be compared */
    }
    rt->pass_count = most.passes; /* numbers name passes on all ranks, and are not used again */
    if (!most.any || most.units == 0) return FSDP_OK;
    uint64_t *mem = fsdpi_calloc((size_t)mine.units * (size_t)(comm->size + 1), sizeof(*mem));
    FSDP_TRY(fsdp_comm_agree(comm, mem != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to compare gradients")));
    fsdp_status st = compare_units(rt, mine.units, most.failed != 0, mem, mem + mine.units);
    fsdpi_free(mem);
    return st;
}
