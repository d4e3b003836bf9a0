/* SPDX-License-Identifier: MIT
 *
 * State dictionaries: what is read is loaded again to the bit, in each kind, mode, transport and device, on any other number of ranks
 * and in any other wrapping; while gradients are pending, within a summon, before the first step and twice in a row. */
#include "checkpoint/saved_mini.h"
#include "format/scratch.h"

#include "base/alloc.h"
#include "shard/unit.h"

/* ---- read, go on, load: all is as it was ---- */

static const int few[] = { 1, 2, 3, 0 };

static fsdp_status there_and_back(saved_mini *s, fsdp_state_kind kind, bool rank0_only)
{
    fsdp_state *before, *d, *after, *again;
    FSDP_TRY(fsdp_state_read(&before, s->c, &(fsdp_state_opts){ .kind = FSDP_STATE_LOCAL }));
    FSDP_TRY(fsdp_state_read(&d, s->c, &(fsdp_state_opts){ .kind = kind, .rank0_only = rank0_only }));
    FSDP_TRY(fsdp_state_read(&again, s->c, &(fsdp_state_opts){ .kind = kind, .rank0_only = rank0_only }));
    rank_check(fsdp_state_get_kind(d) == kind && same_state(d, again));
    FSDP_TRY(saved_mini_disturb(s, 3));
    FSDP_TRY(fsdp_state_load(s->c, d, NULL));
    FSDP_TRY(fsdp_state_read(&after, s->c, &(fsdp_state_opts){ .kind = FSDP_STATE_LOCAL }));
    rank_check(same_state(before, after));
    rank_check(s->tokens == 5 && s->best == 0.1 && s->seen[1] == -2);
    fsdp_state_destroy(before);
    fsdp_state_destroy(d);
    fsdp_state_destroy(again);
    fsdp_state_destroy(after);
    return FSDP_OK;
}

static fsdp_status all_kinds(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    saved_mini s;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(there_and_back(&s, FSDP_STATE_FULL, false)); /* before the first step: state is 0 */
    for (int step = 0; step < 2; step++) FSDP_TRY(mini_step(&s.m, MINI_NESTED, step, 6));
    FSDP_TRY(there_and_back(&s, FSDP_STATE_FULL, false));
    FSDP_TRY(there_and_back(&s, FSDP_STATE_FULL, true));
    FSDP_TRY(there_and_back(&s, FSDP_STATE_SHARDED, false));
    FSDP_TRY(there_and_back(&s, FSDP_STATE_LOCAL, false));
    saved_mini_close(&s);
    return FSDP_OK;
}

static void test_every_corner(void **state)
{
    (void)state;
    in_corners(all_kinds, &(corners){ .ranks = few, .all_modes = true, .device = "cpu" });
    in_corners(all_kinds, &(corners){ .ranks = few, .device = "guard", .threads_only = true });
}

/* What a whole one holds is what anybody reads; others than rank 0 hold nothing where that is asked for; sharded ones hold each element
 * once; nobody's later training is seen in it. */
static fsdp_status contents(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    saved_mini s;
    fsdp_state *full, *rank0, *sharded, *params;
    double elements = 0;
    float w[37 * 11];
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 0, 30));
    FSDP_TRY(fsdp_unit_read_param(s.m.unit[MINI_BIG], 0, w));
    FSDP_TRY(fsdp_state_read(&full, s.c, NULL));
    FSDP_TRY(fsdp_state_read(&rank0, s.c, &(fsdp_state_opts){ .rank0_only = true }));
    FSDP_TRY(fsdp_state_read(&sharded, s.c, &(fsdp_state_opts){ .kind = FSDP_STATE_SHARDED }));
    FSDP_TRY(fsdp_state_read(&params, s.c, &(fsdp_state_opts){ .which = FSDP_STATE_PARAMS }));
    FSDP_TRY(saved_mini_disturb(&s, 1));
    const fsdp_state_tensor *t = fsdp_state_find(full, "big.w");
    rank_check(t->count == 37 * 11 && t->ndim == 2 && t->shape[1] == 11 && memcmp(t->data, w, sizeof(w)) == 0 && t->what == FSDP_STATE_PARAMS);
    rank_check(fsdp_state_find(full, "root.s")->ndim == 0 && fsdp_state_find(full, "big.e")->count == 0 && fsdp_state_find(full, "none") == NULL);
    rank_check(fsdp_state_count(full) == 10 * 3 + 1 && fsdp_state_count(params) == 10);
    rank_check(fsdp_state_find(full, "optim.exp_avg_sq.a.b")->what == FSDP_STATE_OPTIM && fsdp_state_find(full, "seen")->dtype == FSDP_I32);
    int64_t steps;
    double d;
    FSDP_TRY(fsdp_state_i64(full, "optim.steps.tiny.g", &steps));
    rank_check(steps == 1 && fsdp_state_i64(params, "tokens", &steps) == FSDP_ERR_INVALID && fsdp_state_f64(full, "best", &d) == FSDP_OK && d == 0.1);
    rank_check((fsdp_state_bytes(rank0) == fsdp_state_bytes(full)) == (fsdp_comm_rank(world) == 0));
    rank_check(fsdp_comm_rank(world) == 0 || fsdp_state_bytes(rank0) == 0);
    rank_check(fsdp_state_count(rank0) == 31 && fsdp_state_find(rank0, "big.w")->numel == 37 * 11);
    for (int i = 0; i < fsdp_state_count(sharded); i++) elements += (double)fsdp_state_at(sharded, i)->count;
    FSDP_TRY(fsdp_comm_sum_exact(world, &elements, 1));
    rank_check(elements == 3 * mini_numel() + 5);
    rank_check(fsdp_state_at(full, 31) == NULL && fsdp_state_at(full, -1) == NULL);
    fsdp_state_destroy(full);
    fsdp_state_destroy(rank0);
    fsdp_state_destroy(sharded);
    fsdp_state_destroy(params);
    fsdp_state_destroy(NULL);
    saved_mini_close(&s);
    return FSDP_OK;
}

static void test_contents(void **state)
{
    (void)state;
    static const int ranks[] = { 1, 2, 5, 0 };
    in_corners(contents, &(corners){ .ranks = ranks, .all_modes = true, .threads_only = true, .transport = "shm" });
    in_corners(contents, &(corners){ .ranks = ranks, .transport = "copy", .device = "guard" });
}

/* ---- any number of ranks, any mode ---- */

enum { MOST = 5 };

typedef struct handed {
    fsdp_mode mode;
    fsdp_state_kind kind;
    bool rank0_only;
    fsdp_state *from[MOST]; /* of each rank that read */
    int ranks;
    fsdp_state *full; /* the same, whole */
} handed;

static fsdp_status hand_out(fsdp_comm *world, void *arg)
{
    handed *h = arg;
    saved_mini s;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = h->mode }));
    for (int step = 0; step < 2; step++) FSDP_TRY(mini_step(&s.m, MINI_NESTED, step, 30));
    FSDP_TRY(fsdp_state_read(&h->from[fsdp_comm_rank(world)], s.c, &(fsdp_state_opts){ .kind = h->kind, .rank0_only = h->rank0_only }));
    fsdp_state *full;
    FSDP_TRY(fsdp_state_read(&full, s.c, NULL));
    if (fsdp_comm_rank(world) == 0) h->full = full;
    else fsdp_state_destroy(full);
    saved_mini_close(&s);
    return FSDP_OK;
}

/* Rank r takes what ranks r, r + R, ... had; one that gets nothing gives NULL. */
static fsdp_status take_in(fsdp_comm *world, void *arg)
{
    handed *h = arg;
    saved_mini s;
    fsdp_state *mine = NULL, *full;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = h->mode }));
    FSDP_TRY(saved_mini_disturb(&s, 9));
    for (int r = fsdp_comm_rank(world); r < h->ranks; r += fsdp_comm_size(world)) {
        if (h->rank0_only && r > 0) continue;
        if (mine == NULL) FSDP_TRY(fsdp_state_create(&mine));
        FSDP_TRY(fsdp_state_merge(mine, h->from[r]));
    }
    FSDP_TRY(fsdp_state_load(s.c, mine, NULL));
    FSDP_TRY(fsdp_state_read(&full, s.c, NULL));
    rank_check(same_state(h->full, full));
    fsdp_state_destroy(mine);
    fsdp_state_destroy(full);
    saved_mini_close(&s);
    return FSDP_OK;
}

static void on_threads(int ranks, fsdp_rank_fn fn, void *arg, const char *what)
{
    fsdp_launch_opts o = { .ranks = ranks, .ranks_are_threads = true, .threads = 1, .timeout_s = 20 };
    if (fsdp_launch(&o, fn, arg) != FSDP_OK) fail_msg("%s, %d ranks: %s", what, ranks, fsdp_last_error());
}

static void test_any_ranks_any_mode(void **state)
{
    (void)state;
    static const int from[] = { 1, 2, 3, 5 }, to[] = { 1, 2, 4, 5 };
    for (int i = 0, n = 0; i < 4; i++)
        for (int way = 0; way < 3; way++) {
            handed h = { .mode = (fsdp_mode)((i + way) % 4), .kind = way == 2 ? FSDP_STATE_SHARDED : FSDP_STATE_FULL, .rank0_only = way == 1, .ranks = from[i] };
            on_threads(from[i], hand_out, &h, "read");
            for (int k = 0; k < 4; k++, n++) {
                if (way == 0 && to[k] < from[i]) continue; /* whole ones of several ranks cannot be merged: they share elements */
                h.mode = (fsdp_mode)(n % 4);
                on_threads(to[k], take_in, &h, "load");
            }
            for (int r = 0; r < from[i]; r++) fsdp_state_destroy(h.from[r]);
            fsdp_state_destroy(h.full);
        }
}

/* ---- any wrapping ---- */

typedef struct net {
    fsdp_module *layer[4], *model;
    fsdp_optim *optim;
    fsdp_checkpoint *c;
} net;

/* how: 0 one unit for all; 1 a unit for each layer, within one for the rest; 2 pairs. */
static fsdp_status build(net *n, fsdp_comm *world, int how, fsdp_mode mode)
{
    fsdp_module *pair[2];
    fsdp_wrap_opts w = { .comm = world, .mode = mode };
    for (int i = 0; i < 4; i++) {
        FSDP_TRY(fsdp_linear(&n->layer[i], 6, 6, &(fsdp_linear_opts){ .bias = i != 2, .activation = FSDP_ACT_RELU }));
        if (how == 1) FSDP_TRY(fsdp_wrap(&n->layer[i], n->layer[i], &w));
    }
    for (int i = 0; i < 2; i++) {
        FSDP_TRY(fsdp_sequential(&pair[i], n->layer + 2 * i, 2));
        if (how == 2) FSDP_TRY(fsdp_wrap(&pair[i], pair[i], &w));
    }
    FSDP_TRY(fsdp_sequential(&n->model, pair, 2));
    FSDP_TRY(fsdp_wrap(&n->model, n->model, &w));
    FSDP_TRY(fsdp_module_init_keyed(n->model, FSDP_INIT_KAIMING, 1));
    FSDP_TRY(fsdp_optim_create_adamw(&n->optim, fsdp_module_units(n->model), &(fsdp_adamw_opts){ .lr = 0.01f }));
    FSDP_TRY(fsdp_checkpoint_create(&n->c, world));
    FSDP_TRY(fsdp_checkpoint_add_module(n->c, "net.", n->model));
    return fsdp_checkpoint_add_optim(n->c, n->optim);
}

/* all: else only the first two layers, whose units have gradients then; in one unit, all do. */
static fsdp_status train(net *n, fsdp_comm *world, int64_t step, bool all)
{
    for (int leaf = fsdp_comm_rank(world); leaf < 6; leaf += fsdp_comm_size(world)) {
        fsdp_tape *tape;
        fsdp_tensor *x, *y, *labels, *loss;
        float values[18];
        fsdp_philox_normal_fill(3, "x", (step * 6 + leaf) * 18, 18, values);
        FSDP_TRY(fsdp_tape_begin(&tape, world));
        FSDP_TRY(fsdp_tensor_from_f32(&x, tape, values, 2, (int64_t[]){ 3, 6 }));
        FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, (int32_t[]){ 1, 5, 3 }, 1, (int64_t[]){ 3 }));
        FSDP_TRY(fsdp_forward(all ? n->model : fsdp_module_child(n->model, 0), tape, x, &y));
        FSDP_TRY(fsdp_op_cross_entropy(tape, y, labels, &loss));
        FSDP_TRY(fsdp_backward(tape, loss));
        FSDP_TRY(fsdp_tape_end(tape));
    }
    return fsdp_optim_step(n->optim, NULL);
}

static void tear_down(net *n)
{
    fsdp_checkpoint_destroy(n->c);
    fsdp_optim_destroy(n->optim);
    fsdp_module_destroy(n->model);
}

typedef struct rewrap {
    int from, to;
    fsdp_mode mode;
    const char *folder;
} rewrap;

/* Read in one wrapping, loaded in another: the next steps have the same bits. Also through a folder. */
static fsdp_status other_wrapping(fsdp_comm *world, void *arg)
{
    const rewrap *w = arg;
    net a, b;
    fsdp_state *s, *end_a, *end_b;
    FSDP_TRY(build(&a, world, w->from, FSDP_MODE_FULL));
    FSDP_TRY(build(&b, world, w->to, w->mode));
    for (int i = 0; i < 3; i++) FSDP_TRY(train(&a, world, i, true));
    FSDP_TRY(train(&b, world, 9, true));
    FSDP_TRY(fsdp_state_read(&s, a.c, &(fsdp_state_opts){ .kind = FSDP_STATE_SHARDED }));
    rank_check(fsdp_state_find(s, "net.0.0.weight") != NULL && fsdp_state_find(s, "optim.exp_avg.net.1.1.bias") != NULL && fsdp_state_find(s, "net.1.0.bias") == NULL);
    FSDP_TRY(fsdp_state_load(b.c, s, NULL));
    fsdp_state_destroy(s);
    for (int round = 0; round < 2; round++) {
        FSDP_TRY(train(&a, world, 3, true));
        FSDP_TRY(train(&b, world, 3, true));
        FSDP_TRY(fsdp_state_read(&end_a, a.c, NULL));
        FSDP_TRY(fsdp_state_read(&end_b, b.c, NULL));
        int64_t steps;
        FSDP_TRY(fsdp_state_i64(end_b, "optim.steps.net.1.0.weight", &steps));
        rank_check(steps == 4);
        for (int i = 0; i < fsdp_state_count(end_a); i++) {
            const fsdp_state_tensor *x = fsdp_state_at(end_a, i), *y = fsdp_state_find(end_b, x->name);
            rank_check(y != NULL && x->count == y->count && memcmp(x->data, y->data, (size_t)x->count * 4) == 0);
        }
        fsdp_state_destroy(end_a);
        fsdp_state_destroy(end_b);
        if (round == 0) {
            char path[600];
            FSDP_TRY(train(&a, world, 7, true)); /* steps 5, and then back to 3 by way of a folder of b's */
            FSDP_TRY(train(&a, world, 8, true));
            FSDP_TRY(train(&b, world, 8, true));
            FSDP_TRY(fsdp_checkpoint_save(b.c, w->folder, 5, 0));
            snprintf(path, sizeof(path), "%s/step-00000005", w->folder);
            FSDP_TRY(fsdp_checkpoint_load(a.c, path));
            fsdp_unit_list units = fsdp_optim_units(a.optim);
            for (int u = 0; u < units.count; u++) rank_check(fsdp_optim_unit_steps(a.optim, units.units[u]) == (fsdp_unit_param_count(units.units[u]) > 0 ? 5 : 0));
            for (int u = 0; u < units.count; u++) fsdp_optim_set_unit_steps(a.optim, units.units[u], 3);
            units = fsdp_optim_units(b.optim);
            for (int u = 0; u < units.count; u++) fsdp_optim_set_unit_steps(b.optim, units.units[u], 3);
        }
    }
    tear_down(&a);
    tear_down(&b);
    return FSDP_OK;
}

/* Layers that had no gradients in a step have had fewer steps: that is kept, parameter by parameter, also within one unit. */
static fsdp_status unused_layers(fsdp_comm *world, void *arg)
{
    (void)arg;
    net a, b, back;
    fsdp_state *s, *end_a, *end_b;
    FSDP_TRY(build(&a, world, 1, FSDP_MODE_FULL));
    FSDP_TRY(build(&b, world, 0, FSDP_MODE_FULL));
    FSDP_TRY(build(&back, world, 1, FSDP_MODE_GRAD_OP));
    for (int i = 0; i < 3; i++) FSDP_TRY(train(&a, world, i, i == 1));
    FSDP_TRY(fsdp_state_read(&s, a.c, NULL));
    int64_t one, three;
    FSDP_TRY(fsdp_state_i64(s, "optim.steps.net.1.0.weight", &one));
    FSDP_TRY(fsdp_state_i64(s, "optim.steps.net.0.0.bias", &three));
    rank_check(one == 1 && three == 3);
    FSDP_TRY(fsdp_state_load(b.c, s, NULL));
    fsdp_state_destroy(s);
    fsdp_unit *flat = fsdp_optim_units(b.optim).units[0];
    rank_check(fsdp_optim_unit_steps(b.optim, flat) == 3);
    for (int i = 0; i < fsdp_unit_param_count(flat); i++) rank_check(fsdp_optim_param_steps(b.optim, flat, i) == (i < 4 ? 3 : 1));
    rank_check(fsdp_optim_param_steps(b.optim, flat, -1) == 0 && fsdp_optim_param_steps(b.optim, flat, 99) == 0);
    FSDP_TRY(train(&a, world, 5, true));
    FSDP_TRY(train(&b, world, 5, true));
    FSDP_TRY(fsdp_state_read(&end_b, b.c, NULL));
    FSDP_TRY(fsdp_state_load(back.c, end_b, NULL));
    fsdp_state_destroy(end_b);
    FSDP_TRY(fsdp_state_read(&end_a, a.c, &(fsdp_state_opts){ .kind = FSDP_STATE_LOCAL }));
    FSDP_TRY(fsdp_state_read(&end_b, back.c, &(fsdp_state_opts){ .kind = FSDP_STATE_LOCAL }));
    for (int i = 0; i < fsdp_state_count(end_a); i++) {
        const fsdp_state_tensor *x = fsdp_state_at(end_a, i), *y = fsdp_state_find(end_b, x->name);
        rank_check(x->first == y->first && x->count == y->count && (x->count == 0 || memcmp(x->data, y->data, (size_t)x->count * 4) == 0));
    }
    fsdp_state_destroy(end_a);
    fsdp_state_destroy(end_b);
    tear_down(&a);
    tear_down(&b);
    tear_down(&back);
    return FSDP_OK;
}

static void test_any_wrapping(void **state)
{
    (void)state;
    int n = 0;
    for (int from = 0; from < 3; from++)
        for (int to = 0; to < 3; to++, n++) {
            char name[32];
            snprintf(name, sizeof(name), "wrap-%d", n);
            rewrap w = { from, to, (fsdp_mode)(n % 4), scratch(name) };
            fsdp_launch_opts o = { .ranks = 1 + n % 3, .ranks_are_threads = true, .threads = 1, .timeout_s = 20, .transport = n % 2 ? "copy" : NULL };
            if (fsdp_launch(&o, other_wrapping, &w) != FSDP_OK) fail_msg("wrapping %d to %d: %s", from, to, fsdp_last_error());
        }
    on_threads(2, unused_layers, NULL, "unused layers");
    on_threads(3, unused_layers, NULL, "unused layers");
}

/* ---- at any time ---- */

static fsdp_status moments(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    saved_mini s, twin;
    fsdp_state *start, *now;
    static _Thread_local float a[1024], b[1024];
    static const float sevens[6] = { 7, 7, 7, 7, 7, 7 };
    mini_opts o = { .mode = c->mode, .device = c->device };
    FSDP_TRY(saved_mini_open(&s, world, &o));
    FSDP_TRY(saved_mini_open(&twin, world, &o));
    FSDP_TRY(fsdp_state_read(&start, s.c, NULL));
    /* within a summon: what was published; written values do not count before its end, and are not lost */
    fsdp_unit *u = s.m.unit[MINI_A];
    FSDP_TRY(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true }));
    FSDP_TRY(fsdp_stream_copy(fsdp_unit_stream(u), fsdp_unit_summoned(u, 1), sevens, sizeof(sevens)));
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(u)));
    FSDP_TRY(fsdp_state_read(&now, s.c, NULL));
    rank_check(same_state(start, now));
    fsdp_state_destroy(now);
    rank_check(fsdp_state_load(s.c, start, NULL) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "fsdp_state_load: unit \"a\"") != NULL);
    FSDP_TRY(fsdp_unit_summon_end(u));
    FSDP_TRY(fsdp_state_read(&now, s.c, NULL));
    rank_check(((float *)fsdp_state_find(now, "a.b")->data)[5] == 7);
    fsdp_state_destroy(now);
    FSDP_TRY(fsdp_state_load(s.c, start, NULL));
    /* with gradients that wait for the step, they stay, also over a load of the same values */
    for (int leaf = fsdp_comm_rank(world); leaf < 6; leaf += fsdp_comm_size(world)) {
        FSDP_TRY(mini_leaf(&s.m, MINI_NESTED, leaf));
        FSDP_TRY(mini_leaf(&twin.m, MINI_NESTED, leaf));
    }
    FSDP_TRY(fsdp_state_read(&now, s.c, NULL));
    rank_check(same_state(start, now));
    fsdp_state_destroy(now);
    FSDP_TRY(fsdp_state_load(s.c, start, NULL));
    FSDP_TRY(fsdp_optim_step(s.m.optim, NULL));
    FSDP_TRY(fsdp_optim_step(twin.m.optim, NULL));
    FSDP_TRY(mini_read(&s.m, a));
    FSDP_TRY(mini_read(&twin.m, b));
    rank_check(memcmp(a, b, (size_t)mini_numel() * sizeof(*a)) == 0);
    /* in a pass and in a step: refused, and nothing happened */
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, world, FSDP_PASS_TRAIN));
    rank_check(fsdp_state_read(&now, s.c, NULL) == FSDP_ERR_STATE && fsdp_checkpoint_save(s.c, "/nowhere", 1, 0) == FSDP_ERR_STATE);
    FSDP_TRY(fsdp_pass_cancel(pass));
    FSDP_TRY(fsdp_step_begin(mini_list(&s.m)));
    rank_check(fsdp_state_read(&now, s.c, NULL) == FSDP_ERR_STATE && fsdp_state_load(s.c, start, NULL) == FSDP_ERR_STATE);
    rank_check(strstr(fsdp_last_error_message(), "end the step first") != NULL);
    FSDP_TRY(fsdp_step_cancel(mini_list(&s.m)));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 1, 6));
    FSDP_TRY(mini_step(&twin.m, MINI_NESTED, 1, 6));
    FSDP_TRY(mini_read(&s.m, a));
    FSDP_TRY(mini_read(&twin.m, b));
    rank_check(memcmp(a, b, (size_t)mini_numel() * sizeof(*a)) == 0);
    /* it outlives the model */
    saved_mini_close(&s);
    rank_check(fsdp_state_find(start, "a.b")->count == 6);
    fsdp_state_destroy(start);
    saved_mini_close(&twin);
    return FSDP_OK;
}

static void test_at_any_time(void **state)
{
    (void)state;
    in_corners(moments, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true, .device = "cpu" });
    in_corners(moments, &(corners){ .ranks = (const int[]){ 2, 0 }, .device = "guard", .threads_only = true });
}

/* Reading and loading leave no memory behind, on the device or the host. */
static fsdp_status no_leak(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    saved_mini s;
    fsdp_state *d;
    FSDP_TRY(saved_mini_open(&s, world, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 0, 6));
    size_t live = 0;
    long blocks = 0;
    for (int round = 0; round < 4; round++) {
        FSDP_TRY(fsdp_state_read(&d, s.c, &(fsdp_state_opts){ .rank0_only = round % 2 == 1 }));
        FSDP_TRY(fsdp_state_load(s.c, d, NULL));
        fsdp_state_destroy(d);
        size_t now = fsdpi_arena_get_stats(s.m.unit[0]->ctx->arena).bytes_live;
        if (round == 1) {
            live = now;
            blocks = fsdpi_alloc_live();
        }
        rank_check(round < 2 || (now == live && fsdpi_alloc_live() == blocks));
    }
    saved_mini_close(&s);
    return FSDP_OK;
}

static void test_no_leak(void **state)
{
    (void)state;
    in_corners(no_leak, &(corners){ .ranks = few, .processes_only = true, .device = "cpu" });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_corner),
        cmocka_unit_test(test_contents),
        cmocka_unit_test(test_any_ranks_any_mode),
        cmocka_unit_test(test_any_wrapping),
        cmocka_unit_test(test_at_any_time),
        cmocka_unit_test(test_no_leak),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
