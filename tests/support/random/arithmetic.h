/* SPDX-License-Identifier: MIT
 *
 * What kernels and model both compute, and how much of everything there is. */
#ifndef FSDP_TESTS_RANDOM_ARITHMETIC_H
#define FSDP_TESTS_RANDOM_ARITHMETIC_H

#include "support/random/calls.h"

#include <fsdp/dtype.h>

enum { MODEL_UNITS = 5, MODEL_PARAMS = 3, MODEL_TOTAL = 512, MODEL_RANKS = 5, MODEL_PASSES = 3, MODEL_ROUNDS = 4, MODEL_WEIGHTS = 64 };

/* To the nearest value of a type, once. */
float model_rounded(fsdp_dtype t, float x);
float model_noise(uint32_t a, uint32_t b, uint32_t c);
float model_value(uint32_t salt, int unit, int param, int64_t i);
float model_mix(float number, const float *p, int64_t numel, uint64_t leaf, int param);
void model_gradient(float *g, bool add, float number, const float *p, int64_t numel, uint64_t leaf, int param, bool poison);
/* The optimizers of the test: SGD with momentum and AdamW as fsdp/optim.h has them; and one of its own. */
#define MODEL_LR 0.05f
#define MODEL_MOMENTUM 0.9f
#define MODEL_DECAY 0.01f
#define MODEL_CLIP 0.5f
void model_sgd(float *p, float *v, float g);
/* t: how many steps the parameter has had with this one. */
void model_adamw(float *p, float *m, float *v, float g, int t);
/* An average, or a teacher, on its way to p. */
float model_mixed(float a, float p, float decay);
float model_decay(const call *c);
float model_own_update(float p, const float *g);
/* grad_scale of the call: 0, or a number. */
float model_grad_scale(const call *c);

#endif
