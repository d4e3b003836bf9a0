/* SPDX-License-Identifier: MIT
 *
 * Saving while training goes on: what a rank saves is copied, and a thread writes it. The steps after it do not wait, and what they
 * change is not in the file. Where the copy would take too much memory, the save waits after all, and says so.
 *
 *   ./background_save DIR [RANKS [MOST_MIB]] */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 300, STEPS = 40, EVERY = 10, KEEP = 2 };

typedef struct settings {
    const char *folder;
    size_t most_bytes;
} settings;

static void begin(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = fsdp_philox_normal(1, name, i);
}

/* |w|^2 / 2: its gradient is w. */
static fsdp_status one_step(fsdp_comm *world, fsdp_unit *unit, fsdp_optim *optim)
{
    fsdp_pass *pass;
    float beta;
    FSDP_TRY(fsdp_pass_begin(&pass, world, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_unit_begin_forward(unit, pass));
    FSDP_TRY(fsdp_unit_end_forward(unit, pass));
    FSDP_TRY(fsdp_unit_begin_backward(unit, pass));
    const float *w = fsdp_unit_param(unit, 0);
    float *g = fsdp_unit_grad(unit, 0, &beta);
    for (int i = 0; i < WIDTH * WIDTH; i++) g[i] = (beta != 0 ? g[i] : 0) + w[i];
    FSDP_TRY(fsdp_unit_end_backward(unit, pass));
    fsdp_pass_add_weight(pass, 1);
    FSDP_TRY(fsdp_pass_end(pass));
    return fsdp_optim_step(optim, NULL);
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    static const fsdp_param params[] = { { "w", 2, { WIDTH, WIDTH } } };
    const settings *s = arg;
    fsdp_unit *unit;
    fsdp_optim *optim;
    fsdp_checkpoint *c;
    int64_t step = 0, during = 0, saved;
    bool beside = false, first = fsdp_comm_rank(world) == 0;
    char path[4200];
    FSDP_TRY(fsdp_unit_create(&unit, world, params, 1, NULL));
    FSDP_TRY(fsdp_unit_init(unit, begin, NULL));
    FSDP_TRY(fsdp_optim_create_adamw(&optim, (fsdp_unit_list){ &unit, 1 }, &(fsdp_adamw_opts){ .lr = 0.01f }));
    FSDP_TRY(fsdp_checkpoint_create(&c, world));
    FSDP_TRY(fsdp_checkpoint_add_param(c, "w", unit, 0));
    FSDP_TRY(fsdp_checkpoint_add_optim(c, optim));
    FSDP_TRY(fsdp_checkpoint_add_i64(c, "step", &step));
    fsdp_save_opts o = { .keep = KEEP, .background = true, .most_bytes = s->most_bytes, .in_background = &beside };
    while (step < STEPS) {
        FSDP_TRY(one_step(world, unit, optim));
        during += fsdp_checkpoint_is_saving(c); /* of this rank: others may see it end earlier or later */
        step++;
        if (step % EVERY != 0) continue;
        /* Waits for the one before, if that is not done: an error of it comes out here. */
        FSDP_TRY(fsdp_checkpoint_save_with(c, s->folder, step, &o));
        if (first) printf("step %lld is saved %s\n", (long long)step, beside ? "in the background" : "in the foreground");
    }
    FSDP_TRY(fsdp_checkpoint_wait(c)); /* before the end: what was begun is on the disk, or this is its error */
    FSDP_TRY(fsdp_checkpoint_latest(s->folder, path, sizeof(path), &saved, NULL));
    FSDP_TRY(one_step(world, unit, optim));
    FSDP_TRY(fsdp_checkpoint_load(c, path));
    if (first) printf("%s holds step %lld of %lld; %lld steps were made while one was written\n", path, (long long)step, (long long)saved, (long long)during);
    FSDP_FAIL_IF(saved != STEPS || step != STEPS, FSDP_ERR_INTERNAL, "the last save is not there");
    fsdp_checkpoint_destroy(c);
    fsdp_optim_destroy(optim);
    fsdp_unit_destroy(unit);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    settings s = { .folder = argc > 1 ? argv[1] : "checkpoints", .most_bytes = argc > 3 ? (size_t)atoi(argv[3]) << 20 : 0 };
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 2 ? atoi(argv[2]) : 2 }, train, &s);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
