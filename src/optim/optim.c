/* SPDX-License-Identifier: MIT
 *
 * Optimizers: a client of the core like any other. State is an array a kind and unit, that goes along with masters: state.h says where. */
#include <fsdp/optim.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/fits.h"
#include "optim/kernels.h"
#include "optim/state.h"
#include "shard/norm.h"
#include "shard/unit_list.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef enum optim_kind { SGD, ADAMW } optim_kind;

struct fsdp_optim {
    optim_kind kind;
    float lr, momentum, beta1, beta2, eps, weight_decay;
    int states;
    fsdp_unit **units;
    fsdpi_part *part;
    fsdpi_staging *staging; /* where state passes that lies elsewhere than slices */
    fsdp_device *state_device;
    int count;
};

static const char *const state_names[2][2] = { [SGD] = { "momentum", "" }, [ADAMW] = { "exp_avg", "exp_avg_sq" } };

static fsdp_status init_groups(fsdp_optim *o, fsdpi_part *p, const fsdp_optim_group *groups, int count)
{
    int n = fsdp_unit_param_count(p->unit);
    FSDPI_NEW(p->steps, n);
    FSDPI_NEW(p->decay, n);
    FSDPI_NEW(p->lr_scale, n);
    for (int i = 0; i < n; i++) {
        p->decay[i] = o->weight_decay;
        p->lr_scale[i] = 1.0f;
        for (int g = 0; g < count; g++) {
            if (!fsdpi_fits(groups[g].pattern, fsdp_unit_param_info(p->unit, i)->name)) continue;
            p->decay[i] = groups[g].weight_decay;
            p->lr_scale[i] = groups[g].lr_scale != 0 ? groups[g].lr_scale : 1.0f;
            break;
        }
    }
    return FSDP_OK;
}

static fsdp_status init_part(fsdp_optim *o, fsdpi_part *p, fsdp_unit *u, const fsdp_optim_group *groups, int count)
{
    *p = (fsdpi_part){ .unit = u, .kinds = o->states };
    FSDP_TRY(fsdpi_state_place(p, o->state_device));
    /* What trains takes its memory now, so that nothing is taken after the first step; what is frozen may never need any. */
    if (fsdpi_unit_trains(u)) FSDP_TRY(fsdpi_state_make(p));
    return init_groups(o, p, groups, count);
}

static fsdp_status check_list(fsdp_unit_list units)
{
    for (int i = 0; i < units.count; i++)
        for (int j = 0; j < i; j++)
            FSDP_FAIL_IF(units.units[i] == units.units[j], FSDP_ERR_INVALID, "unit \"%s\" is in the optimizer's list twice",
                         fsdp_unit_name(units.units[i]));
    return FSDP_OK;
}

static fsdp_status check_groups(const fsdp_optim_group *groups, int count)
{
    FSDP_FAIL_IF(count < 0 || (count > 0 && groups == NULL), FSDP_ERR_INVALID, "an optimizer of %d groups, but no list of them", count);
    for (int i = 0; i < count; i++) {
        const fsdp_optim_group *g = &groups[i];
        FSDP_FAIL_IF(g->pattern == NULL, FSDP_ERR_INVALID, "group %d has no pattern", i);
        FSDP_FAIL_IF(!(g->weight_decay >= 0) || !(g->lr_scale >= 0), FSDP_ERR_INVALID, "group \"%s\": weight_decay %g and lr_scale %g must be 0 or more",
                     g->pattern, (double)g->weight_decay, (double)g->lr_scale);
    }
    return FSDP_OK;
}

static fsdp_status make(fsdp_optim **out, const fsdp_optim *like, fsdp_unit_list units, const fsdp_optim_group *groups, int count)
{
    fsdp_status st;
    fsdp_optim *o;
    FSDP_TRY(check_list(units));
    FSDP_TRY(check_groups(groups, count));
    FSDPI_NEW(o, 1);
    *o = *like;
    o->count = units.count;
    o->part = fsdpi_calloc((size_t)units.count, sizeof(*o->part));
    o->units = fsdpi_calloc((size_t)units.count, sizeof(*o->units));
    if (o->part == NULL || o->units == NULL) FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, fail, "no memory for an optimizer of %d units", units.count);
    for (int i = 0; i < units.count; i++) {
        o->units[i] = units.units[i];
        FSDP_TRY_GOTO(init_part(o, &o->part[i], units.units[i], groups, count), fail);
    }
    FSDP_TRY_GOTO(fsdpi_staging_fit(&o->staging, o->part, o->count), fail);
    *out = o;
    return FSDP_OK;
fail:
    fsdp_optim_destroy(o);
    return st;
}

/* checked: how the options of its kind were found. What one rank alone gets wrong, or has no memory for, is told to all. */
static fsdp_status create(fsdp_optim **out, const fsdp_optim *like, fsdp_unit_list units, const fsdp_optim_group *groups, int count, fsdp_status checked)
{
    fsdp_optim *o = NULL;
    FSDP_FAIL_IF(units.count < 0 || (units.count > 0 && units.units == NULL), FSDP_ERR_INVALID, "an optimizer of %d units", units.count);
    FSDPI_LIST_CALL(units, like->kind == SGD ? "fsdp_optim_create_sgd" : "fsdp_optim_create_adamw");
    fsdp_status st = checked == FSDP_OK ? make(&o, like, units, groups, count) : checked;
    for (fsdpi_runtime *rt = fsdpi_list_next(units, NULL); rt != NULL; rt = fsdpi_list_next(units, rt)) st = fsdp_comm_agree(rt->comm, st);
    if (st != FSDP_OK) {
        fsdp_optim_destroy(o);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *out = o;
    return FSDP_OK;
}

static fsdp_status check_sgd(const fsdp_sgd_opts *s)
{
    FSDP_FAIL_IF(s == NULL || !(s->lr >= 0) || !(s->momentum >= 0) || !(s->weight_decay >= 0), FSDP_ERR_INVALID,
                 "fsdp_optim_create_sgd: lr, momentum and weight_decay must be 0 or more");
    return FSDP_OK;
}

fsdp_status fsdp_optim_create_sgd(fsdp_optim **out, fsdp_unit_list units, const fsdp_sgd_opts *opts)
{
    fsdp_sgd_opts s = opts != NULL ? *opts : (fsdp_sgd_opts){ 0 };
    fsdp_optim o = { .kind = SGD, .lr = s.lr, .momentum = s.momentum, .weight_decay = s.weight_decay, .state_device = s.state_device };
    o.states = s.momentum != 0 ? 1 : 0;
    return create(out, &o, units, s.groups, s.group_count, check_sgd(opts));
}

static fsdp_status check_adamw(const fsdp_adamw_opts *a)
{
    FSDP_FAIL_IF(!(a->lr >= 0) || !(a->weight_decay >= 0) || !(a->eps > 0), FSDP_ERR_INVALID,
                 "fsdp_optim_create_adamw: lr %g, weight_decay %g and eps %g must be 0 or more", (double)a->lr, (double)a->weight_decay,
                 (double)a->eps);
    FSDP_FAIL_IF(!(a->beta1 > 0 && a->beta1 < 1 && a->beta2 > 0 && a->beta2 < 1), FSDP_ERR_INVALID,
                 "fsdp_optim_create_adamw: beta1 %g and beta2 %g must be between 0 and 1", (double)a->beta1, (double)a->beta2);
    return FSDP_OK;
}

fsdp_status fsdp_optim_create_adamw(fsdp_optim **out, fsdp_unit_list units, const fsdp_adamw_opts *opts)
{
    fsdp_adamw_opts a = opts != NULL ? *opts : (fsdp_adamw_opts){ 0 };
    if (a.beta1 == 0) a.beta1 = 0.9f;
    if (a.beta2 == 0) a.beta2 = 0.999f;
    if (a.eps == 0) a.eps = 1e-8f;
    fsdp_optim o = { .kind = ADAMW,
                     .lr = a.lr,
                     .beta1 = a.beta1,
                     .beta2 = a.beta2,
                     .eps = a.eps,
                     .weight_decay = a.weight_decay,
                     .states = 2,
                     .state_device = a.state_device };
    return create(out, &o, units, a.groups, a.group_count, check_adamw(&a));
}

void fsdp_optim_destroy(fsdp_optim *o)
{
    if (o == NULL) return;
    for (int i = 0; o->part != NULL && i < o->count; i++) {
        fsdpi_part *p = &o->part[i];
        if (p->home != NULL) fsdpi_state_drop(p);
        fsdpi_free(p->steps);
        fsdpi_free(p->decay);
        fsdpi_free(p->lr_scale);
    }
    fsdpi_staging_drop(o->staging);
    fsdpi_free(o->part);
    fsdpi_free(o->units);
    fsdpi_free(o);
}

void fsdp_optim_set_lr(fsdp_optim *optim, float lr)
{
    optim->lr = lr;
}

float fsdp_optim_lr(const fsdp_optim *optim)
{
    return optim->lr;
}

int fsdp_optim_state_kinds(const fsdp_optim *optim)
{
    return optim->states;
}

const char *fsdp_optim_state_name(const fsdp_optim *optim, int kind)
{
    return kind >= 0 && kind < optim->states ? state_names[optim->kind][kind] : "?";
}

static fsdpi_part *part_of(const fsdp_optim *o, const fsdp_unit *u)
{
    for (int i = 0; i < o->count; i++)
        if (o->part[i].unit == u) return &o->part[i];
    return NULL;
}

fsdp_status fsdp_optim_state(fsdp_optim *optim, const fsdp_unit *unit, int kind, float **state)
{
    fsdpi_part *p = part_of(optim, unit);
    FSDP_FAIL_IF(p == NULL || kind < 0 || kind >= optim->states, FSDP_ERR_INVALID,
                 "fsdp_optim_state: unit \"%s\" has no state of kind %d in this optimizer", fsdp_unit_name(unit), kind);
    if (fsdpi_state_is_missing(p)) {
        FSDPI_CALL(unit->rt->comm);
        FSDP_TRY(fsdpi_state_make(p));
    }
    *state = p->state[kind];
    return FSDP_OK;
}

bool fsdp_optim_has_state(const fsdp_optim *optim, const fsdp_unit *unit)
{
    const fsdpi_part *p = part_of(optim, unit);
    return p != NULL && p->state[0] != NULL;
}

fsdp_stream *fsdp_optim_state_stream(const fsdp_optim *optim, const fsdp_unit *unit)
{
    const fsdpi_part *p = part_of(optim, unit);
    return p != NULL ? fsdpi_state_stream(p) : NULL;
}

int64_t fsdp_optim_unit_steps(const fsdp_optim *optim, const fsdp_unit *unit)
{
    const fsdpi_part *p = part_of(optim, unit);
    int64_t most = 0;
    for (int i = 0; p != NULL && i < fsdp_unit_param_count(unit); i++) most = p->steps[i] > most ? p->steps[i] : most;
    return most;
}

void fsdp_optim_set_unit_steps(fsdp_optim *optim, const fsdp_unit *unit, int64_t steps)
{
    fsdpi_part *p = part_of(optim, unit);
    for (int i = 0; p != NULL && i < fsdp_unit_param_count(unit); i++) p->steps[i] = steps;
}

int64_t fsdp_optim_param_steps(const fsdp_optim *optim, const fsdp_unit *unit, int param)
{
    const fsdpi_part *p = part_of(optim, unit);
    return p != NULL && param >= 0 && param < fsdp_unit_param_count(unit) ? p->steps[param] : 0;
}

void fsdp_optim_set_param_steps(fsdp_optim *optim, const fsdp_unit *unit, int param, int64_t steps)
{
    fsdpi_part *p = part_of(optim, unit);
    if (p != NULL && param >= 0 && param < fsdp_unit_param_count(unit)) p->steps[param] = steps;
}

fsdp_unit_list fsdp_optim_units(const fsdp_optim *optim)
{
    return (fsdp_unit_list){ optim->units, optim->count };
}

/* ---- the step ---- */

typedef struct update_args {
    optim_kind kind;
    fsdpi_adamw_scalars adamw;
    float lr, momentum, weight_decay, scale;
    float *p, *s0, *s1;
    const float *g;
    int64_t numel;
} update_args;

enum { PIECE = 1 << 16 };

typedef struct update_job {
    const fsdpi_optim_kernels *kernels;
    update_args a;
} update_job;

static void update_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const update_job *j = arg;
    const update_args *a = &j->a;
    int64_t at = i * PIECE;
    size_t n = (size_t)(a->numel - at < PIECE ? a->numel - at : PIECE);
    if (a->kind == ADAMW) j->kernels->adamw(&a->adamw, a->p + at, a->g + at, a->s0 + at, a->s1 + at, n);
    else j->kernels->sgd(a->lr, a->momentum, a->weight_decay, a->scale, a->p + at, a->g + at, a->s0 != NULL ? a->s0 + at : NULL, n);
}

static fsdp_status k_update(const fsdp_kernel *k, const void *args)
{
    update_job j = { fsdpi_optim_kernels_get(k->isa), *(const update_args *)args };
    j.a.p = fsdp_kernel_ptr(k, j.a.p);
    j.a.g = fsdp_kernel_ptr(k, j.a.g);
    j.a.s0 = fsdp_kernel_ptr(k, j.a.s0);
    j.a.s1 = fsdp_kernel_ptr(k, j.a.s1);
    fsdpi_kernel_parallel(k, (j.a.numel + PIECE - 1) / PIECE, update_piece, &j);
    return FSDP_OK;
}

typedef struct update {
    const fsdp_optim *o;
    float scale;
} update;

static fsdp_status update_part(fsdpi_part *p, float *const *state, void *arg)
{
    const update *up = arg;
    const fsdp_optim *o = up->o;
    const fsdp_slice *slice;
    int n;
    for (int k = 0; k < fsdp_unit_param_count(p->unit); k++) p->steps[k] += !fsdp_unit_frozen(p->unit, k);
    fsdp_unit_slices(p->unit, &slice, &n);
    for (int i = 0; i < n; i++) {
        const fsdp_slice *s = &slice[i];
        if (s->frozen) continue;
        double steps = (double)p->steps[s->param], bias1 = 1.0 - pow(o->beta1, steps), bias2 = 1.0 - pow(o->beta2, steps);
        float lr = o->lr * p->lr_scale[s->param], decay = p->decay[s->param];
        update_args a = { .kind = o->kind,
                          .lr = lr,
                          .momentum = o->momentum,
                          .weight_decay = decay,
                          .scale = up->scale,
                          .p = s->master,
                          .g = s->grad,
                          .s0 = p->kinds > 0 ? state[0] + s->state_offset : NULL,
                          .s1 = p->kinds > 1 ? state[1] + s->state_offset : NULL,
                          .numel = s->numel };
        if (o->kind == ADAMW)
            a.adamw = (fsdpi_adamw_scalars){ .scale = up->scale,
                                             .decay = (float)(1.0 - (double)lr * (double)decay),
                                             .beta1 = o->beta1,
                                             .beta2 = o->beta2,
                                             .step_size = (float)((double)lr / bias1),
                                             .inv_sqrt_bias2 = (float)(1.0 / sqrt(bias2)),
                                             .eps = o->eps };
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_storage_stream(p->unit), k_update, &a, sizeof(a)));
    }
    return FSDP_OK;
}

static fsdp_status refuse_norm(fsdp_optim *o, const fsdp_step_opts *s, double norm)
{
    char who[200], scale[80] = "";
    FSDP_TRY(fsdpi_step_find_bad(fsdp_optim_units(o), s->over, who, sizeof(who)));
    FSDP_TRY(fsdp_step_cancel(fsdp_optim_units(o)));
    if (s->scaler != NULL) snprintf(scale, sizeof(scale), " at the loss scale %g, which is at its minimum", s->scaler->scale);
    FSDP_FAIL(FSDP_ERR_NONFINITE, "the gradient norm is %g%s: %s; parameters were left as they are", norm, scale,
              who[0] != '\0' ? strcat(who, " has it first") : "each gradient is finite, their norm is not");
}

/* The same on every rank, since the norm is. */
static fsdp_status not_finite(fsdp_optim *o, const fsdp_step_opts *s, double norm)
{
    bool skip;
    if (s->scaler == NULL || fsdp_scaler_update(s->scaler, norm, &skip) != FSDP_OK) return refuse_norm(o, s, norm);
    FSDP_TRY(fsdp_step_cancel(fsdp_optim_units(o)));
    if (s->norm != NULL) *s->norm = norm;
    if (s->skipped != NULL) *s->skipped = true;
    return FSDP_OK;
}

static fsdp_status check_opts(const fsdp_step_opts *s)
{
    FSDP_FAIL_IF(!(s->clip >= 0) || !isfinite(s->grad_scale), FSDP_ERR_INVALID, "fsdp_optim_step: clip %g must be 0 or more, grad_scale %g finite",
                 (double)s->clip, (double)s->grad_scale);
    FSDP_FAIL_IF(s->scaler != NULL && !(s->scaler->scale > 0 && isfinite(s->scaler->scale)), FSDP_ERR_INVALID,
                 "fsdp_optim_step: the loss scale is %g: fsdp_scaler_init() makes a scaler", s->scaler->scale);
    FSDP_FAIL_IF(s->skipped != NULL && s->scaler == NULL, FSDP_ERR_INVALID, "fsdp_optim_step: no step is skipped without a scaler: leave `skipped` out");
    return FSDP_OK;
}

/* What the sums of gradients are multiplied by. */
static fsdp_status scale_of(const fsdp_step_opts *s, double weight, double *scale)
{
    FSDP_FAIL_IF(s->grad_scale == 0 && !(weight >= 0 && isfinite(weight)), FSDP_ERR_INVALID,
                 "fsdp_optim_step: the weight of the passes is %g: see fsdp_pass_add_weight()", weight);
    *scale = s->grad_scale != 0 ? (double)s->grad_scale : weight > 0 ? 1.0 / weight : 1.0;
    if (s->scaler != NULL) *scale /= s->scaler->scale;
    return FSDP_OK;
}

static fsdp_status update_all(fsdp_optim *o, float scale)
{
    update up = { o, scale };
    for (int i = 0; i < o->count; i++) {
        fsdpi_part *p = &o->part[i];
        if (p->unit->step_grad != NULL && !fsdpi_state_is_apart(p)) FSDP_TRY(update_part(p, p->state, &up));
    }
    return fsdpi_staging_update(o->staging, o->part, o->count, update_part, &up);
}

/* State of what is updated for the first time, and a place to update it. */
static fsdp_status take_memory(fsdp_optim *o)
{
    for (int i = 0; i < o->count; i++)
        if (o->part[i].unit->step_grad != NULL && fsdpi_state_is_missing(&o->part[i])) FSDP_TRY(fsdpi_state_make(&o->part[i]));
    return fsdpi_staging_fit(&o->staging, o->part, o->count);
}

fsdp_status fsdp_optim_step(fsdp_optim *o, const fsdp_step_opts *opts)
{
    fsdp_step_opts s = opts != NULL ? *opts : (fsdp_step_opts){ 0 };
    FSDP_TRY(check_opts(&s));
    FSDPI_LIST_CALL(fsdp_optim_units(o), __func__);
    if (o->count == 0 && s.over == NULL) return FSDP_OK;
    double norm = 0, weight = 0, scale = 1;
    FSDP_TRY(fsdp_step_begin(fsdp_optim_units(o)));
    fsdp_status st = fsdpi_step_norm(fsdp_optim_units(o), &(fsdp_norm_opts){ .p = s.clip_p, .over = s.over }, take_memory(o), &norm, &weight);
    if (st == FSDP_OK) st = scale_of(&s, weight, &scale);
    if (st != FSDP_OK) { /* nothing was written: it can be done again */
        fsdpi_step_leave(fsdp_optim_units(o));
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    norm *= fabs(scale);
    if (!isfinite(norm)) return not_finite(o, &s, norm);
    /* As torch.nn.utils.clip_grad_norm_: the factor is clip / (norm + 1e-6), at most 1. */
    double clip = s.clip > 0 && (double)s.clip < norm + 1e-6 ? (double)s.clip / (norm + 1e-6) : 1.0;
    FSDP_TRY(update_all(o, (float)(scale * clip)));
    FSDP_TRY(fsdp_step_end(fsdp_optim_units(o)));
    bool skip = false;
    if (s.scaler != NULL) FSDP_TRY(fsdp_scaler_update(s.scaler, norm, &skip));
    if (s.norm != NULL) *s.norm = norm;
    if (s.skipped != NULL) *s.skipped = false;
    return FSDP_OK;
}
