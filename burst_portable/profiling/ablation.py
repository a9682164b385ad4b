"""A step again with communication off, with computing off, and with both: what each adds, where no trace shows it.

    found = ablate(step, mesh=mesh, model=model)    # every rank calls it, with the same step
    found.exposed_communication                     # seconds that communication adds
    found.hidden                                    # seconds that overlapping saves

A whole step is the rest of it (what runs with both off), what communication adds, what computing adds, and what either
hides of the other; the four add up exactly. Only attention's messages and kernels are switched off: the rest of a
model runs as ever. With communication off nothing is sent or waited for, late ranks included, and blocks hold whatever
their memory holds; with computing off kernels are skipped. So the results of such steps are nonsense, and `step` must
not keep them: no optimizer, no statistics. Gradients and buffers of `model`, and torch's random numbers, are put back.
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
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.numerics import State, empty_state
from burst_portable.runtime.prepared_call import PreparedCall, installed
from burst_portable.runtime.validation import broadcast_error
from burst_portable.utils.values import as_int

REPEAT = 3
_KINDS = ((), ("communication",), ("computing",), ("communication", "computing"))
STEPS = 1 + len(_KINDS) * REPEAT
"""Steps that an ablation runs by default: one that warms up, and `REPEAT` of each kind."""


@dataclass(frozen=True)
class Ablation:
    """Seconds of one step on this rank, the best of `repeat`: as it is, without communication, computing, or both."""

    whole: float
    without_communication: float
    without_computing: float
    without_both: float
    repeat: int = REPEAT

    @property
    def exposed_communication(self) -> float:
        """What communication adds to the step; waiting for a late rank, and contention with kernels, are its cost."""
        return self.whole - self.without_communication

    @property
    def exposed_computing(self) -> float:
        """What attention's kernels add to the step, with communication in both cases."""
        return self.whole - self.without_computing

    @property
    def hidden(self) -> float:
        """What doing both at once saves, compared with one after the other."""
        return self.without_communication + self.without_computing - self.whole - self.without_both

    def facts(self) -> dict[str, int]:
        """Whole nanoseconds for a report, where the parts add up exactly."""
        names = ("whole", "without_communication", "without_computing", "without_both")
        whole, silent, idle, both = (round(getattr(self, name) * 1e9) for name in names)
        return {
            **dict(zip(names, (whole, silent, idle, both), strict=True)),
            "exposed_communication": whole - silent,
            "exposed_computing": whole - idle,
            "hidden": silent + idle - whole - both,
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
    """Time a step whole, without communication, without computing, and without both. All ranks must call it together.

    It costs 1 + 4 * repeat steps, and for a model the memory of a second set of gradients.

    Args:
        step: a forward pass, and backward, that may be repeated; what it gives is thrown away.
        mesh: the ranks: a Mesh, or what `attention` takes for one.
        model: whose gradients and buffers are to be as before afterwards.
        repeat: how often each is run, in turns; the shortest counts.
        device: the type of the step's tensors; unless given, that of the model's parameters.

    Raises `InputError` for fewer than one repetition, and where nothing says on which device the step runs;
    `MismatchError` on every rank where one of them refuses, or where they repeat other numbers of times.
    """
    mesh = as_mesh(mesh)
    try:
        repeat = _checked(step, model, repeat)
        device = device or _device_of(model)
    except InputError as refusal:
        broadcast_error(mesh, refusal)
        raise
    agree_on_call(mesh.transport(device), "ablate()", {"repeat": str(repeat)})
    with _put_back(model, device):
        _timed(step, mesh, device, ())  # warm; ranks meet there, so all have kept their random numbers by then
        runs = [[_timed(step, mesh, device, off) for off in _KINDS] for _ in range(repeat)]
    _meet(mesh, device)
    whole, silent, idle, both = (min(times) for times in zip(*runs, strict=True))
    return Ablation(whole, silent, idle, both, repeat)


def _checked(step: object, model: object, repeat: object) -> int:
    """The number of repetitions; raises `InputError` for anything that cannot be run."""
    times = as_int(repeat)
    if times is None or times < 1:
        raise InputError("repeat must be a number of times", got=shown(repeat), allowed="an int >= 1")
    if not callable(step):
        raise InputError("a step is a function that takes nothing", got=shown(step))
    if model is not None and not isinstance(model, nn.Module):
        raise InputError("model is not a torch.nn.Module", got=shown(model))
    return times


def _device_of(model: nn.Module | None) -> str:
    """Taking the host for it would time a device's launches, and leave its random numbers as they are then."""
    parameter = next(model.parameters(), None) if model is not None else None
    found = torch.accelerator.current_accelerator(check_available=True) if parameter is None else None
    if found is not None:
        advice = f"pass device={found.type!r} or 'cpu', or the model"
        raise InputError("nothing says where the step's tensors are", next_step=advice)
    return "cpu" if parameter is None else parameter.device.type


@contextmanager
def _put_back(model: nn.Module | None, device: str) -> Iterator[None]:
    """Gradients, buffers and random numbers as before, whatever happens inside."""
    parameters, buffers = (list(model.parameters()), list(model.buffers())) if model is not None else ([], [])
    gradients, kept = [p.grad for p in parameters], [b.detach().clone() for b in buffers]
    for p in parameters:
        p.grad = None
    numbered = for_device(device).capabilities.streams
    of_device = {"devices": [torch.get_device_module(device).current_device()], "device_type": device}
    with torch.random.fork_rng(**(of_device if numbered else {"devices": []})):
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
            prepared = replace(prepared, kernel=_Idle(prepared.kernel))
        if "communication" in off:
            prepared = replace(prepared, transport=_Silent(prepared.transport), offsets={})
        return prepared

    streams = for_device(device).capabilities.streams
    token = installed.set(without)  # in the place of a session that is open: nothing of this is recorded
    try:
        _meet(mesh, device)
        began = time.perf_counter()
        step()
        if streams:
            torch.get_device_module(device).synchronize()
        return time.perf_counter() - began
    finally:
        installed.reset(token)


def _meet(mesh: Mesh, device: str) -> None:
    """All ranks begin together."""
    mine = torch.zeros(1, dtype=torch.uint8, device=device)
    mesh.transport(device).all_gather(mine, [torch.empty_like(mine) for _ in range(mesh.size)], "ablation")
    if for_device(device).capabilities.streams:
        torch.get_device_module(device).synchronize()


class _Done:
    """See `comm.base.Handle`: nothing was sent, so nothing is waited for."""

    def wait(self) -> None:
        return


class _Silent(WrappedTransport):
    """See `comm.base.Transport`. Blocks stay at home; whether ranks agree, which would wait for the latest, is taken as
    said: they did in the whole step. Nothing is packed that is not packed there."""

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped)
        self.persistent_inbox = True
        self.supports_strided_sends = wrapped.supports_strided_sends

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        """Tell nobody."""

    def end(self) -> None:
        """Nothing came."""

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        return [_Done() for _ in sends], [_Done() for _ in receives]

    def exchange(
        self, sends: Sequence[Parts | Strips], receives: Sequence[Parts], label: str, *, exclusive: bool = False
    ) -> Exchange:
        if self.supports_strided_sends:  # strips are no messages; not even what a rank sends itself is copied then
            return Exchange([], [])
        return super().exchange(sends, receives, label, exclusive=exclusive)

    def inbox(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        return self.buffer(size, device)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return [data] * self.size

    def close(self) -> None:
        """The transport goes on."""


class _Idle(WrappedKernel):
    """Returns at once, with whatever memory holds."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, state: State | None = None, **__: Any) -> State:
        return empty_state(q, v.shape[-1]) if state is None else state

    def attend_backward(self, *_: Any, **__: Any) -> None:
        """Add nothing."""

    def forward_single_call(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> State:
        return empty_state(q, v.shape[-1])

    def backward_single_call(self, x: BackwardInputs, *_: Any, **__: Any) -> Gradients:
        return torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)

    def attend_into(self, *_: Any, **__: Any) -> None:
        """Write nothing."""
