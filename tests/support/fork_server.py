"""Run programs in processes that are forked from one that has imported torch and Transformers.

A new interpreter imports them in three to five seconds. A test of signals or of the imports themselves needs a new
interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.forked_python import ROOT, VARIABLE
from tests.support.forked_python_server import EXECUTABLE


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
    module = [] if str(program).endswith(".py") else ["-m"]
    command = [os.environ[VARIABLE], *module, str(program), *map(str, arguments)]
    # Ranks that outlive the process would keep a pipe open.
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**(environment or os.environ), EXECUTABLE: python},
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        )  # fmt: skip
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        printed = [file.seek(0) or file.read() for file in (stdout, stderr)]
    return subprocess.CompletedProcess(command, process.returncode, *printed)
