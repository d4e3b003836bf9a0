/* SPDX-License-Identifier: MIT */
#include "base/isa.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[FSDPI_ISA_COUNT] = { "portable", "avx2", "avx512" };

const char *fsdpi_isa_name(fsdpi_isa isa)
{
    return names[isa];
}

bool fsdpi_isa_supported(fsdpi_isa isa)
{
#if defined(__x86_64__)
    switch (isa) {
    case FSDPI_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case FSDPI_ISA_AVX2: return __builtin_cpu_supports("avx2") != 0;
    default: return true;
    }
#else
    return isa == FSDPI_ISA_PORTABLE;
#endif
}

static fsdpi_isa detect(void)
{
    const char *want = getenv("FSDP_ISA");
    fsdpi_isa best = FSDPI_ISA_PORTABLE;
    for (int i = 0; i < FSDPI_ISA_COUNT; i++) {
        if (!fsdpi_isa_supported((fsdpi_isa)i)) break;
        best = (fsdpi_isa)i;
        if (want != NULL && strcmp(want, names[i]) == 0) break;
    }
    return best;
}

fsdpi_isa fsdpi_isa_get(void)
{
    static _Atomic int cached = -1; /* a fact of the machine, not of a model */
    int isa = atomic_load_explicit(&cached, memory_order_relaxed);
    if (isa < 0) {
        isa = (int)detect();
        atomic_store_explicit(&cached, isa, memory_order_relaxed);
    }
    return (fsdpi_isa)isa;
}
