/* SPDX-License-Identifier: MIT
 *
 * A module that runs: what is whole around its operations, and its hooks.
 *
 * A module opens its own units. It also opens those that hold its own parameters where nobody around it has: a parameter may be
 * another module's as well, whose unit is sharded again by now, or the module may be run without the one that has the unit.
 * Each opening is a scope of the tape of its own; so the backward does the same in reverse, whatever the reason was. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/pass.h"
#include "shard/runtime.h"
#include "shard/unit.h"
#include "shard/unit_list.h"

fsdp_status fsdp_module_add_hooks(fsdp_module *m, const fsdp_hooks *hooks)
{
    fsdpi_hook_entry *p = fsdpi_realloc(m->hook, (size_t)m->hooks + 1, sizeof(*p));
    FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for hooks");
    m->hook = p;
    m->hook[m->hooks++].hooks = *hooks;
    return FSDP_OK;
}

/* ---- scopes ---- */

typedef fsdp_status unit_fn(fsdp_unit *u, fsdp_pass *pass);

/* Another communicator's unit has streams of its own: the tape's operations run after what it began, */
static fsdp_status begin(fsdp_unit *u, fsdp_tape *tape, unit_fn *fn)
{
    FSDP_TRY(fn(u, fsdpi_tape_pass_on(tape, u->rt->comm)));
    return u->ctx->compute != tape->stream ? fsdpi_stream_wait_stream(tape->stream, u->ctx->compute) : FSDP_OK;
}

/* and before what it ends. */
static fsdp_status end(fsdp_unit *u, fsdp_tape *tape, unit_fn *fn)
{
    if (u->ctx->compute != tape->stream) FSDP_TRY(fsdpi_stream_wait_stream(u->ctx->compute, tape->stream));
    return fn(u, fsdpi_tape_pass_on(tape, u->rt->comm));
}

static fsdp_status unit_before_forward(void *ctx, fsdp_tape *tape)
{
    return begin(ctx, tape, tape->recomputing ? fsdp_unit_begin_recompute : fsdp_unit_begin_forward);
}

static fsdp_status unit_after_forward(void *ctx, fsdp_tape *tape)
{
    return end(ctx, tape, tape->recomputing ? fsdp_unit_end_recompute : fsdp_unit_end_forward);
}

static fsdp_status unit_before_backward(void *ctx, fsdp_tape *tape)
{
    return begin(ctx, tape, fsdp_unit_begin_backward);
}

static fsdp_status unit_after_backward(void *ctx, fsdp_tape *tape)
{
    return end(ctx, tape, fsdp_unit_end_backward);
}

static const fsdpi_scope_hooks unit_scope = { unit_before_forward, unit_after_forward, unit_before_backward, unit_after_backward };

#define RUN_HOOKS(m, tape, which)                                                                           \
    for (int i_ = 0; i_ < (m)->hooks; i_++)                                                                 \
        if ((m)->hook[i_].hooks.which != NULL) FSDP_TRY((m)->hook[i_].hooks.which((m), (tape), (m)->hook[i_].hooks.arg))

static fsdp_status before_forward(void *ctx, fsdp_tape *tape)
{
    fsdp_module *m = ctx;
    RUN_HOOKS(m, tape, before_forward);
    return FSDP_OK;
}

static fsdp_status after_forward(void *ctx, fsdp_tape *tape)
{
    fsdp_module *m = ctx;
    RUN_HOOKS(m, tape, after_forward);
    return FSDP_OK;
}

static fsdp_status before_backward(void *ctx, fsdp_tape *tape)
{
    fsdp_module *m = ctx;
    RUN_HOOKS(m, tape, before_backward);
    return FSDP_OK;
}

static fsdp_status after_backward(void *ctx, fsdp_tape *tape)
{
    fsdp_module *m = ctx;
    RUN_HOOKS(m, tape, after_backward);
    return FSDP_OK;
}

static const fsdpi_scope_hooks hook_scope = { before_forward, after_forward, before_backward, after_backward };

/* ---- enter and leave ---- */

static fsdp_status check_unit(const fsdp_unit *u, const fsdp_tape *tape)
{
    FSDP_FAIL_IF(!fsdpi_comm_encloses(tape->comm, u->rt->comm), FSDP_ERR_INVALID,
                 "fsdp_forward: unit \"%s\" is on another communicator, with ranks that the tape's has not: begin the tape on one that has all ranks of its units", fsdp_unit_name(u));
    FSDP_FAIL_IF(u->ctx->dev != tape->opts.device, FSDP_ERR_INVALID,
                 "fsdp_forward: unit \"%s\" computes on device %s, the tape's tensors are elsewhere: fsdp_tape_opts.device must be the unit's compute device",
                 fsdp_unit_name(u), fsdp_device_name(u->ctx->dev));
    return FSDP_OK;
}

/* Whether a scope around here has it whole. */
static bool is_open(const fsdp_unit *u, const fsdp_tape *tape)
{
    const fsdp_pass *pass = fsdpi_tape_pass_on(tape, u->rt->comm);
    const fsdpi_use *use = pass != NULL ? fsdpi_pass_find(pass, u) : NULL;
    return use != NULL && (use->forward_open > 0 || use->recompute_open > 0 || use->backward_open);
}

static fsdp_status open_unit(fsdp_unit *u, fsdp_tape *tape, const void *owner)
{
    FSDP_TRY(check_unit(u, tape));
    FSDP_TRY(fsdpi_tape_pass_with(tape, u->rt->comm));
    FSDP_TRY(fsdpi_tape_enter(tape, &unit_scope, u));
    tape->open[tape->open_scopes - 1].owner = owner;
    return FSDP_OK;
}

static fsdp_status open_joint(const fsdpi_joint *j, fsdp_tape *tape)
{
    if (is_open(j->unit, tape)) return FSDP_OK;
    FSDP_TRY(open_unit(j->unit, tape, j));
    tape->open[tape->open_scopes - 1].lingers = true;
    return FSDP_OK;
}

static fsdp_status open_all(fsdp_module *m, fsdp_tape *tape)
{
    if (m->unit != NULL) FSDP_TRY(open_unit(m->unit, tape, m));
    if (m->small != NULL) FSDP_TRY(open_unit(m->small, tape, m));
    if (m->ignored != NULL) FSDP_TRY(open_unit(m->ignored, tape, m));
    for (int i = 0; i < m->params; i++)
        if (m->param[i]->unit != NULL && !is_open(m->param[i]->unit, tape)) FSDP_TRY(open_unit(m->param[i]->unit, tape, m));
    return m->hooks > 0 ? fsdpi_tape_enter(tape, &hook_scope, m) : FSDP_OK;
}

/* A mark of its own tells what to leave with it. */
fsdp_status fsdpi_module_enter(fsdp_module *m, fsdp_tape *tape)
{
    bool asks = m->unit != NULL || m->small != NULL || m->ignored != NULL || m->joint != NULL || m->hooks > 0;
    for (int i = 0; i < m->params && !asks; i++) asks = m->param[i]->unit != NULL;
    if (asks) FSDP_TRY(fsdpi_tape_check_pass(tape));
    if (m->joint != NULL) FSDP_TRY(open_joint(m->joint, tape));
    FSDP_TRY(fsdpi_tape_enter(tape, NULL, NULL));
    tape->open[tape->open_scopes - 1].owner = m;
    FSDP_TRY(fsdpi_buffers_enter(m, tape));
    return open_all(m, tape);
}

fsdp_status fsdpi_module_leave(fsdp_module *m, fsdp_tape *tape)
{
    int at = tape->open_scopes - 1;
    while (at >= 0 && (tape->open[at].hooks != NULL || tape->open[at].owner != m)) at--;
    FSDPI_ASSERT(at >= 0);
    FSDP_TRY(fsdpi_tape_leave_to(tape, at));
    bool ends_joint = at > 0 && m->joint != NULL && m->joint->last == m && tape->open[at - 1].owner == m->joint;
    return ends_joint ? fsdpi_tape_leave_to(tape, at - 1) : FSDP_OK;
}

/* ---- forward ---- */

void fsdp_module_set_recompute(fsdp_module *m, bool on)
{
    m->recompute = on;
}

static fsdp_status region(void *ctx, fsdp_tape *tape, fsdp_tensor *const *in, fsdp_tensor **out)
{
    fsdp_module *m = ctx;
    return m->forward(m, m->ctx, tape, in[0], out);
}

/* The unit is outside of what is computed again: it is gathered once for the recompute and the backward. */
fsdp_status fsdp_forward(fsdp_module *m, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    FSDP_FAIL_IF(m->forward == NULL, FSDP_ERR_INVALID, "fsdp_forward: a module of type %s only holds others: it cannot be run", m->type);
    FSDP_TRY(fsdpi_module_enter(m, tape));
    if (m->recompute) FSDP_TRY(fsdpi_tape_region(tape, region, m, &in, 1, out, 1));
    else FSDP_TRY(m->forward(m, m->ctx, tape, in, out));
    return fsdpi_module_leave(m, tape);
}
