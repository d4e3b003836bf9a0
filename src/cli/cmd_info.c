/* SPDX-License-Identifier: MIT */
#include "cli/args.h"
#include "cli/cli.h"

#include <fsdp/fsdp.h>

#include <stdio.h>

typedef struct info_settings {
    cli_given given;
} info_settings;

int cmd_info(int argc, char **argv)
{
    info_settings s = { 0 };
    int code;
    if (!cli_parse("info", "", NULL, 0, &s, argc, argv, &code)) return code;
    fsdp_info i;
    fsdp_get_info(&i);
    printf("version          %s\n", fsdp_version());
    printf("CPUs allowed     %d\n", i.cpus);
    printf("instruction set  %s (FSDP_ISA chooses a lesser one: portable, avx2)\n", i.instruction_set);
    printf("matrix products  %s %s%s%s (FSDP_GEMM chooses: onednn, cblas, reference)\n", i.gemm, i.gemm_version, i.gemm_path[0] != '\0' ? " from " : "", i.gemm_path);
    printf("transports       %s\n", i.transports);
    printf("devices          %s\n", i.devices);
    return 0;
}
