/* SPDX-License-Identifier: MIT */
#include "checkpoint/put.h"

#include "base/alloc.h"
#include "base/error.h"

enum { CHUNK = 1 << 18 }; /* floats */

struct fsdpi_put {
    const fsdp_checkpoint *c;
    const bool *chosen;
    const fsdpi_entry **of; /* of each parameter of the unit that is filled; NULL: it keeps its values */
    fsdp_unit *unit;
    float *host; /* [CHUNK] */
    fsdpi_source_fn source;
    void *arg;
};

static bool is_chosen_param(const fsdpi_put *p, int i)
{
    return p->chosen[i] && p->c->entry[i].kind == FSDPI_ENTRY_PARAM;
}

bool fsdpi_put_begins_unit(const fsdpi_put *p, int i)
{
    if (!is_chosen_param(p, i)) return false;
    for (int j = 0; j < i; j++)
        if (is_chosen_param(p, j) && p->c->entry[j].unit == p->c->entry[i].unit) return false;
    return true;
}

fsdp_status fsdpi_put_make(fsdpi_put **out, const fsdp_checkpoint *c, const bool *chosen)
{
    fsdpi_put *p;
    int most = 0;
    for (int i = 0; i < c->count; i++)
        if (c->entry[i].kind == FSDPI_ENTRY_PARAM && fsdp_unit_param_count(c->entry[i].unit) > most) most = fsdp_unit_param_count(c->entry[i].unit);
    FSDPI_NEW(p, 1);
    *p = (fsdpi_put){ .c = c, .chosen = chosen };
    p->of = fsdpi_calloc((size_t)most, sizeof(const fsdpi_entry *));
    p->host = fsdpi_calloc(CHUNK, sizeof(*p->host));
    if (p->of == NULL || p->host == NULL) {
        fsdpi_put_free(p);
        FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to load %d entries", c->count);
    }
    *out = p;
    return FSDP_OK;
}

void fsdpi_put_free(fsdpi_put *p)
{
    if (p == NULL) return;
    fsdpi_free(p->of);
    fsdpi_free(p->host);
    fsdpi_free(p);
}

/* ---- parameters ---- */

/* What the rank has now. `out` may be device memory: fills on the CPU write in place. */
static fsdp_status keep(fsdp_unit *u, int param, int64_t first, int64_t numel, float *out)
{
    const fsdp_slice *slice;
    int n;
    fsdp_unit_slices(u, &slice, &n);
    for (int i = 0; i < n; i++) {
        const fsdp_slice *s = &slice[i];
        if (s->param != param || first < s->offset || first >= s->offset + s->numel) continue;
        FSDP_TRY(fsdp_stream_copy(fsdp_unit_storage_stream(u), out, s->master + (first - s->offset), (size_t)numel * sizeof(float)));
        return fsdp_stream_sync(fsdp_unit_storage_stream(u));
    }
    FSDP_FAIL(FSDP_ERR_INTERNAL, "element %lld of parameter %d of unit \"%s\" is not kept here", (long long)first, param, fsdp_unit_name(u));
}

static fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    const fsdpi_put *p = arg;
    (void)name;
    if (p->of[param] == NULL) return keep(p->unit, param, first, numel, out);
    return p->source(p->of[param], first, numel, out, p->arg);
}

fsdp_status fsdpi_put_unit(fsdpi_put *p, int first, fsdpi_source_fn source, void *arg)
{
    p->unit = p->c->entry[first].unit;
    p->source = source;
    p->arg = arg;
    for (int k = 0; k < fsdp_unit_param_count(p->unit); k++) p->of[k] = NULL;
    for (int i = first; i < p->c->count; i++)
        if (is_chosen_param(p, i) && p->c->entry[i].unit == p->unit) p->of[p->c->entry[i].index] = &p->c->entry[i];
    return fsdp_unit_fill(p->unit, fill, p);
}

/* ---- the rest ---- */

fsdp_status fsdpi_put_make_states(fsdpi_put *p, fsdpi_source_fn source, void *arg)
{
    for (int i = 0; i < p->c->count; i++) {
        const fsdpi_entry *e = &p->c->entry[i];
        if (!p->chosen[i] || !fsdpi_entry_is_unmade(e)) continue;
        fsdpi_range_of kept = fsdpi_entry_kept(e);
        bool zero = true;
        for (int64_t done = 0; done < kept.numel && zero; done += CHUNK) {
            int64_t n = kept.numel - done < CHUNK ? kept.numel - done : CHUNK;
            FSDP_TRY(source(e, kept.first + done, n, p->host, arg));
            zero = fsdpi_is_zero(p->host, (size_t)n * sizeof(float));
        }
        if (!zero) FSDP_TRY(fsdpi_entry_make(e));
    }
    return FSDP_OK;
}

fsdp_status fsdpi_put_tensor(fsdpi_put *p, const fsdpi_entry *e, fsdpi_source_fn source, void *arg)
{
    fsdpi_range_of kept = fsdpi_entry_kept(e);
    if (kept.numel == 0 || fsdpi_entry_is_unmade(e)) return FSDP_OK;
    if (e->kind == FSDPI_ENTRY_BUFFER) {
        FSDP_TRY(source(e, kept.first, kept.numel, kept.at, arg));
        return fsdpi_entry_settle(e);
    }
    fsdp_stream *s = fsdpi_entry_stream(e);
    for (int64_t done = 0; done < kept.numel; done += CHUNK) {
        int64_t n = kept.numel - done < CHUNK ? kept.numel - done : CHUNK;
        FSDP_TRY(source(e, kept.first + done, n, p->host, arg));
        FSDP_TRY(fsdp_stream_copy(s, (float *)kept.at + done, p->host, (size_t)n * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(s));
    }
    return FSDP_OK;
}
