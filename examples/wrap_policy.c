/* SPDX-License-Identifier: MIT
 *
 * Which modules become units: a GPT wrapped by three policies. Each makes other units, and prints them; the loss is the same to the last
 * bit.
 *
 *     wrap_policy [RANKS] */
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 64, SEQ = 16, STEPS = 5, LEAVES = 4 };

/* A policy of one's own: whatever has a thousand parameters left, but norms never; the last block stays whole. */
static bool decide(const fsdp_wrap_candidate *c, fsdp_wrap_opts *opts, void *arg)
{
    (void)arg;
    if (strcmp(c->name, "h.2") == 0) {
        opts->mode = FSDP_MODE_OPTIMIZER;
        return true;
    }
    return c->numel >= 1000 && strcmp(c->type, "layer_norm") != 0 && c->depth > 1;
}

static fsdp_status train(fsdp_model *model, fsdp_comm *comm, double *last)
{
    fsdp_optim *optim;
    FSDP_TRY(fsdp_optim_create_adamw(&optim, fsdp_module_units(fsdp_model_module(model)), &(fsdp_adamw_opts){ .lr = 1e-2f }));
    for (int step = 0; step < STEPS; step++)
        for (int leaf = fsdp_comm_rank(comm); leaf < LEAVES; leaf += fsdp_comm_size(comm)) {
            fsdp_tape *tape;
            fsdp_tensor *ids, *labels, *loss;
            int32_t x[SEQ], y[SEQ];
            for (int i = 0; i < SEQ; i++) {
                x[i] = (7 * (step * LEAVES + leaf) + 3 * i) % VOCAB;
                y[i] = (x[i] + 3) % VOCAB;
            }
            FSDP_TRY(fsdp_tape_begin(&tape, comm));
            FSDP_TRY(fsdp_tensor_from_i32(&ids, tape, x, 2, (int64_t[]){ 1, SEQ }));
            FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 2, (int64_t[]){ 1, SEQ }));
            FSDP_TRY(fsdp_model_loss(model, tape, ids, labels, &loss));
            FSDP_TRY(fsdp_backward(tape, loss));
            FSDP_TRY(fsdp_loss_mean(comm, loss, last));
            FSDP_TRY(fsdp_tape_end(tape));
            if (leaf + fsdp_comm_size(comm) >= LEAVES) FSDP_TRY(fsdp_optim_step(optim, NULL));
        }
    fsdp_optim_destroy(optim);
    return FSDP_OK;
}

static fsdp_status run(fsdp_comm *world, void *arg)
{
    (void)arg;
    const fsdp_wrap_policy policies[] = {
        { .types = (const char *[]){ "block" }, .type_count = 1, .per_unit = 2 }, /* two blocks in a unit */
        { .names = (const char *[]){ "h.*.mlp", "wte" }, .name_count = 2 },
        { .decide = decide },
    };
    fsdp_gpt2_config config = { .vocab_size = VOCAB, .n_positions = SEQ, .n_embd = 24, .n_layer = 3, .n_head = 3, .layer_norm_epsilon = 1e-5f,
                                .initializer_range = 0.1f, .activation = FSDP_ACT_GELU_TANH, .tie_word_embeddings = true, .scale_attn_weights = true };
    double first = 0, loss = 0;
    for (int i = 0; i < 3; i++) {
        fsdp_model *model;
        char *table;
        FSDP_TRY(fsdp_model_create_gpt2(&model, &config));
        FSDP_TRY(fsdp_model_wrap(model, &(fsdp_wrap_opts){ .comm = world, .policy = &policies[i], .keep_whole_below = i == 1 ? 512 : 0 }));
        FSDP_TRY(fsdp_module_init_keyed(fsdp_model_module(model), FSDP_INIT_NORMAL, 1));
        FSDP_TRY(fsdp_wrap_table(fsdp_model_module(model), &table));
        FSDP_TRY(train(model, world, &loss));
        if (fsdp_comm_rank(world) == 0) printf("%sloss %.9f\n\n", table, loss);
        fsdp_free_text(table);
        fsdp_model_destroy(model);
        if (i == 0) first = loss;
        FSDP_FAIL_IF(loss != first, FSDP_ERR_INTERNAL, "policy %d: loss %.17g, not %.17g", i, loss, first);
    }
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_launch_opts opts = { .ranks = argc > 1 ? atoi(argv[1]) : 2, .threads = 1 };
    if (fsdp_launch(&opts, run, NULL) == FSDP_OK) return 0;
    fprintf(stderr, "%s\n", fsdp_last_error());
    return 1;
}
