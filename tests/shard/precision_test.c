/* SPDX-License-Identifier: MIT
 *
 * Types below fp32: compute sees masters rounded once, a leaf's gradient is rounded once before it is added, a sum that is kept below
 * fp32 after each leaf; masters stay fp32; summons and exact evaluations see masters. For every choice of types the same bits on
 * any ranks, mode, mesh, transport and device. */
#include "support/mini.h"
#include "support/ranks.h"

#include <math.h>
#include <stdlib.h>

static const fsdp_param params[] = { { "w", 2, { 7, 9 } }, { "s", 0, { 0 } }, { "e", 1, { 0 } }, { "b", 1, { 41 } } };
enum { PARAMS = 4, MOST = 63 };

static const fsdp_dtype types[] = { FSDP_F32, FSDP_BF16, FSDP_F16 };

/* No 16-bit type has these. */
static float master_value(const char *name, int64_t i)
{
    return (float)(name[0] * 37 + i) * 0.1234567f;
}

static void set_master(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = master_value(name, i);
}

static fsdp_status to_host(fsdp_unit *u, void *host, const void *dev, size_t bytes)
{
    FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(u), host, dev, bytes));
    return fsdp_stream_sync(fsdp_unit_stream(u));
}

/* fsdp_unit_param() now gives masters rounded to t. */
static fsdp_status sees(fsdp_unit *u, fsdp_dtype t)
{
    for (int i = 0; i < PARAMS; i++) {
        float host[MOST];
        int64_t n = fsdp_unit_param_numel(u, i);
        const float *p = fsdp_unit_param(u, i);
        rank_check(p != NULL);
        fsdp_dtype is;
        rank_check(fsdp_unit_param_data(u, i, &is) == p && is == FSDP_F32);
        FSDP_TRY(to_host(u, host, p, (size_t)n * sizeof(float)));
        for (int64_t e = 0; e < n; e++) rank_check(host[e] == rounded_to(t, master_value(params[i].name, e)));
    }
    return FSDP_OK;
}

static fsdp_status in_a_pass(fsdp_unit *u, fsdp_pass_kind kind, fsdp_dtype t)
{
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, fsdp_unit_comm(u), kind));
    FSDP_TRY(fsdp_unit_begin_forward(u, pass));
    FSDP_TRY(sees(u, t));
    FSDP_TRY(fsdp_unit_end_forward(u, pass));
    return fsdp_pass_end(pass);
}

static fsdp_status who_sees_what(fsdp_comm *comm, const corner *c, fsdp_dtype t, bool exact_eval)
{
    fsdp_device *dev;
    fsdp_unit *u;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(fsdp_unit_create(&u, comm, params, PARAMS,
                              &(fsdp_unit_opts){ .name = "u", .mode = c->mode, .param_dtype = t, .exact_eval = exact_eval, .compute_device = dev }));
    FSDP_TRY(fsdp_unit_init(u, set_master, NULL));
    for (int round = 0; round < 2; round++) {
        FSDP_TRY(in_a_pass(u, FSDP_PASS_TRAIN, t));
        FSDP_TRY(in_a_pass(u, FSDP_PASS_EVAL, exact_eval ? FSDP_F32 : t));
        FSDP_TRY(fsdp_unit_summon_begin(u, NULL));
        FSDP_TRY(sees(u, FSDP_F32));
        FSDP_TRY(fsdp_unit_summon_end(u));
        /* What is read is written back: not one bit is lost. */
        FSDP_TRY(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true }));
        FSDP_TRY(fsdp_unit_summon_end(u));
        if (round == 0) FSDP_TRY(fsdp_comm_reset(comm));
    }
    const fsdp_slice *s;
    int n;
    fsdp_unit_slices(u, &s, &n);
    for (int i = 0; i < n; i++) {
        float host[MOST];
        FSDP_TRY(to_host(u, host, s[i].master, (size_t)s[i].numel * sizeof(float)));
        for (int64_t e = 0; e < s[i].numel; e++) rank_check(host[e] == master_value(s[i].name, s[i].offset + e));
    }
    fsdp_unit_destroy(u);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static fsdp_status views(fsdp_comm *comm, void *arg)
{
    for (int t = 1; t < 3; t++)
        for (int exact = 0; exact < 2; exact++) FSDP_TRY(who_sees_what(comm, arg, types[t], exact));
    return FSDP_OK;
}

static void test_compute_sees_rounded_masters(void **state)
{
    (void)state;
    in_corners(views, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true });
}

/* ---- raw parameters ---- */

static fsdp_status reads_raw(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    fsdp_unit *u;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(fsdp_unit_create(&u, comm, params, PARAMS,
                              &(fsdp_unit_opts){ .name = "u", .mode = c->mode, .param_dtype = FSDP_BF16, .raw_params = true, .compute_device = dev }));
    FSDP_TRY(fsdp_unit_init(u, set_master, NULL));
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_unit_begin_forward(u, pass));
    rank_check(fsdp_unit_param(u, 0) == NULL && strstr(fsdp_last_error_message(), "whole as BF16: read it with fsdp_unit_param_data()") != NULL);
    for (int i = 0; i < PARAMS; i++) {
        uint16_t host[MOST];
        fsdp_dtype t;
        const void *p = fsdp_unit_param_data(u, i, &t);
        rank_check(p != NULL && t == FSDP_BF16);
        int64_t n = fsdp_unit_param_numel(u, i);
        FSDP_TRY(to_host(u, host, p, (size_t)n * sizeof(*host)));
        for (int64_t e = 0; e < n; e++) rank_check(host[e] == fsdp_bf16_from_f32(master_value(params[i].name, e)));
    }
    FSDP_TRY(fsdp_unit_end_forward(u, pass));
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(fsdp_unit_summon_begin(u, NULL));
    FSDP_TRY(sees(u, FSDP_F32));
    FSDP_TRY(fsdp_unit_summon_end(u));
    fsdp_unit_destroy(u);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_raw_parameters(void **state)
{
    (void)state;
    in_corners(reads_raw, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true });
}

/* ---- gradients ---- */

/* Of leaf l: not to be had in 16 bits, and of sizes at which fp32 sums round as well. */
static float leaf_value(int64_t l, int64_t i)
{
    return (float)(l * 1000 + i) * 1.2345678f;
}

typedef struct fill_args {
    float *out;
    int64_t leaf, numel;
    float beta, times;
} fill_args;

static fsdp_status k_leaf(const fsdp_kernel *k, const void *args)
{
    const fill_args *a = args;
    float *out = fsdp_kernel_ptr(k, a->out);
    for (int64_t i = 0; i < a->numel; i++) out[i] = a->times * leaf_value(a->leaf, i) + (a->beta != 0 ? a->beta * out[i] : 0);
    return FSDP_OK;
}

/* Two passes, whose leaves are `times` those values. */
static fsdp_status two_passes(fsdp_unit *u, float times)
{
    fsdp_comm *comm = fsdp_unit_comm(u);
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    for (int pass_no = 0; pass_no < 2; pass_no++) {
        fsdp_pass *pass;
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(fsdp_unit_begin_forward(u, pass));
        FSDP_TRY(fsdp_unit_end_forward(u, pass));
        FSDP_TRY(fsdp_unit_begin_backward(u, pass));
        for (int i = 0; i < PARAMS; i += 3) { /* s has no gradient: 0 */
            fill_args a = { .leaf = pass_no * size + rank, .numel = fsdp_unit_param_numel(u, i), .times = times };
            a.out = fsdp_unit_grad(u, i, &a.beta);
            rank_check(a.out != NULL && a.beta == 0);
            FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_leaf, &a, sizeof(a)));
        }
        FSDP_TRY(fsdp_unit_end_backward(u, pass));
        FSDP_TRY(fsdp_pass_end(pass));
    }
    return FSDP_OK;
}

/* In a step each gradient is the sum of the leaves of two passes: rounded to t each, and to `kept` after each. */
static fsdp_status expect_sums(fsdp_unit *u, fsdp_dtype t, fsdp_dtype kept)
{
    int size = fsdp_comm_size(fsdp_unit_comm(u)), n;
    const fsdp_slice *s;
    FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ &u, 1 }));
    fsdp_unit_slices(u, &s, &n);
    for (int i = 0; i < n; i++) {
        float host[MOST];
        rank_check(s[i].grad != NULL);
        FSDP_TRY(to_host(u, host, s[i].grad, (size_t)s[i].numel * sizeof(float)));
        for (int64_t e = 0; e < s[i].numel; e++) {
            float want = 0;
            for (int l = 0; l < 2 * size; l++) {
                float g = s[i].param == 1 ? 0.0f : rounded_to(t, leaf_value(l, s[i].offset + e));
                want = rounded_to(kept, l == 0 ? g : want + g);
            }
            rank_check(host[e] == want);
        }
    }
    return fsdp_step_cancel((fsdp_unit_list){ &u, 1 });
}

static fsdp_status sums_leaves(fsdp_comm *comm, const corner *c, fsdp_dtype t, fsdp_dtype kept)
{
    fsdp_device *dev;
    fsdp_unit *u;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(fsdp_unit_create(&u, comm, params, PARAMS, &(fsdp_unit_opts){ .name = "u", .mode = c->mode, .reduce_dtype = t, .grad_dtype = kept, .compute_device = dev }));
    FSDP_TRY(two_passes(u, 1));
    FSDP_TRY(expect_sums(u, t, kept));
    fsdp_unit_destroy(u);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static fsdp_status sums(fsdp_comm *comm, void *arg)
{
    for (int t = 0; t < 9; t++) FSDP_TRY(sums_leaves(comm, arg, types[t % 3], types[t / 3]));
    return FSDP_OK;
}

static void test_each_leaf_is_rounded_once(void **state)
{
    (void)state;
    in_corners(sums, &(corners){ .ranks = (const int[]){ 1, 2, 5, 0 }, .all_modes = true });
}

/* Divided before they are sent, multiplied in the step: what F16 has no room for comes out as if it had, on any ranks and mesh. */
static fsdp_status divides(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int size = fsdp_comm_size(comm);
    float by = 64, wrong = 0;
    fsdp_device *dev;
    fsdp_unit *u;
    double norm;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    for (int shards = size % 2 == 0 && c->mode != FSDP_MODE_NONE ? size / 2 : 0;; shards = 0) {
        FSDP_TRY(fsdp_unit_create(&u, comm, params, PARAMS, &(fsdp_unit_opts){ .name = "u", .mode = c->mode, .shards = shards, .reduce_dtype = FSDP_F16, .compute_device = dev }));
        FSDP_TRY(two_passes(u, 64)); /* more than 65504 */
        FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ &u, 1 }));
        FSDP_TRY(fsdp_step_grad_norm((fsdp_unit_list){ &u, 1 }, &norm, NULL));
        rank_check(!isfinite(norm));
        FSDP_TRY(fsdp_step_cancel((fsdp_unit_list){ &u, 1 }));
        FSDP_TRY(fsdp_unit_set_grad_hooks(u, &(fsdp_grad_hooks){ .post = fsdp_post_divide, .arg = &by }));
        FSDP_TRY(two_passes(u, 64));
        FSDP_TRY(expect_sums(u, FSDP_F16, FSDP_F32)); /* of what is a 64th: the step multiplies by it */
        fsdp_unit_destroy(u);
        if (shards == 0) break;
    }
    if (size == 1 && strcmp(c->device, "cpu") == 0) {
        FSDP_TRY(fsdp_unit_create(&u, comm, params, PARAMS, &(fsdp_unit_opts){ .name = "u" }));
        FSDP_TRY(fsdp_unit_set_grad_hooks(u, &(fsdp_grad_hooks){ .post = fsdp_post_divide, .arg = &wrong }));
        rank_check(two_passes(u, 1) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "divided by 0") != NULL);
        FSDP_TRY(fsdp_comm_reset(comm));
        fsdp_unit_destroy(u);
    }
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_divided_before_and_after(void **state)
{
    (void)state;
    in_corners(divides, &(corners){ .ranks = SANITIZED ? (const int[]){ 1, 4, 0 } : (const int[]){ 1, 3, 4, 0 }, .all_modes = true, .threads_only = true });
}

/* ---- training ---- */

typedef struct trained {
    float param[2048];
} trained;

typedef struct choice {
    fsdp_dtype param, reduce, grad;
    int shards_of; /* ranks / shards; 0: all share */
} choice;

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const choice *p = c->arg;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .shards = p->shards_of > 0 ? fsdp_comm_size(comm) / p->shards_of : 0, .device = c->device,
                                                 .param_dtype = p->param, .reduce_dtype = p->reduce, .grad_dtype = p->grad, .exact_eval = p->param != FSDP_F32 }));
    for (int64_t step = 0; step < 3; step++) FSDP_TRY(mini_step(&m, MINI_NESTED, step, 12));
    rank_check((size_t)mini_numel() <= sizeof(((trained *)0)->param) / sizeof(float));
    trained *out = c->shared;
    float *mine = calloc((size_t)mini_numel(), sizeof(float));
    FSDP_TRY(mini_read(&m, mine));
    if (fsdp_comm_rank(comm) == 0) memcpy(out->param, mine, (size_t)mini_numel() * sizeof(float));
    free(mine);
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_the_same_bits_for_every_choice_of_types(void **state)
{
    (void)state;
    trained *want = shared_alloc(sizeof(*want)), *got = shared_alloc(sizeof(*got)), *full = shared_alloc(sizeof(*full));
    static const int ranks[] = { 2, 3, 4, 6 };
    int n = 0;
    /* Every type for two of the three, whatever the third is; and all pairs beside fp32 sums. */
    for (int a = 0; a < 3; a++)
        for (int bc = 0; bc < 6; bc++) {
            int b = bc % 3, g = bc < 3 ? 0 : (a + b) % 3;
            if (bc >= 3 && g == 0) continue;
            choice p = { types[a], types[b], types[g], 0 };
            corner one = { .transport = "self", .device = "cpu", .ranks = 1, .threads = !CAN_FORK, .arg = &p, .shared = a + bc == 0 ? full : want };
            assert_int_equal(in_corner(train, &one), FSDP_OK);
            if (a + bc == 0) memcpy(want, full, sizeof(*want));
            else assert_true(memcmp(want, full, sizeof(*want)) != 0); /* the types do something */
            for (int k = 0; k < 8; k++, n++) {
                corner c = { .transport = k % 2 ? "copy" : "shm", .device = k / 2 % 2 ? "guard" : "cpu", .mode = (fsdp_mode)((n + k) % 4),
                             .ranks = ranks[n % 4], .threads = k / 4 || !CAN_FORK, .arg = &p, .shared = got };
                p.shards_of = c.mode != FSDP_MODE_NONE && c.ranks % 2 == 0 && n % 3 == 0 ? 2 : 0;
                if (in_corner(train, &c) != FSDP_OK) fail_msg("%s: %s", corner_name(&c), fsdp_last_error());
                if (memcmp(want, got, sizeof(*want)) != 0)
                    fail_msg("%s, parameters %s, reductions %s, sums %s: other bits", corner_name(&c), fsdp_dtype_name(p.param), fsdp_dtype_name(p.reduce),
                             fsdp_dtype_name(p.grad));
            }
        }
    shared_free(want, sizeof(*want));
    shared_free(got, sizeof(*got));
    shared_free(full, sizeof(*full));
}

/* ---- what is refused ---- */

static fsdp_status refused(fsdp_comm *comm, void *arg)
{
    (void)arg;
    static const struct {
        fsdp_unit_opts opts;
        const char *message;
    } bad[] = {
        { { .param_dtype = FSDP_F64 }, "param_dtype F64, reduce_dtype F32, grad_dtype F32: each must be F32, BF16 or F16" },
        { { .grad_dtype = FSDP_I64 }, "grad_dtype I64" },
        { { .reduce_dtype = FSDP_I8 }, "reduce_dtype I8" },
        { { .exact_eval = true }, "exact_eval is about a param_dtype below F32" },
        { { .raw_params = true }, "raw_params is about a param_dtype below F32" },
    };
    fsdp_unit *u = NULL;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        rank_check(fsdp_unit_create(&u, comm, params, PARAMS, &bad[i].opts) == FSDP_ERR_INVALID && u == NULL);
        rank_check(strstr(fsdp_last_error_message(), bad[i].message) != NULL);
    }
    fsdp_unit_opts o = { .name = "u", .param_dtype = fsdp_comm_rank(comm) == 1 ? FSDP_BF16 : FSDP_F32 };
    rank_check(fsdp_unit_create(&u, comm, params, PARAMS, &o) == FSDP_ERR_INVALID && u == NULL);
    rank_check(strstr(fsdp_last_error_message(), "parameters F32 and reductions F32 on rank 0, BF16 and F32 on rank 1") != NULL);
    return FSDP_OK;
}

static void test_what_is_refused(void **state)
{
    (void)state;
    in_corners(refused, &(corners){ .ranks = (const int[]){ 2, 0 }, .transport = "shm", .device = "cpu" });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_compute_sees_rounded_masters),
        cmocka_unit_test(test_raw_parameters),
        cmocka_unit_test(test_each_leaf_is_rounded_once),
        cmocka_unit_test(test_divided_before_and_after),
        cmocka_unit_test(test_the_same_bits_for_every_choice_of_types),
        cmocka_unit_test(test_what_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
