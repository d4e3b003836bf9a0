/* SPDX-License-Identifier: MIT
 *
 * Errors are values. A function that can fail returns an fsdp_status; the thread that saw the failure keeps
 * its message and the trail of functions it came through:
 *
 *     fsdp_status st = fsdp_unit_create(&unit, comm, params, 2, NULL);
 *     if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
 *
 * or, in a function that returns fsdp_status itself, FSDP_TRY(fsdp_unit_create(...)).
 *
 * The library never prints, exits, or aborts on bad input. A failed call writes none of its outputs and takes
 * ownership of nothing. */
#ifndef FSDP_STATUS_H
#define FSDP_STATUS_H

#include <fsdp/defs.h>

FSDP_BEGIN_DECLS

/* What went wrong, by what a program can do about it. X(name, text) */
#define FSDP_STATUS_MAP(X)                                                                                  \
    X(FSDP_OK, "no error")                                                                                  \
    X(FSDP_ERR_INVALID, "an argument is wrong: change the call")                                            \
    X(FSDP_ERR_STATE, "the wrong moment for this call: nothing was changed")                                \
    X(FSDP_ERR_NOMEM, "out of memory")                                                                      \
    X(FSDP_ERR_UNSUPPORTED, "not supported by this build, transport or device")                             \
    X(FSDP_ERR_IO, "the operating system refused a file operation")                                         \
    X(FSDP_ERR_FORMAT, "a file's contents are not what they should be")                                     \
    X(FSDP_ERR_DEVICE, "a device failed")                                                                   \
    X(FSDP_ERR_COMM, "ranks did different things: fsdp_comm_reset() mends the communicator")                \
    X(FSDP_ERR_PEER, "another rank is gone or stuck: the communicator is dead")                             \
    X(FSDP_ERR_NONFINITE, "a loss or a gradient is infinite or not a number")                               \
    X(FSDP_ERR_INTERNAL, "a bug in libfsdp")

typedef enum fsdp_status {
#define FSDP_STATUS_ENUM(name, text) name,
    FSDP_STATUS_MAP(FSDP_STATUS_ENUM)
#undef FSDP_STATUS_ENUM
} fsdp_status;

/* "FSDP_ERR_INVALID"; "FSDP_ERR_?" for a number that is none. */
FSDP_API const char *fsdp_status_name(fsdp_status st);

/* The last error of this thread: code, message and trail, one line each. Lives until this thread's next failing
 * call. "" where there was none. */
FSDP_API const char *fsdp_last_error(void);

/* The same, the message alone: what a user should read. */
FSDP_API const char *fsdp_last_error_message(void);

/* For callbacks and programs: starts an error of their own; returns st. */
FSDP_API fsdp_status fsdp_error_raise(fsdp_status st, const char *func, const char *file, int line, const char *fmt,
                                      ...) FSDP_PRINTF(5, 6);

/* Adds a frame to the trail of the error that is on its way; returns st. */
FSDP_API fsdp_status fsdp_error_through(fsdp_status st, const char *func, const char *file, int line);

#define FSDP_FAIL(st, ...) return fsdp_error_raise((st), __func__, __FILE__, __LINE__, __VA_ARGS__)
#define FSDP_FAIL_IF(cond, st, ...)                                                                         \
    do {                                                                                                    \
        if (cond) FSDP_FAIL(st, __VA_ARGS__);                                                               \
    } while (0)
#define FSDP_TRY(expr)                                                                                      \
    do {                                                                                                    \
        fsdp_status fsdp_st_ = (expr);                                                                      \
        if (fsdp_st_ != FSDP_OK) return fsdp_error_through(fsdp_st_, __func__, __FILE__, __LINE__);         \
    } while (0)
/* Sets `st` (a local of the caller) and jumps to the label that undoes what was done so far. */
#define FSDP_TRY_GOTO(expr, label)                                                                          \
    do {                                                                                                    \
        st = (expr);                                                                                        \
        if (st != FSDP_OK) {                                                                                \
            st = fsdp_error_through(st, __func__, __FILE__, __LINE__);                                      \
            goto label;                                                                                     \
        }                                                                                                   \
    } while (0)
#define FSDP_FAIL_GOTO(code, label, ...)                                                                    \
    do {                                                                                                    \
        st = fsdp_error_raise((code), __func__, __FILE__, __LINE__, __VA_ARGS__);                           \
        goto label;                                                                                         \
    } while (0)

FSDP_END_DECLS

#endif
