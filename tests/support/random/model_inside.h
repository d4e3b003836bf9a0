/* SPDX-License-Identifier: MIT
 *
 * What the parts of the model know of each other. */
#ifndef FSDP_TESTS_RANDOM_MODEL_INSIDE_H
#define FSDP_TESTS_RANDOM_MODEL_INSIDE_H

#include "support/random/model.h"

void model_merge(model_unit *u);
void model_post(model *m, int pass, int unit);
void model_commit(model *m, int pass, int unit);
void model_drop_gradients(model_unit *u);
void model_write_gradients(model *m, const call *c, int pass);
void model_optim_step(model *m, const call *c);
void model_step_call(model *m, const call *c);
void model_forward(model *m, const call *c);

#endif
