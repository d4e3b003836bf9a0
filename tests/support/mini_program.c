/* SPDX-License-Identifier: MIT */
#include "support/mini_program.h"

static const float scale = 1.0f / 32; /* of gradients: a power of two, so that both programs round alike */

/* ---- by ranks ---- */

static mini_opts opts_of(const mini_program *p, const corner *c)
{
    mini_opts o = p->units;
    o.mode = c->mode;
    o.device = c->device;
    o.sgd = true;
    if (c->mode == FSDP_MODE_NONE) o.shards = 0;
    if (c->mode != FSDP_MODE_FULL) o.reshard_group = 0;
    const char *other = strcmp(c->device, "cpu") == 0 ? "guard" : "cpu";
    if (o.storage != NULL) o.storage = other;
    if (o.grads != NULL) o.grads = strcmp(o.grads, "other") == 0 ? other : c->device;
    return o;
}

static fsdp_status passes_in_order(const mini_program *p, mini *m, int step)
{
    mini_turn t;
    for (int j = 0; p->turn(p, fsdp_comm_size(m->comm), step, j, fsdp_comm_rank(m->comm), &t); j++) {
        m->no_sync = t.no_sync;
        FSDP_TRY(mini_leaf(m, t.script, t.leaf));
    }
    return FSDP_OK;
}

fsdp_status mini_program_train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const mini_program *p = c->arg;
    mini_opts o = opts_of(p, c);
    mini m;
    FSDP_TRY(mini_create(&m, comm, &o));
    for (int s = 0, k = 0; s < p->steps; s++) {
        for (; k < p->changes && p->change[k].step == s; k++) FSDP_TRY(fsdp_unit_set_frozen(m.unit[p->change[k].unit], p->change[k].param, p->change[k].frozen));
        FSDP_TRY((p->passes != NULL ? p->passes : passes_in_order)(p, &m, s));
        FSDP_TRY(fsdp_optim_step(m.optim, &(fsdp_step_opts){ .grad_scale = scale }));
    }
    FSDP_TRY(mini_read(&m, ((mini_result *)c->shared)->param[fsdp_comm_rank(comm)]));
    mini_destroy(&m);
    return FSDP_OK;
}

/* ---- plainly ---- */

/* The plain program's pass number j of all ranks; false: there is none. */
static bool plain_pass(plain *p, const mini_program *of, int ranks, int step, int j)
{
    mini_turn t;
    bool any = false;
    for (int r = 0; r < ranks; r++) {
        if (!of->turn(of, ranks, step, j, r, &t)) continue;
        any = true;
        if (t.joins) plain_nothing_of(p, t.script, r, !t.no_sync);
        else plain_leaf_of(p, t.script, t.leaf, r, !t.no_sync);
    }
    return any;
}

static void run_plainly(const mini_program *of, int ranks, float *out)
{
    plain *p = plain_create();
    plain_set_grad_dtype(p, of->units.grad_dtype);
    for (int s = 0, k = 0; s < of->steps; s++) {
        for (; k < of->changes && of->change[k].step == s; k++) plain_freeze(p, of->change[k].unit, of->change[k].param, of->change[k].frozen);
        for (int j = 0; plain_pass(p, of, ranks, s, j); j++) continue;
        plain_step(p, scale);
    }
    plain_read(p, out);
    plain_destroy(p);
}

void mini_program_compare(const corner *c)
{
    const mini_program *p = c->arg;
    const mini_result *got = c->shared;
    float want[MINI_MOST_NUMEL];
    run_plainly(p, c->ranks, want);
    for (int r = 0; r < c->ranks; r++)
        for (int i = 0; i < mini_numel(); i++) {
            if (memcmp(&want[i], &got->param[r][i], sizeof(float)) == 0) continue;
            fail_msg("%s, script \"%s\": rank %d reads %.9g for element %d, not %.9g", corner_name(c), p->script != NULL ? p->script : "", r, (double)got->param[r][i], i,
                     (double)want[i]);
        }
}

/* ---- where ---- */

void mini_program_in_corners(const mini_program *p, corners which)
{
    which.arg = (void *)(uintptr_t)p;
    which.shared = sizeof(mini_result);
    if (which.after == NULL) which.after = mini_program_compare;
    in_corners(mini_program_train, &which);
}

void mini_program_on_meshes(const mini_program *p, bool all_modes)
{
    static const mini_opts kinds[] = { { .shards = 2 }, { .reshard_group = 2 }, { .shards = 2, .storage = "other" }, { .storage = "other", .grad_dtype = FSDP_F16 }, { .shards = 2, .grad_dtype = FSDP_BF16 },
                                      { .storage = "other", .grads = "same" }, { .shards = 2, .grads = "other", .grad_dtype = FSDP_BF16 } };
    for (int k = 0; k < 7; k++) {
        mini_program on = *p;
        on.units = kinds[k];
        mini_program_in_corners(&on, (corners){ .ranks = (const int[]){ 4, 0 }, .all_modes = all_modes || k == 0, .threads_only = true });
    }
}
