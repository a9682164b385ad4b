"""Modules for models of one's own, and the example that trains one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import burst_portable as bp
from burst_portable.errors import InputError, ShapeError
from burst_portable.integrations.gradients import sum_gradients
from burst_portable.nn import SelfAttention, rotate

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_own_model.py"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_module_on_several_ranks_is_the_module_on_one(ranks, layout):
    length, dim = 23, 16
    x, dout = torch.randn(2, length, dim), torch.randn(2, length, dim)
    weights = SelfAttention(dim, 4, 2).state_dict()

    def work(mesh):
        module = SelfAttention(dim, 4, 2, mesh=mesh, layout=layout, mask="window:6")
        module.load_state_dict(weights)
        mine = bp.shard(x, mesh, layout=layout).requires_grad_()
        out = module(mine, seq_len=length)
        out.backward(bp.shard(dout, mesh, layout=layout))
        sum_gradients(module.parameters(), mesh)

        def whole(t):
            return bp.unshard(t.detach(), mesh, seq_len=length, layout=layout)

        return [whole(out), whole(mine.grad), *(p.grad for p in module.parameters())]

    (alone,) = bp.run_local(1, work)
    for found in bp.run_local(ranks, work):
        for got, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def test_rotary_positions_by_hand():
    """At position p, the pair (first, second) of frequency 1 turns by p radians."""
    x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    turned = rotate(x, torch.tensor([0, 1, 5]))[0, :, 0]
    angles = torch.tensor([0.0, 1.0, 5.0])
    torch.testing.assert_close(turned, torch.stack((angles.cos(), angles.sin()), dim=-1))


def test_rotary_positions_are_llama_s():
    from transformers.models.llama.modeling_llama import rotate_half

    x, where = torch.randn(1, 7, 2, 8), torch.arange(7) * 3
    frequency = 10000.0 ** (-torch.arange(4) / 4)
    angle = torch.cat((frequency, frequency)) * where[:, None]
    expected = x * angle.cos()[:, None] + rotate_half(x) * angle.sin()[:, None]
    torch.testing.assert_close(rotate(x, where), expected)


def test_heads_that_do_not_go_together():
    with pytest.raises(InputError, match="do not go together"):
        SelfAttention(16, 3)
    with pytest.raises(InputError, match="do not go together"):
        SelfAttention(16, 4, 3)
    with pytest.raises(ShapeError, match="even"):
        rotate(torch.zeros(1, 1, 1, 3), torch.zeros(1))


def test_the_example_gives_the_same_losses_on_any_number_of_ranks():
    train = runpy.run_path(str(EXAMPLE))["train"]
    alone, three = (bp.run_local(ranks, lambda mesh: train(mesh, steps=3, seq_len=101))[0] for ranks in (1, 3))
    assert alone == pytest.approx(three, rel=1e-5)
    assert alone[-1] < alone[0]
