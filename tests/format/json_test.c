/* SPDX-License-Identifier: MIT
 *
 * Every mistake in a JSON file is a message with the file and the field or the place. */
#include "format/scratch.h"

#include "format/json.h"

static fsdp_status parse(const char *text, json_t **out)
{
    return fsdpi_json_parse(out, "c.json", text, strlen(text));
}

static void test_syntax(void **state)
{
    (void)state;
    json_t *root;
    assert_ok(parse(" {\"a\": 1}\n ", &root));
    json_decref(root);
    assert_fails(parse("{\n  \"a\": 1,\n  \"b\": }", &root), FSDP_ERR_FORMAT,
                 "c.json: not valid JSON at line 3, column 8");
    assert_fails(parse("{\"a\": 1, \"a\": 2}", &root), FSDP_ERR_FORMAT, "duplicate object key near '\"a\"'");
    assert_fails(parse("", &root), FSDP_ERR_FORMAT, "not valid JSON at line 1");
    assert_fails(parse("[1]", &root), FSDP_ERR_FORMAT, "c.json: the JSON is an array");
    assert_fails(parse("{} x", &root), FSDP_ERR_FORMAT, "end of file expected");
    assert_fails(parse("{\"a\": \"\\u0000\"}", &root), FSDP_ERR_FORMAT, "not valid JSON");
    assert_fails(parse("{\"a\": \"\xff\"}", &root), FSDP_ERR_FORMAT, "not valid JSON");
    assert_fails(parse("{\"\x1b[31m\": 1", &root), FSDP_ERR_FORMAT, "not valid JSON");
    assert_null(strchr(fsdp_last_error_message(), 0x1b)); /* no control bytes in a message */
    assert_fails(parse("{\"a\": 99999999999999999999}", &root), FSDP_ERR_FORMAT, "too big integer");
}

static void test_depth_and_density(void **state)
{
    (void)state;
    enum { N = 4 << 20 };
    json_t *root;
    char *text = malloc(N);
    assert_non_null(text);
    memset(text, '[', N);
    memcpy(text, "{\"a\":", 5);
    assert_fails(fsdpi_json_parse(&root, "deep", text, 100000), FSDP_ERR_FORMAT, "deep: not valid JSON");
    assert_fails(fsdpi_json_parse(&root, "deep", text, N), FSDP_ERR_FORMAT, "almost only punctuation");
    for (int i = 6; i < N; i++) text[i] = i % 2 == 0 ? '1' : ',';
    memcpy(text + N - 2, "]}", 2);
    assert_fails(fsdpi_json_parse(&root, "dense", text, N), FSDP_ERR_FORMAT,
                 "dense: its 4194304 bytes of JSON");
    for (int i = 6; i < N - 2; i++) text[i] = i % 8 == 7 ? ',' : '1'; /* integers of seven digits */
    text[N - 3] = '1';
    text[7] = '1';
    assert_ok(fsdpi_json_parse(&root, "numbers", text, N));
    json_decref(root);
    free(text);
}

static void test_fields(void **state)
{
    (void)state;
    json_t *root;
    assert_ok(fsdpi_json_load(&root,
                              scratch_text("c.json",
                                           "{\"i\": -3, \"f\": 0.5, \"s\": \"x\", \"t\": true, \"z\": null,"
                                           " \"o\": {}, \"l\": [1], \"big\": 9223372036854775807}"),
                              1000));
    fsdpi_json_object o = { root, "c.json", "units[2]." };
    int64_t i;
    double f;
    bool b;
    const char *s;
    const json_t *v;
    assert_ok(fsdpi_json_int(o, "i", -3, 3, &i));
    assert_int_equal(i, -3);
    assert_ok(fsdpi_json_int(o, "big", 0, INT64_MAX, &i));
    assert_true(i == INT64_MAX);
    assert_fails(fsdpi_json_int(o, "i", 0, 3, &i), FSDP_ERR_FORMAT,
                 "c.json: the field \"units[2].i\" is -3; it should be 0 to 3");
    assert_fails(fsdpi_json_int(o, "f", 0, 3, &i), FSDP_ERR_FORMAT,
                 "\"units[2].f\" is a number with a fraction; it should be an integer");
    assert_fails(fsdpi_json_int(o, "none", 0, 3, &i), FSDP_ERR_FORMAT,
                 "c.json: the field \"units[2].none\" is missing");
    assert_fails(fsdpi_json_int(o, "z", 0, 3, &i), FSDP_ERR_FORMAT, "is missing");
    assert_ok(fsdpi_json_float(o, "f", 0, 1, &f));
    assert_true(f == 0.5);
    assert_ok(fsdpi_json_float(o, "i", -9, 1, &f));
    assert_true(f == -3);
    assert_fails(fsdpi_json_float(o, "f", 0.6, 1, &f), FSDP_ERR_FORMAT, "is 0.5; it should be 0.6 to 1");
    assert_fails(fsdpi_json_float(o, "s", 0, 1, &f), FSDP_ERR_FORMAT, "is a string; it should be a number");
    assert_ok(fsdpi_json_bool(o, "t", &b));
    assert_true(b);
    assert_fails(fsdpi_json_bool(o, "i", &b), FSDP_ERR_FORMAT, "is an integer; it should be true or false");
    assert_ok(fsdpi_json_string(o, "s", &s));
    assert_string_equal(s, "x");
    assert_fails(fsdpi_json_string(o, "l", &s), FSDP_ERR_FORMAT, "is an array; it should be a string");
    assert_ok(fsdpi_json_child(o, "o", &v));
    assert_fails(fsdpi_json_child(o, "t", &v), FSDP_ERR_FORMAT, "is true or false; it should be an object");
    assert_ok(fsdpi_json_array(o, "l", &v));
    assert_fails(fsdpi_json_array(o, "o", &v), FSDP_ERR_FORMAT, "is an object; it should be an array");

    assert_ok(fsdpi_json_int_or(o, "none", 7, 0, 3, &i));
    assert_int_equal(i, 7);
    assert_ok(fsdpi_json_int_or(o, "z", 8, 0, 3, &i));
    assert_int_equal(i, 8);
    assert_fails(fsdpi_json_int_or(o, "s", 8, 0, 3, &i), FSDP_ERR_FORMAT,
                 "is a string; it should be an integer");
    assert_ok(fsdpi_json_float_or(o, "none", 2.5, 0, 1, &f));
    assert_true(f == 2.5);
    assert_ok(fsdpi_json_bool_or(o, "none", true, &b));
    assert_true(b);
    assert_ok(fsdpi_json_string_or(o, "none", "d", &s));
    assert_string_equal(s, "d");
    assert_true(fsdpi_json_has(o, "i") && !fsdpi_json_has(o, "z") && !fsdpi_json_has(o, "none"));
    json_decref(root);

    assert_fails(fsdpi_json_load(&root, scratch("none.json"), 1000), FSDP_ERR_IO,
                 "none.json: there is no such file");
    assert_fails(fsdpi_json_load(&root, scratch("c.json"), 10), FSDP_ERR_FORMAT, "more than the 10");
    assert_fails(fsdpi_json_load(&root, scratch_text("bad.json", "{\"a\" 1}"), 1000), FSDP_ERR_FORMAT,
                 "bad.json: not valid JSON at line 1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_syntax),
        cmocka_unit_test(test_depth_and_density),
        cmocka_unit_test(test_fields),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
