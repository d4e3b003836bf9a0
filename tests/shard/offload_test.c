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
    const char *storage, *grads; /* NULL: the compute device, and where slices are kept */
    fsdp_dtype param, reduce, grad;
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
    FSDP_TRY(mini_create(&m, comm, &(mini_opts){ .mode = c->mode, .shards = p->halves ? fsdp_comm_size(comm) / 2 : 0, .device = c->device, .storage = p->storage, .grads = p->grads,
                                                 .param_dtype = p->param, .reduce_dtype = p->reduce, .grad_dtype = p->grad, .exact_eval = p->param != FSDP_F32 }));
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
    if (p->storage != NULL && m.unit[0]->sums != ctx && (c->mode == FSDP_MODE_FULL || c->mode == FSDP_MODE_GRAD_OP))
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

/* Where slices and sums of gradients are kept: on the one device, the other, or one on each. */
static void test_the_same_bits_wherever_gradients_are_kept(void **state)
{
    (void)state;
    result *want = shared_alloc(sizeof(*want)), *got = shared_alloc(sizeof(*got));
    static const int ranks[] = { 1, 2, 3, 4 };
    for (int t = 0, n = 0; t < 3; t++) {
        plan p = { .grad = t == 2 ? FSDP_BF16 : FSDP_F32, .reduce = t == 1 ? FSDP_F16 : FSDP_F32 };
        corner one = { .transport = "self", .device = "cpu", .ranks = 1, .threads = !CAN_FORK, .arg = &p, .shared = want };
        if (in_corner(live, &one) != FSDP_OK) fail_msg("one rank: %s", fsdp_last_error());
        for (int k = 0; k < 32; k++, n++) {
            bool guard = k % 2 == 0, split = k / 16; /* slices elsewhere and gradients at home, or the reverse */
            corner c = { .transport = k / 2 % 2 ? "copy" : "shm", .device = guard ? "guard" : "cpu", .mode = (fsdp_mode)(k / 4 % 4), .ranks = ranks[(k + t + k / 16) % 4],
                         .threads = n % 3 == 0 || !CAN_FORK, .arg = &p, .shared = got };
            const char *other = guard ? "cpu" : "guard";
            p.storage = split ? other : NULL;
            p.grads = split ? c.device : other;
            p.halves = c.mode != FSDP_MODE_NONE && c.ranks % 2 == 0 && n % 3 == 0;
            if (in_corner(live, &c) != FSDP_OK) fail_msg("%s, gradients on %s: %s", corner_name(&c), p.grads, fsdp_last_error());
            if (memcmp(want, got, sizeof(*want)) != 0) fail_msg("%s, gradients on %s%s, type %d: other bits", corner_name(&c), p.grads, p.halves ? ", 2 replicas" : "", t);
        }
    }
    shared_free(want, sizeof(*want));
    shared_free(got, sizeof(*got));
}

/* Only the compute device and the host can be places. */
static fsdp_status two_devices(fsdp_comm *comm, void *arg)
{
    (void)arg;
    fsdp_device *a, *b;
    fsdp_unit *u = NULL;
    const fsdp_param w = { "w", 1, { 5 } };
    FSDP_TRY(fsdp_device_open(&a, "guard"));
    FSDP_TRY(fsdp_device_open(&b, "guard"));
    static const char *const said[] = { "storage device guard and compute device guard differ", "gradient device guard and compute device guard differ",
                                        "gradient device guard and storage device guard differ" };
    for (int k = 0; k < 3; k++) {
        fsdp_unit_opts o = { .name = "u", .compute_device = k < 2 ? a : fsdp_device_cpu(), .storage_device = k == 0 ? b : k == 1 ? fsdp_device_cpu() : a, .grad_device = k > 0 ? b : NULL };
        fsdp_status st = fsdp_unit_create(&u, comm, &w, 1, &o);
        if (st != FSDP_ERR_UNSUPPORTED || strstr(fsdp_last_error_message(), said[k]) == NULL) FSDP_FAIL(FSDP_ERR_INTERNAL, "case %d: %s: %s", k, fsdp_status_name(st), fsdp_last_error_message());
        rank_check(u == NULL);
    }
    fsdp_device_close(a);
    fsdp_device_close(b);
    return FSDP_OK;
}

static void test_one_of_two_devices_is_the_host(void **state)
{
    (void)state;
    in_corners(two_devices, &(corners){ .device = "cpu", .ranks = (const int[]){ 1, 2, 0 } });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_same_bits_wherever_slices_are_kept),
        cmocka_unit_test(test_the_same_bits_wherever_gradients_are_kept),
        cmocka_unit_test(test_one_of_two_devices_is_the_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
