/* SPDX-License-Identifier: MIT */
#include "base/fits.h"

#include <stddef.h>

bool fsdpi_fits(const char *pattern, const char *name)
{
    const char *star = NULL, *back = NULL;
    while (*name != '\0') {
        if (*pattern == '*') {
            star = pattern++;
            back = name;
        } else if (*pattern == *name) {
            pattern++;
            name++;
        } else if (star != NULL) {
            pattern = star + 1;
            name = ++back;
        } else {
            return false;
        }
    }
    while (*pattern == '*') pattern++;
    return *pattern == '\0';
}
