/* SPDX-License-Identifier: MIT
 *
 * The error of a thread as a value: to carry it from the thread that saw it to the one that waits for it, and to
 * keep the first error while a destructor runs. */
#ifndef FSDPI_BASE_ERROR_H
#define FSDPI_BASE_ERROR_H

#include <fsdp/status.h>

enum { FSDPI_ERROR_FRAMES = 12 };

typedef struct fsdpi_error_frame {
    const char *func, *file; /* string literals */
    int line;
} fsdpi_error_frame;

typedef struct fsdpi_error {
    fsdp_status st;
    bool shared; /* all ranks have it: its message names the rank already (fsdp_comm_agree) */
    int frames;
    fsdpi_error_frame frame[FSDPI_ERROR_FRAMES];
    char message[1536];
} fsdpi_error;

/* The code of the error that this thread raised last. */
fsdp_status fsdpi_error_status(void);
/* Of the error that this thread raised last. */
bool fsdpi_error_is_shared(void);
void fsdpi_error_set_shared(void);
void fsdpi_error_save(fsdpi_error *out);
void fsdpi_error_restore(const fsdpi_error *saved);

/* For our own bugs only, never for input: compiled out of release builds. */
#ifndef NDEBUG
#include <assert.h>
#define FSDPI_ASSERT(cond) assert(cond)
#else
#define FSDPI_ASSERT(cond) ((void)0)
#endif

#endif
