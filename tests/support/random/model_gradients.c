/* SPDX-License-Identifier: MIT
 *
 * The model's gradients and steps. */
#include "support/random/model_inside.h"

#include "base/xsum.h"

#include <math.h>
#include <string.h>

/* ---- gradients ---- */

/* What a rank sends is rounded, once; owners add in fp32, and round the sum to what it is kept in. */
static void add_leaf(model_unit *u, int round, int at, float g)
{
    float x = model_rounded(u->reduce_dtype, g);
    u->acc[round][at] = model_rounded(u->grad_dtype, u->has[round] ? u->acc[round][at] + x : x);
}

/* Unsent gradients go to the accumulators, in rank order. */
static void send(const model *m, model_unit *u)
{
    for (int k = 0; k < MODEL_ROUNDS; k++) {
        for (int r = 0; r < m->ranks && u->has_unsent[k]; r++) {
            for (int j = 0; j < u->total; j++) add_leaf(u, k, j, u->unsent[k][r][j]);
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

/* A step adds the rounds up, but where it does so elsewhere; a reset within it leaves the sum as one round. */
void model_merge(model_unit *u)
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

void model_post(model *m, int pass, int unit)
{
    model_unit *u = &m->unit[unit];
    model_use *x = &m->pass[pass].use[unit];
    for (int r = 0; r < m->ranks; r++)
        for (int i = 0; i < u->params; i++)
            for (int j = u->at[i]; j < u->at[i] + u->numel[i]; j++) x->posted[x->rounds][r][j] = u->touched[i] && !model_has_joined(m, r) ? u->window[r][j] : 0;
    x->rounds++;
    u->open = false;
}

void model_commit(model *m, int pass, int unit)
{
    model_unit *u = &m->unit[unit];
    model_use *x = &m->pass[pass].use[unit];
    for (int k = 0; k < x->rounds; k++) {
        for (int r = 0; r < m->ranks; r++) {
            float *g = x->posted[k][r];
            for (int j = 0; j < u->total && u->has_unsent[k]; j++) g[j] = u->unsent[k][r][j] + g[j];
            if (m->pass[pass].unsynced) {
                for (int j = 0; j < u->total; j++) u->unsent[k][r][j] = model_rounded(u->grad_dtype, g[j]);
                continue;
            }
            for (int j = 0; j < u->total; j++) add_leaf(u, k, j, g[j]);
            u->has[k] = true;
        }
        u->has_unsent[k] = m->pass[pass].unsynced;
    }
    u->weight[u->weights].pass = m->pass[pass].serial;
    u->weight[u->weights++].weight = m->pass[pass].weight;
    if (!model_has_unsent(m, unit)) u->weights_sent = u->weights;
    u->owner = -1;
}

void model_drop_gradients(model_unit *u)
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

/* What compute has of a parameter. */
static void see(const model_unit *u, int param, float *out)
{
    for (int j = 0; j < u->numel[param]; j++) out[j] = model_seen(u, u->sees_exact, u->at[param] + j);
}

static uint64_t leaf_of(const model *m, const model_pass *p, int rank)
{
    return p->serial * (uint64_t)m->ranks + (uint64_t)rank;
}

void model_write_gradients(model *m, const call *c, int pass)
{
    model_unit *u = &m->unit[c->unit];
    model_pass *p = &m->pass[pass];
    float x[MODEL_TOTAL];
    for (int i = 0; i < u->params; i++) {
        see(u, i, x);
        for (int r = 0; r < m->ranks && (c->mask >> i & 1) && !u->frozen[i]; r++)
            model_gradient(u->window[r] + u->at[i], u->touched[i], p->number[r], x, u->numel[i], leaf_of(m, p, r), i, c->flag);
    }
    for (int r = 0; r < m->ranks; r++) p->number[r] *= 0.75f;
    for (int i = 0; i < u->params; i++) u->touched[i] |= c->mask >> i & 1;
}

void model_forward(model *m, const call *c)
{
    const model_unit *u = &m->unit[c->unit];
    model_pass *p = &m->pass[c->pass];
    float x[MODEL_TOTAL];
    for (int i = 0; i < u->params; i++) {
        see(u, i, x);
        for (int r = 0; r < m->ranks; r++) p->number[r] = model_mix(p->number[r], x, u->numel[i], leaf_of(m, p, r), i);
    }
    for (int r = 0; r < m->ranks; r++) p->number[r] += 0.25f;
}

/* ---- steps ---- */

void model_optim_step(model *m, const call *c)
{
    unsigned units = model_optim_mask(m, model_optim_of(c));
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
            for (int i = 0; i < u->params; i++) {
                u->steps[i] += !u->frozen[i];
                for (int j = u->at[i]; j < u->at[i] + u->numel[i] && !u->frozen[i]; j++) {
                    if (u->optim == MODEL_SGD) model_sgd(&u->p[j], &u->v[0][j], g[j] * by);
                    else model_adamw(&u->p[j], &u->v[0][j], &u->v[1][j], g[j] * by, u->steps[i]);
                }
            }
        }
        model_drop_gradients(u);
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

void model_step_call(model *m, const call *c)
{
    for (int k = 0; k < MODEL_UNITS; k++) {
        model_unit *u = &m->unit[k];
        if (!(c->mask >> k & 1)) continue;
        if (c->kind == CALL_STEP_BEGIN) {
            u->in_step = true;
            send(m, u);
            if (u->grad_dtype == FSDP_F32 && !model_summed_apart(m, u)) model_merge(u);
        }
        if (c->kind == CALL_STEP_WRITE) own_step(m, u);
        if (c->kind != CALL_STEP_END && c->kind != CALL_STEP_CANCEL) continue;
        u->in_step = u->step_written = false;
        model_drop_gradients(u);
    }
}
