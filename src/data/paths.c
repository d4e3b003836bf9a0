/* SPDX-License-Identifier: MIT */
#include "data/paths.h"

#include "base/alloc.h"

#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static fsdp_status append(fsdpi_paths *p, const char *path)
{
    if (p->count == p->room) {
        int64_t room = p->room > 0 ? 2 * p->room : 8;
        char **grown = fsdpi_realloc(p->path, (size_t)room, sizeof(*grown));
        FSDP_FAIL_IF(grown == NULL, FSDP_ERR_NOMEM, "no memory for the names of %lld files", (long long)room);
        p->path = grown;
        p->room = room;
    }
    p->path[p->count] = fsdpi_strdup(path);
    FSDP_FAIL_IF(p->path[p->count] == NULL, FSDP_ERR_NOMEM, "%s: no memory for its name", path);
    p->count++;
    return FSDP_OK;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* GLOB_NOSORT: its own order depends on the locale, and ranks may have different ones. */
static fsdp_status expand(fsdpi_paths *p, const char *pattern)
{
    glob_t g;
    int64_t from = p->count;
    int rc = glob(pattern, GLOB_NOSORT, NULL, &g);
    FSDP_FAIL_IF(rc == GLOB_NOMATCH, FSDP_ERR_IO, "%s: no file matches this pattern", pattern);
    FSDP_FAIL_IF(rc == GLOB_NOSPACE, FSDP_ERR_NOMEM, "%s: no memory for what matches this pattern", pattern);
    FSDP_FAIL_IF(rc != 0, FSDP_ERR_IO, "%s: a folder of this pattern cannot be read", pattern);
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; st == FSDP_OK && i < g.gl_pathc; i++) st = append(p, g.gl_pathv[i]);
    globfree(&g);
    FSDP_TRY(st);
    qsort(p->path + from, (size_t)(p->count - from), sizeof(*p->path), by_bytes);
    return FSDP_OK;
}

fsdp_status fsdpi_paths_expand(fsdpi_paths *out, const char *const *names, int count)
{
    fsdp_status st;
    fsdpi_paths p = { 0 };
    for (int i = 0; i < count; i++) {
        struct stat s;
        if (names[i] == NULL || names[i][0] == '\0')
            FSDP_FAIL_GOTO(FSDP_ERR_INVALID, free_paths, "path number %d of the data is empty", i);
        if (strpbrk(names[i], "*?[") == NULL || stat(names[i], &s) == 0)
            FSDP_TRY_GOTO(append(&p, names[i]), free_paths);
        else
            FSDP_TRY_GOTO(expand(&p, names[i]), free_paths);
    }
    *out = p;
    return FSDP_OK;
free_paths:
    fsdpi_paths_free(&p);
    return st;
}

void fsdpi_paths_free(fsdpi_paths *p)
{
    for (int64_t i = 0; i < p->count; i++) fsdpi_free(p->path[i]);
    fsdpi_free(p->path);
    *p = (fsdpi_paths){ 0 };
}
