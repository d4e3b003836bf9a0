/* SPDX-License-Identifier: MIT
 *
 * A training program written down once, and done twice: by ranks that shard it (support/mini.h), and by the plain program, which
 * adds up pass after pass, and in each rank after rank. Every rank must end with the plain one's bits. */
#ifndef FSDP_TESTS_MINI_PROGRAM_H
#define FSDP_TESTS_MINI_PROGRAM_H

#include "support/mini.h"
#include "support/ranks.h"

enum { MINI_MOST_RANKS = 8, MINI_MOST_NUMEL = 1024 };

/* One pass of one rank. */
typedef struct mini_turn {
    const char *script;
    int64_t leaf;
    bool no_sync;
    bool joins; /* the rank has no leaf: its gradients are 0 */
} mini_turn;

/* A parameter that is frozen, or trained again, before a step. */
typedef struct mini_change {
    int step, unit, param;
    bool frozen;
} mini_change;

typedef struct mini_program mini_program;
struct mini_program {
    int steps;
    /* A rank's pass number j in a step; false: there are no more, the same on all ranks. */
    bool (*turn)(const mini_program *p, int ranks, int step, int j, int rank, mini_turn *out);
    /* How a rank does the passes of a step; NULL: one after another, each with mini_leaf(). */
    fsdp_status (*passes)(const mini_program *p, mini *m, int step);
    const char *script; /* for turn() */
    const mini_change *change; /* in the order of steps */
    int changes;
    mini_opts units; /* beside mode and device. storage, grads "other": the device that does not compute; "same": that which does */
};

/* What ranks leave in a corner's shared memory: all parameters, as each reads them. */
typedef struct mini_result {
    float param[MINI_MOST_RANKS][MINI_MOST_NUMEL];
} mini_result;

/* The rank function: SGD over the program's steps. The corner's arg is the program, its shared memory a mini_result. */
fsdp_status mini_program_train(fsdp_comm *comm, void *arg);
/* Each rank's parameters are those of the plain program, to the bit: the `after` of such a corner. */
void mini_program_compare(const corner *c);
/* Both, in these corners: arg and shared are set, and after where there is none. */
void mini_program_in_corners(const mini_program *p, corners which);
/* On four ranks: two replicas, spread over half of the ranks between forward and backward, kept on another device, and both; some with sums
 * of gradients below fp32. Modes: all for the first of them, and for the others where all_modes; else full. */
void mini_program_on_meshes(const mini_program *p, bool all_modes);

#endif
