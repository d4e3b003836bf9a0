/* SPDX-License-Identifier: MIT
 *
 * GPT-2's settings: presets, and Hugging Face's config.json. */
#include <fsdp/models.h>

#include "base/alloc.h"
#include "base/error.h"
#include "format/fileio.h"
#include "format/json.h"
#include "models/model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const struct {
    const char *name;
    int64_t layers, width, heads, vocab, positions;
} presets[] = {
    { "gpt2-3m", 4, 256, 4, 256, 256 },
    { "gpt2-10m", 6, 384, 6, 256, 256 },
    { "gpt2-124m", 12, 768, 12, 50257, 1024 },
};

static fsdp_gpt2_config defaults(void)
{
    return (fsdp_gpt2_config){ .layer_norm_epsilon = 1e-5f,
                               .initializer_range = 0.02f,
                               .activation = FSDP_ACT_GELU_TANH,
                               .tie_word_embeddings = true,
                               .scale_attn_weights = true };
}

fsdp_status fsdp_gpt2_preset(fsdp_gpt2_config *out, const char *name)
{
    for (size_t i = 0; i < sizeof(presets) / sizeof(presets[0]); i++) {
        if (strcmp(presets[i].name, name) != 0) continue;
        *out = defaults();
        out->n_layer = presets[i].layers;
        out->n_embd = presets[i].width;
        out->n_head = presets[i].heads;
        out->vocab_size = presets[i].vocab;
        out->n_positions = presets[i].positions;
        return FSDP_OK;
    }
    FSDP_FAIL(FSDP_ERR_INVALID, "no model is called \"%s\", and no file or folder either; models are: gpt2-3m, gpt2-10m, gpt2-124m", name);
}

/* ---- config.json ---- */

static const struct {
    const char *name;
    fsdp_activation activation;
} activations[] = {
    { "gelu_new", FSDP_ACT_GELU_TANH }, { "gelu_pytorch_tanh", FSDP_ACT_GELU_TANH }, { "gelu_fast", FSDP_ACT_GELU_TANH },
    { "gelu", FSDP_ACT_GELU_ERF },      { "gelu_python", FSDP_ACT_GELU_ERF },        { "relu", FSDP_ACT_RELU },
};

static fsdp_status read_activation(fsdpi_json_object o, fsdp_activation *out)
{
    const char *name;
    FSDP_TRY(fsdpi_json_string_or(o, "activation_function", "gelu_new", &name));
    for (size_t i = 0; i < sizeof(activations) / sizeof(activations[0]); i++) {
        if (strcmp(activations[i].name, name) != 0) continue;
        *out = activations[i].activation;
        return FSDP_OK;
    }
    FSDP_FAIL(FSDP_ERR_UNSUPPORTED, "%s: activation_function is \"%.40s\"; this version has gelu_new, gelu and relu", o.file, name);
}

static fsdp_status read_fields(fsdpi_json_object o, fsdp_gpt2_config *c)
{
    const char *type;
    bool cross;
    double eps, range, resid, embd, attn;
    FSDP_TRY(fsdpi_json_string_or(o, "model_type", "gpt2", &type));
    FSDP_FAIL_IF(strcmp(type, "gpt2") != 0, FSDP_ERR_UNSUPPORTED, "%s: model_type is \"%.40s\"; this version has gpt2", o.file, type);
    FSDP_TRY(fsdpi_json_bool_or(o, "add_cross_attention", false, &cross));
    FSDP_FAIL_IF(cross, FSDP_ERR_UNSUPPORTED, "%s: add_cross_attention is true: this version has no cross-attention", o.file);
    FSDP_TRY(fsdpi_json_int(o, "vocab_size", 1, INT32_MAX, &c->vocab_size));
    /* Old configs say n_ctx. */
    FSDP_TRY(fsdpi_json_int(o, fsdpi_json_has(o, "n_positions") || !fsdpi_json_has(o, "n_ctx") ? "n_positions" : "n_ctx", 1, INT32_MAX, &c->n_positions));
    FSDP_TRY(fsdpi_json_int(o, "n_embd", 1, 1 << 20, &c->n_embd));
    FSDP_TRY(fsdpi_json_int(o, "n_layer", 0, 10000, &c->n_layer));
    FSDP_TRY(fsdpi_json_int(o, "n_head", 1, 1 << 20, &c->n_head));
    FSDP_TRY(fsdpi_json_int_or(o, "n_inner", 0, 1, 1 << 24, &c->n_inner));
    FSDP_TRY(fsdpi_json_float_or(o, "layer_norm_epsilon", 1e-5, 0, 1, &eps));
    FSDP_TRY(fsdpi_json_float_or(o, "initializer_range", 0.02, 0, 1e6, &range));
    FSDP_TRY(fsdpi_json_float_or(o, "resid_pdrop", 0.1, 0, 1, &resid));
    FSDP_TRY(fsdpi_json_float_or(o, "embd_pdrop", 0.1, 0, 1, &embd));
    FSDP_TRY(fsdpi_json_float_or(o, "attn_pdrop", 0.1, 0, 1, &attn));
    FSDP_TRY(fsdpi_json_bool_or(o, "tie_word_embeddings", true, &c->tie_word_embeddings));
    FSDP_TRY(fsdpi_json_bool_or(o, "scale_attn_weights", true, &c->scale_attn_weights));
    FSDP_TRY(fsdpi_json_bool_or(o, "scale_attn_by_inverse_layer_idx", false, &c->scale_attn_by_inverse_layer_idx));
    FSDP_FAIL_IF(c->n_embd % c->n_head != 0, FSDP_ERR_FORMAT, "%s: n_embd %lld is no multiple of n_head %lld", o.file, (long long)c->n_embd, (long long)c->n_head);
    c->layer_norm_epsilon = (float)eps;
    c->initializer_range = (float)range;
    c->resid_pdrop = (float)resid;
    c->embd_pdrop = (float)embd;
    c->attn_pdrop = (float)attn;
    return read_activation(o, &c->activation);
}

fsdp_status fsdp_gpt2_config_parse(fsdp_gpt2_config *out, const char *text, const char *file)
{
    json_t *root;
    FSDP_TRY(fsdpi_json_parse(&root, file, text, strlen(text)));
    fsdp_gpt2_config c = defaults();
    fsdp_status st = read_fields((fsdpi_json_object){ root, file, "" }, &c);
    json_decref(root);
    FSDP_TRY(st);
    *out = c;
    return FSDP_OK;
}

fsdp_status fsdp_gpt2_config_read(fsdp_gpt2_config *out, const char *path)
{
    char *text;
    size_t size;
    FSDP_TRY(fsdpi_read_file(path, 1 << 20, &text, &size));
    fsdp_status st = fsdp_gpt2_config_parse(out, text, path);
    fsdpi_free(text);
    return st;
}

static const char *activation_name(fsdp_activation a)
{
    for (size_t i = 0; i < sizeof(activations) / sizeof(activations[0]); i++)
        if (activations[i].activation == a) return activations[i].name;
    return "gelu_new";
}

static json_t *to_json(const fsdp_gpt2_config *c)
{
    json_t *o = json_object();
    json_object_set_new(o, "activation_function", json_string(activation_name(c->activation)));
    json_object_set_new(o, "architectures", json_pack("[s]", "GPT2LMHeadModel"));
    json_object_set_new(o, "attn_pdrop", json_real((double)c->attn_pdrop));
    json_object_set_new(o, "bos_token_id", json_integer(c->vocab_size - 1));
    json_object_set_new(o, "embd_pdrop", json_real((double)c->embd_pdrop));
    json_object_set_new(o, "eos_token_id", json_integer(c->vocab_size - 1));
    json_object_set_new(o, "initializer_range", json_real((double)c->initializer_range));
    json_object_set_new(o, "layer_norm_epsilon", json_real((double)c->layer_norm_epsilon));
    json_object_set_new(o, "model_type", json_string("gpt2"));
    json_object_set_new(o, "n_embd", json_integer(c->n_embd));
    json_object_set_new(o, "n_head", json_integer(c->n_head));
    json_object_set_new(o, "n_inner", c->n_inner > 0 ? json_integer(c->n_inner) : json_null());
    json_object_set_new(o, "n_layer", json_integer(c->n_layer));
    json_object_set_new(o, "n_positions", json_integer(c->n_positions));
    json_object_set_new(o, "resid_pdrop", json_real((double)c->resid_pdrop));
    json_object_set_new(o, "scale_attn_by_inverse_layer_idx", json_boolean(c->scale_attn_by_inverse_layer_idx));
    json_object_set_new(o, "scale_attn_weights", json_boolean(c->scale_attn_weights));
    json_object_set_new(o, "tie_word_embeddings", json_boolean(c->tie_word_embeddings));
    json_object_set_new(o, "torch_dtype", json_string("float32"));
    json_object_set_new(o, "vocab_size", json_integer(c->vocab_size));
    return o;
}

fsdp_status fsdp_gpt2_config_text(const fsdp_gpt2_config *config, char **out)
{
    json_t *o = to_json(config);
    /* 9 digits restore a float to the bit. */
    char *text = json_dumps(o, JSON_INDENT(2) | JSON_REAL_PRECISION(9)), *copy = text != NULL ? fsdpi_strdup(text) : NULL;
    json_decref(o);
    free(text);
    FSDP_FAIL_IF(copy == NULL, FSDP_ERR_NOMEM, "no memory for a config");
    *out = copy;
    return FSDP_OK;
}

fsdp_status fsdp_gpt2_config_write(const fsdp_gpt2_config *config, const char *path)
{
    char *text;
    FSDP_TRY(fsdp_gpt2_config_text(config, &text));
    fsdp_status st = fsdpi_write_file_atomic(path, text, strlen(text));
    fsdpi_free(text);
    return st;
}

void fsdp_free_text(char *text)
{
    fsdpi_free(text);
}

/* ---- by name or path ---- */

fsdp_status fsdp_model_create(fsdp_model **out, const char *what)
{
    FSDP_FAIL_IF(what == NULL, FSDP_ERR_INVALID, "fsdp_model_create: no model");
    fsdp_gpt2_config c;
    struct stat sb;
    bool is_preset = fsdp_gpt2_preset(&c, what) == FSDP_OK;
    if (!is_preset && stat(what, &sb) == 0) {
        char path[4096];
        size_t n = strlen(what);
        FSDP_FAIL_IF(n + sizeof("/config.json") > sizeof(path), FSDP_ERR_INVALID, "the path \"%.60s...\" is too long", what);
        memcpy(path, what, n + 1);
        if (S_ISDIR(sb.st_mode)) memcpy(path + n, "/config.json", sizeof("/config.json"));
        FSDP_TRY(fsdp_gpt2_config_read(&c, path));
    } else if (!is_preset) {
        return fsdp_gpt2_preset(&c, what); /* its error lists the names */
    }
    return fsdp_model_create_gpt2(out, &c);
}
