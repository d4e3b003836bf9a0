/* SPDX-License-Identifier: MIT
 *
 * An arena asks the system once for each block and hands it out again; its figures are exact; where memory ends it
 * says so and leaves nothing behind. */
#include "support/testing.h"

#include "base/alloc.h"
#include "device/arena.h"

#include <fsdp/random.h>

static fsdpi_arena *arena_on(fsdp_device **dev, const char *name)
{
    fsdpi_arena *a;
    assert_ok(fsdp_device_open(dev, name));
    assert_ok(fsdpi_arena_create(&a, *dev));
    assert_ptr_equal(fsdpi_arena_device(a), *dev);
    return a;
}

static void *take(fsdpi_arena *a, size_t bytes)
{
    void *p;
    assert_ok(fsdpi_arena_alloc(a, bytes, &p));
    assert_true((uintptr_t)p % 64 == 0);
    return p;
}

static void test_figures(void **state)
{
    (void)state;
    fsdp_device *dev;
    fsdpi_arena *a = arena_on(&dev, "cpu");
    fsdpi_arena_stats s = fsdpi_arena_get_stats(a);
    assert_true(s.bytes_live == 0 && s.bytes_held == 0 && s.system_allocs == 0 && s.bytes_live_peak == 0);
    void *p = take(a, 100), *q = take(a, 5000);
    s = fsdpi_arena_get_stats(a);
    assert_int_equal(s.bytes_live, 5100);
    assert_int_equal(s.bytes_live_peak, 5100);
    assert_int_equal(s.system_allocs, 2);
    assert_true(s.bytes_held >= 5100);
    fsdpi_arena_free(a, p);
    fsdpi_arena_free(a, NULL);
    s = fsdpi_arena_get_stats(a);
    assert_int_equal(s.bytes_live, 5000);
    assert_int_equal(s.bytes_live_peak, 5100);
    fsdpi_arena_reset_peak(a);
    assert_int_equal(fsdpi_arena_get_stats(a).bytes_live_peak, 5000);
    void *z = take(a, 0), *y = take(a, 0);
    assert_ptr_not_equal(z, y);
    assert_int_equal(fsdpi_arena_get_stats(a).bytes_live, 5000);
    fsdpi_arena_free(a, z);
    fsdpi_arena_free(a, y);
    fsdpi_arena_free(a, q);
    fsdpi_arena_trim(a);
    s = fsdpi_arena_get_stats(a);
    assert_true(s.bytes_live == 0 && s.bytes_held == 0);
    fsdpi_arena_destroy(a);
}

/* What a step asks for in the first round is handed out in all later ones; what is live never overlaps. */
static void reuse(const char *name, bool rotate)
{
    enum { BLOCKS = 40, ROUNDS = 20 };
    fsdp_device *dev;
    fsdpi_arena *a = arena_on(&dev, name);
    fsdpi_arena_rotate(a, rotate);
    fsdp_rng rng;
    fsdp_rng_init(&rng, 3);
    size_t bytes[BLOCKS], held = 0;
    uint64_t allocs = 0;
    for (int i = 0; i < BLOCKS; i++) bytes[i] = (size_t)1 << (fsdp_rng_u32(&rng) % 18);
    for (int round = 0; round < ROUNDS; round++) {
        char *p[BLOCKS];
        for (int i = 0; i < BLOCKS; i++) {
            p[i] = take(a, bytes[i] + (size_t)round % 3); /* near sizes share blocks */
            for (int j = 0; j < i; j++) assert_true(p[i] + bytes[i] <= p[j] || p[j] + bytes[j] <= p[i]);
        }
        for (int i = 0; i < BLOCKS; i++) fsdpi_arena_free(a, p[(i * 7 + round) % BLOCKS]);
        fsdpi_arena_stats s = fsdpi_arena_get_stats(a);
        assert_int_equal(s.bytes_live, 0);
        if (round == 2) {
            allocs = s.system_allocs;
            held = s.bytes_held;
        }
        if (round > 2) {
            assert_int_equal(s.system_allocs, allocs);
            assert_int_equal(s.bytes_held, held);
        }
    }
    fsdpi_arena_destroy(a);
    fsdp_device_close(dev);
}

static void test_blocks_are_used_again(void **state)
{
    (void)state;
    reuse("cpu", false);
    reuse("cpu", true);
    reuse("guard", true);
}

/* Latest first, warm in the cache; rotating, at another address. */
static void test_rotation(void **state)
{
    (void)state;
    fsdp_device *dev;
    fsdpi_arena *a = arena_on(&dev, "cpu");
    void *p = take(a, 8192), *q = take(a, 8192);
    fsdpi_arena_free(a, p);
    fsdpi_arena_free(a, q);
    void *r = take(a, 8192);
    assert_ptr_equal(r, q);
    fsdpi_arena_free(a, r);
    fsdpi_arena_rotate(a, true);
    for (int i = 0; i < 4; i++) {
        void *x = take(a, 8192);
        fsdpi_arena_free(a, x);
        void *y = take(a, 8192);
        assert_ptr_not_equal(x, y);
        fsdpi_arena_free(a, y);
    }
    fsdpi_arena_destroy(a);
}

/* A block much too large is not given away for a small wish. */
static void test_no_waste(void **state)
{
    (void)state;
    fsdp_device *dev;
    fsdpi_arena *a = arena_on(&dev, "cpu");
    void *big = take(a, 1 << 20);
    fsdpi_arena_free(a, big);
    void *small = take(a, 4096);
    assert_ptr_not_equal(small, big);
    assert_int_equal(fsdpi_arena_get_stats(a).system_allocs, 2);
    fsdpi_arena_free(a, small);
    fsdpi_arena_destroy(a);
}

static fsdp_status take_two(fsdpi_arena *a)
{
    void *p, *q;
    FSDP_TRY(fsdpi_arena_alloc(a, 100, &p));
    fsdp_status st = fsdpi_arena_alloc(a, 100000, &q);
    if (st == FSDP_OK) fsdpi_arena_free(a, q);
    fsdpi_arena_free(a, p);
    return st;
}

static void test_no_memory(void **state)
{
    (void)state;
    static const char *const names[] = { "cpu", "guard" };
    for (int d = 0; d < 2; d++) {
        fsdp_device *dev;
        fsdpi_arena *a = arena_on(&dev, names[d]);
        long blocks = fsdpi_alloc_live();
        fsdp_status st = FSDP_ERR_NOMEM;
        for (int n = 1; st != FSDP_OK; n++) {
            fsdpi_alloc_fail_at(n);
            st = take_two(a);
            fsdpi_alloc_fail_at(0);
            if (st != FSDP_OK) assert_int_equal(st, FSDP_ERR_NOMEM);
            assert_int_equal(fsdpi_arena_get_stats(a).bytes_live, 0);
            fsdpi_arena_trim(a);
            assert_int_equal(fsdpi_arena_get_stats(a).bytes_held, 0);
            assert_int_equal(fsdpi_alloc_live(), blocks);
            assert_true(n < 20);
        }
        void *p = &p;
        assert_fails(fsdpi_arena_alloc(a, (size_t)1 << 60, &p), FSDP_ERR_NOMEM, "bytes");
        assert_ptr_equal(p, &p); /* a failed call writes no outputs */
        fsdpi_arena_destroy(a);
        fsdp_device_close(dev);
    }
    /* Where the system refuses, free blocks go back to it first: one refusal is not the end. */
    fsdp_device *dev;
    fsdpi_arena *a = arena_on(&dev, "cpu");
    fsdpi_arena_free(a, take(a, 4096));
    fsdpi_alloc_fail_at(2); /* 1: the block's record; 2: its memory */
    fsdpi_arena_free(a, take(a, 1 << 20));
    fsdpi_alloc_fail_at(0);
    assert_int_equal(fsdpi_arena_get_stats(a).system_allocs, 2);
    fsdpi_arena_destroy(a);
}

/* After an error a program may leave blocks out: they go with the arena. */
static void test_what_is_still_out_goes_too(void **state)
{
    (void)state;
    fsdp_device *dev;
    long blocks = fsdpi_alloc_live();
    fsdpi_arena *a = arena_on(&dev, "cpu");
    take(a, 100);
    take(a, 100000);
    fsdpi_arena_destroy(a);
    assert_int_equal(fsdpi_alloc_live(), blocks);
    fsdpi_arena_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_figures),
        cmocka_unit_test(test_blocks_are_used_again),
        cmocka_unit_test(test_rotation),
        cmocka_unit_test(test_no_waste),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_what_is_still_out_goes_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
