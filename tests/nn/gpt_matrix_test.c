/* SPDX-License-Identifier: MIT
 *
 * A GPT of odd sizes, with dropout and clipping, has the same bits in every corner: ranks, transports, devices, modes, processes
 * and threads, threads of a rank, wrapping, prefetch. Each corner trains three steps of the same 24 leaves, and must give the
 * losses, norms and parameters of one rank to the bit. Prints the matrix: the numbers of ranks rotate through it. */
#include "support/testing.h"
#include "support/tiny_gpt.h"

enum { STEPS = 3, LEAVES = 24 };

typedef struct result {
    double loss[STEPS], norm[STEPS], eval;
    float param[TINY_NUMEL];
    int done;
} result;

typedef struct corner {
    const char *transport, *device;
    fsdp_mode mode;
    int ranks, threads_each, prefetch;
    bool ranks_are_threads;
    result *out;
} corner;

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    tiny_gpt t;
    float param[TINY_NUMEL];
    double loss, norm;
    FSDP_TRY(tiny_gpt_create(&t, world, &(tiny_gpt_opts){ .mode = c->mode, .device = c->device, .dropout = 0.1f, .prefetch = c->prefetch }));
    for (int s = 0; s < STEPS; s++) {
        FSDP_TRY(tiny_gpt_step(&t, s, LEAVES, &loss, &norm));
        if (fsdp_comm_rank(world) == 0) {
            c->out->loss[s] = loss;
            c->out->norm[s] = norm;
        }
    }
    FSDP_TRY(tiny_gpt_eval(&t, 1000, 3, &loss));
    FSDP_TRY(tiny_gpt_read(&t, param));
    if (fsdp_comm_rank(world) == 0) {
        memcpy(c->out->param, param, sizeof(param));
        c->out->eval = loss;
        c->out->done = 1;
    }
    tiny_gpt_destroy(&t);
    return FSDP_OK;
}

static void run(const corner *c)
{
    memset(c->out, 0, sizeof(*c->out));
    fsdp_launch_opts o = { .ranks = c->ranks, .transport = c->transport, .ranks_are_threads = c->ranks_are_threads, .threads = c->threads_each, .timeout_s = 120 };
    fsdp_status st = fsdp_launch(&o, train, (void *)(uintptr_t)c);
    if (st != FSDP_OK)
        fail_msg("%s %s %s, %d ranks%s: %s", c->transport, c->device, fsdp_mode_name(c->mode), c->ranks, c->ranks_are_threads ? " (threads)" : "", fsdp_last_error());
    assert_int_equal(c->out->done, 1);
}

static void compare(const result *want, const corner *c)
{
    if (memcmp(want, c->out, sizeof(*want)) == 0) return;
    for (int s = 0; s < STEPS; s++)
        print_message("step %d: loss %.17g %.17g norm %.17g %.17g\n", s, want->loss[s], c->out->loss[s], want->norm[s], c->out->norm[s]);
    print_message("evaluation: %.17g %.17g\n", want->eval, c->out->eval);
    fail_msg("%s %s %s, %d ranks%s: other bits", c->transport, c->device, fsdp_mode_name(c->mode), c->ranks, c->ranks_are_threads ? " (threads)" : "");
}

static const int ranks[] = { 1, 2, 3, 4, 6, 8 };
enum { RANKS = sizeof(ranks) / sizeof(ranks[0]) };

static void test_matrix(void **state)
{
    (void)state;
    static const char *const transports[] = { "shm", "copy" }, *const devices[] = { "cpu", "guard" };
    result *want = shared_memory(sizeof(*want)), *got = shared_memory(sizeof(*got));
    corner reference = { .transport = "self", .device = "cpu", .ranks = 1, .threads_each = 1, .out = want };
    int row = 0;
    run(&reference);
    assert_true(want->loss[STEPS - 1] < want->loss[0]);
    assert_true(want->norm[0] > 0.5); /* it is clipped */
    print_message("%-10s %-10s %-6s %-10s", "ranks are", "transport", "device", "mode");
    for (int r = 0; r < RANKS; r++) print_message(" %4d", ranks[r]);
    print_message("   ranks: = the bits of one rank\n");
    for (int threads = !CAN_FORK; threads < 2; threads++)
        for (int t = 0; t < 2; t++)
            for (int d = 0; d < 2; d++)
                for (int m = FSDP_MODE_FULL; m <= FSDP_MODE_NONE; m++, row++) {
                    print_message("%-10s %-10s %-6s %-10s", threads ? "threads" : "processes", transports[t], devices[d], fsdp_mode_name((fsdp_mode)m));
                    for (int r = 0; r < RANKS; r++) {
                        if (r % 3 != row % 3) {
                            print_message("     ");
                            continue;
                        }
                        corner c = { .transport = transports[t], .device = devices[d], .mode = (fsdp_mode)m, .ranks = ranks[r], .threads_each = 1,
                                     .ranks_are_threads = threads, .out = got };
                        run(&c);
                        compare(want, &c);
                        print_message("    =");
                    }
                    print_message("\n");
                }
}

/* However many threads a rank has, and however far it gathers ahead. */
static void test_threads_and_prefetch(void **state)
{
    (void)state;
    result *want = shared_memory(sizeof(*want)), *got = shared_memory(sizeof(*got));
    corner reference = { .transport = "self", .device = "cpu", .ranks = 1, .threads_each = 1, .out = want };
    run(&reference);
    for (int threads = 1; threads <= 3; threads++)
        for (int r = 0; r < 3; r++) {
            corner c = { .transport = r == 1 ? "copy" : "shm", .device = r == 2 ? "guard" : "cpu", .ranks = r + 1, .threads_each = threads, .prefetch = r - 1, .out = got };
            run(&c);
            compare(want, &c);
            c.mode = FSDP_MODE_GRAD_OP;
            c.prefetch = 3;
            run(&c);
            compare(want, &c);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matrix),
        cmocka_unit_test(test_threads_and_prefetch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
