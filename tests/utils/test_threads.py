"""Test background threads: they can be stopped and joined, and never delay or abort the end of a process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from burst_portable.utils.threads import Background

TIMES = 3

# A process that ends while one of its threads enters and leaves torch many times per millisecond. Processes are forked,
# so that torch is loaded once. Each child ends as a script does, after its last line.
ENDS = f"""
import gc, os, sys, threading
from types import SimpleNamespace
import torch

torch.set_num_threads(1)
numbers, looking = torch.rand(2_000), set()


def look(*_):
    looking.add(threading.current_thread().name)
    for _ in range(20):
        torch.sort(numbers)  # lets go of Python's lock, and wants it back
    return False


def peer_watch():
    from burst_portable.backends.cuda.peers import watch as module

    watch = module.Watch(None, 600.0, list, print, every=0.001)
    watch._ready = True  # its thread has no device
    watch._passes.append(module.WatchedPass(SimpleNamespace(query=lambda: True), SimpleNamespace(query=look)))
    watch._thread = module.Background(watch, module.Watch._watch, "peer watch")
    watch._thread.wake(watch)
    return watch


def hop_watch():
    from burst_portable.comm import faults as module

    watch = module.TransferWatch(600.0, print, every=0.001)
    hop = watch.add("a hop", [])
    hop.works, hop.ready = [SimpleNamespace(is_completed=look)], SimpleNamespace(query=lambda: True)
    return watch


def sensors():
    from burst_portable.profiling import clocks as module

    busy = lambda: [look() for _ in range(200)]  # a sample takes as long as the pause between two
    return module.Sensors(SimpleNamespace(read=busy, close=lambda: None))


def accounts():
    from burst_portable.comm import faults as module

    module.dist.get_rank = lambda: 0
    module.dist.group = SimpleNamespace(WORLD=SimpleNamespace(get_group_store=lambda: store))
    store = SimpleNamespace(set=print, check=look)
    exchange = module.NoteExchange([0, 1], "", poll=0.001)
    exchange.thread.wake(exchange)
    return exchange


def planted():
    def run():
        while True:
            look()

    threading.Thread(target=run, daemon=True).start()


names = sys.argv[1:]
from burst_portable.backends.cuda.peers import watch as _
from burst_portable.comm import faults as _
from burst_portable.profiling import clocks as _

gc.freeze()  # an end goes through what was made since
for _ in range({TIMES}):
    child = os.fork()
    if not child:
        made = [globals()[name]() for name in names]
        while len(looking) < len(names):
            pass
        sys.exit(0)  # what follows is the end of the interpreter
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def ends(*names):
    """Run `TIMES` processes with these threads. Return their exit codes, total seconds and stderr."""
    started = time.monotonic()
    run = subprocess.run([sys.executable, "-c", ENDS, *names], capture_output=True, text=True, timeout=120)
    codes = [int(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("ended with")]
    assert len(codes) == TIMES, run.stderr
    return codes, time.monotonic() - started, run.stderr


def test_process_with_threads_inside_torch_exits_cleanly():
    codes, seconds, told = ends("peer_watch", "hop_watch", "sensors", "accounts")
    assert codes == [0] * TIMES, told
    assert seconds < 60, "nobody waits for a timeout"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads are no longer ended there, they hang")
def test_unmanaged_daemon_thread_aborts_process():
    """The negative control of the test above, without `Background`."""
    codes, _, told = ends("planted")
    assert -6 in codes
    assert "terminate called without an active exception" in told


# ---------------------------------------------------------------------------------------------- in one process


class Owner:
    def __init__(self):
        self.worked, self.stopped = 0, threading.Event()
        self.thread = Background(self, Owner.work, "a test's")

    def work(self):
        self.worked += 1

    def stay(self):
        while self.thread.pause(30):
            pass
        self.stopped.set()


def alive(owner):
    return owner.thread._thread.is_alive()


def until(happened):
    end = time.monotonic() + 10
    while not happened() and time.monotonic() < end:
        time.sleep(0.001)
    return happened()


def test_background_works_when_woken_and_stops():
    owner = Owner()
    assert owner.worked == 0
    for times in (1, 2):
        owner.thread.wake(owner)
        assert until(lambda times=times: owner.worked == times)
    owner.thread.stop()
    assert not alive(owner)
    owner.thread.stop()


def test_background_finishes_woken_work_before_stop():
    owner = Owner()
    owner.thread.wake(owner)
    owner.thread.stop()
    assert owner.worked == 1


def test_background_stop_interrupts_pause():
    owner = Owner()
    owner.thread._work = Owner.stay
    owner.thread.wake(owner)
    time.sleep(0.05)
    started = time.monotonic()
    owner.thread.stop()
    assert owner.stopped.is_set()
    assert not alive(owner)
    assert time.monotonic() - started < 5


def test_idle_owner_is_collected_and_its_thread_ends():
    owner = Owner()
    owner.thread.wake(owner)
    background = owner.thread
    assert until(background._calls.empty)
    thread, gone = owner.thread._thread, weakref.ref(owner)
    del owner
    assert until(lambda: gc.collect() >= 0 and gone() is None)
    thread.join(10)
    assert not thread.is_alive()


def test_working_owner_is_not_collected():
    owner = Owner()
    owner.thread._work = Owner.stay
    owner.thread.wake(owner)
    background, gone = owner.thread, weakref.ref(owner)
    assert until(background._calls.empty)
    del owner
    gc.collect()
    assert gone() is not None
    background.stop()
    gc.collect()
    assert until(lambda: gone() is None)


def test_stop_in_forked_child_keeps_parent_thread():
    owner = Owner()
    with owner.thread._stopped._cond:  # as another thread may hold it when a process forks
        child = os.fork()
        if not child:
            owner.thread.stop()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert alive(owner)
    owner.thread.stop()
