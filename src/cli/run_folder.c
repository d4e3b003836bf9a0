/* SPDX-License-Identifier: MIT */
#include "cli/run_folder.h"

#include "cli/train_wrap.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void path_in(const train_run *run, const char *name, char *to, size_t size)
{
    snprintf(to, size, "%s/%s", run->s.out, name);
}

static int make_folders(const char *path)
{
    char part[4200];
    if (strlen(path) >= sizeof(part)) return cli_fail("--out: the path is too long");
    for (size_t n = 1; n <= strlen(path); n++) {
        if (path[n] != '/' && path[n] != '\0') continue;
        memcpy(part, path, n);
        part[n] = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST) return cli_fail("--out: cannot make the folder %s: %s", part, strerror(errno));
    }
    struct stat sb;
    if (stat(path, &sb) != 0 || !S_ISDIR(sb.st_mode)) return cli_fail("--out: %s is there and no folder", path);
    if (access(path, W_OK | X_OK) != 0) return cli_fail("--out: cannot write to the folder %s: %s", path, strerror(errno));
    return 0;
}

/* ---- the log on resuming: lines of steps after the checkpoint were of a run that did not last ---- */

static bool is_kept(const char *line, int64_t steps)
{
    json_error_t error;
    json_t *o = json_loads(line, 0, &error);
    const json_t *step = json_object_get(o, "step");
    bool keep = json_is_integer(step) && json_integer_value(step) <= steps;
    json_decref(o);
    return keep;
}

static int cut_log(const train_run *run)
{
    char path[4300], temp[4310], *line = NULL;
    size_t room = 0;
    path_in(run, "log.jsonl", path, sizeof(path));
    snprintf(temp, sizeof(temp), "%s.tmp", path);
    FILE *in = fopen(path, "re");
    if (in == NULL) return errno == ENOENT ? 0 : cli_fail("cannot read %s: %s", path, strerror(errno));
    FILE *out = fopen(temp, "we");
    if (out == NULL) {
        fclose(in);
        return cli_fail("cannot write %s: %s", temp, strerror(errno));
    }
    while (getline(&line, &room, in) > 0)
        if (is_kept(line, run->first_step)) fputs(line, out);
    free(line);
    fclose(in);
    bool bad = ferror(out) != 0;
    if (fclose(out) != 0 || bad || rename(temp, path) != 0) return cli_fail("cannot write %s: %s", path, strerror(errno));
    return 0;
}

/* Whether the checkpoint that is resumed from is one of this folder's own. */
static bool is_own(const train_run *run)
{
    char path[4300], *own, *from, *slash;
    if (run->checkpoint[0] == '\0') return true; /* a run that had saved nothing */
    path_in(run, "checkpoints", path, sizeof(path));
    own = realpath(path, NULL);
    from = realpath(run->checkpoint, NULL);
    slash = from != NULL ? strrchr(from, '/') : NULL;
    if (slash != NULL) *slash = '\0';
    bool same = own != NULL && slash != NULL && strcmp(own, from) == 0;
    free(own);
    free(from);
    return same;
}

/* Going back: what was saved after the checkpoint is of steps that are done anew, and the next --resume latest would take it. */
static int refuse_newer(const train_run *run)
{
    char folder[4300], newest[4400];
    int64_t step;
    path_in(run, "checkpoints", folder, sizeof(folder));
    if (fsdp_checkpoint_latest(folder, newest, sizeof(newest), &step, NULL) != FSDP_OK || step <= run->first_step) return 0;
    return cli_fail("--resume %s: %s is newer: a run that goes back to step %lld would be mixed with it. Remove what is newer, or give another --out",
                    run->s.resume, newest, (long long)run->first_step);
}

int run_folder_open(const train_run *run)
{
    char path[4300];
    int code = make_folders(run->s.out);
    if (code != 0) return code;
    if (run->s.resume != NULL && is_own(run)) {
        code = refuse_newer(run);
        return code != 0 ? code : cut_log(run);
    }
    static const char *const traces[] = { "run.json", "log.jsonl", "checkpoints", "model.safetensors" };
    for (size_t i = 0; i < sizeof(traces) / sizeof(traces[0]); i++) {
        path_in(run, traces[i], path, sizeof(path));
        if (access(path, F_OK) == 0)
            return cli_fail(run->s.resume == NULL ? "--out: %s is there: the folder holds a run already. Add --resume latest to go on with it, or give another --out"
                                                  : "--out: %s is there: the folder holds another run than the one to resume. Give another --out",
                            path);
    }
    return 0;
}

/* ---- settings ---- */

static json_t *settings_json(const train_run *run)
{
    json_t *o = cli_to_json(train_options, train_option_count, &run->s);
    char *config;
    if (fsdp_gpt2_config_text(fsdp_model_gpt2_config(run->model), &config) == FSDP_OK) {
        json_object_set_new(o, "config", json_string(config));
        fsdp_free_text(config);
    }
    return o;
}

char *run_settings_text(const train_run *run)
{
    json_t *o = settings_json(run);
    char *text = json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(o);
    return text;
}

static const char *const modes[] = { "full", "grad-op", "optimizer", "none" };

fsdp_status run_folder_write_settings(const train_run *run, int64_t parameters)
{
    const train_settings *s = &run->s;
    char path[4300], temp[4310];
    fsdp_info info;
    fsdp_get_info(&info);
    json_t *o = settings_json(run);
    json_object_set_new(o, "out", json_string(s->out));
    json_object_set_new(o, "ranks", json_integer(s->ranks));
    json_object_set_new(o, "threads", json_integer(s->threads));
    json_object_set_new(o, "mode", json_string(modes[s->mode]));
    int64_t shards = s->mode == FSDP_MODE_NONE ? 1 : run->shards > 0 ? run->shards : s->ranks;
    json_object_set_new(o, "mesh", json_sprintf("%lldx%lld", (long long)(s->ranks / shards), (long long)shards));
    json_object_set_new(o, "reshard_after_forward", s->reshard_group > 0 ? json_integer(s->reshard_group) : json_null());
    json_object_set_new(o, "offload", s->offload != NULL ? json_string(s->offload) : json_null());
    json_object_set_new(o, "wrap", json_string(s->wrap));
    json_object_set_new(o, "keep_whole_below", json_integer(s->keep_whole_below));
    json_object_set_new(o, "max_unsharded_mb", s->max_unsharded_mb > 0 ? json_real(s->max_unsharded_mb) : json_null());
    json_object_set_new(o, "units", wrap_units_json(fsdp_model_module(run->model)));
    json_object_set_new(o, "prefetch", json_integer(s->prefetch));
    json_object_set_new(o, "activation_checkpointing", json_boolean(s->activation_checkpointing));
    json_object_set_new(o, "transport", json_string(s->transport == 1 ? "copy" : "shm"));
    json_object_set_new(o, "device", json_string(s->device == 1 ? "guard" : "cpu"));
    json_object_set_new(o, "stop_after", s->stop_after > 0 ? json_integer(s->stop_after) : json_null());
    json_object_set_new(o, "resumed_from", run->checkpoint[0] != '\0' ? json_string(run->checkpoint) : json_null());
    json_object_set_new(o, "micro_batches", json_integer(run->leaves));
    json_object_set_new(o, "parameters", json_integer(parameters));
    json_object_set_new(o, "train_tokens", json_integer(fsdp_dataset_tokens(run->train)));
    json_object_set_new(o, "val_tokens", run->val != NULL ? json_integer(fsdp_dataset_tokens(run->val)) : json_null());
    json_object_set_new(o, "fsdp_version", json_string(fsdp_version()));
    json_object_set_new(o, "instruction_set", json_string(info.instruction_set));
    json_object_set_new(o, "gemm", json_pack("{ss ss}", "library", info.gemm, "version", info.gemm_version));
    path_in(run, "run.json", path, sizeof(path));
    snprintf(temp, sizeof(temp), "%s.tmp", path); /* a run that is killed now leaves the old one, or a whole one */
    int failed = json_dump_file(o, temp, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
    if (failed == 0) failed = rename(temp, path);
    json_decref(o);
    FSDP_FAIL_IF(failed != 0, FSDP_ERR_IO, "cannot write %s: %s", path, strerror(errno));
    return FSDP_OK;
}

/* ---- the log ---- */

fsdp_status run_folder_open_log(const train_run *run, FILE **out)
{
    char path[4300];
    path_in(run, "log.jsonl", path, sizeof(path));
    FILE *f = fopen(path, "ae");
    FSDP_FAIL_IF(f == NULL, FSDP_ERR_IO, "cannot write %s: %s", path, strerror(errno));
    *out = f;
    return FSDP_OK;
}

/* JSON has no word for what is infinite or not a number. */
static void print_exact(FILE *f, const char *name, double x)
{
    if (isfinite(x)) fprintf(f, "\"%s\":%.17g", name, x);
    else fprintf(f, "\"%s\":null", name);
}

static void print_list(FILE *f, const char *name, const double *x, int n)
{
    fprintf(f, "\"%s\":[", name);
    for (int i = 0; i < n; i++) fprintf(f, "%s%.1f", i > 0 ? "," : "", x[i]);
    fputc(']', f);
}

/* By hand: 17 digits restore a double to the bit, and milliseconds want few. */
fsdp_status run_folder_log(const train_run *run, FILE *f, const step_record *r)
{
    const fsdp_comm_stats *c = &r->collectives;
    fprintf(f, "{\"step\":%lld,\"loss\":%.17g,", (long long)r->step, r->loss);
    print_exact(f, "grad_norm", r->grad_norm);
    fprintf(f, ",\"lr\":%.9g,\"tokens\":%lld,\"step_ms\":%.3f,\"wall_s\":%.3f,", r->lr, (long long)r->tokens, r->step_ms, r->wall_s);
    if (r->loss_scale != 0) fprintf(f, "\"loss_scale\":%.17g,\"skipped\":%s,", r->loss_scale, r->skipped ? "true" : "false");
    fprintf(f, "\"ms\":{\"forward\":%.3f,\"backward\":%.3f,\"wait\":%.3f,\"copy\":%.3f,\"reduce\":%.3f,\"optimizer\":%.3f},", r->forward_ms, r->backward_ms,
            r->wait_ms, r->copy_ms, r->reduce_ms, r->optimizer_ms);
    fprintf(f, "\"collectives\":{\"gather\":%llu,\"reduce\":%llu,\"publish\":%llu,\"exchange\":%llu},", (unsigned long long)c->gathers,
            (unsigned long long)c->reduces, (unsigned long long)c->publishes, (unsigned long long)c->exchanges);
    fprintf(f, "\"bytes\":{\"gather\":%llu,\"reduce\":%llu},", (unsigned long long)c->gather_bytes, (unsigned long long)c->reduce_bytes);
    print_list(f, "private_mib", r->private_mib, r->ranks);
    fputc(',', f);
    print_list(f, "shared_mib", r->shared_mib, r->ranks);
    if (r->evaluated) {
        fputc(',', f);
        print_exact(f, "val_loss", r->val_loss);
        fprintf(f, ",\"val_tokens\":%lld", (long long)r->val_tokens);
    }
    fputs("}\n", f);
    FSDP_FAIL_IF(fflush(f) != 0 || ferror(f), FSDP_ERR_IO, "cannot write %s/log.jsonl: %s", run->s.out, strerror(errno));
    return FSDP_OK;
}
