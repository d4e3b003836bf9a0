/* SPDX-License-Identifier: MIT
 *
 * Parameters that units leave alone: which they are, and that ranks agree about it. */
#include "nn/wrapping.h"

#include "base/alloc.h"
#include "base/error.h"
#include "comm/comm.h"

#include <string.h>
#include <xxhash.h>

static fsdp_status check(fsdpi_parameter *p, const char *name, void *arg)
{
    FSDP_FAIL_IF(p->unit != NULL && p->ignored != *(const bool *)arg, FSDP_ERR_STATE,
                 "fsdp_module_set_ignored: parameter \"%s\" is in unit \"%s\" already: say it before the module is wrapped", name, fsdp_unit_name(p->unit));
    return FSDP_OK;
}

static fsdp_status ignore(fsdpi_parameter *p, const char *name, void *arg)
{
    (void)name;
    p->ignored = *(const bool *)arg;
    return FSDP_OK;
}

fsdp_status fsdp_module_set_ignored(fsdp_module *m, const char *pattern, bool ignored)
{
    FSDP_TRY(fsdpi_module_each_fitting(m, pattern, __func__, check, &ignored));
    return fsdpi_module_each_fitting(m, pattern, __func__, ignore, &ignored);
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
