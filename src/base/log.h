/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_BASE_LOG_H
#define FSDPI_BASE_LOG_H

#include <fsdp/log.h>

/* Whether anybody listens, at that level. */
bool fsdpi_log_wants(fsdp_log_level level);
void fsdpi_log(fsdp_log_level level, const char *fmt, ...) FSDP_PRINTF(2, 3);

#endif
