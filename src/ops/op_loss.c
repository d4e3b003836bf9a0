/* SPDX-License-Identifier: MIT
 *
 * Cross-entropy. A loss is a sum over rows, and how many rows count: two doubles.
 *
 * It is computed when it is first wanted. When that is the backward, loss and gradients come out of one pass: for the
 * last layer of a language model, whose scores are never held all at once, that saves a matrix product out of four. A
 * program that reads the loss before it goes back pays for it; so does a weight in a unit that is sharded until the
 * backward, since nobody could read the loss in between. */
#include "ops/ops.h"

#include "base/alloc.h"

#include <string.h>

/* What is needed to compute a loss: storages are retained until the tape ends or the backward is done. */
typedef struct pending_loss {
    fsdp_tensor *x, *weight, *labels; /* weight NULL: x are the scores */
    fsdpi_storage *x_storage, *label_storage, *weight_storage; /* the weight's: NULL for a parameter */
    int64_t M, V, K;
    bool done;
} pending_loss;

static pending_loss *pending_of(fsdp_tensor *loss)
{
    return loss->lazy;
}

static void forget(void *lazy)
{
    pending_loss *p = lazy;
    fsdpi_storage_release(p->x_storage);
    fsdpi_storage_release(p->label_storage);
    fsdpi_storage_release(p->weight_storage);
    p->x_storage = p->label_storage = p->weight_storage = NULL;
}

static fsdp_status run_scores(fsdp_tensor *loss, pending_loss *p, float *dx, float beta)
{
    fsdp_tape *tape = loss->tape;
    fsdpi_cross_entropy_args a = { .logits = p->x_storage->data, .labels = p->label_storage->data, .loss = p->done ? NULL : loss->storage->data,
                                   .seed = fsdpi_seed_of(tape), .dlogits = dx, .beta = beta, .M = p->M, .V = p->V };
    FSDP_TRY(fsdpi_scratch(tape, fsdpi_cross_entropy_scratch(&a, fsdpi_threads_of(tape)), &a.scratch));
    fsdp_status st = FSDPI_LAUNCH(tape, cross_entropy, &a);
    fsdpi_scratch_free(tape, a.scratch);
    return st;
}

static fsdp_status run_linear(fsdp_tensor *loss, pending_loss *p, float *dx, float dx_beta, float *dw, float dw_beta)
{
    fsdp_tape *tape = loss->tape;
    fsdpi_linear_cross_entropy_args a = { .x = p->x_storage->data, .labels = p->label_storage->data, .loss = p->done ? NULL : loss->storage->data,
                                          .seed = fsdpi_seed_of(tape), .dx = dx, .dweight = dw, .dx_beta = dx_beta, .dweight_beta = dw_beta,
                                          .M = p->M, .V = p->V, .K = p->K };
    if (p->weight_storage != NULL) a.weight = p->weight_storage->data;
    else FSDPI_DATA(p->weight, a.weight);
    FSDP_TRY(fsdpi_scratch(tape, fsdpi_linear_cross_entropy_scratch(&a, fsdpi_threads_of(tape)), &a.scratch));
    fsdp_status st = FSDPI_LAUNCH(tape, linear_cross_entropy, &a);
    fsdpi_scratch_free(tape, a.scratch);
    return st;
}

/* The loss alone, because somebody reads it before the backward, or there is none. */
static fsdp_status materialise(fsdp_tensor *loss)
{
    pending_loss *p = pending_of(loss);
    if (p->done) return FSDP_OK;
    fsdp_status st = p->weight != NULL ? run_linear(loss, p, NULL, 0, NULL, 0) : run_scores(loss, p, NULL, 0);
    FSDP_FAIL_IF(st == FSDP_ERR_STATE, st, "the loss cannot be read now, since the end of another tape has sharded the unit of its weight: "
                 "read it before that, or after fsdp_backward()");
    FSDP_TRY(st);
    p->done = true;
    return FSDP_OK;
}

static fsdp_status backward(fsdp_tape *tape, fsdpi_node *n)
{
    fsdp_tensor *loss = n->out[0];
    pending_loss *p = pending_of(loss);
    float *dx, dx_beta, *dw = NULL, dw_beta = 0;
    if (p->weight != NULL) FSDP_TRY(fsdpi_grad_into(tape, p->weight, &dw, &dw_beta));
    FSDP_TRY(fsdpi_grad_into(tape, p->x, &dx, &dx_beta));
    if (p->weight != NULL) FSDP_TRY(run_linear(loss, p, dx, dx_beta, dw, dw_beta));
    else FSDP_TRY(run_scores(loss, p, dx, dx_beta));
    p->done = true;
    forget(p);
    return FSDP_OK;
}

static fsdp_status check(const fsdp_tape *tape, const fsdp_tensor *x, const fsdp_tensor *w, const fsdp_tensor *labels)
{
    FSDP_TRY(fsdpi_check_tensor(tape, "cross_entropy", "the input", x, FSDP_F32));
    FSDP_TRY(fsdpi_check_tensor(tape, "cross_entropy", "the labels", labels, FSDP_I32));
    FSDP_FAIL_IF(x->source != NULL, FSDP_ERR_INVALID, "cross_entropy: the input is a parameter");
    char tx[128], tl[128], tw[128];
    FSDP_FAIL_IF(x->ndim < 1 || labels->numel != fsdpi_rows(x), FSDP_ERR_INVALID, "cross_entropy: input %s and labels %s: one label a row is wanted",
                 fsdpi_shape_text(x, tx), fsdpi_shape_text(labels, tl));
    if (w == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_check_tensor(tape, "cross_entropy", "the weight", w, FSDP_F32));
    FSDP_FAIL_IF(w->ndim != 2 || w->shape[1] != fsdp_tensor_shape(x, -1), FSDP_ERR_INVALID, "cross_entropy: input %s and weight %s do not go together",
                 fsdpi_shape_text(x, tx), fsdpi_shape_text(w, tw));
    return FSDP_OK;
}

static fsdp_status make(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *w, fsdp_tensor *labels, fsdp_tensor **out)
{
    FSDP_TRY(check(tape, x, w, labels));
    const void *given_up;
    FSDP_TRY(fsdpi_tensor_data(x, &given_up));
    FSDP_TRY(fsdpi_tensor_data(labels, &given_up));
    if (w != NULL && w->source == NULL) FSDP_TRY(fsdpi_tensor_data(w, &given_up));
    fsdp_tensor *loss, *in[] = { x, w };
    FSDP_TRY(fsdpi_tape_tensor(&loss, tape, FSDP_F64, 1, (int64_t[]){ 2 }));
    pending_loss *p;
    FSDPI_NEW(p, 1);
    *p = (pending_loss){ .x = x, .weight = w, .labels = labels, .M = fsdpi_rows(x) };
    p->V = w != NULL ? w->shape[0] : fsdp_tensor_shape(x, -1);
    p->K = w != NULL ? w->shape[1] : 0;
    loss->lazy = p;
    loss->materialise = materialise;
    p->x_storage = fsdpi_storage_retain(x->storage);
    p->label_storage = fsdpi_storage_retain(labels->storage);
    if (w != NULL && w->storage != NULL) p->weight_storage = fsdpi_storage_retain(w->storage);
    loss->dispose = forget;
    if (fsdpi_tape_records(tape, in, 2)) {
        fsdpi_node *n;
        FSDP_TRY(fsdpi_tape_append(&n, tape, "cross_entropy", backward, NULL, 0));
        fsdpi_node_input(n, x);
        fsdpi_node_input(n, w);
        fsdpi_node_output(n, loss);
        if (w != NULL && w->source != NULL && !w->source->stays(w->source->ctx, tape)) FSDP_TRY(materialise(loss));
    } else {
        FSDP_TRY(materialise(loss)); /* nothing to wait for; the unit may be resharded later */
        forget(p);
    }
    *out = loss;
    return FSDP_OK;
}

fsdp_status fsdp_op_cross_entropy(fsdp_tape *tape, fsdp_tensor *scores, fsdp_tensor *labels, fsdp_tensor **loss)
{
    return make(tape, scores, NULL, labels, loss);
}

fsdp_status fsdp_op_linear_cross_entropy(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *weight, fsdp_tensor *labels, fsdp_tensor **loss)
{
    FSDP_FAIL_IF(weight == NULL, FSDP_ERR_INVALID, "linear_cross_entropy: no weight");
    return make(tape, x, weight, labels, loss);
}

fsdp_status fsdp_loss_read(fsdp_tensor *loss, double *sum, double *count)
{
    FSDP_FAIL_IF(loss == NULL || loss->materialise != materialise, FSDP_ERR_INVALID, "fsdp_loss_read: not a loss");
    double both[2];
    FSDP_TRY(fsdp_tensor_read(loss, both));
    *sum = both[0];
    *count = both[1];
    return FSDP_OK;
}
