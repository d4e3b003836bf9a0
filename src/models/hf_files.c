/* SPDX-License-Identifier: MIT
 *
 * Hugging Face's files: which tensor of a file is which parameter, and a model read and written unit by unit. */
#include "models/model.h"

#include "base/alloc.h"
#include "base/error.h"
#include "format/fileio.h"

#include <fsdp/safetensors.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char prefix[] = "transformer.";

/* A file's name for a tensor as ours: without "transformer.". */
static const char *our_name(const char *name)
{
    return strncmp(name, prefix, sizeof(prefix) - 1) == 0 ? name + sizeof(prefix) - 1 : name;
}

/* Masks that old files carry: h.N.attn.bias (a triangle of ones) and h.N.attn.masked_bias. */
static bool is_mask(const char *name)
{
    int layer, end = 0;
    return (sscanf(name, "h.%d.attn.bias%n", &layer, &end) == 1 && end > 0 && name[end] == '\0') ||
           (end = 0, sscanf(name, "h.%d.attn.masked_bias%n", &layer, &end) == 1 && end > 0 && name[end] == '\0');
}

static const fsdp_safetensors_tensor *find(const fsdp_safetensors *files, const char *name)
{
    char with[600];
    const fsdp_safetensors_tensor *t = fsdp_safetensors_find(files, name);
    if (t != NULL) return t;
    snprintf(with, sizeof(with), "%s%s", prefix, name);
    return fsdp_safetensors_find(files, with);
}

/* ---- what a file lacks or has too much of, all in one message ---- */

typedef struct complaint {
    char text[1200];
    size_t used;
    int count;
} complaint;

static void complain(complaint *c, const char *fmt, ...) FSDP_PRINTF(2, 3);
static void complain(complaint *c, const char *fmt, ...)
{
    if (c->count++ >= 12 || c->used >= sizeof(c->text) - 1) return;
    va_list ap;
    va_start(ap, fmt);
    if (c->count > 1) c->used += (size_t)snprintf(c->text + c->used, sizeof(c->text) - c->used, "; ");
    if (c->used < sizeof(c->text)) c->used += (size_t)vsnprintf(c->text + c->used, sizeof(c->text) - c->used, fmt, ap);
    va_end(ap);
    if (c->used >= sizeof(c->text)) c->used = sizeof(c->text) - 1;
}

static void shape_text(char *to, size_t size, int ndim, const int64_t *shape)
{
    size_t n = (size_t)snprintf(to, size, "[");
    for (int d = 0; d < ndim && n < size; d++) n += (size_t)snprintf(to + n, size - n, "%s%lld", d > 0 ? ", " : "", (long long)shape[d]);
    if (n < size) snprintf(to + n, size - n, "]");
}

static void compare(complaint *c, const fsdp_module_param_info *p, const fsdp_safetensors_tensor *t)
{
    char want[128], got[128];
    bool same = p->param.ndim == t->ndim;
    for (int d = 0; same && d < t->ndim; d++) same = p->param.shape[d] == t->shape[d];
    shape_text(want, sizeof(want), p->param.ndim, p->param.shape);
    shape_text(got, sizeof(got), t->ndim, t->shape);
    bool is_float = t->dtype == FSDP_F32 || t->dtype == FSDP_BF16 || t->dtype == FSDP_F16 || t->dtype == FSDP_F64;
    if (!same) complain(c, "\"%s\" is %s, the model wants %s", t->name, got, want);
    else if (!is_float) complain(c, "\"%s\" is of type %s", t->name, fsdp_dtype_name(t->dtype));
}

/* Tied in the config, but the file has a head of its own: fine if it is the same, else somebody is wrong. */
static fsdp_status check_head(const fsdp_safetensors *files, const fsdp_safetensors_tensor *head, complaint *c)
{
    const fsdp_safetensors_tensor *wte = find(files, "wte.weight");
    if (wte == NULL) return FSDP_OK;
    enum { CHUNK = 1 << 16 };
    float *a, *b;
    FSDPI_NEW(a, 2 * CHUNK);
    b = a + CHUNK;
    fsdp_status st = FSDP_OK;
    bool same = head->numel == wte->numel;
    for (int64_t at = 0; at < wte->numel && same && st == FSDP_OK; at += CHUNK) {
        int64_t n = wte->numel - at < CHUNK ? wte->numel - at : CHUNK;
        st = fsdp_safetensors_read_f32(files, wte, at, n, a);
        if (st == FSDP_OK) st = fsdp_safetensors_read_f32(files, head, at, n, b);
        if (st == FSDP_OK) same = memcmp(a, b, (size_t)n * sizeof(float)) == 0;
    }
    fsdpi_free(a);
    if (st == FSDP_OK && !same)
        complain(c, "\"%s\" differs from \"%s\", but the config ties them: set \"tie_word_embeddings\": false, or take the tensor out", head->name, wte->name);
    return st;
}

static bool is_param(const fsdp_module_param_info *p, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (strcmp(p[i].name, name) == 0) return true;
    return false;
}

static fsdp_status check_files(fsdp_model *m, const fsdp_safetensors *files, const char *path)
{
    const fsdp_module_param_info *p;
    int n;
    complaint c = { .used = 0 };
    FSDP_TRY(fsdp_module_params(m->module, &p, &n));
    for (int i = 0; i < n; i++) {
        const fsdp_safetensors_tensor *t = find(files, p[i].name);
        if (t == NULL) complain(&c, "\"%s\" is missing", p[i].name);
        else compare(&c, &p[i], t);
    }
    for (int64_t i = 0; i < fsdp_safetensors_count(files); i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(files, i);
        const char *name = our_name(t->name);
        if (is_mask(name) || is_param(p, n, name)) continue;
        if (strcmp(name, "lm_head.weight") == 0 && m->config.tie_word_embeddings) FSDP_TRY(check_head(files, t, &c));
        else complain(&c, "\"%s\" is not of this model", t->name);
    }
    FSDP_FAIL_IF(c.count > 0, FSDP_ERR_FORMAT, "%s does not fit the model: %s%s", path, c.text, c.count > 12 ? "; and more" : "");
    return FSDP_OK;
}

/* ---- load ---- */

typedef struct loading {
    const fsdp_safetensors *files;
    fsdp_unit *unit;
    const fsdp_safetensors_tensor **tensor; /* of each parameter of the unit */
} loading;

static fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)name;
    const loading *l = arg;
    return fsdp_safetensors_read_f32(l->files, l->tensor[param], first, numel, out);
}

static fsdp_status load_unit(fsdp_model *m, const fsdp_safetensors *files, fsdp_unit *u)
{
    const fsdp_module_param_info *p;
    int n;
    loading l = { .files = files, .unit = u };
    FSDP_TRY(fsdp_module_params(m->module, &p, &n));
    FSDPI_NEW(l.tensor, fsdp_unit_param_count(u));
    for (int i = 0; i < n; i++)
        if (p[i].unit == u) l.tensor[p[i].index] = find(files, p[i].name);
    fsdp_status st = fsdp_unit_fill(u, fill, &l);
    fsdpi_free(l.tensor);
    return st;
}

fsdp_status fsdp_model_load(fsdp_model *model, const char *path)
{
    FSDP_FAIL_IF(model->comm == NULL, FSDP_ERR_STATE, "fsdp_model_load: wrap the model first: nothing holds its parameters yet");
    fsdp_safetensors *files = NULL;
    fsdp_status st = fsdp_safetensors_open(&files, path);
    if (st == FSDP_OK) st = check_files(model, files, path);
    st = fsdp_comm_agree(model->comm, st);
    fsdp_unit_list units = { 0 };
    if (st == FSDP_OK) st = fsdpi_module_units(model->module, &units);
    for (int i = 0; i < units.count && st == FSDP_OK; i++) st = load_unit(model, files, units.units[i]);
    fsdp_safetensors_close(files);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

/* ---- save ---- */

/* Rank 0 opens the writer: names as Hugging Face's GPT2LMHeadModel saves them. */
static fsdp_status open_writer(fsdp_safetensors_writer **out, const char *folder, const fsdp_module_param_info *p, int n)
{
    FSDP_TRY(fsdpi_mkdirs(folder));
    fsdp_safetensors_decl *decl;
    char(*names)[600] = fsdpi_calloc((size_t)n, sizeof(*names));
    FSDP_FAIL_IF(names == NULL, FSDP_ERR_NOMEM, "no memory to save %d parameters", n);
    decl = fsdpi_calloc((size_t)n, sizeof(*decl));
    fsdp_status st = decl != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to save %d parameters", n);
    for (int i = 0; i < n && st == FSDP_OK; i++) {
        bool head = strncmp(p[i].name, "lm_head.", 8) == 0;
        snprintf(names[i], sizeof(names[i]), "%s%s", head ? "" : prefix, p[i].name);
        decl[i] = (fsdp_safetensors_decl){ .name = names[i], .dtype = FSDP_F32, .ndim = p[i].param.ndim, .shape = p[i].param.shape };
    }
    char path[4096];
    if (st == FSDP_OK && (size_t)snprintf(path, sizeof(path), "%s/model.safetensors", folder) >= sizeof(path))
        st = fsdp_error_raise(FSDP_ERR_INVALID, __func__, __FILE__, __LINE__, "the path \"%.60s...\" is too long", folder);
    if (st == FSDP_OK) st = fsdp_safetensors_writer_open(out, path, decl, n, NULL, 0);
    fsdpi_free(decl);
    fsdpi_free(names);
    return st;
}

/* Every rank takes part in the gather; rank 0 writes. An error of rank 0 is held until all have gone through. */
static fsdp_status save_params(fsdp_model *m, const fsdp_module_param_info *p, int n, fsdp_safetensors_writer *w, fsdp_status st)
{
    bool writes = fsdp_comm_rank(m->comm) == 0;
    float *host = NULL;
    int64_t most = 0;
    for (int i = 0; i < n; i++) most = fsdp_unit_param_numel(p[i].unit, p[i].index) > most ? fsdp_unit_param_numel(p[i].unit, p[i].index) : most;
    if (writes && st == FSDP_OK) {
        host = fsdpi_calloc((size_t)most, sizeof(*host));
        if (host == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for a parameter of %lld elements", (long long)most);
    }
    FSDP_TRY(fsdp_comm_agree(m->comm, st));
    for (int i = 0; i < n && st == FSDP_OK; i++) {
        fsdp_status read = fsdp_unit_read_param(p[i].unit, p[i].index, host);
        if (read == FSDP_OK && writes) st = fsdp_safetensors_writer_write_f32(w, i, 0, fsdp_unit_param_numel(p[i].unit, p[i].index), host);
        else st = read;
        if (read != FSDP_OK) break;
        if (st != FSDP_OK || i % 16 == 15) st = fsdp_comm_agree(m->comm, st);
    }
    fsdpi_free(host);
    return st;
}

fsdp_status fsdp_model_save(fsdp_model *model, const char *folder)
{
    FSDP_FAIL_IF(model->comm == NULL, FSDP_ERR_STATE, "fsdp_model_save: the model is not wrapped: nothing holds its parameters");
    const fsdp_module_param_info *p;
    int n;
    fsdp_safetensors_writer *w = NULL;
    FSDP_TRY(fsdp_module_params(model->module, &p, &n));
    bool writes = fsdp_comm_rank(model->comm) == 0;
    fsdp_status st = writes ? open_writer(&w, folder, p, n) : FSDP_OK;
    st = save_params(model, p, n, w, st);
    if (st == FSDP_OK && writes) {
        char path[4096];
        snprintf(path, sizeof(path), "%s/config.json", folder);
        st = fsdp_gpt2_config_write(&model->config, path);
        if (st == FSDP_OK) st = fsdp_safetensors_writer_finish(w);
    }
    fsdp_safetensors_writer_close(w);
    return fsdp_comm_agree(model->comm, st);
}
