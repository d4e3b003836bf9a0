/* SPDX-License-Identifier: MIT
 *
 * What the fuzz targets share. A target is a function of one input that returns 0, or aborts where the
 * property at the head of its file does not hold. It is linked with libFuzzer, which makes inputs up, or with
 * replay_main.c, which takes them from files. */
#ifndef FSDP_FUZZ_H
#define FSDP_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A bug of the library: ends the program, so that the fuzzer keeps the input. */
#define FUZZ_CHECK(cond)                                                              \
    do {                                                                              \
        if (!(cond)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #cond); \
            abort();                                                                  \
        }                                                                             \
    } while (0)

/* The path of a file of this name (no slash) with these bytes, in a folder that is removed at exit. Good
 * until the next call but three. */
const char *fuzz_file(const char *name, const void *data, size_t size);

#endif
