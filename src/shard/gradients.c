/* SPDX-License-Identifier: MIT
 *
 * Reading gradients: what is pending on this rank, without asking the others; and in a step, whole. */
#include "shard/unit.h"

#include "base/alloc.h"
#include "base/convert.h"
#include "base/error.h"

#include <string.h>

/* The part of parameter i in flat elements [lo, hi). */
static fsdpi_segment part_of(const fsdp_unit *u, int i, int64_t lo, int64_t hi)
{
    int64_t at = u->layout.at[i], end = at + u->layout.numel[i], first = at > lo ? at : lo, last = end < hi ? end : hi;
    if (first >= last) return (fsdpi_segment){ .param = i };
    return (fsdpi_segment){ .param = i, .offset = first - at, .numel = last - first, .at = first };
}

static fsdp_status read_device(fsdp_unit *u, void *out, const void *from, size_t bytes)
{
    FSDP_TRY(fsdpi_between_copy(u, out, from, bytes));
    return fsdp_stream_sync(fsdpi_between(u, false));
}

/* ---- pending ---- */

unsigned fsdp_unit_pending(const fsdp_unit *u, int i)
{
    unsigned bits = (fsdpi_unsent_any(u) ? FSDP_PENDING_OWN : 0u) | (fsdpi_grad_any(u) ? FSDP_PENDING_REDUCED : 0u);
    return i < 0 || i >= u->layout.count || u->frozen[i] ? 0 : bits;
}

/* Elements of an accumulator. */
static fsdp_status read_sum(fsdp_unit *u, float *out, const void *sum, int64_t at, int64_t numel)
{
    if (u->grad_dtype == FSDP_F32) return read_device(u, out, (const float *)sum + at, (size_t)numel * sizeof(float));
    size_t element = fsdp_dtype_bytes(u->grad_dtype);
    void *narrow = fsdpi_calloc((size_t)numel, element);
    FSDP_FAIL_IF(narrow == NULL, FSDP_ERR_NOMEM, "unit \"%s\": no memory to read a gradient", u->name);
    fsdp_status st = read_device(u, narrow, (const char *)sum + (size_t)at * element, (size_t)numel * element);
    if (st == FSDP_OK) fsdpi_convert_to_f32(fsdpi_isa_get(), u->grad_dtype, out, narrow, (size_t)numel);
    fsdpi_free(narrow);
    return st;
}

/* Rounds are added as a step adds them: each whole, one after another. */
static fsdp_status add_rounds(fsdp_unit *u, const fsdpi_accumulator *a, int rounds, int64_t at, int64_t numel, float *out)
{
    float *more = NULL;
    fsdp_status st = FSDP_OK;
    bool any = false;
    for (int k = 0; k < rounds && st == FSDP_OK; k++) {
        if (!a[k].has) continue;
        if (any && more == NULL) FSDPI_NEW(more, numel);
        st = read_sum(u, any ? more : out, a[k].now, at, numel);
        for (int64_t j = 0; any && st == FSDP_OK && j < numel; j++) out[j] += more[j];
        any = true;
    }
    fsdpi_free(more);
    return st;
}

fsdp_status fsdp_unit_read_pending(fsdp_unit *u, int i, fsdp_pending which, int64_t *offset, int64_t *numel, float *out)
{
    FSDP_TRY(fsdpi_call_may_read(u->rt->comm, "fsdp_unit_read_pending"));
    FSDP_TRY(fsdpi_unit_check_index(u, i, "fsdp_unit_read_pending"));
    FSDP_FAIL_IF(which != FSDP_PENDING_OWN && which != FSDP_PENDING_REDUCED, FSDP_ERR_INVALID, "fsdp_unit_read_pending: which is %d: one of the two", (int)which);
    FSDP_FAIL_IF((fsdp_unit_pending(u, i) & (unsigned)which) == 0, FSDP_ERR_STATE, "fsdp_unit_read_pending: unit \"%s\": parameter \"%s\" has no such gradient: ask fsdp_unit_pending() first (it is %s%s)",
                 u->name, u->layout.param[i].name, fsdp_unit_state(u), u->frozen[i] ? ", the parameter is frozen" : "");
    bool own = which == FSDP_PENDING_OWN;
    fsdpi_segment g = own ? part_of(u, i, 0, u->layout.total) : part_of(u, i, u->lo, u->hi);
    if (offset != NULL) *offset = g.offset;
    if (numel != NULL) *numel = g.numel;
    if (out == NULL || g.numel == 0) return FSDP_OK;
    FSDP_TRY(fsdpi_stream_wait_stream(u->sums->compute, u->sums->comm));
    if (own) return add_rounds(u, u->unsent, u->unsent_rounds, g.at, g.numel, out);
    return add_rounds(u, u->acc, u->rounds, g.at - u->lo, g.numel, out);
}

/* ---- in a step ---- */

/* What rank r reduces of it. */
static fsdpi_segment part_of_rank(const fsdp_unit *u, int i, int r)
{
    const int64_t *edge = &u->layout.edge[fsdpi_unit_piece(u, r)];
    return part_of(u, i, edge[0], edge[1]);
}

/* Each rank's part, the longest deciding how much all tell. */
static fsdp_status exchange_parts(fsdp_unit *u, int i, float *out)
{
    fsdp_comm *comm = u->rt->comm;
    int64_t most = 0;
    for (int r = 0; r < comm->size; r++) {
        int64_t n = part_of_rank(u, i, r).numel;
        most = n > most ? n : most;
    }
    float *mem = fsdpi_calloc((size_t)(comm->size + 1) * (size_t)most, sizeof(*mem));
    fsdp_status st = mem != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "unit \"%s\": no memory to read a gradient", u->name);
    fsdpi_segment g = part_of(u, i, u->lo, u->hi);
    if (st == FSDP_OK && g.numel > 0) st = read_device(u, mem, u->step_grad + (g.at - u->keep_lo), (size_t)g.numel * sizeof(float));
    st = fsdp_comm_agree(comm, st);
    if (st == FSDP_OK && most > 0) st = fsdpi_comm_exchange(comm, FSDPI_OP_READ_GRAD, u->name, mem, (size_t)most * sizeof(float), mem + most);
    for (int r = 0; r < comm->size && st == FSDP_OK && out != NULL; r++) {
        g = part_of_rank(u, i, r);
        if (g.numel > 0) memcpy(out + g.offset, mem + most * (r + 1), (size_t)g.numel * sizeof(float));
    }
    fsdpi_free(mem);
    return st;
}

fsdp_status fsdp_unit_read_grad(fsdp_unit *u, int i, float *out)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_unit_check_index(u, i, "fsdp_unit_read_grad"));
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_READ_GRAD, NULL));
    FSDP_FAIL_IF(u->frozen[i], FSDP_ERR_STATE, "fsdp_unit_read_grad: unit \"%s\": parameter \"%s\" is frozen, it has no gradient: ask fsdp_unit_frozen() first", u->name,
                 u->layout.param[i].name);
    FSDP_FAIL_IF(u->step_grad == NULL, FSDP_ERR_STATE, "fsdp_unit_read_grad: unit \"%s\" has no gradients in this step: ask fsdp_slice.grad first", u->name);
    if (u->shards.size > 1) return exchange_parts(u, i, out);
    FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_READ_GRAD, u->name, (uint64_t)u->layout.numel[i] * sizeof(float)));
    return out != NULL && u->layout.numel[i] > 0 ? read_device(u, out, u->step_grad + u->layout.at[i], (size_t)u->layout.numel[i] * sizeof(float)) : FSDP_OK;
}
