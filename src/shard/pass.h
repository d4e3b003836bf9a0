/* SPDX-License-Identifier: MIT
 *
 * A pass: one micro-batch, from its first forward to its end. */
#ifndef FSDPI_SHARD_PASS_H
#define FSDPI_SHARD_PASS_H

#include "shard/unit.h"

/* What a unit has done in a pass. */
typedef struct fsdpi_use {
    fsdp_unit *unit;
    int forward_open, forwards, backwards; /* open now; ended so far */
    int recompute_open;
    bool backward_open;
    bool was_root; /* it began while no other unit was active */
    int rounds;    /* gradients that it has posted in this pass */
} fsdpi_use;

struct fsdp_pass {
    fsdpi_runtime *rt;
    fsdp_pass *older; /* in the runtime's list */
    fsdp_pass_kind kind;
    uint64_t number;
    fsdpi_use *use;
    int uses, room;
    int active; /* forwards and backwards open: 0 makes the next unit the root */
    double weight;
    fsdpi_weight *shared_weight; /* made when it ends, for the units that have gradients of it */
    fsdpi_order order; /* being recorded */
    bool off_course;   /* it has left the order of the last pass: nothing is gathered ahead */
    bool unsynced;     /* its gradients stay with each rank until the next pass with sync, or the step */
    bool joined;       /* another rank's is followed (join.c) */
    bool cancelled;    /* fsdp_pass_cancel() is at work: hooks need not run any more */
    bool lost_work;    /* a kernel failed while it was open: it can only be cancelled */
};

/* Ends passes of several communicators as one micro-batch: all count, or none, and a step over several of them counts the weight, which
 * they have in common, once. pass: in an order that all ranks share. */
fsdp_status fsdpi_passes_end(fsdp_pass *const *pass, int count);

void fsdpi_pass_free(fsdp_pass *pass);
/* The unit's entry, NULL where it has none; or a new one. */
fsdpi_use *fsdpi_pass_find(const fsdp_pass *pass, const fsdp_unit *u);
fsdp_status fsdpi_pass_use(fsdp_pass *pass, fsdp_unit *u, fsdpi_use **out);
/* Notes what a unit does, by its number. */
fsdp_status fsdpi_unit_tag(fsdp_unit *u, fsdpi_op op);
/* Of an unshard by hand; bytes 0: it has no effect, which ranks that have joined a pass do not know of themselves, as they hold nothing. */
fsdp_status fsdpi_unit_tag_unshard(fsdp_unit *u, uint64_t bytes);

#endif
