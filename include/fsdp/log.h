/* SPDX-License-Identifier: MIT
 *
 * What the library has to say that is not an error: a setting that has no effect here, a measured fact. It is
 * handed to the program's function, or dropped; the library itself never prints. */
#ifndef FSDP_LOG_H
#define FSDP_LOG_H

#include <fsdp/defs.h>

FSDP_BEGIN_DECLS

typedef enum fsdp_log_level { FSDP_LOG_DEBUG, FSDP_LOG_INFO, FSDP_LOG_WARN } fsdp_log_level;

/* Called from any thread, also at once from several, and from within calls: what uses a communicator is FSDP_ERR_STATE there. The
 * text is one line without its newline. */
typedef void (*fsdp_log_fn)(fsdp_log_level level, const char *text, void *arg);

/* Sets where messages go, for the whole process; NULL drops them (the default). Not for concurrent use. */
FSDP_API void fsdp_log_set(fsdp_log_level at_least, fsdp_log_fn fn, void *arg);

FSDP_END_DECLS

#endif
