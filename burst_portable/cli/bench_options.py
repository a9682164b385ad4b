"""Read and check the options of `burst-portable bench` before a rank starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from burst_portable.bench.masks import MASKS, named_mask
from burst_portable.bench.peer_names import PEERS, available_peers
from burst_portable.cli.flags import number_of_ranks, tokens
from burst_portable.config import LauncherEnv
from burst_portable.errors import InputError, LayoutError, MaskError, format_error, shown, unknown_name
from burst_portable.strategies.planner import call_of_sizes
from burst_portable.strategies.registry import known, make_strategy, strategy_name
from burst_portable.utils.text import split_list

if TYPE_CHECKING:
    from burst_portable.backends.base import Backend

QUICK = ("full", "causal", "causal_document")
"""The masks of `--quick`."""
_GROUPS_OF_ENTRIES = ("all", "ours")
"""Words in `--strategies`: ours are the strategies of the registry; all, also those of other libraries that can run."""
_LONGEST = 1 << 24  # tokens


def lengths_text(text: str) -> str:
    """Return the text if it has numbers of tokens that are separated by commas."""
    for one in text.split(","):
        tokens(one)
    return text


def counts_text(text: str) -> str:
    """Return the text if it has numbers of ranks that are separated by commas."""
    for one in text.split(","):
        if not (one.isascii() and one.isdigit() and int(one[:9]) > 0 and len(one) < 9):
            got, allowed = shown(one), "numbers from 1, separated by commas"
            raise typer.BadParameter(format_error("not a number of ranks", got=got, allowed=allowed))
    return text


def numbers_of_ranks(text: str | None, launcher: LauncherEnv | None) -> list[int]:
    """Return the numbers of ranks of `--ranks` or of the launcher; none if neither is given."""
    given = list(dict.fromkeys(map(int, text.split(",")))) if text else []
    if launcher is not None and len(given) > 1:
        allowed = f"{launcher.world_size}, or no --ranks"
        raise InputError("a launcher starts one number of ranks", got=f"--ranks {text}", allowed=allowed)
    found = number_of_ranks(given[0] if given else None, launcher)
    return given or ([] if found is None else [found])


def kernel_names(text: str, backend: Backend) -> list[str]:
    """Return the names of `--kernels`. Raise `UnknownNameError` for a kernel that the backend does not have."""
    from burst_portable.backends.selection import kernels_of

    names = list(dict.fromkeys(split_list(text)))
    known_kernels = ["auto", *(one.name for one in kernels_of(backend))]
    for one in names:
        if one not in known_kernels:
            raise unknown_name(f"kernel of the backend {backend.name!r}", one, known_kernels)
    return names


def checked_lengths(text: str | None, ranks: int) -> list[int]:
    """Return the lengths of `--seq-len`, if it is given. Raise `InputError` for one that `ranks` ranks cannot hold."""
    lengths = list(dict.fromkeys(map(tokens, text.split(",")))) if text else []
    if lengths and max(lengths) > _LONGEST:
        allowed = f"at most {_LONGEST:,} tokens, because every rank compares with the unsharded tensors"
        raise InputError("a sequence is too long", got=f"--seq-len {text}", allowed=allowed)
    if lengths and min(lengths) < ranks:
        raise InputError("a sequence is too short", got=f"--seq-len {text}", allowed=f"at least {ranks} tokens")
    return lengths


def sizes_with_defaults(
    heads: int | None, kv_heads: int | None, head_dim: int | None, *, on_cpu: bool
) -> dict[str, int]:
    """Return heads, K/V heads and head size, with defaults for those that are not given."""
    default_heads, default_kv_heads, default_head_dim = (4, 2, 32) if on_cpu else (64, 8, 128)
    if kv_heads is None:
        kv_heads = default_kv_heads if heads is None else heads
    return {
        "heads": default_heads if heads is None else heads,
        "kv_heads": kv_heads,
        "head_dim": default_head_dim if head_dim is None else head_dim,
    }


def entry_names(text: str, *, on_cpu: bool) -> list[str]:
    """Return names of entries. "ours" and "all" are those of several: see `_GROUPS_OF_ENTRIES`."""
    chosen: list[str] = []
    for one in split_list(text):
        if one in _GROUPS_OF_ENTRIES:
            chosen += [*known(), *(available_peers(on_cpu=on_cpu) if one == "all" else ())]
        elif strategy_name(one) in known():
            make_strategy(one)
            chosen.append(one)
        elif one in PEERS:
            chosen.append(one)
        else:
            raise unknown_name("strategy", one, [*_GROUPS_OF_ENTRIES, *known(), *PEERS])
    return list(dict.fromkeys(chosen))


def mask_names(text: str | None, own: Sequence[str], *, quick: bool) -> list[str]:
    """Return the names of `--masks`, then the short forms of `--mask`. Without `--masks`: `own`, or else all masks."""
    names = [] if text is None and own else list(MASKS) if text in (None, "all") else str(text).split(",")
    for one in names:
        if one not in MASKS:
            if ":" in one:
                got, allowed = f"--masks {text}", ", ".join(MASKS)
                next_step = f"pass short forms with --mask, once for each: --mask {one}"
                raise InputError("--masks takes names of masks", got=got, allowed=allowed, next_step=next_step)
            raise unknown_name("mask", one, MASKS)
    if quick and text in (None, "all"):
        names = list(QUICK) if names else []
    return list(dict.fromkeys([*names, *own]))


def check_sizes(masks: Sequence[str], lengths: Sequence[int], ranks: int, setting: Mapping[str, Any]) -> None:
    """Raise `InputError` if heads, or a mask and a length, do not fit together, before any rank starts."""
    sizes = {name: setting[name] for name in ("heads", "kv_heads", "head_dim", "layout")}
    for name in masks:
        for length in lengths:
            try:
                mask = named_mask(name, length)
                call_of_sizes(seq_len=length, ranks=ranks, mask=mask, itemsize=4, **sizes)
            except LayoutError as error:
                next_step = "name masks of documents: --masks causal,causal_document, or --mask documents:0,END,END"
                raise LayoutError(f"the mask {name}: {error}", next_step=next_step) from error
            except MaskError as error:
                raise MaskError(f"the mask {name} for --seq-len {length}: {error}") from error
