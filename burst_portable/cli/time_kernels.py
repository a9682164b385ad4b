"""Define `burst-portable time-kernels`, which times the kernels of a device so that `auto` takes the fastest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.text import Text

from burst_portable import __version__
from burst_portable.cli import flags
from burst_portable.cli.backend_choice import choose_backend
from burst_portable.cli.output import JsonName, JsonOption, console, on_stderr, table
from burst_portable.errors import InputError, unknown_name
from burst_portable.planning.kernel_times import MASKS, SCHEMA
from burst_portable.utils.text import seconds_text
from burst_portable.utils.values import size

if TYPE_CHECKING:
    from burst_portable.backends.base import Backend
    from burst_portable.measuring.kernel_timing import KernelRow
    from burst_portable.planning.call import AttentionCall

_LONGEST = 1 << 18  # tokens of one kernel call


def time_kernels(
    backend: flags.BackendName = "auto",
    kernel: Annotated[
        list[str] | None, typer.Option(help="Kernel to time; repeatable. Default: all but reference on accelerators.")
    ] = None,
    heads: flags.Heads = 32,
    kv_heads: flags.KvHeads = None,
    head_dim: Annotated[
        list[int] | None, flags.integer_option(help="Elements per head; repeatable. Default: 64 and 128.")
    ] = None,
    v_head_dim: flags.VHeadDim = None,
    seq_len: Annotated[
        list[int] | None,
        flags.tokens_option(help=f"Tokens of a call; repeatable; {flags.LENGTH} Default: 4096 and 16384; 512 on CPUs."),
    ] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(MASKS)}; repeatable. documents: 16 causal ones. Default: all.")
    ] = None,
    dtype: flags.DeviceDtype = None,
    softcap: Annotated[float | None, typer.Option(help="Cap of the scores. Default: none.")] = None,
    deterministic: Annotated[bool, typer.Option(help="Time calls with reproducible gradients.")] = False,
    json_name: JsonName = None,
) -> int:
    """Time the kernels of this device side by side, so that `auto` takes the fastest for each kind of call.

    Each kernel computes the whole attention in one call, forward and backward. Results are compared first: a kernel
    whose results differ from those of most kernels has no time. Nothing else should run on the machine. --json FILE
    writes the file for BURST_KERNEL_TIMES=FILE or Config(kernel_times=FILE). Calls that are like no row of the file
    use the backend's own order.

    Examples:

    burst-portable time-kernels --head-dim 128 --kv-heads 8 --json kernel_times.json
    BURST_KERNEL_TIMES=kernel_times.json python train.py
    """
    import torch

    from burst_portable.measuring.kernel_timing import time_kernels as timed

    json_option = JsonOption(json_name)
    chosen, _ = choose_backend(backend, 1)
    on_cpu = not chosen.capabilities.streams
    calls = _calls(
        chosen, heads, heads if kv_heads is None else kv_heads, head_dim or [64, 128], v_head_dim,
        seq_len or ([512] if on_cpu else [4096, 16384]), mask or list(MASKS),
        dtype or ("float32" if on_cpu else "bfloat16"), softcap, deterministic=deterministic,
    )  # fmt: skip
    names = _kernels(chosen, kernel, with_reference=on_cpu)
    device = torch.device("cpu") if on_cpu else torch.device(chosen.capabilities.device_type, 0)
    rows = list(
        track(timed(chosen, calls, device, names), "timing", total=len(calls), **on_stderr(quiet=json_option.stdout))
    )
    name = str(torch.get_device_module(device).get_device_name(device)) if not on_cpu else "the CPU"
    if not json_option.stdout:
        show(rows, f"{name} ({chosen.name}), {calls[0][1].dtype}", json_option.file)
    json_option.write(
        {
            "schema": SCHEMA,
            "version": __version__,
            "torch": torch.__version__,
            "backend": chosen.name,
            "device": name,
            "date": time.strftime("%Y-%m-%d"),
            "rows": [as_json(row) for row in rows if row.seconds],
        }
    )
    return 0


def _kernels(backend: Backend, named: list[str] | None, *, with_reference: bool) -> list[str]:
    """Return the names of the kernels to time. Raise `UnknownNameError` for one that the backend does not have."""
    from burst_portable.backends.selection import kernels_of

    known = [one.name for one in kernels_of(backend)]
    for name in named or ():
        if name not in known:
            raise unknown_name(f"kernel of the backend {backend.name!r}", name, known)
    return named or [name for name in known if with_reference or name != "reference"]


def _calls(
    backend: Backend, heads: int, kv_heads: int, head_dims: list[int], v_head_dim: int | None, lengths: list[int],
    masks: list[str], dtype: str, softcap: float | None, *, deterministic: bool,
) -> list[tuple[str, AttentionCall]]:  # fmt: skip
    """Validate the options, and return the attentions to time, each with the kind of its mask."""
    from burst_portable.measuring.kernel_timing import timed_call
    from burst_portable.runtime.validation import checked_softcap
    from burst_portable.strategies.planner import LARGEST_HEAD, check_heads

    check_heads(heads, kv_heads)
    limited = [("--head-dim", one, LARGEST_HEAD) for one in (*head_dims, *([v_head_dim] if v_head_dim else []))]
    for name, number, largest in (*limited, *(("--seq-len", one, _LONGEST) for one in lengths)):
        if size(name, number) > largest:
            raise InputError(f"{name} is too large", got=number, allowed=f"at most {largest}")
    for one in masks:
        if one not in MASKS:
            raise unknown_name("kind of mask", one, MASKS)
    if dtype not in flags.DTYPES:
        raise unknown_name("dtype", dtype, flags.DTYPES)
    device, capped = backend.capabilities.device_type, checked_softcap(softcap)
    return [
        (
            kind,
            timed_call(
                kind, length, heads, kv_heads, dim, dtype, device,
                v_head_dim=v_head_dim or dim, softcap=capped, deterministic=deterministic,
            ),
        )
        for dim in head_dims
        for kind in masks
        for length in lengths
    ]  # fmt: skip


def as_json(row: KernelRow) -> dict[str, Any]:
    """Return a row of the file: see `planning.kernel_times.TimedAttention`. Passes and reasons are for readers."""
    call = row.call
    return {
        "dtype": call.dtype,
        "head_dim": call.head_dim,
        "v_head_dim": call.v_head_dim,
        "grouped": call.kv_heads < call.heads,
        "mask": row.mask,
        "softcap": call.softcap is not None,
        "deterministic": call.deterministic,
        "tokens": call.layout.length,
        "seconds": {name: sum(passes.values()) for name, passes in row.seconds.items()},
        "passes": row.seconds,
        "reasons": row.reasons,
    }


def show(rows: list[KernelRow], title: str, file: Path | None) -> None:
    """Print the times of each kernel: forward and backward, the fastest of both passes in bold."""
    out = console(soft_wrap=True)
    names = list(dict.fromkeys(name for row in rows for name in (*row.seconds, *row.reasons)))
    timed = [name for name in names if any(name in row.seconds for row in rows)]
    made = table("mask", "D", "tokens", *timed, left=("mask",), title=f"{title}: forward and backward of a call")
    for row in rows:
        total = {name: sum(passes.values()) for name, passes in row.seconds.items()}
        fastest = min(total, key=total.__getitem__, default="")
        cells = []
        for name in timed:
            passes = row.seconds.get(name)
            text = "-" if passes is None else f"{seconds_text(passes['forward'])} {seconds_text(passes['backward'])}"
            cells.append(Text(text, "bold" if name == fastest else "dim" if passes is None else ""))
        sizes = str(row.call.head_dim)
        if row.call.v_head_dim != row.call.head_dim:
            sizes += f"/{row.call.v_head_dim}"
        made.add_row(row.mask, sizes, str(row.call.layout.length), *cells)
    out.print("", made, "", sep="\n")
    for name in names:
        reasons = dict.fromkeys(row.reasons[name] for row in rows if name in row.reasons)
        for reason in reasons:
            out.print(f"{name}: {reason}", markup=False)
    if file is None:
        out.print("--json FILE writes the times for BURST_KERNEL_TIMES=FILE", markup=False)
    else:
        out.print(f"auto uses them if BURST_KERNEL_TIMES={file} is set on every rank", markup=False)
