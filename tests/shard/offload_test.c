/* SPDX-License-Identifier: MIT
 *
 * Slices kept on one device and computed with on another (offload): the host's memory and the guard, either way round. The
 * same bits as on one device, in every mode, mesh, type and transport; nothing of a unit stays on the compute device between
 * passes; values set, summoned, reset and read as ever. */
#include "support/mini.h"
#include "support/ranks.h"

#include "shard/unit.h"

#include <stdlib.h>

enum { LEAVES = 12, STEPS = 2 };

typedef struct plan {
    const char *storage; /* NULL: the compute device */
    fsdp_dtype param, reduce;
    bool halves; /* two replicas */
} plan;

typedef struct result {
    float param[2048];
} result;

static fsdp_status live(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    const plan *p = c->arg;
    mini m;
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .shards = p->halves ? fsdp_comm_size(comm) / 2 : 0, .device = c->device, .storage = p->storage,
                                                 .param_dtype = p->param, .reduce_dtype = p->reduce, .exact_eval = p->param != FSDP_F32 }));
    for (int64_t step = 0; step < STEPS; step++) {
        FSDP_TRY(mini_step(&m, "[0 F1 F2 F3 F4 F5 F1 ]0 {0 B5 B4 B1 B3 B2 B1 }0", step, LEAVES));
        if (step == 0) FSDP_TRY(fsdp_comm_reset(comm));
        fsdp_unit *u = m.unit[MINI_BIG];
        FSDP_TRY(fsdp_unit_summon_begin(u, &(fsdp_unit_summon_opts){ .writeback = true }));
        FSDP_TRY(fsdpi_stream_fill(fsdp_unit_stream(u), fsdp_unit_summoned(u, 2), 0, sizeof(float)));
        FSDP_TRY(fsdp_unit_summon_end(u));
    }
    float *mine = calloc((size_t)mini_numel(), sizeof(float));
    FSDP_TRY(mini_read(&m, mine));
    if (fsdp_comm_rank(comm) == 0) memcpy(((result *)c->shared)->param, mine, (size_t)mini_numel() * sizeof(float));
    free(mine);
    /* Mode optimizer keeps parameters where they are used; the others leave nothing there. */
    fsdpi_devctx *ctx = m.unit[0]->ctx;
    FSDP_TRY(fsdp_stream_sync(ctx->compute));
    if (p->storage != NULL && (c->mode == FSDP_MODE_FULL || c->mode == FSDP_MODE_GRAD_OP))
        rank_check(fsdpi_arena_get_stats(ctx->arena).bytes_live == 0 && fsdpi_arena_get_stats(ctx->gathered).bytes_live == 0);
    mini_destroy(&m);
    return FSDP_OK;
}

static void test_the_same_bits_wherever_slices_are_kept(void **state)
{
    (void)state;
    result *want = shared_alloc(sizeof(*want)), *got = shared_alloc(sizeof(*got));
    static const fsdp_dtype types[] = { FSDP_F32, FSDP_BF16, FSDP_F16 };
    static const int ranks[] = { 1, 2, 3, 4 };
    for (int t = 0, n = 0; t < 3; t++) {
        plan p = { .param = types[t], .reduce = types[(t + t / 2) % 3] };
        corner one = { .transport = "self", .device = "cpu", .ranks = 1, .threads = !CAN_FORK, .arg = &p, .shared = want };
        if (in_corner(live, &one) != FSDP_OK) fail_msg("one rank: %s", fsdp_last_error());
        for (int k = 0; k < 32; k++, n++) {
            bool guard = k % 2 == 0;
            corner c = { .transport = k / 2 % 2 ? "copy" : "shm", .device = guard ? "guard" : "cpu", .mode = (fsdp_mode)(k / 4 % 4), .ranks = ranks[(k + t) % 4],
                         .threads = k / 16 || !CAN_FORK, .arg = &p, .shared = got };
            p.storage = guard ? "cpu" : "guard";
            p.halves = c.mode != FSDP_MODE_NONE && c.ranks % 2 == 0 && n % 3 == 0;
            if (in_corner(live, &c) != FSDP_OK) fail_msg("%s, stored on %s: %s", corner_name(&c), p.storage, fsdp_last_error());
            if (memcmp(want, got, sizeof(*want)) != 0) fail_msg("%s, stored on %s%s, type %d: other bits", corner_name(&c), p.storage, p.halves ? ", 2 replicas" : "", t);
        }
    }
    shared_free(want, sizeof(*want));
    shared_free(got, sizeof(*got));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_same_bits_wherever_slices_are_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
