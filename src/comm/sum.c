/* SPDX-License-Identifier: MIT */
#include <fsdp/sum.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/xsum.h"
#include "comm/call.h"

#include <string.h>

_Static_assert(sizeof(fsdp_exact_sum) == sizeof(fsdpi_xsum), "the public type has room for the accumulator");

void fsdp_exact_sum_add(fsdp_exact_sum *s, double x)
{
    fsdpi_xsum a;
    memcpy(&a, s, sizeof(a));
    fsdpi_xsum_add(&a, x);
    memcpy(s, &a, sizeof(a));
}

double fsdp_exact_sum_value(const fsdp_exact_sum *s)
{
    fsdpi_xsum a;
    memcpy(&a, s, sizeof(a));
    return fsdpi_xsum_round(&a);
}

fsdp_status fsdp_comm_sum_exact_sums(fsdp_comm *comm, fsdp_exact_sum *s, int n)
{
    FSDPI_CALL(comm);
    fsdp_exact_sum *all;
    FSDPI_NEW(all, (size_t)comm->size * (size_t)(n > 0 ? n : 0));
    fsdp_status st = fsdpi_comm_exchange(comm, FSDPI_OP_SUM, NULL, s, (size_t)n * sizeof(*s), all);
    for (int i = 0; i < n && st == FSDP_OK; i++) {
        fsdpi_xsum total = { 0 }, part;
        for (int r = 0; r < comm->size; r++) {
            memcpy(&part, &all[r * n + i], sizeof(part));
            fsdpi_xsum_merge(&total, &part);
        }
        memcpy(&s[i], &total, sizeof(total));
    }
    fsdpi_free(all);
    return st;
}
