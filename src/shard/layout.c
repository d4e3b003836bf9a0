/* SPDX-License-Identifier: MIT */
#include "shard/layout.h"

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>

static int64_t align(int64_t n)
{
    return (n + FSDPI_ALIGN - 1) / FSDPI_ALIGN * FSDPI_ALIGN;
}

static fsdp_status numel_of(const fsdp_param *p, const char *unit, int64_t *out)
{
    FSDP_FAIL_IF(p->name == NULL || p->name[0] == '\0', FSDP_ERR_INVALID, "unit \"%s\": a parameter has no name", unit);
    FSDP_FAIL_IF(p->ndim < 0 || p->ndim > FSDP_MAX_DIMS, FSDP_ERR_INVALID, "unit \"%s\", parameter \"%s\": %d dimensions, at most %d",
                 unit, p->name, p->ndim, FSDP_MAX_DIMS);
    int64_t n = 1;
    for (int d = 0; d < p->ndim; d++) {
        FSDP_FAIL_IF(p->shape[d] < 0, FSDP_ERR_INVALID, "unit \"%s\", parameter \"%s\": dimension %d is %lld", unit, p->name, d,
                     (long long)p->shape[d]);
        FSDP_FAIL_IF(__builtin_mul_overflow(n, p->shape[d], &n) || n > INT64_MAX / 64, FSDP_ERR_INVALID,
                     "unit \"%s\", parameter \"%s\" has more elements than can be counted", unit, p->name);
    }
    *out = n;
    return FSDP_OK;
}

static fsdp_status copy_params(fsdpi_layout *l, const fsdp_param *params, const char *unit)
{
    for (int i = 0; i < l->count; i++) {
        FSDP_TRY(numel_of(&params[i], unit, &l->numel[i]));
        for (int j = 0; j < i; j++)
            FSDP_FAIL_IF(strcmp(params[i].name, params[j].name) == 0, FSDP_ERR_INVALID,
                         "unit \"%s\" has two parameters called \"%s\"", unit, params[i].name);
        l->param[i] = params[i];
        char *name = fsdpi_strdup(params[i].name);
        l->param[i].name = name;
        FSDP_FAIL_IF(name == NULL, FSDP_ERR_NOMEM, "unit \"%s\": no memory for its names", unit);
        l->at[i] = l->total;
        FSDP_FAIL_IF(l->numel[i] > INT64_MAX / 8 - l->total, FSDP_ERR_INVALID, "unit \"%s\" has more elements than can be counted",
                     unit);
        l->total += align(l->numel[i]);
    }
    return FSDP_OK;
}

fsdp_status fsdpi_layout_init(fsdpi_layout *out, const fsdp_param *params, int count, int size, const char *unit)
{
    FSDP_FAIL_IF(count < 0 || (count > 0 && params == NULL), FSDP_ERR_INVALID, "unit \"%s\": %d parameters", unit, count);
    fsdpi_layout l = { .count = count, .size = size };
    l.param = fsdpi_calloc((size_t)count, sizeof(*l.param));
    l.numel = fsdpi_calloc((size_t)count, sizeof(*l.numel));
    l.at = fsdpi_calloc((size_t)count, sizeof(*l.at));
    l.edge = fsdpi_calloc((size_t)size + 1, sizeof(*l.edge));
    fsdp_status st = FSDP_OK;
    if (l.param == NULL || l.numel == NULL || l.at == NULL || l.edge == NULL)
        st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "unit \"%s\": no memory for %d parameters", unit, count);
    if (st == FSDP_OK) st = copy_params(&l, params, unit);
    if (st != FSDP_OK) {
        fsdpi_layout_fini(&l);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    /* Of a unit without parameters there is still something to publish and to wait for. */
    if (l.total == 0) l.total = FSDPI_ALIGN;
    int64_t chunk = align((l.total + size - 1) / size);
    for (int r = 0; r <= size; r++) l.edge[r] = r * chunk < l.total ? r * chunk : l.total;
    *out = l;
    return FSDP_OK;
}

void fsdpi_layout_fini(fsdpi_layout *l)
{
    for (int i = 0; l->param != NULL && i < l->count; i++) fsdpi_free((char *)(uintptr_t)l->param[i].name);
    fsdpi_free(l->param);
    fsdpi_free(l->numel);
    fsdpi_free(l->at);
    fsdpi_free(l->edge);
    *l = (fsdpi_layout){ 0 };
}

int fsdpi_layout_cut(const fsdpi_layout *l, int64_t lo, int64_t hi, fsdpi_segment *out)
{
    int n = 0;
    for (int i = 0; i < l->count; i++) {
        int64_t first = l->at[i] > lo ? l->at[i] : lo, last = l->at[i] + l->numel[i] < hi ? l->at[i] + l->numel[i] : hi;
        if (first >= last) continue;
        out[n++] = (fsdpi_segment){ .param = i, .offset = first - l->at[i], .numel = last - first, .at = first };
    }
    return n;
}
