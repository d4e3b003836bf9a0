/* SPDX-License-Identifier: MIT
 *
 * Hugging Face's files: which tensor of a file is which parameter, and a model read and written unit by unit. */
#include "models/model.h"

#include "base/alloc.h"
#include "base/error.h"
#include "format/fileio.h"
#include "format/shown.h"

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

static bool has_both(const fsdp_safetensors *files, const char *name)
{
    char with[600];
    snprintf(with, sizeof(with), "%s%s", prefix, name);
    return fsdp_safetensors_find(files, name) != NULL && fsdp_safetensors_find(files, with) != NULL;
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

static fsdp_status check_files(fsdp_model *m, const fsdp_safetensors *files, const char *path, const fsdp_module_param_info *p, int n)
{
    complaint c = { .used = 0 };
    for (int i = 0; i < n; i++) {
        const fsdp_safetensors_tensor *t = find(files, p[i].name);
        if (t == NULL && strcmp(p[i].name, "lm_head.weight") == 0)
            complain(&c, "\"lm_head.weight\" is missing, and the config has \"tie_word_embeddings\": false; with true the embedding serves as the head");
        else if (t == NULL) complain(&c, "\"%s\" is missing", p[i].name);
        else compare(&c, &p[i], t);
        if (t != NULL && has_both(files, p[i].name)) complain(&c, "\"%s\" is there twice, with and without \"%s\"", p[i].name, prefix);
    }
    for (int64_t i = 0; i < fsdp_safetensors_count(files); i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(files, i);
        const char *name = our_name(t->name);
        if (is_mask(name) || is_param(p, n, name)) continue;
        if (strcmp(name, "lm_head.weight") == 0 && m->config.tie_word_embeddings) FSDP_TRY(check_head(files, t, &c));
        else complain(&c, "\"%s\" is not of this model", fsdpi_show(t->name).s);
    }
    FSDP_FAIL_IF(c.count > 0, FSDP_ERR_FORMAT, "%s does not fit the model: %s%s", path, c.text, c.count > 12 ? "; and more" : "");
    return FSDP_OK;
}

/* ---- load ---- */

/* Everything that a load needs memory for, and all checks, come before ranks agree to begin: a fill is collective. */
typedef struct loading {
    fsdp_safetensors *files;
    fsdp_unit_list units;
    const fsdp_module_param_info *param;
    int params;
    const fsdp_safetensors_tensor **tensor; /* of each parameter of the unit that is being filled */
} loading;

static fsdp_status prepare_load(loading *l, fsdp_model *m, const char *path)
{
    int most = 0;
    FSDP_TRY(fsdp_module_params(m->module, &l->param, &l->params));
    FSDP_TRY(fsdpi_module_units(m->module, &l->units));
    FSDP_TRY(fsdp_safetensors_open(&l->files, path));
    FSDP_TRY(check_files(m, l->files, path, l->param, l->params));
    for (int i = 0; i < l->units.count; i++) most = fsdp_unit_param_count(l->units.units[i]) > most ? fsdp_unit_param_count(l->units.units[i]) : most;
    FSDPI_NEW(l->tensor, most);
    return FSDP_OK;
}

static fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)name;
    const loading *l = arg;
    return fsdp_safetensors_read_f32(l->files, l->tensor[param], first, numel, out);
}

static fsdp_status load_unit(loading *l, fsdp_unit *u)
{
    for (int i = 0; i < l->params; i++)
        if (l->param[i].unit == u) l->tensor[l->param[i].index] = find(l->files, l->param[i].name);
    return fsdp_unit_fill(u, fill, l);
}

fsdp_status fsdp_model_load(fsdp_model *model, const char *path)
{
    FSDP_FAIL_IF(model->comm == NULL, FSDP_ERR_STATE, "fsdp_model_load: wrap the model first: nothing holds its parameters yet");
    loading l = { 0 };
    fsdp_status st = fsdp_comm_agree(model->comm, prepare_load(&l, model, path));
    for (int i = 0; st == FSDP_OK && i < l.units.count; i++) st = load_unit(&l, l.units.units[i]);
    fsdp_safetensors_close(l.files);
    fsdpi_free(l.tensor);
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

/* A save as one rank sees it: rank 0 writes. */
typedef struct saving {
    const fsdp_module_param_info *param;
    int params;
    bool writes;
    fsdp_safetensors_writer *writer;
    float *host; /* room for the largest parameter */
} saving;

static fsdp_status prepare_save(saving *s, fsdp_model *m, const char *folder)
{
    int64_t most = 0;
    FSDP_TRY(fsdp_module_params(m->module, &s->param, &s->params));
    if (!s->writes) return FSDP_OK;
    FSDP_TRY(open_writer(&s->writer, folder, s->param, s->params));
    for (int i = 0; i < s->params; i++) {
        int64_t numel = fsdp_unit_param_numel(s->param[i].unit, s->param[i].index);
        most = numel > most ? numel : most;
    }
    FSDPI_NEW(s->host, most);
    return FSDP_OK;
}

/* Every rank takes part in the gathers. An error of rank 0's writing is held until the ranks agree: if it stopped before that,
 * they would wait for each other. */
static fsdp_status save_params(saving *s, fsdp_comm *comm)
{
    fsdp_status st = FSDP_OK, written = FSDP_OK;
    for (int i = 0; i < s->params && st == FSDP_OK; i++) {
        const fsdp_module_param_info *p = &s->param[i];
        st = fsdp_unit_read_param(p->unit, p->index, s->host);
        if (st == FSDP_OK && written == FSDP_OK && s->writes) written = fsdp_safetensors_writer_write_f32(s->writer, i, 0, fsdp_unit_param_numel(p->unit, p->index), s->host);
        if (st == FSDP_OK && (i % 16 == 15 || i == s->params - 1)) st = fsdp_comm_agree(comm, written);
    }
    return st;
}

static fsdp_status finish_save(saving *s, fsdp_model *m, const char *folder)
{
    char path[4096];
    if (!s->writes) return FSDP_OK;
    snprintf(path, sizeof(path), "%s/config.json", folder);
    FSDP_TRY(fsdp_gpt2_config_write(&m->config, path));
    return fsdp_safetensors_writer_finish(s->writer);
}

fsdp_status fsdp_model_save(fsdp_model *model, const char *folder)
{
    FSDP_FAIL_IF(model->comm == NULL, FSDP_ERR_STATE, "fsdp_model_save: the model is not wrapped: nothing holds its parameters");
    saving s = { .writes = fsdp_comm_rank(model->comm) == 0 };
    fsdp_status st = fsdp_comm_agree(model->comm, prepare_save(&s, model, folder));
    if (st == FSDP_OK) st = save_params(&s, model->comm);
    if (st == FSDP_OK) st = fsdp_comm_agree(model->comm, finish_save(&s, model, folder));
    fsdp_safetensors_writer_close(s.writer);
    fsdpi_free(s.host);
    return st == FSDP_OK ? st : fsdp_error_through(st, __func__, __FILE__, __LINE__);
}
