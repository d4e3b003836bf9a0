/* SPDX-License-Identifier: MIT
 *
 * Saving in the background: the files have the bytes of a save in the foreground at that place, whatever training does meanwhile;
 * what goes wrong is told at the next call, on every rank, and older checkpoints stay; where there is no room for a copy, all ranks
 * save in the foreground. */
#include "checkpoint/saved_mini.h"
#include "format/scratch.h"
#include "support/fault_write.h"

#include "base/alloc.h"

#include <dirent.h>
#include <stdatomic.h>

/* ---- the same bytes ---- */

static bool same_files(const char *a, const char *b)
{
    char command[1500];
    snprintf(command, sizeof(command), "diff -r %s %s >/dev/null", a, b);
    return system(command) == 0;
}

static bool there(const char *path)
{
    struct stat sb;
    return stat(path, &sb) == 0;
}

static const char *in(const char *folder, int64_t step)
{
    static _Thread_local char path[4][600];
    static _Thread_local int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof(path[0]), "%s/step-%08lld", folder, (long long)step);
    return p;
}

static _Atomic int overlapped; /* how often a step was made while a save was written */

typedef struct folders {
    char plain[300], beside[300];
} folders;

static fsdp_status both_ways(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    const folders *f = c->arg;
    saved_mini s;
    int rank = fsdp_comm_rank(world);
    bool beside = false;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    for (int64_t step = 1; step <= 3; step++) {
        FSDP_TRY(mini_step(&s.m, MINI_NESTED, step, 6));
        FSDP_TRY(fsdp_checkpoint_save(s.c, f->plain, step, 0));
        FSDP_TRY(fsdp_checkpoint_save_with(s.c, f->beside, step, &(fsdp_save_opts){ .background = true, .in_background = &beside }));
        rank_check(beside);
        size_t staged = fsdp_checkpoint_staged_bytes(s.c);
        rank_check(fsdp_comm_size(world) > 1 || staged == 0 || staged == (size_t)(3 * mini_numel() * 4 + 20));
        if (step == 2) FSDP_TRY(fsdp_checkpoint_load(s.c, in(f->plain, 1))); /* whatever: it is copied */
        for (int i = 0; i < 2; i++) {
            overlapped += fsdp_checkpoint_is_saving(s.c);
            FSDP_TRY(saved_mini_disturb(&s, 10 + i));
        }
        if (step == 2) continue; /* the next save waits for it */
        FSDP_TRY(fsdp_checkpoint_wait(s.c));
        rank_check(!fsdp_checkpoint_is_saving(s.c) && fsdp_checkpoint_staged_bytes(s.c) == 0);
        rank_check(there(in(f->beside, step)));
        FSDP_TRY(fsdp_checkpoint_wait(s.c)); /* there is none: at once */
    }
    saved_mini_close(&s);
    FSDP_TRY(fsdp_comm_barrier(world));
    if (rank == 0) FSDP_FAIL_IF(!same_files(f->plain, f->beside), FSDP_ERR_INTERNAL, "%s and %s differ", f->plain, f->beside);
    return FSDP_OK;
}

static void clear(const corner *c)
{
    const folders *f = c->arg;
    char command[1500];
    snprintf(command, sizeof(command), "rm -rf %s %s", f->plain, f->beside);
    assert_int_equal(system(command), 0);
}

static void test_same_bytes(void **state)
{
    (void)state;
    folders f;
    snprintf(f.plain, sizeof(f.plain), "%s", scratch("plain"));
    snprintf(f.beside, sizeof(f.beside), "%s", scratch("beside"));
    in_corners(both_ways, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .arg = &f, .after = clear, .processes_only = true, .device = "cpu" });
    in_corners(both_ways, &(corners){ .ranks = (const int[]){ 2, 0 }, .arg = &f, .after = clear, .all_modes = true, .threads_only = true, .device = "cpu" });
    fault_write.nap_us = 2000; /* a slow disk: training is surely ahead */
    overlapped = 0;
    in_corners(both_ways, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .arg = &f, .after = clear, .threads_only = true, .device = "guard" });
    fault_write.nap_us = 0;
    assert_true(overlapped > 5);
}

/* ---- what goes wrong ---- */

static fsdp_status full_disk(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    const char *folder = ((const folders *)c->arg)->beside;
    saved_mini s;
    int rank = fsdp_comm_rank(world), last = fsdp_comm_size(world) - 1;
    fsdp_save_opts o = { .background = true, .keep = 5 };
    char temp[600];
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(fsdp_checkpoint_save_with(s.c, folder, 1, &o));
    FSDP_TRY(fsdp_checkpoint_wait(s.c));
    for (int way = 0; way < 3; way++) {
        if (rank == last) fault_write.room = 1500;
        FSDP_TRY(fsdp_checkpoint_save_with(s.c, folder, 2, &o)); /* it has begun: that is all that is known */
        FSDP_TRY(mini_step(&s.m, MINI_NESTED, way, 6));
        fsdp_status st = FSDP_OK;
        if (way == 0) st = fsdp_checkpoint_wait(s.c);
        if (way == 1) st = fsdp_checkpoint_save_with(s.c, folder, 3, &o); /* the next save says it, and does nothing else */
        if (way == 2) {
            FSDP_TRY(fsdp_checkpoint_load(s.c, in(folder, 1))); /* a load does not */
            st = fsdp_checkpoint_save(s.c, folder, 3, 0);
        }
        fault_write.room = -1;
        rank_check(st == FSDP_ERR_IO);
        rank_check(strstr(fsdp_last_error_message(), "the save of step 2 in the background: ") != NULL && strstr(fsdp_last_error_message(), "bytes are free") != NULL);
        snprintf(temp, sizeof(temp), "%s/.step-00000002.tmp", folder);
        FSDP_TRY(fsdp_comm_barrier(world));
        rank_check(!there(temp) && !there(in(folder, 2)) && !there(in(folder, 3)) && there(in(folder, 1)));
        FSDP_TRY(fsdp_checkpoint_wait(s.c)); /* said once */
        FSDP_TRY(fsdp_comm_barrier(world));
    }
    FSDP_TRY(fsdp_checkpoint_save_with(s.c, folder, 4, &o)); /* and the run goes on */
    FSDP_TRY(fsdp_checkpoint_wait(s.c));
    FSDP_TRY(fsdp_checkpoint_load(s.c, in(folder, 4)));
    if (rank == last) fault_write.room = 1500;
    FSDP_TRY(fsdp_checkpoint_save_with(s.c, folder, 5, &o));
    saved_mini_close(&s); /* waits, and says it to the log alone */
    fault_write.room = -1;
    return FSDP_OK;
}

static void test_full_disk(void **state)
{
    (void)state;
    folders f = { .plain = "/tmp/fsdp-none" };
    snprintf(f.beside, sizeof(f.beside), "%s", scratch("full"));
    in_corners(full_disk, &(corners){ .ranks = (const int[]){ 1, 2, 3, 0 }, .arg = &f, .after = clear, .processes_only = true, .device = "cpu" });
    /* a folder that cannot be made is known by rank 0's thread alone */
    fsdp_comm *comm;
    saved_mini s;
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(saved_mini_open(&s, comm, &(mini_opts){ 0 }));
    scratch_text("a-file", "x");
    assert_ok(fsdp_checkpoint_save_with(s.c, scratch("a-file"), 1, &(fsdp_save_opts){ .background = true }));
    assert_fails(fsdp_checkpoint_wait(s.c), FSDP_ERR_IO, "a-file");
    assert_fails(fsdp_checkpoint_save_with(s.c, scratch("x"), 1, &(fsdp_save_opts){ .most_bytes = 7 }), FSDP_ERR_INVALID, "most_bytes");
    assert_fails(fsdp_checkpoint_save_with(s.c, scratch("x"), 1, &(fsdp_save_opts){ .keep = -1 }), FSDP_ERR_INVALID, "keep -1");
    saved_mini_close(&s);
    fsdp_comm_destroy(comm);
}

/* ---- no room for a copy ---- */

static _Atomic int said;
static char said_text[1024];

static void hear(fsdp_log_level level, const char *text, void *arg)
{
    (void)arg;
    if (level != FSDP_LOG_WARN) return;
    if (said++ == 0) snprintf(said_text, sizeof(said_text), "%s", text);
}

static fsdp_status capped(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    const folders *f = c->arg;
    saved_mini s;
    bool beside = true;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    /* rank 0 keeps most of it, and may not copy so much */
    fsdp_save_opts o = { .background = true, .most_bytes = 1000, .in_background = &beside };
    for (int64_t step = 1; step < 3; step++) {
        FSDP_TRY(mini_step(&s.m, MINI_NESTED, step, 6));
        FSDP_TRY(fsdp_checkpoint_save_with(s.c, f->beside, step, &o));
        rank_check(!beside && fsdp_checkpoint_staged_bytes(s.c) == 0 && !fsdp_checkpoint_is_saving(s.c));
        rank_check(there(in(f->beside, step))); /* it is done */
        FSDP_TRY(fsdp_checkpoint_save(s.c, f->plain, step, 0));
    }
    o.most_bytes = (size_t)1 << 30;
    FSDP_TRY(fsdp_checkpoint_save_with(s.c, f->beside, 3, &o));
    FSDP_TRY(fsdp_checkpoint_save(s.c, f->plain, 3, 0));
    rank_check(beside);
    saved_mini_close(&s);
    if (fsdp_comm_rank(world) == 0) rank_check(same_files(f->plain, f->beside));
    return FSDP_OK;
}

static void test_cap(void **state)
{
    (void)state;
    folders f;
    snprintf(f.plain, sizeof(f.plain), "%s", scratch("plain"));
    snprintf(f.beside, sizeof(f.beside), "%s", scratch("beside"));
    fsdp_log_set(FSDP_LOG_INFO, hear, NULL);
    for (int ranks = 1; ranks < 4; ranks++) {
        said = 0;
        in_corners(capped, &(corners){ .ranks = (const int[]){ ranks, 0 }, .arg = &f, .after = clear, .threads_only = true, .transport = "shm", .device = "cpu" });
        assert_int_equal(said, 1); /* once a run, by rank 0 */
        assert_non_null(strstr(said_text, "step 1 is saved in the foreground: rank 0: its copy would take "));
    }
    fsdp_log_set(FSDP_LOG_INFO, NULL, NULL);
}

typedef struct hungry {
    const char *folder;
    long n;
    int rank;
    _Atomic long made;
} hungry;

/* No memory at any place of it: saved in the background, or in the foreground, or an error on every rank. */
static fsdp_status without_memory(fsdp_comm *world, void *arg)
{
    hungry *h = arg;
    saved_mini s;
    bool beside = false, me = fsdp_comm_rank(world) == h->rank;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ 0 }));
    FSDP_TRY(fsdp_comm_barrier(world));
    if (me) (void)fsdpi_alloc_fail_at(h->n);
    fsdp_status st = fsdp_checkpoint_save_with(s.c, h->folder, 1, &(fsdp_save_opts){ .background = true, .in_background = &beside });
    if (st == FSDP_OK) st = fsdp_checkpoint_wait(s.c);
    if (me) {
        long made = fsdpi_alloc_fail_at(0);
        if (made > h->made) h->made = made;
    }
    rank_check(st == FSDP_OK || st == FSDP_ERR_NOMEM);
    double both[2] = { st, beside };
    FSDP_TRY(fsdp_comm_max(world, both, 2));
    rank_check(both[0] == (double)st && both[1] == (double)beside);
    rank_check(there(in(h->folder, 1)) == (st == FSDP_OK));
    FSDP_TRY(fsdp_checkpoint_save_with(s.c, h->folder, 2, &(fsdp_save_opts){ .background = true }));
    FSDP_TRY(fsdp_checkpoint_wait(s.c));
    FSDP_TRY(fsdp_checkpoint_load(s.c, in(h->folder, 2)));
    saved_mini_close(&s);
    return FSDP_OK;
}

static void test_allocations_that_fail(void **state)
{
    (void)state;
    if (!CAN_FORK) return;
    hungry *h = shared_alloc(sizeof(*h));
    char folder[300];
    snprintf(folder, sizeof(folder), "%s", scratch("hungry"));
    h->folder = folder;
    for (h->rank = 0; h->rank < 2; h->rank++) {
        h->made = 0;
        for (h->n = 0; h->n <= h->made; h->n += h->n < 16 ? 1 : 11) {
            if (fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .threads = 1, .timeout_s = 20 }, without_memory, h) != FSDP_OK)
                fail_msg("allocation %ld of rank %d: %s", h->n, h->rank, fsdp_last_error());
            char command[400];
            snprintf(command, sizeof(command), "rm -rf %s", folder);
            assert_int_equal(system(command), 0);
        }
        assert_true(h->made > 20);
    }
    shared_free(h, sizeof(*h));
}

/* ---- beside other things ---- */

/* Ranks that do different things, and mend it, while a save is written: the save is none of it. */
static fsdp_status reset_meanwhile(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    const folders *f = c->arg;
    saved_mini s;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .device = c->device }));
    FSDP_TRY(fsdp_checkpoint_save_with(s.c, f->beside, 1, &(fsdp_save_opts){ .background = true }));
    if (fsdp_comm_rank(world) == 0) rank_check(fsdp_unit_zero_grad(s.m.unit[0]) == FSDP_OK);
    rank_check(fsdp_comm_barrier(world) == FSDP_ERR_COMM);
    FSDP_TRY(fsdp_comm_reset(world));
    FSDP_TRY(fsdp_checkpoint_wait(s.c));
    FSDP_TRY(saved_mini_disturb(&s, 1));
    FSDP_TRY(fsdp_checkpoint_load(s.c, in(f->beside, 1)));
    rank_check(s.tokens == 5);
    /* two at once, of two checkpoints */
    saved_mini t;
    FSDP_TRY(saved_mini_open(&t, world, &(mini_opts){ .device = c->device }));
    FSDP_TRY(fsdp_checkpoint_save_with(s.c, f->beside, 2, &(fsdp_save_opts){ .background = true }));
    FSDP_TRY(fsdp_checkpoint_save_with(t.c, f->plain, 2, &(fsdp_save_opts){ .background = true }));
    FSDP_TRY(saved_mini_disturb(&s, 1));
    FSDP_TRY(fsdp_checkpoint_wait(t.c));
    FSDP_TRY(fsdp_checkpoint_wait(s.c));
    saved_mini_close(&t);
    saved_mini_close(&s);
    return FSDP_OK;
}

static void test_meanwhile(void **state)
{
    (void)state;
    folders f;
    snprintf(f.plain, sizeof(f.plain), "%s", scratch("other"));
    snprintf(f.beside, sizeof(f.beside), "%s", scratch("beside"));
    fault_write.nap_us = 1000;
    in_corners(reset_meanwhile, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .arg = &f, .after = clear, .device = "cpu" });
    fault_write.nap_us = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_cap),
        cmocka_unit_test(test_allocations_that_fail),
        cmocka_unit_test(test_meanwhile),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
