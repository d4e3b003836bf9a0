#!/bin/sh
# Each public header compiles alone, as C11 and as C++11.
set -eu
cd "$(dirname "$0")/.."
for h in include/fsdp/*.h; do
    name=${h#include/}
    echo "#include <$name>" | ${CC:-cc} -std=c11 -Wall -Wextra -Wpedantic -Werror -Iinclude -fsyntax-only -x c - ||
        { echo "headers: $name does not compile alone as C11"; exit 1; }
    if command -v "${CXX:-c++}" >/dev/null 2>&1; then
        echo "#include <$name>" | ${CXX:-c++} -std=c++11 -Wall -Wextra -Wpedantic -Werror -Iinclude -fsyntax-only -x c++ - ||
            { echo "headers: $name does not compile alone as C++11"; exit 1; }
    fi
done
