/* SPDX-License-Identifier: MIT
 *
 * Units whose slices, or sums of gradients, are kept on another device than they are used on (offload). Two devices at most, one of which is
 * the host, whose addresses streams of any device can use; so whatever goes between them runs on a stream of the other. */
#include "shard/unit.h"

#include "base/error.h"

static fsdp_stream *stream_of(const fsdpi_devctx *d, bool comm)
{
    return comm ? d->comm : d->compute;
}

fsdp_status fsdpi_places_check(const char *unit, const char *a_is, const fsdp_device *a, const char *b_is, const fsdp_device *b)
{
    FSDP_FAIL_IF(a != b && !fsdp_device_host_accessible(a) && !fsdp_device_host_accessible(b), FSDP_ERR_UNSUPPORTED,
                 "unit \"%s\": %s device %s and %s device %s differ: one of them must be the host's memory", unit, a_is, fsdp_device_name(a), b_is, fsdp_device_name(b));
    return FSDP_OK;
}

static bool is_host(const fsdpi_devctx *d)
{
    return fsdp_device_host_accessible(d->dev);
}

fsdp_stream *fsdpi_between(const fsdp_unit *u, bool comm)
{
    return stream_of(!is_host(u->ctx) ? u->ctx : !is_host(u->store) ? u->store : u->sums, comm);
}

fsdp_status fsdpi_between_begin(const fsdp_unit *u, bool comm)
{
    fsdp_stream *s = fsdpi_between(u, comm);
    FSDP_TRY(fsdpi_stream_wait_stream(s, stream_of(u->ctx, comm)));
    FSDP_TRY(fsdpi_stream_wait_stream(s, stream_of(u->store, comm)));
    return fsdpi_stream_wait_stream(s, stream_of(u->sums, comm));
}

fsdp_status fsdpi_between_copy(fsdp_unit *u, void *to, const void *from, size_t bytes)
{
    FSDP_TRY(fsdpi_between_begin(u, false));
    FSDP_TRY(fsdp_stream_copy(fsdpi_between(u, false), to, from, bytes));
    return fsdpi_between_end(u, false);
}

fsdp_status fsdpi_between_end(const fsdp_unit *u, bool comm)
{
    fsdp_stream *s = fsdpi_between(u, comm);
    FSDP_TRY(fsdpi_stream_wait_stream(stream_of(u->ctx, comm), s));
    FSDP_TRY(fsdpi_stream_wait_stream(stream_of(u->store, comm), s));
    return fsdpi_stream_wait_stream(stream_of(u->sums, comm), s);
}
