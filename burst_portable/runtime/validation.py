"""Check the arguments of `attention` before it sends anything, with the same result on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from burst_portable.comm.agreement import share_error
from burst_portable.comm.base import Transport
from burst_portable.errors import (
    BurstError,
    CommunicationError,
    DtypeError,
    InputError,
    LayoutError,
    ShapeError,
    UnsupportedError,
    first_line,
    format_error,
    shown,
)
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.strategies.planner import LARGEST_HEAD, check_heads, checked_probability
from burst_portable.utils.values import as_float, as_int, is_symbolic, symbolic_error
from burst_portable.utils.warning import warn_caller

_PACKED = "packed sequences are a batch of one, x.unsqueeze(0), with mask=Mask.documents(cu_seqlens)"
_HEADS_FIRST = "if they are [batch, heads, rows, head size], as torch's attention takes them: x.transpose(1, 2)"
_OTHER_ROWS = "a KV cache and cross attention are not supported; partial_attention() takes k and v of other rows"
_MOST_HEADS = 1 << 31
_MOST_SEEDS = 1 << 62
_WITHOUT_MEMORY = ("AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor")
"""Subclasses of torch whose operators replace torch's: results that may not have arrived, and tensors while tracing."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def global_length(layout: object, seq_len: int | None, rows: int, mesh: Mesh) -> int:
    """Return the tokens of the unsharded sequence: `seq_len`, the length of a `Layout`, or `rows` on every rank."""
    if seq_len is not None:
        return seq_len
    return layout.length if isinstance(layout, Layout) else rows * mesh.size


def check_rows(layout: Layout, rows: int, mesh: Mesh) -> None:
    """Raise `LayoutError` if this rank does not have the number of rows that the layout gives it."""
    if layout.count(mesh.rank) != rows:
        raise LayoutError(
            f"rank {mesh.rank} holds a different number of rows than the layout {layout.name!r} gives it",
            got=f"{rows} rows",
            allowed=f"{layout.count(mesh.rank)} of {layout.length} tokens on {mesh.size} ranks",
            next_step="cut tensors with shard(); if ranks hold different numbers, pass seq_len, that of all ranks",
        )


def warn_of_other_layout(layout: Layout, mesh: Mesh, function: str, made_from: str = "another mask") -> None:
    """Warn on rank 0, once per mesh and layout, if tensors were sharded over this mesh, but never by this layout.

    Layouts of one name are compared if they have one length: those of other lengths are of other batches.

    Args:
        layout: Layout of a call.
        mesh: The ranks of the call.
        function: Name of the function that was called.
        made_from: What a layout of this name was made from, if another one of this name and length is known.
    """
    if mesh.size == 1 or (layout.name, layout.length, hash(layout)) in mesh.sharded_layouts:
        return
    known = tuple(mesh.sharded_layouts)  # a copy: other threads may load data and call `shard`
    lengths = {length for name, length, _ in known if name == layout.name}
    if not known or (lengths and layout.length not in lengths):
        return
    if mesh.rank == 0:
        what = f"no tensor of this mesh was sharded by the layout of this {function}, so its result may be wrong"
        got, allowed = layout.name, ", ".join(sorted({name for name, *_ in known}))
        next_step = f"pass the same layout= to shard and {function}; ignore this if you divided the tokens yourself"
        if lengths:
            got, allowed = f"{got} of {made_from}", f"{got} as shard made it"
            next_step = f"pass one Layout to shard and {function}, as make_layout(name, length, ranks, mask) returns it"
        warn_caller(format_error(what, got=got, allowed=allowed, next_step=next_step))
    mesh.note_sharded(layout)


def check_no_transforms(*tensors: object) -> None:
    """Raise `UnsupportedError` inside torch.func: buffers that are sent and merged hold one tensor, not a batch.

    Tangents of forward-mode differentiation would not be sent, and some kernels would silently drop them.
    """
    if torch._C._are_functorch_transforms_active():  # the check of torch's own autograd.Function
        raise UnsupportedError(
            "attention cannot be transformed by torch.func",
            got="a call from inside vmap, grad, vjp, jvp or jacrev",
            next_step="put what vmap maps over into the batch, and take gradients with backward()",
        )
    if torch._C._is_tracing():  # sizes are tensors there, and messages would not be in the trace
        next_step = "compile the model with torch.compile"
        raise UnsupportedError("attention cannot be traced", got="torch.jit.trace", next_step=next_step)
    if forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise UnsupportedError(
            "attention has no forward-mode derivative",
            got="a dual tensor of torch.autograd.forward_ad",
            next_step="take gradients with backward(), or use torch's own attention for tangents",
        )


def check_gradient(dout: object) -> None:
    """Raise `UnsupportedError` for the gradient of a result if it is a batch of gradients or has a tangent.

    Under is_grads_batched, messages would have no memory. Tangents of received gradients would silently be missing.
    Neither has a subclass the numbers that would be sent: see `check_tensor`.
    """
    if isinstance(dout, Tensor) and _replaces_operators(dout):
        raise UnsupportedError(
            "the gradient of attention's result is a tensor that replaces torch's operators",
            got=type(dout).__name__,
            next_step="pass on a plain tensor in the backward pass",
        )
    if isinstance(dout, Tensor) and torch._C._functorch.is_legacy_batchedtensor(dout):
        raise UnsupportedError(
            "attention has no batched gradients",
            got="a backward pass with is_grads_batched=True, or a jacobian with vectorize=True",
            next_step="take one gradient after the other, with retain_graph=True",
        )
    check_no_transforms(dout)


def check_data(mesh: Mesh, *tensors: Tensor) -> None:
    """Raise `UnsupportedError` for tensors without data (FakeTensorMode, torch.export) on more than one rank."""
    if mesh.size > 1 and any(isinstance(x, FakeTensor) for x in tensors):
        raise UnsupportedError(
            "tensors without data cannot be sent to other ranks",
            got="a FakeTensor, as FakeTensorMode and torch.export make them",
            next_step="use Mesh.single() there, with this rank's rows",
        )


def check_known_sizes(**tensors: Tensor) -> None:
    """Raise `UnsupportedError` for a symbolic size, except the length: a layout or seq_len may give its number."""
    for name, x in tensors.items():
        for dim, size in enumerate(x.shape):
            if dim != 1 and is_symbolic(size):
                raise symbolic_error(f"{name}.shape[{dim}]", size)


def check_tensor(name: str, x: object) -> None:
    """Raise an error unless `x` is a dense tensor of this process."""
    if not isinstance(x, Tensor):
        advice = "pass a tensor; torch.as_tensor makes one of numbers"
        raise ShapeError(f"{name} is not a tensor", got=shown(x), next_step=advice)
    if type(x).__name__ == "DTensor":
        raise InputError(f"{name} is a DTensor: pass its local tensor, x.to_local()")
    if x.layout is not torch.strided or x.is_nested:
        next_step = "pass a dense one; sequences of different lengths go into one row, with Mask.documents"
        got = f"{type(x).__name__}, {x.layout}"
        raise InputError(f"{name} is not a dense tensor", got=got, next_step=next_step)
    if _replaces_operators(x):
        raise InputError(
            f"{name} is a tensor that replaces torch's operators, so its memory cannot be sent",
            got=type(x).__name__,
            next_step="pass the plain tensor that it holds",
        )
    if x.is_quantized:  # its bytes cannot be viewed and sent: torch ends the process
        raise InputError(f"{name} is quantized", got=x.dtype, next_step=f"pass {name}.dequantize()")


def _replaces_operators(x: Tensor) -> bool:
    """Return whether a subclass may hold its numbers elsewhere, as torch.masked and quantizing packages do."""
    kind = type(x)
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and kind.__name__ not in _WITHOUT_MEMORY


def checked_device(device: Any) -> torch.device | None:
    """Return a `torch.device`; None for torch's default."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError("this is not a device", got=shown(device), allowed="such as 'cpu' or 'cuda'") from error


def usable_device(device: Any) -> torch.device | None:
    """Return a `torch.device` that this process can use. Raises `InputError` for others."""
    found = checked_device(device)
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # an assertion: torch is built for other devices
        got = f"{found}: {first_line(error)}"
        raise InputError("this device cannot be used", got=got, next_step="pass a device of this machine") from error
    return found


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, same_rows: bool = True) -> None:
    """Raise an error unless q, k and v have fitting shapes, one supported dtype and one device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4 or 0 in x.shape:
            raise ShapeError(
                f"{name} has no usable shape",
                got=tuple(x.shape),
                allowed="[batch, rows, heads, head size], none 0",
                next_step=_PACKED if x.dim() == 3 else None,
            )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise DtypeError(
            "q, k and v have different dtypes",
            got=f"{q.dtype}, {k.dtype}, {v.dtype}",
            next_step="cast them",
        )
    if q.dtype not in _DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise DtypeError("no attention in this dtype", got=q.dtype, allowed=allowed)
    if not q.device == k.device == v.device:
        got = f"{q.device}, {k.device}, {v.device}"
        raise InputError("q, k and v are on different devices", got=got, next_step="move them to one")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or (same_rows and q.shape[1] != k.shape[1]):
        heads_first = q.shape[2] == k.shape[2] and q.shape[1] > k.shape[1] and q.shape[1] % k.shape[1] == 0
        differ_in_rows = same_rows and q.shape[1] != k.shape[1] == v.shape[1]
        next_step = _HEADS_FIRST if heads_first else _OTHER_ROWS if differ_in_rows else None
        allowed = "equal batch and rows"
        raise ShapeError(
            "the shapes of q, k and v do not fit together", got=shapes, allowed=allowed, next_step=next_step
        )
    if q.shape[3] != k.shape[3]:
        raise ShapeError("q and k have different head sizes", got=shapes, allowed="one for both; v may have another")
    if max(q.shape[3], v.shape[3]) > LARGEST_HEAD:
        raise ShapeError("unsupported head size", got=shapes, allowed=f"1 to {LARGEST_HEAD}")
    check_heads(q.shape[2], k.shape[2])


def unsaveable(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[str, ...]:
    """Return the names of tensors that autograd cannot save for backward: those made under inference_mode."""
    tensors = {"q": q, "k": k, "v": v} if sinks is None else {"q": q, "k": k, "v": v, "sinks": sinks}
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors.values()):
        return ()
    return tuple(name for name, x in tensors.items() if x.is_inference())


def check_saveable(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Raise `InputError` for tensors that autograd cannot save for backward."""
    if names := unsaveable(q, k, v, sinks):
        raise InputError(
            "autograd cannot save tensors that were made under torch.inference_mode",
            got=", ".join(names),
            next_step="clone them outside of it, or call under torch.no_grad",
        )


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise `ShapeError` unless sinks are one floating-point logit per query head on the device of q."""
    check_tensor("sinks", sinks)
    if sinks.shape != (q.shape[2],) or not sinks.is_floating_point() or sinks.device != q.device:
        raise ShapeError(
            "sinks must be one logit per query head, on q's device",
            got=f"{tuple(sinks.shape)} {sinks.dtype} on {sinks.device}",
            allowed=f"({q.shape[2]},) floating on {q.device}",
        )


def as_number(name: str, value: Any) -> float:
    """Return a number, or the number in a tensor, as a float. Plans are cached by numbers, so it is read here."""
    if isinstance(value, Tensor) and value.requires_grad:
        next_step = f"pass {name}.item(), or multiply q by it if that is equivalent"
        raise InputError(f"{name} is a tensor that requires a gradient, but gets none", next_step=next_step)
    number = as_float(value)
    if number is None:
        raise InputError(f"{name} is not a number", got=shown(value), allowed="a float, or a tensor with one element")
    return number


def checked_scale(scale: float | None, head_dim: int) -> float:
    """Return a finite scale. Default: 1/sqrt(head_dim)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = as_number("scale", scale)
    if not math.isfinite(number):
        raise InputError("scale must be finite", got=scale, next_step="pass None for 1/sqrt(head size)")
    return number


def checked_softcap(softcap: float | None) -> float | None:
    """Return a positive softcap, or None."""
    if softcap is None:
        return None
    number = as_number("softcap", softcap)
    if not (math.isfinite(number) and number > 0):
        raise InputError("softcap must be positive", got=softcap, next_step="pass None for no softcap")
    return number


def checked_deterministic(given: bool | None) -> bool:
    """Return the value of `deterministic`. Default: torch's setting."""
    if given is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(given, bool):
        allowed = "True, False, or None for torch's setting"
        raise InputError("deterministic must be a bool or None", got=shown(given), allowed=allowed)
    return given


def checked_dropout(p: Any, first_head: Any) -> tuple[float, int]:
    """Return the probability of dropout, and the index of the first query head in the model."""
    number, head = checked_probability(as_number("dropout_p", p)), as_int(first_head)
    if head is None or not 0 <= head < _MOST_HEADS:
        allowed = "the number of query heads on the ranks before this one, if tensor parallelism divides heads"
        raise InputError("first_head is no index of a head", got=shown(first_head), allowed=allowed)
    return number, head


def checked_seed(seed: Any) -> int:
    """Return the seed of dropout. Default: a number from torch's default generator on the CPU.

    This never waits for a device. Activation checkpoints restore the generator, so that a recomputation draws the same.
    """
    if seed is None:
        drawn = torch.randint(_MOST_SEEDS, (), dtype=torch.int64, device="cpu")
        if isinstance(drawn, FakeTensor):
            raise UnsupportedError(
                "dropout cannot draw its seed without data",
                got="dropout_seed=None under FakeTensorMode or torch.export",
                next_step="pass dropout_seed=, an int",
            )
        return int(drawn)
    number = as_int(seed)
    if number is None or number < 0:
        raise InputError("dropout_seed is no seed", got=shown(seed), allowed="an int of at least 0 and below 2**63")
    return number


def broadcast_error(mesh: Mesh, error: Exception, *tensors: object) -> None:
    """Send an error to the other ranks, which may have none and would wait for this rank."""
    if mesh.size == 1 or isinstance(error, CommunicationError):
        return
    if (transport := _error_transport(mesh, tensors)) is not None:
        share_error(transport, error, mesh.config.timeout)


def _error_transport(mesh: Mesh, tensors: Sequence[object]) -> Transport | None:
    """Return the transport of the tensors' device, else one that the ranks have connected, else None."""
    for device_type in [x.device.type for x in tensors if isinstance(x, Tensor)]:
        try:
            return mesh.transport(device_type)
        except BurstError:  # no backend for such tensors, which may be the error itself
            continue
    return mesh.connected()
