/* SPDX-License-Identifier: MIT */
#include "shard/footprint.h"

#include "comm/symmetric.h"

static size_t bytes_of(int64_t numel)
{
    return (size_t)numel * sizeof(float);
}

/* A range of shared memory: counters on pages of their own (two a rank, and one for its end), then the bytes. */
static size_t region(const fsdpi_runtime *rt, size_t payload)
{
    size_t counters = (size_t)(2 * rt->comm->size + 1) * sizeof(fsdpi_counter), page = fsdpi_page_size();
    return fsdpi_round_up(counters, page) + fsdpi_round_up(payload, page);
}

/* A flat of a group: a place of `bytes` for each such group. */
static size_t flat(const fsdpi_runtime *rt, const fsdpi_group *group, size_t bytes)
{
    return region(rt, fsdpi_round_up(bytes, fsdpi_page_size()) * (size_t)(rt->comm->size / group->size));
}

static size_t shared(const fsdp_unit *u)
{
    const size_t whole = bytes_of(u->layout.total), narrow = (size_t)u->layout.total * fsdp_dtype_bytes(u->param_dtype);
    size_t n = 0;
    if (u->flat != NULL) n += flat(u->rt, &u->shards, narrow);
    if (u->exact != NULL) n += flat(u->rt, &u->shards, whole);
    if (u->near != NULL) n += flat(u->rt, &u->near_group, u->raw ? narrow : whole);
    if (u->replica_flat != NULL) n += flat(u->rt, &u->replicas, bytes_of(u->layout.edge[u->replicas.size]));
    return n;
}

fsdpi_footprint fsdpi_unit_footprint(const fsdp_unit *u)
{
    const bool copies = !u->rt->comm->transport->zero_copy, narrow = fsdpi_unit_is_narrow(u), apart = fsdpi_unit_is_apart(u);
    const size_t whole = bytes_of(u->layout.total), kept = bytes_of(fsdpi_unit_kept(u)), element = fsdp_dtype_bytes(u->param_dtype);
    fsdpi_footprint f = {
        .master = copies || u->flat == NULL ? kept : 0,
        .published = narrow && copies ? (size_t)fsdpi_unit_kept(u) * element : 0,
        .sum = fsdpi_unit_sum_bytes(u),
        .step = (copies && u->replicas.size > 1 ? kept : 0) + (fsdpi_unit_stages_grads(u) ? bytes_of(fsdpi_unit_slice(u)) : 0),
        .block = u->sums != u->ctx || u->reduce_dtype != FSDP_F32 ? whole : 0,
        .summoned = whole,
        .shared = shared(u),
    };
    if (u->flat == NULL) f.gathered = 0; /* mode none: the masters are whole */
    else if (narrow && !u->raw) f.gathered = whole;
    else f.gathered = copies || apart ? (size_t)u->layout.total * element : 0;
    return f;
}

/* In steps of an eighth of their power of two, a page at least. */
static size_t window_size(size_t bytes)
{
    size_t step = fsdpi_page_size();
    while (step * 16 < bytes) step *= 2;
    return fsdpi_round_up(bytes, step);
}

static size_t window_size_of(const fsdp_unit *u)
{
    return window_size(fsdpi_unit_window_bytes(u));
}

static int same_size(const fsdpi_runtime *rt, const fsdp_unit *like, const fsdp_unit *before)
{
    int n = 0;
    for (const fsdp_unit *u = rt->units; u != before; u = u->following) n += u->sums == like->sums && window_size_of(u) == window_size_of(like);
    return n;
}

fsdpi_windows_footprint fsdpi_windows_footprint_of(const fsdpi_runtime *rt, int open)
{
    fsdpi_windows_footprint f = { 0 };
    int most = open > 3 ? open : 3;
    for (const fsdp_unit *u = rt->units; u != NULL; u = u->following) {
        if (same_size(rt, u, u) > 0) continue; /* counted with the first of its size */
        int of_size = same_size(rt, u, NULL), n = of_size < most ? of_size : most;
        size_t bytes = window_size_of(u);
        f.count += n;
        f.own += rt->comm->transport->zero_copy ? 0 : (size_t)n * 2 * bytes; /* one to write to, one for what comes */
        f.shared += (size_t)n * region(rt, bytes * (size_t)rt->comm->size);
    }
    return f;
}
