/* SPDX-License-Identifier: MIT
 *
 * What a user is told: help for each command; a wrong use ends with status 2 and a failure with 1, each with one message that names
 * the option, the file and the numbers; and nothing is made or changed. */
#include "support/command.h"
#include "support/testing.h"

#include <sys/stat.h>
#include <unistd.h>

static void test_help(void **state)
{
    (void)state;
    static const char *const commands[] = { "train", "eval", "generate", "convert", "inspect", "run", "info" };
    command_result *r = command_ok("--help");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) assert_non_null(strstr(r->out, commands[i]));
    command_ok("-h");
    command_ok("help");
    assert_non_null(strstr(command_ok("--version")->out, "fsdp 0."));
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        char usage[64];
        snprintf(usage, sizeof(usage), "usage: fsdp %s", commands[i]);
        r = command_ok("%s --help", commands[i]);
        assert_non_null(strstr(r->out, usage));
        assert_int_equal(r->err[0], '\0');
    }
    /* help comes before what is wrong with the rest */
    assert_non_null(strstr(command_ok("train --steps 3 --help --out")->out, "usage: fsdp train"));
    static command_result bare;
    command_run(&bare, " ");
    assert_int_equal(bare.code, 2);
    assert_non_null(strstr(bare.err, "usage: fsdp COMMAND"));
    assert_non_null(strstr(command_ok("info")->out, "matrix products"));
}

typedef struct bad {
    int code;
    const char *message, *arguments;
} bad;

static void check_table(const bad *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        command_result *r = command_fails(b[i].code, b[i].message, "%s", b[i].arguments);
        if (r->out[0] != '\0') fail_msg("fsdp %s: printed: %s", b[i].arguments, r->out);
        if (path_there("new")) fail_msg("fsdp %s: made the folder", b[i].arguments);
    }
}

#define CHECK(table) check_table((table), sizeof(table) / sizeof((table)[0]))

static void test_wrong_use(void **state)
{
    (void)state;
    static const bad table[] = {
        { 2, "no command \"tarin\"; did you mean \"train\"", "tarin" },
        { 2, "no command \"xyz\"", "xyz" },
        { 2, "no command \"--frobnicate\"", "--frobnicate" },
        { 2, "--out DIR is required", "train" },
        { 2, "--model is required", "train --out new" },
        { 2, "--data is required", "train --model config.json --out new" },
        { 2, "--out needs a value", "train --model config.json --out" },
        { 2, "there is no option --modle; did you mean --model?", "train --modle x" },
        { 2, "did you mean --micro-batch?", "train --microbatch 3" },
        { 2, "did you mean --weight-decay?", "train --weightdecay=3" },
        { 2, "did you mean --out?", "train --output x" },
        { 2, "there is no option --frobnicate (fsdp train --help)", "train --frobnicate 1" },
        { 2, "there is no option --epochs", "train --epochs 3" },
        { 2, "there is no option -x", "train -x" },
        { 2, "--quiet takes no value", "train --out new --quiet=1" },
        { 2, "unexpected argument \"extra\"", "train extra --out new" },
        { 2, "unexpected argument \"more\"", "train --out new more" },
        { 2, "unexpected argument", "train --out new -- more" },
        { 2, "--steps x: must be a whole number", "train --out new --steps x" },
        { 2, "--steps 1.5: must be a whole number", "train --out new --steps 1.5" },
        { 2, "--steps : must be a whole number", "train --out new --steps ''" },
        { 2, "--steps 0: must be 1 or more", "train --out new --steps 0" },
        { 2, "--steps 99999999999999999999: must be a whole number", "train --out new --steps 99999999999999999999" },
        { 2, "--ranks 0: must be 1 to 4096", "train --out new --ranks 0" },
        { 2, "--ranks -1: must be 1 to 4096", "train --out new --ranks -1" },
        { 2, "--threads 5000", "train --out new --threads 5000" },
        { 2, "--lr nan: must be a number", "train --out new --lr nan" },
        { 2, "--lr -1: must be 0 or more", "train --out new --lr -1" },
        { 2, "--dropout 1: must be 0 to 0.99", "train --out new --dropout 1" },
        { 2, "--beta1 1: must be", "train --out new --beta1 1" },
        { 2, "must be one of cosine|linear|constant", "train --out new --schedule sine" },
        { 2, "must be one of full|grad-op|optimizer|none", "train --out new --mode zero3" },
        { 2, "must be one of shm|copy", "train --out new --transport mpi" },
        { 2, "must be one of cpu|guard", "train --out new --device cuda" },
    };
    CHECK(table);
}

#define RUN "train --model config.json --data text.txt --out new "

static void test_flags_that_do_not_go_together(void **state)
{
    (void)state;
    static const bad table[] = {
        { 2, "--offload params,: \"\" is none of params, grads, optim", RUN "--offload params, --device guard" },
        { 2, "--offload params,all: \"all\" is none of params, grads, optim", RUN "--offload params,all --device guard" },
        { 2, "\"optimizer\" is none of params, grads, optim", RUN "--offload params,grads,optim,params,grads,optim,params,grads,optim,params,grads,optimizer --device guard" },
        { 2, "--offload has no effect with --device cpu", RUN "--offload params,grads,optim" },
        { 2, "--param-dtype f64", RUN "--param-dtype f64" },
        { 2, "--reshard-after-forward 2 is for --mode full", RUN "--reshard-after-forward 2 --mode grad-op --ranks 2" },
        { 2, "6 ranks share a copy, and groups of 4 do not divide them", RUN "--reshard-after-forward 4 --ranks 6 --batch 6 --micro-batch 1" },
        { 2, "--mesh 2: give it as replicas x shards", RUN "--mesh 2" },
        { 2, "--mesh 2x: give it as replicas x shards", RUN "--mesh 2x" },
        { 2, "--mesh 0x2: give it as replicas x shards", RUN "--mesh 0x2" },
        { 2, "--mesh 2x2x2: give it as replicas x shards", RUN "--mesh 2x2x2" },
        { 2, "--mesh 2x2 is for 2 x 2 = 4 ranks, and --ranks is 2", RUN "--mesh 2x2 --ranks 2" },
        { 2, "--mesh 1x2 asks for 2 shards, but --mode none shards nothing", RUN "--mesh 1x2 --mode none" },
        { 2, "6 micro-batches (--batch 6 / --micro-batch 1), which 4 ranks do not divide", RUN "--ranks 4 --batch 6 --micro-batch 1" },
        { 2, "--batch 8 is no multiple of --micro-batch 5", RUN "--micro-batch 5" },
        { 2, "--batch 4 is no multiple of --micro-batch 8", RUN "--batch 4 --micro-batch 8" },
        { 2, "--seq 17 is more than the model's 16 positions", RUN "--seq 17" },
        { 2, "--stop-after 5 is more than --steps 3", RUN "--stop-after 5 --steps 3" },
        { 2, "--min-lr 1 is more than --lr 0.1", RUN "--lr 0.1 --min-lr 1" },
        { 2, "--min-lr has no effect with --schedule constant", RUN "--schedule constant --min-lr 0" },
        { 2, "--warmup 30 is more than --steps 20", RUN "--warmup 30 --steps 20" },
        { 2, "--val-fraction cuts the evaluation data from --data, but --val gives it", RUN "--val val.txt --val-fraction 0.2" },
        { 2, "--eval-every and --eval-batches have no effect", RUN "--val-fraction 0 --eval-every 2" },
        { 2, "--loss-scale static: must be dynamic, dynamic:N, or N, a number greater than 0", RUN "--loss-scale static" },
        { 2, "--loss-scale 0: must be", RUN "--loss-scale 0" },
        { 2, "--loss-scale inf: must be", RUN "--loss-scale inf" },
        { 2, "--loss-scale 1e40: must be", RUN "--loss-scale 1e40" },
        { 2, "--ema 1: must be 1e-06 to 0.999999", RUN "--ema 1" },
        { 2, "--ema 0: must be", RUN "--ema 0" },
        { 2, "--clip-norm-type 0: must be a number greater than 0, or inf", RUN "--clip-norm-type 0" },
        { 2, "--clip-norm-type two: must be", RUN "--clip-norm-type two" },
        { 2, "--clip-norm-type nan: must be", RUN "--clip-norm-type nan" },
        { 2, "leave --no-progress out", RUN "--quiet --no-progress" },
        { 2, "leave --log-every out", RUN "--quiet --log-every 2" },
        { 2, "not UTF-8", "train --model config.json --data \"$(printf 'caf\\351.txt')\" --out new" },
    };
    CHECK(table);
}

static void test_models(void **state)
{
    (void)state;
    mkdir("empty-dir", 0777);
    assert_int_equal(system("printf '{\"vocab_size\": 0}' >bad.json; printf '{\"model_type\": \"llama\"}' >llama.json; printf '{\"vocab_size\": ' >cut.json; "
                            "printf '{\"vocab_size\": 13, \"n_positions\": 8, \"n_embd\": 7, \"n_layer\": 1, \"n_head\": 2}' >odd.json"),
                     0);
    static const bad table[] = {
        { 1, "models are: gpt2-3m, gpt2-10m, gpt2-124m", "train --model gpt2-9m --data text.txt --out new" },
        { 1, "empty-dir/config.json: there is no such file", "train --model empty-dir --data text.txt --out new" },
        { 1, "text.txt: not valid JSON", "train --model text.txt --data text.txt --out new" },
        { 1, "bad.json: the field \"vocab_size\"", "train --model bad.json --data text.txt --out new" },
        { 1, "model_type is \"llama\"; this version has gpt2", "train --model llama.json --data text.txt --out new" },
        { 1, "cut.json: not valid JSON at line 1", "train --model cut.json --data text.txt --out new" },
        { 2, "--wrap blocks: there is block, size:N, name:PATTERN and none", "train --model config.json --data text.txt --out new --wrap blocks" },
        { 2, "size:x: how many parameters", "train --model config.json --data text.txt --out new --wrap size:x" },
        { 2, "size:0: how many parameters", "train --model config.json --data text.txt --out new --wrap size:0" },
        { 2, "name:h.0,: an empty pattern", "train --model config.json --data text.txt --out new --wrap name:h.0," },
        { 2, "--wrap: fsdp_wrap_policy: no module is called \"h.7\"", "train --model config.json --data text.txt --out new --wrap name:h.7" },
        { 2, "--max-unsharded-mb has no effect with --mode none", "train --model config.json --data text.txt --out new --max-unsharded-mb 1 --mode none" },
        { 2, "--keep-whole-below has no effect with --mode optimizer", "train --model config.json --data text.txt --out new --keep-whole-below 99 --mode optimizer" },
        { 1, "odd.json: n_embd 7 is no multiple of n_head 2", "train --model odd.json --data text.txt --out new" },
    };
    CHECK(table);
}

#define DATA(file) "train --model g13.json --out new --val-fraction 0 --data " file

static void test_data(void **state)
{
    (void)state;
    /* files that are not what they should be */
    assert_int_equal(system(": >empty.txt; : >empty.bin; printf 'eight to' >8.txt; printf 'nine toke' >9.txt; head -c 16 tokens.bin >8.bin; head -c 18 tokens.bin >9.bin; "
                            "head -c 4999 tokens.bin >odd.bin; (head -c 4998 tokens.bin; printf '\\015\\000') >bad.bin; "
                            "(printf '\\330\\344\\064\\001'; head -c 1020 /dev/zero) >header.bin; (printf '\\001\\064\\344\\330'; head -c 5020 /dev/zero) >swapped.bin; "
                            "printf 'version https://git-lfs.github.com/spec/v1\\noid sha256:0\\nsize 9\\n' >lfs.bin; mkdir -p folder; head -c 600 /dev/zero | gzip >a.gz"),
                     0);
    static const bad table[] = {
        { 1, "nowhere.txt: there is no such file", DATA("nowhere.txt") },
        { 1, "folder: this is a folder", DATA("folder") },
        { 1, "empty.txt: the file is empty", DATA("empty.txt") },
        { 1, "empty.bin: the file is empty", DATA("empty.bin") },
        { 1, "the data needs at least 9 tokens (seq 8 and one to predict), has 8", DATA("8.bin") },
        { 1, "odd.bin", DATA("odd.bin") },
        { 1, "bad.bin", DATA("bad.bin") },
        { 1, "13", DATA("bad.bin") },   /* the id, */
        { 1, "2499", DATA("bad.bin") }, /* and where it is */
        { 1, "header.bin", DATA("header.bin") },
        { 1, "swapped.bin", DATA("swapped.bin") },
        { 1, "git-lfs", DATA("lfs.bin") },
        { 1, "a.gz", DATA("a.gz") },
        { 1, "no*.bin", DATA("'no*.bin'") },
        { 1, "text.txt", DATA("text.txt") }, /* bytes, and a vocabulary of 13 */
        { 1, "--val: ", "train --model config.json --data text.txt --val empty.txt --out new" },
        { 1, "the training part needs at least 17 tokens (seq 16 and one to predict), has 8 (of 9; val_fraction 0.1)",
          "train --model config.json --data 9.txt --out new" },
    };
    CHECK(table);
    /* the smallest that will do: one sequence and its label */
    command_ok("train --model g13.json --val-fraction 0 --data 9.bin --out nine --steps 2 --quiet");
    command_ok("train --model config.json --val-fraction 0 --seq 8 --data 9.txt --out nine-text --steps 2 --ranks 2 --quiet");
}

static void test_out(void **state)
{
    (void)state;
    assert_int_equal(system("mkdir -p used used2 used3 free; touch used/run.json used2/log.jsonl used3/model.safetensors free/notes.txt"), 0);
    static const bad table[] = {
        { 1, "text.txt is there and no folder", "train --model config.json --data text.txt --out text.txt" },
        { 1, "text.txt/below", "train --model config.json --data text.txt --out text.txt/below" },
        { 1, "used/run.json is there: the folder holds a run already. Add --resume latest", "train --model config.json --data text.txt --out used" },
        { 1, "used2/log.jsonl is there", "train --model config.json --data text.txt --out used2" },
        { 1, "used3/model.safetensors is there", "train --model config.json --data text.txt --out used3" },
        { 1, "there is no run in new", "train --out new --resume latest" },
        { 1, "used/run.json cannot be read", "train --out used --resume latest" },
        { 1, "there is no nothing", "train --out new --resume nothing" },
        { 1, "free is no checkpoint", "train --out new --resume free" },
    };
    CHECK(table);
    command_ok("train --model config.json --data text.txt --out free --steps 1 --quiet"); /* other files are in nobody's way */
    assert_true(path_there("free/notes.txt") && path_there("free/model.safetensors"));
    command_ok("train --model config.json --data text.txt --out on/the/way --steps 1 --quiet");
    assert_true(path_there("on/the/way/run.json"));
    /* read-only, as root sees it: a file system that is */
    static command_result r;
    shell_run(&r, "mkdir -p readonly; unshare -m sh -c 'mount -t tmpfs -o ro none readonly && exec $FSDP train --model config.json --data text.txt --out readonly --steps 1'");
    if (strstr(r.err, "unshare") == NULL && strstr(r.err, "mount") == NULL) {
        assert_int_equal(r.code, 1);
        assert_non_null(strstr(r.err, "readonly"));
        assert_non_null(strstr(r.err, "Read-only file system"));
    }
}

static void test_other_commands(void **state)
{
    (void)state;
    command_ok("train --model config.json --data text.txt --out model --steps 1 --quiet");
    command_ok("train --model g13.json --data tokens.bin --out model13 --steps 1 --quiet");
    assert_int_equal(system("mkdir -p half nothing; cp model/config.json half; printf x >1.txt"), 0);
    static const bad table[] = {
        { 2, "--model DIR is required", "eval --data text.txt" },
        { 2, "--data FILE is required", "eval --model model" },
        { 1, "config.json is no folder", "eval --model config.json --data text.txt" },
        { 1, "there is no nothing/config.json", "eval --model nothing --data text.txt" },
        { 1, "fsdp convert makes a model of a checkpoint", "eval --model model/checkpoints/step-00000001 --data text.txt" },
        { 1, "half: there is no .safetensors file", "eval --model half --data text.txt" },
        { 2, "--seq 17 is more than the model's 16", "eval --model model --data text.txt --seq 17" },
        { 1, "at least 2 tokens", "eval --model model --data 1.txt" },
        { 1, "13", "eval --model model13 --data text.txt" },
        { 2, "--model DIR is required", "generate" },
        { 2, "the prompt is empty", "generate --model model --prompt ''" },
        { 2, "--prompt and --prompt-ids: give one", "generate --model model --prompt a --prompt-ids 1" },
        { 2, "256 is not in the vocabulary of 256", "generate --model model --prompt-ids 1,256" },
        { 2, "-1 is not in the vocabulary", "generate --model model --prompt-ids -1" },
        { 2, "\"x\" is no list", "generate --model model --prompt-ids 1,x" },
        { 2, "--prompt-ids is empty", "generate --model model --prompt-ids ''" },
        { 2, "vocabulary of 13", "generate --model model13 --prompt a" },
        { 2, "--top-k has no effect with --temperature 0", "generate --model model --temperature 0 --top-k 3" },
        { 2, "--seed has no effect with --temperature 0", "generate --model model --temperature 0 --seed 3" },
        { 2, "--tokens 0: must be 1 or more", "generate --model model --tokens 0" },
        { 2, "two arguments", "convert model" },
        { 2, "two arguments", "convert a b c" },
        { 2, "there is no option --force", "convert model out --force" },
        { 1, "nothing is no checkpoint, and has none", "convert nothing new" },
        { 1, "text.txt is no checkpoint", "convert text.txt new" },
        { 1, "text.txt", "convert model text.txt" },
        { 2, "inspect: what?", "inspect" },
        { 2, "there is no option --all", "inspect --all" },
        { 1, "no file or folder \"nowhere\"", "inspect nowhere" },
        { 1, "text.txt: not a safetensors file", "inspect text.txt" },
        { 2, "no program", "run" },
        { 2, "no program", "run -n 2" },
        { 2, "-n x: must be 1 to 4096", "run -n x true" },
        { 2, "-n 2.5", "run -n 2.5 true" },
        { 2, "-n 0", "run -n 0 true" },
        { 2, "no option -n", "run -n" },
        { 2, "must be shm or copy", "run --transport mpi true" },
        { 2, "no option --frob", "run --frob true" },
        { 1, "cannot run \"no-such-program\": No such file or directory", "run -n 2 no-such-program" },
        { 1, "rank ", "run -n 2 false" },
        { 2, "unexpected argument", "info more" },
    };
    CHECK(table);
    command_ok("run -n 2 true");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_wrong_use),
        cmocka_unit_test(test_flags_that_do_not_go_together),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_data),
        cmocka_unit_test(test_out),
        cmocka_unit_test(test_other_commands),
    };
    return cmocka_run_group_tests(tests, command_setup, command_teardown);
}
