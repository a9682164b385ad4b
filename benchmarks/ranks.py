"""Start the ranks of a benchmark: connect them, time their calls, and stop a run that hangs."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.backends.selection import for_device, group_options_of
from burst_portable.comm.base import Transport
from burst_portable.config import Config
from burst_portable.errors import BurstError, InputError
from burst_portable.measuring import timing as measuring


@dataclass
class Links:
    """The ranks and their transports by name; a text is the reason why a transport is not available.

    high_priority: Whether messages of the group have priority; set by `connect`.
    """

    group: Any
    rank: int
    size: int
    device: torch.device
    timeout: float
    transports: dict[str, Transport | str] = field(default_factory=dict)
    closing: ExitStack = field(default_factory=ExitStack)
    high_priority: bool = False
    parallel: bool = False  # torch's context_parallel has been entered

    def mesh(self, transport: Transport) -> bp.Mesh:
        config = Config(timeout=self.timeout, transport=transport.name)
        return bp.Mesh(self.rank, self.size, lambda device_type: transport, group=self.group, config=config)


def join(timeout: float) -> Links:
    """Connect the ranks, one per device if there are devices.

    Raise `InputError` without a launcher, and for more ranks than devices.
    """
    if "RANK" not in os.environ:
        raise InputError("this measures several ranks; start it with torchrun, as --help shows")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is not None:
        check_device(local, torch.accelerator.device_count())
        torch.accelerator.set_device_index(local)
        device = torch.device(kind.type, local)
        of_kind = for_device(kind.type)
        backend = of_kind.capabilities.process_group
    else:
        torch.set_num_threads(1)
        device, backend = torch.device("cpu"), "gloo"
    group_timeout = timedelta(seconds=timeout)
    options = (
        {"device_id": device, **group_options_of(of_kind, group_timeout)}
        if kind is not None
        else {"timeout": group_timeout}
    )
    dist.init_process_group(backend, **options)
    return Links(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), device, timeout)


def check_device(local_rank: int, devices: int) -> None:
    """Raise `InputError` if this host has no device for a rank."""
    if local_rank >= devices:
        got, allowed = f"local rank {local_rank}", f"{devices} ranks per host, one per device"
        raise InputError("this host has no device for the rank", got=got, allowed=allowed)


def leave() -> None:
    """Close the process group, as the last step of a rank."""
    dist.destroy_process_group()
    # gloo's threads give up a collective's tensors a moment after it is done, and need the interpreter for it: where
    # that is ending, the process is aborted.
    time.sleep(0.2)


def connect(links: Links, wanted: list[str]) -> None:
    """Connect the requested transports, or record why one is not available."""
    backend = for_device(links.device.type)
    plain = backend.transport(links.group, links.timeout)
    links.high_priority = plain.high_priority
    for name in wanted:
        if name == plain.name:
            links.transports[name] = plain
        elif name != backend.capabilities.direct_transport:
            links.transports[name] = f"the backend {backend.name} has none of that name"
        else:
            try:
                links.transports[name] = backend.connect_direct(plain, links.group, links.timeout)
            except BurstError as error:
                links.transports[name] = str(error)


class Clock(measuring.Clock):
    """Seconds of work on this rank's device, the slowest rank's on all ranks."""

    def __init__(self, links: Links) -> None:
        super().__init__(links.device, streams=for_device(links.device.type).capabilities.streams)

    def meet(self) -> None:
        dist.barrier()

    def slowest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        largest = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)


class Guard:
    """Ends the process when a part of the run takes too long: a rank that hangs must not eat the whole session."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def watch(self, seconds: float, what: str) -> threading.Timer:
        timer = threading.Timer(seconds, self._end, (seconds, what))
        timer.daemon = True
        timer.start()
        return timer

    def _end(self, seconds: float, what: str) -> None:
        print(f"rank {self._rank}: {what} took more than {seconds:g} s; giving up", file=sys.stderr, flush=True)
        os._exit(7)
