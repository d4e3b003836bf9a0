/* SPDX-License-Identifier: MIT
 *
 * fsdp generate: continues a prompt. Models of bytes take and print text; others take and print ids, since this version has no
 * tokenizer. */
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/loaded_model.h"

#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct generate_settings {
    cli_given given;
    const char *model, *prompt, *prompt_ids;
    int64_t tokens, top_k, seed, threads;
    double temperature;
} generate_settings;

#define AT(field) offsetof(generate_settings, field)
static const cli_option options[] = {
    { .name = "model", .kind = CLI_TEXT, .offset = AT(model), .value = "DIR", .help = "a folder with model.safetensors and config.json", .required = true },
    { .name = "prompt", .kind = CLI_TEXT, .offset = AT(prompt), .value = "TEXT", .help = "what to continue, for a model of bytes [a new line]" },
    { .name = "prompt-ids", .kind = CLI_TEXT, .offset = AT(prompt_ids), .value = "N,N,...", .help = "the same as token ids, for any model" },
    { .name = "tokens", .kind = CLI_INT, .offset = AT(tokens), .value = "N", .fallback = "200", .help = "how many to make", .min = 1, .max = 1e9 },
    { .name = "temperature", .kind = CLI_FLOAT, .offset = AT(temperature), .value = "X", .fallback = "0.8", .help = "0: always the likeliest", .min = 0, .max = 1000 },
    { .name = "top-k", .kind = CLI_INT, .offset = AT(top_k), .value = "N", .help = "choose among the N likeliest [all]", .min = 1, .max = 1e9 },
    { .name = "seed", .kind = CLI_INT, .offset = AT(seed), .value = "N", .fallback = "1", .help = "of the choice", .min = 0, .max = 9e15 },
    { .name = "threads", .kind = CLI_INT, .offset = AT(threads), .value = "N", .help = "[the CPUs allowed]", .min = 1, .max = 1024 },
};
enum { OPTIONS = sizeof(options) / sizeof(options[0]) };

typedef struct generate_run {
    generate_settings s;
    fsdp_model *model;
    int32_t *prompt;
    int64_t count;
    bool bytes;
} generate_run;

static fsdp_status put_token(int32_t token, void *arg)
{
    const generate_run *run = arg;
    if (run->bytes) putchar(token);
    else printf(" %d", token);
    FSDP_FAIL_IF(fflush(stdout) != 0, FSDP_ERR_IO, "nobody reads the output");
    return FSDP_OK;
}

static fsdp_status generate_rank(fsdp_comm *world, void *arg)
{
    generate_run *run = arg;
    const generate_settings *s = &run->s;
    FSDP_TRY(fsdp_model_wrap(run->model, &(fsdp_wrap_opts){ .comm = world, .mode = FSDP_MODE_OPTIMIZER })); /* whole from now on */
    FSDP_TRY(fsdp_model_load(run->model, s->model));
    if (run->bytes) fwrite(s->prompt != NULL ? s->prompt : "\n", 1, (size_t)run->count, stdout);
    fsdp_generate_opts o = { .tokens = s->tokens, .temperature = (float)s->temperature, .top_k = (int)s->top_k, .seed = (uint64_t)s->seed };
    FSDP_TRY(fsdp_model_generate(run->model, run->prompt, run->count, &o, put_token, run));
    putchar('\n');
    return FSDP_OK;
}

static int text_prompt(generate_run *run)
{
    const char *text = run->s.prompt != NULL ? run->s.prompt : "\n";
    run->count = (int64_t)strlen(text);
    if (run->count == 0) return cli_usage("generate: the prompt is empty: it needs at least one character");
    run->prompt = calloc((size_t)run->count, sizeof(*run->prompt));
    for (int64_t i = 0; run->prompt != NULL && i < run->count; i++) run->prompt[i] = (unsigned char)text[i];
    return run->prompt != NULL ? 0 : cli_fail("no memory for the prompt");
}

static int id_prompt(generate_run *run, int64_t vocab)
{
    size_t room = strlen(run->s.prompt_ids) / 2 + 1;
    run->prompt = calloc(room, sizeof(*run->prompt));
    if (run->prompt == NULL) return cli_fail("no memory for the prompt");
    for (const char *p = run->s.prompt_ids; *p != '\0';) {
        char *end;
        long long id = strtoll(p, &end, 10);
        if (end == p || (*end != ',' && *end != '\0')) return cli_usage("generate: --prompt-ids: \"%.40s\" is no list of numbers", p);
        if (id < 0 || id >= vocab) return cli_usage("generate: --prompt-ids: %lld is not in the vocabulary of %lld", id, (long long)vocab);
        run->prompt[run->count++] = (int32_t)id;
        p = *end == ',' ? end + 1 : end;
    }
    return run->count > 0 ? 0 : cli_usage("generate: --prompt-ids is empty");
}

static int generate_prepare(generate_run *run)
{
    const generate_settings *s = &run->s;
    if (s->prompt != NULL && s->prompt_ids != NULL) return cli_usage("generate: --prompt and --prompt-ids: give one");
    if (s->temperature == 0 && cli_is_set(options, OPTIONS, s, "top-k")) return cli_usage("generate: --top-k has no effect with --temperature 0: leave it out");
    if (s->temperature == 0 && cli_is_set(options, OPTIONS, s, "seed")) return cli_usage("generate: --seed has no effect with --temperature 0: leave it out");
    int code = cli_open_model(&run->model, s->model);
    if (code != 0) return code;
    int64_t vocab = fsdp_model_gpt2_config(run->model)->vocab_size;
    run->bytes = s->prompt_ids == NULL;
    if (s->prompt_ids != NULL) return id_prompt(run, vocab);
    if (vocab != 256) return cli_usage("generate: the model has a vocabulary of %lld, so text needs its tokenizer, which this version has not: give --prompt-ids", (long long)vocab);
    return text_prompt(run);
}

int cmd_generate(int argc, char **argv)
{
    static generate_run run;
    int code;
    if (!cli_parse("generate", "--model DIR [--prompt TEXT] [OPTIONS]", options, OPTIONS, &run.s, argc, argv, &code)) return code;
    code = generate_prepare(&run);
    if (code == 0 && fsdp_launch(&(fsdp_launch_opts){ .ranks = 1, .threads = (int)run.s.threads }, generate_rank, &run) != FSDP_OK)
        code = cli_fail("%s", fsdp_last_error_message());
    free(run.prompt);
    fsdp_model_destroy(run.model);
    return code;
}
