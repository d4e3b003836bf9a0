#!/bin/sh
# Every test there is, as `make check` runs it: the rules of the tree, then a release build and builds with sanitizers, and
# one ctest over all of them. JOBS: how many at a time (the CPUs there are).
set -eu
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}

dev/layers.sh
dev/headers.sh

# A preset, what to build of it, and how to configure it.
build() {
    preset=$1 target=$2
    shift 2
    echo "check: building $preset"
    cmake --preset "$preset" "$@" >"build-$preset.log" 2>&1 || { cat "build-$preset.log"; exit 1; }
    cmake --build --preset "$preset" --target "$target" -j "$jobs" >"build-$preset.log" 2>&1 || { tail -n 60 "build-$preset.log"; exit 1; }
    rm -f "build-$preset.log"
}
build asan checked
build tsan checked
build release all -DFSDP_WERROR=ON -DFSDP_CHECK_VARIANTS=ON

# halt_on_error is the default of neither the undefined-behaviour nor the thread sanitizer where a test forks.
ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1} \
UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1} \
TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1} \
    ctest --test-dir build -j "$jobs" --output-on-failure --no-tests=error "$@"
