/* SPDX-License-Identifier: MIT */
#include "shard/compare.h"

#include "base/error.h"
#include "base/log.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

/* ---- hashes ---- */

typedef struct hash_args {
    const float *x;
    int64_t numel;
    uint64_t *out; /* host memory */
} hash_args;

static fsdp_status k_hash(const fsdp_kernel *k, const void *args)
{
    const hash_args *a = args;
    *a->out = XXH3_64bits(fsdp_kernel_ptr(k, a->x), (size_t)a->numel * sizeof(float));
    return FSDP_OK;
}

uint64_t fsdpi_hash_host(const float *x, int64_t numel)
{
    enum { PIECE = 1024 };
    static const float zeros[PIECE];
    uint64_t h = 0;
    for (int64_t at = 0; at < numel; at += PIECE)
        h = XXH3_64bits_withSeed(x != NULL ? x + at : zeros, (size_t)(numel - at < PIECE ? numel - at : PIECE) * sizeof(float), h);
    return h;
}

/* Of elements [first, last) of a parameter that lie in the range. */
static fsdp_status hash_part(const fsdpi_values *v, int param, int64_t first, int64_t last, uint64_t *out)
{
    fsdp_unit *u = v->unit;
    int64_t at = u->layout.at[param];
    if (at + first < v->from) first = v->from - at;
    if (at + last > v->to) last = v->to - at;
    *out = 0;
    if (first >= last) return FSDP_OK;
    if (v->flat != NULL) {
        FSDP_TRY(fsdpi_between_begin(u, false));
        FSDP_TRY(fsdp_stream_launch(fsdpi_between(u, false), k_hash, &(hash_args){ v->flat + (at + first - v->from), last - first, out }, sizeof(hash_args)));
        return fsdp_stream_sync(fsdpi_between(u, false));
    }
    if (v->hash != NULL) {
        *out = v->hash[param];
        return FSDP_OK;
    }
    const float *host = v->param[param];
    *out = fsdpi_hash_host(host != NULL ? host + first : NULL, last - first);
    return FSDP_OK;
}

fsdp_status fsdpi_values_hash(const fsdpi_values *v, uint64_t *out)
{
    uint64_t all = 0, one;
    for (int i = 0; i < v->unit->layout.count; i++) {
        FSDP_TRY(hash_part(v, i, 0, v->unit->layout.numel[i], &one));
        all = (all ^ one) * 0x9e3779b97f4a7c15u + (uint64_t)i;
        all ^= all >> 29;
    }
    *out = all;
    return FSDP_OK;
}

static fsdp_status value_of(const fsdpi_values *v, int param, int64_t element, float *out)
{
    fsdp_unit *u = v->unit;
    if (v->flat == NULL) {
        *out = v->param[param] != NULL ? v->param[param][element] : 0;
        return FSDP_OK;
    }
    FSDP_TRY(fsdpi_between_copy(u, out, v->flat + (u->layout.at[param] + element - v->from), sizeof(float)));
    return fsdp_stream_sync(fsdpi_between(u, false));
}

/* ---- between ranks ---- */

typedef struct told_range {
    int64_t from, to;
    uint64_t hash;
    fsdp_status st; /* of making the hash: where one rank's device failed, all end here */
} told_range;

/* The first two ranks that have the same range and other values. */
static bool find_pair(const fsdp_comm *comm, int pair[2])
{
    for (int b = 1; b < comm->size; b++) {
        const told_range *y = fsdpi_comm_told(comm, b);
        for (int a = 0; a < b; a++) {
            const told_range *x = fsdpi_comm_told(comm, a);
            if (x->from != y->from || x->to != y->to) continue;
            if (x->hash == y->hash) break; /* b is as a is, and a has been looked at */
            pair[0] = a;
            pair[1] = b;
            return true;
        }
    }
    return false;
}

/* Which parameters differ between the two. */
static fsdp_status find_param(const fsdpi_values *v, fsdpi_difference *d)
{
    enum { PIECE = FSDPI_SLOT / sizeof(uint64_t) };
    fsdp_comm *comm = v->unit->rt->comm;
    uint64_t hash[PIECE];
    for (int at = 0; at < v->unit->layout.count; at += PIECE) {
        int n = v->unit->layout.count - at < PIECE ? v->unit->layout.count - at : PIECE;
        for (int i = 0; i < n; i++) FSDP_TRY(hash_part(v, at + i, 0, v->unit->layout.numel[at + i], &hash[i]));
        FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_COMPARE, v->unit->name, hash, (size_t)n * sizeof(*hash)));
        const uint64_t *a = fsdpi_comm_told(comm, d->rank[0]), *b = fsdpi_comm_told(comm, d->rank[1]);
        for (int i = 0; i < n; i++)
            if (a[i] != b[i] && d->params++ == 0) d->param = at + i;
    }
    FSDP_FAIL_IF(d->params == 0, FSDP_ERR_INTERNAL, "unit \"%s\" changes while it is compared", v->unit->name);
    return FSDP_OK;
}

/* By halves. */
static fsdp_status find_element(const fsdpi_values *v, fsdpi_difference *d)
{
    fsdp_comm *comm = v->unit->rt->comm;
    int64_t first = 0, last = v->unit->layout.numel[d->param];
    d->element = -1;
    if (v->hash != NULL) return FSDP_OK;
    while (last - first > 1) {
        int64_t middle = first + (last - first) / 2;
        uint64_t hash;
        FSDP_TRY(hash_part(v, d->param, first, middle, &hash));
        FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_COMPARE, v->unit->name, &hash, sizeof(hash)));
        bool same = *(const uint64_t *)fsdpi_comm_told(comm, d->rank[0]) == *(const uint64_t *)fsdpi_comm_told(comm, d->rank[1]);
        first = same ? middle : first;
        last = same ? last : middle;
    }
    float value = 0;
    d->element = first;
    int64_t at = v->unit->layout.at[d->param] + first;
    if (at >= v->from && at < v->to) FSDP_TRY(value_of(v, d->param, first, &value));
    FSDP_TRY(fsdpi_comm_tell(comm, FSDPI_OP_COMPARE, v->unit->name, &value, sizeof(value)));
    for (int i = 0; i < 2; i++) memcpy(&d->value[i], fsdpi_comm_told(comm, d->rank[i]), sizeof(float));
    return FSDP_OK;
}

fsdp_status fsdpi_compare(const fsdpi_values *v, fsdpi_op op, fsdpi_difference *out)
{
    fsdp_comm *comm = v->unit->rt->comm;
    told_range mine = { .from = v->from, .to = v->to };
    *out = (fsdpi_difference){ .what = v->what != NULL ? v->what : "parameter" };
    if (comm->size > 1) mine.st = fsdpi_values_hash(v, &mine.hash);
    fsdpi_error e;
    if (mine.st != FSDP_OK) fsdpi_error_save(&e);
    FSDP_TRY(fsdpi_comm_tell(comm, op, v->unit->name, &mine, sizeof(mine)));
    bool failed = false;
    for (int r = 0; r < comm->size; r++) failed |= ((const told_range *)fsdpi_comm_told(comm, r))->st != FSDP_OK;
    out->found = !failed && find_pair(comm, out->rank);
    if (failed) {
        if (mine.st != FSDP_OK) fsdpi_error_restore(&e);
        return fsdp_comm_agree(comm, mine.st);
    }
    if (!out->found) return FSDP_OK;
    FSDP_TRY(find_param(v, out));
    return find_element(v, out);
}

/* ---- words ---- */

const char *fsdpi_difference_text(const fsdp_unit *u, const fsdpi_difference *d, char *text, size_t bytes)
{
    int a = u->rt->comm->world_ranks[d->rank[0]], b = u->rt->comm->world_ranks[d->rank[1]];
    int n = snprintf(text, bytes, "%s \"%.120s\": ", d->what, u->layout.param[d->param].name);
    if (d->element < 0) n += snprintf(text + n, bytes - (size_t)n, "it differs between ranks %d and %d", a, b);
    else
        n += snprintf(text + n, bytes - (size_t)n, "element %lld is %.9g on rank %d and %.9g on rank %d", (long long)d->element, (double)d->value[0], a, (double)d->value[1],
                      b);
    if (d->params > 1) snprintf(text + n, bytes - (size_t)n, " (and %d more parameter%s differ%s)", d->params - 1, d->params > 2 ? "s" : "", d->params > 2 ? "" : "s");
    return text;
}

/* The flags are set on every rank, so that they agree; one rank speaks. */
void fsdpi_difference_log(fsdp_unit *u, const fsdpi_difference *d)
{
    bool *said = fsdpi_unit_has_replicas(u) ? &u->said_differ : &u->rt->said_differ;
    char text[400];
    if (!d->found || *said) return;
    *said = true;
    if (u->rt->comm->rank != 0) return;
    fsdpi_difference_text(u, d, text, sizeof(text));
    if (fsdpi_unit_has_replicas(u))
        fsdpi_log(FSDP_LOG_WARN, "unit \"%s\": ranks hold replicas (mode %s) but were given different values: %s; each rank's slice of its own now counts everywhere", u->name,
                  fsdp_mode_name(u->mode), text);
    else
        fsdpi_log(FSDP_LOG_INFO, "unit \"%s\": ranks were given different values: %s; each rank's slice keeps its own, so they depend on the number of ranks (said once)", u->name,
                  text);
}
