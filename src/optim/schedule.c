/* SPDX-License-Identifier: MIT */
#include <fsdp/optim.h>

#include <math.h>

float fsdp_schedule_lr(const fsdp_schedule *s, int64_t step)
{
    int64_t last = s->steps - 1;
    if (last >= 0 && step > last) step = last; /* also where the warm-up is longer than the run */
    if (step < s->warmup) return (float)((double)s->lr * (double)(step + 1) / (double)s->warmup);
    if (s->kind == FSDP_SCHEDULE_CONSTANT || s->steps == 1) return s->lr;
    double t = step < last ? (double)(step - s->warmup) / (double)(last - s->warmup) : 1.0;
    double left = s->kind == FSDP_SCHEDULE_COSINE ? 0.5 * (1.0 + cos(M_PI * t)) : 1.0 - t;
    return (float)((double)s->min_lr + ((double)s->lr - (double)s->min_lr) * left);
}
