/* SPDX-License-Identifier: MIT */
#include "format/guess.h"

#include <string.h>
#include <strings.h>

static const struct {
    const char *text;
    bool certain;
} kinds[FSDPI_KIND_COUNT] = {
    [FSDPI_KIND_LFS_POINTER] = { "a git-lfs pointer, not the data itself (run git lfs pull)", true },
    [FSDPI_KIND_HTML] = { "an HTML page (a download that saved an error or a login page?)", false },
    [FSDPI_KIND_ZIP] = { "a zip archive, as torch.save writes (convert it to safetensors)", true },
    [FSDPI_KIND_PICKLE] = { "a Python pickle, as old versions of torch.save write (convert it to "
                            "safetensors)",
                            false },
    [FSDPI_KIND_GGUF] = { "a GGUF file of llama.cpp (fsdp does not read those)", true },
    [FSDPI_KIND_HDF5] = { "an HDF5 file, as Keras writes (fsdp does not read those)", true },
    [FSDPI_KIND_NPY] = { "a NumPy array (save its values alone: array.tofile)", true },
    [FSDPI_KIND_GZIP] = { "data compressed with gzip (decompress it first)", true },
    [FSDPI_KIND_ZSTD] = { "data compressed with zstd (decompress it first)", true },
    [FSDPI_KIND_SAFETENSORS] = { "a safetensors file", true },
    [FSDPI_KIND_JSON] = { "JSON text (the index or the config instead of the data?)", false },
    [FSDPI_KIND_ZEROS] = { "all zeros where its header should be (a download that reserved the space and "
                           "never came?)",
                           false },
};

static bool begins(const unsigned char *head, size_t n, const char *magic, size_t bytes)
{
    return n >= bytes && memcmp(head, magic, bytes) == 0;
}

static bool is_markup(const unsigned char *head, size_t n)
{
    static const char *const starts[] = { "<!doctype", "<html", "<head", "<?xml" };
    while (n > 0 && (*head == ' ' || *head == '\t' || *head == '\r' || *head == '\n')) {
        head++;
        n--;
    }
    for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++) {
        size_t len = strlen(starts[i]);
        if (n >= len && strncasecmp((const char *)head, starts[i], len) == 0) return true;
    }
    return false;
}

fsdpi_kind fsdpi_guess_kind(const void *bytes, size_t n)
{
    const unsigned char *head = bytes;
    if (begins(head, n, "version https://git-lfs", 23)) return FSDPI_KIND_LFS_POINTER;
    if (is_markup(head, n)) return FSDPI_KIND_HTML;
    if (begins(head, n, "PK\003\004", 4)) return FSDPI_KIND_ZIP;
    if (begins(head, n, "GGUF", 4)) return FSDPI_KIND_GGUF;
    if (begins(head, n, "\211HDF\r\n\032\n", 8)) return FSDPI_KIND_HDF5;
    if (begins(head, n, "\223NUMPY", 6)) return FSDPI_KIND_NPY;
    if (begins(head, n, "\037\213\010", 3)) return FSDPI_KIND_GZIP;
    if (begins(head, n, "\050\265\057\375", 4)) return FSDPI_KIND_ZSTD;
    /* a header of less than 2^27 bytes that opens with a name */
    if (n >= 10 && head[3] < 8 && begins(head + 4, n - 4, "\0\0\0\0{\"", 6)) return FSDPI_KIND_SAFETENSORS;
    if (n >= 2 && head[0] == 0x80 && head[1] >= 2 && head[1] <= 5) return FSDPI_KIND_PICKLE;
    if (n >= 1 && (head[0] == '{' || head[0] == '[')) return FSDPI_KIND_JSON;
    size_t zeros = 0;
    while (zeros < n && head[zeros] == 0) zeros++;
    return zeros == n && n >= 8 ? FSDPI_KIND_ZEROS : FSDPI_KIND_UNKNOWN;
}

const char *fsdpi_kind_text(fsdpi_kind kind)
{
    return (unsigned)kind < FSDPI_KIND_COUNT ? kinds[kind].text : NULL;
}

bool fsdpi_kind_is_certain(fsdpi_kind kind)
{
    return (unsigned)kind < FSDPI_KIND_COUNT && kinds[kind].certain;
}
