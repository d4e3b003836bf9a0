/* SPDX-License-Identifier: MIT
 *
 * Whatever the parameters and the number of ranks: every element of every parameter lies at one place, belongs to one
 * rank, and slices cut parameters without gap or overlap; alignment and padding cost little. And what is no geometry
 * is refused by name. */
#include "support/testing.h"

#include "base/alloc.h"
#include "shard/layout.h"

#include <fsdp/random.h>

/* The equations of layout.h, and that segments cover each parameter once, in order. */
static void check(const fsdp_param *params, int count, int size)
{
    fsdpi_layout l;
    assert_ok(fsdpi_layout_init(&l, params, count, size, "u"));
    int64_t numel = 0;
    assert_int_equal(l.count, count);
    assert_int_equal(l.size, size);
    for (int i = 0; i < count; i++) {
        assert_string_equal(l.param[i].name, params[i].name);
        assert_ptr_not_equal(l.param[i].name, params[i].name); /* a copy */
        assert_int_equal(l.param[i].ndim, params[i].ndim);
        assert_int_equal(l.at[i] % FSDPI_ALIGN, 0);
        assert_int_equal(l.at[i], numel); /* one after another, each rounded up */
        numel += (l.numel[i] + FSDPI_ALIGN - 1) / FSDPI_ALIGN * FSDPI_ALIGN;
    }
    assert_true(l.total == numel || (numel == 0 && l.total == FSDPI_ALIGN));
    assert_int_equal(l.edge[0], 0);
    assert_int_equal(l.edge[size], l.total);
    int64_t most = 0;
    for (int r = 0; r < size; r++) {
        assert_true(l.edge[r] <= l.edge[r + 1]);
        assert_true(l.edge[r] % FSDPI_ALIGN == 0 || l.edge[r] == l.total);
        most = l.edge[r + 1] - l.edge[r] > most ? l.edge[r + 1] - l.edge[r] : most;
    }
    assert_true(most * size < l.total + (int64_t)size * FSDPI_ALIGN); /* no slice is larger than it must be */
    int64_t *next = calloc((size_t)count + 1, sizeof(*next));
    fsdpi_segment *s = calloc((size_t)count + 1, sizeof(*s));
    for (int r = 0; r < size; r++) {
        int n = fsdpi_layout_cut(&l, l.edge[r], l.edge[r + 1], s);
        assert_true(n <= count);
        for (int k = 0; k < n; k++) {
            int i = s[k].param;
            assert_true(k == 0 || i > s[k - 1].param);
            assert_true(s[k].numel > 0);
            assert_int_equal(s[k].offset, next[i]); /* where the rank before left off */
            assert_int_equal(s[k].at, l.at[i] + s[k].offset);
            assert_true(s[k].at >= l.edge[r] && s[k].at + s[k].numel <= l.edge[r + 1]);
            next[i] += s[k].numel;
        }
    }
    for (int i = 0; i < count; i++) assert_int_equal(next[i], l.numel[i]);
    assert_int_equal(fsdpi_layout_cut(&l, 0, l.total, s) <= count, 1);
    free(next);
    free(s);
    fsdpi_layout_fini(&l);
    fsdpi_layout_fini(&l); /* twice does no harm */
}

static void test_random_shapes(void **state)
{
    (void)state;
    enum { MOST = 12 };
    long blocks = fsdpi_alloc_live();
    fsdp_rng rng;
    fsdp_rng_init(&rng, 11);
    for (int round = 0; round < 3000; round++) {
        fsdp_param p[MOST];
        char names[MOST][16];
        int count = (int)(fsdp_rng_u32(&rng) % (MOST + 1)), size = 1 + (int)(fsdp_rng_u32(&rng) % (round % 10 == 0 ? 200 : 9));
        for (int i = 0; i < count; i++) {
            snprintf(names[i], sizeof(names[i]), "p%d", i);
            p[i] = (fsdp_param){ .name = names[i], .ndim = (int)(fsdp_rng_u32(&rng) % 4) };
            for (int d = 0; d < p[i].ndim; d++) p[i].shape[d] = fsdp_rng_u32(&rng) % (fsdp_rng_u32(&rng) % 3 == 0 ? 70 : 8);
        }
        check(p, count, size);
    }
    assert_int_equal(fsdpi_alloc_live(), blocks);
}

static void test_sizes_round_the_number_of_ranks(void **state)
{
    (void)state;
    for (int size = 1; size <= 17; size++) {
        const int64_t numels[] = { 0, 1, size - 1, size, size + 1, 2 * size - 1, 16 * size - 1, 16 * size, 16 * size + 1 };
        for (size_t i = 0; i < sizeof(numels) / sizeof(numels[0]); i++)
            check(&(fsdp_param){ .name = "p", .ndim = 1, .shape = { numels[i] } }, 1, size);
        check(NULL, 0, size);
        check(&(fsdp_param){ .name = "scalar" }, 1, size);
    }
}

static void test_what_is_refused(void **state)
{
    (void)state;
    fsdpi_layout l;
    const fsdp_param twice[] = { { "w", 1, { 3 } }, { "v", 0, { 0 } }, { "w", 1, { 2 } } };
    const fsdp_param negative[] = { { "bad", 2, { 3, -1 } } }, deep[] = { { "deep", 9, { 1 } } }, shallow[] = { { "shallow", -1, { 1 } } };
    const fsdp_param nameless[] = { { NULL, 1, { 1 } } }, empty[] = { { "", 1, { 1 } } };
    const fsdp_param huge[] = { { "huge", 3, { (int64_t)1 << 31, (int64_t)1 << 31, (int64_t)1 << 31 } } };
    const fsdp_param large[] = { { "large", 2, { (int64_t)1 << 31, (int64_t)1 << 25 } } };
    const fsdp_param many[] = { { "a", 1, { (int64_t)1 << 56 } }, { "b", 1, { (int64_t)1 << 56 } }, { "c", 1, { (int64_t)1 << 56 } } };
    assert_fails(fsdpi_layout_init(&l, twice, 3, 2, "u"), FSDP_ERR_INVALID, "unit \"u\" has two parameters called \"w\"");
    assert_fails(fsdpi_layout_init(&l, negative, 1, 2, "u"), FSDP_ERR_INVALID, "parameter \"bad\": dimension 1 is -1");
    assert_fails(fsdpi_layout_init(&l, deep, 1, 2, "u"), FSDP_ERR_INVALID, "parameter \"deep\": 9 dimensions, at most 8");
    assert_fails(fsdpi_layout_init(&l, shallow, 1, 2, "u"), FSDP_ERR_INVALID, "\"shallow\": -1 dimensions");
    assert_fails(fsdpi_layout_init(&l, nameless, 1, 2, "u"), FSDP_ERR_INVALID, "a parameter has no name");
    assert_fails(fsdpi_layout_init(&l, empty, 1, 2, "u"), FSDP_ERR_INVALID, "a parameter has no name");
    assert_fails(fsdpi_layout_init(&l, huge, 1, 2, "u"), FSDP_ERR_INVALID, "\"huge\" has more elements than can be counted");
    assert_ok(fsdpi_layout_init(&l, large, 1, 2, "u")); /* whether there is memory is another matter */
    fsdpi_layout_fini(&l);
    assert_ok(fsdpi_layout_init(&l, many, 3, 8, "u"));
    assert_int_equal(l.total, (int64_t)3 << 56);
    fsdpi_layout_fini(&l);
    assert_fails(fsdpi_layout_init(&l, twice, -1, 2, "u"), FSDP_ERR_INVALID, "-1 parameters");
    assert_fails(fsdpi_layout_init(&l, NULL, 1, 2, "u"), FSDP_ERR_INVALID, "1 parameters");
}

static void test_no_memory(void **state)
{
    (void)state;
    const fsdp_param p[] = { { "w", 2, { 3, 3 } }, { "b", 1, { 3 } } };
    long blocks = fsdpi_alloc_live();
    fsdp_status st = FSDP_ERR_NOMEM;
    fsdpi_layout l;
    int n = 0;
    while (st != FSDP_OK) {
        fsdpi_alloc_fail_at(++n);
        st = fsdpi_layout_init(&l, p, 2, 3, "u");
        fsdpi_alloc_fail_at(0);
        assert_true(st == FSDP_OK || st == FSDP_ERR_NOMEM);
        if (st != FSDP_OK) assert_int_equal(fsdpi_alloc_live(), blocks);
    }
    assert_int_equal(n, 7);
    fsdpi_layout_fini(&l);
    assert_int_equal(fsdpi_alloc_live(), blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_shapes),
        cmocka_unit_test(test_sizes_round_the_number_of_ranks),
        cmocka_unit_test(test_what_is_refused),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
