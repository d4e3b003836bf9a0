/* SPDX-License-Identifier: MIT
 *
 * Summon: the whole parameters of a unit, outside of passes. Reading shares what a gather gives. Writing needs a copy
 * of one's own, since ranks may write different values: each keeps its slice of what it wrote. A summon to the host is such
 * a copy, and holds nothing on the device; one for rank 0 alone takes nothing on the others. */
#include "shard/compare.h"
#include "shard/spread.h"

#include "base/alloc.h"
#include "base/error.h"

/* ---- what a summon has ---- */

/* Each summon is a holder of the unit; but those whose values are elsewhere, or not for this rank. */
static bool holds(const fsdp_unit *u)
{
    return !u->summon_absent && !u->summon.host;
}

static size_t whole_bytes(const fsdp_unit *u)
{
    return (size_t)u->layout.total * sizeof(float);
}

static fsdp_status new_copy(fsdp_unit *u, float **out)
{
    void *p;
    if (u->summon.host) {
        FSDPI_NEW(*out, u->layout.total);
        return FSDP_OK;
    }
    FSDP_TRY(fsdpi_arena_alloc(u->ctx->arena, whole_bytes(u), &p));
    *out = p;
    return FSDP_OK;
}

static void free_copy(fsdp_unit *u, float **p)
{
    if (u->summon.host) fsdpi_free(*p);
    else fsdpi_arena_free(u->ctx->arena, *p);
    *p = NULL;
}

void fsdpi_summon_drop(fsdp_unit *u)
{
    if (u->summon.host && (u->summoned != NULL || u->summoned_grad != NULL)) { /* queues may still write to the host's memory */
        (void)!fsdp_stream_sync(u->ctx->compute);
        (void)!fsdp_stream_sync(u->ctx->comm);
    }
    free_copy(u, &u->summoned);
    free_copy(u, &u->summoned_grad);
    u->summon = (fsdp_unit_summon_opts){ 0 };
    u->summon_absent = false;
    u->writeback = false;
}

/* ---- begin ---- */

static fsdp_status check_opts(const fsdp_unit *u, const fsdp_unit_summon_opts *o)
{
    static const char call[] = "fsdp_unit_summon_begin";
    FSDP_FAIL_IF(o->same && !o->writeback, FSDP_ERR_INVALID, "%s: unit \"%s\": `same` is about what ranks write: it needs writeback", call, u->name);
    FSDP_FAIL_IF(o->same && o->rank0_only, FSDP_ERR_INVALID, "%s: unit \"%s\": `same` and rank0_only: one rank alone writes", call, u->name);
    if (u->summons == 0 || (o->writeback && !u->writeback)) FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_SUMMON_BEGIN, NULL));
    FSDP_FAIL_IF(o->writeback && u->averaged, FSDP_ERR_STATE, "%s: unit \"%s\": its average is in its place, and what is written would be the average's: fsdp_ema_swap_out() first, or summon it read-only",
                 call, u->name);
    FSDP_FAIL_IF(u->summons == 0 && o->grads && fsdpi_unsent_any(u), FSDP_ERR_STATE,
                 "%s: unit \"%s\" has gradients of passes without sync, which each rank has for itself: read them by fsdp_unit_read_pending(), or make a pass with sync first", call, u->name);
    if (u->summons == 0) return FSDP_OK;
    const fsdp_unit_summon_opts *outer = &u->summon;
    FSDP_FAIL_IF(o->grads && !outer->grads, FSDP_ERR_STATE, "%s: unit \"%s\" is already summoned without gradients: ask for them in the outermost summon", call, u->name);
    FSDP_FAIL_IF(o->same && !outer->same, FSDP_ERR_STATE, "%s: unit \"%s\" is already summoned without `same`: ask for it in the outermost summon", call, u->name);
    FSDP_FAIL_IF(outer->rank0_only && !o->rank0_only, FSDP_ERR_STATE, "%s: unit \"%s\" is already summoned on rank 0 only: the outermost summon must be for all ranks",
                 call, u->name);
    FSDP_FAIL_IF(o->host != outer->host, FSDP_ERR_STATE, "%s: unit \"%s\" is already summoned %s: ask for the same in both summons", call, u->name,
                 outer->host ? "to the host" : "on the device");
    return FSDP_OK;
}

/* What rank 0 gathers all have to offer; and what goes there to make room, or for masters in its place, goes here. */
static fsdp_status stand_by(fsdp_unit *u)
{
    bool rounded = fsdpi_unit_is_narrow(u) && u->residency != FSDPI_SHARDED && !u->whole_exact;
    if (rounded) FSDP_TRY(fsdpi_unit_reshard(u));
    if (fsdpi_unit_is_narrow(u)) FSDP_TRY(fsdpi_unit_offer_exact(u));
    return fsdpi_room_make(u, true);
}

/* This rank's part, which may lack memory. */
static fsdp_status take_params(fsdp_unit *u)
{
    if (u->summon_absent) return stand_by(u);
    fsdp_status st = FSDP_OK;
    FSDP_TRY(fsdpi_unit_hold_exact(u));
    if (u->writeback || u->summon.host) {
        st = new_copy(u, &u->summoned);
        if (st == FSDP_OK) st = fsdp_stream_copy(u->ctx->compute, u->summoned, u->whole, whole_bytes(u));
    }
    if (st == FSDP_OK && u->summon.grads && fsdpi_grad_any(u)) st = new_copy(u, &u->summoned_grad);
    if (u->summon.host && st == FSDP_OK) st = fsdp_stream_sync(u->ctx->compute);
    if (st == FSDP_OK && holds(u)) return FSDP_OK;
    u->checked_residency = u->residency; /* whole, and given up again, in one call */
    fsdp_status released = fsdpi_unit_release(u, false);
    return st == FSDP_OK ? released : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

/* Every rank shows the sums of its slice to those that want them. */
static fsdp_status take_grads(fsdp_unit *u)
{
    fsdpi_spread s;
    if (!u->summon.grads || !fsdpi_grad_any(u)) return FSDP_OK;
    FSDP_TRY(fsdpi_spread_open(&s, u, u->sums));
    FSDP_TRY(fsdpi_grad_sum_into(u, u->sums->comm, s.buffer + u->lo));
    FSDP_TRY(fsdpi_spread_post(&s, true));
    for (int r = 0; r < u->layout.size && u->summoned_grad != NULL; r++) {
        const int64_t *edge = &u->layout.edge[fsdpi_unit_piece(u, r)];
        FSDP_TRY(fsdpi_spread_read(&s, r, edge[0], edge[1], u->summoned_grad + edge[0]));
    }
    FSDP_TRY(fsdpi_spread_close(&s));
    return u->summon.host ? fsdp_stream_sync(u->ctx->compute) : FSDP_OK;
}

/* Debug builds: of what may be read, not written. */
static fsdp_status note_hash(fsdp_unit *u, uint64_t *out)
{
    *out = 0;
#ifndef NDEBUG
    if (u->writeback || u->summon_absent) return FSDP_OK;
    const float *flat = u->summon.host ? u->summoned : u->whole;
    return fsdpi_values_hash(&(fsdpi_values){ .unit = u, .to = u->layout.total, .flat = flat }, out);
#else
    (void)u;
    return FSDP_OK;
#endif
}

static fsdp_status begin_outermost(fsdp_unit *u)
{
    const fsdp_unit_summon_opts *o = &u->summon;
    fsdp_status st = take_params(u);
    bool took = st == FSDP_OK;
    /* Each rank took memory of its own; one alone may lack room below the cap. */
    if (o->writeback || o->host || o->grads || (o->rank0_only && u->rt->unsharded_cap > 0)) st = fsdpi_comm_agree_in(u->rt->comm, FSDPI_OP_SUMMON, u->name, st);
    if (st == FSDP_OK) st = take_grads(u);
    if (st == FSDP_OK) st = note_hash(u, &u->summon_hash);
    if (st == FSDP_OK) return FSDP_OK;
    if (took && holds(u)) (void)!fsdpi_unit_release(u, false);
    return fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

fsdp_status fsdp_unit_summon_begin(fsdp_unit *u, const fsdp_unit_summon_opts *opts)
{
    FSDPI_CALL(u->rt->comm);
    fsdp_unit_summon_opts o = opts != NULL ? *opts : (fsdp_unit_summon_opts){ 0 };
    FSDP_TRY(check_opts(u, &o));
    FSDP_TRY(fsdpi_room_check(u, true));
    uint64_t flags = o.writeback | (uint64_t)o.same << 1 | (uint64_t)o.rank0_only << 2 | (uint64_t)o.host << 3 | (uint64_t)o.grads << 4;
    FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SUMMON, u->name, flags));
    if (u->summons > 0) {
        if (holds(u)) FSDP_TRY(fsdpi_unit_hold_exact(u));
    } else {
        u->summon = o;
        u->writeback = o.writeback;
        u->summon_absent = o.rank0_only && u->rt->comm->rank != 0;
        fsdp_status st = begin_outermost(u);
        if (st != FSDP_OK) {
            fsdpi_error e;
            fsdpi_error_save(&e);
            fsdpi_summon_drop(u);
            fsdpi_error_restore(&e);
            return fsdp_error_through(st, __func__, __FILE__, __LINE__);
        }
    }
    u->summons++;
    fsdpi_unit_opened(u, "summons", u->summons, 1);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

/* ---- end ---- */

/* Whether ranks wrote the same; a meeting. */
static fsdp_status compare_written(fsdp_unit *u, const float *flat, const char *what)
{
    fsdpi_difference d;
    char text[400];
    FSDP_TRY(fsdpi_compare(&(fsdpi_values){ .unit = u, .to = u->layout.total, .flat = flat, .what = what }, FSDPI_OP_SUMMON_END, &d));
    FSDP_FAIL_IF(d.found && u->summon.same, FSDP_ERR_INVALID,
                 "fsdp_unit_summon_end: unit \"%s\": ranks wrote different values: %s: write the same and end again, or fsdp_unit_summon_cancel()", u->name,
                 fsdpi_difference_text(u, &d, text, sizeof(text)));
    fsdpi_difference_log(u, &d);
    return FSDP_OK;
}

/* What rank 0 wrote: into its window, from where each rank takes [from, to) to `place`. */
static fsdp_status send_from_0(fsdp_unit *u, fsdpi_devctx *place, const float *written, int64_t from, int64_t to, float *out)
{
    fsdpi_spread s;
    FSDP_TRY(fsdpi_spread_open(&s, u, place));
    if (written != NULL) FSDP_TRY(fsdpi_between_copy(u, s.buffer, written, whole_bytes(u)));
    FSDP_TRY(fsdpi_spread_post(&s, written != NULL));
    FSDP_TRY(fsdpi_spread_read(&s, 0, from, to, out));
    return fsdpi_spread_close(&s);
}

static fsdp_status write_params(fsdp_unit *u)
{
    if (u->summon.rank0_only) return send_from_0(u, u->store, u->summoned, u->keep_lo, u->keep_hi, u->master);
    FSDP_TRY(fsdpi_between_copy(u, u->master + (u->lo - u->keep_lo), u->summoned + u->lo, (size_t)fsdpi_unit_slice(u) * sizeof(float)));
    return fsdpi_unit_unify(u);
}

/* This rank's slice of them, as they were written. */
static fsdp_status take_written_grads(fsdp_unit *u, float *out)
{
    if (u->summon.rank0_only) return send_from_0(u, u->sums, u->summoned_grad, u->lo, u->hi, out);
    return fsdpi_between_copy(u, out, u->summoned_grad + u->lo, (size_t)fsdpi_unit_slice(u) * sizeof(float));
}

static fsdp_status write_rounded(fsdp_unit *u)
{
    void *wide;
    FSDP_TRY(fsdpi_arena_alloc(u->sums->arena, (size_t)fsdpi_unit_slice(u) * sizeof(float), &wide));
    fsdp_status st = take_written_grads(u, wide);
    if (st == FSDP_OK) st = fsdpi_launch_narrow(u->sums->compute, u->acc[0].now, u->grad_dtype, wide, fsdpi_unit_slice(u));
    fsdpi_arena_free(u->sums->arena, wide);
    return st == FSDP_OK ? fsdpi_stream_wait_stream(u->sums->comm, u->sums->compute) : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

static fsdp_status write_grads(fsdp_unit *u)
{
    if (!u->summon.grads || !fsdpi_grad_any(u)) return FSDP_OK;
    FSDP_TRY(fsdpi_grad_final(u)); /* into one accumulator, which is then written over */
    if (u->grad_dtype != FSDP_F32) return write_rounded(u);
    FSDP_TRY(take_written_grads(u, u->acc[0].now));
    return fsdpi_stream_wait_stream(u->sums->comm, u->sums->compute);
}

/* The own slice of what was written becomes the master, and is published: on all ranks, or the unit stays summoned. */
static fsdp_status write_back(fsdp_unit *u)
{
    FSDP_TRY(fsdpi_unit_done(u));
    FSDP_TRY(fsdpi_unit_open(u));
    if (u->summon.rank0_only) FSDP_TRY(fsdpi_comm_tell(u->rt->comm, FSDPI_OP_SUMMON_END, u->name, NULL, 0));
    else FSDP_TRY(compare_written(u, u->summoned, NULL));
    if (!u->summon.rank0_only && u->summon.grads && fsdpi_grad_any(u)) FSDP_TRY(compare_written(u, u->summoned_grad, "the gradient of parameter"));
    FSDP_TRY(write_params(u));
    FSDP_TRY(write_grads(u));
    FSDP_TRY(fsdpi_unit_publish(u));
    fsdpi_unit_mark_set(u, NULL);
    return u->summon.host ? fsdp_stream_sync(u->ctx->compute) : FSDP_OK; /* the host's copy goes now */
}

static fsdp_status leave(fsdp_unit *u)
{
    bool held = holds(u);
    uint64_t hash = 0;
    fsdp_status st = u->summons == 1 ? note_hash(u, &hash) : FSDP_OK;
    bool written = st == FSDP_OK && u->summons == 1 && !u->writeback && hash != u->summon_hash;
    if (--u->summons == 0) fsdpi_summon_drop(u);
    fsdpi_unit_opened(u, "summons", u->summons, -1);
    fsdp_status released = held ? fsdpi_unit_release(u, false) : FSDP_OK;
    if (u->summons == 0) fsdpi_unit_settle(u); /* it was cancelled after a try to end it */
    fsdpi_unit_check(u);
    if (st == FSDP_OK) st = released;
    FSDP_FAIL_IF(written, FSDP_ERR_INVALID, "fsdp_unit_summon_end: unit \"%s\" was written to, but it was summoned read-only: summon it with writeback", u->name);
    return st;
}

fsdp_status fsdp_unit_summon_end(fsdp_unit *u)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_SUMMON_END, NULL));
    if (u->summons == 1 && u->writeback) FSDP_TRY(write_back(u));
    else FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SUMMON_END, u->name, 0));
    return leave(u);
}

fsdp_status fsdp_unit_summon_cancel(fsdp_unit *u)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_SUMMON_CANCEL, NULL));
    FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SUMMON_CANCEL, u->name, 0));
    return leave(u);
}

/* ---- reading and writing ---- */

/* As for a call that needs a summon of some kind. */
static fsdp_status not_summoned(const fsdp_unit *u, const char *call, const char *kind)
{
    FSDP_FAIL_IF(u->summon_absent, FSDP_ERR_STATE, "%s: unit \"%s\" is summoned on rank 0 only: this rank has nothing", call, u->name);
    FSDP_FAIL(FSDP_ERR_STATE, "%s: unit \"%s\" is not summoned %s (it is %s)", call, u->name, kind, fsdp_unit_state(u));
}

float *fsdp_unit_summoned(fsdp_unit *unit, int i)
{
    if (fsdpi_call_may_read(unit->rt->comm, "fsdp_unit_summoned") != FSDP_OK) return NULL;
    if (fsdpi_unit_check_index(unit, i, "fsdp_unit_summoned") != FSDP_OK) return NULL;
    if (unit->summoned != NULL) return unit->summoned + unit->layout.at[i];
    (void)!not_summoned(unit, "fsdp_unit_summoned", "with writeback or to the host");
    return NULL;
}

fsdp_status fsdp_unit_summoned_grad(fsdp_unit *unit, int i, float **grad)
{
    FSDP_TRY(fsdpi_call_may_read(unit->rt->comm, "fsdp_unit_summoned_grad"));
    FSDP_TRY(fsdpi_unit_check_index(unit, i, "fsdp_unit_summoned_grad"));
    if (unit->summons == 0 || !unit->summon.grads || unit->summon_absent) return not_summoned(unit, "fsdp_unit_summoned_grad", "with grads");
    *grad = unit->summoned_grad != NULL && !unit->frozen[i] ? unit->summoned_grad + unit->layout.at[i] : NULL;
    return FSDP_OK;
}

/* A summon in small: within another it is a holder more. */
fsdp_status fsdp_unit_read_param(fsdp_unit *u, int i, float *out)
{
    FSDPI_CALL(u->rt->comm);
    FSDP_TRY(fsdpi_unit_check_index(u, i, "fsdp_unit_read_param"));
    if (u->summons == 0) FSDP_TRY(fsdpi_life_allows(u, FSDPI_EV_SUMMON_BEGIN, NULL));
    FSDP_TRY(fsdpi_room_check(u, true));
    FSDP_TRY(fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SUMMON, u->name, 0));
    FSDP_TRY(fsdpi_unit_hold_exact(u));
    u->checked_residency = u->residency; /* whole, and given up again, in one call */
    fsdp_status st = FSDP_OK;
    if (out != NULL && u->layout.numel[i] > 0) {
        st = fsdp_stream_copy(u->ctx->compute, out, (const float *)(const float *)u->whole + u->layout.at[i], (size_t)u->layout.numel[i] * sizeof(float));
        if (st == FSDP_OK) st = fsdp_stream_sync(u->ctx->compute);
    }
    fsdp_status end = fsdpi_unit_release(u, false);
    if (st == FSDP_OK) st = end;
    end = fsdpi_comm_tag(u->rt->comm, FSDPI_OP_SUMMON_END, u->name, 0);
    fsdpi_unit_check(u);
    return st != FSDP_OK ? st : end;
}
