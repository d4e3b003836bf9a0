/* SPDX-License-Identifier: MIT
 *
 * Self-attention, by blocks of rows: of the T x T matrix only the log-sum-exp of each row is kept (Dao et al.,
 * "FlashAttention", 2022, has the formulas of the backward). */
#include "ops/ops.h"

#include <math.h>

enum { SAVED_QKV, SAVED_OUT, SAVED_LSE };

static fsdp_status backward(fsdp_tape *tape, fsdpi_node *n)
{
    fsdpi_attention_backward_args a = { .f = *(fsdpi_attention_args *)n->attributes, .dout = fsdpi_grad_of(n->out[0]) };
    FSDP_TRY(fsdpi_saved(tape, n, SAVED_QKV, n->in[0], &a.f.qkv));
    a.f.out = n->saved[SAVED_OUT]->data;
    a.f.lse = n->saved[SAVED_LSE]->data;
    FSDP_TRY(fsdpi_grad_into(tape, n->in[0], &a.dqkv, &a.beta));
    if (a.dqkv == NULL) return FSDP_OK;
    FSDP_TRY(fsdpi_scratch(tape, fsdpi_attention_backward_scratch(&a, fsdpi_threads_of(tape)), &a.scratch));
    fsdp_status st = FSDPI_LAUNCH(tape, attention_backward, &a);
    fsdpi_scratch_free(tape, a.scratch);
    return st;
}

static fsdp_status check(const fsdp_tape *tape, const fsdp_tensor *qkv, const fsdp_op_attention_opts *o)
{
    FSDP_TRY(fsdpi_check_tensor(tape, "attention", "qkv", qkv, FSDP_F32));
    char text[128];
    FSDP_FAIL_IF(qkv->ndim != 3 || o->heads < 1 || fsdp_tensor_shape(qkv, 2) % (3 * (int64_t)o->heads) != 0, FSDP_ERR_INVALID,
                 "attention: qkv is %s with %d heads: it must be [B, T, 3 C] with C a multiple of the heads", fsdpi_shape_text(qkv, text), o->heads);
    FSDP_FAIL_IF(!(o->dropout >= 0 && o->dropout < 1), FSDP_ERR_INVALID, "attention: dropout is %g: must be 0 or more, and less than 1", (double)o->dropout);
    return FSDP_OK;
}

fsdp_status fsdp_op_attention(fsdp_tape *tape, fsdp_tensor *qkv, const fsdp_op_attention_opts *opts, fsdp_tensor **out)
{
    FSDP_FAIL_IF(opts == NULL, FSDP_ERR_INVALID, "attention: no options: the number of heads has no default");
    FSDP_TRY(check(tape, qkv, opts));
    int64_t B = qkv->shape[0], T = qkv->shape[1], C = qkv->shape[2] / 3, H = opts->heads;
    fsdpi_attention_args a = { .B = B, .T = T, .H = H, .D = C / H, .causal = opts->causal };
    a.scale = opts->scale != 0 ? opts->scale : a.D > 0 ? (float)(1.0 / sqrt((double)a.D)) : 1.0f;
    uint32_t layer = tape->dropout_layers++;
    if (!tape->opts.eval) a.dropout = (fsdpi_dropout){ opts->dropout, tape->opts.seed, tape->opts.step, layer, tape->opts.first_sample };
    FSDPI_DATA(qkv, a.qkv);
    fsdp_tensor *o;
    FSDP_TRY(fsdpi_tape_tensor(&o, tape, FSDP_F32, 3, (int64_t[]){ B, T, C }));
    a.out = o->storage->data;
    fsdpi_storage *lse;
    FSDP_TRY(fsdpi_storage_create(&lse, tape->arena, (size_t)(B * H * T) * sizeof(float)));
    a.lse = lse->data;
    fsdp_status st = fsdpi_scratch(tape, fsdpi_attention_scratch(&a, fsdpi_threads_of(tape)), &a.scratch);
    if (st == FSDP_OK) st = FSDPI_LAUNCH(tape, attention, &a);
    fsdpi_scratch_free(tape, a.scratch);
    a.scratch = NULL;
    fsdpi_node *n;
    if (st == FSDP_OK && fsdpi_tape_records(tape, &qkv, 1) && (st = fsdpi_tape_append(&n, tape, "attention", backward, &a, sizeof(a))) == FSDP_OK) {
        fsdpi_node_input(n, qkv);
        fsdpi_node_output(n, o);
        fsdpi_node_save(n, SAVED_QKV, qkv->storage);
        fsdpi_node_save(n, SAVED_OUT, o->storage);
        fsdpi_node_save(n, SAVED_LSE, lse);
    }
    fsdpi_storage_release(lse);
    FSDP_TRY(st);
    *out = o;
    return FSDP_OK;
}
