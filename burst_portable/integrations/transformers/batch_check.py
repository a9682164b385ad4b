"""Check that all ranks of a sequence divided the same batch.

Loaders that give each process batches of its own (a dispatcher, a streaming dataset) give ranks of one sequence
different rows of equal shape. Attention would join them without an error. Each shard therefore carries a checksum of
the undivided batch, which ranks compare before the model runs: 8 bytes per rank and call.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from burst_portable.comm.agreement import agree, call_signature
from burst_portable.errors import MismatchError
from burst_portable.mesh import Mesh

KEY = "batch_checksum"
"""Name of the checksum among the arguments that `ShardedModel.shard` returns."""
NEXT_STEP = (
    "load the same rows on all ranks of a sequence: shard the dataset over data-parallel ranks alone, without a "
    "dispatcher that splits batches"
)
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as int64
_CALL = "call of the model"


def checksum(*tensors: Tensor | None) -> Tensor:
    """Return a checksum of integer tensors, int64 of shape []; it depends on every value and its place.

    It is computed on the tensors' device and not read.
    """
    device = next(x.device for x in tensors if x is not None)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        if x is not None:
            total = total * _GOLDEN + ((x.reshape(-1).to(torch.int64) + 1) * _weights(x.numel(), device)).sum()
        total += 1
    return total


@lru_cache(maxsize=4)
def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random int64 numbers, one for each place."""
    weights = torch.arange(1, count + 1, device=device) * _GOLDEN
    return ((weights ^ (weights >> 29)) * _GOLDEN) | 1


class BatchCheck:
    """Compares the checksums of the ranks, call after call.

    Over a host transport the ranks compare at once. Over a device transport the comparison stays on the device, so
    that the host does not wait; the next call, or `confirm`, reads its result.
    """

    def __init__(self) -> None:
        self._differs: tuple[Tensor, torch.Event | None] | None = None

    def compare(self, mine: Tensor | None, mesh: Mesh, device: torch.device) -> None:
        """Compare this rank's checksum with those of the other ranks. All ranks of the mesh must call this.

        Args:
            mine: what `checksum` returned; None for a batch that was not divided by `shard`.
            mesh: ranks of the sequence.
            device: device of the model's arguments.

        Raises:
            MismatchError: ranks have different batches, on every rank; over a device transport, those of the last call.
        """
        transport = mesh.transport(device.type)
        transport.check_in_sync()
        self.confirm()
        if mine is None:
            mine = torch.zeros((), dtype=torch.int64)
        if transport.host:
            facts = {"pass": _CALL, "rows of the batch": f"checksum {int(mine) % 2**64:016x}"}
            agree(transport, call_signature(facts))
            return
        sent = mine.to(device, non_blocking=True).reshape(1)
        gathered = sent.new_empty(mesh.size)
        with transport.between_passes():
            transport.all_gather(sent.view(torch.uint8), [part.view(torch.uint8) for part in gathered.split(1)], _CALL)
        differs = torch.empty((), dtype=torch.bool, pin_memory=device.type != "cpu")
        differs.copy_((gathered != sent).any(), non_blocking=True)
        seen = None if device.type == "cpu" else torch.Event(device)
        if seen is not None:
            seen.record()
        self._differs = differs, seen

    def confirm(self) -> None:
        """Read the result of the last comparison on a device.

        Raises:
            MismatchError: the ranks had different batches.
        """
        pending, self._differs = self._differs, None
        if pending is not None:
            differs, seen = pending
            if seen is not None:
                seen.synchronize()
            if differs:
                raise MismatchError(
                    "the ranks of a sequence had different batches in the last call", next_step=NEXT_STEP
                )
