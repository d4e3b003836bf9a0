/* SPDX-License-Identifier: MIT
 *
 * Generation: the prompt in one go, then a token at a time against cached keys and values. */
#include "models/model.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/runtime.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void free_cache(fsdpi_kv_cache *c, int64_t layers)
{
    for (int64_t i = 0; i < layers; i++) {
        if (c->k != NULL) fsdpi_storage_release(c->k[i]);
        if (c->v != NULL) fsdpi_storage_release(c->v[i]);
    }
    fsdpi_free(c->k);
    fsdpi_free(c->v);
}

static fsdp_status make_cache(fsdpi_kv_cache *c, fsdp_model *m)
{
    fsdpi_runtime *rt;
    fsdpi_devctx *ctx;
    FSDP_TRY(fsdpi_runtime_of(&rt, m->comm));
    FSDP_TRY(fsdpi_runtime_device(&ctx, rt, m->device));
    c->room = m->config.n_positions;
    FSDPI_NEW(c->k, m->config.n_layer);
    FSDPI_NEW(c->v, m->config.n_layer);
    size_t bytes = (size_t)(c->room * m->config.n_embd) * sizeof(float);
    for (int64_t i = 0; i < m->config.n_layer; i++) {
        FSDP_TRY(fsdpi_storage_create(&c->k[i], ctx->arena, bytes));
        FSDP_TRY(fsdpi_storage_create(&c->v[i], ctx->arena, bytes));
    }
    return FSDP_OK;
}

/* Scores of the position after `count` new tokens. */
static fsdp_status extend(fsdp_model *m, fsdpi_kv_cache *cache, const int32_t *token, int64_t count, float *scores)
{
    fsdp_tape *tape;
    fsdp_tensor *ids, *out;
    FSDP_TRY(fsdp_tape_begin_with(&tape, m->comm, &(fsdp_tape_opts){ .eval = true, .device = m->device }));
    fsdp_status st = fsdp_tensor_from_i32(&ids, tape, token, 2, (int64_t[]){ 1, count });
    if (st == FSDP_OK) st = fsdpi_gpt2_extend(m, tape, ids, cache, &out);
    if (st == FSDP_OK) st = fsdp_tensor_to_f32(out, scores);
    fsdp_status end = st == FSDP_OK ? fsdp_tape_end(tape) : fsdp_tape_cancel(tape);
    return st != FSDP_OK ? st : end;
}

/* ---- choosing ---- */

typedef struct candidate {
    float score;
    int32_t token;
} candidate;

/* Best first; equal scores in the order of tokens, so that the choice does not depend on the sort. */
static int by_score(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? 1 : -1;
    return (x->token > y->token) - (x->token < y->token);
}

static int32_t choose(candidate *c, int64_t vocab, const float *scores, const fsdp_generate_opts *o, fsdp_rng *rng)
{
    for (int64_t i = 0; i < vocab; i++) c[i] = (candidate){ scores[i], (int32_t)i };
    qsort(c, (size_t)vocab, sizeof(*c), by_score);
    if (o->temperature <= 0) return c[0].token;
    int64_t k = o->top_k > 0 && o->top_k < vocab ? o->top_k : vocab;
    double total = 0, at;
    for (int64_t i = 0; i < k; i++) total += exp(((double)c[i].score - (double)c[0].score) / (double)o->temperature);
    at = (double)fsdp_rng_uniform(rng) * total;
    for (int64_t i = 0; i < k; i++) {
        at -= exp(((double)c[i].score - (double)c[0].score) / (double)o->temperature);
        if (at < 0) return c[i].token;
    }
    return c[k - 1].token;
}

/* ---- the loop ---- */

typedef struct generation {
    fsdp_model *m;
    fsdpi_kv_cache cache;
    int32_t *context; /* the latest tokens, at most n_positions */
    int64_t count;
    float *scores;
    candidate *candidates;
} generation;

/* Adds the tokens that are not in the cache yet; where the context is full, begins again from its last half. */
static fsdp_status advance(generation *g)
{
    int64_t room = g->m->config.n_positions;
    if (g->count > room) {
        int64_t keep = room > 1 ? room / 2 : 1;
        memmove(g->context, g->context + g->count - keep, (size_t)keep * sizeof(*g->context));
        g->count = keep;
        g->cache.length = 0;
    }
    return extend(g->m, &g->cache, g->context + g->cache.length, g->count - g->cache.length, g->scores);
}

static fsdp_status check_scores(const generation *g, int64_t made)
{
    for (int64_t i = 0; i < g->m->config.vocab_size; i++)
        FSDP_FAIL_IF(!isfinite(g->scores[i]), FSDP_ERR_NONFINITE,
                     "generation: after %lld tokens the model's scores are not numbers (that of token %lld is %g): its training has diverged, or its file is damaged",
                     (long long)made, (long long)i, (double)g->scores[i]);
    return FSDP_OK;
}

static fsdp_status loop(generation *g, const fsdp_generate_opts *o, fsdp_token_fn fn, void *arg)
{
    fsdp_rng rng;
    fsdp_rng_init(&rng, o->seed);
    for (int64_t i = 0; i < o->tokens; i++) {
        FSDP_TRY(advance(g));
        FSDP_TRY(check_scores(g, i));
        int32_t token = choose(g->candidates, g->m->config.vocab_size, g->scores, o, &rng);
        if (fn != NULL) FSDP_TRY(fn(token, arg));
        g->context[g->count++] = token;
    }
    return FSDP_OK;
}

static fsdp_status check(const fsdp_model *m, const int32_t *prompt, int64_t count, const fsdp_generate_opts *o)
{
    FSDP_FAIL_IF(m->comm == NULL, FSDP_ERR_STATE, "fsdp_model_generate: the model is not wrapped: nothing holds its parameters");
    FSDP_FAIL_IF(count < 1, FSDP_ERR_INVALID, "fsdp_model_generate: the prompt is empty: it needs at least one token");
    FSDP_FAIL_IF(o == NULL || o->tokens < 0 || !(o->temperature >= 0) || o->top_k < 0, FSDP_ERR_INVALID,
                 "fsdp_model_generate: tokens, temperature and top_k must be 0 or more");
    for (int64_t i = 0; i < count; i++)
        FSDP_FAIL_IF(prompt[i] < 0 || prompt[i] >= m->config.vocab_size, FSDP_ERR_INVALID, "fsdp_model_generate: token %d at place %lld of the prompt: the vocabulary has %lld",
                     prompt[i], (long long)i, (long long)m->config.vocab_size);
    return FSDP_OK;
}

fsdp_status fsdp_model_generate(fsdp_model *model, const int32_t *prompt, int64_t count, const fsdp_generate_opts *opts, fsdp_token_fn fn, void *arg)
{
    FSDP_TRY(check(model, prompt, count, opts));
    generation g = { .m = model };
    int64_t room = model->config.n_positions, keep = count < room ? count : room;
    g.context = fsdpi_calloc((size_t)room + 1, sizeof(*g.context));
    g.scores = fsdpi_calloc((size_t)model->config.vocab_size, sizeof(*g.scores));
    g.candidates = fsdpi_calloc((size_t)model->config.vocab_size, sizeof(*g.candidates));
    fsdp_status st = FSDP_OK;
    if (g.context == NULL || g.scores == NULL || g.candidates == NULL)
        st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to generate from a vocabulary of %lld", (long long)model->config.vocab_size);
    if (st == FSDP_OK) {
        memcpy(g.context, prompt + (count - keep), (size_t)keep * sizeof(*prompt));
        g.count = keep;
        st = make_cache(&g.cache, model);
    }
    if (st == FSDP_OK) st = loop(&g, opts, fn, arg);
    free_cache(&g.cache, model->config.n_layer);
    fsdpi_free(g.context);
    fsdpi_free(g.scores);
    fsdpi_free(g.candidates);
    return st;
}
