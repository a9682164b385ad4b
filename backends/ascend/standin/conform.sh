#!/bin/sh
# Everything that can be shown of the ascend backend without an NPU; `make conform-ascend` is this:
#
#   sh backends/ascend/standin/conform.sh [--quick]
#
# Writes backends/ascend/evidence/standin.json (not with --quick) and docs/support.md made from it, and logs in
# report/ascend. Exit code 1 when something fails, 2 when it cannot run. ../README.md says what it shows, and what not.
set -eu
cd "$(dirname "$0")/../../.."
effort=${1:-}
folder=$PWD/build/ascend
logs=report/ascend
mkdir -p "$logs" backends/ascend/evidence
report=$logs/standin.json
[ -n "$effort" ] || report=backends/ascend/evidence/standin.json
failed=""
began=$(date +%s)

say() { echo "conform-ascend: $*"; }

sh backends/ascend/standin/environment.sh "$folder"
. "$folder/activate.sh"

step() { # step NAME COMMAND...: go on when it fails, and say so at the end
    what=$1
    shift
    say "$what: $*"
    started=$(date +%s)
    "$@" >"$logs/$what.log" 2>&1 || failed="$failed $what"
    grep -v -e '\[W[0-9]* ' -e '^Warning: torch.save' "$logs/$what.log" | tail -n 3
    say "$what took $(($(date +%s) - started)) s"
}

step schema python -m backends.ascend.standin.schema
step conform python -m burst_portable conform --backend ascend $effort --json "$report" --markdown "$logs/conform.md"
# Whether the suite would see a bug here: each of those that tests plant, planted in this backend.
[ -n "$effort" ] || step planted python -m pytest tests/conformance/test_suite_planted_bugs.py --backend ascend \
    -m "not device" --timeout 300 -p no:cacheprovider -q
for ranks in 2 4; do
    step "run-$ranks" python -m burst_portable run --backend ascend --model tiny --ranks "$ranks" --seq-len 512 --steps 2 \
        --check --report "$logs/run-$ranks"
done
step triton python -m backends.ascend.triton.check
[ -n "$effort" ] || python ci/make_support.py

if [ -n "$failed" ]; then
    say "FAILED:$failed (logs in $logs)" >&2
    exit 1
fi
say "passed in $(($(date +%s) - began)) s; this shows plumbing, and proves nothing about the numbers of a device"
