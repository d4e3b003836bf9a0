/* SPDX-License-Identifier: MIT
 *
 * What the library found on this machine. */
#ifndef FSDP_INFO_H
#define FSDP_INFO_H

#include <fsdp/defs.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_info {
    const char *instruction_set; /* of the library's own kernels: "avx512", "avx2", "portable"; FSDP_ISA sets a lesser one */
    const char *gemm;            /* matrix products: "onednn", "cblas", "reference"; FSDP_GEMM chooses */
    const char *gemm_version, *gemm_path;
    int cpus;                    /* that this process may use */
    const char *transports, *devices; /* names, comma separated */
} fsdp_info;

/* Looks for the kernel library if nobody has yet: not before ranks are forked. Strings live as long as the process. */
FSDP_API void fsdp_get_info(fsdp_info *out);

FSDP_END_DECLS

#endif
