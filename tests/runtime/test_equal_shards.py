"""Test that attention raises if every rank has the full tensors, which it would take for shards."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import burst_portable as bp
from burst_portable.comm.local import run_transports
from burst_portable.conformance import oracle
from burst_portable.errors import InputError, MismatchError
from burst_portable.runtime import equal_shards
from burst_portable.runtime.equal_shards import UNKNOWN, values_checksum

TOKENS = 24
MASKS = {
    "causal": "causal",
    "full": "full",
    "window": "window:5",
    "documents": "documents:0,7,24",
}
SAME = "all ranks hold the same V, as if each had the full tensors"


def full_tensors(dtype: torch.dtype = torch.float32, batch: int = 2, tokens: int = TOKENS) -> list[torch.Tensor]:
    """Return q, k and v of a sequence: 4 query heads and 2 K/V heads."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 16), (2, 16), (2, 8))
    return [torch.randn(batch, tokens, *size, generator=generator).to(dtype) for size in sizes]


def error_of(mesh: bp.Mesh, *tensors: torch.Tensor, **options) -> str:
    """Return the `InputError` of a call with gradients; "" if it raises none."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    try:
        bp.attention(*leaves, mesh=mesh, **options).sum().backward()
    except InputError as error:
        return str(error)
    return ""


def results(mesh: bp.Mesh, mask: object) -> list[torch.Tensor]:
    """Return the unsharded output and gradients of a correct call, with dout of ones."""
    leaves = [bp.shard(x, mesh).requires_grad_() for x in full_tensors()]
    out = bp.attention(*leaves, mask=mask, mesh=mesh)
    out.sum().backward()
    return [bp.unshard(x, mesh, seq_len=TOKENS) for x in (out.detach(), *(x.grad for x in leaves))]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_full_tensors_raise_and_shards_equal_oracle(mask, ranks):
    """Every rank raises, all are in step afterwards, and the call with shards has the numbers of one device."""

    def work(mesh):
        errors = [error_of(mesh, *full_tensors(), mask=MASKS[mask]) for _ in range(2)]
        return errors, results(mesh, MASKS[mask]), mesh.transport("cpu").state.passes

    q, k, v = full_tensors()
    visible = oracle.dense_mask(bp.Mask.parse(MASKS[mask], TOKENS), TOKENS)
    exact = oracle.attention(q, k, v, torch.ones(2, TOKENS, 4, 8), visible, scale=0.25, dtype=torch.float64)
    for errors, found, passes in bp.run_threads(ranks, work):
        assert all(error.startswith(f"{SAME}; got V of shape (2, 24, 2, 8) on each of {ranks}") for error in errors)
        assert all(f"for a sequence of {ranks * TOKENS} tokens" in error for error in errors)
        for got, expected in zip(found, (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
        assert passes == 2 + 2 + 4, "two errors, both passes, and an unshard of four tensors"


@pytest.mark.parametrize(
    "strategy",
    ["ring", "burst", "double_ring", "all_gather", "distflash", "dispatch", "ulysses", "ring_self_attention"],
)
def test_full_tensors_raise_for_every_strategy(strategy):
    q, _, v = full_tensors()

    def work(mesh):
        return error_of(mesh, q, q, v.repeat_interleave(2, dim=2), strategy=strategy)

    assert all(error.startswith(SAME) for error in bp.run_threads(2, work))


@pytest.mark.parametrize(
    ("layout", "advice"),
    [
        ("zigzag", "pass shard(x, mesh) of each tensor"),
        ("striped", "pass shard(x, mesh, layout='striped') of each tensor"),
        ("dispatched", "pass shard(x, mesh, layout='dispatched', mask=mask) of each tensor"),
    ],
)
def test_error_shows_call_that_shards(layout, advice):
    for error in bp.run_threads(2, lambda mesh: error_of(mesh, *full_tensors(), layout=layout)):
        assert f"; {advice}; if ranks hold equal tokens on purpose, as in a benchmark, pass seq_len=48, or" in error


@pytest.mark.parametrize("options", [{"seq_len": 48}, {"layout": bp.make_layout("contiguous", 48, 2)}], ids=str)
def test_equal_shards_on_purpose_equal_repeated_sequence(options):
    """With seq_len or a Layout, ranks may hold equal tokens; the numbers are those of the repeated sequence."""
    options = {"layout": "contiguous", **options}
    q, k, v = full_tensors()

    def work(mesh):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = bp.attention(*leaves, mesh=mesh, **options)
        out.sum().backward()
        return out.detach(), *(x.grad for x in leaves)

    visible = oracle.dense_mask(bp.Mask.causal(), 48)
    twice = [torch.cat([x, x], dim=1) for x in (q, k, v)]
    exact = oracle.attention(*twice, torch.ones(2, 48, 4, 8), visible, scale=0.25, dtype=torch.float64)
    found = [torch.cat(parts, dim=1).double() for parts in zip(*bp.run_threads(2, work), strict=True)]
    for got, expected in zip(found, (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert (found[0][:, :24] - found[0][:, 24:]).abs().max() > 0.1, "the second half is not the full sequence again"


def test_equal_v_raises_although_k_has_positions():
    """Positions that follow the rank, for tokens that were not divided."""
    q, k, v = full_tensors()

    def work(mesh):
        turned = bp.nn.apply_rotary_embedding(k, torch.arange(TOKENS) + mesh.rank * TOKENS)
        return error_of(mesh, q, turned, v)

    assert all(error.startswith(SAME) for error in bp.run_threads(2, work))


def test_one_number_of_one_rank_is_a_difference():
    q, k, v = full_tensors()

    def work(mesh):
        other = v.clone()
        if mesh.rank == 3:
            other[1, 20, 1, 7] += 1e-3
        return error_of(mesh, q, k, other)

    assert bp.run_threads(4, work) == [""] * 4


def test_other_order_of_tokens_is_a_difference():
    q, k, v = full_tensors()
    assert bp.run_threads(2, lambda mesh: error_of(mesh, q, k, v.flip(1) if mesh.rank else v)) == ["", ""]


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        torch.ones_like,
        lambda x: torch.full_like(x, torch.nan),
        lambda x: x[:, :1].expand_as(x),  # one token for each row of the batch
    ],
    ids=["zeros", "ones", "nan", "one token"],
)
def test_tensors_of_one_token_may_be_equal(make):
    """Zeros and ones of a smoke test. If they change, full tensors raise."""
    q, k, v = full_tensors()

    def work(mesh):
        smoke = error_of(mesh, *(make(x) for x in (q, k, v)))
        return smoke, error_of(mesh, q, k, v)

    for smoke, after in bp.run_threads(2, work):
        assert smoke == ""
        assert after.startswith(SAME)


def test_one_token_per_rank_may_be_equal():
    x = torch.randn(1, 1, 2, 8)
    assert bp.run_threads(2, lambda mesh: error_of(mesh, x, x, x)) == ["", ""]


def test_one_rank_holds_the_full_tensors():
    assert bp.run_threads(1, lambda mesh: error_of(mesh, *full_tensors())) == [""]


def test_ragged_shards_differ():
    """23 tokens are 8, 8 and 7."""

    def work(mesh):
        return error_of(mesh, *(bp.shard(x, mesh) for x in full_tensors(tokens=23)), seq_len=23)

    assert bp.run_threads(3, work) == [""] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_full_tensors_of_every_dtype_raise(dtype):
    """The first of two batches, as a view whose heads and tokens are not contiguous."""

    def work(mesh):
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2)[:1] for x in full_tensors(dtype)]
        return error_of(mesh, *tensors), error_of(mesh, *(x[:, ::2] for x in full_tensors(dtype)))

    assert all(error.startswith(SAME) for errors in bp.run_threads(2, work) for error in errors)


def test_full_tensors_raise_under_autocast():
    """Ranks compare the numbers with which attention computes."""

    def work(mesh):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return error_of(mesh, *full_tensors())

    assert all(error.startswith(SAME) for error in bp.run_threads(2, work))


def test_full_tensors_raise_without_gradients():
    def work(mesh):
        with torch.inference_mode():
            try:
                bp.attention(*full_tensors(), mesh=mesh)
            except InputError as error:
                return str(error)
        return ""

    assert all(error.startswith(SAME) for error in bp.run_threads(2, work))


@pytest.fixture
def compared(monkeypatch) -> list[tuple[int, ...]]:
    """Record the shapes of V that were compared."""
    shapes, plain = [], equal_shards.values_checksum

    def recorded(v):
        shapes.append(tuple(v.shape))
        return plain(v)

    monkeypatch.setattr(equal_shards, "values_checksum", recorded)
    return shapes


@pytest.mark.parametrize("host", [True, False], ids=["host transport", "device transport"])
def test_ranks_compare_each_shape_once(compared, host):
    """A new mask, layout or strategy makes ranks compare facts, but not V: over devices, the host would wait."""

    def work(transport):
        transport.host = host
        mesh = bp.Mesh(transport.rank, 2, lambda _: transport)
        for tokens in (TOKENS, 2 * TOKENS):
            q, k, v = (bp.shard(x, mesh) for x in full_tensors(tokens=tokens))
            for mask in ("causal", "full", bp.Mask.documents((0, 5, tokens))):
                for strategy in ("ring", "burst"):
                    for _ in range(2):
                        bp.attention(*(x.requires_grad_() for x in (q, k, v)), mask=mask, mesh=mesh, strategy=strategy)

    run_transports(2, work)
    assert sorted(compared) == [(2, TOKENS // 2, 2, 8)] * 2 + [(2, TOKENS, 2, 8)] * 2


def test_device_transport_compares_only_new_calls(compared):
    """Zeros may be equal, so nothing is known of V of their shape; a repeated call must not wait for the device."""

    def work(transport):
        transport.host = False
        mesh = bp.Mesh(transport.rank, 2, lambda _: transport)
        for _ in range(3):
            bp.attention(*map(torch.zeros_like, full_tensors()), mesh=mesh)
        return error_of(mesh, *full_tensors()), error_of(mesh, *full_tensors(), mask="full")

    for known, new in run_transports(2, work):
        assert known == "", "the ranks exchange nothing in a known call"
        assert new.startswith(SAME)
    assert compared == [(2, TOKENS, 2, 8)] * 4


def test_device_transport_raises_for_each_repeated_call():
    """A call that raised is not known."""

    def work(transport):
        transport.host = False
        mesh = bp.Mesh(transport.rank, 2, lambda _: transport)
        return [error_of(mesh, *full_tensors()) for _ in range(3)]

    assert all(error.startswith(SAME) for errors in run_transports(2, work) for error in errors)


def test_seq_len_on_one_rank_allows_equal_shards(compared):
    """Ranks make the same exchanges, whether they pass seq_len or not; different facts come first."""
    q, k, v = full_tensors()

    def work(mesh):
        given = error_of(mesh, q, k, v, **({"seq_len": 72} if mesh.rank == 1 else {}))
        with pytest.raises(MismatchError, match="scale: "):
            bp.attention(q, k, v, mesh=mesh, scale=1.0 + mesh.rank)
        return given, error_of(mesh, q, k, v)

    for given, after in bp.run_threads(3, work):
        assert given == ""
        assert after.startswith(SAME)


def test_seq_len_computes_no_checksum(compared):
    bp.run_threads(2, lambda mesh: error_of(mesh, *full_tensors(), seq_len=48))
    assert compared == []


@pytest.mark.parametrize("host", [True, False], ids=["host transport", "device transport"])
def test_failed_checksum_raises_on_all_ranks(monkeypatch, host):
    """A device may have no memory for it. The other ranks must not wait for that rank."""
    plain, failed = equal_shards.values_checksum, []

    def failing(v):
        if threading.current_thread().name == "rank 1" and not failed:
            failed.append(v)
            raise MemoryError("planted")
        return plain(v)

    monkeypatch.setattr(equal_shards, "values_checksum", failing)

    def work(transport):
        transport.host = host
        mesh = bp.Mesh(transport.rank, 3, lambda _: transport)
        shards = [bp.shard(x, mesh) for x in full_tensors()]
        with pytest.raises((MemoryError, MismatchError)) as raised:
            bp.attention(*shards, mesh=mesh)
        out = bp.attention(*shards, mesh=mesh)
        return repr(raised.value), bp.unshard(out, mesh, seq_len=TOKENS)

    (first, out), (second, _), (third, _) = run_transports(3, work, timeout=5.0)
    assert second == "MemoryError('planted')"
    assert "rank 1 refused: MemoryError: planted" in first
    assert "rank 1 refused: MemoryError: planted" in third
    torch.testing.assert_close(out, bp.attention(*full_tensors(), mesh=bp.Mesh.single()))


def test_checksum_is_unknown_while_device_work_is_captured(monkeypatch):
    """Reading it would end the capture. A tensor without operators: nothing may be launched either."""
    module = SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert values_checksum(SimpleNamespace(shape=(1, 8, 2, 8), device=torch.device("cuda"))) == UNKNOWN


def test_checksum_is_hidden_from_modes():
    """A mode that counts or replaces operators must not see it."""
    seen = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    v = full_tensors()[2]
    with Watching():
        found = values_checksum(v)
    assert seen == []
    assert found == values_checksum(v) != UNKNOWN
