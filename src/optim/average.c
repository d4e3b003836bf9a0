/* SPDX-License-Identifier: MIT
 *
 * Averages of parameters, beside the masters; and teachers, which are averages that are units themselves. */
#include <fsdp/average.h>

#include "base/alloc.h"
#include "base/error.h"
#include "optim/kernels.h"
#include "shard/rewrite.h"
#include "shard/unit_list.h"

#include <math.h>

/* ---- kernels ---- */

typedef struct mix_args {
    float *a;
    const float *p;    /* mix: a moves towards p */
    float *swap;       /* or they are exchanged */
    float w, decay;    /* w + decay = 1 */
    int64_t numel;
} mix_args;

enum { PIECE = 1 << 16 };

typedef struct mix_job {
    const fsdpi_optim_kernels *kernels;
    mix_args a;
} mix_job;

static void exchange(float *restrict a, float *restrict b, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float t = a[i];
        a[i] = b[i];
        b[i] = t;
    }
}

static void mix_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const mix_job *j = arg;
    int64_t at = i * PIECE, n = j->a.numel - at < PIECE ? j->a.numel - at : PIECE;
    if (j->a.swap != NULL) exchange(j->a.a + at, j->a.swap + at, n);
    else j->kernels->mix(j->a.w, j->a.decay, j->a.a + at, j->a.p + at, (size_t)n);
}

static fsdp_status k_mix(const fsdp_kernel *k, const void *args)
{
    mix_job j = { fsdpi_optim_kernels_get(k->isa), *(const mix_args *)args };
    j.a.a = fsdp_kernel_ptr(k, j.a.a);
    j.a.p = fsdp_kernel_ptr(k, j.a.p);
    j.a.swap = fsdp_kernel_ptr(k, j.a.swap);
    fsdpi_kernel_parallel(k, (j.a.numel + PIECE - 1) / PIECE, mix_piece, &j);
    return FSDP_OK;
}

static fsdp_status launch_mix(fsdp_unit *u, mix_args a)
{
    return fsdp_stream_launch(fsdp_unit_storage_stream(u), k_mix, &a, sizeof(a));
}

static mix_args towards(float decay)
{
    return (mix_args){ .decay = decay, .w = (float)(1.0 - (double)decay) };
}

/* ---- the moving average ---- */

struct fsdp_ema {
    fsdp_unit **units;
    float **state; /* arena blocks of the units' devices */
    int count;
    bool swapped;
};

static fsdp_status copy_masters(fsdp_ema *e, int i)
{
    fsdp_unit *u = e->units[i];
    size_t bytes = (size_t)fsdp_unit_slice_numel(u) * sizeof(float);
    const fsdp_slice *slice;
    int n;
    void *p;
    FSDP_TRY(fsdpi_arena_alloc(u->store->arena, bytes, &p));
    e->state[i] = p;
    FSDP_TRY(fsdpi_stream_fill(u->store->compute, p, 0, bytes));
    fsdp_unit_slices(u, &slice, &n);
    for (int k = 0; k < n; k++)
        FSDP_TRY(fsdp_stream_copy(u->store->compute, e->state[i] + slice[k].state_offset, slice[k].master, (size_t)slice[k].numel * sizeof(float)));
    return FSDP_OK;
}

fsdp_status fsdp_ema_create(fsdp_ema **out, fsdp_unit_list units)
{
    FSDP_FAIL_IF(units.count < 0 || (units.count > 0 && units.units == NULL), FSDP_ERR_INVALID, "an average of %d units", units.count);
    FSDPI_LIST_CALL(units, __func__);
    for (int i = 0; i < units.count; i++) {
        const fsdp_unit *u = units.units[i];
        for (int j = 0; j < i; j++) FSDP_FAIL_IF(u == units.units[j], FSDP_ERR_INVALID, "unit \"%s\" is in the average's list twice", u->name);
        FSDP_FAIL_IF(u->in_step, FSDP_ERR_STATE, "fsdp_ema_create: unit \"%s\" is in a step: end the step first", u->name);
        FSDP_FAIL_IF(u->averaged, FSDP_ERR_STATE, "fsdp_ema_create: unit \"%s\": its average is in its place: fsdp_ema_swap_out() first", u->name);
    }
    fsdp_status st;
    fsdp_ema *e;
    FSDPI_NEW(e, 1);
    e->units = fsdpi_calloc((size_t)units.count, sizeof(*e->units));
    e->state = fsdpi_calloc((size_t)units.count, sizeof(*e->state));
    if (e->units == NULL || e->state == NULL) FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, fail, "no memory for an average of %d units", units.count);
    for (int i = 0; i < units.count; i++) {
        e->units[i] = units.units[i];
        e->count = i + 1;
        FSDP_TRY_GOTO(copy_masters(e, i), fail);
    }
    *out = e;
    return FSDP_OK;
fail:
    fsdp_ema_destroy(e);
    return st;
}

void fsdp_ema_destroy(fsdp_ema *e)
{
    if (e == NULL) return;
    for (int i = 0; i < e->count; i++) {
        if (e->swapped) e->units[i]->averaged = false;
        if (e->state[i] != NULL) fsdpi_arena_free(e->units[i]->store->arena, e->state[i]);
    }
    fsdpi_free(e->units);
    fsdpi_free(e->state);
    fsdpi_free(e);
}

/* Of a unit's state array, every element that the rank keeps. */
static fsdp_status mix_state(fsdp_ema *e, int i, mix_args a, bool swap)
{
    const fsdp_slice *slice;
    int n;
    fsdp_unit_slices(e->units[i], &slice, &n);
    for (int k = 0; k < n; k++) {
        a.a = e->state[i] + slice[k].state_offset;
        a.p = slice[k].master;
        a.swap = swap ? slice[k].master : NULL;
        a.numel = slice[k].numel;
        FSDP_TRY(launch_mix(e->units[i], a));
    }
    return FSDP_OK;
}

fsdp_status fsdp_ema_update(fsdp_ema *e, float decay)
{
    FSDP_FAIL_IF(!(decay >= 0 && decay < 1), FSDP_ERR_INVALID, "fsdp_ema_update: decay %g: 0 or more, and less than 1", (double)decay);
    FSDPI_LIST_CALL(fsdp_ema_units(e), __func__);
    FSDP_FAIL_IF(e->swapped, FSDP_ERR_STATE, "fsdp_ema_update: the averages are in the parameters' place: fsdp_ema_swap_out() first");
    for (int i = 0; i < e->count; i++)
        FSDP_FAIL_IF(e->units[i]->in_step, FSDP_ERR_STATE, "fsdp_ema_update: unit \"%s\" is in a step: end the step first", e->units[i]->name);
    for (int i = 0; i < e->count; i++) FSDP_TRY(mix_state(e, i, towards(decay), false));
    return FSDP_OK;
}

static fsdp_status swap_unit(fsdp_unit *u, int number, void *arg)
{
    (void)u;
    return mix_state(arg, number, (mix_args){ 0 }, true);
}

static fsdp_status swap(fsdp_ema *e, fsdpi_event ev)
{
    FSDP_TRY(fsdpi_units_rewrite(fsdp_ema_units(e), ev, swap_unit, e, true)); /* replicas keep the same averages */
    e->swapped = ev == FSDPI_EV_SWAP_IN;
    for (int i = 0; i < e->count; i++) e->units[i]->averaged = e->swapped;
    return FSDP_OK;
}

fsdp_status fsdp_ema_swap_in(fsdp_ema *ema)
{
    return swap(ema, FSDPI_EV_SWAP_IN);
}

fsdp_status fsdp_ema_swap_out(fsdp_ema *ema)
{
    FSDP_FAIL_IF(!ema->swapped && ema->count > 0 && ema->units[0]->averaged, FSDP_ERR_STATE,
                 "fsdp_ema_swap_out: unit \"%s\": another average is in its place: swap that one out first", ema->units[0]->name);
    return swap(ema, FSDPI_EV_SWAP_OUT);
}

fsdp_status fsdp_ema_state(fsdp_ema *ema, const fsdp_unit *unit, float **state)
{
    for (int i = 0; i < ema->count; i++) {
        if (ema->units[i] != unit) continue;
        *state = ema->state[i];
        return FSDP_OK;
    }
    FSDP_FAIL(FSDP_ERR_INVALID, "fsdp_ema_state: unit \"%s\" is not in this average", fsdp_unit_name(unit));
}

fsdp_unit_list fsdp_ema_units(const fsdp_ema *ema)
{
    return (fsdp_unit_list){ ema->units, ema->count };
}

/* ---- the teacher ---- */

/* Whether each rank keeps, of s, the piece that it owns of t; the shapes are the same. All ranks know it of each other. */
static bool keeps_what(const fsdp_unit *s, const fsdp_unit *t)
{
    for (int r = 0; r < t->rt->comm->size; r++)
        if (fsdpi_unit_piece(t, r) / s->replicas.size != fsdpi_group_member(&s->shards, r)) return false;
    return true;
}

static fsdp_status check_pair(const fsdp_unit *t, const fsdp_unit *s)
{
    FSDP_FAIL_IF(t == s, FSDP_ERR_INVALID, "fsdp_teacher_update: unit \"%s\" is teacher and student", t->name);
    FSDP_FAIL_IF(t->rt != s->rt || t->store != s->store, FSDP_ERR_INVALID, "fsdp_teacher_update: units \"%s\" and \"%s\" are of different communicators or storage devices", t->name,
                 s->name);
    FSDP_FAIL_IF(t->layout.count != s->layout.count, FSDP_ERR_INVALID, "fsdp_teacher_update: unit \"%s\" has %d parameters and unit \"%s\" %d", t->name, t->layout.count, s->name,
                 s->layout.count);
    for (int i = 0; i < t->layout.count; i++) {
        const fsdp_param *a = &t->layout.param[i], *b = &s->layout.param[i];
        bool same = a->ndim == b->ndim;
        for (int d = 0; d < a->ndim && same; d++) same = a->shape[d] == b->shape[d];
        FSDP_FAIL_IF(!same, FSDP_ERR_INVALID, "fsdp_teacher_update: parameter \"%s\" of unit \"%s\" and \"%s\" of \"%s\" have different shapes", a->name, t->name, b->name, s->name);
    }
    FSDP_FAIL_IF(!keeps_what(s, t), FSDP_ERR_INVALID, "fsdp_teacher_update: what ranks write of unit \"%s\" they do not keep of unit \"%s\": give both one mode and mesh", t->name, s->name);
    FSDP_FAIL_IF(s->in_step, FSDP_ERR_STATE, "fsdp_teacher_update: unit \"%s\" is in a step: end the step first", s->name);
    return FSDP_OK;
}

typedef struct lesson {
    fsdp_unit_list student;
    float momentum;
} lesson;

/* What the rank owns, in every mode: replicas get it from there. */
static fsdp_status teach(fsdp_unit *t, int number, void *arg)
{
    const lesson *l = arg;
    const fsdp_unit *s = l->student.units[number];
    for (int i = 0; i < t->own_count; i++) {
        mix_args a = towards(l->momentum);
        a.a = t->master + (t->own[i].at - t->keep_lo);
        a.p = s->master + (t->own[i].at - s->keep_lo);
        a.numel = t->own[i].numel;
        FSDP_TRY(launch_mix(t, a));
    }
    return FSDP_OK;
}

fsdp_status fsdp_teacher_update(fsdp_unit_list teacher, fsdp_unit_list student, float momentum)
{
    FSDP_FAIL_IF(!(momentum >= 0 && momentum <= 1), FSDP_ERR_INVALID, "fsdp_teacher_update: momentum %g: from 0 to 1", (double)momentum);
    FSDP_FAIL_IF(teacher.count != student.count || teacher.count < 0 || (teacher.count > 0 && (teacher.units == NULL || student.units == NULL)), FSDP_ERR_INVALID,
                 "fsdp_teacher_update: %d units of a teacher and %d of a student", teacher.count, student.count);
    for (int i = 0; i < teacher.count; i++) FSDP_TRY(check_pair(teacher.units[i], student.units[i]));
    return fsdpi_units_rewrite(teacher, FSDPI_EV_REWRITE, teach, &(lesson){ student, momentum }, false);
}
