/* SPDX-License-Identifier: MIT
 *
 * GPT-2 as modules: root { wte, wpe, h.N { ln_1, attn { c_attn, c_proj }, ln_2, mlp { c_fc, c_proj } }, ln_f, lm_head }. Where
 * embeddings are tied, lm_head's weight is wte's.
 *
 * Between blocks the residual stream is a pair (x, delta): the addition is done in one pass with the layer norm that
 * follows it, which is the next block's. */
#include "models/model.h"

#include "base/alloc.h"
#include "base/error.h"

#include <fsdp/wrap.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WTE, WPE, H, LN_F, LM_HEAD }; /* children of root */
enum { LN_1, ATTN, LN_2, MLP };      /* of a block */
enum { C_ATTN, ATTN_PROJ };
enum { C_FC, MLP_PROJ };

typedef struct block {
    fsdp_model *model;
    int layer;
} block;

/* ---- forward ---- */

static float attention_scale(const fsdp_gpt2_config *c, int layer)
{
    double s = c->scale_attn_weights ? 1.0 / sqrt((double)c->n_embd / (double)c->n_head) : 1.0;
    return (float)(c->scale_attn_by_inverse_layer_idx ? s / (layer + 1) : s);
}

static fsdp_status attend(const block *b, fsdp_tape *tape, fsdp_tensor *qkv, fsdp_tensor **out)
{
    const fsdp_gpt2_config *c = &b->model->config;
    fsdp_op_attention_opts o = { .heads = (int)c->n_head, .causal = true, .scale = attention_scale(c, b->layer), .dropout = c->attn_pdrop };
    fsdpi_kv_cache *cache = b->model->cache;
    if (cache == NULL) return fsdp_op_attention(tape, qkv, &o, out);
    return fsdpi_op_attention_cached(tape, qkv, &o, cache->k[b->layer], cache->v[b->layer], cache->room, cache->length, out);
}

static fsdp_status dropout(const fsdp_model *m, fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor **out)
{
    fsdp_tensor *in = x;
    FSDP_TRY(fsdp_op_dropout(tape, in, m->config.resid_pdrop, out));
    if (*out != in) fsdp_tensor_release(in);
    return FSDP_OK;
}

static fsdp_status attention_branch(fsdp_module *m, const block *b, fsdp_tape *tape, fsdp_tensor *a, fsdp_tensor **out)
{
    fsdp_module *attn = m->child[ATTN];
    fsdp_tensor *qkv, *mixed, *projected;
    FSDP_TRY(fsdp_forward(attn->child[C_ATTN], tape, a, &qkv));
    fsdp_tensor_release(a);
    FSDP_TRY(attend(b, tape, qkv, &mixed));
    fsdp_tensor_release(qkv);
    FSDP_TRY(fsdp_forward(attn->child[ATTN_PROJ], tape, mixed, &projected));
    fsdp_tensor_release(mixed);
    return dropout(b->model, tape, projected, out);
}

static fsdp_status mlp_branch(fsdp_module *m, const block *b, fsdp_tape *tape, fsdp_tensor *a, fsdp_tensor **out)
{
    fsdp_module *mlp = m->child[MLP];
    fsdp_tensor *hidden, *projected;
    FSDP_TRY(fsdp_forward(mlp->child[C_FC], tape, a, &hidden));
    fsdp_tensor_release(a);
    FSDP_TRY(fsdp_forward(mlp->child[MLP_PROJ], tape, hidden, &projected));
    fsdp_tensor_release(hidden);
    return dropout(b->model, tape, projected, out);
}

/* (x, delta) -> (x + delta + attention, mlp). A block that is run by itself has no neighbours to pass a pair to: x -> x +
 * attention + mlp. */
static fsdp_status block_forward(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor **out)
{
    const block *b = ctx;
    fsdp_model *model = b->model;
    fsdp_tensor *x1, *x2, *a, *attention, *mlp;
    if (!model->running) model->delta = NULL;
    FSDP_TRY(fsdpi_layer_norm_residual(m->child[LN_1], tape, x, model->delta, &x1, &a));
    if (model->delta != NULL) {
        fsdp_tensor_release(x);
        fsdp_tensor_release(model->delta);
    }
    FSDP_TRY(attention_branch(m, b, tape, a, &attention));
    FSDP_TRY(fsdpi_layer_norm_residual(m->child[LN_2], tape, x1, attention, &x2, &a));
    if (model->running || x1 != x) fsdp_tensor_release(x1); /* by itself: x is the caller's */
    fsdp_tensor_release(attention);
    FSDP_TRY(mlp_branch(m, b, tape, a, &mlp));
    if (!model->running) return fsdp_op_add(tape, x2, mlp, out);
    model->delta = mlp;
    *out = x2;
    return FSDP_OK;
}

/* A block as a region of its two inputs, for activation checkpointing; also called by the backward. */
static fsdp_status block_region(void *ctx, fsdp_tape *tape, fsdp_tensor *const *in, fsdp_tensor **out)
{
    fsdp_module *m = ctx;
    fsdp_model *model = ((block *)m->ctx)->model;
    bool running = model->running;
    model->running = true;
    model->delta = in[1];
    fsdp_status st = block_forward(m, m->ctx, tape, in[0], &out[0]);
    out[1] = model->delta;
    model->delta = NULL;
    model->running = running;
    return st;
}

static fsdp_status run_block(fsdp_module *m, fsdp_model *model, fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor **out)
{
    if (!model->recompute) return fsdp_forward(m, tape, x, out);
    fsdp_tensor *in[2] = { x, model->delta }, *both[2];
    FSDP_TRY(fsdpi_module_enter(m, tape));
    FSDP_TRY(fsdpi_tape_region(tape, block_region, m, in, 2, both, 2));
    FSDP_TRY(fsdpi_module_leave(m, tape));
    *out = both[0];
    model->delta = both[1];
    return FSDP_OK;
}

void fsdp_model_set_recompute(fsdp_model *model, bool on)
{
    model->recompute = on;
}

static fsdp_status embed(fsdp_module *root, fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor **out)
{
    int64_t first = model->cache != NULL ? model->cache->length : 0;
    fsdp_module *wte = root->child[WTE], *wpe = root->child[WPE];
    fsdp_tensor *x;
    FSDP_TRY(fsdpi_module_enter(wte, tape));
    FSDP_TRY(fsdpi_module_enter(wpe, tape));
    FSDP_TRY(fsdp_op_embedding(tape, ids, fsdp_module_param(wte, 0), fsdp_module_param(wpe, 0), first, &x));
    FSDP_TRY(fsdpi_module_leave(wpe, tape));
    FSDP_TRY(fsdpi_module_leave(wte, tape));
    FSDP_TRY(fsdp_op_dropout(tape, x, model->config.embd_pdrop, out));
    if (*out != x) fsdp_tensor_release(x);
    return FSDP_OK;
}

/* The last rows of every sample: what a generation needs. */
static fsdp_status head(fsdp_module *root, fsdp_model *model, fsdp_tape *tape, fsdp_tensor *y, fsdp_tensor **out)
{
    fsdp_module *owner = root->child[LM_HEAD];
    fsdp_tensor *w = fsdp_module_param(owner, 0);
    FSDP_TRY(fsdpi_module_enter(owner, tape));
    if (model->labels != NULL) {
        FSDP_TRY(fsdp_op_linear_cross_entropy(tape, y, w, model->labels, out));
    } else {
        fsdp_tensor *last = y;
        if (model->cache != NULL) FSDP_TRY(fsdpi_op_last_row(tape, y, &last));
        FSDP_TRY(fsdp_op_linear(tape, last, w, NULL, NULL, out));
    }
    return fsdpi_module_leave(owner, tape);
}

static fsdp_status run_root(fsdp_module *m, fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor **out)
{
    fsdp_tensor *x, *y, *sum;
    FSDP_TRY(embed(m, model, tape, ids, &x));
    for (int i = 0; i < m->child[H]->children; i++) FSDP_TRY(run_block(m->child[H]->child[i], model, tape, x, &x));
    FSDP_TRY(fsdpi_layer_norm_residual(m->child[LN_F], tape, x, model->delta, &sum, &y));
    if (model->delta != NULL) {
        fsdp_tensor_release(x);
        fsdp_tensor_release(model->delta);
    }
    fsdp_tensor_release(sum);
    FSDP_TRY(head(m, model, tape, y, out));
    fsdp_tensor_release(y);
    return FSDP_OK;
}

static fsdp_status root_forward(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor **out)
{
    fsdp_model *model = ctx;
    model->delta = NULL;
    model->running = true;
    fsdp_status st = run_root(m, model, tape, ids, out);
    model->delta = NULL; /* of this tape: it must not outlive it */
    model->running = false;
    return st;
}

/* ---- build ---- */

static fsdp_status check_config(const fsdp_gpt2_config *c)
{
    FSDP_FAIL_IF(c->vocab_size < 1 || c->n_positions < 1 || c->n_embd < 1 || c->n_layer < 0 || c->n_head < 1 || c->n_inner < 0, FSDP_ERR_INVALID,
                 "gpt2: vocab_size %lld, n_positions %lld, n_embd %lld, n_layer %lld, n_head %lld, n_inner %lld: must be positive", (long long)c->vocab_size,
                 (long long)c->n_positions, (long long)c->n_embd, (long long)c->n_layer, (long long)c->n_head, (long long)c->n_inner);
    FSDP_FAIL_IF(c->n_embd % c->n_head != 0, FSDP_ERR_INVALID, "gpt2: n_embd %lld is no multiple of n_head %lld", (long long)c->n_embd, (long long)c->n_head);
    FSDP_FAIL_IF(c->vocab_size > INT32_MAX || c->n_positions > INT32_MAX || c->n_embd > 1 << 20 || c->n_layer > 10000, FSDP_ERR_INVALID,
                 "gpt2: a config beyond what is supported (vocabulary and positions to 2^31, n_embd to 2^20, n_layer to 10000)");
    FSDP_FAIL_IF(c->activation != FSDP_ACT_GELU_TANH && c->activation != FSDP_ACT_GELU_ERF && c->activation != FSDP_ACT_RELU, FSDP_ERR_INVALID, "gpt2: no activation");
    const float p[] = { c->resid_pdrop, c->embd_pdrop, c->attn_pdrop };
    for (int i = 0; i < 3; i++) FSDP_FAIL_IF(!(p[i] >= 0 && p[i] < 1), FSDP_ERR_INVALID, "gpt2: dropout %g: must be 0 or more, and less than 1", (double)p[i]);
    return FSDP_OK;
}

/* Takes the children, or destroys those that are there. */
static fsdp_status group(fsdp_module **out, const char *type, fsdp_module_forward_fn forward, void *ctx, void (*destroy)(void *), fsdp_module **child,
                         const char *const *names, int n)
{
    fsdp_module_opts o = { .type = type, .forward = forward, .ctx = ctx, .destroy = destroy, .children = child, .names = names, .child_count = n };
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < n; i++)
        if (child[i] == NULL) st = fsdpi_error_status(); /* of what could not be made */
    if (st == FSDP_OK) st = fsdp_module_create(out, &o);
    if (st == FSDP_OK) return st;
    for (int i = 0; i < n; i++) fsdp_module_destroy(child[i]);
    return fsdp_error_through(st, __func__, __FILE__, __LINE__);
}

static fsdp_status conv1d(fsdp_module **out, int64_t in, int64_t outputs, fsdp_activation act, float std)
{
    FSDP_TRY(fsdp_linear(out, in, outputs, &(fsdp_linear_opts){ .bias = true, .in_out = true, .activation = act }));
    fsdpi_module_own_param(*out, 0)->normal_std = std;
    return FSDP_OK;
}

static fsdp_status make_attention(fsdp_module **out, const fsdp_gpt2_config *c, float std, float residual_std)
{
    fsdp_module *child[2] = { NULL };
    fsdp_status st = conv1d(&child[C_ATTN], c->n_embd, 3 * c->n_embd, FSDP_ACT_NONE, std);
    if (st == FSDP_OK) st = conv1d(&child[ATTN_PROJ], c->n_embd, c->n_embd, FSDP_ACT_NONE, residual_std);
    return group(out, "attention", NULL, NULL, NULL, child, (const char *const[]){ "c_attn", "c_proj" }, 2);
}

static fsdp_status make_mlp(fsdp_module **out, const fsdp_gpt2_config *c, float std, float residual_std)
{
    int64_t inner = c->n_inner > 0 ? c->n_inner : 4 * c->n_embd;
    fsdp_module *child[2] = { NULL };
    fsdp_status st = conv1d(&child[C_FC], c->n_embd, inner, c->activation, std);
    if (st == FSDP_OK) st = conv1d(&child[MLP_PROJ], inner, c->n_embd, FSDP_ACT_NONE, residual_std);
    return group(out, "mlp", NULL, NULL, NULL, child, (const char *const[]){ "c_fc", "c_proj" }, 2);
}

static void free_block(void *ctx)
{
    fsdpi_free(ctx);
}

static fsdp_status make_block(fsdp_module **out, fsdp_model *model, int layer)
{
    const fsdp_gpt2_config *c = &model->config;
    /* Radford et al. scale the weights that end in the residual stream by 1 / sqrt(number of such layers). */
    float std = c->initializer_range, residual_std = std / (float)sqrt(2.0 * (double)c->n_layer);
    block *b;
    FSDPI_NEW(b, 1);
    *b = (block){ model, layer };
    fsdp_module *child[4] = { NULL };
    fsdp_status st = fsdp_layer_norm(&child[LN_1], c->n_embd, c->layer_norm_epsilon);
    if (st == FSDP_OK) st = make_attention(&child[ATTN], c, std, residual_std);
    if (st == FSDP_OK) st = fsdp_layer_norm(&child[LN_2], c->n_embd, c->layer_norm_epsilon);
    if (st == FSDP_OK) st = make_mlp(&child[MLP], c, std, residual_std);
    st = group(out, "block", block_forward, b, free_block, child, (const char *const[]){ "ln_1", "attn", "ln_2", "mlp" }, 4);
    if (st != FSDP_OK) fsdpi_free(b);
    return st;
}

static fsdp_status make_blocks(fsdp_module **out, fsdp_model *model)
{
    int n = (int)model->config.n_layer;
    fsdp_module **child;
    FSDPI_NEW(child, n);
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < n && st == FSDP_OK; i++) st = make_block(&child[i], model, i);
    char(*text)[12] = fsdpi_calloc((size_t)n, sizeof(*text));
    const char **names = fsdpi_calloc((size_t)n, sizeof(*names));
    if (text == NULL || names == NULL) {
        for (int i = 0; i < n; i++) fsdp_module_destroy(child[i]);
        st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for %d blocks", n);
    } else {
        for (int i = 0; i < n; i++) {
            snprintf(text[i], sizeof(text[i]), "%d", i);
            names[i] = text[i];
        }
        st = group(out, "blocks", NULL, NULL, NULL, child, names, n);
    }
    fsdpi_free(names);
    fsdpi_free(text);
    fsdpi_free(child);
    return st;
}

static fsdp_status make_table(fsdp_module **out, int64_t rows, int64_t width, float std)
{
    FSDP_TRY(fsdp_embedding(out, rows, width));
    fsdpi_module_own_param(*out, 0)->normal_std = std;
    return FSDP_OK;
}

fsdp_status fsdp_model_create_gpt2(fsdp_model **out, const fsdp_gpt2_config *config)
{
    FSDP_TRY(check_config(config));
    fsdp_model *m;
    FSDPI_NEW(m, 1);
    m->config = *config;
    const fsdp_gpt2_config *c = &m->config;
    fsdp_module *child[5] = { NULL };
    fsdp_status st = make_table(&child[WTE], c->vocab_size, c->n_embd, c->initializer_range);
    if (st == FSDP_OK) st = make_table(&child[WPE], c->n_positions, c->n_embd, c->initializer_range);
    if (st == FSDP_OK) st = make_blocks(&child[H], m);
    if (st == FSDP_OK) st = fsdp_layer_norm(&child[LN_F], c->n_embd, c->layer_norm_epsilon);
    if (st == FSDP_OK) st = make_table(&child[LM_HEAD], c->vocab_size, c->n_embd, c->initializer_range);
    if (st == FSDP_OK && c->tie_word_embeddings) st = fsdp_module_share_param(child[LM_HEAD], 0, child[WTE], 0);
    st = group(&m->module, "gpt2", root_forward, m, NULL, child, (const char *const[]){ "wte", "wpe", "h", "ln_f", "lm_head" }, 5);
    if (st != FSDP_OK) {
        fsdpi_free(m);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    *out = m;
    return FSDP_OK;
}

void fsdp_model_destroy(fsdp_model *model)
{
    if (model == NULL) return;
    fsdp_module_destroy(model->module);
    fsdpi_free(model);
}

fsdp_module *fsdp_model_module(fsdp_model *model)
{
    return model->module;
}

const fsdp_gpt2_config *fsdp_model_gpt2_config(const fsdp_model *model)
{
    return &model->config;
}

fsdp_status fsdp_model_set_dropout(fsdp_model *model, float p)
{
    FSDP_FAIL_IF(!(p >= 0 && p < 1), FSDP_ERR_INVALID, "dropout %g: must be 0 or more, and less than 1", (double)p);
    model->config.resid_pdrop = model->config.embd_pdrop = model->config.attn_pdrop = p;
    return FSDP_OK;
}

fsdp_status fsdp_model_wrap(fsdp_model *model, const fsdp_wrap_opts *opts)
{
    FSDP_FAIL_IF(opts == NULL || opts->comm == NULL, FSDP_ERR_INVALID, "fsdp_model_wrap: no communicator");
    FSDP_FAIL_IF(model->comm != NULL, FSDP_ERR_STATE, "fsdp_model_wrap: the model is wrapped already");
    const fsdp_wrap_policy by_block = { .types = (const char *const[]){ "block" }, .type_count = 1 };
    fsdp_module *blocks = model->module->child[H];
    bool apart = opts->policy == NULL && opts->keep_whole_below == 0;
    for (int i = 0; i < blocks->children && apart; i++) {
        char name[32];
        snprintf(name, sizeof(name), "h.%d", i);
        fsdp_wrap_opts o = *opts;
        o.name = name;
        fsdp_module *same;
        FSDP_TRY(fsdp_wrap(&same, blocks->child[i], &o));
    }
    fsdp_wrap_opts o = *opts;
    o.name = "root";
    if (!apart && o.policy == NULL && blocks->children > 0) o.policy = &by_block; /* one unit for what all of them keep whole */
    FSDP_TRY(fsdp_wrap(&model->module, model->module, &o));
    model->comm = opts->comm;
    model->device = opts->compute_device != NULL ? opts->compute_device : fsdp_device_cpu();
    return FSDP_OK;
}

/* ---- use ---- */

static fsdp_status check_ids(const fsdp_model *model, const fsdp_tensor *ids, int64_t first)
{
    char text[128];
    FSDP_FAIL_IF(ids == NULL || ids->dtype != FSDP_I32 || ids->ndim != 2, FSDP_ERR_INVALID, "gpt2: ids must be i32 [B, T]");
    FSDP_FAIL_IF(first + ids->shape[1] > model->config.n_positions, FSDP_ERR_INVALID, "gpt2: ids are %s from position %lld, but the model has %lld positions",
                 fsdpi_shape_text(ids, text), (long long)first, (long long)model->config.n_positions);
    return FSDP_OK;
}

static fsdp_status run(fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor *labels, fsdpi_kv_cache *cache, fsdp_tensor **out)
{
    FSDP_TRY(check_ids(model, ids, cache != NULL ? cache->length : 0));
    model->labels = labels;
    model->cache = cache;
    fsdp_status st = fsdp_forward(model->module, tape, ids, out);
    model->labels = NULL;
    model->cache = NULL;
    return st;
}

fsdp_status fsdp_model_loss(fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor *labels, fsdp_tensor **loss)
{
    FSDP_FAIL_IF(labels == NULL || labels->dtype != FSDP_I32 || ids == NULL || labels->numel != ids->numel, FSDP_ERR_INVALID, "gpt2: labels must be i32, one for each id");
    return run(model, tape, ids, labels, NULL, loss);
}

fsdp_status fsdp_model_logits(fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor **logits)
{
    return run(model, tape, ids, NULL, NULL, logits);
}

fsdp_status fsdpi_gpt2_extend(fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdpi_kv_cache *cache, fsdp_tensor **scores)
{
    FSDP_TRY(run(model, tape, ids, NULL, cache, scores));
    cache->length += ids->shape[1];
    return FSDP_OK;
}

double fsdp_model_flops(const fsdp_model *model, int64_t tokens, int64_t seq)
{
    const fsdp_gpt2_config *c = &model->config;
    double C = (double)c->n_embd, inner = (double)(c->n_inner > 0 ? c->n_inner : 4 * c->n_embd);
    double layer = 2 * (4 * C * C + 2 * C * inner) + 2 * (double)seq * C; /* causal: half of 4 T C */
    double forward = (double)c->n_layer * layer + 2 * C * (double)c->vocab_size;
    return 3 * forward * (double)tokens;
}
