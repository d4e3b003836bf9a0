/* SPDX-License-Identifier: MIT
 *
 * What the library has to say that is not an error: a setting that has no effect here, a measured fact. It is
 * handed to the program's function, or dropped; the library itself never prints. */
#ifndef FSDP_LOG_H
#define FSDP_LOG_H

#include <fsdp/defs.h>

FSDP_BEGIN_DECLS

/* DEBUG: each move of a unit (docs/life.md), in which call, and of which of the communicator's passes:
 *     unit "h.3": residency gathered ahead -> whole (fsdp_unit_begin_forward, pass 12)
 *     unit "h.3": open forwards 0 -> 1 (fsdp_unit_begin_forward, pass 12)
 *     unit "h.3": no gradient in flight -> gradient being written (fsdp_unit_begin_backward, pass 12)
 * and open recomputes, backwards, summons, steps. Where nobody listens at a level its lines are not made. */
typedef enum fsdp_log_level { FSDP_LOG_DEBUG, FSDP_LOG_INFO, FSDP_LOG_WARN } fsdp_log_level;

/* Called from any thread, also at once from several, and from within calls: what uses a communicator is FSDP_ERR_STATE there. The
 * text is one line without its newline. */
typedef void (*fsdp_log_fn)(fsdp_log_level level, const char *text, void *arg);

/* Sets where messages go, for the whole process; NULL drops them (the default). Not for concurrent use. */
FSDP_API void fsdp_log_set(fsdp_log_level at_least, fsdp_log_fn fn, void *arg);

FSDP_END_DECLS

#endif
