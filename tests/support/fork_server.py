"""Run programs in processes that are forked from one that has imported torch and Transformers.

A new interpreter imports them in three to five seconds. Each pytest process starts one server when a test first needs
it. A test of sitecustomize.py, of signals or of the imports themselves needs a new interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
IMPORTED = ["tests.support.forked", "transformers.models.llama.modeling_llama"]


def server_context() -> ForkServerContext:
    """Return the context of processes that are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run_program(
    program: str | Path,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    timeout: float = 100.0,
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run a module (`python -m`) or a file with one torch thread in the repository's folder; return what it printed.

    Args:
        program: The name of a module, or the path of a file.
        *arguments: What `sys.argv` has behind the program's name.
        environment: All environment variables. Default: those of this process.
        timeout: Seconds after which the process is killed; its exit code is -9 then.
        python: Its `sys.executable`, see `forked_python`. Default: that of this process.
    """
    command = [str(program), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        process = server_context().Process(target=_run, args=(command, dict(environment or os.environ), files, python))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        stdout, stderr = (file.read_text(encoding="utf-8") for file in files)
    return subprocess.CompletedProcess(command, process.exitcode or 0, stdout, stderr)


def _run(command: list[str], environment: Mapping[str, str], files: tuple[Path, Path], python: str) -> None:
    sys.executable = python
    multiprocessing.set_executable(python)
    os.environ.clear()
    os.environ |= environment
    os.chdir(ROOT)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    for number, path in enumerate(files, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    torch.set_num_threads(1)
    sys.argv = command
    if command[0].endswith(".py"):
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
