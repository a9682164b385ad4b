"""Test merged states, compensated sums, sinks, and copies that keep every bit."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable import numerics
from burst_portable.conformance.cases import LENGTH
from burst_portable.errors import DtypeError, InputError, ShapeError
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.planning.tiles import Tile, Tiles
from tests.support.calls import settings
from tests.support.local_kernels import inputs
from tests.support.thread_peers import World, run_peers


def parts(count: int, spread: float) -> tuple[list[numerics.State], numerics.State]:
    """Return float32 partial results over `count` sets of keys, and the float64 result over all keys."""
    scores = torch.randn(2, 3, 5, count, 16, dtype=torch.float64) * spread + 9.0
    values = torch.randn(2, 3, count, 16, 4, dtype=torch.float64)
    p = torch.softmax(scores.flatten(-2), -1)
    whole = torch.einsum("bhsc,bhcd->bshd", p, values.flatten(2, 3)), scores.flatten(-2).logsumexp(-1)
    made = []
    for i in range(count):
        part = torch.softmax(scores[..., i, :], -1)
        out = torch.einsum("bhsc,bhcd->bshd", part, values[:, :, i])
        made.append((out.float(), scores[..., i, :].logsumexp(-1)))
    return made, whole


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_compensated_merge_of_64_parts_is_accurate(spread: float) -> None:
    """The error is a few float32 roundings; the same merge in plain float32 fails the bound."""
    torch.manual_seed(0)
    made, (out, lse) = parts(64, spread)
    q = torch.empty(2, 5, 3, 4)
    state, plain = numerics.Compensated.empty(q, 4), (torch.zeros(2, 5, 3, 4), torch.full((2, 3, 5), -torch.inf))
    for part, wide in made:
        narrow = wide.float()
        state.merge(part, narrow, (wide - narrow.double()).float())
        numerics.merge_into(plain, part, narrow)
    assert float((state[0] - out).norm() / out.norm()) < 2e-7
    assert float((plain[0] - out).norm() / out.norm()) > 1e-6
    assert float((state[1] - lse).abs().max()) <= 2.0**-23 * float(lse.abs().max())


def test_compensated_merge_keeps_rows_without_keys() -> None:
    """Such rows stay 0 and -inf. Merging a part without keys is bitwise neutral."""
    q = torch.empty(1, 3, 2, 4)
    state = numerics.Compensated.empty(q, 4)
    assert not state[0].any()
    assert (state[1] == -torch.inf).all()
    made, _ = parts(1, 1.0)
    out, lse = made[0][0][:1, :3, :2], made[0][1].float()[:1, :2, :3].clone()
    lse[:, :, 1] = -torch.inf
    out[:, 1] = 0.0
    state.merge(out, lse)
    assert torch.equal(state[0], out)
    assert torch.equal(state[1], lse)
    state.merge(torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    assert torch.equal(state[0], out)
    assert torch.equal(state[1], lse)
    assert all(not x.isnan().any() for x in state.lost)


def test_compensated_merge_equals_merge_into() -> None:
    made, _ = parts(5, 3.0)
    narrow = numerics.Compensated.empty(torch.empty(2, 5, 3, 4), 4)
    wide = numerics.empty_state(torch.empty(2, 5, 3, 4), 4)
    for out, lse in made:
        narrow.merge(out, lse.float())
        numerics.merge_into(wide, out, lse.float())
    torch.testing.assert_close(narrow[0].double(), wide[0], rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(narrow[1].double(), wide[1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "dim", "first", "wide"),
    [(torch.bfloat16, 8, 0, True), (torch.bfloat16, 8, 2, False), (torch.bfloat16, 6, 0, False),
     (torch.float32, 6, 0, True), (torch.float32, 1, 0, False), (torch.float64, 1, 3, True)],
)  # fmt: skip
def test_copy_is_bitwise(dtype, dim, first, wide):
    """It copies 8-byte elements if rows are aligned; NaN bits and the gaps between rows stay."""
    memory = torch.randn(first + 2 * 3 * 4 * dim).to(dtype)
    memory[first] = torch.nan
    source = memory[first:].view(2, 3, 4, dim)
    room = torch.full((3, 2, 5, dim), 7.0, dtype=dtype)
    target = room.transpose(0, 1)[:, :, 1:]
    assert (numerics._is_wide(source), numerics._is_wide(target)) == (wide, wide or (first > 0))
    numerics.copy(source, target)
    assert torch.equal(room[:, :, 1:].transpose(0, 1).reshape(-1).view(torch.uint8), memory[first:].view(torch.uint8))
    assert (room[:, :, 0] == 7).all()


def test_copy_accepts_unaligned_memory():
    memory = bytearray(128)
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for odd in (0, 4):
        source = torch.frombuffer(memory, dtype=torch.float32, offset=-base % 8 + odd, count=24).view(3, 8)
        assert (numerics._is_wide(source), source.storage_offset()) == (not odd, 0)


def test_copy_converts_dtypes():
    target = torch.zeros(4, 8, dtype=torch.bfloat16)
    numerics.copy(torch.full((4, 8), 1.5), target)
    assert (target == 1.5).all()


@pytest.mark.parametrize("moves", ["direct", "ring"])
def test_rows_are_packed_once(moves, monkeypatch):
    """Some ranks of a causal zigzag need half a block, which is a slice of the same message."""
    copied = []
    real = numerics.copy
    monkeypatch.setattr(numerics, "copy", lambda source, target: (copied.append(source), real(source, target)))
    x = torch.randn(1, 64, 2, 8, generator=torch.Generator().manual_seed(0))
    right = bp.attention(x, x, x, mask="causal")
    strategy = bp.make_strategy("ring", transfer=moves, **({"prefetch_steps": 4} if moves == "direct" else {}))

    def work(mesh):
        mine = bp.shard(x, mesh, layout="zigzag")
        out = bp.attention(mine, mine, mine, mask="causal", mesh=mesh, strategy=strategy, layout="zigzag")
        return bp.unshard(out, mesh, layout="zigzag", seq_len=64)

    for found in run_peers(World(4), work):
        torch.testing.assert_close(found, right)
    assert len(copied) == 2 * 4, "K and V of each rank"


# -------------------------------------------------------------------------------------------------- numerics


def test_merging_empty_state_changes_nothing():
    q, k, v, _ = inputs(torch.float32)
    part = ReferenceKernel().attend(q, k, v, Tiles([Tile(0, LENGTH, 0, LENGTH, -99, 99)]), settings(0.3))
    nothing = numerics.empty_state(q, 8)
    for parts in ([part, nothing], [nothing, part], [nothing, part, nothing]):
        out, lse = numerics.merge_attention_states(parts)
        torch.testing.assert_close(out, part[0].to(out.dtype), rtol=0, atol=0)
        torch.testing.assert_close(lse, part[1].to(lse.dtype), rtol=0, atol=0)
    out, lse = numerics.merge_attention_states([nothing, nothing])
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("spread", [0.0, 50.0, 1e4, 1e30])
def test_merging_distant_scores_stays_finite(spread):
    a = (torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), spread))
    b = (torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), -spread))
    out, lse = numerics.merge_attention_states([a, b])
    assert out.item() == pytest.approx(2.0 if spread == 0 else 1.0)
    assert lse.isfinite().all()


def part(rows=5, heads=3, dtype=torch.float32):
    return torch.randn(2, rows, heads, 8).to(dtype), torch.randn(2, heads, rows)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], InputError, "at least one"),
        ([part()[0]], InputError, "pairs"),
        ([part(), part(rows=6)], ShapeError, "do not match"),
        ([part(), part(heads=1)], ShapeError, "do not match"),
        ([(part()[0], part(rows=1)[1])], ShapeError, "do not match"),
        ([part(), part(dtype=torch.bfloat16)], DtypeError, "bfloat16"),
        ([(part()[0].int(), part()[1])], DtypeError, "int32"),
    ],
)
def test_merge_attention_states_rejects_invalid_parts(parts, error, message):
    """torch would broadcast some of these shapes to a wrong result."""
    with pytest.raises(error, match=message):
        numerics.merge_attention_states(parts)


def test_merge_ignores_out_of_rows_without_keys():
    """Other libraries may leave any value there."""
    out, lse = part()
    blind = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for parts in ([blind, (out, lse)], [(out, lse), blind]):
        torch.testing.assert_close(numerics.merge_attention_states(parts), (out, lse))
    assert not numerics.merge_attention_states([blind, blind])[0].any()


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_surrogate_out_has_given_row_sums(size):
    """This holds even if the square of dO underflows or overflows."""
    dout = torch.randn(2, 5, 3, 8) * size
    dout[:, 2] = 0
    delta = torch.randn(2, 3, 5) * size
    delta[:, :, 2] = 0
    stand_in = numerics.surrogate_out(dout, delta)
    made = numerics.row_delta(dout.double() / size, stand_in)
    torch.testing.assert_close(made, delta.double() / size, rtol=1e-5, atol=1e-6)


def test_add_sinks_splits_weight():
    """A key with score 0 and a sink with logit 0 have equal weights."""
    state = (torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    numerics.add_sinks(state, torch.zeros(1))
    assert state[0].flatten().tolist() == [0.5, 0.5]
    assert state[1].item() == pytest.approx(0.6931472)


def test_negative_infinite_sink_leaves_row_without_keys_empty():
    """The row keeps out 0 and LSE -inf, and the sink gets no gradient."""
    out, lse = torch.zeros(1, 2, 1, 4), torch.tensor([[[-torch.inf, 1.0]]])
    out[:, 1] = 3.0
    before = out.clone(), lse.clone()
    sinks = torch.tensor([-torch.inf])
    numerics.add_sinks((out, lse), sinks)
    torch.testing.assert_close((out, lse), before, rtol=0, atol=0)
    assert numerics.sinks_gradient(sinks, lse, torch.tensor([[[0.0, 2.0]]])).tolist() == [0.0]
