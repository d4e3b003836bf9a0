/* SPDX-License-Identifier: MIT
 *
 * A folder for a test program's files: scratch_setup and scratch_teardown are cmocka's group fixtures. */
#ifndef FSDP_TESTS_SCRATCH_H
#define FSDP_TESTS_SCRATCH_H

#include "support/testing.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char scratch_dir[64];

static inline int scratch_setup(void **state)
{
    (void)state;
    snprintf(scratch_dir, sizeof(scratch_dir), "%s", "/tmp/fsdp-test-XXXXXX");
    return mkdtemp(scratch_dir) != NULL ? 0 : -1;
}

static inline int scratch_remove_one(const char *path, const struct stat *s, int type, struct FTW *ftw)
{
    (void)s, (void)type, (void)ftw;
    return remove(path);
}

static inline int scratch_teardown(void **state)
{
    (void)state;
    return nftw(scratch_dir, scratch_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* The path of a name in the folder; good for the next seven calls. */
static inline char *scratch(const char *name)
{
    static char paths[8][512];
    static int next;
    char *p = paths[next++ % 8];
    snprintf(p, sizeof(paths[0]), "%s/%s", scratch_dir, name);
    return p;
}

static inline char *scratch_write(const char *name, const void *data, size_t bytes)
{
    char *path = scratch(name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
    return path;
}

static inline char *scratch_text(const char *name, const char *text)
{
    return scratch_write(name, text, strlen(text));
}

/* ' stands for ": JSON that can be read in C. */
static inline void scratch_quotes(char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (text[i] == '\'') text[i] = '"';
}

static inline char *scratch_json(const char *name, const char *text)
{
    char *json = strdup(text);
    assert_non_null(json);
    scratch_quotes(json, strlen(json));
    char *path = scratch_text(name, json);
    free(json);
    return path;
}

/* How many names the folder has, "." and ".." not counted. */
static inline int scratch_entries(void)
{
    char command[128];
    snprintf(command, sizeof(command), "ls -A %s | wc -l", scratch_dir);
    FILE *f = popen(command, "r");
    int n = -1;
    if (f == NULL || fscanf(f, "%d", &n) != 1) n = -1;
    if (f != NULL) pclose(f);
    return n;
}

static inline bool scratch_put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) close(fd);
    return ok;
}

/* Mounts a tmpfs of this size over dir, in a namespace of this process alone. */
static inline bool scratch_mount(const char *dir, const char *size)
{
    if (unshare(CLONE_NEWNS) != 0) { /* not root: become it, in a namespace of users too */
        char uids[64], gids[64];
        snprintf(uids, sizeof(uids), "0 %u 1", (unsigned)getuid());
        snprintf(gids, sizeof(gids), "0 %u 1", (unsigned)getgid());
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 || !scratch_put("/proc/self/setgroups", "deny") ||
            !scratch_put("/proc/self/uid_map", uids) || !scratch_put("/proc/self/gid_map", gids))
            return false;
    }
    return mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("none", dir, "tmpfs", 0, size) == 0;
}

enum { SCRATCH_SKIP = 77 };

/* Runs fn(arg) in a child process: 0 where it returns true, 1 where false, SCRATCH_SKIP where it exits with
 * that. The child checks with plain conditions: cmocka's would go on in the parent's tests. */
static inline int scratch_fork(bool (*fn)(void *arg), void *arg)
{
    int rc;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) _exit(fn(arg) ? 0 : 1);
    if (pid < 0 || waitpid(pid, &rc, 0) != pid) return -1;
    return WIFEXITED(rc) ? WEXITSTATUS(rc) : 128 + WTERMSIG(rc);
}

/* For children: as assert_fails. */
#define child_expects(expr, status, text)                                                 \
    do {                                                                                  \
        if ((expr) != (status) || strstr(fsdp_last_error_message(), (text)) == NULL) {    \
            fprintf(stderr, "%s: wanted %s with \"%s\", got: %s\n", #expr, #status, text, \
                    fsdp_last_error());                                                   \
            return false;                                                                 \
        }                                                                                 \
    } while (0)

#endif
