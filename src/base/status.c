/* SPDX-License-Identifier: MIT
 *
 * The error of a thread: raised once where its cause is known, with the trail of the functions it went through. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local fsdpi_error current;
static _Thread_local char rendered[sizeof(current.message) + 2048];

static const char *const names[] = {
#define NAME(name, text) #name,
    FSDP_STATUS_MAP(NAME)
#undef NAME
};

const char *fsdp_status_name(fsdp_status st)
{
    return (size_t)st < sizeof(names) / sizeof(names[0]) ? names[st] : "FSDP_ERR_?";
}

static void add_frame(const char *func, const char *file, int line)
{
    if (current.frames == FSDPI_ERROR_FRAMES) return; /* the innermost frames tell the most */
    const char *base = strrchr(file, '/');
    current.frame[current.frames++] =
        (fsdpi_error_frame){ .func = func, .file = base != NULL ? base + 1 : file, .line = line };
}

fsdp_status fsdp_error_raise(fsdp_status st, const char *func, const char *file, int line, const char *fmt, ...)
{
    char text[sizeof(current.message)]; /* an argument may be the previous message */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    memcpy(current.message, text, sizeof(text));
    current.st = st;
    current.shared = false;
    current.frames = 0;
    add_frame(func, file, line);
    return st;
}

fsdp_status fsdp_error_through(fsdp_status st, const char *func, const char *file, int line)
{
    if (st != current.st) { /* a status that nobody raised, as from a callback: say at least its name */
        return fsdp_error_raise(st, func, file, line, "%s", fsdp_status_name(st));
    }
    add_frame(func, file, line);
    return st;
}

const char *fsdp_last_error_message(void)
{
    return current.st == FSDP_OK ? "" : current.message;
}

const char *fsdp_last_error(void)
{
    if (current.st == FSDP_OK) return "";
    size_t n = (size_t)snprintf(rendered, sizeof(rendered), "%s: %s", fsdp_status_name(current.st), current.message);
    for (int i = 0; i < current.frames && n < sizeof(rendered); i++) {
        const fsdpi_error_frame *f = &current.frame[i];
        n += (size_t)snprintf(rendered + n, sizeof(rendered) - n, "\n  %s %s (%s:%d)", i == 0 ? "raised in" : "through  ",
                              f->func, f->file, f->line);
    }
    return rendered;
}

void fsdpi_error_save(fsdpi_error *out)
{
    *out = current;
}

void fsdpi_error_restore(const fsdpi_error *saved)
{
    current = *saved;
}

fsdp_status fsdpi_error_status(void)
{
    return current.st;
}

bool fsdpi_error_is_shared(void)
{
    return current.shared;
}

void fsdpi_error_set_shared(void)
{
    current.shared = true;
}
