/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_BASE_LOG_H
#define FSDPI_BASE_LOG_H

#include <fsdp/log.h>

void fsdpi_log(fsdp_log_level level, const char *fmt, ...) FSDP_PRINTF(2, 3);

#endif
