/* SPDX-License-Identifier: MIT
 *
 * Operations on tensors, each with its backward. They check shapes, compute on the tape's device, and note themselves
 * on the tape if an input needs a gradient. All tensors are fp32 but for ids and labels (i32). Parameters (from a
 * module) and tensors made from values serve alike as weights.
 *
 * Letters: B samples, T positions, C channels, H heads, V vocabulary, [...] any leading dimensions.
 * Outputs belong to the tape. Not collective. FSDP_ERR_INVALID names the operation and the shapes it was given. */
#ifndef FSDP_OPS_H
#define FSDP_OPS_H

#include <fsdp/autograd.h>

FSDP_BEGIN_DECLS

typedef enum fsdp_activation {
    FSDP_ACT_NONE,
    FSDP_ACT_GELU_TANH, /* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): Hugging Face's gelu_new */
    FSDP_ACT_GELU_ERF,  /* 0.5 x (1 + erf(x / sqrt 2)) */
    FSDP_ACT_RELU,
} fsdp_activation;

typedef struct fsdp_op_linear_opts {
    bool in_out;                /* the weight is [in, out] (GPT-2's Conv1D) instead of [out, in] */
    fsdp_activation activation; /* applied to the result, in the same pass */
} fsdp_op_linear_opts;

/* y[..., out] = activation(x[..., in] W + bias). bias [out] may be NULL; so may opts. */
FSDP_API fsdp_status fsdp_op_linear(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *weight, fsdp_tensor *bias,
                                    const fsdp_op_linear_opts *opts, fsdp_tensor **y) FSDP_NODISCARD;

FSDP_API fsdp_status fsdp_op_activation(fsdp_tape *tape, fsdp_tensor *x, fsdp_activation activation, fsdp_tensor **y) FSDP_NODISCARD;

/* out = x + y, of the same shape. */
FSDP_API fsdp_status fsdp_op_add(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *y, fsdp_tensor **out) FSDP_NODISCARD;

/* Zeroes each value with probability p and divides the others by 1 - p; the first dimension is that of samples. Which
 * values is a function of the tape's seed and step, the sample, the place in the model, and the element. On an
 * evaluation tape, or with p 0, *y is x. */
FSDP_API fsdp_status fsdp_op_dropout(fsdp_tape *tape, fsdp_tensor *x, float p, fsdp_tensor **y) FSDP_NODISCARD;

/* Over the last dimension, C: y = (x - mean) / sqrt(var + eps) weight + bias; bias may be NULL. */
FSDP_API fsdp_status fsdp_op_layer_norm(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *weight, fsdp_tensor *bias, float eps,
                                        fsdp_tensor **y) FSDP_NODISCARD;
/* sum = x + residual and its norm, in one pass. */
FSDP_API fsdp_status fsdp_op_add_layer_norm(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *residual, fsdp_tensor *weight,
                                            fsdp_tensor *bias, float eps, fsdp_tensor **sum, fsdp_tensor **y) FSDP_NODISCARD;

/* out[B, T, C] = token[ids[B, T]] + position[first_position + t]; position may be NULL. */
FSDP_API fsdp_status fsdp_op_embedding(fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor *token, fsdp_tensor *position,
                                       int64_t first_position, fsdp_tensor **out) FSDP_NODISCARD;

typedef struct fsdp_op_attention_opts {
    int heads;
    bool causal;
    float scale;   /* of q k'; 0: 1 / sqrt(C / heads) */
    float dropout; /* of the probabilities */
} fsdp_op_attention_opts;

/* Self-attention: qkv [B, T, 3 C] holds q, k and v side by side, heads within each; out [B, T, C]. */
FSDP_API fsdp_status fsdp_op_attention(fsdp_tape *tape, fsdp_tensor *qkv, const fsdp_op_attention_opts *opts, fsdp_tensor **out) FSDP_NODISCARD;

/* Softmax cross-entropy: the sum over the rows of scores [..., V], and how many rows count. labels: i32, one a row;
 * -100 does not count. */
FSDP_API fsdp_status fsdp_op_cross_entropy(fsdp_tape *tape, fsdp_tensor *scores, fsdp_tensor *labels, fsdp_tensor **loss) FSDP_NODISCARD;

/* The same of scores = x [..., C] weight' [V, C], which are never held all at once. */
FSDP_API fsdp_status fsdp_op_linear_cross_entropy(fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *weight, fsdp_tensor *labels,
                                                  fsdp_tensor **loss) FSDP_NODISCARD;

/* The same values in another shape of as many elements. */
FSDP_API fsdp_status fsdp_op_reshape(fsdp_tape *tape, fsdp_tensor *x, int ndim, const int64_t *shape, fsdp_tensor **y) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
