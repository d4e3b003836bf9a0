/* SPDX-License-Identifier: MIT */
#include "support/model.h"

#include "base/xsum.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 16 };

static const char *const call_names[] = {
#define NAME(e, name) [e] = name,
    CALL_MAP(NAME)
#undef NAME
};

const char *call_text(const call *c, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s (unit %d, pass %d, param %d, rank %d, mask %#x, salt %u%s, allocation %d)", call_names[c->kind], c->unit, c->pass, c->param, c->rank,
             c->mask, (unsigned)c->salt, c->flag ? ", flag" : "", c->nomem);
    return text;
}

/* ---- arithmetic ---- */

float model_noise(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t h = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h = (h ^ h >> 12) * 0x297a2d39u;
    return (float)(int32_t)(h ^ h >> 15) * 0x1p-31f;
}

float model_value(uint32_t salt, int unit, int param, int64_t i)
{
    return 0.5f * model_noise(salt, (uint32_t)(unit * MODEL_PARAMS + param), (uint32_t)i);
}

float model_mix(float number, const float *p, int64_t numel, uint64_t leaf, int param)
{
    for (int64_t j = 0; j < numel; j++) number = 0.9f * number + p[j] * model_noise((uint32_t)leaf, (uint32_t)param, (uint32_t)j);
    return number;
}

void model_gradient(float *g, bool add, float number, const float *p, int64_t numel, uint64_t leaf, int param, bool poison)
{
    for (int64_t j = 0; j < numel; j++) g[j] = (add ? g[j] : 0) + number * model_noise((uint32_t)leaf, (uint32_t)(16 + param), (uint32_t)j) + 0.125f * p[j];
    if (poison && numel > 0) g[0] = INFINITY;
}

float model_own_update(float p, const float *g)
{
    return g != NULL ? p - 0.01f * *g : p * 0.5f;
}

float model_grad_scale(const call *c)
{
    return c->salt % 2 ? 1.0f / 32 : 0;
}

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

void model_unit_make(model_unit *u, int number, uint32_t salt, int ranks)
{
    static const struct {
        int ndim;
        int64_t shape[3];
    } shapes[] = { { 0, { 0 } }, { 1, { 0 } }, { 1, { 1 } }, { 1, { 7 } }, { 2, { 3, 5 } }, { 2, { 6, 6 } }, { 3, { 5, 3, 2 } }, { 1, { 37 } }, { 2, { 13, 11 } } };
    enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };
    *u = (model_unit){ .exists = true, .owner = -1, .mode = (fsdp_mode)(salt % 4), .params = (int)(salt / 4 % (MODEL_PARAMS + 1)) };
    int shards = 1 + (int)(salt / 16 % (unsigned)ranks);
    u->shards = u->mode == FSDP_MODE_NONE ? 1 : ranks % shards == 0 ? shards : ranks;
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

bool model_rank_keeps_any(const model *m, int unit, int rank)
{
    const model_unit *u = &m->unit[unit];
    for (int i = 0; i < u->params; i++)
        for (int j = 0; j < u->numel[i]; j++)
            if (keeps(m, u, u->at[i] + j, rank)) return true;
    return false;
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

bool model_is_whole(const model *m, int unit)
{
    for (int p = 0; p < MODEL_PASSES; p++)
        if (m->pass[p].open && held(&m->pass[p].use[unit]) > 0) return true;
    return m->unit[unit].summons > 0;
}

bool model_is_sharded(const model *m, int unit)
{
    return m->unit[unit].mode == FSDP_MODE_FULL && !m->unit[unit].unsharded && model_open_passes(m) == 0 && m->unit[unit].summons == 0;
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
    return model_open_passes(m) == 0 && m->unit[unit].summons == 0 && !m->unit[unit].in_step;
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

static unsigned optim_units(const model *m)
{
    unsigned mask = 0;
    for (int u = 0; u < MODEL_UNITS; u++) mask |= (unsigned)(m->unit[u].exists && m->unit[u].in_optim) << u;
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
    bool wants_params = registered_units(m) != 0, wants_optim = (registered_units(m) & optim_units(m)) != 0;
    for (int u = 0; u < MODEL_UNITS; u++) {
        const model_unit *now = &m->unit[u], *then = &m->saved[u];
        int params = now->exists ? now->params : 0, had = then->exists ? then->params : 0;
        if (params > had || (params < had && wants_params)) return false;
        if (params > 0 && now->in_optim && !then->in_optim) return false;
        if (had > 0 && then->in_optim && !(now->in_optim && params == had) && wants_optim) return false;
        for (int i = 0; i < params; i++)
            if (now->param[i].ndim != then->param[i].ndim || memcmp(now->param[i].shape, then->param[i].shape, sizeof(now->param[i].shape)) != 0) return false;
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
    case CALL_PEEK: return model_is_whole(m, c->unit); /* or not: the caller knows when that is certain */
    case CALL_PREFETCH:
    case CALL_UNSHARD: return !u->in_step;
    case CALL_RESHARD: return !model_is_whole(m, c->unit);
    case CALL_READ: return model_open_passes(m) == 0 && !u->in_step;
    case CALL_READ_ALL: return model_open_passes(m) == 0 && model_in_step(m) == 0;
    case CALL_SUMMON_READ: return model_open_passes(m) == 0 && !u->in_step;
    case CALL_SUMMON_WRITE: return model_open_passes(m) == 0 && !u->in_step && (u->summons == 0 || u->writeback);
    case CALL_WRITE: return u->summons > 0 && u->writeback;
    case CALL_SUMMON_END: return u->summons > 0;
    case CALL_FILL:
    case CALL_FILL_FAILS: return idle(m, c->unit);
    case CALL_OPTIM_STEP: return all_idle(m, optim_units(m));
    case CALL_STEP_BEGIN: return all_idle(m, c->mask);
    case CALL_STEP_WRITE:
    case CALL_STEP_NORM:
    case CALL_STEP_END:
    case CALL_STEP_CANCEL: return all_in_step(m, c->mask);
    case CALL_ZERO_GRAD: return model_open_passes(m) == 0 && !u->in_step;
    case CALL_RENEW:
    case CALL_CREATE_DIFFERS: return model_open_passes(m) == 0;
    case CALL_LOAD: return all_idle(m, registered_units(m));
    case CALL_SAVE: return registered_units(m) == 0 || (model_open_passes(m) == 0 && (registered_units(m) & model_in_step(m)) == 0);
    case CALL_PENDING:
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
    if (!allowed(m, c)) return FSDP_ERR_STATE;
    if (c->kind == CALL_FILL_FAILS) return model_rank_keeps_any(m, c->unit, c->rank) ? FSDP_ERR_IO : FSDP_OK;
    if (c->kind == CALL_CREATE_DIFFERS) return m->ranks > 1 ? FSDP_ERR_INVALID : FSDP_OK;
    if (c->kind == CALL_LOAD && !saved_fits(m)) return FSDP_ERR_FORMAT;
    if (c->kind == CALL_OPTIM_STEP && !model_grads_finite(m, optim_units(m))) return FSDP_ERR_NONFINITE;
    return FSDP_OK;
}

/* ---- gradients ---- */

/* Unsent gradients go to the accumulators, in rank order. */
static void send(const model *m, model_unit *u)
{
    for (int k = 0; k < MODEL_ROUNDS; k++) {
        for (int r = 0; r < m->ranks && u->has_unsent[k]; r++) {
            for (int j = 0; j < u->total; j++) u->acc[k][j] = u->has[k] ? u->acc[k][j] + u->unsent[k][r][j] : u->unsent[k][r][j];
            u->has[k] = true;
        }
        u->has_unsent[k] = false;
    }
    u->weights_sent = u->weights;
}

/* The sum of rounds that there are. */
static bool add_rounds(const model_unit *u, int rank, float *out)
{
    bool any = false;
    for (int k = 0; k < MODEL_ROUNDS; k++) {
        const float *x = rank >= 0 ? u->unsent[k][rank] : u->acc[k];
        if (!(rank >= 0 ? u->has_unsent[k] : u->has[k])) continue;
        for (int j = 0; j < u->total; j++) out[j] = any ? out[j] + x[j] : x[j];
        any = true;
    }
    return any;
}

bool model_own(const model *m, int unit, int rank, float out[MODEL_TOTAL])
{
    return add_rounds(&m->unit[unit], rank, out);
}

bool model_reduced(const model *m, int unit, float out[MODEL_TOTAL])
{
    return add_rounds(&m->unit[unit], -1, out);
}

/* As a step has it; false: there is none. */
static bool final_gradient(const model *m, const model_unit *u, float *out)
{
    static _Thread_local model_unit sent;
    sent = *u;
    send(m, &sent);
    return add_rounds(&sent, -1, out);
}

/* A step adds the rounds up; a reset within it leaves the sum as one round. */
static void merge(model_unit *u)
{
    float sum[MODEL_TOTAL];
    if (!add_rounds(u, -1, sum)) return;
    memset(u->has, 0, sizeof(u->has));
    memcpy(u->acc[0], sum, (size_t)u->total * sizeof(float));
    u->has[0] = true;
}

static double squares(const model *m, unsigned units)
{
    fsdpi_xsum s = { 0 };
    for (int k = 0; k < MODEL_UNITS; k++) {
        const model_unit *u = &m->unit[k];
        float g[MODEL_TOTAL];
        if (!(units >> k & 1) || !final_gradient(m, u, g)) continue;
        for (int i = 0; i < u->params; i++)
            for (int j = 0; j < u->numel[i] && !u->frozen[i]; j++) fsdpi_xsum_add(&s, (double)g[u->at[i] + j] * (double)g[u->at[i] + j]);
    }
    return fsdpi_xsum_round(&s);
}

bool model_grads_finite(const model *m, unsigned units)
{
    return isfinite(squares(m, units));
}

model_norm model_norm_of(const model *m, unsigned units)
{
    uint64_t seen[MODEL_UNITS * MODEL_WEIGHTS];
    int n = 0;
    double weight = 0;
    for (int k = 0; k < MODEL_UNITS; k++)
        for (int i = 0; (units >> k & 1) && i < m->unit[k].weights; i++) {
            int s = 0;
            while (s < n && seen[s] != m->unit[k].weight[i].pass) s++;
            if (s < n) continue;
            seen[n++] = m->unit[k].weight[i].pass;
            weight += m->unit[k].weight[i].weight; /* small integers: exact */
        }
    return (model_norm){ sqrt(squares(m, units)), weight };
}

static void post(model *m, int pass, int unit)
{
    model_unit *u = &m->unit[unit];
    model_use *x = &m->pass[pass].use[unit];
    for (int r = 0; r < m->ranks; r++)
        for (int i = 0; i < u->params; i++)
            for (int j = u->at[i]; j < u->at[i] + u->numel[i]; j++) x->posted[x->rounds][r][j] = u->touched[i] ? u->window[r][j] : 0;
    x->rounds++;
    u->open = false;
}

static void commit(model *m, int pass, int unit)
{
    model_unit *u = &m->unit[unit];
    model_use *x = &m->pass[pass].use[unit];
    for (int k = 0; k < x->rounds; k++) {
        for (int r = 0; r < m->ranks; r++) {
            float *g = x->posted[k][r];
            for (int j = 0; j < u->total && u->has_unsent[k]; j++) g[j] = u->unsent[k][r][j] + g[j];
            if (m->pass[pass].unsynced) {
                memcpy(u->unsent[k][r], g, sizeof(u->unsent[k][r]));
                continue;
            }
            for (int j = 0; j < u->total; j++) u->acc[k][j] = u->has[k] ? u->acc[k][j] + g[j] : g[j];
            u->has[k] = true;
        }
        u->has_unsent[k] = m->pass[pass].unsynced;
    }
    u->weight[u->weights].pass = m->pass[pass].serial;
    u->weight[u->weights++].weight = m->pass[pass].weight;
    if (!model_has_unsent(m, unit)) u->weights_sent = u->weights;
    u->owner = -1;
}

static void drop_gradients(model_unit *u)
{
    memset(u->has, 0, sizeof(u->has));
    memset(u->has_unsent, 0, sizeof(u->has_unsent));
    u->weights = u->weights_sent = 0;
}

void model_drop_unsent(model *m, int unit)
{
    memset(m->unit[unit].has_unsent, 0, sizeof(m->unit[unit].has_unsent));
    m->unit[unit].weights = m->unit[unit].weights_sent;
}

static void write_gradients(model *m, const call *c, int pass)
{
    model_unit *u = &m->unit[c->unit];
    model_pass *p = &m->pass[pass];
    for (int r = 0; r < m->ranks; r++)
        for (int i = 0; i < u->params; i++)
            if ((c->mask >> i & 1) && !u->frozen[i])
                model_gradient(u->window[r] + u->at[i], u->touched[i], p->number[r], u->p + u->at[i], u->numel[i], p->serial * (uint64_t)m->ranks + (uint64_t)r, i, c->flag);
    for (int r = 0; r < m->ranks; r++) p->number[r] *= 0.75f;
    for (int i = 0; i < u->params; i++) u->touched[i] |= c->mask >> i & 1;
}

static void forward(model *m, const call *c)
{
    const model_unit *u = &m->unit[c->unit];
    model_pass *p = &m->pass[c->pass];
    for (int r = 0; r < m->ranks; r++) {
        for (int i = 0; i < u->params; i++) p->number[r] = model_mix(p->number[r], u->p + u->at[i], u->numel[i], p->serial * (uint64_t)m->ranks + (uint64_t)r, i);
        p->number[r] += 0.25f;
    }
}

/* ---- steps ---- */

static void optim_step(model *m, const call *c)
{
    unsigned units = optim_units(m);
    if (units == 0) return;
    bool finite = model_grads_finite(m, units);
    model_norm n = model_norm_of(m, units);
    double scale = (double)model_grad_scale(c), clip = 1;
    if (scale == 0) scale = n.weight > 0 ? 1 / n.weight : 1;
    if (c->flag && (double)MODEL_CLIP < n.norm * fabs(scale) + 1e-6) clip = (double)MODEL_CLIP / (n.norm * fabs(scale) + 1e-6);
    float by = (float)(scale * clip);
    for (int k = 0; k < MODEL_UNITS; k++) {
        model_unit *u = &m->unit[k];
        if (!(units >> k & 1)) continue;
        float g[MODEL_TOTAL];
        if (finite && final_gradient(m, u, g)) {
            for (int i = 0; i < u->params; i++)
                for (int j = u->at[i]; j < u->at[i] + u->numel[i] && !u->frozen[i]; j++) {
                    u->v[j] = MODEL_MOMENTUM * u->v[j] + (g[j] * by + MODEL_DECAY * u->p[j]);
                    u->p[j] -= MODEL_LR * u->v[j];
                }
        }
        drop_gradients(u);
    }
}

static void own_step(const model *m, model_unit *u)
{
    float g[MODEL_TOTAL];
    bool has = final_gradient(m, u, g);
    for (int i = 0; i < u->params; i++)
        for (int j = u->at[i]; j < u->at[i] + u->numel[i]; j++) u->p[j] = model_own_update(u->p[j], has && !u->frozen[i] ? &g[j] : NULL);
    u->step_written = true;
}

static void step_call(model *m, const call *c)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        model_unit *u = &m->unit[k];
        if (!(c->mask >> k & 1)) continue;
        if (c->kind == CALL_STEP_BEGIN) {
            u->in_step = true;
            send(m, u);
            merge(u);
        }
        if (c->kind == CALL_STEP_WRITE) own_step(m, u);
        if (c->kind != CALL_STEP_END && c->kind != CALL_STEP_CANCEL) continue;
        u->in_step = u->step_written = false;
        drop_gradients(u);
    }
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

static void load(model *m)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        model_unit *u = &m->unit[k];
        for (int i = 0; i < u->params; i++) {
            memcpy(u->p + u->at[i], m->saved[k].p + m->saved[k].at[i], (size_t)u->numel[i] * sizeof(float));
            if (u->in_optim) memcpy(u->v + u->at[i], m->saved[k].v + m->saved[k].at[i], (size_t)u->numel[i] * sizeof(float));
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
}

static void end_pass(model *m, int pass)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        if (m->unit[k].owner != pass) continue;
        if (m->unit[k].open) post(m, pass, k);
        commit(m, pass, k);
    }
    drop_pass(m, pass);
}

static void begin_backward(model *m, const call *c)
{
    model_unit *u = &m->unit[c->unit];
    m->pass[c->pass].use[c->unit].backward_open = true;
    if (!u->open) memset(u->touched, 0, sizeof(u->touched));
    if (trains(u)) {
        u->open = true;
        u->owner = c->pass;
    }
    write_gradients(m, c, c->pass);
}

static void end_backward(model *m, const call *c)
{
    model_use *x = &m->pass[c->pass].use[c->unit];
    x->backward_open = false;
    if (++x->backwards == x->forwards && x->forward_open == 0 && m->unit[c->unit].open) post(m, c->pass, c->unit);
}

void model_reset(model *m)
{
    for (int p = 0; p < MODEL_PASSES; p++) drop_pass(m, p);
    for (int k = 0; k < MODEL_UNITS; k++) {
        m->unit[k].summons = 0;
        m->unit[k].writeback = m->unit[k].in_step = m->unit[k].step_written = false;
    }
}

static void optim_renew(model *m, unsigned mask)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        m->unit[k].in_optim = m->unit[k].exists && (mask >> k & 1);
        memset(m->unit[k].v, 0, sizeof(m->unit[k].v));
    }
}

static void summon_end(model *m, int unit)
{
    model_unit *u = &m->unit[unit];
    if (--u->summons > 0) return;
    if (u->writeback) take(m, unit, u->summoned);
    u->writeback = false;
}

void model_apply(model *m, const call *c)
{
    static _Thread_local float values[MODEL_RANKS][MODEL_TOTAL];
    model_unit *u = &m->unit[c->unit];
    model_pass *p = &m->pass[c->pass >= 0 ? c->pass : 0];
    switch (c->kind) {
    case CALL_PASS_BEGIN:
        memset(p, 0, sizeof(*p));
        p->open = true;
        p->train = c->flag;
        p->serial = m->passes_begun++;
        break;
    case CALL_PASS_END: end_pass(m, c->pass); break;
    case CALL_PASS_CANCEL: drop_pass(m, c->pass); break;
    case CALL_WEIGHT:
        for (int r = 0; r < m->ranks; r++) p->weight += (c->salt + (uint32_t)r) % 7;
        break;
    case CALL_SYNC: p->unsynced = c->flag; break;
    case CALL_FREEZE: u->frozen[c->param] = c->flag; break;
    case CALL_FORWARD_BEGIN:
        p->use[c->unit].forward_open++;
        forward(m, c);
        break;
    case CALL_FORWARD_END:
        p->use[c->unit].forward_open--;
        p->use[c->unit].forwards++;
        break;
    case CALL_RECOMPUTE_BEGIN:
        p->use[c->unit].recompute_open++;
        forward(m, c);
        break;
    case CALL_RECOMPUTE_END: p->use[c->unit].recompute_open--; break;
    case CALL_BACKWARD_BEGIN: begin_backward(m, c); break;
    case CALL_BACKWARD_END: end_backward(m, c); break;
    case CALL_GRAD: write_gradients(m, c, u->owner); break;
    case CALL_SUMMON_READ: u->summons++; break;
    case CALL_SUMMON_WRITE:
        for (int r = 0; u->summons == 0 && r < m->ranks; r++) memcpy(u->summoned[r], u->p, sizeof(u->p));
        u->summons++;
        u->writeback = true;
        break;
    case CALL_WRITE: fill(m, c, u->summoned); break;
    case CALL_SUMMON_END: summon_end(m, c->unit); break;
    case CALL_FILL:
    case CALL_FILL_FAILS: /* of a rank that keeps nothing */
        memset(values, 0, sizeof(values));
        fill(m, c, values);
        take(m, c->unit, values);
        break;
    case CALL_OPTIM_STEP: optim_step(m, c); break;
    case CALL_STEP_BEGIN:
    case CALL_STEP_WRITE:
    case CALL_STEP_END:
    case CALL_STEP_CANCEL: step_call(m, c); break;
    case CALL_ZERO_GRAD: drop_gradients(u); break;
    case CALL_RENEW:
        model_unit_make(u, c->unit, c->salt, m->ranks);
        optim_renew(m, c->mask);
        break;
    case CALL_OPTIM_RENEW: optim_renew(m, c->mask); break;
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
    case CALL_UNSHARD: m->unit[c->unit].unsharded = true; break;
    case CALL_RESHARD: m->unit[c->unit].unsharded = false; break;
    case CALL_PEEK:
    case CALL_PREFETCH:
    case CALL_PENDING:
    case CALL_READ:
    case CALL_READ_ALL:
    case CALL_STEP_NORM:
    case CALL_CREATE_DIFFERS:
    case CALL_BARRIER:
    case CALL_KINDS: break;
    }
}
