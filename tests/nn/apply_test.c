/* SPDX-License-Identifier: MIT
 *
 * Ways to begin, as a model's author has them: a function over all parameters on their original shapes gives what the module that
 * is not wrapped gets, with one unit whole at a time; one that fails on one rank changes nothing; values before wrapping, or
 * rank 0's alone; seeds of each rank's own, said once; and what never had values is named. */
#include "support/logged.h"
#include "support/ranks.h"

#include "base/error.h"
#include "nn/module.h"
#include "shard/unit.h"

enum { A = 7, B = 5, C = 3, NUMEL = B * A + B + B + B + C * B + C + 13 * 2, PARAMS = 7, MOST = 35 };

static fsdp_status build(fsdp_module **out)
{
    fsdp_module *m[4];
    FSDP_TRY(fsdp_linear(&m[0], A, B, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_layer_norm(&m[1], B, 0));
    FSDP_TRY(fsdp_linear(&m[2], B, C, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_embedding(&m[3], 13, 2));
    return fsdp_sequential(out, m, 4);
}

typedef struct site {
    fsdp_comm *comm;
    fsdp_device *dev;
    fsdp_module *m;
    int rank, size;
    fsdp_mode mode;
} site;

static fsdp_status wrap_it(const site *x, fsdp_module **m, bool from_rank0)
{
    return fsdp_wrap(m, *m, &(fsdp_wrap_opts){ .comm = x->comm, .name = "u", .mode = x->mode, .compute_device = x->dev, .from_rank0 = from_rank0 });
}

/* wrapping 0: none; 1: one unit; 2: a layer in the middle, and one around it; 3: each, and one around; 4: the middle alone */
static fsdp_status wrap_as(site *x, int wrapping)
{
    fsdp_module *same;
    for (int i = 0; i < 4; i++) {
        bool alone = wrapping == 3 || (i == 1 && (wrapping == 2 || wrapping == 4));
        same = fsdp_module_child(x->m, i);
        if (alone) FSDP_TRY(wrap_it(x, &same, false));
    }
    return wrapping == 0 || wrapping == 4 ? FSDP_OK : wrap_it(x, &x->m, false);
}

static fsdp_status set_up(site *x, fsdp_comm *comm, const corner *c, int wrapping)
{
    *x = (site){ .comm = comm, .rank = fsdp_comm_rank(comm), .size = fsdp_comm_size(comm), .mode = c->mode };
    FSDP_TRY(fsdp_device_open(&x->dev, c->device));
    FSDP_TRY(build(&x->m));
    return wrap_as(x, wrapping);
}

static void take_down(site *x)
{
    fsdp_module_destroy(x->m);
    fsdp_device_close(x->dev);
}

static fsdp_status read_all(const site *x, float *out)
{
    const fsdp_module_param_info *info;
    int n;
    FSDP_TRY(fsdp_module_params(x->m, &info, &n));
    rank_check(n == PARAMS);
    for (int i = 0; i < n; i++) {
        int64_t numel = 1;
        fsdp_summoned_param p;
        if (info[i].unit != NULL) {
            numel = fsdp_unit_param_numel(info[i].unit, info[i].index);
            FSDP_TRY(fsdp_module_read_param(x->m, i, out));
        } else {
            for (int d = 0; d < info[i].param.ndim; d++) numel *= info[i].param.shape[d];
            FSDP_TRY(fsdp_module_summoned(x->m, i, &p)); /* is what it is */
            memcpy(out, p.value, (size_t)numel * sizeof(float));
        }
        out += numel;
    }
    return FSDP_OK;
}

/* ---- apply ---- */

typedef struct author {
    fsdp_rng rng;
    fsdp_module *m;
    int calls, fail_at;
    float by;
} author;

static int whole_units(fsdp_module *m)
{
    int n = 0;
    fsdp_unit_list l = fsdp_module_units(m);
    for (int i = 0; i < l.count; i++) n += l.units[i]->residency == FSDPI_WHOLE;
    return n;
}

/* Draws matrices, and adds to the rest: so the old value and the order of calls both matter. */
static fsdp_status init_weights(const char *name, const fsdp_param *param, float *value, void *arg)
{
    static const char *const names[] = { "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight" };
    static const int64_t rows[] = { B, B, B, B, C, C, 13 };
    author *a = arg;
    rank_check(a->calls < PARAMS && strcmp(name, names[a->calls]) == 0 && strcmp(param->name, name) == 0 && param->shape[0] == rows[a->calls]);
    rank_check(a->m == NULL || whole_units(a->m) <= 1);
    int64_t n = param->ndim == 2 ? param->shape[0] * param->shape[1] : param->shape[0];
    for (int64_t i = 0; i < n; i++) value[i] = param->ndim == 2 ? fsdp_rng_normal(&a->rng) : value[i] + a->by + (float)i;
    a->calls++;
    if (a->calls == a->fail_at) FSDP_FAIL(FSDP_ERR_NONFINITE, "no such distribution");
    return FSDP_OK;
}

static fsdp_status apply_twice(site *x, uint64_t seed, float by)
{
    for (int times = 0; times < 2; times++) { /* the second sees what the first did */
        author a = { .m = x->m, .by = by };
        fsdp_rng_init(&a.rng, seed);
        FSDP_TRY(fsdp_module_apply(x->m, init_weights, &a));
        rank_check(a.calls == PARAMS);
    }
    return FSDP_OK;
}

static fsdp_status applied(fsdp_comm *comm, void *arg)
{
    site x;
    float want[NUMEL], got[NUMEL];
    const corner *c = arg;
    for (int wrapping = 0; wrapping < 5; wrapping++) {
        FSDP_TRY(set_up(&x, comm, c, wrapping));
        FSDP_TRY(apply_twice(&x, 5, 0.5f));
        FSDP_TRY(read_all(&x, wrapping == 0 ? want : got));
        rank_check(wrapping == 0 || memcmp(want, got, sizeof(want)) == 0);
        FSDP_TRY(fsdp_module_check_set(x.m));
        FSDP_TRY(fsdp_module_check_replicas(x.m));
        size_t live = 0;
        if (wrapping == 1) {
            fsdp_unit *u = fsdp_module_units(x.m).units[0];
            live = fsdpi_arena_get_stats(u->ctx->arena).bytes_live;
        }
        /* It fails on one rank, at each parameter: nothing is changed anywhere. */
        for (int bad = 1; bad <= PARAMS && wrapping > 0; bad += wrapping) {
            int who = bad % x.size;
            author a = { .m = x.m, .by = 9, .fail_at = x.rank == who ? bad : 0 };
            fsdp_rng_init(&a.rng, 77);
            fsdp_status st = fsdp_module_apply(x.m, init_weights, &a);
            char text[64];
            snprintf(text, sizeof(text), "rank %d: no such distribution", who);
            rank_check(st == FSDP_ERR_NONFINITE && strstr(fsdp_last_error_message(), x.size > 1 ? text : "no such distribution") != NULL);
            FSDP_TRY(read_all(&x, got));
            rank_check(memcmp(want, got, sizeof(want)) == 0 && whole_units(x.m) == 0);
        }
        if (wrapping == 1) rank_check(fsdpi_arena_get_stats(fsdp_module_units(x.m).units[0]->ctx->arena).bytes_live == live);
        rank_check(fsdp_module_apply(x.m, NULL, NULL) == FSDP_ERR_INVALID);
        if (wrapping > 0) { /* not within a summon, nor in a pass */
            author none = { 0 };
            FSDP_TRY(fsdp_summon_begin(x.m, &(fsdp_summon_opts){ .recurse = true }));
            rank_check(fsdp_module_apply(x.m, init_weights, &none) == FSDP_ERR_STATE && none.calls == 0);
            FSDP_TRY(fsdp_summon_end(x.m));
            fsdp_pass *pass;
            FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
            rank_check(fsdp_module_apply(x.m, init_weights, &none) == FSDP_ERR_STATE && none.calls == 0);
            FSDP_TRY(fsdp_pass_end(pass));
        }
        take_down(&x);
    }
    return FSDP_OK;
}

static void test_apply(void **state)
{
    (void)state;
    in_corners(applied, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

/* A part of a unit: the rest stays. */
static fsdp_status twice_as_much(const char *name, const fsdp_param *param, float *value, void *arg)
{
    (void)name;
    (void)arg;
    int64_t n = param->ndim == 2 ? param->shape[0] * param->shape[1] : param->shape[0];
    for (int64_t i = 0; i < n; i++) value[i] *= 2;
    return FSDP_OK;
}

static fsdp_status part(fsdp_comm *comm, void *arg)
{
    site x;
    float was[NUMEL], is[NUMEL];
    FSDP_TRY(set_up(&x, comm, arg, 1));
    FSDP_TRY(fsdp_module_init_keyed(x.m, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(read_all(&x, was));
    FSDP_TRY(fsdp_module_apply(fsdp_module_child(x.m, 2), twice_as_much, NULL));
    FSDP_TRY(read_all(&x, is));
    for (int i = 0; i < NUMEL; i++) rank_check(is[i] == (i >= 50 && i < 50 + C * B + C ? 2 * was[i] : was[i]));
    take_down(&x);
    return FSDP_OK;
}

static void test_apply_to_a_part(void **state)
{
    (void)state;
    in_corners(part, &(corners){ .all_modes = true, .ranks = (const int[]){ 2, 0 }, .threads_only = true });
}

/* ---- a seed of each rank's own ---- */

enum way { WAY_APPLY, WAY_SUMMON, WAY_BEFORE, WAY_KEYED, WAYS };

static fsdp_status by_rank(site *x, enum way way)
{
    uint64_t seed = 100 + (uint64_t)x->rank;
    fsdp_rng rng;
    fsdp_rng_init(&rng, seed);
    if (way == WAY_APPLY) return apply_twice(x, seed, 0.5f);
    if (way == WAY_KEYED) return fsdp_module_init_keyed(x->m, FSDP_INIT_KAIMING, seed);
    if (way == WAY_SUMMON) FSDP_TRY(fsdp_summon_begin(x->m, &(fsdp_summon_opts){ .recurse = true, .writeback = true }));
    FSDP_TRY(fsdp_module_init(x->m, FSDP_INIT_KAIMING, &rng));
    return way == WAY_SUMMON ? fsdp_summon_end(x->m) : FSDP_OK;
}

typedef struct seeds {
    logged log;
    enum way way;
    float got[NUMEL];
} seeds;

static fsdp_status patchwork(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    seeds *s = c->arg;
    site x;
    FSDP_TRY(set_up(&x, comm, c, s->way == WAY_BEFORE ? 0 : 3));
    FSDP_TRY(by_rank(&x, s->way));
    if (s->way == WAY_BEFORE) FSDP_TRY(wrap_as(&x, 3));
    else FSDP_TRY(by_rank(&x, s->way)); /* it is said once */
    FSDP_TRY(fsdp_module_check_replicas(x.m));
    float got[NUMEL], *all = calloc((size_t)x.size * NUMEL, sizeof(float));
    FSDP_TRY(read_all(&x, got));
    FSDP_TRY(fsdp_comm_all_gather(comm, got, sizeof(got), all));
    for (int r = 0; r < x.size; r++) rank_check(memcmp(all + r * NUMEL, got, sizeof(got)) == 0);
    if (x.rank == 0) memcpy(s->got, got, sizeof(got));
    free(all);
    take_down(&x);
    return FSDP_OK;
}

static float first_got[NUMEL];

static void said(const corner *c)
{
    seeds *s = c->arg;
    bool none = c->mode == FSDP_MODE_NONE;
    int units = 5, more = s->way == WAY_KEYED; /* the seeds themselves are said, too */
    /* of sharded units once; of replicas each unit that differs, once: the norm and the unit without parameters do not */
    int want = c->ranks == 1 ? 0 : none ? units - 2 + more : 1;
    if (s->log.lines != want || s->log.warnings != (none && c->ranks > 1 ? units - 2 : 0))
        fail_msg("%s, way %d: %d lines, %d warnings: %s", corner_name(c), s->way, s->log.lines, s->log.warnings, s->log.text[0]);
    const char *text = s->way == WAY_KEYED ? "the seed is 100 on rank 0 and 101 on rank 1" : "parameter \"weight\": ";
    if (c->ranks > 1 && !was_logged(&s->log, text)) fail_msg("%s, way %d: %s", corner_name(c), s->way, s->log.text[0]);
    /* on the same ranks the same values, whatever the mode, transport and device */
    if (c->ranks == 3 && first_got[0] == 0) memcpy(first_got, s->got, sizeof(first_got));
    else if (c->ranks == 3 && memcmp(first_got, s->got, sizeof(first_got)) != 0) fail_msg("%s, way %d: other values", corner_name(c), s->way);
    s->log = (logged){ 0 };
}

static void test_a_seed_of_each_rank(void **state)
{
    (void)state;
    seeds *s = shared_alloc(sizeof(*s));
    fsdp_log_set(FSDP_LOG_INFO, keep_log, &s->log);
    for (int way = 0; way < WAYS; way++) {
        s->way = (enum way)way;
        memset(first_got, 0, sizeof(first_got));
        in_corners(patchwork, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 }, .arg = s, .after = said, .threads_only = SANITIZED || way == WAY_APPLY });
    }
    fsdp_log_set(FSDP_LOG_INFO, NULL, NULL);
    shared_free(s, sizeof(*s));
}

/* ---- rank 0's values ---- */

static fsdp_status rank_0(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    float want[NUMEL], got[NUMEL];
    fsdp_module *plain;
    FSDP_TRY(build(&plain));
    FSDP_TRY(fsdp_module_init_keyed(plain, FSDP_INIT_KAIMING, 3));
    site of = { .m = plain };
    FSDP_TRY(read_all(&of, want));
    fsdp_module_destroy(plain);
    for (int others = 0; others < 3; others++) { /* the other ranks have nothing, something else, all else */
        FSDP_TRY(set_up(&x, comm, c, 0));
        if (x.rank == 0) FSDP_TRY(fsdp_module_init_keyed(x.m, FSDP_INIT_KAIMING, 3));
        else if (others > 0) FSDP_TRY(fsdp_module_init_keyed(others == 1 ? fsdp_module_child(x.m, 2) : x.m, FSDP_INIT_KAIMING, 4));
        FSDP_TRY(wrap_it(&x, &x.m, true));
        FSDP_TRY(read_all(&x, got));
        rank_check(memcmp(want, got, sizeof(want)) == 0);
        FSDP_TRY(fsdp_module_check_set(x.m));
        FSDP_TRY(fsdp_module_check_replicas(x.m));
        take_down(&x);
    }
    /* some of it: the rest is named, on every rank */
    FSDP_TRY(set_up(&x, comm, c, 0));
    if (x.rank == 0) FSDP_TRY(fsdp_module_init_keyed(fsdp_module_child(x.m, 2), FSDP_INIT_KAIMING, 3));
    FSDP_TRY(wrap_it(&x, &x.m, true));
    rank_check(fsdp_module_check_set(x.m) == FSDP_ERR_STATE);
    rank_check(strstr(fsdp_last_error_message(), "5 parameters never had values: \"0.weight\", \"0.bias\", \"1.weight\", ...: ") != NULL);
    take_down(&x);
    /* rank 0 has none, and another rank's would be lost */
    FSDP_TRY(set_up(&x, comm, c, 0));
    if (x.rank == 1) FSDP_TRY(fsdp_module_init_keyed(x.m, FSDP_INIT_KAIMING, 3));
    fsdp_status st = wrap_it(&x, &x.m, true);
    rank_check(x.size == 1 ? st == FSDP_OK : st == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "initialise rank 0's") != NULL);
    take_down(&x);
    return FSDP_OK;
}

static void test_from_rank_0(void **state)
{
    (void)state;
    in_corners(rank_0, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

/* ---- deferred ---- */

static int in_memory(fsdp_module *m)
{
    int n = 0;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) {
            const fsdpi_parameter *p = fsdpi_module_own_param(fsdp_module_child(m, i), k);
            n += p != NULL && p->host != NULL;
        }
    return n;
}

static fsdp_status deferred(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(set_up(&x, comm, arg, 0));
    rank_check(in_memory(x.m) == 0); /* names and shapes alone */
    rank_check(fsdp_module_check_set(x.m) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "7 parameters never had values: \"0.weight\"") != NULL);
    FSDP_TRY(wrap_as(&x, 3));
    rank_check(in_memory(x.m) == 0);
    rank_check(fsdp_module_check_set(x.m) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "7 parameters") != NULL);
    FSDP_TRY(fsdp_module_init_keyed(fsdp_module_child(x.m, 0), FSDP_INIT_KAIMING, 1)); /* unit by unit */
    FSDP_TRY(fsdp_module_apply(fsdp_module_child(x.m, 1), twice_as_much, NULL));
    rank_check(fsdp_module_check_set(x.m) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "3 parameters never had values: \"2.weight\", \"2.bias\", \"3.weight\": ") != NULL);
    FSDP_TRY(fsdp_module_init_keyed(x.m, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(fsdp_module_check_set(x.m));
    float once[NUMEL], twice[NUMEL];
    FSDP_TRY(read_all(&x, once));
    FSDP_TRY(fsdp_module_init_keyed(x.m, FSDP_INIT_KAIMING, 1)); /* twice is once */
    FSDP_TRY(read_all(&x, twice));
    rank_check(memcmp(once, twice, sizeof(once)) == 0);
    take_down(&x);
    return FSDP_OK;
}

static void test_deferred(void **state)
{
    (void)state;
    in_corners(deferred, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 0 }, .threads_only = SANITIZED });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_apply),
        cmocka_unit_test(test_apply_to_a_part),
        cmocka_unit_test(test_a_seed_of_each_rank),
        cmocka_unit_test(test_from_rank_0),
        cmocka_unit_test(test_deferred),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
