/* SPDX-License-Identifier: MIT
 *
 * Passes without sync: any sequence of them and of synced ones gives the bits of a plain program in which each rank adds up its
 * own leaves, and the ranks' sums are added in rank order; nothing is reduced and nobody is met in between; what is pending can
 * be read; what fails loses itself alone. */
#include "support/mini_program.h"

#include "base/error.h"
#include "device/arena.h"
#include "shard/unit.h"

enum { PASSES = 3, PATTERNS = 8 }; /* a step's passes of a rank; which of them are synced: all ways, a step each */

static const char *const scripts[] = { MINI_NESTED, "[0 F1 F1 F2 F5 ]0 {0 B5 P2 B1 B1 }0 F1 B1 F3 B3", "F1 B1 F1 B1 F5 N5" };

static bool synced(int step, int pass)
{
    return (step % PATTERNS >> pass & 1) != 0;
}

static bool turn(const mini_program *p, int ranks, int step, int j, int rank, mini_turn *out)
{
    *out = (mini_turn){ .script = p->script, .leaf = (step * ranks + rank) * PASSES + j, .no_sync = !synced(step, j) };
    return j < PASSES;
}

/* A unit that is not in the synced pass, and rounds that are not: they go with the step. */
static bool other_units(const mini_program *p, int ranks, int step, int j, int rank, mini_turn *out)
{
    static const char *const some[] = { "F1 B1 F1 B1 F2 B2", "F1 B1 F5 B5", "F2 F3 B3 B2 F2 B2" };
    bool more = turn(p, ranks, step, j, rank, out);
    out->script = some[(step + j) % 3];
    return more;
}

static const mini_change part_of_b[] = { { 0, MINI_B, 0, true } };

static mini_program program_of(const char *script)
{
    return (mini_program){ .steps = PATTERNS, .turn = script != NULL ? turn : other_units, .script = script, .change = part_of_b, .changes = 1 };
}

static void test_all_sequences(void **state)
{
    (void)state;
    for (int s = 0; s < 4; s++) {
        mini_program p = program_of(s < 3 ? scripts[s] : NULL);
        mini_program_in_corners(&p, (corners){ .ranks = s == 1 ? (const int[]){ 1, 2, 5, 0 } : (const int[]){ 3, 0 }, .all_modes = s != 1, .threads_only = s > 0 });
    }
}

/* On meshes, and with slices that are kept on another device. */
static void test_meshes_and_offload(void **state)
{
    (void)state;
    mini_program p = program_of(scripts[1]);
    mini_program_on_meshes(&p, false);
}

/* Below fp32 a rank adds up in fp32 and rounds once, when it sends: the same bits in every corner, and others than in fp32. */
static mini_result first_corner;
static bool has_first;

static void compare_corners(const corner *c)
{
    const mini_result *got = c->shared;
    if (!has_first) first_corner = *got;
    has_first = true;
    for (int r = 0; r < c->ranks; r++)
        if (memcmp(first_corner.param[0], got->param[r], sizeof(got->param[r])) != 0) fail_msg("%s: rank %d has other bits than the first corner", corner_name(c), r);
}

static void test_types_below_fp32(void **state)
{
    (void)state;
    float plain_first = first_corner.param[0][1];
    for (int k = 0; k < 2; k++) {
        mini_program p = program_of(scripts[1]);
        p.units.reduce_dtype = k == 0 ? FSDP_F32 : FSDP_BF16;
        has_first = false;
        mini_program_in_corners(&p, (corners){ .ranks = (const int[]){ 3, 0 }, .all_modes = k == 1, .threads_only = true, .after = compare_corners });
        assert_true(first_corner.param[0][1] != plain_first);
        plain_first = first_corner.param[0][1];
    }
}

/* ---- no communication ---- */

static fsdp_status counts(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm);
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .prefetch = -1 }));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank));
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    fsdp_comm_stats a = comm_stats(comm);
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank)); /* synced: as many gathers */
    fsdp_comm_stats b = comm_stats(comm);
    rank_check(b.reduces - a.reduces == 6 && b.exchanges - a.exchanges == 1);
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    m.no_sync = true;
    for (int j = 0; j < 3; j++) {
        fsdp_comm_stats before = comm_stats(comm);
        FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank));
        fsdp_comm_stats after = comm_stats(comm);
        rank_check(after.reduces == before.reduces && after.exchanges == before.exchanges && after.reduce_bytes == before.reduce_bytes);
        rank_check(j > 0 || after.gathers - before.gathers == b.gathers - a.gathers);
    }
    a = comm_stats(comm);
    FSDP_TRY(fsdp_step_begin(mini_list(&m))); /* each unit's is posted once; and ranks agree on memory for replicas' gradients */
    b = comm_stats(comm);
    bool takes_memory = c->mode == FSDP_MODE_NONE && strcmp(c->transport, "copy") == 0;
    rank_check(b.reduces - a.reduces == 6 && b.exchanges - a.exchanges == (takes_memory ? 2 : 1));
    FSDP_TRY(fsdp_step_cancel(mini_list(&m)));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank));
    m.no_sync = false;
    a = comm_stats(comm);
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank)); /* the synced pass takes it along */
    b = comm_stats(comm);
    rank_check(b.reduces - a.reduces == 6);
    FSDP_TRY(fsdp_step_begin(mini_list(&m)));
    rank_check(comm_stats(comm).reduces == b.reduces);
    FSDP_TRY(fsdp_step_cancel(mini_list(&m)));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_no_communication(void **state)
{
    (void)state;
    in_corners(counts, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .all_modes = true, .threads_only = true });
}

/* ---- what is pending ---- */

static fsdp_status check_pending(mini *m, const plain *p, int rank, const char *when)
{
    fsdp_comm_stats before = comm_stats(m->comm);
    for (int u = 0; u < MINI_UNITS; u++)
        for (int i = 0; i < fsdp_unit_param_count(m->unit[u]); i++) {
            float want[512], got[512];
            int64_t offset = -1, n = -1, numel = fsdp_unit_param_numel(m->unit[u], i);
            bool own = plain_own(p, rank, u, i, want);
            FSDP_FAIL_IF(((fsdp_unit_pending(m->unit[u], i) & FSDP_PENDING_OWN) != 0) != own, FSDP_ERR_INTERNAL, "%s: unit %d: own: %d", when, u, !own);
            if (own) FSDP_TRY(fsdp_unit_read_pending(m->unit[u], i, FSDP_PENDING_OWN, &offset, &n, got));
            FSDP_FAIL_IF(own && (offset != 0 || n != numel || memcmp(want, got, (size_t)n * sizeof(float)) != 0), FSDP_ERR_INTERNAL, "%s: unit %d, parameter %d: other bits", when, u, i);
            if (!own) rank_check(fsdp_unit_read_pending(m->unit[u], i, FSDP_PENDING_OWN, &offset, &n, got) == FSDP_ERR_STATE);
            bool reduced = plain_reduced(p, u, i, want);
            FSDP_FAIL_IF(((fsdp_unit_pending(m->unit[u], i) & FSDP_PENDING_REDUCED) != 0) != reduced, FSDP_ERR_INTERNAL, "%s: unit %d: reduced: %d", when, u, !reduced);
            if (!reduced) continue;
            FSDP_TRY(fsdp_unit_read_pending(m->unit[u], i, FSDP_PENDING_REDUCED, &offset, &n, got));
            rank_check(offset >= 0 && n >= 0 && offset + n <= numel);
            FSDP_FAIL_IF(n > 0 && memcmp(want + offset, got, (size_t)n * sizeof(float)) != 0, FSDP_ERR_INTERNAL, "%s: unit %d, parameter %d: other bits in the slice", when, u, i);
        }
    fsdp_comm_stats after = comm_stats(m->comm);
    rank_check(after.exchanges == before.exchanges && after.reduces == before.reduces && after.gathers == before.gathers);
    return FSDP_OK;
}

/* The whole gradients in a step, on every rank but one, which takes part alone. */
static fsdp_status check_step_grads(mini *m, const plain *p)
{
    FSDP_TRY(fsdp_step_begin(mini_list(m)));
    for (int u = 0; u < MINI_UNITS; u++)
        for (int i = 0; i < fsdp_unit_param_count(m->unit[u]); i++) {
            float want[512], got[512];
            bool takes = fsdp_comm_rank(m->comm) != 1;
            fsdp_status st = fsdp_unit_read_grad(m->unit[u], i, takes ? got : NULL);
            if (!plain_reduced(p, u, i, want)) {
                rank_check(st == FSDP_ERR_STATE);
                continue;
            }
            FSDP_TRY(st);
            rank_check(!takes || memcmp(want, got, (size_t)fsdp_unit_param_numel(m->unit[u], i) * sizeof(float)) == 0);
        }
    return fsdp_step_cancel(mini_list(m));
}

static fsdp_status pending(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    static const struct {
        const char *script;
        bool sync;
    } passes[] = { { "F1 B1 F1 B1 F2 B2", false }, { "F1 B1", false }, { "F1 B1 F5 B5", true }, { "F1 B1 F5 B5 F3 B3", false } };
    mini m;
    mini_opts o = c->arg != NULL ? *(const mini_opts *)c->arg : (mini_opts){ 0 };
    plain *p = plain_create();
    plain_set_grad_dtype(p, o.grad_dtype);
    o.mode = c->mode;
    o.device = c->device;
    o.sgd = true;
    FSDP_TRY(mini_create(&m, comm, &o));
    FSDP_TRY(check_pending(&m, p, rank, "before"));
    for (int j = 0; j < 4; j++) {
        for (int r = 0; r < size; r++) plain_leaf_of(p, passes[j].script, r * 4 + j, r, passes[j].sync);
        m.no_sync = !passes[j].sync;
        FSDP_TRY(mini_leaf(&m, passes[j].script, rank * 4 + j));
        FSDP_TRY(check_pending(&m, p, rank, "after a pass"));
    }
    rank_check(fsdp_unit_set_frozen(m.unit[MINI_B], 0, true) == FSDP_ERR_STATE); /* of b nothing was sent, but it has gradients */
    rank_check(strstr(fsdp_unit_state(m.unit[MINI_B]), "some not sent") != NULL);
    rank_check(fsdp_unit_read_pending(m.unit[MINI_A], 9, FSDP_PENDING_OWN, NULL, NULL, NULL) == FSDP_ERR_INVALID);
    rank_check(fsdp_unit_read_pending(m.unit[MINI_A], 0, (fsdp_pending)3, NULL, NULL, NULL) == FSDP_ERR_INVALID);
    plain_send(p);
    FSDP_TRY(check_step_grads(&m, p));
    plain_zero_grad(p);
    FSDP_TRY(check_pending(&m, p, rank, "after the step"));
    FSDP_TRY(mini_leaf(&m, "F1 B1", rank)); /* dropped */
    FSDP_TRY(fsdp_unit_zero_grad(m.unit[MINI_A]));
    FSDP_TRY(check_pending(&m, p, rank, "dropped"));
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank)); /* destroyed with gradients that were not sent */
    plain_destroy(p);
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_pending_gradients_are_read(void **state)
{
    (void)state;
    in_corners(pending, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true });
    in_corners(pending, &(corners){ .ranks = (const int[]){ 3, 0 }, .all_modes = true, .threads_only = true, .arg = &(mini_opts){ .grad_dtype = FSDP_BF16 } });
}

/* ---- what fails loses itself alone ---- */

/* Between the passes of a step: cancelled ones of both kinds, at every place; and two that overlap, the last of which is synced. */
static fsdp_status with_failures(const mini_program *p, mini *m, int step)
{
    static const char *const parts[] = { "[0", "[0 F1 {1", "F1 B1 F1 {1 }1", "[0 F1 F2 ]0 {0 B2 B1", MINI_NESTED, "F1 B1 F1 B1" };
    mini_turn t;
    for (int j = 0; p->turn(p, fsdp_comm_size(m->comm), step, j, fsdp_comm_rank(m->comm), &t); j++) {
        fsdp_pass *lost;
        FSDP_TRY(fsdp_pass_begin(&lost, m->comm, FSDP_PASS_TRAIN));
        if ((step + j) % 2) FSDP_TRY(fsdp_pass_set_sync(lost, false));
        fsdp_pass_add_weight(lost, 1000);
        m->number[4000] = 0;
        FSDP_TRY(mini_run(m, lost, parts[(step * PASSES + j) % 6], 4000));
        FSDP_TRY(fsdp_pass_cancel(lost));
        FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m->unit[0])));
        m->no_sync = t.no_sync;
        FSDP_TRY(mini_leaf(m, t.script, t.leaf));
    }
    return FSDP_OK;
}

static void test_cancelled_passes(void **state)
{
    (void)state;
    mini_program p = { .steps = PATTERNS, .turn = turn, .script = scripts[1], .passes = with_failures };
    mini_program_in_corners(&p, (corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true });
}

static bool last_sends(const mini_program *p, int ranks, int step, int j, int rank, mini_turn *out)
{
    bool more = turn(p, ranks, step, j, rank, out);
    out->no_sync = j < PASSES - 1;
    return more;
}

/* 1F1B: forward a, forward b, backward a, forward c, backward b, backward c; gradients go with the last backward alone. */
static fsdp_status pipeline(const mini_program *p, mini *m, int step)
{
    fsdp_pass *pass[PASSES + 1] = { NULL };
    int size = fsdp_comm_size(m->comm);
    fsdp_comm_stats before = comm_stats(m->comm);
    FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m->unit[0])));
    for (int j = 0; j <= PASSES; j++) {
        mini_turn t;
        if (p->turn(p, size, step, j, fsdp_comm_rank(m->comm), &t)) {
            FSDP_TRY(fsdp_pass_begin(&pass[j], m->comm, FSDP_PASS_TRAIN));
            m->number[t.leaf] = 0;
            FSDP_TRY(mini_run(m, pass[j], "[0 F1 F2 ]0", t.leaf));
        }
        if (j == 0) continue;
        bool last = j == PASSES;
        FSDP_TRY(fsdp_pass_set_sync(pass[j - 1], last));
        FSDP_TRY(mini_run(m, pass[j - 1], "{0 B2 B1 }0", t.leaf - 1));
        rank_check(fsdp_pass_set_sync(pass[j - 1], last) == FSDP_ERR_STATE); /* too late */
        FSDP_TRY(fsdp_pass_end(pass[j - 1]));
        rank_check(comm_stats(m->comm).reduces - before.reduces == (last && size > 1 ? 3 : 0));
    }
    return FSDP_OK;
}

static void test_the_last_backward_sends(void **state)
{
    (void)state;
    mini_program p = { .steps = PATTERNS, .turn = last_sends, .script = "[0 F1 F2 ]0 {0 B2 B1 }0", .passes = pipeline };
    mini_program_in_corners(&p, (corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true });
}

/* A rank alone ends a pass without sync, the other cancels it: after the reset neither has what only one has; what was sent stays. */
static fsdp_status end_or_cancel(mini *m)
{
    fsdp_pass *pass;
    int rank = fsdp_comm_rank(m->comm);
    FSDP_TRY(fsdp_pass_begin(&pass, m->comm, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_pass_set_sync(pass, false));
    fsdp_pass_add_weight(pass, 7);
    FSDP_TRY(mini_run(m, pass, "F1 B1 F5 B5", rank));
    FSDP_TRY(rank == 0 ? fsdp_pass_cancel(pass) : fsdp_pass_end(pass));
    FSDP_TRY(fsdp_step_begin(mini_list(m)));
    return fsdp_step_end(mini_list(m));
}

static fsdp_status differing(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    mini m;
    double norm[2], weight;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device, .sgd = true }));
    FSDP_TRY(mini_leaf(&m, "F1 B1", rank));
    m.no_sync = true;
    FSDP_TRY(mini_leaf(&m, "F2 B2", rank)); /* all ranks have it: it stays */
    FSDP_TRY(fsdp_comm_barrier(comm));
    rank_check(end_or_cancel(&m) == FSDP_ERR_COMM && strstr(fsdp_last_error_message(), "rank 0: cancellation of a pass") != NULL);
    FSDP_TRY(fsdp_comm_reset(comm));
    rank_check(fsdp_unit_pending(m.unit[MINI_A], 0) == FSDP_PENDING_REDUCED);
    /* A device that runs late may have failed in a wait for the others: then it is gone as well, on all ranks. */
    unsigned of_b = fsdp_unit_pending(m.unit[MINI_B], 0);
    rank_check((of_b == FSDP_PENDING_OWN || (of_b == 0 && strcmp(c->device, "guard") == 0)) && fsdp_unit_pending(m.unit[MINI_BIG], 0) == 0);
    FSDP_TRY(fsdp_step_begin(mini_list(&m)));
    FSDP_TRY(fsdp_step_grad_norm(mini_list(&m), &norm[0], &weight));
    rank_check(weight == 0);
    FSDP_TRY(fsdp_step_cancel(mini_list(&m)));
    FSDP_TRY(mini_leaf(&m, "F1 B1 F2 B2", rank));
    m.no_sync = false;
    FSDP_TRY(mini_leaf(&m, "F1 B1 F2 B2", rank + size));
    FSDP_TRY(fsdp_step_begin(mini_list(&m)));
    FSDP_TRY(fsdp_step_grad_norm(mini_list(&m), &norm[1], NULL));
    rank_check(norm[0] > 0 && norm[1] > 0);
    FSDP_TRY(fsdp_step_cancel(mini_list(&m)));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_ranks_that_ended_different_passes(void **state)
{
    (void)state;
    in_corners(differing, &(corners){ .ranks = (const int[]){ 2, 3, 0 }, .threads_only = true, .all_modes = true });
}

/* ---- weights and memory ---- */

static fsdp_status figures(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    mini m;
    double weight;
    fsdp_pass *pass;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_EVAL));
    rank_check(fsdp_pass_set_sync(pass, false) == FSDP_ERR_STATE);
    FSDP_TRY(fsdp_pass_end(pass));
    size_t live = 0;
    for (int s = 0; s < 8; s++) {
        double want = 0;
        for (int j = 0; j < 3; j++) {
            FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
            FSDP_TRY(fsdp_pass_set_sync(pass, (s % 4 >> j & 1) != 0));
            m.number[rank] = 0;
            FSDP_TRY(mini_run(&m, pass, MINI_NESTED, rank));
            fsdp_pass_add_weight(pass, rank + 10 * j + 1);
            FSDP_TRY(fsdp_pass_end(pass));
            FSDP_TRY(fsdp_stream_sync(fsdp_unit_stream(m.unit[0])));
            for (int r = 0; r < size; r++) want += r + 10 * j + 1;
        }
        FSDP_TRY(fsdp_step_begin(mini_list(&m)));
        FSDP_TRY(fsdp_step_grad_norm(mini_list(&m), NULL, &weight));
        rank_check(weight == want);
        FSDP_TRY(fsdp_step_end(mini_list(&m)));
        size_t now = fsdpi_arena_get_stats(m.unit[0]->ctx->arena).bytes_live;
        rank_check(s < 5 || now == live); /* nothing is left behind */
        live = now;
    }
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_weights_and_memory(void **state)
{
    (void)state;
    in_corners(figures, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .threads_only = true, .all_modes = true });
}

/* ---- what else one does in between ---- */

/* With gradients pending of both kinds: a save, a summon, an evaluation; the step is as if there had been none. */
static fsdp_status in_between(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm);
    float got[2][1024];
    for (int run = 0; run < 2; run++) {
        mini m;
        FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
        FSDP_TRY(mini_leaf(&m, "F1 B1 F2 B2", rank));
        m.no_sync = true;
        FSDP_TRY(mini_leaf(&m, "F1 B1 F5 B5", 8 + rank));
        if (run == 1) {
            fsdp_checkpoint *save;
            fsdp_pass *eval;
            FSDP_TRY(fsdp_checkpoint_create(&save, comm));
            for (int u = 0; u < MINI_UNITS; u++)
                for (int i = 0; i < fsdp_unit_param_count(m.unit[u]); i++)
                    FSDP_TRY(fsdp_checkpoint_add_param(save, fsdp_unit_param_info(m.unit[u], i)->name, m.unit[u], i));
            FSDP_TRY(fsdp_checkpoint_add_optim(save, m.optim));
            FSDP_TRY(fsdp_checkpoint_save(save, c->arg, 1, 1));
            fsdp_checkpoint_destroy(save);
            float x[36];
            FSDP_TRY(fsdp_unit_read_param(m.unit[MINI_A], 0, x));
            FSDP_TRY(fsdp_unit_summon_begin(m.unit[MINI_A], NULL));
            FSDP_TRY(fsdp_unit_summon_end(m.unit[MINI_A]));
            rank_check(fsdp_unit_summon_begin(m.unit[MINI_A], &(fsdp_unit_summon_opts){ .grads = true }) == FSDP_ERR_STATE);
            rank_check(strstr(fsdp_last_error_message(), "passes without sync") != NULL);
            FSDP_TRY(fsdp_unit_summon_begin(m.unit[MINI_B], &(fsdp_unit_summon_opts){ .grads = true })); /* it has none of these */
            FSDP_TRY(fsdp_unit_summon_end(m.unit[MINI_B]));
            FSDP_TRY(fsdp_pass_begin(&eval, comm, FSDP_PASS_EVAL));
            FSDP_TRY(mini_run(&m, eval, "F1 F2", 99));
            FSDP_TRY(fsdp_pass_end(eval));
        }
        FSDP_TRY(mini_leaf(&m, "F1 B1", 16 + rank));
        FSDP_TRY(fsdp_optim_step(m.optim, NULL));
        FSDP_TRY(mini_read(&m, got[run]));
        mini_destroy(&m);
    }
    rank_check(memcmp(got[0], got[1], (size_t)mini_numel() * sizeof(float)) == 0);
    return FSDP_OK;
}

static void test_saving_in_between(void **state)
{
    (void)state;
    char folder[] = "/tmp/fsdp-no-sync-XXXXXX", command[64];
    assert_non_null(mkdtemp(folder));
    in_corners(in_between, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .threads_only = true, .all_modes = true, .arg = folder });
    snprintf(command, sizeof(command), "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_sequences),
        cmocka_unit_test(test_meshes_and_offload),
        cmocka_unit_test(test_types_below_fp32),
        cmocka_unit_test(test_no_communication),
        cmocka_unit_test(test_pending_gradients_are_read),
        cmocka_unit_test(test_cancelled_passes),
        cmocka_unit_test(test_the_last_backward_sends),
        cmocka_unit_test(test_ranks_that_ended_different_passes),
        cmocka_unit_test(test_weights_and_memory),
        cmocka_unit_test(test_saving_in_between),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
