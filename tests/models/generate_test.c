/* SPDX-License-Identifier: MIT
 *
 * Generation: cached keys and values give what a whole forward gives; past the context it goes on; the choice follows the softmax,
 * and is the same on any number of ranks, in any mode, on any device. */
#include "support/testing.h"
#include "support/tiny_gpt.h"

#include "models/model.h"

#include <math.h>

enum { LONG = 40 };

typedef struct heard {
    int32_t token[LONG];
    int count, stop_at; /* fails at that token; 0: never */
} heard;

static fsdp_status hear(int32_t token, void *arg)
{
    heard *h = arg;
    if (h->stop_at > 0 && h->count == h->stop_at) FSDP_FAIL(FSDP_ERR_IO, "nobody listens");
    if (h->count < LONG) h->token[h->count++] = token;
    return FSDP_OK;
}

static const int32_t prompt[] = { 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5 };

static fsdp_status logits_of(tiny_gpt *t, const int32_t *ids, int64_t n, float out[TINY_VOCAB])
{
    fsdp_tape *tape;
    fsdp_tensor *x, *y;
    static _Thread_local float all[TINY_CONTEXT * TINY_VOCAB];
    FSDP_TRY(fsdp_tape_begin_with(&tape, t->comm, &(fsdp_tape_opts){ .eval = true, .device = t->device }));
    FSDP_TRY(fsdp_tensor_from_i32(&x, tape, ids, 2, (int64_t[]){ 1, n }));
    FSDP_TRY(fsdp_model_logits(t->model, tape, x, &y));
    FSDP_TRY(fsdp_tensor_to_f32(y, all));
    FSDP_TRY(fsdp_tape_end(tape));
    memcpy(out, all + (n - 1) * TINY_VOCAB, TINY_VOCAB * sizeof(float));
    return FSDP_OK;
}

static int32_t likeliest(const float *s)
{
    int32_t best = 0;
    for (int32_t i = 1; i < TINY_VOCAB; i++)
        if (s[i] > s[best]) best = i;
    return best;
}

/* The likeliest token each time, by a whole forward over the context: what fits, or its last half once it is full. */
static fsdp_status plain_greedy(tiny_gpt *t, int64_t count, int tokens, int32_t *out)
{
    int32_t context[TINY_CONTEXT + 1];
    int64_t n = count < TINY_CONTEXT ? count : TINY_CONTEXT;
    memcpy(context, prompt + count - n, (size_t)n * sizeof(*prompt));
    for (int i = 0; i < tokens; i++) {
        float s[TINY_VOCAB];
        if (n > TINY_CONTEXT) {
            memmove(context, context + n - TINY_CONTEXT / 2, TINY_CONTEXT / 2 * sizeof(*context));
            n = TINY_CONTEXT / 2;
        }
        FSDP_TRY(logits_of(t, context, n, s));
        out[i] = context[n++] = likeliest(s);
    }
    return FSDP_OK;
}

typedef struct job {
    fsdp_mode mode;
    const char *device;
    heard *sampled; /* of rank 0: 40 tokens at temperature 1.3, top 5, seed 4 */
} job;

static fsdp_status compare(fsdp_comm *world, void *arg)
{
    const job *j = arg;
    tiny_gpt t;
    FSDP_TRY(tiny_gpt_create(&t, world, &(tiny_gpt_opts){ .mode = j->mode, .device = j->device, .dropout = 0.5f })); /* none is used here */
    for (int64_t count = 1; count <= 11; count++) { /* shorter than the context, as long, longer */
        heard got = { .count = 0 };
        int32_t want[LONG];
        FSDP_TRY(plain_greedy(&t, count, LONG, want));
        FSDP_TRY(fsdp_model_generate(t.model, prompt, count, &(fsdp_generate_opts){ .tokens = LONG }, hear, &got));
        rank_check(got.count == LONG);
        if (memcmp(want, got.token, sizeof(want)) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "a prompt of %d: other tokens than by whole forwards", (int)count);
    }
    heard sampled = { .count = 0 };
    FSDP_TRY(fsdp_model_generate(t.model, prompt, 3, &(fsdp_generate_opts){ .tokens = LONG, .temperature = 1.3f, .top_k = 5, .seed = 4 }, hear, &sampled));
    heard *all = calloc((size_t)fsdp_comm_size(world), sizeof(*all));
    FSDP_TRY(fsdp_comm_all_gather(world, &sampled, sizeof(sampled), all));
    for (int r = 0; r < fsdp_comm_size(world); r++) rank_check(memcmp(&all[r], &sampled, sizeof(sampled)) == 0);
    free(all);
    if (fsdp_comm_rank(world) == 0) *j->sampled = sampled;
    tiny_gpt_destroy(&t);
    return FSDP_OK;
}

static void test_cache_is_a_whole_forward(void **state)
{
    (void)state;
    heard first = { .count = 0 };
    for (int i = 0; i < 8; i++) {
        job j = { .mode = (fsdp_mode)(i % 4), .device = i % 3 == 2 ? "guard" : "cpu", .sampled = shared_memory(sizeof(heard)) };
        fsdp_launch_opts o = { .ranks = 1 + i % 3, .transport = i % 2 ? "copy" : NULL, .threads = 1 + i % 2, .ranks_are_threads = i > 5, .timeout_s = 60 };
        if (fsdp_launch(&o, compare, &j) != FSDP_OK) fail_msg("corner %d: %s", i, fsdp_last_error());
        if (i == 0) first = *j.sampled;
        assert_memory_equal(&first, j.sampled, sizeof(first));
    }
}

/* ---- on one rank ---- */

static fsdp_comm *comm;
static tiny_gpt gpt;

static int set_up(void **state)
{
    (void)state;
    if (fsdp_comm_create_self(&comm) != FSDP_OK) return -1;
    return tiny_gpt_create(&gpt, comm, &(tiny_gpt_opts){ 0 }) == FSDP_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    tiny_gpt_destroy(&gpt);
    fsdp_comm_destroy(comm);
    return 0;
}

/* Not only the likeliest token: all scores are those of a whole forward. */
static void test_scores(void **state)
{
    (void)state;
    fsdpi_storage *k[TINY_LAYERS], *v[TINY_LAYERS];
    fsdpi_kv_cache cache = { .room = TINY_CONTEXT, .k = k, .v = v };
    for (int first = 1; first <= TINY_CONTEXT; first++) { /* how many come in one go */
        fsdp_tape *tape;
        cache.length = 0;
        for (int at = first; at <= TINY_CONTEXT; at++) {
            float got[TINY_VOCAB], want[TINY_VOCAB];
            fsdp_tensor *ids, *scores;
            assert_ok(fsdp_tape_begin_with(&tape, comm, &(fsdp_tape_opts){ .eval = true }));
            if (at == first && first == 1)
                for (int l = 0; l < TINY_LAYERS; l++) {
                    assert_ok(fsdpi_storage_create(&k[l], tape->arena, TINY_CONTEXT * TINY_WIDTH * sizeof(float)));
                    assert_ok(fsdpi_storage_create(&v[l], tape->arena, TINY_CONTEXT * TINY_WIDTH * sizeof(float)));
                }
            assert_ok(fsdp_tensor_from_i32(&ids, tape, prompt + cache.length, 2, (int64_t[]){ 1, at - cache.length }));
            assert_ok(fsdpi_gpt2_extend(gpt.model, tape, ids, &cache, &scores));
            assert_int_equal(fsdp_tensor_numel(scores), TINY_VOCAB);
            assert_ok(fsdp_tensor_to_f32(scores, got));
            assert_ok(fsdp_tape_end(tape));
            assert_ok(logits_of(&gpt, prompt, at, want));
            for (int n = 0; n < TINY_VOCAB; n++)
                if (!(fabsf(got[n] - want[n]) <= 1e-5f * (1 + fabsf(want[n])))) fail_msg("%d then one by one, position %d: score %d is %.7g, whole %.7g", first, at, n, (double)got[n], (double)want[n]);
        }
    }
    for (int l = 0; l < TINY_LAYERS; l++) {
        fsdpi_storage_release(k[l]);
        fsdpi_storage_release(v[l]);
    }
}

static int32_t first_token(float temperature, int top_k, uint64_t seed)
{
    heard h = { .count = 0 };
    assert_ok(fsdp_model_generate(gpt.model, prompt, 4, &(fsdp_generate_opts){ .tokens = 1, .temperature = temperature, .top_k = top_k, .seed = seed }, hear, &h));
    return h.token[0];
}

/* Over many seeds tokens come as often as the softmax says: of all, and of the best few. */
static void test_choice(void **state)
{
    (void)state;
    enum { DRAWS = 3000 };
    float s[TINY_VOCAB];
    assert_ok(logits_of(&gpt, prompt, 4, s));
    for (int top_k = 0; top_k <= 20; top_k += 4) { /* 0: all; 16, 20: more than there are */
        double p[TINY_VOCAB], total = 0;
        int drawn[TINY_VOCAB] = { 0 };
        for (int i = 0; i < TINY_VOCAB; i++) {
            int better = 0;
            for (int k = 0; k < TINY_VOCAB; k++) better += s[k] > s[i];
            p[i] = top_k == 0 || better < top_k ? exp((double)s[i] / 0.7) : 0;
            total += p[i];
        }
        for (int i = 0; i < DRAWS; i++) drawn[first_token(0.7f, top_k, (uint64_t)(1000 * top_k + i))]++;
        for (int i = 0; i < TINY_VOCAB; i++) {
            double want = DRAWS * p[i] / total, sigma = sqrt(want * (1 - p[i] / total));
            if (p[i] == 0) assert_int_equal(drawn[i], 0);
            else if (fabs(drawn[i] - want) > 5 * sigma + 1) fail_msg("top %d: token %d came %d times, expected %.0f", top_k, i, drawn[i], want);
        }
    }
    int32_t best = likeliest(s);
    for (uint64_t seed = 0; seed < 50; seed++) {
        assert_int_equal(first_token(1, 1, seed), best);
        assert_int_equal(first_token(0, 0, seed), best);
        assert_int_equal(first_token(1e-30f, 0, seed), best);
        assert_int_equal(first_token(1e-6f, 0, seed), best);
        assert_in_range(first_token(1e30f, 0, seed), 0, TINY_VOCAB - 1);
    }
}

static void test_wrong_calls(void **state)
{
    (void)state;
    heard h = { .stop_at = 3 };
    int32_t bad[] = { 1, 2, 13 }, negative[] = { -1 };
    fsdp_generate_opts o = { .tokens = 5 };
    assert_fails(fsdp_model_generate(gpt.model, prompt, 0, &o, hear, &h), FSDP_ERR_INVALID, "prompt is empty");
    assert_fails(fsdp_model_generate(gpt.model, bad, 3, &o, hear, &h), FSDP_ERR_INVALID, "token 13 at place 2");
    assert_fails(fsdp_model_generate(gpt.model, negative, 1, &o, hear, &h), FSDP_ERR_INVALID, "token -1");
    assert_fails(fsdp_model_generate(gpt.model, prompt, 1, NULL, hear, &h), FSDP_ERR_INVALID, "0 or more");
    assert_fails(fsdp_model_generate(gpt.model, prompt, 1, &(fsdp_generate_opts){ .tokens = -1 }, hear, &h), FSDP_ERR_INVALID, "0 or more");
    assert_fails(fsdp_model_generate(gpt.model, prompt, 1, &(fsdp_generate_opts){ .tokens = 1, .temperature = NAN }, hear, &h), FSDP_ERR_INVALID, "0 or more");
    assert_fails(fsdp_model_generate(gpt.model, prompt, 1, &(fsdp_generate_opts){ .tokens = 1, .top_k = -1 }, hear, &h), FSDP_ERR_INVALID, "0 or more");
    assert_int_equal(h.count, 0);
    assert_fails(fsdp_model_generate(gpt.model, prompt, 1, &o, hear, &h), FSDP_ERR_IO, "nobody listens");
    assert_int_equal(h.count, 3);
    assert_ok(fsdp_model_generate(gpt.model, prompt, 1, &(fsdp_generate_opts){ 0 }, NULL, NULL)); /* no tokens, nobody told */
    assert_ok(fsdp_model_generate(gpt.model, prompt, 1, &o, NULL, NULL));
    double loss;
    assert_ok(tiny_gpt_step(&gpt, 0, 4, &loss, NULL)); /* and the model trains */
}

/* A model whose weights are not numbers says so, and makes up no tokens. */
static void test_not_a_number(void **state)
{
    (void)state;
    heard h = { .count = 0 };
    fsdp_unit_list units = fsdp_module_units(fsdp_model_module(gpt.model));
    const fsdp_slice *s;
    int n;
    assert_ok(fsdp_step_begin(units));
    fsdp_unit_slices(units.units[0], &s, &n);
    s[0].master[0] = NAN;
    for (int64_t i = 0; i < s[0].numel; i++) s[0].master[i] = NAN;
    assert_ok(fsdp_step_end(units));
    assert_fails(fsdp_model_generate(gpt.model, prompt, 3, &(fsdp_generate_opts){ .tokens = 2, .temperature = 1 }, hear, &h), FSDP_ERR_NONFINITE, "not numbers");
    assert_int_equal(h.count, 0);
}

/* A context of one position, and no layers. */
static void test_smallest(void **state)
{
    (void)state;
    tiny_gpt t;
    fsdp_gpt2_config c = tiny_gpt_config();
    heard h = { .count = 0 };
    c.n_positions = 1;
    c.n_layer = 0;
    assert_ok(tiny_gpt_create(&t, comm, &(tiny_gpt_opts){ .config = c }));
    assert_ok(fsdp_model_generate(t.model, prompt, 5, &(fsdp_generate_opts){ .tokens = 7 }, hear, &h));
    assert_int_equal(h.count, 7);
    tiny_gpt_destroy(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cache_is_a_whole_forward),
        cmocka_unit_test_setup_teardown(test_scores, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_choice, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrong_calls, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_not_a_number, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_smallest, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
