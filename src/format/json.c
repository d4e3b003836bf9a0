/* SPDX-License-Identifier: MIT */
#include "format/json.h"

#include "base/alloc.h"
#include "format/fileio.h"
#include "format/shown.h"

/* Whatever its length in the text, a value costs jansson about 64 bytes and an object 320. A text that is
 * mostly punctuation would turn 100 MB into gigabytes; the densest safetensors header stays below 20 bytes a
 * byte. */
static bool is_too_dense(const char *text, size_t bytes)
{
    enum { VALUE = 64, OBJECT = 320, PER_BYTE = 20, FREE = 20 << 20 };
    uint64_t cost = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == ',' || text[i] == '[')
            cost += VALUE;
        else if (text[i] == '{')
            cost += OBJECT;
    }
    return cost > FREE && cost / PER_BYTE > bytes;
}

fsdp_status fsdpi_json_parse(json_t **out, const char *file, const char *text, size_t bytes)
{
    json_error_t e;
    FSDP_FAIL_IF(is_too_dense(text, bytes), FSDP_ERR_FORMAT,
                 "%s: its %zu bytes of JSON are almost only punctuation; no real file is like that", file,
                 bytes);
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &e);
    if (root == NULL) {
        FSDP_FAIL_IF(json_error_code(&e) == json_error_out_of_memory, FSDP_ERR_NOMEM,
                     "%s: no memory to parse %zu bytes of JSON", file, bytes);
        FSDP_FAIL(FSDP_ERR_FORMAT, "%s: not valid JSON at line %d, column %d (byte %d): %s", file, e.line,
                  e.column, e.position, fsdpi_show(e.text).s);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        FSDP_FAIL(FSDP_ERR_FORMAT, "%s: the JSON is an array; an object {...} is wanted", file);
    }
    *out = root;
    return FSDP_OK;
}

fsdp_status fsdpi_json_load(json_t **out, const char *path, size_t max_bytes)
{
    char *text = NULL;
    size_t bytes = 0;
    FSDP_TRY(fsdpi_read_file(path, max_bytes, &text, &bytes));
    fsdp_status st = fsdpi_json_parse(out, path, text, bytes);
    fsdpi_free(text);
    FSDP_TRY(st);
    return FSDP_OK;
}

bool fsdpi_json_has(fsdpi_json_object o, const char *field)
{
    const json_t *v = json_object_get(o.json, field);
    return v != NULL && !json_is_null(v);
}

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a number with a fraction";
    case JSON_TRUE:
    case JSON_FALSE: return "true or false";
    default: return "null";
    }
}

static fsdp_status get(fsdpi_json_object o, const char *field, const json_t **out)
{
    const json_t *v = json_object_get(o.json, field);
    FSDP_FAIL_IF(v == NULL || json_is_null(v), FSDP_ERR_FORMAT, "%s: the field \"%s%s\" is missing", o.file,
                 o.where, field);
    *out = v;
    return FSDP_OK;
}

static fsdp_status wrong_type(fsdpi_json_object o, const char *field, const json_t *v, const char *wanted)
{
    FSDP_FAIL(FSDP_ERR_FORMAT, "%s: the field \"%s%s\" is %s; it should be %s", o.file, o.where, field,
              type_name(v), wanted);
}

fsdp_status fsdpi_json_int(fsdpi_json_object o, const char *field, int64_t min, int64_t max, int64_t *out)
{
    const json_t *v = NULL;
    FSDP_TRY(get(o, field, &v));
    if (!json_is_integer(v)) return wrong_type(o, field, v, "an integer");
    int64_t x = json_integer_value(v);
    FSDP_FAIL_IF(x < min || x > max, FSDP_ERR_FORMAT,
                 "%s: the field \"%s%s\" is %lld; it should be %lld to %lld", o.file, o.where, field,
                 (long long)x, (long long)min, (long long)max);
    *out = x;
    return FSDP_OK;
}

fsdp_status fsdpi_json_float(fsdpi_json_object o, const char *field, double min, double max, double *out)
{
    const json_t *v = NULL;
    FSDP_TRY(get(o, field, &v));
    if (!json_is_number(v)) return wrong_type(o, field, v, "a number");
    double x = json_number_value(v);
    FSDP_FAIL_IF(!(x >= min && x <= max), FSDP_ERR_FORMAT,
                 "%s: the field \"%s%s\" is %g; it should be %g to %g", o.file, o.where, field, x, min, max);
    *out = x;
    return FSDP_OK;
}

fsdp_status fsdpi_json_bool(fsdpi_json_object o, const char *field, bool *out)
{
    const json_t *v = NULL;
    FSDP_TRY(get(o, field, &v));
    if (!json_is_boolean(v)) return wrong_type(o, field, v, "true or false");
    *out = json_is_true(v);
    return FSDP_OK;
}

fsdp_status fsdpi_json_string(fsdpi_json_object o, const char *field, const char **out)
{
    const json_t *v = NULL;
    FSDP_TRY(get(o, field, &v));
    if (!json_is_string(v)) return wrong_type(o, field, v, "a string");
    *out = json_string_value(v);
    return FSDP_OK;
}

fsdp_status fsdpi_json_child(fsdpi_json_object o, const char *field, const json_t **out)
{
    const json_t *v = NULL;
    FSDP_TRY(get(o, field, &v));
    if (!json_is_object(v)) return wrong_type(o, field, v, "an object");
    *out = v;
    return FSDP_OK;
}

fsdp_status fsdpi_json_array(fsdpi_json_object o, const char *field, const json_t **out)
{
    const json_t *v = NULL;
    FSDP_TRY(get(o, field, &v));
    if (!json_is_array(v)) return wrong_type(o, field, v, "an array");
    *out = v;
    return FSDP_OK;
}

fsdp_status fsdpi_json_int_or(fsdpi_json_object o, const char *field, int64_t fallback, int64_t min,
                              int64_t max, int64_t *out)
{
    if (fsdpi_json_has(o, field)) return fsdpi_json_int(o, field, min, max, out);
    *out = fallback;
    return FSDP_OK;
}

fsdp_status fsdpi_json_float_or(fsdpi_json_object o, const char *field, double fallback, double min,
                                double max, double *out)
{
    if (fsdpi_json_has(o, field)) return fsdpi_json_float(o, field, min, max, out);
    *out = fallback;
    return FSDP_OK;
}

fsdp_status fsdpi_json_bool_or(fsdpi_json_object o, const char *field, bool fallback, bool *out)
{
    if (fsdpi_json_has(o, field)) return fsdpi_json_bool(o, field, out);
    *out = fallback;
    return FSDP_OK;
}

fsdp_status fsdpi_json_string_or(fsdpi_json_object o, const char *field, const char *fallback,
                                 const char **out)
{
    if (fsdpi_json_has(o, field)) return fsdpi_json_string(o, field, out);
    *out = fallback;
    return FSDP_OK;
}
