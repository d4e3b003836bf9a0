/* SPDX-License-Identifier: MIT
 *
 * Units whose gradients are made up, for tests of what happens to gradients: a value for each element of each leaf. Parameters lie
 * such that there is padding between them, into which NaNs are written.
 *
 *   w [7,19]   b [23]   e [0]   s []      MADEUP elements, numbered one after another */
#ifndef FSDP_TESTS_MADEUP_H
#define FSDP_TESTS_MADEUP_H

#include <fsdp/fsdp.h>

enum { MADEUP_PARAMS = 4, MADEUP = 7 * 19 + 23 + 0 + 1 };

extern const int64_t madeup_begin[MADEUP_PARAMS + 1]; /* of each parameter, in elements */

/* The gradient of element i in a leaf; a function of its arguments, called in kernels. */
typedef float (*madeup_fn)(int which, int leaf, int i);

/* Its initial values are madeup_value(which, i). */
fsdp_status madeup_unit(fsdp_unit **out, fsdp_comm *comm, fsdp_device *dev, fsdp_mode mode, const char *name, int which);
fsdp_status madeup_unit_with(fsdp_unit **out, fsdp_comm *comm, const fsdp_unit_opts *opts, int which);
float madeup_value(int which, int i);
/* In [-1, 1), from integers. */
float madeup_noise(int which, int leaf, int i);

/* A pass on the units' communicator in which unit k brings fn(which[k], leaf, .). */
fsdp_status madeup_pass(fsdp_unit *const *units, const int *which, int count, int leaf, madeup_fn fn, double weight);
/* The same within a pass that is the caller's. */
fsdp_status madeup_run(fsdp_pass *pass, fsdp_unit *const *units, const int *which, int count, int leaf, madeup_fn fn);
/* All parameters of a unit, whole: MADEUP floats. */
fsdp_status madeup_read(fsdp_unit *unit, float *out);

#endif
