"""Test the dtypes of gradients whose launches accumulate or write them. Nothing is launched."""

import torch

from burst_portable.backends.cuda.hopper import kernel
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.kernels.base import BackwardInputs
from burst_portable.planning.tiles import Tiles, make_tile
from tests.support.calls import settings

DIM = 256  # heads that have a launch for each gradient
CAUSAL = Tiles([make_tile(0, 128, 0, 128, 0, 128)])


def test_accumulated_gradients_of_few_heads_are_rounded_once(monkeypatch):
    """With few heads of K and V, each query head adds to dK and dV in float32. dQ is written in 16 bits."""
    sums = []

    def run(launches, x, call, into, *, stores):
        assert stores == (True, False, False)
        assert [one.dtype for one in into] == [torch.bfloat16, torch.float32, torch.float32]
        assert not any(one.any() for one in into[1:]), "sums must begin at 0"
        sums.extend(part.normal_().clone() for part in into)

    monkeypatch.setattr(kernel, "run_split_launches", run)
    q, k = (torch.zeros(1, 128, heads, DIM, dtype=torch.bfloat16) for heads in (8, 1))
    x = BackwardInputs(q, q, k, k, torch.zeros(1, 8, 128), q)
    made = HopperKernel().backward_single_call(x, CAUSAL, settings(deterministic=False))
    assert [one.dtype for one in made] == [torch.bfloat16] * 3
    assert all(torch.equal(one, exact.bfloat16()) for one, exact in zip(made, sums, strict=True))


def test_deterministic_gradients_of_few_heads_are_written_once(monkeypatch):
    found = []
    monkeypatch.setattr(kernel, "run_split_launches", lambda *_, stores: found.append(stores))
    q, k = (torch.zeros(1, 128, heads, DIM, dtype=torch.bfloat16) for heads in (8, 1))
    x = BackwardInputs(q, q, k, k, torch.zeros(1, 8, 128), q)
    HopperKernel().backward_single_call(x, CAUSAL, settings(deterministic=True))
    assert found == [(True, True, True)]
