#!/bin/sh
# Checks that no file includes what its layer may not: the table of ARCHITECTURE.md, as code. Files of src/X may include their
# own folder, base, the public headers, and the folders listed here; the command includes public headers and itself alone.
set -eu
cd "$(dirname "$0")/../src"

may() {
    case $1 in
    base) echo "" ;;
    format | device) echo "" ;;
    comm) echo "device" ;;
    shard) echo "comm device" ;;
    tensor) echo "device" ;;
    autograd) echo "tensor device" ;;
    ops) echo "autograd tensor device" ;;
    nn) echo "ops autograd tensor shard comm device" ;;
    optim) echo "shard comm device" ;;
    checkpoint) echo "shard comm format device" ;;
    models) echo "nn ops autograd tensor shard comm format device" ;;
    data) echo "format comm" ;;
    cli) echo "none" ;;
    *) echo "unknown" ;;
    esac
}

bad=0
for layer in */; do
    layer=${layer%/}
    allowed=$(may "$layer")
    [ "$allowed" = unknown ] && { echo "layers: src/$layer is in no layer: add it to dev/layers.sh and ARCHITECTURE.md"; bad=1; continue; }
    # each line: file:#include "folder/header.h"
    found=$(grep -rnoE '^#include "[a-z_]+/' "$layer" --include='*.c' --include='*.h' | sed -E 's/:#include "/ /; s/:[0-9]+//; s|/$||') || true
    [ -n "$found" ] || continue
    while read -r file other; do
        [ "$other" = "$layer" ] && continue
        [ "$allowed" != none ] && [ "$other" = base ] && continue
        case " $allowed " in *" $other "*) continue ;; esac
        echo "layers: src/$file includes src/$other, which src/$layer may not"
        bad=1
    done <<EOF
$found
EOF
done
exit $bad
