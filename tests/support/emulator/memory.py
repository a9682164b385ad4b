"""Define the values of a kernel: register tiles, pointers, descriptors, shared memory, barriers, pending products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

TORCH = {
    gl.float32: torch.float32, gl.bfloat16: torch.bfloat16, gl.float16: torch.float16,
    gl.int32: torch.int32, gl.int64: torch.int64,
}  # fmt: skip
GLUON = {torch_dtype: dtype for dtype, torch_dtype in TORCH.items()}


class Tile:
    """A tensor in registers."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def dtype(self) -> Any:
        return GLUON[self.x.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.x.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        if dtype == gl.uint32:  # torch does not compare uint32
            assert bitcast, "a conversion that no kernel has needed yet"
            return Tile(self.x.long() & 0xFFFFFFFF)
        return Tile(self.x.to(TORCH[dtype]))

    def __getitem__(self, at: Any) -> Tile:
        return Tile(self.x[at])

    def __neg__(self) -> Tile:
        return Tile(-self.x)


def _operator(name: str) -> Callable[[Tile, Any], Tile]:
    def apply(self: Tile, other: Any) -> Any:
        if isinstance(other, Product | Pointer):
            return NotImplemented
        return Tile(getattr(self.x, name)(plain(other)))

    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "or",
              "lt", "le", "gt", "ge", "eq", "ne"):  # fmt: skip
    _special = f"__{_name}__"
    setattr(Tile, _special, _operator(_special))


def plain(x: Any) -> Any:
    assert not isinstance(x, Product), "a product is read before warpgroup_mma_wait"
    return x.x if isinstance(x, Tile) else x


class Scalar(int):
    """A number of a program, which kernels widen."""

    def to(self, dtype: Any) -> int:
        return int(self)


class Pointer:
    """A pointer into the memory of a tensor: one address, or a tile of addresses."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        """Return a pointer to the first element of a tensor, up to the end of its storage."""
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(x.as_strided((size,), (1,)))

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=GLUON[self.memory.dtype])

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.memory, self.at + plain(step))

    def load(self, mask: Any = None, other: Any = None) -> Any:
        if not isinstance(self.at, Tensor):
            assert self.at >= 0, "an address before the tensor's first"
            return self.memory[self.at].item()
        at, mask = self._addresses(mask)
        fill = torch.nan if other is None and self.memory.is_floating_point() else other or 0
        return Tile(torch.where(mask, self.memory[at], torch.tensor(fill, dtype=self.memory.dtype)))

    def store(self, value: Any, mask: Any = None) -> None:
        at, mask = self._addresses(mask)
        self.memory[at[mask]] = plain(value).to(self.memory.dtype).expand(at.shape)[mask]

    def _addresses(self, mask: Any) -> tuple[Tensor, Tensor]:
        mask = torch.ones_like(self.at, dtype=torch.bool) if mask is None else plain(mask).expand(self.at.shape)
        at = torch.where(mask, self.at, 0).long()
        assert (at >= 0).all(), "an address before the tensor's first"
        return at, mask


class Descriptor:
    """A TMA descriptor of the blocks of a tensor. Elements outside the tensor read as 0 and are never written."""

    layout = None

    def __init__(self, x: Tensor, block: Sequence[int]) -> None:
        self.x, self.block = x, list(block)
        self.dtype = GLUON[x.dtype]
        self.block_type = SimpleNamespace(nbytes=x.element_size() * torch.Size(block).numel())

    def read(self, at: Sequence[int]) -> Tensor:
        assert at[-1] * self.x.element_size() % 16 == 0, "TMA reads from multiples of 16 bytes only"
        block = torch.zeros(self.block, dtype=self.x.dtype)
        there, here = self._inside(at)
        block[here] = self.x[there]
        return block

    def write(self, at: Sequence[int], block: Tensor, add: bool) -> None:
        there, here = self._inside(at)
        self.x[there] = block[here] + (self.x[there] if add else 0)

    def _inside(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        there, here = [], []
        for start, size, whole in zip(at, self.block, self.x.shape, strict=True):
            first, last = min(max(start, 0), whole), max(0, min(start + size, whole))
            there.append(slice(first, max(first, last)))
            here.append(slice(first - start, max(first, last) - start))
        return tuple(there), tuple(here)


class Shared:
    """Shared memory as threads and as TMA and wgmma see it.

    `fence` is called after each store of a thread. Engines do not see the store before the thread's fence.
    """

    def __init__(self, threads: Tensor, engines: Tensor, fence: Callable[[Shared], None]) -> None:
        self.threads, self.engines, self._fence = threads, engines, fence

    @classmethod
    def allocate(cls, dtype: Any, shape: Sequence[int], fence: Callable[[Shared], None]) -> Shared:
        fill = torch.nan if dtype.is_floating() else -1
        return cls(*(torch.full(tuple(shape), fill, dtype=TORCH[dtype]) for _ in range(2)), fence)

    def load(self, layout: Any) -> Tile:
        return Tile(self.threads.clone())

    def store(self, tile: Tile) -> None:
        assert tile.dtype == self.dtype, "a store converts nothing"
        self.threads.copy_(tile.x)
        _poison(self.engines)
        self._fence(self)

    def start_load(self) -> None:
        """Fill the memory with NaN until `end_load`."""
        _poison(self.threads)
        _poison(self.engines)

    def end_load(self, block: Tensor) -> None:
        self.threads.copy_(block)
        self.engines.copy_(block)

    @property
    def dtype(self) -> Any:
        return GLUON[self.threads.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.threads.shape)

    def _both(self, view: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(view(self.threads), view(self.engines), self._fence)

    def index(self, i: int) -> Shared:
        return self._both(lambda x: x[i])

    def permute(self, order: Sequence[int]) -> Shared:
        return self._both(lambda x: x.permute(tuple(order)))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return self._both(lambda x: x.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._both(lambda x: x.view(tuple(shape)))

    def seen_as(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared | Turned:
        size = torch.Size(shape).numel()
        view = self._both(lambda x: x.view(-1).view(TORCH[dtype])[:size].view(tuple(shape)))
        if layout is None or not hasattr(layout, "offset_bases"):
            return view
        return Turned(view, rows_of_lines(tuple(map(tuple, layout.offset_bases))), 0)


class Turned:
    """Write-only shared memory whose rows are in another order than its lines."""

    def __init__(self, lines: Shared, rows: list[int], dim: int) -> None:
        self._lines, self._rows, self._dim = lines, rows, dim

    def permute(self, order: Sequence[int]) -> Turned:
        assert tuple(order) == (1, 0)
        return Turned(self._lines.permute(order), self._rows, 1 - self._dim)

    def store(self, tile: Tile) -> None:
        self._lines.store(Tile(tile.x.index_select(self._dim, torch.tensor(self._rows))))


@cache
def rows_of_lines(bases: tuple[tuple[int, int], ...]) -> list[int]:
    """Return the row in each line of 128 or 64 bytes, for a linear layout that keeps the swizzle of TMA."""
    width = 1 << sum(row == 0 for row, _ in bases[: next(i for i, (row, _) in enumerate(bases) if row)])
    lines = [(row, column) for row, column in bases[width.bit_length() - 1 :] if row]
    chunk = min(column for _, column in lines[:3] if column)
    swizzle = {8: [1, 2, 4], 4: [0, 1, 2]}[width // chunk]  # in chunks of 16 bytes per line
    assert [column // chunk for _, column in lines] == [*swizzle, *[0] * (len(lines) - 3)], "not the swizzle of TMA"
    return [sum(row for i, (row, _) in enumerate(lines) if at >> i & 1) for at in range(1 << len(lines))]


def _poison(x: Tensor) -> None:
    x.fill_(torch.nan if x.is_floating_point() else -1)


class Barrier:
    """An mbarrier. A phase ends when all threads have arrived and all bytes are present."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.missing, self.bytes, self.phase = name, 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int, more: int = 0) -> None:
        assert count <= self.missing, f"more arrivals at {self.name} than it counts"
        self.missing -= count
        self.add(more)

    def add(self, count: int) -> None:
        self.bytes += count
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count


class Barriers:
    """Several barriers, one per index."""

    def __init__(self, name: str, count: int) -> None:
        self._each = [Barrier(f"{name}[{i}]") for i in range(count)]

    def index(self, i: int) -> Barrier:
        return self._each[i]


class Product:
    """A pending or completed wgmma."""

    def __init__(self, a: Any, b: Shared, acc: Any) -> None:
        self._a, self._b, self._acc = a, b, acc
        self._made: Tensor | None = None

    def run(self) -> None:
        left = self._a.engines if isinstance(self._a, Shared) else plain(self._a)
        made = left.float() @ self._b.engines.float()
        self._made = made if self._acc is None else made + plain(self.value_of(self._acc))

    @staticmethod
    def value_of(x: Any) -> Any:
        """Return the result of a completed product, or any other value unchanged."""
        if not isinstance(x, Product):
            return x
        assert x._made is not None, "a product is read before warpgroup_mma_wait"
        return Tile(x._made)
