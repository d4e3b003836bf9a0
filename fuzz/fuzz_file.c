/* SPDX-License-Identifier: MIT */
#include "fuzz.h"

#include <fcntl.h>
#include <ftw.h>
#include <string.h>
#include <unistd.h>

static char folder[256];

static int remove_one(const char *path, const struct stat *s, int type, struct FTW *ftw)
{
    (void)s, (void)type, (void)ftw;
    return remove(path);
}

static void remove_folder(void)
{
    nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

const char *fuzz_file(const char *name, const void *data, size_t size)
{
    static char paths[4][320];
    static unsigned next;
    if (folder[0] == '\0') {
        const char *tmp = getenv("TMPDIR");
        snprintf(folder, sizeof(folder), "%s/fsdp-fuzz-XXXXXX", tmp != NULL ? tmp : "/tmp");
        FUZZ_CHECK(mkdtemp(folder) != NULL);
        atexit(remove_folder);
    }
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    FUZZ_CHECK(fd >= 0);
    while (size > 0) {
        ssize_t n = write(fd, data, size);
        FUZZ_CHECK(n > 0);
        data = (const char *)data + n;
        size -= (size_t)n;
    }
    close(fd);
    return path;
}
