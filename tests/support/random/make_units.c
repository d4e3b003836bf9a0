/* SPDX-License-Identifier: MIT
 *
 * Calls that make units, optimizers and checkpoints; and steps. */
#include "support/random/make_inside.h"

#include "base/error.h"

static void drop_optims(run *r)
{
    for (int k = 0; k < 2; k++) {
        fsdp_optim_destroy(r->optim[k]);
        r->optim[k] = NULL;
    }
}

fsdp_status make_optim(run *r, const call *c)
{
    fsdp_unit *room[MODEL_UNITS];
    drop_optims(r);
    FSDP_TRY(fsdp_optim_create_sgd(&r->optim[0], list_of(r, c->mask, room), &(fsdp_sgd_opts){ .lr = MODEL_LR, .momentum = MODEL_MOMENTUM, .weight_decay = MODEL_DECAY }));
    return fsdp_optim_create_adamw(&r->optim[1], list_of(r, model_adamw_mask(c), room), &(fsdp_adamw_opts){ .lr = MODEL_LR, .weight_decay = MODEL_DECAY, .state_device = r->storage });
}

/* Beside the old one, which goes then; averages that are swapped in stay. */
fsdp_status renew_average(run *r, const call *c)
{
    fsdp_unit *room[MODEL_UNITS];
    fsdp_ema *old = r->ema;
    FSDP_TRY(fsdp_ema_create(&r->ema, list_of(r, c->mask, room)));
    fsdp_ema_destroy(old);
    return FSDP_OK;
}

fsdp_status make_unit(run *r, int unit, uint32_t salt, bool differs, fsdp_unit **out)
{
    static _Thread_local model_unit made;
    char name[16];
    model_unit_make(&made, unit, salt, r->size);
    snprintf(name, sizeof(name), "u%d", unit);
    fsdp_unit_opts o = { .name = name, .mode = made.mode, .param_dtype = made.param_dtype, .reduce_dtype = made.reduce_dtype, .grad_dtype = made.grad_dtype, .exact_eval = made.exact_eval, .raw_params = made.raw,
                         .compute_device = r->device, .prefetch = (int)(salt / 4 % 5) - 1 };
    bool stored_apart = model_stored_apart(r->m, &made);
    if (stored_apart) o.storage_device = r->storage;
    if (model_summed_apart(r->m, &made)) o.grad_device = stored_apart ? r->device : r->storage;
    if (made.mode != FSDP_MODE_NONE) o.shards = made.shards;
    if (made.near) o.reshard_group = made.shards / 2;
    if (differs) {
        o.mode = (o.mode + 1) % 4;
        o.reshard_group = 0;
    }
    if (r->w->trace && r->rank == 0)
        fprintf(stderr, "     u%d: mode %s, %d shards, %d parameters, %d elements, %s%s%s, gradients %s, sums %s%s%s\n", unit, fsdp_mode_name(o.mode), made.shards, made.params, made.total, fsdp_dtype_name(made.param_dtype),
                made.raw ? " raw" : "", made.exact_eval ? ", exact evaluations" : "", fsdp_dtype_name(made.reduce_dtype), fsdp_dtype_name(made.grad_dtype),
                stored_apart ? ", stored elsewhere" : "", o.grad_device != NULL ? ", summed elsewhere" : "");
    return fsdp_unit_create(out, r->comm, made.param, made.params, &o);
}

fsdp_status renew(run *r, const call *c)
{
    drop_optims(r);
    if (r->m->unit[c->unit].in_ema) {
        fsdp_ema_destroy(r->ema);
        r->ema = NULL;
    }
    fsdp_unit_destroy(r->unit[c->unit]);
    r->unit[c->unit] = NULL;
    FSDP_TRY(make_unit(r, c->unit, c->salt, false, &r->unit[c->unit]));
    return make_optim(r, c);
}

/* On one rank it has another mode, and none gets it. */
fsdp_status create_differing(run *r, const call *c)
{
    fsdp_unit *u = NULL;
    fsdp_status st = make_unit(r, c->unit, c->salt, r->rank == c->rank, &u);
    if (st == FSDP_OK) fsdp_unit_destroy(u); /* one rank */
    return st;
}

static fsdp_status make_checkpoint(run *r, fsdp_checkpoint **out)
{
    FSDP_TRY(fsdp_checkpoint_create(out, r->comm));
    for (int u = 0; u < MODEL_UNITS; u++)
        for (int i = 0; r->unit[u] != NULL && i < fsdp_unit_param_count(r->unit[u]); i++)
            FSDP_TRY(fsdp_checkpoint_add_param(*out, fsdp_unit_param_info(r->unit[u], i)->name, r->unit[u], i));
    for (int k = 0; k < 2; k++)
        if (r->optim[k] != NULL) FSDP_TRY(fsdp_checkpoint_add_optim(*out, r->optim[k]));
    return r->ema != NULL ? fsdp_checkpoint_add_ema(*out, r->ema) : FSDP_OK;
}

static fsdp_status save(run *r, fsdp_checkpoint *ck, bool background)
{
    fsdp_status st = fsdp_checkpoint_save_with(ck, r->w->folder, r->m->saves + 1, &(fsdp_save_opts){ .keep = 1, .background = background });
    return st == FSDP_OK ? fsdp_checkpoint_wait(ck) : st;
}

fsdp_status save_or_load(run *r, const call *c)
{
    fsdp_checkpoint *ck = NULL;
    char path[256];
    snprintf(path, sizeof(path), "%s/step-%08d", r->w->folder, r->m->saves);
    fsdp_status st = make_checkpoint(r, &ck);
    if (st == FSDP_OK) st = c->kind == CALL_SAVE ? save(r, ck, c->salt % 2) : fsdp_checkpoint_load(ck, path);
    fsdp_checkpoint_destroy(ck);
    return st;
}

typedef struct update_args {
    float *p;
    const float *g;
    int64_t numel;
} update_args;

static fsdp_status k_update(const fsdp_kernel *k, const void *v)
{
    const update_args *a = v;
    float *p = fsdp_kernel_ptr(k, a->p);
    const float *g = fsdp_kernel_ptr(k, a->g);
    for (int64_t i = 0; i < a->numel; i++) p[i] = model_own_update(p[i], g != NULL ? &g[i] : NULL);
    return FSDP_OK;
}

fsdp_status write_masters(run *r, const call *c)
{
    for (int u = 0; u < MODEL_UNITS; u++) {
        const fsdp_slice *s;
        int n;
        if (!(c->mask >> u & 1) || r->unit[u] == NULL) continue;
        fsdp_unit_slices(r->unit[u], &s, &n);
        for (int i = 0; i < n; i++) FSDP_TRY(fsdp_stream_launch(fsdp_unit_storage_stream(r->unit[u]), k_update, &(update_args){ s[i].master, s[i].grad, s[i].numel }, sizeof(update_args)));
    }
    return FSDP_OK;
}

fsdp_status check_norm(run *r, const call *c, fsdp_unit_list list)
{
    double norm, weight;
    FSDP_TRY(fsdp_step_grad_norm(list, &norm, &weight));
    model_norm want = model_norm_of(r->m, c->mask);
    FSDP_FAIL_IF(memcmp(&norm, &want.norm, sizeof(norm)) != 0 || weight != want.weight, FSDP_ERR_INTERNAL, "rank %d: norm %.17g and weight %g, not %.17g and %g", r->rank, norm, weight,
                 want.norm, want.weight);
    return FSDP_OK;
}
