/* SPDX-License-Identifier: MIT
 *
 * What sharding is for: a unit is whole when it is used and at no other time, in each mode as far as the mode says; no
 * more units at a time than asked for; nothing is taken from the system after the first step; and ranks pass as many
 * messages and bytes as they must, to the last one. */
#include "support/mini.h"
#include "support/ranks.h"

#include "base/alloc.h"
#include "shard/footprint.h"

#include <unistd.h>

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

/* ---- every byte, in every phase ---- */

/* Of shared memory, all ranks together. */
static size_t shared_now(fsdp_comm *comm)
{
    const fsdpi_control *c = comm->world->control;
    size_t used = c->top;
    for (int i = 0; i < c->free_count; i++) used -= c->free[i].bytes;
    return used;
}

typedef struct taken {
    size_t arena, gathered, shared;
} taken;

static taken taken_now(const mini *m)
{
    taken t = { .shared = shared_now(m->comm) };
    for (const fsdpi_devctx *d = m->unit[0]->rt->devices; d != NULL; d = d->next) {
        t.arena += fsdpi_arena_get_stats(d->arena).bytes_live;
        t.gathered += fsdpi_arena_get_stats(d->gathered).bytes_live;
    }
    return t;
}

/* What docs/memory.md says. sums: accumulators of each unit; the others: bits of units. */
typedef struct phase {
    int states, sums;
    unsigned whole, backward, stepping, written;
    unsigned stateless; /* without optimizer state */
    unsigned sumless;   /* without sums */
    bool windows;
} phase;

static taken predicted(const mini *m, size_t at_rest, phase p)
{
    taken b = { .shared = at_rest };
    for (int u = 0; u < MINI_UNITS; u++) {
        fsdpi_footprint f = fsdpi_unit_footprint(m->unit[u]);
        b.arena += f.master + f.published + (p.sumless >> u & 1 ? 0 : (size_t)p.sums * f.sum);
        b.arena += p.stateless >> u & 1 ? 0 : (size_t)p.states * (size_t)fsdp_unit_slice_numel(m->unit[u]) * sizeof(float);
        b.arena += (p.stepping >> u & 1 ? f.step : 0) + (p.written >> u & 1 ? f.summoned : 0) + (p.backward >> u & 1 ? f.block : 0);
        b.gathered += p.whole >> u & 1 ? f.gathered : 0;
        b.shared += f.shared;
    }
    if (p.windows) b.shared += fsdpi_windows_footprint_of(m->unit[0]->rt, 2).shared;
    return b;
}

static fsdp_status expect_bytes(const mini *m, taken want, const char *when)
{
    FSDP_TRY(fsdp_comm_barrier(m->comm)); /* shared memory is all ranks' */
    taken got = taken_now(m);
    FSDP_TRY(fsdp_comm_barrier(m->comm));
    FSDP_FAIL_IF(memcmp(&got, &want, sizeof(got)) != 0, FSDP_ERR_INTERNAL, "%s: %zu bytes of its own, %zu gathered, %zu shared; predicted %zu, %zu, %zu", when, got.arena, got.gathered,
                 got.shared, want.arena, want.gathered, want.shared);
    return FSDP_OK;
}

static fsdp_status every_byte(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const unsigned all = (1u << MINI_UNITS) - 1, one = 1u << MINI_BIG, root = 1u << MINI_ROOT;
    const bool keeps = c->mode == FSDP_MODE_OPTIMIZER || c->mode == FSDP_MODE_NONE;
    const size_t at_rest = shared_now(comm);
    FSDP_TRY(fsdp_comm_barrier(comm));
    mini m;
    fsdp_pass *p;
    mini_opts o = c->arg != NULL ? *(const mini_opts *)c->arg : (mini_opts){ 0 };
    o.mode = c->mode;
    o.device = c->device;
    o.prefetch = -1;
    const char *other = strcmp(c->device, "cpu") == 0 ? "guard" : "cpu";
    if (o.storage != NULL) o.storage = other;
    if (o.grads != NULL) o.grads = strcmp(o.grads, "other") == 0 ? other : c->device;
    if (o.shards > 0 && c->ranks % o.shards != 0) return FSDP_OK;
    if (o.shards > 0 && c->mode == FSDP_MODE_NONE) o.shards = 1;
    FSDP_TRY(mini_create(&m, comm, &o)); /* AdamW: two states */
    phase now = { .states = 2 };
    FSDP_TRY(expect_bytes(&m, predicted(&m, at_rest, now), "after create"));
    for (int step = 0; step < 3; step++) {
        for (int pass = 0; pass < 2; pass++) {
            int64_t leaf = 2 * step + pass;
            FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
            FSDP_TRY(mini_run(&m, p, "[0 F1 F2 F3 F4 [5", leaf));
            now.whole = c->mode == FSDP_MODE_FULL ? root | one : all;
            FSDP_TRY(expect_bytes(&m, predicted(&m, at_rest, now), "in the forward"));
            FSDP_TRY(mini_run(&m, p, "]5 ]0 {0 B5 B4 B3 B2 B1", leaf));
            FSDP_TRY(mini_run(&m, p, "}0", leaf));
            FSDP_TRY(fsdp_pass_end(p));
            if (now.sums < 2) now.sums++; /* a step has two passes */
            now.windows = true;
            now.whole = keeps ? all : 0; /* from the first pass on */
            FSDP_TRY(expect_bytes(&m, predicted(&m, at_rest, now), pass == 0 ? "after a pass" : "after two passes"));
        }
        FSDP_TRY(fsdp_step_begin(mini_list(&m)));
        now.stepping = all;
        FSDP_TRY(expect_bytes(&m, predicted(&m, at_rest, now), "in a step"));
        FSDP_TRY(fsdp_step_end(mini_list(&m)));
        now.stepping = 0;
        FSDP_TRY(expect_bytes(&m, predicted(&m, at_rest, now), "after a step"));
        FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(mini_run(&m, p, "[5 ]5 {5", 50));
        now.whole |= one;
        now.backward = one;
        FSDP_TRY(expect_bytes(&m, predicted(&m, at_rest, now), "in a backward"));
        FSDP_TRY(fsdp_pass_cancel(p));
        now.whole = keeps ? all : 0;
        now.backward = 0;
        FSDP_TRY(expect_bytes(&m, predicted(&m, at_rest, now), "after a cancelled pass"));
        FSDP_TRY(fsdp_unit_summon_begin(m.unit[MINI_BIG], &(fsdp_unit_summon_opts){ .writeback = true }));
        if (o.param_dtype == FSDP_F32) now.whole |= one; /* else it is the masters that one sees: of them there is one copy */
        now.written = one;
        FSDP_TRY(o.param_dtype == FSDP_F32 ? expect_bytes(&m, predicted(&m, at_rest, now), "while summoned") : FSDP_OK);
        FSDP_TRY(fsdp_unit_summon_end(m.unit[MINI_BIG]));
        now.whole = keeps && o.param_dtype == FSDP_F32 ? all : keeps ? all & ~one : 0;
        now.written = 0;
        if (o.param_dtype == FSDP_F32) FSDP_TRY(expect_bytes(&m, predicted(&m, at_rest, now), "after a summon"));
    }
    size_t windows = fsdpi_windows_footprint_of(m.unit[0]->rt, 2).shared; /* they are the communicator's */
    mini_destroy(&m);
    FSDP_TRY(fsdp_comm_barrier(comm));
    if (shared_now(comm) != at_rest + windows) FSDP_FAIL(FSDP_ERR_INTERNAL, "%zu bytes are shared after destroy, not %zu", shared_now(comm), at_rest + windows);
    return fsdp_comm_barrier(comm);
}

static void test_every_byte_is_predicted(void **state)
{
    (void)state;
    in_corners(every_byte, &(corners){ .all_modes = true, .processes_only = SANITIZED && CAN_FORK, .ranks = SANITIZED ? (const int[]){ 1, 3, 0 } : (const int[]){ 1, 2, 5, 0 } });
}

static void test_every_byte_of_meshes_and_types(void **state)
{
    (void)state;
    static mini_opts some[] = { { .shards = 2 }, { .reduce_dtype = FSDP_BF16 }, { .param_dtype = FSDP_BF16 }, { .grad_dtype = FSDP_F16 },
                                { .shards = 2, .param_dtype = FSDP_BF16, .reduce_dtype = FSDP_F16, .grad_dtype = FSDP_BF16 } };
    for (int i = SANITIZED ? 4 : 0; i < 5; i++) in_corners(every_byte, &(corners){ .all_modes = true, .processes_only = CAN_FORK, .ranks = (const int[]){ 4, 0 }, .arg = &some[i] });
}

/* All devices together. */
static void test_every_byte_of_two_devices(void **state)
{
    (void)state;
    static mini_opts some[] = { { .storage = "other" }, { .grads = "other" }, { .storage = "other", .grads = "same", .shards = 2 } };
    for (int i = SANITIZED ? 2 : 0; i < 3; i++) in_corners(every_byte, &(corners){ .all_modes = true, .processes_only = CAN_FORK, .ranks = (const int[]){ 2, 0 }, .arg = &some[i] });
}

/* ---- state of what is frozen ---- */

static fsdp_status expect_own(const mini *m, phase p, const char *when)
{
    size_t want = predicted(m, 0, p).arena, got = taken_now(m).arena;
    FSDP_FAIL_IF(got != want, FSDP_ERR_INTERNAL, "%s: %zu bytes, predicted %zu", when, got, want);
    for (int u = 0; u < MINI_UNITS; u++) rank_check(fsdp_optim_has_state(m->optim, m->unit[u]) == !(p.stateless >> u & 1));
    return FSDP_OK;
}

/* A trunk that is frozen when the optimizer is made takes no state, whatever the head does, until one of its units is trained: that one
 * gets its own then, keeps it, and takes nothing more after that step. */
static fsdp_status frozen_trunk(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const unsigned trunk = 1u << MINI_A | 1u << MINI_B | 1u << MINI_BIG;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .frozen = trunk }));
    phase now = { .states = 2, .stateless = trunk, .sumless = trunk };
    FSDP_TRY(expect_own(&m, now, "with a frozen trunk"));
    now.sums = 1;
    for (int step = 0; step < 5; step++) {
        if (step == 2) {
            FSDP_TRY(fsdp_unit_set_frozen(m.unit[MINI_BIG], 2, false));
            FSDP_TRY(expect_own(&m, now, "unfrozen, and not yet trained"));
            now.stateless = now.sumless = trunk & ~(1u << MINI_BIG);
        }
        if (step == 4) FSDP_TRY(mini_freeze(&m, MINI_BIG, true)); /* what it has it keeps */
        FSDP_TRY(mini_step(&m, MINI_NESTED, step, fsdp_comm_size(comm)));
        FSDP_TRY(expect_own(&m, now, "after a step"));
    }
    float *state; /* who asks for an address wants to use it */
    FSDP_TRY(fsdp_optim_state(m.optim, m.unit[MINI_A], 1, &state));
    now.stateless = 1u << MINI_B;
    FSDP_TRY(expect_own(&m, now, "asked for"));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_what_never_trains_takes_no_state(void **state)
{
    (void)state;
    in_corners(frozen_trunk, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

/* A communicator that goes takes everything along. */
static fsdp_status apart(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const size_t at_rest = shared_now(comm);
    FSDP_TRY(fsdp_comm_barrier(comm));
    for (int turn = 0; turn < 3; turn++) {
        fsdp_comm *part;
        mini m;
        FSDP_TRY(fsdp_comm_split(comm, fsdp_comm_rank(comm) % 2, 0, &part));
        FSDP_TRY(mini_create(&m, part, &(mini_opts){ .mode = c->mode, .device = c->device }));
        FSDP_TRY(mini_step(&m, MINI_NESTED, turn, 6));
        mini_destroy(&m);
        fsdp_comm_destroy(part);
        FSDP_TRY(fsdp_comm_barrier(comm));
        if (shared_now(comm) != at_rest) FSDP_FAIL(FSDP_ERR_INTERNAL, "%zu bytes are shared in the end, %zu at first", shared_now(comm), at_rest);
        FSDP_TRY(fsdp_comm_barrier(comm));
    }
    return FSDP_OK;
}

static void test_a_communicator_takes_all_along(void **state)
{
    (void)state;
    in_corners(apart, &(corners){ .all_modes = !SANITIZED, .ranks = SANITIZED ? (const int[]){ 3, 0 } : (const int[]){ 1, 3, 0 } });
}

/* ---- what the system says ---- */

/* Proportional set size of this process, in bytes. */
static size_t pss_now(void)
{
    size_t kib = 0;
    char line[256];
    FILE *f = fopen("/proc/self/smaps_rollup", "r");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL)
        if (sscanf(line, "Pss: %zu kB", &kib) == 1) break;
    if (f != NULL) fclose(f);
    return kib << 10;
}

enum { FAT_UNITS = 4, FAT_NUMEL = 600 * 1000 };

static fsdp_status k_fill(const fsdp_kernel *k, const void *args)
{
    float *g = fsdp_kernel_ptr(k, *(float *const *)args);
    for (int i = 0; i < FAT_NUMEL; i++) g[i] = 0.5f;
    return FSDP_OK;
}

static void ones(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)i;
    (void)arg;
    *value = 1;
}

static fsdp_status fat_pass(fsdp_comm *comm, fsdp_unit **unit)
{
    fsdp_pass *p;
    FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
    for (int u = 0; u < FAT_UNITS; u++) {
        FSDP_TRY(fsdp_unit_begin_forward(unit[u], p));
        FSDP_TRY(fsdp_unit_end_forward(unit[u], p));
    }
    for (int u = FAT_UNITS - 1; u >= 0; u--) {
        float beta, *g;
        FSDP_TRY(fsdp_unit_begin_backward(unit[u], p));
        g = fsdp_unit_grad(unit[u], 0, &beta);
        FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(unit[u]), k_fill, &g, sizeof(g)));
        FSDP_TRY(fsdp_unit_end_backward(unit[u], p));
    }
    return fsdp_pass_end(p);
}

/* The sum of PSS grows by no more than is predicted. */
static fsdp_status fat(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const fsdp_param w = { "w", 1, { FAT_NUMEL } };
    fsdp_device *device;
    fsdp_unit *unit[FAT_UNITS];
    fsdp_optim *optim;
    FSDP_TRY(fsdp_device_open(&device, c->device));
    FSDP_TRY(fsdp_comm_barrier(comm));
    double pss = -(double)pss_now(), own = 0, shared = 0;
    FSDP_TRY(fsdp_comm_barrier(comm));
    for (int u = 0; u < FAT_UNITS; u++) {
        FSDP_TRY(fsdp_unit_create(&unit[u], comm, &w, 1, &(fsdp_unit_opts){ .name = "fat", .mode = c->mode, .compute_device = device }));
        FSDP_TRY(fsdp_unit_init(unit[u], ones, NULL));
    }
    FSDP_TRY(fsdp_optim_create_adamw(&optim, (fsdp_unit_list){ unit, FAT_UNITS }, &(fsdp_adamw_opts){ .lr = 0.1f }));
    for (int step = 0; step < 3; step++) {
        for (int pass = 0; pass < 2; pass++) FSDP_TRY(fat_pass(comm, unit));
        FSDP_TRY(fsdp_optim_step(optim, NULL));
    }
    FSDP_TRY(fsdpi_runtime_sync(unit[0]->rt));
    FSDP_TRY(fsdp_comm_barrier(comm));
    pss += (double)pss_now();
    FSDP_TRY(fsdp_comm_barrier(comm));
    /* Of what is not in use an arena keeps the most there was: two units whole at once and one ahead, a fill's values. */
    for (int u = 0; u < FAT_UNITS; u++) {
        fsdpi_footprint f = fsdpi_unit_footprint(unit[u]);
        own += (double)(f.master + f.published + 2 * f.sum + f.step) + 2.0 * (double)fsdp_unit_slice_numel(unit[u]) * sizeof(float);
        own += (double)(u < 3 || c->mode == FSDP_MODE_OPTIMIZER || c->mode == FSDP_MODE_GRAD_OP ? f.gathered : 0);
        own += u == 0 ? (double)fsdp_unit_slice_numel(unit[u]) * sizeof(float) : 0;
        shared += (double)f.shared;
    }
    fsdpi_windows_footprint windows = fsdpi_windows_footprint_of(unit[0]->rt, 1);
    own += (double)windows.own;
    shared += (double)windows.shared;
    double all[2] = { pss, own };
    FSDP_TRY(fsdp_comm_sum_exact(comm, all, 2));
    const double slack = 2e6 * c->ranks; /* code that is used for the first time, stacks, the heap of the C library */
    FSDP_FAIL_IF(all[0] > all[1] + shared + slack, FSDP_ERR_INTERNAL, "the ranks' PSS has grown by %.1f MB; predicted are %.1f MB and %.1f MB shared", all[0] / 1e6, all[1] / 1e6,
                 shared / 1e6);
    /* A bound that is far off says nothing. */
    FSDP_FAIL_IF(all[0] < 0.6 * (all[1] + shared), FSDP_ERR_INTERNAL, "the ranks' PSS has grown by %.1f MB only; predicted are %.1f MB and %.1f MB shared", all[0] / 1e6, all[1] / 1e6,
                 shared / 1e6);
    fsdp_optim_destroy(optim);
    for (int u = 0; u < FAT_UNITS; u++) fsdp_unit_destroy(unit[u]);
    fsdp_device_close(device);
    return FSDP_OK;
}

static void test_pss_stays_within_what_is_predicted(void **state)
{
    (void)state;
    if (SANITIZED || access("/proc/self/smaps_rollup", R_OK) != 0) skip();
    in_corners(fat, &(corners){ .all_modes = true, .processes_only = true, .device = "cpu", .ranks = (const int[]){ 1, 3, 0 } });
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
        expect_count(exchanges, many ? none && copies ? 3 : 2 : 0); /* memory for replicas' gradients, the norm, and the end of the step */
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
        cmocka_unit_test(test_every_byte_is_predicted),
        cmocka_unit_test(test_every_byte_of_meshes_and_types),
        cmocka_unit_test(test_what_never_trains_takes_no_state),
        cmocka_unit_test(test_every_byte_of_two_devices),
        cmocka_unit_test(test_a_communicator_takes_all_along),
        cmocka_unit_test(test_pss_stays_within_what_is_predicted),
        cmocka_unit_test(test_messages_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
