/* SPDX-License-Identifier: MIT
 *
 * Small collectives give every rank the right answer; ranks that do different things are told what each did, and can
 * go on after a reset. All of it for ranks as processes and as threads. */
#include "support/testing.h"

#include "comm/comm.h"

#include <fsdp/fsdp.h>
#include <math.h>
#include <unistd.h>

static fsdp_status collectives(fsdp_comm *world, void *arg)
{
    (void)arg;
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    for (int round = 0; round < 300; round++) {
        FSDP_TRY(fsdp_comm_barrier(world));
        double x[3] = { 1e300 * (rank % 2 == 0 ? 1 : -1), 1.0, 0x1p-60 };
        FSDP_TRY(fsdp_comm_sum_exact(world, x, 3));
        rank_check(x[0] == (size % 2 == 0 ? 0 : 1e300) && x[1] == size && x[2] == size * 0x1p-60);
        double m[2] = { rank, -rank };
        FSDP_TRY(fsdp_comm_max(world, m, 2));
        rank_check(m[0] == size - 1 && m[1] == 0);
        int mine[2] = { rank, round }, all[2 * 64];
        FSDP_TRY(fsdp_comm_all_gather(world, mine, sizeof(mine), all));
        for (int r = 0; r < size; r++) rank_check(all[2 * r] == r && all[2 * r + 1] == round);
    }
    double nan[1] = { rank == size - 1 ? NAN : 1 };
    FSDP_TRY(fsdp_comm_max(world, nan, 1));
    rank_check(isnan(nan[0]));
    static _Thread_local unsigned char big[3 * 4096 + 17];
    for (size_t i = 0; i < sizeof(big); i++) big[i] = rank == size - 1 ? (unsigned char)(i * 7) : 0;
    FSDP_TRY(fsdp_comm_broadcast(world, big, sizeof(big), size - 1));
    for (size_t i = 0; i < sizeof(big); i++) rank_check(big[i] == (unsigned char)(i * 7));
    return FSDP_OK;
}

static fsdp_status split(fsdp_comm *world, void *arg)
{
    (void)arg;
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    fsdp_comm *sub = NULL;
    FSDP_TRY(fsdp_comm_split(world, rank == 0 && size > 2 ? -1 : rank % 2, -rank, &sub));
    if (sub != NULL) {
        double x = rank;
        int members = fsdp_comm_size(sub), want = 0;
        FSDP_TRY(fsdp_comm_sum_exact(sub, &x, 1));
        for (int r = size > 2 ? 1 : 0; r < size; r++) want += r % 2 == rank % 2 ? r : 0;
        rank_check(x == want);
        int order[64];
        FSDP_TRY(fsdp_comm_all_gather(sub, &rank, sizeof(rank), order));
        for (int i = 1; i < members; i++) rank_check(order[i] < order[i - 1]); /* by key: descending */
        rank_check(order[fsdp_comm_rank(sub)] == rank);
        fsdp_comm_destroy(sub);
    } else {
        rank_check(rank == 0 && size > 2);
    }
    return fsdp_comm_barrier(world);
}

static fsdp_status agree(fsdp_comm *world, void *arg)
{
    (void)arg;
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    FSDP_TRY(fsdp_comm_agree(world, FSDP_OK));
    fsdp_status st = FSDP_OK;
    if (rank >= size / 2) st = fsdp_error_raise(FSDP_ERR_IO, __func__, __FILE__, __LINE__, "no disk on %d", rank);
    st = fsdp_comm_agree(world, st);
    char want[64];
    snprintf(want, sizeof(want), size > 1 ? "rank %d: no disk on %d" : "no disk on %d", size / 2, size / 2);
    rank_check(st == FSDP_ERR_IO && strcmp(fsdp_last_error_message(), want) == 0);
    /* What was agreed on is not said twice; a bare status has its name for a message. */
    rank_check(fsdp_comm_agree(world, st) == FSDP_ERR_IO && strcmp(fsdp_last_error_message(), want) == 0);
    st = fsdp_comm_agree(world, rank == size - 1 ? FSDP_ERR_DEVICE : FSDP_OK);
    rank_check(st == FSDP_ERR_DEVICE && strstr(fsdp_last_error_message(), "FSDP_ERR_DEVICE") != NULL);
    return FSDP_OK;
}

static fsdp_status fail_together(fsdp_comm *world, void *arg)
{
    (void)arg;
    fsdp_status st = FSDP_OK;
    if (fsdp_comm_rank(world) == 1) st = fsdp_error_raise(FSDP_ERR_IO, __func__, __FILE__, __LINE__, "no disk");
    return fsdp_comm_agree(world, st);
}

/* Rank 1 leaves out a call; all are told, all reset, all go on. */
static fsdp_status differ(fsdp_comm *world, void *arg)
{
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    for (int round = 0; round < 3; round++) {
        fsdp_status st = FSDP_OK;
        double x = 1;
        if (st == FSDP_OK) st = fsdp_comm_barrier(world);
        if (st == FSDP_OK && rank == size - 1) st = fsdpi_comm_tag(world, FSDPI_OP_FORWARD, "h.3", 96);
        if (st == FSDP_OK && rank != size - 1) st = fsdpi_comm_tag(world, FSDPI_OP_FORWARD, "h.4", 96);
        if (st == FSDP_OK && arg != NULL && rank == 0) st = fsdp_comm_barrier(world);
        if (st == FSDP_OK) st = fsdp_comm_sum_exact(world, &x, 1);
        rank_check(st == FSDP_ERR_COMM);
        const char *m = fsdp_last_error_message();
        rank_check(strstr(m, "ranks did different things at operation ") != NULL);
        if (arg == NULL) rank_check(strstr(m, "forward gather of \"h.3\" (96 bytes") != NULL && strstr(m, "of \"h.4\"") != NULL);
        FSDP_TRY(fsdp_comm_reset(world));
        FSDP_TRY(fsdp_comm_sum_exact(world, &x, 1));
        rank_check(x == size);
    }
    return FSDP_OK;
}

/* No rank gets more than 3/8 of a ring of tags ahead of the slowest, and a difference far back is still found. */
static fsdp_status run_ahead(fsdp_comm *world, void *arg)
{
    (void)arg;
    int rank = fsdp_comm_rank(world);
    for (int i = 0; i < 2000; i++) {
        if (rank == 0 && i % 400 == 0) usleep(20000);
        FSDP_TRY(fsdpi_comm_tag(world, FSDPI_OP_FORWARD, "u", 8));
        int64_t ahead = (int64_t)world->block->member[rank].tags - (int64_t)world->block->member[0].tags;
        rank_check(ahead <= FSDPI_TAGS * 3 / 8);
    }
    FSDP_TRY(fsdp_comm_barrier(world));
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < 100 && st == FSDP_OK; i++) st = fsdpi_comm_tag(world, FSDPI_OP_FORWARD, i == 10 && rank == 1 ? "v" : "u", 8);
    if (st == FSDP_OK) st = fsdp_comm_barrier(world);
    rank_check(st == FSDP_ERR_COMM && strstr(fsdp_last_error_message(), "of \"v\"") != NULL);
    return FSDP_OK;
}

static void run(fsdp_rank_fn fn, void *arg, int from)
{
    static const int sizes[] = { 1, 2, 3, 5, 8 };
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        if (sizes[i] < from) continue;
        assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = sizes[i], .ranks_are_threads = true, .timeout_s = 60 }, fn, arg));
        assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = sizes[i], .timeout_s = 60 }, fn, arg));
    }
}

static void test_collectives(void **state)
{
    (void)state;
    run(collectives, NULL, 1);
}

static void test_split(void **state)
{
    (void)state;
    run(split, NULL, 1);
}

static void test_agree(void **state)
{
    (void)state;
    run(agree, NULL, 1);
    assert_fails(fsdp_launch(&(fsdp_launch_opts){ .ranks = 3 }, fail_together, NULL), FSDP_ERR_IO, "no disk");
    assert_string_equal(fsdp_last_error_message(), "rank 1: no disk");
}

static void test_ranks_that_differ_are_told(void **state)
{
    (void)state;
    run(differ, NULL, 2);
}

static void test_differing_numbers_of_calls(void **state)
{
    (void)state;
    run(differ, "one more", 2);
}

static void test_run_ahead_is_bounded(void **state)
{
    (void)state;
    run(run_ahead, NULL, 2);
}

static fsdp_status many(fsdp_comm *world, void *arg)
{
    (void)arg;
    for (int i = 0; i < 5; i++) {
        double x = 1;
        FSDP_TRY(fsdp_comm_sum_exact(world, &x, 1));
        rank_check(x == 128);
    }
    return FSDP_OK;
}

static void test_128_rank_threads(void **state)
{
    (void)state;
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 128, .ranks_are_threads = true }, many, NULL));
}

static void test_self(void **state)
{
    (void)state;
    fsdp_comm *self;
    assert_ok(fsdp_comm_create_self(&self));
    assert_string_equal(fsdp_comm_transport(self), "self");
    assert_ok(collectives(self, NULL));
    assert_ok(agree(self, NULL));
    fsdp_comm_destroy(self);
    fsdp_comm_destroy(NULL);
    assert_fails(fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .transport = "self" }, many, NULL), FSDP_ERR_INVALID, "shm");
    assert_fails(fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .transport = "wire" }, many, NULL), FSDP_ERR_INVALID,
                 "there are: self, shm, copy");
    assert_fails(fsdp_launch(&(fsdp_launch_opts){ .ranks = -2 }, many, NULL), FSDP_ERR_INVALID, "-2 ranks");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_agree),
        cmocka_unit_test(test_ranks_that_differ_are_told),
        cmocka_unit_test(test_differing_numbers_of_calls),
        cmocka_unit_test(test_run_ahead_is_bounded),
        cmocka_unit_test(test_128_rank_threads),
        cmocka_unit_test(test_self),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
