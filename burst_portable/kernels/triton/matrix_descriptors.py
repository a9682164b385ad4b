"""A guard on machine code: where an sm_90 matrix product may take its operands' addresses from the wrong path.

A wgmma product (HGMMA in machine code) reads where its operands lie in shared memory, their matrix descriptors, from
uniform registers: `gdesc[UR4]` is UR4 to UR7. ptxas 12.8 was seen to write the descriptor that two loops share ahead
of the first loop only::

    UR4 = the base of shared memory
      |
      +-- no turns for loop 1? ---+
      |                           |
    UR4 = Q's descriptor          |
    loop 1: HGMMA gdesc[UR4]      |
      |                           |
      +---------------------------+
      |
    loop 2: HGMMA gdesc[UR4]      <- the base of shared memory, where loop 1 was jumped around

The PTX was right; results were wrong without a warning, or an address lay outside memory. So it was with the portable
forward kernel where values are smaller than heads and come by pointers. `suspicious` follows each
descriptor back through moves, additions and masks, and tells of every register on the way that may have been written
last in several places, or in none.

A value that waited in an ordinary register or in local memory and came back is the same value. What a loop's counter
decides comes through other instructions (ULEA, UIMAD), and the search ends before them, at the shift that makes an
address a descriptor: it sees no fault further up, nor one in a carry (UP0). Two places that make the same value on two
good paths are told of too, and a person has to look.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_portable.kernels.triton.sass import START, Instruction, last_writes, parse, shifted

_PASSED_ON = ("UIADD3", "ULOP3", "USGXT")  # instructions that make a descriptor from another uniform register
_RULES = b"1"  # to be changed with `suspicious`: findings in the cache were made by these rules
_KEPT = "matrix_descriptors.json"
_NOT_FOLLOWED = ("CALL", "RET", "JMP", "JMX")


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """An instruction, by its index, and the register that it left a value in."""

    index: int
    register: str


def faults(compiled: Any) -> tuple[str, ...]:
    """`check` of a kernel that Triton compiled and that is about to run; nothing but for sm_90.

    The answer lies in Triton's cache from then on. Where there is no nvdisasm, that is warned of.
    """
    from triton.runtime.cache import get_cache_manager

    cubin, ptx = compiled.asm.get("cubin"), compiled.asm.get("ptx", "wgmma")
    if cubin is None or compiled.metadata.target.arch != 90 or "wgmma" not in ptx:
        return ()
    if not (tool := _disassembler()).exists():
        warnings.warn(_unchecked(tool), RuntimeWarning, stacklevel=2)
        return ()
    cache = get_cache_manager(hashlib.sha256(_RULES + cubin).hexdigest())
    if kept := cache.get_file(_KEPT):
        return tuple(json.loads(Path(kept).read_text(encoding="utf-8")))
    found = check(cubin)
    cache.put(json.dumps(found), _KEPT, binary=False)
    return found


def _disassembler() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def _unchecked(tool: Path) -> str:
    return f"matrix descriptors were not checked: there is no {tool}"


def check(cubin: bytes) -> tuple[str, ...]:
    """`suspicious` of a compiled kernel; nvdisasm comes with Triton, and where it does not, that is told."""
    if not (tool := _disassembler()).exists():
        return (_unchecked(tool),)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True)
    return tuple(suspicious(done.stdout))


def suspicious(sass: str) -> list[str]:
    """A line for each register on a descriptor's way that may come from several places; `sass` is nvdisasm's text."""
    code = parse(sass)
    todo = [(i, register) for i, x in enumerate(code) for register in _descriptors(x)]
    if not todo:
        return ["matrix descriptors were not checked: no HGMMA instruction was read"]
    blind = [f"matrix descriptors were not checked beyond {x}" for x in code if x.kind in _NOT_FOLLOWED]
    found: dict[frozenset[Origin], str] = {}
    seen = set(todo)
    for at, register in todo:  # grows
        origins = _origins(code, at, register)
        values = {_value(code, origin) for origin in origins}
        if len(values) > 1 or START in values:
            found.setdefault(origins, f"{register} of {code[at]} comes from {_told(code, origins)}")
        new = {step for origin in origins for step in _made_of(code, origin)} - seen
        todo += sorted(new)
        seen |= new
    return blind + list(found.values())


def _descriptors(product: Instruction) -> list[str]:
    """The uniform registers with a product's descriptors: of A and B, or of B where A is in ordinary registers."""
    if product.kind != "HGMMA":
        return []
    first = next(found[1] for text in product.operands if (found := re.match(r"gdesc\[(UR\d+)\]", text)))
    in_registers = re.match(r"R\d", product.operands[1]) is not None
    return [shifted(first, word) for word in range(2 if in_registers else 0, 4)]


def _origins(code: list[Instruction], at: int, register: str) -> frozenset[Origin]:
    """Where the value of a register may have been made that an instruction reads, seen through copies."""
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
    """The uniform registers, as an instruction reads them, that a value was passed on from."""
    if origin.index == START or code[origin.index].kind not in _PASSED_ON:
        return []
    return [(origin.index, source) for source in code[origin.index].sources(origin.register)]


def _value(code: list[Instruction], origin: Origin) -> object:
    """Equal for origins of equal values: one instruction, or several that write the same constant."""
    if origin.index == START:
        return START
    made = (code[origin.index].name, *code[origin.index].operands[1:])
    return origin if any(re.search(r"R\d|^M\d", part) for part in made) else made


def _told(code: list[Instruction], origins: frozenset[Origin]) -> str:
    return " or ".join("nowhere" if o.index == START else str(code[o.index]) for o in sorted(origins))
