"""One rank of test_wire_bytes: the benchmark over gloo, with what transports are given in place of a device's counters.

torchrun --nproc-per-node 2 tests/spmd/wire_rank.py OPTIONS OF benchmarks/wire_bytes.py
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a script by torchrun
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ranks import leave
from benchmarks.script import end
from benchmarks.wire_bytes import Run, options
from burst_portable.comm.wrapped import WrappedTransport


class Counted(WrappedTransport):
    """Counts the bytes that leave and come."""

    crossed = (0, 0)

    def post(self, sends, receives, label=""):
        sizes = (sum(message.buffer.numel() for message in messages) for messages in (sends, receives))
        self.crossed = tuple(before + size for before, size in zip(self.crossed, sizes, strict=True))
        return super().post(sends, receives, label)


class Counters:
    """See `backends.base.LinkCounters`."""

    def read(self):
        return self.transport.crossed

    def close(self):
        """Nothing is held."""


def main() -> int:
    counters = Counters()
    run = Run(options().parse_args(), counters)
    counters.transport = run.links.transports["gloo"] = Counted(run.links.transports["gloo"])
    code = run.main()
    leave()
    return code


if __name__ == "__main__":
    end(main)
