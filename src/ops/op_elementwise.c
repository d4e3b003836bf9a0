/* SPDX-License-Identifier: MIT
 *
 * Activation, addition, dropout, reshape. */
#include "ops/ops.h"

static fsdp_status like(fsdp_tensor **out, fsdp_tape *tape, const fsdp_tensor *x)
{
    return fsdpi_tape_tensor(out, tape, FSDP_F32, x->ndim, x->shape);
}

/* ---- activation ---- */

static fsdp_status activation_backward(fsdp_tape *tape, fsdpi_node *n)
{
    fsdpi_activation_args a = { .dy = fsdpi_grad_of(n->out[0]), .numel = n->out[0]->numel, .act = *(fsdpi_activation *)n->attributes };
    FSDP_TRY(fsdpi_saved(tape, n, 0, n->in[0], &a.x));
    FSDP_TRY(fsdpi_grad_into(tape, n->in[0], &a.out, &a.beta));
    return a.out != NULL ? FSDPI_LAUNCH(tape, activation_backward, &a) : FSDP_OK;
}

fsdp_status fsdp_op_activation(fsdp_tape *tape, fsdp_tensor *x, fsdp_activation activation, fsdp_tensor **y)
{
    FSDP_TRY(fsdpi_check_tensor(tape, "activation", "the input", x, FSDP_F32));
    FSDP_TRY(fsdpi_check_activation("activation", activation));
    fsdpi_activation act = (fsdpi_activation)activation;
    fsdp_tensor *out;
    fsdpi_activation_args a = { .numel = x->numel, .act = act };
    FSDPI_DATA(x, a.x);
    FSDP_TRY(like(&out, tape, x));
    a.out = out->storage->data;
    FSDP_TRY(FSDPI_LAUNCH(tape, activation, &a));
    if (fsdpi_tape_records(tape, &x, 1)) {
        fsdpi_node *n;
        FSDP_TRY(fsdpi_tape_append(&n, tape, "activation", activation_backward, &act, sizeof(act)));
        fsdpi_node_input(n, x);
        fsdpi_node_output(n, out);
        fsdpi_node_save(n, 0, x->storage);
    }
    *y = out;
    return FSDP_OK;
}

/* ---- addition: both gradients are the output's ---- */

static fsdp_status add_backward(fsdp_tape *tape, fsdpi_node *n)
{
    FSDP_TRY(fsdpi_grad_share(tape, n->in[0], n->out[0]->grad));
    return fsdpi_grad_share(tape, n->in[1], n->out[0]->grad);
}

fsdp_status fsdp_op_add(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *y, fsdp_tensor **out)
{
    FSDP_TRY(fsdpi_check_tensor(tape, "add", "the first input", x, FSDP_F32));
    FSDP_TRY(fsdpi_check_tensor(tape, "add", "the second input", y, FSDP_F32));
    char tx[128], ty[128];
    bool same = x->ndim == y->ndim;
    for (int d = 0; same && d < x->ndim; d++) same = x->shape[d] == y->shape[d];
    FSDP_FAIL_IF(!same, FSDP_ERR_INVALID, "add: %s and %s are of different shapes", fsdpi_shape_text(x, tx), fsdpi_shape_text(y, ty));
    fsdp_tensor *sum, *in[] = { x, y };
    fsdpi_add_args a = { .numel = x->numel };
    FSDPI_DATA(x, a.x);
    FSDPI_DATA(y, a.y);
    FSDP_TRY(like(&sum, tape, x));
    a.out = sum->storage->data;
    FSDP_TRY(FSDPI_LAUNCH(tape, add, &a));
    if (fsdpi_tape_records(tape, in, 2)) {
        fsdpi_node *n;
        FSDP_TRY(fsdpi_tape_append(&n, tape, "add", add_backward, NULL, 0));
        fsdpi_node_input(n, x);
        fsdpi_node_input(n, y);
        fsdpi_node_output(n, sum);
    }
    *out = sum;
    return FSDP_OK;
}

/* ---- dropout: the mask is drawn again in the backward ---- */

static fsdp_status dropout_backward(fsdp_tape *tape, fsdpi_node *n)
{
    fsdpi_dropout_args a = *(fsdpi_dropout_args *)n->attributes;
    a.x = fsdpi_grad_of(n->out[0]);
    FSDP_TRY(fsdpi_grad_into(tape, n->in[0], &a.out, &a.beta));
    return a.out != NULL ? FSDPI_LAUNCH(tape, dropout, &a) : FSDP_OK;
}

fsdp_status fsdp_op_dropout(fsdp_tape *tape, fsdp_tensor *x, float p, fsdp_tensor **y)
{
    FSDP_TRY(fsdpi_check_tensor(tape, "dropout", "the input", x, FSDP_F32));
    FSDP_FAIL_IF(!(p >= 0 && p < 1), FSDP_ERR_INVALID, "dropout: p is %g: must be 0 or more, and less than 1", (double)p);
    FSDP_FAIL_IF(x->ndim < 1, FSDP_ERR_INVALID, "dropout: the input has no dimension of samples");
    /* Places are numbered also where nothing is dropped: the others must not depend on it. */
    uint32_t layer = tape->dropout_layers++;
    if (p == 0 || tape->opts.eval) {
        *y = x;
        return FSDP_OK;
    }
    fsdp_tensor *out;
    fsdpi_dropout_args a = { .B = x->shape[0],
                             .per_sample = x->shape[0] > 0 ? x->numel / x->shape[0] : 0,
                             .dropout = { p, tape->opts.seed, tape->opts.step, layer, tape->opts.first_sample } };
    FSDPI_DATA(x, a.x);
    FSDP_TRY(like(&out, tape, x));
    a.out = out->storage->data;
    FSDP_TRY(FSDPI_LAUNCH(tape, dropout, &a));
    if (fsdpi_tape_records(tape, &x, 1)) {
        fsdpi_node *n;
        FSDP_TRY(fsdpi_tape_append(&n, tape, "dropout", dropout_backward, &a, sizeof(a)));
        fsdpi_node_input(n, x);
        fsdpi_node_output(n, out);
    }
    *y = out;
    return FSDP_OK;
}

/* ---- reshape ---- */

static fsdp_status reshape_backward(fsdp_tape *tape, fsdpi_node *n)
{
    return fsdpi_grad_share(tape, n->in[0], n->out[0]->grad);
}

fsdp_status fsdp_op_reshape(fsdp_tape *tape, fsdp_tensor *x, int ndim, const int64_t *shape, fsdp_tensor **y)
{
    FSDP_FAIL_IF(x == NULL || x->source != NULL, FSDP_ERR_INVALID, "reshape: no input, or a parameter");
    FSDP_FAIL_IF(x->tape != tape, FSDP_ERR_INVALID, "reshape: the input is of another tape");
    fsdp_tensor *out;
    FSDP_TRY(fsdpi_tape_view(&out, tape, x, ndim, shape));
    if (fsdpi_tape_records(tape, &x, 1)) {
        fsdpi_node *n;
        FSDP_TRY(fsdpi_tape_append(&n, tape, "reshape", reshape_backward, NULL, 0));
        fsdpi_node_input(n, x);
        fsdpi_node_output(n, out);
    }
    *y = out;
    return FSDP_OK;
}
