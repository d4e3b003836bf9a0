#!/bin/sh
# Checks docs/protocol.pml, docs/meeting.pml and docs/lifecycle.pml with spin: what they say must hold in every interleaving, and each broken
# variant must be found out. Takes some 40 s of CPU; exit status 77 where spin or a C compiler is missing.
#
#   dev/model.sh [-v] [--stamp FILE]
#       -v: also what spin says of each
#       --stamp: a search has the same end whenever it is made. Where FILE says that these models have passed these checks with these tools,
#           they are not searched again; otherwise it is written when they have.
set -eu
docs=$(cd "$(dirname "$0")/.." && pwd)/docs
verbose= stamp=
while [ $# -gt 0 ]; do
    case $1 in
    -v) verbose=-v ;;
    --stamp) stamp=$(cd "$(dirname "$2")" && pwd)/$(basename "$2") && shift ;;
    *) echo "usage: dev/model.sh [-v] [--stamp FILE]" >&2 && exit 2 ;;
    esac
    shift
done
cc=${CC:-gcc}
if ! command -v spin >/dev/null 2>&1 || ! command -v "$cc" >/dev/null 2>&1; then
    echo "model: spin or a C compiler is missing: not checked" >&2
    exit 77
fi
now=$({ cat "$0" "$docs"/*.pml && spin -V && "$cc" --version; } | sha256sum)
if [ -n "$stamp" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ]; then
    echo "model: these models have passed these checks ($stamp)"
    exit 0
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"

# check holds|fails MODEL OPTIONS
check() {
    want=$1 model=$2
    shift 2
    spin -a "$@" "$docs/$model.pml" >spin.log 2>&1 || { cat spin.log; exit 1; }
    "$cc" -w -O0 -DSAFETY -DNOFAIR -o pan pan.c # to optimise takes longer than what a search gains by it
    ./pan -m200000 -w22 >pan.log 2>&1 || true
    # A search that was cut short proves nothing.
    if ! grep -q "errors:" pan.log || grep -q "max search depth too small\|out of memory" pan.log; then
        cat pan.log
        echo "model: no verdict for $model $*" >&2
        exit 1
    fi
    if grep -q "errors: 0" pan.log; then got=holds; else got=fails; fi
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
    why=$(sed -n 's/^pan:1: \(.*\) (at depth.*/: \1/p' pan.log)
    echo "$got  $model $* ($states states)$why"
    if [ "$verbose" = -v ]; then cat pan.log; fi
    [ "$got" = "$want" ] || { echo "model: it should be: $want" >&2; exit 1; }
}

check holds protocol -DN=2 -DU=3 -DW=2
check holds protocol -DN=2 -DU=3 -DW=3 -DSTEPS=3
check holds protocol -DN=2 -DU=3 -DW=2 -DQUEUE
check holds protocol -DN=3 -DU=3 -DW=2
check holds protocol -DN=3 -DU=2 -DW=2 -DQUEUE
check holds protocol -DN=2 -DU=3 -DW=2 -DDEATH
check holds protocol -DN=3 -DU=1 -DW=1 -DSTEPS=1 -DDEATH
for broken in DROP_PUBLISH_WAIT DROP_DONE_WAIT DONE_FROM_ZERO DROP_WINDOW_ACK DROP_POST_WAIT EARLY_TAKE DROP_OWED_FIRST RANK_ORDER_BY_ARRIVAL; do
    check fails protocol -DN=2 -DU=3 -DW=2 -D$broken
done
check fails protocol -DN=2 -DU=3 -DW=2 -DDEATH -DDEAF_TO_DEATH

check holds meeting -DN=2 -DK=4
check holds meeting -DN=3 -DK=3
for broken in ONE_SLOT NO_HASH NO_RECHECK; do
    check fails meeting -DN=3 -DK=3 -D$broken
done

# Any calls in any order: 0.5 million states each.
check holds lifecycle -DPASSES=1 -DCHANGES=2 -DMODE1=1 -DMODE2=2
check holds lifecycle -DPASSES=2 -DCHANGES=0 -DW=2
check holds lifecycle -DPASSES=1 -DCHANGES=0 -DW=2 -DAGAIN=2
for broken in KEEP_IDLE KEEP_HELD STEP_IN_PASS DROP_DONE_WAIT DROP_POST_AT_CANCEL DROP_OWED_AT_END ADD_IN_PLACE COMMIT_CANCELLED; do
    check fails lifecycle -DPASSES=1 -DCHANGES=1 -D$broken
done
check fails lifecycle -DPASSES=1 -DCHANGES=2 -DMODE2=2 -DKEEP_STALE
check fails lifecycle -DPASSES=1 -DCHANGES=2 -DDROP_GATHER_WAIT
check fails lifecycle -DPASSES=1 -DCHANGES=0 -DAGAIN=2 -DDROP_POST_AT_END
check fails lifecycle -DPASSES=1 -DCHANGES=0 -DAGAIN=2 -DW=1 -DDROP_OWED_FIRST

if [ -n "$stamp" ]; then echo "$now" >"$stamp"; fi
