#!/bin/sh
# What the vendors' scripts run when they have found their devices:
#
#   sh backends/conform.sh BACKEND DEVICES NAME [tests]
#
# "tests" adds those that are marked "device", which are written for GPUs.
# Writes backends/BACKEND/evidence/NAME.json, docs/support.md made from it, and logs in report/BACKEND/NAME. PYTHON names
# the interpreter. Exit code 1 when something fails.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
backend=$1
devices=$2
name=$3
logs=report/$backend/$name
evidence=backends/$backend/evidence
mkdir -p "$logs" "$evidence"
failed=""

say() { echo "conform: $*"; }

step() { # step NAME COMMAND...: go on when it fails, and say so at the end
    what=$1
    shift
    say "$what: $*"
    "$@" >"$logs/$what.log" 2>&1 || failed="$failed $what"
    tail -n 3 "$logs/$what.log"
}

step doctor "$python" -m burst_portable doctor
# Kernels are compiled first: on every core, and few enough for a device's memory.
cores=$(nproc 2>/dev/null || echo 1)
step conform "$python" -m burst_portable conform --backend "$backend" --ranks 8 --processes $((cores < 32 ? cores : 32)) \
    --json "$evidence/$name.json" --markdown "$logs/conform.md" --junit "$logs/conform.xml"
# Whether the suite would see a bug here: each of those that tests plant, planted in this backend.
step planted "$python" -m pytest tests/conformance/test_suite_planted_bugs.py --backend "$backend" -m "not device" \
    --timeout 600 -p no:cacheprovider -q
[ "${4:-}" != tests ] || step tests "$python" -m pytest -m device -p no:cacheprovider -q
if [ "$devices" -ge 2 ]; then
    for dtype in float32 bfloat16; do
        step "run-$dtype" "$python" -m burst_portable run --backend "$backend" --model tiny --ranks "$devices" \
            --seq-len 8192 --dtype "$dtype" --check --profile --report "$logs/run-$dtype"
    done
    step torchrun "$python" -m torch.distributed.run --nproc-per-node "$devices" -m burst_portable run \
        --backend "$backend" --model tiny --seq-len 8192 --check
else
    say "one device: nothing between devices was tried"
fi
"$python" ci/make_support.py

if [ -n "$failed" ]; then
    say "FAILED:$failed (logs in $logs)" >&2
    exit 1
fi
say "passed; evidence in $evidence/$name.json, logs in $logs"
