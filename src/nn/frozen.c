/* SPDX-License-Identifier: MIT
 *
 * Freezing by name, before and after wrapping. A parameter in a unit is frozen where its unit says so; one that is in
 * none remembers it for the unit to come. */
#include "nn/module.h"

#include "base/error.h"
#include "base/fits.h"
#include "shard/unit.h"

typedef struct request {
    const char *pattern;
    bool frozen, check_alone;
    int fitting, params;
} request;

static fsdp_status freeze(fsdpi_parameter *p, const char *name, void *arg)
{
    request *r = arg;
    r->params++;
    if (!fsdpi_fits(r->pattern, name)) return FSDP_OK;
    r->fitting++;
    if (r->check_alone) return p->unit != NULL ? fsdpi_life_allows(p->unit, FSDPI_EV_FREEZE, NULL) : FSDP_OK;
    if (p->unit != NULL) FSDP_TRY(fsdp_unit_set_frozen(p->unit, p->index, r->frozen));
    p->frozen = r->frozen;
    return FSDP_OK;
}

fsdp_status fsdp_module_set_frozen(fsdp_module *m, const char *pattern, bool frozen)
{
    FSDP_FAIL_IF(m == NULL || pattern == NULL, FSDP_ERR_INVALID, "fsdp_module_set_frozen: no module, or no pattern (\"*\" stands for all parameters)");
    request r = { .pattern = pattern, .check_alone = true };
    FSDP_TRY(fsdpi_module_each_param(m, freeze, &r));
    FSDP_FAIL_IF(r.fitting == 0, FSDP_ERR_INVALID, "fsdp_module_set_frozen: \"%s\" fits none of the %d parameters of module %s: names are whole, as fsdp_module_params() lists them, and * stands for any text",
                 pattern, r.params, m->type);
    r = (request){ .pattern = pattern, .frozen = frozen };
    return fsdpi_module_each_param(m, freeze, &r);
}
