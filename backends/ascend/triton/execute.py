"""Execute triton-ascend's linalg IR with NumPy, one operation after the other. xDSL parses it.

It is slow and implements only the operations of these kernels; others raise. Dtypes are those of the IR, except bf16,
which NumPy lacks: such numbers are float32 and rounded to bf16 after each operation.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, FloatAttr, IntegerAttr
from xdsl.parser import Parser

DYNAMIC = -(1 << 63)
DTYPES = {
    "bf16": np.float32,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "i1": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "index": np.int64,
}


def rounded(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bf16, ties to even. The result has dtype float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, bits.view(np.float32)).astype(np.float32)


class Memory:
    """A memref: some elements of a flat buffer."""

    def __init__(self, buffer: np.ndarray, offset: int = 0, sizes: Iterable[int] = (), strides: Iterable[int] = ()):
        self.buffer, self.offset = buffer, offset
        self.sizes, self.strides = tuple(sizes), tuple(strides)

    def view(self) -> np.ndarray:
        """Return the elements as a writeable array."""
        steps = [s * self.buffer.itemsize for s in self.strides]
        assert self.offset >= 0, "below the buffer"
        last = self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        assert 0 in self.sizes or last < self.buffer.size, "past the buffer"
        return np.lib.stride_tricks.as_strided(self.buffer[self.offset :], self.sizes, steps)


class Program:
    """A kernel's IR, ready to run.

    Args:
        text: the IR from `lower`.
        optimizer: triton-adapter-opt, which prints the generic form that xDSL reads.
    """

    def __init__(self, text: str, optimizer: Path) -> None:
        command = [str(optimizer), "--mlir-print-op-generic", "-"]
        generic = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
        context = Context(allow_unregistered=True)
        context.load_dialect(Builtin)
        module = Parser(context, generic).parse_module()
        (self._body,) = (op.regions[0].blocks[0] for op in module.walk() if _name(op) == "func.func")

    def run(self, arguments: list[Any], programs: int) -> None:
        """Run the programs of a one-dimensional launch in order. `arguments` are those of the kernel, in order."""
        unused = Memory(np.zeros(1, np.int8), 0, (1,), (1,))
        for program in range(programs):
            grid = (programs, 1, 1, program, 0, 0)
            every = [unused, unused, *arguments, *map(np.int32, grid)]  # locks, workspace, ..., sizes, numbers
            assert len(every) == len(self._body.args), "the kernel's arguments, and those of the runtime"
            with np.errstate(all="ignore"):
                _block(self._body, dict(zip(self._body.args, every, strict=True)))


# --------------------------------------------------------------------------------------------- reading


def _name(op: Any) -> str:
    return op.op_name.data if hasattr(op, "op_name") else op.name


def _attribute(op: Any, name: str) -> Any:
    return op.properties.get(name, op.attributes.get(name))


def _numbers(op: Any, name: str) -> list[int]:
    """Return the numbers of an attribute: array<i64: 1, 2> -> [1, 2]."""
    _, colon, text = str(_attribute(op, name)).partition(":")
    return [int(n) for n in re.findall(r"-?\d+", text)] if colon else []


def _element(type_: Any) -> str:
    return str(type_.element_type) if hasattr(type_, "element_type") else str(type_)


def _cast(x: Any, type_: Any) -> Any:
    """Convert to the element type of the IR."""
    name = _element(type_)
    return rounded(x) if name == "bf16" else np.asarray(x).astype(DTYPES[name])[()]


# ------------------------------------------------------------------------------------------- operations

Operation = Callable[[Any, list[Any], dict[Any, Any]], list[Any]]
OPERATIONS: dict[str, Operation] = {}


def operation(*names: str) -> Callable[[Operation], Operation]:
    """Register a function (op, operands, environment) -> results."""

    def register(function: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def _block(block: Any, environment: dict[Any, Any]) -> list[Any]:
    """Execute all operations of a block and return the operands of its terminator."""
    for op in block.ops:
        name = _name(op)
        operands = [environment[x] for x in op.operands]
        if name in ("scf.yield", "linalg.yield", "func.return"):
            return operands
        if name not in OPERATIONS:
            raise NotImplementedError(f"this IR has {name}, which no kernel of ours has needed yet")
        environment.update(zip(op.results, OPERATIONS[name](op, operands, environment), strict=True))
    return []


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("arith.addf", "arith.addi"), np.add),
    **dict.fromkeys(("arith.subf", "arith.subi"), np.subtract),
    **dict.fromkeys(("arith.mulf", "arith.muli"), np.multiply),
    "arith.divf": np.divide,
    "arith.negf": np.negative,
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.minnumf": np.fmin,
    "arith.maxnumf": np.fmax,
    "arith.minimumf": np.minimum,
    "arith.maximumf": np.maximum,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "math.exp": np.exp,
    "math.exp2": np.exp2,
    "math.log": np.log,
    "math.log2": np.log2,
    "math.sqrt": np.sqrt,
    "math.absf": np.abs,
    # MLIR divides integers towards zero.
    "arith.divsi": lambda a, b: np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)),
    "arith.remsi": np.fmod,
    **dict.fromkeys(
        (
            "arith.index_cast",
            "arith.sitofp",
            "arith.fptosi",
            "arith.extsi",
            "arith.trunci",
            "arith.extf",
            "arith.truncf",
        ),
        lambda a: a,
    ),
}


@operation(*ELEMENTWISE)
def _elementwise(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    return [_cast(ELEMENTWISE[_name(op)](*operands), op.results[0].type)]


INTEGERS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
# oeq ogt oge olt ole one; the unordered ones from 8 on are true for NaN, and only une is used
FLOATS = {1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal, 13: np.not_equal}


@operation("arith.cmpi", "arith.cmpf")
def _compare(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    kind = _attribute(op, "predicate").value.data
    return [(INTEGERS if _name(op) == "arith.cmpi" else FLOATS)[kind](*operands)]


@operation("arith.select")
def _select(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    return [np.where(*operands)] if np.ndim(operands[0]) else [operands[1] if operands[0] else operands[2]]


@operation("arith.constant")
def _constant(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    value = _attribute(op, "value")
    if isinstance(value, (IntegerAttr, FloatAttr)):
        return [_cast(value.value.data, value.type)]
    if str(value) in ("true", "false"):
        return [np.bool_(str(value) == "true")]
    raise NotImplementedError(f"this IR has a constant {value}: only numbers, true and false were needed yet")


@operation("linalg.fill")
def _fill(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    value, target = operands
    if isinstance(target, Memory):
        target.view()[...] = value
        return []
    return [np.full(op.results[0].type.get_shape(), value, target.dtype)]


@operation("linalg.broadcast")
def _broadcast(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    x = np.expand_dims(operands[0], tuple(_numbers(op, "dimensions")))
    return [np.broadcast_to(x, op.results[0].type.get_shape()).copy()]


@operation("linalg.transpose")
def _transpose(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    return [np.transpose(operands[0], _numbers(op, "permutation")).copy()]


@operation("linalg.matmul")
def _matmul(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    a, b, c = operands
    return [_cast(a.astype(np.float32) @ b.astype(np.float32) + c, op.results[0].type)]


@operation("linalg.reduce")
def _reduce(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    x, start = operands
    (combine, *_) = (_name(inner) for inner in op.regions[0].blocks[0].ops)
    together = {"arith.addf": np.sum, "arith.maxnumf": np.max, "arith.maximumf": np.max}[combine]
    return [_cast(ELEMENTWISE[combine](together(x, axis=tuple(_numbers(op, "dimensions"))), start), op.results[0].type)]


@operation("linalg.generic")
def _generic(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    """Execute a generic operation that depends only on its indices, such as a range."""
    body, shape = op.regions[0].blocks[0], op.results[0].type.get_shape()
    place = np.indices(shape)
    inner = {**environment, **dict(zip(body.args, operands, strict=True))}
    for step in body.ops:
        if _name(step) == "linalg.index":
            inner[step.results[0]] = place[_attribute(step, "dim").value.data].astype(np.int64)
    for step in body.ops:
        if _name(step) == "linalg.yield":
            return [_cast(np.broadcast_to(inner[step.operands[0]], shape), op.results[0].type)]
        if _name(step) != "linalg.index":
            values = OPERATIONS[_name(step)](step, [inner[x] for x in step.operands], inner)
            inner.update(zip(step.results, values, strict=True))
    raise AssertionError("a generic operation ends with a yield")


# ---------------------------------------------------------------------------------- tensors and memory


@operation("tensor.empty")
def _empty(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    dtype = DTYPES[_element(op.results[0].type)]
    fill = np.nan if np.issubdtype(dtype, np.floating) else 0
    return [np.full(op.results[0].type.get_shape(), fill, dtype)]


def _slices(op: Any, dynamic: list[Any]) -> tuple[list[int], list[int], list[int]]:
    """Return offsets, sizes and strides, with operands for the dynamic ones."""
    rest = iter(dynamic)
    offsets, sizes, strides = (
        [int(next(rest)) if n == DYNAMIC else n for n in _numbers(op, f"static_{what}")]
        for what in ("offsets", "sizes", "strides")
    )
    return offsets, sizes, strides


@operation("memref.reinterpret_cast")
def _reinterpret(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    (offset,), sizes, strides = _slices(op, operands[1:])
    return [Memory(operands[0].buffer, offset, sizes, strides)]


@operation("memref.subview")
def _subview(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    whole = operands[0]
    offsets, sizes, strides = _slices(op, operands[1:])
    start = whole.offset + sum(o * s for o, s in zip(offsets, whole.strides, strict=True))
    return [Memory(whole.buffer, start, sizes, [a * b for a, b in zip(strides, whole.strides, strict=True)])]


@operation("tensor.extract_slice")
def _extract_slice(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    parts = (slice(o, o + n * s, s) for o, n, s in zip(*_slices(op, operands[1:]), strict=True))
    return [operands[0][tuple(parts)]]


@operation("tensor.insert")
def _insert(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    x = operands[1].copy()
    x[tuple(map(int, operands[2:]))] = operands[0]
    return [x]


@operation("tensor.extract")
def _extract(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    return [operands[0][tuple(map(int, operands[1:]))]]


@operation("memref.alloc")
def _alloc(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    shape = op.results[0].type.get_shape()
    dtype = DTYPES[_element(op.results[0].type)]
    buffer = np.full(int(np.prod(shape)), np.nan if np.issubdtype(dtype, np.floating) else 0, dtype)
    return [Memory(buffer, 0, shape, [int(np.prod(shape[i + 1 :])) for i in range(len(shape))])]


@operation("memref.load")
def _load(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    return [operands[0].view()[tuple(map(int, operands[1:]))]]


@operation("memref.copy")
def _copy(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    operands[1].view()[...] = operands[0].view()
    return []


@operation("bufferization.to_tensor")
def _to_tensor(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    return [operands[0].view().copy()]


@operation("bufferization.materialize_in_destination", "hivm.hir.store")
def _store(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    operands[1].view()[...] = operands[0]
    return []


@operation("annotation.mark")
def _mark(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    return []


# -------------------------------------------------------------------------------------------- control


@operation("scf.for")
def _for(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    start, stop, step = map(int, operands[:3])
    carried, body = list(operands[3:]), op.regions[0].blocks[0]
    number = DTYPES[_element(body.args[0].type)]
    for i in range(start, stop, step):
        carried = _block(body, {**environment, **dict(zip(body.args, [number(i), *carried], strict=True))})
    return carried


@operation("scf.if")
def _if(op: Any, operands: list[Any], environment: dict[Any, Any]) -> list[Any]:
    region = op.regions[0] if operands[0] else op.regions[1]
    return _block(region.blocks[0], dict(environment)) if region.blocks else []
