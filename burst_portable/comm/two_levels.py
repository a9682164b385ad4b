"""Use separate connections for messages between nodes.

::

    one transport     messages inside the node and between nodes, posted together, also end together
    two               0 -> 1 -> 2 -> 3       inside the node, one after the other
                      0 ------------> 4      between nodes, at the same time, for a complete round of the inner ring

A process group that launches kernels launches one for all messages that are posted at once. With one transport, the
next message inside the node would wait for the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import compress
from typing import Any

import torch.distributed as dist

from burst_portable.comm.base import Handle, Handles, Message, Transport, WrappedTransport
from burst_portable.comm.torch_dist import named_error


class TwoLevelTransport(WrappedTransport):
    """See `comm.base.Transport`. All messages before the first pass use `intra_node`.

    Args:
        intra_node: Transport of messages inside a node.
        connect: Makes the transport of messages between nodes. Called in the first pass, on all ranks.
        ranks_per_node: Ranks per node.
    """

    def __init__(self, intra_node: Transport, connect: Callable[[], Transport], ranks_per_node: int) -> None:
        super().__init__(intra_node)
        self.intra_node, self.ranks_per_node = intra_node, ranks_per_node
        self.inter_node: Transport | None = None
        self._connect = connect

    def begin(self, digest: bytes = b"", bytes_per_sender: int = 0) -> None:
        self.intra_node.begin(digest, bytes_per_sender)
        if self.inter_node is None:
            self.inter_node = self._connect()
        self.inter_node.begin(digest, bytes_per_sender)

    def end(self) -> None:
        if self.inter_node is not None:
            self.inter_node.end()
        self.intra_node.end()

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        if self.inter_node is None:
            return self.intra_node.post(sends, receives, label)
        send_handles, receive_handles = dict[int, Handle](), dict[int, Handle]()
        for transport, is_inter_node in ((self.inter_node, True), (self.intra_node, False)):
            chosen = [[self._is_inter_node(m) == is_inter_node for m in side] for side in (sends, receives)]
            if any(map(any, chosen)):
                posted = transport.post(list(compress(sends, chosen[0])), list(compress(receives, chosen[1])), label)
                send_handles.update(zip(compress(range(len(sends)), chosen[0]), posted[0], strict=True))
                receive_handles.update(zip(compress(range(len(receives)), chosen[1]), posted[1], strict=True))
        return [send_handles[i] for i in range(len(sends))], [receive_handles[i] for i in range(len(receives))]

    def _is_inter_node(self, message: Message) -> bool:
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
    """Make two transports for one group: that group's for messages inside nodes, and a new group's between nodes.

    The new group has twice the timeout of a message, so that our error comes first. `options` returns further arguments
    of `new_group` for a timeout; used if the group has one backend.
    """
    intra_node = transport(group)

    def connect() -> Transport:
        ranks = dist.get_process_group_ranks(group)
        arguments: dict[str, Any] = {"backend": dist.get_backend_config(group), "use_local_synchronization": True}
        group_timeout = timedelta(seconds=2 * timeout)
        arguments.update({"timeout": group_timeout} if "," in str(arguments["backend"]) else options(group_timeout))
        if ranks != sorted(ranks):  # only releases of torch with this option can make such groups
            arguments["sort_ranks"] = False
        try:
            with _equally_many_groups(intra_node):
                return transport(dist.new_group(ranks, **arguments))
        except RuntimeError as error:
            what = f"rank {dist.get_rank(group)}, connecting nodes: meeting all ranks"
            raise named_error(error, what, group) from error

    return TwoLevelTransport(intra_node, connect, ranks_per_node)


@contextmanager
def _equally_many_groups(transport: Transport) -> Iterator[None]:
    """Add groups of this rank alone, until it has as many process groups as the rank of `transport` with most.

    With `use_local_synchronization`, torch names a group by its ranks and the number of groups that this rank has. A
    rank in fewer groups than others would wait for them under another name, until the timeout.
    """
    from torch.distributed import distributed_c10d  # absent from a torch without process groups

    here = len(distributed_c10d._world.pg_names)
    shared = transport.share(here.to_bytes(8, "little"), "counting process groups")
    missing = max(int.from_bytes(one, "little") for one in shared) - here
    added = [_group_of_this_rank() for _ in range(missing)]
    try:
        yield
    finally:
        for group in added:
            dist.destroy_process_group(group)


def _group_of_this_rank() -> dist.ProcessGroup:
    """Return a new group of this rank alone. NCCL may split the default group, which all its ranks must do together."""
    backend = "gloo" if dist.is_gloo_available() else None
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    return group
