/* SPDX-License-Identifier: MIT
 *
 * Optimizer state that is not there, since what it is of was never trained: files and dictionaries have the bytes that zeros would give
 * them; a load makes it where it is to be something else, and nowhere else, before anything changes; training goes on from either
 * with the same bits. */
#include "checkpoint/saved_mini.h"
#include "format/scratch.h"

#include "base/alloc.h"
#include "shard/unit.h"

enum { TRUNK = 1 << MINI_A | 1 << MINI_BIG, LEAVES = 12 };

static fsdp_status freeze_trunk(saved_mini *s, bool frozen)
{
    for (int u = 0; u < MINI_UNITS; u++)
        if (TRUNK >> u & 1) FSDP_TRY(mini_freeze(&s->m, u, frozen));
    return FSDP_OK;
}

static bool trunk_has_state(const saved_mini *s)
{
    return fsdp_optim_has_state(s->m.optim, s->m.unit[MINI_A]) || fsdp_optim_has_state(s->m.optim, s->m.unit[MINI_BIG]);
}

/* ---- the same bytes as of zeros ---- */

static bool same_files(const char *a, const char *b)
{
    char command[1500];
    snprintf(command, sizeof(command), "diff -r %s %s >/dev/null", a, b);
    return system(command) == 0;
}

static bool same_dictionaries(saved_mini *a, saved_mini *b, fsdp_state_opts o)
{
    fsdp_state *x = NULL, *y = NULL;
    bool same = fsdp_state_read(&x, a->c, &o) == FSDP_OK && fsdp_state_read(&y, b->c, &o) == FSDP_OK && same_state(x, y);
    fsdp_state_destroy(x);
    fsdp_state_destroy(y);
    return same;
}

/* Of one the trunk was frozen before the optimizer was made; the other has zeros. */
static fsdp_status both_ways(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    char folder[3][300];
    saved_mini without, zeros;
    for (int i = 0; i < 3; i++) snprintf(folder[i], sizeof(folder[i]), "%s/%d", (const char *)c->arg, i);
    FSDP_TRY(saved_mini_open(&without, world, &(mini_opts){ .mode = c->mode, .device = c->device, .frozen = TRUNK }));
    FSDP_TRY(saved_mini_open(&zeros, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(freeze_trunk(&zeros, true));
    rank_check(!trunk_has_state(&without) && trunk_has_state(&zeros));
    for (int64_t step = 0; step < 3; step++) {
        rank_check(same_dictionaries(&without, &zeros, (fsdp_state_opts){ .kind = FSDP_STATE_FULL, .rank0_only = step == 1 }));
        rank_check(same_dictionaries(&without, &zeros, (fsdp_state_opts){ .kind = FSDP_STATE_SHARDED }));
        rank_check(same_dictionaries(&without, &zeros, (fsdp_state_opts){ .kind = FSDP_STATE_LOCAL }));
        FSDP_TRY(fsdp_checkpoint_save(without.c, folder[0], step, 0));
        FSDP_TRY(fsdp_checkpoint_save(zeros.c, folder[1], step, 0));
        FSDP_TRY(fsdp_checkpoint_save_with(without.c, folder[2], step, &(fsdp_save_opts){ .background = true }));
        FSDP_TRY(mini_step(&without.m, MINI_NESTED, step, LEAVES));
        FSDP_TRY(mini_step(&zeros.m, MINI_NESTED, step, LEAVES));
        FSDP_TRY(fsdp_checkpoint_wait(without.c));
    }
    rank_check(!trunk_has_state(&without));
    saved_mini_close(&without);
    saved_mini_close(&zeros);
    FSDP_TRY(fsdp_comm_barrier(world));
    rank_check(same_files(folder[0], folder[1]) && same_files(folder[0], folder[2]));
    return fsdp_comm_barrier(world);
}

static void clear(const corner *c)
{
    char command[600];
    snprintf(command, sizeof(command), "rm -rf %s/*", (const char *)c->arg);
    assert_int_equal(system(command), 0);
}

static void test_same_bytes_as_zeros(void **state)
{
    (void)state;
    char folder[300];
    snprintf(folder, sizeof(folder), "%s", scratch("bytes"));
    assert_int_equal(mkdir(folder, 0700), 0);
    const corners on_host = { .ranks = (const int[]){ 1, 3, 0 }, .arg = folder, .after = clear, .all_modes = true, .threads_only = true, .device = "cpu" };
    in_corners(both_ways, &on_host);
    in_corners(both_ways, &(corners){ .ranks = (const int[]){ 2, 0 }, .arg = folder, .after = clear, .threads_only = true, .device = "guard" });
}

/* ---- loads ---- */

typedef struct handed {
    fsdp_mode mode;
    const char *device;
    bool trained; /* the trunk was, before it was frozen: there is state other than 0 */
    bool by_folder, frozen;
    char folder[300];
    fsdp_state *full;
    float next[1024]; /* parameters after the step after, in which the trunk trains */
} handed;

static fsdp_status hand_out(fsdp_comm *world, void *arg)
{
    handed *h = arg;
    saved_mini s;
    fsdp_state *full;
    static _Thread_local float next[1024];
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = h->mode, .frozen = h->trained ? 0 : TRUNK }));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 0, LEAVES));
    FSDP_TRY(freeze_trunk(&s, true));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 1, LEAVES));
    FSDP_TRY(fsdp_checkpoint_save(s.c, h->folder, 1, 0));
    FSDP_TRY(fsdp_state_read(&full, s.c, NULL));
    rank_check(trunk_has_state(&s) == h->trained);
    FSDP_TRY(freeze_trunk(&s, false));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 2, LEAVES));
    FSDP_TRY(mini_read(&s.m, next));
    if (fsdp_comm_rank(world) == 0) {
        h->full = full;
        memcpy(h->next, next, sizeof(next));
    } else {
        fsdp_state_destroy(full);
    }
    saved_mini_close(&s);
    return FSDP_OK;
}

static fsdp_status load(saved_mini *s, const handed *h)
{
    char path[400];
    snprintf(path, sizeof(path), "%s/step-00000001", h->folder);
    if (h->by_folder) return fsdp_checkpoint_load(s->c, path);
    return fsdp_state_load(s->c, fsdp_comm_rank(s->m.comm) == 0 ? h->full : NULL, NULL); /* the others have nothing */
}

static fsdp_status take_in(fsdp_comm *world, void *arg)
{
    handed *h = arg;
    saved_mini s;
    fsdp_state *full;
    static _Thread_local float next[1024];
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = h->mode, .device = h->device, .frozen = h->frozen ? TRUNK : 0 }));
    for (int round = 0; round < 2; round++) { /* before the first step, and after one */
        FSDP_TRY(load(&s, h));
        FSDP_TRY(fsdp_state_read(&full, s.c, NULL));
        rank_check(same_state(h->full, full));
        fsdp_state_destroy(full);
        bool anywhere = trunk_has_state(&s);
        if (h->frozen && !h->trained) rank_check(!anywhere);
        if (h->trained && fsdp_unit_slice_numel(s.m.unit[MINI_BIG]) > 64) rank_check(anywhere);
        FSDP_TRY(saved_mini_disturb(&s, 7 + round));
    }
    FSDP_TRY(load(&s, h));
    FSDP_TRY(freeze_trunk(&s, false));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 2, LEAVES));
    FSDP_TRY(mini_read(&s.m, next));
    rank_check(memcmp(next, h->next, (size_t)mini_numel() * sizeof(float)) == 0);
    saved_mini_close(&s);
    return FSDP_OK;
}

static void on_threads(int ranks, fsdp_rank_fn fn, handed *h)
{
    fsdp_launch_opts o = { .ranks = ranks, .ranks_are_threads = true, .threads = 1, .timeout_s = 20 };
    if (fsdp_launch(&o, fn, h) != FSDP_OK)
        fail_msg("%d ranks, mode %s, trunk trained %d, by folder %d, frozen %d: %s", ranks, fsdp_mode_name(h->mode), h->trained, h->by_folder, h->frozen,
                 fsdp_last_error());
}

static void test_loaded_anywhere(void **state)
{
    (void)state;
    static const int from[] = { 1, 3, 2 }, to[] = { 2, 1, 3, 4 };
    handed h = { .mode = FSDP_MODE_FULL };
    for (int i = 0, n = 0; i < 6; i++) {
        h.trained = i % 2;
        h.mode = (fsdp_mode)(i % 4);
        snprintf(h.folder, sizeof(h.folder), "%s-%d", scratch("loads"), i);
        on_threads(from[i / 2], hand_out, &h);
        for (int k = 0; k < 8; k++, n++) {
            h.by_folder = k & 1;
            h.frozen = k >> 1 & 1;
            h.mode = (fsdp_mode)(n / 3 % 4);
            h.device = n % 5 == 0 ? "guard" : "cpu";
            on_threads(to[n % 4], take_in, &h);
        }
        fsdp_state_destroy(h.full);
    }
}

/* ---- no memory for it, on one rank ---- */

/* What a load needs for state is taken before anything is set: a rank that has none refuses it for all, and nothing has changed. */
static fsdp_status starved(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    saved_mini from;
    fsdp_state *full;
    int refused[2] = { 0 };
    char path[400];
    FSDP_TRY(saved_mini_open(&from, world, &(mini_opts){ .mode = c->mode }));
    for (int step = 0; step < 2; step++) FSDP_TRY(mini_step(&from.m, MINI_NESTED, step, LEAVES));
    FSDP_TRY(fsdp_state_read(&full, from.c, NULL));
    FSDP_TRY(fsdp_checkpoint_save(from.c, c->arg, 1, 0));
    snprintf(path, sizeof(path), "%s/step-00000001", (const char *)c->arg);
    double hit = 1;
    for (int n = 1; hit > 0; n++)
        for (int by_folder = 0; by_folder < 2; by_folder++) {
            saved_mini to;
            fsdp_state *before, *after;
            FSDP_TRY(saved_mini_open(&to, world, &(mini_opts){ .mode = c->mode, .frozen = TRUNK }));
            FSDP_TRY(fsdp_state_read(&before, to.c, NULL));
            fsdpi_arena_trim(to.m.unit[0]->store->arena);
            if (fsdp_comm_rank(world) == 1) fsdpi_alloc_fail_at(n);
            fsdp_status st = by_folder ? fsdp_checkpoint_load(to.c, path) : fsdp_state_load(to.c, full, NULL);
            double mine = fsdpi_alloc_fail_at(0) >= n && fsdp_comm_rank(world) == 1;
            const char *said = fsdp_last_error_message();
            bool state = st != FSDP_OK && strstr(said, "rank 1: no memory for the optimizer's state of unit \"") != NULL;
            if (st != FSDP_OK && st != FSDP_ERR_NOMEM) return st;
            refused[by_folder] += state;
            FSDP_TRY(fsdp_state_read(&after, to.c, NULL));
            if (st == FSDP_OK) rank_check(same_state(full, after));
            else if (state) rank_check(same_state(before, after));
            fsdp_state_destroy(before);
            fsdp_state_destroy(after);
            saved_mini_close(&to);
            hit = (by_folder ? hit : 0) + mine;
            FSDP_TRY(fsdp_comm_max(world, &hit, 1));
        }
    rank_check(refused[0] >= 2 && refused[1] >= 2);
    fsdp_state_destroy(full);
    saved_mini_close(&from);
    return FSDP_OK;
}

static void test_no_memory_on_one_rank(void **state)
{
    (void)state;
    char folder[300];
    snprintf(folder, sizeof(folder), "%s", scratch("starved"));
    in_corners(starved, &(corners){ .ranks = (const int[]){ 3, 0 }, .arg = folder, .processes_only = true, .device = "cpu" });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bytes_as_zeros),
        cmocka_unit_test(test_loaded_anywhere),
        cmocka_unit_test(test_no_memory_on_one_rank),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
