"""Test `burst-portable doctor`, also with broken backends, which are rows of its table."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from burst_portable.backends import selection
from burst_portable.backends.base import Probe
from burst_portable.cli import doctor, main


@pytest.fixture
def backends(tmp_path, monkeypatch):
    """Return a function that installs a package with a backend of this source."""

    def install(name: str, source: str) -> None:
        (tmp_path / f"{name}_backend.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{selection.GROUP}]\n{name} = {name}_backend:backend\n")

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for module in [name for name in sys.modules if name.endswith("_backend")]:
        del sys.modules[module]
    selection.load.cache_clear()


def examined(capsys) -> dict:
    assert main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_doctor_lists_versions_and_backend(capsys):
    facts = examined(capsys)
    assert facts["schema"] == "burst_portable.doctor/2"
    # the version of the installed package may lack the build suffix
    assert torch.__version__.startswith(facts["packages"]["torch"])
    cpu = facts["backends"]["cpu"]
    assert cpu["ok"]
    assert (cpu["device_type"], cpu["process_group"]) == ("cpu", "gloo")
    assert cpu["facts"]["cores"] >= 1


def test_doctor_lists_kernels_in_order_of_preference(capsys):
    kernels = examined(capsys)["backends"]["cpu"]["kernels"]
    assert [kernel["name"] for kernel in kernels] == ["cpu_flash", "reference"]
    assert kernels[0]["supports"]["float32"]["ok"]
    assert kernels[0]["supports"]["softcap"] == {"ok": False, "reason": "it has no softcap"}
    assert all(answer["ok"] for answer in kernels[1]["supports"].values())


def test_doctor_lists_every_backend(capsys):
    assert set(examined(capsys)["backends"]) == set(selection.known())


def test_doctor_tables_equal_json(capsys, monkeypatch):
    monkeypatch.setenv("BURST_TRANSPORT", "gloo")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "local kernel auto, transport gloo" in out
    assert torch.__version__ in out
    assert "kernels of cpu, preferred first" in out
    assert "cpu_flash, softcap: it has no softcap" in out


ABSENT = """
from dataclasses import replace
from burst_portable.backends.base import Backend, Probe
from burst_portable.backends.selection import load
class Absent(Backend):
    name = "theirs"
    capabilities = load("cpu").capabilities
    def probe(self):
        return Probe(False, "no such device here")
    def kernels(self):
        raise AssertionError("nobody asks a backend that cannot run")
backend = Absent()
"""


UNKNOWN_TYPE = """
from dataclasses import replace
from burst_portable.backends.base import Backend, Probe
from burst_portable.backends.selection import load
class Unknown(Backend):
    name = "theirs"
    capabilities = replace(load("cpu").capabilities, device_type="acme")
    def probe(self):
        return Probe(True)
    def kernels(self):
        raise AssertionError("no tensor can be on such a device")
backend = Unknown()
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (UNKNOWN_TYPE, "torch does not support the device type; got 'acme'; import the vendor's package"),
        (ABSENT, "no such device here"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("raise RuntimeError('the driver\\nis too old')", "RuntimeError: the driver is too old"),
        ("other = 1", "AttributeError"),
        ("def broken(", "SyntaxError"),
    ],
    ids=["device type", "absent", "import", "raises", "attribute", "syntax"],
)
def test_doctor_gives_reason_of_unavailable_backend(capsys, backends, source, reason):
    backends("theirs", source)
    facts = examined(capsys)
    theirs = facts["backends"]["theirs"]
    assert not theirs["ok"]
    assert reason in theirs["reason"]
    assert theirs["entry_point"] == "theirs_backend:backend"
    assert facts["backends"]["cpu"]["ok"]
    assert main(["doctor"]) == 0
    assert "theirs" in capsys.readouterr().out


def test_doctor_without_any_backend_returns_1(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "probed", lambda backend: Probe(ok=False, reason="it is ill"))
    assert main(["doctor"]) == 1
    assert "no: it is ill" in capsys.readouterr().out


def test_doctor_without_torch_gives_reason():
    source = (
        "import sys\nsys.modules.update(dict.fromkeys(('torch', 'triton', 'transformers')))\n"
        "from burst_portable.cli import main\nsys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "needs torch, which is absent" in " ".join(done.stdout.split())
    assert not done.stderr


def test_doctor_checks_hardware_spec_file(capsys, tmp_path, monkeypatch):
    assert examined(capsys)["hardware"] is None
    main(["doctor"])
    assert "BURST_HARDWARE_SPEC is not set" in capsys.readouterr().out
    path = tmp_path / "hardware.json"
    monkeypatch.setenv("BURST_HARDWARE_SPEC", str(path))
    found = examined(capsys)["hardware"]
    assert (found["ok"], found["file"]) == (False, str(path))
    assert "No such file" in found["reason"]
    main(["doctor"])
    assert "BURST_HARDWARE_SPEC cannot be used: " in capsys.readouterr().out
    about = {"device": "Abacus 9", "ranks": 4, "kernel": "beads", "date": "2026-11-22"}
    hardware = {"tflops": 1, "intra_node_bandwidth": 1}
    path.write_text(json.dumps({"schema": "burst_portable.hardware_spec/3", **about, "hardware": hardware}))
    assert examined(capsys)["hardware"] == {"file": str(path), "ok": True, "reason": "", **about}
    main(["doctor"])
    assert "measured on Abacus 9, 4 ranks, kernel beads, 2026-11-22" in " ".join(capsys.readouterr().out.split())


def test_doctor_warns_of_unknown_names_in_settings(capsys, monkeypatch):
    monkeypatch.setenv("BURST_KERNEL", "cpu_flahs")
    monkeypatch.setenv("BURST_TRANSPORT", "pigeon")
    kernel, transport = examined(capsys)["unknown_settings"]
    assert kernel.startswith("unknown name in BURST_KERNEL; got 'cpu_flahs'; allowed: auto, ")
    assert kernel.endswith("did you mean 'cpu_flash'?")
    assert transport.startswith("unknown name in BURST_TRANSPORT; got 'pigeon'; allowed: auto, ")
    main(["doctor"])
    assert "warning unknown name in BURST_KERNEL; got 'cpu_flahs'" in capsys.readouterr().out
    monkeypatch.setenv("BURST_KERNEL", "cpu_flash")
    monkeypatch.setenv("BURST_TRANSPORT", "gloo")
    assert examined(capsys)["unknown_settings"] == []
