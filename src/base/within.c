/* SPDX-License-Identifier: MIT */
#include "base/within.h"

_Thread_local const fsdpi_within *fsdpi_within_now;
