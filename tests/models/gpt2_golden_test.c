/* SPDX-License-Identifier: MIT
 *
 * A GPT-2 gives what plain PyTorch gave (tests/golden/gpt2-tiny): the first step's gradients, ten losses and norms, the final
 * weights, each within a bound that has a reason. And it gives the same bits on 1, 2 and 4 ranks, on both transports and
 * devices, in every mode, as processes and as threads. */
#include "support/testing.h"

#include "format/json.h"

#include <fsdp/fsdp.h>

#include <math.h>
#include <sys/mman.h>

enum { STEPS = 10, ROWS = 4, SEQ = 16, NUMEL = 28032, TENSORS = 28 };
#define GOLDEN FSDP_TEST_DATA "/gpt2-tiny"

/* PyTorch's own run differs by up to 6e-7 in the loss and norm, and 1.2e-6 in the weights, from the same in fp64 (golden.json):
 * ours, with other orders of sums, may differ from PyTorch's by a few times that. Loosening a bound needs another reason. */
static const double loss_bound = 2e-6;
static const double norm_bound = 3e-6;
static const double final_bound = 5e-6;
/* Of a tensor's gradient, relative to its largest element: sums over 64 rows of fp32 products, 6e-8 each. */
static const double grad_bound = 5e-6;
/* Adam divides noise by noise: what golden.json says of them, times 4. */
static const double ill_factor = 4;

typedef struct result {
    double loss[STEPS], norm[STEPS];
    float grad0[NUMEL], final[NUMEL];
} result;

typedef struct corner {
    const char *transport, *device;
    fsdp_mode mode;
    int ranks;
    bool threads;
    result *out;
} corner;

static int32_t ids[STEPS][ROWS][SEQ], labels[STEPS][ROWS][SEQ];

static void read_ids(const char *name, int32_t *out)
{
    static int64_t raw[STEPS * ROWS * SEQ];
    fsdp_safetensors *data;
    assert_ok(fsdp_safetensors_open(&data, GOLDEN "/data.safetensors"));
    const fsdp_safetensors_tensor *t = fsdp_safetensors_find(data, name);
    assert_non_null(t);
    assert_int_equal(t->numel, STEPS * ROWS * SEQ);
    assert_ok(fsdp_safetensors_read_raw(data, t, 0, t->numel, raw));
    for (int i = 0; i < STEPS * ROWS * SEQ; i++) out[i] = (int32_t)raw[i];
    fsdp_safetensors_close(data);
}

/* ---- a run, as a rank sees it ---- */

static fsdp_status leaf(fsdp_comm *world, fsdp_model *m, fsdp_device *dev, int step, int row, double *loss_sum)
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *loss;
    double count;
    FSDP_TRY(fsdp_tape_begin_with(&tape, world, &(fsdp_tape_opts){ .device = dev }));
    FSDP_TRY(fsdp_tensor_from_i32(&x, tape, ids[step][row], 2, (int64_t[]){ 1, SEQ }));
    FSDP_TRY(fsdp_tensor_from_i32(&y, tape, labels[step][row], 2, (int64_t[]){ 1, SEQ }));
    FSDP_TRY(fsdp_model_loss(m, tape, x, y, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, loss_sum, &count));
    return fsdp_tape_end(tape);
}

/* The gradients, whole, on rank 0, divided by the number of rows: each rank puts its slices at their places, the rest is 0. */
static fsdp_status read_grads(fsdp_comm *world, fsdp_model *m, float *out)
{
    static double all[NUMEL];
    const fsdp_module_param_info *p;
    int n;
    int64_t at = 0;
    memset(all, 0, sizeof(all));
    fsdp_unit_list units = fsdp_module_units(fsdp_model_module(m));
    FSDP_TRY(fsdp_module_params(fsdp_model_module(m), &p, &n));
    FSDP_TRY(fsdp_step_begin(units));
    for (int i = 0; i < n; i++) {
        const fsdp_slice *s;
        int slices;
        fsdp_unit_slices(p[i].unit, &s, &slices);
        for (int k = 0; k < slices; k++) {
            float host[8192];
            if (s[k].param != p[i].index || (fsdp_unit_mode(p[i].unit) == FSDP_MODE_NONE && fsdp_comm_rank(world) != 0)) continue;
            rank_check(s[k].numel <= 8192 && s[k].grad != NULL);
            FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(p[i].unit), host, s[k].grad, (size_t)s[k].numel * sizeof(float)));
            FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(p[i].unit)));
            for (int64_t e = 0; e < s[k].numel; e++) all[at + s[k].offset + e] = (double)host[e];
        }
        at += fsdp_unit_param_numel(p[i].unit, p[i].index);
    }
    FSDP_TRY(fsdp_step_cancel(units));
    FSDP_TRY(fsdp_comm_sum_exact(world, all, NUMEL));
    for (int i = 0; i < NUMEL; i++) out[i] = (float)(all[i] / (ROWS * SEQ));
    return FSDP_OK;
}

static fsdp_status step_leaves(fsdp_comm *world, fsdp_model *m, fsdp_device *dev, int step, double *loss)
{
    double each[ROWS] = { 0 };
    for (int row = fsdp_comm_rank(world); row < ROWS; row += fsdp_comm_size(world)) FSDP_TRY(leaf(world, m, dev, step, row, &each[row]));
    FSDP_TRY(fsdp_comm_sum_exact(world, each, ROWS));
    *loss = (each[0] + each[1] + each[2] + each[3]) / (ROWS * SEQ);
    return FSDP_OK;
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    fsdp_model *m;
    fsdp_optim *optim;
    static _Thread_local float whole[NUMEL];
    result *out = c->out;
    double loss;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(fsdp_model_create(&m, GOLDEN));
    FSDP_TRY(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = world, .mode = c->mode, .compute_device = dev }));
    FSDP_TRY(fsdp_model_load(m, GOLDEN));
    fsdp_adamw_opts o = { .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f };
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(fsdp_model_module(m)), &o));
    if (!c->threads) { /* once for its gradients; the array that they are summed in is not a thread's */
        FSDP_TRY(step_leaves(world, m, dev, 0, &loss));
        FSDP_TRY(read_grads(world, m, whole));
        if (fsdp_comm_rank(world) == 0) memcpy(out->grad0, whole, sizeof(out->grad0));
    }
    for (int s = 0; s < STEPS; s++) {
        double norm;
        FSDP_TRY(step_leaves(world, m, dev, s, &loss));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 2.25f, .norm = &norm }));
        if (fsdp_comm_rank(world) == 0) {
            out->loss[s] = loss;
            out->norm[s] = norm;
        }
    }
    int64_t at = 0;
    for (int i = 0; i < TENSORS; i++) {
        const fsdp_module_param_info *p;
        int n;
        FSDP_TRY(fsdp_module_params(fsdp_model_module(m), &p, &n));
        rank_check(n == TENSORS);
        FSDP_TRY(fsdp_module_read_param(fsdp_model_module(m), i, whole + at));
        at += fsdp_unit_param_numel(p[i].unit, p[i].index);
    }
    rank_check(at == NUMEL);
    if (fsdp_comm_rank(world) == 0) memcpy(out->final, whole, sizeof(out->final));
    fsdp_optim_destroy(optim);
    fsdp_model_destroy(m);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void run(const corner *c)
{
    memset(c->out, 0, sizeof(*c->out));
    fsdp_launch_opts o = { .ranks = c->ranks, .transport = c->transport, .ranks_are_threads = c->threads, .timeout_s = 120 };
    if (fsdp_launch(&o, train, (void *)(uintptr_t)c) != FSDP_OK)
        fail_msg("%s %s %s, %d ranks: %s", c->transport, c->device, fsdp_mode_name(c->mode), c->ranks, fsdp_last_error());
}

static result *shared_result(void)
{
    void *p = mmap(NULL, sizeof(result), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    return p;
}

/* ---- against PyTorch ---- */

static double number(const json_t *root, const char *list, int i)
{
    return json_number_value(json_array_get(json_object_get(root, list), (size_t)i));
}

/* Worst distance of a tensor's elements from those of a file; *largest: the largest element there. */
static double distance(const fsdp_safetensors *file, const char *name, const float *got, int64_t numel, double *largest)
{
    char full[600];
    static float want[8192];
    snprintf(full, sizeof(full), "transformer.%s", name);
    const fsdp_safetensors_tensor *t = fsdp_safetensors_find(file, full);
    if (t == NULL) fail_msg("%s is not in the golden file", full);
    assert_int_equal(t->numel, numel);
    assert_ok(fsdp_safetensors_read_f32(file, t, 0, numel, want));
    double worst = 0;
    *largest = 0;
    for (int64_t i = 0; i < numel; i++) {
        worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
        *largest = fmax(*largest, fabs((double)want[i]));
    }
    return worst;
}

static void compare_tensors(const result *r, const json_t *golden)
{
    fsdp_model *m;
    fsdp_safetensors *grad0, *final;
    const fsdp_module_param_info *p;
    int n;
    int64_t at = 0;
    double worst_grad = 0, worst_final = 0;
    const json_t *ill = json_object_get(golden, "final_ill_conditioned");
    assert_ok(fsdp_model_create(&m, GOLDEN));
    assert_ok(fsdp_safetensors_open(&grad0, GOLDEN "/grad0.safetensors"));
    assert_ok(fsdp_safetensors_open(&final, GOLDEN "/final.safetensors"));
    assert_ok(fsdp_module_params(fsdp_model_module(m), &p, &n));
    assert_int_equal(n, TENSORS);
    for (int i = 0; i < n; i++) {
        char full[600];
        int64_t numel = 1;
        double largest, unused;
        for (int d = 0; d < p[i].param.ndim; d++) numel *= p[i].param.shape[d];
        snprintf(full, sizeof(full), "transformer.%s", p[i].name);
        double g = distance(grad0, p[i].name, r->grad0 + at, numel, &largest) / largest, f = distance(final, p[i].name, r->final + at, numel, &unused);
        const json_t *noise = json_object_get(ill, full);
        double bound = noise != NULL ? ill_factor * json_number_value(noise) : final_bound;
        if (!(g <= grad_bound)) fail_msg("gradient of %s: off by %.3g of its largest element", p[i].name, g);
        if (!(f <= bound)) fail_msg("%s after %d steps: off by %.3g, bound %.3g", p[i].name, STEPS, f, bound);
        worst_grad = fmax(worst_grad, g);
        if (noise == NULL) worst_final = fmax(worst_final, f);
        at += numel;
    }
    print_message("gradients within %.2g of a tensor's largest (bound %.2g), final weights within %.2g (%.2g)\n", worst_grad, grad_bound, worst_final, final_bound);
    fsdp_safetensors_close(grad0);
    fsdp_safetensors_close(final);
    fsdp_model_destroy(m);
}

static void test_pytorch(void **state)
{
    (void)state;
    json_t *golden;
    result *r = shared_result();
    corner c = { .transport = "self", .device = "cpu", .ranks = 1, .out = r };
    run(&c);
    assert_ok(fsdpi_json_load(&golden, GOLDEN "/golden.json", 1 << 20));
    double dl = 0, dn = 0;
    for (int s = 0; s < STEPS; s++) {
        dl = fmax(dl, fabs(r->loss[s] - number(golden, "loss", s)));
        dn = fmax(dn, fabs(r->norm[s] - number(golden, "grad_norm", s)));
    }
    print_message("losses within %.2g (bound %.2g), norms within %.2g (%.2g)\n", dl, loss_bound, dn, norm_bound);
    assert_true(dl <= loss_bound && dn <= norm_bound);
    compare_tensors(r, golden);
    json_decref(golden);
    munmap(r, sizeof(*r));
}

/* ---- against one rank ---- */

static void compare(const result *want, const corner *c)
{
    const result *got = c->out;
    bool same = memcmp(want->loss, got->loss, sizeof(want->loss)) == 0 && memcmp(want->norm, got->norm, sizeof(want->norm)) == 0 &&
                memcmp(want->final, got->final, sizeof(want->final)) == 0;
    if (!c->threads) same = same && memcmp(want->grad0, got->grad0, sizeof(want->grad0)) == 0;
    if (same) return;
    for (int s = 0; s < STEPS; s++)
        print_message("step %d: loss %.17g %.17g norm %.17g %.17g\n", s, want->loss[s], got->loss[s], want->norm[s], got->norm[s]);
    fail_msg("%s %s %s, %d ranks%s: other bits", c->transport, c->device, fsdp_mode_name(c->mode), c->ranks, c->threads ? " (threads)" : "");
}

static void test_same_bits(void **state)
{
    (void)state;
    static const char *const transports[] = { "shm", "copy" }, *const devices[] = { "cpu", "guard" };
    static const int ranks[] = { 1, 2, 4 };
    result *want = shared_result(), *got = shared_result();
    corner one = { .transport = "self", .device = "cpu", .ranks = 1, .out = want };
    run(&one);
    for (int t = 0; t < 2; t++)
        for (int d = 0; d < 2; d++)
            for (int m = FSDP_MODE_FULL; m <= FSDP_MODE_NONE; m++)
                for (int r = 0; r < 3; r++) {
                    corner c = { .transport = transports[t], .device = devices[d], .mode = (fsdp_mode)m, .ranks = ranks[r], .out = got };
                    c.threads = (t + d + m + r) % 4 == 0;
                    run(&c);
                    compare(want, &c);
                }
    munmap(want, sizeof(*want));
    munmap(got, sizeof(*got));
}

static int read_data(void **state)
{
    (void)state;
    read_ids("input_ids", &ids[0][0][0]);
    read_ids("labels", &labels[0][0][0]);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pytorch),
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, read_data, NULL);
}
