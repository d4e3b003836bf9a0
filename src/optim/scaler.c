/* SPDX-License-Identifier: MIT */
#include <fsdp/scaler.h>

#include "base/error.h"

#include <math.h>

fsdp_status fsdp_scaler_init(fsdp_scaler *s, const fsdp_scaler_opts *opts)
{
    fsdp_scaler_opts o = opts != NULL ? *opts : (fsdp_scaler_opts){ 0 };
    if (o.scale == 0) o.scale = 65536;
    if (o.growth == 0) o.growth = 2;
    if (o.backoff == 0) o.backoff = 0.5;
    if (o.min == 0) o.min = fmin(1, o.scale);
    if (o.max == 0) o.max = fmax(0x1p24, o.scale);
    if (o.interval == 0) o.interval = 2000;
    /* The backward begins with a float. */
    FSDP_FAIL_IF(!(o.min >= 0x1p-126) || !(o.max <= 0x1p126) || !(o.min <= o.scale) || !(o.scale <= o.max), FSDP_ERR_INVALID,
                 "fsdp_scaler_init: scale %g, min %g and max %g must be in order, from 2^-126 to 2^126", o.scale, o.min, o.max);
    FSDP_FAIL_IF(!(o.growth >= 1) || isinf(o.growth) || !(o.backoff > 0 && o.backoff < 1) || o.interval < 0, FSDP_ERR_INVALID,
                 "fsdp_scaler_init: growth %g must be 1 or more, backoff %g between 0 and 1, interval %lld 1 or more", o.growth, o.backoff, (long long)o.interval);
    *s = (fsdp_scaler){ .growth = o.growth, .backoff = o.backoff, .min = o.min, .max = o.max, .interval = o.interval, .scale = o.scale };
    return FSDP_OK;
}

fsdp_status fsdp_scaler_update(fsdp_scaler *s, double norm, bool *skip)
{
    if (!isfinite(norm)) {
        FSDP_FAIL_IF(s->scale <= s->min, FSDP_ERR_NONFINITE, "the gradient norm is %g, and the loss scale is at its minimum, %g: a smaller one would not help", norm, s->scale);
        s->scale = fmax(s->scale * s->backoff, s->min);
        s->good_steps = 0;
        s->skipped++;
        *skip = true;
        return FSDP_OK;
    }
    *skip = false;
    if (++s->good_steps < s->interval) return FSDP_OK;
    s->scale = fmin(s->scale * s->growth, s->max);
    s->good_steps = 0;
    return FSDP_OK;
}
