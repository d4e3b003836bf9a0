/* SPDX-License-Identifier: MIT */
#include "shard/spread.h"

#include "base/error.h"

static const fsdpi_transport_ops *transport_of(const fsdpi_spread *s)
{
    return s->unit->rt->comm->transport;
}

fsdp_status fsdpi_spread_open(fsdpi_spread *s, fsdp_unit *u, fsdpi_devctx *place)
{
    fsdpi_pooled *w;
    FSDP_TRY(fsdpi_window_find(&w, u->rt, place, (size_t)u->layout.total * sizeof(float)));
    *s = (fsdpi_spread){ .unit = u, .place = place, .window = w };
    FSDP_TRY(transport_of(s)->window_acquire(w->window, w->uses + 1, u->name, place->comm));
    w->uses++;
    w->held = true;
    s->buffer = transport_of(s)->window_buffer(w->window);
    return fsdpi_stream_wait_stream(place->compute, place->comm);
}

fsdp_status fsdpi_spread_post(fsdpi_spread *s, bool full)
{
    fsdp_unit *u = s->unit;
    FSDP_TRY(fsdpi_stream_wait_stream(s->place->comm, s->place->compute));
    FSDP_TRY(transport_of(s)->window_post(s->window->window, s->window->uses, full ? (size_t)u->layout.total * sizeof(float) : 0, s->place->comm));
    s->window->held = false;
    s->window->posted = ++u->rt->posts;
    return FSDP_OK;
}

fsdp_status fsdpi_spread_read(fsdpi_spread *s, int r, int64_t from, int64_t to, float *out)
{
    const void *p;
    if (from >= to) return FSDP_OK;
    fsdp_stream *stream = fsdpi_between(s->unit, true);
    FSDP_TRY(fsdpi_between_begin(s->unit, true));
    FSDP_TRY(transport_of(s)->window_peer(s->window->window, s->window->uses, r, (size_t)from * sizeof(float), (size_t)to * sizeof(float), s->unit->name, stream, &p));
    FSDP_TRY(fsdp_stream_copy(stream, out, p, (size_t)(to - from) * sizeof(float)));
    return fsdpi_between_end(s->unit, true);
}

fsdp_status fsdpi_spread_close(fsdpi_spread *s)
{
    fsdp_unit *u = s->unit;
    FSDP_TRY(transport_of(s)->window_take(s->window->window, s->window->uses, s->place->comm));
    FSDP_TRY(fsdpi_stream_wait_stream(u->ctx->compute, u->ctx->comm));
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->compute, u->store->comm));
    return fsdpi_stream_wait_stream(u->sums->compute, u->sums->comm);
}
