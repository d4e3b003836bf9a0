/* SPDX-License-Identifier: MIT
 *
 * JSON files (config.json, indexes, manifests) through jansson, so that each mistake in one is a message with
 * the file and the field:
 *
 *     json_t *root;
 *     int64_t layers;
 *     FSDP_TRY(fsdpi_json_load(&root, path, 1 << 20));
 *     fsdpi_json_object config = { root, path, "" };
 *     FSDP_TRY_GOTO(fsdpi_json_int(config, "n_layer", 1, 1000, &layers), free_root);
 *     ...
 *     json_decref(root);
 *
 * A field whose value is null counts as absent: Hugging Face's configs mean that. */
#ifndef FSDPI_FORMAT_JSON_H
#define FSDPI_FORMAT_JSON_H

#include <fsdp/status.h>

#include <jansson.h>

/* Parses an object. `file` is for messages: they have line, column and byte of what is wrong, duplicate keys
 * included. The caller json_decref()s *out. FSDP_ERR_FORMAT also where the text would take more than about 20
 * times its length of memory (beyond a megabyte): no real file does. */
fsdp_status fsdpi_json_parse(json_t **out, const char *file, const char *text, size_t bytes);

/* The same of a file of at most max_bytes. FSDP_ERR_IO where it cannot be read. */
fsdp_status fsdpi_json_load(json_t **out, const char *path, size_t max_bytes);

/* An object within a file. */
typedef struct fsdpi_json_object {
    const json_t *json;
    const char *file;
    const char
        *where; /* "" for the file's own object, "units[3]." for one within: put before a field in messages */
} fsdpi_json_object;

/* A field that must be there, of this type, in [min, max]. An integer is also a float. Strings, objects and
 * arrays are borrowed from the object. FSDP_ERR_FORMAT. */
fsdp_status fsdpi_json_int(fsdpi_json_object o, const char *field, int64_t min, int64_t max, int64_t *out);
fsdp_status fsdpi_json_float(fsdpi_json_object o, const char *field, double min, double max, double *out);
fsdp_status fsdpi_json_bool(fsdpi_json_object o, const char *field, bool *out);
fsdp_status fsdpi_json_string(fsdpi_json_object o, const char *field, const char **out);
fsdp_status fsdpi_json_child(fsdpi_json_object o, const char *field, const json_t **out);
fsdp_status fsdpi_json_array(fsdpi_json_object o, const char *field, const json_t **out);

/* The same, with a value for a field that is absent or null (a fallback need not lie in [min, max]). */
fsdp_status fsdpi_json_int_or(fsdpi_json_object o, const char *field, int64_t fallback, int64_t min,
                              int64_t max, int64_t *out);
fsdp_status fsdpi_json_float_or(fsdpi_json_object o, const char *field, double fallback, double min,
                                double max, double *out);
fsdp_status fsdpi_json_bool_or(fsdpi_json_object o, const char *field, bool fallback, bool *out);
fsdp_status fsdpi_json_string_or(fsdpi_json_object o, const char *field, const char *fallback,
                                 const char **out);

/* Whether the field is there and not null. */
bool fsdpi_json_has(fsdpi_json_object o, const char *field);

#endif
