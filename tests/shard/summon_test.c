/* SPDX-License-Identifier: MIT
 *
 * Summons of every kind, on every transport, device and mode: what is read is what was there; what is written with writeback
 * is there afterwards, each rank's own slice of it or rank 0's; gradients come along; summons nest; as much memory is in use
 * after as before; ranks that write different values are told, by parameter, element, ranks and values. */
#include "support/logged.h"
#include "support/mini.h"
#include "support/ranks.h"

#include "base/alloc.h"
#include "base/error.h"
#include "shard/unit.h"

/* Four ranks are a mesh of two replicas, whose slices are kept on the host. */
static mini_opts opts_of(const corner *c)
{
    bool mesh = c->ranks == 4;
    return (mini_opts){ .mode = c->mode, .device = c->device, .shards = mesh && c->mode != FSDP_MODE_NONE ? 2 : 0, .storage = mesh ? "cpu" : NULL };
}

/* Units of the toy network: `a` has two parameters, `none` has none. */
enum { MOST = 37 * 11 };

static size_t live_bytes(const fsdp_unit *u)
{
    return fsdpi_arena_get_stats(u->ctx->arena).bytes_live + fsdpi_arena_get_stats(u->ctx->gathered).bytes_live;
}

/* To or from memory of a summon, wherever that is. */
static fsdp_status move_on(fsdp_stream *s, void *to, const void *from, int64_t numel)
{
    if (numel == 0) return FSDP_OK;
    FSDP_TRY(fsdp_stream_copy(s, to, from, (size_t)numel * sizeof(float)));
    return fsdp_stream_sync(s);
}

static fsdp_status move(fsdp_unit *u, void *to, const void *from, int64_t numel)
{
    return move_on(fsdp_unit_stream(u), to, from, numel);
}

static float value(int unit, int param, int64_t i, float by)
{
    return by + 1000.0f * (float)unit + 500.0f * (float)param + (float)i;
}

/* Writes value() everywhere that is summoned. */
static fsdp_status write_all(mini *m, float by)
{
    float x[MOST];
    for (int u = 0; u < MINI_UNITS; u++)
        for (int p = 0; p < fsdp_unit_param_count(m->unit[u]); p++) {
            int64_t n = fsdp_unit_param_numel(m->unit[u], p);
            for (int64_t i = 0; i < n; i++) x[i] = value(u, p, i, by);
            float *to = fsdp_unit_summoned(m->unit[u], p);
            rank_check(to != NULL);
            FSDP_TRY(move(m->unit[u], to, x, n));
        }
    return FSDP_OK;
}

/* by[r]: what the elements that rank r owns are expected to have. */
static fsdp_status expect_by(mini *m, const float *by)
{
    float x[MOST];
    for (int u = 0; u < MINI_UNITS; u++) {
        const fsdpi_layout *l = &m->unit[u]->layout;
        for (int p = 0; p < l->count; p++) {
            FSDP_TRY(fsdp_unit_read_param(m->unit[u], p, x));
            for (int64_t i = 0, piece = 0; i < l->numel[p]; i++) {
                int owner = 0;
                while (l->at[p] + i >= l->edge[piece + 1]) piece++;
                while (fsdpi_unit_piece(m->unit[u], owner) != piece) owner++;
                if (x[i] != value(u, p, i, by[owner]))
                    FSDP_FAIL(FSDP_ERR_INTERNAL, "unit %d, parameter %d, element %lld is %g, not %g", u, p, (long long)i, (double)x[i], (double)value(u, p, i, by[owner]));
            }
        }
    }
    return FSDP_OK;
}

static fsdp_status expect_all(mini *m, float by)
{
    float all[8];
    for (int r = 0; r < 8; r++) all[r] = by;
    return expect_by(m, all);
}

static fsdp_status begin_all(mini *m, fsdp_unit_summon_opts o)
{
    for (int u = 0; u < MINI_UNITS; u++) FSDP_TRY(fsdp_unit_summon_begin(m->unit[u], &o));
    return FSDP_OK;
}

static fsdp_status end_all(mini *m)
{
    for (int u = MINI_UNITS - 1; u >= 0; u--) FSDP_TRY(fsdp_unit_summon_end(m->unit[u]));
    return FSDP_OK;
}

/* ---- every kind ---- */

static fsdp_status one_kind(mini *m, int rank, int size, fsdp_unit_summon_opts o)
{
    float by[8];
    bool here = !o.rank0_only || rank == 0;
    for (int r = 0; r < 8; r++) by[r] = (float)(o.rank0_only ? 10000 : 10000 * (r + 1));
    FSDP_TRY(begin_all(m, (fsdp_unit_summon_opts){ .writeback = true }));
    FSDP_TRY(write_all(m, -7));
    FSDP_TRY(end_all(m));
    FSDP_TRY(expect_all(m, -7));
    size_t before = live_bytes(m->unit[0]); /* mode optimizer keeps what was gathered */
    FSDP_TRY(begin_all(m, o)); /* arenas keep blocks, and windows stay: the second time they are there */
    FSDP_TRY(end_all(m));
    long blocks = fsdpi_alloc_live();
    bool threads = size > 1 || !fsdp_device_host_accessible(m->device); /* who share the count */
    FSDP_TRY(begin_all(m, o));
    if (!here) rank_check(live_bytes(m->unit[0]) == before);
    if (o.host && !threads) rank_check(fsdpi_alloc_live() > blocks && live_bytes(m->unit[0]) == before); /* sharded again on the device */
    for (int nested = 0; nested < 2; nested++) {
        const float *p = fsdp_unit_param(m->unit[MINI_A], 0);
        float *w = fsdp_unit_summoned(m->unit[MINI_A], 0), x[MOST];
        bool kept = fsdp_unit_mode(m->unit[MINI_A]) >= FSDP_MODE_OPTIMIZER; /* these are whole anyhow */
        rank_check(kept || (p != NULL) == (here && !o.host));
        rank_check((w != NULL) == (here && (o.host || o.writeback)));
        if (!here) rank_check(strstr(fsdp_last_error_message(), "on rank 0 only: this rank has nothing") != NULL);
        if (p != NULL) FSDP_TRY(move(m->unit[MINI_A], x, p, 36));
        if (p == NULL && w != NULL) FSDP_TRY(move(m->unit[MINI_A], x, w, 36));
        for (int i = 0; i < 36 && (p != NULL || w != NULL); i++) rank_check(x[i] == value(MINI_A, 0, i, -7));
        FSDP_TRY(nested == 0 ? begin_all(m, o) : end_all(m));
    }
    FSDP_TRY(expect_all(m, -7)); /* reading within is fine */
    if (o.writeback && here) FSDP_TRY(write_all(m, by[rank]));
    FSDP_TRY(expect_all(m, -7)); /* not before the end */
    FSDP_TRY(end_all(m));
    if (o.writeback) FSDP_TRY(expect_by(m, by));
    else FSDP_TRY(expect_all(m, -7));
    rank_check(live_bytes(m->unit[0]) == before && (threads || fsdpi_alloc_live() == blocks));
    for (int u = 0; u < MINI_UNITS; u++) FSDP_TRY(fsdp_unit_check_replicas(m->unit[u]));
    /* what is written and dropped is not there */
    if (!o.writeback) return FSDP_OK;
    FSDP_TRY(begin_all(m, o));
    if (here) FSDP_TRY(write_all(m, 3));
    for (int u = 0; u < MINI_UNITS; u++) FSDP_TRY(fsdp_unit_summon_cancel(m->unit[u]));
    rank_check(live_bytes(m->unit[0]) == before && (threads || fsdpi_alloc_live() == blocks));
    return expect_by(m, by);
}

static fsdp_status kinds(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    mini_opts opts = opts_of(c);
    FSDP_TRY(mini_create(&m, comm, &opts));
    for (int k = 0; k < 8; k++)
        FSDP_TRY(one_kind(&m, fsdp_comm_rank(comm), c->ranks, (fsdp_unit_summon_opts){ .writeback = k & 1, .rank0_only = k >> 1 & 1, .host = k >> 2 & 1 }));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_kinds(void **state)
{
    (void)state;
    in_corners(kinds, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 4, 0 }, .threads_only = SANITIZED });
}

/* ---- nesting ---- */

static fsdp_status refused(fsdp_unit *u, fsdp_unit_summon_opts o, const char *why)
{
    fsdp_status st = fsdp_unit_summon_begin(u, &o);
    if (st != FSDP_ERR_STATE || strstr(fsdp_last_error_message(), why) == NULL || strstr(fsdp_last_error_message(), u->name) == NULL)
        FSDP_FAIL(FSDP_ERR_INTERNAL, "not refused because of \"%s\": %s", why, fsdp_last_error_message());
    return FSDP_OK;
}

static fsdp_status nesting(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_unit *u = m.unit[MINI_BIG];
    const fsdp_unit_summon_opts bare = { 0 }, writes = { .writeback = true }, host = { .host = true }, root = { .rank0_only = true }, same = { .writeback = true, .same = true },
                                grads = { .grads = true };
    rank_check(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .same = true }) == FSDP_ERR_INVALID);
    rank_check(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true, .same = true, .rank0_only = true }) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_unit_summon_begin(u, &bare));
    FSDP_TRY(refused(u, writes, "writeback in the outermost"));
    FSDP_TRY(refused(u, host, "already summoned on the device"));
    FSDP_TRY(refused(u, grads, "already summoned without gradients"));
    FSDP_TRY(fsdp_unit_summon_begin(u, &root)); /* less than there is */
    FSDP_TRY(fsdp_unit_summon_end(u));
    FSDP_TRY(fsdp_unit_summon_end(u));
    FSDP_TRY(fsdp_unit_summon_begin(u, &writes));
    FSDP_TRY(refused(u, same, "without `same`"));
    FSDP_TRY(fsdp_unit_summon_begin(u, &bare));
    FSDP_TRY(fsdp_unit_summon_cancel(u)); /* of an inner one: nothing is dropped */
    float x = 5, got[MOST];
    FSDP_TRY(move(u, fsdp_unit_summoned(u, 0), &x, 1));
    FSDP_TRY(fsdp_unit_summon_begin(u, &writes));
    FSDP_TRY(fsdp_unit_summon_end(u)); /* not at the end of an inner one */
    FSDP_TRY(fsdp_unit_read_param(u, 0, got));
    rank_check(got[0] != 5);
    FSDP_TRY(fsdp_unit_summon_end(u));
    FSDP_TRY(fsdp_unit_read_param(u, 0, got));
    rank_check(got[0] == 5);
    FSDP_TRY(fsdp_unit_summon_begin(u, &root));
    FSDP_TRY(refused(u, bare, "on rank 0 only: the outermost"));
    FSDP_TRY(refused(u, host, "on rank 0 only: the outermost"));
    FSDP_TRY(fsdp_unit_summon_end(u));
    FSDP_TRY(fsdp_unit_summon_begin(u, &host));
    FSDP_TRY(refused(u, bare, "already summoned to the host"));
    FSDP_TRY(fsdp_unit_read_param(u, 0, got));
    FSDP_TRY(fsdp_unit_summon_end(u));
    float *g;
    rank_check(fsdp_unit_summon_end(u) == FSDP_ERR_STATE && fsdp_unit_summon_cancel(u) == FSDP_ERR_STATE && fsdp_unit_summoned_grad(u, 0, &g) == FSDP_ERR_STATE);
    rank_check(fsdp_unit_summoned_grad(u, 99, &g) == FSDP_ERR_INVALID && fsdp_unit_summoned(u, -1) == NULL);
    /* not where a pass or a step is open */
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    FSDP_TRY(refused(u, host, "a pass is open"));
    FSDP_TRY(refused(u, root, "a pass is open"));
    FSDP_TRY(refused(u, grads, "a pass is open"));
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(fsdp_unit_summon_begin(u, &host)); /* nor a pass or a step within */
    rank_check(fsdp_pass_begin(&pass, comm, FSDP_PASS_EVAL) == FSDP_ERR_STATE && fsdp_step_begin((fsdp_unit_list){ &u, 1 }) == FSDP_ERR_STATE);
    FSDP_TRY(fsdp_unit_summon_end(u));
    /* a reset forgets summons of every kind */
    for (int k = 0; k < 8; k++) {
        size_t before = live_bytes(u);
        FSDP_TRY(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = k & 1, .rank0_only = k >> 1 & 1, .host = k >> 2 & 1 }));
        FSDP_TRY(fsdp_comm_reset(comm));
        rank_check(live_bytes(u) <= before && fsdp_unit_summon_end(u) == FSDP_ERR_STATE);
    }
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, 0));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_nesting(void **state)
{
    (void)state;
    in_corners(nesting, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

/* ---- different values ---- */

static fsdp_status different(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm);
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_unit *u = m.unit[MINI_BIG]; /* w [37, 11], e [0], b [37] */
    float was[MOST], x[MOST], got[MOST];
    FSDP_TRY(fsdp_unit_read_param(u, 0, was));
    memcpy(x, was, sizeof(x));
    for (int times = 0; times < 2; times++) { /* it is said once */
        FSDP_TRY(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true }));
        x[123] = rank == c->ranks - 1 ? 5 : 4;
        x[200] = (float)rank;
        FSDP_TRY(move(u, fsdp_unit_summoned(u, 0), x, MOST));
        x[0] = (float)rank;
        FSDP_TRY(move(u, fsdp_unit_summoned(u, 2), x, 1));
        x[0] = was[0];
        FSDP_TRY(fsdp_unit_summon_end(u));
        FSDP_TRY(fsdp_unit_check_replicas(u));
    }
    /* refused: nothing is written, and the unit stays summoned */
    FSDP_TRY(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true, .same = true, .host = rank == -1 }));
    x[123] = rank == c->ranks - 1 ? 7 : 6;
    FSDP_TRY(move(u, fsdp_unit_summoned(u, 0), x, MOST));
    fsdp_status st = fsdp_unit_summon_end(u);
    if (c->ranks > 1) {
        char want[128];
        snprintf(want, sizeof(want), "parameter \"big.w\": element 123 is 6 on rank 0 and 7 on rank %d: ", c->ranks - 1);
        if (c->ranks > 2) snprintf(want, sizeof(want), "parameter \"big.w\": element 200 is 0 on rank 0 and 1 on rank 1");
        if (st != FSDP_ERR_INVALID || strstr(fsdp_last_error_message(), want) == NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "it said: %s", fsdp_last_error_message());
        FSDP_TRY(fsdp_unit_read_param(u, 0, got));
        rank_check(got[123] < 6);
        x[123] = 8;
        x[200] = 9;
        FSDP_TRY(move(u, fsdp_unit_summoned(u, 0), x, MOST)); /* and is mended */
        FSDP_TRY(fsdp_unit_summon_end(u));
        FSDP_TRY(fsdp_unit_read_param(u, 0, got));
        rank_check(memcmp(got, x, sizeof(x)) == 0);
    } else {
        FSDP_TRY(st);
    }
    mini_destroy(&m);
    return FSDP_OK;
}

static void told_of_differences(const corner *c)
{
    logged *l = c->arg;
    bool differs = c->ranks > 1, none = c->mode == FSDP_MODE_NONE;
    if (l->lines != differs || l->warnings != (differs && none)) fail_msg("%s: %d lines, %d warnings: %s", corner_name(c), l->lines, l->warnings, l->text[0]);
    char want[128];
    snprintf(want, sizeof(want), "parameter \"big.w\": element 123 is 4 on rank 0 and 5 on rank 1 (and 1 more parameter differs)");
    if (c->ranks > 2) snprintf(want, sizeof(want), "parameter \"big.w\": element 200 is 0 on rank 0 and 1 on rank 1 (and 1 more parameter differs)");
    if (differs && !(was_logged(l, want) && was_logged(l, "unit \"big\"") && was_logged(l, none ? "mode none" : "each rank's slice keeps its own")))
        fail_msg("%s: %s", corner_name(c), l->text[0]);
    memset(l, 0, sizeof(*l));
}

static void test_ranks_that_write_different_values(void **state)
{
    (void)state;
    logged *l = shared_alloc(sizeof(*l));
    fsdp_log_set(FSDP_LOG_INFO, keep_log, l);
    in_corners(different, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 3, 0 }, .arg = l, .after = told_of_differences });
    fsdp_log_set(FSDP_LOG_INFO, NULL, NULL);
    shared_free(l, sizeof(*l));
}

/* ---- gradients ---- */

/* Two rounds in a pass, two passes: what is summoned is what the step gets, to the bit; reading changes nothing. */
static const char *const rounds = "[0 F1 F2 F5 ]0 {0 B5 B2 B1 }0 [0 F1 ]0 {0 B1 }0";

/* The type of sums: in mode full the others too. */
static fsdp_dtype kept_in(const corner *c, int kind)
{
    return c->mode != FSDP_MODE_FULL ? FSDP_F32 : kind % 2 == c->ranks % 2 ? FSDP_BF16 : kind < 2 ? FSDP_F16 : FSDP_F32;
}

/* Where gradients are added up: in mode grad-op where the slices are not. */
static const char *summed_on(const corner *c)
{
    return c->mode != FSDP_MODE_GRAD_OP ? NULL : c->ranks == 4 ? c->device : strcmp(c->device, "cpu") == 0 ? "guard" : "cpu";
}

static fsdp_status step_grads(fsdp_unit *u, int param, float *out)
{
    const fsdp_slice *s;
    int n;
    fsdp_unit_slices(u, &s, &n);
    for (int i = 0; i < n; i++)
        if (s[i].param == param) FSDP_TRY(move_on(fsdp_unit_storage_stream(u), out + s[i].offset, s[i].grad, s[i].numel));
    return FSDP_OK;
}

static fsdp_status gradients(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm);
    mini m, quiet;
    float got[MINI_UNITS][3][MOST] = { 0 }, is[MOST], all[2048], same[2048], *g;
    for (int kind = 0; kind < 4; kind++) {
        fsdp_unit_summon_opts o = { .grads = true, .host = kind & 1, .rank0_only = kind >> 1 };
        bool here = !o.rank0_only || rank == 0;
        mini_opts opts = opts_of(c);
        opts.grad_dtype = kept_in(c, kind);
        opts.grads = summed_on(c);
        FSDP_TRY(mini_create(&m, comm, &opts));
        FSDP_TRY(mini_create(&quiet, comm, &opts));
        FSDP_TRY(begin_all(&m, o)); /* there are none */
        if (here) FSDP_TRY(fsdp_unit_summoned_grad(m.unit[MINI_A], 0, &g));
        rank_check(!here || g == NULL);
        rank_check(here || fsdp_unit_summoned_grad(m.unit[MINI_A], 0, &g) == FSDP_ERR_STATE);
        FSDP_TRY(end_all(&m));
        for (int pass = 0; pass < 2; pass++) {
            FSDP_TRY(mini_leaf(&m, rounds, pass * c->ranks + rank));
            FSDP_TRY(mini_leaf(&quiet, rounds, pass * c->ranks + rank));
            size_t before = live_bytes(m.unit[0]);
            FSDP_TRY(begin_all(&m, o));
            for (int u = 0; u < MINI_UNITS && here; u++)
                for (int p = 0; p < fsdp_unit_param_count(m.unit[u]); p++) {
                    FSDP_TRY(fsdp_unit_summoned_grad(m.unit[u], p, &g));
                    rank_check((g == NULL) == (u == MINI_TINY)); /* the script leaves it out */
                    if (g != NULL) FSDP_TRY(move(m.unit[u], got[u][p], g, fsdp_unit_param_numel(m.unit[u], p)));
                }
            FSDP_TRY(end_all(&m));
            rank_check(live_bytes(m.unit[0]) <= before + (c->mode >= FSDP_MODE_OPTIMIZER ? 1u << 20 : 0));
        }
        FSDP_TRY(fsdp_step_begin(mini_list(&m)));
        for (int u = 0; u < MINI_UNITS && here; u++)
            for (int p = 0; p < fsdp_unit_param_count(m.unit[u]) && u != MINI_TINY; p++) {
                int64_t n = fsdp_unit_param_numel(m.unit[u], p);
                memcpy(is, got[u][p], sizeof(is));
                FSDP_TRY(step_grads(m.unit[u], p, is));
                rank_check(memcmp(is, got[u][p], (size_t)n * sizeof(float)) == 0);
            }
        fsdpi_step_leave(mini_list(&m));
        FSDP_TRY(fsdp_optim_step(m.optim, NULL));
        FSDP_TRY(fsdp_optim_step(quiet.optim, NULL));
        FSDP_TRY(mini_read(&m, all));
        FSDP_TRY(mini_read(&quiet, same));
        rank_check(memcmp(all, same, (size_t)mini_numel() * sizeof(float)) == 0);
        mini_destroy(&m);
        mini_destroy(&quiet);
    }
    return FSDP_OK;
}

static void test_gradients(void **state)
{
    (void)state;
    in_corners(gradients, &(corners){ .all_modes = true, .ranks = (const int[]){ 3, 4, 0 }, .threads_only = true });
}

/* ---- rank 0 alone, to the host ---- */

/* Rank 0 reads masters also where they are gathered in 16 bits: the others offer theirs. While a unit is summoned no rank gives it up,
 * whether it holds anything or not. */
static fsdp_status for_rank_0(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    mini_opts opts = opts_of(c);
    opts.param_dtype = FSDP_BF16;
    FSDP_TRY(mini_create(&m, comm, &opts));
    for (int k = 0; k < 4; k++) {
        fsdp_unit_summon_opts o = { .rank0_only = k != 1, .host = k & 1 };
        FSDP_TRY(begin_all(&m, (fsdp_unit_summon_opts){ .writeback = true }));
        FSDP_TRY(write_all(&m, 0.3f + (float)k));
        FSDP_TRY(end_all(&m));
        for (int again = 0; again < 2; again++) {
            FSDP_TRY(begin_all(&m, o));
            const float *p = o.host ? fsdp_unit_summoned(m.unit[MINI_A], 0) : fsdp_unit_param(m.unit[MINI_A], 0);
            float x[MOST];
            bool here = !o.rank0_only || fsdp_comm_rank(comm) == 0;
            rank_check(!here || p != NULL);
            if (here) FSDP_TRY(move(m.unit[MINI_A], x, p, 36));
            for (int i = 0; i < 36 && here; i++) rank_check(x[i] == value(MINI_A, 0, i, 0.3f + (float)k));
            for (int u = 0; u < MINI_UNITS; u++) rank_check(fsdp_unit_reshard(m.unit[u]) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "it is in use") != NULL);
            FSDP_TRY(end_all(&m));
        }
    }
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_masters_for_rank_0(void **state)
{
    (void)state;
    in_corners(for_rank_0, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 4, 0 }, .threads_only = true });
}

/* With writeback what is written to gradients is what the step gets. */
static fsdp_status written_gradients(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm);
    mini m;
    float x[MOST], is[MOST], *g;
    for (int kind = 0; kind < 4; kind++) {
        fsdp_unit_summon_opts o = { .grads = true, .writeback = true, .host = kind & 1, .rank0_only = kind >> 1 };
        bool here = !o.rank0_only || rank == 0;
        mini_opts opts = opts_of(c);
        opts.grad_dtype = kept_in(c, kind);
        opts.grads = summed_on(c);
        FSDP_TRY(mini_create(&m, comm, &opts));
        FSDP_TRY(mini_leaf(&m, rounds, rank));
        for (int drop = 0; drop < 2; drop++) {
            FSDP_TRY(begin_all(&m, o));
            for (int u = 0; u < MINI_UNITS && here; u++)
                for (int p = 0; p < fsdp_unit_param_count(m.unit[u]); p++) {
                    FSDP_TRY(fsdp_unit_summoned_grad(m.unit[u], p, &g));
                    for (int i = 0; i < MOST; i++) x[i] = (float)(i + p + 10 * u + 1000 * drop);
                    if (g != NULL) FSDP_TRY(move(m.unit[u], g, x, fsdp_unit_param_numel(m.unit[u], p)));
                }
            if (!drop) FSDP_TRY(end_all(&m));
            for (int u = 0; u < MINI_UNITS && drop; u++) FSDP_TRY(fsdp_unit_summon_cancel(m.unit[u]));
        }
        FSDP_TRY(fsdp_step_begin(mini_list(&m)));
        for (int u = 0; u < MINI_UNITS; u++)
            for (int p = 0; p < fsdp_unit_param_count(m.unit[u]) && u != MINI_TINY; p++) {
                for (int i = 0; i < MOST; i++) is[i] = rounded_to(opts.grad_dtype, (float)(i + p + 10 * u));
                memcpy(x, is, sizeof(x));
                FSDP_TRY(step_grads(m.unit[u], p, is));
                rank_check(memcmp(is, x, (size_t)fsdp_unit_param_numel(m.unit[u], p) * sizeof(float)) == 0);
            }
        FSDP_TRY(fsdp_step_cancel(mini_list(&m)));
        mini_destroy(&m);
    }
    return FSDP_OK;
}

static void test_written_gradients(void **state)
{
    (void)state;
    in_corners(written_gradients, &(corners){ .all_modes = true, .ranks = (const int[]){ 3, 4, 0 }, .threads_only = SANITIZED });
}

/* ---- writing where one may only read ---- */

typedef struct poke_args {
    const float *p;
} poke_args;

static fsdp_status k_poke(const fsdp_kernel *k, const void *args)
{
    *(float *)fsdp_kernel_ptr(k, ((const poke_args *)args)->p) = 77;
    return FSDP_OK;
}

static fsdp_status read_only(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_unit *u = m.unit[MINI_A];
    FSDP_TRY(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .host = true }));
    fsdp_unit_summoned(u, 0)[3] = 77;
    rank_check(fsdp_unit_summon_end(u) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "unit \"a\" was written to, but it was summoned read-only") != NULL);
    /* the device's, where it is a buffer of this rank's own: the shared view is mapped read-only */
    if (strcmp(c->transport, "copy") == 0) {
        FSDP_TRY(fsdp_unit_summon_begin(u, NULL));
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_poke, &(poke_args){ fsdp_unit_param(u, 1) }, sizeof(poke_args)));
        rank_check(fsdp_unit_summon_end(u) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "read-only") != NULL);
    }
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, 0)); /* the summon has ended */
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_what_is_read_only(void **state)
{
    (void)state;
#ifdef NDEBUG
    (void)read_only;
    (void)k_poke;
    skip(); /* release builds do not look */
#else
    in_corners(read_only, &(corners){ .all_modes = true, .ranks = (const int[]){ 2, 0 } });
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_nesting),
        cmocka_unit_test(test_ranks_that_write_different_values),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_written_gradients),
        cmocka_unit_test(test_masters_for_rank_0),
        cmocka_unit_test(test_what_is_read_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
