/* SPDX-License-Identifier: MIT
 *
 * The same bits in every corner: transports, devices, modes, meshes, ranks as processes and as threads, ranks that are
 * stopped at random. Each corner trains the toy network on the same 24 leaves a step and must give the losses, norms
 * and parameters of one rank to the bit. Prints the matrix. */
#include "support/testing.h"
#include "support/toy.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { STEPS = 3, LEAVES = 24 };

/* What a run leaves behind: written by rank 0, in memory that all ranks share. */
typedef struct result {
    double loss[STEPS], norm[STEPS];
    float param[256];
    int done;
} result;

typedef struct corner {
    const char *transport, *device;
    fsdp_mode mode;
    int ranks, shards, leaves;
    bool threads, stops;
    result *out;
} corner;

static result *shared_result(void)
{
    void *p = mmap(NULL, sizeof(result), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    return p;
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    toy t;
    fsdp_optim *optim;
    float *param = calloc((size_t)toy_numel(), sizeof(float));
    FSDP_TRY(toy_create(&t, world, &(toy_opts){ .mode = c->mode, .shards = c->shards, .device = c->device, .seed = 5 }));
    fsdp_optim_group nodecay = { .pattern = "*.b", .weight_decay = 0 };
    fsdp_adamw_opts ao = { .lr = 0.01f, .beta2 = 0.95f, .weight_decay = 0.1f, .groups = &nodecay, .group_count = 1 };
    FSDP_TRY(fsdp_optim_create_adamw(&optim, toy_list(&t), &ao));
    for (int s = 0; s < STEPS; s++) {
        double loss, norm;
        FSDP_TRY(toy_step(&t, optim, s, c->leaves, &loss, &norm));
        if (fsdp_comm_rank(world) == 0) {
            c->out->loss[s] = loss;
            c->out->norm[s] = norm;
        }
    }
    FSDP_TRY(toy_read(&t, param));
    if (fsdp_comm_rank(world) == 0) {
        memcpy(c->out->param, param, (size_t)toy_numel() * sizeof(float));
        c->out->done = 1;
    }
    free(param);
    fsdp_optim_destroy(optim);
    toy_destroy(&t);
    return FSDP_OK;
}

/* Stops and continues the ranks of this process's children, at random, until killed. */
static pid_t start_stopper(pid_t job)
{
    pid_t p = fork();
    if (p != 0) return p;
    fsdp_rng rng;
    fsdp_rng_init(&rng, (uint64_t)job);
    for (;;) {
        char path[64];
        int child[16], n = 0;
        snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)job, (int)job);
        FILE *f = fopen(path, "r");
        if (f == NULL) _exit(0);
        while (n < 16 && fscanf(f, "%d", &child[n]) == 1) n += child[n] != (int)getpid();
        fclose(f);
        if (n > 0) {
            pid_t victim = child[fsdp_rng_u32(&rng) % (unsigned)n];
            kill(victim, SIGSTOP);
            usleep(200 + fsdp_rng_u32(&rng) % 3000);
            kill(victim, SIGCONT);
        }
        usleep(fsdp_rng_u32(&rng) % 2000);
    }
}

static void run(const corner *c)
{
    memset(c->out, 0, sizeof(*c->out));
    fsdp_launch_opts o = { .ranks = c->ranks, .transport = c->transport, .ranks_are_threads = c->threads, .timeout_s = 120 };
    pid_t stopper = c->stops ? start_stopper(getpid()) : 0;
    fsdp_status st = fsdp_launch(&o, train, (void *)(uintptr_t)c);
    if (stopper > 0) kill(stopper, SIGKILL);
    if (st != FSDP_OK)
        fail_msg("%s %s %s, %d ranks, %d shards%s: %s", c->transport, c->device, fsdp_mode_name(c->mode), c->ranks, c->shards, c->threads ? " (threads)" : "",
                 fsdp_last_error());
    assert_int_equal(c->out->done, 1);
}

static const int ranks_24[] = { 1, 2, 3, 4, 6, 8 };

/* The rows of the matrix: a mode, and for hybrids how many of the ranks share a copy. */
static const struct row {
    const char *name;
    fsdp_mode mode;
    int replicas, shards; /* one of them given: the other is what is left of the ranks; neither: one copy */
} rows[] = {
    { "full", FSDP_MODE_FULL, 0, 0 },        { "grad-op", FSDP_MODE_GRAD_OP, 0, 0 },     { "optimizer", FSDP_MODE_OPTIMIZER, 0, 0 },
    { "none", FSDP_MODE_NONE, 0, 0 },        { "full 2xS", FSDP_MODE_FULL, 2, 0 },       { "full Rx2", FSDP_MODE_FULL, 0, 2 },
    { "full Rx1", FSDP_MODE_FULL, 0, 1 },    { "grad-op 2xS", FSDP_MODE_GRAD_OP, 2, 0 }, { "optim. 3xS", FSDP_MODE_OPTIMIZER, 3, 0 },
};
enum { ROWS = sizeof(rows) / sizeof(rows[0]) };

/* 0: all; -1: these ranks are no such mesh. */
static int shards_of(const struct row *row, int ranks)
{
    int divisor = row->replicas > 0 ? row->replicas : row->shards;
    if (divisor == 0) return 0;
    if (ranks % divisor != 0) return -1;
    return row->shards > 0 ? row->shards : ranks / divisor;
}

static void compare(const result *want, const corner *c)
{
    if (memcmp(want, c->out, sizeof(*want)) == 0) return;
    for (int s = 0; s < STEPS; s++)
        print_message("step %d: loss %.17g %.17g norm %.17g %.17g\n", s, want->loss[s], c->out->loss[s], want->norm[s], c->out->norm[s]);
    for (int i = 0; i < toy_numel(); i++)
        if (want->param[i] != c->out->param[i]) print_message("parameter %d: %.9g %.9g\n", i, (double)want->param[i], (double)c->out->param[i]);
    fail_msg("%s %s %s, %d ranks, %d shards%s: other bits", c->transport, c->device, fsdp_mode_name(c->mode), c->ranks, c->shards, c->threads ? " (threads)" : "");
}

/* Under ThreadSanitizer: ranks that are threads, one, an odd number, and one that every mesh divides. Under AddressSanitizer: a
 * transport, device, mode and number of ranks is met with processes or with threads, in turns; what an access out of bounds
 * depends on is all there, and each kind of rank with every transport, device and mode. */
static bool left_out(bool threads, int transport, int device, int row, int r)
{
    if (!CAN_FORK) return !threads || (ranks_24[r] != 1 && ranks_24[r] != 3 && ranks_24[r] != 6);
    return SANITIZED && (threads + transport + device + row + r) % 2 != 0;
}

static void test_matrix(void **state)
{
    (void)state;
    static const char *const transports[] = { "shm", "copy" }, *const devices[] = { "cpu", "guard" };
    result *want = shared_result(), *got = shared_result();
    corner reference = { .transport = "self", .device = "cpu", .ranks = 1, .leaves = LEAVES, .out = want };
    run(&reference);
    assert_true(want->loss[STEPS - 1] < want->loss[0]);
    print_message("%-10s %-10s %-6s %-12s", "ranks are", "transport", "device", "mode");
    for (size_t r = 0; r < sizeof(ranks_24) / sizeof(ranks_24[0]); r++) print_message(" %4d", ranks_24[r]);
    print_message("   ranks: = the bits of one rank, . no such mesh%s\n", SANITIZED ? ", and some left out" : "");
    for (int threads = !CAN_FORK; threads < 2; threads++)
        for (int t = 0; t < 2; t++)
            for (int d = 0; d < 2; d++)
                for (int m = 0; m < ROWS; m++) {
                    print_message("%-10s %-10s %-6s %-12s", threads ? "threads" : "processes", transports[t], devices[d], rows[m].name);
                    for (int r = 0; r < (int)(sizeof(ranks_24) / sizeof(ranks_24[0])); r++) {
                        int shards = shards_of(&rows[m], ranks_24[r]);
                        if (shards < 0 || left_out(threads, t, d, m, r)) {
                            print_message(shards < 0 ? "    ." : "     ");
                            continue;
                        }
                        corner c = { .transport = transports[t], .device = devices[d], .mode = rows[m].mode, .ranks = ranks_24[r],
                                     .shards = shards, .leaves = LEAVES, .threads = threads, .out = got };
                        run(&c);
                        compare(want, &c);
                        print_message("    =");
                    }
                    print_message("\n");
                }
    munmap(want, sizeof(*want));
    munmap(got, sizeof(*got));
}

/* Five ranks divide no 24: 20 leaves. */
static void test_five_ranks(void **state)
{
    (void)state;
    result *want = shared_result(), *got = shared_result();
    corner c = { .transport = "self", .device = "cpu", .ranks = 1, .leaves = 20, .out = want };
    run(&c);
    for (int t = 0; t < 2; t++) {
        c = (corner){ .transport = t ? "copy" : "shm", .device = t ? "guard" : "cpu", .ranks = 5, .leaves = 20, .threads = !CAN_FORK, .out = got };
        run(&c);
        compare(want, &c);
    }
}

static void test_stopped_ranks(void **state)
{
    (void)state;
    if (!CAN_FORK) return; /* a thread cannot be stopped */
    result *want = shared_result(), *got = shared_result();
    corner c = { .transport = "self", .device = "cpu", .ranks = 1, .leaves = LEAVES, .out = want };
    run(&c);
    for (int round = 0; round < 12; round += SANITIZED ? 5 : 1) {
        c = (corner){ .transport = round % 2 ? "copy" : "shm", .device = round % 4 < 2 ? "cpu" : "guard",
                      .mode = (fsdp_mode)(round % 3), .ranks = round < 6 ? 3 : 4, .shards = round < 6 ? 0 : 2, .leaves = LEAVES, .stops = true, .out = got };
        run(&c);
        compare(want, &c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matrix),
        cmocka_unit_test(test_five_ranks),
        cmocka_unit_test(test_stopped_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
