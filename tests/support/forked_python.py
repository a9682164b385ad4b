"""Define a program that runs modules and files like Python, in processes forked from one that has imported torch.

    forked_python     fixture: the path of the program
    ranks_are_forked  fixture: commands and `multiprocessing` start their ranks by the program

An interpreter of a rank imports torch and Transformers in four seconds. The program passes on SIGINT and SIGTERM. Its
process has the environment of the server in /proc, and ends without the functions of `atexit`.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.spawn
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from fcntl import F_DUPFD, fcntl
from pathlib import Path

import pytest
import torch

from tests.support.fork_server import server_context

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


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the server, and return the path of the program."""
    folder = tmp_path_factory.mktemp("python")
    program, address = folder / "python", str(folder / "socket")
    program.write_text(PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        server = server_context().Process(target=_serve, args=(listener, str(program)), daemon=True)
        server.start()
    yield str(program)
    server.kill()
    server.join()
    server.close()


@pytest.fixture
def ranks_are_forked(forked_python: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "executable", forked_python)
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(forked_python)
    yield
    multiprocessing.set_executable(before)


def _serve(listener: socket.socket, program: str) -> None:
    sys.executable = program  # of torchrun, which starts its ranks by it
    while True:
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _supervise(link)
            os._exit(0)
        link.close()
        with suppress(ChildProcessError):  # all have ended
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _supervise(link: socket.socket) -> None:
    """Start the process, send it the program's signals, and report its end. End it if the program ends first."""
    size, received, *_ = socket.recv_fds(link, 8, 64)
    with link.makefile("rb") as stream:
        what = json.loads(stream.read(int.from_bytes(size, "little")))
    process = os.fork()
    if process == 0:
        link.close()
        os._exit(_run(what, received))
    for file in received:
        os.close(file)
    ended = os.pidfd_open(process)
    while ended not in select.select([link, ended], [], [])[0]:
        number = link.recv(1)
        os.kill(process, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        link.sendall(str(code).encode())
    except BrokenPipeError:  # the program has ended
        return


def _run(what: tuple[list[str], dict[str, str], str, list[int]], received: list[int]) -> int:
    """Run the module, the file or the code with these files. Return its exit code."""
    arguments, environment, folder, numbers = what
    files = [fcntl(file, F_DUPFD, 256) for file in received]  # away from all numbers
    for file in received:
        os.close(file)
    for number, file in zip(numbers, files, strict=True):
        os.dup2(file, number)
        os.close(file)
    # The server's own streams may be files, which seek.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    multiprocessing.current_process().daemon = False  # it may start processes
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    tempfile.tempdir = None  # read from the environment again
    paths = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = ["", *paths]
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):  # an option of Python
        del arguments[0]
    sys.argv = arguments[arguments[0] == "-m" :]
    torch.set_num_threads(1)
    try:
        for path in paths:  # as Python does when it starts
            if (planted := Path(path, "sitecustomize.py")).exists():
                runpy.run_path(str(planted))
        if arguments[0] == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            del sys.argv[1]
            exec(arguments[1], {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code: object = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # Python prints it, too  # noqa: BLE001
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
