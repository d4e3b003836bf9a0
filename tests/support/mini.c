/* SPDX-License-Identifier: MIT */
#include "support/mini.h"
#include "support/testing.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_PARAMS = 3 };

static const struct {
    const char *name;
    fsdp_param param[MOST_PARAMS];
    int count;
} units[MINI_UNITS] = {
    { "root", { { "root.w", 2, { 5, 3 } }, { "root.s", 0, { 0 } } }, 2 },
    { "a", { { "a.w", 2, { 6, 6 } }, { "a.b", 1, { 6 } } }, 2 },
    { "b", { { "b.w", 2, { 6, 6 } }, { "b.b", 1, { 6 } } }, 2 },
    { "tiny", { { "tiny.g", 1, { 1 } } }, 1 },
    { "none", { { NULL, 0, { 0 } } }, 0 },
    { "big", { { "big.w", 2, { 37, 11 } }, { "big.e", 1, { 0 } }, { "big.b", 1, { 37 } } }, 3 },
};

/* In [-1, 1), from integers. */
static float noise(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t h = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h = (h ^ h >> 12) * 0x297a2d39u;
    return (float)(int32_t)(h ^ h >> 15) * 0x1p-31f;
}

static uint32_t hash(const char *name)
{
    uint32_t h = 2166136261u;
    for (; *name != '\0'; name++) h = (h ^ (unsigned char)*name) * 16777619u;
    return h;
}

float mini_value(const char *name, int64_t i)
{
    return 0.5f * noise(hash(name), (uint32_t)i, 1);
}

static void init(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = mini_value(name, i);
}

typedef struct args {
    float *number;
    int64_t leaf;
    int count, unit;
    int64_t numel[MOST_PARAMS];
    const float *p[MOST_PARAMS];
    float *g[MOST_PARAMS], beta[MOST_PARAMS];
} args;

static void mix(float *number, const float *p, int64_t numel, int64_t leaf, int i)
{
    float n = *number;
    for (int64_t j = 0; j < numel; j++) n = 0.9f * n + p[j] * noise((uint32_t)leaf, (uint32_t)i, (uint32_t)j);
    *number = n;
}

static void add_gradient(float *g, bool add, float number, const float *p, int64_t numel, int64_t leaf, int unit, int i)
{
    for (int64_t j = 0; j < numel; j++)
        g[j] = (add ? g[j] : 0) + number * noise((uint32_t)leaf, (uint32_t)(16 * unit + i), (uint32_t)j) + 0.125f * p[j];
}

static fsdp_status k_forward(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    for (int i = 0; i < a->count; i++) mix(a->number, fsdp_kernel_ptr(k, a->p[i]), a->numel[i], a->leaf, i);
    *a->number += 0.25f;
    return FSDP_OK;
}

static fsdp_status k_backward(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    for (int i = 0; i < a->count; i++)
        if (a->g[i] != NULL)
            add_gradient(fsdp_kernel_ptr(k, a->g[i]), a->beta[i] != 0, *a->number, fsdp_kernel_ptr(k, a->p[i]), a->numel[i], a->leaf, a->unit, i);
    *a->number *= 0.75f;
    return FSDP_OK;
}

/* grads: of how many parameters to write the gradients; -1: a forward. */
static fsdp_status launch(mini *m, int unit, int64_t leaf, int grads)
{
    args a = { .number = &m->number[leaf % MINI_LEAVES], .leaf = leaf, .count = units[unit].count, .unit = unit };
    for (int i = 0; i < a.count; i++) {
        a.numel[i] = fsdp_unit_param_numel(m->unit[unit], i);
        a.p[i] = fsdp_unit_param(m->unit[unit], i);
        if (a.p[i] == NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "mini: %s", fsdp_last_error_message());
        if (i >= grads || fsdp_unit_frozen(m->unit[unit], i)) continue;
        a.g[i] = fsdp_unit_grad(m->unit[unit], i, &a.beta[i]);
        if (a.g[i] == NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "mini: %s", fsdp_last_error_message());
    }
    return fsdp_stream_launch(fsdp_unit_stream(m->unit[unit]), grads < 0 ? k_forward : k_backward, &a, sizeof(a));
}

static fsdp_status begin_forward(mini *m, fsdp_pass *pass, int u, int64_t leaf)
{
    FSDP_TRY(fsdp_unit_begin_forward(m->unit[u], pass));
    return launch(m, u, leaf, -1);
}

static fsdp_status begin_backward(mini *m, fsdp_pass *pass, int u, int64_t leaf, int grads)
{
    FSDP_TRY(fsdp_unit_begin_backward(m->unit[u], pass));
    return launch(m, u, leaf, grads);
}

fsdp_status mini_run(mini *m, fsdp_pass *pass, const char *script, int64_t leaf)
{
    for (const char *s = script; *s != '\0'; s++) {
        if (*s == ' ') continue;
        char what = *s++;
        int u = *s - '0', grads = what == 'P' ? 1 : what == 'N' ? 0 : MOST_PARAMS;
        FSDP_FAIL_IF(u < 0 || u >= MINI_UNITS, FSDP_ERR_INTERNAL, "mini: no unit %c in script %s", *s, script);
        if (what == '[' || what == 'F') FSDP_TRY(begin_forward(m, pass, u, leaf));
        if (what == ']' || what == 'F') FSDP_TRY(fsdp_unit_end_forward(m->unit[u], pass));
        if (strchr("{BPN", what) != NULL) FSDP_TRY(begin_backward(m, pass, u, leaf, grads));
        if (strchr("}BPN", what) != NULL) FSDP_TRY(fsdp_unit_end_backward(m->unit[u], pass));
    }
    return FSDP_OK;
}

fsdp_status mini_leaf(mini *m, const char *script, int64_t leaf)
{
    /* A number is used again long after its kernels have run. */
    FSDP_TRY(fsdp_pass_begin(&m->pass, m->comm, FSDP_PASS_TRAIN));
    if (m->no_sync) FSDP_TRY(fsdp_pass_set_sync(m->pass, false));
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m->unit[0])));
    m->number[leaf % MINI_LEAVES] = 0;
    FSDP_TRY(mini_run(m, m->pass, script, leaf));
    FSDP_TRY(fsdp_pass_end(m->pass));
    m->pass = NULL;
    return FSDP_OK;
}

fsdp_status mini_step(mini *m, const char *script, int64_t step, int leaves)
{
    for (int leaf = fsdp_comm_rank(m->comm); leaf < leaves; leaf += fsdp_comm_size(m->comm))
        FSDP_TRY(mini_leaf(m, script, step * leaves + leaf));
    return fsdp_optim_step(m->optim, &(fsdp_step_opts){ .grad_scale = 1.0f / (float)leaves, .clip = 1.0f });
}

fsdp_unit_list mini_list(const mini *m)
{
    return (fsdp_unit_list){ m->unit, MINI_UNITS };
}

fsdp_status mini_freeze(mini *m, int unit, bool frozen)
{
    for (int i = 0; i < units[unit].count; i++) FSDP_TRY(fsdp_unit_set_frozen(m->unit[unit], i, frozen));
    return FSDP_OK;
}

fsdp_status mini_create(mini *m, fsdp_comm *comm, const mini_opts *opts)
{
    static const mini_opts usual = { 0 };
    if (opts == NULL) opts = &usual;
    *m = (mini){ .comm = comm, .number = calloc(MINI_LEAVES, sizeof(*m->number)) };
    FSDP_FAIL_IF(m->number == NULL, FSDP_ERR_NOMEM, "mini");
    FSDP_TRY(fsdp_device_open(&m->device, opts->device != NULL ? opts->device : "cpu"));
    if (opts->storage != NULL) FSDP_TRY(fsdp_device_open(&m->storage, opts->storage));
    bool own = opts->grads != NULL && strcmp(opts->grads, opts->device != NULL ? opts->device : "cpu") != 0; /* than the compute device */
    if (own) FSDP_TRY(fsdp_device_open(&m->grads, opts->grads));
    for (int u = 0; u < MINI_UNITS; u++) {
        fsdp_unit_opts uo = { .name = units[u].name, .mode = opts->mode, .shards = opts->shards, .param_dtype = opts->param_dtype, .reduce_dtype = opts->reduce_dtype, .grad_dtype = opts->grad_dtype,
                               .exact_eval = opts->exact_eval, .reshard_group = opts->reshard_group, .storage_device = m->storage, .grad_device = own || opts->grads == NULL ? m->grads : m->device, .compute_device = m->device, .prefetch = opts->prefetch };
        FSDP_TRY(fsdp_unit_create(&m->unit[u], comm, units[u].param, units[u].count, &uo));
        FSDP_TRY(fsdp_unit_init(m->unit[u], init, NULL));
        if (opts->frozen >> u & 1) FSDP_TRY(mini_freeze(m, u, true));
    }
    if (opts->state != NULL) FSDP_TRY(fsdp_device_open(&m->state, opts->state));
    if (opts->sgd) return fsdp_optim_create_sgd(&m->optim, mini_list(m), &(fsdp_sgd_opts){ .lr = 0.05f, .momentum = 0.9f, .weight_decay = 0.01f, .state_device = m->state });
    return fsdp_optim_create_adamw(&m->optim, mini_list(m), &(fsdp_adamw_opts){ .lr = 0.02f, .weight_decay = 0.1f, .state_device = m->state });
}

void mini_destroy(mini *m)
{
    fsdp_optim_destroy(m->optim);
    for (int u = 0; u < MINI_UNITS; u++) fsdp_unit_destroy(m->unit[u]);
    fsdp_device_close(m->device);
    fsdp_device_close(m->storage);
    fsdp_device_close(m->grads);
    fsdp_device_close(m->state);
    free(m->number);
    *m = (mini){ 0 };
}

int mini_numel(void)
{
    return 5 * 3 + 1 + 2 * (6 * 6 + 6) + 1 + 37 * 11 + 37;
}

fsdp_status mini_read(mini *m, float *out)
{
    for (int u = 0; u < MINI_UNITS; u++)
        for (int i = 0; i < units[u].count; i++) {
            FSDP_TRY(fsdp_unit_read_param(m->unit[u], i, out));
            out += fsdp_unit_param_numel(m->unit[u], i);
        }
    return FSDP_OK;
}

/* ---- the plain one ---- */

enum { MOST_NUMEL = 512, MOST_ROUNDS = 4, MOST_RANKS = 8 };

typedef struct plain_unit {
    float p[MOST_PARAMS][MOST_NUMEL], v[MOST_PARAMS][MOST_NUMEL], window[MOST_PARAMS][MOST_NUMEL];
    float acc[MOST_ROUNDS][MOST_PARAMS][MOST_NUMEL];
    float unsent[MOST_RANKS][MOST_ROUNDS][MOST_PARAMS][MOST_NUMEL];
    bool has[MOST_ROUNDS], open, touched[MOST_PARAMS], has_unsent[MOST_RANKS][MOST_ROUNDS];
    bool frozen[MOST_PARAMS];
    int rounds, forwards, backwards, forward_open;
} plain_unit;

struct plain {
    plain_unit unit[MINI_UNITS];
    int rank; /* of the leaf that is being done */
    bool sync, nothing;
    fsdp_dtype grad_dtype;
};

static int64_t numel_of(int u, int i)
{
    int64_t n = 1;
    for (int d = 0; d < units[u].param[i].ndim; d++) n *= units[u].param[i].shape[d];
    return n;
}

plain *plain_create(void)
{
    plain *p = calloc(1, sizeof(*p));
    for (int u = 0; p != NULL && u < MINI_UNITS; u++)
        for (int i = 0; i < units[u].count; i++)
            for (int64_t j = 0; j < numel_of(u, i); j++) p->unit[u].p[i][j] = mini_value(units[u].param[i].name, j);
    return p;
}

void plain_set_grad_dtype(plain *p, fsdp_dtype t)
{
    p->grad_dtype = t;
}

void plain_destroy(plain *p)
{
    free(p);
}

static void plain_post(plain *p, plain_unit *x, int u)
{
    int r = x->rounds++;
    float(*own)[MOST_NUMEL] = x->unsent[p->rank][r];
    for (int i = 0; i < units[u].count; i++)
        for (int64_t j = 0; j < numel_of(u, i); j++) {
            float g = x->touched[i] && !p->nothing ? x->window[i][j] : 0;
            if (x->has_unsent[p->rank][r]) g = own[i][j] + g;
            if (!p->sync) own[i][j] = rounded_to(p->grad_dtype, g);
            else x->acc[r][i][j] = rounded_to(p->grad_dtype, x->has[r] ? x->acc[r][i][j] + g : g);
        }
    x->has_unsent[p->rank][r] = !p->sync;
    x->has[r] |= p->sync;
    x->open = false;
}

void plain_send(plain *p)
{
    for (int u = 0; u < MINI_UNITS; u++) {
        plain_unit *x = &p->unit[u];
        for (int r = 0; r < MOST_ROUNDS; r++)
            for (int rank = 0; rank < MOST_RANKS; rank++) {
                if (!x->has_unsent[rank][r]) continue;
                for (int i = 0; i < units[u].count; i++)
                    for (int64_t j = 0; j < numel_of(u, i); j++)
                        x->acc[r][i][j] = rounded_to(p->grad_dtype, x->has[r] ? x->acc[r][i][j] + x->unsent[rank][r][i][j] : x->unsent[rank][r][i][j]);
                x->has[r] = true;
                x->has_unsent[rank][r] = false;
            }
    }
}

static bool add_rounds(float acc[MOST_ROUNDS][MOST_PARAMS][MOST_NUMEL], const bool *has, int64_t numel, int i, float *out)
{
    bool any = false;
    for (int r = 0; r < MOST_ROUNDS; r++) {
        for (int64_t j = 0; j < numel && has[r]; j++) out[j] = any ? out[j] + acc[r][i][j] : acc[r][i][j];
        any |= has[r];
    }
    return any;
}

bool plain_own(const plain *p, int rank, int unit, int i, float *out)
{
    plain_unit *x = (plain_unit *)(uintptr_t)&p->unit[unit];
    return add_rounds(x->unsent[rank], x->has_unsent[rank], numel_of(unit, i), i, out);
}

bool plain_reduced(const plain *p, int unit, int i, float *out)
{
    plain_unit *x = (plain_unit *)(uintptr_t)&p->unit[unit];
    return add_rounds(x->acc, x->has, numel_of(unit, i), i, out);
}

void plain_zero_grad(plain *p)
{
    for (int u = 0; u < MINI_UNITS; u++) {
        memset(p->unit[u].has, 0, sizeof(p->unit[u].has));
        memset(p->unit[u].has_unsent, 0, sizeof(p->unit[u].has_unsent));
    }
}

static void plain_backward(plain_unit *x, int u, float *number, int64_t leaf, int grads)
{
    if (!x->open) memset(x->touched, 0, sizeof(x->touched));
    x->open = true;
    for (int i = 0; i < units[u].count && i < grads; i++) {
        if (x->frozen[i]) continue;
        add_gradient(x->window[i], x->touched[i], *number, x->p[i], numel_of(u, i), leaf, u, i);
        x->touched[i] = true;
    }
    *number *= 0.75f;
}

void plain_leaf(plain *p, const char *script, int64_t leaf)
{
    plain_leaf_of(p, script, leaf, 0, true);
}

void plain_nothing_of(plain *p, const char *script, int rank, bool sync)
{
    p->nothing = true;
    plain_leaf_of(p, script, 0, rank, sync);
    p->nothing = false;
}

void plain_leaf_of(plain *p, const char *script, int64_t leaf, int rank, bool sync)
{
    p->rank = rank;
    p->sync = sync;
    float number = 0;
    for (int u = 0; u < MINI_UNITS; u++) {
        plain_unit *x = &p->unit[u];
        x->rounds = x->forwards = x->backwards = x->forward_open = 0;
    }
    for (const char *s = script; *s != '\0'; s++) {
        if (*s == ' ') continue;
        char what = *s++;
        int u = *s - '0', grads = what == 'P' ? 1 : what == 'N' ? 0 : MOST_PARAMS;
        plain_unit *x = &p->unit[u];
        if (what == '[' || what == 'F') {
            for (int i = 0; i < units[u].count; i++) mix(&number, x->p[i], numel_of(u, i), leaf, i);
            number += 0.25f;
            x->forward_open++;
        }
        if (what == ']' || what == 'F') {
            x->forward_open--;
            x->forwards++;
        }
        if (strchr("{BPN", what) != NULL) plain_backward(x, u, &number, leaf, grads);
        if (strchr("}BPN", what) != NULL && ++x->backwards == x->forwards && x->forward_open == 0) plain_post(p, x, u);
    }
    for (int u = 0; u < MINI_UNITS; u++)
        if (p->unit[u].open) plain_post(p, &p->unit[u], u);
}

void plain_freeze(plain *p, int unit, int param, bool frozen)
{
    p->unit[unit].frozen[param] = frozen;
}

void plain_step(plain *p, float scale)
{
    plain_send(p);
    const float lr = 0.05f, momentum = 0.9f, decay = 0.01f;
    for (int u = 0; u < MINI_UNITS; u++) {
        plain_unit *x = &p->unit[u];
        for (int i = 0; i < units[u].count && x->has[0]; i++)
            for (int64_t j = 0; j < numel_of(u, i) && !x->frozen[i]; j++) {
                float g = x->acc[0][i][j];
                for (int r = 1; r < MOST_ROUNDS; r++)
                    if (x->has[r]) g += x->acc[r][i][j];
                x->v[i][j] = momentum * x->v[i][j] + (g * scale + decay * x->p[i][j]);
                x->p[i][j] -= lr * x->v[i][j];
            }
    }
    plain_zero_grad(p);
}

void plain_read(const plain *p, float *out)
{
    for (int u = 0; u < MINI_UNITS; u++)
        for (int i = 0; i < units[u].count; i++) {
            memcpy(out, p->unit[u].p[i], (size_t)numel_of(u, i) * sizeof(float));
            out += numel_of(u, i);
        }
}
