/* SPDX-License-Identifier: MIT
 *
 * Activation checkpointing (Chen et al., "Training deep nets with sublinear memory cost", 2016): of a region of the forward only
 * the inputs are kept; its backward runs it again, this time noting its operations at the end of the tape, goes back over
 * these, and takes them off. */
#include "autograd/tape.h"

#include "base/alloc.h"
#include "base/error.h"

typedef struct region {
    fsdpi_region_fn fn;
    void *ctx;
    int ins, outs;
    uint32_t dropout_layers; /* places of dropout before it */
} region;

/* The inputs again, as tensors of their own, so that gradients stop at the region's edge. */
static fsdp_status make_inputs(fsdp_tape *tape, const fsdpi_node *n, const region *r, fsdp_tensor **x)
{
    for (int i = 0; i < r->ins; i++) {
        const fsdp_tensor *t = n->in[i];
        x[i] = NULL;
        if (t == NULL) continue;
        FSDP_TRY(fsdpi_storage_restore(n->saved[i], tape));
        FSDP_TRY(fsdpi_tape_tensor_on(&x[i], tape, t->dtype, t->ndim, t->shape, n->saved[i]));
        x[i]->needs_grad = fsdpi_wants_grad(t);
    }
    return FSDP_OK;
}

static fsdp_status run_again(fsdp_tape *tape, const region *r, fsdp_tensor *const *x, fsdp_tensor **y)
{
    uint32_t layers = tape->dropout_layers;
    bool outer = tape->recomputing;
    tape->dropout_layers = r->dropout_layers;
    tape->recomputing = true;
    int depth = tape->open_scopes;
    fsdp_status st = r->fn(r->ctx, tape, x, y);
    if (st == FSDP_OK) st = fsdpi_tape_leave_to(tape, depth);
    tape->recomputing = outer;
    tape->dropout_layers = layers;
    return st;
}

static fsdp_status hand_over(fsdp_tape *tape, fsdp_tensor *const *in, fsdp_tensor *const *x, int ins)
{
    for (int i = 0; i < ins; i++) {
        if (x[i] == NULL || x[i]->grad == NULL) continue;
        FSDP_TRY(fsdpi_grad_share(tape, in[i], x[i]->grad));
        fsdpi_storage_release(x[i]->grad);
        x[i]->grad = NULL;
    }
    return FSDP_OK;
}

static fsdp_status backward(fsdp_tape *tape, fsdpi_node *n)
{
    /* The node moves when the tape grows: what is needed of it is copied. */
    region r = *(const region *)n->attributes;
    fsdp_tensor *in[FSDPI_NODE_INS], *out[FSDPI_NODE_OUTS], *x[FSDPI_REGION_MOST], *y[FSDPI_REGION_MOST] = { NULL };
    for (int i = 0; i < r.ins; i++) in[i] = n->in[i];
    for (int i = 0; i < r.outs; i++) out[i] = n->out[i];
    FSDP_TRY(make_inputs(tape, n, &r, x));
    int start = tape->nodes;
    FSDP_TRY(run_again(tape, &r, x, y));
    for (int i = 0; i < r.outs; i++) {
        if (out[i]->grad == NULL || y[i] == NULL) continue;
        FSDP_TRY(fsdpi_grad_share(tape, y[i], out[i]->grad));
        fsdpi_storage_release(out[i]->grad); /* so that it can be added to in place */
        out[i]->grad = NULL;
    }
    FSDP_TRY(fsdpi_tape_go_back(tape, start));
    tape->nodes = start;
    FSDP_TRY(hand_over(tape, in, x, r.ins));
    for (int i = 0; i < r.ins; i++)
        if (x[i] != NULL) fsdp_tensor_release(x[i]);
    return FSDP_OK;
}

/* The region may give its inputs up: their storages are held until the node has them. */
static fsdp_status append_region(fsdp_tape *tape, const region *r, fsdp_tensor *const *in, fsdpi_storage *const *kept, fsdp_tensor *const *out)
{
    fsdpi_node *n;
    FSDP_TRY(fsdpi_tape_append(&n, tape, "region", backward, r, sizeof(*r)));
    for (int i = 0; i < r->ins; i++) {
        fsdpi_node_input(n, in[i]);
        fsdpi_node_save(n, i, kept[i]);
    }
    for (int i = 0; i < r->outs; i++) fsdpi_node_output(n, out[i]);
    return FSDP_OK;
}

fsdp_status fsdpi_tape_region(fsdp_tape *tape, fsdpi_region_fn fn, void *ctx, fsdp_tensor *const *in, int ins, fsdp_tensor **out, int outs)
{
    if (tape->opts.eval || tape->unrecorded > 0 || tape->recomputing) return fn(ctx, tape, in, out);
    FSDPI_ASSERT(ins <= FSDPI_REGION_MOST && outs <= FSDPI_NODE_OUTS);
    region r = { .fn = fn, .ctx = ctx, .ins = ins, .outs = outs, .dropout_layers = tape->dropout_layers };
    fsdpi_storage *kept[FSDPI_REGION_MOST] = { NULL };
    for (int i = 0; i < ins; i++)
        if (in[i] != NULL && in[i]->storage != NULL) kept[i] = fsdpi_storage_retain(in[i]->storage);
    /* Where all is frozen and no input needs a gradient there is nothing to go back over. */
    tape->passed_over = false;
    for (int i = 0; i < ins; i++) tape->passed_over |= in[i] != NULL && fsdpi_wants_grad(in[i]);
    int depth = tape->open_scopes;
    tape->unrecorded++;
    fsdp_status st = fn(ctx, tape, in, out);
    if (st == FSDP_OK) st = fsdpi_tape_leave_to(tape, depth); /* what lingers in it is of the region */
    tape->unrecorded--;
    if (st == FSDP_OK && tape->passed_over) st = append_region(tape, &r, in, kept, out);
    for (int i = 0; i < ins; i++) fsdpi_storage_release(kept[i]);
    return st;
}

bool fsdp_tape_is_recomputing(const fsdp_tape *tape)
{
    return tape->recomputing;
}
