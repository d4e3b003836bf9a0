/* SPDX-License-Identifier: MIT */
#include "support/madeup.h"

#include "shard/unit.h"

#include <math.h>
#include <string.h>

static const fsdp_param params[MADEUP_PARAMS] = { { "w", 2, { 7, 19 } }, { "b", 1, { 23 } }, { "e", 1, { 0 } }, { "s", 0, { 0 } } };
const int64_t madeup_begin[MADEUP_PARAMS + 1] = { 0, 133, 156, 156, 157 };

float madeup_noise(int which, int leaf, int i)
{
    uint32_t h = ((uint32_t)which * 64 + (uint32_t)leaf) * 4096 + (uint32_t)i;
    h = (h ^ h >> 16) * 0x2c1b3c6du;
    h = (h ^ h >> 15) * 0x297a2d39u;
    return (float)(int32_t)(h ^ h >> 15) * 0x1p-31f;
}

float madeup_value(int which, int i)
{
    return 0.5f * madeup_noise(which, 63, i);
}

static void init(const char *name, int64_t i, float *value, void *arg)
{
    int p = 0;
    while (strcmp(params[p].name, name) != 0) p++;
    *value = madeup_value(*(const int *)arg, (int)(madeup_begin[p] + i));
}

fsdp_status madeup_unit(fsdp_unit **out, fsdp_comm *comm, fsdp_device *dev, fsdp_mode mode, const char *name, int which)
{
    return madeup_unit_with(out, comm, &(fsdp_unit_opts){ .name = name, .mode = mode, .compute_device = dev }, which);
}

fsdp_status madeup_unit_with(fsdp_unit **out, fsdp_comm *comm, const fsdp_unit_opts *opts, int which)
{
    FSDP_TRY(fsdp_unit_create(out, comm, params, MADEUP_PARAMS, opts));
    return fsdp_unit_init(*out, init, &which);
}

typedef struct args {
    madeup_fn fn;
    int which, leaf, first;
    float *g;
    int64_t numel, room; /* room: up to the next parameter */
} args;

static fsdp_status k_write(const fsdp_kernel *k, const void *v)
{
    const args *a = v;
    float *g = fsdp_kernel_ptr(k, a->g);
    for (int64_t i = 0; i < a->room; i++) g[i] = i < a->numel ? a->fn(a->which, a->leaf, a->first + (int)i) : NAN;
    return FSDP_OK;
}

static fsdp_status backward(fsdp_unit *u, int which, int leaf, madeup_fn fn)
{
    for (int p = 0; p < MADEUP_PARAMS; p++) {
        float beta;
        if (fsdp_unit_frozen(u, p)) continue;
        int64_t end = p + 1 < MADEUP_PARAMS ? u->layout.at[p + 1] : u->layout.total;
        args a = { fn, which, leaf, (int)madeup_begin[p], fsdp_unit_grad(u, p, &beta), fsdp_unit_param_numel(u, p), end - u->layout.at[p] };
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_write, &a, sizeof(a)));
    }
    return FSDP_OK;
}

fsdp_status madeup_run(fsdp_pass *pass, fsdp_unit *const *units, const int *which, int count, int leaf, madeup_fn fn)
{
    for (int k = 0; k < count; k++) {
        FSDP_TRY(fsdp_unit_begin_forward(units[k], pass));
        FSDP_TRY(fsdp_unit_end_forward(units[k], pass));
    }
    for (int k = count - 1; k >= 0; k--) {
        FSDP_TRY(fsdp_unit_begin_backward(units[k], pass));
        FSDP_TRY(backward(units[k], which[k], leaf, fn));
        FSDP_TRY(fsdp_unit_end_backward(units[k], pass));
    }
    return FSDP_OK;
}

fsdp_status madeup_pass(fsdp_unit *const *units, const int *which, int count, int leaf, madeup_fn fn, double weight)
{
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, fsdp_unit_comm(units[0]), FSDP_PASS_TRAIN));
    FSDP_TRY(madeup_run(pass, units, which, count, leaf, fn));
    fsdp_pass_add_weight(pass, weight);
    return fsdp_pass_end(pass);
}

fsdp_status madeup_read(fsdp_unit *unit, float *out)
{
    for (int p = 0; p < MADEUP_PARAMS; p++) FSDP_TRY(fsdp_unit_read_param(unit, p, out + madeup_begin[p]));
    return FSDP_OK;
}
