"""Measure the entries of a row: correctness first, then bytes, memory, and time in interleaved rounds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from burst_portable.bench.entries import Entry, PreparedEntry, Sent
from burst_portable.bench.masks import named_mask
from burst_portable.bench.oracle import NAMES, Expected, oracle
from burst_portable.bench.results import Row
from burst_portable.bench.task import Setting, Task
from burst_portable.bench.verdicts import VERDICT_SIZE, Verdict, joint_verdict
from burst_portable.comm.torch_dist import store_exchange
from burst_portable.errors import CommunicationError
from burst_portable.layout import make_layout
from burst_portable.measuring.timing import TransportClock
from burst_portable.mesh import Mesh

_T = TypeVar("_T")
# Largest relative errors in the 2-norm, and of one element relative to the largest: (32 bits and more, 16 bits).
_LIMITS = ((1e-4, 1e-3), (1.5e-2, 5e-2))


class Benchmark:
    """The entries of rows, measured on all ranks of a mesh.

    Args:
        mesh: Ranks that share the sequence.
        device: Device of this rank.
        setting: Sizes.
        entries: What is compared.
        error_seconds: How long a rank on which an entry failed waits for the other ranks. They may wait for messages.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        setting: Setting,
        entries: Sequence[Entry],
        *,
        error_seconds: float = 10.0,
    ) -> None:
        self._mesh, self._device, self._setting, self._entries = mesh, device, setting, entries
        self._error_seconds = error_seconds
        self._transport = mesh.transport(device.type)
        self._streams = mesh.backend_for(device.type).capabilities.streams
        self._clock = TransportClock(self._transport, device, streams=self._streams)

    def measure(
        self,
        mask_name: str,
        length: int,
        kernel: str,
        only: Sequence[str],
        on_entry: Callable[[str], None] = lambda name: None,
    ) -> list[Row]:
        """Return a row for each entry in `only`, for a mask that `named_mask` takes. All ranks must call it.

        `on_entry` is called with the name of each entry before it is examined, and with "" before entries are timed.

        Raises:
            CommunicationError: An entry ended on this rank, or on another one that no longer answers.
        """
        mask = named_mask(mask_name, length)
        task = Task(
            mask,
            make_layout(self._setting.layout, length, self._mesh.size, mask),
            kernel,
            self._inputs(length),
            self._setting.dropout,
        )
        expected = oracle(task, self._setting.head_dim**-0.5)
        rows: list[Row] = []
        timed: list[tuple[Row, PreparedEntry]] = []
        for entry in self._entries:
            if entry.name in only:
                where = {"mask": mask_name, "seq_len": length, "ranks": self._mesh.size, "kernel": kernel}
                row: Row = {**where, "entry": entry.name}
                rows.append(row)
                on_entry(entry.name)
                prepared = self._examine(entry, task, expected, row)
                if prepared is not None:
                    timed.append((row, prepared))
        on_entry("")
        self._time(mask.num_pairs(length), timed)
        return rows

    def _examine(self, entry: Entry, task: Task, expected: Expected, row: Row) -> PreparedEntry | None:
        """Run an entry once, and add its status to the row. Return its calls if it is right on all ranks."""

        def prepare() -> tuple[PreparedEntry, Verdict]:
            planned = entry.checked_plan(task, self._mesh)
            return entry.prepare(task, self._mesh), Verdict.of_plan(planned)

        if (prepared := self._attempt(entry, row, prepare)) is None:
            return None
        ran = self._attempt(entry, row, lambda: (self._run_once(entry, prepared, task), Verdict()))
        if ran is None:
            return None
        found, peak, chose = ran
        row.update(chose | self._check(prepared, found, expected, peak))
        is_wrong = row["status"] == "wrong" and not row["reason"].startswith(f"{NAMES[0]} ")
        if is_wrong and (fault := entry.known_fault(task)):
            row["reason"] = f"{fault}; {row['reason']}"
        if row["status"] == "ok":
            row.update(self._sent(entry.count(prepared, task, self._mesh)))
            return prepared
        return None

    def _attempt(self, entry: Entry, row: Row, step: Callable[[], tuple[_T, Verdict]]) -> _T | None:
        """Return the result of a step of an entry; None if it failed on a rank, which adds its status to the row."""
        result: _T | None = None
        try:
            result, verdict = step()
        except CommunicationError:
            raise  # ranks have lost each other
        except entry.errors as error:
            verdict = Verdict.of_error(error)
        return None if self._has_failed(entry, verdict, row) else result

    def _has_failed(self, entry: Entry, verdict: Verdict, row: Row) -> bool:
        """Compare the verdicts of all ranks. Add the status of an entry that cannot run on all of them to the row.

        Raises:
            CommunicationError: The entry failed here, and the other ranks may wait for its messages.
        """
        try:
            verdicts = self._shared(verdict)
        except CommunicationError as error:
            if not verdict.status:
                raise
            what = f"rank {self._mesh.rank}: {entry.name} {verdict.status} while other ranks run it"
            raise CommunicationError(what, got=verdict.reason) from error
        joint = joint_verdict(entry.name, verdicts)
        if not joint.status:
            return False
        row.update(status=joint.status, reason=joint.reason)
        if unfinished := self._transport.unfinished():
            raise CommunicationError(f"{entry.name} {joint.status} during a {unfinished}", got=joint.reason)
        return True

    def _shared(self, verdict: Verdict) -> list[Verdict]:
        """Return the verdicts of all ranks.

        Processes share through the store of their group, which those messages cannot be mixed with.
        """
        data = json.dumps(verdict).encode().ljust(VERDICT_SIZE)
        label, group = "sharing what each rank found about an entry", self._mesh.group
        timeout = self._error_seconds if verdict.status else self._mesh.config.timeout
        if group is None:
            shared = self._transport.share(data, label, timeout)
        else:
            shared = store_exchange(group).share(data, f"rank {self._mesh.rank}, {label}", timeout)
        if any(len(one) != VERDICT_SIZE for one in shared):  # threads share what passes share
            raise CommunicationError(f"rank {self._mesh.rank}: another rank runs a pass of this entry")
        return [Verdict(*json.loads(one)) for one in shared]

    def _inputs(self, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s, generator = self._setting, torch.Generator(self._device).manual_seed(length)
        q, k, v, dout = (
            torch.randn(1, length, heads, s.head_dim, device=self._device, generator=generator)
            .to(getattr(torch, s.dtype))
            for heads in (s.heads, s.kv_heads, s.kv_heads, s.heads)
        )  # fmt: skip
        return q, k, v, dout

    def _run_once(
        self, entry: Entry, prepared: PreparedEntry, task: Task
    ) -> tuple[tuple[Tensor, ...], int | None, Row]:
        """Return the results of `_run`, and what `auto` chose before and after it."""
        first = entry.choice(prepared, task, self._mesh)
        found, peak = self._run(prepared)
        chose = {} if first is None else {"chose_first": first, "chose": entry.choice(prepared, task, self._mesh)}
        return found, peak, chose

    def _run(self, prepared: PreparedEntry) -> tuple[tuple[Tensor, ...], int | None]:
        """Run both passes once. Return this rank's results and the peak memory beyond the inputs, if it is known."""
        if not self._streams:
            return prepared.run(), None
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        found = prepared.run()
        self._clock.settle()
        return found, torch.accelerator.max_memory_allocated() - before

    def _check(self, prepared: PreparedEntry, found: tuple[Tensor, ...], expected: Expected, peak: int | None) -> Row:
        """Return the status, the worst errors of all ranks, and the largest peak memory."""
        norm_limit, max_limit = _LIMITS[prepared.dout.dtype.itemsize < 4]
        errors, wrong = {}, []
        for name, result, right in zip(NAMES, found, expected.results, strict=True):
            mine = prepared.shard(right)
            gap = result[:, :, -mine.shape[2] :].double() - mine
            norm, largest = mine.norm(), right.abs().max()
            if name in expected.terms:  # of a result that is 0
                norm = norm or prepared.shard(expected.terms[name]).norm()
                largest = largest or expected.terms[name].max()
            for label, one, whole, limit in (
                (name, gap.norm(), norm, norm_limit),
                (f"{name} (max)", gap.abs().max(), largest, max_limit),
            ):
                value = float(one / whole) if whole else float(one)
                errors[label] = self._clock.slowest(value if value == value else float("inf"))
                if not errors[label] <= limit:
                    wrong.append(f"{label} is off by {errors[label]:.2g}, allowed {limit:g}")
        peak_bytes = None if peak is None else int(self._clock.slowest(peak))
        status: Row = {"status": "wrong", "reason": "; ".join(wrong)} if wrong else {"status": "ok"}
        return {**status, "errors": errors, "peak_bytes": peak_bytes}

    def _sent(self, passes: Sequence[Sent]) -> Row:
        """Return the largest number of bytes and messages that a rank sends in each pass."""
        return {
            f"{name}_{what}": int(self._clock.slowest(value))
            for name, sent in zip(("forward", "backward"), passes, strict=True)
            for what, value in zip(("sent_bytes", "messages"), sent, strict=True)
        }

    def _time(self, pairs: int, timed: list[tuple[Row, PreparedEntry]]) -> None:
        """Time all entries in each round, in a random order that is the same on all ranks."""
        calls = [(one.forward, backward_of(one.forward, one.leaves, one.dout)) for _, one in timed]
        order = random.Random(pairs)
        seconds: dict[int, list[tuple[float, float]]] = {i: [] for i in range(len(timed))}
        for _ in range(self._setting.rounds):
            for i in order.sample(range(len(timed)), len(timed)):
                forward, backward = calls[i]
                seconds[i].append((self._clock.time(forward, 1), self._clock.time(backward, 1)))
        flops = 4 * pairs * self._setting.heads * self._setting.head_dim / self._mesh.size
        for i, (row, _) in enumerate(timed):
            for name, values, factor in zip(
                ("forward", "backward"), zip(*seconds[i], strict=True), (1, 2.5), strict=True
            ):
                row[f"{name}_seconds"] = median(values)
                row[f"{name}_spread"] = (max(values) - min(values)) / median(values)
                row[f"{name}_tflops"] = factor * flops / median(values) / 1e12


def backward_of(
    forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """Run a forward pass once. Return a call of its backward pass, which may run again and again."""
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
