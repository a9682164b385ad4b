#!/bin/sh
# Everything that shows whether the ascend backend may be trusted, on a machine with NPUs (without: make conform-ascend):
#
#   sh backends/ascend/conform.sh [NAME]
#
# Writes backends/ascend/evidence/NAME.json (by default named after chip and count), docs/support.md made from it, and
# logs in report/ascend/NAME. PYTHON names the interpreter. Exit code 1 when something fails, 2 when nothing can run.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
for cann in /usr/local/Ascend/ascend-toolkit/set_env.sh "$HOME/Ascend/ascend-toolkit/set_env.sh"; do
    if [ -z "${ASCEND_HOME_PATH:-}" ] && [ -f "$cann" ]; then
        set +eu # CANN's own script
        . "$cann"
        set -eu
    fi
done

say() { echo "conform: $*"; }

reason=$("$python" -c 'from burst_portable.backends.registry import load; print(load("ascend").probe().reason)')
if [ -n "$reason" ]; then
    say "$reason" >&2
    exit 2
fi
npus=$("$python" -c 'import torch, torch_npu; print(torch.npu.device_count())')
chip=$("$python" -c 'import torch, torch_npu; print(torch.npu.get_device_name(0).replace(" ", "-"))')
name=${1:-$chip-x$npus}
logs=report/ascend/$name
mkdir -p "$logs" backends/ascend/evidence
failed=""

step() { # step NAME COMMAND...: go on when it fails, and say so at the end
    what=$1
    shift
    say "$what: $*"
    "$@" >"$logs/$what.log" 2>&1 || failed="$failed $what"
    tail -n 3 "$logs/$what.log"
}

step doctor "$python" -m burst_portable doctor
step conform "$python" -m burst_portable conform --backend ascend --ranks 8 \
    --json "backends/ascend/evidence/$name.json" --markdown "$logs/conform.md" --junit "$logs/conform.xml"
if [ "$npus" -ge 2 ]; then
    for dtype in float32 bfloat16; do
        step "run-$dtype" "$python" -m burst_portable run --backend ascend --model tiny --ranks "$npus" --seq-len 8192 \
            --dtype "$dtype" --check --profile --report "$logs/run-$dtype"
    done
    step torchrun "$python" -m torch.distributed.run --nproc-per-node "$npus" -m burst_portable run --backend ascend \
        --model tiny --seq-len 8192 --check
else
    say "one NPU: nothing between NPUs was tried"
fi
"$python" ci/make_support.py

if [ -n "$failed" ]; then
    say "FAILED:$failed (logs in $logs)" >&2
    exit 1
fi
say "passed; evidence in backends/ascend/evidence/$name.json, logs in $logs"
