/* SPDX-License-Identifier: MIT */
#include "support/random/make_inside.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/unit.h"

#include <time.h>

void be_late(run *r)
{
    if (r->size > 1 && one_in(&r->late, 24)) nanosleep(&(struct timespec){ .tv_nsec = below(&r->late, 300) * 1000 }, NULL);
}

static fsdp_stream *stream_of(const run *r)
{
    for (int u = 0; u < MODEL_UNITS; u++)
        if (r->unit[u] != NULL) return fsdp_unit_stream(r->unit[u]);
    return NULL;
}

fsdp_unit_list list_of(run *r, unsigned mask, fsdp_unit **room)
{
    int n = 0;
    for (int u = 0; u < MODEL_UNITS; u++)
        if ((mask >> u & 1) && r->unit[u] != NULL) room[n++] = r->unit[u];
    return (fsdp_unit_list){ room, n };
}

typedef struct args {
    float *number;
    uint64_t leaf;
    int count;
    bool poison;
    int64_t numel[MODEL_PARAMS];
    const void *p[MODEL_PARAMS];
    fsdp_dtype dtype; /* of p */
    float *g[MODEL_PARAMS], beta[MODEL_PARAMS];
} args;

static const float *widened(const fsdp_kernel *k, const args *a, int i, float *room)
{
    const void *p = fsdp_kernel_ptr(k, a->p[i]);
    if (a->dtype == FSDP_F32) return p;
    for (int64_t j = 0; j < a->numel[i]; j++) room[j] = a->dtype == FSDP_BF16 ? fsdp_bf16_to_f32(((const uint16_t *)p)[j]) : fsdp_f16_to_f32(((const uint16_t *)p)[j]);
    return room;
}

static fsdp_status k_forward(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    float room[MODEL_TOTAL];
    for (int i = 0; i < a->count; i++) *a->number = model_mix(*a->number, widened(k, a, i, room), a->numel[i], a->leaf, i);
    *a->number += 0.25f;
    return FSDP_OK;
}

static fsdp_status k_backward(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    float room[MODEL_TOTAL];
    for (int i = 0; i < a->count; i++)
        if (a->g[i] != NULL) model_gradient(fsdp_kernel_ptr(k, a->g[i]), a->beta[i] != 0, *a->number, widened(k, a, i, room), a->numel[i], a->leaf, i, a->poison);
    *a->number *= 0.75f;
    return FSDP_OK;
}

static fsdp_status k_fail(const fsdp_kernel *k, const void *v)
{
    (void)k;
    (void)v;
    FSDP_FAIL(FSDP_ERR_NONFINITE, "a kernel of the caller's fails");
}

/* Compute in a pass. grads: of which parameters; -1: a forward. */
static fsdp_status compute(run *r, const call *c, int pass, int64_t grads)
{
    fsdp_unit *u = r->unit[c->unit];
    args a = { .number = &r->number[pass], .leaf = r->m->pass[pass].serial * (uint64_t)r->size + (uint64_t)r->rank, .count = fsdp_unit_param_count(u), .poison = c->flag };
    for (int i = 0; i < a.count; i++) {
        a.numel[i] = fsdp_unit_param_numel(u, i);
        a.p[i] = fsdp_unit_param_data(u, i, &a.dtype);
        if (a.p[i] == NULL) return fsdpi_error_status();
        FSDP_FAIL_IF((fsdp_unit_param(u, i) == NULL) != (a.dtype != FSDP_F32), FSDP_ERR_INTERNAL, "unit %d: compute has %s, and%s fp32", c->unit, fsdp_dtype_name(a.dtype),
                     a.dtype != FSDP_F32 ? "" : " no");
        if (grads < 0 || !(grads >> i & 1) || fsdp_unit_frozen(u, i)) continue;
        a.g[i] = fsdp_unit_grad(u, i, &a.beta[i]);
        if (a.g[i] == NULL) return fsdpi_error_status();
    }
    return fsdp_stream_launch(fsdp_unit_stream(u), grads < 0 ? k_forward : k_backward, &a, sizeof(a));
}

fsdp_status expect_equal(run *r, const float *got, const float *want, int64_t numel, const char *what, int unit, int param)
{
    for (int64_t i = 0; i < numel; i++)
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "rank %d: %s: unit %d, parameter %d, element %lld is %.9g, not %.9g (mode %s, it is %s)", r->rank, what, unit, param, (long long)i, (double)got[i],
                      (double)want[i], unit >= 0 ? fsdp_mode_name(r->m->unit[unit].mode) : "-", unit >= 0 ? fsdp_unit_state(r->unit[unit]) : "-");
    return FSDP_OK;
}

static fsdp_status begin_pass(run *r, const call *c)
{
    FSDP_TRY(fsdp_pass_begin(&r->pass[c->pass], r->comm, c->flag ? FSDP_PASS_TRAIN : FSDP_PASS_EVAL));
    if (stream_of(r) != NULL) FSDP_TRY(fsdp_stream_sync(stream_of(r))); /* the number is used again */
    r->number[c->pass] = 0;
    return FSDP_OK;
}

/* Some have a micro-batch; the others join the first of these until its passes have ended, and only then come to the calls in them. */
static fsdp_status begin_joined(run *r, const call *c)
{
    int first, want = -1;
    for (int k = r->size - 1; k >= 0; k--)
        if (c->mask >> k & 1) want = k;
    FSDP_TRY(fsdp_comm_ask_more(r->comm, c->mask >> r->rank & 1, &first));
    FSDP_FAIL_IF(first != want, FSDP_ERR_INTERNAL, "rank %d: rank %d is the first that has more, not %d", r->rank, first, want);
    if (first < 0) return FSDP_OK;
    if (c->mask >> r->rank & 1) return begin_pass(r, c);
    r->joined = fsdp_pass_join(r->comm, first);
    return FSDP_OK;
}

/* A reset ended it, or the end of the last pass. */
fsdp_status make_joined(run *r, const call *c, fsdp_status want)
{
    bool resets = c->kind == CALL_RESET, ends = resets || (ONE_OF(c->kind, CALL_PASS_END, CALL_PASS_CANCEL, CALL_KERNEL_FAILS) && want == FSDP_OK && model_open_passes(r->m) == 1);
    if (!ends) return want;
    FSDP_FAIL_IF(r->joined != (resets ? FSDP_ERR_COMM : FSDP_OK), FSDP_ERR_INTERNAL, "rank %d: joining passes returned %s: %s", r->rank, fsdp_status_name(r->joined), fsdp_last_error_message());
    return resets ? reset(r) : want;
}

static fsdp_status end_pass(run *r, const call *c)
{
    float want = r->m->pass[c->pass].number[r->rank];
    FSDP_TRY(fsdp_pass_end(r->pass[c->pass]));
    r->pass[c->pass] = NULL;
    if (stream_of(r) == NULL) return FSDP_OK;
    FSDP_TRY(fsdp_stream_sync(stream_of(r)));
    return expect_equal(r, &r->number[c->pass], &want, 1, "what forwards and backwards made", -1, -1);
}

static fsdp_status cancel_pass(run *r, int pass)
{
    fsdp_pass *p = r->pass[pass];
    r->pass[pass] = NULL;
    return fsdp_pass_cancel(p);
}

/* Where ranks went apart, or a device has failed in waits that the reset ended, gradients of passes without sync may go: on all
 * ranks alike. */
fsdp_status reset(run *r)
{
    memset(r->pass, 0, sizeof(r->pass));
    FSDP_TRY(fsdp_comm_reset(r->comm));
    double gone[MODEL_UNITS], all[MODEL_UNITS];
    bool may_go = r->now.kind == CALL_STRAY || r->m->leaders != 0 || r->now.nomem > 0 || strcmp(r->c->device, "guard") == 0 || r->storage != NULL;
    for (int u = 0; u < MODEL_UNITS; u++) {
        bool has = r->unit[u] != NULL && fsdpi_unsent_any(r->unit[u]), had = r->unit[u] != NULL && model_has_unsent(r->m, u);
        FSDP_FAIL_IF(has && !had, FSDP_ERR_INTERNAL, "rank %d: unit %d has gradients of passes without sync that do not count", r->rank, u);
        FSDP_FAIL_IF(had && !has && !may_go, FSDP_ERR_INTERNAL, "rank %d: unit %d has lost gradients of passes without sync in a reset", r->rank, u);
        all[u] = gone[u] = had && !has;
        if (had && !has) model_drop_unsent(r->m, u);
    }
    FSDP_TRY(fsdp_comm_max(r->comm, all, MODEL_UNITS));
    FSDP_FAIL_IF(memcmp(all, gone, sizeof(all)) != 0, FSDP_ERR_INTERNAL, "rank %d: a reset drops gradients on other ranks alone", r->rank);
    return FSDP_OK;
}

/* One rank does something else; all are told, and a reset mends it. */
static fsdp_status stray(run *r, const call *c)
{
    fsdp_status st = FSDP_OK;
    if (r->rank != c->rank || c->salt % 3 == 1) {
        fsdp_unit *u = r->unit[c->unit];
        bool passes = model_open_passes(r->m) > 0;
        switch (c->salt / 3 % 4) {
        case 0: break;
        case 1:
            if (r->rank != c->rank && !passes && r->m->unit[c->unit].summons == 0 && !r->m->unit[c->unit].in_step && !r->m->unit[c->unit].averaged) st = fsdp_unit_fill(u, fill, r);
            break;
        case 2:
            if (!passes && r->m->unit[c->unit].in_step) break;
            for (int p = 0; p < MODEL_PASSES && st == FSDP_OK && r->m->cap == 0; p++)
                if (r->pass[p] != NULL && (r->rank != c->rank)) st = fsdp_unit_begin_forward(u, r->pass[p]);
            break;
        default:
            for (int p = 0; p < MODEL_PASSES && st == FSDP_OK; p++)
                if (r->pass[p] != NULL && model_open_uses(r->m, p) == 0 && r->rank != c->rank) st = fsdp_pass_end(r->pass[p]);
            break;
        }
        /* The one that is different says so by another call, or by a reset. */
        if (st == FSDP_OK) st = r->rank == c->rank ? fsdp_comm_stop_agreed(r->comm, &(bool){ false }) : fsdp_comm_barrier(r->comm);
        FSDP_FAIL_IF(st != FSDP_ERR_COMM, FSDP_ERR_INTERNAL, "rank %d: %s, where rank %d left the others: %s", r->rank, fsdp_status_name(st), c->rank, fsdp_last_error_message());
    }
    return reset(r);
}

fsdp_status make(run *r, const call *c)
{
    fsdp_unit *u = r->unit[c->unit], *room[MODEL_UNITS];
    fsdp_pass *p = r->pass[c->pass];
    switch (c->kind) {
    case CALL_PASS_BEGIN: return begin_pass(r, c);
    case CALL_JOINED_BEGIN: return begin_joined(r, c);
    case CALL_PASS_END: return end_pass(r, c);
    case CALL_PASS_CANCEL: return cancel_pass(r, c->pass);
    case CALL_WEIGHT: fsdp_pass_add_weight(p, (c->salt + (uint32_t)r->rank) % 7); return FSDP_OK;
    case CALL_SYNC: return fsdp_pass_set_sync(p, !c->flag);
    case CALL_FREEZE: return fsdp_unit_set_frozen(u, c->param, c->flag);
    case CALL_PENDING: return read_pending(r, c);
    case CALL_FORWARD_BEGIN: FSDP_TRY(fsdp_unit_begin_forward(u, p)); return compute(r, c, c->pass, -1);
    case CALL_FORWARD_END: return fsdp_unit_end_forward(u, p);
    case CALL_RECOMPUTE_BEGIN: FSDP_TRY(fsdp_unit_begin_recompute(u, p)); return compute(r, c, c->pass, -1);
    case CALL_RECOMPUTE_END: return fsdp_unit_end_recompute(u, p);
    case CALL_BACKWARD_BEGIN: FSDP_TRY(fsdp_unit_begin_backward(u, p)); return compute(r, c, c->pass, c->mask);
    case CALL_BACKWARD_END: return fsdp_unit_end_backward(u, p);
    case CALL_GRAD:
        if (r->m->unit[c->unit].owner < 0) return fsdp_unit_param_count(u) > 0 && fsdp_unit_grad(u, 0, &(float){ 0 }) != NULL ? FSDP_OK : FSDP_ERR_STATE;
        if (model_expects(r->m, c) != FSDP_OK) return fsdp_unit_param_count(u) > 0 && fsdp_unit_grad(u, 0, &(float){ 0 }) != NULL ? FSDP_OK : FSDP_ERR_STATE;
        return compute(r, c, r->m->unit[c->unit].owner, c->mask);
    case CALL_PEEK: return peek(r, c);
    case CALL_PREFETCH: return fsdp_unit_prefetch(r->unit[c->unit]);
    case CALL_UNSHARD: return fsdp_unit_unshard(r->unit[c->unit]);
    case CALL_RESHARD: return fsdp_unit_reshard(r->unit[c->unit]);
    case CALL_CAP: return set_cap(r, c);
    case CALL_READ: return read_one(r, c->unit, c->param, c->salt % 3 > 0 || r->rank == c->rank);
    case CALL_READ_ALL: return read_all(r);
    case CALL_SUMMON:
    case CALL_SUMMON_WRITE:
    case CALL_SUMMON_READ: return summon(r, c);
    case CALL_SUMMON_GRADS: return use_summoned_grads(r, c);
    case CALL_SUMMON_CANCEL: return fsdp_unit_summon_cancel(u);
    case CALL_WRITE: return write_summoned(r, c);
    case CALL_SUMMON_END: return fsdp_unit_summon_end(u);
    case CALL_FILL:
    case CALL_FILL_FAILS: return fsdp_unit_fill(u, fill, r);
    case CALL_FILL_FROM:
    case CALL_FILL_FROM_FAILS: return fsdp_unit_fill_from(u, c->rank, r->rank == c->rank ? fill : NULL, r);
    case CALL_CHECK_REPLICAS: return fsdp_unit_check_replicas(u);
    case CALL_BROADCAST: return fsdp_unit_broadcast_from(u, c->rank);
    case CALL_DIVERGE: return diverge(r, c);
    case CALL_TEACH: return fsdp_teacher_update((fsdp_unit_list){ &u, 1 }, (fsdp_unit_list){ &r->unit[c->other], 1 }, model_decay(c));
    case CALL_EMA_RENEW: return renew_average(r, c);
    case CALL_EMA_UPDATE: return fsdp_ema_update(r->ema, model_decay(c));
    case CALL_EMA_READ: return read_average(r);
    case CALL_SWAP_IN: return fsdp_ema_swap_in(r->ema);
    case CALL_SWAP_OUT: return fsdp_ema_swap_out(r->ema);
    case CALL_READ_GRAD: return read_grad(r, c);
    case CALL_OPTIM_STEP:
        return r->optim[model_optim_of(c) - MODEL_SGD] != NULL ? fsdp_optim_step(r->optim[model_optim_of(c) - MODEL_SGD], &(fsdp_step_opts){ .grad_scale = model_grad_scale(c), .clip = c->flag ? MODEL_CLIP : 0 }) : FSDP_OK;
    case CALL_STEP_BEGIN: return fsdp_step_begin(list_of(r, c->mask, room));
    case CALL_STEP_WRITE: return write_masters(r, c);
    case CALL_STEP_NORM: return check_norm(r, c, list_of(r, c->mask, room));
    case CALL_STEP_END: return fsdp_step_end(list_of(r, c->mask, room));
    case CALL_STEP_CANCEL: return fsdp_step_cancel(list_of(r, c->mask, room));
    case CALL_ZERO_GRAD: return fsdp_unit_zero_grad(u);
    case CALL_RENEW: return renew(r, c);
    case CALL_CREATE_DIFFERS: return create_differing(r, c);
    case CALL_OPTIM_RENEW: return make_optim(r, c);
    case CALL_SAVE:
    case CALL_LOAD: return save_or_load(r, c);
    case CALL_KERNEL_FAILS: (void)!fsdp_stream_launch(stream_of(r), k_fail, NULL, 0); return cancel_pass(r, c->pass);
    case CALL_RESET: return reset(r);
    case CALL_STRAY: return stray(r, c);
    case CALL_BARRIER: return fsdp_comm_barrier(r->comm);
    case CALL_KINDS: break;
    }
    return FSDP_ERR_INTERNAL;
}

/* ---- an allocation fails ---- */

static bool in_a_pass(call_kind k)
{
    return ONE_OF(k, CALL_PASS_END, CALL_FORWARD_BEGIN, CALL_FORWARD_END, CALL_RECOMPUTE_BEGIN, CALL_RECOMPUTE_END, CALL_BACKWARD_BEGIN, CALL_BACKWARD_END, CALL_GRAD);
}

/* In which calls it can be put right. Outside of passes: not where a launch itself allocates. */
bool can_fail(const run *r, call_kind k)
{
    if (in_a_pass(k)) return true;
    bool queue = strcmp(r->c->device, "guard") == 0 || r->storage != NULL;
    return ONE_OF(k, CALL_PASS_BEGIN) || (!queue && ONE_OF(k, CALL_SUMMON, CALL_SUMMON_READ, CALL_SUMMON_WRITE, CALL_FILL, CALL_READ, CALL_STEP_BEGIN) && r->size == 1) ||
           (!queue && ONE_OF(k, CALL_FILL, CALL_SUMMON, CALL_SUMMON_READ, CALL_SUMMON_WRITE));
}

/* Alone: what failed in a pass costs the pass, everything else is done again. Among others: a reset mends it. */
fsdp_status cancel_passes(run *r)
{
    bool joined = model_has_joined(r->m, r->rank);
    FSDP_FAIL_IF(joined && r->joined != FSDP_OK, FSDP_ERR_INTERNAL, "rank %d: joining passes returned %s: %s", r->rank, fsdp_status_name(r->joined), fsdp_last_error_message());
    for (int p = 0; p < MODEL_PASSES; p++) {
        if (!r->m->pass[p].open) continue;
        if (!joined) FSDP_TRY(cancel_pass(r, p));
        model_apply(r->m, &(call){ .kind = CALL_PASS_CANCEL, .pass = p });
    }
    return FSDP_OK;
}

fsdp_status make_without_memory(run *r, const call *c, bool *applies)
{
    *applies = true;
    if (r->rank == c->rank) fsdpi_alloc_fail_at(c->nomem);
    fsdp_status st = make(r, c);
    if (r->rank == c->rank) fsdpi_alloc_fail_at(0);
    if (r->size > 1) {
        fsdp_status all = fsdp_comm_agree(r->comm, st == FSDP_ERR_NOMEM || st == FSDP_ERR_COMM || st == FSDP_OK ? st : FSDP_ERR_INTERNAL);
        if (all == FSDP_OK) return st;
        FSDP_FAIL_IF(all != FSDP_ERR_NOMEM && all != FSDP_ERR_COMM, FSDP_ERR_INTERNAL, "rank %d: without memory: %s: %s", r->rank, fsdp_status_name(st), fsdp_last_error_message());
        *applies = false;
        model_reset(r->m);
        return reset(r);
    }
    if (st != FSDP_ERR_NOMEM) return st;
    if (!in_a_pass(c->kind)) {
        if (c->kind == CALL_PASS_BEGIN && r->pass[c->pass] != NULL) FSDP_TRY(cancel_pass(r, c->pass)); /* it was begun, and then what failed was the test's */
        return make(r, c);
    }
    *applies = false;
    int pass = c->kind == CALL_GRAD ? r->m->unit[c->unit].owner : c->pass;
    model_apply(r->m, &(call){ .kind = CALL_PASS_CANCEL, .pass = pass });
    return cancel_pass(r, pass);
}
