/* SPDX-License-Identifier: MIT
 *
 * A GPT on a text of one's own, without the command: build, wrap, train, generate, save. The file that it writes is one that
 * Hugging Face's GPT2LMHeadModel opens.
 *
 *   ./train_gpt FILE RANKS STEPS [FOLDER]
 */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 8, SEQ = 32 }; /* sequences a step, over all ranks: a leaf each */

typedef struct settings {
    fsdp_dataset *data;
    fsdp_sampler sampler;
    int64_t steps;
    const char *folder; /* NULL: nothing is written */
} settings;

static fsdp_status print_byte(int32_t token, void *arg)
{
    if (arg != NULL) putchar(token); /* rank 0's */
    return FSDP_OK;
}

/* Leaf `leaf` of a step is the same sequence, with the same dropout, on any number of ranks. */
static fsdp_status train_leaf(const settings *s, fsdp_comm *world, fsdp_model *model, int64_t step, int leaf, double *sum, double *count)
{
    static const int64_t shape[] = { 1, SEQ };
    fsdp_tape *tape;
    fsdp_tensor *ids, *labels, *loss;
    int32_t in[SEQ], out[SEQ];
    FSDP_TRY(fsdp_dataset_batch(s->data, &s->sampler, step * BATCH + leaf, 1, in, out));
    FSDP_TRY(fsdp_tape_begin_with(&tape, world, &(fsdp_tape_opts){ .seed = 1, .step = (uint32_t)step, .first_sample = (uint32_t)leaf }));
    FSDP_TRY(fsdp_tensor_from_i32(&ids, tape, in, 2, shape));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, out, 2, shape));
    FSDP_TRY(fsdp_model_loss(model, tape, ids, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss)); /* before the loss is read: then both come out of one pass */
    FSDP_TRY(fsdp_loss_read(loss, sum, count));
    return fsdp_tape_end(tape);
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const settings *s = arg;
    const fsdp_gpt2_config config = { .vocab_size = 256, .n_positions = SEQ, .n_embd = 48, .n_layer = 2, .n_head = 4, .layer_norm_epsilon = 1e-5f,
                                      .initializer_range = 0.02f, .activation = FSDP_ACT_GELU_TANH, .resid_pdrop = 0.1f, .tie_word_embeddings = true,
                                      .scale_attn_weights = true };
    static const fsdp_optim_group no_decay[] = { { .pattern = "*bias" }, { .pattern = "*ln_*" } };
    const fsdp_schedule schedule = { .kind = FSDP_SCHEDULE_COSINE, .lr = 3e-3f, .min_lr = 3e-4f, .warmup = s->steps / 10, .steps = s->steps };
    fsdp_model *model;
    fsdp_optim *optim;
    FSDP_TRY(fsdp_model_create_gpt2(&model, &config));
    FSDP_TRY(fsdp_model_wrap(model, &(fsdp_wrap_opts){ .comm = world })); /* a unit a block, one around all */
    FSDP_TRY(fsdp_module_init_keyed(fsdp_model_module(model), FSDP_INIT_NORMAL, 1));
    fsdp_adamw_opts o = { .beta2 = 0.95f, .weight_decay = 0.1f, .groups = no_decay, .group_count = 2 };
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(fsdp_model_module(model)), &o));
    for (int64_t step = 0; step < s->steps; step++) {
        fsdp_exact_sum sums[2] = { 0 };
        double sum, count, norm;
        for (int leaf = fsdp_comm_rank(world); leaf < BATCH; leaf += fsdp_comm_size(world)) {
            FSDP_TRY(train_leaf(s, world, model, step, leaf, &sum, &count));
            fsdp_exact_sum_add(&sums[0], sum);
            fsdp_exact_sum_add(&sums[1], count);
        }
        FSDP_TRY(fsdp_comm_sum_exact_sums(world, sums, 2));
        fsdp_optim_set_lr(optim, fsdp_schedule_lr(&schedule, step));
        FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .clip = 1, .norm = &norm }));
        if (fsdp_comm_rank(world) == 0 && (step + 1 == s->steps || step % 20 == 0))
            printf("step %lld loss %.17g norm %.4f\n", (long long)step + 1, fsdp_exact_sum_value(&sums[0]) / fsdp_exact_sum_value(&sums[1]), norm);
    }
    const int32_t prompt[] = { 'T', 'h', 'e', ' ' };
    fsdp_generate_opts g = { .tokens = 80, .temperature = 0.8f, .top_k = 20, .seed = 1 };
    FSDP_TRY(fsdp_model_generate(model, prompt, 4, &g, print_byte, fsdp_comm_rank(world) == 0 ? "" : NULL));
    if (fsdp_comm_rank(world) == 0) putchar('\n');
    if (s->folder != NULL) FSDP_TRY(fsdp_model_save(model, s->folder));
    fsdp_optim_destroy(optim);
    fsdp_model_destroy(model);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    if (argc < 4) return fprintf(stderr, "usage: train_gpt FILE RANKS STEPS [FOLDER]\n"), 2;
    settings s = { .steps = atoi(argv[3]), .folder = argc > 4 ? argv[4] : NULL };
    fsdp_status st = fsdp_dataset_open(&s.data, &(fsdp_dataset_opts){ .paths = (const char *const *)&argv[1], .path_count = 1, .vocab_size = 256, .seq = SEQ });
    if (st == FSDP_OK) st = fsdp_sampler_init(&s.sampler, fsdp_dataset_tokens(s.data), SEQ, 1);
    if (st == FSDP_OK) st = fsdp_launch(&(fsdp_launch_opts){ .ranks = atoi(argv[2]) }, train, &s);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    fsdp_dataset_close(s.data);
    return st != FSDP_OK;
}
