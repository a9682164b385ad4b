"""Test that the error of a kernel that does not compile names target and configuration; other errors are passed on."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CalledProcessError

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from burst_portable.backends.cuda.hopper.launcher import Launcher
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.triton.prepared import Launch
from tests.support.calls import settings

FAILURES = [
    OutOfResources(300000, 232448, "shared memory"),
    RuntimeError("PassManager::run failed"),
    CalledProcessError(1, ["bishengir-compile"]),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    FileNotFoundError(2, "No such file or directory", "ptxas"),
]


class Refusing:
    """Simulate a jitted function whose compilation raises the given error."""

    __name__ = "attend_kernel"
    arg_names = ("R",)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def warmup(self, *arguments: object, **options: object) -> None:
        raise self._error

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.warmup


def portable(error: Exception) -> None:
    Launch(Refusing(error), 1, None, (64,), {"R": 96, "num_warps": 8}, "sm_90, torch.bfloat16")()


def hopper(error: Exception) -> None:
    Launcher("attend_kernel", lambda: Refusing(error))(
        (0, torch.bfloat16, 128), (1, 1, 1), (), (96,), {"num_warps": 8}, 0
    )


def ascend(error: Exception) -> None:
    from burst_portable.backends.ascend.triton_launch import AscendTritonKernel, Cut

    q = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    AscendTritonKernel()._run(Refusing(error), (), 1, 1, q, q, q, Cut(96, 64), settings(1.0))


CALLS = {"sm_90, torch.bfloat16": portable, "sm_90": hopper, "npu, torch.bfloat16": ascend}


@pytest.mark.parametrize("target", CALLS)
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_compile_error_names_target_and_configuration(target: str, error: Exception) -> None:
    with pytest.raises(UnsupportedError, match="the Triton kernel attend_kernel does not compile for") as caught:
        CALLS[target](error)
    for part in (f"for {target};", "96", str(error), "; "):
        assert part in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("call", CALLS.values())
def test_device_error_is_not_a_compile_error(call: Callable[[Exception], None]) -> None:
    with pytest.raises(RuntimeError, match="illegal address"):
        call(RuntimeError("CUDA error: an illegal address was met"))
