/* SPDX-License-Identifier: MIT
 *
 * Uneven inputs: a rank without a micro-batch takes part in the passes of a rank that has one. It follows that rank's tags as
 * they come, and makes of each what the others need of it: windows of zeros, its reductions, the end of the pass. It gathers
 * nothing, and its pass weighs nothing. So it need not know what comes, and may never have had a micro-batch itself.
 *
 * All ranks make the same operations in the same order: what this rank does next, at position p of its own tags, is what the
 * other has at position p. While it waits it does the reductions that it owes, for the other may wait for these. */
#include "shard/pass.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"

#include <fsdp/gather.h>

#include <sched.h>
#include <string.h>
#include <time.h>

typedef struct follower {
    fsdp_comm *comm;
    fsdpi_runtime *rt;
    int leader;
    fsdp_pass *open[FSDPI_PASS_KINDS];
} follower;

static fsdp_status next_tag(follower *f, fsdpi_tag *t)
{
    enum { PATIENCE_NS = 200 * 1000 };
    uint64_t at = fsdpi_comm_made(f->comm);
    for (int64_t start = fsdpi_now_ns(), waited = 0; !fsdpi_comm_did(f->comm, f->leader, at, t); waited = fsdpi_now_ns() - start) {
        FSDP_TRY(fsdpi_reduce_owed(f->rt, false));
        fsdpi_comm_compare(f->comm);
        FSDP_TRY(fsdpi_comm_check(f->comm, at + 1));
        FSDP_TRY(fsdpi_comm_check_peer(f->comm, f->leader, waited, "the next operation of a pass that this rank has joined"));
        if (waited < PATIENCE_NS) sched_yield();
        else nanosleep(&(struct timespec){ .tv_nsec = 50 * 1000 }, NULL);
    }
    return FSDP_OK;
}

static int kind_of(const fsdpi_tag *t)
{
    return strcmp(t->name, "training") == 0 ? FSDP_PASS_TRAIN : FSDP_PASS_EVAL;
}

static fsdp_status begin(follower *f, const fsdpi_tag *t)
{
    int k = kind_of(t);
    FSDP_FAIL_IF(f->open[k] != NULL, FSDP_ERR_UNSUPPORTED, "fsdp_pass_join: rank %d has two %s passes open at once: which of them a unit is used in cannot be followed",
                 f->leader, t->name);
    FSDP_TRY(fsdp_pass_begin(&f->open[k], f->comm, (fsdp_pass_kind)k));
    f->open[k]->joined = true;
    return FSDP_OK;
}

static fsdp_status end(follower *f, const fsdpi_tag *t)
{
    int k = kind_of(t);
    fsdp_pass *pass = f->open[k];
    FSDP_FAIL_IF(pass == NULL, FSDP_ERR_STATE, "fsdp_pass_join: rank %d ends a %s pass that had begun before", f->leader, t->name);
    FSDP_TRY((t->op == FSDPI_OP_PASS_END ? fsdp_pass_end : fsdp_pass_cancel)(pass));
    f->open[k] = NULL;
    return FSDP_OK;
}

static fsdp_unit *unit_of(const follower *f, const fsdpi_tag *t)
{
    fsdp_unit *u = f->rt->units;
    while (u != NULL && u->number != t->who) u = u->following;
    return u;
}

/* What a unit does in the pass. */
static fsdp_status use_unit(follower *f, fsdp_unit *u, const fsdpi_tag *t)
{
    fsdp_pass *pass = f->open[FSDP_PASS_TRAIN] != NULL ? f->open[FSDP_PASS_TRAIN] : f->open[FSDP_PASS_EVAL];
    FSDP_FAIL_IF(u == NULL || pass == NULL, FSDP_ERR_STATE, "fsdp_pass_join: rank %d: %s of \"%s\", outside of a pass", f->leader, fsdpi_op_name(t->op), t->name);
    f->rt->about = pass->number + 1;
    if (t->op == FSDPI_OP_REDUCE || t->op == FSDPI_OP_KEEP) {
        FSDP_FAIL_IF(u->gradient != FSDPI_GRAD_OPEN, FSDP_ERR_STATE, "fsdp_pass_join: unit \"%s\": rank %d posts a gradient that is not open here", u->name, f->leader);
        return fsdpi_grad_post(u);
    }
    if (t->op == FSDPI_OP_OFFER) return fsdpi_unit_offer_exact(u); /* of which pass a gather is, is not told: this is */
    if (t->op == FSDPI_OP_NEAR) { /* this rank keeps a part too: it has to have it */
        FSDP_TRY(fsdpi_unit_hold_in(u, pass));
        FSDP_TRY(fsdpi_near_keep(u));
        u->checked_residency = u->residency; /* whole, and given up again, in one call */
        return fsdpi_unit_release(u, false);
    }
    fsdpi_use *unused;
    FSDP_TRY(fsdpi_pass_use(pass, u, &unused));
    FSDP_TRY(fsdpi_unit_tag(u, (fsdpi_op)t->op));
    return t->op == FSDPI_OP_BACKWARD ? fsdpi_grad_open(u, pass) : FSDP_OK;
}

static fsdp_status use(follower *f, const fsdpi_tag *t)
{
    fsdp_unit *u = unit_of(f, t);
    FSDP_TRY(use_unit(f, u, t));
    fsdpi_unit_check(u);
    return FSDP_OK;
}

/* A kernel of the others may have failed, and they have given up what is kept by hand here: what there is no room for beside it is left out. */
static bool has_room(const fsdp_unit *u)
{
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    bool has = fsdpi_room_check(u, !fsdpi_unit_is_narrow(u)) == FSDP_OK;
    fsdpi_error_restore(&kept);
    return has;
}

/* It may outlast the pass: this rank does the same. */
static fsdp_status by_hand(const follower *f, const fsdpi_tag *t)
{
    fsdp_unit *u = unit_of(f, t);
    FSDP_FAIL_IF(u == NULL, FSDP_ERR_STATE, "fsdp_pass_join: rank %d: %s of \"%s\", which is no unit here", f->leader, fsdpi_op_name(t->op), t->name);
    if (t->op == FSDPI_OP_UNSHARD && (t->bytes == 0 || !has_room(u))) return fsdpi_unit_tag_unshard(u, t->bytes);
    return (t->op == FSDPI_OP_UNSHARD ? fsdp_unit_unshard : t->op == FSDPI_OP_RESHARD ? fsdp_unit_reshard : fsdp_unit_prefetch)(u);
}

static fsdp_status follow(follower *f, const fsdpi_tag *t)
{
    switch (t->op) {
    case FSDPI_OP_PASS_BEGIN: return begin(f, t);
    case FSDPI_OP_PASS_END:
    case FSDPI_OP_PASS_CANCEL: return end(f, t);
    case FSDPI_OP_FORWARD:
    case FSDPI_OP_RECOMPUTE:
    case FSDPI_OP_BACKWARD:
    case FSDPI_OP_REDUCE:
    case FSDPI_OP_KEEP:
    case FSDPI_OP_OFFER:
    case FSDPI_OP_NEAR: return use(f, t);
    case FSDPI_OP_UNSHARD:
    case FSDPI_OP_RESHARD:
    case FSDPI_OP_PREFETCH: return by_hand(f, t);
    case FSDPI_OP_PASS_SYNC:
        if (f->open[FSDP_PASS_TRAIN] != NULL) return fsdp_pass_set_sync(f->open[FSDP_PASS_TRAIN], strcmp(t->name, "on") == 0);
        break;
    default: break;
    }
    FSDP_FAIL(FSDP_ERR_STATE, "fsdp_pass_join: rank %d makes a%s %s%s%s%s: a rank that joins follows passes alone: make such calls outside of them, on every rank", f->leader,
              strchr("aeiou", fsdpi_op_name(t->op)[0]) != NULL ? "n" : "", fsdpi_op_name(t->op), t->name[0] != '\0' ? " of \"" : "", t->name, t->name[0] != '\0' ? "\"" : "");
}

fsdp_status fsdp_pass_join(fsdp_comm *comm, int leader)
{
    FSDPI_CALL(comm);
    follower f = { .comm = comm, .leader = leader };
    FSDP_FAIL_IF(leader < 0 || leader >= fsdp_comm_size(comm) || leader == fsdp_comm_rank(comm), FSDP_ERR_INVALID,
                 "fsdp_pass_join: rank %d of %d, called by rank %d: another rank is wanted, that has a micro-batch (fsdp_comm_ask_more())", leader, fsdp_comm_size(comm),
                 fsdp_comm_rank(comm));
    FSDP_TRY(fsdpi_runtime_of(&f.rt, comm));
    FSDP_FAIL_IF(f.rt->passes != NULL, FSDP_ERR_STATE, "fsdp_pass_join: a pass is open: end it, or cancel it, first");
    fsdpi_tag t;
    FSDP_TRY(next_tag(&f, &t));
    FSDP_FAIL_IF(t.op != FSDPI_OP_PASS_BEGIN, FSDP_ERR_STATE, "fsdp_pass_join: rank %d begins no pass: its next operation is: %s%s%s%s", leader, fsdpi_op_name(t.op),
                 t.name[0] != '\0' ? " of \"" : "", t.name, t.name[0] != '\0' ? "\"" : "");
    FSDP_TRY(follow(&f, &t));
    while (f.rt->passes != NULL) {
        FSDP_TRY(next_tag(&f, &t));
        FSDP_TRY(follow(&f, &t));
    }
    return FSDP_OK;
}
