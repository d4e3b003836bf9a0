/* SPDX-License-Identifier: MIT
 *
 * The writing half of fileio.h. */
#include "format/fileio.h"

#include "base/alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* "." for a name without a slash. The caller frees. */
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (slash == NULL) return fsdpi_strdup(".");
    size_t n = slash == path ? 1 : (size_t)(slash - path);
    char *dir = fsdpi_calloc(n + 1, 1);
    if (dir != NULL) memcpy(dir, path, n);
    return dir;
}

const char *fsdpi_free_space_text(const char *path, char *buffer, size_t bytes)
{
    struct statvfs s;
    int rc = statvfs(path, &s);
    if (rc != 0) {
        char *dir = folder_of(path);
        rc = dir != NULL ? statvfs(dir, &s) : -1;
        fsdpi_free(dir);
    }
    if (rc != 0)
        snprintf(buffer, bytes, "an unknown number of bytes is free");
    else
        snprintf(buffer, bytes, "%llu bytes are free", (unsigned long long)s.f_bavail * s.f_frsize);
    return buffer;
}

static fsdp_status write_failed(const fsdpi_temp *t, const char *doing, int err)
{
    char space[64];
    FSDP_FAIL_IF(
        err == ENOSPC || err == EDQUOT, FSDP_ERR_IO,
        "%s: %s: the file needs %lld bytes, %s on its file system: make room, or choose another folder",
        t->target, strerror(err), (long long)t->bytes,
        fsdpi_free_space_text(t->target, space, sizeof(space)));
    FSDP_FAIL_IF(err == EFBIG, FSDP_ERR_IO,
                 "%s: the file needs %lld bytes, more than its file system or ulimit -f allows", t->target,
                 (long long)t->bytes);
    FSDP_FAIL(FSDP_ERR_IO, "%s: %s failed: %s", t->target, doing, strerror(err));
}

static fsdp_status create_failed(const char *target, int err)
{
    FSDP_FAIL_IF(err == ENOENT || err == ENOTDIR, FSDP_ERR_IO,
                 "%s: cannot create it: its folder does not exist, or is no folder", target);
    FSDP_FAIL(FSDP_ERR_IO, "%s: cannot create it: %s", target, strerror(err));
}

/* Renaming over a device node would replace it, over a folder would fail when all the work is done. */
static fsdp_status check_target(const char *target)
{
    struct stat s;
    size_t n = strlen(target);
    FSDP_FAIL_IF(n == 0, FSDP_ERR_INVALID, "a file to write has an empty name");
    FSDP_FAIL_IF(target[n - 1] == '/', FSDP_ERR_INVALID, "%s: this names a folder; a file is to be written",
                 target);
    if (stat(target, &s) != 0) return FSDP_OK;
    FSDP_FAIL_IF(S_ISDIR(s.st_mode), FSDP_ERR_IO, "%s: this is a folder; a file is to be written", target);
    FSDP_FAIL_IF(!S_ISREG(s.st_mode), FSDP_ERR_IO,
                 "%s: this is a device or a pipe; a regular file is to be written", target);
    return FSDP_OK;
}

/* A write beyond the limit of ulimit -f raises SIGXFSZ, and a library may not catch it. */
static fsdp_status check_limit(const char *target, int64_t bytes)
{
    struct rlimit limit;
    FSDP_FAIL_IF(
        getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
            (uint64_t)bytes > limit.rlim_cur,
        FSDP_ERR_IO,
        "%s: the file needs %lld bytes, and this process may write files of %llu bytes at most (ulimit -f)",
        target, (long long)bytes, (unsigned long long)limit.rlim_cur);
    return FSDP_OK;
}

static fsdp_status create_beside(fsdpi_temp *t)
{
    enum { NAME_KEPT = 200, TRIES = 1000 }; /* a name has 255 bytes at most, with what is added */
    const char *slash = strrchr(t->target, '/');
    size_t dir = slash != NULL ? (size_t)(slash + 1 - t->target) : 0, name = strlen(t->target + dir);
    int keep = (int)(name < NAME_KEPT ? name : NAME_KEPT);
    size_t room = dir + NAME_KEPT + 48;
    FSDPI_NEW(t->path, room);
    for (int i = 0; i < TRIES; i++) {
        memcpy(t->path, t->target, dir);
        snprintf(t->path + dir, room - dir, "%.*s.tmp-%ld-%d", keep, t->target + dir, (long)getpid(), i);
        t->fd = open(t->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (t->fd >= 0) return FSDP_OK;
        if (errno != EEXIST) break;
    }
    int err = errno;
    fsdpi_free(t->path); /* nothing to remove */
    t->path = NULL;
    return create_failed(t->target, err);
}

/* Better to learn now that there is no room. File systems that cannot reserve tell when they are written to.
 */
static fsdp_status reserve(const fsdpi_temp *t)
{
    int rc;
    do {
        rc = t->bytes > 0 ? fallocate(t->fd, 0, 0, t->bytes) : 0;
    } while (rc != 0 && errno == EINTR);
    if (rc != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        return write_failed(t, "reserving its space", errno);
    return FSDP_OK;
}

fsdp_status fsdpi_temp_open(fsdpi_temp *out, const char *target, int64_t bytes)
{
    fsdp_status st;
    FSDP_TRY(check_target(target));
    FSDP_TRY(check_limit(target, bytes));
    fsdpi_temp t = { .fd = -1, .bytes = bytes, .target = fsdpi_strdup(target) };
    FSDP_FAIL_IF(t.target == NULL, FSDP_ERR_NOMEM, "%s: no memory for its name", target);
    FSDP_TRY_GOTO(create_beside(&t), close_temp);
    FSDP_TRY_GOTO(reserve(&t), close_temp);
    *out = t;
    return FSDP_OK;
close_temp:
    fsdpi_temp_close(&t);
    return st;
}

fsdp_status fsdpi_temp_write(fsdpi_temp *t, int64_t offset, const void *data, size_t bytes)
{
    const char *p = data;
    FSDP_FAIL_IF(t->fd < 0, FSDP_ERR_STATE, "%s: written to after it was finished", t->target);
    FSDP_FAIL_IF(offset < 0 || offset > t->bytes || bytes > (uint64_t)(t->bytes - offset), FSDP_ERR_INVALID,
                 "%s: %zu bytes at byte %lld are outside its %lld bytes", t->target, bytes, (long long)offset,
                 (long long)t->bytes);
    while (bytes > 0) {
        ssize_t n = pwrite(t->fd, p, bytes < (1u << 30) ? bytes : 1u << 30, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return write_failed(t, "writing", n < 0 ? errno : ENOSPC);
        p += n;
        offset += n;
        bytes -= (size_t)n;
    }
    return FSDP_OK;
}

static fsdp_status flush_and_rename(fsdpi_temp *t)
{
    if (fsync(t->fd) != 0) return write_failed(t, "flushing it to the disk", errno);
    int rc = close(t->fd), err = errno;
    t->fd = -1;
    if (rc != 0) return write_failed(t, "closing it", err);
    if (rename(t->path, t->target) != 0) return write_failed(t, "giving it its name", errno);
    t->committed = true;
    return FSDP_OK;
}

fsdp_status fsdpi_temp_commit(fsdpi_temp *t)
{
    FSDP_FAIL_IF(t->fd < 0, FSDP_ERR_STATE, "%s: finished twice", t->target);
    char *dir = folder_of(t->target);
    FSDP_FAIL_IF(dir == NULL, FSDP_ERR_NOMEM, "%s: no memory for its folder's name", t->target);
    fsdp_status st = flush_and_rename(t);
    if (st == FSDP_OK) st = fsdpi_fsync_dir(dir);
    fsdpi_free(dir);
    FSDP_TRY(st);
    return FSDP_OK;
}

void fsdpi_temp_close(fsdpi_temp *t)
{
    if (t->target != NULL && t->fd >= 0) close(t->fd);
    if (t->path != NULL && !t->committed) unlink(t->path);
    fsdpi_free(t->path);
    fsdpi_free(t->target);
    *t = (fsdpi_temp){ .fd = -1 };
}

fsdp_status fsdpi_write_file_atomic(const char *path, const void *data, size_t bytes)
{
    fsdp_status st;
    fsdpi_temp t;
    FSDP_FAIL_IF(bytes > INT64_MAX, FSDP_ERR_INVALID, "%s: %zu bytes to write", path, bytes);
    FSDP_TRY(fsdpi_temp_open(&t, path, (int64_t)bytes));
    FSDP_TRY_GOTO(fsdpi_temp_write(&t, 0, data, bytes), close_temp);
    FSDP_TRY_GOTO(fsdpi_temp_commit(&t), close_temp);
close_temp:
    fsdpi_temp_close(&t);
    return st;
}

fsdp_status fsdpi_fsync_dir(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    FSDP_FAIL_IF(fd < 0, FSDP_ERR_IO, "%s: cannot open this folder: %s", path, strerror(errno));
    int rc = fsync(fd), err = errno;
    close(fd);
    /* some network file systems have no such thing, and need none */
    FSDP_FAIL_IF(rc != 0 && err != EINVAL && err != ENOTSUP, FSDP_ERR_IO,
                 "%s: flushing this folder to the disk failed: %s", path, strerror(err));
    return FSDP_OK;
}

static fsdp_status make_folder(const char *path)
{
    struct stat s;
    if (mkdir(path, 0777) == 0) return FSDP_OK;
    int err = errno; /* EEXIST, but also EROFS or EACCES of a folder that is there */
    if (stat(path, &s) == 0) {
        FSDP_FAIL_IF(!S_ISDIR(s.st_mode), FSDP_ERR_IO, "%s: a folder is wanted, and this is a file", path);
        return FSDP_OK;
    }
    char space[64];
    FSDP_FAIL_IF(err == ENOSPC || err == EDQUOT, FSDP_ERR_IO, "%s: cannot create this folder: %s (%s)", path,
                 strerror(err), fsdpi_free_space_text(path, space, sizeof(space)));
    FSDP_FAIL(FSDP_ERR_IO, "%s: cannot create this folder: %s", path, strerror(err));
}

fsdp_status fsdpi_mkdirs(const char *path)
{
    FSDP_FAIL_IF(path[0] == '\0', FSDP_ERR_INVALID, "a folder to create has an empty name");
    fsdp_status st = FSDP_OK;
    char *copy = fsdpi_strdup(path);
    FSDP_FAIL_IF(copy == NULL, FSDP_ERR_NOMEM, "%s: no memory for its name", path);
    for (char *p = copy + 1; st == FSDP_OK && *p != '\0'; p++) {
        if (*p != '/' || p[-1] == '/') continue;
        *p = '\0';
        st = make_folder(copy);
        *p = '/';
    }
    if (st == FSDP_OK) st = make_folder(copy);
    fsdpi_free(copy);
    FSDP_TRY(st);
    return FSDP_OK;
}
