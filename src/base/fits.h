/* SPDX-License-Identifier: MIT */
#ifndef FSDPI_BASE_FITS_H
#define FSDPI_BASE_FITS_H

#include <stdbool.h>

/* Whether a pattern stands for a name: `*` is any text, everything else itself. */
bool fsdpi_fits(const char *pattern, const char *name);

#endif
