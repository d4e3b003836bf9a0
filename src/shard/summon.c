/* SPDX-License-Identifier: MIT
 *
 * Summon: the whole parameters of a unit, outside of passes. Reading shares what a gather gives. Writing needs a copy
 * of one's own, since ranks may write different values: each keeps its slice of what it wrote. */
#include "shard/unit.h"

#include "base/error.h"

static fsdp_status make_writable(fsdp_unit *u)
{
    size_t bytes = (size_t)u->layout.total * sizeof(float);
    void *p;
    FSDP_TRY(fsdpi_arena_alloc(u->ctx->arena, bytes, &p));
    fsdp_status st = fsdp_stream_copy(u->ctx->compute, p, u->whole, bytes);
    if (st != FSDP_OK) {
        fsdpi_arena_free(u->ctx->arena, p);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    u->summoned = p;
    u->writeback = true;
    return FSDP_OK;
}

fsdp_status fsdp_unit_summon_begin(fsdp_unit *u, const fsdp_unit_summon_opts *opts)
{
    bool writeback = opts != NULL && opts->writeback;
    if (writeback || u->summons == 0) FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_SUMMON_BEGIN, NULL));
    FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SUMMON, u->name, writeback));
    FSDP_TRY(fsdpi_unit_hold(u));
    if (u->summons == 0) {
        u->writeback = false;
        fsdp_status st = writeback ? make_writable(u) : FSDP_OK;
        if (st != FSDP_OK) {
            (void)!fsdpi_unit_release(u, false);
            return fsdp_error_through(st, __func__, __FILE__, __LINE__);
        }
    }
    u->summons++;
    fsdpi_unit_check(u);
    return FSDP_OK;
}

/* The own slice of what was written becomes the master, and is published: on all ranks, or the unit stays summoned. */
static fsdp_status write_back(fsdp_unit *u)
{
    float *to = u->mode == FSDP_MODE_NONE ? u->master + u->lo : u->master;
    FSDP_TRY(fsdpi_unit_done(u));
    FSDP_TRY(fsdpi_unit_open(u));
    FSDP_TRY(fsdpi_comm_tell(u->rt->comm, FSDPI_OP_SUMMON_END, u->name, NULL, 0));
    FSDP_TRY(fsdp_stream_copy(u->ctx->compute, to, u->summoned + u->lo, (size_t)fsdpi_unit_slice(u) * sizeof(float)));
    FSDP_TRY(fsdpi_unit_publish(u));
    fsdpi_arena_free(u->ctx->arena, u->summoned);
    u->summoned = NULL;
    u->writeback = false;
    return FSDP_OK;
}

fsdp_status fsdp_unit_summon_end(fsdp_unit *u)
{
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_SUMMON_END, NULL));
    if (u->summons == 1 && u->writeback) FSDP_TRY(write_back(u));
    else FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SUMMON_END, u->name, 0));
    u->summons--;
    fsdp_status st = fsdpi_unit_release(u, false);
    fsdpi_unit_check(u);
    return st;
}

fsdp_status fsdp_unit_read_param(fsdp_unit *u, int i, float *out)
{
    FSDP_FAIL_IF(i < 0 || i >= u->layout.count, FSDP_ERR_INVALID, "fsdp_unit_read_param: unit \"%s\" has %d parameters, not number %d",
                 u->name, u->layout.count, i);
    FSDP_TRY(fsdp_unit_summon_begin(u, NULL));
    fsdp_status st = FSDP_OK;
    if (out != NULL && u->layout.numel[i] > 0) {
        st = fsdp_stream_copy(u->ctx->compute, out, u->whole + u->layout.at[i], (size_t)u->layout.numel[i] * sizeof(float));
        if (st == FSDP_OK) st = fsdp_stream_sync(u->ctx->compute);
    }
    fsdp_status end = fsdp_unit_summon_end(u);
    return st != FSDP_OK ? st : end;
}
