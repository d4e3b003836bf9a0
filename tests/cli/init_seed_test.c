/* SPDX-License-Identifier: MIT
 *
 * --init-seed: by key a run does not depend on the number of ranks; with a seed of each rank's own it does, says so once, and is
 * the same in every mode, also where ranks hold replicas; and it is refused where weights begin otherwise. */
#include "support/command.h"
#include "support/testing.h"

#define SETTINGS "--model config.json --data text.txt --val-fraction 0 --batch 6 --micro-batch 1 --steps 4 "

static int count(const char *text, const char *what)
{
    int n = 0;
    for (const char *p = strstr(text, what); p != NULL; p = strstr(p + 1, what)) n++;
    return n;
}

static void test_seeds(void **state)
{
    (void)state;
    command_result *r = command_ok("train --out keyed --ranks 1 --threads 1 --no-progress " SETTINGS);
    assert_int_equal(count(r->err, "seed"), 0);
    command_ok("train --out two --ranks 2 --threads 1 --init-seed keyed --quiet " SETTINGS);
    assert_same_file("keyed/model.safetensors", "two/model.safetensors");
    command_ok("train --out alone --ranks 1 --threads 1 --init-seed per-rank --quiet " SETTINGS); /* rank 0 has the run's seed */
    assert_same_file("keyed/model.safetensors", "alone/model.safetensors");
    r = command_ok("train --out each --ranks 3 --threads 1 --init-seed per-rank --no-progress --seed 4 " SETTINGS);
    assert_int_equal(count(r->err, "the seed is 4 on rank 0 and 5 on rank 1: each rank's slice has its own"), 1);
    assert_int_equal(count(r->err, "fsdp: "), 1);
    assert_true(log_number("each", 1, "loss") != log_number("keyed", 1, "loss"));
    r = command_ok("train --out none --ranks 3 --threads 1 --init-seed per-rank --no-progress --seed 4 --mode none " SETTINGS);
    assert_int_equal(count(r->err, "the seed is 4 on rank 0"), 1);
    assert_true(count(r->err, "ranks hold replicas (mode none) but were given different values: parameter \"") >= 2);
    assert_same_file("each/model.safetensors", "none/model.safetensors");
    r = command_ok("train --out quiet --ranks 3 --threads 1 --init-seed per-rank --quiet --seed 4 --mode none --transport copy --device guard " SETTINGS);
    assert_string_equal(r->err, "");
    assert_same_file("each/model.safetensors", "quiet/model.safetensors");
}

static void test_resume(void **state)
{
    (void)state;
    command_ok("train --out half --ranks 3 --threads 1 --init-seed per-rank --seed 4 --stop-after 2 --quiet " SETTINGS);
    command_fails(2, "--init-seed says how weights begin, but --resume", "train --out half --resume latest --init-seed keyed");
    command_ok("train --out half --ranks 2 --threads 1 --resume latest --quiet"); /* the values are there */
    assert_same_file("each/model.safetensors", "half/model.safetensors");
    char *text = file_text(NULL, "half/run.json");
    assert_non_null(strstr(text, "\"init_seed\": \"per-rank\""));
    free(text);
    command_fails(2, "--init-seed and --init both say", "train --out other --init each --init-seed per-rank " SETTINGS);
    command_fails(2, "init-seed", "train --out other --init-seed random " SETTINGS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_resume),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
