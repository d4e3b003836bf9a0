/* SPDX-License-Identifier: MIT
 *
 * Whatever the bytes of a file are, opening it gives a table whose every tensor can be read, or one message
 * that names the file, the tensor and the numbers; and the numbers that are read are those of the file. */
#include "format/scratch.h"

#include <fsdp/safetensors.h>

#include "base/alloc.h"

#include <math.h>

/* A file of this header (its length in front) and data. In the header ' stands for ". */
static char *put(const char *name, const char *header, const void *data, size_t bytes)
{
    size_t n = strlen(header);
    char *all = malloc(8 + n + bytes);
    assert_non_null(all);
    uint64_t length = n;
    memcpy(all, &length, 8);
    memcpy(all + 8, header, n);
    scratch_quotes(all + 8, n);
    if (bytes > 0) memcpy(all + 8 + n, data, bytes);
    char *path = scratch_write(name, all, 8 + n + bytes);
    free(all);
    return path;
}

static const char zeros[4096];

/* ---- files that are right, however odd ------------------------------------------------------------------
 */

static void test_a_usual_file(void **state)
{
    (void)state;
    const float w[6] = { 1, 2, 3, 4, 5, 6 };
    fsdp_safetensors *st;
    char *path = put("usual.safetensors",
                     "{'__metadata__':{'format':'pt','who':'me'},'w':{'dtype':'F32','shape':[2,3],'data_"
                     "offsets':[8,32]},'n':{'dtype':'I64','shape':[],'data_offsets':[0,8]}}    ",
                     NULL, 0);
    FILE *f = fopen(path, "ab");
    int64_t n = -5, got_n;
    assert_non_null(f);
    assert_true(fwrite(&n, 8, 1, f) == 1 && fwrite(w, sizeof(w), 1, f) == 1 && fclose(f) == 0);
    assert_ok(fsdp_safetensors_open(&st, path));
    assert_int_equal(fsdp_safetensors_count(st), 2);
    const fsdp_safetensors_tensor *t = fsdp_safetensors_at(st, 1);
    assert_string_equal(t->name, "w");
    assert_ptr_equal(t, fsdp_safetensors_find(st, "w"));
    assert_true(t->dtype == FSDP_F32 && t->ndim == 2 && t->shape[0] == 2 && t->shape[1] == 3);
    assert_true(t->numel == 6 && t->bytes == 24);
    assert_string_equal(t->file, path);
    float got[6];
    assert_ok(fsdp_safetensors_read_f32(st, t, 0, 6, got));
    assert_memory_equal(got, w, sizeof(w));
    assert_ok(fsdp_safetensors_read_f32(st, t, 4, 2, got));
    assert_true(got[0] == 5 && got[1] == 6);
    assert_ok(fsdp_safetensors_read_f32(st, t, 6, 0, NULL));
    const fsdp_safetensors_tensor *s = fsdp_safetensors_find(st, "n");
    assert_true(s == fsdp_safetensors_at(st, 0) && s->ndim == 0 && s->numel == 1);
    assert_ok(fsdp_safetensors_read_raw(st, s, 0, 1, &got_n));
    assert_int_equal(got_n, -5);
    assert_null(fsdp_safetensors_find(st, "wx"));
    assert_null(fsdp_safetensors_find(st, ""));
    assert_null(fsdp_safetensors_at(st, 2));
    assert_null(fsdp_safetensors_at(st, -1));
    assert_int_equal(fsdp_safetensors_metadata_count(st), 2);
    assert_string_equal(fsdp_safetensors_metadata_at(st, 1)->key, "who");
    assert_null(fsdp_safetensors_metadata_at(st, 2));
    assert_string_equal(fsdp_safetensors_metadata_find(st, "format"), "pt");
    assert_null(fsdp_safetensors_metadata_find(st, "x"));

    assert_fails(fsdp_safetensors_read_f32(st, t, 4, 3, got), FSDP_ERR_INVALID,
                 "\"w\" has 6 elements; 3 from number 4");
    assert_fails(fsdp_safetensors_read_raw(st, t, -1, 1, got), FSDP_ERR_INVALID, "from number -1");
    assert_fails(fsdp_safetensors_read_raw(st, t, 1, INT64_MAX, got), FSDP_ERR_INVALID, "from number 1");
    assert_fails(fsdp_safetensors_read_f32(st, s, 0, 1, got), FSDP_ERR_INVALID, "\"n\" is of type I64");
    fsdp_safetensors_tensor copy = *t;
    assert_fails(fsdp_safetensors_read_f32(st, &copy, 0, 1, got), FSDP_ERR_INVALID, "not one of the set");
    assert_int_equal(truncate(path, t->offset + 20), 0);
    assert_fails(fsdp_safetensors_read_f32(st, t, 0, 6, got), FSDP_ERR_IO, "was truncated");
    fsdp_safetensors_close(st);
    fsdp_safetensors_close(NULL);
}

/* Legal, and seen in the wild: count of tensors and of metadata strings. */
static void test_legal_but_unusual(void **state)
{
    (void)state;
    const struct {
        const char *header;
        size_t bytes;
        int tensors, strings;
    } ok[] = {
        { "{}", 0, 0, 0 },
        { "{} ", 0, 0, 0 },
        { "{'__metadata__':{}}", 0, 0, 0 },
        { "{'__metadata__':null}", 0, 0, 0 },
        { "{'__metadata__':{'a':'','':'b'}}", 0, 0, 2 },
        { "{'s':{'dtype':'F32','shape':[],'data_offsets':[0,4]}}", 4, 1, 0 },
        { "{'z':{'dtype':'F32','shape':[0],'data_offsets':[0,0]}}", 0, 1, 0 },
        { "{'z':{'dtype':'F32','shape':[0,9223372036854775807,9],'data_offsets':[0,0]}}", 0, 1, 0 },
        /* tensors of no bytes, first, between and last */
        { "{'c':{'dtype':'U8','shape':[3,0],'data_offsets':[3,3]},'a':{'dtype':'U8','shape':[0],'data_"
          "offsets':[0,0]},'b':{'dtype':'U8','shape':[1],'data_offsets':[0,1]},'d':{'dtype':'U8','shape':[0],"
          "'data_offsets':[1,1]},'e':{'dtype':'BOOL','shape':[2],'data_offsets':[1,3]}}",
          3, 5, 0 },
        { "{'':{'dtype':'U8','shape':[1,1,1,1,1,1,1,1,1,1,1,1],'data_offsets':[0,1]}}", 1, 1, 0 },
        { "{'a':{'dtype':'I8','shape':[1],'data_offsets':[0,1],'strides':[1],'more':{'x':null}}}", 1, 1, 0 },
        { "{ 'a' : { 'data_offsets' : [ 0 , 1 ] , 'shape' : [ ] , 'dtype' : 'U8' } }\n\t\r ", 1, 1, 0 },
        { "{'\\u00e9\\n\\'':{'dtype':'F64','shape':[1],'data_offsets':[0,8]}}", 8, 1, 0 },
    };
    for (size_t i = 0; i < sizeof(ok) / sizeof(ok[0]); i++) {
        fsdp_safetensors *st;
        assert_ok(fsdp_safetensors_open(&st, put("ok", ok[i].header, zeros, ok[i].bytes)));
        assert_int_equal(fsdp_safetensors_count(st), ok[i].tensors);
        assert_int_equal(fsdp_safetensors_metadata_count(st), ok[i].strings);
        size_t bytes = 0;
        for (int k = 0; k < ok[i].tensors; k++) {
            char buffer[64];
            const fsdp_safetensors_tensor *t = fsdp_safetensors_at(st, k);
            assert_ptr_equal(t, fsdp_safetensors_find(st, t->name));
            assert_ok(fsdp_safetensors_read_raw(st, t, 0, t->numel, buffer));
            bytes += t->bytes;
        }
        assert_int_equal(bytes, ok[i].bytes);
        fsdp_safetensors_close(st);
    }
}

/* Data at odd addresses in the file, in pieces of every length around the reader's own. */
static void test_unaligned_and_converted(void **state)
{
    (void)state;
    enum { N = 10007 };
    static char data[1 + N * 2 + N * 2 + N * 8 + N * 4];
    static float got[N];
    char header[512], *p = data + 1;
    for (int i = 0; i < N; i++) {
        float x = ldexpf((float)(i % 255 - 127), i % 13 - 6);
        double d = (double)x + 1e-12 * i;
        uint16_t b = fsdp_bf16_from_f32(x), h = fsdp_f16_from_f32(x);
        memcpy(p + 2 * i, &b, 2);
        memcpy(p + 2 * N + 2 * i, &h, 2);
        memcpy(p + 4 * N + 8 * i, &d, 8);
        memcpy(p + 12 * N + 4 * i, &x, 4);
    }
    snprintf(
        header, sizeof(header),
        "{'pad':{'dtype':'U8','shape':[1],'data_offsets':[0,1]},'BF16':{'dtype':'BF16','shape':[%d],'data_"
        "offsets':[1,%d]},'F16':{'dtype':'F16','shape':[%d],'data_offsets':[%d,%d]},'F64':{'dtype':'F64','"
        "shape':[%d],'data_offsets':[%d,%d]},'F32':{'dtype':'F32','shape':[%d],'data_offsets':[%d,%d]}}",
        N, 1 + 2 * N, N, 1 + 2 * N, 1 + 4 * N, N, 1 + 4 * N, 1 + 12 * N, N, 1 + 12 * N, 1 + 16 * N);
    fsdp_safetensors *st;
    assert_ok(fsdp_safetensors_open(&st, put("odd.safetensors", header, data, sizeof(data))));
    const char *names[] = { "BF16", "F16", "F64", "F32" };
    for (int k = 0; k < 4; k++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_find(st, names[k]);
        memset(got, 0xff, sizeof(got));
        for (int64_t at = 0, n = 1; at < N; at += n, n = n * 7 % 5003)
            assert_ok(fsdp_safetensors_read_f32(st, t, at, at + n < N ? n : N - at, got + at));
        for (int i = 0; i < N; i++) {
            float x = ldexpf((float)(i % 255 - 127), i % 13 - 6);
            if (k == 2) x = (float)((double)x + 1e-12 * i);
            assert_true(got[i] == x); /* 8 significant bits: exact in every type */
        }
    }
    fsdp_safetensors_close(st);
}

/* Infinities, NaN, the smallest and what float cannot hold. */
static void test_extreme_values(void **state)
{
    (void)state;
    const double d[5] = { 1e300, -1e300, NAN, 0x1p-149, 0x1p-160 };
    const uint16_t h[5] = { 0x7c00, 0xfc00, 0x7e01, 0x0001, 0x8000 };
    char data[50];
    float got[5];
    fsdp_safetensors *st;
    memcpy(data, d, 40);
    memcpy(data + 40, h, 10);
    assert_ok(fsdp_safetensors_open(&st, put("extreme",
                                             "{'d':{'dtype':'F64','shape':[5],'data_offsets':[0,40]},'h':{'"
                                             "dtype':'F16','shape':[5],'data_offsets':[40,50]}}",
                                             data, 50)));
    assert_ok(fsdp_safetensors_read_f32(st, fsdp_safetensors_find(st, "d"), 0, 5, got));
    assert_true(got[0] == INFINITY && got[1] == -INFINITY && isnan(got[2]) && got[3] == 0x1p-149f &&
                got[4] == 0);
    assert_ok(fsdp_safetensors_read_f32(st, fsdp_safetensors_find(st, "h"), 0, 5, got));
    assert_true(got[0] == INFINITY && got[1] == -INFINITY && isnan(got[2]) && got[3] == 0x1p-24f &&
                got[4] == 0 && signbit(got[4]));
    fsdp_safetensors_close(st);
}

/* ---- files that are wrong ------------------------------------------------------------------------------ */

#define A(rest) "{'a':{" rest "}}"

static void test_wrong_headers(void **state)
{
    (void)state;
    const struct {
        const char *header;
        size_t bytes;
        const char *text;
    } bad[] = {
        { "[]", 0, "should begin with '{'" },
        { " {}", 0, "should begin with '{'" },
        { "{", 0, "says that its header is 1 bytes long" },
        { "{'a'", 0, "bad: not valid JSON at line 1, column 4" },
        { "{}x", 0, "end of file expected" },
        { "{'a':1}", 0, "entry of tensor \"a\" should be an object" },
        { "{'a':{'dtype':'U8','shape':[],'data_offsets':[0,1]},'a':{'dtype':'U8','shape':[],'data_offsets':["
          "1,2]}}",
          2, "duplicate object key near '\"a\"'" },
        { "{'__metadata__':{'a':'1','a':'1'}}", 0, "duplicate object key" },
        { A("'dtype':'U8','dtype':'U8','shape':[],'data_offsets':[0,1]"), 1, "duplicate object key" },
        { "{'__metadata__':[]}", 0, "\"__metadata__\" in its header should be an object" },
        { "{'__metadata__':{'a':1}}", 0, "the value of \"a\" should be a string" },
        { "{'__metadata__':{'dtype':'U8','shape':[],'data_offsets':[0,1]}}", 1, "the name is reserved" },
        { "{'a\\u0000b':{'dtype':'U8','shape':[],'data_offsets':[0,1]}}", 1, "not valid JSON" },
        { A("'shape':[],'data_offsets':[0,1]"), 1, "tensor \"a\" has no \"dtype\"" },
        { A("'dtype':7,'shape':[],'data_offsets':[0,1]"), 1, "tensor \"a\" has no \"dtype\"" },
        { A("'dtype':'F8_E4M3','shape':[],'data_offsets':[0,1]"), 1,
          "tensor \"a\" has the element type \"F8_E4M3\"" },
        { A("'dtype':'f32','shape':[],'data_offsets':[0,4]"), 4, "element type \"f32\"" },
        { A("'dtype':'U8','data_offsets':[0,1]"), 1, "tensor \"a\" has no \"shape\"" },
        { A("'dtype':'U8','shape':{},'data_offsets':[0,1]"), 1, "tensor \"a\" has no \"shape\"" },
        { A("'dtype':'U8','shape':[1,-1],'data_offsets':[0,1]"), 1, "tensor \"a\": size 1 of its shape" },
        { A("'dtype':'U8','shape':[1.0],'data_offsets':[0,1]"), 1, "tensor \"a\": size 0 of its shape" },
        { A("'dtype':'U8','shape':['1'],'data_offsets':[0,1]"), 1, "tensor \"a\": size 0 of its shape" },
        { A("'dtype':'U8','shape':[18446744073709551615],'data_offsets':[0,1]"), 1, "too big integer" },
        { A("'dtype':'U8','shape':[4294967296,4294967296],'data_offsets':[0,0]"), 0,
          "does not fit into 63 bits" },
        { A("'dtype':'F64','shape':[2305843009213693952],'data_offsets':[0,0]"), 0,
          "does not fit into 63 bits" },
        { A("'dtype':'U8','shape':[9223372036854775807,2,0],'data_offsets':[0,0]"), 0,
          "does not fit into 63 bits" },
        { A("'dtype':'U8','shape':[]"), 1, "tensor \"a\" has no \"data_offsets\"" },
        { A("'dtype':'U8','shape':[],'data_offsets':[0]"), 1, "tensor \"a\" has no \"data_offsets\" of two" },
        { A("'dtype':'U8','shape':[],'data_offsets':[0,1,2]"), 1,
          "tensor \"a\" has no \"data_offsets\" of two" },
        { A("'dtype':'U8','shape':[],'data_offsets':[0,1.0]"), 1,
          "tensor \"a\" has no \"data_offsets\" of two integers" },
        { A("'dtype':'U8','shape':[],'data_offsets':[-1,0]"), 1, "data_offsets [-1, 0] are no range" },
        { A("'dtype':'U8','shape':[],'data_offsets':[1,0]"), 1, "data_offsets [1, 0] are no range" },
        { A("'dtype':'F32','shape':[2],'data_offsets':[0,4]"), 4, "make 8 bytes, its data_offsets [0, 4] 4" },
        { A("'dtype':'U8','shape':[9223372036854775807],'data_offsets':[0,9223372036854775807]"), 4,
          "is 9223372036854775803 bytes short" },
        { A("'dtype':'U8','shape':[1],'data_offsets':[1,2]"), 2,
          "a hole of 1 bytes before the data of tensor \"a\"" },
        { "{'a':{'dtype':'U8','shape':[1],'data_offsets':[0,1]},'b':{'dtype':'U8','shape':[1],'data_offsets':"
          "[3,4]}}",
          4, "a hole of 2 bytes before the data of tensor \"b\"" },
        { "{'a':{'dtype':'U8','shape':[2],'data_offsets':[0,2]},'b':{'dtype':'U8','shape':[2],'data_offsets':"
          "[1,3]}}",
          3, "the data of tensors \"a\" and \"b\" overlap at byte 1" },
        { "{'a':{'dtype':'U8','shape':[2],'data_offsets':[0,2]},'b':{'dtype':'U8','shape':[2],'data_offsets':"
          "[0,2]}}",
          2, "\"a\" and \"b\" overlap at byte 0" },
        { "{'a':{'dtype':'U8','shape':[2],'data_offsets':[0,2]},'b':{'dtype':'U8','shape':[0],'data_offsets':"
          "[1,1]}}",
          2, "overlap at byte 1" },
        { A("'dtype':'F32','shape':[2],'data_offsets':[0,8]"), 4,
          "the file is 4 bytes short of what its header says" },
        { A("'dtype':'F32','shape':[2],'data_offsets':[0,8]"), 12,
          "the file has 4 bytes more than its header says" },
        { "{}", 1, "the file has 1 bytes more" },
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        fsdp_safetensors *st = NULL;
        assert_fails(fsdp_safetensors_open(&st, put("bad", bad[i].header, zeros, bad[i].bytes)),
                     FSDP_ERR_FORMAT, bad[i].text);
        assert_null(st);
        assert_non_null(strstr(fsdp_last_error_message(), scratch("bad")));
    }
}

static void test_what_the_file_really_is(void **state)
{
    (void)state;
#define S(text) text, sizeof(text) - 1
    const struct {
        const char *bytes;
        size_t n;
        const char *text;
    } files[] = {
        { S(""), "the file is empty" },
        { S("x"), "only 1 bytes long" },
        { S("\1\0\0\0\0\0\0"), "only 7 bytes long" },
        { S("\2\0\0\0\0\0\0\0"), "at least 2 bytes short of what its header says" },
        { S("\2\0\0\0\0\0\0\0{"), "at least 1 bytes short of what its header says" },
        { S("\0\0\0\0\0\0\0\0\0\0\0\0"), "all zeros" },
        { S("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"), "a git-lfs pointer" },
        { S("<!DOCTYPE html><html>"), "an HTML page" },
        { S("\n  <HTML lang=en>"), "an HTML page" },
        { S("PK\3\4\24\0\0\0\0\0\0\0\0\0archive/data.pkl"), "a zip archive, as torch.save writes" },
        { S("\x80\2\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.\x80\2M\xe9"), "a Python pickle" },
        { S("GGUF\3\0\0\0\0\0\0\0\0\0\0\0"), "a GGUF file" },
        { S("\211HDF\r\n\032\n\0\0\0\0"), "an HDF5 file" },
        { S("\223NUMPY\1\0v\0{'descr'"), "a NumPy array" },
        { S("\037\213\010\0\0\0\0\0\0\0"), "data compressed with gzip" },
        { S("{\"weight_map\": {}}"), "JSON text" },
        { S("{\0\0\0\0\0\0\0 {}"), "its header should begin with '{'" },
        { S("\037\213\010\0\0\0\0\0\0\003"), "data compressed with gzip" },
        { S("\0\0\0\0\0\0\0\1{\"a\":"), "say 72057594037927936 bytes, and the format allows 100000000" },
        { S("\1\341\365\5\0\0\0\0{\"a\":"), "say 100000001 bytes, and the format allows 100000000" },
        { S("\1\341\365\5\0\0\0\0{ \"a\":"), "say 100000001 bytes" },
        { S("\377\377\377\377\377\377\377\377{\"a\":"), "say 18446744073709551615 bytes" },
        { S("the quick brown fox"), "its first 8 bytes, the length of its header, say" },
        { S("\5\0\0\0\0\0\0\0abcdefghi"), "its header should begin with '{'" },
    };
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        fsdp_safetensors *st;
        assert_fails(fsdp_safetensors_open(&st, scratch_write("bad", files[i].bytes, files[i].n)),
                     FSDP_ERR_FORMAT, files[i].text);
    }
    fsdp_safetensors *st;
    assert_fails(fsdp_safetensors_open(&st, scratch("none")), FSDP_ERR_IO, "/none: there is no such file");
    assert_fails(fsdp_safetensors_open(&st, ""), FSDP_ERR_INVALID, "a path");
    assert_fails(fsdp_safetensors_open(NULL, "x"), FSDP_ERR_INVALID, "a place for its result");
    /* the first bytes are those of a pickle, and yet it is a good file: 640 bytes of header */
    char header[641];
    memset(header, ' ', 640);
    header[640] = '\0';
    memcpy(header, "{}", 2);
    assert_ok(fsdp_safetensors_open(&st, put("pickled", header, NULL, 0)));
    fsdp_safetensors_close(st);
}

/* A message shows a name of any length and with any bytes, short and clean. */
static void test_names_in_messages(void **state)
{
    (void)state;
    char header[4096] = "{'", *p = header + 2;
    for (int i = 0; i < 300; i++) p += sprintf(p, "\\u001b[31m%d", i % 10);
    strcpy(p, "\":7}");
    fsdp_safetensors *st;
    assert_fails(fsdp_safetensors_open(&st, put("bad", header, NULL, 0)), FSDP_ERR_FORMAT, "?[31m0?[31m1");
    assert_null(strchr(fsdp_last_error_message(), 0x1b));
    assert_true(strlen(fsdp_last_error_message()) < 400);
}

/* ---- every truncation, every corruption ---------------------------------------------------------------- */

static const char small_header[] =
    "{'__metadata__':{'format':'pt'},'a':{'dtype':'F32','shape':[2,1],'data_offsets':[0,8]},'b.c':{'dtype':'"
    "BF16','shape':[],'data_offsets':[8,10]},'z':{'dtype':'U8','shape':[0],'data_offsets':[10,10]}}  ";

/* Opens; if that works, reads all. Either is fine, but nothing else. */
static void open_and_read(const char *path)
{
    fsdp_safetensors *st = NULL;
    fsdp_status rc = fsdp_safetensors_open(&st, path);
    if (rc != FSDP_OK) {
        assert_true(rc == FSDP_ERR_FORMAT && st == NULL && strstr(fsdp_last_error_message(), path) != NULL);
        return;
    }
    for (int64_t i = 0; i < fsdp_safetensors_count(st); i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(st, i);
        char *raw = malloc(t->bytes + 1);
        assert_ok(fsdp_safetensors_read_raw(st, t, 0, t->numel, raw));
        assert_ptr_equal(fsdp_safetensors_find(st, t->name), t);
        free(raw);
    }
    fsdp_safetensors_close(st);
}

static void test_every_truncation(void **state)
{
    (void)state;
    fsdp_safetensors *st;
    long live = fsdpi_alloc_live();
    const size_t whole = 8 + strlen(small_header) + 10;
    char *path = put("small", small_header, zeros, 10);
    assert_ok(fsdp_safetensors_open(&st, path));
    fsdp_safetensors_close(st);
    for (size_t n = whole; n-- > 0;) {
        char short_by[64];
        assert_int_equal(truncate(path, (off_t)n), 0);
        snprintf(short_by, sizeof(short_by), "%s%zu bytes short", n < whole - 10 ? "at least " : "is ",
                 whole - n - (n < whole - 10 ? 10 : 0));
        assert_fails(fsdp_safetensors_open(&st, path), FSDP_ERR_FORMAT,
                     n == 0  ? "is empty"
                     : n < 8 ? "bytes long"
                             : short_by);
    }
    assert_int_equal(fsdpi_alloc_live(), live);
}

static void test_every_corrupted_byte(void **state)
{
    (void)state;
    long live = fsdpi_alloc_live();
    const size_t n = 8 + strlen(small_header);
    char *path = put("small", small_header, zeros, 10);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    for (size_t i = 0; i < n; i++) {
        unsigned char was;
        assert_int_equal(pread(fd, &was, 1, (off_t)i), 1);
        for (int b = 0; b < 256; b++) {
            unsigned char c = (unsigned char)b;
            assert_int_equal(pwrite(fd, &c, 1, (off_t)i), 1);
            open_and_read(path);
        }
        assert_int_equal(pwrite(fd, &was, 1, (off_t)i), 1);
    }
    close(fd);
    assert_int_equal(fsdpi_alloc_live(), live);
}

/* ---- folders and indexes ------------------------------------------------------------------------------- */

#define ONE(name) \
    "{'__metadata__':{'format':'pt'},'" name "':{'dtype':'U8','shape':[1],'data_offsets':[0,1]}}"

static void write_index(const char *map)
{
    char text[4096];
    snprintf(text, sizeof(text), "{'metadata':{'total_size':3},'weight_map':%s}", map);
    scratch_json("hf/model.safetensors.index.json", text);
}

static void test_sharded(void **state)
{
    (void)state;
    fsdp_safetensors *st;
    const fsdp_safetensors_tensor *t;
    char value;
    assert_int_equal(mkdir(scratch("hf"), 0700), 0);
    put("hf/m-1.safetensors", ONE("b"), "1", 1);
    put("hf/m-2.safetensors",
        "{'a':{'dtype':'U8','shape':[1],'data_offsets':[0,1]},'b':{'dtype':'U8','shape':[1],'data_offsets':["
        "1,2]}}",
        "23", 2);
    put("hf/other.safetensors", ONE("c"), "4", 1);
    /* "b" is in both: the index decides. other.safetensors is not of the set. */
    write_index("{'a':'m-2.safetensors','b':'m-2.safetensors','z':'m-1.safetensors'}");
    assert_fails(fsdp_safetensors_open(&st, scratch("hf")), FSDP_ERR_FORMAT,
                 "tensor \"z\" should be in m-1.safetensors, and is not");
    put("hf/m-1.safetensors",
        "{'z':{'dtype':'U8','shape':[1],'data_offsets':[0,1]},'b':{'dtype':'U8','shape':[1],'data_offsets':["
        "1,2]},'extra':{'dtype':'U8','shape':[0],'data_offsets':[2,2]}}",
        "01", 2);
    const char *names[] = { "hf", "hf/", "hf/model.safetensors.index.json" };
    for (int i = 0; i < 3; i++) {
        assert_ok(fsdp_safetensors_open(&st, scratch(names[i])));
        assert_int_equal(fsdp_safetensors_count(st), 4); /* z, extra, a, b */
        assert_string_equal(fsdp_safetensors_at(st, 1)->name, "extra");
        t = fsdp_safetensors_find(st, "b");
        assert_non_null(strstr(t->file, "/hf/m-2.safetensors"));
        assert_ok(fsdp_safetensors_read_raw(st, t, 0, 1, &value));
        assert_int_equal(value, '3');
        t = fsdp_safetensors_find(st, "z");
        assert_ok(fsdp_safetensors_read_raw(st, t, 0, 1, &value));
        assert_int_equal(value, '0');
        fsdp_safetensors_close(st);
    }
    /* both hold "b", and the index does not know it */
    write_index("{'a':'m-2.safetensors','z':'m-1.safetensors'}");
    assert_fails(fsdp_safetensors_open(&st, scratch("hf")), FSDP_ERR_FORMAT, "both hold tensor \"b\"");
    write_index("{'a':'m-2.safetensors','z':'m-7.safetensors'}");
    assert_fails(fsdp_safetensors_open(&st, scratch("hf")), FSDP_ERR_FORMAT,
                 "1 of the 2 files that it lists are not there, m-7.safetensors among them");
    const char *out[] = {
        "'../hf/m-1.safetensors'", "'/etc/passwd'", "'..'", "''", "7", "null", "'x/../../y'"
    };
    for (size_t i = 0; i < sizeof(out) / sizeof(out[0]); i++) {
        char map[128];
        snprintf(map, sizeof(map), "{'a':%s}", out[i]);
        write_index(map);
        assert_fails(fsdp_safetensors_open(&st, scratch("hf")), FSDP_ERR_FORMAT,
                     "tensor \"a\" should be mapped to the name of a file in the same folder");
    }
    write_index("{}");
    assert_fails(fsdp_safetensors_open(&st, scratch("hf")), FSDP_ERR_FORMAT, "\"weight_map\" is empty");
    write_index("[]");
    assert_fails(fsdp_safetensors_open(&st, scratch("hf")), FSDP_ERR_FORMAT,
                 "\"weight_map\" is an array; it should be an object");
    scratch_json("hf/model.safetensors.index.json", "{}");
    assert_fails(fsdp_safetensors_open(&st, scratch("hf")), FSDP_ERR_FORMAT, "\"weight_map\" is missing");
    /* a broken shard is named */
    write_index("{'a':'m-2.safetensors'}");
    assert_int_equal(truncate(scratch("hf/m-2.safetensors"), 50), 0);
    assert_fails(fsdp_safetensors_open(&st, scratch("hf")), FSDP_ERR_FORMAT,
                 "hf/m-2.safetensors: the file is at least");
}

/* More shards than are kept open; one that is replaced meanwhile is noticed. */
static void test_many_shards(void **state)
{
    (void)state;
    enum { SHARDS = 40 };
    static char map[SHARDS * 64];
    char *p = map;
    assert_int_equal(mkdir(scratch("many"), 0700), 0);
    for (int i = 0; i < SHARDS; i++) {
        char name[64], header[128];
        snprintf(name, sizeof(name), "many/s%02d.safetensors", i);
        snprintf(header, sizeof(header), "{'t%02d':{'dtype':'U8','shape':[1],'data_offsets':[0,1]}}", i);
        put(name, header, &(char){ (char)i }, 1);
        p += sprintf(p, "%s't%02d':'s%02d.safetensors'", i == 0 ? "{'weight_map':{" : ",", i, i);
    }
    strcpy(p, "}}");
    scratch_json("many/model.safetensors.index.json", map);
    fsdp_safetensors *st;
    char value;
    assert_ok(fsdp_safetensors_open(&st, scratch("many")));
    for (int i = 0; i < SHARDS; i++) {
        assert_ok(fsdp_safetensors_read_raw(st, fsdp_safetensors_at(st, i), 0, 1, &value));
        assert_int_equal(value, i);
    }
    put("many/s07.safetensors", ONE("t07"), "x", 1);
    assert_fails(fsdp_safetensors_read_raw(st, fsdp_safetensors_at(st, 7), 0, 1, &value), FSDP_ERR_IO,
                 "s07.safetensors: the file was changed or replaced");
    fsdp_safetensors_close(st);
}

static void test_folders(void **state)
{
    (void)state;
    fsdp_safetensors *st;
    assert_int_equal(mkdir(scratch("f"), 0700), 0);
    assert_fails(fsdp_safetensors_open(&st, scratch("f")), FSDP_ERR_FORMAT,
                 "there is no .safetensors file in this folder");
    scratch_text("f/pytorch_model.bin", "PK");
    assert_fails(fsdp_safetensors_open(&st, scratch("f")), FSDP_ERR_FORMAT, "only pickles of PyTorch");
    put("f/a.safetensors", ONE("a"), "1", 1);
    assert_ok(fsdp_safetensors_open(&st, scratch("f")));
    fsdp_safetensors_close(st);
    put("f/b.safetensors", ONE("b"), "1", 1);
    assert_fails(fsdp_safetensors_open(&st, scratch("f")), FSDP_ERR_FORMAT,
                 "this folder has 2 .safetensors files and no model.safetensors.index.json");
    scratch_json("f/x.safetensors.index.json", "{'weight_map':{'b':'b.safetensors'}}");
    assert_ok(fsdp_safetensors_open(&st, scratch("f")));
    assert_string_equal(fsdp_safetensors_at(st, 0)->name, "b");
    fsdp_safetensors_close(st);
    scratch_json("f/y.safetensors.index.json", "{'weight_map':{'b':'b.safetensors'}}");
    assert_fails(fsdp_safetensors_open(&st, scratch("f")), FSDP_ERR_FORMAT, "this folder has 2 indexes");
    put("f/model.safetensors", ONE("m"), "1", 1);
    assert_ok(fsdp_safetensors_open(&st, scratch("f")));
    assert_string_equal(fsdp_safetensors_at(st, 0)->name, "m");
    fsdp_safetensors_close(st);
}

static void test_no_memory(void **state)
{
    (void)state;
    assert_int_equal(mkdir(scratch("nomem"), 0700), 0);
    put("nomem/s.safetensors", ONE("a"), "1", 1);
    scratch_json("nomem/x.safetensors.index.json", "{'weight_map':{'a':'s.safetensors'}}");
    long live = fsdpi_alloc_live();
    fsdp_status rc = FSDP_ERR_NOMEM;
    for (long n = 1; rc != FSDP_OK; n++) {
        fsdp_safetensors *st = NULL;
        fsdpi_alloc_fail_at(n);
        rc = fsdp_safetensors_open(&st, scratch("nomem"));
        fsdpi_alloc_fail_at(0);
        assert_true(rc == FSDP_OK || (rc == FSDP_ERR_NOMEM && st == NULL));
        fsdp_safetensors_close(st);
        assert_int_equal(fsdpi_alloc_live(), live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_usual_file),
        cmocka_unit_test(test_legal_but_unusual),
        cmocka_unit_test(test_unaligned_and_converted),
        cmocka_unit_test(test_extreme_values),
        cmocka_unit_test(test_wrong_headers),
        cmocka_unit_test(test_what_the_file_really_is),
        cmocka_unit_test(test_names_in_messages),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_every_corrupted_byte),
        cmocka_unit_test(test_sharded),
        cmocka_unit_test(test_many_shards),
        cmocka_unit_test(test_folders),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
