"""Test that a kernel which returns something wrong is named, instead of giving wrong numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

import burst_portable as bp
from burst_portable.errors import BackendUnavailableError, ShapeError, StrategyError
from burst_portable.kernels.base import BackwardInputs, WrappedKernel
from burst_portable.kernels.checked_kernel import CheckedKernel
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import PassPlan, Plan
from burst_portable.planning.routes import DirectRoute
from burst_portable.planning.tiles import Tile, Tiles, make_tile
from burst_portable.strategies.base import Strategy
from tests.support.seams import calls_with

ROWS = 13
TILES = Tiles((make_tile(0, ROWS, 0, ROWS, 0, ROWS),))


def inputs(dtype=torch.bfloat16):
    return [torch.randn(2, ROWS, heads, dim, dtype=dtype) for heads, dim in ((4, 8), (2, 8), (2, 5))]


def run_all(kernel):
    """Call every method of a kernel that computes."""
    q, k, v = inputs()
    call = AttentionCall.of(q, k, v, scale=0.3)
    out, lse = kernel.forward_single_call(q, k, v, TILES, call)
    out, lse = kernel.attend(q, k, v, TILES, call, state=kernel.attend(q, k, v, TILES, call))
    dout, lse = torch.randn_like(out).bfloat16(), lse.float()
    delta = kernel.row_delta(dout, out)
    into = tuple(torch.zeros(x.shape) for x in (q, k, v))
    kernel.attend_backward(BackwardInputs(dout, q, k, v, lse, delta=delta), TILES, call, into=into)
    kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out=out), TILES, call)


class Changed(WrappedKernel):
    """Change what one method returns."""

    def __init__(self, method, change):
        super().__init__(ReferenceKernel())
        original = getattr(self, method)
        setattr(self, method, lambda *args, **options: change(original(*args, **options)))


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        ("attend", lambda s: None, "attend returned None; allowed: a pair (out, lse)"),
        ("attend", lambda s: s[0], "attend returned no result; got Tensor of shape (2, 13, 4, 5)"),
        ("attend", lambda s: (s[0], None), "attend returned an invalid lse; got None"),
        ("attend", lambda s: (s[0][:, :-1], s[1]), "out of a wrong shape; got (2, 12, 4, 5); allowed: (2, 13, 4, 5)"),
        ("attend", lambda s: (s[0], s[1].mT), "lse of a wrong shape; got (2, 13, 4); allowed: (2, 4, 13)"),
        ("attend", lambda s: (s[0].bfloat16(), s[1]), "attend returned out of a wrong dtype; got torch.bfloat16"),
        ("attend", lambda s: (s[0], s[1].bfloat16()), "lse of a wrong dtype; got torch.bfloat16; allowed: torch.float"),
        ("attend", lambda s: (s[0].to("meta"), s[1]), "out on a wrong device; got meta; allowed: cpu"),
        ("forward_single_call", lambda s: None, "forward_single_call returned None"),
        ("forward_single_call", lambda s: (s[0].half(), s[1]), "got torch.float16; allowed: torch.bfloat16 or"),
        ("row_delta", lambda x: x.mT, "row_delta returned delta of a wrong shape; got (2, 13, 4)"),
        ("attend_backward", lambda _: (1, 2, 3), "attend_backward returned a result; got (1, 2, 3); allowed: None"),
        ("backward_single_call", lambda g: g[:2], "backward_single_call returned no gradients"),
        ("backward_single_call", lambda g: (g[0], g[2], g[1]), "dk of a wrong shape; got (2, 13, 2, 5)"),
        ("backward_single_call", lambda g: (g[0].half(), *g[1:]), "dq of a wrong dtype; got torch.float16"),
    ],
)
def test_wrong_result_is_named(method, change, says):
    with pytest.raises(BackendUnavailableError, match=rf"kernel 'reference' is broken: .*{re.escape(says)}") as caught:
        run_all(CheckedKernel(Changed(method, change)))
    assert str(caught.value).endswith(f"fix {__name__}.Changed.{method}")


class Never(WrappedKernel):
    """A kernel that must not run."""

    def __init__(self):
        super().__init__(ReferenceKernel())

    def attend(self, *args, **options):
        raise AssertionError("the tiles were not checked")

    attend_backward = forward_single_call = backward_single_call = attend_into = attend


class OnlyRequired(ReferenceKernel):
    """Inherit the single calls of `Kernel`. Both methods return something wrong."""

    def attend(self, *args, **options):
        super().attend(*args, **options)

    def attend_backward(self, x, tiles, call, *, into):
        return into


def test_correct_kernel_passes():
    run_all(CheckedKernel(ReferenceKernel()))


@pytest.mark.parametrize(
    "tile",
    [
        Tile(0, ROWS + 1, 0, ROWS, -ROWS, ROWS),
        Tile(0, ROWS, ROWS, 2 * ROWS, -2 * ROWS, ROWS),
        Tile(-1, ROWS, 0, ROWS, -ROWS, ROWS),
        Tile(0, ROWS, 4, 4, -ROWS, ROWS),
        Tile(0, ROWS, 0, ROWS, 1, 0),
    ],
)
def test_wrong_tiles_are_refused_before_the_kernel_runs(tile):
    """torch's operator for CPUs ends the process if it gets no keys."""
    q, k, v = inputs()
    call, tiles, kernel = AttentionCall.of(q, k, v, scale=0.3), Tiles((tile,)), CheckedKernel(Never())
    out, lse = torch.zeros(2, ROWS, 4, 5), torch.zeros(2, 4, ROWS)
    x = BackwardInputs(out, q, k, v, lse, out=out)
    for launch in (
        lambda: kernel.attend(q, k, v, tiles, call),
        lambda: kernel.forward_single_call(q, k, v, tiles, call),
        lambda: kernel.attend_into(q, k, v, tiles, call, out, lse),
        lambda: kernel.attend_backward(x, tiles, call, into=(q, k, v)),
        lambda: kernel.backward_single_call(x, tiles, call),
    ):
        with pytest.raises(ShapeError, match=r"a tile of this launch is empty or exceeds its tensors; got .*verify"):
            launch()


def test_strategy_that_sends_too_few_rows_is_refused():
    class HalfRows(PassPlan):
        def _rows(self, side, owner, member):
            (start, stop), *_ = super()._rows(side, owner, member)
            return (((start + stop) // 2, stop),)

    @dataclass(frozen=True)
    class Undercount(Strategy):
        name = "undercount"
        title = "half of the rows"

        def plan(self, call):
            route = DirectRoute(call.ranks, 1, 1, 1.0)
            return Plan(call, self.name, HalfRows(call, "kv", route), HalfRows(call, "kv", route, route))

    with pytest.raises(StrategyError, match="rank 0 sends kv0 to rank 1 at step 0 with 4 rows"):
        bp.run_threads(2, lambda mesh: attend(mesh, Undercount(), "cpu_flash"))


def test_inherited_forward_single_call_names_attend():
    q, k, v = inputs()
    with pytest.raises(BackendUnavailableError, match="attend returned None"):
        CheckedKernel(OnlyRequired()).forward_single_call(q, k, v, TILES, AttentionCall.of(q, k, v, scale=0.3))


def test_inherited_backward_single_call_names_attend_backward():
    q, k, v = inputs()
    x = BackwardInputs(torch.zeros(2, ROWS, 4, 5), q, k, v, torch.zeros(2, 4, ROWS), out=torch.zeros(2, ROWS, 4, 5))
    with pytest.raises(BackendUnavailableError, match="attend_backward returned a result"):
        CheckedKernel(OnlyRequired()).backward_single_call(x, TILES, AttentionCall.of(q, k, v, scale=0.3))


def attend(mesh, strategy="ring", kernel="reference"):
    """Return out and the gradients of a ragged sequence."""
    generator = torch.Generator().manual_seed(mesh.rank)  # ranks are threads, which share torch's own
    rows = bp.local_position_ids(mesh, seq_len=27, layout="zigzag").numel()
    shapes = ((1, rows, heads, 8) for heads in (4, 2, 2))
    q, k, v = (torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)
    out = bp.attention(q, k, v, mesh=mesh, seq_len=27, strategy=strategy, kernel=kernel)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))


def in_place(self, *args, **options):
    """Merge into the state, and return nothing."""
    original(self, *args, **options)


original = ReferenceKernel.attend


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_names_kernel_that_returns_none(ranks, monkeypatch):
    """On two ranks, out was 0 and LSE -inf, without an error."""
    monkeypatch.setattr(ReferenceKernel, "attend", in_place)
    with pytest.raises(BackendUnavailableError, match="kernel 'reference' is broken: attend returned None"):
        bp.run_threads(ranks, attend)


def test_partial_attention_names_kernel_that_returns_none(monkeypatch):
    monkeypatch.setattr(ReferenceKernel, "attend", in_place)
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(BackendUnavailableError, match="attend returned None"):
        bp.partial_attention(q, k, v, TILES, kernel="reference")


def test_remembered_call_names_kernel_that_returns_none():
    def work(mesh):
        attend(mesh)
        with calls_with(kernel=Silent):
            attend(mesh)

    class Silent(WrappedKernel):
        def attend(self, *args, **options):
            super().attend(*args, **options)

    with pytest.raises(BackendUnavailableError, match="kernel 'reference' is broken: attend returned None"):
        bp.run_threads(2, work)


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "ring_self_attention"])
def test_only_the_first_call_is_checked(strategy):
    """The remembered call runs the kernel itself, and gives the same bits."""

    def work(mesh):
        kinds = []
        with calls_with(kernel=lambda kernel: kinds.append(type(kernel)) or kernel):
            first, second = attend(mesh, strategy, "auto"), attend(mesh, strategy, "auto")
        assert all(map(torch.equal, first, second))
        return kinds

    checked, *plain = bp.run_threads(2, work)[0]
    assert (checked is CheckedKernel) is (strategy != "ring_self_attention")
    assert CheckedKernel not in plain
