/* SPDX-License-Identifier: MIT
 *
 * A tape is a pass: where operations on tensors meet the life of units. */
#include "nn/module.h"

#include "base/alloc.h"
#include "base/error.h"
#include "comm/call.h"
#include "shard/pass.h"
#include "shard/unit_list.h"

#include <math.h>

/* ---- passes of other communicators ---- */

/* In the order of communicators that all ranks share. */
struct fsdpi_tape_passes {
    struct other_pass {
        fsdp_comm *comm;
        fsdp_pass *pass;
        uint64_t number;
    } *pass;
    int count;
    fsdp_pass **ending; /* room for these and the tape's own */
};

static int others(const fsdp_tape *tape)
{
    return tape->others != NULL ? tape->others->count : 0;
}

static struct other_pass *find_other(const fsdp_tape *tape, const fsdp_comm *comm)
{
    for (int i = 0; i < others(tape); i++)
        if (tape->others->pass[i].comm == comm) return &tape->others->pass[i];
    return NULL;
}

fsdp_pass *fsdpi_tape_pass_on(const fsdp_tape *tape, const fsdp_comm *comm)
{
    if (comm == tape->comm) return tape->pass;
    const struct other_pass *o = find_other(tape, comm);
    return o != NULL ? o->pass : NULL;
}

static fsdp_status reserve(fsdp_tape *tape)
{
    if (tape->others == NULL) FSDPI_NEW(tape->others, 1);
    struct fsdpi_tape_passes *l = tape->others;
    void *p = fsdpi_realloc(l->pass, (size_t)l->count + 1, sizeof(*l->pass));
    FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for a pass of another communicator");
    l->pass = p;
    p = fsdpi_realloc((void *)l->ending, (size_t)l->count + 2, sizeof(*l->ending));
    FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for a pass of another communicator");
    l->ending = p;
    return FSDP_OK;
}

static fsdp_status begin_pass(fsdp_pass **out, fsdp_comm *comm, const fsdp_tape_opts *o)
{
    FSDP_TRY(fsdp_pass_begin(out, comm, o->eval ? FSDP_PASS_EVAL : FSDP_PASS_TRAIN));
    fsdp_status st = o->no_sync ? fsdp_pass_set_sync(*out, false) : FSDP_OK;
    if (st != FSDP_OK) (void)!fsdp_pass_cancel(*out);
    return st;
}

fsdp_status fsdpi_tape_pass_with(fsdp_tape *tape, fsdp_comm *comm)
{
    fsdpi_runtime *rt;
    struct other_pass o = { .comm = comm };
    if (fsdpi_tape_pass_on(tape, comm) != NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_runtime_of(&rt, comm));
    FSDP_TRY(reserve(tape));
    FSDP_TRY(begin_pass(&o.pass, comm, &tape->opts));
    o.number = o.pass->number;
    struct fsdpi_tape_passes *l = tape->others;
    int at = l->count++;
    for (; at > 0 && fsdpi_runtime_comes_before(rt, l->pass[at - 1].comm->attached); at--) l->pass[at] = l->pass[at - 1];
    l->pass[at] = o;
    return FSDP_OK;
}

static void destroy_tape(fsdp_tape *tape)
{
    if (tape->others != NULL) {
        fsdpi_free(tape->others->pass);
        fsdpi_free((void *)tape->others->ending);
        fsdpi_free(tape->others);
    }
    fsdpi_tape_destroy(tape);
}

/* ---- begin ---- */

fsdp_status fsdp_tape_begin_with(fsdp_tape **out, fsdp_comm *comm, const fsdp_tape_opts *opts)
{
    fsdp_tape_opts o = opts != NULL ? *opts : (fsdp_tape_opts){ 0 };
    if (o.device == NULL) o.device = fsdp_device_cpu();
    if (o.loss_scale == 0) o.loss_scale = 1;
    FSDP_FAIL_IF(!(o.loss_scale > 0) || !isfinite(o.loss_scale), FSDP_ERR_INVALID, "fsdp_tape_begin: loss_scale is %g: more than 0, and finite", (double)o.loss_scale);
    FSDPI_CALL(comm);
    fsdpi_runtime *rt;
    fsdpi_devctx *ctx;
    fsdp_tape *t;
    FSDP_TRY(fsdpi_runtime_of(&rt, comm));
    FSDP_TRY(fsdpi_runtime_device(&ctx, rt, o.device));
    FSDP_TRY(fsdpi_tape_create(&t, ctx->compute, ctx->arena, &o));
    fsdp_pass *pass;
    fsdp_status st = begin_pass(&pass, comm, &o);
    if (st != FSDP_OK) {
        destroy_tape(t);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    t->pass = pass;
    t->pass_number = pass->number;
    t->comm = comm;
    *out = t;
    return FSDP_OK;
}

fsdp_status fsdp_tape_begin(fsdp_tape **out, fsdp_comm *comm)
{
    return fsdp_tape_begin_with(out, comm, NULL);
}

/* fsdp_comm_reset() drops passes, and knows nothing of tapes. */
static bool is_open(fsdp_comm *comm, const fsdp_pass *pass, uint64_t number)
{
    fsdpi_runtime *rt;
    if (fsdpi_runtime_of(&rt, comm) != FSDP_OK) return false;
    for (const fsdp_pass *p = rt->passes; p != NULL; p = p->older)
        if (p == pass && p->number == number) return true;
    return false;
}

fsdp_status fsdpi_tape_check_pass(const fsdp_tape *tape)
{
    bool open = is_open(tape->comm, tape->pass, tape->pass_number);
    for (int i = 0; i < others(tape); i++) open &= is_open(tape->others->pass[i].comm, tape->others->pass[i].pass, tape->others->pass[i].number);
    FSDP_FAIL_IF(!open, FSDP_ERR_STATE, "the tape's pass was dropped by fsdp_comm_reset(): end the tape, and begin a new one");
    return FSDP_OK;
}

fsdp_status fsdp_backward(fsdp_tape *tape, fsdp_tensor *loss)
{
    FSDPI_CALL(tape->comm);
    FSDP_TRY(fsdpi_tape_check_pass(tape));
    return fsdpi_tape_backward(tape, loss);
}

/* ---- end ---- */

/* The tape's own comes last: all ranks of the others take part in it. */
static fsdp_status end_passes(fsdp_tape *tape, double weight)
{
    fsdp_pass *own = tape->pass;
    int n = others(tape);
    fsdp_pass **pass = n > 0 ? tape->others->ending : &own;
    for (int i = 0; i < n; i++) pass[i] = tape->others->pass[i].pass;
    pass[n] = own;
    for (int i = 0; i <= n; i++) fsdp_pass_add_weight(pass[i], weight);
    return fsdpi_passes_end(pass, n + 1);
}

static fsdp_status finish(fsdp_tape *tape)
{
    FSDP_TRY(fsdpi_tape_check_pass(tape));
    FSDP_TRY(fsdpi_tape_leave_lingering(tape));
    if (tape->opts.eval) return end_passes(tape, 0);
    double sum, count;
    FSDP_TRY(fsdp_loss_read(tape->loss, &sum, &count));
    return end_passes(tape, count);
}

fsdp_status fsdp_tape_end(fsdp_tape *tape)
{
    if (tape == NULL) return FSDP_OK;
    FSDPI_CALL(tape->comm);
    if (!tape->opts.eval && !tape->went_back) return fsdp_tape_cancel(tape);
    fsdp_status st = finish(tape);
    if (st != FSDP_OK) {
        fsdpi_error kept;
        fsdpi_error_save(&kept);
        (void)!fsdp_tape_cancel(tape);
        fsdpi_error_restore(&kept);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    destroy_tape(tape);
    return FSDP_OK;
}

fsdp_status fsdp_tape_cancel(fsdp_tape *tape)
{
    if (tape == NULL) return FSDP_OK;
    FSDPI_CALL(tape->comm);
    /* A kernel that failed (an id that is not in the vocabulary) has stopped the stream for all: what it said was of this
     * tape, and ends with it. */
    fsdpi_runtime *rt;
    fsdp_status st = fsdpi_runtime_of(&rt, tape->comm);
    if (st == FSDP_OK) (void)!fsdpi_runtime_sync(rt);
    for (int i = 0; i < others(tape); i++) {
        struct other_pass *o = &tape->others->pass[i];
        fsdp_status one = is_open(o->comm, o->pass, o->number) ? fsdp_pass_cancel(o->pass) : FSDP_OK;
        if (st == FSDP_OK) st = one;
    }
    if (is_open(tape->comm, tape->pass, tape->pass_number)) {
        fsdp_status own = fsdp_pass_cancel(tape->pass);
        if (st == FSDP_OK) st = own;
    }
    destroy_tape(tape);
    return st;
}

fsdp_status fsdp_loss_mean(fsdp_comm *comm, fsdp_tensor *loss, double *mean)
{
    double both[2];
    FSDP_TRY(fsdp_loss_read(loss, &both[0], &both[1]));
    FSDP_TRY(fsdp_comm_sum_exact(comm, both, 2));
    *mean = both[1] > 0 ? both[0] / both[1] : 0;
    return FSDP_OK;
}
