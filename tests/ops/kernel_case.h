/* SPDX-License-Identifier: MIT
 *
 * A kernel with its arguments, to be run everywhere: the reference once, then the fast kernel on every
 * instruction set, on 1, 2, 3 and 5 threads, with arrays at odd addresses, and through streams of both
 * devices. What the fast kernel gives must be near the reference and the same bits everywhere; outputs begin
 * as NaNs where beta is 0, and nothing is written outside an array. To test a kernel: make a case, name its
 * arrays, check it.
 *
 *     kernel_case c = case_of("add 7", fsdpi_op_kernels_cpu.add, fsdpi_op_kernels_reference.add, &args,
 * sizeof(args)); case_in(&c, offsetof(fsdpi_add_args, x), 7); case_out(&c, offsetof(fsdpi_add_args, out), 7,
 * 0.0f, TOL_EXACT); case_check(&c); */
#ifndef FSDP_TESTS_KERNEL_CASE_H
#define FSDP_TESTS_KERNEL_CASE_H

#include "support/testing.h"

#include "device/device.h"
#include "ops/gemm.h"
#include "ops/kernels.h"
#include "tolerances.h"

#include <fsdp/random.h>
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CASE_FIELDS = 20, CASE_ARGS = 512, CASE_CANARY = 64 };

typedef struct case_field {
    size_t offset, bytes; /* of the pointer in the arguments; of the array */
    void *init;           /* NULL: garbage, NaNs if read as floats */
    bool output, is_double;
    int tolerance;
} case_field;

typedef struct kernel_case {
    char title[128];
    fsdp_kernel_fn fast, reference;
    _Alignas(16) char args[CASE_ARGS];
    size_t args_bytes;
    case_field field[CASE_FIELDS];
    int fields;
    /* Where the kernel wants scratch: */
    size_t scratch_offset;
    size_t (*scratch)(const void *args, int threads);
    /* Arrays that are one (y is x): field `alias` uses the array of field `alias_of`. */
    int alias, alias_of;
} kernel_case;

static inline kernel_case case_of(const char *title, fsdp_kernel_fn fast, fsdp_kernel_fn reference,
                                  const void *args, size_t bytes)
{
    kernel_case c = { .fast = fast, .reference = reference, .args_bytes = bytes, .alias = -1 };
    assert_true(bytes <= CASE_ARGS);
    snprintf(c.title, sizeof(c.title), "%s", title);
    memcpy(c.args, args, bytes);
    return c;
}

static inline case_field *case_add(kernel_case *c, size_t offset, size_t bytes)
{
    assert_true(c->fields < CASE_FIELDS);
    case_field *f = &c->field[c->fields++];
    *f = (case_field){ .offset = offset, .bytes = bytes };
    return f;
}

/* An array of the caller's, copied. */
static inline void case_data(kernel_case *c, size_t offset, const void *data, size_t bytes)
{
    case_field *f = case_add(c, offset, bytes);
    f->init = malloc(bytes + 1);
    assert_non_null(f->init);
    if (bytes > 0) memcpy(f->init, data, bytes);
}

/* Normally distributed floats. */
static inline void case_in_scaled(kernel_case *c, size_t offset, int64_t numel, float scale)
{
    case_field *f = case_add(c, offset, (size_t)numel * sizeof(float));
    float *x = f->init = malloc(f->bytes + 1);
    assert_non_null(x);
    fsdp_philox_normal_fill(17, "case", (int64_t)(offset * 1000003), numel, x);
    for (int64_t i = 0; i < numel; i++) x[i] *= scale;
}

static inline void case_in(kernel_case *c, size_t offset, int64_t numel)
{
    case_in_scaled(c, offset, numel, 1.0f);
}

static inline void case_out(kernel_case *c, size_t offset, int64_t numel, float beta, int tolerance)
{
    if (beta == 0.0f)
        case_add(c, offset, (size_t)numel * sizeof(float));
    else
        case_in(c, offset, numel);
    c->field[c->fields - 1].output = true;
    c->field[c->fields - 1].tolerance = tolerance;
}

static inline void case_out_doubles(kernel_case *c, size_t offset, int64_t numel, int tolerance)
{
    case_field *f = case_add(c, offset, (size_t)numel * sizeof(double));
    f->output = f->is_double = true;
    f->tolerance = tolerance;
}

/* ---- one run ---- */

static inline void **case_pointer(void *args, size_t offset)
{
    return (void **)(void *)((char *)args + offset);
}

/* Outputs of a run. */
typedef struct case_results {
    void *of[CASE_FIELDS];
} case_results;

static inline void case_results_free(case_results *r)
{
    for (int i = 0; i < CASE_FIELDS; i++) free(r->of[i]);
}

/* Host memory, each array 4 to 60 bytes after a cache line's begin, with canaries on both sides. */
static inline case_results case_run_host(const kernel_case *c, fsdp_kernel_fn fn, fsdpi_isa isa,
                                         fsdpi_pool *pool, int shift)
{
    struct fsdp_kernel k = { .pool = pool, .isa = isa };
    _Alignas(16) char args[CASE_ARGS];
    char *block[CASE_FIELDS], *at[CASE_FIELDS];
    memcpy(args, c->args, sizeof(args));
    for (int i = 0; i < c->fields; i++) {
        const case_field *f = &c->field[i];
        size_t unit = f->is_double ? 8 : 4, off = shift == 0 ? 0 : (size_t)(shift * 5 + i * 3) * unit % 64;
        size_t total = fsdpi_round_up(f->bytes + 3 * CASE_CANARY, 64);
        block[i] = aligned_alloc(64, total);
        assert_non_null(block[i]);
        memset(block[i], 0xa5, total);
        at[i] = block[i] + CASE_CANARY + off;
        memset(at[i], 0xff, f->bytes);
        if (f->init != NULL && f->bytes > 0) memcpy(at[i], f->init, f->bytes);
        *case_pointer(args, f->offset) = at[i];
    }
    if (c->alias >= 0) {
        at[c->alias] = at[c->alias_of];
        *case_pointer(args, c->field[c->alias].offset) = at[c->alias];
    }
    size_t scratch_bytes = c->scratch != NULL ? c->scratch(args, fsdpi_pool_threads(pool)) : 0;
    char *scratch = NULL;
    if (scratch_bytes > 0) {
        scratch = aligned_alloc(64, fsdpi_round_up(scratch_bytes, 64) + 64);
        assert_non_null(scratch);
        memset(scratch, 0xff, scratch_bytes);
        memset(scratch + scratch_bytes, 0xa5, 64);
        *case_pointer(args, c->scratch_offset) = scratch;
    }
    if (fn(&k, args) != FSDP_OK) fail_msg("%s: %s", c->title, fsdp_last_error());
    case_results r = { 0 };
    for (int i = 0; i < c->fields; i++) {
        const case_field *f = &c->field[i];
        for (char *p = block[i]; p < at[i] && i != c->alias; p++)
            if ((unsigned char)*p != 0xa5) fail_msg("%s: field %d: written before its array", c->title, i);
        for (int j = 0; j < CASE_CANARY; j++)
            if ((unsigned char)at[i][f->bytes + (size_t)j] != 0xa5)
                fail_msg("%s: field %d: written past its array", c->title, i);
        r.of[i] = malloc(f->bytes + 1);
        assert_non_null(r.of[i]);
        memcpy(r.of[i], at[i], f->bytes);
    }
    for (int j = 0; j < 64 && scratch != NULL; j++)
        if ((unsigned char)scratch[scratch_bytes + (size_t)j] != 0xa5)
            fail_msg("%s: written past scratch", c->title);
    for (int i = 0; i < c->fields; i++) free(block[i]);
    free(scratch);
    return r;
}

/* Through a stream, on memory of the device's. */
static inline case_results case_run_device(const kernel_case *c, fsdp_device *dev, fsdpi_pool *pool)
{
    fsdp_stream *s;
    assert_ok(fsdpi_stream_create(&s, dev, pool));
    _Alignas(16) char args[CASE_ARGS];
    void *at[CASE_FIELDS], *scratch = NULL;
    memcpy(args, c->args, sizeof(args));
    for (int i = 0; i < c->fields; i++) {
        const case_field *f = &c->field[i];
        assert_ok(dev->ops->alloc(dev, f->bytes + 1, &at[i]));
        assert_ok(fsdpi_stream_fill(s, at[i], 0xff, f->bytes));
        if (f->init != NULL) assert_ok(fsdp_stream_copy(s, at[i], f->init, f->bytes));
        *case_pointer(args, f->offset) = at[i];
    }
    if (c->alias >= 0) *case_pointer(args, c->field[c->alias].offset) = at[c->alias_of];
    size_t scratch_bytes = c->scratch != NULL ? c->scratch(args, fsdpi_pool_threads(pool)) : 0;
    if (scratch_bytes > 0) {
        assert_ok(dev->ops->alloc(dev, scratch_bytes, &scratch));
        *case_pointer(args, c->scratch_offset) = scratch;
    }
    assert_ok(fsdp_stream_launch(s, c->fast, args, c->args_bytes));
    case_results r = { 0 };
    for (int i = 0; i < c->fields; i++) {
        r.of[i] = malloc(c->field[i].bytes + 1);
        assert_non_null(r.of[i]);
        assert_ok(fsdp_stream_copy(s, r.of[i], at[i == c->alias ? c->alias_of : i], c->field[i].bytes));
    }
    assert_ok(fsdp_stream_sync(s));
    for (int i = 0; i < c->fields; i++) dev->ops->free(dev, at[i], c->field[i].bytes + 1);
    if (scratch != NULL) dev->ops->free(dev, scratch, scratch_bytes);
    fsdpi_stream_destroy(s);
    return r;
}

/* ---- comparisons ---- */

static inline double case_value(const case_field *f, const void *data, size_t i)
{
    return f->is_double ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

static inline void case_near(const kernel_case *c, const case_results *got, const case_results *want)
{
    for (int i = 0; i < c->fields; i++) {
        const case_field *f = &c->field[i];
        if (!f->output) continue;
        size_t n = f->bytes / (f->is_double ? 8 : 4);
        double square = 0.0;
        for (size_t j = 0; j < n; j++)
            square += case_value(f, want->of[i], j) * case_value(f, want->of[i], j);
        double rms = n > 0 ? sqrt(square / (double)n) : 0.0;
        for (size_t j = 0; j < n; j++) {
            double g = case_value(f, got->of[i], j), w = case_value(f, want->of[i], j);
            if (!(fabs(g - w) <= tolerance(f->tolerance) * (fabs(w) + rms)))
                fail_msg("%s: field %d [%zu] is %.9g, not %.9g (rms %.3g): off by %.3g, allowed %.3g",
                         c->title, i, j, g, w, rms, fabs(g - w) / (fabs(w) + rms), tolerance(f->tolerance));
        }
    }
}

static inline void case_same_bits(const kernel_case *c, case_results got, const case_results *want,
                                  const char *where)
{
    for (int i = 0; i < c->fields; i++) {
        const case_field *f = &c->field[i];
        if (f->bytes == 0 || memcmp(got.of[i], want->of[i], f->bytes) == 0) continue;
        size_t j = 0;
        while (((const char *)got.of[i])[j] == ((const char *)want->of[i])[j]) j++;
        j /= f->is_double ? 8 : 4;
        fail_msg("%s: %s: field %d [%zu] is %.9g, not %.9g", c->title, where, i, j,
                 case_value(f, got.of[i], j), case_value(f, want->of[i], j));
    }
    case_results_free(&got);
}

/* Pools that live as long as the test program; a group teardown destroys them. */
static fsdpi_pool *case_pools[6];

static inline fsdpi_pool *case_pool(int threads)
{
    if (case_pools[threads] == NULL) assert_ok(fsdpi_pool_create(&case_pools[threads], threads));
    return case_pools[threads];
}

static inline int case_teardown(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) fsdpi_pool_destroy(case_pools[i]);
    return 0;
}

static inline void case_free(kernel_case *c)
{
    for (int i = 0; i < c->fields; i++) free(c->field[i].init);
}

/* Everything; frees the case. */
static inline void case_check(kernel_case *c)
{
    const fsdpi_isa best = fsdpi_isa_get();
    case_results want = case_run_host(c, c->reference, best, NULL, 0),
                 got = case_run_host(c, c->fast, best, NULL, 0);
    case_near(c, &got, &want);
    for (int isa = 0; isa < FSDPI_ISA_COUNT; isa++)
        if (fsdpi_isa_supported((fsdpi_isa)isa))
            case_same_bits(c, case_run_host(c, c->fast, (fsdpi_isa)isa, NULL, isa + 1), &got,
                           fsdpi_isa_name((fsdpi_isa)isa));
    for (int threads = 2; threads <= 5; threads += threads == 3 ? 2 : 1)
        case_same_bits(c, case_run_host(c, c->fast, best, case_pool(threads), threads), &got, "threads");
    fsdp_device *guard;
    assert_ok(fsdp_device_open(&guard, "guard"));
    case_same_bits(c, case_run_device(c, guard, case_pool(2)), &got, "guard");
    case_same_bits(c, case_run_device(c, fsdp_device_cpu(), NULL), &got, "cpu");
    fsdp_device_close(guard);
    case_results_free(&want);
    case_results_free(&got);
    case_free(c);
}

/* ---- every matrix library ---- */

/* For main(): runs the program again for each kind that there is, since a process has one. Returns whether
 * this is such a run; otherwise *rc is the exit code. */
static inline bool each_gemm_kind(char **argv, int *rc)
{
    static const char *const kinds[] = { "onednn", "cblas", "reference" };
    if (getenv("FSDP_GEMM") != NULL) return true;
    *rc = 0;
    for (int i = 0; i < 3; i++) {
        printf("---- FSDP_GEMM=%s\n", kinds[i]);
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            setenv("FSDP_GEMM", kinds[i], 1);
            execv("/proc/self/exe", argv);
            _exit(127);
        }
        int status = 0;
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) *rc = 1;
    }
    return false;
}

#endif
