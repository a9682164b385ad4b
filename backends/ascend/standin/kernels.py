"""Compute operators on NPU tensors with torch's CPU kernels, in the same memory.

torch loads this module like torch_npu, through an entry point `torch.backends`, which `environment.sh` writes. The
device, its streams, events, copies, allocator and process group are torch_npu's. The calls of CANN's operators are
replaced:

- aten operators: by the CPU's, on views of the device's memory, after the earlier work of the current stream;
- `npu_fusion_attention` and its gradient: by `fusion`, written from their documentation;
- copies that only move bytes remain torch_npu's. Between tensors of the device they are asynchronous, so that a missing
  wait shows. Other copies move the bytes, and the CPU converts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

DEVICE_KEY, AUTOGRAD_KEY = "PrivateUse1", "AutogradPrivateUse1"
# The allocator, and operators that inspect a tensor or read one number of it.
TORCH_NPUS_OWN = (
    *("set_", "resize_", "record_stream", "is_pinned", "_pin_memory", "is_set_to", "_local_scalar_dense"),
    *("get_storage_size", "copy_memory_", "unsafe_empty_with_format", "empty_with_format", "empty_with_swapped_memory"),
)
FRESH = ("aten::empty.memory_format", "aten::empty_strided")
_LIBRARIES: list[torch.library.Library] = []  # a registration ends with its library


def install() -> None:
    """Replace the operators of CANN. Called once per process, after the import of torch."""
    import torch_npu  # noqa: F401  (first, whatever order the entry points come in)

    aten, npu = torch.library.Library("aten", "IMPL"), torch.library.Library("npu", "IMPL")
    _LIBRARIES.extend((aten, npu))
    special = {"aten::copy_": _copy(), "aten::_to_copy": _to_copy, "aten::contiguous": _contiguous}
    for name in FRESH:
        special[name] = _fresh(torch.library.get_kernel(name, DEVICE_KEY))
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(DEVICE_KEY):
        if name in special:
            aten.impl(name, special[name], DEVICE_KEY)
        elif (op := _operator(name)) and _computes(op):
            aten.impl(name, _on_the_host(op), DEVICE_KEY)
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(AUTOGRAD_KEY):
        if (op := _operator(name)) and op.has_kernel_for_dispatch_key("CompositeImplicitAutograd"):
            # torch_npu defines gradients of some operators that torch decomposes: decompose them again.
            aten.impl(name, op.decompose, AUTOGRAD_KEY)
            aten.impl(name, op.decompose, DEVICE_KEY)
    for name in ("npu_fusion_attention", "npu_fusion_attention_grad"):
        npu.impl(name, _fusion(name), DEVICE_KEY)


def _operator(name: str) -> Any:
    """Return torch's operator of that name; None if torch_npu adds it."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None


def _computes(op: Any) -> bool:
    """Return whether an operator of aten computes numbers, unlike views and allocations."""
    schema = op._schema
    packet = schema.name.partition("::")[2]
    if op.namespace != "aten" or packet in TORCH_NPUS_OWN or not torch._C._dispatch_has_kernel(op.name()):
        return False
    looks = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    on_cpu = any(op.has_kernel_for_dispatch_key(key) for key in ("CPU", "CompositeExplicitAutograd"))
    return not looks and (on_cpu or op.has_kernel_for_dispatch_key("CompositeImplicitAutograd"))


# --------------------------------------------------------------------------------------------- memory


def _caught_up() -> None:
    """Wait for the earlier work of the current stream, as a kernel on this stream would."""
    import torch_npu

    stream = torch_npu._C._npu_getCurrentRawStream(torch_npu._C._npu_getDevice())  # torch_npu's task queue is empty now
    if _runtime().aclrtSynchronizeStream(ctypes.c_void_p(stream)):
        raise RuntimeError("work on this stream failed: see the output of the stand-in for CANN")


@lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libascendcl.so")


def _on_device(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == "npu"


def _host_view(x: Any) -> Any:
    """Return a CPU tensor on the memory of an NPU tensor, and any other object unchanged."""
    if not _on_device(x):
        return x
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return torch.empty(0, dtype=x.dtype).set_(whole.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _to_device(x: Any) -> Any:
    """Return an NPU tensor with the numbers of a CPU tensor, and any other object unchanged."""
    if not isinstance(x, Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="npu")
    _host_view(made).copy_(x)
    return made


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """Apply `change` to every element of nested lists and tuples."""
    if isinstance(x, (list, tuple)):
        return [_each(change, y) for y in x] if isinstance(x, list) else tuple(_each(change, y) for y in x)
    return change(x)


def _host_argument(x: Any) -> Any:
    """Return an argument of an operator as its CPU kernel takes it."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return None if isinstance(x, torch.Generator) else _host_view(x)


# ---------------------------------------------------------------------------------------- operators


def _on_the_host(op: Any) -> Callable[..., Any]:
    """Return the CPU's kernel of an operator, in the device's memory."""
    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    names = [op._schema.arguments[i].name for i in written]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _caught_up()
        result = op(*_each(_host_argument, args), **{k: _each(_host_argument, v) for k, v in kwargs.items()})
        if not written:
            return _each(_to_device, result)
        targets = [kwargs[n] if n in kwargs else args[i] for i, n in zip(written, names, strict=True)]
        _resized(targets, op, result)
        if not op._schema.returns:
            return None
        return targets[0] if len(op._schema.returns) == 1 else tuple(targets)

    return kernel


def _resized(targets: list[Any], op: Any, result: Any) -> None:
    """Copy each `out=` that was empty, and therefore got new memory on the host, to the device."""
    results = result if isinstance(result, tuple) else (result,)
    for target, made in zip(targets, results, strict=False):
        if _on_device(target) and isinstance(made, Tensor) and target.shape != made.shape:
            assert target.numel() == 0, f"{op} resizes an output that is in use"
            target.resize_(made.shape)
            _host_view(target).copy_(made)


def _fusion(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        from standin import fusion

        _caught_up()
        here = getattr(fusion, name)(*_each(_host_view, args), **{k: _host_view(v) for k, v in kwargs.items()})
        return _each(_to_device, here)

    return kernel


def _fresh(original: Any) -> Callable[..., Tensor]:
    """Return torch_npu's allocation, which also fills memory if torch is set to do so (as in tests)."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = original.call_boxed(keys, *args, **kwargs)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
            _caught_up()
            _fill(_host_view(made))
        return made

    return kernel


def _fill(x: Tensor) -> None:
    """Fill as torch does: with NaN, or with the largest integer."""
    if x.is_floating_point() or x.is_complex():
        x.fill_(float("nan"))
    else:
        x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


# -------------------------------------------------------------------------------------------- copies


def _copy() -> Callable[..., Tensor]:
    original = torch.library.get_kernel("aten::copy_", DEVICE_KEY)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def bytes_only(target: Tensor, source: Tensor) -> bool:
        same = target.dtype == source.dtype and target.shape == source.shape
        return same and target.is_contiguous() and source.is_contiguous()

    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        if bytes_only(self, src):
            original.call_boxed(keys, self, src, non_blocking)
        elif _on_device(self) and _on_device(src):
            _caught_up()
            _host_view(self).copy_(_host_view(src))
        elif _on_device(self):  # convert on the host, move the bytes, spread them on the device
            there = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            original.call_boxed(keys, there, src.to(self.dtype).expand(self.shape).contiguous(), False)
            self.copy_(there)
        else:
            here = torch.empty(src.shape, dtype=src.dtype)
            original.call_boxed(keys, here, src.contiguous(), False)
            self.copy_(here)
        return self

    return copy_


def _to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    like = torch.empty_like(self, device="meta", memory_format=memory_format or torch.preserve_format)
    where = self.device if device is None else torch.device(device)
    made = torch.empty_strided(like.shape, like.stride(), dtype=dtype or self.dtype, device=where)
    return made.copy_(self, non_blocking)


def _contiguous(self: Tensor, memory_format: Any = torch.contiguous_format) -> Tensor:
    return self if self.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)
