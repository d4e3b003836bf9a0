/* SPDX-License-Identifier: MIT
 *
 * What sharding is for: a unit is whole when it is used and at no other time, in each mode as far as the mode says; no
 * more units at a time than asked for; nothing is taken from the system after the first step; and ranks pass as many
 * messages and bytes as they must, to the last one. */
#include "support/mini.h"
#include "support/ranks.h"

#include "base/alloc.h"
#include "shard/unit.h"

static fsdpi_devctx *ctx_of(const mini *m)
{
    return m->unit[0]->ctx;
}

static size_t whole_bytes(const mini *m, int u)
{
    return (size_t)m->unit[u]->layout.total * sizeof(float);
}

/* In private buffers, of this rank. */
static size_t gathered(const mini *m)
{
    return fsdpi_arena_get_stats(ctx_of(m)->gathered).bytes_live;
}

#define expect_gathered(m, want)                                                                            \
    do {                                                                                                    \
        size_t got_ = gathered(m), want_ = (want);                                                          \
        if (got_ != want_) FSDP_FAIL(FSDP_ERR_INTERNAL, "%s:%d: %zu bytes are gathered, not %zu", __FILE__, __LINE__, got_, want_); \
    } while (0)

static fsdp_status comes_and_goes(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .prefetch = -1 }));
    size_t root = whole_bytes(&m, MINI_ROOT), a = whole_bytes(&m, MINI_A), big = whole_bytes(&m, MINI_BIG);
    bool shm = strcmp(c->transport, "shm") == 0, keeps = c->mode == FSDP_MODE_OPTIMIZER, grad_op = c->mode == FSDP_MODE_GRAD_OP;
    if (shm || c->mode == FSDP_MODE_NONE) root = a = big = 0; /* a view of what all share; or this rank's masters */
    for (int round = 0; round < 3; round++) {
        fsdp_pass *p;
        FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
        if (round == 0 || !keeps) expect_gathered(&m, 0);
        FSDP_TRY(mini_run(&m, p, "[0 [1", round));
        expect_gathered(&m, root + a + (keeps && round > 0 ? big : 0));
        FSDP_TRY(mini_run(&m, p, "]1", round));
        expect_gathered(&m, root + (grad_op || keeps ? a : 0) + (keeps && round > 0 ? big : 0));
        FSDP_TRY(mini_run(&m, p, "F5", round));
        expect_gathered(&m, root + (grad_op || keeps ? a + big : 0));
        FSDP_TRY(mini_run(&m, p, "]0", round));
        expect_gathered(&m, root + (grad_op || keeps ? a + big : 0)); /* the root's backward comes at once */
        FSDP_TRY(mini_run(&m, p, "{0 {5", round));
        expect_gathered(&m, root + big + (grad_op || keeps ? a : 0));
        FSDP_TRY(mini_run(&m, p, "}5 B1", round));
        expect_gathered(&m, root + (keeps ? a + big : 0));
        FSDP_TRY(mini_run(&m, p, "}0", round));
        expect_gathered(&m, keeps ? root + a + big : 0);
        FSDP_TRY(fsdp_pass_end(p));
        expect_gathered(&m, keeps ? root + a + big : 0);
        FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_EVAL)); /* no backward: nothing is kept, but by mode optimizer */
        FSDP_TRY(mini_run(&m, p, "F0", round));
        expect_gathered(&m, keeps ? root + a + big : 0);
        FSDP_TRY(fsdp_pass_end(p));
        FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN)); /* a cancelled pass gives all back */
        FSDP_TRY(mini_run(&m, p, "[0 [1 F5 {5", round) == FSDP_OK ? FSDP_OK : FSDP_ERR_INTERNAL);
        FSDP_TRY(fsdp_pass_cancel(p));
        expect_gathered(&m, keeps ? root + a + big : 0);
        FSDP_TRY(fsdp_optim_step(m.optim, NULL));
        expect_gathered(&m, keeps ? root + a + big : 0);
    }
    mini_destroy(&m);
    fsdpi_runtime *rt;
    FSDP_TRY(fsdpi_runtime_of(&rt, comm));
    for (const fsdpi_devctx *d = rt->devices; d != NULL; d = d->next) {
        rank_check(fsdpi_arena_get_stats(d->gathered).bytes_live == 0); /* all of it, with the units */
        rank_check(fsdpi_arena_get_stats(d->arena).bytes_live == 0);
    }
    return FSDP_OK;
}

static void test_whole_only_when_used(void **state)
{
    (void)state;
    in_corners(comes_and_goes, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

/* ---- how many at a time ---- */

static int whole_now(const mini *m)
{
    int n = 0;
    for (int u = 0; u < MINI_UNITS; u++) n += m->unit[u]->residency != FSDPI_SHARDED;
    return n;
}

static fsdp_status ahead(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    for (int prefetch = -1; prefetch <= 3; prefetch++) {
        mini m;
        int most[3] = { 0 }, wished = prefetch < 0 ? 0 : prefetch == 0 ? 1 : prefetch;
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .prefetch = prefetch }));
        for (int round = 0; round < 3; round++) {
            static const char *const tokens[] = { "[0", "[1", "]1", "[2", "]2", "[3", "]3", "[4", "]4", "[5", "]5", "]0", "{0", "{5", "}5", "{4", "}4", "{3", "}3", "{2", "}2", "{1", "}1", "}0" };
            fsdp_pass *p;
            FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
            for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
                FSDP_TRY(mini_run(&m, p, tokens[i], round));
                int n = whole_now(&m);
                most[round] = n > most[round] ? n : most[round];
            }
            FSDP_TRY(fsdp_pass_end(p));
            rank_check(whole_now(&m) == 0);
        }
        bool copies = strcmp(c->transport, "copy") == 0;
        rank_check(most[0] == 2); /* the order is not known yet: the root, and the one in use */
        rank_check(most[1] == 2 + (copies ? wished : 0) && most[2] == most[1]);
        mini_destroy(&m);
    }
    return FSDP_OK;
}

static void test_as_many_ahead_as_asked_for(void **state)
{
    (void)state;
    in_corners(ahead, &(corners){ .ranks = (const int[]){ 2, 0 } });
}

/* ---- nothing more after the first step ---- */

typedef struct figures {
    uint64_t system_allocs;
    size_t held, live, heap_top;
    long blocks;
} figures;

static figures figures_of(const mini *m)
{
    fsdpi_arena_stats a = fsdpi_arena_get_stats(ctx_of(m)->arena), g = fsdpi_arena_get_stats(ctx_of(m)->gathered);
    return (figures){ a.system_allocs + g.system_allocs, a.bytes_held + g.bytes_held, a.bytes_live + g.bytes_live, m->comm->world->control->top, fsdpi_alloc_live() };
}

static fsdp_status steady(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    figures first = { 0 };
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    for (int step = 0; step < 6; step++) {
        FSDP_TRY(mini_step(&m, MINI_NESTED " F1 B1", step, 6));
        FSDP_TRY(fsdp_comm_barrier(comm));
        figures now = figures_of(&m);
        if (step == 0) first = now;
        if (now.system_allocs != first.system_allocs || now.held != first.held || now.live != first.live || now.heap_top != first.heap_top)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "after step %d: %llu allocations, %zu bytes held, %zu live, heap %zu; after the first: %llu, %zu, %zu, %zu", step,
                      (unsigned long long)now.system_allocs, now.held, now.live, now.heap_top, (unsigned long long)first.system_allocs, first.held, first.live, first.heap_top);
        rank_check(c->threads || strcmp(c->device, "guard") == 0 || now.blocks == first.blocks); /* the process's, else */
    }
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_nothing_is_taken_after_the_first_step(void **state)
{
    (void)state;
    in_corners(steady, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

/* ---- messages and bytes ---- */

static fsdp_comm_stats minus(fsdp_comm_stats a, fsdp_comm_stats b)
{
    return (fsdp_comm_stats){ .gathers = a.gathers - b.gathers, .reduces = a.reduces - b.reduces, .publishes = a.publishes - b.publishes,
                              .exchanges = a.exchanges - b.exchanges, .gather_bytes = a.gather_bytes - b.gather_bytes, .reduce_bytes = a.reduce_bytes - b.reduce_bytes };
}

#define expect_count(field, want)                                                                           \
    do {                                                                                                    \
        uint64_t want_ = (uint64_t)(want);                                                                  \
        if (d.field != want_)                                                                               \
            FSDP_FAIL(FSDP_ERR_INTERNAL, "%s:%d: " #field " is %llu, not %llu", __FILE__, __LINE__, (unsigned long long)d.field, (unsigned long long)want_); \
    } while (0)

static fsdp_status counts(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const bool many = c->ranks > 1, copies = strcmp(c->transport, "copy") == 0;
    const int rank = fsdp_comm_rank(comm), units = MINI_UNITS;
    mini m;
    fsdp_comm_stats before, now, d;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    uint64_t all = 0, mine = 0, root = whole_bytes(&m, 0); /* bytes of all units; of this rank's slices */
    for (int u = 0; u < units; u++) {
        all += whole_bytes(&m, u);
        mine += (uint64_t)fsdpi_unit_slice(m.unit[u]) * sizeof(float);
    }
    FSDP_TRY(fsdpi_runtime_sync(m.unit[0]->rt));
    for (int round = 0; round < 3; round++) {
        fsdp_comm_get_stats(comm, &before);
        FSDP_TRY(mini_leaf(&m, MINI_NESTED, round * c->ranks + rank));
        FSDP_TRY(fsdpi_runtime_sync(m.unit[0]->rt));
        fsdp_comm_get_stats(comm, &now);
        d = minus(now, before);
        /* the root is gathered once, the others for forward and backward */
        uint64_t gathers = c->mode == FSDP_MODE_FULL ? 2 * units - 1 : c->mode == FSDP_MODE_GRAD_OP ? units : c->mode == FSDP_MODE_OPTIMIZER ? (round == 2 ? 0 : units) : 0;
        uint64_t bytes = c->mode == FSDP_MODE_FULL ? 2 * all - root : gathers > 0 ? all : 0;
        expect_count(gathers, many ? gathers : 0);
        expect_count(gather_bytes, copies ? bytes : 0);
        expect_count(reduces, many ? units : 0);
        expect_count(reduce_bytes, copies ? all + mine * (uint64_t)c->ranks : mine * (uint64_t)(c->ranks - 1));
        expect_count(publishes, 0);
        /* windows are made in the first round; after it the only meeting is the end of the pass */
        if (round > 0) expect_count(exchanges, many ? 1 : 0);
        if (round == 1) continue; /* two passes in a step */
        fsdp_comm_get_stats(comm, &before);
        FSDP_TRY(fsdp_optim_step(m.optim, &(fsdp_step_opts){ .clip = 1 }));
        FSDP_TRY(fsdpi_runtime_sync(m.unit[0]->rt));
        fsdp_comm_get_stats(comm, &now);
        d = minus(now, before);
        bool none = c->mode == FSDP_MODE_NONE;
        expect_count(gathers, 0);
        expect_count(reduces, 0);
        expect_count(publishes, many && !none ? units : 0);
        expect_count(exchanges, many ? 2 : 0); /* the norm, and the end of the step */
        expect_count(gather_bytes, copies && (many || !none) ? mine + (none ? all : 0) : 0); /* slices out; among replicas gradients in */
        expect_count(reduce_bytes, 0);
    }
    fsdp_comm_get_stats(comm, &before);
    float x[512];
    FSDP_TRY(fsdp_unit_read_param(m.unit[MINI_BIG], 0, x));
    fsdp_comm_get_stats(comm, &now);
    d = minus(now, before);
    expect_count(gathers, many && c->mode != FSDP_MODE_NONE ? 1 : 0);
    expect_count(exchanges, 0);
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_messages_are_counted(void **state)
{
    (void)state;
    in_corners(counts, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 2, 5, 0 } });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_only_when_used),
        cmocka_unit_test(test_as_many_ahead_as_asked_for),
        cmocka_unit_test(test_nothing_is_taken_after_the_first_step),
        cmocka_unit_test(test_messages_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
