/* SPDX-License-Identifier: MIT
 *
 * fsdp convert: a checkpoint into a whole model in Hugging Face's format, tensor by tensor. No rank, no model in memory. */
#include "cli/args.h"
#include "cli/cli.h"

#include <fsdp/fsdp.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { CHUNK = 1 << 20 };

/* "model.h.0.ln_1.weight" as Hugging Face has it; NULL: not of the model. */
static bool hf_name(const char *entry, char *to, size_t size)
{
    if (strncmp(entry, "model.", 6) != 0) return false;
    snprintf(to, size, "%s%s", strncmp(entry + 6, "lm_head.", 8) == 0 ? "" : "transformer.", entry + 6);
    return true;
}

typedef struct conversion {
    fsdp_checkpoint_reader *reader;
    fsdp_safetensors_writer *writer;
    fsdp_safetensors_decl *decl;
    const fsdp_checkpoint_entry **entry;
    char (*names)[640];
    int count;
    float *host;
} conversion;

static fsdp_status collect(conversion *c)
{
    int n = fsdp_checkpoint_reader_count(c->reader);
    c->decl = calloc((size_t)n + 1, sizeof(*c->decl));
    c->entry = calloc((size_t)n + 1, sizeof(*c->entry));
    c->names = calloc((size_t)n + 1, sizeof(*c->names));
    c->host = malloc(CHUNK * sizeof(*c->host));
    FSDP_FAIL_IF(c->decl == NULL || c->entry == NULL || c->names == NULL || c->host == NULL, FSDP_ERR_NOMEM, "no memory to convert %d entries", n);
    for (int i = 0; i < n; i++) {
        const fsdp_checkpoint_entry *e = fsdp_checkpoint_reader_at(c->reader, i);
        if (!hf_name(e->name, c->names[c->count], sizeof(c->names[0]))) continue;
        c->entry[c->count] = e;
        c->decl[c->count] = (fsdp_safetensors_decl){ .name = c->names[c->count], .dtype = e->dtype, .ndim = e->ndim, .shape = e->shape };
        c->count++;
    }
    return FSDP_OK;
}

static fsdp_status copy_tensors(conversion *c)
{
    for (int i = 0; i < c->count; i++) {
        const fsdp_checkpoint_entry *e = c->entry[i];
        for (int64_t at = 0; at < e->numel; at += CHUNK) {
            int64_t n = e->numel - at < CHUNK ? e->numel - at : CHUNK;
            FSDP_TRY(fsdp_checkpoint_reader_read(c->reader, e->name, at, n, c->host));
            FSDP_TRY(fsdp_safetensors_writer_write_f32(c->writer, i, at, n, c->host));
        }
    }
    return FSDP_OK;
}

static fsdp_status write_config(const conversion *c, const char *from, const char *folder)
{
    const char *settings = fsdp_checkpoint_reader_text(c->reader, "settings");
    json_error_t error;
    json_t *o = settings != NULL ? json_loads(settings, 0, &error) : NULL;
    const char *text = json_string_value(json_object_get(o, "config"));
    fsdp_gpt2_config config;
    char path[4300];
    snprintf(path, sizeof(path), "%s/config.json", folder);
    fsdp_status st = text != NULL ? fsdp_gpt2_config_parse(&config, text, from)
                                  : fsdp_error_raise(FSDP_ERR_FORMAT, __func__, __FILE__, __LINE__, "%s is no checkpoint of fsdp train: it has no model's config", from);
    if (st == FSDP_OK) st = fsdp_gpt2_config_write(&config, path);
    json_decref(o);
    return st;
}

static fsdp_status convert(conversion *c, const char *from, const char *folder)
{
    char path[4300];
    FSDP_TRY(fsdp_checkpoint_reader_open(&c->reader, from));
    for (int i = 0; i < fsdp_checkpoint_reader_files(c->reader); i++) FSDP_TRY(fsdp_checkpoint_reader_verify(c->reader, i));
    FSDP_TRY(collect(c));
    FSDP_FAIL_IF(mkdir(folder, 0777) != 0 && errno != EEXIST, FSDP_ERR_IO, "cannot make the folder %s: %s", folder, strerror(errno));
    snprintf(path, sizeof(path), "%s/model.safetensors", folder);
    FSDP_TRY(fsdp_safetensors_writer_open(&c->writer, path, c->decl, c->count, NULL, 0));
    FSDP_TRY(copy_tensors(c));
    FSDP_TRY(write_config(c, from, folder));
    return fsdp_safetensors_writer_finish(c->writer);
}

/* The checkpoint itself, or a run's folder: its latest one. */
static bool find_checkpoint(const char *given, char *path, size_t size)
{
    char folder[4300];
    struct stat sb;
    snprintf(folder, sizeof(folder), "%s/manifest.json", given);
    snprintf(path, size, "%s", given);
    if (stat(folder, &sb) == 0) return true;
    snprintf(folder, sizeof(folder), "%s/checkpoints", given);
    if (stat(folder, &sb) != 0) snprintf(folder, sizeof(folder), "%s", given);
    return fsdp_checkpoint_latest(folder, path, size, NULL, NULL) == FSDP_OK;
}

int cmd_convert(int argc, char **argv)
{
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        printf("usage: fsdp convert CHECKPOINT DIR\n\n"
               "  Writes DIR/model.safetensors and DIR/config.json, as Hugging Face's loader opens them, from a checkpoint of\n"
               "  fsdp train (or from the latest one of a run's folder).\n");
        return 0;
    }
    for (int i = 1; i < argc; i++)
        if (argv[i][0] == '-') return cli_usage("convert: there is no option %s (fsdp convert --help)", argv[i]);
    if (argc != 3) return cli_usage("convert: two arguments: fsdp convert CHECKPOINT DIR");
    char path[4400];
    if (!find_checkpoint(argv[1], path, sizeof(path))) return cli_fail("%s is no checkpoint, and has none: %s", argv[1], fsdp_last_error_message());
    conversion c = { 0 };
    int code = 0;
    if (convert(&c, path, argv[2]) != FSDP_OK) code = cli_fail("%s", fsdp_last_error_message());
    else printf("%s: %d tensors of step %lld into %s/model.safetensors\n", path, c.count, (long long)fsdp_checkpoint_reader_step(c.reader), argv[2]);
    fsdp_safetensors_writer_close(c.writer);
    fsdp_checkpoint_reader_close(c.reader);
    free(c.host);
    free(c.names);
    free(c.entry);
    free(c.decl);
    return code;
}
