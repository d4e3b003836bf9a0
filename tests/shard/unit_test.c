/* SPDX-License-Identifier: MIT
 *
 * Units hold parameters of any shape on any number of ranks: what is written by a callback, a summon or a step is read
 * back by every rank, on the original shape; what fails changes nothing; units come and go in any order, and which of
 * them comes first in a pass is a matter of the pass. */
#include "support/mini.h"
#include "support/ranks.h"

#include "base/error.h"
#include "shard/unit.h"

#include <unistd.h>

/* ---- shapes ---- */

static void by_index(const char *name, int64_t i, float *value, void *arg)
{
    *value = (float)i + 1000.0f * (float)(name[1] - '0') + *(const float *)arg;
}

typedef struct site {
    fsdp_comm *comm;
    fsdp_device *dev;
    int rank, size;
    fsdp_mode mode;
} site;

static fsdp_status open_site(site *x, fsdp_comm *comm, const corner *c)
{
    *x = (site){ .comm = comm, .rank = fsdp_comm_rank(comm), .size = fsdp_comm_size(comm), .mode = c->mode };
    return fsdp_device_open(&x->dev, c->device);
}

static fsdp_status new_unit(site *x, fsdp_unit **u, const fsdp_param *params, int count, const char *name)
{
    return fsdp_unit_create(u, x->comm, params, count, &(fsdp_unit_opts){ .name = name, .mode = x->mode, .compute_device = x->dev });
}

/* Every element of parameter i is what by_index() says with this offset. */
static fsdp_status expect(fsdp_unit *u, int i, float offset)
{
    int64_t n = fsdp_unit_param_numel(u, i);
    float *x = malloc((size_t)(n + 1) * sizeof(float));
    x[n] = 77;
    fsdp_status st = fsdp_unit_read_param(u, i, x);
    for (int64_t k = 0; k < n && st == FSDP_OK; k++) {
        float want;
        by_index(fsdp_unit_param_info(u, i)->name, k, &want, &offset);
        if (x[k] != want)
            st = fsdp_error_raise(FSDP_ERR_INTERNAL, __func__, __FILE__, __LINE__, "%s[%lld] is %g, not %g", fsdp_unit_param_info(u, i)->name, (long long)k,
                                  (double)x[k], (double)want);
    }
    if (st == FSDP_OK && x[n] != 77) st = fsdp_error_raise(FSDP_ERR_INTERNAL, __func__, __FILE__, __LINE__, "it writes behind the end");
    free(x);
    return st;
}

static fsdp_status shapes(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    const int64_t r = x.size;
    const fsdp_param params[] = {
        { "p0", 0, { 0 } },           { "p1", 1, { 0 } },     { "p2", 1, { 1 } },         { "p3", 1, { r - 1 } },    { "p4", 1, { r } },
        { "p5", 1, { r + 1 } },       { "p6", 1, { 2 * r - 1 } }, { "p7", 3, { 3, 1, 5 } }, { "p8", 8, { 1, 2, 1, 2, 1, 3, 1, 1 } }, { "p9", 2, { 37, 2 * r + 1 } },
    };
    enum { N = sizeof(params) / sizeof(params[0]) };
    fsdp_unit *all, *one[N], *none;
    FSDP_TRY(new_unit(&x, &all, params, N, "all"));
    FSDP_TRY(new_unit(&x, &none, NULL, 0, "none"));
    for (int i = 0; i < N; i++) FSDP_TRY(new_unit(&x, &one[i], &params[i], 1, "one")); /* names of units need not differ */
    float zero[37 * 17];
    for (int i = 0; i < N; i++) { /* they are 0 before they are initialised */
        FSDP_TRY(fsdp_unit_read_param(all, i, zero));
        for (int64_t k = 0; k < fsdp_unit_param_numel(all, i); k++) rank_check(zero[k] == 0);
    }
    float offset = 0.5f;
    FSDP_TRY(fsdp_unit_init(all, by_index, &offset));
    FSDP_TRY(fsdp_unit_init(none, by_index, &offset));
    for (int i = 0; i < N; i++) {
        FSDP_TRY(fsdp_unit_init(one[i], by_index, &offset));
        FSDP_TRY(expect(all, i, offset));
        FSDP_TRY(expect(one[i], 0, offset));
        rank_check(fsdp_unit_param_info(all, i)->ndim == params[i].ndim && memcmp(fsdp_unit_param_info(all, i)->shape, params[i].shape, sizeof(params[i].shape)) == 0);
    }
    offset = 7; /* again: the second values count */
    FSDP_TRY(fsdp_unit_init(all, by_index, &offset));
    FSDP_TRY(fsdp_unit_read_param(all, 9, x.rank == 0 ? zero : NULL)); /* who wants nothing takes part */
    for (int i = 0; i < N; i++) FSDP_TRY(expect(all, i, offset));
    rank_check(fsdp_unit_param_count(none) == 0 && fsdp_unit_param_count(all) == N);
    rank_check(fsdp_unit_param_info(all, N) == NULL && fsdp_unit_param_info(all, -1) == NULL && fsdp_unit_param_numel(all, N) == 0);
    rank_check(strcmp(fsdp_unit_name(all), "all") == 0 && fsdp_unit_comm(all) == comm && fsdp_unit_mode(all) == x.mode);
    rank_check(fsdp_unit_read_param(all, N, zero) == FSDP_ERR_INVALID && fsdp_unit_read_param(none, 0, zero) == FSDP_ERR_INVALID);
    fsdp_unit_destroy(none);
    for (int i = N - 1; i >= 0; i -= 2) fsdp_unit_destroy(one[i]);
    FSDP_TRY(expect(one[N - 2], 0, 0.5f));
    for (int i = N - 2; i >= 0; i -= 2) fsdp_unit_destroy(one[i]);
    FSDP_TRY(expect(all, 9, offset));
    fsdp_unit_destroy(all);
    fsdp_unit_destroy(NULL);
    fsdp_device_close(x.dev);
    return FSDP_OK;
}

static void test_shapes(void **state)
{
    (void)state;
    in_corners(shapes, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 1, 3, 8, 0 } : NULL });
}

/* The callback is asked for the elements that this rank keeps, on the original shape, each once. */
typedef struct asked {
    int times[2][64];
    int rank;
} asked;

static fsdp_status fill_and_count(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    asked *a = arg;
    rank_check(strcmp(name, param == 0 ? "p0" : "p1") == 0);
    for (int64_t i = 0; i < numel; i++) {
        a->times[param][first + i]++;
        out[i] = (float)(100 * a->rank + first + i);
    }
    return FSDP_OK;
}

static fsdp_status callbacks(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    fsdp_unit *u;
    const fsdp_param params[] = { { "p0", 2, { 5, 9 } }, { "p1", 1, { 33 } } };
    FSDP_TRY(new_unit(&x, &u, params, 2, "u"));
    asked mine = { .rank = x.rank };
    FSDP_TRY(fsdp_unit_fill(u, fill_and_count, &mine));
    const fsdp_slice *s;
    int n, kept = 0, times = 0;
    fsdp_unit_slices(u, &s, &n);
    for (int i = 0; i < n; i++)
        for (int64_t k = 0; k < s[i].numel; k++, kept++) rank_check(mine.times[s[i].param][s[i].offset + k] == 1);
    for (int p = 0; p < 2; p++)
        for (int i = 0; i < 64; i++) times += mine.times[p][i];
    rank_check(times == kept);
    /* Ranks wrote different values, a patchwork: each owner's slice counts, in all modes. */
    float w[45];
    FSDP_TRY(fsdp_unit_read_param(u, 0, w));
    for (int i = 0; i < 45; i++) {
        int owner = 0;
        while (i >= u->layout.edge[owner + 1]) owner++;
        rank_check(w[i] == (float)(100 * owner + i));
    }
    rank_check(fsdp_unit_init(u, NULL, NULL) == FSDP_ERR_INVALID);
    rank_check(fsdp_unit_fill(u, NULL, NULL) == FSDP_ERR_INVALID);
    fsdp_unit_destroy(u);
    fsdp_device_close(x.dev);
    return FSDP_OK;
}

static void test_callbacks(void **state)
{
    (void)state;
    in_corners(callbacks, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 8, 0 } });
}

/* ---- fills that fail ---- */

typedef struct bad_fill {
    int rank, bad, calls;
} bad_fill;

static fsdp_status fail_late(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)name;
    (void)param;
    (void)first;
    bad_fill *b = arg;
    for (int64_t i = 0; i < numel; i++) out[i] = -5;
    if (b->rank == b->bad && b->calls++ == 1) FSDP_FAIL(FSDP_ERR_FORMAT, "the file is cut off");
    return FSDP_OK;
}

/* One rank's callback fails: no rank has new values, all are told which rank and why, and the next fill works. */
static fsdp_status failed_fills(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    fsdp_unit *u;
    const fsdp_param params[] = { { "p0", 2, { 5, 90 } }, { "p1", 1, { 330 } }, { "p2", 1, { 411 } }, { "p3", 1, { 901 } } };
    FSDP_TRY(new_unit(&x, &u, params, 4, "u"));
    float offset = 0.25f;
    FSDP_TRY(fsdp_unit_init(u, by_index, &offset));
    for (int bad = 0; bad < x.size; bad++) {
        const fsdp_slice *s;
        int n;
        fsdp_unit_slices(u, &s, &n);
        double slices = bad == x.rank ? n : 0;
        FSDP_TRY(fsdp_comm_max(comm, &slices, 1));
        if (slices < 2) continue; /* its callback is called once only */
        fsdp_status st = fsdp_unit_fill(u, fail_late, &(bad_fill){ x.rank, bad, 0 });
        char who[32];
        snprintf(who, sizeof(who), "rank %d: ", bad);
        rank_check(st == FSDP_ERR_FORMAT && strstr(fsdp_last_error_message(), "the file is cut off") != NULL);
        rank_check(x.size == 1 || strncmp(fsdp_last_error_message(), who, strlen(who)) == 0);
        for (int i = 0; i < 4; i++) FSDP_TRY(expect(u, i, offset));
    }
    offset = 9;
    FSDP_TRY(fsdp_unit_init(u, by_index, &offset));
    for (int i = 0; i < 4; i++) FSDP_TRY(expect(u, i, offset));
    fsdp_unit_destroy(u);
    fsdp_device_close(x.dev);
    return FSDP_OK;
}

static void test_a_failed_fill_changes_nothing(void **state)
{
    (void)state;
    in_corners(failed_fills, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 3, 0 } });
}

/* ---- summon ---- */

typedef struct write_args {
    float *p, value;
    int64_t numel;
} write_args;

static fsdp_status k_write(const fsdp_kernel *k, const void *args)
{
    const write_args *a = args;
    float *p = fsdp_kernel_ptr(k, a->p);
    for (int64_t i = 0; i < a->numel; i++) p[i] = a->value + (float)i;
    return FSDP_OK;
}

static size_t live_bytes(const fsdp_unit *u)
{
    return fsdpi_arena_get_stats(u->ctx->arena).bytes_live + fsdpi_arena_get_stats(u->ctx->gathered).bytes_live;
}

/* Each rank writes 1000 rank + i everywhere and keeps its slice of that; as much memory is in use after as before. */
static fsdp_status summons(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    fsdp_unit *u;
    const fsdp_param params[] = { { "p0", 2, { 5, 9 } }, { "p1", 0, { 0 } }, { "p2", 1, { 0 } } };
    FSDP_TRY(new_unit(&x, &u, params, 3, "u"));
    const fsdp_unit_summon_opts writeback = { .writeback = true };
    size_t before = live_bytes(u);
    FSDP_TRY(fsdp_unit_summon_begin(u, NULL)); /* before anything else was done */
    rank_check(fsdp_unit_param(u, 0) != NULL && fsdp_unit_summoned(u, 0) == NULL && fsdpi_error_status() == FSDP_ERR_STATE);
    FSDP_TRY(fsdp_unit_summon_end(u));
    for (int round = 0; round < 3; round++) {
        FSDP_TRY(fsdp_unit_summon_begin(u, &writeback));
        FSDP_TRY(fsdp_unit_summon_begin(u, &writeback)); /* nested: the outer one writes back */
        float *p = fsdp_unit_summoned(u, 0), back[45], *scalar = fsdp_unit_summoned(u, 1);
        rank_check(p != NULL && scalar != NULL && fsdp_unit_summoned(u, 3) == NULL);
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_write, &(write_args){ p, (float)(1000 * x.rank + round), 45 }, sizeof(write_args)));
        FSDP_TRY(fsdp_unit_summon_end(u));
        FSDP_TRY(fsdp_unit_summon_begin(u, NULL)); /* a reader within it */
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_write, &(write_args){ scalar, (float)(10 * x.rank + round), 1 }, sizeof(write_args)));
        FSDP_TRY(fsdp_unit_summon_end(u));
        FSDP_TRY(fsdp_unit_summon_end(u));
        rank_check(round == 0 || live_bytes(u) == before || x.mode == FSDP_MODE_OPTIMIZER);
        FSDP_TRY(fsdp_unit_read_param(u, 0, back));
        for (int i = 0; i < 45; i++) {
            int owner = 0;
            while (i >= u->layout.edge[owner + 1]) owner++;
            rank_check(back[i] == (float)(1000 * owner + round + i));
        }
        FSDP_TRY(fsdp_unit_read_param(u, 1, back));
        int owner = 0;
        while (u->layout.at[1] >= u->layout.edge[owner + 1]) owner++;
        rank_check(back[0] == (float)(10 * owner + round));
        if (round == 0) before = live_bytes(u); /* mode optimizer keeps what it gathered */
        /* what is written without writeback is lost: there is nowhere to write */
        FSDP_TRY(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = false }));
        rank_check(fsdp_unit_summoned(u, 0) == NULL);
        FSDP_TRY(fsdp_unit_summon_end(u));
        rank_check(live_bytes(u) == before);
    }
    fsdp_unit_destroy(u);
    fsdp_device_close(x.dev);
    return FSDP_OK;
}

static void test_summons(void **state)
{
    (void)state;
    in_corners(summons, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 2, 0 } : (const int[]){ 1, 2, 3, 8, 0 } });
}

/* The issue behind this library: an inner unit is summoned, initialised and trained before a unit around it exists.
 * Values come from a seed of the rank's own, so that they are a patchwork; they stay what they were. */
static fsdp_status first_alone_then_inside(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    site x;
    FSDP_TRY(open_site(&x, comm, c));
    fsdp_unit *inner, *root, *empty;
    const fsdp_param w = { "p0", 2, { 7, 5 } }, v = { "p1", 1, { 3 } };
    FSDP_TRY(new_unit(&x, &inner, &w, 1, "inner"));
    FSDP_TRY(fsdp_unit_summon_begin(inner, &(fsdp_unit_summon_opts){ .writeback = true }));
    FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(inner), k_write, &(write_args){ fsdp_unit_summoned(inner, 0), (float)(50 * x.rank), 35 }, sizeof(write_args)));
    FSDP_TRY(fsdp_unit_summon_end(inner));
    float was[35], is[35];
    FSDP_TRY(fsdp_unit_read_param(inner, 0, was));
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_EVAL)); /* the root of this pass */
    FSDP_TRY(fsdp_unit_begin_forward(inner, pass));
    FSDP_TRY(fsdp_unit_end_forward(inner, pass));
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(new_unit(&x, &root, &v, 1, "root"));
    FSDP_TRY(new_unit(&x, &empty, NULL, 0, "around all")); /* a root without parameters, made last */
    float offset = 0;
    FSDP_TRY(fsdp_unit_init(root, by_index, &offset));
    fsdp_unit *nest[] = { empty, root, inner };
    for (int round = 0; round < 3; round++) {
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        for (int i = round; i < 3; i++) FSDP_TRY(fsdp_unit_begin_forward(nest[i], pass)); /* another root each time */
        for (int i = 2; i >= round; i--) FSDP_TRY(fsdp_unit_end_forward(nest[i], pass));
        for (int i = round; i < 3; i++) FSDP_TRY(fsdp_unit_begin_backward(nest[i], pass));
        for (int i = 2; i >= round; i--) FSDP_TRY(fsdp_unit_end_backward(nest[i], pass));
        FSDP_TRY(fsdp_pass_end(pass));
    }
    FSDP_TRY(fsdp_unit_read_param(inner, 0, is));
    rank_check(memcmp(was, is, sizeof(was)) == 0);
    fsdp_unit_destroy(empty);
    fsdp_unit_destroy(root);
    fsdp_unit_destroy(inner);
    fsdp_device_close(x.dev);
    return FSDP_OK;
}

static void test_a_unit_used_alone_first(void **state)
{
    (void)state;
    in_corners(first_alone_then_inside, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

/* ---- what is refused ---- */

static fsdp_status refusals(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    const fsdp_param w = { "w", 1, { 5 } }, bad = { "w", 1, { -5 } }, huge = { "w", 2, { (int64_t)1 << 30, (int64_t)1 << 20 } };
    fsdp_unit *u = NULL, *v;
    fsdp_device *guard, *other;
    FSDP_TRY(fsdp_device_open(&guard, "guard"));
    FSDP_TRY(fsdp_device_open(&other, "guard"));
    rank_check(fsdp_unit_create(&u, comm, &bad, 1, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "unit \"unit\", parameter \"w\"") != NULL);
    rank_check(fsdp_unit_create(&u, comm, &w, 1, &(fsdp_unit_opts){ .mode = (fsdp_mode)9 }) == FSDP_ERR_INVALID);
    rank_check(fsdp_unit_create(&u, comm, &w, 1, &(fsdp_unit_opts){ .prefetch = 65 }) == FSDP_ERR_INVALID);
    rank_check(fsdp_unit_create(&u, NULL, &w, 1, NULL) == FSDP_ERR_INVALID && fsdp_unit_create(NULL, comm, &w, 1, NULL) == FSDP_ERR_INVALID);
    rank_check(fsdp_unit_create(&u, comm, &w, 1, &(fsdp_unit_opts){ .storage_device = guard, .compute_device = other }) == FSDP_ERR_UNSUPPORTED);
    fsdp_device_close(other);
    rank_check(fsdp_unit_create(&u, comm, &huge, 1, NULL) == FSDP_ERR_NOMEM); /* 4 PiB */
    rank_check(u == NULL);
    rank_check(fsdp_pass_begin(&(fsdp_pass *){ NULL }, comm, (fsdp_pass_kind)7) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_unit_create(&u, comm, &w, 1, &(fsdp_unit_opts){ .name = "u" }));
    FSDP_TRY(fsdp_unit_create(&v, comm, &w, 1, &(fsdp_unit_opts){ .name = "v" }));
    /* A list with a unit twice: its slices would be opened twice. */
    fsdp_unit *twice[] = { u, v, u };
    rank_check(fsdp_step_begin((fsdp_unit_list){ twice, 3 }) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "unit \"u\" is in the list twice") != NULL);
    rank_check(fsdp_step_begin((fsdp_unit_list){ NULL, 2 }) == FSDP_ERR_INVALID && fsdp_step_begin((fsdp_unit_list){ twice, -1 }) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ twice, 2 }));
    rank_check(fsdp_step_end((fsdp_unit_list){ twice, 3 }) == FSDP_ERR_INVALID);
    FSDP_TRY(fsdp_step_end((fsdp_unit_list){ twice, 2 }));
    FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ NULL, 0 }));
    FSDP_TRY(fsdp_step_end((fsdp_unit_list){ NULL, 0 }));
    fsdp_unit_destroy(u);
    fsdp_unit_destroy(v);
    fsdp_device_close(guard);
    fsdp_device_close(x.dev);
    return FSDP_OK;
}

static void test_refusals(void **state)
{
    (void)state;
    in_corners(refusals, &(corners){ .device = "cpu", .ranks = (const int[]){ 1, 2, 0 } });
}

/* Ranks that make different units of one name are told at once, which and what, and none gets one. */
static fsdp_status different_units(fsdp_comm *comm, void *arg)
{
    site x;
    FSDP_TRY(open_site(&x, comm, arg));
    static const struct {
        fsdp_param param;
        const char *unit;
        fsdp_mode mode;
        const char *said;
    } other[] = {
        { { "w", 2, { 3, 2 } }, "u", FSDP_MODE_FULL, "parameter 0 is w [2,3] on rank 0 and w [3,2] on rank 1" },
        { { "w", 1, { 6 } }, "u", FSDP_MODE_FULL, "parameter 0 is w [2,3] on rank 0 and w [6] on rank 1" },
        { { "x", 2, { 2, 3 } }, "u", FSDP_MODE_FULL, "parameter 0 is w [2,3] on rank 0 and x [2,3] on rank 1" },
        { { "w", 2, { 2, 3 } }, "u", FSDP_MODE_NONE, "mode is full on rank 0 and none on rank 1" },
    };
    const fsdp_param w = { "w", 2, { 2, 3 } };
    for (int i = 0; i < 4; i++) {
        fsdp_unit *u = NULL;
        bool odd = x.rank == 1;
        fsdp_status st = fsdp_unit_create(&u, comm, odd ? &other[i].param : &w, 1, &(fsdp_unit_opts){ .name = odd ? other[i].unit : "u", .mode = odd ? other[i].mode : FSDP_MODE_FULL });
        if (st != FSDP_ERR_INVALID || strstr(fsdp_last_error_message(), other[i].said) == NULL)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "case %d: %s: %s", i, fsdp_status_name(st), fsdp_last_error_message());
        rank_check(u == NULL);
    }
    /* wrong by itself, on that rank alone */
    static const struct {
        fsdp_unit_opts opts;
        const char *said;
    } wrong[] = {
        { { .name = "u", .mode = (fsdp_mode)9 }, "mode is 9" },
        { { .name = "u", .shards = 7 }, "shards must divide" },
        { { .name = "u", .param_dtype = FSDP_I32 }, "each must be F32, BF16 or F16" },
    };
    for (int i = 0; i < 3; i++) {
        fsdp_unit *u = NULL;
        fsdp_status st = fsdp_unit_create(&u, comm, &w, 1, x.rank == 1 ? &wrong[i].opts : &(fsdp_unit_opts){ .name = "u" });
        if (st != FSDP_ERR_INVALID || strstr(fsdp_last_error_message(), wrong[i].said) == NULL || (x.rank != 1 && strstr(fsdp_last_error_message(), "rank 1") == NULL))
            FSDP_FAIL(FSDP_ERR_INTERNAL, "wrong options %d: %s: %s", i, fsdp_status_name(st), fsdp_last_error_message());
        rank_check(u == NULL);
    }
    fsdp_unit *u = NULL;
    fsdp_status sums = fsdp_unit_create(&u, comm, &w, 1, &(fsdp_unit_opts){ .name = "u", .grad_dtype = x.rank == 1 ? FSDP_F16 : FSDP_BF16 });
    rank_check(sums == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "sums of gradients are BF16 on rank 0 and F16 on rank 1") != NULL && u == NULL);
    const fsdp_param many[] = { { "w", 2, { 2, 3 } }, { "b", 1, { 3 } } };
    fsdp_status st = fsdp_unit_create(&u, comm, many, x.rank == 1 ? 1 : 2, NULL);
    rank_check(st == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "2 parameters on rank 0 and 1 on rank 1") != NULL);
    FSDP_TRY(fsdp_unit_create(&u, comm, many, 2, NULL)); /* nothing is broken */
    fsdp_unit_destroy(u);
    fsdp_device_close(x.dev);
    return FSDP_OK;
}

static void test_ranks_that_make_different_units(void **state)
{
    (void)state;
    in_corners(different_units, &(corners){ .device = "cpu", .ranks = (const int[]){ 2, 3, 0 } });
}

/* ---- several communicators, and models ---- */

/* Each half of the ranks trains a model of its own, at its own pace, while the world has one of all. */
static fsdp_status halves(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), half = rank % 2;
    fsdp_comm *sub;
    mini whole, mine;
    float a[1024], b[1024], alone[1024];
    FSDP_TRY(fsdp_comm_split(comm, half, 0, &sub));
    FSDP_TRY(mini_create(&whole, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(mini_create(&mine, sub, &(mini_opts){ .mode = c->mode, .device = c->device }));
    for (int s = 0; s < 3; s++) {
        FSDP_TRY(mini_step(&whole, MINI_NESTED, s, 6));
        for (int k = 0; k <= half; k++) FSDP_TRY(mini_step(&mine, MINI_NESTED, s, 6)); /* the odd half does more */
    }
    FSDP_TRY(mini_read(&whole, a));
    FSDP_TRY(mini_read(&mine, b));
    mini_destroy(&mine);
    /* The even half did what the world did. */
    if (half == 0) rank_check(memcmp(a, b, (size_t)mini_numel() * sizeof(float)) == 0);
    else rank_check(memcmp(a, b, (size_t)mini_numel() * sizeof(float)) != 0);
    /* A unit of one communicator does not fit another's pass; an optimizer of both wants to know over what it steps. */
    fsdp_pass *pass;
    FSDP_TRY(mini_create(&mine, sub, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(fsdp_pass_begin(&pass, sub, FSDP_PASS_TRAIN));
    rank_check(fsdp_unit_begin_forward(whole.unit[0], pass) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "not open on the unit's communicator") != NULL);
    FSDP_TRY(fsdp_pass_end(pass));
    fsdp_unit *mixed[] = { whole.unit[0], mine.unit[0] };
    fsdp_optim *optim = NULL;
    FSDP_TRY(fsdp_optim_create_adamw(&optim, (fsdp_unit_list){ mixed, 2 }, NULL));
    rank_check(fsdp_optim_step(optim, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "different communicators") != NULL);
    FSDP_TRY(fsdp_optim_step(optim, &(fsdp_step_opts){ .over = comm }));
    fsdp_optim_destroy(optim);
    FSDP_TRY(mini_step(&mine, MINI_NESTED, 0, 6));
    FSDP_TRY(mini_read(&mine, alone));
    fsdp_comm_destroy(NULL);
    mini_destroy(&mine);
    mini_destroy(&whole);
    FSDP_TRY(fsdp_comm_barrier(sub));
    fsdp_comm_destroy(sub);
    return fsdp_comm_barrier(comm);
}

static void test_communicators_side_by_side(void **state)
{
    (void)state;
    in_corners(halves, &(corners){ .all_modes = true, .ranks = (const int[]){ 2, 6, 0 }, .threads_only = SANITIZED });
}

/* ---- reading between a step that was given up and the next ---- */

typedef struct late_args {
    const float *p;
    float *to, want;
    int64_t numel;
    unsigned sleep_us;
} late_args;

static fsdp_status k_read_late(const fsdp_kernel *k, const void *args)
{
    const late_args *a = args;
    const volatile float *p = fsdp_kernel_ptr(k, a->p);
    usleep(a->sleep_us);
    for (int64_t i = 0; i < a->numel; i++)
        if (p[i] != a->want) FSDP_FAIL(FSDP_ERR_INTERNAL, "element %lld is %g, not %g: its owner did not wait", (long long)i, (double)p[i], (double)a->want);
    return FSDP_OK;
}

static fsdp_status k_set_all(const fsdp_kernel *k, const void *args)
{
    const late_args *a = args;
    float *to = fsdp_kernel_ptr(k, a->to);
    for (int64_t i = 0; i < a->numel; i++) to[i] = a->want;
    return FSDP_OK;
}

static fsdp_status fails_on_1(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)name, (void)param, (void)first;
    for (int64_t i = 0; i < numel; i++) out[i] = -1;
    FSDP_FAIL_IF(*(int *)arg == 1, FSDP_ERR_IO, "as it should");
    return FSDP_OK;
}

/* All ranks have said that they are done with what is published, and then there was no new version. */
static fsdp_status give_up(fsdp_unit *u, int how, int rank)
{
    if (how == 0) {
        FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ &u, 1 }));
        return fsdp_step_cancel((fsdp_unit_list){ &u, 1 });
    }
    rank_check(fsdp_unit_fill(u, fails_on_1, &rank) == FSDP_ERR_IO);
    return FSDP_OK;
}

static fsdp_status late_readers(fsdp_comm *comm, void *arg)
{
    enum { NUMEL = 200 };
    site x;
    fsdp_unit *u;
    FSDP_TRY(open_site(&x, comm, arg));
    FSDP_TRY(new_unit(&x, &u, &(fsdp_param){ "w0", 1, { NUMEL } }, 1, "u"));
    for (int round = 0; round < 6; round++) {
        FSDP_TRY(give_up(u, round % 2, x.rank));
        late_args a = { .want = (float)round, .numel = NUMEL, .sleep_us = x.rank == round / 2 % x.size ? 8000 : 0 };
        FSDP_TRY(fsdp_unit_summon_begin(u, NULL));
        a.p = fsdp_unit_param(u, 0);
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(u), k_read_late, &a, sizeof(a)));
        FSDP_TRY(fsdp_unit_summon_end(u));
        FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ &u, 1 }));
        const fsdp_slice *s;
        int n;
        fsdp_unit_slices(u, &s, &n);
        for (int i = 0; i < n; i++)
            FSDP_TRY(fsdp_stream_launch(fsdp_unit_storage_stream(u), k_set_all, &(late_args){ .to = s[i].master, .want = (float)(round + 1), .numel = s[i].numel }, sizeof(late_args)));
        FSDP_TRY(fsdp_step_end((fsdp_unit_list){ &u, 1 }));
    }
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(u)));
    fsdp_unit_destroy(u);
    fsdp_device_close(x.dev);
    return FSDP_OK;
}

static void test_owners_wait_for_who_reads_after_a_step_was_given_up(void **state)
{
    (void)state;
    in_corners(late_readers, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_callbacks),
        cmocka_unit_test(test_a_failed_fill_changes_nothing),
        cmocka_unit_test(test_summons),
        cmocka_unit_test(test_a_unit_used_alone_first),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_ranks_that_make_different_units),
        cmocka_unit_test(test_communicators_side_by_side),
        cmocka_unit_test(test_owners_wait_for_who_reads_after_a_step_was_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
