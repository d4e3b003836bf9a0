/* SPDX-License-Identifier: MIT
 *
 * The settings of a training run, and what is derived from them before ranks are started. */
#ifndef FSDP_CLI_TRAIN_SETTINGS_H
#define FSDP_CLI_TRAIN_SETTINGS_H

#include "cli/args.h"

#include <fsdp/fsdp.h>

enum { TRAIN_SAVE_BACKGROUND, TRAIN_SAVE_FOREGROUND }; /* as --save lists them */
enum { TRAIN_OFFLOAD_PARAMS = 1, TRAIN_OFFLOAD_GRADS = 2, TRAIN_OFFLOAD_OPTIM = 4 }; /* bits, as --offload lists them */

typedef struct train_settings {
    cli_given given;
    const char *model, *out, *resume, *init, *mesh, *offload, *clip_norm_type, *loss_scale, *wrap;
    cli_list data, val, freeze;
    double val_fraction;
    int64_t ranks, threads, steps, stop_after, batch, micro_batch, seq;
    double lr, min_lr, weight_decay, beta1, beta2, eps, clip, dropout, ema, max_unsharded_mb;
    int64_t warmup, seed, eval_every, eval_batches, save_every, keep, log_every, prefetch, reshard_group, keep_whole_below, save_memory;
    int schedule, accumulate, mode, transport, device, param_dtype, reduce_dtype, grad_dtype, save;
    int init_seed; /* 1: per-rank */
    bool no_progress, quiet, activation_checkpointing;
} train_settings;

extern const cli_option train_options[];
extern const int train_option_count;

/* A run, ready for its ranks: opened before they are forked, so that what is wrong is said once, and files are scanned once. */
typedef struct train_run {
    train_settings s;
    fsdp_model *model;
    fsdp_dataset *train, *val; /* val NULL: no evaluation */
    fsdp_sampler sampler;
    int shards;                /* of --mesh; 0: all ranks */
    int64_t leaves;            /* micro-batches of a step, over all ranks */
    char checkpoint[4400];     /* to resume from; "": none */
    int64_t first_step;        /* steps done before */
    json_t *saved;             /* settings of the checkpoint; borrowed strings are in it */
    double start_s;            /* clock at launch */
} train_run;

/* Checks settings against each other, fills in what was left open, opens model and data. Prints what is wrong and returns
 * the exit status; 0: all well. */
int train_prepare(train_run *run);
/* Freezes what --freeze says, in a model that is not wrapped yet. 0, or the exit status. */
int train_freeze(train_run *run);
int64_t train_frozen_numel(fsdp_model *model);

void train_release(train_run *run);

double train_clip_p(const train_settings *s); /* of --clip-norm-type */
unsigned train_offload(const train_settings *s); /* of --offload */
/* Of --loss-scale, which is given: one that begins where it says. FSDP_ERR_INVALID. */
fsdp_status train_scaler(const train_settings *s, fsdp_scaler *scaler);

double cli_clock(void); /* seconds */

#endif
