/* SPDX-License-Identifier: MIT
 *
 * The kernels of the operations, as a table for each kind of device. An operation (a file of its own in this folder)
 * checks shapes, allocates, and launches kernels; a kernel only computes.
 *
 * Rules for every kernel:
 *  - It is a fsdp_kernel_fn: args points to a copy of the struct below; pointers in it are device addresses and are
 *    used through fsdp_kernel_ptr(). NULL where a pointer is marked (optional) leaves that output out.
 *  - All arrays are dense, row-major fp32 unless said. Letters: B samples, T positions, H heads, C = H * D channels,
 *    M = B * T rows, V vocabulary, K inputs, N outputs.
 *  - Outputs that are gradients have a beta: 0 overwrites (what was there may be garbage or NaN), 1 adds.
 *  - The same bits for any number of threads: work is cut by the shape of the result, in blocks of a fixed size, and
 *    partial sums are added in block order. The same bits on every instruction set, but for the matrix library.
 *  - Scratch comes from the caller: x_scratch(args, threads) says how many bytes; NULL args.scratch is never used
 *    where that is 0. */
#ifndef FSDPI_OPS_KERNELS_H
#define FSDPI_OPS_KERNELS_H

#include "device/device.h"

/* Which values are dropped is a function of (seed, step, sample, layer, element): the same on any rank, and again in
 * the backward. `sample` is the number of the sample in the global batch of the step, `layer` numbers the places in
 * the model where dropout happens, `element` counts within a sample. A value is kept, and multiplied by 1 / (1 - p),
 * where its 32 bits are >= p * 2^32. See base/philox.h for the counter, in which there is room for steps below 2^30 and
 * elements below 2^34. */
typedef struct fsdpi_dropout {
    float p; /* 0: off, nothing is drawn */
    uint64_t seed;
    uint32_t step, layer, first_sample; /* sample b of the tensor is sample first_sample + b of the step */
} fsdpi_dropout;

typedef enum fsdpi_activation { FSDPI_ACT_NONE, FSDPI_ACT_GELU_TANH, FSDPI_ACT_GELU_ERF, FSDPI_ACT_RELU } fsdpi_activation;

/* y = act(x W' + bias). weight is [N,K] (W' its transpose), or [K,N] where in_out (GPT-2's "Conv1D"). */
typedef struct fsdpi_linear_args {
    const float *x;    /* [M,K] */
    const float *weight;
    const float *bias; /* (optional) [N] */
    float *y;          /* [M,N] */
    float *pre;        /* (optional) [M,N]: the values before act, which the backward wants; act NONE: unused */
    int64_t M, N, K;
    bool in_out;
    fsdpi_activation act;
} fsdpi_linear_args;

/* Given dy: d pre = dy * act'(pre), then dx = d pre W, dweight, dbias. */
typedef struct fsdpi_linear_backward_args {
    const float *dy; /* [M,N]; not changed */
    const float *x, *weight;
    const float *pre; /* where act is not NONE */
    float *dx;        /* (optional) */
    float *dweight;   /* (optional) */
    float *dbias;     /* (optional) */
    float dx_beta, dweight_beta, dbias_beta;
    void *scratch; /* fsdpi_linear_backward_scratch */
    int64_t M, N, K;
    bool in_out;
    fsdpi_activation act;
} fsdpi_linear_backward_args;
size_t fsdpi_linear_backward_scratch(const fsdpi_linear_backward_args *a, int threads);

/* y = act(x) and dx (+)= dy * act'(x), elementwise. In place (y == x, dx == dy) is allowed. */
typedef struct fsdpi_activation_args {
    const float *x, *dy; /* dy: backward only */
    float *out;          /* y, or dx */
    float beta;          /* backward only */
    int64_t numel;
    fsdpi_activation act;
} fsdpi_activation_args;

/* sum = x + residual (where residual is given), y = (sum - mean) * rstd * weight + bias over the last dimension. */
typedef struct fsdpi_layer_norm_args {
    const float *x;        /* [M,C] */
    const float *residual; /* (optional) [M,C] */
    const float *weight, *bias; /* [C]; (bias optional) */
    float *sum;            /* [M,C], where residual is given; may be x */
    float *y;              /* [M,C] */
    float *mean, *rstd;    /* [M] */
    int64_t M, C;
    float eps;
} fsdpi_layer_norm_args;

/* dx (+)= gradient through the norm (+ dsum, the gradient that reaches x + residual directly). */
typedef struct fsdpi_layer_norm_backward_args {
    const float *dy, *x, *weight, *mean, *rstd; /* x: what was normalised ([M,C]: x, or sum) */
    const float *dsum; /* (optional) [M,C]; may be dx */
    float *dx;         /* [M,C] */
    float *dweight, *dbias; /* (optional) [C] */
    float dx_beta, dweight_beta, dbias_beta;
    void *scratch; /* fsdpi_layer_norm_backward_scratch */
    int64_t M, C;
} fsdpi_layer_norm_backward_args;
size_t fsdpi_layer_norm_backward_scratch(const fsdpi_layer_norm_backward_args *a, int threads);

/* Self-attention without the T x T matrix: rows are taken in blocks, columns past the diagonal are skipped where
 * causal, and only the log-sum-exp of each row is kept. scores = scale * q k', p = softmax, out = dropout(p) v. */
typedef struct fsdpi_attention_args {
    const float *qkv; /* [B,T,3C]: q, k, v, each [H,D] */
    float *out;       /* [B,T,C] */
    float *lse;       /* [B,H,T] */
    void *scratch;    /* fsdpi_attention_scratch */
    int64_t B, T, H, D;
    float scale;
    bool causal;
    fsdpi_dropout dropout; /* element = (h * T + row) * T + column */
} fsdpi_attention_args;
size_t fsdpi_attention_scratch(const fsdpi_attention_args *a, int threads);

typedef struct fsdpi_attention_backward_args {
    fsdpi_attention_args f; /* as in the forward: out and lse are now inputs; f.scratch unused */
    const float *dout;      /* [B,T,C] */
    float *dqkv;            /* [B,T,3C] */
    float beta;             /* of dqkv */
    void *scratch;          /* fsdpi_attention_backward_scratch */
} fsdpi_attention_backward_args;
size_t fsdpi_attention_backward_scratch(const fsdpi_attention_backward_args *a, int threads);

/* One new position of each sample against cached keys and values, for generation:
 * qkv is [B,3C]; k and v of the position are first written into cache_k/v [B,T,C] at `pos`; out is [B,C]. */
typedef struct fsdpi_attention_step_args {
    const float *qkv;
    float *cache_k, *cache_v, *out;
    int64_t B, T, H, D, pos; /* attends to positions 0 .. pos */
    float scale;
} fsdpi_attention_step_args;

/* out = token[ids[m]] + position[first_position + m mod T]; position optional. */
typedef struct fsdpi_embedding_args {
    const int32_t *ids;    /* [M], each in [0, V): checked; FSDP_ERR_INVALID names the row and the id */
    const float *token;    /* [V,C] */
    const float *position; /* (optional) [>= first_position + T, C] */
    float *out;            /* [M,C] */
    int64_t M, T, V, C, first_position;
} fsdpi_embedding_args;

/* Adds dout's rows to the rows of dtoken, in row order; beta 0 sets all of dtoken first. The same for dposition. */
typedef struct fsdpi_embedding_backward_args {
    const int32_t *ids;
    const float *dout;
    float *dtoken;    /* (optional) [V,C] */
    float *dposition; /* (optional) [positions,C]; rows not used are zeroed where beta is 0 */
    float dtoken_beta, dposition_beta;
    int64_t M, T, V, C, positions, first_position;
} fsdpi_embedding_backward_args;

/* out = x + y; or dx (+)= dy as an add with beta (fsdpi_axpby). In place is allowed. */
typedef struct fsdpi_add_args {
    const float *x, *y;
    float *out;
    int64_t numel;
} fsdpi_add_args;

/* out = beta * out + alpha * x; beta 0 does not read out. */
typedef struct fsdpi_axpby_args {
    const float *x;
    float *out;
    float alpha, beta;
    int64_t numel;
} fsdpi_axpby_args;

/* out (+)= x * mask / (1 - p). Forward and backward are the same. x is [B, per_sample]. */
typedef struct fsdpi_dropout_args {
    const float *x;
    float *out;
    float beta;
    int64_t B, per_sample;
    fsdpi_dropout dropout;
} fsdpi_dropout_args;

/* What a loss is: a sum over rows, and how many rows count. Lives in device memory. */
typedef struct fsdpi_loss {
    double sum, count;
} fsdpi_loss;

/* Softmax cross-entropy over rows. Rows with label -100 do not count; other labels outside [0, V) are
 * FSDP_ERR_INVALID with row and label. dlogits (+)= (softmax - onehot) * *seed. Row losses are summed in row order. */
typedef struct fsdpi_cross_entropy_args {
    const float *logits; /* [M,V] */
    const int32_t *labels; /* [M] */
    fsdpi_loss *loss;    /* (optional): written */
    const float *seed;   /* where dlogits is given: the gradient of the loss' sum, one float in device memory */
    float *dlogits;      /* (optional) [M,V]; may be logits where beta is 0 */
    float beta;
    void *scratch; /* fsdpi_cross_entropy_scratch: row losses */
    int64_t M, V;
} fsdpi_cross_entropy_args;
size_t fsdpi_cross_entropy_scratch(const fsdpi_cross_entropy_args *a, int threads);

/* The same for logits = x weight', weight [V,K], without ever holding all logits: rows are taken in chunks. With
 * dx or dweight wanted, loss and gradients come out of one pass over the chunks. */
typedef struct fsdpi_linear_cross_entropy_args {
    const float *x;      /* [M,K] */
    const float *weight; /* [V,K] */
    const int32_t *labels;
    fsdpi_loss *loss;  /* (optional) */
    const float *seed; /* as above */
    float *dx, *dweight; /* (optional) */
    float dx_beta, dweight_beta;
    void *scratch; /* fsdpi_linear_cross_entropy_scratch: a chunk of logits and more */
    int64_t M, V, K;
} fsdpi_linear_cross_entropy_args;
size_t fsdpi_linear_cross_entropy_scratch(const fsdpi_linear_cross_entropy_args *a, int threads);

/* One table a kind of device; every member required. */
typedef struct fsdpi_op_kernels {
    fsdp_kernel_fn linear, linear_backward;
    fsdp_kernel_fn activation, activation_backward;
    fsdp_kernel_fn layer_norm, layer_norm_backward;
    fsdp_kernel_fn attention, attention_backward, attention_step;
    fsdp_kernel_fn embedding, embedding_backward;
    fsdp_kernel_fn add, axpby, dropout;
    fsdp_kernel_fn cross_entropy, linear_cross_entropy;
} fsdpi_op_kernels;

/* For devices whose kernels run on the CPU ("cpu", "guard"). */
extern const fsdpi_op_kernels fsdpi_op_kernels_cpu;

/* The plain versions: a few lines each, no blocks, no threads, double accumulators; what the others are tested
 * against. Same arguments. */
extern const fsdpi_op_kernels fsdpi_op_kernels_reference;

#endif
