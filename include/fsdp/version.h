/* SPDX-License-Identifier: MIT */
#ifndef FSDP_VERSION_H
#define FSDP_VERSION_H

#include <fsdp/defs.h>

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0
#define FSDP_VERSION       "0.1.0"

FSDP_BEGIN_DECLS

/* The version of the library that is linked: compare it with FSDP_VERSION, that of the headers. */
FSDP_API const char *fsdp_version(void);

FSDP_END_DECLS

#endif
