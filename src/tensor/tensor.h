/* SPDX-License-Identifier: MIT
 *
 * Storage and views. A storage is a counted block of an arena; a tensor is a shape on a storage. A parameter has no
 * storage: it has a source, which is asked for the address whenever the parameter is used. */
#ifndef FSDPI_TENSOR_TENSOR_H
#define FSDPI_TENSOR_TENSOR_H

#include <fsdp/tensor.h>

#include "device/arena.h"

/* How to compute a storage's values again from others that are kept: what is cheap to compute need not be held from the forward
 * to the backward. The same kernels on the same inputs give the same bits. */
typedef struct fsdpi_recipe {
    fsdp_status (*make)(struct fsdpi_recipe *r, fsdp_tape *tape, void *data); /* into data, in stream order */
    void (*fini)(struct fsdpi_recipe *r);                                     /* releases what it retains, and itself */
} fsdpi_recipe;

typedef struct fsdpi_storage {
    int refs;
    int saves; /* how many of them are nodes of a tape */
    fsdpi_arena *arena;
    void *data; /* device address; NULL: given up, to be made again by the recipe */
    size_t bytes;
    fsdpi_recipe *recipe; /* may be NULL */
} fsdpi_storage;

fsdp_status fsdpi_storage_create(fsdpi_storage **out, fsdpi_arena *arena, size_t bytes);
fsdpi_storage *fsdpi_storage_retain(fsdpi_storage *s);
void fsdpi_storage_release(fsdpi_storage *s); /* NULL is accepted */
/* Where only nodes hold it and there is a recipe: gives the memory up for now. */
void fsdpi_storage_economise(fsdpi_storage *s);
/* The memory is there again, and so are the values. */
fsdp_status fsdpi_storage_restore(fsdpi_storage *s, fsdp_tape *tape);

/* Where a parameter is, and where its gradient goes. NULL with an error where it cannot be had now. */
typedef struct fsdpi_source {
    const float *(*data)(void *ctx, int index);
    float *(*grad)(void *ctx, int index, float *beta);
    /* Whether data() will still do until the tape goes back, without a scope of its module being open. */
    bool (*stays)(void *ctx, const fsdp_tape *tape);
    /* Whether it has no gradient now. */
    bool (*frozen)(void *ctx);
    void *ctx;
    int index;
} fsdpi_source;

struct fsdp_tensor {
    fsdp_tape *tape;        /* NULL: a parameter */
    fsdp_tensor *next;      /* in the tape's list */
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    int64_t numel;
    fsdpi_storage *storage; /* NULL: a parameter, or given up */
    const fsdpi_source *source;
    bool needs_grad;
    bool is_leaf;           /* made from values: its gradient is kept for the caller */
    fsdpi_storage *grad;    /* NULL: none yet */
    /* A loss that is computed when it is first wanted: see ops/loss.c */
    fsdp_status (*materialise)(fsdp_tensor *t);
    void *lazy; /* freed with the tensor, after dispose(lazy) */
    void (*dispose)(void *lazy);
};

/* Whether a gradient of it is wanted: a parameter is asked each time, since it may be frozen and unfrozen. */
static inline bool fsdpi_wants_grad(const fsdp_tensor *t)
{
    return t->needs_grad && (t->source == NULL || t->source->frozen == NULL || !t->source->frozen(t->source->ctx));
}

/* Fills a shape in; checks for overflow. */
fsdp_status fsdpi_tensor_set_shape(fsdp_tensor *t, fsdp_dtype dtype, int ndim, const int64_t *shape);

/* "[4, 6]", for messages; `to` has room for 128. */
const char *fsdpi_shape_text(const fsdp_tensor *t, char *to);

/* The device address, for a launch now. */
fsdp_status fsdpi_tensor_data(const fsdp_tensor *t, const void **out);

#endif
