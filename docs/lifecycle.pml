/* SPDX-License-Identifier: MIT
 *
 * The life of units (src/shard/life.h), as a model for spin: three units and two ranks, and a program that makes any calls
 * in any order that is allowed: forwards and backwards of each unit, within each other or not, twice or in part; passes
 * that train, evaluate, end or are cancelled; summons that write; steps. Ranks make the same calls, each at its own pace.
 * Which unit is the root of a pass nobody says. dev/model.sh checks it, docs/protocol.md explains it.
 *
 * No order of calls deadlocks, leaves a unit whole that nobody uses, loses or adds a gradient, or lets an owner write
 * what another rank reads.
 *
 *   -DW=3 -DPASSES=2 -DCHANGES=2 -DAGAIN=1   windows, passes, changes of parameters, forwards of unit 2 in a pass
 *   -DMODE0=0 -DMODE1=0 -DMODE2=0            of each unit: 0 full, 1 grad-op, 2 optimizer
 *
 * One of these breaks it, and must be found out:
 *   -DKEEP_STALE         what was kept whole is used again, though it has new values
 *   -DKEEP_IDLE          a pass that ends leaves whole what it kept
 *   -DKEEP_HELD          a cancelled pass does not give up what was in use
 *   -DSTEP_IN_PASS       a step may begin while a pass is open
 *   -DDROP_DONE_WAIT     an owner does not wait for the readers
 *   -DDROP_GATHER_WAIT   a reader does not wait for the owners
 *   -DDROP_POST_AT_END   a pass ends, and gradients of units with backwards to come are not posted
 *   -DDROP_POST_AT_CANCEL   a cancelled pass does not pass its windows round
 *   -DDROP_OWED_AT_END   a pass ends before this rank has done what it owes
 *   -DDROP_OWED_FIRST    a rank that waits for a window does not first do what it owes
 *   -DADD_IN_PLACE       sums are added up where committed ones are
 *   -DCOMMIT_CANCELLED   gradients of a cancelled pass count */
#ifndef W
#define W 3
#endif
#ifndef PASSES
#define PASSES 2
#endif
#ifndef CHANGES
#define CHANGES 2
#endif
#ifndef AGAIN
#define AGAIN 1
#endif
#ifndef MODE0
#define MODE0 0
#endif
#ifndef MODE1
#define MODE1 0
#endif
#ifndef MODE2
#define MODE2 0
#endif
#define U 3
#define N 2

#define MODE(u) ((u) == 0 -> MODE0 : ((u) == 1 -> MODE1 : MODE2))
#define GRAD_OP 1
#define OPTIMIZER 2

#define TORN 255 /* being written */
#define ALL(a, i, v) (a[(i) * N] >= (v) && a[(i) * N + 1] >= (v))
#define SAME(a, i, v) (a[(i) * N] == (v) && a[(i) * N + 1] == (v))

#ifdef DROP_GATHER_WAIT
#define GATHER(u, v) true
#else
#define GATHER(u, v) ALL(published, u, v)
#endif
#ifdef DROP_DONE_WAIT
#define OPEN(u, v) true
#else
#define OPEN(u, v) ALL(is_done, u, v)
#endif

/* What ranks see of each other. */
byte slice[U * N], published[U * N], is_done[U * N];
byte window[W * N], posted[W * N], taken[W * N];
byte met[N];

/* ---- the program: what is called next, on all ranks ---- */

#define STOP 0
#define TRAIN 1
#define EVAL 2
#define END 3
#define CANCEL 4
#define STEP 5
#define BEGIN_FORWARD 6
#define END_FORWARD 7
#define END_FORWARD_KEEP 8 /* the root's, and in mode grad-op, in a training pass */
#define BEGIN_BACKWARD 9
#define END_BACKWARD 10
#define END_LAST_BACKWARD 11 /* no forward is left to undo: its window is posted */
#define BEGIN_SUMMON 12
#define END_SUMMON 13

chan todo0 = [1] of { byte, byte };
chan todo1 = [1] of { byte, byte };

#define CALL(kind, u) todo0!kind, u; todo1!kind, u
#define ACTIVE (f_open[0] + f_open[1] + f_open[2] + b_open[0] + b_open[1] + b_open[2])
#define WINDOWS (open[0] + open[1] + open[2])
#ifdef STEP_IN_PASS
#define IDLE (!summoned)
#else
#define IDLE (!pass && !summoned)
#endif

/* What unit.h allows for a unit. A unit gets a second forward only if it is unit 2, and -DAGAIN=2. */
#define OF_UNIT(u)                                                                                          \
    :: pass && !f_open[u] && forwards[u] < (u == 2 -> AGAIN : 1) ->                                         \
        root[u] = (ACTIVE == 0); f_open[u] = true; CALL(BEGIN_FORWARD, u)                                     \
    :: pass && f_open[u] -> f_open[u] = false; forwards[u]++;                                               \
        if                                                                                                    \
        :: train && (root[u] || MODE(u) == GRAD_OP) -> CALL(END_FORWARD_KEEP, u)                                                    \
        :: else -> CALL(END_FORWARD, u)                                                                     \
        fi;                                                                                                   \
        root[u] = false                                                                                     \
    :: pass && train && !b_open[u] && forwards[u] > backwards[u] && (open[u] || WINDOWS < W) ->             \
        b_open[u] = true; open[u] = true; CALL(BEGIN_BACKWARD, u)                                           \
    :: pass && b_open[u] -> b_open[u] = false; backwards[u]++;                                              \
        if                                                                                                    \
        :: backwards[u] == forwards[u] && !f_open[u] -> open[u] = false; CALL(END_LAST_BACKWARD, u)         \
        :: else -> CALL(END_BACKWARD, u)                                                                    \
        fi                                                                                                    \
    :: !pass && !summoned && changes < CHANGES -> changes++; summoned = true; which = u; CALL(BEGIN_SUMMON, u)

inline forget()
{
    pass = false;
    train = false;
    u = 0;
    do
    :: u < U -> forwards[u] = 0; backwards[u] = 0; f_open[u] = false; b_open[u] = false; open[u] = false; root[u] = false; u++
    :: else -> u = 0; break
    od
}

proctype program()
{
    byte passes, changes, which, u;
    byte forwards[U], backwards[U];
    bool pass, train, summoned, f_open[U], b_open[U], open[U], root[U];
    do
    :: atomic {
        empty(todo0) && empty(todo1) -> /* both have begun the call before */
        if
        OF_UNIT(0)
        OF_UNIT(1)
        OF_UNIT(2)
        :: !pass && !summoned && passes < PASSES -> passes++; pass = true; train = true; CALL(TRAIN, 0)
        :: !pass && !summoned && passes < PASSES -> passes++; pass = true; CALL(EVAL, 0)
        :: pass && ACTIVE == 0 -> forget(); CALL(END, 0)
        :: pass -> forget(); CALL(CANCEL, 0)
        :: IDLE && changes < CHANGES -> changes++; CALL(STEP, 0)
        :: summoned -> summoned = false; CALL(END_SUMMON, which); which = 0
        :: !pass && !summoned -> CALL(STOP, 0); break
        fi
    }
    od
}

/* ---- a rank ---- */

inline hold(u)
{
    if
#ifdef KEEP_STALE
    :: whole[u] == 0 ->
#else
    :: whole[u] != version[u] + 1 ->
#endif
        GATHER(u, version[u]);
        whole[u] = version[u] + 1
    :: else -> skip
    fi;
    atomic {
        holders[u]++;
        assert(SAME(slice, u, version[u])) /* what it sees at first */
    }
}

inline release(u, keep)
{
    atomic {
        assert(SAME(slice, u, whole[u] - 1)); /* and at last */
        holders[u]--;
        if
        :: holders[u] == 0 && !(keep) && MODE(u) != OPTIMIZER -> whole[u] = 0
        :: else -> skip
        fi
    }
}

/* The first of the reductions that this rank owes. */
inline reduce_first()
{
    owed?<w, unit>;
    r = 0;
    do
    :: r < N ->
        atomic {
            posted[w * N + r] >= uses[w] ->
            assert(window[w * N + r] == uses[w]);
            if
            :: discard -> skip
            :: else ->
#ifdef ADD_IN_PLACE
                now[unit]++;
#else
                if
                :: !pending[unit] && r == 0 -> next[unit] = now[unit]; pending[unit] = true
                :: else -> skip
                fi;
                next[unit]++;
#endif
            fi;
            r++
        }
    :: else -> break
    od;
    atomic {
        taken[w * N + me] = uses[w];
        owes[w] = false;
        owed?w, unit;
        w = 0; unit = 0; r = 0
    }
}

inline reduce_all()
{
    do
    :: nempty(owed) -> reduce_first()
    :: empty(owed) -> break
    od
}

/* A window of those that are free, the one that was posted longest ago: age[0] is the oldest. */
inline open_window(u)
{
    do /* what can be reduced by now, or not: it is a matter of time */
    :: nempty(owed) -> owed?<w, unit>;
        if
        :: ALL(posted, w, uses[w]) -> reduce_first()
        :: w = 0; unit = 0; break
        fi
    :: break
    od;
    atomic {
        r = 0;
        do
        :: held[age[r]] -> r++
        :: else -> break
        od;
        mine[u] = age[r];
        r = 0
    }
#ifndef DROP_OWED_FIRST
    do
    :: owes[mine[u]] -> reduce_first()
    :: else -> break
    od;
#endif
    atomic {
        ALL(taken, mine[u], uses[mine[u]]) ->
        held[mine[u]] = true;
        uses[mine[u]]++;
        window[mine[u] * N + me] = TORN;
        open[u] = true
    }
}

inline post_window(u)
{
    atomic {
        w = mine[u];
        window[w * N + me] = uses[w];
        posted[w * N + me] = uses[w];
        held[w] = false;
        owes[w] = true;
        owed!w, u;
        open[u] = false;
        r = 0; /* it is the youngest now */
        do
        :: age[r] != w -> r++
        :: else -> break
        od;
        do
        :: r < W - 1 -> age[r] = age[r + 1]; r++
        :: else -> break
        od;
        age[W - 1] = w;
        w = 0; r = 0; mine[u] = 0
    }
}

inline post_open_windows()
{
    x = 0;
    do
    :: x < U ->
        if
        :: open[x] -> post_window(x)
        :: else -> skip
        fi;
        x++
    :: else -> x = 0; break
    od
}

inline reshard_idle()
{
#ifdef KEEP_IDLE
    skip
#else
    atomic {
        x = 0;
        do
        :: x < U ->
            if
            :: holders[x] == 0 && MODE(x) != OPTIMIZER -> whole[x] = 0
            :: else -> skip
            fi;
            x++
        :: else -> x = 0; break
        od
    }
#endif
}

inline meet()
{
    met[me]++;
    met[1 - me] >= met[me]
}

/* What a pass leaves behind: nothing but sums, and in mode optimizer whole units that nobody uses. */
inline forget_pass()
{
    atomic {
        x = 0;
        do
        :: x < U ->
            assert(holders[x] == 0);
            assert(MODE(x) == OPTIMIZER || whole[x] == 0);
            assert((x < W -> !held[x] && !owes[x] : true)); /* windows are passed round */
            pending[x] = false; rounds[x] = 0; open[x] = false;
            assert(now[x] == want[x]); /* each gradient once, and none of a cancelled pass */
            x++
        :: else -> x = 0; break
        od
    }
}

inline end_pass()
{
    do /* what is still open is one more round */
    :: x < U -> rounds[x] = rounds[x] + open[x]; x++
    :: else -> x = 0; break
    od;
#ifndef DROP_POST_AT_END
    post_open_windows();
#endif
#ifndef DROP_OWED_AT_END
    reduce_all();
#endif
    reshard_idle();
    meet();
    atomic {
        x = 0;
        do
        :: x < U ->
            if
            :: pending[x] -> now[x] = next[x]; next[x] = 0
            :: else -> skip
            fi;
            want[x] = want[x] + N * rounds[x]; /* of all ranks, for each round that it posted */
            x++
        :: else -> break
        od
    }
    forget_pass()
}

inline cancel_pass()
{
#ifndef DROP_POST_AT_CANCEL
    post_open_windows();
#endif
    discard = true;
    reduce_all();
    discard = false;
    atomic {
        x = 0;
        do
        :: x < U ->
#ifndef KEEP_HELD
            do
            :: holders[x] > 0 -> release(x, false)
            :: else -> break
            od;
#endif
#ifdef COMMIT_CANCELLED
            if
            :: pending[x] -> now[x] = next[x]
            :: else -> skip
            fi;
#endif
            next[x] = 0;
            x++
        :: else -> x = 0; break
        od
    }
    reshard_idle();
    forget_pass()
}

inline change(u)
{
    OPEN(u, version[u] + 1);
    slice[u * N + me] = TORN
}

inline publish(u)
{
    slice[u * N + me] = version[u] + 1;
    atomic {
        version[u]++;
        published[u * N + me] = version[u];
        if
        :: holders[u] == 0 && MODE(u) != OPTIMIZER -> whole[u] = 0
        :: else -> skip
        fi
    }
}

inline step()
{
    atomic {
        x = 0;
        do
        :: x < U -> is_done[x * N + me] = version[x] + 1; x++
        :: else -> x = 0; break
        od
    }
    do
    :: x < U -> change(x); x++
    :: else -> x = 0; break
    od;
    meet();
    do
    :: x < U -> publish(x); now[x] = 0; want[x] = 0; x++
    :: else -> x = 0; break
    od
}

inline end_summon(u)
{
    assert(SAME(slice, u, whole[u] - 1));
    is_done[u * N + me] = version[u] + 1;
    change(u);
    meet();
    publish(u);
    holders[u]--;
    if
    :: MODE(u) != OPTIMIZER -> whole[u] = 0
    :: else -> skip
    fi
}

#define RECEIVE if :: me == 0 -> todo0?kind, u :: me == 1 -> todo1?kind, u fi

/* Calls are steps that nobody looks into, but where they wait: what happens within them is docs/protocol.pml's. */
proctype rank(byte me)
{
    byte kind, u, x, w, r, unit;
    byte version[U], whole[U], holders[U], mine[U]; /* whole: its version + 1; 0: sharded */
    byte rounds[U], now[U], next[U], want[U];
    bool open[U], pending[U], discard;
    byte uses[W], age[W];
    bool held[W], owes[W];
    chan owed = [W] of { byte, byte };

    atomic {
        do
        :: x < W -> age[x] = x; x++
        :: else -> x = 0; break
        od
    }
    do
    :: atomic {
        RECEIVE;
        if
        :: kind == STOP -> break
        :: kind == TRAIN || kind == EVAL -> skip
        :: kind == BEGIN_FORWARD -> hold(u)
        :: kind == END_FORWARD -> release(u, false)
        :: kind == END_FORWARD_KEEP -> release(u, true)
        :: kind == BEGIN_BACKWARD ->
            if
            :: !open[u] -> open_window(u)
            :: else -> skip
            fi;
            hold(u)
        :: kind == END_BACKWARD -> release(u, MODE(u) == GRAD_OP)
        :: kind == END_LAST_BACKWARD ->
            release(u, false);
            rounds[u]++;
            post_window(u)
        :: kind == END -> end_pass()
        :: kind == CANCEL -> cancel_pass()
        :: kind == STEP -> step()
        :: kind == BEGIN_SUMMON -> hold(u)
        :: kind == END_SUMMON -> end_summon(u)
        fi;
        kind = 0; u = 0
    }
    od
}

init
{
    atomic {
        run program();
        run rank(0);
        run rank(1)
    }
}
