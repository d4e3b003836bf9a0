/* SPDX-License-Identifier: MIT
 *
 * Long random sequences of calls, right ones and wrong ones, with failures put in, on units of random shapes and modes:
 * what comes out has the bits of a plain program of one process (support/random/model.h), which also says what each call must
 * return. Each rank makes up the same calls from a seed (support/random/choose.h), and has the model beside it.
 *
 *     random_calls_test                          what `make check` runs
 *     random_calls_test --seed 17 --calls 400    one run again; --trace prints its calls
 *     random_calls_test --soak 1000000           runs of 1000 calls until so many are made; --seed: the first one
 *
 * In it: units made, destroyed, made differently, of all modes, meshes and types; passes of both kinds, up to three at a time,
 * forwards, backwards, recomputes in any order, with sync and without, gradients written in part, once more or not finite, or of
 * frozen parameters not at all; passes that some ranks join; cancelled passes; gradients read, pending and in a step; summons of
 * every kind, nested, read and written, with other values on each rank; fills, of each rank's own and from one rank, also failing on one;
 * replicas driven apart, compared and mended; steps of SGD, AdamW and one's own, on any units, cancelled; averages and teachers; dropped
 * gradients; resharding to neighbours; slices, sums of gradients, optimizer state on another device; what is gathered ahead, unsharded and resharded by hand, and capped;
 * save (also in the background) and load; kernels that fail; allocations that fail, on one rank or all; a rank that leaves the
 * others; collective resets; calls that are not allowed; ranks that are late. Each kind must have come about.
 *
 * Not in it: units of several communicators, hooks, loss scales; ranks killed (tests/shard/fault_test.c). */
#define _XOPEN_SOURCE 700 /* nftw */
#include "support/random/choose.h"
#include "support/random/make.h"

#include "base/error.h"
#include "shard/unit.h"

#include <ftw.h>
#include <time.h>
#include <unistd.h>

/* ---- a run ---- */

/* That it does what it is for: rank 0 counts. */
typedef struct tally {
    long passes, rounds, norms, loads, refused, shortages;
    long made[CALL_KINDS]; /* of each kind, calls that came about */
} tally;

static void count(run *r, const call *c, fsdp_status want)
{
    tally *t = r->c->shared;
    if (t == NULL || r->rank != 0) return;
    t->refused += want == FSDP_ERR_STATE;
    if (want != FSDP_OK) return;
    t->norms += ONE_OF(c->kind, CALL_OPTIM_STEP, CALL_STEP_NORM) && model_norm_of(r->m, c->kind == CALL_STEP_NORM ? c->mask : model_optim_mask(r->m, model_optim_of(c))).norm > 0;
    t->loads += c->kind == CALL_LOAD;
    for (int u = 0; c->kind == CALL_PASS_END && u < MODEL_UNITS; u++) {
        t->passes += r->m->unit[u].owner == c->pass;
        t->rounds += r->m->unit[u].owner == c->pass && r->m->pass[c->pass].use[u].rounds > 1;
    }
}

static fsdp_status one_call(run *r)
{
    const call *c = &r->now;
    fsdp_status want = model_expects(r->m, c), got;
    bool applies = true;
    if (c->kind == CALL_PEEK) want = FSDP_OK;
    count(r, c, want);
    be_late(r);
    bool injects = c->nomem > 0 && can_fail(r, c->kind), joins = r->m->leaders != 0;
    /* Whoever is still in an earlier call would be told there. */
    if (injects || (!joins && ONE_OF(c->kind, CALL_RESET, CALL_STRAY))) FSDP_TRY(fsdp_comm_barrier(r->comm));
    if (model_has_joined(r->m, r->rank)) got = make_joined(r, c, want);
    else if (injects) got = make_without_memory(r, c, &applies);
    else got = make(r, c);
    FSDP_FAIL_IF(got != want, FSDP_ERR_INTERNAL, "it returns %s, not %s: %s", fsdp_status_name(got), fsdp_status_name(want), got != FSDP_OK ? fsdp_last_error_message() : "");
    if (!applies && r->rank == 0 && r->c->shared != NULL) ((tally *)r->c->shared)->shortages++;
    if (applies && got == FSDP_OK && r->rank == 0 && r->c->shared != NULL) ((tally *)r->c->shared)->made[c->kind]++;
    if (applies && (got == FSDP_OK || got == FSDP_ERR_NONFINITE)) model_apply(r->m, c);
    else if (applies && got != FSDP_ERR_STATE && got != FSDP_ERR_NOMEM) model_apply_failed(r->m, c);
    FSDP_TRY(check_cap(r));
    if (!ONE_OF(c->kind, CALL_LOAD, CALL_FILL_FAILS) || model_open_passes(r->m) > 0 || model_in_step(r->m) != 0) return FSDP_OK;
    FSDP_TRY(read_all(r));
    model_apply(r->m, &(call){ .kind = CALL_READ_ALL });
    return FSDP_OK;
}

static fsdp_status begin(run *r)
{
    rng g = { r->w->seed * 7 + 3 };
    FSDP_TRY(fsdp_device_open(&r->device, r->c->device));
    if (one_in(&g, 3)) FSDP_TRY(fsdp_device_open(&r->storage, strcmp(r->c->device, "cpu") == 0 ? "guard" : "cpu"));
    r->m->offloads = r->storage != NULL;
    r->m->copies = strcmp(r->c->transport, "copy") == 0;
    for (int u = 0; u < MODEL_UNITS; u++) {
        uint32_t salt = draw(&g);
        FSDP_TRY(make_unit(r, u, salt, false, &r->unit[u]));
        model_apply(r->m, &(call){ .kind = CALL_RENEW, .unit = u, .salt = salt });
        r->now = (call){ .kind = CALL_FILL, .unit = u, .salt = draw(&g) };
        FSDP_TRY(one_call(r));
    }
    r->now = (call){ .kind = CALL_OPTIM_RENEW, .mask = draw(&g) % (1u << MODEL_UNITS), .salt = draw(&g) };
    FSDP_TRY(one_call(r));
    return FSDP_OK;
}

/* What borrows units. */
static void give_back(run *r)
{
    fsdp_ema_destroy(r->ema);
    for (int k = 0; k < 2; k++) fsdp_optim_destroy(r->optim[k]);
    r->ema = NULL;
    memset(r->optim, 0, sizeof(r->optim));
}

/* Everything is given back. */
static fsdp_status end(run *r)
{
    if (r->m->leaders != 0) FSDP_TRY(cancel_passes(r));
    FSDP_TRY(fsdp_comm_barrier(r->comm));
    FSDP_TRY(reset(r));
    model_reset(r->m);
    FSDP_TRY(read_all(r));
    give_back(r);
    for (int u = 0; u < MODEL_UNITS; u++) {
        fsdp_unit_destroy(r->unit[u]);
        r->unit[u] = NULL;
    }
    fsdpi_runtime *rt;
    FSDP_TRY(fsdpi_runtime_of(&rt, r->comm));
    for (const fsdpi_devctx *d = rt->devices; d != NULL; d = d->next)
        FSDP_FAIL_IF(fsdpi_arena_get_stats(d->arena).bytes_live != 0 || fsdpi_arena_get_stats(d->gathered).bytes_live != 0, FSDP_ERR_INTERNAL, "%zu and %zu bytes are left",
                     fsdpi_arena_get_stats(d->arena).bytes_live, fsdpi_arena_get_stats(d->gathered).bytes_live);
    return FSDP_OK;
}

static fsdp_status live(run *r)
{
    rng g = { r->w->seed };
    plan p = { 0 };
    bool injects = r->size == 1 || !r->c->threads; /* the count of allocations is the process's */
    FSDP_TRY(begin(r));
    for (long n = 0; n < r->w->calls; n++) {
        char text[160];
        r->now = choose_call(&g, r->m, &p, injects, n);
        if (r->w->trace && r->rank == 0) fprintf(stderr, "%4ld %s\n", n, call_text(&r->now, text, sizeof(text)));
        fsdp_status st = one_call(r);
        if (st == FSDP_ERR_PEER) return st;
        FSDP_FAIL_IF(st != FSDP_OK, FSDP_ERR_INTERNAL, "call %ld: %s: %s", n, call_text(&r->now, text, sizeof(text)), fsdp_last_error_message());
    }
    return end(r);
}

static fsdp_status run_rank(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    run r = { .c = c, .w = c->arg, .comm = comm, .rank = fsdp_comm_rank(comm), .size = fsdp_comm_size(comm) };
    r.late.state = r.w->seed * 31 + (uint64_t)r.rank;
    r.m = model_create(r.size);
    r.number = calloc(MODEL_PASSES, sizeof(*r.number));
    fsdp_status st = r.m != NULL && r.number != NULL ? live(&r) : FSDP_ERR_NOMEM;
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    give_back(&r);
    if (st == FSDP_OK) fsdp_device_close(r.device);
    if (st == FSDP_OK) fsdp_device_close(r.storage);
    if (st == FSDP_OK) free(r.number); /* else kernels may still use it */
    model_destroy(r.m);
    fsdpi_error_restore(&kept);
    return st;
}

static int remove_entry(const char *path, const struct stat *s, int flag, struct FTW *at)
{
    (void)s;
    (void)flag;
    (void)at;
    return remove(path);
}

/* Which corner a seed is in. */
static corner corner_of(uint64_t seed, const work *w)
{
    rng g = { seed * 13 + 1 };
    corner c = { .ranks = 1 + below(&g, MODEL_RANKS), .arg = (void *)(uintptr_t)w };
    c.transport = one_in(&g, 2) ? "copy" : "shm";
    c.device = one_in(&g, 3) ? "guard" : "cpu";
    c.threads = one_in(&g, 3) || !CAN_FORK;
    return c;
}

static bool run_seed(const work *options, uint64_t seed, tally *seen)
{
    work w = *options;
    char folder[] = "/tmp/fsdp-random-XXXXXX";
    w.seed = seed;
    w.folder = mkdtemp(folder);
    corner c = corner_of(seed, &w);
    c.shared = seen;
    if (w.trace) fprintf(stderr, "%s\n", corner_name(&c));
    fsdp_status st = w.folder != NULL ? in_corner(run_rank, &c) : FSDP_ERR_IO;
    if (st != FSDP_OK) fprintf(stderr, "seed %llu (%s): %s\nagain: random_calls_test --seed %llu --calls %ld --trace\n", (unsigned long long)seed, corner_name(&c), fsdp_last_error_message(),
                               (unsigned long long)seed, w.calls);
    if (w.folder != NULL) nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    return st == FSDP_OK;
}

enum { RUNS = !CAN_FORK ? 32 : SANITIZED ? 60 : 120, CALLS = 500, FIRST_SEED = 1, SOAK_CALLS = 1000 };

static void test_random_sequences(void **state)
{
    (void)state;
    int bad = 0;
    tally *t = shared_alloc(sizeof(*t));
    for (int i = 0; i < RUNS; i++) bad += !run_seed(&(work){ .calls = CALLS }, FIRST_SEED + (uint64_t)i, t);
    for (int k = 0; k < CALL_KINDS; k++) print_message("%7ld %s\n", t->made[k], call_name((call_kind)k));
    print_message("%ld gradients of units counted, %ld of several rounds; %ld steps and norms that were not 0; %ld loads, %ld calls refused, %ld without memory\n", t->passes, t->rounds, t->norms,
                  t->loads, t->refused, t->shortages);
    assert_int_equal(bad, 0);
    for (int k = 0; k < CALL_KINDS; k++)
        if (t->made[k] == 0) fail_msg("no call has come about to %s", call_name((call_kind)k));
    assert_true(t->passes > RUNS && t->rounds > 0 && t->norms > RUNS / 2 && t->loads > 0 && t->refused > RUNS);
    assert_true(!CAN_FORK || t->shortages > RUNS / 8); /* of ranks that are threads only those that are alone have any */
    shared_free(t, sizeof(*t));
}

/* Seeds go on from where one likes; a soak begins at a time of day, so that no two are alike. */
static int soak(long calls, uint64_t seed)
{
    printf("%ld calls, the first seed is %llu\n", calls, (unsigned long long)seed);
    for (long made = 0; made < calls; made += SOAK_CALLS, seed++) {
        if (!run_seed(&(work){ .calls = SOAK_CALLS }, seed, NULL)) return 1;
        if (made / SOAK_CALLS % 100 == 99) printf("%ld calls\n", made + SOAK_CALLS);
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv)
{
    work w = { .calls = CALLS };
    long soaking = 0;
    bool seeded = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (strcmp(argv[i], "--trace") == 0) w.trace = true;
        else if (strcmp(argv[i], "--seed") == 0) w.seed = strtoull(value, NULL, 0), seeded = true, i++;
        else if (strcmp(argv[i], "--calls") == 0) w.calls = atol(value), i++;
        else if (strcmp(argv[i], "--soak") == 0) soaking = atol(value), i++;
        else {
            fprintf(stderr, "usage: random_calls_test [--seed N] [--calls N] [--trace] [--soak CALLS]\n");
            return 2;
        }
    }
    if (soaking > 0) return soak(soaking, seeded ? w.seed : (uint64_t)time(NULL));
    if (seeded) return run_seed(&w, w.seed, NULL) ? 0 : 1;
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_random_sequences) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
