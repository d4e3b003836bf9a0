/* SPDX-License-Identifier: MIT */
#include "checkpoint/registry.h"

#include "base/alloc.h"
#include "base/error.h"
#include "checkpoint/background.h"
#include "comm/comm.h"
#include "format/shown.h"

#include <fsdp/nn.h>

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

fsdp_status fsdp_checkpoint_create(fsdp_checkpoint **out, fsdp_comm *comm)
{
    fsdp_checkpoint *c;
    FSDPI_NEW(c, 1);
    c->comm = comm;
    *out = c;
    return FSDP_OK;
}

void fsdp_checkpoint_destroy(fsdp_checkpoint *c)
{
    if (c == NULL) return;
    fsdpi_background_destroy(c->background);
    for (int i = 0; i < c->count; i++) {
        fsdpi_free(c->entry[i].name);
        fsdpi_free(c->entry[i].text);
        if (c->entry[i].module != NULL) fsdpi_free(c->entry[i].value);
    }
    fsdpi_free(c->entry);
    fsdpi_free(c);
}

/* The manifest is JSON: what is not UTF-8 would be left out of it. */
static bool is_utf8(const char *text)
{
    json_t *s = json_string(text);
    bool good = s != NULL;
    json_decref(s);
    return good;
}

static fsdp_status add(fsdp_checkpoint *c, const char *name, fsdpi_entry e)
{
    FSDP_FAIL_IF(name == NULL || name[0] == '\0', FSDP_ERR_INVALID, "fsdp_checkpoint: an entry without a name");
    FSDP_FAIL_IF(!is_utf8(name), FSDP_ERR_INVALID, "fsdp_checkpoint: the name \"%s\" is not UTF-8", fsdpi_show(name).s);
    for (int i = 0; i < c->count; i++)
        FSDP_FAIL_IF(strcmp(c->entry[i].name, name) == 0, FSDP_ERR_INVALID, "fsdp_checkpoint: \"%s\" is registered twice", name);
    if (c->count == c->room) {
        int room = c->room > 0 ? 2 * c->room : 64;
        void *p = fsdpi_realloc(c->entry, (size_t)room, sizeof(*c->entry));
        FSDP_FAIL_IF(p == NULL, FSDP_ERR_NOMEM, "no memory for a checkpoint of %d entries", room);
        c->entry = p;
        c->room = room;
    }
    e.name = fsdpi_strdup(name);
    FSDP_FAIL_IF(e.name == NULL, FSDP_ERR_NOMEM, "no memory for the entry \"%s\"", name);
    c->entry[c->count++] = e;
    return FSDP_OK;
}

/* On a communicator of this rank alone, that is no part of the checkpoint's. */
static bool is_alone(const fsdp_unit *u, const fsdp_comm *comm)
{
    const fsdp_comm *own = fsdp_unit_comm(u);
    return own->world != comm->world && own->size == 1;
}

static fsdp_status add_tensor(fsdp_checkpoint *c, const char *name, fsdpi_entry e)
{
    const fsdp_unit *u = e.unit;
    FSDP_FAIL_IF(u == NULL || e.index < 0 || e.index >= fsdp_unit_param_count(u), FSDP_ERR_INVALID, "fsdp_checkpoint: \"%s\": no such parameter", name);
    FSDP_FAIL_IF(fsdp_unit_comm(u) != c->comm && !is_alone(u, c->comm), FSDP_ERR_INVALID,
                 "fsdp_checkpoint: \"%s\": its unit \"%s\" is on another communicator than the checkpoint, whose ranks may have other units: save it by a checkpoint on that one", name,
                 fsdp_unit_name(u));
    const fsdp_param *p = fsdp_unit_param_info(u, e.index);
    e.ndim = p->ndim;
    memcpy(e.shape, p->shape, sizeof(e.shape));
    e.numel = fsdp_unit_param_numel(u, e.index);
    return add(c, name, e);
}

fsdp_status fsdp_checkpoint_add_param(fsdp_checkpoint *c, const char *name, fsdp_unit *unit, int index)
{
    return add_tensor(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_PARAM, .unit = unit, .index = index });
}

fsdp_status fsdp_checkpoint_add_state(fsdp_checkpoint *c, const char *name, fsdp_unit *unit, int index, float *state)
{
    return add_tensor(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_STATE, .unit = unit, .index = index, .state = state });
}

fsdp_status fsdp_checkpoint_add_buffer(fsdp_checkpoint *c, const char *name, fsdp_dtype dtype, int ndim, const int64_t *shape, void *data)
{
    fsdpi_entry e = { .kind = FSDPI_ENTRY_BUFFER, .value = data, .dtype = dtype, .ndim = ndim, .numel = 1 };
    FSDP_FAIL_IF(fsdp_dtype_bytes(dtype) == 0 || ndim < 0 || ndim > FSDP_MAX_DIMS || (ndim > 0 && shape == NULL), FSDP_ERR_INVALID,
                 "fsdp_checkpoint: buffer \"%s\": %d is no type, %d no number of dimensions, or there is no shape", name, (int)dtype, ndim);
    for (int d = 0; d < ndim; d++) {
        FSDP_FAIL_IF(shape[d] < 0 || __builtin_mul_overflow(e.numel, shape[d], &e.numel), FSDP_ERR_INVALID, "fsdp_checkpoint: buffer \"%s\" has no such shape", name);
        e.shape[d] = shape[d];
    }
    FSDP_FAIL_IF(data == NULL && e.numel > 0, FSDP_ERR_INVALID, "fsdp_checkpoint: buffer \"%s\" lies nowhere", name);
    return add(c, name, e);
}

fsdp_status fsdp_checkpoint_add_alias(fsdp_checkpoint *c, const char *name, const char *of)
{
    const fsdpi_entry *e = of != NULL ? fsdpi_entry_find(c, of) : NULL;
    FSDP_FAIL_IF(e == NULL || !fsdpi_entry_is_tensor(e), FSDP_ERR_INVALID, "fsdp_checkpoint: \"%s\" cannot be another name of \"%s\": no tensor of that name is registered", name,
                 of != NULL ? of : "");
    return add(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_ALIAS, .of = (int)(e - c->entry) });
}

static fsdp_status add_module_buffer(fsdp_checkpoint *c, const char *name, const fsdp_module_buffer_info *b)
{
    size_t numel = 1;
    void *copy;
    for (int d = 0; d < b->buffer->ndim; d++) numel *= (size_t)b->buffer->shape[d];
    copy = fsdpi_calloc(numel, fsdp_dtype_bytes(b->buffer->dtype));
    FSDP_FAIL_IF(copy == NULL, FSDP_ERR_NOMEM, "no memory for buffer \"%s\"", name);
    fsdp_status st = fsdp_checkpoint_add_buffer(c, name, b->buffer->dtype, b->buffer->ndim, b->buffer->shape, copy);
    if (st != FSDP_OK) {
        fsdpi_free(copy);
        return fsdp_error_through(st, __func__, __FILE__, __LINE__);
    }
    c->entry[c->count - 1].module = b->module;
    c->entry[c->count - 1].index = b->index;
    return FSDP_OK;
}

static fsdp_status add_buffers(fsdp_checkpoint *c, const char *prefix, fsdp_module *m)
{
    const fsdp_module_buffer_info *b;
    int n;
    char name[700];
    FSDP_TRY(fsdp_module_buffers(m, &b, &n));
    for (int i = 0; i < n; i++) {
        if (b[i].buffer->not_saved) continue;
        snprintf(name, sizeof(name), "%s%s", prefix != NULL ? prefix : "", b[i].name);
        FSDP_TRY(add_module_buffer(c, name, &b[i]));
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_add_module(fsdp_checkpoint *c, const char *prefix, fsdp_module *m)
{
    const fsdp_module_param_info *p;
    int n;
    char name[700];
    FSDP_TRY(fsdp_module_params(m, &p, &n));
    for (int i = 0; i < n; i++)
        FSDP_FAIL_IF(p[i].unit == NULL, FSDP_ERR_INVALID, "fsdp_checkpoint: parameter \"%s\" is in no unit: wrap the module first", p[i].name);
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "%s%s", prefix != NULL ? prefix : "", p[i].name);
        FSDP_TRY(fsdp_checkpoint_add_param(c, name, p[i].unit, p[i].index));
        for (int k = 0; k < p[i].alias_count; k++) {
            char other[700];
            snprintf(other, sizeof(other), "%s%s", prefix != NULL ? prefix : "", p[i].aliases[k]);
            FSDP_TRY(fsdp_checkpoint_add_alias(c, other, name));
        }
    }
    return add_buffers(c, prefix, m);
}

fsdp_status fsdp_checkpoint_add_i64(fsdp_checkpoint *c, const char *name, int64_t *value)
{
    return add(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_I64, .value = value });
}

fsdp_status fsdp_checkpoint_add_f64(fsdp_checkpoint *c, const char *name, double *value)
{
    return add(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_F64, .value = value });
}

fsdp_status fsdp_checkpoint_add_text(fsdp_checkpoint *c, const char *name, const char *text)
{
    FSDP_FAIL_IF(text == NULL || !is_utf8(text), FSDP_ERR_INVALID, "fsdp_checkpoint: the text \"%s\" is not UTF-8, or NULL", name);
    fsdpi_entry e = { .kind = FSDPI_ENTRY_TEXT, .text = fsdpi_strdup(text) };
    FSDP_FAIL_IF(e.text == NULL, FSDP_ERR_NOMEM, "no memory for the text \"%s\"", name);
    fsdp_status st = add(c, name, e);
    if (st != FSDP_OK) fsdpi_free(e.text);
    return st;
}

static bool in_list(fsdp_unit_list units, const fsdp_unit *unit)
{
    for (int i = 0; i < units.count; i++)
        if (units.units[i] == unit) return true;
    return false;
}

/* What was added last belongs to parameter `param`, and is called as that one is, after a prefix: so under all its names. */
static fsdp_status add_second_names(fsdp_checkpoint *c, int param, const char *prefix)
{
    char name[700];
    for (int k = param, of = c->count - 1; k < of; k++) {
        if (c->entry[k].kind != FSDPI_ENTRY_ALIAS || c->entry[k].of != param) continue;
        snprintf(name, sizeof(name), "%s%s", prefix, c->entry[k].name);
        FSDP_TRY(add(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_ALIAS, .of = of }));
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_add_optim(fsdp_checkpoint *c, fsdp_optim *optim)
{
    char name[700], prefix[128];
    for (int i = 0, params = c->count; i < params; i++) {
        fsdpi_entry p = c->entry[i];
        if (p.kind != FSDPI_ENTRY_PARAM || !in_list(fsdp_optim_units(optim), p.unit)) continue;
        for (int k = 0; k < fsdp_optim_state_kinds(optim); k++) {
            snprintf(prefix, sizeof(prefix), "optim.%s.", fsdp_optim_state_name(optim, k));
            snprintf(name, sizeof(name), "%s%s", prefix, p.name);
            FSDP_TRY(add_tensor(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_STATE, .unit = p.unit, .index = p.index, .optim = optim, .state_kind = k }));
            FSDP_TRY(add_second_names(c, i, prefix));
        }
        snprintf(name, sizeof(name), "optim.steps.%s", p.name);
        FSDP_TRY(add(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_STEPS, .unit = p.unit, .index = p.index, .optim = optim }));
        FSDP_TRY(add_second_names(c, i, "optim.steps."));
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_add_ema(fsdp_checkpoint *c, fsdp_ema *ema)
{
    char name[700];
    for (int i = 0, params = c->count; i < params; i++) {
        fsdpi_entry p = c->entry[i];
        float *state;
        if (p.kind != FSDPI_ENTRY_PARAM || !in_list(fsdp_ema_units(ema), p.unit)) continue;
        FSDP_TRY(fsdp_ema_state(ema, p.unit, &state));
        snprintf(name, sizeof(name), "ema.%s", p.name);
        FSDP_TRY(fsdp_checkpoint_add_state(c, name, p.unit, p.index, state));
        FSDP_TRY(add_second_names(c, i, "ema."));
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_add_scaler(fsdp_checkpoint *c, fsdp_scaler *scaler)
{
    FSDP_TRY(fsdp_checkpoint_add_f64(c, "scaler.scale", &scaler->scale));
    FSDP_TRY(fsdp_checkpoint_add_i64(c, "scaler.good_steps", &scaler->good_steps));
    return fsdp_checkpoint_add_i64(c, "scaler.skipped", &scaler->skipped);
}

/* ---- asking ---- */

unsigned fsdpi_entry_what(const fsdp_checkpoint *c, const fsdpi_entry *e)
{
    switch (e->kind) {
    case FSDPI_ENTRY_PARAM: return FSDP_STATE_PARAMS;
    case FSDPI_ENTRY_BUFFER: return FSDP_STATE_BUFFERS;
    case FSDPI_ENTRY_STATE:
    case FSDPI_ENTRY_STEPS: return FSDP_STATE_OPTIM;
    case FSDPI_ENTRY_ALIAS: return fsdpi_entry_what(c, &c->entry[e->of]);
    default: return FSDP_STATE_VALUES;
    }
}

unsigned fsdpi_registered(const fsdp_checkpoint *c)
{
    unsigned all = 0;
    for (int i = 0; i < c->count; i++) all |= fsdpi_entry_what(c, &c->entry[i]);
    return all;
}

const fsdpi_entry *fsdpi_entry_find(const fsdp_checkpoint *c, const char *name)
{
    for (int i = 0; i < c->count; i++)
        if (strcmp(c->entry[i].name, name) == 0) return &c->entry[i];
    return NULL;
}

fsdp_status fsdpi_registry_allows(const fsdp_checkpoint *c, fsdpi_event ev)
{
    const fsdp_unit *last = NULL;
    for (int i = 0; i < c->count; i++) {
        const fsdpi_entry *e = &c->entry[i];
        if (e->module != NULL) FSDP_TRY(fsdp_module_read_buffer(e->module, e->index, e->value));
        if ((e->kind != FSDPI_ENTRY_PARAM && e->kind != FSDPI_ENTRY_STATE) || e->unit == last) continue;
        last = e->unit;
        FSDP_TRY(fsdpi_life_allows(e->unit, ev, NULL));
    }
    return FSDP_OK;
}

fsdp_status fsdpi_entry_settle(const fsdpi_entry *e)
{
    return e->module != NULL ? fsdp_module_write_buffer(e->module, e->index, e->value) : FSDP_OK;
}

uint64_t fsdpi_registry_hash(const fsdp_checkpoint *c)
{
    uint64_t h = 0;
    for (int i = 0; i < c->count; i++) {
        const fsdpi_entry *e = &c->entry[i];
        h = XXH3_64bits_withSeed(e->name, strlen(e->name), h + (uint64_t)e->kind);
        h = XXH3_64bits_withSeed(e->shape, (size_t)e->ndim * sizeof(*e->shape), h + (uint64_t)e->dtype);
    }
    return h;
}

fsdp_status fsdpi_registry_same(const fsdp_checkpoint *c, const char *call)
{
    uint64_t mine = fsdpi_registry_hash(c);
    FSDP_TRY(fsdpi_comm_tell(c->comm, FSDPI_OP_SAVE, NULL, &mine, sizeof(mine)));
    for (int r = 1; r < c->comm->size; r++)
        FSDP_FAIL_IF(*(const uint64_t *)fsdpi_comm_told(c->comm, r) != *(const uint64_t *)fsdpi_comm_told(c->comm, 0), FSDP_ERR_INVALID,
                     "%s: rank %d has registered other entries than rank %d, or in another order", call, c->comm->world_ranks[r], c->comm->world_ranks[0]);
    return FSDP_OK;
}

fsdp_stream *fsdpi_entry_stream(const fsdpi_entry *e)
{
    if (e->kind == FSDPI_ENTRY_BUFFER) return NULL;
    return e->optim != NULL ? fsdp_optim_state_stream(e->optim, e->unit) : fsdp_unit_storage_stream(e->unit);
}

bool fsdpi_entry_is_unmade(const fsdpi_entry *e)
{
    return e->kind == FSDPI_ENTRY_STATE && e->optim != NULL && !fsdp_optim_has_state(e->optim, e->unit);
}

fsdp_status fsdpi_entry_make(const fsdpi_entry *e)
{
    float *state;
    return fsdp_optim_state(e->optim, e->unit, e->state_kind, &state);
}

bool fsdpi_is_zero(const void *p, size_t bytes)
{
    const char *x = p;
    return bytes == 0 || (x[0] == 0 && memcmp(x, x + 1, bytes - 1) == 0);
}

/* NULL: it lies nowhere. */
static float *array_of(const fsdpi_entry *e)
{
    float *state = e->state;
    if (e->optim == NULL) return state;
    return !fsdpi_entry_is_unmade(e) && fsdp_optim_state(e->optim, e->unit, e->state_kind, &state) == FSDP_OK ? state : NULL;
}

static void *place_of(const fsdpi_entry *e, const fsdp_slice *s)
{
    if (e->kind == FSDPI_ENTRY_PARAM) return s->master;
    float *state = array_of(e);
    return state != NULL ? state + s->state_offset : NULL;
}

fsdpi_range_of fsdpi_entry_kept(const fsdpi_entry *e)
{
    const fsdp_slice *slice;
    int n;
    if (e->kind == FSDPI_ENTRY_BUFFER) return (fsdpi_range_of){ 0, e->numel, e->value };
    fsdp_unit_slices(e->unit, &slice, &n);
    for (int i = 0; i < n; i++)
        if (slice[i].param == e->index && slice[i].numel > 0) return (fsdpi_range_of){ slice[i].offset, slice[i].numel, place_of(e, &slice[i]) };
    return (fsdpi_range_of){ 0 };
}

bool fsdpi_entry_is_each_ranks(const fsdp_checkpoint *c, const fsdpi_entry *e)
{
    return e->kind == FSDPI_ENTRY_BUFFER || is_alone(e->unit, c->comm);
}

fsdpi_range_of fsdpi_entry_range(const fsdp_checkpoint *c, const fsdpi_entry *e)
{
    /* Others keep the same, or something of their own: the first writes. */
    int replica = fsdpi_entry_is_each_ranks(c, e) ? fsdp_comm_rank(c->comm) : fsdp_unit_replica(e->unit);
    return replica != 0 ? (fsdpi_range_of){ 0 } : fsdpi_entry_kept(e);
}
