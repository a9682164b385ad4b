"""Run one rank of tests/benchmarks/test_wire_bytes.py over gloo, with simulated link counters.

python -m tests.support.ranks_of 2 tests.support.wire_bytes_ranks OPTIONS OF benchmarks/wire_bytes.py
"""

from __future__ import annotations

from benchmarks.ranks import leave
from benchmarks.wire_bytes import Run, options
from burst_portable.comm.base import WrappedTransport


class Counted(WrappedTransport):
    """Count the sent and received bytes."""

    crossed = (0, 0)

    def post(self, sends, receives, label=""):
        sizes = (sum(message.buffer.numel() for message in messages) for messages in (sends, receives))
        self.crossed = tuple(before + size for before, size in zip(self.crossed, sizes, strict=True))
        return super().post(sends, receives, label)


class Counters:
    """Implement `backends.base.LinkCounters`."""

    def read(self):
        return self.transport.crossed

    def close(self):
        """Do nothing: there is nothing to release."""


def main() -> int:
    counters = Counters()
    run = Run(options().parse_args(), counters)
    counters.transport = run.links.transports["gloo"] = Counted(run.links.transports["gloo"])
    code = run.main()
    leave()
    return code
