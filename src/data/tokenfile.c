/* SPDX-License-Identifier: MIT
 *
 * The formats, all little-endian:
 *   llm.c    256 int32 {20240520, 1, tokens, 0...}, then tokens uint16
 *            256 int32 {20240801, 7, tokens, 0...}, then tokens uint32
 *   nanoGPT  uint16, nothing else
 *   text     bytes */
#include "data/tokenfile.h"

#include "base/alloc.h"
#include "format/guess.h"

#include <string.h>
#include <strings.h>

enum { HEADER_BYTES = 1024, PIECE = 16384 };

/* What llm.c's files begin with. Those with width 0 are not token files. */
static const struct magic {
    int32_t magic, version, width;
    const char *what;
} magics[] = {
    { 20240520, 1, 2, "tokens" },
    { 20240801, 7, 4, "tokens" },
    { 20240522, 0, 0, "multiple-choice evaluation data" },
    { 20240326, 0, 0, "a model's parameters" },
    { 20240327, 0, 0, "a debug state of a model" },
    { 20240527, 0, 0, "an optimizer state" },
    { 20240328, 0, 0, "a tokenizer" },
};

static const struct magic *find_magic(int32_t first)
{
    for (size_t i = 0; i < sizeof(magics) / sizeof(magics[0]); i++)
        if (magics[i].magic == first) return &magics[i];
    return NULL;
}

static bool is_bin(const char *path)
{
    size_t n = strlen(path);
    return n >= 4 && strcasecmp(path + n - 4, ".bin") == 0;
}

static fsdp_status read_llmc(fsdpi_tokenfile *f, const struct magic *m, const int32_t *head, size_t got)
{
    const char *path = f->file.path;
    FSDP_FAIL_IF(m->width == 0, FSDP_ERR_FORMAT, "%s: this file of llm.c (magic %d) holds %s, not tokens",
                 path, m->magic, m->what);
    FSDP_FAIL_IF(got < 12 || f->file.bytes < HEADER_BYTES, FSDP_ERR_FORMAT,
                 "%s: the file has %lld bytes, and its header alone would have %d: it is incomplete", path,
                 (long long)f->file.bytes, HEADER_BYTES);
    FSDP_FAIL_IF(head[1] != m->version, FSDP_ERR_FORMAT,
                 "%s: its header (magic %d) has version %d; fsdp reads version %d", path, m->magic, head[1],
                 m->version);
    FSDP_FAIL_IF(head[2] < 0, FSDP_ERR_FORMAT, "%s: its header says %d tokens, a negative number", path,
                 head[2]);
    int64_t want = HEADER_BYTES + (int64_t)head[2] * m->width, have = f->file.bytes;
    FSDP_FAIL_IF(have < want, FSDP_ERR_FORMAT,
                 "%s: the file is %lld bytes short of what its header says (%d tokens of %d bytes): it is an "
                 "incomplete download or copy",
                 path, (long long)(want - have), head[2], m->width);
    FSDP_FAIL_IF(have > want, FSDP_ERR_FORMAT,
                 "%s: the file has %lld bytes more than its header says (%d tokens of %d bytes)", path,
                 (long long)(have - want), head[2], m->width);
    FSDP_FAIL_IF(head[2] == 0, FSDP_ERR_FORMAT, "%s: the file has a header and no tokens", path);
    f->start = HEADER_BYTES;
    f->tokens = head[2];
    f->width = m->width;
    return FSDP_OK;
}

static fsdp_status read_headerless(fsdpi_tokenfile *f)
{
    FSDP_FAIL_IF(f->file.bytes % 2 != 0, FSDP_ERR_FORMAT,
                 "%s: the file has %lld bytes, an odd number: tokens without a header have 2 each",
                 f->file.path, (long long)f->file.bytes);
    f->start = 0;
    f->tokens = f->file.bytes / 2;
    f->width = 2;
    return FSDP_OK;
}

static fsdp_status read_text(fsdpi_tokenfile *f)
{
    f->start = 0;
    f->tokens = f->file.bytes;
    f->width = 1;
    return FSDP_OK;
}

/* Refuses what is neither text nor tokens. A pointer of git-lfs is text, but then a small file. */
static fsdp_status check_kind(const fsdpi_tokenfile *f, const void *head, size_t n)
{
    fsdpi_kind kind = fsdpi_guess_kind(head, n);
    FSDP_FAIL_IF(fsdpi_kind_is_certain(kind) && (kind != FSDPI_KIND_LFS_POINTER || f->file.bytes < 1024),
                 FSDP_ERR_FORMAT, "%s: neither text nor tokens: it looks like %s", f->file.path,
                 fsdpi_kind_text(kind));
    return FSDP_OK;
}

static fsdp_status identify(fsdpi_tokenfile *f, fsdp_dataset_format format)
{
    union {
        char bytes[FSDPI_GUESS_BYTES];
        int32_t words[FSDPI_GUESS_BYTES / 4];
    } head = { .words = { 0 } };
    const char *path = f->file.path;
    size_t got = (size_t)(f->file.bytes < (int64_t)sizeof(head) ? f->file.bytes : (int64_t)sizeof(head));
    FSDP_FAIL_IF(f->file.bytes == 0, FSDP_ERR_FORMAT, "%s: the file is empty", path);
    if (format == FSDP_DATASET_TEXT) return read_text(f);
    FSDP_TRY(fsdpi_file_read(&f->file, 0, &head, got));
    const struct magic *m = got >= 4 ? find_magic(head.words[0]) : NULL;
    if (m != NULL) return read_llmc(f, m, head.words, got);
    int32_t swapped = (int32_t)__builtin_bswap32((uint32_t)head.words[0]);
    FSDP_FAIL_IF(
        got >= 4 && find_magic(swapped) != NULL, FSDP_ERR_FORMAT,
        "%s: its first number is %d byte-swapped: the file was written big-endian; write it little-endian",
        path, swapped);
    FSDP_TRY(check_kind(f, &head, got));
    if (is_bin(path)) return read_headerless(f);
    FSDP_FAIL_IF(format == FSDP_DATASET_TOKENS, FSDP_ERR_FORMAT,
                 "%s: not a token file: it begins with %d, not with %d or %d, and only a name that ends in "
                 ".bin may have no header",
                 path, head.words[0], magics[0].magic, magics[1].magic);
    return read_text(f);
}

fsdp_status fsdpi_tokenfile_open(fsdpi_tokenfile *out, const char *path, fsdp_dataset_format format,
                                 bool keep_open)
{
    fsdpi_tokenfile f = { 0 };
    FSDP_TRY(fsdpi_file_open(&f.file, path, keep_open));
    fsdp_status st = identify(&f, format);
    if (st != FSDP_OK) fsdpi_tokenfile_close(&f);
    FSDP_TRY(st);
    *out = f;
    return FSDP_OK;
}

void fsdpi_tokenfile_close(fsdpi_tokenfile *f)
{
    fsdpi_file_close(&f->file);
}

/* ---- ids ----------------------------------------------------------------------------------------------- */

/* The largest of n tokens of `width` bytes, at an address aligned to that. */
static uint32_t largest(const void *tokens, int width, size_t n)
{
    uint32_t max = 0;
    if (width == 1) {
        const uint8_t *p = tokens;
        for (size_t i = 0; i < n; i++) max = p[i] > max ? p[i] : max;
    } else if (width == 2) {
        const uint16_t *p = tokens;
        for (size_t i = 0; i < n; i++) max = p[i] > max ? p[i] : max;
    } else {
        const uint32_t *p = tokens;
        for (size_t i = 0; i < n; i++) max = p[i] > max ? p[i] : max;
    }
    return max;
}

static uint32_t token_at(const void *tokens, int width, size_t i)
{
    switch (width) {
    case 1: return ((const uint8_t *)tokens)[i];
    case 2: return ((const uint16_t *)tokens)[i];
    default: return ((const uint32_t *)tokens)[i];
    }
}

static fsdp_status bad_id(const fsdpi_tokenfile *f, const void *tokens, int64_t first, int64_t limit)
{
    size_t i = 0;
    while (token_at(tokens, f->width, i) < limit) i++;
    uint32_t id = token_at(tokens, f->width, i);
    long long at = (long long)(first + (int64_t)i);
    if (f->width == 1) {
        const char shown[] = { ' ', '\'', (char)id, '\'', '\0' };
        FSDP_FAIL(FSDP_ERR_FORMAT,
                  "%s: byte %lld is %u%s, not below vocab_size %lld: text needs a vocabulary of 256; or make "
                  "tokens for this one",
                  f->file.path, at, id, id > 32 && id < 127 ? shown : "", (long long)limit);
    }
    FSDP_FAIL(FSDP_ERR_FORMAT,
              "%s: token %lld is id %u, not below vocab_size %lld: the file was made for a larger vocabulary",
              f->file.path, at, id, (long long)limit);
}

/* Reads at most PIECE bytes of tokens and checks their ids. */
static fsdp_status read_piece(const fsdpi_tokenfile *f, int64_t first, int64_t n, int64_t limit, void *piece)
{
    FSDP_TRY(fsdpi_file_read(&f->file, f->start + first * f->width, piece, (size_t)(n * f->width)));
    if (largest(piece, f->width, (size_t)n) >= limit) return bad_id(f, piece, first, limit);
    return FSDP_OK;
}

fsdp_status fsdpi_tokenfile_read(const fsdpi_tokenfile *f, int64_t first, int64_t n, int64_t limit,
                                 int32_t *out)
{
    uint32_t piece[PIECE / 4];
    const int64_t most = PIECE / f->width;
    for (int64_t done = 0; done < n; done += most) {
        int64_t k = n - done < most ? n - done : most;
        FSDP_TRY(read_piece(f, first + done, k, limit, piece));
        for (int64_t i = 0; i < k; i++) out[done + i] = (int32_t)token_at(piece, f->width, (size_t)i);
    }
    return FSDP_OK;
}

fsdp_status fsdpi_tokenfile_check(const fsdpi_tokenfile *f, int64_t limit)
{
    if (f->width < 4 && limit >= (int64_t)1 << (8 * f->width)) return FSDP_OK;
    enum { SCAN = 1 << 18 };
    char *piece;
    FSDPI_NEW(piece, SCAN);
    fsdp_status st = FSDP_OK;
    for (int64_t at = 0; st == FSDP_OK && at < f->tokens; at += SCAN / f->width) {
        int64_t left = f->tokens - at;
        st = read_piece(f, at, left < SCAN / f->width ? left : SCAN / f->width, limit, piece);
    }
    fsdpi_free(piece);
    FSDP_TRY(st);
    return FSDP_OK;
}
