/* SPDX-License-Identifier: MIT
 *
 * Steps: the time in which masters may be written and gradients are final. */
#include "shard/unit_list.h"

#include "base/alloc.h"
#include "base/error.h"

/* The gradients stay. */
static void leave_step(fsdp_unit *u)
{
    fsdpi_unit_opened(u, "steps", 0, -u->in_step);
    u->in_step = false;
    fsdpi_step_drop(u);
}

void fsdpi_step_drop(fsdp_unit *u)
{
    u->step_grad = NULL;
    fsdpi_arena_free(u->store->arena, u->step_sum);
    fsdpi_arena_free(u->store->arena, u->step_gathered);
    u->step_sum = u->step_gathered = NULL;
}

static void drop_gradients(fsdp_unit *u)
{
    for (int k = 0; k < u->rounds; k++) u->acc[k].has = false;
    fsdpi_unsent_drop(u);
    for (int i = 0; i < u->weights; i++)
        if (--u->weight[i]->refs == 0) fsdpi_free(u->weight[i]);
    u->weights = u->weights_sent = 0;
}

/* What this rank has reduced, in fp32; NULL: it has no gradients. */
static const float *reduced(const fsdp_unit *u)
{
    return fsdpi_unit_stages_grads(u) ? u->step_sum : u->acc[0].has ? u->acc[0].now : NULL;
}

/* ---- memory for it: all ranks have theirs, or no step begins ---- */

static bool sums_into(const fsdp_unit *u)
{
    return fsdpi_unit_stages_grads(u) && fsdpi_grad_any(u);
}

static bool gathers_into(const fsdp_unit *u)
{
    return u->replica_flat != NULL && !u->rt->comm->transport->zero_copy && fsdpi_grad_any(u);
}

static fsdp_status take_block(fsdp_unit *u, bool wanted, int64_t numel, float **out)
{
    void *block;
    if (!wanted) return FSDP_OK;
    FSDP_TRY(fsdpi_arena_alloc(u->store->arena, (size_t)numel * sizeof(float), &block));
    *out = block;
    return FSDP_OK;
}

/* Of one communicator: whether there is anything to take is the same on its ranks. */
static fsdp_status take_memory_of(fsdp_unit_list units, fsdpi_runtime *rt)
{
    fsdp_status st = FSDP_OK;
    const char *first = NULL;
    for (int i = 0; i < units.count; i++) {
        fsdp_unit *u = units.units[i];
        if (u->rt != rt || (!sums_into(u) && !gathers_into(u))) continue;
        if (first == NULL) first = u->name;
        if (st == FSDP_OK) st = take_block(u, sums_into(u), fsdpi_unit_slice(u), &u->step_sum);
        if (st == FSDP_OK) st = take_block(u, gathers_into(u), fsdpi_unit_kept(u), &u->step_gathered);
    }
    return first != NULL ? fsdpi_comm_agree_in(rt->comm, FSDPI_OP_STEP_BEGIN, first, st) : FSDP_OK;
}

static fsdp_status take_memory(fsdp_unit_list units)
{
    for (fsdpi_runtime *rt = fsdpi_list_next(units, NULL); rt != NULL; rt = fsdpi_list_next(units, rt)) FSDP_TRY(take_memory_of(units, rt));
    return FSDP_OK;
}

/* ---- begin ---- */

static fsdp_status sum_up(fsdp_unit *u)
{
    if (!sums_into(u)) return fsdpi_grad_final(u);
    bool apart = u->sums != u->store;
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->comm, u->store->compute)); /* which may still use what lay there */
    if (apart) FSDP_TRY(fsdpi_between_begin(u, true));
    FSDP_TRY(fsdpi_grad_sum_into(u, apart ? fsdpi_between(u, true) : u->store->comm, u->step_sum));
    if (apart) FSDP_TRY(fsdpi_between_end(u, true));
    return fsdpi_stream_wait_stream(u->store->compute, u->store->comm);
}

/* Replicas: what each of them has reduced, for all of their optimizers. */
static fsdp_status publish_gradients(fsdp_unit *u)
{
    return u->rt->comm->transport->flat_publish(u->replica_flat, ++u->replica_version, reduced(u), u->store->comm);
}

static fsdp_status gather_gradients(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    FSDP_TRY(t->flat_gather(u->replica_flat, u->replica_version, u->step_gathered, u->store->comm));
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->compute, u->store->comm));
    u->step_grad = t->zero_copy ? t->flat_whole(u->replica_flat) : u->step_gathered;
    if (u->step_grad == NULL) u->step_grad = reduced(u); /* this rank keeps nothing of it: but there is a gradient */
    return FSDP_OK;
}

static bool shares_gradients(const fsdp_unit *u)
{
    return u->replica_flat != NULL && reduced(u) != NULL;
}

static fsdp_status begin_all(fsdp_unit_list units)
{
    FSDP_TRY(fsdpi_unsent_post(units));
    FSDP_TRY(take_memory(units));
    for (int i = 0; i < units.count; i++) FSDP_TRY(sum_up(units.units[i]));
    /* First all are done, then the owners wait; first all are published, then ranks gather: so nobody waits for a rank that waits
     * for another unit, whatever the order of units of several communicators. */
    for (int i = 0; i < units.count; i++) FSDP_TRY(fsdpi_unit_done(units.units[i]));
    for (int i = 0; i < units.count; i++) {
        fsdp_unit *u = units.units[i];
        FSDP_TRY(fsdpi_unit_open(u));
        if (shares_gradients(u)) FSDP_TRY(publish_gradients(u));
        else u->step_grad = reduced(u);
    }
    for (int i = 0; i < units.count; i++)
        if (shares_gradients(units.units[i])) FSDP_TRY(gather_gradients(units.units[i]));
    return FSDP_OK;
}

fsdp_status fsdp_step_begin(fsdp_unit_list units)
{
    FSDPI_LIST_CALL(units, __func__);
    FSDP_TRY(fsdpi_list_check(units, FSDPI_EV_STEP_BEGIN));
    FSDP_TRY(fsdpi_list_tag(units, FSDPI_OP_STEP_BEGIN, false));
    fsdp_status st = begin_all(units);
    if (st != FSDP_OK) {
        fsdpi_step_leave(units);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    for (int i = 0; i < units.count; i++) {
        units.units[i]->in_step = true;
        fsdpi_unit_opened(units.units[i], "steps", 1, 1);
        fsdpi_unit_check(units.units[i]);
    }
    return FSDP_OK;
}

void fsdpi_step_leave(fsdp_unit_list units)
{
    for (int i = 0; i < units.count; i++) {
        leave_step(units.units[i]);
        fsdpi_unit_settle(units.units[i]);
    }
}

fsdp_status fsdp_step_end(fsdp_unit_list units)
{
    FSDPI_LIST_CALL(units, __func__);
    FSDP_TRY(fsdpi_list_check(units, FSDPI_EV_STEP_END));
    FSDP_TRY(fsdpi_list_tag(units, FSDPI_OP_STEP_END, true)); /* all ranks make this step */
    for (int i = 0; i < units.count; i++) {
        fsdp_unit *u = units.units[i];
        leave_step(u);
        drop_gradients(u);
        FSDP_TRY(fsdpi_unit_publish(u)); /* replicas have computed the same from the same gradients */
        fsdpi_unit_check(u);
    }
    return FSDP_OK;
}

fsdp_status fsdp_step_cancel(fsdp_unit_list units)
{
    FSDPI_LIST_CALL(units, __func__);
    FSDP_TRY(fsdpi_list_check(units, FSDPI_EV_STEP_END));
    FSDP_TRY(fsdpi_list_tag(units, FSDPI_OP_STEP_CANCEL, false));
    for (int i = 0; i < units.count; i++) {
        leave_step(units.units[i]);
        drop_gradients(units.units[i]);
        fsdpi_unit_settle(units.units[i]);
        fsdpi_unit_check(units.units[i]);
    }
    return FSDP_OK;
}

fsdp_status fsdp_unit_zero_grad(fsdp_unit *unit)
{
    FSDPI_CALL(unit->rt->comm);
    FSDP_TRY(fsdpi_life_allows(unit, FSDPI_EV_ZERO_GRAD, NULL));
    FSDP_TRY(fsdpi_comm_tag(unit->rt->comm, FSDPI_OP_ZERO_GRAD, unit->name, 0));
    drop_gradients(unit);
    return FSDP_OK;
}
