#!/bin/sh
# Makes .venv in the clone and installs what constraints.txt pins. `make setup` calls this once and leaves a stamp.
# PYTHON=... names the interpreter; without it the first fitting one on the path is taken. Package servers, proxies
# and mirrors are pip's own business: configure pip, not this file.
set -eu
cd "$(dirname "$0")/.."

refuse() {
    echo "setup: $1" >&2
    exit 1
}

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if fits "$name" && "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
}

if [ -x .venv/bin/python ]; then
    fits .venv/bin/python || refuse "the Python in .venv is not 3.11, 3.12 or 3.13; remove .venv and run make again"
fi
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    [ -n "$python" ] || refuse "found no Python 3.11, 3.12 or 3.13 with venv and ensurepip among: ${PYTHON:-python3.11 python3.12 python3.13 python3 python} (PYTHON=/path/to/python3.11 make ... names one; Debian has venv in python3-venv)"
    echo "setup: making .venv with $("$python" --version) (once; takes some minutes)"
    "$python" -m venv .venv
fi

# Not compiled: most files of torch and transformers are never imported. Python compiles the others where they are.
install() {
    .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt "$@"
}

# Pip itself comes first: that of Python 3.11 needs twice the processor time to read the lists of versions.
echo "setup: the pins of constraints.txt; torch is the largest"
install "$(sed -n '/^pip==/p' constraints.txt)" || echo "setup: goes on with $(.venv/bin/python -m pip --version)" >&2

# The pins name all packages, so nothing is resolved, and three processes install at once. torch is exact: from a looser
# requirement on an x86-64 machine without a GPU pip takes the newest build with its gigabytes of CUDA libraries.
# Triton has wheels for Linux only.
pins() {
    if [ "$(uname)" = Linux ]; then omit='^#\|^pip==\|^torch=='; else omit='^#\|^pip==\|^torch==\|^triton=='; fi
    grep -v "$omit" constraints.txt | sed -n "$1"
}
install --no-deps "$(sed -n '/^torch==/p' constraints.txt)" &
torch=$!
install --no-deps $(pins 'p;n') &
others=$!
install --no-deps $(pins 'n;p')
wait $torch
wait $others
# Python compiles torch and transformers while pip checks the requirements and installs the package.
echo "setup: the package"
programs="import burst_portable.cli.run.train, torch._dynamo"
.venv/bin/python -c "$programs" >/dev/null 2>&1 &
compiled=$!
install --no-build-isolation --editable '.[cli,transformers,dev]'
wait $compiled || .venv/bin/python -c "$programs"  # again, with its error
echo "setup: done"
