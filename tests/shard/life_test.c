/* SPDX-License-Identifier: MIT
 *
 * Every call that is not allowed, in every state, returns FSDP_ERR_STATE, names the unit and the way out, and changes
 * nothing: not what units say of themselves, not the other ranks (which may not have made the call), and not one bit of
 * the training around it. Walks the tables of shard/life.h: each condition of each event is seen to fail. */
#include "support/mini.h"
#include "support/ranks.h"

#include "base/error.h"
#include "shard/pass.h"
#include "shard/unit.h"

/* ---- the calls ---- */

typedef struct probe {
    mini *m;
    fsdp_unit *unit;
    fsdp_pass *pass;
    fsdp_ema *ema; /* of unit a */
} probe;

static fsdp_status from_pointer(const void *p)
{
    return p != NULL ? FSDP_OK : fsdpi_error_status();
}

static fsdp_status begin_forward(probe *p)
{
    return fsdp_unit_begin_forward(p->unit, p->pass);
}

static fsdp_status end_forward(probe *p)
{
    return fsdp_unit_end_forward(p->unit, p->pass);
}

static fsdp_status begin_recompute(probe *p)
{
    return fsdp_unit_begin_recompute(p->unit, p->pass);
}

static fsdp_status end_recompute(probe *p)
{
    return fsdp_unit_end_recompute(p->unit, p->pass);
}

static fsdp_status begin_backward(probe *p)
{
    return fsdp_unit_begin_backward(p->unit, p->pass);
}

static fsdp_status end_backward(probe *p)
{
    return fsdp_unit_end_backward(p->unit, p->pass);
}

static fsdp_status pass_begin(probe *p)
{
    return fsdp_pass_begin(&p->pass, p->m->comm, FSDP_PASS_TRAIN);
}

static fsdp_status pass_end(probe *p)
{
    return fsdp_pass_end(p->pass);
}

static fsdp_status summon_read(probe *p)
{
    return fsdp_unit_summon_begin(p->unit, NULL);
}

static fsdp_status summon_write(probe *p)
{
    return fsdp_unit_summon_begin(p->unit, &(fsdp_unit_summon_opts){ .writeback = true });
}

static fsdp_status summon_end(probe *p)
{
    return fsdp_unit_summon_end(p->unit);
}

static fsdp_status summon_cancel(probe *p)
{
    return fsdp_unit_summon_cancel(p->unit);
}

static fsdp_status check_replicas(probe *p)
{
    return fsdp_unit_check_replicas(p->unit);
}

static fsdp_status read_param(probe *p)
{
    float x[512];
    return fsdp_unit_read_param(p->unit, 0, x);
}

static void never(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)i;
    (void)arg;
    *value = -1;
}

static fsdp_status init(probe *p)
{
    return fsdp_unit_init(p->unit, never, NULL);
}

/* The unit comes last in the list: those before it must not be touched. */
static fsdp_status step_begin(probe *p)
{
    fsdp_unit *all[] = { p->m->unit[MINI_BIG], p->m->unit[MINI_TINY], p->unit };
    return fsdp_step_begin((fsdp_unit_list){ all, 3 });
}

static fsdp_status step_end(probe *p)
{
    return fsdp_step_end((fsdp_unit_list){ &p->unit, 1 });
}

static fsdp_status step_cancel(probe *p)
{
    return fsdp_step_cancel((fsdp_unit_list){ &p->unit, 1 });
}

static fsdp_status step_norm(probe *p)
{
    double norm;
    return fsdp_step_grad_norm((fsdp_unit_list){ &p->unit, 1 }, &norm, NULL);
}

static fsdp_status optim_step(probe *p)
{
    return fsdp_optim_step(p->m->optim, NULL);
}

static fsdp_status zero_grad(probe *p)
{
    return fsdp_unit_zero_grad(p->unit);
}

static fsdp_status read_grad(probe *p)
{
    float x[512];
    return fsdp_unit_read_grad(p->unit, 0, x);
}

static fsdp_status freeze(probe *p)
{
    return fsdp_unit_set_frozen(p->unit, 1, true);
}

static fsdp_status param(probe *p)
{
    return from_pointer(fsdp_unit_param(p->unit, 0));
}

static fsdp_status grad(probe *p)
{
    float beta = 7;
    fsdp_status st = from_pointer(fsdp_unit_grad(p->unit, 0, &beta));
    if (st != FSDP_OK && beta != 7) FSDP_FAIL(FSDP_ERR_INTERNAL, "beta was written");
    return st;
}

static fsdp_status summoned(probe *p)
{
    return from_pointer(fsdp_unit_summoned(p->unit, 0));
}

static fsdp_status create(probe *p)
{
    fsdp_unit *u = NULL;
    fsdp_param w = { "w", 1, { 3 } };
    fsdp_status st = fsdp_unit_create(&u, p->m->comm, &w, 1, &(fsdp_unit_opts){ .name = "a" }); /* the name that is asked for */
    if (st != FSDP_OK && u != NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "a unit came out");
    return st;
}

static fsdp_status write_nothing(fsdp_unit *unit, const fsdp_slice *slices, int count, void *arg)
{
    (void)slices;
    (void)count;
    (void)arg;
    FSDP_FAIL(FSDP_ERR_INTERNAL, "unit %s would be written", fsdp_unit_name(unit));
}

static fsdp_status rewrite(probe *p)
{
    return fsdp_units_rewrite((fsdp_unit_list){ &p->unit, 1 }, write_nothing, NULL);
}

static fsdp_status hooks(probe *p)
{
    return fsdp_unit_set_grad_hooks(p->unit, NULL);
}

static fsdp_status swap_in(probe *p)
{
    return fsdp_ema_swap_in(p->ema);
}

static fsdp_status swap_out(probe *p)
{
    return fsdp_ema_swap_out(p->ema);
}

static fsdp_status unshard(probe *p)
{
    return fsdp_unit_unshard(p->unit);
}

static fsdp_status reshard(probe *p)
{
    return fsdp_unit_reshard(p->unit);
}

static fsdp_status prefetch(probe *p)
{
    return fsdp_unit_prefetch(p->unit);
}

static fsdp_status set_prefetch(probe *p)
{
    return fsdp_unit_set_prefetch(p->unit, &(fsdp_unit_list){ &p->m->unit[MINI_BIG], 1 }, NULL);
}

/* Calls on what is registered: refused like the calls on units that do the same. */
static fsdp_status registered(probe *p, fsdp_status (*call)(fsdp_checkpoint *c))
{
    fsdp_checkpoint *c;
    FSDP_TRY(fsdp_checkpoint_create(&c, p->m->comm));
    fsdp_status st = fsdp_checkpoint_add_param(c, "w", p->unit, 0);
    if (st == FSDP_OK) st = call(c);
    fsdp_checkpoint_destroy(c);
    return st;
}

static fsdp_status save_c(fsdp_checkpoint *c)
{
    return fsdp_checkpoint_save(c, "/nowhere", 1, 0);
}

static fsdp_status load_c(fsdp_checkpoint *c)
{
    return fsdp_checkpoint_load(c, "/nowhere");
}

static fsdp_status read_c(fsdp_checkpoint *c)
{
    fsdp_state *s;
    return fsdp_state_read(&s, c, NULL);
}

static fsdp_status load_state_c(fsdp_checkpoint *c)
{
    return fsdp_state_load(c, NULL, NULL);
}

static fsdp_status save(probe *p)
{
    return registered(p, save_c);
}

static fsdp_status load(probe *p)
{
    return registered(p, load_c);
}

static fsdp_status state_read(probe *p)
{
    return registered(p, read_c);
}

static fsdp_status state_load(probe *p)
{
    return registered(p, load_state_c);
}

/* Letters: what states are described with. Calls of one letter are allowed in the same states. */
static const struct {
    char letter;
    const char *name;
    fsdp_status (*call)(probe *p);
} calls[] = {
    { 'f', "fsdp_unit_begin_forward", begin_forward },   { 'F', "fsdp_unit_end_forward", end_forward },
    { 'e', "fsdp_unit_begin_recompute", begin_recompute }, { 'E', "fsdp_unit_end_recompute", end_recompute },
    { 'b', "fsdp_unit_begin_backward", begin_backward }, { 'B', "fsdp_unit_end_backward", end_backward },
    { 'p', "fsdp_pass_begin", pass_begin },              { 'P', "fsdp_pass_end", pass_end },
    { 'r', "fsdp_unit_summon_begin", summon_read },      { 'w', "fsdp_unit_summon_begin", summon_write },
    { 'S', "fsdp_unit_summon_end", summon_end },         { 'R', "fsdp_unit_summon_begin", read_param },
    { 'k', "fsdp_unit_summon_cancel", summon_cancel },   { 'q', "fsdp_unit_check_replicas", check_replicas },
    { 'i', "fsdp_unit_init", init },                     { 't', "fsdp_step_begin", step_begin },
    { 'T', "fsdp_step_end", step_end },                  { 'C', "fsdp_step_end", step_cancel },
    { 'n', "fsdp_step_end", step_norm },                 { 'o', "fsdp_step_begin", optim_step },
    { 'z', "fsdp_unit_zero_grad", zero_grad },           { 'x', "fsdp_unit_param", param },
    { 'g', "fsdp_unit_grad", grad },                     { 's', "fsdp_unit_summoned", summoned },
    { 'c', "fsdp_unit_create", create },                 { 'K', "fsdp_unit_set_frozen", freeze },
    { 'Q', "fsdp_unit_read_grad", read_grad },           { 'W', "fsdp_units_rewrite", rewrite },
    { 'a', "fsdp_ema_swap_in", swap_in },                { 'A', "fsdp_ema_swap_out", swap_out },
    { 'U', "fsdp_unit_unshard", unshard },
    { 'D', "fsdp_unit_reshard", reshard },               { 'H', "fsdp_unit_prefetch", prefetch },
    { 'L', "fsdp_unit_set_prefetch", set_prefetch },
    { 'v', "fsdp_checkpoint_save", save },               { 'v', "fsdp_state_read", state_read },
    { 'i', "fsdp_checkpoint_load", load },               { 'i', "fsdp_state_load", state_load },
    { 'h', "fsdp_unit_set_grad_hooks", hooks },
};
enum { CALLS = sizeof(calls) / sizeof(calls[0]) };

/* ---- the tables ---- */

static const char *const event_calls[] = {
#define ROW(e, call, needs, does) call,
    FSDPI_EVENT_MAP(ROW)
#undef ROW
};

static const struct {
    const char *not_so, *way_out;
} conditions[] = {
#define ROW(c, not_so, way_out) { not_so, way_out },
    FSDPI_CONDITION_MAP(ROW)
#undef ROW
};

/* Which conditions were seen to fail: by rank 0, in memory that the parent sees. */
typedef struct seen {
    bool failed[FSDPI_EVENT_COUNT][FSDPI_CONDITION_COUNT];
    float param[2][8][1024]; /* without and with wrong calls, as each rank reads them */
    int probes;
} seen;

static void note(seen *s, const char *message)
{
    for (int e = 0; e < FSDPI_EVENT_COUNT; e++) {
        size_t n = strlen(event_calls[e]);
        if (strncmp(message, event_calls[e], n) != 0 || message[n] != ':') continue;
        for (int c = 0; c < FSDPI_CONDITION_COUNT; c++)
            if (strstr(message, conditions[c].not_so) != NULL && strstr(message, conditions[c].way_out) != NULL) s->failed[e][c] = true;
    }
}

/* ---- states ---- */

typedef struct run {
    mini m;
    bool wrong_calls; /* of this rank */
    seen *seen;       /* rank 0's */
    fsdp_pass *ended;
    fsdp_ema *ema;
} run;

static fsdp_status try_call(run *r, probe p, int k, const char *state)
{
    char before[MINI_UNITS][160];
    for (int u = 0; u < MINI_UNITS; u++) snprintf(before[u], sizeof(before[u]), "%s", fsdp_unit_state(r->m.unit[u]));
    fsdp_status st = calls[k].call(&p);
    const char *said = fsdp_last_error_message();
    if (st != FSDP_ERR_STATE) FSDP_FAIL(FSDP_ERR_INTERNAL, "%s, %s: %s (%s)", state, calls[k].name, fsdp_status_name(st), said);
    bool others = strchr("otPp", calls[k].letter) != NULL; /* these are about several units, and name one */
    if (strncmp(said, calls[k].name, strlen(calls[k].name)) != 0 || strstr(said, others ? "unit \"" : "\"a\"") == NULL)
        FSDP_FAIL(FSDP_ERR_INTERNAL, "%s, %s: it names no call or no unit: %s", state, calls[k].name, said);
    if (strstr(said, "first") == NULL && strstr(said, "summon") == NULL && strstr(said, "begin") == NULL && strstr(said, "needs") == NULL)
        FSDP_FAIL(FSDP_ERR_INTERNAL, "%s, %s: no way out: %s", state, calls[k].name, said);
    if (r->seen != NULL) note(r->seen, said);
    for (int u = 0; u < MINI_UNITS; u++)
        if (strcmp(before[u], fsdp_unit_state(r->m.unit[u])) != 0)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "%s, %s: unit %d was %s and is %s", state, calls[k].name, u, before[u], fsdp_unit_state(r->m.unit[u]));
    return FSDP_OK;
}

/* What is done by hand depends on little. */
static bool is_legal_by_hand(const fsdp_unit *u, char letter)
{
    if (letter == 'U' || letter == 'H') return !u->in_step;
    if (letter == 'D') return u->holders == 0;
    return letter == 'L' && u->rt->passes == NULL;
}

/* Makes every call that is not in `legal`. A pass that is NULL: with NULL, and with one that has ended. */
static fsdp_status try_wrong(run *r, fsdp_pass *pass, const char *legal, const char *state)
{
    if (!r->wrong_calls) return FSDP_OK;
    for (int k = 0; k < CALLS; k++) {
        if (strchr(legal, calls[k].letter) != NULL || is_legal_by_hand(r->m.unit[MINI_A], calls[k].letter)) continue;
        bool takes_pass = strchr("fFeEbB", calls[k].letter) != NULL;
        if (pass == NULL && calls[k].letter == 'P') continue; /* there is none to end */
        FSDP_TRY(try_call(r, (probe){ &r->m, r->m.unit[MINI_A], pass, r->ema }, k, state));
        if (pass == NULL && takes_pass && r->ended != NULL) FSDP_TRY(try_call(r, (probe){ &r->m, r->m.unit[MINI_A], r->ended, r->ema }, k, state));
        if (r->seen != NULL) r->seen->probes++;
    }
    return FSDP_OK;
}

/* Whether the parameters of a unit that is not in use may be read: where they are kept. */
static const char *with(const char *legal, bool readable)
{
    static _Thread_local char text[32];
    snprintf(text, sizeof(text), "%s%s", legal, readable ? "x" : "");
    return text;
}

static fsdp_status one_pass(run *r, int64_t leaf)
{
    mini *m = &r->m;
    fsdp_mode mode = fsdp_unit_mode(m->unit[MINI_A]);
    fsdp_pass *pass;
    bool kept = mode != FSDP_MODE_FULL;
    FSDP_TRY(fsdp_pass_begin(&pass, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(try_wrong(r, pass, with("fpP", mode == FSDP_MODE_NONE || mode == FSDP_MODE_OPTIMIZER), "a pass is open"));
    FSDP_TRY(mini_run(m, pass, "[0 [1", leaf));
    FSDP_TRY(try_wrong(r, pass, "fFpx", "its forward is open"));
    FSDP_TRY(mini_run(m, pass, "]1", leaf));
    FSDP_TRY(try_wrong(r, pass, with("febp", kept), "its forward has ended"));
    FSDP_TRY(fsdp_unit_begin_recompute(m->unit[MINI_A], pass));
    FSDP_TRY(try_wrong(r, pass, "feEbpx", "its recompute is open"));
    FSDP_TRY(fsdp_unit_end_recompute(m->unit[MINI_A], pass));
    FSDP_TRY(try_wrong(r, pass, "febpx", "its recompute has ended"));
    FSDP_TRY(mini_run(m, pass, "F2 F3 F5 ]0 {0 B5 B3 B2 {1", leaf));
    FSDP_TRY(try_wrong(r, pass, "feBpxg", "its backward is open"));
    FSDP_TRY(mini_run(m, pass, "}1", leaf));
    bool whole = mode == FSDP_MODE_OPTIMIZER || mode == FSDP_MODE_NONE;
    FSDP_TRY(try_wrong(r, pass, with("fp", whole), "its backward has ended"));
    FSDP_TRY(mini_run(m, pass, "}0", leaf));
    FSDP_TRY(try_wrong(r, pass, with("fpP", whole), "all backwards have ended"));
    r->ended = pass;
    return fsdp_pass_end(pass);
}

static fsdp_status two_passes(run *r, int64_t leaf)
{
    mini *m = &r->m;
    fsdp_mode mode = fsdp_unit_mode(m->unit[MINI_A]);
    bool whole = mode == FSDP_MODE_OPTIMIZER || mode == FSDP_MODE_NONE;
    fsdp_pass *first, *second;
    FSDP_TRY(fsdp_pass_begin(&first, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, first, "F1 F1", leaf));
    FSDP_TRY(fsdp_pass_begin(&second, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(m, second, "F1 {1", leaf + 1000));
    FSDP_TRY(try_wrong(r, first, "fepxgP", "another pass is in its backward"));
    FSDP_TRY(mini_run(m, second, "}1", leaf + 1000));
    FSDP_TRY(try_wrong(r, first, with("fepP", whole), "another pass has its gradients"));
    FSDP_TRY(fsdp_pass_end(second));
    FSDP_TRY(mini_run(m, first, "B1", leaf));
    FSDP_TRY(try_wrong(r, first, with("febpP", whole || mode == FSDP_MODE_GRAD_OP), "one of two backwards has ended"));
    FSDP_TRY(mini_run(m, first, "B1", leaf));
    r->ended = first;
    return fsdp_pass_end(first);
}

static fsdp_status evaluation(run *r, int64_t leaf)
{
    mini *m = &r->m;
    fsdp_mode mode = fsdp_unit_mode(m->unit[MINI_A]);
    bool whole = mode == FSDP_MODE_OPTIMIZER || mode == FSDP_MODE_NONE;
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, m->comm, FSDP_PASS_EVAL));
    FSDP_TRY(mini_run(m, pass, "[1", leaf));
    FSDP_TRY(try_wrong(r, pass, "fFpx", "its forward is open, in an evaluation"));
    FSDP_TRY(mini_run(m, pass, "]1", leaf));
    FSDP_TRY(try_wrong(r, pass, with("fpP", whole), "its forward has ended, in an evaluation"));
    r->ended = pass;
    return fsdp_pass_end(pass);
}

static fsdp_status summons(run *r)
{
    mini *m = &r->m;
    FSDP_TRY(fsdp_unit_summon_begin(m->unit[MINI_A], NULL));
    FSDP_TRY(try_wrong(r, NULL, "rSkRzxcqKvh", "it is summoned"));
    FSDP_TRY(fsdp_unit_summon_begin(m->unit[MINI_A], NULL));
    FSDP_TRY(try_wrong(r, NULL, "rSkRzxcqKvh", "it is summoned twice"));
    FSDP_TRY(fsdp_unit_summon_end(m->unit[MINI_A]));
    FSDP_TRY(fsdp_unit_summon_end(m->unit[MINI_A]));
    FSDP_TRY(fsdp_unit_summon_begin(m->unit[MINI_A], &(fsdp_unit_summon_opts){ .writeback = true }));
    FSDP_TRY(try_wrong(r, NULL, "rwSkRzxscqKvh", "it is summoned with writeback"));
    return fsdp_unit_summon_end(m->unit[MINI_A]);
}

typedef struct update_args {
    float *p;
    const float *g;
    int64_t numel;
} update_args;

static fsdp_status k_update(const fsdp_kernel *k, const void *args)
{
    const update_args *a = args;
    float *p = fsdp_kernel_ptr(k, a->p);
    const float *g = fsdp_kernel_ptr(k, a->g);
    for (int64_t i = 0; i < a->numel; i++) p[i] -= 0.01f * g[i];
    return FSDP_OK;
}

static fsdp_status step(run *r)
{
    mini *m = &r->m;
    FSDP_TRY(fsdp_step_begin(mini_list(m)));
    FSDP_TRY(try_wrong(r, NULL, with("TCncQ", fsdp_unit_mode(m->unit[MINI_A]) == FSDP_MODE_NONE), "it is in a step"));
    for (int u = 0; u < MINI_UNITS; u++) {
        const fsdp_slice *s;
        int n;
        fsdp_unit_slices(m->unit[u], &s, &n);
        for (int i = 0; i < n; i++)
            if (s[i].grad != NULL)
                FSDP_TRY(fsdp_stream_launch(fsdp_unit_stream(m->unit[u]), k_update, &(update_args){ s[i].master, s[i].grad, s[i].numel }, sizeof(update_args)));
    }
    return fsdp_step_end(mini_list(m));
}

static fsdp_status averages(run *r, bool none)
{
    FSDP_TRY(fsdp_ema_swap_in(r->ema));
    FSDP_TRY(try_wrong(r, NULL, with("prwRzcqAh", none), "its average is in its place"));
    return fsdp_ema_swap_out(r->ema);
}

static fsdp_status live(fsdp_comm *comm, const corner *c, bool wrong_calls, float *out)
{
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    /* All ranks make the wrong calls, or one alone does. */
    run r = { .wrong_calls = wrong_calls && (c->arg == NULL || rank == 0), .seen = wrong_calls && rank == 0 ? c->shared : NULL };
    FSDP_TRY(mini_create(&r.m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    bool none = c->mode == FSDP_MODE_NONE;
    FSDP_TRY(fsdp_ema_create(&r.ema, (fsdp_unit_list){ &r.m.unit[MINI_A], 1 }));
    for (int s = 0; s < 2; s++) {
        FSDP_TRY(try_wrong(&r, NULL, with("prwRiztocqKWavh", none), "it is idle"));
        FSDP_TRY(summons(&r));
        FSDP_TRY(one_pass(&r, s * 2 * size + rank));
        FSDP_TRY(try_wrong(&r, NULL, with("prwRiztocqWavh", none || c->mode == FSDP_MODE_OPTIMIZER), "it has gradients"));
        FSDP_TRY(averages(&r, none));
        FSDP_TRY(two_passes(&r, (s * 2 + 1) * size + rank));
        FSDP_TRY(summons(&r));
        FSDP_TRY(evaluation(&r, 77)); /* mode optimizer has them whole when the step begins */
        FSDP_TRY(step(&r));
    }
    FSDP_TRY(mini_read(&r.m, out));
    fsdp_ema_destroy(r.ema);
    mini_destroy(&r.m);
    return FSDP_OK;
}

static fsdp_status both(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    seen *s = c->shared;
    for (int wrong = 0; wrong < 2; wrong++) FSDP_TRY(live(comm, c, wrong, s->param[wrong][fsdp_comm_rank(comm)]));
    return FSDP_OK;
}

static seen all;

static void compare(const corner *c)
{
    const seen *s = c->shared;
    if (s->probes < 100) fail_msg("%s: %d wrong calls", corner_name(c), s->probes);
    for (int r = 0; r < c->ranks; r++)
        if (memcmp(s->param[0][0], s->param[0][r], sizeof(s->param[0][r])) != 0 || memcmp(s->param[0][0], s->param[1][r], sizeof(s->param[0][r])) != 0)
            fail_msg("%s: other bits", corner_name(c));
    for (int e = 0; e < FSDPI_EVENT_COUNT; e++)
        for (int k = 0; k < FSDPI_CONDITION_COUNT; k++) all.failed[e][k] |= s->failed[e][k];
}

static void test_wrong_calls_change_nothing(void **state)
{
    (void)state;
    static const int ranks[] = { 1, 3, 0 };
    in_corners(both, &(corners){ .ranks = ranks, .all_modes = true, .shared = sizeof(seen), .after = compare });
    in_corners(both, &(corners){ .ranks = (const int[]){ 2, 0 }, .all_modes = true, .shared = sizeof(seen), .after = compare, .arg = "rank 0 alone" });
}

static void test_every_condition_was_seen_to_fail(void **state)
{
    (void)state;
    int missing = 0;
    for (int e = 0; e < FSDPI_EVENT_COUNT; e++) {
        assert_string_equal(event_calls[e], fsdpi_event_call((fsdpi_event)e));
        for (int c = 0; c < FSDPI_CONDITION_COUNT; c++) {
            bool needed = fsdpi_event_conditions((fsdpi_event)e) >> c & 1;
            if (needed && !all.failed[e][c]) print_message("%s: never failed with \"%s\"\n", event_calls[e], conditions[c].not_so);
            missing += needed && !all.failed[e][c];
        }
    }
    assert_int_equal(missing, 0);
}

/* ---- the log ---- */

typedef struct story {
    int lines;
    char line[64][240];
} story;

static _Thread_local story *told; /* of the rank that this thread is; NULL: it does not listen */

static void tell(fsdp_log_level level, const char *text, void *arg)
{
    (void)arg;
    if (told == NULL || level != FSDP_LOG_DEBUG) return;
    if (told->lines < 64) snprintf(told->line[told->lines], sizeof(told->line[0]), "%s", text);
    told->lines++;
}

#define SECOND_COLUMN(e, name) name,
static const char *const residency_names[] = { FSDPI_RESIDENCY_MAP(SECOND_COLUMN) };
static const char *const gradient_names[] = { FSDPI_GRADIENT_MAP(SECOND_COLUMN) };

/* "unit "a": residency sharded -> whole (CALL, pass 3)": whether it is a move of unit `name` from states[*now], in this call; then *now is where to. */
static bool is_move(const char *line, const char *name, const char *what, const char *const *states, int count, int *now, const char *call)
{
    char text[240];
    for (int to = 0; to < count; to++) {
        snprintf(text, sizeof(text), "unit \"%s\": %s%s -> %s (%s)", name, what, states[*now], states[to], call);
        if (to == *now || strcmp(line, text) != 0) continue;
        *now = to;
        return true;
    }
    return false;
}

/* From where units were, the lines lead to where they are: none is missing, none too many, each in its order. call: that was made, as lines have it. */
static fsdp_status follow(const mini *m, fsdpi_residency *r, fsdpi_gradient *g, const char *call)
{
    rank_check(told->lines <= 64);
    for (int i = 0; i < told->lines; i++) {
        const char *line = told->line[i];
        bool known = strstr(line, ": open ") != NULL && strstr(line, call) != NULL;
        for (int u = 0; u < MINI_UNITS && !known; u++) {
            const char *name = fsdp_unit_name(m->unit[u]);
            int from = (int)r[u], to = from, grad = (int)g[u], next = grad;
            if (is_move(line, name, "residency ", residency_names, 4, &to, call))
                known = fsdpi_residency_may_move(r[u], (fsdpi_residency)to) || (from == FSDPI_KEPT && to == FSDPI_AHEAD); /* on its way to WHOLE */
            else if (is_move(line, name, "", gradient_names, 3, &next, call)) known = fsdpi_gradient_may_move(g[u], (fsdpi_gradient)next);
            r[u] = (fsdpi_residency)to;
            g[u] = (fsdpi_gradient)next;
        }
        if (!known) FSDP_FAIL(FSDP_ERR_INTERNAL, "%s: no move from there: %s", call, line);
    }
    for (int u = 0; u < MINI_UNITS; u++)
        if (r[u] != m->unit[u]->residency || g[u] != m->unit[u]->gradient)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "%s: unit %d: the log ends at %s, %s; it is %s", call, u, residency_names[r[u]], gradient_names[g[u]], fsdp_unit_state(m->unit[u]));
    told->lines = 0;
    return FSDP_OK;
}

static const char *call_of(char token, uint64_t pass)
{
    static _Thread_local char text[64];
    static const struct {
        char token;
        const char *call;
    } names[] = { { '[', "unit_begin_forward" }, { ']', "unit_end_forward" }, { '{', "unit_begin_backward" }, { '}', "unit_end_backward" }, { '.', "pass_end" },
                  { '!', "pass_cancel" }, { 'u', "unit_unshard" }, { 'd', "unit_reshard" }, { 'a', "unit_prefetch" } };
    for (size_t k = 0; k < sizeof(names) / sizeof(names[0]); k++) {
        if (names[k].token != token) continue;
        if (strchr("uda", token) != NULL) snprintf(text, sizeof(text), "fsdp_%s", names[k].call); /* in a pass or not: it is not about one */
        else snprintf(text, sizeof(text), "fsdp_%s, pass %llu", names[k].call, (unsigned long long)pass);
        return text;
    }
    return "no such token";
}

/* ---- moves ---- */

typedef struct moves {
    bool residency[4][4], gradient[3][3];
} moves;

/* Makes a call, and notes from which states to which it takes each unit. */
static fsdp_status watch(mini *m, moves *made, fsdp_pass *pass, const char *tokens)
{
    uint64_t number = pass->number;
    for (const char *s = tokens; *s != '\0'; s += s[1] == '\0' ? 1 : 2) {
        if (*s == ' ') s++;
        fsdpi_residency r[MINI_UNITS];
        fsdpi_gradient g[MINI_UNITS];
        for (int u = 0; u < MINI_UNITS; u++) {
            r[u] = m->unit[u]->residency;
            g[u] = m->unit[u]->gradient;
        }
        const char *call = call_of(*s, number);
        if (*s == '.') FSDP_TRY(fsdp_pass_end(pass));
        else if (*s == '!') FSDP_TRY(fsdp_pass_cancel(pass));
        else if (*s == 'u') FSDP_TRY(fsdp_unit_unshard(m->unit[s[1] - '0']));
        else if (*s == 'd') FSDP_TRY(fsdp_unit_reshard(m->unit[s[1] - '0']));
        else if (*s == 'a') FSDP_TRY(fsdp_unit_prefetch(m->unit[s[1] - '0']));
        else FSDP_TRY(mini_run(m, pass, (char[]){ s[0], s[1], '\0' }, 0));
        for (int u = 0; u < MINI_UNITS; u++) {
            made->residency[r[u]][m->unit[u]->residency] = true;
            made->gradient[g[u]][m->unit[u]->gradient] = true;
        }
        if (told != NULL) FSDP_TRY(follow(m, r, g, call));
    }
    return FSDP_OK;
}

static fsdp_status walk(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    static const char *const passes[] = {
        "[0[1]1[2]2]0{0{2}2{1}1}0.", "[0[1]1[2]2]0{0{2}2{1}1}0.", /* the second time it is known what comes */
        "[0[1!",                                                   /* and what then does not come */
        "[1]1{1}1[1]1{1}1.",                                       /* two rounds */
        "u1d1a1u1[1]1d1{1}1.",                                     /* by hand */
        "[0[1]1[2]2]0{0{2}2!", "[1]1{1!", "[1]1[1]1{1}1.", "[1]1{1}1!",
    };
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    for (size_t i = 0; i < sizeof(passes) / sizeof(passes[0]); i++) {
        fsdp_pass *pass;
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(watch(&m, (moves *)c->shared + fsdp_comm_rank(comm), pass, passes[i]));
    }
    mini_destroy(&m);
    return FSDP_OK;
}

static moves all_moves;

static void collect(const corner *c)
{
    const bool *from = c->shared;
    for (size_t i = 0; i < sizeof(moves); i++) ((bool *)&all_moves)[i] |= from[i];
}

static void test_all_moves_of_the_tables_and_no_others(void **state)
{
    (void)state;
    in_corners(walk, &(corners){ .ranks = (const int[]){ 1, 0 }, .all_modes = true, .threads_only = true, .shared = sizeof(moves), .after = collect });
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            if (a != b && all_moves.residency[a][b] != fsdpi_residency_may_move((fsdpi_residency)a, (fsdpi_residency)b))
                fail_msg("residency %d -> %d %s", a, b, all_moves.residency[a][b] ? "happens, but is in no table" : "never happened");
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 3; b++)
            if (a != b && all_moves.gradient[a][b] != fsdpi_gradient_may_move((fsdpi_gradient)a, (fsdpi_gradient)b))
                fail_msg("gradient %d -> %d %s", a, b, all_moves.gradient[a][b] ? "happens, but is in no table" : "never happened");
}

static fsdp_status walk_and_listen(fsdp_comm *comm, void *arg)
{
    story *s = calloc(1, sizeof(*s));
    rank_check(s != NULL);
    told = s;
    fsdp_status st = walk(comm, arg);
    told = NULL;
    free(s);
    return st;
}

static void test_moves_are_logged(void **state)
{
    (void)state;
    fsdp_log_set(FSDP_LOG_DEBUG, tell, NULL);
    in_corners(walk_and_listen, &(corners){ .ranks = (const int[]){ 1, 2, 0 }, .all_modes = true, .shared = 2 * sizeof(moves) });
    fsdp_log_set(FSDP_LOG_DEBUG, NULL, NULL);
}

static const char *const a_life[] = {
    "unit \"u\": residency sharded -> gathered ahead (fsdp_unit_summon_begin)",
    "unit \"u\": residency gathered ahead -> whole (fsdp_unit_summon_begin)",
    "unit \"u\": open summons 0 -> 1 (fsdp_unit_summon_begin)",
    "unit \"u\": open summons 1 -> 0 (fsdp_unit_summon_end)",
    "unit \"u\": residency whole -> kept whole (fsdp_unit_summon_end)",
    "unit \"u\": residency kept whole -> sharded (fsdp_unit_summon_end)",
    "unit \"u\": residency sharded -> gathered ahead (fsdp_unit_begin_forward, pass 0)",
    "unit \"u\": residency gathered ahead -> whole (fsdp_unit_begin_forward, pass 0)",
    "unit \"u\": open forwards 0 -> 1 (fsdp_unit_begin_forward, pass 0)",
    "unit \"u\": open forwards 1 -> 0 (fsdp_unit_end_forward, pass 0)",
    "unit \"u\": residency whole -> kept whole (fsdp_unit_end_forward, pass 0)",
    "unit \"u\": residency kept whole -> whole (fsdp_unit_begin_recompute, pass 0)",
    "unit \"u\": open recomputes 0 -> 1 (fsdp_unit_begin_recompute, pass 0)",
    "unit \"u\": open recomputes 1 -> 0 (fsdp_unit_end_recompute, pass 0)",
    "unit \"u\": residency whole -> kept whole (fsdp_unit_end_recompute, pass 0)",
    "unit \"u\": no gradient in flight -> gradient being written (fsdp_unit_begin_backward, pass 0)",
    "unit \"u\": residency kept whole -> whole (fsdp_unit_begin_backward, pass 0)",
    "unit \"u\": open backwards 0 -> 1 (fsdp_unit_begin_backward, pass 0)",
    "unit \"u\": open backwards 1 -> 0 (fsdp_unit_end_backward, pass 0)",
    "unit \"u\": residency whole -> kept whole (fsdp_unit_end_backward, pass 0)",
    "unit \"u\": residency kept whole -> sharded (fsdp_unit_end_backward, pass 0)",
    "unit \"u\": gradient being written -> gradient reduced, its pass not ended (fsdp_unit_end_backward, pass 0)",
    "unit \"u\": gradient reduced, its pass not ended -> no gradient in flight (fsdp_pass_end, pass 0)",
    "unit \"u\": open steps 0 -> 1 (fsdp_step_begin)",
    "unit \"u\": open steps 1 -> 0 (fsdp_step_end)",
};

static void live_once(fsdp_comm *comm, fsdp_unit *u)
{
    fsdp_pass *pass;
    assert_ok(fsdp_unit_summon_begin(u, NULL));
    assert_ok(fsdp_unit_summon_end(u));
    assert_ok(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    assert_ok(fsdp_unit_begin_forward(u, pass));
    assert_ok(fsdp_unit_end_forward(u, pass));
    assert_ok(fsdp_unit_begin_recompute(u, pass));
    assert_ok(fsdp_unit_end_recompute(u, pass));
    assert_ok(fsdp_unit_begin_backward(u, pass));
    assert_ok(fsdp_unit_end_backward(u, pass));
    assert_ok(fsdp_pass_end(pass));
    assert_ok(fsdp_step_begin((fsdp_unit_list){ &u, 1 }));
    assert_ok(fsdp_step_end((fsdp_unit_list){ &u, 1 }));
}

static void test_a_life_in_the_log(void **state)
{
    (void)state;
    static story s;
    fsdp_comm *comm;
    fsdp_unit *u;
    enum { LINES = sizeof(a_life) / sizeof(a_life[0]) };
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(fsdp_unit_create(&u, comm, &(fsdp_param){ "w", 1, { 3 } }, 1, &(fsdp_unit_opts){ .name = "u" }));
    assert_ok(fsdp_unit_init(u, never, NULL));
    told = &s;
    fsdp_log_set(FSDP_LOG_DEBUG, tell, NULL);
    live_once(comm, u);
    for (int i = 0; i < LINES && i < s.lines; i++) assert_string_equal(s.line[i], a_life[i]);
    assert_int_equal(s.lines, LINES);
    fsdp_log_set(FSDP_LOG_INFO, tell, NULL); /* who wants no details gets none */
    live_once(comm, u);
    assert_int_equal(s.lines, LINES);
    fsdp_log_set(FSDP_LOG_DEBUG, NULL, NULL);
    told = NULL;
    fsdp_unit_destroy(u);
    fsdp_comm_destroy(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wrong_calls_change_nothing),
        cmocka_unit_test(test_every_condition_was_seen_to_fail),
        cmocka_unit_test(test_all_moves_of_the_tables_and_no_others),
        cmocka_unit_test(test_moves_are_logged),
        cmocka_unit_test(test_a_life_in_the_log),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
