#!/bin/sh
# Installs what is missing: Debian packages (with sudo where not root), and the two kernel libraries from PyPI into a
# private prefix. Run again it does nothing and says nothing.
#
#   dev/setup.sh [PREFIX]        PREFIX: .deps beside this folder
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
prefix=${1:-$here/.deps}
packages="gcc libc6-dev cmake make pkg-config libjansson-dev libxxhash-dev libcmocka-dev python3 python3-pip spin bible-kjv bible-kjv-text"

if command -v dpkg-query >/dev/null 2>&1; then
    missing=
    for p in $packages; do
        # A pip or python3 from elsewhere serves as well as Debian's.
        case $p in
        python3) command -v python3 >/dev/null 2>&1 && continue ;;
        python3-pip) python3 -m pip --version >/dev/null 2>&1 && continue ;;
        esac
        [ "$(dpkg-query -W -f='${Status}' "$p" 2>/dev/null)" = "install ok installed" ] || missing="$missing $p"
    done
    if [ -n "$missing" ]; then
        echo "setup: installing Debian packages:$missing"
        sudo=
        if [ "$(id -u)" != 0 ]; then
            command -v sudo >/dev/null 2>&1 || {
                echo "setup: these packages are missing and there is no sudo: as root run: apt-get install$missing" >&2
                exit 1
            }
            sudo=sudo
        fi
        $sudo env DEBIAN_FRONTEND=noninteractive sh -c "apt-get update -q && apt-get install -y -q --no-install-recommends $missing" \
            >"${TMPDIR:-/tmp}/fsdp-setup-$$.log" 2>&1 || {
            cat "${TMPDIR:-/tmp}/fsdp-setup-$$.log" >&2
            echo "setup: apt-get failed; is this machine online, and are its package lists those of Debian 12?" >&2
            exit 1
        }
        rm -f "${TMPDIR:-/tmp}/fsdp-setup-$$.log"
    fi
else
    echo "setup: this is no Debian; install yourself what is missing of: $packages" >&2
fi

# Kernel libraries: wheel, version, library inside, SHA-256 of the x86-64 wheel. A wheel is a zip file; nothing of it
# is run. FSDP builds and works without them, slowly (docs/install.md).
fetch() {
    name=$1 version=$2 pattern=$3 sha=$4
    stamp=$prefix/lib/.$name-$version
    [ -e "$stamp" ] && return 0
    echo "setup: fetching $name $version from PyPI"
    tmp=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$tmp'" EXIT
    if ! python3 -m pip download -q --no-deps --only-binary :all: -d "$tmp" "$name==$version" >"$tmp/log" 2>&1; then
        cat "$tmp/log" >&2
        echo "setup: no $name $version for this machine ($(uname -m)); going on without it" >&2
        return 0
    fi
    wheel=$(ls "$tmp"/*.whl)
    if [ "$(uname -m)" = x86_64 ] && [ "$(sha256sum "$wheel" | cut -d' ' -f1)" != "$sha" ]; then
        echo "setup: $(basename "$wheel") is not the file it should be (SHA-256 differs): not used" >&2
        exit 1
    fi
    mkdir -p "$prefix/lib"
    python3 - "$wheel" "$prefix/lib" "$pattern" <<'PY'
import fnmatch, os, sys, zipfile
wheel, to, pattern = sys.argv[1:]
got = 0
with zipfile.ZipFile(wheel) as z:
    for n in z.namelist():
        if fnmatch.fnmatch(os.path.basename(n), pattern) or ("LICENSE" in os.path.basename(n).upper() and not n.endswith("/")):
            is_lib = fnmatch.fnmatch(os.path.basename(n), pattern)
            name = os.path.basename(n) if is_lib else os.path.basename(wheel).split("-")[0] + "." + os.path.basename(n)
            with open(os.path.join(to, name), "wb") as f:
                f.write(z.read(n))
            got += is_lib
sys.exit(0 if got else "setup: %s has no %s" % (wheel, pattern))
PY
    : >"$stamp"
    rm -rf "$tmp"
    trap - EXIT
}
fetch onednn-cpu-gomp 2023.2.0 'libdnnl.so.3' 2f22a54d6a890ed14bfa185d42a4be65d8b5b1df85dc1f0f3a9abe31620416fb
fetch scipy-openblas32 0.3.34.481.3 'libscipy_openblas*.so*' 0595f94cd58c1f8a0d90c975621f4587337a003916b1979e834ebdf2cb5d9504
