/* SPDX-License-Identifier: MIT
 *
 * What is written is what the format's reference would write, to the byte; it appears whole or not at all;
 * and each element is written exactly once. */
#include "format/scratch.h"

#include <fsdp/random.h>
#include <fsdp/safetensors.h>

#include "base/alloc.h"
#include "format/fileio.h"
#include "format/ranges.h"

#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>

static fsdp_safetensors_decl decl(const char *name, fsdp_dtype dtype, int ndim, const int64_t *shape)
{
    return (fsdp_safetensors_decl){ name, dtype, ndim, shape };
}

static const int64_t one[] = { 1, 1, 1 };

/* The same tensors through safetensors 0.8.0 gave this header. */
static void test_same_bytes_as_the_reference(void **state)
{
    (void)state;
    static const char want[] = "{\"__metadata__\":{\"format\":\"pt\"},\"t_U64\":{\"dtype\":\"U64\",\"shape\":"
                               "[1],\"data_offsets\":[0,8]},"
                               "\"t_I64\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[8,16]},\"t_"
                               "F64\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[16,24]},"
                               "\"t_F32\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[24,28]},\"t_"
                               "U32\":{\"dtype\":\"U32\",\"shape\":[1],\"data_offsets\":[28,32]},"
                               "\"t_I32\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[32,36]},\"t_"
                               "BF16\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[36,38]},"
                               "\"t_F16\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[38,40]},\"t_"
                               "U16\":{\"dtype\":\"U16\",\"shape\":[1],\"data_offsets\":[40,42]},"
                               "\"t_I16\":{\"dtype\":\"I16\",\"shape\":[1],\"data_offsets\":[42,44]},\"t_"
                               "I8\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[44,45]},"
                               "\"t_U8\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[45,46]},\"t_"
                               "BOOL\":{\"dtype\":\"BOOL\",\"shape\":[1],\"data_offsets\":[46,47]}}    ";
    fsdp_safetensors_decl decls[FSDP_DTYPE_COUNT];
    char names[FSDP_DTYPE_COUNT][16];
    for (int start = 0; start < FSDP_DTYPE_COUNT; start++) { /* in whatever order they are declared */
        for (int i = 0; i < FSDP_DTYPE_COUNT; i++) {
            fsdp_dtype t = (fsdp_dtype)((i * 5 + start) % FSDP_DTYPE_COUNT);
            snprintf(names[i], sizeof(names[i]), "t_%s", fsdp_dtype_name(t));
            decls[i] = decl(names[i], t, 1, one);
        }
        fsdp_safetensors_writer *w;
        assert_ok(fsdp_safetensors_writer_open(&w, scratch("ref"), decls, FSDP_DTYPE_COUNT, NULL, 0));
        for (int i = 0; i < FSDP_DTYPE_COUNT; i++)
            assert_ok(fsdp_safetensors_writer_write_raw(w, i, 0, 1, "\1\2\3\4\5\6\7\10"));
        assert_ok(fsdp_safetensors_writer_finish(w));
        fsdp_safetensors_writer_close(w);
        char *data;
        size_t n;
        assert_ok(fsdpi_read_file(scratch("ref"), 1 << 20, &data, &n));
        assert_int_equal(n, 8 + sizeof(want) - 1 + 47);
        assert_true((sizeof(want) - 1) % 8 == 0 && data[0] == ' ' && data[1] == 3 && data[2] == 0);
        assert_memory_equal(data + 8, want, sizeof(want) - 1);
        fsdpi_free(data);
    }
}

static void test_metadata_and_names(void **state)
{
    (void)state;
    static const char want[] =
        "{\"__metadata__\":{\"a\":\"\",\"format\":\"pt\",\"z\":\"\xc3\xa9\"},\"a\":{\"dtype\":\"F32\","
        "\"shape\":[],\"data_offsets\":[0,4]},"
        "\"z\xc3\xa9\\n/\\\"\x7f\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[4,4]}}";
    const int64_t empty[] = { 0, 3 };
    const fsdp_safetensors_decl decls[] = { decl("z\xc3\xa9\n/\"\x7f", FSDP_F32, 2, empty),
                                            decl("a", FSDP_F32, 0, NULL) };
    const fsdp_safetensors_string strings[] = { { "z", "\xc3\xa9" }, { "format", "pt" }, { "a", "" } };
    fsdp_safetensors_writer *w;
    fsdp_safetensors *st;
    char *data;
    size_t n;
    assert_ok(fsdp_safetensors_writer_open(&w, scratch("m"), decls, 2, strings, 3));
    assert_ok(fsdp_safetensors_writer_write_f32(w, 1, 0, 1, &(float){ 2.5f }));
    assert_ok(fsdp_safetensors_writer_write_f32(w, 0, 0, 0, NULL));
    assert_ok(fsdp_safetensors_writer_finish(w));
    fsdp_safetensors_writer_close(w);
    assert_ok(fsdpi_read_file(scratch("m"), 1 << 20, &data, &n));
    assert_memory_equal(data + 8, want, sizeof(want) - 1);
    assert_int_equal((n - 4) % 8, 0);
    fsdpi_free(data);
    assert_ok(fsdp_safetensors_open(&st, scratch("m")));
    assert_string_equal(fsdp_safetensors_metadata_find(st, "z"), "\xc3\xa9");
    assert_non_null(fsdp_safetensors_find(st, decls[0].name));
    float x;
    assert_ok(fsdp_safetensors_read_f32(st, fsdp_safetensors_find(st, "a"), 0, 1, &x));
    assert_true(x == 2.5f);
    fsdp_safetensors_close(st);

    assert_ok(fsdp_safetensors_writer_open(&w, scratch("nothing"), NULL, 0, NULL, 0));
    assert_ok(fsdp_safetensors_writer_finish(w));
    fsdp_safetensors_writer_close(w);
    assert_ok(fsdpi_read_file(scratch("nothing"), 1 << 20, &data, &n));
    assert_true(n == 40 && memcmp(data, " \0\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\"}}", 40) == 0);
    fsdpi_free(data);
}

/* Slices of random lengths, in random order, from floats and raw, come back rounded as they should be. */
static void test_round_trip_of_slices(void **state)
{
    (void)state;
    enum { N = 13001, SLICES = 40 };
    const int64_t shape[] = { 1, N };
    const fsdp_dtype types[] = { FSDP_BF16, FSDP_F32, FSDP_F16, FSDP_F64 };
    const char *names[] = { "h", "f", "s", "d" };
    fsdp_safetensors_decl decls[4];
    static float x[N], got[N];
    fsdp_rng rng;
    fsdp_safetensors_writer *w;
    fsdp_safetensors *st;
    fsdp_rng_init(&rng, 5);
    for (int i = 0; i < N; i++) x[i] = ldexpf(fsdp_rng_normal(&rng), (int)(fsdp_rng_u32(&rng) % 40) - 30);
    for (int k = 0; k < 4; k++) decls[k] = decl(names[k], types[k], 2, shape);
    assert_ok(fsdp_safetensors_writer_open(&w, scratch("rt"), decls, 4, NULL, 0));
    for (int k = 0; k < 4; k++) {
        int cut[SLICES + 1], order[SLICES];
        for (int i = 0; i <= SLICES; i++) cut[i] = (int)((int64_t)N * i * i / (SLICES * SLICES));
        for (int i = 0; i < SLICES; i++) {
            int j = (int)(fsdp_rng_u32(&rng) % (unsigned)(i + 1));
            order[i] = order[j];
            order[j] = i;
        }
        for (int i = 0; i < SLICES; i++)
            assert_ok(fsdp_safetensors_writer_write_f32(
                w, k, cut[order[i]], cut[order[i] + 1] - cut[order[i]], x + cut[order[i]]));
    }
    assert_ok(fsdp_safetensors_writer_finish(w));
    fsdp_safetensors_writer_close(w);
    assert_ok(fsdp_safetensors_open(&st, scratch("rt")));
    for (int k = 0; k < 4; k++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_find(st, names[k]);
        assert_true(t->ndim == 2 && t->shape[1] == N && t->dtype == types[k] &&
                    t->offset % (int64_t)fsdp_dtype_bytes(t->dtype) == 0);
        assert_ok(fsdp_safetensors_read_f32(st, t, 0, N, got));
        for (int i = 0; i < N; i++)
            assert_true(got[i] == (k == 0   ? fsdp_bf16_to_f32(fsdp_bf16_from_f32(x[i]))
                                   : k == 2 ? fsdp_f16_to_f32(fsdp_f16_from_f32(x[i]))
                                            : x[i]));
    }
    fsdp_safetensors_close(st);
}

static void test_refused_declarations(void **state)
{
    (void)state;
    fsdp_safetensors_writer *w = NULL;
    const int64_t negative[] = { 2, -1 }, huge[] = { (int64_t)1 << 40, (int64_t)1 << 40 },
                  half[] = { (int64_t)1 << 62 };
    const struct {
        fsdp_safetensors_decl d[2];
        int count;
        const char *text;
    } bad[] = {
        { { { NULL, FSDP_F32, 0, NULL } }, 1, "tensor number 0 has no name" },
        { { { "", FSDP_F32, 0, NULL } }, 1, "tensor number 0 has no name" },
        { { { "__metadata__", FSDP_F32, 0, NULL } }, 1, "safetensors reserves it" },
        { { { "a\xff", FSDP_F32, 0, NULL } }, 1, "is not UTF-8" },
        { { { "\xed\xa0\x80", FSDP_F32, 0, NULL } }, 1, "is not UTF-8" },
        { { { "\xc0\x80", FSDP_F32, 0, NULL } }, 1, "is not UTF-8" },
        { { { "\xf4\x90\x80\x80", FSDP_F32, 0, NULL } }, 1, "is not UTF-8" },
        { { { "\xe2\x82", FSDP_F32, 0, NULL } }, 1, "is not UTF-8" },
        { { { "a", FSDP_DTYPE_COUNT, 0, NULL } }, 1, "tensor \"a\": 13 is no element type" },
        { { { "a", FSDP_F32, -1, one } }, 1, "tensor \"a\" has -1 dimensions" },
        { { { "a", FSDP_F32, 1, NULL } }, 1, "tensor \"a\" has 1 dimensions, or no shape" },
        { { { "a", FSDP_F32, 2, negative } }, 1, "tensor \"a\": a size is negative" },
        { { { "a", FSDP_F32, 2, huge } }, 1, "does not fit into 63 bits" },
        { { { "a", FSDP_U8, 1, half }, { "b", FSDP_U8, 1, half } }, 2, "more than 2^63 bytes" },
        { { { "a", FSDP_U8, 1, one }, { "a", FSDP_F32, 1, one } }, 2, "two tensors have the name \"a\"" },
    };
    int before = scratch_entries();
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_fails(fsdp_safetensors_writer_open(&w, scratch("bad"), bad[i].d, bad[i].count, NULL, 0),
                     FSDP_ERR_INVALID, bad[i].text);
    const fsdp_safetensors_string strings[][2] = { { { "a", "1" }, { "a", "2" } },
                                                   { { "format", "tf" }, { "b", "1" } },
                                                   { { "a", NULL }, { "b", "1" } },
                                                   { { "a", "\x80" }, { "b", "1" } } };
    const char *texts[] = { "have the key \"a\"", "have the key \"format\", which is always there",
                            "number 0 of its metadata has no key", "is not UTF-8" };
    for (int i = 0; i < 4; i++)
        assert_fails(fsdp_safetensors_writer_open(&w, scratch("bad"), NULL, 0, strings[i], 2),
                     FSDP_ERR_INVALID, texts[i]);
    assert_fails(fsdp_safetensors_writer_open(&w, scratch("bad"), NULL, 1, NULL, 0), FSDP_ERR_INVALID,
                 "1 tensors");
    assert_fails(fsdp_safetensors_writer_open(&w, scratch_dir, NULL, 0, NULL, 0), FSDP_ERR_IO,
                 "this is a folder");
    assert_fails(fsdp_safetensors_writer_open(&w, scratch("no/such"), NULL, 0, NULL, 0), FSDP_ERR_IO,
                 "its folder does not exist");
    assert_null(w);
    assert_int_equal(scratch_entries(), before);
}

static void test_refused_ranges(void **state)
{
    (void)state;
    const int64_t shape[] = { 10 };
    const fsdp_safetensors_decl decls[] = { decl("f", FSDP_F32, 1, shape), decl("i", FSDP_I64, 1, shape),
                                            decl("e", FSDP_F32, 0, NULL) };
    float x[10] = { 0 };
    int64_t n[10] = { 0 };
    char *path = scratch_text("r", "the old one");
    int before = scratch_entries();
    fsdp_safetensors_writer *w;
    assert_ok(fsdp_safetensors_writer_open(&w, path, decls, 3, NULL, 0));
    assert_fails(fsdp_safetensors_writer_write_f32(w, 3, 0, 1, x), FSDP_ERR_INVALID,
                 "there is no tensor number 3, of 3");
    assert_fails(fsdp_safetensors_writer_write_f32(w, -1, 0, 1, x), FSDP_ERR_INVALID, "no tensor number -1");
    assert_fails(fsdp_safetensors_writer_write_f32(w, 0, 8, 3, x), FSDP_ERR_INVALID,
                 "\"f\" has 10 elements; 3 from number 8 were given");
    assert_fails(fsdp_safetensors_writer_write_f32(w, 0, 1, INT64_MAX, x), FSDP_ERR_INVALID,
                 "\"f\" has 10 elements");
    assert_fails(fsdp_safetensors_writer_write_f32(w, 1, 0, 1, x), FSDP_ERR_INVALID, "\"i\" is of type I64");
    assert_ok(fsdp_safetensors_writer_write_f32(w, 0, 2, 3, x));
    assert_fails(fsdp_safetensors_writer_write_f32(w, 0, 0, 10, x), FSDP_ERR_INVALID,
                 "element 2 of tensor \"f\" was written before");
    assert_fails(fsdp_safetensors_writer_write_raw(w, 0, 4, 2, x), FSDP_ERR_INVALID,
                 "element 4 of tensor \"f\" was written before");
    assert_fails(fsdp_safetensors_writer_finish(w), FSDP_ERR_STATE,
                 "elements 0 to 1 of tensor \"f\" were never written (3 of 3 tensors");
    assert_ok(fsdp_safetensors_writer_write_f32(w, 0, 0, 2, x));
    assert_ok(fsdp_safetensors_writer_write_raw(w, 1, 0, 10, n));
    assert_ok(fsdp_safetensors_writer_write_f32(w, 2, 0, 1, x));
    assert_fails(fsdp_safetensors_writer_finish(w), FSDP_ERR_STATE,
                 "elements 5 to 9 of tensor \"f\" were never written (1 of 3 tensors");
    assert_int_equal(scratch_entries(), before + 1);
    char *data;
    size_t bytes;
    assert_ok(fsdpi_read_file(path, 99, &data, &bytes));
    assert_string_equal(data, "the old one");
    fsdpi_free(data);
    assert_ok(fsdp_safetensors_writer_write_f32(w, 0, 5, 5, x));
    assert_ok(fsdp_safetensors_writer_finish(w));
    assert_fails(fsdp_safetensors_writer_finish(w), FSDP_ERR_STATE, "finished twice");
    assert_fails(fsdp_safetensors_writer_write_f32(w, 0, 0, 0, x), FSDP_ERR_STATE, "after it was finished");
    fsdp_safetensors_writer_close(w);
    assert_int_equal(scratch_entries(), before);
    /* given up: the file that is there stays, nothing is left over */
    assert_ok(fsdp_safetensors_writer_open(&w, path, decls, 3, NULL, 0));
    assert_ok(fsdp_safetensors_writer_write_f32(w, 0, 0, 10, x));
    fsdp_safetensors_writer_close(w);
    fsdp_safetensors_writer_close(NULL);
    assert_int_equal(scratch_entries(), before);
    fsdp_safetensors *st;
    assert_ok(fsdp_safetensors_open(&st, path));
    fsdp_safetensors_close(st);
}

/* The list of ranges against one flag an element. */
static void test_ranges(void **state)
{
    (void)state;
    enum { N = 60 };
    fsdp_rng rng;
    fsdp_rng_init(&rng, 3);
    for (int round = 0; round < 2000; round++) {
        fsdpi_ranges s = { 0 };
        char flag[N + 1] = { 0 };
        for (int i = 0; i < 40; i++) {
            int64_t first = fsdp_rng_u32(&rng) % N, end = first + fsdp_rng_u32(&rng) % 8;
            if (end > N) end = N;
            int64_t want = first;
            while (want < end && !flag[want]) want++;
            assert_int_equal(fsdpi_ranges_overlap(&s, first, end), want);
            if (want < end) continue;
            assert_ok(fsdpi_ranges_reserve(&s));
            fsdpi_ranges_add(&s, first, end);
            memset(flag + first, 1, (size_t)(end - first));
            int64_t runs = 0, gap = 0, gap_end;
            for (int k = 0; k < N; k++) runs += flag[k] && (k == 0 || !flag[k - 1]);
            assert_int_equal(s.count, runs);
            while (gap < N && flag[gap]) gap++;
            for (gap_end = gap; gap_end < N && !flag[gap_end];) gap_end++;
            fsdpi_range g;
            assert_int_equal(fsdpi_ranges_gap(&s, N, &g), gap < N);
            if (gap < N) assert_true(g.first == gap && g.end == gap_end);
        }
        fsdpi_ranges_free(&s);
    }
    fsdpi_range g;
    assert_false(fsdpi_ranges_gap(&(fsdpi_ranges){ 0 }, 0, &g));
}

static bool write_on_small_disk(void *arg)
{
    (void)arg;
    const int64_t shape[] = { 25000 };
    const fsdp_safetensors_decl d = decl("w", FSDP_F32, 1, shape);
    fsdp_safetensors_writer *w;
    char path[128];
    if (mkdir(scratch("disk"), 0700) != 0 || !scratch_mount(scratch("disk"), "size=64k")) _exit(SCRATCH_SKIP);
    snprintf(path, sizeof(path), "%s/disk/f", scratch_dir);
    child_expects(fsdp_safetensors_writer_open(&w, path, &d, 1, NULL, 0), FSDP_ERR_IO, path);
    child_expects(FSDP_ERR_IO, FSDP_ERR_IO, "the file needs 100104 bytes, ");
    child_expects(FSDP_ERR_IO, FSDP_ERR_IO, " bytes are free on its file system: make room");
    int names = 0;
    DIR *dir = opendir(scratch("disk"));
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) names++;
    return names == 2; /* "." and ".." */
}

static bool write_beyond_limit(void *arg)
{
    (void)arg;
    const int64_t shape[] = { 25000 };
    const fsdp_safetensors_decl d = decl("w", FSDP_F32, 1, shape);
    fsdp_safetensors_writer *w;
    signal(SIGXFSZ, SIG_DFL);
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 65536, 65536 }) != 0) return false;
    child_expects(fsdp_safetensors_writer_open(&w, scratch("big"), &d, 1, NULL, 0), FSDP_ERR_IO,
                  "needs 100104 bytes, and this process may write files of 65536 bytes at most (ulimit -f)");
    return true;
}

/* The limit comes down while the file is written: that write fails, and can be done again when there is room.
 */
static bool write_fails_halfway(void *arg)
{
    (void)arg;
    static float x[25000];
    const int64_t shape[] = { 25000 };
    const fsdp_safetensors_decl d = decl("w", FSDP_BF16, 1, shape);
    fsdp_safetensors_writer *w;
    signal(SIGXFSZ, SIG_IGN);
    if (fsdp_safetensors_writer_open(&w, scratch("half"), &d, 1, NULL, 0) != FSDP_OK) return false;
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 20000, RLIM_INFINITY }) != 0) return false;
    child_expects(fsdp_safetensors_writer_write_f32(w, 0, 0, 25000, x), FSDP_ERR_IO,
                  "more than its file system or ulimit -f allows");
    child_expects(fsdp_safetensors_writer_finish(w), FSDP_ERR_STATE,
                  "elements 0 to 24999 of tensor \"w\" were never written");
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){ RLIM_INFINITY, RLIM_INFINITY }) != 0) return false;
    if (fsdp_safetensors_writer_write_f32(w, 0, 0, 25000, x) != FSDP_OK) return false;
    if (fsdp_safetensors_writer_finish(w) != FSDP_OK) return false;
    fsdp_safetensors_writer_close(w);
    return true;
}

static void test_no_room(void **state)
{
    (void)state;
    assert_int_equal(scratch_fork(write_beyond_limit, NULL), 0);
    assert_int_equal(scratch_fork(write_fails_halfway, NULL), 0);
    int rc = scratch_fork(write_on_small_disk, NULL);
    if (rc == SCRATCH_SKIP) skip();
    assert_int_equal(rc, 0);
}

static fsdp_status write_all(const char *path)
{
    fsdp_status st;
    fsdp_safetensors_writer *w;
    const int64_t shape[] = { 100 };
    const fsdp_safetensors_decl decls[] = { decl("a", FSDP_BF16, 1, shape), decl("b", FSDP_F32, 1, shape) };
    static const float x[100];
    FSDP_TRY(fsdp_safetensors_writer_open(&w, path, decls, 2, &(fsdp_safetensors_string){ "k", "v" }, 1));
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 100; i += 2)
            FSDP_TRY_GOTO(fsdp_safetensors_writer_write_f32(w, k, i, 1, x), close_writer);
    for (int k = 0; k < 2; k++)
        for (int i = 1; i < 100; i += 2)
            FSDP_TRY_GOTO(fsdp_safetensors_writer_write_f32(w, k, i, 1, x), close_writer);
    FSDP_TRY_GOTO(fsdp_safetensors_writer_finish(w), close_writer);
close_writer:
    fsdp_safetensors_writer_close(w);
    return st;
}

static void test_no_memory(void **state)
{
    (void)state;
    long live = fsdpi_alloc_live();
    int before = scratch_entries();
    fsdp_status rc = FSDP_ERR_NOMEM;
    for (long n = 1; rc != FSDP_OK; n++) {
        fsdpi_alloc_fail_at(n);
        rc = write_all(scratch("nomem"));
        fsdpi_alloc_fail_at(0);
        assert_true(rc == FSDP_OK || rc == FSDP_ERR_NOMEM);
        assert_int_equal(fsdpi_alloc_live(), live);
        assert_int_equal(scratch_entries(), before + (rc == FSDP_OK));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bytes_as_the_reference),
        cmocka_unit_test(test_metadata_and_names),
        cmocka_unit_test(test_round_trip_of_slices),
        cmocka_unit_test(test_refused_declarations),
        cmocka_unit_test(test_refused_ranges),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
