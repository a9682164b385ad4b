"""NVIDIA's machine code as nvdisasm prints it: instructions, what they write, and how they follow one another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

START = -1
"""Stands among indices for the start of the program, where no register has a value."""

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_\w+):")
_REGISTER = re.compile(r"(U?R|M)(\d+)")
_SPILL = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]")
_COPIES = ("MOV", "UMOV", "R2UR", "STL", "LDL", "IMAD")  # IMAD as 0 * 0 + x


@dataclass(slots=True)
class Instruction:
    """A line of machine code.

    Registers are ordinary ones (R4), uniform ones (UR4) and, where those are spilled to, words of local memory: M20 is
    the one at [R1+0x50]. `before` has the indices of the instructions that may have run just before.
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
        """The name without what qualifies it."""
        return self.name.partition(".")[0]

    def copied(self, register: str) -> str | None:
        """The register of which the value that this writes to `register` is a plain copy."""
        if self.kind not in _COPIES or (self.kind == "IMAD" and self.operands[1:-1] != ["RZ", "RZ"]):
            return None
        sources = self.sources(register)
        return sources[-1] if sources and _REGISTER.fullmatch(self.operands[-1]) else None

    def sources(self, register: str) -> list[str]:
        """The registers that are read for what this writes to `register`, where each word is made of its like."""
        word = self.writes.index(register)
        terms = [term.removeprefix("-") for term in self.operands[1:]]
        return [shifted(term, word) for term in terms if _REGISTER.fullmatch(term)]


def parse(sass: str) -> list[Instruction]:
    """The instructions of one kernel."""
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
    """The indices of what may have written a register last before an instruction; one under a guard may not have."""
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
    """The register `by` places after another."""
    found = _REGISTER.fullmatch(register)
    assert found is not None, register
    return f"{found[1]}{int(found[2]) + by}"


def _operand(text: str) -> str:
    """An operand without its hints, spilled memory by its name."""
    spill = _SPILL.fullmatch(text)
    return f"M{int(spill[1] or '0', 16) // 4}" if spill else text.removesuffix(".reuse")


def _followers(i: int, x: Instruction, labels: dict[str, int]) -> Iterator[int]:
    """The indices of what may run right after it. BSYNC, where threads join again, stands before its label."""
    if x.kind in ("BRA", "BRX"):
        yield from (labels[label] for label in re.findall(r"\.L_\w+", " ".join(x.operands)))
    # BRA with a predicate before its label, and BRA.DIV, may not jump.
    leaves = x.kind == "BRX" or (x.kind in ("BRA", "EXIT") and len(x.operands) == 1)
    if x.guard or not leaves:
        yield i + 1


def _written(name: str, operands: list[str]) -> Iterator[str]:
    """The registers that an instruction writes: its first operand, where predicates do not count."""
    target = next((o for o in operands[:2] if not re.fullmatch(r"U?P[T\d]", o)), "")
    if _REGISTER.fullmatch(target) and not name.startswith(("BAR", "WARPSYNC")):
        yield from (shifted(target, word) for word in range(_words(name)))


def _words(name: str) -> int:
    """How many registers an instruction writes."""
    if product := re.match(r"HGMMA\.64x(\d+)x", name):
        return int(product[1]) // (2 if ".F32" in name else 4)
    if re.search(r"\.128|\.M88\.4", name):
        return 4
    return 2 if re.search(r"\.64\b|\.WIDE|^CS2R(?!\.32)", name) else 1
