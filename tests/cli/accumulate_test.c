/* SPDX-License-Identifier: MIT
 *
 * --accumulate whole: reductions once a step, the same bits in every mode and resumed; those of --accumulate sharded where each
 * rank has one micro-batch; and near them elsewhere. */
#include "support/command.h"
#include "support/testing.h"

#include <math.h>

#define SETTINGS "--model config.json --data text.txt --val val.txt --batch 6 --micro-batch 1 --steps 6 --warmup 2 --lr 0.01 --clip 0.5 --seed 3 "

static int64_t reductions(const char *run, int64_t step)
{
    json_t *o = log_line(run, step);
    int64_t n = json_integer_value(json_object_get(json_object_get(o, "collectives"), "reduce"));
    json_decref(o);
    return n;
}

static void test_whole(void **state)
{
    (void)state;
    command_ok("train --out sharded --ranks 2 --quiet " SETTINGS);
    command_result *r = command_ok("train --out whole --ranks 2 --accumulate whole " SETTINGS);
    assert_non_null(strstr(r->out, "other numbers of ranks give other bits"));
    assert_true(reductions("whole", 2) > 0);
    assert_int_equal(reductions("sharded", 2), 3 * reductions("whole", 2));
    for (int64_t s = 1; s <= 6; s++) {
        double a = log_number("sharded", s, "loss"), b = log_number("whole", s, "loss"), x = log_number("sharded", s, "grad_norm"), y = log_number("whole", s, "grad_norm");
        if (fabs(a - b) > 1e-4 || fabs(x - y) > 1e-4) fail_msg("step %lld: loss %.9g and %.9g, norm %.9g and %.9g", (long long)s, a, b, x, y);
    }
    static const char *const how[] = { "--mode none --transport copy", "--mode grad-op --device guard", "--mode optimizer --threads 2", "--activation-checkpointing" };
    for (int i = 0; i < 4; i++) {
        char run[16], path[64];
        snprintf(run, sizeof(run), "whole%d", i);
        command_ok("train --out %s --ranks 2 --accumulate whole --quiet %s " SETTINGS, run, how[i]);
        assert_same_log("whole", run, 6);
        snprintf(path, sizeof(path), "%s/model.safetensors", run);
        assert_same_file("whole/model.safetensors", path);
    }
    command_ok("train --out parts --ranks 2 --accumulate whole --stop-after 2 --quiet " SETTINGS);
    command_ok("train --out parts --ranks 2 --resume latest --quiet");
    assert_same_log("whole", "parts", 6);
    r = command_ok("train --out six --ranks 6 --accumulate whole " SETTINGS);
    assert_non_null(strstr(r->out, "--accumulate whole has no effect"));
    assert_same_log("sharded", "six", 6);
    command_fails(2, "must be one of sharded|whole", "train --out new --accumulate all " SETTINGS);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_whole) };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
