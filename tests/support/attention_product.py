"""Run the product of masks, layouts, strategies, ranks and heads over threads, against attention in float64.

`python -m tests.support.attention_product --resume FILE` runs all of it in random order, which takes an hour or more on
one core. It appends a line to FILE for each part that ended, and a later call skips the parts that FILE has.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

import burst_portable as bp
from burst_portable.conformance.cases import AXES, PRODUCT_RANKS, Case, product
from burst_portable.conformance.oracle import Answer, errors_and, find_too_large, tolerances
from tests.support.attention_cases import Inputs, expected, make_inputs, on_one_rank
from tests.support.one_core import one_core
from tests.support.poison import fresh_memory_is_nan

FULL_AXES = {**{axis: AXES[axis] for axis in ("mask", "layout", "strategy", "ranks", "heads")}, "ranks": PRODUCT_RANKS}
DROPOUT = 0.3
_PART = 50  # cases


@dataclass(frozen=True)
class Reference:
    """Inputs and float64 results, which all strategies, layouts and numbers of ranks share."""

    inputs: Inputs
    exact: Answer
    allowed: dict[str, float]

    def violations(self, answer: Answer) -> dict[str, tuple[float, float]]:
        """Return the quantities whose error exceeds the tolerance: name -> (error, tolerance)."""
        return find_too_large(errors_and(self.allowed, answer, self.exact))


@lru_cache(maxsize=256)
def _reference(alike: Case) -> Reference:
    inputs = make_inputs(alike)
    exact, plain = expected(alike, inputs)
    return Reference(inputs, exact, tolerances(exact, plain, alike.dtype))


def reference(case: Case) -> Reference:
    """Return the reference of a case. Cases that differ only in layout, strategy and ranks share one."""
    return _reference(replace(case, layout="contiguous", strategy="ring", ranks=1))


def check(case: Case, compute: Callable[..., Answer] = on_one_rank) -> None:
    """Check that all ranks return bitwise equal unsharded results, and compare one of them with the oracle."""
    right = reference(case)
    first, *others = bp.run_threads(case.ranks, lambda mesh: compute(mesh, case, right.inputs, at_once=True))
    if wrong := right.violations(first):
        raise AssertionError(f"errors and tolerances: {wrong}")
    for rank, other in enumerate(others, 1):
        if name := first.differs(other):
            raise AssertionError(f"{name} of rank {rank} has other bits than that of rank 0")


@lru_cache(maxsize=4)
def parts(dropout: float = 0.0, seed: int = 0) -> Sequence[Sequence[Case]]:
    """Return the product in parts of 50 cases of one mask and layout, in random order.

    Plans of equal masks and layouts share their tiles, so such cases take a third less time one after another.
    """
    alike: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in product({**FULL_AXES, "dropout": (dropout,)}):
        alike[case.mask, case.layout].append(case)
    shuffler, found = random.Random(seed), []
    for cases in alike.values():
        shuffler.shuffle(cases)
        found += [cases[start : start + _PART] for start in range(0, len(cases), _PART)]
    shuffler.shuffle(found)
    return found


def run(dropout: float, seed: int, numbers: Sequence[int]) -> Iterator[dict[str, object]]:
    """Run parts, and yield for each its number, the number of its cases, and the specs and errors of wrong ones."""
    for number in numbers:
        wrong, cases = {}, parts(dropout, seed)[number]
        for case in cases:
            try:
                check(case)
            except (AssertionError, bp.BurstError, RuntimeError) as error:
                wrong[case.spec()] = str(error)
        yield {"dropout": dropout, "seed": seed, "part": number, "cases": len(cases), "wrong": wrong}


def main(arguments: Sequence[str]) -> int:
    """Run the parts that a file does not have. Return 1 if a case is wrong."""
    parser = argparse.ArgumentParser(prog="attention_product", description=__doc__)
    parser.add_argument("--resume", type=Path, required=True, help="file with a line per part that ended")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--dropout", type=float, default=0.0, help=f"probability, such as {DROPOUT}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no part after this time")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    until, setting = time.monotonic() + options.seconds, {"dropout": options.dropout, "seed": options.seed}
    lines = options.resume.read_text(encoding="utf-8").splitlines() if options.resume.exists() else []
    ended = [row for row in map(json.loads, lines) if {name: row[name] for name in setting} == setting]
    done = {row["part"] for row in ended}
    left = [number for number in range(len(parts(**setting))) if number not in done]
    with options.resume.open("a", encoding="utf-8") as file, fresh_memory_is_nan(), one_core():
        for row in run(**setting, numbers=left):
            ended.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if time.monotonic() > until:
                break
    wrong = [spec for row in ended for spec in row["wrong"]]
    total = sum(map(len, parts(**setting)))
    print(f"{sum(row['cases'] for row in ended)} of {total} cases, {len(wrong)} wrong", *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
