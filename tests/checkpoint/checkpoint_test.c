/* SPDX-License-Identifier: MIT
 *
 * Checkpoints: what was saved on R ranks is loaded on any other number, in any mode, to the bit; what does not fit, is missing or
 * damaged is refused by name and changes nothing; a save that fails leaves the older ones as they were, and nothing of its own. */
#include "format/scratch.h"
#include "support/fault_write.h"
#include "support/testing.h"
#include "support/tiny_gpt.h"

#include "base/alloc.h"

#include <dirent.h>
#include <math.h>
#include <sys/resource.h>

enum { STATE = 3 * TINY_NUMEL };

/* ---- a run that can be saved ---- */

typedef struct saved_run {
    tiny_gpt t;
    fsdp_checkpoint *c;
    int64_t tokens;
    double best;
} saved_run;

static fsdp_status open_run(saved_run *r, fsdp_comm *world, const tiny_gpt_opts *o)
{
    const fsdp_module_param_info *p;
    int n;
    r->c = NULL;
    r->tokens = 0;
    r->best = 0;
    FSDP_TRY(tiny_gpt_create(&r->t, world, o));
    FSDP_TRY(fsdp_checkpoint_create(&r->c, world));
    FSDP_TRY(fsdp_module_params(fsdp_model_module(r->t.model), &p, &n));
    for (int i = 0; i < n; i++) FSDP_TRY(fsdp_checkpoint_add_param(r->c, p[i].name, p[i].unit, p[i].index));
    FSDP_TRY(fsdp_checkpoint_add_optim(r->c, r->t.optim));
    FSDP_TRY(fsdp_checkpoint_add_i64(r->c, "tokens", &r->tokens));
    return fsdp_checkpoint_add_f64(r->c, "best", &r->best);
}

static void close_run(saved_run *r)
{
    fsdp_checkpoint_destroy(r->c);
    tiny_gpt_destroy(&r->t);
}

/* Parameters and both moments, whole, on every rank. */
static fsdp_status whole_state(saved_run *r, float *out)
{
    const fsdp_module_param_info *p;
    int n;
    double *all = calloc(STATE, sizeof(*all));
    int64_t at = 0;
    FSDP_TRY(fsdp_module_params(fsdp_model_module(r->t.model), &p, &n));
    for (int i = 0; i < n; i++)
        for (int kind = -1; kind < 2; kind++) {
            fsdp_unit *u = p[i].unit;
            const fsdp_slice *s;
            int slices;
            float *state = NULL, host[1024];
            bool mine = fsdp_unit_replica(u) == 0;
            if (kind >= 0) FSDP_TRY(fsdp_optim_state(r->t.optim, u, kind, &state));
            fsdp_unit_slices(u, &s, &slices);
            for (int k = 0; k < slices && mine; k++) {
                if (s[k].param != p[i].index) continue;
                rank_check(s[k].numel <= 1024);
                FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(u), host, kind < 0 ? s[k].master : state + s[k].state_offset, (size_t)s[k].numel * sizeof(float)));
                FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(u)));
                for (int64_t e = 0; e < s[k].numel; e++) all[at + s[k].offset + e] = (double)host[e];
            }
            at += fsdp_unit_param_numel(u, p[i].index);
        }
    rank_check(at == STATE);
    FSDP_TRY(fsdp_comm_sum_exact(r->t.comm, all, STATE));
    for (int i = 0; i < STATE; i++) out[i] = (float)all[i];
    free(all);
    return FSDP_OK;
}

/* ---- save here, load there ---- */

/* Two replicas where ranks allow: what was a hybrid is loaded as none, and the other way. */
static int hybrid(fsdp_comm *world, fsdp_mode mode)
{
    int size = fsdp_comm_size(world);
    return mode != FSDP_MODE_NONE && size % 2 == 0 ? size / 2 : 0;
}

typedef struct side {
    int steps_before; /* that it trains before it saves */
    fsdp_mode mode;
    const char *device, *folder;
    int64_t step; /* of the checkpoint */
    float (*state)[STATE];
    double *next_loss; /* of the step after */
} side;

static fsdp_status save_side(fsdp_comm *world, void *arg)
{
    side *s = arg;
    saved_run r;
    static _Thread_local float state[STATE];
    FSDP_TRY(open_run(&r, world, &(tiny_gpt_opts){ .mode = s->mode, .shards = hybrid(world, s->mode), .device = s->device, .dropout = 0.1f }));
    for (int i = 0; i < s->steps_before; i++) FSDP_TRY(tiny_gpt_step(&r.t, i, 24, NULL, NULL));
    r.tokens = 1234567890123456789;
    r.best = 0.1;
    FSDP_TRY(fsdp_checkpoint_save(r.c, s->folder, s->step, 0));
    FSDP_TRY(whole_state(&r, state));
    double loss;
    FSDP_TRY(tiny_gpt_step(&r.t, s->steps_before, 24, &loss, NULL));
    if (fsdp_comm_rank(world) == 0) {
        memcpy(*s->state, state, sizeof(state));
        *s->next_loss = loss;
    }
    close_run(&r);
    return FSDP_OK;
}

static fsdp_status load_side(fsdp_comm *world, void *arg)
{
    side *s = arg;
    saved_run r;
    char path[600];
    static _Thread_local float state[STATE];
    double loss;
    FSDP_TRY(open_run(&r, world, &(tiny_gpt_opts){ .mode = s->mode, .shards = hybrid(world, s->mode), .device = s->device, .dropout = 0.1f }));
    int leaves = fsdp_comm_size(world) == 5 ? 20 : 24; /* 5 ranks divide no 24 leaves */
    FSDP_TRY(tiny_gpt_step(&r.t, 77, leaves, NULL, NULL)); /* whatever was there is replaced */
    snprintf(path, sizeof(path), "%s/step-%08lld", s->folder, (long long)s->step);
    FSDP_TRY(fsdp_checkpoint_load(r.c, path));
    rank_check(r.tokens == 1234567890123456789 && r.best == 0.1);
    FSDP_TRY(whole_state(&r, state));
    rank_check(memcmp(*s->state, state, sizeof(state)) == 0);
    fsdp_unit_list units = fsdp_optim_units(r.t.optim);
    for (int i = 0; i < units.count; i++) rank_check(fsdp_optim_unit_steps(r.t.optim, units.units[i]) == s->steps_before);
    FSDP_TRY(tiny_gpt_step(&r.t, s->steps_before, leaves, &loss, NULL));
    if (leaves == 24) rank_check(loss == *s->next_loss);
    close_run(&r);
    return FSDP_OK;
}

static void run_side(int ranks, const char *transport, fsdp_rank_fn fn, side *s)
{
    fsdp_launch_opts o = { .ranks = ranks, .transport = transport, .threads = 1, .timeout_s = 60 };
    if (fsdp_launch(&o, fn, s) != FSDP_OK) fail_msg("%d ranks, mode %s, %s: %s", ranks, fsdp_mode_name(s->mode), s->device, fsdp_last_error());
}

static void test_any_ranks_any_mode(void **state)
{
    (void)state;
    static const int from[] = { 1, 2, 3, 8 }, to[] = { 1, 2, 3, 5, 8 };
    float (*shared)[STATE] = shared_memory(sizeof(*shared));
    double *loss = shared_memory(sizeof(*loss));
    int n = 0;
    for (size_t i = 0; i < sizeof(from) / sizeof(from[0]); i++) {
        /* once before the first step: state is 0, and so are the steps */
        side s = { .steps_before = i == 1 ? 0 : i == 0 ? 2 : 1, .mode = (fsdp_mode)((from[i] + 3) % 4), .device = i == 2 ? "guard" : "cpu", .folder = scratch("any"),
                   .step = 10 + (int64_t)i, .state = shared, .next_loss = loss };
        run_side(from[i], i == 3 ? "copy" : NULL, save_side, &s);
        for (size_t k = 0; k < sizeof(to) / sizeof(to[0]); k++, n++) {
            s.mode = (fsdp_mode)((n + (int)k) % 4);
            s.device = n % 6 == 2 ? "guard" : "cpu";
            run_side(to[k], n % 2 ? "copy" : NULL, load_side, &s);
        }
    }
}

/* ---- what one rank registers and finds, without a launcher ---- */

static fsdp_comm *comm;
static fsdp_unit *unit;

static void some_values(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    *value = (float)i + *(float *)arg;
}

static int set_up(void **state)
{
    (void)state;
    static const fsdp_param params[] = { { "a", 2, { 3, 4 } }, { "scalar", 0, { 0 } }, { "empty", 2, { 0, 4 } } };
    float base = 100;
    if (fsdp_comm_create_self(&comm) != FSDP_OK || fsdp_unit_create(&unit, comm, params, 3, &(fsdp_unit_opts){ .name = "u" }) != FSDP_OK) return -1;
    return fsdp_unit_init(unit, some_values, &base) == FSDP_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    fsdp_unit_destroy(unit);
    fsdp_comm_destroy(comm);
    return 0;
}

static fsdp_checkpoint *of_unit(void)
{
    fsdp_checkpoint *c;
    assert_ok(fsdp_checkpoint_create(&c, comm));
    assert_ok(fsdp_checkpoint_add_param(c, "a", unit, 0));
    assert_ok(fsdp_checkpoint_add_param(c, "scalar", unit, 1));
    assert_ok(fsdp_checkpoint_add_param(c, "empty", unit, 2));
    return c;
}

static void set_unit(float base)
{
    assert_ok(fsdp_unit_init(unit, some_values, &base));
}

static float first_of_unit(void)
{
    float a[12];
    assert_ok(fsdp_unit_read_param(unit, 0, a));
    for (int i = 1; i < 12; i++) assert_true(a[i] == a[0] + (float)i);
    return a[0];
}

static void test_reader(void **state)
{
    (void)state;
    fsdp_checkpoint *c = of_unit();
    fsdp_checkpoint_reader *r;
    float a[12], one;
    int64_t i = INT64_MIN, got;
    double values[] = { 0.1, -0.0, 5e-324, 1.7976931348623157e308, INFINITY, -INFINITY, NAN }, back;
    char name[32];
    assert_ok(fsdp_checkpoint_add_i64(c, "i", &i));
    assert_ok(fsdp_checkpoint_add_text(c, "text", "line\n\"quoted\" \xc3\xa4,\n \"checksum\": \"0000000000000000\"\n}"));
    for (int k = 0; k < 7; k++) {
        snprintf(name, sizeof(name), "f%d", k);
        assert_ok(fsdp_checkpoint_add_f64(c, name, &values[k]));
    }
    char *folder = scratch("reader"), path[600];
    assert_ok(fsdp_checkpoint_save(c, folder, 5, 1));
    snprintf(path, sizeof(path), "%s/step-00000005", folder);
    assert_ok(fsdp_checkpoint_reader_open(&r, path));
    assert_int_equal(fsdp_checkpoint_reader_step(r), 5);
    assert_int_equal(fsdp_checkpoint_reader_ranks(r), 1);
    assert_int_equal(fsdp_checkpoint_reader_count(r), 3);
    assert_null(fsdp_checkpoint_reader_at(r, 3));
    assert_null(fsdp_checkpoint_reader_at(r, -1));
    assert_null(fsdp_checkpoint_reader_find(r, "b"));
    const fsdp_checkpoint_entry *e = fsdp_checkpoint_reader_find(r, "scalar");
    assert_int_equal(e->ndim, 0); /* and not [1] */
    assert_int_equal(e->numel, 1);
    e = fsdp_checkpoint_reader_find(r, "empty");
    assert_int_equal(e->ndim, 2);
    assert_int_equal(e->shape[1], 4);
    assert_int_equal(e->numel, 0);
    assert_ok(fsdp_checkpoint_reader_read(r, "a", 0, 12, a));
    assert_true(a[0] == 100 && a[11] == 111);
    assert_ok(fsdp_checkpoint_reader_read(r, "a", 5, 2, a));
    assert_true(a[0] == 105 && a[1] == 106);
    assert_ok(fsdp_checkpoint_reader_read(r, "scalar", 0, 1, &one));
    assert_ok(fsdp_checkpoint_reader_read(r, "empty", 0, 0, a));
    assert_fails(fsdp_checkpoint_reader_read(r, "a", 5, 8, a), FSDP_ERR_INVALID, "which has 12");
    assert_fails(fsdp_checkpoint_reader_read(r, "a", -1, 2, a), FSDP_ERR_INVALID, "which has 12");
    assert_fails(fsdp_checkpoint_reader_read(r, "b", 0, 1, a), FSDP_ERR_INVALID, "\"b\"");
    assert_ok(fsdp_checkpoint_reader_i64(r, "i", &got));
    assert_true(got == INT64_MIN);
    assert_fails(fsdp_checkpoint_reader_i64(r, "text", &got), FSDP_ERR_FORMAT, "\"text\"");
    assert_fails(fsdp_checkpoint_reader_f64(r, "none", &back), FSDP_ERR_FORMAT, "\"none\"");
    assert_string_equal(fsdp_checkpoint_reader_text(r, "text"), "line\n\"quoted\" \xc3\xa4,\n \"checksum\": \"0000000000000000\"\n}");
    assert_null(fsdp_checkpoint_reader_text(r, "none"));
    for (int k = 0; k < 7; k++) { /* every double, the infinite and NaN too: a best loss begins as infinite */
        snprintf(name, sizeof(name), "f%d", k);
        assert_ok(fsdp_checkpoint_reader_f64(r, name, &back));
        if (isnan(values[k])) assert_true(isnan(back));
        else assert_memory_equal(&back, &values[k], sizeof(back));
    }
    fsdp_checkpoint_reader_close(r);
    fsdp_checkpoint_reader_close(NULL);
    i = 1;
    for (int k = 0; k < 7; k++) values[k] = 1;
    assert_ok(fsdp_checkpoint_load(c, path));
    assert_true(i == INT64_MIN && values[4] == INFINITY && values[1] == 0 && signbit(values[1]));
    fsdp_checkpoint_destroy(c);
}

static void test_registration(void **state)
{
    (void)state;
    fsdp_checkpoint *c = of_unit();
    int64_t x = 0;
    float s[64] = { 0 };
    assert_fails(fsdp_checkpoint_add_i64(c, "a", &x), FSDP_ERR_INVALID, "\"a\" is registered twice");
    assert_fails(fsdp_checkpoint_add_i64(c, "", &x), FSDP_ERR_INVALID, "without a name");
    assert_fails(fsdp_checkpoint_add_i64(c, NULL, &x), FSDP_ERR_INVALID, "without a name");
    assert_fails(fsdp_checkpoint_add_param(c, "b", unit, 3), FSDP_ERR_INVALID, "\"b\"");
    assert_fails(fsdp_checkpoint_add_param(c, "b", NULL, 0), FSDP_ERR_INVALID, "\"b\"");
    assert_fails(fsdp_checkpoint_add_state(c, "b", unit, -1, s), FSDP_ERR_INVALID, "\"b\"");
    /* what cannot be written to JSON is refused now, not left out then */
    assert_fails(fsdp_checkpoint_add_i64(c, "caf\xe9", &x), FSDP_ERR_INVALID, "UTF-8");
    assert_fails(fsdp_checkpoint_add_text(c, "t", "caf\xe9"), FSDP_ERR_INVALID, "UTF-8");
    assert_fails(fsdp_checkpoint_add_text(c, "t", NULL), FSDP_ERR_INVALID, "\"t\"");
    assert_fails(fsdp_checkpoint_save(c, NULL, 1, 0), FSDP_ERR_INVALID, "no folder");
    assert_fails(fsdp_checkpoint_save(c, scratch("x"), -1, 0), FSDP_ERR_INVALID, "step -1");
    fsdp_checkpoint_destroy(c);
    fsdp_checkpoint_destroy(NULL);
    /* nothing, or only numbers, is a checkpoint too */
    assert_ok(fsdp_checkpoint_create(&c, comm));
    assert_ok(fsdp_checkpoint_save(c, scratch("none"), 0, 0));
    assert_ok(fsdp_checkpoint_add_i64(c, "x", &x));
    assert_ok(fsdp_checkpoint_save(c, scratch("none"), 1, 0));
    assert_ok(fsdp_checkpoint_load(c, scratch("none/step-00000001")));
    fsdp_checkpoint_destroy(c);
}

/* What is missing or of another shape is listed once, all of it, and nothing is changed. */
static void test_what_does_not_fit(void **state)
{
    (void)state;
    fsdp_checkpoint *c = of_unit(), *other;
    int64_t x = 7, y = 8;
    double d = 9;
    char *path = scratch("fit/step-00000001");
    assert_ok(fsdp_checkpoint_add_i64(c, "x", &x));
    assert_ok(fsdp_checkpoint_save(c, scratch("fit"), 1, 0));
    set_unit(500);
    x = 70;
    assert_ok(fsdp_checkpoint_create(&other, comm));
    assert_ok(fsdp_checkpoint_add_param(other, "scalar", unit, 0)); /* another shape */
    assert_ok(fsdp_checkpoint_add_param(other, "missing.one", unit, 1));
    assert_ok(fsdp_checkpoint_add_param(other, "missing.two", unit, 2));
    assert_ok(fsdp_checkpoint_add_i64(other, "y", &y));
    assert_ok(fsdp_checkpoint_add_f64(other, "d", &d));
    assert_ok(fsdp_checkpoint_add_i64(other, "x", &x)); /* this one is there */
    assert_int_equal(fsdp_checkpoint_load(other, path), FSDP_ERR_FORMAT);
    const char *message = fsdp_last_error_message();
    static const char *const named[] = { "\"scalar\"", "\"missing.one\"", "\"missing.two\"", "\"y\"", "\"d\"", "[3, 4]", "[]" };
    for (size_t i = 0; i < 7; i++)
        if (strstr(message, named[i]) == NULL) fail_msg("%s is not in: %s", named[i], message);
    assert_non_null(strstr(message, path));
    assert_true(strstr(strstr(message, "\"y\"") + 1, "\"y\"") == NULL);
    assert_true(first_of_unit() == 500 && x == 70 && y == 8 && d == 9);
    fsdp_checkpoint_destroy(other);
    /* only a part of a unit is registered: nothing would be known of the rest */
    assert_ok(fsdp_checkpoint_create(&other, comm));
    assert_ok(fsdp_checkpoint_add_param(other, "a", unit, 0));
    assert_fails(fsdp_checkpoint_load(other, path), FSDP_ERR_INVALID, "not registered");
    assert_true(first_of_unit() == 500);
    fsdp_checkpoint_destroy(other);
    /* more than there is room for: "and N more" */
    assert_ok(fsdp_checkpoint_create(&other, comm));
    for (int i = 0; i < 40; i++) {
        char name[24];
        snprintf(name, sizeof(name), "number %d", i);
        assert_ok(fsdp_checkpoint_add_i64(other, name, &y));
    }
    assert_fails(fsdp_checkpoint_load(other, path), FSDP_ERR_FORMAT, "more");
    fsdp_checkpoint_destroy(other);
    assert_fails(fsdp_checkpoint_load(c, scratch("nowhere")), FSDP_ERR_IO, "nowhere");
    assert_fails(fsdp_checkpoint_load(c, scratch("fit")), FSDP_ERR_IO, "fit"); /* the folder around it */
    assert_ok(fsdp_checkpoint_load(c, path));
    assert_true(first_of_unit() == 100 && x == 7);
    fsdp_checkpoint_destroy(c);
}

/* ---- damage ---- */

static size_t file_size(const char *path)
{
    struct stat sb;
    return stat(path, &sb) == 0 ? (size_t)sb.st_size : 0;
}

static void flip(const char *path, size_t at, int bit)
{
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)at, SEEK_SET), 0);
    int c = fgetc(f);
    assert_int_equal(fseek(f, (long)at, SEEK_SET), 0);
    fputc(c ^ 1 << bit, f);
    fclose(f);
}

static void copy_file(const char *from, const char *to)
{
    char command[1300];
    snprintf(command, sizeof(command), "cp %s %s", from, to);
    assert_int_equal(system(command), 0);
}

static fsdp_status save_two(fsdp_comm *world, void *arg)
{
    saved_run r;
    FSDP_TRY(open_run(&r, world, &(tiny_gpt_opts){ 0 }));
    FSDP_TRY(tiny_gpt_step(&r.t, 0, 4, NULL, NULL));
    FSDP_TRY(fsdp_checkpoint_save(r.c, arg, 1, 0));
    close_run(&r);
    return FSDP_OK;
}

/* Loads on 2 ranks, in this process: *st and the message are those of rank 0. */
typedef struct try_load {
    const char *path;
    fsdp_status st;
    bool unchanged;
    char message[1024];
} try_load;

static fsdp_status load_two(fsdp_comm *world, void *arg)
{
    try_load *t = arg;
    saved_run r;
    static _Thread_local float before[STATE], after[STATE];
    FSDP_TRY(open_run(&r, world, &(tiny_gpt_opts){ 0 }));
    FSDP_TRY(whole_state(&r, before));
    fsdp_status st = fsdp_checkpoint_load(r.c, t->path);
    if (fsdp_comm_rank(world) == 0) {
        t->st = st;
        snprintf(t->message, sizeof(t->message), "%s", st != FSDP_OK ? fsdp_last_error_message() : "");
    }
    FSDP_TRY(whole_state(&r, after));
    if (fsdp_comm_rank(world) == 0) t->unchanged = memcmp(before, after, sizeof(before)) == 0;
    close_run(&r);
    return FSDP_OK;
}

static try_load attempt(const char *path)
{
    try_load t = { .path = path };
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .ranks_are_threads = true, .threads = 1, .timeout_s = 20 }, load_two, &t));
    return t;
}

static void refused(const char *path, const char *file, const char *what)
{
    try_load t = attempt(path);
    if (t.st != FSDP_ERR_FORMAT && t.st != FSDP_ERR_IO) fail_msg("%s, %s: loaded, or %s: %s", file, what, fsdp_status_name(t.st), t.message);
    if (strstr(t.message, file) == NULL) fail_msg("%s, %s: it is not named: %s", file, what, t.message);
    if (!t.unchanged) fail_msg("%s, %s: refused, but something was loaded", file, what);
}

static void test_damage(void **state)
{
    (void)state;
    static const char *const files[] = { "manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors" };
    char *path = scratch("damage/step-00000001"), *good = scratch("good"), file[600];
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .threads = 1 }, save_two, scratch("damage")));
    assert_int_equal(attempt(path).st, FSDP_OK);
    for (int f = 0; f < 3; f++) {
        snprintf(file, sizeof(file), "%s/%s", path, files[f]);
        size_t size = file_size(file);
        copy_file(file, good);
        assert_int_equal(unlink(file), 0);
        refused(path, files[f], "missing");
        assert_int_equal(mkdir(file, 0777), 0);
        refused(path, files[f], "a folder");
        assert_int_equal(rmdir(file), 0);
        copy_file(good, file);
        for (int k = 0; k < 6; k++) { /* cut off */
            assert_int_equal(truncate(file, (off_t)(size * (size_t)k / 6)), 0);
            refused(path, files[f], "cut off");
            copy_file(good, file);
        }
        FILE *more = fopen(file, "ab"); /* and longer */
        fputs("{}", more);
        fclose(more);
        if (f > 0) refused(path, files[f], "longer");
        copy_file(good, file);
        for (int k = 0; k < (f == 0 ? 16 : 32); k++) { /* a bit, anywhere: header, data, padding */
            size_t at = (size_t)(fsdp_philox_uniform(3, files[f], k) * (float)(f == 0 ? size - 30 : size));
            flip(file, at, k % 8);
            refused(path, files[f], "a bit flipped");
            flip(file, at, k % 8);
        }
        assert_int_equal(attempt(path).st, FSDP_OK);
    }
    /* ranks' files swapped: each whole, in the wrong place */
    char a[600], b[600];
    snprintf(a, sizeof(a), "%s/%s", path, files[1]);
    snprintf(b, sizeof(b), "%s/%s", path, files[2]);
    assert_int_equal(rename(a, good), 0);
    assert_int_equal(rename(b, a), 0);
    assert_int_equal(rename(good, b), 0);
    refused(path, "rank-0000", "swapped");
}

/* The manifest: cut off anywhere, and every bit. Read by itself, since it decides what is complete. */
static void test_manifest(void **state)
{
    (void)state;
    fsdp_checkpoint *c = of_unit();
    fsdp_checkpoint_reader *r;
    char found[600];
    int64_t step, x = 5;
    int skipped;
    assert_ok(fsdp_checkpoint_add_i64(c, "x", &x));
    assert_ok(fsdp_checkpoint_save(c, scratch("manifest"), 1, 0));
    assert_ok(fsdp_checkpoint_save(c, scratch("manifest"), 2, 0));
    char *folder = strdup(scratch("manifest")), *path = strdup(scratch("manifest/step-00000002"));
    char *file = strdup(scratch("manifest/step-00000002/manifest.json")), *good = strdup(scratch("good.json"));
    size_t size = file_size(file);
    copy_file(file, good);
    for (size_t n = 0; n < size; n++) {
        assert_int_equal(truncate(file, (off_t)n), 0);
        fsdp_status st = fsdp_checkpoint_reader_open(&r, path);
        /* the last few bytes close the object: without them it is as good as whole, and is taken for it everywhere */
        if (st == FSDP_OK) {
            if (n < size - 4) fail_msg("a manifest of %zu of its %zu bytes was read", n, size);
            fsdp_checkpoint_reader_close(r);
        } else {
            assert_non_null(strstr(fsdp_last_error_message(), "manifest.json"));
            assert_ok(fsdp_checkpoint_latest(folder, found, sizeof(found), &step, &skipped));
            assert_true(step == 1 && skipped == 1);
        }
        copy_file(good, file);
    }
    int passed = 0;
    for (size_t at = 0; at < size; at++)
        for (int bit = 0; bit < 8; bit++) {
            flip(file, at, bit);
            if (fsdp_checkpoint_reader_open(&r, path) == FSDP_OK) { /* letters of the checksum in the other case, or what follows it: harmless */
                assert_true(at >= size - 22);
                assert_int_equal(fsdp_checkpoint_reader_step(r), 2);
                assert_int_equal(fsdp_checkpoint_reader_count(r), 3);
                fsdp_checkpoint_reader_close(r);
                passed++;
            }
            flip(file, at, bit);
        }
    assert_true(passed < 64);
    assert_ok(fsdp_checkpoint_reader_open(&r, path));
    fsdp_checkpoint_reader_close(r);
    char *all[] = { folder, path, file, good };
    for (int i = 0; i < 4; i++) free(all[i]);
    fsdp_checkpoint_destroy(c);
}

/* ---- folders ---- */

static bool there(const char *path)
{
    struct stat sb;
    return lstat(path, &sb) == 0;
}

static void make_file(const char *path)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("x", f);
    fclose(f);
}

static int64_t latest(const char *folder)
{
    char path[600];
    int64_t step;
    return fsdp_checkpoint_latest(folder, path, sizeof(path), &step, NULL) == FSDP_OK ? step : -1;
}

static void test_folders(void **state)
{
    (void)state;
    fsdp_checkpoint *c = of_unit();
    char *folder = scratch("folders/made/on/the/way"), path[600], small[8];
    char within[640];
    int64_t step;
    int skipped;
    assert_fails(fsdp_checkpoint_latest(folder, path, sizeof(path), &step, NULL), FSDP_ERR_IO, "cannot open");
    assert_ok(fsdp_checkpoint_save(c, folder, 1, 0));
    /* what a killed save leaves: of this step, of another, with files in it */
    snprintf(within, sizeof(within), "%s/.step-00000002.tmp", folder);
    assert_int_equal(mkdir(within, 0777), 0);
    strcat(within, "/rank-00000-of-00009.safetensors");
    make_file(within);
    snprintf(within, sizeof(within), "%s/.step-00000099.tmp", folder);
    assert_int_equal(mkdir(within, 0777), 0);
    strcat(within, "/rank-00000-of-00001.safetensors");
    make_file(within);
    assert_int_equal(latest(folder), 1);
    assert_ok(fsdp_checkpoint_save(c, folder, 2, 2));
    snprintf(within, sizeof(within), "%s/.step-00000002.tmp", folder);
    assert_false(there(within));
    snprintf(within, sizeof(within), "%s/.step-00000099.tmp", folder);
    assert_false(there(within)); /* it would take up room for ever */
    snprintf(within, sizeof(within), "%s/step-00000002/rank-00000-of-00009.safetensors", folder);
    assert_false(there(within));
    /* a folder of the same step is replaced */
    set_unit(700);
    assert_ok(fsdp_checkpoint_save(c, folder, 2, 0));
    set_unit(0);
    snprintf(path, sizeof(path), "%s/step-00000002", folder);
    assert_ok(fsdp_checkpoint_load(c, path));
    assert_true(first_of_unit() == 700);
    /* killed between the two renames of a replacement: the old one is found under its other name */
    snprintf(within, sizeof(within), "%s.replaced", path);
    assert_int_equal(rename(path, within), 0);
    assert_ok(fsdp_checkpoint_latest(folder, path, sizeof(path), &step, &skipped));
    assert_true(step == 2 && skipped == 0);
    assert_ok(fsdp_checkpoint_load(c, path));
    assert_true(first_of_unit() == 700);
    /* saved anew, it is one of the kept ones, not two */
    set_unit(800);
    assert_ok(fsdp_checkpoint_save(c, folder, 2, 2));
    assert_false(there(within));
    snprintf(path, sizeof(path), "%s/step-00000001", folder);
    assert_true(there(path));
    /* an incomplete newer one is skipped; other names are nobody's business */
    snprintf(path, sizeof(path), "%s/step-00000007", folder);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(within, sizeof(within), "%s/step-seven", folder);
    assert_int_equal(mkdir(within, 0777), 0);
    snprintf(within, sizeof(within), "%s/notes.txt", folder);
    make_file(within);
    assert_ok(fsdp_checkpoint_latest(folder, path, sizeof(path), &step, &skipped));
    assert_true(step == 2 && skipped == 1);
    assert_fails(fsdp_checkpoint_latest(folder, small, sizeof(small), NULL, NULL), FSDP_ERR_INVALID, "longer than 7");
    assert_ok(fsdp_checkpoint_save(c, folder, 3, 1));
    assert_true(there(within));
    assert_int_equal(latest(folder), 3);
    snprintf(path, sizeof(path), "%s/step-00000002", folder);
    assert_false(there(path));
    fsdp_checkpoint_destroy(c);
}

/* The newest complete ones stay; and what was just saved, though there are some of later steps (a run that went back). */
static void test_prune(void **state)
{
    (void)state;
    fsdp_checkpoint *c = of_unit();
    char path[64];
    for (int i = 1; i <= 6; i++) assert_ok(fsdp_checkpoint_save(c, scratch("prune"), i, 3));
    for (int i = 1; i <= 6; i++) {
        snprintf(path, sizeof(path), "prune/step-%08d", i);
        assert_int_equal(there(scratch(path)), i >= 4);
    }
    /* one that is damaged does not count as one of the three */
    assert_int_equal(unlink(scratch("prune/step-00000005/manifest.json")), 0);
    assert_ok(fsdp_checkpoint_save(c, scratch("prune"), 7, 3));
    assert_true(there(scratch("prune/step-00000004")) && there(scratch("prune/step-00000006")) && !there(scratch("prune/step-00000005")));
    set_unit(900);
    assert_ok(fsdp_checkpoint_save(c, scratch("prune"), 2, 1));
    assert_true(there(scratch("prune/step-00000002")));
    set_unit(0);
    assert_ok(fsdp_checkpoint_load(c, scratch("prune/step-00000002")));
    assert_true(first_of_unit() == 900);
    fsdp_checkpoint_destroy(c);
}

/* ---- where there is no room, or no permission ---- */

typedef struct hard_save {
    const char *folder;
    int ranks, files_limit;
    bool read_only;
} hard_save;

static fsdp_status save_in_vain(fsdp_comm *world, void *arg)
{
    const hard_save *h = arg;
    saved_run r;
    FSDP_TRY(open_run(&r, world, &(tiny_gpt_opts){ 0 }));
    FSDP_TRY(fsdp_checkpoint_save(r.c, h->folder, 1, 0)); /* this one fits */
    FSDP_TRY(tiny_gpt_step(&r.t, 0, 12, NULL, NULL));
    if (h->read_only) {
        if (fsdp_comm_rank(world) == 0 && mount(NULL, h->folder, NULL, MS_REMOUNT | MS_RDONLY, NULL) != 0) _exit(SCRATCH_SKIP);
    } else if (h->files_limit > 0) {
        if (fsdp_comm_rank(world) == h->ranks - 1) setrlimit(RLIMIT_FSIZE, &(struct rlimit){ (rlim_t)h->files_limit, (rlim_t)h->files_limit });
    } else if (fsdp_comm_rank(world) == 0) { /* all but a few pages are taken */
        char path[600];
        snprintf(path, sizeof(path), "%s/filler", h->folder);
        FILE *f = fopen(path, "w");
        rank_check(f != NULL);
        static const char page[4096];
        while (fwrite(page, 1, sizeof(page), f) == sizeof(page) && fflush(f) == 0) {
        }
        fclose(f);
    }
    FSDP_TRY(fsdp_comm_barrier(world));
    fsdp_status st = fsdp_checkpoint_save(r.c, h->folder, 2, 0);
    rank_check(st == FSDP_ERR_IO); /* on every rank, with the same message */
    char mine[256] = "", all[8 * 256];
    snprintf(mine, sizeof(mine), "%.255s", fsdp_last_error_message());
    FSDP_TRY(fsdp_comm_all_gather(world, mine, sizeof(mine), all));
    for (int i = 0; i < h->ranks; i++) rank_check(strncmp(all, all + 256 * i, 200) == 0);
    rank_check(strstr(mine, h->folder) != NULL);
    if (fsdp_comm_rank(world) == 0) {
        char path[600];
        snprintf(path, sizeof(path), "%s/.step-00000002.tmp", h->folder);
        rank_check(!there(path));
        rank_check(latest(h->folder) == 1);
    }
    FSDP_TRY(fsdp_comm_barrier(world));
    char path[600];
    snprintf(path, sizeof(path), "%s/step-00000001", h->folder);
    FSDP_TRY(fsdp_checkpoint_load(r.c, path));
    double loss;
    FSDP_TRY(tiny_gpt_step(&r.t, 0, 12, &loss, NULL)); /* and the run goes on */
    close_run(&r);
    return FSDP_OK;
}

static bool in_a_small_disk(void *arg)
{
    hard_save *h = arg;
    if (h->files_limit == 0 && !scratch_mount(h->folder, "size=256k")) _exit(SCRATCH_SKIP);
    signal(SIGXFSZ, SIG_IGN);
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = h->ranks, .threads = 1, .timeout_s = 30 }, save_in_vain, h);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st == FSDP_OK;
}

static void test_no_room(void **state)
{
    (void)state;
    assert_int_equal(mkdir(scratch("disk"), 0777), 0);
    hard_save full = { .folder = strdup(scratch("disk")), .ranks = 3 }, limit = { .folder = strdup(scratch("limit")), .ranks = 3, .files_limit = 2000 },
              read_only = { .folder = strdup(scratch("disk")), .ranks = 2, .read_only = true };
    hard_save *all[] = { &full, &limit, &read_only };
    for (int i = 0; i < 3; i++) {
        int rc = scratch_fork(in_a_small_disk, all[i]);
        if (rc != SCRATCH_SKIP) assert_int_equal(rc, 0);
        free((char *)(uintptr_t)all[i]->folder);
    }
    /* the folder is a file, or lies below one */
    fsdp_checkpoint *c = of_unit();
    make_file(scratch("a-file"));
    assert_fails(fsdp_checkpoint_save(c, scratch("a-file"), 1, 0), FSDP_ERR_IO, "a-file");
    assert_fails(fsdp_checkpoint_save(c, scratch("a-file/below"), 1, 0), FSDP_ERR_IO, "a-file");
    assert_int_equal(mkdir(scratch("in-the-way"), 0777), 0);
    make_file(scratch("in-the-way/step-00000001"));
    assert_fails(fsdp_checkpoint_save(c, scratch("in-the-way"), 1, 0), FSDP_ERR_IO, "in the way");
    assert_true(there(scratch("in-the-way/step-00000001")));
    assert_false(there(scratch("in-the-way/.step-00000001.tmp")));
    fsdp_checkpoint_destroy(c);
}

/* ---- a disk that is full after any number of bytes, on any rank ---- */

typedef struct full_disk {
    const char *folder;
    int rank;
    long room, piece;
} full_disk;

static fsdp_status save_until_full(fsdp_comm *world, void *arg)
{
    const full_disk *d = arg;
    saved_run r;
    char path[600];
    FSDP_TRY(open_run(&r, world, &(tiny_gpt_opts){ 0 }));
    FSDP_TRY(fsdp_checkpoint_save(r.c, d->folder, 1, 0));
    if (fsdp_comm_rank(world) == d->rank) {
        fault_write.room = d->room;
        fault_write.piece = d->piece;
    }
    fsdp_status st = fsdp_checkpoint_save(r.c, d->folder, 2, 0);
    fault_write.room = -1;
    double worst = st;
    rank_check(st == FSDP_OK || (st == FSDP_ERR_IO && strstr(fsdp_last_error_message(), ".step-00000002.tmp/") != NULL));
    rank_check(st == FSDP_OK || strstr(fsdp_last_error_message(), "bytes are free") != NULL);
    FSDP_TRY(fsdp_comm_max(world, &worst, 1));
    rank_check(worst == (double)st);
    rank_check((st == FSDP_OK) == (d->room < 0));
    rank_check(latest(d->folder) == (st == FSDP_OK ? 2 : 1));
    snprintf(path, sizeof(path), "%s/.step-00000002.tmp", d->folder);
    FSDP_TRY(fsdp_comm_barrier(world));
    rank_check(!there(path));
    snprintf(path, sizeof(path), "%s/step-%08d", d->folder, st == FSDP_OK ? 2 : 1);
    FSDP_TRY(fsdp_checkpoint_load(r.c, path));
    close_run(&r);
    return FSDP_OK;
}

static void test_full_at_any_byte(void **state)
{
    (void)state;
    char *folder = strdup(scratch("full-at"));
    full_disk d = { .folder = folder };
    for (d.rank = 0; d.rank < 2; d.rank++)
        for (d.room = -1; d.room < (d.rank == 0 ? 22000 : 8000); d.room += d.room < 40 ? 13 : 1777) {
            d.piece = d.room % 3 == 1 ? 1000 : 0; /* writes that write less than they were asked to are no errors */
            if (fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .threads = 1, .timeout_s = 20 }, save_until_full, &d) != FSDP_OK)
                fail_msg("rank %d, room for %ld bytes: %s", d.rank, d.room, fsdp_last_error());
            char command[700];
            snprintf(command, sizeof(command), "rm -rf %s", folder);
            assert_int_equal(system(command), 0);
        }
    free(folder);
}

/* ---- no memory, on one rank ---- */

typedef struct hungry {
    const char *folder;
    long n;
    int rank;
    _Atomic long made; /* allocations of that rank in a save and a load */
} hungry;

static fsdp_status save_without_memory(fsdp_comm *world, void *arg)
{
    hungry *h = arg;
    saved_run r;
    char path[600];
    static _Thread_local float before[STATE], after[STATE];
    bool me = fsdp_comm_rank(world) == h->rank;
    FSDP_TRY(open_run(&r, world, &(tiny_gpt_opts){ 0 }));
    FSDP_TRY(fsdp_checkpoint_save(r.c, h->folder, 1, 0));
    FSDP_TRY(whole_state(&r, before));
    snprintf(path, sizeof(path), "%s/step-00000001", h->folder);
    for (int load = 0; load < 2; load++) {
        FSDP_TRY(fsdp_comm_barrier(world));
        if (me) (void)fsdpi_alloc_fail_at(h->n);
        fsdp_status st = load ? fsdp_checkpoint_load(r.c, path) : fsdp_checkpoint_save(r.c, h->folder, 2, 0);
        if (me) {
            long made = fsdpi_alloc_fail_at(0);
            if (made > h->made) h->made = made;
        }
        /* All ranks hear the same: it went well, or there was no memory. */
        rank_check(st == FSDP_OK || st == FSDP_ERR_NOMEM);
        double worst = st;
        FSDP_TRY(fsdp_comm_max(world, &worst, 1));
        rank_check(worst == (double)st);
        if (!load) rank_check(latest(h->folder) == (st == FSDP_OK ? 2 : 1));
    }
    FSDP_TRY(whole_state(&r, after));
    rank_check(memcmp(before, after, sizeof(before)) == 0);
    close_run(&r);
    return FSDP_OK;
}

static void test_allocations_that_fail(void **state)
{
    (void)state;
    hungry *h = shared_memory(sizeof(*h));
    char folder[600];
    for (int rank = 0; rank < 2; rank++) {
        h->rank = rank;
        h->made = 0;
        for (h->n = 0; h->n <= h->made; h->n += h->n < 12 ? 1 : 7) { /* none: how many there are; the first ones all, then some of them */
            snprintf(folder, sizeof(folder), "%s-%d-%ld", scratch("hungry"), rank, h->n);
            h->folder = folder;
            if (fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .threads = 1, .timeout_s = 20 }, save_without_memory, h) != FSDP_OK)
                fail_msg("allocation %ld of rank %d: %s", h->n, rank, fsdp_last_error());
        }
        assert_true(h->made > 20);
    }
}

/* ---- many entries, long names ---- */

static void test_many_entries(void **state)
{
    (void)state;
    enum { MANY = 700 }; /* what ranks tell each other of them is more than one message holds */
    static fsdp_param params[MANY];
    static char names[MANY][400];
    fsdp_unit *u;
    fsdp_checkpoint *c;
    for (int i = 0; i < MANY; i++) {
        memset(names[i], 'n', 380);
        snprintf(names[i] + 380, 20, "%d", i);
        params[i] = (fsdp_param){ names[i], 1, { 3 } };
    }
    float base = 5;
    assert_ok(fsdp_unit_create(&u, comm, params, MANY, NULL));
    assert_ok(fsdp_unit_init(u, some_values, &base));
    assert_ok(fsdp_checkpoint_create(&c, comm));
    for (int i = 0; i < MANY; i++) assert_ok(fsdp_checkpoint_add_param(c, names[i], u, i));
    assert_ok(fsdp_checkpoint_save(c, scratch("many"), 1, 0));
    base = 0;
    assert_ok(fsdp_unit_init(u, some_values, &base));
    assert_ok(fsdp_checkpoint_load(c, scratch("many/step-00000001")));
    float x[3];
    assert_ok(fsdp_unit_read_param(u, MANY - 1, x));
    assert_true(x[0] == 5 && x[2] == 7);
    fsdp_checkpoint_destroy(c);
    fsdp_unit_destroy(u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_ranks_any_mode),
        cmocka_unit_test_setup_teardown(test_reader, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_registration, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_what_does_not_fit, set_up, tear_down),
        cmocka_unit_test(test_damage),
        cmocka_unit_test_setup_teardown(test_manifest, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_folders, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_prune, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_room, set_up, tear_down),
        cmocka_unit_test(test_full_at_any_byte),
        cmocka_unit_test(test_allocations_that_fail),
        cmocka_unit_test_setup_teardown(test_many_entries, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
