/* SPDX-License-Identifier: MIT */
#include "support/random/choose.h"

/* ---- how often ---- */

static const struct {
    call_kind kind;
    int within, without; /* how often, while a pass is open and while none is */
} habits[] = {
    { CALL_PASS_BEGIN, 4, 100 },    { CALL_JOINED_BEGIN, 0, 20 },    { CALL_PASS_END, 10, 0 },        { CALL_PASS_CANCEL, 1, 0 },    { CALL_WEIGHT, 6, 0 },         { CALL_FORWARD_BEGIN, 20, 0 },
    { CALL_FORWARD_END, 40, 0 },   { CALL_RECOMPUTE_BEGIN, 6, 0 },  { CALL_RECOMPUTE_END, 12, 0 }, { CALL_BACKWARD_BEGIN, 80, 0 }, { CALL_BACKWARD_END, 40, 0 },
    { CALL_GRAD, 6, 0 },           { CALL_PEEK, 8, 6 },             { CALL_PREFETCH, 8, 4 },        { CALL_UNSHARD, 3, 6 },        { CALL_RESHARD, 3, 4 },
    { CALL_READ, 0, 12 },          { CALL_READ_ALL, 0, 3 },       { CALL_SUMMON_READ, 0, 10 },
    { CALL_SUMMON_WRITE, 0, 8 },   { CALL_WRITE, 0, 16 },           { CALL_SUMMON_END, 0, 40 },    { CALL_FILL, 0, 14 },          { CALL_FILL_FAILS, 0, 4 },
    { CALL_FILL_FROM, 0, 8 },      { CALL_FILL_FROM_FAILS, 0, 3 },  { CALL_CHECK_REPLICAS, 0, 5 },  { CALL_BROADCAST, 0, 3 },      { CALL_DIVERGE, 0, 3 },
    { CALL_EMA_RENEW, 0, 2 },      { CALL_EMA_UPDATE, 1, 6 },       { CALL_EMA_READ, 1, 4 },        { CALL_SWAP_IN, 0, 5 },        { CALL_SWAP_OUT, 0, 20 },
    { CALL_SUMMON, 0, 16 },        { CALL_SUMMON_GRADS, 0, 10 },   { CALL_SUMMON_CANCEL, 0, 4 },
    { CALL_CAP, 1, 8 },
    { CALL_TEACH, 0, 16 },         { CALL_READ_GRAD, 0, 30 },
    { CALL_OPTIM_STEP, 0, 16 },    { CALL_STEP_BEGIN, 0, 10 },      { CALL_STEP_WRITE, 0, 14 },    { CALL_STEP_NORM, 0, 6 },      { CALL_STEP_END, 0, 24 },
    { CALL_STEP_CANCEL, 0, 3 },    { CALL_ZERO_GRAD, 0, 4 },        { CALL_RENEW, 0, 5 },          { CALL_CREATE_DIFFERS, 0, 4 }, { CALL_OPTIM_RENEW, 0, 3 },
    { CALL_SYNC, 8, 0 },           { CALL_FREEZE, 0, 16 },         { CALL_PENDING, 3, 6 },
    { CALL_SAVE, 0, 1 },           { CALL_LOAD, 0, 1 },             { CALL_KERNEL_FAILS, 1, 0 },   { CALL_RESET, 1, 1 },          { CALL_STRAY, 1, 1 },
    { CALL_BARRIER, 1, 1 },
};
enum { HABITS = sizeof(habits) / sizeof(habits[0]) };

static call_kind choose(rng *g, bool within)
{
    int all = 0, i = 0;
    for (int k = 0; k < HABITS; k++) all += within ? habits[k].within : habits[k].without;
    for (int at = below(g, all); at >= (within ? habits[i].within : habits[i].without); i++) at -= within ? habits[i].within : habits[i].without;
    return habits[i].kind;
}

/* A call of this kind with arguments at random. */
static call make_up(rng *g, const model *m, call_kind kind)
{
    call c = { .kind = kind, .unit = below(g, MODEL_UNITS), .pass = below(g, MODEL_PASSES), .rank = below(g, m->ranks), .salt = draw(g), .other = below(g, MODEL_UNITS), .flag = one_in(g, 2) };
    const model_unit *u = &m->unit[c.unit];
    c.param = u->params > 0 ? below(g, u->params) : 0;
    c.mask = 1u + (unsigned)below(g, (1 << MODEL_UNITS) - 1);
    if (ONE_OF(kind, CALL_BACKWARD_BEGIN, CALL_GRAD)) {
        c.mask = one_in(g, 4) ? c.mask % (1u << MODEL_PARAMS) : (1u << MODEL_PARAMS) - 1;
        c.flag = one_in(g, 100); /* not finite */
    }
    if (kind == CALL_RENEW && one_in(g, 2) && m->unit[c.other].exists) { /* like another, which it can teach; or in another mode */
        c.salt = m->unit[c.other].salt;
        if (one_in(g, 3)) c.salt = (c.salt & ~3u) | draw(g) % 4;
    }
    if (ONE_OF(kind, CALL_PASS_BEGIN)) c.flag = !one_in(g, 5);
    if (kind == CALL_SYNC) c.flag = !one_in(g, 4); /* off */
    if (ONE_OF(kind, CALL_STEP_END, CALL_STEP_CANCEL, CALL_STEP_NORM, CALL_STEP_WRITE) && one_in(g, 2)) c.mask = model_in_step(m);
    if (kind == CALL_JOINED_BEGIN) {
        c.mask = one_in(g, 8) ? 0 : draw(g) % (1u << m->ranks);
        c.flag = !one_in(g, 4);
        return c;
    }
    for (int k = 0; k < MODEL_UNITS; k++)
        if (!m->unit[k].exists && !ONE_OF(kind, CALL_RENEW, CALL_OPTIM_RENEW)) c.mask &= ONE_OF(kind, CALL_BACKWARD_BEGIN, CALL_GRAD) ? ~0u : ~(1u << k);
    return c;
}

/* In passes that others have joined there may be nothing but what these can follow. */
static bool can_be_followed(const model *m, const call *c)
{
    fsdp_status want = model_expects(m, c);
    if (want == FSDP_ERR_STATE || want == FSDP_ERR_INVALID || want == FSDP_ERR_NOMEM) return true;
    if (c->kind == CALL_PASS_BEGIN) /* one of a kind */
        for (int p = 0; p < MODEL_PASSES; p++)
            if (m->pass[p].open && m->pass[p].train == c->flag) return false;
    if (c->kind == CALL_RESET) return (m->leaders & (m->leaders - 1)) == 0; /* others would be told in the call before */
    return ONE_OF(c->kind, CALL_PASS_BEGIN, CALL_PASS_END, CALL_PASS_CANCEL, CALL_WEIGHT, CALL_SYNC, CALL_FORWARD_BEGIN, CALL_FORWARD_END, CALL_RECOMPUTE_BEGIN, CALL_RECOMPUTE_END,
                  CALL_BACKWARD_BEGIN, CALL_BACKWARD_END, CALL_GRAD, CALL_PEEK, CALL_PREFETCH, CALL_UNSHARD, CALL_RESHARD, CALL_PENDING, CALL_EMA_READ, CALL_KERNEL_FAILS);
}

/* What the plain program has no answer to, or no room for. */
static bool makes_sense(const model *m, const call *c)
{
    const model_unit *u = &m->unit[c->unit];
    const model_pass *p = &m->pass[c->pass];
    bool steps = ONE_OF(c->kind, CALL_STEP_BEGIN, CALL_STEP_WRITE, CALL_STEP_NORM, CALL_STEP_END, CALL_STEP_CANCEL);
    if (steps && c->mask == 0) return false;
    if (!u->exists && !ONE_OF(c->kind, CALL_RENEW, CALL_RESET, CALL_BARRIER, CALL_READ_ALL, CALL_OPTIM_STEP, CALL_OPTIM_RENEW, CALL_JOINED_BEGIN, CALL_EMA_RENEW, CALL_EMA_UPDATE, CALL_EMA_READ, CALL_SWAP_IN, CALL_SWAP_OUT, CALL_CAP) && !steps) return false;
    if (model_room_of(m, c) == MODEL_UNSURE) return false;
    if (m->leaders != 0 && !can_be_followed(m, c)) return false;
    switch (c->kind) {
    case CALL_PASS_BEGIN: return !p->open;
    case CALL_JOINED_BEGIN: return model_open_passes(m) == 0 && model_expects(m, c) == FSDP_OK;
    case CALL_FORWARD_BEGIN: return p->open && model_open_uses(m, c->pass) < 6 && p->use[c->unit].forwards < 6;
    case CALL_BACKWARD_BEGIN: return p->use[c->unit].rounds < MODEL_ROUNDS && u->weights < MODEL_WEIGHTS;
    case CALL_PASS_END: return p->open;
    case CALL_WEIGHT:
    case CALL_SYNC:
    case CALL_PASS_CANCEL:
    case CALL_KERNEL_FAILS: return p->open;
    case CALL_EMA_RENEW: return c->mask != 0;
    case CALL_EMA_UPDATE:
    case CALL_EMA_READ:
    case CALL_SWAP_IN:
    case CALL_SWAP_OUT: return model_ema_mask(m) != 0;
    case CALL_TEACH: return m->unit[c->other].exists && (model_may_teach(m, c->unit, c->other) || c->salt % 16 == 0);
    case CALL_FREEZE:
    case CALL_READ_GRAD:
    case CALL_READ: return u->params > 0;
    case CALL_RENEW:
    case CALL_CREATE_DIFFERS:
        if (c->kind == CALL_RENEW ? !model_fits_cap(m, c->unit, c->salt) : m->ranks == 1 && m->cap > 0) return false;
        return !u->exists || (u->summons == 0 && !u->in_step); /* a unit is destroyed at rest */
    case CALL_STEP_WRITE: return model_in_step(m) == 0 || model_grads_finite(m, c->mask);
    case CALL_STEP_CANCEL:
        for (int k = 0; k < MODEL_UNITS; k++)
            if ((c->mask >> k & 1) && m->unit[k].step_written) return false;
        return true;
    case CALL_SAVE: return model_in_step(m) == 0;
    case CALL_LOAD: return m->saves > 0;
    case CALL_STRAY: return m->ranks > 1;
    default: return true;
    }
}

/* For some time new things are begun, then what is open is ended, so that passes come to an end and steps have gradients. */
static bool is_for_later(long n, call_kind k)
{
    enum { PHASE = 40 };
    return n / PHASE % 2 == 1 && ONE_OF(k, CALL_PASS_BEGIN, CALL_JOINED_BEGIN, CALL_FORWARD_BEGIN, CALL_RECOMPUTE_BEGIN, CALL_PASS_CANCEL, CALL_KERNEL_FAILS, CALL_STRAY, CALL_RESET);
}

static void note(plan *p, call_kind kind, int unit)
{
    p->turn[p->count].kind = kind;
    p->turn[p->count++].unit = unit;
}

static void plan_backward(rng *g, plan *p, int unit)
{
    if (one_in(g, 4)) {
        note(p, CALL_RECOMPUTE_BEGIN, unit);
        note(p, CALL_RECOMPUTE_END, unit);
    }
    note(p, CALL_BACKWARD_BEGIN, unit);
    if (one_in(g, 4)) note(p, CALL_GRAD, unit);
    note(p, CALL_BACKWARD_END, unit);
}

static void make_plan(rng *g, plan *p)
{
    int order[MODEL_UNITS], n = 1 + below(g, MODEL_UNITS);
    for (int i = 0; i < n; i++) order[i] = below(g, MODEL_UNITS); /* some twice */
    bool nested = one_in(g, 2), in_turns = !nested && one_in(g, 2), saves = one_in(g, 12);
    *p = (plan){ .pass = below(g, MODEL_PASSES) };
    note(p, one_in(g, 4) ? CALL_JOINED_BEGIN : CALL_PASS_BEGIN, 0);
    if (one_in(g, 2)) note(p, CALL_WEIGHT, 0);
    if (one_in(g, 3)) note(p, CALL_SYNC, 0);
    for (int i = 0; i < n; i++) {
        note(p, CALL_FORWARD_BEGIN, order[i]);
        if (!nested || i > 0) note(p, CALL_FORWARD_END, order[i]);
        if (in_turns) plan_backward(g, p, order[i]);
    }
    if (nested) note(p, CALL_FORWARD_END, order[0]);
    for (int i = n - 1; i >= 0 && !in_turns; i--) plan_backward(g, p, order[i]);
    note(p, CALL_PASS_END, 0);
    if (saves) note(p, CALL_SAVE, 0);
    if (one_in(g, 3)) {
        note(p, CALL_OPTIM_STEP, 0);
        note(p, CALL_OPTIM_STEP, 0);
    }
    else if (one_in(g, 3)) {
        note(p, CALL_STEP_BEGIN, 0);
        note(p, CALL_STEP_NORM, 0);
        for (int k = 0; k < 3 && one_in(g, 2); k++) note(p, CALL_READ_GRAD, below(g, MODEL_UNITS));
        if (one_in(g, 2)) note(p, CALL_STEP_WRITE, 0);
        note(p, CALL_STEP_END, 0);
    }
    if (saves) note(p, CALL_LOAD, 0);
}

static bool next_of_plan(rng *g, const model *m, plan *p, call *c)
{
    if (p->at == p->count) return false;
    *c = make_up(g, m, p->turn[p->at].kind);
    c->unit = p->turn[p->at++].unit;
    c->param = m->unit[c->unit].params > 0 ? c->param % m->unit[c->unit].params : 0;
    c->pass = p->pass;
    if (ONE_OF(c->kind, CALL_PASS_BEGIN, CALL_JOINED_BEGIN)) c->flag = true;
    if (c->kind == CALL_OPTIM_STEP) c->other = p->at % 2; /* the one, then the other */
    return makes_sense(m, c) && model_expects(m, c) == FSDP_OK;
}

call choose_call(rng *g, const model *m, plan *p, bool injects, long n)
{
    for (;;) {
        bool within = model_open_passes(m) > 0, lost = false, probe = one_in(g, 12);
        call c;
        for (int k = 0; k < MODEL_PASSES; k++) lost |= m->pass[k].open && m->pass[k].lost;
        if (p->at == p->count && !within && one_in(g, 8)) make_plan(g, p);
        bool planned = !lost && !one_in(g, 5) && next_of_plan(g, m, p, &c);
        if (!planned) c = make_up(g, m, choose(g, probe ? one_in(g, 2) : within));
        if (lost) { /* nothing else is said to work */
            c.kind = one_in(g, 4) ? CALL_PASS_END : CALL_PASS_CANCEL;
            if (!m->pass[c.pass].lost) continue;
        }
        /* What is always allowed would come too often, and leave nothing to look at. */
        if (!lost && !planned && ONE_OF(c.kind, CALL_RESET, CALL_STRAY, CALL_KERNEL_FAILS, CALL_PASS_CANCEL, CALL_ZERO_GRAD, CALL_RENEW) && !one_in(g, 4)) continue;
        if (!lost && !planned && is_for_later(n, c.kind)) continue;
        if (!makes_sense(m, &c)) continue;
        fsdp_status want = model_expects(m, &c);
        if (want == FSDP_ERR_STATE && (!probe || ONE_OF(c.kind, CALL_WRITE, CALL_STEP_WRITE, CALL_RENEW, CALL_CREATE_DIFFERS, CALL_READ_ALL)) && c.kind != CALL_PEEK && !lost) continue;
        if (injects && m->leaders == 0 && want == FSDP_OK && one_in(g, planned ? 60 : 16)) c.nomem = 1 + below(g, 12);
        return c;
    }
}
