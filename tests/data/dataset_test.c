/* SPDX-License-Identifier: MIT
 *
 * A dataset is the tokens of its files in order; what is wrong with a file is found when it is opened and
 * said with file, position and numbers; a batch is what its windows say. */
#include "format/scratch.h"

#include <fsdp/data.h>
#include <fsdp/random.h>

#include "base/alloc.h"

#include <locale.h>
#include <math.h>

static fsdp_status open_with(fsdp_dataset **out, fsdp_dataset_opts o, const char *path)
{
    const char *paths[] = { path };
    o.paths = paths;
    o.path_count = 1;
    return fsdp_dataset_open(out, &o);
}

static fsdp_status open_one(fsdp_dataset **out, const char *path)
{
    return open_with(out, (fsdp_dataset_opts){ .seq = 1 }, path);
}

/* llm.c's format; count: what the header says. */
static char *put_llmc(const char *name, int32_t magic, int32_t version, int32_t count, const void *tokens,
                      size_t bytes)
{
    char *all = calloc(1, 1024 + bytes);
    assert_non_null(all);
    memcpy(all, (int32_t[]){ magic, version, count }, 12);
    if (bytes > 0) memcpy(all + 1024, tokens, bytes);
    char *path = scratch_write(name, all, 1024 + bytes);
    free(all);
    return path;
}

static void expect_tokens(fsdp_dataset *ds, const int32_t *want, int64_t n)
{
    int32_t got[64];
    assert_int_equal(fsdp_dataset_tokens(ds), n);
    for (int64_t first = 0; first <= n; first++) {
        for (int64_t k = 0; k <= n - first; k++) {
            memset(got, 0xff, sizeof(got));
            assert_ok(fsdp_dataset_read(ds, first, k, got));
            assert_memory_equal(got, want + first, (size_t)k * sizeof(*got));
            assert_int_equal(got[k], -1);
        }
    }
}

static void test_formats(void **state)
{
    (void)state;
    const uint16_t u16[] = { 0, 12, 65535, 7, 300 };
    const uint32_t u32[] = { 1, 128255, 0x7fffffff };
    const int32_t want16[] = { 0, 12, 65535, 7, 300 }, want32[] = { 1, 128255, 0x7fffffff },
                  text[] = { 'a', 0xc3, 0xa9, 0, 10 };
    const struct {
        const char *path;
        fsdp_dataset_format format;
        const int32_t *want;
        int64_t n;
        bool text;
    } cases[] = {
        { put_llmc("a.bin", 20240520, 1, 5, u16, sizeof(u16)), FSDP_DATASET_AUTO, want16, 5, false },
        { put_llmc("b.dat", 20240801, 7, 3, u32, sizeof(u32)), FSDP_DATASET_AUTO, want32, 3, false },
        { put_llmc("c", 20240520, 1, 5, u16, sizeof(u16)), FSDP_DATASET_TOKENS, want16, 5, false },
        { scratch_write("nano.bin", u16, sizeof(u16)), FSDP_DATASET_AUTO, want16, 5, false },
        { scratch_write("NANO.BIN", u16, sizeof(u16)), FSDP_DATASET_TOKENS, want16, 5, false },
        { scratch_write("t.txt", "a\xc3\xa9\0\n", 5), FSDP_DATASET_AUTO, text, 5, true },
        { scratch_write("t.bin", "a\xc3\xa9\0\n", 5), FSDP_DATASET_TEXT, text, 5, true },
        { scratch_write("x", "a", 1), FSDP_DATASET_AUTO, text, 1, true },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fsdp_dataset *ds;
        assert_ok(open_with(&ds, (fsdp_dataset_opts){ .format = cases[i].format }, cases[i].path));
        assert_int_equal(fsdp_dataset_is_text(ds), cases[i].text);
        assert_int_equal(fsdp_dataset_total(ds), cases[i].n);
        expect_tokens(ds, cases[i].want, cases[i].n);
        int32_t x;
        assert_fails(fsdp_dataset_read(ds, cases[i].n, 1, &x), FSDP_ERR_INVALID, "1 tokens from number");
        assert_fails(fsdp_dataset_read(ds, -1, 1, &x), FSDP_ERR_INVALID, "from number -1");
        assert_fails(fsdp_dataset_read(ds, 0, -1, &x), FSDP_ERR_INVALID, "-1 tokens");
        assert_fails(fsdp_dataset_read(ds, 1, INT64_MAX, &x), FSDP_ERR_INVALID, "9223372036854775807 tokens");
        fsdp_dataset_close(ds);
    }
    fsdp_dataset_close(NULL);
}

/* Files in the order that was given, a pattern's by the bytes of their names; all tokens in one row. */
static void test_several_files(void **state)
{
    (void)state;
    fsdp_dataset *ds;
    setlocale(LC_ALL, ""); /* where it sorts "a" between "A" and "B", ours does not */
    assert_int_equal(mkdir(scratch("p"), 0700), 0);
    scratch_text("p/B", "1");
    scratch_text("p/a", "23");
    scratch_text("p/A", "456");
    scratch_text("p/[x]", "7");
    char star[128], odd[128], single[128];
    snprintf(star, sizeof(star), "%s/p/[AaB]", scratch_dir);
    snprintf(odd, sizeof(odd), "%s/p/[x]", scratch_dir);
    snprintf(single, sizeof(single), "%s/p/a", scratch_dir);
    const char *paths[] = { odd, star, single };
    assert_ok(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = paths, .path_count = 3 }));
    expect_tokens(ds, (int32_t[]){ '7', '4', '5', '6', '1', '2', '3', '2', '3' }, 9);
    fsdp_dataset_close(ds);

    const char *parts[] = { scratch_write("p/1.bin", (uint16_t[]){ 1, 2 }, 4),
                            put_llmc("p/2.bin", 20240801, 7, 2, (uint32_t[]){ 70000, 3 }, 8) };
    assert_ok(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = parts, .path_count = 2 }));
    expect_tokens(ds, (int32_t[]){ 1, 2, 70000, 3 }, 4);
    fsdp_dataset_close(ds);
    const char *mixed[] = { single, parts[0] };
    assert_fails(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = mixed, .path_count = 2 }),
                 FSDP_ERR_INVALID, "p/a is text, but ");
    assert_fails(FSDP_ERR_INVALID, FSDP_ERR_INVALID, "p/1.bin is tokens");
    char none[128];
    snprintf(none, sizeof(none), "%s/p/*.none", scratch_dir);
    const char *with_none[] = { single, none };
    assert_fails(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = with_none, .path_count = 2 }),
                 FSDP_ERR_IO, "p/*.none: no file matches this pattern");
}

/* More files than are kept open. */
static void test_many_files(void **state)
{
    (void)state;
    enum { FILES = 50 };
    fsdp_dataset *ds;
    int32_t got[FILES * 2];
    char pattern[128];
    assert_int_equal(mkdir(scratch("many"), 0700), 0);
    for (int i = 0; i < FILES; i++) {
        char name[32];
        snprintf(name, sizeof(name), "many/%02d.bin", i);
        scratch_write(name, (uint16_t[]){ (uint16_t)(2 * i), (uint16_t)(2 * i + 1) }, 4);
    }
    snprintf(pattern, sizeof(pattern), "%s/many/*.bin", scratch_dir);
    assert_ok(open_one(&ds, pattern));
    assert_int_equal(fsdp_dataset_tokens(ds), 2 * FILES);
    assert_ok(fsdp_dataset_read(ds, 1, 2 * FILES - 1, got));
    for (int i = 0; i < 2 * FILES - 1; i++) assert_int_equal(got[i], i + 1);
    scratch_write("many/07.bin", "xx", 2);
    assert_fails(fsdp_dataset_read(ds, 10, 10, got), FSDP_ERR_IO,
                 "many/07.bin: the file was changed or replaced");
    fsdp_dataset_close(ds);
}

static void test_refused_files(void **state)
{
    (void)state;
    fsdp_dataset *ds = NULL;
    const uint16_t u16[4] = { 1, 2, 3, 4 };
    assert_fails(open_one(&ds, scratch("none.bin")), FSDP_ERR_IO, "/none.bin: there is no such file");
    assert_fails(open_one(&ds, scratch_dir), FSDP_ERR_IO, "this is a folder");
    assert_fails(open_one(&ds, "/dev/zero"), FSDP_ERR_IO, "a pipe or a device");
    assert_fails(open_one(&ds, scratch_write("e.bin", "", 0)), FSDP_ERR_FORMAT, "e.bin: the file is empty");
    assert_fails(open_one(&ds, scratch_write("e.txt", "", 0)), FSDP_ERR_FORMAT, "e.txt: the file is empty");
    assert_fails(open_one(&ds, scratch_write("o.bin", u16, 7)), FSDP_ERR_FORMAT,
                 "o.bin: the file has 7 bytes, an odd number");
    assert_fails(open_one(&ds, scratch_write("o.bin", u16, 1)), FSDP_ERR_FORMAT,
                 "o.bin: the file has 1 bytes, an odd number");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240520, 1, 0, NULL, 0)), FSDP_ERR_FORMAT,
                 "h.bin: the file has a header and no tokens");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240520, 1, 4, NULL, 0)), FSDP_ERR_FORMAT,
                 "h.bin: the file is 8 bytes short of what its header says (4 tokens of 2 bytes)");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240520, 1, 4, u16, 7)), FSDP_ERR_FORMAT,
                 "the file is 1 bytes short");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240520, 1, 3, u16, 8)), FSDP_ERR_FORMAT,
                 "the file has 2 bytes more than its header says (3 tokens");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240520, 1, -3, u16, 8)), FSDP_ERR_FORMAT,
                 "says -3 tokens, a negative number");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240520, 1, 0x7fffffff, u16, 8)), FSDP_ERR_FORMAT,
                 "the file is 4294967286 bytes short");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240520, 2, 4, u16, 8)), FSDP_ERR_FORMAT,
                 "(magic 20240520) has version 2; fsdp reads version 1");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240801, 1, 4, u16, 8)), FSDP_ERR_FORMAT,
                 "(magic 20240801) has version 1; fsdp reads version 7");
    assert_fails(open_one(&ds, put_llmc("h.bin", 20240326, 3, 4, u16, 8)), FSDP_ERR_FORMAT,
                 "(magic 20240326) holds a model's parameters, not tokens");
    assert_fails(open_one(&ds, put_llmc("h.bin", (int32_t)__builtin_bswap32(20240520), 1, 4, u16, 8)),
                 FSDP_ERR_FORMAT, "h.bin: its first number is 20240520 byte-swapped");
    assert_fails(open_one(&ds, scratch_write("h.bin", (int32_t[]){ 20240520, 1, 0 }, 12)), FSDP_ERR_FORMAT,
                 "the file has 12 bytes, and its header alone would have 1024");
    assert_fails(open_one(&ds, scratch_write("h.bin", (int32_t[]){ 20240520 }, 4)), FSDP_ERR_FORMAT,
                 "the file has 4 bytes, and its header alone");
    assert_fails(open_with(&ds, (fsdp_dataset_opts){ .format = FSDP_DATASET_TOKENS },
                           scratch_text("t.txt", "hello world")),
                 FSDP_ERR_FORMAT,
                 "t.txt: not a token file: it begins with 1819043176, not with 20240520 or 20240801");
    assert_fails(open_one(&ds, scratch_text("m.bin", "PK\3\4rest")), FSDP_ERR_FORMAT,
                 "m.bin: neither text nor tokens: it looks like a zip archive");
    assert_fails(open_one(&ds, scratch_text("m.txt", "\037\213\010rest")), FSDP_ERR_FORMAT,
                 "m.txt: neither text nor tokens: it looks like data compressed with gzip");
    assert_fails(open_one(&ds, scratch_text("m.txt", "version https://git-lfs.github.com/spec/v1\noid")),
                 FSDP_ERR_FORMAT, "a git-lfs pointer");
    assert_fails(open_one(&ds, scratch_write("m.bin", "\20\0\0\0\0\0\0\0{\"a\":{}}        ", 24)),
                 FSDP_ERR_FORMAT, "it looks like a safetensors file");
    assert_null(ds);
    assert_ok(open_one(&ds, scratch_text("page.html", "<!DOCTYPE html>"))); /* a corpus may be of those */
    fsdp_dataset_close(ds);
}

static void test_refused_options(void **state)
{
    (void)state;
    fsdp_dataset *ds = NULL;
    char *path = scratch_text("o.txt", "0123456789");
    const char *empty[] = { "" }, *null[] = { NULL };
    assert_fails(fsdp_dataset_open(&ds, NULL), FSDP_ERR_INVALID, "0 files are named");
    assert_fails(fsdp_dataset_open(NULL, &(fsdp_dataset_opts){ 0 }), FSDP_ERR_INVALID,
                 "a place for its result");
    assert_fails(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ 0 }), FSDP_ERR_INVALID,
                 "0 files are named; at least 1");
    assert_fails(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = empty, .path_count = -1 }),
                 FSDP_ERR_INVALID, "-1 files are named");
    assert_fails(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = empty, .path_count = 1 }),
                 FSDP_ERR_INVALID, "path number 0 of the data is empty");
    assert_fails(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = null, .path_count = 1 }),
                 FSDP_ERR_INVALID, "path number 0 of the data is empty");
    const struct {
        fsdp_dataset_opts o;
        const char *text;
    } bad[] = {
        { { .format = (fsdp_dataset_format)3 }, "format is 3" },
        { { .part = (fsdp_dataset_part)9 }, "part is 9" },
        { { .vocab_size = -1 }, "vocab_size is -1" },
        { { .vocab_size = ((int64_t)1 << 31) + 1 }, "vocab_size is 2147483649" },
        { { .seq = -1 }, "seq is -1" },
        { { .seq = INT64_MAX }, "seq is 9223372036854775807" },
        { { .val_fraction = -0.1 }, "val_fraction is -0.1" },
        { { .val_fraction = 1 }, "val_fraction is 1" },
        { { .val_fraction = NAN }, "val_fraction is nan" },
        { { .part = FSDP_DATASET_VAL }, "part is VAL and val_fraction is 0" },
        { { .seq = 10 }, "o.txt: the data needs at least 11 tokens (seq 10 and one to predict), has 10" },
        { { .seq = INT64_MAX - 1 }, "needs at least 9223372036854775807 tokens" },
        { { .seq = 8, .val_fraction = 0.2, .part = FSDP_DATASET_TRAIN },
          "the training part needs at least 9 tokens (seq 8 and one to predict), has 8 (of 10; val_fraction "
          "0.2)" },
        { { .seq = 2, .val_fraction = 0.2, .part = FSDP_DATASET_VAL },
          "the evaluation part needs at least 3 tokens (seq 2 and one to predict), has 2 (of 10" },
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_fails(open_with(&ds, bad[i].o, path), FSDP_ERR_INVALID, bad[i].text);
    assert_null(ds);
    assert_ok(open_with(&ds, (fsdp_dataset_opts){ .seq = 9 }, path));
    fsdp_dataset_close(ds);
}

/* The first id that is too large, wherever it is. */
static void test_ids(void **state)
{
    (void)state;
    enum { N = 200001 };
    static uint16_t u16[N];
    static uint32_t u32[N];
    const int64_t at[] = { 0, 1, 65535, 131071, 131072, N - 1 };
    char text[128];
    fsdp_dataset *ds = NULL;
    for (int i = 0; i < N; i++) u16[i] = (uint16_t)(i % 13), u32[i] = (uint32_t)(i % 13);
    for (size_t k = 0; k < sizeof(at) / sizeof(at[0]); k++) {
        u16[at[k]] = 13;
        u32[at[k]] = 0xffffffff;
        char *a = scratch_write("a.bin", u16, sizeof(u16)),
             *b = put_llmc("b.bin", 20240801, 7, N, u32, sizeof(u32));
        snprintf(text, sizeof(text), "a.bin: token %lld is id 13, not below vocab_size 13", (long long)at[k]);
        assert_fails(open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 13 }, a), FSDP_ERR_FORMAT, text);
        assert_ok(open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 14 }, a));
        fsdp_dataset_close(ds);
        snprintf(text, sizeof(text), "b.bin: token %lld is id 4294967295, not below vocab_size 2147483648",
                 (long long)at[k]);
        assert_fails(open_one(&ds, b), FSDP_ERR_FORMAT, text);
        u16[at[k]] = 0;
        u32[at[k]] = 0;
    }
    u16[77] = 65535;
    char *a = scratch_write("a.bin", u16, sizeof(u16));
    assert_fails(open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 65535 }, a), FSDP_ERR_FORMAT,
                 "token 77 is id 65535");
    assert_ok(open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 65536 }, a));
    fsdp_dataset_close(ds);
    char *t = scratch_text("t.txt", "\1\2\14z\377");
    assert_fails(open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 13 }, t), FSDP_ERR_FORMAT,
                 "t.txt: byte 3 is 122 'z', not below vocab_size 13: text needs a vocabulary of 256");
    assert_fails(open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 255 }, t), FSDP_ERR_FORMAT,
                 "byte 4 is 255, not below vocab_size 255");
    assert_ok(open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 256 }, t));
    fsdp_dataset_close(ds);
}

/* What changes after the check is noticed when it is read. */
static void test_files_that_change(void **state)
{
    (void)state;
    fsdp_dataset *ds;
    int32_t out[4];
    char *path = scratch_write("c.bin", (uint16_t[]){ 1, 2, 3, 4 }, 8);
    assert_ok(open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 5 }, path));
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, &(uint16_t){ 999 }, 2, 4), 2);
    close(fd);
    assert_ok(fsdp_dataset_read(ds, 0, 2, out));
    assert_fails(fsdp_dataset_read(ds, 0, 4, out), FSDP_ERR_FORMAT,
                 "c.bin: token 2 is id 999, not below vocab_size 5");
    assert_int_equal(truncate(path, 4), 0);
    assert_fails(fsdp_dataset_read(ds, 2, 2, out), FSDP_ERR_IO, "was truncated");
    fsdp_dataset_close(ds);
}

/* Both parts together are the whole, the cut is where other programs have it, and it may lie within a file.
 */
static void test_parts(void **state)
{
    (void)state;
    const double fractions[] = { 0, 0.1, 0.2, 0.3, 0.5, 0.9, 0.98, 1e-9 };
    char text[101];
    for (int i = 0; i < 101; i++) text[i] = (char)(i + 1);
    const char *paths[] = { scratch_write("s1", text, 60), scratch_write("s2", text + 60, 41) };
    for (size_t k = 0; k < sizeof(fractions) / sizeof(fractions[0]); k++) {
        int64_t sizes[3];
        for (int part = 0; part < 3; part++) {
            fsdp_dataset *ds;
            if (fractions[k] == 0 && part == FSDP_DATASET_VAL) {
                sizes[part] = 0;
                continue;
            }
            assert_ok(fsdp_dataset_open(&ds, &(fsdp_dataset_opts){ .paths = paths,
                                                                   .path_count = 2,
                                                                   .val_fraction = fractions[k],
                                                                   .part = (fsdp_dataset_part)part }));
            sizes[part] = fsdp_dataset_tokens(ds);
            assert_int_equal(fsdp_dataset_total(ds), 101);
            int32_t first;
            assert_ok(fsdp_dataset_read(ds, 0, 1, &first));
            assert_int_equal(first, part == FSDP_DATASET_VAL ? text[sizes[FSDP_DATASET_TRAIN]] : 1);
            fsdp_dataset_close(ds);
        }
        assert_int_equal(sizes[FSDP_DATASET_ALL], 101);
        assert_int_equal(sizes[FSDP_DATASET_TRAIN] + sizes[FSDP_DATASET_VAL], 101);
        assert_int_equal(sizes[FSDP_DATASET_TRAIN], (int64_t)(101 * (1 - fractions[k])));
    }
}

static void test_batches(void **state)
{
    (void)state;
    enum { N = 1000, SEQ = 7, B = 5 };
    static uint16_t u16[N];
    for (int i = 0; i < N; i++) u16[i] = (uint16_t)(i * 37 % 1009);
    const char *paths[] = { scratch_write("b1.bin", u16, 602),
                            scratch_write("b2.bin", u16 + 301, 2 * (N - 301)) };
    fsdp_dataset *ds;
    fsdp_sampler s, wrong;
    assert_ok(fsdp_dataset_open(
        &ds, &(fsdp_dataset_opts){ .paths = paths, .path_count = 2, .seq = SEQ, .vocab_size = 1009 }));
    assert_ok(fsdp_sampler_init(&s, fsdp_dataset_tokens(ds), SEQ, 3));
    assert_ok(fsdp_sampler_init(&wrong, 900, SEQ, 3));
    int32_t inputs[B * SEQ + 1], labels[B * SEQ + 1];
    inputs[B * SEQ] = labels[B * SEQ] = -7;
    for (int64_t g = 0; g < 400; g += B) {
        assert_ok(fsdp_dataset_batch(ds, &s, g, B, inputs, labels));
        for (int i = 0; i < B; i++) {
            int64_t first;
            assert_ok(fsdp_sampler_locate(&s, g + i, NULL, NULL, &first));
            for (int t = 0; t < SEQ; t++) {
                assert_int_equal(inputs[i * SEQ + t], u16[first + t]);
                assert_int_equal(labels[i * SEQ + t], u16[first + t + 1]);
            }
        }
        assert_true(inputs[B * SEQ] == -7 && labels[B * SEQ] == -7);
    }
    assert_ok(fsdp_dataset_batch(ds, &s, 3, 0, NULL, NULL));
    assert_fails(fsdp_dataset_batch(ds, &wrong, 0, B, inputs, labels), FSDP_ERR_INVALID,
                 "the sampler was made for 900 tokens; the data has 1000");
    assert_fails(fsdp_dataset_batch(ds, &s, -1, B, inputs, labels), FSDP_ERR_INVALID, "samples -1");
    assert_fails(fsdp_dataset_batch(ds, &s, 0, -1, inputs, labels), FSDP_ERR_INVALID,
                 "a batch of -1 windows");
    assert_fails(fsdp_dataset_batch(ds, &s, 0, INT64_MAX, inputs, labels), FSDP_ERR_INVALID,
                 "a batch of 9223372036854775807");
    assert_fails(fsdp_dataset_batch(ds, &s, INT64_MAX, 1, inputs, labels), FSDP_ERR_INVALID,
                 "samples 9223372036854775807");
    fsdp_dataset_close(ds);
}

/* Dealt to any number of ranks, as many batches on each: every prediction once, the rest is padding. */
static void test_eval_batches(void **state)
{
    (void)state;
    enum { N = 45, SEQ = 4, B = 3 };
    char text[N];
    for (int i = 0; i < N; i++) text[i] = (char)(i + 1);
    fsdp_dataset *ds;
    int32_t inputs[B * SEQ], labels[B * SEQ];
    for (int n = 2; n <= N; n++) {
        assert_ok(open_one(&ds, scratch_write("e.txt", text, (size_t)n)));
        for (int ranks = 1; ranks <= 5; ranks++) {
            int64_t windows;
            int seen[N] = { 0 };
            assert_ok(fsdp_eval_windows(n, SEQ, &windows));
            int64_t batches = (windows + ranks * B - 1) / (ranks * B);
            for (int rank = 0; rank < ranks; rank++) {
                for (int64_t i = 0; i < batches; i++) {
                    assert_ok(fsdp_dataset_eval_batch(ds, SEQ, (i * ranks + rank) * B, B, inputs, labels));
                    for (int k = 0; k < B * SEQ; k++) {
                        if (labels[k] == FSDP_DATA_NO_LABEL) {
                            assert_int_equal(inputs[k], 0);
                            continue;
                        }
                        assert_int_equal(labels[k], inputs[k] + 1);
                        seen[labels[k] - 1]++;
                    }
                }
            }
            assert_int_equal(seen[0], 0);
            for (int k = 1; k < n; k++) assert_int_equal(seen[k], 1);
        }
        fsdp_dataset_close(ds);
    }
    assert_ok(open_with(&ds, (fsdp_dataset_opts){ 0 }, scratch_text("e.txt", "x")));
    assert_fails(fsdp_dataset_eval_batch(ds, SEQ, 0, 1, inputs, labels), FSDP_ERR_INVALID,
                 "at least 2 tokens");
    fsdp_dataset_close(ds);
    assert_ok(open_one(&ds, scratch_text("e.txt", "xyz")));
    assert_fails(fsdp_dataset_eval_batch(ds, 0, 0, 1, inputs, labels), FSDP_ERR_INVALID, "seq is 0");
    assert_fails(fsdp_dataset_eval_batch(ds, SEQ, -1, 1, inputs, labels), FSDP_ERR_INVALID, "windows -1");
    assert_fails(fsdp_dataset_eval_batch(ds, INT64_MAX, 0, 2, inputs, labels), FSDP_ERR_INVALID,
                 "a batch of 2 windows");
    fsdp_dataset_close(ds);
}

static void test_no_memory(void **state)
{
    (void)state;
    char pattern[128];
    assert_int_equal(mkdir(scratch("nm"), 0700), 0);
    for (char c = 'a'; c < 'm'; c++) scratch_write((char[]){ 'n', 'm', '/', c, '\0' }, "12", 2);
    snprintf(pattern, sizeof(pattern), "%s/nm/*", scratch_dir);
    long live = fsdpi_alloc_live();
    fsdp_status rc = FSDP_ERR_NOMEM;
    for (long n = 1; rc != FSDP_OK; n++) {
        fsdp_dataset *ds = NULL;
        fsdpi_alloc_fail_at(n);
        rc = open_with(&ds, (fsdp_dataset_opts){ .vocab_size = 200 }, pattern);
        fsdpi_alloc_fail_at(0);
        assert_true(rc == FSDP_OK || (rc == FSDP_ERR_NOMEM && ds == NULL));
        fsdp_dataset_close(ds);
        assert_int_equal(fsdpi_alloc_live(), live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),           cmocka_unit_test(test_several_files),
        cmocka_unit_test(test_many_files),        cmocka_unit_test(test_refused_files),
        cmocka_unit_test(test_refused_options),   cmocka_unit_test(test_ids),
        cmocka_unit_test(test_files_that_change), cmocka_unit_test(test_parts),
        cmocka_unit_test(test_batches),           cmocka_unit_test(test_eval_batches),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
