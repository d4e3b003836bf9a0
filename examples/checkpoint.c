/* SPDX-License-Identifier: MIT
 *
 * Saving and going on: a program of one's own registers what it wants kept, saves every few steps, and begins from the newest
 * checkpoint there is. Run it, kill it, run it again on another number of ranks: it goes on where it was.
 *
 *   ./checkpoint DIR [RANKS [STEPS]]
 *
 * What is saved is named, so any number of ranks finds its part; a number or an array of your own is one more line. */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 10, LEAVES = 12, EVERY = 10, KEEP = 2 };

typedef struct settings {
    const char *folder;
    int64_t steps;
} settings;

typedef struct run {
    fsdp_comm *world;
    fsdp_unit *unit;
    fsdp_optim *optim;
    fsdp_checkpoint *checkpoint;
    int64_t step; /* how many are done */
    double best;  /* lowest loss so far */
} run;

static void begin(const char *name, int64_t i, float *value, void *arg)
{
    (void)arg;
    *value = fsdp_philox_normal(1, name, i);
}

static fsdp_status open_run(run *r, fsdp_comm *world)
{
    static const fsdp_param params[] = { { "w", 2, { WIDTH, WIDTH } } };
    *r = (run){ .world = world, .best = 1e300 };
    FSDP_TRY(fsdp_unit_create(&r->unit, world, params, 1, &(fsdp_unit_opts){ .name = "layer" }));
    FSDP_TRY(fsdp_unit_init(r->unit, begin, NULL));
    FSDP_TRY(fsdp_optim_create_adamw(&r->optim, (fsdp_unit_list){ &r->unit, 1 }, &(fsdp_adamw_opts){ .lr = 0.03f }));
    FSDP_TRY(fsdp_checkpoint_create(&r->checkpoint, world));
    FSDP_TRY(fsdp_checkpoint_add_param(r->checkpoint, "layer.w", r->unit, 0));
    FSDP_TRY(fsdp_checkpoint_add_optim(r->checkpoint, r->optim)); /* of the parameters added so far */
    FSDP_TRY(fsdp_checkpoint_add_i64(r->checkpoint, "step", &r->step));
    return fsdp_checkpoint_add_f64(r->checkpoint, "best", &r->best);
}

/* |w x - x|^2 / 2 of one x: the layer learns to do nothing. */
static fsdp_status leaf(run *r, int64_t number, double *loss)
{
    fsdp_pass *pass;
    float x[WIDTH], d[WIDTH], beta;
    fsdp_philox_normal_fill(2, "x", number * WIDTH, WIDTH, x);
    FSDP_TRY(fsdp_pass_begin(&pass, r->world, FSDP_PASS_TRAIN));
    FSDP_TRY(fsdp_unit_begin_forward(r->unit, pass));
    const float *w = fsdp_unit_param(r->unit, 0);
    for (int o = 0; o < WIDTH; o++) {
        d[o] = -x[o];
        for (int i = 0; i < WIDTH; i++) d[o] += w[o * WIDTH + i] * x[i];
        *loss += 0.5 * d[o] * d[o];
    }
    FSDP_TRY(fsdp_unit_end_forward(r->unit, pass));
    FSDP_TRY(fsdp_unit_begin_backward(r->unit, pass));
    float *g = fsdp_unit_grad(r->unit, 0, &beta);
    for (int o = 0; o < WIDTH; o++)
        for (int i = 0; i < WIDTH; i++) g[o * WIDTH + i] = (beta != 0 ? g[o * WIDTH + i] : 0) + d[o] * x[i];
    FSDP_TRY(fsdp_unit_end_backward(r->unit, pass));
    fsdp_pass_add_weight(pass, 1);
    return fsdp_pass_end(pass);
}

static fsdp_status one_step(run *r, double *mean)
{
    double loss[LEAVES] = { 0 };
    for (int i = fsdp_comm_rank(r->world); i < LEAVES; i += fsdp_comm_size(r->world)) FSDP_TRY(leaf(r, r->step * LEAVES + i, &loss[i]));
    FSDP_TRY(fsdp_comm_sum_exact(r->world, loss, LEAVES));
    *mean = 0;
    for (int i = 0; i < LEAVES; i++) *mean += loss[i] / LEAVES;
    FSDP_TRY(fsdp_optim_step(r->optim, NULL)); /* divides by the weight of the passes */
    r->step++;
    if (*mean < r->best) r->best = *mean;
    return FSDP_OK;
}

static fsdp_status train(fsdp_comm *world, void *arg)
{
    const settings *s = arg;
    run r;
    char path[4200];
    double mean = 0;
    FSDP_TRY(open_run(&r, world));
    /* All ranks look at the same folder; none there is no error of a first run. */
    bool resumes = fsdp_checkpoint_latest(s->folder, path, sizeof(path), NULL, NULL) == FSDP_OK;
    if (resumes) FSDP_TRY(fsdp_checkpoint_load(r.checkpoint, path));
    if (fsdp_comm_rank(world) == 0) printf(resumes ? "goes on from %s\n" : "begins; checkpoints go to %s\n", resumes ? path : s->folder);
    for (bool stop = false; r.step < s->steps && !stop;) {
        FSDP_TRY(one_step(&r, &mean));
        FSDP_TRY(fsdp_comm_stop_agreed(world, &stop)); /* Ctrl-C: all ranks leave after the same step */
        if (stop || r.step == s->steps || r.step % EVERY == 0) FSDP_TRY(fsdp_checkpoint_save(r.checkpoint, s->folder, r.step, KEEP));
    }
    if (fsdp_comm_rank(world) == 0) printf("step %lld loss %.17g best %.17g\n", (long long)r.step, mean, r.best);
    fsdp_checkpoint_destroy(r.checkpoint);
    fsdp_optim_destroy(r.optim);
    fsdp_unit_destroy(r.unit);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    settings s = { .folder = argc > 1 ? argv[1] : "checkpoints", .steps = argc > 3 ? atoi(argv[3]) : 50 };
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 2 ? atoi(argv[2]) : 0 }, train, &s);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
