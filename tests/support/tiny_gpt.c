/* SPDX-License-Identifier: MIT */
#include "support/tiny_gpt.h"

#include "support/testing.h"

#include <sys/mman.h>

fsdp_gpt2_config tiny_gpt_config(void)
{
    return (fsdp_gpt2_config){ .vocab_size = TINY_VOCAB,
                               .n_positions = TINY_CONTEXT,
                               .n_embd = TINY_WIDTH,
                               .n_layer = TINY_LAYERS,
                               .n_head = TINY_HEADS,
                               .layer_norm_epsilon = 1e-5f,
                               .initializer_range = 0.3f,
                               .activation = FSDP_ACT_GELU_TANH,
                               .tie_word_embeddings = true,
                               .scale_attn_weights = true };
}

fsdp_status tiny_gpt_create(tiny_gpt *t, fsdp_comm *comm, const tiny_gpt_opts *o)
{
    static const fsdp_optim_group no_decay[] = { { .pattern = "*bias" }, { .pattern = "*ln_*" } };
    fsdp_gpt2_config config = o->config.vocab_size > 0 ? o->config : tiny_gpt_config();
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = o->dropout;
    *t = (tiny_gpt){ .comm = comm };
    FSDP_TRY(fsdp_device_open(&t->device, o->device != NULL ? o->device : "cpu"));
    FSDP_TRY(fsdp_model_create_gpt2(&t->model, &config));
    fsdp_wrap_opts wo = { .comm = comm, .mode = o->mode, .shards = o->shards, .compute_device = t->device, .prefetch = o->prefetch,
                          .policy = o->policy, .keep_whole_below = o->keep_whole_below };
    FSDP_TRY(fsdp_model_wrap(t->model, &wo));
    fsdp_model_set_recompute(t->model, o->recompute);
    FSDP_TRY(fsdp_module_init_keyed(fsdp_model_module(t->model), FSDP_INIT_NORMAL, 7));
    fsdp_adamw_opts ao = { .lr = o->lr > 0 ? o->lr : 0.01f, .beta2 = 0.95f, .weight_decay = 0.1f, .groups = no_decay, .group_count = 2 };
    return fsdp_optim_create_adamw(&t->optim, fsdp_module_units(fsdp_model_module(t->model)), &ao);
}

void tiny_gpt_destroy(tiny_gpt *t)
{
    fsdp_optim_destroy(t->optim);
    fsdp_model_destroy(t->model);
    fsdp_device_close(t->device);
}

void tiny_gpt_data(int64_t sequence, int32_t ids[TINY_CONTEXT], int32_t labels[TINY_CONTEXT])
{
    int32_t at = (int32_t)(fsdp_philox_uniform(21, "first", sequence) * TINY_VOCAB);
    for (int i = 0; i < TINY_CONTEXT; i++) {
        bool noise = fsdp_philox_uniform(21, "noise", sequence * TINY_CONTEXT + i) < 0.2f;
        ids[i] = at;
        at = noise ? (int32_t)(fsdp_philox_uniform(21, "other", sequence * TINY_CONTEXT + i) * TINY_VOCAB) : (5 * at + 3) % TINY_VOCAB;
        labels[i] = at;
    }
    labels[sequence % TINY_CONTEXT] = FSDP_DATA_NO_LABEL; /* rows weigh what they count */
}

static fsdp_status leaf(tiny_gpt *t, int64_t step, int leaf, int leaves, bool eval, double *sum, double *count)
{
    static const int64_t shape[] = { 1, TINY_CONTEXT };
    fsdp_tape *tape;
    fsdp_tensor *x, *y, *loss;
    int32_t ids[TINY_CONTEXT], labels[TINY_CONTEXT];
    tiny_gpt_data(step * leaves + leaf, ids, labels);
    fsdp_tape_opts o = { .device = t->device, .eval = eval, .seed = 5, .step = (uint32_t)step, .first_sample = (uint32_t)leaf };
    FSDP_TRY(fsdp_tape_begin_with(&tape, t->comm, &o));
    FSDP_TRY(fsdp_tensor_from_i32(&x, tape, ids, 2, shape));
    FSDP_TRY(fsdp_tensor_from_i32(&y, tape, labels, 2, shape));
    FSDP_TRY(fsdp_model_loss(t->model, tape, x, y, &loss));
    if (!eval) FSDP_TRY(fsdp_backward(tape, loss));
    FSDP_TRY(fsdp_loss_read(loss, sum, count));
    return fsdp_tape_end(tape);
}

fsdp_status tiny_gpt_step(tiny_gpt *t, int64_t step, int leaves, double *loss, double *norm)
{
    fsdp_exact_sum sums[2] = { 0 };
    double sum, count, unused;
    fsdp_comm_set_step(t->comm, step);
    for (int i = fsdp_comm_rank(t->comm); i < leaves; i += fsdp_comm_size(t->comm)) {
        FSDP_TRY(leaf(t, step, i, leaves, false, &sum, &count));
        fsdp_exact_sum_add(&sums[0], sum);
        fsdp_exact_sum_add(&sums[1], count);
    }
    FSDP_TRY(fsdp_comm_sum_exact_sums(t->comm, sums, 2));
    if (loss != NULL) *loss = fsdp_exact_sum_value(&sums[0]) / fsdp_exact_sum_value(&sums[1]);
    return fsdp_optim_step(t->optim, &(fsdp_step_opts){ .clip = 0.5f, .norm = norm != NULL ? norm : &unused });
}

fsdp_status tiny_gpt_eval(tiny_gpt *t, int64_t first, int64_t sequences, double *loss)
{
    double sum, count, sums = 0, counts = 0;
    for (int64_t i = 0; i < sequences; i++) {
        FSDP_TRY(leaf(t, first + i, 0, 1, true, &sum, &count));
        sums += sum;
        counts += count;
    }
    *loss = sums / counts;
    return FSDP_OK;
}

fsdp_status tiny_gpt_read(tiny_gpt *t, float *out)
{
    const fsdp_module_param_info *p;
    int n;
    FSDP_TRY(fsdp_module_params(fsdp_model_module(t->model), &p, &n));
    for (int i = 0; i < n; i++) {
        FSDP_TRY(fsdp_unit_read_param(p[i].unit, p[i].index, out));
        out += fsdp_unit_param_numel(p[i].unit, p[i].index);
    }
    return FSDP_OK;
}

void *shared_memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    return p;
}
