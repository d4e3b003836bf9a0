/* SPDX-License-Identifier: MIT
 *
 * Frozen parameters: what trains beside them has the bits of a plain program, they themselves keep every bit, through
 * weight decay and momentum, in and across units, frozen and unfrozen in mid-run; they are in no norm, and a unit of
 * nothing else reduces nothing. */
#include "support/mini_program.h"

#include "base/error.h"
#include "shard/unit.h"

enum { STEPS = 5, LEAVES = 30 };

/* What is frozen before a step, and what is trained again: a part of a unit, a middle one, whole units, the root. */
static const mini_change changes[] = {
    { 0, MINI_A, 0, true },   { 0, MINI_B, 0, true },    { 0, MINI_B, 1, true },    { 0, MINI_BIG, 2, true },
    { 1, MINI_ROOT, 1, true }, { 2, MINI_A, 0, false },  { 2, MINI_BIG, 0, true },  { 2, MINI_TINY, 0, true },
    { 3, MINI_B, 1, false },  { 3, MINI_BIG, 1, true },  { 3, MINI_ROOT, 0, true }, { 4, MINI_TINY, 0, false },
    { 4, MINI_BIG, 0, false }, { 4, MINI_A, 1, true },   { 4, MINI_A, 0, true },
};

static const char *const scripts[] = { MINI_NESTED, "[0 F1 F1 F2 F5 ]0 {0 B5 P2 B1 B1 }0 F1 B1 F3 B3", "F2 F5 B5 F1 B1 F1 B1" };

/* So many leaves a step that the ranks divide them. */
static bool turn(const mini_program *p, int ranks, int step, int j, int rank, mini_turn *out)
{
    int leaf = rank + j * ranks;
    *out = (mini_turn){ .script = p->script, .leaf = step * LEAVES + leaf };
    return leaf < (ranks == 5 ? 5 : ranks == 4 ? 8 : 6);
}

static mini_program program_of(const char *script)
{
    return (mini_program){ .steps = STEPS, .turn = turn, .script = script, .change = changes, .changes = sizeof(changes) / sizeof(changes[0]) };
}

static void test_what_trains_has_the_bits_of_a_plain_program(void **state)
{
    (void)state;
    for (int s = 0; s < 3; s++) {
        mini_program p = program_of(scripts[s]);
        mini_program_in_corners(&p, (corners){ .ranks = (const int[]){ s == 0 ? 3 : 2, s == 1 ? 5 : 1, 0 }, .all_modes = true, .threads_only = s > 0 });
    }
}

/* On meshes, and with slices that are kept on another device. */
static void test_meshes_and_offload(void **state)
{
    (void)state;
    mini_program p = program_of(scripts[1]);
    mini_program_on_meshes(&p, true);
}

/* ---- figures ---- */

static fsdp_status norm_of(fsdp_unit_list l, double *norm)
{
    FSDP_TRY(fsdp_step_begin(l));
    FSDP_TRY(fsdp_step_grad_norm(l, norm, NULL));
    return fsdp_step_cancel(l);
}

/* The norm of all units without b, and of all of which b is frozen, are one; b's window is the one that is not posted. */
static fsdp_status figures(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm), size = fsdp_comm_size(comm);
    mini m;
    double without, with;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_unit *others[] = { m.unit[MINI_ROOT], m.unit[MINI_A], m.unit[MINI_TINY], m.unit[MINI_NONE], m.unit[MINI_BIG] };
    uint64_t before = comm_stats(comm).reduces;
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank));
    rank_check(comm_stats(comm).reduces - before == (size > 1 ? 6 : 0));
    FSDP_TRY(norm_of((fsdp_unit_list){ others, 5 }, &without));
    FSDP_TRY(fsdp_unit_zero_grad(m.unit[MINI_B]));
    for (int i = 0; i < 2; i++) FSDP_TRY(fsdp_unit_set_frozen(m.unit[MINI_B], i, true));
    before = comm_stats(comm).reduces;
    FSDP_TRY(mini_leaf(&m, MINI_NESTED, rank));
    rank_check(comm_stats(comm).reduces - before == (size > 1 ? 5 : 0));
    rank_check(strstr(fsdp_unit_state(m.unit[MINI_B]), "accumulated") == NULL);
    FSDP_TRY(norm_of(mini_list(&m), &with));
    rank_check(with == without && with > 0);
    /* A part of a unit: the squares of the others alone. */
    double all, part;
    uint64_t bytes = comm_stats(comm).reduce_bytes;
    FSDP_TRY(mini_leaf(&m, "F5 B5", rank));
    FSDP_TRY(norm_of((fsdp_unit_list){ &m.unit[MINI_BIG], 1 }, &all)); /* and all has run */
    bytes = comm_stats(comm).reduce_bytes - bytes;
    FSDP_TRY(fsdp_unit_set_frozen(m.unit[MINI_BIG], 0, true));
    uint64_t before_part = comm_stats(comm).reduce_bytes;
    FSDP_TRY(mini_leaf(&m, "F5 B5", rank));
    FSDP_TRY(norm_of((fsdp_unit_list){ &m.unit[MINI_BIG], 1 }, &part));
    /* Rank 0's slice is of the frozen parameter alone: it reads nothing of the others (a transport that copies also counts posts). */
    uint64_t bytes_part = comm_stats(comm).reduce_bytes - before_part;
    if (rank == 0 && size > 1) rank_check(strcmp(c->transport, "shm") == 0 ? bytes > 0 && bytes_part == 0 : bytes_part < bytes);
    rank_check(part > 0 && part < all / 2);
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_norms_and_collectives(void **state)
{
    (void)state;
    in_corners(figures, &(corners){ .ranks = (const int[]){ 1, 3, 0 }, .all_modes = true, .threads_only = true });
}

/* ---- optimizers ---- */

/* AdamW: a frozen parameter keeps value and moments; its t is its own. */
static fsdp_status moments(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    int rank = fsdp_comm_rank(comm);
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_unit *a = m.unit[MINI_A];
    float before[36], after[36];
    FSDP_TRY(mini_leaf(&m, "F1 B1", rank));
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    FSDP_TRY(fsdp_unit_set_frozen(a, 0, true));
    FSDP_TRY(fsdp_unit_read_param(a, 0, before));
    for (int s = 1; s < 4; s++) {
        FSDP_TRY(mini_leaf(&m, "F1 B1", s * 8 + rank));
        FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    }
    FSDP_TRY(fsdp_unit_read_param(a, 0, after));
    rank_check(memcmp(before, after, sizeof(before)) == 0);
    rank_check(fsdp_optim_param_steps(m.optim, a, 0) == 1 && fsdp_optim_param_steps(m.optim, a, 1) == 4 && fsdp_optim_unit_steps(m.optim, a) == 4);
    FSDP_TRY(fsdp_unit_set_frozen(a, 0, false));
    FSDP_TRY(mini_leaf(&m, "F1 B1", 40 + rank));
    FSDP_TRY(fsdp_optim_step(m.optim, NULL));
    FSDP_TRY(fsdp_unit_read_param(a, 0, after));
    rank_check(memcmp(before, after, sizeof(before)) != 0);
    rank_check(fsdp_optim_param_steps(m.optim, a, 0) == 2 && fsdp_optim_param_steps(m.optim, a, 1) == 5);
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_moments_and_steps_are_the_parameter_s_own(void **state)
{
    (void)state;
    in_corners(moments, &(corners){ .ranks = (const int[]){ 1, 2, 0 }, .all_modes = true, .threads_only = true });
}

/* ---- what is refused ---- */

static fsdp_status refusals(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    float beta = 7;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_unit *a = m.unit[MINI_A];
    rank_check(fsdp_unit_set_frozen(a, 2, true) == FSDP_ERR_INVALID && fsdp_unit_set_frozen(a, -1, true) == FSDP_ERR_INVALID);
    rank_check(!fsdp_unit_frozen(a, 0) && !fsdp_unit_frozen(a, 9) && !fsdp_unit_frozen(a, -1));
    FSDP_TRY(fsdp_unit_set_frozen(a, 0, true));
    FSDP_TRY(fsdp_unit_set_frozen(a, 0, true)); /* it is */
    FSDP_TRY(fsdp_pass_begin(&m.pass, comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(&m, m.pass, "F1 {1", 0));
    rank_check(fsdp_unit_grad(a, 0, &beta) == NULL && beta == 7 && strstr(fsdp_last_error_message(), "\"a.w\" is frozen") != NULL);
    rank_check(fsdp_unit_grad(a, 1, &beta) != NULL);
    FSDP_TRY(mini_run(&m, m.pass, "}1", 0));
    FSDP_TRY(fsdp_pass_end(m.pass));
    rank_check(fsdp_unit_set_frozen(a, 1, true) == FSDP_ERR_STATE && strstr(fsdp_last_error_message(), "fsdp_unit_zero_grad()") != NULL);
    FSDP_TRY(fsdp_step_begin(mini_list(&m)));
    const fsdp_slice *s;
    int n;
    fsdp_unit_slices(a, &s, &n);
    for (int i = 0; i < n; i++) rank_check(s[i].frozen == (s[i].param == 0) && (s[i].grad == NULL) == s[i].frozen);
    FSDP_TRY(fsdp_step_cancel(mini_list(&m)));
    FSDP_TRY(fsdp_unit_set_frozen(a, 1, true)); /* all of it */
    FSDP_TRY(mini_leaf(&m, "F1 F1 B1", 0));
    FSDP_TRY(fsdp_pass_begin(&m.pass, comm, FSDP_PASS_TRAIN));
    FSDP_TRY(mini_run(&m, m.pass, "F1 B1", 0));
    rank_check(fsdp_unit_begin_backward(a, m.pass) == FSDP_ERR_STATE); /* a second backward */
    FSDP_TRY(fsdp_pass_cancel(m.pass));
    FSDP_TRY(fsdp_step_begin((fsdp_unit_list){ &a, 1 })); /* a step without a gradient */
    double norm = 7;
    FSDP_TRY(fsdp_step_grad_norm((fsdp_unit_list){ &a, 1 }, &norm, NULL));
    rank_check(norm == 0);
    FSDP_TRY(fsdp_step_end((fsdp_unit_list){ &a, 1 }));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_refusals(void **state)
{
    (void)state;
    in_corners(refusals, &(corners){ .ranks = (const int[]){ 1, 2, 0 }, .all_modes = true, .threads_only = true });
}

/* Ranks that freeze different parameters are told so. */
static fsdp_status different(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .device = c->device }));
    fsdp_status st = fsdp_unit_set_frozen(m.unit[MINI_A], fsdp_comm_rank(comm), true);
    if (st == FSDP_OK) st = mini_leaf(&m, "F1 B1", 0);
    rank_check(st == FSDP_ERR_COMM && strstr(fsdp_last_error_message(), "freezing of \"a.w in a\"") != NULL);
    FSDP_TRY(fsdp_comm_reset(comm));
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_ranks_that_differ(void **state)
{
    (void)state;
    in_corners(different, &(corners){ .ranks = (const int[]){ 2, 0 } });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_trains_has_the_bits_of_a_plain_program),
        cmocka_unit_test(test_meshes_and_offload),
        cmocka_unit_test(test_norms_and_collectives),
        cmocka_unit_test(test_moments_and_steps_are_the_parameter_s_own),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_ranks_that_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
