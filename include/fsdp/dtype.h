/* SPDX-License-Identifier: MIT
 *
 * Element types. Compute is in F32; BF16 and F16 are storage and wire types; the rest occurs in files. */
#ifndef FSDP_DTYPE_H
#define FSDP_DTYPE_H

#include <fsdp/status.h>

FSDP_BEGIN_DECLS

/* X(enum, name in safetensors files, bytes) */
#define FSDP_DTYPE_MAP(X)                                                                                   \
    X(FSDP_F32, "F32", 4)                                                                                   \
    X(FSDP_BF16, "BF16", 2)                                                                                 \
    X(FSDP_F16, "F16", 2)                                                                                   \
    X(FSDP_F64, "F64", 8)                                                                                   \
    X(FSDP_I64, "I64", 8)                                                                                   \
    X(FSDP_I32, "I32", 4)                                                                                   \
    X(FSDP_I16, "I16", 2)                                                                                   \
    X(FSDP_I8, "I8", 1)                                                                                     \
    X(FSDP_U64, "U64", 8)                                                                                   \
    X(FSDP_U32, "U32", 4)                                                                                   \
    X(FSDP_U16, "U16", 2)                                                                                   \
    X(FSDP_U8, "U8", 1)                                                                                     \
    X(FSDP_BOOL, "BOOL", 1)

typedef enum fsdp_dtype {
#define FSDP_DTYPE_ENUM(e, name, bytes) e,
    FSDP_DTYPE_MAP(FSDP_DTYPE_ENUM)
#undef FSDP_DTYPE_ENUM
    FSDP_DTYPE_COUNT
} fsdp_dtype;

FSDP_API size_t fsdp_dtype_bytes(fsdp_dtype t);    /* of one element; 0 for a value that is no type */
FSDP_API const char *fsdp_dtype_name(fsdp_dtype t); /* "F32"; "?" */
FSDP_API fsdp_status fsdp_dtype_parse(fsdp_dtype *out, const char *name);

/* One value; to a 16-bit type rounds to nearest even, overflow gives infinity, NaN stays NaN. */
FSDP_API uint16_t fsdp_bf16_from_f32(float x);
FSDP_API float fsdp_bf16_to_f32(uint16_t x);
FSDP_API uint16_t fsdp_f16_from_f32(float x);
FSDP_API float fsdp_f16_to_f32(uint16_t x);

FSDP_END_DECLS

#endif
