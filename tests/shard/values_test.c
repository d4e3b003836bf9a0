/* SPDX-License-Identifier: MIT
 *
 * Where values come from: one rank's win everywhere and the others need none; what fails on one rank changes nothing on any;
 * replicas that are given different values, or part later, are told by parameter, element, ranks and values; and parameters
 * that never had values are named. */
#include "support/logged.h"
#include "support/ranks.h"

#include "base/error.h"
#include "shard/unit.h"

/* Nothing is round: [5,7] and [33] and [] and nothing, slices cut them anywhere. */
static const fsdp_param params[] = { { "w", 2, { 5, 7 } }, { "b", 1, { 33 } }, { "s", 0, { 0 } }, { "e", 1, { 0 } } };
enum { PARAMS = 4, NUMEL = 35 + 33 + 1 };

typedef struct site {
    fsdp_comm *comm;
    fsdp_device *dev;
    fsdp_unit *unit;
    int rank, size;
    fsdp_mode mode;
} site;

/* Four ranks are a mesh of two replicas, whose slices are kept on the host. */
static fsdp_status set_up(site *x, fsdp_comm *comm, const corner *c)
{
    bool mesh = c->ranks == 4;
    *x = (site){ .comm = comm, .rank = fsdp_comm_rank(comm), .size = fsdp_comm_size(comm), .mode = c->mode };
    FSDP_TRY(fsdp_device_open(&x->dev, c->device));
    fsdp_unit_opts o = { .name = "u", .mode = x->mode, .compute_device = x->dev, .shards = mesh && x->mode != FSDP_MODE_NONE ? 2 : 0 };
    if (mesh) o.storage_device = fsdp_device_cpu();
    return fsdp_unit_create(&x->unit, comm, params, PARAMS, &o);
}

static void take_down(site *x)
{
    fsdp_unit_destroy(x->unit);
    fsdp_device_close(x->dev);
}

static fsdp_status read_all(fsdp_unit *u, float *out)
{
    for (int i = 0; i < PARAMS; i++) {
        FSDP_TRY(fsdp_unit_read_param(u, i, out));
        out += fsdp_unit_param_numel(u, i);
    }
    return FSDP_OK;
}

static float value(float from, int param, int64_t i)
{
    return from + 100.0f * (float)param + (float)i;
}

static fsdp_status expect(const site *x, float from)
{
    float got[NUMEL], *at = got;
    FSDP_TRY(read_all(x->unit, got));
    for (int p = 0; p < PARAMS; p++)
        for (int64_t i = 0; i < fsdp_unit_param_numel(x->unit, p); i++, at++)
            if (*at != value(from, p, i))
                FSDP_FAIL(FSDP_ERR_INTERNAL, "rank %d: %s[%lld] is %g, not %g", x->rank, params[p].name, (long long)i, (double)*at, (double)value(from, p, i));
    return FSDP_OK;
}

typedef struct source {
    float from;
    int calls, fail_at; /* the call that fails; 0: none */
    int64_t asked;
} source;

static fsdp_status give(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    source *s = arg;
    rank_check(strcmp(name, params[param].name) == 0);
    for (int64_t i = 0; i < numel; i++) out[i] = value(s->from, param, first + i);
    s->asked += numel;
    if (++s->calls == s->fail_at) FSDP_FAIL(FSDP_ERR_IO, "the file is gone");
    return FSDP_OK;
}

/* ---- from one rank ---- */

static fsdp_status from_each_rank(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(set_up(&x, comm, arg));
    size_t live = fsdpi_arena_get_stats(x.unit->store->arena).bytes_live;
    for (int r = 0; r < x.size; r++) {
        source mine = { .from = (float)(10000 * (x.rank + 1)) };
        bool gives = x.rank == r;
        FSDP_TRY(fsdp_unit_fill_from(x.unit, r, gives ? give : NULL, gives ? &mine : NULL));
        rank_check(mine.asked == (gives ? NUMEL : 0));
        FSDP_TRY(expect(&x, (float)(10000 * (r + 1))));
        rank_check(fsdpi_arena_get_stats(x.unit->store->arena).bytes_live == live); /* no copy is left */
        FSDP_TRY(fsdp_unit_check_replicas(x.unit));
        /* It fails there, at the second call: all keep what they have, and are told who and why. */
        source bad = { .from = 5, .fail_at = 2 };
        fsdp_status st = fsdp_unit_fill_from(x.unit, r, give, &bad);
        char who[32];
        snprintf(who, sizeof(who), "rank %d: the file is gone", r);
        rank_check(st == FSDP_ERR_IO && strstr(fsdp_last_error_message(), x.size > 1 ? who : "the file is gone") != NULL);
        FSDP_TRY(expect(&x, (float)(10000 * (r + 1))));
        st = fsdp_unit_fill_from(x.unit, r, NULL, NULL);
        rank_check(st == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "no function on the rank that fills") != NULL);
        FSDP_TRY(expect(&x, (float)(10000 * (r + 1))));
    }
    rank_check(fsdp_unit_fill_from(x.unit, x.size, give, NULL) == FSDP_ERR_INVALID && fsdp_unit_fill_from(x.unit, -1, give, NULL) == FSDP_ERR_INVALID);
    rank_check(fsdp_unit_broadcast_from(x.unit, x.size) == FSDP_ERR_INVALID);
    /* Windows are used between: a pass after it goes as ever. */
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    rank_check(fsdp_unit_fill_from(x.unit, 0, give, NULL) == FSDP_ERR_STATE && fsdp_unit_broadcast_from(x.unit, 0) == FSDP_ERR_STATE);
    FSDP_TRY(fsdp_unit_begin_forward(x.unit, pass));
    FSDP_TRY(fsdp_unit_end_forward(x.unit, pass));
    FSDP_TRY(fsdp_unit_begin_backward(x.unit, pass));
    FSDP_TRY(fsdp_unit_end_backward(x.unit, pass));
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(fsdp_unit_fill_from(x.unit, x.size - 1, give, &(source){ .from = 3 }));
    FSDP_TRY(expect(&x, 3));
    take_down(&x);
    return FSDP_OK;
}

static void test_from_each_rank(void **state)
{
    (void)state;
    in_corners(from_each_rank, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 4, 0 } });
}

/* Ranks that name different ones are told. */
static fsdp_status from_different_ranks(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(set_up(&x, comm, arg));
    rank_check(fsdp_unit_fill_from(x.unit, x.rank, give, &(source){ .from = 3 }) == FSDP_ERR_COMM);
    rank_check(strstr(fsdp_last_error_message(), "values from one rank of \"u\"") != NULL);
    FSDP_TRY(fsdp_comm_reset(comm));
    FSDP_TRY(fsdp_unit_fill_from(x.unit, 0, give, &(source){ .from = 3 }));
    FSDP_TRY(expect(&x, 3));
    take_down(&x);
    return FSDP_OK;
}

static void test_from_different_ranks(void **state)
{
    (void)state;
    in_corners(from_different_ranks, &(corners){ .all_modes = true, .ranks = (const int[]){ 2, 3, 0 }, .threads_only = SANITIZED });
}

/* ---- replicas ---- */

static fsdp_status patchwork(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(set_up(&x, comm, arg));
    for (int times = 0; times < 2; times++) { /* it is said once */
        FSDP_TRY(fsdp_unit_fill(x.unit, give, &(source){ .from = 7 }));
        FSDP_TRY(fsdp_unit_fill(x.unit, give, &(source){ .from = (float)(1000 * x.rank) }));
        FSDP_TRY(fsdp_unit_check_replicas(x.unit)); /* whatever was given: they hold the same */
    }
    float got[NUMEL], *all = calloc((size_t)x.size * NUMEL, sizeof(float));
    FSDP_TRY(read_all(x.unit, got));
    FSDP_TRY(fsdp_comm_all_gather(comm, got, sizeof(got), all));
    for (int r = 0; r < x.size; r++) rank_check(memcmp(all + r * NUMEL, got, sizeof(got)) == 0);
    free(all);
    take_down(&x);
    return FSDP_OK;
}

static void said_once(const corner *c)
{
    logged *l = c->arg;
    /* A callback of a sharded unit is asked for its own elements alone: nobody can know what others would have said. */
    bool differs = c->mode == FSDP_MODE_NONE && c->ranks > 1;
    if (l->lines != differs || l->warnings != differs) fail_msg("%s: %d lines, %d warnings: %s", corner_name(c), l->lines, l->warnings, l->text[0]);
    if (differs && (!was_logged(l, "unit \"u\"") || !was_logged(l, "parameter \"w\": element 0 is 0 on rank 0 and 1000 on rank 1 (and 2 more parameters differ)")))
        fail_msg("%s: %s", corner_name(c), l->text[0]);
    memset(l, 0, sizeof(*l));
}

static void test_replicas_that_are_given_different_values(void **state)
{
    (void)state;
    logged *l = shared_alloc(sizeof(*l));
    fsdp_log_set(FSDP_LOG_INFO, keep_log, l);
    in_corners(patchwork, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 3, 0 }, .arg = l, .after = said_once });
    fsdp_log_set(FSDP_LOG_INFO, NULL, NULL);
    shared_free(l, sizeof(*l));
}

typedef struct poke_args {
    float *at, value;
} poke_args;

static fsdp_status k_poke(const fsdp_kernel *k, const void *args)
{
    const poke_args *a = args;
    *(float *)fsdp_kernel_ptr(k, a->at) = a->value;
    return FSDP_OK;
}

/* An optimizer of one's own that forgets that all ranks must do the same. */
static fsdp_status diverge(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(set_up(&x, comm, arg));
    FSDP_TRY(fsdp_unit_fill(x.unit, give, &(source){ .from = 7 }));
    FSDP_TRY(fsdp_unit_check_replicas(x.unit));
    FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ &x.unit, 1 }));
    const fsdp_slice *s;
    int n;
    fsdp_unit_slices(x.unit, &s, &n);
    for (int i = 0; i < n && x.rank == x.size - 1; i++) {
        if (s[i].param != 1) continue;
        int64_t at = 21 - s[i].offset;
        if (at >= 0 && at < s[i].numel) FSDP_TRY(fsdp_stream_launch(fsdp_unit_storage_stream(x.unit), k_poke, &(poke_args){ s[i].master + at, -1 }, sizeof(poke_args)));
    }
    rank_check(fsdp_unit_check_replicas(x.unit) == FSDP_ERR_STATE);
    FSDP_TRY(fsdp_step_end((fsdp_unit_list){ &x.unit, 1 }));
    fsdp_status st = fsdp_unit_check_replicas(x.unit);
    if (fsdpi_unit_has_replicas(x.unit)) {
        char want[128];
        int first = x.mode == FSDP_MODE_NONE ? 0 : 1; /* of those that keep it */
        snprintf(want, sizeof(want), "parameter \"b\": element 21 is 128 on rank %d and -1 on rank %d: ", first, x.size - 1);
        if (st != FSDP_ERR_INVALID || strstr(fsdp_last_error_message(), want) == NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "not told: %s", fsdp_last_error_message());
        rank_check(x.size != 4 || x.mode == FSDP_MODE_NONE || fsdp_unit_shards(x.unit) == 2);
        FSDP_TRY(fsdp_unit_broadcast_from(x.unit, x.size - 1));
        FSDP_TRY(fsdp_unit_check_replicas(x.unit));
        float got[NUMEL];
        FSDP_TRY(read_all(x.unit, got));
        rank_check(got[35 + 21] == -1 && got[35 + 20] == value(7, 1, 20));
        FSDP_TRY(fsdp_unit_fill(x.unit, give, &(source){ .from = 7 }));
    } else {
        rank_check(st == FSDP_OK);
        FSDP_TRY(fsdp_unit_broadcast_from(x.unit, 0)); /* there is nothing to mend */
    }
    FSDP_TRY(fsdp_unit_fill(x.unit, give, &(source){ .from = 8 }));
    FSDP_TRY(expect(&x, 8));
    take_down(&x);
    return FSDP_OK;
}

static void test_replicas_that_part(void **state)
{
    (void)state;
    in_corners(diverge, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 4, 5, 0 } });
}

/* ---- never set ---- */

static fsdp_status use(const site *x, fsdp_pass_kind kind)
{
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, x->comm, kind));
    FSDP_TRY(fsdp_unit_begin_forward(x->unit, pass));
    FSDP_TRY(fsdp_unit_end_forward(x->unit, pass));
    return fsdp_pass_end(pass);
}

static fsdp_status never_set(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(set_up(&x, comm, arg));
    const char *first = NULL;
    logged *l = ((const corner *)arg)->arg;
    rank_check(fsdp_unit_never_set(x.unit, &first) == PARAMS && strcmp(first, "w") == 0);
    FSDP_TRY(use(&x, FSDP_PASS_EVAL));
    FSDP_TRY(fsdp_comm_barrier(comm));
    rank_check(l->lines == 0);
    FSDP_TRY(fsdp_comm_barrier(comm));
    for (int i = 0; i < 3; i++) FSDP_TRY(use(&x, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_comm_barrier(comm));
    rank_check(l->lines == 1 && l->warnings == 1 && was_logged(l, "unit \"u\" is trained, but 4 of its 4 parameters never had values, \"w\" first: they are 0"));
    bool some[PARAMS] = { true, false, true, true };
    FSDP_TRY(fsdpi_unit_fill(x.unit, give, &(source){ 0 }, some));
    rank_check(fsdp_unit_never_set(x.unit, &first) == 1 && strcmp(first, "b") == 0);
    FSDP_TRY(fsdp_unit_summon_begin(x.unit, NULL)); /* to look at them gives no values */
    FSDP_TRY(fsdp_unit_summon_end(x.unit));
    rank_check(fsdp_unit_never_set(x.unit, NULL) == 1);
    FSDP_TRY(fsdp_unit_summon_begin(x.unit, &(fsdp_unit_summon_opts){ .writeback = true }));
    FSDP_TRY(fsdp_unit_summon_cancel(x.unit));
    rank_check(fsdp_unit_never_set(x.unit, NULL) == 1);
    FSDP_TRY(fsdp_unit_summon_begin(x.unit, &(fsdp_unit_summon_opts){ .writeback = true }));
    FSDP_TRY(fsdp_unit_summon_end(x.unit));
    rank_check(fsdp_unit_never_set(x.unit, NULL) == 0);
    take_down(&x);
    return FSDP_OK;
}

static void forget(const corner *c)
{
    memset(c->arg, 0, sizeof(logged));
}

static void test_never_set(void **state)
{
    (void)state;
    logged *l = shared_alloc(sizeof(*l));
    fsdp_log_set(FSDP_LOG_INFO, keep_log, l);
    in_corners(never_set, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 }, .arg = l, .after = forget });
    fsdp_log_set(FSDP_LOG_INFO, NULL, NULL);
    shared_free(l, sizeof(*l));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_from_each_rank),
        cmocka_unit_test(test_from_different_ranks),
        cmocka_unit_test(test_replicas_that_are_given_different_values),
        cmocka_unit_test(test_replicas_that_part),
        cmocka_unit_test(test_never_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
