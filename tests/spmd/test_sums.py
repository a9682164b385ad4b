"""Sums over ranks that do not sum the same: every rank raises, and its gradients are what they were."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

import burst_portable as bp
from burst_portable.errors import BurstError, MismatchError


def parameters(*sizes: int) -> list[Parameter]:
    """Parameters of so many ones, each with a gradient of ones but the last, which has none."""
    made = [Parameter(torch.ones(size)) for size in sizes]
    for one in made[:-1]:
        one.grad = torch.ones_like(one)
    return made


def frozen(*sizes: int) -> list[Parameter]:
    made = parameters(*sizes)
    return [made[0].requires_grad_(False), *made[1:]]


def sparse() -> list[Parameter]:
    made = parameters(5, 7, 2)
    made[0].grad = torch.ones(5).to_sparse()
    return made


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (
            lambda: parameters(5, 2),
            "parameters: 3 tensors of 14 numbers on rank 0, 2 but 2 tensors of 7 numbers on rank 1",
        ),
        (lambda: parameters(7, 5, 2), "3 tensors of 14 numbers on rank 0, 2 but another of that name on rank 1"),
        (lambda: frozen(5, 7, 2), "3 tensors of 14 numbers on rank 0, 2 but 2 tensors of 9 numbers on rank 1"),
        (lambda: parameters(5, 7, 2)[0], "these are not parameters; got Parameter"),
        (sparse, "sparse gradients are not summed"),
    ],
)
def test_ranks_with_other_parameters(odd: Callable[[], list[Parameter]], told: str):
    def work(mesh: bp.Mesh) -> str:
        bp.sum_over_ranks(torch.ones(3), mesh)  # so that one that refuses has somebody to tell
        mine = odd() if mesh.rank == 1 else parameters(5, 7, 2)
        try:
            bp.sum_gradients(mine, mesh)
        except BurstError as error:
            if mesh.rank != 1:
                assert [None if one.grad is None else one.grad.tolist() for one in mine] == [[1] * 5, [1] * 7, None]
            after = parameters(4, 1)
            bp.sum_gradients(after, mesh)
            assert after[0].grad.tolist() == [3.0] * 4
            return str(error)
        return ""

    for message in bp.run_local(3, work):
        assert told in message


@pytest.mark.parametrize("which", [0, 1, 2], ids=["float32", "frozen", "turned bfloat16"])
def test_ranks_whose_parameters_hold_other_values(which: int):
    """One bit of one number is enough; gradients are then as they were. It is asked the first time alone."""

    def work(mesh: bp.Mesh) -> str:
        mine = [Parameter(torch.arange(6.0)), Parameter(torch.ones(4), requires_grad=False)]
        mine.append(Parameter(torch.arange(6.0).view(2, 3).T.bfloat16()))
        for one in (mine[0], mine[2]):
            one.grad = torch.ones_like(one)
        other = mine[which]
        assert not mine[2].is_contiguous()
        bits = torch.int16 if other.dtype == torch.bfloat16 else torch.int32
        change = torch.zeros_like(other.data, dtype=bits)
        change[1] = mesh.rank == 2
        other.data = (other.data.view(bits) + change).view(other.dtype)
        with pytest.raises(MismatchError) as caught:
            bp.sum_gradients(mine, mesh)
        assert mine[0].grad.tolist() == [1] * 6
        other.data = (other.data.view(bits) - change).view(other.dtype)
        for _ in range(2):
            bp.sum_gradients(mine, mesh)
            mine[0].data += mesh.rank
        assert mine[0].grad.tolist() == [9] * 6
        return str(caught.value)

    for message in bp.run_local(3, work):
        assert re.search(r"values of the parameters: checksum \w{8} on rank 0, 1 but checksum \w{8} on rank 2", message)
        assert "seed ranks alike" in message


def test_a_rank_that_sums_where_others_attend():
    def work(mesh: bp.Mesh) -> str:
        x = torch.ones(1, 4, 2, 8)
        try:
            bp.sum_over_ranks(x, mesh) if mesh.rank == 1 else bp.attention(x, x, x, mesh=mesh)
        except BurstError as error:
            return str(error)
        return ""

    for message in bp.run_local(2, work):
        assert "pass: forward on rank 0 but sum_over_ranks on rank 1" in message
