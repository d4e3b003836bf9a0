/* SPDX-License-Identifier: MIT */
#include "support/random/model_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 16 };

/* ---- units ---- */

model *model_create(int ranks)
{
    model *m = calloc(1, sizeof(*m));
    if (m == NULL) return NULL;
    m->ranks = ranks;
    for (int u = 0; u < MODEL_UNITS; u++) m->unit[u].owner = -1;
    return m;
}

void model_destroy(model *m)
{
    free(m);
}

static int align(int n)
{
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

/* Of every other unit types below fp32. */
static void choose_types(model_unit *u, uint32_t salt)
{
    static const fsdp_dtype types[] = { FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F32 };
    rng g = { salt };
    if (one_in(&g, 2)) return;
    u->param_dtype = types[below(&g, 4)];
    u->reduce_dtype = types[below(&g, 4)];
    u->grad_dtype = types[below(&g, 4)];
    if (u->param_dtype == FSDP_F32) return;
    u->exact_eval = one_in(&g, 2);
    u->raw = one_in(&g, 3);
}

void model_unit_make(model_unit *u, int number, uint32_t salt, int ranks)
{
    static const struct {
        int ndim;
        int64_t shape[3];
    } shapes[] = { { 0, { 0 } }, { 1, { 0 } }, { 1, { 1 } }, { 1, { 7 } }, { 2, { 3, 5 } }, { 2, { 6, 6 } }, { 3, { 5, 3, 2 } }, { 1, { 37 } }, { 2, { 13, 11 } } };
    enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };
    *u = (model_unit){ .exists = true, .salt = salt, .owner = -1, .mode = (fsdp_mode)(salt % 4), .params = (int)(salt / 4 % (MODEL_PARAMS + 1)) };
    int shards = 1 + (int)(salt / 16 % (unsigned)ranks);
    u->shards = u->mode == FSDP_MODE_NONE ? 1 : ranks % shards == 0 ? shards : ranks;
    choose_types(u, salt);
    u->near = u->mode == FSDP_MODE_FULL && u->shards % 2 == 0 && u->salt / 8 % 2 == 0;
    salt /= 16;
    for (int i = 0; i < u->params; i++, salt /= SHAPES) {
        fsdp_param *p = &u->param[i];
        snprintf(u->name[i], sizeof(u->name[i]), "u%d.p%d", number, i);
        *p = (fsdp_param){ .name = u->name[i], .ndim = shapes[salt % SHAPES].ndim };
        u->numel[i] = 1;
        for (int d = 0; d < p->ndim; d++) u->numel[i] *= (int)(p->shape[d] = shapes[salt % SHAPES].shape[d]);
        u->at[i] = u->total;
        u->total += align(u->numel[i]);
    }
    if (u->total == 0) u->total = ALIGN;
}

bool model_stored_apart(const model *m, const model_unit *u)
{
    return m->offloads && u->salt % 3 == 0;
}

bool model_summed_apart(const model *m, const model_unit *u)
{
    return m->offloads && u->salt / 3 % 3 == 0;
}

static bool same_shape(const fsdp_param *a, const fsdp_param *b)
{
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, sizeof(a->shape)) == 0;
}

static int piece_of(const model *m, const model_unit *u, int at)
{
    return at / align((u->total + m->ranks - 1) / m->ranks);
}

/* Of those that keep a flat element, the rank that reduces it. There is a piece for each rank; a shard has as many as there are
 * replicas, which are numbered one after another. */
static int owner_of(const model *m, const model_unit *u, int at)
{
    int replicas = m->ranks / u->shards, k = piece_of(m, u, at);
    return k % replicas * u->shards + k / replicas;
}

static bool keeps(const model *m, const model_unit *u, int at, int rank)
{
    return piece_of(m, u, at) / (m->ranks / u->shards) == rank % u->shards;
}

bool model_has_elements(const model_unit *u)
{
    for (int i = 0; i < u->params; i++)
        if (u->numel[i] > 0) return true;
    return false;
}

bool model_has_replicas(const model *m, int unit)
{
    return m->unit[unit].shards < m->ranks;
}

/* Each rank has, of the student, what it is to write of the teacher. */
bool model_may_teach(const model *m, int teacher, int student)
{
    const model_unit *t = &m->unit[teacher], *s = &m->unit[student];
    if (teacher == student || t->params != s->params || model_stored_apart(m, t) != model_stored_apart(m, s)) return false;
    for (int i = 0; i < t->params; i++)
        if (!same_shape(&t->param[i], &s->param[i])) return false;
    for (int k = 0; k < m->ranks; k++) { /* of pieces, also of empty ones */
        int owner = k % (m->ranks / t->shards) * t->shards + k / (m->ranks / t->shards);
        if (k / (m->ranks / s->shards) != owner % s->shards) return false;
    }
    return true;
}

bool model_rank_keeps_any(const model *m, int unit, int rank)
{
    const model_unit *u = &m->unit[unit];
    for (int i = 0; i < u->params; i++)
        for (int j = 0; j < u->numel[i]; j++)
            if (keeps(m, u, u->at[i] + j, rank)) return true;
    return false;
}

bool model_has_joined(const model *m, int rank)
{
    return m->leaders != 0 && !(m->leaders >> rank & 1);
}

int model_open_passes(const model *m)
{
    int n = 0;
    for (int p = 0; p < MODEL_PASSES; p++) n += m->pass[p].open;
    return n;
}

static int held(const model_use *x)
{
    return x->forward_open + x->recompute_open + x->backward_open;
}

int model_open_uses(const model *m, int pass)
{
    int n = 0;
    for (int u = 0; u < MODEL_UNITS; u++) n += held(&m->pass[pass].use[u]);
    return n;
}

fsdp_unit_summon_opts model_summon_opts(const call *c)
{
    uint32_t s = c->salt >> 4;
    if (c->kind != CALL_SUMMON) return (fsdp_unit_summon_opts){ .writeback = c->kind == CALL_SUMMON_WRITE };
    return (fsdp_unit_summon_opts){ .writeback = s & 1, .rank0_only = s >> 1 & 1, .host = s >> 2 & 1, .grads = s >> 3 & 1, .same = (s >> 4 & 3) == 0 };
}

bool model_is_absent(const model_unit *u, int rank)
{
    return u->summons > 0 && u->summon.rank0_only && rank != 0;
}

bool model_has_copy(const model_unit *u, int rank)
{
    return u->summons > 0 && (u->summon.writeback || u->summon.host) && !model_is_absent(u, rank);
}

bool model_is_whole(const model *m, int unit, int rank)
{
    for (int p = 0; p < MODEL_PASSES; p++)
        if (m->pass[p].open && held(&m->pass[p].use[unit]) > 0) return true;
    const model_unit *u = &m->unit[unit];
    return u->summons > 0 && !u->summon.host && !model_is_absent(u, rank);
}

float model_seen(const model_unit *u, bool exact, int at)
{
    return exact ? u->p[at] : model_rounded(u->param_dtype, u->p[at]);
}

fsdp_dtype model_seen_dtype(const model_unit *u, bool exact)
{
    return u->raw && !exact ? u->param_dtype : FSDP_F32;
}

static void hold(model *m, int unit, bool exact)
{
    model_unit *u = &m->unit[unit];
    if (!model_is_whole(m, unit, 0)) u->sees_exact = exact || u->param_dtype == FSDP_F32;
    if (u->param_dtype != FSDP_F32 && u->sees_exact) u->pinned = false; /* masters are in its place */
}

static void hold_in(model *m, int unit, int pass)
{
    hold(m, unit, m->unit[unit].exact_eval && !m->pass[pass].train);
}

bool model_is_sharded(const model *m, int unit)
{
    return m->unit[unit].mode == FSDP_MODE_FULL && !m->unit[unit].unsharded && model_open_passes(m) == 0 && m->unit[unit].summons == 0;
}

bool model_has_reduced(const model_unit *u)
{
    for (int k = 0; k < MODEL_ROUNDS; k++)
        if (u->has[k]) return true;
    return false;
}

bool model_has_unsent(const model *m, int unit)
{
    for (int k = 0; k < MODEL_ROUNDS; k++)
        if (m->unit[unit].has_unsent[k]) return true;
    return false;
}

/* Without parameters it trains, too. */
static bool trains(const model_unit *u)
{
    bool any = u->params == 0;
    for (int i = 0; i < u->params; i++) any |= !u->frozen[i];
    return any;
}

/* ---- what is allowed ---- */

static bool idle(const model *m, int unit)
{
    return model_open_passes(m) == 0 && m->unit[unit].summons == 0 && !m->unit[unit].in_step && !m->unit[unit].averaged;
}

static bool all_in_step(const model *m, unsigned mask)
{
    for (int u = 0; u < MODEL_UNITS; u++)
        if ((mask >> u & 1) && !m->unit[u].in_step) return false;
    return true;
}

static bool all_idle(const model *m, unsigned mask)
{
    for (int u = 0; u < MODEL_UNITS; u++)
        if ((mask >> u & 1) && !idle(m, u)) return false;
    return true;
}

model_optim model_optim_of(const call *c)
{
    return c->other % 2 == 0 ? MODEL_SGD : MODEL_ADAMW;
}

unsigned model_adamw_mask(const call *c)
{
    return ~c->mask & (c->salt % 2 ? ~0u : c->salt >> 8) & ((1u << MODEL_UNITS) - 1);
}

unsigned model_optim_mask(const model *m, model_optim which)
{
    unsigned mask = 0;
    for (int u = 0; u < MODEL_UNITS; u++) mask |= (unsigned)(m->unit[u].exists && m->unit[u].optim == which) << u;
    return mask;
}

unsigned model_ema_mask(const model *m)
{
    unsigned mask = 0;
    for (int u = 0; u < MODEL_UNITS; u++) mask |= (unsigned)m->unit[u].in_ema << u;
    return mask;
}

static unsigned averaged_units(const model *m)
{
    unsigned mask = 0;
    for (int u = 0; u < MODEL_UNITS; u++) mask |= (unsigned)m->unit[u].averaged << u;
    return mask;
}

unsigned model_in_step(const model *m)
{
    unsigned mask = 0;
    for (int u = 0; u < MODEL_UNITS; u++) mask |= (unsigned)m->unit[u].in_step << u;
    return mask;
}

/* Those that a checkpoint has entries of. */
static unsigned registered_units(const model *m)
{
    unsigned mask = 0;
    for (int u = 0; u < MODEL_UNITS; u++) mask |= (unsigned)(m->unit[u].exists && m->unit[u].params > 0) << u;
    return mask;
}

/* All that is registered for a load must be there, and nothing else of a kind of which something is registered. */
static bool saved_fits(const model *m)
{
    unsigned registered = registered_units(m);
    bool wants_params = registered != 0, wants_state = (registered & (model_optim_mask(m, MODEL_SGD) | model_optim_mask(m, MODEL_ADAMW) | model_ema_mask(m))) != 0;
    for (int u = 0; u < MODEL_UNITS; u++) {
        const model_unit *now = &m->unit[u], *then = &m->saved[u];
        int params = now->exists ? now->params : 0, had = then->exists ? then->params : 0;
        if (params > had || (params < had && wants_params)) return false;
        if (params > 0 && now->optim != MODEL_NO_OPTIM && then->optim != now->optim) return false;
        if (params > 0 && now->in_ema && !then->in_ema) return false;
        if (had > 0 && wants_state && then->optim != MODEL_NO_OPTIM && !(now->optim == then->optim && params == had)) return false;
        if (had > 0 && wants_state && then->in_ema && !(now->in_ema && params == had)) return false;
        for (int i = 0; i < params; i++)
            if (!same_shape(&now->param[i], &then->param[i])) return false;
    }
    return true;
}

/* Where a program would begin, or do, something with an average. */
static bool average_allows(const model *m, const call *c)
{
    unsigned mask = model_ema_mask(m);
    switch (c->kind) {
    case CALL_EMA_RENEW: return (c->mask & (model_in_step(m) | averaged_units(m))) == 0;
    case CALL_EMA_UPDATE: return averaged_units(m) == 0 && (mask & model_in_step(m)) == 0;
    case CALL_SWAP_IN: return all_idle(m, mask);
    default: break;
    }
    bool free = averaged_units(m) != 0 && model_open_passes(m) == 0;
    for (int u = 0; u < MODEL_UNITS; u++) free &= !(mask >> u & 1) || (m->unit[u].summons == 0 && !m->unit[u].in_step);
    return free;
}

/* The outermost: gradients are there to be read. An inner one asks for no more. */
static bool may_summon(const model *m, int unit, fsdp_unit_summon_opts o)
{
    const model_unit *u = &m->unit[unit];
    if (u->summons == 0) return !(o.grads && model_has_unsent(m, unit));
    return o.writeback <= u->summon.writeback && o.grads <= u->summon.grads && o.same <= u->summon.same && o.rank0_only >= u->summon.rank0_only && o.host == u->summon.host;
}

/* What ranks wrote that were to write the same. */
static bool wrote_the_same(const model *m, const model_unit *u)
{
    for (int r = 1; r < m->ranks; r++)
        for (int i = 0; i < u->params; i++) {
            size_t bytes = (size_t)u->numel[i] * sizeof(float);
            if (memcmp(u->summoned[r] + u->at[i], u->summoned[0] + u->at[i], bytes) != 0) return false;
            if (u->summon.grads && model_has_reduced(u) && !u->frozen[i] && memcmp(u->summoned_grad[r] + u->at[i], u->summoned_grad[0] + u->at[i], bytes) != 0) return false;
        }
    return true;
}

static bool allowed(const model *m, const call *c)
{
    const model_unit *u = &m->unit[c->unit];
    const model_pass *p = c->pass >= 0 ? &m->pass[c->pass] : NULL;
    const model_use *x = p != NULL ? &p->use[c->unit] : NULL;
    bool open = p != NULL && p->open;
    switch (c->kind) {
    case CALL_JOINED_BEGIN:
    case CALL_PASS_BEGIN:
        for (int i = 0; i < MODEL_UNITS; i++)
            if (m->unit[i].exists && (m->unit[i].summons > 0 || m->unit[i].in_step)) return false;
        return true;
    case CALL_PASS_END: return open && model_open_uses(m, c->pass) == 0 && !p->lost;
    case CALL_SYNC:
        for (int i = 0; i < MODEL_UNITS; i++)
            if (m->unit[i].owner == c->pass) return false;
        return open && p->train;
    case CALL_FREEZE: return model_open_passes(m) == 0 && !u->in_step && !u->has[0] && !model_has_unsent(m, c->unit);
    case CALL_PASS_CANCEL:
    case CALL_WEIGHT:
    case CALL_KERNEL_FAILS:
    case CALL_FORWARD_BEGIN: return open;
    case CALL_FORWARD_END: return open && x->forward_open > 0;
    case CALL_RECOMPUTE_BEGIN: return open && p->train && x->forwards > x->backwards;
    case CALL_RECOMPUTE_END: return open && x->recompute_open > 0;
    case CALL_BACKWARD_BEGIN: return open && p->train && !x->backward_open && x->forwards > x->backwards && (u->owner < 0 || u->owner == c->pass);
    case CALL_BACKWARD_END: return open && x->backward_open;
    case CALL_GRAD: return u->owner >= 0 && m->pass[u->owner].use[c->unit].backward_open;
    case CALL_PREFETCH:
    case CALL_UNSHARD: return !u->in_step;
    case CALL_RESHARD: return !model_is_whole(m, c->unit, 0) && u->summons == 0;
    case CALL_CAP: return model_open_passes(m) == 0;
    case CALL_READ: return model_open_passes(m) == 0 && !u->in_step;
    case CALL_READ_ALL: return model_open_passes(m) == 0 && model_in_step(m) == 0;
    case CALL_SUMMON:
    case CALL_SUMMON_READ:
    case CALL_SUMMON_WRITE:
        if (model_summon_opts(c).writeback && u->averaged) return false;
        return model_open_passes(m) == 0 && !u->in_step && may_summon(m, c->unit, model_summon_opts(c));
    case CALL_WRITE: return u->summons > 0 && u->summon.writeback;
    case CALL_SUMMON_GRADS: return u->summons > 0 && u->summon.grads;
    case CALL_SUMMON_CANCEL:
    case CALL_SUMMON_END: return u->summons > 0;
    case CALL_FILL:
    case CALL_FILL_FROM:
    case CALL_FILL_FROM_FAILS:
    case CALL_BROADCAST:
    case CALL_DIVERGE:
    case CALL_FILL_FAILS: return idle(m, c->unit);
    case CALL_CHECK_REPLICAS: return model_open_passes(m) == 0 && !u->in_step;
    case CALL_OPTIM_STEP: return all_idle(m, model_optim_mask(m, model_optim_of(c)));
    case CALL_READ_GRAD: return u->in_step && u->has[0] && !u->frozen[c->param];
    case CALL_TEACH: return idle(m, c->unit) && !m->unit[c->other].in_step;
    case CALL_EMA_RENEW:
    case CALL_EMA_UPDATE:
    case CALL_SWAP_IN:
    case CALL_SWAP_OUT: return average_allows(m, c);
    case CALL_STEP_BEGIN: return all_idle(m, c->mask);
    case CALL_STEP_WRITE:
    case CALL_STEP_NORM:
    case CALL_STEP_END:
    case CALL_STEP_CANCEL: return all_in_step(m, c->mask);
    case CALL_ZERO_GRAD: return model_open_passes(m) == 0 && !u->in_step;
    case CALL_RENEW:
    case CALL_CREATE_DIFFERS: return model_open_passes(m) == 0;
    case CALL_LOAD: return all_idle(m, registered_units(m));
    case CALL_SAVE: return registered_units(m) == 0 || (model_open_passes(m) == 0 && (registered_units(m) & (model_in_step(m) | averaged_units(m))) == 0);
    case CALL_PEEK: /* there is something to see, or not */
    case CALL_PENDING:
    case CALL_EMA_READ:
    case CALL_OPTIM_RENEW:
    case CALL_RESET:
    case CALL_STRAY:
    case CALL_BARRIER:
    case CALL_KINDS: break;
    }
    return true;
}

fsdp_status model_expects(const model *m, const call *c)
{
    if (c->kind == CALL_TEACH && !model_may_teach(m, c->unit, c->other)) return FSDP_ERR_INVALID;
    if (c->kind == CALL_SUMMON && model_summon_opts(c).same && (!model_summon_opts(c).writeback || model_summon_opts(c).rank0_only)) return FSDP_ERR_INVALID;
    if (!allowed(m, c)) return FSDP_ERR_STATE;
    if (c->kind == CALL_CAP) return model_cap_of(m, c) > 0 && model_cap_of(m, c) < model_largest(m) ? FSDP_ERR_INVALID : model_room_of(m, c) == MODEL_NO_ROOM ? FSDP_ERR_NOMEM : FSDP_OK;
    if (model_room_of(m, c) == MODEL_NO_ROOM) return FSDP_ERR_NOMEM;
    if (c->kind == CALL_SUMMON_END && m->unit[c->unit].summons == 1 && m->unit[c->unit].summon.same && !wrote_the_same(m, &m->unit[c->unit])) return FSDP_ERR_INVALID;
    if (c->kind == CALL_FILL_FAILS) return model_rank_keeps_any(m, c->unit, c->rank) ? FSDP_ERR_IO : FSDP_OK;
    if (c->kind == CALL_FILL_FROM_FAILS) return model_has_elements(&m->unit[c->unit]) ? FSDP_ERR_IO : FSDP_OK;
    if (c->kind == CALL_CREATE_DIFFERS) return m->ranks > 1 || !model_fits_cap(m, c->unit, c->salt) ? FSDP_ERR_INVALID : FSDP_OK;
    if (c->kind == CALL_LOAD && !saved_fits(m)) return FSDP_ERR_FORMAT;
    if (c->kind == CALL_OPTIM_STEP && !model_grads_finite(m, model_optim_mask(m, model_optim_of(c)))) return FSDP_ERR_NONFINITE;
    return FSDP_OK;
}

/* ---- values ---- */

/* Each rank's slice of what it wrote counts. */
static void fill(model *m, const call *c, float to[MODEL_RANKS][MODEL_TOTAL])
{
    const model_unit *u = &m->unit[c->unit];
    for (int r = 0; r < m->ranks; r++)
        for (int i = 0; i < u->params; i++)
            for (int j = 0; j < u->numel[i]; j++) to[r][u->at[i] + j] = model_value(c->salt + (c->flag ? (uint32_t)r : 0), c->unit, i, j);
}

static void take(model *m, int unit, float from[MODEL_RANKS][MODEL_TOTAL])
{
    model_unit *u = &m->unit[unit];
    for (int j = 0; j < u->total; j++) u->p[j] = from[owner_of(m, u, j)][j];
}

/* What rank `from` has, or those that keep the rest of its replica. */
static void take_replica(model *m, int unit, int from, float have[MODEL_RANKS][MODEL_TOTAL])
{
    model_unit *u = &m->unit[unit];
    for (int j = 0; j < u->total; j++) u->p[j] = have[from / u->shards * u->shards + piece_of(m, u, j) / (m->ranks / u->shards)][j];
}

static void load(model *m)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        model_unit *u = &m->unit[k];
        for (int i = 0; i < u->params; i++) {
            memcpy(u->p + u->at[i], m->saved[k].p + m->saved[k].at[i], (size_t)u->numel[i] * sizeof(float));
            if (u->in_ema) memcpy(u->average + u->at[i], m->saved[k].average + m->saved[k].at[i], (size_t)u->numel[i] * sizeof(float));
            if (u->optim == MODEL_NO_OPTIM) continue;
            for (int s = 0; s < 2; s++) memcpy(u->v[s] + u->at[i], m->saved[k].v[s] + m->saved[k].at[i], (size_t)u->numel[i] * sizeof(float));
            u->steps[i] = m->saved[k].steps[i];
        }
    }
}

/* ---- calls ---- */

static void drop_pass(model *m, int pass)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        if (m->unit[k].owner != pass) continue;
        m->unit[k].owner = -1;
        m->unit[k].open = false;
    }
    memset(&m->pass[pass], 0, sizeof(m->pass[pass]));
    if (model_open_passes(m) == 0) m->leaders = 0;
}

static void end_pass(model *m, int pass)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        if (m->unit[k].owner != pass) continue;
        if (m->unit[k].open) model_post(m, pass, k);
        model_commit(m, pass, k);
    }
    drop_pass(m, pass);
}

static void begin_pass(model *m, const call *c)
{
    m->pass[c->pass] = (model_pass){ .open = true, .train = c->flag, .serial = m->passes_begun++ };
}

static void begin_backward(model *m, const call *c)
{
    model_unit *u = &m->unit[c->unit];
    hold_in(m, c->unit, c->pass);
    m->pass[c->pass].use[c->unit].backward_open = true;
    if (!u->open) memset(u->touched, 0, sizeof(u->touched));
    if (trains(u)) {
        u->open = true;
        u->owner = c->pass;
    }
    model_write_gradients(m, c, c->pass);
}

static void end_backward(model *m, const call *c)
{
    model_use *x = &m->pass[c->pass].use[c->unit];
    x->backward_open = false;
    if (++x->backwards == x->forwards && x->forward_open == 0 && m->unit[c->unit].open) model_post(m, c->pass, c->unit);
}

void model_reset(model *m)
{
    for (int p = 0; p < MODEL_PASSES; p++) drop_pass(m, p);
    for (int k = 0; k < MODEL_UNITS; k++) {
        m->unit[k].summons = 0;
        m->unit[k].pinned = false;
        m->unit[k].summon = (fsdp_unit_summon_opts){ 0 };
        m->unit[k].in_step = m->unit[k].step_written = false;
    }
}

/* Some of the units have SGD, some of the others AdamW. */
static void optim_renew(model *m, const call *c)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        model_unit *u = &m->unit[k];
        u->optim = !u->exists ? MODEL_NO_OPTIM : c->mask >> k & 1 ? MODEL_SGD : model_adamw_mask(c) >> k & 1 ? MODEL_ADAMW : MODEL_NO_OPTIM;
        memset(u->v, 0, sizeof(u->v));
        memset(u->steps, 0, sizeof(u->steps));
    }
}

static void drop_average(model *m)
{
    for (int k = 0; k < MODEL_UNITS; k++) m->unit[k].in_ema = m->unit[k].averaged = false;
}

static void average(model *m, const call *c)
{
    unsigned mask = c->kind == CALL_EMA_RENEW ? c->mask : model_ema_mask(m);
    if (c->kind == CALL_EMA_RENEW) drop_average(m);
    for (int k = 0; k < MODEL_UNITS; k++) {
        model_unit *u = &m->unit[k];
        for (int j = 0; j < u->total && (mask >> k & 1); j++) {
            float old = u->average[j];
            u->average[j] = c->kind == CALL_EMA_UPDATE ? model_mixed(old, u->p[j], model_decay(c)) : u->p[j];
            if (c->kind == CALL_SWAP_IN || c->kind == CALL_SWAP_OUT) u->p[j] = old;
        }
        if (!(mask >> k & 1)) continue;
        u->in_ema = true;
        u->averaged = c->kind == CALL_SWAP_IN;
    }
}

static void summon(model *m, int unit, fsdp_unit_summon_opts o)
{
    model_unit *u = &m->unit[unit];
    hold(m, unit, true);
    if (u->summons++ > 0) return;
    float grad[MODEL_TOTAL];
    u->summon = o;
    u->had_grads = o.grads && model_reduced(m, unit, grad);
    for (int r = 0; r < m->ranks; r++) {
        memcpy(u->summoned[r], u->p, sizeof(u->p));
        if (u->had_grads) memcpy(u->summoned_grad[r], grad, sizeof(grad));
    }
}

/* Of rank 0 all counts; else of each rank its slice. */
static void write_back(model *m, int unit)
{
    model_unit *u = &m->unit[unit];
    bool grads = u->summon.grads && model_has_reduced(u);
    if (grads) model_merge(u);
    for (int j = 0; j < u->total; j++) {
        int from = u->summon.rank0_only ? 0 : owner_of(m, u, j);
        u->p[j] = u->summoned[from][j];
        if (grads) u->acc[0][j] = model_rounded(u->grad_dtype, u->summoned_grad[from][j]);
    }
}

static void summon_end(model *m, int unit, bool keep)
{
    model_unit *u = &m->unit[unit];
    if (--u->summons > 0) return;
    if (keep && u->summon.writeback) write_back(m, unit);
    u->summon = (fsdp_unit_summon_opts){ 0 };
}

/* Which units a call may have given new values, or taken for them: what was whole by hand is not. */
static void unpin(model *m, const call *c)
{
    unsigned mask = 1u << c->unit;
    switch (c->kind) {
    case CALL_FILL:
    case CALL_FILL_FAILS:
    case CALL_FILL_FROM:
    case CALL_FILL_FROM_FAILS:
    case CALL_BROADCAST:
    case CALL_DIVERGE:
    case CALL_SUMMON_END:
    case CALL_SUMMON_CANCEL:
    case CALL_TEACH: break;
    case CALL_SWAP_IN:
    case CALL_SWAP_OUT: mask = model_ema_mask(m); break;
    case CALL_STEP_END:
    case CALL_STEP_CANCEL: mask = c->mask; break;
    case CALL_OPTIM_STEP: mask = model_optim_mask(m, model_optim_of(c)); break;
    case CALL_LOAD:
    case CALL_KERNEL_FAILS: mask = ~0u; break;
    case CALL_PASS_CANCEL: mask = m->pass[c->pass].lost ? ~0u : 0; break;
    default: return;
    }
    for (int k = 0; k < MODEL_UNITS; k++) m->unit[k].pinned &= !(mask >> k & 1);
}

void model_apply_failed(model *m, const call *c)
{
    unpin(m, c);
}

void model_apply(model *m, const call *c)
{
    static _Thread_local float values[MODEL_RANKS][MODEL_TOTAL];
    model_unit *u = &m->unit[c->unit];
    model_pass *p = &m->pass[c->pass >= 0 ? c->pass : 0];
    unpin(m, c);
    switch (c->kind) {
    case CALL_JOINED_BEGIN:
        if (c->mask == 0) break; /* nobody has any */
        m->leaders = c->mask == (1u << m->ranks) - 1 ? 0 : c->mask;
        begin_pass(m, c);
        break;
    case CALL_PASS_BEGIN: begin_pass(m, c); break;
    case CALL_PASS_END: end_pass(m, c->pass); break;
    case CALL_PASS_CANCEL: drop_pass(m, c->pass); break;
    case CALL_WEIGHT:
        for (int r = 0; r < m->ranks; r++) p->weight += model_has_joined(m, r) ? 0 : (c->salt + (uint32_t)r) % 7;
        break;
    case CALL_SYNC: p->unsynced = c->flag; break;
    case CALL_FREEZE: u->frozen[c->param] = c->flag; break;
    case CALL_FORWARD_BEGIN:
        hold_in(m, c->unit, c->pass);
        p->use[c->unit].forward_open++;
        model_forward(m, c);
        break;
    case CALL_FORWARD_END:
        p->use[c->unit].forward_open--;
        p->use[c->unit].forwards++;
        break;
    case CALL_RECOMPUTE_BEGIN:
        hold_in(m, c->unit, c->pass);
        p->use[c->unit].recompute_open++;
        model_forward(m, c);
        break;
    case CALL_RECOMPUTE_END: p->use[c->unit].recompute_open--; break;
    case CALL_BACKWARD_BEGIN: begin_backward(m, c); break;
    case CALL_BACKWARD_END: end_backward(m, c); break;
    case CALL_GRAD: model_write_gradients(m, c, u->owner); break;
    case CALL_SUMMON:
    case CALL_SUMMON_READ:
    case CALL_SUMMON_WRITE: summon(m, c->unit, model_summon_opts(c)); break;
    case CALL_WRITE: fill(m, c, u->summoned); break;
    case CALL_SUMMON_GRADS:
        if (c->flag && u->summon.writeback && u->had_grads) fill(m, &(call){ .unit = c->unit, .salt = c->salt, .flag = c->other % 2 }, u->summoned_grad);
        break;
    case CALL_SUMMON_END: summon_end(m, c->unit, true); break;
    case CALL_SUMMON_CANCEL: summon_end(m, c->unit, false); break;
    case CALL_FILL:
    case CALL_FILL_FAILS: /* of a rank that keeps nothing */
        memset(values, 0, sizeof(values));
        fill(m, c, values);
        take(m, c->unit, values);
        break;
    case CALL_FILL_FROM:
    case CALL_FILL_FROM_FAILS: /* of no elements */
        memset(values, 0, sizeof(values));
        fill(m, c, values);
        memcpy(u->p, values[c->rank], sizeof(u->p));
        break;
    case CALL_DIVERGE:
        memset(values, 0, sizeof(values));
        fill(m, &(call){ .unit = c->unit, .salt = c->salt, .flag = true }, values);
        take_replica(m, c->unit, c->rank, values);
        model_drop_gradients(u);
        break;
    case CALL_TEACH:
        for (int j = 0; j < u->total; j++) u->p[j] = model_mixed(u->p[j], m->unit[c->other].p[j], model_decay(c));
        break;
    case CALL_EMA_RENEW:
    case CALL_EMA_UPDATE:
    case CALL_SWAP_IN:
    case CALL_SWAP_OUT: average(m, c); break;
    case CALL_OPTIM_STEP: model_optim_step(m, c); break;
    case CALL_STEP_BEGIN:
    case CALL_STEP_WRITE:
    case CALL_STEP_END:
    case CALL_STEP_CANCEL: model_step_call(m, c); break;
    case CALL_ZERO_GRAD: model_drop_gradients(u); break;
    case CALL_RENEW:
        if (u->in_ema) drop_average(m);
        model_unit_make(u, c->unit, c->salt, m->ranks);
        optim_renew(m, c);
        break;
    case CALL_OPTIM_RENEW: optim_renew(m, c); break;
    case CALL_SAVE:
        memcpy(m->saved, m->unit, sizeof(m->saved));
        m->saves++;
        break;
    case CALL_LOAD: load(m); break;
    case CALL_KERNEL_FAILS:
        drop_pass(m, c->pass);
        for (int k = 0; k < MODEL_PASSES; k++) m->pass[k].lost = m->pass[k].open;
        break;
    case CALL_RESET:
    case CALL_STRAY: model_reset(m); break;
    case CALL_UNSHARD:
        u->unsharded = true;
        u->pinned = !(model_is_whole(m, c->unit, 0) && u->sees_exact && u->param_dtype != FSDP_F32); /* else masters are in its place */
        break;
    case CALL_RESHARD: u->unsharded = u->pinned = false; break;
    case CALL_CAP:
        m->cap = model_cap_of(m, c);
        for (int k = 0; k < MODEL_UNITS && m->cap > 0; k++) m->unit[k].pinned = false; /* those that do not fit */
        break;
    case CALL_READ:
        hold(m, c->unit, true);
        break;
    case CALL_READ_ALL:
        for (int k = 0; k < MODEL_UNITS; k++)
            if (m->unit[k].params > 0) hold(m, k, true);
        break;
    case CALL_PEEK:
    case CALL_PREFETCH:
    case CALL_PENDING:
    case CALL_READ_GRAD:
    case CALL_EMA_READ:
    case CALL_CHECK_REPLICAS:
    case CALL_BROADCAST:
    case CALL_STEP_NORM:
    case CALL_CREATE_DIFFERS:
    case CALL_BARRIER:
    case CALL_KINDS: break;
    }
}
