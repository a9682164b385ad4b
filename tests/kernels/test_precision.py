"""float32 is exact unless tf32 is asked for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from burst_portable.kernels.contract import Options
from burst_portable.kernels.triton import TritonKernel, launch
from burst_portable.tiles import Tile, Tiles


@pytest.mark.parametrize(("asked", "precision"), [({}, "ieee"), ({"float32_precision": "tf32"}, "tf32")])
def test_every_kernel_is_compiled_for_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], precision: str
) -> None:
    made: list[str] = []

    class Recording:
        programs = 0

        def __init__(self, *arguments: object, **options: object) -> None:
            constants = arguments[4]
            assert isinstance(constants, dict)
            made.append(constants["PRECISION"])

    monkeypatch.setattr(launch, "Launch", Recording)
    monkeypatch.setattr(launch, "architecture", lambda: "sm_90")
    x = torch.zeros(1, 32, 1, 16)
    kernel, tiles, options = TritonKernel(**asked), Tiles([Tile(0, 32, 0, 32, 0, 31)]), Options(0.25)
    _, lse = kernel.attend(x, x, x, tiles, options)
    lse = lse.float()
    kernel.only_keys(x, x, x, x, lse, lse, tiles, options, (x, x, x))
    kernel.only_queries(x, x, x, x, lse, lse, tiles, options, (x, x, x))
    assert made == [precision] * 3
