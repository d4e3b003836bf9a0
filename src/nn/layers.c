/* SPDX-License-Identifier: MIT
 *
 * Layers: each an operation with its parameters. */
#include "nn/module.h"

#include "base/alloc.h"
#include "ops/ops.h"

#include <math.h>
#include <stdio.h>

static void free_ctx(void *ctx)
{
    fsdpi_free(ctx);
}

/* A module with a copy of its settings. */
static fsdp_status make(fsdp_module **out, const char *type, fsdp_module_forward_fn forward, void *settings)
{
    fsdp_module_opts o = { .type = type, .forward = forward, .ctx = settings, .destroy = free_ctx };
    fsdp_status st = fsdp_module_create(out, &o);
    if (st != FSDP_OK) fsdpi_free(settings);
    return st;
}

static fsdp_status add(fsdp_module *m, fsdp_param p, fsdp_param_init init, float scale)
{
    fsdp_status st = fsdp_module_add_param(m, &p, init, scale);
    if (st != FSDP_OK) fsdp_module_destroy(m);
    return st;
}

/* ---- linear ---- */

static fsdp_status linear_forward(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    const fsdp_linear_opts *o = ctx;
    return fsdp_op_linear(tape, in, fsdp_module_param(m, 0), fsdp_module_param(m, 1), &(fsdp_op_linear_opts){ .in_out = o->in_out, .activation = o->activation },
                          out);
}

fsdp_status fsdp_linear(fsdp_module **out, int64_t in, int64_t outputs, const fsdp_linear_opts *opts)
{
    FSDP_TRY(fsdpi_check_activation("fsdp_linear", opts != NULL ? opts->activation : FSDP_ACT_NONE));
    FSDP_FAIL_IF(in < 1 || outputs < 1, FSDP_ERR_INVALID, "fsdp_linear: %lld inputs and %lld outputs: at least 1 of each", (long long)in, (long long)outputs);
    fsdp_linear_opts *o;
    FSDPI_NEW(o, 1);
    if (opts != NULL) *o = *opts;
    bool bias = o->bias, in_out = o->in_out;
    fsdp_module *m;
    FSDP_TRY(make(&m, "linear", linear_forward, o));
    float bound = (float)(1.0 / sqrt((double)in));
    fsdp_param weight = { .name = "weight", .ndim = 2, .shape = { in_out ? in : outputs, in_out ? outputs : in } };
    FSDP_TRY(add(m, weight, FSDP_PARAM_UNIFORM, bound));
    if (bias) FSDP_TRY(add(m, (fsdp_param){ .name = "bias", .ndim = 1, .shape = { outputs } }, FSDP_PARAM_UNIFORM, bound));
    *out = m;
    return FSDP_OK;
}

/* ---- embedding ---- */

static fsdp_status embedding_forward(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    (void)ctx;
    return fsdp_op_embedding(tape, in, fsdp_module_param(m, 0), NULL, 0, out);
}

fsdp_status fsdp_embedding(fsdp_module **out, int64_t rows, int64_t width)
{
    FSDP_FAIL_IF(rows < 1 || width < 1, FSDP_ERR_INVALID, "fsdp_embedding: %lld rows of %lld: at least 1 of each", (long long)rows, (long long)width);
    fsdp_module *m;
    FSDP_TRY(make(&m, "embedding", embedding_forward, NULL));
    FSDP_TRY(add(m, (fsdp_param){ .name = "weight", .ndim = 2, .shape = { rows, width } }, FSDP_PARAM_NORMAL, 1.0f));
    *out = m;
    return FSDP_OK;
}

/* ---- layer norm ---- */

static fsdp_status layer_norm_forward(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    return fsdp_op_layer_norm(tape, in, fsdp_module_param(m, 0), fsdp_module_param(m, 1), *(float *)ctx, out);
}

fsdp_status fsdp_layer_norm(fsdp_module **out, int64_t width, float eps)
{
    FSDP_FAIL_IF(width < 1 || !(eps >= 0), FSDP_ERR_INVALID, "fsdp_layer_norm: width %lld, eps %g", (long long)width, (double)eps);
    float *e;
    FSDPI_NEW(e, 1);
    *e = eps > 0 ? eps : 1e-5f;
    fsdp_module *m;
    FSDP_TRY(make(&m, "layer_norm", layer_norm_forward, e));
    FSDP_TRY(add(m, (fsdp_param){ .name = "weight", .ndim = 1, .shape = { width } }, FSDP_PARAM_ONES, 0));
    FSDP_TRY(add(m, (fsdp_param){ .name = "bias", .ndim = 1, .shape = { width } }, FSDP_PARAM_ZEROS, 0));
    *out = m;
    return FSDP_OK;
}

fsdp_status fsdpi_layer_norm_residual(fsdp_module *m, fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *residual, fsdp_tensor **sum, fsdp_tensor **y)
{
    fsdp_tensor *w = fsdp_module_param(m, 0), *b = fsdp_module_param(m, 1);
    float eps = *(float *)m->ctx;
    FSDP_TRY(fsdpi_module_enter(m, tape));
    if (residual != NULL) {
        FSDP_TRY(fsdp_op_add_layer_norm(tape, x, residual, w, b, eps, sum, y));
    } else {
        FSDP_TRY(fsdp_op_layer_norm(tape, x, w, b, eps, y));
        *sum = x;
    }
    return fsdpi_module_leave(m, tape);
}

/* ---- without parameters ---- */

static fsdp_status activation_forward(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    (void)m;
    return fsdp_op_activation(tape, in, *(fsdp_activation *)ctx, out);
}

fsdp_status fsdp_activation_module(fsdp_module **out, fsdp_activation activation)
{
    fsdp_activation *a;
    FSDP_TRY(fsdpi_check_activation("fsdp_activation_module", activation));
    FSDPI_NEW(a, 1);
    *a = activation;
    return make(out, "activation", activation_forward, a);
}

static fsdp_status dropout_forward(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    (void)m;
    return fsdp_op_dropout(tape, in, *(float *)ctx, out);
}

fsdp_status fsdp_dropout(fsdp_module **out, float p)
{
    FSDP_FAIL_IF(!(p >= 0 && p < 1), FSDP_ERR_INVALID, "fsdp_dropout: p is %g: must be 0 or more, and less than 1", (double)p);
    float *copy;
    FSDPI_NEW(copy, 1);
    *copy = p;
    return make(out, "dropout", dropout_forward, copy);
}

/* ---- sequential: what is between two children goes when the next one has it ---- */

static fsdp_status sequential_forward(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    (void)ctx;
    fsdp_tensor *x = in;
    for (int i = 0; i < m->children; i++) {
        fsdp_tensor *y;
        FSDP_TRY(fsdp_forward(m->child[i], tape, x, &y));
        if (x != in && x != y) fsdp_tensor_release(x);
        x = y;
    }
    *out = x;
    return FSDP_OK;
}

fsdp_status fsdp_sequential(fsdp_module **out, fsdp_module *const *children, int count)
{
    FSDP_FAIL_IF(count < 0 || count > 10000 || (count > 0 && children == NULL), FSDP_ERR_INVALID, "fsdp_sequential: %d children", count);
    char(*text)[12];
    const char **names;
    FSDPI_NEW(text, count);
    names = fsdpi_calloc((size_t)count, sizeof(*names));
    fsdp_status st = names != NULL ? FSDP_OK : fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory for a module");
    for (int i = 0; i < count && st == FSDP_OK; i++) {
        snprintf(text[i], sizeof(text[i]), "%d", i);
        names[i] = text[i];
    }
    fsdp_module_opts o = { .type = "sequential", .forward = sequential_forward, .children = children, .names = names, .child_count = count };
    if (st == FSDP_OK) st = fsdp_module_create(out, &o);
    fsdpi_free(names);
    fsdpi_free(text);
    return st;
}
