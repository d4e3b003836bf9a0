#!/bin/sh
# make bench: our step beside PyTorch's. The peers' Python is made once, in .peers (2 GB from PyPI); PEER_PYTHON names another.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${PEER_PYTHON:-}" ]; then
    if [ ! -x "$here/.peers/bin/python" ]; then
        echo "bench: making a Python with torch in .peers (about 2 GB from PyPI)"
        python3 -m venv "$here/.peers" && "$here/.peers/bin/pip" install -q torch==2.15.0 numpy
    fi
    PEER_PYTHON=$here/.peers/bin/python
fi
export PEER_PYTHON
exec python3 "$here/bench/run.py" "$@"
