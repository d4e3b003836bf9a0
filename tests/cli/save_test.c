/* SPDX-License-Identifier: MIT
 *
 * fsdp train --save background: the same checkpoints, log and model as in the foreground, to the byte; bounded by --save-memory; a run
 * that ends, is stopped or fails has waited for what was being written. */
#include "support/command.h"
#include "support/testing.h"

#define SETTINGS "--model config.json --data text.txt --val-fraction 0 --batch 6 --micro-batch 1 --steps 20 --save-every 3 --keep 99 --dropout 0.1 --quiet "

static void test_same_files(void **state)
{
    (void)state;
    command_result r;
    command_ok("train --out fore --ranks 2 --threads 1 --save foreground " SETTINGS);
    command_ok("train --out back --ranks 2 --threads 1 --save background " SETTINGS);
    command_ok("train --out usual --ranks 2 --threads 1 --transport copy --device guard " SETTINGS);
    shell_run(&r, "diff -r fore/checkpoints back/checkpoints && diff -r fore/checkpoints usual/checkpoints && ls fore/checkpoints | wc -l");
    if (r.code != 0) fail_msg("%s%s", r.out, r.err);
    assert_int_equal(atoi(r.out), 7); /* 3 to 18, and 20 */
    assert_same_log("fore", "back", 20);
    assert_same_file("fore/model.safetensors", "back/model.safetensors");
    /* stopped in the middle, it goes on from what it wrote */
    command_ok("train --out cut --ranks 3 --threads 1 --stop-after 7 " SETTINGS);
    assert_true(path_there("cut/checkpoints/step-00000006/manifest.json") && path_there("cut/checkpoints/step-00000007/manifest.json"));
    command_ok("train --out cut --ranks 1 --threads 1 --resume cut/checkpoints/step-00000007 --save foreground --quiet");
    assert_same_log("fore", "cut", 20);
}

static void test_bounded(void **state)
{
    (void)state;
    command_result r;
    command_fails(2, "--save-memory is of saves in the background", "train --out x --save foreground --save-memory 5 " SETTINGS);
    command_fails(2, "--save", "train --out x --save sideways " SETTINGS);
    command_fails(2, "--save-memory", "train --out x --save-memory 0 " SETTINGS);
    command_run(&r, "train --out bound --model gpt2-3m --data text.txt --val-fraction 0 --seq 4 --batch 2 --ranks 2 --threads 1 --steps 3 --save-every 1 --save-memory 7");
    assert_int_equal(r.code, 0);
    int mib = 0;
    const char *said = strstr(r.err, "is saved in the foreground: rank ");
    if (said == NULL || strstr(said + 1, "is saved in the foreground") != NULL) fail_msg("not said, or more than once: %s", r.err);
    const char *limit = strstr(r.err, "and at most ");
    assert_non_null(limit);
    assert_int_equal(sscanf(limit, "and at most %d", &mib), 1);
    assert_int_equal(mib, 7 << 20);
    assert_true(path_there("bound/checkpoints/step-00000001") && path_there("bound/checkpoints/step-00000002"));
}

/* What is being written when the loss becomes infinite is of a good step: it is there afterwards, and named. */
static void test_error_meanwhile(void **state)
{
    (void)state;
    command_ok("train --out nan --ranks 2 --threads 1 --model config.json --data text.txt --val-fraction 0 --steps 9 --stop-after 3 --quiet");
    command_result *r = command_fails(1, "the loss is", "train --out nan --ranks 2 --threads 1 --resume latest --lr 1e30 --clip 0 --save-every 1");
    assert_non_null(strstr(r->err, "The last good checkpoint: that of step 4"));
    assert_true(path_there("nan/checkpoints/step-00000004/manifest.json"));
    command_ok("inspect nan/checkpoints/step-00000004");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_files),
        cmocka_unit_test(test_bounded),
        cmocka_unit_test(test_error_meanwhile),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
