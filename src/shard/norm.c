/* SPDX-License-Identifier: MIT
 *
 * Norms of a step's gradients: exact sums, or the largest, over the slices of all ranks, so that neither the edges of slices nor
 * the order of ranks shows. include/fsdp/norm.h says what is rounded. */
#include "shard/norm.h"

#include "base/error.h"
#include "shard/kernels.h"
#include "shard/unit_list.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- what is measured of a slice ---- */

typedef enum measure_kind { SUM, SQUARES, POWERS, LARGEST } measure_kind;

typedef struct measure {
    measure_kind kind;
    double p, scale; /* POWERS: of (|x| scale)^p */
    fsdpi_xsum sum;
    uint32_t largest; /* the bits of |x|: of NaN more than those of infinity, which has more than all numbers */
} measure;

typedef struct measure_args {
    measure *into; /* host memory */
    const float *x;
    int64_t numel;
} measure_args;

enum { PIECE = 1 << 18, MAX_WORKERS = 64 };

typedef struct measure_job {
    const fsdpi_shard_kernels *kernels;
    const measure *what;
    const float *x;
    int64_t numel;
    struct { /* of each worker: they can be put together in any order */
        fsdpi_xsum sum;
        uint32_t largest;
    } part[MAX_WORKERS];
} measure_job;

static void add_powers(fsdpi_xsum *s, const float *x, int64_t n, double scale, double p)
{
    for (int64_t i = 0; i < n; i++) fsdpi_xsum_add(s, pow(fabs((double)x[i]) * scale, p));
}

static void measure_piece(void *arg, int64_t i, int worker)
{
    measure_job *j = arg;
    int64_t at = i * PIECE, n = j->numel - at < PIECE ? j->numel - at : PIECE;
    int w = worker % MAX_WORKERS;
    const float *x = j->x + at;
    uint32_t largest;
    switch (j->what->kind) {
    case SUM: j->kernels->sumabs(&j->part[w].sum, x, (size_t)n); break;
    case SQUARES: j->kernels->sumsq(&j->part[w].sum, x, (size_t)n); break;
    case POWERS: add_powers(&j->part[w].sum, x, n, j->what->scale, j->what->p); break;
    case LARGEST:
        largest = j->kernels->largest(x, (size_t)n);
        if (largest > j->part[w].largest) j->part[w].largest = largest;
        break;
    }
}

static fsdp_status k_measure(const fsdp_kernel *k, const void *args)
{
    const measure_args *a = args;
    measure_job j = { .kernels = fsdpi_shard_kernels_get(k->isa), .what = a->into, .x = fsdp_kernel_ptr(k, a->x), .numel = a->numel };
    int workers = fsdpi_pool_threads(k->pool);
    if (workers > MAX_WORKERS) { /* two workers would share a part: do it alone */
        for (int64_t i = 0; i * PIECE < a->numel; i++) measure_piece(&j, i, 0);
        workers = 1;
    } else {
        fsdpi_kernel_parallel(k, (a->numel + PIECE - 1) / PIECE, measure_piece, &j);
    }
    for (int w = 0; w < workers; w++) {
        fsdpi_xsum_merge(&a->into->sum, &j.part[w].sum);
        if (j.part[w].largest > a->into->largest) a->into->largest = j.part[w].largest;
    }
    return FSDP_OK;
}

/* One of the unit's own segments: what this rank reduced. Each element is one rank's. */
static fsdp_status measure_segment(measure *into, const fsdp_unit *u, int segment)
{
    const fsdpi_segment *g = &u->own[segment];
    if (u->frozen[g->param]) return FSDP_OK;
    return fsdp_stream_launch(u->store->compute, k_measure, &(measure_args){ into, u->step_grad + (g->at - u->keep_lo), g->numel }, sizeof(measure_args));
}

/* Of all units on this rank, stream by stream, since they add to one measure. Returns when it is done. */
static fsdp_status measure_units(measure *into, fsdp_unit_list units)
{
    fsdp_status st = FSDP_OK;
    fsdp_stream *busy = NULL;
    for (int i = 0; i < units.count && st == FSDP_OK; i++) {
        const fsdp_unit *u = units.units[i];
        if (u->step_grad == NULL) continue;
        if (busy != NULL && busy != u->store->compute) st = fsdp_stream_sync(busy);
        busy = u->store->compute;
        for (int k = 0; k < u->own_count && st == FSDP_OK; k++) st = measure_segment(into, u, k);
    }
    /* Kernels write to a frame of the caller's: also after an error they must have run. And what reductions have met is told. */
    for (fsdpi_runtime *rt = fsdpi_list_next(units, NULL); rt != NULL; rt = fsdpi_list_next(units, rt)) {
        fsdp_status sync = fsdpi_runtime_sync(rt);
        if (st == FSDP_OK) st = sync;
    }
    return st;
}

/* A pass that brought gradients to several units weighs once. fsdpi_list_check() has just made the marks. */
static void add_weights(fsdpi_xsum *sum, fsdp_unit_list units)
{
    for (int i = 0; i < units.count; i++) {
        const fsdp_unit *u = units.units[i];
        for (int w = 0; w < u->weights; w++) {
            if (u->weight[w]->seen == u->rt->mark) continue;
            u->weight[w]->seen = u->rt->mark;
            fsdpi_xsum_add(sum, u->weight[w]->weight);
        }
    }
}

/* ---- over all ranks ---- */

/* What ranks tell each other. */
typedef struct norm_part {
    fsdpi_xsum sum, weight;
    uint32_t largest;
    bool failed;
} norm_part;
_Static_assert(sizeof(norm_part) <= FSDPI_SLOT, "told in one piece");

static fsdp_status combine(fsdp_comm *comm, const char *name, norm_part *part)
{
    norm_part total = { 0 };
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_NORM, name, part, sizeof(*part)));
    for (int r = 0; r < comm->size; r++) {
        norm_part told = *(const norm_part *)fsdpi_comm_told(comm, r);
        fsdpi_xsum_merge(&total.sum, &told.sum);
        fsdpi_xsum_merge(&total.weight, &told.weight);
        if (told.largest > total.largest) total.largest = told.largest;
        total.failed |= told.failed;
    }
    *part = total;
    return FSDP_OK;
}

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static fsdp_status communicator_of(fsdp_comm **out, fsdp_unit_list units, fsdp_comm *over)
{
    FSDP_FAIL_IF(units.count == 0 && over == NULL, FSDP_ERR_INVALID, "fsdp_step_norm: no units, and no communicator");
    for (int i = 0; i < units.count; i++) {
        const fsdp_unit *u = units.units[i], *first = units.units[0];
        FSDP_FAIL_IF(over == NULL && u->rt != first->rt, FSDP_ERR_INVALID,
                     "fsdp_step_norm: units \"%s\" and \"%s\" are of different communicators: name one that has the ranks of both (`over`)", first->name, u->name);
        FSDP_FAIL_IF(over != NULL && !fsdpi_comm_encloses(over, u->rt->comm), FSDP_ERR_INVALID,
                     "fsdp_step_norm: unit \"%s\" is of a communicator that has ranks which are not in `over`: name one that has them all", u->name);
    }
    *out = over != NULL ? over : units.units[0]->rt->comm;
    return FSDP_OK;
}

/* Powers of numbers between 0 and 1: so they do not overflow, and what vanishes does not matter. */
static fsdp_status norm_by_powers(fsdp_unit_list units, fsdp_comm *comm, const char *name, double p, norm_part *part, double *norm)
{
    measure m = { .kind = LARGEST };
    FSDP_TRY(measure_units(&m, units));
    part->largest = m.largest;
    FSDP_TRY(combine(comm, name, part));
    double largest = (double)from_bits(part->largest);
    int e;
    *norm = largest;
    if (!isfinite(largest) || largest == 0) return FSDP_OK; /* on every rank */
    (void)frexp(largest, &e);
    m = (measure){ .kind = POWERS, .p = p, .scale = ldexp(1.0, -e) };
    FSDP_TRY(measure_units(&m, units));
    norm_part powers = { .sum = m.sum };
    FSDP_TRY(combine(comm, name, &powers));
    *norm = ldexp(pow(fsdpi_xsum_round(&powers.sum), 1.0 / p), e);
    return FSDP_OK;
}

static fsdp_status norm_of(fsdp_unit_list units, fsdp_comm *comm, double p, norm_part *part, double *norm)
{
    char name[FSDPI_NAME];
    snprintf(name, sizeof(name), "the %.9g-norm", p); /* in the tag: ranks that want different ones are told */
    if (p != 1 && p != 2 && p != INFINITY) return norm_by_powers(units, comm, name, p, part, norm);
    measure m = { .kind = p == 1 ? SUM : p == 2 ? SQUARES : LARGEST };
    FSDP_TRY(measure_units(&m, units));
    part->sum = m.sum;
    part->largest = m.largest;
    FSDP_TRY(combine(comm, name, part));
    *norm = p == INFINITY ? (double)from_bits(part->largest) : p == 1 ? fsdpi_xsum_round(&part->sum) : sqrt(fsdpi_xsum_round(&part->sum));
    return FSDP_OK;
}

fsdp_status fsdpi_step_norm(fsdp_unit_list units, const fsdp_norm_opts *opts, fsdp_status mine, double *norm, double *weight)
{
    fsdp_norm_opts o = opts != NULL ? *opts : (fsdp_norm_opts){ 0 };
    fsdp_comm *comm;
    if (o.p == 0) o.p = 2;
    FSDP_FAIL_IF(!(o.p > 0), FSDP_ERR_INVALID, "fsdp_step_norm: p is %g: it must be more than 0, or INFINITY", o.p);
    FSDPI_LIST_CALL(units, "fsdp_step_norm");
    FSDP_TRY(fsdpi_list_check(units, FSDPI_EV_STEP_END));
    FSDP_TRY(communicator_of(&comm, units, o.over));
    norm_part part = { .failed = mine != FSDP_OK };
    double value = 0;
    add_weights(&part.weight, units);
    FSDP_TRY(norm_of(units, comm, o.p, &part, &value));
    if (part.failed) return fsdpi_comm_agree_in(comm, FSDPI_OP_NORM, NULL, mine); /* who, and why */
    if (norm != NULL) *norm = value;
    if (weight != NULL) *weight = fsdpi_xsum_round(&part.weight);
    return FSDP_OK;
}

fsdp_status fsdp_step_norm(fsdp_unit_list units, const fsdp_norm_opts *opts, double *norm, double *weight)
{
    return fsdpi_step_norm(units, opts, FSDP_OK, norm, weight);
}

fsdp_status fsdp_step_grad_norm(fsdp_unit_list units, double *norm, double *weight)
{
    return fsdp_step_norm(units, NULL, norm, weight);
}

/* ---- which gradient is not finite ---- */

typedef struct culprit {
    int unit, param; /* their numbers: the first one counts */
    char text[200];
} culprit;

static fsdp_status find_here(fsdp_unit_list units, culprit *c)
{
    for (int i = 0; i < units.count; i++) {
        const fsdp_unit *u = units.units[i];
        for (int k = 0; u->step_grad != NULL && k < u->own_count; k++) {
            measure m = { .kind = LARGEST };
            fsdp_status st = measure_segment(&m, u, k), sync = fsdp_stream_sync(u->store->compute);
            FSDP_TRY(st);
            FSDP_TRY(sync);
            if (isfinite(from_bits(m.largest))) continue;
            c->unit = i;
            c->param = u->own[k].param;
            snprintf(c->text, sizeof(c->text), "unit \"%.80s\", parameter \"%.80s\"", u->name, u->layout.param[c->param].name);
            return FSDP_OK;
        }
    }
    return FSDP_OK;
}

fsdp_status fsdpi_step_find_bad(fsdp_unit_list units, fsdp_comm *over, char *text, size_t bytes)
{
    fsdp_comm *comm;
    culprit c = { .unit = INT_MAX };
    FSDP_TRY(communicator_of(&comm, units, over));
    FSDP_TRY(find_here(units, &c));
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_NORM, "search", &c, sizeof(c)));
    const culprit *first = fsdpi_comm_told(comm, 0);
    for (int r = 1; r < comm->size; r++) {
        const culprit *other = fsdpi_comm_told(comm, r);
        if (other->unit < first->unit || (other->unit == first->unit && other->param < first->param)) first = other;
    }
    snprintf(text, bytes, "%s", first->text);
    return FSDP_OK;
}
