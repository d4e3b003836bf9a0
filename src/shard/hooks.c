/* SPDX-License-Identifier: MIT
 *
 * A program's own kernels on the way of gradients. Where ranks share memory a reduce hook reads the windows where they are; where
 * they do not, what comes from each rank is set aside until all has come. */
#include "shard/hooks.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/within.h"
#include "shard/kernels.h"

#include <math.h>
#include <string.h>

/* ---- kernels ---- */

typedef struct post_args {
    fsdp_post_fn fn;
    void *arg;
    float *grad;
    const fsdp_slice *part;
    int count;
} post_args;

static fsdp_status k_post(const fsdp_kernel *k, const void *args)
{
    const post_args *a = args;
    fsdpi_within w;
    fsdpi_within_begin(&w, "a post hook (fsdp_unit_set_grad_hooks())");
    fsdp_status st = a->fn(k, fsdp_kernel_ptr(k, a->grad), a->part, a->count, a->arg);
    fsdpi_within_end(&w);
    return st;
}

typedef struct reduce_args {
    fsdp_reduce_fn fn;
    void *arg;
    fsdp_comm *comm;
    float *out;
    const float *base;
    int64_t numel;
    const fsdp_slice *part;
    int count, ranks;
    const float *piece[FSDP_REDUCE_RANKS];
} reduce_args;
_Static_assert(sizeof(reduce_args) <= 4096, "launched in one piece");

static fsdp_status k_reduce(const fsdp_kernel *k, const void *args)
{
    const reduce_args *a = args;
    const float *piece[FSDP_REDUCE_RANKS];
    int64_t start = fsdpi_now_ns();
    for (int r = 0; r < a->ranks; r++) piece[r] = fsdp_kernel_ptr(k, a->piece[r]);
    fsdp_reduction reduction = { .out = fsdp_kernel_ptr(k, a->out),
                                 .base = fsdp_kernel_ptr(k, a->base),
                                 .piece = piece,
                                 .ranks = a->ranks,
                                 .numel = a->numel,
                                 .part = a->part,
                                 .count = a->count };
    fsdpi_within w;
    fsdpi_within_begin(&w, "a reduce hook (fsdp_unit_set_grad_hooks())");
    fsdp_status st = a->fn(k, &reduction, a->arg);
    fsdpi_within_end(&w);
    __atomic_fetch_add(&a->comm->stats.reduce_ns, (uint64_t)(fsdpi_now_ns() - start), __ATOMIC_RELAXED);
    return st;
}

fsdp_status fsdp_reduce_sum(const fsdp_kernel *k, const fsdp_reduction *r, void *arg)
{
    (void)arg;
    const float *base = r->base;
    for (int at = 0; at < r->ranks; at += FSDPI_SUM_MOST) {
        int n = r->ranks - at < FSDPI_SUM_MOST ? r->ranks - at : FSDPI_SUM_MOST;
        fsdpi_shard_kernels_get(k->isa)->sum(r->out, base, r->piece + at, n, (size_t)r->numel, false);
        base = r->out;
    }
    return FSDP_OK;
}

fsdp_status fsdp_post_divide(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg)
{
    float by = *(const float *)arg;
    (void)k;
    FSDP_FAIL_IF(!(by > 0 && isfinite(by)), FSDP_ERR_INVALID, "fsdp_post_divide: gradients cannot be divided by %g", (double)by);
    for (int i = 0; i < count; i++) {
        float *g = grad + part[i].state_offset;
        for (int64_t j = 0; j < part[i].numel; j++) g[j] /= by;
    }
    return FSDP_OK;
}

/* ---- where they are launched ---- */

fsdp_status fsdpi_hooks_post(fsdp_unit *u, float *grad)
{
    const fsdpi_hooks *h = u->hooks;
    if (h == NULL || h->fn.post == NULL) return FSDP_OK;
    post_args a = { h->fn.post, h->fn.arg, grad, h->whole, h->whole_count };
    return fsdp_stream_launch(u->ctx->compute, k_post, &a, sizeof(a));
}

fsdp_status fsdpi_hooks_reduce(fsdp_unit *u, fsdpi_window *window, uint32_t use, void *out, const void *base)
{
    const fsdpi_hooks *h = u->hooks;
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    int64_t numel = fsdpi_unit_slice(u);
    void *sum = out;
    if (h->sums != NULL) {
        if (base != NULL) FSDP_TRY(fsdpi_launch_widen(u->sums->comm, h->sums, base, u->grad_dtype, numel));
        base = base != NULL ? h->sums : NULL;
        out = h->sums + numel;
    }
    reduce_args a = { .fn = h->fn.reduce, .arg = h->fn.arg, .comm = u->rt->comm, .out = out, .base = base, .numel = numel, .part = h->own, .count = h->own_count, .ranks = u->rt->comm->size };
    size_t element = fsdp_dtype_bytes(u->reduce_dtype), lo = (size_t)u->lo * element, hi = (size_t)u->hi * element;
    for (int r = 0; r < a.ranks; r++) {
        const void *p;
        FSDP_TRY(t->window_peer(window, use, r, lo, hi, u->name, u->sums->comm, &p));
        if (h->pieces != NULL) { /* what comes next comes to the same place, or it is narrow */
            float *aside = h->pieces + r * numel;
            if (u->reduce_dtype == FSDP_F32) FSDP_TRY(fsdp_stream_copy(u->sums->comm, aside, p, hi - lo));
            else FSDP_TRY(fsdpi_launch_widen(u->sums->comm, aside, p, u->reduce_dtype, numel));
            p = aside;
        }
        a.piece[r] = p;
    }
    FSDP_TRY(fsdp_stream_launch(u->sums->comm, k_reduce, &a, sizeof(a)));
    return h->sums != NULL ? fsdpi_launch_narrow(u->sums->comm, sum, u->grad_dtype, out, numel) : FSDP_OK;
}

/* ---- setting them ---- */

static int make_parts(fsdp_slice *out, const fsdp_unit *u, int64_t lo, int64_t hi, fsdpi_segment *segment)
{
    int n = fsdpi_layout_cut(&u->layout, lo, hi, segment), parts = 0;
    for (int i = 0; i < n; i++) {
        const fsdpi_segment *g = &segment[i];
        if (u->frozen[g->param]) continue;
        out[parts++] = (fsdp_slice){ .name = u->layout.param[g->param].name, .param = g->param, .offset = g->offset, .numel = g->numel, .state_offset = g->at - lo };
    }
    return parts;
}

static void find_parts(const fsdp_unit *u, fsdpi_hooks *h)
{
    h->whole_count = make_parts(h->whole, u, 0, u->layout.total, h->segment);
    h->own_count = make_parts(h->own, u, u->lo, u->hi, h->segment);
}

fsdp_status fsdpi_hooks_find_parts(fsdp_unit *u)
{
    if (u->hooks == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_runtime_sync(u->rt)); /* kernels may still read them */
    find_parts(u, u->hooks);
    return FSDP_OK;
}

/* What a reduce hook reads and writes that is not there as fp32. */
static fsdp_status make_room(fsdpi_hooks *h, const fsdp_unit *u)
{
    size_t slice = (size_t)fsdpi_unit_slice(u) * sizeof(float);
    void *p;
    if (slice > 0 && (!u->rt->comm->transport->zero_copy || u->reduce_dtype != FSDP_F32)) {
        FSDP_TRY(fsdpi_arena_alloc(u->sums->arena, (size_t)u->rt->comm->size * slice, &p));
        h->pieces = p;
    }
    if (slice > 0 && u->grad_dtype != FSDP_F32) {
        FSDP_TRY(fsdpi_arena_alloc(u->sums->arena, 2 * slice, &p));
        h->sums = p;
    }
    return FSDP_OK;
}

static fsdp_status make_hooks(fsdpi_hooks **out, fsdp_unit *u, const fsdp_grad_hooks *fn)
{
    size_t n = (size_t)u->layout.count;
    fsdpi_hooks *h;
    FSDPI_NEW(h, 1);
    *out = h;
    h->fn = *fn;
    h->whole = fsdpi_calloc(n, sizeof(*h->whole));
    h->own = fsdpi_calloc(n, sizeof(*h->own));
    h->segment = fsdpi_calloc(n, sizeof(*h->segment));
    FSDP_FAIL_IF(h->whole == NULL || h->own == NULL || h->segment == NULL, FSDP_ERR_NOMEM, "unit \"%s\": no memory for its hooks", u->name);
    find_parts(u, h);
    return fn->reduce != NULL ? make_room(h, u) : FSDP_OK;
}

static void free_hooks(fsdp_unit *u, fsdpi_hooks *h)
{
    if (h == NULL) return;
    fsdpi_arena_free(u->sums->arena, h->pieces);
    fsdpi_arena_free(u->sums->arena, h->sums);
    fsdpi_free(h->whole);
    fsdpi_free(h->own);
    fsdpi_free(h->segment);
    fsdpi_free(h);
}

void fsdpi_hooks_drop(fsdp_unit *u)
{
    free_hooks(u, u->hooks);
    u->hooks = NULL;
}

fsdp_status fsdp_unit_set_grad_hooks(fsdp_unit *u, const fsdp_grad_hooks *hooks)
{
    FSDPI_CALL(u->rt->comm);
    static const fsdp_grad_hooks none = { 0 };
    if (hooks == NULL) hooks = &none;
    bool any = hooks->post != NULL || hooks->reduce != NULL;
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_SET_HOOKS, NULL));
    FSDP_FAIL_IF(hooks->reduce != NULL && u->rt->comm->size > FSDP_REDUCE_RANKS, FSDP_ERR_UNSUPPORTED, "fsdp_unit_set_grad_hooks: unit \"%s\": a reduce hook on %d ranks: at most %d",
                 u->name, u->rt->comm->size, FSDP_REDUCE_RANKS);
    fsdpi_hooks *h = NULL;
    fsdp_status st = any ? make_hooks(&h, u, hooks) : FSDP_OK;
    if (st == FSDP_OK) st = fsdpi_runtime_sync(u->rt); /* kernels of the last pass may still want the old ones */
    unsigned kinds = (hooks->post != NULL ? 1u : 0) | (hooks->reduce != NULL ? 2u : 0);
    fsdp_status differ = fsdpi_comm_tag(u->rt->comm, FSDPI_OP_HOOKS, u->name, kinds);
    if (st == FSDP_OK) st = differ;
    st = fsdp_comm_agree(u->rt->comm, st);
    if (st != FSDP_OK) {
        free_hooks(u, h);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    fsdpi_hooks_drop(u);
    u->hooks = h;
    return FSDP_OK;
}
