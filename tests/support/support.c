/* SPDX-License-Identifier: MIT */
#include "support/testing.h"
