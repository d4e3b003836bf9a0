/* SPDX-License-Identifier: MIT
 *
 * Hugging Face's files: the spellings in use are read, what does not fit is listed in one message, and what is written is the same
 * bytes on any number of ranks and in any mode, replaces an older model only when it is whole, and is read back to the bit. */
#include "format/scratch.h"
#include "support/fault_write.h"
#include "support/one_rank.h"
#include "support/tiny_gpt.h"

#include "base/alloc.h"

#include <math.h>
#include <signal.h>
#include <sys/resource.h>

/* ---- config.json ---- */

#define BASE "'vocab_size': 13, 'n_positions': 8, 'n_embd': 6, 'n_layer': 2, 'n_head': 2"

static fsdp_status parse(fsdp_gpt2_config *c, const char *quoted)
{
    char text[1024];
    snprintf(text, sizeof(text), "%s", quoted);
    scratch_quotes(text, strlen(text));
    return fsdp_gpt2_config_parse(c, text, "config.json");
}

static void test_config(void **state)
{
    (void)state;
    fsdp_gpt2_config c;
    assert_ok(parse(&c, "{" BASE "}")); /* Hugging Face's defaults for the rest */
    assert_true(c.tie_word_embeddings && c.scale_attn_weights && !c.scale_attn_by_inverse_layer_idx);
    assert_true(c.n_inner == 0 && c.activation == FSDP_ACT_GELU_TANH && c.resid_pdrop == 0.1f && c.layer_norm_epsilon == 1e-5f);
    assert_ok(parse(&c, "{" BASE ", 'n_inner': null, 'tie_word_embeddings': null, 'model_type': 'gpt2', 'something_new': [1, {}]}"));
    assert_true(c.n_inner == 0 && c.tie_word_embeddings);
    assert_ok(parse(&c, "{" BASE ", 'n_inner': 17, 'resid_pdrop': 0, 'embd_pdrop': 0.25, 'activation_function': 'gelu'}"));
    assert_true(c.n_inner == 17 && c.resid_pdrop == 0 && c.embd_pdrop == 0.25f && c.activation == FSDP_ACT_GELU_ERF);
    assert_ok(parse(&c, "{" BASE ", 'activation_function': 'relu', 'tie_word_embeddings': false}"));
    assert_true(c.activation == FSDP_ACT_RELU && !c.tie_word_embeddings);
    assert_ok(parse(&c, "{'vocab_size': 13, 'n_ctx': 9, 'n_embd': 6, 'n_layer': 0, 'n_head': 2}"));
    assert_int_equal(c.n_positions, 9);
    static const struct {
        const char *text, *message;
        fsdp_status st;
    } bad[] = {
        { "{'n_positions': 8, 'n_embd': 6, 'n_layer': 2, 'n_head': 2}", "vocab_size", FSDP_ERR_FORMAT },
        { "{" BASE ", 'vocab_size': 14}", "vocab_size", FSDP_ERR_FORMAT }, /* twice */
        { "{'vocab_size': 13, 'n_positions': 8, 'n_embd': 7, 'n_layer': 2, 'n_head': 2}", "n_embd 7 is no multiple of n_head 2", FSDP_ERR_FORMAT },
        { "{'vocab_size': 13, 'n_positions': 8, 'n_embd': 6, 'n_layer': 2, 'n_head': 0}", "n_head", FSDP_ERR_FORMAT },
        { "{'vocab_size': '13', 'n_positions': 8, 'n_embd': 6, 'n_layer': 2, 'n_head': 2}", "vocab_size", FSDP_ERR_FORMAT },
        { "{" BASE ", 'model_type': 'llama'}", "llama", FSDP_ERR_UNSUPPORTED },
        { "{" BASE ", 'add_cross_attention': true}", "cross-attention", FSDP_ERR_UNSUPPORTED },
        { "{" BASE ", 'activation_function': 'swish'}", "swish", FSDP_ERR_UNSUPPORTED },
        { "{" BASE ", 'resid_pdrop': 1.5}", "resid_pdrop", FSDP_ERR_FORMAT },
        { "{" BASE, "config.json", FSDP_ERR_FORMAT },
        { "", "config.json", FSDP_ERR_FORMAT },
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) assert_fails(parse(&c, bad[i].text), bad[i].st, bad[i].message);
    fsdp_model *m;
    assert_fails(fsdp_model_create(&m, "gpt3"), FSDP_ERR_INVALID, "gpt2-124m");
    assert_fails(fsdp_model_create(&m, NULL), FSDP_ERR_INVALID, "no model");
    assert_int_equal(mkdir(scratch("no-config"), 0777), 0);
    assert_fails(fsdp_model_create(&m, scratch("no-config")), FSDP_ERR_IO, "config.json");
}

/* What is written is read back to the bit, whatever the floats are. */
static void test_config_round_trip(void **state)
{
    (void)state;
    for (int i = 0; i < 200; i++) {
        fsdp_gpt2_config c = tiny_gpt_config(), back;
        char *text;
        c.layer_norm_epsilon = 1e-3f * fsdp_philox_uniform(1, "eps", i);
        c.initializer_range = fsdp_philox_uniform(1, "range", i);
        c.resid_pdrop = fsdp_philox_uniform(1, "r", i);
        c.attn_pdrop = 0.1f;
        c.embd_pdrop = 1e-7f * fsdp_philox_uniform(1, "e", i);
        c.n_inner = i % 3 == 0 ? 0 : i;
        c.activation = (fsdp_activation)(1 + i % 3);
        c.tie_word_embeddings = i % 2;
        c.scale_attn_weights = i % 5 != 0;
        c.scale_attn_by_inverse_layer_idx = i % 7 == 0;
        memset(&back, 0, sizeof(back));
        assert_ok(fsdp_gpt2_config_text(&c, &text));
        assert_ok(fsdp_gpt2_config_parse(&back, text, "text"));
        fsdp_free_text(text);
        assert_true(c.layer_norm_epsilon == back.layer_norm_epsilon && c.initializer_range == back.initializer_range && c.resid_pdrop == back.resid_pdrop);
        assert_true(c.attn_pdrop == back.attn_pdrop && c.embd_pdrop == back.embd_pdrop && c.n_inner == back.n_inner && c.activation == back.activation);
        assert_true(c.tie_word_embeddings == back.tie_word_embeddings && c.scale_attn_weights == back.scale_attn_weights);
        assert_true(c.scale_attn_by_inverse_layer_idx == back.scale_attn_by_inverse_layer_idx && c.vocab_size == back.vocab_size && c.n_layer == back.n_layer);
    }
}

/* ---- weights ---- */

typedef struct tensor {
    char name[80];
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[4];
    const char *values; /* tensors of the same have the same values */
} tensor;

enum { MAX_TENSORS = 64 };

typedef struct file {
    tensor t[MAX_TENSORS];
    int n;
} file;

static tensor *add(file *f, const char *prefix, const char *name, int ndim, int64_t a, int64_t b)
{
    tensor *t = &f->t[f->n++];
    *t = (tensor){ .dtype = FSDP_F32, .ndim = ndim, .shape = { a, b } };
    snprintf(t->name, sizeof(t->name), "%s%s", prefix, name);
    t->values = name; /* a literal */
    return t;
}

/* The tensors of the tiny GPT, as GPT2Model or GPT2LMHeadModel name them. */
static file whole_file(const char *prefix)
{
    static const struct {
        const char *name;
        int ndim;
        int64_t a, b;
    } block[2][12] = {
#define BLOCK(n)                                                                                                                              \
    { { "h." n ".ln_1.weight", 1, 6, 0 }, { "h." n ".ln_1.bias", 1, 6, 0 }, { "h." n ".attn.c_attn.weight", 2, 6, 18 },                       \
      { "h." n ".attn.c_attn.bias", 1, 18, 0 }, { "h." n ".attn.c_proj.weight", 2, 6, 6 }, { "h." n ".attn.c_proj.bias", 1, 6, 0 },           \
      { "h." n ".ln_2.weight", 1, 6, 0 }, { "h." n ".ln_2.bias", 1, 6, 0 }, { "h." n ".mlp.c_fc.weight", 2, 6, 24 },                          \
      { "h." n ".mlp.c_fc.bias", 1, 24, 0 }, { "h." n ".mlp.c_proj.weight", 2, 24, 6 }, { "h." n ".mlp.c_proj.bias", 1, 6, 0 } }
        BLOCK("0"), BLOCK("1"),
    };
    file f = { .n = 0 };
    add(&f, prefix, "wte.weight", 2, 13, 6);
    add(&f, prefix, "wpe.weight", 2, 8, 6);
    for (int l = 0; l < 2; l++)
        for (int i = 0; i < 12; i++) add(&f, prefix, block[l][i].name, block[l][i].ndim, block[l][i].a, block[l][i].b);
    add(&f, prefix, "ln_f.weight", 1, 6, 0);
    add(&f, prefix, "ln_f.bias", 1, 6, 0);
    return f;
}

static int64_t numel_of(const tensor *t)
{
    int64_t n = 1;
    for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
    return n;
}

/* Numbers that all floating types hold. */
static void values_of(const char *name, int64_t numel, float *out)
{
    for (int64_t i = 0; i < numel; i++) out[i] = (float)((int)(fsdp_philox_uniform(2, name, i) * 256) - 128) / 64;
}

static void write_model(const char *folder, const file *f, const char *config)
{
    fsdp_safetensors_decl decl[MAX_TENSORS];
    fsdp_safetensors_writer *w;
    char path[600], text[1024];
    static float values[64 * 1024];
    if (mkdir(folder, 0777) != 0) assert_int_equal(errno, EEXIST);
    snprintf(path, sizeof(path), "%s/config.json", folder);
    snprintf(text, sizeof(text), "%s", config);
    scratch_quotes(text, strlen(text));
    FILE *c = fopen(path, "w");
    assert_non_null(c);
    fputs(text, c);
    fclose(c);
    for (int i = 0; i < f->n; i++) decl[i] = (fsdp_safetensors_decl){ f->t[i].name, f->t[i].dtype, f->t[i].ndim, f->t[i].shape };
    snprintf(path, sizeof(path), "%s/model.safetensors", folder);
    assert_ok(fsdp_safetensors_writer_open(&w, path, decl, f->n, NULL, 0));
    for (int i = 0; i < f->n; i++) {
        int64_t n = numel_of(&f->t[i]);
        values_of(f->t[i].values, n, values);
        if (f->t[i].dtype == FSDP_I32 || f->t[i].dtype == FSDP_U8 || f->t[i].dtype == FSDP_BOOL) assert_ok(fsdp_safetensors_writer_write_raw(w, i, 0, n, values));
        else assert_ok(fsdp_safetensors_writer_write_f32(w, i, 0, n, values));
    }
    assert_ok(fsdp_safetensors_writer_finish(w));
    fsdp_safetensors_writer_close(w);
}

/* Loads a folder; where that is well, all values must be those of the file. */
static fsdp_status load(const char *folder)
{
    fsdp_model *m;
    const fsdp_module_param_info *p;
    int n;
    static float got[1024], want[1024];
    FSDP_TRY(fsdp_model_create(&m, folder));
    fsdp_status st = fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm });
    if (st == FSDP_OK) st = fsdp_model_load(m, folder);
    if (st == FSDP_OK) st = fsdp_module_params(fsdp_model_module(m), &p, &n);
    for (int i = 0; st == FSDP_OK && i < n; i++) {
        st = fsdp_module_read_param(fsdp_model_module(m), i, got);
        values_of(p[i].name, fsdp_unit_param_numel(p[i].unit, p[i].index), want);
        if (st == FSDP_OK && memcmp(got, want, (size_t)fsdp_unit_param_numel(p[i].unit, p[i].index) * sizeof(float)) != 0) fail_msg("%s: other values", p[i].name);
    }
    fsdp_model_destroy(m);
    return st;
}

static void test_spellings(void **state)
{
    (void)state;
    for (int prefixed = 0; prefixed < 2; prefixed++) {
        const char *prefix = prefixed ? "transformer." : "";
        file f = whole_file(prefix);
        write_model(scratch("plain"), &f, "{" BASE "}");
        assert_ok(load(scratch("plain")));
        /* masks of old files, of whatever type and size */
        tensor *t = add(&f, prefix, "h.0.attn.bias", 2, 8, 8);
        t->ndim = 4;
        t->shape[0] = t->shape[1] = 1;
        t->shape[2] = t->shape[3] = 8;
        t->dtype = prefixed ? FSDP_BOOL : FSDP_F32;
        add(&f, prefix, "h.1.attn.bias", 2, 8, 8)->dtype = FSDP_U8;
        add(&f, prefix, "h.0.attn.masked_bias", 0, 0, 0);
        add(&f, prefix, "h.1.attn.masked_bias", 0, 0, 0);
        write_model(scratch("masks"), &f, "{" BASE "}");
        assert_ok(load(scratch("masks")));
        /* other floating types */
        f = whole_file(prefix);
        for (int i = 0; i < f.n; i++) f.t[i].dtype = (fsdp_dtype[]){ FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64 }[i % 4];
        write_model(scratch("types"), &f, "{" BASE "}");
        assert_ok(load(scratch("types")));
    }
    /* mixed within a file */
    file f = whole_file("");
    for (int i = 0; i < f.n; i += 2) {
        char name[80];
        snprintf(name, sizeof(name), "%s", f.t[i].name);
        snprintf(f.t[i].name, sizeof(f.t[i].name), "transformer.%.60s", name);
    }
    write_model(scratch("mixed"), &f, "{" BASE "}");
    assert_ok(load(scratch("mixed")));
    /* both spellings of one tensor: nobody knows which is meant */
    snprintf(f.t[f.n].name, sizeof(f.t[0].name), "%s", "wte.weight");
    f.t[f.n] = f.t[0];
    snprintf(f.t[f.n].name, sizeof(f.t[0].name), "%s", "wte.weight");
    f.n++;
    write_model(scratch("both"), &f, "{" BASE "}");
    assert_fails(load(scratch("both")), FSDP_ERR_FORMAT, "\"wte.weight\"");
}

static void test_what_does_not_fit(void **state)
{
    (void)state;
    file f = whole_file("transformer.");
    f.t[1].shape[0] = 9;        /* wpe */
    f.t[2].dtype = FSDP_I32;    /* h.0.ln_1.weight */
    f.t[27] = f.t[26];          /* ln_f.bias is missing, */
    snprintf(f.t[27].name, sizeof(f.t[27].name), "%s", "transformer.h.2.ln_1.weight"); /* and there is a third block */
    write_model(scratch("bad"), &f, "{" BASE "}");
    assert_int_equal(load(scratch("bad")), FSDP_ERR_FORMAT);
    static const char *const named[] = { "wpe.weight", "[9, 6]", "[8, 6]", "h.0.ln_1.weight", "I32", "ln_f.bias", "missing", "h.2.ln_1.weight" };
    for (size_t i = 0; i < sizeof(named) / sizeof(named[0]); i++)
        if (strstr(fsdp_last_error_message(), named[i]) == NULL) fail_msg("%s is not in: %s", named[i], fsdp_last_error_message());
    /* a whole other model: the message stays readable */
    f.n = 0;
    for (int i = 0; i < 60; i++) add(&f, "model.layers.", "self_attn.q_proj.weight", 2, 6, 6), snprintf(f.t[i].name, sizeof(f.t[i].name), "model.layers.%d.q", i);
    write_model(scratch("other"), &f, "{" BASE "}");
    assert_fails(load(scratch("other")), FSDP_ERR_FORMAT, "and more");
    assert_true(strlen(fsdp_last_error_message()) < 1400);
    assert_int_equal(unlink(scratch("other/model.safetensors")), 0);
    assert_fails(load(scratch("other")), FSDP_ERR_FORMAT, "no .safetensors file");
}

/* tie_word_embeddings true, false, absent x lm_head.weight absent, equal, different. */
static void test_tied_heads(void **state)
{
    (void)state;
    static const char *const flags[] = { ", 'tie_word_embeddings': true", ", 'tie_word_embeddings': false", "" };
    for (int flag = 0; flag < 3; flag++)
        for (int head = 0; head < 3; head++) {
            char config[300];
            file f = whole_file("transformer.");
            if (head > 0) add(&f, "", "lm_head.weight", 2, 13, 6)->values = head == 1 ? "wte.weight" : "lm_head.weight";
            snprintf(config, sizeof(config), "{" BASE "%s}", flags[flag]);
            write_model(scratch("head"), &f, config);
            fsdp_model *m;
            assert_ok(fsdp_model_create(&m, scratch("head")));
            assert_ok(fsdp_model_wrap(m, &(fsdp_wrap_opts){ .comm = comm }));
            fsdp_status st = fsdp_model_load(m, scratch("head"));
            bool tied = flag != 1;
            if (tied && head == 2) assert_fails(st, FSDP_ERR_FORMAT, "\"tie_word_embeddings\": false"); /* says what to do */
            else if (!tied && head == 0) assert_fails(st, FSDP_ERR_FORMAT, "tie_word_embeddings");
            else assert_ok(st);
            if (st == FSDP_OK) { /* saved: one copy where tied, both where not */
                fsdp_safetensors *s;
                static float w[128], a[128], b[128];
                assert_ok(fsdp_model_save(m, scratch("head-out")));
                assert_ok(fsdp_safetensors_open(&s, scratch("head-out")));
                const fsdp_safetensors_tensor *t = fsdp_safetensors_find(s, "lm_head.weight"), *e = fsdp_safetensors_find(s, "transformer.wte.weight");
                assert_int_equal(t != NULL, !tied);
                assert_non_null(e);
                assert_ok(fsdp_safetensors_read_f32(s, e, 0, 78, w));
                values_of("wte.weight", 78, a);
                assert_memory_equal(w, a, 78 * sizeof(float));
                if (t != NULL) {
                    assert_ok(fsdp_safetensors_read_f32(s, t, 0, 78, w));
                    values_of(head == 1 ? "wte.weight" : "lm_head.weight", 78, b);
                    assert_memory_equal(w, b, 78 * sizeof(float));
                }
                assert_string_equal(fsdp_safetensors_metadata_find(s, "format"), "pt");
                fsdp_safetensors_close(s);
            }
            fsdp_model_destroy(m);
        }
}

/* ---- writing, on ranks ---- */

typedef struct writing {
    const char *folder;
    fsdp_mode mode;
    const char *device;
    int trouble; /* on rank 0. 1: a limit on the size of files; 2: the disk is full after `room` bytes */
    long room;
    fsdp_status *st; /* [ranks] */
    char (*message)[512];
} writing;

static fsdp_status write_trained(fsdp_comm *world, void *arg)
{
    const writing *w = arg;
    tiny_gpt t;
    static _Thread_local float before[TINY_NUMEL], after[TINY_NUMEL];
    FSDP_TRY(tiny_gpt_create(&t, world, &(tiny_gpt_opts){ .mode = w->mode, .device = w->device }));
    FSDP_TRY(tiny_gpt_step(&t, 0, 24, NULL, NULL));
    FSDP_TRY(tiny_gpt_read(&t, before));
    if (w->trouble == 2 && fsdp_comm_rank(world) == 0) fault_write.room = w->room;
    if (w->trouble == 1 && fsdp_comm_rank(world) == 0) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 2500, 2500 }); /* room for half of it */
    }
    fsdp_status st = fsdp_model_save(t.model, w->folder);
    if (w->st != NULL) {
        w->st[fsdp_comm_rank(world)] = st;
        snprintf(w->message[fsdp_comm_rank(world)], 512, "%s", st != FSDP_OK ? fsdp_last_error_message() : "");
        tiny_gpt_destroy(&t);
        return FSDP_OK;
    }
    FSDP_TRY(st);
    FSDP_TRY(fsdp_module_init_keyed(fsdp_model_module(t.model), FSDP_INIT_NORMAL, 99));
    FSDP_TRY(fsdp_model_load(t.model, w->folder));
    FSDP_TRY(tiny_gpt_read(&t, after));
    rank_check(memcmp(before, after, sizeof(before)) == 0);
    tiny_gpt_destroy(&t);
    return FSDP_OK;
}

static char *slurp(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) fail_msg("there is no %s", path);
    char *data = malloc(1 << 20);
    *size = fread(data, 1, 1 << 20, f);
    fclose(f);
    return data;
}

static void test_same_bytes(void **state)
{
    (void)state;
    char *first = NULL;
    size_t size = 0;
    for (int ranks = 1; ranks <= 4; ranks++) {
        writing w = { .folder = scratch("written/here"), .mode = (fsdp_mode)(ranks % 4), .device = ranks == 3 ? "guard" : "cpu" };
        fsdp_launch_opts o = { .ranks = ranks, .transport = ranks == 2 ? "copy" : NULL, .ranks_are_threads = ranks == 4, .threads = 1, .timeout_s = 30 };
        assert_ok(fsdp_launch(&o, write_trained, &w));
        size_t n;
        char *now = slurp(scratch("written/here/model.safetensors"), &n);
        if (first == NULL) {
            first = now;
            size = n;
            continue;
        }
        assert_int_equal(n, size);
        assert_memory_equal(first, now, n);
        free(now);
    }
    free(first);
    /* it loads as a model by its folder, and its config is what made it */
    fsdp_gpt2_config c;
    assert_ok(fsdp_gpt2_config_read(&c, scratch("written/here/config.json")));
    assert_true(c.n_embd == TINY_WIDTH && c.initializer_range == 0.3f);
}

/* Rank 0 cannot write it all. Every rank is told so, with the file and the reason, and the old model is as it was. */
static void test_no_room(void **state)
{
    (void)state;
    size_t size, config, n;
    struct {
        fsdp_status st[3];
        char message[3][512];
    } *seen = shared_memory(sizeof(*seen));
    char *folder = strdup(scratch("full"));
    writing w = { .folder = folder, .device = "cpu" };
    assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 3, .threads = 1 }, write_trained, &w));
    char *before = slurp(scratch("full/model.safetensors"), &size);
    free(slurp(scratch("full/config.json"), &config));
    w.st = seen->st;
    w.message = seen->message;
    for (w.room = 0; w.room < (long)size + 2000; w.room += 333) { /* in the header, in each tensor, in the config */
        w.trouble = w.room == 0 ? 1 : 2;
        assert_ok(fsdp_launch(&(fsdp_launch_opts){ .ranks = 3, .threads = 1, .timeout_s = 20 }, write_trained, &w));
        bool well = w.room >= (long)(size + config); /* which is written too */
        for (int r = 0; r < 3; r++) {
            if (well && seen->st[r] == FSDP_OK) continue;
            if (seen->st[r] != FSDP_ERR_IO || strstr(seen->message[r], folder) == NULL || well)
                fail_msg("room for %ld bytes, rank %d: %s: %s", w.room, r, fsdp_status_name(seen->st[r]), seen->message[r]);
        }
        char *after = slurp(scratch("full/model.safetensors"), &n);
        assert_int_equal(n, size);
        assert_memory_equal(before, after, n);
        free(after);
        struct stat sb;
        char command[600];
        snprintf(command, sizeof(command), "ls %s | grep -q tmp", folder);
        assert_int_equal(stat(folder, &sb), 0);
        assert_int_not_equal(system(command), 0); /* no temporary is left */
    }
    free(before);
    free(folder);
}

/* ---- no memory, on rank 0 or another ---- */

typedef struct hungry {
    const char *folder;
    long n, made;
    int rank;
    bool load;
} hungry;

static fsdp_status save_without_memory(fsdp_comm *world, void *arg)
{
    hungry *h = arg;
    tiny_gpt t;
    bool me = fsdp_comm_rank(world) == h->rank;
    FSDP_TRY(tiny_gpt_create(&t, world, &(tiny_gpt_opts){ 0 }));
    FSDP_TRY(fsdp_comm_barrier(world));
    if (me) (void)fsdpi_alloc_fail_at(h->n);
    fsdp_status st = h->load ? fsdp_model_load(t.model, h->folder) : fsdp_model_save(t.model, h->folder);
    if (me) {
        long made = fsdpi_alloc_fail_at(0);
        if (h->n == 0) h->made = made;
    }
    rank_check(st == FSDP_OK || st == FSDP_ERR_NOMEM);
    double worst = st;
    FSDP_TRY(fsdp_comm_max(world, &worst, 1));
    rank_check(worst == (double)st);
    FSDP_TRY(fsdp_model_save(t.model, h->folder)); /* all is well after it */
    FSDP_TRY(fsdp_model_load(t.model, h->folder));
    tiny_gpt_destroy(&t);
    return FSDP_OK;
}

static void test_allocations_that_fail(void **state)
{
    (void)state;
    hungry *h = shared_memory(sizeof(*h));
    static char folder[100]; /* what only shared memory points to is a leak to the sanitizer */
    memcpy(folder, scratch("hungry"), sizeof(folder) - 1);
    h->folder = folder;
    for (int round = 0; round < 4; round++) {
        h->rank = round % 2;
        h->load = round / 2;
        h->made = 0;
        for (h->n = 0; h->n <= h->made; h->n += h->n < 30 ? 1 : 5)
            if (fsdp_launch(&(fsdp_launch_opts){ .ranks = 2, .threads = 1, .timeout_s = 20 }, save_without_memory, h) != FSDP_OK)
                fail_msg("allocation %ld of rank %d in a %s: %s", h->n, h->rank, h->load ? "load" : "save", fsdp_last_error());
    }
}

/* The same when the disk fills up in the middle: space cannot be reserved there. */
static bool on_a_full_disk(void *arg)
{
    struct {
        fsdp_status st[3];
        char message[3][512];
    } *seen = shared_memory(sizeof(*seen));
    writing w = { .folder = arg, .device = "cpu", .st = seen->st, .message = seen->message };
    if (!scratch_mount(arg, "size=8k")) _exit(SCRATCH_SKIP);
    if (fsdp_launch(&(fsdp_launch_opts){ .ranks = 3, .threads = 1, .timeout_s = 20 }, write_trained, &w) != FSDP_OK) {
        fprintf(stderr, "%s\n", fsdp_last_error());
        return false;
    }
    for (int r = 0; r < 3; r++) {
        if (seen->st[r] == FSDP_ERR_IO && strstr(seen->message[r], "bytes") != NULL) continue;
        fprintf(stderr, "rank %d: %s: %s\n", r, fsdp_status_name(seen->st[r]), seen->message[r]);
        return false;
    }
    return true;
}

static void test_full_disk(void **state)
{
    (void)state;
    assert_int_equal(mkdir(scratch("tiny-disk"), 0777), 0);
    int rc = scratch_fork(on_a_full_disk, scratch("tiny-disk"));
    if (rc != SCRATCH_SKIP) assert_int_equal(rc, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config),
        cmocka_unit_test(test_config_round_trip),
        cmocka_unit_test_setup_teardown(test_spellings, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_what_does_not_fit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_tied_heads, set_up, tear_down),
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_allocations_that_fail),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
