/* SPDX-License-Identifier: MIT
 *
 * The transport seam: how a unit's parameters get from their owners to every rank, and its gradients back.
 *
 * Two things pass between ranks, each a persistent object with a protocol of its own:
 *
 *   flat    a unit's flat parameter. Each rank owns one slice of it. Owners publish versions 1, 2, 3, ... of their
 *           slices; every rank gathers a version. An owner overwrites version v only after every rank has said that
 *           it is done with it:
 *               every rank: done(v)   owner: open(v + 1), write, publish(v + 1)   every rank: gather(v + 1)
 *   window  a place for one leaf's gradient of a unit, on every rank. Uses 1, 2, 3, ... follow each other:
 *               every rank: acquire(u), write, post(u)   owner: peer(u, r) for each r in rank order, take(u)
 *           acquire(u) waits until all owners have taken use u - 1.
 *
 * These calls are ordered on a stream and return before they are complete; waits are kernels. No call waits for
 * anything but operations that come before it in every rank's program order: so no order of calls that all ranks
 * share can deadlock (docs/protocol.pml, checked by spin).
 *
 * To add a transport: fill this table, add it to the list in transport.c, run tests/comm/transport_test.c. */
#ifndef FSDPI_COMM_TRANSPORT_H
#define FSDPI_COMM_TRANSPORT_H

#include "comm/comm.h"
#include "device/device.h"

/* Which ranks share a flat: `size` ranks of the communicator that lie `stride` apart, this one among them. All of the
 * communicator's ranks are in such groups, which make their flats together. A mesh of R x S ranks, rank = r S + s, has
 * groups {S, 1}, which shard, and groups {R, S}, which hold replicas. */
typedef struct fsdpi_group {
    int size, stride;
} fsdpi_group;

static inline int fsdpi_group_member(const fsdpi_group *g, int rank)
{
    return rank / g->stride % g->size;
}
/* The rank of the communicator that is member m of rank's group. */
static inline int fsdpi_group_rank(const fsdpi_group *g, int rank, int m)
{
    return rank + (m - fsdpi_group_member(g, rank)) * g->stride;
}
/* Which of the communicator's groups it is. */
static inline int fsdpi_group_index(const fsdpi_group *g, int rank)
{
    return rank / (g->size * g->stride) * g->stride + rank % g->stride;
}
static inline fsdpi_group fsdpi_group_all(const fsdp_comm *comm)
{
    return (fsdpi_group){ comm->size, 1 };
}

typedef struct fsdpi_flat fsdpi_flat;
typedef struct fsdpi_window fsdpi_window;

typedef struct fsdpi_transport_ops {
    const char *name;
    /* Gathers give a view of memory that all ranks share: whole() is not NULL, gather() takes no buffer and copies
     * nothing. */
    bool zero_copy;
    /* Buffers of gathered parameters are to be filled with garbage when they are given up (tests). */
    bool scribble;

    /* ---- flat; `dev` is where slices are written and whole parameters are read ---- */

    /* Collective over comm; required. "Every rank" of a flat is every rank of its group. edges[0..group.size]: bytes;
     * member m owns [edges[m], edges[m + 1]), maybe empty. room: the most that edges[size] is in any group. A rank whose own
     * preparations fail takes part in what is collective, so that the others do not wait (fsdpi_region_create); the
     * caller then lets all ranks agree. */
    fsdp_status (*flat_create)(fsdpi_flat **out, fsdp_comm *comm, fsdpi_group group, fsdp_device *dev, const size_t *edges, size_t room,
                               const char *name);
    /* Required; accepts NULL. By this rank alone: what is shared goes when the last one has. All work on it has run. */
    void (*flat_destroy)(fsdpi_flat *f);
    /* Required. Where this rank may keep its published slice so that publish() copies nothing; NULL: nowhere. */
    void *(*flat_slice)(fsdpi_flat *f);
    /* Required. This rank's reads of version v, on this stream so far, were its last. */
    fsdp_status (*flat_done)(fsdpi_flat *f, uint32_t v, fsdp_stream *s);
    /* Required. Waits until all ranks are done with version v - 1: the slice may be written. */
    fsdp_status (*flat_open)(fsdpi_flat *f, uint32_t v, fsdp_stream *s);
    /* Required. slice: this rank's bytes; flat_slice()'s address, or another which is then copied. */
    fsdp_status (*flat_publish)(fsdpi_flat *f, uint32_t v, const void *slice, fsdp_stream *s);
    /* Required. In fsdp_comm_reset, when no rank uses the flat: the slice becomes version 0, which nobody is done with. NULL:
     * what lies there does. */
    fsdp_status (*flat_restart)(fsdpi_flat *f, const void *slice, fsdp_stream *s);
    /* Required. Waits for version v of every slice; copies them into `whole` (edges[size] bytes; NULL if zero_copy). */
    fsdp_status (*flat_gather)(fsdpi_flat *f, uint32_t v, void *whole, fsdp_stream *s);
    /* Required. The view that all share, read-only; NULL where there is none. */
    const void *(*flat_whole)(fsdpi_flat *f);
    /* Optional. Forbids or allows reading the view, for the host's and kernels' mistakes to show. */
    void (*flat_protect)(fsdpi_flat *f, bool readable);

    /* ---- window ---- */

    /* Collective; required. Each rank gets a buffer of `bytes` on dev. Failures as for flat_create. */
    fsdp_status (*window_create)(fsdpi_window **out, fsdp_comm *comm, fsdp_device *dev, size_t bytes);
    /* Required; accepts NULL. As flat_destroy. */
    void (*window_destroy)(fsdpi_window *w);
    /* Required. This rank's buffer: the same for the window's life. */
    void *(*window_buffer)(fsdpi_window *w);
    fsdp_status (*window_acquire)(fsdpi_window *w, uint32_t use, const char *name, fsdp_stream *s);
    fsdp_status (*window_post)(fsdpi_window *w, uint32_t use, size_t bytes, fsdp_stream *s);
    /* Required. Whether every rank has posted: peer() will not wait. Does not wait; any thread. */
    bool (*window_ready)(fsdpi_window *w, uint32_t use);
    /* Required. Waits for rank r's post; *out: the address of its bytes [lo, hi), good until the next peer() or
     * take() of this window. */
    fsdp_status (*window_peer)(fsdpi_window *w, uint32_t use, int r, size_t lo, size_t hi, const char *name, fsdp_stream *s,
                               const void **out);
    fsdp_status (*window_take)(fsdpi_window *w, uint32_t use, fsdp_stream *s);
} fsdpi_transport_ops;

extern const fsdpi_transport_ops fsdpi_transport_self, fsdpi_transport_shm, fsdpi_transport_copy;

/* NULL name: the usual one for that many ranks. FSDP_ERR_INVALID lists the names. */
fsdp_status fsdpi_transport_find(const fsdpi_transport_ops **out, const char *name, int ranks);

#endif
