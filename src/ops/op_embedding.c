/* SPDX-License-Identifier: MIT
 *
 * Embedding: rows of a table by token, plus rows by position. Backward: rows are added up, in order. */
#include "ops/ops.h"

typedef struct attributes {
    int64_t M, T, V, C, positions, first_position;
} attributes;

static fsdp_status backward(fsdp_tape *tape, fsdpi_node *n)
{
    const attributes *at = n->attributes;
    fsdpi_embedding_backward_args a = { .ids = n->saved[0]->data, .dout = fsdpi_grad_of(n->out[0]), .M = at->M, .T = at->T, .V = at->V,
                                        .C = at->C, .positions = at->positions, .first_position = at->first_position };
    FSDP_TRY(fsdpi_grad_into(tape, n->in[0], &a.dtoken, &a.dtoken_beta));
    FSDP_TRY(fsdpi_grad_into(tape, n->in[1], &a.dposition, &a.dposition_beta));
    return FSDPI_LAUNCH(tape, embedding_backward, &a);
}

fsdp_status fsdp_op_embedding(fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor *token, fsdp_tensor *position, int64_t first_position, fsdp_tensor **out)
{
    FSDP_TRY(fsdpi_check_tensor(tape, "embedding", "the ids", ids, FSDP_I32));
    FSDP_TRY(fsdpi_check_tensor(tape, "embedding", "the table", token, FSDP_F32));
    FSDP_FAIL_IF(ids->ndim < 1 || ids->ndim >= FSDP_MAX_DIMS || token->ndim != 2, FSDP_ERR_INVALID, "embedding: ids of %d dimensions, a table of %d", ids->ndim, token->ndim);
    attributes at = { .M = ids->numel, .T = fsdp_tensor_shape(ids, -1), .V = token->shape[0], .C = token->shape[1], .first_position = first_position };
    if (position != NULL) {
        FSDP_TRY(fsdpi_check_tensor(tape, "embedding", "the positions", position, FSDP_F32));
        at.positions = fsdp_tensor_shape(position, 0);
        FSDP_FAIL_IF(position->ndim != 2 || position->shape[1] != at.C || first_position < 0 || first_position + at.T > at.positions, FSDP_ERR_INVALID,
                     "embedding: %lld positions from %lld, but the table of positions has %lld", (long long)at.T, (long long)first_position,
                     (long long)at.positions);
    }
    int64_t shape[FSDP_MAX_DIMS];
    for (int d = 0; d < ids->ndim; d++) shape[d] = ids->shape[d];
    shape[ids->ndim] = at.C;
    fsdp_tensor *o;
    fsdpi_embedding_args a = { .M = at.M, .T = at.T, .V = at.V, .C = at.C, .first_position = first_position };
    FSDPI_DATA(ids, a.ids);
    FSDPI_DATA(token, a.token);
    if (position != NULL) FSDPI_DATA(position, a.position);
    FSDP_TRY(fsdpi_tape_tensor(&o, tape, FSDP_F32, ids->ndim + 1, shape));
    a.out = o->storage->data;
    FSDP_TRY(FSDPI_LAUNCH(tape, embedding, &a));
    fsdp_tensor *in[] = { token, position };
    if (fsdpi_tape_records(tape, in, 2)) {
        fsdpi_node *n;
        FSDP_TRY(fsdpi_tape_append(&n, tape, "embedding", backward, &at, sizeof(at)));
        fsdpi_node_input(n, token);
        fsdpi_node_input(n, position);
        fsdpi_node_output(n, o);
        fsdpi_node_save(n, 0, ids->storage);
    }
    *out = o;
    return FSDP_OK;
}
