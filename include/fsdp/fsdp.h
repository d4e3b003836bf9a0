/* SPDX-License-Identifier: MIT
 *
 * All of libfsdp. A first program is examples/own_compute.c; the headers are written to be read in this order. */
#ifndef FSDP_FSDP_H
#define FSDP_FSDP_H

#include <fsdp/version.h>
#include <fsdp/status.h>
#include <fsdp/log.h>
#include <fsdp/dtype.h>
#include <fsdp/random.h>
#include <fsdp/device.h>
#include <fsdp/comm.h>
#include <fsdp/sum.h>
#include <fsdp/unit.h>
#include <fsdp/gather.h>
#include <fsdp/hooks.h>
#include <fsdp/norm.h>
#include <fsdp/scaler.h>
#include <fsdp/optim.h>
#include <fsdp/average.h>
#include <fsdp/tensor.h>
#include <fsdp/autograd.h>
#include <fsdp/ops.h>
#include <fsdp/nn.h>
#include <fsdp/wrap.h>
#include <fsdp/models.h>
#include <fsdp/data.h>
#include <fsdp/checkpoint.h>
#include <fsdp/state.h>
#include <fsdp/info.h>
#include <fsdp/safetensors.h>

#endif
