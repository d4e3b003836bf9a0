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

/* Between a copy that is summoned, in host memory or the device's, and the host. */
static fsdp_status copy_summoned(run *r, int unit, float *to, const float *from, int64_t numel)
{
    fsdp_stream *s = fsdp_unit_stream(r->unit[unit]);
    if (numel == 0) return FSDP_OK;
    if (r->m->unit[unit].summon.host) memcpy(to, from, (size_t)numel * sizeof(float));
    else FSDP_TRY(fsdp_stream_copy(s, to, from, (size_t)numel * sizeof(float)));
    return fsdp_stream_sync(s);
}

/* What this rank has to write to, or in host memory. */
static fsdp_status peek_copy(run *r, int unit)
{
    const model_unit *u = &r->m->unit[unit];
    for (int i = 0; i < u->params; i++) {
        float got[MODEL_TOTAL], *p = fsdp_unit_summoned(r->unit[unit], i);
        FSDP_FAIL_IF((p != NULL) != model_has_copy(u, r->rank), FSDP_ERR_INTERNAL, "rank %d: unit %d has%s a copy", r->rank, unit, p != NULL ? "" : " not");
        if (p == NULL) continue;
        FSDP_TRY(copy_summoned(r, unit, got, p, u->numel[i]));
        FSDP_TRY(expect_equal(r, got, u->summoned[r->rank] + u->at[i], u->numel[i], "the copy that is summoned", unit, i));
    }
    return FSDP_OK;
}

/* What is read through an address: in use, or summoned. Nothing, where it cannot be. Where nobody is sure to hold it, it may be as a
 * pass, or as an exact evaluation or a summon left it. */
fsdp_status peek(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    bool used = model_is_whole(r->m, c->unit, r->rank), held = used || (u->pinned && !u->in_step);
    for (int i = 0; i < u->params; i++) {
        float got[MODEL_TOTAL], want[MODEL_TOTAL];
        bool has, exact = used && u->sees_exact;
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
    return peek_copy(r, c->unit);
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
        for (int i = 0; r->unit[u] != NULL && i < r->m->unit[u].params && model_room_for(r->m, u, true) == MODEL_FITS; i++) FSDP_TRY(read_one(r, u, i, true));
    return FSDP_OK;
}

/* Without asking anybody: what this rank has of all parameters of a unit, and how many steps they have had. */
fsdp_status read_pending(run *r, const call *c)
{
    static const fsdp_pending kinds[] = { FSDP_PENDING_OWN, FSDP_PENDING_REDUCED };
    const model_unit *u = &r->m->unit[c->unit];
    float want[MODEL_TOTAL], got[MODEL_TOTAL];
    for (int i = 0; i < u->params && u->optim != MODEL_NO_OPTIM; i++) {
        int64_t steps = fsdp_optim_param_steps(r->optim[u->optim - MODEL_SGD], r->unit[c->unit], i);
        FSDP_FAIL_IF(steps != u->steps[i], FSDP_ERR_INTERNAL, "rank %d: parameter %d has had %lld steps, not %d", r->rank, i, (long long)steps, u->steps[i]);
    }
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

fsdp_status summon(run *r, const call *c)
{
    fsdp_unit_summon_opts o = model_summon_opts(c);
    return fsdp_unit_summon_begin(r->unit[c->unit], c->kind == CALL_SUMMON_READ && c->flag ? NULL : &o);
}

static fsdp_status write_copy(run *r, const call *c, int param, bool own, float *to)
{
    float x[MODEL_TOTAL];
    int numel = r->m->unit[c->unit].numel[param];
    for (int j = 0; j < numel; j++) x[j] = model_value(c->salt + (own ? (uint32_t)r->rank : 0), c->unit, param, j);
    return copy_summoned(r, c->unit, to, x, numel);
}

fsdp_status write_summoned(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    for (int i = 0; i < u->params; i++) {
        float *to = fsdp_unit_summoned(r->unit[c->unit], i);
        FSDP_FAIL_IF((to == NULL) != model_is_absent(u, r->rank), FSDP_ERR_INTERNAL, "rank %d: what is summoned to write is%s here", r->rank, to == NULL ? " not" : "");
        if (to != NULL) FSDP_TRY(write_copy(r, c, i, c->flag, to));
    }
    return FSDP_OK;
}

/* Read as they are now, and written over. */
fsdp_status use_summoned_grads(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    for (int i = 0; i < u->params; i++) {
        float *grad, got[MODEL_TOTAL];
        fsdp_status st = fsdp_unit_summoned_grad(r->unit[c->unit], i, &grad);
        FSDP_FAIL_IF(u->summon.grads && (st == FSDP_ERR_STATE) != model_is_absent(u, r->rank), FSDP_ERR_INTERNAL, "rank %d: summoned gradients: %s", r->rank, fsdp_status_name(st));
        if (model_is_absent(u, r->rank) && u->summon.grads) continue;
        FSDP_TRY(st);
        FSDP_FAIL_IF((grad != NULL) != (u->had_grads && !u->frozen[i]), FSDP_ERR_INTERNAL, "rank %d: parameter %d has%s a summoned gradient", r->rank, i, grad != NULL ? "" : " not");
        if (grad == NULL) continue;
        /* Where they have been dropped since, others may be frozen. */
        if (model_has_reduced(u)) {
            FSDP_TRY(copy_summoned(r, c->unit, got, grad, u->numel[i]));
            FSDP_TRY(expect_equal(r, got, u->summoned_grad[r->rank] + u->at[i], u->numel[i], "a summoned gradient", c->unit, i));
        }
        if (c->flag && u->summon.writeback) FSDP_TRY(write_copy(r, c, i, c->other % 2, grad));
    }
    return u->params > 0 || (u->summons > 0 && u->summon.grads) ? FSDP_OK : FSDP_ERR_STATE;
}

/* Called for the elements that this rank keeps. */
fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    const run *r = arg;
    const call *c = &r->now;
    (void)name;
    if (ONE_OF(c->kind, CALL_FILL_FAILS, CALL_FILL_FROM_FAILS) && c->rank == r->rank) FSDP_FAIL(FSDP_ERR_IO, "no values on this rank");
    for (int64_t i = 0; i < numel; i++) out[i] = model_value(c->salt + (c->flag ? (uint32_t)r->rank : 0), c->unit, param, first + i);
    return FSDP_OK;
}

fsdp_status read_grad(run *r, const call *c)
{
    const model_unit *u = &r->m->unit[c->unit];
    float want[MODEL_TOTAL], got[MODEL_TOTAL];
    bool wanted = c->salt % 3 > 0 || r->rank == c->rank;
    FSDP_TRY(fsdp_unit_read_grad(r->unit[c->unit], c->param, wanted ? got : NULL));
    FSDP_FAIL_IF(!model_reduced(r->m, c->unit, want), FSDP_ERR_INTERNAL, "unit %d has no gradient", c->unit);
    return wanted ? expect_equal(r, got, want + u->at[c->param], u->numel[c->param], "the gradient", c->unit, c->param) : FSDP_OK;
}

/* What this rank keeps of the averages. */
fsdp_status read_average(run *r)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        const model_unit *u = &r->m->unit[k];
        const fsdp_slice *s;
        float *state, got[MODEL_TOTAL];
        int n;
        if (!u->in_ema) continue;
        FSDP_TRY(fsdp_ema_state(r->ema, r->unit[k], &state));
        fsdp_unit_slices(r->unit[k], &s, &n);
        for (int i = 0; i < n; i++) {
            fsdp_stream *stream = fsdp_unit_storage_stream(r->unit[k]);
            FSDP_TRY(fsdp_stream_copy(stream, got, state + s[i].state_offset, (size_t)s[i].numel * sizeof(float)));
            FSDP_TRY(fsdp_stream_sync(stream));
            FSDP_TRY(expect_equal(r, got, u->average + u->at[s[i].param] + s[i].offset, s[i].numel, "the average", k, s[i].param));
        }
    }
    return FSDP_OK;
}

/* Within a step each rank writes masters of its own: replicas differ, which is found, and mended. */
fsdp_status diverge(run *r, const call *c)
{
    fsdp_unit *u = r->unit[c->unit];
    const fsdp_slice *s;
    int n;
    FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ &u, 1 }));
    fsdp_unit_slices(u, &s, &n);
    for (int i = 0; i < n; i++) {
        float x[MODEL_TOTAL];
        for (int64_t j = 0; j < s[i].numel; j++) x[j] = model_value(c->salt + (uint32_t)r->rank, c->unit, s[i].param, s[i].offset + j);
        FSDP_TRY(fsdp_stream_copy(fsdp_unit_storage_stream(u), s[i].master, x, (size_t)s[i].numel * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_storage_stream(u)));
    }
    FSDP_TRY(fsdp_step_end((fsdp_unit_list){ &u, 1 }));
    bool differ = model_has_replicas(r->m, c->unit) && model_has_elements(&r->m->unit[c->unit]);
    fsdp_status st = fsdp_unit_check_replicas(u);
    FSDP_FAIL_IF(st != (differ ? FSDP_ERR_INVALID : FSDP_OK), FSDP_ERR_INTERNAL, "rank %d: replicas%s differ, but: %s", r->rank, differ ? "" : " do not", fsdp_status_name(st));
    FSDP_TRY(fsdp_unit_broadcast_from(u, c->rank));
    return fsdp_unit_check_replicas(u);
}

/* ---- the cap ---- */

fsdp_status set_cap(run *r, const call *c)
{
    int64_t now, most, cap = model_cap_of(r->m, c);
    FSDP_TRY(fsdp_comm_set_max_unsharded(r->comm, cap));
    FSDP_TRY(fsdp_comm_get_unsharded(r->comm, &now, &most));
    FSDP_FAIL_IF(most != now, FSDP_ERR_INTERNAL, "rank %d: %lld bytes are whole, %lld at most, below a new cap of %lld", r->rank, (long long)now, (long long)most, (long long)cap);
    return FSDP_OK;
}

fsdp_status check_cap(run *r)
{
    int64_t now, most;
    if (r->m->cap == 0) return FSDP_OK;
    FSDP_TRY(fsdp_comm_get_unsharded(r->comm, &now, &most));
    FSDP_FAIL_IF(most > r->m->cap || now > most, FSDP_ERR_INTERNAL, "rank %d: %lld bytes are whole, and have been %lld, with a cap of %lld", r->rank, (long long)now, (long long)most,
                 (long long)r->m->cap);
    return FSDP_OK;
}
