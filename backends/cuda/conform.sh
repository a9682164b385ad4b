#!/bin/sh
# Everything that shows whether the cuda backend may be trusted, on a machine with NVIDIA GPUs:
#
#   sh backends/cuda/conform.sh [NAME]
#
# Writes backends/cuda/evidence/NAME.json (by default named after GPU and count), docs/support.md made from it, and logs
# in report/cuda/NAME. PYTHON names the interpreter. Exit code 1 when something fails, 2 when nothing can run.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}

look='from burst_portable.backends.selection import load; print(load("cuda").probe().reason)'
if ! reason=$("$python" -c "$look" 2>&1) || [ -n "$reason" ]; then
    echo "conform: $python: $(echo "$reason" | tail -n 1)" >&2
    exit 2
fi
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
kind=$("$python" -c 'import torch; print(torch.cuda.get_device_name(0).replace("NVIDIA ", "").replace(" ", "-"))')
exec sh backends/conform.sh cuda "$gpus" "${1:-$kind-x$gpus}" tests
