/* SPDX-License-Identifier: MIT
 *
 * Hybrid units: a mesh of R replicas x S shards. Every element is kept by R ranks, one of each replica, and reduced by one;
 * replicas have the same bits whatever ranks wrote; no other mesh is taken. That the training has the bits of one rank is
 * in matrix_test. */
#include "support/mini.h"
#include "support/ranks.h"

#include "shard/unit.h"

#include <stdlib.h>

static const fsdp_param params[] = { { "w", 2, { 7, 9 } }, { "s", 0, { 0 } }, { "e", 1, { 0 } }, { "b", 1, { 41 } } };
enum { PARAMS = 4, W = 63, B = 41, NUMEL = 105 };

typedef struct site {
    fsdp_device *dev;
    fsdp_unit *u;
} site;

static fsdp_status open_site(site *x, fsdp_comm *comm, const corner *c, int shards)
{
    *x = (site){ 0 };
    FSDP_TRY(fsdp_device_open(&x->dev, c->device));
    return fsdp_unit_create(&x->u, comm, params, PARAMS, &(fsdp_unit_opts){ .name = "u", .mode = c->mode, .shards = shards, .compute_device = x->dev });
}

static void close_site(site *x)
{
    fsdp_unit_destroy(x->u);
    fsdp_device_close(x->dev);
}

/* fn for every mesh there is of these ranks. */
static fsdp_status in_meshes(fsdp_comm *comm, const corner *c, fsdp_status (*fn)(fsdp_comm *comm, const corner *c, site *x, int replicas, int shards))
{
    int size = fsdp_comm_size(comm);
    for (int s = 1; s <= size; s++) {
        if (size % s != 0 || (c->mode == FSDP_MODE_NONE && s > 1)) continue;
        site x;
        FSDP_TRY(open_site(&x, comm, c, s));
        FSDP_TRY(fn(comm, c, &x, size / s, s));
        close_site(&x);
    }
    return FSDP_OK;
}

static int64_t param_at(int i)
{
    static const int64_t at[] = { 0, W, W + 1, W + 1 };
    return at[i];
}

static fsdp_status who_keeps(fsdp_comm *comm, const corner *c, site *x, int replicas, int shards)
{
    (void)c;
    double kept[NUMEL] = { 0 }, first[NUMEL] = { 0 }, reduced[NUMEL] = { 0 };
    const fsdp_slice *s;
    int n, size = fsdp_comm_size(comm);
    rank_check(fsdp_unit_shards(x->u) == shards && fsdp_unit_replica(x->u) == fsdp_comm_rank(comm) / shards);
    fsdp_unit_slices(x->u, &s, &n);
    int64_t sum = 0;
    for (int i = 0; i < n; i++)
        for (int64_t e = 0; e < s[i].numel; e++, sum++) {
            kept[param_at(s[i].param) + s[i].offset + e] = 1;
            first[param_at(s[i].param) + s[i].offset + e] = fsdp_unit_replica(x->u) == 0;
        }
    rank_check(sum <= fsdp_unit_slice_numel(x->u));
    for (int i = 0; i < x->u->own_count; i++)
        for (int64_t e = 0; e < x->u->own[i].numel; e++) {
            int64_t at = param_at(x->u->own[i].param) + x->u->own[i].offset + e;
            rank_check(kept[at] == 1); /* what it reduces is a part of what it keeps */
            reduced[at] = 1;
        }
    FSDP_TRY(fsdp_comm_sum_exact(comm, kept, NUMEL));
    FSDP_TRY(fsdp_comm_sum_exact(comm, first, NUMEL));
    FSDP_TRY(fsdp_comm_sum_exact(comm, reduced, NUMEL));
    for (int i = 0; i < NUMEL; i++) rank_check(kept[i] == replicas && first[i] == 1 && reduced[i] == 1);
    rank_check(replicas * shards == size);
    return FSDP_OK;
}

static fsdp_status keepers(fsdp_comm *comm, void *arg)
{
    return in_meshes(comm, arg, who_keeps);
}

static void test_every_element_is_kept_by_each_replica(void **state)
{
    (void)state;
    in_corners(keepers, &(corners){ .ranks = (const int[]){ 1, 2, 6, 0 }, .all_modes = true, .transport = "shm" });
}

/* ---- values that differ ---- */

static void by_rank(const char *name, int64_t i, float *value, void *arg)
{
    *value = (float)(*(int *)arg * 1000 + (name[0] == 'w' ? 0 : name[0] == 's' ? W : W + 1) + i);
}

/* Whole values: some rank's in each element, and the same on all ranks. Then of the masters of all replicas. */
static fsdp_status same_everywhere(fsdp_comm *comm, site *x)
{
    int size = fsdp_comm_size(comm);
    float mine[NUMEL], *all = calloc((size_t)size * NUMEL, sizeof(float));
    for (int i = 0; i < PARAMS; i++) FSDP_TRY(fsdp_unit_read_param(x->u, i, mine + param_at(i)));
    FSDP_TRY(fsdp_comm_all_gather(comm, mine, sizeof(mine), all));
    for (int r = 0; r < size; r++) rank_check(memcmp(all + (size_t)r * NUMEL, mine, sizeof(mine)) == 0);
    for (int i = 0; i < NUMEL; i++) rank_check((int)mine[i] % 1000 == i && (int)mine[i] / 1000 < size);
    const fsdp_slice *s;
    int n;
    fsdp_unit_slices(x->u, &s, &n);
    for (int i = 0; i < n; i++) {
        float host[W];
        FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(x->u), host, s[i].master, (size_t)s[i].numel * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(x->u)));
        rank_check(memcmp(host, mine + param_at(s[i].param) + s[i].offset, (size_t)s[i].numel * sizeof(float)) == 0);
    }
    free(all);
    return FSDP_OK;
}

static fsdp_status write_by_rank(fsdp_comm *comm, const corner *c, site *x, int replicas, int shards)
{
    (void)c;
    (void)replicas;
    (void)shards;
    int rank = fsdp_comm_rank(comm);
    FSDP_TRY(fsdp_unit_init(x->u, by_rank, &rank));
    FSDP_TRY(same_everywhere(comm, x));
    FSDP_TRY(fsdp_comm_reset(comm));
    FSDP_TRY(same_everywhere(comm, x));
    FSDP_TRY(fsdp_unit_summon_begin(x->u, &(fsdp_unit_summon_opts){ .writeback = true }));
    for (int i = 0; i < PARAMS; i++) {
        float host[W];
        int64_t numel = fsdp_unit_param_numel(x->u, i);
        for (int64_t e = 0; e < numel; e++) by_rank(params[i].name, e, &host[e], &(int){ fsdp_comm_size(comm) - 1 - rank });
        FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(x->u), fsdp_unit_summoned(x->u, i), host, (size_t)numel * sizeof(float)));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(x->u)));
    }
    FSDP_TRY(fsdp_unit_summon_end(x->u));
    return same_everywhere(comm, x);
}

static fsdp_status values(fsdp_comm *comm, void *arg)
{
    return in_meshes(comm, arg, write_by_rank);
}

static void test_replicas_are_the_same_whatever_ranks_write(void **state)
{
    (void)state;
    in_corners(values, &(corners){ .ranks = (const int[]){ 2, 4, 6, 0 }, .all_modes = true });
}

/* ---- a reset between passes ---- */

static fsdp_status live(fsdp_comm *comm, const corner *c, bool resets, float *out)
{
    mini m;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .shards = c->mode == FSDP_MODE_NONE ? 0 : size / 2, .device = c->device }));
    for (int step = 0; step < 2; step++) {
        FSDP_TRY(mini_leaf(&m, MINI_NESTED, step * 2 * size + rank));
        if (resets) FSDP_TRY(fsdp_comm_reset(comm));
        FSDP_TRY(mini_leaf(&m, MINI_NESTED, (step * 2 + 1) * size + rank));
        FSDP_TRY(fsdp_optim_step(m.optim, NULL));
        if (resets) FSDP_TRY(fsdp_comm_reset(comm));
    }
    FSDP_TRY(mini_read(&m, out));
    mini_destroy(&m);
    return FSDP_OK;
}

static fsdp_status resets(fsdp_comm *comm, void *arg)
{
    size_t bytes = (size_t)mini_numel() * sizeof(float);
    float *a = malloc(bytes), *b = malloc(bytes);
    fsdp_status st = live(comm, arg, false, a);
    if (st == FSDP_OK) st = live(comm, arg, true, b);
    bool same = st == FSDP_OK && memcmp(a, b, bytes) == 0;
    free(a);
    free(b);
    FSDP_TRY(st);
    rank_check(same);
    return FSDP_OK;
}

static void test_a_reset_keeps_replicas(void **state)
{
    (void)state;
    in_corners(resets, &(corners){ .ranks = (const int[]){ 2, 4, 0 }, .all_modes = true });
}

/* ---- parameters that stay with neighbours from forward to backward ---- */

static fsdp_status stays_near(fsdp_comm *comm, const corner *c, int group, fsdp_dtype dtype, float *out)
{
    mini m;
    fsdp_comm_stats before, after;
    int size = fsdp_comm_size(comm);
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .reshard_group = group, .device = c->device, .param_dtype = dtype, .prefetch = -1 }));
    for (int64_t step = 0; step < 3; step++) {
        fsdp_comm_get_stats(comm, &before);
        FSDP_TRY(mini_step(&m, MINI_NESTED, step, 12));
        fsdp_comm_get_stats(comm, &after);
        /* The root stays whole. Of the five others each backward gathers near; so does each forward but the first of a step. */
        int passes = 12 / size, near = 5 * (2 * passes - 1);
        bool in_place = strcmp(c->transport, "shm") == 0 && dtype == FSDP_F32;
        rank_check(after.near_gathers - before.near_gathers == (uint64_t)(group > 0 && !in_place ? near : 0));
        rank_check(after.gathers - before.gathers == (uint64_t)(11 * passes));
        if (step == 1) FSDP_TRY(fsdp_comm_reset(comm));
    }
    FSDP_TRY(mini_read(&m, out));
    mini_destroy(&m);
    return FSDP_OK;
}

static fsdp_status near_groups(fsdp_comm *comm, void *arg)
{
    size_t bytes = (size_t)mini_numel() * sizeof(float);
    float *want = malloc(bytes), *got = malloc(bytes);
    int size = fsdp_comm_size(comm);
    bool same = true;
    fsdp_status st = FSDP_OK;
    for (int t = 0; t < 2 && st == FSDP_OK; t++) {
        fsdp_dtype dtype = t ? FSDP_BF16 : FSDP_F32;
        st = stays_near(comm, arg, 0, dtype, want);
        for (int g = 1; g <= size && st == FSDP_OK; g++) {
            if (size % g != 0) continue;
            st = stays_near(comm, arg, g, dtype, got);
            same = same && st == FSDP_OK && memcmp(want, got, bytes) == 0;
        }
    }
    free(want);
    free(got);
    FSDP_TRY(st);
    rank_check(same);
    return FSDP_OK;
}

static void test_parameters_stay_near_between_forward_and_backward(void **state)
{
    (void)state;
    in_corners(near_groups, &(corners){ .ranks = (const int[]){ 2, 4, 0 } });
}

/* ---- a rank that keeps nothing ---- */

/* 20 elements in two pieces of four: the second shard has nothing, and takes part in all that the others do. */
static fsdp_status keeps_nothing(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    fsdp_unit *u;
    fsdp_optim *o;
    fsdp_pass *pass;
    float g[20];
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(fsdp_unit_create(&u, comm, &(fsdp_param){ "w", 1, { 20 } }, 1, &(fsdp_unit_opts){ .name = "small", .mode = c->mode, .shards = 2, .compute_device = dev }));
    FSDP_TRY(fsdp_optim_create_adamw(&o, (fsdp_unit_list){ &u, 1 }, &(fsdp_adamw_opts){ .lr = 1e-2f }));
    for (int step = 0; step < 2; step++) {
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(fsdp_unit_begin_forward(u, pass));
        FSDP_TRY(fsdp_unit_end_forward(u, pass));
        FSDP_TRY(fsdp_unit_begin_backward(u, pass));
        FSDP_TRY(fsdp_unit_end_backward(u, pass)); /* of zeros */
        FSDP_TRY(fsdp_pass_end(pass));
        if (step == 1) FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ &u, 1 }));
        if (step == 1) FSDP_TRY(fsdp_unit_read_grad(u, 0, g));
        FSDP_TRY(step == 1 ? fsdp_step_end((fsdp_unit_list){ &u, 1 }) : fsdp_optim_step(o, NULL));
        rank_check(fsdp_optim_param_steps(o, u, 0) == 1);
    }
    for (int i = 0; i < 20; i++) rank_check(g[i] == 0);
    fsdp_optim_destroy(o);
    fsdp_unit_destroy(u);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_a_rank_that_keeps_nothing(void **state)
{
    (void)state;
    for (int m = FSDP_MODE_FULL; m < FSDP_MODE_NONE; m++)
        for (int k = 0; k < 4; k++) {
            corner c = { .transport = k % 2 ? "copy" : "shm", .device = k / 2 ? "guard" : "cpu", .mode = (fsdp_mode)m, .ranks = 4, .threads = true };
            assert_ok(in_corner(keeps_nothing, &c));
        }
}

/* ---- no such mesh ---- */

static fsdp_status refused(fsdp_comm *comm, void *arg)
{
    (void)arg;
    static const struct {
        fsdp_mode mode;
        int shards;
        const char *message;
        int group;
    } bad[] = {
        { FSDP_MODE_FULL, 2, "reshard_group is 3: it must divide the 2 shards", 3 },
        { FSDP_MODE_GRAD_OP, 0, "mode grad-op does not reshard after forward", 2 },
        { FSDP_MODE_FULL, 4, "6 ranks are no mesh of replicas x 4 shards: 1 x 4 = 4; shards must divide 6", 0 },
        { FSDP_MODE_OPTIMIZER, 7, "6 ranks are no mesh of replicas x 7 shards: 0 x 7 = 0", 0 },
        { FSDP_MODE_FULL, -1, "shards must divide 6", 0 },
        { FSDP_MODE_NONE, 2, "mode none shards nothing, but fsdp_unit_opts.shards is 2", 0 },
    };
    fsdp_unit *u = NULL;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        rank_check(fsdp_unit_create(&u, comm, params, PARAMS, &(fsdp_unit_opts){ .name = "u", .mode = bad[i].mode, .shards = bad[i].shards, .reshard_group = bad[i].group }) == FSDP_ERR_INVALID);
        if (strstr(fsdp_last_error_message(), bad[i].message) == NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "case %zu says: %s", i, fsdp_last_error_message());
        rank_check(u == NULL);
    }
    int shards = fsdp_comm_rank(comm) == 4 ? 2 : 3;
    rank_check(fsdp_unit_create(&u, comm, params, PARAMS, &(fsdp_unit_opts){ .name = "u", .shards = shards }) == FSDP_ERR_INVALID && u == NULL);
    rank_check(strstr(fsdp_last_error_message(), "3 shards on rank 0 and 2 on rank 4") != NULL);
    return FSDP_OK;
}

static void test_what_is_no_mesh(void **state)
{
    (void)state;
    in_corners(refused, &(corners){ .ranks = (const int[]){ 6, 0 }, .transport = "shm", .device = "cpu" });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_element_is_kept_by_each_replica),
        cmocka_unit_test(test_replicas_are_the_same_whatever_ranks_write),
        cmocka_unit_test(test_a_reset_keeps_replicas),
        cmocka_unit_test(test_parameters_stay_near_between_forward_and_backward),
        cmocka_unit_test(test_a_rank_that_keeps_nothing),
        cmocka_unit_test(test_what_is_no_mesh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
