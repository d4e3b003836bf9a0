/* SPDX-License-Identifier: MIT
 *
 * What every public header needs: visibility, attributes, C linkage. */
#ifndef FSDP_DEFS_H
#define FSDP_DEFS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define FSDP_BEGIN_DECLS extern "C" {
#define FSDP_END_DECLS   }
#else
#define FSDP_BEGIN_DECLS
#define FSDP_END_DECLS
#endif

#define FSDP_API         __attribute__((visibility("default")))
#define FSDP_NODISCARD   __attribute__((warn_unused_result))
#define FSDP_PRINTF(f, a) __attribute__((format(printf, f, a)))

#endif
