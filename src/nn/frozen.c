/* SPDX-License-Identifier: MIT
 *
 * Freezing by name, before and after wrapping. A parameter in a unit is frozen where its unit says so; one that is in
 * none remembers it for the unit to come. */
#include "nn/module.h"

#include "shard/unit.h"

static fsdp_status check(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)name, (void)arg;
    return p->unit != NULL ? fsdpi_life_allows(p->unit, FSDPI_EV_FREEZE, NULL) : FSDP_OK;
}

static fsdp_status freeze(fsdpi_parameter *p, const char *name, void *arg)
{
    bool frozen = *(const bool *)arg;
    (void)name;
    if (p->unit != NULL) FSDP_TRY(fsdp_unit_set_frozen(p->unit, p->index, frozen));
    p->frozen = frozen;
    return FSDP_OK;
}

fsdp_status fsdp_module_set_frozen(fsdp_module *m, const char *pattern, bool frozen)
{
    FSDP_TRY(fsdpi_module_each_fitting(m, pattern, __func__, check, NULL));
    return fsdpi_module_each_fitting(m, pattern, __func__, freeze, &frozen);
}
