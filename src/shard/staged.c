/* SPDX-License-Identifier: MIT */
#include "shard/staged.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/compare.h"

fsdp_status fsdpi_staged_begin(fsdpi_staged *s, fsdp_unit *u)
{
    fsdp_status st;
    void *p;
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_FILL, NULL));
    *s = (fsdpi_staged){ .unit = u };
    s->hash = fsdpi_calloc((size_t)u->layout.count, sizeof(*s->hash));
    s->put = fsdpi_calloc((size_t)u->layout.count, sizeof(*s->put));
    if (s->hash == NULL || s->put == NULL) FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, fail, "unit \"%s\": no memory for %d parameters", u->name, u->layout.count);
    FSDP_TRY_GOTO(fsdpi_arena_alloc(u->store->arena, (size_t)fsdpi_unit_kept(u) * sizeof(float), &p), fail);
    s->kept = p;
    FSDP_TRY_GOTO(fsdp_stream_copy(u->store->compute, s->kept, u->master, (size_t)fsdpi_unit_kept(u) * sizeof(float)), fail);
    return FSDP_OK;
fail:
    fsdpi_staged_drop(s);
    return st;
}

fsdp_status fsdpi_staged_put(fsdpi_staged *s, int param, const float *whole)
{
    fsdp_unit *u = s->unit;
    int64_t at = u->layout.at[param], from = u->keep_lo, first = at > from ? at : from;
    int64_t last = at + u->layout.numel[param] < u->keep_hi ? at + u->layout.numel[param] : u->keep_hi;
    s->put[param] = true;
    s->hash[param] = fsdpi_hash_host(whole, u->layout.numel[param]);
    if (first >= last) return FSDP_OK;
    FSDP_TRY(fsdp_stream_copy(u->store->compute, s->kept + (first - from), whole + (first - at), (size_t)(last - first) * sizeof(float)));
    return fsdp_stream_sync(u->store->compute);
}

static fsdp_status take(fsdpi_staged *s)
{
    fsdp_unit *u = s->unit;
    if (!fsdpi_unit_has_replicas(u)) { /* else what is kept is compared when it is taken */
        fsdpi_difference d;
        FSDP_TRY(fsdpi_compare(&(fsdpi_values){ .unit = u, .to = u->layout.total, .hash = s->hash }, FSDPI_OP_COMPARE, &d));
        fsdpi_difference_log(u, &d);
    }
    return fsdpi_unit_take(u, s->kept);
}

fsdp_status fsdpi_staged_commit(fsdpi_staged *s)
{
    fsdp_unit *u = s->unit;
    FSDP_TRY(fsdpi_unit_done(u));
    FSDP_TRY(fsdpi_unit_open(u));
    fsdp_status st = take(s);
    if (st != FSDP_OK) {
        fsdpi_unit_settle(u);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    fsdpi_unit_mark_set(u, s->put);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

void fsdpi_staged_drop(fsdpi_staged *s)
{
    if (s->unit == NULL) return;
    fsdpi_arena_free(s->unit->store->arena, s->kept);
    fsdpi_free(s->hash);
    fsdpi_free(s->put);
    *s = (fsdpi_staged){ 0 };
}
