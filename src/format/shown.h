/* SPDX-License-Identifier: MIT
 *
 * Text from a file, fit for a message: control bytes would reach a terminal, and a name may be megabytes
 * long. */
#ifndef FSDPI_FORMAT_SHOWN_H
#define FSDPI_FORMAT_SHOWN_H

#include <string.h>

typedef struct fsdpi_shown {
    char s[136];
} fsdpi_shown;

/* The text with '?' for control bytes; a long one keeps both of its ends. For use within one expression:
 * FSDP_FAIL(..., "tensor \"%s\"", fsdpi_show(name).s) */
static inline fsdpi_shown fsdpi_show(const char *text)
{
    fsdpi_shown r;
    size_t n = strlen(text), room = sizeof(r.s) - 1, half = (room - 3) / 2;
    if (n <= room) {
        memcpy(r.s, text, n + 1);
    } else {
        memcpy(r.s, text, half);
        memcpy(r.s + half, "...", 3);
        memcpy(r.s + half + 3, text + n - half, half + 1);
    }
    for (char *p = r.s; *p != '\0'; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f) *p = '?';
    return r;
}

#endif
