"""Search machine code for sm_90 matrix products that may take their operands' addresses from the wrong path.

A wgmma product (HGMMA in machine code) reads the addresses of its operands in shared memory, their matrix descriptors,
from uniform registers: `gdesc[UR4]` is UR4 to UR7. ptxas 12.8 has written a descriptor that two loops share before the
first loop only::

    UR4 = the base of shared memory
      |
      +-- no turns for loop 1? ---+
      |                           |
    UR4 = Q's descriptor          |
    loop 1: HGMMA gdesc[UR4]      |
      |                           |
      +---------------------------+
      |
    loop 2: HGMMA gdesc[UR4]      <- the base of shared memory if loop 1 was skipped

The PTX was correct. Results were wrong without a warning, or an address was outside memory. This happened to the
portable forward kernel if values are smaller than heads and are loaded by pointers; `triton_kernel` then compiles it
for two warps. `suspicious` follows each descriptor back through moves, additions and masks, and reports every register
on the way whose last write may be in several places, or in none.

A value that was saved to an ordinary register or to local memory and restored is the same value. Values that depend on
a loop's counter come from other instructions (ULEA, UIMAD). The search ends before these, at the shift that makes an
address a descriptor, so it misses faults before the shift and in a carry (UP0). It also reports two places that write
the same value on two correct paths: check these by hand.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

START = -1
"""Index of the start of the program, where no register has a value."""

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_\w+):")
_REGISTER = re.compile(r"(U?R|M)(\d+)")
_SPILL = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]")
_COPIES = ("MOV", "UMOV", "R2UR", "STL", "LDL", "IMAD")  # IMAD as 0 * 0 + x


@dataclass(slots=True)
class Instruction:
    """A line of machine code.

    Registers are ordinary ones (R4), uniform ones (UR4), and words of local memory for spills: M20 is the one at
    [R1+0x50]. `before` has the indices of the instructions that may run immediately before.
    """

    address: str
    guard: str | None
    name: str
    operands: list[str]
    writes: list[str]
    before: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.address} ({self.name} {', '.join(self.operands)})"

    @property
    def kind(self) -> str:
        """The name without its modifiers."""
        return self.name.partition(".")[0]

    def copied(self, register: str) -> str | None:
        """Return the register whose value this instruction copies to `register`; None if it is no copy."""
        if self.kind not in _COPIES or (self.kind == "IMAD" and self.operands[1:-1] != ["RZ", "RZ"]):
            return None
        sources = self.sources(register)
        return sources[-1] if sources and _REGISTER.fullmatch(self.operands[-1]) else None

    def sources(self, register: str) -> list[str]:
        """Return the registers from which this instruction computes `register`, word by word."""
        word = self.writes.index(register)
        terms = [term.removeprefix("-") for term in self.operands[1:]]
        return [shifted(term, word) for term in terms if _REGISTER.fullmatch(term)]


def parse(sass: str) -> list[Instruction]:
    """Return the instructions of one kernel."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            address, guard, name, text = found.groups()
            operands = [_operand(part.strip()) for part in text.split(",")]
            code.append(Instruction(address, guard, name, operands, list(_written(name, operands))))
    for i, instruction in enumerate(code):
        for follower in _followers(i, instruction, labels):
            if follower < len(code):
                code[follower].before.append(i)
    for i, instruction in enumerate(code):
        if i == 0 or not instruction.before:
            instruction.before.append(START)
    return code


def last_writes(code: list[Instruction], at: int, register: str) -> set[int]:
    """Return the indices of the possible last writes of a register before an instruction, guarded or not."""
    found: set[int] = set()
    seen: set[int] = set()
    todo = list(code[at].before)
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        writes = i == START or register in code[i].writes
        if writes:
            found.add(i)
        if i != START and (not writes or code[i].guard):
            todo += code[i].before
    return found


def shifted(register: str, by: int) -> str:
    """Return the register whose number is higher by `by`."""
    found = _REGISTER.fullmatch(register)
    assert found is not None, register
    return f"{found[1]}{int(found[2]) + by}"


def _operand(text: str) -> str:
    """Return an operand without hints, and spilled memory by its name."""
    spill = _SPILL.fullmatch(text)
    return f"M{int(spill[1] or '0', 16) // 4}" if spill else text.removesuffix(".reuse")


def _followers(i: int, x: Instruction, labels: dict[str, int]) -> Iterator[int]:
    """Yield the indices of instructions that may run next. BSYNC, which joins threads, precedes its label."""
    if x.kind in ("BRA", "BRX"):
        yield from (labels[label] for label in re.findall(r"\.L_\w+", " ".join(x.operands)))
    # BRA with a predicate before its label, and BRA.DIV, may not jump.
    leaves = x.kind == "BRX" or (x.kind in ("BRA", "EXIT") and len(x.operands) == 1)
    if x.guard or not leaves:
        yield i + 1


def _written(name: str, operands: list[str]) -> Iterator[str]:
    """Yield the registers that an instruction writes: its first operand that is no predicate."""
    target = next((o for o in operands[:2] if not re.fullmatch(r"U?P[T\d]", o)), "")
    if _REGISTER.fullmatch(target) and not name.startswith(("BAR", "WARPSYNC")):
        yield from (shifted(target, word) for word in range(_words(name)))


def _words(name: str) -> int:
    """Return the number of registers that an instruction writes."""
    if product := re.match(r"HGMMA\.64x(\d+)x", name):
        return int(product[1]) // (2 if ".F32" in name else 4)
    if re.search(r"\.128|\.M88\.4", name):
        return 4
    return 2 if re.search(r"\.64\b|\.WIDE|^CS2R(?!\.32)", name) else 1


_PASSED_ON = ("UIADD3", "ULOP3", "USGXT")  # instructions that make a descriptor from another uniform register
_NOT_FOLLOWED = ("CALL", "RET", "JMP", "JMX")


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """An instruction, by its index, and the register that it left a value in."""

    index: int
    register: str


def disassembler() -> Path:
    """Return the path of the nvdisasm that comes with Triton; it may be absent."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def _unchecked(tool: Path) -> str:
    return f"matrix descriptors were not checked: there is no {tool}"


def check(cubin: bytes, tool: Path | None = None) -> tuple[str, ...]:
    """Return `suspicious` of a compiled kernel, or one line if nvdisasm (default: `disassembler()`) is absent."""
    tool = disassembler() if tool is None else tool
    if not tool.exists():
        return (_unchecked(tool),)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True)
    return tuple(suspicious(done.stdout))


def suspicious(sass: str) -> list[str]:
    """Return a line for each register of a descriptor with several possible origins. `sass` is nvdisasm's text."""
    code = parse(sass)
    todo = [(i, register) for i, x in enumerate(code) for register in _descriptors(x)]
    if not todo:
        return ["matrix descriptors were not checked: no HGMMA instruction was read"]
    unchecked = [f"matrix descriptors were not checked beyond {x}" for x in code if x.kind in _NOT_FOLLOWED]
    found: dict[frozenset[Origin], str] = {}
    seen = set(todo)
    for at, register in todo:  # grows
        origins = _origins(code, at, register)
        values = {_value(code, origin) for origin in origins}
        if len(values) > 1 or START in values:
            found.setdefault(origins, f"{register} of {code[at]} comes from {_describe(code, origins)}")
        new = {step for origin in origins for step in _made_of(code, origin)} - seen
        todo += sorted(new)
        seen |= new
    return unchecked + list(found.values())


def _descriptors(product: Instruction) -> list[str]:
    """Return the uniform registers of a product's descriptors: A and B, or only B if A is in ordinary registers."""
    if product.kind != "HGMMA":
        return []
    first = next(found[1] for text in product.operands if (found := re.match(r"gdesc\[(UR\d+)\]", text)))
    in_registers = re.match(r"R\d", product.operands[1]) is not None
    return [shifted(first, word) for word in range(2 if in_registers else 0, 4)]


def _origins(code: list[Instruction], at: int, register: str) -> frozenset[Origin]:
    """Return the possible origins, behind copies, of the value of a register that an instruction reads."""
    found: set[Origin] = set()
    todo = [(at, register)]
    for place, name in todo:  # grows
        for i in last_writes(code, place, name):
            source = None if i == START else code[i].copied(name)
            if source is None:
                found.add(Origin(i, name))
            elif (i, source) not in todo:
                todo.append((i, source))
    return frozenset(found)


def _made_of(code: list[Instruction], origin: Origin) -> list[tuple[int, str]]:
    """Return the uniform registers from which a value was computed, with the instruction that reads them."""
    if origin.index == START or code[origin.index].kind not in _PASSED_ON:
        return []
    return [(origin.index, source) for source in code[origin.index].sources(origin.register)]


def _value(code: list[Instruction], origin: Origin) -> object:
    """Return a key that is equal for origins of equal values, such as several writes of one constant."""
    if origin.index == START:
        return START
    made = (code[origin.index].name, *code[origin.index].operands[1:])
    return origin if any(re.search(r"R\d|^M\d", part) for part in made) else made


def _describe(code: list[Instruction], origins: frozenset[Origin]) -> str:
    return " or ".join("nowhere" if o.index == START else str(code[o.index]) for o in sorted(origins))
