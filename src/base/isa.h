/* SPDX-License-Identifier: MIT
 *
 * Kernels are written once and compiled once an instruction set: a file `x_isa.c` sees FSDPI_ISA_NAME(sym), and
 * `x.h` picks the table of the set that this processor has. All sets give the same bits: nothing is contracted
 * into fused multiply-adds, and a reduction has 16 lanes whatever the width of a register. */
#ifndef FSDPI_BASE_ISA_H
#define FSDPI_BASE_ISA_H

#include <fsdp/status.h>

typedef enum fsdpi_isa { FSDPI_ISA_PORTABLE, FSDPI_ISA_AVX2, FSDPI_ISA_AVX512, FSDPI_ISA_COUNT } fsdpi_isa;

/* The set in use: the best that processor and build have, or a lesser one that FSDP_ISA names. */
fsdpi_isa fsdpi_isa_get(void);
const char *fsdpi_isa_name(fsdpi_isa isa);
/* Whether this processor can run it. */
bool fsdpi_isa_supported(fsdpi_isa isa);

#define FSDPI_ISA_CAT_(a, b) a##b
#define FSDPI_ISA_CAT(a, b)  FSDPI_ISA_CAT_(a, b)
#define FSDPI_ISA_NAME(sym)  FSDPI_ISA_CAT(sym, FSDPI_ISA_SUFFIX)

/* Declares, and defines a getter for, the three tables of a kernel file. */
#if defined(__x86_64__)
#define FSDPI_ISA_TABLE(type, name)                                                                         \
    extern const type name##_portable, name##_avx2, name##_avx512;                                          \
    static inline const type *name(fsdpi_isa isa)                                                           \
    {                                                                                                       \
        return isa == FSDPI_ISA_AVX512 ? &name##_avx512 : isa == FSDPI_ISA_AVX2 ? &name##_avx2 : &name##_portable; \
    }
#else
#define FSDPI_ISA_TABLE(type, name)                                                                         \
    extern const type name##_portable;                                                                      \
    static inline const type *name(fsdpi_isa isa)                                                           \
    {                                                                                                       \
        (void)isa;                                                                                          \
        return &name##_portable;                                                                            \
    }
#endif

#endif
