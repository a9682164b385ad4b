"""Test the simulated CANN without torch_npu: streams wait for events, and HCCL waits for its peer."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

STANDIN = Path(__file__).parents[2] / "backends" / "ascend" / "standin"
UINT8 = 7  # HcclDataType


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("standin_build", STANDIN / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cann(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    library = tmp_path_factory.mktemp("cann") / "libascendcl.so"
    sources = [str(STANDIN / "cann" / name) for name in build.SOURCES]
    subprocess.run(
        ["gcc", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", library, *sources, "-lpthread"], check=True
    )
    loaded = ctypes.CDLL(str(library))
    for name in ("aclrtMemcpyAsync", "HcclRecv", "HcclSend"):  # pointers are no ints
        getattr(loaded, name).restype = ctypes.c_int
    return loaded


def create(function: object, *arguments: object) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    assert function(ctypes.byref(handle), *arguments) == 0  # type: ignore[operator]
    return handle


def ready(cann: ctypes.CDLL, stream: ctypes.c_void_p) -> bool:
    status = ctypes.c_int(-1)
    assert cann.aclrtStreamQuery(stream, ctypes.byref(status)) == 0
    return status.value == 0


def test_standin_stream_waits_for_event_of_other_stream(
    cann: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy waits for an event behind a receive, so it starts after the peer has sent."""
    monkeypatch.setenv("STANDIN_FOLDER", str(tmp_path))
    info = ctypes.create_string_buffer(4108)
    assert cann.HcclGetRootInfo(info) == 0
    ranks = []
    for rank in range(2):
        handle = ctypes.c_void_p()
        assert cann.HcclCommInitRootInfo(2, info, rank, ctypes.byref(handle)) == 0
        ranks.append(handle)
    receiving, copying, sending = (create(cann.aclrtCreateStream) for _ in range(3))
    event = create(cann.aclrtCreateEventWithFlag, 0)
    came, copied, sent = (
        ctypes.create_string_buffer(6),
        ctypes.create_string_buffer(6),
        ctypes.create_string_buffer(b"hello"),
    )
    size = ctypes.c_uint64(6)
    assert cann.HcclRecv(came, size, UINT8, 1, ranks[0], receiving) == 0
    assert cann.aclrtRecordEvent(event, receiving) == 0
    assert cann.aclrtStreamWaitEvent(copying, event) == 0
    assert cann.aclrtMemcpyAsync(copied, size, came, size, 3, copying) == 0
    assert not ready(cann, copying)
    assert copied.value == b""
    assert cann.HcclSend(sent, size, UINT8, 0, ranks[1], sending) == 0
    assert cann.aclrtSynchronizeStream(copying) == 0
    assert copied.value == b"hello"
    assert cann.aclrtSynchronizeStream(receiving) == 0  # the event exists a moment before it is complete
    assert ready(cann, receiving)
    assert not list(tmp_path.iterdir()), "a message that was read is gone"


def test_standin_message_of_other_size_fails_stream(
    cann: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_FOLDER", str(tmp_path))
    info, one, other = ctypes.create_string_buffer(4108), ctypes.c_void_p(), ctypes.c_void_p()
    cann.HcclGetRootInfo(info)
    cann.HcclCommInitRootInfo(2, info, 0, ctypes.byref(one))
    cann.HcclCommInitRootInfo(2, info, 1, ctypes.byref(other))
    first, second = create(cann.aclrtCreateStream), create(cann.aclrtCreateStream)
    buffer = ctypes.create_string_buffer(8)
    assert cann.HcclSend(buffer, ctypes.c_uint64(8), UINT8, 1, one, first) == 0
    assert cann.HcclRecv(buffer, ctypes.c_uint64(4), UINT8, 0, other, second) == 0
    assert cann.aclrtSynchronizeStream(first) == 0
    assert cann.aclrtSynchronizeStream(second) != 0


def test_difference_lists_new_and_missing_symbols(build: ModuleType) -> None:
    listed = (STANDIN / "symbols.txt").read_text(encoding="utf-8").split()
    assert listed == sorted(set(listed))
    assert build.difference(listed, listed) == ""
    told = build.difference([*listed[1:], "aclrtBrandNew"], listed)
    assert told == f"new: aclrtBrandNew; gone: {listed[0]}"
