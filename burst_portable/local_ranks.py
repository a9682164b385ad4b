"""Ranks as threads of one process: for tests, notebooks and laptops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from burst_portable.comm.local import LocalTransport, run_threads
from burst_portable.config import Config, from_environment
from burst_portable.errors import InputError, explain, shown
from burst_portable.mesh import Mesh
from burst_portable.mesh_checks import checked_backend, checked_inner
from burst_portable.values import size

T = TypeVar("T")
_MOST_RANKS = 1024


def run_local(
    ranks: int,
    work: Callable[[Mesh], T],
    *,
    deadline: float = 60.0,
    inner: int | None = None,
    backend: str = "auto",
) -> list[T]:
    """Run `work(mesh)` on this many ranks, as threads of this process; returns the results in rank order.

    They share all that a process shares, torch's global random numbers too: who draws which is left to chance, and
    `torch.manual_seed` in one sets them for all. Give each rank a generator of its own::

        def work(mesh):
            generator = torch.Generator().manual_seed(mesh.rank)
            q, k, v = (torch.randn(1, 16, 2, 8, generator=generator) for _ in range(3))
            return attention(q, k, v, mesh=mesh)

    On one accelerator gradients need processes: torch's autograd has one worker per device.

    Args:
        ranks: how many, up to 1024.
        work: called once per rank, with that rank's mesh.
        deadline: seconds that a rank waits for another before that is an error.
        inner, backend: see `Mesh`.

    Raises what the first failing rank raised.
    """
    ranks = size("ranks", ranks)
    if ranks > _MOST_RANKS:
        most = f"up to {_MOST_RANKS}: each is a thread"
        raise InputError(explain("too many ranks for one process", got=ranks, allowed=most))
    if not callable(work):
        raise InputError(explain("work must be a function of a mesh", got=shown(work), allowed="such as work(mesh)"))
    seconds = Config(deadline=deadline).deadline
    checked_inner(inner, ranks)
    checked_backend(backend)
    config = from_environment()

    def body(transport: LocalTransport) -> T:
        mesh = Mesh(transport.rank, ranks, lambda device_type: transport, inner=inner, backend=backend, config=config)
        return work(mesh)

    return run_threads(ranks, body, deadline=seconds)
