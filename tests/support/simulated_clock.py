"""Simulate a clock on which kernel calls and messages take given numbers of seconds."""

from __future__ import annotations

import torch

from burst_portable.measuring.timing import Clock

CPU = torch.device("cpu")


class Machine:
    """Simulate the time of a rank: of kernel calls, and of messages on a separate link.

    Concurrent messages delay a kernel by a share of their time.
    """

    def __init__(self, *, kernel: float = 0.0, message: float = 0.0, per_byte: float = 0.0, share: float = 0.0) -> None:
        self.now = self.link = 0.0
        self.kernel, self.message, self.per_byte, self.share = kernel, message, per_byte, share

    def compute(self) -> None:
        beside = max(0.0, self.link - self.now)
        alone = self.kernel / (1 - self.share) if self.share < 1 else float("inf")
        self.now += min(alone, self.kernel + self.share * beside)

    # The interface of a transport.

    def begin(self, digest: bytes, bytes_per_sender: int) -> None:
        self.link = max(self.link, self.now)

    def receive_buffer(self, size: int, device: torch.device, peer: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def post(self, sends, receives, label):
        self.link += sum(self.message + self.per_byte * m.buffer.numel() for m in sends)
        return [self] * len(sends), [self] * len(receives)

    def wait(self) -> None:
        self.now = max(self.now, self.link)

    def end(self) -> None:
        pass


class Simulated(Clock):
    def __init__(self, machine: Machine) -> None:
        super().__init__(CPU, streams=False)
        self.machine = machine

    def time(self, call, calls):
        before = self.machine.now
        for _ in range(calls):
            call()
        return (self.machine.now - before) / calls

    def meet(self) -> None:
        pass

    def slowest(self, value: float) -> float:
        return value
