"""Repeat a step without communication, without computing, and without both, to measure what each adds.

The full step is exactly the sum of the step without both, what communication adds, what computing adds, and the
hidden time of both at once. Only attention's messages and kernels are switched off; the rest of the model runs
unchanged. Such steps compute with uninitialized memory, so `step` must not keep their results: no optimizer, no
statistics. `ablate` restores gradients and buffers of `model` and torch's random state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from burst_portable.backends.selection import for_device
from burst_portable.comm.agreement import agree_on_call
from burst_portable.comm.base import Exchange, Handle, Message, Parts, Strips, Transport, WrappedTransport
from burst_portable.errors import InputError, shown
from burst_portable.kernels.base import BackwardInputs, Gradients, WrappedKernel
from burst_portable.kernels.score_kernel import ScoreRowKernel
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.numerics import State, empty_state
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles
from burst_portable.runtime.prepared_call import PreparedCall, call_wrapper
from burst_portable.runtime.validation import broadcast_error
from burst_portable.utils.values import as_int

REPEAT = 3
_KINDS = ((), ("communication",), ("computing",), ("communication", "computing"))
STEPS = 1 + len(_KINDS) * REPEAT
"""Number of steps of an ablation by default: one warm-up step, and `REPEAT` of each kind."""


@dataclass(frozen=True)
class Ablation:
    """Seconds of one step on this rank, the shortest of `repeat` runs of each kind."""

    full_step: float
    without_communication: float
    without_computing: float
    without_both: float
    repeat: int = REPEAT

    @property
    def exposed_communication(self) -> float:
        """Seconds that communication adds to the step, including waits for late ranks and contention with kernels."""
        return self.full_step - self.without_communication

    @property
    def exposed_computing(self) -> float:
        """Seconds that attention's kernels add to a step with communication."""
        return self.full_step - self.without_computing

    @property
    def hidden(self) -> float:
        """Seconds that overlapping communication and kernels saves."""
        return self.without_communication + self.without_computing - self.full_step - self.without_both

    def facts(self) -> dict[str, int]:
        """Return integer nanoseconds for a report; the parts add up exactly."""
        names = ("full_step", "without_communication", "without_computing", "without_both")
        full, silent, idle, both = (round(getattr(self, name) * 1e9) for name in names)
        return {
            **{f"{name}_ns": value for name, value in zip(names, (full, silent, idle, both), strict=True)},
            "exposed_communication_ns": full - silent,
            "exposed_computing_ns": full - idle,
            "hidden_ns": silent + idle - full - both,
            "repeat": self.repeat,
        }


def ablate(
    step: Callable[[], Any],
    *,
    mesh: MeshLike = None,
    model: nn.Module | None = None,
    repeat: int = REPEAT,
    device: str | None = None,
) -> Ablation:
    """Time a step unchanged, without communication, without computing, and without both. All ranks must call it
    together.

    It runs 1 + 4 * repeat steps. With a model, it needs the memory of a second set of gradients.

    Args:
        step: Function of a repeatable forward and backward pass; its result is discarded.
        mesh: Ranks: a Mesh, or any value that `attention` accepts as one. Default: that of `attention`.
        model: Module whose gradients and buffers are restored afterwards. Default: none.
        repeat: Number of runs of each kind, alternating; the shortest counts. Default: 3.
        device: Type of the device of the step's tensors. Default: that of the model's parameters.

    Raises:
        InputError: If `repeat` is below 1, or if the device of the step is unknown.
        MismatchError: On every rank, if one rank raises `InputError` or repeats a different number of times.
    """
    mesh = as_mesh(mesh)
    try:
        repeat = _checked(step, model, repeat)
        device = device or _device_of(model)
    except InputError as error:
        broadcast_error(mesh, error)
        raise
    agree_on_call(mesh.transport(device), "ablate()", {"repeat": str(repeat)})
    with _restored(model, device):
        _timed(step, mesh, device, ())  # warm-up; after its barrier, all ranks have saved their random state
        runs = [[_timed(step, mesh, device, off) for off in _KINDS] for _ in range(repeat)]
    _barrier(mesh, device)
    full, silent, idle, both = (min(times) for times in zip(*runs, strict=True))
    return Ablation(full, silent, idle, both, repeat)


def _checked(step: object, model: object, repeat: object) -> int:
    """Return the number of repetitions; raise `InputError` if an argument is unusable."""
    times = as_int(repeat)
    if times is None or times < 1:
        raise InputError("repeat must be a positive integer", got=shown(repeat), allowed="an int >= 1")
    if not callable(step):
        raise InputError("step must be a function without arguments", got=shown(step))
    if model is not None and not isinstance(model, nn.Module):
        raise InputError("model is not a torch.nn.Module", got=shown(model))
    return times


def _device_of(model: nn.Module | None) -> str:
    """Return the type of the step's device; raise `InputError` if it is unknown.

    Assuming the host would time only a device's launches, and would not restore its random state.
    """
    parameter = next(model.parameters(), None) if model is not None else None
    found = torch.accelerator.current_accelerator(check_available=True) if parameter is None else None
    if found is not None:
        raise InputError(
            "the device of the step is unknown", next_step=f"pass device={found.type!r} or 'cpu', or the model"
        )
    return "cpu" if parameter is None else parameter.device.type


@contextmanager
def _restored(model: nn.Module | None, device: str) -> Iterator[None]:
    """Restore gradients, buffers and random state on exit, also after an error."""
    parameters, buffers = (list(model.parameters()), list(model.buffers())) if model is not None else ([], [])
    gradients, kept = [p.grad for p in parameters], [b.detach().clone() for b in buffers]
    for p in parameters:
        p.grad = None
    has_streams = for_device(device).capabilities.streams
    device_rng = {"devices": [torch.get_device_module(device).current_device()], "device_type": device}
    with torch.random.fork_rng(**(device_rng if has_streams else {"devices": []})):
        try:
            yield
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            with torch.no_grad():
                for b, before in zip(buffers, kept, strict=True):
                    b.copy_(before)


def _timed(step: Callable[[], Any], mesh: Mesh, device: str, off: Sequence[str]) -> float:
    def without(prepared: PreparedCall, _: Mesh) -> PreparedCall:
        if "computing" in off:
            scores = isinstance(prepared.kernel, ScoreRowKernel)
            prepared = replace(prepared, kernel=_IdleScores() if scores else _IdleKernel(prepared.kernel))
        if "communication" in off:
            silent = _SilentTransport(prepared.transport)  # all ranks seem to have this rank's values
            prepared = replace(prepared, transport=silent, offsets={}, values_key=b"")
        return prepared

    streams = for_device(device).capabilities.streams
    token = call_wrapper.set(without)  # replaces an open session: these steps are not recorded
    try:
        _barrier(mesh, device)
        began = time.perf_counter()
        step()
        if streams:
            torch.get_device_module(device).synchronize()
        return time.perf_counter() - began
    finally:
        call_wrapper.reset(token)


def _barrier(mesh: Mesh, device: str) -> None:
    """Wait until all ranks have arrived, so that they begin together."""
    data = torch.zeros(1, dtype=torch.uint8, device=device)
    mesh.transport(device).all_gather(data, [torch.empty_like(data) for _ in range(mesh.size)], "ablation")
    if for_device(device).capabilities.streams:
        torch.get_device_module(device).synchronize()


class _DoneHandle:
    """Implement `comm.base.Handle`: nothing was sent, so it does not wait."""

    def wait(self) -> None:
        return


class _SilentTransport(WrappedTransport):
    """Implement `comm.base.Transport` without communication.

    It skips the check that ranks agree, which would wait for the latest rank: they agreed in the full step.
    """

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped)
        self.keeps_received = True
        self.supports_strided_sends = wrapped.supports_strided_sends

    def begin(self, digest: bytes = b"", bytes_per_sender: int = 0) -> None:
        """Skip the check that ranks agree."""

    def end(self) -> None:
        """Do nothing: there were no messages."""

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        return [_DoneHandle() for _ in sends], [_DoneHandle() for _ in receives]

    def exchange(
        self, sends: Sequence[Parts | Strips], receives: Sequence[Parts], label: str, *, exclusive: bool = False
    ) -> Exchange:
        if self.supports_strided_sends:  # as in the full step, nothing is packed or copied
            return Exchange([], [])
        return super().exchange(sends, receives, label, exclusive=exclusive)

    def receive_buffer(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        return self.buffer(size, device)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return [data] * self.size

    def close(self) -> None:
        """Do nothing: the wrapped transport stays open."""


class _IdleScores(ScoreRowKernel):
    """Kernel for rows of scores that returns zeros without computing."""

    def scores(self, q: Tensor, k: Tensor, tiles: Tiles, call: AttentionCall) -> Tensor:
        return self.product(q.transpose(1, 2), k)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return x.new_zeros(()).expand(*x.shape[:3], y.shape[1])

    def weighted(self, weights: Tensor, y: Tensor, *, transposed: bool = False) -> Tensor:
        return weights.new_zeros(()).expand(*weights.shape[:3], y.shape[-1])

    def summed(self, weights: Tensor, x: Tensor, kv_heads: int) -> Tensor:
        return x.new_zeros(()).expand(x.shape[0], weights.shape[-1], kv_heads, x.shape[-1])


class _IdleKernel(WrappedKernel):
    """Kernel that returns uninitialized memory without computing."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, state: State | None = None, **__: Any) -> State:
        return empty_state(q, v.shape[-1]) if state is None else state

    def attend_backward(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def forward_single_call(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> State:
        return empty_state(q, v.shape[-1])

    def backward_single_call(self, x: BackwardInputs, *_: Any, **__: Any) -> Gradients:
        return torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)

    def attend_into(self, *_: Any, **__: Any) -> None:
        """Do nothing."""
