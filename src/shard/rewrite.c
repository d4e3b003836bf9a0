/* SPDX-License-Identifier: MIT
 *
 * Masters that are written in place, outside of steps: averages and teachers. Gradients stay. */
#include "shard/rewrite.h"

#include "base/error.h"
#include "base/within.h"
#include "shard/unit_list.h"

static fsdp_status publish(fsdp_unit *u, bool alike)
{
    if (!alike) FSDP_TRY(fsdpi_unit_unify(u));
    FSDP_TRY(fsdpi_unit_publish(u));
    fsdpi_unit_mark_set(u, NULL);
    fsdpi_unit_check(u);
    return FSDP_OK;
}

fsdp_status fsdpi_units_rewrite(fsdp_unit_list units, fsdpi_event ev, fsdpi_rewrite_fn write, void *arg, bool alike)
{
    FSDPI_LIST_CALL(units, fsdpi_event_call(ev));
    FSDP_TRY(fsdpi_list_check(units, ev));
    for (int i = 0; i < units.count; i++) FSDP_TRY(fsdpi_unit_done(units.units[i]));
    for (int i = 0; i < units.count; i++) FSDP_TRY(fsdpi_unit_open(units.units[i]));
    /* What is written cannot be taken back: so before it, all ranks have come this way. */
    FSDP_TRY(fsdpi_list_tag(units, FSDPI_OP_REWRITE, true));
    for (int i = 0; i < units.count; i++) FSDP_TRY(write(units.units[i], i, arg));
    /* Replicas wait for each other: on one communicator after another. */
    for (fsdpi_runtime *rt = fsdpi_list_next(units, NULL); rt != NULL; rt = fsdpi_list_next(units, rt))
        for (int i = 0; i < units.count; i++)
            if (units.units[i]->rt == rt) FSDP_TRY(publish(units.units[i], alike));
    return FSDP_OK;
}

typedef struct public_write {
    fsdp_write_fn write;
    void *arg;
} public_write;

static fsdp_status write_slices(fsdp_unit *u, int number, void *arg)
{
    const public_write *w = arg;
    const fsdp_slice *slice;
    int n;
    (void)number;
    fsdp_unit_slices(u, &slice, &n);
    fsdpi_within here;
    fsdpi_within_begin(&here, NULL);
    fsdp_status st = w->write(u, slice, n, w->arg);
    fsdpi_within_end(&here);
    return st;
}

fsdp_status fsdp_units_rewrite(fsdp_unit_list units, fsdp_write_fn write, void *arg)
{
    FSDP_FAIL_IF(write == NULL, FSDP_ERR_INVALID, "fsdp_units_rewrite: no function");
    return fsdpi_units_rewrite(units, FSDPI_EV_REWRITE, write_slices, &(public_write){ write, arg }, false);
}
