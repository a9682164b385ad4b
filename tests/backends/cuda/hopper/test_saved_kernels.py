"""Test that a saved kernel is launched as a compiled one, without Triton, and that another one is never found."""

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from burst_portable import Mesh, attention
from burst_portable.backends.cuda.hopper import configs, kernel, launcher
from burst_portable.backends.cuda.hopper.compiled_kernels import CompiledKernels
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.backends.cuda.hopper.launcher import Launcher
from burst_portable.backends.cuda.hopper.saved_kernels import Metadata, file_of, find, save
from burst_portable.backends.cuda.hopper.support import triton_reason
from burst_portable.kernels.base import Kernel
from burst_portable.kernels.checked_kernel import CheckedKernel
from burst_portable.kernels.triton.arguments import pass_on, unfinished

if triton_reason():
    pytest.skip(triton_reason(), allow_module_level=True)

CODE = b"\x7fELF\n\0more lines\n"
FACTS = Metadata(4, 1000, 1, False, False, 0, 0, [{"block_size": [1, 64, 1, 64], "swizzle": 3}])
COMPILED = SimpleNamespace(name="row_terms_kernel", kernel=CODE, metadata=FACTS)
KEY = 0, torch.bfloat16, 128
ABOUT = {
    "name": "row_terms_kernel", "target": "sm_90", "key": KEY[1:], "constants": (64, 0.5), "options": {"num_warps": 4},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def test_find_returns_what_save_wrote(folder):
    file = file_of(folder, **ABOUT)
    assert find(file) is None
    save(file, COMPILED)
    assert find(file) == ("row_terms_kernel", FACTS, CODE)
    assert list(file.parent.iterdir()) == [file], "no partial file is left"


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b"{}\n", lambda b: b"[1]\n" + b])
def test_find_returns_none_for_a_damaged_file(folder, damage):
    file = file_of(folder, **ABOUT)
    save(file, COMPILED)
    file.write_bytes(damage(file.read_bytes()))
    assert find(file) is None


@pytest.mark.parametrize(
    "change",
    [
        {"name": "forward_kernel"},
        {"target": "sm_100"},
        {"key": (torch.float16, 128)},
        {"constants": (64, 1)},
        {"options": {"num_warps": 8}},
    ],
    ids=str,
)
def test_file_of_differs_for_another_kernel(folder, change):
    assert file_of(folder, **ABOUT) == file_of(folder, **ABOUT)
    assert file_of(folder, **{**ABOUT, **change}) != file_of(folder, **ABOUT)


def test_attention_passes_the_folder_to_its_kernel(monkeypatch):
    folders = []
    monkeypatch.setattr(Kernel, "save_compiled_in", lambda self, folder: folders.append(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", "here")
    q = torch.zeros(1, 4, 1, 8)
    attention(q, q, q, mesh=Mesh.single())
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    attention(q, q, q, mesh=Mesh.single())
    assert folders == [Path("here"), None]


def test_save_compiled_in_reaches_all_launchers(monkeypatch, folder):
    kernels = CompiledKernels()
    monkeypatch.setattr(kernel, "compiled_kernels", lambda: kernels)
    CheckedKernel(HopperKernel()).save_compiled_in(folder)
    launchers = [one for one in vars(kernels).values() if isinstance(one, Launcher)]
    assert [one.folder for one in launchers] == [folder] * 4


def test_save_leaves_a_read_only_folder(tmp_path):
    (tmp_path / "folder").write_text("a file, where a folder would be made")
    save(tmp_path / "folder" / "kernel", COMPILED)
    assert find(tmp_path / "folder" / "kernel") is None


class Driver:
    """Simulate the driver: the kernel has one pointer, and Triton's two."""

    def __init__(self):
        self.loaded, self.launches = [], []

    def load(self, kernel):
        self.loaded.append(kernel.kernel)
        return 77

    def parameters(self, function):
        return [(0, 8), (8, 8), (16, 8)]

    def launch(self, *launched):
        self.launches.append(launched[0])


@pytest.fixture
def driver(folder, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(launcher, "kernel_driver", lambda: driver)
    facts = FACTS._replace(tensordesc_meta=[])
    compiled = SimpleNamespace(name="row_terms_kernel", kernel=CODE, metadata=facts)
    monkeypatch.setattr(launcher, "compiled_kernel", lambda kernel, args, *_: None if args[0].is_meta else compiled)
    return driver


def launched(folder, load, device="cpu"):
    launcher = Launcher("row_terms_kernel", load)
    launcher.folder = folder
    args = (torch.zeros(1, device=device),)
    return [launcher(KEY, (2, 1, 1), args, (64,), {"num_warps": 4}, 0) for _ in range(2)]


def test_launcher_loads_a_saved_kernel_without_triton(driver, folder):
    launched(folder, lambda: "jitted")
    assert launched(folder, None), "a new launcher, whose load() would import Triton"
    assert driver.loaded == [CODE] * 2
    assert driver.launches == [(77, 2, 1, 1, 128, 1, 1, 1000)] * 4
    assert launched(folder, None, "meta") == [None, None], "nothing is compiled ahead"


def test_launcher_compiles_what_is_not_saved(driver, folder):
    loads = []
    launched(folder, lambda: loads.append("meta"), "meta")
    launched(folder, lambda: loads.append("real"))
    launched(None, lambda: loads.append("without a folder"))
    token = unfinished.set([])  # `compile_kernels` fills Triton's cache
    try:
        launched(folder, lambda: loads.append("to fill the cache"), "meta")
    finally:
        unfinished.reset(token)
    assert loads == ["meta", "real", "without a folder", "to fill the cache"]


@pytest.mark.parametrize("state", ["compiled", "failed", "cancelled"])
def test_only_compiled_kernels_are_saved_ahead(folder, state):
    compilation = Future()
    compilation.add_done_callback(partial(pass_on, partial(save, folder / "kernel")))
    if state == "cancelled":
        compilation.cancel()
    elif state == "failed":
        compilation.set_exception(RuntimeError("planted"))
    else:
        compilation.set_result(COMPILED)
    assert find(folder / "kernel") == (("row_terms_kernel", FACTS, CODE) if state == "compiled" else None)


def test_constants_are_those_of_the_kernels():
    from burst_portable.backends.cuda.hopper import forward, split_backward

    for module, names in ((forward, ("OUT_16", "OUT_32", "MERGE_32")), (split_backward, ("DQ", "DK", "DV"))):
        assert [getattr(configs, name) for name in names] == [getattr(module, name) for name in names]
