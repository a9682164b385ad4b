"""Test in which order threads compile the kernels of a call."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from burst_portable.kernels.triton import arguments
from burst_portable.kernels.triton.arguments import Turns


def begins_early(turns, first_ends, seconds=0.05):
    """Return whether a second task begins before the first one has ended its turn, and the error of the first one."""
    begun, go, early = Event(), Event(), Event()

    def first(turn):
        with turn:
            begun.set()
            go.wait(20)
            first_ends()

    def second(turn):
        with turn:
            early.set()

    before, after = turns.take(), turns.take()
    with ThreadPoolExecutor(2) as pool:
        later, earlier = pool.submit(second, after), pool.submit(first, before)
        assert begun.wait(20)
        found = early.wait(seconds)
        go.set()
        later.result(20)
        return found, earlier.exception(20)


def fail():
    raise ValueError("no such kernel")


def test_turns_begin_in_the_order_of_take():
    early, error = begins_early(Turns(), lambda: None)
    assert not early
    assert error is None
    early, error = begins_early(Turns(), fail)  # an error ends the turn too
    assert not early
    assert isinstance(error, ValueError)


def test_turns_end_lets_the_next_task_begin():
    turns, begun = Turns(), Event()

    def first(turn):
        with turn:
            turns.end()
            return begun.wait(10)

    def second(turn):
        with turn:
            begun.set()

    with ThreadPoolExecutor(2) as pool:
        earlier = pool.submit(first, turns.take())
        pool.submit(second, turns.take())
        assert earlier.result(20), "both tasks run at the same time"


def test_begins_early_finds_tasks_without_turns():
    class Unordered(Turns):
        """The planted bug: no task waits."""

        def take(self):
            self._last.set()
            return super().take()

    assert begins_early(Unordered(), lambda: None, seconds=20)[0]


def test_cache_manager_ends_the_turn_with_its_first_file():
    written = []

    class Folder:
        def put(self, data, name, binary=True):
            written.append((data, name, binary))
            return f"folder/{name}"

    class CountedTurns:
        ended = 0

        def end(self):
            assert len(written) == self.ended, "the turn ends before the file is written"
            self.ended += 1

    turns = CountedTurns()
    manager = arguments.ending_turns(Folder, turns)()
    assert manager.put("text", "kernel.source", binary=False) == "folder/kernel.source"
    assert written == [("text", "kernel.source", False)]
    assert turns.ended == 1
