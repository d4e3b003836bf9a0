/* SPDX-License-Identifier: MIT
 *
 * Layer normalisation (Ba, Kiros, Hinton, 2016), alone or of a sum that it makes in the same pass. With
 * s = x + residual, h = (s - mean) rstd:  y = h weight + bias,
 *   ds = rstd (g - mean(g) - h mean(g h)) + (the gradient that reaches s directly),  g = dy weight. */
#include "ops/ops.h"

#include "base/alloc.h"

typedef struct attributes {
    int64_t M, C;
    bool residual;
} attributes;

enum { SAVED_X, SAVED_MEAN, SAVED_RSTD, SAVED_WEIGHT };
enum { IN_X, IN_RESIDUAL, IN_WEIGHT, IN_BIAS };

/* The gradient of the sum goes to both terms; where nothing else holds what reached the sum directly, it becomes it. */
static fsdp_status sum_gradient(fsdp_tape *tape, fsdp_tensor *sum, int64_t numel, fsdpi_layer_norm_backward_args *a, fsdpi_storage **ds)
{
    a->dsum = fsdpi_grad_of(sum);
    if (sum->grad != NULL && sum->grad->refs == 1) *ds = fsdpi_storage_retain(sum->grad);
    else FSDP_TRY(fsdpi_storage_create(ds, tape->arena, (size_t)numel * sizeof(float)));
    a->dx = (*ds)->data;
    return FSDP_OK;
}

static fsdp_status launch_backward(fsdp_tape *tape, fsdpi_node *n, fsdpi_layer_norm_backward_args *a)
{
    FSDP_TRY(fsdpi_saved(tape, n, SAVED_WEIGHT, n->in[IN_WEIGHT], &a->weight));
    FSDP_TRY(fsdpi_grad_into(tape, n->in[IN_WEIGHT], &a->dweight, &a->dweight_beta));
    FSDP_TRY(fsdpi_grad_into(tape, n->in[IN_BIAS], &a->dbias, &a->dbias_beta));
    FSDP_TRY(fsdpi_scratch(tape, fsdpi_layer_norm_backward_scratch(a, fsdpi_threads_of(tape)), &a->scratch));
    fsdp_status st = FSDPI_LAUNCH(tape, layer_norm_backward, a);
    fsdpi_scratch_free(tape, a->scratch);
    return st;
}

static fsdp_status backward(fsdp_tape *tape, fsdpi_node *n)
{
    const attributes *at = n->attributes;
    fsdp_tensor *y = n->out[0], *sum = n->out[1];
    fsdpi_layer_norm_backward_args a = { .dy = fsdpi_grad_of(y), .mean = n->saved[SAVED_MEAN]->data,
                                         .rstd = n->saved[SAVED_RSTD]->data, .M = at->M, .C = at->C };
    FSDP_TRY(fsdpi_saved(tape, n, SAVED_X, n->in[IN_X], &a.x));
    if (!at->residual) {
        void *unwanted = NULL;
        FSDP_TRY(fsdpi_grad_into(tape, n->in[IN_X], &a.dx, &a.dx_beta));
        /* The kernel writes dx in any case; where the input is data, nobody wants it. */
        if (a.dx == NULL) FSDP_TRY(fsdpi_scratch(tape, (size_t)(at->M * at->C) * sizeof(float), &unwanted));
        if (unwanted != NULL) a.dx = unwanted;
        fsdp_status done = launch_backward(tape, n, &a);
        fsdpi_scratch_free(tape, unwanted);
        return done;
    }
    if (a.dy == NULL) { /* the norm was not used, only the sum */
        FSDP_TRY(fsdpi_grad_share(tape, n->in[IN_X], sum->grad));
        return fsdpi_grad_share(tape, n->in[IN_RESIDUAL], sum->grad);
    }
    fsdpi_storage *ds = NULL;
    fsdp_status st = sum_gradient(tape, sum, at->M * at->C, &a, &ds);
    if (st == FSDP_OK) st = launch_backward(tape, n, &a);
    if (st == FSDP_OK) {
        fsdpi_storage_release(sum->grad); /* so that the terms' gradients can be added to in place */
        sum->grad = NULL;
        st = fsdpi_grad_share(tape, n->in[IN_X], ds);
    }
    if (st == FSDP_OK) st = fsdpi_grad_share(tape, n->in[IN_RESIDUAL], ds);
    fsdpi_storage_release(ds);
    return st;
}

static fsdp_status check(const fsdp_tape *tape, const fsdp_tensor *x, const fsdp_tensor *r, const fsdp_tensor *w, const fsdp_tensor *b)
{
    FSDP_TRY(fsdpi_check_tensor(tape, "layer_norm", "the input", x, FSDP_F32));
    FSDP_FAIL_IF(x->ndim < 1, FSDP_ERR_INVALID, "layer_norm: the input has no dimensions");
    int64_t C = fsdp_tensor_shape(x, -1);
    FSDP_TRY(fsdpi_check_vector(tape, "layer_norm", "the weight", w, C));
    if (b != NULL) FSDP_TRY(fsdpi_check_vector(tape, "layer_norm", "the bias", b, C));
    if (r == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_check_tensor(tape, "layer_norm", "the residual", r, FSDP_F32));
    char tx[128], tr[128];
    FSDP_FAIL_IF(r->numel != x->numel || fsdp_tensor_shape(r, -1) != C, FSDP_ERR_INVALID, "layer_norm: input %s and residual %s are of different shapes",
                 fsdpi_shape_text(x, tx), fsdpi_shape_text(r, tr));
    return FSDP_OK;
}

/* y again from what the backward keeps anyway. Weight and bias are copied: the unit that they are of may be resharded by the
 * time that y is wanted. */
typedef struct norm_recipe {
    fsdpi_recipe base;
    fsdpi_storage *x, *mean, *rstd, *affine; /* affine: weight [C], then bias [C] where there is one */
    int64_t M, C;
    float eps;
    bool bias;
} norm_recipe;

static fsdp_status make_norm(fsdpi_recipe *base, fsdp_tape *tape, void *data)
{
    const norm_recipe *r = (const norm_recipe *)base;
    const float *affine = r->affine->data;
    fsdpi_layer_norm_args a = { .x = r->x->data, .weight = affine, .bias = r->bias ? affine + r->C : NULL, .y = data, .mean = r->mean->data,
                                .rstd = r->rstd->data, .M = r->M, .C = r->C, .eps = r->eps };
    return FSDPI_LAUNCH(tape, layer_norm, &a);
}

static void free_norm(fsdpi_recipe *base)
{
    norm_recipe *r = (norm_recipe *)base;
    fsdpi_storage_release(r->x);
    fsdpi_storage_release(r->mean);
    fsdpi_storage_release(r->rstd);
    fsdpi_storage_release(r->affine);
    fsdpi_free(r);
}

static fsdp_status add_recipe(fsdp_tape *tape, fsdp_tensor *y, const fsdpi_layer_norm_args *a, fsdpi_storage *x, fsdpi_storage *mean, fsdpi_storage *rstd)
{
    size_t bytes = (size_t)a->C * sizeof(float);
    norm_recipe *r;
    FSDPI_NEW(r, 1);
    *r = (norm_recipe){ .base = { make_norm, free_norm }, .M = a->M, .C = a->C, .eps = a->eps, .bias = a->bias != NULL };
    fsdp_status st = fsdpi_storage_create(&r->affine, tape->arena, 2 * bytes);
    if (st == FSDP_OK) st = fsdp_stream_copy(tape->stream, r->affine->data, a->weight, bytes);
    if (st == FSDP_OK && r->bias) st = fsdp_stream_copy(tape->stream, (float *)r->affine->data + a->C, a->bias, bytes);
    if (st != FSDP_OK) {
        free_norm(&r->base);
        return st;
    }
    r->x = fsdpi_storage_retain(x);
    r->mean = fsdpi_storage_retain(mean);
    r->rstd = fsdpi_storage_retain(rstd);
    y->storage->recipe = &r->base;
    return FSDP_OK;
}

static fsdp_status record(fsdp_tape *tape, fsdp_tensor *const *in, fsdp_tensor *y, fsdp_tensor *sum, fsdpi_storage *mean, fsdpi_storage *rstd)
{
    attributes at = { .M = fsdpi_rows(y), .C = fsdp_tensor_shape(y, -1), .residual = sum != NULL };
    fsdpi_node *n;
    FSDP_TRY(fsdpi_tape_append(&n, tape, "layer_norm", backward, &at, sizeof(at)));
    for (int i = 0; i < 4; i++) fsdpi_node_input(n, in[i]);
    fsdpi_node_output(n, y);
    if (sum != NULL) fsdpi_node_output(n, sum);
    fsdpi_node_save(n, SAVED_X, sum != NULL ? sum->storage : in[IN_X]->storage);
    fsdpi_node_save(n, SAVED_MEAN, mean);
    fsdpi_node_save(n, SAVED_RSTD, rstd);
    fsdpi_node_save(n, SAVED_WEIGHT, in[IN_WEIGHT]->storage);
    return FSDP_OK;
}

static fsdp_status run(fsdp_tape *tape, fsdp_tensor *const *in, float eps, fsdp_tensor **sum, fsdp_tensor **y)
{
    fsdp_tensor *x = in[IN_X], *s = NULL, *out;
    FSDP_TRY(check(tape, x, in[IN_RESIDUAL], in[IN_WEIGHT], in[IN_BIAS]));
    fsdpi_layer_norm_args a = { .M = fsdpi_rows(x), .C = fsdp_tensor_shape(x, -1), .eps = eps };
    FSDPI_DATA(x, a.x);
    FSDPI_DATA(in[IN_WEIGHT], a.weight);
    if (in[IN_BIAS] != NULL) FSDPI_DATA(in[IN_BIAS], a.bias);
    if (in[IN_RESIDUAL] != NULL) {
        FSDPI_DATA(in[IN_RESIDUAL], a.residual);
        FSDP_TRY(fsdpi_tape_tensor(&s, tape, FSDP_F32, x->ndim, x->shape));
        a.sum = s->storage->data;
    }
    FSDP_TRY(fsdpi_tape_tensor(&out, tape, FSDP_F32, x->ndim, x->shape));
    a.y = out->storage->data;
    fsdpi_storage *mean = NULL, *rstd = NULL;
    fsdp_status st = fsdpi_storage_create(&mean, tape->arena, (size_t)a.M * sizeof(float));
    if (st == FSDP_OK) st = fsdpi_storage_create(&rstd, tape->arena, (size_t)a.M * sizeof(float));
    if (st == FSDP_OK) {
        a.mean = mean->data;
        a.rstd = rstd->data;
        st = FSDPI_LAUNCH(tape, layer_norm, &a);
    }
    if (st == FSDP_OK && fsdpi_tape_records(tape, in, 4)) {
        fsdpi_storage *kept = s != NULL ? s->storage : x->storage;
        st = record(tape, in, out, s, mean, rstd);
        if (st == FSDP_OK && kept != NULL) st = add_recipe(tape, out, &a, kept, mean, rstd);
    }
    fsdpi_storage_release(mean);
    fsdpi_storage_release(rstd);
    FSDP_TRY(st);
    *y = out;
    if (sum != NULL) *sum = s;
    return FSDP_OK;
}

fsdp_status fsdp_op_layer_norm(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *weight, fsdp_tensor *bias, float eps, fsdp_tensor **y)
{
    return run(tape, (fsdp_tensor *const[]){ x, NULL, weight, bias }, eps, NULL, y);
}

fsdp_status fsdp_op_add_layer_norm(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *residual, fsdp_tensor *weight, fsdp_tensor *bias, float eps,
                                   fsdp_tensor **sum, fsdp_tensor **y)
{
    FSDP_FAIL_IF(residual == NULL, FSDP_ERR_INVALID, "add_layer_norm: no residual");
    return run(tape, (fsdp_tensor *const[]){ x, residual, weight, bias }, eps, sum, y);
}
