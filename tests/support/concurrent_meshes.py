"""Compute attention on several concurrent threads, each with its own mesh and random delays.

As a program, run four gloo ranks.

python -m tests.support.concurrent_meshes FOLDER
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.config import Config
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from tests.support.attention_cases import expected, make_inputs, on_one_rank
from tests.support.forked import run_forked

RANKS = 4
GROUPS = {  # two models over the same ranks, two separate pairs, and two groups that overlap
    "model": (0, 1, 2, 3),
    "other_model": (0, 1, 2, 3),
    "pair": (0, 1),
    "other_pair": (2, 3),
    "first_three": (0, 1, 2),
    "last_three": (1, 2, 3),
}
_CHOICES = (("ring", "causal"), ("burst", "documents"), ("ulysses", "window"), ("burst(transfer=direct)", "prefix"))
_LONGEST = 0.003  # seconds of the longest delay


class Pool:
    """A planted bug: all callers take buffers in turn from one pool. Results are correct only with a single caller."""

    def __init__(self, ranks: int) -> None:
        self._free: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._most = 3 * ranks  # buffers per size, more than one attention call needs; Ulysses' exchange needs most

    def __call__(self, size: int) -> torch.Tensor:
        rounded = 1 << (size - 1).bit_length()
        buffers = self._free[rounded]
        if len(buffers) < self._most:
            buffers.append(torch.empty(rounded, dtype=torch.uint8))
        buffers.rotate()
        return buffers[0][:size]


class Delaying(Transport):
    """Delay another transport at random, and take its buffers from a pool if there is one."""

    def __init__(self, wrapped: Transport, seed: int, pool: Pool | None = None) -> None:
        super().__init__(wrapped.name, wrapped.rank, wrapped.size)
        self._wrapped, self._pool, self._random = wrapped, pool, random.Random(seed)
        self.host = wrapped.host

    def delay(self) -> None:
        time.sleep(self._random.random() * _LONGEST)

    def buffer(self, size, device):
        return self._pool(size) if self._pool else self._wrapped.buffer(size, device)

    def share(self, data, label="share", timeout=None):
        return self._wrapped.share(data, label, timeout)

    def post(self, sends, receives, label=""):
        self.delay()
        leaving, arriving = self._wrapped.post(sends, receives, label)
        return [Delayed(h, self) for h in leaving], [Delayed(h, self) for h in arriving]


class Delayed:
    def __init__(self, wrapped, transport: Delaying) -> None:
        self._wrapped, self._transport = wrapped, transport

    def wait(self) -> None:
        self._wrapped.wait()
        self._transport.delay()


def compare(mesh: bp.Mesh, seed: int, steps: int) -> int:
    """Compute attention with gradients several times and return how many results are wrong."""
    wrong = 0
    for step in range(steps):
        strategy, mask = _CHOICES[step % len(_CHOICES)]
        case = Case(strategy=strategy, ranks=mesh.size, heads="mha", mask=mask)
        inputs = make_inputs(case, seed=100 * seed + step)
        wrong += bool(find_violations(on_one_rank(mesh, case, inputs), *expected(case, inputs), case.dtype))
    return wrong


def run_concurrently(work: Mapping[str, Callable[[], int]]) -> dict[str, int]:
    """Run each function in its own thread and return the results by name."""
    found: dict[str, int] = {}

    def run(name: str, one: Callable[[], int]) -> None:
        found[name] = one()

    threads = [threading.Thread(target=run, args=item) for item in work.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == work.keys(), "a thread has raised"
    return found


def work_of(rank: int, groups: dict[str, dist.ProcessGroup], pool: Pool | None, steps: int) -> dict[str, partial[int]]:
    """Return the work of this rank in each of its groups, each with its own mesh."""
    work = {}
    for seed, (name, ranks) in enumerate(GROUPS.items()):
        if rank in ranks:
            wrapped = TorchDistTransport(groups[name], "gloo", batched=False, timeout=60)
            transport = Delaying(wrapped, 10 * seed + rank, pool)
            mesh = bp.Mesh(wrapped.rank, len(ranks), lambda _, t=transport: t, config=Config(timeout=60))
            work[name] = partial(compare, mesh, seed, steps)
    return work


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    groups = {name: dist.new_group(list(ranks)) for name, ranks in GROUPS.items()}
    found: dict[str, object] = {"right": run_concurrently(work_of(rank, groups, None, 3))}
    alone = work_of(rank, groups, Pool(RANKS), 3)
    found["pool, one at a time"] = {name: one() for name, one in alone.items() if name == "model"}
    found["pool, at once"] = [run_concurrently(work_of(rank, groups, Pool(RANKS), 3)) for _ in range(3)]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS, main, Path(sys.argv[1]))
