/* SPDX-License-Identifier: MIT
 *
 * A model: a module tree with its config. The root module's forward gives the loss where labels are set, else scores. */
#ifndef FSDPI_MODELS_MODEL_H
#define FSDPI_MODELS_MODEL_H

#include <fsdp/models.h>

#include "nn/module.h"
#include "ops/ops.h"

/* Keys and values of the positions so far, a pair a layer: device memory of the units' arena. */
typedef struct fsdpi_kv_cache {
    int64_t length, room; /* positions held, at most */
    fsdpi_storage **k, **v;
} fsdpi_kv_cache;

struct fsdp_model {
    fsdp_gpt2_config config;
    fsdp_module *module; /* its outermost: "root" */
    fsdp_comm *comm;     /* where it is wrapped; NULL: not yet */
    fsdp_device *device; /* compute device */
    /* What a forward is for; set around fsdp_forward(). */
    fsdp_tensor *labels;
    fsdpi_kv_cache *cache;
    bool recompute; /* blocks are computed again in the backward */
    /* The residual stream is a pair between blocks: x and what is still to be added to it. */
    fsdp_tensor *delta;
    bool running; /* within the root's forward */
};

/* Scores of the last of `count` new positions only, [1, V]: adds them to the cache. ids: i32 [1, count]. */
fsdp_status fsdpi_gpt2_extend(fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdpi_kv_cache *cache, fsdp_tensor **scores);

#endif
