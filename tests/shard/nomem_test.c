/* SPDX-License-Identifier: MIT
 *
 * Memory ends at any moment: the n-th allocation fails, for n = 1, 2, ... until all goes well. Each time the error is
 * FSDP_ERR_NOMEM, nothing is leaked, and either the work can be done again with the same bits, or the world can be
 * taken down. Where it happens on one rank of several, all are told. */
#include "support/ranks.h"
#include "support/toy.h"

#include "base/alloc.h"
#include "comm/comm.h"

enum { MANY = 100000 };

/* ---- one rank of three ---- */

static const fsdp_param some_params[] = { { "w", 2, { 7, 9 } }, { "b", 1, { 7 } } };

static fsdp_status new_unit(fsdp_unit **u, fsdp_comm *comm, fsdp_device *dev, fsdp_mode mode)
{
    return fsdp_unit_create(u, comm, some_params, 2, &(fsdp_unit_opts){ .name = "u", .mode = mode, .compute_device = dev });
}

static void ones(const char *name, int64_t i, float *value, void *arg)
{
    (void)name;
    (void)arg;
    *value = (float)i + 1;
}

/* Rank 1 has no memory for a unit: no rank gets it, and each says why. Then there is memory, and it works. */
static fsdp_status create_on_all_or_none(fsdp_comm *comm, void *arg)
{
    const corner *c = arg;
    fsdp_device *dev;
    FSDP_TRY(fsdp_device_open(&dev, c->device));
    fsdp_unit *u = NULL;
    bool failed = true;
    for (int n = 1; failed; n++) {
        rank_check(n < 1000);
        if (fsdp_comm_rank(comm) == 1) fsdpi_alloc_fail_at(n);
        fsdp_status st = new_unit(&u, comm, dev, c->mode);
        fsdpi_alloc_fail_at(0);
        failed = st != FSDP_OK;
        if (!failed) break;
        if (st != FSDP_ERR_NOMEM) return st;
        if (strncmp(fsdp_last_error_message(), "rank 1: ", 8) != 0) return st;
        rank_check(u == NULL);
    }
    FSDP_TRY(fsdp_unit_init(u, ones, NULL));
    float w[63];
    FSDP_TRY(fsdp_unit_read_param(u, 0, w));
    for (int i = 0; i < 63; i++) rank_check(w[i] == (float)i + 1);
    fsdp_unit_destroy(u);
    fsdp_device_close(dev);
    return FSDP_OK;
}

static void test_a_unit_is_made_on_all_ranks_or_on_none(void **state)
{
    (void)state;
    in_corners(create_on_all_or_none, &(corners){ .ranks = (const int[]){ 3, 0 }, .processes_only = true, .all_modes = true });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_unit_is_made_on_all_ranks_or_on_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
