"""Separate connections for messages that cross from node to node.

::

    one transport     hops inside the node and between nodes, posted together, end together; the next hop waits too
    two               0 -> 1 -> 2 -> 3       hops inside the node, one after the other
                      0 ------------> 4      meanwhile: between nodes, a whole inner round long

A process group that launches kernels launches one for all messages that are posted at once, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import compress
from typing import Any

import torch.distributed as dist

from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.comm.torch_dist import named_error


class TwoLevelTransport(Transport):
    """See `comm.base.Transport`. Everything before the first pass goes through `near`.

    Args:
        near: moves messages inside a node.
        connect: makes what moves messages between nodes; called in the first pass, on all ranks.
        node: ranks per node.
    """

    def __init__(self, near: Transport, connect: Callable[[], Transport], node: int) -> None:
        self.near, self.node = near, node
        self.far: Transport | None = None
        self.name, self.rank, self.size = near.name, near.rank, near.size
        self.host, self.lasting, self.goes_first = near.host, near.lasting, near.goes_first
        self._connect = connect

    # What has begun stands at `near`, where other meshes of the group look.

    def unended(self) -> str:
        return self.near.unended()

    def between_passes(self) -> AbstractContextManager[None]:
        return self.near.between_passes()

    def fall_behind(self) -> None:
        self.near.fall_behind()

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        self.near.begin(digest, inbox)
        if self.far is None:
            self.far = self._connect()
        self.far.begin(digest, inbox)

    def end(self) -> None:
        if self.far is not None:
            self.far.end()
        self.near.end()

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        if self.far is None:
            return self.near.post(sends, receives, label)
        leaving, arriving = dict[int, Handle](), dict[int, Handle]()
        for transport, apart in ((self.far, True), (self.near, False)):
            there, here = ([self._apart(m) == apart for m in messages] for messages in (sends, receives))
            if any(there) or any(here):
                posted = transport.post(list(compress(sends, there)), list(compress(receives, here)), label)
                leaving.update(zip(compress(range(len(sends)), there), posted[0], strict=True))
                arriving.update(zip(compress(range(len(receives)), here), posted[1], strict=True))
        return [leaving[i] for i in range(len(sends))], [arriving[i] for i in range(len(receives))]

    def _apart(self, message: Message) -> bool:
        return message.peer // self.node != self.rank // self.node

    def share(self, data: bytes, label: str = "share", deadline: float | None = None) -> list[bytes]:
        return self.near.share(data, label, deadline)

    def close(self) -> None:
        self.near.close()
        if self.far is not None:
            self.far.close()


def with_two_levels(
    transport: Callable[[dist.ProcessGroup], Transport],
    group: dist.ProcessGroup,
    node: int,
    deadline: float,
    options: Callable[[timedelta], dict[str, Any]],
) -> TwoLevelTransport:
    """Two transports for one group: its own inside nodes, and that of a second group of the same ranks between nodes.

    Args:
        transport: makes the transport of a process group.
        options: what else `new_group` takes for a timeout, if the group has one backend.
        deadline: of a hop, in seconds. The new group's own is twice that, so that our error comes first.
    """

    def connect() -> Transport:
        ranks = dist.get_process_group_ranks(group)
        how: dict[str, Any] = {"backend": dist.get_backend_config(group), "use_local_synchronization": True}
        timeout = timedelta(seconds=2 * deadline)
        how.update({"timeout": timeout} if "," in str(how["backend"]) else options(timeout))
        if ranks != sorted(ranks):  # only releases of torch that have this option make such groups
            how["sort_ranks"] = False
        try:
            return transport(dist.new_group(ranks, **how))
        except RuntimeError as error:
            told = f"rank {dist.get_rank(group)}, connecting nodes: meeting all ranks"
            raise named_error(error, told, group) from error

    return TwoLevelTransport(transport(group), connect, node)
