#!/bin/sh
# Everything that shows whether the cpu backend may be trusted, on any machine; some ten minutes on two cores:
#
#   sh backends/cpu/conform.sh
#
# Writes backends/cpu/evidence/device.json and reference.json, docs/support.md made from them, and logs in report/cpu.
# PYTHON names the interpreter (.venv/bin/python unless given). Exit code 1 when something fails.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
logs=report/cpu
evidence=backends/cpu/evidence
mkdir -p "$logs" "$evidence"
failed=""

step() { # step NAME COMMAND...: go on when it fails, and say so at the end
    what=$1
    shift
    echo "conform: $what: $*"
    "$@" >"$logs/$what.log" 2>&1 || failed="$failed $what"
    tail -n 3 "$logs/$what.log"
}

step device "$python" -m burst_portable conform --backend cpu --json "$evidence/device.json"
step reference "$python" -m burst_portable conform --backend cpu --kernel reference --evidence-level reference \
    --json "$evidence/reference.json"
step planted "$python" -m pytest tests/conformance/test_suite_planted_bugs.py -m "not device" -p no:cacheprovider -q
step run "$python" -m burst_portable run --backend cpu --model tiny --ranks 2 --seq-len 2048 --steps 3 --check
"$python" ci/make_support.py

if [ -n "$failed" ]; then
    echo "conform: FAILED:$failed (logs in $logs)" >&2
    exit 1
fi
echo "conform: passed; evidence in $evidence, logs in $logs"
