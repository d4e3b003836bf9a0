/* SPDX-License-Identifier: MIT
 *
 * What every test includes: cmocka in the order that it wants, and checks that say what they saw. */
#ifndef FSDP_TESTS_TESTING_H
#define FSDP_TESTS_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fsdp/dtype.h>
#include <fsdp/status.h>

/* Which build this is. Where a sanitizer looks at it, bits have been compared by the release build: a test may do with fewer
 * corners, but with one of each kind. */
#if defined(__SANITIZE_THREAD__)
enum { CAN_FORK = 0 }; /* ThreadSanitizer sees one process: ranks are threads */
#else
enum { CAN_FORK = 1 };
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* The call succeeds; otherwise its error is printed. */
#define assert_ok(expr)                                                                                     \
    do {                                                                                                    \
        if ((expr) != FSDP_OK) fail_msg("%s\n%s", #expr, fsdp_last_error());                                \
    } while (0)

/* The call fails with this status, and its message has this text in it. */
#define assert_fails(expr, status, text)                                                                    \
    do {                                                                                                    \
        fsdp_status st_ = (expr);                                                                           \
        if (st_ != (status))                                                                                \
            fail_msg("%s: %s, not %s\n%s", #expr, fsdp_status_name(st_), fsdp_status_name(status), fsdp_last_error()); \
        if (strstr(fsdp_last_error_message(), (text)) == NULL)                                              \
            fail_msg("%s: the message is not about \"%s\":\n%s", #expr, (text), fsdp_last_error());         \
    } while (0)

/* x as a value of that type: F32, BF16 or F16. */
static inline float rounded_to(fsdp_dtype t, float x)
{
    return t == FSDP_BF16 ? fsdp_bf16_to_f32(fsdp_bf16_from_f32(x)) : t == FSDP_F16 ? fsdp_f16_to_f32(fsdp_f16_from_f32(x)) : x;
}

/* In a function that a rank runs: the parent owns the asserts, so a rank returns what it saw. */
#define rank_check(cond)                                                                                    \
    do {                                                                                                    \
        if (!(cond)) FSDP_FAIL(FSDP_ERR_INTERNAL, "%s:%d: not so: %s", __FILE__, __LINE__, #cond);          \
    } while (0)

#endif
