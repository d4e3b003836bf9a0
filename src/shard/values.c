/* SPDX-License-Identifier: MIT
 *
 * Initial values of a unit. Each rank makes those of the elements that it keeps, beside the old ones; when all ranks
 * have theirs, they are published. */
#include "shard/unit.h"

#include "base/alloc.h"
#include "base/error.h"

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

/* Into device memory at `to`; in pieces through host memory where the host may not write there. */
static fsdp_status fill_segment(fsdp_unit *u, const fsdpi_segment *g, float *to, fsdp_fill_fn fill, void *arg)
{
    const char *name = u->layout.param[g->param].name;
    if (fsdp_device_host_accessible(u->ctx->dev)) return fill(name, g->param, g->offset, g->numel, to, arg);
    enum { PIECE = 1 << 16 };
    int64_t piece = g->numel < PIECE ? g->numel : PIECE;
    float *host;
    FSDPI_NEW(host, piece);
    fsdp_status st = FSDP_OK;
    for (int64_t at = 0; at < g->numel && st == FSDP_OK; at += piece) {
        int64_t n = g->numel - at < piece ? g->numel - at : piece;
        st = fill(name, g->param, g->offset + at, n, host, arg);
        if (st == FSDP_OK) st = fsdp_stream_copy(u->ctx->compute, to + at, host, (size_t)n * sizeof(float));
        if (st == FSDP_OK) st = fsdp_stream_sync(u->ctx->compute);
    }
    fsdpi_free(host);
    return st;
}

/* New values are made beside the old ones: where a rank has none for its part, all keep the old ones. */
static fsdp_status make_values(fsdp_unit *u, float *to, fsdp_fill_fn fill, void *arg)
{
    for (int i = 0; i < u->slice_count; i++) {
        fsdp_status st = fill_segment(u, &u->segments[i], to + (u->segments[i].at - fsdpi_unit_kept_from(u)), fill, arg);
        if (st != FSDP_OK) return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    return FSDP_OK;
}

static fsdp_status take_values(fsdp_unit *u, const float *from)
{
    for (int i = 0; i < u->slice_count; i++) {
        int64_t at = u->segments[i].at - fsdpi_unit_kept_from(u);
        FSDP_TRY(fsdp_stream_copy(u->ctx->compute, u->master + at, from + at, (size_t)u->segments[i].numel * sizeof(float)));
    }
    return fsdpi_unit_publish(u);
}

fsdp_status fsdp_unit_fill(fsdp_unit *u, fsdp_fill_fn fill, void *arg)
{
    FSDP_FAIL_IF(fill == NULL, FSDP_ERR_INVALID, "fsdp_unit_fill: unit \"%s\": no function", u->name);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_FILL, NULL));
    FSDP_TRY(fsdpi_unit_done(u));
    FSDP_TRY(fsdpi_unit_open(u));
    void *p = NULL;
    fsdp_status st = fsdpi_arena_alloc(u->ctx->arena, (size_t)(fsdpi_unit_kept_to(u) - fsdpi_unit_kept_from(u)) * sizeof(float), &p);
    if (st == FSDP_OK) st = make_values(u, p, fill, arg);
    st = fsdp_comm_agree(u->rt->comm, st);
    if (st == FSDP_OK) st = take_values(u, p);
    fsdpi_arena_free(u->ctx->arena, p);
    if (st != FSDP_OK) return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_init(fsdp_unit *unit, fsdp_init_fn init, void *arg)
{
    FSDP_FAIL_IF(init == NULL, FSDP_ERR_INVALID, "fsdp_unit_init: unit \"%s\": no function", unit->name);
    return fsdp_unit_fill(unit, fill_elements, &(element_fill){ init, arg });
}
