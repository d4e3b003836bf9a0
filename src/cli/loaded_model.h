/* SPDX-License-Identifier: MIT */
#ifndef FSDP_CLI_LOADED_MODEL_H
#define FSDP_CLI_LOADED_MODEL_H

#include <fsdp/fsdp.h>

/* A model from a folder that has its weights too: looks at the config and whether there are weights, before ranks start.
 * Prints what is wrong; 0: well. */
int cli_open_model(fsdp_model **out, const char *folder);

#endif
