/* SPDX-License-Identifier: MIT
 *
 * How ranks share memory, as a model for spin: publishing parameters (comm/transport.h: flat), passing gradients
 * (window), and the reductions that a rank owes (shard/reduce.c). dev/model.sh checks it, docs/protocol.md explains it.
 *
 *   -DN=2 -DU=3 -DW=2 -DSTEPS=2   ranks, units, windows, steps
 *   -DQUEUE                       a device with a queue: what is owed is done as soon as a window is posted, waiting
 *   -DDEATH                       rank 0 may die at any moment; the others must end
 *
 * One of these breaks the protocol, and must be found out:
 *   -DDROP_PUBLISH_WAIT   a reader does not wait for the owners
 *   -DDROP_DONE_WAIT      an owner does not wait for the readers
 *   -DDONE_FROM_ZERO      done(v) announces v, not v + 1: nobody waits for the readers of version 0
 *   -DDROP_WINDOW_ACK     a window is written before all owners have taken it
 *   -DDROP_POST_WAIT      an owner does not wait for a window to be posted
 *   -DEARLY_TAKE          an owner says that it has taken a window before it has read it
 *   -DDROP_OWED_FIRST     a rank that waits for a window does not first do what it owes
 *   -DRANK_ORDER_BY_ARRIVAL   an owner adds the windows of a pass as they come
 *   -DDEAF_TO_DEATH       (with DEATH) waits do not look out for ranks that are gone */
#ifndef N
#define N 2
#endif
#ifndef U
#define U 2
#endif
#ifndef W
#define W 2
#endif
#ifndef STEPS
#define STEPS 2
#endif

#define TORN 255 /* being written */

/* What all ranks see. A flat per unit, a slice per rank; W windows on every rank. */
byte slice[U * N], published[U * N], is_done[U * N];
byte window[W * N], posted[W * N], taken[W * N];
bool dying, gone; /* rank 0 is dead; the launcher has said so */

#if N == 2
#define ALL(a, i, v) (a[(i) * N] >= (v) && a[(i) * N + 1] >= (v))
#define SAME(a, i, v) (a[(i) * N] == (v) && a[(i) * N + 1] == (v))
#else
#define ALL(a, i, v) (a[(i) * N] >= (v) && a[(i) * N + 1] >= (v) && a[(i) * N + 2] >= (v))
#define SAME(a, i, v) (a[(i) * N] == (v) && a[(i) * N + 1] == (v) && a[(i) * N + 2] == (v))
#endif

#if defined(DEATH) && !defined(DEAF_TO_DEATH)
#define WAIT(c) if :: (c) :: gone -> goto over fi
#else
#define WAIT(c) (c)
#endif

#ifdef DROP_PUBLISH_WAIT
#define GATHER(u, v) skip
#else
#define GATHER(u, v) WAIT(ALL(published, u, v))
#endif
#if defined(DROP_DONE_WAIT)
#define OPEN(u, v) skip
#else
#define OPEN(u, v) WAIT(ALL(is_done, u, v))
#endif
#ifdef DONE_FROM_ZERO
#define DONE(v) (v)
#else
#define DONE(v) ((v) + 1)
#endif
#ifdef DROP_WINDOW_ACK
#define ACQUIRE(w, use) skip
#else
#define ACQUIRE(w, use) WAIT(ALL(taken, w, (use) - 1))
#endif
#ifdef DROP_POST_WAIT
#define PEER(w, r, use) skip
#else
#define PEER(w, r, use) WAIT(posted[(w) * N + (r)] >= (use))
#endif

/* A unit is whole: compute reads it now and until the end of its forward or backward. */
inline read_unit(u)
{
    GATHER(u, version);
    assert(SAME(slice, u, version)); /* what it sees at first */
    assert(SAME(slice, u, version)) /* and at last */
}

/* Does the first of the reductions that this rank owes: adds its slice of all ranks' windows, in rank order. */
inline reduce_first()
{
    owed?<x, unit>;
    r = 0;
    do
    :: r < N ->
#ifdef RANK_ORDER_BY_ARRIVAL
        if /* whichever has come and is not added yet */
        :: atomic { (posted[x * N] >= uses[x] && !(added & 1)) -> from = 0 }
        :: atomic { (posted[x * N + 1] >= uses[x] && !(added & 2)) -> from = 1 }
        fi;
        added = added | (1 << from);
#else
        from = r;
        PEER(x, from, uses[x]);
#endif
        assert(window[x * N + from] == uses[x]); /* this use's gradient, whole */
        /* leaf j N + r is added when all before it are: pass by pass, in rank order */
        assert(leaves[unit] == pass * N + from);
#ifdef EARLY_TAKE
        taken[x * N + me] = uses[x];
#endif
        assert(window[x * N + from] == uses[x]); /* still, when it is added */
        leaves[unit]++;
        r++
    :: else -> break
    od;
    atomic {
        taken[x * N + me] = uses[x];
        owes[x] = false;
        owed?x, unit;
#ifdef RANK_ORDER_BY_ARRIVAL
        added = 0;
#endif
        x = 0; unit = 0; r = 0; from = 0
    }
}

/* The next window in program order: the one that was posted longest ago. The same on every rank. */
inline find_window(w)
{
    atomic {
        w = W;
        x = 0;
        do
        :: x < W ->
            if
            :: !held[x] && (w == W || last[x] < last[w]) -> w = x
            :: else -> skip
            fi;
            x++
        :: else -> break
        od;
        x = 0
    }
}

/* A backward begins: the unit gets a window. */
inline open_window(u, w)
{
    do /* whatever can be reduced without waiting, or not: it is a matter of time */
    :: nempty(owed) -> owed?<x, unit>;
        if
        :: ALL(posted, x, uses[x]) -> reduce_first()
        :: x = 0; unit = 0; break
        fi
    :: break
    od;
    find_window(w);
#ifndef DROP_OWED_FIRST
    do
    :: owes[w] -> reduce_first()
    :: else -> break
    od;
#endif
    ACQUIRE(w, uses[w] + 1);
    atomic {
        held[w] = true;
        uses[w]++;
        assert(ALL(taken, w, uses[w] - 1)); /* all owners have what was in it */
        window[w * N + me] = TORN
    }
}

inline post_window(u, w)
{
    window[w * N + me] = uses[w];
    atomic {
        posted[w * N + me] = uses[w];
        held[w] = false;
        posts++;
        last[w] = posts;
        owes[w] = true;
        owed!w, u
    }
}

inline do_owed()
{
#ifdef QUEUE
    reduce_first()
#else
    skip
#endif
}

proctype rank(byte me)
{
    byte version = 0, pass = 0, u, w, root_window, x, r, from, unit, posts;
    byte uses[W], last[W], leaves[U];
    bool held[W], owes[W];
    chan owed = [W] of { byte, byte };
#ifdef RANK_ORDER_BY_ARRIVAL
    byte added;
#endif

    {
    do
    :: pass < STEPS ->
        /* forward: unit 0 is the root, whole from the first to the last */
        u = 0;
        do
        :: u < U -> read_unit(u); u++
        :: else -> break
        od;
        /* backward: the root's window is held around those of the others */
        read_unit(0);
        open_window(0, root_window);
        u = U - 1;
        do
        :: u > 0 ->
            read_unit(u);
            open_window(u, w);
            post_window(u, w);
            do_owed();
            u--
        :: else -> break
        od;
        post_window(0, root_window);
        do /* the end of the pass: all that is owed */
        :: nempty(owed) -> reduce_first()
        :: empty(owed) -> break
        od;
        u = 0;
        do
        :: u < U -> assert(leaves[u] == (pass + 1) * N); u++ /* each leaf once */
        :: else -> break
        od;
        read_unit(U - 1); /* an evaluation: readers that no gradients hold back */
        /* the step: done with all units, then one after another is opened, written, published */
        u = 0;
        do
        :: u < U -> is_done[u * N + me] = DONE(version); u++
        :: else -> break
        od;
        u = 0;
        do
        :: u < U ->
            OPEN(u, DONE(version));
            slice[u * N + me] = TORN;
            slice[u * N + me] = version + 1;
            published[u * N + me] = version + 1;
            u++
        :: else -> break
        od;
        atomic { version++; pass++; u = 0; w = 0; root_window = 0 }
    :: else -> break
    od;
over:
    skip
    }
#ifdef DEATH
    unless { me == 0 && dying }
#endif
}

#ifdef DEATH
/* Rank 0 stops for good between any two of its statements; then the launcher notices. */
proctype killer()
{
    dying = true;
    gone = true
}
#endif

init
{
    atomic {
        run rank(0);
        run rank(1);
#if N == 3
        run rank(2);
#endif
#ifdef DEATH
        run killer()
#endif
    }
}
