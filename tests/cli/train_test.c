/* SPDX-License-Identifier: MIT
 *
 * The main job from end to end, with dropout and clipping: the same log and the same model on any ranks, mode, transport, device and
 * threads; a run that was stopped and resumed, however often and on whatever, is the straight run; and what the other commands
 * make of it. */
#include "support/command.h"
#include "support/testing.h"

#include <math.h>
#include <unistd.h>

#define SETTINGS "--model config.json --data text.txt --val val.txt --batch 6 --micro-batch 1 --steps 20 --warmup 5 --lr 0.01 --clip 0.5 --eval-every 7 --quiet "

/* ---- the straight run, which all others are compared with ---- */

static int straight_run(void **state)
{
    if (command_setup(state) != 0) return -1;
    command_ok("train --out straight --ranks 1 --threads 1 " SETTINGS);
    return 0;
}

static void assert_same_run(const char *run)
{
    char a[300];
    assert_same_log("straight", run, 20);
    snprintf(a, sizeof(a), "%s/model.safetensors", run);
    assert_same_file("straight/model.safetensors", a);
    snprintf(a, sizeof(a), "%s/config.json", run);
    assert_same_file("straight/config.json", a);
    for (int64_t s = 7; s <= 20; s += s == 14 ? 6 : 7) {
        double x = log_number("straight", s, "val_loss"), y = log_number(run, s, "val_loss");
        if (memcmp(&x, &y, sizeof(x)) != 0) fail_msg("%s: validation loss of step %lld: %.17g, not %.17g", run, (long long)s, y, x);
    }
}

static void test_log(void **state)
{
    (void)state;
    static const char *const numbers[] = { "loss", "grad_norm", "lr", "tokens", "step_ms", "wall_s" };
    static const char *const phases[] = { "forward", "backward", "wait", "copy", "reduce", "optimizer" };
    double wall = 0;
    assert_int_equal(log_lines("straight"), 20);
    for (int64_t s = 1; s <= 20; s++) {
        json_t *o = log_line("straight", s);
        for (int i = 0; i < 6; i++) assert_true(json_is_number(json_object_get(o, numbers[i])));
        for (int i = 0; i < 6; i++) assert_true(json_number_value(json_object_get(json_object_get(o, "ms"), phases[i])) >= 0);
        assert_int_equal(json_array_size(json_object_get(o, "private_mib")), 1);
        assert_int_equal(json_array_size(json_object_get(o, "shared_mib")), 1);
        assert_true(json_is_object(json_object_get(o, "collectives")) && json_is_object(json_object_get(o, "bytes")));
        assert_int_equal(json_integer_value(json_object_get(o, "tokens")), s * 6 * 16);
        assert_true(json_number_value(json_object_get(o, "wall_s")) >= wall);
        wall = json_number_value(json_object_get(o, "wall_s"));
        assert_int_equal(json_object_get(o, "val_loss") != NULL, s == 7 || s == 14 || s == 20);
        json_decref(o);
    }
    /* the schedule: up to 0.01 in 5 steps, then a cosine to a tenth */
    assert_true(fabs(log_number("straight", 1, "lr") - 0.002) < 1e-8 && fabs(log_number("straight", 5, "lr") - 0.01) < 1e-8);
    assert_true(fabs(log_number("straight", 20, "lr") - 0.001) < 1e-8);
    assert_true(log_number("straight", 20, "loss") < log_number("straight", 1, "loss"));
    /* run.json has every setting, resolved */
    json_error_t error;
    json_t *o = json_load_file("straight/run.json", 0, &error);
    static const char *const keys[] = { "model", "data", "val", "steps", "batch", "micro_batch", "seq", "lr", "min_lr", "warmup", "schedule", "weight_decay", "beta1", "beta2",
                                        "eps", "clip", "dropout", "seed", "eval_every", "save_every", "keep", "ranks", "threads", "mode", "transport", "device", "prefetch",
                                        "parameters", "config", "out", "instruction_set", "gemm" };
    assert_non_null(o);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        if (json_object_get(o, keys[i]) == NULL) fail_msg("run.json has no \"%s\"", keys[i]);
    assert_int_equal(json_integer_value(json_object_get(o, "seq")), 16);
    assert_true(fabs(json_number_value(json_object_get(o, "min_lr")) - 0.001) < 1e-12);
    json_decref(o);
}

static void test_same_everywhere(void **state)
{
    (void)state;
    static const char *const how[] = { "--ranks 2 --threads 1",
                                       "--ranks 3 --threads 2 --transport copy --prefetch 2",
                                       "--ranks 6 --threads 1 --mode grad-op",
                                       "--mesh 3x2 --threads 1",
                                       "--ranks 6 --threads 1 --transport copy --reshard-after-forward 3",
                                       "--ranks 2 --threads 2 --device guard --offload grads,params,optim",
                                       "--ranks 3 --threads 1 --device guard --offload grads --transport copy",
                                       "--ranks 2 --threads 1 --device guard --offload optim,params --mode grad-op",
                                       "--mesh 3x2 --threads 1 --device guard --offload optim",
                                       "--mesh 2x3 --threads 1 --transport copy --mode optimizer",
                                       "--ranks 2 --threads 1 --device guard --mode optimizer",
                                       "--ranks 3 --threads 1 --transport copy --device guard --mode none",
                                       "--ranks 1 --threads 3 --mode none",
                                       "--ranks 2 --threads 1 --wrap none --transport copy",
                                       "--ranks 3 --threads 1 --wrap size:300 --keep-whole-below 200 --transport copy --prefetch 3 --max-unsharded-mb 0.02",
                                       "--ranks 2 --threads 1 --wrap 'name:h.*.mlp,h.0,wte' --mode grad-op" };
    for (size_t i = 0; i < sizeof(how) / sizeof(how[0]); i++) {
        char run[16];
        snprintf(run, sizeof(run), "every%d", (int)i);
        command_ok("train --out %s %s " SETTINGS, run, how[i]);
        assert_same_run(run);
    }
}

/* ---- resuming ---- */

static void test_resume(void **state)
{
    (void)state;
    /* 10 + 10 */
    command_ok("train --out ten --ranks 2 --threads 1 --stop-after 10 " SETTINGS);
    assert_false(path_there("ten/model.safetensors"));
    assert_int_equal(log_lines("ten"), 10);
    command_ok("train --out ten --ranks 3 --threads 1 --resume latest --quiet");
    assert_same_run("ten");
    /* 7 + 1 + 12, each on other ranks and in another mode */
    command_ok("train --out seven --ranks 6 --threads 1 --mode none --stop-after 7 " SETTINGS);
    command_ok("train --out seven --ranks 1 --threads 2 --resume latest --stop-after 8 --mode grad-op --transport copy --quiet");
    command_ok("train --out seven --ranks 2 --threads 1 --resume seven/checkpoints/step-00000008 --device guard --quiet");
    assert_same_run("seven");
    /* into another folder: its log begins where the checkpoint ends */
    command_ok("train --out moved --ranks 2 --threads 1 --resume seven/checkpoints/step-00000008 --quiet");
    assert_int_equal(log_lines("moved"), 12);
    assert_same_file("straight/model.safetensors", "moved/model.safetensors");
    /* the config that --model named, and relative to where it was, may be gone */
    assert_int_equal(system("mv config.json kept.json; cp kept.json config.json"), 0);
    command_ok("train --out gone --ranks 1 --stop-after 5 " SETTINGS);
    assert_int_equal(unlink("config.json"), 0);
    command_ok("train --out gone --ranks 2 --resume latest --quiet");
    assert_int_equal(rename("kept.json", "config.json"), 0);
    assert_same_run("gone");
}

/* What a killed run leaves in the log after the last checkpoint is of steps that are done again. */
static void test_log_is_cut(void **state)
{
    (void)state;
    command_ok("train --out cut --ranks 2 --threads 1 --stop-after 9 " SETTINGS);
    FILE *f = fopen("cut/log.jsonl", "a");
    fprintf(f, "{\"step\":10,\"loss\":1}\n{\"step\":11,\"loss\":2}\nnonsense\n{\"step\":12,\"lo"); /* and cut off */
    fclose(f);
    command_ok("train --out cut --ranks 2 --threads 1 --resume latest --quiet");
    assert_same_run("cut");
    /* killed before the very first line: no log at all */
    command_ok("train --out nolog --ranks 2 --threads 1 --stop-after 9 " SETTINGS);
    assert_int_equal(unlink("nolog/log.jsonl"), 0);
    command_ok("train --out nolog --ranks 2 --threads 1 --resume latest --quiet");
    assert_int_equal(log_lines("nolog"), 11);
    assert_same_file("straight/model.safetensors", "nolog/model.safetensors");
}

static void test_finished(void **state)
{
    (void)state;
    command_ok("train --out done --ranks 2 --threads 1 " SETTINGS);
    command_fails(1, "the run is finished: done/checkpoints/step-00000020 has all 20 steps; give a larger --steps", "train --out done --resume latest");
    assert_same_log("straight", "done", 20); /* and nothing was cut */
    command_result *r = command_ok("train --out done --resume latest --steps 24 --ranks 2 --log-every 1");
    assert_non_null(strstr(r->out, "--steps was 20, and is now 24"));
    assert_non_null(strstr(r->out, "resumed from done/checkpoints/step-00000020 at step 20"));
    assert_int_equal(log_lines("done"), 24);
    command_fails(1, "is at step 24 already: --stop-after 10 leaves nothing to do", "train --out done --resume latest --steps 30 --stop-after 10 --quiet");
}

static void test_changed_settings(void **state)
{
    (void)state;
    command_ok("train --out changed --ranks 2 --threads 1 --stop-after 4 --save-every 2 " SETTINGS);
    static const struct {
        int code;
        const char *message, *arguments;
    } refused[] = {
        { 2, "--model cannot change on --resume", "--model g13.json" },
        { 2, "--seq cannot change on --resume", "--seq 8" },
        { 2, "--init", "--init straight" },
        { 2, "6 micro-batches (--batch 6 / --micro-batch 1), which 4 ranks do not divide", "--ranks 4" },
        { 1, "nowhere.txt", "--data nowhere.txt" },
    };
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++)
        command_fails(refused[i].code, refused[i].message, "train --out changed --resume latest --quiet %s", refused[i].arguments);
    /* back to an older checkpoint: what is newer would be taken by the next --resume latest */
    command_fails(1, "changed/checkpoints/step-00000004 is newer", "train --out changed --resume changed/checkpoints/step-00000002 --quiet");
    command_fails(1, "holds another run", "train --out changed --resume straight/checkpoints/step-00000020 --steps 30 --quiet");
    assert_int_equal(log_lines("changed"), 4); /* no refusal touched it */
    /* what may change is said, with both values and which one counts; the same settings given again are not */
    command_result *r = command_ok("train --out changed --resume latest --lr 0.02 --batch 12 --seed 1 --model config.json --ranks 2 --log-every 1");
    assert_non_null(strstr(r->out, "--lr was 0.01, and is now 0.02: the command line wins"));
    assert_non_null(strstr(r->out, "--batch was 6, and is now 12: the command line wins"));
    assert_null(strstr(r->out, "--seed was"));
    assert_null(strstr(r->out, "--model was"));
    assert_int_equal(log_lines("changed"), 20);
    assert_int_equal(log_number("changed", 20, "tokens"), (4 * 6 + 16 * 12) * 16);
}

/* ---- checkpoints ---- */

static void test_keep(void **state)
{
    (void)state;
    command_ok("train --out kept --ranks 2 --threads 1 --save-every 3 --keep 2 " SETTINGS);
    assert_true(path_there("kept/checkpoints/step-00000018") && path_there("kept/checkpoints/step-00000020"));
    assert_false(path_there("kept/checkpoints/step-00000015"));
    assert_same_run("kept");
    /* incomplete ones that are newer are skipped, and that is said */
    assert_int_equal(system("rm kept/checkpoints/step-00000020/manifest.json"), 0);
    command_result *r = command_ok("train --out kept --ranks 3 --resume latest");
    assert_non_null(strstr(r->out, "skipped 1 newer checkpoint that is not complete"));
    assert_non_null(strstr(r->out, "at step 18"));
    assert_same_run("kept");
    /* damage is refused by name */
    assert_int_equal(system("printf X | dd of=kept/checkpoints/step-00000020/rank-00001-of-00003.safetensors bs=1 seek=3000 conv=notrunc 2>/dev/null"), 0);
    command_fails(1, "kept/checkpoints/step-00000020/rank-00001-of-00003.safetensors is damaged: its checksum is", "train --out kept --resume latest --steps 30 --ranks 2 --quiet");
    command_fails(1, "is damaged", "convert kept new");
    assert_int_equal(system("rm kept/checkpoints/step-00000020/rank-00001-of-00003.safetensors"), 0);
    command_fails(1, "rank-00001-of-00003.safetensors", "train --out kept --resume latest --steps 30 --ranks 2 --quiet");
    /* none is complete: not the same as none at all */
    assert_int_equal(system("rm kept/checkpoints/*/manifest.json"), 0);
    command_fails(1, "none of the 2 checkpoints in kept/checkpoints is complete", "train --out kept --resume latest --steps 30 --ranks 2 --quiet");
    assert_int_equal(log_lines("kept"), 20);
}

/* A run that ended before it saved anything is begun again, with its settings. */
static void test_nothing_saved(void **state)
{
    (void)state;
    command_ok("train --out never --ranks 2 --threads 1 --stop-after 4 " SETTINGS);
    assert_int_equal(system("rm -r never/checkpoints"), 0);
    command_result *r = command_ok("train --out never --ranks 3 --threads 1 --resume latest");
    assert_non_null(strstr(r->out, "nothing was saved in never yet: the run begins again"));
    assert_same_run("never");
}

static void test_convert(void **state)
{
    (void)state;
    command_ok("convert straight converted");
    assert_same_file("straight/model.safetensors", "converted/model.safetensors");
    assert_same_file("straight/config.json", "converted/config.json");
    command_ok("train --out six --ranks 6 --threads 1 --mode none --stop-after 3 " SETTINGS);
    command_ok("train --out one --ranks 1 --threads 1 --stop-after 3 " SETTINGS);
    command_ok("convert six/checkpoints/step-00000003 six-model");
    command_ok("convert one/checkpoints one-model"); /* the folder of checkpoints: its newest */
    assert_same_file("six-model/model.safetensors", "one-model/model.safetensors");
    command_ok("convert six six-model"); /* an older model is replaced */
    /* a head of its own is written, and a tied one is not */
    assert_int_equal(system("sed 's/}$/, \"tie_word_embeddings\": false}/' config.json >untied.json"), 0);
    command_ok("train --model untied.json --data text.txt --out untied --steps 2 --ranks 2 --quiet");
    command_ok("convert untied untied-model");
    assert_same_file("untied/model.safetensors", "untied-model/model.safetensors");
    assert_non_null(strstr(command_ok("inspect untied-model")->out, "lm_head.weight"));
    assert_null(strstr(command_ok("inspect untied/checkpoints/step-00000002")->out, "is wte.weight"));
    assert_null(strstr(command_ok("inspect converted")->out, "lm_head.weight"));
}

/* Weights that are loaded, trained with a rate of 0, and saved, are the same bytes: nothing is transposed, cast or dropped. */
static void test_init(void **state)
{
    (void)state;
    command_ok("train --model straight --data text.txt --init straight --out round --steps 1 --lr 0 --weight-decay 0 --ranks 3 --batch 3 --quiet");
    assert_same_file("straight/model.safetensors", "round/model.safetensors");
    command_ok("train --model config.json --data text.txt --init straight/model.safetensors --out round2 --steps 1 --lr 0 --weight-decay 0 --ranks 2 --transport copy --device guard --quiet");
    assert_same_file("straight/model.safetensors", "round2/model.safetensors");
    command_fails(1, "does not fit the model", "train --model g13.json --data tokens.bin --init straight --out round3 --quiet");
    command_fails(1, "nowhere", "train --model config.json --data text.txt --init nowhere --out round4 --quiet");
}

/* ---- evaluation ---- */

static double eval_loss(const char *arguments, double *tokens)
{
    json_error_t error;
    json_t *o = json_loads(command_ok("eval %s", arguments)->out, 0, &error);
    if (o == NULL) fail_msg("fsdp eval %s: no JSON: %s", arguments, error.text);
    double loss = json_number_value(json_object_get(o, "loss"));
    *tokens = json_number_value(json_object_get(o, "tokens"));
    json_decref(o);
    return loss;
}

static void test_eval(void **state)
{
    (void)state;
    double tokens, want = log_number("straight", 20, "val_loss"), first = 0;
    size_t bytes;
    free(file_text(&bytes, "val.txt"));
    for (int ranks = 1; ranks <= 4; ranks++) {
        char arguments[200];
        snprintf(arguments, sizeof(arguments), "--model straight --data val.txt --batch 1 --ranks %d --threads 1", ranks);
        double loss = eval_loss(arguments, &tokens);
        /* every prediction once: one token less than there are */
        assert_true(tokens == (double)(bytes - 1) && tokens == log_number("straight", 20, "val_tokens"));
        if (ranks == 1) first = loss;
        assert_memory_equal(&loss, &first, sizeof(loss));
    }
    assert_memory_equal(&first, &want, sizeof(want)); /* what training logged, of the file that it wrote */
    /* Other batches: sums in another grouping, and (oneDNN on AVX2) products that round otherwise where there are more rows: a
     * few units of fp32's last place in each logit, which a mean does not enlarge. */
    double loss = eval_loss("--model straight --data val.txt --batch 64 --ranks 3", &tokens);
    assert_true(fabs(loss - want) < 1e-6 * want);
    /* other windows are another question, with an answer near it */
    loss = eval_loss("--model straight --data val.txt --seq 5", &tokens);
    assert_true(tokens == (double)(bytes - 1) && loss > want && loss < want + 1);
    /* a limited evaluation in training is of as many tokens */
    command_ok("train --out limited --ranks 2 --eval-batches 3 --stop-after 7 " SETTINGS);
    assert_true(log_number("limited", 7, "val_tokens") == 3 * 16);
}

/* ---- generation ---- */

static void test_generate(void **state)
{
    (void)state;
    char first[4096];
    snprintf(first, sizeof(first), "%.4095s", command_ok("generate --model straight --prompt 'in the' --tokens 70 --seed 3 --top-k 9")->out);
    assert_int_equal(strncmp(first, "in the", 6), 0);
    assert_string_equal(first, command_ok("generate --model straight --prompt 'in the' --tokens 70 --seed 3 --top-k 9 --threads 2")->out);
    assert_string_not_equal(first, command_ok("generate --model straight --prompt 'in the' --tokens 70 --seed 4 --top-k 9")->out);
    snprintf(first, sizeof(first), "%.4095s", command_ok("generate --model straight --prompt-ids 105,110,32 --tokens 60 --temperature 0")->out);
    assert_string_equal(first, command_ok("generate --model straight --prompt-ids 105,110,32 --tokens 60 --temperature 0 --threads 1")->out);
    int tokens = 0;
    for (const char *p = first; *p != '\0'; p++) tokens += *p == ' ';
    assert_int_equal(tokens, 60); /* 60 ids, past a context of 16 */
    command_ok("generate --model straight --tokens 3");
    /* a reader that goes away ends it: no hang */
    static command_result r;
    shell_run(&r, "$FSDP generate --model straight --tokens 100000000 | head -c 100 >head.txt");
    assert_int_equal(r.code, 0);
    assert_true(r.seconds < 20);
}

/* ---- inspect ---- */

static void test_inspect(void **state)
{
    (void)state;
    command_ok("train --out seen --ranks 2 --threads 1 --save-every 10 " SETTINGS);
    command_result *r = command_ok("inspect seen");
    static const char *const said[] = { "run of fsdp train", "checkpoint of step 10, saved by 2 ranks", "checkpoint of step 20", "as saved", "transformer.h.1.mlp.c_fc.weight",
                                        "7056", "20 steps" };
    for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++)
        if (strstr(r->out, said[i]) == NULL) fail_msg("inspect does not say \"%s\": %s", said[i], r->out);
    r = command_ok("inspect seen/checkpoints/step-00000010");
    assert_non_null(strstr(r->out, "h.0.attn.c_attn.weight"));
    assert_non_null(strstr(r->out, "  lm_head.weight                                   is wte.weight\n")); /* tied: one tensor, two names */
    command_ok("inspect seen/model.safetensors seen/checkpoints/step-00000020");
    /* damage: status 1, and the file named */
    assert_int_equal(system("printf X | dd of=seen/checkpoints/step-00000010/rank-00000-of-00002.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null; "
                            "truncate -s -1 seen/model.safetensors; printf X | dd of=seen/checkpoints/step-00000020/manifest.json bs=1 seek=100 conv=notrunc 2>/dev/null"),
                     0);
    static command_result bad;
    command_run(&bad, "inspect seen");
    assert_int_equal(bad.code, 1);
    assert_non_null(strstr(bad.out, "rank-00000-of-00002.safetensors is damaged"));
    assert_non_null(strstr(bad.err, "step-00000010 is not whole"));
    assert_non_null(strstr(bad.err, "step-00000020/manifest.json is damaged"));
    assert_non_null(strstr(bad.err, "model.safetensors"));
    command_fails(1, "seen/model.safetensors", "inspect seen/model.safetensors");
    assert_int_equal(system("rm seen/checkpoints/step-00000010/rank-00000-of-00002.safetensors"), 0);
    command_fails(1, "1 of its files is damaged or missing", "inspect seen/checkpoints/step-00000010");
    command_run(&bad, "inspect straight nowhere config.json"); /* the good one is shown all the same */
    assert_int_equal(bad.code, 1);
    assert_non_null(strstr(bad.out, "straight: run of fsdp train"));
}

/* ---- other data, other programs, one processor ---- */

static void test_token_files(void **state)
{
    (void)state;
    assert_int_equal(system("head -c 3000 tokens.bin >part-1.bin; tail -c 3000 tokens.bin >part-2.bin"), 0);
    command_ok("train --model g13.json --data tokens.bin --out whole --steps 5 --batch 4 --micro-batch 1 --ranks 2 --quiet");
    command_ok("train --model g13.json --data 'part-*.bin' --out parts --steps 5 --batch 4 --micro-batch 1 --ranks 4 --quiet");
    command_ok("train --model g13.json --data part-1.bin part-2.bin --out listed --steps 5 --batch 4 --micro-batch 1 --ranks 1 --quiet");
    assert_same_log("whole", "parts", 5);
    assert_same_log("whole", "listed", 5);
    /* files that are gone, when the run goes on */
    command_ok("train --model g13.json --data part-1.bin --out lost --steps 5 --stop-after 2 --quiet");
    assert_int_equal(unlink("part-1.bin"), 0);
    command_fails(1, "--data: part-1.bin: there is no such file", "train --out lost --resume latest --quiet");
}

static void test_lines(void **state)
{
    (void)state;
    command_result *r = command_ok("train --out quiet " SETTINGS);
    assert_true(r->out[0] == '\0' && r->err[0] == '\0');
    r = command_ok("train --model config.json --data text.txt --out lines --steps 9 --log-every 4 --ranks 2 --prefetch 3");
    static const char *const lines[] = { "7056 parameters on 2 ranks of 1 thread, shm, mode full", "step 1/9  loss", "step 4/9  loss", "step 8/9  loss", "step 9/9  loss",
                                         "step 9  validation loss", "saved lines/checkpoints/step-00000009", "wrote lines/model.safetensors",
                                         "note: --prefetch has no effect on transport shm" };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
        if (strstr(r->out, lines[i]) == NULL) fail_msg("there is no \"%s\" in: %s", lines[i], r->out);
    assert_null(strstr(r->out, "step 2/9"));
    assert_null(strchr(r->out, '\r'));
    r = command_ok("train --model config.json --data text.txt --out copied --steps 2 --ranks 2 --prefetch 3 --transport copy");
    assert_null(strstr(r->out, "note:"));
    r = command_ok("train --model config.json --data text.txt --out stopped --steps 9 --stop-after 2 --ranks 2");
    assert_non_null(strstr(r->out, "stopped after step 2 of 9; go on with: fsdp train --out stopped --resume latest"));
}

/* What was wrapped, as a table: at start, in run.json, and by inspect of a run and of a checkpoint. */
static void test_units(void **state)
{
    (void)state;
    command_result *r = command_ok("train --model config.json --data text.txt --out units --steps 2 --ranks 2 --keep-whole-below 200 --max-unsharded-mb 3");
    static const char *const lines[] = { "  unit  ", "parameters      elements  bytes whole  kept a rank", "  root.small ", " optimizer ", " x h.0 ... h.", " units  ",
                                         "note: --max-unsharded-mb has no effect on transport shm" };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
        if (strstr(r->out, lines[i]) == NULL) fail_msg("there is no \"%s\" in: %s", lines[i], r->out);
    json_error_t error;
    json_t *o = json_load_file("units/run.json", 0, &error), *units = json_object_get(o, "units");
    json_int_t elements = 0;
    for (size_t i = 0; i < json_array_size(units); i++) elements += json_integer_value(json_object_get(json_array_get(units, i), "elements"));
    assert_int_equal(elements, json_integer_value(json_object_get(o, "parameters")));
    assert_string_equal(json_string_value(json_object_get(json_array_get(units, 0), "unit")), "root");
    assert_string_equal(json_string_value(json_object_get(o, "wrap")), "block");
    assert_int_equal(json_integer_value(json_object_get(o, "keep_whole_below")), 200);
    assert_true(json_number_value(json_object_get(o, "max_unsharded_mb")) == 3);
    json_decref(o);
    for (int k = 0; k < 2; k++) {
        r = command_ok("inspect units%s", k ? "/checkpoints/step-00000002" : "");
        assert_non_null(strstr(r->out, "  root.small "));
        assert_non_null(strstr(r->out, " x h.0 ... h."));
    }
    /* a cap that is too small for the largest unit says the numbers, and leaves nothing that stands in the way */
    r = command_fails(1, "more than the cap of 1048 on whole parameters", "train --model config.json --data text.txt --out capped --steps 2 --ranks 2 --transport copy --max-unsharded-mb 0.001 --quiet");
    assert_non_null(strstr(r->err, "unit \"h.0\" is "));
}

static void test_own_programs(void **state)
{
    (void)state;
    char examples[600], want[400];
    static command_result r;
    snprintf(examples, sizeof(examples), "%s", FSDP_TEST_COMMAND);
    *strrchr(examples, '/') = '\0';
    strcat(examples, "/examples");
    shell_run(&r, "%s/own_compute 1", examples);
    assert_int_equal(r.code, 0);
    snprintf(want, sizeof(want), "%.399s", r.out);
    for (int n = 2; n <= 4; n++) {
        command_result *c = command_ok("run -n %d %s/own_compute", n, examples);
        assert_string_equal(c->out, want);
    }
    command_ok("run -n 2 --transport copy --threads 1 --timeout 20 %s/own_compute", examples);
    for (int n = 1; n <= 5; n++) {
        shell_run(&r, "%s/trunk_head %d keyed", examples, n);
        if (r.code != 0) fail_msg("trunk_head %d keyed: %s", n, r.err);
        snprintf(want, sizeof(want), "%.399s", r.out);
        assert_string_equal(command_ok("run -n %d --transport copy %s/trunk_head 0 keyed", n, examples)->out, want);
    }
    /* a number of ranks that is not that of fsdp run */
    command_run(&r, "run -n 2 %s/own_compute 3", examples);
    assert_int_equal(r.code, 1);
    assert_non_null(strstr(r.err, "3 ranks were asked for, but fsdp run started 2"));
}

static void test_one_processor(void **state)
{
    (void)state;
    static command_result r;
    shell_run(&r, "exec taskset -c 0 $FSDP train --out narrow --ranks 6 " SETTINGS);
    assert_int_equal(r.code, 0);
    assert_same_run("narrow");
    assert_true(r.seconds < 30);
    shell_run(&r, "OMP_NUM_THREADS=64 exec taskset -c 0 $FSDP train --out narrow2 " SETTINGS); /* as many ranks as processors: one */
    assert_int_equal(r.code, 0);
    char *run = file_text(NULL, "narrow2/run.json");
    assert_non_null(strstr(run, "\"ranks\": 1,"));
    free(run);
    assert_same_run("narrow2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_same_everywhere),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_log_is_cut),
        cmocka_unit_test(test_finished),
        cmocka_unit_test(test_changed_settings),
        cmocka_unit_test(test_keep),
        cmocka_unit_test(test_nothing_saved),
        cmocka_unit_test(test_convert),
        cmocka_unit_test(test_init),
        cmocka_unit_test(test_eval),
        cmocka_unit_test(test_generate),
        cmocka_unit_test(test_inspect),
        cmocka_unit_test(test_token_files),
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_units),
        cmocka_unit_test(test_own_programs),
        cmocka_unit_test(test_one_processor),
    };
    return cmocka_run_group_tests(tests, straight_run, command_teardown);
}
