/* SPDX-License-Identifier: MIT
 *
 * --freeze: what is frozen has the initial bits at the end, what is not has learned; the same bits on any ranks and mode, and
 * resumed; unfrozen on a resume; patterns that cannot be meant are refused. */
#include "support/command.h"
#include "support/testing.h"

#include <fsdp/fsdp.h>

#define SETTINGS "--model config.json --data text.txt --val val.txt --batch 6 --micro-batch 1 --steps 8 --warmup 2 --lr 0.01 --clip 0.5 --quiet "
#define FREEZE   "--freeze 'wte*' 'h.0.*' '*.ln_2.bias' "

static bool is_frozen(const char *name)
{
    return strncmp(name, "wte", 3) == 0 || strncmp(name, "h.0.", 4) == 0 || strstr(name, ".ln_2.bias") != NULL;
}

/* For each tensor, whether it has the same bytes in two models. */
static void compare(const char *a, const char *b, bool all_learn)
{
    char path[200];
    fsdp_safetensors *x, *y;
    snprintf(path, sizeof(path), "%s/model.safetensors", a);
    assert_ok(fsdp_safetensors_open(&x, path));
    snprintf(path, sizeof(path), "%s/model.safetensors", b);
    assert_ok(fsdp_safetensors_open(&y, path));
    static float u[1 << 18], v[1 << 18];
    int still = 0;
    for (int64_t i = 0; i < fsdp_safetensors_count(x); i++) {
        const fsdp_safetensors_tensor *t = fsdp_safetensors_at(x, i);
        const char *name = t->name;
        if (strncmp(name, "transformer.", 12) == 0) name += 12;
        int64_t n = t->numel;
        assert_true(n <= 1 << 18);
        assert_ok(fsdp_safetensors_read_f32(x, t, 0, n, u));
        assert_ok(fsdp_safetensors_read_f32(y, fsdp_safetensors_find(y, t->name), 0, n, v));
        bool same = memcmp(u, v, (size_t)n * sizeof(float)) == 0;
        if (same != (is_frozen(name) && !all_learn)) fail_msg("%s and %s: %s is %s", a, b, t->name, same ? "the same" : "another");
        still += same;
    }
    assert_true(all_learn || still > 5);
    fsdp_safetensors_close(x);
    fsdp_safetensors_close(y);
}

static void test_frozen(void **state)
{
    (void)state;
    command_ok("train --out begin --ranks 1 --stop-after 1 --lr 0 --min-lr 0 --weight-decay 0 --model config.json --data text.txt --val val.txt --batch 6 --micro-batch 1 "
               "--steps 8 --quiet");
    command_ok("convert begin/checkpoints/step-00000001 initial");
    command_ok("train --out one --ranks 1 --threads 1 " FREEZE SETTINGS);
    compare("initial", "one", false);
    /* wherever it runs, and in parts */
    static const char *const how[] = { "--ranks 3 --mode optimizer --device guard", "--ranks 2 --transport copy --activation-checkpointing", "--ranks 2 --mode none" };
    for (int i = 0; i < 3; i++) {
        char run[16], path[64];
        snprintf(run, sizeof(run), "frozen%d", i);
        command_ok("train --out %s %s " FREEZE SETTINGS, run, how[i]);
        assert_same_log("one", run, 8);
        snprintf(path, sizeof(path), "%s/model.safetensors", run);
        assert_same_file("one/model.safetensors", path);
    }
    command_ok("train --out parts --ranks 2 --stop-after 3 " FREEZE SETTINGS);
    command_ok("train --out parts --ranks 3 --resume latest --quiet");
    assert_same_log("one", "parts", 8);
    assert_same_file("one/model.safetensors", "parts/model.safetensors");
}

static void test_unfrozen_on_resume(void **state)
{
    (void)state;
    command_ok("train --out thaw --ranks 2 --stop-after 4 " FREEZE SETTINGS);
    command_result *r = command_ok("train --out thaw --ranks 2 --resume latest --freeze none");
    assert_null(strstr(r->out, "frozen\n"));
    compare("initial", "thaw", true);
    command_ok("train --out again --ranks 2 --stop-after 4 " SETTINGS);
    r = command_ok("train --out again --ranks 1 --resume latest --freeze 'h.*'");
    assert_non_null(strstr(r->out, "of the parameters are frozen"));
}

/* The head of a model that is tied is the table by another name. */
static void test_second_name(void **state)
{
    (void)state;
    command_ok("train --out table --ranks 1 --threads 1 --freeze 'wte*' " SETTINGS);
    command_ok("train --out head --ranks 2 --threads 1 --freeze 'lm_head*' " SETTINGS);
    assert_same_file("table/model.safetensors", "head/model.safetensors");
}

static void test_refusals(void **state)
{
    (void)state;
    command_fails(2, "--freeze wte fits none of the model's", "train --out new --freeze wte " SETTINGS);
    command_fails(2, "near: wte.weight (a pattern is a whole name", "train --out new --freeze wte " SETTINGS);
    command_fails(2, "near: h.0.attn.c_attn.", "train --out new --freeze 'h.0.attn.c_atn.*' " SETTINGS);
    command_fails(2, "they are called wte.weight", "train --out new --freeze 'wte*' 'zzz' " SETTINGS);
    command_fails(2, "all parameters are frozen, and nothing is left to train", "train --out new --freeze '*' " SETTINGS);
    command_fails(2, "all parameters are frozen", "train --out new --freeze 'w*' 'h.*' 'ln*' " SETTINGS);
    command_fails(2, "--freeze none freezes nothing", "train --out new --freeze none 'h.*' " SETTINGS);
    assert_false(path_there("new"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_unfrozen_on_resume),
        cmocka_unit_test(test_second_name),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
