/* SPDX-License-Identifier: MIT
 *
 * Steps: the time in which masters may be written and gradients are final; and the norm of these gradients. */
#include "shard/unit.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/kernels.h"

#include <stdio.h>

/* The gradients stay. */
static void leave_step(fsdp_unit *u)
{
    u->in_step = false;
    u->step_grad = NULL;
    fsdpi_arena_free(u->store->arena, u->step_gathered);
    u->step_gathered = NULL;
}

static void drop_gradients(fsdp_unit *u)
{
    for (int k = 0; k < u->rounds; k++) u->acc[k].has = false;
    fsdpi_unsent_drop(u);
    for (int i = 0; i < u->weights; i++)
        if (--u->weight[i]->refs == 0) fsdpi_free(u->weight[i]);
    u->weights = u->weights_sent = 0;
}

/* Replicas: what each of them has reduced, for all of their optimizers. */
static fsdp_status gather_gradients(fsdp_unit *u)
{
    const fsdpi_transport_ops *t = u->rt->comm->transport;
    void *all = NULL;
    if (!t->zero_copy) FSDP_TRY(fsdpi_arena_alloc(u->store->arena, (size_t)fsdpi_unit_kept(u) * sizeof(float), &all));
    u->step_gathered = all;
    FSDP_TRY(t->flat_publish(u->replica_flat, ++u->replica_version, u->acc[0].now, u->store->comm));
    FSDP_TRY(t->flat_gather(u->replica_flat, u->replica_version, all, u->store->comm));
    FSDP_TRY(fsdpi_stream_wait_stream(u->store->compute, u->store->comm));
    u->step_grad = t->zero_copy ? t->flat_whole(u->replica_flat) : all;
    return FSDP_OK;
}

static fsdp_status begin_unit(fsdp_unit *u)
{
    FSDP_TRY(fsdpi_unit_open(u));
    if (!u->acc[0].has) return FSDP_OK;
    if (u->replica_flat != NULL) return gather_gradients(u);
    u->step_grad = u->acc[0].now;
    return FSDP_OK;
}

static fsdp_status check_list(fsdp_unit_list units, fsdpi_event ev)
{
    FSDP_FAIL_IF(units.count < 0 || (units.count > 0 && units.units == NULL), FSDP_ERR_INVALID, "%s: no list of units",
                 fsdpi_event_call(ev));
    for (int i = 0; i < units.count; i++) units.units[i]->rt->mark++; /* a mark that no unit of any communicator has */
    for (int i = 0; i < units.count; i++) {
        fsdp_unit *u = units.units[i];
        FSDP_FAIL_IF(u->listed == u->rt->mark, FSDP_ERR_INVALID, "%s: unit \"%s\" is in the list twice", fsdpi_event_call(ev), u->name);
        u->listed = u->rt->mark;
        FSDP_TRY(fsdpi_life_allows(u, ev, NULL));
    }
    return FSDP_OK;
}

static fsdp_status begin_all(fsdp_unit_list units)
{
    FSDP_TRY(fsdpi_unsent_post(units));
    for (int i = 0; i < units.count; i++) FSDP_TRY(fsdpi_grad_final(units.units[i]));
    /* First all are done, then the owners wait: so nobody waits for a rank that waits for another unit. */
    for (int i = 0; i < units.count; i++) FSDP_TRY(fsdpi_unit_done(units.units[i]));
    for (int i = 0; i < units.count; i++) FSDP_TRY(begin_unit(units.units[i]));
    return FSDP_OK;
}

/* One tag for the list; or a meeting. */
static fsdp_status tag_list(fsdp_unit_list units, fsdpi_op op, bool meet)
{
    if (units.count == 0) return FSDP_OK;
    fsdp_unit *first = units.units[0];
    char what[64];
    snprintf(what, sizeof(what), "%.20s and %d more", first->name, units.count - 1);
    const char *name = units.count > 1 ? what : first->name;
    return meet ? fsdpi_comm_tell(first->rt->comm, op, name, NULL, 0) : fsdpi_comm_tag(first->rt->comm, op, name, 0);
}

fsdp_status fsdp_step_begin(fsdp_unit_list units)
{
    FSDP_TRY(check_list(units, FSDPI_EV_STEP_BEGIN));
    FSDP_TRY(tag_list(units, FSDPI_OP_STEP_BEGIN, false));
    fsdp_status st = begin_all(units);
    if (st != FSDP_OK) {
        fsdpi_step_leave(units);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    for (int i = 0; i < units.count; i++) {
        units.units[i]->in_step = true;
        fsdpi_unit_check(units.units[i]);
    }
    return FSDP_OK;
}

/* Ranks have said that they are done with what is published, so it becomes the next version: otherwise the owners of the one
 * after it would take that for an answer, and not wait for those who read in between. */
static fsdp_status leave_unwritten(fsdp_unit *u)
{
    leave_step(u);
    return fsdpi_unit_publish(u);
}

void fsdpi_step_leave(fsdp_unit_list units)
{
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    for (int i = 0; i < units.count; i++) (void)!leave_unwritten(units.units[i]);
    fsdpi_error_restore(&kept);
}

fsdp_status fsdp_step_end(fsdp_unit_list units)
{
    FSDP_TRY(check_list(units, FSDPI_EV_STEP_END));
    FSDP_TRY(tag_list(units, FSDPI_OP_STEP_END, true)); /* all ranks make this step */
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
    FSDP_TRY(check_list(units, FSDPI_EV_STEP_END));
    FSDP_TRY(tag_list(units, FSDPI_OP_STEP_CANCEL, false));
    for (int i = 0; i < units.count; i++) {
        drop_gradients(units.units[i]);
        FSDP_TRY(leave_unwritten(units.units[i]));
        fsdpi_unit_check(units.units[i]);
    }
    return FSDP_OK;
}

fsdp_status fsdp_unit_zero_grad(fsdp_unit *unit)
{
    FSDP_TRY(fsdpi_life_allows(unit, FSDPI_EV_ZERO_GRAD, NULL));
    FSDP_TRY(fsdpi_comm_tag(unit->rt->comm, FSDPI_OP_ZERO_GRAD, unit->name, 0));
    drop_gradients(unit);
    return FSDP_OK;
}

/* ---- the norm ---- */

typedef struct sumsq_args {
    fsdpi_xsum *sum; /* host memory */
    const float *x;
    int64_t numel;
} sumsq_args;

enum { SUMSQ_PIECE = 1 << 18, MAX_WORKERS = 64 };

typedef struct sumsq_job {
    const fsdpi_shard_kernels *kernels;
    const float *x;
    int64_t numel;
    fsdpi_xsum *part; /* one a worker: exact sums can be added in any order */
} sumsq_job;

static void sumsq_piece(void *arg, int64_t i, int worker)
{
    sumsq_job *j = arg;
    int64_t at = i * SUMSQ_PIECE, n = j->numel - at < SUMSQ_PIECE ? j->numel - at : SUMSQ_PIECE;
    j->kernels->sumsq(&j->part[worker % MAX_WORKERS], j->x + at, (size_t)n);
}

static fsdp_status k_sumsq(const fsdp_kernel *k, const void *args)
{
    const sumsq_args *a = args;
    fsdpi_xsum part[MAX_WORKERS] = { 0 };
    sumsq_job j = { fsdpi_shard_kernels_get(k->isa), fsdp_kernel_ptr(k, a->x), a->numel, part };
    int workers = fsdpi_pool_threads(k->pool);
    if (workers > MAX_WORKERS) { /* two workers would share a part: do it alone */
        for (int64_t i = 0; i * SUMSQ_PIECE < a->numel; i++) sumsq_piece(&j, i, 0);
        workers = 1;
    } else {
        fsdpi_kernel_parallel(k, (a->numel + SUMSQ_PIECE - 1) / SUMSQ_PIECE, sumsq_piece, &j);
    }
    for (int w = 0; w < workers; w++) fsdpi_xsum_merge(a->sum, &part[w]);
    return FSDP_OK;
}

/* What ranks tell each other about a step's gradients. */
typedef struct norm_part {
    fsdpi_xsum squares, weight;
} norm_part;
_Static_assert(sizeof(norm_part) <= FSDPI_SLOT, "told in one piece");

static fsdp_status add_unit(fsdp_unit *u, norm_part *part)
{
    if (u->step_grad == NULL) return FSDP_OK;
    /* What this rank reduced: each element is counted by one rank. */
    for (int i = 0; i < u->own_count; i++) {
        const fsdpi_segment *g = &u->own[i];
        if (u->frozen[g->param]) continue;
        FSDP_TRY(fsdp_stream_launch(u->store->compute, k_sumsq, &(sumsq_args){ &part->squares, u->step_grad + (g->at - u->keep_lo), g->numel },
                                    sizeof(sumsq_args)));
    }
    return FSDP_OK;
}

static fsdp_status combine(fsdp_comm *comm, const norm_part *mine, double *squares, double *weight)
{
    norm_part total = { 0 };
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_NORM, NULL, mine, sizeof(*mine)));
    for (int r = 0; r < comm->size; r++) {
        norm_part told = *(const norm_part *)fsdpi_comm_told(comm, r);
        fsdpi_xsum_merge(&total.squares, &told.squares);
        fsdpi_xsum_merge(&total.weight, &told.weight);
    }
    *squares = fsdpi_xsum_round(&total.squares);
    *weight = fsdpi_xsum_round(&total.weight);
    return FSDP_OK;
}

fsdp_status fsdp_step_grad_norm(fsdp_unit_list units, double *norm, double *weight)
{
    FSDP_TRY(check_list(units, FSDPI_EV_STEP_END));
    FSDP_FAIL_IF(units.count == 0, FSDP_ERR_INVALID, "fsdp_step_grad_norm: no units");
    norm_part part = { 0 };
    fsdpi_runtime *rt = units.units[0]->rt;
    uint64_t mark = ++rt->mark;
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < units.count && st == FSDP_OK; i++) {
        fsdp_unit *u = units.units[i];
        if (u->rt != rt)
            st = fsdp_error_raise(FSDP_ERR_UNSUPPORTED, __func__, __FILE__, __LINE__,
                                  "units \"%s\" and \"%s\" are of different communicators: take their norms apart", units.units[0]->name,
                                  u->name);
        if (st == FSDP_OK) st = add_unit(u, &part);
        /* A pass that brought gradients to several units weighs once. */
        for (int w = 0; w < u->weights; w++) {
            if (u->weight[w]->seen == mark) continue;
            u->weight[w]->seen = mark;
            fsdpi_xsum_add(&part.weight, u->weight[w]->weight);
        }
    }
    fsdp_status sync = fsdpi_runtime_sync(rt); /* kernels write to this frame */
    FSDP_TRY(st);
    FSDP_TRY(sync);
    double squares = 0, sum = 0;
    FSDP_TRY(combine(rt->comm, &part, &squares, &sum));
    if (norm != NULL) *norm = __builtin_sqrt(squares);
    if (weight != NULL) *weight = sum;
    return FSDP_OK;
}
