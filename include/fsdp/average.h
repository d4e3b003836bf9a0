/* SPDX-License-Identifier: MIT
 *
 * Averages on slices: each rank averages the elements that it keeps, so nothing is communicated but what is published.
 *
 *     fsdp_ema_create(&ema, units);                      as the parameters are now
 *     ... fsdp_optim_step(...); fsdp_ema_update(ema, 0.999f); ...
 *     fsdp_ema_swap_in(ema);                             the parameters are the averages
 *     ... evaluate, or write a model ...
 *     fsdp_ema_swap_out(ema);                            and themselves again, to the bit
 *
 *     fsdp_teacher_update(teacher_units, student_units, 0.996f);
 *
 * Both move an element a towards p by weight w = 1 - decay: a + w (p - a) where w is less than a half, else
 * p - decay (p - a); in fp32, w rounded once. decay 0 gives p itself. An element's bits do not depend on where slices are
 * cut.
 *
 * Units may be of several communicators; of each all its ranks list the same units in the same order. */
#ifndef FSDP_AVERAGE_H
#define FSDP_AVERAGE_H

#include <fsdp/unit.h>

FSDP_BEGIN_DECLS

/* ---- an exponential moving average of parameters ---- */

typedef struct fsdp_ema fsdp_ema;

/* Not collective, but the same on every rank. Takes an array as long as the optimizer's for one state. The average begins as the
 * parameters are. Units are borrowed: destroy it first. */
FSDP_API fsdp_status fsdp_ema_create(fsdp_ema **out, fsdp_unit_list units) FSDP_NODISCARD;
/* NULL is accepted. While averages are swapped in, parameters stay what they are then. */
FSDP_API void fsdp_ema_destroy(fsdp_ema *ema);

/* Not collective, but the same on every rank; most often after each step. 0 <= decay < 1 (FSDP_ERR_INVALID). FSDP_ERR_STATE in
 * a step, and while averages are swapped in. */
FSDP_API fsdp_status fsdp_ema_update(fsdp_ema *ema, float decay) FSDP_NODISCARD;

/* Collective over the units' communicators; outside of passes, summons and steps. Exchanges parameters and averages, and publishes.
 * Gradients that are accumulated stay. While averages are in place a unit can be summoned to read, and used in passes; a step, new
 * values, a summon with writeback, a checkpoint that is saved or loaded, and a second swap are refused (FSDP_ERR_STATE). */
FSDP_API fsdp_status fsdp_ema_swap_in(fsdp_ema *ema) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_ema_swap_out(fsdp_ema *ema) FSDP_NODISCARD;

/* Not collective. The average of a unit, for files: device address of fsdp_unit_slice_numel(unit) floats, indexed as
 * fsdp_slice.state_offset says; borrowed. While swapped in: the parameters. */
FSDP_API fsdp_status fsdp_ema_state(fsdp_ema *ema, const fsdp_unit *unit, float **state) FSDP_NODISCARD;
FSDP_API fsdp_unit_list fsdp_ema_units(const fsdp_ema *ema);

/* ---- a momentum teacher: another model, moved towards the student ---- */

/* Collective over the teacher's communicators; outside of passes, summons and steps. Moves each parameter of teacher.units[i] towards
 * that of student.units[i] by 1 - momentum, and publishes it; the student is read. 0 <= momentum <= 1.
 * FSDP_ERR_INVALID, before anything is changed: units that do not go together, which must have the same shapes in the same
 * order, the same communicator and storage device, and not be one. Modes may differ, not meshes. FSDP_ERR_STATE also where a
 * student is in a step. */
FSDP_API fsdp_status fsdp_teacher_update(fsdp_unit_list teacher, fsdp_unit_list student, float momentum) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
