/* SPDX-License-Identifier: MIT
 *
 * One rank does something else than the others: all ranks are told within seconds, with what both sides did; they
 * reset, do the micro-batch (or the step) again, and end with the bits of a run in which nothing happened. So a
 * micro-batch counts on all ranks or on none. */
#include "support/mini.h"
#include "support/ranks.h"

#include "base/clock.h"

enum { STEPS = 2, LEAVES = 30 }; /* leaves: of a step, for 1, 2, 3, 5 ranks */

typedef struct deviation {
    const char *name, *script; /* NULL script: see deviate() */
    const char *said[2];       /* both must be in the message */
} deviation;

static const deviation deviations[] = {
    { "skips a unit", "[0 F1 F2 F4 F5 ]0 {0 B5 B4 B2 B1 }0", { "forward gather of \"tiny\"", "forward gather of \"none\"" } },
    { "uses a unit twice", "[0 F1 F1 F2 F3 F4 F5 ]0 {0 B5 B4 B3 B2 B1 B1 }0", { "forward gather of \"a\"", "forward gather of \"b\"" } },
    { "swaps two units of one size", "[0 F2 F1 F3 F4 F5 ]0 {0 B5 B4 B3 B1 B2 }0", { "forward gather of \"a\"", "forward gather of \"b\"" } },
    { "swaps two backwards of one size", "[0 F1 F2 F3 F4 F5 ]0 {0 B5 B4 B3 B1 B2 }0", { "backward gather of \"a\"", "backward gather of \"b\"" } },
    { "leaves out a backward", "[0 F1 F2 F3 F4 F5 ]0 {0 B5 B4 B2 B1 }0", { "backward gather of \"tiny\"", "backward gather of \"b\"" } },
    { "does more at the end", "[0 F1 F2 F3 F4 F5 ]0 {0 B5 B4 B3 B2 B1 }0 F3 B3", { "end of a pass", "forward gather of \"tiny\"" } },
    { "does less at the end", "[0 F1 F2 F3 F4 F5 ]0 {0 B5 B4 B3 B2 }0", { "backward gather of \"a\"", "gradient reduction of \"root\"" } },
    { "cancels the pass", NULL, { "end of a pass", "cancellation of a pass" } },
    { "leaves out the pass", NULL, { "beginning of a pass", "barrier" } },
    { "evaluates alone", NULL, { "beginning of a pass of \"training\"", "beginning of a pass of \"evaluation\"" } },
    { "steps too early", NULL, { "beginning of a pass of \"training\"", "beginning of a step of \"root and 5 more\"" } },
    { "summons alone", NULL, { "beginning of a pass", "summon of \"big\"" } },
    { "initialises alone", NULL, { "beginning of a pass", "publication of parameters of \"tiny\"" } },
    { "drops gradients alone", NULL, { "beginning of a pass", "drop of gradients of \"a\"" } },
    { "asks for a reset alone", NULL, { "reset", "" } },
    { "takes part in nothing for a while, and then differs", "SLEEP", { "forward gather of \"b\"", "forward gather of \"a\"" } },
};
enum { DEVIATIONS = sizeof(deviations) / sizeof(deviations[0]) };

/* What they are already, before the first step. */
static void as_it_was(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = mini_value(name, i);
}

/* What the odd rank does instead of a leaf. */
static fsdp_status deviate(mini *m, const deviation *d, int64_t leaf)
{
    if (strcmp(d->name, "cancels the pass") == 0) {
        FSDP_TRY(fsdp_pass_begin(&m->pass, m->comm, FSDP_PASS_TRAIN));
        FSDP_TRY(mini_run(m, m->pass, MINI_NESTED, leaf));
        fsdp_pass *pass = m->pass;
        m->pass = NULL;
        FSDP_TRY(fsdp_pass_cancel(pass));
        return fsdp_comm_barrier(m->comm); /* and goes on */
    }
    if (strcmp(d->name, "leaves out the pass") == 0) {
        FSDP_TRY(fsdp_comm_barrier(m->comm));
        return FSDP_OK;
    }
    if (strcmp(d->name, "evaluates alone") == 0) {
        FSDP_TRY(fsdp_pass_begin(&m->pass, m->comm, FSDP_PASS_EVAL));
        FSDP_TRY(mini_run(m, m->pass, "F1 F2", leaf));
        FSDP_TRY(fsdp_pass_end(m->pass));
        m->pass = NULL;
        return mini_leaf(m, MINI_NESTED, leaf);
    }
    if (strcmp(d->name, "steps too early") == 0) return fsdp_optim_step(m->optim, NULL);
    if (strcmp(d->name, "summons alone") == 0) {
        FSDP_TRY(fsdp_unit_summon_begin(m->unit[MINI_BIG], &(fsdp_unit_summon_opts){ .writeback = true }));
        FSDP_TRY(fsdp_unit_summon_end(m->unit[MINI_BIG]));
        return mini_leaf(m, MINI_NESTED, leaf);
    }
    if (strcmp(d->name, "initialises alone") == 0) {
        FSDP_TRY(fsdp_unit_init(m->unit[MINI_TINY], as_it_was, NULL));
        return mini_leaf(m, MINI_NESTED, leaf);
    }
    if (strcmp(d->name, "drops gradients alone") == 0) {
        FSDP_TRY(fsdp_unit_zero_grad(m->unit[MINI_A]));
        return mini_leaf(m, MINI_NESTED, leaf);
    }
    if (strcmp(d->name, "asks for a reset alone") == 0) {
        fsdp_error_raise(FSDP_ERR_COMM, __func__, __FILE__, __LINE__, "it wants a reset");
        return FSDP_ERR_COMM;
    }
    if (strcmp(d->script, "SLEEP") == 0) {
        nanosleep(&(struct timespec){ .tv_nsec = 100 * 1000 * 1000 }, NULL);
        return mini_leaf(m, "[0 F2 F1 F3 F4 F5 ]0 {0 B5 B4 B3 B1 B2 }0", leaf);
    }
    return mini_leaf(m, d->script, leaf);
}

static fsdp_status recover(mini *m, const deviation *d, fsdp_status st, bool odd, bool cancels)
{
    char message[2048];
    snprintf(message, sizeof(message), "%s", fsdp_last_error_message());
    if (st != FSDP_ERR_COMM) FSDP_FAIL(FSDP_ERR_INTERNAL, "it %s: status %s: %s", d->name, fsdp_status_name(st), message);
    bool alone = strcmp(d->name, "asks for a reset alone") == 0;
    for (int i = 0; i < 2; i++)
        if (strstr(message, d->said[i]) == NULL && !(alone && odd))
            FSDP_FAIL(FSDP_ERR_INTERNAL, "it %s: the message is not about \"%s\": %s", d->name, d->said[i], message);
    if (cancels && m->pass != NULL) (void)!fsdp_pass_cancel(m->pass); /* as well as not to */
    m->pass = NULL;
    return fsdp_comm_reset(m->comm);
}

typedef struct plan {
    const deviation *d; /* NULL: nothing happens */
    int odd, leaf, step; /* who, when: the leaf's turn of that rank */
} plan;

typedef struct outcome {
    float param[5][1024]; /* as each rank reads them */
} outcome;

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const plan *p = c->arg;
    mini m;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    for (int step = 0; step < STEPS; step++) {
        for (int turn = 0; turn < LEAVES / size; turn++) {
            int64_t leaf = step * LEAVES + turn * size + rank;
            bool now = p->d != NULL && step == p->step && turn == p->leaf, odd = rank == p->odd;
            if (now) {
                int64_t start = fsdpi_now_ns();
                fsdp_status st = odd ? deviate(&m, p->d, leaf) : mini_leaf(&m, MINI_NESTED, leaf);
                FSDP_TRY(recover(&m, p->d, st, odd, (rank + turn) % 2));
                rank_check(fsdpi_now_ns() - start < 5000000000);
            }
            FSDP_TRY(mini_leaf(&m, MINI_NESTED, leaf));
        }
        FSDP_TRY(fsdp_optim_step(m.optim, &(fsdp_step_opts){ .grad_scale = 1.0f / LEAVES, .clip = 1.0f }));
    }
    FSDP_TRY(mini_read(&m, ((outcome *)c->shared)->param[rank]));
    mini_destroy(&m);
    return FSDP_OK;
}

static outcome *reference(void)
{
    outcome *want = shared_alloc(sizeof(*want));
    corner c = { .transport = "self", .device = "cpu", .ranks = 1, .threads = true, .arg = &(plan){ 0 }, .shared = want };
    assert_ok(in_corner(train, &c));
    return want;
}

static void differ(const char *transport, const char *device, fsdp_mode mode, int ranks, bool threads, const plan *p, const outcome *want)
{
    outcome *got = shared_alloc(sizeof(*got));
    corner c = { .transport = transport, .device = device, .mode = mode, .ranks = ranks, .threads = threads, .arg = (void *)(uintptr_t)p, .shared = got };
    if (in_corner(train, &c) != FSDP_OK)
        fail_msg("%s, rank %d %s at leaf %d: %s", corner_name(&c), p->odd, p->d->name, p->leaf, fsdp_last_error());
    for (int r = 0; r < ranks; r++)
        if (memcmp(want->param[0], got->param[r], sizeof(want->param[0])) != 0)
            fail_msg("%s, rank %d %s at leaf %d: other bits", corner_name(&c), p->odd, p->d->name, p->leaf);
    shared_free(got, sizeof(*got));
}

static void test_ranks_that_differ_go_on_after_a_reset(void **state)
{
    (void)state;
    static const int sizes[] = { 2, 3, 5 };
    outcome *want = reference();
    for (int i = 0; i < DEVIATIONS; i++)
        for (int k = 0; k < 8; k++) { /* each of: transports, devices, processes or threads; the rest goes round */
            int n = 8 * i + k, ranks = sizes[n % 3];
            bool threads = !CAN_FORK || k % 2;
            /* in a first pass of all, in the middle, and in the last before a step */
            plan p = { .d = &deviations[i], .odd = n % 5 < 2 ? 0 : ranks - 1, .step = n / 3 % 2 };
            p.leaf = n / 2 % 3 == 0 ? 0 : n / 2 % 3 == 1 ? LEAVES / ranks / 2 : LEAVES / ranks - 1;
            if (strcmp(p.d->name, "drops gradients alone") == 0) p.leaf = 0; /* there are none: nothing is lost */
            if (strcmp(p.d->name, "initialises alone") == 0) p.step = 0;     /* the values are what they were */
            differ(k / 2 % 2 ? "copy" : "shm", k / 4 ? "guard" : "cpu", (fsdp_mode)((k + i) % 4), ranks, threads, &p, want);
        }
    shared_free(want, sizeof(*want));
}

static void test_nothing_happens(void **state)
{
    (void)state;
    outcome *want = reference();
    static const int sizes[] = { 1, 2, 3, 5 };
    for (int k = 0; k < 4 * 4 * 2 * 2; k++) {
        plan p = { 0 };
        outcome *got = shared_alloc(sizeof(*got));
        corner c = { .transport = k / 16 % 2 ? "copy" : "shm", .device = k / 32 ? "guard" : "cpu", .mode = (fsdp_mode)(k % 4), .ranks = sizes[k / 4 % 4],
                     .threads = !CAN_FORK, .arg = &p, .shared = got };
        if (in_corner(train, &c) != FSDP_OK) fail_msg("%s: %s", corner_name(&c), fsdp_last_error());
        for (int r = 0; r < c.ranks; r++)
            if (memcmp(want->param[0], got->param[r], sizeof(want->param[0])) != 0) fail_msg("%s: other bits", corner_name(&c));
        shared_free(got, sizeof(*got));
    }
    shared_free(want, sizeof(*want));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_happens),
        cmocka_unit_test(test_ranks_that_differ_go_on_after_a_reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
