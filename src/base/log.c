/* SPDX-License-Identifier: MIT */
#include "base/log.h"

#include "base/within.h"

#include <stdarg.h>
#include <stdio.h>

/* The one global of the library: where a process's messages go is the program's to say, not a model's. */
static struct {
    fsdp_log_fn fn;
    void *arg;
    fsdp_log_level at_least;
} sink;

void fsdp_log_set(fsdp_log_level at_least, fsdp_log_fn fn, void *arg)
{
    sink.fn = fn;
    sink.arg = arg;
    sink.at_least = at_least;
}

bool fsdpi_log_wants(fsdp_log_level level)
{
    return sink.fn != NULL && level >= sink.at_least;
}

void fsdpi_log(fsdp_log_level level, const char *fmt, ...)
{
    if (!fsdpi_log_wants(level)) return;
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fsdpi_within w;
    fsdpi_within_begin(&w, "the log's function (fsdp_log_set())");
    sink.fn(level, text, sink.arg);
    fsdpi_within_end(&w);
}
