/* SPDX-License-Identifier: MIT
 *
 * Writes that fail: this pwrite() takes the place of the C library's in a test program that includes this header, once. */
#ifndef FSDP_TESTS_FAULT_WRITE_H
#define FSDP_TESTS_FAULT_WRITE_H

#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct {
    long room;  /* bytes that can still be written; negative: any number */
    long piece; /* at most so many bytes at a time; 0: any number */
    long nap_us; /* that each takes */
} fault_write = { -1, 0, 0 };

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset);
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    if (fault_write.nap_us > 0) nanosleep(&(struct timespec){ .tv_nsec = fault_write.nap_us * 1000 }, NULL);
    if (fault_write.piece > 0 && bytes > (size_t)fault_write.piece) bytes = (size_t)fault_write.piece;
    if (fault_write.room >= 0) {
        if (fault_write.room == 0) {
            errno = ENOSPC;
            return -1;
        }
        if (bytes > (size_t)fault_write.room) bytes = (size_t)fault_write.room;
        fault_write.room -= (long)bytes;
    }
    return syscall(SYS_pwrite64, fd, data, bytes, offset);
}

#endif
