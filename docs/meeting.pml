/* SPDX-License-Identifier: MIT
 *
 * A meeting of ranks (comm/comm.c: fsdpi_comm_tell), as a model for spin: each rank tells the others something and a
 * hash of all that it has done; what is decided at a meeting (that a pass counts, a step, new values) is decided on all
 * ranks or on none, also where rank 0 does something else at any time. dev/model.sh checks it.
 *
 * One of these breaks it, and must be found out:
 *   -DONE_SLOT     a rank has one place to write to, not two in turn
 *   -DNO_HASH      ranks do not compare what they have done
 *   -DNO_RECHECK   a wait that learns of a difference ends, without a last look whether it is over */
#ifndef N
#define N 3
#endif
#ifndef K
#define K 3 /* meetings */
#endif

#ifdef ONE_SLOT
#define SLOT(n, r) slot[r]
#else
#define SLOT(n, r) slot[((n) % 2) * N + (r)]
#endif

byte slot[2 * N], arrived[N]; /* a slot has the number of its meeting: what was told; + 100: by a rank that has differed */
byte decided[K + 1];          /* how many ranks have got through meeting n */
bool mismatch;                /* two ranks have found that they differ */

proctype rank(byte me)
{
    byte n = 1, r, other;
    bool differs;
    do
    :: n <= K && !mismatch -> /* a call looks first whether something is known to be wrong */
        if
        :: me == 0 && !differs -> differs = true; other = 100 /* it does something else, and whoever compares notices */
        :: skip
        fi;
        if
        :: differs -> /* between meetings: a wait, or this rank, compares what both have done */
            if
            :: mismatch = true
            :: skip
            fi
        :: else -> skip
        fi;
        SLOT(n, me) = n + other;
        arrived[me] = n;
        r = 0;
        do
        :: r < N ->
            do
            :: arrived[r] >= n -> break
            :: else -> /* not yet; is something wrong? */
                if
                :: mismatch ->
#ifndef NO_RECHECK
                    if
                    :: arrived[r] >= n -> break
                    :: else -> goto failed
                    fi
#else
                    goto failed
#endif
                :: else -> skip
                fi
            od;
#ifndef NO_HASH
            if
            :: SLOT(n, r) != n + other -> mismatch = true; goto failed
            :: else -> skip
            fi;
#else
            assert(SLOT(n, r) == n || SLOT(n, r) == n + 100); /* at least it is this meeting's */
#endif
            r++
        :: else -> break
        od;
        decided[n]++;
        n++
    :: else -> break
    od;
failed:
    skip
}

init
{
    atomic {
        byte i = 0;
        do
        :: i < N -> run rank(i); i++
        :: else -> break
        od
    }
    (_nr_pr == 1); /* all have ended, for good or bad */
    byte n = 1;
    do
    :: n <= K -> assert(decided[n] == 0 || decided[n] == N); n++
    :: else -> break
    od
}
