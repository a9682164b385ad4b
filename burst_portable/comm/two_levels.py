"""Use separate connections for messages between nodes.

::

    one transport     hops inside the node and between nodes, posted together, end together; the next hop waits too
    two               0 -> 1 -> 2 -> 3       hops inside the node, one after the other
                      0 ------------> 4      meanwhile: between nodes, a whole inner round long

A process group that launches kernels launches one for all messages that are posted at once, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import compress
from typing import Any

import torch.distributed as dist

from burst_portable.comm.base import Handle, Message, Transport, WrappedTransport
from burst_portable.comm.torch_dist import named_error


class TwoLevelTransport(WrappedTransport):
    """See `comm.base.Transport`. Everything before the first pass goes through `intra_node`.

    Args:
        intra_node: moves messages inside a node.
        connect: makes what moves messages between nodes; called in the first pass, on all ranks.
        ranks_per_node: ranks per node.
    """

    def __init__(self, intra_node: Transport, connect: Callable[[], Transport], ranks_per_node: int) -> None:
        super().__init__(intra_node)
        self.intra_node, self.ranks_per_node = intra_node, ranks_per_node
        self.inter_node: Transport | None = None
        self._connect = connect

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        self.intra_node.begin(digest, inbox)
        if self.inter_node is None:
            self.inter_node = self._connect()
        self.inter_node.begin(digest, inbox)

    def end(self) -> None:
        if self.inter_node is not None:
            self.inter_node.end()
        self.intra_node.end()

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        if self.inter_node is None:
            return self.intra_node.post(sends, receives, label)
        leaving, arriving = dict[int, Handle](), dict[int, Handle]()
        for transport, apart in ((self.inter_node, True), (self.intra_node, False)):
            there, here = ([self._apart(m) == apart for m in messages] for messages in (sends, receives))
            if any(there) or any(here):
                posted = transport.post(list(compress(sends, there)), list(compress(receives, here)), label)
                leaving.update(zip(compress(range(len(sends)), there), posted[0], strict=True))
                arriving.update(zip(compress(range(len(receives)), here), posted[1], strict=True))
        return [leaving[i] for i in range(len(sends))], [arriving[i] for i in range(len(receives))]

    def _apart(self, message: Message) -> bool:
        return message.peer // self.ranks_per_node != self.rank // self.ranks_per_node

    def close(self) -> None:
        self.intra_node.close()
        if self.inter_node is not None:
            self.inter_node.close()


def with_two_levels(
    transport: Callable[[dist.ProcessGroup], Transport],
    group: dist.ProcessGroup,
    ranks_per_node: int,
    timeout: float,
    options: Callable[[timedelta], dict[str, Any]],
) -> TwoLevelTransport:
    """Make two transports for one group: its own inside nodes, and one of a second group of these ranks between nodes.

    Args:
        transport: makes the transport of a process group.
        options: returns further arguments of `new_group` for a timeout; used if the group has one backend.
        timeout: of a message, in seconds. The timeout of the new group is twice that, so that our error comes first.
    """

    def connect() -> Transport:
        ranks = dist.get_process_group_ranks(group)
        how: dict[str, Any] = {"backend": dist.get_backend_config(group), "use_local_synchronization": True}
        group_timeout = timedelta(seconds=2 * timeout)
        how.update({"timeout": group_timeout} if "," in str(how["backend"]) else options(group_timeout))
        if ranks != sorted(ranks):  # only releases of torch that have this option make such groups
            how["sort_ranks"] = False
        try:
            return transport(dist.new_group(ranks, **how))
        except RuntimeError as error:
            told = f"rank {dist.get_rank(group)}, connecting nodes: meeting all ranks"
            raise named_error(error, told, group) from error

    return TwoLevelTransport(transport(group), connect, ranks_per_node)
