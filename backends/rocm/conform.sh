#!/bin/sh
# Everything that shows whether the rocm backend may be trusted, on a machine with AMD GPUs:
#
#   sh backends/rocm/conform.sh [NAME]
#
# Writes backends/rocm/evidence/NAME.json (by default named after chip and count), docs/support.md made from it, and
# logs in report/rocm/NAME. PYTHON names the interpreter. Exit code 1 when something fails, 2 when nothing can run.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}

say() { echo "conform: $*"; }

look='from burst_portable.backends.registry import load; print(load("rocm").probe().reason)'
if ! reason=$("$python" -c "$look" 2>&1) || [ -n "$reason" ]; then
    say "$python: $(echo "$reason" | tail -n 1)" >&2
    exit 2
fi
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
chip=$("$python" -c 'import torch; print(torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0])')
name=${1:-$chip-x$gpus}
logs=report/rocm/$name
mkdir -p "$logs" backends/rocm/evidence
failed=""

step() { # step NAME COMMAND...: go on when it fails, and say so at the end
    what=$1
    shift
    say "$what: $*"
    "$@" >"$logs/$what.log" 2>&1 || failed="$failed $what"
    tail -n 3 "$logs/$what.log"
}

step doctor "$python" -m burst_portable doctor
step conform "$python" -m burst_portable conform --backend rocm --ranks 8 \
    --json "backends/rocm/evidence/$name.json" --markdown "$logs/conform.md" --junit "$logs/conform.xml"
step tests "$python" -m pytest -m device -p no:cacheprovider
if [ "$gpus" -ge 2 ]; then
    for dtype in float32 bfloat16; do
        step "run-$dtype" "$python" -m burst_portable run --backend rocm --model tiny --ranks "$gpus" --seq-len 8192 \
            --dtype "$dtype" --check --profile --report "$logs/run-$dtype"
    done
    step torchrun "$python" -m torch.distributed.run --nproc-per-node "$gpus" -m burst_portable run --backend rocm \
        --model tiny --seq-len 8192 --check
else
    say "one GPU: nothing between GPUs was tried"
fi
"$python" ci/make_support.py

if [ -n "$failed" ]; then
    say "FAILED:$failed (logs in $logs)" >&2
    exit 1
fi
say "passed; evidence in backends/rocm/evidence/$name.json, logs in $logs"
