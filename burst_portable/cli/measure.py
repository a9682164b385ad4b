"""`burst-portable measure`: what this machine's kernels and links do, as a hardware spec file for `auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from burst_portable import __version__
from burst_portable.backends.selection import known
from burst_portable.cli import PROGRAM
from burst_portable.cli.flags import LENGTH, METAVAR, naming_rank, ranks_asked, tokens
from burst_portable.cli.output import JSON_HELP, JsonOption, console, table
from burst_portable.cli.run.job import DTYPES
from burst_portable.config import Launched, launched
from burst_portable.errors import InputError, unknown_name
from burst_portable.utils.text import bytes_text, percent, scaled, seconds_text
from burst_portable.utils.values import size

if TYPE_CHECKING:
    from burst_portable.backends.base import Backend
    from burst_portable.cli.measure_worker import MeasureJob

_LONGEST = 1 << 20  # tokens in one kernel call
_SHORTEST = 8  # tokens: the shorter call has a quarter of them
_MOST = 1 << 14  # ranks, and heads


def measure(
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Start so many local processes: unless given, one per device, or 2 on CPUs; torchrun's are joined."
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(help=f"auto, {', '.join(known())}; `{PROGRAM} doctor` says which can run here, and why not."),
    ] = "auto",
    kernel: Annotated[str, typer.Option(help="The local kernel; unless given, the one that `auto` takes.")] = "auto",
    heads: Annotated[int, typer.Option(help="Query heads; a multiple of the K/V heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="K/V heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Numbers in a head.")] = 128,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; unless given, bfloat16, or float32 on CPUs.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=tokens,
            metavar=METAVAR,
            help="Tokens a rank of the longer kernel call, the shorter one has a quarter; unless given, 16384, or 512 "
            f"on CPUs, where ten times as many take a hundred times as long; {LENGTH}",
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks a node, where there are several nodes: links inside and between apart.")
    ] = None,
    json_name: Annotated[str | None, typer.Option("--json", metavar="[FILE]", help=JSON_HELP)] = None,
) -> int:
    """Measure this machine's kernels and links, so that strategy "auto" chooses with them and not with a guess.

    All ranks measure at once, and the slowest counts: the local kernel, forward and backward, at two lengths; messages
    to the next rank and to all others by size; memory; how far messages hold kernels up. The machine should have
    nothing else to do. With --json FILE it writes a file for BURST_HARDWARE_SPEC and for `plan --hardware-spec`.

    Examples:

    burst-portable measure --ranks 2 --json hardware.json
    torchrun --nproc-per-node 8 -m burst_portable measure --json hardware.json
    """
    from burst_portable.cli.measure_worker import measure_joined, measure_local

    place = launched()
    first = place is None or place.rank == 0
    with naming_rank(place):
        json_option = JsonOption(json_name, writes=first)
        asked = ranks_asked(ranks, place)
        job = _job(asked, backend, kernel, heads, kv_heads, head_dim, dtype, seq_len, ranks_per_node, place)
        view = View(quiet=not first, stderr=json_option.stdout)
        with view.progress() as told:
            facts = measure_local(job, told) if place is None else measure_joined(job, place, told)
    if first:
        view.show(facts, json_option.file)
        json_option.write({"schema": facts["schema"], "version": __version__, **facts})
    return 0


def _job(
    ranks: int | None, backend: str, kernel: str, heads: int, kv_heads: int, head_dim: int, dtype: str | None,
    seq_len: int | None, ranks_per_node: int | None, place: Launched | None,
) -> MeasureJob:  # fmt: skip
    """All that can be refused is refused here, before a process starts."""
    import torch

    from burst_portable.backends.selection import choose_kernel
    from burst_portable.cli.backends import choose_backend
    from burst_portable.cli.measure_worker import MeasureJob
    from burst_portable.cli.run.job import check_processes, check_room, cores
    from burst_portable.config import from_environment
    from burst_portable.measuring.measurement import HOST, Shape, measured_call
    from burst_portable.strategies.planner import check_heads
    from burst_portable.utils.values import check_divides

    _check_numbers(ranks, heads, kv_heads, head_dim, seq_len, ranks_per_node)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    check_heads(heads, kv_heads)
    chosen, _ = choose_backend(backend, 1 if place or ranks is None else ranks)
    capabilities = chosen.capabilities
    count = ranks or _devices(chosen)
    if ranks_per_node is not None:
        check_divides(ranks_per_node, count)
    if place is None and not capabilities.streams:
        check_processes(count)
    made = getattr(torch, dtype) if dtype else torch.bfloat16 if capabilities.streams else torch.float32
    if not capabilities.streams:
        numbers = (seq_len or HOST.length) * head_dim * (2 * heads + 2 * kv_heads)  # q, k, v and dO
        check_room(numbers * made.itemsize, 1 if place else count)
    call = measured_call(Shape(heads, kv_heads, head_dim), made, capabilities.device_type, seq_len or HOST.length)
    choose_kernel(chosen, call, from_environment().kernel if kernel == "auto" else kernel)
    return MeasureJob(
        ranks=count,
        backend=chosen.name,
        device_type=capabilities.device_type,
        kernel=kernel,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        length=seq_len,
        ranks_per_node=ranks_per_node,
        threads=max(1, cores() // count) if place is None else torch.get_num_threads(),
    )


def _check_numbers(
    ranks: int | None, heads: int, kv_heads: int, head_dim: int, seq_len: int | None, ranks_per_node: int | None
) -> None:
    from burst_portable.strategies.planner import LARGEST_HEAD

    for name, number, most in (
        ("--ranks", ranks, _MOST), ("--heads", heads, _MOST), ("--kv-heads", kv_heads, _MOST),
        ("--head-dim", head_dim, LARGEST_HEAD), ("--seq-len", seq_len, _LONGEST),
        ("--ranks-per-node", ranks_per_node, _MOST),
    ):  # fmt: skip
        if number is not None and size(name, number) > most:
            raise InputError(f"{name} is too large", got=number, allowed=f"at most {most}")
    if seq_len is not None and seq_len < _SHORTEST:
        allowed = f"at least {_SHORTEST}"
        raise InputError("--seq-len is too short to tell two lengths apart", got=seq_len, allowed=allowed)


def _devices(backend: Backend) -> int:
    """A rank each; on the host, where all share the cores, two."""
    import torch

    capabilities = backend.capabilities
    return int(torch.get_device_module(capabilities.device_type).device_count()) if capabilities.streams else 2


Facts = dict[str, Any]
BUSY = 1.3
"""Times its shortest round: a rate whose rounds differ by more was measured beside something else."""
_BUSY = "the machine was busy; measure again"


class View:
    """A console; `quiet` on ranks that leave the talking to the first, `stderr` where stdout is for JSON."""

    def __init__(self, *, quiet: bool, stderr: bool) -> None:
        self._console = console(quiet=quiet, stderr=stderr, soft_wrap=True)
        self._progress = console(stderr=True, quiet=quiet)

    @contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """What is being measured: on a terminal one line that goes, in a file or a log a line each."""
        if not self._progress.is_terminal:
            yield lambda what: self._progress.print(f"measuring {what}", markup=False)
            return
        with self._progress.status("starting") as status:
            yield lambda what: status.update(f"measuring {escape(what)}")

    def show(self, facts: Facts, file: Path | None) -> None:
        """A row for each rate, and how to use them."""
        say, ranks = self._console.print, facts["ranks"]
        about = f"{ranks} rank{'' if ranks == 1 else 's'} on {facts['device']} ({facts['backend']})"
        heads = f"{facts['heads']} query and {facts['kv_heads']} K/V heads of {facts['head_dim']}, {facts['dtype']}"
        say(
            Text.assemble(("measured", "bold"), f" {about}, kernel {facts['kernel']}, {heads}; the slowest rank counts")
        )
        rows = table("rate", "value", "how", left=("value", "how"))
        for name, value in facts["hardware"].items():
            method = facts["methods"][name]
            style = "" if method["measured"] else "dim"
            rows.add_row(Text(name, style), Text(_value(name, value), style), Text(method["method"], style))
        say("", rows, "", sep="\n")
        rounds = {name: method["max_over_min"] or 1.0 for name, method in facts["methods"].items()}
        if busy := [f"{name} by {most:.2g} times" for name, most in rounds.items() if most > BUSY]:
            say(Text.assemble(("warning", "yellow"), f"  rounds differ, {', '.join(busy)}: {_BUSY}"), "", sep="\n")
        told = [
            f"with --json FILE they are kept, for BURST_HARDWARE_SPEC=FILE and `{PROGRAM} plan --hardware-spec FILE`"
        ]
        if file is not None:
            told = [
                f"auto chooses with them where BURST_HARDWARE_SPEC={file} is set on every rank, or with "
                f"Config(hardware_spec={str(file)!r});",
                f"`{PROGRAM} plan --hardware-spec {file} ...` predicts with them anywhere",
            ]
        say("\n".join(told), markup=False)


def _value(name: str, value: Any) -> str:
    if name in ("p2p_bandwidth", "peer_copy_bandwidth", "all_to_all_bandwidth"):
        return "\n".join(f"{bytes_text(size)}: {_rate(bandwidth)}" for size, bandwidth in value) or "none"
    if name in ("tflops", "backward_tflops"):
        return scaled(value * 1e12, "FLOP/s") if value else "as forward"
    if name in ("intra_node_bandwidth", "inter_node_bandwidth", "memory_bandwidth"):
        return _rate(value) if value else "not priced"
    if name.endswith("latency"):
        return seconds_text(value)
    if name in ("comm_slowdown", "comm_slowdown_high_priority"):
        return f"{percent(value[0])} forward, {percent(value[1])} backward" if value else "as comm_slowdown"
    if name == "multi_launch_efficiency":
        return percent(value)
    if name == "long_kv_efficiency":
        rows, share = value
        return f"{percent(share)} from {rows:,} rows on" if rows else "as few rows"
    if name == "kernel":
        return ", ".join(trait for trait, declared in value.items() if declared) or "none"
    if name == "block":
        return f"{value} x {value}" if value > 1 else "exact pairs"
    if name == "ranks_per_node":
        return f"of {value} ranks" if value else "one"
    return str(value)


def _rate(bandwidth: float) -> str:
    return scaled(bandwidth * 1e9, "B/s")
