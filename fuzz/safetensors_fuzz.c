/* SPDX-License-Identifier: MIT
 *
 * Property: whatever bytes a file has, fsdp_safetensors_open() returns a status with a message, or a set in
 * which
 *   - the data of all tensors, one after another, is exactly the file behind its header;
 *   - every tensor is found by its name, and can be read, whole and in two parts, with the same result;
 *   - written again by the writer, it gives a file that opens and holds the same names, types, shapes and
 * bytes; and nothing stays allocated. An input that begins with '{' is an index beside a good shard instead.
 */
#include "fuzz.h"

#include <fsdp/safetensors.h>

#include "base/alloc.h"

#include <string.h>

static const char shard[] =
    "\100\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}          xy";

static char *read_tensor(const fsdp_safetensors *st, const fsdp_safetensors_tensor *t)
{
    char *whole = malloc(t->bytes + 1), *parts = malloc(t->bytes + 1);
    size_t size = fsdp_dtype_bytes(t->dtype);
    int64_t half = t->numel / 2;
    FUZZ_CHECK(whole != NULL && parts != NULL && (size_t)t->numel * size == t->bytes);
    FUZZ_CHECK(fsdp_safetensors_read_raw(st, t, 0, t->numel, whole) == FSDP_OK);
    FUZZ_CHECK(fsdp_safetensors_read_raw(st, t, half, t->numel - half, parts + (size_t)half * size) ==
               FSDP_OK);
    FUZZ_CHECK(fsdp_safetensors_read_raw(st, t, 0, half, parts) == FSDP_OK);
    FUZZ_CHECK(memcmp(whole, parts, t->bytes) == 0);
    FUZZ_CHECK(fsdp_safetensors_read_raw(st, t, half, t->numel, parts) != FSDP_OK || half == 0);
    free(parts);
    return whole;
}

static void check_floats(const fsdp_safetensors *st, const fsdp_safetensors_tensor *t)
{
    float x;
    bool is_float =
        t->dtype == FSDP_F32 || t->dtype == FSDP_F16 || t->dtype == FSDP_BF16 || t->dtype == FSDP_F64;
    if (t->numel > 0)
        FUZZ_CHECK((fsdp_safetensors_read_f32(st, t, t->numel - 1, 1, &x) == FSDP_OK) == is_float);
}

/* A name that a file may have and ours may not. */
static bool is_refused_name(const fsdp_safetensors *st)
{
    return fsdp_safetensors_find(st, "") != NULL;
}

static void write_again(const fsdp_safetensors *st, int64_t count)
{
    fsdp_safetensors_decl *decls = calloc((size_t)count + 1, sizeof(*decls));
    fsdp_safetensors_writer *w;
    fsdp_safetensors *again;
    const char *path = fuzz_file("again.safetensors", "", 0);
    FUZZ_CHECK(decls != NULL);
    for (int64_t i = 0; i < count; i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(st, i);
        decls[i] = (fsdp_safetensors_decl){ t->name, t->dtype, t->ndim, t->shape };
    }
    FUZZ_CHECK(fsdp_safetensors_writer_open(&w, path, decls, count, NULL, 0) == FSDP_OK);
    for (int64_t i = 0; i < count; i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(st, i);
        char *data = read_tensor(st, t);
        FUZZ_CHECK(fsdp_safetensors_writer_write_raw(w, i, 0, t->numel, data) == FSDP_OK);
        free(data);
    }
    FUZZ_CHECK(fsdp_safetensors_writer_finish(w) == FSDP_OK);
    fsdp_safetensors_writer_close(w);
    FUZZ_CHECK(fsdp_safetensors_open(&again, path) == FSDP_OK && fsdp_safetensors_count(again) == count);
    for (int64_t i = 0; i < count; i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(st, i),
                                      *u = fsdp_safetensors_find(again, t->name);
        FUZZ_CHECK(u != NULL && u->dtype == t->dtype && u->ndim == t->ndim && u->bytes == t->bytes);
        FUZZ_CHECK(memcmp(u->shape, t->shape, (size_t)t->ndim * sizeof(*t->shape)) == 0);
        char *a = read_tensor(st, t), *b = read_tensor(again, u);
        FUZZ_CHECK(memcmp(a, b, t->bytes) == 0);
        free(a);
        free(b);
    }
    fsdp_safetensors_close(again);
    free(decls);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unsigned runs;
    long live = fsdpi_alloc_live();
    bool index = size > 0 && data[0] == '{';
    fsdp_safetensors *st = NULL;
    if (index) fuzz_file("s.safetensors", shard, sizeof(shard) - 1);
    const char *path = fuzz_file(index ? "f.safetensors.index.json" : "f.safetensors", data, size);
    fsdp_status rc = fsdp_safetensors_open(&st, path);
    if (rc != FSDP_OK) {
        FUZZ_CHECK(st == NULL && fsdp_last_error_message()[0] != '\0' && rc != FSDP_ERR_INTERNAL);
    } else {
        int64_t count = fsdp_safetensors_count(st), end = 0;
        for (int64_t i = 0; i < count; i++) {
            const fsdp_safetensors_tensor *t = fsdp_safetensors_at(st, i);
            FUZZ_CHECK(fsdp_safetensors_find(st, t->name) == t && (i == 0 || t->offset == end));
            end = t->offset + (int64_t)t->bytes;
            free(read_tensor(st, t));
            check_floats(st, t);
        }
        FUZZ_CHECK(index || count == 0 || end == (int64_t)size);
        /* it flushes to the disk: not each time */
        if (runs++ % 16 == 0 && !is_refused_name(st)) write_again(st, count);
        fsdp_safetensors_close(st);
    }
    FUZZ_CHECK(fsdpi_alloc_live() == live);
    return 0;
}
