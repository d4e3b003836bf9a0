/* SPDX-License-Identifier: MIT
 *
 * fsdp eval: the mean loss of a model over all of some data, in windows that do not overlap: each prediction once. */
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/loaded_model.h"

#include <fsdp/fsdp.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct eval_settings {
    cli_given given;
    const char *model;
    cli_list data;
    int64_t ranks, threads, batch, seq;
} eval_settings;

#define AT(field) offsetof(eval_settings, field)
static const cli_option options[] = {
    { .name = "model", .kind = CLI_TEXT, .offset = AT(model), .value = "DIR", .help = "a folder with model.safetensors and config.json", .required = true },
    { .name = "data", .kind = CLI_LIST, .offset = AT(data), .value = "FILE", .help = "text (bytes) or token files", .required = true },
    { .name = "seq", .kind = CLI_INT, .offset = AT(seq), .value = "N", .help = "tokens of a window [the model's context]", .min = 1, .max = 1e9 },
    { .name = "batch", .kind = CLI_INT, .offset = AT(batch), .value = "WINDOWS", .fallback = "4", .help = "of a pass of one rank", .min = 1, .max = 1e6 },
    { .name = "ranks", .kind = CLI_INT, .offset = AT(ranks), .value = "N", .help = "[the CPUs allowed]", .min = 1, .max = 4096 },
    { .name = "threads", .kind = CLI_INT, .offset = AT(threads), .value = "N", .help = "of each rank [CPUs / ranks]", .min = 1, .max = 1024 },
};
enum { OPTIONS = sizeof(options) / sizeof(options[0]) };

typedef struct eval_run {
    eval_settings s;
    fsdp_model *model;
    fsdp_dataset *data;
    int64_t windows;
} eval_run;

static fsdp_status eval_pass(const eval_run *run, fsdp_comm *comm, int64_t first, int32_t *inputs, int32_t *labels, fsdp_exact_sum sums[2])
{
    const int64_t shape[] = { run->s.batch, run->s.seq };
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *loss;
    double sum, count;
    FSDP_TRY(fsdp_dataset_eval_batch(run->data, run->s.seq, first, run->s.batch, inputs, labels));
    FSDP_TRY(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
    FSDP_TRY(fsdp_tensor_from_i32(&x, tape, inputs, 2, shape));
    FSDP_TRY(fsdp_tensor_from_i32(&y, tape, labels, 2, shape));
    FSDP_TRY(fsdp_model_loss(run->model, tape, x, y, &loss));
    FSDP_TRY(fsdp_loss_read(loss, &sum, &count));
    FSDP_TRY(fsdp_tape_end(tape));
    fsdp_exact_sum_add(&sums[0], sum);
    fsdp_exact_sum_add(&sums[1], count);
    return FSDP_OK;
}

static fsdp_status eval_rank(fsdp_comm *world, void *arg)
{
    const eval_run *run = arg;
    fsdp_exact_sum sums[2] = { 0 };
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    int64_t batch = run->s.batch, batches = (run->windows + batch - 1) / batch;
    int32_t *ids = calloc((size_t)(2 * batch * run->s.seq), sizeof(*ids));
    FSDP_FAIL_IF(ids == NULL, FSDP_ERR_NOMEM, "no memory for %lld windows of %lld tokens", (long long)batch, (long long)run->s.seq);
    FSDP_TRY(fsdp_model_wrap(run->model, &(fsdp_wrap_opts){ .comm = world }));
    FSDP_TRY(fsdp_model_load(run->model, run->s.model));
    for (int64_t b = 0; b < batches; b += size) /* every rank makes as many passes; one beyond the end counts nothing */
        FSDP_TRY(eval_pass(run, world, (b + rank) * batch, ids, ids + batch * run->s.seq, sums));
    free(ids);
    FSDP_TRY(fsdp_comm_sum_exact_sums(world, sums, 2));
    double count = fsdp_exact_sum_value(&sums[1]);
    double loss = count > 0 ? fsdp_exact_sum_value(&sums[0]) / count : 0;
    FSDP_FAIL_IF(!isfinite(loss), FSDP_ERR_NONFINITE, "the loss is %g: the model's training has diverged, or its file is damaged", loss);
    if (rank == 0) printf("{\"loss\": %.17g, \"tokens\": %.0f}\n", loss, count);
    return FSDP_OK;
}

static int eval_prepare(eval_run *run)
{
    int code = cli_open_model(&run->model, run->s.model);
    if (code != 0) return code;
    const fsdp_gpt2_config *c = fsdp_model_gpt2_config(run->model);
    if (run->s.seq == 0) run->s.seq = c->n_positions;
    if (run->s.seq > c->n_positions) return cli_usage("eval: --seq %lld is more than the model's %lld positions", (long long)run->s.seq, (long long)c->n_positions);
    fsdp_dataset_opts o = { .paths = run->s.data.item, .path_count = run->s.data.count, .vocab_size = c->vocab_size, .seq = 1 };
    if (fsdp_dataset_open(&run->data, &o) != FSDP_OK || fsdp_eval_windows(fsdp_dataset_tokens(run->data), run->s.seq, &run->windows) != FSDP_OK)
        return cli_fail("--data: %s", fsdp_last_error_message());
    int64_t cpus = fsdp_cpus_allowed();
    if (run->s.ranks == 0) run->s.ranks = run->windows < cpus ? run->windows : cpus;
    return 0;
}

int cmd_eval(int argc, char **argv)
{
    static eval_run run;
    int code;
    if (!cli_parse("eval", "--model DIR --data FILE ... [OPTIONS]", options, OPTIONS, &run.s, argc, argv, &code)) return code;
    code = eval_prepare(&run);
    if (code == 0 && fsdp_launch(&(fsdp_launch_opts){ .ranks = (int)run.s.ranks, .threads = (int)run.s.threads }, eval_rank, &run) != FSDP_OK)
        code = cli_fail("%s", fsdp_last_error_message());
    fsdp_dataset_close(run.data);
    fsdp_model_destroy(run.model);
    return code;
}
