/* SPDX-License-Identifier: MIT
 *
 * Memory ends at any moment: the n-th allocation fails, for n = 1, 2, ... until all goes well. Each time the error is
 * FSDP_ERR_NOMEM, nothing is leaked, and either the work can be done again with the same bits, or the world can be
 * taken down. Where it happens on one rank of several, all are told. */
#include "support/mini.h"
#include "support/ranks.h"

#include "base/alloc.h"
#include "comm/comm.h"
#include "shard/unit.h"

/* ---- one rank of three ---- */

static const fsdp_param some_params[] = { { "w", 2, { 7, 9 } }, { "b", 1, { 7 } } };

static fsdp_status new_unit(fsdp_unit **u, fsdp_comm *comm, fsdp_device *dev, fsdp_mode mode)
{
    return fsdp_unit_create(u, comm, some_params, 2, &(fsdp_unit_opts){ .name = "u", .mode = mode, .compute_device = dev });
}

static void ones(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)arg;
    *value = (float)i + 1;
}

/* Rank 1 has no memory for a unit: no rank gets it, and each says why. Then there is memory, and it works. */
static fsdp_status create_on_all_or_none(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    fsdp_unit *u = NULL;
    bool failed = true;
    for (int n = 1; failed; n++) {
        rank_check(n < 1000);
        if (fsdp_comm_rank(comm) == 1) fsdpi_alloc_fail_at(n);
        fsdp_status st = new_unit(&u, comm, dev, c->mode);
        fsdpi_alloc_fail_at(0);
        failed = st != FSDP_OK;
        if (!failed) break;
        if (st != FSDP_ERR_NOMEM) return st;
        if (strncmp(fsdp_last_error_message(), "rank 1: ", 8) != 0) return st;
        rank_check(u == NULL);
    }
    FSDP_TRY(fsdp_unit_init(u, ones, NULL));
    float w[63];
    FSDP_TRY(fsdp_unit_read_param(u, 0, w));
    for (int i = 0; i < 63; i++) rank_check(w[i] == (float)i + 1);
    fsdp_unit_destroy(u);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_a_unit_is_made_on_all_ranks_or_on_none(void **state)
{
    (void)state;
    in_corners(create_on_all_or_none, &(corners){ .ranks = (const int[]){ 3, 0 }, .processes_only = true, .all_modes = true });
}

/* The same of an optimizer; and of one whose rate is wrong on one rank. */
static fsdp_status optimizer_on_all_or_none(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    fsdp_unit *u;
    fsdp_optim *o = NULL;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(new_unit(&u, comm, dev, c->mode));
    fsdp_unit_list list = { &u, 1 };
    int n = 1;
    for (bool failed = true; failed; n++) {
        rank_check(n < 1000);
        if (fsdp_comm_rank(comm) == 1) fsdpi_alloc_fail_at(n);
        fsdp_status st = fsdp_optim_create_adamw(&o, list, NULL);
        fsdpi_alloc_fail_at(0);
        failed = st != FSDP_OK;
        if (failed && (st != FSDP_ERR_NOMEM || strncmp(fsdp_last_error_message(), "rank 1: ", 8) != 0)) return st;
        rank_check((o == NULL) == failed);
    }
    rank_check(n > 5); /* there was something to fail */
    fsdp_optim_destroy(o);
    o = NULL;
    fsdp_status st = fsdp_optim_create_sgd(&o, list, &(fsdp_sgd_opts){ .lr = fsdp_comm_rank(comm) == 2 ? -1 : 1 });
    rank_check(st == FSDP_ERR_INVALID && o == NULL && strstr(fsdp_last_error_message(), "rank 2: fsdp_optim_create_sgd: lr") != NULL);
    fsdp_unit_destroy(u);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_an_optimizer_is_made_on_all_ranks_or_on_none(void **state)
{
    (void)state;
    in_corners(optimizer_on_all_or_none, &(corners){ .ranks = (const int[]){ 3, 0 }, .processes_only = true, .all_modes = true });
}

enum { NEVER = 1000 };

/* What was frozen when the optimizer was made is trained: its state is made in the step. Rank 1 has no memory for the n-th thing that it takes
 * there: no rank makes the step; then there is memory, and all do. *hit: whether there was such a thing. */
static fsdp_status train_what_was_frozen(fsdp_comm *comm, fsdp_mode mode, int n, float *param, bool *hit, bool *failed)
{
    mini m;
    float before[1024];
    fsdp_step_opts o = { .clip_p = n % 2 ? 3 : 2 }; /* one exchange, or two */
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = mode, .frozen = (1u << MINI_UNITS) - 1 }));
    for (int u = 0; u < MINI_UNITS; u++) FSDP_TRY(mini_freeze(&m, u, false));
    FSDP_TRY(mini_leaf(&m, "F5 F1 B5 B1", fsdp_comm_rank(comm)));
    FSDP_TRY(mini_read(&m, before));
    fsdpi_arena_trim(m.unit[0]->store->arena);
    if (fsdp_comm_rank(comm) == 1) fsdpi_alloc_fail_at(n);
    fsdp_status st = fsdp_optim_step(m.optim, &o);
    double made = (double)fsdpi_alloc_fail_at(0);
    *failed = st != FSDP_OK;
    if (*failed) {
        if (st != FSDP_ERR_NOMEM || strstr(fsdp_last_error_message(), "rank 1: no memory for the optimizer's state of unit \"") == NULL) return st;
        FSDP_TRY(mini_read(&m, param));
        rank_check(memcmp(before, param, (size_t)mini_numel() * sizeof(float)) == 0);
        rank_check(fsdp_optim_unit_steps(m.optim, m.unit[MINI_A]) == 0 && fsdp_optim_unit_steps(m.optim, m.unit[MINI_BIG]) == 0);
        FSDP_TRY(fsdp_optim_step(m.optim, &o));
    }
    rank_check(!fsdp_optim_has_state(m.optim, m.unit[MINI_B]) && fsdp_optim_unit_steps(m.optim, m.unit[MINI_A]) == 1);
    FSDP_TRY(mini_read(&m, param));
    FSDP_TRY(fsdp_comm_max(comm, &made, 1));
    *hit = made >= n;
    mini_destroy(&m);
    return FSDP_OK;
}

static fsdp_status step_on_all_or_none(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    float want[1024] = { 0 }, got[1024] = { 0 };
    int failures = 0;
    bool hit = true, failed;
    FSDP_TRY(train_what_was_frozen(comm, c->mode, NEVER, want, &hit, &failed));
    rank_check(!hit && !failed);
    hit = true;
    for (int n = 1; hit; n++) {
        FSDP_TRY(train_what_was_frozen(comm, c->mode, n, got, &hit, &failed));
        rank_check(n < NEVER && memcmp(want, got, sizeof(want)) == 0);
        failures += failed;
    }
    rank_check(failures >= 4); /* two units, two kinds */
    return FSDP_OK;
}

static void test_state_of_a_step_on_all_ranks_or_on_none(void **state)
{
    (void)state;
    in_corners(step_on_all_or_none, &(corners){ .ranks = (const int[]){ 3, 0 }, .device = "cpu", .processes_only = true });
}

/* ---- one rank alone: all that a program does ---- */

enum { STEPS = 2, LEAVES = 3, STRIDE = CAN_FORK ? 1 : 9 /* ThreadSanitizer is slow, and there is one thread */ };

typedef struct life {
    mini m;
    float param[1024];
    long failures; /* how many calls failed, and were made again */
    bool queue;    /* of the device: what was launched in part is not taken back, but for passes */
    const char *state; /* the optimizer's state device; NULL: where slices are */
} life;

/* What may fail and is made again: with one failure a run, twice is enough. */
#define AGAIN(expr, mend)                                                                                   \
    do {                                                                                                    \
        fsdp_status again_ = (expr);                                                                        \
        for (int tries_ = 0; again_ == FSDP_ERR_NOMEM && tries_ < 2 && !l->queue; tries_++) {               \
            l->failures++;                                                                                  \
            mend;                                                                                           \
            again_ = (expr);                                                                                \
        }                                                                                                   \
        FSDP_TRY(again_);                                                                                   \
    } while (0)

static fsdp_status cancel(mini *m)
{
    fsdp_pass *pass = m->pass;
    m->pass = NULL;
    return fsdp_pass_cancel(pass);
}

static fsdp_status fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)param;
    (void)arg;
    for (int64_t i = 0; i < numel; i++) out[i] = mini_value(name, first + i + 1);
    return FSDP_OK;
}

/* Gradients of the steps before are gone: those of a leaf, read and written on the host. */
static fsdp_status on_the_host(life *l)
{
    fsdp_unit *u = l->m.unit[MINI_BIG];
    bool queue = l->queue;
    l->queue = false;
    AGAIN(mini_leaf(&l->m, "F5 B5 F5 B5", 99), FSDP_TRY(cancel(&l->m)));
    l->queue = queue;
    AGAIN(fsdp_unit_fill_from(u, 0, fill, NULL), (void)0);
    AGAIN(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true, .host = true, .grads = true, .rank0_only = true }), (void)0);
    float *p = fsdp_unit_summoned(u, 0), *g;
    FSDP_TRY(fsdp_unit_summoned_grad(u, 0, &g));
    for (int i = 0; i < 9; i++) p[i] -= 0.1f * g[i];
    AGAIN(fsdp_unit_summon_end(u), (void)0);
    return fsdp_unit_zero_grad(u);
}

static fsdp_status write_and_read(life *l)
{
    FSDP_TRY(on_the_host(l));
    fsdp_unit *u = l->m.unit[MINI_BIG];
    fsdp_stream *s = fsdp_unit_stream(u);
    float x[5] = { 1, 2, 3, 4, 5 };
    AGAIN(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true }), (void)0);
    AGAIN(fsdp_stream_copy(s, fsdp_unit_summoned(u, 0), x, sizeof(x)), (void)0);
    AGAIN(fsdp_stream_sync(s), (void)0);
    AGAIN(fsdp_unit_summon_end(u), (void)0);
    AGAIN(mini_read(&l->m, l->param), (void)0);
    return FSDP_OK;
}

static fsdp_status live(life *l, fsdp_comm *comm, const corner *c)
{
    mini_opts o = { .mode = c->mode, .device = c->device, .state = l->state, .grad_dtype = c->mode == FSDP_MODE_GRAD_OP ? FSDP_BF16 : c->mode == FSDP_MODE_NONE ? FSDP_F16 : FSDP_F32 };
    AGAIN(mini_create(&l->m, comm, &o), mini_destroy(&l->m));
    for (int step = 0; step < STEPS; step++) {
        /* twice in a row: a second round of gradients */
        l->queue = false;
        for (int leaf = 0; leaf < LEAVES; leaf++) {
            l->m.no_sync = step == 1 && leaf != 1; /* some gradients go with a pass, some with the step */
            AGAIN(mini_leaf(&l->m, "[0 F1 F2 F3 F4 F5 ]0 {0 B5 B4 B3 B2 B1 }0 F1 B1", step * LEAVES + leaf), FSDP_TRY(cancel(&l->m)));
        }
        l->m.no_sync = false;
        l->queue = strcmp(c->device, "guard") == 0 || l->state != NULL;
        AGAIN(fsdp_optim_step(l->m.optim, &(fsdp_step_opts){ .clip = 1.0f }), (void)0);
    }
    FSDP_TRY(write_and_read(l));
    mini_destroy(&l->m);
    return FSDP_OK;
}

static fsdp_status live_once(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    life *l = c->arg;
    fsdp_status st = live(l, comm, c);
    if (st != FSDP_OK) {
        fsdp_status kept = st;
        (void)!cancel(&l->m);
        mini_destroy(&l->m);
        return kept;
    }
    return FSDP_OK;
}

/* Done again where it fails: in the end everything is as if nothing had happened. */
static void live_and_repeat(const char *transport, const char *device, const char *state, fsdp_mode mode, int stride)
{
    static life want, got;
    corner c = { .transport = transport, .device = device, .mode = mode, .ranks = 1, .threads = true };
    want = (life){ .state = state };
    c.arg = &want;
    fsdpi_alloc_fail_at(0);
    assert_ok(in_corner(live_once, &c));
    long made = fsdpi_alloc_fail_at(0), blocks = fsdpi_alloc_live(), hit = 0, given_up = 0;
    for (long n = 1; n <= made; n += stride) {
        got = (life){ .state = state };
        c.arg = &got;
        fsdpi_alloc_fail_at(n);
        fsdp_status st = in_corner(live_once, &c);
        fsdpi_alloc_fail_at(0);
        if (st == FSDP_ERR_NOMEM && got.failures == 0) { /* the launch itself, or what is not done again */
            given_up++;
            if (fsdpi_alloc_live() != blocks) fail_msg("%s, allocation %ld: %ld blocks are left", corner_name(&c), n, fsdpi_alloc_live() - blocks);
            continue;
        }
        if (st != FSDP_OK) fail_msg("%s, allocation %ld of %ld: %s", corner_name(&c), n, made, fsdp_last_error());
        hit += got.failures;
        if (memcmp(want.param, got.param, sizeof(want.param)) != 0) fail_msg("%s, allocation %ld of %ld: other bits", corner_name(&c), n, made);
        if (fsdpi_alloc_live() != blocks) fail_msg("%s, allocation %ld: %ld blocks are left", corner_name(&c), n, fsdpi_alloc_live() - blocks);
    }
    print_message("%s: %ld allocations; the call was made again %ld times, all was taken down %ld times\n", corner_name(&c), made, hit, given_up);
    assert_true(hit > 0);
}

/* On a device with a queue launches fail as well. */
static void test_what_failed_on_a_queue_can_be_done_again(void **state)
{
    (void)state;
    const char *stride = getenv("STRIDE"); /* 1 for all of them: 2 minutes */
    for (int m = FSDP_MODE_FULL; m <= FSDP_MODE_NONE; m++) {
        live_and_repeat("self", "guard", NULL, (fsdp_mode)m, stride != NULL ? atoi(stride) : 61);
        live_and_repeat("copy", "guard", NULL, (fsdp_mode)m, stride != NULL ? atoi(stride) : 67);
    }
    live_and_repeat("copy", "guard", "cpu", FSDP_MODE_FULL, stride != NULL ? atoi(stride) : 59);
    live_and_repeat("self", "cpu", "guard", FSDP_MODE_NONE, stride != NULL ? atoi(stride) : 7);
}

static void test_what_failed_can_be_done_again(void **state)
{
    (void)state;
    for (int m = FSDP_MODE_FULL; m <= FSDP_MODE_NONE; m++) {
        if (m == FSDP_MODE_FULL || m == FSDP_MODE_NONE) live_and_repeat("self", "cpu", NULL, (fsdp_mode)m, STRIDE);
        live_and_repeat("copy", "cpu", NULL, (fsdp_mode)m, STRIDE);
    }
}

/* ---- a leaf, on one rank of three ---- */

typedef struct trained {
    float param[3][1024];
    bool hit, failed; /* a failed hint (prefetch) fails no call */
} trained;

/* The leaf after the first step is the one; n: the allocation, 0 for none. agrees: the ranks tell each other how it went. */
typedef struct shortage {
    long n;
    bool agrees;
} shortage;

static const char *script_of(const shortage *w)
{
    return w->agrees ? "[0 F1 F2 ]0 {0 B2 B1 }0" : MINI_NESTED;
}

/* One call fails, where a window is posted. */
static fsdp_status leaf_up_to_a_post(mini *m, const shortage *w, int64_t leaf)
{
    FSDP_TRY(fsdp_pass_begin(&m->pass, m->comm, FSDP_PASS_TRAIN));
    m->number[leaf % MINI_LEAVES] = 0;
    FSDP_TRY(mini_run(m, m->pass, "[0 F1 F2 ]0 {0 B2 {1", leaf));
    if (fsdp_comm_rank(m->comm) == 1) fsdpi_alloc_fail_at(w->n);
    return fsdp_unit_end_backward(m->unit[MINI_A], m->pass);
}

static fsdp_status rest_of_leaf(mini *m, int64_t leaf)
{
    FSDP_TRY(mini_run(m, m->pass, "}0", leaf));
    FSDP_TRY(fsdp_pass_end(m->pass));
    m->pass = NULL;
    return FSDP_OK;
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const shortage *w = c->arg;
    long n = w->n;
    int rank = fsdp_comm_rank(comm);
    trained *out = c->shared;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(mini_step(&m, MINI_NESTED, 0, 3));
    if (rank == 1 && !w->agrees) fsdpi_alloc_fail_at(n);
    fsdp_status st = w->agrees ? leaf_up_to_a_post(&m, w, 3 + rank) : mini_leaf(&m, MINI_NESTED, 3 + rank);
    long made = fsdpi_alloc_fail_at(0);
    if (rank == 1) out->hit = made >= n;
    if (w->agrees) st = fsdp_comm_agree(comm, st); /* they meet, and what rank 1 has not posted others still wait for */
    if (st != FSDP_OK) {
        rank_check(w->agrees ? st == FSDP_ERR_NOMEM || st == FSDP_ERR_COMM : st == (rank == 1 ? FSDP_ERR_NOMEM : FSDP_ERR_COMM));
        if (rank == 1) out->failed = true;
        if (!w->agrees) (void)!cancel(&m);
        FSDP_TRY(fsdp_comm_reset(comm));
        FSDP_TRY(mini_leaf(&m, script_of(w), 3 + rank));
    } else if (w->agrees) {
        FSDP_TRY(rest_of_leaf(&m, 3 + rank));
    }
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    FSDP_TRY(mini_read(&m, out->param[rank]));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_one_rank_runs_out_of_memory(void **state)
{
    (void)state;
    if (!CAN_FORK) return; /* the count of allocations is the process's */
    for (int k = 0; k < 6; k++) {
        trained *want = shared_alloc(sizeof(*want)), *got = shared_alloc(sizeof(*got));
        shortage w = { .agrees = k >= 4 };
        corner c = { .transport = k % 2 ? "copy" : "shm", .device = k / 2 ? "guard" : "cpu", .mode = (fsdp_mode)(k % 4), .ranks = 3, .arg = &w, .shared = want };
        assert_ok(in_corner(train, &c));
        c.shared = got;
        int failed = 0;
        for (w.n = 1; w.n == 1 || got->hit; w.n += k < 4 && k / 2 ? 11 : 1) {
            memset(got, 0, sizeof(*got));
            if (in_corner(train, &c) != FSDP_OK) fail_msg("%s, allocation %ld: %s", corner_name(&c), w.n, fsdp_last_error());
            if (memcmp(want->param, got->param, sizeof(want->param)) != 0) fail_msg("%s, allocation %ld: other bits", corner_name(&c), w.n);
            failed += got->failed;
        }
        assert_true(failed > 2);
        shared_free(want, sizeof(*want));
        shared_free(got, sizeof(*got));
    }
}

/* ---- a step, on one rank of three: none begins it, all are told, gradients stay ---- */

static fsdp_status begin_on_all_or_none(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini_opts o = *(const mini_opts *)c->arg;
    mini m;
    int failed = 0;
    o.mode = c->mode;
    o.device = c->device;
    FSDP_TRY(mini_create(&m, comm, &o));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, fsdp_comm_rank(comm)));
    for (int n = 1;; n++) {
        rank_check(n < 100);
        if (fsdp_comm_rank(comm) == 1) fsdpi_alloc_fail_at(n);
        fsdp_status st = fsdp_step_begin(mini_list(&m));
        fsdpi_alloc_fail_at(0);
        if (st == FSDP_OK) break;
        if (st != FSDP_ERR_NOMEM || strncmp(fsdp_last_error_message(), "rank 1: ", 8) != 0) return st;
        rank_check(strstr(fsdp_unit_state(m.unit[MINI_A]), "in a step") == NULL && fsdp_unit_pending(m.unit[MINI_A], 0) == FSDP_PENDING_REDUCED);
        failed++;
    }
    rank_check(failed > 0);
    FSDP_TRY(fsdp_step_end(mini_list(&m)));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_a_step_begins_on_all_ranks_or_on_none(void **state)
{
    (void)state;
    if (!CAN_FORK) return; /* the count of allocations is the process's */
    /* On the guard launches take memory too, and what is launched in part is not taken back. */
    in_corners(begin_on_all_or_none, &(corners){ .device = "cpu", .ranks = (const int[]){ 3, 0 }, .processes_only = true, .all_modes = true, .arg = &(mini_opts){ .grad_dtype = FSDP_BF16 } });
    in_corners(begin_on_all_or_none, &(corners){ .device = "cpu", .transport = "copy", .ranks = (const int[]){ 4, 0 }, .processes_only = true, .arg = &(mini_opts){ .shards = 2 } });
}

/* ---- a rank that tells the others of its shortage, while these wait for what it owes ---- */

static fsdp_status tells(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    fsdp_pass *pass;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .reduce_dtype = FSDP_BF16 }));
    fsdp_unit *u = m.unit[MINI_BIG];
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, fsdp_comm_rank(comm))); /* makes windows: three, as units of one page share theirs */
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    m.number[0] = 0;
    FSDP_TRY(mini_run(&m, pass, "F5 B5 F5 B5 F5 B5 F5", 0)); /* the next use is of the first window: it waits for rank 1 to have taken its part */
    fsdpi_arena_trim(u->ctx->arena);
    if (fsdp_comm_rank(comm) == 1) fsdpi_alloc_fail_at(1);
    fsdp_status st = fsdp_unit_begin_backward(u, pass);
    fsdpi_alloc_fail_at(0);
    if (fsdp_comm_rank(comm) != 1) FSDP_TRY(st);
    else rank_check(st == FSDP_ERR_NOMEM);
    rank_check(fsdp_comm_agree(comm, st) == FSDP_ERR_NOMEM && strncmp(fsdp_last_error_message(), "rank 1: ", 8) == 0);
    FSDP_TRY(fsdp_comm_reset(comm));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, fsdp_comm_rank(comm)));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_what_is_owed_is_done_while_others_are_told(void **state)
{
    (void)state;
    if (!CAN_FORK) return;
    in_corners(tells, &(corners){ .device = "cpu", .ranks = (const int[]){ 2, 3, 0 }, .processes_only = true, .all_modes = true });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_unit_is_made_on_all_ranks_or_on_none),
        cmocka_unit_test(test_an_optimizer_is_made_on_all_ranks_or_on_none),
        cmocka_unit_test(test_state_of_a_step_on_all_ranks_or_on_none),
        cmocka_unit_test(test_what_failed_can_be_done_again),
        cmocka_unit_test(test_what_failed_on_a_queue_can_be_done_again),
        cmocka_unit_test(test_one_rank_runs_out_of_memory),
        cmocka_unit_test(test_a_step_begins_on_all_ranks_or_on_none),
        cmocka_unit_test(test_what_is_owed_is_done_while_others_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
