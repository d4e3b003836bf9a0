/* SPDX-License-Identifier: MIT
 *
 * The tape, from the inside: nodes, gradients, scopes.
 *
 * An operation that has an input which needs a gradient appends a node. The node retains the storages that its
 * backward reads. fsdpi_tape_backward() visits nodes from the last to the first; when a node is reached, the
 * gradients of its outputs are complete, since all who used them came later on the tape.
 *
 * Gradients are storages too, and may be shared: an addition hands the gradient of its output to both inputs without
 * a copy. Whoever wants to add to a gradient that is shared gets a copy first (fsdpi_grad_into).
 *
 * Scopes mark what belongs to a module. Hooks of a scope run in this order:
 *   before_forward    before its first operation
 *   after_forward     after its last one
 *   before_backward   before the first of its operations whose output has a gradient goes back
 *   after_backward    after the last of its operations has gone back, so after its last parameter's gradient
 * Scopes nest; an outer before_* comes before an inner one, an outer after_* after. Where no gradient reaches a scope
 * its backward hooks do not run. */
#ifndef FSDPI_AUTOGRAD_TAPE_H
#define FSDPI_AUTOGRAD_TAPE_H

#include <fsdp/autograd.h>

#include "tensor/tensor.h"

enum { FSDPI_NODE_INS = 6, FSDPI_NODE_OUTS = 2, FSDPI_NODE_SAVED = 8 };

typedef struct fsdpi_scope_hooks {
    fsdp_status (*before_forward)(void *ctx, fsdp_tape *tape);
    fsdp_status (*after_forward)(void *ctx, fsdp_tape *tape);
    fsdp_status (*before_backward)(void *ctx, fsdp_tape *tape);
    fsdp_status (*after_backward)(void *ctx, fsdp_tape *tape);
} fsdpi_scope_hooks; /* any may be NULL */

typedef struct fsdpi_node fsdpi_node;

/* Reads the gradients of node->out (fsdpi_grad_of), writes those of node->in (fsdpi_grad_into, fsdpi_grad_share). */
typedef fsdp_status (*fsdpi_backward_fn)(fsdp_tape *tape, fsdpi_node *node);

typedef enum fsdpi_node_kind { FSDPI_NODE_OP, FSDPI_NODE_ENTER, FSDPI_NODE_LEAVE } fsdpi_node_kind;

struct fsdpi_node {
    fsdpi_node_kind kind;
    const char *name; /* a literal, for messages */
    fsdpi_backward_fn backward;
    fsdp_tensor *in[FSDPI_NODE_INS]; /* NULL: an optional input that was not given */
    fsdp_tensor *out[FSDPI_NODE_OUTS];
    int ins, outs;
    fsdpi_storage *saved[FSDPI_NODE_SAVED]; /* retained */
    void *attributes; /* the operation's own; freed with the node */
    const fsdpi_scope_hooks *hooks; /* ENTER, LEAVE */
    void *hook_ctx;
};

/* A scope that is entered and not left. hooks NULL: a mark of its owner, of which the backward sees nothing. */
typedef struct fsdpi_open_scope {
    const fsdpi_scope_hooks *hooks;
    void *ctx;
    const void *owner; /* for who enters it */
    bool lingers;      /* may stay open after its owner: it is left with the scope around it, or before the backward */
} fsdpi_open_scope;

struct fsdp_tape {
    fsdp_stream *stream;
    fsdpi_arena *arena;
    fsdp_tape_opts opts;
    fsdp_tensor *tensors; /* all that were made on it */
    fsdpi_node *node;
    int nodes, room;
    uint32_t dropout_layers;  /* places of dropout so far: they are numbered as they come */
    fsdpi_storage *seed;      /* one float: what backward begins with */
    bool went_back;           /* a backward has ended well */
    bool failed;              /* an operation or the backward has failed */
    fsdpi_open_scope *open;   /* entered and not left, the outermost first */
    int open_scopes, open_room;
    int unrecorded;           /* > 0: within a region that will be computed again: nothing is noted (recompute.c) */
    bool passed_over;         /* something that needs a gradient was not noted for it */
    bool recomputing;         /* that is being done */
    int *pending;             /* in backward: scopes entered whose hook has not run; indices of LEAVE nodes */
    int pending_count;
    fsdp_tensor *loss;        /* what backward began with */
    void *pass;               /* of the layer that made the tape (nn/tape_pass.c) */
    uint64_t pass_number;     /* its, to know whether it is still there */
    fsdp_comm *comm;
    struct fsdpi_tape_passes *others; /* of other communicators, that layer's too; NULL: none */
};

/* stream and arena are borrowed. */
fsdp_status fsdpi_tape_create(fsdp_tape **out, fsdp_stream *stream, fsdpi_arena *arena, const fsdp_tape_opts *opts);
void fsdpi_tape_destroy(fsdp_tape *tape);

/* ---- for operations ---- */

/* A tensor with memory of its own, on this tape. */
fsdp_status fsdpi_tape_tensor(fsdp_tensor **out, fsdp_tape *tape, fsdp_dtype dtype, int ndim, const int64_t *shape);
/* A tensor on another's storage (a reshape). */
fsdp_status fsdpi_tape_view(fsdp_tensor **out, fsdp_tape *tape, fsdp_tensor *of, int ndim, const int64_t *shape);

/* Whether a node is wanted: the tape trains and one of the tensors needs a gradient. */
bool fsdpi_tape_records(fsdp_tape *tape, fsdp_tensor *const *in, int ins);

/* Appends a node; outputs then need gradients. attributes: bytes copied from `attributes`. The node is good until the
 * next append. */
fsdp_status fsdpi_tape_append(fsdpi_node **out, fsdp_tape *tape, const char *name, fsdpi_backward_fn backward,
                              const void *attributes, size_t bytes);
void fsdpi_node_input(fsdpi_node *n, fsdp_tensor *t);
void fsdpi_node_output(fsdpi_node *n, fsdp_tensor *t);
/* Retains a storage for the backward (NULL: a parameter's, which has none). Slots are the operation's own. */
void fsdpi_node_save(fsdpi_node *n, int slot, fsdpi_storage *s);

/* The gradient of an output: NULL where none has come. */
const float *fsdpi_grad_of(const fsdp_tensor *t);
/* Where to write the gradient of an input, and whether to add to what is there. *out is NULL where none is wanted. */
fsdp_status fsdpi_grad_into(fsdp_tape *tape, fsdp_tensor *t, float **out, float *beta);
/* Hands a whole gradient over: shared if the input has none yet, else added. */
fsdp_status fsdpi_grad_share(fsdp_tape *tape, fsdp_tensor *t, fsdpi_storage *grad);

/* ---- for modules ---- */

fsdp_status fsdpi_tape_enter(fsdp_tape *tape, const fsdpi_scope_hooks *hooks, void *ctx);
/* The innermost scope. */
fsdp_status fsdpi_tape_leave(fsdp_tape *tape, const fsdpi_scope_hooks *hooks, void *ctx);
/* The innermost scopes, until `depth` are open. */
fsdp_status fsdpi_tape_leave_to(fsdp_tape *tape, int depth);
/* Those of them that linger. */
fsdp_status fsdpi_tape_leave_lingering(fsdp_tape *tape);

fsdp_status fsdpi_tape_backward(fsdp_tape *tape, fsdp_tensor *loss);

/* ---- regions that are computed again in the backward (activation checkpointing) ---- */

enum { FSDPI_REGION_MOST = 4 };

/* A part of a forward: a function of its inputs (some may be NULL) and of parameters, the same each time it is called. */
typedef fsdp_status (*fsdpi_region_fn)(void *ctx, fsdp_tape *tape, fsdp_tensor *const *in, fsdp_tensor **out);

/* Runs fn and keeps its inputs alone; the backward runs it again, noting its operations, and goes back over them. Dropout draws
 * what it drew before. Within another region, or on an evaluation tape, it just runs. ctx is borrowed for the tape's life. */
fsdp_status fsdpi_tape_region(fsdp_tape *tape, fsdpi_region_fn fn, void *ctx, fsdp_tensor *const *in, int ins, fsdp_tensor **out, int outs);

/* For recompute.c: goes back over the nodes from the last to number `from`. */
fsdp_status fsdpi_tape_go_back(fsdp_tape *tape, int from);
/* A tensor on a storage, on this tape. */
fsdp_status fsdpi_tape_tensor_on(fsdp_tensor **out, fsdp_tape *tape, fsdp_dtype dtype, int ndim, const int64_t *shape, fsdpi_storage *storage);

#endif
