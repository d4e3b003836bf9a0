/* SPDX-License-Identifier: MIT
 *
 * Whatever is done in a pass, in whichever order, the parameters have the bits of a plain program that adds gradients
 * leaf after leaf: for every number of ranks, mode, transport and device. Units used once, twice, in turns, alone,
 * nested, partly or not at all; passes that overlap, that are cancelled anywhere, with evaluations between them. */
#include "support/mini.h"
#include "support/ranks.h"

enum { STEPS = 2 };

/* Leaves of a step: 24 for 1, 2, 3 and 8 ranks; 5 divides no 24. */
static int leaves_for(int ranks)
{
    return ranks == 5 ? 20 : 24;
}

static const char *const scripts[] = {
    MINI_NESTED,
    "F1 F2 B2 B1",                             /* two roots, one after the other */
    "[0 [1 [2 F3 ]2 ]1 ]0 {0 {1 {2 B3 }2 }1 }0", /* units in units */
    "[0 F1 F1 F2 ]0 {0 B2 B1 B1 }0",           /* twice in a forward */
    "F1 F1 B1 B1 F5 B5",                       /* two forwards, then two backwards */
    "[1 [1 ]1 ]1 {1 }1 B1",                    /* a unit within itself */
    "F1 B1 F1 B1 F2 F1 B1 B2",                 /* in turns: three rounds of gradients */
    "F1 F1 B1 F1 B1 B1",                       /* a forward between two backwards */
    "[0 F1 ]0 {0 }0 F2 B2",                    /* a unit whose backward never comes */
    "F1 F1 B1",                                /* fewer backwards than forwards: what there is counts */
    "[0 F1 F2 ]0 {0 F1 F2 B2 B1 }0",           /* forwards again within a backward: recomputation */
    "[0 F5 F3 ]0 {0 P3 P5 }0",                 /* parameters without gradients */
    "F1 N1 F2 B2 F3 N3",                       /* backwards that write nothing: gradient zero */
    "F4 B4",                                   /* a root without parameters */
    "[4 F1 F5 ]4 {4 B5 B1 }4",                 /* ... with units in it */
    "F3 B3",                                   /* smaller than any number of ranks */
    "",                                        /* an empty pass */
};
enum { SCRIPTS = sizeof(scripts) / sizeof(scripts[0]) };

typedef struct result {
    float param[8][1024]; /* as each rank reads them */
} result;

typedef struct work {
    const char *script;
    fsdp_status (*leaf)(mini *m, const char *script, int64_t leaf);
    int prefetch;
} work;

/* The usual frame: steps of some leaves, each by work.leaf. */
static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const work *w = c->arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm), leaves = leaves_for(size);
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .sgd = true, .prefetch = w->prefetch }));
    for (int s = 0; s < STEPS; s++) {
        for (int leaf = rank; leaf < leaves; leaf += size) FSDP_TRY(w->leaf(&m, w->script, s * leaves + leaf));
        FSDP_TRY(fsdp_optim_step(m.optim, &(fsdp_step_opts){ .grad_scale = 1.0f / 32 }));
    }
    FSDP_TRY(mini_read(&m, ((result *)c->shared)->param[rank]));
    mini_destroy(&m);
    return FSDP_OK;
}

static float wanted[2][1024]; /* of five ranks, of others */
static const char *script_now;

/* swap: 0, or for how many ranks the leaves of two passes in a row change places. */
static void make_plain_swapped(const char *script, int swap)
{
    script_now = script;
    for (int k = 0; k < 2; k++) {
        plain *p = plain_create();
        int leaves = leaves_for(k == 0 ? 5 : 1);
        for (int s = 0; s < STEPS; s++) {
            for (int i = 0; i < leaves; i++) plain_leaf(p, script, s * leaves + (swap > 0 ? (i / swap ^ 1) * swap + i % swap : i));
            plain_step(p, 1.0f / 32);
        }
        memset(wanted[k], 0, sizeof(wanted[k]));
        plain_read(p, wanted[k]);
        plain_destroy(p);
    }
}

static void make_plain(const char *script)
{
    make_plain_swapped(script, 0);
}

static void compare(const corner *c)
{
    const result *got = c->shared;
    const float *want = wanted[c->ranks != 5];
    for (int r = 0; r < c->ranks; r++)
        for (int i = 0; i < mini_numel(); i++)
            if (memcmp(&want[i], &got->param[r][i], sizeof(float)) != 0)
                fail_msg("%s, script \"%s\": rank %d reads %.9g for element %d, not %.9g", corner_name(c), script_now, r, (double)got->param[r][i], i, (double)want[i]);
}

/* Corner number n of a walk through all of them, so that many scripts share a few launches each. */
static void in_some_corner(const work *w, int n)
{
    static const int sizes[] = { 1, 2, 3, 5, 8 };
    corner c = { .transport = n % 2 ? "copy" : "shm", .device = n / 2 % 3 == 0 ? "guard" : "cpu", .mode = (fsdp_mode)(n / 3 % 4), .ranks = sizes[n % 5],
                 .threads = n / 5 % 2 || !CAN_FORK, .arg = (void *)(uintptr_t)w };
    c.shared = shared_alloc(sizeof(result));
    if (in_corner(train, &c) != FSDP_OK) fail_msg("%s, script \"%s\": %s", corner_name(&c), w->script, fsdp_last_error());
    compare(&c);
    shared_free(c.shared, sizeof(result));
}

/* Corners n * 7: the first five have every number of ranks and every mode, both transports, devices and kinds of ranks; ten, more pairs. */
enum { SOME = SANITIZED ? 5 : 10 };

static void test_scripts(void **state)
{
    (void)state;
    for (int s = 0; s < SCRIPTS; s++) {
        make_plain(scripts[s]);
        work w = { scripts[s], mini_leaf, 0 };
        for (int n = 0; n < SOME; n++) in_some_corner(&w, n * 7 + s);
    }
}

/* In every corner, one script that has most of it. */
static void test_every_corner(void **state)
{
    (void)state;
    make_plain("[0 F1 F1 F2 F3 F5 ]0 {0 B5 P3 B2 B1 B1 }0 F1 B1");
    work w = { script_now, mini_leaf, 0 };
    in_corners(train, &(corners){ .ranks = SANITIZED ? (const int[]){ 3, 0 } : (const int[]){ 3, 8, 0 }, .all_modes = true, .shared = sizeof(result), .arg = &w, .after = compare });
}

/* ---- passes that overlap ---- */

/* Two leaves of a rank at once: their gradients are added in the order in which their passes end. */
static fsdp_status interleaved(mini *m, const char *script, int64_t leaf)
{
    (void)script;
    int64_t other = leaf + (leaf / fsdp_comm_size(m->comm) % 2 ? -1 : 1) * fsdp_comm_size(m->comm);
    if (other < leaf) return FSDP_OK; /* done with the one before */
    fsdp_pass *a, *b;
    m->number[leaf % MINI_LEAVES] = m->number[other % MINI_LEAVES] = 0;
    FSDP_TRY(fsdp_pass_begin(&a, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, a, "[0 F1 F2 ]0", leaf));
    FSDP_TRY(fsdp_pass_begin(&b, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, b, "[0 F1 F2 ]0", other));
    FSDP_TRY(mini_run(m, b, "{0 B2 B1 }0", other));
    FSDP_TRY(fsdp_pass_end(b));
    FSDP_TRY(mini_run(m, a, "{0 B2 B1 }0", leaf));
    return fsdp_pass_end(a);
}

static void test_interleaved_passes(void **state)
{
    (void)state;
    static const int sizes[] = { 1, 2, 3, 5 };
    work w = { "interleaved", interleaved, 0 };
    for (int i = 0; i < 4; i++) {
        make_plain_swapped("[0 F1 F2 ]0 {0 B2 B1 }0", sizes[i]);
        in_corners(train, &(corners){ .ranks = (const int[]){ sizes[i], 0 }, .all_modes = i == 2, .threads_only = SANITIZED, .shared = sizeof(result), .arg = &w, .after = compare });
    }
}

/* ---- cancelled passes ---- */

/* Before the leaf itself a pass is begun, done in part, and cancelled: at another place for each leaf. */
static fsdp_status cancelled(mini *m, const char *script, int64_t leaf)
{
    char part[128];
    size_t n = strlen(script), upto = (size_t)(leaf / fsdp_comm_size(m->comm)) * 3 % (n + 3) / 3 * 3;
    snprintf(part, sizeof(part), "%.*s", (int)(upto < n ? upto : n), script);
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, m->comm, FSDP_PASS_TRAIN));
    fsdp_pass_add_weight(pass, 1000);
    m->number[(leaf + 500) % MINI_LEAVES] = 3;
    FSDP_TRY(mini_run(m, pass, part, leaf + 500));
    FSDP_TRY(fsdp_pass_cancel(pass));
    FSDP_TRY(fsdp_pass_cancel(NULL));
    return mini_leaf(m, script, leaf);
}

static void test_a_cancelled_pass_leaves_no_trace(void **state)
{
    (void)state;
    static const char *const some[] = { MINI_NESTED, "F1 B1 F1 B1 F2 F1 B1 B2", "[1 [1 ]1 ]1 {1 }1 B1" };
    for (int s = 0; s < 3; s++) {
        make_plain(some[s]);
        work w = { some[s], cancelled, 0 };
        for (int n = 0; n < SOME; n++) in_some_corner(&w, n * 7 + s);
    }
}

/* One of two overlapping passes is cancelled. */
static fsdp_status one_of_two(mini *m, const char *script, int64_t leaf)
{
    fsdp_pass *a, *b;
    m->number[leaf % MINI_LEAVES] = m->number[(leaf + 500) % MINI_LEAVES] = 0;
    FSDP_TRY(fsdp_pass_begin(&a, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, a, "[0 F1 F2 {2 }2", leaf)); /* 2 has its gradients */
    FSDP_TRY(fsdp_pass_begin(&b, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, b, "[3 F1 B1 {3", leaf + 500) == FSDP_ERR_STATE ? FSDP_OK : FSDP_ERR_INTERNAL); /* 3: no forward yet */
    FSDP_TRY(fsdp_pass_cancel(b));
    FSDP_TRY(mini_run(m, a, "]0 {0 B1 }0", leaf));
    (void)script;
    return fsdp_pass_end(a);
}

static void test_one_of_two_passes_is_cancelled(void **state)
{
    (void)state;
    make_plain("[0 F1 F2 {2 }2 ]0 {0 B1 }0");
    work w = { script_now, one_of_two, 0 };
    for (int n = 0; n < SOME; n++) in_some_corner(&w, n * 7);
}

/* ---- evaluations, dropped gradients ---- */

static fsdp_status with_evaluations(mini *m, const char *script, int64_t leaf)
{
    fsdp_pass *train, *eval;
    int64_t turn = leaf % leaves_for(fsdp_comm_size(m->comm)) / fsdp_comm_size(m->comm); /* the same on all ranks */
    m->number[leaf % MINI_LEAVES] = 0;
    FSDP_TRY(fsdp_pass_begin(&train, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, train, "[0 F1", leaf));
    FSDP_TRY(fsdp_pass_begin(&eval, m->comm, FSDP_PASS_EVAL)); /* in the middle of it */
    FSDP_TRY(mini_run(m, eval, "[0 F1 F2 F3 ]0", 4000));
    FSDP_TRY(fsdp_pass_end(eval));
    FSDP_TRY(mini_run(m, train, "F2 ]0 {0 B2", leaf));
    FSDP_TRY(fsdp_pass_begin(&eval, m->comm, FSDP_PASS_EVAL));
    FSDP_TRY(mini_run(m, eval, "F1 F5", 4000));
    FSDP_TRY(fsdp_pass_end(eval));
    FSDP_TRY(mini_run(m, train, "B1 }0", leaf));
    FSDP_TRY(fsdp_pass_end(train));
    FSDP_TRY(fsdp_pass_begin(&eval, m->comm, FSDP_PASS_EVAL)); /* and after it */
    FSDP_TRY(mini_run(m, eval, "[0 F1 F2 F5 ]0", 4000));
    (void)script;
    return turn % 2 ? fsdp_pass_end(eval) : fsdp_pass_cancel(eval);
}

static void test_evaluations_between_and_within(void **state)
{
    (void)state;
    make_plain("[0 F1 F2 ]0 {0 B2 B1 }0");
    work w = { script_now, with_evaluations, 0 };
    for (int n = 0; n < SOME; n++) in_some_corner(&w, n * 7);
}

/* Gradients are dropped in the middle of a step: only what came after counts. */
static fsdp_status dropping(mini *m, const char *script, int64_t leaf)
{
    if (leaf % leaves_for(fsdp_comm_size(m->comm)) / fsdp_comm_size(m->comm) == 0) { /* this rank's first of the step */
        FSDP_TRY(mini_leaf(m, "F1 F2 B2 B1 F5 B5", leaf + 700));
        FSDP_TRY(mini_leaf(m, "F1 B1 F1 B1", leaf + 900));
        for (int u = 0; u < MINI_UNITS; u++) FSDP_TRY(fsdp_unit_zero_grad(m->unit[u]));
    }
    return mini_leaf(m, script, leaf);
}

static void test_dropped_gradients(void **state)
{
    (void)state;
    make_plain(MINI_NESTED);
    work w = { MINI_NESTED, dropping, 0 };
    for (int n = 0; n < SOME; n++) in_some_corner(&w, n * 7);
}

/* ---- prefetch ---- */

/* The order changes from leaf to leaf: what was gathered ahead is not what comes. */
static fsdp_status other_orders(mini *m, const char *script, int64_t leaf)
{
    int64_t turn = leaf % leaves_for(fsdp_comm_size(m->comm)) / fsdp_comm_size(m->comm);
    static const char *const extra[] = { "F5 F1", "", "F1 F2 F3", "F5 B5 F5 B5", "[0 F5 ]0" };
    fsdp_pass *pass; /* an unfinished one, so that its order is the last one */
    FSDP_TRY(fsdp_pass_begin(&pass, m->comm, FSDP_PASS_EVAL));
    FSDP_TRY(mini_run(m, pass, turn % 2 ? "F1 F2" : "F2 F3 F1", 4000));
    FSDP_TRY(fsdp_pass_end(pass));
    FSDP_TRY(fsdp_pass_begin(&pass, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, pass, extra[turn % 5], 4001));
    FSDP_TRY(turn % 3 ? fsdp_pass_cancel(pass) : fsdp_pass_cancel(pass));
    return mini_leaf(m, script, leaf);
}

static void test_gathering_ahead_changes_nothing(void **state)
{
    (void)state;
    static const int ahead[] = { -1, 1, 2, 64 };
    make_plain(MINI_NESTED);
    for (int i = 0; i < 4; i++)
        for (int n = 0; n < 6; n++) {
            work w = { MINI_NESTED, n % 2 ? mini_leaf : other_orders, ahead[i] };
            in_some_corner(&w, 1 + 2 * (n * 7 + i)); /* odd: transport copy */
        }
}

/* ---- an optimizer of one's own ---- */

typedef struct update_args {
    float *p, *v;
    const float *g;
    int64_t numel;
} update_args;

static fsdp_status k_update(const fsdp_kernel *k, const void *args)
{
    const update_args *a = args;
    float *p = fsdp_kernel_ptr(k, a->p), *v = fsdp_kernel_ptr(k, a->v);
    const float *g = fsdp_kernel_ptr(k, a->g);
    for (int64_t i = 0; i < a->numel; i++) {
        v[i] = 0.9f * v[i] + (g[i] * (1.0f / 32) + 0.01f * p[i]);
        p[i] -= 0.05f * v[i];
    }
    return FSDP_OK;
}

/* As train(), with momentum in host memory of the test, by slices. */
static fsdp_status train_by_slices(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const work *w = c->arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm), leaves = leaves_for(size);
    mini m;
    float *v[MINI_UNITS];
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .sgd = true }));
    for (int u = 0; u < MINI_UNITS; u++) v[u] = calloc((size_t)fsdp_unit_slice_numel(m.unit[u]) + 1, sizeof(float));
    for (int s = 0; s < STEPS; s++) {
        for (int leaf = rank; leaf < leaves; leaf += size) FSDP_TRY(mini_leaf(&m, w->script, s * leaves + leaf));
        FSDP_TRY(fsdp_step_begin(mini_list(&m)));
        for (int u = 0; u < MINI_UNITS; u++) {
            const fsdp_slice *slice;
            int n;
            int64_t last = 0;
            fsdp_unit_slices(m.unit[u], &slice, &n);
            for (int i = 0; i < n; i++) {
                const fsdp_slice *x = &slice[i];
                rank_check(x->numel > 0 && x->offset >= 0 && x->offset + x->numel <= fsdp_unit_param_numel(m.unit[u], x->param));
                rank_check(x->state_offset >= last && x->state_offset + x->numel <= fsdp_unit_slice_numel(m.unit[u]));
                rank_check(strcmp(x->name, fsdp_unit_param_info(m.unit[u], x->param)->name) == 0);
                last = x->state_offset + x->numel;
                if (x->grad == NULL) continue;
                FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(m.unit[u]), k_update, &(update_args){ x->master, v[u] + x->state_offset, x->grad, x->numel }, sizeof(update_args)));
            }
        }
        FSDP_TRY(fsdp_step_end(mini_list(&m)));
    }
    FSDP_TRY(mini_read(&m, ((result *)c->shared)->param[rank]));
    mini_destroy(&m);
    for (int u = 0; u < MINI_UNITS; u++) free(v[u]);
    return FSDP_OK;
}

static void test_an_optimizer_of_one_s_own(void **state)
{
    (void)state;
    make_plain(MINI_NESTED);
    work w = { MINI_NESTED, mini_leaf, 0 };
    in_corners(train_by_slices, &(corners){ .ranks = (const int[]){ 5, 0 }, .all_modes = true, .shared = sizeof(result), .arg = &w, .after = compare });
}

/* ---- a kernel of the caller's fails ---- */

static fsdp_status k_fail(const fsdp_kernel *k, const void *args)
{
    (void)k;
    (void)args;
    FSDP_FAIL(FSDP_ERR_NONFINITE, "a NaN in the activations");
}

/* On all ranks, in the middle of a backward: the pass is cancelled, the leaf done again. */
static fsdp_status failing(mini *m, const char *script, int64_t leaf)
{
    static const char *const upto[] = { "[0 F1 {1", "[0 F1 F2 F5 ]0 {0 B5 {2", "[0 F1 F1 {1 }1", "F1 B1 F2 {2 }2" };
    int64_t turn = leaf % leaves_for(fsdp_comm_size(m->comm)) / fsdp_comm_size(m->comm);
    if (turn % 3 == 0) {
        fsdp_pass *pass;
        FSDP_TRY(fsdp_pass_begin(&pass, m->comm, FSDP_PASS_TRAIN));
        m->number[4000] = 0;
        FSDP_TRY(mini_run(m, pass, upto[turn / 3 % 4], 4000));
        fsdp_status st = fsdp_stream_launch(fsdp_unit_stream(m->unit[0]), k_fail, NULL, 0);
        /* What is called after it may fail or not, for the device is behind; so several ranks go no further. */
        if (turn % 2 == 0 && fsdp_comm_size(m->comm) == 1) st = mini_run(m, pass, "F3 B3", 4000);
        if (turn % 4 == 0) st = fsdp_stream_sync(fsdp_unit_stream(m->unit[0]));
        (void)st;
        FSDP_TRY(fsdp_pass_cancel(pass));
    }
    return mini_leaf(m, script, leaf);
}

static void test_a_failed_kernel_costs_its_pass(void **state)
{
    (void)state;
    make_plain(MINI_NESTED);
    work w = { MINI_NESTED, failing, 0 };
    in_corners(train, &(corners){ .ranks = (const int[]){ 1, 2, 0 }, .threads_only = true, .all_modes = true, .shared = sizeof(result), .arg = &w, .after = compare });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scripts),
        cmocka_unit_test(test_every_corner),
        cmocka_unit_test(test_interleaved_passes),
        cmocka_unit_test(test_a_cancelled_pass_leaves_no_trace),
        cmocka_unit_test(test_one_of_two_passes_is_cancelled),
        cmocka_unit_test(test_evaluations_between_and_within),
        cmocka_unit_test(test_dropped_gradients),
        cmocka_unit_test(test_gathering_ahead_changes_nothing),
        cmocka_unit_test(test_an_optimizer_of_one_s_own),
        cmocka_unit_test(test_a_failed_kernel_costs_its_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
