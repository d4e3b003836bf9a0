/* SPDX-License-Identifier: MIT
 *
 * Norms of gradients for p = 1, 2, any, infinity: each element once, padding never, replicas once; to the bit what one process
 * gets from whole vectors, on any number of ranks, in every mode, and where units are on several communicators. */
#include "support/madeup.h"
#include "support/ranks.h"

#include "base/xsum.h"

#include <math.h>

/* What include/fsdp/norm.h says, of whole vectors. */
static double plain_norm(const float *x, int n, double p)
{
    fsdpi_xsum s = { 0 };
    double largest = 0;
    int e;
    for (int i = 0; i < n; i++) largest = isnan(x[i]) || (double)fabsf(x[i]) > largest ? (double)fabsf(x[i]) : largest;
    if (p == INFINITY) return largest;
    (void)frexp(largest, &e);
    for (int i = 0; i < n; i++)
        fsdpi_xsum_add(&s, p == 1 ? (double)fabsf(x[i]) : p == 2 ? (double)x[i] * (double)x[i] : pow(fabs((double)x[i]) * ldexp(1, -e), p));
    double sum = fsdpi_xsum_round(&s);
    return p == 1 ? sum : p == 2 ? sqrt(sum) : largest == 0 ? 0 : ldexp(pow(sum, 1 / p), e);
}

enum { LEAVES = 30 };

static const double all_p[] = { 1, 2, INFINITY, 0.5, 1.5, 3, 7.25, 100 };
enum { P = sizeof(all_p) / sizeof(all_p[0]) };

/* ---- one communicator ---- */

static float noise(int which, int leaf, int i)
{
    return madeup_noise(which, leaf, i);
}

static float tiny(int which, int leaf, int i) /* whose 100th powers a double does not hold, nor those of the next */
{
    return 1e-30f * madeup_noise(which, leaf, i);
}

static float huge(int which, int leaf, int i)
{
    return 1e30f * madeup_noise(which, leaf, i);
}

static const madeup_fn kinds[] = { noise, tiny, huge };

static fsdp_status one_comm(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    fsdp_unit *u[3];
    static const int which[] = { 4, 9, 5 };
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    for (int k = 0; k < 3; k++) FSDP_TRY(madeup_unit(&u[k], comm, dev, c->mode, "u", which[k]));
    fsdp_unit_list all = { u, 3 };
    double norm, weight;
    /* The last one never has gradients; at first none has. */
    FSDP_TRY(fsdp_step_begin(all));
    for (int k = 0; k < P; k++) {
        norm = -1;
        FSDP_TRY(fsdp_step_norm(all, &(fsdp_norm_opts){ .p = all_p[k] }, &norm, &weight));
        if (norm != 0 || weight != 0) FSDP_FAIL(FSDP_ERR_INTERNAL, "without gradients the %g-norm is %g", all_p[k], norm);
    }
    FSDP_TRY(fsdp_step_cancel(all));
    for (size_t kind = 0; kind < 3; kind++) {
        float sum[2 * MADEUP];
        for (int i = 0; i < 2 * MADEUP; i++) {
            sum[i] = kinds[kind](which[i / MADEUP], 0, i % MADEUP);
            for (int leaf = 1; leaf < LEAVES; leaf++) sum[i] += kinds[kind](which[i / MADEUP], leaf, i % MADEUP);
        }
        for (int leaf = fsdp_comm_rank(comm); leaf < LEAVES; leaf += fsdp_comm_size(comm)) FSDP_TRY(madeup_pass(u, which, 2, leaf, kinds[kind], 2));
        FSDP_TRY(fsdp_step_begin(all));
        for (int k = 0; k < P; k++) {
            FSDP_TRY(fsdp_step_norm(all, &(fsdp_norm_opts){ .p = all_p[k] }, &norm, &weight));
            double want = plain_norm(sum, 2 * MADEUP, all_p[k]), most = plain_norm(sum, 2 * MADEUP, INFINITY);
            if (norm != want || weight != 2 * LEAVES) FSDP_FAIL(FSDP_ERR_INTERNAL, "the %g-norm is %.17g, not %.17g; weight %g", all_p[k], norm, want, weight);
            rank_check(isfinite(norm) && norm >= most && (all_p[k] != 100 || norm < 1.1 * most)); /* also of 1e30^100 and 1e-30^100 */
        }
        FSDP_TRY(fsdp_step_grad_norm(all, &norm, NULL));
        rank_check(norm == plain_norm(sum, 2 * MADEUP, 2));
        FSDP_TRY(fsdp_step_norm((fsdp_unit_list){ u + 1, 1 }, &(fsdp_norm_opts){ .p = 1 }, &norm, NULL));
        rank_check(norm == plain_norm(sum + MADEUP, MADEUP, 1));
        FSDP_TRY(fsdp_step_norm(all, &(fsdp_norm_opts){ .p = 3, .over = comm }, NULL, NULL));
        FSDP_TRY(fsdp_step_end(all));
    }
    for (int k = 0; k < 3; k++) fsdp_unit_destroy(u[k]);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_one_communicator(void **state)
{
    (void)state;
    in_corners(one_comm, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 3, 0 } : (const int[]){ 1, 2, 5, 0 } });
}

/* ---- several: experts on sub-communicators beside a unit of the whole world ---- */

enum { TRUNK = 1, EXPERT = 10, EXPERTS = 2, STEPS = 3 };

/* The first rank of a communicator brings it all: so the sums do not depend on how many ranks a group has. */
static float once(int which, int leaf, int i)
{
    return leaf % 8 == 0 ? 0.25f * madeup_noise(which, leaf / 8, i) : 0;
}

typedef struct groups {
    fsdp_comm *world, *sub;
    fsdp_device *dev;
    fsdp_unit *trunk, *expert[EXPERTS]; /* those that this rank has */
    int which[EXPERTS], experts;
    fsdp_unit *list[1 + EXPERTS];
} groups;

/* Ranks 0, 2, ... have expert 0, ranks 1, 3, ... expert 1; rank 4 of 5 has none; a lone rank has both. */
static fsdp_status open_groups(groups *g, fsdp_comm *world, const corner *c)
{
    int rank = fsdp_comm_rank(world), size = fsdp_comm_size(world);
    *g = (groups){ .world = world };
    FSDP_TRY(fsdp_device_open(&g->dev, c->device));
    FSDP_TRY(fsdp_comm_split(world, rank == 4 ? -1 : size == 1 ? 0 : rank % 2, 0, &g->sub));
    FSDP_TRY(madeup_unit(&g->trunk, world, g->dev, c->mode, "trunk", TRUNK));
    for (int e = 0; e < EXPERTS; e++) {
        if (g->sub == NULL || (size > 1 && e != rank % 2)) continue;
        g->which[g->experts] = EXPERT + e;
        FSDP_TRY(madeup_unit(&g->expert[g->experts++], g->sub, g->dev, c->mode, e == 0 ? "expert 0" : "expert 1", EXPERT + e));
    }
    /* Ranks need not have them in one order: no rank waits for another's next one. */
    int n = 0;
    if (rank % 2 == 0) g->list[n++] = g->trunk;
    for (int e = 0; e < g->experts; e++) g->list[n++] = g->expert[e];
    if (rank % 2 == 1) g->list[n++] = g->trunk;
    return FSDP_OK;
}

static void close_groups(groups *g)
{
    fsdp_unit_destroy(g->trunk);
    for (int e = 0; e < g->experts; e++) fsdp_unit_destroy(g->expert[e]);
    fsdp_comm_destroy(g->sub);
    fsdp_device_close(g->dev);
}

/* Also without sync: what ranks kept is then sent in the step, on one communicator after another. */
static fsdp_status pass(fsdp_comm *comm, fsdp_unit *const *units, const int *which, int count, int leaf, madeup_fn fn, double weight, bool sync)
{
    fsdp_pass *pass;
    FSDP_TRY(fsdp_pass_begin(&pass, comm, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_pass_set_sync(pass, sync));
    FSDP_TRY(madeup_run(pass, units, which, count, leaf, fn));
    fsdp_pass_add_weight(pass, weight);
    return fsdp_pass_end(pass);
}

static fsdp_status bring(groups *g, int step, madeup_fn fn)
{
    static const int trunk[] = { TRUNK };
    FSDP_TRY(pass(g->world, &g->trunk, trunk, 1, 8 * step + fsdp_comm_rank(g->world), fn, fsdp_comm_rank(g->world) == 0 ? 2 : 0, step != 1));
    if (g->experts == 0) return FSDP_OK;
    return pass(g->sub, g->expert, g->which, g->experts, 8 * step + fsdp_comm_rank(g->sub), fn, 0, step != 1);
}

static fsdp_status several(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    groups g;
    fsdp_optim *o;
    FSDP_TRY(open_groups(&g, world, c));
    fsdp_unit_list mine = { g.list, 1 + g.experts };
    FSDP_TRY(fsdp_optim_create_sgd(&o, mine, &(fsdp_sgd_opts){ .lr = 0.5f }));
    float want[1 + EXPERTS][MADEUP], got[MADEUP], grad[(1 + EXPERTS) * MADEUP];
    static const int which[] = { TRUNK, EXPERT, EXPERT + 1 };
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < MADEUP; i++) want[k][i] = madeup_value(which[k], i);
    for (int step = 0; step < STEPS; step++) {
        double norm, weight, p = all_p[(2 * step) % P];
        for (int k = 0; k < 3 * MADEUP; k++) grad[k] = once(which[k / MADEUP], 8 * step, k % MADEUP);
        FSDP_TRY(bring(&g, step, once));
        FSDP_TRY(fsdp_step_begin(mine));
        for (int k = 0; k < P; k++) {
            FSDP_TRY(fsdp_step_norm(mine, &(fsdp_norm_opts){ .p = all_p[k], .over = world }, &norm, &weight));
            double full = plain_norm(grad, 3 * MADEUP, all_p[k]);
            if (norm != full || weight != 2) FSDP_FAIL(FSDP_ERR_INTERNAL, "the %g-norm over all groups is %.17g, not %.17g; weight %g", all_p[k], norm, full, weight);
            /* The experts alone: ranks without one say so. */
            fsdp_unit_list experts = { g.expert, g.experts };
            FSDP_TRY(fsdp_step_norm(experts, &(fsdp_norm_opts){ .p = all_p[k], .over = world }, &norm, NULL));
            rank_check(norm == plain_norm(grad + MADEUP, 2 * MADEUP, all_p[k]));
        }
        FSDP_TRY(fsdp_step_cancel(mine));
        FSDP_TRY(bring(&g, step, once));
        FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .clip = 0.03125f, .clip_p = p, .over = world, .norm = &norm }));
        double full = 0.5 * plain_norm(grad, 3 * MADEUP, p);
        float factor = (float)(0.5 * (0.03125 / (full + 1e-6)));
        rank_check(norm == full && full > 0.03125);
        for (int k = 0; k < 3 * MADEUP; k++) want[k / MADEUP][k % MADEUP] -= 0.5f * (grad[k] * factor + 0.0f * want[k / MADEUP][k % MADEUP]);
        FSDP_TRY(madeup_read(g.trunk, got));
        rank_check(memcmp(got, want[0], sizeof(got)) == 0);
        for (int e = 0; e < g.experts; e++) {
            FSDP_TRY(madeup_read(g.expert[e], got));
            rank_check(memcmp(got, want[1 + g.which[e] - EXPERT], sizeof(got)) == 0);
        }
    }
    fsdp_optim_destroy(o);
    close_groups(&g);
    return FSDP_OK;
}

static void test_several_communicators(void **state)
{
    (void)state;
    in_corners(several, &(corners){ .all_modes = true, .ranks = SANITIZED ? (const int[]){ 5, 0 } : (const int[]){ 1, 2, 3, 5, 0 } });
}

/* ---- infinite, or no number: in one element of one group ---- */

static bool is_bad(int which, int leaf, int i)
{
    return which == EXPERT && leaf == 0 && i == MADEUP - 1;
}

static float one_inf(int which, int leaf, int i)
{
    return is_bad(which, leaf, i) ? -INFINITY : once(which, leaf, i);
}

static float one_nan(int which, int leaf, int i)
{
    return is_bad(which, leaf, i) ? NAN : once(which, leaf, i);
}

static fsdp_status one_group_is_bad(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    groups g;
    fsdp_optim *o;
    float got[MADEUP];
    FSDP_TRY(open_groups(&g, world, c));
    FSDP_TRY(fsdp_optim_create_sgd(&o, (fsdp_unit_list){ g.list, 1 + g.experts }, &(fsdp_sgd_opts){ .lr = 0.5f }));
    for (int k = 0; k < P; k++) {
        double norm = 3;
        fsdp_step_opts s = { .clip = 1, .clip_p = all_p[k], .over = world, .norm = &norm };
        FSDP_TRY(bring(&g, 0, k % 2 ? one_nan : one_inf));
        fsdp_status st = fsdp_optim_step(o, &s);
        const char *said = fsdp_last_error_message();
        if (st != FSDP_ERR_NONFINITE || strstr(said, k % 2 ? "is nan" : "is inf") == NULL || strstr(said, "unit \"expert 0\", parameter \"s\"") == NULL || norm != 3)
            FSDP_FAIL(FSDP_ERR_INTERNAL, "%s: %s", fsdp_status_name(st), said);
        FSDP_TRY(madeup_read(g.trunk, got));
        for (int i = 0; i < MADEUP; i++) rank_check(got[i] == madeup_value(TRUNK, i));
        s.clip = 0;
        FSDP_TRY(fsdp_optim_step(o, &s)); /* the gradients are gone on all */
        rank_check(norm == 0);
    }
    fsdp_optim_destroy(o);
    close_groups(&g);
    return FSDP_OK;
}

static void test_not_finite_in_one_group(void **state)
{
    (void)state;
    in_corners(one_group_is_bad, &(corners){ .all_modes = true, .ranks = (const int[]){ 3, 5, 0 }, .threads_only = SANITIZED });
}

/* ---- what is refused ---- */

static fsdp_status refused(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    groups g;
    double norm = 3;
    fsdp_optim *o;
    FSDP_TRY(open_groups(&g, world, c));
    fsdp_unit_list mine = { g.list, 1 + g.experts };
    rank_check(fsdp_step_norm(mine, &(fsdp_norm_opts){ .over = world }, &norm, NULL) == FSDP_ERR_STATE);
    FSDP_TRY(bring(&g, 0, once));
    FSDP_TRY(fsdp_step_begin(mine));
    static const double wrong[] = { -1, NAN, -INFINITY };
    for (int k = 0; k < 3; k++) rank_check(fsdp_step_norm(mine, &(fsdp_norm_opts){ .p = wrong[k], .over = world }, &norm, NULL) == FSDP_ERR_INVALID);
    rank_check(fsdp_step_norm(mine, NULL, &norm, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "different communicators") != NULL);
    rank_check(fsdp_step_norm(mine, &(fsdp_norm_opts){ .over = g.sub }, &norm, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "not in `over`") != NULL);
    rank_check(fsdp_step_norm((fsdp_unit_list){ NULL, 0 }, NULL, &norm, NULL) == FSDP_ERR_INVALID);
    rank_check(norm == 3);
    FSDP_TRY(fsdp_step_norm(mine, &(fsdp_norm_opts){ .over = world }, &norm, NULL)); /* nothing has changed */
    rank_check(norm > 0 && norm != 3);
    FSDP_TRY(fsdp_step_cancel(mine));
    /* An optimizer of several that is not told over what; its gradients stay. */
    FSDP_TRY(fsdp_optim_create_sgd(&o, mine, &(fsdp_sgd_opts){ .lr = 0 }));
    FSDP_TRY(bring(&g, 0, once));
    rank_check(fsdp_optim_step(o, NULL) == FSDP_ERR_INVALID && strstr(fsdp_last_error_message(), "`over`") != NULL);
    rank_check(fsdp_optim_step(o, &(fsdp_step_opts){ .over = world, .clip_p = -2 }) == FSDP_ERR_INVALID);
    double again;
    FSDP_TRY(fsdp_optim_step(o, &(fsdp_step_opts){ .over = world, .grad_scale = 1, .norm = &again }));
    rank_check(again == norm);
    fsdp_optim_destroy(o);
    /* Ranks that want different norms are told. */
    FSDP_TRY(fsdp_step_begin(mine));
    bool odd = fsdp_comm_rank(world) == 1;
    rank_check(fsdp_step_norm(mine, &(fsdp_norm_opts){ .p = odd ? 1 : 2, .over = world }, &norm, NULL) == FSDP_ERR_COMM);
    rank_check(strstr(fsdp_last_error_message(), "the 1-norm") != NULL && strstr(fsdp_last_error_message(), "the 2-norm") != NULL);
    FSDP_TRY(fsdp_comm_reset(g.sub));
    FSDP_TRY(fsdp_comm_reset(world));
    FSDP_TRY(fsdp_step_begin(mine));
    FSDP_TRY(fsdp_step_norm(mine, &(fsdp_norm_opts){ .p = 1, .over = world }, &norm, NULL));
    FSDP_TRY(fsdp_step_cancel(mine));
    close_groups(&g);
    return FSDP_OK;
}

static void test_what_is_refused(void **state)
{
    (void)state;
    in_corners(refused, &(corners){ .all_modes = true, .ranks = (const int[]){ 2, 4, 0 }, .threads_only = SANITIZED });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_communicator),       cmocka_unit_test(test_several_communicators), cmocka_unit_test(test_not_finite_in_one_group),
        cmocka_unit_test(test_what_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
