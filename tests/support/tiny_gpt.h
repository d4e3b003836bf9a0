/* SPDX-License-Identifier: MIT
 *
 * A GPT of odd sizes (vocabulary 13, 6 wide, 2 heads, 2 layers, context 8) with its optimizer and made-up data: what tests above
 * the core train. A leaf is one sequence of 8 tokens; which one is a function of its number. */
#ifndef FSDP_TESTS_TINY_GPT_H
#define FSDP_TESTS_TINY_GPT_H

#include <fsdp/fsdp.h>

enum { TINY_VOCAB = 13, TINY_WIDTH = 6, TINY_HEADS = 2, TINY_LAYERS = 2, TINY_CONTEXT = 8, TINY_NUMEL = 1158 };

typedef struct tiny_gpt_opts {
    fsdp_mode mode;
    int shards; /* as fsdp_unit_opts */
    const char *device; /* NULL: "cpu" */
    float dropout;
    int prefetch;
    float lr;           /* 0: 0.01 */
    const fsdp_wrap_policy *policy;
    int64_t keep_whole_below;
    bool recompute;
    fsdp_gpt2_config config; /* vocab_size 0: tiny_gpt_config() */
} tiny_gpt_opts;

typedef struct tiny_gpt {
    fsdp_comm *comm;
    fsdp_device *device;
    fsdp_model *model;
    fsdp_optim *optim;
} tiny_gpt;

fsdp_gpt2_config tiny_gpt_config(void);

/* Wrapped, initialised by key, with AdamW. */
fsdp_status tiny_gpt_create(tiny_gpt *t, fsdp_comm *comm, const tiny_gpt_opts *opts);
void tiny_gpt_destroy(tiny_gpt *t);

void tiny_gpt_data(int64_t sequence, int32_t ids[TINY_CONTEXT], int32_t labels[TINY_CONTEXT]);
/* This rank's leaves of a step, and the optimizer; *loss: the mean over all. */
fsdp_status tiny_gpt_step(tiny_gpt *t, int64_t step, int leaves, double *loss, double *norm);
/* The mean loss of `count` sequences from `first` on, each rank all of them. */
fsdp_status tiny_gpt_eval(tiny_gpt *t, int64_t first, int64_t count, double *loss);
/* All parameters, whole, to every rank. */
fsdp_status tiny_gpt_read(tiny_gpt *t, float *out);

/* Zeroed memory that forked ranks share; the test ends where there is none. */
void *shared_memory(size_t bytes);

#endif
