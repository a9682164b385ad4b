"""`burst-portable kernels`: the portable kernels as machine code for six chips, made and read with no device."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burst_portable.cli.output import JSON_HELP, JsonOption, console, on_stderr, table
from burst_portable.errors import BackendUnavailableError, InputError
from burst_portable.utils.text import bytes_text

if TYPE_CHECKING:
    from burst_portable.kernels.triton.machine_code import Allowed, Record

SCHEMA = "burst_portable.kernels/2"
_BLOCKS = 14  # characters: half of their description, which takes two lines in a narrow terminal
STEP = 16  # elements: kernels are compiled for contiguous tensors whose strides are multiples of it


def kernels(
    target: Annotated[
        list[str] | None, typer.Option(help="A chip, such as sm_90 or gfx942; repeatable; all unless given.")
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option(help=f"A head size, a multiple of {STEP}; repeatable; 64 and 128 unless given.", min=16, max=256),
    ] = None,
    json_name: Annotated[str | None, typer.Option("--json", metavar="[FILE]", help=JSON_HELP)] = None,
) -> int:
    """Compile the portable Triton kernels ahead of time (bf16) and read what the compiler says of them.

    Registers, spills, shared memory, occupancy, matrix instruction, seconds: for every chip that is asked for, with
    no device. A kernel takes seconds to compile, all of them some minutes. Exit code 1 when a kernel breaks a limit: no
    matrix instruction, too much shared memory, spills that nobody has justified, a warning of ptxas that a pipeline was
    serialised, or, on sm_90, an operand's address that may come from a path that did not run.

    Examples:

    burst-portable kernels --target sm_90 --target gfx942 --head-dim 128
    """
    json_option = JsonOption(json_name)
    for size in head_dim or ():
        if size % STEP:
            near = f"the nearest are {size - size % STEP} and {size - size % STEP + STEP}"
            allowed = f"multiples of {STEP} from 16 to 256"
            raise InputError("--head-dim is not a head size of the kernels", got=size, allowed=allowed, next_step=near)
    try:
        from burst_portable.kernels.triton import machine_code as ahead
    except ModuleNotFoundError as error:
        raise BackendUnavailableError("compiling kernels needs the package triton, which is not installed") from error
    chosen = target or list(ahead.TARGETS)
    heads = head_dim or list(ahead.HEADS)
    total = len(chosen) * len(heads) * len(ahead.KERNELS)
    records = _compiled(ahead.kernel_table(chosen, heads), total, quiet=json_option.stdout)
    wrong = {index: found for index, record in enumerate(records) if (found := ahead.problems(record))}
    if not json_option.stdout:
        _show(records, wrong, ahead.JUSTIFIED)
    rows = [{**asdict(r), "problems": wrong.get(i, [])} for i, r in enumerate(records)]
    json_option.write({"schema": SCHEMA, "triton": _triton_version(), "kernels": rows})
    return 1 if wrong else 0


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _compiled(table: Any, total: int, *, quiet: bool) -> list[Record]:
    """All records, with a progress bar: one takes seconds."""
    from rich.progress import track

    return list(track(table, "compiling", total=total, **on_stderr(quiet=quiet)))


def _show(records: list[Record], wrong: dict[int, list[str]], justified: dict[tuple[str, str, int], Allowed]) -> None:
    columns = ("chip", "kernel", "D", "blocks", "registers", "scratch", "shared", "occupancy", "")
    title = f"portable kernels, bf16, triton {_triton_version()}"
    rows = table(*columns, left=("kernel", "blocks"), title=title)
    for column in rows.columns:
        if column.header == "blocks":
            column.min_width = _BLOCKS
        else:
            column.no_wrap, column.overflow = True, "ellipsis"
    for index, r in enumerate(records):
        registers = f"{r.registers}+{r.accumulators}" if r.accumulators else str(r.registers)
        told = (r.blocks, registers, str(r.scratch), bytes_text(r.shared), str(r.occupancy))
        rows.add_row(r.target, r.kernel, str(r.head_dim), *told, "[red]no" if index in wrong else "[green]ok")
    say = console()
    say.print(rows, "")
    say.print(f"compiled in {sum(r.seconds for r in records):.1f} s")
    for target, instruction in dict.fromkeys((r.target, r.instruction) for r in records if r.instruction):
        say.print(f"{target} multiplies with {instruction}", markup=False)
    for r in records:
        if r.scratch and (allowed := justified.get((r.target, r.kernel, r.head_dim))):
            why = f"{r.scratch} bytes of scratch of {allowed.scratch} allowed, {allowed.why}"
            say.print(f"{r.target} {r.kernel} D={r.head_dim}: {why}", markup=False)
    for index, found in wrong.items():
        r = records[index]
        say.print(f"{r.target} {r.kernel} D={r.head_dim}: {'; '.join(found)}", style="red", markup=False)
