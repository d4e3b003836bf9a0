/* SPDX-License-Identifier: MIT
 *
 * The reading half of fileio.h. */
#include "format/fileio.h"

#include "base/alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

static int64_t mtime_ns(const struct stat *s)
{
    return (int64_t)((uint64_t)s->st_mtim.tv_sec * 1000000000u + (uint64_t)s->st_mtim.tv_nsec);
}

static fsdp_status open_failed(const char *path, int err)
{
    FSDP_FAIL_IF(err == ENOENT, FSDP_ERR_IO, "%s: there is no such file", path);
    FSDP_FAIL_IF(err == EMFILE || err == ENFILE, FSDP_ERR_IO,
                 "%s: cannot open it: too many files are open (raise the limit: ulimit -n)", path);
    FSDP_FAIL(FSDP_ERR_IO, "%s: cannot open it for reading: %s", path, strerror(err));
}

/* Opens and looks. O_NONBLOCK: opening a named pipe would wait for a writer before it could be refused. */
static fsdp_status open_regular(const char *path, int *out, struct stat *s)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return open_failed(path, errno);
    if (fstat(fd, s) != 0) {
        int err = errno;
        close(fd);
        return open_failed(path, err);
    }
    if (!S_ISREG(s->st_mode)) {
        close(fd);
        FSDP_FAIL_IF(S_ISDIR(s->st_mode), FSDP_ERR_IO, "%s: this is a folder; a file is wanted", path);
        FSDP_FAIL(FSDP_ERR_IO, "%s: this is a pipe or a device; a regular file is wanted", path);
    }
    *out = fd;
    return FSDP_OK;
}

fsdp_status fsdpi_file_open(fsdpi_file *out, const char *path, bool keep_open)
{
    int fd = -1;
    struct stat s;
    FSDP_TRY(open_regular(path, &fd, &s));
    char *copy = fsdpi_strdup(path);
    if (copy == NULL || !keep_open) {
        close(fd);
        fd = -1;
    }
    FSDP_FAIL_IF(copy == NULL, FSDP_ERR_NOMEM, "%s: no memory for its name", path);
    *out = (fsdpi_file){
        .path = copy, .fd = fd, .bytes = s.st_size, .dev = s.st_dev, .ino = s.st_ino, .mtime_ns = mtime_ns(&s)
    };
    return FSDP_OK;
}

void fsdpi_file_close(fsdpi_file *f)
{
    if (f->path != NULL && f->fd >= 0) close(f->fd);
    fsdpi_free(f->path);
    *f = (fsdpi_file){ .fd = -1 };
}

static fsdp_status read_at(const fsdpi_file *f, int fd, int64_t offset, char *out, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = pread(fd, out, bytes < (1u << 30) ? bytes : 1u << 30, offset);
        if (n < 0 && errno == EINTR) continue;
        FSDP_FAIL_IF(n < 0, FSDP_ERR_IO, "%s: reading %zu bytes at byte %lld failed: %s", f->path, bytes,
                     (long long)offset, strerror(errno));
        FSDP_FAIL_IF(n == 0, FSDP_ERR_IO,
                     "%s: the file ends at or before byte %lld, but had %lld bytes when it was opened: it "
                     "was truncated meanwhile",
                     f->path, (long long)offset, (long long)f->bytes);
        out += n;
        offset += n;
        bytes -= (size_t)n;
    }
    return FSDP_OK;
}

fsdp_status fsdpi_file_read(const fsdpi_file *f, int64_t offset, void *out, size_t bytes)
{
    FSDP_FAIL_IF(offset < 0 || offset > f->bytes || bytes > (uint64_t)(f->bytes - offset), FSDP_ERR_INVALID,
                 "%s: %zu bytes at byte %lld are asked for, of %lld", f->path, bytes, (long long)offset,
                 (long long)f->bytes);
    if (f->fd >= 0) {
        FSDP_TRY(read_at(f, f->fd, offset, out, bytes));
        return FSDP_OK;
    }
    int fd = -1;
    struct stat s;
    FSDP_TRY(open_regular(f->path, &fd, &s));
    fsdp_status st;
    if (s.st_size != f->bytes || s.st_dev != f->dev || s.st_ino != f->ino || mtime_ns(&s) != f->mtime_ns)
        st = fsdp_error_raise(
            FSDP_ERR_IO, __func__, __FILE__, __LINE__,
            "%s: the file was changed or replaced since it was opened (%lld bytes then, %lld now)", f->path,
            (long long)f->bytes, (long long)s.st_size);
    else
        st = read_at(f, fd, offset, out, bytes);
    close(fd);
    FSDP_TRY(st);
    return FSDP_OK;
}

fsdp_status fsdpi_read_file(const char *path, size_t max_bytes, char **data, size_t *size)
{
    fsdp_status st;
    fsdpi_file f = { .fd = -1 };
    char *text = NULL;
    FSDP_TRY(fsdpi_file_open(&f, path, true));
    size_t bytes = (size_t)f.bytes;
    if (bytes > max_bytes)
        FSDP_FAIL_GOTO(FSDP_ERR_FORMAT, close_file,
                       "%s: %zu bytes long, more than the %zu that such a file may have", path, bytes,
                       max_bytes);
    text = bytes < SIZE_MAX ? fsdpi_calloc(bytes + 1, 1) : NULL;
    if (text == NULL)
        FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, close_file, "%s: no memory for its %zu bytes", path, bytes);
    FSDP_TRY_GOTO(fsdpi_file_read(&f, 0, text, bytes), close_file);
    *data = text;
    *size = bytes;
    text = NULL;
    st = FSDP_OK;
close_file:
    fsdpi_free(text);
    fsdpi_file_close(&f);
    return st;
}

fsdp_status fsdpi_file_xxh3(const char *path, uint64_t *hash, int64_t *bytes)
{
    enum { PIECE = 1 << 18 };
    fsdp_status st;
    fsdpi_file f = { .fd = -1 };
    FSDP_TRY(fsdpi_file_open(&f, path, true));
    XXH3_state_t *state = XXH3_createState();
    char *piece = fsdpi_calloc(PIECE, 1);
    if (state == NULL || piece == NULL || XXH3_64bits_reset(state) != XXH_OK)
        FSDP_FAIL_GOTO(FSDP_ERR_NOMEM, done, "%s: no memory for a checksum", path);
    for (int64_t at = 0; at < f.bytes; at += PIECE) {
        size_t n = (size_t)(f.bytes - at < PIECE ? f.bytes - at : PIECE);
        FSDP_TRY_GOTO(fsdpi_file_read(&f, at, piece, n), done);
        XXH3_64bits_update(state, piece, n);
    }
    *hash = XXH3_64bits_digest(state);
    if (bytes != NULL) *bytes = f.bytes;
    st = FSDP_OK;
done:
    fsdpi_free(piece);
    XXH3_freeState(state);
    fsdpi_file_close(&f);
    return st;
}
