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

look='from burst_portable.backends.selection import load; print(load("rocm").probe().reason)'
if ! reason=$("$python" -c "$look" 2>&1) || [ -n "$reason" ]; then
    echo "conform: $python: $(echo "$reason" | tail -n 1)" >&2
    exit 2
fi
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
chip=$("$python" -c 'import torch; print(torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0])')
exec sh backends/conform.sh rocm "$gpus" "${1:-$chip-x$gpus}" tests
