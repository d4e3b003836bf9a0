/* SPDX-License-Identifier: MIT
 *
 * Gradients: from this rank's window to the owners' accumulators, in leaf order.
 *
 * With R ranks, pass j of rank r is leaf j R + r. An owner adds the windows of one pass in rank order, and passes
 * follow each other: so leaves are added one after another in the order of their numbers, for every R. A unit that
 * posts more than once in a pass (forward, backward, forward, backward) has an accumulator for each such round, and
 * they are added up at the end: so this too is the same for every R.
 *
 * A rank posts its window and owes its reduction to the others. It does what it can whenever it comes by here, and
 * before it waits for a window it does all that it owes: so no two ranks wait for each other (docs/protocol.pml). */
#include "shard/unit.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/hooks.h"
#include "shard/pass.h"
#include "shard/sum.h"

#include <string.h>

/* ---- the window of this rank ---- */

float *fsdpi_grad_place(const fsdp_unit *u)
{
    return u->block != NULL ? u->block : u->rt->comm->transport->window_buffer(u->window->window);
}

float *fsdp_unit_grad(fsdp_unit *u, int i, float *beta)
{
    if (i < 0 || i >= u->layout.count || beta == NULL) {
        (void)fsdp_error_raise(FSDP_ERR_INVALID, __func__, __FILE__, __LINE__,
                               "fsdp_unit_grad: unit \"%s\" has %d parameters, not one with number %d", u->name, u->layout.count, i);
        return NULL;
    }
    if (u->frozen[i]) {
        (void)fsdp_error_raise(FSDP_ERR_STATE, __func__, __FILE__, __LINE__,
                               "fsdp_unit_grad: unit \"%s\": parameter \"%s\" is frozen, it has no gradient: ask fsdp_unit_frozen() first", u->name,
                               u->layout.param[i].name);
        return NULL;
    }
    if (fsdpi_life_allows(u, FSDPI_EV_GRAD, NULL) != FSDP_OK) return NULL;
    *beta = u->touched[i] ? 1.0f : 0.0f;
    u->touched[i] = true;
    return fsdpi_grad_place(u) + u->layout.at[i];
}

fsdp_status fsdpi_window_fill(fsdp_unit *u, fsdpi_pooled *w, const float *from)
{
    void *window = u->rt->comm->transport->window_buffer(w->window);
    fsdp_stream *s = fsdpi_between(u, false);
    FSDP_TRY(fsdpi_between_begin(u, false));
    if (u->reduce_dtype == FSDP_F32) FSDP_TRY(fsdp_stream_copy(s, window, from, fsdpi_unit_window_bytes(u)));
    else FSDP_TRY(fsdpi_launch_narrow(s, window, u->reduce_dtype, from, u->layout.total));
    return fsdpi_between_end(u, false);
}

/* What a leaf's gradient becomes before it is sent, or kept. */
static fsdp_status complete(fsdp_unit *u, int round, bool sends)
{
    for (int i = 0; i < u->layout.count; i++)
        if (!u->touched[i] && !u->frozen[i] && u->layout.numel[i] > 0)
            FSDP_TRY(fsdpi_stream_fill(u->ctx->compute, fsdpi_grad_place(u) + u->layout.at[i], 0, (size_t)u->layout.numel[i] * sizeof(float)));
    if (!u->pass->joined) FSDP_TRY(fsdpi_hooks_post(u, fsdpi_grad_place(u)));
    FSDP_TRY(sends ? fsdpi_unsent_join(u, round) : fsdpi_unsent_keep(u, round));
    if (!sends || u->block == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_window_fill(u, u->window, u->block));
    fsdpi_arena_free(u->ctx->arena, u->block);
    u->block = NULL;
    return FSDP_OK;
}

/* Called again by a cancellation where it has failed, a hook perhaps; on other ranks it may not have: so its tag is noted once, and
 * as long as the window is not posted the gradient stays OPEN. */
fsdp_status fsdpi_grad_post(fsdp_unit *u)
{
    fsdpi_use *use = fsdpi_pass_find(u->pass, u);
    fsdpi_pooled *w = u->window;
    bool sends = w != NULL;
    if (!u->post_tagged) FSDP_TRY(fsdpi_unit_tag(u, sends ? FSDPI_OP_REDUCE : FSDPI_OP_KEEP));
    u->post_tagged = true;
    if (!u->pass->cancelled) FSDP_TRY(complete(u, use->rounds, sends));
    fsdp_status st = sends ? fsdpi_window_send(u, w, use->rounds) : FSDP_OK;
    if (st != FSDP_OK && w->held) return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    use->rounds++;
    u->window = NULL;
    fsdpi_unit_move_gradient(u, FSDPI_GRAD_PENDING);
    return st;
}

fsdp_status fsdpi_window_send(fsdp_unit *u, fsdpi_pooled *w, int round)
{
    fsdpi_runtime *rt = u->rt;
    size_t bytes = fsdpi_unit_window_bytes(u);
    FSDP_TRY(fsdpi_stream_wait_stream(u->sums->comm, u->sums->compute));
    FSDP_TRY(rt->comm->transport->window_post(w->window, w->uses, bytes, u->sums->comm));
    if (rt->comm->size > 1) rt->comm->stats.reduces++;
    w->unit = u;
    w->round = round;
    w->discard = u->pass != NULL && u->pass->cancelled;
    w->owes = true;
    w->next_owed = NULL;
    *rt->owed_last = w;
    rt->owed_last = &w->next_owed;
    w->held = false;
    w->posted = ++rt->posts;
    return fsdpi_reduce_owed(rt, u->sums->dev->ops->async); /* on a queue, waiting costs the host nothing */
}

/* ---- the slice of this rank ---- */

/* An accumulator for each round that a pass posts; nearly always one. */
static fsdp_status accumulator(fsdp_unit *u, int round, fsdpi_accumulator **out)
{
    if (round >= u->rounds) {
        fsdpi_accumulator *more = fsdpi_realloc(u->acc, (size_t)round + 1, sizeof(*more));
        FSDP_FAIL_IF(more == NULL, FSDP_ERR_NOMEM, "unit \"%s\": no memory for its gradients", u->name);
        memset(more + u->rounds, 0, (size_t)(round + 1 - u->rounds) * sizeof(*more));
        u->acc = more;
        u->rounds = round + 1;
    }
    fsdpi_accumulator *a = &u->acc[round];
    if (!a->has && a->next == NULL) { /* nothing to keep: sum where the last step's gradients were */
        a->next = a->now;
        a->now = NULL;
    }
    if (a->next == NULL) {
        void *p;
        FSDP_TRY(fsdpi_arena_alloc(u->sums->arena, fsdpi_unit_sum_bytes(u), &p));
        a->next = p;
    }
    *out = a;
    return FSDP_OK;
}

/* Over the parts of the slice that have gradients. out, base: of a slice, in `dtype`; x: from the first such element on, in x_dtype. */
static fsdp_status launch_sum(fsdp_unit *u, fsdp_stream *s, void *out, const void *base, fsdp_dtype dtype, const void *const *x, fsdp_dtype x_dtype, int n)
{
    for (int r = 0; r < u->live_count; r++) {
        const fsdpi_range *g = &u->live[r];
        size_t at = (size_t)(g->from - u->lo) * fsdp_dtype_bytes(dtype), in = (size_t)(g->from - u->live[0].from) * fsdp_dtype_bytes(x_dtype);
        fsdpi_sum sum = { .comm = u->rt->comm, .out = (char *)out + at, .base = base != NULL ? (const char *)base + at : NULL, .dtype = dtype, .x_dtype = x_dtype, .n = n, .numel = g->to - g->from };
        for (int k = 0; k < n; k++) sum.x[k] = (const char *)x[k] + in;
        FSDP_TRY(fsdpi_sum_launch(s, &sum));
    }
    return FSDP_OK;
}

/* acc (+)= slices of all ranks' windows, in rank order. Where all windows can be read at once, several in one go. */
static fsdp_status sum_windows(const fsdpi_pooled *o, void *out, const void *base)
{
    fsdp_unit *u = o->unit;
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    const void *x[FSDPI_SUM_MOST];
    size_t element = fsdp_dtype_bytes(u->reduce_dtype), lo = (size_t)u->live[0].from * element, hi = (size_t)u->live[u->live_count - 1].to * element;
    int most = t->zero_copy ? FSDPI_SUM_MOST : 1;
    for (int r = 0, n = 0; r < u->rt->comm->size; r++) {
        const void *p;
        FSDP_TRY(t->window_peer(o->window, o->uses, r, lo, hi, u->name, u->sums->comm, &p));
        x[n++] = p;
        if (n < most && r < u->rt->comm->size - 1) continue;
        FSDP_TRY(launch_sum(u, u->sums->comm, out, base, u->grad_dtype, x, u->reduce_dtype, n));
        base = out;
        n = 0;
    }
    return FSDP_OK;
}

static fsdp_status add_windows(const fsdpi_pooled *o)
{
    fsdp_unit *u = o->unit;
    fsdp_comm *comm = u->rt->comm;
    fsdpi_accumulator *a;
    FSDP_TRY(accumulator(u, o->round, &a));
    const void *base = a->has ? a->now : NULL;
    if (fsdpi_hooks_have_reduce(u)) FSDP_TRY(fsdpi_hooks_reduce(u, o->window, o->uses, a->next, base));
    else FSDP_TRY(sum_windows(o, a->next, base));
    size_t read = (size_t)(u->live[u->live_count - 1].to - u->live[0].from) * fsdp_dtype_bytes(u->reduce_dtype);
    if (comm->transport->zero_copy) __atomic_fetch_add(&comm->stats.reduce_bytes, read * (size_t)(comm->size - 1), __ATOMIC_RELAXED);
    a->pending = true;
    return FSDP_OK;
}

static fsdp_status reduce_first(fsdpi_runtime *rt)
{
    fsdpi_pooled *o = rt->owed;
    if (!o->discard && o->unit->live_count > 0) FSDP_TRY(add_windows(o));
    else if (!o->discard) {
        /* An empty slice, or all of it frozen: it has gradients all the same, of no elements. */
        fsdpi_accumulator *a;
        FSDP_TRY(accumulator(o->unit, o->round, &a));
        a->pending = true;
    }
    FSDP_TRY(rt->comm->transport->window_take(o->window, o->uses, o->ctx->comm));
    rt->owed = o->next_owed;
    if (rt->owed == NULL) rt->owed_last = &rt->owed;
    o->owes = false;
    o->unit = NULL;
    return FSDP_OK;
}

fsdp_status fsdpi_reduce_owed(fsdpi_runtime *rt, bool wait)
{
    while (rt->owed != NULL) {
        if (!wait && !rt->comm->transport->window_ready(rt->owed->window, rt->owed->uses)) return FSDP_OK;
        FSDP_TRY(reduce_first(rt));
    }
    return FSDP_OK;
}

/* ... up to the one that is owed on this window. */
static fsdp_status reduce_until(fsdpi_runtime *rt, const fsdpi_pooled *window)
{
    while (window->owes) FSDP_TRY(reduce_first(rt));
    return FSDP_OK;
}

fsdp_status fsdpi_window_take(fsdp_unit *u, fsdpi_pooled **out)
{
    fsdpi_pooled *w;
    size_t bytes = fsdpi_unit_window_bytes(u);
    FSDP_TRY(fsdpi_reduce_owed(u->rt, false));
    FSDP_TRY(fsdpi_window_find(&w, u->rt, u->sums, bytes));
    /* The window's last use may be among what this rank owes, and others may wait for that. */
    FSDP_TRY(reduce_until(u->rt, w));
    FSDP_TRY(u->rt->comm->transport->window_acquire(w->window, w->uses + 1, u->name, u->sums->comm));
    FSDP_TRY(fsdpi_stream_wait_stream(u->sums->compute, u->sums->comm)); /* it is written from there, or by way of it */
    w->held = true;
    w->uses++;
    *out = w;
    return FSDP_OK;
}

fsdp_status fsdpi_grad_open(fsdp_unit *u, fsdp_pass *pass)
{
    if (u->gradient == FSDPI_GRAD_OPEN || !fsdpi_unit_trains(u)) return FSDP_OK;
    bool direct = u->reduce_dtype == FSDP_F32 && u->sums == u->ctx; /* backward can write to the window */
    if (pass->unsynced || !direct) FSDP_TRY(fsdpi_unsent_open(u));
    fsdp_status st = pass->unsynced ? FSDP_OK : fsdpi_window_take(u, &u->window);
    if (st != FSDP_OK) {
        fsdpi_arena_free(u->ctx->arena, u->block);
        u->block = NULL;
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    memset(u->touched, 0, (size_t)u->layout.count * sizeof(*u->touched));
    u->post_tagged = false;
    u->pass = pass;
    fsdpi_unit_move_gradient(u, FSDPI_GRAD_OPEN);
    return FSDP_OK;
}

fsdp_status fsdpi_windows_repeat(fsdpi_runtime *rt)
{
    for (fsdpi_pooled *w = rt->windows; w != NULL; w = w->next) {
        uint32_t posted = w->held ? w->uses - 1 : w->uses, taken = w->owes ? posted - 1 : posted;
        if (posted > 0) FSDP_TRY(rt->comm->transport->window_post(w->window, posted, 0, w->ctx->comm));
        if (taken > 0) FSDP_TRY(rt->comm->transport->window_take(w->window, taken, w->ctx->comm));
    }
    return FSDP_OK;
}

/* ---- what becomes of it ---- */

void fsdpi_grad_commit(fsdp_unit *u)
{
    for (int k = 0; k < u->rounds; k++) {
        fsdpi_accumulator *a = &u->acc[k];
        if (!a->pending) continue;
        void *old = a->now;
        a->now = a->next;
        a->next = old;
        a->has = true;
        a->pending = false;
    }
    fsdpi_unit_move_gradient(u, FSDPI_GRAD_NONE);
    u->pass = NULL;
}

void fsdpi_grad_discard(fsdp_unit *u)
{
    if (u->window != NULL) u->window->held = false; /* only after a difference between ranks: a reset makes new ones */
    u->window = NULL;
    for (int k = 0; k < u->rounds; k++) u->acc[k].pending = false;
    fsdpi_unsent_discard(u);
    fsdpi_unit_move_gradient(u, FSDPI_GRAD_NONE);
    u->pass = NULL;
}

bool fsdpi_grad_any(const fsdp_unit *u)
{
    for (int k = 0; k < u->rounds; k++)
        if (u->acc[k].has) return true;
    return false;
}

/* A slice of an accumulator from its first element with a gradient on, as launch_sum() takes it. */
static const void *live_part(const fsdp_unit *u, const void *sum)
{
    return (const char *)sum + (size_t)(u->live[0].from - u->lo) * fsdp_dtype_bytes(u->grad_dtype);
}

fsdp_status fsdpi_grad_final(fsdp_unit *u)
{
    for (int k = 1; k < u->rounds; k++) {
        fsdpi_accumulator *a = &u->acc[0], *b = &u->acc[k];
        if (!b->has) continue;
        if (a->has && u->live_count > 0) {
            const void *x = live_part(u, b->now);
            FSDP_TRY(launch_sum(u, u->sums->comm, a->now, a->now, u->grad_dtype, &x, u->grad_dtype, 1));
        } else if (!a->has) {
            void *t = a->now;
            a->now = b->now;
            b->now = t;
            a->has = true;
        }
        b->has = false;
    }
    return fsdpi_stream_wait_stream(u->sums->compute, u->sums->comm);
}

fsdp_status fsdpi_grad_sum_into(fsdp_unit *u, fsdp_stream *s, float *out)
{
    bool any = false;
    int64_t numel = fsdpi_unit_slice(u);
    for (int k = 0; k < u->rounds && numel > 0; k++) {
        if (!u->acc[k].has || u->live_count == 0) continue;
        const void *x = live_part(u, u->acc[k].now);
        if (any) FSDP_TRY(launch_sum(u, s, out, out, FSDP_F32, &x, u->grad_dtype, 1));
        else if (u->grad_dtype == FSDP_F32) FSDP_TRY(fsdp_stream_copy(s, out, u->acc[k].now, fsdpi_unit_sum_bytes(u)));
        else FSDP_TRY(fsdpi_launch_widen(s, out, u->acc[k].now, u->grad_dtype, numel));
        any = true;
    }
    return FSDP_OK;
}
