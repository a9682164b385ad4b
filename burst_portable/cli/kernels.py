"""Define `burst-portable kernels`, which compiles the portable kernels for several chips without a device."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from burst_portable.cli.flags import DTYPES, RanksPerNode, integer_option, tokens_option
from burst_portable.cli.machine_limits import cores
from burst_portable.cli.output import JsonName, JsonOption, console, on_stderr, table
from burst_portable.cli.strategy_flags import flag
from burst_portable.errors import BackendUnavailableError, InputError
from burst_portable.utils.text import bytes_text

if TYPE_CHECKING:
    from burst_portable.kernels.triton.machine_code import Allowed, Record

SCHEMA = "burst_portable.kernels/2"
_BLOCKS_WIDTH = 14  # characters: half of the longest description, which takes two lines in a narrow terminal
STEP = 16  # elements: strides of the contiguous tensors are multiples of it


def kernels(
    target: Annotated[
        list[str] | None, typer.Option(help="Target chip, such as sm_90 or gfx942; repeatable. Default: all.")
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        integer_option(
            help=f"Elements per head, a multiple of {STEP} up to 256; repeatable. Default: 64 and 128.", min=16, max=256
        ),
    ] = None,
    warm: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model, as for `run`, whose kernels are compiled. Default: none."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"With --warm: {', '.join(DTYPES)}.")] = "bfloat16",
    seq_len: Annotated[
        list[int] | None,
        tokens_option(help="With --warm: tokens of the sequence; repeatable. Default: 4096."),
    ] = None,
    ranks: Annotated[int, integer_option(help="With --warm: ranks that share the sequence, at least 1.", min=1)] = 1,
    ranks_per_node: RanksPerNode = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="With --warm: strategy; repeatable. Default: all that auto compares."),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(help="With --warm: mask, as for `plan`; repeatable. Default: those of the model."),
    ] = None,
    deterministic: Annotated[bool, typer.Option(help="With --warm: compile reproducible gradients.")] = False,
    jobs: Annotated[
        int | None, integer_option(help="With --warm: threads that compile, at least 1. Default: one per core.", min=1)
    ] = None,
    json_name: JsonName = None,
) -> int:
    """Compile the portable Triton kernels (bf16) for several chips, without a device, and check the machine code.

    The table lists registers, spills, shared memory, occupancy and the matrix instruction. All kernels take some
    minutes. Exit code 1 if a kernel breaks a limit: no matrix instruction, too much shared memory, spills without a
    justification, or a ptxas warning about a serialized pipeline. On sm_90, operand addresses that may come from a
    path that did not run are errors too.

    With --warm, compile the kernels of a model's attention into Triton's cache, forward and backward, so that a job
    compiles none. The target is the GPU of this machine, or that of --target. A job finds the kernels if it has the
    same Triton, this version of burst_portable, and a --seq-len and the --ranks that were given.

    Examples:

    burst-portable kernels --target sm_90 --target gfx942 --head-dim 128

    burst-portable kernels --warm FOLDER_OR_HUB_ID --target sm_90 --ranks 8 --seq-len 128k
    """
    json_option = JsonOption(json_name)
    if warm is not None:
        return _warm(
            warm, target, head_dim, dtype, seq_len, ranks, ranks_per_node, strategy, mask, jobs, json_option,
            deterministic=deterministic,
        )  # fmt: skip
    _check_no_model_options(
        dtype=None if dtype == "bfloat16" else dtype, seq_len=seq_len, ranks=None if ranks == 1 else ranks,
        ranks_per_node=ranks_per_node, strategy=strategy, mask=mask, deterministic=deterministic or None, jobs=jobs,
    )  # fmt: skip
    for size in head_dim or ():
        if size % STEP:
            raise InputError(
                "--head-dim is not a head size of the kernels",
                got=size,
                allowed=f"multiples of {STEP} from 16 to 256",
                next_step=f"use {size - size % STEP} or {size - size % STEP + STEP}",
            )
    _check_triton()
    from burst_portable.kernels.triton import machine_code

    targets = target or list(machine_code.TARGETS)
    head_dims = head_dim or list(machine_code.HEADS)
    total = sum(len(machine_code.launched_kernels(one, size)) for one in targets for size in head_dims)
    progress = track(
        machine_code.kernel_table(targets, head_dims), "compiling", total=total, **on_stderr(quiet=json_option.stdout)
    )
    records = list(progress)
    problems = {index: found for index, record in enumerate(records) if (found := machine_code.problems(record))}
    if not json_option.stdout:
        _show(records, problems, machine_code.JUSTIFIED)
    rows = [{**asdict(r), "problems": problems.get(i, [])} for i, r in enumerate(records)]
    json_option.write({"schema": SCHEMA, "triton": _triton_version(), "kernels": rows})
    return 1 if problems else 0


def _check_no_model_options(**options: object) -> None:
    """Raise `InputError` for options of --warm that were given without it: they would change nothing."""
    if given := [flag(name) for name, value in options.items() if value]:
        raise InputError(f"{given[0]} requires --warm", next_step="name the model with --warm, or leave it out")


def _warm(
    model: str,
    target: list[str] | None,
    head_dim: list[int] | None,
    dtype: str,
    seq_len: list[int] | None,
    ranks: int,
    ranks_per_node: int | None,
    strategy: list[str] | None,
    mask: list[str] | None,
    jobs: int | None,
    json_option: JsonOption,
    *,
    deterministic: bool,
) -> int:
    """Compile the kernels of a model: see `cli.warm`."""
    if head_dim:
        raise InputError("--head-dim and --warm exclude each other", next_step="the model's config has its head size")
    if target and len(target) > 1:
        raise InputError("--warm compiles for one target", got=", ".join(target), next_step="run it once per target")
    _check_triton()
    from burst_portable.cli import warm

    job = warm.Job(
        model, target[0] if target else warm.default_target(), dtype, tuple(seq_len or (4096,)), ranks, ranks_per_node,
        tuple(strategy or ()), tuple(mask or ()), deterministic,
    )  # fmt: skip
    return warm.warm(job, jobs or cores(), json_option)


def _check_triton() -> None:
    if find_spec("triton") is None:
        raise BackendUnavailableError("compiling kernels needs the package triton, which is not installed")


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _show(
    records: list[Record], problems: dict[int, list[str]], justified: dict[tuple[str, str, int], Allowed]
) -> None:
    columns = ("chip", "kernel", "D", "blocks", "registers", "scratch", "shared", "occupancy", "")
    title = f"portable kernels, bf16, triton {_triton_version()}"
    rows = table(*columns, left=("kernel", "blocks"), title=title)
    for column in rows.columns:
        if column.header == "blocks":
            column.min_width = _BLOCKS_WIDTH
        else:
            column.no_wrap, column.overflow = True, "ellipsis"
    for index, r in enumerate(records):
        registers = f"{r.registers}+{r.accumulators}" if r.accumulators else str(r.registers)
        facts = (r.blocks, registers, str(r.scratch), bytes_text(r.shared), str(r.occupancy))
        result = "[red]failed" if index in problems else "[green]ok"
        rows.add_row(r.target, r.kernel, str(r.head_dim), *facts, result)
    out = console()
    out.print(rows, "")
    out.print(f"compiled in {sum(r.seconds for r in records):.1f} s")
    for target, instruction in dict.fromkeys((r.target, r.instruction) for r in records if r.instruction):
        out.print(f"{target} multiplies with {instruction}", markup=False)
    for r in records:
        if r.scratch and (allowed := justified.get((r.target, r.kernel, r.head_dim))):
            reason = f"{r.scratch} of {allowed.scratch} allowed bytes of scratch, {allowed.why}"
            out.print(f"{r.target} {r.kernel} D={r.head_dim}: {reason}", markup=False)
    for index, found in problems.items():
        r = records[index]
        out.print(f"{r.target} {r.kernel} D={r.head_dim}: {'; '.join(found)}", style="red", markup=False)
