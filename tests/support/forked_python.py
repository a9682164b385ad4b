"""Define a program that runs modules and files like Python, in processes forked from one that has imported torch.

    forked_python     fixture: the path of the program
    ranks_are_forked  fixture: commands and `multiprocessing` start their ranks by the program

An interpreter of a rank imports torch and Transformers in four seconds. The program passes on SIGINT and SIGTERM. Its
process has the environment of the server in /proc, and ends without the functions of `atexit`. All processes of a test
run share one server, see forked_python_server.py.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIABLE = "FORKED_PYTHON"
"""The environment variable with the path of the program. The workers of xdist inherit it."""

# It sends arguments, environment, folder, open files and signals to the server, and ends as the forked process does.
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if os.path.exists(f"/proc/self/fd/{{file}}")]  # the folder is closed
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    what = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), files]).encode()
    socket.send_fds(link, [len(what).to_bytes(8, "little")], files)
    link.sendall(what)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: link.send(bytes([number])))
    code = int(link.recv(16) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def pytest_configure(config: pytest.Config) -> None:
    """Start the server, unless the process that started this one has done so."""
    if not hasattr(config, "workerinput"):
        stack = ExitStack()
        stack.enter_context(_server())
        config.add_cleanup(stack.close)


@contextmanager
def _server() -> Iterator[None]:
    """Write the program, and run the server for it."""
    with tempfile.TemporaryDirectory(prefix="forked-python-") as folder, socket.socket(socket.AF_UNIX) as listener:
        program, address = Path(folder, "python"), str(Path(folder, "socket"))
        program.write_text(PROGRAM.format(python=sys.executable, address=address))
        program.chmod(0o755)
        listener.bind(address)
        listener.listen(64)
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(program)
        command = [sys.executable, "-m", "tests.support.forked_python_server", str(listener.fileno()), str(program)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, pass_fds=[listener.fileno()]) as server:
            yield
            server.kill()
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


@pytest.fixture(scope="session")
def forked_python() -> str:
    """Return the path of the program."""
    return os.environ[VARIABLE]


@contextmanager
def forked_multiprocessing(program: str) -> Iterator[None]:
    """Start the processes of `multiprocessing` by the program."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(program)
    try:
        yield
    finally:
        multiprocessing.set_executable(before)


@pytest.fixture
def ranks_are_forked(forked_python: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "executable", forked_python)
    with forked_multiprocessing(forked_python):
        yield
