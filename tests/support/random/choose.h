/* SPDX-License-Identifier: MIT
 *
 * Which call comes next: a matter of chance and of the model alone, so every rank makes up the same one. */
#ifndef FSDP_TESTS_RANDOM_CHOOSE_H
#define FSDP_TESTS_RANDOM_CHOOSE_H

#include "support/random/model.h"

/* Chance alone seldom trains. A plan is what a program would do: a pass through some units, now and then a step; other calls
 * come in between, and what is not possible any more is left out. */
typedef struct plan {
    int count, at, pass;
    struct {
        call_kind kind;
        int unit;
    } turn[64];
} plan;

/* The n-th call. injects: an allocation may fail in it. */
call choose_call(rng *g, const model *m, plan *p, bool injects, long n);

#endif
