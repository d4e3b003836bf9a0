/* SPDX-License-Identifier: MIT
 *
 * A tape is a pass: where operations on tensors meet the life of units. */
#include "nn/module.h"

#include "base/error.h"
#include "shard/pass.h"

#include <math.h>

fsdp_status fsdp_tape_begin_with(fsdp_tape **out, fsdp_comm *comm, const fsdp_tape_opts *opts)
{
    fsdp_tape_opts o = opts != NULL ? *opts : (fsdp_tape_opts){ 0 };
    if (o.device == NULL) o.device = fsdp_device_cpu();
    if (o.loss_scale == 0) o.loss_scale = 1;
    FSDP_FAIL_IF(!(o.loss_scale > 0) || !isfinite(o.loss_scale), FSDP_ERR_INVALID, "fsdp_tape_begin: loss_scale is %g: more than 0, and finite", (double)o.loss_scale);
    fsdpi_runtime *rt;
    fsdpi_devctx *ctx;
    fsdp_tape *t;
    FSDP_TRY(fsdpi_runtime_of(&rt, comm));
    FSDP_TRY(fsdpi_runtime_device(&ctx, rt, o.device));
    FSDP_TRY(fsdpi_tape_create(&t, ctx->compute, ctx->arena, &o));
    fsdp_pass *pass;
    fsdp_status st = fsdp_pass_begin(&pass, comm, o.eval ? FSDP_PASS_EVAL : FSDP_PASS_TRAIN);
    if (st == FSDP_OK && o.no_sync && (st = fsdp_pass_set_sync(pass, false)) != FSDP_OK) (void)!fsdp_pass_cancel(pass);
    if (st != FSDP_OK) {
        fsdpi_tape_destroy(t);
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
static bool pass_is_open(const fsdp_tape *tape)
{
    fsdpi_runtime *rt;
    if (fsdpi_runtime_of(&rt, tape->comm) != FSDP_OK) return false;
    for (const fsdp_pass *p = rt->passes; p != NULL; p = p->older)
        if (p == tape->pass && p->number == tape->pass_number) return true;
    return false;
}

fsdp_status fsdpi_tape_check_pass(const fsdp_tape *tape)
{
    FSDP_FAIL_IF(!pass_is_open(tape), FSDP_ERR_STATE, "the tape's pass was dropped by fsdp_comm_reset(): end the tape, and begin a new one");
    return FSDP_OK;
}

fsdp_status fsdp_backward(fsdp_tape *tape, fsdp_tensor *loss)
{
    FSDP_TRY(fsdpi_tape_check_pass(tape));
    return fsdpi_tape_backward(tape, loss);
}

static fsdp_status finish(fsdp_tape *tape)
{
    fsdp_pass *pass = tape->pass;
    FSDP_TRY(fsdpi_tape_check_pass(tape));
    FSDP_TRY(fsdpi_tape_leave_lingering(tape));
    if (tape->opts.eval) return fsdp_pass_end(pass);
    double sum, count;
    FSDP_TRY(fsdp_loss_read(tape->loss, &sum, &count));
    fsdp_pass_add_weight(pass, count);
    return fsdp_pass_end(pass);
}

fsdp_status fsdp_tape_end(fsdp_tape *tape)
{
    if (tape == NULL) return FSDP_OK;
    if (!tape->opts.eval && !tape->went_back) return fsdp_tape_cancel(tape);
    fsdp_status st = finish(tape);
    if (st != FSDP_OK) {
        fsdpi_error kept;
        fsdpi_error_save(&kept);
        (void)!fsdp_tape_cancel(tape);
        fsdpi_error_restore(&kept);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    fsdpi_tape_destroy(tape);
    return FSDP_OK;
}

fsdp_status fsdp_tape_cancel(fsdp_tape *tape)
{
    if (tape == NULL) return FSDP_OK;
    /* A kernel that failed (an id that is not in the vocabulary) has stopped the stream for all: what it said was of this
     * tape, and ends with it. */
    fsdpi_runtime *rt;
    fsdp_status st = fsdpi_runtime_of(&rt, tape->comm);
    if (st == FSDP_OK) (void)!fsdpi_runtime_sync(rt);
    if (pass_is_open(tape)) st = fsdp_pass_cancel(tape->pass);
    fsdpi_tape_destroy(tape);
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
