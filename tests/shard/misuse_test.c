/* SPDX-License-Identifier: MIT
 *
 * Calls from within a call, and from two threads at once: each is FSDP_ERR_STATE, names the call that is under way, itself and the
 * way out, and changes nothing: not what units say of themselves, not the other ranks, not one bit of the training around it. What
 * only reads may be read in a callback; other communicators may be used there; and a communicator may be handed from one thread
 * to another, between any two calls. */
#include "support/logged.h"
#include "support/mini.h"
#include "support/ranks.h"

#include "base/error.h"
#include "comm/comm.h"
#include "shard/unit.h"

#include <fsdp/average.h>
#include <fsdp/gather.h>
#include <fsdp/wrap.h>

#include <pthread.h>
#include <sched.h>

/* ---- the calls ---- */

typedef struct probe {
    mini *m;
    fsdp_unit *unit;
    fsdp_pass *pass; /* that is open; NULL: none */
    fsdp_ema *ema;
    fsdp_checkpoint *checkpoint;
    bool watch;    /* the rest of the rank stands still meanwhile: so it can be seen that nothing changes */
    bool readable; /* MINI_B is whole */
    int tried;
    char wrong[400]; /* what was first seen to be wrong */
} probe;

static fsdp_status barrier(probe *p)
{
    return fsdp_comm_barrier(p->m->comm);
}

static fsdp_status sum_exact(probe *p)
{
    double x = 1;
    return fsdp_comm_sum_exact(p->m->comm, &x, 1);
}

static fsdp_status sum_exact_sums(probe *p)
{
    fsdp_exact_sum s = { 0 };
    return fsdp_comm_sum_exact_sums(p->m->comm, &s, 1);
}

static fsdp_status most(probe *p)
{
    double x = 1;
    return fsdp_comm_max(p->m->comm, &x, 1);
}

static fsdp_status all_gather(probe *p)
{
    int64_t all[8];
    return fsdp_comm_all_gather(p->m->comm, &(int64_t){ 1 }, sizeof(int64_t), all);
}

static fsdp_status broadcast(probe *p)
{
    int64_t x = 1;
    return fsdp_comm_broadcast(p->m->comm, &x, sizeof(x), 0);
}

static fsdp_status stop_agreed(probe *p)
{
    bool stop;
    return fsdp_comm_stop_agreed(p->m->comm, &stop);
}

static fsdp_status ask_more(probe *p)
{
    int first;
    return fsdp_comm_ask_more(p->m->comm, true, &first);
}

static fsdp_status agree(probe *p)
{
    return fsdp_comm_agree(p->m->comm, FSDP_OK);
}

static fsdp_status split(probe *p)
{
    fsdp_comm *sub;
    return fsdp_comm_split(p->m->comm, 0, 0, &sub);
}

static fsdp_status reset(probe *p)
{
    return fsdp_comm_reset(p->m->comm);
}

static fsdp_status cap(probe *p)
{
    return fsdp_comm_set_max_unsharded(p->m->comm, 1 << 20);
}

static fsdp_status create(probe *p)
{
    fsdp_unit *u;
    return fsdp_unit_create(&u, p->m->comm, &(fsdp_param){ "w", 1, { 3 } }, 1, NULL);
}

static void never(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)i;
    (void)arg;
    *value = -1;
}

static fsdp_status never_fill(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)name;
    (void)param;
    (void)first;
    (void)arg;
    for (int64_t i = 0; i < numel; i++) out[i] = -1;
    return FSDP_OK;
}

static fsdp_status init(probe *p)
{
    return fsdp_unit_init(p->unit, never, NULL);
}

static fsdp_status fill(probe *p)
{
    return fsdp_unit_fill(p->unit, never_fill, NULL);
}

static fsdp_status fill_from(probe *p)
{
    return fsdp_unit_fill_from(p->unit, 0, never_fill, NULL);
}

static fsdp_status check_replicas(probe *p)
{
    return fsdp_unit_check_replicas(p->unit);
}

static fsdp_status broadcast_from(probe *p)
{
    return fsdp_unit_broadcast_from(p->unit, 0);
}

static fsdp_status set_frozen(probe *p)
{
    return fsdp_unit_set_frozen(p->unit, 0, true);
}

static fsdp_status pass_begin(probe *p)
{
    fsdp_pass *pass;
    return fsdp_pass_begin(&pass, p->m->comm, FSDP_PASS_TRAIN);
}

static fsdp_status pass_join(probe *p)
{
    return fsdp_pass_join(p->m->comm, fsdp_comm_rank(p->m->comm) == 0);
}

static fsdp_status set_sync(probe *p)
{
    return fsdp_pass_set_sync(p->pass, false);
}

static fsdp_status pass_end(probe *p)
{
    return fsdp_pass_end(p->pass);
}

static fsdp_status pass_cancel(probe *p)
{
    return fsdp_pass_cancel(p->pass);
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

static fsdp_status summon_begin(probe *p)
{
    return fsdp_unit_summon_begin(p->unit, NULL);
}

static fsdp_status summon_end(probe *p)
{
    return fsdp_unit_summon_end(p->unit);
}

static fsdp_status summon_cancel(probe *p)
{
    return fsdp_unit_summon_cancel(p->unit);
}

static fsdp_status read_param(probe *p)
{
    return fsdp_unit_read_param(p->unit, 0, NULL);
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
    return fsdp_unit_set_prefetch(p->unit, NULL, NULL);
}

static fsdp_status set_hooks(probe *p)
{
    return fsdp_unit_set_grad_hooks(p->unit, NULL);
}

static fsdp_status zero_grad(probe *p)
{
    return fsdp_unit_zero_grad(p->unit);
}

static fsdp_status read_grad(probe *p)
{
    return fsdp_unit_read_grad(p->unit, 0, NULL);
}

static fsdp_status step_begin(probe *p)
{
    return fsdp_step_begin(mini_list(p->m));
}

static fsdp_status step_end(probe *p)
{
    return fsdp_step_end(mini_list(p->m));
}

static fsdp_status step_cancel(probe *p)
{
    return fsdp_step_cancel(mini_list(p->m));
}

static fsdp_status step_norm(probe *p)
{
    double norm;
    return fsdp_step_norm(mini_list(p->m), NULL, &norm, NULL);
}

static fsdp_status write_nothing(fsdp_unit *unit, const fsdp_slice *slices, int count, void *arg)
{
    (void)unit;
    (void)slices;
    (void)count;
    (void)arg;
    return FSDP_OK;
}

static fsdp_status rewrite(probe *p)
{
    return fsdp_units_rewrite(mini_list(p->m), write_nothing, NULL);
}

static fsdp_status optim_step(probe *p)
{
    return fsdp_optim_step(p->m->optim, NULL);
}

static fsdp_status swap_in(probe *p)
{
    return fsdp_ema_swap_in(p->ema);
}

static fsdp_status ema_create(probe *p)
{
    fsdp_ema *e;
    return fsdp_ema_create(&e, mini_list(p->m));
}

static fsdp_status ema_update(probe *p)
{
    return fsdp_ema_update(p->ema, 0.5f);
}

static fsdp_status optim_create(probe *p)
{
    fsdp_optim *o;
    return fsdp_optim_create_sgd(&o, mini_list(p->m), &(fsdp_sgd_opts){ .lr = 0.5f });
}

static fsdp_status save(probe *p)
{
    return fsdp_checkpoint_save(p->checkpoint, "/proc/nowhere", 1, 0);
}

static const struct {
    const char *name;
    fsdp_status (*call)(probe *p);
    bool takes_pass;
} calls[] = {
    { "fsdp_comm_barrier", barrier, false },
    { "fsdp_comm_sum_exact", sum_exact, false },
    { "fsdp_comm_sum_exact_sums", sum_exact_sums, false },
    { "fsdp_comm_max", most, false },
    { "fsdp_comm_all_gather", all_gather, false },
    { "fsdp_comm_broadcast", broadcast, false },
    { "fsdp_comm_stop_agreed", stop_agreed, false },
    { "fsdp_comm_ask_more", ask_more, false },
    { "fsdp_comm_agree", agree, false },
    { "fsdp_comm_split", split, false },
    { "fsdp_comm_reset", reset, false },
    { "fsdp_comm_set_max_unsharded", cap, false },
    { "fsdp_unit_create", create, false },
    { "fsdp_unit_init", init, false },
    { "fsdp_unit_fill", fill, false },
    { "fsdp_unit_fill_from", fill_from, false },
    { "fsdp_unit_check_replicas", check_replicas, false },
    { "fsdp_unit_broadcast_from", broadcast_from, false },
    { "fsdp_unit_set_frozen", set_frozen, false },
    { "fsdp_pass_begin", pass_begin, false },
    { "fsdp_pass_join", pass_join, false },
    { "fsdp_pass_set_sync", set_sync, true },
    { "fsdp_pass_end", pass_end, true },
    { "fsdp_pass_cancel", pass_cancel, true },
    { "fsdp_unit_begin_forward", begin_forward, false },
    { "fsdp_unit_end_forward", end_forward, false },
    { "fsdp_unit_begin_recompute", begin_recompute, false },
    { "fsdp_unit_end_recompute", end_recompute, false },
    { "fsdp_unit_begin_backward", begin_backward, false },
    { "fsdp_unit_end_backward", end_backward, false },
    { "fsdp_unit_summon_begin", summon_begin, false },
    { "fsdp_unit_summon_end", summon_end, false },
    { "fsdp_unit_summon_cancel", summon_cancel, false },
    { "fsdp_unit_read_param", read_param, false },
    { "fsdp_unit_unshard", unshard, false },
    { "fsdp_unit_reshard", reshard, false },
    { "fsdp_unit_prefetch", prefetch, false },
    { "fsdp_unit_set_prefetch", set_prefetch, false },
    { "fsdp_unit_set_grad_hooks", set_hooks, false },
    { "fsdp_unit_zero_grad", zero_grad, false },
    { "fsdp_unit_read_grad", read_grad, false },
    { "fsdp_step_begin", step_begin, false },
    { "fsdp_step_end", step_end, false },
    { "fsdp_step_cancel", step_cancel, false },
    { "fsdp_step_norm", step_norm, false },
    { "fsdp_units_rewrite", rewrite, false },
    { "fsdp_optim_step", optim_step, false },
    { "fsdp_optim_create_sgd", optim_create, false },
    { "fsdp_ema_create", ema_create, false },
    { "fsdp_ema_update", ema_update, false },
    { "fsdp_ema_swap_in", swap_in, false },
    { "fsdp_checkpoint_save", save, false },
};
enum { CALLS = sizeof(calls) / sizeof(calls[0]) };

static void say_wrong(probe *p, const char *call, const char *where, const char *what)
{
    if (p->wrong[0] == '\0') snprintf(p->wrong, sizeof(p->wrong), "%s, %s: %.250s", where, call, what);
}

/* What the calls are about. */
static fsdp_status arm(probe *p)
{
    p->unit = p->m->unit[MINI_A];
    FSDP_TRY(fsdp_ema_create(&p->ema, mini_list(p->m)));
    FSDP_TRY(fsdp_checkpoint_create(&p->checkpoint, p->m->comm));
    return fsdp_checkpoint_add_param(p->checkpoint, "a", p->unit, 0);
}

static void disarm(probe *p)
{
    fsdp_checkpoint_destroy(p->checkpoint);
    fsdp_ema_destroy(p->ema);
}

typedef struct snapshot {
    char state[MINI_UNITS][160];
    uint64_t made; /* operations of this rank */
    int units;
} snapshot;

static snapshot take(const mini *m)
{
    snapshot s = { .made = fsdpi_comm_made(m->comm) };
    for (int u = 0; u < MINI_UNITS; u++) snprintf(s.state[u], sizeof(s.state[u]), "%s", fsdp_unit_state(m->unit[u]));
    for (const fsdp_unit *u = m->unit[0]->rt->units; u != NULL; u = u->following) s.units++;
    return s;
}

/* Makes each call. under_way: what its message must name; how: and say. */
static void try_all(probe *p, const char *under_way, const char *how)
{
    fsdpi_error before; /* of what is under way */
    fsdpi_error_save(&before);
    for (int k = 0; k < CALLS; k++) {
        if (calls[k].takes_pass && p->pass == NULL) continue;
        snapshot was = { 0 };
        if (p->watch) was = take(p->m);
        fsdp_status st = calls[k].call(p);
        const char *said = fsdp_last_error_message();
        size_t n = strlen(calls[k].name);
        if (st != FSDP_ERR_STATE) say_wrong(p, calls[k].name, under_way, fsdp_status_name(st));
        else if (strncmp(said, calls[k].name, n) != 0 || said[n] != ':' || strstr(said + n, under_way) == NULL || strstr(said, how) == NULL) say_wrong(p, calls[k].name, under_way, said);
        else if (strstr(said, "let it return first") == NULL && strstr(said, "wait until that call has returned") == NULL && strstr(said, "note there what is to be done") == NULL)
            say_wrong(p, calls[k].name, under_way, "no way out");
        if (p->watch) {
            snapshot is = take(p->m);
            if (memcmp(&was, &is, sizeof(was)) != 0) say_wrong(p, calls[k].name, under_way, "something has changed");
        }
        p->tried++;
    }
    fsdpi_error_restore(&before);
}

static fsdp_status look(const probe *p, int at_least)
{
    if (p->wrong[0] != '\0') FSDP_FAIL(FSDP_ERR_INTERNAL, "%s", p->wrong);
    rank_check(p->tried >= at_least);
    return FSDP_OK;
}

/* ---- what may call ---- */

/* How a callback misbehaves. */
typedef struct prank {
    void (*fn)(probe *p, const char *under_way);
    probe *p;
    const char *under_way;
} prank;

static void play(const prank *t)
{
    if (t->p != NULL) t->fn(t->p, t->under_way);
}

static void init_element(const char *name, int64_t i, float *value, void *arg)
{
    if (i == 0) play(arg);
    *value = mini_value(name, i);
}

static fsdp_status fill_elements(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    (void)param;
    for (int64_t i = 0; i < numel; i++) out[i] = mini_value(name, first + i);
    play(arg);
    return FSDP_OK;
}

static fsdp_status write_slices(fsdp_unit *unit, const fsdp_slice *slices, int count, void *arg)
{
    (void)unit;
    (void)slices;
    (void)count;
    play(arg);
    return FSDP_OK;
}

typedef struct hook_pranks {
    prank post, reduce;
} hook_pranks;

static fsdp_status post(const fsdp_kernel *k, float *grad, const fsdp_slice *part, int count, void *arg)
{
    (void)k;
    (void)grad;
    (void)part;
    (void)count;
    play(&((hook_pranks *)arg)->post);
    return FSDP_OK;
}

static fsdp_status reduce(const fsdp_kernel *k, const fsdp_reduction *r, void *arg)
{
    play(&((hook_pranks *)arg)->reduce);
    return fsdp_reduce_sum(k, r, NULL);
}

static bool decide(const fsdp_wrap_candidate *c, fsdp_wrap_opts *opts, void *arg)
{
    (void)opts;
    play(arg);
    return c->depth == 1;
}

static fsdp_status change(const char *name, const fsdp_param *param, float *value, void *arg)
{
    (void)param;
    value[0] = (float)strlen(name);
    play(arg);
    return FSDP_OK;
}

/* Policies, and functions that go over modules. values: room for 8 floats. */
static fsdp_status modules(probe *p, probe *trick, void (*fn)(probe *p, const char *under_way), float *values)
{
    fsdp_module *layer[2], *m;
    prank wrap = { fn, trick, "fsdp_wrap" }, apply = { fn, trick, "fsdp_module_apply" };
    fsdp_wrap_policy policy = { .decide = decide, .arg = &wrap };
    for (int i = 0; i < 2; i++) FSDP_TRY(fsdp_linear(&layer[i], 2, 2, NULL));
    FSDP_TRY(fsdp_sequential(&m, layer, 2));
    FSDP_TRY(fsdp_wrap(&m, m, &(fsdp_wrap_opts){ .comm = p->m->comm, .compute_device = p->m->device, .policy = &policy }));
    rank_check(fsdp_module_units(m).count >= 2);
    FSDP_TRY(fsdp_module_init_keyed(m, FSDP_INIT_NORMAL, 1));
    FSDP_TRY(fsdp_module_apply(m, change, &apply));
    for (int i = 0; i < 2; i++) FSDP_TRY(fsdp_module_read_param(m, i, values + 4 * i));
    fsdp_module_destroy(m);
    return FSDP_OK;
}

typedef struct seen {
    float param[2][8][600], module[2][8][8]; /* without and with wrong calls, as each rank reads them */
} seen;

/* Everything that calls the program: with probes that misbehave, or none. */
static fsdp_status live(fsdp_comm *comm, const corner *c, void (*fn)(probe *p, const char *under_way), bool hooks, float *params, float *values)
{
    mini m;
    probe p = { .m = &m, .watch = true }, in_post = { .m = &m }, in_reduce = { .m = &m }; /* hooks may run on threads of their own */
    probe *trick = fn != NULL ? &p : NULL;
    hook_pranks hook = { { fn, hooks ? &in_post : NULL, "a post hook" }, { fn, hooks ? &in_reduce : NULL, "a reduce hook" } };
    int last = fsdp_comm_size(comm) - 1;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .sgd = true }));
    FSDP_TRY(arm(&p));
    in_post.unit = in_reduce.unit = p.unit;
    in_post.ema = in_reduce.ema = p.ema;
    in_post.checkpoint = in_reduce.checkpoint = p.checkpoint;
    FSDP_TRY(fsdp_unit_unshard(m.unit[MINI_B]));
    p.readable = true;
    FSDP_TRY(fsdp_unit_init(m.unit[MINI_A], init_element, &(prank){ fn, trick, "fsdp_unit_init" }));
    FSDP_TRY(fsdp_unit_fill(m.unit[MINI_BIG], fill_elements, &(prank){ fn, trick, "fsdp_unit_fill" }));
    FSDP_TRY(fsdp_unit_fill_from(m.unit[MINI_TINY], last, fill_elements, &(prank){ fn, trick, "fsdp_unit_fill_from" }));
    p.readable = false;
    FSDP_TRY(fsdp_units_rewrite(mini_list(&m), write_slices, &(prank){ fn, trick, "fsdp_units_rewrite" }));
    FSDP_TRY(fsdp_unit_reshard(m.unit[MINI_B]));
    FSDP_TRY(modules(&p, trick, fn, values));
    FSDP_TRY(fsdp_unit_set_grad_hooks(m.unit[MINI_A], &(fsdp_grad_hooks){ .post = post, .reduce = reduce, .arg = &hook }));
    for (int s = 0; s < 2; s++) {
        FSDP_TRY(fsdp_pass_begin(&in_post.pass, comm, FSDP_PASS_TRAIN));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m.unit[0])));
        m.number[s] = 0;
        FSDP_TRY(mini_run(&m, in_post.pass, MINI_NESTED, s));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m.unit[0]))); /* hooks have run that look at the pass */
        FSDP_TRY(fsdp_pass_end(in_post.pass));
        FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    }
    FSDP_TRY(fsdp_unit_set_grad_hooks(m.unit[MINI_A], NULL));
    FSDP_TRY(mini_read(&m, params));
    disarm(&p);
    mini_destroy(&m);
    if (fn == NULL) return FSDP_OK;
    FSDP_TRY(look(&p, MINI_UNITS * 40));
    FSDP_TRY(look(&in_post, hooks ? 2 * CALLS : 0));
    return look(&in_reduce, hooks && fsdp_comm_rank(comm) == 0 ? 2 * 40 : 0);
}

static void compare(const corner *c)
{
    const seen *s = c->shared;
    for (int w = 0; w < 2; w++)
        for (int r = 0; r < c->ranks; r++)
            if (memcmp(s->param[0][0], s->param[w][r], sizeof(s->param[0][0])) != 0 || memcmp(s->module[0][0], s->module[w][r], sizeof(s->module[0][0])) != 0)
                fail_msg("%s: other bits on rank %d", corner_name(c), r);
}

/* ---- from within ---- */

/* A model of its own, on a communicator of its own: where a function has its values from, perhaps. */
static fsdp_status use_another(void)
{
    fsdp_comm *self;
    fsdp_unit *u;
    float x[3];
    FSDP_TRY(fsdp_comm_create_self(&self));
    FSDP_TRY(fsdp_unit_create(&u, self, &(fsdp_param){ "w", 1, { 3 } }, 1, NULL));
    FSDP_TRY(fsdp_unit_init(u, init_element, &(prank){ 0 }));
    FSDP_TRY(fsdp_unit_read_param(u, 0, x));
    rank_check(x[1] == mini_value("w", 1));
    fsdp_comm_destroy(self);
    return FSDP_OK;
}

static void from_within(probe *p, const char *under_way)
{
    if (p->watch && p->tried == 0 && use_another() != FSDP_OK) say_wrong(p, "another communicator", under_way, fsdp_last_error_message());
    try_all(p, under_way, "called from within");
    if (p->readable && fsdp_unit_param(p->m->unit[MINI_B], 0) == NULL) say_wrong(p, "fsdp_unit_param", under_way, fsdp_last_error_message());
}

static fsdp_status within(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    seen *s = c->shared;
    int rank = fsdp_comm_rank(comm);
    FSDP_TRY(live(comm, c, NULL, false, s->param[0][rank], s->module[0][rank]));
    return live(comm, c, from_within, true, s->param[1][rank], s->module[1][rank]);
}

static void test_from_within_a_call(void **state)
{
    (void)state;
    in_corners(within, &(corners){ .ranks = (const int[]){ 1, 2, 3, 5, 0 }, .shared = sizeof(seen), .after = compare });
    in_corners(within, &(corners){ .ranks = (const int[]){ 2, 0 }, .all_modes = true, .transport = "copy", .shared = sizeof(seen), .after = compare });
}

/* ---- from the log ---- */

static _Thread_local probe *listening; /* of the rank that this thread is */

static void misbehave(fsdp_log_level level, const char *text, void *arg)
{
    (void)level;
    (void)text;
    (void)arg;
    if (listening != NULL) try_all(listening, "fsdp_log_set()", "called from within");
}

static fsdp_status logs(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    seen *s = c->shared;
    for (int w = 0; w < 2; w++) {
        mini m;
        probe p = { .m = &m, .watch = true };
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
        FSDP_TRY(arm(&p));
        listening = w ? &p : NULL;
        for (int i = 0; i < 2; i++) FSDP_TRY(mini_step(&m, MINI_NESTED, i, fsdp_comm_size(comm)));
        listening = NULL;
        FSDP_TRY(mini_read(&m, s->param[w][fsdp_comm_rank(comm)]));
        disarm(&p);
        mini_destroy(&m);
        FSDP_TRY(look(&p, w * 1000));
    }
    return FSDP_OK;
}

static void test_from_the_log(void **state)
{
    (void)state;
    fsdp_log_set(FSDP_LOG_DEBUG, misbehave, NULL);
    in_corners(logs, &(corners){ .ranks = (const int[]){ 1, 2, 0 }, .shared = sizeof(seen), .after = compare });
    fsdp_log_set(FSDP_LOG_DEBUG, NULL, NULL);
}

/* ---- from another thread ---- */

typedef struct helper {
    probe *p;
    const char *under_way;
} helper;

static void *call_all(void *arg)
{
    helper *h = arg;
    float beta;
    int64_t n;
    const char *call = h->under_way;
    try_all(h->p, call, "another thread is in");
    /* Reading would be at the same time, too. */
    if (fsdp_unit_param(h->p->m->unit[MINI_B], 0) != NULL || fsdpi_error_status() != FSDP_ERR_STATE || strstr(fsdp_last_error_message(), call) == NULL)
        say_wrong(h->p, "fsdp_unit_param", call, fsdp_last_error_message());
    if (fsdp_unit_grad(h->p->unit, 0, &beta) != NULL || strstr(fsdp_last_error_message(), call) == NULL) say_wrong(h->p, "fsdp_unit_grad", call, fsdp_last_error_message());
    if (fsdp_unit_summoned(h->p->unit, 0) != NULL || strstr(fsdp_last_error_message(), call) == NULL) say_wrong(h->p, "fsdp_unit_summoned", call, fsdp_last_error_message());
    if (fsdp_unit_read_pending(h->p->unit, 0, FSDP_PENDING_OWN, NULL, &n, NULL) != FSDP_ERR_STATE || strstr(fsdp_last_error_message(), call) == NULL)
        say_wrong(h->p, "fsdp_unit_read_pending", call, fsdp_last_error_message());
    return NULL;
}

static void from_elsewhere(probe *p, const char *under_way)
{
    pthread_t t;
    helper h = { p, under_way };
    if (pthread_create(&t, NULL, call_all, &h) != 0) say_wrong(p, "pthread_create", under_way, "no thread");
    else pthread_join(t, NULL);
}

static fsdp_status elsewhere(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    seen *s = c->shared;
    int rank = fsdp_comm_rank(comm);
    FSDP_TRY(live(comm, c, NULL, false, s->param[0][rank], s->module[0][rank]));
    return live(comm, c, from_elsewhere, false, s->param[1][rank], s->module[1][rank]);
}

static void test_from_another_thread(void **state)
{
    (void)state;
    in_corners(elsewhere, &(corners){ .ranks = (const int[]){ 1, 2, 3, 0 }, .shared = sizeof(seen), .after = compare });
}

/* ---- while a rank waits for others ---- */

typedef struct waiting {
    seen seen;
    _Atomic int tried; /* by rank 0 */
} waiting;

typedef struct visitor {
    probe *p;
    waiting *w;
} visitor;

static void *visit(void *arg)
{
    visitor *v = arg;
    while (atomic_load(&v->p->m->comm->call) == NULL) sched_yield();
    call_all(&(helper){ v->p, "fsdp_comm_barrier" });
    atomic_store(&v->w->tried, 1);
    return NULL;
}

static fsdp_status wait_together(mini *m, waiting *w)
{
    probe p = { .m = m, .watch = true };
    pthread_t t;
    if (fsdp_comm_rank(m->comm) > 0) { /* rank 0 waits until it has been visited */
        while (atomic_load(&w->tried) == 0) sched_yield();
        return fsdp_comm_barrier(m->comm);
    }
    FSDP_TRY(arm(&p));
    visitor v = { &p, w };
    if (pthread_create(&t, NULL, visit, &v) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "no thread");
    fsdp_status st = fsdp_comm_barrier(m->comm);
    pthread_join(t, NULL);
    disarm(&p);
    FSDP_TRY(st);
    return look(&p, 40);
}

static fsdp_status wait_for_others(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    waiting *w = c->shared;
    for (int k = 0; k < 2; k++) {
        mini m;
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
        FSDP_TRY(mini_step(&m, MINI_NESTED, 0, fsdp_comm_size(comm)));
        if (k > 0) FSDP_TRY(wait_together(&m, w));
        FSDP_TRY(mini_step(&m, MINI_NESTED, 1, fsdp_comm_size(comm)));
        FSDP_TRY(mini_read(&m, w->seen.param[k][fsdp_comm_rank(comm)]));
        mini_destroy(&m);
    }
    return FSDP_OK;
}

static void test_while_a_rank_waits(void **state)
{
    (void)state;
    in_corners(wait_for_others, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .shared = sizeof(waiting), .after = compare });
}

/* ---- handed over ---- */

typedef struct errand {
    mini *m;
    fsdp_pass *pass;
    const char *what; /* of a script; NULL: the optimizer's step */
    int64_t leaf;
    fsdp_status st;
    fsdpi_error error;
} errand;

static void *run_errand(void *arg)
{
    errand *e = arg;
    e->st = e->what != NULL ? mini_run(e->m, e->pass, e->what, e->leaf) : fsdp_optim_step(e->m->optim, NULL);
    if (e->st != FSDP_OK) fsdpi_error_save(&e->error);
    return NULL;
}

static fsdp_status send(bool away, errand e)
{
    pthread_t t;
    if (!away) run_errand(&e);
    else if (pthread_create(&t, NULL, run_errand, &e) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "no thread");
    else pthread_join(t, NULL);
    if (e.st != FSDP_OK) fsdpi_error_restore(&e.error);
    return e.st;
}

/* Each token of a pass, each step, on a thread of its own, one after another. */
static fsdp_status hand_over(fsdp_comm *comm, void *arg)
{
    static const char *const tokens[] = { "[0", "F1", "[2", "]2", "F5", "]0", "{0", "B5", "{2", "}2", "B1", "}0" };
    const corner *c = arg;
    seen *s = c->shared;
    for (int away = 0; away < 2; away++) {
        mini m;
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
        for (int step = 0; step < 2; step++) {
            fsdp_pass *pass;
            int64_t leaf = step * fsdp_comm_size(comm) + fsdp_comm_rank(comm);
            m.number[leaf] = 0;
            FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
            for (size_t k = 0; k < sizeof(tokens) / sizeof(tokens[0]); k++) FSDP_TRY(send(away && k % 3 > 0, (errand){ .m = &m, .pass = pass, .what = tokens[k], .leaf = leaf }));
            FSDP_TRY(fsdp_pass_end(pass));
            FSDP_TRY(send(away, (errand){ .m = &m }));
        }
        FSDP_TRY(mini_read(&m, s->param[away][fsdp_comm_rank(comm)]));
        mini_destroy(&m);
    }
    return FSDP_OK;
}

static void test_handed_over(void **state)
{
    (void)state;
    in_corners(hand_over, &(corners){ .ranks = (const int[]){ 1, 2, 3, 0 }, .shared = sizeof(seen), .after = compare });
}

/* ---- two threads that do not look ---- */

typedef struct racer {
    fsdp_comm *comm;
    int done;           /* calls that were not refused */
    fsdp_status strange;
    char said[200];
} racer;

enum { LAPS = 20000 };

static void *race(void *arg)
{
    racer *r = arg;
    for (int i = 0; i < LAPS; i++) {
        fsdp_status st = fsdp_comm_barrier(r->comm);
        r->done += st == FSDP_OK;
        if (st == FSDP_OK || (st == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "another thread is in fsdp_comm_barrier") != NULL)) continue;
        r->strange = st;
        snprintf(r->said, sizeof(r->said), "%.190s", fsdp_last_error_message());
    }
    return NULL;
}

/* What is not refused is done as if the other thread were not there: none is lost, none half done. */
static void test_two_threads_that_do_not_look(void **state)
{
    (void)state;
    fsdp_comm *comm;
    pthread_t t;
    assert_ok(fsdp_comm_create_self(&comm));
    racer a = { .comm = comm }, b = { .comm = comm };
    assert_int_equal(pthread_create(&t, NULL, race, &a), 0);
    race(&b);
    pthread_join(t, NULL);
    if (a.strange != FSDP_OK || b.strange != FSDP_OK) fail_msg("%s%s", a.said, b.said);
    assert_true(a.done > 0 && b.done > 0);
    assert_int_equal(fsdpi_comm_made(comm), a.done + b.done);
    assert_ok(fsdp_comm_barrier(comm));
    fsdp_comm_destroy(comm);
}

/* ---- units of two communicators ---- */

typedef struct two {
    fsdp_unit *unit[2]; /* on a communicator each */
    fsdp_status list, one, other;
    char said[300];
} two;

static void *meet_on_another_thread(void *arg)
{
    two *t = arg;
    t->other = fsdp_comm_barrier(fsdp_unit_comm(t->unit[0]));
    return NULL;
}

static fsdp_status use_both(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    two *t = arg;
    pthread_t thread;
    for (int64_t i = 0; i < numel; i++) out[i] = 1;
    if (param > 0 || first > 0) return FSDP_OK;
    t->list = fsdp_step_begin((fsdp_unit_list){ t->unit, 2 });
    snprintf(t->said, sizeof(t->said), "%.290s", fsdp_last_error_message());
    t->one = fsdp_unit_fill(t->unit[0], never_fill, NULL);
    if (pthread_create(&thread, NULL, meet_on_another_thread, t) != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "no thread for %s", name);
    pthread_join(thread, NULL);
    return FSDP_OK;
}

/* A list that is refused for one communicator leaves nothing behind on the other. */
static void test_two_communicators(void **state)
{
    (void)state;
    two t = { .list = FSDP_OK, .one = FSDP_ERR_INTERNAL, .other = FSDP_ERR_INTERNAL };
    fsdp_comm *comm[2];
    for (int i = 0; i < 2; i++) {
        assert_ok(fsdp_comm_create_self(&comm[i]));
        assert_ok(fsdp_unit_create(&t.unit[i], comm[i], &(fsdp_param){ "w", 1, { 3 } }, 1, NULL));
    }
    for (int i = 0; i < 2; i++) { /* the one that is refused comes first, and last */
        t.list = FSDP_OK;
        assert_ok(fsdp_unit_fill(t.unit[1], use_both, &t));
        assert_int_equal(t.list, FSDP_ERR_STATE);
        assert_non_null(strstr(t.said, "fsdp_step_begin: called from within a function that fsdp_unit_fill has called"));
        assert_int_equal(t.one, FSDP_OK);
        assert_int_equal(t.other, FSDP_OK);
        assert_ok(fsdp_step_begin((fsdp_unit_list){ t.unit, 2 }));
        assert_ok(fsdp_step_cancel((fsdp_unit_list){ t.unit, 2 }));
        fsdp_unit *swapped = t.unit[0];
        t.unit[0] = t.unit[1];
        t.unit[1] = swapped;
    }
    for (int i = 0; i < 2; i++) fsdp_comm_destroy(comm[i]);
}

/* ---- destroyed from within ---- */

static fsdp_status destroy_all(const char *name, int param, int64_t first, int64_t numel, float *out, void *arg)
{
    fsdp_unit *u = arg;
    (void)name;
    (void)param;
    for (int64_t i = 0; i < numel; i++) out[i] = (float)(first + i);
    fsdp_unit_destroy(u);
    fsdp_comm_destroy(fsdp_unit_comm(u));
    return FSDP_OK;
}

static void test_destroyed_from_within(void **state)
{
    (void)state;
    logged log = { 0 };
    fsdp_comm *comm;
    fsdp_unit *u;
    float x[3];
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(fsdp_unit_create(&u, comm, &(fsdp_param){ "w", 1, { 3 } }, 1, NULL));
    fsdp_log_set(FSDP_LOG_WARN, keep_log, &log);
    assert_ok(fsdp_unit_fill(u, destroy_all, u));
    fsdp_log_set(FSDP_LOG_WARN, NULL, NULL);
    assert_int_equal(log.warnings, 2);
    assert_true(was_logged(&log, "nothing was destroyed: fsdp_unit_destroy: called from within a function that fsdp_unit_fill has called"));
    assert_true(was_logged(&log, "nothing was destroyed: fsdp_comm_destroy: called from within a function that fsdp_unit_fill has called"));
    assert_ok(fsdp_unit_read_param(u, 0, x));
    assert_true(x[0] == 0 && x[1] == 1 && x[2] == 2);
    fsdp_unit_destroy(u);
    fsdp_comm_destroy(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_from_within_a_call),
        cmocka_unit_test(test_from_the_log),
        cmocka_unit_test(test_from_another_thread),
        cmocka_unit_test(test_while_a_rank_waits),
        cmocka_unit_test(test_handed_over),
        cmocka_unit_test(test_two_threads_that_do_not_look),
        cmocka_unit_test(test_two_communicators),
        cmocka_unit_test(test_destroyed_from_within),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
