/* SPDX-License-Identifier: MIT
 *
 * Resharding to fewer ranks after a forward (reshard_group). The whole unit, as compute had it, stays spread over a group of
 * neighbours, each with one part; the backward gathers from them and not from all ranks. A flat like any other: it has a
 * version for each version of the parameters that somebody kept. */
#include "shard/unit.h"

#include "base/error.h"
#include "shard/pass.h"

static fsdp_dtype near_dtype(const fsdp_unit *u)
{
    return u->raw ? u->param_dtype : FSDP_F32;
}

/* Member m of the group keeps elements [near_edge(m), near_edge(m + 1)). */
static int64_t near_edge(const fsdp_unit *u, int m)
{
    return u->layout.edge[m * (u->layout.size / u->near_group.size)];
}

fsdp_status fsdpi_near_create(fsdp_unit *u, size_t *edges)
{
    fsdp_comm *comm = u->rt->comm;
    const fsdpi_group *g = &u->near_group;
    for (int m = 0; m <= g->size; m++) edges[m] = (size_t)near_edge(u, m) * fsdp_dtype_bytes(near_dtype(u));
    fsdp_status st = comm->transport->flat_create(&u->near, comm, *g, u->ctx->dev, edges, edges[g->size], u->name);
    return fsdp_comm_agree(comm, st);
}

fsdp_status fsdpi_near_keep(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    if (u->near == NULL || u->near_is_current || u->whole_exact != (u->param_dtype == FSDP_F32)) return FSDP_OK;
    FSDP_TRY(fsdpi_unit_tag(u, FSDPI_OP_NEAR));
    int64_t from = near_edge(u, fsdpi_group_member(&u->near_group, u->rt->comm->rank));
    const char *part = (const char *)u->whole + (size_t)from * fsdp_dtype_bytes(u->whole_dtype);
    FSDP_TRY(t->flat_done(u->near, u->near_version, u->ctx->comm));
    FSDP_TRY(t->flat_open(u->near, u->near_version + 1, u->ctx->comm));
    FSDP_TRY(t->flat_publish(u->near, u->near_version + 1, part, u->ctx->comm));
    u->near_version++;
    u->near_is_current = true;
    return FSDP_OK;
}
