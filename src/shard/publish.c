/* SPDX-License-Identifier: MIT
 *
 * How parameters change: a rank is done with the old version, the owner waits for all ranks to be, writes its master
 * slice, and publishes it. Initialising, summoning, loading and optimizer steps all go through here.
 *
 * Where ranks keep replicas (mode none, hybrid), what each writes by itself (initial values, a summon) is made the same: an
 * element is taken from the rank that reduces its gradient. An optimizer computes the same on all, so a step need not. */
#include "shard/unit.h"

#include "base/error.h"

/* Masters that others read where they lie, beside what is published below fp32. */
static bool exact_in_place(const fsdp_unit *u)
{
    return u->exact != NULL && u->rt->comm->transport->zero_copy;
}

fsdp_status fsdpi_unit_done(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_PUBLISH, u->name, (uint64_t)u->layout.total * sizeof(float)));
    u->said_done = true;
    FSDP_TRY(fsdpi_stream_wait_stream(u->ctx->comm, u->ctx->compute));
    if (u->flat != NULL) FSDP_TRY(t->flat_done(u->flat, u->version, u->ctx->comm));
    if (exact_in_place(u)) FSDP_TRY(t->flat_done(u->exact, u->exact_version, u->ctx->comm));
    if (u->replica_flat == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->comm, u->store->compute));
    return t->flat_done(u->replica_flat, u->replica_version, u->store->comm);
}

fsdp_status fsdpi_unit_open(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    if (u->flat != NULL) FSDP_TRY(t->flat_open(u->flat, u->version + 1, u->store->comm));
    if (exact_in_place(u)) FSDP_TRY(t->flat_open(u->exact, u->exact_version + 1, u->store->comm));
    if (u->replica_flat != NULL) FSDP_TRY(t->flat_open(u->replica_flat, u->replica_version + 1, u->store->comm));
    return fsdpi_stream_wait_stream(u->store->compute, u->store->comm);
}

/* What all replicas published, into the masters. */
static fsdp_status collect(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    size_t bytes = (size_t)fsdpi_unit_kept(u) * sizeof(float);
    FSDP_TRY(t->flat_gather(u->replica_flat, u->replica_version, t->zero_copy ? NULL : u->master, u->store->comm));
    if (t->zero_copy && bytes > 0) FSDP_TRY(fsdp_stream_copy(u->store->comm, u->master, t->flat_whole(u->replica_flat), bytes));
    return fsdpi_stream_wait_stream(u->store->compute, u->store->comm);
}

fsdp_status fsdpi_unit_unify(fsdp_unit *u)
{
    if (u->replica_flat == NULL) return FSDP_OK;
    u->rt->comm->stats.publishes++;
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->comm, u->store->compute));
    FSDP_TRY(u->rt->comm->transport->flat_publish(u->replica_flat, u->replica_version + 1, u->master + (u->lo - u->keep_lo), u->store->comm));
    u->replica_version++;
    return collect(u);
}

static const void *slice_of(const fsdp_unit *u)
{
    return u->published != NULL ? u->published : u->master;
}

static fsdp_status round_masters(fsdp_unit *u)
{
    if (u->published == NULL) return FSDP_OK;
    return fsdpi_launch_narrow(u->store->compute, u->published, u->param_dtype, u->master, fsdpi_unit_kept(u));
}

fsdp_status fsdpi_unit_publish(fsdp_unit *u)
{
    u->pinned = false;
    if (u->flat == NULL) return FSDP_OK;
    if (u->rt->comm->size > 1) u->rt->comm->stats.publishes++;
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    FSDP_TRY(round_masters(u));
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->comm, u->store->compute));
    FSDP_TRY(t->flat_publish(u->flat, u->version + 1, slice_of(u), u->store->comm));
    u->near_is_current = false;
    u->said_done = false;
    u->version++; /* only where it was published: a rank must not wait for what it never told */
    if (exact_in_place(u)) {
        FSDP_TRY(t->flat_publish(u->exact, u->exact_version + 1, u->master, u->store->comm));
        u->exact_version++;
        u->exact_of = u->version;
    }
    /* Whole parameters of the old version are of no use; a unit that stays whole keeps the buffer and gathers into it. A summon
     * that ends reshards by itself. */
    if (!fsdpi_unit_stays_whole(u) && u->holders == 0) return fsdpi_unit_reshard(u);
    return FSDP_OK;
}

void fsdpi_unit_settle(fsdp_unit *u)
{
    fsdpi_error kept;
    if (!u->said_done) return;
    u->said_done = false;
    fsdpi_error_save(&kept);
    (void)!fsdpi_unit_publish(u); /* what fails is in its stream, and will be said there */
    fsdpi_error_restore(&kept);
}

fsdp_status fsdpi_unit_start_over(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    u->version = u->replica_version = u->whole_version = u->exact_version = u->exact_of = 0;
    FSDP_TRY(round_masters(u));
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->comm, u->store->compute));
    if (u->flat != NULL) FSDP_TRY(t->flat_restart(u->flat, slice_of(u), u->store->comm));
    if (u->exact != NULL) FSDP_TRY(t->flat_restart(u->exact, u->master, u->store->comm));
    if (u->near != NULL) FSDP_TRY(t->flat_restart(u->near, NULL, u->ctx->comm));
    u->near_version = 0;
    u->near_is_current = u->said_done = false;
    return u->replica_flat != NULL ? t->flat_restart(u->replica_flat, u->master + (u->lo - u->keep_lo), u->store->comm) : FSDP_OK;
}

fsdp_status fsdpi_unit_catch_up(fsdp_unit *u)
{
    if (u->replica_flat == NULL) return FSDP_OK;
    if (u->flat == NULL) return collect(u);
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    FSDP_TRY(t->flat_done(u->flat, 0, u->ctx->comm)); /* on the stream that says so ever after: it must not be said late */
    if (exact_in_place(u)) FSDP_TRY(t->flat_done(u->exact, 0, u->ctx->comm));
    FSDP_TRY(t->flat_open(u->flat, 1, u->store->comm));
    if (exact_in_place(u)) FSDP_TRY(t->flat_open(u->exact, 1, u->store->comm));
    FSDP_TRY(collect(u));
    return fsdpi_unit_publish(u);
}
