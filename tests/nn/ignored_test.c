/* SPDX-License-Identifier: MIT
 *
 * Ignored parameters: each rank has its own, whole; they are never communicated, whatever is around them, and take part in summons,
 * initialisation and checkpoints. Ranks that ignore other parameters are told which.
 *
 * The network: 0 (linear, sharded) -> 1 (linear, its weight ignored) -> 2 (linear, sharded). */
#include "support/ranks.h"
#include "support/testing.h"

#include <fsdp/fsdp.h>
#include <fsdp/wrap.h>

#include <math.h>
#include <unistd.h>

enum { WIDTH = 5, ROWS = 3, WEIGHT = WIDTH * WIDTH };

typedef struct net {
    fsdp_comm *world;
    fsdp_device *device;
    fsdp_module *layer[3], *model;
    fsdp_unit *own; /* of the ignored weight */
} net;

static fsdp_status layers(net *n, const corner *c, fsdp_comm *world)
{
    *n = (net){ .world = world };
    FSDP_TRY(fsdp_device_open(&n->device, c->device));
    for (int i = 0; i < 3; i++) FSDP_TRY(fsdp_linear(&n->layer[i], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = i < 2 ? FSDP_ACT_GELU_TANH : FSDP_ACT_NONE }));
    return fsdp_sequential(&n->model, n->layer, 3);
}

static fsdp_status wrap(net *n, const corner *c, const fsdp_wrap_policy *policy)
{
    return fsdp_wrap(&n->model, n->model, &(fsdp_wrap_opts){ .comm = n->world, .mode = c->mode, .compute_device = n->device, .name = "net", .policy = policy, .keep_whole_below = 24 });
}

static fsdp_status find_own(net *n)
{
    const fsdp_module_param_info *p;
    int count, ignored = 0;
    FSDP_TRY(fsdp_module_params(n->model, &p, &count));
    for (int i = 0; i < count; i++) {
        rank_check(p[i].unit != NULL && p[i].ignored == (strcmp(p[i].name, "1.weight") == 0));
        if (!p[i].ignored) continue;
        ignored++;
        n->own = p[i].unit;
        rank_check(p[i].index == 0);
    }
    rank_check(ignored == 1 && fsdp_unit_mode(n->own) == FSDP_MODE_NONE && fsdp_comm_size(fsdp_unit_comm(n->own)) == 1);
    fsdp_unit_list units = fsdp_module_units(n->model);
    for (int i = 0; i < units.count; i++) rank_check(units.units[i] != n->own);
    return FSDP_OK;
}

static fsdp_status make(net *n, const corner *c, fsdp_comm *world)
{
    FSDP_TRY(layers(n, c, world));
    FSDP_TRY(fsdp_module_set_ignored(n->model, "1.weight", true));
    FSDP_TRY(wrap(n, c, NULL));
    FSDP_TRY(find_own(n));
    return fsdp_module_init_keyed(n->model, FSDP_INIT_KAIMING, 3);
}

static void destroy(net *n)
{
    fsdp_module_destroy(n->model);
    fsdp_device_close(n->device);
}

static fsdp_status micro_batch(net *n, int leaf, bool eval, double *sum)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *labels, *y, *loss;
    float in[ROWS * WIDTH];
    double count;
    fsdp_philox_normal_fill(4, "x", (int64_t)leaf * ROWS * WIDTH, ROWS * WIDTH, in);
    FSDP_TRY(fsdp_tape_begin_with(&tape, n->world, &(fsdp_tape_opts){ .device = n->device, .eval = eval }));
    FSDP_TRY(fsdp_tensor_from_f32(&x, tape, in, 2, (int64_t[]){ ROWS, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ leaf % WIDTH, (leaf + 1) % WIDTH, 2 }, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(n->model, tape, x, &y));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
    if (!eval) FSDP_TRY(fsdp_backward(tape, loss));
    if (sum != NULL) FSDP_TRY(fsdp_loss_read(loss, sum, &count));
    return fsdp_tape_end(tape);
}

/* ---- each rank's own ---- */

/* Frozen everywhere else, each rank trains its weight by itself: as a run of one rank on its leaves alone does. */
static fsdp_status alone(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n, one;
    fsdp_comm *self;
    float with[WEIGHT], without[WEIGHT], whole[2][WEIGHT];
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    FSDP_TRY(fsdp_comm_create_self(&self));
    FSDP_TRY(make(&n, c, world));
    FSDP_TRY(make(&one, c, self));
    net *both[2] = { &n, &one };
    for (int k = 0; k < 2; k++) {
        fsdp_optim *optim;
        fsdp_unit_list own = { &both[k]->own, 1 };
        FSDP_TRY(fsdp_unit_read_param(both[k]->own, 0, whole[0]));
        FSDP_TRY(fsdp_optim_create_adamw(&optim, own, &(fsdp_adamw_opts){ .lr = 0.1f }));
        for (int step = 0; step < 2; step++) {
            for (int i = 0; i < 2; i++) FSDP_TRY(micro_batch(both[k], rank + size * (2 * step + i), false, NULL));
            FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 0.01f }));
            FSDP_TRY(fsdp_step_begin(fsdp_module_units(both[k]->model))); /* the others' gradients are dropped */
            FSDP_TRY(fsdp_step_cancel(fsdp_module_units(both[k]->model)));
            for (int i = 0; i < fsdp_module_units(both[k]->model).count; i++) FSDP_TRY(fsdp_unit_zero_grad(fsdp_module_units(both[k]->model).units[i]));
        }
        FSDP_TRY(fsdp_unit_read_param(both[k]->own, 0, k == 0 ? with : without));
        rank_check(memcmp(k == 0 ? with : without, whole[0], sizeof(with)) != 0);
        fsdp_optim_destroy(optim);
    }
    rank_check(memcmp(with, without, sizeof(with)) == 0);
    /* Other leaves, other weights: nothing was averaged. */
    float *all = c->shared;
    memcpy(all + (size_t)rank * WEIGHT, with, sizeof(with));
    FSDP_TRY(fsdp_comm_barrier(world));
    for (int r = 0; r < size; r++) rank_check(r == rank || memcmp(all + (size_t)r * WEIGHT, with, sizeof(with)) != 0);
    destroy(&one);
    fsdp_comm_destroy(self);
    destroy(&n);
    return FSDP_OK;
}

static void test_each_rank_has_its_own(void **state)
{
    (void)state;
    in_corners(alone, &(corners){ .ranks = (const int[]){ 1, 2, 3, 0 }, .all_modes = !SANITIZED, .processes_only = CAN_FORK, .shared = 3 * WEIGHT * sizeof(float) });
}

/* One optimizer over all units, with the weight of all ranks: the ranks' own gradients add up to that of a run in which nothing is
 * ignored. */
static fsdp_status parts_of_a_sum(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n, plain;
    float *all = c->shared;
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world), slices;
    const fsdp_slice *s;
    FSDP_TRY(make(&n, c, world));
    FSDP_TRY(layers(&plain, c, world));
    FSDP_TRY(wrap(&plain, c, NULL));
    FSDP_TRY(fsdp_module_init_keyed(plain.model, FSDP_INIT_KAIMING, 3));
    fsdp_unit_list units = fsdp_module_units(n.model);
    fsdp_unit *list[8];
    for (int i = 0; i < units.count; i++) list[i] = units.units[i];
    list[units.count] = n.own;
    fsdp_unit_list with_own = { list, units.count + 1 };
    for (int leaf = rank; leaf < 6; leaf += size) {
        FSDP_TRY(micro_batch(&n, leaf, false, NULL));
        FSDP_TRY(micro_batch(&plain, leaf, false, NULL));
    }
    double norm, weight;
    FSDP_TRY(fsdp_step_begin(with_own));
    FSDP_TRY(fsdp_step_norm(with_own, &(fsdp_norm_opts){ .over = world }, &norm, &weight));
    rank_check(weight == 6 * ROWS && norm > 0); /* a micro-batch counts once, though it has two passes */
    FSDP_TRY(fsdp_step_norm((fsdp_unit_list){ &n.own, 1 }, NULL, &norm, &weight));
    rank_check(weight == 6.0 / size * ROWS);
    fsdp_unit_slices(n.own, &s, &slices);
    rank_check(slices == 1 && s[0].offset == 0 && s[0].numel == WEIGHT);
    FSDP_TRY(fsdp_stream_copy(fsdp_unit_storage_stream(n.own), all + (size_t)rank * WEIGHT, s[0].grad, WEIGHT * sizeof(float)));
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_storage_stream(n.own)));
    FSDP_TRY(fsdp_step_cancel(with_own));
    FSDP_TRY(fsdp_comm_barrier(world));
    FSDP_TRY(fsdp_summon_begin(plain.model, &(fsdp_summon_opts){ .recurse = true, .grads = true, .host = true }));
    const fsdp_module_param_info *p;
    int count;
    FSDP_TRY(fsdp_module_params(plain.model, &p, &count));
    for (int i = 0; i < count; i++) {
        fsdp_summoned_param got;
        if (strcmp(p[i].name, "1.weight") != 0) continue;
        FSDP_TRY(fsdp_module_summoned(plain.model, i, &got));
        for (int k = 0; k < WEIGHT; k++) {
            float sum = 0;
            for (int r = 0; r < size; r++) sum += all[r * WEIGHT + k];
            rank_check(fabsf(sum - got.grad[k]) <= 1e-5f * (1 + fabsf(sum)));
        }
    }
    FSDP_TRY(fsdp_summon_end(plain.model));
    destroy(&plain);
    destroy(&n);
    return FSDP_OK;
}

static void test_parts_of_a_sum(void **state)
{
    (void)state;
    in_corners(parts_of_a_sum, &(corners){ .ranks = (const int[]){ 1, 2, 3, 0 }, .processes_only = CAN_FORK, .threads_only = !CAN_FORK, .shared = 3 * WEIGHT * sizeof(float) });
}

/* ---- values ---- */

static fsdp_status read_own(const net *n, float *out)
{
    return fsdp_unit_read_param(n->own, 0, out);
}

/* The values that each rank had before the wrap, though rank 0's count for the rest; a summon writes to each rank's own. */
static fsdp_status values(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    float before[WEIGHT], after[WEIGHT], written[WEIGHT];
    fsdp_rng rng;
    int rank = fsdp_comm_rank(world), count;
    const fsdp_module_param_info *p;
    FSDP_TRY(layers(&n, c, world));
    FSDP_TRY(fsdp_module_set_ignored(n.model, "1.*", true));
    FSDP_TRY(fsdp_module_set_ignored(n.model, "1.bias", false)); /* after all not */
    fsdp_rng_init(&rng, 40 + (uint64_t)rank);
    FSDP_TRY(fsdp_module_init(n.model, FSDP_INIT_KAIMING, &rng));
    fsdp_summoned_param host;
    FSDP_TRY(fsdp_module_summoned(n.model, 2, &host));
    memcpy(before, host.value, sizeof(before));
    FSDP_TRY(fsdp_wrap(&n.model, n.model, &(fsdp_wrap_opts){ .comm = world, .mode = c->mode, .compute_device = n.device, .name = "net", .from_rank0 = true }));
    FSDP_TRY(find_own(&n));
    FSDP_TRY(read_own(&n, after));
    rank_check(memcmp(before, after, sizeof(before)) == 0);
    FSDP_TRY(micro_batch(&n, rank, true, NULL));
    FSDP_TRY(fsdp_summon_begin(n.model, &(fsdp_summon_opts){ .recurse = true, .writeback = true, .host = true }));
    FSDP_TRY(fsdp_module_params(n.model, &p, &count));
    for (int i = 0; i < count; i++) {
        fsdp_summoned_param s;
        FSDP_TRY(fsdp_module_summoned(n.model, i, &s));
        for (int k = 0; p[i].ignored && k < WEIGHT; k++) s.write[k] = written[k] = (float)(rank * 100 + k);
    }
    FSDP_TRY(fsdp_summon_end(n.model));
    FSDP_TRY(read_own(&n, after));
    rank_check(memcmp(written, after, sizeof(written)) == 0);
    FSDP_TRY(fsdp_module_check_replicas(n.model)); /* they differ, and may */
    /* It is named in the table and refused by who comes too late. */
    char *table;
    FSDP_TRY(fsdp_wrap_table(n.model, &table));
    rank_check(strstr(table, "net.ignored") != NULL);
    fsdp_free_text(table);
    fsdp_status st = fsdp_module_set_ignored(n.model, "0.weight", true);
    rank_check(st == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "before the module is wrapped") != NULL);
    FSDP_TRY(fsdp_module_set_ignored(n.model, "1.weight", true)); /* it is */
    st = fsdp_module_set_ignored(n.model, "1.wait", true);
    rank_check(st == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "fits none of the 6 parameters") != NULL);
    destroy(&n);
    return FSDP_OK;
}

static void test_values(void **state)
{
    (void)state;
    in_corners(values, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = !SANITIZED, .processes_only = CAN_FORK, .threads_only = !CAN_FORK });
}

/* ---- checkpoints ---- */

/* Rank 0's is saved, in folder and in memory; a load gives it to all. */
static fsdp_status saved(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    fsdp_checkpoint *cp;
    fsdp_optim *optim;
    float zeroth[WEIGHT], mine[WEIGHT], now[WEIGHT];
    int rank = fsdp_comm_rank(world);
    FSDP_TRY(make(&n, c, world));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, (fsdp_unit_list){ &n.own, 1 }, &(fsdp_adamw_opts){ .lr = 0.1f }));
    FSDP_TRY(fsdp_checkpoint_create(&cp, world));
    FSDP_TRY(fsdp_checkpoint_add_module(cp, NULL, n.model));
    FSDP_TRY(fsdp_checkpoint_add_optim(cp, optim));
    FSDP_TRY(micro_batch(&n, rank, false, NULL));
    FSDP_TRY(fsdp_optim_step(optim, NULL));
    FSDP_TRY(read_own(&n, mine));
    memcpy(zeroth, mine, sizeof(zeroth));
    FSDP_TRY(fsdp_comm_broadcast(world, zeroth, sizeof(zeroth), 0));
    FSDP_TRY(fsdp_checkpoint_save(cp, c->arg, 1, 0));
    FSDP_TRY(micro_batch(&n, rank + 7, false, NULL));
    FSDP_TRY(fsdp_optim_step(optim, NULL));
    char path[512];
    snprintf(path, sizeof(path), "%s/step-00000001", (const char *)c->arg);
    FSDP_TRY(fsdp_checkpoint_load(cp, path));
    FSDP_TRY(read_own(&n, now));
    rank_check(memcmp(now, zeroth, sizeof(now)) == 0);
    for (int kind = FSDP_STATE_FULL; kind <= FSDP_STATE_LOCAL; kind++) {
        fsdp_state *dict;
        FSDP_TRY(fsdp_unit_summon_begin(n.own, &(fsdp_unit_summon_opts){ .writeback = true, .host = true }));
        fsdp_unit_summoned(n.own, 0)[0] = (float)(rank + 10 * kind);
        FSDP_TRY(fsdp_unit_summon_end(n.own));
        FSDP_TRY(fsdp_state_read(&dict, cp, &(fsdp_state_opts){ .kind = (fsdp_state_kind)kind }));
        FSDP_TRY(micro_batch(&n, rank, false, NULL));
        FSDP_TRY(fsdp_optim_step(optim, NULL));
        FSDP_TRY(fsdp_state_load(cp, dict, NULL));
        fsdp_state_destroy(dict);
        FSDP_TRY(read_own(&n, now));
        rank_check(now[0] == (float)(10 * kind + (kind == FSDP_STATE_LOCAL ? rank : 0)) && memcmp(now + 1, zeroth + 1, sizeof(now) - sizeof(*now)) == 0);
    }
    rank_check(rank == 0 || memcmp(now, mine, sizeof(now)) != 0);
    fsdp_checkpoint_destroy(cp);
    fsdp_optim_destroy(optim);
    destroy(&n);
    return FSDP_OK;
}

static void test_saved(void **state)
{
    (void)state;
    char folder[] = "/tmp/fsdp_ignored_XXXXXX", command[128];
    assert_non_null(mkdtemp(folder));
    in_corners(saved, &(corners){ .ranks = (const int[]){ 1, 2, 3, 0 }, .processes_only = CAN_FORK, .threads_only = !CAN_FORK, .arg = folder });
    snprintf(command, sizeof(command), "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

/* ---- the same on every rank ---- */

static fsdp_status differ(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    FSDP_TRY(layers(&n, c, world));
    FSDP_TRY(fsdp_module_set_ignored(n.model, "1.weight", true));
    if (fsdp_comm_rank(world) > 0) FSDP_TRY(fsdp_module_set_ignored(n.model, "2.bias", true));
    for (int k = 0; k < 2; k++) {
        fsdp_status st = k == 0 ? wrap(&n, c, NULL) : fsdp_wrap_together(n.layer, 3, &(fsdp_wrap_opts){ .comm = world, .compute_device = n.device });
        rank_check(st == FSDP_ERR_INVALID);
        rank_check(strstr(fsdp_last_error_message(), "parameter \"2.bias\" is ignored on rank 1 and not on rank 0") != NULL || (k == 1 && strstr(fsdp_last_error_message(), "parameter \"bias\" is ignored on rank 1")));
    }
    FSDP_TRY(fsdp_module_set_ignored(n.model, "2.bias", fsdp_comm_rank(world) > 0)); /* nothing was changed */
    FSDP_TRY(fsdp_module_set_ignored(n.model, "2.bias", false));
    FSDP_TRY(wrap(&n, c, NULL));
    FSDP_TRY(find_own(&n));
    FSDP_TRY(micro_batch(&n, 1, false, NULL));
    destroy(&n);
    return FSDP_OK;
}

static void test_differ(void **state)
{
    (void)state;
    in_corners(differ, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .transport = "shm" });
}

/* Units inside leave it to the one around; a wrap that fails takes it back. */
static fsdp_status nested(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    FSDP_TRY(layers(&n, c, world));
    FSDP_TRY(fsdp_module_set_ignored(n.model, "1.weight", true));
    fsdp_wrap_policy linears = { .types = (const char *const[]){ "linear" }, .type_count = 1 };
    FSDP_TRY(wrap(&n, c, &linears));
    FSDP_TRY(find_own(&n));
    FSDP_TRY(fsdp_module_init_keyed(n.model, FSDP_INIT_KAIMING, 3));
    double sum[2];
    net flat;
    FSDP_TRY(make(&flat, c, world));
    for (int k = 0; k < 2; k++) FSDP_TRY(micro_batch(k == 0 ? &n : &flat, 5, false, &sum[k]));
    rank_check(sum[0] == sum[1] && sum[0] > 0);
    destroy(&flat);
    destroy(&n);
    return FSDP_OK;
}

static void test_nested(void **state)
{
    (void)state;
    in_corners(nested, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = !SANITIZED, .processes_only = CAN_FORK, .threads_only = !CAN_FORK });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_rank_has_its_own), cmocka_unit_test(test_parts_of_a_sum), cmocka_unit_test(test_values), cmocka_unit_test(test_saved),
        cmocka_unit_test(test_differ),                cmocka_unit_test(test_nested),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
