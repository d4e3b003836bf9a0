/* SPDX-License-Identifier: MIT
 *
 * Linear: y = act(x W + b). Backward: dx = dpre W', dW = x' dpre, db = column sums of dpre, dpre = dy act'(pre). */
#include "ops/ops.h"

#include "base/alloc.h"

typedef struct attributes {
    int64_t M, N, K;
    bool in_out;
    fsdpi_activation act;
} attributes;

enum { SAVED_X, SAVED_PRE, SAVED_WEIGHT };

static fsdp_status backward(fsdp_tape *tape, fsdpi_node *n)
{
    const attributes *at = n->attributes;
    fsdp_tensor *x = n->in[0], *w = n->in[1], *b = n->in[2];
    fsdpi_linear_backward_args a = { .dy = fsdpi_grad_of(n->out[0]), .M = at->M, .N = at->N, .K = at->K, .in_out = at->in_out, .act = at->act };
    if (fsdpi_wants_grad(w)) FSDP_TRY(fsdpi_saved(tape, n, SAVED_X, x, &a.x));
    a.pre = n->saved[SAVED_PRE] != NULL ? n->saved[SAVED_PRE]->data : NULL;
    FSDP_TRY(fsdpi_saved(tape, n, SAVED_WEIGHT, w, &a.weight));
    FSDP_TRY(fsdpi_grad_into(tape, w, &a.dweight, &a.dweight_beta));
    FSDP_TRY(fsdpi_grad_into(tape, b, &a.dbias, &a.dbias_beta));
    FSDP_TRY(fsdpi_grad_into(tape, x, &a.dx, &a.dx_beta));
    FSDP_TRY(fsdpi_scratch(tape, fsdpi_linear_backward_scratch(&a, fsdpi_threads_of(tape)), &a.scratch));
    fsdp_status st = FSDPI_LAUNCH(tape, linear_backward, &a);
    fsdpi_scratch_free(tape, a.scratch);
    return st;
}

/* y = act(pre): an elementwise pass, where holding y from forward to backward would double what a layer keeps. */
typedef struct act_recipe {
    fsdpi_recipe base;
    fsdpi_storage *pre;
    int64_t numel;
    fsdpi_activation act;
} act_recipe;

static fsdp_status make_act(fsdpi_recipe *base, fsdp_tape *tape, void *data)
{
    const act_recipe *r = (const act_recipe *)base;
    fsdpi_activation_args a = { .x = r->pre->data, .out = data, .numel = r->numel, .act = r->act };
    return FSDPI_LAUNCH(tape, activation, &a);
}

static void free_act(fsdpi_recipe *base)
{
    fsdpi_storage_release(((act_recipe *)base)->pre);
    fsdpi_free(base);
}

static fsdp_status add_recipe(fsdp_tensor *y, fsdpi_storage *pre, fsdpi_activation act)
{
    act_recipe *r;
    FSDPI_NEW(r, 1);
    *r = (act_recipe){ .base = { make_act, free_act }, .pre = fsdpi_storage_retain(pre), .numel = y->numel, .act = act };
    y->storage->recipe = &r->base;
    return FSDP_OK;
}

static fsdp_status check(const fsdp_tape *tape, const fsdp_tensor *x, const fsdp_tensor *w, const fsdp_tensor *b, attributes *at)
{
    FSDP_TRY(fsdpi_check_tensor(tape, "linear", "the input", x, FSDP_F32));
    FSDP_TRY(fsdpi_check_tensor(tape, "linear", "the weight", w, FSDP_F32));
    char tx[128], tw[128];
    int64_t in = fsdp_tensor_shape(w, at->in_out ? 0 : 1), out = fsdp_tensor_shape(w, at->in_out ? 1 : 0);
    FSDP_FAIL_IF(w->ndim != 2 || x->ndim < 1 || fsdp_tensor_shape(x, -1) != in, FSDP_ERR_INVALID,
                 "linear: the input is %s and the weight %s (%s): the input's last dimension must be the weight's `in`", fsdpi_shape_text(x, tx),
                 fsdpi_shape_text(w, tw), at->in_out ? "in, out" : "out, in");
    if (b != NULL) FSDP_TRY(fsdpi_check_vector(tape, "linear", "the bias", b, out));
    at->M = in > 0 ? x->numel / in : 0;
    at->N = out;
    at->K = in;
    return FSDP_OK;
}

fsdp_status fsdp_op_linear(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *weight, fsdp_tensor *bias, const fsdp_op_linear_opts *opts, fsdp_tensor **y)
{
    fsdp_op_linear_opts o = opts != NULL ? *opts : (fsdp_op_linear_opts){ 0 };
    attributes at = { .in_out = o.in_out, .act = (fsdpi_activation)o.activation };
    FSDP_TRY(fsdpi_check_activation("linear", o.activation));
    FSDP_TRY(check(tape, x, weight, bias, &at));
    fsdp_tensor *in[] = { x, weight, bias }, *out;
    bool records = fsdpi_tape_records(tape, in, 3);
    int64_t shape[FSDP_MAX_DIMS];
    for (int d = 0; d < x->ndim; d++) shape[d] = x->shape[d];
    shape[x->ndim - 1] = at.N;
    fsdpi_linear_args a = { .M = at.M, .N = at.N, .K = at.K, .in_out = at.in_out, .act = at.act };
    FSDPI_DATA(x, a.x);
    FSDPI_DATA(weight, a.weight);
    if (bias != NULL) FSDPI_DATA(bias, a.bias);
    FSDP_TRY(fsdpi_tape_tensor(&out, tape, FSDP_F32, x->ndim, shape));
    a.y = out->storage->data;
    fsdpi_storage *pre = NULL;
    if (records && at.act != FSDPI_ACT_NONE) FSDP_TRY(fsdpi_storage_create(&pre, tape->arena, (size_t)out->numel * sizeof(float)));
    a.pre = pre != NULL ? pre->data : NULL;
    fsdp_status st = FSDPI_LAUNCH(tape, linear, &a);
    fsdpi_node *n;
    if (st == FSDP_OK && records && (st = fsdpi_tape_append(&n, tape, "linear", backward, &at, sizeof(at))) == FSDP_OK) {
        for (int i = 0; i < 3; i++) fsdpi_node_input(n, in[i]);
        fsdpi_node_output(n, out);
        if (fsdpi_wants_grad(weight)) fsdpi_node_save(n, SAVED_X, x->storage);
        fsdpi_node_save(n, SAVED_WEIGHT, weight->storage);
        fsdpi_node_save(n, SAVED_PRE, pre);
        if (pre != NULL) st = add_recipe(out, pre, at.act);
    }
    fsdpi_storage_release(pre);
    FSDP_TRY(st);
    *y = out;
    return FSDP_OK;
}
