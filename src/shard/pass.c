/* SPDX-License-Identifier: MIT
 *
 * Passes, and what units do in them. */
#include "shard/pass.h"

#include "base/alloc.h"
#include "base/error.h"

fsdpi_use *fsdpi_pass_find(const fsdp_pass *pass, const fsdp_unit *u)
{
    for (int i = 0; i < pass->uses; i++)
        if (pass->use[i].unit == u) return &pass->use[i];
    return NULL;
}

fsdp_status fsdpi_pass_use(fsdp_pass *pass, fsdp_unit *u, fsdpi_use **out)
{
    *out = fsdpi_pass_find(pass, u);
    if (*out != NULL) return FSDP_OK;
    if (pass->uses == pass->room) {
        int room = pass->room > 0 ? 2 * pass->room : 16;
        void *p = fsdpi_realloc(pass->use, (size_t)room, sizeof(*pass->use));
        FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for the units of a pass");
        pass->use = p;
        pass->room = room;
    }
    pass->use[pass->uses] = (fsdpi_use){ .unit = u };
    *out = &pass->use[pass->uses++];
    return FSDP_OK;
}

static const char *const kind_names[FSDPI_PASS_KINDS] = { [FSDP_PASS_TRAIN] = "training", [FSDP_PASS_EVAL] = "evaluation" };

fsdp_status fsdp_pass_begin(fsdp_pass **out, fsdp_comm *comm, fsdp_pass_kind kind)
{
    fsdpi_runtime *rt;
    FSDP_FAIL_IF((unsigned)kind >= FSDPI_PASS_KINDS, FSDP_ERR_INVALID, "fsdp_pass_begin: kind %d", (int)kind);
    FSDPI_CALL(comm);
    FSDP_TRY(fsdpi_runtime_of(&rt, comm));
    for (const fsdp_unit *u = rt->units; u != NULL; u = u->following) {
        FSDP_FAIL_IF(u->summons > 0, FSDP_ERR_STATE, "fsdp_pass_begin: unit \"%s\" is summoned: end the summon first", u->name);
        FSDP_FAIL_IF(u->in_step, FSDP_ERR_STATE, "fsdp_pass_begin: unit \"%s\" is in a step: end the step first", u->name);
    }
    fsdp_pass *p;
    FSDPI_NEW(p, 1);
    fsdp_status st = fsdpi_comm_tag(comm, FSDPI_OP_PASS_BEGIN, kind_names[kind], 0);
    if (st != FSDP_OK) {
        fsdpi_free(p);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    p->rt = rt;
    p->kind = kind;
    p->number = rt->pass_count++;
    p->older = rt->passes;
    rt->passes = p;
    *out = p;
    return FSDP_OK;
}

void fsdp_pass_add_weight(fsdp_pass *pass, double weight)
{
    pass->weight += weight;
}

fsdp_status fsdp_pass_set_sync(fsdp_pass *pass, bool sync)
{
    FSDPI_CALL(pass->rt->comm);
    FSDP_FAIL_IF(pass->kind != FSDP_PASS_TRAIN, FSDP_ERR_STATE, "fsdp_pass_set_sync: an evaluation pass has no gradients");
    for (int i = 0; i < pass->uses; i++)
        FSDP_FAIL_IF(pass->use[i].unit->pass == pass, FSDP_ERR_STATE,
                     "fsdp_pass_set_sync: unit \"%s\" has gradients of this pass: say it before the first backward", pass->use[i].unit->name);
    FSDP_TRY(fsdpi_comm_tag(pass->rt->comm, FSDPI_OP_PASS_SYNC, sync ? "on" : "off", 0));
    pass->unsynced = !sync;
    return FSDP_OK;
}

/* ---- a unit in a pass ---- */

fsdp_status fsdpi_unit_tag(fsdp_unit *u, fsdpi_op op)
{
    return fsdpi_comm_tag_of(u->rt->comm, op, u->name, (uint64_t)u->layout.total * sizeof(float), u->number);
}

fsdp_status fsdp_unit_begin_forward(fsdp_unit *u, fsdp_pass *pass)
{
    FSDPI_CALL(u->rt->comm);
    fsdpi_use *use;
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_BEGIN_FORWARD, pass));
    FSDP_TRY(fsdpi_room_check(u, fsdpi_pass_is_exact(pass, u)));
    if (!u->all_set && pass->kind == FSDP_PASS_TRAIN) fsdpi_unit_warn_unset(u);
    FSDP_TRY(fsdpi_pass_use(pass, u, &use));
    FSDP_TRY(fsdpi_unit_tag(u, FSDPI_OP_FORWARD));
    FSDP_TRY(fsdpi_unit_hold_in(u, pass));
    if (use->forward_open++ == 0) use->was_root = pass->active == 0;
    pass->active++;
    fsdpi_unit_opened(u, "forwards", use->forward_open, 1);
    fsdpi_prefetch(pass, u, false);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_end_forward(fsdp_unit *u, fsdp_pass *pass)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_END_FORWARD, pass));
    fsdpi_use *use = fsdpi_pass_find(pass, u);
    use->forward_open--;
    use->forwards++;
    pass->active--;
    fsdpi_unit_opened(u, "forwards", use->forward_open, -1);
    /* The root's backward comes right after its forward: resharding it would gather it twice. */
    bool keep = pass->kind == FSDP_PASS_TRAIN && (u->mode == FSDP_MODE_GRAD_OP || use->was_root);
    if (pass->kind == FSDP_PASS_TRAIN && !keep && u->holders == 1) FSDP_TRY(fsdpi_near_keep(u));
    FSDP_TRY(fsdpi_unit_release(u, keep));
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_begin_recompute(fsdp_unit *u, fsdp_pass *pass)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_BEGIN_RECOMPUTE, pass));
    FSDP_TRY(fsdpi_room_check(u, fsdpi_pass_is_exact(pass, u)));
    fsdpi_use *use = fsdpi_pass_find(pass, u);
    FSDP_TRY(fsdpi_unit_tag(u, FSDPI_OP_RECOMPUTE));
    FSDP_TRY(fsdpi_unit_hold_in(u, pass));
    use->recompute_open++;
    pass->active++;
    fsdpi_unit_opened(u, "recomputes", use->recompute_open, 1);
    fsdpi_prefetch(pass, u, false);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_end_recompute(fsdp_unit *u, fsdp_pass *pass)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_END_RECOMPUTE, pass));
    fsdpi_use *use = fsdpi_pass_find(pass, u);
    use->recompute_open--;
    pass->active--;
    fsdpi_unit_opened(u, "recomputes", use->recompute_open, -1);
    FSDP_TRY(fsdpi_unit_release(u, true)); /* its backward comes next */
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_begin_backward(fsdp_unit *u, fsdp_pass *pass)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_BEGIN_BACKWARD, pass));
    FSDP_TRY(fsdpi_room_check(u, fsdpi_pass_is_exact(pass, u)));
    fsdpi_use *use = fsdpi_pass_find(pass, u);
    FSDP_TRY(fsdpi_unit_tag(u, FSDPI_OP_BACKWARD));
    FSDP_TRY(fsdpi_grad_open(u, pass));
    FSDP_TRY(fsdpi_unit_hold_in(u, pass));
    use->backward_open = true;
    pass->active++;
    fsdpi_unit_opened(u, "backwards", 1, 1);
    fsdpi_prefetch(pass, u, true);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdp_unit_end_backward(fsdp_unit *u, fsdp_pass *pass)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_END_BACKWARD, pass));
    fsdpi_use *use = fsdpi_pass_find(pass, u);
    use->backward_open = false;
    use->backwards++;
    pass->active--;
    fsdpi_unit_opened(u, "backwards", 0, -1);
    bool last = use->backwards == use->forwards && use->forward_open == 0;
    FSDP_TRY(fsdpi_unit_release(u, !last && u->mode == FSDP_MODE_GRAD_OP));
    if (last && u->gradient == FSDPI_GRAD_OPEN) FSDP_TRY(fsdpi_grad_post(u));
    fsdpi_unit_check(u);
    return FSDP_OK;
}

/* ---- its end ---- */

static void unlink_pass(fsdp_pass *pass)
{
    fsdp_pass **p = &pass->rt->passes;
    while (*p != pass) p = &(*p)->older;
    *p = pass->older;
}

void fsdpi_pass_free(fsdp_pass *pass)
{
    fsdpi_free(pass->shared_weight);
    fsdpi_free(pass->use);
    fsdpi_free(pass->order.turn);
    fsdpi_free(pass);
}

/* Units that this pass left whole, and those gathered ahead for a turn that did not come. Another pass that is still
 * open may want them: it gathers them again. all: also those that stay whole, as their gathers may not have run. */
static fsdp_status reshard_idle(fsdpi_runtime *rt, bool all)
{
    for (fsdp_unit *u = rt->units; u != NULL; u = u->following) {
        bool idle = u->residency == FSDPI_AHEAD || (u->residency == FSDPI_KEPT && (all || (!fsdpi_unit_stays_whole(u) && !u->pinned)));
        if (idle) FSDP_TRY(fsdpi_unit_reshard(u));
    }
    return FSDP_OK;
}

/* All that a commit needs memory for, before it. */
static fsdp_status prepare_commit(fsdp_pass *pass)
{
    for (int i = 0; i < pass->uses; i++) {
        fsdp_unit *u = pass->use[i].unit;
        if (u->pass != pass) continue;
        if (pass->shared_weight == NULL) FSDPI_NEW(pass->shared_weight, 1);
        if (u->weights < u->weights_room) continue;
        int room = u->weights_room > 0 ? 2 * u->weights_room : 8;
        void *p = fsdpi_realloc(u->weight, (size_t)room, sizeof(*u->weight));
        FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for the weight of a pass");
        u->weight = p;
        u->weights_room = room;
    }
    return FSDP_OK;
}

/* Cannot fail. */
static void commit(fsdp_pass *pass)
{
    for (int i = 0; i < pass->uses; i++) {
        fsdp_unit *u = pass->use[i].unit;
        if (u->pass != pass) continue;
        pass->shared_weight->weight = pass->weight;
        pass->shared_weight->refs++;
        u->weight[u->weights++] = pass->shared_weight;
        fsdpi_grad_commit(u);
        fsdpi_unsent_commit(u, pass->number);
    }
    pass->shared_weight = NULL; /* the units have it */
}

/* Gradients that are still open, in an order that all ranks share. That in which units were used is not: a rank that has joined does not know in
 * which of two open passes one was. */
static fsdp_status post_open(fsdp_pass *pass)
{
    for (fsdp_unit *u = pass->rt->units; u != NULL; u = u->following)
        if (u->pass == pass && u->gradient == FSDPI_GRAD_OPEN) FSDP_TRY(fsdpi_grad_post(u));
    return FSDP_OK;
}

/* All that can fail on this rank alone. */
static fsdp_status prepare_end(fsdp_pass *pass)
{
    fsdpi_runtime *rt = pass->rt;
    for (int i = 0; i < pass->uses; i++)
        FSDP_FAIL_IF(pass->use[i].forward_open > 0 || pass->use[i].recompute_open > 0 || pass->use[i].backward_open, FSDP_ERR_STATE,
                     "fsdp_pass_end: unit \"%s\": its %s is open: end it first, or cancel the pass", pass->use[i].unit->name,
                     pass->use[i].backward_open ? "backward" : pass->use[i].recompute_open > 0 ? "recompute" : "forward");
    FSDP_FAIL_IF(pass->lost_work, FSDP_ERR_STATE, "fsdp_pass_end: a kernel failed in this pass: cancel it");
    rt->about = pass->number + 1;
    FSDP_TRY(post_open(pass)); /* units with more forwards than backwards: what their backwards wrote counts */
    FSDP_TRY(fsdpi_reduce_owed(rt, !pass->unsynced));
    FSDP_TRY(reshard_idle(rt, false));
    return prepare_commit(pass);
}

/* Without sync each goes on by itself. Ranks have waited for each other's gradients; here they learn that all have come this way: the
 * pass counts on every rank, or on none. */
static fsdp_status meet_at_end(const fsdp_pass *pass)
{
    if (pass->unsynced) return fsdpi_comm_tag(pass->rt->comm, FSDPI_OP_PASS_END, kind_names[pass->kind], 0);
    return fsdpi_comm_tell(pass->rt->comm, FSDPI_OP_PASS_END, kind_names[pass->kind], NULL, 0);
}

static void end(fsdp_pass *pass)
{
    commit(pass);
    unlink_pass(pass);
    if (!pass->joined) { /* one that was joined has no order */
        fsdpi_order last = pass->rt->last[pass->kind];
        pass->rt->last[pass->kind] = pass->order;
        pass->order = last;
    }
    for (int i = 0; i < pass->uses; i++) fsdpi_unit_check(pass->use[i].unit);
    pass->rt->about = 0;
    fsdpi_pass_free(pass);
}

/* One object for all that have gradients. */
static void share_weight(fsdp_pass *const *pass, int count)
{
    fsdpi_weight *shared = NULL;
    for (int i = 0; i < count; i++) {
        if (shared == NULL) shared = pass[i]->shared_weight;
        if (pass[i]->shared_weight == NULL || pass[i]->shared_weight == shared) continue;
        fsdpi_free(pass[i]->shared_weight);
        pass[i]->shared_weight = shared;
    }
}

static fsdp_status begin_calls(fsdp_pass *const *pass, int count)
{
    for (int i = 0; i < count; i++) {
        fsdp_comm *begun;
        fsdp_status st = fsdpi_call_begin(&begun, pass[i]->rt->comm, "fsdp_pass_end");
        if (st == FSDP_OK) continue;
        while (i-- > 0) fsdpi_call_end(&pass[i]->rt->comm);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    return FSDP_OK;
}

static fsdp_status come_to_end(fsdp_pass *const *pass, int count)
{
    for (int i = 0; i < count; i++) FSDP_TRY(prepare_end(pass[i]));
    for (int i = 0; i < count; i++) FSDP_TRY(meet_at_end(pass[i]));
    share_weight(pass, count);
    return FSDP_OK;
}

fsdp_status fsdpi_passes_end(fsdp_pass *const *pass, int count)
{
    FSDP_TRY(begin_calls(pass, count));
    fsdp_status st = come_to_end(pass, count);
    for (int i = 0; i < count; i++) {
        fsdp_comm *comm = pass[i]->rt->comm;
        if (st == FSDP_OK) end(pass[i]);
        fsdpi_call_end(&comm);
    }
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

fsdp_status fsdp_pass_end(fsdp_pass *pass)
{
    return fsdpi_passes_end(&pass, 1);
}

/* A kernel that failed, the caller's perhaps, is why one cancels: streams go on. Passes that are open have lost work,
 * and do not count. */
static fsdp_status clear_failures(fsdpi_runtime *rt)
{
    if (fsdpi_runtime_sync(rt) == FSDP_OK) return FSDP_OK;
    for (fsdp_pass *p = rt->passes; p != NULL; p = p->older) p->lost_work = true;
    return fsdpi_windows_repeat(rt);
}

fsdp_status fsdp_pass_cancel(fsdp_pass *pass)
{
    if (pass == NULL) return FSDP_OK;
    fsdpi_runtime *rt = pass->rt;
    FSDPI_CALL(rt->comm);
    pass->cancelled = true;
    rt->about = pass->number + 1;
    fsdp_status st = fsdpi_comm_tag(rt->comm, FSDPI_OP_PASS_CANCEL, kind_names[pass->kind], 0);
    if (st == FSDP_OK) st = clear_failures(rt);
    if (st == FSDP_OK && !pass->unsynced) st = post_open(pass);
    /* Windows are passed round as ever, so that their counters agree; nothing is added. */
    for (fsdpi_pooled *o = rt->owed; o != NULL; o = o->next_owed) o->discard |= o->unit->pass == pass;
    if (st == FSDP_OK) st = fsdpi_reduce_owed(rt, true);
    for (int i = 0; i < pass->uses; i++) {
        fsdpi_use *use = &pass->use[i];
        fsdp_unit *u = use->unit;
        fsdpi_unit_opened(u, "forwards", 0, -use->forward_open);
        fsdpi_unit_opened(u, "recomputes", 0, -use->recompute_open);
        fsdpi_unit_opened(u, "backwards", 0, -use->backward_open);
        for (int open = use->forward_open + use->recompute_open + use->backward_open; open > 0; open--) {
            fsdp_status released = fsdpi_unit_release(u, false);
            if (st == FSDP_OK) st = released;
        }
        if (u->pass == pass) fsdpi_grad_discard(u);
    }
    unlink_pass(pass);
    fsdp_status idle = reshard_idle(rt, pass->lost_work);
    rt->about = 0;
    fsdpi_pass_free(pass);
    return st != FSDP_OK ? st : idle;
}
