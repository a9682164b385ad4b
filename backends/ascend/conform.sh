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

reason=$("$python" -c 'from burst_portable.backends.selection import load; print(load("ascend").probe().reason)')
if [ -n "$reason" ]; then
    echo "conform: $reason" >&2
    exit 2
fi
npus=$("$python" -c 'import torch, torch_npu; print(torch.npu.device_count())')
chip=$("$python" -c 'import torch, torch_npu; print(torch.npu.get_device_name(0).replace(" ", "-"))')
exec sh backends/conform.sh ascend "$npus" "${1:-$chip-x$npus}"
