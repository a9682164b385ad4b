"""Test what the ascend backend reports of a machine: torch_npu missing, too old, for another torch or broken, or no
device.
"""

from __future__ import annotations

import sys

import pytest
import torch

from burst_portable.backends import selection
from burst_portable.errors import UnsupportedError

TORCH = torch.__version__.partition("+")[0]
NO_DEVICE = "class npu:\n    is_available = staticmethod(lambda: False)\n"
WRONG = {
    "absent": (None, "", "the package torch_npu is not installed", "install CANN"),
    "too old": ("2.1.0", "", "the package torch_npu is too old; got 2.1.0", "install CANN"),
    "another torch": ("99.0.1", "", f"built for another torch; got torch_npu 99.0.1, torch {TORCH}", "torch==99.0.*"),
    "broken": (
        TORCH,
        "raise ImportError('libhccl.so: cannot open')\n",
        "fails to import; got ImportError",
        "set_env.sh",
    ),
    "no device": (TORCH, NO_DEVICE, "torch_npu sees no NPU", "npu-smi"),
}


@pytest.mark.parametrize(("version", "source", "what", "then"), WRONG.values(), ids=list(WRONG))
def test_ascend_probe_names_fault_of_torch_npu(tmp_path, monkeypatch, version, source, what, then):
    if version is None and "torch_npu" in sys.modules:
        pytest.skip("torch_npu is installed here")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    if version is not None:
        (tmp_path / "torch_npu.py").write_text(source)
        info = tmp_path / f"torch_npu-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
    probe = selection.load("ascend").probe()
    sys.modules.pop("torch_npu", None)
    assert not probe.ok
    assert what in probe.reason
    assert then in probe.reason


def test_for_device_names_missing_torch_npu(monkeypatch):
    selection.for_device.cache_clear()
    if selection.load("ascend").probe().ok:
        pytest.skip("there are NPUs")
    with pytest.raises(UnsupportedError, match="ascend: the package torch_npu is not installed"):
        selection.for_device("npu")


def test_ascend_backend_import_loads_no_torch_npu():
    assert selection.load("ascend").name == "ascend"
    assert "torch_npu" not in sys.modules
