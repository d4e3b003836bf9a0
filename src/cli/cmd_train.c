/* SPDX-License-Identifier: MIT
 *
 * fsdp train. The parent checks settings and opens files; each rank then runs train_rank(), whose loop is the training step
 * in its phases: forward and backward of this rank's micro-batches, the optimizer, evaluation, checkpoint. */
#include "cli/cli.h"
#include "cli/progress.h"
#include "cli/run_folder.h"
#include "cli/train_settings.h"
#include "cli/train_wrap.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A rank's part of a run. */
typedef struct trainer {
    const train_run *run;
    const train_settings *s;
    fsdp_comm *comm;
    int rank, size;
    fsdp_device *device;
    fsdp_model *model;
    fsdp_optim *optim;
    fsdp_ema *ema; /* NULL: no --ema */
    fsdp_checkpoint *checkpoint;
    fsdp_schedule schedule;
    fsdp_scaler scaler; /* where --loss-scale is given; else its scale is 0 */
    int64_t tokens; /* that the run has seen */
    int32_t *inputs, *labels;
    FILE *log;
    double *memory; /* [2 ranks]: private, shared */
    progress progress;
    int64_t saved_step; /* of the last checkpoint; -1: none */
    int64_t saving_step; /* that is being written in the background; -1: none */
} trainer;

/* ---- set-up ---- */

/* Of slices, sums of gradients, optimizer state. */
static fsdp_device *place(const trainer *t, unsigned part)
{
    return train_offload(t->s) & part ? fsdp_device_cpu() : t->device;
}

static fsdp_status create_optimizer(trainer *t)
{
    static const fsdp_optim_group no_decay[] = { { .pattern = "*bias" }, { .pattern = "*ln_*" } };
    const train_settings *s = t->s;
    fsdp_adamw_opts o = { .lr = (float)s->lr, .beta1 = (float)s->beta1, .beta2 = (float)s->beta2, .eps = (float)s->eps, .weight_decay = (float)s->weight_decay,
                          .groups = no_decay, .group_count = 2, .state_device = place(t, TRAIN_OFFLOAD_OPTIM) };
    return fsdp_optim_create_adamw(&t->optim, fsdp_module_units(fsdp_model_module(t->model)), &o);
}

static fsdp_status register_all(trainer *t)
{
    FSDP_TRY(fsdp_checkpoint_create(&t->checkpoint, t->comm));
    FSDP_TRY(fsdp_checkpoint_add_module(t->checkpoint, "model.", fsdp_model_module(t->model)));
    FSDP_TRY(fsdp_checkpoint_add_optim(t->checkpoint, t->optim));
    if (t->ema != NULL) FSDP_TRY(fsdp_checkpoint_add_ema(t->checkpoint, t->ema));
    FSDP_TRY(fsdp_checkpoint_add_i64(t->checkpoint, "tokens", &t->tokens));
    if (t->s->loss_scale != NULL) FSDP_TRY(fsdp_checkpoint_add_scaler(t->checkpoint, &t->scaler));
    /* The schedule, the order of data and dropout are functions of settings and step: these are all the state there is. */
    char *settings = run_settings_text(t->run);
    FSDP_FAIL_IF(settings == NULL, FSDP_ERR_NOMEM, "no memory for the settings");
    fsdp_status st = fsdp_checkpoint_add_text(t->checkpoint, "settings", settings);
    free(settings);
    if (st != FSDP_OK) return st;
    json_t *units = wrap_units_json(fsdp_model_module(t->model));
    char *text = units != NULL ? json_dumps(units, JSON_COMPACT) : NULL;
    json_decref(units);
    FSDP_FAIL_IF(text == NULL, FSDP_ERR_NOMEM, "no memory for the table of units");
    st = fsdp_checkpoint_add_text(t->checkpoint, "units", text);
    free(text);
    return st;
}

static fsdp_status initial_values(trainer *t)
{
    if (t->run->checkpoint[0] != '\0') return fsdp_checkpoint_load(t->checkpoint, t->run->checkpoint);
    uint64_t seed = (uint64_t)t->s->seed + (t->s->init_seed == 1 ? (uint64_t)t->rank : 0);
    if (t->s->init != NULL) FSDP_TRY(fsdp_model_load(t->model, t->s->init));
    else FSDP_TRY(fsdp_module_init_keyed(fsdp_model_module(t->model), FSDP_INIT_NORMAL, seed));
    return t->ema != NULL ? fsdp_ema_update(t->ema, 0) : FSDP_OK; /* it begins as the parameters do */
}

static fsdp_status open_outputs(trainer *t)
{
    if (t->rank != 0) return FSDP_OK;
    FSDP_TRY(run_folder_write_settings(t->run, fsdp_module_numel(fsdp_model_module(t->model))));
    return run_folder_open_log(t->run, &t->log);
}

static fsdp_status set_up(trainer *t)
{
    const train_settings *s = t->s;
    fsdp_comm_set_phase(t->comm, "set-up");
    FSDP_TRY(fsdp_device_open(&t->device, s->device == 1 ? "guard" : "cpu"));
    fsdp_wrap_opts w = { .comm = t->comm,
                         .mode = (fsdp_mode)s->mode,
                         .shards = s->mode == FSDP_MODE_NONE ? 0 : t->run->shards,
                         .reshard_group = (int)s->reshard_group,
                         .param_dtype = (fsdp_dtype)s->param_dtype,
                         .reduce_dtype = (fsdp_dtype)s->reduce_dtype,
                         .grad_dtype = (fsdp_dtype)s->grad_dtype,
                         .exact_eval = s->param_dtype != FSDP_F32,
                         .storage_device = place(t, TRAIN_OFFLOAD_PARAMS),
                         .grad_device = place(t, TRAIN_OFFLOAD_GRADS),
                         .compute_device = t->device,
                         .prefetch = s->prefetch > 0 ? (int)s->prefetch : -1 };
    wrap_rule rule;
    (void)wrap_rule_parse(&rule, s->wrap); /* as train_prepare() has seen */
    w.policy = rule.by_block ? NULL : &rule.policy;
    w.keep_whole_below = s->keep_whole_below;
    FSDP_TRY(fsdp_comm_set_max_unsharded(t->comm, (int64_t)(s->max_unsharded_mb * (1 << 20))));
    FSDP_TRY(fsdp_model_wrap(t->model, &w));
    fsdp_model_set_recompute(t->model, s->activation_checkpointing);
    FSDP_TRY(create_optimizer(t));
    if (s->loss_scale != NULL) FSDP_TRY(train_scaler(s, &t->scaler));
    if (s->ema > 0) FSDP_TRY(fsdp_ema_create(&t->ema, fsdp_module_units(fsdp_model_module(t->model))));
    FSDP_TRY(register_all(t));
    fsdp_comm_set_phase(t->comm, "load");
    FSDP_TRY(initial_values(t));
    t->schedule = (fsdp_schedule){ .kind = (fsdp_schedule_kind)s->schedule, .lr = (float)s->lr, .min_lr = (float)s->min_lr, .warmup = s->warmup, .steps = s->steps };
    size_t ids = (size_t)(s->micro_batch * s->seq);
    t->inputs = calloc(ids, sizeof(*t->inputs));
    t->labels = calloc(ids, sizeof(*t->labels));
    t->memory = calloc(2 * (size_t)t->size, sizeof(*t->memory));
    fsdp_status st = t->inputs != NULL && t->labels != NULL && t->memory != NULL ? FSDP_OK : FSDP_ERR_NOMEM;
    if (st != FSDP_OK) st = fsdp_error_raise(st, __func__, __FILE__, __LINE__, "no memory for a micro-batch");
    if (st == FSDP_OK) st = open_outputs(t);
    return fsdp_comm_agree(t->comm, st);
}

static void tear_down(trainer *t)
{
    if (t->log != NULL) fclose(t->log);
    fsdp_checkpoint_destroy(t->checkpoint);
    fsdp_ema_destroy(t->ema);
    fsdp_optim_destroy(t->optim);
    fsdp_device_close(t->device);
    free(t->inputs);
    free(t->labels);
    free(t->memory);
}

/* ---- one micro-batch ---- */

typedef struct clocks {
    double forward, backward;
} clocks;

static fsdp_status forward_backward(trainer *t, fsdp_tape *tape, clocks *c, double *sum, double *count)
{
    const train_settings *s = t->s;
    const int64_t shape[] = { s->micro_batch, s->seq };
    fsdp_tensor *ids, *labels, *loss;
    double start = cli_clock();
    fsdp_comm_set_phase(t->comm, "forward");
    FSDP_TRY(fsdp_tensor_from_i32(&ids, tape, t->inputs, 2, shape));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, t->labels, 2, shape));
    FSDP_TRY(fsdp_model_loss(t->model, tape, ids, labels, &loss));
    double between = cli_clock();
    fsdp_comm_set_phase(t->comm, "backward");
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, count));
    c->forward += between - start;
    c->backward += cli_clock() - between;
    return FSDP_OK;
}

/* Leaf `leaf` of step `step`: the same samples on any number of ranks. */
static fsdp_status train_leaf(trainer *t, int64_t step, int64_t leaf, bool sync, clocks *c, fsdp_exact_sum sums[2])
{
    const train_settings *s = t->s;
    int64_t first = step * s->batch + leaf * s->micro_batch;
    FSDP_TRY(fsdp_dataset_batch(t->run->train, &t->run->sampler, first, s->micro_batch, t->inputs, t->labels));
    fsdp_tape *tape;
    double sum, count, start;
    fsdp_tape_opts o = { .device = t->device, .seed = (uint64_t)s->seed, .step = (uint32_t)step, .first_sample = (uint32_t)(leaf * s->micro_batch),
                         .loss_scale = (float)t->scaler.scale, .no_sync = !sync };
    FSDP_TRY(fsdp_tape_begin_with(&tape, t->comm, &o));
    fsdp_status st = forward_backward(t, tape, c, &sum, &count);
    if (st != FSDP_OK) {
        /* The error is what matters; the pass goes with the job. */
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    start = cli_clock();
    fsdp_comm_set_phase(t->comm, "reduction");
    FSDP_TRY(fsdp_tape_end(tape));
    c->backward += cli_clock() - start;
    fsdp_exact_sum_add(&sums[0], sum);
    fsdp_exact_sum_add(&sums[1], count);
    return FSDP_OK;
}

/* ---- what is written in the background ---- */

/* The checkpoint is on the disk: from here on it is there to go back to. */
static void announce_saved(trainer *t, int64_t step)
{
    t->saved_step = step;
    t->saving_step = -1;
    if (t->rank == 0) progress_say(&t->progress, "saved %s/checkpoints/step-%08lld", t->s->out, (long long)step);
}

/* Waits for what is written in the background. Not collective: all ranks are told the same. */
static fsdp_status wait_for_save(trainer *t)
{
    if (t->saving_step < 0) return FSDP_OK;
    int64_t step = t->saving_step;
    t->saving_step = -1;
    FSDP_TRY(fsdp_checkpoint_wait(t->checkpoint));
    announce_saved(t, step);
    return FSDP_OK;
}

/* ---- one step ---- */

static fsdp_status optimizer_step(trainer *t, int64_t step, step_record *r)
{
    double norm = 0;
    r->lr = (double)fsdp_schedule_lr(&t->schedule, step);
    fsdp_optim_set_lr(t->optim, (float)r->lr);
    fsdp_comm_set_phase(t->comm, "optimizer step");
    fsdp_step_opts o = { .clip = (float)t->s->clip, .clip_p = train_clip_p(t->s), .norm = &norm };
    r->loss_scale = t->scaler.scale;
    if (r->loss_scale != 0) {
        o.scaler = &t->scaler;
        o.skipped = &r->skipped;
    }
    fsdp_status st = fsdp_optim_step(t->optim, &o);
    r->grad_norm = norm;
    if (st == FSDP_ERR_NONFINITE || (st == FSDP_OK && !isfinite(r->loss))) {
        char why[512], good[128] = "there is none yet";
        snprintf(why, sizeof(why), "%.500s", st != FSDP_OK ? fsdp_last_error_message() : r->skipped ? "the gradients are not finite" : "the gradients are finite");
        (void)!wait_for_save(t); /* it may be the last good one */
        if (t->saved_step >= 0) snprintf(good, sizeof(good), "that of step %lld", (long long)t->saved_step);
        st = fsdp_error_raise(FSDP_ERR_NONFINITE, __func__, __FILE__, __LINE__,
                              "step %lld: the loss is %g: %s. The last good checkpoint: %s. A smaller --lr, more --warmup or --clip may help",
                              (long long)step + 1, r->loss, why, good);
        return fsdp_comm_agree(t->comm, st); /* all have seen it: no rank is to be named */
    }
    return st;
}

/* Resident pages, private and shared, in MiB, of every rank to every rank. */
static fsdp_status measure_memory(trainer *t)
{
    double mine[2] = { 0 };
    long size, resident, shared;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f != NULL) {
        if (fscanf(f, "%ld %ld %ld", &size, &resident, &shared) == 3) {
            double page = (double)sysconf(_SC_PAGESIZE) / (1 << 20);
            mine[0] = (double)(resident - shared) * page;
            mine[1] = (double)shared * page;
        }
        fclose(f);
    }
    double *both = calloc(2 * (size_t)t->size, sizeof(*both));
    FSDP_FAIL_IF(both == NULL, FSDP_ERR_NOMEM, "no memory for figures of memory");
    fsdp_status st = fsdp_comm_all_gather(t->comm, mine, sizeof(mine), both);
    for (int r = 0; r < t->size; r++) {
        t->memory[r] = both[2 * r];
        t->memory[t->size + r] = both[2 * r + 1];
    }
    free(both);
    return st;
}

static void subtract(fsdp_comm_stats *now, const fsdp_comm_stats *before)
{
    now->gathers -= before->gathers;
    now->reduces -= before->reduces;
    now->publishes -= before->publishes;
    now->exchanges -= before->exchanges;
    now->gather_bytes -= before->gather_bytes;
    now->reduce_bytes -= before->reduce_bytes;
    now->wait_ns -= before->wait_ns;
    now->copy_ns -= before->copy_ns;
    now->reduce_ns -= before->reduce_ns;
}

static fsdp_status train_step(trainer *t, int64_t step, step_record *r)
{
    const train_settings *s = t->s;
    fsdp_comm_stats before;
    fsdp_exact_sum sums[2] = { 0 };
    clocks c = { 0 };
    double start = cli_clock();
    fsdp_comm_get_stats(t->comm, &before);
    fsdp_comm_set_step(t->comm, step + 1);
    int64_t passes = t->run->leaves / t->size;
    bool whole = s->accumulate == 1;
    for (int64_t j = 0; j < passes; j++) /* whole: each rank has leaves that follow each other, and sends the sum with the last */
        FSDP_TRY(train_leaf(t, step, whole ? t->rank * passes + j : j * t->size + t->rank, !whole || j + 1 == passes, &c, sums));
    double between = cli_clock();
    FSDP_TRY(fsdp_comm_sum_exact_sums(t->comm, sums, 2));
    double count = fsdp_exact_sum_value(&sums[1]);
    r->step = step + 1;
    r->loss = count > 0 ? fsdp_exact_sum_value(&sums[0]) / count : 0;
    FSDP_TRY(optimizer_step(t, step, r));
    if (t->ema != NULL && !r->skipped) FSDP_TRY(fsdp_ema_update(t->ema, (float)s->ema));
    double end = cli_clock();
    t->tokens += s->batch * s->seq;
    FSDP_TRY(measure_memory(t));
    fsdp_comm_get_stats(t->comm, &r->collectives);
    subtract(&r->collectives, &before);
    r->tokens = t->tokens;
    r->step_ms = (end - start) * 1e3;
    r->wall_s = end - t->run->start_s;
    r->forward_ms = c.forward * 1e3;
    r->backward_ms = c.backward * 1e3;
    r->optimizer_ms = (end - between) * 1e3;
    r->wait_ms = (double)r->collectives.wait_ns * 1e-6;
    r->copy_ms = (double)r->collectives.copy_ns * 1e-6;
    r->reduce_ms = (double)r->collectives.reduce_ns * 1e-6;
    r->private_mib = t->memory;
    r->shared_mib = t->memory + t->size;
    r->ranks = t->size;
    return FSDP_OK;
}

/* ---- evaluation ---- */

static fsdp_status eval_batch(trainer *t, int64_t first_window, fsdp_exact_sum sums[2])
{
    const train_settings *s = t->s;
    const int64_t shape[] = { s->micro_batch, s->seq };
    fsdp_tape *tape;
    fsdp_tensor *ids, *labels, *loss;
    double sum, count;
    FSDP_TRY(fsdp_dataset_eval_batch(t->run->val, s->seq, first_window, s->micro_batch, t->inputs, t->labels));
    FSDP_TRY(fsdp_tape_begin_with(&tape, t->comm, &(fsdp_tape_opts){ .device = t->device, .eval = true }));
    FSDP_TRY(fsdp_tensor_from_i32(&ids, tape, t->inputs, 2, shape));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, t->labels, 2, shape));
    FSDP_TRY(fsdp_model_loss(t->model, tape, ids, labels, &loss));
    FSDP_TRY(fsdp_loss_read(loss, &sum, &count));
    FSDP_TRY(fsdp_tape_end(tape));
    fsdp_exact_sum_add(&sums[0], sum);
    fsdp_exact_sum_add(&sums[1], count);
    return FSDP_OK;
}

static fsdp_status evaluate(trainer *t, step_record *r)
{
    const train_settings *s = t->s;
    int64_t windows, batches;
    fsdp_exact_sum sums[2] = { 0 };
    fsdp_comm_set_phase(t->comm, "evaluation");
    if (t->ema != NULL) FSDP_TRY(fsdp_ema_swap_in(t->ema));
    FSDP_TRY(fsdp_eval_windows(fsdp_dataset_tokens(t->run->val), s->seq, &windows));
    batches = (windows + s->micro_batch - 1) / s->micro_batch;
    if (s->eval_batches > 0 && s->eval_batches < batches) batches = s->eval_batches;
    /* All ranks make the same number of passes; a batch beyond the last counts nothing. */
    for (int64_t b = 0; b < batches; b += t->size) {
        int64_t mine = b + t->rank;
        FSDP_TRY(eval_batch(t, mine < batches ? mine * s->micro_batch : windows, sums));
    }
    if (t->ema != NULL) FSDP_TRY(fsdp_ema_swap_out(t->ema));
    FSDP_TRY(fsdp_comm_sum_exact_sums(t->comm, sums, 2));
    r->evaluated = true;
    r->val_tokens = (int64_t)fsdp_exact_sum_value(&sums[1]);
    r->val_loss = r->val_tokens > 0 ? fsdp_exact_sum_value(&sums[0]) / (double)r->val_tokens : 0;
    return FSDP_OK;
}

/* ---- checkpoints and the end ---- */

static fsdp_status save(trainer *t, int64_t step, bool background)
{
    char folder[4300];
    bool beside = false;
    FSDP_TRY(wait_for_save(t));
    if (t->saved_step == step) return FSDP_OK;
    fsdp_comm_set_phase(t->comm, "save");
    snprintf(folder, sizeof(folder), "%s/checkpoints", t->s->out);
    fsdp_save_opts o = { .keep = (int)t->s->keep, .background = background, .in_background = &beside };
    if (background) o.most_bytes = (size_t)t->s->save_memory << 20;
    FSDP_TRY(fsdp_checkpoint_save_with(t->checkpoint, folder, step, &o));
    if (beside) {
        t->saving_step = step;
        return FSDP_OK;
    }
    announce_saved(t, step);
    return FSDP_OK;
}

static fsdp_status finish(trainer *t, const step_record *last, bool asked)
{
    const train_settings *s = t->s;
    FSDP_TRY(save(t, last->step, false)); /* nothing is left to do meanwhile */
    if (last->step < s->steps) {
        if (t->rank == 0)
            progress_say(&t->progress, "%s after step %lld of %lld; go on with: fsdp train --out %s --resume latest", asked ? "stopped, as asked," : "stopped",
                         (long long)last->step, (long long)s->steps, s->out);
        return FSDP_OK;
    }
    fsdp_comm_set_phase(t->comm, "writing the model");
    if (t->ema != NULL) FSDP_TRY(fsdp_ema_swap_in(t->ema)); /* nothing comes after it */
    FSDP_TRY(fsdp_model_save(t->model, s->out));
    if (t->rank == 0) progress_say(&t->progress, "wrote %s/model.safetensors and config.json%s", s->out, t->ema != NULL ? ", with the averages" : "");
    return FSDP_OK;
}

/* Rank 0 writes; all learn whether it could, and whether anybody still reads. So they do of a save in the background, whose end
 * ranks see at different times: only its failure matters to the others, and the first to see it tells. */
static fsdp_status record(trainer *t, const step_record *r)
{
    fsdp_status st = fsdp_checkpoint_is_saving(t->checkpoint) ? FSDP_OK : wait_for_save(t);
    if (t->rank == 0 && st == FSDP_OK) {
        progress_step(&t->progress, r, (double)(t->s->batch * t->s->seq) / (r->step_ms * 1e-3));
        if (r->skipped) progress_say(&t->progress, "step %lld  skipped: gradients are not finite at loss scale %g, which is now %g", (long long)r->step, r->loss_scale, t->scaler.scale);
        if (r->evaluated) progress_say(&t->progress, "step %lld  validation loss %.4f over %lld tokens", (long long)r->step, r->val_loss, (long long)r->val_tokens);
        st = run_folder_log(t->run, t->log, r);
        if (t->progress.broken && !t->progress.quiet) { /* as when it is told to stop: nobody listens any more */
            t->progress.quiet = true;
            fsdp_comm_request_stop(t->comm);
        }
    }
    return fsdp_comm_agree(t->comm, st);
}

static fsdp_status train_loop(trainer *t)
{
    const train_settings *s = t->s;
    int64_t until = s->stop_after > 0 ? s->stop_after : s->steps;
    bool stop = false;
    step_record r = { 0 };
    for (int64_t step = t->run->first_step; step < until && !stop; step++) {
        r = (step_record){ 0 };
        FSDP_TRY(train_step(t, step, &r));
        bool last = step + 1 == s->steps;
        if (t->run->val != NULL && (last || (s->eval_every > 0 && (step + 1) % s->eval_every == 0))) FSDP_TRY(evaluate(t, &r));
        FSDP_TRY(record(t, &r));
        if (s->save_every > 0 && (step + 1) % s->save_every == 0) FSDP_TRY(save(t, step + 1, s->save == TRAIN_SAVE_BACKGROUND && step + 1 < until));
        FSDP_TRY(fsdp_comm_stop_agreed(t->comm, &stop));
    }
    return finish(t, &r, stop);
}

static void say_units(trainer *t)
{
    char *text;
    if (fsdp_wrap_table(fsdp_model_module(t->model), &text) != FSDP_OK) return;
    for (char *at = text, *end; (end = strchr(at, '\n')) != NULL; at = end + 1) progress_say(&t->progress, "  %.*s", (int)(end - at), at);
    fsdp_free_text(text);
}

static void announce(trainer *t)
{
    const train_settings *s = t->s;
    fsdp_info i;
    fsdp_get_info(&i);
    progress_say(&t->progress, "%s: %lld parameters on %d rank%s of %d thread%s, %s, mode %s; %s, %s %s", s->model, (long long)fsdp_module_numel(fsdp_model_module(t->model)),
                 t->size, t->size > 1 ? "s" : "", fsdp_comm_threads(t->comm), fsdp_comm_threads(t->comm) > 1 ? "s" : "", fsdp_comm_transport(t->comm),
                 fsdp_mode_name((fsdp_mode)s->mode), i.instruction_set, i.gemm, i.gemm_version);
    progress_say(&t->progress, "%lld training tokens%s; a step is %lld sequences of %lld in %lld micro-batches", (long long)fsdp_dataset_tokens(t->run->train),
                 fsdp_dataset_is_text(t->run->train) ? " (bytes)" : "", (long long)s->batch, (long long)s->seq, (long long)t->run->leaves);
    if (s->accumulate == 1)
        progress_say(&t->progress, t->run->leaves > t->size ? "note: --accumulate whole: other numbers of ranks give other bits"
                                                            : "note: --accumulate whole has no effect: each rank has one micro-batch a step");
    if (train_frozen_numel(t->model) > 0) progress_say(&t->progress, "%lld of the parameters are frozen", (long long)train_frozen_numel(t->model));
    say_units(t);
    if (cli_is_set(train_options, train_option_count, s, "prefetch") && s->transport == 0)
        progress_say(&t->progress, "note: --prefetch has no effect on transport shm: a gather copies nothing there");
    bool reads_in_place = s->transport == 0 && s->param_dtype == FSDP_F32 && !(train_offload(s) & TRAIN_OFFLOAD_PARAMS);
    if (s->reshard_group > 0 && reads_in_place)
        progress_say(&t->progress, "note: --reshard-after-forward has no effect on transport shm: a gather copies nothing there");
    if (s->max_unsharded_mb > 0 && reads_in_place)
        progress_say(&t->progress, "note: --max-unsharded-mb has no effect on transport shm: ranks share what is whole");
    if (t->run->checkpoint[0] != '\0') progress_say(&t->progress, "resumed from %s at step %lld", t->run->checkpoint, (long long)t->run->first_step);
}

static fsdp_status train_rank(fsdp_comm *world, void *arg)
{
    const train_run *run = arg;
    trainer t = { .run = run, .s = &run->s, .comm = world, .rank = fsdp_comm_rank(world), .size = fsdp_comm_size(world), .model = run->model, .saved_step = -1, .saving_step = -1 };
    progress_init(&t.progress, run);
    fsdp_status st = set_up(&t);
    if (st == FSDP_OK) {
        if (t.rank == 0) announce(&t);
        t.progress.started_s = cli_clock();
        if (run->checkpoint[0] != '\0') t.saved_step = run->first_step;
        st = train_loop(&t);
    }
    progress_end(&t.progress);
    if (st == FSDP_OK) {
        tear_down(&t);
    } else { /* the process ends: nothing collective any more. But what is being written in the background is of a good step */
        fsdp_log_set(FSDP_LOG_WARN, NULL, NULL); /* there is one message */
        fsdp_checkpoint_destroy(t.checkpoint);
    }
    return st;
}

/* ---- the command ---- */

int cmd_train(int argc, char **argv)
{
    static train_run run; /* large, and inherited by the ranks */
    int code;
    run.start_s = cli_clock();
    if (!cli_parse("train", "--model NAME --data FILE ... --out DIR [OPTIONS]\n       fsdp train --out DIR --resume latest [OPTIONS]", train_options, train_option_count, &run.s,
                   argc, argv, &code))
        return code;
    if (run.s.quiet) fsdp_log_set(FSDP_LOG_WARN, NULL, NULL);
    code = train_prepare(&run);
    if (code == 0) code = run_folder_open(&run);
    if (code == 0) {
        fsdp_launch_opts o = { .ranks = (int)run.s.ranks, .threads = (int)run.s.threads, .transport = run.s.transport == 1 ? "copy" : run.s.ranks > 1 ? "shm" : NULL };
        if (fsdp_launch(&o, train_rank, &run) != FSDP_OK) code = cli_fail("%s", fsdp_last_error_message());
    }
    train_release(&run);
    return code;
}
