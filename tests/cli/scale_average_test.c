/* SPDX-License-Identifier: MIT
 *
 * fsdp train with --loss-scale, --ema and --clip-norm-type: a scale that is a power of two changes no digit; steps are skipped alike
 * on any ranks; averages are evaluated and written, and change nothing of the training; all of it resumes to the digit. */
#include "support/command.h"
#include "support/testing.h"

#include <math.h>

#define SETTINGS "--model config.json --data text.txt --val val.txt --batch 6 --micro-batch 1 --steps 8 --warmup 2 --lr 0.01 --clip 0.5 --eval-every 4 --quiet "

static int straight_run(void **state)
{
    if (command_setup(state) != 0) return -1;
    command_ok("train --out straight --ranks 1 --threads 1 " SETTINGS);
    return 0;
}

static bool skipped(const char *run, int64_t step)
{
    json_t *o = log_line(run, step);
    const json_t *s = json_object_get(o, "skipped");
    assert_true(json_is_boolean(s));
    bool is = json_is_true(s);
    assert_int_equal(json_is_null(json_object_get(o, "grad_norm")), is);
    json_decref(o);
    return is;
}

static void test_scales_that_change_nothing(void **state)
{
    (void)state;
    command_ok("train --out fixed --ranks 2 --threads 1 --loss-scale 1024 " SETTINGS);
    assert_same_log("straight", "fixed", 8);
    assert_same_file("straight/model.safetensors", "fixed/model.safetensors");
    assert_true(log_number("fixed", 8, "loss_scale") == 1024);
    command_ok("train --out dynamic --ranks 3 --threads 1 --transport copy --device guard --loss-scale dynamic " SETTINGS "--stop-after 3");
    command_ok("train --out dynamic --ranks 2 --threads 1 --resume latest --quiet");
    assert_same_log("straight", "dynamic", 8);
    assert_true(log_number("dynamic", 8, "loss_scale") == 65536 && !skipped("dynamic", 8));
    json_t *o = log_line("straight", 8);
    assert_null(json_object_get(o, "loss_scale"));
    json_decref(o);
    command_fails(2, "--loss-scale cannot change on --resume", "train --out fixed --resume latest --loss-scale 2048");
    command_fails(2, "--loss-scale cannot change on --resume", "train --out straight --resume latest --loss-scale dynamic");
}

/* So large that the first steps' gradients are infinite. */
static void test_skipped_steps(void **state)
{
    (void)state;
    command_result *r = command_ok("train --out huge --ranks 1 --threads 1 --loss-scale dynamic:8.5e37 --model config.json --data text.txt --val-fraction 0 --batch 6 --micro-batch 1 "
                                   "--steps 40 --lr 0.01");
    int64_t first = 1;
    while (first <= 40 && skipped("huge", first)) first++;
    assert_true(first > 1 && first < 40);
    assert_non_null(strstr(r->out, "step 1  skipped: gradients are not finite at loss scale 8.5e+37, which is now 4.25e+37"));
    assert_true(log_number("huge", first, "loss_scale") == ldexp(8.5e37, 1 - (int)first));
    assert_true(log_number("huge", 1, "loss") > log_number("huge", 40, "loss"));
    command_ok("train --out huge2 --ranks 3 --threads 1 --mode none --loss-scale dynamic:8.5e37 --model config.json --data text.txt --val-fraction 0 --batch 6 --micro-batch 1 "
               "--steps 40 --lr 0.01 --quiet --stop-after %lld", (long long)first - 1);
    command_ok("train --out huge2 --ranks 2 --threads 1 --resume latest --quiet");
    for (int64_t s = first; s <= 40; s++) assert_true(log_number("huge", s, "loss_scale") == log_number("huge2", s, "loss_scale"));
    assert_same_file("huge/model.safetensors", "huge2/model.safetensors");
    /* A scale that cannot back off. */
    r = command_fails(1, "at the loss scale 8e+37, which is at its minimum", "train --out stuck --ranks 2 --threads 1 --loss-scale 8e37 " SETTINGS);
    assert_non_null(strstr(r->err, "step 1: the loss is"));
}

/* What it is for: gradients that are sent in 16 bits. */
static void test_halves(void **state)
{
    (void)state;
    command_ok("train --out half --ranks 1 --threads 1 --reduce-dtype f16 --loss-scale dynamic:1048576 --ema 0.75 " SETTINGS "--steps 16");
    command_ok("train --out half2 --ranks 3 --threads 1 --mode optimizer --transport copy --reduce-dtype f16 --loss-scale dynamic:1048576 --ema 0.75 " SETTINGS "--steps 16 --stop-after 2");
    command_ok("train --out half2 --ranks 2 --threads 1 --resume latest --quiet");
    assert_true(skipped("half", 1) && skipped("half", 2) && !skipped("half", 16));
    for (int64_t s = 1; s <= 16; s++) {
        assert_true(log_number("half", s, "loss") == log_number("half2", s, "loss") && log_number("half", s, "loss_scale") == log_number("half2", s, "loss_scale"));
        assert_int_equal(skipped("half", s), skipped("half2", s));
    }
    assert_same_file("half/model.safetensors", "half2/model.safetensors");
}

/* Sums that are kept in 16 bits: on any ranks the same, and others than in 32. */
static void test_sums_in_halves(void **state)
{
    (void)state;
    command_ok("train --out sums --ranks 1 --threads 1 --grad-dtype bf16 " SETTINGS);
    command_ok("train --out sums2 --ranks 3 --threads 1 --mode grad-op --transport copy --grad-dtype bf16 " SETTINGS "--stop-after 3");
    command_ok("train --out sums2 --ranks 2 --threads 1 --resume latest --quiet"); /* which remembers it */
    assert_same_log("sums", "sums2", 8);
    assert_same_file("sums/model.safetensors", "sums2/model.safetensors");
    assert_true(log_number("sums", 8, "loss") != log_number("straight", 8, "loss"));
    assert_true(fabs(log_number("sums", 8, "loss") - log_number("straight", 8, "loss")) < 0.05);
}

static void test_averages(void **state)
{
    (void)state;
    command_ok("train --out ema --ranks 1 --threads 1 --ema 0.75 " SETTINGS);
    assert_same_log("straight", "ema", 8); /* training is what it was */
    assert_true(log_number("ema", 8, "val_loss") != log_number("straight", 8, "val_loss"));
    command_result *r = command_ok("eval --model ema --data val.txt");
    assert_non_null(strstr(r->out, "\"loss\""));
    assert_true(fabs(strtod(strchr(strstr(r->out, "\"loss\""), ':') + 1, NULL) - log_number("ema", 8, "val_loss")) < 1e-12); /* it is what was written */
    command_ok("train --out ema2 --ranks 3 --threads 1 --mode none --device guard --ema 0.75 " SETTINGS "--stop-after 5");
    command_ok("train --out ema2 --ranks 2 --threads 1 --transport copy --resume latest --quiet");
    assert_same_log("ema", "ema2", 8);
    for (int64_t s = 4; s <= 8; s += 4) assert_true(log_number("ema", s, "val_loss") == log_number("ema2", s, "val_loss"));
    assert_same_file("ema/model.safetensors", "ema2/model.safetensors");
    command_fails(2, "--ema on --resume: the run has no average", "train --out straight --resume latest --ema 0.9");
}

static void test_other_norms(void **state)
{
    (void)state;
    static const char *const p[] = { "1", "inf", "3" };
    for (int k = 0; k < 3; k++) {
        char one[16], many[16];
        snprintf(one, sizeof(one), "one-%s", p[k]);
        snprintf(many, sizeof(many), "many-%s", p[k]);
        command_ok("train --out %s --ranks 1 --threads 1 --clip-norm-type %s " SETTINGS "--stop-after 2", one, p[k]);
        command_ok("train --out %s --ranks 3 --threads 1 --clip-norm-type %s --mode grad-op " SETTINGS "--stop-after 2", many, p[k]);
        assert_same_log(one, many, 2);
    }
    double two = log_number("straight", 1, "grad_norm"), three = log_number("one-3", 1, "grad_norm");
    assert_true(log_number("one-1", 1, "grad_norm") > two && two > three && three > log_number("one-inf", 1, "grad_norm"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scales_that_change_nothing), cmocka_unit_test(test_skipped_steps), cmocka_unit_test(test_halves), cmocka_unit_test(test_sums_in_halves), cmocka_unit_test(test_averages), cmocka_unit_test(test_other_norms),
    };
    return cmocka_run_group_tests(tests, straight_run, command_teardown);
}
