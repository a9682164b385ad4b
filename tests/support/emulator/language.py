"""Define the names of Gluon on a `Machine`, and those of Triton that the prepare kernel uses."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl

from tests.support.emulator.memory import (
    TORCH,
    Barrier,
    Barriers,
    Descriptor,
    Pointer,
    Product,
    Scalar,
    Shared,
    Tile,
    plain,
)

if TYPE_CHECKING:
    from tests.support.emulator.machine import Machine


def language_of(machine: Machine) -> dict[str, Any]:
    """Return the names that the kernels import."""
    language = _Language(machine)
    return {
        "gl": language,
        "tl": language,
        "mbarrier": _MBarrier(machine),
        "tma": _Tma(machine),
        "fence_async_shared": partial(_fence, machine),
        "warpgroup_mma": partial(_mma, machine),
        "warpgroup_mma_wait": partial(_mma_wait, machine),
        "tma_load": _Tma(machine).load,
        "tma_store": _Tma(machine).store,
        "tma_add": partial(_copy_out, machine, add=True),
        "reinterpret": lambda buffer, dtype, shape, layout: buffer.seen_as(dtype, shape, layout),
    }


class _OnMachine:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine


def _no_layout(*_: Any, **__: Any) -> None:
    """Ignore layouts."""


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return staticmethod(lambda x: Tile(function(plain(x))))


def _either(tensors: Callable[..., torch.Tensor], numbers: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        a, b = plain(a), plain(b)
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            return numbers(a, b)
        like = a if isinstance(a, torch.Tensor) else b
        return Tile(tensors(*(torch.as_tensor(x, dtype=like.dtype) for x in (a, b))))

    return staticmethod(apply)


class _Language(_OnMachine):
    float32, bfloat16, float16 = gl.float32, gl.bfloat16, gl.float16
    int32, int64, uint32, constexpr = gl.int32, gl.int64, gl.uint32, gl.constexpr
    static_range = range
    NVMMASharedLayout = NVMMADistributedLayout = SwizzledSharedLayout = staticmethod(_no_layout)
    SliceLayout = DotOperandLayout = BlockedLayout = staticmethod(_no_layout)

    exp, exp2, log, log2 = (_elementwise(f) for f in (torch.exp, torch.exp2, torch.log, torch.log2))
    maximum, minimum = _either(torch.maximum, max), _either(torch.minimum, min)

    def program_id(self, axis: int) -> Scalar:
        return Scalar(self._machine.me.program[axis])

    def num_programs(self, axis: int) -> int:
        return self._machine.me.grid[axis]

    @staticmethod
    def arange(start: int, stop: int, layout: Any = None) -> Tile:
        return Tile(torch.arange(start, stop, dtype=torch.int32))

    @staticmethod
    def zeros(shape: Sequence[int], dtype: Any, layout: Any = None) -> Tile:
        return Tile(torch.zeros(tuple(shape), dtype=TORCH[dtype]))

    @staticmethod
    def convert_layout(x: Tile, layout: Any) -> Tile:
        return Tile(plain(x))

    @staticmethod
    def cast(x: int, dtype: Any) -> int:
        return x

    @staticmethod
    def expand_dims(x: Tile, axis: int) -> Tile:
        return Tile(plain(x).unsqueeze(axis))

    @staticmethod
    def broadcast(a: Tile, b: Tile) -> tuple[Tile, Tile]:
        return tuple(Tile(x) for x in torch.broadcast_tensors(plain(a), plain(b)))

    @staticmethod
    def reshape(x: Tile, shape: Sequence[int]) -> Tile:
        return Tile(plain(x).reshape(tuple(shape)))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        condition = plain(condition)
        if isinstance(condition, torch.Tensor):
            return Tile(torch.where(condition, plain(a), plain(b)))
        return a if condition else b

    @staticmethod
    def max(x: Tile, axis: int) -> Tile:
        return Tile(plain(x).amax(axis))

    @staticmethod
    def sum(x: Tile, axis: int) -> Any:
        total = plain(x).sum(axis, dtype=plain(x).dtype)
        return Tile(total) if total.dim() else total.item()

    def inline_asm_elementwise(self, asm: str, constraints: str, args: Sequence[Tile], *, dtype: Any, **_: Any) -> Any:
        if "%ctaid.x" in asm:
            return self.program_id(0)
        if "mul.f32" in asm:  # the products are computed whether or not a warp would skip them
            return Tile(plain(args[0]) * plain(args[1]))
        if "selp.f32" in asm:
            scores, first, last = (plain(x) for x in args)
            columns = torch.arange(scores.shape[1])
            return Tile(scores.masked_fill((columns < first) | (columns >= last), float("-inf")))
        if "rcp.approx" in asm:  # tanh of half of it, in base 2
            return Tile(1.0 - 2.0 / (1.0 + torch.exp2(plain(args[0]))))
        if "ld.relaxed" in asm and len(args) == 1:
            return args[0].load()
        if "ld.relaxed" in asm:
            place, awaited = args
            self._machine.turn(lambda: place.load() == awaited, "its turn to add")
            return awaited
        if "st.relaxed" in asm:
            (place, value), me = args, self._machine.me
            self._machine.turn(lambda: not me.writes, "its additions")
            place.memory[place.at] = value
            return value
        assert asm.startswith("cvt.rn."), f"an instruction that is not emulated: {asm}"
        return args[0].to(dtype)

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
        return pointer.load(mask, other)

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
        pointer.store(value, mask)

    def atomic_add(self, pointer: Pointer, value: Any, sem: str, mask: Any = None) -> Any:
        self._machine.turn()
        if isinstance(value, Tile):
            pointer.store(Tile(pointer.load(mask, 0.0).x + value.x), mask)
            return None
        before = pointer.load()
        pointer.memory[pointer.at] = before + value
        return before

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype == gl.int64:  # only barriers, which are called as the kernel calls them
            place = sys._getframe(1)
            name = linecache.getline(place.f_code.co_filename, place.f_lineno).split("=")[0].strip()
            return Barrier(name) if len(shape) == 1 else Barriers(name, shape[0])
        return Shared.allocate(dtype, shape, lambda stored: self._machine.me.unfenced.append(stored))

    def warp_specialize(self, partitions: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
        machine, me = self._machine, self._machine.me
        started = []
        for i, (function, arguments) in enumerate(partitions):
            started.append(type(me)(f"partition {i} of {me.name}", me.program, me.grid))
            machine.start(started[-1], function, arguments)
        machine.turn(lambda: all(one.over for one in started), "its partitions")


class _MBarrier(_OnMachine):
    MBarrierLayout = staticmethod(_no_layout)

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.init(count)

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.arrive(1, size)

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: bool = True) -> None:
        if pred:
            barrier.arrive(count)
        self._machine.turn()

    def wait(self, barrier: Barrier, phase: int, pred: bool = True) -> None:
        self._machine.turn(lambda: not pred or barrier.phase & 1 != phase, f"phase {phase} of {barrier.name}")


class _Tma(_OnMachine):
    def load(self, descriptor: Descriptor, at: Any, barrier: Barrier, place: Shared) -> None:
        place.start_load()

        def copy() -> None:
            place.end_load(descriptor.read(at))
            barrier.add(-descriptor.block_type.nbytes)

        self._machine.copies.append(copy)
        self._machine.turn()

    def store(self, descriptor: Descriptor, at: Any, source: Shared) -> None:
        _copy_out(self._machine, descriptor, at, source, add=False)

    def store_wait(self, pendings: int) -> None:
        me = self._machine.me
        self._machine.turn(lambda: me.stores <= pendings, "its TMA stores")


def _copy_out(machine: Machine, descriptor: Descriptor, at: Any, source: Shared, add: bool) -> None:
    me = machine.me
    me.stores += 1
    me.writes += 1

    def read() -> None:
        block = source.engines.clone()
        me.stores -= 1

        def write() -> None:
            descriptor.write(at, block, add)
            me.writes -= 1

        machine.copies.append(write)

    machine.copies.append(read)
    machine.turn()


def _fence(machine: Machine) -> None:
    for place in machine.me.unfenced:
        place.engines.copy_(place.threads)
    machine.me.unfenced.clear()


def _mma(machine: Machine, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async, "a product that is waited for at once is not emulated"
    machine.me.products.append(made := Product(a, b, acc if use_acc else None))
    machine.turn()
    return made


def _mma_wait(machine: Machine, outstanding: int, deps: Sequence[Any]) -> Any:
    products = machine.me.products
    while len(products) > outstanding:
        products.popleft().run()
    values = [Product.value_of(one) for one in deps]
    return values[0] if len(values) == 1 else tuple(values)
