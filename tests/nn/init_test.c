/* SPDX-License-Identifier: MIT
 *
 * Initial values: by key they are a function of (seed, name, element), whatever the number of ranks, the wrapping, the mode, the
 * device, and whether the module was wrapped before or after; from one stream they are what the unwrapped module would get; and
 * what a parameter had before it was wrapped is kept. */
#include "support/testing.h"
#include "support/tiny_gpt.h"

#include <math.h>

enum { A = 7, B = 5, C = 3, NUMEL = B * A + B + B + B + C * B + C + 13 * 2 };

/* Two linears, a norm, an embedding: all kinds of initial values. Nothing is run. */
static fsdp_status build(fsdp_module **out)
{
    fsdp_module *m[4];
    FSDP_TRY(fsdp_linear(&m[0], A, B, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_layer_norm(&m[1], B, 0));
    FSDP_TRY(fsdp_linear(&m[2], B, C, &(fsdp_linear_opts){ .bias = true, .in_out = true }));
    FSDP_TRY(fsdp_embedding(&m[3], 13, 2));
    return fsdp_sequential(out, m, 4);
}

typedef struct plan {
    fsdp_init_kind kind;
    int wrapping; /* 0: one unit; 1: each layer and one around; 2: twice around; 3: inner, then some of the rest */
    int when;     /* 0: after wrapping; 1: before; 2: between inner and outer; 3: from a stream, summoned; 4: from a stream, before */
    fsdp_mode mode;
    const char *device;
    uint64_t seed_step; /* of streams: rank r has seed 9 + r seed_step */
    float (*out)[NUMEL];
} plan;

static fsdp_status wrap(fsdp_module **m, fsdp_comm *world, fsdp_device *dev, const plan *p)
{
    return fsdp_wrap(m, *m, &(fsdp_wrap_opts){ .comm = world, .mode = p->mode, .compute_device = dev });
}

static fsdp_status init(fsdp_module *m, fsdp_comm *world, const plan *p)
{
    fsdp_rng rng;
    if (p->when < 3) return fsdp_module_init_keyed(m, p->kind, 9);
    fsdp_rng_init(&rng, 9 + p->seed_step * (uint64_t)fsdp_comm_rank(world));
    if (p->when == 4) return fsdp_module_init(m, p->kind, &rng);
    FSDP_TRY(fsdp_summon_begin(m, &(fsdp_summon_opts){ .recurse = true, .writeback = true }));
    FSDP_TRY(fsdp_module_init(m, p->kind, &rng));
    return fsdp_summon_end(m);
}

static fsdp_status make(fsdp_comm *world, void *arg)
{
    const plan *p = arg;
    fsdp_module *m, *same;
    fsdp_device *dev;
    float all[NUMEL], *at = all;
    FSDP_TRY(fsdp_device_open(&dev, p->device));
    FSDP_TRY(build(&m));
    if (p->when == 1 || p->when == 4) FSDP_TRY(init(m, world, p));
    for (int i = 0; i < 4 && (p->wrapping == 1 || (p->wrapping == 3 && i == 2)); i++) {
        same = fsdp_module_child(m, i);
        FSDP_TRY(wrap(&same, world, dev, p));
    }
    if (p->when == 2) FSDP_TRY(init(m, world, p)); /* some of it in units, some not */
    FSDP_TRY(wrap(&m, world, dev, p));
    if (p->wrapping == 2) FSDP_TRY(wrap(&m, world, dev, p));
    if (p->when == 0 || p->when == 3) FSDP_TRY(init(m, world, p));
    const fsdp_module_param_info *info;
    int n;
    FSDP_TRY(fsdp_module_params(m, &info, &n));
    for (int i = 0; i < n; i++) {
        FSDP_TRY(fsdp_module_read_param(m, i, at));
        at += fsdp_unit_param_numel(info[i].unit, info[i].index);
    }
    rank_check(at == all + NUMEL);
    /* every rank sees the same */
    float *everyone = calloc((size_t)fsdp_comm_size(world) * NUMEL, sizeof(float));
    FSDP_TRY(fsdp_comm_all_gather(world, all, sizeof(all), everyone));
    for (int r = 0; r < fsdp_comm_size(world); r++) rank_check(memcmp(everyone + r * NUMEL, all, sizeof(all)) == 0);
    free(everyone);
    if (fsdp_comm_rank(world) == 0) memcpy(*p->out, all, sizeof(all));
    fsdp_module_destroy(m);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void run(int ranks, const char *transport, const plan *p)
{
    fsdp_launch_opts o = { .ranks = ranks, .transport = transport, .ranks_are_threads = (ranks + p->when) % 2, .threads = 1, .timeout_s = 60 };
    if (fsdp_launch(&o, make, (void *)(uintptr_t)p) != FSDP_OK) fail_msg("%d ranks, wrapping %d, when %d: %s", ranks, p->wrapping, p->when, fsdp_last_error());
}

static void test_by_key(void **state)
{
    (void)state;
    float (*want)[NUMEL] = shared_memory(sizeof(*want)), (*got)[NUMEL] = shared_memory(sizeof(*got)), by_hand[B * A];
    for (int kind = 0; kind < 2; kind++) {
        bool have = false;
        for (int ranks = 1; ranks <= 5; ranks++)
            for (int wrapping = 0; wrapping < 4; wrapping++)
                for (int when = 0; when < 3; when++) {
                    int corner = ranks + wrapping + when;
                    plan p = { .kind = (fsdp_init_kind)kind, .wrapping = wrapping, .when = when, .mode = (fsdp_mode)(corner % 4), .device = corner % 3 ? "cpu" : "guard",
                               .out = have ? got : want };
                    run(ranks, corner % 2 ? "copy" : NULL, &p);
                    if (have && memcmp(*want, *got, sizeof(*want)) != 0) fail_msg("%d ranks, wrapping %d, initialised %d: other values", ranks, wrapping, when);
                    have = true;
                }
        /* and they are what the header says: Philox of (seed, full name, element) */
        if (kind == FSDP_INIT_KAIMING) {
            fsdp_philox_uniform_fill(9, "0.weight", 0, B * A, by_hand);
            for (int i = 0; i < B * A; i++) assert_true((*want)[i] == (float)(1.0 / sqrt(A)) * (2 * by_hand[i] - 1));
        } else {
            fsdp_philox_normal_fill(9, "0.weight", 0, B * A, by_hand);
            for (int i = 0; i < B * A; i++) assert_true((*want)[i] == 0.02f * by_hand[i]);
            for (int i = B * A; i < B * A + B; i++) assert_true((*want)[i] == 0);          /* a bias */
            for (int i = B * A + B; i < B * A + 2 * B; i++) assert_true((*want)[i] == 1);  /* a norm */
            for (int i = B * A + 2 * B; i < B * A + 3 * B; i++) assert_true((*want)[i] == 0);
        }
    }
}

/* One seed on all ranks: what a module that is not wrapped gets, on any number of ranks. */
static void test_from_a_stream(void **state)
{
    (void)state;
    float (*got)[NUMEL] = shared_memory(sizeof(*got)), want[NUMEL], *at = want;
    fsdp_comm *comm;
    fsdp_rng rng;
    assert_ok(fsdp_comm_create_self(&comm));
    fsdp_rng_init(&rng, 9);
    /* by hand, in the order of parameters: kaiming */
    static const struct {
        int numel;
        double bound; /* 0: ones; -1: zeros; -2: normal */
    } order[] = { { B * A, 1 / 2.6457513110645907 }, { B, 1 / 2.6457513110645907 }, { B, 0 }, { B, -1 }, { B * C, 1 / 2.23606797749979 }, { C, 1 / 2.23606797749979 }, { 26, -2 } };
    for (size_t k = 0; k < sizeof(order) / sizeof(order[0]); k++)
        for (int i = 0; i < order[k].numel; i++) {
            double b = order[k].bound;
            *at++ = b > 0 ? (float)b * (2 * fsdp_rng_uniform(&rng) - 1) : b == 0 ? 1 : b == -1 ? 0 : fsdp_rng_normal(&rng);
        }
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int when = 3; when <= 4; when++) {
            plan p = { .kind = FSDP_INIT_KAIMING, .wrapping = ranks % 3, .when = when, .mode = (fsdp_mode)((ranks + when) % 4), .device = ranks % 2 ? "guard" : "cpu", .out = got };
            run(ranks, ranks % 2 ? "copy" : NULL, &p);
            for (int i = 0; i < NUMEL; i++)
                if ((*got)[i] != want[i]) fail_msg("%d ranks, %s wrapping: element %d is %.9g, not %.9g", ranks, when == 3 ? "after" : "before", i, (double)(*got)[i], (double)want[i]);
        }
    fsdp_comm_destroy(comm);
}

/* Values that ranks had before wrapping, and that differ: each rank's slice of its own is kept, in every mode the same. */
static void test_values_before_wrapping_differ(void **state)
{
    (void)state;
    float (*want)[NUMEL] = shared_memory(sizeof(*want)), (*got)[NUMEL] = shared_memory(sizeof(*got));
    plan p = { .kind = FSDP_INIT_KAIMING, .when = 4, .device = "cpu", .seed_step = 1, .out = want };
    run(3, "copy", &p);
    plan one = { .kind = FSDP_INIT_KAIMING, .when = 4, .device = "cpu", .out = got };
    run(3, "copy", &one);
    int same = 0;
    for (int i = 0; i < NUMEL; i++) same += (*want)[i] == (*got)[i];
    assert_true(same > NUMEL / 5 && same < NUMEL); /* rank 0's slice is; the others' not */
    for (int m = FSDP_MODE_GRAD_OP; m <= FSDP_MODE_NONE; m++) {
        p.mode = (fsdp_mode)m;
        p.when = 3 + m % 2;
        p.out = got;
        run(3, m % 2 ? "shm" : "copy", &p);
        assert_memory_equal(*want, *got, sizeof(*want));
    }
}

/* GPT-2's own: N(0, 0.02), what ends in the residual stream by 1 / sqrt(2 layers) less, biases 0, norms 1. */
static void test_gpt2(void **state)
{
    (void)state;
    fsdp_comm *comm;
    fsdp_model *m;
    const fsdp_module_param_info *p;
    int n;
    static float w[256 * 1024];
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(fsdp_model_create(&m, "gpt2-3m"));
    assert_ok(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm }));
    assert_ok(fsdp_module_init_keyed(fsdp_model_module(m), FSDP_INIT_NORMAL, 1));
    assert_ok(fsdp_module_params(fsdp_model_module(m), &p, &n));
    assert_int_equal(n, 2 + 12 * 4 + 2);
    for (int i = 0; i < n; i++) {
        int64_t numel = fsdp_unit_param_numel(p[i].unit, p[i].index);
        double sum = 0, square = 0;
        assert_ok(fsdp_module_read_param(fsdp_model_module(m), i, w));
        for (int64_t e = 0; e < numel; e++) {
            sum += (double)w[e];
            square += (double)w[e] * (double)w[e];
        }
        double mean = sum / (double)numel, std = sqrt(square / (double)numel - mean * mean), want = strstr(p[i].name, "c_proj.weight") != NULL ? 0.02 / sqrt(8) : 0.02;
        bool bias = strstr(p[i].name, "bias") != NULL, norm = strstr(p[i].name, "ln_") != NULL;
        if (bias || norm) assert_true(std == 0 && mean == (bias ? 0 : 1));
        else if (fabs(std - want) > 0.02 * want || fabs(mean) > 0.02 * want) fail_msg("%s: mean %g, deviation %g, wanted %g", p[i].name, mean, std, want);
    }
    fsdp_model_destroy(m);
    fsdp_comm_destroy(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_key),
        cmocka_unit_test(test_from_a_stream),
        cmocka_unit_test(test_values_before_wrapping_differ),
        cmocka_unit_test(test_gpt2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
