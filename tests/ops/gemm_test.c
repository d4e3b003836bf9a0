/* SPDX-License-Identifier: MIT
 *
 * Matrix products: every library against sums in double; which library is taken; the same bits for any number
 * of threads and any alignment. */
#include "support/testing.h"

#include "base/alloc.h"
#include "base/log.h"
#include "ops/gemm.h"
#include "ops/gemm_plain.h"
#include "tolerances.h"

#include <dlfcn.h>
#include <fsdp/random.h>
#include <math.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- which library ---- */

static int warnings;
static fsdpi_gemm_info *seen; /* what the last child found, in memory that it shares */

static void count_warning(fsdp_log_level level, const char *text, void *arg)
{
    (void)text;
    (void)arg;
    warnings += level == FSDP_LOG_WARN;
}

/* In a child, where nothing was loaded yet: sets the variables (NULL: none) and returns the kind; + 100 a
 * warning. */
static int kind_in_child(const char *kind, const char *file)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        unsetenv("FSDP_GEMM");
        unsetenv("FSDP_GEMM_LIB");
        if (kind != NULL) setenv("FSDP_GEMM", kind, 1);
        if (file != NULL) setenv("FSDP_GEMM_LIB", file, 1);
        fsdp_log_set(FSDP_LOG_DEBUG, count_warning, NULL);
        const fsdpi_gemm_info *info = fsdpi_gemm_get_info();
        *seen = *info;
        bool whole = info->name[0] != '\0' && info->version[0] != '\0' && info->path[0] != '\0';
        _exit(whole ? (int)info->kind + 100 * warnings : 99);
    }
    int status;
    assert_true(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Runs first: the parent has loaded nothing. */
static void test_choice(void **state)
{
    (void)state;
    seen = mmap(NULL, sizeof(*seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(seen != MAP_FAILED);
    int best = kind_in_child(NULL, NULL);
    assert_int_equal(kind_in_child("", NULL), best);
    assert_int_equal(kind_in_child("reference", NULL), FSDPI_GEMM_REFERENCE);
    assert_int_equal(kind_in_child("nonsense", NULL), best + 100);
    assert_int_equal(kind_in_child(NULL, "/nonexistent.so"), best);
    for (int kind = FSDPI_GEMM_ONEDNN; kind <= FSDPI_GEMM_CBLAS; kind++) {
        const char *name = kind == FSDPI_GEMM_ONEDNN ? "onednn" : "cblas";
        if (kind_in_child(name, NULL) != kind) continue; /* there is none here */
        char path[sizeof(seen->path)];
        memcpy(path, seen->path, sizeof(path));
        print_message("%s %s, %s\n", name, seen->version, path);
        assert_int_equal(kind_in_child(NULL, path), kind);
        assert_string_equal(seen->path, path);
        assert_int_equal(kind_in_child("reference", path), FSDPI_GEMM_REFERENCE);
    }
    munmap(seen, sizeof(*seen));
}

/* The program's own OpenMP threads are as they were. */
static void test_openmp_setting_is_left_alone(void **state)
{
    (void)state;
    if (!fsdpi_gemm_available(FSDPI_GEMM_ONEDNN)) skip();
    void *gomp = dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (gomp == NULL) skip();
    void (*set_threads)(int);
    int (*max_threads)(void);
    *(void **)&set_threads = dlsym(gomp, "omp_set_num_threads");
    *(void **)&max_threads = dlsym(gomp, "omp_get_max_threads");
    set_threads(3);
    float a[4] = { 1, 2, 3, 4 }, c[4];
    fsdpi_gemm g = {
        .M = 2, .N = 2, .K = 2, .alpha = 1, .a = a, .b = a, .c = c, .lda = 2, .ldb = 2, .ldc = 2
    };
    assert_ok(fsdpi_gemm_call(FSDPI_GEMM_ONEDNN, &g));
    assert_int_equal(max_threads(), 3);
    dlclose(gomp);
}

/* ---- values ---- */

static float *random_floats(int64_t n, int64_t at)
{
    float *x = malloc((size_t)(n + 32) * sizeof(*x));
    assert_non_null(x);
    fsdp_philox_normal_fill(5, "gemm", at, n + 32, x);
    return x;
}

/* Row-major, as the header says. */
static double element(const fsdpi_gemm *g, int64_t m, int64_t n)
{
    double sum = 0.0;
    for (int64_t k = 0; k < g->K; k++)
        sum += (double)(g->trans_a ? g->a[k * g->lda + m] : g->a[m * g->lda + k]) *
               (double)(g->trans_b ? g->b[n * g->ldb + k] : g->b[k * g->ldb + n]);
    return (double)g->alpha * sum;
}

static void one_product(int kind, int64_t M, int64_t N, int64_t K, bool ta, bool tb, float alpha, float beta,
                        int64_t pad)
{
    fsdpi_gemm g = { .trans_a = ta, .trans_b = tb, .M = M, .N = N, .K = K, .alpha = alpha, .beta = beta,
                     .lda = (ta ? M : K) + pad, .ldb = (tb ? K : N) + pad, .ldc = N + pad };
    int64_t size_c = M * g.ldc + 1;
    float *a = random_floats((ta ? K : M) * g.lda, 0), *b = random_floats((tb ? N : K) * g.ldb, 1 << 20);
    float *c = random_floats(size_c, 1 << 21), *before = random_floats(size_c, 1 << 21);
    if (beta == 0.0f)
        for (int64_t m = 0; m < M; m++)
            for (int64_t n = 0; n < N; n++) c[m * g.ldc + n] = NAN;
    g.a = a, g.b = b, g.c = c;
    assert_ok(kind < FSDPI_GEMM_KINDS ? fsdpi_gemm_call((fsdpi_gemm_kind)kind, &g)
                                      : fsdpi_gemm_run(NULL, &g));
    double bound = tolerance(TOL_GEMM) * (sqrt((double)K) * fabs((double)alpha) + 1.0);
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < g.ldc; n++) {
            int64_t i = m * g.ldc + n;
            double want = n < N ? element(&g, m, n) + (double)(beta * before[i]) : (double)before[i];
            if (!(fabs((double)c[i] - want) <= (n < N ? bound : 0.0)))
                fail_msg("kind %d %dx%dx%d trans %d %d alpha %g beta %g: c[%d,%d] is %.9g, not %.9g", kind,
                         (int)M, (int)N, (int)K, ta, tb, (double)alpha, (double)beta, (int)m, (int)n,
                         (double)c[i], want);
        }
    free(a);
    free(b);
    free(c);
    free(before);
}

static void test_values(void **state)
{
    (void)state;
    const int64_t shapes[][3] = { { 1, 1, 1 },     { 6, 13, 3 },    { 0, 3, 2 },    { 3, 0, 2 },
                                  { 5, 7, 0 },     { 61, 33, 300 }, { 130, 1, 17 }, { 1, 131, 65 },
                                  { 70, 90, 513 }, { 3, 5003, 2 } };
    for (int kind = 0; kind <= FSDPI_GEMM_KINDS; kind++) { /* the last is fsdpi_gemm_run */
        if (kind < FSDPI_GEMM_KINDS && !fsdpi_gemm_available((fsdpi_gemm_kind)kind)) continue;
        for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++)
            for (int t = 0; t < 4; t++) {
                one_product(kind, shapes[s][0], shapes[s][1], shapes[s][2], t & 1, t & 2, 1.0f, 0.0f, 0);
                one_product(kind, shapes[s][0], shapes[s][1], shapes[s][2], t & 1, t & 2, -0.5f, 1.0f, 3);
                one_product(kind, shapes[s][0], shapes[s][1], shapes[s][2], t & 1, t & 2, 2.0f, 0.25f, 1);
            }
    }
}

/* ---- bits ---- */

/* The pieces of a cut cover the result once. */
static void test_cut(void **state)
{
    (void)state;
    const int64_t sizes[] = { 0, 1, 6, 255, 257, 512, 513, 768, 1024, 1536, 3072, 50257 };
    enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };
    for (int i = 0; i < SIZES * SIZES; i++) {
        int64_t M = sizes[i / SIZES], N = sizes[i % SIZES], covered = 0;
        fsdpi_gemm_cut cut = fsdpi_gemm_cut_of(M, N);
        float c;
        fsdpi_gemm g = { .M = M, .N = N, .c = &c, .ldc = 0 };
        for (int64_t p = 0; p < cut.row_pieces * cut.col_pieces; p++) {
            fsdpi_gemm piece = fsdpi_gemm_piece(&g, &cut, p);
            assert_true(piece.M > 0 && piece.M <= cut.rows && piece.N > 0 && piece.N <= cut.cols);
            covered += piece.M * piece.N;
        }
        assert_true(covered == M * N);
        assert_true(M * N < 512 * 768 || cut.row_pieces * cut.col_pieces >= 2);
    }
}

/* For oneDNN a transposed A is transposed, a B whose rows lie 2 KiB apart put elsewhere, and no other operand touched. */
static void test_spread(void **state)
{
    (void)state;
    enum { M = 1024, N = 512, K = 70 };
    bool copies = fsdpi_gemm_get_info()->kind == FSDPI_GEMM_ONEDNN;
    float *a = random_floats(M * K, 7), *b = random_floats(N * K, 1 << 20), *copy;
    for (int t = 0; t < 4; t++) {
        bool ta = t & 1, tb = t & 2;
        fsdpi_gemm g = { .trans_a = ta, .trans_b = tb, .M = M, .N = N, .K = K, .alpha = 1, .a = a, .b = b,
                         .lda = ta ? M : K, .ldb = tb ? K : N };
        fsdpi_gemm spread = g;
        assert_ok(fsdpi_gemm_spread(NULL, &spread, &copy));
        assert_int_equal(copy != NULL, copies && (ta || !tb));
        assert_int_equal(spread.a != g.a, copies && ta);
        assert_int_equal(spread.b != g.b, copies && !tb);
        assert_int_equal(spread.trans_a, !copies && ta);
        assert_int_equal(spread.lda, copies && ta ? 80 : g.lda);
        assert_int_equal(spread.ldb, copies && !tb ? N + 16 : g.ldb);
        for (int i = 0; i < 40; i++)
            assert_true(element(&g, i * 25, i * 12) == element(&spread, i * 25, i * 12));
        fsdpi_free(copy);
        spread = g, spread.M = spread.N = 100; /* too few to repay it */
        assert_ok(fsdpi_gemm_spread(NULL, &spread, &copy));
        assert_null(copy);
        spread = g, spread.ldb += 16; /* it lies well */
        assert_ok(fsdpi_gemm_spread(NULL, &spread, &copy));
        assert_ptr_equal(spread.b, g.b);
        fsdpi_free(copy);
        if (copies && (ta || !tb)) { /* no memory */
            spread = g;
            fsdpi_alloc_fail_at(1);
            assert_int_equal(fsdpi_gemm_spread(NULL, &spread, &copy), FSDP_ERR_NOMEM);
            assert_true(copy == NULL && spread.a == g.a && spread.b == g.b);
        }
        one_product(FSDPI_GEMM_KINDS, 512, 512, 33, ta, tb, 1.0f, 1.0f, 0);
    }
    free(a);
    free(b);
}

/* fsdpi_gemm_run at addresses `shift` floats after a cache line, in a C that holds `beta`'s operand. */
static void run_at(const fsdpi_gemm *g, int threads, int shift, float *out)
{
    fsdpi_pool *pool;
    assert_ok(fsdpi_pool_create(&pool, threads));
    struct fsdp_kernel k = { .pool = pool, .isa = fsdpi_isa_get() };
    int64_t size[3] = { g->M * g->K, g->N * g->K, g->M * g->N };
    float *block[3], *at[3];
    const float *from[3] = { g->a, g->b, g->c };
    for (int i = 0; i < 3; i++) {
        block[i] = aligned_alloc(64, fsdpi_round_up((size_t)size[i] * sizeof(float) + 128, 64));
        assert_non_null(block[i]);
        at[i] = block[i] + shift * (i + 1) % 16;
        memcpy(at[i], from[i], (size_t)size[i] * sizeof(float));
    }
    fsdpi_gemm moved = *g;
    moved.a = at[0], moved.b = at[1], moved.c = at[2];
    assert_ok(fsdpi_gemm_run(&k, &moved));
    memcpy(out, at[2], (size_t)size[2] * sizeof(float));
    for (int i = 0; i < 3; i++) free(block[i]);
    fsdpi_pool_destroy(pool);
}

/* Of the libraries this is an observation (no promise of theirs), which a new version may end; then the cut,
 * which is by the shape alone, still keeps threads from mattering, but not alignment. */
static void test_same_bits(void **state)
{
    (void)state;
    const int64_t shapes[][3] = {
        { 7, 13, 6 }, { 530, 70, 65 }, { 33, 1201, 50 }, { 260, 390, 384 }, { 384, 96, 1024 },
        { 512, 1024, 130 },
    };
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++)
        for (int t = 0; t < 4; t++) {
            bool ta = t & 1, tb = t & 2;
            int64_t M = shapes[s][0], N = shapes[s][1], K = shapes[s][2];
            float *a = random_floats(M * K, 7), *b = random_floats(N * K, 1 << 20),
                  *c = random_floats(M * N, 1 << 21);
            size_t bytes = (size_t)(M * N) * sizeof(float);
            float *want = malloc(bytes), *got = malloc(bytes);
            assert_true(want != NULL && got != NULL);
            fsdpi_gemm g = { .trans_a = ta, .trans_b = tb, .M = M, .N = N, .K = K, .alpha = 1,
                             .beta = (float)(s % 2), .a = a, .b = b, .c = c, .lda = ta ? M : K,
                             .ldb = tb ? K : N, .ldc = N };
            run_at(&g, 1, 0, want);
            for (int threads = 1; threads <= 4; threads++)
                for (int shift = 0; shift < 16; shift += 5) {
                    run_at(&g, threads, shift, got);
                    if (memcmp(want, got, bytes) != 0)
                        fail_msg("%s: %dx%dx%d trans %d %d: %d threads, shift %d give other bits",
                                 fsdpi_gemm_get_info()->name, (int)M, (int)N, (int)K, ta, tb, threads, shift);
                }
            free(a);
            free(b);
            free(c);
            free(want);
            free(got);
        }
}

/* The product of our own: the same bits on every instruction set, and in any cut. */
static void test_plain_bits(void **state)
{
    (void)state;
    enum { M = 67, N = 71, K = 300, CUT = 29 };
    float *a = random_floats(M * K, 3), *b = random_floats(N * K, 1 << 20), *c = random_floats(M * N, 1 << 21);
    float *want = malloc(M * N * sizeof(float)), *got = malloc(M * N * sizeof(float));
    assert_true(want != NULL && got != NULL);
    for (int t = 0; t < 4; t++) {
        fsdpi_gemm g = { .trans_a = t & 1, .trans_b = t & 2, .M = M, .N = N, .K = K, .alpha = 0.3f, .beta = 0.7f,
                         .a = a, .b = b, .c = want, .lda = t & 1 ? M : K, .ldb = t & 2 ? K : N, .ldc = N };
        memcpy(want, c, M * N * sizeof(float));
        fsdpi_gemm_plain_get(FSDPI_ISA_PORTABLE)->run(&g);
        for (int isa = 0; isa < FSDPI_ISA_COUNT; isa++) {
            if (!fsdpi_isa_supported((fsdpi_isa)isa)) continue;
            fsdpi_gemm_cut cut = { CUT, CUT, (M + CUT - 1) / CUT, (N + CUT - 1) / CUT };
            memcpy(got, c, M * N * sizeof(float));
            g.c = got;
            for (int64_t i = 0; i < cut.row_pieces * cut.col_pieces; i++) {
                fsdpi_gemm piece = fsdpi_gemm_piece(&g, &cut, i);
                fsdpi_gemm_plain_get((fsdpi_isa)isa)->run(&piece);
            }
            assert_memory_equal(want, got, M * N * sizeof(float));
        }
    }
    float *all[] = { a, b, c, want, got };
    for (int i = 0; i < 5; i++) free(all[i]);
}

int main(int argc, char **argv)
{
    (void)argc;
    const struct CMUnitTest first[] = { cmocka_unit_test(test_choice) };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_openmp_setting_is_left_alone),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_spread),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_plain_bits),
    };
    static const char *const kinds[] = { "onednn", "cblas", "reference" };
    if (getenv("FSDP_GEMM") != NULL) return cmocka_run_group_tests(tests, NULL, NULL);
    int rc = cmocka_run_group_tests(first, NULL, NULL);
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            setenv("FSDP_GEMM", kinds[i], 1);
            execv("/proc/self/exe", argv);
            _exit(127);
        }
        int status;
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) rc = 1;
    }
    return rc;
}
