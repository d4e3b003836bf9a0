/* SPDX-License-Identifier: MIT
 *
 * The cap on whole parameters, as fsdp/gather.h has it. Units that are in use, or unsharded by hand, have their room for sure; others that
 * are kept, or gathered ahead, make room. */
#include "support/random/model_inside.h"

static bool is_narrow(const model_unit *u)
{
    return u->param_dtype != FSDP_F32;
}

/* Whether compute can read, where it lies, what owners publish. */
static bool in_place(const model *m, const model_unit *u)
{
    return !m->copies && !model_stored_apart(m, u);
}

/* Bytes of a private buffer. */
static int64_t whole_bytes(const model *m, const model_unit *u, bool exact)
{
    bool own = u->mode == FSDP_MODE_NONE && !is_narrow(u) && !model_stored_apart(m, u); /* every rank keeps all */
    bool lies_there = in_place(m, u) && (!is_narrow(u) || u->raw || exact);
    if (!u->exists || own || lies_there) return 0;
    return (int64_t)u->total * (is_narrow(u) && u->raw && !exact ? 2 : 4);
}

/* What arrives, until it has been widened. */
static int64_t passing_bytes(const model *m, const model_unit *u, bool exact)
{
    return is_narrow(u) && !u->raw && !exact && !in_place(m, u) ? (int64_t)u->total * 2 : 0;
}

static int64_t most_bytes(const model *m, const model_unit *u)
{
    int64_t rounded = whole_bytes(m, u, false) + passing_bytes(m, u, false), exact = whole_bytes(m, u, true);
    return rounded > exact ? rounded : exact;
}

int64_t model_largest(const model *m)
{
    int64_t most = 0;
    for (int k = 0; k < MODEL_UNITS; k++) {
        int64_t n = most_bytes(m, &m->unit[k]);
        most = n > most ? n : most;
    }
    return most;
}

bool model_fits_cap(const model *m, int number, uint32_t salt)
{
    static _Thread_local model_unit u;
    model_unit_make(&u, number, salt, m->ranks);
    return m->cap == 0 || most_bytes(m, &u) <= m->cap;
}

int64_t model_cap_of(const model *m, const call *c)
{
    int64_t largest = model_largest(m);
    switch (c->salt % 8) {
    case 0:
    case 1: return 0;
    case 2:
    case 3: return largest;
    case 4: return largest > 1 ? largest - 1 : 1;
    case 5: return largest + most_bytes(m, &m->unit[c->other]);
    default: return largest + (int64_t)(c->salt >> 8 & 1023);
    }
}

/* From the least to the most that units in use hold, other than one. A summon for rank 0 counts on all ranks. */
static void in_use(const model *m, int but, int64_t *least, int64_t *most)
{
    *least = *most = 0;
    for (int k = 0; k < MODEL_UNITS; k++) {
        const model_unit *u = &m->unit[k];
        bool held = model_is_whole(m, k, 0);
        int64_t bytes = whole_bytes(m, u, held && u->sees_exact);
        if (k == but || !u->exists || (!held && !u->unsharded)) continue;
        *most += bytes;
        if ((held || u->pinned) && !(u->near && !m->copies)) *least += bytes; /* what neighbours share in memory is no copy */
    }
}

model_room model_room_for(const model *m, int unit, bool exact)
{
    const model_unit *u = &m->unit[unit];
    int64_t least, most, whole = whole_bytes(m, u, exact), passing = passing_bytes(m, u, exact);
    if (m->cap == 0 || whole + passing == 0) return MODEL_FITS;
    if (model_is_whole(m, unit, 0)) return passing == 0 || u->sees_exact == (exact || !is_narrow(u)) ? MODEL_FITS : MODEL_UNSURE;
    if (u->pinned && (!exact || !is_narrow(u))) return MODEL_FITS;
    in_use(m, unit, &least, &most);
    if (most + whole + passing <= m->cap) return MODEL_FITS;
    return least + whole > m->cap && !(u->near && !m->copies) ? MODEL_NO_ROOM : MODEL_UNSURE;
}

/* Below a new cap. What is not held makes room. */
static model_room room_for_cap(const model *m, int64_t cap)
{
    int64_t least = 0, most = 0;
    for (int k = 0; k < MODEL_UNITS; k++) {
        const model_unit *u = &m->unit[k];
        if (!model_is_whole(m, k, 0)) continue;
        most += whole_bytes(m, u, u->sees_exact);
        if (!(u->near && !m->copies)) least += whole_bytes(m, u, u->sees_exact);
    }
    return cap == 0 || most <= cap ? MODEL_FITS : least > cap ? MODEL_NO_ROOM : MODEL_UNSURE;
}

model_room model_room_of(const model *m, const call *c)
{
    model_room all = MODEL_FITS;
    switch (c->kind) {
    case CALL_FORWARD_BEGIN:
    case CALL_RECOMPUTE_BEGIN:
    case CALL_BACKWARD_BEGIN: return model_room_for(m, c->unit, m->unit[c->unit].exact_eval && !m->pass[c->pass].train);
    case CALL_CAP: return room_for_cap(m, model_cap_of(m, c));
    case CALL_UNSHARD: return model_room_for(m, c->unit, false);
    case CALL_SUMMON:
    case CALL_SUMMON_READ:
    case CALL_SUMMON_WRITE:
    case CALL_READ: return model_room_for(m, c->unit, true);
    case CALL_READ_ALL:
        for (int k = 0; k < MODEL_UNITS; k++)
            if (m->unit[k].params > 0 && model_room_for(m, k, true) != MODEL_FITS) all = MODEL_UNSURE;
        return all;
    default: return MODEL_FITS;
    }
}
