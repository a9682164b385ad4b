"""Make a call on a rank that had an error in the call before. As a program, run pairs of gloo ranks.

python -m tests.support.after_errors FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.config import Config
from burst_portable.errors import BurstError
from tests.support.forked import run_forked

RANKS = 2
DEADLINE = 2.0


class Planted(BaseException):
    """Error that, like KeyboardInterrupt, is not reported to other ranks."""


def attention(mesh: bp.Mesh) -> torch.Tensor:
    x = torch.ones(1, 4, 2, 8)
    return bp.attention(x, x, x, mask="full", mesh=mesh, strategy="ring")


def unshard(mesh: bp.Mesh) -> torch.Tensor:
    return bp.unshard(torch.ones(1, 4, 2, 8), mesh, seq_len=8)


def all_reduce(mesh: bp.Mesh) -> torch.Tensor:
    return bp.all_reduce(torch.ones(64), mesh)


def all_reduce_gradients(mesh: bp.Mesh) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones(64))
    parameter.grad = torch.ones(64)
    bp.all_reduce_gradients([parameter], mesh)
    return parameter.grad / 2


def unshard_wrong_rows(mesh: bp.Mesh) -> torch.Tensor:
    """Make a call that raises on this rank only. The rank reports the error to all ranks."""
    return bp.unshard(torch.ones(1, 3, 2, 8), mesh, seq_len=8)


CALLS = {one.__name__: one for one in (attention, unshard, all_reduce, all_reduce_gradients, unshard_wrong_rows)}


class Waited:
    """A handle that calls a function after its wait."""

    def __init__(self, wrapped, then: Callable[[], None]) -> None:
        self._wrapped, self._then = wrapped, then

    def wait(self) -> None:
        self._wrapped.wait()
        self._then()


def plant(transport: Transport, at: int) -> None:
    """Make the wait for received messages fail after the `at`-th post from now on.

    Over gloo, the messages of the agreement check are posted as well.
    """
    name = "_each" if isinstance(transport, TorchDistTransport) else "post"
    post, left = getattr(transport, name), [at]

    def strike() -> None:
        raise Planted

    def planted(*arguments):
        leaving, arriving = post(*arguments)
        left[0] -= 1
        return leaving, [Waited(one, strike) for one in arriving] if not left[0] else arriving

    setattr(transport, name, planted)


def outcome_of(call: Callable[[bp.Mesh], torch.Tensor], mesh: bp.Mesh) -> str:
    """Make a call and return its error as text, or whether its numbers are right or wrong."""
    try:
        out = call(mesh)
    except (BurstError, Planted) as error:
        return f"{type(error).__name__}: {error}"
    right = 2.0 if call is all_reduce else 1.0
    return "right" if torch.equal(out, torch.full_like(out, right)) else "wrong"


def play(mesh: bp.Mesh, transport: Transport, before: str, at: int, after: str, then: bp.Mesh) -> list[str]:
    """Make two calls and return their outcomes, the second on mesh `then`. Rank 1 fails in the first."""
    if mesh.rank == 1:
        plant(transport, at)
    return [outcome_of(CALLS[before], mesh), outcome_of(CALLS[after], then)]


GLOO = (
    ("attention", 1, "unshard"),
    ("attention", 2, "attention"),
    ("unshard", 2, "all_reduce_gradients"),
    ("all_reduce", 1, "attention"),
)
"""First call, how many of its posts are waited for, second call: the first post of each is a question."""


def main(process: int, folder: Path) -> None:
    torch.set_num_threads(1)
    number, rank = divmod(process, RANKS)
    store = dist.FileStore(str(folder / f"store{number}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    transport = TorchDistTransport(None, "gloo", batched=False, timeout=DEADLINE)
    mesh = bp.Mesh(rank, RANKS, lambda _: transport, config=Config(timeout=DEADLINE))
    assert [outcome_of(CALLS[name], mesh) for name in GLOO[number][::2]] == ["right"] * 2  # connected, and equal values
    other = bp.Mesh.from_group(config=Config(timeout=DEADLINE))
    found = play(mesh, transport, *GLOO[number], mesh if number < 2 else other)
    (folder / f"{number}rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS * len(GLOO), main, Path(sys.argv[1]))
