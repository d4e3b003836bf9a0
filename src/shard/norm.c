/* SPDX-License-Identifier: MIT
 *
 * The norm of a step's gradients: an exact sum over the slices of all ranks, so that it does not depend on where their edges are. */
#include "shard/unit_list.h"

#include "base/error.h"
#include "shard/kernels.h"

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
    FSDP_TRY(fsdpi_list_check(units, FSDPI_EV_STEP_END));
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
