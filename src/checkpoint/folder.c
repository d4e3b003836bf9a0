/* SPDX-License-Identifier: MIT */
#include "checkpoint/folder.h"

#include "base/alloc.h"
#include "base/error.h"
#include "checkpoint/registry.h"
#include "format/fileio.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- the manifest's own checksum ---- */

static const char marker[] = ",\n \"checksum\": \"";

fsdp_status fsdpi_manifest_checked(char *text, size_t size, const char *path)
{
    char *at = NULL;
    for (char *p = text; (p = memmem(p, size - (size_t)(p - text), marker, sizeof(marker) - 1)) != NULL; p++) at = p;
    FSDP_FAIL_IF(at == NULL, FSDP_ERR_FORMAT, "%s is cut off or no manifest: it has no checksum", path);
    size_t n = (size_t)(at - text);
    unsigned long long want;
    FSDP_FAIL_IF(sscanf(at + sizeof(marker) - 1, "%16llx\"", &want) != 1 || want != XXH3_64bits(text, n), FSDP_ERR_FORMAT,
                 "%s is damaged: its checksum does not fit", path);
    memcpy(at, "\n}", 3);
    return FSDP_OK;
}

/* Whether a folder has a manifest that is whole. Its files are checked when it is read. */
static bool is_complete(const char *path)
{
    char name[4300], *text;
    size_t size;
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    snprintf(name, sizeof(name), "%s/" FSDPI_MANIFEST, path);
    bool whole = false;
    if (access(name, R_OK) == 0 && fsdpi_read_file(name, (size_t)1 << 30, &text, &size) == FSDP_OK) {
        whole = fsdpi_manifest_checked(text, size, name) == FSDP_OK;
        fsdpi_free(text);
    }
    fsdpi_error_restore(&kept);
    return whole;
}

/* ---- lists ---- */

typedef struct found {
    int64_t step;
    bool replaced; /* moved away for a newer one of the same step */
    char name[64];
} found;

/* "step-00000100", and "step-00000100.replaced" which a killed save may leave. */
static bool parse(const char *name, found *f)
{
    int end = 0;
    long long step;
    if (sscanf(name, "step-%lld%n", &step, &end) != 1 || step < 0 || strlen(name) >= sizeof(f->name)) return false;
    f->replaced = strcmp(name + end, ".replaced") == 0;
    if (name[end] != '\0' && !f->replaced) return false;
    f->step = step;
    memcpy(f->name, name, strlen(name) + 1);
    return true;
}

static int newest_first(const void *a, const void *b)
{
    const found *x = a, *y = b;
    if (x->step != y->step) return x->step < y->step ? 1 : -1;
    return (int)x->replaced - (int)y->replaced;
}

static fsdp_status list(const char *folder, found **out, int *count)
{
    DIR *d = opendir(folder);
    FSDP_FAIL_IF(d == NULL, FSDP_ERR_IO, "cannot open the folder of checkpoints %s: %s", folder, strerror(errno));
    found *f = NULL;
    int n = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        found one;
        if (!parse(e->d_name, &one)) continue;
        found *more = fsdpi_realloc(f, (size_t)n + 1, sizeof(*more));
        if (more == NULL) {
            closedir(d);
            fsdpi_free(f);
            FSDP_FAIL(FSDP_ERR_NOMEM, "no memory to list %s", folder);
        }
        f = more;
        f[n++] = one;
    }
    closedir(d);
    if (n > 0) qsort(f, (size_t)n, sizeof(*f), newest_first);
    *out = f;
    *count = n;
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_latest(const char *folder, char *path, size_t size, int64_t *step, int *skipped)
{
    found *f;
    int n, bad = 0;
    char candidate[4300];
    FSDP_TRY(list(folder, &f, &n));
    for (int i = 0; i < n; i++) {
        snprintf(candidate, sizeof(candidate), "%s/%s", folder, f[i].name);
        if (!is_complete(candidate)) {
            bad++;
            continue;
        }
        int64_t s = f[i].step;
        fsdpi_free(f);
        FSDP_FAIL_IF(strlen(candidate) >= size, FSDP_ERR_INVALID, "the path %s is longer than %zu", candidate, size - 1);
        memcpy(path, candidate, strlen(candidate) + 1);
        if (step != NULL) *step = s;
        if (skipped != NULL) *skipped = bad;
        return FSDP_OK;
    }
    fsdpi_free(f);
    FSDP_FAIL_IF(bad > 0, FSDP_ERR_IO, "none of the %d checkpoints in %s is complete", bad, folder);
    FSDP_FAIL(FSDP_ERR_IO, "there is no checkpoint in %s", folder);
}

/* ---- changes ---- */

void fsdpi_folder_remove(const char *path)
{
    char name[4700];
    snprintf(name, sizeof(name), "%s/" FSDPI_MANIFEST, path);
    unlink(name);
    DIR *d = opendir(path);
    if (d == NULL) return;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
        unlink(name);
    }
    closedir(d);
    rmdir(path);
}

/* What killed saves left, of any step. Nobody else saves here. */
static void remove_stale(const char *folder)
{
    char path[4700];
    DIR *d = opendir(folder);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        size_t n = strlen(e->d_name);
        if (strncmp(e->d_name, ".step-", 6) != 0 || n < 10 || strcmp(e->d_name + n - 4, ".tmp") != 0) continue;
        snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
        fsdpi_folder_remove(path);
    }
    if (d != NULL) closedir(d);
}

/* Makes the names of new folders survive a power cut. Those above that may not be opened are not ours, and older. */
static void flush_above(const char *folder)
{
    char path[4200];
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    snprintf(path, sizeof(path), "%s", folder);
    for (char *slash; (slash = strrchr(path, '/')) != NULL && slash != path;) {
        *slash = '\0';
        (void)!fsdpi_fsync_dir(path);
    }
    (void)!fsdpi_fsync_dir(folder[0] == '/' ? "/" : ".");
    fsdpi_error_restore(&kept);
}

fsdp_status fsdpi_folder_prepare(const char *folder, const char *temp)
{
    struct stat sb;
    bool fresh = stat(folder, &sb) != 0;
    FSDP_TRY(fsdpi_mkdirs(folder));
    if (fresh) flush_above(folder);
    remove_stale(folder);
    FSDP_FAIL_IF(mkdir(temp, 0777) != 0, FSDP_ERR_IO, "cannot make the folder %s: %s", temp, strerror(errno));
    return FSDP_OK;
}

fsdp_status fsdpi_folder_publish(const char *folder, const char *temp, const char *final)
{
    char replaced[4200];
    struct stat sb;
    FSDP_TRY(fsdpi_fsync_dir(temp));
    snprintf(replaced, sizeof(replaced), "%s.replaced", final);
    bool there = stat(final, &sb) == 0;
    FSDP_FAIL_IF(there && !S_ISDIR(sb.st_mode), FSDP_ERR_IO, "%s is there and no folder: it is in the way of the checkpoint", final);
    if (there) {
        fsdpi_folder_remove(replaced);
        FSDP_FAIL_IF(rename(final, replaced) != 0, FSDP_ERR_IO, "cannot rename %s: %s", final, strerror(errno));
    }
    if (rename(temp, final) != 0) {
        int e = errno;
        if (there) (void)!rename(replaced, final);
        FSDP_FAIL(FSDP_ERR_IO, "cannot rename %s to %s: %s", temp, final, strerror(e));
    }
    FSDP_TRY(fsdpi_fsync_dir(folder));
    if (there) fsdpi_folder_remove(replaced);
    return FSDP_OK;
}

void fsdpi_folder_prune(const char *folder, int keep, int64_t saved)
{
    found *f;
    int n, kept = 0;
    int64_t last = -1; /* step of the last one that was kept */
    char path[4300];
    fsdpi_error e;
    fsdpi_error_save(&e);
    if (list(folder, &f, &n) == FSDP_OK) {
        for (int i = 0; i < n; i++) {
            snprintf(path, sizeof(path), "%s/%s", folder, f[i].name);
            bool another = f[i].step == last; /* what a replaced one of the same step was called */
            if (!another && (kept < keep || f[i].step == saved) && is_complete(path)) {
                last = f[i].step;
                kept++;
            } else if (kept > 0) {
                fsdpi_folder_remove(path); /* older than what is kept, or not whole */
            }
        }
        fsdpi_free(f);
    }
    fsdpi_error_restore(&e);
}
