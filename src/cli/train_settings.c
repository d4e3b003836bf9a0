/* SPDX-License-Identifier: MIT */
#include "cli/train_settings.h"

#include "cli/run_folder.h"
#include "cli/train_wrap.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define AT(field) offsetof(train_settings, field)
#define BIG       9e15

const cli_option train_options[] = {
    { .name = "model", .kind = CLI_TEXT, .offset = AT(model), .value = "NAME|DIR|FILE", .help = "gpt2-3m, gpt2-10m, gpt2-124m, or a config.json or a folder with one" },
    { .name = "data", .kind = CLI_LIST, .offset = AT(data), .value = "FILE", .help = "text (bytes) or token files (llm.c's, nanoGPT's .bin); patterns in quotes" },
    { .name = "val", .kind = CLI_LIST, .offset = AT(val), .value = "FILE", .help = "data for evaluation; without it the last part of --data" },
    { .name = "val-fraction", .kind = CLI_FLOAT, .offset = AT(val_fraction), .value = "X", .fallback = "0.1", .help = "how large that part is; 0: no evaluation", .min = 0, .max = 0.9 },
    { .name = "out", .kind = CLI_TEXT, .offset = AT(out), .value = "DIR", .help = "where run.json, log.jsonl, checkpoints and the model go", .required = true, .of_the_call = true },
    { .name = "ranks", .kind = CLI_INT, .offset = AT(ranks), .value = "N", .help = "[the CPUs allowed, as far as they divide the micro-batches]", .min = 1, .max = 4096, .of_the_call = true },
    { .name = "threads", .kind = CLI_INT, .offset = AT(threads), .value = "N", .help = "of each rank [CPUs / ranks]", .min = 1, .max = 1024, .of_the_call = true },
    { .name = "steps", .kind = CLI_INT, .offset = AT(steps), .value = "N", .fallback = "1000", .help = "of the whole run, and of its schedule", .min = 1, .max = BIG },
    { .name = "stop-after", .kind = CLI_INT, .offset = AT(stop_after), .value = "N", .help = "save and leave when the run has had N steps; the schedule stays that of --steps", .min = 1, .max = BIG, .of_the_call = true },
    { .name = "batch", .kind = CLI_INT, .offset = AT(batch), .value = "SEQUENCES", .fallback = "8", .help = "a step, over all ranks", .min = 1, .max = 1e9 },
    { .name = "micro-batch", .kind = CLI_INT, .offset = AT(micro_batch), .value = "SEQUENCES", .help = "a rank and pass [batch / 8, or what comes near]; the same bits on every number of ranks that divides batch / micro-batch", .min = 1, .max = 1e9 },
    { .name = "seq", .kind = CLI_INT, .offset = AT(seq), .value = "N", .help = "tokens of a sequence; a named model that begins anew gets a context of so many [the model's context]", .min = 1, .max = 1e9 },
    { .name = "lr", .kind = CLI_FLOAT, .offset = AT(lr), .value = "X", .fallback = "0.001", .help = "the highest learning rate", .min = 0, .max = 1e38 },
    { .name = "min-lr", .kind = CLI_FLOAT, .offset = AT(min_lr), .value = "X", .help = "where the schedule ends [lr / 10]", .min = 0, .max = 1e38 },
    { .name = "warmup", .kind = CLI_INT, .offset = AT(warmup), .value = "N", .help = "steps of linear rise [steps / 20]", .min = 0, .max = BIG },
    { .name = "schedule", .kind = CLI_CHOICE, .offset = AT(schedule), .value = "cosine|linear|constant", .fallback = "cosine", .help = "after the warm-up" },
    { .name = "weight-decay", .kind = CLI_FLOAT, .offset = AT(weight_decay), .value = "X", .fallback = "0.1", .help = "of weights; biases and norms are not decayed", .min = 0, .max = 1e9 },
    { .name = "beta1", .kind = CLI_FLOAT, .offset = AT(beta1), .value = "X", .fallback = "0.9", .help = "of AdamW", .min = 1e-9, .max = 0.999999999 },
    { .name = "beta2", .kind = CLI_FLOAT, .offset = AT(beta2), .value = "X", .fallback = "0.95", .help = "of AdamW", .min = 1e-9, .max = 0.999999999 },
    { .name = "eps", .kind = CLI_FLOAT, .offset = AT(eps), .value = "X", .fallback = "1e-8", .help = "of AdamW", .min = 1e-30, .max = 1 },
    { .name = "clip", .kind = CLI_FLOAT, .offset = AT(clip), .value = "X", .fallback = "1", .help = "largest gradient norm; 0: no clipping", .min = 0, .max = 1e30 },
    { .name = "clip-norm-type", .kind = CLI_TEXT, .offset = AT(clip_norm_type), .value = "P|inf", .fallback = "2", .help = "which norm is clipped and logged: p of the p-norm" },
    { .name = "loss-scale", .kind = CLI_TEXT, .offset = AT(loss_scale), .value = "dynamic[:N]|N", .help = "what the backward begins with; dynamic: N, or 65536, half of it after each step whose gradients are not finite (which is skipped), twice after 2000 good ones [1]" },
    { .name = "ema", .kind = CLI_FLOAT, .offset = AT(ema), .value = "DECAY", .help = "evaluate, and write at the end, a moving average of the parameters, of which DECAY stays in each step (0.999) [no average]", .min = 1e-6, .max = 0.999999 },
    { .name = "dropout", .kind = CLI_FLOAT, .offset = AT(dropout), .value = "X", .help = "[what the model's config says; 0 for the named models]", .min = 0, .max = 0.99 },
    { .name = "seed", .kind = CLI_INT, .offset = AT(seed), .value = "N", .fallback = "1", .help = "of initial values, the order of data, and dropout", .min = 0, .max = BIG },
    { .name = "eval-every", .kind = CLI_INT, .offset = AT(eval_every), .value = "N", .help = "steps between evaluations [only at the end]", .min = 1, .max = BIG },
    { .name = "eval-batches", .kind = CLI_INT, .offset = AT(eval_batches), .value = "N", .help = "micro-batches of an evaluation [all]", .min = 1, .max = BIG },
    { .name = "save-every", .kind = CLI_INT, .offset = AT(save_every), .value = "N", .help = "steps between checkpoints [only at the end]", .min = 1, .max = BIG },
    { .name = "keep", .kind = CLI_INT, .offset = AT(keep), .value = "N", .fallback = "3", .help = "how many checkpoints stay", .min = 1, .max = 1e6 },
    { .name = "save", .kind = CLI_CHOICE, .offset = AT(save), .value = "background|foreground", .fallback = "background", .help = "whether training goes on while a checkpoint is written; the files are the same", .of_the_call = true },
    { .name = "save-memory", .kind = CLI_INT, .offset = AT(save_memory), .value = "MIB", .help = "most memory a rank may take for what it saves in the background; where it needs more, it saves in the foreground, and says so [any]", .min = 1, .max = 1e9, .of_the_call = true },
    { .name = "log-every", .kind = CLI_INT, .offset = AT(log_every), .value = "N", .fallback = "10", .help = "steps between printed lines, where no terminal shows progress", .min = 1, .max = BIG, .of_the_call = true },
    { .name = "resume", .kind = CLI_TEXT, .offset = AT(resume), .value = "latest|DIR", .help = "go on from a checkpoint; its settings hold but for those given here", .of_the_call = true },
    { .name = "init", .kind = CLI_TEXT, .offset = AT(init), .value = "DIR|FILE", .help = "begin with the weights of a model in Hugging Face's format" },
    { .name = "accumulate", .kind = CLI_CHOICE, .offset = AT(accumulate), .value = "sharded|whole", .fallback = "sharded", .help = "gradients of a step's micro-batches: reduced each, or whole on each rank until its last (fewer reductions, more memory, other bits on other numbers of ranks)" },
    { .name = "freeze", .kind = CLI_LIST, .offset = AT(freeze), .value = "PATTERN", .help = "parameters that stay as they are, by name, as 'h.0.*' ('none', on --resume: train all again)" },
    { .name = "init-seed", .kind = CLI_CHOICE, .offset = AT(init_seed), .value = "keyed|per-rank", .fallback = "keyed", .help = "initial values by (seed, name, element), the same on any number of ranks; or rank r's slices with seed + r" },
    { .name = "activation-checkpointing", .kind = CLI_FLAG, .offset = AT(activation_checkpointing), .help = "keep of each block its input alone, and compute the rest again in the backward: less memory, a forward more", .of_the_call = true },
    { .name = "mode", .kind = CLI_CHOICE, .offset = AT(mode), .value = "full|grad-op|optimizer|none", .fallback = "full", .help = "what is sharded: all (ZeRO-3), gradients and optimizer (2), optimizer (1), nothing", .of_the_call = true },
    { .name = "mesh", .kind = CLI_TEXT, .offset = AT(mesh), .value = "RxS", .help = "hybrid: R replicas of what --mode shards, each on S ranks [1 x ranks]", .of_the_call = true },
    { .name = "reshard-after-forward", .kind = CLI_INT, .offset = AT(reshard_group), .value = "N", .help = "mode full: until the backward, units stay spread over groups of N ranks, not over all of them", .min = 1, .max = 4096, .of_the_call = true },
    { .name = "param-dtype", .kind = CLI_CHOICE, .offset = AT(param_dtype), .value = "f32|bf16|f16", .fallback = "f32", .help = "what parameters are rounded to before they are gathered; masters stay f32, and evaluations and files see these" },
    { .name = "reduce-dtype", .kind = CLI_CHOICE, .offset = AT(reduce_dtype), .value = "f32|bf16|f16", .fallback = "f32", .help = "what the gradient of a micro-batch is rounded to before it is sent" },
    { .name = "grad-dtype", .kind = CLI_CHOICE, .offset = AT(grad_dtype), .value = "f32|bf16|f16", .fallback = "f32", .help = "what sums of gradients are kept in until the step, rounded after each micro-batch: less memory, if a step has several; in the step they are f32" },
    { .name = "offload", .kind = CLI_TEXT, .offset = AT(offload), .value = "params,grads,optim", .help = "which of them to keep in the host's memory, where --device is not the host: slices of parameters, sums of gradients, optimizer state", .of_the_call = true },
    { .name = "wrap", .kind = CLI_TEXT, .offset = AT(wrap), .fallback = "block", .value = "block|size:N|name:PATTERN|none", .help = "which parts of the model are gathered by themselves: blocks, parts of N parameters and more, those of a name ('h.*.mlp'), or all at once", .of_the_call = true },
    { .name = "keep-whole-below", .kind = CLI_INT, .offset = AT(keep_whole_below), .value = "BYTES", .help = "parameters that are smaller are not sharded: fewer messages, for a little memory", .min = 0, .max = BIG, .of_the_call = true },
    { .name = "max-unsharded-mb", .kind = CLI_FLOAT, .offset = AT(max_unsharded_mb), .value = "X", .help = "MiB of whole parameters that a rank may hold at a time, in buffers of its own [any]", .min = 1e-6, .max = 1e9, .of_the_call = true },
    { .name = "prefetch", .kind = CLI_INT, .offset = AT(prefetch), .value = "N", .fallback = "1", .help = "units gathered ahead", .min = 0, .max = 64, .of_the_call = true },
    { .name = "transport", .kind = CLI_CHOICE, .offset = AT(transport), .value = "shm|copy", .fallback = "shm", .help = "shared memory, or (for tests) copies as over a network", .of_the_call = true },
    { .name = "device", .kind = CLI_CHOICE, .offset = AT(device), .value = "cpu|guard", .fallback = "cpu", .help = "guard: a test device that runs late and that the host may not touch", .of_the_call = true },
    { .name = "no-progress", .kind = CLI_FLAG, .offset = AT(no_progress), .help = "plain lines also on a terminal", .of_the_call = true },
    { .name = "quiet", .kind = CLI_FLAG, .offset = AT(quiet), .help = "print nothing but errors", .of_the_call = true },
};
const int train_option_count = sizeof(train_options) / sizeof(train_options[0]);

double cli_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double train_clip_p(const train_settings *s)
{
    return s->clip_norm_type != NULL ? strtod(s->clip_norm_type, NULL) : 2; /* a run of an older version has none */
}

fsdp_status train_scaler(const train_settings *s, fsdp_scaler *scaler)
{
    const char *text = s->loss_scale;
    if (strcmp(text, "dynamic") == 0) return fsdp_scaler_init(scaler, NULL);
    bool dynamic = strncmp(text, "dynamic:", 8) == 0;
    if (dynamic) text += 8;
    char *end;
    double n = strtod(text, &end);
    FSDP_FAIL_IF(end == text || *end != '\0' || !(n >= 0x1p-126 && n <= 0x1p126), FSDP_ERR_INVALID,
                 "--loss-scale %s: must be dynamic, dynamic:N, or N, a number greater than 0 (a power of two changes no bits)", s->loss_scale);
    return fsdp_scaler_init(scaler, &(fsdp_scaler_opts){ .scale = n, .min = dynamic ? 0 : n, .max = dynamic ? 0 : n });
}

static bool is_set(const train_run *run, const char *name)
{
    return cli_is_set(train_options, train_option_count, &run->s, name);
}

/* ---- resuming: the checkpoint's settings are the defaults ---- */

static void note_difference(const char *name, const char *was, const char *is, void *arg)
{
    const train_run *run = arg;
    if (!run->s.quiet) printf("resume: --%s was %s, and is now %s: the command line wins\n", name, was, is);
}

/* Also of checkpoints that are not complete. */
static bool has_checkpoints(const char *folder)
{
    bool any = false;
    DIR *d = opendir(folder);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) any |= strncmp(e->d_name, "step-", 5) == 0;
    if (d != NULL) closedir(d);
    return any;
}

static int find_checkpoint(train_run *run)
{
    char folder[4200], manifest[4500];
    struct stat sb;
    snprintf(folder, sizeof(folder), "%s/checkpoints", run->s.out);
    if (strcmp(run->s.resume, "latest") != 0) {
        snprintf(run->checkpoint, sizeof(run->checkpoint), "%s", run->s.resume);
        snprintf(manifest, sizeof(manifest), "%s/manifest.json", run->checkpoint);
        if (stat(run->checkpoint, &sb) != 0) return cli_fail("--resume: there is no %s", run->checkpoint);
        if (stat(manifest, &sb) != 0)
            return cli_fail("--resume: %s is no checkpoint, or not a complete one: it has no manifest.json (a run's checkpoints are in its folder checkpoints; \"latest\" is the newest)",
                            run->checkpoint);
        return 0;
    }
    int skipped = 0;
    if (!has_checkpoints(folder)) {
        /* It ended before it saved anything: the run is begun again, so that a script may always say --resume latest. */
        snprintf(manifest, sizeof(manifest), "%s/run.json", run->s.out);
        if (stat(manifest, &sb) != 0) return cli_fail("--resume latest: there is no run in %s (no %s, no checkpoints): begin one without --resume", run->s.out, manifest);
        return 0;
    }
    if (fsdp_checkpoint_latest(folder, run->checkpoint, sizeof(run->checkpoint), NULL, &skipped) != FSDP_OK)
        return cli_fail("--resume latest: %s", fsdp_last_error_message());
    if (skipped > 0 && !run->s.quiet) printf("resume: skipped %d newer checkpoint%s that %s not complete\n", skipped, skipped > 1 ? "s" : "", skipped > 1 ? "are" : "is");
    return 0;
}

static int take_saved_settings(train_run *run)
{
    fsdp_checkpoint_reader *r;
    json_error_t error;
    int code = find_checkpoint(run);
    if (code != 0) return code;
    if (run->checkpoint[0] == '\0') {
        char path[4300];
        snprintf(path, sizeof(path), "%s/run.json", run->s.out);
        run->saved = json_load_file(path, 0, &error);
        if (run->saved == NULL) return cli_fail("--resume latest: nothing was saved, and %s cannot be read (line %d: %s): remove %s and begin anew", path, error.line, error.text, run->s.out);
        if (!run->s.quiet) printf("resume: nothing was saved in %s yet: the run begins again\n", run->s.out);
    } else {
        if (fsdp_checkpoint_reader_open(&r, run->checkpoint) != FSDP_OK) return cli_fail("%s", fsdp_last_error_message());
        const char *text = fsdp_checkpoint_reader_text(r, "settings");
        run->saved = text != NULL ? json_loads(text, 0, &error) : NULL;
        run->first_step = fsdp_checkpoint_reader_step(r);
        fsdp_checkpoint_reader_close(r);
        if (run->saved == NULL) return cli_fail("%s is no checkpoint of fsdp train: it has no settings", run->checkpoint);
    }
    static const char *const fixed[] = { "model", "init", "seq", "loss-scale" };
    for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++) {
        const json_t *was = json_object_get(run->saved, i == 3 ? "loss_scale" : fixed[i]);
        if (!is_set(run, fixed[i]) || (was == NULL && i < 3)) continue;
        const char *is = i == 0 ? run->s.model : i == 1 ? run->s.init : i == 3 ? run->s.loss_scale : NULL;
        bool same = i == 2 ? json_is_integer(was) && json_integer_value(was) == run->s.seq : json_is_string(was) && strcmp(json_string_value(was), is) == 0;
        if (!same) return cli_usage("train: --%s cannot change on --resume: leave it out, or begin a new run in another --out", fixed[i]);
    }
    if (is_set(run, "ema") && !(json_number_value(json_object_get(run->saved, "ema")) > 0))
        return cli_usage("train: --ema on --resume: the run has no average to go on with: leave it out, or begin a new run in another --out");
    cli_from_json(train_options, train_option_count, &run->s, run->saved, note_difference, run);
    return 0;
}

/* ---- what does not go together ---- */

static int refuse_nonsense(const train_run *run)
{
    const train_settings *s = &run->s;
    bool resumes = s->resume != NULL;
    const char *bad = cli_not_utf8(train_options, train_option_count, s);
    if (bad != NULL) return cli_usage("train: --%s: a name that is not UTF-8 cannot be kept with the run: rename it", bad);
    if (!resumes && s->model == NULL) return cli_usage("train: --model is required (fsdp train --help)");
    if (!resumes && s->data.count == 0) return cli_usage("train: --data is required (fsdp train --help)");
    if (resumes && is_set(run, "init")) return cli_usage("train: --init and --resume both say where the weights come from: give one");
    if (resumes && is_set(run, "init-seed")) return cli_usage("train: --init-seed says how weights begin, but --resume goes on with weights that there are: leave it out");
    if (s->init != NULL && is_set(run, "init-seed")) return cli_usage("train: --init-seed and --init both say how weights begin: give one");
    if (s->val.count > 0 && is_set(run, "val-fraction")) return cli_usage("train: --val-fraction cuts the evaluation data from --data, but --val gives it: leave one out");
    if (s->stop_after > s->steps) return cli_usage("train: --stop-after %lld is more than --steps %lld", (long long)s->stop_after, (long long)s->steps);
    if (s->schedule == FSDP_SCHEDULE_CONSTANT && is_set(run, "min-lr")) return cli_usage("train: --min-lr has no effect with --schedule constant: leave it out");
    if (is_set(run, "min-lr") && s->min_lr > s->lr) return cli_usage("train: --min-lr %g is more than --lr %g", s->min_lr, s->lr);
    if (is_set(run, "warmup") && s->warmup > s->steps) return cli_usage("train: --warmup %lld is more than --steps %lld", (long long)s->warmup, (long long)s->steps);
    char *end = NULL;
    double p = s->clip_norm_type != NULL ? strtod(s->clip_norm_type, &end) : 2;
    if (!(p > 0) || (end != NULL && *end != '\0')) return cli_usage("train: --clip-norm-type %s: must be a number greater than 0, or inf", s->clip_norm_type);
    fsdp_scaler scaler;
    if (s->loss_scale != NULL && train_scaler(s, &scaler) != FSDP_OK) return cli_usage("train: %s", fsdp_last_error_message());
    if (s->save == TRAIN_SAVE_FOREGROUND && is_set(run, "save-memory")) return cli_usage("train: --save-memory is of saves in the background: --save foreground takes none");
    if (s->quiet && s->no_progress) return cli_usage("train: --quiet prints no progress: leave --no-progress out");
    if (s->quiet && is_set(run, "log-every")) return cli_usage("train: --quiet prints no lines: leave --log-every out");
    wrap_rule rule;
    int code = wrap_rule_parse(&rule, s->wrap);
    if (code != 0) return code;
    if (s->max_unsharded_mb > 0 && s->mode == FSDP_MODE_NONE && s->param_dtype == FSDP_F32 && !(train_offload(s) & TRAIN_OFFLOAD_PARAMS)) return cli_usage("train: --max-unsharded-mb has no effect with --mode none: each rank keeps all");
    if (s->keep_whole_below > 0 && s->mode != FSDP_MODE_FULL && s->mode != FSDP_MODE_GRAD_OP)
        return cli_usage("train: --keep-whole-below has no effect with --mode %s: all is kept whole", fsdp_mode_name((fsdp_mode)s->mode));
    bool evaluates = s->val.count > 0 || s->val_fraction > 0;
    if (!evaluates && (is_set(run, "eval-every") || is_set(run, "eval-batches"))) return cli_usage("train: --eval-every and --eval-batches have no effect: --val-fraction 0 leaves no data to evaluate on");
    return 0;
}

/* ---- what was left open ---- */

static int64_t largest_divisor(int64_t of, int64_t most)
{
    int64_t d = most < of ? most : of;
    while (d > 1 && of % d != 0) d--;
    return d > 0 ? d : 1;
}

/* --mesh RxS says how many ranks there are, where --ranks does not. */
static int read_mesh(train_run *run)
{
    train_settings *s = &run->s;
    if (s->mesh == NULL) return 0;
    long long r = 0, n = 0;
    char more;
    if (sscanf(s->mesh, "%lldx%lld%c", &r, &n, &more) != 2 || r < 1 || n < 1 || r > 4096 || n > 4096)
        return cli_usage("train: --mesh %s: give it as replicas x shards, such as 2x4", s->mesh);
    if (s->mode == FSDP_MODE_NONE && n > 1) return cli_usage("train: --mesh %s asks for %lld shards, but --mode none shards nothing: leave one out", s->mesh, n);
    if (s->ranks == 0) s->ranks = r * n;
    if (s->ranks != r * n) return cli_usage("train: --mesh %s is for %lld x %lld = %lld ranks, and --ranks is %lld", s->mesh, r, n, r * n, (long long)s->ranks);
    run->shards = (int)n;
    return 0;
}

static int check_group(const train_run *run)
{
    const train_settings *s = &run->s;
    long long n = s->reshard_group, shards = run->shards > 0 ? run->shards : s->ranks;
    if (n == 0) return 0;
    if (s->mode != FSDP_MODE_FULL) return cli_usage("train: --reshard-after-forward %lld is for --mode full: the others reshard nothing after a forward", n);
    if (shards % n != 0) return cli_usage("train: --reshard-after-forward %lld: %lld ranks share a copy, and groups of %lld do not divide them", n, shards, n);
    return 0;
}

/* What --offload lists. *wrong: the first part that is none of them, of *length bytes; NULL: there is none. */
static unsigned offload_parts(const char *list, const char **wrong, int *length)
{
    static const char *const parts[] = { "params", "grads", "optim" };
    unsigned named = 0;
    *wrong = NULL;
    for (const char *part = list; part != NULL;) {
        size_t n = strcspn(part, ",");
        unsigned k = 0;
        while (k < 3 && (strlen(parts[k]) != n || strncmp(part, parts[k], n) != 0)) k++;
        if (k < 3) named |= 1u << k;
        else if (*wrong == NULL) *wrong = part, *length = (int)n;
        part = part[n] == ',' ? part + n + 1 : NULL;
    }
    return named;
}

unsigned train_offload(const train_settings *s)
{
    const char *wrong;
    int length;
    return offload_parts(s->offload, &wrong, &length);
}

static int check_offload(const train_settings *s)
{
    const char *wrong;
    int length = 0;
    if (s->offload == NULL) return 0;
    (void)offload_parts(s->offload, &wrong, &length);
    if (wrong != NULL) return cli_usage("train: --offload %s: \"%.*s\" is none of params, grads, optim", s->offload, length, wrong);
    if (s->device == 0) return cli_usage("train: --offload has no effect with --device cpu, which computes in the host's memory: leave it out");
    return 0;
}

static int fill_in(train_run *run)
{
    train_settings *s = &run->s;
    /* Not by the number of ranks: a run has the same bits on 1, 2, 4 and 8 of them without being asked. */
    if (s->micro_batch == 0) s->micro_batch = s->batch / largest_divisor(s->batch, 8);
    if (s->batch % s->micro_batch != 0) return cli_usage("train: --batch %lld is no multiple of --micro-batch %lld", (long long)s->batch, (long long)s->micro_batch);
    run->leaves = s->batch / s->micro_batch;
    int64_t cpus = fsdp_cpus_allowed();
    int code = read_mesh(run);
    if (code == 0) code = check_offload(s);
    if (code != 0) return code;
    if (s->ranks == 0) s->ranks = largest_divisor(run->leaves, s->threads > 0 ? (cpus / s->threads > 0 ? cpus / s->threads : 1) : cpus);
    if (run->leaves % s->ranks != 0)
        return cli_usage("train: a step has %lld micro-batches (--batch %lld / --micro-batch %lld), which %lld ranks do not divide: choose --ranks or --micro-batch so that they do",
                         (long long)run->leaves, (long long)s->batch, (long long)s->micro_batch, (long long)s->ranks);
    code = check_group(run);
    if (code != 0) return code;
    if (s->threads == 0) s->threads = cpus / s->ranks > 0 ? cpus / s->ranks : 1;
    if (!is_set(run, "warmup") && run->saved == NULL) s->warmup = s->steps / 20;
    if (!is_set(run, "min-lr") && (run->saved == NULL || is_set(run, "lr"))) s->min_lr = s->schedule == FSDP_SCHEDULE_CONSTANT ? s->lr : s->lr / 10;
    return 0;
}

/* ---- model and data ---- */

static int open_data(train_run *run)
{
    train_settings *s = &run->s;
    const fsdp_gpt2_config *c = fsdp_model_gpt2_config(run->model);
    fsdp_dataset_opts o = { .paths = s->data.item, .path_count = s->data.count, .vocab_size = c->vocab_size, .seq = s->seq };
    if (s->val.count == 0 && s->val_fraction > 0) {
        o.val_fraction = s->val_fraction;
        o.part = FSDP_DATASET_TRAIN;
    }
    if (fsdp_dataset_open(&run->train, &o) != FSDP_OK) return cli_fail("--data: %s", fsdp_last_error_message());
    if (fsdp_sampler_init(&run->sampler, fsdp_dataset_tokens(run->train), s->seq, (uint64_t)s->seed) != FSDP_OK) return cli_fail("--data: %s", fsdp_last_error_message());
    o.seq = 1;
    if (s->val.count > 0) {
        o = (fsdp_dataset_opts){ .paths = s->val.item, .path_count = s->val.count, .vocab_size = c->vocab_size, .seq = 1 };
    } else if (s->val_fraction > 0) {
        o.part = FSDP_DATASET_VAL;
    } else {
        return 0;
    }
    if (fsdp_dataset_open(&run->val, &o) != FSDP_OK) return cli_fail("%s: %s", s->val.count > 0 ? "--val" : "the evaluation part of --data", fsdp_last_error_message());
    return 0;
}

/* Positions that no sequence has are never trained: a model that begins anew has none. A config.json is taken at its word. */
static fsdp_status create_model(train_run *run)
{
    const train_settings *s = &run->s;
    fsdp_gpt2_config c;
    if (s->init != NULL || s->seq == 0 || fsdp_gpt2_preset(&c, s->model) != FSDP_OK) return fsdp_model_create(&run->model, s->model);
    c.n_positions = s->seq;
    return fsdp_model_create_gpt2(&run->model, &c);
}

static int open_model(train_run *run)
{
    train_settings *s = &run->s;
    if (run->saved != NULL) {
        /* The config travels in the checkpoint: the file that --model named may be gone. */
        const char *text = json_string_value(json_object_get(run->saved, "config"));
        fsdp_gpt2_config c;
        if (text == NULL || fsdp_gpt2_config_parse(&c, text, run->checkpoint) != FSDP_OK || fsdp_model_create_gpt2(&run->model, &c) != FSDP_OK)
            return cli_fail("%s: the model's config: %s", run->checkpoint, text == NULL ? "is missing" : fsdp_last_error_message());
    } else if (create_model(run) != FSDP_OK) {
        return cli_fail("--model: %s", fsdp_last_error_message());
    }
    if (is_set(run, "dropout") && fsdp_model_set_dropout(run->model, (float)s->dropout) != FSDP_OK) return cli_fail("--dropout: %s", fsdp_last_error_message());
    s->dropout = (double)fsdp_model_gpt2_config(run->model)->resid_pdrop;
    int code = train_freeze(run);
    if (code != 0) return code;
    wrap_rule rule;
    (void)wrap_rule_parse(&rule, s->wrap);
    if (!rule.by_block && fsdp_wrap_policy_check(fsdp_model_module(run->model), &rule.policy) != FSDP_OK) return cli_usage("train: --wrap: %s", fsdp_last_error_message());
    int64_t context = fsdp_model_gpt2_config(run->model)->n_positions;
    if (s->seq == 0) s->seq = context;
    if (s->seq > context) return cli_usage("train: --seq %lld is more than the model's %lld positions", (long long)s->seq, (long long)context);
    return 0;
}

int train_prepare(train_run *run)
{
    int code = 0;
    if (run->s.resume != NULL) code = take_saved_settings(run);
    if (code == 0) code = refuse_nonsense(run);
    if (code == 0) code = fill_in(run);
    if (code == 0) code = open_model(run);
    if (code == 0) code = open_data(run);
    if (code != 0) return code;
    if (run->first_step >= run->s.steps)
        return cli_fail("the run is finished: %s has all %lld steps; give a larger --steps to go on", run->checkpoint, (long long)run->s.steps);
    if (run->s.stop_after > 0 && run->first_step >= run->s.stop_after)
        return cli_fail("%s is at step %lld already: --stop-after %lld leaves nothing to do", run->checkpoint, (long long)run->first_step, (long long)run->s.stop_after);
    return 0;
}

void train_release(train_run *run)
{
    fsdp_dataset_close(run->train);
    fsdp_dataset_close(run->val);
    fsdp_model_destroy(run->model);
    json_decref(run->saved);
}
