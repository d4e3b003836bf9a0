/* SPDX-License-Identifier: MIT */
#include "cli/loaded_model.h"

#include "cli/args.h"

#include <stdio.h>
#include <sys/stat.h>

int cli_open_model(fsdp_model **out, const char *folder)
{
    struct stat sb;
    char config[4300];
    snprintf(config, sizeof(config), "%s/config.json", folder);
    if (stat(folder, &sb) != 0 || !S_ISDIR(sb.st_mode)) return cli_fail("--model: %s is no folder; a folder with model.safetensors and config.json is wanted", folder);
    if (stat(config, &sb) != 0) return cli_fail("--model: there is no %s; is the training finished? fsdp convert makes a model of a checkpoint", config);
    fsdp_safetensors *weights;
    if (fsdp_safetensors_open(&weights, folder) != FSDP_OK) return cli_fail("--model: %s", fsdp_last_error_message());
    fsdp_safetensors_close(weights);
    if (fsdp_model_create(out, folder) != FSDP_OK) return cli_fail("--model: %s", fsdp_last_error_message());
    return 0;
}
