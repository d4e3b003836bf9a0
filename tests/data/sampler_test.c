/* SPDX-License-Identifier: MIT
 *
 * The samples of a run are a function of (tokens, seq, seed, number): every epoch is a permutation of windows
 * that lie in the data and do not overlap, another one in each epoch and for each seed. Evaluation predicts
 * every token once. */
#include "support/testing.h"

#include <fsdp/data.h>

#include "data/permute.h"

static void check_permutation(uint64_t seed, uint64_t epoch, int64_t n)
{
    char *seen = calloc((size_t)n, 1);
    assert_non_null(seen);
    for (int64_t i = 0; i < n; i++) {
        int64_t p = fsdpi_permute(seed, epoch, n, i);
        assert_true(p >= 0 && p < n && !seen[p]);
        seen[p] = 1;
    }
    free(seen);
}

static void test_permutations(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= 200; n++)
        for (uint64_t epoch = 0; epoch < 4; epoch++) check_permutation(epoch * 77, epoch, n);
    const int64_t large[] = { 255, 256, 257, 4095, 4096, 4097, 65536, 65537, 1000003 };
    for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) check_permutation(5, 1ull << 40, large[i]);
}

/* Too many to visit: the values that are drawn differ and are in range. */
static void test_huge_permutations(void **state)
{
    (void)state;
    const int64_t sizes[] = { (int64_t)1 << 31, ((int64_t)1 << 32) + 1, ((int64_t)1 << 62) + 1, INT64_MAX };
    for (int k = 0; k < 4; k++) {
        enum { N = 500 };
        int64_t p[N];
        for (int i = 0; i < N; i++) {
            p[i] = fsdpi_permute(1, 2, sizes[k], sizes[k] - 1 - i);
            assert_true(p[i] >= 0 && p[i] < sizes[k]);
            for (int j = 0; j < i; j++) assert_true(p[j] != p[i]);
        }
    }
}

/* Element i goes to each place equally often over epochs: chi squared with (n - 1)^2 degrees of freedom stays
 * within five of its standard deviations. Small n are where a Feistel network is weakest. */
static void test_places_are_uniform(void **state)
{
    (void)state;
    enum { EPOCHS = 6000, MOST = 17 };
    for (int n = 2; n <= MOST; n++) {
        double chi = 0, df = (n - 1.0) * (n - 1.0);
        int count[MOST][MOST] = { { 0 } };
        for (uint64_t e = 0; e < EPOCHS; e++)
            for (int i = 0; i < n; i++) count[i][fsdpi_permute(42, e, n, i)]++;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++)
                chi += (count[i][j] - (double)EPOCHS / n) * (count[i][j] - (double)EPOCHS / n) * n / EPOCHS;
        assert_true((chi - df) * (chi - df) < 25 * 2 * df + 25);
    }
}

/* Two permutations of n elements that have nothing to do with each other agree in one place on average. */
static void test_epochs_and_seeds_differ(void **state)
{
    (void)state;
    enum { N = 1000 };
    for (uint64_t k = 1; k < 30; k++) {
        int epochs = 0, seeds = 0, fixed = 0, neighbours = 0;
        for (int64_t i = 0; i < N; i++) {
            int64_t p = fsdpi_permute(9, k, N, i);
            epochs += p == fsdpi_permute(9, k + 1, N, i);
            seeds += p == fsdpi_permute(9 + k, k, N, i);
            fixed += p == i;
            neighbours += i > 0 && p == fsdpi_permute(9, k, N, i - 1) + 1;
        }
        assert_true(epochs < 10 && seeds < 10 && fixed < 10 && neighbours < 10);
    }
}

/* Every window lies in the data; windows of an epoch do not overlap; their number is that of every epoch, and
 * as large as can be: one more would not fit behind the largest offset. */
static void test_windows(void **state)
{
    (void)state;
    for (int64_t seq = 1; seq <= 9; seq++) {
        for (int64_t tokens = seq + 1; tokens < 6 * seq + 3; tokens++) {
            fsdp_sampler s;
            bool offset_seen[16] = { false };
            assert_ok(fsdp_sampler_init(&s, tokens, seq, 3));
            int64_t n = fsdp_sampler_windows_per_epoch(&s);
            assert_true(n == 1 || n == (tokens - seq) / seq);
            assert_true((tokens - seq) / seq <= n && s.offsets >= 1 && s.offsets <= seq);
            assert_true(s.offsets == seq || n == 1);
            for (int64_t e = 0; e < 200; e++) {
                int64_t offset = INT64_MAX;
                bool used[64] = { false };
                for (int64_t i = 0; i < n; i++) {
                    int64_t epoch, index, first;
                    assert_ok(fsdp_sampler_locate(&s, e * n + i, &epoch, &index, &first));
                    assert_true(epoch == e && index == i && first >= 0 && first + seq + 1 <= tokens);
                    if (first < offset) offset = first;
                    for (int64_t t = 0; t < seq; t++) {
                        assert_false(used[first + t]);
                        used[first + t] = true;
                    }
                }
                assert_true(offset < s.offsets);
                offset_seen[offset] = true;
            }
            for (int64_t o = 0; o < s.offsets; o++) assert_true(offset_seen[o]);
        }
    }
}

/* These numbers are part of the format of a run: one that resumes with another version of the library must
 * see the same samples. Do not change them; add a version to the checkpoint if they must change. */
static void test_pinned(void **state)
{
    (void)state;
    fsdp_sampler s;
    int64_t first[4];
    assert_ok(fsdp_sampler_init(&s, 1000000, 128, 1234));
    assert_int_equal(fsdp_sampler_windows_per_epoch(&s), 7811);
    const int64_t samples[4] = { 0, 1, 7811, 1ll << 50 };
    for (int i = 0; i < 4; i++) assert_ok(fsdp_sampler_locate(&s, samples[i], NULL, NULL, &first[i]));
    const int64_t want[4] = { 307247, 546991, 893748, 374086 };
    for (int i = 0; i < 4; i++) assert_int_equal(first[i], want[i]);
}

/* Whoever asks for it, in whatever order: R ranks that deal the samples among them see what one sees. */
static void test_independent_of_ranks(void **state)
{
    (void)state;
    fsdp_sampler s;
    assert_ok(fsdp_sampler_init(&s, 1003, 7, 11));
    int64_t want[60], got;
    for (int64_t g = 0; g < 60; g++) assert_ok(fsdp_sampler_locate(&s, g, NULL, NULL, &want[g]));
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int rank = ranks; rank-- > 0;)
            for (int64_t g = 59 - rank; g >= 0; g -= ranks) {
                fsdp_sampler other;
                assert_ok(fsdp_sampler_init(&other, 1003, 7, 11));
                assert_ok(fsdp_sampler_locate(&other, g, NULL, NULL, &got));
                assert_int_equal(got, want[g]);
            }
}

static void test_refusals(void **state)
{
    (void)state;
    fsdp_sampler s = { 0 };
    int64_t a, b;
    assert_fails(fsdp_sampler_locate(&s, 0, NULL, NULL, &a), FSDP_ERR_INVALID,
                 "not made by fsdp_sampler_init");
    assert_fails(fsdp_sampler_init(&s, 100, 0, 1), FSDP_ERR_INVALID, "seq is 0");
    assert_fails(fsdp_sampler_init(&s, 100, -5, 1), FSDP_ERR_INVALID, "seq is -5");
    assert_fails(fsdp_sampler_init(&s, 100, 100, 1), FSDP_ERR_INVALID,
                 "windows of seq 100 need at least 101 tokens; the data has 100");
    assert_fails(fsdp_sampler_init(&s, -1, 1, 1), FSDP_ERR_INVALID, "the data has -1");
    assert_fails(fsdp_sampler_init(&s, INT64_MAX, INT64_MAX, 1), FSDP_ERR_INVALID,
                 "need at least 9223372036854775808 tokens");
    assert_int_equal(s.windows, 0);
    assert_ok(fsdp_sampler_init(&s, 101, 100, 1));
    assert_fails(fsdp_sampler_locate(&s, -1, NULL, NULL, &a), FSDP_ERR_INVALID,
                 "sample number -1 is negative");
    assert_ok(fsdp_sampler_locate(&s, INT64_MAX, &a, NULL, &b));
    assert_true(a == INT64_MAX && b == 0);
    assert_ok(fsdp_sampler_init(&s, INT64_MAX, 1, 1));
    assert_ok(fsdp_sampler_locate(&s, INT64_MAX, NULL, NULL, &b));
    assert_ok(fsdp_sampler_init(&s, INT64_MAX, INT64_MAX - 1, 1));
    assert_fails(fsdp_eval_windows(1, 4, &a), FSDP_ERR_INVALID, "needs at least 2 tokens; the data has 1");
    assert_fails(fsdp_eval_windows(9, 0, &a), FSDP_ERR_INVALID, "seq is 0");
    assert_fails(fsdp_eval_window(9, 4, 2, &a, &b), FSDP_ERR_INVALID, "no evaluation window number 2, of 2");
    assert_fails(fsdp_eval_window(9, 4, -1, &a, &b), FSDP_ERR_INVALID, "window number -1");
}

static void test_eval_windows(void **state)
{
    (void)state;
    for (int64_t seq = 1; seq < 9; seq++) {
        for (int64_t tokens = 2; tokens < 50; tokens++) {
            int64_t windows, first, n, predicted = 1; /* the next token that is to be predicted */
            assert_ok(fsdp_eval_windows(tokens, seq, &windows));
            for (int64_t i = 0; i < windows; i++) {
                assert_ok(fsdp_eval_window(tokens, seq, i, &first, &n));
                assert_true(first + 1 == predicted && n >= 1 && n <= seq && (n == seq || i == windows - 1));
                predicted += n;
            }
            assert_int_equal(predicted, tokens);
        }
    }
    int64_t windows, first, n;
    assert_ok(fsdp_eval_windows(INT64_MAX, INT64_MAX, &windows));
    assert_int_equal(windows, 1);
    assert_ok(fsdp_eval_window(INT64_MAX, 2, (int64_t)1 << 61, &first, &n));
    assert_true(first == (int64_t)1 << 62 && n == 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_permutations),
        cmocka_unit_test(test_huge_permutations),
        cmocka_unit_test(test_places_are_uniform),
        cmocka_unit_test(test_epochs_and_seeds_differ),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_pinned),
        cmocka_unit_test(test_independent_of_ranks),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_eval_windows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
