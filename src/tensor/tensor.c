/* SPDX-License-Identifier: MIT */
#include "tensor/tensor.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdio.h>

fsdp_status fsdpi_storage_create(fsdpi_storage **out, fsdpi_arena *arena, size_t bytes)
{
    fsdpi_storage *s;
    FSDPI_NEW(s, 1);
    fsdp_status st = fsdpi_arena_alloc(arena, bytes, &s->data);
    if (st != FSDP_OK) {
        fsdpi_free(s);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    s->refs = 1;
    s->arena = arena;
    s->bytes = bytes;
    *out = s;
    return FSDP_OK;
}

fsdpi_storage *fsdpi_storage_retain(fsdpi_storage *s)
{
    s->refs++;
    return s;
}

void fsdpi_storage_release(fsdpi_storage *s)
{
    if (s == NULL || --s->refs > 0) return;
    fsdpi_arena_free(s->arena, s->data);
    if (s->recipe != NULL) s->recipe->fini(s->recipe);
    fsdpi_free(s);
}

void fsdpi_storage_economise(fsdpi_storage *s)
{
    if (s == NULL || s->recipe == NULL || s->refs > s->saves) return;
    fsdpi_arena_free(s->arena, s->data);
    s->data = NULL;
}

fsdp_status fsdpi_storage_restore(fsdpi_storage *s, fsdp_tape *tape)
{
    if (s->data != NULL) return FSDP_OK;
    void *p;
    FSDP_TRY(fsdpi_arena_alloc(s->arena, s->bytes, &p));
    fsdp_status st = s->recipe->make(s->recipe, tape, p);
    if (st != FSDP_OK) {
        fsdpi_arena_free(s->arena, p);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    s->data = p;
    return FSDP_OK;
}

fsdp_status fsdpi_tensor_set_shape(fsdp_tensor *t, fsdp_dtype dtype, int ndim, const int64_t *shape)
{
    FSDP_FAIL_IF(ndim < 0 || ndim > FSDP_MAX_DIMS, FSDP_ERR_INVALID, "a tensor of %d dimensions: at most %d", ndim, FSDP_MAX_DIMS);
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) {
        FSDP_FAIL_IF(shape[d] < 0, FSDP_ERR_INVALID, "a tensor whose dimension %d is %lld", d, (long long)shape[d]);
        FSDP_FAIL_IF(__builtin_mul_overflow(n, shape[d], &n) || n > INT64_MAX / 16, FSDP_ERR_INVALID, "a tensor of more elements than can be counted");
        t->shape[d] = shape[d];
    }
    t->dtype = dtype;
    t->ndim = ndim;
    t->numel = n;
    return FSDP_OK;
}

const char *fsdpi_shape_text(const fsdp_tensor *t, char *to)
{
    int n = snprintf(to, 128, "[");
    for (int d = 0; d < t->ndim && n < 100; d++) n += snprintf(to + n, 128 - (size_t)n, "%s%lld", d > 0 ? ", " : "", (long long)t->shape[d]);
    snprintf(to + n, 128 - (size_t)n, "]");
    return to;
}

fsdp_status fsdpi_tensor_data(const fsdp_tensor *t, const void **out)
{
    if (t->source != NULL) {
        const float *p = t->source->data(t->source->ctx, t->source->index);
        if (p == NULL) return fsdp_error_through(fsdpi_error_status(), __func__, __FILE__, __LINE__);
        *out = p;
        return FSDP_OK;
    }
    FSDP_FAIL_IF(t->storage == NULL, FSDP_ERR_STATE, "a tensor whose memory was given up: no operation needed it any more");
    *out = t->storage->data;
    return FSDP_OK;
}

fsdp_dtype fsdp_tensor_dtype(const fsdp_tensor *t)
{
    return t->dtype;
}

int fsdp_tensor_ndim(const fsdp_tensor *t)
{
    return t->ndim;
}

int64_t fsdp_tensor_shape(const fsdp_tensor *t, int d)
{
    if (d < 0) d += t->ndim;
    return d >= 0 && d < t->ndim ? t->shape[d] : 1;
}

int64_t fsdp_tensor_numel(const fsdp_tensor *t)
{
    return t->numel;
}
