/* SPDX-License-Identifier: MIT
 *
 * fsdp inspect: what is in a safetensors file, a model's folder, a checkpoint or a run, and whether it is whole. */
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/train_wrap.h"

#include <fsdp/fsdp.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static bool exists(const char *folder, const char *name)
{
    char path[4300];
    struct stat sb;
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return stat(path, &sb) == 0;
}

static void print_tensor(const char *name, fsdp_dtype dtype, int ndim, const int64_t *shape)
{
    printf("  %-48s %-5s [", name, fsdp_dtype_name(dtype));
    for (int d = 0; d < ndim; d++) printf("%s%lld", d > 0 ? ", " : "", (long long)shape[d]);
    printf("]\n");
}

/* ---- safetensors ---- */

static int inspect_safetensors(const char *path)
{
    fsdp_safetensors *st;
    if (fsdp_safetensors_open(&st, path) != FSDP_OK) return cli_fail("%s", fsdp_last_error_message());
    int64_t n = fsdp_safetensors_count(st), elements = 0, bytes = 0;
    printf("%s: safetensors, %lld tensors\n", path, (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(st, i);
        print_tensor(t->name, t->dtype, t->ndim, t->shape);
        elements += t->numel;
        bytes += (int64_t)t->bytes;
    }
    for (int64_t i = 0; i < fsdp_safetensors_metadata_count(st); i++) {
        const fsdp_safetensors_string *m = fsdp_safetensors_metadata_at(st, i);
        printf("  metadata %s = %s\n", m->key, m->value);
    }
    printf("%lld elements, %.1f MiB; header and length are as they should be\n", (long long)elements, (double)bytes / (1 << 20));
    fsdp_safetensors_close(st);
    return 0;
}

/* ---- checkpoints ---- */

static void print_entries(const fsdp_checkpoint_reader *r)
{
    int64_t elements = 0;
    for (int i = 0; i < fsdp_checkpoint_reader_count(r); i++) {
        const fsdp_checkpoint_entry *e = fsdp_checkpoint_reader_at(r, i);
        if (strncmp(e->name, "model.", 6) != 0) continue;
        print_tensor(e->name + 6, e->dtype, e->ndim, e->shape);
        elements += e->numel;
    }
    for (int i = 0; i < fsdp_checkpoint_reader_aliases(r); i++) {
        const fsdp_checkpoint_alias *a = fsdp_checkpoint_reader_alias(r, i);
        if (strncmp(a->name, "model.", 6) == 0) printf("  %-48s is %s\n", a->name + 6, a->of + (strncmp(a->of, "model.", 6) == 0 ? 6 : 0));
    }
    printf("  %lld parameters; %d entries with the optimizer's\n", (long long)elements, fsdp_checkpoint_reader_count(r));
    const char *text = fsdp_checkpoint_reader_text(r, "units");
    json_t *units = text != NULL ? json_loads(text, 0, NULL) : NULL;
    wrap_units_print(units, "    ");
    json_decref(units);
}

static int inspect_checkpoint(const char *path, bool list)
{
    fsdp_checkpoint_reader *r;
    if (fsdp_checkpoint_reader_open(&r, path) != FSDP_OK) return cli_fail("%s", fsdp_last_error_message());
    printf("%s: checkpoint of step %lld, saved by %d rank%s\n", path, (long long)fsdp_checkpoint_reader_step(r), fsdp_checkpoint_reader_ranks(r),
           fsdp_checkpoint_reader_ranks(r) > 1 ? "s" : "");
    if (list) print_entries(r);
    int bad = 0;
    for (int i = 0; i < fsdp_checkpoint_reader_files(r); i++) {
        const fsdp_checkpoint_file *f = fsdp_checkpoint_reader_file(r, i);
        bool good = fsdp_checkpoint_reader_verify(r, i) == FSDP_OK;
        printf("  %-40s %12lld bytes  %s\n", f->name, (long long)f->bytes, good ? "as saved" : fsdp_last_error_message());
        bad += !good;
    }
    fsdp_checkpoint_reader_close(r);
    fflush(stdout);
    return bad > 0 ? cli_fail("%s is not whole: %d of its files %s damaged or missing", path, bad, bad > 1 ? "are" : "is") : 0;
}

/* ---- runs ---- */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int inspect_checkpoints_of(const char *run)
{
    char folder[4300], path[4700], *names[4096];
    int n = 0, bad = 0;
    snprintf(folder, sizeof(folder), "%s/checkpoints", run);
    DIR *d = opendir(folder);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL && n < 4096;)
        if (strncmp(e->d_name, "step-", 5) == 0) names[n++] = strdup(e->d_name);
    if (d != NULL) closedir(d);
    qsort(names, (size_t)n, sizeof(names[0]), by_text);
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s/%s", folder, names[i]);
        bad |= inspect_checkpoint(path, false);
        free(names[i]);
    }
    return bad;
}

static int inspect_run(const char *path)
{
    char file[4300];
    json_error_t error;
    snprintf(file, sizeof(file), "%s/run.json", path);
    json_t *o = json_load_file(file, 0, &error);
    if (o == NULL) return cli_fail("%s: line %d: %s", file, error.line, error.text);
    printf("%s: run of fsdp train\n", path);
    static const char *const shown[] = { "model", "parameters", "data", "steps", "batch", "micro_batch", "seq", "ranks", "threads", "mode", "wrap", "transport", "lr", "seed" };
    for (size_t i = 0; i < sizeof(shown) / sizeof(shown[0]); i++) {
        char *v = json_dumps(json_object_get(o, shown[i]), JSON_ENCODE_ANY);
        printf("  %-14s %s\n", shown[i], v != NULL ? v : "");
        free(v);
    }
    wrap_units_print(json_object_get(o, "units"), "    ");
    json_decref(o);
    long lines = 0;
    snprintf(file, sizeof(file), "%s/log.jsonl", path);
    FILE *f = fopen(file, "re");
    for (int c; f != NULL && (c = getc(f)) != EOF;) lines += c == '\n';
    if (f != NULL) fclose(f);
    printf("  %-14s %ld steps\n", "log.jsonl", lines);
    int bad = inspect_checkpoints_of(path);
    if (exists(path, "model.safetensors")) {
        snprintf(file, sizeof(file), "%s/model.safetensors", path);
        bad |= inspect_safetensors(file);
    }
    return bad;
}

int cmd_inspect(int argc, char **argv)
{
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        printf("usage: fsdp inspect FILE|DIR ...\n\n"
               "  Says what is in a safetensors file, a model's folder, a checkpoint or a run of fsdp train, and whether it is whole:\n"
               "  checksums are computed anew. Exit status 1 if something is not.\n");
        return 0;
    }
    if (argc < 2) return cli_usage("inspect: what? fsdp inspect FILE|DIR ...");
    for (int i = 1; i < argc; i++)
        if (argv[i][0] == '-') return cli_usage("inspect: there is no option %s (fsdp inspect --help)", argv[i]);
    int bad = 0;
    for (int i = 1; i < argc; i++) {
        const char *p = argv[i];
        struct stat sb;
        if (stat(p, &sb) != 0) bad |= cli_fail("there is no file or folder \"%s\"", p);
        else if (S_ISDIR(sb.st_mode) && exists(p, "manifest.json")) bad |= inspect_checkpoint(p, true);
        else if (S_ISDIR(sb.st_mode) && exists(p, "run.json")) bad |= inspect_run(p);
        else bad |= inspect_safetensors(p);
    }
    return bad;
}
