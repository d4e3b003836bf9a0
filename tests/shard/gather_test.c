/* SPDX-License-Identifier: MIT
 *
 * Gathering by hand: unshard, reshard, prefetch and lists do what they say to the last gather, and change no bit of training; what is
 * gathered ahead comes in the exact order; a cap on whole parameters is never exceeded, and where it cannot hold, the numbers are
 * said and nothing is changed. */
#include "support/mini.h"
#include "support/ranks.h"

#include "shard/unit.h"

/* ---- a log of moves ---- */

typedef struct diary {
    char text[2048];
    size_t used;
} diary;

/* r a b t n g: the units. + gathered, = in use, ~ kept, - given up. */
static void note(void *arg, const fsdp_unit *u, int from, int to)
{
    static const char signs[] = { [FSDPI_SHARDED] = '-', [FSDPI_AHEAD] = '+', [FSDPI_WHOLE] = '=', [FSDPI_KEPT] = '~' };
    diary *d = arg;
    (void)from;
    char letter = strcmp(u->name, "big") == 0 ? 'g' : u->name[0];
    if (d->used + 3 < sizeof(d->text)) d->used += (size_t)snprintf(d->text + d->used, 3, "%c%c", signs[to], letter);
}

static void listen(mini *m, diary *d)
{
    m->unit[0]->rt->moved = d != NULL ? note : NULL;
    m->unit[0]->rt->moved_arg = d;
}

#define expect_diary(d, want)                                                                               \
    do {                                                                                                    \
        if (strcmp((d)->text, (want)) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "%s:%d: %s, not %s", __FILE__, __LINE__, (d)->text, (want)); \
        *(d) = (diary){ .used = 0 };                                                                        \
    } while (0)

static uint64_t gathers(const mini *m)
{
    fsdp_comm_stats s;
    fsdp_comm_get_stats(m->comm, &s);
    return s.gathers;
}

static const int some[] = { SANITIZED ? 3 : 1, SANITIZED ? 0 : 3, 0 };

/* ---- one unit by hand ---- */

static fsdp_status by_hand(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    bool none = c->mode == FSDP_MODE_NONE, copies = strcmp(c->transport, "copy") == 0;
    uint64_t one = c->ranks > 1 && !none;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .prefetch = -1 }));
    fsdp_unit *a = m.unit[MINI_A];
    fsdpi_residency rest = none ? FSDPI_KEPT : FSDPI_SHARDED;
    for (int round = 0; round < 2; round++) {
        uint64_t before = gathers(&m);
        FSDP_TRY(fsdp_unit_unshard(a));
        FSDP_TRY(fsdp_unit_unshard(a)); /* once is as good as twice */
        rank_check(a->residency == FSDPI_KEPT && gathers(&m) == before + one && fsdp_unit_param(a, 0) != NULL);
        float got, want[36];
        FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(a), &got, fsdp_unit_param(a, 0) + 35, sizeof(got)));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(a)));
        FSDP_TRY(fsdp_unit_read_param(a, 0, want));
        rank_check(got == want[35] && gathers(&m) == before + one && a->residency == FSDPI_KEPT); /* a summon found it whole */
        /* it stays over passes of either kind, and a cancelled one */
        FSDP_TRY(mini_leaf(&m, "[0 F1 ]0 {0 B1 }0", fsdp_comm_rank(comm)));
        rank_check(a->residency == FSDPI_KEPT);
        fsdp_pass *p;
        FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_EVAL));
        FSDP_TRY(mini_run(&m, p, "F1 [1", 0));
        rank_check(fsdp_unit_reshard(a) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "it is in use") != NULL);
        FSDP_TRY(fsdp_pass_cancel(p));
        rank_check(a->residency == FSDPI_KEPT);
        /* and is given up with new values, or by hand */
        if (round == 0) {
            FSDP_TRY(fsdp_optim_step(m.optim, NULL));
            rank_check(a->residency == (c->mode == FSDP_MODE_OPTIMIZER ? FSDPI_KEPT : rest));
            rank_check(none || fsdp_unit_param(a, 0) == NULL);
            FSDP_TRY(fsdp_unit_unshard(a));
            FSDP_TRY(fsdp_unit_read_param(a, 0, want));
            FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(a), &got, fsdp_unit_param(a, 0) + 35, sizeof(got)));
            FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(a)));
            rank_check(got == want[35]);
        }
        FSDP_TRY(fsdp_unit_reshard(a));
        FSDP_TRY(fsdp_unit_reshard(a));
        rank_check(a->residency == rest && (none || fsdp_unit_param(a, 0) == NULL));
        /* ahead of its turn; a pass that does not want it gives it up */
        before = gathers(&m);
        FSDP_TRY(fsdp_unit_prefetch(a));
        FSDP_TRY(fsdp_unit_prefetch(a));
        rank_check(a->residency == (none ? FSDPI_KEPT : copies ? FSDPI_AHEAD : FSDPI_SHARDED));
        FSDP_TRY(mini_leaf(&m, "[0 ]0 {0 }0", fsdp_comm_rank(comm)));
        rank_check(a->residency == rest);
        FSDP_TRY(fsdp_unit_prefetch(a));
        FSDP_TRY(fsdp_unit_unshard(a)); /* what was begun is used */
        rank_check(a->residency == FSDPI_KEPT);
        FSDP_TRY(fsdp_unit_reshard(a));
    }
    /* between forward and backward: gathered once more, and nothing else */
    for (int by = 0; by < 2; by++) {
        fsdp_pass *p;
        FSDP_TRY(fsdp_unit_reshard(a));
        FSDP_TRY(fsdp_unit_reshard(m.unit[MINI_ROOT]));
        uint64_t before = gathers(&m);
        FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(mini_run(&m, p, "[0 F1 ]0", 5));
        if (by) FSDP_TRY(fsdp_unit_reshard(a));
        if (by) FSDP_TRY(fsdp_unit_reshard(m.unit[MINI_ROOT]));
        FSDP_TRY(mini_run(&m, p, "{0 B1 }0", 5));
        FSDP_TRY(fsdp_pass_end(p));
        uint64_t usual = c->mode == FSDP_MODE_FULL ? 3 : none ? 0 : 2, more = !by || none ? 0 : c->mode == FSDP_MODE_FULL ? 1 : 2;
        rank_check(gathers(&m) - before == (c->ranks > 1 ? usual + more : 0));
    }
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_by_hand(void **state)
{
    (void)state;
    in_corners(by_hand, &(corners){ .all_modes = true, .ranks = some });
}

/* ---- the same bits, whatever is called ---- */

typedef struct trained {
    float param[4][1024];
} trained;

static fsdp_status step(mini *m, int64_t s, int how)
{
    fsdp_unit **u = m->unit;
    if (how == 1) {
        FSDP_TRY(fsdp_unit_unshard(u[MINI_BIG]));
        FSDP_TRY(fsdp_unit_prefetch(u[MINI_ROOT]));
    }
    if (how == 3 && s == 0) FSDP_TRY(fsdp_comm_set_max_unsharded(m->comm, (u[MINI_ROOT]->layout.total + u[MINI_BIG]->layout.total) * 4));
    if (how == 2 && s == 0) {
        fsdp_unit *next[] = { u[MINI_BIG], u[MINI_A], u[MINI_NONE] };
        FSDP_TRY(fsdp_unit_set_prefetch(u[MINI_ROOT], &(fsdp_unit_list){ next, 3 }, &(fsdp_unit_list){ next, 0 }));
        FSDP_TRY(fsdp_unit_set_prefetch(u[MINI_B], NULL, &(fsdp_unit_list){ next, 2 }));
    }
    FSDP_TRY(mini_step(m, MINI_NESTED " F1 B1", s, 6));
    if (how == 1) FSDP_TRY(fsdp_unit_reshard(u[MINI_BIG]));
    return FSDP_OK;
}

static fsdp_status train(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    trained *t = c->shared;
    for (int how = 0; how < 4; how++) {
        mini m;
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .prefetch = how }));
        for (int s = 0; s < 3; s++) FSDP_TRY(step(&m, s, how));
        float out[1024];
        FSDP_TRY(mini_read(&m, out));
        if (fsdp_comm_rank(comm) == 0) memcpy(t->param[how], out, (size_t)mini_numel() * sizeof(float));
        mini_destroy(&m);
        FSDP_TRY(fsdp_comm_set_max_unsharded(comm, 0));
    }
    return FSDP_OK;
}

static float first[1024];

static void compare(const corner *c)
{
    const trained *t = c->shared;
    size_t bytes = (size_t)mini_numel() * sizeof(float);
    if (first[0] == 0) memcpy(first, t->param[0], bytes);
    for (int how = 0; how < 4; how++)
        if (memcmp(first, t->param[how], bytes) != 0) fail_msg("%s: other bits, way %d", corner_name(c), how);
}

static void test_same_bits(void **state)
{
    (void)state;
    in_corners(train, &(corners){ .all_modes = true, .ranks = some, .shared = sizeof(trained), .after = compare });
}

/* ---- the exact order ---- */

static fsdp_status order(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    static const char *const want[] = {
        [0] = "+r=r+a=a~a-a+b=b~b-b+t=t~t-t+n=n~n-n+g=g~g-g~r=r+g=g~g-g+n=n~n-n+t=t~t-t+b=b~b-b+a=a~a-a~r-r",
        [1] = "+r=r+a=a+b~a-a=b+t~b-b=t+n~t-t=n+g~n-n=g~g-g~r=r+g=g+n~g-g=n+t~n-n=t+b~t-t=b+a~b-b=a~a-a~r-r",
        [2] = "+r=r+a+b=a+t~a-a=b+n~b-b=t+g~t-t=n~n-n=g+n~g-g~r=r+g=g+t~g-g=n+b~n-n=t+a~t-t=b~b-b=a~a-a~r-r",
        [3] = "+r=r+a+b+t=a+n~a-a=b+g~b-b=t~t-t=n~n-n=g+n+t~g-g~r=r+g=g+b~g-g=n+a~n-n=t~t-t=b~b-b=a~a-a~r-r",
    };
    for (int depth = 0; depth <= 3; depth++) {
        mini m;
        diary d = { .used = 0 };
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .device = c->device, .prefetch = depth > 0 ? depth : -1 }));
        listen(&m, &d);
        FSDP_TRY(mini_leaf(&m, MINI_NESTED, 0));
        expect_diary(&d, want[0]); /* nothing is known yet */
        uint64_t before = gathers(&m);
        for (int pass = 1; pass < 4; pass++) {
            FSDP_TRY(mini_leaf(&m, MINI_NESTED, pass));
            expect_diary(&d, want[depth]);
        }
        rank_check(gathers(&m) - before == 3 * (2 * MINI_UNITS - 1)); /* as many as with none ahead */
        listen(&m, NULL);
        mini_destroy(&m);
    }
    return FSDP_OK;
}

static void test_order_of_gathers(void **state)
{
    (void)state;
    in_corners(order, &(corners){ .transport = "copy", .ranks = (const int[]){ 2, 0 } });
}

/* Lists: in their order, when the unit begins; a unit that is destroyed is in none any more. */
static fsdp_status lists(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    diary d = { .used = 0 };
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .device = c->device, .prefetch = 1 }));
    fsdp_unit **u = m.unit, *extra, *of_root[] = { u[MINI_B], u[MINI_A] }, *of_b[3] = { u[MINI_BIG], u[MINI_TINY], NULL };
    fsdp_param w = { "w", 1, { 9 } };
    FSDP_TRY(fsdp_unit_create(&extra, comm, &w, 1, &(fsdp_unit_opts){ .name = "extra", .compute_device = m.device }));
    of_b[2] = extra;
    const fsdp_unit_list none = { NULL, 0 }, two = { of_root, 2 }, three = { of_b, 3 };
    FSDP_TRY(fsdp_unit_set_prefetch(u[MINI_ROOT], &two, &none));
    FSDP_TRY(fsdp_unit_set_prefetch(u[MINI_B], &none, &three));
    fsdp_unit_destroy(extra);
    listen(&m, &d);
    for (int pass = 0; pass < 3; pass++) { /* also in the first, when no order is known; a and big by the order of the last pass */
        FSDP_TRY(mini_leaf(&m, "[0 F1 F2 F5 ]0 {0 B2 B5 B1 }0", pass));
        expect_diary(&d, pass == 0 ? "+r=r+b+a=a~a-a=b~b-b+g=g~g-g~r=r+b=b+g+t~b-b=g~g-g+a=a~a-a~r-r-t" : "+r=r+b+a=a~a-a=b~b-b+g=g~g-g~r=r+b=b+g+t~b-b=g+a~g-g=a~a-a~r-r-t");
    }
    FSDP_TRY(fsdp_unit_set_prefetch(u[MINI_ROOT], NULL, NULL)); /* the order of the last pass again */
    FSDP_TRY(fsdp_unit_set_prefetch(u[MINI_B], NULL, NULL));
    FSDP_TRY(mini_leaf(&m, "[0 F1 F2 F5 ]0 {0 B2 B5 B1 }0", 3));
    expect_diary(&d, "+r=r+a=a+b~a-a=b+g~b-b=g~g-g~r=r+b=b+g~b-b=g+a~g-g=a~a-a~r-r");
    /* what is wrong changes nothing */
    fsdp_unit *self[] = { u[MINI_A] }, *null[] = { NULL };
    rank_check(fsdp_unit_set_prefetch(u[MINI_A], &(fsdp_unit_list){ self, 1 }, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "the unit itself") != NULL);
    rank_check(fsdp_unit_set_prefetch(u[MINI_A], NULL, &(fsdp_unit_list){ null, 1 }) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "NULL") != NULL);
    rank_check(fsdp_unit_set_prefetch(u[MINI_A], &(fsdp_unit_list){ NULL, 2 }, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "2 units") != NULL);
    rank_check(!u[MINI_A]->ahead[0].given && !u[MINI_A]->ahead[1].given);
    listen(&m, NULL);
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_lists(void **state)
{
    (void)state;
    in_corners(lists, &(corners){ .transport = "copy", .ranks = (const int[]){ 1, 2, 0 } });
}

/* ---- the cap ---- */

static int64_t whole(const mini *m, int u)
{
    return m->unit[u]->layout.total * (int64_t)sizeof(float);
}

static int64_t live(const mini *m)
{
    return (int64_t)fsdpi_arena_get_stats(m->unit[0]->ctx->gathered).bytes_live;
}

static fsdp_status most_unsharded(const mini *m, int64_t *most)
{
    int64_t now;
    FSDP_TRY(fsdp_comm_get_unsharded(m->comm, &now, most));
    rank_check(now == live(m));
    return FSDP_OK;
}

static fsdp_status capped(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    bool copies = strcmp(c->transport, "copy") == 0 && c->mode != FSDP_MODE_NONE;
    for (int depth = -1; depth <= 3; depth++) {
        mini m;
        int64_t most;
        diary d = { .used = 0 };
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .prefetch = depth }));
        int64_t cap = whole(&m, MINI_ROOT) + whole(&m, MINI_BIG), all = 0;
        for (int u = 0; u < MINI_UNITS; u++) all += whole(&m, u);
        FSDP_TRY(mini_leaf(&m, MINI_NESTED, 0));
        FSDP_TRY(most_unsharded(&m, &most));
        if (copies && (c->mode == FSDP_MODE_GRAD_OP || c->mode == FSDP_MODE_OPTIMIZER)) rank_check(most == all);
        FSDP_TRY(fsdp_comm_set_max_unsharded(comm, cap));
        rank_check(live(&m) <= cap); /* mode optimizer had them all */
        for (int pass = 1; pass < 4; pass++) {
            FSDP_TRY(mini_leaf(&m, MINI_NESTED, pass));
            FSDP_TRY(most_unsharded(&m, &most));
            rank_check(copies ? most <= cap && most >= cap - 64 : most == 0);
        }
        if (c->mode == FSDP_MODE_FULL && copies) {
            uint64_t before = gathers(&m);
            FSDP_TRY(mini_leaf(&m, MINI_NESTED, 4));
            rank_check(gathers(&m) - before == (c->ranks > 1 ? 2 * MINI_UNITS - 1 : 0)); /* nothing was gathered in vain */
            /* another order: what was gathered ahead makes room */
            listen(&m, &d);
            FSDP_TRY(mini_leaf(&m, "[0 F5 ]0 {0 B5 }0", 5));
            if (depth <= 0 && depth == -1) expect_diary(&d, "+r=r+g=g~g-g~r=r+g=g~g-g~r-r");
            if (depth == 0 || depth == 1) expect_diary(&d, "+r=r+a-a+g=g~g-g~r=r+g=g~g-g~r-r");
            listen(&m, NULL);
        }
        FSDP_TRY(fsdp_optim_step(m.optim, NULL));
        float out[1024];
        FSDP_TRY(mini_read(&m, out)); /* summons keep below it, too */
        FSDP_TRY(most_unsharded(&m, &most));
        rank_check(most <= cap);
        mini_destroy(&m);
        FSDP_TRY(fsdp_comm_set_max_unsharded(comm, 0));
    }
    return FSDP_OK;
}

static void test_cap_is_never_exceeded(void **state)
{
    (void)state;
    in_corners(capped, &(corners){ .all_modes = true, .ranks = some });
}

/* What arrives below fp32 takes room beside what it is widened into. */
static fsdp_status capped_narrow(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    for (int depth = -1; depth <= 3; depth++) {
        mini m;
        int64_t most, now;
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .prefetch = depth, .param_dtype = FSDP_BF16, .exact_eval = true }));
        bool arrives = strcmp(c->transport, "copy") == 0, widens = arrives || c->mode == FSDP_MODE_FULL || c->mode == FSDP_MODE_GRAD_OP;
        int64_t big = whole(&m, MINI_BIG), cap = whole(&m, MINI_ROOT) + big + (arrives ? big / 2 : 0);
        FSDP_TRY(fsdp_comm_set_max_unsharded(comm, cap));
        for (int pass = 0; pass < 3; pass++) FSDP_TRY(mini_leaf(&m, MINI_NESTED, pass));
        FSDP_TRY(fsdp_optim_step(m.optim, NULL));
        for (int pass = 3; pass < 5; pass++) FSDP_TRY(mini_leaf(&m, MINI_NESTED, pass));
        int64_t peak = (int64_t)fsdpi_arena_get_stats(m.unit[0]->ctx->gathered).bytes_live_peak;
        FSDP_TRY(fsdp_comm_get_unsharded(comm, &now, &most));
        rank_check(peak <= cap && most <= cap);
        rank_check(!widens || (most >= peak - 512 && peak > 0)); /* blocks are of 64 bytes */
        if (arrives && c->mode == FSDP_MODE_FULL) {
            fsdp_pass *p;
            FSDP_TRY(fsdp_comm_set_max_unsharded(comm, cap - 1));
            FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
            FSDP_TRY(fsdp_unit_begin_forward(m.unit[MINI_ROOT], p));
            rank_check(fsdp_unit_begin_forward(m.unit[MINI_BIG], p) == FSDP_ERR_NOMEM);
            FSDP_TRY(fsdp_pass_cancel(p));
            rank_check(fsdp_comm_set_max_unsharded(comm, big + big / 2 - 1) == FSDP_ERR_INVALID);
        }
        mini_destroy(&m);
        FSDP_TRY(fsdp_comm_set_max_unsharded(comm, 0));
    }
    return FSDP_OK;
}

static void test_cap_with_narrow_parameters(void **state)
{
    (void)state;
    in_corners(capped_narrow, &(corners){ .all_modes = true, .ranks = (const int[]){ 1, 3, 0 } });
}

static fsdp_status too_small(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    fsdp_pass *p;
    fsdp_unit *u = NULL;
    char said[512], before[160];
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    int64_t root = whole(&m, MINI_ROOT), big = whole(&m, MINI_BIG);
    rank_check(fsdp_comm_set_max_unsharded(comm, -1) == FSDP_ERR_INVALID);
    /* a unit that alone is larger: refused where the cap is set, and where it is made */
    snprintf(said, sizeof(said), "unit \"big\" is %lld bytes whole, more than the cap of %lld", (long long)big, (long long)big - 1);
    rank_check(fsdp_comm_set_max_unsharded(comm, big - 1) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), said) != NULL);
    FSDP_TRY(fsdp_comm_set_max_unsharded(comm, root + big - 1));
    fsdp_param w = { "w", 1, { 10000 } };
    rank_check(fsdp_unit_create(&u, comm, &w, 1, &(fsdp_unit_opts){ .name = "huge", .compute_device = m.device }) == FSDP_ERR_INVALID);
    rank_check(u == NULL && strstr(fsdp_last_error_message(), "unit \"huge\" is 40000 bytes whole") != NULL);
    /* two in use together: said when it happens, on every rank, and nothing has changed */
    FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
    rank_check(fsdp_comm_set_max_unsharded(comm, 0) == FSDP_ERR_STATE);
    FSDP_TRY(mini_run(&m, p, "[0", 0));
    snprintf(before, sizeof(before), "%s", fsdp_unit_state(m.unit[MINI_BIG]));
    snprintf(said, sizeof(said), "unit \"big\" is %lld bytes whole, and units in use hold %lld: together more than the %lld that", (long long)big, (long long)root, (long long)(root + big - 1));
    rank_check(fsdp_unit_begin_forward(m.unit[MINI_BIG], p) == FSDP_ERR_NOMEM && strstr(fsdp_last_error_message(), said) != NULL);
    snprintf(said, sizeof(said), "allow at least %lld", (long long)(root + big));
    rank_check(strstr(fsdp_last_error_message(), said) != NULL && strcmp(before, fsdp_unit_state(m.unit[MINI_BIG])) == 0);
    FSDP_TRY(mini_run(&m, p, "F1 ]0 {0 B1 }0", 0)); /* the pass goes on */
    FSDP_TRY(fsdp_pass_end(p));
    /* what was unsharded by hand is in use: the message says how to give it up */
    FSDP_TRY(fsdp_unit_unshard(m.unit[MINI_ROOT]));
    rank_check(fsdp_unit_unshard(m.unit[MINI_BIG]) == FSDP_ERR_NOMEM && strstr(fsdp_last_error_message(), "fsdp_unit_reshard() gives up") != NULL);
    FSDP_TRY(fsdp_unit_prefetch(m.unit[MINI_BIG])); /* a hint */
    rank_check(m.unit[MINI_BIG]->residency == FSDPI_SHARDED);
    rank_check(fsdp_unit_summon_begin(m.unit[MINI_BIG], NULL) == FSDP_ERR_NOMEM);
    FSDP_TRY(fsdp_unit_reshard(m.unit[MINI_ROOT]));
    FSDP_TRY(fsdp_unit_unshard(m.unit[MINI_BIG]));
    FSDP_TRY(fsdp_comm_set_max_unsharded(comm, 0));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, 0));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_cap_that_cannot_hold(void **state)
{
    (void)state;
    in_corners(too_small, &(corners){ .transport = "copy", .ranks = (const int[]){ 1, 3, 0 } });
}

/* What rank 0 alone holds counts on all ranks: they are refused together, and nothing is changed. */
static fsdp_status held_on_rank_0(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    static const fsdp_unit_summon_opts alone = { .rank0_only = true };
    mini m;
    float x[37 * 11];
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_unit *root = m.unit[MINI_ROOT], *big = m.unit[MINI_BIG];
    FSDP_TRY(fsdp_unit_summon_begin(root, &alone));
    FSDP_TRY(fsdp_unit_summon_begin(big, &alone));
    rank_check(fsdp_comm_set_max_unsharded(comm, whole(&m, MINI_BIG)) == FSDP_ERR_NOMEM && strstr(fsdp_last_error_message(), "end the summons first") != NULL);
    FSDP_TRY(fsdp_unit_unshard(root)); /* on other ranks, too: it counts once */
    rank_check(fsdp_comm_set_max_unsharded(comm, whole(&m, MINI_BIG)) == FSDP_ERR_NOMEM);
    FSDP_TRY(fsdp_unit_summon_end(big));
    FSDP_TRY(fsdp_comm_set_max_unsharded(comm, whole(&m, MINI_ROOT) + whole(&m, MINI_BIG) - 1));
    rank_check(fsdp_unit_unshard(big) == FSDP_ERR_NOMEM && fsdp_unit_summon_begin(big, NULL) == FSDP_ERR_NOMEM);
    rank_check(fsdp_unit_summon_begin(big, &alone) == FSDP_ERR_NOMEM && fsdp_unit_read_param(big, 0, x) == FSDP_ERR_NOMEM);
    FSDP_TRY(fsdp_unit_read_param(root, 0, x)); /* it has its room */
    FSDP_TRY(fsdp_unit_unshard(root));
    FSDP_TRY(fsdp_unit_summon_end(root));
    rank_check(root->pinned && fsdp_unit_summon_begin(big, NULL) == FSDP_ERR_NOMEM);
    FSDP_TRY(fsdp_unit_reshard(root));
    FSDP_TRY(fsdp_unit_summon_begin(big, NULL));
    FSDP_TRY(fsdp_unit_summon_end(big));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_cap_and_what_rank_0_holds(void **state)
{
    (void)state;
    in_corners(held_on_rank_0, &(corners){ .transport = "copy", .ranks = (const int[]){ 1, 3, 0 }, .threads_only = true });
}

/* Of units that are published in 16 bits. Masters that lie in shared memory take nothing. Where new values are gathered into what is kept,
 * what arrives takes room beside it. What was unsharded is not whole by hand any more when masters have been in its place. */
static fsdp_status narrow_room(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    bool copies = strcmp(c->transport, "copy") == 0;
    mini m;
    fsdp_pass *p;
    int64_t most;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = FSDP_MODE_OPTIMIZER, .device = c->device, .param_dtype = FSDP_BF16, .prefetch = -1 }));
    fsdp_unit *a = m.unit[MINI_A], *big = m.unit[MINI_BIG];
    int64_t cap = whole(&m, MINI_BIG) + (copies ? whole(&m, MINI_BIG) / 2 + whole(&m, MINI_A) - 1 : 0);
    FSDP_TRY(fsdp_comm_set_max_unsharded(comm, cap));
    FSDP_TRY(mini_leaf(&m, "F5 B5", 0));
    FSDP_TRY(fsdp_optim_step(m.optim, NULL)); /* what is kept is old */
    if (copies) {
        FSDP_TRY(fsdp_unit_unshard(a));
        FSDP_TRY(fsdp_pass_begin(&p, comm, FSDP_PASS_TRAIN));
        rank_check(fsdp_unit_begin_forward(big, p) == FSDP_ERR_NOMEM && a->pinned);
        FSDP_TRY(fsdp_unit_reshard(a));
        FSDP_TRY(mini_run(&m, p, "F5 B5", 1));
        FSDP_TRY(fsdp_pass_end(p));
    }
    FSDP_TRY(fsdp_unit_unshard(big));
    if (!copies) FSDP_TRY(fsdp_unit_summon_begin(a, NULL));
    if (!copies) FSDP_TRY(fsdp_unit_summon_end(a));
    rank_check(big->pinned);
    FSDP_TRY(fsdp_unit_summon_begin(big, NULL));
    FSDP_TRY(fsdp_unit_unshard(big));
    FSDP_TRY(fsdp_unit_summon_end(big));
    rank_check(!big->pinned);
    FSDP_TRY(fsdp_comm_get_unsharded(comm, NULL, &most));
    rank_check(most <= cap);
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_room_for_narrow_parameters(void **state)
{
    (void)state;
    in_corners(narrow_room, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .threads_only = true });
}

/* ---- ranks that differ ---- */

static fsdp_status differ(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .device = c->device }));
    FSDP_TRY(fsdpi_runtime_sync(m.unit[0]->rt)); /* its values are there, whatever comes */
    FSDP_TRY(fsdp_comm_barrier(comm));
    fsdp_status st = fsdp_comm_rank(comm) == 1 ? fsdp_unit_unshard(m.unit[MINI_A]) : FSDP_OK; /* a rank that comes late is told here */
    if (st == FSDP_OK) st = fsdp_comm_barrier(comm);
    rank_check(st == FSDP_ERR_COMM && strstr(fsdp_last_error_message(), "unshard") != NULL && strstr(fsdp_last_error_message(), "\"a\"") != NULL);
    FSDP_TRY(fsdp_comm_reset(comm));
    rank_check(m.unit[MINI_A]->residency == FSDPI_SHARDED && !m.unit[MINI_A]->pinned);
    /* lists that differ are seen, too */
    fsdp_unit *list[] = { m.unit[fsdp_comm_rank(comm) == 1 ? MINI_B : MINI_BIG] };
    st = fsdp_unit_set_prefetch(m.unit[MINI_A], &(fsdp_unit_list){ list, 1 }, NULL);
    if (st == FSDP_OK) st = fsdp_comm_barrier(comm);
    rank_check(st == FSDP_ERR_COMM && strstr(fsdp_last_error_message(), "list of what to prefetch") != NULL);
    FSDP_TRY(fsdp_comm_reset(comm));
    FSDP_TRY(fsdp_unit_set_prefetch(m.unit[MINI_A], NULL, NULL));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, fsdp_comm_rank(comm)));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_ranks_that_differ(void **state)
{
    (void)state;
    in_corners(differ, &(corners){ .ranks = (const int[]){ 3, 0 } });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_order_of_gathers),
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_cap_is_never_exceeded),
        cmocka_unit_test(test_cap_with_narrow_parameters),
        cmocka_unit_test(test_cap_that_cannot_hold),
        cmocka_unit_test(test_cap_and_what_rank_0_holds),
        cmocka_unit_test(test_room_for_narrow_parameters),
        cmocka_unit_test(test_ranks_that_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
