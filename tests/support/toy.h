/* SPDX-License-Identifier: MIT
 *
 * A small network for tests of the core, of odd sizes, that runs on any device: its compute is kernels. Four units:
 *
 *   root   emb [13,6], scale [], nothing [0]     emb is used at the bottom and, transposed, at the top (tied)
 *   l0     w [6,6], b [6]                         inside root
 *   l1     w [6,6], b [6]                         inside root; used twice in a forward
 *   tiny   gain [1]                               smaller than any number of ranks
 *
 * A leaf is a sequence of 5 tokens: h = scale emb[t] ; h += relu(w h + b) for l0, l1, l1 ; h *= gain ;
 * logits = emb h ; loss = sum of (logit - onehot(next))^2 / 2. */
#ifndef FSDP_TESTS_TOY_H
#define FSDP_TESTS_TOY_H

#include <fsdp/fsdp.h>

enum { TOY_UNITS = 4, TOY_VOCAB = 13, TOY_WIDTH = 6, TOY_TOKENS = 5 };

typedef struct toy {
    fsdp_comm *comm;
    fsdp_unit *unit[TOY_UNITS];
    fsdp_device *device;
    struct toy_state *state;
} toy;

typedef struct toy_opts {
    fsdp_mode mode;
    int shards; /* as fsdp_unit_opts */
    const char *device; /* "cpu", "guard" */
    uint64_t seed;
    int prefetch;
} toy_opts;

fsdp_status toy_create(toy *t, fsdp_comm *comm, const toy_opts *opts);
void toy_destroy(toy *t);

/* Forward and backward of one leaf in a pass of its own; *loss (may be NULL) is its loss. */
fsdp_status toy_leaf(toy *t, int64_t leaf, double *loss);
/* The same up to, but without, the end of the pass. */
fsdp_status toy_leaf_open(toy *t, int64_t leaf, fsdp_pass **pass);
/* Forward alone. */
fsdp_status toy_eval(toy *t, int64_t leaf, double *loss);
/* All of a step's leaves that are this rank's, then the optimizer. losses: leaves of them; *loss: their sum. */
fsdp_status toy_step(toy *t, fsdp_optim *optim, int64_t step, int leaves, double *loss, double *norm);

fsdp_unit_list toy_list(const toy *t);
/* All parameters, whole, one after another, to every rank; room for toy_numel(). */
fsdp_status toy_read(toy *t, float *out);
int toy_numel(void);

#endif
