"""Define `burst-portable measure`, which writes the rates of this machine's kernels and links for `auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from burst_portable import __version__
from burst_portable.cli import PROGRAM, flags
from burst_portable.cli.backend_choice import choose_backend
from burst_portable.cli.flags import add_rank_to_errors, number_of_ranks
from burst_portable.cli.output import JsonName, JsonOption, console, table
from burst_portable.config import LauncherEnv, read_launcher_env
from burst_portable.errors import InputError, unknown_name
from burst_portable.utils.text import bytes_text, percent, scaled, seconds_text
from burst_portable.utils.values import size

if TYPE_CHECKING:
    from burst_portable.cli.measure_worker import MeasureJob

_MAX_TOKENS = 1 << 20  # in one kernel call
_MIN_TOKENS = 8  # the shorter call has a quarter of them
_MAX_COUNT = 1 << 14  # ranks, and heads


def measure(
    ranks: Annotated[
        int | None,
        flags.integer_option(
            help="Number of local processes to start. Default: one per device, 2 on CPUs; under torchrun, WORLD_SIZE."
        ),
    ] = None,
    backend: flags.BackendName = "auto",
    kernel: Annotated[str, typer.Option(help="Local kernel to measure; auto chooses as attention does.")] = "auto",
    heads: flags.Heads = 32,
    kv_heads: flags.KvHeads = None,
    head_dim: Annotated[int, flags.integer_option(help="Elements per head.")] = 128,
    dtype: flags.DeviceDtype = None,
    seq_len: Annotated[
        int | None,
        flags.tokens_option(help=f"Tokens of the longer kernel call; {flags.LENGTH} Default: 16384; 512 on CPUs."),
    ] = None,
    ranks_per_node: Annotated[
        int | None, flags.integer_option(help="Ranks per node; measures links inside and between nodes. Default: none.")
    ] = None,
    json_name: JsonName = None,
) -> int:
    """Measure this machine's kernels and links, from which strategy "auto" predicts times.

    All ranks measure at once, and the slowest rank counts. They measure the local kernel at two lengths (--seq-len
    and a quarter of it), messages by size to the next rank and to all, and memory. They also measure how much messages
    slow kernels down. Nothing else should run on the machine. --json FILE writes the file that BURST_HARDWARE_SPEC and
    `plan --hardware-spec` read.

    Examples:

    burst-portable measure --ranks 2 --json hardware.json
    torchrun --nproc-per-node 8 -m burst_portable measure --json hardware.json
    """
    from burst_portable.cli.measure_worker import measure_local, measure_rank

    launcher = read_launcher_env()
    is_first = launcher is None or launcher.rank == 0
    with add_rank_to_errors(launcher):
        json_option = JsonOption(json_name, writes=is_first)
        ranks = number_of_ranks(ranks, launcher)
        kv_heads = heads if kv_heads is None else kv_heads
        job = _job(
            launcher, ranks=ranks, backend=backend, kernel=kernel, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype, seq_len=seq_len, ranks_per_node=ranks_per_node,
        )  # fmt: skip
        with _progress(console(stderr=True, quiet=not is_first)) as on_progress:
            facts = measure_local(job, on_progress) if launcher is None else measure_rank(job, launcher, on_progress)
    if is_first:
        show(console(stderr=json_option.stdout, soft_wrap=True), facts, json_option.file)
        json_option.write({"schema": facts["schema"], "version": __version__, **facts})
    return 0


def _check_sizes(
    *, ranks: int | None, heads: int, kv_heads: int, head_dim: int, seq_len: int | None, ranks_per_node: int | None
) -> None:
    """Raise `InputError` for a size out of range."""
    from burst_portable.strategies.planner import LARGEST_HEAD

    for name, number, largest in (
        ("--ranks", ranks, _MAX_COUNT), ("--heads", heads, _MAX_COUNT), ("--kv-heads", kv_heads, _MAX_COUNT),
        ("--head-dim", head_dim, LARGEST_HEAD), ("--seq-len", seq_len, _MAX_TOKENS),
        ("--ranks-per-node", ranks_per_node, _MAX_COUNT),
    ):  # fmt: skip
        if number is not None and size(name, number) > largest:
            raise InputError(f"{name} is too large", got=number, allowed=f"at most {largest}")
    if seq_len is not None and seq_len < _MIN_TOKENS:
        raise InputError("--seq-len is too short for two lengths", got=seq_len, allowed=f"at least {_MIN_TOKENS}")


def _job(
    launcher: LauncherEnv | None, *, ranks: int | None, backend: str, kernel: str, heads: int, kv_heads: int,
    head_dim: int, dtype: str | None, seq_len: int | None, ranks_per_node: int | None,
) -> MeasureJob:  # fmt: skip
    """Validate the options and return the job. Raises `BurstError` before a process starts."""
    import torch

    from burst_portable.backends.selection import choose_kernel
    from burst_portable.cli.machine_limits import check_processes, check_tensor_memory, cores
    from burst_portable.cli.measure_worker import MeasureJob
    from burst_portable.config import from_environment
    from burst_portable.measuring.measurement import ACCELERATOR, HOST, measured_call
    from burst_portable.strategies.planner import check_heads
    from burst_portable.utils.values import check_divides

    _check_sizes(
        ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seq_len=seq_len, ranks_per_node=ranks_per_node
    )
    if dtype is not None and dtype not in flags.DTYPES:
        raise unknown_name("dtype", dtype, flags.DTYPES)
    check_heads(heads, kv_heads)
    chosen, _ = choose_backend(backend, 1 if launcher or ranks is None else ranks)
    device_type, on_cpu = chosen.capabilities.device_type, not chosen.capabilities.streams
    if ranks is None:  # one per device, or two on the host, where all share the cores
        ranks = 2 if on_cpu else int(torch.get_device_module(device_type).device_count())
    if ranks_per_node is not None:
        check_divides(ranks_per_node, ranks)
    length = seq_len or (HOST if on_cpu else ACCELERATOR).length
    dtype = dtype or ("float32" if on_cpu else "bfloat16")
    call = measured_call(heads, kv_heads, head_dim, dtype, device_type, length)
    if on_cpu:
        if launcher is None:
            check_processes(ranks)
        elements = length * head_dim * (2 * heads + 2 * kv_heads)  # q, k, v and dO
        check_tensor_memory(elements * call.itemsize, 1 if launcher else ranks)
    choose_kernel(chosen, call, from_environment().kernel if kernel == "auto" else kernel)
    return MeasureJob(
        ranks=ranks,
        backend=chosen.name,
        device_type=device_type,
        kernel=kernel,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        length=length,
        ranks_per_node=ranks_per_node,
        threads=max(1, cores() // ranks) if launcher is None else torch.get_num_threads(),
    )


BUSY = 1.3
"""Largest ratio of the rounds of one rate. Above it, something else ran during the measurement."""


@contextmanager
def _progress(out: Console) -> Iterator[Callable[[str], None]]:
    """Yield a callback that prints what is measured: a line that is replaced on a terminal, lines in a log."""
    if not out.is_terminal:
        yield lambda what: out.print(f"measuring {what}", markup=False)
        return
    with out.status("starting") as status:
        yield lambda what: status.update(f"measuring {escape(what)}")


def show(out: Console, facts: dict[str, Any], file: Path | None) -> None:
    """Print a row for each rate, and how to use them."""
    ranks = facts["ranks"]
    machine = f"{ranks} rank{'' if ranks == 1 else 's'} on {facts['device']} ({facts['backend']})"
    heads = f"{facts['heads']} query and {facts['kv_heads']} K/V heads of {facts['head_dim']}, {facts['dtype']}"
    title = f" {machine}, kernel {facts['kernel']}, {heads}; the slowest rank counts"
    out.print(Text.assemble(("measured", "bold"), title))
    rows = table("rate", "value", "method", left=("value", "method"))
    for name, value in facts["hardware"].items():
        method = facts["methods"][name]
        style = "" if method["measured"] else "dim"
        rows.add_row(Text(name, style), Text(_value(name, value), style), Text(method["method"], style))
    out.print("", rows, "", sep="\n")
    ratios = {name: method["max_over_min"] or 1.0 for name, method in facts["methods"].items()}
    if busy := [f"{name} by {ratio:.2g} times" for name, ratio in ratios.items() if ratio > BUSY]:
        warning = f"  rounds differ, {', '.join(busy)}: the machine was busy; measure again"
        out.print(Text.assemble(("warning", "yellow"), warning), "", sep="\n")
    if file is None:
        usage = f"--json FILE writes them for BURST_HARDWARE_SPEC=FILE and `{PROGRAM} plan --hardware-spec FILE`"
    else:
        usage = (
            f"auto uses them if BURST_HARDWARE_SPEC={file} is set on every rank, or with "
            f"Config(hardware_spec={str(file)!r});\n"
            f"`{PROGRAM} plan --hardware-spec {file} ...` predicts times from them on any machine"
        )
    out.print(usage, markup=False)


def _value(name: str, value: Any) -> str:
    if name in ("p2p_bandwidth", "peer_copy_bandwidth", "all_to_all_bandwidth"):
        return "\n".join(f"{bytes_text(size)}: {_rate(bandwidth)}" for size, bandwidth in value) or "none"
    if name in ("tflops", "backward_tflops"):
        return scaled(value * 1e12, "FLOP/s") if value else "as tflops"
    if name in ("intra_node_bandwidth", "inter_node_bandwidth", "memory_bandwidth"):
        return _rate(value) if value else "not predicted"
    if name.endswith("latency"):
        return seconds_text(value)
    if name in ("comm_slowdown", "comm_slowdown_high_priority"):
        return f"{percent(value[0])} forward, {percent(value[1])} backward" if value else "as comm_slowdown"
    if name == "multi_launch_efficiency":
        return percent(value)
    if name == "long_kv_efficiency":
        rows, share = value
        return f"{percent(share)} from {rows:,} rows" if rows else "as for fewer rows"
    if name == "kernel":
        return ", ".join(trait for trait, declared in value.items() if declared) or "none"
    if name == "block":
        return f"{value} x {value}" if value > 1 else "exact pairs"
    if name == "ranks_per_node":
        return str(value) if value else "all ranks in one node"
    return str(value)


def _rate(bandwidth: float) -> str:
    return scaled(bandwidth * 1e9, "B/s")
