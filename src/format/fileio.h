/* SPDX-License-Identifier: MIT
 *
 * Files, read and written so that what can go wrong with one ends in a message and not in half a file.
 *
 * Reading never maps: a mapping of a file that someone shortens kills the process (SIGBUS), a read says so.
 * Writing goes to a temporary beside the target, which appears only when every byte of it is on the disk. */
#ifndef FSDPI_FORMAT_FILEIO_H
#define FSDPI_FORMAT_FILEIO_H

#include <fsdp/status.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the formats are little-endian; nothing here swaps bytes yet"
#endif

/* ---- reading ------------------------------------------------------------------------------------------- */

/* A set of at most this many files keeps them open; a larger one opens a file for each read, so that a
 * thousand shards times eight ranks do not run into the limit on open files. */
enum { FSDPI_FILES_KEPT_OPEN = 32 };

typedef struct fsdpi_file {
    char *path;
    int fd;        /* -1: opened for each read, and refused if it is another file by then */
    int64_t bytes; /* of the file when it was opened */
    uint64_t dev, ino;
    int64_t mtime_ns;
} fsdpi_file;

/* A regular file. FSDP_ERR_IO: there is none, it is a folder or a device, or may not be read. */
fsdp_status fsdpi_file_open(fsdpi_file *out, const char *path, bool keep_open);
/* A zeroed struct is accepted. */
void fsdpi_file_close(fsdpi_file *f);
/* Exactly `bytes` bytes from `offset`. FSDP_ERR_IO: a read failed, or the file was truncated or replaced
 * since it was opened. Any number of threads. */
fsdp_status fsdpi_file_read(const fsdpi_file *f, int64_t offset, void *out, size_t bytes);

/* The whole file, and a NUL behind it that *size does not count. The caller fsdpi_free()s *data.
 * FSDP_ERR_FORMAT: longer than max_bytes. */
fsdp_status fsdpi_read_file(const char *path, size_t max_bytes, char **data, size_t *size);

/* XXH3, 64 bits, of a whole file, read in pieces; *bytes (may be NULL): its length. */
fsdp_status fsdpi_file_xxh3(const char *path, uint64_t *hash, int64_t *bytes);

/* ---- writing ------------------------------------------------------------------------------------------- */

/* A file that is being written. Zeroed = none. */
typedef struct fsdpi_temp {
    char *target;  /* the name that it is to have */
    char *path;    /* the name that it has: TARGET.tmp-PID-N, in the same folder */
    int fd;        /* -1: closed */
    int64_t bytes; /* that it is to have */
    bool committed;
} fsdpi_temp;

/* Creates the temporary and reserves its space where the file system can. FSDP_ERR_IO says what is missing:
 * the folder, the permission, the space (needed and free), the limit of ulimit -f (checked first, for a write
 * beyond it would be a signal). A target that is there must be a regular file; it stays until the commit. */
fsdp_status fsdpi_temp_open(fsdpi_temp *out, const char *target, int64_t bytes);
/* All of it, at an offset; within the bytes that were announced. */
fsdp_status fsdpi_temp_write(fsdpi_temp *t, int64_t offset, const void *data, size_t bytes);
/* fsync, close, rename, fsync of the folder. On an error the target is as it was (unless only the last step
 * failed); close the temporary all the same. */
fsdp_status fsdpi_temp_commit(fsdpi_temp *t);
/* Frees; removes the temporary unless it was committed. */
void fsdpi_temp_close(fsdpi_temp *t);

/* All of the above for bytes in memory. */
fsdp_status fsdpi_write_file_atomic(const char *path, const void *data, size_t bytes);

/* Makes names in a folder survive a power cut. */
fsdp_status fsdpi_fsync_dir(const char *path);
/* As mkdir -p. The new names are not flushed: see fsdpi_fsync_dir(). */
fsdp_status fsdpi_mkdirs(const char *path);

/* "4096 bytes are free": of the file system that `path`, or else its folder, lies on. Returns the buffer. */
const char *fsdpi_free_space_text(const char *path, char *buffer, size_t bytes);

#endif
