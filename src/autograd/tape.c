/* SPDX-License-Identifier: MIT */
#include "autograd/tape.h"

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>

fsdp_status fsdpi_tape_create(fsdp_tape **out, fsdp_stream *stream, fsdpi_arena *arena, const fsdp_tape_opts *opts)
{
    fsdp_tape *t;
    FSDPI_NEW(t, 1);
    t->stream = stream;
    t->arena = arena;
    t->opts = *opts;
    *out = t;
    return FSDP_OK;
}

static void release_node(fsdpi_node *n)
{
    for (int i = 0; i < FSDPI_NODE_SAVED; i++) {
        if (n->saved[i] != NULL) n->saved[i]->saves--;
        fsdpi_storage_release(n->saved[i]);
        n->saved[i] = NULL;
    }
    fsdpi_free(n->attributes);
    n->attributes = NULL;
}

void fsdpi_tape_destroy(fsdp_tape *tape)
{
    if (tape == NULL) return;
    for (int i = 0; i < tape->nodes; i++) release_node(&tape->node[i]);
    for (fsdp_tensor *t = tape->tensors, *next; t != NULL; t = next) {
        next = t->next;
        fsdpi_storage_release(t->storage);
        fsdpi_storage_release(t->grad);
        if (t->dispose != NULL) t->dispose(t->lazy);
        fsdpi_free(t->lazy);
        fsdpi_free(t);
    }
    fsdpi_storage_release(tape->seed);
    fsdpi_free(tape->pending);
    fsdpi_free(tape->open);
    fsdpi_free(tape->node);
    fsdpi_free(tape);
}

/* ---- tensors ---- */

fsdp_status fsdpi_tape_tensor(fsdp_tensor **out, fsdp_tape *tape, fsdp_dtype dtype, int ndim, const int64_t *shape)
{
    fsdp_status st;
    fsdp_tensor *t;
    FSDPI_NEW(t, 1);
    t->tape = tape;
    FSDP_TRY_GOTO(fsdpi_tensor_set_shape(t, dtype, ndim, shape), fail);
    FSDP_TRY_GOTO(fsdpi_storage_create(&t->storage, tape->arena, (size_t)t->numel * fsdp_dtype_bytes(dtype)), fail);
    t->next = tape->tensors;
    tape->tensors = t;
    *out = t;
    return FSDP_OK;
fail:
    fsdpi_free(t);
    return st;
}

fsdp_status fsdpi_tape_tensor_on(fsdp_tensor **out, fsdp_tape *tape, fsdp_dtype dtype, int ndim, const int64_t *shape, fsdpi_storage *storage)
{
    fsdp_tensor *t;
    FSDPI_NEW(t, 1);
    t->tape = tape;
    fsdp_status st = fsdpi_tensor_set_shape(t, dtype, ndim, shape);
    if (st != FSDP_OK) {
        fsdpi_free(t);
        return st;
    }
    t->storage = fsdpi_storage_retain(storage);
    t->next = tape->tensors;
    tape->tensors = t;
    *out = t;
    return FSDP_OK;
}

fsdp_status fsdpi_tape_view(fsdp_tensor **out, fsdp_tape *tape, fsdp_tensor *of, int ndim, const int64_t *shape)
{
    FSDP_FAIL_IF(of->storage == NULL, FSDP_ERR_STATE, "a view of a tensor whose memory was given up");
    fsdp_tensor like = { 0 };
    FSDP_TRY(fsdpi_tensor_set_shape(&like, of->dtype, ndim, shape));
    FSDP_FAIL_IF(like.numel != of->numel, FSDP_ERR_INVALID, "a view of %lld elements of a tensor of %lld", (long long)like.numel, (long long)of->numel);
    return fsdpi_tape_tensor_on(out, tape, of->dtype, ndim, shape, of->storage);
}

static fsdp_status from_host(fsdp_tensor **out, fsdp_tape *tape, const void *values, fsdp_dtype dtype, int ndim, const int64_t *shape)
{
    fsdp_tensor *t;
    FSDP_TRY(fsdpi_tape_tensor(&t, tape, dtype, ndim, shape));
    t->is_leaf = true;
    FSDP_TRY(fsdp_stream_copy(tape->stream, t->storage->data, values, (size_t)t->numel * fsdp_dtype_bytes(dtype)));
    FSDP_TRY(fsdp_stream_sync(tape->stream)); /* the values are the caller's again */
    *out = t;
    return FSDP_OK;
}

fsdp_status fsdp_tensor_from_f32(fsdp_tensor **out, fsdp_tape *tape, const float *values, int ndim, const int64_t *shape)
{
    return from_host(out, tape, values, FSDP_F32, ndim, shape);
}

fsdp_status fsdp_tensor_from_i32(fsdp_tensor **out, fsdp_tape *tape, const int32_t *values, int ndim, const int64_t *shape)
{
    return from_host(out, tape, values, FSDP_I32, ndim, shape);
}

fsdp_status fsdp_tensor_require_grad(fsdp_tensor *t)
{
    FSDP_FAIL_IF(!t->is_leaf || t->dtype != FSDP_F32, FSDP_ERR_INVALID, "fsdp_tensor_require_grad: only for fp32 tensors that were made from values");
    t->needs_grad = true;
    return FSDP_OK;
}

void fsdp_tensor_release(fsdp_tensor *t)
{
    if (t == NULL || t->tape == NULL) return;
    if (t->materialise != NULL) return; /* a loss: two numbers, which the end of the pass reads */
    fsdpi_storage *s = t->storage;
    t->storage = NULL;
    if (s == NULL || s->refs == 1) {
        fsdpi_storage_release(s);
    } else {
        s->refs--;
        fsdpi_storage_economise(s);
    }
}

fsdp_status fsdp_tensor_read(fsdp_tensor *t, void *out)
{
    FSDP_FAIL_IF(t->tape == NULL, FSDP_ERR_STATE, "a parameter is read through its unit (fsdp_unit_read_param)");
    if (t->materialise != NULL) FSDP_TRY(t->materialise(t));
    const void *p;
    FSDP_TRY(fsdpi_tensor_data(t, &p));
    FSDP_TRY(fsdp_stream_copy(t->tape->stream, out, p, (size_t)t->numel * fsdp_dtype_bytes(t->dtype)));
    return fsdp_stream_sync(t->tape->stream);
}

fsdp_status fsdp_tensor_to_f32(fsdp_tensor *t, float *out)
{
    FSDP_FAIL_IF(t->dtype != FSDP_F32, FSDP_ERR_INVALID, "fsdp_tensor_to_f32: the tensor is of type %s", fsdp_dtype_name(t->dtype));
    return fsdp_tensor_read(t, out);
}

fsdp_status fsdp_tensor_grad_to_f32(fsdp_tensor *t, float *out)
{
    FSDP_FAIL_IF(t->tape == NULL || !t->tape->went_back, FSDP_ERR_STATE, "fsdp_tensor_grad_to_f32: no backward has been done");
    FSDP_FAIL_IF(!t->is_leaf || !t->needs_grad, FSDP_ERR_INVALID, "fsdp_tensor_grad_to_f32: no gradient of it was asked for (fsdp_tensor_require_grad)");
    if (t->grad == NULL) {
        memset(out, 0, (size_t)t->numel * sizeof(float));
        return FSDP_OK;
    }
    FSDP_TRY(fsdp_stream_copy(t->tape->stream, out, t->grad->data, (size_t)t->numel * sizeof(float)));
    return fsdp_stream_sync(t->tape->stream);
}

/* ---- nodes ---- */

bool fsdpi_tape_records(fsdp_tape *tape, fsdp_tensor *const *in, int ins)
{
    if (tape->opts.eval) return false;
    bool wanted = false;
    for (int i = 0; i < ins && !wanted; i++) wanted = in[i] != NULL && fsdpi_wants_grad(in[i]);
    tape->passed_over |= wanted && tape->unrecorded > 0;
    return wanted && tape->unrecorded == 0;
}

static fsdp_status check_can_go_on(const fsdp_tape *tape)
{
    FSDP_FAIL_IF(tape->went_back, FSDP_ERR_STATE, "an operation on a tape that has gone back: begin a new one");
    return FSDP_OK;
}

static fsdp_status append(fsdpi_node **out, fsdp_tape *tape)
{
    FSDP_TRY(check_can_go_on(tape));
    if (tape->nodes == tape->room) {
        int room = tape->room > 0 ? 2 * tape->room : 128;
        void *p = fsdpi_realloc(tape->node, (size_t)room, sizeof(*tape->node));
        FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for a tape of %d operations", room);
        tape->node = p;
        tape->room = room;
    }
    *out = &tape->node[tape->nodes++];
    memset(*out, 0, sizeof(**out));
    return FSDP_OK;
}

fsdp_status fsdpi_tape_append(fsdpi_node **out, fsdp_tape *tape, const char *name, fsdpi_backward_fn backward, const void *attributes, size_t bytes)
{
    void *copy = NULL;
    if (bytes > 0) {
        copy = fsdpi_calloc(1, bytes);
        FSDP_FAIL_IF(copy == NULL, FSDP_ERR_NOMEM, "no memory for operation %s", name);
        memcpy(copy, attributes, bytes);
    }
    fsdp_status st = append(out, tape);
    if (st != FSDP_OK) {
        fsdpi_free(copy);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    (*out)->kind = FSDPI_NODE_OP;
    (*out)->name = name;
    (*out)->backward = backward;
    (*out)->attributes = copy;
    return FSDP_OK;
}

void fsdpi_node_input(fsdpi_node *n, fsdp_tensor *t)
{
    n->in[n->ins++] = t;
}

void fsdpi_node_output(fsdpi_node *n, fsdp_tensor *t)
{
    n->out[n->outs++] = t;
    t->needs_grad = true;
}

void fsdpi_node_save(fsdpi_node *n, int slot, fsdpi_storage *s)
{
    if (s == NULL) return;
    n->saved[slot] = fsdpi_storage_retain(s);
    s->saves++;
}

/* ---- gradients ---- */

const float *fsdpi_grad_of(const fsdp_tensor *t)
{
    return t->grad != NULL ? t->grad->data : NULL;
}

/* A gradient that others hold as well is copied before it is changed. */
static fsdp_status own_grad(fsdp_tape *tape, fsdp_tensor *t)
{
    if (t->grad->refs == 1) return FSDP_OK;
    fsdpi_storage *mine;
    FSDP_TRY(fsdpi_storage_create(&mine, tape->arena, t->grad->bytes));
    fsdp_status st = fsdp_stream_copy(tape->stream, mine->data, t->grad->data, t->grad->bytes);
    if (st != FSDP_OK) {
        fsdpi_storage_release(mine);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    fsdpi_storage_release(t->grad);
    t->grad = mine;
    return FSDP_OK;
}

fsdp_status fsdpi_grad_into(fsdp_tape *tape, fsdp_tensor *t, float **out, float *beta)
{
    *out = NULL;
    *beta = 0;
    if (t == NULL || !fsdpi_wants_grad(t)) return FSDP_OK;
    if (t->source != NULL) {
        float *p = t->source->grad(t->source->ctx, t->source->index, beta);
        if (p == NULL) return fsdp_error_through(fsdpi_error_status(), __func__, __FILE__, __LINE__);
        *out = p;
        return FSDP_OK;
    }
    if (t->grad != NULL) {
        FSDP_TRY(own_grad(tape, t));
        *beta = 1;
    } else {
        FSDP_TRY(fsdpi_storage_create(&t->grad, tape->arena, (size_t)t->numel * sizeof(float)));
    }
    *out = t->grad->data;
    return FSDP_OK;
}

typedef struct add_args {
    float *to;
    const float *from;
    int64_t numel;
} add_args;

static fsdp_status k_add(const fsdp_kernel *k, const void *args)
{
    const add_args *a = args;
    float *to = fsdp_kernel_ptr(k, a->to);
    const float *from = fsdp_kernel_ptr(k, a->from);
    for (int64_t i = 0; i < a->numel; i++) to[i] += from[i];
    return FSDP_OK;
}

fsdp_status fsdpi_grad_share(fsdp_tape *tape, fsdp_tensor *t, fsdpi_storage *grad)
{
    if (t == NULL || !fsdpi_wants_grad(t)) return FSDP_OK;
    if (t->source == NULL && t->grad == NULL) {
        t->grad = fsdpi_storage_retain(grad);
        return FSDP_OK;
    }
    float *to, beta;
    FSDP_TRY(fsdpi_grad_into(tape, t, &to, &beta));
    if (beta == 0) return fsdp_stream_copy(tape->stream, to, grad->data, (size_t)t->numel * sizeof(float));
    return fsdp_stream_launch(tape->stream, k_add, &(add_args){ to, grad->data, t->numel }, sizeof(add_args));
}

/* ---- scopes ---- */

static fsdp_status mark(fsdp_tape *tape, fsdpi_node_kind kind, const fsdpi_scope_hooks *hooks, void *ctx)
{
    if (tape->unrecorded > 0) return FSDP_OK;
    fsdpi_node *n;
    FSDP_TRY(append(&n, tape));
    n->kind = kind;
    n->hooks = hooks;
    n->hook_ctx = ctx;
    return FSDP_OK;
}

static fsdp_status reserve_scope(fsdp_tape *tape)
{
    if (tape->open_scopes < tape->open_room) return FSDP_OK;
    int room = tape->open_room > 0 ? 2 * tape->open_room : 16;
    void *p = fsdpi_realloc(tape->open, (size_t)room, sizeof(*tape->open));
    FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for %d modules within each other", room);
    tape->open = p;
    tape->open_room = room;
    return FSDP_OK;
}

fsdp_status fsdpi_tape_enter(fsdp_tape *tape, const fsdpi_scope_hooks *hooks, void *ctx)
{
    FSDP_TRY(check_can_go_on(tape)); /* before a hook has gathered anything */
    FSDP_TRY(reserve_scope(tape));
    if (hooks != NULL && hooks->before_forward != NULL) FSDP_TRY(hooks->before_forward(ctx, tape));
    tape->open[tape->open_scopes++] = (fsdpi_open_scope){ .hooks = hooks, .ctx = ctx };
    return hooks != NULL ? mark(tape, FSDPI_NODE_ENTER, hooks, ctx) : FSDP_OK;
}

fsdp_status fsdpi_tape_leave(fsdp_tape *tape, const fsdpi_scope_hooks *hooks, void *ctx)
{
    FSDPI_ASSERT(tape->open_scopes > 0);
    if (hooks != NULL && hooks->after_forward != NULL) FSDP_TRY(hooks->after_forward(ctx, tape));
    if (hooks != NULL) FSDP_TRY(mark(tape, FSDPI_NODE_LEAVE, hooks, ctx));
    tape->open_scopes--;
    return FSDP_OK;
}

fsdp_status fsdpi_tape_leave_to(fsdp_tape *tape, int depth)
{
    while (tape->open_scopes > depth) {
        fsdpi_open_scope innermost = tape->open[tape->open_scopes - 1];
        FSDP_TRY(fsdpi_tape_leave(tape, innermost.hooks, innermost.ctx));
    }
    return FSDP_OK;
}

fsdp_status fsdpi_tape_leave_lingering(fsdp_tape *tape)
{
    int depth = tape->open_scopes;
    while (depth > 0 && tape->open[depth - 1].lingers) depth--;
    return fsdpi_tape_leave_to(tape, depth);
}

/* ---- backward ---- */

/* Runs the hooks of all scopes that are entered but not told yet, the outermost first. */
static fsdp_status tell_scopes(fsdp_tape *tape)
{
    for (int i = 0; i < tape->pending_count; i++) {
        if (tape->pending[i] < 0) continue;
        const fsdpi_node *n = &tape->node[tape->pending[i]];
        tape->pending[i] = -1;
        if (n->hooks->before_backward != NULL) FSDP_TRY(n->hooks->before_backward(n->hook_ctx, tape));
    }
    return FSDP_OK;
}

static bool has_grad(const fsdp_tape *tape, const fsdpi_node *n)
{
    for (int i = 0; i < n->outs; i++)
        if (n->out[i]->grad != NULL || n->out[i] == tape->loss) return true;
    return false;
}

static fsdp_status visit(fsdp_tape *tape, int at)
{
    fsdpi_node *n = &tape->node[at];
    if (n->kind == FSDPI_NODE_LEAVE) { /* backwards: the scope begins */
        tape->pending[tape->pending_count++] = at;
        return FSDP_OK;
    }
    if (n->kind == FSDPI_NODE_ENTER) {
        bool told = tape->pending[--tape->pending_count] < 0;
        if (told && n->hooks->after_backward != NULL) FSDP_TRY(n->hooks->after_backward(n->hook_ctx, tape));
        return FSDP_OK;
    }
    if (has_grad(tape, n)) {
        FSDP_TRY(tell_scopes(tape));
        FSDP_TRY(n->backward(tape, n));
        n = &tape->node[at]; /* a region has appended nodes, and taken them off again */
    }
    for (int i = 0; i < n->outs; i++) {
        fsdpi_storage_release(n->out[i]->grad);
        n->out[i]->grad = NULL;
    }
    release_node(n);
    return FSDP_OK;
}

fsdp_status fsdpi_tape_backward(fsdp_tape *tape, fsdp_tensor *loss)
{
    FSDP_FAIL_IF(loss == NULL || loss->tape != tape, FSDP_ERR_INVALID, "fsdp_backward: the loss is not of this tape");
    FSDP_FAIL_IF(tape->opts.eval, FSDP_ERR_STATE, "fsdp_backward: the tape was begun for evaluation");
    FSDP_FAIL_IF(tape->went_back || tape->failed, FSDP_ERR_STATE, "fsdp_backward: this tape has gone back already: begin a new one for each micro-batch");
    FSDP_FAIL_IF(loss->materialise == NULL, FSDP_ERR_INVALID, "fsdp_backward: this tensor is no loss: fsdp_op_cross_entropy() and the like make one");
    FSDP_TRY(fsdpi_tape_leave_lingering(tape));
    FSDP_FAIL_IF(tape->open_scopes > 0, FSDP_ERR_STATE,
                 "fsdp_backward: the forward of a module is still open: it failed, or this call is within it: cancel the tape, or call it after fsdp_forward()");
    FSDP_FAIL_IF(!loss->needs_grad, FSDP_ERR_INVALID, "fsdp_backward: the loss does not depend on anything that needs a gradient: are all its parameters frozen?");
    tape->failed = true; /* until it ends */
    FSDP_TRY(fsdpi_storage_create(&tape->seed, tape->arena, sizeof(float)));
    FSDP_TRY(fsdp_stream_copy(tape->stream, tape->seed->data, &tape->opts.loss_scale, sizeof(float)));
    tape->loss = loss;
    FSDP_TRY(fsdpi_tape_go_back(tape, 0));
    tape->failed = false;
    tape->went_back = true;
    return FSDP_OK;
}

fsdp_status fsdpi_tape_go_back(fsdp_tape *tape, int from)
{
    int *pending = tape->pending, count = tape->pending_count;
    FSDPI_NEW(tape->pending, tape->nodes - from + 1);
    tape->pending_count = 0;
    fsdp_status st = FSDP_OK;
    for (int i = tape->nodes - 1; i >= from && st == FSDP_OK; i--) {
        const char *name = tape->node[i].name;
        st = visit(tape, i);
        if (st != FSDP_OK) st = fsdp_error_through(st, name != NULL ? name : __func__, __FILE__, __LINE__);
    }
    fsdpi_free(tape->pending);
    tape->pending = pending;
    tape->pending_count = count;
    return st;
}
