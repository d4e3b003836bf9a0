/* SPDX-License-Identifier: MIT
 *
 * Finds a matrix library at run time and calls it, one thread a call. Nothing is loaded before the first
 * product, so that a parent which forks ranks has none of it. The libraries' headers are not needed: what is
 * called is declared here.
 *
 *   kind     symbol
 *   onednn   dnnl_sgemm
 *   cblas    cblas_sgemm, or scipy_cblas_sgemm
 *
 * Each is looked for in $FSDP_GEMM_LIB, the private prefix, beside the installed libfsdp, and in the system.
 *
 * A library of the system's is used only where it is known to be fast here: Debian 12's OpenBLAS picks its
 * kernels of 2004 on processors that are newer than it, and is then slower than the product of our own. */
#include "ops/gemm.h"

#include "base/alloc.h"
#include "base/log.h"
#include "ops/cpu/rows.h"
#include "ops/gemm_plain.h"
#include "ops/pieces.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* oneDNN, dnnl.h: row-major; 'N' or 'T'; 0 is success. */
typedef int dnnl_sgemm_fn(char transa, char transb, int64_t M, int64_t N, int64_t K, float alpha,
                          const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                          int64_t ldc);
typedef struct dnnl_version_info {
    int major, minor, patch; /* and more, unused here */
} dnnl_version_info;
typedef const dnnl_version_info *dnnl_version_fn(void);

/* cblas.h with 32-bit integers. */
enum { CBLAS_ROW_MAJOR = 101, CBLAS_NO_TRANS = 111, CBLAS_TRANS = 112 };
typedef void cblas_sgemm_fn(int order, int transa, int transb, int M, int N, int K, float alpha,
                            const float *A, int lda, const float *B, int ldb, float beta, float *C, int ldc);
typedef char *openblas_string_fn(void);
typedef void set_threads_fn(int threads);
typedef int get_threads_fn(void);

typedef struct library {
    pthread_once_t once;
    bool found;
    fsdpi_gemm_info info;
    dnnl_sgemm_fn *dnnl_sgemm;
    cblas_sgemm_fn *cblas_sgemm;
    /* Of the OpenMP that the library brought; NULL where it has none. */
    set_threads_fn *omp_set_num_threads;
    get_threads_fn *omp_get_max_threads;
} library;

static void load_onednn(void);
static void load_cblas(void);
static void load_reference(void);

/* Code that was loaded into the process, a fact like the instruction set: the one state here that is not a
 * caller's. */
static library libraries[FSDPI_GEMM_KINDS] = {
    [FSDPI_GEMM_ONEDNN] = { .once = PTHREAD_ONCE_INIT,
                            .info = { .kind = FSDPI_GEMM_ONEDNN, .name = "onednn" } },
    [FSDPI_GEMM_CBLAS] = { .once = PTHREAD_ONCE_INIT, .info = { .kind = FSDPI_GEMM_CBLAS, .name = "cblas" } },
    [FSDPI_GEMM_REFERENCE] = { .once = PTHREAD_ONCE_INIT,
                               .info = { .kind = FSDPI_GEMM_REFERENCE, .name = "reference" } },
};
static void (*const loaders[FSDPI_GEMM_KINDS])(void) = { load_onednn, load_cblas, load_reference };
static pthread_once_t chosen_once = PTHREAD_ONCE_INIT;
static const library *chosen;

/* ISO C has no conversion from dlsym's pointer to a function's; POSIX promises that the representations
 * agree. */
static bool find(void *handle, const char *symbol, void *fn)
{
    void *p = dlsym(handle, symbol);
    memcpy(fn, &p, sizeof(p));
    return p != NULL;
}

static bool find_prefixed(void *handle, const char *symbol, void *fn)
{
    char scipy[64];
    snprintf(scipy, sizeof(scipy), "scipy_%s", symbol);
    return find(handle, scipy, fn) || find(handle, symbol, fn);
}

/* Where `accept` takes it the library stays loaded. */
static bool try_file(library *lib, const char *path, bool (*accept)(library *lib, void *handle, bool asked),
                     bool asked)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) return false;
    if (!accept(lib, handle, asked)) {
        dlclose(handle);
        return false;
    }
    if (lib->info.path[0] == '\0') snprintf(lib->info.path, sizeof(lib->info.path), "%s", path);
    fsdpi_log(FSDP_LOG_DEBUG, "matrix products: %s %s, %s", lib->info.name, lib->info.version,
              lib->info.path);
    return true;
}

/* The folder `below` (relative) the file that this code is in: libfsdp.so, or the program. */
static bool folder_of_ours(const char *below, char *to, size_t size)
{
    Dl_info where;
    char file[PATH_MAX];
    if (dladdr(&libraries, &where) == 0 || where.dli_fname == NULL || realpath(where.dli_fname, file) == NULL) return false;
    char *slash = strrchr(file, '/');
    if (slash == NULL) return false;
    *slash = '\0';
    return (size_t)snprintf(to, size, "%s/%s", file, below) < size;
}

/* First the one that was named; then the system's, which its distribution keeps; then the one that was installed with this
 * library, wherever that tree is now; then the one that dev/setup.sh fetched for the build. */
static void search(library *lib, const char *own_name, const char *const *system_names,
                   bool (*accept)(library *lib, void *handle, bool asked))
{
    const char *named = getenv("FSDP_GEMM_LIB");
    if (named != NULL && named[0] != '\0') lib->found = try_file(lib, named, accept, true);
    for (int i = 0; !lib->found && system_names[i] != NULL; i++)
        lib->found = try_file(lib, system_names[i], accept, false);
    char beside[PATH_MAX] = "", under[PATH_MAX] = "";
    (void)folder_of_ours("fsdp", beside, sizeof(beside));            /* lib/libfsdp.so -> lib/fsdp */
    (void)folder_of_ours("../lib/fsdp", under, sizeof(under));       /* bin/fsdp -> lib/fsdp */
    const char *const folders[] = { beside, under, FSDPI_INSTALL_LIBDIR, FSDPI_DEPS_LIBDIR };
    for (size_t i = 0; !lib->found && i < sizeof(folders) / sizeof(folders[0]); i++) {
        char path[PATH_MAX + 64];
        if (folders[i][0] == '\0') continue;
        snprintf(path, sizeof(path), "%s/%s", folders[i], own_name);
        lib->found = try_file(lib, path, accept, true);
    }
}

static void note_path(library *lib, const void *fn)
{
    void *address;
    Dl_info where;
    memcpy(&address, fn, sizeof(address));
    if (dladdr(address, &where) != 0 && where.dli_fname != NULL)
        snprintf(lib->info.path, sizeof(lib->info.path), "%s", where.dli_fname);
}

/* ---- oneDNN ---- */

static bool accept_onednn(library *lib, void *handle, bool asked)
{
    (void)asked;
    dnnl_version_fn *version;
    if (!find(handle, "dnnl_sgemm", &lib->dnnl_sgemm) || !find(handle, "dnnl_version", &version))
        return false;
    const dnnl_version_info *v = version();
    if (v->major < 3) {
        fsdpi_log(FSDP_LOG_INFO, "oneDNN %d.%d.%d is too old: 3 is wanted", v->major, v->minor, v->patch);
        return false;
    }
    snprintf(lib->info.version, sizeof(lib->info.version), "%d.%d.%d", v->major, v->minor, v->patch);
    /* dlsym on a handle also looks in what the library depends on. */
    find(handle, "omp_set_num_threads", &lib->omp_set_num_threads);
    find(handle, "omp_get_max_threads", &lib->omp_get_max_threads);
    note_path(lib, &lib->dnnl_sgemm);
    return true;
}

static void load_onednn(void)
{
    static const char *const system_names[] = { "libdnnl.so.3", NULL };
    search(&libraries[FSDPI_GEMM_ONEDNN], "libdnnl.so.3", system_names, accept_onednn);
}

static fsdp_status call_onednn(const library *lib, const fsdpi_gemm *g)
{
    /* The number of OpenMP threads is a setting of the calling thread, for which its program may have a use. */
    int threads = lib->omp_get_max_threads != NULL ? lib->omp_get_max_threads() : 1;
    if (threads != 1 && lib->omp_set_num_threads != NULL) lib->omp_set_num_threads(1);
    int status = lib->dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->M, g->N, g->K, g->alpha,
                                 g->a, g->lda, g->b, g->ldb, g->beta, g->c, g->ldc);
    if (threads != 1 && lib->omp_set_num_threads != NULL) lib->omp_set_num_threads(threads);
    FSDP_FAIL_IF(status != 0, status == 1 ? FSDP_ERR_NOMEM : FSDP_ERR_INTERNAL,
                 "dnnl_sgemm: status %d for M=%lld N=%lld K=%lld", status, (long long)g->M, (long long)g->N,
                 (long long)g->K);
    return FSDP_OK;
}

/* ---- CBLAS ---- */

/* OpenBLAS falls back to these where it does not know the processor. */
static bool core_is_slow_here(const char *core)
{
    static const char *const old[] = { "Generic", "Katmai",  "Coppermine",   "Northwood",  "Prescott",
                                       "Banias",  "Core2",   "Penryn",       "Dunnington", "Nehalem",
                                       "Athlon",  "Opteron", "Opteron_SSE3", "Barcelona",  "Bobcat",
                                       "Atom",    "Nano",    "Unknown" };
    if (!fsdpi_isa_supported(FSDPI_ISA_AVX2)) return false;
    for (size_t i = 0; i < sizeof(old) / sizeof(old[0]); i++)
        if (strcasecmp(core, old[i]) == 0) return true;
    return false;
}

/* Netlib's plain loops carry the same name as the fast ones. */
static bool is_tuned(void *handle)
{
    static const char *const marks[] = { "openblas_get_config", "MKL_Get_Version", "bli_info_get_version_str",
                                         "ATL_buildinfo",       "armplversion",    "nvpl_blas_get_version" };
    for (size_t i = 0; i < sizeof(marks) / sizeof(marks[0]); i++)
        if (dlsym(handle, marks[i]) != NULL) return true;
    return false;
}

static bool accept_cblas(library *lib, void *handle, bool asked)
{
    openblas_string_fn *config, *core;
    set_threads_fn *set_threads;
    if (!find_prefixed(handle, "cblas_sgemm", &lib->cblas_sgemm)) return false;
    if (!asked && !is_tuned(handle)) {
        fsdpi_log(FSDP_LOG_INFO, "the system's BLAS is not one that is tuned: not used");
        return false;
    }
    snprintf(lib->info.version, sizeof(lib->info.version), "unknown");
    if (find_prefixed(handle, "openblas_get_config", &config) &&
        find_prefixed(handle, "openblas_get_corename", &core)) {
        char number[32] = "";
        sscanf(config(), "OpenBLAS %31s", number);
        if (!asked && core_is_slow_here(core())) {
            fsdpi_log(FSDP_LOG_INFO, "the system's OpenBLAS %s has picked its kernels for \"%s\": not used",
                      number, core());
            return false;
        }
        snprintf(lib->info.version, sizeof(lib->info.version), "%s %s", number, core());
    }
    if (find_prefixed(handle, "openblas_set_num_threads", &set_threads) ||
        find(handle, "MKL_Set_Num_Threads", &set_threads))
        set_threads(1);
    note_path(lib, &lib->cblas_sgemm);
    return true;
}

static void load_cblas(void)
{
    static const char *const system_names[] = { "libopenblas.so.0", "libcblas.so.3", "libblas.so.3", NULL };
    search(&libraries[FSDPI_GEMM_CBLAS], "libscipy_openblas.so", system_names, accept_cblas);
}

static fsdp_status call_cblas(const library *lib, const fsdpi_gemm *g)
{
    const int64_t sizes[] = { g->M, g->N, g->K, g->lda, g->ldb, g->ldc };
    for (int i = 0; i < 6; i++)
        FSDP_FAIL_IF(sizes[i] > INT32_MAX, FSDP_ERR_UNSUPPORTED,
                     "a product with a size of %lld: CBLAS has 32-bit sizes", (long long)sizes[i]);
    lib->cblas_sgemm(CBLAS_ROW_MAJOR, g->trans_a ? CBLAS_TRANS : CBLAS_NO_TRANS,
                     g->trans_b ? CBLAS_TRANS : CBLAS_NO_TRANS, (int)g->M, (int)g->N, (int)g->K, g->alpha,
                     g->a, (int)g->lda, g->b, (int)g->ldb, g->beta, g->c, (int)g->ldc);
    return FSDP_OK;
}

/* ---- ours, and the choice ---- */

static void load_reference(void)
{
    library *lib = &libraries[FSDPI_GEMM_REFERENCE];
    lib->found = true;
    snprintf(lib->info.version, sizeof(lib->info.version), "%s", fsdpi_isa_name(fsdpi_isa_get()));
    snprintf(lib->info.path, sizeof(lib->info.path), "built in");
}

bool fsdpi_gemm_available(fsdpi_gemm_kind kind)
{
    pthread_once(&libraries[kind].once, loaders[kind]);
    return libraries[kind].found;
}

static fsdpi_gemm_kind wanted_kind(const char *want)
{
    for (int i = 0; i < FSDPI_GEMM_KINDS; i++) {
        if (strcmp(want, libraries[i].info.name) != 0) continue;
        if (fsdpi_gemm_available((fsdpi_gemm_kind)i)) return (fsdpi_gemm_kind)i;
        fsdpi_log(FSDP_LOG_WARN, "FSDP_GEMM=%s: no such library was found; matrix products will be slow",
                  want);
        return FSDPI_GEMM_REFERENCE;
    }
    fsdpi_log(FSDP_LOG_WARN, "FSDP_GEMM=%s is none of onednn, cblas, reference: it is ignored", want);
    return FSDPI_GEMM_KINDS;
}

static fsdpi_gemm_kind best_kind(void)
{
    const char *want = getenv("FSDP_GEMM"), *file = getenv("FSDP_GEMM_LIB");
    fsdpi_gemm_kind kind = want != NULL && want[0] != '\0' ? wanted_kind(want) : FSDPI_GEMM_KINDS;
    if (kind != FSDPI_GEMM_KINDS) return kind;
    /* A file that was named goes before the order of kinds. */
    for (kind = 0; file != NULL && file[0] != '\0' && kind < FSDPI_GEMM_REFERENCE; kind++)
        if (fsdpi_gemm_available(kind) && strcmp(libraries[kind].info.path, file) == 0) return kind;
    for (kind = 0; !fsdpi_gemm_available(kind);) kind++;
    if (kind == FSDPI_GEMM_REFERENCE)
        fsdpi_log(FSDP_LOG_WARN, "no matrix library was found: products will be slow (docs/install.md)");
    return kind;
}

static void choose(void)
{
    fsdpi_gemm_kind kind = best_kind();
    (void)fsdpi_gemm_available(kind); /* also where it was not asked for: fills its info */
    chosen = &libraries[kind];
}

const fsdpi_gemm_info *fsdpi_gemm_get_info(void)
{
    pthread_once(&chosen_once, choose);
    return &chosen->info;
}

/* ---- products ---- */

/* What is left of a product without terms. */
static void scale(const fsdpi_gemm *g)
{
    for (int64_t i = 0; i < g->M; i++)
        for (int64_t j = 0; j < g->N; j++)
            g->c[i * g->ldc + j] = g->beta == 0.0f ? 0.0f : g->beta * g->c[i * g->ldc + j];
}

fsdp_status fsdpi_gemm_call(fsdpi_gemm_kind kind, const fsdpi_gemm *g)
{
    if (g->M <= 0 || g->N <= 0) return FSDP_OK;
    if (g->K <= 0) {
        scale(g);
        return FSDP_OK;
    }
    FSDP_FAIL_IF(!fsdpi_gemm_available(kind), FSDP_ERR_UNSUPPORTED,
                 "no library for matrix products of kind \"%s\"", libraries[kind].info.name);
    switch (kind) {
    case FSDPI_GEMM_ONEDNN: return call_onednn(&libraries[kind], g);
    case FSDPI_GEMM_CBLAS: return call_cblas(&libraries[kind], g);
    default: fsdpi_gemm_plain_get(fsdpi_isa_get())->run(g); return FSDP_OK;
    }
}

static int64_t even_part(int64_t n, int64_t parts, int64_t multiple)
{
    return n <= 0 ? 1 : (int64_t)fsdpi_round_up((size_t)fsdpi_piece_count(n, parts), (size_t)multiple);
}

/* A library copies its operands on every call, so a cut costs: of one thread's speed (dnnl_sgemm, 13 shapes
 * of training) 512 x 768 pieces took 1 %, 512 x 384 3 %, 256 x 768 4 %, 128 x 512 10 %. Hence 512 rows, then
 * columns until there is work for 8 threads, and fewer rows only where there would be none for 4. */
fsdpi_gemm_cut fsdpi_gemm_cut_of(int64_t M, int64_t N)
{
    enum { ROWS = 512, LEAST_ROWS = 256, COLS = 3072, LEAST_COLS = 384 };
    int64_t row_parts = fsdpi_piece_count(M, ROWS), col_parts = fsdpi_piece_count(N, COLS);
    while (row_parts * col_parts < 8 && N / (col_parts + 1) >= LEAST_COLS) col_parts++;
    if (row_parts * col_parts < 4) row_parts = fsdpi_piece_count(M, LEAST_ROWS);
    fsdpi_gemm_cut c = { .rows = even_part(M, row_parts, 32), .cols = even_part(N, col_parts, 48) };
    c.row_pieces = fsdpi_piece_count(M, c.rows);
    c.col_pieces = fsdpi_piece_count(N, c.cols);
    return c;
}

fsdpi_gemm fsdpi_gemm_piece(const fsdpi_gemm *g, const fsdpi_gemm_cut *cut, int64_t i)
{
    int64_t m = i / cut->col_pieces * cut->rows, n = i % cut->col_pieces * cut->cols;
    fsdpi_gemm p = *g;
    p.M = fsdpi_piece_end(m, cut->rows, g->M) - m;
    p.N = fsdpi_piece_end(n, cut->cols, g->N) - n;
    if (g->K > 0) { /* otherwise there may be no a and b */
        p.a += g->trans_a ? m : m * g->lda;
        p.b += g->trans_b ? n * g->ldb : n;
    }
    p.c += m * g->ldc + n;
    return p;
}

typedef struct run_args {
    const fsdpi_gemm *g;
    fsdpi_gemm_kind kind;
    fsdpi_gemm_cut cut;
    fsdpi_pieces pieces;
} run_args;

static void run_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    run_args *r = arg;
    fsdpi_gemm p = fsdpi_gemm_piece(r->g, &r->cut, i);
    if (fsdpi_gemm_call(r->kind, &p) != FSDP_OK) fsdpi_pieces_fail(&r->pieces);
}

/* ---- operands as the library likes them ---- */

enum { BAD_STRIDE = 512, COPY_ROWS = 64 };

typedef struct copy_run {
    const float *from; /* [rows, cols] */
    float *to;         /* the same, or its transpose */
    int64_t rows, cols, ld, to_ld;
    const fsdpi_transpose_rows *transpose; /* NULL: it is not */
} copy_run;

static void copy_piece(void *arg, int64_t i, int worker)
{
    (void)worker;
    const copy_run *r = arg;
    int64_t m = i * COPY_ROWS, end = fsdpi_piece_end(m, COPY_ROWS, r->rows);
    if (r->transpose != NULL) {
        r->transpose->transpose(end - m, r->cols, r->from + m * r->ld, r->ld, 0.0f, r->to + m, r->to_ld);
        return;
    }
    for (; m < end; m++) memcpy(r->to + m * r->to_ld, r->from + m * r->ld, (size_t)r->cols * sizeof(float));
}

/* Elements between rows of n that fall into all sets of the first cache. */
static int64_t good_stride(int64_t n)
{
    int64_t ld = (int64_t)fsdpi_round_up((size_t)n, 16);
    return ld % 64 == 0 ? ld + 16 : ld;
}

static size_t copy_numel(const copy_run *r)
{
    return (size_t)((r->transpose != NULL ? r->cols : r->rows) * r->to_ld);
}

static bool repays(int64_t rows, int64_t cols, int64_t others)
{
    enum { LEAST = 128 }; /* a few rows or columns that it meets do not repay a copy */
    return others >= LEAST && rows > 0 && cols > 0;
}

fsdp_status fsdpi_gemm_spread(const fsdp_kernel *k, fsdpi_gemm *g, float **copy)
{
    copy_run a = { 0 }, b = { 0 };
    *copy = NULL;
    if (fsdpi_gemm_get_info()->kind != FSDPI_GEMM_ONEDNN) return FSDP_OK;
    if (g->trans_a && repays(g->K, g->M, g->N))
        a = (copy_run){ g->a, NULL, g->K, g->M, g->lda, good_stride(g->K), fsdpi_transpose_rows_get(k != NULL ? k->isa : fsdpi_isa_get()) };
    if (!g->trans_b && g->ldb % BAD_STRIDE == 0 && repays(g->K, g->N, g->M)) b = (copy_run){ g->b, NULL, g->K, g->N, g->ldb, good_stride(g->N), NULL };
    size_t of_a = copy_numel(&a), of_b = copy_numel(&b);
    if (of_a + of_b == 0) return FSDP_OK;
    *copy = fsdpi_realloc(NULL, of_a + of_b, sizeof(**copy)); /* not zeroed */
    FSDP_FAIL_IF(*copy == NULL, FSDP_ERR_NOMEM, "no memory for an operand's copy of %zu floats", of_a + of_b);
    a.to = *copy;
    b.to = *copy + of_a;
    for (copy_run *r = &a; r != NULL; r = r == &a ? &b : NULL)
        fsdpi_pool_run(k != NULL ? k->pool : NULL, fsdpi_piece_count(r->rows, COPY_ROWS), copy_piece, r);
    if (of_a > 0) g->a = a.to, g->lda = a.to_ld, g->trans_a = false;
    if (of_b > 0) g->b = b.to, g->ldb = b.to_ld;
    return FSDP_OK;
}

fsdp_status fsdpi_gemm_run(const fsdp_kernel *k, const fsdpi_gemm *g)
{
    fsdpi_gemm spread = *g;
    run_args r = { .g = &spread, .kind = fsdpi_gemm_get_info()->kind, .cut = fsdpi_gemm_cut_of(g->M, g->N) };
    float *copy;
    FSDP_TRY(fsdpi_gemm_spread(k, &spread, &copy));
    fsdpi_pool_run(k != NULL ? k->pool : NULL, r.cut.row_pieces * r.cut.col_pieces, run_piece, &r);
    fsdpi_free(copy);
    FSDP_TRY(fsdpi_pieces_status(&r.pieces));
    return FSDP_OK;
}
