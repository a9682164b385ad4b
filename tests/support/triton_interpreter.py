"""Send cases to a process that runs them in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # every test loads this module
    from tests.support.triton_cases import Case

Ask = Callable[[dict[str, object]], None]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Return a function that sends one request to the worker and raises its error."""
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 makes numbers of arrays in a way that numpy 2.4 no longer has")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.support.triton_interpreter_worker"]
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
