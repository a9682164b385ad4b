"""The Triton kernels in Triton's interpreter, against dense attention in float64: every mask, layout and shape.

float32 and float16 alone: the interpreter's bfloat16 is garbage, without a word (seen in 3.7.1 and 3.9.0).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.kernels.triton_cases import Case, cases
from tests.kernels.triton_checks import CHECKS

triton = pytest.importorskip("triton")

Ask = Callable[[dict[str, object]], None]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Sends one request to the worker and fails as it failed."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 makes numbers of arrays in a way that numpy 2.4 no longer has")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.kernels.interpreter_worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def request(what: dict[str, object]) -> None:
            worker.stdin.write(json.dumps(what) + "\n")
            worker.stdin.flush()
            answer = json.loads(worker.stdout.readline() or '{"failed": "the worker is gone"}')
            if "failed" in answer:
                pytest.fail(answer["failed"], pytrace=False)

        yield request
        worker.stdin.close()


def as_request(case: Case) -> dict[str, object]:
    return {**asdict(case), "dtype": str(case.dtype).removeprefix("torch.")}


# Contiguous shards of several ranks differ from one by full and empty tiles alone: with -m full.
COMMON = [c for c in cases(45, torch.float32, heads=1) if (c.layout, c.ranks) != ("contiguous", 2)]


@pytest.mark.parametrize("case", COMMON, ids=str)
def test_float32(ask: Ask, case: Case) -> None:
    ask(as_request(case))


@pytest.mark.parametrize(
    "case", [c for c in cases(41, torch.float16, heads=1, scale=0.2) if c.ranks == 1][::3], ids=str
)
def test_float16(ask: Ask, case: Case) -> None:
    ask(as_request(case))


@pytest.mark.parametrize(
    "case", [c for c in cases(48, torch.float32, heads=1) if c.layout != "striped" and c.ranks < 3][::4], ids=str
)
def test_descriptors(ask: Ask, case: Case) -> None:
    """The same loads as hardware descriptors make them, as far as the interpreter knows them."""
    ask({**as_request(case), "loads": "descriptors"})


@pytest.mark.parametrize("name", CHECKS)
def test_contract(ask: Ask, name: str) -> None:
    ask({"check": name})


@pytest.mark.full
@pytest.mark.parametrize("loads", ["pointers", "descriptors"])
@pytest.mark.parametrize("case", [*cases(150, torch.float32), *cases(97, torch.float16, scale=0.2)], ids=str)
def test_longer(ask: Ask, case: Case, loads: str) -> None:
    ask({**as_request(case), "loads": loads})
