/* SPDX-License-Identifier: MIT
 *
 * Calls that read and write parameters. */
#include "support/random/make_inside.h"

#include "base/error.h"

/* What is read through an address: in use, or summoned. Nothing, where it cannot be. */
fsdp_status peek(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    fsdp_stream *s = fsdp_unit_stream(r->unit[c->unit]);
    for (int i = 0; i < u->params; i++) {
        float got[MODEL_TOTAL];
        const float *p = fsdp_unit_param(r->unit[c->unit], i);
        if (p == NULL && model_is_whole(r->m, c->unit)) return fsdpi_error_status();
        if (p == NULL) continue;
        if (model_is_sharded(r->m, c->unit)) FSDP_FAIL(FSDP_ERR_INTERNAL, "unit %d is sharded, but has an address", c->unit);
        if (u->numel[i] == 0) continue;
        FSDP_TRY(fsdp_stream_copy(s, got, p, (size_t)u->numel[i] * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(s));
        FSDP_TRY(expect_equal(r, got, u->p + u->at[i], u->numel[i], "looked at", c->unit, i));
    }
    float *w = fsdp_unit_summoned(r->unit[c->unit], 0);
    if (u->params > 0 && (w != NULL) != (u->summons > 0 && u->writeback)) FSDP_FAIL(FSDP_ERR_INTERNAL, "unit %d has%s a place to write to", c->unit, w != NULL ? "" : " not");
    return FSDP_OK;
}

fsdp_status read_one(run *r, int unit, int param, bool wanted)
{
    const model_unit *u = &r->m->unit[unit];
    float got[MODEL_TOTAL];
    FSDP_TRY(fsdp_unit_read_param(r->unit[unit], param, wanted ? got : NULL));
    return wanted ? expect_equal(r, got, u->p + u->at[param], u->numel[param], "read", unit, param) : FSDP_OK;
}

fsdp_status read_all(run *r)
{
    for (int u = 0; u < MODEL_UNITS; u++)
        for (int i = 0; r->unit[u] != NULL && i < r->m->unit[u].params; i++) FSDP_TRY(read_one(r, u, i, true));
    return FSDP_OK;
}

/* Without asking anybody: what this rank has of all parameters of a unit. */
fsdp_status read_pending(run *r, const call *c)
{
    static const fsdp_pending kinds[] = { FSDP_PENDING_OWN, FSDP_PENDING_REDUCED };
    const model_unit *u = &r->m->unit[c->unit];
    float want[MODEL_TOTAL], got[MODEL_TOTAL];
    for (int k = 0; k < 2; k++) {
        bool has = kinds[k] == FSDP_PENDING_OWN ? model_own(r->m, c->unit, r->rank, want) : model_reduced(r->m, c->unit, want);
        for (int i = 0; i < u->params; i++) {
            int64_t first, numel;
            bool pending = (fsdp_unit_pending(r->unit[c->unit], i) & kinds[k]) != 0;
            FSDP_FAIL_IF(pending != (has && !u->frozen[i]), FSDP_ERR_INTERNAL, "rank %d: parameter %d has%s pending gradients of kind %d", r->rank, i, pending ? "" : " no", k);
            if (!pending) continue;
            FSDP_TRY(fsdp_unit_read_pending(r->unit[c->unit], i, kinds[k], &first, &numel, got));
            FSDP_TRY(expect_equal(r, got, want + u->at[i] + first, numel, k == 0 ? "own pending" : "reduced pending", c->unit, i));
        }
    }
    return FSDP_OK;
}

fsdp_status write_summoned(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    fsdp_stream *s = fsdp_unit_stream(r->unit[c->unit]);
    for (int i = 0; i < u->params; i++) {
        float x[MODEL_TOTAL], *to = fsdp_unit_summoned(r->unit[c->unit], i);
        if (to == NULL) return fsdpi_error_status();
        for (int j = 0; j < u->numel[i]; j++) x[j] = model_value(c->salt + (c->flag ? (uint32_t)r->rank : 0), c->unit, i, j);
        if (u->numel[i] > 0) FSDP_TRY(fsdp_stream_copy(s, to, x, (size_t)u->numel[i] * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(s));
    }
    return FSDP_OK;
}

/* Called for the elements that this rank keeps. */
fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    const run *r = arg;
    const call *c = &r->now;
    (void)name;
    if (c->kind == CALL_FILL_FAILS && c->rank == r->rank) FSDP_FAIL(FSDP_ERR_IO, "no values on this rank");
    for (int64_t i = 0; i < numel; i++) out[i] = model_value(c->salt + (c->flag ? (uint32_t)r->rank : 0), c->unit, param, first + i);
    return FSDP_OK;
}
