"""Write the tables of benchmarks/README.md and the numbers of docs/strategies.md from the files in benchmarks/results.

The table of docs/backends.md has the speeds by which `auto` chooses between two kernels.

    python -m benchmarks.tables [--check]

Each text lies between two comments, `<!-- table NAME -->` and `<!-- end NAME -->`. Numbers are cut off, never rounded
up. With --check nothing is written, and the exit code is 1 if a text differs from what its numbers give.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import textwrap
from collections.abc import Callable
from functools import partial
from math import floor
from pathlib import Path
from typing import Any

from benchmarks.script import end
from burst_portable.backends.cuda.hopper.flash4_speeds import GAIN, SPEEDS
from burst_portable.strategies.registry import strategy_name

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "README.md"
STRATEGIES_PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"
BACKENDS_PAGE = STRATEGIES_PAGE.with_name("backends.md")
PASSES = ("forward", "backward")

Result = dict[str, Any]

KERNEL_FILE = "local-kernels-h200-2026-11-29"
KERNEL_ROWS = {
    "causal-16k": "causal 16k",
    "causal-16k-gqa": "causal 16k, 8 K/V heads",
    "full-16k": "full 16k",
    "causal-32k": "causal 32k, 16 heads",
    "causal-32k-gqa": "causal 32k, 8 K/V heads",
    "full-32k": "full 32k, 16 heads",
    "causal-8k-d64": "causal 8k, head size 64",
    "causal-4k": "causal 4k",
    "full-4k": "full 4k",
    "documents": "16 documents",
    "documents-gqa": "16 documents, 8 K/V heads",
    "softcap": "softcap",
    "window": "window of 1,024",
    "window-gqa": "window of 1,024, 8 K/V heads",
    "sink": "window 1,024, 64 sink tokens",
    "prefix": "prefix-LM, prefix of 8,192",
    "share-question": "1 question, 4 answers",
    "striped": "1 step of a striped ring",
}
OTHER_KERNELS = {"flash-attn-4": "flash-attn-4", "cudnn": "cuDNN", "flex-flash": "flex-flash", "flex": "flex"}
STRATEGY_FILE, STRATEGY_FILE_OF_FOUR = "strategies-h200x2-2026-11-29", "strategies-x4-2026-11-28"
STRATEGY_ROWS = {
    "32k": "causal 32k",
    "32k-gqa": "causal 32k, 8 K/V",
    "32k-full": "full 32k, 8 K/V",
    "128k": "causal 128k",
    "128k-gqa": "causal 128k, 8 K/V",
    "512k-gqa": "causal 512k, 8 K/V",
    "128k-few": "causal 128k, 4 K/V",
    "128k-documents": "documents 128k, 8 K/V",
    "128k-window": "window 128k, 8 K/V",
}
OTHER_STRATEGIES = {
    "ulysses by the book": "Ulysses",
    "ring-flash-attn zigzag": "zigzag",
    "ring-flash-attn llama3": "llama3",
    "ring-flash-attn llama3 at once": "llama3",
    "context_parallel": "torch",
}


def load(name: str) -> list[Result]:
    """Return the results of one file."""
    results: list[Result] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]
    return results


def by_row(name: str) -> dict[str, dict[str, Result]]:
    """Return the results of one file by row and provider."""
    rows: dict[str, dict[str, Result]] = {}
    for one in load(name):
        rows.setdefault(one["row"], {})[one["provider"]] = one
    return rows


def speed(one: Result) -> str:
    """Return TFLOP/s forward / backward."""
    return " / ".join(str(int(one["tflops"][name])) for name in PASSES)


def ratio(ours: Result, other: Result, name: str) -> float:
    """Return how many times as fast ours is in one pass: the median over rounds that ran side by side."""
    pairs = zip(ours["rounds"][name], other["rounds"][name], strict=True)
    return statistics.median(theirs / mine for mine, theirs in pairs)


def cut(value: float, digits: int) -> str:
    """Return a number with this number of decimals, rounded down."""
    return f"{floor(value * 10**digits + 1e-9) / 10**digits:.{digits}f}"


def total(one: Result) -> float:
    """Return milliseconds of both passes."""
    return sum(float(one["milliseconds"][name]) for name in PASSES)


def kernels() -> list[str]:
    """Compare the Hopper kernels with the fastest other one of each pass."""
    lines = ["| mask and size | ours | best other, forward | best other, backward | ratio |", "| --- " * 5 + "|"]
    for row, here in by_row(KERNEL_FILE).items():
        ours, cells, ratios = here["hopper-whole"], [], []
        for name in PASSES:
            others = [key for key in OTHER_KERNELS if key in here and here[key]["tflops"]]
            best = min(others, key=lambda key: ratio(ours, here[key], name))
            cells.append(f"{int(here[best]['tflops'][name])}, {OTHER_KERNELS[best]}")
            ratios.append(cut(ratio(ours, here[best], name), 2))
        lines.append(f"| {KERNEL_ROWS[row]} | {speed(ours)} | {cells[0]} | {cells[1]} | {' / '.join(ratios)} |")
    return lines


def portable() -> list[str]:
    """Compare the portable kernels with FlexAttention."""
    lines = ["| mask and size | ours | FlexAttention | ratio |", "| --- " * 4 + "|"]
    for row, here in by_row(KERNEL_FILE).items():
        ours, flex = here["triton-whole"], here["flex"]
        ratios = " / ".join(cut(ratio(ours, flex, name), 2) for name in PASSES)
        lines.append(f"| {KERNEL_ROWS[row]} | {speed(ours)} | {speed(flex)} | {ratios} |")
    return lines


def strategies(file: str = STRATEGY_FILE) -> list[str]:
    """Compare `auto` with the fastest other implementation on the same local kernel."""
    column = "GPU" if file == STRATEGY_FILE_OF_FOUR else "kernel"
    head = f"| mask and size | {column} | `auto` | its choice | best other | ratio | of one call |"
    lines, results = [head, "| --- " * 7 + "|"], load(file)
    for run, row in dict.fromkeys((one["run"], one["row"]) for one in results):
        here = [one for one in results if (one["run"], one["row"]) == (run, row)]
        by_name = {one["contestant"]: one for one in here if one["tflops"]}
        ours = next(one for name, one in by_name.items() if name.startswith("auto "))
        best = min((by_name[name] for name in OTHER_STRATEGIES if name in by_name), key=total)
        passes = [zip(ours["rounds"][name], best["rounds"][name], strict=True) for name in PASSES]
        both = [((a + c), (b + d)) for (a, b), (c, d) in zip(*passes, strict=True)]
        gain = cut(statistics.median(theirs / mine for mine, theirs in both), 3)
        plain = by_name.get("plain call")
        share = cut(total(plain) / total(ours), 2) if plain else "-"
        used = ours["kernel"] + (" NCCL" if ours["contestant"] == "auto nccl" else "") if column == "kernel" else run
        chosen = strategy_name(ours["chose"])
        other = f"{speed(best)}, {OTHER_STRATEGIES[best['contestant']]}"
        lines.append(f"| {STRATEGY_ROWS[row]} | {used} | {speed(ours)} | {chosen} | {other} | {gain} | {share} |")
    return lines


BENCH_FILE, BENCH_FILE_OF_FOUR = "bench-h200x2-2026-11-29", "bench-h200x4-2026-11-28"
BENCH_ENTRIES = ("auto", "ulysses", "dispatch", "distflash", "ring", "all_gather", "burst")
BENCH_ENTRIES_OF_FOUR = ("auto", "ulysses", "dispatch", "distflash", "ring", "all_gather", "usp", "burst")


def bench_rows(file: str) -> list[Result]:
    """Return the rows of one file of `burst-portable bench`."""
    rows: list[Result] = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def bench(file: str = BENCH_FILE, entries: tuple[str, ...] = BENCH_ENTRIES) -> list[str]:
    """Compare all strategies on the masks of a file of `burst-portable bench`: TFLOP/s of both passes."""
    rows = [row for row in bench_rows(file) if row["status"] == "ok" and row["entry"] in entries]
    lines = [f"| mask | {' | '.join(f'`{name}`' for name in entries)} | ratio |"]
    lines.append("| --- " * (len(entries) + 2) + "|")
    for mask in dict.fromkeys(row["mask"] for row in rows):
        by_name = {row["entry"]: row for row in rows if row["mask"] == mask}
        seconds = {name: sum(float(row[f"{which}_seconds"]) for which in PASSES) for name, row in by_name.items()}
        speeds = []
        for name in entries:
            flops = sum(by_name[name][f"{which}_seconds"] * by_name[name][f"{which}_tflops"] for which in PASSES)
            speeds.append(str(int(flops / seconds[name])))
        best = min(seconds[name] for name in entries if name != "auto")
        lines.append(f"| {mask.replace('_', ' ')} | {' | '.join(speeds)} | {cut(best / seconds['auto'], 3)} |")
    return lines


BENCH_MACHINES = {BENCH_FILE_OF_FOUR: "On four H200", BENCH_FILE: "On two H200"}
BENCH_STRATEGIES = (
    *("ring", "burst", "double_ring", "distflash", "all_gather", "dispatch"),
    *("ring_self_attention", "ulysses", "usp"),
)
BENCH_SAME_PLANS = {(BENCH_FILE, "usp"): "ring", (BENCH_FILE, "double_ring"): "burst"}
"""Strategies that have the plan of another one with so few ranks: only the other one is compared."""


def compared(file: str) -> dict[str, dict[str, float]]:
    """Return the seconds of both passes by mask and strategy. `auto`, other libraries and equal plans are left out."""
    found: dict[str, dict[str, float]] = {}
    for row in bench_rows(file):
        name = row["entry"]
        if row["status"] == "ok" and name in BENCH_STRATEGIES and (file, name) not in BENCH_SAME_PLANS:
            mask = row["mask"].replace("_", " ")
            found.setdefault(mask, {})[name] = sum(float(row[f"{which}_seconds"]) for which in PASSES)
    return found


def in_words(names: list[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def bench_sentences(file: str, name: str) -> str:
    """Return on which masks a strategy was the fastest in one file, and its speed relative to the fastest elsewhere."""
    where = BENCH_MACHINES[file]
    if same := BENCH_SAME_PLANS.get((file, name)):
        return f"{where}, its plan is that of `{same}`."
    masks = compared(file)
    shares = {mask: min(times.values()) / times[name] for mask, times in masks.items() if name in times}
    if not shares:
        rows = [row for row in bench_rows(file) if row["entry"] == name]
        return f"{where}, it was {refusal(rows) or 'not measured'}."
    assert len(shares) == len(masks), f"{name} is missing on some masks of {file}"
    behind = {mask: share for mask, share in shares.items() if share < 1}
    ahead = [mask for mask in shares if mask not in behind]
    if not behind:
        return f"{where}, it was the fastest on all masks."
    worst = min(behind, key=behind.__getitem__)
    reached = f"it had {cut(behind[worst], 2)} to {cut(max(behind.values()), 2)} of the speed of the fastest"
    if not ahead:
        return f"{where}, {reached}, least on {worst}."
    if len(ahead) > len(behind):
        return f"{where}, it was the fastest on all masks but {in_words(list(behind))}. There, {reached}."
    return f"{where}, it was the fastest on {in_words(ahead)}. Elsewhere, {reached}, least on {worst}."


def refusal(rows: list[Result]) -> str:
    """Return why the rows of a strategy were refused with one reason; "" if they were not."""
    if {row["status"] for row in rows} != {"refused"}:
        return ""
    ((what, got, *_),) = {tuple(row["reason"].split("; ")) for row in rows}
    return f"refused on all masks: {what} ({got.removeprefix('got ').partition(':')[0]})"


def bench_numbers(name: str) -> list[str]:
    """Return a paragraph with the numbers of a strategy in all files of `burst-portable bench`."""
    is_measured = any(name in times for file in BENCH_MACHINES for times in compared(file).values())
    sentences = [bench_sentences(file, name) for file in BENCH_MACHINES]
    text = " ".join(["**Numbers.**", *sentences, *([] if is_measured else ["No speed was measured."])])
    return textwrap.wrap(text, 100)


HEAD_FILE = "head-sizes-h200-2026-11-30"
HEAD_SIZES = {**{f"d{n}": str(n) for n in (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)}, "mla": "192, values 128"}
HEAD_OTHERS = ("cudnn", "flash", "flex", "flash-attn-4")


def heads() -> list[str]:
    """Compare `auto` with the fastest other attention, and masks and deterministic gradients with causal calls."""
    labels = ("head size", "causal", "full", "4 K/V heads", "softcap", "documents", "window", "deterministic")
    lines, rows = [f"| {' | '.join(labels)} |", "| --- " * len(labels) + "|"], by_row(HEAD_FILE)
    for size, label in HEAD_SIZES.items():
        causal, cells = rows[f"{size}-causal-16k"], []
        for mask in ("causal", "full", "gqa", "softcap", "documents", "window"):
            here = rows.get(f"{size}-{mask}-16k")
            if here is None:
                cells.append("-")
                continue
            ours = here["auto"]
            beside = [one["time_beside_auto"] for name, one in here.items() if name in HEAD_OTHERS and "tflops" in one]
            share = cut(rate(ours) / rate(causal["auto"]), 2)
            first = share if mask in ("documents", "window") else speed(ours)
            cells.append(f"{first}, {cut(min(beside), 2) if beside else '-'}")
        slow, usual = causal["auto-deterministic"], causal["hopper-whole" if size != "d16" else "auto"]
        share = cut(float(usual["milliseconds"]["backward"]) / float(slow["milliseconds"]["backward"]), 2)
        lines.append(f"| {label} | {' | '.join([*cells, share])} |")
    return lines


def rate(one: Result) -> float:
    """Return TFLOP/s of both passes together."""
    return sum(float(one["tflops"][name] * one["milliseconds"][name]) for name in PASSES) / total(one)


FIRST_CALL_FILE = "first-call-h200-2026-11-28"
FIRST_CALLS = {"cold": "cold", "in turn": "cold, in turn", "cached": "cached", "after ahead": "compiled ahead"}


def first_call() -> list[str]:
    """Compare the first call of a process with and without compiled kernels, in seconds of both passes."""
    lines = [f"| kernel, head size | {' | '.join(FIRST_CALLS.values())} |", "| --- " * 5 + "|"]
    for one in load(FIRST_CALL_FILE):
        seconds = [" / ".join(f"{one['rows'][row][name]:.2f}" for name in PASSES) for row in FIRST_CALLS]
        lines.append(f"| {one['kernel']}, {one['head_dim']} | {' | '.join(seconds)} |")
    return lines


DETERMINISTIC_FILE = "deterministic-h200-2026-11-29"
DETERMINISTIC_MASKS = {
    "causal": "causal",
    "full": "full",
    "docs": "documents of 1,024",
    "ragged": "other documents",
    "window:1024": "window of 1,024",
    "sink:64:1024": "window, 64 sink tokens",
}


def deterministic() -> list[str]:
    """Return the speed of the deterministic backward pass as a share of the other one's."""
    results = load(DETERMINISTIC_FILE)
    lines = [f"| tokens, head size, heads | {' | '.join(DETERMINISTIC_MASKS.values())} |", "| --- " * 7 + "|"]
    for key in dict.fromkeys((one["tokens"], one["head_dim"], one["heads"]) for one in results):
        here = {one["mask"]: one for one in results if (one["tokens"], one["head_dim"], one["heads"]) == key}
        shares = [cut(one["share"], 2) for one in here.values()]
        lines.append(f"| {key[0]:,}, {key[1]}, {key[2]} | {' | '.join(shares)} |")
    return lines


FEW_FILE = "few-kv-heads-h200-2026-11-29"
FEW_MASKS = {"causal": "causal", "ragged": "documents", "window:1024": "window of 1,024", "sink:64:1024": "with sinks"}


def few_heads() -> list[str]:
    """Compare a backward pass with few K/V heads before and after the change, in milliseconds."""
    results = load(FEW_FILE)
    lines = [f"| tokens, heads, head size | {' | '.join(FEW_MASKS.values())} |", "| --- " * 5 + "|"]
    for key in dict.fromkeys((one["tokens"], one["heads"], one["head_dim"], one["value_dim"]) for one in results):
        tokens, heads, dim, values = key
        here = {
            one["mask"]: one
            for one in results
            if (one["tokens"], one["heads"], one["head_dim"], one["value_dim"]) == key
        }
        cells = ["-"] * len(FEW_MASKS)
        for place, mask in enumerate(FEW_MASKS):
            if one := here.get(mask):
                before, now = one["before"], one[one["takes"]]
                cells[place] = f"{before:.3f}, {now:.3f}: {cut(before / now, 2)}"
        label = f"{tokens:,}, {heads}, {dim}" + (f", values {values}" if values != dim else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def documents() -> list[str]:
    """Compare our kernel with flash-attn-4 on packed documents, in milliseconds."""
    lines, rows = (
        ["| tokens, heads, head size | ours | flash-attn-4 | its speed over ours |", "| --- " * 4 + "|"],
        by_row(HEAD_FILE),
    )
    for length, tokens in (("16k", "16,384"), ("4k", "4,096")):
        for size, label in HEAD_SIZES.items():
            for mask, heads in (("documents", "16/16"), ("documents-gqa", "16/4")):
                here = rows[f"{size}-{mask}-{length}"]
                if "milliseconds" not in here["flash-attn-4"]:
                    continue
                ours, other = (here[who]["milliseconds"] for who in ("hopper-whole", "flash-attn-4"))
                both = [" / ".join(f"{one[name]:.3f}" for name in PASSES) for one in (ours, other)]
                speeds = " / ".join(cut(ours[name] / other[name], 2) for name in PASSES)
                lines.append(f"| {tokens}, {heads}, {label} | {both[0]} | {both[1]} | {speeds} |")
    return lines


HOST_FILE = "host-time-h200-2026-11-29"


def host() -> list[str]:
    """Compare the host time of a remembered call with that of torch's SDPA, in microseconds."""
    labels = ("tokens", "heads", "forward", "SDPA", "ratio", "both passes", "SDPA", "ratio")
    lines = [f"| {' | '.join(labels)} |", "| --- " * len(labels) + "|"]
    for one in load(HOST_FILE):
        cells = []
        for name in ("forward", "both passes"):
            ours, other = (one["microseconds"][f"{who}, {name}"] for who in ("attention", "SDPA"))
            cells += [str(ours), str(other), f"{ours / other:.2f}"]
        lines.append(f"| {one['tokens']:,} | {one['heads']} | {' | '.join(cells)} |")
    return lines


ENERGY_FILE = "energy-h200-2026-11-30"
ENERGY_PROVIDERS = ("hopper-whole", "flash-attn-4", "cudnn")


def energy() -> list[str]:
    """Compare kernels, and two calls of torch, by speed, clock and energy."""
    labels = ("mask and size", "pass", "ours", "flash-attn-4", "cuDNN")
    lines, results = [f"| {' | '.join(labels)} |", "| --- " * len(labels) + "|"], load(ENERGY_FILE)
    for row, which in dict.fromkeys((one["row"], one["which"]) for one in results if one["provider"] != "torch"):
        here = {one["provider"]: one for one in results if (one["row"], one["which"]) == (row, which)}
        cells = [energy_of(here[name]) if name in here else "-" for name in ENERGY_PROVIDERS]
        lines.append(f"| {KERNEL_ROWS[row]} | {which} | {' | '.join(cells)} |")
    return lines


def energy_of(one: Result) -> str:
    """Return TFLOP/s, MHz and pJ per FLOP of one pass."""
    seconds, joules, megahertz = (statistics.median(one[name]) for name in ("seconds", "joules", "megahertz"))
    return f"{int(one['work'] / seconds / 1e12)}, {megahertz:.0f}, {joules / one['work'] * 1e12:.2f}"


KINDS = {
    "full": "full",
    "causal": "causal",
    "shared heads": "4 K/V heads",
    "softcap": "softcap",
    "window": "window of 1,024",
    "documents": "documents",
    "documents, shared heads": "documents, 4 K/V heads",
}


def flash4() -> list[str]:
    """Show the measured speeds by which flash-attn-4 is called. Those from which on it is are in bold."""
    lines = [f"| head size | {' | '.join(KINDS.values())} |", "| --- " * (1 + len(KINDS)) + "|"]
    for sizes in SPEEDS["full"]:
        cells = []
        for kind in KINDS:
            passes = SPEEDS[kind].get(sizes)
            known = [[f"**{x:.2f}**" if x >= GAIN else f"{x:.2f}" for x in one if x] for one in passes or ()]
            cells.append("; ".join(", ".join(one) for one in known) or "-")
        label = str(sizes[0]) if sizes[0] == sizes[1] else f"{sizes[0]}, values {sizes[1]}"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "kernels": kernels,
    "heads": heads,
    "first-call": first_call,
    "portable": portable,
    "strategies": strategies,
    "strategies-4": partial(strategies, STRATEGY_FILE_OF_FOUR),
    "bench": bench,
    "bench-4": partial(bench, BENCH_FILE_OF_FOUR, BENCH_ENTRIES_OF_FOUR),
    "deterministic": deterministic,
    "few-heads": few_heads,
    "documents": documents,
    "host": host,
    "energy": energy,
}


PAGES: dict[Path, dict[str, Callable[[], list[str]]]] = {
    PAGE: TABLES,
    BACKENDS_PAGE: {"flash4": flash4},
    STRATEGIES_PAGE: {f"bench-{name}": partial(bench_numbers, name) for name in BENCH_STRATEGIES},
}


def page(path: Path = PAGE) -> str:
    """Return a page with all its tables written again."""
    text = path.read_text(encoding="utf-8")
    for name, make in PAGES[path].items():
        between = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        table = "\n".join(["", *make(), "", ""])
        text, count = between.subn(lambda found, table=table: found[1] + table + found[2], text)
        assert count == 1, f"{path.name} has {count} places for the table {name}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    if not arguments.check:
        for path in PAGES:
            path.write_text(page(path), encoding="utf-8")
        return 0
    same = all(path.read_text(encoding="utf-8") == page(path) for path in PAGES)
    print("the tables match the results" if same else "stale tables: run python -m benchmarks.tables")
    return 0 if same else 1


if __name__ == "__main__":
    end(main)
