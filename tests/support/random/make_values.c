/* SPDX-License-Identifier: MIT
 *
 * Calls that read and write parameters. */
#include "support/random/make_inside.h"

#include "base/error.h"

/* Parameter i through an address, as fp32. false: it has none. */
static fsdp_status look(run *r, int unit, int param, bool *has, fsdp_dtype *dtype, float *out)
{
    fsdp_unit *u = r->unit[unit];
    fsdp_stream *s = fsdp_unit_stream(u);
    int64_t n = fsdp_unit_param_numel(u, param);
    uint16_t narrow[MODEL_TOTAL];
    const void *p = fsdp_unit_param_data(u, param, dtype);
    *has = p != NULL;
    if (p == NULL || n == 0) return FSDP_OK;
    FSDP_TRY(fsdp_stream_copy(s, *dtype == FSDP_F32 ? (void *)out : narrow, p, (size_t)n * fsdp_dtype_bytes(*dtype)));
    FSDP_TRY(fsdp_stream_sync(s));
    for (int64_t j = 0; j < n && *dtype != FSDP_F32; j++) out[j] = *dtype == FSDP_BF16 ? fsdp_bf16_to_f32(narrow[j]) : fsdp_f16_to_f32(narrow[j]);
    return FSDP_OK;
}

static bool is_seen(const model_unit *u, int param, bool exact, fsdp_dtype dtype, const float *got)
{
    if (dtype != model_seen_dtype(u, exact)) return false;
    for (int j = 0; j < u->numel[param]; j++)
        if (got[j] != model_seen(u, exact, u->at[param] + j)) return false;
    return true;
}

/* What is read through an address: in use, or summoned. Nothing, where it cannot be. Where nobody is sure to hold it, it may be as a
 * pass, or as an exact evaluation or a summon left it. */
fsdp_status peek(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    bool held = model_is_whole(r->m, c->unit);
    for (int i = 0; i < u->params; i++) {
        float got[MODEL_TOTAL], want[MODEL_TOTAL];
        bool has, exact = held ? u->sees_exact : false;
        fsdp_dtype dtype;
        FSDP_TRY(look(r, c->unit, i, &has, &dtype, got));
        if (!has && held) return fsdpi_error_status();
        if (!has) continue;
        if (model_is_sharded(r->m, c->unit)) FSDP_FAIL(FSDP_ERR_INTERNAL, "unit %d is sharded, but has an address", c->unit);
        if (!held && !is_seen(u, i, exact, dtype, got)) exact = true;
        FSDP_FAIL_IF(dtype != model_seen_dtype(u, exact), FSDP_ERR_INTERNAL, "rank %d: unit %d is whole as %s, not %s", r->rank, c->unit, fsdp_dtype_name(dtype),
                     fsdp_dtype_name(model_seen_dtype(u, exact)));
        for (int j = 0; j < u->numel[i]; j++) want[j] = model_seen(u, exact, u->at[i] + j);
        FSDP_TRY(expect_equal(r, got, want, u->numel[i], "looked at", c->unit, i));
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
