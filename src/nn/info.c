/* SPDX-License-Identifier: MIT */
#include <fsdp/comm.h>
#include <fsdp/info.h>

#include "base/isa.h"
#include "comm/transport.h"
#include "device/device.h"
#include "ops/gemm.h"

void fsdp_get_info(fsdp_info *out)
{
    const fsdpi_gemm_info *g = fsdpi_gemm_get_info();
    *out = (fsdp_info){ .instruction_set = fsdpi_isa_name(fsdpi_isa_get()),
                        .gemm = g->name,
                        .gemm_version = g->version,
                        .gemm_path = g->path,
                        .cpus = fsdp_cpus_allowed(),
                        .transports = "self, shm, copy",
                        .devices = fsdpi_device_names() };
}
