/* SPDX-License-Identifier: MIT
 *
 * What the parts that make calls know of each other. */
#ifndef FSDP_TESTS_RANDOM_MAKE_INSIDE_H
#define FSDP_TESTS_RANDOM_MAKE_INSIDE_H

#include "support/random/make.h"

fsdp_status peek(run *r, const call *c);
fsdp_status read_one(run *r, int unit, int param, bool wanted);
fsdp_status read_pending(run *r, const call *c);
fsdp_status set_cap(run *r, const call *c);
fsdp_status summon(run *r, const call *c);
fsdp_status use_summoned_grads(run *r, const call *c);
fsdp_status write_summoned(run *r, const call *c);
fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg);
fsdp_status read_grad(run *r, const call *c);
fsdp_status read_average(run *r);
fsdp_status diverge(run *r, const call *c);
fsdp_status renew_average(run *r, const call *c);
fsdp_status write_masters(run *r, const call *c);
fsdp_status check_norm(run *r, const call *c, fsdp_unit_list list);
fsdp_status renew(run *r, const call *c);
fsdp_status create_differing(run *r, const call *c);
fsdp_status save_or_load(run *r, const call *c);
fsdp_status expect_equal(run *r, const float *got, const float *want, int64_t numel, const char *what, int unit, int param);
fsdp_unit_list list_of(run *r, unsigned mask, fsdp_unit **room);

#endif
