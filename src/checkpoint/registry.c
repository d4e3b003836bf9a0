/* SPDX-License-Identifier: MIT */
#include "checkpoint/registry.h"

#include "base/alloc.h"
#include "base/error.h"

#include "format/shown.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

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
    for (int i = 0; i < c->count; i++) {
        fsdpi_free(c->entry[i].name);
        fsdpi_free(c->entry[i].text);
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

static fsdp_status check_index(const char *name, const fsdp_unit *unit, int index)
{
    FSDP_FAIL_IF(unit == NULL || index < 0 || index >= fsdp_unit_param_count(unit), FSDP_ERR_INVALID, "fsdp_checkpoint: \"%s\": no such parameter", name);
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_add_param(fsdp_checkpoint *c, const char *name, fsdp_unit *unit, int index)
{
    FSDP_TRY(check_index(name, unit, index));
    return add(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_PARAM, .unit = unit, .index = index });
}

fsdp_status fsdp_checkpoint_add_state(fsdp_checkpoint *c, const char *name, fsdp_unit *unit, int index, float *state)
{
    FSDP_TRY(check_index(name, unit, index));
    return add(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_STATE, .unit = unit, .index = index, .state = state });
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

fsdp_status fsdp_checkpoint_add_optim(fsdp_checkpoint *c, fsdp_optim *optim)
{
    char name[700];
    for (int i = 0, params = c->count; i < params; i++) {
        fsdpi_entry p = c->entry[i];
        if (p.kind != FSDPI_ENTRY_PARAM || !in_list(fsdp_optim_units(optim), p.unit)) continue;
        for (int k = 0; k < fsdp_optim_state_kinds(optim); k++) {
            float *state;
            FSDP_TRY(fsdp_optim_state(optim, p.unit, k, &state));
            snprintf(name, sizeof(name), "optim.%s.%s", fsdp_optim_state_name(optim, k), p.name);
            FSDP_TRY(fsdp_checkpoint_add_state(c, name, p.unit, p.index, state));
        }
        snprintf(name, sizeof(name), "optim.steps.%s", p.name);
        FSDP_TRY(add(c, name, (fsdpi_entry){ .kind = FSDPI_ENTRY_STEPS, .unit = p.unit, .index = p.index, .optim = optim }));
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
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_add_scaler(fsdp_checkpoint *c, fsdp_scaler *scaler)
{
    FSDP_TRY(fsdp_checkpoint_add_f64(c, "scaler.scale", &scaler->scale));
    FSDP_TRY(fsdp_checkpoint_add_i64(c, "scaler.good_steps", &scaler->good_steps));
    return fsdp_checkpoint_add_i64(c, "scaler.skipped", &scaler->skipped);
}

void fsdpi_entry_kept(const fsdpi_entry *e, int64_t *first, int64_t *numel, float **at)
{
    const fsdp_slice *slice;
    int n;
    fsdp_unit_slices(e->unit, &slice, &n);
    *first = *numel = 0;
    *at = NULL;
    for (int i = 0; i < n; i++) {
        if (slice[i].param != e->index) continue;
        *first = slice[i].offset;
        *numel = slice[i].numel;
        *at = e->kind == FSDPI_ENTRY_PARAM ? slice[i].master : e->state + slice[i].state_offset;
    }
}

void fsdpi_entry_range(const fsdpi_entry *e, int64_t *first, int64_t *numel, float **at)
{
    fsdpi_entry_kept(e, first, numel, at);
    if (fsdp_unit_replica(e->unit) != 0) *numel = 0; /* others keep the same: the first writes */
}
