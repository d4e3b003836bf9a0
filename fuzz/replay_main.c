/* SPDX-License-Identifier: MIT
 *
 *   NAME_replay FILE|FOLDER...
 *
 * Runs a fuzz target on files, and on every file of folders: seeds, and what a fuzzer found. */
#include "fuzz.h"

#include <dirent.h>
#include <string.h>
#include <sys/stat.h>

static int replayed;

static void replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        perror(path);
        exit(1);
    }
    fseek(f, 0, SEEK_END);
    long n = ftell(f);
    rewind(f);
    uint8_t *data = malloc(n > 0 ? (size_t)n : 1); /* exactly as long as the input, for AddressSanitizer */
    if (n < 0 || data == NULL || fread(data, 1, (size_t)n, f) != (size_t)n) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(1);
    }
    fclose(f);
    LLVMFuzzerTestOneInput(data, (size_t)n);
    free(data);
    replayed++;
}

static void replay_folder(const char *path)
{
    DIR *d = opendir(path);
    if (d == NULL) {
        perror(path);
        exit(1);
    }
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char name[4096];
        struct stat s;
        snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
        if (stat(name, &s) == 0 && S_ISREG(s.st_mode)) replay_file(name);
    }
    closedir(d);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        struct stat s;
        if (stat(argv[i], &s) == 0 && S_ISDIR(s.st_mode))
            replay_folder(argv[i]);
        else
            replay_file(argv[i]);
    }
    printf("%d inputs\n", replayed);
    return replayed == 0; /* a run of nothing is no success */
}
