/* SPDX-License-Identifier: MIT
 *
 * Uneven inputs: ranks without a micro-batch join the passes of one that has one. They need to have had none before, whatever
 * the passes do; the result is that of a plain program that adds the leaves there are, with zeros for the others; means are
 * weighted by what was there; evaluations and cancelled passes are joined too; nobody hangs. */
#include "support/mini_program.h"

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

static bool turn(const mini_program *p, int ranks, int step, int j, int rank, mini_turn *out)
{
    (void)p;
    *out = (mini_turn){ .script = scripts[(step + j) % 4], .leaf = (step * 4 + j) * ranks + rank, .no_sync = (step + j) % 3 == 1, .joins = j >= passes_of(rank, ranks, step) };
    return j < (ranks == 1 ? 2 : 3);
}

/* They ask each other before every pass, and once more when there is none. */
static fsdp_status epoch(const mini_program *p, mini *m, int step)
{
    int rank = fsdp_comm_rank(m->comm), size = fsdp_comm_size(m->comm), first;
    mini_turn t;
    for (int j = 0; p->turn(p, size, step, j, rank, &t); j++) {
        FSDP_TRY(fsdp_comm_ask_more(m->comm, !t.joins, &first));
        rank_check(first == (size == 1 ? 0 : 1));
        m->no_sync = t.no_sync;
        FSDP_TRY(t.joins ? fsdp_pass_join(m->comm, first) : mini_leaf(m, t.script, t.leaf));
    }
    FSDP_TRY(fsdp_comm_ask_more(m->comm, false, &first));
    rank_check(first < 0);
    return FSDP_OK;
}

static const mini_change part_of_big[] = { { 0, MINI_BIG, 0, true } };
static const mini_program uneven = { .steps = STEPS, .turn = turn, .passes = epoch, .change = part_of_big, .changes = 1 };

static void test_ranks_join(void **state)
{
    (void)state;
    mini_program_in_corners(&uneven, (corners){ .ranks = (const int[]){ 1, 2, 3, 0 }, .all_modes = true });
    mini_program_in_corners(&uneven, (corners){ .ranks = (const int[]){ 5, 0 }, .threads_only = true });
}

/* On meshes, and with slices that are kept on another device. */
static void test_meshes_and_offload(void **state)
{
    (void)state;
    mini_program_on_meshes(&uneven, false);
}

/* ---- figures ---- */

/* The last rank has nothing: it gathers nothing, and weighs nothing. */
static fsdp_status figures(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm), first;
    bool have = rank < size - 1;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_comm_stats before = comm_stats(comm);
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
    fsdp_comm_stats after = comm_stats(comm);
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

/* Rank 0 alone has a micro-batch: the others join in its pass, and when this returns it has ended. */
static fsdp_status lead_or_join(fsdp_comm *comm, bool *leads)
{
    int first;
    *leads = fsdp_comm_rank(comm) == 0;
    FSDP_TRY(fsdp_comm_ask_more(comm, *leads, &first));
    return *leads ? FSDP_OK : fsdp_pass_join(comm, first);
}

static fsdp_status others(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    bool leads;
    mini m;
    fsdp_pass *pass, *eval;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    for (int k = 0; k < 5; k++) {
        FSDP_TRY(lead_or_join(comm, &leads));
        if (!leads) continue;
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
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, fsdp_comm_rank(comm))); /* all again, and gathering ahead */
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, fsdp_comm_rank(comm)));
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_evaluations_and_cancelled_passes(void **state)
{
    (void)state;
    in_corners(others, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true });
}

/* A pass and an evaluation of masters in it, of units that are gathered in 16 bits: ranks that join offer theirs; and a
 * reshard by hand. */
static fsdp_status masters(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    bool leads;
    mini m;
    fsdp_pass *pass, *eval;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .param_dtype = FSDP_BF16, .exact_eval = true }));
    for (int k = 0; k < 3; k++) {
        FSDP_TRY(lead_or_join(comm, &leads));
        if (leads) {
            FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m.unit[0])));
            m.number[0] = 0;
            FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
            FSDP_TRY(mini_run(&m, pass, "[0", 0));
            FSDP_TRY(fsdp_pass_begin(&eval, comm, FSDP_PASS_EVAL));
            FSDP_TRY(mini_run(&m, eval, "F2 F1", 0));
            FSDP_TRY(fsdp_pass_end(eval));
            FSDP_TRY(mini_run(&m, pass, "F2 ]0 B2", 0));
            FSDP_TRY(fsdp_unit_reshard(m.unit[MINI_B])); /* its gradient is posted */
            FSDP_TRY(mini_run(&m, pass, "{0 }0", 0));
            FSDP_TRY(fsdp_pass_end(pass));
        }
        if (k == 1) FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    }
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_evaluations_of_masters(void **state)
{
    (void)state;
    in_corners(masters, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true, .threads_only = true });
}

/* Unsharded by hand, while an evaluation has the masters in its place: that keeps nothing, and takes no room on ranks that have joined. */
static fsdp_status unsharded(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    bool leads;
    mini m;
    fsdp_pass *pass;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .param_dtype = FSDP_BF16, .exact_eval = true }));
    int64_t all;
    FSDP_TRY(fsdp_unit_unshard(m.unit[MINI_BIG]));
    FSDP_TRY(fsdp_comm_get_unsharded(comm, &all, NULL));
    FSDP_TRY(fsdp_unit_reshard(m.unit[MINI_BIG]));
    FSDP_TRY(fsdp_comm_set_max_unsharded(comm, all)); /* room for that unit alone */
    FSDP_TRY(fsdp_unit_unshard(m.unit[MINI_A]));
    FSDP_TRY(lead_or_join(comm, &leads));
    if (leads) {
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_EVAL));
        FSDP_TRY(fsdp_unit_begin_forward(m.unit[MINI_BIG], pass));
        FSDP_TRY(fsdp_unit_unshard(m.unit[MINI_BIG]));
        FSDP_TRY(fsdp_unit_end_forward(m.unit[MINI_BIG], pass));
        FSDP_TRY(fsdp_pass_end(pass));
    }
    mini_destroy(&m);
    return FSDP_OK;
}

/* A pass that is cancelled while several gradients are open, after an evaluation within it that used their units in another order: ranks that
 * have joined do not know of which pass a use is. */
static fsdp_status two_open(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    bool leads;
    mini m;
    fsdp_pass *pass, *eval;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    for (int k = 0; k < 2; k++) {
        FSDP_TRY(lead_or_join(comm, &leads));
        if (!leads) continue;
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m.unit[0])));
        m.number[0] = 0;
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(fsdp_pass_begin(&eval, comm, FSDP_PASS_EVAL));
        FSDP_TRY(mini_run(&m, eval, k == 0 ? "F2 F1" : "F1 F2", 0));
        FSDP_TRY(fsdp_pass_end(eval));
        FSDP_TRY(mini_run(&m, pass, k == 0 ? "F1 F2 {2 {1" : "F2 F1 {1 {2", 0));
        FSDP_TRY(fsdp_pass_cancel(pass));
    }
    FSDP_TRY(mini_leaf(&m, "F1 B1", fsdp_comm_rank(comm)));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_cancelled_with_several_gradients_open(void **state)
{
    (void)state;
    in_corners(two_open, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true, .threads_only = true });
}

static fsdp_status k_fails(const fsdp_kernel *k, const void *arg)
{
    (void)k, (void)arg;
    FSDP_FAIL(FSDP_ERR_NONFINITE, "it fails");
}

/* After a kernel that failed, rank 0 has given up what was kept by hand, and the others have not: they do without what there is no room for. */
static fsdp_status given_up(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    bool leads;
    mini m;
    fsdp_pass *pass;
    int64_t all;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .param_dtype = FSDP_BF16 }));
    FSDP_TRY(fsdp_unit_unshard(m.unit[MINI_BIG]));
    FSDP_TRY(fsdp_comm_get_unsharded(comm, NULL, &all));
    FSDP_TRY(fsdp_comm_set_max_unsharded(comm, all));
    for (int k = 0; k < 2; k++) {
        FSDP_TRY(lead_or_join(comm, &leads));
        if (!leads) continue;
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_EVAL));
        if (k == 0) (void)!fsdp_stream_launch(fsdp_unit_stream(m.unit[0]), k_fails, NULL, 0);
        else FSDP_TRY(fsdp_unit_unshard(m.unit[MINI_A]));
        FSDP_TRY(fsdp_pass_cancel(pass));
    }
    for (int u = 0; u < MINI_UNITS; u++) FSDP_TRY(fsdp_unit_reshard(m.unit[u])); /* alike again */
    FSDP_TRY(mini_leaf(&m, "F1 B1", fsdp_comm_rank(comm)));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_unsharded_in_a_pass_that_others_join(void **state)
{
    (void)state;
    in_corners(unsharded, &(corners){ .transport = "shm", .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true, .threads_only = true });
    in_corners(given_up, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true, .threads_only = true });
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
        cmocka_unit_test(test_evaluations_of_masters),
        cmocka_unit_test(test_unsharded_in_a_pass_that_others_join),
        cmocka_unit_test(test_cancelled_with_several_gradients_open),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_units_that_are_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
