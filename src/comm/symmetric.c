/* SPDX-License-Identifier: MIT */
#include "comm/symmetric.h"

#include "base/error.h"

#include <stdio.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

fsdp_status fsdpi_region_create(fsdpi_region *out, fsdp_comm *comm, fsdp_status mine, int counters, size_t payload)
{
    fsdpi_region r = { .comm = comm };
    r.counter_bytes = fsdpi_round_up((size_t)(counters + 1) * sizeof(fsdpi_counter), fsdpi_page_size());
    r.bytes = r.counter_bytes + fsdpi_round_up(payload, fsdpi_page_size());
    FSDP_TRY(fsdpi_comm_heap_alloc(comm, mine, r.bytes, &r.offset));
    void *p;
    /* That a rank cannot map its part is told to all by whoever creates the region (fsdp_comm_agree). */
    FSDP_TRY(fsdpi_comm_heap_map(comm, r.offset, r.counter_bytes, &p));
    r.counter = p;
    r.left = r.counter + counters;
    *out = r;
    return FSDP_OK;
}

void fsdpi_region_destroy(fsdpi_region *r)
{
    if (r->counter == NULL) return;
    bool last = (int)atomic_fetch_add(&r->left->value, 1) + 1 == r->comm->size;
    fsdpi_comm_heap_unmap(r->comm, r->counter, r->counter_bytes);
    r->counter = NULL;
    if (last) fsdpi_heap_free(r->comm->world, r->offset, r->bytes);
}

fsdp_status fsdpi_region_map(const fsdpi_region *r, fsdp_device *dev, size_t at, size_t bytes, bool writable, void **out)
{
    *out = NULL;
    if (bytes == 0) return FSDP_OK;
    return dev->ops->map(dev, &r->comm->world->heap, r->offset + r->counter_bytes + at,
                         fsdpi_round_up(bytes, fsdpi_page_size()), writable, out);
}

void fsdpi_region_unmap(const fsdpi_region *r, fsdp_device *dev, void *p, size_t bytes)
{
    if (p != NULL) dev->ops->unmap(dev, &r->comm->world->heap, p, fsdpi_round_up(bytes, fsdpi_page_size()));
}

typedef struct set_args {
    fsdpi_counter *counter;
    uint32_t value;
} set_args;

static fsdp_status k_set(const fsdp_kernel *k, const void *args)
{
    (void)k;
    const set_args *a = args;
#if defined(__SSE2__)
    _mm_sfence(); /* non-temporal stores are not ordered by a release store */
#endif
    fsdpi_counter_set(a->counter, a->value);
    return FSDP_OK;
}

fsdp_status fsdpi_launch_set(fsdp_stream *s, fsdpi_counter *c, uint32_t value)
{
    return fsdp_stream_launch(s, k_set, &(set_args){ c, value }, sizeof(set_args));
}

typedef struct wait_args {
    fsdp_comm *comm;
    fsdpi_counter *counter; /* of rank 0 */
    fsdpi_group group;
    int only;
    uint32_t value;
    uint64_t made;
    const char *doing;
    char name[FSDPI_NAME];
} wait_args;

static fsdp_status k_wait(const fsdp_kernel *k, const void *args)
{
    (void)k;
    const wait_args *a = args;
    int first = a->only >= 0 ? a->only : 0, last = a->only >= 0 ? a->only : a->group.size - 1;
    for (int m = first; m <= last; m++) {
        int r = fsdpi_group_rank(&a->group, a->comm->rank, m);
        if (fsdpi_counter_reached(&a->counter[r], a->value)) continue;
        char what[128];
        snprintf(what, sizeof(what), "%s of \"%s\"", a->doing, a->name);
        FSDP_TRY(fsdpi_comm_wait(a->comm, &a->counter[r], a->value, r, a->made, what));
    }
    return FSDP_OK;
}

fsdp_status fsdpi_launch_wait(fsdp_stream *s, const fsdpi_region *r, const fsdpi_group *group, bool second, int only, uint32_t value,
                              const char *doing, const char *name)
{
    wait_args a = { .comm = r->comm,
                    .counter = second ? fsdpi_second_counter(r, 0) : fsdpi_first_counter(r, 0),
                    .group = *group,
                    .only = only,
                    .value = value,
                    .made = fsdpi_comm_made(r->comm),
                    .doing = doing };
    snprintf(a.name, sizeof(a.name), "%s", name);
    return fsdp_stream_launch(s, k_wait, &a, sizeof(a));
}
