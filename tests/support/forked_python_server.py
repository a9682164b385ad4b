"""Fork a process that has imported torch and Transformers for each program that connects: see forked_python.py.

python -m tests.support.forked_python_server SOCKET PROGRAM

SOCKET is the number of the open socket. The imports are left to the first program. The server ends with its stdin.
"""

from __future__ import annotations

import gc
import importlib
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
from contextlib import suppress
from fcntl import F_DUPFD, fcntl
from pathlib import Path

IMPORTED = ("tests.support.forked", "transformers.models.llama.modeling_llama")
EXECUTABLE = "FORKED_EXECUTABLE"
"""The variable of a program whose `sys.executable` is not PROGRAM."""
RARE_COLLECTIONS = (20_000, 10, 50)
"""Thresholds of the garbage collector. With those of Python, it took a tenth of the tests of plans."""


def serve(listener: socket.socket, program: str) -> None:
    """Start a forked process for each program until stdin is closed."""
    select.select([listener, sys.stdin], [], [])
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # imported objects are excluded from garbage collection
    gc.set_threshold(*RARE_COLLECTIONS)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _supervise(link, program)
            os._exit(0)
        link.close()
        with suppress(ChildProcessError):  # all have ended
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _supervise(link: socket.socket, program: str) -> None:
    """Start the process, send it the program's signals, and report its end. End it if the program ends first."""
    size, received, *_ = socket.recv_fds(link, 8, 64)
    with link.makefile("rb") as stream:
        what = json.loads(stream.read(int.from_bytes(size, "little")))
    process = os.fork()
    if process == 0:
        link.close()
        os._exit(_run(what, received, program))
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


def _run(what: tuple[list[str], dict[str, str], str, list[int]], received: list[int], program: str) -> int:
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
    sys.executable = environment.pop(EXECUTABLE, program)  # of torchrun, which starts its ranks by it
    multiprocessing.set_executable(sys.executable)
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    tempfile.tempdir = None  # read from the environment again
    paths = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = ["", *paths]
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):  # an option of Python
        del arguments[0]
    sys.argv = arguments[arguments[0] == "-m" :]
    sys.modules["torch"].set_num_threads(1)
    try:
        return _run_code(arguments, paths)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _run_code(arguments: list[str], paths: list[str]) -> int:
    """Run what Python's arguments name, print the error that ends it, and return the exit code."""
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
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
