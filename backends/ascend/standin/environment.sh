#!/bin/sh
# Makes an environment of its own in which the real torch_npu runs on a stand-in for CANN:
#
#   sh backends/ascend/standin/environment.sh [FOLDER]      (build/ascend unless given)
#   . FOLDER/activate.sh                                    then `python -c 'import torch; print(torch.npu.device_count())'`
#
# Its own, because torch_npu without CANN makes every `import torch` fail, and triton-ascend installs itself as `triton`.
# PYTHON names the interpreter. Which torch pip takes is pip's business, as in ci/setup.sh.
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
folder=${1:-$root/build/ascend}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

refuse() {
    echo "environment: $1" >&2
    exit 2
}

command -v gcc >/dev/null || refuse "the stand-in for CANN is built from C, and gcc is missing (Debian: apt install gcc)"
[ "$(uname -s)" = Linux ] || refuse "torch_npu has wheels for Linux alone"

fits() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        fits "$name" && echo "$name" && return
    done
}

packages="numpy typer rich jinja2 transformers safetensors pytest pytest-timeout hypothesis"
pins=$folder/pins.txt
grep -v -e '^triton==' "$root/constraints.txt" >"$pins"
cat "$root/backends/ascend/standin/requirements.txt" >>"$pins"
echo "# $packages" >>"$pins" # another list installs anew
stamp=$folder/.installed
if ! cmp -s "$pins" "$stamp"; then
    python=$(find_python)
    [ -n "$python" ] || refuse "found no Python 3.11, 3.12 or 3.13 with venv (PYTHON=/path/to/python3.11 names one)"
    echo "environment: $("$python" --version), torch, torch_npu and triton-ascend in $folder (once; takes some minutes)"
    "$python" -m venv --clear "$folder/venv"
    install() { "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$pins" "$@"; }
    install "$(sed -n '/^torch==/p' "$pins")" # alone and exactly: see ci/setup.sh
    install --requirement "$root/backends/ascend/standin/requirements.txt"
    install $packages
    cp "$pins" "$stamp"
fi

# torch loads what is registered under torch.backends: torch_npu, and then the operators that stand in for CANN's.
packages=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
info=$packages/cann_standin-1.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: cann-standin\nVersion: 1\n' >"$info/METADATA"
printf '[torch.backends]\ncann_standin = standin.kernels:install\n' >"$info/entry_points.txt"
printf '%s\n%s\n' "$root" "$root/backends/ascend" >"$packages/cann_standin.pth"

TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$folder/venv/bin/python" "$root/backends/ascend/standin/build.py" "$folder/cann"
cat >"$folder/activate.sh" <<END
. "$folder/cann/set_env.sh"
export PATH="$folder/venv/bin:\$PATH"
export OMP_NUM_THREADS=1       # ranks are processes and threads: more below them fight over the cores
export TORCH_NPU_DISABLED_WARNING=1
END
