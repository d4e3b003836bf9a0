/* SPDX-License-Identifier: MIT
 *
 * How parameters change: a rank is done with the old version, the owner waits for all ranks to be, writes its master
 * slice, and publishes it. Initialising, summoning, loading and optimizer steps all go through here.
 *
 * In mode none every rank has all masters. What each rank writes there by itself (initial values, a summon) is made
 * the same everywhere: each rank's slice of its own values counts, as in the sharded modes. */
#include "shard/unit.h"

#include "base/error.h"

/* The flat that carries parameters, and its version counter. In mode none gradients use the same one. */
static fsdpi_flat *carrier(const fsdp_unit *u)
{
    return u->mode == FSDP_MODE_NONE ? u->grad_flat : u->flat;
}

static uint32_t *version_of(fsdp_unit *u)
{
    return u->mode == FSDP_MODE_NONE ? &u->grad_version : &u->version;
}

fsdp_status fsdpi_unit_done(fsdp_unit *u)
{
    FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_PUBLISH, u->name, (uint64_t)u->layout.total * sizeof(float)));
    FSDP_TRY(fsdpi_stream_wait_stream(u->ctx->comm, u->ctx->compute));
    return u->rt->comm->transport->flat_done(carrier(u), *version_of(u), u->ctx->comm);
}

fsdp_status fsdpi_unit_open(fsdp_unit *u)
{
    FSDP_TRY(u->rt->comm->transport->flat_open(carrier(u), *version_of(u) + 1, u->ctx->comm));
    return fsdpi_stream_wait_stream(u->ctx->compute, u->ctx->comm);
}

/* Mode none: the slices that all ranks published, into the masters. */
static fsdp_status collect(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    size_t bytes = (size_t)u->layout.total * sizeof(float);
    FSDP_TRY(t->flat_gather(u->grad_flat, u->grad_version, t->zero_copy ? NULL : u->master, u->ctx->comm));
    if (t->zero_copy) FSDP_TRY(fsdp_stream_copy(u->ctx->comm, u->master, t->flat_whole(u->grad_flat), bytes));
    return fsdpi_stream_wait_stream(u->ctx->compute, u->ctx->comm);
}

/* The next version, and only where it was published does it count: a rank must not wait for what it never told. */
static fsdp_status publish_next(fsdp_unit *u, const float *slice)
{
    FSDP_TRY(fsdpi_stream_wait_stream(u->ctx->comm, u->ctx->compute));
    FSDP_TRY(u->rt->comm->transport->flat_publish(carrier(u), *version_of(u) + 1, slice, u->ctx->comm));
    ++*version_of(u);
    return FSDP_OK;
}

fsdp_status fsdpi_unit_publish(fsdp_unit *u)
{
    if (u->rt->comm->size > 1) u->rt->comm->stats.publishes++;
    if (u->mode == FSDP_MODE_NONE) {
        FSDP_TRY(publish_next(u, u->master + u->lo));
        return collect(u);
    }
    FSDP_TRY(publish_next(u, u->master));
    /* Whole parameters of the old version are of no use; mode optimizer keeps the buffer and gathers into it. A summon
     * that ends reshards by itself. */
    if (u->mode != FSDP_MODE_OPTIMIZER && u->holders == 0) return fsdpi_unit_reshard(u);
    return FSDP_OK;
}

fsdp_status fsdpi_unit_start_over(fsdp_unit *u)
{
    const float *slice = u->mode == FSDP_MODE_NONE ? u->master + u->lo : u->master;
    *version_of(u) = 0;
    u->whole_version = 0;
    FSDP_TRY(fsdpi_stream_wait_stream(u->ctx->comm, u->ctx->compute));
    return u->rt->comm->transport->flat_restart(carrier(u), slice, u->ctx->comm);
}

fsdp_status fsdpi_unit_catch_up(fsdp_unit *u)
{
    return u->mode == FSDP_MODE_NONE ? collect(u) : FSDP_OK;
}
