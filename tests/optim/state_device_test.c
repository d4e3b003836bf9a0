/* SPDX-License-Identifier: MIT
 *
 * Optimizer state on another device than the slices, either way round: the same bits as beside them, in every mode, mesh and transport,
 * also over saves, loads, resets and steps that are refused; as many bytes as are predicted; what cannot be is refused on all ranks. */
#include "checkpoint/saved_mini.h"
#include "format/scratch.h"

#include "base/alloc.h"
#include "shard/unit.h"

enum { LEAVES = 12, MOST = 4096 };

/* ---- the same bits ---- */

typedef struct plan {
    const char *storage, *state, *grads; /* NULL: the compute device; the storage device */
    bool sgd, halves;            /* halves: two replicas */
    const char *folder;
} plan;

typedef struct result {
    float all[MOST]; /* parameters and state, whole, in the order of the dictionary */
} result;

static fsdp_status freeze(saved_mini *s, bool frozen)
{
    FSDP_TRY(fsdp_unit_set_frozen(s->m.unit[MINI_A], 0, frozen));
    return mini_freeze(&s->m, MINI_BIG, frozen);
}

/* All ranks refuse the step: parameters, state and counts stay. */
static fsdp_status refused_step(saved_mini *s)
{
    fsdp_state *before, *after;
    fsdp_unit *u = s->m.unit[MINI_BIG];
    float beta;
    FSDP_TRY(fsdp_state_read(&before, s->c, &(fsdp_state_opts){ .kind = FSDP_STATE_LOCAL }));
    FSDP_TRY(mini_leaf(&s->m, MINI_NESTED, 100 + fsdp_comm_rank(s->m.comm)));
    FSDP_TRY(fsdp_pass_begin(&s->m.pass, s->m.comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(&s->m, s->m.pass, "[5 ]5 {5", 110));
    FSDP_TRY(fsdpi_stream_fill(fsdp_unit_stream(u), fsdp_unit_grad(u, 2, &beta), 0xff, 37 * sizeof(float))); /* NaNs */
    FSDP_TRY(mini_run(&s->m, s->m.pass, "}5", 110));
    FSDP_TRY(fsdp_pass_end(s->m.pass));
    s->m.pass = NULL;
    rank_check(fsdp_optim_step(s->m.optim, NULL) == FSDP_ERR_NONFINITE);
    FSDP_TRY(mini_leaf(&s->m, MINI_NESTED, 120 + fsdp_comm_rank(s->m.comm)));
    FSDP_TRY(fsdp_step_begin(mini_list(&s->m)));
    FSDP_TRY(fsdp_step_cancel(mini_list(&s->m)));
    FSDP_TRY(fsdp_state_read(&after, s->c, &(fsdp_state_opts){ .kind = FSDP_STATE_LOCAL }));
    rank_check(same_state(before, after));
    fsdp_state_destroy(before);
    fsdp_state_destroy(after);
    return FSDP_OK;
}

static bool same_files(const char *a, const char *b)
{
    char command[1500];
    snprintf(command, sizeof(command), "diff -r %s %s >/dev/null", a, b);
    return system(command) == 0;
}

static fsdp_status collect(saved_mini *s, result *out)
{
    fsdp_state *full;
    int64_t at = 0;
    FSDP_TRY(fsdp_state_read(&full, s->c, &(fsdp_state_opts){ .which = FSDP_STATE_PARAMS | FSDP_STATE_OPTIM, .rank0_only = true }));
    for (int i = 0; i < fsdp_state_count(full); i++) {
        const fsdp_state_tensor *t = fsdp_state_at(full, i);
        rank_check(at + t->count <= MOST);
        if (t->count > 0) memcpy(out->all + at, t->data, (size_t)t->count * sizeof(float));
        at += t->count;
    }
    rank_check(fsdp_comm_rank(s->m.comm) != 0 || at == (1 + fsdp_optim_state_kinds(s->m.optim)) * mini_numel());
    fsdp_state_destroy(full);
    return FSDP_OK;
}

static fsdp_status live(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const plan *p = c->arg;
    char folder[2][300], path[400];
    saved_mini s;
    fsdp_state *sharded, *full, *again;
    for (int i = 0; i < 2; i++) snprintf(folder[i], sizeof(folder[i]), "%s/%d", p->folder, i);
    snprintf(path, sizeof(path), "%s/step-00000001", folder[1]);
    FSDP_TRY(saved_mini_open(&s, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .storage = p->storage, .state = p->state, .grads = p->grads,
                                                     .sgd = p->sgd, .shards = p->halves ? fsdp_comm_size(comm) / 2 : 0 }));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 0, LEAVES));
    FSDP_TRY(fsdp_comm_reset(comm));
    FSDP_TRY(freeze(&s, true));
    FSDP_TRY(mini_step(&s.m, MINI_NESTED, 1, LEAVES));
    FSDP_TRY(fsdp_state_read(&full, s.c, NULL));
    FSDP_TRY(fsdp_state_read(&sharded, s.c, &(fsdp_state_opts){ .kind = FSDP_STATE_SHARDED }));
    FSDP_TRY(fsdp_checkpoint_save_with(s.c, folder[1], 1, &(fsdp_save_opts){ .background = true }));
    FSDP_TRY(saved_mini_disturb(&s, 7));
    FSDP_TRY(fsdp_checkpoint_wait(s.c));
    FSDP_TRY(fsdp_checkpoint_load(s.c, path));
    FSDP_TRY(fsdp_state_read(&again, s.c, NULL));
    rank_check(same_state(full, again));
    fsdp_state_destroy(again);
    FSDP_TRY(fsdp_checkpoint_save(s.c, folder[0], 1, 0));
    FSDP_TRY(fsdp_comm_barrier(comm));
    rank_check(same_files(folder[0], folder[1]));
    FSDP_TRY(freeze(&s, false));
    FSDP_TRY(refused_step(&s));
    FSDP_TRY(saved_mini_disturb(&s, 8));
    FSDP_TRY(fsdp_state_load(s.c, sharded, NULL));
    FSDP_TRY(fsdp_state_read(&again, s.c, NULL));
    rank_check(same_state(full, again));
    for (int step = 2; step < 4; step++) FSDP_TRY(mini_step(&s.m, MINI_NESTED, step, LEAVES));
    FSDP_TRY(collect(&s, c->shared));
    fsdp_state_destroy(again);
    fsdp_state_destroy(sharded);
    fsdp_state_destroy(full);
    saved_mini_close(&s);
    return FSDP_OK;
}

static void clear(const char *folder)
{
    char command[600];
    snprintf(command, sizeof(command), "rm -rf %s/*", folder);
    assert_int_equal(system(command), 0);
}

static void test_the_same_bits_wherever_state_is_kept(void **state)
{
    (void)state;
    /* compute, slices, state, sums of gradients */
    static const struct {
        const char *device, *storage, *state, *grads;
    } places[] = { { "guard", NULL, "cpu", NULL }, { "cpu", NULL, "guard", NULL }, { "guard", "cpu", "guard", NULL }, { "cpu", "guard", "cpu", NULL },
                   { "guard", NULL, "cpu", "cpu" } };
    static const int ranks[] = { 1, 2, 3, 4 };
    result *want = shared_alloc(sizeof(*want)), *got = shared_alloc(sizeof(*got));
    char folder[300];
    snprintf(folder, sizeof(folder), "%s", scratch("bits"));
    assert_int_equal(mkdir(folder, 0700), 0);
    for (int sgd = 0; sgd < 2; sgd++) {
        plan p = { .sgd = sgd, .folder = folder };
        corner one = { .transport = "self", .device = "cpu", .ranks = 1, .threads = !CAN_FORK, .arg = &p, .shared = want };
        memset(want, 0, sizeof(*want));
        if (in_corner(live, &one) != FSDP_OK) fail_msg("one rank: %s", fsdp_last_error());
        clear(folder);
        for (int k = 0; k < 40; k += SANITIZED ? 7 : sgd ? 3 : 1) {
            corner c = { .transport = k / 5 % 2 ? "copy" : "shm", .device = places[k % 5].device, .mode = (fsdp_mode)(k / 10),
                         .ranks = ranks[(k / 5 + k + sgd) % 4], .threads = k % 3 == 0 || !CAN_FORK, .arg = &p, .shared = got };
            p.storage = places[k % 5].storage;
            p.state = places[k % 5].state;
            p.grads = places[k % 5].grads;
            p.halves = c.mode != FSDP_MODE_NONE && c.ranks % 2 == 0 && (k + sgd) % 3 != 0;
            memset(got, 0, sizeof(*got));
            if (in_corner(live, &c) != FSDP_OK) fail_msg("%s, place %d: %s", corner_name(&c), k % 5, fsdp_last_error());
            if (memcmp(want, got, sizeof(*want)) != 0)
                fail_msg("%s, place %d%s, %s: other bits", corner_name(&c), k % 5, p.halves ? ", 2 replicas" : "", sgd ? "SGD" : "AdamW");
            clear(folder);
        }
    }
    shared_free(want, sizeof(*want));
    shared_free(got, sizeof(*got));
}

/* ---- units on several devices, one optimizer ---- */

enum { UNITS = 9, NUMEL = 700 };

static void init(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)arg;
    *value = 0.25f + (float)(i % 17);
}

/* Of a unit and its twin. Three units have no gradients in a step. */
static fsdp_status one_pass(fsdp_comm *comm, fsdp_unit *unit[UNITS][2], int step)
{
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    for (int u = 0; u < UNITS; u++)
        for (int twin = 0; twin < 2 && u % 3 != step % 4; twin++) {
            fsdp_unit *x = unit[u][twin];
            float beta;
            FSDP_TRY(fsdp_unit_begin_forward(x, pass));
            FSDP_TRY(fsdp_unit_end_forward(x, pass));
            FSDP_TRY(fsdp_unit_begin_backward(x, pass));
            size_t bytes = (size_t)fsdp_unit_param_numel(x, 0) * sizeof(float);
            FSDP_TRY(fsdpi_stream_fill(fsdp_unit_stream(x), fsdp_unit_grad(x, 0, &beta), 0x3a + (u + step) % 4, bytes)); /* they make small numbers */
            FSDP_TRY(fsdp_unit_end_backward(x, pass));
        }
    return fsdp_pass_end(pass);
}

/* Slices on the host and on two other devices, with state on the host; or on the host and on the one device that state is on. Each unit has
 * a twin, whose state is beside its slices. */
static fsdp_status several(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const bool on_host = strcmp(c->device, "cpu") == 0;
    fsdp_device *dev[3] = { fsdp_device_cpu(), NULL, NULL };
    fsdp_unit *unit[UNITS][2], *list[2][UNITS];
    fsdp_optim *optim[2];
    for (int i = 1; i < 3; i++) FSDP_TRY(fsdp_device_open(&dev[i], "guard"));
    for (int u = 0; u < UNITS; u++)
        for (int twin = 0; twin < 2; twin++) {
            const fsdp_param p = { "w", 1, { u % 4 == 1 ? NUMEL : 5 + 9 * u } }; /* sizes grow and shrink */
            FSDP_TRY(fsdp_unit_create(&unit[u][twin], comm, &p, 1, &(fsdp_unit_opts){ .mode = c->mode, .compute_device = dev[on_host ? u / 3 : u % 2] }));
            FSDP_TRY(fsdp_unit_init(unit[u][twin], init, NULL));
            list[twin][u] = unit[u][twin];
        }
    FSDP_TRY(fsdp_optim_create_adamw(&optim[0], (fsdp_unit_list){ list[0], UNITS }, &(fsdp_adamw_opts){ .lr = 0.1f, .state_device = dev[on_host ? 0 : 1] }));
    FSDP_TRY(fsdp_optim_create_adamw(&optim[1], (fsdp_unit_list){ list[1], UNITS }, &(fsdp_adamw_opts){ .lr = 0.1f }));
    for (int step = 0; step < 8; step++) {
        FSDP_TRY(one_pass(comm, unit, step));
        for (int twin = 0; twin < 2; twin++) FSDP_TRY(fsdp_optim_step(optim[twin], NULL));
    }
    for (int u = 0; u < UNITS; u++) {
        float x[2][NUMEL];
        size_t bytes = (size_t)fsdp_unit_param_numel(unit[u][0], 0) * sizeof(float);
        for (int twin = 0; twin < 2; twin++) FSDP_TRY(fsdp_unit_read_param(unit[u][twin], 0, x[twin]));
        rank_check(x[0][0] < 0.25f && memcmp(x[0], x[1], bytes) == 0);
        rank_check(fsdp_optim_unit_steps(optim[0], unit[u][0]) == 6);
        fsdp_stream *storage = fsdp_unit_storage_stream(unit[u][0]), *reaches = fsdp_optim_state_stream(optim[0], unit[u][0]);
        rank_check((reaches == storage) == (on_host || u % 2 == 1) && fsdp_optim_state_stream(optim[1], unit[u][0]) == NULL);
    }
    for (int twin = 0; twin < 2; twin++) fsdp_optim_destroy(optim[twin]);
    for (int u = 0; u < 2 * UNITS; u++) fsdp_unit_destroy(unit[u / 2][u % 2]);
    for (int i = 1; i < 3; i++) fsdp_device_close(dev[i]);
    return FSDP_OK;
}

static void test_several_devices(void **state)
{
    (void)state;
    in_corners(several, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true });
}

/* ---- without waiting ---- */

enum { LARGE = SANITIZED ? 1 << 17 : 1 << 21, END = 64 };

static fsdp_status state_end(fsdp_optim *o, fsdp_unit *u, int kind, float out[END])
{
    float *state;
    int64_t numel = fsdp_unit_slice_numel(u);
    FSDP_TRY(fsdp_optim_state(o, u, kind, &state));
    FSDP_TRY(fsdp_stream_copy(fsdp_optim_state_stream(o, u), out, state + numel - END, END * sizeof(float)));
    return fsdp_stream_sync(fsdp_optim_state_stream(o, u));
}

/* Copies of a large unit's state are still under way when a step returns. What is read on its stream then is what the step made of it; and
 * memory that the optimizer gives back is nobody else's until they have ended. */
static fsdp_status at_once(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const fsdp_param p = { "w", 1, { LARGE } };
    fsdp_device *dev, *far;
    fsdp_unit *u[2];
    fsdp_optim *o[2];
    fsdpi_devctx *host;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    FSDP_TRY(fsdp_device_open(&far, strcmp(c->device, "cpu") == 0 ? "guard" : "cpu"));
    for (int i = 0; i < 2; i++) {
        FSDP_TRY(fsdp_unit_create(&u[i], comm, &p, 1, &(fsdp_unit_opts){ .compute_device = dev }));
        FSDP_TRY(fsdp_unit_init(u[i], init, NULL));
        FSDP_TRY(fsdp_optim_create_adamw(&o[i], (fsdp_unit_list){ &u[i], 1 }, &(fsdp_adamw_opts){ .lr = 0.1f, .state_device = i == 0 ? far : NULL }));
    }
    FSDP_TRY(fsdpi_runtime_device(&host, u[0]->rt, fsdp_device_cpu()));
    for (int step = 0; step < 4; step++) {
        fsdp_pass *pass;
        float beta, end[2][END];
        FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
        for (int i = 0; i < 2; i++) {
            FSDP_TRY(fsdp_unit_begin_forward(u[i], pass));
            FSDP_TRY(fsdp_unit_end_forward(u[i], pass));
            FSDP_TRY(fsdp_unit_begin_backward(u[i], pass));
            FSDP_TRY(fsdpi_stream_fill(fsdp_unit_stream(u[i]), fsdp_unit_grad(u[i], 0, &beta), 0x39 + step, LARGE * sizeof(float)));
            FSDP_TRY(fsdp_unit_end_backward(u[i], pass));
        }
        FSDP_TRY(fsdp_pass_end(pass));
        FSDP_TRY(fsdp_optim_step(o[1], NULL));
        FSDP_TRY(fsdp_optim_step(o[0], NULL));
        if (step == 3) break;
        for (int i = 0; i < 2; i++) FSDP_TRY(state_end(o[i], u[i], step % 2, end[i]));
        rank_check(end[0][0] != 0 && memcmp(end[0], end[1], sizeof(end[0])) == 0);
    }
    size_t bytes = (size_t)fsdp_unit_slice_numel(u[0]) * sizeof(float), other = 0;
    void *mine[2];
    fsdp_optim_destroy(o[0]);
    for (int i = 0; i < 2; i++) {
        FSDP_TRY(fsdpi_arena_alloc(host->arena, bytes, &mine[i]));
        memset(mine[i], 0x55, bytes);
    }
    FSDP_TRY(fsdpi_runtime_sync(u[0]->rt));
    for (int i = 0; i < 2; i++) {
        for (size_t k = 0; k < bytes; k++) other += ((char *)mine[i])[k] != 0x55;
        fsdpi_arena_free(host->arena, mine[i]);
    }
    rank_check(other == 0);
    fsdp_optim_destroy(o[1]);
    for (int i = 0; i < 2; i++) fsdp_unit_destroy(u[i]);
    fsdp_device_close(far);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_used_at_once(void **state)
{
    (void)state;
    in_corners(at_once, &(corners){ .ranks = (const int[]){ 1, 2, 0 }, .processes_only = CAN_FORK });
}

/* ---- bytes ---- */

typedef struct figures {
    size_t slices, state;   /* in use, on either device */
    uint64_t system_allocs;
} figures;

static fsdpi_devctx *ctx_of(const mini *m, const char *device)
{
    fsdpi_devctx *d = m->unit[0]->rt->devices;
    while (d != NULL && strcmp(fsdp_device_name(d->dev), device) != 0) d = d->next;
    return d;
}

static figures figures_of(const mini *m, const corner *c, const char *other)
{
    fsdpi_devctx *near = ctx_of(m, c->device), *far = ctx_of(m, other);
    fsdpi_arena_stats a = fsdpi_arena_get_stats(near->arena), b = far != NULL ? fsdpi_arena_get_stats(far->arena) : (fsdpi_arena_stats){ 0 };
    return (figures){ a.bytes_live, b.bytes_live, a.system_allocs + b.system_allocs };
}

static size_t kept_bytes(const mini *m, int u)
{
    return (size_t)fsdp_unit_slice_numel(m->unit[u]) * sizeof(float);
}

/* 2 x 4 bytes an element where state lies; where slices are, twice that of the largest unit that has any. A frozen trunk has none, until a
 * part of it is trained. */
static fsdp_status bytes(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const char *other = strcmp(c->device, "cpu") == 0 ? "guard" : "cpu";
    const unsigned trunk = 1u << MINI_BIG | 1u << MINI_B;
    mini m;
    fsdp_device *far;
    FSDP_TRY(fsdp_device_open(&far, other));
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .frozen = trunk }));
    fsdp_optim_destroy(m.optim);
    m.optim = NULL;
    figures bare = figures_of(&m, c, other);
    for (int turn = 0; turn < 2; turn++) {
        size_t most = 0, all = 0;
        FSDP_TRY(mini_freeze(&m, MINI_BIG, true));
        FSDP_TRY(fsdp_optim_create_adamw(&m.optim, mini_list(&m), &(fsdp_adamw_opts){ .lr = 0.1f, .state_device = far }));
        for (int u = 0; u < MINI_UNITS; u++) {
            most = !(trunk >> u & 1) && kept_bytes(&m, u) > most ? kept_bytes(&m, u) : most;
            all += trunk >> u & 1 ? 0 : kept_bytes(&m, u);
        }
        figures now = figures_of(&m, c, other);
        rank_check(now.state == 2 * all && now.slices == bare.slices + 2 * 2 * most);
        for (int step = 0; step < 3; step++) {
            FSDP_TRY(mini_step(&m, MINI_NESTED, step, fsdp_comm_size(comm)));
            figures after = figures_of(&m, c, other);
            if (step == 0) now = after; /* accumulators */
            rank_check(after.state == 2 * all && after.slices == now.slices && after.system_allocs == now.system_allocs);
        }
        FSDP_TRY(mini_freeze(&m, MINI_BIG, false));
        for (int step = 0; step < 3; step++) {
            FSDP_TRY(mini_step(&m, MINI_NESTED, 3 + step, fsdp_comm_size(comm)));
            figures after = figures_of(&m, c, other);
            size_t sum = (size_t)fsdpi_unit_slice(m.unit[MINI_BIG]) * sizeof(float), large = kept_bytes(&m, MINI_BIG);
            rank_check(after.state == 2 * (all + large) && after.slices == now.slices + (turn == 0 ? sum : 0) + 2 * 2 * (large > most ? large - most : 0));
            if (step == 0) bare.system_allocs = after.system_allocs;
            rank_check(after.system_allocs == bare.system_allocs);
        }
        fsdp_optim_destroy(m.optim);
        m.optim = NULL;
        if (turn == 0) bare.slices = figures_of(&m, c, other).slices; /* with accumulators */
        now = figures_of(&m, c, other);
        rank_check(now.state == 0 && now.slices == bare.slices);
    }
    mini_destroy(&m);
    fsdp_device_close(far);
    return FSDP_OK;
}

static void test_bytes(void **state)
{
    (void)state;
    in_corners(bytes, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true });
}

/* ---- what is refused ---- */

/* One rank alone asks for what no stream reaches: no rank gets it, and each is told. Where momentum is 0 there is nothing to be put anywhere. */
static fsdp_status refused(fsdp_comm *comm, void *arg)
{
    (void)arg;
    const fsdp_param p = { "w", 1, { 50 } };
    fsdp_device *dev[2];
    fsdp_unit *u;
    fsdp_optim *o = NULL;
    char want[64];
    int last = fsdp_comm_size(comm) - 1;
    snprintf(want, sizeof(want), last > 0 ? "rank %d: unit \"u\": storage device guard" : "unit \"u\": storage device guard", last);
    for (int i = 0; i < 2; i++) FSDP_TRY(fsdp_device_open(&dev[i], "guard"));
    FSDP_TRY(fsdp_unit_create(&u, comm, &p, 1, &(fsdp_unit_opts){ .name = "u", .compute_device = dev[0] }));
    fsdp_unit_list list = { &u, 1 };
    fsdp_device *mine = fsdp_comm_rank(comm) == last ? dev[1] : fsdp_device_cpu();
    fsdp_status st = fsdp_optim_create_adamw(&o, list, &(fsdp_adamw_opts){ .state_device = mine });
    if (st != FSDP_ERR_UNSUPPORTED || o != NULL || strstr(fsdp_last_error_message(), want) == NULL ||
        strstr(fsdp_last_error_message(), "one of them must be the host's memory") == NULL)
        FSDP_FAIL(FSDP_ERR_INTERNAL, "%s: %s", fsdp_status_name(st), fsdp_last_error_message());
    FSDP_TRY(fsdp_optim_create_sgd(&o, list, &(fsdp_sgd_opts){ .lr = 1, .state_device = dev[1] }));
    fsdp_optim_destroy(o);
    FSDP_TRY(fsdp_optim_create_sgd(&o, list, &(fsdp_sgd_opts){ .lr = 1, .momentum = 0.5f, .state_device = dev[0] }));
    fsdp_optim_destroy(o);
    fsdp_unit_destroy(u);
    for (int i = 0; i < 2; i++) fsdp_device_close(dev[i]);
    return FSDP_OK;
}

static void test_two_devices_that_no_stream_reaches(void **state)
{
    (void)state;
    in_corners(refused, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .device = "guard", .threads_only = true });
}

/* ---- no memory on one rank ---- */

/* There is state, and in a step no memory to bring it to its slices, on rank 1: no rank makes the step, then all do. */
static fsdp_status starved(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int failures = 0;
    for (int n = 1; n <= 8; n++) { /* four blocks and their memory: what comes after these is launches */
        mini m;
        float before[1024], after[1024], *state;
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = "cpu", .state = "guard", .frozen = (1u << MINI_UNITS) - 1 }));
        FSDP_TRY(fsdp_optim_state(m.optim, m.unit[MINI_BIG], 0, &state));
        FSDP_TRY(mini_freeze(&m, MINI_BIG, false));
        FSDP_TRY(mini_leaf(&m, "F5 B5", fsdp_comm_rank(comm)));
        FSDP_TRY(mini_read(&m, before));
        fsdpi_arena_trim(m.unit[0]->store->arena);
        if (fsdp_comm_rank(comm) == 1) fsdpi_alloc_fail_at(n);
        fsdp_status st = fsdp_optim_step(m.optim, NULL);
        fsdpi_alloc_fail_at(0);
        if (st != FSDP_OK) {
            const char *said = fsdp_last_error_message();
            if (st != FSDP_ERR_NOMEM || strstr(said, "rank 1: no memory to update the optimizer's state of unit \"big\"") == NULL) return st;
            failures++;
            FSDP_TRY(mini_read(&m, after));
            rank_check(memcmp(before, after, (size_t)mini_numel() * sizeof(float)) == 0 && fsdp_optim_unit_steps(m.optim, m.unit[MINI_BIG]) == 0);
            FSDP_TRY(fsdp_optim_step(m.optim, NULL));
        }
        FSDP_TRY(mini_read(&m, after));
        rank_check(memcmp(before, after, (size_t)mini_numel() * sizeof(float)) != 0 && fsdp_optim_unit_steps(m.optim, m.unit[MINI_BIG]) == 1);
        mini_destroy(&m);
    }
    rank_check(failures >= 4);
    return FSDP_OK;
}

static void test_no_memory_on_one_rank(void **state)
{
    (void)state;
    in_corners(starved, &(corners){ .ranks = (const int[]){ 3, 0 }, .device = "cpu", .processes_only = true });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_same_bits_wherever_state_is_kept),
        cmocka_unit_test(test_several_devices),
        cmocka_unit_test(test_used_at_once),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_two_devices_that_no_stream_reaches),
        cmocka_unit_test(test_no_memory_on_one_rank),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
