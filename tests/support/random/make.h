/* SPDX-License-Identifier: MIT
 *
 * Making a call: on units of the library, with what the model says beside it. */
#ifndef FSDP_TESTS_RANDOM_MAKE_H
#define FSDP_TESTS_RANDOM_MAKE_H

#include "support/random/model.h"
#include "support/ranks.h"

/* What is to be done. */
typedef struct work {
    uint64_t seed;
    long calls;
    bool trace;
    const char *folder;
} work;

/* A rank in it. */
typedef struct run {
    const corner *c;
    const work *w;
    fsdp_comm *comm;
    int rank, size;
    fsdp_device *device, *storage; /* storage: another one, or NULL */
    fsdp_unit *unit[MODEL_UNITS];
    fsdp_pass *pass[MODEL_PASSES];
    fsdp_status joined; /* how it was to join others' passes */
    float *number; /* of each pass: host memory for kernels */
    fsdp_optim *optim[2]; /* SGD, AdamW */
    fsdp_ema *ema;        /* NULL: none */
    model *m;
    rng late;
    call now;
} run;

/* Makes it, and looks at what can be seen of it. Its status is the library's, or FSDP_ERR_INTERNAL with what is wrong. */
fsdp_status make(run *r, const call *c);
/* The same on a rank that has joined the passes that are open: it was done as the others did it. */
fsdp_status make_joined(run *r, const call *c, fsdp_status want);
/* Whether an allocation may fail in such a call; and the same with one that fails. *applies: whether it came about after all. */
bool can_fail(const run *r, call_kind k);
fsdp_status make_without_memory(run *r, const call *c, bool *applies);

/* Drops passes that are still open. */
fsdp_status cancel_passes(run *r);
void be_late(run *r);
fsdp_status reset(run *r);
fsdp_status read_all(run *r);
/* That not more is whole than the cap allows. */
fsdp_status check_cap(run *r);
fsdp_status make_unit(run *r, int unit, uint32_t salt, bool differs, fsdp_unit **out);
fsdp_status make_optim(run *r, const call *c);

#endif
