/* SPDX-License-Identifier: MIT
 *
 * Types below fp32. Masters and sums of gradients are fp32 always. What is published may be rounded (param_dtype), and so may
 * a leaf's gradient on its way to the owners (reduce_dtype). Each value is rounded once, by itself: so the bits do not depend
 * on how work is divided. */
#include "shard/unit.h"

#include "base/convert.h"
#include "base/error.h"
#include "shard/pass.h"

typedef struct cast_args {
    void *to;
    const void *from;
    fsdp_dtype dtype; /* of the side that is not fp32 */
    bool narrows;
    int64_t numel;
} cast_args;

enum { CAST_PIECE = 1 << 16 };

typedef struct cast_job {
    fsdpi_isa isa;
    cast_args a; /* addresses usable here */
} cast_job;

static void cast_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const cast_job *j = arg;
    int64_t at = i * CAST_PIECE, n = j->a.numel - at < CAST_PIECE ? j->a.numel - at : CAST_PIECE;
    size_t narrow = (size_t)at * fsdp_dtype_bytes(j->a.dtype);
    if (j->a.narrows) fsdpi_convert_from_f32(j->isa, j->a.dtype, (char *)j->a.to + narrow, (const float *)j->a.from + at, (size_t)n);
    else fsdpi_convert_to_f32(j->isa, j->a.dtype, (float *)j->a.to + at, (const char *)j->a.from + narrow, (size_t)n);
}

static fsdp_status k_cast(const fsdp_kernel *k, const void *args)
{
    cast_job j = { k->isa, *(const cast_args *)args };
    j.a.to = fsdp_kernel_ptr(k, j.a.to);
    j.a.from = fsdp_kernel_ptr(k, j.a.from);
    fsdpi_kernel_parallel(k, (j.a.numel + CAST_PIECE - 1) / CAST_PIECE, cast_piece, &j);
    return FSDP_OK;
}

fsdp_status fsdpi_launch_narrow(fsdp_stream *s, void *to, fsdp_dtype dtype, const float *from, int64_t numel)
{
    if (numel == 0) return FSDP_OK;
    return fsdp_stream_launch(s, k_cast, &(cast_args){ to, from, dtype, true, numel }, sizeof(cast_args));
}

fsdp_status fsdpi_launch_widen(fsdp_stream *s, float *to, const void *from, fsdp_dtype dtype, int64_t numel)
{
    if (numel == 0) return FSDP_OK;
    return fsdp_stream_launch(s, k_cast, &(cast_args){ to, from, dtype, false, numel }, sizeof(cast_args));
}

bool fsdpi_unit_is_narrow(const fsdp_unit *u)
{
    return u->param_dtype != FSDP_F32;
}

bool fsdpi_unit_offers_exact(const fsdp_unit *u)
{
    return u->exact == NULL || u->exact_of == u->version;
}

fsdp_status fsdpi_unit_offer_exact(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    if (fsdpi_unit_offers_exact(u)) return FSDP_OK;
    FSDP_TRY(fsdpi_unit_tag(u, FSDPI_OP_OFFER));
    FSDP_TRY(t->flat_done(u->exact, u->exact_version, u->ctx->comm));
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->comm, u->store->compute));
    FSDP_TRY(t->flat_open(u->exact, u->exact_version + 1, u->store->comm));
    FSDP_TRY(t->flat_publish(u->exact, u->exact_version + 1, u->master, u->store->comm));
    u->exact_version++;
    u->exact_of = u->version;
    return FSDP_OK;
}

fsdp_status fsdpi_unit_source(fsdp_unit *u, bool exact, fsdpi_flat **flat, uint32_t *version, fsdp_dtype *dtype)
{
    bool masters = exact && fsdpi_unit_is_narrow(u);
    if (masters) FSDP_TRY(fsdpi_unit_offer_exact(u));
    *flat = masters ? u->exact : u->flat;
    *version = masters ? u->exact_version : u->version;
    *dtype = exact ? FSDP_F32 : u->param_dtype;
    if (!masters && u->near_is_current) {
        *flat = u->near;
        *version = u->near_version;
        if (!u->raw) *dtype = FSDP_F32;
    }
    return FSDP_OK;
}
