/* SPDX-License-Identifier: MIT
 *
 * Five ways to begin, each of which may come before or after wrapping, and in any order with the units around:
 *
 *     by key          a function of (seed, name, element): the same on any number of ranks
 *     apply           a function of one's own over whole parameters, on their original shapes, one unit at a time
 *     before          what a parameter had before it was wrapped is kept
 *     rank 0          its values count everywhere; the others need none
 *     a seed a rank   each rank's slice keeps what that rank drew: allowed, and said once
 *
 *   ./initial_values 3 [per-rank] */
#include <fsdp/fsdp.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 6 };

static void say(fsdp_log_level level, const char *text, void *arg)
{
    (void)arg;
    printf("%s: %s\n", level == FSDP_LOG_WARN ? "warning" : "note", text);
}

static fsdp_status layer(fsdp_module **out, int64_t in, int64_t width)
{
    return fsdp_linear(out, in, width, &(fsdp_linear_opts){ .bias = true });
}

static fsdp_status wrap(fsdp_module **m, fsdp_comm *world, const char *name)
{
    return fsdp_wrap(m, *m, &(fsdp_wrap_opts){ .comm = world, .name = name });
}

/* What a model's author would write: it knows nothing of slices. */
static fsdp_status init_weights(const char *name, const fsdp_param *param, float *value, void *rng)
{
    (void)name;
    int64_t rows = param->shape[0], numel = param->ndim == 2 ? rows * param->shape[1] : rows;
    float std = param->ndim == 2 ? sqrtf(2.0f / (float)(rows + param->shape[1])) : 0;
    for (int64_t i = 0; i < numel; i++) value[i] = std * fsdp_rng_normal(rng);
    return FSDP_OK;
}

static fsdp_status begin(fsdp_comm *world, void *arg)
{
    const int rank = fsdp_comm_rank(world);
    fsdp_module *part[4], *model;
    fsdp_rng rng;
    for (int i = 0; i < 4; i++) FSDP_TRY(layer(&part[i], WIDTH, WIDTH));

    /* 0: wrapped, then a function of one's own. It draws the same on every rank. */
    FSDP_TRY(wrap(&part[0], world, "applied"));
    fsdp_rng_init(&rng, 1);
    FSDP_TRY(fsdp_module_apply(part[0], init_weights, &rng));

    /* 1: initialised, then wrapped */
    fsdp_rng_init(&rng, 2);
    FSDP_TRY(fsdp_module_init(part[1], FSDP_INIT_KAIMING, &rng));
    FSDP_TRY(wrap(&part[1], world, "before"));

    /* 2: rank 0 has read a file, perhaps */
    if (rank == 0) FSDP_TRY(fsdp_module_init_keyed(part[2], FSDP_INIT_NORMAL, 3));
    FSDP_TRY(fsdp_wrap(&part[2], part[2], &(fsdp_wrap_opts){ .comm = world, .name = "rank 0", .from_rank0 = true }));

    /* 3: a seed of this rank's own, drawn while the unit is summoned. Replicas, as in mode none, would be made the same. */
    FSDP_TRY(wrap(&part[3], world, "a seed a rank"));
    fsdp_rng_init(&rng, 4 + (arg != NULL ? (uint64_t)rank : 0));
    FSDP_TRY(fsdp_summon_begin(part[3], &(fsdp_summon_opts){ .writeback = true }));
    FSDP_TRY(fsdp_module_init(part[3], FSDP_INIT_KAIMING, &rng));
    FSDP_TRY(fsdp_summon_end(part[3]));

    /* and a head that comes last, by key; what was not initialised would be named here */
    fsdp_module *head, *trunk;
    FSDP_TRY(layer(&head, WIDTH, 3));
    FSDP_TRY(fsdp_sequential(&trunk, part, 4));
    FSDP_TRY(fsdp_sequential(&model, (fsdp_module *[]){ trunk, head }, 2));
    FSDP_TRY(wrap(&model, world, "model"));
    if (fsdp_module_check_set(model) != FSDP_OK && rank == 0) printf("%s\n", fsdp_last_error_message());
    FSDP_TRY(fsdp_module_init_keyed(head, FSDP_INIT_KAIMING, 5));
    FSDP_TRY(fsdp_module_check_set(model));
    FSDP_TRY(fsdp_module_check_replicas(model));

    const fsdp_module_param_info *info;
    int count;
    FSDP_TRY(fsdp_module_params(model, &info, &count));
    for (int i = 0; i < count; i++) {
        float x[WIDTH * WIDTH];
        FSDP_TRY(fsdp_module_read_param(model, i, rank == 0 ? x : NULL));
        if (rank == 0 && info[i].param.ndim == 2) printf("%-14s in \"%s\" begins with %.9g\n", info[i].name, fsdp_unit_name(info[i].unit), (double)x[0]);
    }
    fsdp_module_destroy(model);
    return FSDP_OK;
}

int main(int argc, char **argv)
{
    fsdp_log_set(FSDP_LOG_INFO, say, NULL);
    fsdp_status st = fsdp_launch(&(fsdp_launch_opts){ .ranks = argc > 1 ? atoi(argv[1]) : 0 }, begin, argc > 2 && strcmp(argv[2], "per-rank") == 0 ? "per-rank" : NULL);
    if (st != FSDP_OK) fprintf(stderr, "%s\n", fsdp_last_error());
    return st != FSDP_OK;
}
