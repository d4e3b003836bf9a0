/* SPDX-License-Identifier: MIT
 *
 * What does not fit: every missing, unexpected, mis-shaped and wrong-typed name in one message, the same on all ranks, and nothing
 * has changed; or, where that is asked for, what fits is loaded and the rest reported. Second names, changed names, files of other
 * programs. No memory, on one rank, at any allocation. */
#include "checkpoint/saved_mini.h"
#include "format/scratch.h"

#include "base/alloc.h"

#include <fsdp/safetensors.h>

#include <math.h>

/* ---- one message, on every rank ---- */

static fsdp_status add(fsdp_state *s, const char *name, fsdp_dtype type, int ndim, int64_t a, int64_t b)
{
    static const char zeros[4096];
    int64_t numel = ndim > 0 ? a * (ndim > 1 ? b : 1) : 1;
    return fsdp_state_add(s, &(fsdp_state_tensor){ .name = name, .dtype = type, .ndim = ndim, .shape = { a, b }, .count = numel, .data = (void *)(uintptr_t)zeros });
}

/* The parts of the mini network's dictionary that fit, and one of each that does not. */
static fsdp_status wrong_one(fsdp_state *s)
{
    fsdp_state_remove(s, "a.w");
    fsdp_state_remove(s, "optim.exp_avg.b.b");
    fsdp_state_remove(s, "tokens");
    fsdp_state_remove(s, "root.w");
    FSDP_TRY(add(s, "root.w", FSDP_F32, 2, 3, 5)); /* the other way round */
    fsdp_state_remove(s, "b.b");
    FSDP_TRY(add(s, "b.b", FSDP_BF16, 1, 6, 0));
    fsdp_state_remove(s, "seen");
    FSDP_TRY(add(s, "seen", FSDP_I64, 1, 5, 0));
    return add(s, "head.weight", FSDP_F32, 1, 3, 0);
}

static fsdp_status listed(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    saved_mini s;
    fsdp_state *before, *wrong, *after;
    fsdp_load_report report = { .loaded = -1 };
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 0, 6));
    FSDP_TRY(fsdp_state_read(&wrong, s.c, NULL));
    FSDP_TRY(wrong_one(wrong));
    FSDP_TRY(saved_mini_disturb(&s, 1));
    FSDP_TRY(fsdp_state_read(&before, s.c, NULL));
    rank_check(fsdp_state_load(s.c, wrong, &(fsdp_load_opts){ .report = &report }) == FSDP_ERR_FORMAT);
    const char *m = fsdp_last_error_message();
    static const char *const all[] = { "missing: \"a.w\", \"optim.exp_avg.b.b\"", "\"tokens\"", "unexpected: \"head.weight\"", "of another shape: \"root.w\" is [3, 5] there and [5, 3] here",
                                       "of another type: \"b.b\" is BF16 there and F32 here", "\"seen\" is I64 there and I32 here" };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        FSDP_FAIL_IF(strstr(m, all[i]) == NULL, FSDP_ERR_INTERNAL, "%s is not in: %s", all[i], m);
    rank_check(strstr(m, "rank ") == NULL && report.loaded == -1);
    FSDP_TRY(fsdp_state_read(&after, s.c, NULL));
    rank_check(same_state(before, after));
    fsdp_state_destroy(after);
    /* what fits is loaded, and the rest is as it was */
    FSDP_TRY(fsdp_state_load(s.c, wrong, &(fsdp_load_opts){ .partial = true, .report = &report }));
    rank_check(report.missing == 3 && report.unexpected == 1 && report.shape == 1 && report.dtype == 2);
    rank_check(report.loaded == 10 * 3 + 10 + 3 - 6 && strstr(report.text, "head.weight") != NULL);
    FSDP_TRY(fsdp_state_read(&after, s.c, NULL));
    for (int i = 0; i < fsdp_state_count(after); i++) {
        const fsdp_state_tensor *t = fsdp_state_at(after, i);
        static const char *const stay[] = { "a.w", "optim.exp_avg.b.b", "root.w", "b.b", "seen" };
        bool stays = false;
        for (int k = 0; k < 5; k++) stays |= strcmp(t->name, stay[k]) == 0;
        const fsdp_state_tensor *like = fsdp_state_find(stays ? before : wrong, t->name);
        rank_check(t->count == 0 || memcmp(t->data, like->data, (size_t)t->count * fsdp_dtype_bytes(t->dtype)) == 0);
    }
    fsdp_state_destroy(after);
    /* kinds: the parameters alone, of which only those count */
    rank_check(fsdp_state_load(s.c, wrong, &(fsdp_load_opts){ .which = FSDP_STATE_PARAMS }) == FSDP_ERR_FORMAT && strstr(fsdp_last_error_message(), "exp_avg") == NULL);
    FSDP_TRY(fsdp_state_load(s.c, wrong, &(fsdp_load_opts){ .which = FSDP_STATE_VALUES, .partial = true, .report = &report }));
    rank_check(report.loaded == 1 && report.missing == 1); /* "best"; steps are the optimizer's */
    rank_check(fsdp_state_load(s.c, wrong, &(fsdp_load_opts){ .which = 64 }) == FSDP_ERR_INVALID);
    fsdp_state_destroy(before);
    fsdp_state_destroy(wrong);
    saved_mini_close(&s);
    return FSDP_OK;
}

static void test_listed_once(void **state)
{
    (void)state;
    in_corners(listed, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true });
    in_corners(listed, &(corners){ .ranks = (const int[]){ 2, 0 }, .processes_only = true });
}

/* A long list is cut, and says how much is left out. */
static void test_long_lists(void **state)
{
    (void)state;
    fsdp_comm *comm;
    fsdp_checkpoint *c;
    fsdp_state *s;
    int64_t x;
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(fsdp_checkpoint_create(&c, comm));
    assert_ok(fsdp_state_create(&s));
    char name[300];
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof(name), "a.rather.long.name.of.a.number.%d", i);
        assert_ok(fsdp_checkpoint_add_i64(c, name, &x));
    }
    assert_int_equal(fsdp_state_load(c, s, NULL), FSDP_ERR_FORMAT);
    assert_non_null(strstr(fsdp_last_error_message(), "number.0\", \"a.rather.long.name.of.a.number.1\""));
    int more;
    const char *and = strstr(fsdp_last_error_message(), ", and ");
    assert_non_null(and);
    assert_int_equal(sscanf(and, ", and %d more", &more), 1);
    assert_in_range(more, 30, 38);
    fsdp_checkpoint_destroy(c);
    /* even one name may be too long */
    assert_ok(fsdp_checkpoint_create(&c, comm));
    memset(name, 'n', 290);
    name[290] = '\0';
    assert_ok(fsdp_checkpoint_add_i64(c, name, &x));
    assert_fails(fsdp_state_load(c, s, NULL), FSDP_ERR_FORMAT, "missing: \"nnn");
    fsdp_checkpoint_destroy(c);
    fsdp_state_destroy(s);
    fsdp_comm_destroy(comm);
}

/* ---- what ranks give ---- */

static fsdp_status ranks_differ(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    saved_mini s;
    fsdp_state *full, *local, *before, *after;
    bool last = fsdp_comm_rank(world) == fsdp_comm_size(world) - 1;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(fsdp_state_read(&full, s.c, NULL));
    FSDP_TRY(fsdp_state_read(&local, s.c, &(fsdp_state_opts){ .kind = FSDP_STATE_LOCAL }));
    FSDP_TRY(saved_mini_disturb(&s, 1));
    FSDP_TRY(fsdp_state_read(&before, s.c, NULL));
    rank_check(fsdp_state_load(s.c, NULL, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "no rank has a dictionary") != NULL);
    /* other values of a whole tensor on one rank */
    float *w = fsdp_state_find(full, "big.w")->data;
    if (last) w[100] += 1;
    rank_check(fsdp_state_load(s.c, full, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "different values of \"big.w\"") != NULL);
    if (last) w[100] -= 1;
    /* other names on one rank; rank 0's hold for those that have none */
    if (last) FSDP_TRY(add(full, "more", FSDP_F32, 1, 2, 0));
    rank_check(fsdp_state_load(s.c, full, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "other names") != NULL);
    if (last) rank_check(fsdp_state_remove(full, "more") == 1);
    /* elements that nobody has */
    if (!last) fsdp_state_remove(local, "tokens"); /* (names must be alike all the same) */
    rank_check(fsdp_state_load(s.c, local, NULL) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_state_read(&after, s.c, NULL));
    rank_check(same_state(before, after));
    FSDP_TRY(fsdp_state_load(s.c, last ? full : NULL, NULL));
    fsdp_state_destroy(after);
    FSDP_TRY(fsdp_state_read(&after, s.c, NULL));
    rank_check(same_state(full, after));
    fsdp_state_destroy(full);
    fsdp_state_destroy(local);
    fsdp_state_destroy(before);
    fsdp_state_destroy(after);
    saved_mini_close(&s);
    return FSDP_OK;
}

static void test_ranks_differ(void **state)
{
    (void)state;
    in_corners(ranks_differ, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true, .threads_only = true, .device = "cpu" });
}

typedef struct lost {
    fsdp_state *of[3];
} lost;

static fsdp_status read_each(fsdp_comm *world, void *arg)
{
    lost *l = arg;
    saved_mini s;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ 0 }));
    FSDP_TRY(fsdp_state_read(&l->of[fsdp_comm_rank(world)], s.c, &(fsdp_state_opts){ .kind = fsdp_comm_size(world) == 3 ? FSDP_STATE_SHARDED : FSDP_STATE_LOCAL }));
    saved_mini_close(&s);
    return FSDP_OK;
}

/* Two of three pieces; and a local one that is not of these ranks. */
static fsdp_status load_two_of_three(fsdp_comm *world, void *arg)
{
    lost *l = arg;
    saved_mini s;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ 0 }));
    FSDP_TRY(saved_mini_disturb(&s, 1));
    fsdp_status st = fsdp_state_load(s.c, l->of[fsdp_comm_rank(world)], NULL);
    rank_check(st == FSDP_ERR_INVALID);
    bool local = fsdp_state_get_kind(l->of[0]) == FSDP_STATE_LOCAL;
    FSDP_FAIL_IF(strstr(fsdp_last_error_message(), local ? "a local dictionary is of the ranks" : "is in no rank's dictionary") == NULL, FSDP_ERR_INTERNAL, "%s", fsdp_last_error_message());
    saved_mini_close(&s);
    return FSDP_OK;
}

static void threads(int ranks, fsdp_rank_fn fn, void *arg)
{
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = ranks, .ranks_are_threads = true, .threads = 1, .timeout_s = 20 }, fn, arg));
}

static void test_pieces_that_are_missing(void **state)
{
    (void)state;
    lost l = { 0 };
    threads(3, read_each, &l);
    threads(2, load_two_of_three, &l);
    for (int i = 0; i < 3; i++) fsdp_state_destroy(l.of[i]);
    l = (lost){ 0 };
    threads(2, read_each, &l);
    threads(1, load_two_of_three, &l);
    for (int i = 0; i < 2; i++) fsdp_state_destroy(l.of[i]);
}

/* ---- one rank's: types, second names, other names, files ---- */

static fsdp_comm *comm;
static fsdp_unit *unit;
static fsdp_checkpoint *c;

static void value(const char *name, int64_t i, float *out, void *arg)
{
    (void)name;
    *out = (float)i + *(float *)arg;
}

static void set(float base)
{
    assert_ok(fsdp_unit_init(unit, value, &base));
}

static float get(int i)
{
    float x[12];
    assert_ok(fsdp_unit_read_param(unit, i, x));
    return x[0];
}

static int set_up(void **state)
{
    (void)state;
    static const fsdp_param params[] = { { "wte", 2, { 3, 4 } }, { "b", 1, { 5 } } };
    if (fsdp_comm_create_self(&comm) != FSDP_OK || fsdp_unit_create(&unit, comm, params, 2, &(fsdp_unit_opts){ .name = "u" }) != FSDP_OK) return -1;
    if (fsdp_checkpoint_create(&c, comm) != FSDP_OK || fsdp_checkpoint_add_param(c, "wte", unit, 0) != FSDP_OK) return -1;
    return fsdp_checkpoint_add_param(c, "b", unit, 1) == FSDP_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    fsdp_checkpoint_destroy(c);
    fsdp_unit_destroy(unit);
    fsdp_comm_destroy(comm);
    return 0;
}

static void test_types(void **state)
{
    (void)state;
    fsdp_state *s;
    uint16_t bf[12], h[5];
    double d[5];
    for (int i = 0; i < 12; i++) bf[i] = fsdp_bf16_from_f32((float)i + 0.5f);
    for (int i = 0; i < 5; i++) {
        h[i] = fsdp_f16_from_f32((float)i * 3);
        d[i] = i * 1e-3;
    }
    assert_ok(fsdp_state_create(&s));
    assert_ok(fsdp_state_add(s, &(fsdp_state_tensor){ .name = "wte", .dtype = FSDP_BF16, .ndim = 2, .shape = { 3, 4 }, .count = 12, .data = bf }));
    assert_ok(fsdp_state_add(s, &(fsdp_state_tensor){ .name = "b", .dtype = FSDP_F16, .ndim = 1, .shape = { 5 }, .count = 5, .data = h }));
    set(100);
    assert_fails(fsdp_state_load(c, s, NULL), FSDP_ERR_FORMAT, "\"wte\" is BF16 there and F32 here, \"b\" is F16 there");
    assert_true(get(0) == 100);
    assert_ok(fsdp_state_load(c, s, &(fsdp_load_opts){ .cast = true }));
    float x[12];
    assert_ok(fsdp_unit_read_param(unit, 0, x));
    assert_true(x[0] == 0.5f && x[11] == 11.5f);
    assert_ok(fsdp_unit_read_param(unit, 1, x));
    assert_true(x[4] == 12);
    fsdp_state_remove(s, "b");
    assert_ok(fsdp_state_add(s, &(fsdp_state_tensor){ .name = "b", .dtype = FSDP_F64, .ndim = 1, .shape = { 5 }, .count = 5, .data = d }));
    assert_ok(fsdp_state_load(c, s, &(fsdp_load_opts){ .cast = true }));
    assert_ok(fsdp_unit_read_param(unit, 1, x));
    assert_true(x[4] == (float)4e-3);
    fsdp_state_remove(s, "b");
    assert_ok(add(s, "b", FSDP_I32, 1, 5, 0)); /* no float: not even so */
    assert_fails(fsdp_state_load(c, s, &(fsdp_load_opts){ .cast = true }), FSDP_ERR_FORMAT, "\"b\" is I32");
    fsdp_state_destroy(s);
}

/* A tied weight is there once, and found and loaded under either name; two that differ are no tie. */
static void test_second_names(void **state)
{
    (void)state;
    fsdp_state *s, *other;
    fsdp_checkpoint_reader *r;
    float x[12] = { 4 };
    assert_fails(fsdp_checkpoint_add_alias(c, "head", "nothing"), FSDP_ERR_INVALID, "\"nothing\"");
    assert_fails(fsdp_checkpoint_add_alias(c, "b", "wte"), FSDP_ERR_INVALID, "registered twice");
    assert_ok(fsdp_checkpoint_add_alias(c, "head", "wte"));
    assert_fails(fsdp_checkpoint_add_alias(c, "more", "head"), FSDP_ERR_INVALID, "\"head\"");
    set(1);
    assert_ok(fsdp_state_read(&s, c, NULL));
    assert_int_equal(fsdp_state_count(s), 2);
    assert_ptr_equal(fsdp_state_find(s, "head"), fsdp_state_find(s, "wte"));
    set(2);
    assert_ok(fsdp_state_load(c, s, NULL));
    assert_true(get(0) == 1);
    /* under the other name; by a program that does not know the tie, and has it twice, the same; and not the same */
    assert_ok(fsdp_state_create(&other));
    assert_ok(fsdp_state_add(other, &(fsdp_state_tensor){ .name = "head", .ndim = 2, .shape = { 3, 4 }, .count = 12, .data = x }));
    assert_ok(add(other, "b", FSDP_F32, 1, 5, 0));
    assert_ok(fsdp_state_load(c, other, NULL));
    assert_true(get(0) == 4);
    assert_ok(fsdp_state_add(other, &(fsdp_state_tensor){ .name = "wte", .ndim = 2, .shape = { 3, 4 }, .count = 12, .data = x }));
    assert_ok(fsdp_state_load(c, other, NULL));
    ((float *)fsdp_state_find(other, "wte")->data)[11] = -1;
    assert_fails(fsdp_state_load(c, other, NULL), FSDP_ERR_FORMAT, "\"wte\" and \"head\" with different values");
    fsdp_state_destroy(other);
    /* a model that knows it as "head" alone */
    fsdp_checkpoint *d;
    assert_ok(fsdp_checkpoint_create(&d, comm));
    assert_ok(fsdp_checkpoint_add_param(d, "head", unit, 0));
    assert_ok(fsdp_checkpoint_add_param(d, "b", unit, 1));
    assert_ok(fsdp_state_load(d, s, NULL));
    assert_true(get(0) == 1);
    /* the same of folders */
    set(6);
    assert_ok(fsdp_checkpoint_save(c, scratch("tied"), 1, 0));
    assert_ok(fsdp_checkpoint_reader_open(&r, scratch("tied/step-00000001")));
    assert_int_equal(fsdp_checkpoint_reader_count(r), 2);
    assert_ptr_equal(fsdp_checkpoint_reader_find(r, "head"), fsdp_checkpoint_reader_find(r, "wte"));
    assert_ok(fsdp_checkpoint_reader_read(r, "head", 0, 12, x));
    assert_true(x[0] == 6);
    fsdp_checkpoint_reader_close(r);
    set(7);
    assert_ok(fsdp_checkpoint_load(c, scratch("tied/step-00000001")));
    assert_true(get(0) == 6);
    set(8);
    assert_ok(fsdp_checkpoint_load(d, scratch("tied/step-00000001")));
    assert_true(get(0) == 6);
    assert_ok(fsdp_checkpoint_save(d, scratch("tied"), 2, 0)); /* there it is "head" alone */
    assert_ok(fsdp_checkpoint_load(c, scratch("tied/step-00000002")));
    fsdp_checkpoint_destroy(d);
    static const fsdp_param two[] = { { "wte", 2, { 3, 4 } }, { "head", 2, { 3, 4 } }, { "b", 1, { 5 } } };
    fsdp_unit *untied;
    float base = 3;
    assert_ok(fsdp_unit_create(&untied, comm, two, 3, NULL));
    assert_ok(fsdp_unit_init(untied, value, &base));
    assert_ok(fsdp_checkpoint_create(&d, comm));
    for (int i = 0; i < 3; i++) assert_ok(fsdp_checkpoint_add_param(d, two[i].name, untied, i));
    assert_ok(fsdp_checkpoint_save(d, scratch("tied"), 3, 0));
    assert_ok(fsdp_checkpoint_load(c, scratch("tied/step-00000003")));
    assert_true(get(0) == 3);
    assert_ok(fsdp_unit_summon_begin(untied, &(fsdp_unit_summon_opts){ .writeback = true }));
    fsdp_unit_summoned(untied, 1)[3] = 99;
    assert_ok(fsdp_unit_summon_end(untied));
    assert_ok(fsdp_checkpoint_save(d, scratch("tied"), 4, 0));
    assert_fails(fsdp_checkpoint_load(c, scratch("tied/step-00000004")), FSDP_ERR_FORMAT, "\"wte\" and \"head\" with different values");
    fsdp_checkpoint_destroy(d);
    fsdp_unit_destroy(untied);
    fsdp_state_destroy(s);
}

/* Folders list what does not fit, as dictionaries do, and load in part. */
static void test_folders_that_do_not_fit(void **state)
{
    (void)state;
    static const fsdp_param params[] = { { "wte", 2, { 3, 4 } }, { "b", 1, { 6 } }, { "more", 1, { 2 } } };
    fsdp_unit *u;
    fsdp_checkpoint *d;
    fsdp_load_report report;
    float base = 50, x[12];
    set(1);
    assert_ok(fsdp_checkpoint_save(c, scratch("part"), 1, 0));
    assert_ok(fsdp_unit_create(&u, comm, params, 3, NULL));
    assert_ok(fsdp_unit_init(u, value, &base));
    assert_ok(fsdp_checkpoint_create(&d, comm));
    assert_ok(fsdp_checkpoint_add_param(d, "wte", u, 0));
    assert_ok(fsdp_checkpoint_add_param(d, "b", u, 1));
    assert_ok(fsdp_checkpoint_add_param(d, "more", u, 2));
    assert_fails(fsdp_checkpoint_load(d, scratch("part/step-00000001")), FSDP_ERR_FORMAT, "missing: \"more\"; of another shape: \"b\" is [5] there and [6] here");
    assert_ok(fsdp_checkpoint_load_with(d, scratch("part/step-00000001"), &(fsdp_load_opts){ .partial = true, .report = &report }));
    assert_true(report.loaded == 1 && report.missing == 1 && report.shape == 1 && report.unexpected == 0);
    assert_ok(fsdp_unit_read_param(u, 0, x));
    assert_true(x[0] == 1 && x[11] == 12);
    assert_ok(fsdp_unit_read_param(u, 1, x));
    assert_true(x[0] == 50);
    /* the other way round: what is there and not wanted */
    assert_ok(fsdp_checkpoint_save(d, scratch("part"), 2, 0));
    assert_fails(fsdp_checkpoint_load(c, scratch("part/step-00000002")), FSDP_ERR_FORMAT, "unexpected: \"more\"; of another shape: \"b\" is [6] there");
    assert_true(get(1) == 1);
    assert_fails(fsdp_checkpoint_load_with(c, scratch("part/step-00000002"), &(fsdp_load_opts){ .which = 99 }), FSDP_ERR_INVALID, "no such kinds");
    assert_fails(fsdp_checkpoint_load(c, NULL), FSDP_ERR_INVALID, "no path");
    fsdp_checkpoint_destroy(d);
    fsdp_unit_destroy(u);
}

static void test_names(void **state)
{
    (void)state;
    fsdp_state *s;
    int n, i;
    int64_t steps;
    double d;
    assert_ok(fsdp_state_create(&s));
    assert_ok(add(s, "module.a", FSDP_F32, 1, 2, 0));
    assert_ok(add(s, "module.b", FSDP_F32, 1, 2, 0));
    assert_ok(add(s, "optim.exp_avg.module.a", FSDP_F32, 1, 2, 0));
    assert_ok(add(s, "ema.module.a", FSDP_F32, 1, 2, 0));
    assert_ok(fsdp_state_add_i64(s, "optim.steps.module.a", 9));
    assert_ok(fsdp_state_add_f64(s, "best", -(double)INFINITY));
    assert_ok(fsdp_state_rename(s, "module.*", "*", &n));
    assert_int_equal(n, 5);
    assert_non_null(fsdp_state_find(s, "a"));
    assert_non_null(fsdp_state_find(s, "ema.a"));
    assert_non_null(fsdp_state_find(s, "optim.exp_avg.a"));
    assert_ok(fsdp_state_i64(s, "optim.steps.a", &steps));
    assert_int_equal(steps, 9);
    assert_ok(fsdp_state_f64(s, "best", &d));
    assert_true(d == -(double)INFINITY);
    assert_ok(fsdp_state_rename(s, "a", "trunk.a", NULL));
    assert_non_null(fsdp_state_find(s, "optim.exp_avg.trunk.a"));
    assert_ok(fsdp_state_rename(s, "nobody", "else", &n));
    assert_int_equal(n, 0);
    assert_fails(fsdp_state_rename(s, "b", "trunk.a", NULL), FSDP_ERR_INVALID, "\"trunk.a\", which is there already");
    assert_fails(fsdp_state_rename(s, "b*", "c", NULL), FSDP_ERR_INVALID, "end with *");
    assert_fails(fsdp_state_rename(s, "", "c", NULL), FSDP_ERR_INVALID, "two names");
    assert_fails(fsdp_state_rename(s, "b", "caf\xe9", NULL), FSDP_ERR_INVALID, "UTF-8");
    assert_non_null(fsdp_state_find(s, "b"));
    /* what cannot be added */
    assert_fails(add(s, "b", FSDP_F32, 1, 2, 0), FSDP_ERR_INVALID, "share element 0");
    assert_fails(add(s, "b", FSDP_F32, 1, 3, 0), FSDP_ERR_INVALID, "different types or shapes");
    assert_fails(add(s, "best", FSDP_F32, 1, 3, 0), FSDP_ERR_INVALID, "already");
    assert_fails(add(s, "", FSDP_F32, 1, 3, 0), FSDP_ERR_INVALID, "no name");
    assert_fails(add(s, "caf\xe9", FSDP_F32, 1, 3, 0), FSDP_ERR_INVALID, "UTF-8");
    assert_fails(add(s, "x", (fsdp_dtype)99, 1, 3, 0), FSDP_ERR_INVALID, "no type");
    assert_fails(fsdp_state_add(s, &(fsdp_state_tensor){ .name = "x", .ndim = 1, .shape = { 3 }, .first = 2, .count = 2, .data = &d }), FSDP_ERR_INVALID, "has 3 elements, not 2 from number 2");
    assert_fails(fsdp_state_add(s, &(fsdp_state_tensor){ .name = "x", .ndim = 1, .shape = { 3 }, .count = 2 }), FSDP_ERR_INVALID, "no data");
    assert_fails(fsdp_state_add_i64(s, "b", 1), FSDP_ERR_INVALID, "already");
    assert_fails(fsdp_state_i64(s, "b", &steps), FSDP_ERR_INVALID, "no integer");
    assert_int_equal(fsdp_state_remove(s, "optim.*"), 2);
    assert_int_equal(fsdp_state_remove(s, "nobody"), 0);
    i = fsdp_state_count(s);
    assert_int_equal(i, 3);
    assert_fails(fsdp_state_read(&s, c, &(fsdp_state_opts){ .kind = FSDP_STATE_SHARDED, .rank0_only = true }), FSDP_ERR_INVALID, "rank0_only");
    assert_fails(fsdp_state_read(&s, c, &(fsdp_state_opts){ .kind = (fsdp_state_kind)7 }), FSDP_ERR_INVALID, "kind 7");
    fsdp_state_destroy(s);
}

static void test_files(void **state)
{
    (void)state;
    fsdp_state *s, *back;
    char *path = strdup(scratch("whole.safetensors"));
    double best = (double)NAN, d;
    assert_ok(fsdp_checkpoint_add_f64(c, "best", &best));
    assert_ok(fsdp_checkpoint_add_alias(c, "head", "wte"));
    set(1);
    assert_ok(fsdp_state_read(&s, c, NULL));
    assert_ok(fsdp_state_write_file(s, path));
    assert_ok(fsdp_state_read_file(&back, path));
    assert_true(fsdp_state_get_kind(back) == FSDP_STATE_FULL && fsdp_state_count(back) == 2);
    assert_ptr_equal(fsdp_state_find(back, "head"), fsdp_state_find(back, "wte"));
    assert_ok(fsdp_state_f64(back, "best", &d));
    assert_true(isnan(d));
    set(2);
    best = 0;
    assert_ok(fsdp_state_load(c, back, NULL));
    assert_true(get(0) == 1 && isnan(best));
    fsdp_state_destroy(back);
    /* by another program, with neither numbers nor second names */
    fsdp_safetensors_writer *w;
    const fsdp_safetensors_decl decl[] = { { "model.wte", FSDP_F32, 2, (int64_t[]){ 3, 4 } }, { "model.b", FSDP_F32, 1, (int64_t[]){ 5 } } };
    const float x[12] = { 8, 9 };
    assert_ok(fsdp_safetensors_writer_open(&w, path, decl, 2, NULL, 0));
    assert_ok(fsdp_safetensors_writer_write_f32(w, 0, 0, 12, x));
    assert_ok(fsdp_safetensors_writer_write_f32(w, 1, 0, 5, x));
    assert_ok(fsdp_safetensors_writer_finish(w));
    fsdp_safetensors_writer_close(w);
    assert_ok(fsdp_state_read_file(&back, path));
    assert_ok(fsdp_state_rename(back, "model.*", "*", NULL));
    assert_ok(fsdp_state_load(c, back, &(fsdp_load_opts){ .which = FSDP_STATE_PARAMS }));
    assert_true(get(0) == 8);
    fsdp_state_destroy(back);
    assert_fails(fsdp_state_read_file(&back, scratch("nowhere")), FSDP_ERR_IO, "nowhere");
    assert_fails(fsdp_state_read_file(&back, scratch_text("junk.safetensors", "not one")), FSDP_ERR_FORMAT, "junk");
    fsdp_state_destroy(s);
    /* a piece is no file */
    assert_ok(fsdp_state_create(&s));
    assert_ok(fsdp_state_add(s, &(fsdp_state_tensor){ .name = "x", .ndim = 1, .shape = { 3 }, .first = 1, .count = 2, .data = &d }));
    assert_fails(fsdp_state_write_file(s, path), FSDP_ERR_INVALID, "2 of its 3 elements");
    fsdp_state_destroy(s);
    free(path);
}

/* ---- no memory, on one rank ---- */

typedef struct hungry {
    long n;
    int rank;
    _Atomic long made;
} hungry;

static fsdp_status without_memory(fsdp_comm *world, void *arg)
{
    hungry *h = arg;
    saved_mini s;
    fsdp_state *good, *d = NULL, *after;
    bool me = fsdp_comm_rank(world) == h->rank;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ 0 }));
    FSDP_TRY(fsdp_state_read(&good, s.c, &(fsdp_state_opts){ .rank0_only = true }));
    FSDP_TRY(saved_mini_disturb(&s, 1));
    for (int load = 0; load < 2; load++) {
        FSDP_TRY(fsdp_comm_barrier(world));
        if (me) (void)fsdpi_alloc_fail_at(h->n);
        fsdp_status st = load ? fsdp_state_load(s.c, fsdp_comm_rank(world) == 0 ? good : NULL, NULL) : fsdp_state_read(&d, s.c, NULL);
        if (me) {
            long made = fsdpi_alloc_fail_at(0);
            if (made > h->made) h->made = made;
        }
        rank_check(st == FSDP_OK || st == FSDP_ERR_NOMEM);
        double worst = st;
        FSDP_TRY(fsdp_comm_max(world, &worst, 1));
        rank_check(worst == (double)st);
        if (load && st == FSDP_OK) rank_check(s.tokens == 5);
    }
    FSDP_TRY(fsdp_state_load(s.c, fsdp_comm_rank(world) == 0 ? good : NULL, NULL));
    FSDP_TRY(fsdp_state_read(&after, s.c, &(fsdp_state_opts){ .rank0_only = true }));
    rank_check(same_state(good, after));
    fsdp_state_destroy(d);
    fsdp_state_destroy(good);
    fsdp_state_destroy(after);
    saved_mini_close(&s);
    return FSDP_OK;
}

static void test_allocations_that_fail(void **state)
{
    (void)state;
    if (!CAN_FORK) return;
    hungry *h = shared_alloc(sizeof(*h));
    for (h->rank = 0; h->rank < 2; h->rank++) {
        h->made = 0;
        for (h->n = 0; h->n <= h->made; h->n += h->n < 20 ? 1 : 9) {
            if (fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .threads = 1, .timeout_s = 20 }, without_memory, h) != FSDP_OK)
                fail_msg("allocation %ld of rank %d: %s", h->n, h->rank, fsdp_last_error());
        }
        assert_true(h->made > 60);
    }
    shared_free(h, sizeof(*h));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_listed_once),
        cmocka_unit_test(test_long_lists),
        cmocka_unit_test(test_ranks_differ),
        cmocka_unit_test(test_pieces_that_are_missing),
        cmocka_unit_test_setup_teardown(test_types, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_second_names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_folders_that_do_not_fit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_files, set_up, tear_down),
        cmocka_unit_test(test_allocations_that_fail),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
