"""Check that all ranks of a sequence divided the same batch, and have the same parameters.

Loaders that give each process different batches (a dispatcher, a streaming dataset) give ranks of one sequence
different rows of equal shape. Attention would combine them without an error. Each shard therefore has a checksum of
the undivided batch. Before the model runs, ranks compare it and the number of labels by which the loss is divided. They
also compare a checksum of the parameters (of all in the first call, then of a sample), and the outputs that will be
gathered: 40 bytes per rank and call.

Tokens that the caller divided without `ShardedModel.shard` have no such checksum. Their number does not show whether
each rank has the full sequence, so ranks compare their tokens, which must differ.

A shard also has the checksums of its tokens and labels. Their change since then is added to the checksum of the batch,
so that ranks find a shard that was changed afterwards, without an additional exchange.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from burst_portable.comm.agreement import HINTS, Facts, agree, call_signature
from burst_portable.errors import InputError, MismatchError
from burst_portable.mesh import Mesh
from burst_portable.utils.checksum import GOLDEN, INTEGERS, position_weights

KEY = "batch_checksum"
"""Name of the checksum among the arguments that `ShardedModel.shard` returns."""
_FACTS = "rows of the batch", "number of labels", "values of the parameters", "requested outputs"
_MASKED_ROWS = "rows of the masked batch"
"""The first fact for models of masked tokens, which a collator chooses by random numbers."""
_SAMPLED, _SAMPLED_VALUES = 4, 1 << 16  # smallest and largest parameters of each call, values of each smallest one
_ROTATED, _STRIDED_VALUES = 16, 128  # other parameters of each call, values of each largest or other one
_STEP = 40503  # elements between the first values of two calls; odd, so that the column of a matrix changes as well
_CALL, _FIRST = "call of the model", "first call of the model"


def checksum(*tensors: Tensor | None) -> Tensor:
    """Return a checksum of integer tensors, int64 of shape []; it depends on every value and its place.

    It is computed on the tensors' device and not read.
    """
    device = next(x.device for x in tensors if x is not None)
    values = torch.cat([x.reshape(-1).to(torch.int64) for x in tensors if x is not None])
    lengths = [-1 if x is None else x.numel() for x in tensors]  # which argument has which values
    constant = reduce(lambda total, length: (total * GOLDEN + length + 2) % 2**63, lengths, 0)
    return ((values + 1) * _weights(values.numel(), device)).sum() + constant


def shard_checksum(batch: Tensor, ids: Tensor, labels: Tensor | None, count: Tensor | None) -> Tensor:
    """Return the checksums of an undivided batch, and of the tokens and labels of a shard of it: int64, ``[4]``.

    The last number is the `count` of labels of the batch.
    """
    missing = torch.zeros_like(batch)
    return torch.stack(
        [batch, checksum(ids), *((missing, missing) if labels is None or count is None else (checksum(labels), count))]
    )


def has_all_labels(recorded: Tensor | None, count: Any) -> Tensor | None:
    """Return whether `count` is at least the labels of the batch: bool ``[]``. None: they are unknown."""
    if recorded is None or not recorded.dim() or count is None:
        return None
    found: Tensor = recorded[3] <= count
    return found


def checksum_of_call(recorded: Tensor, kwargs: Mapping[str, Any], device: torch.device) -> Tensor:
    """Return the checksum of the undivided batch ``[]``, changed if this rank's tokens or labels have changed.

    `shard` returns one tensor as `labels` and as `shift_labels`. Losses read one of them, so a caller who replaces only
    the other would train on the labels of before.

    Args:
        recorded: The result of `shard_checksum`, or of `checksum` for tokens that nothing could change.
        kwargs: Arguments of the call. It may have the embeddings of tokens instead of their ids, and no labels.
        device: Device of the result.
    """
    recorded = recorded.to(device, non_blocking=True)
    if not recorded.dim():
        return recorded
    total = recorded[0]
    if (ids := kwargs.get("input_ids")) is not None:
        total = total + (checksum(ids) - recorded[1])
    given = kwargs.get("shift_labels"), kwargs.get("labels")
    for labels in {id(x): x for x in given if x is not None}.values():
        total = total + (checksum(labels) - recorded[2])
    return total


_weights = lru_cache(maxsize=4)(position_weights)


def parameter_checksum(parameters: Iterable[Tensor], device: torch.device, calls: int = 0) -> Tensor:
    """Return a checksum of a sample of the trainable parameters on a device, by their bits.

    If a training loop does not add the ranks' gradients, the parameters that its optimizer has differ between ranks
    from the first step on. Small ones such as norms may be equal after it: in bf16 they may not move, and the optimizer
    may not have them. The sample therefore has the smallest parameters, and a few values of the largest and of others,
    which change from call to call. Parameters that FSDP shards do not count: each rank has another part of them.

    Args:
        parameters: Parameters of the model, in the order of all ranks.
        device: Device of the result.
        calls: Number of earlier calls, equal on all ranks. It selects the values. Default: 0.
    """
    plain = [p for p in _plain(parameters, device) if p.requires_grad]
    by_size = sorted(plain, key=Tensor.numel)
    if not plain:
        return torch.zeros((), dtype=torch.int64, device=device)
    values = [p.detach().reshape(-1)[:_SAMPLED_VALUES].contiguous().view(torch.uint8) for p in by_size[:_SAMPLED]]
    groups = -(-len(plain) // _ROTATED)
    for p in by_size[-_SAMPLED:] + plain[calls % groups :: groups]:
        if p.numel() and p.is_contiguous() and (bits := INTEGERS.get(p.dtype.itemsize)) is not None:
            stride = -(-p.numel() // _STRIDED_VALUES)
            values.append(p.detach().view(-1).view(bits)[calls * _STEP % stride :: stride])
    sampled = torch.cat([x.to(torch.int64) for x in _by_dtype(values)])
    longest = 1 << len(sampled).bit_length()  # calls have samples of other sizes, and use the same weights
    return (sampled * _weights(longest, device)[: len(sampled)]).sum()


def _by_dtype(tensors: list[Tensor]) -> list[Tensor]:
    """Return vectors concatenated by dtype: one operator for each dtype, and not one for each parameter."""
    grouped: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        grouped.setdefault(x.dtype, []).append(x)
    return [torch.cat(group) for group in grouped.values()]


def checksum_of_all(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a checksum of all parameters on a device, by their bits. It reads them once, and copies none.

    Ranks with different seeds or checkpoints may have equal small parameters, for example new norms.
    """
    plain = [p.detach() for p in _plain(parameters, device) if p.dtype.itemsize in INTEGERS]
    if not plain:
        return torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.stack([p.view(INTEGERS[p.dtype.itemsize]).sum(dtype=torch.int64) for p in plain])
    return (sums * _weights(len(plain), device)).sum()


def _plain(parameters: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return the parameters on a device that are not sharded."""
    return [p for p in parameters if p.device == device and not is_sharded(p) and p.layout is torch.strided]


def is_sharded(parameter: Tensor) -> bool:
    """Return whether FSDP2 (DTensor) or FSDP1 (a mark of torch's) shards a parameter."""
    return isinstance(parameter, DTensor) or getattr(parameter, "_fsdp_flattened", False)


def _number(x: Tensor | float | None, device: torch.device) -> Tensor:
    """Return a number as int64 of shape [] on a device; -1 for None. Only a tensor of another device is copied."""
    if isinstance(x, Tensor):
        return x.sum().to(device, torch.int64, non_blocking=True)
    return torch.full((), -1 if x is None else int(x), dtype=torch.int64, device=device)


def rows_checksum(tokens: Tensor, rank: int) -> Tensor:
    """Return a checksum of a rank's ids ``[B, S]`` or embeddings ``[B, S, H]``: int64 of shape [], on their device.

    For rows that repeat one token, it is the rank: all parts of such a sequence are equal.
    """
    bits = INTEGERS.get(tokens.element_size(), torch.uint8)
    rows = tokens if tokens.dim() == 2 else tokens.detach().contiguous().view(bits).sum(dim=-1)
    return torch.where((rows == rows[:, :1]).all(), rank, checksum(rows))


def equal_rows() -> InputError:
    """Return the error of a call for which the caller gave all ranks equal tokens."""
    return InputError(
        "all ranks of a sequence have the same tokens, as if it repeated itself",
        next_step="divide them (model(**sharded.shard(batch)) does), and pass seq_len= of the undivided sequence; if "
        "it does repeat itself, pass position_ids=, divided like the tokens",
    )


class HostCopy:
    """A copy of a small tensor on its way to the host. The host waits for it only when it is read."""

    def __init__(self, x: Tensor, mesh: Mesh) -> None:
        has_streams = mesh.backend_for(x.device.type).capabilities.streams
        self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=has_streams)
        self._copy.copy_(x, non_blocking=True)
        self._copied = torch.Event(x.device) if has_streams else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> Any:
        """Return the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()


class BatchCheck:
    """Compares the checksums of the ranks, call after call.

    Over a host transport the ranks compare at once. Over a device transport the comparison stays on the device, so
    that the host does not wait; the next call, or `confirm`, reads its result.

    `has_masked_tokens`: Whether batches have tokens that a collator masked. Default: they do not.
    """

    def __init__(self, *, has_masked_tokens: bool = False) -> None:
        self._facts = (_MASKED_ROWS, *_FACTS[1:]) if has_masked_tokens else _FACTS
        self._differs: HostCopy | None = None
        self._calls = 0  # successful ones: an error may have been raised by one rank before it called `compare`

    def compare(
        self,
        batch: Tensor | None,
        labels: Any,
        parameters: Iterable[Tensor],
        mesh: Mesh,
        device: torch.device,
        outputs: str = "",
        rows: Tensor | None = None,
        settings: Callable[[], Facts] | None = None,
    ) -> None:
        """Compare this rank's batch and parameters with those of the other ranks. All ranks of the mesh must call this.

        The first call compares all parameters, later ones a sample.

        Args:
            batch: The result of `checksum_of_call`. None for a batch that was not divided by `shard`.
            labels: Number of labels by which the model divides its loss, as a number or a tensor. None: it does not.
            parameters: Parameters of the model.
            mesh: The ranks of the sequence.
            device: Device of the model's arguments.
            outputs: Description of the outputs that will be gathered. Default: none.
            rows: Checksum ``[]`` of this rank's tokens, which must not be equal on all ranks. Default: they may be.
            settings: Function that returns the facts of the model that the first call compares. Default: none.

        Raises:
            MismatchError: On every rank, if batches, numbers of labels, parameters or outputs differ. Over a device
                transport: if those of the last call did.
            InputError: Likewise, if `rows` are equal.
        """
        transport = mesh.transport(device.type)
        transport.check_in_sync()
        self.confirm()
        if not self._calls and settings is not None:
            agree(transport, call_signature({"pass": _FIRST, **settings()}))
        given = [_number(x, device) for x in (batch, labels)]
        of_outputs = _number(zlib.crc32(outputs.encode()), device)
        if self._calls:
            of_parameters = parameter_checksum(parameters, device, self._calls - 1)
        else:
            of_parameters = checksum_of_all(parameters, device)
        mine = torch.stack([*given, of_parameters, of_outputs])
        if transport.host:
            batch_sum, count, parameter_sum, _ = mine.tolist()
            checksums = [f"checksum {x % 2**64:016x}" for x in (batch_sum, parameter_sum)]
            texts = checksums[0], str(count), checksums[1], outputs
            order = {} if rows is None else {"position_ids": "none"}  # these ranks make the exchange below
            agree(transport, call_signature({"pass": _CALL, **order, **dict(zip(self._facts, texts, strict=True))}))
            self._calls += 1
            if rows is not None and transport.size > 1:
                shared = transport.share(int(rows).to_bytes(8, "little", signed=True), _CALL)
                if all(other == shared[0] for other in shared):
                    raise equal_rows()
            return
        self._calls += 1
        mine = torch.cat([mine, (mine.new_full((), mesh.rank) if rows is None else rows).reshape(1)])
        gathered = mine.new_empty(mesh.size, len(mine))
        with transport.between_passes():
            parts = [part.reshape(-1).view(torch.uint8) for part in gathered]
            transport.all_gather(mine.view(torch.uint8), parts, _CALL)
        self._differs = HostCopy((gathered != mine).any(dim=0), mesh)

    def confirm(self) -> None:
        """Read the result of the last comparison on a device.

        Raises:
            MismatchError: If the ranks had different batches, numbers of labels, parameters or outputs.
            InputError: If they had equal rows, which the caller divided.
        """
        pending, self._differs = self._differs, None
        if pending is None:
            return
        *facts, rows_differ = pending.read()
        if not rows_differ:
            raise equal_rows()
        for fact, differ in zip(self._facts, facts, strict=True):
            if differ:
                raise MismatchError(
                    f"the ranks of a sequence differed in the {fact} of the last call", next_step=HINTS[fact]
                )
