/* SPDX-License-Identifier: MIT */
#include "shard/life.h"

#include "base/error.h"
#include "base/log.h"
#include "shard/pass.h"

#include <stdio.h>

static const struct {
    const char *not_so, *way_out;
} conditions[] = {
#define ROW(c, not_so, way_out) [c] = { not_so, way_out },
    FSDPI_CONDITION_MAP(ROW)
#undef ROW
};

static const struct {
    const char *call;
    unsigned needs;
} events[] = {
#define ROW(e, call, needs, does) [e] = { call, needs },
    FSDPI_EVENT_MAP(ROW)
#undef ROW
};

static const char *const residencies[] = {
#define ROW(e, name) [e] = name,
    FSDPI_RESIDENCY_MAP(ROW)
#undef ROW
};
static const char *const gradients[] = {
#define ROW(e, name) [e] = name,
    FSDPI_GRADIENT_MAP(ROW)
#undef ROW
};

const char *fsdpi_event_call(fsdpi_event ev)
{
    return events[ev].call;
}

unsigned fsdpi_event_conditions(fsdpi_event ev)
{
    return events[ev].needs;
}

bool fsdpi_unit_has_gradients(const fsdp_unit *u)
{
    return fsdpi_grad_any(u) || fsdpi_unsent_any(u);
}

const char *fsdp_unit_state(const fsdp_unit *unit)
{
    fsdp_unit *u = (fsdp_unit *)(uintptr_t)unit; /* the text is the unit's, for the caller to read */
    snprintf(u->state_text, sizeof(u->state_text), "%s%s, %s%s%s%s%s", residencies[u->residency], u->summons > 0 ? " (summoned)" : "",
             gradients[u->gradient], fsdpi_unit_has_gradients(u) ? ", gradients accumulated" : "", fsdpi_unsent_any(u) ? " (some not sent)" : "", u->in_step ? ", in a step" : "",
             u->averaged ? ", averaged" : "");
    return u->state_text;
}

static bool pass_is_open(const fsdpi_runtime *rt, const fsdp_pass *pass)
{
    const fsdp_pass *p = rt->passes;
    while (p != NULL && p != pass) p = p->older;
    return p != NULL && pass != NULL;
}

static bool is_current(const fsdp_unit *u)
{
    return u->flat == NULL || u->whole_version == u->version;
}

static bool holds(fsdpi_condition c, const fsdp_unit *u, fsdpi_event ev, const fsdp_pass *pass)
{
    /* A pass that has ended is not looked into: it is no more. */
    const fsdpi_use *use = pass_is_open(u->rt, pass) ? fsdpi_pass_find(pass, u) : NULL;
    switch (c) {
    case FSDPI_NO_PASS: return u->rt->passes == NULL;
    case FSDPI_THIS_PASS: return pass_is_open(u->rt, pass);
    case FSDPI_TRAIN: return pass->kind == FSDP_PASS_TRAIN;
    case FSDPI_NOT_SUMMONED: return u->summons == 0;
    case FSDPI_SUMMONED: return u->summons > 0;
    case FSDPI_NOT_IN_STEP: return !u->in_step;
    case FSDPI_IN_STEP: return u->in_step;
    case FSDPI_NOT_AVERAGED: return !u->averaged;
    case FSDPI_AVERAGED: return u->averaged;
    case FSDPI_FORWARD_OPEN: return use != NULL && use->forward_open > 0;
    case FSDPI_RECOMPUTE_OPEN: return use != NULL && use->recompute_open > 0;
    case FSDPI_FORWARD_TO_UNDO: return use != NULL && use->forwards > use->backwards;
    case FSDPI_BACKWARD_OPEN:
        /* fsdp_unit_grad() names no pass: the one that the gradient is of */
        if (ev == FSDPI_EV_GRAD) use = u->pass != NULL ? fsdpi_pass_find(u->pass, u) : NULL;
        return use != NULL && use->backward_open;
    case FSDPI_NO_BACKWARD_OPEN: return use == NULL || !use->backward_open;
    case FSDPI_NOT_HELD: return u->holders == 0 && u->summons == 0; /* a summon may hold nothing, or only on rank 0 */
    case FSDPI_NO_OTHER_PENDING: return u->pass == NULL || u->pass == pass;
    case FSDPI_READABLE:
        /* In a step owners write; in mode none everything is this rank's own. */
        if (u->in_step && u->flat != NULL) return false;
        return u->residency == FSDPI_WHOLE || (u->residency == FSDPI_KEPT && is_current(u));
    case FSDPI_NO_GRADIENTS: return !fsdpi_unit_has_gradients(u);
    case FSDPI_WRITEBACK_OR_OUTER: return u->summons == 0 || u->writeback;
    case FSDPI_CONDITION_COUNT: break;
    }
    return false;
}

fsdp_status fsdpi_life_allows(const fsdp_unit *u, fsdpi_event ev, const fsdp_pass *pass)
{
    bool reads = ev == FSDPI_EV_PARAM || ev == FSDPI_EV_GRAD;
    FSDP_TRY((reads ? fsdpi_call_may_read : fsdpi_call_may_begin)(u->rt->comm, events[ev].call));
    for (int c = 0; c < FSDPI_CONDITION_COUNT; c++) {
        if ((events[ev].needs & 1u << c) == 0 || holds((fsdpi_condition)c, u, ev, pass)) continue;
        FSDP_FAIL(FSDP_ERR_STATE, "%s: unit \"%s\": %s: %s (it is %s)", events[ev].call, u->name, conditions[c].not_so,
                  conditions[c].way_out, fsdp_unit_state(u));
    }
    if (!reads) u->rt->about = pass != NULL ? pass->number + 1 : 0;
    return FSDP_OK;
}

/* ---- moves ---- */

/* "unit "h.3": residency sharded -> whole (fsdp_unit_begin_forward, pass 12)". */
static void say(const fsdp_unit *u, const char *what, const char *from, const char *to)
{
    char pass[32] = "";
    if (u->rt->about > 0) snprintf(pass, sizeof(pass), ", pass %llu", (unsigned long long)u->rt->about - 1);
    fsdpi_log(FSDP_LOG_DEBUG, "unit \"%s\": %s%s -> %s (%s%s)", u->name, what, from, to, fsdpi_call_name(u->rt->comm), pass);
}

void fsdpi_unit_move(fsdp_unit *u, fsdpi_residency to)
{
    fsdpi_residency from = u->residency;
    if (from == to) return;
    if (u->rt->moved != NULL) u->rt->moved(u->rt->moved_arg, u, (int)from, (int)to);
    u->residency = to;
    if (fsdpi_log_wants(FSDP_LOG_DEBUG)) say(u, "residency ", residencies[from], residencies[to]);
}

void fsdpi_unit_move_gradient(fsdp_unit *u, fsdpi_gradient to)
{
    fsdpi_gradient from = u->gradient;
    if (from == to) return;
    u->gradient = to;
    if (fsdpi_log_wants(FSDP_LOG_DEBUG)) say(u, "", gradients[from], gradients[to]);
}

void fsdpi_unit_opened(const fsdp_unit *u, const char *what, int now, int by)
{
    char from[16], to[16], open[32];
    if (by == 0 || !fsdpi_log_wants(FSDP_LOG_DEBUG)) return;
    snprintf(open, sizeof(open), "open %s ", what);
    snprintf(from, sizeof(from), "%d", now - by);
    snprintf(to, sizeof(to), "%d", now);
    say(u, open, from, to);
}

bool fsdpi_residency_may_move(fsdpi_residency from, fsdpi_residency to)
{
#define ROW(a, b, when) || (from == (a) && to == (b))
    return from == to FSDPI_RESIDENCY_MOVE_MAP(ROW);
#undef ROW
}

bool fsdpi_gradient_may_move(fsdpi_gradient from, fsdpi_gradient to)
{
#define ROW(a, b, when) || (from == (a) && to == (b))
    return from == to FSDPI_GRADIENT_MOVE_MAP(ROW);
#undef ROW
}

void fsdpi_unit_check(fsdp_unit *u)
{
#ifndef NDEBUG
    bool passes = u->rt->passes != NULL;
    FSDPI_ASSERT((u->whole == NULL) == (u->residency == FSDPI_SHARDED));                                  /* I1 */
    FSDPI_ASSERT((u->holders > 0) == (u->residency == FSDPI_WHOLE));                                      /* I2 */
    FSDPI_ASSERT((u->window != NULL || u->block != NULL) == (u->gradient == FSDPI_GRAD_OPEN));                                /* I3 */
    FSDPI_ASSERT((u->pass != NULL) == (u->gradient != FSDPI_GRAD_NONE));                                  /* I4 */
    FSDPI_ASSERT(u->pass == NULL || pass_is_open(u->rt, u->pass));                                        /* I4 */
    FSDPI_ASSERT(!passes || (u->summons == 0 && !u->in_step));                                            /* I5 */
    FSDPI_ASSERT(u->residency != FSDPI_WHOLE || is_current(u));                                           /* I6 */
    FSDPI_ASSERT(!u->in_step || u->gradient == FSDPI_GRAD_NONE);                                          /* I7 */
    bool has_copy = u->summons > 0 && !u->summon_absent && (u->writeback || u->summon.host);
    FSDPI_ASSERT((u->summoned != NULL) == has_copy);                                                      /* I8 */
    FSDPI_ASSERT(passes || u->holders == (u->summon_absent || u->summon.host ? 0 : u->summons));          /* I9 */
    FSDPI_ASSERT(passes || (u->gradient == FSDPI_GRAD_NONE && u->rt->owed == NULL));                      /* I10 */
    FSDPI_ASSERT(fsdpi_residency_may_move(u->checked_residency, u->residency));                           /* I11 */
    FSDPI_ASSERT(fsdpi_gradient_may_move(u->checked_gradient, u->gradient));                              /* I11 */
    u->checked_residency = u->residency;
    u->checked_gradient = u->gradient;
#else
    (void)u;
#endif
}

void fsdpi_unit_dump(const fsdp_unit *u)
{
    fprintf(stderr,
            "unit \"%s\" of %d parameters, %lld elements, slice [%lld, %lld): %s\n"
            "  version %u, whole %p at version %u, holders %d, summons %d, window %p, master %p%s\n",
            u->name, u->layout.count, (long long)u->layout.total, (long long)u->lo, (long long)u->hi, fsdp_unit_state(u),
            u->version, (void *)u->whole, u->whole_version, u->holders, u->summons, (void *)u->window, (void *)u->master,
            u->published == NULL ? " (published)" : "");
    for (int k = 0; k < u->rounds; k++)
        fprintf(stderr, "  accumulator %d: now %p%s, next %p%s\n", k, u->acc[k].now, u->acc[k].has ? " (has)" : "",
                u->acc[k].next, u->acc[k].pending ? " (pending)" : "");
}
