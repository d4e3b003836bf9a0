/* SPDX-License-Identifier: MIT
 *
 * Ready models, made of modules: built from a preset or a Hugging Face config.json, read from and written to Hugging
 * Face's files.
 *
 *     fsdp_model_create(&model, "gpt2-3m");
 *     fsdp_model_wrap(model, &(fsdp_wrap_opts){ .comm = comm });        a unit for each block, one around all
 *     fsdp_module_init_keyed(fsdp_model_module(model), FSDP_INIT_NORMAL, seed);
 *     fsdp_tape_begin(&tape, comm);
 *     fsdp_model_loss(model, tape, ids, labels, &loss);
 *
 * Threads: one at a time for a model. */
#ifndef FSDP_MODELS_H
#define FSDP_MODELS_H

#include <fsdp/nn.h>

FSDP_BEGIN_DECLS

typedef struct fsdp_model fsdp_model;

/* GPT-2 (Radford et al., 2019), with the names of Hugging Face's config.json. */
typedef struct fsdp_gpt2_config {
    int64_t vocab_size, n_positions, n_embd, n_layer, n_head;
    int64_t n_inner; /* 0: 4 n_embd */
    float layer_norm_epsilon, initializer_range;
    float resid_pdrop, embd_pdrop, attn_pdrop;
    fsdp_activation activation; /* FSDP_ACT_GELU_TANH ("gelu_new") or FSDP_ACT_GELU_ERF ("gelu") */
    bool tie_word_embeddings;
    bool scale_attn_weights, scale_attn_by_inverse_layer_idx;
} fsdp_gpt2_config;

/* "gpt2-3m" (4 layers, 256 wide, 4 heads, 256 bytes, context 256), "gpt2-10m" (6, 384, 6, bytes, 256), "gpt2-124m" (12,
 * 768, 12, vocabulary 50257, context 1024). Dropout 0. FSDP_ERR_INVALID lists the names. */
FSDP_API fsdp_status fsdp_gpt2_preset(fsdp_gpt2_config *out, const char *name) FSDP_NODISCARD;
/* Reads and writes config.json. What this version cannot do (an architecture, an activation) is refused by name. */
FSDP_API fsdp_status fsdp_gpt2_config_read(fsdp_gpt2_config *out, const char *path) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_gpt2_config_write(const fsdp_gpt2_config *config, const char *path) FSDP_NODISCARD;
/* The same as text in memory; `file` is what messages call it. *out: freed with fsdp_free_text(). */
FSDP_API fsdp_status fsdp_gpt2_config_parse(fsdp_gpt2_config *out, const char *text, const char *file) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_gpt2_config_text(const fsdp_gpt2_config *config, char **out) FSDP_NODISCARD;
FSDP_API void fsdp_free_text(char *text);

/* By a preset's name, the path of a config.json, or of a folder that has one. Not collective; parameters are not yet
 * held anywhere. */
FSDP_API fsdp_status fsdp_model_create(fsdp_model **out, const char *what) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_model_create_gpt2(fsdp_model **out, const fsdp_gpt2_config *config) FSDP_NODISCARD;
/* Collective once it is wrapped. NULL is accepted. */
FSDP_API void fsdp_model_destroy(fsdp_model *model);

FSDP_API fsdp_module *fsdp_model_module(fsdp_model *model);
FSDP_API const fsdp_gpt2_config *fsdp_model_gpt2_config(const fsdp_model *model);
/* Sets all three dropouts. */
FSDP_API fsdp_status fsdp_model_set_dropout(fsdp_model *model, float p) FSDP_NODISCARD;

/* Activation checkpointing of every block (fsdp_module_set_recompute). */
FSDP_API void fsdp_model_set_recompute(fsdp_model *model, bool on);

/* Collective. Each block becomes a unit ("h.3"), and the rest, with the embeddings, one around them ("root"); or those modules that
 * opts->policy says (wrap.h), and one around them. */
FSDP_API fsdp_status fsdp_model_wrap(fsdp_model *model, const fsdp_wrap_opts *opts) FSDP_NODISCARD;

/* Collective. ids and labels: i32 [B, T] on the tape, T at most n_positions; labels are already shifted, -100 does not
 * count. loss: see fsdp_op_cross_entropy(). */
FSDP_API fsdp_status fsdp_model_loss(fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor *labels, fsdp_tensor **loss) FSDP_NODISCARD;
/* Collective. All scores [B, T, V]: for tests and small models. */
FSDP_API fsdp_status fsdp_model_logits(fsdp_model *model, fsdp_tape *tape, fsdp_tensor *ids, fsdp_tensor **logits) FSDP_NODISCARD;

/* Floating-point operations of a forward and backward over `tokens` tokens in sequences of `seq`, for speeds in FLOP/s. */
FSDP_API double fsdp_model_flops(const fsdp_model *model, int64_t tokens, int64_t seq);

/* ---- files ---- */

/* Collective. Fills the model, which is wrapped, from a folder or .safetensors file with Hugging Face's names (with or
 * without "transformer."; mask buffers are ignored). Each rank reads its slices. Missing, unexpected and misshapen
 * tensors are all listed in one error. */
FSDP_API fsdp_status fsdp_model_load(fsdp_model *model, const char *path) FSDP_NODISCARD;
/* Collective. Writes folder/model.safetensors and folder/config.json, unit by unit: no rank ever holds the model whole.
 * Rank 0 writes. An existing model there is replaced only when the new one is complete. */
FSDP_API fsdp_status fsdp_model_save(fsdp_model *model, const char *folder) FSDP_NODISCARD;

/* ---- generation ---- */

typedef struct fsdp_generate_opts {
    int64_t tokens;    /* how many to make */
    float temperature; /* 0: always the likeliest */
    int top_k;         /* 0: all */
    uint64_t seed;
} fsdp_generate_opts;

/* Called with each new token; anything but FSDP_OK ends the generation with that status. */
typedef fsdp_status (*fsdp_token_fn)(int32_t token, void *arg);

/* Collective (every rank computes the same). Continues `prompt` (at least one token), keeping keys and values. Past the
 * context it goes on from the last half of what fits. */
FSDP_API fsdp_status fsdp_model_generate(fsdp_model *model, const int32_t *prompt, int64_t count, const fsdp_generate_opts *opts,
                                         fsdp_token_fn fn, void *arg) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
