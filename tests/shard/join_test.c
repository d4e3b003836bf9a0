/* SPDX-License-Identifier: MIT
 *
 * Uneven inputs: ranks without a micro-batch join the passes of one that has one. They need to have had none before, whatever
 * the passes do; the result is that of a plain program that adds the leaves there are, with zeros for the others; means are
 * weighted by what was there; evaluations and cancelled passes are joined too; nobody hangs. */
#include "support/mini.h"
#include "support/ranks.h"

#include "base/error.h"
#include "shard/unit.h"

enum { STEPS = 4 };

/* How many passes a rank has in a step: rank 0 never has one where there are others; 1 has them all; more ranks have some. */
static int passes_of(int rank, int size, int step)
{
    if (size == 1) return 2;
    if (rank == 0) return 0;
    return rank == 1 ? 3 : (rank + step) % 4;
}

/* What a pass is: the same on all ranks that have it. */
static const char *const scripts[] = { MINI_NESTED, "F1 B1 F1 B1 [0 F2 F5 ]0 {0 B5 N2 }0", "[0 F1 F1 ]0 {0 B1 B1 }0 F3", "F5 P5 F4 B4 F1 F2" };

static const char *script_of(int step, int j)
{
    return scripts[(step + j) % 4];
}

static bool synced(int step, int j)
{
    return (step + j) % 3 != 1;
}

static int64_t leaf_of(int size, int rank, int step, int j)
{
    return (step * 4 + j) * size + rank;
}

typedef struct result {
    float param[8][1024];
} result;

/* What the units are beside their mode: hybrid, spread over half of the ranks between forward and backward, kept elsewhere. */
static mini_opts more;

static const mini_opts *opts_of(const corner *c, mini_opts *o)
{
    *o = more;
    o->mode = c->mode;
    o->device = c->device;
    o->sgd = true;
    if (o->shards > 0 && c->mode == FSDP_MODE_NONE) o->shards = 0;
    if (c->mode != FSDP_MODE_FULL) o->reshard_group = 0;
    if (o->storage != NULL) o->storage = strcmp(c->device, "cpu") == 0 ? "guard" : "cpu";
    return o;
}

static fsdp_status epoch(mini *m, int s)
{
    int rank = fsdp_comm_rank(m->comm), size = fsdp_comm_size(m->comm);
    for (int j = 0;; j++) {
        int first;
        bool have = j < passes_of(rank, size, s);
        FSDP_TRY(fsdp_comm_ask_more(m->comm, have, &first));
        rank_check(first == (size == 1 ? (j < 2 ? 0 : -1) : j < 3 ? 1 : -1));
        if (first < 0) return FSDP_OK;
        m->no_sync = !synced(s, j);
        if (have) FSDP_TRY(mini_leaf(m, script_of(s, j), leaf_of(size, rank, s, j)));
        else FSDP_TRY(fsdp_pass_join(m->comm, first));
    }
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    mini_opts o;
    FSDP_TRY(mini_create(&m, comm, opts_of(c, &o)));
    FSDP_TRY(fsdp_unit_set_frozen(m.unit[MINI_BIG], 0, true));
    for (int s = 0; s < STEPS; s++) {
        FSDP_TRY(epoch(&m, s));
        FSDP_TRY(fsdp_optim_step(m.optim, &(fsdp_step_opts){ .grad_scale = 1.0f / 32 }));
    }
    FSDP_TRY(mini_read(&m, ((result *)c->shared)->param[fsdp_comm_rank(comm)]));
    mini_destroy(&m);
    return FSDP_OK;
}

/* A window of zeros is added where a rank has no leaf: x + 0 is x, but for -0. */
static void compare(const corner *c)
{
    const result *got = c->shared;
    float want[1024];
    plain *p = plain_create();
    plain_freeze(p, MINI_BIG, 0, true);
    for (int s = 0; s < STEPS; s++) {
        for (int j = 0; j < 3; j++)
            for (int r = 0; r < c->ranks; r++)
                if (j < passes_of(r, c->ranks, s)) plain_leaf_of(p, script_of(s, j), leaf_of(c->ranks, r, s, j), r, synced(s, j));
                else if (c->ranks > 1) plain_nothing_of(p, script_of(s, j), r, synced(s, j));
        plain_step(p, 1.0f / 32);
    }
    plain_read(p, want);
    plain_destroy(p);
    for (int r = 0; r < c->ranks; r++)
        for (int i = 0; i < mini_numel(); i++)
            if (want[i] != got->param[r][i]) fail_msg("%s: rank %d reads %.9g for element %d, not %.9g", corner_name(c), r, (double)got->param[r][i], i, (double)want[i]);
}

static void test_ranks_join(void **state)
{
    (void)state;
    in_corners(train, &(corners){ .ranks = (const int[]){ 1, 2, 3, 0 }, .all_modes = true, .shared = sizeof(result), .after = compare });
    in_corners(train, &(corners){ .ranks = (const int[]){ 5, 0 }, .shared = sizeof(result), .after = compare, .threads_only = true });
}

/* On meshes, and with slices that are kept on another device. */
static void test_meshes_and_offload(void **state)
{
    (void)state;
    static const mini_opts kinds[] = { { .shards = 2 }, { .reshard_group = 2 }, { .shards = 2, .storage = "other" }, { .storage = "other" } };
    for (int k = 0; k < 4; k++) {
        more = kinds[k];
        in_corners(train, &(corners){ .ranks = (const int[]){ 4, 0 }, .all_modes = k == 0, .threads_only = true, .shared = sizeof(result), .after = compare });
    }
    more = (mini_opts){ 0 };
}

/* ---- figures ---- */

static fsdp_comm_stats stats_of(fsdp_comm *comm)
{
    fsdp_comm_stats s;
    fsdp_comm_get_stats(comm, &s);
    return s;
}

/* The last rank has nothing: it gathers nothing, and weighs nothing. */
static fsdp_status figures(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm), first;
    bool have = rank < size - 1;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_comm_stats before = stats_of(comm);
    for (int j = 0; j < 2; j++) {
        fsdp_pass *pass;
        FSDP_TRY(fsdp_comm_ask_more(comm, have, &first));
        rank_check(first == 0);
        if (!have) {
            FSDP_TRY(fsdp_pass_join(comm, first));
            continue;
        }
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m.unit[0])));
        m.number[rank] = 0;
        FSDP_TRY(mini_run(&m, pass, MINI_NESTED, rank));
        fsdp_pass_add_weight(pass, 5 + j);
        FSDP_TRY(fsdp_pass_end(pass));
    }
    fsdp_comm_stats after = stats_of(comm);
    rank_check(after.reduces - before.reduces == 12 && after.exchanges - before.exchanges >= 4);
    rank_check(have || after.gathers == before.gathers);
    double weight;
    FSDP_TRY(fsdp_step_begin(mini_list(&m)));
    FSDP_TRY(fsdp_step_grad_norm(mini_list(&m), NULL, &weight));
    rank_check(weight == 11 * (size - 1));
    FSDP_TRY(fsdp_step_end(mini_list(&m)));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_figures(void **state)
{
    (void)state;
    in_corners(figures, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true, .threads_only = true });
}

/* ---- evaluations, failures ---- */

static fsdp_status others(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), first;
    bool have = rank == 0;
    mini m;
    fsdp_pass *pass, *eval;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    for (int k = 0; k < 5; k++) {
        FSDP_TRY(fsdp_comm_ask_more(comm, have, &first));
        if (!have) {
            FSDP_TRY(fsdp_pass_join(comm, first));
            continue;
        }
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m.unit[0])));
        m.number[0] = 0;
        FSDP_TRY(fsdp_pass_begin(&pass, comm, k == 0 ? FSDP_PASS_EVAL : FSDP_PASS_TRAIN));
        if (k == 0) FSDP_TRY(mini_run(&m, pass, "[0 F1 F2 F5 ]0", 0));
        if (k == 1) FSDP_TRY(mini_run(&m, pass, "[0 F1 F2 {2 }2 {1", 0)); /* and is cancelled */
        if (k == 2) { /* an evaluation within */
            FSDP_TRY(mini_run(&m, pass, "[0 F1", 0));
            FSDP_TRY(fsdp_pass_begin(&eval, comm, FSDP_PASS_EVAL));
            FSDP_TRY(mini_run(&m, eval, "F2 F1", 0));
            FSDP_TRY(fsdp_pass_end(eval));
            FSDP_TRY(mini_run(&m, pass, "]0 {0 B1 }0", 0));
        }
        if (k == 3) { /* a recompute */
            FSDP_TRY(mini_run(&m, pass, "F1 F2 F2 B2", 0));
            FSDP_TRY(fsdp_unit_begin_recompute(m.unit[MINI_A], pass));
            FSDP_TRY(fsdp_unit_end_recompute(m.unit[MINI_A], pass));
            FSDP_TRY(mini_run(&m, pass, "B1", 0)); /* unit 2 has a forward left: posted at the end */
        }
        if (k == 4) FSDP_TRY(fsdp_pass_set_sync(pass, false));
        if (k == 4) FSDP_TRY(mini_run(&m, pass, "F1 B1 F1 {1 }1 F5 {5", 0));
        FSDP_TRY(k == 1 || k == 4 ? fsdp_pass_cancel(pass) : fsdp_pass_end(pass));
    }
    rank_check(fsdp_unit_pending(m.unit[MINI_A], 0) == FSDP_PENDING_REDUCED && fsdp_unit_pending(m.unit[MINI_BIG], 0) == 0);
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank)); /* all again, and gathering ahead */
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank));
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_evaluations_and_cancelled_passes(void **state)
{
    (void)state;
    in_corners(others, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true });
}

static fsdp_status refusals(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    mini m;
    fsdp_pass *pass;
    double x = 1;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    rank_check(fsdp_pass_join(comm, rank) == FSDP_ERR_INVALID && fsdp_pass_join(comm, -1) == FSDP_ERR_INVALID && fsdp_pass_join(comm, size) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    rank_check(fsdp_pass_join(comm, 1 - rank) == FSDP_ERR_STATE); /* a pass is open */
    FSDP_TRY(fsdp_pass_cancel(pass));
    /* What the other does is no pass: it is said, and nothing was done. */
    if (rank == 1) rank_check(fsdp_pass_join(comm, 0) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "rank 0 begins no pass: its next operation is: exact sum") != NULL);
    FSDP_TRY(fsdp_comm_sum_exact(comm, &x, 1));
    rank_check(x == 2);
    /* A call within the pass that cannot be followed: only a reset helps. */
    fsdp_status st = FSDP_OK;
    if (rank == 0) {
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(mini_run(&m, pass, "F1", 0));
        st = fsdp_comm_sum_exact(comm, &x, 1);
        rank_check(st == FSDP_ERR_COMM);
    } else {
        rank_check(fsdp_pass_join(comm, 0) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "rank 0 makes an exact sum") != NULL);
    }
    FSDP_TRY(fsdp_comm_reset(comm));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank));
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_refusals(void **state)
{
    (void)state;
    in_corners(refusals, &(corners){ .ranks = (const int[]){ 2, 0 }, .all_modes = true });
}

/* Two units of one name and size, used in another order on one rank: that is noticed. */
static fsdp_status alike(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    fsdp_unit *u[2];
    fsdp_pass *pass;
    fsdp_param w = { "w", 1, { 20 } };
    int rank = fsdp_comm_rank(comm);
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    for (int i = 0; i < 2; i++) FSDP_TRY(fsdp_unit_create(&u[i], comm, &w, 1, &(fsdp_unit_opts){ .name = "same", .compute_device = dev }));
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_EVAL));
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < 2 && st == FSDP_OK; i++) {
        st = fsdp_unit_begin_forward(u[i ^ rank], pass);
        if (st == FSDP_OK) st = fsdp_unit_end_forward(u[i ^ rank], pass);
    }
    if (st == FSDP_OK) st = fsdp_pass_end(pass);
    rank_check(st == FSDP_ERR_COMM && strstr(fsdp_last_error_message(), "forward gather of \"same\"") != NULL);
    FSDP_TRY(fsdp_comm_reset(comm));
    for (int i = 0; i < 2; i++) fsdp_unit_destroy(u[i]);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_units_that_are_alike(void **state)
{
    (void)state;
    in_corners(alike, &(corners){ .ranks = (const int[]){ 2, 0 } });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_join),
        cmocka_unit_test(test_meshes_and_offload),
        cmocka_unit_test(test_figures),
        cmocka_unit_test(test_evaluations_and_cancelled_passes),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_units_that_are_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
