/* SPDX-License-Identifier: MIT
 *
 * Activation checkpointing changes no bits: around units, inside units, nested, with dropout, over two micro-batches and an
 * evaluation between them, on every transport and device; and a tape holds less for it. */
#include "support/testing.h"

#include "autograd/tape.h"
#include "device/arena.h"
#include "shard/runtime.h"

#include <fsdp/fsdp.h>
#include <sys/mman.h>

enum { WIDTH = 6, ROWS = 4, STEPS = 3, MOST = 4096 };

/* Which modules are computed again. The tree: root { 0: stack { 0: linear, 1: dropout, 2: linear }, 1: linear, 2: stack } */
typedef enum layout { NOTHING, AROUND_UNIT, INSIDE_UNIT, INNER_UNIT_IN_REGION, EVERYTHING, LAYOUTS } layout;

typedef struct run {
    const char *transport, *device;
    int ranks;
    layout layout;
    float *param; /* shared with the parent: all parameters at the end */
    size_t *live; /* bytes that the tape holds after a forward, of rank 0 */
} run;

static fsdp_status make_stack(fsdp_module **out)
{
    fsdp_module *c[3];
    FSDP_TRY(fsdp_linear(&c[0], WIDTH, 5 * WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_dropout(&c[1], 0.3f));
    FSDP_TRY(fsdp_linear(&c[2], 5 * WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    return fsdp_sequential(out, c, 3);
}

static fsdp_status make_model(fsdp_module **out, fsdp_comm *comm, fsdp_device *dev, layout l)
{
    fsdp_wrap_opts w = { .comm = comm, .compute_device = dev };
    fsdp_module *c[3];
    FSDP_TRY(make_stack(&c[0]));
    FSDP_TRY(fsdp_linear(&c[1], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(make_stack(&c[2]));
    FSDP_TRY(fsdp_wrap(&c[0], c[0], &w));
    FSDP_TRY(fsdp_wrap(&c[2], c[2], &w));
    if (l == INSIDE_UNIT || l == EVERYTHING) { /* the modules that have the units: the region is inside the unit */
        fsdp_module_set_recompute(c[0], true);
        fsdp_module_set_recompute(c[2], true);
    }
    fsdp_module *first = c[0];
    FSDP_TRY(fsdp_sequential(&c[0], &first, 1)); /* a module around the unit */
    if (l == AROUND_UNIT || l == EVERYTHING) fsdp_module_set_recompute(c[0], true);
    FSDP_TRY(fsdp_sequential(out, c, 3));
    FSDP_TRY(fsdp_wrap(out, *out, &w));
    if (l == INNER_UNIT_IN_REGION || l == EVERYTHING) fsdp_module_set_recompute(*out, true);
    return fsdp_module_init_keyed(*out, FSDP_INIT_KAIMING, 3);
}

static size_t live_bytes(fsdp_comm *comm, fsdp_device *dev)
{
    fsdpi_runtime *rt;
    fsdpi_devctx *ctx;
    if (fsdpi_runtime_of(&rt, comm) != FSDP_OK || fsdpi_runtime_device(&ctx, rt, dev) != FSDP_OK) return 0;
    return fsdpi_arena_get_stats(ctx->arena).bytes_live;
}

static fsdp_status pass(fsdp_module *model, fsdp_comm *comm, fsdp_device *dev, int step, int leaf, bool eval, size_t *live)
{
    float x[ROWS * WIDTH];
    int32_t y[ROWS];
    for (int i = 0; i < ROWS; i++) y[i] = (leaf + i) % WIDTH;
    fsdp_philox_normal_fill(5, "x", (int64_t)(step * 100 + leaf) * ROWS * WIDTH, ROWS * WIDTH, x);
    fsdp_tape *tape;
    fsdp_tensor *in, *labels, *scores, *loss;
    fsdp_tape_opts o = { .device = dev, .eval = eval, .seed = 9, .step = (uint32_t)step, .first_sample = (uint32_t)(leaf * ROWS) };
    FSDP_TRY(fsdp_tape_begin_with(&tape, comm, &o));
    FSDP_TRY(fsdp_tensor_from_f32(&in, tape, x, 2, (int64_t[]){ ROWS, WIDTH }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_forward(model, tape, in, &scores));
    FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
    if (live != NULL) *live = live_bytes(comm, dev);
    if (!eval) FSDP_TRY(fsdp_backward(tape, loss));
    return fsdp_tape_end(tape);
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const run *r = arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm), n;
    fsdp_device *dev;
    fsdp_module *model;
    fsdp_optim *optim;
    const fsdp_module_param_info *p;
    FSDP_TRY(fsdp_device_open(&dev, r->device));
    FSDP_TRY(make_model(&model, comm, dev, r->layout));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(model), &(fsdp_adamw_opts){ .lr = 0.02f }));
    for (int step = 0; step < STEPS; step++) {
        for (int leaf = rank; leaf < 12; leaf += size) {
            FSDP_TRY(pass(model, comm, dev, step, leaf, false, rank == 0 ? r->live : NULL));
            if (step == 1 && leaf < size) FSDP_TRY(pass(model, comm, dev, step, leaf, true, NULL));
        }
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1 }));
    }
    FSDP_TRY(fsdp_module_params(model, &p, &n));
    float *to = r->param;
    for (int i = 0; i < n; i++) {
        int64_t numel = fsdp_unit_param_numel(p[i].unit, p[i].index);
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, rank == 0 ? to : NULL));
        to += numel;
    }
    fsdp_optim_destroy(optim);
    fsdp_module_destroy(model);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_same_bits(void **state)
{
    (void)state;
    float *shared = mmap(NULL, 2 * MOST * sizeof(float) + 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    float *want = shared, *got = shared + MOST;
    size_t *live = (size_t *)(void *)(shared + 2 * MOST), plain;
    run r = { .transport = "self", .device = "cpu", .ranks = 1, .param = want, .live = live };
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 1 }, train, &r));
    plain = *live;
    assert_true(want[0] != 0);
    for (int l = AROUND_UNIT; l < LAYOUTS; l++)
        for (int corner = 0; corner < 5; corner++) {
            static const char *const transports[] = { "self", "shm", "copy", "shm", "copy" }, *const devices[] = { "cpu", "cpu", "cpu", "guard", "guard" };
            r = (run){ .transport = transports[corner], .device = devices[corner], .ranks = corner == 0 ? 1 : corner + 1 < 5 ? corner + 1 : 6,
                       .layout = (layout)l, .param = got, .live = live };
            memset(got, 0, MOST * sizeof(float));
            assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = r.ranks, .transport = r.transport, .ranks_are_threads = corner % 2 == 1, .timeout_s = 60 }, train, &r));
            if (memcmp(want, got, MOST * sizeof(float)) != 0) fail_msg("layout %d on %s %s, %d ranks: other bits", l, r.transport, r.device, r.ranks);
            if (corner == 0) assert_true(*live < plain);
        }
    munmap(shared, 2 * MOST * sizeof(float) + 64);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_same_bits) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
