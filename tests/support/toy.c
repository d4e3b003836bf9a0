/* SPDX-License-Identifier: MIT */
#include "support/toy.h"

#include <stdlib.h>
#include <string.h>

enum { V = TOY_VOCAB, C = TOY_WIDTH, T = TOY_TOKENS, LAYERS = 3 };
enum { ROOT, L0, L1, TINY };

/* Host memory: kernels may use it on every device. Its content is what a leaf needs from forward to backward. */
typedef struct activations {
    int token[T + 1];
    float h[LAYERS + 2][T][C]; /* before each layer, after the last, after gain */
    float pre[LAYERS][T][C];
    float dlogits[T][V];
    float dh[T][C];
    double loss;
} activations;

struct toy_state {
    activations act;
};

/* What a kernel is launched with: parameters and gradients are device addresses. */
typedef struct args {
    activations *a;
    const float *p[2];
    float *g[2];
    float beta[2];
    int layer;
} args;

static const float *param(const fsdp_kernel *k, const args *a, int i)
{
    return fsdp_kernel_ptr(k, a->p[i]);
}

static fsdp_status k_embed(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    const float *emb = param(k, a, 0), *scale = param(k, a, 1);
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) a->a->h[0][t][c] = *scale * emb[a->a->token[t] * C + c];
    return FSDP_OK;
}

static fsdp_status k_layer(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    const float *w = param(k, a, 0), *b = param(k, a, 1);
    float (*x)[C] = a->a->h[a->layer], (*y)[C] = a->a->h[a->layer + 1], (*pre)[C] = a->a->pre[a->layer];
    for (int t = 0; t < T; t++)
        for (int o = 0; o < C; o++) {
            float s = b[o];
            for (int i = 0; i < C; i++) s += w[o * C + i] * x[t][i];
            pre[t][o] = s;
            y[t][o] = x[t][o] + (s > 0 ? s : 0);
        }
    return FSDP_OK;
}

static fsdp_status k_gain(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    float gain = *param(k, a, 0);
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) a->a->h[LAYERS + 1][t][c] = gain * a->a->h[LAYERS][t][c];
    return FSDP_OK;
}

static fsdp_status k_loss(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    const float *emb = param(k, a, 0);
    a->a->loss = 0;
    for (int t = 0; t < T; t++)
        for (int n = 0; n < V; n++) {
            float s = n == a->a->token[t + 1] ? -1.0f : 0.0f;
            for (int c = 0; c < C; c++) s += emb[n * C + c] * a->a->h[LAYERS + 1][t][c];
            a->a->dlogits[t][n] = s;
            a->a->loss += 0.5 * (double)s * (double)s;
        }
    return FSDP_OK;
}

/* d emb from the top, and dh. */
static fsdp_status k_loss_back(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    const float *emb = param(k, a, 0);
    float *demb = fsdp_kernel_ptr(k, a->g[0]);
    for (int n = 0; n < V; n++)
        for (int c = 0; c < C; c++) {
            float s = a->beta[0] != 0 ? demb[n * C + c] : 0;
            for (int t = 0; t < T; t++) s += a->a->dlogits[t][n] * a->a->h[LAYERS + 1][t][c];
            demb[n * C + c] = s;
        }
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) {
            float s = 0;
            for (int n = 0; n < V; n++) s += a->a->dlogits[t][n] * emb[n * C + c];
            a->a->dh[t][c] = s;
        }
    return FSDP_OK;
}

static fsdp_status k_gain_back(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    float gain = *param(k, a, 0), *dgain = fsdp_kernel_ptr(k, a->g[0]), s = a->beta[0] != 0 ? *dgain : 0;
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) {
            s += a->a->dh[t][c] * a->a->h[LAYERS][t][c];
            a->a->dh[t][c] *= gain;
        }
    *dgain = s;
    return FSDP_OK;
}

static fsdp_status k_layer_back(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    const float *w = param(k, a, 0);
    float *dw = fsdp_kernel_ptr(k, a->g[0]), *db = fsdp_kernel_ptr(k, a->g[1]);
    float (*x)[C] = a->a->h[a->layer], (*pre)[C] = a->a->pre[a->layer], dpre[T][C];
    for (int t = 0; t < T; t++)
        for (int o = 0; o < C; o++) dpre[t][o] = pre[t][o] > 0 ? a->a->dh[t][o] : 0;
    for (int o = 0; o < C; o++) {
        float s = a->beta[1] != 0 ? db[o] : 0;
        for (int t = 0; t < T; t++) s += dpre[t][o];
        db[o] = s;
        for (int i = 0; i < C; i++) {
            s = a->beta[0] != 0 ? dw[o * C + i] : 0;
            for (int t = 0; t < T; t++) s += dpre[t][o] * x[t][i];
            dw[o * C + i] = s;
        }
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < C; i++)
            for (int o = 0; o < C; o++) a->a->dh[t][i] += dpre[t][o] * w[o * C + i];
    return FSDP_OK;
}

static fsdp_status k_embed_back(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    const float *emb = param(k, a, 0), *scale = param(k, a, 1);
    float *demb = fsdp_kernel_ptr(k, a->g[0]), *dscale = fsdp_kernel_ptr(k, a->g[1]);
    if (a->beta[0] == 0) memset(demb, 0, V * C * sizeof(float));
    float s = a->beta[1] != 0 ? *dscale : 0;
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) {
            int at = a->a->token[t] * C + c;
            s += a->a->dh[t][c] * emb[at];
            demb[at] += *scale * a->a->dh[t][c];
        }
    *dscale = s;
    return FSDP_OK;
}

/* Launches a kernel with the unit's first `params` parameters and, in a backward, their gradients. */
static fsdp_status launch(toy *t, int unit, fsdp_kernel_fn fn, int layer, int params, int grads)
{
    args a = { .a = &t->state->act, .layer = layer };
    for (int i = 0; i < params; i++) {
        a.p[i] = fsdp_unit_param(t->unit[unit], i);
        if (a.p[i] == NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "toy: %s", fsdp_last_error_message());
    }
    for (int i = 0; i < grads; i++) {
        a.g[i] = fsdp_unit_grad(t->unit[unit], i, &a.beta[i]);
        if (a.g[i] == NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "toy: %s", fsdp_last_error_message());
    }
    return fsdp_stream_launch(fsdp_unit_stream(t->unit[unit]), fn, &a, sizeof(a));
}

static fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)param;
    fsdp_philox_normal_fill(*(uint64_t *)arg, name, first, numel, out);
    for (int64_t i = 0; i < numel; i++) out[i] = strstr(name, "scale") != NULL || strstr(name, "gain") != NULL ? 1 : 0.3f * out[i];
    return FSDP_OK;
}

fsdp_status toy_create(toy *t, fsdp_comm *comm, const toy_opts *o)
{
    static const fsdp_param root[] = { { "emb", 2, { V, C } }, { "scale", 0, { 0 } }, { "nothing", 1, { 0 } } };
    static const fsdp_param l0[] = { { "l0.w", 2, { C, C } }, { "l0.b", 1, { C } } };
    static const fsdp_param l1[] = { { "l1.w", 2, { C, C } }, { "l1.b", 1, { C } } };
    static const fsdp_param tiny[] = { { "gain", 1, { 1 } } };
    static const struct {
        const char *name;
        const fsdp_param *params;
        int count;
    } units[TOY_UNITS] = { { "root", root, 3 }, { "l0", l0, 2 }, { "l1", l1, 2 }, { "tiny", tiny, 1 } };
    *t = (toy){ .comm = comm, .state = calloc(1, sizeof(*t->state)) };
    FSDP_FAIL_IF(t->state == NULL, FSDP_ERR_NOMEM, "toy");
    FSDP_TRY(fsdp_device_open(&t->device, o->device != NULL ? o->device : "cpu"));
    uint64_t seed = o->seed;
    for (int u = 0; u < TOY_UNITS; u++) {
        fsdp_unit_opts uo = { .name = units[u].name, .mode = o->mode, .shards = o->shards, .compute_device = t->device, .prefetch = o->prefetch };
        FSDP_TRY(fsdp_unit_create(&t->unit[u], comm, units[u].params, units[u].count, &uo));
        FSDP_TRY(fsdp_unit_fill(t->unit[u], fill, &seed));
    }
    return FSDP_OK;
}

void toy_destroy(toy *t)
{
    for (int u = 0; u < TOY_UNITS; u++) fsdp_unit_destroy(t->unit[u]);
    fsdp_device_close(t->device);
    free(t->state);
}

static const int layer_unit[LAYERS] = { L0, L1, L1 };

static fsdp_status forward(toy *t, fsdp_pass *pass, int64_t leaf)
{
    activations *a = &t->state->act;
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(t->unit[ROOT]))); /* kernels of the leaf before may still read it */
    for (int i = 0; i <= T; i++) a->token[i] = (int)(fsdp_philox_uniform(7, "tokens", leaf * (T + 1) + i) * V);
    FSDP_TRY(fsdp_unit_begin_forward(t->unit[ROOT], pass));
    FSDP_TRY(launch(t, ROOT, k_embed, 0, 2, 0));
    for (int l = 0; l < LAYERS; l++) {
        fsdp_unit *u = t->unit[layer_unit[l]];
        FSDP_TRY(fsdp_unit_begin_forward(u, pass));
        FSDP_TRY(launch(t, layer_unit[l], k_layer, l, 2, 0));
        FSDP_TRY(fsdp_unit_end_forward(u, pass));
    }
    FSDP_TRY(fsdp_unit_begin_forward(t->unit[TINY], pass));
    FSDP_TRY(launch(t, TINY, k_gain, 0, 1, 0));
    FSDP_TRY(fsdp_unit_end_forward(t->unit[TINY], pass));
    FSDP_TRY(launch(t, ROOT, k_loss, 0, 1, 0));
    return fsdp_unit_end_forward(t->unit[ROOT], pass);
}

static fsdp_status backward(toy *t, fsdp_pass *pass)
{
    FSDP_TRY(fsdp_unit_begin_backward(t->unit[ROOT], pass));
    FSDP_TRY(launch(t, ROOT, k_loss_back, 0, 1, 1));
    FSDP_TRY(fsdp_unit_begin_backward(t->unit[TINY], pass));
    FSDP_TRY(launch(t, TINY, k_gain_back, 0, 1, 1));
    FSDP_TRY(fsdp_unit_end_backward(t->unit[TINY], pass));
    for (int l = LAYERS - 1; l >= 0; l--) {
        fsdp_unit *u = t->unit[layer_unit[l]];
        FSDP_TRY(fsdp_unit_begin_backward(u, pass));
        FSDP_TRY(launch(t, layer_unit[l], k_layer_back, l, 2, 2));
        FSDP_TRY(fsdp_unit_end_backward(u, pass));
    }
    FSDP_TRY(launch(t, ROOT, k_embed_back, 0, 2, 2));
    return fsdp_unit_end_backward(t->unit[ROOT], pass);
}

fsdp_status toy_leaf_open(toy *t, int64_t leaf, fsdp_pass **pass)
{
    FSDP_TRY(fsdp_pass_begin(pass, t->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(forward(t, *pass, leaf));
    return backward(t, *pass);
}

fsdp_status toy_leaf(toy *t, int64_t leaf, double *loss)
{
    fsdp_pass *pass;
    FSDP_TRY(toy_leaf_open(t, leaf, &pass));
    FSDP_TRY(fsdp_pass_end(pass));
    if (loss == NULL) return FSDP_OK;
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(t->unit[ROOT])));
    *loss = t->state->act.loss;
    return FSDP_OK;
}

fsdp_status toy_eval(toy *t, int64_t leaf, double *loss)
{
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, t->comm, FSDP_PASS_EVAL));
    FSDP_TRY(forward(t, pass, leaf));
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(t->unit[ROOT])));
    *loss = t->state->act.loss;
    return FSDP_OK;
}

fsdp_status toy_step(toy *t, fsdp_optim *optim, int64_t step, int leaves, double *loss, double *norm)
{
    double each[64] = { 0 };
    int rank = fsdp_comm_rank(t->comm), size = fsdp_comm_size(t->comm);
    fsdp_comm_set_step(t->comm, step);
    for (int leaf = rank; leaf < leaves; leaf += size) FSDP_TRY(toy_leaf(t, step * leaves + leaf, &each[leaf]));
    FSDP_TRY(fsdp_comm_sum_exact(t->comm, each, leaves));
    *loss = 0;
    for (int i = 0; i < leaves; i++) *loss += each[i];
    return fsdp_optim_step(optim, &(fsdp_step_opts){ .grad_scale = 1.0f / (float)leaves, .clip = 0.5f, .norm = norm });
}

fsdp_unit_list toy_list(const toy *t)
{
    return (fsdp_unit_list){ t->unit, TOY_UNITS };
}

int toy_numel(void)
{
    return V * C + 1 + 2 * (C * C + C) + 1;
}

fsdp_status toy_read(toy *t, float *out)
{
    for (int u = 0; u < TOY_UNITS; u++)
        for (int i = 0; i < fsdp_unit_param_count(t->unit[u]); i++) {
            FSDP_TRY(fsdp_unit_read_param(t->unit[u], i, out));
            out += fsdp_unit_param_numel(t->unit[u], i);
        }
    return FSDP_OK;
}
