/* SPDX-License-Identifier: MIT
 *
 * For tests of what one rank does with modules and tapes: its communicator, made anew for each test, and small things that assert
 * that they could be made. */
#ifndef FSDP_TESTS_ONE_RANK_H
#define FSDP_TESTS_ONE_RANK_H

#include "support/testing.h"

#include "device/arena.h"
#include "shard/runtime.h"

#include <fsdp/fsdp.h>

static fsdp_comm *comm;

/* cmocka's fixtures. */
static inline int set_up(void **state)
{
    (void)state;
    return fsdp_comm_create_self(&comm) == FSDP_OK ? 0 : -1;
}

static inline int tear_down(void **state)
{
    (void)state;
    fsdp_comm_destroy(comm);
    return 0;
}

/* Of the CPU's arena: where tensors and whole units lie. */
static inline fsdpi_arena_stats arena_now(void)
{
    fsdpi_runtime *rt;
    fsdpi_devctx *ctx;
    assert_ok(fsdpi_runtime_of(&rt, comm));
    assert_ok(fsdpi_runtime_device(&ctx, rt, fsdp_device_cpu()));
    return fsdpi_arena_get_stats(ctx->arena);
}

/* ---- modules ---- */

static inline fsdp_module *linear(int64_t in, int64_t out, fsdp_activation act)
{
    fsdp_module *m;
    assert_ok(fsdp_linear(&m, in, out, &(fsdp_linear_opts){ .bias = true, .activation = act }));
    return m;
}

/* b and c may be NULL: fewer. */
static inline fsdp_module *sequential(fsdp_module *a, fsdp_module *b, fsdp_module *c)
{
    fsdp_module *m;
    assert_ok(fsdp_sequential(&m, (fsdp_module *[]){ a, b, c }, b == NULL ? 1 : c == NULL ? 2 : 3));
    return m;
}

/* All gradients of a tree, in the order of its parameters; 0 where a unit has none. They are dropped. Returns how many elements. */
static inline int gradients(fsdp_module *m, float *out)
{
    const fsdp_module_param_info *p;
    const fsdp_slice *s;
    int n, slices, used = 0;
    fsdp_unit_list units = fsdp_module_units(m);
    assert_ok(fsdp_module_params(m, &p, &n));
    assert_ok(fsdp_step_begin(units));
    for (int i = 0; i < n; i++) {
        fsdp_unit_slices(p[i].unit, &s, &slices);
        for (int k = 0; k < slices; k++) {
            if (s[k].param != p[i].index) continue;
            for (int64_t e = 0; e < s[k].numel; e++) out[used++] = s[k].grad != NULL ? s[k].grad[e] : 0;
        }
    }
    assert_ok(fsdp_step_cancel(units));
    return used;
}

/* ---- tensors ---- */

/* [rows,cols], drawn by name. */
static inline fsdp_tensor *matrix(fsdp_tape *tape, const char *name, int64_t rows, int64_t cols)
{
    fsdp_tensor *t;
    float *v = calloc((size_t)(rows * cols) + 1, sizeof(*v));
    assert_non_null(v);
    fsdp_philox_normal_fill(3, name, 0, rows * cols, v);
    assert_ok(fsdp_tensor_from_f32(&t, tape, v, 2, (int64_t[]){ rows, cols }));
    free(v);
    return t;
}

/* n classes, each less than `below`. */
static inline fsdp_tensor *labels_of(fsdp_tape *tape, int64_t n, int64_t below)
{
    fsdp_tensor *t;
    int32_t v[64];
    assert_true(n <= 64);
    for (int64_t i = 0; i < n; i++) v[i] = (int32_t)((5 * i + 2) % below);
    assert_ok(fsdp_tensor_from_i32(&t, tape, v, 1, &n));
    return t;
}

/* The cross-entropy of scores [..., classes]. */
static inline fsdp_tensor *loss_of(fsdp_tape *tape, fsdp_tensor *scores)
{
    fsdp_tensor *loss;
    int64_t classes = fsdp_tensor_shape(scores, -1);
    assert_ok(fsdp_op_cross_entropy(tape, scores, labels_of(tape, fsdp_tensor_numel(scores) / classes, classes), &loss));
    return loss;
}

#endif
