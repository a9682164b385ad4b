"""Test the modules for custom models, and the example that trains a model with them."""

from __future__ import annotations

import copy
import pickle
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import burst_portable as bp
from burst_portable.errors import DtypeError, InputError, LayoutError, MismatchError, ShapeError, UnsupportedError
from burst_portable.gradients import all_reduce_gradients
from burst_portable.nn import SelfAttention, apply_rotary_embedding
from tests.support.fork_server import run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_own_model.py"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_self_attention_on_ranks_equals_one_rank(ranks, layout):
    length, dim = 23, 16
    x, dout = torch.randn(2, length, dim), torch.randn(2, length, dim)
    weights = SelfAttention(dim, 4, 2).state_dict()

    def work(mesh):
        module = SelfAttention(dim, 4, 2, mesh=mesh, layout=layout, mask="window:6")
        module.load_state_dict(weights)
        mine = bp.shard(x, mesh, layout=layout).requires_grad_()
        out = module(mine, seq_len=length)
        out.backward(bp.shard(dout, mesh, layout=layout))
        all_reduce_gradients(module.parameters(), mesh)

        def whole(t):
            return bp.unshard(t.detach(), mesh, seq_len=length, layout=layout)

        return [whole(out), whole(mine.grad), *(p.grad for p in module.parameters())]

    (alone,) = bp.run_threads(1, work)
    for found in bp.run_threads(ranks, work):
        for got, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("position_ids", [None, torch.arange(12)], ids=["of the layout", "of the full sequence"])
def test_self_attention_raises_for_full_tensors(position_ids):
    """Positions of the layout make K differ between ranks, but not V. The module must not pass seq_len itself."""
    x, weights = torch.randn(1, 12, 16), SelfAttention(16, 2).state_dict()

    def work(mesh):
        module = SelfAttention(16, 2, mesh=mesh)
        module.load_state_dict(weights)
        with pytest.raises(InputError, match=r"all ranks hold the same V.*pass seq_len=36"):
            module(x, position_ids=position_ids)
        return module(x, position_ids=position_ids, seq_len=36).shape

    assert bp.run_threads(3, work) == [x.shape] * 3


def test_apply_rotary_embedding_rotates_by_position():
    """At position p, the pair of frequency 1 is rotated by p radians."""
    x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    turned = apply_rotary_embedding(x, torch.tensor([0, 1, 5]))[0, :, 0]
    angles = torch.tensor([0.0, 1.0, 5.0])
    torch.testing.assert_close(turned, torch.stack((angles.cos(), angles.sin()), dim=-1))


def test_apply_rotary_embedding_equals_llama():
    from transformers.models.llama.modeling_llama import rotate_half

    x, where = torch.randn(1, 7, 2, 8), torch.arange(7) * 3
    frequency = 10000.0 ** (-torch.arange(4) / 4)
    angle = torch.cat((frequency, frequency)) * where[:, None]
    expected = x * angle.cos()[:, None] + rotate_half(x) * angle.sin()[:, None]
    torch.testing.assert_close(apply_rotary_embedding(x, where), expected)


def test_apply_rotary_embedding_keeps_float64_precision():
    x, where = torch.randn(1, 5, 2, 8, dtype=torch.float64), torch.arange(5) * 100_003
    angle = where[:, None].double() * 10000.0 ** (-torch.arange(4).double() / 4)
    turned = torch.polar(torch.ones_like(angle), angle)
    expected = torch.view_as_real(torch.complex(x[..., :4], x[..., 4:]) * turned[:, None])
    found = apply_rotary_embedding(x, where)
    torch.testing.assert_close(found, torch.cat(expected.unbind(-1), dim=-1), rtol=1e-9, atol=1e-9)


X = torch.zeros(2, 3, 1, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(1, 1, 1, 3), torch.zeros(1)), ShapeError, "even head size"),
        ((torch.zeros(1, 1, 1, 0), torch.zeros(1)), ShapeError, "even head size"),
        ((torch.zeros(3, 4), torch.zeros(3)), ShapeError, "head size"),
        (
            (X, torch.zeros(4)),
            ShapeError,
            r"different shapes; got \(4,\); allowed: \(3,\) or \(2, 3\)",
        ),
        ((X, torch.zeros(3, 3)), ShapeError, "position_ids and x have different shapes"),
        ((X.int(), torch.zeros(3)), DtypeError, "needs floating x"),
        ((X, torch.zeros(3, dtype=torch.bool)), DtypeError, "needs floating x"),
        ((X, [0, 1, 2]), ShapeError, "position_ids is not a tensor"),
        (("x", torch.zeros(3)), ShapeError, "x is not a tensor"),
        *(
            ((X, torch.zeros(3), theta), InputError, "theta")
            for theta in (0, -1.0, float("nan"), float("inf"), "1", True)
        ),
        ((X, torch.zeros(3), torch.tensor(1e4, requires_grad=True)), InputError, "requires a gradient, but gets none"),
    ],
)
def test_apply_rotary_embedding_rejects_invalid_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        apply_rotary_embedding(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 3}, "do not match"),
        ({"heads": 4, "kv_heads": 3}, "do not match"),
        ({"heads": 0}, "heads is not a size"),
        ({"heads": 4.0}, "heads is not a size"),
        ({"dim": "16"}, "dim is not a size"),
        ({"kv_heads": True}, "kv_heads is not a size"),
        ({"heads": 16}, "even head size; got 16 / 16 = 1"),
        ({"theta": 0}, "theta"),
        ({"theta": torch.nn.Parameter(torch.tensor(1e4))}, "requires a gradient, but gets none"),
        ({"mask": "causl"}, "did you mean 'causal'"),
        ({"mask": None}, "mask is not a mask"),
        ({"strategy": "rng"}, "did you mean 'ring'"),
        ({"strategy": None}, "unknown strategy"),
        ({"layout": "zag"}, "did you mean 'zigzag'"),
        ({"layout": ["zigzag"]}, "unknown layout"),
        ({"mesh": "all"}, "not a mesh"),
    ],
)
def test_self_attention_rejects_invalid_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        SelfAttention(**{"dim": 16, "heads": 4} | arguments)


def test_self_attention_rejects_invalid_inputs():
    module = SelfAttention(16, 16, theta=None)  # heads of size 1 have no pair to rotate
    assert module(torch.randn(1, 5, 16)).shape == (1, 5, 16)
    for wrong in (torch.randn(5, 16), torch.randn(1, 5, 8), [1.0]):
        with pytest.raises(ShapeError, match=r"x is not a tensor|x has the wrong shape"):
            module(wrong)


def test_self_attention_input_error_reaches_all_ranks():
    def work(mesh):
        module = SelfAttention(16, 4, mesh=mesh)
        x = torch.zeros(1, 5 if mesh.rank else 6, 16)
        error, message = (LayoutError, "5 rows; allowed: 6 of 12") if mesh.rank else (MismatchError, "rank 1 refused")
        with pytest.raises(error, match=message):
            module(x, seq_len=12)

    bp.run_threads(2, work, timeout=20)


def test_self_attention_torch_error_reaches_all_ranks():
    def work(mesh):
        module = SelfAttention(16, 4, mesh=mesh)
        x = torch.zeros(1, 6, 16, dtype=torch.float64 if mesh.rank else torch.float32)
        error, message = (RuntimeError, "dtype") if mesh.rank else (MismatchError, "rank 1 refused: RuntimeError")
        with pytest.raises(error, match=message):
            module(x)

    bp.run_threads(2, work, timeout=20)


def test_layout_gives_self_attention_the_sequence_length():
    def work(mesh):
        layout = bp.make_layout("contiguous", 11, 2)
        module = SelfAttention(16, 4, mesh=mesh, layout=layout)
        assert module(bp.shard(torch.randn(1, 11, 16), mesh, layout=layout)).shape[1] == (5 if mesh.rank else 6)

    bp.run_threads(2, work)


@pytest.mark.parametrize("mask", ["documents:0,5,12", "block_causal:4", bp.Mask.documents((0, 5, 12))], ids=str)
def test_self_attention_passes_mask_to_layout(mask):
    x = torch.randn(1, 12, 16)
    weights = SelfAttention(16, 4).state_dict()
    layout = "zigzag" if mask == "block_causal:4" else "document_zigzag"

    def work(mesh):
        module = SelfAttention(16, 4, mesh=mesh, mask=mask, layout=layout)
        module.load_state_dict(weights)
        whole = bp.Mask.parse(mask, 12) if isinstance(mask, str) else mask
        cut = {"layout": layout, "mask": whole}
        with torch.no_grad():
            return bp.unshard(module(bp.shard(x, mesh, **cut)), mesh, seq_len=12, **cut)

    (alone,), two = bp.run_threads(1, work), bp.run_threads(2, work)
    for found in two:
        torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("layout", ["document_zigzag", "striped"])
def test_self_attention_takes_cu_seqlens_of_each_batch(layout):
    """Checkpointing recomputes a batch after the module has run the next one."""
    x, batches = torch.randn(1, 23, 16), [(0, 5, 23), (0, 9, 14, 23)]
    module = SelfAttention(16, 4, 2, mesh=bp.Mesh.single())
    for ends in batches:  # each document separately
        sum(module(x[:, a:b]).square().sum() for a, b in pairwise(ends)).backward()
    weights, expected = module.state_dict(), [p.grad for p in module.parameters()]

    def work(mesh):
        mine = SelfAttention(16, 4, 2, mesh=mesh, layout=layout)
        mine.load_state_dict(weights)
        losses = []
        for ends in batches:
            batch = bp.shard_batch(torch.zeros(1, 23, dtype=torch.int64), cu_seqlens=ends, mesh=mesh, layout=layout)
            mask = bp.Mask.documents(ends)
            options = {"seq_len": 23, "position_ids": batch["position_ids"], "mask": mask}
            rows = bp.shard(x, mesh, layout=layout, mask=mask)
            losses.append(checkpoint(mine, rows, use_reentrant=False, **options).square().sum())
        for loss in losses:
            loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        return [p.grad for p in mine.parameters()]

    for found in bp.run_threads(2, work):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(InputError, match="mask"):
        module(x, mask=5)


def test_fsdp_mixed_precision_passes_masks_and_layouts_unchanged():
    """FSDP rebuilds dataclass arguments field by field; masks and layouts keep their identity."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.got = SelfAttention(16, 4, 2, mesh=bp.Mesh.single()), None

        def forward(self, x, mask, layout):
            self.got = mask, layout
            return self.attention(x, mask=mask)

    block, x, mask = Block(), torch.randn(1, 23, 16), bp.Mask.documents((0, 9, 23))
    layout = bp.plan(seq_len=23, ranks=2, heads=4, head_dim=4).layout
    expected = copy.deepcopy(block).bfloat16()(x.bfloat16(), mask, layout)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert torch.equal(sharded(x, mask, layout=layout), expected)
    finally:
        dist.destroy_process_group()
    assert block.got[0] is mask
    assert block.got[1] is layout


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("names", [("q", "kv"), ("q",), ("kv",)])
def test_self_attention_sharded_by_heads_raises(names: tuple[str, ...], ranks: int):
    """The first half of the rows of `kv` are those of K. As K and V of fewer heads, they have fitting shapes."""
    module = SelfAttention(16, 4, 4, mesh=bp.Mesh.single())
    x = torch.randn(1, 8, 16)
    expected = module(x)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        tensor = init_device_mesh("cpu", (ranks,))
        parallelize_module(module, tensor, {name: ColwiseParallel() for name in names})
        if ranks == 1:
            assert torch.equal(module(x), expected)
            return
        module.heads, module.kv_heads = (4 // ranks if name in names else 4 for name in ("q", "kv"))
        with pytest.raises(UnsupportedError, match=r"cannot shard the projections.*Shard\(dim=0\).*to attention\(\)"):
            module(x)
    finally:
        dist.destroy_process_group()


def test_copied_and_pickled_modules_compute_equally():
    def work(mesh):
        module = SelfAttention(16, 4, 2, mesh=mesh, mask="window:3")
        x = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(mesh.rank))
        before, copied = module(x), copy.deepcopy(module)
        torch.testing.assert_close(copied(x), before)
        assert copied.q.weight is not module.q.weight
        if mesh.size > 1:
            with pytest.raises(UnsupportedError, match="state_dict"):
                pickle.dumps(module)
        else:
            torch.testing.assert_close(pickle.loads(pickle.dumps(module))(x), before)

    for ranks in (1, 2):
        bp.run_threads(ranks, work)


def test_train_example_losses_match_on_one_and_three_ranks():
    train = runpy.run_path(str(EXAMPLE))["train"]
    alone, three = (bp.run_threads(ranks, lambda mesh: train(mesh, steps=3, seq_len=101))[0] for ranks in (1, 3))
    assert alone == pytest.approx(three, rel=1e-5)
    assert alone[-1] < alone[0]


@pytest.mark.parametrize(
    ("ranks", "told"), [("0", "ranks is not a size; got 0"), ("1025", "at most 1024"), ("two", "'two'")]
)
def test_example_prints_one_line_for_invalid_ranks(ranks, told, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [EXAMPLE.name, "--ranks", ranks])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_fsdp_example_losses_match_on_one_and_four_ranks():
    """Four ranks train on two sequences at a time; losses continue after the checkpoint."""

    def losses(ranks: int, *options: str) -> list[float]:
        done = run_program("tests.support.ranks_of", ranks, "examples.train_with_fsdp", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return [float(loss) for loss in done.stdout.split()[1:]]

    alone, pairs = losses(1), losses(4, "--sequence", "2")
    assert len(alone) == 4
    assert alone[-1] < alone[0] - 1
    assert pairs == pytest.approx(alone, rel=1e-5)
