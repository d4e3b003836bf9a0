/* SPDX-License-Identifier: MIT
 *
 * What every device owes, whatever its name: memory that kernels and copies reach, work in order, errors that stick
 * until they are told, streams that wait for each other, mappings that protect. And what the guard is for: the host
 * cannot touch its memory. */
#include "support/ranks.h"

#include "base/alloc.h"
#include "device/device.h"

#include <sys/mman.h>
#include <unistd.h>

static const char *const names[] = { "cpu", "guard" };
enum { NAMES = sizeof(names) / sizeof(names[0]) };

static fsdp_device *open_device(const char *name)
{
    fsdp_device *dev;
    assert_ok(fsdp_device_open(&dev, name));
    assert_string_equal(fsdp_device_name(dev), name);
    return dev;
}

static void *take(fsdp_device *dev, size_t bytes)
{
    void *p;
    assert_ok(dev->ops->alloc(dev, bytes, &p));
    assert_true((uintptr_t)p % fsdpi_page_size() == 0);
    return p;
}

static fsdp_stream *open_stream(fsdp_device *dev)
{
    fsdp_stream *s;
    assert_ok(fsdpi_stream_create(&s, dev, NULL));
    return s;
}

static void for_devices(void (*fn)(fsdp_device *dev))
{
    for (int i = 0; i < NAMES; i++) {
        long blocks = fsdpi_alloc_live();
        fsdp_device *dev = open_device(names[i]);
        fn(dev);
        fsdp_device_close(dev);
        if (fsdpi_alloc_live() != blocks) fail_msg("%s: %ld blocks are left", names[i], fsdpi_alloc_live() - blocks);
    }
}

static void test_names(void **state)
{
    (void)state;
    fsdp_device *dev = NULL;
    assert_fails(fsdp_device_open(&dev, "abacus"), FSDP_ERR_INVALID, "no device is called \"abacus\"; there are: cpu, guard");
    assert_fails(fsdp_device_open(&dev, NULL), FSDP_ERR_INVALID, "cpu, guard");
    assert_null(dev);
    assert_ok(fsdp_device_open(&dev, "cpu"));
    assert_ptr_equal(dev, fsdp_device_cpu());
    assert_true(fsdp_device_host_accessible(dev));
    fsdp_device_close(dev);
    fsdp_device_close(fsdp_device_cpu());
    fsdp_device_close(NULL);
    dev = open_device("guard");
    assert_false(fsdp_device_host_accessible(dev));
    fsdp_device_close(dev);
}

/* ---- memory ---- */

static void copies(fsdp_device *dev)
{
    enum { N = 100003 };
    fsdp_stream *s = open_stream(dev);
    unsigned char *host = malloc(N), *back = malloc(N), *a = take(dev, N), *b = take(dev, N);
    for (int i = 0; i < N; i++) host[i] = (unsigned char)(i * 31 >> 3);
    memset(back, 0, N);
    assert_ok(fsdp_stream_copy(s, a, host, N));
    assert_ok(fsdp_stream_copy(s, b, a, N));
    assert_ok(fsdpi_stream_fill(s, a, 0x5a, N));
    assert_ok(fsdp_stream_copy(s, b + 5, a + 7, 11)); /* any offset */
    assert_ok(fsdp_stream_copy(s, back, b, N));
    assert_ok(fsdp_stream_sync(s));
    for (int i = 5; i < 16; i++) host[i] = 0x5a;
    assert_memory_equal(host, back, N);
    assert_ok(fsdp_stream_copy(s, NULL, NULL, 0));
    assert_ok(fsdpi_stream_fill(s, NULL, 0, 0));
    assert_ok(fsdp_stream_copy(s, NULL, a, 0));
    assert_ok(fsdp_stream_sync(s));
    fsdpi_stream_destroy(s);
    dev->ops->free(dev, a, N);
    dev->ops->free(dev, b, N);
    free(host);
    free(back);
}

static void test_copies(void **state)
{
    (void)state;
    for_devices(copies);
}

static fsdp_status k_addresses(const fsdp_kernel *k, const void *args)
{
    void *const *a = args; /* a host address, NULL, a device address */
    rank_check(fsdp_kernel_ptr(k, a[0]) == a[0]);
    rank_check(fsdp_kernel_ptr(k, NULL) == NULL);
    *(volatile char *)fsdp_kernel_ptr(k, a[1]) = 1;
    return FSDP_OK;
}

static void addresses(fsdp_device *dev)
{
    fsdp_stream *s = open_stream(dev);
    char local, *p = take(dev, 4096);
    assert_ok(fsdp_stream_launch(s, k_addresses, (void *[]){ &local, p + 4095 }, 2 * sizeof(void *)));
    assert_ok(fsdp_stream_sync(s));
    fsdpi_stream_destroy(s);
    dev->ops->free(dev, p, 4096);
}

static void test_addresses(void **state)
{
    (void)state;
    for_devices(addresses);
}

/* Two mappings of shared memory show the same bytes; a read-only one cannot be written, a protected one not read. */
static void mappings_of(fsdp_device *dev, int fd, void *base)
{
    size_t page = fsdpi_page_size();
    fsdpi_shared mem = { .fd = fd, .base = base, .alias = true };
    fsdp_stream *s = open_stream(dev);
    void *rw, *ro;
    assert_ok(dev->ops->map(dev, &mem, page, 2 * page, true, &rw));
    assert_ok(dev->ops->map(dev, &mem, 2 * page, page, false, &ro));
    char text[] = "seen through another mapping", back[sizeof(text)] = "";
    assert_ok(fsdp_stream_copy(s, (char *)rw + page, text, sizeof(text)));
    assert_ok(fsdp_stream_copy(s, back, ro, sizeof(text)));
    assert_ok(fsdp_stream_sync(s));
    assert_string_equal(back, text);
    fsdpi_stream_destroy(s);
    dev->ops->unmap(dev, &mem, rw, 2 * page);
    dev->ops->unmap(dev, &mem, ro, page);
}

static void mappings(fsdp_device *dev)
{
    size_t bytes = 4 * fsdpi_page_size();
    int fd = memfd_create("device_test", 0);
    assert_true(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    mappings_of(dev, fd, NULL);
    close(fd);
    void *base = shared_alloc(bytes);
    mappings_of(dev, -1, base);
    shared_free(base, bytes);
}

static void test_mappings(void **state)
{
    (void)state;
    for_devices(mappings);
}

/* ---- order ---- */

typedef struct note {
    int *log, *count;
    int what;
    char rest[600]; /* arguments are copied whole */
} note;

static fsdp_status k_note(const fsdp_kernel *k, const void *args)
{
    (void)k;
    const note *n = args;
    rank_check(n->rest[sizeof(n->rest) - 1] == (char)n->what);
    n->log[(*n->count)++] = n->what;
    return FSDP_OK;
}

static void order(fsdp_device *dev)
{
    enum { N = 500 };
    static int log[N];
    int count = 0;
    fsdp_stream *s = open_stream(dev);
    note n = { .log = log, .count = &count };
    for (n.what = 0; n.what < N; n.what++) {
        n.rest[sizeof(n.rest) - 1] = (char)n.what;
        assert_ok(fsdp_stream_launch(s, k_note, &n, sizeof(n))); /* n changes while it waits */
        if (n.what % 100 == 0) assert_ok(fsdp_stream_sync(s));
        if (n.what % 100 == 0) assert_int_equal(count, n.what + 1);
    }
    fsdpi_stream_destroy(s); /* waits for its work */
    assert_int_equal(count, N);
    for (int i = 0; i < N; i++) assert_int_equal(log[i], i);
}

static void test_work_runs_in_order(void **state)
{
    (void)state;
    for_devices(order);
}

static fsdp_status k_first_byte(const fsdp_kernel *k, const void *args)
{
    (void)k;
    const unsigned char *a = args;
    return a[0] == 7 && a[4095] == 9 ? FSDP_OK : FSDP_ERR_INTERNAL;
}

static fsdp_status k_nothing(const fsdp_kernel *k, const void *args)
{
    (void)k;
    (void)args;
    return FSDP_OK;
}

static void arguments(fsdp_device *dev)
{
    fsdp_stream *s = open_stream(dev);
    unsigned char big[4097] = { 7 };
    big[4095] = 9;
    assert_ok(fsdp_stream_launch(s, k_first_byte, big, 4096));
    assert_ok(fsdp_stream_launch(s, k_nothing, NULL, 0));
    assert_fails(fsdp_stream_launch(s, k_first_byte, big, 4097), FSDP_ERR_INVALID, "4097 bytes of arguments, at most 4096");
    assert_ok(fsdp_stream_sync(s));
    fsdpi_stream_destroy(s);
}

static void test_arguments(void **state)
{
    (void)state;
    for_devices(arguments);
}

/* ---- errors ---- */

static fsdp_status k_fail(const fsdp_kernel *k, const void *args)
{
    (void)k;
    FSDP_FAIL(FSDP_ERR_NONFINITE, "kernel %d saw a NaN", *(const int *)args);
}

static fsdp_status k_count(const fsdp_kernel *k, const void *args)
{
    (void)k;
    ++**(int *const *)args;
    return FSDP_OK;
}

static void errors(fsdp_device *dev)
{
    fsdp_stream *s = open_stream(dev), *other = open_stream(dev);
    for (int round = 0; round < 20; round++) {
        int before = 0, after = 0, unhurt = 0, failed = 0, *p = &before;
        assert_ok(fsdp_stream_launch(s, k_count, &p, sizeof(p)));
        fsdp_status st = fsdp_stream_launch(s, k_fail, &round, sizeof(round));
        assert_true(st == FSDP_OK || st == FSDP_ERR_NONFINITE); /* told now, or later */
        p = &after;
        for (int i = 0; i < 50; i++) failed += fsdp_stream_launch(s, k_count, &p, sizeof(p)) != FSDP_OK;
        st = fsdp_stream_launch(s, k_fail, &(int){ -1 }, sizeof(int)); /* the first error counts, this does not run */
        p = &unhurt;
        assert_ok(fsdp_stream_launch(other, k_count, &p, sizeof(p)));
        assert_ok(fsdp_stream_sync(other));
        char text[64];
        snprintf(text, sizeof(text), "kernel %d saw a NaN", round);
        assert_fails(fsdp_stream_sync(s), FSDP_ERR_NONFINITE, text);
        assert_int_equal(before, 1);
        assert_int_equal(after, 0);
        assert_int_equal(unhurt, 1);
        assert_ok(fsdp_stream_sync(s)); /* told: forgotten */
        p = &after;
        assert_ok(fsdp_stream_launch(s, k_count, &p, sizeof(p)));
        assert_ok(fsdp_stream_sync(s));
        assert_int_equal(after, 1);
        if (!dev->ops->async) assert_int_equal(failed, 50);
    }
    fsdpi_stream_destroy(s);
    fsdpi_stream_destroy(other);
}

static void test_errors_stick_until_they_are_told(void **state)
{
    (void)state;
    for_devices(errors);
}

/* A kernel may return a status that nobody raised. */
static fsdp_status k_bare(const fsdp_kernel *k, const void *args)
{
    (void)k;
    (void)args;
    return FSDP_ERR_DEVICE;
}

static void bare(fsdp_device *dev)
{
    fsdp_stream *s = open_stream(dev);
    (void)!fsdp_stream_launch(s, k_bare, NULL, 0);
    assert_fails(fsdp_stream_sync(s), FSDP_ERR_DEVICE, "FSDP_ERR_DEVICE");
    assert_ok(fsdp_stream_sync(s));
    (void)!fsdp_stream_launch(s, k_bare, NULL, 0);
    fsdpi_stream_destroy(s); /* with an error that nobody asked for */
}

static void test_bare_statuses(void **state)
{
    (void)state;
    for_devices(bare);
}

/* ---- streams that wait ---- */

typedef struct baton {
    volatile int *value;
    int expect, set;
    bool slow;
} baton;

static fsdp_status k_baton(const fsdp_kernel *k, const void *args)
{
    (void)k;
    const baton *b = args;
    if (b->slow) usleep(300);
    rank_check(*b->value == b->expect);
    *b->value = b->set;
    return FSDP_OK;
}

/* A plain variable goes back and forth between two streams: ThreadSanitizer sees whether waiting orders them. */
static void batons(fsdp_device *dev)
{
    fsdp_stream *s[2] = { open_stream(dev), open_stream(dev) };
    volatile int value = 0;
    for (int i = 0; i < 300; i++) {
        assert_ok(fsdpi_stream_wait_stream(s[i % 2], s[(i + 1) % 2]));
        assert_ok(fsdp_stream_launch(s[i % 2], k_baton, &(baton){ &value, i, i + 1, i % 7 == 0 }, sizeof(baton)));
    }
    assert_ok(fsdp_stream_sync(s[1]));
    assert_int_equal(value, 300);
    assert_ok(fsdpi_stream_wait_stream(s[0], s[0])); /* itself: nothing to wait for */
    assert_ok(fsdp_stream_sync(s[0]));
    fsdpi_stream_destroy(s[0]);
    fsdpi_stream_destroy(s[1]);
}

static void test_streams_wait_for_each_other(void **state)
{
    (void)state;
    for_devices(batons);
}

/* An asynchronous stream that waits for one that has failed has what it waited for in vain: it fails too. */
static void test_waiting_for_a_failed_stream(void **state)
{
    (void)state;
    fsdp_device *dev = open_device("guard");
    fsdp_stream *a = open_stream(dev), *b = open_stream(dev);
    int ran = 0, *p = &ran;
    (void)!fsdp_stream_launch(a, k_fail, &(int){ 3 }, sizeof(int));
    fsdp_status st = fsdpi_stream_wait_stream(b, a);
    if (st == FSDP_OK) st = fsdp_stream_launch(b, k_count, &p, sizeof(p));
    assert_fails(fsdp_stream_sync(b), FSDP_ERR_NONFINITE, "kernel 3");
    assert_int_equal(ran, 0);
    assert_fails(fsdp_stream_sync(a), FSDP_ERR_NONFINITE, "kernel 3");
    fsdpi_stream_destroy(a);
    fsdpi_stream_destroy(b);
    fsdp_device_close(dev);
}

static fsdp_status k_until(const fsdp_kernel *k, const void *args)
{
    (void)k;
    while (atomic_load(*(_Atomic int *const *)args) == 0) usleep(50);
    return FSDP_OK;
}

/* What failed behind the place that is waited for is no concern of the waiter's, however late it looks. */
static void test_waiting_for_work_before_a_failure(void **state)
{
    (void)state;
    fsdp_device *dev = open_device("guard");
    fsdp_stream *a = open_stream(dev), *b = open_stream(dev);
    _Atomic int go = 0, *g = &go;
    int ran = 0, *p = &ran;
    assert_ok(fsdp_stream_launch(a, k_count, &p, sizeof(p)));
    assert_ok(fsdp_stream_launch(b, k_until, &g, sizeof(g)));
    assert_ok(fsdpi_stream_wait_stream(b, a));
    assert_ok(fsdp_stream_launch(b, k_count, &p, sizeof(p)));
    while (fsdp_stream_launch(a, k_fail, &(int){ 4 }, sizeof(int)) == FSDP_OK) usleep(50); /* until it has failed */
    atomic_store(&go, 1);
    assert_ok(fsdp_stream_sync(b));
    assert_int_equal(ran, 2);
    assert_fails(fsdp_stream_sync(a), FSDP_ERR_NONFINITE, "kernel 4");
    fsdpi_stream_destroy(a);
    fsdpi_stream_destroy(b);
    fsdp_device_close(dev);
}

/* ---- threads ---- */

typedef struct many {
    _Atomic int done[100];
} many;

static void piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    atomic_fetch_add(&((many *)arg)->done[i], 1);
}

static fsdp_status k_parallel(const fsdp_kernel *k, const void *args)
{
    fsdpi_kernel_parallel(k, 100, piece, *(many *const *)args);
    return FSDP_OK;
}

static void parallel(fsdp_device *dev)
{
    fsdpi_pool *pool;
    fsdp_stream *s;
    assert_ok(fsdpi_pool_create(&pool, 3));
    assert_ok(fsdpi_stream_create(&s, dev, pool));
    static many m;
    many *p = &m;
    memset(&m, 0, sizeof(m));
    for (int i = 0; i < 50; i++) assert_ok(fsdp_stream_launch(s, k_parallel, &p, sizeof(p)));
    assert_ok(fsdp_stream_sync(s));
    for (int i = 0; i < 100; i++) assert_int_equal(m.done[i], 50);
    fsdpi_stream_destroy(s);
    fsdpi_pool_destroy(pool);
}

static void test_kernels_use_the_rank_s_threads(void **state)
{
    (void)state;
    for_devices(parallel);
}

/* ---- no memory ---- */

static fsdp_status use_everything(const char *name)
{
    fsdp_device *dev;
    fsdp_stream *s = NULL;
    void *p = NULL;
    FSDP_TRY(fsdp_device_open(&dev, name));
    fsdp_status st = fsdpi_stream_create(&s, dev, NULL);
    if (st == FSDP_OK) st = dev->ops->alloc(dev, 10000, &p);
    if (st == FSDP_OK) st = fsdpi_stream_fill(s, p, 1, 10000);
    if (st == FSDP_OK) st = fsdp_stream_sync(s);
    fsdpi_stream_destroy(s);
    if (p != NULL) dev->ops->free(dev, p, 10000);
    fsdp_device_close(dev);
    return st;
}

static void test_every_allocation_may_fail(void **state)
{
    (void)state;
    for (int i = 0; i < NAMES; i++) {
        long blocks = fsdpi_alloc_live();
        fsdp_status st = FSDP_ERR_NOMEM;
        int n = 0;
        while (st != FSDP_OK) {
            fsdpi_alloc_fail_at(++n);
            st = use_everything(names[i]);
            fsdpi_alloc_fail_at(0);
            if (st != FSDP_OK) assert_int_equal(st, FSDP_ERR_NOMEM);
            assert_int_equal(fsdpi_alloc_live(), blocks);
            assert_true(n < 50);
        }
        assert_true(n > 2);
    }
    fsdp_device *guard = open_device("guard");
    void *p = NULL;
    assert_fails(guard->ops->alloc(guard, (size_t)1 << 40, &p), FSDP_ERR_NOMEM, "more than half");
    fsdp_device_close(guard);
}

/* ---- what must fault ---- */

static void read_guard_memory(void *arg)
{
    (void)arg;
    fsdp_device *dev;
    void *p;
    if (fsdp_device_open(&dev, "guard") != FSDP_OK || dev->ops->alloc(dev, 4096, &p) != FSDP_OK) _exit(1);
    (void)*(volatile char *)p;
}

static void write_guard_memory(void *arg)
{
    (void)arg;
    fsdp_device *dev;
    void *p;
    if (fsdp_device_open(&dev, "guard") != FSDP_OK || dev->ops->alloc(dev, 4096, &p) != FSDP_OK) _exit(1);
    *(volatile char *)p = 1;
}

static fsdp_status k_untranslated(const fsdp_kernel *k, const void *args)
{
    (void)k;
    **(volatile char *const *)args = 1;
    return FSDP_OK;
}

static void forget_the_translation(void *arg)
{
    (void)arg;
    fsdp_device *dev;
    fsdp_stream *s;
    void *p;
    if (fsdp_device_open(&dev, "guard") != FSDP_OK || dev->ops->alloc(dev, 4096, &p) != FSDP_OK) _exit(1);
    if (fsdpi_stream_create(&s, dev, NULL) != FSDP_OK) _exit(1);
    (void)!fsdp_stream_launch(s, k_untranslated, &p, sizeof(p));
    (void)!fsdp_stream_sync(s);
}

/* arg: the device's name. Its kernels see freed memory go. */
static void use_after_free(void *arg)
{
    fsdp_device *dev;
    fsdp_stream *s;
    void *p, *q;
    if (fsdp_device_open(&dev, arg) != FSDP_OK || dev->ops->alloc(dev, 4096, &p) != FSDP_OK) _exit(1);
    if (fsdpi_stream_create(&s, dev, NULL) != FSDP_OK) _exit(1);
    dev->ops->free(dev, p, 4096);
    for (int i = 0; i < 50; i++) /* addresses are not handed out again soon */
        if (dev->ops->alloc(dev, 4096, &q) != FSDP_OK || q == p) _exit(1);
    (void)!fsdpi_stream_fill(s, p, 0, 16);
    (void)!fsdp_stream_sync(s);
}

/* arg: the device's name */
static void write_read_only(void *arg)
{
    fsdp_device *dev;
    fsdp_stream *s;
    void *p, *base = shared_alloc(fsdpi_page_size());
    fsdpi_shared mem = { .fd = -1, .base = base, .alias = true };
    if (fsdp_device_open(&dev, arg) != FSDP_OK || fsdpi_stream_create(&s, dev, NULL) != FSDP_OK) _exit(1);
    if (dev->ops->map(dev, &mem, 0, fsdpi_page_size(), false, &p) != FSDP_OK) _exit(1);
    (void)!fsdpi_stream_fill(s, p, 0, 16);
    (void)!fsdp_stream_sync(s);
}

static void read_protected(void *arg)
{
    fsdp_device *dev;
    fsdp_stream *s;
    char to[16];
    size_t page = fsdpi_page_size();
    void *p, *base = shared_alloc(page);
    fsdpi_shared mem = { .fd = -1, .base = base, .alias = true };
    if (fsdp_device_open(&dev, arg) != FSDP_OK || fsdpi_stream_create(&s, dev, NULL) != FSDP_OK) _exit(1);
    if (dev->ops->map(dev, &mem, 0, page, false, &p) != FSDP_OK) _exit(1);
    dev->ops->protect(dev, p, page, false);
    dev->ops->protect(dev, p, page, true);
    if (fsdp_stream_copy(s, to, p, 16) != FSDP_OK || fsdp_stream_sync(s) != FSDP_OK) _exit(1);
    dev->ops->protect(dev, p, page, false);
    (void)!fsdp_stream_copy(s, to, p, 16);
    (void)!fsdp_stream_sync(s);
}

static void test_what_must_fault_does(void **state)
{
    (void)state;
    assert_faults(read_guard_memory, NULL);
    assert_faults(write_guard_memory, NULL);
    assert_faults(forget_the_translation, NULL);
    assert_faults(use_after_free, "guard");
    for (int i = 0; i < NAMES; i++) {
        assert_faults(write_read_only, (void *)(uintptr_t)names[i]);
        assert_faults(read_protected, (void *)(uintptr_t)names[i]);
    }
}

/* Fresh guard memory is full of NaNs: nobody may count on zeros. */
static void test_fresh_guard_memory_is_garbage(void **state)
{
    (void)state;
    fsdp_device *dev = open_device("guard");
    fsdp_stream *s = open_stream(dev);
    float *p = take(dev, 4096), back[1024];
    assert_ok(fsdp_stream_copy(s, back, p, 4096));
    assert_ok(fsdp_stream_sync(s));
    for (int i = 0; i < 1024; i++) assert_true(back[i] != back[i]);
    dev->ops->free(dev, p, 4096);
    fsdpi_stream_destroy(s);
    fsdp_device_close(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_mappings),
        cmocka_unit_test(test_work_runs_in_order),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_errors_stick_until_they_are_told),
        cmocka_unit_test(test_bare_statuses),
        cmocka_unit_test(test_streams_wait_for_each_other),
        cmocka_unit_test(test_waiting_for_a_failed_stream),
        cmocka_unit_test(test_waiting_for_work_before_a_failure),
        cmocka_unit_test(test_kernels_use_the_rank_s_threads),
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_what_must_fault_does),
        cmocka_unit_test(test_fresh_guard_memory_is_garbage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
