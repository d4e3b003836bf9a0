/* SPDX-License-Identifier: MIT
 *
 * Buffers of modules: on the device where they are used, never changed by units, read and written between operations, saved with the
 * parameters and loaded on every rank, counted once where a forward is run again. */
#include "support/ranks.h"
#include "support/testing.h"

#include <fsdp/fsdp.h>

#include "base/alloc.h"

#include <math.h>
#include <unistd.h>

enum { WIDTH = 5, ROWS = 3 };

/* y = (x table') weight', and `seen` counts the rows that went through. */
typedef struct net {
    fsdp_comm *world;
    fsdp_device *device;
    fsdp_module *inner, *model;
    bool counts;
} net;

static fsdp_status run(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    const net *n = ctx;
    fsdp_tensor *x;
    FSDP_TRY(fsdp_op_linear(tape, in, fsdp_module_buffer(m, 0), NULL, NULL, &x));
    if (n->counts && !fsdp_tape_is_recomputing(tape)) {
        int32_t seen;
        FSDP_TRY(fsdp_module_read_buffer(m, 1, &seen));
        seen += (int32_t)fsdp_tensor_shape(in, 0);
        FSDP_TRY(fsdp_module_write_buffer(m, 1, &seen));
    }
    return fsdp_op_linear(tape, x, fsdp_module_param(m, 0), NULL, NULL, out);
}

static void table_of(int k, float *out)
{
    for (int i = 0; i < WIDTH * WIDTH; i++) out[i] = (float)((i + k) % 7) - 3;
}

static fsdp_status make(net *n, const corner *c, fsdp_comm *world)
{
    float table[WIDTH * WIDTH];
    uint16_t half[2] = { 0x3f80, 0x4000 }; /* bf16: 1, 2 */
    table_of(1, table);
    *n = (net){ .world = world };
    FSDP_TRY(fsdp_device_open(&n->device, c->device));
    FSDP_TRY(fsdp_module_create(&n->inner, &(fsdp_module_opts){ .type = "inner", .forward = run, .ctx = n }));
    FSDP_TRY(fsdp_module_add_param(n->inner, &(fsdp_param){ .name = "weight", .ndim = 2, .shape = { WIDTH, WIDTH } }, FSDP_PARAM_NORMAL, 0.5f));
    FSDP_TRY(fsdp_module_add_buffer(n->inner, &(fsdp_buffer){ .name = "table", .dtype = FSDP_F32, .ndim = 2, .shape = { WIDTH, WIDTH } }, table));
    FSDP_TRY(fsdp_module_add_buffer(n->inner, &(fsdp_buffer){ .name = "seen", .dtype = FSDP_I32 }, NULL));
    FSDP_TRY(fsdp_module_add_buffer(n->inner, &(fsdp_buffer){ .name = "half", .dtype = FSDP_BF16, .ndim = 1, .shape = { 2 } }, half));
    FSDP_TRY(fsdp_module_add_buffer(n->inner, &(fsdp_buffer){ .name = "again", .dtype = FSDP_F32, .ndim = 1, .shape = { 3 }, .not_saved = true }, NULL));
    FSDP_TRY(fsdp_module_add_buffer(n->inner, &(fsdp_buffer){ .name = "empty", .dtype = FSDP_F32, .ndim = 1, .shape = { 0 } }, NULL));
    FSDP_TRY(fsdp_sequential(&n->model, &n->inner, 1));
    FSDP_TRY(fsdp_module_init_keyed(n->model, FSDP_INIT_KAIMING, 1));
    return FSDP_OK;
}

static fsdp_status wrap(net *n, const corner *c)
{
    return fsdp_wrap(&n->model, n->model, &(fsdp_wrap_opts){ .comm = n->world, .mode = c->mode, .compute_device = n->device, .param_dtype = FSDP_BF16 });
}

static void destroy(net *n)
{
    fsdp_module_destroy(n->model);
    fsdp_device_close(n->device);
}

static fsdp_status forward(net *n, fsdp_device *device, fsdp_tape **tape, fsdp_tensor **x, fsdp_tensor **y)
{
    float in[ROWS * WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) in[i] = (float)(i % 4) - 1;
    FSDP_TRY(fsdp_tape_begin_with(tape, n->world, &(fsdp_tape_opts){ .device = device }));
    FSDP_TRY(fsdp_tensor_from_f32(x, *tape, in, 2, (int64_t[]){ ROWS, WIDTH }));
    FSDP_TRY(fsdp_tensor_require_grad(*x));
    return fsdp_forward(n->model, *tape, *x, y);
}

static fsdp_status backward(fsdp_tape *tape, fsdp_tensor *y)
{
    fsdp_tensor *labels, *loss;
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ 0, 1, 2 }, 1, (int64_t[]){ ROWS }));
    FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
    return fsdp_backward(tape, loss);
}

/* ---- values ---- */

/* A value that is written counts for what is called after it: not for operations before, on a device that runs late. */
static fsdp_status values(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    fsdp_tape *tape;
    fsdp_tensor *x, *y;
    float out[4][ROWS * WIDTH], dx[2][ROWS * WIDTH], table[WIDTH * WIDTH], back[WIDTH * WIDTH];
    FSDP_TRY(make(&n, c, world));
    FSDP_TRY(wrap(&n, c));
    for (int k = 0; k < 4; k++) { /* tables 1, 1, 2, 1 */
        FSDP_TRY(forward(&n, n.device, &tape, &x, &y));
        table_of(k == 2 ? 1 : 2, table);
        if (k == 1 || k == 2) FSDP_TRY(fsdp_module_write_buffer(n.inner, 0, table));
        FSDP_TRY(fsdp_module_read_buffer(n.inner, 0, back));
        rank_check(k == 0 || k == 3 || memcmp(table, back, sizeof(table)) == 0);
        FSDP_TRY(fsdp_tensor_to_f32(y, out[k]));
        FSDP_TRY(fsdp_tape_cancel(tape));
    }
    rank_check(memcmp(out[0], out[1], sizeof(out[0])) == 0 && memcmp(out[0], out[3], sizeof(out[0])) == 0);
    rank_check(memcmp(out[0], out[2], sizeof(out[0])) != 0 && out[0][0] != 0);
    /* The backward has read it when it is written to. */
    for (int k = 0; k < 2; k++) {
        FSDP_TRY(forward(&n, n.device, &tape, &x, &y));
        FSDP_TRY(backward(tape, y));
        table_of(5, table);
        if (k == 1) FSDP_TRY(fsdp_module_write_buffer(n.inner, 0, table));
        FSDP_TRY(fsdp_tensor_grad_to_f32(x, dx[k]));
        FSDP_TRY(fsdp_tape_end(tape));
    }
    rank_check(memcmp(dx[0], dx[1], sizeof(dx[0])) == 0 && dx[0][0] != 0);
    destroy(&n);
    return FSDP_OK;
}

static void test_values(void **state)
{
    (void)state;
    in_corners(values, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = !SANITIZED, .processes_only = CAN_FORK, .threads_only = !CAN_FORK });
}

static fsdp_status add(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    (void)ctx;
    return fsdp_op_add(tape, in, fsdp_module_buffer(m, 0), out);
}

/* On one device, then another: a value goes along. */
static void test_devices(void **state)
{
    (void)state;
    fsdp_comm *comm;
    fsdp_device *guard, *second;
    fsdp_tape *tape;
    fsdp_tensor *in, *y;
    fsdp_module *m;
    float sum[2], out[2], step[2] = { 1, 10 }, zero[2] = { 0 };
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(fsdp_device_open(&guard, "guard"));
    assert_ok(fsdp_device_open(&second, "guard"));
    assert_ok(fsdp_module_create(&m, &(fsdp_module_opts){ .forward = add }));
    assert_ok(fsdp_module_add_buffer(m, &(fsdp_buffer){ .name = "offset", .ndim = 2, .shape = { 1, 2 } }, step));
    fsdp_device *devices[] = { fsdp_device_cpu(), guard, second, fsdp_device_cpu(), guard };
    for (int k = 0; k < 5; k++) {
        assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .device = devices[k], .eval = true }));
        assert_ok(fsdp_tensor_from_f32(&in, tape, zero, 2, (int64_t[]){ 1, 2 }));
        assert_ok(fsdp_forward(m, tape, in, &y));
        assert_ok(fsdp_tensor_to_f32(y, out));
        assert_ok(fsdp_tape_cancel(tape));
        assert_ok(fsdp_module_read_buffer(m, 0, sum));
        for (int i = 0; i < 2; i++) assert_true(sum[i] == step[i] * (float)(k + 1) && out[i] == sum[i]);
        for (int i = 0; i < 2; i++) sum[i] += step[i];
        assert_ok(fsdp_module_write_buffer(m, 0, sum));
    }
    fsdp_module_destroy(m);
    fsdp_device_close(second);
    fsdp_device_close(guard);
    fsdp_comm_destroy(comm);
    assert_int_equal(fsdpi_alloc_live(), 0);
}

/* ---- counted once ---- */

static fsdp_status recomputed(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    fsdp_tape *tape;
    fsdp_tensor *x, *y;
    FSDP_TRY(make(&n, c, world));
    FSDP_TRY(wrap(&n, c));
    n.counts = true;
    for (int k = 0; k < 4; k++) {
        int32_t seen;
        fsdp_module_set_recompute(n.inner, k % 2 == 1);
        FSDP_TRY(forward(&n, n.device, &tape, &x, &y));
        FSDP_TRY(backward(tape, y));
        FSDP_TRY(fsdp_tape_end(tape));
        FSDP_TRY(fsdp_module_read_buffer(n.inner, 1, &seen));
        rank_check(seen == ROWS * (k + 1));
    }
    destroy(&n);
    return FSDP_OK;
}

static void test_counted_once(void **state)
{
    (void)state;
    in_corners(recomputed, &(corners){ .ranks = (const int[]){ 1, 2, 0 }, .transport = "shm", .processes_only = CAN_FORK, .threads_only = !CAN_FORK });
}

/* ---- saved ---- */

static fsdp_status write_mine(net *n, int rank, int step)
{
    float table[WIDTH * WIDTH], again[3] = { (float)rank };
    int32_t seen = 100 * step + rank;
    table_of(rank + 10 * step, table);
    FSDP_TRY(fsdp_module_write_buffer(n->inner, 0, table));
    FSDP_TRY(fsdp_module_write_buffer(n->inner, 1, &seen));
    return fsdp_module_write_buffer(n->inner, 3, again);
}

/* Every rank has that of rank `of` of that step, and what is not saved as it was. */
static fsdp_status check_loaded(net *n, int rank, int of, int step)
{
    float table[WIDTH * WIDTH], want[WIDTH * WIDTH], again[3];
    int32_t seen;
    uint16_t half[2];
    table_of(of + 10 * step, want);
    FSDP_TRY(fsdp_module_read_buffer(n->inner, 0, table));
    FSDP_TRY(fsdp_module_read_buffer(n->inner, 1, &seen));
    FSDP_TRY(fsdp_module_read_buffer(n->inner, 2, half));
    FSDP_TRY(fsdp_module_read_buffer(n->inner, 3, again));
    rank_check(memcmp(table, want, sizeof(table)) == 0 && seen == 100 * step + of);
    rank_check(half[0] == 0x3f80 && half[1] == 0x4000 && again[0] == (float)rank);
    return FSDP_OK;
}

static fsdp_status saved(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    fsdp_checkpoint *cp;
    enum { KINDS = FSDP_STATE_LOCAL + 1 };
    fsdp_state *dict[KINDS];
    fsdp_tape *tape;
    fsdp_tensor *x, *y;
    char path[512];
    int rank = fsdp_comm_rank(world);
    FSDP_TRY(make(&n, c, world));
    FSDP_TRY(wrap(&n, c));
    FSDP_TRY(fsdp_checkpoint_create(&cp, world));
    FSDP_TRY(fsdp_checkpoint_add_module(cp, "m.", n.model));
    for (int step = 1; step <= 3; step++) { /* before the first forward, and after it */
        FSDP_TRY(write_mine(&n, rank, step));
        FSDP_TRY(fsdp_checkpoint_save_with(cp, c->arg, step, &(fsdp_save_opts){ .background = step == 3 }));
        for (int k = 0; k < KINDS && step == 2; k++) FSDP_TRY(fsdp_state_read(&dict[k], cp, &(fsdp_state_opts){ .kind = (fsdp_state_kind)k }));
        FSDP_TRY(write_mine(&n, rank, 9)); /* also while a background save goes on */
        FSDP_TRY(forward(&n, n.device, &tape, &x, &y));
        FSDP_TRY(fsdp_tape_cancel(tape));
    }
    FSDP_TRY(fsdp_checkpoint_wait(cp));
    for (int step = 3; step >= 1; step--) {
        snprintf(path, sizeof(path), "%s/step-%08d", (const char *)c->arg, step);
        FSDP_TRY(write_mine(&n, rank, 9));
        FSDP_TRY(fsdp_checkpoint_load(cp, path));
        FSDP_TRY(check_loaded(&n, rank, 0, step));
    }
    for (int k = 0; k < KINDS; k++) {
        FSDP_TRY(write_mine(&n, rank, 9));
        FSDP_TRY(fsdp_state_load(cp, dict[k], NULL));
        FSDP_TRY(check_loaded(&n, rank, k == FSDP_STATE_LOCAL ? rank : 0, 2));
        fsdp_state_destroy(dict[k]);
    }
    /* In the files: by name, of their own type, without what is not to be saved. */
    fsdp_checkpoint_reader *r;
    FSDP_TRY(fsdp_checkpoint_reader_open(&r, path));
    const fsdp_checkpoint_entry *table = fsdp_checkpoint_reader_find(r, "m.0.table"), *half = fsdp_checkpoint_reader_find(r, "m.0.half");
    rank_check(table != NULL && table->what == FSDP_STATE_BUFFERS && table->dtype == FSDP_F32 && table->ndim == 2 && table->pieces == 1);
    rank_check(half != NULL && half->dtype == FSDP_BF16 && fsdp_checkpoint_reader_find(r, "m.0.again") == NULL);
    fsdp_checkpoint_reader_close(r);
    fsdp_checkpoint_destroy(cp);
    destroy(&n);
    return FSDP_OK;
}

static void test_saved(void **state)
{
    (void)state;
    char folder[] = "/tmp/fsdp_buffers_XXXXXX", command[128];
    assert_non_null(mkdtemp(folder));
    in_corners(saved, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .processes_only = CAN_FORK, .threads_only = !CAN_FORK, .arg = folder });
    snprintf(command, sizeof(command), "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

/* ---- rank 0's, when it is wrapped ---- */

static fsdp_status spread(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    int rank = fsdp_comm_rank(world);
    for (int from_rank0 = 0; from_rank0 < 2; from_rank0++) {
        int32_t seen;
        FSDP_TRY(make(&n, c, world));
        FSDP_TRY(write_mine(&n, rank, 4));
        FSDP_TRY(fsdp_wrap(&n.model, n.model, &(fsdp_wrap_opts){ .comm = world, .compute_device = n.device, .from_rank0 = from_rank0 }));
        FSDP_TRY(fsdp_module_read_buffer(n.inner, 1, &seen));
        rank_check(seen == 400 + (from_rank0 ? 0 : rank));
        destroy(&n);
    }
    return FSDP_OK;
}

static void test_from_rank0(void **state)
{
    (void)state;
    in_corners(spread, &(corners){ .ranks = (const int[]){ 3, 0 }, .transport = "copy" });
}

/* ---- lists, and what is wrong ---- */

static void test_lists_and_errors(void **state)
{
    (void)state;
    fsdp_comm *comm;
    net n;
    const fsdp_module_buffer_info *b;
    int count;
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(make(&n, &(corner){ .device = "cpu" }, comm));
    fsdp_module *inner = n.inner;
    assert_ok(fsdp_module_buffers(n.model, &b, &count));
    assert_int_equal(count, 5);
    assert_string_equal(b[1].name, "0.seen");
    assert_true(b[1].module == inner && b[1].index == 1 && b[1].buffer->dtype == FSDP_I32 && b[1].buffer->ndim == 0);
    assert_ok(fsdp_module_buffers(inner, &b, &count));
    assert_string_equal(b[0].name, "table");
    assert_null(fsdp_module_buffer(inner, 5));
    assert_null(fsdp_module_buffer(n.model, 0));
    assert_int_equal(fsdp_tensor_numel(fsdp_module_buffer(inner, 0)), WIDTH * WIDTH);
    float x[WIDTH * WIDTH];
    assert_fails(fsdp_module_read_buffer(n.model, 0, x), FSDP_ERR_INVALID, "has 0 buffers of its own, not one with number 0");
    assert_fails(fsdp_module_write_buffer(inner, -1, x), FSDP_ERR_INVALID, "not one with number -1");
    assert_fails(fsdp_module_add_buffer(inner, &(fsdp_buffer){ .name = "seen" }, NULL), FSDP_ERR_INVALID, "has a buffer \"seen\" already");
    assert_fails(fsdp_module_add_buffer(inner, &(fsdp_buffer){ .name = "weight" }, NULL), FSDP_ERR_INVALID, "a parameter has that name");
    assert_fails(fsdp_module_add_buffer(n.model, &(fsdp_buffer){ .name = "0" }, NULL), FSDP_ERR_INVALID, "a child has that name");
    assert_fails(fsdp_module_add_buffer(inner, &(fsdp_buffer){ .name = "" }, NULL), FSDP_ERR_INVALID, "without a name");
    assert_fails(fsdp_module_add_buffer(inner, &(fsdp_buffer){ .name = "x", .dtype = (fsdp_dtype)99 }, NULL), FSDP_ERR_INVALID, "99 is no type");
    assert_fails(fsdp_module_add_buffer(inner, &(fsdp_buffer){ .name = "x", .ndim = 1, .shape = { -2 } }, NULL), FSDP_ERR_INVALID, "-2");
    assert_fails(fsdp_module_add_param(inner, &(fsdp_param){ .name = "table", .ndim = 1, .shape = { 2 } }, FSDP_PARAM_ZEROS, 0), FSDP_ERR_INVALID, "a buffer has that name");
    for (long fail = 1; fail < 4; fail++) {
        fsdpi_alloc_fail_at(fail);
        assert_fails(fsdp_module_add_buffer(inner, &(fsdp_buffer){ .name = "x", .ndim = 1, .shape = { 2 } }, NULL), FSDP_ERR_NOMEM, "no memory");
        (void)fsdpi_alloc_fail_at(0);
    }
    assert_ok(fsdp_module_buffers(inner, &b, &count));
    assert_int_equal(count, 5);
    destroy(&n);
    fsdp_comm_destroy(comm);
    assert_int_equal(fsdpi_alloc_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),     cmocka_unit_test(test_devices), cmocka_unit_test(test_counted_once), cmocka_unit_test(test_saved),
        cmocka_unit_test(test_from_rank0), cmocka_unit_test(test_lists_and_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
