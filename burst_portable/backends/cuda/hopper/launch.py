"""Launch the Hopper kernels with little host time: keep and reuse compiled kernels, tensor descriptors and tables.

Triton binds and specializes the arguments of each launch, and then looks up the compiled kernel. On the host this takes
longer than a short kernel takes on the device. Our kernels specialize only on the key that the caller passes. So the
compiled kernel is called directly, without Triton if the driver can be called (`backends.cuda.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from burst_portable.backends.cuda.driver import Bound, Described, kernel_driver, pack_described, ready
from burst_portable.backends.cuda.hopper.block_tables import LaunchTable, backward_table
from burst_portable.backends.cuda.hopper.configs import KEY_BLOCK, ForwardConfig, SplitConfig
from burst_portable.backends.cuda.hopper.cuts import (
    BackwardCut,
    PassSizes,
    adding_cuts,
    forward_cut,
    turns,
    writing_cuts,
)
from burst_portable.backends.cuda.hopper.outer_blocks import Span
from burst_portable.backends.cuda.hopper.saved_kernels import file_of, find, save
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import align_rows
from burst_portable.kernels.triton.arguments import (
    ALWAYS,
    LOG2_E,
    Address,
    compiled_kernel,
    name_compile_errors,
    unfinished,
)
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.utils.cache import Cache

_DESCRIPTORS = 8192  # maximum number of descriptors that are kept; a layer uses 13 per head group
_BOUND = 512  # maximum number of combinations of tensors for which a prepared launch is bound; 2 to 3 KB each
_COUNTERS = 1024  # counters per pool
ROWS_OF_TERMS = 64  # queries whose row terms a program of `prepare_kernel` computes


class Launcher:
    """Launcher of one kernel.

    Triton compiles the kernel of a key, once for all processes (`saved_kernels`). Launches go through the driver if it
    can be called, else through Triton.

    Args:
        name: Name of the jitted function.
        load: Returns that function. This imports Triton.
    """

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.folder: Path | None = None  # below which compiled kernels are saved; None: nowhere
        self._name, self._load = name, load
        self._launches: dict[Hashable, Callable[..., Bound | None]] = {}

    def __call__(
        self,
        key: tuple[Hashable, ...],
        grid: tuple[int, int, int],
        args: Sequence[Any],
        constants: Sequence[Any],
        options: dict[str, int],
        stream: int,
        renewed: Tensor | None = None,
    ) -> Bound | None:
        """Launch the kernel on the current device.

        Args:
            key: The index of the device, and everything on which `constants` and the types of `args` depend.
            grid: Number of programs along x, y and z.
            args: Arguments at run time, in the order of the kernel's signature.
            constants: Compile-time constants, which follow `args` in the signature.
            options: Launch options of Triton.
            stream: Current stream of the device.
            renewed: The one of `args` that is another tensor in each launch, if there is one: each key has one or none.

        Returns:
            The launch, for tensors with the same addresses, shapes, strides and dtypes; None if Triton launched it.
        """
        launch = self._launches.get(key)
        if launch is not None:
            return launch(grid, args, stream, renewed)
        driver, options = kernel_driver(), {**options, **ALWAYS}
        file = file_of(self.folder, self._name, "sm_90", key[1:], constants, options) if self.folder else None
        fills_cache = unfinished.get() is not None  # of Triton too, so a saved kernel is compiled again
        if file is not None and driver is not None and not fills_cache:
            if any(isinstance(a, Tensor) and a.is_meta for a in args):
                if file.is_file():  # the real launch reads it
                    return None
            elif (saved := find(file)) and (launch := ready(driver, saved, args, renewed)):
                self._launches[key] = launch
                return launch(grid, args, stream, renewed)
        configuration, next_step = f"{key}, {tuple(constants)}, {options}", "name another kernel, such as 'triton'"
        kernel = self._load()
        every = (*_for_triton(args), *constants)
        on_compiled = partial(save, file) if fills_cache and file is not None and not file.is_file() else None
        compiled = compiled_kernel(kernel, every, options, "sm_90", configuration, next_step, on_compiled)
        if compiled is None:
            self._launches[key] = _launch_nothing
            return None

        def by_triton(grid: tuple[int, int, int], args: Sequence[Any], stream: int, _: Tensor | None) -> None:
            compiled[grid](*_for_triton(args), *constants, stream=stream)

        packed = ready(driver, compiled, args, renewed)
        if packed is not None and file is not None:
            save(file, compiled)
        launch = packed or by_triton
        with name_compile_errors(kernel, "sm_90", configuration, next_step):  # Triton may compile a launcher
            bound = launch(grid, args, stream, renewed)
        self._launches[key] = launch
        return bound


def _launch_nothing(*_: object) -> None:
    """Launch a kernel whose tensors have no memory."""


def _for_triton(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with each descriptor replaced by that of Triton."""
    return [a.triton() if isinstance(a, Described) else a for a in args]


ABSENT_PROCESSORS = 132
"""Multiprocessors of an H100 SXM or H200, for which tensors of the device "meta" are compiled.

With another number, a few calls choose other blocks (`cuts.forward_cut`, `cuts.adding_cuts`).
"""


@cache
def processors(device: int | None) -> int:
    """Return the number of multiprocessors of a device. None is torch's device "meta"."""
    return ABSENT_PROCESSORS if device is None else torch.cuda.get_device_properties(device).multi_processor_count


class Descriptors:
    """TMA descriptors by address, shape, strides and block. They are reused because the allocator reuses addresses."""

    def __init__(self) -> None:
        self._kept: Cache[Hashable, Described] = Cache(_DESCRIPTORS)
        self._units: Cache[Hashable, tuple[int, ...]] = Cache(_DESCRIPTORS)

    def rows(self, name: str, x: Tensor, rows: int, columns: int) -> Described:
        """Return the descriptor of x [B, S, H, D] for blocks of `rows` rows and `columns` columns of one head."""
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, rows, columns)
        found = self._kept.get(key)
        if found is None:
            swizzle = min(128, columns * x.element_size())
            found = self._keep(key, x, [1, rows, 1, columns], swizzle, tma_strides(name, x))
        return found

    def panels(self, name: str, x: Tensor, rows: int, panels: tuple[int, int]) -> tuple[Described, Described]:
        """Return the descriptors of both panels of a head. If there is only one panel, return its descriptor twice."""
        first = self.rows(name, x, rows, panels[0])
        return first, self.rows(name, x, rows, panels[1]) if panels[1] else first

    def aligned_panels(
        self, name: str, x: Tensor, rows: int, panels: tuple[int, int]
    ) -> tuple[Tensor, tuple[Described, Described]]:
        """Return `x`, or a copy if TMA does not accept its strides or address, and the descriptors of its panels."""
        first = self._kept.get((x.data_ptr(), x.shape, x.stride(), x.dtype, rows, panels[0]))
        if first is None:
            x = align_rows(x)
            first = self.rows(name, x, rows, panels[0])
        return x, (first, self.rows(name, x, rows, panels[1]) if panels[1] else first)

    def vector(self, x: Tensor, rows: int) -> Described:
        """Return the descriptor of a matrix x for blocks of `rows` consecutive entries of one of its rows."""
        key = (x.data_ptr(), x.shape, x.stride(), rows)
        return self._kept.get(key) or self._keep(key, x, [1, rows], 0, list(x.stride()))

    def strides(self, name: str, x: Tensor, unit: int) -> tuple[int, ...]:
        """Return the strides of batch row, row and head as in `tma_strides`, in units of `unit` elements."""
        key = (x.shape, x.stride(), x.dtype, x.data_ptr() % 16, unit)
        found = self._units.get(key)
        if found is None:
            found = self._units.keep(key, tuple(s // unit for s in tma_strides(name, x)[:3]))
        return found

    def _keep(self, key: Hashable, x: Tensor, block: list[int], swizzle: int, strides: list[int]) -> Described:
        shape = list(x.shape)
        # One TMA copy is at most as wide as a swizzled line.
        box = (*block[:-1], min(block[-1], swizzle // x.element_size()) if swizzle else block[-1])
        driver = None if x.is_meta else kernel_driver()
        packed = b""
        if driver is not None:
            encoded = driver.tensor_map(x.data_ptr(), x.dtype, shape, strides, box, swizzle)
            packed = pack_described(encoded, shape, strides)
        triton = partial(_triton_descriptor, Address(x), shape, strides, block, swizzle)
        return self._kept.keep(key, Described(triton, box, swizzle, packed))


def _triton_descriptor(x: Address, shape: list[int], strides: list[int], block: list[int], swizzle: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    bits = 8 * x.dtype.itemsize
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))
    return TensorDescriptor(x, shape, strides, block, layout)


def tma_strides(name: str, x: Tensor) -> list[int]:
    """Return the strides of x [B, S, H, D]. A dimension of size 1 gets a stride that TMA accepts.

    Raises:
        UnsupportedError: TMA does not accept the strides or the address of `x`.
    """
    each = 16 // x.element_size()
    strides = [each * x.shape[3] if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    if x.stride(3) != 1 or any(s % each or s <= 0 for s in strides) or x.data_ptr() % 16:
        raise UnsupportedError(
            f"the hopper kernel cannot address {name}",
            got=f"strides {x.stride()} at byte {x.data_ptr() % 16} of 16",
            allowed="last stride 1, others multiples of 16 bytes, begun at a multiple of 16 bytes",
            next_step="make it contiguous or use the triton kernel",
        )
    return [*strides, 1]


def check_last_stride(name: str, x: Tensor) -> None:
    """Raise `UnsupportedError` if the last dimension of x is not contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise UnsupportedError(f"the last stride of {name} must be 1", got=x.stride(), next_step="make it contiguous")


def score_factor(call: AttentionCall) -> float:
    """Return the factor from QKᵀ to the exponent of 2 in the softmax or, with a softcap, in its tanh."""
    return call.scale * LOG2_E if call.softcap is None else 2.0 * call.scale / call.softcap * LOG2_E


class Compiled(Descriptors):
    """Launchers of all kernels, and their descriptors and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = _launcher("forward", "forward_kernel")
        self.backward = _launcher("backward", "backward_kernel")
        self.split_backward = _launcher("split_backward", "split_kernel")
        self.prepare = _launcher("backward", "prepare_kernel")
        self._counters: dict[Hashable, Iterator[Tensor]] = {}

    def save_in(self, folder: Path | None) -> None:
        """Save kernels that are compiled from now on below a folder, and look for them there. None: do neither."""
        for launcher in (self.forward, self.backward, self.split_backward, self.prepare):
            launcher.folder = folder

    def counter(self, device: torch.device, stream: int) -> Tensor:
        """Return an int32 counter of value 0 that no launch has used, from the stream's pool, which is cleared at once.

        For "meta", and during graph capture, return a new counter, which each replay of the graph clears.
        """
        if device.index is None or torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, dtype=torch.int32, device=device)
        key = (device.index, stream)
        found = next(self._counters.get(key, iter(())), None)
        if found is None:
            pool = self._counters[key] = iter(torch.zeros(_COUNTERS, dtype=torch.int32, device=device).unbind())
            found = next(pool)
        return found


def _launcher(module: str, name: str) -> Launcher:
    """Return the launcher of a jitted function of a module of this folder."""
    return Launcher(name, lambda: getattr(import_module(f"{__package__}.{module}"), name))


@cache
def compiled_kernels() -> Compiled:
    """Return the only `Compiled` of this process, so that each kernel is compiled once."""
    return Compiled()


C = TypeVar("C", ForwardConfig, BackwardCut, SplitConfig)


@dataclass(frozen=True, slots=True)
class PreparedLaunch(Generic[C]):
    """Arguments of a launch, except its tensors. A kernel keeps them for calls with equal tiles and sizes.

    Attributes:
        cut: Block sizes and other compile-time constants. A `BackwardCut` also defines the query heads per program and
            the keys that the launch computes.
        table: The int32 values of a `LaunchTable`, on the device. They list the blocks that each program computes.
        grid: Number of programs along x, y and z.
        heads: The kernel's arguments that map a program to a head, in the order of its signature.
        turns: int32 `LaunchTable.turns`, if additions to dQ are ordered.
        cleared: int32 per `ROWS_OF_TERMS` queries, if additions to dQ are ordered: 1 if `LaunchTable.cleared` has one.
        parts: See `LaunchTable`.
        bound: The launch itself and those that belong to it, with packed parameters, by everything that `placed`
            returns. Their other parameters depend on the tiles and the sizes, by which kernels find a prepared launch.
            `table` must live as long as they do.
    """

    cut: C
    table: Tensor
    grid: tuple[int, int, int]
    heads: tuple[int, ...]
    turns: Tensor | None = None
    cleared: Tensor | None = None
    parts: tuple[tuple[Span, int], ...] = ()
    bound: Cache[Hashable, tuple[Bound, ...]] = field(default_factory=lambda: Cache(_BOUND), compare=False)


def placed(call: AttentionCall, *tensors: Tensor) -> Hashable:
    """Return the numbers of a call, and the address, the strides and the dtype of each tensor of its launches."""
    return call.scale, call.softcap, *[part for x in tensors for part in (x.data_ptr(), x.stride(), x.dtype)]


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> PassSizes:
    """Return the sizes of a pass over these tensors."""
    batch, rows, heads, dim = q.shape
    return PassSizes(batch, rows, k.shape[1], heads, k.shape[2], dim, v.shape[3], processors(q.device.index))


def build_forward_launch(
    tiles: Tiles, sizes: PassSizes, device: torch.device, every_block: bool, yields_to_comm: bool
) -> PreparedLaunch[ForwardConfig]:
    """Return the launch of the forward (`cuts.forward_cut`).

    If `yields_to_comm`, each program ends after a few items (`cuts.turns`). Otherwise programs run until no item is
    left.
    """
    cut, table = forward_cut(tiles, sizes, every_block=every_block)
    items = table.blocks * sizes.all_heads
    side = sizes.heads_at_once(table, 1, sizes.keys * sizes.dim * 4)
    in_a_row = turns(table, sizes) if yields_to_comm else 0
    programs = -(-items // in_a_row) if in_a_row else min(items, sizes.processors)
    heads = (items, in_a_row, sizes.heads, sizes.group, table.blocks, side)
    return PreparedLaunch(cut, _upload(table, device), (programs, 1, 1), heads)


def build_adding_launches(
    tiles: Tiles, sizes: PassSizes, device: torch.device, ordered: bool
) -> tuple[PreparedLaunch[BackwardCut], ...]:
    """Return the launches of the backward that add to dK and dV (`cuts.adding_cuts`)."""
    return tuple(_build_backward_launch(*cut, sizes, device) for cut in adding_cuts(tiles, sizes, ordered=ordered))


def build_writing_launches(
    tiles: Tiles, sizes: PassSizes, device: torch.device, ordered: bool
) -> tuple[PreparedLaunch[BackwardCut], ...]:
    """Return the launches of the backward that write dK and dV (`cuts.writing_cuts`)."""
    return tuple(_build_backward_launch(*cut, sizes, device) for cut in writing_cuts(tiles, sizes, ordered=ordered))


def _build_backward_launch(
    cut: BackwardCut, table: LaunchTable, sizes: PassSizes, device: torch.device
) -> PreparedLaunch[BackwardCut]:
    """Return the launch for one cut of the backward and its table."""
    heads, group, span = sizes.heads, sizes.group, cut.span
    side = sizes.heads_at_once(table, span, sizes.bytes_of_queries)
    grid = (side, table.blocks, sizes.all_heads // span // side)
    arguments = (sizes.all_heads, heads, group, 1 if cut.separate else group, span, side)
    first_turns = cleared = None
    if cut.ordered:
        first_turns = torch.tensor(table.turns, dtype=torch.int32).to(device)
        parts = {
            part for start, stop in table.cleared for part in range(start // ROWS_OF_TERMS, -(-stop // ROWS_OF_TERMS))
        }
        marks = [int(part in parts) for part in range(-(-(sizes.rows + cut.config.BM) // ROWS_OF_TERMS))]
        cleared = torch.tensor(marks, dtype=torch.int32).to(device)
    return PreparedLaunch(cut, _upload(table, device), grid, arguments, first_turns, cleared, table.parts)


def build_split_launch(
    tiles: Tiles, sizes: PassSizes, device: torch.device, gradient: int, config: SplitConfig, whole: bool
) -> PreparedLaunch[SplitConfig]:
    """Return the launch of `split_backward` for one gradient: DQ, DK or DV.

    If `whole`, one program computes dK or dV of a block for all query heads of the K/V head, else for one.
    """
    heads, group = sizes.heads, sizes.group
    if gradient == 0:  # outer blocks of queries, inner blocks of keys
        turned = Tiles(Tile(t.k_start, t.k_stop, t.q_start, t.q_stop, -t.hi, -t.lo) for t in tiles)
        table = backward_table(turned, -1, config.BN, KEY_BLOCK, sizes.rows)
        span, read = 1, sizes.keys * sizes.dim * 4
    else:
        table = backward_table(tiles, sizes.rows, config.BN, KEY_BLOCK, sizes.keys)
        span, read = group if whole else 1, sizes.bytes_of_queries
    side = sizes.heads_at_once(table, span, read)
    grid = (side, table.blocks, sizes.all_heads // span // side)
    return PreparedLaunch(config, _upload(table, device), grid, (sizes.all_heads, heads, group, span, side))


def _upload(table: LaunchTable, device: torch.device) -> Tensor:
    """Copy the int32 values of a table to the device."""
    return torch.tensor(table.numbers, dtype=torch.int32).to(device)
