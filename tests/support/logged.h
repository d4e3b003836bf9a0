/* SPDX-License-Identifier: MIT
 *
 * What was logged, kept in memory that all ranks share: set it before a launch, look at it after. */
#ifndef FSDP_TESTS_LOGGED_H
#define FSDP_TESTS_LOGGED_H

#include "support/testing.h"

#include <fsdp/log.h>

typedef struct logged {
    int lines, warnings;
    char text[8][1024]; /* the first ones */
} logged;

static inline void keep_log(fsdp_log_level level, const char *text, void *arg)
{
    logged *l = arg;
    int n = __atomic_fetch_add(&l->lines, 1, __ATOMIC_SEQ_CST);
    if (level == FSDP_LOG_WARN) __atomic_fetch_add(&l->warnings, 1, __ATOMIC_SEQ_CST);
    if (n < 8) snprintf(l->text[n], sizeof(l->text[n]), "%s", text);
}

static inline bool was_logged(const logged *l, const char *text)
{
    for (int i = 0; i < l->lines && i < 8; i++)
        if (strstr(l->text[i], text) != NULL) return true;
    return false;
}

#endif
