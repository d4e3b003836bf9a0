/* SPDX-License-Identifier: MIT
 *
 * Parameters that units leave alone: which they are, and that ranks agree about it. */
#include "nn/wrapping.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/fits.h"
#include "comm/comm.h"

#include <string.h>
#include <xxhash.h>

typedef struct request {
    const char *pattern;
    bool ignored, check_alone;
    int fitting, params;
} request;

static fsdp_status ignore(fsdpi_parameter *p, const char *name, void *arg)
{
    request *r = arg;
    r->params++;
    if (!fsdpi_fits(r->pattern, name)) return FSDP_OK;
    r->fitting++;
    FSDP_FAIL_IF(p->unit != NULL && p->ignored != r->ignored, FSDP_ERR_STATE,
                 "fsdp_module_set_ignored: parameter \"%s\" is in unit \"%s\" already: say it before the module is wrapped", name, fsdp_unit_name(p->unit));
    if (!r->check_alone) p->ignored = r->ignored;
    return FSDP_OK;
}

fsdp_status fsdp_module_set_ignored(fsdp_module *m, const char *pattern, bool ignored)
{
    FSDP_FAIL_IF(m == NULL || pattern == NULL, FSDP_ERR_INVALID, "fsdp_module_set_ignored: no module, or no pattern (\"*\" stands for all parameters)");
    request r = { .pattern = pattern, .ignored = ignored, .check_alone = true };
    FSDP_TRY(fsdpi_module_each_param(m, ignore, &r));
    FSDP_FAIL_IF(r.fitting == 0, FSDP_ERR_INVALID, "fsdp_module_set_ignored: \"%s\" fits none of the %d parameters of module %s: names are whole, as fsdp_module_params() lists them, and * stands for any text",
                 pattern, r.params, m->type);
    r.check_alone = false;
    return fsdpi_module_each_param(m, ignore, &r);
}

/* ---- the same on every rank ---- */

typedef struct census {
    int count; /* parameters in no unit */
    uint64_t hash;
    double *flag; /* NULL: count only; else of each, twice: what fsdp_comm_max() is to find */
    int rank, size, wanted;
    char name[512];
} census;

static fsdp_status look(fsdpi_parameter *p, const char *name, void *arg)
{
    census *c = arg;
    if (p->unit != NULL) return FSDP_OK;
    if (c->flag != NULL) { /* the lowest rank on which it is, and on which it is not */
        c->flag[2 * c->count] = p->ignored ? c->size - c->rank : 0;
        c->flag[2 * c->count + 1] = p->ignored ? 0 : c->size - c->rank;
    } else {
        c->hash = XXH3_64bits_withSeed(&p->ignored, sizeof(p->ignored), c->hash + 1);
    }
    if (c->count == c->wanted) {
        strncpy(c->name, name, sizeof(c->name) - 1);
        c->name[sizeof(c->name) - 1] = '\0';
    }
    c->count++;
    return FSDP_OK;
}

static fsdp_status look_at_all(census *c, fsdp_module *const *member, int members)
{
    c->count = 0;
    for (int i = 0; i < members; i++) FSDP_TRY(fsdpi_module_each_param(member[i], look, c));
    return FSDP_OK;
}

/* Ranks have as many parameters, and ignore others. */
static fsdp_status name_first(census *c, fsdp_comm *comm, fsdp_module *const *member, int members)
{
    fsdp_status st = FSDP_OK;
    c->flag = fsdpi_calloc((size_t)c->count * 2, sizeof(*c->flag));
    if (c->flag == NULL) st = fsdp_error_raise(FSDP_ERR_NOMEM, __func__, __FILE__, __LINE__, "no memory to compare %d parameters", c->count);
    st = fsdp_comm_agree(comm, st);
    if (st == FSDP_OK) st = look_at_all(c, member, members);
    if (st == FSDP_OK) st = fsdp_comm_max(comm, c->flag, 2 * c->count);
    if (st != FSDP_OK) return st;
    for (c->wanted = 0; c->wanted < c->count && (c->flag[2 * c->wanted] == 0 || c->flag[2 * c->wanted + 1] == 0);) c->wanted++;
    int is = c->size - (int)c->flag[2 * c->wanted], is_not = c->size - (int)c->flag[2 * c->wanted + 1];
    FSDP_TRY(look_at_all(c, member, members));
    FSDP_FAIL(FSDP_ERR_INVALID, "fsdp_wrap: parameter \"%s\" is ignored on rank %d and not on rank %d: every rank must ignore the same (fsdp_module_set_ignored)", c->name,
              comm->world_ranks[is], comm->world_ranks[is_not]);
}

fsdp_status fsdpi_wrap_same_ignored(fsdp_comm *comm, fsdp_module *const *member, int members)
{
    census c = { .rank = fsdp_comm_rank(comm), .size = fsdp_comm_size(comm), .wanted = -1 };
    FSDP_TRY(fsdp_comm_agree(comm, look_at_all(&c, member, members)));
    double at[4] = { c.count, -(double)c.count, (double)(c.hash >> 32), -(double)(c.hash >> 32) };
    FSDP_TRY(fsdp_comm_max(comm, at, 4));
    /* Trees of other sizes: making the unit says so. */
    if (at[0] != -at[1] || at[2] == -at[3]) return FSDP_OK;
    fsdp_status st = name_first(&c, comm, member, members);
    fsdpi_free(c.flag);
    return st;
}
