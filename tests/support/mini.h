/* SPDX-License-Identifier: MIT
 *
 * Units whose use is written as a script, for tests of sequences that no network has. Compute is kernels, on any
 * device: a forward mixes the unit's parameters into the leaf's number; a backward makes gradients of that number,
 * the parameters and the leaf. So whatever a wrong, torn or stale parameter touches has other bits.
 *
 *   0 root  w [5,3], s []      1 a  w [6,6], b [6]      2 b  w [6,6], b [6], of a's size
 *   3 tiny  g [1]              4 none                   5 big  w [37,11], e [0], b [37]
 *
 * A script is the body of a pass, in tokens:
 *   [1  begins a's forward     ]1  ends it     F1  both
 *   {1  begins a's backward    }1  ends it     B1  both
 *   P1  a backward that writes the gradient of parameter 0 alone;   N1  one that writes none */
#ifndef FSDP_TESTS_MINI_H
#define FSDP_TESTS_MINI_H

#include <fsdp/fsdp.h>

enum { MINI_UNITS = 6, MINI_ROOT = 0, MINI_A, MINI_B, MINI_TINY, MINI_NONE, MINI_BIG };

/* All units in a row: what most tests train. */
#define MINI_NESTED "[0 F1 F2 F3 F4 F5 ]0 {0 B5 B4 B3 B2 B1 }0"

typedef struct mini {
    fsdp_comm *comm;
    fsdp_device *device, *storage, *grads, *state;
    fsdp_unit *unit[MINI_UNITS];
    fsdp_pass *pass; /* of mini_leaf(), while it runs; stays open after an error: cancel it */
    bool no_sync;    /* of the passes of mini_leaf() */
    float *number;   /* of each leaf, host memory */
    fsdp_optim *optim;
} mini;

typedef struct mini_opts {
    fsdp_mode mode;
    int shards; /* this and the types as in fsdp_unit_opts */
    fsdp_dtype param_dtype, reduce_dtype, grad_dtype;
    bool exact_eval;
    int reshard_group;
    const char *device;  /* NULL: "cpu" */
    const char *storage; /* NULL: device */
    const char *grads;   /* where gradients are added up; NULL: storage */
    const char *state;   /* of the optimizer's state; NULL: storage */
    int prefetch;
    bool sgd; /* else AdamW */
    unsigned frozen; /* bits of units: frozen, all of their parameters, before the optimizer is made */
} mini_opts;

enum { MINI_LEAVES = 4096 };

/* Units, their values, an optimizer. After a failure mini_destroy() is called as well. */
fsdp_status mini_create(mini *m, fsdp_comm *comm, const mini_opts *opts);
void mini_destroy(mini *m);

/* Runs a script in a pass. Leaves with the same number share a value: one a pass. */
fsdp_status mini_run(mini *m, fsdp_pass *pass, const char *script, int64_t leaf);
/* A pass of its own: begin, run, end. */
fsdp_status mini_leaf(mini *m, const char *script, int64_t leaf);
/* This rank's leaves of a step, then the optimizer. */
fsdp_status mini_step(mini *m, const char *script, int64_t step, int leaves);

fsdp_unit_list mini_list(const mini *m);
/* All parameters of a unit. */
fsdp_status mini_freeze(mini *m, int unit, bool frozen);
int mini_numel(void);
/* All parameters, whole, on every rank; room for mini_numel(). */
fsdp_status mini_read(mini *m, float *out);
/* The initial value of an element. */
float mini_value(const char *name, int64_t i);

/* ---- the same without the core: one process, whole vectors, plain loops ---- */

typedef struct plain plain;

plain *plain_create(void);
/* As fsdp_unit_opts.grad_dtype of all units; before the first leaf. */
void plain_set_grad_dtype(plain *p, fsdp_dtype t);
void plain_destroy(plain *p);
/* A pass of one leaf; its gradients count at once, as those of all leaves do in the order of their numbers. */
void plain_leaf(plain *p, const char *script, int64_t leaf);
/* A leaf of one of several ranks, with or without sync: call it in the order of passes, and of ranks in each. */
void plain_leaf_of(plain *p, const char *script, int64_t leaf, int rank, bool sync);
/* The same of a rank that has no leaf, and joins: gradients of 0. */
void plain_nothing_of(plain *p, const char *script, int rank, bool sync);
/* What would be pending of parameter i: this rank's own sums; false: nothing. */
bool plain_own(const plain *p, int rank, int unit, int i, float *out);
/* And the sums of all ranks; after plain_send() all there is. */
bool plain_reduced(const plain *p, int unit, int i, float *out);
void plain_send(plain *p);
void plain_zero_grad(plain *p);
/* As fsdp_optim_step() of mini_opts.sgd with this grad_scale and no clipping. */
void plain_step(plain *p, float scale);
/* As fsdp_unit_set_frozen(). */
void plain_freeze(plain *p, int unit, int param, bool frozen);
void plain_read(const plain *p, float *out);

#endif
